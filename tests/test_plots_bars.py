"""Bars are as long as the bytes that they were given, and titles say what follows."""

import pytest
from pictures import H100, HOLES, LOADS, ledger, segment, sent

from labutils.memory import allocator
from labutils.teach import plots


def test_bars_are_as_long_as_the_bytes_and_hatched_by_their_axis():
    picture = plots.memory_bars(
        a=ledger(("weights", 6_000_000, ""), ("optimizer", 3_000_000, "dp")),
        b=ledger(("weights", 1_000_000, "")),
    )
    bars = picture.figure.axes[0].patches
    assert [bar.get_width() for bar in bars] == [6, 3, 1] and bars[1].get_x() == 6
    assert bars[1].get_hatch() and not bars[0].get_hatch()
    assert "a holds 9× what b holds" in picture.figure.texts[0].get_text()
    assert "weights 6.00 MB and optimizer 3.00 MB, 9.00 MB in all" in picture.alt


def test_titles_say_what_fits():
    small, large = ledger(("weights", 10**9, "")), ledger(("weights", 10**12, ""))
    whole = ledger(("weights", 10**12, ""), ("activations", 1, ""))
    for second, said in ((large, "Without activations, only small"), (whole, "Only small")):
        title = plots.memory_bars(small=small, large=second, capacity=H100).figure.texts[0]
        assert title.get_text().replace("\n", " ") == f"{said} fits in the 80.0 GB of one H100"
    assert (
        plots.memory_bars(large=large, capacity=H100)
        .figure.texts[0]
        .get_text()
        .startswith("It does not fit")
    )


def test_the_line_of_the_capacity_runs_through_no_number():
    held = ledger(("weights", 60 * 10**9, ""), ("optimizer", 60 * 10**9, "dp"))
    axes = plots.memory_bars(held=held, capacity=H100).figure.axes[0]
    (line,) = axes.lines
    amounts = [
        text
        for text in axes.texts
        if text.get_text().endswith("GB") and text.get_position()[1] == 0
    ]
    assert [text.get_text() for text in amounts] == ["60.0 GB", "60.0 GB", "120 GB"]
    for text in amounts:
        assert text.get_zorder() > line.get_zorder() and text.get_bbox_patch() is not None


def test_a_memory_map_draws_blocks_end_to_end_in_binary_units():
    picture = plots.memory_map(title="t", asked=15 * 2**20, capacity=64 * 2**20, now=HOLES)
    axes = picture.figure.axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx(
        [5, 5, 10, 20, 20, 20, 15]
    )  # three blocks and their segment, one block and its segment, the request
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [
        False,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert axes.patches[4].get_x() > axes.patches[2].get_x() + 10 and axes.get_xlabel().endswith(
        "(MiB)"
    )
    assert next(line for line in axes.lines if line.get_linestyle() == "--").get_xdata()[0] == 64
    assert (
        "now: 2 segments, 15.0 MiB in use, 25.0 MiB free in 2 blocks, the largest 20.0 MiB. A request of 15.0 MiB"
        in picture.alt
    )
    assert (
        "64.0 MiB of the device" in picture.alt
        and "nothing free" in plots.memory_map(title="t", now=[segment((1, "a"))]).alt
    )


def test_comm_bars_draw_every_rank_and_the_guess_as_a_hollow_diamond():
    picture = plots.comm_bars(naive=sent(192, 64, 64, 64), ring=sent(96, 96, 96, 96), guess=64)
    axes = picture.figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [192, 64, 64, 64, 96, 96, 96, 96]
    (guess,) = axes.lines
    assert (
        guess.get_marker() == "D"
        and guess.get_markerfacecolor() == "none"
        and list(guess.get_ydata()) == [64]
    )
    assert (
        picture.figure.texts[0].get_text()
        == "The busiest rank sends 2× as much in naive as in ring"
    )


def test_bars_name_the_ratio_and_the_guess():
    picture = plots.traffic_bars(plain=LOADS.scaled(4), tiled=LOADS, guess=2e6)
    assert "plain: 16.0 MB; tiled: 4.00 MB" in picture.alt and "Your guess: 2.00 MB" in picture.alt
    assert "4× the bytes" in picture.figure.texts[0].get_text()
    assert "guess" not in plots.traffic_bars(tiled=LOADS, guess="many").alt


def test_token_weights_are_relative_to_a_mean_over_tokens():
    assert "6 tokens: 0.67 each; 2 tokens: 2.00 each" in plots.token_weights([6, 2]).alt


def test_the_layout_of_an_allocator_names_what_is_used():
    gpu = allocator.Allocator(200 * 2**20)
    gpu.alloc(5 * 2**20, "batch")
    (segment,) = gpu.layout
    assert segment == ((5 * 2**20, "batch"), (15 * 2**20, ""))


def test_shares_of_tensors_are_painted_where_a_rank_has_them():
    """Areas are shares of the tensors, and the text says how each is cut."""
    tensors = [("norm", 1.0, "s"), ("gather", 0, ""), ("GELU", 4.0, "h"), ("whole", 1.0, "")]
    picture = plots.tensor_shares(n=4, rank=1, title="a title", a_plan=tensors)
    boxes = picture.figure.axes[0].patches
    areas = [box.get_width() * box.get_height() for box in boxes]
    for outline, painted, part in zip(areas[::2], areas[1::2], (4, 4, 1), strict=True):
        assert painted * part == pytest.approx(outline)
    assert boxes[5].get_width() == boxes[4].get_width() and boxes[1].get_y() > boxes[0].get_y()
    assert "a plan: norm cut by tokens, GELU cut by width, whole whole: 38% of all" in picture.alt
    assert "gather" not in picture.alt


def test_rows_of_visits_that_are_no_ranks_have_their_names_and_stay_nowhere():
    picture = plots.visits([[5, 0, 2, 1], [3, 3, 1, 1]], names=["word 0", "others"])
    assert "word 0: 5, 0, 2, 1; others: 3, 3, 1, 1. All: 8, 3, 3, 2" in picture.alt
    axes = picture.figure.axes[0]
    assert not [patch for patch in axes.patches if patch.get_hatch() == "//"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1", "2", "3"]


def test_visits_are_added_up_for_each_expert_and_those_at_home_are_hatched():
    picture = plots.visits([[5, 0, 2, 1], [3, 3, 1, 1]])
    *cells, a, b, c, d = picture.figure.axes[0].patches
    at_home = [bool(cell.get_hatch()) for cell in cells]
    assert at_home == [True, True, False, False, False, False, True, True]
    heights = [bar.get_height() / a.get_height() for bar in (b, c, d)]
    assert heights == pytest.approx([3 / 8, 3 / 8, 2 / 8])
    assert picture.figure.texts[0].get_text() == "The busiest expert gets 2× the mean"
    assert "rank 1: 3, 3, 1, 1. All ranks: 8, 3, 3, 2." in picture.alt
