"""Right answers to the exercises of `collectives`, written in other styles than the reference."""

import numpy as np
import torch

from labutils import collectives
from labutils.teach.exercises import collectives as exercises

# ── order the sends ──────────────────────────────────────────────────────────────────────────────


def _odd_ranks_send_first(x, comm):
    n, i = comm.size, comm.rank
    if n == 1:
        return x
    received = torch.zeros(x.shape, dtype=x.dtype)
    if i % 2:
        comm.send(x, (i + 1) % n)
        comm.recv(received, i - 1)
    else:
        comm.recv(received, (i - 1) % n)
        comm.send(x, (i + 1) % n)
    return received


def _two_calls_sorted(x, comm):
    received, n = x.clone(), comm.size
    calls = [(0, "send", x, (comm.rank + 1) % n), (1, "recv", received, (comm.rank - 1) % n)]
    for _, name, tensor, peer in sorted(calls, key=lambda call: call[0] ^ comm.rank % 2)[: n * 2]:
        if n > 1:
            getattr(comm, name)(tensor, peer)
    return received


def _lambdas(x, comm):
    n, take = comm.size, torch.empty_like(x)
    acts = [lambda: comm.send(x, (comm.rank + 1) % n), lambda: comm.recv(take, comm.rank - 1)]
    if comm.rank == 0:
        acts[1] = lambda: comm.recv(take, n - 1)
    if n == 1:
        return x.detach().clone()
    list(map(lambda act: act(), acts[:: -1 if comm.rank & 1 else 1]))
    return take


# ── a tree ───────────────────────────────────────────────────────────────────────────────────────


def _from_the_largest_distance(x, comm):
    """The binomial tree as MPI libraries have it: a rank's lowest bit says who its parent is."""
    n, i, x = comm.size, comm.rank, x.clone()
    mask = 1
    while mask < n and not i & mask:
        mask *= 2
    if i:
        comm.recv(x, i - mask)
    while mask > 1:
        mask //= 2
        if i + mask < n:
            comm.send(x, i + mask)
    return x


def _halves(x, comm):
    """The first of a stretch of ranks sends to the first of its second half."""
    x, first, stop = x.clone(), 0, comm.size
    while stop - first > 1:
        middle = (first + stop + 1) // 2
        if comm.rank == first:
            comm.send(x, middle)
        elif comm.rank == middle:
            comm.recv(x, first)
        first, stop = (first, middle) if comm.rank < middle else (middle, stop)
    return x


def _in_rounds_of_numpy_integers(x, comm):
    x = x.clone()
    for width in 2 ** np.arange(np.ceil(np.log2(comm.size)), dtype=np.int64):
        if comm.rank < width and comm.rank + width < comm.size:
            comm.send(x, comm.rank + width)
        if width <= comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
    return x


# ── the ring ─────────────────────────────────────────────────────────────────────────────────────


def _the_other_way_round(x, comm):
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = x.tensor_split(n)
    right, left = (i + 1) % n, (i - 1) % n
    for hop in range(n - 1):
        comm.send_recv(pieces[(i + hop) % n], left, pieces[(i + hop + 1) % n], right, reduce="sum")
    for hop in range(n - 1):
        comm.send_recv(pieces[(i + hop - 1) % n], left, pieces[(i + hop) % n], right)
    return x


def _adds_by_itself(x, comm):
    n, i = comm.size, comm.rank
    pieces = [piece.clone() for piece in x.split(collectives.shares(len(x), n))]
    for hop in range(2 * (n - 1)):
        give, take = (i - hop) % n, (i - hop - 1) % n
        arrived = comm.send_recv(
            pieces[give], (i + 1) % n, torch.empty_like(pieces[take]), (i - 1) % n
        )
        pieces[take] = pieces[take] + arrived if hop < n - 1 else arrived
    return torch.cat(pieces)


def _two_halves(x, comm):
    mine = collectives.reduce_scatter_ring(x, comm)
    return collectives.all_gather_ring(mine, comm, sizes=collectives.shares(len(x), comm.size))


def _without_blocking(x, comm):
    n, i, x = comm.size, comm.rank, x.clone()
    pieces = x.split(collectives.shares(len(x), n))
    for hop in range(2 * (n - 1)):
        reduce = "sum" if hop < n - 1 else None
        sending = comm.isend(pieces[(i - hop) % n], (i + 1) % n)
        comm.irecv(pieces[(i - hop - 1) % n], (i - 1) % n, reduce=reduce).wait()
        sending.wait()
    return x


# ── the missing test ─────────────────────────────────────────────────────────────────────────────


def _results(all_reduce, world):
    """Inputs, what became of them, and results, of random tensors."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(world.size, 1003, generator=draw)

    def program(rank):
        x = inputs[rank.rank].clone()
        return all_reduce(x, rank.comm("dp")), x

    results, after = zip(*world.run(program), strict=True)
    return inputs, torch.stack(after), torch.stack(results)


def _yields(all_reduce, world):
    inputs, after, results = _results(all_reduce, world)
    if not torch.equal(inputs, after):
        yield "the input has changed"
    if len(results.unique(dim=0)) > 1:
        yield "ranks differ"
    if not torch.allclose(results[0], inputs.sum(0), atol=1e-4):
        yield "no sum"
    if max(world.ledger.by("rank").values(), default=0) > 2 * inputs[0].nbytes:
        yield "a rank sends more than 2 S"


def _one_truth(all_reduce, world):
    return np.bool_(bool(list(_yields(all_reduce, world))))


def _by_assertions(all_reduce, world):
    inputs, after, results = _results(all_reduce, world)
    n, S = world.size, inputs[0].nbytes
    try:
        np.testing.assert_allclose(results[-1], inputs.double().sum(0), atol=1e-4)
        assert (after == inputs).all() and (results == results[0]).all()
        assert all(nbytes <= 2 * (n - 1) / n * S + 8 for nbytes in world.ledger.by("rank").values())
    except AssertionError as error:
        return [str(error) or "an assertion"]
    return ()


def _by_parity(x, comm):
    """What is done in each of two rounds, by the parity of the rank."""
    out, ahead, behind = torch.empty_like(x), comm.rank + 1, comm.rank - 1
    if comm.size == 1:
        return x.clone()
    for turn in (0, 1):
        if comm.rank % 2 == turn:
            comm.send(x, ahead % comm.size)
        else:
            comm.recv(out, behind % comm.size)
    return out


def _recursive(x, comm):
    """Halves the ranks: the first of the other half is told, then each half goes on by itself."""
    x = x.clone()

    def tell(first, count):
        half = (count + 1) // 2
        if count == 1:
            return
        if comm.rank == first:
            comm.send(x, first + half)
        elif comm.rank == first + half:
            comm.recv(x, first)
        tell(first, half) if comm.rank < first + half else tell(first + half, count - half)

    tell(0, comm.size)
    return x


def _pairwise(x, comm):
    """Every rank sends each piece straight to the rank that adds it up, which tells all others."""
    n, i, out = comm.size, comm.rank, x.clone()
    own, pieces = (y.view(-1).split(collectives.shares(x.numel(), n)) for y in (x.clone(), out))
    for k in range(1, n):
        comm.send_recv(own[(i + k) % n], (i + k) % n, pieces[i], (i - k) % n, reduce="sum")
    for k in range(1, n):
        comm.send_recv(pieces[i], (i + k) % n, pieces[(i - k) % n], (i - k) % n)
    return out


def _in_three_colors(x, comm):
    """Odd circles have a third color: the last rank sends when even and odd ones have."""
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if n == 1:
        return x
    received, color = torch.empty_like(x), lambda rank: 2 if n % 2 and rank == n - 1 else rank % 2
    for turn in range(3):
        if color(comm.rank) == turn:
            comm.send(x, right)
        if color(left) == turn:
            comm.recv(received, left)
    return received


def _by_the_highest_bit(x, comm):
    """A rank's highest bit says who tells it; it tells on without waiting."""
    x, bits = x.clone(), comm.rank.bit_length()
    if comm.rank:
        comm.recv(x, comm.rank - 2 ** (bits - 1))
    others = [comm.rank + 2**k for k in range(bits, 31) if comm.rank + 2**k < comm.size]
    for work in [comm.isend(x, other) for other in others]:
        work.wait()
    return x


def _two_rings(x, comm):
    """A ring for each half of the tensor, in opposite directions."""
    n, i, x = comm.size, comm.rank, x.clone()
    for half, way in zip(x.tensor_split(2), (1, -1), strict=True):
        pieces = half.tensor_split(n)
        for hop in range(2 * (n - 1)):
            give, take = pieces[(i - way * hop) % n], pieces[(i - way * (hop + 1)) % n]
            reduce = "sum" if hop < n - 1 else None
            comm.send_recv(give, (i + way) % n, take, (i - way) % n, reduce=reduce)
    return x


def _the_rest_in_the_last_piece(x, comm):
    n, i, x = comm.size, comm.rank, x.clone()
    size = len(x) // n
    pieces = x.split([*[size] * (n - 1), len(x) - size * (n - 1)])
    for hop in range(2 * (n - 1)):
        reduce = "sum" if hop < n - 1 else None
        give, take = pieces[(i - hop) % n], pieces[(i - hop - 1) % n]
        comm.send_recv(give, (i + 1) % n, take, (i - 1) % n, reduce=reduce)
    return x


def _adds_to_zeros(x, comm):
    """What arrives is added to zeros."""
    n, out = comm.size, torch.zeros_like(x)
    if n == 1:
        return x.clone()
    calls = [
        lambda: comm.send(x, (comm.rank + 1) % n),
        lambda: comm.recv(out, (comm.rank - 1) % n, reduce="sum"),
    ]
    for call in calls if comm.rank % 2 == 0 else calls[::-1]:
        call()
    return out


def _of_tensors(all_reduce, world, *makes):
    """Complaints about all-reduces of other tensors, one after the other."""
    for make in makes:
        inputs = [make(torch.Generator().manual_seed(rank)) for rank in range(world.size)]

        def program(rank, inputs=inputs):
            x = inputs[rank.rank].clone()
            return all_reduce(x, rank.comm("dp")), x

        results = world.run(program)
        total, n, size = sum(x.double() for x in inputs), world.size, inputs[0].element_size()
        for rank, (result, after) in enumerate(results):
            if not torch.allclose(result.double(), total, atol=1e-4):
                yield f"rank {rank} has no sum"
            if not torch.equal(after, inputs[rank]):
                yield f"rank {rank} has lost its input"
            if not torch.equal(result, results[0][0]):
                yield f"rank {rank} has other bits than rank 0"
        most = 2 * (n - 1) / n * inputs[0].nbytes + 4 * size
        if max(world.ledger.by("rank").values(), default=0) > most:
            yield "a rank sends more than in a ring"


def _whole_numbers_first(all_reduce, world):
    def numbers(draw):
        return torch.randint(100, (103,), generator=draw)

    return list(_of_tensors(all_reduce, world, numbers, lambda draw: torch.randn(103, generator=draw)))


def _of_a_loss_and_a_transposed(all_reduce, world):
    def many(draw):
        return torch.randn(33, 31, generator=draw).t()

    return [*_of_tensors(all_reduce, world, lambda draw: torch.randn((), generator=draw), many)]


def _of_a_matrix(all_reduce, world):
    return [*_of_tensors(all_reduce, world, lambda draw: torch.randn(33, 31, generator=draw))]


RIGHT = {
    "collectives/ordered-sends": {
        "rounds by parity": _by_parity,
        "adds to zeros": _adds_to_zeros,
        "three colors": _in_three_colors,
        "odd ranks send first": _odd_ranks_send_first,
        "two calls in an order": _two_calls_sorted,
        "lambdas": _lambdas,
    },
    "collectives/broadcast-tree": {
        "recursive halves": _recursive,
        "the highest bit, isend": _by_the_highest_bit,
        "the tree of MPI libraries": _from_the_largest_distance,
        "halves": _halves,
        "NumPy integers": _in_rounds_of_numpy_integers,
    },
    "collectives/ring-all-reduce": {
        "the other way round": _the_other_way_round,
        "adds by itself": _adds_by_itself,
        "two halves": _two_halves,
        "isend and irecv": _without_blocking,
        "no ring": _pairwise,
        "the rest in the last piece": _the_rest_in_the_last_piece,
        "two rings": _two_rings,
    },
    "collectives/missing-test": {
        "a generator": _yields,
        "whole numbers first": _whole_numbers_first,
        "of a matrix": _of_a_matrix,
        "of a loss and of a transposed matrix": _of_a_loss_and_a_transposed,
        "one truth value": _one_truth,
        "assertions": _by_assertions,
        "a string": lambda all_reduce, world: "; ".join(_yields(all_reduce, world)),
        "a set": lambda all_reduce, world: set(_yields(all_reduce, world)),
        "another length": lambda all_reduce, world: exercises.faults(all_reduce, world, 77),
    },
}
