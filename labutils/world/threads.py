"""Ranks as threads of this process: they start in microseconds, and a deadlock is seen the moment the last rank blocks."""

import ctypes
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world.board import Board
from labutils.world.comm import REDUCE, Op, Rank, misfit, show
from labutils.world.errors import (
    ABSENT,
    OVER,
    WAITS,
    DeadlockError,
    Failure,
    State,
    Stopped,
    TimeoutError,
    late,
    place,
    rank_error,
    site,
    stuck,
)

GRACE = 0.2  # seconds that the other ranks get to come to their own end after one has failed


class Hub:
    """Where threads meet: of the two sides of a message, whoever comes second moves the bytes."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, int, int], deque[Op]] = defaultdict(deque)
        self.waiting: dict[Op, int] = {}  # what blocks, and the rank that it blocks
        self.actors = size  # threads that could still move: ranks that run, and asynchronous collectives under way
        self.stopped = False
        self.deadlock: str | None = None
        self.threads: list[threading.Thread] = []
        self.finished: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}

    # -- what ranks call -----------------------------------------------------------------------------------------------

    def post(self, rank: int, op: Op) -> None:
        key = (op.channel, rank, op.peer) if op.sending else (op.channel, op.peer, rank)
        with self.changed:
            queue = self.queues[key]
            if not queue or queue[0].sending == op.sending:
                queue.append(op)
                return
            partner = queue.popleft()
        send, receive = (op, partner) if op.sending else (partner, op)
        if (
            send.tensor.dtype != receive.tensor.dtype
            or send.tensor.numel() != receive.tensor.numel()
        ):
            raise misfit(key[1], send, key[2], receive)
        with torch.no_grad():
            if receive.reduce:
                REDUCE[receive.reduce](receive.tensor.view(-1), send.tensor.view(-1))
            else:
                receive.tensor.view(-1).copy_(send.tensor.view(-1))
        self.finish(send)
        self.finish(receive)

    def finish(self, op: Op) -> None:
        with self.changed:
            op.done = True
            if self.waiting.pop(op, None) is not None:
                op.gate.release()

    def wait(self, rank: int, op: Op) -> None:
        with self.changed:
            if op.done:
                return
            if self.stopped:
                raise Stopped
            op.gate = threading.Lock()
            op.gate.acquire()
            self.waiting[op] = rank
            self._settle()
        if not op.gate.acquire(timeout=self.timeout):
            with self.changed:
                report = late(op.call.op, self.timeout, self._states())
            raise TimeoutError(report)
        if not op.done:
            raise Stopped

    def add_actor(self, step: int) -> None:
        with self.changed:
            self.actors += step
            self._settle()

    # -- what the engine calls -----------------------------------------------------------------------------------------

    def end(self, rank: int, value: Any = None, failure: BaseException | None = None) -> None:
        """A rank's program is over, well or badly."""
        with self.changed:
            self.finished[rank] = value
            if failure is not None:
                self.failures[rank] = failure
            self.actors -= 1
            self._settle()
            self.changed.notify_all()

    def stop(self) -> None:
        """Wake every rank that waits: its wait raises Stopped."""
        with self.changed:
            self.stopped = True
            for op in self.waiting:
                op.gate.release()
            self.waiting.clear()

    @property
    def settled(self) -> bool:
        """Whether no rank can move any more."""
        return sum(rank not in self.finished for rank in self.waiting.values()) == self.actors

    def _settle(self) -> None:
        if self.settled:
            if self.waiting and not self.failures and not self.stopped:
                self.deadlock = stuck(self._states())
            self.changed.notify_all()

    def _states(self) -> list[State]:
        """What every rank does, and where."""
        waits = {rank: str(op) for op, rank in self.waiting.items()}
        frames = sys._current_frames()

        def state(rank: int) -> State:
            if rank in waits:
                return WAITS, waits[rank]
            if rank in self.finished:
                return OVER, "failed" if rank in self.failures else "finished"
            return ABSENT, f"and is at {place(site(frames.get(self.threads[rank].ident)))}"

        return [state(rank) for rank in range(self.size)]


class ThreadEndpoint:
    """One rank's side of the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self.finish, self.add_actor = hub.finish, hub.add_actor

    def post(self, *ops: Op) -> None:
        for op in ops:
            self.hub.post(self.rank, op)

    def watch(self, op: Op) -> None:
        """Nothing: a message moves as soon as its second side is there."""

    def wait(self, op: Op) -> None:
        if not op.done:
            self.hub.wait(self.rank, op)


class Threads:
    """The engine: a hub and a thread a rank for each run, so that nothing of a failed run is left over."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.mesh, self.timeout = mesh, timeout

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        size = self.mesh.size
        hub, board = Hub(size, self.timeout), Board(bytearray(Board.nbytes(size)), size)
        ranks = [
            Rank(i, self.mesh, ThreadEndpoint(hub, i), board, torch.device("cpu"))
            for i in range(size)
        ]
        traces: list[tuple] = [()] * size

        def program(rank: Rank) -> None:
            try:
                if hub.stopped:
                    raise Stopped
                value = fn(rank, *args, **kwargs)
                traces[rank.rank] = rank._finish()
                hub.end(rank.rank, value)
            except Stopped:
                hub.end(rank.rank)
            except BaseException as error:
                hub.end(rank.rank, failure=error)

        hub.threads = [
            threading.Thread(target=program, args=(rank,), name=f"rank {rank.rank}", daemon=True)
            for rank in ranks
        ]
        try:
            for thread in hub.threads:
                thread.start()
            with hub.changed:
                hub.changed.wait_for(
                    lambda: len(hub.finished) == size or hub.failures or hub.deadlock
                )
                hub.changed.wait_for(lambda: hub.settled, timeout=GRACE)
        finally:
            self._end(hub, ranks)
        if hub.failures:
            failures = {rank: Failure.of(error) for rank, error in hub.failures.items()}
            raise rank_error(failures, size, board)
        if hub.deadlock:
            raise DeadlockError(hub.deadlock)
        # Popped: the hub is part of a cycle, and would keep what the ranks returned until the garbage collector comes by.
        return [hub.finished.pop(i) for i in range(size)], Trace(traces)

    def _end(self, hub: Hub, ranks: list[Rank]) -> None:
        """Let no thread of this run go on: waiting ones are woken, computing ones interrupted at their next line of Python."""
        if len(hub.finished) < hub.size:
            hub.stop()
            _join(hub.threads)
            for thread in hub.threads:
                if thread.is_alive():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped)
                    )
            _join(hub.threads)
        for rank in ranks:
            rank._close()
        show([rank._printed for rank in ranks])

    def close(self) -> None:
        """Nothing stays open between runs."""


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + GRACE
    for thread in threads:
        if thread.is_alive():  # an interrupt may have come before it was started
            thread.join(max(0.0, deadline - time.monotonic()))
