"""A rank's process: it connects itself to the others, then runs the programs it is sent."""

import ctypes
import datetime
import faulthandler
import functools
import gc
import mmap
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import cloudpickle
import torch
import torch.distributed as dist

from labutils.config import Mesh
from labutils.world import sockets
from labutils.world.distributed import DistributedEndpoint
from labutils.world.errors import Failure, site
from labutils.world.progress import Progress
from labutils.world.rank import Outcome, Rank, perform

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Spec:
    """What a new rank has to know.

    rank, mesh: which rank it is
    timeout: how long it waits for the others, in seconds
    folder: where this world's ranks meet
    memory: the path of what they share
    """

    rank: int
    mesh: Mesh
    timeout: float
    folder: str
    memory: str


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


def be_rank(spec: Spec, commands: Connection, control: Connection) -> None:
    """Run programs until the kernel hangs up."""
    os.setsid()  # so that the kernel can end it with all that it starts
    if sys.platform == "linux":  # with the fork server, which ends with the kernel
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # not with its ranks
    gc.freeze()  # leaves the memory shared that came with the fork
    log = os.open(log_path(spec.folder, spec.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    faulthandler.enable()
    torch.set_num_threads(1)
    listening = (control, threading.get_ident(), spec.folder)
    listener = threading.Thread(target=_listen, args=listening, daemon=True)
    listener.start()
    device, endpoint = _join(spec)
    groups = Groups(spec.mesh.size)
    commands.send_bytes(b"ready")
    while True:
        try:
            number, program = pickle.loads(commands.recv_bytes())
        except (EOFError, OSError):
            listener.join()  # which tidies up and ends this process
        endpoint.reset(number)
        rank = Rank(spec.rank, spec.mesh, endpoint, device, groups)
        outcome = perform(rank, functools.partial(_call, program, rank), capture=True)
        outcome.touched_group = groups.touched
        commands.send_bytes(pack(outcome, spec.rank))


def _join(spec: Spec) -> tuple[torch.device, Any]:
    """This rank's device and endpoint, once it is connected to the others."""
    size, rank = spec.mesh.size, spec.rank
    for scope in ("", "LOCAL_"):
        os.environ.update({f"{scope}RANK": str(rank), f"{scope}WORLD_SIZE": str(size)})
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    device = own_device(rank, size)
    # A file, because TCPStore would listen on every interface.
    store = dist.FileStore(os.path.join(spec.folder, "store"), size)
    wait = datetime.timedelta(seconds=spec.timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    if device.type == "cuda":
        return device, DistributedEndpoint(rank, device, spec.timeout)
    progress = open_memory(spec.memory, size)
    peers = sockets.connect(spec.folder, rank, size, dist.barrier)
    return device, sockets.SocketEndpoint(rank, peers, progress, spec.timeout)


def own_device(rank: int, size: int) -> torch.device:
    """The GPU of this machine's rank `rank`, made current; the CPU where `size` ranks lack GPUs."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < size:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _call(program: bytes, rank: Rank) -> Any:
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


def pack(outcome: Outcome, rank: int) -> bytes:
    """The outcome as bytes; a value that cannot travel becomes an error that says so."""
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:
        kind = type(outcome.value).__name__
        why = f"({type(error).__name__}: {error}): return numbers, text or tensors"
        text = f"rank {rank} returned a {kind} that cannot be sent to the notebook {why}"
        outcome.failure = Failure.of(TypeError(text))
        outcome.value = None
        return cloudpickle.dumps(outcome)


# -- what the ranks of one machine share -----------------------------------------------------------


def create_memory(folder: str, size: int) -> tuple[str, BinaryIO]:
    """Memory for `size` ranks to share: its path, and the file that keeps it alive."""
    if hasattr(os, "memfd_create"):  # which no disk holds, and no limit on /dev/shm concerns
        file = os.fdopen(os.memfd_create("ranks"), "r+b")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        path = os.path.join(folder, "memory")
        file = open(path, "w+b")
    file.truncate(sockets.nbytes(size))
    return path, file


def open_memory(path: str, size: int) -> Progress:
    """The shared memory, with what the ranks say that they do at its beginning."""
    with open(path, "r+b") as file:
        return Progress(mmap.mmap(file.fileno(), 0), size)


def log_path(folder: str, rank: int) -> str:
    """The file that a rank's process writes to when it speaks for itself."""
    return os.path.join(folder, f"log-{rank}")


def loopback() -> str:
    """The name of the loopback interface on this system."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
