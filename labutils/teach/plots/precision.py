"""How large numbers are, against what a format can hold."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from labutils.floats import FloatFormat
from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture

LOST, COARSE, KEPT = style.SERIES[1], "#FFB04D", style.SERIES[0]
_LANE = 0.3  # inches for each format under the histogram


@style.drawn
def exponent_histogram(
    counts: Mapping[int, int],
    formats: Sequence[FloatFormat],
    *,
    scale: float = 1.0,
    title: str | None = None,
) -> Picture:
    """The share of numbers with each exponent, after multiplication with `scale`, over the ranges of `formats`.

    Bars are colored by what becomes of them in the first format: kept, kept with fewer digits (subnormal), or lost (zero, or too large).
    A range is filled where numbers are normal and hollow where they are subnormal.
    """
    if not formats:
        raise ValueError(
            "exponent_histogram needs at least one format: exponent_histogram(counts, [floats.FP16])"
        )
    total = sum(counts.values())
    if not total:
        raise ValueError("there is nothing to count: all numbers are zero, infinite or NaN")
    shift = math.log2(scale) if scale > 0 and math.isfinite(scale) else math.nan
    if not shift.is_integer():
        raise ValueError(f"scale={scale} is not a power of two: exponents would move by a fraction")
    shares = {exponent + int(shift): count / total for exponent, count in counts.items()}
    first = formats[0]
    bottoms = {
        fmt: fmt.min_exponent - fmt.mantissa_bits - 1 for fmt in formats
    }  # half of the smallest subnormal rounds up to it

    def color(exponent: int) -> str:
        if exponent < bottoms[first] or exponent > first.max_exponent:
            return LOST
        return KEPT if exponent >= first.min_exponent else COARSE

    lost = sum(share for exponent, share in shares.items() if color(exponent) == LOST)
    coarse = sum(share for exponent, share in shares.items() if color(exponent) == COARSE)
    seen = [
        exponent for exponent, share in shares.items() if share > 5e-4
    ]  # single strays would stretch the axis
    low = min(*seen, *(max(bottom, -50) for bottom in bottoms.values())) - 2
    high = max(*seen, *(min(fmt.max_exponent, 20) for fmt in formats)) + 2
    peak = max(shares.values())
    tall, lanes = 1.7, _LANE * len(formats) + 0.08
    left = max(style.width_of(fmt.name, weight="bold") for fmt in formats) + 0.45
    figure, axes = style.canvas(
        title
        or f"In {first.name}, {lost:.0%} of these numbers are lost and {coarse:.0%} lose digits",
        height=tall + lanes,
        left=max(left, 0.75),
        top=0.3,
        xlabel="exponent: numbers from 2ᵉ to 2ᵉ⁺¹",
    )
    unit = peak / tall  # what an inch of the histogram stands for
    axes.set(xlim=(low, high), ylim=(-lanes * unit, peak * 1.02))
    for exponent in seen:
        share = shares[exponent]
        axes.add_patch(Rectangle((exponent, 0), 1, share, facecolor=color(exponent), **style.EDGE))
    axes.axhline(0, color=style.FAINT, linewidth=0.8)
    ticks, names = [], []
    for lane, fmt in enumerate(formats):
        y, deep = -((lane + 1) * _LANE) * unit, 0.18 * unit
        edges = max(bottoms[fmt], low), fmt.min_exponent, min(fmt.max_exponent + 1, high)
        for start, stop, fill in (
            (edges[0], edges[1], style.PAPER),
            (edges[1], edges[2], style.NEUTRAL[0]),
        ):
            if stop > start:
                axes.add_patch(
                    Rectangle(
                        (max(start, low), y),
                        stop - max(start, low),
                        deep,
                        facecolor=fill,
                        **style.EDGE,
                    )
                )
        ticks.append(y + deep / 2)
        names.append(fmt.name)
    step = 10 ** math.floor(math.log10(peak))
    marks = [step * k for k in range(1, 11) if step * k <= peak * 1.02]
    marks = marks if len(marks) <= 4 else marks[1::2]
    axes.set_yticks(
        [*ticks, *marks],
        [*names, *(f"{mark:.0%}" if mark >= 0.01 else f"{mark:.1%}" for mark in marks)],
    )
    axes.tick_params(axis="y", length=0)
    style.key(axes, [("normal", KEPT, ""), ("subnormal", COARSE, ""), ("lost", LOST, "")])
    fates = f"most have the exponent {max(shares, key=shares.get)}; in {first.name} {lost:.0%} are lost and {coarse:.0%} are subnormal"
    ranges = f"Under it the ranges of {style.listed([fmt.name for fmt in formats])}."
    return Picture(
        figure, f"Histogram of {total:,} numbers by exponent, times {scale:g}: {fates}. {ranges}"
    )
