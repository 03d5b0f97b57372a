"""The ledger: proven privacy of each client, with its adjacency, its sampling and its theorem.

Accounting sees a mechanism's parameters and counts of participations, never data, gradients or torch. Figures are upper
bounds: the smallest of all theorems that apply, with its name; None and the reason where no theorem applies.
"""

from fedpriv.accounting.amplification import amplified_pure, amplified_rdp
from fedpriv.accounting.calibration import (
    Comparison,
    Contender,
    OutOfReachError,
    Point,
    calibrate,
    calibrate_ceiling,
    calibrate_membership,
    compare_mechanisms,
    equal_blocks,
    noise_to_signal,
    nominal_noise,
)
from fedpriv.accounting.ceiling import ceilings, membership_bound
from fedpriv.accounting.gaussian import (
    analytic_sigma,
    classic_sigma,
    extended_sigma,
    gaussian_delta,
    gaussian_epsilon,
)
from fedpriv.accounting.guarantees import guarantee, proven_epsilon, running_epsilon
from fedpriv.accounting.release import NoiseParameter, Release, release_with
from fedpriv.accounting.renyi import ORDERS, gaussian_rdp, laplace_rdp, pure_rdp, rdp_to_epsilon, vmf_rdp
from fedpriv.accounting.vmf_functions import log_mgf, mean_resultant_length
from fedpriv.core.records import Ceiling, Guarantee, Ledger, LedgerLine

__all__ = [
    "ORDERS",
    "Ceiling",
    "Comparison",
    "Contender",
    "Guarantee",
    "Ledger",
    "LedgerLine",
    "NoiseParameter",
    "OutOfReachError",
    "Point",
    "Release",
    "amplified_pure",
    "amplified_rdp",
    "analytic_sigma",
    "calibrate",
    "calibrate_ceiling",
    "calibrate_membership",
    "ceilings",
    "classic_sigma",
    "compare_mechanisms",
    "equal_blocks",
    "extended_sigma",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_rdp",
    "guarantee",
    "laplace_rdp",
    "log_mgf",
    "mean_resultant_length",
    "membership_bound",
    "noise_to_signal",
    "nominal_noise",
    "proven_epsilon",
    "pure_rdp",
    "rdp_to_epsilon",
    "release_with",
    "running_epsilon",
    "vmf_rdp",
]
