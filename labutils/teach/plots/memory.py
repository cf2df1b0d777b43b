"""Bytes held: side by side, and over the course of a step."""

import itertools

from matplotlib.axes import Axes

from labutils import units
from labutils.config import Hardware
from labutils.ledger import Ledger
from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture
from labutils.timeline import History


@style.drawn
def memory_bars(
    *,
    capacity: Hardware | None = None,
    title: str | None = None,
    **ledgers: Ledger,
) -> Picture:
    """A bar for each ledger, stacked by component and hatched by the axis that shards it; `capacity` is a dashed line."""
    ledgers = _named(ledgers)
    largest = max(ledger.total for ledger in ledgers.values())
    factor, unit = style.scale(largest, "B")
    room = largest * 1.02
    if capacity is not None and capacity.memory <= 3 * largest:
        room = max(room, capacity.memory * 1.02)
    names = list(ledgers)
    stacks = {name: _stack(ledger) for name, ledger in ledgers.items()}
    together = _stack(Ledger(line for ledger in ledgers.values() for line in ledger))
    components = list(
        dict.fromkeys(component for (component, _), amount in together.items() if amount)
    )

    shards = list(
        dict.fromkeys(axis for stack in stacks.values() for _, axis in stack if axis in style.AXES)
    )
    entries = [
        (component, style.component_color(component, components), "") for component in components
    ]
    entries += [(f"sharded by {axis}", style.PAPER, style.AXES[axis][1]) for axis in shards]
    above = 0.1 + 0.2 * (capacity is not None)

    width, right = style.WIDE, 0.75
    left = max(map(style.width_of, names)) + 0.25
    figure, axes = style.canvas(
        title or _bars_finding(ledgers, capacity),
        height=0.42 * len(names) + 0.1,
        left=left,
        right=right,
        top=above + 0.2 * len(style.key_rows(entries)),
        xlabel=f"memory ({unit})",
    )
    per_inch = room / factor / (width - left - right)
    for row, name in enumerate(names):
        start = 0.0
        for (component, axis), amount in stacks[name].items():
            size, color = amount / factor, style.component_color(component, components)
            axes.barh(
                row,
                size,
                0.62,
                left=start,
                color=color,
                hatch=style.AXES[axis][1] * 2 if axis in style.AXES else "",
                **style.EDGE,
            )
            label = units.text(amount)
            if style.width_of(label) + 0.06 < size / per_inch:
                box = (
                    {"facecolor": color, "edgecolor": "none", "pad": 1}
                    if axis in style.AXES
                    else None
                )
                axes.text(
                    start + size / 2,
                    row,
                    label,
                    ha="center",
                    va="center",
                    color=style.on(color),
                    bbox=box,
                )
            start += size
        blank = {
            "facecolor": style.PAPER,
            "edgecolor": "none",
            "pad": 1,
        }  # the line of the capacity stops at a total
        axes.text(
            start + 0.06 * per_inch,
            row,
            units.text(ledgers[name].total),
            va="center",
            weight="bold",
            bbox=blank,
            zorder=4,
        )
    axes.set(xlim=(0, room / factor), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    style.key(axes, entries, above=above)
    if capacity is not None:
        style.limit(
            axes, capacity.memory / factor, f"{capacity.name} · {units.text(capacity.memory)}"
        )
    told = "; ".join(f"{name}: {_told(ledger)}" for name, ledger in ledgers.items())
    against = (
        f", against the {units.text(capacity.memory)} of one {capacity.name}" if capacity else ""
    )
    return Picture(figure, f"Stacked bars of memory by component{against}. {told}.")


@style.drawn
def memory_timeline(
    history: History, *, capacity: Hardware | None = None, title: str | None = None
) -> Picture:
    """Bytes alive after every operation of a step, stacked by component; phases are named above, the fullest moment is marked."""
    moments = history.moments
    held = [moment.ledger.by("component") for moment in moments]
    components = [
        c
        for c in dict.fromkeys(c for moment in held for c in moment)
        if any(moment.get(c) for moment in held)
    ]
    order = [c for c in style.COMPONENTS if c in components] + [
        c for c in components if c not in style.COMPONENTS
    ]
    factor, unit = style.scale(history.peak.ledger.total, "B")
    top = history.peak.ledger.total / factor * 1.12
    if capacity is not None and capacity.memory <= 3 * history.peak.ledger.total:
        top = max(top, capacity.memory / factor * 1.08)

    bands, floor = {}, [0.0] * len(moments)
    for component in order:
        ceiling = [
            low + moment.get(component, 0) / factor for low, moment in zip(floor, held, strict=True)
        ]
        bands[component] = floor, ceiling
        floor = ceiling
    height, left, right = 2.4, 0.62, 0.15
    inch, step = height / top, (style.WIDE - left - right) / len(moments)
    homes = {
        component: _home(band, inch, step, style.width_of(component))
        for component, band in bands.items()
    }
    entries = [
        (component, style.component_color(component, order), "")
        for component in order
        if homes[component] is None
    ]

    figure, axes = style.canvas(
        title
        or f"Memory peaks at {units.text(history.peak.ledger.total)} in the {history.peak.phase}",
        top=0.28 + 0.2 * len(style.key_rows(entries)),
        height=height,
        left=left,
        right=right,
        ylabel=f"memory ({unit})",
        xlabel="operations, in order",
    )
    edges = [i - 0.5 for i in range(len(moments) + 1)]
    for component, (low, high) in bands.items():
        color = style.component_color(component, order)
        axes.stairs(high, edges, baseline=low, fill=True, facecolor=color, **style.EDGE)
        if homes[component]:
            axes.text(*homes[component], component, ha="center", va="center", color=style.on(color))
    style.key(axes, entries, above=0.3)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, top))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _name_phases(axes, [moment.phase for moment in moments])

    peak, label = moments.index(history.peak), f"peak {units.text(history.peak.ledger.total)}"
    axes.plot(peak, floor[peak], "v", color=style.INK, markersize=7, clip_on=False, zorder=5)
    side = -1 if (len(moments) - peak) * step < style.width_of(label, weight="bold") + 0.2 else 1
    axes.annotate(
        label,
        (peak, floor[peak]),
        xytext=(8 * side, 3),
        textcoords="offset points",
        ha="left" if side > 0 else "right",
        weight="bold",
        bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 1},
    )
    if capacity is not None and capacity.memory / factor <= top:
        axes.axhline(capacity.memory / factor, color=style.INK, linestyle="--", linewidth=1.2)
        axes.text(
            edges[0],
            capacity.memory / factor,
            f" {capacity.name} · {units.text(capacity.memory)}",
            va="bottom",
        )
    phases = "; ".join(
        f"{phase}: up to {units.text(moment.ledger.total)}"
        for phase, moment in history.phases.items()
    )
    return Picture(
        figure,
        f"Memory over {len(moments)} operations, stacked by {style.listed(order)}. {phases}. "
        f"At the peak, after {history.peak.event} in the {history.peak.phase}: {_told(history.peak.ledger)}.",
    )


def _named(ledgers: dict[str, Ledger]) -> dict[str, Ledger]:
    if not ledgers:
        raise ValueError("memory_bars needs at least one ledger: memory_bars(measured=ledger)")
    for name, ledger in ledgers.items():
        if not isinstance(ledger, Ledger):
            raise TypeError(f"{name}: a bar is drawn from a Ledger, got {type(ledger).__name__}")
        if not ledger.total:
            raise ValueError(f"{name}: this ledger is empty, so there is no bar to draw")
        if any(line.amount < 0 for line in ledger):
            raise ValueError(
                f"{name}: a bar cannot show negative bytes; take the lines with amounts below 0 out"
            )
    return {name.replace("_", " "): ledger for name, ledger in ledgers.items()}


def _stack(ledger: Ledger) -> dict[tuple[str, str], int]:
    """Bytes by (component, axis), known components in the order of the palette."""
    sums: dict[tuple[str, str], int] = {}
    for line in ledger:
        part = line.component or line.name, line.axis
        sums[part] = sums.get(part, 0) + line.amount
    known = list(style.COMPONENTS)
    return dict(
        sorted(
            sums.items(),
            key=lambda part: known.index(part[0][0]) if part[0][0] in known else len(known),
        )
    )


def _told(ledger: Ledger) -> str:
    sums: dict[str, int] = {}
    for (component, _), amount in _stack(ledger).items():
        sums[component] = sums.get(component, 0) + amount
    parts = style.listed(
        [f"{component} {units.text(amount)}" for component, amount in sums.items() if amount]
    )
    return f"{parts}, {units.text(ledger.total)} in all" if len(sums) > 1 else parts


def _bars_finding(ledgers: dict[str, Ledger], capacity: Hardware | None) -> str:
    if capacity is not None:
        fitting = [name for name, ledger in ledgers.items() if ledger.total <= capacity.memory]
        if not fitting:
            return f"{'It does not fit' if len(ledgers) == 1 else 'None of these fits'} in the {units.text(capacity.memory)} of one {capacity.name}"
        if len(fitting) < len(ledgers):
            return f"Only {style.listed(fitting)} {'fits' if len(fitting) == 1 else 'fit'} in the {units.text(capacity.memory)} of one {capacity.name}"
    biggest = max(ledgers, key=lambda name: ledgers[name].total)
    (component, _), amount = max(_stack(ledgers[biggest]).items(), key=lambda part: part[1])
    share = amount / ledgers[biggest].total
    if len(ledgers) == 1:
        return f"{share:.0%} of the {units.text(ledgers[biggest].total)} is {component}"
    smallest = min(ledgers, key=lambda name: ledgers[name].total)
    if ledgers[smallest].total == ledgers[biggest].total:
        return f"All hold the same {units.text(ledgers[biggest].total)}"
    return f"{biggest} holds {style.times(ledgers[biggest].total / ledgers[smallest].total)} what {smallest} holds"


def _home(
    band: tuple[list[float], list[float]], inch: float, step: float, wanted: float
) -> tuple[float, float] | None:
    """The middle of the widest stretch of a band that holds a line of text `wanted` inches long; None if there is none."""
    low, high = band
    best, home = wanted + 0.1, None
    for first in range(0, len(low), max(1, len(low) // 200)):
        floor, ceiling = low[first], high[first]
        for last in range(first, len(low)):
            floor, ceiling = max(floor, low[last]), min(ceiling, high[last])
            if (ceiling - floor) * inch < 0.17:
                break
            if (last + 1 - first) * step > best:
                best, home = (last + 1 - first) * step, ((first + last) / 2, (floor + ceiling) / 2)
    return home


def _name_phases(axes: Axes, phases: list[str]) -> None:
    """A thin line where one phase ends and the next begins, and over the axes the name of every phase that is wide enough to see."""
    width, height = style.inches(axes)
    step = width / len(phases)
    runs, start = [], 0
    for phase, run in itertools.groupby(phases):
        length = len(list(run))
        if length * step > 0.08:
            if runs:
                axes.axvline(start - 0.5, color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
            runs.append((phase, start + length / 2))
        start += length
    sizes = [style.width_of(phase) + 0.12 for phase, _ in runs]
    for (phase, _), x in zip(
        runs, style.spread([middle * step for _, middle in runs], sizes, 0, width), strict=True
    ):
        axes.text(
            x / width,
            1 + 0.07 / height,
            phase,
            transform=axes.transAxes,
            ha="center",
            va="bottom",
            color=style.FAINT,
        )
