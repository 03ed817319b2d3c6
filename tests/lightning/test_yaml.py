"""The callback and the data module from YAML, as LightningCLI reads it; the whole command line is an example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spaces import Space, floor_after

from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.errors import FloorUnreachableError

jsonargparse = pytest.importorskip("jsonargparse")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent.parent


def raw_records(batch: Any) -> Any:
    return batch[0] * 0.0


def parsed(space: Space, content: dict) -> Any:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=space.L.Callback)
    parser.add_argument("--data", type=space.L.LightningDataModule)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return instantiate(parser.parse_string(yaml.safe_dump(content)))


def test_the_callback(space: Space, certificate: SourceCertificate, tmp_path: Path) -> None:
    path, floor = certificate.save(tmp_path / "c.json"), floor_after(certificate, 5.5)
    content = {
        "class_path": f"{space.ours.__name__}.ReconstructionBoundCallback",
        "init_args": {
            "certificate": str(path),
            "min_rho": floor,
            "delta": 1e-5,
            "on_breach": "stop",
            "verbose": False,
            "record": f"{__name__}.raw_records",
        },
    }
    callback = parsed(space, {"callback": content}).callback
    assert type(callback) is space.ours.ReconstructionBoundCallback
    assert callback.certificate == certificate
    assert (callback.min_rho, callback.delta) == (floor, 1e-5)
    model = space.module()
    space.trainer(tmp_path, callback).fit(model)
    assert model.updates == 5
    content["init_args"]["on_breach"] = "halt"
    with pytest.raises(jsonargparse.ArgumentError, match="halt"):
        parsed(space, {"callback": content})
    content["init_args"] |= {"on_breach": "stop", "min_rho": 0.99}
    with pytest.raises(FloorUnreachableError):
        parsed(space, {"callback": content})


def test_the_data_module(space: Space, tmp_path: Path) -> None:
    boring = f"{space.L.__name__}.demos.boring_classes.BoringDataModule"
    content = {
        "class_path": f"{space.ours.__name__}.PrivateDataModule",
        "init_args": {"data": {"class_path": boring}},
    }
    data = parsed(space, {"data": content}).data
    assert type(data) is space.ours.PrivateDataModule
    assert data._wrapped.__class__.__name__ == "BoringDataModule"


def test_the_example_names_what_there_is(space: Space, certificate: SourceCertificate) -> None:
    """Every argument of the example's YAML is one of the class that it names."""
    content = yaml.safe_load((ROOT / "examples" / "05_lightning_cli.yaml").read_text(encoding="utf-8"))
    (callback,) = content["trainer"]["callbacks"]
    assert callback["class_path"] == "opacus_reconbound.lightning.ReconstructionBoundCallback"
    made = space.ours.ReconstructionBoundCallback(
        **{**callback["init_args"], "certificate": certificate, "record": raw_records}
    )
    assert made.min_rho == 0.7
    assert content["data"]["class_path"] == "opacus_reconbound.lightning.PrivateDataModule"
