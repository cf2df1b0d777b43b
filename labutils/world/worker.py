"""The far end of the processes engine: a nursery, which has torch loaded and forks a rank in milliseconds, and what a rank then does.

Run as `python -m labutils.world.worker FD`, with the number of the socket that leads to the kernel.
"""

import contextlib
import datetime
import faulthandler
import gc
import io
import mmap
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from labutils.config import Mesh
from labutils.trace import Event
from labutils.world.board import FAILED, FINISHED, Board
from labutils.world.comm import Rank
from labutils.world.distributed import DistributedEndpoint
from labutils.world.errors import Failure, Stopped, site
from labutils.world.local import LocalEndpoint

MAX_FDS = 250  # a Unix socket carries at most 253 descriptors in one message


@dataclass
class Outcome:
    """How a rank's program ended."""

    value: Any = None
    events: tuple[Event, ...] = ()
    failure: Failure | None = None
    stopped: bool = False
    printed: list[str] = field(default_factory=list)
    touched_group: bool = False


@dataclass(frozen=True)
class Spec:
    """What a new rank has to know; its descriptors come beside it."""

    index: int
    mesh: Mesh
    timeout: float
    folder: str
    cwd: str
    path: list[str]
    fork: bool


class Groups:
    """The real process groups of a rank, made when they are first asked for."""

    def __init__(self, size: int) -> None:
        self.known: dict[tuple[int, ...], Any] = {tuple(range(size)): dist.group.WORLD}
        self.touched = False

    def __call__(self, ranks: tuple[int, ...]) -> Any:
        self.touched = True
        if ranks not in self.known:
            self.known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self.known[ranks]


class _Printer(io.TextIOBase):
    """Standard output while a rank's program runs: it goes where `rank.print` writes."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def write(self, text: str) -> int:
        self.lines.append(text)
        return len(text)


def perform(rank: Rank, load: Callable[[], tuple[Callable, tuple, dict]]) -> Outcome:
    """How the program that `load` gives ends on this rank."""
    outcome, printer = Outcome(printed=rank._printed), _Printer(rank._printed)
    try:
        with contextlib.redirect_stdout(printer), contextlib.redirect_stderr(printer):
            fn, args, kwargs = load()
            outcome.value = fn(rank, *args, **kwargs)
            outcome.events = rank._finish()
            rank._board.publish(rank.rank, FINISHED, 0, 0, "")
    except Stopped:
        outcome.stopped = True
    except BaseException as error:
        outcome.failure = Failure.of(error)
        if not isinstance(
            error, TimeoutError
        ):  # such a rank still waits, as far as the others' reports are concerned
            rank._board.publish(rank.rank, FAILED, 0, 0, "")
    finally:
        rank._endpoint.stop()
        rank._close()
    return outcome


def pack(outcome: Outcome, rank: int) -> bytes:
    """The outcome as bytes; a value that cannot travel becomes an error that says so."""
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:
        kind = type(outcome.value).__name__
        reason = f"{type(error).__name__}: {error}"
        told = TypeError(
            f"rank {rank} returned a {kind} that cannot be sent to the notebook ({reason}): return numbers, text or tensors"
        )
        return cloudpickle.dumps(
            Outcome(
                failure=Failure.of(told),
                printed=outcome.printed,
                touched_group=outcome.touched_group,
            )
        )


def loopback() -> str:
    """The name of the loopback interface on this system."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def be_rank(spec: Spec, fds: list[int]) -> None:
    """Run programs until the kernel hangs up."""
    commands, control, memory, log, *peers = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    size, index = spec.mesh.size, spec.index
    os.environ.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GLOO_SOCKET_IFNAME=loopback(),
    )
    sys.path[:] = spec.path
    with contextlib.suppress(OSError):
        os.chdir(spec.cwd)
    torch.set_num_threads(1)
    kernel = Connection(commands)
    threading.Thread(
        target=_listen, args=(Connection(control), threading.get_ident(), spec.folder), daemon=True
    ).start()

    board = Board(mmap.mmap(memory, 0), size)
    device = (
        torch.device("cuda", index)
        if torch.cuda.is_available() and torch.cuda.device_count() >= size
        else torch.device("cpu")
    )
    wait = datetime.timedelta(seconds=spec.timeout)
    store = dist.FileStore(
        os.path.join(spec.folder, "store"), size
    )  # a file, because TCPStore would listen on every interface
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=index,
        world_size=size,
        timeout=wait,
    )
    groups = Groups(size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        endpoint = DistributedEndpoint(index, device, spec.timeout)
    else:
        sockets = [socket.socket(fileno=fd) for fd in peers]
        others = [rank for rank in range(size) if rank != index]
        endpoint = LocalEndpoint(
            index, dict(zip(others, sockets, strict=True)), board, spec.timeout
        )
    kernel.send_bytes(b"ready")
    while True:
        try:
            message = kernel.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        number, program = pickle.loads(message)
        endpoint.reset(number)
        rank = Rank(index, spec.mesh, endpoint, board, device, groups)
        outcome = perform(rank, lambda program=program: cloudpickle.loads(program))
        outcome.touched_group = groups.touched
        kernel.send_bytes(pack(outcome, index))


def _listen(control: Connection, main: int, folder: str) -> None:
    """Say where the program is when the kernel asks; when the kernel is gone, be gone too, whatever the program does."""
    while True:
        try:
            control.recv_bytes()
            control.send(site(sys._current_frames().get(main)))
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def nursery(kernel: socket.socket) -> None:
    """Fork a rank for each Spec that comes, and tell how the ones that are over have ended; without a kernel, end them all."""
    living: dict[int, str] = {}
    codes: dict[int, int] = {}
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(kernel, 1 << 18, MAX_FDS)
        if not message:
            break
        request = pickle.loads(message)
        if isinstance(request, int):
            if request not in codes:
                codes[request] = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
                living.pop(request)
            kernel.sendall(b"%d" % codes.pop(request))
            continue
        child = os.fork() if request.fork else 0
        if child == 0:
            if not request.fork:
                kernel.sendall(b"%d" % os.getpid())
            kernel.close()
            os.setsid()
            be_rank(request, fds)
        living[child] = request.folder
        for fd in fds:
            os.close(fd)
        kernel.sendall(b"%d" % child)
        for pid in list(living):  # of worlds that nobody has closed
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
                living.pop(pid)
    for pid, folder in living.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
