import pytest

from labutils.teach import plots


def test_noise_and_gradient_meet_at_their_ratio():
    picture = plots.gradient_noise({1: [4.0, 6.0], 4: [1.0, 1.5]}, noise=5.0, signal=2.0)
    assert "about 2.5 sequences" in picture.alt and "2 batches of each size" in picture.alt
    lines = [line.get_xydata().tolist() for line in picture.figure.axes[0].lines]
    assert [[1, 5.0], [4, 1.25]] in lines  # the means of what was measured


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="at least one measured batch size"):
        plots.gradient_noise({}, noise=1.0, signal=1.0)
    with pytest.raises(ValueError, match="signal=0"):
        plots.gradient_noise({1: [1.0]}, noise=1.0, signal=0)
