"""What a layer of tensor parallelism waits for: its forward pass in time, by a cost model."""

from dataclasses import replace

from labutils import anatomy, collectives, units
from labutils.config import Link, ModelConfig
from labutils.tensor_parallel.transform import rank_config, styles
from labutils.timeline import Span, Timeline

_HALVES = {"attention": ".attention", "feed-forward": ".feed_forward"}


def _products(model: ModelConfig, n: int) -> dict[str, tuple[int, int, int]]:
    """FLOPs of one token on one of n ranks in the halves of a layer: of the products by column, of
    attention between them, of those by row."""
    layer = replace(model, num_layers=1)
    flops, style = anatomy.token_flops(rank_config(layer, n)), styles(layer)
    return {
        half: tuple(
            sum(f for name, f in flops.items() if word in name and style.get(name) == kind)
            for kind in ("column", None, "row")
        )
        for half, word in _HALVES.items()
    }


def layer_timeline(
    model: ModelConfig,
    n: int,
    link: Link,
    *,
    flops: float,
    micro_batch: int = 1,
    itemsize: int = 2,
    pieces: bool = False,
) -> Timeline:
    """The forward pass of one layer on n ranks, as each of them sees it: tokens are gathered,
    multiplied, and their sums scattered, twice.

    flops: what a rank computes in a second
    link: a gather and a scatter take what they cost on a ring of it
    pieces: asynchronous tensor parallelism: a product starts with its own tokens while others
        arrive, and sums leave as they come; else each waits for all of the other

    >>> model, link = ModelConfig.named("llama-2-7b"), Link(0, 100e9)
    >>> layer_timeline(model, 8, link, flops=500e12).hidden
    0.0
    >>> layer_timeline(model, 8, link, flops=500e12, pieces=True).hidden > 0
    True
    """
    tokens = units.whole(micro_batch, "micro_batch", 1) * model.seq_len
    nbytes, spans, now = tokens * model.d_model * itemsize, [], 0.0
    for half, counts in _products(model, n).items():
        column, between, row = (count * tokens / flops for count in counts)
        times = [
            collectives.cost(f"{op}_ring", nbytes, n, link)
            for op in ("all_gather", "reduce_scatter")
        ]
        computed = _product(half, now, times[0], column, n if pieces else 1)
        core = Span(0, "forward", half, computed[-1].end, computed[-1].end + between)
        summed = _sums(half, core.end, row, times[1], n if pieces else 1)
        spans += [*computed, *[core] * (between > 0), *summed]
        now = max(span.end for span in summed)
    return Timeline(tuple(spans))


def _product(half: str, now: float, gather: float, column: float, k: int) -> list[Span]:
    """Tokens arrive in k pieces, the first of several is the rank's own; each is multiplied."""
    steps, spans, free = max(k - 1, 1), [], now
    for i in range(steps):
        spans.append(
            Span(0, "exchange", "gather", now + gather * i / steps, now + gather * (i + 1) / steps)
        )
    arrivals = [*([now] if k > 1 else []), *(span.end for span in spans)]
    for there in arrivals:
        start, free = max(free, there), max(free, there) + column / k
        spans.append(Span(0, "forward", half, start, free))
    return spans


def _sums(half: str, now: float, row: float, scatter: float, k: int) -> list[Span]:
    """Products in k pieces; each leaves when it is there, of several all but the rank's own."""
    steps, spans, free = max(k - 1, 1), [], now
    for i in range(k):
        done = now + row * (i + 1) / k
        spans.append(Span(0, "forward", half, now + row * i / k, done))
        if i < steps:
            start, free = max(free, done), max(free, done) + scatter / steps
            spans.append(Span(0, "exchange", "scatter", start, free))
    return spans
