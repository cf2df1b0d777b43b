"""Figures of number formats and of sums say in words what they draw, and refuse what they cannot."""

import pytest
import torch

from labutils import floats, precision
from labutils.floats import BF16, E2M1, E4M3, FP16, FP32
from labutils.teach import plots

GRADIENTS = precision.exponents(
    [torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 2.0**-18]
)


def title_of(picture):
    return " ".join(text.get_text() for text in picture.figure.texts)


def test_bits_say_what_they_mean():
    assert "0 1111 110" in title_of(plots.bit_pattern(E4M3, 0b0_1111_110)) and "448" in title_of(
        plots.bit_pattern(E4M3, 0b0_1111_110)
    )
    assert "NaN" in plots.bit_pattern(E4M3, 0b0_1111_111).alt
    assert "subnormal" in plots.bit_pattern(E4M3, 1).alt


def test_a_number_line_counts_values_and_says_where_a_number_lands():
    picture = plots.number_line([E4M3, E2M1], title="t", low=0, high=8, mark=2.53)
    assert (
        "e2m1 has 8 values" in picture.alt
        and "2.53 lands on 2.5 in e4m3 and 3 in e2m1" in picture.alt
    )
    with pytest.raises(ValueError, match="up to 16 bits, fp32 has 32"):
        plots.number_line([FP32], title="t")


def test_range_and_error_give_the_limits():
    assert "65,504" in plots.dynamic_range([FP16, BF16], title="t").alt
    assert "0.0625 from 0.01562 to 448" in plots.relative_error([E4M3], title="t").alt


@pytest.mark.parametrize(
    "fmt", [floats.FP16, floats.BF16, floats.E5M2, floats.E4M3], ids=lambda fmt: fmt.name
)
@pytest.mark.parametrize("scale", [2.0**-13, 1.0, 2.0**12, 2.0**40])
def test_the_picture_and_the_count_agree(fmt, scale):
    picture = plots.exponent_histogram(GRADIENTS, [fmt, floats.FP32], scale=scale)
    fates = precision.fate(GRADIENTS, fmt, scale)
    lost = fates["zero"] + fates["too large"]
    told = [f"{x:.1%}" if 0 < x < 0.01 else f"{x:.0%}" for x in (lost, fates["subnormal"])]
    assert f"in {fmt.name} {told[0]} are lost and {told[1]} are subnormal" in picture.alt


def test_a_share_that_is_not_nothing_is_not_told_as_nothing():
    picture = plots.exponent_histogram({-30: 1, 0: 399}, [floats.FP16])
    assert "0.2% are lost and 0% are subnormal" in picture.alt


def test_bars_are_colored_by_their_fate_and_stay_inside():
    picture = plots.exponent_histogram({-30: 1, -20: 2, 0: 4, 18: 1}, [floats.FP16, floats.E4M3])
    axes = picture.figure.axes[0]
    bars = {round(patch.get_x()): patch for patch in axes.patches if patch.get_y() == 0}
    assert [bars[e].get_height() for e in (-30, -20, 0, 18)] == [0.125, 0.25, 0.5, 0.125]
    colors = [bars[e].get_facecolor() for e in (-30, -20, 0, 18)]
    assert colors[0] == colors[3] and len(set(colors)) == 3
    low, high = axes.get_xlim()
    assert all(
        low <= patch.get_x() and patch.get_x() + patch.get_width() <= high for patch in axes.patches
    )


def test_numbers_that_share_a_grid_land_on_fewer_values():
    numbers = [0.1, 0.2, 0.4, 0.8]
    picture = plots.shared_grids(fine=(numbers, [0.1] * 4), coarse=(numbers, [0.8] * 4))
    assert "fine: 4 numbers land on 4 values; coarse: 4 numbers land on 2 values" in picture.alt
