"""Learning rate and batch size: scaling rules and schedules, the gradient noise scale, steps to a
target. With torch, and imported by name: `ranks`."""

from labutils.scaling.critical import Hyperbola, fit
from labutils.scaling.noise import Spread, estimate_spread, noise_scale
from labutils.scaling.rules import (
    POWERS,
    Rule,
    cosine,
    gradual,
    scale_decay,
    scale_lr,
    shrinkage,
    warm_up,
    wsd,
)
