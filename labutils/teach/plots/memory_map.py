"""The address space of an allocator: segments as rows, blocks as cells, so that a hole that is too small can be seen."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.patches import Rectangle

from labutils import units
from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture


class Block(Protocol):
    """`size` bytes that are "used" under a `name`, "free" or "unmapped"."""

    size: int
    state: str
    name: str


@style.drawn
def memory_map(
    *, title: str, asked: int = 0, capacity: int = 0, **moments: Sequence[Sequence[Block]]
) -> Picture:
    """A row for each moment: its segments end to end, used blocks in the color of their name, free ones hatched; amounts in MiB, as allocators count.

    `asked` is a request of so many bytes, drawn to scale; `capacity` a dashed line: what the device has.
    """
    if not moments:
        raise ValueError(
            "memory_map needs at least one moment: memory_map(title=…, now=allocator.segments)"
        )
    named: Mapping[str, list[list[Block]]] = {
        name.replace("_", " "): [
            [block for block in segment if block.state != "unmapped"] for segment in segments
        ]
        for name, segments in moments.items()
    }
    largest = max(
        sum(block.size for segment in segments for block in segment) for segments in named.values()
    )
    if not largest:
        raise ValueError(
            "nothing is reserved at any of these moments: draw the map after the first request"
        )
    longest = max(largest, asked, capacity)
    factor, unit = next(
        (factor, unit)
        for factor, unit in ((units.GIB, "GiB"), (units.MIB, "MiB"), (units.KIB, "KiB"), (1, "B"))
        if longest >= factor
    )
    gap = 0.006 * longest / factor  # between segments
    rows = len(named) + bool(asked)
    room = (
        max(
            largest / factor + gap * max(len(segments) for segments in named.values()),
            longest / factor,
        )
        * 1.01
    )
    names = list(
        dict.fromkeys(
            block.name
            for segments in named.values()
            for segment in segments
            for block in segment
            if block.state == "used"
        )
    )
    colors = {
        name: style.component_color(name, names)
        if name in style.COMPONENTS
        else style.SERIES[i % len(style.SERIES)]
        for i, name in enumerate(names)
    }
    labels = [*named, *(["asked for"] if asked else [])]
    left = max(map(style.width_of, labels)) + 0.25
    entries = [(name, colors[name], "") for name in names] + [("free", style.PAPER, "//")]
    above = 0.1 + 0.2 * bool(capacity)
    figure, axes = style.canvas(
        title,
        height=0.42 * rows + 0.1,
        left=left,
        right=0.5 if capacity else 0.15,  # the name of the line may stand out a little
        top=above + 0.2 * len(style.key_rows(entries)),
        xlabel=f"reserved memory, segment after segment ({unit})",
    )
    width, _ = style.inches(axes)
    for row, segments in enumerate(named.values()):
        x = 0.0
        for segment in segments:
            start = x
            for block in segment:
                size, used = block.size / factor, block.state == "used"
                fill = colors[block.name] if used else style.PAPER
                axes.add_patch(
                    Rectangle(
                        (x, row - 0.3),
                        size,
                        0.6,
                        facecolor=fill,
                        hatch="" if used else "////",
                        edgecolor=style.FAINT,
                        linewidth=0.4,
                    )
                )
                label = units.text(block.size, binary=True)
                if style.width_of(label) + 0.08 < size / room * width:
                    box = (
                        None if used else {"facecolor": style.PAPER, "edgecolor": "none", "pad": 1}
                    )
                    axes.text(
                        x + size / 2,
                        row,
                        label,
                        ha="center",
                        va="center",
                        color=style.on(fill),
                        bbox=box,
                    )
                x += size
            axes.add_patch(
                Rectangle(
                    (start, row - 0.3),
                    x - start,
                    0.6,
                    facecolor="none",
                    edgecolor=style.INK,
                    linewidth=1.2,
                )
            )
            x += gap
    if asked:
        axes.add_patch(
            Rectangle(
                (0, rows - 1.3),
                asked / factor,
                0.6,
                facecolor="none",
                edgecolor=style.INK,
                linewidth=1.4,
                linestyle="--",
            )
        )
        axes.text(
            asked / factor / 2, rows - 1, units.text(asked, binary=True), ha="center", va="center"
        )
    axes.set(xlim=(0, room), ylim=(rows - 0.5, -0.5))
    axes.set_yticks(range(rows), labels)
    axes.tick_params(axis="y", length=0)
    style.key(axes, entries, above=above)
    if capacity:
        style.limit(axes, capacity / factor, f"device · {units.text(capacity, binary=True)}")
    told = "; ".join(f"{name}: {_told(segments)}" for name, segments in named.items())
    drawn = [f"A request of {units.text(asked, binary=True)} is drawn to scale."] * bool(asked)
    drawn += [f"A dashed line marks the {units.text(capacity, binary=True)} of the device."] * bool(
        capacity
    )
    return Picture(figure, " ".join([f"Map of reserved memory. {told}.", *drawn]))


def _told(segments: Sequence[Sequence[Block]]) -> str:
    blocks = [block for segment in segments for block in segment]
    free = [block.size for block in blocks if block.state == "free"]
    used, unused, largest = (
        units.text(amount, binary=True)
        for amount in (
            sum(block.size for block in blocks) - sum(free),
            sum(free),
            max(free, default=0),
        )
    )
    count = f"{len(segments)} segment{'s' * (len(segments) != 1)}, {used} in use"
    return count + (
        f", {unused} free in {len(free)} block{'s' * (len(free) != 1)}, the largest {largest}"
        if free
        else ", nothing free"
    )
