"""Pipeline schedules: every generated one is legal, every published formula comes out by simulation."""

import collections
import dataclasses
import itertools
import json
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from labutils import schedule
from labutils.config import Link
from labutils.schedule import Durations, Op, Schedule

PLAIN = [schedule.naive, schedule.gpipe, schedule.one_f_one_b, schedule.eager_one_f_one_b]
CHUNKED = [schedule.interleaved, schedule.breadth_first, schedule.interleaved_zb]
SPLIT = [schedule.zb_h1, schedule.zb_h2, schedule.zb_v, schedule.dualpipe_v, schedule.dualpipe]
times = st.builds(Durations, *[st.integers(1, 30)] * 3)
ranks = st.integers(1, 6)
micro_batches = st.integers(1, 16)


def made(make, *sizes):
    """The schedule, or no example where it is none."""
    try:
        return make(*sizes)
    except ValueError:
        assume(False)


def chain(one, steps):
    """Steps of a schedule one after the other, without a barrier."""
    m = one.micro_batches
    rows = [
        tuple(Op(kind, stage, k + step * m) for step in range(steps) for kind, stage, k in ops)
        for ops in one.ranks
    ]
    return dataclasses.replace(one, ranks=tuple(rows), micro_batches=steps * m)


# ── why ranks wait ─────────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from(PLAIN + SPLIT[:3]), ranks, micro_batches, times, st.integers(0, 9))
def test_every_wait_has_its_reason_and_the_longest_chain_is_the_step(make, p, m, durations, wire):
    run = schedule.simulate(made(make, p, m), durations, Link(wire, 1))
    when = {span.name: span for span in run.spans}
    for rank in range(p):
        waits = run.waits_of(rank)
        assert sum(wait.end - wait.start for wait in waits) == run.idle(rank)
        for wait in waits[:-1]:
            apart = when[str(wait.needs)].rank != rank
            assert (
                apart and when[str(wait.needs)].end + wire == wait.end == when[str(wait.op)].start
            )
    path = [when[str(op)] for op in run.critical_path()]
    assert path[0].start == 0 and path[-1].end == run.makespan
    for one, other in itertools.pairwise(path):
        assert one.end + wire * (one.rank != other.rank) == other.start


def test_the_heaviest_stage_is_on_the_critical_path():
    run = schedule.simulate(schedule.one_f_one_b(3, 6), Durations(F=(1, 1, 5), B=(1, 1, 5)))
    assert sum(op.stage == 2 for op in run.critical_path()) == 12
    assert str(run.waits_of(2)[0]) == "rank 2 waits from 0 to 2: F0@2 needs F0@1"
    assert run.waits_of(0)[-1].op is None or run.waits_of(0)[-1].end < run.makespan


# ── what is legal ──────────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from(PLAIN + SPLIT), ranks, micro_batches, times, st.integers(0, 9))
def test_every_schedule_is_legal_and_runs(make, p, m, durations, wire):
    one = made(make, p, m).check()
    run = schedule.simulate(one, durations, Link(wire, 1))
    assert one.name == make.__name__ and len(one.ranks) == p and one.micro_batches == m
    assert all(run.idle(rank) >= 0 for rank in range(p)) and run.period <= run.makespan
    assert all(run.peak(rank) <= one.peak(rank) for rank in range(p))


@given(st.sampled_from(CHUNKED), ranks, micro_batches, st.integers(1, 4))
def test_every_schedule_of_chunks_is_legal_and_runs(make, p, m, chunks):
    one = made(make, p, m, chunks).check()
    assert one.stages == p * chunks
    schedule.simulate(one)


@given(st.sampled_from(PLAIN + SPLIT + CHUNKED), ranks, micro_batches, st.data())
def test_an_order_that_cannot_run_is_told_by_both(make, p, m, data):
    one = made(make, p, m)
    rank = data.draw(st.integers(0, p - 1))
    ops = list(one.ranks[rank])
    i, j = (data.draw(st.integers(0, len(ops) - 1)) for _ in range(2))
    ops[i], ops[j] = ops[j], ops[i]
    rows = (*one.ranks[:rank], tuple(ops), *one.ranks[rank + 1 :])
    swapped = dataclasses.replace(one, ranks=rows)
    reason = schedule.why_illegal(swapped)
    if reason is None:
        schedule.simulate(swapped)
    else:
        with pytest.raises(ValueError) as error:
            schedule.simulate(swapped)
        assert str(error.value) == f"{one.name}: {reason}"


def table(text, split=False, p=2):
    """A schedule of one stage per rank: lines such as "F0 B0" """
    rows = tuple(
        tuple(Op(word[0], rank, int(word[1:])) for word in line.split())
        for rank, line in enumerate(text.split("/"))
    )
    m = 1 + max(op.micro_batch for row in rows for op in row)
    return Schedule("mine", rows, (tuple(range(p)),), m, split)


ILLEGAL = [
    (table("F0 B0/B0 F0"), None, "rank 1 runs B0@1 before its own F0@1"),
    (table("F0 W0 B0/F0 B0 W0", True), None, "rank 0 runs W0@0 before its own B0@0"),
    (table("F0 B0/F0 F0 B0"), None, "rank 1 runs F0@1 twice"),
    (table("F0 B0/F0"), None, "rank 1 never runs B0@1"),
    (table("F0 B0/F0 B0", True), None, "rank 0 never runs W0@0"),
    (table("F0 B0 W0/F0 B0"), None, "rank 0 runs W0@0: operations of this schedule are F, B"),
    (table("F0 F1 B0 B1/F0 B0 F1 B1"), 1, "rank 0 holds 2 activations at F1@0; its limit is 1"),
    (
        table("F0 B0 F1 B1/F0 F1 B0 B1"),
        None,
        "deadlock: rank 0 waits at B0@0 for B0@1 of rank 1, rank 1 waits at F1@1 for F1@0 of rank 0",
    ),
    (
        Schedule("mine", ((Op("F", 1, 0),), ()), ((0, 1),), 1),
        None,
        "rank 0 runs F0@1, which is rank 1's",
    ),
    (Schedule("mine", ((Op("F", 2, 0),), ()), ((0, 1),), 1), None, "stages are 0 … 1"),
    (Schedule("mine", ((Op("F", 0, 1),), ()), ((0, 1),), 1), None, "micro-batches are 0 … 0"),
]


@pytest.mark.parametrize("one, cap, said", ILLEGAL)
def test_the_first_illegal_move_is_named_with_its_reason(one, cap, said):
    assert said in schedule.why_illegal(one, cap)
    with pytest.raises(ValueError, match="mine: "):
        one.check(cap)
    if cap is None:
        with pytest.raises(ValueError, match="mine: "):
            schedule.simulate(one)


def test_a_board_refuses_a_move_and_stays_as_it_was():
    board = schedule.Board(table("F0 F1 B0 B1/F0 B0 F1 B1"), cap=1)
    board.play(0, Op("F", 0, 0))
    refused = {
        Op("F", 0, 0): "rank 0 runs F0@0 twice",
        Op("F", 0, 1): "rank 0 holds 2 activations at F1@0; its limit is 1",
        Op("B", 0, 0): "rank 0 runs B0@0 before B0@1 has come from rank 1",
    }
    for op, said in refused.items():
        with pytest.raises(ValueError) as error:
            board.play(0, op)
        assert str(error.value) == said
    for rank, move in [(1, Op("F", 1, 0)), (1, Op("B", 1, 0)), (0, Op("B", 0, 0))]:
        board.play(rank, move)
    assert board.why_not(0, Op("F", 0, 1)) is None


@given(st.integers(1, 8), micro_batches)
def test_one_f_one_b_is_what_a_cap_of_p_allows(p, m):
    schedule.one_f_one_b(p, m).check(cap=p)
    if m > p:
        assert f"its limit is {p}" in schedule.why_illegal(schedule.gpipe(p, m), cap=p)


NOT_MADE = [
    (lambda: schedule.gpipe(0, 4), "p must be at least 1, got 0"),
    (lambda: schedule.zb_v(2, 0), "m must be at least 1, got 0"),
    (lambda: schedule.interleaved(4, 13), "m=13 micro-batches make no 3 equal rounds for p=4"),
    (lambda: schedule.interleaved(2, 4, 0), "chunks must be at least 1, got 0"),
    (lambda: schedule.dualpipe_v(4, 7), "needs m ≥ 2p micro-batches: m=7 at p=4, take 8"),
    (lambda: schedule.dualpipe(3, 8), "needs an even p and an even m ≥ 2p: got p=3, m=8; take p=4 and m=8, say"),
    (lambda: schedule.zb_auto(4, 8, 3), "cap=3 is too little for p=4: rank 0 needs 4"),
    (lambda: Durations(O=-1), "O must be a time of at least 0, got -1"),
    (lambda: Durations(F=-1), "F must be a time of at least 0, got -1"),
    (
        lambda: schedule.simulate(schedule.gpipe(3, 2), Durations(B=(1, 2))),
        "B has 2 times for 3 stages: give one each",
    ),
    (
        lambda: schedule.bubble("zb_h1", 4, 8, Durations(2, 2, 3)),
        "zb_h1 needs W ≤ F, W ≤ B and m ≥ p",
    ),
    (lambda: schedule.bubble("zb_auto", 4, 8), "no formula for a step that ends with a barrier by 'zb_auto'"),
    (
        lambda: schedule.bubble("dualpipe_v", 4, 8, Durations(1, 1, 1, fused=4)),
        "dualpipe_v needs F = B = W and B+W ≤ fused ≤ F+B+W",
    ),
    (
        lambda: schedule.bubble("gpipe", 2, 8, Durations(F=(1, 2))),
        "for stages that are alike: give F, B, W one time each",
    ),
    (lambda: schedule.peak_in_flight("zb_auto", 4, 8), "no formula for 'zb_auto'"),
    (lambda: schedule.peak_in_flight("zb_v", 4, 6), "needs m ≥ 2p−1: got m=6 at p=4"),
]


@pytest.mark.parametrize("attempt, said", NOT_MADE)
def test_what_cannot_be_is_named_with_its_remedy(attempt, said):
    with pytest.raises(ValueError) as error:
        attempt()
    assert said in str(error.value)


# ── formulas come out by simulation ────────────────────────────────────────────────────────────────


@given(
    st.sampled_from(PLAIN + SPLIT),
    ranks,
    st.integers(1, 20),
    times,
    st.booleans(),
    st.integers(1, 60),
)
def test_bubbles(make, p, m, durations, barrier, fused):
    one = made(make, p, m)
    if one.fused:
        durations = Durations(*[durations.F] * 3, fused)
    try:
        idle = schedule.bubble(one.name, p, m, durations, barrier=barrier)
    except ValueError:
        assume(False)
    run = schedule.simulate(one, durations)
    step = run.makespan if barrier else run.period
    assert step - min(map(run.busy, range(p))) == idle


@pytest.mark.parametrize("make", [schedule.dualpipe, schedule.dualpipe_v])
def test_bubbles_of_dualpipe(make):
    for p, rounds, fused in itertools.product((2, 4, 8), (4, 5, 7), (4, 5, 6)):
        m, durations = p * rounds, Durations(2, 2, 2, fused)
        run = schedule.simulate(make(p, m), durations)
        idle = schedule.bubble(make.__name__, p, m, durations)
        assert max(map(run.idle, range(p))) == idle


@given(st.sampled_from(CHUNKED), ranks, st.integers(1, 4), st.integers(1, 4), times)
def test_bubbles_of_chunks(make, p, rounds, chunks, durations):
    m = p * rounds
    zero_bubble = make is schedule.interleaved_zb
    if zero_bubble:
        assume(chunks > 1)
        durations = Durations(*[durations.F] * 3)
    idle = schedule.bubble(make.__name__, p, m, durations, barrier=not zero_bubble)
    run = schedule.simulate(make(p, m, chunks), durations)
    step = run.period if zero_bubble else run.makespan
    assert {step - run.busy(rank) for rank in range(p)} == {idle}


@given(st.sampled_from(PLAIN + SPLIT), ranks, st.integers(1, 20))
def test_peaks(make, p, m):
    one = made(make, p, m)
    assume(make is not schedule.zb_v or m >= 2 * p - 1)
    expected = [schedule.peak_in_flight(one.name, p, m, rank) for rank in range(p)]
    assert [one.peak(rank) for rank in range(p)] == expected


@given(ranks, st.integers(1, 4), st.integers(1, 4))
def test_peaks_of_chunks(p, rounds, chunks):
    for make in (schedule.interleaved, schedule.breadth_first):
        one = make(p, p * rounds, chunks)
        for rank in range(p):
            known = schedule.peak_in_flight(one.name, p, p * rounds, rank, chunks)
            assert one.peak(rank) == known
    assert max(map(schedule.interleaved_zb(p, p * rounds, chunks).peak, range(p))) <= p * chunks


@pytest.mark.parametrize("p, m", [(4, 8), (8, 32), (16, 64)])
def test_two_bubble_ratios_are_one_fact(p, m):
    for make in (schedule.gpipe, schedule.one_f_one_b):
        run = schedule.simulate(make(p, m))
        assert run.bubble_overhead == pytest.approx((p - 1) / m)  # Megatron
        assert run.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))  # GPipe
    run = schedule.simulate(schedule.interleaved(p, m, 4))
    assert run.bubble_overhead == pytest.approx((p - 1) / (4 * m))
    naive = schedule.simulate(schedule.naive(p, 1))
    assert naive.bubble_overhead == pytest.approx(p - 1)


def test_the_papers_numbers():
    unit = Durations(1, 1, 1)
    # Megatron PTD-P: p = 4, m = 8, t_f = 1, t_b = 2
    assert schedule.simulate(schedule.one_f_one_b(4, 8), unit).idle(0) == 9
    # interleaved, half of the model's time per chunk: (4, 8, 2) and (8, 32, 4)
    half = schedule.simulate(schedule.interleaved(4, 8, 2), Durations(0.5, 0.5, 0.5))
    assert half.idle(0) == 4.5 and half.bubble_overhead == 0.1875
    quarter = schedule.simulate(schedule.interleaved(8, 32, 4), Durations(0.25, 0.25, 0.25))
    assert quarter.idle(0) == 5.25 and quarter.bubble_overhead == 0.0546875
    # Zero Bubble, Table 2, at (1, 1.1, 0.9)
    uneven = Durations(1, 1.1, 0.9)
    for make, idle in ((schedule.zb_h1, 3.6), (schedule.zb_h2, 0.9)):
        run = schedule.simulate(make(4, 8), uneven)
        assert run.period - 8 * 3 == pytest.approx(idle)
    # DeepSeek-V3, Table 2: PP = 8, F = 1, B = 2, W = 1, F&B = 3
    run = schedule.simulate(schedule.dualpipe(8, 20), Durations(1, 1, 1, fused=3))
    assert max(map(run.idle, range(8))) == 6
    assert {schedule.dualpipe(8, 20).peak(rank) for rank in range(8)} == {9}
    # with a barrier ZB-H2 takes as long as ZB-H1
    h1, h2 = (schedule.simulate(make(4, 8)) for make in (schedule.zb_h1, schedule.zb_h2))
    assert (h1.makespan, h2.makespan, h1.period, h2.period) == (27, 27, 27, 24)


@given(st.sampled_from(PLAIN + SPLIT), ranks, micro_batches, times)
def test_steps_without_a_barrier_follow_each_other_by_the_period(make, p, m, durations):
    one = made(make, p, m)
    assume(one.name != "dualpipe")  # half of its micro-batches enters at each end
    first, second, third = (schedule.simulate(chain(one, n), durations) for n in (1, 2, 3))
    assert third.makespan - second.makespan <= first.period
    if durations.F == durations.B == durations.W and m >= 2 * p:
        assert third.makespan - second.makespan == first.period


# ── time, memory, messages ─────────────────────────────────────────────────────────────────────────


def test_only_one_f_one_b_pays_for_a_slow_link_with_every_micro_batch():
    def lost(make, m):
        durations = Durations(10, 10, 10)
        slow = schedule.simulate(make(4, m), durations, Link(0.5, 8), nbytes=4)
        return slow.makespan - schedule.simulate(make(4, m), durations).makespan

    assert [lost(schedule.one_f_one_b, m) for m in (16, 32, 64)] == [28, 52, 100]
    for make in (schedule.gpipe, schedule.eager_one_f_one_b, schedule.breadth_first):
        assert lost(make, 16) == lost(make, 32)
    assert lost(schedule.gpipe, 16) == lost(schedule.eager_one_f_one_b, 16) == 6


def test_the_turn_of_a_v_sends_nothing():
    durations, link = Durations(1, 1, 1), Link(100, 1)
    run = schedule.simulate(schedule.zb_v(2, 1), durations, link)
    assert (
        run.makespan == 8 + 4 * 100 + 2
    )  # F and B of four stages, one W on the way, one at the end
    assert schedule.simulate(schedule.zb_v(1, 4), durations, link).idle(0) == 0


def test_the_slowest_stage_sets_the_pace():
    m, head = 64, 1.5
    durations = Durations(*[(1, 1, 1, head)] * 3)
    run = schedule.simulate(schedule.one_f_one_b(4, m), durations)
    assert run.makespan == 3 * m * head + 3 * 3  # the last rank waits for three F, then three B
    assert run.busy(0) == 3 * m and run.busy(3) == 3 * m * head


def test_what_is_in_flight_over_time():
    run = schedule.simulate(schedule.one_f_one_b(2, 2))
    assert run.in_flight(0) == ((0, 1), (1, 2), (6, 1), (9, 0))
    assert run.in_flight(1) == ((1, 1), (4, 1), (7, 0)) and run.peak(0) == 2
    fused = schedule.simulate(schedule.dualpipe_v(2, 4), Durations(fused=3))
    assert max(map(fused.peak, range(2))) == 5


@given(st.sampled_from(PLAIN + SPLIT), ranks, micro_batches, times, st.integers(1, 9))
def test_updates_come_after_all_or_after_ones_own(make, p, m, durations, update):
    """What they add is the same, and no bubble, if ranks have equal ones."""
    one = made(make, p, m)
    plain = schedule.simulate(one, durations)
    run = schedule.simulate(one, dataclasses.replace(durations, O=update))
    each = run.updates[0]
    assert set(run.updates) == {each} and each == update * (one.stages // p) * len(one.places)
    assert (run.makespan, run.period) == (plain.makespan + each, plain.period + each)
    for rank in range(p):
        assert run.idle(rank) == plain.idle(rank)
        assert sum(wait.end - wait.start for wait in run.waits_of(rank)) == run.idle(rank)


def test_the_longest_update_counts_with_a_barrier_and_its_ranks_own_time_without():
    run = schedule.simulate(schedule.one_f_one_b(2, 2), Durations(O=(5, 1)))
    assert (run.updates, run.flushed) == ((5, 1), 9)
    assert (run.makespan, run.period, run.idle(1)) == (14, 14, 7)
    late = schedule.simulate(schedule.one_f_one_b(2, 2), Durations(O=(1, 5)))
    assert (late.makespan, late.period) == (14, 11)


def test_what_is_fused_runs_at_once_and_counts_once():
    one = schedule.dualpipe_v(2, 4)
    rank, index = min(one.fused)
    run = schedule.simulate(one, Durations(2, 2, 2, fused=5))
    group = slice(index, index + 3)
    assert "".join(op.kind for op in one.ranks[rank][group]) == "FBW"
    assert len(set(run.starts[rank][group])) == len(set(run.ends[rank][group])) == 1
    assert run.ends[rank][index] - run.starts[rank][index] == 5
    alone = len(one.ranks[rank]) - 3 * sum(who == rank for who, _ in one.fused)
    assert run.busy(rank) == 2 * alone + 5 * sum(who == rank for who, _ in one.fused)


def test_nothing_fused_starts_before_its_last_input():
    one = schedule.dualpipe_v(4, 9)
    run = schedule.simulate(one, Durations((1,) * 7 + (5,), 1, 1, fused=4))
    for rank, index in one.fused:
        for op in one.ranks[rank][index : index + 2]:
            for need in one.inputs(op):
                owner = one.rank_of(need.stage, need.micro_batch)
                came = run.ends[owner][one.ranks[owner].index(need)]
                assert came <= run.starts[rank][index]


def test_every_operation_starts_as_soon_as_it_can():
    for make, wire in itertools.product([*PLAIN, *SPLIT, *CHUNKED], (0, 3)):
        one = make(4, 8)
        run = schedule.simulate(one, Durations(2, 3, 4), Link(wire, 1))
        ended = {span.name: span for span in run.spans} if len(one.places) == 1 else None
        for rank, ops in enumerate(one.ranks) if ended else ():
            free = 0
            for op in ops:
                came = [
                    ended[str(need)].end + wire * (ended[str(need)].rank != rank)
                    for need in one.inputs(op)
                ]
                assert ended[str(op)].start == max(free, *came, 0)
                free = ended[str(op)].end


def test_a_run_is_a_timeline_that_perfetto_opens(tmp_path):
    run = schedule.simulate(schedule.dualpipe_v(2, 4), Durations(fused=3))
    assert run.ranks == [0, 1] and run.computed == run.makespan
    run.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    needed = {"X": {"name", "cat", "ts", "dur", "tid"}, "C": {"name", "ts", "args"}}
    for event in events:  # Trace Event Format: complete events, counters, names of processes
        assert event.keys() >= {"pid"} | needed.get(event["ph"], {"name", "args"})
        assert event["ph"] in "XCM" and event.get("dur", 0) >= 0
    assert len(spans) == len(run.spans) == 2 * 2 * 4 * 3
    assert max(event["ts"] + event["dur"] for event in spans) == run.makespan * 1e6
    held = [
        event["args"]["in flight"] for event in events if event["ph"] == "C" and not event["pid"]
    ]
    assert max(held) == run.peak(0) and held[-1] == 0
    lanes = {(event["cat"], event["tid"]) for event in spans}
    assert len({lane for _, lane in lanes}) == len(lanes) > 1  # what runs at once, one below another


def test_a_rank_without_operations_holds_nothing_and_an_empty_step_takes_no_time():
    idle = schedule.read("| F0@0 B0@0")
    run = schedule.simulate(idle)
    assert (idle.peak(0), run.peak(0), run.in_flight(0), run.makespan) == (0, 0, (), 3)
    empty = schedule.simulate(schedule.Schedule("empty", ((),), ((),), 0))
    assert (empty.makespan, empty.flushed, empty.period) == (0, 0, 0)


def test_zb_auto_meets_the_hand_made_ones_and_its_limit():
    for p, m in ((2, 6), (4, 8), (4, 12)):
        for cap, make in ((p, schedule.zb_h1), (2 * p - 1, schedule.zb_h2)):
            found = schedule.zb_auto(p, m, cap).check(cap)
            assert schedule.simulate(found).period <= schedule.simulate(make(p, m)).period
    periods = [schedule.simulate(schedule.zb_auto(4, 12, cap)).period for cap in range(4, 9)]
    assert periods == [39, 38, 37, 36, 36]  # 36 are three operations for each of 12: no bubble


def test_a_simulation_does_as_much_for_an_operation_however_many_there_are():
    """Counted in calls, which no busy machine slows down."""

    def calls(p, m):
        one, found = schedule.one_f_one_b(p, m), collections.Counter()
        sys.setprofile(lambda frame, event, argument: found.update([event]))
        try:
            run = schedule.simulate(one)
        finally:
            sys.setprofile(None)
        assert run.makespan == (m + p - 1) * 3
        return (found["call"] + found["c_call"]) / (2 * p * m)

    assert calls(64, 256) <= 1.1 * calls(8, 64)


# ── weights that change on the way ─────────────────────────────────────────────────────────────────


@given(ranks, micro_batches)
def test_pipedream_is_as_late_as_ranks_follow(p, m):
    """A rank's gradient meets weights that as many updates have changed as ranks come after it."""
    one = schedule.pipedream(p, m).check()
    assert one.ranks == schedule.one_f_one_b(p, m).ranks
    for rank in range(p):
        for k in range(m):
            assert k - one.version(rank, k) == min(k, p - 1 - rank)
            slower = dataclasses.replace(one, every=2)
            assert slower.version(rank, k) == one.version(rank, k) // 2
    assert schedule.one_f_one_b(p, m).version(0, m - 1) == 0


@given(ranks, micro_batches, st.integers(1, 8))
def test_double_buffered_weights_are_there_in_time(p, m, every):
    """Each forward finds the update that it is to use made, or the schedule is refused: then one would not."""
    late = 0
    for rank in range(p):
        ops = schedule.one_f_one_b(p, m * every).ranks[rank]
        for index, op in enumerate(ops):
            if op.kind == "F":
                updates = sum(before.kind == "B" for before in ops[:index]) // every
                late += updates < op.micro_batch // every - 1
    try:
        one = schedule.pipedream_2bw(p, m * every, every)
    except ValueError as error:
        assert "at least p−1" in str(error) and every < p - 1
    else:
        assert not late
        versions = [one.version(0, k) for k in range(m * every)]
        assert versions == [max(0, k // every - 1) for k in range(m * every)]


def test_an_order_is_read_as_it_is_written():
    for made in (schedule.one_f_one_b(3, 5), schedule.zb_v(2, 4), schedule.interleaved(2, 4)):
        found = schedule.read(made.text, made.name)
        assert found == made and schedule.simulate(found).makespan
    lines = "F0 F1 B0 B1\nF0 B0 F1 B1"
    assert schedule.read(lines).check(2).ranks == schedule.one_f_one_b(2, 2).ranks
    for text, message in (
        ("F0 G1", "'G1' is no operation"),
        ("F0@0 | F0@0", "rank 1 runs F0@0, but rank 0 has its stage"),
        ("F0@1", r"got \[1\]"),
        ("", r"got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            schedule.read(text)


def test_activations_are_counted_in_bytes():
    one = schedule.interleaved(2, 4)
    assert one.peak(0) == 5 and one.peak(0, [10, 0, 10, 0]) == 50
    assert one.peak(0, [10, 10, 1, 1]) == 41  # four of stage 0, one of stage 2


WRONG_SIZES = [
    (lambda: schedule.bubble("one_f_one_b", 0, 8), "p must be at least 1, got 0"),
    (lambda: schedule.bubble("one_f_one_b", 4, -8), "m must be at least 1, got -8"),
    (lambda: schedule.peak_in_flight("one_f_one_b", 4, 8, 9), "rank=9 is none of p=4: use 0 … 3"),
    (lambda: schedule.peak_in_flight("one_f_one_b", 4, 8, -1), "rank must be at least 0, got -1"),
    (lambda: schedule.peak_in_flight("interleaved", 4, 8, chunks=0), "chunks must be at least 1"),
    (lambda: schedule.gpipe(4, 10**7), "operations of p=4 and m=10000000 are 80,000,000: at most"),
    (lambda: schedule.one_f_one_b(10**9, 10**9), "at most 10,000,000 can be written down: take"),
    (lambda: schedule.eager_one_f_one_b(4, 10**7), "m=10000000 are 80,000,000: at most"),
    (lambda: schedule.interleaved(4, 10**7), "m=10000000 are 160,000,000: at most"),
    (lambda: schedule.zb_auto(10**9, 10**9, 10**9), "can be written down"),
    (lambda: schedule.zb_v(10**4, 10**4), "can be written down"),
    (lambda: schedule.dualpipe(10**4, 10**5), "can be written down"),
    (lambda: schedule.interleaved(10**4, 10**4, 3), "can be written down"),
    (lambda: schedule.pipedream_2bw(10**4, 10**5), "can be written down"),
]


@pytest.mark.parametrize("call, message", WRONG_SIZES, ids=[text for _, text in WRONG_SIZES])
def test_sizes_out_of_range_are_refused_at_once(call, message):
    with pytest.raises(ValueError) as refused:
        call()
    assert message in str(refused.value)


def test_a_bubble_of_no_number_of_micro_batches_is_refused():
    with pytest.raises(TypeError, match="m must be a whole number, got nan"):
        schedule.bubble("one_f_one_b", 4, float("nan"))
