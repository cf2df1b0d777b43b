"""Ranks that torchrun has started: every process calls the same script, runs its own rank, and learns what all the others returned."""

import atexit
import datetime
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world import local
from labutils.world.board import BLOCKED, RUNNING, Board
from labutils.world.comm import Rank, show
from labutils.world.distributed import DistributedEndpoint
from labutils.world.errors import rank_error
from labutils.world.threads import GRACE
from labutils.world.worker import Groups, Outcome, loopback, pack, perform


class Torchrun:
    """The engine: on one machine the sockets and the board of the processes engine, across machines and on GPUs torch.distributed's messages."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                "this is not a torchrun job: start the script with torchrun --standalone --nproc-per-node 4, or use another engine"
            )
        started, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if mesh.size != started:
            raise ValueError(
                f"torchrun started {started} ranks and the mesh has {mesh.size}: use --nproc-per-node {mesh.size}, or a mesh of {started}"
            )
        self.mesh, self.index, self.runs = mesh, int(os.environ["RANK"]), 0
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= here
        self.device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
        )
        if gpus:
            torch.cuda.set_device(self.device)
        elif here == started:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        self.ours = not dist.is_initialized()
        if self.ours:
            dist.init_process_group(
                "nccl" if gpus else "gloo", timeout=datetime.timedelta(seconds=timeout)
            )
        self.groups = Groups(mesh.size)
        atexit.register(self._leave)
        if gpus or here != started:
            self.board = Board(
                bytearray(Board.nbytes(mesh.size)), mesh.size
            )  # nobody else's: calls are not compared across machines
            self.endpoint = DistributedEndpoint(self.index, self.device, timeout)
        else:
            with tempfile.TemporaryDirectory(prefix="ranks-") as own:
                folder = _tell(own)
                self.board = self._board(folder)
                self.endpoint = local.LocalEndpoint(
                    self.index, self._sockets(folder), self.board, timeout
                )
                dist.barrier()

    def _board(self, folder: str) -> Board:
        path, size = os.path.join(folder, "board"), self.mesh.size
        if self.index == 0:
            with open(path, "wb") as file:
                file.truncate(local.nbytes(size))
        dist.barrier()
        with open(path, "r+b") as file:
            return Board(mmap.mmap(file.fileno(), 0), size)

    def _sockets(self, folder: str) -> dict[int, socket.socket]:
        """A connection to each other rank: those above this one call, and say who they are."""
        peers: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(os.path.join(folder, str(self.index)))
            door.listen(self.mesh.size)
            dist.barrier()
            for peer in range(self.index):
                peers[peer] = socket.socket(socket.AF_UNIX)
                peers[peer].connect(os.path.join(folder, str(peer)))
                peers[peer].sendall(self.index.to_bytes(4, "big"))
            for _ in range(self.index + 1, self.mesh.size):
                caller, _ = door.accept()
                peers[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "big")] = caller
        return peers

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        self.runs += 1
        dist.barrier()  # nobody reads the board of the last run any more
        if self.index == 0:
            self.board.clear()
        dist.barrier()
        self.endpoint.reset(self.runs)
        rank = Rank(self.index, self.mesh, self.endpoint, self.board, self.device, self.groups)
        outcome = perform(rank, lambda: (fn, args, kwargs))
        if outcome.failure:
            self._stop_others()
        packed: list[bytes | None] = [None] * self.mesh.size
        dist.all_gather_object(packed, pack(outcome, self.index))
        outcomes: list[Outcome] = [cloudpickle.loads(each) for each in packed]
        if self.index == 0:
            show([each.printed for each in outcomes])
        failures = {index: each.failure for index, each in enumerate(outcomes) if each.failure}
        if failures:
            raise rank_error(failures, self.mesh.size, self.board)
        return [each.value for each in outcomes], Trace(each.events for each in outcomes)

    def _stop_others(self) -> None:
        """Give the other ranks a moment to come to their own end, then wake those that wait."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            states = [
                self.board.state(rank)[:2] for rank in range(self.mesh.size) if rank != self.index
            ]
            if all(
                state != RUNNING and (state != BLOCKED or looks >= 2) for state, looks in states
            ):
                break
            time.sleep(0.005)
        self.board.stop()

    def _leave(self) -> None:
        """End the process groups, whose own threads do not survive the end of Python."""
        self.groups.known.clear()
        if self.ours and dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """Nothing: the processes are torchrun's."""


def _tell(text: str) -> str:
    """Rank 0's text, on every rank."""
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]
