"""The histogram of exponents says what `precision.fate` counts, whatever the format and the scale, and fits its page."""

import pytest
import torch

from labutils import floats, precision
from labutils.teach import plots

GRADIENTS = precision.exponents(
    [torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 2.0**-18]
)


@pytest.mark.parametrize(
    "fmt", [floats.FP16, floats.BF16, floats.E5M2, floats.E4M3], ids=lambda fmt: fmt.name
)
@pytest.mark.parametrize("scale", [2.0**-13, 1.0, 2.0**12, 2.0**40])
def test_the_picture_and_the_count_agree(fmt, scale):
    picture = plots.exponent_histogram(GRADIENTS, [fmt, floats.FP32], scale=scale)
    fates = precision.fate(GRADIENTS, fmt, scale)
    lost = fates["zero"] + fates["too large"]
    assert (
        f"in {fmt.name} {lost:.0%} are lost and {fates['subnormal']:.0%} are subnormal"
        in picture.alt
    )


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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plots.exponent_histogram({0: 1}, []), "at least one format"),
        (lambda: plots.exponent_histogram({}, [floats.FP16]), "nothing to count"),
        (
            lambda: plots.exponent_histogram({0: 1}, [floats.FP16], scale=3.0),
            "scale=3.0 is not a power of two",
        ),
        (
            lambda: plots.exponent_histogram({0: 1}, [floats.FP16], scale=0.0),
            "scale=0.0 is not a power of two",
        ),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(ValueError, match=says):
        call()
