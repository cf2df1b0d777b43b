"""The books: totals, pairs, and the replay of messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils.config import Link
from labutils.ledger import Event, History, Ledger, Line, Moment, Trace

lines = st.builds(Line, st.sampled_from("abc"), st.integers(0, 10**12), component=st.sampled_from(["", "weights"]), axis=st.sampled_from(["", "dp"]), rank=st.none() | st.integers(0, 3))
ledgers = st.lists(lines, max_size=8).map(Ledger)


@given(ledgers, ledgers)
def test_totals_add_whatever_the_grouping(left, right):
    both = left + right
    assert both.total == left.total + right.total
    for key in ("name", "component", "axis", "rank"):
        assert sum(both.by(key).values()) == both.total
    assert both.merged().total == both.total and both.merged().count == both.count


@given(ledgers)
def test_a_ledger_explains_itself_in_any_order(ledger):
    assert ledger.diff(Ledger(reversed(ledger.lines))).unexplained == 0
    assert ledger.scaled(3).shard(3).diff(ledger).unexplained == 0


@given(ledgers, st.integers(1, 10**6))
def test_every_missing_byte_is_found(ledger, extra):
    assert ledger.diff(ledger + Ledger([Line("new", extra)])).unexplained == extra


def test_errors_of_opposite_sign_do_not_cancel():
    diff = Ledger([Line("a", 10), Line("b", 20)]).diff(Ledger([Line("a", 20), Line("b", 10)]))
    assert diff.unexplained == 20
    assert [row.unexplained for row in diff.rows] == [10, -10]
    assert Ledger([Line("a", 10, rank=0), Line("b", 20, rank=0)]).diff(Ledger([Line("c", 30, rank=0)]), by="rank").unexplained == 0


def test_text_and_html_end_with_what_is_unexplained():
    diff = Ledger([Line("weights", 4_000_000)]).diff(Ledger([Line("weights", 4_000_001)]))
    assert str(diff).splitlines()[-1].split() == ["unexplained", "1", "B"]
    assert "4,000,001 B" in str(diff) and "unexplained" in diff._repr_html_().split("<tfoot>")[1]
    assert "&lt;b&gt;" in Ledger([Line("<b>", 1)])._repr_html_()
    assert str(Ledger([Line("weights", 1500, rank=2)])).splitlines()[1].split() == ["weights", "·", "rank", "2", "1,500", "1.50", "kB"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Line("a", 1.5), "'a': bytes come in whole numbers"), (lambda: Line("a", True), "whole numbers"), (lambda: Line("a", 1, count=-1), "count must be"),
        (lambda: Ledger([3]), "made of Lines, got 3"), (lambda: Ledger([Line("a", 5)]).shard(2), "2 ranks do not divide 5 bytes; pad it to 6"),
        (lambda: Ledger().by("color"), "no 'color'"), (lambda: Ledger().diff(3), "compared with a Ledger, got int"), (lambda: Ledger().only(colour=1), "no 'colour'"),
        (lambda: Ledger().scaled(-1), "factor must be at least 0"), (lambda: History([]), "at least one Moment"),
    ],
)  # fmt: skip
def test_bad_books_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def ring(n: int, hops: int, nbytes: int = 25) -> Trace:
    return Trace([[Event("ring", "dp", (i + 1) % n, nbytes, (i - 1) % n, nbytes)] * hops for i in range(n)])


def star(n: int, nbytes: int = 100) -> Trace:
    """Everybody sends to rank 0, which sends back."""
    center = [Event("star", source=i, received=nbytes) for i in range(1, n)] + [Event("star", to=i, sent=nbytes) for i in range(1, n)]
    leaf = [Event("star", to=0, sent=nbytes), Event("star", source=0, received=nbytes)]
    return Trace([center] + [leaf] * (n - 1))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_steps_and_makespan_are_the_textbook_ones(n):
    link = Link(1e-5, 1e9)
    assert ring(n, 2 * (n - 1)).steps == 2 * (n - 1) == star(n).steps
    assert ring(n, 2 * (n - 1)).makespan(link) == pytest.approx(2 * (n - 1) * (1e-5 + 25e-9))
    assert star(n).makespan(link) == pytest.approx(2 * (n - 1) * (1e-5 + 100e-9))


def test_what_is_sent_is_received():
    trace = star(4)
    assert trace.sent.by("rank") == {0: 300, 1: 100, 2: 100, 3: 100} == trace.received.by("rank")
    assert trace.sent.only(rank=0).count == 3
    assert sum(message.nbytes for message in trace.messages) == trace.sent.total


def test_messages_of_two_axes_do_not_overtake_each_other():
    trace = Trace([[Event("x", "dp", to=1, sent=1), Event("y", "tp", to=1, sent=2)], [Event("y", "tp", source=0, received=2), Event("x", "dp", source=0, received=1)]])
    assert {(message.op, message.nbytes) for message in trace.messages} == {("x", 1), ("y", 2)}


def test_an_unfinished_trace_says_who_waits():
    with pytest.raises(ValueError, match=r"ranks \[1\] wait for messages that nobody sent"):
        _ = Trace([[], [Event("x", source=0, received=1)]]).messages
    assert Trace([[], []]).steps == 0


def test_history_finds_peaks():
    history = History([Moment(phase, event, Ledger([Line("a", amount)])) for phase, event, amount in [("forward", "f1", 5), ("forward", "f2", 9), ("backward", "b1", 9), ("optimizer", "o", 4)]])
    assert (history.peak.phase, history.peak.event) == ("forward", "f2")
    assert {phase: moment.ledger.total for phase, moment in history.phases.items()} == {"forward": 9, "backward": 9, "optimizer": 4}
