"""The figure grammar, once: hue says what, hatch says which axis shards it, row says who, x says when."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from labutils import units

INK, FAINT, PAPER = "#1B1B1B", "#6B6B6B", "#FFFFFF"

# Chosen for the largest worst-case distance under color-blind vision.
COMPONENTS = {
    "weights": "#2F74D0",
    "gradients": "#FFB04D",
    "optimizer": "#0B5345",
    "activations": "#C4481A",
    "buffers": "#D7C4E1",
}
AXES = {
    "dp": ("#1E3095", "//"),
    "tp": ("#2C8E86", "\\\\"),
    "pp": ("#7E273B", "--"),
    "cp": ("#C3D73C", "||"),
    "ep": ("#F2A8F0", "xx"),
}
PASSES = {"forward": "#4DB2F5", "backward": "#F1C752", "weight": "#3B5A2E", "idle": PAPER}
FIELDS = {"sign": "#C4481A", "exponent": "#FFB04D", "mantissa": "#2F74D0"}

# For lines and bars that stand for an algorithm, a format or a run: no meaning is bound to these, so any series may take them in turn.
SERIES = ("#2F74D0", "#C4481A", "#0B5345", "#7E273B", "#2C8E86", "#6B4FA0", "#B07A00", "#444444")
NEUTRAL = ("#B9BEC4", "#8A9199", "#5C636B", "#DDE0E3")

WIDE, NARROW, SIZE = 7.2, 3.5, 9

RC = {
    "font.family": "sans-serif",
    # DejaVu comes with matplotlib, so text is as wide everywhere as when the figure was looked at; the others stand in for it in an SVG.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": SIZE,
    "axes.titlesize": SIZE,
    "axes.labelsize": SIZE,
    "xtick.labelsize": SIZE,
    "ytick.labelsize": SIZE,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "labutils",
}

drawn = matplotlib.rc_context(RC)  # decorates every function that draws

EDGE = {"edgecolor": INK, "linewidth": 0.7}
GUESS = {
    "marker": "D",
    "markersize": 8,
    "markerfacecolor": "none",
    "markeredgecolor": INK,
    "markeredgewidth": 1.4,
    "linestyle": "none",
}


def component_color(component: str, others: Sequence[str] = ()) -> str:
    """The hue of a component of memory; a component without its own takes a gray, by its place among the `others` that have none."""
    unnamed = [other for other in others if other not in COMPONENTS]
    return (
        COMPONENTS.get(component)
        or NEUTRAL[unnamed.index(component) % len(NEUTRAL) if component in unnamed else 0]
    )


def on(fill: str) -> str:
    """Black or white, whichever reads better on `fill`; the contrast is at least 4.5 to 1."""
    red, green, blue = (((c / 255 + 0.055) / 1.055) ** 2.4 for c in bytes.fromhex(fill.lstrip("#")))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#FFFFFF"


def width_of(text: str, size: float = SIZE, weight: str = "normal") -> float:
    """The width of a line of text in inches."""
    if not text:
        return 0.0
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def wrapped(text: str, width: float, size: float = SIZE, weight: str = "normal") -> list[str]:
    """`text` broken into lines no wider than `width` inches."""
    characters = max(8, int(len(text) * width / max(width_of(text, size, weight), 1e-9)))
    while (
        any(width_of(line, size, weight) > width for line in textwrap.wrap(text, characters))
        and characters > 8
    ):
        characters -= 1
    return textwrap.wrap(text, characters)


def canvas(
    title: str,
    *,
    width: float = WIDE,
    height: float = 2.4,
    left: float = 0.7,
    right: float = 0.15,
    bottom: float = 0.5,
    top: float = 0.1,
    xlabel: str = "",
    ylabel: str = "",
) -> tuple[Figure, Axes]:
    """A figure with one axes of `height` inches, its finding as a title on top; margins in inches, so that what fits once fits always."""
    lines = wrapped(title, width - 0.3, SIZE + 1, "bold")
    head = 0.08 + 0.18 * len(lines) + 0.08 if lines else 0.05
    total = head + top + height + bottom
    figure = Figure(figsize=(width, total))
    axes = figure.add_axes(
        (left / width, bottom / total, (width - left - right) / width, height / total)
    )
    figure.text(
        0.1 / width,
        1 - 0.08 / total,
        "\n".join(lines),
        size=SIZE + 1,
        weight="bold",
        va="top",
        ha="left",
        linespacing=1.25,
    )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def inches(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes in inches."""
    box, (width, height) = axes.get_position(), axes.figure.get_size_inches()
    return box.width * width, box.height * height


def key_rows(
    entries: Sequence[tuple[str, str, str]], width: float = WIDE
) -> list[list[tuple[str, str, str]]]:
    """The (label, color, hatch) swatches of a key, in as many rows as a figure of that width needs."""
    rows, used = [], width
    for entry in entries:
        size = 0.41 + width_of(entry[0])
        if used + size > width - 0.1:
            rows.append([])
            used = 0.1
        rows[-1].append(entry)
        used += size
    return rows


def key(axes: Axes, entries: Sequence[tuple[str, str, str]], *, above: float = 0.08) -> None:
    """Rows of swatches over the axes, `above` inches higher, for what is too thin to carry its own label; each row takes 0.2 inches."""
    box, (width, height) = axes.get_position(), axes.figure.get_size_inches()
    for row, swatches in enumerate(reversed(key_rows(entries, width))):
        x, y = 0.1, box.y1 * height + above + 0.2 * row
        for label, color, hatch in swatches:
            axes.figure.add_artist(
                Rectangle(
                    (x / width, y / height),
                    0.13 / width,
                    0.13 / height,
                    facecolor=color,
                    hatch=hatch * 2,
                    **EDGE,
                )
            )
            axes.figure.text((x + 0.19) / width, (y + 0.065) / height, label, va="center_baseline")
            x += 0.41 + width_of(label)


def spread(places: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """`places` of labels that are `sizes` long, moved apart as little as needed, within `low` and `high` where there is room.

    >>> spread([1, 1, 5], [1, 1, 1], 0, 10)
    [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    offsets, offset = [], 0.0
    for previous, i in zip([None, *order], order, strict=False):
        offset += 0 if previous is None else (sizes[previous] + sizes[i]) / 2
        offsets.append(offset)
    # Without their offsets, labels that touch are equal: what is left is to make the places ascend (pooling the neighbors that do not).
    pools: list[tuple[float, int]] = []
    for i, offset in zip(order, offsets, strict=True):
        total, members = places[i] - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / members:
            total, members = total + pools[-1][0], members + pools[-1][1]
            pools.pop()
        pools.append((total, members))
    ascending = [total / members for total, members in pools for _ in range(members)]
    least, most = (
        (low + sizes[order[0]] / 2, high - sizes[order[-1]] / 2 - offsets[-1])
        if order
        else (low, high)
    )
    placed = [0.0] * len(places)
    for i, offset, place in zip(order, offsets, ascending, strict=True):
        placed[i] = max(least, min(place, most)) + offset
    return placed


def scale(largest: float, unit: str) -> tuple[float, str]:
    """The factor and the prefixed unit in which amounts up to `largest` read well on an axis.

    >>> scale(96e6, "B"), scale(0.004, "s")
    ((1000000, 'MB'), (0.001, 'ms'))
    """
    steps = [(10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"), (1, "")]
    if unit == "s":
        steps = [(1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]
    return next(
        ((factor, prefix + unit) for factor, prefix in steps if abs(largest) >= factor),
        (steps[-1][0], steps[-1][1] + unit),
    )


def in_units(axis: matplotlib.axis.Axis, unit: str) -> None:
    """Ticks of a logarithmic axis written as amounts of `unit`: 1 kB, 1 MB; 10 µs, 1 ms."""
    axis.set_major_formatter(
        matplotlib.ticker.FuncFormatter(lambda value, _: units.text(value, unit, digits=1))
    )
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def times(ratio: float) -> str:
    """A ratio as words for a title: "2×", "1.5×", "half of", never more digits than the eye can check.

    >>> times(2.0), times(1.52), times(31.7), times(0.5)
    ('2×', '1.5×', '32×', '0.5×')
    """
    if not math.isfinite(ratio):
        return "∞×"
    return f"{ratio:.2g}×" if ratio < 10 else f"{ratio:,.0f}×"


def listed(names: Sequence[str]) -> str:
    """Names joined as prose joins them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))


def limit(axes: Axes, place: float, label: str) -> None:
    """A dashed vertical line at `place` with its name on top; off the scale, an arrow says how far away it is."""
    width, height = inches(axes)
    low, high = axes.get_xlim()
    y = 1 + 0.05 / height
    if place > high:
        label = f"{label}, {times(place / high)} the length of this axis →"
        axes.text(1, y, label, transform=axes.transAxes, ha="right", va="bottom")
        return
    axes.axvline(place, color=INK, linestyle="--", linewidth=1.2)
    share = (place - low) / (high - low)
    half = width_of(label) / 2 / width
    axes.text(
        min(max(share, half), 1.05 - half),
        y,
        label,
        transform=axes.transAxes,
        ha="center",
        va="bottom",
    )


def name_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str]
) -> None:
    """The name of every line beside the axes, tied to the point where the line ends; names that would touch are moved apart."""
    axes.autoscale_view()
    width, height = inches(axes)
    places = axes.transAxes.inverted().transform(axes.transData.transform(list(ends.values())))
    places = [
        (min(x, 1.0), min(max(y, 0.0), 1.0) if math.isfinite(y) else 1.0)
        for x, y in places.tolist()
    ]
    heights = spread([y * height for _, y in places], [0.17] * len(places), 0, height)
    for (name, end), y in zip(zip(ends, places, strict=True), heights, strict=True):
        tie = {
            "arrowstyle": "-",
            "color": colors[name],
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
            "relpos": (0, 0.5),
        }
        place = 1 + 0.14 / width, y / height
        axes.annotate(
            name,
            end,
            place,
            "axes fraction",
            "axes fraction",
            tie,
            va="center",
            color=colors[name],
            weight="bold",
        )
