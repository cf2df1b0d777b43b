"""Messages over torch.distributed: between GPUs (NCCL), between machines (gloo), and in a torchrun script of your own."""

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from labutils.config import Mesh
from labutils.trace import Event
from labutils.world.board import Board
from labutils.world.comm import REDUCE, Comm, Op, Rank
from labutils.world.errors import Stopped, TimeoutError


class DistributedEndpoint:
    """One rank's side: each message is a `P2POp`, and a failure elsewhere shows as the library's time-out."""

    def __init__(
        self, rank: int, device: torch.device, timeout: float, group: Any | None = None
    ) -> None:
        self.rank = rank
        self.device = device
        self.timeout = timeout
        self.group = group
        self.stopped = False

    def reset(self, run: int) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def post(self, *ops: Op) -> None:
        parts = []
        for op in ops:
            op.result = op.result if op.sending else op.tensor
            landing = torch.empty_like(op.tensor) if op.reduce else op.tensor
            call = dist.isend if op.sending else dist.irecv
            parts.append(dist.P2POp(call, landing, op.peer, group=self.group, tag=op.channel))
            op.state = landing
        works: list[Any] = dist.batch_isend_irecv(parts)
        for i, op in enumerate(ops):  # NCCL answers with one work for the whole batch
            op.state = op.state, works[min(i, len(works) - 1)]

    def wait(self, op: Op) -> None:
        if op.done:
            return
        if op.tensor is None:  # an asynchronous collective, which a thread of this rank works at
            while not op.done:
                time.sleep(1e-4)
            return
        landing, work = op.state
        try:
            work.wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            if self.stopped:
                raise Stopped from None
            raise TimeoutError(
                f"rank {self.rank} waited {self.timeout:g} s in {op}, and then: "
                f"{str(error).splitlines()[0]}"
            ) from None
        if op.reduce:
            with torch.no_grad():
                REDUCE[op.reduce](op.tensor, landing)
        op.done = True

    def watch(self, op: Op) -> None:
        """Nothing: the library's own threads move it."""

    def finish(self, op: Op) -> None:
        op.done = True

    def add_actor(self, step: int) -> None:
        """Nothing: nobody here looks for deadlocks before the time-out."""


def comm_of(
    group: Any | None = None,
    *,
    timeout: float = 30.0,
    device: torch.device | None = None,
    events: list[Event] | None = None,
) -> Comm:
    """A Comm over a `torch.distributed.ProcessGroup` that exists already, as in a script that torchrun started.

    group: the process group; without one, that of all ranks
    timeout: seconds that a rank waits for another one; then it raises TimeoutError
    device: where its tensors lie; without one, this rank's GPU under NCCL, else the CPU
    events: a list that gets an entry for each message, for `Trace`; without one, nobody keeps books

    The script is yours, and so are its failures: each process raises its own, and calls are not compared between ranks.

    >>> comm_of()
    Traceback (most recent call last):
    ...
    RuntimeError: there is no process group yet: call torch.distributed.init_process_group() first
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group yet: call torch.distributed.init_process_group() first"
        )
    group = group or dist.group.WORLD
    if device is None:
        nccl = "nccl" in dist.get_backend(group)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    endpoint = DistributedEndpoint(rank, device, timeout, group)
    nobody = Board(bytearray(Board.nbytes(size)), size)
    owner = Rank(rank, Mesh(dp=size), endpoint, nobody, device, lambda ranks: group)
    owner._events = _Forgetful() if events is None else events
    return Comm(owner, group.group_desc or "group", tuple(dist.get_process_group_ranks(group)), 0)


class _Forgetful(list):
    """Books that nobody keeps."""

    def append(self, event: object) -> None:
        """Nothing stays."""
