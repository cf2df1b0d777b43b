"""Ranks that torchrun has started: each process runs its own and learns what all returned."""

import atexit
import datetime
import functools
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
from labutils.world.rank import Outcome, Rank, conclude, perform
from labutils.world.sockets import SocketEndpoint, connect
from labutils.world.threads import GRACE
from labutils.world.worker import Groups, create_memory, loopback, open_memory, own_device, pack


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
        self.mesh = mesh
        self.rank = int(os.environ["RANK"])
        self.runs = 0
        self.device = own_device(int(os.environ["LOCAL_RANK"]), here)
        gpus = self.device.type == "cuda"
        if here == started and not gpus:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        self.ours = not dist.is_initialized()
        if self.ours:
            wait = datetime.timedelta(seconds=timeout)
            dist.init_process_group("nccl" if gpus else "gloo", timeout=wait)
        self.groups = Groups(mesh.size)
        atexit.register(self._leave)
        self.progress: Progress | None = None  # only where all ranks see the same memory
        if gpus or here != started:
            self.endpoint = DistributedEndpoint(self.rank, self.device, timeout)
            return
        with tempfile.TemporaryDirectory(prefix="ranks-") as own:
            path, memory = create_memory(own, started)
            shared = [own, path]
            dist.broadcast_object_list(shared, src=0)
            folder, path = shared
            self.progress = open_memory(path, started)
            peers = connect(folder, self.rank, started, dist.barrier)
            self.endpoint = SocketEndpoint(self.rank, peers, self.progress, timeout)
            dist.barrier()
            memory.close()

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        self.runs += 1
        dist.barrier()  # nobody looks at the last run any more
        if self.rank == 0 and self.progress:
            self.progress.clear()
        dist.barrier()
        self.endpoint.reset(self.runs)
        rank = Rank(self.rank, self.mesh, self.endpoint, self.device, self.groups)
        outcome = perform(rank, functools.partial(fn, rank, *args, **kwargs), capture=True)
        if outcome.failure and self.progress:
            self._stop_others(self.progress)
        packed: list[bytes | None] = [None] * self.mesh.size
        dist.all_gather_object(packed, pack(outcome, self.rank))
        outcomes: list[Outcome] = [cloudpickle.loads(each) for each in packed]
        if self.rank != 0:
            for each in outcomes:
                each.printed = ""
        return conclude(outcomes)

    def _stop_others(self, progress: Progress) -> None:
        """Give the other ranks a moment to come to their own end, then wake those that wait."""
        others = [rank for rank in range(self.mesh.size) if rank != self.rank]
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not all(map(progress.rests, others)):
            time.sleep(0.005)
        progress.stop()

    def _leave(self) -> None:
        """End the process groups, whose own threads do not survive the end of Python."""
        self.groups.known.clear()
        if self.ours and dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """Nothing: the processes are torchrun's."""
