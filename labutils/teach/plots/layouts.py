"""Who has which tokens of a sequence, and which of the scores that leaves to whom."""

import itertools
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Polygon

from labutils.teach.plots import draw, style
from labutils.teach.plots.picture import Picture

Grid = Mapping[tuple[int, int], tuple[int, int]]  # (chunk of queries, of keys): (rank, step)
_SIDE, _GAP = 2.5, 0.95  # inches: a square of scores, and what stands between two


@style.drawn
def who_computes(*, title: str | None = None, shares: bool = True, **grids: Grid) -> Picture:
    """The causal scores of a sequence in each layout, queries down and keys across, side by side.

    A cell has the color of the rank that computes it, and the number of the step in which its keys
    are there. Left of each row of queries stands the rank that has them.

    shares: a bar below, cut into what part of all work each rank has
    """
    grids = style.spaced(grids)
    work = {name: _shares(grid) for name, grid in grids.items()}
    _, axes = style.canvas(
        title or _finding(work),
        height=_SIDE + (0.8 if shares else 0.4),
        left=0.1,
        right=0.1,
        bottom=0.1,
        top=0.05,
    )
    axes.set_axis_off()
    wide, high = style.inches(axes)
    axes.set(xlim=(0, wide), ylim=(high, 0))
    for at, (name, grid) in enumerate(grids.items()):
        left = 0.75 + at * (_SIDE + _GAP)
        axes.text(left, 0.12, name, weight="bold", va="center")
        _square(axes, grid, left, 0.3)
        if shares:
            axes.text(left - 0.08, _SIDE + 0.59, "all the work", ha="right", va="center", size=8)
        x = left
        for rank, share in enumerate(work[name] if shares else ()):
            color, wide = style.SERIES[rank % len(style.SERIES)], share * _SIDE
            draw.box(axes, x, _SIDE + 0.48, wide, 0.22, color)
            look: style.Look = {"ha": "center", "va": "center_baseline", "color": style.on(color)}
            if style.width_of(said := f"{share:.0%}", 7) < wide:
                axes.text(x + wide / 2, _SIDE + 0.59, said, size=7, **look)
            x += wide
    told = "; ".join(
        f"{name}: " + ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(each))
        for name, each in work.items()
    )
    alt = (
        "Causal scores of a sequence as a lower triangle, each cell in the color of the rank that "
        "computes it, with the step of the ring in which it does"
    )
    return Picture(axes.figure, f"{alt}. Share of the work: {told}." if shares else f"{alt}.")


def _square(axes: Axes, grid: Grid, left: float, top: float) -> None:
    """The scores of one layout, from that corner on."""
    chunks = 1 + max(row for row, _ in grid)
    c = _SIDE / chunks
    for row, column in itertools.product(range(chunks), repeat=2):
        x, y = left + column * c, top + row * c
        if (row, column) not in grid:
            draw.box(axes, x, y, c, c, style.PAPER, edgecolor=style.NEUTRAL[3])
            continue
        rank, step = grid[row, column]
        color = style.SERIES[rank % len(style.SERIES)]
        if row == column:
            axes.add_patch(Polygon([(x, y), (x, y + c), (x + c, y + c)], fc=color, **style.EDGE))
            owner = f"rank {rank}"
            axes.text(left - 0.08, y + c / 2, owner, ha="right", va="center", size=8, color=color)
        else:
            draw.box(axes, x, y, c, c, color)
        place = (x + c * (0.3 if row == column else 0.5), y + c * (0.7 if row == column else 0.5))
        look: style.Look = {"size": min(9, 22 * c), "color": style.on(color)}
        axes.text(*place, str(step), ha="center", va="center", **look)


def _shares(grid: Grid) -> list[float]:
    """Of all scores that the mask leaves, the part that each rank computes; chunks are long."""
    work: dict[int, float] = {}
    for (row, column), (rank, _) in sorted(grid.items(), key=lambda cell: cell[1]):
        work[rank] = work.get(rank, 0) + (0.5 if row == column else 1)
    return [amount / sum(work.values()) for amount in work.values()]


def _finding(shares: Mapping[str, list[float]]) -> str:
    worst = {name: max(each) * len(each) for name, each in shares.items()}
    said = [f"{name}: {factor:.2f} times the average" for name, factor in worst.items()]
    return f"What the busiest rank computes, {'; '.join(said)}"
