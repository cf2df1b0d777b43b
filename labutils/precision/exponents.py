"""How large numbers are: their exponents counted, and which of them a format would lose."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from labutils import floats, units
from labutils.floats import FloatFormat


def exponents(tensors: Iterable[Tensor]) -> Counter[int]:
    """How many numbers have each exponent ⌊log₂|x|⌋, over all tensors.

    Zeros, infinities and NaN have none and are left out.

    >>> exponents([Tensor([1.0, 1.5, -2.0, 0.0, 0.3])]) == {-2: 1, 0: 2, 1: 1}
    True
    """
    counts: Counter[int] = Counter()
    units.instance(tensors, Iterable, "exponents")
    for tensor in tensors:
        units.instance(tensor, Tensor, "the list of exponents")
        values = tensor.detach().double().flatten()
        found = values[values.isfinite() & (values != 0)].frexp().exponent - 1
        levels, times = found.unique(return_counts=True)
        counts.update(dict(zip(levels.tolist(), times.tolist(), strict=True)))
    return counts


def fate(
    counts: Mapping[int, int], fmt: FloatFormat | str, scale: float | int = 1.0
) -> dict[str, float]:
    """The shares of the counted numbers that become zero, subnormal, normal or too large in `fmt`.

    >>> fate({-30: 1, -20: 2, 0: 4, 17: 1}, "fp16")
    {'zero': 0.125, 'subnormal': 0.25, 'normal': 0.5, 'too large': 0.125}

    The numbers are taken times `scale`, a power of two, so that exponents move by whole numbers.
    Half of the smallest subnormal itself is counted as what it borders on.

    Raises ValueError for a scale that is no power of two.
    """
    units.instance(counts, Mapping, "fate")
    fmt = floats.named(fmt)
    shift = math.log2(scale) if scale > 0 and math.isfinite(scale) else math.nan
    if not shift.is_integer():
        raise ValueError(f"scale={scale} is not a power of two: exponents would move by a fraction")
    fates = dict.fromkeys(("zero", "subnormal", "normal", "too large"), 0)
    for exponent, count in counts.items():
        fates[_fate(exponent + int(shift), fmt)] += count
    total = sum(fates.values())
    return {name: count / total if total else 0.0 for name, count in fates.items()}


def _fate(exponent: int, fmt: FloatFormat) -> str:
    if exponent > fmt.max_exponent:
        return "too large"
    if exponent >= fmt.min_exponent:
        return "normal"
    # Half of the smallest subnormal and more rounds up to it.
    return "subnormal" if exponent >= fmt.min_exponent - fmt.mantissa_bits - 1 else "zero"
