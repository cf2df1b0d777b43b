"""4-bit NormalFloat (NF4) in blocks, with the scales of blocks quantized once more: the frozen
weights of QLoRA.

A matrix of n numbers becomes one tensor of bytes: codes of half a byte, a scale for each block of
64 numbers, and for each 256 scales a scale of theirs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from labutils import units
from labutils.world import marked

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The code book: quantiles of a normal distribution, scaled to [−1, 1], zero among them. To the bit
that of QLoRA 2305.14314 and of bitsandbytes."""

BLOCK = 64  # numbers that share a scale
SCALES = 256  # scales that share a scale of theirs


def seen(largest: Float[Tensor, "*tiles"]) -> Float[Tensor, "*tiles"]:
    """The largest |x| of tiles; NaN for an infinity, too, so that a run shows that it diverged."""
    return torch.where(largest.isfinite(), largest, torch.nan)


def floats_only(x: object, call: str) -> None:
    """Raises TypeError where what `call` is given is no tensor of floats."""
    units.instance(x, Tensor, call)
    if isinstance(x, Tensor) and not x.is_floating_point():
        said = f"{call} rounds floating-point numbers, got {str(x.dtype).removeprefix('torch.')}"
        raise TypeError(f"{said}: pass x.float() if these are numbers to be rounded")


def nf4_bytes(numel: int, *, double: bool = True) -> int:
    """Bytes of `numel` numbers in NF4: half a byte each, and the scales.

    double: whether scales are quantized, too: one byte a block, and fp32 for each 256 of them, less
        their mean, which is kept once; otherwise each is an fp32

    >>> [8 * nf4_bytes(2**24, double=double) / 2**24 for double in (False, True)]
    [4.5, 4.1269550323486...]
    >>> numbers = 2**24
    >>> total = nf4_bytes(numbers)
    >>> total == numbers / 2 + numbers / 64 + 4 * numbers / (64 * 256) + 4  # NF4, scales in 8 bits
    True

    Source: QLoRA 2305.14314, section 3.
    """
    numel = units.whole(numel, "numel", 1)
    blocks = -(-numel // BLOCK)
    scales = blocks + 4 * (-(-blocks // SCALES) + 1) if double else 4 * blocks
    return scales + -(-numel // 2)


@torch.no_grad()
def to_nf4(x: Float[Tensor, "..."], *, double: bool = True) -> UInt8[Tensor, " nbytes"]:
    """The bytes of x in NF4: [fp32 scales | byte scales | codes, the first of a pair on top].

    Each number of a block, divided by the largest |x| in it, takes the nearest code; of two that
    are as near the lower one. The second time scales are stored as e4m3, less their mean, so that
    both signs are used (bitsandbytes has an 8-bit format of its own there; the bytes are as many).
    All numbers that share a scale with a NaN or an infinity, the second time the whole tensor, come
    back as NaN.
    """
    floats_only(x, "to_nf4")
    n = x.numel()
    rows = F.pad(x.detach().flatten().float(), (0, -n % BLOCK)).view(-1, BLOCK)
    scales = seen(rows.abs().amax(1))
    book = torch.tensor(NF4, device=x.device)
    unit = rows / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(unit, (book[1:] + book[:-1]) / 2).to(torch.uint8).flatten()[:n]
    pairs = F.pad(codes, (0, n % 2)).view(-1, 2)
    packed = pairs[:, 0] * 16 + pairs[:, 1]
    if not double:
        return torch.cat([scales.view(torch.uint8), packed])
    mean = scales.mean()
    groups = F.pad(scales - mean, (0, -len(scales) % SCALES)).view(-1, SCALES)
    second = groups.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max
    small = groups / torch.where(second == 0, 1.0, second)[:, None]
    small = small.to(torch.float8_e4m3fn).flatten()[: len(scales)]
    wide = torch.cat([mean[None], second])
    return torch.cat([wide.view(torch.uint8), small.view(torch.uint8), packed])


@torch.no_grad()
def from_nf4(
    packed: UInt8[Tensor, " nbytes"], shape: tuple[int, ...], dtype: Any, *, double: bool = True
) -> Float[Tensor, "..."]:
    """The numbers behind the bytes `packed` by `to_nf4`, in their shape and a dtype; `double` as it
    was there.

    Raises ValueError where there are fewer or more bytes than this shape has.
    """
    units.instance(packed, Tensor, "from_nf4")
    if not dtype.is_floating_point:
        raise TypeError(f"from_nf4 gives floating-point numbers, got {dtype}: use torch.float32")
    n = torch.Size(shape).numel()
    if packed.numel() != nf4_bytes(n, double=double):
        kind = f"NF4 {'with' if double else 'without'} double quantization"
        wanted = f"{list(shape)} takes {nf4_bytes(n, double=double)} bytes in {kind}"
        raise ValueError(f"{wanted}, got {packed.numel()}: give the shape it had")
    blocks, at = -(-n // BLOCK), packed.numel() - -(-n // 2)
    scales = packed[: at - blocks * double].view(torch.float32)
    if double:
        mean, second = scales[0], scales[1:].repeat_interleave(SCALES)[:blocks]
        scales = packed[at - blocks : at].view(torch.float8_e4m3fn).float() * second + mean
    pairs = packed[at:]
    codes = torch.stack([pairs // 16, pairs % 16], 1).flatten().int()
    numbers = torch.tensor(NF4, device=packed.device).index_select(0, codes)
    numbers = F.pad(numbers[:n], (0, -n % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return numbers.flatten()[:n].view(shape).to(dtype)


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is kept in NF4 and made whole for each product, forward
    and backward (bitsandbytes' Linear4bit). It computes in the dtype of its input.

    `packed` is one frozen tensor of bytes, which no conversion of the model's dtype touches.
    """

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = whole.weight.shape
        packed = nn.Parameter(to_nf4(whole.weight), requires_grad=False)
        self.packed = marked(packed, whole.weight)
        self.bias = whole.bias

    def dequantized(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The weight, whole."""
        return from_nf4(self.packed, (self.out_features, self.in_features), dtype)

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        y = _FrozenProduct.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _FrozenProduct(torch.autograd.Function):
    """x·Wᵀ, of which nothing is kept: the backward pass makes W whole again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad @ ctx.layer.dequantized(grad.dtype) if ctx.needs_input_grad[0] else None, None
