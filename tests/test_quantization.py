"""Scales and codes against plain loops, every byte counted, integer products exact, an outlier traced.

NF4: the code book to the bit, the nearest code for every number.
"""

import copy
import math
import os
import struct
import subprocess
import sys
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils import floats, measure, quantization
from labutils.config import Mesh
from labutils.quantization import (
    BLOCK,
    NF4,
    Int8Linear,
    Nf4Linear,
    from_blocks,
    from_nf4,
    nf4_bytes,
    quantize,
    to_blocks,
    to_nf4,
)
from labutils.teach import rigs
from labutils.world import World


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_code_book_is_that_of_the_paper_to_the_bit():
    # QLoRA 2305.14314, appendix; bitsandbytes prints the same numbers.
    words = [struct.pack(">f", value).hex() for value in NF4]
    assert " ".join(words) == (
        "bf800000 bf3239b1 bf066b30 beca32a0 be91a24d be3d353f bdba7871 00000000 "
        "3da2faff 3e24cae3 3e7c04dd 3ead033a 3ee1a4b8 3f1007ab 3f3913b3 3f800000"
    )


def test_the_code_book_is_made_of_quantiles_of_a_normal_distribution():
    def quantiles(count):  # from the offset towards one half, which is left out
        offset = 0.9677083
        return [NormalDist().inv_cdf(offset + (0.5 - offset) * i / count) for i in range(count)]

    values = sorted([*quantiles(8), 0.0, *(-each for each in quantiles(7))])
    assert [value / max(values) for value in values] == pytest.approx(NF4, abs=2e-7)


def plain(x):
    """Each number's nearest code and its block's scale, one after the other."""
    flat, found = x.flatten().tolist(), []
    for at in range(0, len(flat), BLOCK):
        block = flat[at : at + BLOCK]
        scale = max(abs(value) for value in block)
        found += [scale * min(NF4, key=lambda code: abs(code - value / scale)) for value in block]
    return torch.tensor(found).view(x.shape)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (5, 77), (1,), (2, 1, 33)])
def test_every_number_takes_its_nearest_code(shape):
    x = drawn(*shape)
    y = from_nf4(to_nf4(x, double=False), shape, torch.float32, double=False)
    torch.testing.assert_close(y, plain(x), rtol=1e-6, atol=1e-7)


def test_of_two_codes_as_near_the_lower_one():
    middle = (torch.tensor(NF4[7]) + torch.tensor(NF4[8])) / 2
    x = torch.stack([torch.tensor(1.0), middle, -torch.tensor(1.0)])
    y = from_nf4(to_nf4(x, double=False), (3,), torch.float32, double=False)
    assert y.tolist() == [1.0, 0.0, -1.0]


def test_codes_stand_two_to_a_byte_the_first_on_top():
    x = torch.tensor([-1.0, 1.0, 0.0])
    assert to_nf4(x, double=False)[4:].tolist() == [0 * 16 + 15, 7 * 16]


@settings(max_examples=25)
@given(st.integers(1, 40_000), st.booleans())
def test_bytes_are_counted_to_the_last(numel, double):
    assert len(to_nf4(torch.ones(numel), double=double)) == nf4_bytes(numel, double=double)


def test_bits_of_a_parameter_are_those_of_the_paper():
    # QLoRA 2305.14314, section 3: 0.5 bits for the scales become 0.127.
    n = 2**26
    assert 8 * nf4_bytes(n, double=False) / n - 4 == 0.5
    assert 8 * nf4_bytes(n) / n - 4 == pytest.approx(0.127, abs=5e-4)


def test_the_second_quantization_moves_scales_by_a_sixteenth_of_their_spread_at_most():
    x = drawn(64 * 700) * torch.linspace(0.5, 2, 700).repeat_interleave(64)
    once = from_nf4(to_nf4(x, double=False), x.shape, torch.float32, double=False)
    twice = from_nf4(to_nf4(x), x.shape, torch.float32)
    scales = x.view(-1, 64).abs().amax(1)
    spread = (scales - scales.mean()).abs().max()
    moved = (once - twice).abs().max()
    assert 0 < moved <= spread / 16
    wrong = (x - twice).norm() / (x - once).norm()
    assert wrong < 1.05


@pytest.mark.parametrize("n", [1, 63, 65, 130, 64 * 257 - 1])
def test_a_last_block_that_is_not_full_comes_back_from_the_second_quantization_too(n):
    x = drawn(n)
    once = from_nf4(to_nf4(x, double=False), (n,), torch.float32, double=False)
    scales = torch.stack([block.abs().max() for block in x.split(64)])
    twice = from_nf4(to_nf4(x), (n,), torch.float32)
    spread = (scales - scales.mean()).abs().max()
    assert (once - twice).abs().max() <= spread / 16 + 1e-6 * scales.max()


def test_zeros_stay_zeros_and_large_blocks_are_alone():
    x = torch.zeros(128)
    x[64:] = 1e30
    for double in (False, True):
        y = from_nf4(to_nf4(x, double=double), (128,), torch.float32, double=double)
        assert y[:64].abs().max() <= 1e30 * 1e-6 and y.isfinite().all()
    assert torch.equal(from_nf4(to_nf4(x[:64]), (64,), torch.float32), x[:64])


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 64\] takes 107 bytes in NF4 with.*got 74"):
        from_nf4(to_nf4(drawn(2, 64)), (3, 64), torch.float32)


def test_a_frozen_layer_is_the_product_with_its_dequantized_weight():
    whole = nn.Linear(96, 10)
    layer = Nf4Linear(whole)
    twin = nn.Linear(96, 10)
    twin.weight = nn.Parameter(layer.dequantized(torch.float32), requires_grad=False)
    twin.bias = whole.bias
    x, other = (drawn(4, 7, 96).requires_grad_() for _ in range(2))
    y, z = layer(x), twin(other)
    (y * y).sum().backward()
    gradient, whole.bias.grad = whole.bias.grad, None
    (z * z).sum().backward()
    assert torch.equal(y, z)
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(gradient, whole.bias.grad)


def test_nothing_is_kept_for_the_backward_pass_and_no_conversion_touches_the_bytes():
    layer = Nf4Linear(nn.Linear(96, 10, bias=False))
    x = drawn(4, 96).requires_grad_()
    assert measure.saved_activations(lambda: layer(x).sum(), layer).total == 0
    before = layer.packed.clone()
    half = layer.to(torch.bfloat16)
    assert torch.equal(half.packed, before)
    assert half(x.detach().bfloat16()).dtype == torch.bfloat16
    assert quantization.nf4_bytes(960) == before.numel()


# ── tiles that share a scale ─────────────────────────────────────────────────────────────────────

GRAINS = {
    "tensor": (6, 8),
    "row": (1, 8),
    4: (1, 4),
    5: (1, 5),
    (4, 3): (4, 3),
    (6, 1): (6, 1),
}  # some end short


def by_hand(x, bits, tile, affine):
    """Tile after tile, number after number."""
    out, (r, c), top = torch.empty_like(x), tile, 2**bits - 1 if affine else 2 ** (bits - 1) - 1
    for i in range(0, x.shape[0], r):
        for j in range(0, x.shape[1], c):
            part = x[i : i + r, j : j + c]
            low, high = (
                (min(part.min().item(), 0), max(part.max().item(), 0))
                if affine
                else (0, part.abs().max().item())
            )
            scale = (high - low) / top or 1.0
            zero = round(-low / scale)
            codes = (part / scale).round() + zero
            out[i : i + r, j : j + c] = (codes.clamp(-top * (not affine), top) - zero) * scale
    return out


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_a_number_takes_the_nearest_value_of_the_grid_of_its_tile(grain, bits, affine):
    x = drawn(6, 8) + 0.5
    got = quantize(x, f"int{bits}", granularity=grain, affine=affine).dequantize()
    torch.testing.assert_close(got, by_hand(x, bits, GRAINS[grain], affine), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", [floats.MXFP4, floats.NVFP4], ids=lambda fmt: fmt.name)
def test_floats_in_blocks_are_those_of_lab_01(fmt):
    x = (drawn(3, 64) * torch.tensor([[1.0], [1e-3], [50.0]])).bfloat16().float()
    x[0, :32] = 0
    got = quantize(x, fmt)
    whole = got.parts.get("scale of the tensor", torch.ones(1)).item()
    for block, found in zip(
        x.view(-1, fmt.block_size), got.dequantize().view(-1, fmt.block_size), strict=True
    ):
        right = fmt.decode(*fmt.encode([value / whole for value in block.double().tolist()]))
        torch.testing.assert_close(found, torch.tensor(right) * whole, rtol=1e-6, atol=0)


def test_nf4_is_the_frozen_weight_of_qlora():
    x = drawn(3, 64)
    right = from_nf4(to_nf4(x, double=False), x.shape, torch.float32, double=False)
    assert torch.equal(quantize(x, "nf4").dequantize(), right)
    short = quantize(x[:, :33], "nf4")  # 99 numbers: the second block is short
    whole = quantization.quantized_bytes((3, 33), "nf4")
    assert whole.diff(short.ledger, by="name").unexplained == 0 and whole.total == 50 + 2 * 4
    first = quantize(x[:, :33].reshape(99)[:64], "nf4").dequantize()
    assert torch.equal(short.dequantize().reshape(99)[:64], first)


KINDS = [
    ("int8", "tensor"),
    ("int8", "row"),
    ("int4", 16),
    ("int3", (4, 24)),
    ("mxfp4", None),
    ("nvfp4", None),
    ("nf4", None),
]


@pytest.mark.parametrize(("fmt", "grain"), KINDS, ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_bytes_formula_dry_run_and_kept_agree(fmt, grain, affine):
    affine = affine and fmt.startswith("int")
    settings = dict(granularity=grain, affine=affine)
    formula = quantization.quantized_bytes((6, 64), fmt, **settings)
    kept = quantize(drawn(6, 64), fmt, **settings).ledger
    dry = World(Mesh(), engine="dry").run(
        lambda rank: quantize(torch.randn(6, 64), fmt, **settings).ledger
    )
    assert formula.diff(dry).unexplained == 0 == dry.diff(kept).unexplained
    assert {
        line.name for line in formula.diff(kept).rows if line.predicted != line.measured
    } == set()


def test_what_is_asked_of_the_formula_is_what_quantize_does():
    own = floats.BlockFormat("own", floats.E2M1, 8, floats.E4M3)
    kept = quantize(drawn(6, 64), own).ledger
    assert quantization.quantized_bytes((6, 64), own).diff(kept).unexplained == 0
    with pytest.raises(ValueError, match="affine=True and clip= are for integers"):
        quantization.quantized_bytes((6, 64), "nvfp4", affine=True)
    wide = floats.BlockFormat("wide", floats.E2M1, 8, floats.FP16)  # its scales became e4m3's: zeros
    with pytest.raises(ValueError, match="wide: scales are kept in e8m0 or e4m3, not in fp16"):
        quantize(drawn(6, 64), wide)


@pytest.mark.parametrize(("fmt", "grain"), KINDS, ids=str)
def test_codes_are_where_the_numbers_are(fmt, grain):
    kept = quantize(torch.empty(6, 64, device="meta"), fmt, granularity=grain)
    assert {part.device.type for part in kept.parts.values()} == {"meta"}
    assert kept.dequantize().device.type == "meta"


def test_moments_of_few_bits_come_back_as_they_were():
    def trained(steps, state=None, weights=None):
        p = nn.Parameter(drawn(64, 128) if weights is None else weights)
        optimizer = quantization.Adam8([p], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in steps:
            p.grad = torch.roll(drawn(64, 128), step)
            optimizer.step()
        return p.detach().clone(), optimizer.state_dict()

    whole, _ = trained(range(4))
    half, state = trained(range(2))
    again, resumed = trained(range(2, 4), copy.deepcopy(state), half)
    assert torch.equal(again, whole)
    assert resumed["state"][0]["exp_avg"].dtype == torch.uint8


@settings(max_examples=30)
@given(st.integers(2, 8), st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_packed_codes_come_back(bits, codes):
    codes = torch.tensor(codes) % 2**bits
    packed = quantization.pack_codes(codes, bits)
    assert packed.numel() == math.ceil(len(codes) * bits / 8)
    assert quantization.unpack_codes(packed, bits, len(codes)).tolist() == codes.tolist()
    text = "".join(f"{code:0{bits}b}" for code in codes.tolist())
    assert "".join(f"{byte:08b}" for byte in packed.tolist())[: len(text)] == text


def test_zeros_and_one_sided_tiles():
    for affine in (False, True):
        assert (
            quantize(torch.zeros(2, 4), "int4", affine=affine).dequantize().tolist()
            == [[0.0] * 4] * 2
        )
        x = -torch.arange(1.0, 9)[None]
        assert quantize(x, "int4", affine=affine).dequantize().min() == pytest.approx(-8, rel=1e-6)
    # All of int8's numbers above 0, as behind a ReLU: twice as fine with a zero point.
    x = drawn(1, 4096).abs()
    errors = [
        (quantize(x, "int8", affine=affine).dequantize() - x).norm() for affine in (True, False)
    ]
    assert errors[1] / errors[0] == pytest.approx(255 / 127, rel=0.05)


def test_clipping_comes_before_rounding_and_mse_is_the_best_limit_tried():
    x = drawn(2, 512)
    x[0, 0] = 30.0
    error = {}
    for clip in ("", "mse"):
        y = quantize(x, "int4", granularity="row", clip=clip).dequantize()
        error[clip] = (y - x).square().sum(1)
    assert y[0, 0] == y[0].max() < 30
    assert (error["mse"] < error[""]).all() and error["mse"][0] < 0.95 * error[""][0]
    for limit in (5.0, 15.0, 25.0):
        clipped = x.clamp(-limit, limit)
        y = quantize(clipped, "int4", granularity="row").dequantize()
        assert error["mse"][0] <= (y - x)[0].square().sum() * 1.01


def test_what_cannot_be_is_said():
    x = drawn(4, 6)
    for message, arguments in {
        "no format 'int9'": ("int9",),
        "granularity must be": ("int8", 0),
        "granularity='column'": ("int8", "column"),
        "scales of this format stand for 32": ("mxfp4", 16),
        "are for integers, got 'nf4'": ("nf4", None, True),
        "clip='most': give 'mse'": ("int8", None, False, "most"),
    }.items():
        options = dict(zip(("granularity", "affine", "clip"), arguments[1:], strict=False))
        with pytest.raises(ValueError, match=message):
            quantize(drawn(4, 64) if arguments[0] == "nf4" else x, arguments[0], **options)
    with pytest.raises(ValueError, match=r"\[0, 4\] has no numbers"):
        quantize(torch.zeros(0, 4), "int8")


# ── layers ───────────────────────────────────────────────────────────────────────────────────────


def rounding(fmt, **settings):
    return lambda x: quantize(x, fmt, **settings).dequantize()


def test_integer_products_are_those_of_fp64_to_the_last():
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-127, 128, (n, 96), generator=draw, dtype=torch.int8) for n in (5, 7))
    got = quantization.int8_product(x, w)
    assert got.dtype == torch.int32
    assert torch.equal(got.double(), x.double() @ w.double().mT)


def test_so_they_are_where_onednn_is_told_of_fewer_instructions():
    """Where PyTorch sees VNNI and oneDNN must not, `torch._int_mm` gives 12,240 for 1,548,384."""
    code = "import torch; from labutils.quantization import int8_product; "
    code += "x = torch.full((64, 96), 127, dtype=torch.int8); "
    code += "print(int8_product(x, x).unique().tolist() == [96 * 127**2])"
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr


@pytest.mark.parametrize("limit", [None, 1.5])
def test_an_int8_layer_is_the_product_of_rounded_numbers(limit):
    linear, x = nn.Linear(96, 10), drawn(5, 96)
    x[0] = 0
    read = x if limit is None else x.clamp(-limit, limit)
    scale = limit / 127 if limit else None
    rounded = (read / scale).round() * scale if limit else rounding("int8", granularity="row")(read)
    right = rounded @ rounding("int8", granularity="row")(linear.weight).mT + linear.bias
    layer = quantization.Int8Linear(linear, limit)
    torch.testing.assert_close(layer(x), right, rtol=1e-5, atol=1e-5)
    assert {name: tensor.nbytes for name, tensor in layer.named_buffers()} == {
        "w": 960,
        "w_scale": 40,
    }


def test_a_rounded_model_reads_and_multiplies_rounded_numbers_and_leaves_the_model_alone():
    model, x = (
        nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(False),
        drawn(4, 16),
    )
    first, _, last = model
    weights, inputs = rounding("int4", granularity="row"), rounding("int8", granularity="row")
    got = quantization.quantized(model, weights, inputs)(x)
    middle = torch.tanh(inputs(x) @ weights(first.weight).mT + first.bias)
    torch.testing.assert_close(got, inputs(middle) @ weights(last.weight).mT + last.bias)
    assert not first._forward_pre_hooks and not torch.equal(first.weight, weights(first.weight))
    torch.testing.assert_close(quantization.quantized(model)(x), model(x))


def test_kept_columns_are_whole_and_outside_the_scale():
    x = drawn(4, 16)
    x[:, 3] *= 100
    got = quantization.keeping(1, rounding("int8"))(x)
    rest = [i for i in range(16) if i != 3]
    assert torch.equal(got[:, 3], x[:, 3])
    assert torch.equal(got[:, rest], rounding("int8")(x[:, rest]))


def test_a_rotation_is_orthogonal_and_spreads_what_stands_out():
    R = quantization.rotation(64, 1)
    torch.testing.assert_close(R @ R.mT, torch.eye(64), rtol=0, atol=1e-5)
    assert torch.equal(R, quantization.rotation(64, 1))
    assert not torch.equal(R, quantization.rotation(64, 2))
    x = drawn(8, 64)
    x[:, 3] *= 10
    plain, turned = (
        rounding("int4", granularity="row"),
        quantization.rotated(rounding("int4", granularity="row"), 1),
    )
    assert (turned(x) - x).norm() < 0.9 * (plain(x) - x).norm()
    torch.testing.assert_close(quantization.rotated(lambda y: y, 1)(x), x, rtol=1e-4, atol=1e-4)


# ── error feedback, Kashin ───────────────────────────────────────────────────────────────────────


def by_cholesky(w, H, kept):
    """GPTQ as it is run: row j of the Cholesky factor of H⁻¹ is what the plain loop finds when it comes to column j, over the root of its diagonal."""
    scales, w = kept.scale_of_each().double(), w.double().clone()
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    for j in range(w.shape[1]):
        rounded = (w[:, j] / scales[:, j]).round().clamp(-3, 3) * scales[:, j]
        error, w[:, j] = (w[:, j] - rounded) / U[j, j], rounded
        w[:, j + 1 :] -= error[:, None] * U[j, j + 1 :]
    return w


def test_error_feedback_is_gptq_and_better_where_it_counts():
    mix = drawn(24, 24, seed=1)
    seen, new = drawn(400, 24) @ mix, drawn(400, 24, seed=2) @ mix
    w, H = drawn(8, 24, seed=3), quantization.hessian(seen)
    fed, nearest = quantization.error_feedback(w, H, "int3", 8), quantize(w, "int3", granularity=8)
    torch.testing.assert_close(fed, by_cholesky(w, H, nearest))
    wider = w.abs().amax(1, keepdim=True) / 2
    codes = quantization.error_feedback(w, H, "int3", scales=wider) / wider
    assert (codes - codes.round()).abs().max() < 1e-6 and codes.abs().max() == 2
    scales = nearest.scale_of_each()
    codes = fed / scales
    assert (codes - codes.round()).abs().max() < 1e-5 and codes.abs().max() <= 3 + 1e-5
    for x in (seen, new):
        off = [
            ((x @ (q.float() - w).mT).norm() / (x @ w.mT).norm()).item()
            for q in (fed, nearest.dequantize())
        ]
        assert off[0] < 0.8 * off[1]
    assert (fed - w).norm() > (nearest.dequantize() - w).norm()  # not by smaller errors of weights


def test_with_inputs_that_know_nothing_of_one_another_nothing_is_fed_back():
    w = drawn(8, 24)
    fed = quantization.error_feedback(w, torch.eye(24, dtype=torch.float64), "int4")
    torch.testing.assert_close(fed.float(), rounding("int4", granularity="row")(w))


def test_a_pair_of_steps_leaves_one_minus_two_over_pi():
    # Merkulov et al. 2404.09737; a Gaussian's mean |r| is √(2/π) of its root mean square.
    norms = []
    for seed in range(3):
        x = drawn(512, seed=seed).double()
        u, v, norm = quantization.kashin(x, quantization.rotation(512, seed).double(), 10)
        rest = x - u - quantization.rotation(512, seed).double() @ v
        assert rest.norm() / x.norm() == pytest.approx(norm[-1])
        norms.append(norm[-1] ** 0.1)
        assert max(u.abs().max(), v.abs().max()) < 0.6 * x.abs().max()
    assert sum(norms) / 3 == pytest.approx(1 - 2 / math.pi, abs=0.02)


# ── a trained network ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def minilm():
    return rigs.quantization.load_minilm()


def test_what_stands_out_in_minilm(minilm):
    assert sum(p.numel() for p in minilm.parameters()) == 22_565_376
    places = [divmod(layer.down.weight.abs().argmax().item(), 1536) for layer in minilm.layers]
    assert places[:4] == [(99, 856), (99, 607), (99, 1004), (99, 358)]
    sentences = rigs.quantization.token_ids(rigs.quantization.docstrings(6))
    read, embedded = quantization.inputs_of(minilm, sentences), minilm(sentences)
    assert not minilm.layers[0].down._forward_pre_hooks
    assert list(read)[-1] == "layers.5.down" and len(read) == 36
    first = [token for each in sentences for token in [True] + [False] * (len(each) - 1)]
    assert (
        read["layers.0.down"][:, 856] > 10
    ).tolist() == first  # the unit fires on [CLS] and nowhere else
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(6))
    torch.testing.assert_close(embedded[2:3], minilm(sentences[2:3]), rtol=0, atol=1e-5)


def test_sentences_are_the_same_everywhere():
    sentences = rigs.quantization.docstrings(137)
    assert len(set(sentences)) == 137 and sentences[-1].startswith("Decorator to mark an object")


def test_what_to_install_is_said(monkeypatch):
    monkeypatch.setattr(rigs.quantization, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e ".\[real\]"'):
        rigs.quantization.load_minilm()


# ── what is no number ──────────────────────────────────────────────────────────────────────────────────────────────

FORMATS = [
    ("int8", dict(granularity=4)), ("int8", dict(granularity="tensor", affine=True)),
    ("int4", dict(granularity="row", affine=True)), ("int3", dict(granularity=4, clip="mse")),
    ("mxfp4", {}), ("nvfp4", {}), ("nf4", {}),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt, how", FORMATS)
def test_what_is_no_number_comes_back_as_nan_with_all_that_share_its_scale(fmt, how, wrong):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    x[1, 5] = wrong
    y = quantize(x, fmt, **how).dequantize()
    size = {"mxfp4": 32, "nf4": 64, "nvfp4": 512}.get(fmt)
    size = size or {"row": 128, "tensor": 512}.get(how["granularity"], how["granularity"])
    shared = torch.arange(512).view(4, 128) // size == (128 + 5) // size
    assert y[shared].isnan().all() and y[~shared].isfinite().all()
    x[1, 5] = 0.0
    plain = quantize(x, fmt, **how).dequantize()
    assert torch.equal(y[~shared], plain[~shared])


@pytest.mark.parametrize("fmt, how", FORMATS)
def test_the_largest_numbers_of_fp32_are_numbers(fmt, how):
    x = torch.tensor([[3e38, -3e38] + [1e38] * 62])
    y = quantize(x, fmt, **how).dequantize()
    assert y.isfinite().all()
    assert (y[0, 0] - 3e38).abs() <= 0.35 * 3e38 and (y[0, 1] + 3e38).abs() <= 0.35 * 3e38


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_layer_of_integers_shows_what_is_no_number(wrong):
    """In the token that has it, and in no other."""
    for limit in (None, 1.0):
        layer = Int8Linear(nn.Linear(8, 4), limit)
        x = torch.ones(17, 8)
        x[3, 2] = wrong
        y = layer(x)
        assert y[3].isnan().all() and y[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nf4_and_moments_show_what_is_no_number(wrong):
    x = torch.ones(512)
    x[300] = wrong
    assert from_nf4(to_nf4(x), (512,), torch.float32).isnan().all()  # the mean of scales is shared
    y = from_nf4(to_nf4(x, double=False), (512,), torch.float32, double=False)
    assert y[256:320].isnan().all() and y[:256].isfinite().all() and y[320:].isfinite().all()
    y = from_blocks(to_blocks(x, block=64), (512,), block=64)
    assert y[256:320].isnan().all() and y[:256].isfinite().all() and y[320:].isfinite().all()


@pytest.mark.parametrize("granularity", [(0, 4), (4, 0), (4,), (1, 2, 3), 0])
def test_a_tile_has_two_sides(granularity):
    with pytest.raises((ValueError, TypeError)):
        quantize(torch.ones(4, 4), "int8", granularity=granularity)


@pytest.mark.parametrize(
    "wrong",
    [dict(lr=-1.0), dict(lr=math.nan), dict(betas=(1.5, 2.0)), dict(block=0), dict(eps=-1.0),
     dict(weight_decay=-0.1)],
)  # fmt: skip
def test_settings_of_an_optimizer_that_are_none(wrong):
    with pytest.raises(ValueError):
        quantization.Adam8([nn.Parameter(torch.ones(2))], **wrong)


def test_a_scheme_of_another_format():
    with pytest.raises((ValueError, TypeError)):
        quantization.Scheme(forward=torch.float16)
    with pytest.raises(ValueError, match="history must be at least 1"):
        quantization.Scheme(scaling="delayed", history=0)


# ── ends of ranges ────────────────────────────────────────────────────────────────────────────────


def test_small_blocks_beside_large_ones_keep_their_digits_in_nvfp4():
    """Scales of blocks use all of e4m3, whose largest number is 448."""
    x = torch.cat([torch.full((16,), 1000.0), torch.full((16,), 0.5)])
    kept = quantize(x, "nvfp4")
    torch.testing.assert_close(kept.dequantize(), x, rtol=1 / 16, atol=0)
    assert kept.parts["scale of the tensor"].item() == pytest.approx(1000 / (6 * 448))


def test_the_smallest_scale_of_mxfp4_is_a_number():
    x = torch.full((32,), 2.0**-126)
    assert torch.equal(quantize(x, "mxfp4").dequantize(), x)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_zero_keeps_its_sign(fmt):
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0])
    assert torch.equal(quantize(x, fmt).dequantize().signbit(), x.signbit())


def test_the_damping_is_a_share_of_the_mean_diagonal():
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    wanted = torch.tensor([[2.05, 4.0], [4.0, 8.05]], dtype=torch.float64)
    torch.testing.assert_close(quantization.hessian(x), wanted)


def test_nf4_of_zeros_and_of_tiny_numbers():
    assert to_nf4(torch.zeros(64), double=False)[4:].tolist() == [0x77] * 32
    x = 1e-6 * torch.tensor(NF4).repeat(4)
    again = from_nf4(to_nf4(x, double=False), x.shape, x.dtype, double=False)
    torch.testing.assert_close(again, x, rtol=1e-6, atol=0)


def test_the_scales_of_scales_use_all_of_e4m3():
    x = torch.ones(2, 64) * torch.tensor([[1.0], [3.0]])  # scales 1 and 3, their mean 2
    assert to_nf4(x)[:8].view(torch.float32).tolist() == pytest.approx([2, 1 / 448])
