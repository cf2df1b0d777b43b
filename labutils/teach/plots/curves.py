"""Lines over a common x: losses, throughputs, errors, with bands over seeds."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from labutils import units
from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture


@style.drawn
def curves(
    x: Sequence[float] = (),
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    log: str = "",
    unit: str = "",
    measured: Mapping[str, Sequence[float] | tuple[Sequence[float], Sequence[float]]] | None = None,
    guess: tuple[float, float] | None = None,
    alt: str | None = None,
    width: float = style.WIDE,
    **lines: Sequence[float] | Sequence[Sequence[float]] | tuple[Sequence[float], Sequence[float]],
) -> Picture:
    """A labeled line for each series over `x`; a series of several runs becomes their mean in a band from lowest to highest.

    `lines` are formulas or whole histories; `measured` are filled markers, of the color of the line with the same name. A series that has places
    of its own is a pair (x, values), a tuple. `guess` is a point (x, y). `log` names the logarithmic axes: "x", "y" or "xy". `unit` writes the
    amounts on y as `units.text` does: "B", "s".
    """
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f"log names the logarithmic axes, 'x', 'y' or 'xy', got {log!r}")
    x = np.asarray(x, dtype=float)
    if x.ndim != 1:
        raise ValueError(f"x must be a sequence of numbers, got shape {x.shape}")
    runs = {_named(name): _series(name, values, x) for name, values in lines.items()}
    points = {_named(name): _series(name, values, x) for name, values in (measured or {}).items()}
    names = list(dict.fromkeys([*runs, *points]))
    if not names:
        raise ValueError("curves needs at least one series: curves(x, loss=[…], …)")
    for letter, which in (("x", 0), ("y", 1)):
        for name, series in (*runs.items(), *points.items()):
            if letter in log and (series[which] <= 0).any():
                raise ValueError(
                    f"{name}: a logarithmic axis needs numbers above 0, got {series[which].min():g} on {letter}"
                )
    colors = dict(zip(names, style.SERIES * len(names), strict=False))
    ends = {name: (at[-1], rows.mean(0)[-1]) for name, (at, rows) in (points | runs).items()}

    right = max(style.width_of(name, weight="bold") for name in names) + 0.3
    figure, axes = style.canvas(
        title, width=width, left=0.85, right=right, top=0.12, xlabel=xlabel, ylabel=ylabel
    )
    axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    for name, (at, rows) in runs.items():
        axes.plot(at, rows.mean(0), color=colors[name])
        if len(rows) > 1:
            axes.fill_between(
                at, rows.min(0), rows.max(0), color=colors[name], alpha=0.2, linewidth=0
            )
    for name, (at, rows) in points.items():
        for values in rows:
            axes.plot(
                at,
                values,
                "o",
                color=colors[name],
                markeredgecolor=style.INK,
                markeredgewidth=0.7,
                clip_on=False,
                zorder=3,
            )
    if guess is not None:
        axes.plot(*guess, clip_on=False, zorder=4, **style.GUESS)
    axes.margins(x=0.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    every = sorted({place for at, _ in (*runs.values(), *points.values()) for place in at.tolist()})
    if "x" in log and len(every) <= 12:  # the very values that were tried
        axes.xaxis.set(major_locator=FixedLocator(every), minor_locator=NullLocator())
    if unit:
        style.in_units(axes.yaxis, unit)
    style.name_ends(axes, ends, colors)
    if guess is not None:
        axes.annotate(
            "your guess", guess, (0, 8), textcoords="offset points", ha="center", va="bottom"
        )
    return Picture(
        figure, alt or f"{title}. {ylabel} against {xlabel}. {_told(runs, points, unit)}."
    )


def _named(name: str) -> str:
    return name.replace("_", " ")


def _series(
    name: str, values: Sequence | tuple[Sequence, Sequence], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The places of a series and its values, one row for each run."""
    at, values = (
        values
        if isinstance(values, tuple) and len(values) == 2 and np.ndim(values[0])
        else (x, values)
    )
    try:
        at, rows = np.asarray(at, dtype=float), np.atleast_2d(np.asarray(values, dtype=float))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}: a series is a sequence of numbers, or one such sequence for each run, all of one length"
        ) from None
    if at.ndim != 1 or not len(at) or rows.ndim != 2 or rows.shape[1] != len(at):
        raise ValueError(
            f"{name}: {at.size} places on x need as many values, at least one, got shape {np.shape(values)}"
        )
    return at, rows


def _told(runs: dict, points: dict, unit: str) -> str:
    def short(value: float) -> str:
        return units.text(value, unit) if unit else f"{value:.3g}"

    means = {name: (at, rows.mean(0)) for name, (at, rows) in runs.items()}
    said = [
        f"{name} goes from {short(y[0])} at {at[0]:,g} to {short(y[-1])} at {at[-1]:,g}"
        for name, (at, y) in means.items()
    ]
    said += [
        f"{name}, measured: " + ", ".join(short(value) for value in rows.mean(0)[:8])
        for name, (_, rows) in points.items()
    ]
    return "; ".join(said)
