"""Number formats, bit by bit: what a code means, and which code a number gets.

Everything here is exact integer arithmetic, so it is the reference that the fast
`precision.round_to` is tested against. One `FloatFormat` describes them all, from FP64 down to the
four bits of E2M1 and formats of your own.

Sources: IEEE 754-2019 (fp64, fp32, fp16); OCP OFP8 r1.0 and arXiv:2209.05433 (e4m3, e5m2);
OCP MX v1.0 (e3m2, e2m3, e2m1, e8m0, blocks of 32); NVIDIA, arXiv:2509.25149 (NVFP4);
CUDA Math API `__nv_tf32` (tf32).
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

from labutils import units

MODES = ("nearest", "zero", "stochastic")  # of rounding
OVERFLOWS = ("ieee", "saturate")  # what becomes of a number beyond the largest
NANS = ("ieee", "all_ones", "negative_zero", "none")  # which bits are no number
_FROM_OTHERS: Any = None  # the default of a field that is worked out of others: never None later

Real = float | Fraction


class Fields(NamedTuple):
    """The three fields of a code, as integers, and what kind of value they make."""

    sign: int
    exponent: int
    mantissa: int
    kind: str  # "zero", "subnormal", "normal", "inf" or "nan"


class Counts(NamedTuple):
    """How many codes of a format are finite (both zeros included), infinite and NaN."""

    finite: int
    inf: int
    nan: int


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: sign, exponent, mantissa, and what the corner codes mean.

    nan: where the NaNs live: "ieee" (top exponent, mantissa not 0; mantissa 0 is infinity),
        "all_ones" (one code per sign, as in e4m3), "negative_zero" (the code of −0, as in the fnuz
        formats) or "none"
    zero: False makes exponent field 0 an ordinary power of two (e8m0)

    >>> mine = FloatFormat("1-3-4", 3, 4)
    >>> mine.bits, mine.max, mine.eps
    (8, 15.5, 0.0625)
    >>> mine.decode(mine.encode(0.3))
    0.296875

    Invariant: every value of every format is a Python float, exactly.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    _: KW_ONLY
    bias: int = _FROM_OTHERS
    nan: str = "ieee"
    signed: bool = True
    zero: bool = True

    def __post_init__(self):
        _set_int(self, "exponent_bits", 1, 11)
        _set_int(self, "mantissa_bits", 0, 52)
        _check_choice("nan", self.nan, NANS)
        if self.nan == "negative_zero" and not (self.signed and self.zero):
            raise ValueError(
                "nan='negative_zero' needs a format with a sign and a zero: choose nan='all_ones'"
            )
        if self.bias is None:
            object.__setattr__(self, "bias", (1 << self.exponent_bits - 1) - 1)
        _set_int(self, "bias", -(1 << 11), 1 << 11)
        if self._max_code >> self.mantissa_bits < self._first_exponent:
            raise ValueError(
                f"{self.exponent_bits} exponent bit(s) with nan={self.nan!r} leave no normal "
                "number: take one exponent bit more, or nan='none'"
            )
        if self.min_exponent < -1022 or self.max_exponent > 1023:
            raise ValueError(
                f"bias={self.bias} puts exponents at {self.min_exponent}…{self.max_exponent}, "
                "outside fp64's -1022…1023: choose a bias nearer to "
                f"{(1 << self.exponent_bits - 1) - 1}"
            )

    # What the format is

    @property
    def bits(self) -> int:
        """Width of a code, in bits."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def inf(self) -> bool:
        """Whether there are infinities."""
        return self.nan == "ieee"

    @property
    def max(self) -> float:
        """The largest finite value.

        >>> exponent_bits, mantissa_bits = 8, 7
        >>> wide = FloatFormat("wide", exponent_bits, mantissa_bits)
        >>> wide.max == (2 - 2**-mantissa_bits) * 2 ** (2 ** (exponent_bits - 1) - 1)  # largest
        True
        """
        return self.decode(self._max_code)

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision.

        >>> exponent_bits = 8
        >>> wide = FloatFormat("wide", exponent_bits, 7)
        >>> wide.min_normal == 2 ** (2 - 2 ** (exponent_bits - 1))  # smallest with full precision
        True
        """
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value at all; `min_normal` where there are no subnormals."""
        return self.spacing(0) if self.zero else self.min_normal

    @property
    def eps(self) -> float:
        """The gap between 1 and the next larger value.

        >>> mantissa_bits = 7
        >>> FloatFormat("wide", 8, mantissa_bits).eps == 2**-mantissa_bits  # from 1 to the next
        True
        """
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def min_exponent(self) -> int:
        """Exponent of `min_normal`."""
        return self._first_exponent - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of `max`."""
        return (self._max_code >> self.mantissa_bits) - self.bias

    @property
    def counts(self) -> Counts:
        """How many codes are finite, infinite, NaN.

        >>> FP16.counts
        Counts(finite=63488, inf=2, nan=2046)
        """
        signs = 1 + self.signed
        finite = signs * (self._max_code + 1) - (self.nan == "negative_zero")
        infinite = signs * self.inf
        return Counts(finite, infinite, (1 << self.bits) - finite - infinite)

    def representable(self) -> list[float]:
        """All finite values, in ascending order (−0 and +0 are one value).

        >>> E2M1.representable()[7:]
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

        Raises ValueError for a format of more than 20 bits.
        """
        if self.bits > 20:
            raise ValueError(
                f"{self.name} has 2**{self.bits} codes, too many to list: "
                "use a format of up to 20 bits"
            )
        magnitudes = [self.decode(code) for code in range(self._max_code + 1)]
        negative = [-v for v in reversed(magnitudes) if v] if self.signed else []
        return negative + magnitudes

    def spacing(self, x: Real) -> float:
        """The gap between neighboring values at |x| (the ulp of x); NaN beyond `max`.

        >>> FP16.spacing(2048), BF16.spacing(256), E4M3.spacing(0)
        (2.0, 2.0, 0.001953125)
        """
        if not -self.max <= x <= self.max:
            return math.nan
        return math.ldexp(1.0, max(_exponent(x), self.min_exponent) - self.mantissa_bits)

    # Code → value

    def fields(self, code: int) -> Fields:
        """Sign, exponent field, mantissa field and kind of a code.

        >>> E4M3.fields(0b1_0111_100)
        Fields(sign=1, exponent=7, mantissa=4, kind='normal')
        """
        code = _whole(f"code of {self.name}", code, 0, (1 << self.bits) - 1)
        sign, magnitude = divmod(code, 1 << self.exponent_bits + self.mantissa_bits)
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude > self._max_code:
            kind = "inf" if self.inf and mantissa == 0 else "nan"
        elif sign and magnitude == 0 and self.nan == "negative_zero":
            kind = "nan"
        elif exponent < self._first_exponent:
            kind = "subnormal" if mantissa else "zero"
        else:
            kind = "normal"
        return Fields(sign, exponent, mantissa, kind)

    def decode(self, code: int) -> float:
        """The value of a code, exactly.

        >>> E4M3.decode(0b0_1111_110), E5M2.decode(0b1_11111_00)
        (448.0, -inf)
        """
        sign, exponent, mantissa, kind = self.fields(code)
        if kind == "nan":
            return math.nan
        if kind == "inf":
            magnitude = math.inf
        elif kind == "normal":
            magnitude = math.ldexp(
                (1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits
            )
        else:
            magnitude = math.ldexp(mantissa, self.min_exponent - self.mantissa_bits)
        return -magnitude if sign else magnitude

    def bit_string(self, code: int) -> str:
        """The code's bits, its fields apart.

        >>> E4M3.bit_string(E4M3.encode(-1.5))
        '1 0111 100'
        """
        sign, exponent, mantissa, _ = self.fields(code)
        widths = self.signed, self.exponent_bits, self.mantissa_bits
        fields = zip((sign, exponent, mantissa), widths, strict=True)
        return " ".join(f"{value:0{int(width)}b}" for value, width in fields if width)

    def explain(self, code: int) -> str:
        """How the fields of a code make its value, as a line of text.

        >>> E4M3.explain(0b1_1000_100), E4M3.explain(0b0_0000_011), E4M3.explain(0b0_1111_111)
        ('−2^(8−7) · (1 + 4/8) = −3', '2^(1−7) · (0 + 3/8) = 0.00585938, subnormal', 'NaN')
        """
        sign, exponent, mantissa, kind = self.fields(code)
        minus = "−" if sign else ""
        if kind == "nan":
            return "NaN"
        if kind in ("zero", "inf"):
            return minus + {"zero": "0", "inf": "∞"}[kind]
        lead, power, note = 1, exponent, ""
        if kind == "subnormal":
            lead, power, note = 0, self._first_exponent, ", subnormal"
        fraction = f" · ({lead} + {mantissa}/{1 << self.mantissa_bits})" * (self.mantissa_bits > 0)
        value = f"{abs(self.decode(code)):g}".replace("-", "−")
        return f"{minus}2^({power}−{self.bias}){fraction} = {minus}{value}{note}"

    # Value → code

    def encode(
        self,
        x: Real,
        *,
        mode: str = "nearest",
        overflow: str = "ieee",
        random: Random | None = None,
    ) -> int:
        """The code of x: an int, float, Fraction, … taken as the exact number it is, rounded once.

        mode: "nearest" (ties to the even significand), "zero" (never away from zero) or
            "stochastic" (up with the probability of x's place in the gap; draws from `random`)
        overflow: "ieee" goes to inf where the format has one, else to NaN where it has one
            (ml_dtypes does this for e4m3), else to ±max; rounding toward zero stops at ±max, as in
            IEEE 754. "saturate" always stops at ±max, and there infinity does too (what torch's CPU
            cast does for e4m3).

        >>> [E4M3.decode(E4M3.encode(x)) for x in (17, 19, 0.3, 464, 465)]
        [16.0, 20.0, 0.3125, 448.0, nan]
        >>> E4M3.decode(E4M3.encode(465, overflow="saturate"))
        448.0

        A format without zero rounds 0 to its smallest value; one without a sign gives NaN for
        negative numbers.
        """
        _check_encoding(x, mode, overflow, random)
        negative = math.copysign(1, x) < 0
        if math.isnan(x) or (x < 0 and not self.signed):
            return self._nan_code(negative)
        if math.isinf(x):
            return self._overflow_code(negative, overflow)

        # Count x in units of the gap between its neighbors. Consecutive values have consecutive
        # codes, so a significand that rounds up to the next power of two carries into the exponent
        # field by itself.
        exponent = max(_exponent(x), self.min_exponent)
        shift = self.mantissa_bits - exponent
        numerator, denominator = (-x if negative else x).as_integer_ratio()
        ratio = numerator << max(shift, 0), denominator << max(-shift, 0)
        code = exponent - self.min_exponent << self.mantissa_bits
        code += _round_ratio(*ratio, mode, random)
        if not self.zero:
            code = max(code - (1 << self.mantissa_bits), 0)
        if code > self._max_code:
            return self._overflow_code(negative, "saturate" if mode == "zero" else overflow)
        return self._signed(code, negative and (code > 0 or self.nan != "negative_zero"))

    def round(self, x: Real, **how: Any) -> float:
        """The value that x becomes in this format: `decode(encode(x, **how))`.

        >>> FP16.round(0.1), BF16.round(0.1)
        (0.0999755859375, 0.10009765625)
        """
        return self.decode(self.encode(x, **how))

    # Details

    @property
    def _first_exponent(self) -> int:
        """The lowest exponent field of a normal number."""
        return 1 if self.zero else 0

    @property
    def _max_code(self) -> int:
        """The code of `max`; every larger magnitude is a special."""
        all_codes = 1 << self.exponent_bits + self.mantissa_bits
        reserved = {"ieee": 1 << self.mantissa_bits, "all_ones": 1, "negative_zero": 0, "none": 0}
        return all_codes - reserved[self.nan] - 1

    def _signed(self, code: int, negative: bool) -> int:
        return code | (negative and self.signed) << self.exponent_bits + self.mantissa_bits

    def _nan_code(self, negative: bool) -> int:
        if self.nan == "none":
            raise ValueError(
                f"{self.name} has no NaN: replace NaN and out-of-domain values before encoding"
            )
        if self.nan == "negative_zero":
            return self._signed(0, True)
        quiet = (1 << self.mantissa_bits >> 1) if self.nan == "ieee" else 0
        return self._signed(self._max_code + 1 + quiet, negative)

    def _overflow_code(self, negative: bool, overflow: str) -> int:
        if overflow == "saturate" or self.nan == "none":
            return self._signed(self._max_code, negative)
        return self._signed(self._max_code + 1, negative) if self.inf else self._nan_code(negative)


def _whole(what: str, value: object, low: int, high: int) -> int:
    if (number := units.whole(value, what, low)) > high:
        raise ValueError(f"{what} must be at most {high}, got {value}")
    return number


def _set_int(record: object, name: str, low: int, high: int) -> None:
    object.__setattr__(record, name, _whole(name, getattr(record, name), low, high))


def _check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(
            f"{what}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}"
        )


def _check_encoding(x: object, mode: str, overflow: str, random: object) -> None:
    _check_choice("mode", mode, MODES)
    _check_choice("overflow", overflow, OVERFLOWS)
    if mode == "stochastic" and not isinstance(random, Random):
        raise TypeError(f"mode='stochastic' needs random=random.Random(seed), got {random!r}")
    if not hasattr(x, "as_integer_ratio"):
        raise TypeError(f"cannot encode {x!r} ({type(x).__name__}): pass an int, float or Fraction")
    try:
        float(x)  # type: ignore[arg-type]  # it has a ratio
    except OverflowError:
        raise ValueError(f"cannot encode {x!r:.20}…, beyond every format: pass math.inf") from None


def _exponent(x: Real) -> int:
    """⌊log₂ |x|⌋; some very negative number for 0."""
    if x == 0:
        return -(1 << 20)
    numerator, denominator = x.as_integer_ratio()
    numerator = abs(numerator)
    guess = numerator.bit_length() - denominator.bit_length()
    return guess if numerator << max(-guess, 0) >= denominator << max(guess, 0) else guess - 1


def _round_ratio(numerator: int, denominator: int, mode: str, random: Random | None) -> int:
    """numerator / denominator, rounded to an integer."""
    whole, rest = divmod(numerator, denominator)
    if mode == "nearest":
        return whole + (2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1))
    if random is not None and mode == "stochastic":
        return whole + (random.randrange(denominator) < rest)
    return whole


FP64 = FloatFormat("fp64", 11, 52)
FP32 = FloatFormat("fp32", 8, 23)
TF32 = FloatFormat("tf32", 8, 10)
FP16 = FloatFormat("fp16", 5, 10)
BF16 = FloatFormat("bf16", 8, 7)
E4M3 = FloatFormat("e4m3", 4, 3, nan="all_ones")
E5M2 = FloatFormat("e5m2", 5, 2)
E4M3FNUZ = FloatFormat("e4m3fnuz", 4, 3, bias=8, nan="negative_zero")
E5M2FNUZ = FloatFormat("e5m2fnuz", 5, 2, bias=16, nan="negative_zero")
E3M2 = FloatFormat("e3m2", 3, 2, nan="none")
E2M3 = FloatFormat("e2m3", 2, 3, nan="none")
E2M1 = FloatFormat("e2m1", 2, 1, nan="none")
E8M0 = FloatFormat("e8m0", 8, 0, nan="all_ones", signed=False, zero=False)

FORMATS = {
    f.name: f
    for f in (FP64, FP32, TF32, FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1, E8M0)
}


def named(name: str | FloatFormat) -> FloatFormat:
    """The format of that name, such as "e4m3"; a format is itself.

    Raises ValueError for an unknown name.
    """
    if isinstance(name, FloatFormat):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"unknown format {name!r}: choose one of {', '.join(FORMATS)}, or describe your own "
            "with FloatFormat(name, exponent_bits, mantissa_bits)"
        )
    return FORMATS[name]


@dataclass(frozen=True)
class IntFormat:
    """Two's-complement integers: one spacing, 1, everywhere (a scale is kept apart).

    >>> INT8.min, INT8.max
    (-128, 127)
    """

    name: str
    bits: int

    def __post_init__(self):
        units.whole_fields(self, "bits")

    @property
    def min(self) -> int:
        """The most negative value."""
        return -(1 << self.bits - 1)

    @property
    def max(self) -> int:
        """The largest value."""
        return (1 << self.bits - 1) - 1


@dataclass(frozen=True)
class BlockFormat:
    """Small floats in blocks that share one scale: OCP MX, where it is a power of two, and NVFP4,
    where it is an e4m3 number.

    NVFP4 divides a whole tensor by one number in fp32 first, so that the blocks' scales fit e4m3:
    that is the caller's. `scale` is the format of the shared scale.

    >>> MXFP4.bits_per_value, NVFP4.bits_per_value
    (4.25, 4.5)
    >>> [block.decode(*block.encode([7, -3, 1, 0])) for block in (MXFP4, NVFP4)]
    [[6.0, -3.0, 1.0, 0.0], [6.75, -3.375, 1.125, 0.0]]
    >>> bits, scale_bits, block = MXFP4.element.bits, MXFP4.scale.bits, 32
    >>> size = BlockFormat("mine", MXFP4.element, block).bits_per_value
    >>> size == bits + scale_bits / block  # bits per number
    True

    Source: OCP MX v1.0, section 6.3: a power of two is 2^(⌊log₂ max|v|⌋ − max_exponent), elements
    saturate; NVIDIA, arXiv:2509.25149: a scale with a mantissa is max|v| / max, to nearest.
    """

    name: str
    element: FloatFormat
    block_size: int = 32
    scale: FloatFormat = E8M0

    def __post_init__(self):
        units.whole_fields(self, "block_size")

    @property
    def bits_per_value(self) -> float:
        """Bits a value takes, its part of the shared scale included."""
        return self.element.bits + self.scale.bits / self.block_size

    def encode(self, values: Sequence[Real]) -> tuple[int, list[int]]:
        """The scale's code and the elements' codes for one block (a last, short block is fine).

        Raises ValueError for no value, or more than a block has.
        """
        if not 0 < len(values) <= self.block_size:
            raise ValueError(
                f"{self.name} encodes 1 to {self.block_size} values at a time, got {len(values)}"
            )
        if not all(math.isfinite(v) for v in values):
            return self.scale.encode(math.nan), [0] * len(values)
        largest = max(-v if v < 0 else v for v in values)
        scale = self.scale.encode(self._wanted(largest), overflow="saturate")
        unit = Fraction(self.scale.decode(scale))
        quotients = [Fraction(v) / unit if unit else 0 for v in values]
        return scale, [self.element.encode(q, overflow="saturate") for q in quotients]

    def decode(self, scale: int, codes: Sequence[int]) -> list[float]:
        """The block's values."""
        unit = self.scale.decode(scale)
        return [unit * self.element.decode(code) for code in codes]

    def _wanted(self, largest: Real) -> Fraction:
        """The scale that brings `largest` into the elements' range, before it is rounded."""
        if self.scale.mantissa_bits:
            return Fraction(largest) / Fraction(self.element.max)
        exponent = _exponent(largest) - self.element.max_exponent
        return Fraction(2) ** max(exponent, self.scale.min_exponent)


INT8 = IntFormat("int8", 8)
MXFP8 = BlockFormat("mxfp8", E4M3)
MXFP6 = BlockFormat("mxfp6", E2M3)
MXFP4 = BlockFormat("mxfp4", E2M1)
NVFP4 = BlockFormat("nvfp4", E2M1, block_size=16, scale=E4M3)
