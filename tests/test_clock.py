"""The clock: tasks begin as soon as they can, and every second of a rank is accounted for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils import schedule
from labutils.clock import NOTHING, Task, play, run_times
from labutils.config import Link
from labutils.schedule import Durations


def forward(seconds, *after, rank=0, name="a"):
    return Task(("rank", rank), seconds, after, "forward", name, rank)


def send(seconds, *after, rank=0, lane=None, name="m"):
    return Task(lane or ("link", rank), seconds, after, "pass", name, rank)


def test_a_task_begins_when_its_lane_is_free_and_all_it_needs_is_there():
    first, second = forward(3), forward(2, rank=1)
    one, two = send(4), send(1, second)  # on one lane: the second follows the first
    last = forward(1, first, one, two, rank=1)
    step = play([first, second, one, two, last])
    times = [(span.start, span.end) for span in step.spans]
    assert times == [(0, 3), (0, 2), (0, 4), (4, 5), (5, 6)]
    assert step.cause(last) is two and step.cause(two) is one and step.cause(one) is None
    assert step.critical_path() == (one, two, last)
    assert [str(wait) for wait in step.waits_of(1)] == [
        "rank 1 waits from 2 to 5: forward a needs pass m"
    ]
    assert step.spent(1) == {"forward": 3, "pass": 3}


def test_what_is_computed_while_a_result_is_on_its_way_delays_nothing():
    rows = [([0], [NOTHING], [0], [1]), ([1, 2], [NOTHING, 0], [0, 5], [2, 1])]
    assert run_times(rows, 3) == ([0, 0, 6], [1, 2, 7])


def test_several_lanes_wait_for_one_and_a_barrier_is_not_drawn():
    early, late = forward(1), forward(5, rank=1)
    barrier = Task("all", 0, (early, late))
    after = [forward(1, barrier, rank=rank, name="b") for rank in range(3)]
    step = play([*after[2:], early, late, barrier, *after[:2]])
    assert [span.start for span in step.spans] == [5, 0, 0, 5, 5]
    assert step.critical_path()[:2] == (late, barrier) and step.makespan == 6
    assert step.spent(2) == {"forward": 1, "bubble": 5}


def test_a_blocking_send_delays_its_sender_and_exposes_both():
    one = forward(3)
    sent = send(1, one, lane=("rank", 0))
    step = play([one, sent, forward(2, sent, rank=1)])
    assert step.spent(0) == {"forward": 3, "pass": 1, "bubble": 2}
    assert step.spent(1) == {"forward": 2, "pass": 1, "bubble": 3}
    assert (step.busy(0), step.idle(0), step.exposed) == (3, 3, 1)


def test_a_message_on_its_way_is_exposed_where_nothing_else_is_done():
    """F 0–1, message to 2, F 2–3, B 3–5, message to 6, B 6–8."""
    run = schedule.simulate(schedule.one_f_one_b(2, 1), Durations(1, 1, 1, O=(4, 1)), Link(1, 1))
    assert run.spent(0) == {"F": 1, "B": 2, "pass": 2, "bubble": 3}
    assert run.spent(1) == {"F": 1, "B": 2, "pass": 2, "bubble": 3 + 3}  # an update of 4, not 1
    assert run.makespan == 12 and run.busy(0) == 3 + 4


WORK = {"F": {"forward": 2, "tp": 1}, "B": {"backward": 4, "tp": 2}}
LAST = {"dp": 3, "update": 1}


def test_a_whole_step_by_hand():
    """Rank 0: F 0–3, its message to 4, F to 7, message to 8; B 14–20 and 24–30. Rank 1: F 4–7,
    B 7–13, message to 14, F to 17, B to 23, message to 24. Then 3 + 1."""
    step = schedule.whole_step(schedule.one_f_one_b(2, 2), [WORK] * 2, send=1, last=[LAST] * 2)
    alike = {"forward": 4, "backward": 8, "tp": 6, "dp": 3, "update": 1}
    assert step.makespan == 34
    assert step.spent(0) == alike | {"pp": 2 + 2, "bubble": (14 - 8 - 1) + (24 - 20 - 1)}
    assert step.spent(1) == alike | {"pp": 2 + 1, "bubble": 3 + 6}
    assert str(step.waits_of(1)[0]) == "rank 1 waits from 0 to 4: forward F0@1 needs pp F0@0"
    assert sum(task.seconds for task in step.critical_path()) == 34


@given(
    st.sampled_from(["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"]),
    st.integers(1, 4),
    st.lists(st.integers(0, 5), min_size=8, max_size=8),
)
def test_a_whole_step_adds_up_on_every_rank(name, p, times):
    one = getattr(schedule, name)(p, 2 * p)
    f, b, w, tp, send, *rest = times
    work = {"F": {"forward": f, "tp": tp}, "B": {"backward": b}, "W": {"backward": w}}
    last = [dict(zip(("dp", "update"), rest, strict=False))] * p
    step = schedule.whole_step(one, [work] * one.stages, send=send, last=last)
    for rank in range(p):
        found, ops = step.spent(rank), one.ranks[rank]
        assert sum(found.values()) == step.makespan
        assert found.get("forward", 0) == f * sum(op.kind == "F" for op in ops)
        assert found.get("tp", 0) == tp * sum(op.kind == "F" for op in ops)
        assert found.get("dp", 0) == rest[0]
    plain = schedule.whole_step(one, [work] * one.stages)  # what `simulate` plays
    alone = Durations(f + tp, b, w if one.split else 0)
    assert plain.makespan == schedule.simulate(one, alone).makespan


def test_a_whole_step_of_no_schedule_is_refused():
    with pytest.raises(ValueError, match="deadlock"):
        schedule.whole_step(schedule.read("F0 B0 F1 B1 | F0 F1 B0 B1"), [WORK] * 2)


@st.composite
def any_tasks(draw):
    """Tasks on a few lanes that need some of those before them, listed in another order that keeps
    the order of each lane."""
    tasks = []
    for number in range(draw(st.integers(1, 12))):
        rank, kind = draw(st.integers(0, 2)), draw(st.sampled_from(["forward", "pass", ""]))
        lane = (rank, kind == "pass" and draw(st.booleans()))
        after = draw(st.lists(st.sampled_from(tasks), max_size=3)) if tasks else []
        tasks.append(Task(lane, draw(st.integers(0, 5)), after, kind, str(number), rank))
    lanes = sorted(tasks, key=lambda task: repr(task.lane))
    return lanes if draw(st.booleans()) else tasks


@given(any_tasks())
def test_nothing_begins_sooner_or_later_and_all_time_is_accounted_for(tasks):
    step = play(tasks)
    when = step._when
    free = {}
    for task in tasks:
        soonest = max([free.get(task.lane, 0), *(when[need][1] for need in task.after)])
        assert when[task] == (soonest, soonest + task.seconds)
        free[task.lane] = when[task][1]
    path = step.critical_path()
    assert when[path[0]][0] == 0 and when[path[-1]][1] == max(end for _, end in when.values())
    assert all(when[one][1] == when[two][0] for one, two in itertools.pairwise(path))
    for rank in step.ranks:
        waits = step.waits_of(rank)
        assert sum(wait.end - wait.start for wait in waits) == step.idle(rank)
        assert all(when[wait.needs][1] == wait.end for wait in waits if wait.op)
        if all(task.kind for task in tasks):
            assert sum(step.spent(rank).values()) == step.makespan


def test_what_never_begins_is_named():
    one, two = forward(1), send(1)
    one.after, two.after = [two], [one]
    with pytest.raises(ValueError, match="forward a never begins: it waits for itself"):
        play([forward(1, rank=1), one, two])
    ahead = forward(1)
    ahead.after = [behind := forward(1, name="b")]
    with pytest.raises(ValueError, match="or for what comes later on its own lane"):
        play([ahead, behind])
    with pytest.raises(ValueError, match="pass m is needed, but not among the tasks"):
        play([forward(1, send(1))])
    assert play([]).makespan == 0 and play([]).critical_path() == ()
