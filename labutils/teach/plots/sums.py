"""Sums as they grow, and where they stop growing."""

import math
from collections.abc import Mapping, Sequence

from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture


@style.drawn
def running_sums(
    exact: Sequence[float],
    *,
    guesses: Mapping[str, float] | None = None,
    title: str | None = None,
    **partial: Sequence[float],
) -> Picture:
    """Partial sums against the number of terms, a line for each way to add, the exact sum dotted; `guesses` are hollow diamonds at the right end."""
    if not partial:
        raise ValueError(
            "running_sums needs at least one row of partial sums: running_sums(exact, fp16=[…])"
        )
    for name, sums in partial.items():
        if len(sums) != len(exact) or not len(exact):
            raise ValueError(
                f"{name}: {len(exact)} exact sums need as many partial sums, and at least one, got {len(sums)}"
            )
    lines = {name.replace("_", " "): [float(v) for v in sums] for name, sums in partial.items()}
    colors = dict(zip(lines, style.SERIES * len(lines), strict=False))
    ends = {"exact": float(exact[-1]), **{name: sums[-1] for name, sums in lines.items()}}
    labels = {name: f"{name}: {end:,.6g}" for name, end in ends.items()}
    stalls = {
        name: sums[-1]
        for name, sums in lines.items()
        if len(sums) > 3 and len(set(sums[-len(sums) // 4 :])) == 1
    }
    finding = "A running sum stops growing: " + style.listed(
        [f"{name} at {end:,.6g}" for name, end in stalls.items()]
    )
    figure, axes = style.canvas(
        title or (finding if stalls else f"{style.listed(list(lines))} against the exact sum"),
        height=2.6,
        left=0.75,
        right=max(style.width_of(label, weight="bold") for label in labels.values()) + 0.3,
        top=0.1,
        xlabel="terms added",
        ylabel="sum so far",
    )
    width, height = style.inches(axes)
    terms = range(1, len(exact) + 1)
    axes.plot(terms, exact, color=style.FAINT, linestyle=":")
    for name, sums in lines.items():
        axes.plot(terms, sums, color=colors[name])
    for name, guess in (guesses or {}).items():
        if isinstance(guess, int | float) and math.isfinite(guess):
            axes.plot(
                len(exact),
                guess,
                **{**style.GUESS, "markeredgecolor": colors.get(name, style.INK)},
                clip_on=False,
            )
    top = max(max(exact), *(max(sums) for sums in lines.values()), *(guesses or {}).values())
    axes.set(xlim=(0, len(exact)), ylim=(min(0, *exact, *map(min, lines.values())), top * 1.03))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    low, high = axes.get_ylim()
    places = [(end - low) / (high - low) * height for end in ends.values()]
    for (name, label), y in zip(
        labels.items(), style.spread(places, [0.17] * len(places), 0, height), strict=True
    ):
        color = colors.get(name, style.FAINT)
        axes.text(
            1 + 0.15 / width,
            y / height,
            label,
            transform=axes.transAxes,
            va="center",
            color=color,
            weight="bold",
        )
    told = "; ".join(f"{label} after {len(exact):,} terms" for label in labels.values())
    return Picture(figure, f"Partial sums against the number of terms. {told}.")
