"""Who computes which scores: cells in the color of their rank, and shares that add up."""

from matplotlib.colors import to_rgba
from matplotlib.patches import Polygon, Rectangle

from labutils import context_parallel
from labutils.teach import plots
from labutils.teach.plots.style import SERIES


def drawn(kind, n=4, **options):
    return plots.who_computes(**{kind: context_parallel.layout(32, n, kind).grid()}, **options)


def test_every_cell_has_the_color_of_its_rank():
    axes = drawn("zigzag", shares=False, title="t").figure.axes[0]
    grid = context_parallel.layout(32, 4, "zigzag").grid()
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    halves = [patch for patch in axes.patches if isinstance(patch, Polygon)]
    for rank in range(4):
        mine = [at for at, (who, _) in grid.items() if who == rank]
        whole = [cell for cell in cells if cell.get_facecolor() == to_rgba(SERIES[rank])]
        half = [cell for cell in halves if cell.get_facecolor() == to_rgba(SERIES[rank])]
        assert (len(whole), len(half)) == (
            sum(i != j for i, j in mine),
            sum(i == j for i, j in mine),
        )


def test_shares_below_are_pieces_of_one_bar_in_the_colors_of_ranks():
    """And not columns of keys, under which they stand."""
    axes = drawn("contiguous").figure.axes[0]
    assert {"all the work", "6%", "19%", "31%", "44%"} <= {text.get_text() for text in axes.texts}
    pieces = axes.patches[-4:]
    assert [piece.get_facecolor() for piece in pieces] == [to_rgba(color) for color in SERIES[:4]]
    whole = sum(piece.get_width() for piece in pieces)
    assert [round(16 * piece.get_width() / whole, 9) for piece in pieces] == [1, 3, 5, 7]


def test_a_share_that_is_thinner_than_its_number_has_none():
    texts = [text.get_text() for text in drawn("contiguous", n=8).figure.axes[0].texts]
    assert "2%" not in texts and "23%" in texts


def test_the_finding_is_the_busiest_rank():
    for kind, worst in (("contiguous", "1.75"), ("zigzag", "1.00")):
        said = " ".join(drawn(kind).figure.texts[0].get_text().split())
        assert f"{kind}: {worst} times the average" in said


def test_shares_are_told_if_asked_for():
    told = drawn("contiguous")
    assert "rank 3 44%" in told.alt and "rank 3" in {
        t.get_text() for t in told.figure.axes[0].texts
    }
    assert "%" not in drawn("contiguous", shares=False, title="A layout").alt
