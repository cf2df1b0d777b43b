"""FlashAttention: exact against plain attention in float64, nothing s × s kept, every byte accounted for."""

import functools
import inspect
import itertools
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import flash, measure
from labutils.config import Hardware
from labutils.flash import algorithms
from labutils.flash.algorithms import default_blocks
from labutils.flash.counting import ledger_of
from labutils.flash.few_tiles import FewTiles


def tensors(b, a, g, s_q, s_k, d, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, heads, s, d, generator=generator, dtype=torch.float64).to(dtype)
        for heads, s in ((a, s_q), (g, s_k), (g, s_k))
    ]


def results(attend, qkv, seed=0, **options):
    """Output, lse and the gradients of a random function of both."""
    qkv = [tensor.detach().clone().requires_grad_() for tensor in qkv]
    out, lse = attend(*qkv, **options)
    generator = torch.Generator().manual_seed(seed)
    d_out, d_lse = (
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        for t in (out, lse)
    )
    seen = lse > -math.inf
    gradients = torch.autograd.grad((out * d_out).sum() + (lse * d_lse)[seen].sum(), qkv)
    return [out.detach(), lse.detach(), *gradients]


def assert_same(ours, exact, tolerance):
    for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, strict=False):
        torch.testing.assert_close(
            mine.double(),
            theirs.double(),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@st.composite
def problems(draw):
    b, g, shared = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    s_q, s_k, d = draw(st.integers(1, 17)), draw(st.integers(1, 17)), draw(st.integers(1, 6))
    options = dict(
        block_q=draw(st.integers(1, 20)),
        block_k=draw(st.integers(1, 20)),
        causal=draw(st.booleans()),
    )
    if options["causal"]:
        options["offset"] = draw(st.none() | st.integers(-5, 5))
    return tensors(b, g * shared, g, s_q, s_k, d, seed=draw(st.integers(0, 9))), options


@settings(deadline=None, max_examples=80)
@given(problems())
def test_equal_to_plain_attention(problem):
    qkv, options = problem
    plain = {name: value for name, value in options.items() if not name.startswith("block")}
    assert_same(results(flash.attention, qkv, **options), results(flash.plain, qkv, **plain), 1e-12)


def test_plain_attention_is_the_textbook():
    q, k, v = tensors(2, 3, 3, 5, 7, 4)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(4)
    scores += torch.full((5, 7), -math.inf).triu(3)  # the last query sees the last key
    out, lse = flash.plain(q, k, v, causal=True)
    torch.testing.assert_close(
        out, torch.einsum("bhij,bhjd->bhid", scores.exp() / scores.exp().sum(-1, keepdim=True), v)
    )
    torch.testing.assert_close(lse, scores.exp().sum(-1).log())


def test_published_exactness():
    """FA-01, FA-06 and FA-07: float64, N = 128, d = 32, blocks of 16 × 32."""
    qkv = tensors(1, 1, 1, 128, 128, 32)
    assert_same(
        results(flash.attention, qkv, block_q=16, block_k=32), results(flash.plain, qkv), 1e-12
    )


def test_the_derivative_is_right_by_finite_differences():
    qkv = [tensor.requires_grad_() for tensor in tensors(1, 2, 1, 5, 4, 2)]
    assert torch.autograd.gradcheck(
        lambda *t: flash.attention(*t, causal=True, offset=1, block_q=2, block_k=3), qkv
    )


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
)
def test_short_formats_accumulate_in_float32(dtype, tolerance):
    qkv = tensors(1, 4, 2, 40, 40, 8, dtype)
    ours = results(flash.attention, qkv, causal=True, block_q=7, block_k=9)
    assert [tensor.dtype for tensor in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_same(
        ours, results(flash.plain, [tensor.double() for tensor in qkv], causal=True), tolerance
    )
    # Values of one size: the mean of 4096 of them, summed in 16 bits, would stop growing long before the end.
    ones = torch.ones(1, 1, 4096, 1, dtype=dtype)
    assert flash.attention(ones[:, :, :1], ones, ones, block_k=64)[0].item() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dq_is_summed_in_float32_and_rounded_once(dtype):
    """Over 1024 blocks of keys: a sum kept in 16 bits is off by many roundings, not by about one."""
    qkv = tensors(1, 1, 1, 4, 1024, 8, dtype)
    ours = results(flash.attention, qkv, block_k=1)[2].double()
    exact = results(flash.plain, [tensor.double() for tensor in qkv])[2]
    assert (ours - exact).norm() < 2 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("size", [300.0, 1e4])
def test_large_scores_do_not_overflow(size):
    q, k, v = tensors(1, 2, 2, 9, 9, 4, torch.float32)
    out, lse = flash.attention(size * q, k, v, block_q=4, block_k=2)
    exact, exact_lse = flash.plain(size * q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3)


def test_nan_is_passed_on():
    q, k, v = tensors(1, 1, 1, 4, 4, 2)
    q[0, 0, 1] = math.nan
    out, _ = flash.attention(q, k, v, block_q=2, block_k=2)
    assert out.isnan().any(-1).flatten().tolist() == [False, True, False, False]


def test_a_row_without_keys_is_zero_and_passes_no_gradient():
    qkv = tensors(2, 2, 1, 6, 3, 4)
    out, lse, *gradients = results(
        flash.attention, qkv, causal=True, block_q=2, block_k=2
    )  # the first three queries come before every key
    assert (
        (out[:, :, :3] == 0).all()
        and (lse[:, :, :3] == -math.inf).all()
        and lse[:, :, 3:].isfinite().all()
    )
    assert (gradients[0][:, :, :3] == 0).all() and all(
        gradient.isfinite().all() for gradient in gradients
    )


def test_strides_do_not_matter():
    qkv = tensors(2, 4, 2, 11, 11, 3)
    strided = [
        tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv
    ]  # as a projection leaves them
    assert_same(
        results(flash.attention, strided, causal=True, block_q=4),
        results(flash.attention, qkv, causal=True, block_q=4),
        1e-14,
    )


def test_autocast_changes_nothing():
    qkv = tensors(1, 2, 2, 8, 8, 4, torch.float32)
    plain = results(flash.attention, qkv)
    with torch.autocast("cpu", torch.bfloat16):
        inside = results(flash.attention, qkv)
    assert all(torch.equal(x, y) for x, y in zip(plain, inside, strict=True))


# Merge


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.lists(st.integers(0, 12), max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_merging_parts_of_the_keys_is_attention_over_all(s_q, s_k, cuts, causal, backwards, seed):
    qkv = tensors(1, 2, 1, s_q, s_k, 3, seed=seed)
    edges = sorted({0, s_k, *(min(cut, s_k) for cut in cuts)})

    def in_parts(q, k, v):
        merged = None
        # Last keys first: then the first part may see no key where a later one does.
        for start, stop in list(itertools.pairwise(edges))[:: -1 if backwards else 1]:
            offset = dict(causal=True, offset=s_k - s_q - start) if causal else {}
            part = flash.attention(
                q, k[:, :, start:stop], v[:, :, start:stop], block_q=4, block_k=4, **offset
            )
            merged = part if merged is None else flash.merge(*merged, *part)
        return merged

    assert_same(results(in_parts, qkv), results(flash.plain, qkv, causal=causal), 1e-11)


@pytest.mark.parametrize("first", [True, False])
def test_a_part_that_sees_no_key_changes_nothing(first):
    """On either side, values and gradients: a ring of ranks meets its blind parts in any order."""
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 3, generator=draw, dtype=torch.float64), torch.tensor([900.0, -900.0])]
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    nothing = torch.zeros(2, 3, dtype=torch.float64), torch.full((2,), -math.inf).double()
    parts = (nothing, leaves) if first else (leaves, nothing)
    merged = flash.merge(*parts[0], *parts[1])
    assert all(torch.equal(a, b) for a, b in zip(merged, leaves, strict=True))
    found = torch.autograd.grad(sum(x.sum() for x in merged), leaves)
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in found)


def test_merging_nothing_with_nothing_is_nothing():
    out, lse = (
        torch.zeros(2, 3, dtype=torch.float64, requires_grad=True),
        torch.full((2,), -math.inf, dtype=torch.float64, requires_grad=True),
    )
    merged, total = flash.merge(out, lse, out, lse)
    assert (merged == 0).all() and (total == -math.inf).all()
    gradients = torch.autograd.grad(merged.sum(), (out, lse))
    assert all(gradient.isfinite().all() for gradient in gradients)


# Memory


def test_nothing_square_is_saved():
    kept = []
    qkv = [tensor.requires_grad_() for tensor in tensors(1, 2, 2, 64, 64, 8)]
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out, lse = flash.attention(*qkv, causal=True, block_q=16, block_k=16)
    assert sorted(tuple(t.shape) for t in kept) == sorted([(1, 2, 64, 8)] * 4 + [(1, 2, 64)])
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (*qkv, out, lse)}


class _Largest(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.largest = max(
            getattr(self, "largest", 0),
            *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)),
            0,
        )
        return out


def test_nothing_square_is_ever_made():
    """The largest tensor of either pass is an input's size or a tile's, whatever s is."""
    for s in (64, 256):
        qkv = [tensor.requires_grad_() for tensor in tensors(1, 2, 2, s, s, 8)]
        with _Largest() as mode:
            flash.attention(*qkv, causal=True, block_q=16, block_k=32)[0].sum().backward()
        assert mode.largest == max(2 * s * 8, 2 * 16 * 32)


@pytest.mark.parametrize("a, s, d, block", [(2, 64, 8, 16), (3, 96, 4, 32), (1, 128, 16, 16)])
def test_peak_memory_by_formula_is_peak_memory_counted(a, s, d, block):
    """Beyond the inputs: output and three gradients; lse, its gradient and D; two tiles; a block of dK, dV and lse. Nothing is quadratic in s."""
    qkv = [tensor.requires_grad_() for tensor in tensors(1, a, a, s, s, d, torch.float32)]
    d_out = torch.ones_like(qkv[0])

    def step():
        return torch.autograd.grad(
            flash.attention(*qkv, block_q=block, block_k=block)[0], qkv, d_out
        )

    extra = measure.peak(step, nn.Module()).total - 4 * d_out.nbytes
    assert extra == 4 * a * (4 * s * d + 3 * s + 2 * block**2 + 2 * block * d + block)


def test_the_graph_is_freed():
    qkv = [tensor.requires_grad_() for tensor in tensors(1, 1, 1, 4, 4, 2)]
    out, lse = flash.attention(*qkv)
    watch = weakref.ref(out)
    del out, lse
    assert watch() is None


# Bytes moved and FLOPs


def run_plain(memory, problem):
    """FlashAttention (2205.14135), algorithm 0: three steps from slow memory to slow memory."""
    rows, columns = problem.tiling.whole
    q, k = (memory.load(name, rows, problem.dtype) for name in ("Q", "K"))
    memory.store("S", rows, problem.scores(q, k, (rows, columns)))
    memory.store("P", rows, memory.load("S", rows, problem.dtype).softmax(-1))
    weights, v = (memory.load(name, rows, problem.dtype) for name in ("P", "V"))
    memory.store("O", rows, weights @ v)


def run_flash_1(memory, problem):
    """FlashAttention (2205.14135), algorithm 1: the output is right for the keys seen so far."""
    for columns in problem.tiling.key_blocks:
        k, v = (memory.load(name, columns, problem.dtype) for name in ("K", "V"))
        for rows in problem.tiling.queries_of(columns):
            old = [memory.load(name, rows, problem.dtype) for name in ("Q", "O", "l", "m")]
            q, out, total, top = old
            scores = problem.scores(q, k, (rows, columns))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, kept = (scores - new_top).exp(), total * (top - new_top).exp()
            new_total = kept + weights.sum(-1, keepdim=True)
            memory.store("O", rows, (out * kept + weights @ v) / new_total)
            memory.store("l", rows, new_total)
            memory.store("m", rows, new_top)


def counted(run, q, k, v, **options):
    """The output of a run in which every tile passes the gate, and the bytes that it moved."""
    problem = algorithms.problem_of(q, k, v, offset=None, **options)
    stat = torch.zeros(*q.shape[:3], 1, dtype=problem.dtype)
    tensors = dict(Q=q, K=k, V=v, O=torch.zeros_like(q), l=stat, m=stat - 1e30)
    tensors |= {name: q.new_empty(*q.shape[:3], k.shape[2]) for name in "SP"}
    memory = flash.SlowMemory(k.shape[1], **tensors)
    run(memory, problem)
    return tensors["O"], ledger_of(memory.moved)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["plain", "flash-1", "flash-2"]), st.integers(1, 40), st.integers(1, 5),
    st.integers(1, 2), st.integers(1, 16), st.integers(1, 16), st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_bytes_by_formula_are_bytes_counted(algorithm, s, d, a, block_q, block_k, causal, dtype):
    q, k, v = tensors(2, a, a, s, s, d, dtype)
    options = dict(block_q=block_q, block_k=block_k, causal=causal)
    if algorithm == "flash-2":
        books = flash.counted(q, k, v, **options)
    else:
        run = {"plain": run_plain, "flash-1": run_flash_1}[algorithm]
        found, books = counted(run, q, k, v, **options)
        exact, _ = flash.plain(*(tensor.double() for tensor in (q, k, v)), causal=causal)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
        assert_same([found], [exact], tolerance)
    sizes = dict(s=s, d=d, heads=2 * a, itemsize=dtype.itemsize)
    stat = 8 if dtype == torch.float64 else 4
    predicted = flash.traffic(algorithm, stat_itemsize=stat, **sizes, **options)
    assert predicted.diff(books).unexplained == 0


def elements(algorithm, s, d, fast):
    block_q, block_k = flash.block_sizes(fast, d)
    return flash.traffic(
        algorithm,
        s=s,
        d=d,
        block_q=block_q,
        block_k=block_k,
        itemsize=1,
        stat_itemsize=1,
        whole_blocks=True,
    ).total


def test_published_traffic():
    """FA-02, FA-03, FA-04."""
    assert (
        elements("plain", 1024, 64, 25600) == 4_456_448
        and elements("flash-1", 1024, 64, 25600) == 2_348_544
    )
    assert (
        round(elements("flash-1", 4096, 128, 25600) / 1e6, 1) == 131.5
        and round(elements("plain", 4096, 128, 25600) / 1e6, 1) == 69.2
    )
    once = elements("flash-1", 4096, 64, 25600)
    scaled = [
        elements("flash-1", *more) / once
        for more in ((8192, 64, 25600), (4096, 64, 51200), (4096, 128, 25600))
    ]
    assert [round(ratio, 2) for ratio in scaled] == [3.97, 0.52, 3.93]


@pytest.mark.parametrize("causal", [False, True])
def test_what_attention_runs_is_what_is_counted(causal, monkeypatch):
    """The books of `counted` are of the very code behind `attention`."""
    qkv = tensors(1, 4, 4, 50, 50, 4, torch.float32)
    memories = []
    original = flash.SlowMemory.__init__
    monkeypatch.setattr(
        flash.SlowMemory,
        "__init__",
        lambda self, *a, **t: (original(self, *a, **t), memories.append(self))[0],
    )
    flash.attention(*qkv, causal=causal, block_q=16, block_k=8)
    sizes = dict(s=50, d=4, heads=4, block_q=16, block_k=8, causal=causal, itemsize=4)
    (memory,) = memories
    assert sum(memory.moved.values()) == flash.traffic("flash-2", **sizes).total


def test_causal_skips_the_tiles_that_nobody_sees():
    seen = flash.Tiling(64, 64, 8, 8, offset=0)
    assert sum(len(list(seen.keys_of(rows))) for rows in seen.query_blocks) == 8 * 9 // 2
    for block in (8, None):  # what is skipped, or hidden in a tile, cannot spoil the first rows
        q, k, v = tensors(1, 1, 1, 64, 64, 4)
        k[..., 8:, :] = math.nan
        out, lse = flash.attention(q, k, v, causal=True, block_q=block, block_k=block)
        assert out[..., :8, :].isfinite().all() and lse[..., :8].isfinite().all()
        assert out[..., 8:, :].isnan().all()


def fullest(tiling, s_q, s_k, offset, **blocks):
    """Bytes at the fullest moment of the forward pass, and of both, when `tiling` cuts the scores."""
    empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (empty(1, 2, s, 4) for s in (s_q, s_k, s_k))

    def forward():
        return sum(x.sum() for x in flash.attention(
            q, k, v, causal=offset is not None, offset=offset, **blocks
        ))  # fmt: skip

    before = algorithms.TILING.set(tiling)
    try:
        steps = forward, lambda: forward().backward()
        return [measure.peak(step, nn.Module()).total for step in steps]
    finally:
        algorithms.TILING.reset(before)


@pytest.mark.parametrize("block_q, block_k", [(8, 8), (12, 20), (20, 12)])
@pytest.mark.parametrize("s_q, s_k, offset", [
    (64, 64, None), (60, 70, None), (64, 64, 0), (66, 66, 0), (64, 64, 64), (50, 90, 40), (64, 64, -20),
], ids=str)  # fmt: skip
def test_two_tiles_of_each_kind_hold_what_all_hold(s_q, s_k, offset, block_q, block_k):
    """Of whole and short tiles, with the mask's edge in them and without."""
    asked = dict(s_q=s_q, s_k=s_k, offset=offset, block_q=block_q, block_k=block_k)
    assert fullest(FewTiles, **asked) == fullest(flash.Tiling, **asked)


def test_their_number_does_not_grow_with_the_tokens():
    for offset in (None, 0, 4096):
        counts = [
            sum(len(list(few.keys_of(rows))) for rows in few.query_blocks)
            for few in (FewTiles(s, s, 256, 256, offset) for s in (8192, 16384))
        ]
        assert counts[0] == counts[1] <= 12


@settings(deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 9),
    st.none() | st.integers(-9, 9),
)
def test_tiles_cover_what_is_seen_once(s_q, s_k, block_q, block_k, offset):
    tiling = flash.Tiling(s_q, s_k, block_q, block_k, offset)
    by_rows = [(r.start, c.start) for r in tiling.query_blocks for c in tiling.keys_of(r)]
    by_columns = [(r.start, c.start) for c in tiling.key_blocks for r in tiling.queries_of(c)]
    assert sorted(by_rows) == sorted(by_columns) and len(set(by_rows)) == len(by_rows)
    tile_of = {(i, j): (i - i % block_q, j - j % block_k) for i in range(s_q) for j in range(s_k)}
    assert {tile for (i, j), tile in tile_of.items() if offset is None or j <= i + offset} == set(
        by_rows
    )


def test_flops_by_formula_are_flops_counted():
    qkv = [tensor.requires_grad_() for tensor in tensors(2, 3, 3, 48, 48, 8, torch.float32)]
    sizes, results = dict(s=48, d=8, heads=6), []
    for attend, products in ((flash.plain, 4), (flash.attention, 5)):
        forward = flash.product_flops(lambda attend=attend: results.append(attend(*qkv)[0].sum()))
        assert forward == flash.attention_flops(**sizes)
        backward = flash.product_flops(lambda: results[-1].backward())
        assert backward == products * forward // 2
    assert backward == flash.attention_flops(**sizes, backward=True)


# Online softmax


@given(st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=4), min_size=1, max_size=5))
def test_online_softmax_does_not_depend_on_the_blocks(blocks):
    state = flash.OnlineSoftmax(torch.zeros(1, 1, 1, dtype=torch.float64))
    scores = torch.tensor([score for block in blocks for score in block], dtype=torch.float64)
    values, start = torch.arange(len(scores), dtype=torch.float64), 0
    for block in blocks:
        at = slice(start, start := start + len(block))
        state.add(scores[at].clone().view(1, 1, -1), values[at].view(1, -1, 1))
    out, lse = state.finish()
    torch.testing.assert_close(out.flatten()[0], scores.softmax(0) @ values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.flatten()[0], scores.logsumexp(0), rtol=1e-12, atol=1e-12)


def test_the_printed_rescaling_is_wrong():
    """FA-08: algorithm 1 of FlashAttention-2 prints diag(e^(m_old − m_new))⁻¹; with it, an output is off by factors."""
    old, new = 0.0, 5.0
    right = (math.exp(old - new) * 1.0 + 1.0 * 3.0) / (math.exp(old - new) + 1.0)
    printed = (1.0 / math.exp(old - new) * 1.0 + 1.0 * 3.0) / (math.exp(old - new) + 1.0)
    state = flash.OnlineSoftmax(torch.zeros(1, 1, 1, dtype=torch.float64))
    for score, value in ((old, 1.0), (new, 3.0)):
        state.add(
            torch.full((1, 1, 1), score, dtype=torch.float64),
            torch.full((1, 1, 1), value, dtype=torch.float64),
        )
    assert state.finish()[0].item() == pytest.approx(right) and printed > 50 * right


# Fused passes and the roofline


@pytest.mark.parametrize(
    "fn, inputs", [(flash.softmax, 1), (flash.layernorm, 1), (flash.swiglu, 2)]
)
def test_bytes_of_passes(fn, inputs):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(30, 16, generator=generator) for _ in range(inputs)]
    assert flash.passes(fn, 30, 16).diff(flash.moved(lambda: fn(*xs))).unexplained == 0
    fused, books = flash.one_pass(fn, *xs, block=7)
    torch.testing.assert_close(fused, fn(*xs))
    assert flash.passes(fn, 30, 16, fused=True).diff(books).unexplained == 0


@pytest.mark.parametrize("rows", [1, 5, 7, 100])
def test_cross_entropy_whose_logits_never_exist(rows):
    draw = torch.Generator().manual_seed(0)
    x, W = (torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in (12, 31))
    x, W, t = x.mul_(100).requires_grad_(), W.requires_grad_(), torch.arange(12)
    losses = nn.functional.cross_entropy(x @ W.mT, t), flash.linear_cross_entropy(x, W, t, rows)
    ours, theirs = (torch.autograd.grad(3 * loss, (x, W)) for loss in losses)
    for one, other in zip((losses[0], *ours), (losses[1], *theirs), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    if hasattr(nn, "LinearCrossEntropyOptions"):  # PyTorch's own, in chunks
        options = nn.LinearCrossEntropyOptions()
        loss = nn.functional.linear_cross_entropy(x, W, t, options=options)
        assert torch.allclose(loss, losses[1], rtol=1e-12)

    def both():
        return torch.autograd.grad(flash.linear_cross_entropy(x, W, t, rows), (x, W))

    beyond = measure.peak(both, nn.Module()).total - x.nbytes - W.nbytes - t.nbytes
    r = min(rows, 12)  # logits, their product with W, and three numbers a row
    assert beyond == 8 * (r * 31 + r * 6 + 3 * r + 12 * 6 + 31 * 6 + 1)


def test_passes_compute_what_torch_computes():
    x, up = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(flash.softmax(x), x.softmax(-1))
    torch.testing.assert_close(flash.layernorm(x), nn.functional.layer_norm(x, (5,)))
    torch.testing.assert_close(flash.swiglu(x, up), nn.functional.silu(x) * up)


def test_views_move_nothing():
    x = torch.randn(4, 4)
    assert (
        flash.moved(lambda: x.mT[1:].reshape(2, 6).view(-1)[:3]).total == 2 * 12 * 4
    )  # the reshape alone has to copy


def test_a_cast_moves_what_it_says():
    x, seen = torch.randn(4, 4), []
    assert flash.moved(lambda: seen.append(x.to(dtype=torch.float64))).total == 16 * (4 + 8)
    assert torch.equal(seen[0], x.double())


def test_the_roof():
    roof = flash.Roof("toy", 100.0, 10.0)
    assert (
        roof.time(100.0, 100.0) == 10
        and roof.bound(100.0, 100.0) == "memory"
        and roof.bound(1000.0, 100.0) == "compute"
    )
    assert flash.Roof.of(Hardware.named("H100"), "fp8").flops > 1.9e15
    measured = flash.Roof.measured(size=64, nbytes=2**16)
    assert measured.flops > 0 and measured.bandwidth > 0


# Errors say what is wrong and what would be right


def make(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


X = make(2, 4, 8, 16)


def unchecked(fn):
    """`fn` as it is outside of the tests, where jaxtyping does not object before it does."""
    return inspect.unwrap(fn)


BAD_ATTENTION = [
    ((make(4, 8, 16), X, X), {}, ValueError, r"got torch.float32 \(4, 8, 16\)"),
    ((X, make(2, 4, 8, 12), make(2, 4, 8, 12)), {}, ValueError, r"takes q \(b, a, s_q, d\)"),
    ((X, X, make(2, 4, 9, 16)), {}, ValueError, r"and k, v \(b, g, s_k, d\)"),
    ((make(3, 4, 8, 16), X, X), {}, ValueError, r"takes q \(b, a, s_q, d\)"),
    ((X, make(2, 3, 8, 16), make(2, 3, 8, 16)), {}, ValueError, "where g divides a"),
    ((X, X.half(), X), {}, ValueError, "of one dtype"),
    ((X,) * 3, dict(block_q=0), ValueError, "block_q must be at least 1"),
    ((X,) * 3, dict(block_k=-8), ValueError, "block_k must be at least 1"),
    ((X,) * 3, dict(block_k=2.0), TypeError, "block_k must be a whole number"),
    ((X,) * 3, dict(offset=3), ValueError, "causal=True"),
    ((X.long(),) * 3, {}, TypeError, "floating-point q, k and v, got torch.int64"),
    ((X.bool(),) * 3, {}, TypeError, "got torch.bool"),
]


@pytest.mark.parametrize("args, options, error, words", BAD_ATTENTION)
def test_bad_input_of_attention(args, options, error, words):
    with pytest.raises(error, match=words):
        unchecked(flash.attention)(*args, **options)


def test_bad_input_elsewhere():
    with pytest.raises(ValueError, match="no formula for 'flash-3': use 'plain', 'flash-1' or"):
        flash.traffic("flash-3", s=8, d=8)


@pytest.mark.parametrize("s", [256, 257])  # two full blocks, and a third
def test_bytes_are_of_blocks_of_128_unless_others_are_named(s):
    q, k, v = torch.zeros(3, 1, 1, s, 4)
    named, books = flash.counted(q, k, v, block_q=128, block_k=128), flash.counted(q, k, v)
    assert books.diff(named).unexplained == 0
    assert books.diff(flash.traffic("flash-2", s=s, d=4, itemsize=4)).unexplained == 0


def test_default_blocks_fit_a_tile_in_cache():
    assert all(heads * math.prod(default_blocks(heads)) <= 2**19 for heads in range(1, 9))
