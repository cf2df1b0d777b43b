"""What expert parallelism sends and holds, from the sizes and from how many tokens go where."""

import math
from collections.abc import Sequence
from dataclasses import replace

from labutils import anatomy, collectives, units
from labutils.clock import Played, Task, play
from labutils.config import MOMENTS, Link, Mesh, ModelConfig
from labutils.ledger import Ledger, Line

INDEX = 8  # bytes of an int64
Counts = Sequence[Sequence[int]]


def balanced(model: ModelConfig, tokens: int) -> dict[type, int]:
    """What to assume in a dry run: that each expert gets equally many of a rank's T·k visits.

    >>> model = ModelConfig.named("mixtral-8x7b")
    >>> balanced(model, tokens=4096)
    {<class 'int'>: 1024}

    Raises ValueError where E does not divide T·k.
    """
    visits = units.whole(tokens, "tokens", 1) * model.top_k
    if visits % model.num_experts:
        how = f"{visits} visits over num_experts={model.num_experts}"
        raise ValueError(f"no routing spreads {how} evenly: choose another number of tokens")
    return {int: visits // model.num_experts}


def sent(
    model: ModelConfig,
    n: int,
    *,
    micro_batch: int,
    counts: Sequence[Counts] | None = None,
    itemsize: int = 4,
    rank: int | None = None,
) -> Ledger:
    """Bytes that each of n ranks sends in the forward and backward pass of its micro-batch.

    Of a layer, tokens travel four times: to experts and back, and so do their gradients. Each time
    a rank keeps those for its own experts. With balanced routing that is (N_e − 1)/N_e · k·b·s·h
    numbers, of which the k·b·s is what routing decides.

    counts: of each layer, of each rank, the visits to each expert; balanced unless given
    itemsize: bytes of an element of what travels
    rank: the only one that is asked for; all unless given

    >>> model = replace(ModelConfig.named("mixtral-8x7b"), num_layers=1, seq_len=4096)
    >>> one = sent(model, 8, micro_batch=1, itemsize=2, rank=0)
    >>> one.total - one.by("name")["counts"] == 4 * 7 * 2 * 4096 // 8 * model.d_model * 2
    True
    """
    units.whole(itemsize, "itemsize", 1)
    E = anatomy.letters(model, ep=units.whole(n, "n", 1))[
        "E"
    ]  # of a rank; or an error that says what does not fit
    if counts is None:
        (each,) = balanced(model, micro_batch * model.seq_len).values()
        row = [each] * model.num_experts
        counts = [[row] * n] * model.num_layers
    lines = []
    for i in range(n) if rank is None else (rank,):
        others, mine = set(range(n)) - {i}, slice(i * E, (i + 1) * E)
        for table in counts:
            there = sum(table[i]) - sum(table[i][mine])
            back = sum(sum(table[j][mine]) for j in others)
            ways = [("dispatch forward", there), ("combine forward", back)]
            ways += [("dispatch backward", back), ("combine backward", there)]
            amounts = [(name, rows * model.d_model * itemsize) for name, rows in ways]
            for name, amount in (("counts", INDEX * E * (n - 1)), *amounts):
                lines.append(Line(name, amount, axis="ep", rank=i, count=n - 1))
    return Ledger(line for line in lines if line.count).merged()


def reducing_sent(model: ModelConfig, mesh: Mesh, rank: int, *, itemsize: int = 4) -> Ledger:
    """Bytes that a rank sends in `reduce_gradients`: a ring over N_d ranks for each tensor that all
    hold, over N_d/N_e for each of its experts'."""
    lines = []
    for name, shape in _held(model, mesh.ep).items():
        axis = "edp" if "experts" in name else "dp"
        group = mesh.ranks(rank, axis)
        nbytes = math.prod(shape) * itemsize
        of = collectives.sent(
            "all_reduce_ring", nbytes=nbytes, n=len(group), itemsize=itemsize, axis=axis,
            rank=group.index(rank),
        )  # fmt: skip
        for line in of:
            lines.append(replace(line, name="gradients", rank=rank))
    return Ledger(lines).merged()


def model_states(model: ModelConfig, ep: int, *, itemsize: int = 4) -> Ledger:
    """Bytes of weights, gradients and Adam's state on each rank, under the names of
    `measure.model_states`: those of Ψ less the experts of others, E·(1 − 1/N_e) of each layer.

    That is the same whatever N_d is: data parallelism copies what a rank holds. Only the optimizer
    state and gradients that ZeRO shares out become fewer with N_d, and then an expert's over
    N_d/N_e ranks: as many bytes for each rank as if all N_d shared it out.

    >>> model = ModelConfig.named("mixtral-8x7b")
    >>> [round(model_states(model, ep).total / 1e9) for ep in (1, 2, 4, 8)]
    [747, 386, 206, 116]
    """
    Ψ = anatomy.num_params(model, ep=units.whole(ep, "ep", 1))
    width = units.whole(itemsize, "itemsize", 1)
    states = [("weights", "weights", Ψ * width), ("gradients", "gradients", Ψ * width)]
    states += [(moment, "optimizer", Ψ * width) for moment in MOMENTS["adamw"]]
    states.append(("step", "optimizer", 4 * len(_held(model, ep))))  # one of each tensor, in fp32
    if model.positions == "rope":
        tables = 2 * model.seq_len * (model.d_head // 2) * width
        states.append(("buffers", "buffers", tables))
    return Ledger(Line(name, nbytes, component=component) for name, component, nbytes in states)


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
    chunks: parts into which each rank cuts its tokens, so that one travels while another computes

    >>> model = replace(ModelConfig.named("mixtral-8x7b"), num_layers=1)
    >>> one = routed_timeline(model, [[1024] * 8] * 8, flops=989.4e12, link=Link(0, 450e9))
    >>> round(1e6 * one.makespan), round(1e6 * one.exposed)
    (3178, 261)
    """
    n, table = len(counts), [list(row) for row in counts]
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
        done = compute(f"experts {chunk}", [rows / chunks for rows in came], arrived)
        if chunk + 1 < chunks:
            arrived = travel(f"dispatch {chunk + 1}", ())
        travel(f"combine {chunk}", done)
    return play(tasks)


def _held(model: ModelConfig, ep: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the first rank's parameters by name; others' experts have other numbers."""
    E, shapes = anatomy.letters(model, ep=ep)["E"], anatomy.tensors(model).items()
    return {name: shape for name, shape in shapes if _expert(name) < E}


def _expert(name: str) -> int:
    """The number of the expert that a parameter belongs to; 0 where it belongs to none."""
    return int(name.partition("experts.")[2].partition(".")[0] or 0)
