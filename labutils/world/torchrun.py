"""Ranks that torchrun has started: each process runs its own and learns what all returned."""

import atexit
import dataclasses
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from labutils.config import Mesh
from labutils.trace import Trace
from labutils.world.distributed import DistributedEndpoint
from labutils.world.errors import ABSENT
from labutils.world.messages import Endpoint
from labutils.world.progress import Progress
from labutils.world.rank import Outcome, conclude, unpack
from labutils.world.sockets import SocketEndpoint, create_memory, make_folder
from labutils.world.threads import GRACE
from labutils.world.worker import Member, begin_groups, loopback, own_device

_RUNS = itertools.count(1)  # of all worlds of this job, which all ranks count alike
_PATIENCE = 2.0  # seconds that the other ranks get to come to their end once one has failed


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
        endpoint: Endpoint = DistributedEndpoint(timeout)
        if same_memory:
            endpoint = sockets = _by_sockets(rank, started, timeout)
            self.progress = sockets.progress
        self.member = Member(rank, mesh, device, endpoint)
        atexit.register(self._leave)

    def run(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Trace]:
        member, number = self.member, next(_RUNS)
        dist.barrier()  # nobody looks at the last run any more
        if member.rank == 0 and self.progress:
            self.progress.clear()
        dist.barrier()
        outcome = member.run(number, fn, args, kwargs)
        if outcome.failure and self.progress:
            self._stop_others(self.progress)
        outcomes = self._meet(number, outcome) or self._gather(member.pack(outcome))
        if member.rank != 0:
            for each in outcomes:
                each.printed = ""
        return conclude(outcomes)

    def _meet(self, number: int, mine: Outcome) -> list[Outcome] | None:
        """None once all ranks are here and well; else how each ended, as far as that is known.

        A store is asked and no collective called, in which all would wait for a rank that is stuck.
        """
        member, size = self.member, self.member.mesh.size
        store = dist.PrefixStore(f"run {number}", dist.distributed_c10d._get_default_store())
        packed = member.pack(dataclasses.replace(mine, value=None, events=()))
        store.add("failed", int(mine.failure is not None))  # before others see that it is here
        store.set(str(member.rank), packed)  # type: ignore[arg-type]  # it takes bytes, too
        here, deadline = {member.rank: mine}, math.inf
        while len(here) < size and time.monotonic() < deadline:
            for rank in set(range(size)) - set(here):
                if store.check([str(rank)]):
                    here[rank] = unpack(store.get(str(rank)), rank, size)
            if deadline == math.inf and store.add("failed", 0):
                deadline = time.monotonic() + _PATIENCE
            time.sleep(0.005)
        if not store.add("failed", 0):
            return None
        return [here.get(rank) or Outcome(state=(ABSENT, "")) for rank in range(size)]

    def _gather(self, packed: bytes) -> list[Outcome]:
        size = self.member.mesh.size
        all_packed: list[bytes] = [b""] * size
        dist.all_gather_object(all_packed, packed)
        return [unpack(each, rank, size) for rank, each in enumerate(all_packed)]

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
    own, lock = make_folder()
    try:
        with lock, create_memory(own, size):
            folder = [own]
            dist.broadcast_object_list(folder, src=0)
            endpoint = SocketEndpoint(folder[0], rank, size, timeout, dist.barrier)
            dist.barrier()
            return endpoint
    finally:
        shutil.rmtree(own)
