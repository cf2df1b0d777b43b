"""Number formats: the bits of a code, where the numbers lie, how far they reach and how far apart they are."""

import math
from collections.abc import Sequence

from matplotlib.patches import Rectangle

from labutils.floats import FloatFormat
from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture


@style.drawn
def bits(fmt: FloatFormat, code: int, *, title: str | None = None) -> Picture:
    """The bits of one code, field by field, and what each field says about the value."""
    sign, exponent, mantissa, kind = fmt.fields(code)
    value = fmt.decode(code)
    widths = {"sign": int(fmt.signed), "exponent": fmt.exponent_bits, "mantissa": fmt.mantissa_bits}
    digits = iter(fmt.bit_string(code).replace(" ", ""))
    count = fmt.bits
    said = _meaning(fmt, sign, exponent, mantissa, kind)
    figure, axes = style.canvas(
        title or f"{fmt.name} {fmt.bit_string(code)} is {_number(value)}",
        height=1.25,
        left=0.1,
        right=0.1,
        bottom=0.1,
    )
    width, height = style.inches(axes)
    gap = 0.14
    cell = min(0.42, (width - 2 * gap) / count)
    x = 0.0
    for field, length in widths.items():
        if not length:
            continue
        start = x
        for _ in range(length):
            digit = next(digits)
            color = style.FIELDS[field] if digit == "1" else style.PAPER
            axes.add_patch(
                Rectangle((x, 0.5), cell, 0.4, facecolor=color, clip_on=False, **style.EDGE)
            )
            axes.text(
                x + cell / 2,
                0.7,
                digit,
                ha="center",
                va="center",
                color=style.on(color),
                size=11 if cell > 0.2 else 8,
            )
            x += cell
        axes.plot(
            [start, x], [0.96, 0.96], color=style.FIELDS[field], linewidth=3, solid_capstyle="butt"
        )
        middle = max(
            (start + x) / 2, start + style.width_of(field) / 2 - gap / 2
        )  # a long name may stand out to the right
        axes.text(middle, 1.02, field, ha="center", va="bottom")
        x += gap
    axes.text(0, 0.24, said, ha="left", va="center", size=10)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return Picture(figure, f"{fmt.name}, code {fmt.bit_string(code)}: {fmt.explain(code)}.")


@style.drawn
def number_line(
    formats: Sequence[FloatFormat],
    *,
    low: float | None = None,
    high: float | None = None,
    mark: float | None = None,
    title: str | None = None,
) -> Picture:
    """A row for each format with a tick at every value it has between `low` and `high`; `mark` is a number, drawn where it lands in each row."""
    formats = _listed(formats)
    high = min(fmt.max for fmt in formats) if high is None else high
    low = -high if low is None else low
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"a number line needs finite low < high, got low={low}, high={high}")
    values = {fmt: _between(fmt, low, high) for fmt in formats}
    counts = {fmt: len(found) for fmt, found in values.items()}
    left, right = (
        max(style.width_of(fmt.name, weight="bold") for fmt in formats) + 0.2,
        0.95 if mark is not None else 0.3,
    )
    figure, axes = style.canvas(
        title
        or f"Between {_number(low)} and {_number(high)}, "
        + _and([f"{fmt.name} has {counts[fmt]:,} values" for fmt in formats]),
        height=0.5 * len(formats),
        left=left,
        right=right,
        top=0.22 if mark is not None else 0.05,
        bottom=0.5,
        xlabel="value",
    )
    width, height = style.inches(axes)
    for row, fmt in enumerate(formats):
        color = style.SERIES[row % len(style.SERIES)]
        dense = counts[fmt] > width * 40
        axes.hlines(row, low, high, color=style.NEUTRAL[0], linewidth=1, zorder=0)
        axes.vlines(
            values[fmt],
            row - 0.3,
            row + 0.3,
            color=color,
            linewidth=0.35 if dense else 1.0,
            clip_on=False,
        )
        if mark is not None:
            landed = fmt.round(mark)
            if low <= landed <= high:
                axes.plot(
                    landed,
                    row,
                    "o",
                    color=color,
                    markeredgecolor=style.INK,
                    markersize=6,
                    zorder=4,
                    clip_on=False,
                )
            axes.text(
                1 + 0.1 / width,
                row,
                _number(landed),
                transform=axes.get_yaxis_transform(),
                va="center",
                color=color,
                weight="bold",
            )
    if mark is not None and low <= mark <= high:
        axes.axvline(mark, color=style.INK, linewidth=1, linestyle="--", zorder=3)
        half = style.width_of(_number(mark)) / 2 / width
        share = min(max((mark - low) / (high - low), half), 1 - half)
        axes.text(
            share,
            1 + 0.04 / height,
            _number(mark),
            transform=axes.transAxes,
            ha="center",
            va="bottom",
        )
    axes.set(xlim=(low, high), ylim=(len(formats) - 0.5, -0.5))
    axes.set_yticks(range(len(formats)), [fmt.name for fmt in formats], weight="bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    landed = (
        f" {_number(mark)} lands on "
        + _and([f"{_number(fmt.round(mark))} in {fmt.name}" for fmt in formats])
        + "."
        if mark is not None
        else ""
    )
    return Picture(
        figure,
        f"Number line from {_number(low)} to {_number(high)}. "
        + _and([f"{fmt.name} has {counts[fmt]:,} values there" for fmt in formats])
        + f".{landed}",
    )


@style.drawn
def dynamic_range(formats: Sequence[FloatFormat], *, title: str | None = None) -> Picture:
    """A bar for each format from its smallest to its largest positive value, in powers of two; the subnormal part is hollow."""
    formats = _listed(formats)
    reach = {
        fmt: (math.log2(fmt.min_subnormal), math.log2(fmt.min_normal), math.log2(fmt.max))
        for fmt in formats
    }
    low = min(bounds[0] for bounds in reach.values())
    high = max(bounds[2] for bounds in reach.values())
    left = max(style.width_of(fmt.name, weight="bold") for fmt in formats) + 0.2
    widest, narrowest = (
        pick(formats, key=lambda fmt: reach[fmt][2] - reach[fmt][0]) for pick in (max, min)
    )
    span = {fmt: reach[fmt][2] - reach[fmt][0] for fmt in (widest, narrowest)}
    figure, axes = style.canvas(
        title
        or (
            f"{widest.name} spans {span[widest]:.0f} powers of two"
            + (f", {narrowest.name} only {span[narrowest]:.0f}" if widest is not narrowest else "")
        ),
        height=0.4 * len(formats),
        left=left,
        right=0.15,
        top=0.28,
        xlabel="positive values",
    )
    width, _ = style.inches(axes)
    # Labels stand outside their bar: leave room for them at both ends of the axis.
    texts = {fmt: (_number(fmt.min_subnormal), _number(fmt.max)) for fmt in formats}
    before = max(
        style.width_of(a) - (reach[fmt][0] - low) / (high - low) * width
        for fmt, (a, _) in texts.items()
    )
    after = max(
        style.width_of(b) - (high - reach[fmt][2]) / (high - low) * width
        for fmt, (_, b) in texts.items()
    )
    before, after = max(before, 0) + 0.12, max(after, 0) + 0.12
    per_inch = (high - low) / (width - before - after)
    for row, fmt in enumerate(formats):
        smallest, normal, largest = reach[fmt]
        color = style.SERIES[row % len(style.SERIES)]
        axes.barh(
            row,
            normal - smallest,
            0.5,
            left=smallest,
            color=style.PAPER,
            hatch="////",
            edgecolor=color,
            linewidth=0.7,
        )
        axes.barh(row, largest - normal, 0.5, left=normal, color=color, **style.EDGE)
        axes.text(smallest - 0.06 * per_inch, row, texts[fmt][0], ha="right", va="center")
        axes.text(largest + 0.06 * per_inch, row, texts[fmt][1], ha="left", va="center")
    axes.axvline(0, color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
    axes.set(
        xlim=(low - before * per_inch, high + after * per_inch), ylim=(len(formats) - 0.5, -0.5)
    )
    axes.set_yticks(range(len(formats)), [fmt.name for fmt in formats], weight="bold")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    style.key(axes, [("normal", style.SERIES[0], ""), ("subnormal", style.PAPER, "//")])
    told = "; ".join(
        f"{fmt.name}: {_number(fmt.min_subnormal)} (normal from {_number(fmt.min_normal)}) to {_number(fmt.max)}"
        for fmt in formats
    )
    return Picture(figure, f"Range of positive values on a logarithmic axis. {told}.")


@style.drawn
def relative_error(formats: Sequence[FloatFormat], *, title: str | None = None) -> Picture:
    """The largest relative error of rounding to nearest, against the magnitude of the number: flat where values are normal, lost at both ends."""
    formats = _listed(formats)
    low, high = (
        min(math.log2(fmt.min_subnormal) for fmt in formats),
        max(math.log2(fmt.max) for fmt in formats),
    )
    best = min(formats, key=lambda fmt: fmt.eps)
    names = {
        fmt: f"{fmt.name}: {fmt.eps / 2:.3g}"
        if fmt.eps < 1e-4
        else f"{fmt.name}: {fmt.eps / 2:.2%}"
        for fmt in formats
    }
    right = max(style.width_of(name, weight="bold") for name in names.values()) + 0.3
    figure, axes = style.canvas(
        title
        or f"Rounding to {best.name} errs by at most {_number(best.eps / 2)} of the number, wherever its values are normal",
        left=0.85,
        right=right,
        top=0.1,
        xlabel="magnitude of the number",
        ylabel="largest relative error",
    )
    width, height = style.inches(axes)
    bottom = math.log2(best.eps / 2) - 1.5
    ends = {}
    for row, fmt in enumerate(formats):
        color = style.SERIES[row % len(style.SERIES)]
        smallest, normal, largest = (
            math.log2(x) for x in (fmt.min_subnormal, fmt.min_normal, fmt.max)
        )
        # Below the normal numbers the gap stays the same, so each step down in magnitude doubles the error, up to 1.
        floor = math.log2(fmt.eps / 2)
        axes.plot([smallest - 1, normal, largest, largest], [0, floor, floor, 0], color=color)
        ends[fmt] = (floor - bottom) / (1 - bottom) * height
    for fmt, y in zip(
        ends, style.spread(list(ends.values()), [0.17] * len(ends), 0, height), strict=True
    ):
        color = style.SERIES[formats.index(fmt) % len(style.SERIES)]
        axes.text(
            1 + 0.15 / width,
            y / height,
            names[fmt],
            transform=axes.transAxes,
            va="center",
            color=color,
            weight="bold",
        )
    axes.set(xlim=(low - 2, high + 2), ylim=(bottom, 1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
        axis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    told = "; ".join(
        f"{fmt.name}: {_number(fmt.eps / 2)} from {_number(fmt.min_normal)} to {_number(fmt.max)}"
        for fmt in formats
    )
    return Picture(
        figure, f"Largest relative rounding error against magnitude, both axes logarithmic. {told}."
    )


def _listed(formats: Sequence[FloatFormat]) -> list[FloatFormat]:
    formats = [formats] if isinstance(formats, FloatFormat) else list(formats)
    for fmt in formats:
        if not isinstance(fmt, FloatFormat):
            raise TypeError(
                f"this figure draws floating-point formats, got {fmt!r}: use floats.named(...)"
            )
    if not formats:
        raise ValueError(
            "this figure needs at least one format, such as [floats.FP16, floats.BF16]"
        )
    return formats


def _between(fmt: FloatFormat, low: float, high: float) -> list[float]:
    """All values of the format in [low, high]; for formats of up to 16 bits, more could not be told apart."""
    if fmt.bits > 16:
        raise ValueError(
            f"a number line has room for formats of up to 16 bits, {fmt.name} has {fmt.bits}"
        )
    return [value for value in fmt.representable() if low <= value <= high]


def _meaning(fmt: FloatFormat, sign: int, exponent: int, mantissa: int, kind: str) -> str:
    """The value of a code, spelled out."""
    minus = "−" if sign else ""
    match kind:
        case "nan":
            return "NaN: this pattern is not a number"
        case "inf":
            return f"{minus}∞: top exponent, mantissa 0"
        case "zero":
            return f"{minus}0: everything 0 but the sign" if fmt.signed else "0"
    value = _number(
        fmt.decode(
            (sign << fmt.exponent_bits + fmt.mantissa_bits)
            | (exponent << fmt.mantissa_bits)
            | mantissa
        )
    )
    lead, power = (1, f"{exponent}−{fmt.bias}") if kind == "normal" else (0, f"{fmt.min_exponent}")
    fraction = f"({lead} + {mantissa}/{2**fmt.mantissa_bits})" if fmt.mantissa_bits else str(lead)
    note = "" if kind == "normal" else "   subnormal: exponent field 0, no leading 1"
    return f"{minus}$2^{{{power}}}$ × {fraction} = {value}{note}"


def _number(value: float) -> str:
    """A number as a reader would write it: few digits, × and powers of ten where it is very large or small."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "−∞" if value < 0 else "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        text = (
            f"{value:,.6g}"
            if 1 <= abs(value) < 1e5
            else f"{value:,.4g}"
            if abs(value) < 1
            else f"{value:,.0f}"
        )
        return text.replace("-", "−")
    mantissa, _, power = f"{value:.3g}".partition("e")
    if not power:
        return mantissa.replace("-", "−")
    return f"{mantissa.replace('-', '−')}e{int(power)}".replace("e-", "e−")


def _and(parts: Sequence[str]) -> str:
    return style.listed(list(parts))
