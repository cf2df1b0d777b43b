"""Who holds what: weights, gradients and optimizer state of every rank over a step, at every level of ZeRO."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from labutils import units
from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture
from labutils.timeline import Occupancy


@style.drawn
def who_holds(*, title: str | None = None, **levels: Sequence[Occupancy]) -> Picture:
    """A cell for each rank (row) and level (column): painted is what the rank holds, elements upwards, the step from left to right.

    The height of a component stands for its bytes, so that a painted area is bytes times operations. Phases are given equal widths.
    """
    if not levels or not all(levels.values()):
        raise ValueError(
            "who_holds needs the occupancy of every rank for at least one level: who_holds(level_3=world.run(step))"
        )
    if any(not held.spans for ranks in levels.values() for held in ranks):
        raise ValueError("an occupancy has no spans: nothing was held, or nothing was recorded")
    named = {name.replace("_", " "): list(ranks) for name, ranks in levels.items()}
    size = max(map(len, named.values()))
    left, right, gap, cell, band_gap = style.width_of("rank 0") + 0.2, 0.1, 0.14, 0.86, 0.04
    width = (style.WIDE - left - right - gap * (len(named) - 1)) / len(named)
    height = size * cell + (size - 1) * gap
    components = list(next(iter(named.values()))[0].itemsizes)
    figure, axes = style.canvas(
        title or _finding(named), height=height, left=left, right=right, top=0.62, bottom=0.26
    )
    axes.set(xlim=(0, style.WIDE - left - right), ylim=(height, 0))
    axes.axis("off")
    style.key(
        axes,
        [(component, style.component_color(component, components), "") for component in components],
        above=0.42,
    )
    for column, (name, ranks) in enumerate(named.items()):
        x = column * (width + gap)
        share = max(held.peak for held in ranks) / ranks[0].whole
        axes.text(x, -0.24, name, weight="bold", va="baseline")
        axes.text(x, -0.08, f"at most {share:.0%} at once", va="baseline")
        for row, held in enumerate(ranks):
            y = row * (cell + gap)
            if not column:
                axes.text(-0.08, y + cell / 2, f"rank {row}", ha="right", va="center")
            _cell(axes, held, components, x, y, width, cell, band_gap)
        for phase, (start, end) in _phases(ranks[0]).items():
            middle = x + (start + end) / 2 * width
            axes.text(
                middle, height + 0.05, phase, va="top", ha="center", size=7, color=style.FAINT
            )
    told = "; ".join(
        f"{name}: at most "
        + ", ".join(f"{units.text(held.peak)} on rank {row}" for row, held in enumerate(ranks))
        for name, ranks in named.items()
    )
    return Picture(
        figure,
        f"A grid of {size} ranks by {style.listed(list(named))}: which elements of {style.listed(components)} each rank holds, from forward over backward "
        f"to step. {told}; everything would be {units.text(next(iter(named.values()))[0].whole)}.",
    )


def _cell(
    axes: Any,
    held: Occupancy,
    components: Sequence[str],
    x: float,
    y: float,
    width: float,
    height: float,
    gap: float,
) -> None:
    """One rank at one level: a band for each component, its first element at the top."""
    phases, total = _phases(held), sum(held.itemsizes[component] for component in components)
    room = height - gap * (len(components) - 1)
    for component in components:
        deep = room * held.itemsizes[component] / total
        axes.add_patch(
            Rectangle(
                (x, y),
                width,
                deep,
                facecolor=style.PAPER,
                edgecolor=style.NEUTRAL[0],
                linewidth=0.5,
                zorder=1,
                clip_on=False,
            )
        )
        for span in held.spans:
            if span.kind == component:
                begin, end = _time(held, phases, span.start), _time(held, phases, span.end)
                low, high = (place / held.numel for place in span.elements)
                color = style.component_color(component, components)
                axes.add_patch(
                    Rectangle(
                        (x + begin * width, y + low * deep),
                        (end - begin) * width,
                        (high - low) * deep,
                        facecolor=color,
                        linewidth=0,
                        zorder=2,
                    )
                )
        axes.add_patch(
            Rectangle(
                (x, y),
                width,
                deep,
                facecolor="none",
                edgecolor=style.INK,
                linewidth=0.5,
                zorder=4,
                clip_on=False,
            )
        )
        for start, _ in list(phases.values())[1:]:
            axes.plot(
                [x + start * width] * 2,
                [y, y + deep],
                color=style.INK,
                linewidth=0.5,
                linestyle=":",
                zorder=3,
            )
        y += deep + gap


def _phases(held: Occupancy) -> dict[str, tuple[float, float]]:
    """Where each phase lies on a step of length 1: all are equally wide."""
    return {
        phase: (k / len(held.phases), (k + 1) / len(held.phases))
        for k, phase in enumerate(held.phases)
    }


def _time(held: Occupancy, phases: Mapping[str, tuple[float, float]], operation: int) -> float:
    """The place of an operation on a step of length 1."""
    starts = [*held.phases.values(), held.operations]
    for (begin, end), first, after in zip(phases.values(), starts, starts[1:], strict=False):
        if operation <= after:
            return begin + (end - begin) * (operation - first) / max(1, after - first)
    return 1.0


def _finding(named: Mapping[str, Sequence[Occupancy]]) -> str:
    shares = {
        name: max(held.peak for held in ranks) / ranks[0].whole for name, ranks in named.items()
    }
    if len(shares) == 1:
        ((name, share),) = shares.items()
        return f"At {name} a rank never holds more than {share:.0%} of all weights, gradients and optimizer state"
    most, least = max(shares, key=shares.get), min(shares, key=shares.get)
    return f"Painted is what a rank holds: {shares[most]:.0%} of everything at {most}, never more than {shares[least]:.0%} at {least}"
