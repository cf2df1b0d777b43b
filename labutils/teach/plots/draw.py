"""What pictures are put together from: rows, boxes, points, keys, and labels that do not touch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labutils.teach.plots import style

LINE = 0.17  # inches from one line of text to the next
Swatch = tuple[str, str, str]  # label, color, hatch
# Behind a label on a pattern.
BLANK: style.Look = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 1}


def rows(axes: Axes, names: Sequence[str], xlim: tuple[float, float], **font: Any) -> None:
    """A row for each name, the first on top, one unit high."""
    axes.set(xlim=xlim, ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names, **font)
    axes.tick_params(axis="y", length=0)


def box(
    axes: Axes, x: float, y: float, width: float, height: float, fill: str, **look: Any
) -> None:
    """A filled rectangle with a dark thin edge, unless `look` says otherwise."""
    look = {**style.EDGE, **look}
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, **look))


def points(axes: Axes, x: Any, y: Any, color: str, **look: Any) -> None:
    """Filled markers: what was measured, where it lands."""
    look = {"zorder": 3, "markeredgecolor": style.INK, "markeredgewidth": 0.7, **look}
    axes.plot(x, y, "o", color=color, **look)


def note(
    axes: Axes, place: tuple[float, float], offset: tuple[float, float], said: str, **look: Any
) -> None:
    """Text `offset` points away from a place on the axes."""
    axes.annotate(said, place, offset, textcoords="offset points", **look)


def guess(
    axes: Axes,
    place: tuple[float, float],
    said: str = "",
    offset: tuple[float, float] = (0, 8),
    **look: Any,
) -> None:
    """A hollow diamond with its name, centered above it or at the `offset`."""
    axes.plot(*place, clip_on=False, zorder=look.pop("zorder", 4), **style.GUESS)
    if offset == (0, 8):
        look = {"ha": "center", "va": "bottom", **look}
    note(axes, place, offset, said, **look)


def beside(axes: Axes, inches: float, y: float, said: str, **look: Any) -> None:
    """Text to the right of the axes, `inches` away, at the height `y` of the data."""
    x = 1 + inches / style.inches(axes)[0]
    axes.text(x, y, said, transform=axes.get_yaxis_transform(), va="center", **look)


def below(axes: Axes, x: float, inches: float, said: str, **look: Any) -> None:
    """Text centered under the axes, `inches` lower, at the place `x` of the data."""
    look = {"ha": "center", "va": "top", **look}
    y = -inches / style.inches(axes)[1]
    axes.text(x, y, said, transform=axes.get_xaxis_transform(), **look)


def over(axes: Axes, x: float, inches: float, said: str, **look: Any) -> None:
    """Text over the axes, `inches` higher, centered at the share `x` of their width."""
    look = {"ha": "center", "va": "bottom", **look}
    axes.text(x, 1 + inches / style.inches(axes)[1], said, transform=axes.transAxes, **look)


def over_spread(
    axes: Axes, labels: Sequence[tuple[float, str]], inches: float, pad: float, **look: Any
) -> None:
    """Texts over the axes at inches from their left end, moved apart where they would touch."""
    width, _ = style.inches(axes)
    sizes = [style.width_of(said) + pad for _, said in labels]
    places = spread([place for place, _ in labels], sizes, 0, width)
    for place, (_, said) in zip(places, labels, strict=True):
        over(axes, place / width, inches, said, **look)


def key_rows(entries: Sequence[Swatch], width: float = style.WIDE) -> list[list[Swatch]]:
    """The swatches of a key, in as many rows as a figure of that width needs."""
    found: list[list[Swatch]] = []
    used = width
    for entry in entries:
        size = 0.41 + style.width_of(entry[0])
        if used + size > width - 0.1:
            found.append([])
            used = 0.1
        found[-1].append(entry)
        used += size
    return found


def key(axes: Axes, entries: Sequence[Swatch], *, above: float = 0.08) -> None:
    """Swatches over the axes, `above` inches higher, for what is too thin to carry its own label.

    Each row of them takes 0.2 inches.
    """
    box, (width, height) = axes.get_position(), style.figure_inches(axes)
    for row, swatches in enumerate(reversed(key_rows(entries, width))):
        x, y = 0.1, box.y1 * height + above + 0.2 * row
        for label, color, hatch in swatches:
            corner, size = (x / width, y / height), (0.13 / width, 0.13 / height)
            look: style.Look = {"facecolor": color, "hatch": hatch * 2, **style.EDGE}
            axes.figure.add_artist(Rectangle(corner, *size, **look))
            axes.figure.text((x + 0.19) / width, (y + 0.065) / height, label, va="center_baseline")
            x += 0.41 + style.width_of(label)


def limit(axes: Axes, place: float, label: str) -> None:
    """A dashed vertical line at `place` with its name on top; off the scale, how far away it is."""
    low, high = axes.get_xlim()
    if place > high:
        label = f"{label}, {style.times(place / high)} the length of this axis →"
        over(axes, 1, 0.05, label, ha="right")
        return
    axes.axvline(place, color=style.INK, linestyle="--", linewidth=1.2)
    half = style.width_of(label) / 2 / style.inches(axes)[0]
    over(axes, min(max((place - low) / (high - low), half), 1.05 - half), 0.05, label)


def name_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str]
) -> None:
    """The name of every line beside the axes, tied to the point where the line ends."""
    axes.autoscale_view()
    width, height = style.inches(axes)
    shares = axes.transAxes.inverted().transform(axes.transData.transform(list(ends.values())))
    places = [
        (min(x, 1.0), min(max(y, 0.0), 1.0) if math.isfinite(y) else 1.0)
        for x, y in shares.tolist()
    ]
    heights = spread([y * height for _, y in places], [LINE] * len(places), 0, height)
    tie = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
    far = {"linestyle": ":", "color": style.NEUTRAL[1]}  # across the axes it would look like data
    for (name, end), y in zip(zip(ends, places, strict=True), heights, strict=True):
        look: style.Look = {"va": "center", "color": colors[name], "weight": "bold"}
        to, arrow = (1 + 0.14 / width, y / height), {**tie, "color": colors[name]}
        arrow |= far if end[0] < 0.95 else {}
        axes.annotate(name, end, to, "axes fraction", "axes fraction", arrow, **look)


def beside_lines(axes: Axes, ends: Mapping[str, float], colors: Mapping[str, str]) -> None:
    """Labels beside the axes at the heights of the data where their lines end, moved apart."""
    width, height = style.inches(axes)
    low, high = axes.get_ylim()
    places = [(end - low) / (high - low) * height for end in ends.values()]
    heights = spread(places, [LINE] * len(places), 0, height)
    for label, y in zip(ends, heights, strict=True):
        look: style.Look = {"va": "center", "color": colors[label], "weight": "bold"}
        axes.text(1 + 0.15 / width, y / height, label, transform=axes.transAxes, **look)


def spread(places: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """`places` of labels that are `sizes` long, moved apart as little as needed.

    They stay within `low` and `high` where there is room. Labels closer than a sixteenth of their
    length keep the order in which they are given: which of two is higher may be rounding.

    >>> spread([1, 1, 5], [1, 1, 1], 0, 10), spread([1.01, 1, 5], [1, 1, 1], 0, 10)[:2]
    ([0.5, 1.5, 5.0], [0.505, 1.505])
    """
    if not places:
        return []
    order = _ranked(places, sizes)
    offsets = [0.0]
    for previous, i in itertools.pairwise(order):
        offsets.append(offsets[-1] + (sizes[previous] + sizes[i]) / 2)
    # Without their offsets, labels that touch are equal: what is left is to make the places
    # ascend, by pooling the neighbors that do not.
    pools: list[tuple[float, int]] = []
    for i, offset in zip(order, offsets, strict=True):
        total, members = places[i] - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / members:
            total, members = total + pools[-1][0], members + pools[-1][1]
            pools.pop()
        pools.append((total, members))
    ascending = []
    for total, members in pools:
        ascending += [total / members] * members
    least, most = low + sizes[order[0]] / 2, high - sizes[order[-1]] / 2 - offsets[-1]
    placed = [0.0] * len(places)
    for i, offset, place in zip(order, offsets, ascending, strict=True):
        placed[i] = max(least, min(place, most)) + offset
    return placed


def _ranked(places: Sequence[float], sizes: Sequence[float]) -> list[int]:
    """The labels in ascending order; those that are close, as they are given."""
    groups: list[list[int]] = []
    for i in sorted(range(len(places)), key=lambda i: places[i]):
        if groups and places[i] - places[groups[-1][0]] < sizes[i] / 16:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [i for group in groups for i in sorted(group)]
