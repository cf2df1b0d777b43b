"""Wrong answers to the exercises of `collectives`."""

from functools import partial

import torch
from torch import Tensor

from labutils import collectives
from labutils.teach.exercises import collectives as exercises
from wrong_answers import Wrong


def _pieces(x: Tensor, n: int) -> list[Tensor]:
    return list(x.split(collectives.shares(len(x), n)))


def _whole_tensors(x, comm, *, home: bool = False):
    """Each tensor travels once around; `home`: back to its own rank, which adds it once more."""
    total, travelling = x.clone(), x.clone()
    for _ in range(comm.size if home and comm.size > 1 else comm.size - 1):
        travelling = comm.send_recv(
            travelling,
            (comm.rank + 1) % comm.size,
            torch.empty_like(x),
            (comm.rank - 1) % comm.size,
        )
        total += travelling
    return total


def _ring(x, comm, *, slip: int = 0, gather: bool = True, cut=_pieces):
    """A ring with an adjustable mistake: the piece that is given is `slip` places off."""
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = cut(x, n)
    for hop in range(n - 1):
        comm.send_recv(
            pieces[(i - 1 - hop + slip) % n],
            (i + 1) % n,
            pieces[(i - 2 - hop + slip * (hop == 0)) % n],
            (i - 1) % n,
            reduce="sum",
        )
    for hop in range((n - 1) * gather):
        comm.send_recv(pieces[(i - hop) % n], (i + 1) % n, pieces[(i - 1 - hop) % n], (i - 1) % n)
    return x


def _hops(x, comm, hops, adds):
    """So many hops, in each of which the piece of the hop before goes on; the first `adds` add."""
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = _pieces(x, n)
    for hop in hops(n):
        take, reduce = pieces[(i - hop - 1) % n], "sum" if adds(hop, n) else None
        comm.send_recv(pieces[(i - hop) % n], (i + 1) % n, take, (i - 1) % n, reduce=reduce)
    return x


def _adds_twice(x, comm):
    return _hops(x, comm, lambda n: range(2 * n - 2), lambda hop, n: True)


def _second_round_off(x, comm):
    return _hops(x, comm, lambda n: (*range(n - 1), *range(n, 2 * n - 1)), lambda hop, n: hop < n - 1)


def _a_hop_too_many(x, comm):
    return _hops(x, comm, lambda n: range(2 * n), lambda hop, n: hop < n)


def _everybody_to_everybody(x, comm):
    n, i, total = comm.size, comm.rank, x.clone()
    for k in range(1, n):
        total += comm.send_recv(x, (i + k) % n, torch.empty_like(x), (i - k) % n)
    return total


def _never_adds(x, comm):
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = _pieces(x, n)
    for hop in range(2 * (n - 1)):
        comm.send_recv(pieces[(i - hop) % n], (i + 1) % n, pieces[(i - 1 - hop) % n], (i - 1) % n)
    return x


def _equal_pieces(x, n):
    """Needs n to be a multiple of N."""
    return x.view(n, -1)


def _sends_first(x, comm):
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = _pieces(x, n)
    for phase, reduce in ((1, "sum"), (0, None)):
        for hop in range(n - 1):
            comm.send(pieces[(i - phase - hop) % n], (i + 1) % n)
            comm.recv(pieces[(i - 1 - phase - hop) % n], (i - 1) % n, reduce=reduce)
    return x


def _float32_inside(x, comm):
    return collectives.all_reduce_ring(x.float() if x.dtype != torch.float64 else x, comm)


def _cannot_be_alone(x, comm):
    if comm.size == 1 or len(x) == 0:
        raise IndexError("list index out of range")
    return collectives.all_reduce_ring(x, comm)


def _shift_sends_first(x, comm):
    received = torch.empty_like(x)
    comm.send(x, (comm.rank + 1) % comm.size)
    return comm.recv(received, (comm.rank - 1) % comm.size)


def _shift_chain(x, comm):
    if comm.size == 1:
        return x.clone()
    received = torch.empty_like(x)
    if comm.rank == 0:
        comm.send(x, 1)
        return comm.recv(received, comm.size - 1)
    comm.recv(received, comm.rank - 1)
    comm.send(x, (comm.rank + 1) % comm.size)
    return received


def _shift_last_receives_first(x, comm):
    """The mirror image of one rank that begins: a queue in the other direction."""
    if comm.size == 1:
        return x.clone()
    received = torch.empty_like(x)
    if comm.rank == comm.size - 1:
        comm.recv(received, comm.rank - 1)
        comm.send(x, 0)
        return received
    comm.send(x, comm.rank + 1)
    return comm.recv(received, (comm.rank - 1) % comm.size)


def _shift_by_send_recv(x, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm.send_recv(x, right, torch.empty_like(x), left)


def _shift_without_waiting(x, comm):
    work = comm.isend(x, (comm.rank + 1) % comm.size)
    received = comm.recv(torch.empty_like(x), (comm.rank - 1) % comm.size)
    work.wait()
    return received


def _shift_backwards(x, comm):
    if comm.size == 1:
        return x.clone()
    return comm.send_recv(
        x, (comm.rank - 1) % comm.size, torch.empty_like(x), (comm.rank + 1) % comm.size
    )


def _shift_overwrites(x, comm):
    if comm.size == 1:
        return x.clone()
    x = x.clone()
    if comm.rank % 2:
        comm.recv(x, (comm.rank - 1) % comm.size)
        comm.send(x, (comm.rank + 1) % comm.size)
        return x
    comm.send(x, (comm.rank + 1) % comm.size)
    return comm.recv(x, (comm.rank - 1) % comm.size)


def _shift_to_itself(x, comm):
    received = torch.empty_like(x)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    order = [lambda: comm.send(x, right), lambda: comm.recv(received, left)]
    for act in order if comm.rank % 2 == 0 else order[::-1]:
        act()
    return received


def _shift_into_float32(x, comm):
    """Its buffer has the shape of x, and another dtype."""
    received, right, left = torch.empty(x.shape), (comm.rank + 1) % comm.size, comm.rank - 1
    order = [lambda: comm.send(x, right), lambda: comm.recv(received, left % comm.size)]
    for act in order if comm.rank % 2 == 0 else order[::-1]:
        act()
    return received


def _shift_turn_by_turn(x, comm):
    """Rank 0 sends, then rank 1, and so on."""
    received, n = x.clone(), comm.size
    for turn in range(n if n > 1 else 0):
        if comm.rank == turn:
            comm.send(x, (turn + 1) % n)
        elif comm.rank == (turn + 1) % n:
            comm.recv(received, turn)
    return received


def _shift_with_a_barrier(x, comm):
    """Two rounds, even ranks first, which do not fit an odd number of ranks."""
    if comm.size == 1:
        return x
    received, right, left = torch.empty_like(x), (comm.rank + 1) % comm.size, comm.rank - 1
    for parity in (0, 1):
        if comm.rank % 2 == parity:
            comm.send(x, right)
        else:
            comm.recv(received, left % comm.size)
        comm.barrier()
    return received


def _tree_star_of_isends(x, comm):
    x = x.clone()
    if comm.rank:
        return comm.recv(x, 0)
    for work in [comm.isend(x, other) for other in range(1, comm.size)]:
        work.wait()
    return x


def _tree_in_pieces(x, comm):
    """Scatter, then all-gather: for one large tensor in few bytes per rank, not in few steps."""
    mine = collectives.scatter_star(x, comm)
    return collectives.all_gather_ring(mine, comm, sizes=collectives.shares(len(x), comm.size))


def _tree_in_groups(x, comm):
    """Rank 0 tells the first of each group of √N, who tells the others."""
    x, size = x.clone(), max(1, round(comm.size**0.5))
    first = comm.rank // size * size
    if comm.rank:
        comm.recv(x, first if comm.rank != first else 0)
    if comm.rank == first:
        leaders = range(size, comm.size, size) if comm.rank == 0 else ()
        for other in (*leaders, *range(first + 1, min(first + size, comm.size))):
            comm.send(x, other)
    return x


def _tree_into_what_it_was_given(x, comm):
    width = 1
    while width < comm.size:
        if comm.rank < width and comm.rank + width < comm.size:
            comm.send(x, comm.rank + width)
        elif width <= comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
        width *= 2
    return x


def _tree_chain(x, comm):
    x = x.clone()
    if comm.rank > 0:
        comm.recv(x, comm.rank - 1)
    if comm.rank + 1 < comm.size:
        comm.send(x, comm.rank + 1)
    return x


def _tree_powers_only(x, comm):
    x, width = x.clone(), 1
    while width < comm.size:
        if comm.rank < width:
            comm.send(x, comm.rank + width)
        elif comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
        width *= 2
    return x


def _tree_sends_before_it_has(x, comm):
    x = x.clone()
    for width in reversed([2**k for k in range((comm.size - 1).bit_length())]):
        if comm.rank < width and comm.rank + width < comm.size:
            comm.send(x, comm.rank + width)
        elif width <= comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
    return x


def _tree_everybody_tells_everybody(x, comm):
    x = collectives.broadcast_tree(x, comm)
    return collectives.broadcast_tree(x, comm)


def _tried(all_reduce, ranks, inputs) -> list[Tensor]:
    return ranks.run(lambda rank: all_reduce(inputs[rank.rank].clone(), rank.comm("dp")))


def _test_published(all_reduce, ranks):
    """The test that the published ring passed: right values, on whole numbers."""
    inputs = [torch.arange(10.0) + rank for rank in range(ranks.size)]
    return not all(
        torch.allclose(result, sum(inputs)) for result in _tried(all_reduce, ranks, inputs)
    )


def _test_ones(all_reduce, ranks):
    return not all(
        torch.equal(result, torch.full((8,), float(ranks.size)))
        for result in _tried(all_reduce, ranks, [torch.ones(8)] * ranks.size)
    )


def _test_rank_0(all_reduce, ranks):
    inputs = [torch.arange(9.0) * rank for rank in range(ranks.size)]
    return not torch.equal(_tried(all_reduce, ranks, inputs)[0], sum(inputs))


def _test_even_lengths(all_reduce, ranks):
    inputs = [torch.arange(8.0) * rank for rank in range(ranks.size)]
    return not all(torch.equal(result, sum(inputs)) for result in _tried(all_reduce, ranks, inputs))


def _test_too_strict(all_reduce, ranks):
    inputs = [
        torch.randn(99, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks.size)
    ]
    return not all(torch.equal(result, sum(inputs)) for result in _tried(all_reduce, ranks, inputs))


def _test_steps(all_reduce, ranks):
    """Every all-reduce but a ring is told that it is none."""
    complaints = exercises.faults(all_reduce, ranks)
    return complaints or ["not a ring"] * (ranks.trace.steps != 2 * (ranks.size - 1))


def _test_without_tolerance(all_reduce, ranks):
    """The busiest rank against 2(N − 1)/N · S, which no rank with the longer pieces keeps to."""
    complaints = [line for line in exercises.faults(all_reduce, ranks) if "sent" not in line]
    bound = 2 * (ranks.size - 1) / ranks.size * 4004
    return complaints + ["load"] * (max(ranks.ledger.by("rank").values(), default=0) > bound)


def _test_forgets_the_input(all_reduce, ranks):
    return [line for line in exercises.faults(all_reduce, ranks) if "lost" not in line]


def _test_total(all_reduce, ranks):
    complaints = [line for line in exercises.faults(all_reduce, ranks) if "sent" not in line]
    return (
        complaints
        or ranks.ledger.total > collectives.sent("all_reduce_ring", nbytes=4004, n=ranks.size).total
    )


def _test_equal_load(all_reduce, ranks):
    """As many bytes from every rank, however many."""
    complaints = [line for line in exercises.faults(all_reduce, ranks) if "sent" not in line]
    sent = ranks.ledger.by("rank").values()
    return complaints or max(sent, default=0) - min(sent, default=0) > 8


def _test_without_comparing_ranks(all_reduce, ranks):
    """Every rank against the sum, none against another one."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1001, generator=draw) for _ in range(ranks.size)]
    copies = [x.clone() for x in inputs]
    results = ranks.run(lambda rank: all_reduce(inputs[rank.rank], rank.comm("dp")))
    bound = collectives.sent("all_reduce_ring", nbytes=4004, n=ranks.size, itemsize=4)
    return not (
        all(torch.allclose(result, sum(copies), atol=1e-5) for result in results)
        and all(map(torch.equal, inputs, copies))
        and max(ranks.ledger.by("rank").values()) <= max(bound.by("rank").values()) + 8
    )


def _tree_a_round_short(x, comm):
    x = x.clone()
    for width in (2**k for k in range(comm.size.bit_length() - 1)):
        if comm.rank < width and comm.rank + width < comm.size:
            comm.send(x, comm.rank + width)
        elif width <= comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
    return x


def _tree_of_three_rounds(x, comm):
    """Enough for eight ranks."""
    x = x.clone()
    for width in (1, 2, 4):
        if comm.rank < width and comm.rank + width < comm.size:
            comm.send(x, comm.rank + width)
        elif width <= comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
    return x


def _tree_of_a_heap(x, comm):
    x = x.clone()
    if comm.rank:
        comm.recv(x, (comm.rank - 1) // 2)
    for child in (2 * comm.rank + 1, 2 * comm.rank + 2):
        if child < comm.size:
            comm.send(x, child)
    return x


def _equal_buffers(x, comm):
    """Receives every piece into n // N elements."""
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = list(x.tensor_split(n))
    for phase in (1, 0):
        for hop in range(n - 1):
            buffer = torch.empty(len(x) // n, dtype=x.dtype)
            give, take = pieces[(i - phase - hop) % n], pieces[(i - 1 - phase - hop) % n]
            arrived = comm.send_recv(give, (i + 1) % n, buffer, (i - 1) % n)
            take.copy_(take + arrived if phase else arrived)
    return x


def _recursive_doubling(x, comm):
    """Whole tensors to and from ranks 1, 2, 4, … places away, where there is such a rank."""
    total, far = x.clone(), 1
    while far < comm.size:
        if (other := comm.rank ^ far) < comm.size:
            total = total + comm.send_recv(total, other, torch.empty_like(x), other)
        far *= 2
    return total


def _padded_ring(x, comm):
    padded = torch.nn.functional.pad(x, (0, -len(x) % comm.size))
    return collectives.all_reduce_ring(padded, comm)[: len(x)]


def _pass_by_parity(x, comm, *, buffer):
    i, n = comm.rank, comm.size
    out, right, left = buffer(x), (i + 1) % n, (i - 1) % n
    if n == 1:
        return x.clone()
    for turn in (0, 1):
        comm.send(x, right) if i % 2 == turn else comm.recv(out, left)
    return out


def _tree_of_rows(x, comm):
    """Whoever is told has room for as many numbers as x has rows."""
    i, n, width = comm.rank, comm.size, 1
    y = x if i == 0 else torch.empty(len(x), dtype=x.dtype)
    while width < n:
        if i < width and i + width < n:
            comm.send(y, i + width)
        elif width <= i < 2 * width:
            comm.recv(y, i - width)
        width *= 2
    return y


def _tree(x, comm, *, root=lambda n: 0, keep=True, deaf=lambda rank, n: False):
    """Doubling rounds from `root`; keep: what is received; deaf: a rank that never receives."""
    n, width, y = comm.size, 1, x.clone()
    rank = (comm.rank - root(n)) % n
    while width < n:
        if rank < width and rank + width < n:
            comm.send(y, (comm.rank + width) % n)
        elif width <= rank < 2 * width and not deaf(rank, n):
            comm.recv(y if keep else torch.empty_like(x), (comm.rank - width) % n)
        width *= 2
    return y


WRONG = {
    "collectives/ring-all-reduce": (
        Wrong(
            "comm's two halves",
            lambda x, comm: comm.all_gather(
                comm.reduce_scatter(x), sizes=collectives.shares(len(x), comm.size)
            ),
            "values",
            "yours to write",
        ),
        Wrong("a tree", collectives.all_reduce_tree, "bytes sent", "share the load"),
        Wrong("recursive doubling", _recursive_doubling, "values", "a power of two"),
        Wrong(
            "halving and doubling, which suits 8 ranks and not 3",
            collectives.all_reduce_halving_doubling,
            "bytes sent",
            "On 8 ranks you send no more",
        ),
        Wrong("everybody to everybody", _everybody_to_everybody, "bytes sent", "whole tensor"),
        Wrong("adds in both rounds", _adds_twice, "values", "without adding"),
        Wrong("begins round two with its own piece", _second_round_off, "values", "complete piece"),
        Wrong("one hop too many", _a_hop_too_many, "values", "each should be there once"),
        Wrong("whole tensor in each hop", _whole_tensors, "bytes sent", "whole tensor"),
        Wrong(
            "whole tensors, two rounds",
            exercises.IMPOSTORS["the published ring, which passes whole tensors"],
            "bytes sent",
            "8 times too much",
        ),
        Wrong("through rank 0", collectives.all_reduce_naive, "bytes sent", "through one rank"),
        Wrong("own values twice", partial(_whole_tensors, home=True), "values", "twice"),
        Wrong("off by one piece", partial(_ring, slip=1), "values", "off-by-one"),
        Wrong("never adds", _never_adds, "values", "Does the first round add"),
        Wrong("first half only", partial(_ring, gather=False), "values", "reduce-scatter"),
        Wrong(
            "mean", exercises.IMPOSTORS["one that returns the mean"], "values", "All-reduce sums"
        ),
        Wrong(
            "only rank 0",
            exercises.IMPOSTORS["one that gives the sum to rank 0 alone"],
            "values",
            "only rank 0",
        ),
        Wrong("everybody sends first", _sends_first, "values", "let some receive first"),
        Wrong(
            "changes its input",
            exercises.IMPOSTORS["one that overwrites its input"],
            "values",
            "x.clone()",
        ),
        Wrong(
            "only where N divides n",
            partial(_ring, cut=_equal_pieces),
            "ranks that don't divide n",
            "tensor_split",
        ),
        Wrong(
            "drops what is left over",
            exercises.IMPOSTORS["one that leaves out the last n mod N elements"],
            "ranks that don't divide n",
            "tensor_split",
        ),
        Wrong(
            "buffers of equal length",
            _equal_buffers,
            "ranks that don't divide n",
            "in the same size and dtype",
        ),
        Wrong("pads to a multiple of N", _padded_ring, "bytes sent", "Pieces may differ"),
        Wrong(
            "calls the collective",
            lambda x, comm: comm.all_reduce(x),
            "values",
            "yours to write",
        ),
        Wrong("not alone", _cannot_be_alone, "small tensors", "only one rank"),
        Wrong("converts to fp32", _float32_inside, "dtypes", "dtype of x"),
    ),
    "collectives/ordered-sends": (
        Wrong(
            "a buffer of one dim",
            partial(_pass_by_parity, buffer=lambda x: torch.empty(len(x), dtype=x.dtype)),
            "values",
            "torch.empty_like",
        ),
        Wrong(
            "a buffer of fp64",
            partial(_pass_by_parity, buffer=lambda x: torch.empty(x.shape, dtype=torch.float64)),
            "values",
            "torch.empty_like",
        ),
        Wrong("everybody sends first", _shift_sends_first, "values", "let some receive first"),
        Wrong("one rank begins", _shift_chain, "steps", "a queue"),
        Wrong("one rank ends", _shift_last_receives_first, "steps", "a queue"),
        Wrong("send_recv", _shift_by_send_recv, "steps", "leave nothing to order"),
        Wrong("isend", _shift_without_waiting, "steps", "leave nothing to order"),
        Wrong("the wrong way round", _shift_backwards, "values", "other way round"),
        Wrong("receives into what it sends", _shift_overwrites, "values", "a tensor of its own"),
        Wrong("a buffer of fp32", _shift_into_float32, "values", "torch.empty_like"),
        Wrong("turn by turn", _shift_turn_by_turn, "steps", "a queue"),
        Wrong("two rounds and a barrier", _shift_with_a_barrier, "values", "receive at that point"),
        Wrong("sends to itself", _shift_to_itself, "one rank", "1 rank"),
    ),
    "collectives/broadcast-tree": (
        Wrong("from the last", partial(_tree, root=lambda n: n - 1), "values", "it only sends"),
        Wrong("what came is lost", partial(_tree, keep=False), "values", "that you receive into"),
        Wrong(
            "the last of an odd number is deaf",
            partial(_tree, deaf=lambda rank, n: n % 2 and rank == n - 1),
            "any number of ranks",
            "met by a receive",
        ),
        Wrong("a buffer of one dim", _tree_of_rows, "values", "torch.empty_like"),
        Wrong("comm.broadcast", lambda x, comm: comm.broadcast(x), "values", "yours to write"),
        Wrong("a star", collectives.broadcast_star, "steps", "Rank 0 sends to everybody"),
        Wrong("a heap", _tree_of_a_heap, "steps", "Some who have the tensor wait"),
        Wrong("a round too few", _tree_a_round_short, "any number of ranks", "is a round missing"),
        Wrong(
            "three rounds", _tree_of_three_rounds, "any number of ranks", "is a round missing"
        ),
        Wrong("a chain", _tree_chain, "steps", "Each rank waits"),
        Wrong("only powers of two", _tree_powers_only, "any number of ranks", "ranks that exist"),
        Wrong(
            "sends before it has received",
            _tree_sends_before_it_has,
            "values",
            "receive first, then send",
        ),
        Wrong("a star of isends", _tree_star_of_isends, "steps", "Rank 0 sends to everybody"),
        Wrong("scatter and all-gather", _tree_in_pieces, "steps", "twice"),
        Wrong("groups of √N", _tree_in_groups, "steps", "Some who have the tensor wait"),
        Wrong("into its input", _tree_into_what_it_was_given, "values", "Work on a copy"),
        Wrong("twice", _tree_everybody_tells_everybody, "steps", "twice"),
    ),
    "collectives/missing-test": (
        Wrong("no tolerance", _test_without_tolerance, "lets a sound ring pass", "a few more"),
        Wrong("no input", _test_forgets_the_input, "catches ranks that drift apart", "a copy"),
        Wrong(
            "True where all is well",
            lambda all_reduce, ranks: not exercises.faults(all_reduce, ranks),
            "lets a sound ring pass",
            "counts as a complaint",
        ),
        Wrong("says nothing", lambda *_: None, "lets a sound ring pass", "an empty one"),
        Wrong("steps of a ring demanded", _test_steps, "lets a sound ring pass", "steps are free"),
        Wrong(
            "the published test", _test_published, "catches ranks that drift apart", "torch.randn"
        ),
        Wrong(
            "ones on every rank", _test_ones, "catches wrong values", "same tensor on every rank"
        ),
        Wrong(
            "never compares ranks",
            _test_without_comparing_ranks,
            "catches ranks that drift apart",
            "by torch.equal",
        ),
        Wrong("rank 0 only", _test_rank_0, "catches wrong values", "results of all ranks"),
        Wrong(
            "lengths that N divides", _test_even_lengths, "catches wrong values", "no multiple of N"
        ),
        Wrong("equal to the last bit", _test_too_strict, "lets a sound ring pass", "allclose"),
        Wrong(
            "equal load, however much",
            _test_equal_load,
            "catches an overworked rank",
            "send equally much, and too much",
        ),
        Wrong("total bytes", _test_total, "catches an overworked rank", "busiest rank"),
    ),
}
