"""schedule beside the orders of torch.distributed.pipelining, made without ranks."""

import pytest
from torch.distributed.pipelining import schedules as theirs

from labutils import schedule
from labutils.schedule import Durations, Op, Schedule

LETTERS = {"F": "F", "I": "B", "W": "W"}


def order_of(name, p, m, chunks=1):
    """The order of a class of torch.distributed.pipelining, per rank, as it computes it."""
    cls = getattr(theirs, name)
    one = cls.__new__(cls)
    one._n_microbatches = m
    one.pp_group_size = p
    one._num_stages = one.num_stages = p * chunks
    one._stages = [None] * chunks
    one.n_local_stages = chunks
    one.number_of_rounds = max(1, m // p)
    one.microbatches_per_round = m // one.number_of_rounds
    if chunks == 1:
        return one._get_pipeline_order()
    return {rank: one._calculate_single_rank_operations(rank) for rank in range(p)}


def read(actions, split):
    """Their actions as operations, and where overlapped pairs begin."""
    ops, fused = [], set()
    for action in actions:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        if action.sub_actions:
            fused.add(len(ops))
        for kind, stage, k in (
            (each.computation_type.value, each.stage_index, each.microbatch_index)
            for each in action.sub_actions or (action,)
        ):
            kinds = ("BW" if split else "B") if kind == "B" else LETTERS[kind]
            ops += [Op(letter, stage, k) for letter in kinds]
    return tuple(ops), fused


def converted(name, like, p, m, chunks):
    """Torch's schedule in our type, placed and split as the one that it is `like`."""
    rows, fused = [], set()
    for rank, actions in order_of(name, p, m, chunks).items():
        ops, pairs = read(actions, like.split)
        rows.append(ops)
        fused |= {(rank, index) for index in pairs}
    return Schedule(like.name, tuple(rows), like.places, m, like.split, frozenset(fused))


SAME = [
    ("ScheduleGPipe", schedule.gpipe, (1,)),
    ("ScheduleLoopedBFS", schedule.breadth_first, (2, 3)),
    ("ScheduleInterleaved1F1B", schedule.interleaved, (2, 3)),
    ("ScheduleInterleavedZeroBubble", schedule.interleaved_zb, (2, 3)),
    ("ScheduleDualPipeV", schedule.dualpipe_v, (2,)),
]
SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (p, 2 * p, 3 * p, 3 * p + 1, 4 * p, 4 * p + 2)]


@pytest.mark.parametrize("name, make, chunks", SAME)
def test_the_same_order(name, make, chunks):
    compared = 0
    for v in chunks:
        for p, m in SIZES:
            try:
                ours = make(p, m, v) if len(chunks) > 1 else make(p, m)
            except ValueError:
                continue
            assert ours == converted(name, ours, p, m, v)
            compared += 1
    assert compared >= 16


def test_1f1b_but_for_the_last_rank_of_their_list():
    for p, m in SIZES:
        ours = schedule.one_f_one_b(p, m)
        listed = converted("Schedule1F1B", ours, p, m, 1)
        assert ours.ranks[:-1] == listed.ranks[:-1]
        # Their list, not their runtime, counts the last rank's forwards from 1: if that is mended,
        # all ranks are to be compared.
        shifted = tuple(Op(kind, stage, k - (kind == "F")) for kind, stage, k in listed.ranks[-1])
        assert ours.ranks[-1] == shifted and schedule.why_illegal(listed)


def test_zb_v_but_for_which_w_is_paid_in_the_drain():
    for p, m in SIZES:
        ours = schedule.zb_v(p, m)
        listed = converted("ScheduleZBVZeroBubble", ours, p, m, 2)
        kept = tuple(tuple(op for op in ops if op.micro_batch < m) for ops in listed.ranks)
        listed = Schedule("zb_v", kept, ours.places, m, True).check()
        for mine, other in zip(ours.ranks, kept, strict=True):
            assert [op for op in mine if op.kind != "W"] == [op for op in other if op.kind != "W"]
        for durations in (Durations(), Durations(3, 4, 2)):
            one, two = (schedule.simulate(each, durations) for each in (ours, listed))
            assert (one.makespan, one.period) == (two.makespan, two.period)
        assert [ours.peak(rank) for rank in range(p)] == [listed.peak(rank) for rank in range(p)]
