"""Ranks as threads: they start in microseconds, and a deadlock is seen when the last one blocks."""

import contextlib
import ctypes
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world.errors import ABSENT, DeadlockError, Failure, Stopped, place, site
from labutils.world.messages import Endpoint, Request, misfit, out_of_time
from labutils.world.rank import ERR, OUT, Outcome, Rank, conclude, perform

MAX_THREADS = 1024
GRACE = 1.0  # seconds that the other ranks get to come to their own end after one has failed


class Rendezvous(Endpoint):
    """Where threads meet: of the two sides of a message, whoever comes second moves the bytes."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int, int], deque[Request]] = defaultdict(deque)
        self.waiting: set[Request] = set()
        self.actors = size  # threads that could still move: ranks, and their busy Backgrounds
        self.jobs: Counter[object] = Counter()  # of each Background
        self.stopped = False
        self.deadlock = False
        self.outcomes: dict[int, Outcome] = {}

    # -- what ranks call ---------------------------------------------------------------------------

    def post(self, *requests: Request) -> None:
        """Meet the other sides of messages, or wait here for them to come."""
        for request in requests:
            rank, peer = request.rank, request.peer
            ends = (rank, peer) if request.sending else (peer, rank)
            with self.changed:
                queue = self.posted[request.channel, *ends]
                if not queue or queue[0].sending == request.sending:
                    queue.append(request)
                    continue
                partner = queue.popleft()
            self._meet(request, partner)

    def _meet(self, one: Request, other: Request) -> None:
        send, receive = (one, other) if one.sending else (other, one)
        forms = {(x.tensor.dtype, x.tensor.numel(), x.call.signature) for x in (send, receive)}
        if len(forms) > 1:
            raise misfit(send, receive)
        receive.accept(send.tensor.view(-1))
        self._done(send)
        self._done(receive)

    def _done(self, request: Request) -> None:
        with self.changed:
            request.done = True
            if request in self.waiting:
                self.waiting.remove(request)
                request.wakeup.release()

    def until_done(self, request: Request) -> None:
        """As `Endpoint.until_done`; raises Stopped, or TimeoutError after `timeout` seconds."""
        with self.changed:
            if request.done:
                return
            if self.stopped:
                raise Stopped(str(request))
            request.wakeup = threading.Lock()
            request.wakeup.acquire()
            self.waiting.add(request)
            self._settle()
        if not request.wakeup.acquire(timeout=self.timeout):
            raise out_of_time(self.timeout, request)
        if not request.done:
            raise Stopped(str(request))

    def begin(self, worker: object) -> None:
        with self.changed:
            self.jobs[worker] += 1
            self.actors += self.jobs[worker] == 1

    def finish(self, request: Request, worker: object) -> None:
        with self.changed:
            self._done(request)
            self.jobs[worker] -= 1
            self._away(self.jobs[worker] == 0)

    def _away(self, actors: int) -> None:
        self.actors -= actors
        self._settle()

    # -- what the engine calls ---------------------------------------------------------------------

    def end(self, rank: int, outcome: Outcome) -> None:
        """A rank's program is over, well or badly."""
        with self.changed:
            self.outcomes[rank] = outcome
            self._away(1)
            self.changed.notify_all()

    def stop(self) -> None:
        """Wake every rank that waits: its wait raises Stopped."""
        with self.changed:
            self.stopped = True
            for request in self.waiting:
                request.wakeup.release()
            self.waiting.clear()

    @property
    def over(self) -> bool:
        """Whether all ranks have ended, or one has failed, or none can go on."""
        failed = any(outcome.failure for outcome in self.outcomes.values())
        return failed or self.deadlock or len(self.outcomes) == self.size

    @property
    def settled(self) -> bool:
        """Whether no rank can move any more."""
        return sum(each.rank not in self.outcomes for each in self.waiting) == self.actors

    def _settle(self) -> None:
        if self.settled:
            self.deadlock |= bool(self.waiting)
            self.changed.notify_all()


class Threads:
    """The engine: a rendezvous and a thread a rank for each run, so that nothing is left over."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        if mesh.size > MAX_THREADS:
            remedy = f'use at most {MAX_THREADS:,}, or engine="dry" for one rank of any mesh'
            raise ValueError(f"{mesh.size:,} ranks are too many threads for one process: {remedy}")
        self.mesh = mesh
        self.timeout = timeout

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        size = self.mesh.size
        meeting = Rendezvous(size, self.timeout)
        cpu = torch.device("cpu")
        ranks = [Rank(i, self.mesh, meeting, cpu, private=False) for i in range(size)]

        def program(rank: Rank) -> None:
            with contextlib.suppress(Stopped):  # which `_stop` may throw at what is just ending
                with OUT.counted(rank.rank), ERR.counted(rank.rank):
                    outcome = perform(rank, fn, args, kwargs)
                meeting.end(rank.rank, outcome)

        threads = [
            threading.Thread(target=program, args=(rank,), name=f"rank {rank.rank}", daemon=True)
            for rank in ranks
        ]
        with OUT.among(sys), ERR.among(sys):
            try:
                for thread in threads:
                    thread.start()
                with meeting.changed:
                    meeting.changed.wait_for(lambda: meeting.over)
                    meeting.changed.wait_for(lambda: meeting.settled, timeout=GRACE)
            finally:
                places = _stop(meeting, threads)
        # Popped: what a rank returned is not to wait for the garbage collector with this cycle.
        outcomes = [meeting.outcomes.pop(i, Outcome()) for i in range(size)]
        for i, where in places.items():
            outcomes[i].state = (ABSENT, where)
        if meeting.deadlock and not any(outcome.failure for outcome in outcomes):
            outcomes[0].failure = Failure.of(DeadlockError(""))
        return conclude(outcomes)


def _stop(meeting: Rendezvous, threads: Sequence[threading.Thread]) -> dict[int, str]:
    """Let no thread of a run go on, and tell where those were that computed.

    Waiting ones are woken, computing ones interrupted at their next line of Python.
    """
    with meeting.changed:
        idle = {*meeting.outcomes, *(request.rank for request in meeting.waiting)}
    places = {}
    for i in set(range(meeting.size)) - idle:
        where = site(sys._current_frames().get(threads[i].ident or 0))
        places[i] = f"and is at {place(where)}"
    if len(meeting.outcomes) < meeting.size:
        meeting.stop()
        _join(threads)
        for thread in threads:
            if thread.is_alive():
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))
        _join(threads)
    return places


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + GRACE
    for thread in threads:
        if thread.is_alive():  # an interrupt may have come before it was started
            thread.join(max(0.0, deadline - time.monotonic()))
