"""Figures of the attention lab: what they say, and what they refuse to draw."""

import pytest

from labutils.ledger import Ledger, Line
from labutils.teach import plots

LOADS = Ledger([Line("Q", 3_000_000, component="load"), Line("O", 1_000_000, component="store")])


def test_a_walk_tells_its_tiles():
    corners = [(slice(i, i + 4), slice(j, j + 4)) for i in (0, 4) for j in (0, 4) if j <= i]
    walk = plots.tile_walk(corners, s_q=8, s_k=8)
    assert len(walk.frames) == 3 and "1 of 4 tiles are never computed" in walk.alt
    assert "finished" not in walk.labels[1] and "finished" in walk.labels[2]


def test_bars_name_the_ratio_and_the_guess():
    picture = plots.traffic_bars(plain=LOADS.scaled(4), tiled=LOADS, guess=2e6)
    assert "plain: 16.0 MB; tiled: 4.00 MB" in picture.alt and "Your guess: 2.00 MB" in picture.alt
    assert "4× the bytes" in picture.figure.texts[0].get_text()
    assert "guess" not in plots.traffic_bars(tiled=LOADS, guess="many").alt


def test_a_roofline_says_its_ridge():
    roof = plots.roofline({"toy": (100.0, 10.0)}, {"lean": (10.0, 10.0), "rich": (1000.0, 10.0)})
    assert (
        "ridge at 10" in roof.alt
        and roof.figure.texts[0].get_text() == "On toy, lean waits for memory"
    )


@pytest.mark.parametrize(
    "draw, words",
    [
        (lambda: plots.tile_walk([], s_q=1, s_k=1), "at least one tile"),
        (lambda: plots.tile_walk([(slice(0, 1), slice(0, 1))], s_q=99, s_k=99), "too many"),
        (lambda: plots.traffic_bars(), "at least one ledger"),
        (
            lambda: plots.traffic_bars(x=Ledger([Line("a", 1, component="kept")])),
            "'load' or 'store'",
        ),
        (lambda: plots.roofline({}, {"x": (1.0, 1.0)}), "at least one roof"),
        (lambda: plots.roofline({"r": (1.0, 1.0)}, {"x": (0.0, 1.0)}), "above 0"),
    ],
)
def test_what_cannot_be_drawn_is_said(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()
