"""Wrong answers to the exercises of `floats`."""

import math
from collections.abc import Callable

import torch

from labutils import precision
from labutils.floats import FloatFormat
from labutils.teach.exercises import floats as exercises
from wrong_answers import Wrong


def _decode_with(
    leading_one: bool = True,
    bias: bool = True,
    subnormal_shift: int = 1,
    flush: bool = False,
    all_ieee: bool = False,
) -> exercises.Decode:
    """A decoder with one of the misconceptions that are about."""

    def decode(fmt: FloatFormat, code: int) -> float:
        sign, exponent, mantissa, kind = fmt.fields(code)
        top = exponent == 2**fmt.exponent_bits - 1
        if kind in ("inf", "nan") or (all_ieee and top):
            return math.copysign(math.inf, -sign) if mantissa == 0 else math.nan
        fraction = mantissa / 2**fmt.mantissa_bits
        if exponent == 0:
            magnitude = 0.0 if flush else math.ldexp(fraction, subnormal_shift - fmt.bias)
        else:
            magnitude = math.ldexp(leading_one + fraction, exponent - fmt.bias * bias)
        return -magnitude if sign else magnitude

    return decode


def _ieee_bias(fmt: FloatFormat, code: int) -> float:
    usual = 2 ** (fmt.exponent_bits - 1) - 1
    return fmt.decode(code) * 2.0 ** (fmt.bias - usual)


def _knows_the_name(fmt: FloatFormat, code: int) -> float:
    """IEEE for every format but the one called e4m3."""
    top = fmt.fields(code).exponent == 2**fmt.exponent_bits - 1
    if fmt.name == "e4m3" or not top:
        return fmt.decode(code)
    infinity = -math.inf if fmt.fields(code).sign else math.inf
    return math.nan if fmt.fields(code).mantissa else infinity


def _encode_with(
    rounding: Callable[[float], float] = round,
    carry: bool = True,
    flush: bool = False,
    eager: bool = False,
) -> exercises.Encode:
    """An encoder with one of the bugs that are about."""

    def encode(fmt: FloatFormat, x: float) -> int:
        negative, magnitude = math.copysign(1, x) < 0, abs(x)
        sign = negative << fmt.exponent_bits + fmt.mantissa_bits
        beyond = fmt.encode(-math.inf if negative else math.inf)
        if magnitude == 0 or (flush and magnitude < fmt.min_normal):
            return sign
        if eager and magnitude > fmt.max:
            return beyond
        exponent = max(math.frexp(magnitude)[1] - 1, fmt.min_exponent)
        significand = int(rounding(math.ldexp(magnitude, fmt.mantissa_bits - exponent)))
        if not carry and significand == 2 << fmt.mantissa_bits:
            significand = 1 << fmt.mantissa_bits
        code = (exponent - fmt.min_exponent << fmt.mantissa_bits) + significand
        return beyond if code > fmt.encode(fmt.max) else sign | code

    return encode


def _subnormals_twice(fmt: FloatFormat, x: float) -> int:
    """Rounded to the bits of a normal number first, and to a subnormal's gap after that."""
    exponent = math.frexp(x)[1] - 1 - fmt.mantissa_bits
    return fmt.encode(math.ldexp(round(math.ldexp(x, -exponent)), exponent) if x else x)


def _usual_bias(fmt: FloatFormat, x: float) -> int:
    usual = 2 ** (fmt.exponent_bits - 1) - 1
    return fmt.encode(x * 2.0 ** (usual - fmt.bias))


def _specials_of_e4m3(fmt: FloatFormat, x: float) -> int:
    """What overflows has all ones where a format has no infinity."""
    beyond = abs(x) > fmt.max and math.isnan(fmt.round(x))
    return 2 ** (fmt.bits - 1) - 1 if beyond else fmt.encode(x)


def _one_above_max(fmt: FloatFormat, x: float) -> int:
    """The code above the largest number's is taken for inf or NaN, whoever has neither."""
    top, negative = fmt.encode(fmt.max), math.copysign(1, x) < 0
    over = abs(fmt.round(x)) == fmt.max and abs(x) > 1.5 * fmt.max
    return (top + 1 | negative << fmt.bits - 1) if over else fmt.encode(x)


def _zero_above_max(fmt: FloatFormat, x: float) -> int:
    """No code is left, so none is given."""
    return 0 if fmt.nan == "none" and abs(x) > fmt.max else fmt.encode(x)


def _wide_at_first(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """A tree whose first levels are rounded to fp32 alone."""
    while len(x) > 8:
        x = torch.nn.functional.pad(x, (0, len(x) % 2)).view(-1, 2).sum(-1)
    return precision.pairwise_sum(x, fmt)


def _fp32_sum(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    return precision.round_to(x.sum(), fmt)


def _two_levels(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """A running sum of running sums over √n terms each."""
    parts = x.split(math.isqrt(len(x)))
    return precision.running_sum(
        torch.stack([precision.running_sum(part, fmt)[-1] for part in parts]), fmt
    )[-1]


def _blocked_sum(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    while len(x) > 1:
        x = precision.round_to(x[: len(x) // 2] + x[len(x) // 2 : len(x) // 2 * 2], fmt)
    return x[0]


def _two_halves(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """One addition of a tree, and two running sums under it."""
    half = len(x) // 2
    if not half:
        return x[0]
    ends = [precision.running_sum(part, fmt)[-1] for part in (x[:half], x[half:])]
    return precision.round_to(ends[0] + ends[1], fmt)


def _stochastic(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return precision.running_sum(x, fmt, mode="stochastic", generator=generator)[-1]


def _kahan(x: torch.Tensor, fmt: FloatFormat) -> float:
    total = lost = 0.0
    for term in x.tolist():
        y = fmt.round(term + lost)
        t = fmt.round(total + y)
        lost, total = fmt.round(y - fmt.round(t - total)), t
    return total


def _smallest_twice(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Sorted, in double precision, and rounded at the end."""
    return precision.round_to(x.double().sort().values.sum(), fmt)


WRONG = {
    "floats/decode": (
        Wrong(
            "IEEE's bias for all",
            _ieee_bias,
            "other formats, down to four bits",
            "Ask fmt.bias",
        ),
        Wrong(
            "no leading one",
            _decode_with(leading_one=False),
            "normal numbers",
            "1 in front that no bit stores",
        ),
        Wrong(
            "by way of fp16",
            lambda fmt, code: torch.tensor(fmt.decode(code)).half().item(),
            "normal numbers",
            "2^(exponent − bias)",
        ),
        Wrong("no bias", _decode_with(bias=False), "normal numbers", "stored with a bias"),
        Wrong(
            "subnormals at 0 − bias",
            _decode_with(subnormal_shift=0),
            "subnormal numbers",
            "1 − bias and not 0 − bias",
        ),
        Wrong(
            "an infinity without sign",
            lambda fmt, code: math.inf if fmt.fields(code).kind == "inf" else fmt.decode(code),
            "inf and NaN",
            "has a sign, too",
        ),
        Wrong(
            "a leading one everywhere",
            lambda fmt, code: fmt.decode(code) or 2.0 ** (1 - fmt.bias),
            "signs and zeros",
            "no leading 1",
        ),
        Wrong("subnormals are zero", _decode_with(flush=True), "subnormal numbers", "fill the gap"),
        Wrong(
            "every format but e4m3 is IEEE",
            _knows_the_name,
            "other formats, down to four bits",
            "no IEEE format",
        ),
        Wrong(
            "no sign of zero",
            lambda fmt, code: fmt.decode(code) + 0.0,
            "signs and zeros",
            "the sign of a zero must survive",
        ),
        Wrong(
            "every format is IEEE", _decode_with(all_ieee=True), "e4m3's own corners", "no infinity"
        ),
    ),
    "floats/encode": (
        Wrong("the code above max", _one_above_max, "nothing above max", "what overflows is max"),
        Wrong("0 where nothing is above max", _zero_above_max, "nothing above max", "is max"),
        Wrong(
            "the sign of x < 0, so none for -0.0",
            lambda fmt, x: fmt.encode(x) if x else fmt.encode(0.0),
            "subnormal numbers",
            "what underflows keeps its own",
        ),
        Wrong(
            "zero where nothing is left",
            lambda fmt, x: fmt.encode(x) if fmt.decode(fmt.encode(x)) else fmt.encode(0.0),
            "subnormal numbers",
            "what underflows keeps its own",
        ),
        Wrong(
            "a sign for every zero",
            _encode_with(),
            "fnuz's only zero and NaN",
            "one zero, without a sign",
        ),
        Wrong(
            "all ones are NaN everywhere",
            _specials_of_e4m3,
            "fnuz's only zero and NaN",
            "what overflows goes there",
        ),
        Wrong("subnormals rounded twice", _subnormals_twice, "rounded once", "round once"),
        Wrong("IEEE's bias for all", _usual_bias, "values of the format", "fields of the right"),
        Wrong(
            "saturates",
            lambda fmt, x: fmt.encode(x, overflow="saturate"),
            "overflow",
            "What lies beyond goes to inf",
        ),
        Wrong("cuts off", _encode_with(math.floor), "the nearer neighbor", "cut the rest off"),
        Wrong(
            "rounds half up",
            _encode_with(lambda s: math.floor(s + 0.5)),
            "ties to even",
            "even significand",
        ),
        Wrong(
            "forgets the sign",
            lambda fmt, x: fmt.encode(abs(x)),
            "values of the format",
            "All but the sign",
        ),
        Wrong(
            "zero has an exponent",
            lambda fmt, x: fmt.encode(x) or fmt.encode(0.25),
            "subnormal numbers",
            "no two powers",
        ),
        Wrong(
            "drops the carry",
            _encode_with(carry=False),
            "carry into the exponent",
            "exponent goes up by one",
        ),
        Wrong(
            "flushes subnormals",
            _encode_with(flush=True),
            "subnormal numbers",
            "the gap stays what it is",
        ),
        Wrong(
            "compares with max before rounding",
            _encode_with(eager=True),
            "overflow",
            "decided after rounding",
        ),
    ),
    "floats/pairwise-sum": (
        Wrong(
            "running sum",
            lambda x, fmt: precision.running_sum(x, fmt)[-1],
            "a sum of ones",
            "half a gap",
        ),
        Wrong(
            "sum in fp32, round at the end",
            _fp32_sum,
            "every addition in the format",
            "every partial sum",
        ),
        Wrong("blocks as long as they are many", _two_levels, "a sum of ones", "half a gap"),
        Wrong("forgets the odd one", _blocked_sum, "any number of terms", "leaves one over"),
        Wrong(
            "sorts first",
            lambda x, fmt: precision.running_sum(x.sort().values, fmt)[-1],
            "a sum of ones",
            "same size",
        ),
        Wrong("one level of a tree", _two_halves, "a sum of ones", "half a gap"),
        Wrong("rounds stochastically", _stochastic, "a sum of ones", "half a gap"),
        Wrong("Kahan's, which stalls at 64 in e5m2", _kahan, "a sum of ones", "half a gap"),
        Wrong(
            "the mean of a tree, times n",
            lambda x, fmt: precision.round_to(precision.pairwise_sum(x / len(x), fmt) * len(x), fmt),
            "every addition in the format",
            "every partial sum",
        ),
        Wrong(
            "the first levels of the tree in fp32",
            _wide_at_first,
            "every addition in the format",
            "every partial sum",
        ),
        Wrong("rounds the last sum alone", _smallest_twice, "every addition in the format", "once"),
        Wrong("all partial sums", precision.running_sum, "a sum of ones", "Return one number"),
    ),
    "floats/rounds-twice": (
        Wrong("any number", 0.1, "the cast gets it wrong", "not halfway between two fp16 values"),
        Wrong(
            "an exact tie",
            1 + 2**-11,
            "the cast gets it wrong",
            "so little that float32 does not notice",
        ),
        Wrong(
            "next to a tie, but float32 sees it",
            1 + 2**-11 + 2**-20,
            "the cast gets it wrong",
            "Move closer",
        ),
        Wrong("the lucky side", 1 + 2**-11 - 2**-40, "the cast gets it wrong", "other side"),
        Wrong("overflow", 1e6, "the cast gets it wrong", "between two values"),
        Wrong("a string", "1 + 2**-11", "a finite number", "finite Python number"),
        Wrong("a tie in fp32", torch.tensor(1 + 2**-11), "the cast gets it wrong", "Go a little"),
        Wrong("not a number", math.nan, "a finite number", "finite Python number"),
        Wrong("both say zero", 1e-30, "the cast gets it wrong", "halfway"),
        Wrong("an exact tie, larger", 2049.0, "the cast gets it wrong", "float32 does not notice"),
        Wrong("two numbers", (1.0, 2.0), "a finite number", "finite Python number"),
    ),
}
