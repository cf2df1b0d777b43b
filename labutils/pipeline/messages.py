"""What each rank does, one action after the other: a schedule with its sends and receives."""

from collections.abc import Iterator
from typing import NamedTuple

from labutils import units
from labutils.schedule import Op, Schedule, simulate

MESSAGES = ("matched", "unmatched", "blocking", "paired")  # how the ranks of a pipeline send


class Action(NamedTuple):
    """What a rank does: "run" an operation, or "send", "isend" or "recv" its result.

    peer: the rank at the other end of a message
    """

    do: str
    op: Op
    peer: int | None = None


def reader_of(schedule: Schedule, op: Op) -> int | None:
    """The rank that needs an operation's result, if it is not the one that has it: an F's stage
    above, a B's stage below."""
    kind, stage, k = op
    needs = stage + {"F": 1, "B": -1}.get(kind, 0)
    if needs == stage or not 0 <= needs < schedule.stages:
        return None
    rank = schedule.rank_of(needs, k)
    return rank if rank != schedule.rank_of(stage, k) else None


def actions(schedule: Schedule, rank: int, messages: str = "matched") -> list[Action]:
    """A rank's operations in their order, with its messages: received just before they are needed,
    sent as soon as they are there.

    messages: how, one of
        "matched": a send goes on at once, and receives of a peer are in the order of its sends,
            early ones kept. Runs every legal schedule
        "unmatched": a send goes on at once, receives are in the order of use. Where F and B travel
            the same way, as in a V, some ranks get another message than the one they think
        "blocking": a send waits for its receiver. All but naive and GPipe wait for ever
        "paired": a send waits for its receiver, and both ends know when: each message is sent and
            received in the place where it is made in one order of all operations. Runs every legal
            schedule, and waits more

    Raises ValueError: for other `messages`, and the first illegal move of the schedule.
    """
    units.instance(schedule, Schedule, "actions")
    if messages not in MESSAGES:
        raise ValueError(f"no messages={messages!r}: use one of {', '.join(MESSAGES)}")
    if messages == "paired":
        return _paired(schedule, rank)
    schedule.check()
    sent: dict[int, Iterator[Op]] = {
        peer: iter([op for op in ops if reader_of(schedule, op) == rank])
        for peer, ops in enumerate(schedule.ranks)
    }
    found: list[Action] = []
    here: set[Op] = set()
    for op in schedule.order_of(rank):
        for need in schedule.inputs(op):
            if reader_of(schedule, need) == rank:
                peer = schedule.rank_of(need.stage, need.micro_batch)
                while need not in here:
                    came = next(sent[peer]) if messages == "matched" else need
                    here.add(came)
                    found.append(Action("recv", came, peer))
        found.append(Action("run", op))
        if (reader := reader_of(schedule, op)) is not None:
            found.append(Action("send" if messages == "blocking" else "isend", op, reader))
    return found


def _paired(schedule: Schedule, rank: int) -> list[Action]:
    """In one legal order of all ranks' operations, a message is sent and received when it is made:
    of all messages still to come, the earliest has both ends waiting for it."""
    starts = simulate(schedule).starts
    order = sorted(
        (start, who, index) for who, times in enumerate(starts) for index, start in enumerate(times)
    )
    found = []
    for _, who, index in order:
        op = schedule.ranks[who][index]
        peer = reader_of(schedule, op)
        if who == rank:
            found.append(Action("run", op))
        if peer is not None and rank in (who, peer):
            found.append(Action("send", op, peer) if who == rank else Action("recv", op, who))
    return found
