"""A whole step of a pipeline in time: operations with what they send inside, messages, a barrier,
and what is done once a step."""

from collections.abc import Mapping, Sequence

from labutils import units
from labutils.clock import Played, Task, play
from labutils.schedule.orders import Op, Schedule

Parts = Mapping[str, float]


def whole_step(
    schedule: Schedule,
    work: Sequence[Mapping[str, Parts]],
    *,
    send: float = 0,
    last: Sequence[Parts] | None = None,
) -> Played:
    """When everything in a step runs, if a rank does one thing at a time and nothing overlaps.

    work: of each stage, the seconds of its F, B and, where the schedule splits it, W, by what they
        go to: "forward" or "backward", and an axis ("tp", "cp", "ep") for messages that nothing
        hides
    send: seconds that a rank needs to send a result to the next one: it computes when that is gone
    last: of each rank, the seconds of what it does once all are through, in order: "dp" for
        gradients and weights, "update" for the optimizer

    >>> from labutils.schedule import one_f_one_b
    >>> each = {"F": {"forward": 2, "tp": 1}, "B": {"backward": 4, "tp": 2}}
    >>> step = whole_step(one_f_one_b(2, 2), [each] * 2, last=[{"dp": 3, "update": 1}] * 2)
    >>> step.makespan, step.spent(0)
    (31, {'forward': 4, 'backward': 8, 'update': 1, 'tp': 6, 'bubble': 9, 'dp': 3})

    Raises ValueError: which move is illegal, if the schedule cannot run.

    Invariant: `spent` of every rank adds up to the makespan.
    """
    units.instance(schedule, Schedule, "whole_step")
    if len(work) != schedule.stages:
        told = f"{schedule.name} has {schedule.stages} stages, got the work of {len(work)}"
        raise ValueError(f"{told}: give seconds of F and B for each")
    schedule.check()
    begun: dict[Op, Task] = {}
    ready: dict[Op, Task] = {}  # what others wait for
    lanes: list[list[Task]] = []
    for rank, ops in enumerate(schedule.ranks):
        lane: list[Task] = []
        for op in ops:
            first = len(lane)
            for kind, seconds in work[op.stage][op.kind].items():
                lane.append(Task(rank, seconds, (), kind, str(op), rank))
            if _leaves(schedule, op, rank):
                lane.append(Task(rank, send, (), "pp", str(op), rank))
            begun[op], ready[op] = lane[first], lane[-1]
        lanes.append(lane)
    for op, task in begun.items():
        task.after = [ready[need] for need in schedule.inputs(op)]
    barrier = Task("all", 0, [lane[-1] for lane in lanes if lane])
    for rank, parts in enumerate(last or ()):
        lanes[rank] += [Task(rank, each, [barrier], kind, "", rank) for kind, each in parts.items()]
    return play([*(task for lane in lanes for task in lane), barrier])


def _leaves(schedule: Schedule, op: Op, rank: int) -> bool:
    """Whether another rank waits for the result."""
    to = op.stage + {"F": 1, "B": -1, "W": schedule.stages}[op.kind]
    return 0 <= to < schedule.stages and schedule.rank_of(to, op.micro_batch) != rank
