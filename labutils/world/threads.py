"""Ranks as threads: they start in microseconds, and a deadlock is seen when the last one blocks."""

import ctypes
import functools
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world.errors import ABSENT, DeadlockError, Failure, Stopped, place, site
from labutils.world.messages import Endpoint, Request, misfit, out_of_time
from labutils.world.rank import Outcome, Rank, conclude, perform

GRACE = 0.2  # seconds that the other ranks get to come to their own end after one has failed


class Rendezvous:
    """Where threads meet: of the two sides of a message, whoever comes second moves the bytes."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int, int], deque[Request]] = defaultdict(deque)
        self.waiting: dict[Request, int] = {}  # what blocks, and the rank that it blocks
        self.actors = size  # threads that could still move: ranks, and their Backgrounds
        self.stopped = False
        self.deadlock = False
        self.outcomes: dict[int, Outcome] = {}

    # -- what ranks call ---------------------------------------------------------------------------

    def post(self, rank: int, request: Request) -> None:
        """Meet the other side of a message, or wait here for it to come."""
        ends = (rank, request.peer) if request.sending else (request.peer, rank)
        with self.changed:
            queue = self.posted[request.channel, *ends]
            if not queue or queue[0].sending == request.sending:
                queue.append(request)
                return
            partner = queue.popleft()
        send, receive = (request, partner) if request.sending else (partner, request)
        forms = {(x.tensor.dtype, x.tensor.numel(), x.call.signature) for x in (send, receive)}
        if len(forms) > 1:
            raise misfit(ends[0], send, ends[1], receive)
        receive.accept(send.tensor.view(-1))
        self.finish(send)
        self.finish(receive)

    def finish(self, request: Request) -> None:
        with self.changed:
            request.done = True
            if self.waiting.pop(request, None) is not None:
                request.wakeup.release()

    def wait(self, rank: int, request: Request) -> None:
        with self.changed:
            if request.done:
                return
            if self.stopped:
                raise Stopped(str(request))
            request.wakeup = threading.Lock()
            request.wakeup.acquire()
            self.waiting[request] = rank
            self._settle()
        if not request.wakeup.acquire(timeout=self.timeout):
            raise out_of_time(self.timeout, request)
        if not request.done:
            raise Stopped(str(request))

    def add_actor(self, step: int) -> None:
        with self.changed:
            self.actors += step
            self._settle()

    # -- what the engine calls ---------------------------------------------------------------------

    def end(self, rank: int, outcome: Outcome) -> None:
        """A rank's program is over, well or badly."""
        with self.changed:
            self.outcomes[rank] = outcome
            self.actors -= 1
            self._settle()
            self.changed.notify_all()

    def stop(self) -> None:
        """Wake every rank that waits: its wait raises Stopped."""
        with self.changed:
            self.stopped = True
            for request in self.waiting:
                request.wakeup.release()
            self.waiting.clear()

    @property
    def failed(self) -> bool:
        """Whether a rank has failed."""
        return any(outcome.failure for outcome in self.outcomes.values())

    @property
    def settled(self) -> bool:
        """Whether no rank can move any more."""
        return sum(rank not in self.outcomes for rank in self.waiting.values()) == self.actors

    def _settle(self) -> None:
        if self.settled:
            self.deadlock |= bool(self.waiting)
            self.changed.notify_all()


class ThreadEndpoint(Endpoint):
    """One rank's side; a message needs no watching, and the engine sees when its program ends."""

    def __init__(self, meeting: Rendezvous, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.finish = meeting.finish
        self.add_actor = meeting.add_actor

    def post(self, *requests: Request) -> None:
        for request in requests:
            self.meeting.post(self.rank, request)

    def wait(self, request: Request) -> None:
        if not request.done:
            self.meeting.wait(self.rank, request)


class Threads:
    """The engine: a rendezvous and a thread a rank for each run, so that nothing is left over."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.mesh = mesh
        self.timeout = timeout

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        size = self.mesh.size
        meeting = Rendezvous(size, self.timeout)
        cpu = torch.device("cpu")
        ranks = [Rank(i, self.mesh, ThreadEndpoint(meeting, i), cpu) for i in range(size)]

        def program(rank: Rank) -> None:
            outcome = perform(rank, functools.partial(fn, rank, *args, **kwargs))
            meeting.end(rank.rank, outcome)

        threads = [
            threading.Thread(target=program, args=(rank,), name=f"rank {rank.rank}", daemon=True)
            for rank in ranks
        ]
        try:
            for thread in threads:
                thread.start()
            with meeting.changed:
                meeting.changed.wait_for(
                    lambda: len(meeting.outcomes) == size or meeting.failed or meeting.deadlock
                )
                meeting.changed.wait_for(lambda: meeting.settled, timeout=GRACE)
        finally:
            places = _stop(meeting, threads)
        for rank in ranks:
            meeting.outcomes.setdefault(rank.rank, Outcome(printed=str(rank._output)))
        for i, where in places.items():
            meeting.outcomes[i].state = (ABSENT, where)
        # Popped: what a rank returned is not to wait for the garbage collector with this cycle.
        outcomes = [meeting.outcomes.pop(i) for i in range(size)]
        if meeting.deadlock and not any(outcome.failure for outcome in outcomes):
            outcomes[0].failure = Failure.of(DeadlockError(""))
        return conclude(outcomes)

    def close(self) -> None:
        """Nothing stays open between runs."""


def _stop(meeting: Rendezvous, threads: Sequence[threading.Thread]) -> dict[int, str]:
    """Let no thread of a run go on, and tell where those were that computed.

    Waiting ones are woken, computing ones interrupted at their next line of Python.
    """
    with meeting.changed:
        idle = {*meeting.outcomes, *meeting.waiting.values()}
    busy = [i for i in range(meeting.size) if i not in idle]
    places = {}
    for i in busy:
        where = site(sys._current_frames().get(threads[i].ident))
        places[i] = f"and is at {place(where)}"
    if len(meeting.outcomes) < meeting.size:
        meeting.stop()
        _join(threads)
        for thread in threads:
            if thread.is_alive():
                ident = ctypes.c_ulong(thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))
        _join(threads)
    return places


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + GRACE
    for thread in threads:
        if thread.is_alive():  # an interrupt may have come before it was started
            thread.join(max(0.0, deadline - time.monotonic()))
