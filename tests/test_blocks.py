"""Training with operands in blocks, emulated: MXFP8 and NVFP4."""

import pytest
import torch
from torch import nn

from labutils import floats
from labutils.quantization import OPERANDS, BlockLinear, hadamard, quantize, use_blocks
from labutils.teach import rigs


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(x, fmt=floats.NVFP4):
    return quantize(x.contiguous(), fmt).dequantize()


def products(layer, x, grad):
    """y, and the gradients of x and of the weights."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, (x, layer.weight), grad))


def test_hadamard_is_orthogonal_and_has_entries_of_one_size():
    H = hadamard(16)
    assert torch.allclose(H @ H.mT, torch.eye(16, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(H.abs(), torch.full_like(H, 0.25))
    for size in (0, 12, 2.0):
        with pytest.raises(ValueError, match="power of two"):
            hadamard(size)


@pytest.mark.parametrize("fmt", [floats.MXFP8, floats.MXFP4, floats.NVFP4], ids=lambda f: f.name)
def test_blocks_lie_along_what_each_product_adds_up(fmt):
    x, grad, whole = draw(64, 96), draw(64, 32, seed=1), nn.Linear(96, 32)
    w = whole.weight.detach()
    y, of_x, of_w = products(BlockLinear(whole, fmt), x, grad)
    assert torch.equal(y, near(x, fmt) @ near(w, fmt).mT + whole.bias)
    assert torch.equal(of_x, near(grad, fmt) @ near(w.mT, fmt).mT)
    assert torch.equal(of_w, near(grad.mT, fmt) @ near(x.mT, fmt).mT)


@pytest.mark.parametrize("operand", ["x", "weight", "grad"])
def test_only_the_operands_that_are_named_are_rounded(operand):
    x, grad, whole = draw(64, 32), draw(64, 32, seed=1), nn.Linear(32, 32, bias=False)
    found = products(BlockLinear(whole, floats.NVFP4, operands=[operand]), x, grad)
    for value, parts in zip(found, (("x", "weight"), ("grad", "weight"), ("grad", "x")), strict=True):
        plain = dict(x=x, weight=whole.weight, grad=grad)
        exact = (
            plain["x"] @ plain["weight"].mT if parts == ("x", "weight")
            else plain["grad"] @ plain["weight"] if parts == ("grad", "weight")
            else plain["grad"].mT @ plain["x"]
        )  # fmt: skip
        assert torch.allclose(value, exact, atol=1e-5) == (operand not in parts)


def test_a_rotation_changes_only_how_the_gradient_of_the_weights_is_rounded():
    x, grad, whole = draw(64, 32), draw(64, 32, seed=1), nn.Linear(32, 32, bias=False)
    exact = products(whole, x, grad)
    turned = products(BlockLinear(whole, floats.NVFP4, rotate=True, operands=()), x, grad)
    for a, b in zip(exact, turned, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    plain = products(BlockLinear(whole, floats.NVFP4), x, grad)
    turned = products(BlockLinear(whole, floats.NVFP4, rotate=True), x, grad)
    assert [torch.equal(a, b) for a, b in zip(plain, turned, strict=True)] == [True, True, False]


def test_a_rotation_draws_its_signs_and_turns_tokens_16_by_16():
    x, grad, whole = draw(64, 32), draw(64, 32, seed=1), nn.Linear(32, 32, bias=False)
    layer, generator = BlockLinear(whole, floats.NVFP4, rotate=True), torch.Generator().manual_seed(0)
    for _ in range(2):
        signs = torch.randint(0, 2, (16,), generator=generator) * 2.0 - 1
        turn = torch.block_diag(*[signs.diag() @ hadamard(16).float()] * 4)
        of_w = near(grad.mT @ turn) @ near(x.mT @ turn).mT
        assert torch.allclose(products(layer, x, grad)[2], of_w, atol=1e-4)


def test_stochastic_rounding_is_right_in_the_mean():
    x, generator = draw(64, 64), torch.Generator().manual_seed(0)
    many = 256
    mean = sum(quantize(x, "nvfp4", generator=generator).dequantize() for _ in range(many)) / many
    once = (near(x) - x).norm() / x.norm()
    # What is left is noise, and that a block's largest is clipped where its scale is rounded down.
    assert (mean - x).norm() / x.norm() < 0.02 < 0.09 < once
    with pytest.raises(ValueError, match="generator= is for floats in blocks"):
        quantize(x, "int8", generator=generator)


def test_only_gradients_are_rounded_stochastically():
    x, grad, whole = draw(64, 32), draw(64, 32, seed=1), nn.Linear(32, 32, bias=False)
    layer = BlockLinear(whole, floats.NVFP4, generator=torch.Generator().manual_seed(0))
    first, second = (products(layer, x, grad) for _ in range(2))
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, False]


def test_use_blocks_leaves_the_head_and_the_parameters():
    model = rigs.fp8.reader()
    before = list(model.parameters())
    assert use_blocks(model, floats.NVFP4) is model
    assert sum(isinstance(each, BlockLinear) for each in model.modules()) == 12
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert type(model.head) is nn.Linear
    with pytest.raises(ValueError, match="no linear layer"):
        use_blocks(nn.LayerNorm(4), floats.NVFP4)


def test_gradients_in_nvfp4_are_those_of_the_record():
    """Seed 0, one batch: nothing that was recorded depends on who recorded it."""
    found = rigs.fp8.sweep_record("averaged", "rounded", "batches", "seed")
    error = rigs.fp8.block_error(
        rigs.fp8.reader(), floats.NVFP4, next(rigs.fp8.excerpts(100)), operands=["grad"]
    )
    assert error == pytest.approx(*found["gradients, nearest", "1", "0"], rel=0.02)


@pytest.mark.parametrize("drawn", OPERANDS)
def test_only_what_is_drawn_is_drawn(drawn):
    """Twice the same of the other two, and not of it."""
    how = dict(generator=torch.Generator().manual_seed(0), drawn=(drawn,))
    layer = BlockLinear(nn.Linear(32, 16, bias=False), floats.NVFP4, **how)
    x = draw(64, 32)
    for operand in OPERANDS:
        one, two = (layer.rounded(x, operand) for _ in range(2))
        assert torch.equal(one, two) == (operand != drawn)


def test_what_repeats_in_every_batch_does_not_average_out():
    """Of 64 batches against one, in each recorded seed: weights and embeddings keep most of their error, what hangs on the text before loses three fifths. Drawn anew in each batch, weights and embeddings lose more than that, too."""
    found = rigs.fp8.sweep_record("averaged", "rounded", "batches")
    repeated, others = ("weights", "inputs of the first"), ("inputs of the others",)

    def kept(names):
        both = (zip(found[name, "1"], found[name, "64"], strict=True) for name in names)
        return [b / a for pairs in both for a, b in pairs]

    assert min(kept(repeated)) > 0.7 and max(kept(others)) < 0.4
    assert max(kept(f"{name}, stochastic" for name in repeated)) < 0.4
    model = rigs.fp8.reader()
    tokens, _ = next(rigs.fp8.excerpts(100))
    read = model.blocks[0].attention_norm(model.tokens(tokens))
    assert torch.equal(read[tokens == tokens[0, 0]].unique(dim=0), read[:1, 0])
