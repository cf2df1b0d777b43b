"""Mixed precision: round tensors to any format, keep fp32 master weights, scale the loss, cast by operation, and count exponents."""

from labutils.precision.autocast import FULL_OPS, HALF_OPS, autocast
from labutils.precision.exponents import exponents, fate
from labutils.precision.master import MasterWeights, RoundedWeights
from labutils.precision.rounding import pairwise_sum, round_to, running_sum
from labutils.precision.scaler import LossScaler

__all__ = [
    "FULL_OPS",
    "HALF_OPS",
    "LossScaler",
    "MasterWeights",
    "RoundedWeights",
    "autocast",
    "exponents",
    "fate",
    "pairwise_sum",
    "round_to",
    "running_sum",
]
