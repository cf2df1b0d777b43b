"""Causal attention over a sequence whose tokens lie on many ranks, [b, heads, s_c, d] on each.

ring_attention      queries stay, keys and values go round; results are merged as they come
ulysses_attention   each rank trades its tokens of all heads for all tokens of its heads
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from labutils import flash, precision, units
from labutils.context_parallel.sequence import SequenceLayout, Tile, layout
from labutils.flash.algorithms import SlowMemory, problem_of
from labutils.world import Comm, Work


def ring_attention(
    q: Float[Tensor, "b a s_c d"],
    k: Float[Tensor, "b g s_c d"],
    v: Float[Tensor, "b g s_c d"],
    comm: Comm,
    kind: str = "zigzag",
    block: int | None = None,
) -> Float[Tensor, "b a s_c d"]:
    """What causal attention over the tokens of all ranks gives those of this one.

    While a rank computes with the keys and values that it has, those of the rank before arrive.
    What the mask empties is passed on and not computed.

    kind: how the sequence is laid out, "contiguous" or "zigzag"; positions must be in q and k
    block: rows and columns of the scores that exist at once; as in `flash.attention` unless given

    Cost: n − 1 times the keys and values of a rank are sent forward; backward they go round again,
    and the sums of their gradients n − 1 times too, in fp32 or wider. Kept are q, k, v, the output
    and its log-sum-exp, of s/n tokens. FLOPs in proportion to `SequenceLayout.work`.
    Source: Liu et al. 2310.01889, section 3; the zig-zag after the Ultra-Scale Playbook.
    """
    return _Ring.apply(q, k, v, comm, _laid_out(q, k, comm, kind), block)


def _laid_out(q: Tensor, k: Tensor, comm: Comm, kind: str) -> SequenceLayout:
    """The layout of the whole sequence, of which the rank has q and k."""
    if q.shape[2] != k.shape[2]:
        got = f"{q.shape[2]} queries and {k.shape[2]} keys"
        raise ValueError(f"each rank brings the queries and keys of the same tokens, got {got}")
    return layout(q.shape[2] * comm.size, comm.size, kind)


def ring(
    q: Float[Tensor, "b a s_c d"],
    k: Float[Tensor, "b g s_c d"],
    v: Float[Tensor, "b g s_c d"],
    whole: SequenceLayout,
    comm: Comm,
    attend: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Float[Tensor, "b a s_c d"], Float[Tensor, "b a s_c"]]:
    """The forward pass of `ring_attention`: output and log-sum-exp of this rank's queries.

    whole: which tokens each rank has
    attend: of (q, k, v, offset) of a tile gives its output and log-sum-exp
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, dtype=wide)  # laid out like q, so ready for the next product
    lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for holder, kv in _round(torch.stack([k, v]), comm):
        for tile in whole.tiles(comm.rank, holder):
            at = tile.rows
            found = attend(q[:, :, at], *kv[:, :, :, tile.columns], tile.offset)
            if holder != comm.rank:  # one's own keys come first, and all queries see some
                found = flash.merge(out[:, :, at], lse[:, :, at], *found)
            out[:, :, at], lse[:, :, at] = found
    return out.to(q.dtype), lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, offset: int | None, block: int | None
) -> tuple[Tensor, Tensor]:
    return flash.attention(q, k, v, causal=True, offset=offset, block_q=block, block_k=block)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        comm: Comm,
        whole: SequenceLayout,
        block: int | None,
    ) -> Tensor:
        with comm.record("ring forward"):
            out, lse = ring(q, k, v, whole, comm, functools.partial(_attend, block=block))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.comm = comm
        ctx.whole = whole
        ctx.block = block
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        comm: Comm = ctx.comm
        mine: Tensor | None = None
        on_their_way: tuple[Any, ...] = ()
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        delta = (d_out * out.to(lse.dtype)).sum(-1)  # D of `flash.backward`, whatever the keys
        with comm.record("ring backward"):
            for holder, kv in _round(torch.stack([k, v]), comm):
                d_kv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
                for tile in ctx.whole.tiles(comm.rank, holder):
                    _backward_tile(tile, (q, lse, d_out, delta, dq), kv, d_kv, ctx.block)
                # A sum follows its keys one rank behind the work on them, each rank adds its own,
                # and the last one sends it home, where the owner's own part has waited.
                if mine is None:
                    mine = d_kv
                    continue
                if on_their_way:
                    d_kv += _arrived(on_their_way)
                on_their_way = _pass_on(d_kv, comm)
            assert mine is not None  # a round begins with one's own
            if on_their_way:
                mine = mine + _arrived(on_their_way)
        dk, dv = mine
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _round(kv: Tensor, comm: Comm) -> Iterator[tuple[int, Tensor]]:
    """Whose, and the keys and values of each rank, one's own first; the next ones arrive while the
    caller works with these, which must not be written to."""
    n, i = comm.size, comm.rank
    for step in range(n - 1):
        on_their_way = _pass_on(kv, comm)
        yield (i - step) % n, kv
        kv = _arrived(on_their_way)
    yield (i + 1) % n, kv


def _pass_on(x: Tensor, comm: Comm) -> tuple[Work, Work]:
    """x goes to the next rank, and a tensor like it comes from the one before, both by and by."""
    n, i = comm.size, comm.rank
    return comm.isend(x, (i + 1) % n), comm.irecv(torch.empty_like(x), (i - 1) % n)


def _arrived(on_their_way: tuple[Work, Work]) -> Tensor:
    """What came, once both messages are through."""
    out, back = on_their_way
    out.wait()
    return back.wait()


def _backward_tile(
    tile: Tile, of_queries: tuple[Tensor, ...], kv: Tensor, d_kv: Tensor, block: int | None
) -> None:
    """Adds to dQ, and writes to dK and dV, what a tile gives. Log-sum-exp and D are those over all
    keys: with them the weights of a tile are their part of the whole softmax."""
    q, lse, d_out, delta, dq = (x[:, :, tile.rows] for x in of_queries)
    (k, v), (dk, dv) = (x[:, :, :, tile.columns] for x in (kv, d_kv))
    problem = problem_of(q, k, v, True, tile.offset, block, block)
    tensors = dict(Q=q, K=k, V=v, lse=lse[..., None], dO=d_out, D=delta[..., None])
    with precision.own_formats(q.device.type):
        memory = SlowMemory(problem.kv_heads, **tensors, dQ=dq, dK=dk, dV=dv)
        flash.backward_of_keys(memory, problem)


def ulysses_attention(
    q: Float[Tensor, "b a s_c d"],
    k: Float[Tensor, "b g s_c d"],
    v: Float[Tensor, "b g s_c d"],
    comm: Comm,
    kind: str = "zigzag",
    block: int | None = None,
) -> Float[Tensor, "b a s_c d"]:
    """The same by all-to-all: each rank gets all tokens of its a/n heads, computes, and gives the
    outputs back. Where there are fewer key–value heads than ranks, each is sent to n/g of them.

    kind, block: as in `ring_attention`

    Cost: (a + 2·max(g, n))·b·s_c·d numbers go in and a·b·s_c·d come out, of which (n − 1)/n travel,
    forward and backward alike. Kept are q, k, v, the output and its log-sum-exp of those heads.
    Source: Jacobs et al. 2309.14509.
    Raises ValueError where n does not divide a, and neither divides g nor is a multiple of it.
    """
    whole, n = _laid_out(q, k, comm, kind), comm.size
    repeats = kv_heads(q.shape[1], k.shape[1], n) // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
    heads = [x.unflatten(1, (n, -1)) for x in (q, k, v)]
    mine = heads_for_tokens(torch.cat(heads, 2).flatten(1, 2), whole, comm)
    q, k, v = mine.split([x.shape[2] for x in heads], 1)
    out, _ = _attend(q, k, v, None, block)
    return tokens_for_heads(out, whole, comm)


def heads_for_tokens(
    x: Float[Tensor, "b a s_c d"], whole: SequenceLayout, comm: Comm
) -> Float[Tensor, "b a_c s d"]:
    """All tokens of this rank's heads, for this rank's tokens of all heads: rank r gets the r-th
    n-th of the heads."""
    tokens = _Exchange.apply(x.unflatten(1, (comm.size, -1)).movedim(1, 0).contiguous(), comm)
    return whole.join(tokens.unbind(), 2)


def tokens_for_heads(
    x: Float[Tensor, "b a_c s d"], whole: SequenceLayout, comm: Comm
) -> Float[Tensor, "b a s_c d"]:
    """The way back."""
    shares = torch.stack([whole.split(x, rank, 2) for rank in range(comm.size)])
    return _Exchange.apply(shares, comm).movedim(0, 1).flatten(1, 2)


def kv_heads(a: int, g: int, n: int) -> int:
    """How many key–value heads n ranks of Ulysses have together: g, or n where g is less.

    >>> kv_heads(32, 8, 4), kv_heads(32, 8, 16)
    (8, 16)

    Raises ValueError for heads that n ranks cannot share out.
    """
    a, g, n = units.wholes(1, a=a, g=g, n=n)
    if a % n or (g % n and n % g):
        both = f"{a} heads and {g} key–value heads"
        raise ValueError(f"cp={n} does not share out {both}: use ring attention, or fewer ranks")
    return max(g, n)


class _Exchange(torch.autograd.Function):
    """Row r of x to rank r, from each its row for this one; backward the same."""

    @staticmethod
    def forward(ctx: Any, x: Shaped[Tensor, "n *row"], comm: Comm) -> Shaped[Tensor, "n *row"]:
        ctx.comm = comm
        with comm.record("all_to_all forward"):
            return comm.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with ctx.comm.record("all_to_all backward"):
            return ctx.comm.all_to_all(grad.contiguous()), None
