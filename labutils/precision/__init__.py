"""Mixed precision: rounding, master weights, loss scaling, rounded sums, autocast, exponents."""

from labutils.precision.autocast import (
    FULL_OPS,
    HALF_OPS,
    autocast,
    half_here,
    own_formats,
    wide_products,
)
from labutils.precision.exponents import exponents, fate
from labutils.precision.master import MasterWeights, RoundedWeights, half_sgd
from labutils.precision.rounding import round_to
from labutils.precision.scaler import LossScaler, clipped_step, scales
from labutils.precision.sums import cross_entropy, kahan_sum, pairwise_sum, running_sum
