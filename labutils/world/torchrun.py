"""Ranks that torchrun has started: each process runs its own and learns what all returned."""

import atexit
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch.distributed as dist

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world.distributed import DistributedEndpoint
from labutils.world.progress import Progress
from labutils.world.rank import Outcome, conclude
from labutils.world.sockets import SocketEndpoint, create_memory
from labutils.world.threads import GRACE
from labutils.world.worker import Member, begin_groups, loopback, own_device


class Torchrun:
    """The engine: sockets and shared memory on one machine, torch.distributed across machines."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        if "LOCAL_WORLD_SIZE" not in os.environ:
            remedy = "start the script with torchrun --standalone --nproc-per-node 4"
            raise RuntimeError(f"this is not a torchrun job: {remedy}, or use another engine")
        started, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if mesh.size != started:
            remedy = f"use --nproc-per-node {mesh.size}, or a mesh of {started}"
            raise ValueError(f"torchrun started {started} ranks of {mesh.size}: {remedy}")
        rank, device = int(os.environ["RANK"]), own_device(int(os.environ["LOCAL_RANK"]), here)
        same_memory = here == started and device.type == "cpu"
        if same_memory:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        self.ours = not dist.is_initialized()
        if self.ours:
            begin_groups(device, timeout)
        self.progress: Progress | None = None
        endpoint = DistributedEndpoint(timeout)
        if same_memory:
            endpoint = _by_sockets(rank, started, timeout)
            self.progress = endpoint.progress
        self.member = Member(rank, mesh, device, endpoint)
        self.runs = 0
        atexit.register(self._leave)

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        member, size = self.member, self.member.mesh.size
        self.runs += 1
        dist.barrier()  # nobody looks at the last run any more
        if member.rank == 0 and self.progress:
            self.progress.clear()
        dist.barrier()
        outcome = member.run(self.runs, fn, args, kwargs)
        if outcome.failure and self.progress:
            self._stop_others(self.progress)
        packed: list[bytes | None] = [None] * size
        dist.all_gather_object(packed, member.pack(outcome))
        outcomes: list[Outcome] = [cloudpickle.loads(each) for each in packed]
        if member.rank != 0:
            for each in outcomes:
                each.printed = ""
        return conclude(outcomes)

    def _stop_others(self, progress: Progress) -> None:
        """Give the other ranks a moment to come to their own end, then wake those that wait."""
        others = [rank for rank in range(self.member.mesh.size) if rank != self.member.rank]
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not all(map(progress.rests, others)):
            time.sleep(0.005)
        progress.stop()

    def _leave(self) -> None:
        """End the process groups, whose own threads do not survive the end of Python."""
        self.member.groups.clear()
        if self.ours and dist.is_initialized():
            dist.destroy_process_group()


def _by_sockets(rank: int, size: int, timeout: float) -> SocketEndpoint:
    with tempfile.TemporaryDirectory(prefix="ranks-") as own, create_memory(own, size):
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        endpoint = SocketEndpoint(folder[0], rank, size, timeout, dist.barrier)
        dist.barrier()
        return endpoint
