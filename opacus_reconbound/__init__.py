"""How well could anyone reconstruct a training record? Certified lower bounds for DP-SGD, live in Opacus.

Importing the package registers the accountants ``"rdp+mi"`` and ``"prv+mi"`` with Opacus; everything else loads when
it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import opacus_reconbound.accountants  # noqa: F401 - registers "rdp+mi" and "prv+mi"

if TYPE_CHECKING:
    from opacus_reconbound._fingerprint import fingerprint as fingerprint
    from opacus_reconbound.audit import Audit as Audit
    from opacus_reconbound.audit import AuditedRun as AuditedRun
    from opacus_reconbound.certificates.certificate import ReconstructionBound as ReconstructionBound
    from opacus_reconbound.certificates.certificate import SourceCertificate as SourceCertificate
    from opacus_reconbound.certificates.certify import certify as certify
    from opacus_reconbound.certificates.plan import SplitPlan as SplitPlan
    from opacus_reconbound.checks import Finding as Finding
    from opacus_reconbound.checks import guard as guard
    from opacus_reconbound.checks import inspect as inspect
    from opacus_reconbound.checks import keep_empty_batches as keep_empty_batches
    from opacus_reconbound.engine import Epsilon as Epsilon
    from opacus_reconbound.engine import Forecast as Forecast
    from opacus_reconbound.engine import calibrate_batch_size as calibrate_batch_size
    from opacus_reconbound.engine import calibrate_noise as calibrate_noise
    from opacus_reconbound.engine import calibrate_noise_scale as calibrate_noise_scale
    from opacus_reconbound.engine import calibrate_sample_rate as calibrate_sample_rate
    from opacus_reconbound.engine import calibrate_steps as calibrate_steps
    from opacus_reconbound.engine import forecast as forecast
    from opacus_reconbound.engine import make_private_with_rho as make_private_with_rho
    from opacus_reconbound.errors import ReconboundError as ReconboundError
    from opacus_reconbound.errors import ReconstructionBudgetExceeded as ReconstructionBudgetExceeded
    from opacus_reconbound.floor import Floor as Floor
    from opacus_reconbound.floor import attach as attach
    from opacus_reconbound.leakage.gaussian import step_leakage as step_leakage
    from opacus_reconbound.leakage.ledger import Ledger as Ledger
    from opacus_reconbound.leakage.schedule import Schedule as Schedule
    from opacus_reconbound.representations.pixels import Pixels as Pixels

_HOMES = {
    "Audit": "audit",
    "AuditedRun": "audit",
    "Epsilon": "engine",
    "Finding": "checks",
    "Floor": "floor",
    "Forecast": "engine",
    "Ledger": "leakage.ledger",
    "Pixels": "representations.pixels",
    "ReconboundError": "errors",
    "ReconstructionBound": "certificates.certificate",
    "ReconstructionBudgetExceeded": "errors",
    "Schedule": "leakage.schedule",
    "SourceCertificate": "certificates.certificate",
    "SplitPlan": "certificates.plan",
    "attach": "floor",
    "calibrate_batch_size": "engine",
    "calibrate_noise": "engine",
    "calibrate_noise_scale": "engine",
    "calibrate_sample_rate": "engine",
    "calibrate_steps": "engine",
    "certify": "certificates.certify",
    "fingerprint": "_fingerprint",
    "forecast": "engine",
    "guard": "checks",
    "inspect": "checks",
    "keep_empty_batches": "checks",
    "make_private_with_rho": "engine",
    "step_leakage": "leakage.gaussian",
}

__all__ = [
    "Audit",
    "AuditedRun",
    "Epsilon",
    "Finding",
    "Floor",
    "Forecast",
    "Ledger",
    "Pixels",
    "ReconboundError",
    "ReconstructionBound",
    "ReconstructionBudgetExceeded",
    "Schedule",
    "SourceCertificate",
    "SplitPlan",
    "attach",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_noise_scale",
    "calibrate_sample_rate",
    "calibrate_steps",
    "certify",
    "fingerprint",
    "forecast",
    "guard",
    "inspect",
    "keep_empty_batches",
    "make_private_with_rho",
    "step_leakage",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
