"""Training with operands in blocks: MXFP8, MXFP4 and NVFP4, emulated; with NVFP4 the recipe of
NVIDIA, arXiv:2509.25149: stochastic rounding of gradients, a random Hadamard transform.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labutils import units
from labutils.floats import BlockFormat
from labutils.quantization.fp8 import OPERANDS
from labutils.quantization.tiles import quantize


@functools.cache
def hadamard(n: int) -> Float[Tensor, "n n"]:
    """The orthogonal matrix of entries ±1/√n in fp64. Raises ValueError where n is no power of two.

    >>> hadamard(2).mul(2**0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    if not units.is_whole(n) or n < 1 or n & (n - 1):
        raise ValueError(f"no Hadamard matrix of size {n!r} here: choose a power of two")
    units.writable(n * n, f"entries of n={n} are", "rotate in blocks of 16", most=2**26)
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)]) / 2**0.5
    return H


class BlockLinear(nn.Module):
    """A linear layer whose three products take operands in blocks of `fmt`, which lie along what is
    added up. The numbers have the values of the codes; sums are fp32, or fp64 in a model of fp64.

    operands: which of "x", "weight" and "grad" (gradients of outputs) are rounded
    generator: draws how those of `drawn` are rounded, stochastically; all others, and all without
        one, go to the nearest number
    rotate: for the gradient of the weights, G and x are multiplied by ±1 at random and by
        `hadamard(16)` along tokens, 16 by 16, which their product does not notice
    """

    def __init__(
        self, whole: nn.Linear, fmt: BlockFormat, *,
        generator: torch.Generator | None = None, rotate: bool = False,
        operands: Sequence[str] = OPERANDS, drawn: Sequence[str] = ("grad",),
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        self.fmt, self.generator, self.rotate = fmt, generator, rotate
        self.operands, self.drawn = operands, drawn
        self.draws = torch.Generator().manual_seed(0)  # of signs

    def rounded(self, x: Float[Tensor, "m k"], operand: str) -> Float[Tensor, "m k"]:
        """What is left of "x", "weight" or "grad"."""
        if operand not in self.operands:
            return x
        generator = self.generator if operand in self.drawn else None
        return quantize(x.contiguous(), self.fmt, generator=generator).dequantize().to(x.dtype)

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... n"]:
        y = _Products.apply(x.flatten(0, -2), self.weight, self).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class _Products(torch.autograd.Function):
    """x·Wᵀ, and behind it G·W and Gᵀ·x, each on operands in blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: BlockLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return layer.rounded(x, "x") @ layer.rounded(weight, "weight").mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        grad_x = layer.rounded(grad, "grad") @ layer.rounded(weight.mT, "weight").mT
        x, grad = x.mT, grad.mT
        if layer.rotate:
            signs = torch.randint(0, 2, (16, 1), generator=layer.draws) * 2 - 1
            turn = (signs * hadamard(16)).to(x)
            x, grad = (each.unflatten(-1, (-1, 16)).matmul(turn).flatten(-2) for each in (x, grad))
        return grad_x, layer.rounded(grad, "grad") @ layer.rounded(x, "x").mT, None


def use_blocks(module: nn.Module, fmt: BlockFormat, **how: Any) -> nn.Module:
    """The module with every linear layer but the head as a `BlockLinear` of a format, in place;
    `how` is its options. ValueError for a module without linear layers."""
    units.instance(module, nn.Module, "use_blocks")
    units.instance(fmt, BlockFormat, "use_blocks")
    found = {at: each for at, each in module.named_modules() if type(each) is nn.Linear}
    inner = {at: each for at, each in found.items() if not at.endswith("head")}
    if not inner:
        raise ValueError("this module has no linear layer that could be in blocks")
    for path, layer in inner.items():
        module.set_submodule(path, BlockLinear(layer, fmt, **how))
    return module
