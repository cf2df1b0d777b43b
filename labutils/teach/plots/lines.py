"""One quantity against another: losses, times, sums, rooflines, trades."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogFormatter, LogLocator, NullLocator

from labutils import units
from labutils.teach.plots import draw, style
from labutils.teach.plots.picture import Picture

Pair = tuple[Sequence[float], Sequence[float]]  # places on x, and values
Series = Sequence[float] | Sequence[Sequence[float]] | Pair

# Any lines.

_BROAD: style.Look = {"zorder": 1, "alpha": 0.45, "linewidth": 7, "solid_capstyle": "butt"}


@style.drawn
def curves(
    x: Sequence[float] = (),
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    log: str = "",
    unit: str = "",
    measured: Mapping[str, Series] | None = None,
    guess: tuple[float, float] | None = None,
    broad: Collection[str] = (),
    alt: str | None = None,
    **lines: Series,
) -> Picture:
    """A labeled line for each series over `x`.

    A series of several runs becomes their mean in a band from lowest to highest; one that has
    places of its own is a pair (x, values), a tuple.

    lines: formulas, or whole histories
    measured: filled markers, of the color of the line with the same name
    guess: a point (x, y)
    broad: lines that others would hide, drawn as pale bands under them
    log: the logarithmic axes, "x", "y" or "xy"; unit: of y, as by `units.text`, or "%" of a share
    """
    runs = {name: _series(name, values, x) for name, values in style.spaced(lines).items()}
    dots = {name: _series(name, values, x) for name, values in style.spaced(measured or {}).items()}
    colors = style.series_colors(dict.fromkeys([*runs, *dots]))
    right = style.widest(colors, "bold") + 0.3
    labels: style.Look = {"xlabel": xlabel, "ylabel": ylabel}
    _, axes = style.canvas(title, left=0.85, right=right, top=0.12, **labels)
    _logarithmic(axes, log, [*runs.items(), *dots.items()])
    for name, (at, rows) in runs.items():
        look: style.Look = {"color": colors[name], **(_BROAD if name in broad else {})}
        axes.plot(at, rows.mean(0), **look)
        if len(rows) > 1:
            look = {"color": colors[name], "alpha": 0.2, "linewidth": 0}
            axes.fill_between(at, rows.min(0), rows.max(0), **look)
    for name, (at, rows) in dots.items():
        for values in rows:
            draw.points(axes, at, values, colors[name], clip_on=False)
    if guess is not None:
        draw.guess(axes, guess, "your guess")
    axes.margins(x=0.02)
    places = np.unique([place for at, _ in (*runs.values(), *dots.values()) for place in at])
    _places_on_x(axes, places.tolist() if "x" in log and len(places) <= 12 else [])
    _plain_where_narrow(axes, log)
    if unit:
        style.in_units(axes.yaxis, unit)
    ends = {name: (at[-1], rows.mean(0)[-1]) for name, (at, rows) in (dots | runs).items()}
    draw.name_ends(axes, ends, colors)
    told = f"{title}. {ylabel} against {xlabel}. {_tell_series(runs, dots, unit)}."
    return Picture(axes.figure, alt or told)


def _series(name: str, values: Series, x: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The places of a series and its values, one row for each run."""
    paired = isinstance(values, tuple) and len(values) == 2 and np.ndim(values[0])
    pair: Any = values if paired else (x, values)
    try:
        at, rows = (np.asarray(numbers, dtype=float) for numbers in pair)
    except ValueError:
        raise ValueError(
            f"{name}: a series is a sequence of numbers, or one such sequence for each run, "
            "all of one length"
        ) from None
    rows = np.atleast_2d(rows)
    if not len(at) or rows.shape[1] != len(at):
        raise ValueError(
            f"{name}: {at.size} places on x need as many values, at least one, "
            f"got shape {np.shape(pair[1])}"
        )
    return at, rows


def _logarithmic(axes: Axes, log: str, every: Sequence[tuple[str, tuple]]) -> None:
    """Makes the axes named in `log` logarithmic, once every number on them can be shown."""
    for name, series in every:
        for letter, numbers in zip("xy", series, strict=True):
            if letter in log and (numbers <= 0).any():
                worst = f"got {numbers.min():g} on {letter}"
                raise ValueError(f"{name}: a logarithmic axis needs numbers above 0, {worst}")
    axes.set(**{f"{letter}scale": "log" for letter in log})


def _places_on_x(axes: Axes, places: Sequence[float]) -> None:
    """Ticks on x as plain numbers: the very `places` that were tried, where there are any; with
    three digits, and of every second one, where they would stand on each other."""
    width = max((style.width_of(f"{place:,.10g}") for place in places), default=0.0)
    crowded = width * len(places) > 1.1 * style.inches(axes)[0]
    digits, step = (3, 2) if crowded else (10, 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.{digits}g}"))
    if len(places):
        axes.xaxis.set(major_locator=FixedLocator(places[::step]), minor_locator=NullLocator())


class _Plain(LogFormatter):
    """Ticks of a logarithmic axis as plain numbers: 60, not 6 × 10¹."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,.6g}" if super().__call__(x, pos) else ""


def _plain_where_narrow(axes: Axes, log: str) -> None:
    """Plain numbers on a logarithmic axis that has fewer than two powers of ten: there the ticks
    between them are named, too."""
    axes.autoscale_view()
    for letter in log:
        axis = {"x": axes.xaxis, "y": axes.yaxis}[letter]
        low, high = (math.log10(end) for end in axis.get_view_interval())
        if math.floor(high) - math.ceil(low) < 1:
            axis.set_minor_formatter(_Plain())
            if letter == "y":
                axis.set_major_formatter(_Plain())


def _tell_series(runs: Mapping, dots: Mapping, unit: str) -> str:
    def short(value: float) -> str:
        return style.amount(value, unit) if unit else f"{value:.3g}"

    said = []
    for name, (at, rows) in runs.items():
        first, *_, last = [short(value) for value in rows.mean(0).repeat(2)]
        said.append(f"{name} goes from {first} at {at[0]:,g} to {last} at {at[-1]:,g}")
    for name, (_, rows) in dots.items():
        means = ", ".join(short(value) for value in rows.mean(0)[:8])
        said.append(f"{name}, measured: {means}")
    return "; ".join(said)


# Time against message size.

Change = tuple[float, str, str]  # from a size on the second is faster than the first


@style.drawn
def cost_curves(
    nbytes: Sequence[float],
    *,
    measured: Mapping[str, Pair] | None = None,
    title: str | None = None,
    **seconds: Sequence[float],
) -> Picture:
    """Seconds against message size, a line for each algorithm, and the sizes where another wins.

    `measured` holds (sizes, seconds) by the same names, drawn as filled markers.
    """
    lines, dots = style.spaced(seconds), style.spaced(measured or {})
    colors = style.series_colors(lines)
    winners = [min(lines, key=lambda name: lines[name][k]) for k in range(len(nbytes))]
    changes = _crossings(nbytes, lines, winners)
    always = f"{winners[0]} is fastest at every size"
    said = [f"{units.text(size, digits=2)} on" for size, _, _ in changes]
    finding = f"From {said[-1]}, {changes[-1][2]} beats {changes[-1][1]}" if changes else always
    _, axes = style.canvas(
        title or finding,
        left=0.85,
        right=style.widest(lines, "bold") + 0.25,
        top=0.3,
        xlabel="message size",
        ylabel="time",
    )
    for name, times in lines.items():
        axes.plot(nbytes, times, color=colors[name])
        if name in dots:
            at, took = dots[name]
            draw.points(axes, at, took, colors[name], clip_on=False)
    low, high = min(nbytes), max(nbytes)
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    style.in_units(axes.xaxis, "B")
    style.in_units(axes.yaxis, "s")
    axes.xaxis.set_major_locator(LogLocator(base=10, numticks=9))
    draw.name_ends(axes, {name: (high, times[-1]) for name, times in lines.items()}, colors)
    _mark_changes(axes, [size for size, _, _ in changes])
    told = "; ".join(
        f"{name}: {units.text(times[0], 's')} to {units.text(times[-1], 's')}"
        for name, times in lines.items()
    )
    faster = [f"{after} is faster than {before}" for _, before, after in changes]
    where = "; ".join(f"From {size} {what}" for size, what in zip(said, faster, strict=True))
    return Picture(
        axes.figure,
        f"Time against message size from {units.text(low)} to {units.text(high)}, both axes "
        f"logarithmic. {told}. {where or always}.",
    )


def _mark_changes(axes: Axes, sizes: Sequence[float]) -> None:
    """A dotted line at each size, which stands over it."""
    low, high = axes.get_xlim()
    per_inch = math.log(high / low) / style.inches(axes)[0]
    for size in sizes:
        axes.axvline(size, color=style.FAINT, linewidth=0.9, linestyle=":", zorder=0)
    labels = [(math.log(size / low) / per_inch, units.text(size, digits=2)) for size in sizes]
    draw.over_spread(axes, labels, 0.05, 0.1)


def _crossings(
    nbytes: Sequence[float], lines: Mapping[str, Sequence[float]], winners: Sequence[str]
) -> list[Change]:
    """Where the fastest algorithm changes, found between two points on logarithmic axes."""
    found = []
    for k, (before, after) in enumerate(itertools.pairwise(winners)):
        if before != after:
            gap = [math.log(lines[before][j] / lines[after][j]) for j in (k, k + 1)]
            share = 0.5 if gap[0] == gap[1] else gap[0] / (gap[0] - gap[1])
            size = nbytes[k] * (nbytes[k + 1] / nbytes[k]) ** share
            found.append((size, before, after))
    return found


# Sums as they grow.


@style.drawn
def running_sums(
    exact: Sequence[float],
    *,
    guesses: Mapping[str, float] | None = None,
    title: str | None = None,
    **partial: Sequence[float],
) -> Picture:
    """Partial sums against the number of terms, a line for each way to add, the exact sum dotted.

    `guesses` are hollow diamonds at the right end.
    """
    for name, sums in partial.items():
        if len(sums) != len(exact):
            raise ValueError(
                f"{name}: {len(exact)} exact sums need as many partial sums, got {len(sums)}"
            )
    lines = {name: [float(v) for v in sums] for name, sums in style.spaced(partial).items()}
    colors = {"exact": style.FAINT, **style.series_colors(lines)}
    last = {"exact": float(exact[-1]), **{name: sums[-1] for name, sums in lines.items()}}
    labels = {name: f"{name}: {end:,.6g}" for name, end in last.items()}
    _, axes = style.canvas(
        title or _stalling(lines),
        height=2.6,
        left=0.75,
        right=style.widest(labels.values(), "bold") + 0.3,
        top=0.1,
        xlabel="terms added",
        ylabel="sum so far",
    )
    terms = range(1, len(exact) + 1)
    axes.plot(terms, exact, color=style.FAINT, linestyle=":")
    for name, sums in lines.items():
        axes.plot(terms, sums, color=colors[name])
    guesses = {
        name: guess
        for name, guess in (guesses or {}).items()
        if isinstance(guess, int | float) and math.isfinite(guess)
    }
    for name, guess in guesses.items():
        look: style.Look = {**style.GUESS, "markeredgecolor": colors.get(name, style.INK)}
        axes.plot(len(exact), guess, **look, clip_on=False)
    every = [*exact, *itertools.chain(*lines.values())]
    top = max(*every, *guesses.values())
    axes.set(xlim=(0, len(exact)), ylim=(min(0, *every), top * 1.03))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    said = {label: colors[name] for name, label in labels.items()}
    draw.beside_lines(axes, dict(zip(said, last.values(), strict=True)), said)
    told = "; ".join(f"{label} after {len(exact):,} terms" for label in said)
    return Picture(axes.figure, f"Partial sums against the number of terms. {told}.")


def _stalling(lines: Mapping[str, Sequence[float]]) -> str:
    """The finding: the sums whose last quarter adds nothing."""
    stalls = [
        f"{name} at {sums[-1]:,.6g}"
        for name, sums in lines.items()
        if len(sums) > 3 and len(set(sums[-len(sums) // 4 :])) == 1
    ]
    if not stalls:
        return f"{style.listed(list(lines))} against the exact sum"
    return f"A running sum stops growing: {style.listed(stalls)}"


# What a batch size does to the gradient.


@style.drawn
def gradient_noise(
    measured: Mapping[int, Sequence[float]],
    *,
    noise: float,
    signal: float,
) -> Picture:
    """Squared distance of a batch's gradient from the full one, against the batch size.

    measured: the distances of some batches of each size: their means, and their spread in gray
    noise: the law noise/B, a line
    signal: |gradient|², the level at which noise and gradient are equally long
    """
    sizes = sorted(measured)
    means = [sum(measured[size]) / len(measured[size]) for size in sizes]
    even = noise / signal
    long = f"at about {even:.2g} sequences it is as long as the gradient"
    _, axes = style.canvas(
        f"Twice the batch, half the noise; {long}",
        xlabel="batch size in sequences",
        ylabel="squared length",
        left=0.9,
        right=1.45,
    )
    low, high = sizes[0] / 1.4, sizes[-1] * 1.4
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    color, level = style.SERIES[:2]
    for size in sizes:
        look: style.Look = {"color": style.NEUTRAL[0], "markersize": 7, "zorder": 1}
        axes.plot([size] * len(measured[size]), measured[size], "_", **look)
    axes.plot([low, high], [noise / low, noise / high], color=color)
    draw.points(axes, sizes, means, color)
    axes.axhline(signal, color=level, linewidth=1.6)
    if low < even < high:
        axes.axvline(even, color=style.FAINT, linestyle=":", linewidth=1)
    look = {"va": "center", "annotation_clip": False}
    draw.note(axes, (high, noise / high), (4, 0), "noise: formula", color=color, **look)
    draw.note(axes, (high, signal), (4, 0), "the gradient itself", color=level, **look)
    draw.note(axes, (sizes[0], means[0]), (8, 3), "measured", color=color)
    _places_on_x(axes, sizes)
    return Picture(
        axes.figure,
        "Squared distance between the gradient of a batch and the gradient of all sequences, "
        f"for batches of {sizes[0]} to {sizes[-1]} sequences, {len(measured[sizes[0]])} batches "
        "of each size, on logarithmic axes. The means lie on a falling straight line, noise "
        "divided by batch size. It meets the squared length of the gradient itself at a batch of "
        f"about {even:.2g} sequences.",
    )


# What a device can do.


@style.drawn
def roofline(
    roofs: Mapping[str, tuple[float, float]],
    points: Mapping[str, tuple[float, float]],
    *,
    title: str,
    timed: Mapping[str, float] | None = None,
) -> Picture:
    """What a device can do against FLOPs per byte.

    roofs: (FLOP/s, bytes/s) of each device
    points: (FLOPs, bytes) of some work; they hang on the first roof, the most it allows
    timed: FLOP/s that somebody reached, a line across, since their bytes are not known
    """
    first, (flops, bandwidth) = next(iter(roofs.items()))
    intensity = {name: work / nbytes for name, (work, nbytes) in points.items()}
    ridges = {name: peak / bw for name, (peak, bw) in roofs.items()}
    low = min(*intensity.values(), *ridges.values()) / 4
    high = max(*intensity.values(), *ridges.values()) * 4
    colors = style.series_colors(roofs)
    _, axes = style.canvas(
        title,
        height=2.7,
        left=1.2,
        right=style.widest(roofs, "bold") + 0.3,
        top=0.12,
        xlabel="FLOPs per byte of slow memory",
        ylabel="attainable",
    )
    for name, (peak, bw) in roofs.items():
        axes.plot([low, ridges[name], high], [low * bw, peak, peak], color=colors[name])
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    style.in_units(axes.yaxis, "FLOP/s")
    axes.set_ylim(axes.get_ylim()[0] / 3, axes.get_ylim()[1] * 1.6)
    at_most = {name: min(flops, x * bandwidth) for name, x in intensity.items()}
    places = {name: (x, at_most[name]) for name, x in intensity.items()}
    _hung(axes, places, colors[first], (timed or {}).values())
    for name, rate in (timed or {}).items():
        axes.axhline(rate, color="black", linestyle=":", linewidth=1)
        label = f"{name}: {units.text(rate, 'FLOP/s')}"
        axes.annotate(label, (low, rate), (4, -3), textcoords="offset points", va="top")
    draw.name_ends(axes, {name: (high, peak) for name, (peak, _) in roofs.items()}, colors)
    said = "; ".join(
        f"{name} up to {units.text(peak, 'FLOP/s')} and {units.text(bw, 'B/s')}, "
        f"ridge at {ridges[name]:.3g}"
        for name, (peak, bw) in roofs.items()
    )
    told = "; ".join(
        f"{name}: {x:.3g} FLOPs per byte, at most {units.text(at_most[name], 'FLOP/s')}"
        for name, x in intensity.items()
    )
    told += "".join(
        f". {name}: {units.text(rate, 'FLOP/s')}, a line" for name, rate in (timed or {}).items()
    )
    return Picture(axes.figure, f"Roofline, both axes logarithmic. {said}. On {first}: {told}.")


def _hung(
    axes: Axes, places: Mapping[str, tuple[float, float]], color: str, across: Collection[float]
) -> None:
    """Points on a roof, with their names to the lower right.

    From right to left; a name that would reach the last one goes under it, and so does one that
    would stand on a line across.
    """
    width, height = style.inches(axes)
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    free_x, free_y = math.inf, math.inf
    down = sorted(across, reverse=True)
    lines = [math.log(y / bottom) / math.log(top / bottom) * height for y in down]
    for name, (x, y) in sorted(places.items(), key=lambda item: -item[1][0]):
        axes.plot([x, x], [bottom, y], color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
        draw.points(axes, x, y, color)
        at_x = math.log(x / low) / math.log(high / low) * width + 0.07
        at_y = math.log(y / bottom) / math.log(top / bottom) * height - 0.13
        at_y = min(at_y, free_y - 0.16) if at_x + style.width_of(name) > free_x else at_y
        for line in lines:
            at_y = line - 0.12 if abs(at_y - line) < 0.12 else at_y
        look: style.Look = {"va": "center", "bbox": {**draw.BLANK, "pad": 0.8}}
        axes.text(at_x / width, at_y / height, name, transform=axes.transAxes, **look)
        free_x, free_y = at_x, at_y


# Memory for work.


@style.drawn
def trade_off(
    trades: Sequence[tuple[float, float]],
    *,
    marks: Mapping[str, tuple[float, float]] | None = None,
    once: float,
    guess: tuple[float, float] | None = None,
) -> Picture:
    """Peak bytes against work: the best trades as a staircase, other plans as filled markers.

    trades, marks: (bytes, cost of the forward passes) of each
    once: the cost of one forward pass, the unit of the vertical axis
    guess: (bytes, cost), a hollow diamond
    """
    plans = marks or {}
    every = [*trades, *plans.values()]
    factor, unit = style.scale(max(nbytes for nbytes, _ in every), "B")
    axis: style.Look = {"xlabel": f"most held after any step ({unit})", "ylabel": "forward passes"}
    finding = _trade_finding(trades, once)
    _, axes = style.canvas(finding, height=2.6, left=0.6, right=0.3, top=0.15, **axis)
    xs, ys = [nbytes / factor for nbytes, _ in trades], [cost / once for _, cost in trades]
    right = max(nbytes for nbytes, _ in every) / factor * 1.06
    axes.step([*xs, right], [*ys, ys[-1]], where="post", color=style.INK)
    top, low = max(cost for _, cost in every) / once, min(ys)
    room = 0.12 * (top - low) + 0.1
    axes.set(xlim=(0, right), ylim=(low - room, top + room))
    for (name, (nbytes, cost)), color in zip(plans.items(), style.SERIES, strict=False):
        place = nbytes / factor, cost / once
        draw.points(axes, *place, color, zorder=4, clip_on=False)
        # No plan lies below the staircase, so there is room for names.
        look = {"ha": "right" if place[0] > 0.85 * right else "center", "color": color}
        draw.note(axes, place, (0, -15), name, weight="bold", **look)
    if guess is not None:
        place = min(guess[0] / factor, right), min(guess[1] / once, axes.get_ylim()[1])
        draw.guess(axes, place, "your guess", (8, 6))
    least, most = (
        f"{units.text(nbytes)} at {cost / once:.2f} forward passes"
        for nbytes, cost in (trades[0], trades[-1])
    )
    told = "; ".join(
        f"{name}: {units.text(nbytes)}, {cost / once:.2f} forward passes"
        for name, (nbytes, cost) in plans.items()
    )
    return Picture(
        axes.figure,
        f"Staircase of the best trades of memory for work, from {least} to {most}. {told}.",
    )


def _trade_finding(trades: Sequence[tuple[float, float]], once: float) -> str:
    (low, costly), (high, _) = trades[0], trades[-1]
    half = [cost for nbytes, cost in trades if nbytes <= high / 2]
    extra = f"{min(half) / once - 1:.2f}" if half else "more than any plan can pay"
    less = f"{style.times(high / low)} less costs {costly / once - 1:.1f}"
    return f"Half the activations cost {extra} more forward passes, {less}"
