"""The tiled forward pass as a Triton kernel: on an NVIDIA GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1), where it is only checked.

The kernel is `algorithms.forward` again: one program for each block of queries of each head, a loop over key blocks, an online softmax.
Without the package `triton` the module still loads, and `attention` says what is missing.
"""

from __future__ import annotations  # tl.constexpr below is read by Triton alone

import math

import torch
from torch import Tensor

from labutils.flash import algorithms

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LOG2_E = 1 / math.log(2)


@(triton.jit if triton else lambda kernel: kernel)
def _kernel(
    Q, K, V, OUT, LSE,
    scale, offset, s_q, s_k, shared,
    CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.arange(0, WIDTH)  # a power of two; channels from D on are padding
    rows = (head * s_q + i)[:, None] * D + channel[None, :]
    real = (i < s_q)[:, None] & (channel < D)[None, :]
    q = tl.load(Q + rows, mask=real, other=0.0)

    top = tl.full([BLOCK_Q], -1e30, tl.float32)  # finite, as in OnlineSoftmax
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    end = s_k
    if CAUSAL:  # key blocks that no query of this block sees are not visited
        end = tl.minimum(s_k, tl.maximum(0, (tl.program_id(0) + 1) * BLOCK_Q + offset))
    for start in range(0, end, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        columns = (head // shared * s_k + j)[:, None] * D + channel[None, :]
        held = (j < s_k)[:, None] & (channel < D)[None, :]
        k = tl.load(K + columns, mask=held, other=0.0)
        v = tl.load(V + columns, mask=held, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # in units of log 2: exp2 is what the hardware has
        seen = (j < s_k)[None, :]
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None] + offset)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    some = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * 0.6931471805599453)
    tl.store(OUT + rows, (out / some[:, None]).to(OUT.dtype.element_ty), mask=real)
    tl.store(LSE + head * s_q + i, lse, mask=i < s_q)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, offset: int | None = None, scale: float | None = None,
    block_q: int = 64, block_k: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) as `flash.attention` returns them, forward only; blocks are powers of two from 16 on, and fp64 is not supported."""
    if triton is None:
        raise ImportError("this kernel needs the package triton: pip install triton (PyTorch's CUDA builds bring it along); flash.attention runs without it")
    problem = algorithms._checked(q, k, v, causal, offset, None, scale, block_q, block_k)
    if q.dtype == torch.float64:
        raise TypeError("the Triton kernel accumulates in fp32: give it fp32, bf16 or fp16, or use flash.attention for fp64")
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 16 or block & (block - 1):
            raise ValueError(f"{name} must be a power of two from 16 on, as the kernel's matrix products need, got {block}")
    if any(tensor.requires_grad for tensor in (q, k, v)) and torch.is_grad_enabled():
        raise ValueError("the Triton kernel has no backward pass: call it under torch.no_grad(), or use flash.attention")
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    (b, a, s_q, d), s_k = q.shape, k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(b, a, s_q, dtype=torch.float32)
    grid = (triton.cdiv(s_q, block_q), b * a)
    _kernel[grid](
        q, k, v, out, lse,
        problem.scale * LOG2_E, problem.offset or 0, s_q, s_k, a // k.shape[1],
        CAUSAL=causal, D=d, WIDTH=max(16, triton.next_power_of_2(d)), BLOCK_Q=block_q, BLOCK_K=block_k,
    )  # fmt: skip
    return out, lse
