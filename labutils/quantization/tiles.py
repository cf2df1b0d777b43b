"""Post-training quantization (PTQ): integers, and 4-bit floats, in tiles that share a scale.

Whatever shares a scale is a tile of a matrix: the tensor, a row (an output channel of a weight, a
token of activations), a group of neighbors in a row, or a rectangle.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from labutils import floats, precision, units
from labutils.floats import BlockFormat, IntFormat
from labutils.ledger import Ledger, Line
from labutils.quantization import nf4

Granularity = str | int | tuple[int, int] | None
Format = IntFormat | BlockFormat | Literal["nf4"]
_NO_NUMBER = 255  # the scale of a block with a NaN, in E8M0 of the MX formats
_SHRINK = torch.arange(1.0, 0.29, -0.05).tolist()  # of the largest |x|: limits that clipping tries


@dataclass(frozen=True, eq=False)
class Quantized:
    """What is kept of a tensor: packed codes, and scales (and zero points) of its tiles."""

    fmt: Format
    shape: tuple[int, ...]
    tile: tuple[int, int]
    affine: bool
    parts: dict[str, Tensor]

    @property
    def ledger(self) -> Ledger:
        """The bytes of the tensors that are kept."""
        return Ledger(Line(name, part.nbytes) for name, part in self.parts.items())

    @property
    def integers(self) -> IntFormat:
        """The format, which must be one of integers.

        Raises TypeError for another format.
        """
        if not isinstance(self.fmt, IntFormat):
            raise TypeError(f"these codes are no integers but {self.fmt!r}: quantize to int8, say")
        return self.fmt

    def codes(self) -> Tensor:
        """The integers, int8 in x's shape: those of a symmetric int8 weight go into products."""
        bits, count = self.integers.bits, math.prod(self.shape)
        return _signed(unpack_codes(self.parts["codes"], bits, count), bits).view(self.shape).char()

    def scale_of_each(self) -> Float[Tensor, "..."]:
        """The scale of each number's tile, in x's shape."""
        n = self.tile[0] * self.tile[1]
        return _untiled(self.parts["scales"][:, None].expand(-1, n), self.shape, self.tile)

    def dequantize(self) -> Float[Tensor, "..."]:
        """The numbers that the codes stand for, fp32."""
        if isinstance(self.fmt, str):
            packed = torch.cat([self.parts["scales"], self.parts["codes"]])
            return nf4.from_nf4(packed, self.shape, torch.float32, double=False)
        bits = self.fmt.bits if isinstance(self.fmt, IntFormat) else self.fmt.element.bits
        codes = unpack_codes(self.parts["codes"], bits, math.prod(self.shape))
        tiles = _tiled(codes.view(self.shape), self.tile)
        return _untiled(_decoded(tiles, self), self.shape, self.tile)


@torch.no_grad()
def quantize(
    x: Float[Tensor, "..."],
    fmt: str | IntFormat | BlockFormat,
    *,
    granularity: Granularity = None,
    affine: bool = False,
    clip: str = "",
    generator: torch.Generator | None = None,
) -> Quantized:
    """x in few bits: each number rounded to the nearest value of its tile's grid.

    fmt: "int8", "int4", … (a scale in fp32 per tile), "mxfp4", "nvfp4" or "nf4" (blocks of theirs)
    granularity: what shares a scale: "tensor" (the default of integers), "row", a number of
        neighbors in a row, or (rows, columns) of a rectangle
    affine: integers from min to max of the tile with a zero point, instead of ±max|x|
    clip: "mse" brings what is beyond a limit to it before rounding: in each tile to that of the
        smallest squared error
    generator: round numbers of "mxfp4", "nvfp4" and the like stochastically, drawing from it

    >>> quantize(torch.tensor([[1.0, -0.4, 0.26, 0.0]]), "int4").dequantize()
    tensor([[ 1.0000, -0.4286,  0.2857,  0.0000]])

    Invariant: the bytes of what is returned are those of `quantized_bytes`. A NaN or an infinity
    does not get lost: all numbers that share a scale with it (in "nvfp4" the whole tensor) are NaN.
    """
    nf4.floats_only(x, "quantize")
    fmt = _named(fmt)
    tile = _tile(x.shape, fmt, granularity)
    if clip not in ("", "mse"):
        raise ValueError(f"{clip=}: give 'mse', or leave it out")
    _only_integers(fmt, affine or clip)
    if generator is not None and not isinstance(fmt, BlockFormat):
        raise ValueError(
            f"generator= is for floats in blocks, as 'nvfp4', got {fmt!r}: leave it out"
        )
    if isinstance(fmt, str):
        packed, scales = nf4.to_nf4(x, double=False), 4 * -(-x.numel() // nf4.BLOCK)
        parts = {"codes": packed[scales:], "scales": packed[:scales]}
        return Quantized(fmt, tuple(x.shape), tile, False, parts)
    tiles = _tiled(x.detach().float(), tile)

    def encoded(values: Tensor) -> tuple[Tensor, Quantized]:
        if isinstance(fmt, IntFormat):
            codes, parts = (_affine if affine else _symmetric)(values, fmt)
        else:
            codes, parts = _floats(values, fmt, generator)
        return codes, Quantized(fmt, tuple(x.shape), tile, affine, parts)

    if clip:
        limit = _limit(tiles, lambda values: _decoded(*encoded(values)))
        tiles = tiles.clamp(-limit, limit)
    codes, kept = encoded(tiles)
    bits = fmt.bits if isinstance(fmt, IntFormat) else fmt.element.bits
    kept.parts["codes"] = pack_codes(_untiled(codes, kept.shape, tile), bits)
    return kept


def quantized_bytes(
    shape: tuple[int, ...],
    fmt: str | IntFormat | BlockFormat,
    *,
    granularity: Granularity = None,
    affine: bool = False,
) -> Ledger:
    """The bytes of a tensor of this shape after `quantize` of this fmt, granularity and affine:
    codes, scales and zero points.

    >>> sizes = [quantized_bytes((512, 512), "int4", granularity=g).total for g in ("row", 64)]
    >>> [8 * nbytes / 512**2 for nbytes in sizes]
    [4.0625, 4.5]
    """
    units.instance(shape, tuple, "quantized_bytes")
    shape = tuple(units.whole(size, "a size of shape", 1) for size in shape)
    fmt, numel = _named(fmt), math.prod(shape)
    _only_integers(fmt, affine)
    rows, columns = _tile(shape, fmt, granularity)
    if isinstance(fmt, str):
        codes, tiles = -(-numel // 2), -(-numel // nf4.BLOCK)
        return Ledger([Line("codes", codes), Line("scales", 4 * tiles)])
    tiles = -(-math.prod(shape[:-1]) // rows) * -(-shape[-1] // columns)
    if isinstance(fmt, IntFormat):
        lines = [Line("codes", -(-numel * fmt.bits // 8)), Line("scales", 4 * tiles)]
        return Ledger(lines + [Line("zero points", tiles)] * affine)
    lines = [Line("codes", -(-numel * fmt.element.bits // 8)), Line("scales", tiles)]
    return Ledger(lines + [Line("scale of the tensor", 4)] * bool(fmt.scale.mantissa_bits))


# ── codes of a tile ──────────────────────────────────────────────────────────────────────────────


def _symmetric(tiles: Tensor, fmt: IntFormat) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes −max … max: without the most negative one, −x has the code of x negated."""
    scales = _nonzero(tiles.abs().amax(1) / fmt.max)
    codes = (tiles / scales[:, None]).round().clamp(-fmt.max, fmt.max)
    return codes.short() & (1 << fmt.bits) - 1, {"scales": scales}


def _affine(tiles: Tensor, fmt: IntFormat) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes 0 … 2ᵇ − 1 from min to max, zero among the values: the zero point is its code."""
    top = (1 << fmt.bits) - 1
    low, high = tiles.amin(1).clamp(max=0), tiles.amax(1).clamp(min=0)
    span = (high - low) / top  # which may be beyond fp32 where both ends are not
    scales = _nonzero(torch.where(span.isinf(), high / top - low / top, span))
    zeros = (-low / scales).round().clamp(0, top)
    codes = ((tiles / scales[:, None]).round() + zeros[:, None]).clamp(0, top)
    return codes.short(), {"scales": scales, "zero points": zeros.to(torch.uint8)}


def _floats(
    tiles: Tensor, fmt: BlockFormat, generator: torch.Generator | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes and scales of `floats.BlockFormat.encode`; NVFP4 has one more scale for the tensor."""
    largest, parts = tiles.abs().amax(1), {}
    if fmt.scale.mantissa_bits:
        whole = _nonzero(largest.max() / (fmt.element.max * fmt.scale.max))
        parts["scale of the tensor"] = whole[None]
        largest, tiles = largest / whole, tiles / whole
        scales = precision.round_to(largest / fmt.element.max, fmt.scale, overflow="saturate")
        kept = scales.to(torch.float8_e4m3fn)
    else:
        exponents = torch.frexp(largest).exponent - 1 - fmt.element.max_exponent
        low, high = fmt.scale.min_exponent, fmt.scale.max_exponent
        exponents = torch.where(largest > 0, exponents, low).clamp(low, high)
        scales, kept = torch.ldexp(torch.ones_like(largest), exponents), exponents - low
        kept = torch.where(largest.isfinite(), kept, _NO_NUMBER)
    parts["scales"] = kept if kept.dtype == torch.float8_e4m3fn else kept.to(torch.uint8)
    how: dict[str, Any] = dict(mode="stochastic", generator=generator) if generator else {}
    values = tiles / _nonzero(scales)[:, None]
    values = precision.round_to(values, fmt.element, overflow="saturate", **how)
    magnitudes = _magnitudes(fmt, tiles.device)
    values = values.nan_to_num()  # whose scale says that they are none
    codes = torch.searchsorted(magnitudes, values.abs().contiguous()).short()
    return codes + values.signbit() * len(magnitudes), parts


def _decoded(codes: Tensor, kept: Quantized) -> Tensor:
    """The numbers behind the codes of tiles."""
    fmt, scales = kept.fmt, kept.parts["scales"]
    if kept.affine:
        return (codes - kept.parts["zero points"][:, None].int()) * scales[:, None]
    if isinstance(fmt, IntFormat):
        return _signed(codes, fmt.bits) * scales[:, None]
    assert isinstance(fmt, BlockFormat)  # nf4 has no tiles
    magnitudes = _magnitudes(fmt, codes.device)
    values = torch.cat([magnitudes, -magnitudes]).index_select(0, codes.flatten().int())
    if fmt.scale.mantissa_bits:
        scales = scales.float() * kept.parts["scale of the tensor"]
    else:
        exponents = scales.int() + fmt.scale.min_exponent
        ones = torch.ones_like(exponents, dtype=torch.float32)
        scales = torch.where(scales == _NO_NUMBER, torch.nan, torch.ldexp(ones, exponents))
    return values.view(codes.shape) * scales[:, None]


def _limit(tiles: Tensor, round_trip: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest |x| that stays, for each tile: that of the smallest squared error."""
    largest = tiles.abs().amax(1, keepdim=True)
    best, least = largest, torch.full_like(largest, math.inf)
    for shrink in _SHRINK:
        limit = shrink * largest
        error = (round_trip(tiles.clamp(-limit, limit)) - tiles).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, limit, best), torch.minimum(error, least)
    return best


# ── tiles, and bits in bytes ─────────────────────────────────────────────────────────────────────


def pack_codes(codes: Tensor, bits: int) -> UInt8[Tensor, " nbytes"]:
    """Codes of so many bits, one after the other in bytes, the first on top.

    >>> pack_codes(torch.tensor([0b101, 0b011, 0b111]), 3).tolist() == [0b10101111, 0b10000000]
    True

    Raises ValueError for what is no code of so many bits.
    """
    bits = units.whole(bits, "bits", 1)
    valued = not (codes.is_meta or isinstance(codes, FakeTensor))
    if bits > 8 or codes.is_floating_point() or (valued and (codes.int() >> bits).any()):
        remedy = f"give whole numbers from 0 to {2 ** min(bits, 8) - 1}"
        raise ValueError(f"codes of {bits} bits, at most 8, are what these are not: {remedy}")
    codes = codes.flatten().to(torch.uint8)
    if 8 % bits:  # a code may lie across two bytes: bit by bit
        codes, bits = (codes[:, None] >> _places(bits, 1, codes) & 1).flatten(), 1
    each = F.pad(codes, (0, -len(codes) % (8 // bits))).view(-1, 8 // bits)
    return (each << _places(8, bits, codes)).sum(1, dtype=torch.uint8)


def unpack_codes(packed: UInt8[Tensor, " nbytes"], bits: int, count: int) -> Tensor:
    """The first `count` codes of `pack_codes`, int16.

    Raises ValueError where so many are not there.
    """
    bits, count = units.whole(bits, "bits", 1), units.whole(count, "count")
    if count > (there := 8 * packed.numel() // bits):
        raise ValueError(f"count={count}: {packed.numel()} bytes have {there} codes of {bits} bits")
    if 8 % bits == 0:
        codes = packed[:, None] >> _places(8, bits, packed) & (1 << bits) - 1
        return codes.flatten()[:count].short()
    each = (packed[:, None] >> _places(8, 1, packed) & 1).flatten()[: count * bits]
    return (each.view(count, bits) << _places(bits, 1, packed)).sum(1, dtype=torch.int16)


def _places(width: int, bits: int, like: Tensor) -> Tensor:
    """By how much to shift each code of so many bits to its place in `width` bits."""
    return torch.arange(width - bits, -1, -bits, dtype=torch.uint8, device=like.device)


def _named(fmt: str | IntFormat | BlockFormat) -> Format:
    if isinstance(fmt, BlockFormat) and fmt.scale not in (floats.E8M0, floats.E4M3):
        kept = fmt.scale.name
        raise ValueError(f"{fmt.name}: scales are kept in e8m0 or e4m3, not in {kept}: take one")
    if isinstance(fmt, IntFormat | BlockFormat):
        return fmt
    known: dict[str, Format] = {"mxfp4": floats.MXFP4, "nvfp4": floats.NVFP4, "nf4": "nf4"}
    known |= {f"int{bits}": IntFormat(f"int{bits}", bits) for bits in range(2, 9)}
    return units.entry(known, fmt, "no format")


def _only_integers(fmt: Format, asked: object) -> None:
    if asked and not isinstance(fmt, IntFormat):
        raise ValueError(f"affine=True and clip= are for integers, got {fmt!r}: leave them out")


def _tile(shape: tuple[int, ...], fmt: Format, granularity: Granularity) -> tuple[int, int]:
    """Rows and columns of what shares a scale."""
    if not len(shape) or not math.prod(shape):
        raise ValueError(f"a tensor of shape {list(shape)} has no numbers to quantize")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if not isinstance(fmt, IntFormat):
        size = nf4.BLOCK if isinstance(fmt, str) else fmt.block_size
        if granularity not in (None, size):
            raise ValueError(f"the scales of this format stand for {size} numbers: leave it out")
        if fmt == "nf4":
            return 1, size
        granularity = size
    named = {None: (rows, columns), "tensor": (rows, columns), "row": (1, columns)}
    tile: tuple[int, int] | None
    if units.is_whole(granularity):
        tile = 1, units.whole(granularity, "granularity", 1)
    elif isinstance(granularity, tuple) and len(granularity) == 2:
        rows, columns = (units.whole(each, "a side of granularity", 1) for each in granularity)
        tile = rows, columns
    elif isinstance(granularity, str) or granularity is None:
        tile = named.get(granularity)
    else:
        tile = None
    if tile is None:
        raise ValueError(f"{granularity=}: give 'tensor', 'row', a number, or (rows, columns)")
    return tile


def _tiled(x: Tensor, tile: tuple[int, int]) -> Shaped[Tensor, "tiles n"]:
    """The tiles of x, row after row; those at the end are filled up with zeros."""
    x, (r, c) = x.reshape(-1, x.shape[-1]), tile
    x = F.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r))
    return x.view(x.shape[0] // r, r, x.shape[1] // c, c).transpose(1, 2).reshape(-1, r * c)


def _untiled(tiles: Tensor, shape: tuple[int, ...], tile: tuple[int, int]) -> Tensor:
    (r, c), rows, columns = tile, math.prod(shape[:-1]), shape[-1]
    x = tiles.reshape(-(-rows // r), -(-columns // c), r, c).transpose(1, 2)
    return x.flatten(2).flatten(0, 1)[:rows, :columns].reshape(shape)


def _nonzero(scales: Tensor) -> Tensor:
    """1 for a tile of zeros, and NaN for one with a NaN or an infinity."""
    return nf4.seen(torch.where(scales == 0, 1.0, scales))


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Two's complement of so many bits as numbers."""
    half = 1 << bits - 1
    return (codes ^ half) - half


def _magnitudes(fmt: BlockFormat, device: torch.device) -> Tensor:
    values = [value for value in fmt.element.representable() if value >= 0]
    return torch.tensor(values, device=device)
