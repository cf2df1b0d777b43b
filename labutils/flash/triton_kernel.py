"""FlashAttention-2 as Triton kernels: on a GPU, or in Triton's interpreter, for correctness alone.

`algorithms` again, one program for each block, the loop over the other side inside it:

    _forward            algorithms.forward: a block of queries meets the keys it sees
    _backward_queries   its backward for the same block: D and dQ
    _backward_keys      a block of keys meets the queries that see it: dK and dV
    triton_attention    all three as one autograd function that keeps q, k, v, out and lse

algorithms.backward has keys outside and adds to dQ in slow memory. Programs run at the same time
and would add at the same time, so dQ has a kernel of its own, and the scores are computed twice: 7
products per tile instead of 5. FlashAttention-2 (2307.08691, section 3.2) adds atomically.

Without the package `triton` the module still loads, and `triton_attention` says what is missing.
"""

from __future__ import annotations  # tl.constexpr below is read by Triton alone

import math
import os

import torch
from torch import Tensor

from labutils.flash import algorithms

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks once, when it is imported

try:
    import triton
    import triton.language as tl

    # The hardware has exp2: inside, scores count in units of log 2.
    LOG2_E, LN_2 = tl.constexpr(1 / math.log(2)), tl.constexpr(math.log(2))
except ImportError:
    triton = None

jit = triton.jit if triton else lambda kernel: kernel


@jit
def _load(X, head, at, s, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `at` of one head of X (heads, s, D), padded: WIDTH is a power of two."""
    channel = tl.arange(0, WIDTH)
    real = (at < s)[:, None] & (channel < D)[None, :]
    return tl.load(X + (head * s + at)[:, None] * D + channel[None, :], mask=real, other=0.0)


@jit
def _store(X, tile, head, at, s, D: tl.constexpr, WIDTH: tl.constexpr):
    """Writes rows `at` of one head of X, in X's own dtype."""
    channel = tl.arange(0, WIDTH)
    real = (at < s)[:, None] & (channel < D)[None, :]
    places = X + (head * s + at)[:, None] * D + channel[None, :]
    tl.store(places, tile.to(X.dtype.element_ty), mask=real)


@jit
def _dot(x, y):
    """The matrix product, summed in fp32; fp32 factors are not rounded to tf32."""
    return tl.dot(x, y, input_precision="ieee")


@jit
def _scores(q, k, i, j, scale, offset, s_k, CAUSAL: tl.constexpr):
    """One tile of scores, −inf where query i must not look at key j."""
    seen = (j < s_k)[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + offset)
    return tl.where(seen, _dot(q, tl.trans(k)) * scale, float("-inf"))


@jit
def _units_of_log_2(lse):
    """lse as the kernels count; 0 where a row sees no key: −inf − (−inf) would be NaN."""
    return tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)


@jit
def _last_key(block, offset, s_k, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Where the keys end that any query of this block sees."""
    return tl.minimum(s_k, (block + 1) * BLOCK_Q + offset) if CAUSAL else s_k


@jit
def _forward(
    Q, K, V, OUT, LSE,
    scale, offset, s_q, s_k, shared,
    CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(s_q, BLOCK_Q)
    block, head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = _load(Q, head, i, s_q, D, WIDTH)
    top = tl.full([BLOCK_Q], -1e30, tl.float32)  # finite, as in OnlineSoftmax
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    stop = _last_key(block, offset, s_k, CAUSAL, BLOCK_Q)
    for start in range(0, stop, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        k = _load(K, head // shared, j, s_k, D, WIDTH)
        v = _load(V, head // shared, j, s_k, D, WIDTH)
        scores = _scores(q, k, i, j, scale, offset, s_k, CAUSAL)
        new_top = tl.maximum(top, tl.max(scores, 1))
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None] + _dot(weights.to(v.dtype), v)
        top = new_top
    some = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * LN_2)
    _store(OUT, out / some[:, None], head, i, s_q, D, WIDTH)
    tl.store(LSE + head * s_q + i, lse, mask=i < s_q)


@jit
def _backward_queries(
    Q, K, V, OUT, LSE, D_OUT, D_LSE, DELTA, DQ,
    scale, offset, s_q, s_k, shared,
    CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(s_q, BLOCK_Q)
    block, head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q, d_out = _load(Q, head, i, s_q, D, WIDTH), _load(D_OUT, head, i, s_q, D, WIDTH)
    product = d_out.to(tl.float32) * _load(OUT, head, i, s_q, D, WIDTH).to(tl.float32)
    delta = tl.sum(product, 1) - tl.load(D_LSE + head * s_q + i, mask=i < s_q, other=0.0)
    tl.store(DELTA + head * s_q + i, delta, mask=i < s_q)
    lse = _units_of_log_2(tl.load(LSE + head * s_q + i, mask=i < s_q, other=0.0))
    dq = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    stop = _last_key(block, offset, s_k, CAUSAL, BLOCK_Q)
    for start in range(0, stop, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        k = _load(K, head // shared, j, s_k, D, WIDTH)
        v = _load(V, head // shared, j, s_k, D, WIDTH)
        weights = tl.exp2(_scores(q, k, i, j, scale, offset, s_k, CAUSAL) - lse[:, None])
        d_scores = weights * (_dot(d_out, tl.trans(v)) - delta[:, None])
        dq += _dot(d_scores.to(k.dtype), k)
    _store(DQ, dq * (scale * LN_2), head, i, s_q, D, WIDTH)


@jit
def _backward_keys(
    Q, K, V, LSE, D_OUT, DELTA, DK, DV,
    scale, offset, s_q, s_k, shared,
    CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(s_k, BLOCK_K)
    block, kv_head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    j = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k, v = _load(K, kv_head, j, s_k, D, WIDTH), _load(V, kv_head, j, s_k, D, WIDTH)
    dk, dv = tl.zeros([BLOCK_K, WIDTH], tl.float32), tl.zeros([BLOCK_K, WIDTH], tl.float32)
    # No earlier query sees a key of this block.
    first = tl.maximum(0, block * BLOCK_K - offset) // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    # The query heads that share these keys.
    for head in range(kv_head * shared, (kv_head + 1) * shared):
        for start in range(first, s_q, BLOCK_Q):
            i = start + tl.arange(0, BLOCK_Q)
            q, d_out = _load(Q, head, i, s_q, D, WIDTH), _load(D_OUT, head, i, s_q, D, WIDTH)
            lse = _units_of_log_2(tl.load(LSE + head * s_q + i, mask=i < s_q, other=0.0))
            delta = tl.load(DELTA + head * s_q + i, mask=i < s_q, other=0.0)
            weights = tl.exp2(_scores(q, k, i, j, scale, offset, s_k, CAUSAL) - lse[:, None])
            dv += _dot(tl.trans(weights.to(d_out.dtype)), d_out)
            d_scores = weights * (_dot(d_out, tl.trans(v)) - delta[:, None])
            dk += _dot(tl.trans(d_scores.to(q.dtype)), q)
    _store(DK, dk * (scale * LN_2), kv_head, j, s_k, D, WIDTH)
    _store(DV, dv, kv_head, j, s_k, D, WIDTH)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, problem: algorithms.Problem
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (tensor.contiguous() for tensor in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        _launch(_forward, problem, q, k, v, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = problem
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out, d_lse, delta = d_out.contiguous(), d_lse.contiguous(), torch.empty_like(lse)
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        _launch(_backward_queries, ctx.problem, q, k, v, out, lse, d_out, d_lse, delta, dq)
        _launch(_backward_keys, ctx.problem, q, k, v, lse, d_out, delta, dk, dv)
        return dq, dk, dv, None


def _launch(kernel, problem: algorithms.Problem, q: Tensor, k: Tensor, *tensors: Tensor) -> None:
    """One program for each block of each head: of keys for `_backward_keys`, else of queries."""
    tiling, (b, a, _, d), g = problem.tiling, q.shape, k.shape[1]
    blocks, heads = (tiling.key_blocks, g) if kernel is _backward_keys else (tiling.query_blocks, a)
    grid = (len(blocks) * b * heads,)
    numbers = (problem.scale * LOG2_E.value, tiling.offset or 0, tiling.s_q, tiling.s_k, a // g)
    width = dict(D=d, WIDTH=_padded(d))
    size = dict(BLOCK_Q=tiling.block_q, BLOCK_K=tiling.block_k, CAUSAL=tiling.offset is not None)
    kernel[grid](q, k, *tensors, *numbers, **width, **size, num_stages=2)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    offset: int | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) and gradients as `flash.attention` gives them, from q, k, v in 16 bits or fp32.
    causal, offset, block_q and block_k are its own.

    Products are summed in fp32. Blocks are powers of two from 16 on; by default a block of a head
    takes at most 16 kB, so that what a program holds fits a GPU's shared memory. Where there is no
    GPU, the interpreter runs program after program, in fp16 or fp32: to check values, not to save
    time.

    Raises ImportError without triton, TypeError for fp64, ValueError for other blocks.
    """
    if triton is None:
        raise ImportError("these kernels need the package triton (for Linux): pip install triton")
    if q.dtype == torch.float64:
        raise TypeError("the Triton kernels sum in fp32: use flash.attention for fp64")
    default = default_block(q.shape[-1], q.dtype)
    block_q = default if block_q is None else block_q
    block_k = default if block_k is None else block_k
    if not {block_q, block_k} <= {2**power for power in range(4, 16)}:
        raise ValueError(f"blocks must be powers of two from 16 on, got {block_q} and {block_k}")
    problem = algorithms.problem_of(q, k, v, causal, offset, block_q, block_k)
    _check_mode(q)
    return _Attention.apply(q, k, v, problem)


def _check_mode(q: Tensor) -> None:
    """An error where Triton was imported to do what these tensors do not allow."""
    interpreted = not isinstance(_forward, triton.JITFunction)
    if interpreted == isinstance(tl.sum, triton.JITFunction):
        remedy = "restart with TRITON_INTERPRET=1 in the environment"
        raise RuntimeError(f"triton was imported before its interpreter could be chosen: {remedy}")
    if interpreted and q.dtype == torch.bfloat16:
        raise TypeError("Triton's interpreter has no bf16: give it fp32 or fp16, or run on a GPU")
    if not interpreted and q.device.type == "cpu":
        remedy = "move q, k and v there, or start with TRITON_INTERPRET=1"
        raise ValueError(f"the Triton kernels are compiled for the GPU: {remedy}")


def default_block(d: int, dtype: torch.dtype) -> int:
    """Rows of a block of at most 16 kB: 64 of 16 bits or 32 of 32, fewer for wide heads, but 16."""
    return max(16, min(128, 2**14 // _padded(d)) // dtype.itemsize)


def _padded(d: int) -> int:
    return max(16, triton.next_power_of_2(d))
