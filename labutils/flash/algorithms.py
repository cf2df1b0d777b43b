"""FlashAttention: exact attention whose scores never exist all at once.

    plain            every score at once: s_q · s_k of them for each head
    online           one row of scores that arrives block by block, each block seen once
    OnlineSoftmax    what it keeps: a maximum, a sum and an output per row
    forward          tiles of scores, one OnlineSoftmax for a block of queries
    backward         the same tiles once more, recomputed from the log-sum-exp
    attention        both as one autograd function that keeps q, k, v, out and lse
    merge            two results over disjoint keys into one

Query i sees key j where j ≤ i + offset if attention is causal. The default offset, s_k − s_q, lets
the last query see the last key, as FlashAttention has done since version 2.1; torch's `is_causal`
is offset 0. A row that sees no key gives out = 0 and lse = −inf.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from labutils import precision, units

_LOG2_E = math.log2(math.e)


def plain(
    q: Float[Tensor, "b a s_q d"],
    k: Float[Tensor, "b g s_k d"],
    v: Float[Tensor, "b g s_k d"],
    *,
    causal: bool = False,
    offset: int | None = None,
) -> tuple[Float[Tensor, "b a s_q d"], Float[Tensor, "b a s_q"]]:
    """Plain attention and the log-sum-exp of each row: every score, then every weight.

    causal, offset: which keys a query sees, as above

    Cost: 4·s_q·s_k·d FLOPs a head forward, and s_q·s_k weights a head kept for the backward.
    """
    problem = problem_of(q, k, v, causal, offset)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * problem.scale
    if problem.tiling.offset is not None:
        all_pairs = scores.new_ones(scores.shape[2:], dtype=torch.bool)
        hidden = all_pairs.triu(problem.tiling.offset + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.to(problem.dtype).logsumexp(-1)
    blind = (lse == -math.inf)[..., None]  # rows without a key, which softmax would make 0/0
    if blind.any():
        scores = scores.masked_fill(blind, 0)
    return (scores.softmax(-1) @ v).masked_fill(blind, 0), lse


class OnlineSoftmax:
    """Σ softmax(scores)·values of many rows whose scores arrive block by block.

    It keeps a maximum, a sum and an output per row, and nothing else.

    >>> state = OnlineSoftmax(torch.zeros(1, 1, 1, dtype=torch.float64))
    >>> for pair in [(0.0, 1.0), (1000.0, 2.0), (1000.0, 4.0)]:
    ...     score, value = torch.tensor(pair, dtype=torch.float64).view(2, 1, 1, 1)
    ...     state.add(score, value)
    >>> out, lse = state.finish()
    >>> out.item(), round(lse.item() - 1000, 4)
    (3.0, 0.6931)

    Invariant: after every block, `total` is Σ exp(score − top) and `out` is Σ exp(score −
    top)·value over all blocks so far.
    Source: FlashAttention-2 (2307.08691), algorithm 1; its line 10 prints an inverse, diag(e^(m_old
    − m_new))⁻¹, that must not be there.
    """

    def __init__(self, zeros: Float[Tensor, "heads rows width"]) -> None:
        self.out = zeros
        self.total = zeros.new_zeros(*zeros.shape[:2], 1)
        # The lowest finite number: a row that has seen nothing must not compute −inf − (−inf).
        self.top = torch.full_like(self.total, torch.finfo(zeros.dtype).min)

    def add(
        self, scores: Float[Tensor, "heads rows block"], values: Float[Tensor, "heads block width"]
    ) -> None:
        """Takes one more block into account. Overwrites `scores`."""
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        rescale = _exp(self.top - top)  # from the old maximum to the new one
        weights = _exp(scores.sub_(top))
        self.total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        self.out.mul_(rescale).baddbmm_(weights, values)
        self.top = top

    def finish(self) -> tuple[Float[Tensor, "heads rows width"], Float[Tensor, "heads rows 1"]]:
        """The normalized output and the log-sum-exp; a row without any score gives 0 and −inf."""
        return self.out / self.total.masked_fill(self.total == 0, 1), self.top + self.total.log()


def online(
    blocks: Iterable[tuple[Float[Tensor, "_"], Float[Tensor, "_ width"]]],
) -> tuple[Float[Tensor, "width"], Float[Tensor, ""]]:
    """Output and log-sum-exp of one query whose (scores, values) arrive in blocks, each seen once.

    >>> scores, values = torch.tensor([0.0, 2.0, 2.0]), torch.eye(3)
    >>> online(zip(scores.split(2), values.split(2), strict=True))[0]
    tensor([0.0634, 0.4683, 0.4683])

    Raises ValueError where no block comes.
    """
    state = None
    for scores, values in blocks:
        dtype = _accumulator(values.dtype)
        if state is None:
            state = OnlineSoftmax(values.new_zeros(1, 1, values.shape[1], dtype=dtype))
        state.add(scores[None, None].to(dtype, copy=True), values[None].to(dtype))
    if state is None:
        raise ValueError("no block has come: give one at least")
    out, lse = state.finish()
    return out[0, 0], lse[0, 0, 0]


@dataclass(frozen=True)
class Tiling:
    """How s_q × s_k scores are cut into tiles; a causal mask with `offset` leaves some out."""

    s_q: int
    s_k: int
    block_q: int
    block_k: int
    offset: int | None

    def __post_init__(self) -> None:
        tiles = -(-self.s_q // self.block_q) * -(-self.s_k // self.block_k)
        blocks = f"{self.s_q} × {self.s_k} scores, {self.block_q} × {self.block_k} to a tile, are"
        units.writable(tiles, blocks, "take larger blocks")

    @property
    def whole(self) -> tuple[slice, slice]:
        """All queries and all keys: the one tile of plain attention."""
        return slice(0, self.s_q), slice(0, self.s_k)

    @functools.cached_property
    def query_blocks(self) -> list[slice]:
        """Blocks of queries; the last may be short."""
        return _blocks(self.s_q, self.block_q)

    @functools.cached_property
    def key_blocks(self) -> list[slice]:
        """Blocks of keys; the last may be short."""
        return _blocks(self.s_k, self.block_k)

    def visible(self, rows: slice, columns: slice) -> bool:
        """Whether any query of `rows` sees any key of `columns`: else the tile is not computed."""
        return self.offset is None or columns.start <= rows.stop - 1 + self.offset

    def cut(self, rows: slice, columns: slice) -> bool:
        """Whether any query of `rows` must not see any key of `columns`."""
        return self.offset is not None and columns.stop - 1 > rows.start + self.offset

    def keys_of(self, rows: slice) -> Iterator[slice]:
        """The key blocks that queries `rows` see."""
        return (columns for columns in self.key_blocks if self.visible(rows, columns))

    def queries_of(self, columns: slice) -> Iterator[slice]:
        """The query blocks that see keys `columns`."""
        return (rows for rows in self.query_blocks if self.visible(rows, columns))


# What cuts scores into tiles; runs without values need fewer of them (`FewTiles`).
TILING: ContextVar[Callable[..., Tiling]] = ContextVar("tiling", default=Tiling)


class SlowMemory:
    """Named tensors in slow memory (HBM): tiles leave by `load`, come back by `store`, are counted.

    Tensors come as (b, heads, s, width) and are held as (b, g, r, s, width), r query heads to a
    key–value head. A tile is handed out as (b·g, r·rows, width): the heads that share keys become
    rows of one matrix, so that grouped queries need no copy of a key.
    """

    def __init__(self, kv_heads: int, **tensors: Tensor) -> None:
        self.tensors = {name: x.unflatten(1, (kv_heads, -1)) for name, x in tensors.items()}
        self.moved: dict[tuple[str, str], int] = {}  # bytes by (direction, name)

    def _tile(self, direction: str, name: str, at: slice) -> Tensor:
        tile = self.tensors[name][..., at, :]
        self.moved[direction, name] = self.moved.get((direction, name), 0) + tile.nbytes
        return tile

    def load(self, name: str, at: slice, dtype: torch.dtype) -> Float[Tensor, "heads rows width"]:
        """Rows `at` of a tensor in the arithmetic's dtype. To be read only: it may be a view."""
        return self._tile("load", name, at).flatten(2, 3).flatten(0, 1).to(dtype)

    def store(self, name: str, at: slice, tile: Float[Tensor, "heads rows width"]) -> None:
        """Writes rows `at` of a tensor, in the tensor's own dtype."""
        place = self._tile("store", name, at)
        place.copy_(tile.view(place.shape))


@dataclass(frozen=True)
class Problem:
    """What one call of attention has to compute, besides its tensors.

    scale: what scores are multiplied with, 1/√d
    dtype: of the arithmetic, at least float32
    """

    tiling: Tiling
    scale: float
    kv_heads: int
    dtype: torch.dtype

    def scores(
        self, q: Float[Tensor, "heads q d"], k: Float[Tensor, "heads k d"], at: tuple[slice, slice]
    ) -> Float[Tensor, "heads q k"]:
        """One tile of scores, −inf where a query must not look."""
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=self.scale)
        return self._masked(scores, at)

    def weights(
        self,
        q: Float[Tensor, "heads q d"],
        k: Float[Tensor, "heads k d"],
        lse: Float[Tensor, "heads q 1"],
        at: tuple[slice, slice],
    ) -> Float[Tensor, "heads q k"]:
        """exp(scores − lse) of tile `at`. Subtracting and the base of 2 are the product's own."""
        lse = lse.masked_fill(lse == -math.inf, 0)
        powers = torch.baddbmm(lse * -_LOG2_E, q, k.mT, alpha=self.scale * _LOG2_E)
        return self._masked(powers, at).exp2_()

    def _masked(
        self, scores: Float[Tensor, "heads q k"], at: tuple[slice, slice]
    ) -> Float[Tensor, "heads q k"]:
        """The scores themselves, made −inf where a query must not look.

        Zeros and then −inf, and not `masked_fill_`, which is four times as slow here."""
        if self.tiling.cut(*at):
            (rows, columns), sizes = at, [block.stop - block.start for block in at]
            first = rows.start + self.tiling.offset - columns.start + 1  # hidden from the first row
            hidden = scores.new_full(sizes, -math.inf).triu_(first)
            scores.unflatten(1, (-1, sizes[0])).tril_(first - 1).add_(hidden)
        return scores


def forward(memory: SlowMemory, problem: Problem) -> None:
    """Fills O and lse: each block of queries meets the key blocks that it sees, one by one.

    Source: FlashAttention-2 (2307.08691), algorithm 1.
    """
    dtype = problem.dtype
    for rows in problem.tiling.query_blocks:
        q = memory.load("Q", rows, dtype)
        state = OnlineSoftmax(q.new_zeros(q.shape))
        for columns in problem.tiling.keys_of(rows):
            k, v = memory.load("K", columns, dtype), memory.load("V", columns, dtype)
            state.add(problem.scores(q, k, (rows, columns)), v)
        out, lse = state.finish()
        memory.store("O", rows, out)
        memory.store("lse", rows, lse)


def backward(memory: SlowMemory, problem: Problem) -> None:
    """Fills dK and dV and adds to dQ.

    `D` holds what the gradient of lse contributes, negated, and receives rowsum(dO ∘ O).

    The weights come back from the scores and lse alone: exp(score − lse). With dP = dO·Vᵀ, softmax
    passes on dS = P ∘ (dP − D), where D = rowsum(P ∘ dP) = rowsum(dO ∘ O) needs no score; a
    gradient of lse adds P ∘ dlse, which is why it is D − dlse.

    Source: FlashAttention-2 (2307.08691), algorithm 2.
    """
    for rows in problem.tiling.query_blocks:
        d_out, out = (memory.load(name, rows, problem.dtype) for name in ("dO", "O"))
        minus_d_lse = memory.load("D", rows, problem.dtype)
        memory.store("D", rows, minus_d_lse + (d_out * out).sum(-1, keepdim=True))
    backward_of_keys(memory, problem)


def backward_of_keys(memory: SlowMemory, problem: Problem) -> None:
    """Fills dK and dV and adds to dQ, once `D` is complete, whichever keys these are."""
    dtype = problem.dtype
    for columns in problem.tiling.key_blocks:
        k, v = memory.load("K", columns, dtype), memory.load("V", columns, dtype)
        dk, dv = k.new_zeros(k.mT.shape), v.new_zeros(v.mT.shape)  # no product turns a tile
        for rows in problem.tiling.queries_of(columns):
            _backward_tile(memory, problem, (rows, columns), k, v, dk, dv)
        memory.store("dK", columns, dk.mT)
        memory.store("dV", columns, dv.mT)


def _backward_tile(
    memory: SlowMemory, problem: Problem, tile: tuple[slice, slice], *keys: Tensor
) -> None:
    """Adds what one tile contributes to dQ, in slow memory, and to dKᵀ and dVᵀ."""
    (k, v, dk, dv), rows, dtype = keys, tile[0], problem.dtype
    q, d_out = memory.load("Q", rows, dtype), memory.load("dO", rows, dtype)
    lse, delta = memory.load("lse", rows, dtype), memory.load("D", rows, dtype)
    weights = problem.weights(q, k, lse, tile)
    dv.baddbmm_(d_out.mT, weights)
    d_scores = weights.mul_(torch.baddbmm(-delta, d_out, v.mT))  # at most two tiles are alive
    dk.baddbmm_(q.mT, d_scores, alpha=problem.scale)
    dq = memory.load("dQ", rows, dtype)
    memory.store("dQ", rows, torch.baddbmm(dq, d_scores, k, alpha=problem.scale))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(*q.shape[:3], 1, dtype=problem.dtype)
        # The dtypes are the algorithm's own business.
        with precision.own_formats(q.device.type):
            forward(SlowMemory(problem.kv_heads, Q=q, K=k, V=v, O=out, lse=lse), problem)
        lse = lse.squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = problem
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # dQ is summed over key blocks, so not in 16 bits.
        dq = torch.zeros(q.shape, dtype=ctx.problem.dtype, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        tensors = dict(Q=q, K=k, V=v, O=out, lse=lse[..., None])
        tensors |= dict(dO=d_out, D=-d_lse[..., None], dQ=dq, dK=dk, dV=dv)
        with precision.own_formats(q.device.type):
            backward(SlowMemory(ctx.problem.kv_heads, **tensors), ctx.problem)
        return dq.to(q.dtype), dk, dv, None


def attention(
    q: Float[Tensor, "b a s_q d"],
    k: Float[Tensor, "b g s_k d"],
    v: Float[Tensor, "b g s_k d"],
    *,
    causal: bool = False,
    offset: int | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Float[Tensor, "b a s_q d"], Float[Tensor, "b a s_q"]]:
    """The exact output of attention and each row's log-sum-exp; gradients flow through both.

    lse is natural, in at least fp32. g key–value heads serve a query heads, a/g neighbors each.

    causal, offset: which keys a query sees, as above
    block_q, block_k: rows and columns of a tile; by default what keeps one of all heads in cache

    Cost: 4·s_q·s_k·d FLOPs per head forward and 10·s_q·s_k·d backward, half when causal; saves q,
    k, v, out and lse; nothing is s_q × s_k.
    Source: FlashAttention-2 (2307.08691), algorithms 1 and 2.
    """
    return _Attention.apply(q, k, v, problem_of(q, k, v, causal, offset, block_q, block_k))


def merge(
    o1: Float[Tensor, "*rows d"],
    lse1: Float[Tensor, "*rows"],
    o2: Float[Tensor, "*rows d"],
    lse2: Float[Tensor, "*rows"],
) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "*rows"]]:
    """The output and log-sum-exp over two disjoint sets of keys, from those over each: o1 and lse1,
    o2 and lse2.

    This lets keys live on different ranks. Comes in lse's dtype, so that many merges round once;
    differentiable.

    >>> draw = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64, generator=draw)
    >>> halves = [attention(q, k[:, :, half], v[:, :, half]) for half in (slice(0, 3), slice(3, 6))]
    >>> torch.allclose(merge(*halves[0], *halves[1])[0], attention(q, k, v)[0])
    True
    """
    # The maximum cancels: no gradient through it, and any number where both are −inf.
    top = torch.maximum(lse1, lse2).detach().clamp_min(torch.finfo(lse1.dtype).min)
    w1, w2 = (lse1 - top).exp(), (lse2 - top).exp()
    total = w1 + w2
    empty = total == 0
    some = total.masked_fill(empty, 1)
    out = torch.lerp(o1.to(some.dtype), o2.to(some.dtype), (w2 / some)[..., None])  # one sweep
    return out, (top + some.log()).masked_fill(empty, -math.inf)


def attention_flops(
    s: int, d: int, heads: int = 1, *, causal: bool = False, backward: bool = False
) -> int:
    """FLOPs of attention's matrix products, forward or backward; causal is half, as in the papers.

    s, d, heads: tokens, the width of a head, and how many of them

    >>> attention_flops(1024, 64, heads=16)
    4294967296
    >>> attention_flops(1024, 64, backward=True) / attention_flops(1024, 64)
    2.5
    >>> s, d = 1024, 64
    >>> attention_flops(s, d) == 4 * s**2 * d  # a head, forward
    True
    >>> attention_flops(s, d, backward=True) == 10 * s**2 * d  # backward, scores made again
    True

    Source: FlashAttention-2 (2307.08691), section 4.1: two products of s × s_k × d, five backward.
    """
    s, d, heads = units.wholes(1, s=s, d=d, heads=heads)
    products = 5 if backward else 2
    return 2 * heads * s * s * d * products // (2 if causal else 1)


def _blocks(n: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, n)) for start in range(0, n, block)]


def _exp(x: Tensor) -> Tensor:
    """eˣ in the place of x, as 2 to the power x·log₂e: twice as fast as exp, on some CPUs."""
    return x.mul_(_LOG2_E).exp2_()


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int | None, block_q=None, block_k=None
) -> Problem:
    """The problem that `causal`, `offset`, `block_q` and `block_k` of `attention` state.

    Raises ValueError or TypeError for tensors that do not fit together, and for an offset alone.
    """
    for x in (q, k, v):
        units.instance(x, Tensor, "attention")
    alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape
    if not alike or q.dim() != 4 or q.shape[::3] != k.shape[::3] or q.shape[1] % k.shape[1]:
        got = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (q, k, v))
        raise ValueError(
            "attention takes q (b, a, s_q, d) and k, v (b, g, s_k, d) of one dtype, where g "
            f"divides a, got {got}"
        )
    if not q.is_floating_point():
        raise TypeError(f"attention takes floating-point q, k and v, got {q.dtype}: convert them")
    if offset is not None and not causal:
        raise ValueError(f"offset={offset} shifts a causal mask: give causal=True with it")
    (b, a, s_q, d), (_, g, s_k, _) = q.shape, k.shape
    default_q, default_k = default_blocks(b * a)
    block_q = units.whole(default_q if block_q is None else block_q, "block_q", 1)
    block_k = units.whole(default_k if block_k is None else block_k, "block_k", 1)
    if causal and offset is None:
        offset = s_k - s_q
    tiling = TILING.get()(s_q, s_k, block_q, block_k, offset)
    return Problem(tiling, d**-0.5, g, _accumulator(q.dtype))


def default_blocks(heads: int) -> tuple[int, int]:
    """Block sizes whose tile, of up to 8 heads, has 2¹⁹ scores at most: 2 MB, which a cache keeps.

    >>> default_blocks(1), default_blocks(8)
    ((512, 512), (256, 256))
    """
    sizes = ((512, 512), (256, 512), (256, 256))
    return next((size for size in sizes if heads * math.prod(size) <= 2**18), sizes[-1])
