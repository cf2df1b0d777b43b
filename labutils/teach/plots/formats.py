"""Number formats: the bits of a code, where numbers lie, how far they reach, what is lost."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis

from labutils.floats import FloatFormat
from labutils.teach.plots import draw, style
from labutils.teach.plots.picture import Picture

# The bits of one code.


@style.drawn
def bit_pattern(fmt: FloatFormat, code: int) -> Picture:
    """The bits of one code, field by field, and what each field says about the value."""
    digits = fmt.bit_string(code)
    _, axes = style.canvas(
        f"{fmt.name} {digits} is {_number(fmt.decode(code))}",
        height=1.25,
        left=0.1,
        right=0.1,
        bottom=0.1,
    )
    width, height = style.inches(axes)
    gap = 0.14
    cell = min(0.42, (width - 2 * gap) / fmt.bits)
    widths = {"sign": int(fmt.signed), "exponent": fmt.exponent_bits, "mantissa": fmt.mantissa_bits}
    fields = [field for field, length in widths.items() for _ in range(length)]
    x = 0.0
    for field, run in itertools.groupby(zip(fields, digits.replace(" ", ""), strict=True), _first):
        start, color = x, style.FIELDS[field]
        for _, digit in run:
            fill = color if digit == "1" else style.PAPER
            draw.box(axes, x, 0.5, cell, 0.4, fill, clip_on=False)
            look: style.Look = {"color": style.on(fill), "size": 11 if cell > 0.2 else 8}
            axes.text(x + cell / 2, 0.7, digit, ha="center", va="center", **look)
            x += cell
        axes.plot([start, x], [0.96] * 2, color=color, linewidth=3, solid_capstyle="butt")
        # A long name may stand out to the right.
        middle = max((start + x) / 2, start + style.width_of(field) / 2 - gap / 2)
        axes.text(middle, 1.02, field, ha="center", va="bottom")
        x += gap
    axes.text(0, 0.24, _meaning(fmt, code), ha="left", va="center", size=10)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return Picture(axes.figure, f"{fmt.name}, code {digits}: {fmt.explain(code)}.")


def _first(pair: tuple[str, str]) -> str:
    return pair[0]


def _meaning(fmt: FloatFormat, code: int) -> str:
    """The value of a code, spelled out."""
    sign, exponent, mantissa, kind = fmt.fields(code)
    minus = "−" if sign else ""
    match kind:
        case "nan":
            return "NaN: this pattern is not a number"
        case "inf":
            return f"{minus}∞: top exponent, mantissa 0"
        case "zero":
            return f"{minus}0: everything 0 but the sign" if fmt.signed else "0"
    lead, power = (1, f"{exponent}−{fmt.bias}") if kind == "normal" else (0, f"{fmt.min_exponent}")
    fraction = f"({lead} + {mantissa}/{2**fmt.mantissa_bits})" if fmt.mantissa_bits else str(lead)
    note = "" if kind == "normal" else "   subnormal: exponent field 0, no leading 1"
    return f"{minus}$2^{{{power}}}$ × {fraction} = {_number(fmt.decode(code))}{note}"


# All values between two numbers.


@style.drawn
def number_line(
    formats: Sequence[FloatFormat],
    *,
    title: str,
    low: float | None = None,
    high: float | None = None,
    mark: float | None = None,
) -> Picture:
    """A row for each format with a tick at every value it has between `low` and `high`.

    `mark` is a number, drawn where it lands in each row.
    """
    high = min(fmt.max for fmt in formats) if high is None else high
    low = -high if low is None else low
    values = {fmt: _between(fmt, low, high) for fmt in formats}
    counts = {fmt.name: f"{fmt.name} has {len(found):,} values" for fmt, found in values.items()}
    _, axes = style.canvas(
        title,
        height=0.5 * len(formats),
        left=style.widest(counts, "bold") + 0.2,
        right=0.95 if mark is not None else 0.3,
        top=0.22 if mark is not None else 0.05,
        xlabel="value",
    )
    draw.rows(axes, list(counts), (low, high), weight="bold")
    axes.spines["left"].set_visible(False)
    colors = style.series_colors(formats)
    for row, (fmt, found) in enumerate(values.items()):
        dense = len(found) > style.inches(axes)[0] * 40
        look: style.Look = {"linewidth": 0.35 if dense else 1.0, "clip_on": False}
        axes.hlines(row, low, high, color=style.NEUTRAL[0], linewidth=1, zorder=0)
        axes.vlines(found, row - 0.3, row + 0.3, color=colors[fmt], **look)
    there = [f"{count} there" for count in counts.values()]
    told = f"Number line from {_number(low)} to {_number(high)}. {style.listed(there)}."
    if mark is not None:
        _landing(axes, mark, colors)
        landed = [f"{_number(fmt.round(mark))} in {fmt.name}" for fmt in formats]
        told += f" {_number(mark)} lands on {style.listed(landed)}."
    return Picture(axes.figure, told)


def _between(fmt: FloatFormat, low: float, high: float) -> list[float]:
    """All values of the format in [low, high], of up to 16 bits: more could not be told apart."""
    if fmt.bits > 16:
        raise ValueError(
            f"a number line has room for formats of up to 16 bits, {fmt.name} has {fmt.bits}"
        )
    return [value for value in fmt.representable() if low <= value <= high]


def _landing(axes: Axes, mark: float, colors: Mapping[FloatFormat, str]) -> None:
    """A dashed line at the number, and in every row the value that it is rounded to."""
    low, high = axes.get_xlim()
    for row, (fmt, color) in enumerate(colors.items()):
        landed = fmt.round(mark)
        if low <= landed <= high:
            look: style.Look = {"markersize": 6, "markeredgewidth": 1, "zorder": 4}
            draw.points(axes, landed, row, color, clip_on=False, **look)
        draw.beside(axes, 0.1, row, _number(landed), color=color, weight="bold")
    if low <= mark <= high:
        axes.axvline(mark, color=style.INK, linewidth=1, linestyle="--", zorder=3)
        half = style.width_of(_number(mark)) / 2 / style.inches(axes)[0]
        share = min(max((mark - low) / (high - low), half), 1 - half)
        draw.over(axes, share, 0.04, _number(mark))


# How far and how fine.


@style.drawn
def dynamic_range(formats: Sequence[FloatFormat], *, title: str) -> Picture:
    """A bar for each format from its smallest to its largest positive value, in powers of two.

    The subnormal part is hollow.
    """
    reach = {fmt: _reach(fmt) for fmt in formats}
    names = [fmt.name for fmt in formats]
    _, axes = style.canvas(
        title,
        height=0.4 * len(formats),
        left=style.widest(names, "bold") + 0.2,
        top=0.28,
        xlabel="positive values",
    )
    texts = {fmt: (_number(fmt.min_subnormal), _number(fmt.max)) for fmt in formats}
    low, high, per_inch = _with_room(reach, texts, style.inches(axes)[0])
    draw.rows(axes, names, (low, high), weight="bold")
    for row, (fmt, color) in enumerate(style.series_colors(formats).items()):
        (smallest, normal, largest), (first, last) = reach[fmt], texts[fmt]
        hollow: style.Look = {"hatch": "////", "edgecolor": color, "linewidth": 0.7}
        axes.barh(row, normal - smallest, 0.5, left=smallest, color=style.PAPER, **hollow)
        axes.barh(row, largest - normal, 0.5, left=normal, color=color, **style.EDGE)
        axes.text(smallest - 0.06 * per_inch, row, first, ha="right", va="center")
        axes.text(largest + 0.06 * per_inch, row, last, ha="left", va="center")
    axes.axvline(0, color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
    _powers_of_two(axes.xaxis)
    draw.key(axes, [("normal", style.SERIES[0], ""), ("subnormal", style.PAPER, "//")])
    told = "; ".join(
        f"{fmt.name}: {first} (normal from {_number(fmt.min_normal)}) to {last}"
        for fmt, (first, last) in texts.items()
    )
    return Picture(axes.figure, f"Range of positive values on a logarithmic axis. {told}.")


def _reach(fmt: FloatFormat) -> tuple[float, float, float]:
    """Smallest, smallest normal and largest value as powers of two."""
    return math.log2(fmt.min_subnormal), math.log2(fmt.min_normal), math.log2(fmt.max)


def _with_room(
    reach: Mapping[FloatFormat, tuple], texts: Mapping[FloatFormat, tuple[str, str]], width: float
) -> tuple[float, float, float]:
    """Both ends of an axis with room for labels beside the bars, and what an inch of it is."""
    low, high = min(at[0] for at in reach.values()), max(at[2] for at in reach.values())
    before = after = 0.0
    for fmt, (first, last) in texts.items():
        smallest, _, largest = reach[fmt]
        before = max(before, style.width_of(first) - (smallest - low) / (high - low) * width)
        after = max(after, style.width_of(last) - (high - largest) / (high - low) * width)
    per_inch = (high - low) / (width - before - after - 0.24)
    return low - (before + 0.12) * per_inch, high + (after + 0.12) * per_inch, per_inch


def _powers_of_two(axis: Axis) -> None:
    style.whole_ticks(axis)
    axis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")


@style.drawn
def relative_error(formats: Sequence[FloatFormat], *, title: str) -> Picture:
    """The bound of the relative error of rounding to nearest, against the magnitude of a number.

    Flat where values are normal, lost at both ends.
    """
    colors = {_error_label(fmt): style.SERIES[i % 8] for i, fmt in enumerate(formats)}
    _, axes = style.canvas(
        title,
        left=0.85,
        right=style.widest(colors, "bold") + 0.3,
        top=0.1,
        xlabel="magnitude of the number",
        ylabel="bound of the relative error",
    )
    reach = [_reach(fmt) for fmt in formats]
    ends = {}
    for fmt, (label, color), (smallest, normal, largest) in zip(
        formats, colors.items(), reach, strict=True
    ):
        # Below the normal numbers the gap stays the same, so each step down in magnitude doubles
        # the error, up to 1.
        floor = ends[label] = math.log2(fmt.eps / 2)
        axes.plot([smallest - 1, normal, largest, largest], [0, floor, floor, 0], color=color)
    low, high = min(at[0] for at in reach), max(at[2] for at in reach)
    axes.set(xlim=(low - 2, high + 2), ylim=(min(ends.values()) - 1.5, 1))
    draw.beside_lines(axes, ends, colors)
    _powers_of_two(axes.xaxis)
    _powers_of_two(axes.yaxis)
    told = "; ".join(
        f"{fmt.name}: {_number(fmt.eps / 2)} from {_number(fmt.min_normal)} to {_number(fmt.max)}"
        for fmt in formats
    )
    said = "Bound of the relative rounding error against magnitude, both axes logarithmic."
    return Picture(axes.figure, f"{said} {told}.")


def _error_label(fmt: FloatFormat) -> str:
    return f"{fmt.name}: {fmt.eps / 2:{'.3g' if fmt.eps < 1e-4 else '.2%'}}"


# What becomes of given numbers.

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
    """The share of numbers with each exponent, times `scale`, over the ranges of `formats`.

    Bars are colored by what becomes of them in the first format: kept, kept with fewer digits
    (subnormal), or lost (zero, or too large). A range is filled where numbers are normal and hollow
    where they are subnormal. `scale` is a power of two.
    """
    shares, first = _shares(counts, scale), formats[0]
    fates = dict.fromkeys((LOST, COARSE, KEPT), 0.0)
    for exponent, share in shares.items():
        fates[_fate(first, exponent)] += share
    tall, lanes, peak = 1.7, _LANE * len(formats) + 0.08, max(shares.values())
    _, axes = style.canvas(
        title
        or f"In {first.name}, {_percent(fates[LOST])} of these numbers are lost and "
        f"{_percent(fates[COARSE])} lose digits",
        height=tall + lanes,
        left=max(style.widest([fmt.name for fmt in formats], "bold") + 0.45, 0.75),
        top=0.3,
        xlabel="exponent: numbers from 2ᵉ to 2ᵉ⁺¹",
    )
    inch = peak / tall  # what an inch of the histogram stands for
    # Single strays would stretch the axis.
    seen = {exponent: share for exponent, share in shares.items() if share > 5e-4}
    low = min(*seen, *(max(_bottom(fmt), -50) for fmt in formats)) - 2
    high = max(*seen, *(min(fmt.max_exponent, 20) for fmt in formats)) + 2
    axes.set(xlim=(low, high), ylim=(-lanes * inch, peak * 1.02))
    for exponent, share in seen.items():
        draw.box(axes, exponent, 0, 1, share, _fate(first, exponent))
    axes.axhline(0, color=style.FAINT, linewidth=0.8)
    ticks = dict(_ranges(axes, formats, inch)) | _percentages(peak)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    draw.key(axes, [("normal", KEPT, ""), ("subnormal", COARSE, ""), ("lost", LOST, "")])
    return Picture(
        axes.figure,
        f"Histogram of {sum(counts.values()):,} numbers by exponent, times {scale:g}: most have "
        f"the exponent {max(shares, key=shares.__getitem__)}; "
        f"in {first.name} {_percent(fates[LOST])} are lost and {_percent(fates[COARSE])} are "
        "subnormal. "
        f"Under it the ranges of {style.listed([fmt.name for fmt in formats])}.",
    )


def _percent(share: float) -> str:
    """A share in percent: "16%", and "0.1%" of what is less than one percent and not nothing."""
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def _shares(counts: Mapping[int, int], scale: float) -> dict[int, float]:
    """The share of the numbers with each exponent, once they are multiplied."""
    total, shift = sum(counts.values()), math.log2(scale) if scale > 0 else math.nan
    if not total:
        raise ValueError("there is nothing to count: all numbers are zero, infinite or NaN")
    if not shift.is_integer():
        raise ValueError(f"scale={scale} is not a power of two: exponents would move by a fraction")
    return {exponent + int(shift): count / total for exponent, count in counts.items()}


def _bottom(fmt: FloatFormat) -> int:
    """The lowest exponent that is not lost: half of the smallest subnormal rounds up to it."""
    return fmt.min_exponent - fmt.mantissa_bits - 1


def _fate(fmt: FloatFormat, exponent: int) -> str:
    """The color of what becomes of numbers with that exponent."""
    if exponent < _bottom(fmt) or exponent > fmt.max_exponent:
        return LOST
    return KEPT if exponent >= fmt.min_exponent else COARSE


def _ranges(axes: Axes, formats: Sequence[FloatFormat], inch: float) -> Iterator[tuple[float, str]]:
    """Draws the range of each format in a lane under the histogram: the places of their names."""
    low, high = axes.get_xlim()
    for lane, fmt in enumerate(formats):
        y, deep, normal = -(lane + 1) * _LANE * inch, 0.18 * inch, fmt.min_exponent
        bottom, top = max(_bottom(fmt), low), min(fmt.max_exponent + 1, high)
        if normal > bottom:
            draw.box(axes, bottom, y, normal - bottom, deep, style.PAPER)
        if top > normal:
            start = max(normal, low)
            draw.box(axes, start, y, top - start, deep, style.NEUTRAL[0])
        yield y + deep / 2, fmt.name


def _percentages(peak: float) -> dict[float, str]:
    """Ticks for shares up to `peak`, at most five of them."""
    step = 10 ** math.floor(math.log10(peak))
    ticks = [step * k for k in range(1, 11) if step * k <= peak * 1.02]
    ticks = ticks if len(ticks) <= 4 else ticks[1::2]
    return {tick: f"{tick:.0%}" if tick >= 0.01 else f"{tick:.1%}" for tick in ticks}


def _number(value: float) -> str:
    """A number as a reader would write it: few digits, and powers of ten where it is far from 1."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        digits = ",.6g" if 1 <= abs(value) < 1e5 else ",.0f"
        return f"{value:{',.4g' if abs(value) < 1 else digits}}".replace("-", "−")
    mantissa, _, power = f"{value:.3g}".partition("e")
    said = f"{mantissa}e{int(power)}" if power else mantissa
    return said.replace("-", "−")


@style.drawn
def shared_grids(**rows: tuple[Sequence[float], Sequence[float]]) -> Picture:
    """A row for each (numbers, steps): the values that the numbers may take as ticks, and a filled
    marker for each number where it lands.

    steps: of each number the distance of its neighbors on the grid, the same for all of a group
    """
    rows = style.spaced(rows)
    most = max(max(map(abs, numbers)) for numbers, _ in rows.values())
    _, axes = style.canvas(
        _grids_finding(rows),
        height=0.62 * len(rows),
        left=style.widest(rows, "bold") + 0.2,
        right=0.3,
        xlabel="value",
    )
    draw.rows(axes, list(rows), (-1.06 * most, 1.06 * most), weight="bold")
    axes.spines["left"].set_visible(False)
    told = []
    for at, ((name, (numbers, steps)), color) in enumerate(
        zip(rows.items(), itertools.cycle(style.SERIES), strict=False)
    ):
        axes.hlines(at, -most, most, color=style.NEUTRAL[0], linewidth=1, zorder=0)
        landed = {step * round(x / step) for x, step in zip(numbers, steps, strict=True)}
        if len(set(steps)) == 1:
            places = math.floor(max(map(abs, numbers)) / steps[0] + 1e-6)
            grid = [k * steps[0] for k in range(-places, places + 1)]
            axes.vlines(grid, at - 0.22, at + 0.22, color=style.NEUTRAL[1], linewidth=0.8)
        axes.vlines(numbers, at - 0.42, at - 0.3, color=style.INK, linewidth=0.6)
        draw.points(axes, sorted(landed), [at] * len(landed), color, markersize=4.5)
        told.append(f"{name}: {len(numbers)} numbers land on {len(landed)} values")
    return Picture(axes.figure, f"Number lines up to {_number(most)}. {'; '.join(told)}.")


def _grids_finding(rows: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    counts = {
        name: len({step * round(x / step) for x, step in zip(*row, strict=True)})
        for name, row in rows.items()
    }
    (first, most), *_, (last, least) = counts.items()
    return f"{first.capitalize()}, the numbers land on {most} values; {last}, on {least}"
