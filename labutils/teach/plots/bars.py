"""Amounts side by side: bytes held, bytes moved, bytes sent, the blocks of an address space."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from labutils import units
from labutils.config import Hardware
from labutils.ledger import Ledger
from labutils.teach.plots import draw, style
from labutils.teach.plots.picture import Picture

# Memory, by component.


@style.drawn
def memory_bars(
    *, capacity: Hardware | None = None, title: str | None = None, **ledgers: Ledger
) -> Picture:
    """A bar for each ledger, stacked by component and hatched by the axis that shards it.

    `capacity` is a dashed line: what one device has.
    """
    ledgers = style.spaced(ledgers)
    for name, ledger in ledgers.items():
        if not ledger.total or any(line.amount < 0 for line in ledger):
            raise ValueError(f"{name}: bars show bytes above 0, this ledger holds {ledger.total}")
    largest = max(ledger.total for ledger in ledgers.values())
    factor, unit = style.scale(largest, "B")
    room = largest * 1.02
    if capacity is not None and capacity.memory <= 3 * largest:
        room = max(room, capacity.memory * 1.02)
    together = by_part(Ledger(itertools.chain(*ledgers.values())))
    colors = style.component_colors(
        dict.fromkeys(part for (part, _), held in together.items() if held)
    )
    parts = itertools.chain(*map(by_part, ledgers.values()))
    sharded = dict.fromkeys(axis for _, axis in parts if axis in style.AXIS_COLORS)
    entries = [(component, color, "") for component, color in colors.items()]
    entries += [(f"sharded by {axis}", style.PAPER, style.AXIS_COLORS[axis][1]) for axis in sharded]
    above = 0.1 + 0.2 * (capacity is not None)
    _, axes = style.canvas(
        title or _memory_finding(ledgers, capacity),
        height=0.42 * len(ledgers) + 0.1,
        left=style.widest(ledgers) + 0.25,
        right=0.75,
        top=above + 0.2 * len(draw.key_rows(entries)),
        xlabel=f"memory ({unit})",
    )
    draw.rows(axes, list(ledgers), (0, room / factor))
    per_inch = room / factor / style.inches(axes)[0]
    for row, ledger in enumerate(ledgers.values()):
        _stacked(axes, row, by_part(ledger), factor, colors, per_inch)
        end, total = ledger.total / factor + 0.06 * per_inch, units.text(ledger.total)
        # The line of the capacity stops at a total.
        axes.text(end, row, total, va="center", weight="bold", bbox=draw.BLANK, zorder=4)
    draw.key(axes, entries, above=above)
    against = ""
    if capacity is not None:
        memory = units.text(capacity.memory)
        draw.limit(axes, capacity.memory / factor, f"{capacity.name} · {memory}")
        against = f", against the {memory} of one {capacity.name}"
    told = "; ".join(f"{name}: {tell(ledger)}" for name, ledger in ledgers.items())
    return Picture(axes.figure, f"Stacked bars of memory by component{against}. {told}.")


def _stacked(
    axes: Axes,
    row: int,
    parts: Mapping[tuple[str, str], int],
    factor: float,
    colors: Mapping[str, str],
    per_inch: float,
) -> None:
    """One bar, part after part, with the amount in every part that has the room for it."""
    start = 0.0
    for (component, axis), amount in parts.items():
        size, label = amount / factor, units.text(amount)
        color = colors.get(component, style.PAPER)
        hatch = style.AXIS_COLORS[axis][1] * 2 if axis in style.AXIS_COLORS else ""
        axes.barh(row, size, 0.62, left=start, color=color, hatch=hatch, **style.EDGE)
        if style.width_of(label) + 0.06 < size / per_inch:
            # Neither a hatch nor the line of the capacity runs through the amount.
            look: style.Look = {"color": style.on(color), "zorder": 4}
            look["bbox"] = {**draw.BLANK, "facecolor": color}
            axes.text(start + size / 2, row, label, ha="center", va="center", **look)
        start += size


def by_part(ledger: Ledger) -> dict[tuple[str, str], int]:
    """Bytes by (component, axis), known components in the order of the palette."""
    sums: dict[tuple[str, str], int] = {}
    for line in ledger:
        part = line.component or line.name, line.axis
        sums[part] = sums.get(part, 0) + line.amount
    order = {component: place for place, component in enumerate(style.COMPONENT_COLORS)}
    return dict(sorted(sums.items(), key=lambda item: order.get(item[0][0], len(order))))


def tell(ledger: Ledger) -> str:
    """What a ledger holds, in words."""
    sums: dict[str, int] = {}
    for (component, _), amount in by_part(ledger).items():
        sums[component] = sums.get(component, 0) + amount
    said = style.listed([f"{name} {units.text(held)}" for name, held in sums.items() if held])
    return f"{said}, {units.text(ledger.total)} in all" if len(sums) > 1 else said


def _memory_finding(ledgers: Mapping[str, Ledger], capacity: Hardware | None) -> str:
    if capacity is not None:
        of_one = f"in the {units.text(capacity.memory)} of one {capacity.name}"
        fitting = [name for name, held in ledgers.items() if held.total <= capacity.memory]
        if not fitting:
            return f"{'It does not fit' if len(ledgers) == 1 else 'None of these fits'} {of_one}"
        if len(fitting) < len(ledgers):
            parts = itertools.chain(*map(by_part, ledgers.values()))
            all_of_it = any(component == "activations" for component, _ in parts)
            only = "Only" if all_of_it else "Without activations, only"
            return f"{only} {style.listed(fitting)} fit{'s' * (len(fitting) == 1)} {of_one}"
    totals = {name: ledger.total for name, ledger in ledgers.items()}
    most, least = max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)
    if len(ledgers) == 1:
        (component, _), amount = max(by_part(ledgers[most]).items(), key=lambda part: part[1])
        return f"{amount / totals[most]:.0%} of the {units.text(totals[most])} is {component}"
    if totals[least] == totals[most]:
        return f"All hold the same {units.text(totals[most])}"
    return f"{most} holds {style.times(totals[most] / totals[least])} what {least} holds"


# Bytes moved on one device.

MOVES = {"load": "#2F74D0", "store": "#FFB04D"}


@style.drawn
def traffic_bars(
    *, guess: float | None = None, title: str | None = None, **ledgers: Ledger
) -> Picture:
    """Bytes moved by several ways to do the same, a bar each, split into loads and stores.

    `guess` (bytes) is a hollow diamond below.
    """
    moved = {name: held.by("component") for name, held in style.spaced(ledgers).items()}
    totals = {name: sum(sides.values()) for name, sides in moved.items()}
    guessed = [guess] if isinstance(guess, int | float) and math.isfinite(guess) else []
    rows = [*moved, *["your guess"] * len(guessed)]
    largest = max([*totals.values(), *guessed, 1])
    factor, unit = style.scale(largest, "B")
    most, least = max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)
    ratio = totals[most] / max(totals[least], 1)
    finding = f"{most} moves {style.times(ratio)} the bytes of {least}"
    _, axes = style.canvas(
        title or (finding if ratio > 1 else "All move the same bytes"),
        height=0.42 * len(rows) + 0.1,
        left=style.widest(rows) + 0.25,
        right=0.8,
        top=0.3,
        xlabel=f"moved between slow and fast memory ({unit})",
    )
    draw.rows(axes, rows, (0, largest / factor * 1.02))
    for row, (name, sides) in enumerate(moved.items()):
        start = 0.0
        for side, color in MOVES.items():
            amount = sides.get(side, 0) / factor
            axes.barh(row, amount, 0.62, left=start, color=color, **style.EDGE)
            start += amount
        total = units.text(totals[name])
        draw.note(axes, (start, row), (5, 0), total, va="center", weight="bold")
    told = "; ".join(f"{name}: {units.text(total)}" for name, total in totals.items()) + "."
    for number in guessed:
        said = units.text(number)
        draw.guess(axes, (number / factor, len(moved)), said, (9, 0), va="center")
        told += f" Your guess: {said}."
    draw.key(axes, [(f"{side}s", color, "") for side, color in MOVES.items()], above=0.1)
    return Picture(axes.figure, f"Bars of bytes moved between slow and fast memory. {told}")


# Bytes sent by each rank.


@style.drawn
def comm_bars(
    *, guess: float | None = None, title: str | None = None, **ledgers: Ledger
) -> Picture:
    """Bytes that each rank sent: a group of bars for each algorithm, a bar for each rank.

    `guess` (bytes) is a hollow diamond beside them.
    """
    if guess is not None and (isinstance(guess, str) or not math.isfinite(guess)):
        raise ValueError(f"guess must be a number of bytes, got {guess!r}")
    sent = {name: ledger.by("rank") for name, ledger in style.spaced(ledgers).items()}
    size = 1 + max(itertools.chain(*sent.values()), default=0)
    largest = max([1, *itertools.chain(*(amounts.values() for amounts in sent.values()))])
    far = guess is not None and guess > 3 * largest  # it must not flatten the bars
    largest = 1.5 * largest if far else max(largest, guess or 0)
    factor, unit = style.scale(largest, "B")
    _, axes = style.canvas(
        title or _sent_finding(sent),
        left=0.62,
        bottom=0.48,
        top=0.25,
        ylabel=f"sent by each rank ({unit})",
    )
    # Along x everything is laid out in inches, so that labels find the room they were given.
    width, _ = style.inches(axes)
    aside = 1.0 if guess is not None else 0.0
    group = (width - aside) / len(sent)
    bar = min(group / size - 0.4 / size, 0.55)
    axes.set(xlim=(0, width), ylim=(0, largest / factor * 1.02))
    ticks = []
    for k, (name, color) in enumerate(style.series_colors(sent).items()):
        middle = (k + 0.5) * group
        places = [middle + bar * (rank - (size - 1) / 2) for rank in range(size)]
        amounts = [sent[name].get(rank, 0) for rank in range(size)]
        _group(axes, places, amounts, bar, factor, color)
        draw.below(axes, middle, 0.28, name, weight="bold")
        ticks += places
    all_fit = style.width_of(str(size)) < bar
    labels = [str(rank) if all_fit or rank % 4 == 0 else "" for rank in range(size)]
    axes.set_xticks(ticks, labels * len(sent))
    axes.tick_params(axis="x", length=0)
    axes.text(-0.08 / width, -0.055, "rank", transform=axes.transAxes, ha="right", va="top")
    told = [f"{name}: {_by_rank(amounts, size)}" for name, amounts in sent.items()]
    said = f"Bars of bytes sent by each rank. {'; '.join(told)}."
    if guess is not None:
        place = width - aside / 2, min(guess, largest) / factor
        draw.guess(axes, place, f"{units.text(guess)} ↑" if far else "your guess", zorder=2)
        said += f" Your guess: {units.text(guess)}."
    return Picture(axes.figure, said)


def _by_rank(amounts: Mapping[int, int], size: int) -> str:
    return ", ".join(f"rank {rank} {units.text(amounts.get(rank, 0))}" for rank in range(size))


def _group(
    axes: Axes,
    places: Sequence[float],
    amounts: Sequence[int],
    bar: float,
    factor: float,
    color: str,
) -> None:
    """The bars of one algorithm, with amounts where they have the room.

    An amount stands once over each run of equal bars, and over the highest bar in any case.
    """
    heights = [amount / factor for amount in amounts]
    axes.bar(places, heights, 0.86 * bar, color=color, **style.EDGE)
    runs = [
        (amount, [place for place, _ in run])
        for amount, run in itertools.groupby(zip(places, amounts, strict=True), lambda at: at[1])
    ]
    highest = max(runs, key=lambda run: run[0])
    for amount, over in runs:
        label = units.text(amount)
        if (amount, over) == highest or style.width_of(label) < len(over) * bar + 0.02:
            place = sum(over) / len(over), amount / factor
            draw.note(axes, place, (0, 2), label, ha="center", va="bottom")


def _sent_finding(sent: Mapping[str, Mapping[int, int]]) -> str:
    busiest = {name: max(amounts.values(), default=0) for name, amounts in sent.items()}
    if len(busiest) == 1:
        ((name, amounts),) = sent.items()
        if len(set(amounts.values())) == 1:
            return f"{name}: every rank sends the same {units.text(busiest[name])}"
        rank = max(amounts, key=amounts.__getitem__)
        return f"{name}: rank {rank} sends {amounts[rank] / sum(amounts.values()):.0%} of all bytes"
    low, high = min(busiest, key=busiest.__getitem__), max(busiest, key=busiest.__getitem__)
    if busiest[low] == busiest[high]:
        return f"The busiest rank sends {units.text(busiest[low])}, whatever the algorithm"
    ratio = style.times(busiest[high] / max(busiest[low], 1))
    return f"The busiest rank sends {ratio} as much in {high} as in {low}"


# The weight of a token.


@style.drawn
def token_weights(counts: Sequence[int]) -> Picture:
    """How much one token of each micro-batch counts in a mean of means, against a mean over tokens.

    The micro-batches have `counts` tokens.
    """
    total, k = sum(counts), len(counts)
    weights = [total / (k * count) for count in counts]
    ratio = style.times(max(weights) / min(weights))
    finding = f"In a mean of means, a token of the shortest micro-batch counts {ratio}"
    _, axes = style.canvas(
        f"{finding} one of the longest",
        height=2.0,
        left=0.6,
        right=0.9,
        top=0.05,
        xlabel="tokens, micro-batch by micro-batch",
        ylabel="weight of a token",
    )
    start = 0
    for count, weight, color in zip(counts, weights, itertools.cycle(style.SERIES)):
        middle = start + count / 2
        axes.bar(middle, weight, count, color=color, **style.EDGE)
        axes.text(middle, max(weight, 1.06), f"{weight:.2f}", ha="center", va="bottom")
        start += count
    axes.axhline(1, color=style.INK, linestyle="--", linewidth=1.2)
    axes.set(xlim=(0, total), ylim=(0, max(*weights, 1) * 1.15))
    draw.note(axes, (total, 1), (5, 0), "every token\nequal", va="center")
    style.whole_ticks(axes.xaxis)
    told = [f"{n} tokens: {weight:.2f} each" for n, weight in zip(counts, weights, strict=True)]
    return Picture(
        axes.figure,
        "Bars of the weight of a token in a mean of means, where 1 would be right. "
        f"{'; '.join(told)}.",
    )


# Tokens at experts.


@style.drawn
def visits(counts: Sequence[Sequence[int]], *, names: Sequence[str] = ()) -> Picture:
    """Who visits whom: a row for each rank's tokens, a column for each expert, and under it a bar
    of all that it computes. Visits that stay on their rank are hatched.

    counts: of each rank, how many of its tokens visit each expert
    names: of the rows, where they are no ranks: then nobody holds the experts, and nothing travels
    """
    n, E = len(counts), len(counts[0])
    load, each = [sum(column) for column in zip(*counts, strict=True)], -(-E // n)
    mean, most = sum(load) / E, max(load)
    finding = f"The busiest expert gets {style.times(most / mean)} the mean"
    _, axes = style.canvas(
        finding,
        height=0.3 * n + 1.25,
        left=max(map(style.width_of, ("all ranks", *names))) + 0.2,
        right=style.width_of("mean 0000") + 0.15,
        top=0.3,
        bottom=0.62,
        xlabel="experts" if names else "experts, by the rank that holds them",
    )
    tall = 1.0 / 0.3  # rows of the bars
    axes.set(xlim=(-0.5, E - 0.5), ylim=(n + tall + 0.2, -0.5))
    color, hatch = style.AXIS_COLORS["ep"]
    busiest = max(map(max, counts))
    for rank, row in enumerate(counts):
        for expert, count in enumerate(row):
            look = {"hatch": "//"} if not names and expert // each == rank else {}
            fill = _mixed(color, count / busiest)
            draw.box(axes, expert - 0.5, rank - 0.5, 1, 1, fill, linewidth=0.5, **look)
            axes.text(expert, rank, f"{count}", ha="center", va="center", bbox=draw.BLANK)
    floor = n + tall
    for expert, total in enumerate(load):
        high = (tall - 0.6) * total / most
        draw.box(axes, expert - 0.32, floor - high, 0.64, high, color, hatch=hatch)
        above: style.Look = {"va": "bottom", "weight": "bold", "bbox": draw.BLANK}
        apart = f" {total} "  # from the dashes of the mean: 40 is not -40-
        axes.text(expert, floor - high - 0.08, apart, ha="center", **above)
    level = floor - (tall - 0.6) * mean / most
    axes.axhline(level, color=style.INK, linestyle="--", linewidth=1.2)
    draw.beside(axes, 0.06, level, f"mean {mean:,.0f}")
    whole, whose = ("all", "each row") if names else ("all ranks", "each rank")
    named = names or [f"rank {i}" for i in range(n)]
    axes.set_yticks([*range(n), floor - 1], [*named, whole])
    axes.set_xticks(range(E), [f"{e}" + f"\nrank {e // each}" * (not names) for e in range(E)])
    axes.tick_params(length=0)
    if not names:
        draw.key(axes, [("stays on its rank", style.PAPER, "//"), ("travels", color, "")])
    rows = "; ".join(
        f"{name}: {', '.join(map(str, row))}" for name, row in zip(named, counts, strict=True)
    )
    told = f"Visits of {whose}'s tokens to experts 0 to {E - 1}. {rows}"
    total = f"{whole.capitalize()}: {', '.join(map(str, load))}"
    return Picture(axes.figure, f"{told}. {total}. {finding}.")


def _mixed(color: str, share: float) -> str:
    """So much of a color on paper."""
    parts = (round(255 + (c - 255) * share) for c in bytes.fromhex(color[1:]))
    return "#" + "".join(f"{c:02X}" for c in parts)


# The address space of an allocator.

Segment = Sequence[tuple[int, str]]  # (bytes, name) of each block in order; "" for a free one


@style.drawn
def memory_map(
    *, title: str, asked: int = 0, capacity: int = 0, **moments: Sequence[Segment]
) -> Picture:
    """A row for each moment: its segments end to end, so that a hole that is too small can be seen.

    Used blocks have the color of their name, free ones are hatched; amounts are in MiB, as
    allocators count.

    asked: a request of so many bytes, drawn to scale
    capacity: a dashed line, what the device has
    moments: the segments at each of them, such as `allocator.layout`
    """
    moments = style.spaced(moments)
    largest = max(sum(map(_nbytes, segments)) for segments in moments.values())
    if not largest:
        raise ValueError("nothing is reserved at any moment: draw the map after the first request")
    longest = max(largest, asked, capacity)
    factor, unit = _binary(longest)
    gap, most = 0.006 * longest / factor, max(map(len, moments.values()))  # between segments
    colors = _block_colors(itertools.chain(*moments.values()))
    labels = [*moments, *["asked for"] * bool(asked)]
    entries = [*((name, color, "") for name, color in colors.items()), ("free", style.PAPER, "//")]
    above = 0.1 + 0.2 * bool(capacity)
    _, axes = style.canvas(
        title,
        height=0.42 * len(labels) + 0.1,
        left=style.widest(labels) + 0.25,
        right=0.5 if capacity else 0.15,  # the name of the line may stand out a little
        top=above + 0.2 * len(draw.key_rows(entries)),
        xlabel=f"reserved memory, segment after segment ({unit})",
    )
    room = max(largest / factor + gap * most, longest / factor) * 1.01
    draw.rows(axes, labels, (0, room))
    for row, segments in enumerate(moments.values()):
        x = 0.0
        for segment in segments:
            _blocks(axes, x, row, segment, factor, colors)
            x += _nbytes(segment) / factor + gap
    maps = [f"{name}: {_tell_segments(segments)}" for name, segments in moments.items()]
    told = f"Map of reserved memory. {'; '.join(maps)}."
    if asked:
        label = units.text(asked, binary=True)
        _request(axes, len(moments), asked / factor, label)
        told += f" A request of {label} is drawn to scale."
    draw.key(axes, entries, above=above)
    if capacity:
        label = units.text(capacity, binary=True)
        draw.limit(axes, capacity / factor, f"device · {label}")
        told += f" A dashed line marks the {label} of the device."
    return Picture(axes.figure, told)


def _request(axes: Axes, row: int, size: float, label: str) -> None:
    draw.box(axes, 0, row - 0.3, size, 0.6, "none", linewidth=1.4, linestyle="--")
    axes.text(size / 2, row, label, ha="center", va="center")


def _nbytes(segment: Segment) -> int:
    return sum(size for size, _ in segment)


def _binary(largest: int) -> tuple[int, str]:
    """The factor and the name of the unit of an axis up to `largest` bytes."""
    steps = {"GiB": units.GIB, "MiB": units.MIB, "KiB": units.KIB, "B": 1}
    unit = next(unit for unit, factor in steps.items() if largest >= factor)
    return steps[unit], unit


def _block_colors(segments: Iterable[Segment]) -> dict[str, str]:
    """The color of each name: that of its component of memory, or one of a series."""
    names = dict.fromkeys(name for _, name in itertools.chain(*segments) if name)
    return {
        **style.series_colors(names),
        **{n: style.COMPONENT_COLORS[n] for n in names if n in style.COMPONENT_COLORS},
    }


def _blocks(
    axes: Axes, x: float, row: int, segment: Segment, factor: float, colors: Mapping[str, str]
) -> None:
    """A segment from `x` on: its blocks, with their sizes where there is room, and its outline."""
    start, per_inch = x, axes.get_xlim()[1] / style.inches(axes)[0]
    for nbytes, name in segment:
        size, label = nbytes / factor, units.text(nbytes, binary=True)
        fill, hatch = colors.get(name, style.PAPER), "" if name else "////"
        edge = {"edgecolor": style.FAINT, "linewidth": 0.4}
        draw.box(axes, x, row - 0.3, size, 0.6, fill, hatch=hatch, **edge)
        if style.width_of(label) + 0.08 < size / per_inch:
            look: style.Look = {"bbox": None if name else draw.BLANK, "color": style.on(fill)}
            axes.text(x + size / 2, row, label, ha="center", va="center", **look)
        x += size
    draw.box(axes, start, row - 0.3, x - start, 0.6, "none", linewidth=1.2)


def _tell_segments(segments: Sequence[Segment]) -> str:
    free = [size for size, name in itertools.chain(*segments) if not name]
    used = sum(map(_nbytes, segments)) - sum(free)
    in_use = f"{units.text(used, binary=True)} in use"
    said = f"{len(segments)} segment{'s' * (len(segments) != 1)}, {in_use}"
    if not free:
        return f"{said}, nothing free"
    blocks = f"{len(free)} block{'s' * (len(free) != 1)}"
    unused, largest = units.text(sum(free), binary=True), units.text(max(free), binary=True)
    return f"{said}, {unused} free in {blocks}, the largest {largest}"


# Which part of a tensor a rank has.


@style.drawn
def tensor_shares(
    *, n: int, rank: int, title: str, **plans: Sequence[tuple[str, float, str]]
) -> Picture:
    """Tensors in the order of a forward pass, tokens downwards and width to the right, a row for
    each plan; painted is what one of `n` ranks has.

    plans: (name, width, how it is cut) of each tensor: "s" by tokens, "h" by width, "" not at all;
        of width 0, what travels between two tensors
    """
    plans, gap, tall, row = style.spaced(plans), 0.14, 0.78, 1.6  # inches
    most = max(sum(width for _, width, _ in plan) for plan in plans.values())
    longest = max(len(plan) for plan in plans.values())
    inch = (style.WIDE - 0.3 - gap * longest) / most  # of one unit of width
    _, axes = style.canvas(title, height=row * len(plans), left=0.1, right=0.1, bottom=0.1)
    axes.set(xlim=(0, style.WIDE - 0.2), ylim=(row * len(plans), 0))
    axes.axis("off")
    color, (line, hatch) = style.COMPONENT_COLORS["activations"], style.AXIS_COLORS["tp"]
    for y, (plan, tensors) in zip(itertools.count(0, row), plans.items(), strict=False):
        axes.text(0.05, y + 0.08, plan, weight="bold", va="center")
        x, top = 0.05, y + 0.55
        for name, width, cut in tensors:
            if not width:
                axes.plot([x, x], [top - 0.1, top + tall + 0.1], color=line, lw=2.5)
                axes.text(x, top - 0.2, name, ha="center", va="center", color=line)
                x += gap
                continue
            wide, part = width * inch, 1 / n if cut else 1
            across, down = (wide * part, tall) if cut != "s" else (wide, tall * part)
            draw.box(axes, x, top, wide, tall, style.PAPER)
            corner = x + across * rank * (cut == "h"), top + down * rank * (cut == "s")
            draw.box(axes, *corner, across, down, color, hatch=hatch if cut else "")
            axes.text(x + wide / 2, top + tall + 0.12, name, ha="center", va="center", size=7.5)
            x += wide + gap
    told = "; ".join(f"{name}: {_tell_shares(tensors, n)}" for name, tensors in plans.items())
    return Picture(axes.figure, f"What rank {rank} of {n} has of each tensor. {told}.")


def _tell_shares(tensors: Sequence[tuple[str, float, str]], n: int) -> str:
    said = {"s": "cut by tokens", "h": "cut by width", "": "whole"}
    names = {how: [name for name, width, cut in tensors if width and cut == how] for how in said}
    kept = sum(width / (n if cut else 1) for _, width, cut in tensors)
    parts = [f"{style.listed(names[how])} {said[how]}" for how in said if names[how]]
    return f"{', '.join(parts)}: {kept / sum(width for _, width, _ in tensors):.0%} of all"
