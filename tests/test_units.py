"""Quantities to text and back."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labutils import units


@pytest.mark.parametrize(
    "amount, unit, expected",
    [
        (0, "B", "0 B"), (999, "B", "999 B"), (1000, "B", "1.00 kB"), (999_999, "B", "1.00 MB"), (96e6, "B", "96.0 MB"), (-1536, "B", "-1.54 kB"),
        (0.5, "B", "0.50 B"), (3.15e23, "FLOP", "315 ZFLOP"), (312e12, "FLOP/s", "312 TFLOP/s"), (2.5e-5, "s", "25.0 µs"), (5000, "s", "5000 s"),
        (math.inf, "B", "inf B"), (np.float16(60000), "B", "60.0 kB"), (np.int8(-128), "B", "-128 B"),
    ],
)  # fmt: skip
def test_text_keeps_three_digits(amount, unit, expected):
    assert units.text(amount, unit) == expected


def test_gb_and_gib_differ_by_seven_percent():
    assert units.GIB / units.GB == pytest.approx(1.0737, abs=1e-4)
    assert units.text(units.GIB) == "1.07 GB" and units.text(units.GIB, binary=True) == "1.00 GiB"


@pytest.mark.parametrize(
    "quantity, amount",
    [
        ("64 MB", 64_000_000),
        ("2GiB", 2**31),
        ("1_000 B", 1000),
        ("3", 3),
        ("1.5 KB", 1500),
        ("0.0005 kB", 0.5),
    ],
)
def test_parse(quantity, amount):
    assert units.parse(quantity) == amount


@pytest.mark.parametrize(
    "quantity",
    [
        "",
        "MB",
        "5 XB",
        "5 uB",
        "4 4.4.4 B",
        "five GB",
        "1e3 kB",
        "450 GB/s",
        "64 M",
        "1" * 10**6,
    ],
)
def test_parse_names_what_it_cannot_read(quantity):
    with pytest.raises(ValueError, match="cannot read"):
        units.parse(quantity)


@given(st.integers(0, 10**17), st.booleans())
def test_text_and_parse_agree_to_the_digits_shown(nbytes, binary):
    assert units.parse(units.text(nbytes, binary=binary)) == pytest.approx(nbytes, rel=0.0051)


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_parse_is_exact_and_monotone(a, b):
    assert units.parse(f"{a} B") == a
    assert (units.parse(f"{a} MB") < units.parse(f"{b} MB")) == (a < b)


def test_unknown_unit_is_named():
    with pytest.raises(ValueError, match="'bits'.*use one of"):
        units.text(1, "bits")


@pytest.mark.parametrize(
    "value, error",
    [(True, TypeError), (1.0, TypeError), ("4", TypeError), (None, TypeError), (-1, ValueError)],
)
def test_whole_names_value_and_remedy(value, error):
    with pytest.raises(error, match="ranks must be"):
        units.whole(value, "ranks")


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.array, torch.tensor])
def test_integers_of_numpy_and_torch_are_whole_numbers(kind):
    assert type(units.whole(kind(4), "n", 1)) is int
    with pytest.raises(ValueError, match="n must be at least 5, got"):
        units.whole(kind(4), "n", 5)


@pytest.mark.parametrize(
    "value", [np.bool_(True), np.float64(4), torch.tensor(True), torch.tensor(4.0), np.ones(2, int)]
)
def test_what_is_no_whole_number_is_none_in_numpy_and_torch_either(value):
    with pytest.raises(TypeError, match="n must be a whole number, got"):
        units.whole(value, "n")


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_any_real_number_is_a_number(value):
    assert type(units.positive(value, "bandwidth")) is float


@pytest.mark.parametrize(
    "value, error",
    [
        (True, TypeError),
        ("4", TypeError),
        (0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
    ],
)
def test_positive_names_value_and_remedy(value, error):
    with pytest.raises(error, match="bandwidth must be"):
        units.positive(value, "bandwidth")


def test_a_reason_is_a_sentence_with_a_name_and_goes_to_other_processes():
    reason = pickle.loads(pickle.dumps(units.Reason("gone", "x0 is gone")))
    assert reason == "x0 is gone" and reason.name == "gone"
