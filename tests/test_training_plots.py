import pytest

from labutils import plots


def test_noise_and_gradient_meet_at_their_ratio():
    picture = plots.gradient_noise({1: [4.0, 6.0], 4: [1.0, 1.5]}, noise=5.0, signal=2.0)
    assert "about 2.5 sequences" in picture.alt and "2 batches of each size" in picture.alt
    lines = [line.get_xydata().tolist() for line in picture.figure.axes[0].lines]
    assert [[1, 5.0], [4, 1.25]] in lines  # the means of what was measured


def test_curves_are_told_from_the_lowest_end_to_the_highest():
    picture = plots.loss_curves({"a": ([1, 2], [3.0, 2.0]), "b": ([1, 2], [3.0, 1.0])}, xlabel="tokens", title="b learns more")
    assert picture.alt.endswith("from the lowest to the highest: b; a.")
    assert {text.get_text().strip() for text in picture.figure.axes[0].texts} == {"a", "b"}


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="at least one measured batch size"):
        plots.gradient_noise({}, noise=1.0, signal=1.0)
    with pytest.raises(ValueError, match="signal=0"):
        plots.gradient_noise({1: [1.0]}, noise=1.0, signal=0)
    with pytest.raises(ValueError, match="at least one run"):
        plots.loss_curves({}, xlabel="tokens", title="")
    with pytest.raises(ValueError, match="a: each loss needs its place, got 2 places and 1 losses"):
        plots.loss_curves({"a": ([1, 2], [1.0])}, xlabel="tokens", title="")
