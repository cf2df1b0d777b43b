"""FP8 training: the three products of a linear layer on operands of 8 bits, emulated exactly on any
machine (Transformer Engine's recipes, torchao's Float8Linear).

A number of 8 bits is kept times a *scale*, which brings the largest |x| to the largest the format
has; the *inverse* scale brings it back. Sums are fp32, of exact products; the matrix unit of an
H800 keeps about 14 bits (lab 15b).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from labutils import precision, units
from labutils.tensor_parallel import ColumnLinear, RowLinear, Split, TokenLinear
from labutils.world import Comm

F8_E4M3, F8_E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUP = 128
"""How many products are added up before a scale can be applied: the length of a tile."""

ALONG, SQUARE = (1, GROUP), (GROUP, GROUP)
"""Tiles of activations and gradients, along what is added up; and of weights, which are multiplied
both ways round. Source: DeepSeek-V3 2412.19437, section 3.3.2."""

SCALINGS = ("none", "current", "delayed", "tiles")
OPERANDS = ("x", "weight", "grad")
Cut = tuple[str, ...]
_SMALLEST = 1e-30  # of an amax: a tensor of zeros has a scale, too


def largest(dtype: torch.dtype) -> float:
    """The largest number of an 8-bit format; int8 is used from −127 to 127.

    >>> largest(F8_E4M3), largest(F8_E5M2), largest(torch.int8)
    (448.0, 57344.0, 127.0)
    """
    return float((torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max)


def cast(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Shaped[Tensor, "*shape"]:
    """x in 8 bits, to the nearest number, ties to even; what is too large becomes the largest.

    It is clipped *before* it is rounded: e5m2 has an infinity, which torch's own cast goes to. So
    is an infinity; `to_eight` makes a NaN of it, which a loss scale sees.

    >>> cast(torch.tensor([0.3, 1e6]), F8_E5M2).tolist(), cast(torch.tensor([-1e6]), F8_E4M3).item()
    ([0.3125, 57344.0], -448.0)
    """
    x = x.clamp(-largest(dtype), largest(dtype))
    return x.round().to(dtype) if dtype == torch.int8 else x.to(dtype)


def tile_amax(x: Float[Tensor, "m k"], tile: tuple[int, int] | None = None) -> Float[Tensor, "i j"]:
    """The largest |x| of each tile, the last ones may be short; of the whole tensor without one."""
    m, k = x.shape
    if tile is None and not x.numel():  # as of an expert that no token visits
        return x.new_zeros(1, 1, dtype=torch.float32)
    sides = tile or (max(m, 1), max(k, 1))
    rows, columns = (units.whole(side, "a side of tile", 1) for side in sides)
    padded = F.pad(x.detach().float().abs(), (0, -k % columns, 0, -m % rows))
    return padded.view(-(-m // rows), rows, -(-k // columns), columns).amax((1, 3))


def scale_for(amax: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """The scale that brings `amax` to the largest number of the format."""
    return largest(dtype) / amax.clamp(min=_SMALLEST)


class Eight(NamedTuple):
    """A matrix in 8 bits: codes, and an inverse scale for each tile."""

    codes: Shaped[Tensor, "m k"]
    inverse: Float[Tensor, "i j"]
    tile: tuple[int, int]

    @property
    def mT(self) -> "Eight":
        """The transpose: the same codes and scales, the other way round."""
        return Eight(self.codes.mT, self.inverse.mT, self.tile[::-1])

    def numbers(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "m k"]:
        """What the codes stand for."""
        return self.codes.to(dtype) * _spread(self.inverse, self.tile, self.codes.shape)


def _spread(scales: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    """Each tile's scale at each of its places."""
    if scales.numel() == 1:
        return scales
    for dim in (0, 1):
        scales = scales.repeat_interleave(tile[dim], dim).narrow(dim, 0, shape[dim])
    return scales


def to_eight(
    x: Float[Tensor, "m k"],
    dtype: torch.dtype,
    tile: tuple[int, int] | None = None,
    *,
    scale: Tensor | None = None,
) -> Eight:
    """x in 8 bits of a dtype, with a scale for each tile, or one for all of it, from its largest
    |x| now; or with a `scale` that is known already. What comes back of a NaN or an infinity is
    NaN.

    >>> eight = to_eight(torch.tensor([[1.0, 0.3], [-2.0, 0.0]]), F8_E4M3)
    >>> eight.codes.tolist(), round(1 / eight.inverse.item(), 3)
    ([[224.0, 64.0], [-448.0, 0.0]], 224.0)

    Raises ValueError for a `scale` that is neither one number nor one to each tile.
    """
    known = scale is not None
    if scale is None:
        scale = scale_for(tile_amax(x, tile), dtype)
    scale = torch.atleast_2d(scale).flatten(0, -2)
    if tile is None:
        tile = x.shape[0], x.shape[1]
    if scale.numel() > 1:
        tiles = tuple(-(-n // of) for n, of in zip(x.shape, tile, strict=True))
        if scale.shape != tiles:
            shape = f"{tuple(x.shape)} has {tiles} tiles of {tile}"
            raise ValueError(f"{shape}, and scales of shape {tuple(scale.shape)}: give one to each")
    scaled, inverse = x.float() * _spread(scale, tile, x.shape), 1 / scale
    finite = x.isfinite()
    if known and dtype == torch.int8:  # which has no NaN
        inverse = inverse.where(finite.all(), torch.nan)
    return Eight(cast(scaled.where(finite, torch.nan), dtype), inverse, tile)


def product(a: Eight, b: Eight, dtype: torch.dtype = torch.float32) -> Float[Tensor, "m n"]:
    """a·bᵀ, summed in dtype: both operands lie along what is added up, as a matrix unit wants them.

    Raises ValueError where a scale changes within the terms that are added up before it can be
    applied.
    """
    for name, operand in (("a", a), ("b", b)):
        step, k = operand.tile[1], operand.codes.shape[1]
        if step < k and step % GROUP:
            changes = f"the scale of {name} changes after {step} of {k} terms of each sum"
            must = f"its tile must be {GROUP} long along its last dim"
            raise ValueError(units.Reason("scale", f"{changes}: {must}"))
    # Autocast would round the sums to half precision; in fp16, codes of 448 overflow.
    with precision.autocast(enabled=False), torch.autocast(a.codes.device.type, enabled=False):
        if a.inverse.numel() == b.inverse.numel() == 1:
            return (a.codes.to(dtype) @ b.codes.to(dtype).mT) * (a.inverse * b.inverse)
        return a.numbers(dtype) @ b.numbers(dtype).mT


@dataclass(frozen=True)
class Scheme:
    """How the operands of the products become 8 bits.

    forward: the format of inputs and weights; backward: of gradients of outputs
    scaling: "none"; a scale per tensor from its "current" largest number, or "delayed", from the
        largest of the last `history` steps; or per "tiles"

    >>> Scheme(scaling="tenser")
    Traceback (most recent call last):
    ValueError: scaling='tenser': choose one of none, current, delayed, tiles
    """

    forward: torch.dtype = F8_E4M3
    backward: torch.dtype = F8_E5M2
    scaling: str = "current"
    history: int = 16

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling={self.scaling!r}: choose one of {', '.join(SCALINGS)}")
        for dtype in (self.forward, self.backward):
            if dtype not in (F8_E4M3, F8_E5M2, torch.int8):
                known = ", ".join(map(str, (F8_E4M3, F8_E5M2, torch.int8)))
                raise ValueError(f"{dtype!r} is no format of 8 bits here: choose one of {known}")
        units.whole_fields(self, "history")

    def dtype(self, operand: str) -> torch.dtype:
        """The format of "x", "weight" or "grad"."""
        return self.backward if operand == "grad" else self.forward


SCHEMES = {
    "unscaled": Scheme(scaling="none"),
    "current": Scheme(),
    "delayed": Scheme(scaling="delayed"),
    "tiles": Scheme(backward=F8_E4M3, scaling="tiles"),
    "int8": Scheme(torch.int8, torch.int8),
}
"""The schemes of the lab by name."""


class Fp8Products(nn.Module):
    """The three products of a linear layer on operands of 8 bits, and their scales. The input is
    kept for the backward pass in 8 bits.

    comm, cut: the ranks that share the layer out, and those operands of which each has a part: all
        scale them by the largest number of any, as one device would
    """

    scale: Tensor
    seen: Tensor
    history: Tensor
    weight_inverse: Tensor

    def __init__(
        self, scheme: Scheme, device: Any = None, comm: Comm | None = None, cut: Cut = ()
    ) -> None:
        super().__init__()
        self.scheme, self.comm, self.cut = scheme, comm, cut
        if scheme.scaling == "delayed":
            like: dict[str, Any] = {"dtype": torch.float32, "device": device}
            self.register_buffer("scale", torch.ones(3, **like))
            self.register_buffer("seen", torch.zeros(3, **like))  # the largest |x| of this step
            self.register_buffer("history", torch.zeros(scheme.history, 3, **like))

    def eight(self, x: Float[Tensor, "m k"], operand: str) -> Eight:
        """An operand in 8 bits, which lies along what will be added up."""
        dtype, scaling = self.scheme.dtype(operand), self.scheme.scaling
        if operand == "weight" and x.dtype.itemsize == 1:  # the weights are kept in 8 bits
            return Eight(x, self.weight_inverse, (x.shape[0], x.shape[1]))
        if scaling == "tiles":
            return to_eight(x, dtype, SQUARE if operand == "weight" else ALONG)
        if scaling == "current":
            amax = tile_amax(x)
            if operand in self.cut and self.comm is not None:
                with self.comm.record("largest number"):
                    amax = self.comm.all_reduce(amax, "max")
            return to_eight(x, dtype, scale=scale_for(amax, dtype))
        if scaling == "none":
            return to_eight(x, dtype, scale=torch.ones((), device=x.device))
        at = OPERANDS.index(operand)
        self.seen[at] = torch.maximum(self.seen[at], tile_amax(x)[0, 0])
        return to_eight(x, dtype, scale=self.scale[at])

    def across(self, x: Tensor, eight: Eight, operand: str) -> Eight:
        """An operand of the product over tokens. One scale serves both ways round; tiles along
        tokens are other tiles."""
        return self.eight(x.mT, operand) if self.scheme.scaling == "tiles" else eight.mT

    @torch.no_grad()
    def advance(self) -> None:
        """The history takes in this step's largest numbers, and gives the next step its scales."""
        seen = self.seen.where(self.seen.isfinite(), 0)  # a loss scale has skipped such a step
        self.history.copy_(torch.cat([seen[None], self.history[:-1]]))
        self.seen.zero_()
        amax = self.history.amax(0)
        for at, operand in enumerate(OPERANDS):
            new = scale_for(amax[at], self.scheme.dtype(operand))
            self.scale[at] = torch.where(amax[at] > 0, new, self.scale[at])  # 0: not seen yet

    def forward(self, x: Float[Tensor, "... k"], weight: Tensor) -> Float[Tensor, "... n"]:
        return _Products.apply(x.flatten(0, -2), weight, self).unflatten(0, x.shape[:-1])


class Fp8Linear(Fp8Products):
    """A linear layer whose three products take operands of 8 bits. Weights stay what they are.

    With delayed scaling `advance_scales` is called once a step.
    """

    def __init__(self, whole: nn.Linear, scheme: Scheme) -> None:
        super().__init__(scheme, whole.weight.device)
        self.out_features, self.in_features = whole.weight.shape
        self.weight, self.bias = whole.weight, whole.bias

    def share_with(self, split: Split) -> None:
        """Give the share of this layer that tensor parallelism has made products of 8 bits, too.

        Raises TypeError where weights are kept in 8 bits.
        """
        if self.weight.dtype.itemsize == 1:
            remedy = "parallelize the model, then use_fp8, and step another optimizer than KeptAdam"
            raise TypeError(f"weights that are kept in 8 bits are not split: {remedy}")
        split.products = _products_of(split, self.scheme)

    def forward(  # type: ignore[override]  # the weight is its own
        self, x: Float[Tensor, "... k"]
    ) -> Float[Tensor, "... n"]:
        y = super().forward(x, self.weight)
        return y if self.bias is None else y + self.bias


_CUT: dict[type, Cut] = {
    ColumnLinear: ("weight", "grad"),
    RowLinear: ("x", "weight"),
    TokenLinear: ("x", "grad"),
}


def _products_of(split: Split, scheme: Scheme) -> Fp8Products:
    """The products of a layer that tensor parallelism has split; ValueError where tiles do not fit
    into the shares."""
    share = split.weight.shape[0 if isinstance(split, ColumnLinear) else 1]
    if isinstance(split, TokenLinear):
        share = 1  # of tokens, as many as come
    if scheme.scaling == "tiles" and share % GROUP and split.comm.size > 1:
        remedy = f"choose sizes of which each rank has a multiple of {GROUP}, or scaling='current'"
        raise ValueError(f"a share of {share} cuts a tile of {GROUP}: {remedy}")
    return Fp8Products(scheme, split.weight.device, split.comm, _CUT[type(split)])


def _sums(x: Tensor) -> torch.dtype:
    """fp32, as in hardware; float64 where a whole model is, to the same bits on any machine."""
    return torch.promote_types(x.dtype, torch.float32)


class _Products(torch.autograd.Function):
    """x·Wᵀ, and behind it G·W and Gᵀ·x, each on operands of 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Products) -> Tensor:
        x8 = layer.eight(x, "x")
        kept = layer.across(x, x8, "x")
        ctx.layer, ctx.tile = layer, kept.tile
        ctx.save_for_backward(kept.codes, kept.inverse, weight)
        return product(x8, layer.eight(weight, "weight"), _sums(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        codes, inverse, weight = ctx.saved_tensors
        layer, grad_x, grad_weight = ctx.layer, None, None
        g8 = layer.eight(grad, "grad")
        if ctx.needs_input_grad[0]:
            grad_x = product(g8, layer.eight(weight, "weight").mT, _sums(grad))
        if ctx.needs_input_grad[1]:
            across = layer.across(grad, g8, "grad")
            grad_weight = product(across, Eight(codes, inverse, ctx.tile), _sums(grad))
        return grad_x, grad_weight, None


def use_fp8(module: nn.Module, scheme: Scheme) -> nn.Module:
    """The module with every linear layer but the head in 8 bits, in place. The parameters are the
    same objects: an optimizer, `data_parallel.replicate` or a checkpointed region takes no notice.

    Before or after `tensor_parallel.parallelize`: the scales are those of the whole layer, on which
    its ranks agree by a max all-reduce of a number for each operand that is split ("current"), or
    once a step ("delayed"). ValueError for tiles that a share would cut, and for a module without
    linear layers.
    """
    units.instance(module, nn.Module, "use_fp8")
    units.instance(scheme, Scheme, "use_fp8")
    found = [(at, layer) for at, layer in module.named_modules() if not at.endswith("head")]
    for path, layer in found:
        if type(layer) is nn.Linear:
            module.set_submodule(path, Fp8Linear(layer, scheme))
        elif type(layer) in _CUT:
            layer.products = _products_of(layer, scheme)
    if not fp8_layers(module):
        raise ValueError("this module has no linear layer that could be in 8 bits")
    return module


def fp8_layers(module: nn.Module) -> dict[str, Fp8Products]:
    """The layers whose products are in 8 bits, by path; of one that tensor parallelism has split
    its `products`."""
    units.instance(module, nn.Module, "fp8_layers")
    return {path: each for path, each in module.named_modules() if isinstance(each, Fp8Products)}


def advance_scales(module: nn.Module, comm: Any = None) -> None:
    """Delayed scaling: call it once a step, after its last backward pass. With `comm` all ranks
    scale by the largest number that any of them has seen (a max all-reduce of 12 bytes a layer), as
    the ranks of tensor parallelism do anyway.
    """
    layers = [each for each in fp8_layers(module).values() if each.scheme.scaling == "delayed"]
    for group in dict.fromkeys([*(each.comm for each in layers), comm]):
        ours = [each for each in layers if group in (comm, each.comm)]
        if ours and group is not None:
            seen = group.all_reduce(torch.cat([each.seen for each in ours]), "max")
            for each, mine in zip(ours, seen.split(3), strict=True):
                each.seen.copy_(mine)
    for each in layers:
        each.advance()
