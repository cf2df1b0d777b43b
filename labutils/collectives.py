"""Collectives written by hand over send and receive, and for each one the exact bytes it sends, the steps it takes and the time it should need.

An algorithm is a function of a tensor and a `comm`, and runs on anything that has the few methods of `Comm`. It returns its result and leaves
its input alone. A formula is a row of one table, written from the mathematics and not from the code, so that the two can disagree.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from labutils import units
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line


@runtime_checkable
class Comm(Protocol):
    """What the algorithms need of a door between `size` ranks; `world.Comm` has it, and so may a toy of your own."""

    rank: int
    size: int

    def send(self, x: Tensor, dst: int) -> None: ...
    def recv(self, out: Tensor, src: int, *, reduce: str | None = None) -> Tensor: ...
    def send_recv(
        self, x: Tensor, dst: int, out: Tensor, src: int, *, reduce: str | None = None
    ) -> Tensor: ...
    def record(self, name: str) -> AbstractContextManager: ...


REDUCTIONS = ("sum", "product", "min", "max")


def shares(amount: int, n: int) -> tuple[int, ...]:
    """`amount` cut into `n` pieces that differ by at most one, the larger ones first, as `torch.tensor_split` cuts.

    >>> shares(10, 4), shares(2, 4)
    ((3, 3, 2, 2), (1, 1, 0, 0))
    """
    units.whole(amount, "amount")
    base, larger = divmod(amount, units.whole(n, "n", 1))
    return (base + 1,) * larger + (base,) * (n - larger)


def _collective(algorithm: Callable) -> Callable:
    """Names the lines of the ledger after the algorithm and refuses, on every rank alike, what no algorithm could do."""

    @functools.wraps(algorithm)
    def collective(x: Tensor, comm: Comm, *args, **kwargs):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{algorithm.__name__} works on a tensor, got {type(x).__name__}: wrap it in torch.as_tensor(…)"
            )
        if (op := kwargs.get("op", "sum")) not in REDUCTIONS:
            remedy = (
                "sum, then divide by comm.size"
                if op in ("mean", "avg")
                else f"use one of {', '.join(REDUCTIONS)}"
            )
            raise ValueError(f"{algorithm.__name__} cannot reduce by op={op!r}: {remedy}")
        if not 0 <= (root := kwargs.get("root", 0)) < comm.size:
            raise ValueError(
                f"{algorithm.__name__}: root={root} is not a rank of this group of {comm.size}: use 0 … {comm.size - 1}"
            )
        with comm.record(algorithm.__name__):
            return algorithm(x, comm, *args, **kwargs)

    return collective


# ── one to all, and all to one ─────────────────────────────────────────────────────────────────────────────────────


@_collective
def broadcast_star(
    x: Shaped[Tensor, "*shape"], comm: Comm, *, root: int = 0
) -> Shaped[Tensor, "*shape"]:
    """The root's x, on every rank: the root sends it to each of the others in turn.

    Elsewhere than at the root only the shape and dtype of x matter, as in torch.
    """
    if comm.rank != root:
        return comm.recv(_room(x), root)
    x = _copy(x)
    for rank in _others(comm):
        comm.send(x, rank)
    return x


@_collective
def broadcast_tree(
    x: Shaped[Tensor, "*shape"], comm: Comm, *, root: int = 0
) -> Shaped[Tensor, "*shape"]:
    """The root's x, on every rank: whoever has it passes it on, so that the number of ranks that have it doubles in each step."""
    x = _copy(x)
    _tree_down(x, comm, root)
    return x


@_collective
def scatter_star(
    x: Shaped[Tensor, "rows *rest"], comm: Comm, *, root: int = 0
) -> Shaped[Tensor, "share *rest"]:
    """This rank's share of the rows of the root's x; elsewhere only the shape and dtype of x matter."""
    pieces = _cut(x.contiguous(), shares(len(x), comm.size))
    if comm.rank != root:
        return comm.recv(_room(pieces[comm.rank]), root)
    for rank in _others(comm):
        comm.send(pieces[rank], rank)
    return pieces[root].clone()


@_collective
def gather_star(
    x: Shaped[Tensor, "share *rest"],
    comm: Comm,
    *,
    root: int = 0,
    sizes: Sequence[int] | None = None,
) -> Shaped[Tensor, "rows *rest"] | None:
    """At the root the rows of all ranks, in rank order, and None elsewhere. `sizes` are the rows that each rank brings, if they differ."""
    if comm.rank != root:
        comm.send(x.contiguous(), root)
        return None
    whole, pieces = _gathered(x, comm, sizes)
    for rank in _others(comm):
        comm.recv(pieces[rank], rank)
    return whole


@_collective
def reduce_star(
    x: Shaped[Tensor, "*shape"], comm: Comm, *, root: int = 0, op: str = "sum"
) -> Shaped[Tensor, "*shape"] | None:
    """At the root the sum (or `op`) over all ranks, and None elsewhere: everybody sends to the root, which adds in rank order after its own."""
    if comm.rank != root:
        comm.send(x.contiguous(), root)
        return None
    x = _copy(x)
    for rank in _others(comm):
        comm.recv(x, rank, reduce=op)
    return x


@_collective
def reduce_tree(
    x: Shaped[Tensor, "*shape"], comm: Comm, *, root: int = 0, op: str = "sum"
) -> Shaped[Tensor, "*shape"] | None:
    """At the root the sum (or `op`) over all ranks, and None elsewhere: the tree of `broadcast_tree`, climbed from its leaves."""
    x = _copy(x)
    _tree_up(x, comm, root, op)
    return x if comm.rank == root else None


# ── all to all: the ring ───────────────────────────────────────────────────────────────────────────────────────────


@_collective
def reduce_scatter_ring(
    x: Shaped[Tensor, "rows *rest"],
    comm: Comm,
    *,
    op: str = "sum",
    out: Shaped[Tensor, "share *rest"] | None = None,
) -> Shaped[Tensor, "share *rest"]:
    """This rank's share of the rows of the sum (or `op`) over all ranks.

    With an `out` that is this rank's own piece of x, all of x is scratch and nothing is allocated, as in an in-place call of NCCL.
    Invariant: piece j is summed in the order of the ring, starting at rank j + 1 and ending at rank j, whatever the timing.
    """
    in_place = out is not None and out.untyped_storage()._cdata == x.untyped_storage()._cdata
    pieces = _cut(x if in_place else _copy(x), shares(len(x), comm.size))
    mine = pieces[comm.rank]
    if in_place and (out.data_ptr(), out.shape) != (mine.data_ptr(), mine.shape):
        raise ValueError(
            f"rank {comm.rank}: out lies in x, but is not its piece {comm.rank} of {comm.size}: give that piece, or memory of its own"
        )
    _ring_reduce(pieces, comm, op)
    return out if in_place else _into(out, mine)


@_collective
def all_gather_ring(
    x: Shaped[Tensor, "share *rest"],
    comm: Comm,
    *,
    sizes: Sequence[int] | None = None,
    out: Shaped[Tensor, "rows *rest"] | None = None,
) -> Shaped[Tensor, "rows *rest"]:
    """The rows of all ranks, in rank order, on every rank. `sizes` are the rows that each rank brings, if they differ; x may be a piece of `out`."""
    whole, pieces = _gathered(x, comm, sizes, out)
    _ring_gather(pieces, comm)
    return whole


@_collective
def all_reduce_ring(
    x: Shaped[Tensor, "*shape"],
    comm: Comm,
    *,
    op: str = "sum",
    out: Shaped[Tensor, "*shape"] | None = None,
) -> Shaped[Tensor, "*shape"]:
    """The sum (or `op`) over all ranks, on every rank: a ring reduce-scatter, then a ring all-gather of what it left.

    Invariant: all ranks hold the same bits, because each piece is summed once, in ring order, and then only copied.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; Goyal et al. 1706.02677, section 4.1.
    """
    out, flat = _result(x, out)
    pieces = _cut(flat, shares(flat.numel(), comm.size))
    _ring_reduce(pieces, comm, op)
    _ring_gather(pieces, comm)
    return out


def _ring_reduce(pieces: list[Tensor], comm: Comm, op: str) -> None:
    """Leaves in pieces[rank] the sum over all ranks: in every hop a half-done piece moves on, and meets the next rank's own."""
    n, i = comm.size, comm.rank
    for hop in range(n - 1):
        give, take = (i - 1 - hop) % n, (i - 2 - hop) % n
        comm.send_recv(pieces[give], (i + 1) % n, pieces[take], (i - 1) % n, reduce=op)


def _ring_gather(pieces: list[Tensor], comm: Comm) -> None:
    """Fills every piece, when each rank begins with pieces[rank]: pass on what you received in the hop before."""
    n, i = comm.size, comm.rank
    for hop in range(n - 1):
        give, take = (i - hop) % n, (i - 1 - hop) % n
        comm.send_recv(pieces[give], (i + 1) % n, pieces[take], (i - 1) % n)


# ── all-reduce in other ways ───────────────────────────────────────────────────────────────────────────────────────


@_collective
def all_reduce_naive(
    x: Shaped[Tensor, "*shape"],
    comm: Comm,
    *,
    op: str = "sum",
    out: Shaped[Tensor, "*shape"] | None = None,
) -> Shaped[Tensor, "*shape"]:
    """The sum (or `op`) over all ranks, on every rank: all send to rank 0, which adds in rank order and sends the result back to each."""
    out, flat = _result(x, out)
    if comm.rank != 0:
        comm.send(flat, 0)
        comm.recv(flat, 0)
        return out
    for rank in _others(comm):
        comm.recv(flat, rank, reduce=op)
    for rank in _others(comm):
        comm.send(flat, rank)
    return out


@_collective
def all_reduce_tree(
    x: Shaped[Tensor, "*shape"],
    comm: Comm,
    *,
    op: str = "sum",
    out: Shaped[Tensor, "*shape"] | None = None,
) -> Shaped[Tensor, "*shape"]:
    """The sum (or `op`) over all ranks, on every rank: up the binomial tree to rank 0, and down again."""
    out, flat = _result(x, out)
    _tree_up(flat, comm, 0, op)
    _tree_down(flat, comm, 0)
    return out


@_collective
def all_reduce_halving_doubling(
    x: Shaped[Tensor, "*shape"],
    comm: Comm,
    *,
    op: str = "sum",
    out: Shaped[Tensor, "*shape"] | None = None,
) -> Shaped[Tensor, "*shape"]:
    """The sum (or `op`) over all ranks, on every rank: swap halves with a partner far away, then quarters with a nearer one, …, and back.

    With P the largest power of two in N, ranks P, P + 1, … first add their tensor to that of rank 0, 1, …, and get the result at the end.
    Source: Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur, Rabenseifner and Gropp, 2005.
    """
    out, flat = _result(x, out)
    i, p = comm.rank, _power_of_two(comm.size)
    extra = i + p if i + p < comm.size else None
    if i >= p:
        comm.send(flat, i - p)
        comm.recv(flat, i - p)
        return out
    if extra is not None:
        comm.recv(flat, extra, reduce=op)
    starts = [0, *itertools.accumulate(shares(flat.numel(), p))]

    def block(rank: int, width: int) -> Tensor:
        """The pieces of the `width` ranks among whom `rank` stands, a stretch of the whole."""
        first = rank - rank % width
        return flat[starts[first] : starts[first + width]]

    widths = [2**k for k in range(p.bit_length() - 1)]
    for width in reversed(widths):
        comm.send_recv(block(i ^ width, width), i ^ width, block(i, width), i ^ width, reduce=op)
    for width in widths:
        comm.send_recv(block(i, width), i ^ width, block(i ^ width, width), i ^ width)
    if extra is not None:
        comm.send(flat, extra)
    return out


def _tree_up(x: Tensor, comm: Comm, root: int, op: str) -> None:
    """Adds up x along the binomial tree: in each step the upper half of the ranks that are left send to the lower half, and are done."""
    me = (comm.rank - root) % comm.size
    for width in reversed(_widths(comm.size)):
        if width <= me < 2 * width:
            comm.send(x, (comm.rank - width) % comm.size)
        elif me < width and me + width < comm.size:
            comm.recv(x, (comm.rank + width) % comm.size, reduce=op)


def _tree_down(x: Tensor, comm: Comm, root: int) -> None:
    """Spreads the root's x along the binomial tree: `_tree_up` run backwards."""
    me = (comm.rank - root) % comm.size
    for width in _widths(comm.size):
        if width <= me < 2 * width:
            comm.recv(x, (comm.rank - width) % comm.size)
        elif me < width and me + width < comm.size:
            comm.send(x, (comm.rank + width) % comm.size)


# ── everybody to everybody ─────────────────────────────────────────────────────────────────────────────────────────


@_collective
def all_to_all_pairwise(
    x: Shaped[Tensor, "rows *rest"],
    comm: Comm,
    *,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> Shaped[Tensor, "received *rest"]:
    """The rows that every rank has for this one, in rank order: in step k send to the rank k after you and receive from the rank k before.

    `send_sizes` are the rows for each rank (equal shares of x unless given), `recv_sizes` the rows that each rank has for this one.
    """
    n, i = comm.size, comm.rank
    send_sizes = (
        shares(len(x), n) if send_sizes is None else _row_counts(send_sizes, n, "send_sizes")
    )
    recv_sizes = (
        (send_sizes[i],) * n if recv_sizes is None else _row_counts(recv_sizes, n, "recv_sizes")
    )
    if sum(send_sizes) != len(x) or send_sizes[i] != recv_sizes[i]:
        raise ValueError(
            f"rank {i}: send_sizes={send_sizes} and recv_sizes={recv_sizes} must add up to the {len(x)} rows of x and agree on rank {i}"
        )
    out = x.new_empty(sum(recv_sizes), *x.shape[1:])
    outbox, inbox = _cut(x.contiguous(), send_sizes), _cut(out, recv_sizes)
    inbox[i].copy_(outbox[i])
    for k in range(1, n):
        comm.send_recv(outbox[(i + k) % n], (i + k) % n, inbox[(i - k) % n], (i - k) % n)
    return out


# ── neighbors, and trust ───────────────────────────────────────────────────────────────────────────────────────────


@_collective
def shift(x: Shaped[Tensor, "*shape"], comm: Comm) -> Shaped[Tensor, "*shape"]:
    """The x of the rank before this one, when all pass theirs to the next at once, with nothing but blocking sends and receives.

    Even ranks send first and odd ranks receive first: two steps for an even number of ranks, three for an odd one, and no circle of waiting ranks.
    """
    if comm.size == 1:
        return _copy(x)
    received, right, left = _room(x), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2 == 0:
        comm.send(x.contiguous(), right)
        comm.recv(received, left)
    else:
        comm.recv(received, left)
        comm.send(x.contiguous(), right)
    return received


def faults(all_reduce: Callable, world, numel: int = 1001) -> list[str]:
    """What is wrong with an all-reduce, a sentence for each fault; empty if you can train with it.

    It runs on every rank of `world`, on another random tensor each, and must leave the same bits everywhere, its input alone, and no rank overworked.
    """
    inputs = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for rank in range(world.size)
    ]

    def program(rank):
        x = inputs[rank.rank].clone()
        result = all_reduce(x, rank.comm("dp")).clone()
        return result, torch.equal(x, inputs[rank.rank])

    results, untouched = zip(*world.run(program), strict=True)
    total = torch.stack(inputs).sum(0)
    sent = world.ledger.by("rank")
    ring = max(
        predict_all_reduce("ring", nbytes=total.nbytes, n=world.size).by("rank").values(), default=0
    )
    found = [
        f"rank {rank} does not hold the sum"
        for rank, x in enumerate(results)
        if x.shape != total.shape or not torch.allclose(x, total, atol=1e-5)
    ]
    found += ["the ranks hold different bits"] * (
        not all(torch.equal(x, results[0]) for x in results)
    )
    found += [f"rank {rank} lost its input" for rank, same in enumerate(untouched) if not same]
    return found + [
        f"rank {rank} sent {nbytes} B, in a ring no rank sends more than {ring} B"
        for rank, nbytes in sent.items()
        if nbytes > ring
    ]


# ── small helpers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _others(comm: Comm) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def _power_of_two(n: int) -> int:
    """The largest power of two in n."""
    return 1 << (n.bit_length() - 1)


def _widths(n: int) -> list[int]:
    """1, 2, 4, … below n: how many ranks of a binomial tree have the tensor after each step."""
    return [2**k for k in range((n - 1).bit_length())]


def _room(x: Tensor) -> Tensor:
    return _fitting(None, tuple(x.shape), x)


def _copy(x: Tensor) -> Tensor:
    return _into(None, x)


def _cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(x.detach().split(list(sizes)))


def _row_counts(sizes: Sequence[int], n: int, name: str) -> tuple[int, ...]:
    if len(sizes) != n:
        raise ValueError(f"{name}={tuple(sizes)} names {len(sizes)} ranks, but the group has {n}")
    return tuple(units.whole(int(size), name) for size in sizes)


def _gathered(
    x: Tensor, comm: Comm, sizes: Sequence[int] | None, out: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Room for the rows of all ranks, as a whole and cut by rank, with this rank's own already in place."""
    sizes = (len(x),) * comm.size if sizes is None else _row_counts(sizes, comm.size, "sizes")
    if sizes[comm.rank] != len(x):
        raise ValueError(
            f"rank {comm.rank} brings {len(x)} rows, but sizes={sizes} promise {sizes[comm.rank]}: give the rows of every rank"
        )
    whole = _fitting(out, (sum(sizes), *x.shape[1:]), x)
    pieces = _cut(whole, sizes)
    if pieces[comm.rank].data_ptr() != x.data_ptr():
        pieces[comm.rank].copy_(x.detach())
    return whole, pieces


def _result(x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """A copy of x to work in (or `out`, filled with x), and a flat view of it."""
    out = _into(out, x)
    return out, out.detach().view(-1)


def _into(out: Tensor | None, x: Tensor) -> Tensor:
    """`out`, or a new tensor, with the values of x."""
    out = _fitting(out, tuple(x.shape), x)
    if out is not x:
        out.detach().copy_(x.detach())
    return out


def _fitting(out: Tensor | None, shape: tuple[int, ...], x: Tensor) -> Tensor:
    """`out`, which must be contiguous and of that shape and x's dtype, or room for it."""
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {shape} of {x.dtype} like the result, got {tuple(out.shape)} of {out.dtype}"
        )
    return out


# ── what each algorithm costs ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Seat:
    """Where a formula is evaluated: one rank of n, and S bytes that are cut between elements (or rows) of `itemsize` bytes."""

    n: int
    rank: int
    root: int
    S: int
    itemsize: int

    @property
    def v(self) -> int:
        """This rank's number, counted from the root."""
        return (self.rank - self.root) % self.n

    @property
    def others(self) -> int:
        """How many ranks a root has to serve; 0 for a rank that is not the root."""
        return self.n - 1 if self.v == 0 else 0

    @property
    def leaf(self) -> int:
        """1 for every rank that is not the root."""
        return int(self.v > 0)

    @property
    def children(self) -> int:
        """Ranks to which this one passes the tensor down the binomial tree."""
        return sum(self.v < width and self.v + width < self.n for width in _widths(self.n))

    def piece(self, ahead: int = 0) -> int:
        """Bytes in the piece of the rank that many places ahead on the ring."""
        return self.cut(self.n)[(self.rank + ahead) % self.n]

    def cut(self, parts: int) -> list[int]:
        """Bytes in each of `parts` shares of the tensor."""
        return [share * self.itemsize for share in shares(self.S // self.itemsize, parts)]


@dataclass(frozen=True)
class Formula:
    """What an algorithm costs: `sent` bytes in `messages` by the rank at a seat; `steps` that wait for each other and carry `share` · S in all."""

    steps: Callable[[int], int]
    share: Callable[[int], Fraction | int]
    messages: Callable[[Seat], int]
    sent: Callable[[Seat], int]


def _log(n: int) -> int:
    """⌈log₂ n⌉."""
    return (n - 1).bit_length()


def _twice(path: dict[str, Callable]) -> dict[str, Callable]:
    return {name: lambda n, length=length: 2 * length(n) for name, length in path.items()}


def _halving_doubling(at: Seat) -> tuple[int, int]:
    """Messages and bytes: all but your own piece on the way down; you, your pair, your quartet, … on the way up; and a left-over rank's tensor."""
    p = _power_of_two(at.n)
    if at.rank >= p:
        return 1, at.S
    pieces, widths, extra = at.cut(p), _widths(p), at.rank + p < at.n
    up = sum(sum(pieces[at.rank - at.rank % width :][:width]) for width in widths)
    return 2 * len(widths) + extra, at.S - pieces[at.rank] + up + extra * at.S


def _halving_doubling_path(n: int) -> tuple[int, Fraction]:
    p, left_over = _power_of_two(n), n != _power_of_two(n)
    return 2 * _log(p) + 2 * left_over, Fraction(2 * (p - 1), p) + 2 * left_over


_TENSORS = dict(
    steps=lambda n: n - 1, share=lambda n: n - 1
)  # n − 1 whole tensors, one after the other
_PIECES = dict(steps=lambda n: n - 1, share=lambda n: Fraction(n - 1, n))  # n − 1 pieces
_LEVELS = dict(steps=_log, share=_log)  # a whole tensor for each level of a tree

FORMULAS: dict[str, Formula] = {
    "broadcast_star": Formula(
        **_TENSORS, messages=lambda at: at.others, sent=lambda at: at.others * at.S
    ),
    "broadcast_tree": Formula(
        **_LEVELS, messages=lambda at: at.children, sent=lambda at: at.children * at.S
    ),
    "scatter_star": Formula(
        **_PIECES,
        messages=lambda at: at.others,
        sent=lambda at: (1 - at.leaf) * (at.S - at.piece()),
    ),
    "gather_star": Formula(
        **_PIECES, messages=lambda at: at.leaf, sent=lambda at: at.leaf * at.piece()
    ),
    "reduce_star": Formula(**_TENSORS, messages=lambda at: at.leaf, sent=lambda at: at.leaf * at.S),
    "reduce_tree": Formula(**_LEVELS, messages=lambda at: at.leaf, sent=lambda at: at.leaf * at.S),
    "reduce_scatter_ring": Formula(
        **_PIECES, messages=lambda at: at.n - 1, sent=lambda at: at.S - at.piece()
    ),
    "all_gather_ring": Formula(
        **_PIECES, messages=lambda at: at.n - 1, sent=lambda at: at.S - at.piece(1)
    ),
    "all_reduce_naive": Formula(
        **_twice(_TENSORS),
        messages=lambda at: at.leaf + at.others,
        sent=lambda at: (at.leaf + at.others) * at.S,
    ),
    "all_reduce_ring": Formula(
        **_twice(_PIECES),
        messages=lambda at: 2 * (at.n - 1),
        sent=lambda at: 2 * at.S - at.piece() - at.piece(1),
    ),
    "all_reduce_tree": Formula(
        **_twice(_LEVELS),
        messages=lambda at: at.leaf + at.children,
        sent=lambda at: (at.leaf + at.children) * at.S,
    ),
    "all_reduce_halving_doubling": Formula(
        steps=lambda n: _halving_doubling_path(n)[0],
        share=lambda n: _halving_doubling_path(n)[1],
        messages=lambda at: _halving_doubling(at)[0],
        sent=lambda at: _halving_doubling(at)[1],
    ),
    "all_to_all_pairwise": Formula(
        **_PIECES, messages=lambda at: at.n - 1, sent=lambda at: at.S - at.piece()
    ),
}
"""S is always the whole tensor: what is broadcast, what a scatter divides, what a gather puts together, what each rank brings to the rest."""

ALL_REDUCES = tuple(name for name in FORMULAS if name.startswith("all_reduce"))
OPERATIONS = (
    "broadcast",
    "scatter",
    "gather",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "all_reduce",
    "all_to_all",
)


def _formula(algorithm: str) -> Formula:
    if algorithm not in FORMULAS:
        raise ValueError(f"no algorithm {algorithm!r}: there are {', '.join(FORMULAS)}")
    return FORMULAS[algorithm]


def sent(
    algorithm: str,
    *,
    nbytes: int | float,
    n: int,
    itemsize: int = 4,
    root: int = 0,
    axis: str = "dp",
) -> Ledger:
    """Bytes that each of `n` ranks sends, a line a rank that sends anything, exact also where n does not divide the tensor.

    `nbytes` is the whole tensor S, cut between elements (rows, for an operation on rows) of `itemsize` bytes.

    >>> sent("all_reduce_ring", nbytes=64e6, n=4).by("rank")
    {0: 96000000, 1: 96000000, 2: 96000000, 3: 96000000}
    """
    seats, formula = _seats(algorithm, nbytes, n, itemsize, root), _formula(algorithm)
    return Ledger(
        Line(algorithm, formula.sent(at), axis=axis, rank=at.rank, count=formula.messages(at))
        for at in seats
        if formula.messages(at)
    )


def _seats(algorithm: str, nbytes: int | float, n: int, itemsize: int, root: int) -> list[Seat]:
    _formula(algorithm)
    S = int(nbytes) if isinstance(nbytes, float) and nbytes.is_integer() else nbytes
    units.whole(S, "nbytes")
    units.whole(n, "n", 1)
    if S % units.whole(itemsize, "itemsize", 1):
        raise ValueError(
            f"{S} bytes are not a whole number of elements of {itemsize} bytes: give the tensor's itemsize"
        )
    if not 0 <= root < n:
        raise ValueError(f"root={root} is not one of {n} ranks: use 0 … {n - 1}")
    return [Seat(n, rank, root, S, itemsize) for rank in range(n)]


def held(
    algorithm: str, *, nbytes: int | float, n: int, itemsize: int = 4, root: int = 0
) -> Ledger:
    """Bytes of the result on each of `n` ranks: the whole tensor, a share of it, or nothing where only the root gets it.

    >>> held("reduce_scatter_ring", nbytes=40, n=4).by("rank")
    {0: 12, 1: 12, 2: 8, 3: 8}
    """

    def result(at: Seat) -> int:
        match op:
            case "scatter" | "reduce_scatter":
                return at.piece()
            case "gather" | "reduce":
                return 0 if at.leaf else at.S
            case "all_to_all":
                return at.n * at.piece()
            case _:
                return at.S

    op = next(op for op in OPERATIONS if algorithm.startswith(f"{op}_"))
    return Ledger(
        Line("result", result(at), rank=at.rank)
        for at in _seats(algorithm, nbytes, n, itemsize, root)
    )


def _predictor(op: str) -> Callable[..., Ledger]:
    algorithms = [name.removeprefix(f"{op}_") for name in FORMULAS if name.startswith(f"{op}_")]

    def predict_op(algorithm: str = algorithms[0], **sizes) -> Ledger:
        if algorithm not in algorithms:
            raise ValueError(
                f"no algorithm {algorithm!r} for {op}: there are {', '.join(algorithms)}"
            )
        return sent(f"{op}_{algorithm}", **sizes)

    predict_op.__name__ = predict_op.__qualname__ = f"predict_{op}"
    predict_op.__doc__ = f"Bytes that each rank sends in {op} by {' or '.join(map(repr, algorithms))}; the sizes are those of `sent`."
    return predict_op


predict_broadcast = _predictor("broadcast")
predict_scatter = _predictor("scatter")
predict_gather = _predictor("gather")
predict_reduce = _predictor("reduce")
predict_reduce_scatter = _predictor("reduce_scatter")
predict_all_gather = _predictor("all_gather")
predict_all_reduce = _predictor("all_reduce")
predict_all_to_all = _predictor("all_to_all")


def steps(algorithm: str, n: int) -> int:
    """Messages of an algorithm that have to wait for each other, when a rank can send one and receive one at a time.

    >>> [steps(algorithm, 8) for algorithm in ALL_REDUCES]
    [14, 14, 6, 6]
    """
    return _formula(algorithm).steps(units.whole(n, "n", 1))


def cost(algorithm: str, nbytes: int | float, n: int, link: Link) -> float:
    """Seconds that an algorithm needs when every rank has a link of its own: steps · λ + (bytes that travel one after the other) / bw.

    Invariant: equals `trace.makespan(link)` of a real run wherever n divides the tensor.
    Source: Hockney's model, as in Thakur, Rabenseifner and Gropp, 2005.

    >>> cost("all_reduce_ring", 64e6, 4, Link(1e-5, 1e9))
    0.09606
    """
    if nbytes < 0 or not math.isfinite(nbytes):
        raise ValueError(f"nbytes must be a finite number, 0 or more, got {nbytes}")
    formula = _formula(algorithm)
    units.whole(n, "n", 1)
    return float(
        formula.steps(n) * Fraction(link.latency)
        + formula.share(n) * Fraction(nbytes) / Fraction(link.bandwidth)
    )


def fastest(nbytes: int | float, n: int, link: Link, among: Sequence[str] = ALL_REDUCES) -> str:
    """The algorithm with the lowest `cost`; of equals the one that stands first in `among`."""
    return min(among, key=lambda algorithm: cost(algorithm, nbytes, n, link))


def crossover(first: str, second: str, n: int, link: Link) -> float | None:
    """The tensor size in bytes at which two algorithms cost the same, or None where one of them is never slower.

    >>> round(crossover("all_reduce_ring", "all_reduce_tree", 8, Link(1e-5, 1e9)))
    18824
    """
    steps_apart = _formula(first).steps(n) - _formula(second).steps(n)
    share_apart = Fraction(_formula(second).share(n) - _formula(first).share(n))
    if steps_apart * share_apart <= 0:
        return None
    return float(steps_apart * Fraction(link.latency) * Fraction(link.bandwidth) / share_apart)


# ── how others report it ───────────────────────────────────────────────────────────────────────────────────────────

_BUS: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1),
    "reduce": lambda n: Fraction(1),
}


def bus_factor(op: str, n: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth: what the busiest link must carry at least, as a share of the tensor.

    Source: nccl-tests, doc/PERFORMANCE.md.

    >>> bus_factor("all_reduce", 8)
    Fraction(7, 4)
    """
    if op not in _BUS:
        raise ValueError(f"nccl-tests gives no bus factor for {op!r}: it has {', '.join(_BUS)}")
    return _BUS[op](units.whole(n, "n", 1))


def algbw(nbytes: int | float, seconds: float) -> float:
    """Algorithm bandwidth in bytes per second: the tensor's size over the time."""
    return nbytes / units.positive(seconds, "seconds")


def busbw(op: str, nbytes: int | float, seconds: float, n: int) -> float:
    """Bus bandwidth in bytes per second: comparable with the hardware's, whatever the number of ranks.

    >>> busbw("all_reduce", 64e6, 0.096, 4)
    1000000000.0
    """
    return float(algbw(nbytes, seconds) * bus_factor(op, n))


# ── a whole training step ──────────────────────────────────────────────────────────────────────────────────────────


def predict(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Ledger:
    """Bytes that each rank sends in one optimizer step, a line for each operation, axis and rank.

    Conventions. All collectives are rings over one flat buffer; activations and weights travel in the precision of training, gradients too
    unless they are kept in fp32.
    - dp: level 0 all-reduces the gradients once; level 1 reduce-scatters them once and all-gathers the new weights; level 2 reduce-scatters
      after every micro-batch; level 3 all-gathers the weights before every forward and backward and reduce-scatters after every backward.
    - tp: in each layer 2 all-reduces of b·s·h in the forward, 2 in the backward, and 2 more where the forward is recomputed; one for the
      vocabulary-parallel embedding, one for the gradient that enters the head, and three of b·s fp32 numbers in the loss.
    - pp: b·s·h to the next stage in the forward, and back in the backward, for every micro-batch; equally many layers on each stage.

    Source: ZeRO 1910.02054, section 7; Megatron-LM 1909.08053, section 3, and its vocabulary-parallel cross-entropy.
    """
    _check_expressible(model, mesh)
    m = train.accumulation(mesh.dp)
    width = 4 if train.precision == "fp32" else 2
    gradient_width = 4 if train.fp32_gradients else width
    b, (s, h, L) = train.micro_batch, model.letters("s h L")
    lines: list[Line] = []

    def book(
        rank: int, axis: str, op: str, numel: int, itemsize: int, times: int, note: str
    ) -> None:
        group = mesh.group(rank, axis)
        if len(group) > 1 and times:
            at = Seat(len(group), group.index(rank), 0, numel * itemsize, itemsize)
            ring = FORMULAS[f"{op}_ring"]
            lines.append(
                Line(
                    op,
                    times * ring.sent(at),
                    axis=axis,
                    rank=rank,
                    count=times * ring.messages(at),
                    note=note,
                )
            )

    for rank in range(mesh.size):
        stage = mesh.coords(rank)["pp"]
        first, last = stage == 0, stage == mesh.pp - 1
        held = _parameters_held(model, mesh, first, last)
        reduce_scatters, all_gathers = ((0, 0), (1, 1), (m, 1), (m, 2 * m))[train.zero]
        book(rank, "dp", "all_reduce", held, gradient_width, int(train.zero == 0), "gradients")
        book(rank, "dp", "reduce_scatter", held, gradient_width, reduce_scatters, "gradients")
        book(rank, "dp", "all_gather", held, width, all_gathers, "weights")

        in_layers = L // mesh.pp * (6 if train.checkpointing == "full" else 4)
        book(
            rank,
            "tp",
            "all_reduce",
            b * s * h,
            width,
            m * in_layers,
            "activations and their gradients in the layers",
        )
        book(rank, "tp", "all_reduce", b * s * h, width, m * (first + last), "embedding and head")
        book(rank, "tp", "all_reduce", b * s, 4, 3 * m * last, "loss")

        neighbours = (not first) + (not last)
        if neighbours:
            lines.append(
                Line(
                    "send",
                    m * neighbours * b * s * h * width,
                    axis="pp",
                    rank=rank,
                    count=m * neighbours,
                    note="activations and their gradients",
                )
            )
    return Ledger(lines)


def _check_expressible(model: ModelConfig, mesh: Mesh) -> None:
    for axis in ("cp", "ep"):
        if getattr(mesh, axis) > 1:
            raise ValueError(
                f"predict has no formula for {axis}={getattr(mesh, axis)} yet: leave {axis}=1"
            )
    if model.num_experts > 1:
        raise ValueError(
            f"predict has no formula for num_experts={model.num_experts} yet: use a dense model"
        )
    if mesh.pp > 1 and model.tied:
        raise ValueError(
            f"with pp={mesh.pp} a tied embedding lives on two stages, for which predict has no formula yet: use a model with tied=False"
        )
    if model.num_layers % mesh.pp:
        raise ValueError(
            f"pp={mesh.pp} does not divide num_layers={model.num_layers}: predict counts equal stages"
        )
    for field in ("num_heads", "num_kv_heads", "d_ff", "vocab_size"):
        if getattr(model, field) % mesh.tp:
            raise ValueError(
                f"tp={mesh.tp} does not divide {field}={getattr(model, field)}: choose another tp, or pad it"
            )


def _parameters_held(model: ModelConfig, mesh: Mesh, first: bool, last: bool) -> int:
    """Parameters on one rank: matrices are split over tp; norms, positions and the biases of row-parallel layers are not."""
    parts, h, L = model.parameters, model.d_model, model.num_layers
    norm = parts["norms"] // (2 * L + 1)
    unsplit = 2 * h * (model.bias is True)
    split = (parts["attention"] + parts["feed-forward"]) // L - unsplit
    held = L // mesh.pp * (split // mesh.tp + unsplit + 2 * norm)
    held += first * (parts["token embedding"] // mesh.tp + parts["position embedding"])
    return held + last * (norm + parts["head"] // mesh.tp)
