"""Steps that a reader plays: rings fill, buckets leave, plans compute again, tiles move on, keys go
round."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from labutils import units
from labutils.teach.plots import style, svg
from labutils.teach.plots.picture import Animation
from labutils.teach.plots.timelines import most_values
from labutils.timeline import Timeline
from labutils.trace import Trace

# A ring of ranks.


def ring_animation(trace: Trace) -> Animation:
    """A ring collective: ranks on a circle, pieces moving on and filling up, a frame for each step.

    Each rank's tensor is a strip of pieces; a piece is as full as the number of ranks whose values
    it holds.
    """
    n, steps = len(trace.ranks), trace.steps
    adding = _adding(trace)
    # holds[rank][piece]: the ranks whose values are in that piece there. A trace says who sends to
    # whom; which piece it is, is the ring's rule.
    holds = [
        [{rank} if adding or piece == rank else set() for piece in range(n)] for rank in range(n)
    ]
    frames = [_circle(holds, {}, bool(adding))]
    labels = [f"Start. Every rank holds {f'its own {n} pieces' if adding else 'one piece'}."]
    sent = dict.fromkeys(range(n), 0)
    for step in range(steps):
        before, arrivals = [list(mine) for mine in holds], {}
        for message in trace.messages:
            if int(message.start) == step:
                source, to = message.source, message.to
                piece = (source - 1 - step if step < adding else source - (step - adding)) % n
                kept = before[to][piece] if step < adding else set()
                holds[to][piece] = before[source][piece] | kept
                arrivals[to] = piece
                sent[source] += message.nbytes
        frames.append(_circle(holds, arrivals, bool(adding)))
        adds = "adds its own values to" if step < adding else "keeps"
        labels.append(
            f"Step {step + 1} of {steps}. Each rank {adds} the piece that arrives; "
            f"sent so far: {units.text(max(sent.values()))} per rank."
        )
    return Animation(
        frames,
        labels,
        f"Animation of {trace.messages[0].op.replace('_', ' ')} on {n} ranks on a circle: in each "
        f"of {steps} steps every rank passes one piece to the next rank. "
        f"In the end the busiest rank has sent {units.text(max(sent.values()))}.",
    )


def _adding(trace: Trace) -> int:
    """The number of steps in which what arrives is added up; the steps after them pass it on."""
    n, steps = len(trace.ranks), trace.steps
    if not trace.messages:
        raise ValueError("this trace has no messages to draw: a ring needs two ranks or more")
    if n > 8:
        raise ValueError(f"a ring of {n} ranks does not fit on the page: animate up to 8")
    for message in trace.messages:
        if message.to != (message.source + 1) % n:
            raise ValueError(
                f"rank {message.source} sends to rank {message.to}, so this is no ring, where each "
                "rank sends to the next: draw it with plots.messages"
            )
    if steps not in (n - 1, 2 * (n - 1)):
        raise ValueError(
            f"a ring of {n} ranks takes {n - 1} steps, or {2 * (n - 1)} for an all-reduce; "
            f"this trace has {steps}"
        )
    if steps == 2 * (n - 1):
        return steps // 2
    return 0 if "gather" in trace.messages[0].op else steps


def _circle(holds: Sequence[Sequence[set]], arrivals: Mapping[int, int], layered: bool) -> str:
    """One frame: a strip of pieces for each rank; what has just arrived glides in."""
    n = len(holds)
    cell, tall = (34, 56) if n <= 4 else (20, 48)
    wide = n * cell
    radius_x, radius_y = (1.15 * wide + 60, 60 + 20 * n) if n > 2 else (0, 80)
    width, height = 2 * radius_x + wide + 40, 2 * radius_y + tall + 44
    orbit = max(radius_x, 40)
    middle_x, middle_y = width / 2, height / 2 - 3

    def place(turn: float, radius: float = radius_x) -> tuple[float, float]:
        angle = 2 * math.pi * turn / n - math.pi / 2
        return middle_x + radius * math.cos(angle), middle_y + radius_y * math.sin(angle)

    parts = [
        svg.element(
            "ellipse", cx=middle_x, cy=middle_y, rx=float(orbit), ry=float(radius_y), fill="none",
            stroke=style.NEUTRAL[0], stroke_width=2,
        )
    ]  # fmt: skip
    for rank in range(n):  # an arrowhead halfway to the next rank
        x, y = place(rank + 0.5, orbit)
        across, down = (x - middle_x) / orbit, (y - middle_y) / radius_y
        heading = math.degrees(math.atan2(radius_y * across, -orbit * down))
        turned = f"translate({x:.1f} {y:.1f}) rotate({heading:.0f})"
        parts.append(svg.path("M-6 -6L6 0L-6 6z", transform=turned, fill=style.NEUTRAL[1]))
    for rank, mine in enumerate(holds):
        x, y = place(rank)
        before_x, before_y = place(rank - 1)
        way = before_x - x, before_y - y
        parts += _strip(
            x - wide / 2, y - tall / 2, cell, tall, mine, layered, arrivals.get(rank), way
        )
        halo: style.Look = {"stroke": "#fff", "stroke_width": 5, "paint_order": "stroke"}
        parts.append(
            svg.words(
                x, y + tall / 2 + 16, f"rank {rank}",
                font_weight="bold", fill=style.SERIES[rank], **halo,
            )
        )  # fmt: skip
    counts = [
        f"rank {rank}: {' '.join(map(str, map(len, mine)))}" for rank, mine in enumerate(holds)
    ]
    return svg.frame(parts, width, height, f"Ranks summed in each piece. {'; '.join(counts)}")


def _strip(
    x: float,
    y: float,
    cell: float,
    tall: float,
    mine: Sequence[set],
    layered: bool,
    arrived: int | None,
    way: tuple[float, float],
) -> Iterator[str]:
    """The pieces of one rank, side by side; the one that has `arrived` comes along `way`."""
    yield svg.rect(x, y, len(mine) * cell, tall, "#fff", stroke="")
    for piece, owners in enumerate(mine):
        left, layer = x + piece * cell, tall / len(mine) if layered else tall
        layers = "".join(
            svg.rect(left, y + tall - (k + 1) * layer, cell, float(layer), style.SERIES[owner], "")
            for k, owner in enumerate(sorted(owners))
        )
        if piece == arrived:
            layers = svg.glide(layers, *way)
            layers += svg.path(f"M{left + cell / 2 - 6:.1f} {y - 10:.1f}h12l-6 8z", fill=style.INK)
        yield layers
        yield svg.element(
            "rect", x=left, y=y, width=cell, height=tall, fill="none", stroke=style.INK
        )


# Buckets of gradients.

_PITCH, _BUCKETS_GAP, _TOP, _FLOOR, _DEEP = 66, 14, 62, 190, 84  # pixels


def bucket_animation(buckets: Sequence[Mapping[str, int]], *, bucket_bytes: int) -> Animation:
    """Gradients drop into buckets from the last layer to the first, a frame each.

    A bucket that is complete leaves while others fill. A bucket is the bytes of its gradients by
    name, in the order in which they come.
    """
    arriving = [
        (k, name, size) for k, bucket in enumerate(buckets) for name, size in bucket.items()
    ]
    if not 1 <= len(arriving) <= 16:
        raise ValueError(f"{len(arriving)} gradients do not fit on the page: animate 1 to 16")
    totals = [sum(bucket.values()) for bucket in buckets]
    frames = [_buckets(totals, arriving, 0, bucket_bytes)]
    labels = [
        f"Start of the backward pass. {len(buckets)} buckets of up to {units.text(bucket_bytes)} "
        "are empty."
    ]
    for count, (k, name, _) in enumerate(arriving, 1):
        held = sum(size for at, _, size in arriving[:count] if at == k)
        frames.append(_buckets(totals, arriving, count, bucket_bytes))
        fills = f"Bucket {k} holds {units.text(held)} of {units.text(totals[k])}."
        labels.append(f"The gradient of {name} is ready. {fills}")
        if held == totals[k] and count < len(arriving):
            labels[-1] += " It is complete and leaves, while the backward pass goes on."
        elif held == totals[k]:
            labels[-1] += " It is complete and leaves as it is: no more gradients will come."
    told = [
        f"bucket {k}: {style.listed(list(bucket))}, {units.text(totals[k])}"
        for k, bucket in enumerate(buckets)
    ]
    return Animation(
        frames,
        labels,
        f"Animation of {len(arriving)} gradients that fill {len(buckets)} buckets from the last "
        f"layer to the first: {'; '.join(told)}.",
    )


def _buckets(
    totals: Sequence[int], arriving: Sequence[tuple[int, str, int]], count: int, bucket_bytes: int
) -> str:
    """One frame: parameters in a row, each over the bucket that its gradient falls into."""
    places: dict[str, float] = {}
    spans: dict[int, tuple[float, float]] = {}
    x: float = 12
    for k, name, _ in reversed(arriving):  # from the first layer, left, to the last
        x += _BUCKETS_GAP if spans and k not in spans else 0
        places[name] = x
        spans[k] = spans.get(k, (x, x))[0], x + _PITCH
        x += _PITCH
    width = x + 12
    ready = {name for _, name, _ in arriving[:count]}
    latest = arriving[count - 1] if count else (None, None, 0)
    parts = [
        svg.words(12, 20, "← backward pass", "start"),
        svg.words(width - 12, 20, "loss", "end"),
    ]
    for _, name, size in reversed(arriving):
        parts += _parameter(places[name], name, size, name in ready, name == latest[1])
    for k, (left, right) in spans.items():
        held = sum(size for at, _, size in arriving[:count] if at == k)
        full = max(bucket_bytes, totals[k])
        parts += _bucket(k, left, right, held / full, held == totals[k], k == latest[0])
    parts.append(svg.line(12, _FLOOR + 52, width - 12, _FLOOR + 52, 2))
    parts.append(svg.words(width - 12, _FLOOR + 67, "the network", "end", font_size=12))
    return svg.frame(parts, width, 262, f"ready: {' '.join(sorted(ready)) or 'none'}")


def _parameter(x: float, name: str, size: int, ready: bool, latest: bool) -> Iterator[str]:
    fill, edge = style.PASS_COLORS["backward"] if ready else style.PAPER, 3.2 if latest else 0.9
    fits = style.width_of(name, 12) * 96 * 0.75 < _PITCH - 8
    short, middle = name if fits else name.rsplit(".", 1)[0], x + _PITCH / 2
    yield svg.rect(x + 2, _TOP - 30, _PITCH - 4, 40, fill, stroke_width=edge)
    yield svg.words(middle, _TOP - 13, short, font_size=12)
    yield svg.words(middle, _TOP + 3, units.text(size), font_size=11)


def _bucket(
    k: int, left: float, right: float, share: float, gone: bool, latest: bool
) -> Iterator[str]:
    """Bucket `k`, filled to a `share` of its height, or as a bar on its way when it is `gone`."""
    middle, wide = (left + right) / 2, right - left - 4
    if gone:
        said = "all-reduce" if right - left > 90 else "reduce"
        bar = svg.rect(left + 2, _FLOOR + 12, wide, 30, style.AXIS_COLORS["dp"][0])
        bar += svg.words(middle, _FLOOR + 32, said, fill="#fff")
        yield svg.glide(bar, 0, -44) if latest else bar
    elif share:
        level, fill = float(_DEEP * share), style.COMPONENT_COLORS["gradients"]
        water = svg.rect(left + 2, _FLOOR - level, wide, level, fill, stroke="")
        yield svg.glide(water, 0, -70) if latest else water
    rim, ink, width = (
        _FLOOR - _DEEP - 6,
        style.NEUTRAL[1] if gone else style.INK,
        1 if gone else 2.2,
    )
    walls = f"M{left + 2} {rim}V{_FLOOR}H{right - 2}V{rim}"
    yield svg.path(walls, fill="none", stroke=ink, stroke_width=width)
    word = f"bucket {k}" if right - left > _PITCH else str(k)
    yield svg.words(middle, rim - 4, word, font_weight="bold")


# A plan for a chain of stages.

_NODE_PITCH, _NODE, _LEFT, _F_ROW, _B_ROW = 74, 34, 46, 48, 122  # pixels
_DOES = {
    "forward": "computes f{0}, keeps only its output",
    "record": "computes f{0} and records what b{0} will need",
    "backward": "computes b{0}",
}


def plan_animation(plan: Timeline) -> Animation:
    """The graph of a checkpointing plan, a frame for each computation.

    f nodes fill as values are kept and empty as they go, b nodes turn from right to left. An f node
    with a square inside has recorded its interior; a b node lights up while the gradient stands
    there. The clock of the plan counts computations; lanes are stages.
    """
    steps = sorted((span for span in plan.spans if span.kind in _DOES), key=lambda span: span.start)
    n = 1 + max(span.rank for span in steps)
    if n > 10:
        raise ValueError(
            f"{n} stages do not fit on the page: animate up to 10, or draw it with plots.plan_maps"
        )
    frames = [_graph(n, {0}, set(), n, None, "")]
    labels = ["Start. Only the input x0 is held."]
    evaluations, reached = 0, n
    for number, step in enumerate(steps, 1):
        evaluations += step.kind != "backward"
        reached = step.rank if step.kind == "backward" else reached
        values = {0, *_there(plan, "value", number)}
        interiors = set(_there(plan, "interior", number))
        frames.append(_graph(n, values, interiors, reached, step.rank, step.kind))
        held = f"{_count(values, 'value')} and {_count(interiors, 'interior')} held"
        labels.append(
            f"Step {number}: {_DOES[step.kind].format(step.rank)}. "
            f"{_count([()] * evaluations, 'forward evaluation')} so far; {held}."
        )
    return Animation(
        frames,
        labels,
        f"Animation of a plan on a chain of {n} stages: f nodes fill and empty, then b nodes "
        f"follow from right to left. It takes {evaluations} forward evaluations and holds at most "
        f"{most_values(plan)} values.",
    )


def _there(plan: Timeline, kind: str, clock: int) -> list[int]:
    """The lanes in which something of a kind is there at that time."""
    return [
        span.rank for span in plan.spans if span.kind == kind and span.start <= clock < span.end
    ]


def _count(things: Collection, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _graph(
    n: int, values: set[int], interiors: set[int], reached: int, active: int | None, does: str
) -> str:
    """One frame: f nodes over b nodes; the gradient has `reached` that value."""
    xs = [_LEFT + (i + 1) * _NODE_PITCH for i in range(n)]
    parts = [svg.line(_LEFT, _F_ROW, xs[-1], _F_ROW), svg.line(xs[0], _B_ROW, xs[-1], _B_ROW)]
    parts += [svg.line(x, _F_ROW, x, _B_ROW) for x in xs]
    parts += _node(_LEFT, _F_ROW, style.COMPONENT_COLORS["activations"], "x0")
    waiting = {reached: style.PASS_COLORS["backward"]}
    for i, x in enumerate(xs):
        back, now = does == "backward", active == i
        fill = style.PASS_COLORS["forward"] if i + 1 in values else style.PAPER
        parts += _node(x, _F_ROW, fill, f"f{i}", now and not back, i in interiors)
        fill = waiting.get(i, style.NEUTRAL[3] if reached < i else style.PAPER)
        parts += _node(x, _B_ROW, fill, f"b{i}", now and back)
    held, recorded = (
        " ".join(f"x{i}" for i in sorted(values)),
        " ".join(map(str, sorted(interiors))),
    )
    told = f"held: {held}; recorded: {recorded or 'none'}; gradient at x{reached}"
    return svg.frame(parts, _LEFT + (n + 1) * _NODE_PITCH, 168, told)


def _node(
    x: float, y: float, fill: str, name: str, active: bool = False, inner: bool = False
) -> Iterator[str]:
    edge = {"stroke": style.INK, "stroke_width": 3.2 if active else 0.9}
    yield svg.element("circle", cx=x, cy=y, r=_NODE / 2, fill=fill, **edge)
    if inner:
        yield svg.rect(x - 11, y - 11, 22, 22, "none", stroke_width=1.4)
    yield svg.words(x, y + 4.5, name, fill=style.on(fill))


# Tiles of attention scores.

_CELL, _STRIP, _GAP = 38, 22, 16  # pixels


def tile_walk(tiles: Sequence[tuple[slice, slice]], *, s_q: int, s_k: int) -> Animation:
    """The tiles of the s_q × s_k scores in the order in which they are computed, a frame each.

    One is in fast memory, and none is kept. Around the scores stand Q (left), K and V (top) and O
    (right); what the current tile needs is filled in.
    """
    block_q, block_k = (max(at.stop - at.start for at in side) for side in zip(*tiles, strict=True))
    down, across = -(-s_q // block_q), -(-s_k // block_k)
    if down * across > 144:
        raise ValueError(
            f"{down} × {across} tiles are too many to look at: animate at most 144, with larger "
            "blocks"
        )
    walk = [(rows.start // block_q, columns.start // block_k) for rows, columns in tiles]
    last = {row: now for now, (row, _) in enumerate(walk)}
    frames, labels = [], []
    for now, (rows, columns) in enumerate(tiles):
        finished = {row for row, end in last.items() if end <= now}
        frames.append(_grid(walk, now, finished, down, across))
        labels.append(
            f"Tile {now + 1} of {len(walk)}: queries {rows.start}–{rows.stop - 1} meet "
            f"keys {columns.start}–{columns.stop - 1}."
        )
        if last[walk[now][0]] == now:
            labels[-1] += " Their output is finished and written."
    by_rows = all(a[0] <= b[0] for a, b in itertools.pairwise(walk))
    order = (
        "For each block of queries all key blocks that it sees are visited in turn"
        if by_rows
        else "Tiles are visited in the order given"
    )
    alt = (
        f"Animation of the {s_q} by {s_k} scores cut into {down} by {across} tiles. {order}; "
        "only the current tile exists at any moment."
    )
    if skipped := down * across - len(walk):
        alt += (
            f" {skipped} of {down * across} tiles are never computed, because no query in them "
            "sees a key."
        )
    return Animation(frames, labels, alt)


def _grid(
    walk: Sequence[tuple[int, int]], now: int, finished: set[int], down: int, across: int
) -> str:
    """One frame: the scores, with Q, K, V and O around them."""
    left, top = _STRIP + _GAP + 26, 2 * _STRIP + _GAP + 10
    right, middle = left + across * _CELL + _GAP, top + down * _CELL / 2 + 5
    (row, column), done = walk[now], set(walk[:now])
    inputs, output = style.COMPONENT_COLORS["weights"], style.COMPONENT_COLORS["optimizer"]
    parts = []
    for i in range(down):
        y, begun = top + i * _CELL, "#A9C9C2" if i == row else "#fff"
        fill = inputs if i == row else "#fff"
        parts.append(_cell(left - _GAP - _STRIP, y, fill, width=_STRIP))
        parts.append(_cell(right, y, output if i in finished else begun, width=_STRIP))
        for j in range(across):
            x = left + j * _CELL
            if (i, j) == (row, column):
                parts.append(_cell(x, y, style.COMPONENT_COLORS["activations"]))
            elif (i, j) in walk:
                parts.append(_cell(x, y, "#F3D9CF" if (i, j) in done else "#fff"))
            else:
                cross = f"M{x} {y}l{_CELL} {_CELL}M{x + _CELL} {y}l-{_CELL} {_CELL}"
                parts.append(_cell(x, y, "#F1F2F3"))
                parts.append(svg.path(cross, stroke=style.NEUTRAL[0], stroke_width=0.7))
    for k, name in enumerate("KV"):
        y = top - _GAP - (2 - k) * _STRIP
        for j in range(across):
            fill = inputs if j == column else "#fff"
            parts.append(_cell(left + j * _CELL, y, fill, height=_STRIP))
        parts.append(svg.words(left - 12, y + 16, name))
    parts.append(svg.words(left - _GAP - _STRIP - 14, middle, "Q"))
    parts.append(svg.words(right + _STRIP + 14, middle, "O"))
    said = (
        f"tile {now + 1} of {len(walk)}, block row {row + 1} of {down}, "
        f"block column {column + 1} of {across}"
    )
    return svg.frame(parts, right + _STRIP + 30, top + down * _CELL + 8, said)


def _cell(x: float, y: float, fill: str, width: float = _CELL, height: float = _CELL) -> str:
    return svg.rect(x, y, width, height, fill, stroke_width=0.7)


# A ring of keys and values.


def key_ring(grid: Mapping[tuple[int, int], tuple[int, int]]) -> Animation:
    """Chunks of queries (down) that meet chunks of keys (across) while these go round: a frame for
    each step, with who has which keys, who computes what, and who has nothing to do.

    grid: of a chunk of queries and one of keys, the rank that computes them, and in which step
    """
    has = {query: rank for (query, key), (rank, _) in grid.items() if query == key}
    n = 1 + max(has.values())
    frames, labels = [], []
    for now in range(n):
        work = dict.fromkeys(range(n), 0.0)
        for (query, key), (rank, step) in grid.items():
            work[rank] += (1 - (query == key) / 2) * (step == now)
        frames.append(_keys(grid, has, n, now, work))
        idle = [str(rank) for rank, cells in work.items() if not cells]
        said = f"Keys are {now} rank{'s' * (now > 1)} further" if now else "Keys are at home"
        cells = ", ".join(f"{each:g}" for each in work.values())
        labels.append(f"Step {now}. {said}. Cells that ranks compute: {cells}.")
        labels[-1] += f" Masked, so skipped: all of rank {', '.join(idle)}." if idle else ""
    return Animation(
        frames,
        labels,
        f"Animation of {len(has)} chunks of queries that meet {len(has)} chunks of keys in {n} "
        f"steps on {n} ranks. Queries stay, keys go from rank to rank. {' '.join(labels)}",
    )


def _keys(
    grid: Mapping[tuple[int, int], tuple[int, int]],
    has: Mapping[int, int],
    n: int,
    now: int,
    work: Mapping[int, float],
) -> str:
    """One frame: cells of this step and of those before, queries left, keys above."""
    left, top, cell = 124, 44, 34
    parts = [svg.words(left - 8, 26, "keys are at rank", "end")]
    for chunk, rank in has.items():
        x, y, holder = left + chunk * cell, top + chunk * cell, (rank + now) % n
        parts.append(svg.rect(x, 8, cell, 26, style.SERIES[holder]))
        parts.append(svg.words(x + cell / 2, 26, str(holder), fill=style.PAPER))
        parts.append(svg.rect(left - 36, y, 26, cell, style.SERIES[rank]))
        parts.append(svg.words(left - 23, y + 22, str(rank), fill=style.PAPER))
        for key in has:
            x, (who, step) = left + key * cell, grid.get((chunk, key), (rank, -1))
            shade = style.SERIES[who] if step == now else "#DDDDDD" if 0 <= step < now else "#fff"
            parts.append(svg.rect(x, y, cell, cell, shade, stroke_width=0.7))
            if step < 0:
                cross = f"M{x} {y}l{cell} {cell}M{x + cell} {y}l-{cell} {cell}"
                parts.append(svg.path(cross, stroke=style.NEUTRAL[0], stroke_width=0.7))
    parts.append(svg.words(left - 44, top + len(has) * cell / 2 + 4, "queries", "end"))
    said = "; ".join(f"rank {rank} computes {cells:g} cells" for rank, cells in work.items())
    return svg.frame(parts, left + len(has) * cell + 8, top + len(has) * cell + 8, said)
