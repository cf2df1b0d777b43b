"""What happens when: peaks."""

import pytest

from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment


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


def test_a_history_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one Moment"):
        History([])
