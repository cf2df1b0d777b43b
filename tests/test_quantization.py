"""NF4: the code book to the bit, the nearest code for every number, every byte counted."""

import struct
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils import measure, quantization
from labutils.quantization import BLOCK, NF4, Nf4Linear, from_nf4, nf4_bytes, to_nf4


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
