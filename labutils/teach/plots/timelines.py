"""What happens when, from left to right: memory, work and messages, plans, what each rank holds."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import StepPatch

from labutils import units
from labutils.config import Hardware
from labutils.teach.plots import bars, draw, style
from labutils.teach.plots.picture import Picture
from labutils.timeline import COMMUNICATION, History, Occupancy, Span, Timeline
from labutils.trace import Trace

# Memory over a step.

Band = tuple[list[float], list[float]]  # floor and ceiling after every operation


@style.drawn
def memory_timeline(
    history: History, *, capacity: Hardware | None = None, title: str | None = None
) -> Picture:
    """Bytes alive after every operation of a step, stacked by component.

    Phases are named above, the fullest moment is marked; `capacity` is a dashed line.
    """
    moments, peak, total = history.moments, history.peak, history.peak.ledger.total
    factor, unit = style.scale(total, "B")
    top = total / factor * 1.12
    if capacity is not None and capacity.memory <= 3 * total:
        top = max(top, capacity.memory / factor * 1.08)
    bands = _bands(history, factor)
    colors = style.component_colors(bands)
    height, left, right = 2.4, 0.62, 0.15
    inch, step = height / top, (style.WIDE - left - right) / len(moments)
    homes = {name: _home(*band, inch, step, style.width_of(name)) for name, band in bands.items()}
    entries = [(name, colors[name], "") for name, home in homes.items() if home is None]
    _, axes = style.canvas(
        title or f"Memory peaks at {units.text(total)} in the {peak.phase}",
        top=0.28 + 0.2 * len(draw.key_rows(entries)),
        height=height,
        left=left,
        right=right,
        ylabel=f"memory ({unit})",
        xlabel="operations, in order",
    )
    edges = [i - 0.5 for i in range(len(moments) + 1)]
    for name, (low, high) in bands.items():
        # Not axes.stairs, which looks at every step for limits that are set below.
        look: style.Look = {"baseline": low, "fill": True, "facecolor": colors[name]}
        axes.add_artist(StepPatch(high, edges, **look, **style.EDGE))
        if (home := homes[name]) is not None:
            ink = style.on(colors[name])
            axes.text(*home, name, ha="center", va="center", color=ink)
    draw.key(axes, entries, above=0.3)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, top))
    style.whole_ticks(axes.xaxis)
    _name_phases(axes, [moment.phase for moment in moments])
    _mark_peak(axes, moments.index(peak), total / factor, f"peak {units.text(total)}")
    if capacity is not None and capacity.memory / factor <= top:
        y, said = capacity.memory / factor, f" {capacity.name} · {units.text(capacity.memory)}"
        axes.axhline(y, color=style.INK, linestyle="--", linewidth=1.2)
        axes.text(edges[0], y, said, va="bottom")
    peaks = {phase: units.text(moment.ledger.total) for phase, moment in history.phases.items()}
    phases = "; ".join(f"{phase}: up to {held}" for phase, held in peaks.items())
    return Picture(
        axes.figure,
        f"Memory over {len(moments)} operations, stacked by {style.listed(list(bands))}. {phases}. "
        f"At the peak, after {peak.event} in the {peak.phase}: {bars.tell(peak.ledger)}.",
    )


def _bands(history: History, factor: float) -> dict[str, Band]:
    """Where each component lies on the others, known ones at the bottom."""
    held = [moment.ledger.by("component") for moment in history.moments]
    named = dict.fromkeys(itertools.chain(*held))
    present = [name for name in named if any(moment.get(name) for moment in held)]
    known = [name for name in style.COMPONENT_COLORS if name in present]
    bands, floor = {}, [0.0] * len(held)
    for name in [*known, *(name for name in present if name not in known)]:
        amounts = [moment.get(name, 0) / factor for moment in held]
        ceiling = [low + amount for low, amount in zip(floor, amounts, strict=True)]
        bands[name] = floor, ceiling
        floor = ceiling
    return bands


def _home(
    low: list[float], high: list[float], inch: float, step: float, wanted: float
) -> tuple[float, float] | None:
    """The middle of the widest stretch of a band that holds a text `wanted` inches long, if any."""
    best, home = wanted + 0.1, None
    for first in range(0, len(low), max(1, len(low) // 200)):
        if (len(low) - first) * step <= best:  # too little is left
            break
        floor, ceiling = low[first], high[first]
        for last in range(first, len(low)):
            floor, ceiling = max(floor, low[last]), min(ceiling, high[last])
            if (ceiling - floor) * inch < draw.LINE:
                break
            if (last + 1 - first) * step > best:
                best, home = (last + 1 - first) * step, ((first + last) / 2, (floor + ceiling) / 2)
    return home


def _name_phases(axes: Axes, phases: list[str]) -> None:
    """A thin line between phases, and over the axes the name of each that is wide enough to see."""
    step = style.inches(axes)[0] / len(phases)
    labels: list[tuple[float, str]] = []
    start = 0
    for phase, run in itertools.groupby(phases):
        length = len(list(run))
        if length * step > 0.08:
            if labels:
                axes.axvline(start - 0.5, color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
            labels.append(((start + length / 2) * step, phase))
        start += length
    draw.over_spread(axes, labels, 0.07, 0.12, color=style.FAINT)


def _mark_peak(axes: Axes, x: int, y: float, label: str) -> None:
    axes.plot(x, y, "v", color=style.INK, markersize=7, clip_on=False, zorder=5)
    room = (axes.get_xlim()[1] - x + 0.5) / sum(axes.get_xlim()) * style.inches(axes)[0]
    side, ha = (-1, "right") if room < style.width_of(label, weight="bold") + 0.2 else (1, "left")
    draw.note(axes, (x, y), (8 * side, 3), label, ha=ha, weight="bold", bbox=draw.BLANK)


# Computation and communication.

LOOKS = {
    "forward": ("forward pass", style.PASS_COLORS["forward"], ""),
    "backward": ("backward pass", style.PASS_COLORS["backward"], ""),
    "gather": ("all-gather of weights", style.COMPONENT_COLORS["weights"], "//"),
    "reduce": ("reduction of gradients", *style.AXIS_COLORS["dp"]),
    "exchange": ("activations of other ranks", *style.AXIS_COLORS["tp"]),
    "route": ("all-to-all of tokens", *style.AXIS_COLORS["ep"]),
    "pass": ("keys and values passed on", *style.AXIS_COLORS["cp"]),
    "update": ("optimizer", style.COMPONENT_COLORS["optimizer"], ""),
    **{axis: (f"messages of {axis}", *look) for axis, look in style.AXIS_COLORS.items()},
}
_LANE, _ROW = 0.17, 0.44  # inches: a lane (compute above, communication below), and a rank


@style.drawn
def overlap(*, title: str | None = None, per: str = "step", **timelines: Timeline) -> Picture:
    """Steps, or what else one is `per`, on one clock, a group of rows each.

    For every rank a lane of computation, and a lane of communication under it. Time in which no
    rank computes is *exposed*, and shaded: only that makes the step longer.
    """
    timelines = style.spaced(timelines)
    for name, timeline in timelines.items():
        if not timeline.spans:
            raise ValueError(f"{name}: this timeline has no spans: nothing was recorded")
    spans = list(itertools.chain(*(timeline.spans for timeline in timelines.values())))
    factor, unit = style.scale(max(span.end for span in spans), "s")
    steps = {name: _step(timeline, per) for name, timeline in timelines.items()}
    gap = 0.34  # inches between groups, for the name of the next one
    height = sum(gap + _ROW * len(timeline.ranks) for timeline in timelines.values())
    _, axes = style.canvas(
        title or _overlap_finding(timelines, per),
        height=height,
        left=style.width_of("rank 00") + 0.2,
        right=style.widest(itertools.chain(*steps.values()), "bold") + 0.2,
        top=0.3,
        xlabel=f"time ({unit})",
    )
    axes.set(xlim=(0, max(span.end for span in spans) / factor), ylim=(height, 0))
    draw.key(axes, [key for kind, key in LOOKS.items() if any(s.kind == kind for s in spans)])
    y, ticks = 0.0, {}
    for name, timeline in timelines.items():
        axes.text(0, y + gap - 0.1, name, weight="bold", va="bottom")
        top = y = y + gap
        for rank in timeline.ranks:
            ticks[y + _LANE] = f"rank {rank}"
            _lanes(axes, y, [span for span in timeline.spans if span.rank == rank], factor)
            y += _ROW
        for wait in timeline.waits:
            start, end = (time / factor for time in wait)
            low, high = 1 - (y - 0.06) / height, 1 - (top - 0.02) / height
            axes.axvspan(start, end, low, high, facecolor=style.NEUTRAL[3], zorder=0)
        for line, weight in enumerate(("bold", "normal")):
            draw.beside(
                axes, 0.1, (top + y) / 2 - 0.12 + 0.18 * line, steps[name][line], weight=weight
            )
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    told = "; ".join(f"{name}: {' '.join(step)}" for name, step in steps.items())
    return Picture(
        axes.figure,
        f"Time lines of {style.listed(list(timelines))}, computation and communication in a lane "
        f"each for every rank. {told}.",
    )


def _lanes(axes: Axes, y: float, spans: Sequence[Span], factor: float) -> None:
    """What one rank does: names stand in the spans that are long enough."""
    per_inch = axes.get_xlim()[1] / style.inches(axes)[0]
    for span in sorted(spans, key=lambda span: list(LOOKS).index(span.kind)):
        _, color, hatch = LOOKS[span.kind]
        lane = y + _LANE * (span.kind in COMMUNICATION) + 0.02
        start, length = span.start / factor, (span.end - span.start) / factor
        draw.box(axes, start, lane, length, _LANE, color, hatch=hatch * 2, linewidth=0.5)
        room = length / per_inch - 0.04
        for said in (span.name, span.name.rsplit(" ")[-1]):
            if room > 0.06 and not hatch and style.width_of(said, 7) < room:
                place, ink = (start + length / 2, lane + _LANE / 2), style.on(color)
                axes.text(*place, said, size=7, ha="center", va="center_baseline", color=ink)
                break


def _step(timeline: Timeline, per: str) -> tuple[str, str]:
    exposed = f"{units.text(timeline.exposed, 's')} exposed" if timeline.exposed else ""
    busy = sum(s.end - s.start for s in timeline.spans if s.kind not in COMMUNICATION)
    idle = f"{1 - busy / (timeline.makespan * len(timeline.ranks)):.0%}" if busy else "0%"
    waits = "nothing exposed" if idle == "0%" else f"ranks idle {idle}"
    return f"{units.text(timeline.makespan, 's')} per {per}", exposed or waits


def _overlap_finding(timelines: Mapping[str, Timeline], per: str) -> str:
    ordered = sorted(timelines.values(), key=lambda timeline: timeline.makespan)
    fast, slow = ordered[0], ordered[-1]
    if len(ordered) == 1:
        share = f"{fast.exposed / fast.makespan:.0%} of the {per}"
        return f"{share} is communication that nothing hides"
    takes, longest, exposed, most = (
        units.text(seconds, "s")
        for seconds in (fast.makespan, slow.makespan, fast.exposed, slow.exposed)
    )
    if (takes, exposed) == (longest, most):
        return f"Every {per} takes {takes}, and {exposed} of communication remain exposed"
    return (
        f"A {per} takes {takes} instead of {longest}: "
        f"{exposed} of communication remain exposed, not {most}"
    )


# Messages.


@style.drawn
def messages(trace: Trace) -> Picture:
    """Who sends to whom, when: a row for each rank, an arrow for each message; time in steps.

    An arrow is thicker for more bytes.
    """
    if not trace.messages:
        raise ValueError("this trace has no messages to draw: did the run have one rank only?")
    size, steps = len(trace.ranks), trace.steps
    most = max(message.nbytes for message in trace.messages) or 1
    amounts = {"sent": trace.sent.by("rank"), "received": trace.received.by("rank")}
    _, axes = style.canvas(
        _messages_finding(trace),
        height=max(1.0, 0.42 * size),
        right=1.65,
        top=0.3,
        xlabel="step",
    )
    draw.rows(axes, [f"rank {rank}" for rank in range(size)], (0, steps), weight="bold")
    axes.set_ylim(size - 0.6, -0.4)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(range(0, steps + 1, 1 if steps <= 16 else -(-steps // 12)))
    axes.hlines(range(size), 0, steps, color=style.NEUTRAL[0], linewidth=1, zorder=0)
    colors = list(itertools.islice(itertools.cycle(style.SERIES), size))
    for color, tick in zip(colors, axes.get_yticklabels(), strict=True):
        tick.set_color(color)
    arrow = {"arrowstyle": "-|>,head_width=0.18,head_length=0.4", "shrinkA": 0, "shrinkB": 0}
    for message in trace.messages:
        start, end = (message.start + 0.04, message.source), (message.end - 0.04, message.to)
        look = {"color": colors[message.source], "linewidth": 0.6 + 1.8 * message.nbytes / most}
        axes.annotate("", end, start, arrowprops={**arrow, **look})
    for at, (what, by_rank) in zip((0.12, 0.9), amounts.items(), strict=True):
        x = 1 + at / style.inches(axes)[0]
        draw.over(axes, x, 0.05, what, weight="bold", ha="left", va="baseline")
        for rank in range(size):
            draw.beside(axes, at, rank, units.text(by_rank.get(rank, 0)))
    said = f"Space–time diagram of {len(trace.messages)} messages among {size} ranks"
    return Picture(axes.figure, f"{said} in {steps} steps. {_tell_messages(trace, amounts)}.")


def _tell_messages(trace: Trace, amounts: Mapping[str, Mapping[int, int]]) -> str:
    if len(trace.messages) <= 32:
        ordered = sorted(trace.messages, key=lambda message: (message.start, message.source))
        told = [
            f"by step {int(m.end)}: {m.source} to {m.to}, {units.text(m.nbytes)}" for m in ordered
        ]
        return "; ".join(told)
    sent, received = (
        [units.text(by_rank.get(rank, 0)) for rank in range(len(trace.ranks))]
        for by_rank in amounts.values()
    )
    both = enumerate(zip(sent, received, strict=True))
    return "; ".join(f"rank {rank} sends {a} and receives {b}" for rank, (a, b) in both)


def _messages_finding(trace: Trace) -> str:
    both = trace.sent.by("rank"), trace.received.by("rank")
    load = [sum(side.get(rank, 0) for side in both) for rank in range(len(trace.ranks))]
    steps = f"{trace.steps} step{'s' * (trace.steps > 1)}"
    if len(set(load)) == 1:
        return f"{steps}, and every rank carries the same load"
    share = f"{max(load) / (sum(load) / 2):.0%}"
    return f"{steps}, and {share} of all bytes pass through rank {load.index(max(load))}"


# Plans for a chain of stages.

_WORK = {
    "forward": style.PASS_COLORS["forward"],
    "record": style.PASS_COLORS["forward"],
    "backward": style.PASS_COLORS["backward"],
}


@style.drawn
def plan_maps(plans: Mapping[str, Timeline], *, title: str, until: int | None = None) -> Picture:
    """Checkpointing plans on one clock, a row each.

    A cell for every computation (stage upwards, time to the right) and a line for every value while
    it is held. The clock runs `until` that many computations, or to the end of the longest plan.
    """
    work = {name: [s for s in plan.spans if s.kind in _WORK] for name, plan in plans.items()}
    n = 1 + max(span.rank for span in itertools.chain(*work.values()))
    counts = [
        (sum(span.kind != "backward" for span in work[name]), most_values(plan))
        for name, plan in plans.items()
    ]
    notes = [f"{evaluations} evaluations\n{values} values held" for evaluations, values in counts]
    names = ["\n".join(style.wrapped(name, 1.2)) for name in plans]
    row, gap = max(0.55, (0.055 if len(plans) > 1 else 0.14) * n), 0.22
    _, axes = style.canvas(
        title,
        height=len(plans) * (row + gap) - gap,
        left=style.widest("\n".join(names).split("\n")) + 0.3,
        right=style.widest("\n".join(notes).split("\n")) + 0.2,
        top=0.3,
        xlabel="computations, in order (a backward pass counts as one)",
    )
    pitch = (n + 1) * (1 + gap / row)  # from row to row, in stages
    floors = [pitch * k for k in reversed(range(len(plans)))]
    for (name, plan), floor, note in zip(plans.items(), floors, notes, strict=True):
        _plan_row(axes, plan, floor)
        look: style.Look = {"va": "center", "ha": "left", "clip_on": False}
        indented = "  " + note.replace("\n", "\n  ")
        axes.text(len(work[name]), floor + (n + 1) / 2, indented, **look)
    width = max(until or 0, *map(len, work.values()))
    axes.set(xlim=(-0.3, width + 0.3), ylim=(0, floors[0] + n + 1))
    axes.set_yticks([floor + (n + 1) / 2 for floor in floors], names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    entries = {pass_: (pass_, style.PASS_COLORS[pass_], "") for pass_ in ("forward", "backward")}
    held = "a value is held", style.COMPONENT_COLORS["activations"], ""
    draw.key(axes, [*entries.values(), held], above=0.1)
    told = [f"{name}: {note}".replace("\n", ", ") for name, note in zip(plans, notes, strict=True)]
    return Picture(
        axes.figure,
        f"Computations over time on {n} stages, with a line for every value while it is held. "
        f"{'; '.join(told)}.",
    )


def _plan_row(axes: Axes, plan: Timeline, floor: float) -> None:
    for span in plan.spans:
        if span.kind in _WORK:
            y, look = floor + span.rank + 0.55, {"linewidth": 0.4, "zorder": 3}
            draw.box(axes, span.start, y, span.end - span.start, 0.9, _WORK[span.kind], **look)
    lines = [
        [(span.start, floor + span.rank + 0.5), (span.end, floor + span.rank + 0.5)]
        for span in plan.spans
        if span.kind == "value" and span.end > span.start
    ]
    color = style.COMPONENT_COLORS["activations"]
    axes.add_collection(LineCollection(lines, colors=color, linewidths=1.3, zorder=2))


def most_values(plan: Timeline) -> int:
    """The most values held at once: a new one stands beside those that it makes superfluous."""
    values = [span for span in plan.spans if span.kind == "value"]
    return max(
        sum(span.start <= clock <= span.end for span in values)
        for clock in {span.start for span in values}
    )


# Who holds what.


@style.drawn
def who_holds(*, title: str, **levels: Sequence[Occupancy]) -> Picture:
    """A cell for each rank (row) and level of ZeRO (column): painted is what the rank holds.

    Elements upwards, the step from left to right. The height of a component stands for its bytes,
    so that a painted area is bytes times operations. Phases are given equal widths.
    """
    levels = style.spaced(levels)
    if not all(held.spans for held in itertools.chain(*levels.values())):
        raise ValueError("an occupancy has no spans: nothing was held, or nothing was recorded")
    some = next(iter(levels.values()))[0]
    size = max(map(len, levels.values()))
    left, right, gap, cell = style.width_of("rank 0") + 0.2, 0.1, 0.14, 0.86
    width = (style.WIDE - left - right - gap * (len(levels) - 1)) / len(levels)
    height = size * cell + (size - 1) * gap
    shares = {name: max(held.peak for held in at) / at[0].whole for name, at in levels.items()}
    _, axes = style.canvas(title, height=height, left=left, right=right, top=0.62, bottom=0.26)
    axes.set(xlim=(0, style.WIDE - left - right), ylim=(height, 0))
    axes.axis("off")
    colors = style.component_colors(some.itemsizes)
    draw.key(axes, [(name, color, "") for name, color in colors.items()], above=0.42)
    for row in range(size):
        axes.text(-0.08, row * (cell + gap) + cell / 2, f"rank {row}", ha="right", va="center")
    for column, (name, ranks) in enumerate(levels.items()):
        x = column * (width + gap)
        axes.text(x, -0.24, name, weight="bold", va="baseline")
        axes.text(x, -0.08, f"at most {shares[name]:.0%} at once", va="baseline")
        for row, held in enumerate(ranks):
            _holding(axes, held, colors, x, row * (cell + gap), width, cell)
        for k, phase in enumerate(ranks[0].phases):
            middle, ink = x + (k + 0.5) / len(ranks[0].phases) * width, style.FAINT
            axes.text(middle, height + 0.05, phase, va="top", ha="center", size=7, color=ink)
    told = []
    for name, ranks in levels.items():
        peaks = [f"{units.text(held.peak)} on rank {row}" for row, held in enumerate(ranks)]
        told.append(f"{name}: at most {', '.join(peaks)}")
    return Picture(
        axes.figure,
        f"A grid of {size} ranks by {style.listed(list(levels))}: which elements of "
        f"{style.listed(list(colors))} each rank holds, from forward over backward to step. "
        f"{'; '.join(told)}; everything would be {units.text(some.whole)}.",
    )


def _holding(
    axes: Axes,
    held: Occupancy,
    colors: Mapping[str, str],
    x: float,
    y: float,
    width: float,
    height: float,
) -> None:
    """One rank at one level: a band for each component, its first element at the top."""
    gap = 0.04
    deep_all, total = height - gap * (len(colors) - 1), sum(held.itemsizes.values())
    thin = {"linewidth": 0.5, "clip_on": False}
    for component, color in colors.items():
        deep = deep_all * held.itemsizes[component] / total
        draw.box(axes, x, y, width, deep, style.PAPER, **thin, edgecolor=style.NEUTRAL[0], zorder=1)
        for span in held.spans:
            if span.kind == component:
                start, end = (x + width * _share(held, at) for at in (span.start, span.end))
                assert span.elements is not None  # an Occupancy has checked it
                top, bottom = (y + deep * element / held.numel for element in span.elements)
                look: style.Look = {"linewidth": 0, "edgecolor": "none", "zorder": 2}
                draw.box(axes, start, top, end - start, bottom - top, color, **look)
        draw.box(axes, x, y, width, deep, "none", **thin, zorder=4)
        for k in range(1, len(held.phases)):
            at = [x + width * k / len(held.phases)] * 2
            look = {"linewidth": 0.5, "linestyle": ":", "zorder": 3}
            axes.plot(at, [y, y + deep], color=style.INK, **look)
        y += deep + gap


def _share(held: Occupancy, operation: float) -> float:
    """The place of an operation on a step of length 1, in which all phases are equally wide."""
    starts = [*held.phases.values(), held.operations]
    for k, (first, after) in enumerate(itertools.pairwise(starts)):
        if operation <= after:
            return (k + (operation - first) / max(1, after - first)) / len(held.phases)
    return 1.0
