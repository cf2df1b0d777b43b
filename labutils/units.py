"""Bytes, FLOPs and seconds to text, and bytes back. GB is 10⁹ bytes, GiB is 2³⁰, and nothing here
guesses between them."""

import math
import numbers
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeVar

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12  # bytes
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40  # bytes

_Of = TypeVar("_Of")
_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18, "Z": 21}
_BINARY = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
_BASES = ("B", "FLOP", "B/s", "FLOP/s", "s")
_QUANTITY = re.compile(r"\s*([0-9][0-9_]{,99}(?:\.[0-9]{,99})?)\s*(?:([kKMGTPEZ]|[KMGTP]i)?B)?\s*")


class Reason(str):
    """A sentence for a reader, and the `name` by which a program asks for it."""

    def __new__(cls, name: str, text: str) -> "Reason":
        self = super().__new__(cls, text)
        self.name = name
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # to be pickled
        return self.name, str(self)

    name: str


def text(amount: float, unit: str = "B", *, digits: int = 3, binary: bool = False) -> str:
    """`amount` of `unit` as text with a prefix, `binary` or decimal, and `digits` significant
    digits (whole bytes below 1000 stay exact).

    >>> text(96e6), text(96e6, binary=True), text(312e12, "FLOP/s"), text(2.5e-5, "s")
    ('96.0 MB', '91.6 MiB', '312 TFLOP/s', '25.0 µs')
    >>> text(-1536), text(0), text(7)
    ('-1.54 kB', '0 B', '7 B')

    Raises ValueError for an unknown unit, and digits below 1.
    """
    if not is_whole(digits) or digits < 1:
        raise ValueError(f"digits must be a whole number of at least 1, got {digits!r}")
    if unit not in _BASES:
        raise ValueError(f"unknown unit {unit!r}: use one of {', '.join(_BASES)}")
    try:
        finite = math.isfinite(amount)
    except TypeError:
        raise _other(amount, "number", "text") from None
    if not finite:
        return f"{amount} {unit}"
    amount = int(amount) if is_whole(amount) else float(amount)
    size = abs(amount)
    steps = [(prefix, 10.0**power) for prefix, power in _DECIMAL.items()]
    if binary:
        steps = [(prefix, 2.0**power) for prefix, power in _BINARY.items()]
    elif unit == "s":
        steps = [("n", 1e-9), ("µ", 1e-6), ("m", 1e-3), ("", 1.0)]
    if size == 0 or (size < (1024 if binary else 1000) and float(amount).is_integer()):
        return f"{int(amount)} {unit}"
    for prefix, factor in reversed(steps):
        if float(f"{size / factor:.{digits - 1}e}") >= 1:
            break
    value = size / factor
    whole = len(str(int(float(f"{value:.{digits - 1}e}"))))
    return f"{'-' if amount < 0 else ''}{value:.{max(digits - whole, 0)}f} {prefix}{unit}"


def parse(quantity: str) -> int | float:
    """The bytes that a text such as "64 MB" or "2 GiB" names; whole amounts are exact integers.

    >>> parse("64 MB"), parse("2GiB"), parse("1_000 B")
    (64000000, 2147483648, 1000)

    Raises ValueError for what is no number with a unit.
    """
    match = _QUANTITY.fullmatch(quantity) if isinstance(quantity, str) else None
    if not match:
        remedy = "write a number and a unit, such as '64 MB' or '2 GiB'"
        raise ValueError(f"cannot read {quantity!r:.102} as a quantity: {remedy}")
    number, prefix = match[1], match[2] or ""
    if prefix in _BINARY:
        factor = 2 ** _BINARY[prefix]
    else:
        factor = 10 ** _DECIMAL[prefix.replace("K", "k")]
    amount = Fraction(number.replace("_", "")) * factor
    return int(amount) if amount.denominator == 1 else float(amount)


def is_whole(value: Any) -> bool:
    """Whether `value` is one whole number: an int, or what `operator.index` takes for one, as
    numpy's and torch's integers; True is none.

    >>> import numpy
    >>> [is_whole(value) for value in (4, numpy.int8(4), 4.0, True, numpy.array([4, 4]))]
    [True, True, False, False, False]
    """
    if type(value) is int:
        return True
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def whole(value: Any, name: str, minimum: int = 0) -> int:
    """`value` as a Python int, after checking that it is a whole number ≥ `minimum`.

    Compute with what it returns: a numpy.int8 that is left as it is overflows without a word.

    Raises TypeError and ValueError with `name` and the value.

    >>> import numpy
    >>> whole(numpy.int64(4), "num_layers", 1)
    4
    """
    if not is_whole(value):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if (number := operator.index(value)) < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return number


# How one comes by it, by the name of a type.
_FOR_EXAMPLE = {
    "Callable": "a module, or lambda x: …, is one",
    "Comm": 'on a rank, rank.comm("dp") is one',
    "Link": "Hardware.named(…).link or Link(latency, bandwidth) is one",
    "Mesh": "Mesh(dp=4) is one",
    "ModelConfig": "ModelConfig.named(…) is one",
    "Optimizer": "torch.optim.AdamW(module.parameters()) is one",
    "Rank": "a World gives it to the function that it runs",
    "Schedule": "schedule.one_f_one_b(4, 8) is one",
    "Tensor": "torch.tensor(…) is one",
    "TrainConfig": "TrainConfig(micro_batch=1, global_batch=8) is one",
}


def instance(value: object, kind: type, call: str) -> None:
    """Raises TypeError where what `call` is given is no `kind`; the error says both, and how one
    comes by it.

    >>> instance([3], dict, "shard")
    Traceback (most recent call last):
    TypeError: shard takes a dict, got [3] (list)
    """
    if not isinstance(value, kind):
        raise _other(value, kind.__name__, call)


def optimizer(value: object, call: str) -> None:
    """Raises TypeError where what `call` is given steps no parameters, as torch's optimizers do and
    what has one of them inside."""
    if not all(hasattr(value, each) for each in ("param_groups", "step", "zero_grad")):
        raise _other(value, "Optimizer", call)


def _other(value: object, name: str, call: str) -> TypeError:
    said = f"{value!r:.60} ({type(value).__name__})"
    remedy = f": {_FOR_EXAMPLE[name]}" if name in _FOR_EXAMPLE else ""
    article = "an" if name[0] in "AEIO" else "a"
    return TypeError(f"{call} takes {article} {name}, got {said}{remedy}")


def entry(table: Mapping[str, _Of], name: object, without: str) -> _Of:
    """What a table has under a name.

    >>> entry({"ring": 1, "tree": 2}, ["ring"], "no algorithm")
    Traceback (most recent call last):
    ValueError: no algorithm ['ring']: there are ring, tree
    """
    if not isinstance(name, str) or name not in table:  # a list has no hash to look it up by
        raise ValueError(f"{without} {name!r}: there are {', '.join(table)}")
    return table[name]


def writable(count: int, said: str, remedy: str, most: int = 10**7) -> None:
    """Raises ValueError where a list of `count` entries, `said` to be so many, has more than
    `most`, which take some ten seconds to write down; the error ends with the `remedy`.

    >>> writable(10**9, "an order of", "take fewer stages")
    Traceback (most recent call last):
    ValueError: an order of 1,000,000,000: at most 10,000,000 can be written down: take fewer stages
    """
    if count > most:
        raise ValueError(f"{said} {count:,}: at most {most:,} can be written down: {remedy}")


def wholes(minimum: int = 0, /, **values: object) -> tuple[int, ...]:
    """These values as Python ints, each checked by `whole` under its name.

    >>> wholes(1, n=4, itemsize=2)
    (4, 2)
    """
    return tuple(whole(value, name, minimum) for name, value in values.items())


def whole_fields(record: object, *names: str, minimum: int = 1) -> None:
    """Makes these fields of a frozen dataclass Python ints, each checked by `whole`."""
    for name in names:
        object.__setattr__(record, name, whole(getattr(record, name), name, minimum))


def positive(value: object, name: str, *, or_zero: bool = False) -> float:
    """`value` as a float, after checking that it is a finite number above zero, `or_zero`; the
    error names `name`, the value and the remedy.

    Compute with what it returns: 10**6 over a numpy.float16 is infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # of a whole number that no float holds
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
        least = "of at least 0" if or_zero else "above 0"
        raise ValueError(f"{name} must be a finite number {least}, got {value}")
    return number


def positive_fields(record: object, *names: str, or_zero: bool = False) -> None:
    """Makes these fields of a frozen dataclass floats, each checked by `positive`; ints stay."""
    for name in names:
        number = positive(value := getattr(record, name), name, or_zero=or_zero)
        object.__setattr__(record, name, value if type(value) is int else number)
