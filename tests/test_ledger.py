"""The books: totals and pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.ledger import Ledger, Line

lines = st.builds(
    Line,
    st.sampled_from("abc"),
    st.integers(0, 10**12),
    component=st.sampled_from(["", "weights"]),
    axis=st.sampled_from(["", "dp"]),
    rank=st.none() | st.integers(0, 3),
)
ledgers = st.lists(lines, max_size=8).map(Ledger)


@given(ledgers, ledgers)
def test_totals_add_whatever_the_grouping(left, right):
    both = left + right
    assert both.total == left.total + right.total
    for key in ("name", "component", "axis", "rank"):
        assert sum(both.by(key).values()) == both.total
    assert both.merged().total == both.total and both.merged().count == both.count


def test_a_line_is_of_one_tensor_unless_it_says_of_how_many():
    assert Ledger([Line("weights", 8), Line("weights", 8, count=3)]).count == 4


def test_amounts_from_numpy_are_kept_as_python_ints():
    line = Line("weights", np.int32(2**31 - 1), count=np.int8(3))
    assert type(line.amount) is int and type(line.count) is int
    assert Ledger([line]).scaled(np.int8(100)).total == 100 * (2**31 - 1)
    with pytest.raises(TypeError, match="bytes come in whole numbers, got True"):
        Line("weights", True)


@given(ledgers)
def test_a_ledger_explains_itself_in_any_order(ledger):
    assert ledger.diff(Ledger(reversed(ledger.lines))).unexplained == 0
    assert ledger.scaled(3).diff(ledger + ledger + ledger).unexplained == 0


@given(ledgers, st.integers(1, 10**6))
def test_every_missing_byte_is_found(ledger, extra):
    assert ledger.diff(ledger + Ledger([Line("new", extra)])).unexplained == extra


def test_errors_of_opposite_sign_do_not_cancel():
    diff = Ledger([Line("a", 10), Line("b", 20)]).diff(Ledger([Line("a", 20), Line("b", 10)]))
    assert diff.unexplained == 20
    assert [row.unexplained for row in diff.rows] == [10, -10]
    assert (
        Ledger([Line("a", 10, rank=0), Line("b", 20, rank=0)])
        .diff(Ledger([Line("c", 30, rank=0)]), by="rank")
        .unexplained
        == 0
    )


def test_text_and_html_end_with_what_is_unexplained():
    diff = Ledger([Line("weights", 4_000_000)]).diff(Ledger([Line("weights", 4_000_001)]))
    assert str(diff).splitlines()[-1].split() == ["unexplained", "1", "B"]
    assert "4,000,001 B" in str(diff) and "unexplained" in diff._repr_html_().split("<tfoot>")[1]
    assert "&lt;b&gt;" in Ledger([Line("<b>", 1)])._repr_html_()
    assert str(Ledger([Line("weights", 1500, rank=2)])).splitlines()[1].split() == [
        "weights",
        "·",
        "rank",
        "2",
        "1,500",
        "1.50",
        "kB",
    ]


def test_only_what_answers_every_question_is_left():
    lines = [Line("weights", 1, rank=0), Line("weights", 2, rank=1), Line("state", 4, rank=0)]
    assert Ledger(lines).only(name="weights", rank=0).total == 1
    assert Ledger(lines).only(rank=0).total == 5 and Ledger(lines).only().total == 7


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Line("a", 1.5), "'a': bytes come in whole numbers"), (lambda: Line("a", True), "whole numbers"), (lambda: Line("a", 1, count=-1), "count must be"),
        (lambda: Line("a", 1, rank="0"), "'a': rank must be a whole number"),
        (lambda: Ledger([3]), "made of Lines, got 3"),
        (lambda: Ledger().by("color"), "no 'color'"), (lambda: Ledger().diff(3), "compared with a Ledger, got int"), (lambda: Ledger().only(colour=1), "no 'colour'"),
        (lambda: Ledger().scaled(-1), "factor must be at least 0"),
    ],
)  # fmt: skip
def test_bad_books_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
