"""The figure grammar: hue says what, hatch which axis shards it, row who, x when."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from labutils import units

Name = TypeVar("Name")
Look = dict[str, Any]  # keywords of a method of matplotlib

INK, FAINT, PAPER = "#1B1B1B", "#6B6B6B", "#FFFFFF"

# Chosen for the largest worst-case distance under color-blind vision.
COMPONENT_COLORS = {
    "weights": "#2F74D0",
    "gradients": "#FFB04D",
    "optimizer": "#0B5345",
    "activations": "#C4481A",
    "buffers": "#D7C4E1",
}
AXIS_COLORS = {
    "dp": ("#1E3095", "//"),
    "tp": ("#2C8E86", "\\\\"),
    "pp": ("#7E273B", "--"),
    "cp": ("#C3D73C", "||"),
    "ep": ("#F2A8F0", "xx"),
}
PASS_COLORS = {"forward": "#4DB2F5", "backward": "#F1C752", "weight": "#3B5A2E", "idle": PAPER}
FIELDS = {"sign": "#C4481A", "exponent": "#FFB04D", "mantissa": "#2F74D0"}

# For lines and bars that stand for an algorithm, a format or a run: no meaning is bound to these,
# so any series may take them in turn.
SERIES = ("#2F74D0", "#C4481A", "#0B5345", "#7E273B", "#2C8E86", "#6B4FA0", "#B07A00", "#444444")
NEUTRAL = ("#B9BEC4", "#8A9199", "#5C636B", "#DDE0E3")

WIDE, SIZE = 7.2, 9
NARROWEST = 560  # pixels to which a picture shrinks; on a narrower page it scrolls

RC: dict[Any, Any] = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    # DejaVu comes with matplotlib, so text is as wide everywhere as when the figure was looked at;
    # the others stand in for it in an SVG.
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

EDGE: Look = {"edgecolor": INK, "linewidth": 0.7}
GUESS: Look = {
    "marker": "D",
    "markersize": 8,
    "markerfacecolor": "none",
    "markeredgecolor": INK,
    "markeredgewidth": 1.4,
    "linestyle": "none",
}


def legible(width: float) -> str:
    """How a picture of `width` pixels fits a page: no wider, and on a phone no less than legible.

    >>> legible(691)
    'max-width:100%;min-width:560px;height:auto'
    """
    return f"max-width:100%;min-width:{min(round(width), NARROWEST)}px;height:auto"


def component_colors(components: Iterable[str]) -> dict[str, str]:
    """The hue of every component of memory; those without one of their own take grays in turn."""
    grays = itertools.cycle(NEUTRAL)
    return {component: COMPONENT_COLORS.get(component) or next(grays) for component in components}


def series_colors(names: Iterable[Name]) -> dict[Name, str]:
    """A color for each series, in turn."""
    return dict(zip(names, itertools.cycle(SERIES)))


def spaced(series: Mapping[str, Any]) -> dict[str, Any]:
    """Series by the names that a picture shows, with spaces for underscores."""
    return {name.replace("_", " "): values for name, values in series.items()}


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


def widest(texts: Iterable[str], weight: str = "normal") -> float:
    """The width of the longest of some lines of text in inches."""
    return max(width_of(text, weight=weight) for text in texts)


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
    """A figure with one axes of `height` inches, its finding as a title on top.

    Margins are in inches, so that what fits once fits always.
    """
    lines = wrapped(title, width - 0.3, SIZE + 1, "bold")
    head = 0.08 + 0.18 * len(lines) + 0.08 if lines else 0.05
    total = head + top + height + bottom
    figure = Figure(figsize=(width, total))
    axes = figure.add_axes(
        (left / width, bottom / total, (width - left - right) / width, height / total)
    )
    look: Look = {"size": SIZE + 1, "weight": "bold", "linespacing": 1.25}
    figure.text(0.1 / width, 1 - 0.08 / total, "\n".join(lines), va="top", ha="left", **look)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def figure_inches(axes: Axes) -> tuple[float, float]:
    """Width and height of the whole figure in inches."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes come from `canvas`
    width, height = figure.get_size_inches()
    return width, height


def inches(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes in inches."""
    box, (width, height) = axes.get_position(), figure_inches(axes)
    return box.width * width, box.height * height


def scale(largest: float, unit: str) -> tuple[float, str]:
    """The factor and the prefixed unit in which amounts up to `largest` read well on an axis.

    >>> scale(96e6, "B"), scale(0.004, "s")
    ((1000000, 'MB'), (0.001, 'ms'))
    """
    steps: list[tuple[float, str]]
    steps = [(10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"), (1, "")]
    if unit == "s":
        steps = [(1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]
    fitting = [(factor, prefix + unit) for factor, prefix in steps if abs(largest) >= factor]
    return fitting[0] if fitting else (steps[-1][0], steps[-1][1] + unit)


def whole_ticks(axis: matplotlib.axis.Axis) -> None:
    """Ticks at whole numbers only."""
    locator = matplotlib.ticker.AutoLocator()
    locator.set_params(integer=True)
    axis.set_major_locator(locator)


def amount(value: float, unit: str, digits: int = 3) -> str:
    """A number as `units.text` writes it, or a share in percent.

    >>> amount(0.0213, "%"), amount(2, "%"), amount(1500, "B")
    ('2.13 %', '200 %', '1.50 kB')
    """
    if unit == "%":
        return f"{float(f'{100 * value:.{digits}g}'):g} %"
    return units.text(value, unit, digits=digits)


def in_units(axis: matplotlib.axis.Axis, unit: str) -> None:
    """Ticks of a logarithmic axis written as amounts of `unit`: 1 kB, 1 MB; 10 µs, 1 ms; none
    between them. Of "%": 1 %, 2 %, 5 %, 10 %."""
    axis.set_major_formatter(
        matplotlib.ticker.FuncFormatter(lambda value, _: amount(value, unit, digits=1))
    )
    if unit == "%" and axis.get_scale() == "log":
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def times(ratio: float) -> str:
    """A ratio for a title, never with more digits than the eye can check.

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
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
