"""The Triton kernels: attention and its gradients, exact in fp32; on a GPU where there is one, else interpreted, and compiled for GPUs all the same."""

import inspect
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from labutils import flash
from labutils.flash import triton_kernel

ROOT = pathlib.Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_triton = pytest.mark.skipif(
    sys.platform != "linux" and triton_kernel.triton is None,
    reason="the package triton is made for Linux alone",
)


def tensors(b, a, g, s_q, s_k, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, heads, s, d) for heads, s in ((a, s_q), (g, s_k), (g, s_k)))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def results(attend, qkv, **options):
    """Output, lse and the gradients of a random function of both."""
    qkv = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    out, lse = attend(*qkv, **options)
    generator = torch.Generator().manual_seed(1)
    d_out, d_lse = (
        torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in (out, lse)
    )
    seen = lse > -math.inf
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad((out * d_out).sum() + (lse * d_lse)[seen].sum(), qkv),
    ]


def assert_exact(qkv, tolerance=4e-6, blocks=(32, 16), **options):
    """Ours in the dtype of q, k and v against plain attention in float64."""
    exact = results(flash.plain, [tensor.double() for tensor in qkv], **options)
    ours = results(
        triton_kernel.triton_attention, qkv, block_q=blocks[0], block_k=blocks[1], **options
    )
    assert [tensor.dtype for tensor in ours] == [qkv[0].dtype, torch.float32] + [qkv[0].dtype] * 3
    for name, mine, right in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, strict=True):
        scale = max(
            1.0, right[right.isfinite()].abs().max().item() if right.isfinite().any() else 1.0
        )
        torch.testing.assert_close(
            mine.double(),
            right,
            atol=tolerance * scale,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    return ours


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes, blocks",
    [
        ((1, 2, 2, 64, 64, 16), (32, 16)),
        ((1, 4, 2, 50, 70, 24), (16, 32)),
        ((1, 6, 2, 70, 50, 7), (32, 32)),
        ((2, 1, 1, 1, 33, 64), (None, None)),
    ],
    ids=["even", "grouped heads, ragged", "more queries than keys", "one query"],
)
def test_values_and_gradients(sizes, blocks, causal):
    assert_exact(tensors(*sizes), blocks=blocks, causal=causal)


@st.composite
def problems(draw):
    b, g, shared = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    s_q, s_k, d = draw(st.integers(1, 34)), draw(st.integers(1, 34)), draw(st.integers(1, 20))
    options = dict(
        blocks=(draw(st.sampled_from([16, 32])), draw(st.sampled_from([16, 32]))),
        causal=draw(st.booleans()),
    )
    if options["causal"]:
        options["offset"] = draw(st.none() | st.integers(-40, 40))
    return tensors(b, g * shared, g, s_q, s_k, d, seed=draw(st.integers(0, 9))), options


@needs_triton
@settings(max_examples=16)
@given(problems())
def test_every_mask_and_every_shape(problem):
    qkv, options = problem
    assert_exact(qkv, tolerance=1e-5, **options)


@needs_triton
def test_the_same_as_the_tiles_in_pytorch():
    qkv, options = (
        tensors(2, 2, 1, 45, 61, 16),
        dict(causal=True, block_q=16, block_k=32),
    )
    for ours, tiled in zip(
        results(triton_kernel.triton_attention, qkv, **options),
        results(flash.attention, qkv, **options),
        strict=True,
    ):
        torch.testing.assert_close(ours, tiled, atol=4e-6, rtol=4e-6)


@needs_triton
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float16, 2e-3)] + [(torch.bfloat16, 2e-2)] * GPU
)
def test_short_formats_accumulate_in_float32(dtype, tolerance):
    assert_exact(tensors(1, 4, 2, 40, 40, 16, dtype), tolerance, causal=True)
    ones = torch.ones(
        1, 1, 4096, 1, dtype=dtype, device=DEVICE
    )  # their sum, in 16 bits, would stop growing at 2048 or before
    assert triton_kernel.triton_attention(ones[:, :, :1], ones, ones, block_k=512)[0].item() == 1


@needs_triton
def test_large_scores_do_not_overflow():
    q, k, v = tensors(1, 2, 2, 20, 20, 16)
    out, lse = triton_kernel.triton_attention(1e4 * q, k, v)
    exact, exact_lse = flash.plain(1e4 * q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


@needs_triton
def test_a_row_without_keys_is_zero_and_passes_no_gradient():
    out, lse, *gradients = assert_exact(tensors(2, 2, 1, 40, 20, 16), causal=True)
    assert (out[:, :, :20] == 0).all() and (lse[:, :, :20] == -math.inf).all()
    assert (gradients[0][:, :, :20] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@needs_triton
def test_tiles_that_nobody_sees_are_not_read():
    q, k, v = tensors(1, 1, 1, 16, 64, 16)
    k[..., 16:, :] = v[..., 16:, :] = math.nan
    options = dict(causal=True, offset=0, block_q=16, block_k=16)
    ours = results(triton_kernel.triton_attention, (q, k, v), **options)
    assert all(tensor.isfinite().all() for tensor in ours) and all(
        (gradient[..., 16:, :] == 0).all() for gradient in ours[3:]
    )


@needs_triton
def test_nan_is_passed_on():
    q, k, v = tensors(1, 1, 1, 20, 20, 16)
    q[0, 0, 1] = math.nan
    assert triton_kernel.triton_attention(q, k, v)[0].isnan().any(
        -1
    ).flatten().nonzero().flatten().tolist() == [1]


@needs_triton
def test_strides_do_not_matter():
    qkv = tensors(1, 2, 1, 20, 20, 16)
    strided = [
        tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv
    ]  # as a projection leaves them
    for plain, other in zip(
        results(triton_kernel.triton_attention, qkv),
        results(triton_kernel.triton_attention, strided),
        strict=True,
    ):
        assert torch.equal(plain, other)


@needs_triton
def test_nothing_square_is_saved():
    kept = []
    qkv = [tensor.requires_grad_() for tensor in tensors(1, 2, 2, 64, 64, 16)]
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        triton_kernel.triton_attention(*qkv)
    assert sorted(tuple(tensor.shape) for tensor in kept) == sorted(
        [(1, 2, 64, 16)] * 4 + [(1, 2, 64)]
    )


@needs_triton
@pytest.mark.parametrize(
    "d, dtype, rows",
    [
        (64, torch.bfloat16, 64),
        (256, torch.float16, 32),
        (64, torch.float32, 32),
        (200, torch.float32, 16),
    ],
)
def test_default_blocks_fit_shared_memory(d, dtype, rows):
    assert triton_kernel.default_block(d, dtype) == rows and rows * d * dtype.itemsize <= 2**14


# Without a GPU: what the interpreter does not see


COMPILE = """
import importlib, os, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from labutils.flash import triton_kernel

BLOCKS = dict(CAUSAL=True, D=48, WIDTH=64, BLOCK_Q=64, BLOCK_K=64)
POINTERS = dict(LSE="*fp32", D_LSE="*fp32", DELTA="*fp32")

def kind(name):
    return "constexpr" if name in BLOCKS else POINTERS.get(name, "*bf16") if name.isupper() else "fp32" if name == "scale" else "i32"

for kernel in (triton_kernel._forward, triton_kernel._backward_queries, triton_kernel._backward_keys):
    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, constexprs=BLOCKS)
    for capability in (80, 90):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_stages=2))
        print(compiled.asm["ptx"].count("mma") > 0, compiled.metadata.shared)

def refused():
    try:
        triton_kernel.triton_attention(*(torch.zeros(1, 1, 16, 16),) * 3)
    except Exception as error:
        print(type(error).__name__, error)

refused()
os.environ["TRITON_INTERPRET"] = "1"
importlib.reload(triton_kernel)
refused()
"""


@needs_triton
def test_the_kernels_compile_for_gpus_and_run_on_no_cpu(tmp_path):
    """In a process of its own, for Triton chooses once between compiler and interpreter: for an A100 and an H100, with tensor cores."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *compiled, on_cpu, too_late = finished.stdout.splitlines()
    assert len(compiled) == 6 and all(
        line.startswith("True") and int(line.split()[1]) < 99_000 for line in compiled
    )  # what the smallest of today's GPUs has
    assert on_cpu.startswith("ValueError the Triton kernels are compiled for the GPU")
    assert too_late.startswith("RuntimeError triton was imported before")


# Errors say what is wrong and what would be right

X = torch.zeros(2, 4, 8, 16, device=DEVICE)
BAD = [
    ((X.double(),) * 3, {}, TypeError, "sum in fp32"),
    ((X,) * 3, dict(block_q=24), ValueError, "powers of two from 16 on, got 24"),
    ((X,) * 3, dict(block_k=8), ValueError, "powers of two from 16 on, got .* and 8"),
    ((X, X[:, :3], X[:, :3]), {}, ValueError, "where g divides a"),
    *[((X.bfloat16(),) * 3, {}, TypeError, "interpreter has no bf16")] * (not GPU),
]


@needs_triton
@pytest.mark.parametrize("args, options, error, words", BAD)
def test_bad_input(args, options, error, words):
    with pytest.raises(error, match=words):
        inspect.unwrap(triton_kernel.triton_attention)(*args, **options)


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(triton_kernel, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        triton_kernel.triton_attention(X, X, X)
