"""Attention tile by tile, what moves between slow and fast memory, and the roof above it."""

import itertools
import math
from collections.abc import Mapping, Sequence

from matplotlib.ticker import NullFormatter

from labutils import units
from labutils.ledger import Ledger
from labutils.teach.plots import style
from labutils.teach.plots.picture import Animation, Picture

MOVES = {"load": "#2F74D0", "store": "#FFB04D"}
_CELL, _STRIP, _GAP = 38, 22, 16  # pixels


def tile_walk(tiles: Sequence[tuple[slice, slice]], *, s_q: int, s_k: int) -> Animation:
    """The tiles of the s_q × s_k scores in the order in which they are computed, a frame each: one is in fast memory, and none is kept.

    Around the scores stand Q (left), K and V (top) and O (right); what the current tile needs is filled in.
    """
    if not tiles:
        raise ValueError("a walk needs at least one tile: pass the (rows, columns) slices in order")
    block_q, block_k = (max(at.stop - at.start for at in side) for side in zip(*tiles, strict=True))
    down, across = -(-s_q // block_q), -(-s_k // block_k)
    if down * across > 144:
        raise ValueError(
            f"{down} × {across} tiles are too many to look at: animate at most 144, with larger blocks"
        )
    walk = [(rows.start // block_q, columns.start // block_k) for rows, columns in tiles]
    by_rows = all(a[0] <= b[0] for a, b in itertools.pairwise(walk))
    frames, labels = [], []
    for now, (i, _) in enumerate(walk):
        done = set(walk[: now + 1])
        finished = {row for row, _ in done if not any(row == later for later, _ in walk[now + 1 :])}
        frames.append(_grid(walk, now, finished, down, across))
        rows, columns = tiles[now]
        what = f"queries {rows.start}–{rows.stop - 1} meet keys {columns.start}–{columns.stop - 1}"
        ends = (
            " Their output is finished and written."
            if i in finished and (now + 1 == len(walk) or walk[now + 1][0] != i)
            else ""
        )
        labels.append(f"Tile {now + 1} of {len(walk)}: {what}.{ends}")
    skipped = down * across - len(walk)
    never = (
        f" {skipped} of {down * across} tiles are never computed, because no query in them sees a key."
        if skipped
        else ""
    )
    order = (
        "For each block of queries all key blocks that it sees are visited in turn"
        if by_rows
        else "Tiles are visited in the order given"
    )
    alt = f"Animation of the {s_q} by {s_k} scores cut into {down} by {across} tiles. {order}; only the current tile exists at any moment.{never}"
    return Animation(frames, labels, alt)


def _grid(
    walk: Sequence[tuple[int, int]], now: int, finished: set[int], down: int, across: int
) -> str:
    left, top = _STRIP + _GAP + 26, 2 * _STRIP + _GAP + 10
    width, height = left + across * _CELL + _GAP + _STRIP + 30, top + down * _CELL + 8
    current, done, all_tiles = walk[now], set(walk[:now]), set(walk)
    input_color, score_color, out_color = (
        style.COMPONENTS["weights"],
        style.COMPONENTS["activations"],
        style.COMPONENTS["optimizer"],
    )

    def box(x: float, y: float, w: float, h: float, fill: str, extra: str = "") -> str:
        return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{style.INK}" stroke-width=".7" {extra}/>'

    def text(x: float, y: float, what: str, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{style.INK}">{what}</text>'

    parts = []
    for i in range(down):
        y = top + i * _CELL
        parts.append(
            box(left - _GAP - _STRIP, y, _STRIP, _CELL, input_color if i == current[0] else "#fff")
        )
        filled = out_color if i in finished else "#A9C9C2" if i == current[0] else "#fff"
        parts.append(box(left + across * _CELL + _GAP, y, _STRIP, _CELL, filled))
        for j in range(across):
            x = left + j * _CELL
            if (i, j) == current:
                parts.append(box(x, y, _CELL, _CELL, score_color))
            elif (i, j) in all_tiles:
                parts.append(box(x, y, _CELL, _CELL, "#F3D9CF" if (i, j) in done else "#fff"))
            else:
                cross = f'<path d="M{x} {y}l{_CELL} {_CELL}M{x + _CELL} {y}l-{_CELL} {_CELL}" stroke="{style.NEUTRAL[0]}" stroke-width=".7"/>'
                parts.append(box(x, y, _CELL, _CELL, "#F1F2F3") + cross)
    for j in range(across):
        for row in range(2):
            y = top - _GAP - (2 - row) * _STRIP
            parts.append(
                box(left + j * _CELL, y, _CELL, _STRIP, input_color if j == current[1] else "#fff")
            )
    middle = top + down * _CELL / 2 + 5
    parts += [
        text(left - _GAP - _STRIP - 14, middle, "Q"),
        text(left + across * _CELL + _GAP + _STRIP + 14, middle, "O"),
    ]
    parts += [
        text(left - 12, top - _GAP - (2 - row) * _STRIP + 16, name) for row, name in enumerate("KV")
    ]
    said = f"tile {now + 1} of {len(walk)}, block row {current[0] + 1} of {down}, block column {current[1] + 1} of {across}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{said}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


@style.drawn
def traffic_bars(
    *, guess: float | None = None, title: str | None = None, **ledgers: Ledger
) -> Picture:
    """Bytes moved by several ways to do the same, a bar each, split into loads and stores; `guess` (bytes) is a hollow diamond below."""
    if not ledgers:
        raise ValueError("traffic_bars needs at least one ledger: traffic_bars(plain=…, tiled=…)")
    moved = {name.replace("_", " "): ledger.by("component") for name, ledger in ledgers.items()}
    for name, sides in moved.items():
        if unknown := sorted(set(sides) - set(MOVES)):
            raise ValueError(
                f"{name}: bytes moved are either 'load' or 'store', got {style.listed(list(map(repr, unknown)))}"
            )
    totals = {name: sum(sides.values()) for name, sides in moved.items()}
    guessed = isinstance(guess, int | float) and math.isfinite(guess)
    rows = [*moved, "your guess"] if guessed else list(moved)
    largest = max([*totals.values(), guess if guessed else 0, 1])
    factor, unit = style.scale(largest, "B")
    most, least = max(totals, key=totals.get), min(totals, key=totals.get)
    ratio = totals[most] / max(totals[least], 1)
    figure, axes = style.canvas(
        title or (f"{most} moves {style.times(ratio)} the bytes of {least}" if ratio > 1 else "All move the same bytes"),
        height=0.42 * len(rows) + 0.1, left=max(map(style.width_of, rows)) + 0.25, right=0.8, top=0.3,
        xlabel=f"moved between slow and fast memory ({unit})",
    )  # fmt: skip
    for row, (name, sides) in enumerate(moved.items()):
        start = 0.0
        for side, color in MOVES.items():
            amount = sides.get(side, 0) / factor
            axes.barh(row, amount, 0.62, left=start, color=color, **style.EDGE)
            start += amount
        axes.annotate(
            units.text(totals[name]),
            (start, row),
            (5, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
    if guessed:
        axes.plot(guess / factor, len(moved), clip_on=False, zorder=4, **style.GUESS)
        axes.annotate(
            units.text(guess),
            (guess / factor, len(moved)),
            (9, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set(xlim=(0, largest / factor * 1.02), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    style.key(axes, [(f"{side}s", color, "") for side, color in MOVES.items()], above=0.1)
    told = "; ".join(f"{name}: {units.text(totals[name])}" for name in moved)
    aside = f" Your guess: {units.text(guess)}." if guessed else ""
    return Picture(figure, f"Bars of bytes moved between slow and fast memory. {told}.{aside}")


@style.drawn
def roofline(
    roofs: Mapping[str, tuple[float, float]],
    points: Mapping[str, tuple[float, float]],
    *,
    title: str | None = None,
) -> Picture:
    """What a device can do against FLOPs per byte: a roof for each device as (FLOP/s, bytes/s), and work as (FLOPs, bytes) at its place under them.

    The points hang on the first roof: that is the most it allows.
    """
    if not roofs or not points:
        raise ValueError(
            "roofline needs at least one roof (FLOP/s, bytes/s) and one point (FLOPs, bytes)"
        )
    for name, pair in {**roofs, **points}.items():
        if min(pair) <= 0 or not all(map(math.isfinite, pair)):
            raise ValueError(
                f"{name}: logarithmic axes need two finite numbers above 0, got {pair}"
            )
    first, (flops, bandwidth) = next(iter(roofs.items()))
    ridge = flops / bandwidth
    intensity = {name: work / nbytes for name, (work, nbytes) in points.items()}
    low = min(*intensity.values(), *(peak / bw for peak, bw in roofs.values())) / 4
    high = max(*intensity.values(), *(peak / bw for peak, bw in roofs.values())) * 4
    below = [name for name, x in intensity.items() if x < ridge]
    finding = (
        f"On {first}, {style.listed(below)} {'wait' if len(below) > 1 else 'waits'} for memory"
        if below
        else f"On {first}, nothing here waits for memory"
    )
    right = max(style.width_of(name, weight="bold") for name in roofs) + 0.3
    figure, axes = style.canvas(
        title or finding,
        height=2.7,
        left=0.95,
        right=right,
        top=0.12,
        xlabel="FLOPs per byte of slow memory",
        ylabel="can be had",
    )
    colors = dict(zip(roofs, style.SERIES * len(roofs), strict=False))
    for name, (peak, bw) in roofs.items():
        axes.plot([low, peak / bw, high], [low * bw, peak, peak], color=colors[name])
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    style.in_units(axes.yaxis, "FLOP/s")
    axes.set_ylim(axes.get_ylim()[0] / 3, axes.get_ylim()[1] * 1.6)
    width, height = style.inches(axes)
    bottom, top = axes.get_ylim()
    free_x, free_y = (
        math.inf,
        math.inf,
    )  # labels hang to the lower right of their points, from right to left; one that would reach the last goes under it
    for name, x in sorted(intensity.items(), key=lambda item: -item[1]):
        y = min(flops, x * bandwidth)
        axes.plot([x, x], [bottom, y], color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
        axes.plot(
            x, y, "o", color=colors[first], markeredgecolor=style.INK, markeredgewidth=0.7, zorder=3
        )
        at_x = math.log(x / low) / math.log(high / low) * width + 0.07
        at_y = math.log(y / bottom) / math.log(top / bottom) * height - 0.13
        at_y = min(at_y, free_y - 0.16) if at_x + style.width_of(name) > free_x else at_y
        axes.text(
            at_x / width,
            at_y / height,
            name,
            transform=axes.transAxes,
            va="center",
            bbox=dict(facecolor="white", edgecolor="none", pad=0.8),
        )
        free_x, free_y = at_x, at_y
    style.name_ends(axes, {name: (high, peak) for name, (peak, _) in roofs.items()}, colors)
    told = "; ".join(
        f"{name}: {x:.3g} FLOPs per byte, at most {units.text(min(flops, x * bandwidth), 'FLOP/s')}"
        for name, x in intensity.items()
    )
    said = "; ".join(
        f"{name} up to {units.text(peak, 'FLOP/s')} and {units.text(bw, 'B/s')}, ridge at {peak / bw:.3g}"
        for name, (peak, bw) in roofs.items()
    )
    return Picture(figure, f"Roofline, both axes logarithmic. {said}. On {first}: {told}.")
