"""Other published bounds on reconstruction, as functions of the same schedule; each says what it assumes."""

from opacus_reconbound.comparisons.fano import exact_recovery as exact_recovery
from opacus_reconbound.comparisons.fisher import FisherInformation as FisherInformation
from opacus_reconbound.comparisons.fisher import fisher_information as fisher_information
from opacus_reconbound.comparisons.fisher import gaussian_prior_information as gaussian_prior_information
from opacus_reconbound.comparisons.fisher import van_trees_error as van_trees_error
from opacus_reconbound.comparisons.robustness import largest_success as largest_success
from opacus_reconbound.comparisons.robustness import prior_success as prior_success
from opacus_reconbound.comparisons.table import Comparison as Comparison
from opacus_reconbound.comparisons.table import compare as compare
from opacus_reconbound.comparisons.unbiased import midpoint_error as midpoint_error
from opacus_reconbound.comparisons.unbiased import replacement_rdp as replacement_rdp
from opacus_reconbound.comparisons.unbiased import unbiased_error_by_rdp as unbiased_error_by_rdp

__all__ = [
    "Comparison",
    "FisherInformation",
    "compare",
    "exact_recovery",
    "fisher_information",
    "gaussian_prior_information",
    "largest_success",
    "midpoint_error",
    "prior_success",
    "replacement_rdp",
    "unbiased_error_by_rdp",
    "van_trees_error",
]
