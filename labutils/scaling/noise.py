"""The gradient noise scale tr Σ / |G|²: from how long gradients of small and large batches are."""

from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from labutils import units


class Spread(NamedTuple):
    """tr Σ, the variance of one example's gradient summed over parameters, and |G|², the squared
    length of the true gradient: both estimated without bias, so |G|² may come out negative."""

    trace: float
    signal: float


def estimate_spread(small: float, large: float, b: float, B: float) -> Spread:
    """tr Σ and |G|² from mean squared lengths of gradients: `small` of b examples, `large` of B.

    A batch of b has E|g|² = |G|² + tr Σ / b: two sizes are two equations. Gradients of single
    examples are b = 1 and their mean B = n; ranks before and after their all-reduce are b and N·b.

    >>> estimate_spread(small=9.0, large=3.0, b=1, B=4)
    Spread(trace=8.0, signal=1.0)

    Raises ValueError unless 0 < b < B and both lengths are numbers from 0 on.
    Source: S. McCandlish et al., An empirical model of large-batch training, 1812.06162.
    """
    if not 0 < b < B:
        raise ValueError(f"two batch sizes with 0 < b < B are needed, got b = {b} and B = {B}")
    small = units.positive(small, "small", or_zero=True)
    large = units.positive(large, "large", or_zero=True)
    trace = (small - large) / (1 / b - 1 / B)
    return Spread(trace, small - trace / b)


def noise_scale(found: Iterable[Spread]) -> float:
    """B_simple, in examples: the ratio of the mean tr Σ to the mean |G|², over seeds or steps.

    Not the mean of ratios: one |G|² near zero would be all that counts.

    >>> noise_scale([Spread(8.0, 1.0), Spread(8.0, 3.0)])
    4.0

    Raises ValueError where the mean |G|² is not above 0.
    """
    for each in (found := list(found)):
        units.instance(each, Spread, "noise_scale")
    signal = fmean(each.signal for each in found) if found else 0.0
    if not signal > 0:  # nor of gradients that are no numbers
        raise ValueError(f"the mean |G|² is {signal:.3g}: average over more seeds or examples")
    return fmean(each.trace for each in found) / signal
