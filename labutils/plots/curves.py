"""Lines over a common x: losses, throughputs, errors, with bands over seeds."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from labutils.plots import style
from labutils.plots.picture import Picture


@style.drawn
def curves(
    x: Sequence[float],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    log: str = "",
    measured: Mapping[str, Sequence[float] | tuple[Sequence[float], Sequence[float]]] | None = None,
    guess: tuple[float, float] | None = None,
    alt: str | None = None,
    width: float = style.WIDE,
    **lines: Sequence[float] | Sequence[Sequence[float]],
) -> Picture:
    """A labeled line for each series over `x`; a series of several runs becomes their mean in a band from lowest to highest.

    `lines` are formulas or whole histories; `measured` (values over `x`, or a pair (x, values)) are filled markers, of the color of the line with the
    same name; `guess` is a point (x, y). `log` names the logarithmic axes: "x", "y" or "xy".
    """
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f"log names the logarithmic axes, 'x', 'y' or 'xy', got {log!r}")
    x = np.asarray(x, dtype=float)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"x must be a sequence of at least one number, got shape {x.shape}")
    runs = {_named(name): _rows(name, values, x) for name, values in lines.items()}
    points = {_named(name): _points(name, values, x) for name, values in (measured or {}).items()}
    names = list(dict.fromkeys([*runs, *points]))
    if not names:
        raise ValueError("curves needs at least one series: curves(x, loss=[…], …)")
    colors = dict(zip(names, style.SERIES * len(names), strict=False))
    ends = {name: (x[-1], runs[name].mean(0)[-1]) if name in runs else (points[name][0][-1], points[name][1][-1]) for name in names}

    right = max(style.width_of(name, weight="bold") for name in names) + 0.3
    figure, axes = style.canvas(title, width=width, left=0.8, right=right, top=0.12, xlabel=xlabel, ylabel=ylabel)
    axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    for name, rows in runs.items():
        axes.plot(x, rows.mean(0), color=colors[name])
        if len(rows) > 1:
            axes.fill_between(x, rows.min(0), rows.max(0), color=colors[name], alpha=0.2, linewidth=0)
    for name, (at, values) in points.items():
        axes.plot(at, values, "o", color=colors[name], markeredgecolor=style.INK, markeredgewidth=0.7, clip_on=False, zorder=3)
    if guess is not None:
        axes.plot(*guess, clip_on=False, zorder=4, **style.GUESS)
    axes.margins(x=0.02)
    if "x" in log and len(x) <= 12:  # the very values that were tried
        axes.xaxis.set(major_locator=FixedLocator(x), minor_locator=NullLocator(), major_formatter=FuncFormatter(lambda value, _: f"{value:,g}"))
    style.name_ends(axes, ends, colors)
    if guess is not None:
        axes.annotate("your guess", guess, (0, 8), textcoords="offset points", ha="center", va="bottom")
    return Picture(figure, alt or f"{title}. {ylabel} against {xlabel}. {_told(x, runs, points)}.")


def _named(name: str) -> str:
    return name.replace("_", " ")


def _rows(name: str, values: Sequence, x: np.ndarray) -> np.ndarray:
    """One row for each run."""
    try:
        rows = np.atleast_2d(np.asarray(values, dtype=float))
    except (TypeError, ValueError):
        raise ValueError(f"{name}: a series is a sequence of numbers, or one such sequence for each run, all of one length") from None
    if rows.ndim != 2 or rows.shape[1] != len(x):
        raise ValueError(f"{name}: {len(x)} places on x need as many values, got shape {np.shape(values)}")
    return rows


def _points(name: str, values: Sequence, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at, values = values if isinstance(values, tuple) else (x, values)
    at, values = np.asarray(at, dtype=float), np.asarray(values, dtype=float)
    if at.shape != values.shape or at.ndim != 1 or not len(at):
        raise ValueError(f"{name}: measured values need one place on x each, got {at.shape} places and {values.shape} values")
    return at, values


def _told(x: np.ndarray, runs: dict, points: dict) -> str:
    said = [f"{name} goes from {_short(rows.mean(0)[0])} at {_short(x[0])} to {_short(rows.mean(0)[-1])} at {_short(x[-1])}" for name, rows in runs.items()]
    said += [f"{name}, measured: " + ", ".join(_short(value) for value in values[:8]) for name, (_, values) in points.items()]
    return "; ".join(said)


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)
