"""Bytes sent: how many, by whom, when, and how long that takes."""

import itertools
import math
from collections.abc import Mapping, Sequence

from matplotlib.ticker import LogLocator

from labutils import units
from labutils.ledger import Ledger
from labutils.teach.plots import style
from labutils.teach.plots.picture import Animation, Picture
from labutils.trace import Trace


@style.drawn
def comm_bars(
    *, guess: float | None = None, title: str | None = None, **ledgers: Ledger
) -> Picture:
    """Bytes that each rank sent: a group of bars for each algorithm, a bar for each rank; `guess` (bytes) is a hollow diamond beside them."""
    if not ledgers:
        raise ValueError("comm_bars needs at least one ledger: comm_bars(ring=world.ledger)")
    for name, ledger in ledgers.items():
        if not isinstance(ledger, Ledger):
            raise TypeError(
                f"{name}: bars are drawn from a Ledger of bytes sent, got {type(ledger).__name__}"
            )
        if None in ledger.by("rank"):
            raise ValueError(
                f"{name}: a line without a rank cannot have a bar; give every Line its rank="
            )
    if isinstance(guess, str) or (guess is not None and not (math.isfinite(guess) and guess >= 0)):
        raise ValueError(f"guess must be a number of bytes, 0 or more, got {guess!r}")
    sent = {name.replace("_", " "): ledger.by("rank") for name, ledger in ledgers.items()}
    size = 1 + max((rank for amounts in sent.values() for rank in amounts), default=0)
    largest = max([amount for amounts in sent.values() for amount in amounts.values()] + [1])
    far = (
        guess is not None and guess > 3 * largest
    )  # a guess off the scale must not flatten the bars
    largest = max(largest, guess or 0) if not far else 1.5 * largest
    factor, unit = style.scale(largest, "B")

    # Along x everything is laid out in inches, so that labels find the room they were given.
    left, right, gap, aside = 0.62, 0.15, 0.4, 1.0 if guess is not None else 0.0
    width = style.WIDE - left - right
    bar = min((width - aside) / len(sent) / size - gap / size, 0.55)
    group = (width - aside) / len(sent)
    figure, axes = style.canvas(
        title or _sent_finding(sent),
        left=left,
        right=right,
        bottom=0.48,
        top=0.25,
        ylabel=f"sent by each rank ({unit})",
    )
    _, height = style.inches(axes)
    ticks, labels = [], []
    for (name, amounts), color, start in zip(
        sent.items(), style.SERIES * len(sent), itertools.count(0, group), strict=False
    ):
        middle = start + group / 2
        places = [middle + bar * (rank - (size - 1) / 2) for rank in range(size)]
        heights = [amounts.get(rank, 0) for rank in range(size)]
        axes.bar(
            places, [amount / factor for amount in heights], 0.86 * bar, color=color, **style.EDGE
        )
        for place, amount in _labels(places, heights, bar):
            axes.annotate(
                units.text(amount),
                (place, amount / factor),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
            )
        axes.text(
            middle,
            -0.28 / height,
            name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            weight="bold",
        )
        ticks += places
        labels += [
            str(rank) if style.width_of(str(size)) < bar or rank % 4 == 0 else ""
            for rank in range(size)
        ]
    if guess is not None:
        place = width - aside / 2, min(guess, largest) / factor
        axes.plot(*place, clip_on=False, **style.GUESS)
        axes.annotate(
            f"{units.text(guess)} ↑" if far else "your guess",
            place,
            (0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
        )
    axes.set(xlim=(0, width), ylim=(0, largest / factor * 1.02))
    axes.set_xticks(ticks, labels)
    axes.tick_params(axis="x", length=0)
    axes.text(-0.08 / width, -0.055, "rank", transform=axes.transAxes, ha="right", va="top")
    told = "; ".join(
        f"{name}: "
        + ", ".join(f"rank {rank} {units.text(amounts.get(rank, 0))}" for rank in range(size))
        for name, amounts in sent.items()
    )
    guessed = f" Your guess: {units.text(guess)}." if guess is not None else ""
    return Picture(figure, f"Bars of bytes sent by each rank. {told}.{guessed}")


@style.drawn
def messages(trace: Trace, *, title: str | None = None) -> Picture:
    """Who sends to whom, when: a row for each rank, an arrow for each message, thicker for more bytes; time in steps."""
    sent = trace.messages
    if not sent:
        raise ValueError("this trace has no messages to draw: did the run have one rank only?")
    size, steps = len(trace.ranks), trace.steps
    most = max(message.nbytes for message in sent) or 1
    out, into = trace.sent.by("rank"), trace.received.by("rank")
    left, right = 0.7, 1.65
    figure, axes = style.canvas(
        title or _messages_finding(trace),
        height=max(1.0, 0.42 * size),
        left=left,
        right=right,
        top=0.3,
        xlabel="step",
    )
    width, height = style.inches(axes)
    axes.hlines(range(size), 0, steps, color=style.NEUTRAL[0], linewidth=1, zorder=0)
    for message in sent:
        color = style.SERIES[message.source % len(style.SERIES)]
        axes.annotate(
            "",
            (message.end - 0.04, message.to),
            (message.start + 0.04, message.source),
            arrowprops={
                "arrowstyle": "-|>,head_width=0.18,head_length=0.4",
                "color": color,
                "linewidth": 0.6 + 1.8 * message.nbytes / most,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    axes.set(xlim=(0, steps), ylim=(size - 0.6, -0.4))
    axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    for rank, tick in enumerate(axes.get_yticklabels()):
        tick.set_color(style.SERIES[rank % len(style.SERIES)])
        tick.set_weight("bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(range(steps + 1) if steps <= 16 else range(0, steps + 1, -(-steps // 12)))
    for rank in range(size):
        axes.text(
            1 + 0.12 / width,
            rank,
            units.text(out.get(rank, 0)),
            transform=axes.get_yaxis_transform(),
            va="center",
        )
        axes.text(
            1 + 0.9 / width,
            rank,
            units.text(into.get(rank, 0)),
            transform=axes.get_yaxis_transform(),
            va="center",
        )
    axes.text(1 + 0.12 / width, 1 + 0.05 / height, "sent", transform=axes.transAxes, weight="bold")
    axes.text(
        1 + 0.9 / width, 1 + 0.05 / height, "received", transform=axes.transAxes, weight="bold"
    )
    if len(sent) <= 32:
        told = "; ".join(
            f"by step {int(m.end)}: {m.source} to {m.to}, {units.text(m.nbytes)}"
            for m in sorted(sent, key=lambda m: (m.start, m.source))
        )
    else:
        told = "; ".join(
            f"rank {rank} sends {units.text(out.get(rank, 0))} and receives {units.text(into.get(rank, 0))}"
            for rank in range(size)
        )
    return Picture(
        figure,
        f"Space–time diagram of {len(sent)} messages among {size} ranks in {steps} steps. {told}.",
    )


@style.drawn
def cost_curves(
    nbytes: Sequence[float],
    *,
    measured: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    title: str | None = None,
    **seconds: Sequence[float],
) -> Picture:
    """Seconds against message size for several algorithms, a line each, with the sizes at which the winner changes.

    `measured` holds (sizes, seconds) by the same names, drawn as filled markers.
    """
    if not seconds:
        raise ValueError("cost_curves needs at least one algorithm: cost_curves(sizes, ring=[…])")
    for name, times in seconds.items():
        if len(times) != len(nbytes):
            raise ValueError(f"{name}: {len(nbytes)} sizes need as many times, got {len(times)}")
    if len(nbytes) < 2 or min(nbytes) <= 0 or min(map(min, seconds.values())) <= 0:
        raise ValueError("logarithmic axes need at least two sizes, and sizes and times above 0")
    curves = {name.replace("_", " "): list(times) for name, times in seconds.items()}
    points = {name.replace("_", " "): pair for name, pair in (measured or {}).items()}
    if unknown := sorted(set(points) - set(curves)):
        raise ValueError(
            f"measured {style.listed(unknown)} has no line to belong to: the lines are {style.listed(list(curves))}"
        )
    colors = dict(zip(curves, style.SERIES * len(curves), strict=False))
    winners = [min(curves, key=lambda name: curves[name][k]) for k in range(len(nbytes))]
    changes = _crossings(nbytes, curves, winners)
    right = max(style.width_of(name, weight="bold") for name in curves) + 0.25
    figure, axes = style.canvas(
        title or _cost_finding(winners, changes),
        left=0.85,
        right=right,
        top=0.3,
        xlabel="message size",
        ylabel="time",
    )
    width, height = style.inches(axes)
    for name, times in curves.items():
        axes.plot(nbytes, times, color=colors[name])
        if name in points:
            axes.plot(
                *points[name],
                "o",
                color=colors[name],
                markeredgecolor=style.INK,
                markeredgewidth=0.7,
                clip_on=False,
                zorder=3,
            )
    axes.set(xscale="log", yscale="log", xlim=(min(nbytes), max(nbytes)))
    style.in_units(axes.xaxis, "B")
    style.in_units(axes.yaxis, "s")
    axes.xaxis.set_major_locator(LogLocator(base=10, numticks=9))
    style.name_ends(axes, {name: (nbytes[-1], times[-1]) for name, times in curves.items()}, colors)
    share = [
        math.log(size / min(nbytes)) / math.log(max(nbytes) / min(nbytes)) * width
        for size, _, _ in changes
    ]
    texts = [units.text(size, digits=2) for size, _, _ in changes]
    for x, text, (size, _, _) in zip(
        style.spread(share, [style.width_of(text) + 0.1 for text in texts], 0, width),
        texts,
        changes,
        strict=True,
    ):
        axes.axvline(size, color=style.FAINT, linewidth=0.9, linestyle=":", zorder=0)
        axes.text(
            x / width, 1 + 0.05 / height, text, transform=axes.transAxes, ha="center", va="bottom"
        )
    told = "; ".join(
        f"{name}: {units.text(times[0], 's')} to {units.text(times[-1], 's')}"
        for name, times in curves.items()
    )
    where = "; ".join(
        f"From {units.text(size, digits=2)} on {after} is faster than {before}"
        for size, before, after in changes
    )
    return Picture(
        figure,
        f"Time against message size from {units.text(min(nbytes))} to {units.text(max(nbytes))}, both axes logarithmic. {told}. "
        f"{where or f'{winners[0]} is fastest at every size'}.",
    )


def ring_animation(trace: Trace) -> Animation:
    """Ranks on a circle, pieces moving on and filling up, a frame for each step; drawn from the messages of a ring collective.

    Each rank's tensor is a strip of pieces, and a piece is as full as the number of ranks whose values it holds.
    """
    n, steps = len(trace.ranks), trace.steps
    if not trace.messages:
        raise ValueError("this trace has no messages to draw: a ring needs two ranks or more")
    if n > 8:
        raise ValueError(
            f"a ring of {n} ranks does not fit on the page: animate up to 8, or draw it with plots.messages"
        )
    hops: list[dict[int, int]] = [{} for _ in range(steps)]
    for message in trace.messages:
        if message.to != (message.source + 1) % n:
            raise ValueError(
                f"rank {message.source} sends to rank {message.to}, so this is no ring, where each rank sends to the next: draw it with plots.messages"
            )
        hops[int(message.start)][message.source] = message.nbytes
    op = trace.messages[0].op
    adding = steps // 2 if steps == 2 * (n - 1) else 0 if "gather" in op else steps
    if steps not in (n - 1, 2 * (n - 1)):
        raise ValueError(
            f"a ring of {n} ranks takes {n - 1} steps, or {2 * (n - 1)} for an all-reduce; this trace has {steps}"
        )

    # holds[rank][piece]: the ranks whose values are in that piece there. A trace says who sends to whom; which piece it is, is the ring's rule.
    holds = [
        [{rank} if adding or piece == rank else set() for piece in range(n)] for rank in range(n)
    ]
    frames = [_circle(holds, {}, bool(adding))]
    labels = [f"Start. Every rank holds {f'its own {n} pieces' if adding else 'one piece'}."]
    sent = dict.fromkeys(range(n), 0)
    for step, sizes in enumerate(hops):
        before, arrivals = [list(mine) for mine in holds], {}
        for source, nbytes in sizes.items():
            piece, to = (
                (source - 1 - step if step < adding else source - (step - adding)) % n,
                (source + 1) % n,
            )
            holds[to][piece] = before[source][piece] | (
                before[to][piece] if step < adding else set()
            )
            arrivals[to] = piece
            sent[source] += nbytes
        frames.append(_circle(holds, arrivals, bool(adding)))
        what = (
            "adds its own values to the piece that arrives"
            if step < adding
            else "keeps the piece that arrives"
        )
        labels.append(
            f"Step {step + 1} of {steps}. Each rank {what}; sent so far: {units.text(max(sent.values()))} a rank."
        )
    return Animation(
        frames,
        labels,
        f"Animation of {op.replace('_', ' ')} on {n} ranks on a circle: in each of {steps} steps every rank passes one piece to the next rank. "
        f"In the end the busiest rank has sent {units.text(max(sent.values()))}.",
    )


def _circle(holds: Sequence[Sequence[set]], arrivals: Mapping[int, int], layered: bool) -> str:
    """One frame as SVG: a strip of pieces for each rank; a piece that has just arrived glides in from the rank before."""
    n = len(holds)
    cell, tall = (34, 56) if n <= 4 else (20, 48)
    wide = n * cell
    radius_x, radius_y = (1.15 * wide + 60, 60 + 20 * n) if n > 2 else (0, 80)
    width, height = 2 * radius_x + wide + 40, 2 * radius_y + tall + 44
    middle_x, middle_y = width / 2, height / 2 - 3

    def place(turn: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn / n - math.pi / 2
        return middle_x + radius_x * math.cos(angle), middle_y + radius_y * math.sin(angle)

    orbit = max(radius_x, 40)
    halo = 'stroke="#fff" stroke-width="5" paint-order="stroke"'
    parts = [
        f'<ellipse cx="{middle_x:.1f}" cy="{middle_y:.1f}" rx="{orbit:.1f}" ry="{radius_y:.1f}" fill="none" stroke="{style.NEUTRAL[0]}" stroke-width="2"/>'
    ]
    for turn in range(n):  # an arrowhead halfway to the next rank
        angle = 2 * math.pi * (turn + 0.5) / n - math.pi / 2
        x, y = middle_x + orbit * math.cos(angle), middle_y + radius_y * math.sin(angle)
        heading = math.degrees(math.atan2(radius_y * math.cos(angle), -orbit * math.sin(angle)))
        parts.append(
            f'<path d="M-6 -6L6 0L-6 6z" transform="translate({x:.1f} {y:.1f}) rotate({heading:.0f})" fill="{style.NEUTRAL[1]}"/>'
        )
    for rank, mine in enumerate(holds):
        x, y = place(rank)
        x, y = x - wide / 2, y - tall / 2
        color = style.SERIES[rank]
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide}" height="{tall}" fill="#fff"/>')
        for piece, held in enumerate(mine):
            left, layer = x + piece * cell, tall / n if layered else tall
            layers = "".join(
                f'<rect x="{left:.1f}" y="{y + tall - (k + 1) * layer:.1f}" width="{cell}" height="{layer:.1f}" fill="{style.SERIES[owner]}"/>'
                for k, owner in enumerate(sorted(held))
            )
            if arrivals.get(rank) == piece:
                from_x, from_y = place(rank - 1)
                here_x, here_y = place(rank)
                layers = f'<g class="lu-glide" style="--x:{from_x - here_x:.1f}px;--y:{from_y - here_y:.1f}px">{layers}</g>'
                layers += f'<path d="M{left + cell / 2 - 6:.1f} {y - 10:.1f}h12l-6 8z" fill="{style.INK}"/>'
            parts.append(layers)
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{cell}" height="{tall}" fill="none" stroke="{style.INK}"/>'
            )
        parts.append(
            f'<text x="{x + wide / 2:.1f}" y="{y + tall + 16:.1f}" text-anchor="middle" font-weight="bold" fill="{color}" {halo}>rank {rank}</text>'
        )
    said = "; ".join(
        f"rank {rank}: {' '.join(str(len(piece)) for piece in mine)}"
        for rank, mine in enumerate(holds)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Ranks summed in each piece. {said}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _labels(places: Sequence[float], heights: Sequence[int], bar: float) -> list[tuple[float, int]]:
    """Where amounts are written: once over each run of equal bars that has the room, and over the highest bar in any case."""
    runs: list[tuple[list[float], int]] = []
    for place, height in zip(places, heights, strict=True):
        if runs and runs[-1][1] == height:
            runs[-1][0].append(place)
        else:
            runs.append(([place], height))
    highest = max(runs, key=lambda run: run[1])
    return [
        (sum(run[0]) / len(run[0]), run[1])
        for run in runs
        if run is highest or style.width_of(units.text(run[1])) < len(run[0]) * bar + 0.02
    ]


def _sent_finding(sent: dict[str, dict]) -> str:
    busiest = {name: max(amounts.values(), default=0) for name, amounts in sent.items()}
    if len(busiest) == 1:
        ((name, amounts),) = sent.items()
        if len(set(amounts.values())) == 1:
            return f"{name}: every rank sends the same {units.text(busiest[name])}"
        rank = max(amounts, key=amounts.get)
        return f"{name}: rank {rank} sends {amounts[rank] / (sum(amounts.values()) or 1):.0%} of all bytes"
    low, high = min(busiest, key=busiest.get), max(busiest, key=busiest.get)
    if busiest[low] == busiest[high]:
        return f"The busiest rank sends {units.text(busiest[low])}, whatever the algorithm"
    return f"The busiest rank sends {style.times(busiest[high] / max(busiest[low], 1))} as much in {high} as in {low}"


def _messages_finding(trace: Trace) -> str:
    load = {
        rank: trace.sent.by("rank").get(rank, 0) + trace.received.by("rank").get(rank, 0)
        for rank in range(len(trace.ranks))
    }
    busiest = max(load, key=load.get)
    steps = f"{trace.steps} step{'s' * (trace.steps > 1)}"
    if len(set(load.values())) == 1:
        return f"{steps}, and every rank carries the same load"
    return f"{steps}, and {load[busiest] / (sum(load.values()) / 2):.0%} of all bytes pass through rank {busiest}"


def _crossings(
    nbytes: Sequence[float], curves: dict[str, list[float]], winners: list[str]
) -> list[tuple[float, str, str]]:
    """The sizes at which the fastest algorithm changes, found between two points on logarithmic axes: (size, before, after)."""
    found = []
    for k in range(1, len(winners)):
        before, after = winners[k - 1], winners[k]
        if before == after:
            continue
        gap = [math.log(curves[before][j] / curves[after][j]) for j in (k - 1, k)]
        share = 0.5 if gap[0] == gap[1] else gap[0] / (gap[0] - gap[1])
        found.append((nbytes[k - 1] * (nbytes[k] / nbytes[k - 1]) ** share, before, after))
    return found


def _cost_finding(winners: list[str], changes: list[tuple[float, str, str]]) -> str:
    if not changes:
        return f"{winners[0]} is fastest at every size"
    size, before, after = changes[-1]
    return f"From {units.text(size, digits=2)} on, {after} beats {before}"
