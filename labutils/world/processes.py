"""Ranks as processes, kept warm between runs: whatever becomes of one, the notebook goes on."""

import contextlib
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, BinaryIO

import cloudpickle

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world.errors import ABSENT, Failure, RankError, TimeoutError, WorldError, place
from labutils.world.rank import Outcome, conclude, unpack
from labutils.world.sockets import (
    create_memory,
    make_folder,
    open_memory,
    short_place,
    sweep_folders,
)
from labutils.world.threads import GRACE
from labutils.world.worker import be_rank

MAX_RANKS = 250  # of one machine
_LOOK = 0.02  # seconds between looks at ranks that are to end
_PATIENCE = 2.0  # seconds that ranks get to end once they are told to
_START = 300.0  # seconds that the fork server gets to load torch, on a busy machine
# Elsewhere the system's own libraries don't survive a fork, and each rank loads torch for itself.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def start_server() -> None:
    """Start the standard library's fork server, which loads torch while the kernel goes on."""
    if _METHOD != "forkserver":
        return
    loaded = ["labutils.world.worker"]
    if "torch._dynamo" in sys.modules:  # an optimizer's first step loads it: once, not in each rank
        loaded.append("torch._dynamo")
    multiprocessing.forkserver.set_forkserver_preload(loaded)
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    before = dict(os.environ)
    for name in before:
        if name.startswith("TORCHELASTIC"):  # its ranks are in no torchrun job
            del os.environ[name]
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=path, PYTHONSAFEPATH="1")
    kept, tempfile.tempdir = tempfile.tempdir, short_place()  # where the server's own socket lies
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        tempfile.tempdir = kept
        os.environ.clear()
        os.environ.update(before)


class RankProcess:
    """A rank as seen from the kernel.

    outcome: how the program ended there, once that is known
    """

    def __init__(self, rank: int, mesh: Mesh, timeout: float, folder: str) -> None:
        self.rank = rank
        self.size = mesh.size
        self.outcome: Outcome | None = None
        self.ending = threading.RLock()  # one hears of its death, another may close the world
        self.log = os.path.join(folder, f"log-{rank}")  # what it writes by itself
        self.commands, commands = connection.Pipe()
        self.control, control = connection.Pipe()
        args = (rank, mesh, timeout, folder, commands, control)
        context: Any = multiprocessing.get_context(_METHOD)
        self.process = context.Process(target=be_rank, args=args, name=f"rank {rank}")
        with commands, control:
            try:
                _start(self.process)
            except BaseException:  # should it come up later, it finds nobody and ends
                self.commands.close()
                self.control.close()
                raise
        vars(multiprocessing.process)["_children"].discard(
            self.process
        )  # Python's exit would wait for it

    def fileno(self) -> int:
        """What tells when it has something to say."""
        return self.commands.fileno()

    def begin(self, message: bytes) -> None:
        """Send it a program."""
        with contextlib.suppress(OSError):  # it is dead, and its end of the line will tell
            self.commands.send_bytes(message)

    def hear(self) -> None:
        """Take its outcome; that of a dead rank is its death."""
        try:
            self.outcome = unpack(self.commands.recv_bytes(), self.rank, self.size)
        except (EOFError, OSError):
            how, tail = self.end(), self.tail()
            text = f"rank {self.rank} of {self.size} died: its process {how}"
            text += f"; it last wrote:\n{tail}" * bool(tail)
            self.outcome = Outcome(failure=Failure.of(RankError(text, self.rank)))

    def where(self) -> str:
        """The line at which its program is, or why that is not known."""
        with contextlib.suppress(OSError, EOFError):
            self.control.send_bytes(b"where")
            if self.control.poll(_PATIENCE):
                return f"and is at {place(self.control.recv())}"
        return "and does not answer"

    def kill(self) -> None:
        """End it, with all that it started."""
        with self.ending, contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.exitcode is None:  # it may not have become the leader of its group yet
                self.process.kill()
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> str:
        """How it ended, once it is over."""
        with self.ending:
            self.kill()
            self.process.join(_PATIENCE)
            code = self.process.exitcode
            self.commands.close()
            self.control.close()
        if code is None or code == 255:
            return "ended in a way that its fork server, which is gone or stopped, did not report"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def tail(self) -> str:
        """The last lines that its process wrote by itself."""
        with contextlib.suppress(OSError), open(self.log, errors="replace") as log:
            return "\n".join(log.read().splitlines()[-12:])
        return ""


class Processes:
    """The engine: a process a rank, and a Unix socket between each two."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        if mesh.size > MAX_RANKS:
            remedy = f"use at most {MAX_RANKS}, or the threads engine"
            raise ValueError(f"{mesh.size} ranks are too many processes for one machine: {remedy}")
        self.mesh = mesh
        self.timeout = timeout
        self.ranks: list[RankProcess] = []
        self.folders: list[str] = []
        self.locks: list[BinaryIO] = []  # files of the folders, locked while this process lives
        self.runs = itertools.count(1)
        self.lock = threading.Lock()  # one run at a time
        self.ending = threading.RLock()
        self.ended = False  # whether another thread ended this run
        weakref.finalize(self, _end, self.ranks, self.folders, self.locks, os.getpid())
        start_server()

    @property
    def running(self) -> list[RankProcess]:
        """The ranks that have not been heard of in this run."""
        return [rank for rank in self.ranks if rank.outcome is None]

    @property
    def failures(self) -> list[Failure]:
        """What has been heard of failures in this run."""
        outcomes = [rank.outcome for rank in self.ranks if rank.outcome]
        return [outcome.failure for outcome in outcomes if outcome.failure]

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        """What fn(rank, *args, **kwargs) returns on every rank, and their messages.

        Raises TypeError for what cannot be sent to the ranks, and what happened on them.
        """
        try:
            program = cloudpickle.dumps((fn, args, kwargs))
        except Exception as error:
            why = f"({type(error).__name__}: {error}): build such things inside it"
            what = "the function or its arguments cannot be sent to the ranks"
            raise TypeError(f"{what} {why}") from None
        with self.lock:
            self.ended, outcomes = False, []
            try:
                if not self.ranks:
                    self._start()
                self.progress.clear()
                outcomes = self._run(pickle.dumps((next(self.runs), program)))
            except BaseException as error:  # as an interrupt: nothing of this run may go on
                self._end()
                if not self.ended or not isinstance(error, Exception):
                    raise
            if self.ended:
                what = "another thread closed this world while its ranks ran"
                raise WorldError(f"{what}: wait for a run to end before you close its world")
        return conclude(outcomes)

    def _start(self) -> None:
        _check_files(self.mesh.size)
        start_server()
        sweep_folders()
        folder, lock = make_folder()
        self.folders.append(folder)
        self.locks.append(lock)
        with create_memory(folder, self.mesh.size):
            self.progress = open_memory(folder, self.mesh.size)
            for rank in range(self.mesh.size):
                self.ranks.append(RankProcess(rank, self.mesh, self.timeout, folder))
            for process in self.ranks:
                try:
                    process.commands.recv_bytes()
                except (EOFError, OSError):
                    text = f"rank {process.rank} did not start:\n{process.tail()}"
                    raise RuntimeError(text) from None

    def _run(self, message: bytes) -> list[Outcome]:
        """How the program ended on each rank; after a failure the others get a moment to end."""
        for rank in self.ranks:
            rank.begin(message)
        self._hear(until=lambda: self.failures)
        self._hear(GRACE, until=lambda: not self._computing())
        late = any(isinstance(failure.error, TimeoutError) for failure in self.failures)
        places = {rank.rank: rank.where() for rank in self._computing()} if late else {}
        self.progress.stop()
        self._hear(_PATIENCE)
        outcomes = [rank.outcome or Outcome() for rank in self.ranks]
        for i, where in places.items():
            outcomes[i].state = (ABSENT, where)
        touched = any(outcome.touched_group for outcome in outcomes)
        dead = any(rank.commands.closed for rank in self.ranks)
        if self.running or dead or (self.failures and touched):
            self._end()  # a process group that has lost a rank is of no more use
        for rank in self.ranks:
            rank.outcome = None  # what it returned is the caller's alone
        return outcomes

    def _computing(self) -> list[RankProcess]:
        return [rank for rank in self.running if not self.progress.rests(rank.rank)]

    def _hear(self, seconds: float = math.inf, until: Callable[[], Any] = lambda: False) -> None:
        """Take outcomes as they come, until all are there, something holds, or the time is over."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and not until():
            ready = connection.wait([rank.commands for rank in self.running], _LOOK)
            for rank in [rank for rank in self.running if rank.commands in ready]:
                rank.hear()

    def close(self) -> None:
        """End all ranks; the next run starts new ones."""
        self.ended = True
        self._end()

    def _end(self) -> None:
        with self.ending:  # a thread that runs and one that closes
            _end(self.ranks, self.folders, self.locks, os.getpid())


def _end(ranks: list[RankProcess], folders: list[str], locks: list[BinaryIO], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the kernel that ends: these ranks are not its own
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.end()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for lock in locks:
        lock.close()
    ranks.clear()
    folders.clear()
    locks.clear()


def _start(process: multiprocessing.Process) -> None:
    """Fork a rank; raise RuntimeError where the fork server does not do it."""
    errors: list[BaseException] = []

    def start() -> None:
        # Without a main module in sight, a user's script does not run again on every rank.
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            for _ in range(50):  # a server that has just died is replaced once the system says so
                try:
                    return process.start()
                except ConnectionRefusedError as error:
                    refused = error
                    time.sleep(_LOOK)
            raise refused
        except BaseException as error:
            errors.append(error)
        finally:
            sys.modules["__main__"] = main

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(_START)
    if errors:
        raise errors[0]
    if starting.is_alive():
        remedy = "if its process is stopped, continue or kill it"
        raise RuntimeError(f"the ranks' fork server has not answered for {_START:g} s: {remedy}")


def _check_files(size: int) -> None:
    """Raise RuntimeError where the system allows fewer open files than a world needs."""
    import resource  # POSIX only, as what this module runs; importing it stays possible elsewhere

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    here, there = len(os.listdir("/dev/fd")) + 4 * size + 16, 2 * size + 40
    if max(here, there) > limit:
        what = f"{size} ranks need more open files than the {limit} that a process may have here"
        remedy = f"start the notebook after `ulimit -n {max(4096, 16 * size)}`"
        raise RuntimeError(f"{what}: {remedy}, take fewer ranks, or the threads engine")
