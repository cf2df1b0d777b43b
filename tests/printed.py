"""Printed texts are compared as numbers: what rounding may move is one unit of a last digit."""

import re
from decimal import Decimal
from itertools import zip_longest

# A sign belongs to a number unless it stands between two ("3-5"); digits in a name (fp32), a
# version (2.13.0) or a bit pattern (0x1.8p3) are words.
NUMBER = re.compile(
    r"((?:(?<![\w.)\]])[-+−]|(?<![\w.]))"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![0-9]|\.[0-9]))"
)
MOST_DIGITS = 6  # with more, the digits are what is meant


def digits(number: str) -> int:
    """The significant digits of a printed number: 5 of "0.0012345" and of "1.2345e-08"."""
    return len(re.sub(r"[eE].*|[^0-9]", "", number).lstrip("0"))


def rounded(number: str) -> bool:
    """Whether a number is printed as a rounded one: with a point or an exponent, in few digits."""
    return re.search(r"[.eE]", number) is not None and digits(number) <= MOST_DIGITS


def agree(stored: str, now: str) -> bool:
    """Whether two printed numbers are one, up to a unit of the last digit that rounding decides."""
    if stored == now:
        return True
    if not (rounded(stored) or rounded(now)) or max(digits(stored), digits(now)) > MOST_DIGITS:
        return False
    a, b = (Decimal(each.replace(",", "").replace("−", "-")) for each in (stored, now))
    if a == b:  # "0.20" is not "0.2"; "-0.0" is "0.0"
        return a == 0 and stored.strip("+-−") == now.strip("+-−")
    # "9.99e-08" is beside "1.00e-07", "0.2" beside "0.20001": the finer of both units.
    return abs(a - b) <= min(Decimal(1).scaleb(each.as_tuple().exponent) for each in (a, b))


def difference(stored: str, now: str) -> str:
    """What says that `now` is another text than `stored`; empty if it is the same.

    A number printed with a decimal point or an exponent in at most six digits may differ by one
    unit of its last digit; everything else is the same, character by character, except that blanks
    do not count in a text where a number's width has changed.
    """
    if stored == now:
        return ""
    before, after = NUMBER.split(stored), NUMBER.split(now)  # words, number, words, number, words
    pairs = list(zip_longest(before, after, fillvalue=""))
    moved = any(len(a) != len(b) for a, b in pairs[1::2])
    for k, (a, b) in enumerate(pairs):
        if k % 2:
            same = bool(a and b) and agree(a, b)
        else:
            same = a.split() == b.split() if moved else a == b
        if not same:
            lead = "".join(before[:k])[-40:]
            return f"…{lead}{a[:60]}… is …{lead}{b[:60]}…"
    return ""


class Printed(str):
    """A text that equals every text without a `difference`."""

    __hash__ = None

    def __eq__(self, other):
        return not difference(str(self), str(other))

    def __ne__(self, other):
        return not self == other
