"""Bytes that attention moves into and out of fast memory (SRAM): by formula, and counted.

The border is that of one processor (SM). What a cache behind it (L2) spares the slow memory (HBM)
is not seen: HBM moves at least each tensor once, as with one block of all queries.

plain      scores and weights are written to slow memory and read back
flash-1    FlashAttention, algorithm 1: keys outside, queries inside, the output revisited for every
           key block
flash-2    FlashAttention-2, algorithms 1 and 2: queries outside, the output written once; what
           `flash.attention` runs
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from labutils.flash import algorithms
from labutils.flash.algorithms import Problem, SlowMemory, Tiling
from labutils.ledger import Ledger, Line


def block_sizes(fast: int, d: int) -> tuple[int, int]:
    """(block_q, block_k) for a fast memory of `fast` elements and heads of width d.

    Four blocks of width d fit, and a tile of scores is no larger than one of them.

    >>> block_sizes(25600, 64), block_sizes(25600, 128)
    ((64, 100), (50, 50))

    Source: FlashAttention (2205.14135), algorithm 1, line 1.
    """
    block_k = -(-fast // (4 * d))
    return min(block_k, d), block_k


def traffic(
    algorithm: str,
    *,
    s: int,
    d: int,
    block_q: int = 128,
    block_k: int = 128,
    heads: int = 1,
    kv_heads: int | None = None,
    s_k: int | None = None,
    causal: bool = False,
    backward: bool = False,
    itemsize: int = 2,
    stat_itemsize: int = 4,
    whole_blocks: bool = False,
) -> Ledger:
    """Bytes loaded from and stored to slow memory by one pass of attention.

    s_k, kv_heads: keys and key–value heads, where they are not as many as queries
    backward: the backward pass alone, whose sum dQ is kept in `stat_itemsize`
    itemsize, stat_itemsize: bytes of a number, and of a row's statistics
    whole_blocks: a short last block is moved as a full one, as a kernel that pads does

    >>> traffic("plain", s=1024, d=64, itemsize=1).total
    4456448
    >>> block_q, block_k = block_sizes(25600, 64)
    >>> numbers = dict(itemsize=1, stat_itemsize=1, whole_blocks=True)
    >>> traffic("flash-1", s=1024, d=64, block_q=block_q, block_k=block_k, **numbers).total
    2348544

    Source: FlashAttention (2205.14135), algorithms 0, 1 and 3; FlashAttention-2 (2307.08691),
    algorithms 1 and 2.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    s_k = s if s_k is None else s_k
    offset = s_k - s if causal else None
    if whole_blocks and algorithm != "plain":
        s, s_k = -(-s // block_q) * block_q, -(-s_k // block_k) * block_k
    tiling = Tiling(s, s_k, block_q, block_k, offset)
    q, kv = heads * s * d * itemsize, kv_heads * s_k * d * itemsize
    square, stat = heads * s * s_k * itemsize, heads * s * stat_itemsize
    amounts = _Amounts(q, kv, square, stat, q * stat_itemsize // itemsize, tiling)
    return ledger_of(_moves(algorithm, backward, amounts))


@dataclass(frozen=True)
class _Amounts:
    """Bytes of all queries, keys, scores and statistics, and how often tiles meet them."""

    q: int
    kv: int
    square: int
    stat: int
    dq: int
    tiling: Tiling

    def by_key_blocks(self, nbytes: int) -> int:
        """Bytes of something with a row per query, met once for every key block that it sees."""
        tiling = self.tiling
        met = sum(_length(r) for c in tiling.key_blocks for r in tiling.queries_of(c))
        return nbytes * met // tiling.s_q

    @property
    def kv_by_query_blocks(self) -> int:
        """Bytes of keys or of values, each met once for every query block that sees it."""
        tiling = self.tiling
        met = sum(_length(c) for r in tiling.query_blocks for c in tiling.keys_of(r))
        return self.kv * met // tiling.s_k


def _moves(algorithm: str, backward: bool, x: _Amounts) -> dict[tuple[str, str], int]:
    """Bytes by (direction, name), line by line as the algorithms have it."""
    q, kv, square, stat = x.q, x.kv, x.square, x.stat
    q_again, stat_again = x.by_key_blocks(q), x.by_key_blocks(stat)
    match algorithm, backward:
        case "plain", False:
            load, store = dict(Q=q, K=kv, S=square, P=square, V=kv), dict(S=square, P=square, O=q)
        case "plain", True:
            load = dict(P=2 * square, dO=2 * q, V=kv, dP=square, dS=2 * square, K=kv, Q=q)
            store = dict(dV=kv, dP=square, dS=square, dQ=q, dK=kv)
        case "flash-1", False:
            load = dict(K=kv, V=kv, Q=q_again, O=q_again, l=stat_again, m=stat_again)
            store = dict(O=q_again, l=stat_again, m=stat_again)
        case "flash-2", False:
            again = x.kv_by_query_blocks
            load, store = dict(Q=q, K=again, V=again), dict(O=q, lse=stat)
        case "flash-2", True:
            dq = x.by_key_blocks(x.dq)
            load = dict(dO=q + q_again, O=q, D=stat + stat_again, K=kv, V=kv)
            load |= dict(Q=q_again, lse=stat_again, dQ=dq)
            store = dict(D=stat, dQ=dq, dK=kv, dV=kv)
        case _:
            raise ValueError(f"no formula for {algorithm!r} with {backward=}")
    moved = {("load", name): amount for name, amount in load.items()}
    return moved | {("store", name): amount for name, amount in store.items()}


def counted(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
    d_out: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Ledger]:
    """Results and bytes moved of a real run, in which every tile passes the gate.

    (out,) of the forward pass, or (dq, dk, dv) of the backward pass alone where `d_out` is given.
    """
    problem = algorithms.problem_of(q, k, v, causal, None, block_q, block_k)
    stat = q.new_empty(*q.shape[:3], 1, dtype=problem.dtype)
    scratch = _scratch(algorithm, stat, k)
    memory = SlowMemory(problem.kv_heads, Q=q, K=k, V=v, O=torch.empty_like(q), **scratch)
    run = {"plain": _plain, "flash-1": _flash_1, "flash-2": algorithms.forward}[algorithm]
    run(memory, problem)
    results = ("O",)
    if d_out is not None:
        results = ("dQ", "dK", "dV")
        dq = torch.zeros_like(q, dtype=q.dtype if algorithm == "plain" else problem.dtype)
        gradients = dict(dO=d_out, dQ=dq, dK=torch.empty_like(k), dV=torch.empty_like(v))
        memory.tensors |= SlowMemory(problem.kv_heads, **gradients).tensors
        memory.moved.clear()
        run = {"plain": _plain_backward, "flash-2": algorithms.backward}[algorithm]
        run(memory, problem)
    found = tuple(memory.tensors[name].flatten(1, 2).to(q.dtype) for name in results)
    return found, ledger_of(memory.moved)


def _scratch(algorithm: str, stat: Tensor, k: Tensor) -> dict[str, Tensor]:
    if algorithm == "plain":
        square = (*stat.shape[:3], k.shape[2])
        return {name: k.new_empty(square) for name in ("S", "P", "dP", "dS")}
    if algorithm == "flash-1":
        return dict(l=torch.zeros_like(stat), m=torch.full_like(stat, torch.finfo(stat.dtype).min))
    return dict(lse=stat, D=torch.zeros_like(stat))


def _plain(memory: SlowMemory, problem: Problem) -> None:
    """FlashAttention (2205.14135), algorithm 0: three steps from slow memory to slow memory."""
    load, (rows, columns) = (
        functools.partial(memory.load, dtype=problem.dtype),
        problem.tiling.whole,
    )
    memory.store("S", rows, problem.scores(load("Q", rows), load("K", columns), (rows, columns)))
    memory.store("P", rows, load("S", rows).softmax(-1))
    memory.store("O", rows, torch.bmm(load("P", rows), load("V", columns)))


def _plain_backward(memory: SlowMemory, problem: Problem) -> None:
    """FlashAttention (2205.14135), algorithm 3."""
    load, (rows, columns) = (
        functools.partial(memory.load, dtype=problem.dtype),
        problem.tiling.whole,
    )
    memory.store("dV", columns, torch.bmm(load("P", rows).mT, load("dO", rows)))
    memory.store("dP", rows, torch.bmm(load("dO", rows), load("V", columns).mT))
    weights, d_weights = load("P", rows), load("dP", rows)
    memory.store("dS", rows, weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)))
    memory.store("dQ", rows, torch.bmm(load("dS", rows), load("K", columns)) * problem.scale)
    memory.store("dK", columns, torch.bmm(load("dS", rows).mT, load("Q", rows)) * problem.scale)


def _flash_1(memory: SlowMemory, problem: Problem) -> None:
    """FlashAttention (2205.14135), algorithm 1: the output is right for the keys seen so far."""
    dtype = problem.dtype
    memory.tensors["O"].zero_()
    for columns in problem.tiling.key_blocks:
        k, v = memory.load("K", columns, dtype), memory.load("V", columns, dtype)
        for rows in problem.tiling.queries_of(columns):
            q, out, total, top = (memory.load(name, rows, dtype) for name in ("Q", "O", "l", "m"))
            scores = problem.scores(q, k, (rows, columns))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, kept = (scores - new_top).exp(), total * (top - new_top).exp()
            new_total = kept + weights.sum(-1, keepdim=True)
            some = new_total.masked_fill(new_total == 0, 1)
            memory.store("O", rows, torch.baddbmm(out * kept, weights, v) / some)
            memory.store("l", rows, new_total)
            memory.store("m", rows, new_top)


def _length(block: slice) -> int:
    return block.stop - block.start


def ledger_of(moved: Mapping[tuple[str, str], int]) -> Ledger:
    """Bytes by (direction, name) as a ledger."""
    return Ledger(
        Line(name, amount, component=direction) for (direction, name), amount in moved.items()
    )
