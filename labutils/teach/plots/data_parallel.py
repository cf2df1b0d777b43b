"""A data-parallel step: what every rank does when, which communication is left in the open, and how buckets fill."""

import html
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from labutils import units
from labutils.teach.plots import style
from labutils.teach.plots.picture import Animation, Picture
from labutils.timeline import Timeline

COLORS = {
    "forward": style.PASSES["forward"],
    "backward": style.PASSES["backward"],
    "reduce": style.AXES["dp"][0],
}
_LANE, _ROW = 0.17, 0.44  # inches: a lane (compute above, communication below), and a rank


@style.drawn
def overlap(*, title: str | None = None, **timelines: Timeline) -> Picture:
    """Steps on one clock, a group of rows each: for every rank a lane of computation and a lane of communication under it.

    What is still sent after the last computation on any rank is *exposed*: only that makes the step longer.
    """
    if not timelines:
        raise ValueError("overlap needs at least one timeline: overlap(overlapped=timeline)")
    for name, timeline in timelines.items():
        if not timeline.spans:
            raise ValueError(f"{name}: this timeline has no spans: nothing was recorded")
        if unknown := sorted({span.kind for span in timeline.spans} - set(COLORS)):
            raise ValueError(
                f"{name}: spans of kind {style.listed(unknown)} have no lane; kinds are {style.listed(list(COLORS))}"
            )
    timelines = {name.replace("_", " "): timeline for name, timeline in timelines.items()}
    ends = {name: max(span.end for span in timeline.spans) for name, timeline in timelines.items()}
    open_ = {name: timeline.exposed for name, timeline in timelines.items()}
    factor, unit = style.scale(max(ends.values()), "s")
    ranks = {
        name: sorted({span.rank for span in timeline.spans}) for name, timeline in timelines.items()
    }
    gap = 0.34  # inches between groups, for the name of the next one
    height = sum(gap + _ROW * len(rows) for rows in ranks.values())
    left = style.width_of("rank 00") + 0.2
    right = (
        max(style.width_of(_step(ends[name], open_[name])[i]) for name in timelines for i in (0, 1))
        + 0.2
    )
    figure, axes = style.canvas(
        title or _overlap_finding(ends, open_),
        height=height,
        left=left,
        right=right,
        top=0.3,
        xlabel=f"time ({unit})",
    )
    width, _ = style.inches(axes)
    axes.set(xlim=(0, max(ends.values()) / factor), ylim=(height, 0))
    shown = [
        kind
        for kind in COLORS
        if any(span.kind == kind for timeline in timelines.values() for span in timeline.spans)
    ]
    style.key(axes, [(_KINDS[kind], COLORS[kind], _hatch(kind)) for kind in shown])
    y, ticks, labels = 0.0, [], []
    for name, timeline in timelines.items():
        axes.text(0, y + gap - 0.1, name, weight="bold", va="bottom")
        y += gap
        top = y
        for rank in ranks[name]:
            ticks.append(y + _LANE)
            labels.append(f"rank {rank}")
            for kind in shown:
                lane = y + _LANE * (kind == "reduce") + 0.02
                mine = [span for span in timeline.spans if (span.rank, span.kind) == (rank, kind)]
                bars = [(span.start / factor, (span.end - span.start) / factor) for span in mine]
                axes.broken_barh(
                    bars,
                    (lane, _LANE),
                    facecolor=COLORS[kind],
                    hatch=_hatch(kind) * 2,
                    edgecolor=style.INK,
                    linewidth=0.5,
                )
                for span, (start, length) in zip(mine, bars, strict=True):
                    if text := _label(span, length / axes.get_xlim()[1] * width):
                        axes.text(
                            start + length / 2,
                            lane + _LANE / 2,
                            text,
                            size=7,
                            ha="center",
                            va="center_baseline",
                            color=style.on(COLORS[kind]),
                        )
            y += _ROW
        begin, end = (ends[name] - open_[name]) / factor, ends[name] / factor
        if open_[name] > 0:
            axes.axvspan(
                begin,
                end,
                1 - (y - 0.06) / height,
                1 - (top - 0.02) / height,
                facecolor=style.NEUTRAL[3],
                zorder=0,
            )
        for line, (text, weight) in enumerate(
            zip(_step(ends[name], open_[name]), ("bold", "normal"), strict=True)
        ):
            axes.text(
                1 + 0.1 / width,
                (top + y) / 2 - 0.12 + 0.18 * line,
                text,
                weight=weight,
                va="center",
                transform=axes.get_yaxis_transform(),
            )
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    told = "; ".join(f"{name}: {' '.join(_step(ends[name], open_[name]))}" for name in timelines)
    return Picture(
        figure,
        f"Time lines of {style.listed(list(timelines))}, computation and communication in a lane each for every rank. {told}.",
    )


_KINDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "reduce": "all-reduce of a bucket",
}


def _label(span: Any, room: float) -> str:
    """What is written into a span that is `room` inches long: its name, or the last word of it, or nothing; hatched spans are not written on."""
    if span.kind == "reduce" or room < 0.1:
        return ""
    return next(
        (
            text
            for text in (span.name, span.name.rsplit(" ")[-1])
            if style.width_of(text, 7) < room - 0.04
        ),
        "",
    )


def _hatch(kind: str) -> str:
    return style.AXES["dp"][1] if kind == "reduce" else ""


def _step(end: float, open_: float) -> tuple[str, str]:
    return (
        f"{units.text(end, 's')} a step",
        f"{units.text(open_, 's')} exposed" if open_ else "nothing exposed",
    )


def _overlap_finding(ends: Mapping[str, float], open_: Mapping[str, float]) -> str:
    if len(ends) == 1:
        ((name, end),) = ends.items()
        return f"{open_[name] / end:.0%} of the step is communication that nothing hides"
    slow, fast = max(ends, key=ends.get), min(ends, key=ends.get)
    return (
        f"A step takes {units.text(ends[fast], 's')} instead of {units.text(ends[slow], 's')}: "
        f"{units.text(open_[fast], 's')} of communication stay in the open, not {units.text(open_[slow], 's')}"
    )


class Bucket(Protocol):
    """What is reduced together: `names` of parameters in the order in which their gradients come, and the bytes of each in `sizes`."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


def bucket_animation(buckets: Sequence[Bucket], *, bucket_bytes: int) -> Animation:
    """Gradients drop into buckets from the last layer to the first, a frame each; a bucket that is complete leaves while others fill."""
    if not buckets:
        raise ValueError(
            "bucket_animation needs at least one bucket, such as those of data_parallel.replicate(…).buckets"
        )
    arriving = [
        (k, name, size)
        for k, bucket in enumerate(buckets)
        for name, size in zip(bucket.names, bucket.sizes, strict=True)
    ]
    if len(arriving) > 16:
        raise ValueError(f"{len(arriving)} parameters do not fit on the page: animate up to 16")
    totals = [sum(bucket.sizes) for bucket in buckets]
    frames = [_buckets(totals, arriving, 0, bucket_bytes)]
    labels = [
        f"Start of the backward pass. {len(buckets)} buckets of up to {units.text(bucket_bytes)} are empty."
    ]
    for count, (k, name, _) in enumerate(arriving, 1):
        held = sum(size for at, _, size in arriving[:count] if at == k)
        done = held == totals[k]
        what = "It is complete and leaves" + (
            ", while the backward pass goes on."
            if count < len(arriving)
            else " as it is: no more gradients will come."
        )
        frames.append(_buckets(totals, arriving, count, bucket_bytes))
        labels.append(
            f"The gradient of {name} is ready. Bucket {k} holds {units.text(held)} of {units.text(totals[k])}. {what if done else ''}"
        )
    return Animation(
        frames,
        labels,
        f"Animation of {len(arriving)} gradients that fill {len(buckets)} buckets from the last layer to the first: "
        + "; ".join(
            f"bucket {k}: {style.listed(list(bucket.names))}, {units.text(total)}"
            for k, (bucket, total) in enumerate(zip(buckets, totals, strict=True))
        )
        + ".",
    )


def _buckets(
    totals: Sequence[int], arriving: Sequence[tuple[int, str, int]], count: int, bucket_bytes: int
) -> str:
    """One frame as SVG: parameters in a row, each over the bucket that its gradient falls into."""
    pitch, gap, deep = 66, 14, 84
    order = list(reversed(arriving))  # from the first layer, left, to the last
    places, x = {}, 12
    spans: dict[int, list[float]] = {}
    for k, name, _ in order:
        if spans and k not in spans:
            x += gap
        places[name] = x
        spans.setdefault(k, [x, x])[1] = x + pitch
        x += pitch
    width, height = x + 12, 262
    top, floor = 62, 190
    ready = {name for _, name, _ in arriving[:count]}
    parts = [
        f'<text x="12" y="20">← backward pass</text><text x="{width - 12}" y="20" text-anchor="end">loss</text>'
    ]
    for _, name, size in order:
        box, is_ready = places[name], name in ready
        fill = COLORS["backward"] if is_ready else style.PAPER
        edge = 3.2 if count and arriving[count - 1][1] == name else 0.9
        short = name if style.width_of(name, 12) * 96 * 0.75 < pitch - 8 else name.rsplit(".", 1)[0]
        parts.append(
            f'<rect x="{box + 2}" y="{top - 30}" width="{pitch - 4}" height="40" fill="{fill}" stroke="{style.INK}" stroke-width="{edge}"/>'
        )
        parts.append(
            f'<text x="{box + pitch / 2}" y="{top - 13}" text-anchor="middle" font-size="12">{html.escape(short)}</text>'
        )
        parts.append(
            f'<text x="{box + pitch / 2}" y="{top + 3}" text-anchor="middle" font-size="11">{units.text(size)}</text>'
        )
    for k, (left, right) in spans.items():
        held = sum(size for at, _, size in arriving[:count] if at == k)
        gone, wide = held == totals[k] and held > 0, right - left - 4
        level = deep * held / max(bucket_bytes, totals[k])
        if held and not gone:
            glide = (
                ' class="lu-glide" style="--x:0px;--y:-70px"' if arriving[count - 1][0] == k else ""
            )
            parts.append(
                f'<g{glide}><rect x="{left + 2}" y="{floor - level:.1f}" width="{wide}" height="{level:.1f}" fill="{style.COMPONENTS["gradients"]}"/></g>'
            )
        if gone:
            glide = (
                ' class="lu-glide" style="--x:0px;--y:-44px"' if arriving[count - 1][0] == k else ""
            )
            parts.append(
                f'<g{glide}><rect x="{left + 2}" y="{floor + 12}" width="{wide}" height="30" fill="{COLORS["reduce"]}" stroke="{style.INK}"/>'
            )
            said = "all-reduce" if right - left > 90 else "reduce"
            parts.append(
                f'<text x="{(left + right) / 2}" y="{floor + 32}" text-anchor="middle" fill="#fff">{said}</text></g>'
            )
        word = f"bucket {k}" if right - left > pitch else str(k)
        walls = f"M{left + 2} {floor - deep - 6}V{floor}H{right - 2}V{floor - deep - 6}"
        parts.append(
            f'<path d="{walls}" fill="none" stroke="{style.NEUTRAL[1] if gone else style.INK}" stroke-width="{1 if gone else 2.2}"/>'
        )
        parts.append(
            f'<text x="{(left + right) / 2}" y="{floor - deep - 10}" text-anchor="middle" font-weight="bold">{word}</text>'
        )
    parts.append(
        f'<line x1="12" y1="{floor + 52}" x2="{width - 12}" y2="{floor + 52}" stroke="{style.NEUTRAL[0]}" stroke-width="2"/>'
    )
    parts.append(
        f'<text x="{width - 12}" y="{floor + 67}" text-anchor="end" font-size="12">the network</text>'
    )
    told = f"ready: {' '.join(sorted(ready)) or 'none'}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(told)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )
