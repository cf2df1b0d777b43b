"""Pipeline schedules over time: Gantt charts with what each rank holds, and steps to play."""

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes

from labutils.schedule import Op, PipelineRun, Schedule
from labutils.teach.plots import draw, style, svg
from labutils.teach.plots.picture import Animation, Picture

TITLES = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "eager_one_f_one_b": "eager 1F1B",
    "interleaved": "interleaved 1F1B",
    "interleaved_zb": "interleaved zero-bubble",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "zb_auto": "automatic zero-bubble",
    "pipedream": "PipeDream",
    "pipedream_2bw": "PipeDream-2BW",
    "dualpipe": "DualPipe",
    "dualpipe_v": "DualPipeV",
}
FILLS = {kind[0].upper(): style.PASS_COLORS[kind] for kind in ("forward", "backward", "weight")}
_UPDATE = style.NEUTRAL[0]
HELD = style.COMPONENT_COLORS["activations"]
_DIGIT = style.width_of("0", 1)  # of a point
_HEAD, _BAR, _FUSED, _STRIP, _GAP = 0.36, 0.24, 0.39, 0.14, 0.06  # inches


def title_of(schedule: Schedule) -> str:
    """What a schedule is called in prose."""
    return TITLES.get(schedule.name, schedule.name.replace("_", " "))


def _chunk(schedule: Schedule, op: Op) -> int:
    """Which of its rank's chunks an operation belongs to, or which direction."""
    if len(schedule.places) > 1:
        return op.micro_batch * len(schedule.places) // schedule.micro_batches
    place = schedule.places[0]
    return place[: op.stage].count(place[op.stage])


def _chunks(schedule: Schedule) -> int:
    return max(len(schedule.places), schedule.stages // len(schedule.ranks))


def fill(schedule: Schedule, op: Op) -> str:
    """The hue of an operation's kind, lighter from chunk to chunk."""
    light = 0.55 * _chunk(schedule, op) / max(1, _chunks(schedule) - 1)
    mixed = (round(c + (255 - c) * light) for c in bytes.fromhex(FILLS[op.kind][1:]))
    return "#" + "".join(f"{c:02X}" for c in mixed)


def _share(schedule: Schedule) -> float:
    """What a stage's activations are of those of all layers of a rank, per micro-batch."""
    return len(schedule.ranks) / schedule.stages


def _holds(run: PipelineRun, rank: int) -> float:
    """Most micro-batches whose activations a rank holds at once."""
    return run.peak(rank) * _share(run.schedule)


def _peak(run: PipelineRun) -> float:
    return max(_holds(run, rank) for rank in range(len(run.schedule.ranks)))


def _at_once(run: PipelineRun) -> bool:
    """Whether fused operations really run at the same time, not one after the other."""
    return any(run.starts[rank][i] == run.starts[rank][i + 1] for rank, i in run.schedule.fused)


@style.drawn
def gantt(
    *runs: PipelineRun,
    barrier: bool = True,
    ahead: float = 1.0,
    unit: str = "",
    **named: PipelineRun,
) -> Picture:
    """Steps of pipeline schedules on one clock: a row for each rank, what it holds under it.

    barrier: whether a step ends for all ranks at once; otherwise two steps, as close as they go
    ahead: how much of that second step is drawn, the whole or a share
    unit: of time, for the axis; seconds are scaled
    named: runs under other names than those of their schedules

    A number is a micro-batch; later chunks are lighter; what runs at once stands one upon the
    other. A rank holds so many micro-batches' activations of all its layers.
    """
    shown = {title_of(run.schedule): run for run in runs} | style.spaced(named)
    if len(shown) < max(1, len(runs) + len(named)):
        raise ValueError("give runs of different schedules, or each its name, such as fast=run")
    longest = max(run.makespan + (not barrier) * ahead * run.period for run in shown.values())
    factor, said = style.scale(longest, "s") if unit == "s" else (1, unit)
    tops = [_HEAD + len(run.schedule.ranks) * _row(run) for run in shown.values()]
    entries = _entries([run.schedule for run in shown.values()])
    if any(any(run.updates) for run in shown.values()):
        entries.insert(-1, ("O: optimizer's update", _UPDATE, ""))
    _, axes = style.canvas(
        _finding(shown, barrier),
        height=sum(tops),
        left=style.width_of("rank 00") + 0.2,
        right=style.width_of("holds 5.75") + 0.15,
        top=0.1 + 0.2 * len(draw.key_rows(entries)),
        xlabel=f"time ({said})" if said else "time",
    )
    axes.set(xlim=(0, longest / factor), ylim=(sum(tops), 0))
    draw.key(axes, entries)
    most = max(map(_peak, shown.values()))
    y = 0.0
    ticks: dict[float, str] = {}
    for (name, run), high in zip(shown.items(), tops, strict=True):
        after = style.width_of(f"{name}  ", weight="bold") / style.inches(axes)[0]
        axes.text(0, y + _HEAD - 0.1, name, weight="bold", va="bottom")
        place = after * axes.get_xlim()[1], y + _HEAD - 0.1
        axes.text(*place, _measured(run, barrier, factor, said), va="bottom")
        ticks |= _ranks(axes, run, y + _HEAD, factor, barrier, most)
        y += high
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    told = "; ".join(
        f"{name}: {len(run.schedule.ranks)} ranks, {run.schedule.micro_batches} micro-batches, "
        f"{_measured(run, barrier, factor, said)}, ranks hold up to {_holding(run)}"
        for name, run in shown.items()
    )
    return Picture(
        axes.figure,
        f"Gantt chart of {style.listed(list(shown))}: forward, backward and weight gradients of "
        f"every rank over time, and the activations that it holds. {told}.",
    )


def _row(run: PipelineRun) -> float:
    return (_FUSED if _at_once(run) else _BAR) + _STRIP + _GAP


def _entries(schedules: Sequence[Schedule]) -> list[draw.Swatch]:
    """The key: what the hues are, and which half of a backward pass a B is."""
    split = {schedule.split for schedule in schedules}
    backward = "of the inputs" + (" only, where W is apart" if len(split) > 1 else "")
    backward = f"B: gradient {backward}" if True in split else "B: backward"
    found = [("F: forward", FILLS["F"], ""), (backward, FILLS["B"], "")]
    found += [("W: gradient of the weights", FILLS["W"], "")] * (True in split)
    for schedule in schedules:
        last = next((op for op in schedule.ranks[0] if _chunk(schedule, op)), None)
        if last:
            what = "other direction" if len(schedule.places) > 1 else "later chunk"
            found.append((f"lighter: {what}", fill(schedule, last._replace(kind="F")), ""))
            break
    return [*found, ("held: activations of so many micro-batches", HELD, "")]


def _measured(run: PipelineRun, barrier: bool, factor: float, unit: str) -> str:
    """How long a step is, how much of it is idle, and by which measure."""
    lasts = (run.makespan if barrier else run.period) / factor
    idle = run.bubble_fraction if barrier else run.period_bubble_fraction
    step = f"{lasts:.4g}{f' {unit}' if unit else ''} per step"
    return f"{step}, bubble fraction {idle:.0%} with{'' if barrier else 'out'} a barrier"


def _holding(run: PipelineRun) -> str:
    ranks = range(len(run.schedule.ranks))
    return style.listed([f"{_holds(run, rank):.3g}" for rank in ranks])


def _finding(shown: dict[str, PipelineRun], barrier: bool) -> str:
    metric = "idle/total, " + ("a barrier ends the step" if barrier else "no barrier between steps")
    told = [
        f"{name} {run.bubble_fraction if barrier else run.period_bubble_fraction:.0%}"
        for name, run in shown.items()
    ]
    held = " and ".join(dict.fromkeys(f"{_peak(run):.3g}" for run in shown.values()))
    if len(shown) == 1:
        holds = f"and a rank holds up to {held} micro-batch{'es' * (held != '1')}"
        return f"Bubble fraction ({metric}): {told[0]}, {holds}"
    return f"Bubble fraction ({metric}): {style.listed(told)}"


def _ranks(
    axes: Axes, run: PipelineRun, top: float, factor: float, barrier: bool, most: float
) -> dict[float, str]:
    """The rows of one run, from `top` downwards, and where their names go."""
    ticks = {}
    for rank in range(len(run.schedule.ranks)):
        _rank(axes, run, rank, top, factor, barrier)
        for offset in (0,) if barrier else (0, run.period):
            _held(axes, run, rank, top + _row(run) - _GAP, factor, most, offset)
        middle = top + (_row(run) - _GAP - _STRIP) / 2
        ticks[middle] = f"rank {rank}"
        draw.beside(axes, 0.08, middle, f"holds {_holds(run, rank):.3g}")
        top += _row(run)
    return ticks


def _rank(
    axes: Axes, run: PipelineRun, rank: int, top: float, factor: float, barrier: bool
) -> None:
    """The operations of a rank, in one step or in two; white in the frame is idle."""
    starts = [time / factor for time in run.starts[rank]]
    ends = [time / factor for time in run.ends[rank]]
    period = run.period / factor
    frame = (0, run.makespan / factor) if barrier else (starts[0], 2 * period)
    high = _row(run) - _STRIP - _GAP
    edge = {"linewidth": 0.5, "edgecolor": style.NEUTRAL[1], "zorder": 0}
    draw.box(axes, frame[0], top, frame[1], high, style.PAPER, **edge)
    inch = style.inches(axes)[0] / axes.get_xlim()[1]
    thin = min(0.6, 12 * inch * min(b - a for a, b in zip(starts, ends, strict=True)))
    lanes = _lanes(run, rank)
    for offset in (0,) if barrier else (0, period):
        for index, op in enumerate(run.schedule.ranks[rank]):
            number, of = lanes[index]
            deep = high / of
            lane = top + deep * number
            start, length = starts[index] + offset, ends[index] - starts[index]
            color = fill(run.schedule, op)
            draw.box(axes, start, lane, length, deep, color, linewidth=thin)
            label, size = str(op.micro_batch), 7 if deep > 0.15 else 6
            if len(label) * _DIGIT * size < length * inch - 0.01:
                place, ink = (start + length / 2, lane + deep / 2), style.on(color)
                look: style.Look = {"ha": "center", "va": "center_baseline", "color": ink}
                axes.text(*place, label, size=size, clip_on=True, **look)
        begin = (run.flushed if barrier else run.ends[rank][-1]) / factor + offset
        if lasts := run.updates[rank] / factor:
            draw.box(axes, begin, top, lasts, high, _UPDATE, linewidth=thin)
    if not barrier:
        look = {"linewidth": 2.4, "solid_capstyle": "butt", "zorder": 4}
        ends_at = [top - 0.02, top + high + 0.02]
        axes.plot([starts[0] + period] * 2, ends_at, color=style.INK, **look)


def _held(
    axes: Axes,
    run: PipelineRun,
    rank: int,
    floor: float,
    factor: float,
    most: float,
    offset: float = 0,
) -> None:
    """What a rank holds over time, as a strip on its floor, all strips to one scale."""
    times, held = zip(*run.in_flight(rank), strict=True)
    scale = (_STRIP - 0.02) * _share(run.schedule) / most
    heights = [floor - scale * count for count in held]
    look: style.Look = {"facecolor": HELD, "edgecolor": style.INK, "linewidth": 0.4, "step": "post"}
    axes.fill_between([(time + offset) / factor for time in times], floor, heights, **look)


# A step that a reader plays.

_LEFT, _WIDE, _PIECE = 56, 540, 10  # pixels


def schedule_animation(run: PipelineRun) -> Animation:
    """A step of a schedule, a frame for each moment at which something begins.

    Boxes come from the rank whose result they wait for; at the right stand the activations that
    each rank holds. The label says what each idle rank waits for.
    """
    moments = sorted(set(itertools.chain(*run.starts)))
    if len(moments) > 80:
        raise ValueError(
            f"{len(moments)} moments are too many to step through: animate up to 80, with fewer "
            "micro-batches"
        )
    ends = {
        op: end
        for ops, times in zip(run.schedule.ranks, run.ends, strict=True)
        for op, end in zip(ops, times, strict=True)
    }
    labels = []
    for now in moments:
        waits = [_waits(run, rank, now, ends) for rank in range(len(run.schedule.ranks))]
        told = "; ".join(filter(None, waits)) or "every rank computes"
        labels.append(f"Time {now:.4g}: {told}.")
    title = title_of(run.schedule)
    return Animation(
        [_frame(run, now, ends) for now in moments],
        labels,
        f"Animation of {title} on {len(run.schedule.ranks)} ranks: forwards and backwards of "
        f"{run.schedule.micro_batches} micro-batches appear in the order in which they run, and "
        f"idle ranks say what they wait for. {title}: {_measured(run, True, 1, '')}; ranks hold at "
        f"most {_holding(run)}.",
    )


def _waits(run: PipelineRun, rank: int, now: float, ends: dict[Op, float]) -> str:
    """What a rank that does not compute waits for; "" if it computes."""
    ops, starts = run.schedule.ranks[rank], run.starts[rank]
    begun = sum(start <= now for start in starts)
    if any(end > now for end in run.ends[rank][:begun]):
        return ""
    if begun == len(ops):
        return f"rank {rank} is done"
    late = [need for need in run.schedule.inputs(ops[begun]) if ends[need] > now]
    if not late:
        return f"rank {rank} waits for a message"
    need = max(late, key=ends.__getitem__)
    owner = run.schedule.rank_of(need.stage, need.micro_batch)
    what = str(need) if _chunks(run.schedule) > 1 else f"{need.kind}{need.micro_batch}"
    return f"rank {rank} waits for {what} of rank {owner}"


def _frame(run: PipelineRun, now: float, ends: dict[Op, float]) -> str:
    """What has begun by now, and what is held."""
    schedule, x = run.schedule, _WIDE / run.makespan
    high = 39 if _at_once(run) else 26
    pitch, share, told = high + 12, _share(schedule), []
    bottom, clock = 4 + len(schedule.ranks) * pitch, _LEFT + now * x
    parts = [svg.path(f"M{clock:.1f} 2V{bottom}", stroke=style.INK, stroke_dasharray="4 3")]
    boxes: dict[str, list[str]] = {}  # of each hue, the outlines of what is over
    numbers: dict[str, list[str]] = {}  # of each ink
    for rank, ops in enumerate(schedule.ranks):
        y = 10 + rank * pitch
        parts.append(svg.words(_LEFT - 8, y + high / 2 + 5, f"rank {rank}", "end"))
        parts.append(svg.rect(_LEFT, y, _WIDE, high, "none", style.NEUTRAL[0]))
        begun = [op for op, start in zip(ops, run.starts[rank], strict=True) if start <= now]
        for op, start, (lane, of) in zip(begun, run.starts[rank], _lanes(run, rank), strict=False):
            left, top, width = _LEFT + start * x, y + lane * high / of, (ends[op] - start) * x
            hue = fill(schedule, op)
            number = _number(op, left, top, width, high / of)
            if ends[op] > now:
                box = svg.rect(left, top, width, high / of, hue, stroke_width=2)
                box += _numbers([number], style.on(hue))
                come = _comes_from(schedule, op, rank) if start == now else rank
                parts.append(box if come == rank else svg.glide(box, 0, (come - rank) * pitch))
            else:
                outline = f"M{left:.1f} {top:g}h{width:.1f}v{high / of:g}h-{width:.1f}z"
                boxes.setdefault(hue, []).append(outline)
                numbers.setdefault(style.on(hue), []).append(number)
        last = schedule.kinds[-1]
        held = sum(op.kind == "F" and ends[op._replace(kind=last)] > now for op in begun)
        told.append(f"rank {rank}: {held}")
        for k in range(held):
            left = _LEFT + _WIDE + 14 + k * (_PIECE * share + 1)
            parts.append(svg.rect(left, y + 8, _PIECE * share, _PIECE, HELD, stroke_width=0.7))
    edge = {"stroke": style.INK, "stroke_width": 0.7}
    under = [svg.path("".join(outlines), fill=hue, **edge) for hue, outlines in boxes.items()]
    under += [_numbers(written, ink) for ink, written in numbers.items()]
    for said, left in (("held", _LEFT + _WIDE + 14), ("time →", _LEFT)):
        parts.append(svg.words(left, bottom + 12, said, "start", font_size=12))
    width = _LEFT + _WIDE + 24 + max(40, _peak(run) * (_PIECE + 1 / share))
    said = f"time {now:.4g}; held by {', '.join(told)}"
    return svg.frame([parts[0], *under, *parts[1:]], width, bottom + 18, said)


def _lanes(run: PipelineRun, rank: int) -> list[tuple[int, int]]:
    """Of each operation of a rank its lane, and of how many: three where F, B and W run at once."""
    lanes = [(0, 1)] * len(run.schedule.ranks[rank])
    if _at_once(run):
        for who, index in run.schedule.fused:
            if who == rank:
                lanes[index : index + 3] = [(0, 3), (1, 3), (2, 3)]
    return lanes


def _number(op: Op, x: float, y: float, width: float, height: float) -> str:
    """The number of an operation's micro-batch in its box, if it fits."""
    said = str(op.micro_batch)
    if len(said) * _DIGIT * 72 * 12 > width:
        return ""
    return svg.element("text", said, x=x + width / 2, y=y + height / 2 + 4.3)


def _numbers(written: Sequence[str], ink: str) -> str:
    return svg.element("g", "".join(written), fill=ink, text_anchor="middle", font_size=12)


def _comes_from(schedule: Schedule, op: Op, rank: int) -> int:
    """The other rank whose result an operation takes in, or its own."""
    owners = (schedule.rank_of(need.stage, need.micro_batch) for need in schedule.inputs(op))
    return next((owner for owner in owners if owner != rank), rank)
