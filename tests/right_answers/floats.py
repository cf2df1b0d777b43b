"""Right answers to the exercises of `floats` in other styles than the reference."""

import bisect
import functools
import heapq
import math
from collections import deque
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import torch

from labutils import precision
from labutils.floats import FloatFormat


def _by_cases(fmt: FloatFormat, code: int) -> float:
    """The definition, case by case."""
    sign, exponent, mantissa, kind = fmt.fields(code)
    leading = 0 if kind in ("zero", "subnormal") else 1
    if kind == "nan":
        return float("nan")
    if kind == "inf":
        return -math.inf if sign else math.inf
    power = max(exponent, 1) - fmt.bias
    return (-1.0) ** sign * 2.0**power * (leading + mantissa / 2**fmt.mantissa_bits)


def _cut_by_hand(fmt: FloatFormat, code: int) -> float:
    """Its own shifts and masks, and a significand that is an integer."""
    if fmt.fields(code).kind in ("inf", "nan"):
        infinite = fmt.inf and code & (1 << fmt.mantissa_bits) - 1 == 0
        return (-math.inf if code >> fmt.bits - 1 else math.inf) if infinite else math.nan
    exponent = code >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1
    significand = (code & (1 << fmt.mantissa_bits) - 1) + (bool(exponent) << fmt.mantissa_bits)
    magnitude = math.ldexp(significand, max(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    return math.copysign(magnitude, -1 if code >> fmt.bits - 1 else 1)


def _by_kind(fmt: FloatFormat, code: int) -> float:
    """Integers as significands, and the sign last."""
    sign, exponent, mantissa, kind = fmt.fields(code)
    match kind:
        case "nan" | "inf" | "zero":
            value = {"nan": math.nan, "inf": math.inf, "zero": 0.0}[kind]
        case "subnormal":
            value = mantissa * 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
        case "normal":
            value = (2**fmt.mantissa_bits + mantissa) * 2.0 ** (
                exponent - fmt.bias - fmt.mantissa_bits
            )
    return [value, -value][sign]


def _by_log2(fmt: FloatFormat, x: float) -> int:
    """The exponent by log2: one too large just below a power of two, which the carry forgives."""
    sign = (math.copysign(1, x) < 0) << fmt.bits - 1
    power = max(math.floor(math.log2(abs(x))), fmt.min_exponent) if x else fmt.min_exponent
    code = (power - fmt.min_exponent << fmt.mantissa_bits) + round(
        abs(x) / 2.0 ** (power - fmt.mantissa_bits)
    )
    if not code and fmt.nan == "negative_zero":
        return 0
    return sign | code if code <= fmt.encode(fmt.max) else fmt.encode(math.copysign(math.inf, x))


@functools.cache
def _values(fmt: FloatFormat) -> list[float]:
    return [fmt.decode(code) for code in range(fmt.encode(fmt.max) + 1)]


def _nearest_of_all(fmt: FloatFormat, x: float) -> np.int64:
    """Looks for the nearer of two values in the list of all, the even code at a tie."""
    values = _values(fmt)
    sign = (math.copysign(1, x) < 0) << fmt.bits - 1
    beyond = fmt.max + fmt.spacing(fmt.max) / 2
    even = not fmt.encode(fmt.max) & 1
    if abs(x) > beyond or (abs(x) == beyond and not even):
        return np.int64(fmt.encode(math.copysign(math.inf, x)))
    low = max(bisect.bisect_right(values, abs(x)) - 1, 0)
    high = min(low + 1, len(values) - 1)
    below, above = abs(x) - values[low], values[high] - abs(x)
    up = above < below or (above == below and low & 1)
    nearest = high if up else low
    return np.int64(nearest | sign if nearest or fmt.nan != "negative_zero" else 0)


def _in_gaps(fmt: FloatFormat, x: float) -> int:
    """Counts gaps: below the smallest power of two with a leading 1 they are all the same."""
    power = max(math.frexp(x)[1] - 1, fmt.min_exponent) if x else fmt.min_exponent
    gaps = round(Fraction(abs(x)) / Fraction(2) ** (power - fmt.mantissa_bits))
    code = (power - fmt.min_exponent) * 2**fmt.mantissa_bits + gaps
    if code > fmt.encode(fmt.max):
        return fmt.encode(math.copysign(math.inf, x))
    if not (code or fmt.nan != "negative_zero"):
        return code
    return code + (math.copysign(1, x) < 0) * 2 ** (fmt.bits - 1)


def _heap(x: torch.Tensor, fmt: FloatFormat) -> float:
    """The two smallest first."""
    terms = x.tolist()
    heapq.heapify(terms)
    while len(terms) > 1:
        heapq.heappush(terms, fmt.round(heapq.heappop(terms) + heapq.heappop(terms)))
    return terms[0]


def _queue(x: torch.Tensor, fmt: FloatFormat) -> np.float64:
    """First in, first out."""
    terms = deque(x.tolist())
    while len(terms) > 1:
        terms.append(fmt.round(terms.popleft() + terms.popleft()))
    return np.float64(terms[0])


def _both_ends(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The first to the last, the second to the last but one; the middle one waits."""
    while len(x) > 1:
        half = len(x) // 2
        sums = precision.round_to(x[:half] + x.flip(0)[:half], fmt)
        x = torch.cat([sums, x[half : half + len(x) % 2]])
    return x


def _stack(x: torch.Tensor, fmt: FloatFormat) -> float:
    """A binary counter: as many sums as the count of terms has ones."""
    sums: list[float] = []
    for count, term in enumerate(x.tolist(), 1):
        sums.append(term)
        while count % 2 == 0:
            sums[-2:] = [fmt.round(sums[-2] + sums[-1])]
            count //= 2
    return functools.reduce(lambda a, b: fmt.round(a + b), reversed(sums))


def _blocks_of_8(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """A running sum in blocks of 8, then halves, as NumPy does."""
    if len(x) <= 8:
        return precision.running_sum(x, fmt)[-1]
    half = len(x) // 2
    both = _blocks_of_8(x[:half], fmt) + _blocks_of_8(x[half:], fmt)
    return precision.round_to(both, fmt)


def _halves(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The first half onto the second, padded with zeros to a power of two."""
    x = torch.cat([x, x.new_zeros(2 ** (len(x) - 1).bit_length() - len(x))])
    while len(x) > 1:
        x = precision.round_to(x[: len(x) // 2] + x[len(x) // 2 :], fmt)
    return x


def _looks_at_every_code(fmt: FloatFormat, x: float) -> int:
    """The nearest of all that are finite, anew for each number."""
    finite = [v for code in range(2 ** (fmt.bits - 1)) if math.isfinite(v := fmt.decode(code))]
    code = min(range(len(finite)), key=lambda code: (abs(finite[code] - abs(x)), code & 1))
    top, sign = len(finite) - 1, (math.copysign(1, x) < 0) << fmt.bits - 1
    beyond, half = abs(x) - finite[top], (finite[top] - finite[top - 1]) / 2
    over = fmt.nan != "none" and (beyond > half or (beyond == half and top % 2 == 1))
    if over and fmt.nan == "negative_zero":
        return 1 << fmt.bits - 1
    return code + over | (sign if code or fmt.nan != "negative_zero" else 0)


def _decimal(fmt: FloatFormat, code: int) -> Decimal:
    """In the decimal system, exact with as many digits."""
    sign, exponent, mantissa, kind = fmt.fields(code)
    significand = mantissa + (kind == "normal" and 2**fmt.mantissa_bits)
    with localcontext(prec=400):
        value = significand * Decimal(2) ** (max(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    value = Decimal({"inf": "inf", "nan": "nan"}[kind]) if kind in ("inf", "nan") else value
    return value.copy_negate() if sign else value


RIGHT = {
    "floats/decode": {
        "decimal": _decimal,
        "case by case": _by_cases,
        "a NumPy scalar": lambda fmt, code: np.float32(_by_cases(fmt, code)),
        "a tensor without dims": lambda fmt, code: torch.tensor(_by_cases(fmt, code)),
        "shifts and masks": _cut_by_hand,
        "by kind, integers as significands": _by_kind,
    },
    "floats/encode": {
        "looks at every code": _looks_at_every_code,
        "the nearest of all values, as NumPy's integer": _nearest_of_all,
        "a tensor without dims": lambda fmt, x: torch.tensor(int(_nearest_of_all(fmt, x))),
        "a lambda": lambda fmt, x: fmt.encode(Fraction(x) if x else x),
        "gaps as fractions": _in_gaps,
        "by log2": _by_log2,
    },
    "floats/pairwise-sum": {
        "a heap, a Python float": _heap,
        "a queue, a NumPy scalar": _queue,
        "blocks of 8": _blocks_of_8,
        "a binary counter": _stack,
        "both ends": _both_ends,
        "halves, a tensor of one dim": _halves,
    },
    "floats/rounds-twice": {
        "decimal": Decimal("1.00048828125090949"),
        "a NumPy scalar": np.float64(1 + 2**-11 + 2**-40),
        "a tensor": torch.tensor(1 + 2**-11 + 2**-26, dtype=torch.float64),
        "a fraction": Fraction(2**40 + 2**29 + 1, 2**40),
        "just below overflow": 65520 - 2**-20,
        "what the cast makes 0": 2**-25 * (1 + 2**-30),
        "a tie of float32": 1 + 2**-11 + 2**-24,
        "negative": -(1 + 2**-11 + 2**-30),
        "the tie above an odd value, from below": 1 + 3 * 2**-11 - 2**-40,
    },
}
