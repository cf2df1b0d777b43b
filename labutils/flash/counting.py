"""Bytes that attention moves into and out of fast memory (SRAM): by formula, and counted.

The border is that of one processor (SM). What a cache behind it (L2) spares the slow memory (HBM)
is not seen: HBM moves at least each tensor once, as with one block of all queries.

plain      scores and weights are written to slow memory and read back
flash-1    FlashAttention, algorithm 1: keys outside, queries inside, the output revisited for every
           key block
flash-2    FlashAttention-2, algorithm 1: queries outside, the output written once; what
           `flash.attention` runs
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from labutils import units
from labutils.flash.algorithms import SlowMemory, Tiling, forward, problem_of
from labutils.ledger import Ledger, Line


def block_sizes(fast: int, d: int) -> tuple[int, int]:
    """(block_q, block_k) for a fast memory of `fast` elements and heads of width d.

    Four blocks of width d fit, but for rounding up, and a tile of scores is no larger than one of
    them.

    >>> block_sizes(25600, 64), block_sizes(25600, 128)
    ((64, 100), (50, 50))

    Raises ValueError where not even four rows fit.
    Source: FlashAttention (2205.14135), algorithm 1, line 1.
    """
    fast, d = units.wholes(1, fast=fast, d=d)
    if fast < 4 * d:
        remedy = f"use {4 * d} at least"
        raise ValueError(f"four rows of d={d} do not fit fast={fast} elements: {remedy}")
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
    causal: bool = False,
    itemsize: int = 2,
    stat_itemsize: int = 4,
    whole_blocks: bool = False,
) -> Ledger:
    """Bytes loaded from and stored to slow memory by one forward pass of attention.

    algorithm: "plain", "flash-1" or "flash-2", as above; ValueError for another
    s, d, heads: tokens, the width of a head, and how many of them
    block_q, block_k, causal: of what a tile consists, and whether tiles are left out
    itemsize, stat_itemsize: bytes of a number, and of a row's statistics
    whole_blocks: a short last block is moved as a full one, as a kernel that pads does

    >>> traffic("plain", s=1024, d=64, itemsize=1).total
    4456448
    >>> block_q, block_k = block_sizes(25600, 64)
    >>> numbers = dict(itemsize=1, stat_itemsize=1, whole_blocks=True)
    >>> traffic("flash-1", s=1024, d=64, block_q=block_q, block_k=block_k, **numbers).total
    2348544

    Source: FlashAttention (2205.14135), algorithms 0 and 1; FlashAttention-2 (2307.08691),
    algorithm 1.
    """
    s, d, block_q, block_k, heads, itemsize, stat_itemsize = units.wholes(
        1, s=s, d=d, block_q=block_q, block_k=block_k, heads=heads, itemsize=itemsize,
        stat_itemsize=stat_itemsize,
    )  # fmt: skip
    s_q = s_k = s
    if whole_blocks and algorithm != "plain":
        s_q, s_k = -(-s // block_q) * block_q, -(-s // block_k) * block_k
    tiling = Tiling(s_q, s_k, block_q, block_k, 0 if causal else None)
    tiles = [(rows, columns) for rows in tiling.query_blocks for columns in tiling.keys_of(rows)]
    # Rows of queries, of keys, and of both where their tiles meet: once for each tile.
    q_rows, k_rows = heads * s_q, heads * s_k
    q_met = heads * sum(rows.stop - rows.start for rows, _ in tiles)
    k_met = heads * sum(columns.stop - columns.start for _, columns in tiles)
    row, square = d * itemsize, heads * s_q * s_k * itemsize
    q, k, q_again, k_again = (rows * row for rows in (q_rows, k_rows, q_met, k_met))
    stat, stat_again = q_rows * stat_itemsize, q_met * stat_itemsize
    known: dict[str, tuple[dict[str, int], ...]] = {
        "plain": (dict(Q=q, K=k, S=square, P=square, V=k), dict(S=square, P=square, O=q)),
        "flash-1": (
            dict(K=k, V=k, Q=q_again, O=q_again, l=stat_again, m=stat_again),
            dict(O=q_again, l=stat_again, m=stat_again),
        ),
        "flash-2": (dict(Q=q, K=k_again, V=k_again), dict(O=q, lse=stat)),
    }
    if algorithm not in known:
        raise ValueError(f"no formula for {algorithm!r}: use 'plain', 'flash-1' or 'flash-2'")
    load, store = known[algorithm]
    moved = {("load", name): amount for name, amount in load.items()}
    return ledger_of(moved | {("store", name): amount for name, amount in store.items()})


def counted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
) -> Ledger:
    """Bytes that the forward pass of `flash.attention` moves in a run, counted tile by tile;
    causal, block_q and block_k are its own."""
    problem = problem_of(q, k, v, causal, None, block_q, block_k)
    lse = q.new_empty(*q.shape[:3], 1, dtype=problem.dtype)
    memory = SlowMemory(problem.kv_heads, Q=q, K=k, V=v, O=torch.empty_like(q), lse=lse)
    forward(memory, problem)
    return ledger_of(memory.moved)


def ledger_of(moved: Mapping[tuple[str, str], int]) -> Ledger:
    """Bytes by (direction, name) as a ledger."""
    return Ledger(
        Line(name, amount, component=direction) for (direction, name), amount in moved.items()
    )
