"""Decode, encode, a sum that does not stall, and a cast that rounds twice."""

import itertools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import torch

from labutils import precision
from labutils.floats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, FP16, FP32, FloatFormat
from labutils.teach.exercises import Exercise, Failed, Property

MINE, WIDER = FloatFormat("1-3-4", 3, 4), FloatFormat("1-5-4", 5, 4)
Decode = Callable[[FloatFormat, int], float]
Encode = Callable[[FloatFormat, float], int]


def _scalar(value: Any) -> Any:
    """The number in a tensor or an array of one element, or in a Decimal; else what it is."""
    if isinstance(value, Decimal):
        return float(value)
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
    return value.item() if size == 1 else value


# Decode


def _decodes(
    attempt: Decode,
    fmt: FloatFormat,
    codes: Sequence[int],
    hint: Callable[[FloatFormat, int, Any], str],
) -> int:
    for code in codes:
        got, exact = _scalar(attempt(fmt, code)), fmt.decode(code)
        if not isinstance(got, Real):
            raise Failed(f"decode({fmt.name}, {code}) returned {got!r}", "Return one number.")
        same = got == exact and math.copysign(1, got) == math.copysign(1, exact)
        if not same and not (math.isnan(got) and math.isnan(exact)):
            raise Failed(
                f"{fmt.name} {fmt.bit_string(code)}: you say {got}, it is {exact}",
                hint(fmt, code, got),
            )
    return len(codes)


def _normals(attempt: Decode) -> str:
    def hint(fmt, code, got):
        _, exponent, mantissa, _ = fmt.fields(code)
        fraction = mantissa / 2**fmt.mantissa_bits
        if got == math.ldexp(fraction, exponent - fmt.bias):
            return (
                "The fraction alone is missing something: a normal number has a 1 in front that "
                "no bit stores."
            )
        if got == math.ldexp(1 + fraction, exponent):
            return (
                f"The exponent field is stored with a bias: {fmt.name} subtracts {fmt.bias} from "
                "it."
            )
        return "A normal number is (1 + mantissa/2^mantissa_bits) · 2^(exponent − bias)."

    cases = [
        (FP16, range(0x400, 0x7C00, 97)),
        (E4M3, range(8, 120)),
        (MINE, range(16, 112)),
        (BF16, range(0xFF, 0x7F80, 997)),
    ]
    return f"{sum(_decodes(attempt, fmt, codes, hint) for fmt, codes in cases)} codes"


def _signs(attempt: Decode) -> str:
    def hint(fmt, code, got):
        if got == 0:
            return "Zero has two codes, +0 and −0; the sign of a zero must survive."
        return (
            "The first bit is the sign."
            if fmt.decode(code)
            else "All bits are 0: exponent field 0 has no leading 1."
        )

    cases = [(MINE, [0, 0x80, *range(0x90, 0xF0)]), (FP16, [0x8000, 0xBC00])]
    return f"{sum(_decodes(attempt, fmt, codes, hint) for fmt, codes in cases)} codes"


def _subnormals(attempt: Decode) -> str:
    def hint(fmt, code, got):
        step = math.ldexp(1.0, fmt.min_exponent - fmt.mantissa_bits)
        mantissa = fmt.fields(code).mantissa
        if got == 0:
            return (
                "Exponent field 0 is not zero as a whole: these codes fill the gap between 0 and "
                "the smallest normal number."
            )
        if got == mantissa * step / 2:
            return (
                "Subnormals share the exponent of the smallest normal number, 1 − bias and not 0 "
                "− bias: else a gap stays open."
            )
        return (
            "Exponent field 0 has no leading 1: the value is mantissa/2^mantissa_bits · 2^(1 − "
            "bias)."
        )

    cases = [(E4M3, range(1, 8)), (FP16, range(1, 0x400, 31)), (MINE, range(1, 16))]
    return f"{sum(_decodes(attempt, fmt, codes, hint) for fmt, codes in cases)} codes"


def _ieee_specials(attempt: Decode) -> str:
    def hint(fmt, code, got):
        if abs(got) == abs(fmt.decode(code)):
            return "Infinity has a sign, too."
        return (
            "In an IEEE format the top exponent is special: mantissa 0 is infinity, "
            "everything else NaN."
        )

    cases = [
        (FP16, [0x7C00, 0xFC00, 0x7C01, 0x7E00]),
        (E5M2, [*range(124, 128), 252]),
        (MINE, [112, 113]),
    ]
    return f"{sum(_decodes(attempt, fmt, codes, hint) for fmt, codes in cases)} codes"


def _e4m3_specials(attempt: Decode) -> str:
    def hint(fmt, code, got):
        if math.isnan(got) or math.isinf(got):
            return (
                "e4m3 has no infinity and takes its top exponent back: seven more magnitudes, "
                "256 to 448. Look at fmt.inf and fmt.nan."
            )
        return "nan='all_ones': in e4m3 the code whose exponent and mantissa bits are all 1 is NaN."

    return f"{_decodes(attempt, E4M3, [*range(120, 128), 255], hint)} codes"


def _small_formats(attempt: Decode) -> str:
    def hint(fmt, code, got):
        if math.isnan(fmt.decode(code)):
            return f"{fmt.name} has one NaN, the code of −0: look at fmt.nan and fmt.fields(code)."
        usual = 2 ** (fmt.exponent_bits - 1) - 1
        if got and math.isfinite(got) and got / fmt.decode(code) == 2.0 ** (fmt.bias - usual) != 1:
            return (
                f"Your value is {2.0 ** (fmt.bias - usual):g} times the right one: the bias of "
                f"{fmt.name} is {fmt.bias} and not {usual}. Ask fmt.bias."
            )
        return (
            f"{fmt.name} is no IEEE format: its top exponent holds numbers. "
            "Ask fmt.fields(code) for the kind, not the name of the format."
        )

    formats = (E2M1, E3M2, E2M3, E4M3FNUZ)
    return f"{sum(_decodes(attempt, fmt, range(2**fmt.bits), hint) for fmt in formats)} codes"


DECODE = Exercise(
    id="floats/decode",
    reference=FloatFormat.decode,
    properties=(
        Property("normal numbers", _normals),
        Property("signs and zeros", _signs),
        Property("subnormal numbers", _subnormals),
        Property("inf and NaN", _ieee_specials),
        Property("e4m3's own corners", _e4m3_specials),
        Property("other formats, down to four bits", _small_formats),
    ),
    hints=(
        "fmt.fields(code) cuts the code into sign, exponent field and mantissa field, "
        "and says which kind of value they make.",
        "normal: (1 + mantissa / 2**M) · 2**(exponent − bias). subnormal: (0 + mantissa / 2**M) "
        "· 2**(1 − bias).",
        "math.ldexp(f, e) is f · 2**e without rounding; −0.0 needs the sign put on after the "
        "magnitude is known.",
    ),
)


# Encode


def _encodes(attempt: Encode, fmt: FloatFormat, numbers: Sequence[float], hint: str) -> int:
    for x in numbers:
        got, exact = _scalar(attempt(fmt, x)), fmt.encode(x)
        if not isinstance(got, Integral) or not 0 <= int(got) < 2**fmt.bits:
            raise Failed(
                f"encode({fmt.name}, {x}) returned {got!r}",
                f"A code of {fmt.name} is an int from 0 to {2**fmt.bits - 1}.",
            )
        got = int(got)
        if got != exact and not fmt.fields(got).kind == fmt.fields(exact).kind == "nan":
            yours, right = (f"{fmt.bit_string(code)} ({fmt.decode(code)})" for code in (got, exact))
            signed = fmt.nan != "negative_zero" or exact  # else the hint given says what zero has
            if signed and got ^ exact == 1 << fmt.exponent_bits + fmt.mantissa_bits:
                hint = (
                    "All but the sign is right: its bit stands above those of exponent and "
                    "mantissa. Zero has one, too, and what underflows keeps its own."
                )
            elif signed and x == 0:
                hint = (
                    "Zero lies between no two powers of two, and math.frexp(0) says exponent 0 "
                    "all the same: all its bits are 0, but for the sign."
                )
            raise Failed(f"{fmt.name}, x = {x}: you gave {yours}, it is {right}", hint)
    return len(numbers)


def _inside(fmt: FloatFormat, place: float) -> list[float]:
    """Numbers at `place` of the gap above a code, where both ends of the gap lie in one binade.

    Of large formats they are few: an encoder may look at every code.
    """
    most = 60 if fmt.bits <= 10 else 3
    last = 2**fmt.mantissa_bits - 1
    codes = [
        c
        for c in range(2**fmt.mantissa_bits, fmt.encode(fmt.max))
        if fmt.fields(c).mantissa != last
    ]
    values = [
        fmt.decode(c) + place * (fmt.decode(c + 1) - fmt.decode(c))
        for c in codes[:: max(1, len(codes) // most)]
    ]
    return [*values, *(-v for v in values)]


def _grid(attempt: Encode) -> str:
    hint = (
        "This number is a value of the format, nothing is to be rounded: "
        "read the fields of the right answer."
    )
    count = 0
    for fmt in (E4M3, E4M3FNUZ):
        normal = [v for v in fmt.representable() if abs(v) >= fmt.min_normal]
        count += _encodes(attempt, fmt, normal, hint)
    return f"{count} values"


def _nearer(attempt: Encode) -> str:
    hint = "You took the farther neighbor. Do you cut the rest off instead of rounding?"
    places = itertools.product((E4M3, WIDER, FP16), (0.25, 0.75, 0.51, 0.49))
    count = sum(_encodes(attempt, fmt, _inside(fmt, p), hint) for fmt, p in places)
    return f"{count} numbers"


def _ties(attempt: Encode) -> str:
    hint = (
        "Halfway between two values: the one with the even significand (last bit 0) wins, "
        "so that errors cancel in the long run."
    )
    formats = (E4M3, MINE, WIDER, FP16)
    return f"{sum(_encodes(attempt, fmt, _inside(fmt, 0.5), hint) for fmt in formats)} ties"


def _carries(attempt: Encode) -> str:
    powers = [math.ldexp(1, k) for k in range(-5, 8)]
    hint = (
        "Rounding up 1.111… gives 10.000…: the mantissa becomes 0 and the exponent goes up by one. "
        "Consecutive values have consecutive codes, so adding 1 to the whole code does both."
    )
    return f"{_encodes(attempt, E4M3, [p * (1 - 2**-6) for p in powers], hint)} numbers"


def _small(attempt: Encode) -> str:
    hint = (
        "Below the smallest normal number the gap stays what it is there; "
        "the exponent field is 0. Half the smallest subnormal is a tie and goes to zero."
    )
    step = E4M3.min_subnormal
    numbers = [step * k / 4 for k in range(33)] + [-step * k for k in range(1, 9)]
    count = _encodes(attempt, E4M3, [*numbers, -0.0, -step / 4, -step / 2], hint)
    numbers = [1e-8, 3e-8, 6e-8, 1e-5, -0.0, -1e-9]
    return f"{count + _encodes(attempt, FP16, numbers, hint)} numbers"


def _large(attempt: Encode) -> str:
    hint = (
        "Overflow is decided after rounding, as if the exponent had no end: "
        "up to half a gap above max still rounds down to max. "
        "What lies beyond goes to inf, or to NaN where a format has no inf."
    )
    count = _encodes(attempt, FP16, [65504, 65505, 65519.99, 65520, 1e9, -7e4], hint)
    return f"{count + _encodes(attempt, E4M3, [449, 463.9, 464, 464.1, -1e5], hint)} numbers"


def _once(attempt: Encode) -> str:
    hint = (
        "This number is so little off a tie that float32 does not see it. Was it rounded on the "
        "way? A Python float has 53 bits: keep them, and round once."
    )
    shifts = [(1 - 2.0**-40), (1 + 2.0**-40)]
    ties = {BF16: [1 + 2.0**-8, 3 + 2.0**-7], E5M2: [1.125, -1.375], MINE: [1 + 2.0**-5]}
    ties |= {FP16: [2.0**-25, 3 * 2.0**-25]}  # subnormal
    pairs = [(fmt, [x * by for x in xs for by in shifts]) for fmt, xs in ties.items()]
    return f"{sum(_encodes(attempt, fmt, xs, hint) for fmt, xs in pairs)} numbers next to a tie"


def _one_zero(attempt: Encode) -> str:
    hint = (
        "fnuz has one zero, without a sign. The code of −0 is its only NaN, and what overflows "
        "goes there: ask fmt.nan."
    )
    least = E4M3FNUZ.min_subnormal
    numbers = [0.0, -0.0, -1e-9, -least / 2, least, -least, 247.9, 248, -1e5]
    return f"{_encodes(attempt, E4M3FNUZ, numbers, hint)} numbers"


def _nothing_above(attempt: Encode) -> str:
    hint = "This format has neither inf nor NaN: nothing lies above max, and what overflows is max."
    count = 0
    for fmt in (E2M1, E3M2):
        numbers = [0.9 * fmt.max, fmt.max, 1.01 * fmt.max, 2 * fmt.max, 1e9]
        count += _encodes(attempt, fmt, [*numbers, *(-x for x in numbers)], hint)
    return f"{count} numbers"


ENCODE = Exercise(
    id="floats/encode",
    reference=FloatFormat.encode,
    properties=(
        Property("values of the format", _grid),
        Property("the nearer neighbor", _nearer),
        Property("ties to even", _ties),
        Property("carry into the exponent", _carries),
        Property("subnormal numbers", _small),
        Property("overflow", _large),
        Property("rounded once", _once),
        Property("fnuz's only zero and NaN", _one_zero),
        Property("nothing above max", _nothing_above),
    ),
    hints=(
        "Between which powers of two is |x|? math.frexp(|x|) gives m and e with |x| = m · 2**e "
        "and 0.5 ≤ m < 1, so its exponent is e − 1.",
        "Count |x| in gaps: |x| / 2**(exponent − M), the exponent no lower than fmt.min_exponent. "
        "Python's round() is nearest-even.",
        "code = ((exponent − fmt.min_exponent) << M) + significand, the leading 1 left in: "
        "it adds the missing 1 to the field.",
        "Above fmt.encode(fmt.max) lie the specials: ask fmt.inf. "
        "The sign is the bit above exponent and mantissa; fnuz's zero has none.",
    ),
)  # fmt: skip


# A sum that does not stall


def _sum_of(attempt: Callable, terms: list[float], fmt: FloatFormat) -> float:
    got = _scalar(attempt(torch.tensor(terms), fmt))
    if not isinstance(got, Real):
        raise Failed(
            f"{len(terms)} terms in {fmt.name}: you returned {got!r}", "Return one number."
        )
    return float(got)


def _ones(attempt: Callable) -> str:
    for n, fmt in ((4096, FP16), (4096, BF16), (256, E4M3), (4096, E5M2)):
        if (got := _sum_of(attempt, [1.0] * n, fmt)) != n:
            raise Failed(
                f"{n} ones in {fmt.name}: you got {got:g}",
                "It stalls where the gap reaches 2: 1 is then half a gap. "
                "Add numbers of the same size to one another, so that none is small.",
            )
    return "four formats"


def _any_length(attempt: Callable) -> str:
    for n in (1, 2, 3, 5, 7, 100):
        if (got := _sum_of(attempt, [1.0] * n, FP16)) != n:
            raise Failed(
                f"{n} ones: you got {got:g}",
                "An odd number of terms leaves one over: carry it on to the next level.",
            )
    return "6 lengths"


# In whatever order you add these three, rounding both sums gives one number, and rounding the exact
# sum once gives another. Zeros behind them change neither.
_TRIPLES = (
    (E4M3, [1.875, 6.0, 3.5], 12.0),
    (BF16, [1.8828125, 5.34375, 4.9375], 12.125),
    (FP16, [5.625, 1.6259765625, 3.08203125], 10.328125),
)


def _rounded_each(attempt: Callable) -> str:
    for (fmt, terms, rounded), zeros in itertools.product(_TRIPLES, (0, 29)):
        got, exact = _sum_of(attempt, terms + [0.0] * zeros, fmt), sum(terms)
        if got != rounded:
            further = f" + {zeros} zeros" if zeros else ""
            told = f"{' + '.join(map(str, terms))}{further} in {fmt.name}: you got {got:g}"
            raise Failed(
                f"{told}; with both sums rounded it is {rounded:g}, in any order",
                f"{got:g} is the exact sum, {exact:g}, rounded once: it was added in a wider "
                "format, or with a correction. Here every partial sum has to be one of the format."
                if got == fmt.round(exact)
                else "Round after every addition, and add nothing but the terms and their sums.",
            )
    return f"{2 * len(_TRIPLES)} sums that show it"


def _close(attempt: Callable) -> str:
    terms = precision.round_to(torch.rand(1000, generator=torch.Generator().manual_seed(0)), BF16)
    exact, bound = terms.double().sum().item(), 16 * BF16.eps / 2
    error = abs(_sum_of(attempt, terms.tolist(), BF16) - exact) / exact
    if error > bound:
        raise Failed(
            f"1000 numbers: relative error {error:.1%}; where a term passes through 16 additions "
            f"at most, it stays below {bound:.1%}",
            "How many additions does a term pass through?",
        )
    return f"error {error:.2%}, bound {bound:.1%}"


PAIRWISE = Exercise(
    id="floats/pairwise-sum",
    reference=precision.pairwise_sum,
    properties=(
        Property("a sum of ones", _ones),
        Property("any number of terms", _any_length),
        Property("every addition in the format", _rounded_each),
        Property("error of a tree", _close),
    ),
    hints=(
        "1 + 1 = 2 is exact, and so is 2 + 2. When would you ever add 1 to 2048?",
        "Add neighbors: x[0::2] + x[1::2], round, and again, until one number is left. "
        "An odd last term waits a level.",
    ),
)


# Bug hunt


def through_float32(x: float) -> float:
    """x in fp16, by way of float32."""
    return torch.tensor(x, dtype=torch.float64).float().half().item()


def _is_a_number(attempt: float) -> str:
    number = _scalar(attempt)
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise Failed(f"you gave {attempt!r}", "Give one finite Python number, such as 1 + 2**-11.")
    return f"{number!r}"


def _rounded_wrongly(attempt: float) -> str:
    attempt = _scalar(attempt)
    exact, suspect = FP16.round(attempt), through_float32(attempt)
    if exact != suspect:
        return f"it is {exact}, the cast says {suspect}"
    seen, middle = f"{attempt!r}: both say {exact}", FP32.round(attempt)
    if abs(attempt) >= 65520:
        raise Failed(
            seen, "From 65520 on everything goes to inf, whatever the way. Look between two values."
        )
    if not _is_tie(middle):
        raise Failed(
            seen,
            "In float32 this number is not halfway between two fp16 values, so the second "
            "rounding sees what the first one saw. Move closer to a tie.",
        )
    if middle == attempt:
        raise Failed(
            seen,
            "An exact tie, and float32 holds it as it is: the two agree. Go a little to one side, "
            "so little that float32 does not notice.",
        )
    raise Failed(
        seen,
        "float32 lost the side you are on, but the tie went your way by luck: to even. "
        "Go to the other side, or to the next tie.",
    )


def _is_tie(x: float) -> bool:
    half = FP16.spacing(x) / 2
    return not math.isnan(half) and (x / half) % 2 == 1


DOUBLE_ROUNDING = Exercise(
    id="floats/rounds-twice",
    reference=1 + 2**-11 + 2**-40,
    properties=(
        Property("a finite number", _is_a_number),
        Property("the cast gets it wrong", _rounded_wrongly),
    ),
    hints=(
        "The cast rounds to float32, then to fp16. The first rounding must turn your number into "
        "something the second one misreads.",
        "What does round-to-nearest-even do with a number exactly halfway between two fp16 "
        "values? And just above halfway?",
        "1 + 2**-11 is halfway between 1 and 1 + 2**-10. float32 cannot see a change smaller than "
        "2**-24 there, float64 can.",
    ),
)

EXERCISES = (DECODE, ENCODE, PAIRWISE, DOUBLE_ROUNDING)
