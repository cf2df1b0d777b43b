"""What a checkpointing plan keeps and computes again: as an animation, as a map over time, and as a trade of memory for work."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from labutils import units
from labutils.teach.plots import style
from labutils.teach.plots.picture import Animation, Picture

FORWARD, BACKWARD, HELD = (
    style.PASSES["forward"],
    style.PASSES["backward"],
    style.COMPONENTS["activations"],
)
_PITCH, _SIZE, _LEFT = 74, 34, 46  # pixels: from node to node, a node, before the first


class Plan(Protocol):
    """Steps with `op` and `at` on a chain of `n` stages, what is held after each, and a name: such as `checkpointing.Plan`."""

    n: int
    name: str

    @property
    def steps(self) -> Sequence[Any]: ...
    @property
    def states(self) -> Sequence[Any]: ...


def plan_animation(plan: Plan) -> Animation:
    """The graph of a plan, a frame for each computation: f nodes fill as values are kept and empty as they go, b nodes turn from right to left.

    An f node with a square inside has recorded its interior; a b node lights up while the gradient stands there.
    """
    if plan.n > 10:
        raise ValueError(
            f"{plan.n} stages do not fit on the page: animate up to 10, or draw the plan with plots.plan_maps"
        )
    said = {
        "forward": "computes f{}, keeps only its output",
        "record": "computes f{} and records what b{} will need",
        "backward": "computes b{}",
    }
    frames = [_graph(plan, 0, None)]
    labels = ["Start. Only the input x0 is held."]
    evaluations = computed = 0
    for number, step in enumerate(plan.steps, 1):
        if step.op == "drop":
            continue
        computed += 1
        evaluations += step.op != "backward"
        # What is dropped right after a computation is gone in its own frame already.
        after = number
        while after < len(plan.steps) and plan.steps[after].op == "drop":
            after += 1
        state = plan.states[after]
        frames.append(_graph(plan, after, step))
        held = f"{len(state.values)} value{'s' * (len(state.values) != 1)} and {len(state.recorded)} interior{'s' * (len(state.recorded) != 1)} held"
        labels.append(
            f"Step {computed}: {said[step.op].format(step.at, step.at)}. {evaluations} forward evaluations so far; {held}."
        )
    most = max(len(state.values) for state in plan.states)
    return Animation(
        frames,
        labels,
        f"Animation of the plan '{plan.name}' on a chain of {plan.n} stages: f nodes fill and empty, then b nodes follow from right to left. "
        f"It takes {evaluations} forward evaluations and holds at most {most} values.",
    )


def _graph(plan: Plan, at: int, step: Any) -> str:
    state = plan.states[at]
    width, height = _LEFT + (plan.n + 1) * _PITCH, 168
    top, bottom = 48, 122
    parts = []

    def line(x1: float, y1: float, x2: float, y2: float) -> str:
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{style.NEUTRAL[0]}" stroke-width="1.5"/>'

    def node(x: float, y: float, fill: str, name: str, active: bool, inner: bool = False) -> str:
        half = _SIZE / 2
        circle = f'<circle cx="{x}" cy="{y}" r="{half}" fill="{fill}" stroke="{style.INK}" stroke-width="{3.2 if active else 0.9}"/>'
        square = (
            f'<rect x="{x - 11}" y="{y - 11}" width="22" height="22" fill="none" stroke="{style.INK}" stroke-width="1.4"/>'
            if inner
            else ""
        )
        return f'{circle}{square}<text x="{x}" y="{y + 4.5}" text-anchor="middle" fill="{style.on(fill)}">{name}</text>'

    xs = [_LEFT + (i + 1) * _PITCH for i in range(plan.n)]
    parts.append(line(_LEFT, top, xs[-1], top))
    parts.append(line(xs[0], bottom, xs[-1], bottom))
    parts += [line(x, top, x, bottom) for x in xs]
    parts.append(node(_LEFT, top, HELD, "x0", False))
    for i, x in enumerate(xs):
        now = step is not None and step.at == i
        held = i + 1 in state.values
        parts.append(
            node(
                x,
                top,
                FORWARD if held else style.PAPER,
                f"f{i}",
                now and step.op != "backward",
                i in state.recorded,
            )
        )
        fill = (
            BACKWARD
            if state.gradient == i
            else style.NEUTRAL[3]
            if state.gradient < i
            else style.PAPER
        )
        parts.append(node(x, bottom, fill, f"b{i}", now and step.op == "backward"))
    values, interiors = sorted(state.values), sorted(state.recorded)
    told = f"held: {' '.join(f'x{i}' for i in values)}; recorded: {' '.join(map(str, interiors)) or 'none'}; gradient at x{state.gradient}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{told}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


@style.drawn
def plan_maps(*plans: Plan, until: int | None = None, title: str | None = None) -> Picture:
    """Plans on one clock, a row each: a cell for every computation (stage upwards, time to the right) and a line for every value while it is held.

    The clock runs `until` that many computations, or to the end of the longest plan.
    """
    if not plans:
        raise ValueError(
            "plan_maps needs at least one plan: plan_maps(checkpointing.segments(16, 4))"
        )
    if len({plan.n for plan in plans}) > 1:
        raise ValueError(
            f"plans of {style.listed([str(plan.n) for plan in plans])} stages cannot share an axis: draw plans for one chain"
        )
    n = plans[0].n
    clocks = {id(plan): sum(step.op != "drop" for step in plan.steps) for plan in plans}
    counts = [
        (
            sum(step.op in ("forward", "record") for step in plan.steps),
            max(len(state.values) for state in plan.states),
        )
        for plan in plans
    ]
    notes = [f"{evaluations} evaluations\n{values} values held" for evaluations, values in counts]
    names = [plan.name or "plan" for plan in plans]
    left = max(style.width_of(line) for name in names for line in style.wrapped(name, 1.2)) + 0.3
    right = max(style.width_of(line) for note in notes for line in note.split("\n")) + 0.2
    row, gap = max(0.55, (0.055 if len(plans) > 1 else 0.14) * n), 0.22
    finding = (
        title
        or f"{n} stages: {style.listed([f'{evaluations} evaluations with {values} values' for evaluations, values in counts])}"
    )
    figure, axes = style.canvas(
        finding,
        height=len(plans) * (row + gap) - gap,
        left=left,
        right=right,
        top=0.3,
        xlabel="computations, in order (a backward pass counts as one)",
    )
    high = (n + 1) * gap / row  # the space between rows, in stages
    for k, plan in enumerate(plans):
        floor = (len(plans) - 1 - k) * (n + 1 + high)
        clock, since, lives = 0, {0: 0}, []
        for step, after in zip(plan.steps, plan.states[1:], strict=True):
            if step.op != "drop":
                color = BACKWARD if step.op == "backward" else FORWARD
                axes.add_patch(
                    Rectangle(
                        (clock, floor + step.at + 0.55),
                        1,
                        0.9,
                        facecolor=color,
                        edgecolor=style.INK,
                        linewidth=0.4,
                        zorder=3,
                    )
                )
                clock += 1
            lives += [(since.pop(i), clock, i) for i in list(since) if i not in after.values]
            since |= dict.fromkeys(after.values - set(since), clock)
        lives += [(start, clock, i) for i, start in since.items()]
        segments = [
            [(start, floor + i + 0.5), (end, floor + i + 0.5)]
            for start, end, i in lives
            if end > start
        ]
        axes.add_collection(LineCollection(segments, colors=HELD, linewidths=1.3, zorder=2))
        axes.text(
            clock,
            floor + (n + 1) / 2,
            "  " + notes[k].replace("\n", "\n  "),
            va="center",
            ha="left",
            clip_on=False,
        )
    width = max(*clocks.values(), until or 0)
    axes.set(xlim=(-0.3, width + 0.3), ylim=(0, len(plans) * (n + 1 + high) - high))
    middles = [(len(plans) - 1 - k) * (n + 1 + high) + (n + 1) / 2 for k in range(len(plans))]
    axes.set_yticks(middles, ["\n".join(style.wrapped(name, 1.2)) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    style.key(
        axes,
        [("forward", FORWARD, ""), ("backward", BACKWARD, ""), ("a value is held", HELD, "")],
        above=0.1,
    )
    told = "; ".join(
        f"{name}: {note}".replace("\n", ", ") for name, note in zip(names, notes, strict=True)
    )
    return Picture(
        figure,
        f"Computations over time on {n} stages, with a line for every value while it is held. {told}.",
    )


@style.drawn
def trade_off(
    trades: Sequence[tuple[float, float]],
    *,
    marks: Mapping[str, tuple[float, float]] | None = None,
    once: float,
    guess: tuple[float, float] | None = None,
    title: str | None = None,
) -> Picture:
    """Peak bytes against work: the best trades as a staircase, other plans as filled markers, both as (bytes, cost of the forward passes).

    `once` is the cost of one forward pass, the unit of the vertical axis; `guess`, also (bytes, cost), is a hollow diamond.
    """
    if not trades or once <= 0:
        raise ValueError(
            "trade_off needs at least one trade (bytes, cost) and the cost of one forward pass, above 0"
        )
    marks = dict(marks or {})
    points = [*trades, *marks.values()]
    factor, unit = style.scale(max(nbytes for nbytes, _ in points), "B")
    least, most = trades[0], trades[-1]
    half = _extra_at(trades, most[0] / 2, once)
    finding = f"Half the memory costs {half} more forward passes, {style.times(most[0] / least[0])} less costs {least[1] / once - 1:.1f}"
    figure, axes = style.canvas(
        title or finding,
        height=2.6,
        left=0.6,
        right=0.3,
        top=0.15,
        xlabel=f"most held after any step ({unit})",
        ylabel="forward passes",
    )
    xs, ys = [nbytes / factor for nbytes, _ in trades], [cost / once for _, cost in trades]
    right = max(nbytes for nbytes, _ in points) / factor * 1.06
    axes.step([*xs, right], [*ys, ys[-1]], where="post", color=style.INK)
    top = max(cost for _, cost in points) / once
    axes.set(
        xlim=(0, right),
        ylim=(min(ys) - 0.12 * (top - min(ys)) - 0.1, top + 0.12 * (top - min(ys)) + 0.1),
    )
    for (name, (nbytes, cost)), color in zip(marks.items(), style.SERIES, strict=False):
        x, y = nbytes / factor, cost / once
        axes.plot(
            x,
            y,
            "o",
            color=color,
            markeredgecolor=style.INK,
            markeredgewidth=0.7,
            zorder=4,
            clip_on=False,
        )
        # No plan lies below the staircase, so there is room for names.
        axes.annotate(
            name,
            (x, y),
            (0, -15),
            textcoords="offset points",
            ha="right" if x > 0.85 * right else "center",
            color=color,
            weight="bold",
        )
    if guess is not None:
        place = min(guess[0] / factor, right), min(guess[1] / once, axes.get_ylim()[1])
        axes.plot(*place, clip_on=False, zorder=5, **style.GUESS)
        axes.annotate("your guess", place, (8, 6), textcoords="offset points")
    told = "; ".join(
        f"{name}: {units.text(nbytes)}, {cost / once:.2f} forward passes"
        for name, (nbytes, cost) in marks.items()
    )
    ends = f"from {units.text(least[0])} at {least[1] / once:.2f} forward passes to {units.text(most[0])} at {most[1] / once:.2f}"
    return Picture(figure, f"Staircase of the best trades of memory for work, {ends}. {told}.")


def _extra_at(trades: Sequence[tuple[float, float]], room: float, once: float) -> str:
    possible = [cost for nbytes, cost in trades if nbytes <= room]
    return f"{min(possible) / once - 1:.2f}" if possible else "more than any plan can pay"


@style.drawn
def token_weights(counts: Sequence[int], *, title: str | None = None) -> Picture:
    """How much one token of each micro-batch counts in a mean of means, against a mean over all tokens, for micro-batches of `counts` tokens."""
    if not counts or min(counts) < 1:
        raise ValueError(f"every micro-batch needs at least one token, got {list(counts)}")
    total, k = sum(counts), len(counts)
    weights = [total / (k * count) for count in counts]
    figure, axes = style.canvas(
        title or f"In a mean of means, a token of the shortest micro-batch counts {style.times(max(weights) / min(weights))} one of the longest",
        height=2.0, left=0.6, right=0.9, top=0.05, xlabel="tokens, micro-batch by micro-batch", ylabel="weight of a token",
    )  # fmt: skip
    start = 0
    for i, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        axes.bar(
            start + count / 2,
            weight,
            count,
            color=style.SERIES[i % len(style.SERIES)],
            **style.EDGE,
        )
        axes.text(start + count / 2, max(weight, 1.06), f"{weight:.2f}", ha="center", va="bottom")
        start += count
    axes.axhline(1, color=style.INK, linestyle="--", linewidth=1.2)
    axes.annotate(
        "every token\nequal",
        (1, 1),
        (5, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
    )
    axes.set(xlim=(0, total), ylim=(0, max(*weights, 1) * 1.15))
    axes.xaxis.get_major_locator().set_params(integer=True)
    told = "; ".join(
        f"{count} tokens: {weight:.2f} each" for count, weight in zip(counts, weights, strict=True)
    )
    return Picture(
        figure, f"Bars of the weight of a token in a mean of means, where 1 would be right. {told}."
    )
