"""Figures of number formats and of sums say in words what they draw, and refuse what they cannot."""

import pytest

from labutils.floats import BF16, E2M1, E4M3, FP16, FP32
from labutils.teach import plots


def title_of(picture):
    return " ".join(text.get_text() for text in picture.figure.texts)


def test_bits_say_what_they_mean():
    assert "0 1111 110" in title_of(plots.bits(E4M3, 0b0_1111_110)) and "448" in title_of(
        plots.bits(E4M3, 0b0_1111_110)
    )
    assert "NaN" in plots.bits(E4M3, 0b0_1111_111).alt
    assert "subnormal" in plots.bits(E4M3, 1).alt


def test_a_number_line_counts_values_and_says_where_a_number_lands():
    picture = plots.number_line([E4M3, E2M1], low=0, high=8, mark=2.53)
    assert (
        "e2m1 has 8 values" in picture.alt
        and "2.53 lands on 2.5 in e4m3 and 3 in e2m1" in picture.alt
    )
    with pytest.raises(ValueError, match="up to 16 bits, fp32 has 32"):
        plots.number_line([FP32])


def test_range_and_error_give_the_limits():
    assert "65,504" in plots.dynamic_range([FP16, BF16]).alt
    assert "0.0625 from 0.01562 to 448" in plots.relative_error([E4M3]).alt
    with pytest.raises(TypeError, match="use floats.named"):
        plots.dynamic_range(["fp16"])
    with pytest.raises(ValueError, match="at least one format"):
        plots.relative_error([])


def test_running_sums_name_the_stall():
    exact = range(1, 41)
    picture = plots.running_sums(
        exact, fp16=exact, e2m1=[min(n, 4) for n in exact], guesses={"e2m1": 6.0}
    )
    assert title_of(picture) == "A running sum stops growing: e2m1 at 4"
    assert "fp16: 40 after 40 terms" in picture.alt
    with pytest.raises(ValueError, match="40 exact sums need as many partial sums"):
        plots.running_sums(exact, fp16=[1.0])
    with pytest.raises(ValueError, match="at least one row"):
        plots.running_sums(exact)
