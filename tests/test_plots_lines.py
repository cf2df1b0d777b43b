"""Lines go through the numbers that they were given, and titles say what follows."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import CHAIN, MARKS

from labutils import checkpointing
from labutils.teach import plots


@settings(max_examples=10)
@given(st.floats(1e3, 1e8), st.integers(2, 40))
def test_the_crossing_of_two_costs_is_found(crossing, points):
    sizes = [10 ** (2 + 7 * k / points) for k in range(points + 1)]
    picture = plots.cost_curves(
        sizes,
        fast_start=[size**1.0 for size in sizes],
        fast_end=[math.sqrt(size * crossing) for size in sizes],
    )
    (line,) = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == ":"]
    assert line.get_xdata()[0] == pytest.approx(crossing, rel=1e-6)


def test_a_band_spans_the_runs():
    picture = plots.curves([0, 1], title="t", runs=[[1, 2], [3, 6]], xlabel="x", ylabel="y")
    (band,) = picture.figure.axes[0].collections
    assert band.get_datalim(picture.figure.axes[0].transData).intervaly.tolist() == [1, 6]
    assert picture.figure.axes[0].lines[0].get_ydata().tolist() == [2, 4]


def test_a_series_may_have_places_of_its_own_and_y_a_unit():
    picture = plots.curves(
        title="t",
        measured={"line": ([1], [5.0])},
        xlabel="x",
        ylabel="y",
        unit="B",
        log="xy",
        line=([1, 10], [5.0, 50_000.0]),
    )
    assert (
        picture.alt
        == "t. y against x. line goes from 5 B at 1 to 50.0 kB at 10; line, measured: 5 B."
    )
    assert [line.get_xydata().tolist() for line in picture.figure.axes[0].lines] == [
        [[1, 5], [10, 50_000]],
        [[1, 5]],
    ]


def test_a_line_that_ends_early_is_tied_to_its_name_by_dots():
    """Drawn through in its own color, the tie looks like more of the line."""
    early = {"early": ([0, 1], [1, 2]), "late": ([0, 4], [1, 3])}
    picture = plots.curves(title="t", xlabel="x", ylabel="y", **early)
    texts = {text.get_text(): text for text in picture.figure.axes[0].texts}
    ties = {name: texts[name].arrow_patch.get_linestyle() for name in early}
    assert ties == {"early": ":", "late": "solid"}


def test_running_sums_name_the_stall():
    exact = range(1, 41)
    picture = plots.running_sums(
        exact, fp16=exact, e2m1=[min(n, 4) for n in exact], guesses={"e2m1": 6.0}
    )
    assert picture.figure.texts[0].get_text() == "A running sum stops growing: e2m1 at 4"
    assert "fp16: 40 after 40 terms" in picture.alt


def test_noise_and_gradient_meet_at_their_ratio():
    picture = plots.gradient_noise({1: [4.0, 6.0], 4: [1.0, 1.5]}, noise=5.0, signal=2.0)
    assert "about 2.5 sequences" in picture.alt and "2 batches of each size" in picture.alt
    lines = [line.get_xydata().tolist() for line in picture.figure.axes[0].lines]
    assert [[1, 5.0], [4, 1.25]] in lines  # the means of what was measured


def test_a_roofline_says_its_ridge():
    roof = plots.roofline({"toy": (100.0, 10.0)}, {"lean": (10.0, 10.0), "rich": (1000.0, 10.0)}, title="t")
    assert (
        "ridge at 10" in roof.alt
    )


def test_a_measured_rate_lies_across_a_roofline():
    roof = plots.roofline({"toy": (100.0, 10.0)}, {"lean": (10.0, 10.0)}, title="t", timed={"run": 60.0})
    lines = [list(line.get_ydata()) for line in roof.figure.axes[0].lines]
    assert [60.0, 60.0] in lines and "run: 60" in roof.alt


def test_no_name_stands_on_a_measured_rate():
    def place(**timed):
        """How high a point's name stands, from 0 to 1, and the rate that is there."""
        roof = plots.roofline({"toy": (100.0, 10.0)}, {"lean": (20.0, 1.0)}, title="t", timed=timed)
        axes = roof.figure.axes[0]
        height = next(each for each in axes.texts if each.get_text() == "lean").get_position()[1]
        low, high = axes.get_ylim()
        return height, low * (high / low) ** height

    height, rate = place()
    assert place(run=rate)[0] < height == place(run=rate / 3)[0]


def test_a_trade_off_tells_both_ends():
    picture = plots.trade_off(checkpointing.frontier(CHAIN), marks=MARKS, once=18, guess=(500, 40))
    assert "keep everything: " in picture.alt and re.search(
        r"from \d.* to .* at 1\.00", picture.alt
    )
    assert len(picture.png) > 1000


def test_a_million_is_written_out():
    axes = plots.curves(
        a=([1, 1000, 10**6], [1, 2, 3]), log="x", xlabel="x", ylabel="y", title="t"
    ).figure.axes[0]
    axes.figure.draw_without_rendering()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "1,000", "1,000,000"]


def test_ticks_of_long_numbers_do_not_stand_on_each_other():
    rates = [2.0**i for i in range(-11, -4)]
    for places, said in ((rates, ["0.000488", "0.00195", "0.00781", "0.0312"]), ([1, 2, 90], None)):
        axes = plots.curves(places, title="t", xlabel="x", ylabel="y", log="x", a=places).figure.axes[0]  # fmt: skip
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert labels == (said or ["1", "2", "90"])


def test_an_axis_with_few_powers_of_ten_has_plain_numbers():
    said = dict(xlabel="x", ylabel="y", title="T", log="xy")
    narrow = plots.curves(range(20, 50), a=range(40, 70), **said).figure.axes[0]
    wide = plots.curves(range(20, 50), a=[10.0**k for k in range(30)], **said).figure.axes[0]
    for axes in (narrow, wide):
        axes.figure.canvas.draw()
    written = {
        label.get_text() for minor in (True, False) for label in narrow.get_yticklabels(minor)
    }
    assert {"40", "50", "60"} <= written and not any("10^" in text for text in written)
    assert any("10^" in label.get_text() for label in wide.get_yticklabels())


def test_a_broad_line_lies_under_the_others():
    said = dict(xlabel="x", ylabel="y", title="T", broad=["b"])
    lines = plots.curves([1, 2], a=[1, 2], b=[1, 2], **said).figure.axes[0].lines
    first, second = lines[:2]
    assert second.get_linewidth() > 2 * first.get_linewidth()
    assert second.get_zorder() < first.get_zorder()
