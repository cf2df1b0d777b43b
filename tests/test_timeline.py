"""What happens when: peaks, and what of communication is hidden."""

import pytest

from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment, Occupancy, Span, Timeline


def test_history_finds_peaks():
    history = History(
        [
            Moment(phase, event, Ledger([Line("a", amount)]))
            for phase, event, amount in [
                ("forward", "f1", 5),
                ("forward", "f2", 9),
                ("backward", "b1", 9),
                ("optimizer", "o", 4),
            ]
        ]
    )
    assert (history.peak.phase, history.peak.event) == ("forward", "f2")
    assert {phase: moment.ledger.total for phase, moment in history.phases.items()} == {
        "forward": 9,
        "backward": 9,
        "optimizer": 4,
    }


def test_what_is_alive_of_some_components_has_no_line_of_nothing():
    kinds = {"weights": 8, "gradients": 0, "buffers": 4}
    ledger = Ledger(Line("", amount, component=kind) for kind, amount in kinds.items())
    (moment,) = History([Moment("forward", "mm", ledger)]).only("weights", "gradients").moments
    assert moment.ledger.by("component") == {"weights": 8}


def test_a_history_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one Moment"):
        History([])


def test_a_timeline_of_ranks_that_differ():
    fast = Timeline((Span(0, "backward", "0", 0.0, 1.0), Span(0, "reduce", "bucket 0", 1.0, 2.0)))
    slow = Timeline((Span(1, "backward", "0", 0.0, 1.5), Span(1, "reduce", "bucket 0", 1.0, 2.0)))
    both = sum([fast, slow])
    assert (both.makespan, both.exposed, both.hidden) == (2.0, 0.5, 0.25)
    nothing = Timeline(())
    assert (nothing.makespan, nothing.computed, nothing.hidden) == (0, 0, 1)


def test_who_computes_inside_another_rank_s_time_ends_no_wait():
    long, short, late = Span(0, "forward", "a", 0, 10), Span(1, "forward", "b", 2, 4), (12, 13)
    found = Timeline([long, short, Span(1, "forward", "c", *late)])
    assert found.waits == ((10, 12),) and found.exposed == 2


def test_an_occupancy_is_fullest_where_most_bytes_overlap():
    spans = (
        Span(0, "weights", "", 0, 9, (0, 4)),
        Span(0, "weights", "", 2, 5, (4, 8)),
        Span(0, "gradients", "", 5, 9, (0, 6)),
    )
    held = Occupancy(spans, 8, {"weights": 2, "gradients": 4}, {"forward": 0, "step": 6}, 9)
    assert held.whole == 8 * 6
    assert held.peak == 4 * 2 + 6 * 4  # what ends at 5 does not meet what begins there
