"""A rank's process: it connects itself to the others, then runs the programs it is sent."""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from labutils.config import Mesh
from labutils.world.distributed import DistributedEndpoint
from labutils.world.errors import Failure, WorldError, site
from labutils.world.messages import Endpoint
from labutils.world.rank import Outcome, Output, Rank, perform
from labutils.world.sockets import SocketEndpoint

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_TIDYING = 5  # seconds


class Member:
    """A process that is one rank of a world: what stays from run to run."""

    def __init__(self, rank: int, mesh: Mesh, device: torch.device, endpoint: Endpoint) -> None:
        self.rank = rank
        self.mesh = mesh
        self.device = device
        self.endpoint = endpoint
        self.groups: dict[tuple[int, ...], Any] = {tuple(range(mesh.size)): dist.group.WORLD}
        self.touched_group = False

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The real process group of these ranks, made when it is first asked for."""
        self.touched_group = True
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self.groups[ranks]

    def run(self, number: int, fn: Callable, args: tuple, kwargs: dict) -> Outcome:
        """How fn(rank, *args, **kwargs) ends here in run `number`, with what it prints and warns
        of."""
        self.endpoint.reset(number)
        rank = Rank(self.rank, self.mesh, self.endpoint, self.device, self.group)
        printed = Output()
        ignored: list[BaseException] = []  # by Python, as all that a `__del__` raises

        def told(unraised: Any) -> None:
            ignored.extend([unraised.exc_value] * isinstance(unraised.exc_value, WorldError))
            sys.__unraisablehook__(unraised)

        sys.unraisablehook = told
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            outcome = perform(rank, fn, args, kwargs)
        if ignored and not outcome.failure:
            outcome.failure = Failure.of(ignored[0])
        outcome.printed = str(printed)
        outcome.touched_group = self.touched_group
        return outcome

    def pack(self, outcome: Outcome) -> bytes:
        """The outcome as bytes; a value that cannot travel becomes an error that says so."""
        try:
            return cloudpickle.dumps(outcome)
        except Exception as error:
            kind = type(outcome.value).__name__
            why = f"({type(error).__name__}: {error}): return numbers, text or tensors"
            text = f"rank {self.rank} returned a {kind} that cannot be sent to the notebook {why}"
            outcome.failure = Failure.of(TypeError(text))
            outcome.value = None
            return cloudpickle.dumps(outcome)


def be_rank(
    rank: int, mesh: Mesh, timeout: float, folder: str, commands: Connection, control: Connection
) -> None:
    """Run programs until the kernel hangs up.

    timeout: how long this rank waits for the others, in seconds
    folder: where this world's ranks meet
    commands, control: pipes, of programs and their outcomes, and of what may interrupt one
    """
    os.setsid()  # so that the kernel can end it with all that it starts
    if sys.platform == "linux":  # with the fork server, which ends with the kernel
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        server = vars(multiprocessing.forkserver._forkserver)
        os.close(server["_forkserver_alive_fd"])  # not with its ranks
    gc.freeze()  # leaves the memory shared that came with the fork
    log = os.open(os.path.join(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    faulthandler.enable()
    torch.set_num_threads(1)
    listening = (control, threading.get_ident(), folder)
    listener = threading.Thread(target=_listen, args=listening, daemon=True)
    listener.start()
    member = _join(rank, mesh, timeout, folder)
    commands.send_bytes(b"ready")
    while True:
        try:
            number, program = pickle.loads(commands.recv_bytes())
        except (EOFError, OSError):
            listener.join()  # which tidies up and ends this process
        commands.send_bytes(member.pack(member.run(number, _call, (program,), {})))


def _join(rank: int, mesh: Mesh, timeout: float, folder: str) -> Member:
    size = mesh.size
    for scope in ("", "LOCAL_"):
        os.environ.update({f"{scope}RANK": str(rank), f"{scope}WORLD_SIZE": str(size)})
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    device = own_device(rank, size)
    # A file, because TCPStore would listen on every interface.
    store = dist.FileStore(os.path.join(folder, "store"), size)
    begin_groups(device, timeout, store=store, rank=rank, world_size=size)
    if device.type == "cuda":
        return Member(rank, mesh, device, DistributedEndpoint(timeout))
    endpoint = SocketEndpoint(folder, rank, size, timeout, dist.barrier)
    return Member(rank, mesh, device, endpoint)


def own_device(rank: int, size: int) -> torch.device:
    """The GPU of this machine's rank `rank`, made current; the CPU where `size` ranks lack GPUs."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < size:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def begin_groups(device: torch.device, timeout: float, **where: Any) -> None:
    """Begin `torch.distributed`, whose ranks meet `where` it says."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), **where)


def loopback() -> str:
    """The name of the loopback interface on this system."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _call(rank: Rank, program: bytes) -> Any:
    fn, args, kwargs = cloudpickle.loads(program)
    return fn(rank, *args, **kwargs)


def _listen(control: Connection, main: int, folder: str) -> None:
    """Say where the program is when the kernel asks; when the kernel is gone, be gone too."""
    while True:
        try:
            control.recv_bytes()
            control.send(site(sys._current_frames().get(main)))
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)


def _outlive_ranks() -> None:
    """Let ranks whose kernel is gone tidy up: they are killed where their fork server ends.

    A rank that does not end by itself ends with the server, which its own alarm then kills.
    """
    known = vars(multiprocessing.forkserver._forkserver)
    if not known["_forkserver_address"] or known["_forkserver_pid"]:
        return  # not a server: a process without one, or one that has started one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_TIDYING)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


atexit.register(_outlive_ranks)
