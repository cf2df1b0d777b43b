"""A model whose linear layers round their weights and what they read, and a layer that multiplies
the 8-bit integers themselves (W8A8).
"""

import copy
import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from labutils import units
from labutils.quantization import nf4
from labutils.quantization.tiles import quantize

RoundTrip = Callable[[Tensor], Tensor]
"""Numbers to what is left of them: lambda x: quantize(x, "int8").dequantize()."""


def quantized(
    model: nn.Module, weights: RoundTrip | None = None, inputs: RoundTrip | None = None
) -> nn.Module:
    """A copy of a model in which each nn.Linear has rounded weights, and rounds what it reads.

    The numbers stay fp32 and have the values of the codes; the products and all else are fp32.
    """
    units.instance(model, nn.Module, "quantized")
    model = copy.deepcopy(model)
    for layer in model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        if weights is not None:
            layer.weight = nn.Parameter(weights(layer.weight), requires_grad=False)
        if inputs is not None:
            layer.register_forward_pre_hook(lambda _, args: inputs(args[0]))
    return model


def inputs_of(model: nn.Module, *arguments: object) -> dict[str, Tensor]:
    """What each nn.Linear reads while `model(*arguments)` runs, by its name."""
    units.instance(model, nn.Module, "inputs_of")
    read: dict[str, Tensor] = {}

    def watch(name: str) -> Callable:
        return lambda _, args: read.update({name: args[0].detach()})

    linears = [(n, layer) for n, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in linears]
    try:
        model(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return read


def keeping(count: int, inner: RoundTrip) -> RoundTrip:
    """A round trip that leaves the `count` columns of the largest |x| as they are, and out of the
    scales of the others: LLM.int8() 2208.07339 keeps every column with a number above 6."""

    count = units.whole(count, "count")

    def round_trip(x: Float[Tensor, "... h"]) -> Float[Tensor, "... h"]:
        largest = x.abs().flatten(0, -2).amax(0).topk(min(count, x.shape[-1])).indices
        rest = inner(x.index_fill(-1, largest, 0))
        return rest.index_copy(-1, largest, x[..., largest])

    return round_trip


def rotated(inner: RoundTrip, seed: int = 0) -> RoundTrip:
    """A round trip in another basis: x·R is rounded, and turned back by Rᵀ. With one R for a weight
    and for what it is multiplied with, (x·R)(W·R)ᵀ = x·Wᵀ: in earnest nothing is turned back.
    """

    def round_trip(x: Float[Tensor, "... h"]) -> Float[Tensor, "... h"]:
        R = rotation(x.shape[-1], seed).to(x)
        return inner(x @ R) @ R.mT

    return round_trip


@functools.cache
def rotation(h: int, seed: int) -> Float[Tensor, "h h"]:
    """A random orthogonal matrix."""
    h = units.whole(h, "h", 1)
    draw = torch.Generator().manual_seed(seed)
    Q, R = torch.linalg.qr(torch.randn(h, h, generator=draw, dtype=torch.float64))
    return (Q * R.diagonal().sign()).float()


# ── products of integers ─────────────────────────────────────────────────────────────────────────


def int8_product(x: Int8[Tensor, "tokens k"], w: Int8[Tensor, "d k"]) -> Int32[Tensor, "tokens d"]:
    """x·wᵀ of integers, summed in int32: exact, since k·127² < 2³¹ for k up to 133,144."""
    if x.device.type == "cpu" and _saturates():
        return x.int() @ w.int().mT
    return torch._int_mm(x.contiguous(), w.mT.contiguous())


@functools.cache
def _saturates() -> bool:
    """Whether this process forms 8-bit products in 16 bits, and cuts off what does not fit: oneDNN
    does where ONEDNN_MAX_CPU_ISA hides from it the instructions that PyTorch sees."""
    with unset_fake_temporarily():
        most = torch.full((32, 32), 127, dtype=torch.int8)
        return bool((torch._int_mm(most, most) != 32 * 127**2).any())


class Int8Linear(nn.Module):
    """y = s_x · s_w · (codes of x · codes of W) + bias, with a scale s_w for each output channel.

    limit: the largest |x| that calibration saw: what is beyond is clipped. Without one each token
        has a scale of its own, found as it comes. What a token with a NaN or an infinity gives is
        NaN
    """

    w: Tensor
    w_scale: Tensor

    def __init__(self, linear: nn.Linear, limit: float | None) -> None:
        super().__init__()
        units.instance(linear, nn.Linear, "Int8Linear")
        if limit is not None:
            limit = units.positive(limit, "limit", or_zero=True)
        kept = quantize(linear.weight, "int8", granularity="row")
        self.register_buffer("w", kept.codes())
        self.register_buffer("w_scale", kept.parts["scales"])
        self.bias, self.limit = linear.bias, limit

    def forward(self, x: Float[Tensor, "tokens k"]) -> Float[Tensor, "tokens d"]:
        largest = nf4.seen(x.abs().amax(1, keepdim=True))
        limit = largest if self.limit is None else x.new_tensor(self.limit)
        x_scale = torch.where(limit == 0, 1.0, limit / 127).where(largest.isfinite(), torch.nan)
        codes = (x / x_scale).clamp(-127, 127).round().char()  # clamped first: a cast wraps around
        y = int8_product(codes, self.w) * x_scale * self.w_scale
        return y if self.bias is None else y + self.bias
