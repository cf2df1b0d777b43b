"""What a layer of tensor parallelism waits for: its forward pass in time, by a cost model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from labutils import anatomy, collectives, units
from labutils.clock import Played, Task, play
from labutils.config import Link, ModelConfig
from labutils.tensor_parallel.transform import rank_config, require_dense, styles

_HALVES = {"attention": ".attention", "feed-forward": ".feed_forward"}


def _products(model: ModelConfig, n: int) -> dict[str, tuple[int, int, int]]:
    """FLOPs of one token on one of n ranks in the halves of a layer: of the products by column, of
    attention between them, of those by row."""
    layer = replace(model, num_layers=1)
    flops, style = anatomy.token_flops(rank_config(layer, n)), styles(layer)

    def of(word: str, kind: str | None) -> int:
        return sum(f for name, f in flops.items() if word in name and style.get(name) == kind)

    return {half: (of(w, "column"), of(w, None), of(w, "row")) for half, w in _HALVES.items()}


def layer_timeline(
    model: ModelConfig,
    n: int,
    link: Link,
    *,
    flops: float,
    micro_batch: int = 1,
    itemsize: int = 2,
    pieces: bool = False,
) -> Played:
    """The forward pass of one layer on n ranks, as each of them sees it: tokens are gathered,
    multiplied, and their sums scattered, twice.

    flops: what a rank computes in a second
    link: a gather and a scatter take what they cost on a ring of it
    pieces: asynchronous tensor parallelism: a product starts with its own tokens while others
        arrive, and sums leave as they come; else each waits for all of the other
    micro_batch: sequences; itemsize: bytes of a number in a message

    >>> model, link = ModelConfig.named("llama-2-7b"), Link(0, 100e9)
    >>> layer_timeline(model, 8, link, flops=500e12).hidden
    0.0
    >>> layer_timeline(model, 8, link, flops=500e12, pieces=True).hidden > 0
    True
    """
    require_dense(model)
    tokens = units.whole(micro_batch, "micro_batch", 1) * model.seq_len
    nbytes, tasks, now = tokens * model.d_model * itemsize, list[Task](), list[Task]()
    k, steps = (n, max(n - 1, 1)) if pieces else (1, 1)  # of several pieces one is the rank's own
    gather, scatter = (
        collectives.cost(f"{op}_ring", nbytes, n, link) / steps
        for op in ("all_gather", "reduce_scatter")
    )
    for half, counts in _products(model, n).items():
        column, between, row = (count * tokens / flops for count in counts)
        come = _each("exchange", "gather", [now] * steps, gather)
        there = [now] * (k > 1) + [[piece] for piece in come]
        by_column = _each("forward", half, there, column / k)
        core = _each("forward" * (between > 0), half, [by_column[-1:]], between)
        by_row = _each("forward", half, [core] * k, row / k)
        sums = _each("exchange", "scatter", [[piece] for piece in by_row[:steps]], scatter)
        tasks += [*come, *by_column, *core, *by_row, *sums]
        now = [by_row[-1], sums[-1]]
    return play(tasks)


def _each(kind: str, name: str, needs: Iterable[Sequence[Task]], seconds: float) -> list[Task]:
    """A task for each of these needs, on the link or on the rank."""
    lane = "link" if kind == "exchange" else "rank"
    return [Task(lane, seconds, each, kind, name) for each in needs]
