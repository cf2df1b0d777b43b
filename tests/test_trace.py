"""The messages of a run: what each rank sent, and the replay in steps and seconds."""

import pytest

from labutils.config import Link
from labutils.trace import Event, Message, Trace


def ring(n: int, hops: int, nbytes: int = 25) -> Trace:
    return Trace(
        [[Event("ring", "dp", (i + 1) % n, nbytes, (i - 1) % n, nbytes)] * hops for i in range(n)]
    )


def star(n: int, nbytes: int = 100) -> Trace:
    """Everybody sends to rank 0, which sends back."""
    center = [Event("star", source=i, received=nbytes) for i in range(1, n)] + [
        Event("star", to=i, sent=nbytes) for i in range(1, n)
    ]
    leaf = [Event("star", to=0, sent=nbytes), Event("star", source=0, received=nbytes)]
    return Trace([center] + [leaf] * (n - 1))


def test_an_event_that_says_no_more_moves_nothing_and_happens_once():
    event, message = Event("wait"), Message("ring", "dp", 0, 1, 8, 0, 0)
    assert (event.axis, event.to, event.source) == ("", None, None)
    assert (event.sent, event.received, event.count) == (0, 0, 1)
    assert (message.start, message.end) == (0, 0)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_steps_and_makespan_are_the_textbook_ones(n):
    link = Link(1e-5, 1e9)
    assert ring(n, 2 * (n - 1)).steps == 2 * (n - 1) == star(n).steps
    assert ring(n, 2 * (n - 1)).makespan(link) == pytest.approx(2 * (n - 1) * (1e-5 + 25e-9))
    assert star(n).makespan(link) == pytest.approx(2 * (n - 1) * (1e-5 + 100e-9))


def test_a_rank_that_passes_on_waits_until_it_has_received():
    take = [Event("chain", source=i - 1, received=100) for i in range(1, 4)]
    give = [Event("chain", to=i + 1, sent=100) for i in range(3)]
    chain = Trace([give[:1], [take[0], give[1]], [take[1], give[2]], take[2:]])
    assert [(message.start, message.end) for message in chain.messages] == [(0, 1), (1, 2), (2, 3)]
    assert chain.steps == 3 and chain.makespan(Link(0, 100)) == 3
    silent = Trace([[], []])
    assert silent.steps == 0 and silent.makespan(Link(1, 100)) == 0


def test_what_is_sent_is_received():
    trace = star(4)
    assert trace.sent.by("rank") == {0: 300, 1: 100, 2: 100, 3: 100} == trace.received.by("rank")
    assert trace.sent.only(rank=0).count == 3
    assert sum(message.nbytes for message in trace.messages) == trace.sent.total


def test_messages_of_two_axes_are_two_channels():
    passed = Trace(
        [
            [Event("x", "dp", to=1, sent=1), Event("y", "tp", to=1, sent=2)],
            [Event("x", "dp", source=0, received=1), Event("y", "tp", source=0, received=2)],
        ]
    )
    assert [(message.op, message.nbytes) for message in passed.messages] == [("x", 1), ("y", 2)]
    crossed = Trace([passed.ranks[0], passed.ranks[1][::-1]])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait for each other"):
        _ = crossed.messages


def serial(n: int, first: set[int]) -> Trace:
    """Everybody sends to the next; ranks in `first` send and then receive, others the other way."""
    give = [Event("shift", to=(i + 1) % n, sent=1) for i in range(n)]
    take = [Event("shift", source=(i - 1) % n, received=1) for i in range(n)]
    orders = [[give[i], take[i]] if i in first else [take[i], give[i]] for i in range(n)]
    return Trace(orders)


@pytest.mark.parametrize("n", [4, 6, 8])
def test_a_send_waits_for_its_receive_as_a_receive_for_its_send(n):
    only_0_sends_first = serial(n, {0})
    only_the_last_receives_first = serial(n, set(range(n - 1)))
    assert only_0_sends_first.steps == only_the_last_receives_first.steps == n
    assert serial(n, set(range(0, n, 2))).steps == serial(n, set(range(1, n, 2))).steps == 2
    assert serial(n + 1, set(range(0, n + 1, 2))).steps == 3
    with pytest.raises(ValueError, match="wait for each other"):
        _ = serial(n, set(range(n))).steps


def test_an_unfinished_trace_says_who_waits():
    with pytest.raises(ValueError, match=r"ranks \[1\] wait .* that nobody sends"):
        _ = Trace([[], [Event("x", source=0, received=1)]]).messages
    assert Trace([[], []]).steps == 0


def test_no_message_takes_no_time():
    assert Trace().makespan(Link(1, 1)) == 0 and Trace().steps == 0
