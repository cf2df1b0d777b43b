"""How the learning rate follows the batch size: linear and square-root scaling rules, gradual
warm-up, cosine, and warm-up–stable–decay (WSD), all per iteration; what weight decay then does."""

import math
from collections.abc import Callable
from typing import Literal

from labutils import units

Rule = Literal["linear", "square root", "none"]
POWERS: dict[str, float] = {"none": 0.0, "square root": 0.5, "linear": 1.0}
"""The power of the batch size that each rule raises the learning rate by."""


def scale_lr(lr: float, ratio: float, rule: Rule) -> float:
    """The learning rate for a batch `ratio` times as large as the one that `lr` was found for.

    What weight decay goes with it: `scale_decay`.

    >>> [round(scale_lr(0.1, 32, rule), 3) for rule in POWERS]
    [0.1, 0.566, 3.2]
    >>> from math import sqrt
    >>> lr, ratio = 0.1, 16
    >>> scale_lr(lr, ratio, "linear") == lr * ratio  # linear
    True
    >>> scale_lr(lr, ratio, "square root") == lr * sqrt(ratio)  # square root
    True

    Raises ValueError for an unknown rule.
    Source: P. Goyal et al., 1706.02677, section 2.1 (linear).
    """
    power = units.entry(POWERS, rule, "there is no rule")
    return units.positive(lr, "lr") * units.positive(ratio, "ratio") ** power


def scale_decay(decay: float, ratio: float, rule: Rule) -> float:
    """The weight decay for a batch `ratio` times as large, with which an epoch decays a weight as
    much as before: it has 1/ratio of the steps, and each decays by learning rate · decay.

    >>> [round(scale_decay(0.1, 16, rule), 3) for rule in POWERS]
    [1.6, 0.4, 0.1]

    Source: X. Wang and L. Aitchison, 2405.13698: the time scale 1 / (lr·decay) counts in epochs.
    """
    return units.positive(decay, "decay", or_zero=True) * ratio / scale_lr(1.0, ratio, rule)


def warm_up(step: int, steps: int, *, start: float, end: float) -> float:
    """The learning rate of iteration `step` (from 0), which grows by equal amounts from `start` for
    `steps` iterations and then stays at `end`.

    Goyal's gradual warm-up starts at η and ends at kη; what is often told, and what most libraries
    do, starts at 0.

    >>> [warm_up(step, 2, start=1.0, end=3.0) for step in range(4)]
    [1.0, 2.0, 3.0, 3.0]

    Source: P. Goyal et al., 1706.02677, section 2.2: a constant increment at each iteration.
    """
    step, steps = units.whole(step, "step"), units.whole(steps, "steps")
    start, end = _rates(start=start, end=end)
    return start + (end - start) * min(step / steps, 1) if steps else end


def gradual(ratio: float, share: float) -> Callable[[int, int], float]:
    """Goyal's warm-up as a function of (step, steps): what to multiply the scaled learning rate of
    a batch `ratio` times as large by, from 1/ratio to 1 in a share of all iterations.

    >>> gradual(ratio=4, share=0.5)(0, 100)
    0.25
    """
    first = 1 / units.positive(ratio, "ratio")
    share = units.positive(share, "share", or_zero=True)
    return lambda step, steps: warm_up(step, round(share * steps), start=first, end=1.0)


def cosine(step: int, steps: int, *, peak: float, end: float = 0.0) -> float:
    """The learning rate of iteration `step` (from 0) of so many `steps`: from `peak` to `end` along
    half a cosine.

    >>> [round(cosine(step, 4, peak=1.0), 2) for step in range(6)]
    [1.0, 0.85, 0.5, 0.15, 0.0, 0.0]
    """
    step, steps = units.whole(step, "step"), units.whole(steps, "steps", 1)
    peak, end = _rates(peak=peak, end=end)
    return end + (peak - end) * (1 + math.cos(math.pi * (min(step, steps) / steps))) / 2


def wsd(step: int, steps: int, *, peak: float, decay: int, end: float = 0.0) -> float:
    """The learning rate of iteration `step` (from 0): `peak`, and in the last `decay` of `steps`
    iterations down to `end` in equal amounts. Until then nothing depends on `steps`.

    >>> [wsd(step, 6, peak=1.0, decay=2) for step in range(7)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]

    Raises ValueError for a decay longer than all steps.
    """
    step, steps = units.whole(step, "step"), units.whole(steps, "steps", 1)
    peak, end = _rates(peak=peak, end=end)
    if (decay := units.whole(decay, "decay", 1)) > steps:
        raise ValueError(f"a decay of {decay} does not fit {steps} steps: use {steps} at most")
    return peak + (end - peak) * min(max(step - (steps - decay), 0) / decay, 1)


def _rates(**rates: float) -> list[float]:
    """As floats, after checking that they are learning rates."""
    return [units.positive(rate, name, or_zero=True) for name, rate in rates.items()]


def shrinkage(lr: float, decay: float, steps: float) -> float:
    """What AdamW's decoupled weight decay alone leaves of a weight after so many steps.

    Each step multiplies by 1 − lr·decay. A batch k times as large takes k times fewer steps per
    epoch, so as much is left as before with a learning rate of k·lr and the same decay, or with
    √k·lr and √k·decay.

    Raises ValueError where lr·decay is above 1.
    """
    product = units.positive(lr, "lr", or_zero=True) * units.positive(decay, "decay", or_zero=True)
    if product > 1:
        raise ValueError(f"lr·decay = {product:g} turns the sign of a weight: use 1 at most")
    return (1 - product) ** units.positive(steps, "steps", or_zero=True)
