"""Training, seen from outside: what a batch size does to the gradient and to the loss."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from labutils.teach.plots import style
from labutils.teach.plots.picture import Picture


@style.drawn
def gradient_noise(
    measured: Mapping[int, Sequence[float]],
    *,
    noise: float,
    signal: float,
    title: str | None = None,
) -> Picture:
    """Squared distance of a batch's gradient from the full one, against the batch size: measured means with their spread, the law `noise`/B,
    and |gradient|² = `signal` as the level at which noise and gradient are equally long.
    """
    if not measured or any(not errors for errors in measured.values()):
        raise ValueError(
            "gradient_noise needs at least one measured batch size, and at least one repetition of each"
        )
    if not (math.isfinite(noise) and math.isfinite(signal) and noise > 0 and signal > 0):
        raise ValueError(
            f"noise and signal are squared lengths above 0, got noise={noise} and signal={signal}"
        )
    sizes = sorted(measured)
    means = [sum(measured[size]) / len(measured[size]) for size in sizes]
    even = noise / signal
    figure, axes = style.canvas(
        title
        or f"Twice the batch, half the noise; at about {even:.2g} sequences it is as long as the gradient",
        xlabel="batch size in sequences",
        ylabel="squared length",
        right=1.45,
    )
    axes.set(xscale="log", yscale="log", xlim=(sizes[0] / 1.4, sizes[-1] * 1.4))
    for size in sizes:
        axes.plot(
            [size] * len(measured[size]),
            measured[size],
            "_",
            color=style.NEUTRAL[0],
            markersize=7,
            zorder=1,
        )
    ends = [sizes[0] / 1.4, sizes[-1] * 1.4]
    axes.plot(ends, [noise / end for end in ends], color=style.SERIES[0])
    axes.plot(
        sizes,
        means,
        "o",
        color=style.SERIES[0],
        markeredgecolor=style.INK,
        markeredgewidth=0.7,
        zorder=3,
    )
    axes.axhline(signal, color=style.SERIES[1], linewidth=1.6)
    if ends[0] < even < ends[1]:
        axes.axvline(even, color=style.FAINT, linestyle=":", linewidth=1)
    for level, label, color in [
        (noise / ends[1], "noise: formula", style.SERIES[0]),
        (signal, "the gradient itself", style.SERIES[1]),
    ]:
        axes.annotate(
            label,
            (ends[1], level),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=color,
            annotation_clip=False,
        )
    axes.annotate(
        "measured",
        (sizes[0], means[0]),
        xytext=(8, 3),
        textcoords="offset points",
        color=style.SERIES[0],
    )
    axes.xaxis.set(
        major_locator=FixedLocator(sizes),
        minor_locator=NullLocator(),
        major_formatter=FuncFormatter(lambda value, _: f"{value:,.0f}"),
    )
    repeats = len(measured[sizes[0]])
    return Picture(
        figure,
        f"Squared distance between the gradient of a batch and the gradient of all sequences, for batches of {sizes[0]} to {sizes[-1]} sequences, "
        f"{repeats} batches of each size, on logarithmic axes. The means lie on a falling straight line, noise divided by batch size. It meets the squared "
        f"length of the gradient itself at a batch of about {even:.2g} sequences.",
    )
