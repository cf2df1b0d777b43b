"""Ranks as processes of their own, kept warm between runs and watched from here: whatever becomes of one, the notebook goes on."""

import atexit
import contextlib
import importlib.util
import itertools
import mmap
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any, BinaryIO

import cloudpickle

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world import local
from labutils.world.board import BLOCKED, Board
from labutils.world.comm import show
from labutils.world.errors import ABSENT, Failure, RankError, TimeoutError, place, rank_error
from labutils.world.threads import GRACE
from labutils.world.worker import MAX_FDS, Outcome, Spec

_FORK = (
    sys.platform == "linux"
)  # elsewhere the system's own libraries don't survive a fork, and each rank loads torch for itself
_LOOK = 0.02  # seconds between looks at ranks that are to end
_PATIENCE = 0.3  # seconds that ranks get to end once they are told to


class Nursery:
    """A process that has torch loaded and turns into ranks: one for all worlds of this kernel."""

    shared: "Nursery | None" = None

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.log, self.lock = tempfile.TemporaryFile(), threading.Lock()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
        }
        environment.update(
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path),
        )
        command = [sys.executable, "-P", "-m", "labutils.world.worker", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
            )
        atexit.register(self.close)

    @classmethod
    def get(cls) -> "Nursery":
        """The one that all worlds share, or where forks are unsafe, a new one."""
        if not _FORK:
            return cls()
        if cls.shared is None or cls.shared.process.poll() is not None:
            cls.shared = cls()
        return cls.shared

    def ask(self, request: object, fds: list[int]) -> int:
        """The process id of a new rank, for a Spec; the exit code of one that is over, for a process id."""
        if isinstance(request, int) and not _FORK:
            return self.process.wait()
        if self.log.closed:
            raise RuntimeError("the ranks' Python has been closed: make a new World")
        try:
            with self.lock:
                socket.send_fds(self.socket, [pickle.dumps(request)], fds)
                return int(self.socket.recv(64))
        except BaseException as error:
            tail = _tail(self.log)
            self.close()  # also when interrupted: an answer that comes later must not be taken for another one
            if isinstance(error, (OSError, ValueError)):
                raise RuntimeError(f"the ranks' Python did not start:\n{tail}") from None
            raise

    def close(self) -> None:
        """End it, and the ranks that it has forked with it."""
        atexit.unregister(self.close)
        self.socket.close()
        self.process.wait()
        self.log.close()


@dataclass
class RankProcess:
    """A rank as seen from the kernel."""

    pid: int
    nursery: Nursery
    commands: connection.Connection
    control: connection.Connection
    log: BinaryIO
    folder: str
    code: int | None = None

    def where(self) -> str:
        """The line at which its program is, or why that is not known."""
        with contextlib.suppress(OSError, EOFError):
            self.control.send_bytes(b"where")
            if self.control.poll(_PATIENCE):
                return f"and is at {place(self.control.recv())}"
        return "and does not answer"

    def end(self) -> int:
        """Its exit code, after making sure that it is over, with all that it started."""
        if self.code is None:
            for kill in (os.kill, os.killpg):  # it may not have become the leader of its group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
            self.code = 0
            with contextlib.suppress(RuntimeError):
                self.code = self.nursery.ask(self.pid, [])
            for end in (self.commands, self.control):
                end.close()
        return self.code


class Processes:
    """The engine: a process a rank, sockets between each two, and a board in memory that they share."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        if mesh.size + 3 > MAX_FDS:
            raise ValueError(
                f"{mesh.size} ranks are too many processes for one machine: use at most {MAX_FDS - 3}, or the threads engine"
            )
        self.mesh, self.timeout = mesh, timeout
        self.ranks: list[RankProcess] = []
        self.runs = itertools.count(1)
        weakref.finalize(self, _end, self.ranks)
        if _FORK:
            Nursery.get()  # it loads torch while the kernel goes on

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that are up, in rank order."""
        return [rank.pid for rank in self.ranks]

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        _by_value(fn)
        try:
            program = cloudpickle.dumps((fn, args, kwargs))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise TypeError(
                f"the function or its arguments cannot be sent to the ranks ({reason}): build such things inside it"
            ) from None
        try:
            if not self.ranks:
                self._start()
            self.board.clear()
            outcomes = self._run(pickle.dumps((next(self.runs), program)))
        except BaseException:  # above all a KeyboardInterrupt: nothing of this run may go on
            self.close()
            raise
        show([outcome.printed for outcome in outcomes])
        failures = {
            rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure
        }
        if failures:
            raise rank_error(failures, self.mesh.size, self.board)
        return [outcome.value for outcome in outcomes], Trace(
            outcome.events for outcome in outcomes
        )

    def _start(self) -> None:
        size = self.mesh.size
        folder = tempfile.mkdtemp(prefix="ranks-")
        with _memory() as file:
            file.truncate(local.nbytes(size))
            self.board = Board(mmap.mmap(file.fileno(), 0), size)
            wires: list[list[socket.socket | None]] = [[None] * size for _ in range(size)]
            for i, j in itertools.combinations(range(size), 2):
                wires[i][j], wires[j][i] = socket.socketpair()
            for index, peers in enumerate(wires):
                log, (ours, commands), (watch, control) = (
                    tempfile.TemporaryFile(),
                    socket.socketpair(),
                    socket.socketpair(),
                )
                spec = Spec(index, self.mesh, self.timeout, folder, os.getcwd(), sys.path, _FORK)
                theirs = [commands, control, file, log, *filter(None, peers)]
                nursery = Nursery.get()
                try:
                    pid = nursery.ask(spec, [end.fileno() for end in theirs])
                finally:
                    for end in (commands, control, *filter(None, peers)):
                        end.close()
                ends = (connection.Connection(end.detach()) for end in (ours, watch))
                self.ranks.append(RankProcess(pid, nursery, *ends, log, folder))
        for index, rank in enumerate(self.ranks):
            try:
                rank.commands.recv_bytes()
            except (EOFError, OSError):
                raise RuntimeError(f"rank {index} did not start:\n{_tail(rank.log)}") from None

    def _run(self, message: bytes) -> list[Outcome]:
        """How the program ended on each rank; when it fails on one, the others get a moment to come to their own end."""
        running = {rank.commands: index for index, rank in enumerate(self.ranks)}
        outcomes: dict[int, Outcome] = {}
        dead: list[int] = []

        def collect(seconds: float | None) -> None:
            for ready in connection.wait(list(running), seconds):
                index = running.pop(ready)
                try:
                    outcomes[index] = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    dead.append(index)

        for rank in self.ranks:
            with contextlib.suppress(OSError):  # it is dead, and its end of the line will tell
                rank.commands.send_bytes(message)
        while running and not dead and not any(outcome.failure for outcome in outcomes.values()):
            collect(None)
        deadline = time.monotonic() + GRACE
        while (
            running
            and time.monotonic() < deadline
            and not all(self._blocked(index) for index in running.values())
        ):
            collect(_LOOK)
        late = any(
            outcome.failure and isinstance(outcome.failure.error, TimeoutError)
            for outcome in outcomes.values()
        )
        places = {
            index: self.ranks[index].where()
            for index in running.values()
            if late and not self._blocked(index)
        }
        self.board.stop()
        deadline = time.monotonic() + _PATIENCE
        while running and time.monotonic() < deadline:
            collect(_LOOK)
        for index in (*running.values(), *dead):
            outcomes[index] = Outcome(stopped=True)
        for index in dead:
            outcomes[index].failure = self._death(index)
        failed, touched = (
            any(getattr(outcome, name) for outcome in outcomes.values())
            for name in ("failure", "touched_group")
        )
        if running or dead or (failed and touched):
            self.close()  # a process group that has lost a rank, or the thread of its conversation, is of no more use
        for outcome in outcomes.values():
            if outcome.failure and isinstance(outcome.failure.error, TimeoutError):
                text = str(outcome.failure.error)
                for index, where in places.items():
                    text = text.replace(f"rank {index} {ABSENT}", f"rank {index} {ABSENT} {where}")
                outcome.failure = replace(outcome.failure, error=TimeoutError(text))
        return [outcomes[index] for index in range(self.mesh.size)]

    def _blocked(self, index: int) -> bool:
        """Whether a rank has looked around in vain, twice."""
        state, looks, _, _ = self.board.state(index)
        return state == BLOCKED and looks >= 2

    def _death(self, index: int) -> Failure:
        code = self.ranks[index].end()
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        tail = _tail(self.ranks[index].log)
        text = (
            f"rank {index} of {self.mesh.size} died: its process {how}"
            + f"; it last wrote:\n{tail}" * bool(tail)
        )
        return Failure("death", (("", (), text),), RankError(text, index))

    def close(self) -> None:
        """End all ranks; the next run starts new ones."""
        _end(self.ranks)


def _memory() -> BinaryIO:
    """A file that no folder lists and, where the system can, no disk holds."""
    return (
        os.fdopen(os.memfd_create("ranks"), "r+b")
        if hasattr(os, "memfd_create")
        else tempfile.TemporaryFile()
    )


def _end(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.end()
        rank.log.close()
        shutil.rmtree(rank.folder, ignore_errors=True)
    ranks.clear()


def _by_value(fn: Callable) -> None:
    """Let a function whose module the ranks could not import travel with its module's code."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module.__name__.partition(".")[0])
        if spec is not None and "site-packages" not in (spec.origin or ""):
            spec = importlib.util.find_spec(module.__name__)
        if spec is not None and spec.origin == getattr(module, "__file__", None):
            return
    cloudpickle.register_pickle_by_value(module)


def _tail(log: BinaryIO, lines: int = 12) -> str:
    """The last lines that a process wrote."""
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
