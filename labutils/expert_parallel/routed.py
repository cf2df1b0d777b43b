"""What expert parallelism sends, and how long a layer takes, from how many tokens go where."""

from collections.abc import Sequence

from labutils import anatomy, units
from labutils.anatomy import INDEX
from labutils.clock import Played, Task, play
from labutils.config import Link, ModelConfig
from labutils.ledger import Ledger, Line

Counts = Sequence[Sequence[int]]


def balanced(model: ModelConfig, tokens: int) -> dict[type, int]:
    """What to assume in a dry run: that each expert gets equally many of a rank's T·k visits.

    >>> model = ModelConfig.named("mixtral-8x7b")
    >>> balanced(model, tokens=4096)
    {<class 'int'>: 1024}

    Raises ValueError where E does not divide T·k.
    """
    units.instance(model, ModelConfig, "balanced")
    visits = units.whole(tokens, "tokens", 1) * model.top_k
    if visits % model.num_experts:
        how = f"{visits} visits over num_experts={model.num_experts}"
        raise ValueError(f"no routing spreads {how} evenly: choose another number of tokens")
    return {int: visits // model.num_experts}


def routed_sent(
    model: ModelConfig, counts: Sequence[Counts], *, itemsize: int = 4, rank: int | None = None
) -> Ledger:
    """Bytes that each of n ranks sends of tokens and their gradients in the forward and backward
    pass of a micro-batch, when routing is known; where it is even, see `predict.sent`.

    Of a layer, tokens travel four times: to experts and back, and so do their gradients. Each time
    a rank keeps those for its own experts.

    counts: of each layer, of each of n ranks, the visits to each expert
    itemsize: bytes of an element of what travels
    rank: the only one that is asked for; all unless given

    >>> from dataclasses import replace
    >>> model = replace(ModelConfig.named("mixtral-8x7b"), num_layers=1)
    >>> one = routed_sent(model, [[[1024] * 8] * 8], itemsize=2, rank=0)
    >>> one.total - one.by("name")["counts"] == 4 * 7 * 1024 * model.d_model * 2
    True

    Raises ValueError where the number of ranks does not divide the experts.
    """
    itemsize = units.whole(itemsize, "itemsize", 1)
    tables = [_table(model, table) for table in counts]
    if len({len(table) for table in tables}) != 1:
        raise ValueError(f"counts are of as many ranks in each layer, got {counts!r:.60}")
    n = len(tables[0])
    E = anatomy.letters(model, ep=n)["E"]  # of a rank; or an error that says what does not fit
    lines = []
    for i in range(n) if rank is None else (rank,):
        others, mine = set(range(n)) - {i}, slice(i * E, (i + 1) * E)
        for table in tables:
            there = sum(table[i]) - sum(table[i][mine])
            back = sum(sum(table[j][mine]) for j in others)
            ways = [("dispatch forward", there), ("combine forward", back)]
            ways += [("dispatch backward", back), ("combine backward", there)]
            amounts = [(name, rows * model.d_model * itemsize) for name, rows in ways]
            for name, amount in (("counts", INDEX * E * (n - 1)), *amounts):
                lines.append(Line(name, amount, axis="ep", rank=i, count=n - 1))
    return Ledger(line for line in lines if line.count).merged()


def _table(model: ModelConfig, counts: Counts) -> list[list[int]]:
    """Of each rank its visits to each expert, after checking that they are."""
    units.instance(model, ModelConfig, "a routing")
    table = [[units.whole(visits, "visits of an expert") for visits in row] for row in counts]
    if {len(row) for row in table} != {E := model.num_experts}:
        raise ValueError(f"of each rank counts has the visits to {E} experts, got {counts!r:.60}")
    return table


def routed_timeline(
    model: ModelConfig,
    counts: Counts,
    *,
    flops: float,
    link: Link,
    itemsize: int = 2,
    chunks: int = 1,
) -> Played:
    """The experts of one layer in the forward pass of n ranks: dispatch, experts, combine.

    An all-to-all begins when the last rank is ready and takes as long as its busiest rank, by bytes
    sent or received; the next one waits for it. A shared expert computes first, and needs none.

    counts: of each rank, its visits to each expert, E of them
    flops: FLOPs that a rank computes per second
    link: between any two of the ranks
    itemsize: bytes of an element of what travels
    chunks: parts into which each rank cuts its tokens, so that one travels while another computes

    >>> from dataclasses import replace
    >>> model = replace(ModelConfig.named("mixtral-8x7b"), num_layers=1)
    >>> one = routed_timeline(model, [[1024] * 8] * 8, flops=989.4e12, link=Link(0, 450e9))
    >>> round(1e6 * one.makespan), round(1e6 * one.exposed)
    (3178, 261)
    """
    units.instance(link, Link, "routed_timeline")
    itemsize, chunks = units.wholes(1, itemsize=itemsize, chunks=chunks)
    flops = units.positive(flops, "flops")
    n, table = len(counts), _table(model, counts)
    E = anatomy.letters(model, ep=n)["E"]
    each = {name: f for name, f in anatomy.token_flops(model).items() if "experts" in name}
    a_visit = sum(each.values()) / (model.num_layers * model.top_k) / flops
    own = [sum(row[i * E : (i + 1) * E]) for i, row in enumerate(table)]
    came = [sum(sum(row[i * E : (i + 1) * E]) for row in table) for i in range(n)]
    moved = [max(sum(table[i]), came[i]) - own[i] for i in range(n)]
    trip = max(moved) * model.d_model * itemsize / chunks / link.bandwidth + (n - 1) * link.latency
    tasks: list[Task] = []

    def travel(name: str, needs: Sequence[Task]) -> list[Task]:
        kind = "route" * bool(trip)
        tasks.extend(Task(("link", i), trip, needs, kind, name, i) for i in range(n))
        return tasks[-n:]

    def compute(name: str, visits: Sequence[float], needs: Sequence[Task]) -> list[Task]:
        for i in range(n):
            tasks.append(Task(i, visits[i] * a_visit, needs[i : i + 1], "forward", name, i))
        return tasks[-n:]

    if model.shared_expert:
        compute("shared", [sum(row) / model.top_k for row in table], ())
    arrived = travel("dispatch 0", ())
    for chunk in range(chunks):
        part = "experts" if chunks == 1 else f"part {chunk + 1}"
        done = compute(part, [rows / chunks for rows in came], arrived)
        if chunk + 1 < chunks:
            arrived = travel(f"dispatch {chunk + 1}", ())
        travel(f"combine {chunk}", done)
    return play(tasks)
