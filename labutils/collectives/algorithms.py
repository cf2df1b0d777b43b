"""Collectives over send and receive: star, binomial tree, ring (Patarasuk and Yuan), recursive
halving and doubling (Rabenseifner), pairwise exchange.

Each is a function of a tensor and a `comm`; it returns its result and leaves its input alone.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from labutils import units
from labutils.collectives.costs import power_of_two, widths


@runtime_checkable
class Peers(Protocol):
    """What an algorithm needs of `size` ranks: `world.Comm` has it; so may a toy of your own."""

    rank: int
    size: int

    def send(self, x: Tensor, dst: int) -> None: ...
    def recv(self, out: Tensor, src: int, *, reduce: str | None = None) -> Tensor: ...
    def send_recv(
        self, x: Tensor, dst: int, out: Tensor, src: int, *, reduce: str | None = None
    ) -> Tensor: ...
    def record(self, name: str) -> AbstractContextManager: ...


_MOST = 1 << 14  # ranks that a star's root, or a pairwise exchange, deals with one by one
REDUCTIONS = ("sum", "product", "min", "max")

Same = Shaped[Tensor, "*shape"]
Rows = Shaped[Tensor, "rows *rest"]
Share = Shaped[Tensor, "share *rest"]
Sizes = Sequence[int] | None  # rows of each rank; unless given, equally many


class _Pieces:
    """x cut along its rows, into pieces of these sizes or, of a number n, into n shares as
    `costs.shares` cuts; where a piece lies is worked out when it is asked for, as groups may have a
    billion ranks."""

    def __init__(self, x: Tensor, sizes: Sequence[int] | int) -> None:
        self.x, self.nbytes = x.detach(), x.nbytes
        if isinstance(sizes, int):
            base, larger = divmod(len(x), sizes)
            self.start = lambda i: i * base + min(i, larger)
        else:
            self.start = [0, *itertools.accumulate(sizes)].__getitem__

    def __getitem__(self, i: int) -> Tensor:
        return self.x[self.start(i) : self.start(i + 1)]

    def bytes_of(self, i: int) -> int:
        """The bytes of piece i, without making it."""
        rows = self.start(i + 1) - self.start(i)
        return rows * self.nbytes // max(len(self.x), 1)


def is_rank(number: Any, size: int) -> bool:
    """Whether this is the number of one of `size` ranks; True is none, though Python takes it
    for 1."""
    return units.is_whole(number) and bool(0 <= number < size)


def _collective(algorithm: Callable) -> Callable:
    """The algorithm, which names its lines of the ledger, and refuses on every rank alike what no
    algorithm could do."""
    name = algorithm.__name__

    @functools.wraps(algorithm)
    def collective(x: Tensor, comm: Peers, *args, **kwargs):
        if not (isinstance(x, Tensor) and hasattr(comm, "send_recv")):
            example = f"{name}(x, rank.comm())"
            raise TypeError(f"write {example}: got {_kind(x)} and {_kind(comm)}")
        if (op := kwargs.get("op", "sum")) not in REDUCTIONS:
            mean = op in ("mean", "avg")
            other = "sum, then divide by comm.size" if mean else f"use {', '.join(REDUCTIONS)}"
            raise ValueError(f"{name} cannot reduce by op={op!r}: {other}")
        for peer in ("src", "dst"):
            if not is_rank(rank := kwargs.get(peer, 0), comm.size):
                group = f"a rank of this group of {comm.size}: use 0 … {comm.size - 1}"
                raise ValueError(f"{name}: {peer}={rank!r} is not {group}")
        with comm.record(name):
            return algorithm(x, comm, *args, **kwargs)

    return collective


# ── one to all, and all to one ────────────────────────────────────────────────────────────────────


@_collective
def broadcast_star(x: Same, comm: Peers, *, src: int = 0) -> Same:
    """Rank src's x, on every rank: src sends it to each of the others in turn.

    Elsewhere than at src only the shape and dtype of x matter, as in torch.
    """
    if comm.rank != src:
        return comm.recv(x.new_empty(x.shape), src)
    x = _copy(x)
    for rank in _others(comm):
        comm.send(x, rank)
    return x


@_collective
def broadcast_tree(x: Same, comm: Peers, *, src: int = 0) -> Same:
    """Rank src's x, on every rank: whoever has it passes it on, so that the number of ranks that
    have it doubles in each step."""
    x, me = _copy(x), (comm.rank - src) % comm.size
    for width in widths(comm.size):
        if width <= me < 2 * width:
            comm.recv(x, (comm.rank - width) % comm.size)
        elif me < width and me + width < comm.size:
            comm.send(x, (comm.rank + width) % comm.size)
    return x


@_collective
def scatter_star(x: Rows, comm: Peers, *, src: int = 0) -> Share:
    """This rank's share of the rows of src's x; elsewhere only the shape and dtype of x matter."""
    pieces = _Pieces(x.contiguous(), comm.size)
    if comm.rank != src:
        mine = pieces[comm.rank]
        return comm.recv(mine.new_empty(mine.shape), src)
    for rank in _others(comm):
        comm.send(pieces[rank], rank)
    return pieces[src].clone()


@_collective
def gather_star(x: Share, comm: Peers, *, dst: int = 0, sizes: Sizes = None) -> Rows | None:
    """At rank dst the rows of all ranks, in rank order, and None elsewhere.

    `sizes` are the rows that each rank brings.
    """
    if comm.rank != dst:
        comm.send(x.contiguous(), dst)
        return None
    whole, pieces = _gathered(x, comm, sizes)
    for rank in _others(comm):
        comm.recv(pieces[rank], rank)
    return whole


@_collective
def reduce_star(x: Same, comm: Peers, *, dst: int = 0, op: str = "sum") -> Same | None:
    """At rank dst the sum (or `op`) over all ranks, and None elsewhere: everybody sends to dst,
    which adds in rank order after its own."""
    if comm.rank != dst:
        comm.send(x.contiguous(), dst)
        return None
    x = _copy(x)
    for rank in _others(comm):
        comm.recv(x, rank, reduce=op)
    return x


@_collective
def reduce_tree(x: Same, comm: Peers, *, dst: int = 0, op: str = "sum") -> Same | None:
    """At rank dst the sum (or `op`) over all ranks, and None elsewhere: `broadcast_tree` run
    backwards. In each step the upper half of the ranks that are left send to the lower half, and
    are done."""
    x, me = _copy(x), (comm.rank - dst) % comm.size
    for width in reversed(widths(comm.size)):
        if width <= me < 2 * width:
            comm.send(x, (comm.rank - width) % comm.size)
        elif me < width and me + width < comm.size:
            comm.recv(x, (comm.rank + width) % comm.size, reduce=op)
    return x if comm.rank == dst else None


# ── all to all: the ring ──────────────────────────────────────────────────────────────────────────


@_collective
def reduce_scatter_ring(
    x: Rows, comm: Peers, *, op: str = "sum", out: Share | None = None
) -> Share:
    """This rank's share of the rows of the sum (or `op`) over all ranks.

    With an `out` that is this rank's own piece of x, all of x is scratch and nothing is allocated,
    as in an in-place call of NCCL.
    Invariant: piece j is summed in the order of the ring, starting at rank j + 1 and ending at
    rank j, whatever the timing.

    Raises ValueError for an `out` in x that is not that piece.
    """
    own = out if out is not None and _storage(out) == _storage(x) else None
    pieces = _Pieces(_copy(x) if own is None else x, comm.size)
    mine = pieces[comm.rank]
    if own is not None and not (_same_place(own, mine) and own.shape == mine.shape):
        piece = f"its piece {comm.rank} of {comm.size}: give that piece, or memory of its own"
        raise ValueError(f"rank {comm.rank}: out lies in x, but is not {piece}")
    ring_hops(pieces, comm, comm.rank - 1, op)
    return _into(out, mine) if own is None else own


@_collective
def all_gather_ring(x: Share, comm: Peers, *, sizes: Sizes = None, out: Rows | None = None) -> Rows:
    """The rows of all ranks, in rank order, on every rank.

    `sizes` are the rows that each rank brings, if they differ; x may be a piece of `out`.
    """
    whole, pieces = _gathered(x, comm, sizes, out)
    ring_hops(pieces, comm, comm.rank)
    return whole


@_collective
def all_reduce_ring(x: Same, comm: Peers, *, op: str = "sum", out: Same | None = None) -> Same:
    """The sum (or `op`) over all ranks, on every rank (in `out` if given): a ring reduce-scatter,
    then a ring all-gather of what it left.

    Invariant: all ranks hold the same bits, because each piece is summed once, in ring order, and
    then only copied.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009; Goyal et al. 1706.02677, section 4.1.
    """
    out = _into(out, x)
    flat = out.detach().view(-1)
    pieces = _Pieces(flat, comm.size)
    ring_hops(pieces, comm, comm.rank - 1, op)
    ring_hops(pieces, comm, comm.rank)
    return out


def ring_hops(pieces: _Pieces, comm: Peers, first: int, op: str | None = None) -> None:
    """n − 1 hops: give piece `first` to the next rank, then pass on what came in the hop before,
    reduced by `op` with this rank's own.

    From piece rank − 1 on, it leaves the sum over all ranks in pieces[rank]. Without an `op`, when
    each rank begins with pieces[rank] and gives that first, it fills every piece.
    """
    n, i = comm.size, comm.rank
    # In a dry run no one is behind it, and the hops are booked as one: the loop's n − 1 messages to
    # one rank, in which it gives every piece but first + 1 and takes every piece but first.
    if hasattr(comm, "book"):
        given, taken = (pieces.nbytes - pieces.bytes_of((first + k) % n) for k in (1, 0))
        return comm.book((i + 1) % n, given, (i - 1) % n, taken, n - 1)
    for hop in range(n - 1):
        give, take = (first - hop) % n, (first - 1 - hop) % n
        comm.send_recv(pieces[give], (i + 1) % n, pieces[take], (i - 1) % n, reduce=op)


# ── all-reduce in other ways ──────────────────────────────────────────────────────────────────────


@_collective
def all_reduce_naive(x: Same, comm: Peers, *, op: str = "sum", out: Same | None = None) -> Same:
    """The sum (or `op`) over all ranks, on every rank (in `out` if given): all send to rank 0,
    which adds in rank order and sends the result back to each.
    """
    total = reduce_star(x, comm, op=op)
    total = broadcast_star(x if total is None else total, comm)
    return total if out is None else _into(out, total)


@_collective
def all_reduce_tree(x: Same, comm: Peers, *, op: str = "sum", out: Same | None = None) -> Same:
    """The sum (or `op`) over all ranks, on every rank (in `out` if given): up the binomial tree to
    rank 0, and down again.
    """
    total = reduce_tree(x, comm, op=op)
    total = broadcast_tree(x if total is None else total, comm)
    return total if out is None else _into(out, total)


@_collective
def all_reduce_halving_doubling(
    x: Same, comm: Peers, *, op: str = "sum", out: Same | None = None
) -> Same:
    """The sum (or `op`) over all ranks, on every rank (in `out` if given): swap halves with a
    partner far away, then quarters with a nearer one, …, and back.

    With P the largest power of two in N, ranks P, P + 1, … first add their tensor to that of rank
    0, 1, …, and get the result at the end.
    Source: Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur,
    Rabenseifner and Gropp, 2005.
    """
    out = _into(out, x)
    flat = out.detach().view(-1)
    i, p = comm.rank, power_of_two(comm.size)
    extra = i + p if i + p < comm.size else None
    if i >= p:
        comm.send(flat, i - p)
        comm.recv(flat, i - p)
        return out
    if extra is not None:
        comm.recv(flat, extra, reduce=op)
    start = _Pieces(flat, p).start

    def block(rank: int, width: int) -> Tensor:
        """The pieces of the `width` ranks among whom `rank` stands, a stretch of the whole."""
        first = rank - rank % width
        return flat[start(first) : start(first + width)]

    for width in reversed(widths(p)):
        comm.send_recv(block(i ^ width, width), i ^ width, block(i, width), i ^ width, reduce=op)
    for width in widths(p):
        comm.send_recv(block(i, width), i ^ width, block(i ^ width, width), i ^ width)
    if extra is not None:
        comm.send(flat, extra)
    return out


# ── everybody to everybody ────────────────────────────────────────────────────────────────────────


@_collective
def all_to_all_pairwise(
    x: Rows, comm: Peers, *, send_sizes: Sizes = None, recv_sizes: Sizes = None
) -> Shaped[Tensor, "received *rest"]:
    """The rows that every rank has for this one, in rank order: in step k send to the rank k after
    you and receive from the rank k before.

    `send_sizes` are the rows for each rank (equal shares of x unless given), `recv_sizes` the rows
    that each rank has for this one.

    Raises ValueError where the sizes do not add up to the rows of x.
    """
    n, i = comm.size, comm.rank
    send_sizes = _row_counts(send_sizes, n, "send_sizes")
    recv_sizes = _row_counts(recv_sizes, n, "recv_sizes")
    outbox = _Pieces(x.contiguous(), send_sizes or n)
    mine = outbox.start(i + 1) - outbox.start(i)
    if outbox.start(n) != len(x) or (recv_sizes and recv_sizes[i] != mine):
        both = f"send_sizes={send_sizes} and recv_sizes={recv_sizes}"
        raise ValueError(f"{both} must add up to the {len(x)} rows of x and agree on rank {i}")
    out = x.new_empty(sum(recv_sizes) if recv_sizes else n * mine, *x.shape[1:])
    inbox = _Pieces(out, recv_sizes or n)
    inbox[i].copy_(outbox[i])
    for k in range(1, _countable(n)):
        to, source = (i + k) % n, (i - k) % n
        if hasattr(comm, "book"):  # as `ring_hops` in a dry run, but each has a peer of its own
            comm.book(to, outbox.bytes_of(to), source, inbox.bytes_of(source), 1)
        else:
            comm.send_recv(outbox[to], to, inbox[source], source)
    return out


@_collective
def shift(x: Same, comm: Peers) -> Same:
    """The x of the rank before this one, when all pass theirs to the next at once, with nothing but
    blocking sends and receives.

    Even ranks send first and odd ranks receive first: two steps for an even number of ranks, three
    for an odd one, and no circle of waiting ranks.
    """
    if comm.size == 1:
        return _copy(x)
    received = x.new_empty(x.shape)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2 == 0:
        comm.send(x.contiguous(), right)
        comm.recv(received, left)
    else:
        comm.recv(received, left)
        comm.send(x.contiguous(), right)
    return received


# ── small helpers ─────────────────────────────────────────────────────────────────────────────────


def _kind(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def _countable(n: int) -> int:
    """n, after checking that one rank can deal with each of so many, one after the other."""
    if n > _MOST:
        many = f"each of {n:,} ranks would get a message of its own"
        raise ValueError(f"{many}: use {_MOST:,} at most, or what goes by a ring or a tree")
    return n


def _others(comm: Peers) -> list[int]:
    return [rank for rank in range(_countable(comm.size)) if rank != comm.rank]


def _copy(x: Tensor) -> Tensor:
    return _into(None, x)


def _storage(x: Tensor) -> int:
    """The identity of the memory under x; unlike an address, a fake tensor has one too."""
    return x.untyped_storage()._cdata


def _same_place(x: Tensor, y: Tensor) -> bool:
    return (_storage(x), x.storage_offset()) == (_storage(y), y.storage_offset())


def _row_counts(sizes: Sizes, n: int, name: str) -> tuple[int, ...] | None:
    """The rows that each of n ranks brings or takes; None where all are alike."""
    if sizes is None:
        return None
    if len(sizes) != n:
        raise ValueError(f"{name}={tuple(sizes)} names {len(sizes)} ranks, but the group has {n}")
    return tuple(units.whole(size, name) for size in sizes)


def _gathered(
    x: Tensor, comm: Peers, sizes: Sizes, out: Tensor | None = None
) -> tuple[Tensor, _Pieces]:
    """Room for the rows of all ranks, whole and cut by rank, with this rank's own in place."""
    sizes = _row_counts(sizes, comm.size, "sizes")
    if sizes and sizes[comm.rank] != len(x):
        raise ValueError(f"rank {comm.rank} brings {len(x)} rows, not as in sizes={sizes}")
    whole = _fitting(out, (sum(sizes) if sizes else len(x) * comm.size, *x.shape[1:]), x)
    pieces = _Pieces(whole, sizes or comm.size)
    if not _same_place(pieces[comm.rank], x):
        pieces[comm.rank].copy_(x.detach())
    return whole, pieces


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
        got = f"got {tuple(out.shape)} of {out.dtype}"
        raise ValueError(f"out must be contiguous, {shape} of {x.dtype} like the result, {got}")
    return out
