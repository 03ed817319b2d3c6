"""What training reveals: leakage in bits from a schedule of sample rates and noise multipliers alone."""

from opacus_reconbound.leakage.calibration import batch_size_for_leakage as batch_size_for_leakage
from opacus_reconbound.leakage.calibration import noise_for_leakage as noise_for_leakage
from opacus_reconbound.leakage.calibration import noise_scale_for_leakage as noise_scale_for_leakage
from opacus_reconbound.leakage.calibration import sample_rate_for_leakage as sample_rate_for_leakage
from opacus_reconbound.leakage.calibration import steps_for_leakage as steps_for_leakage
from opacus_reconbound.leakage.exact import ExactSum as ExactSum
from opacus_reconbound.leakage.gaussian import realised_sample_rate as realised_sample_rate
from opacus_reconbound.leakage.gaussian import step_ceiling as step_ceiling
from opacus_reconbound.leakage.gaussian import step_charge as step_charge
from opacus_reconbound.leakage.gaussian import step_charges as step_charges
from opacus_reconbound.leakage.gaussian import step_leakage as step_leakage
from opacus_reconbound.leakage.schedule import Run as Run
from opacus_reconbound.leakage.schedule import Schedule as Schedule

__all__ = [
    "ExactSum",
    "Run",
    "Schedule",
    "batch_size_for_leakage",
    "noise_for_leakage",
    "noise_scale_for_leakage",
    "realised_sample_rate",
    "sample_rate_for_leakage",
    "step_ceiling",
    "step_charge",
    "step_charges",
    "step_leakage",
    "steps_for_leakage",
]
