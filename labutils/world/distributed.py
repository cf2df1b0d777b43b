"""Messages over torch.distributed: between GPUs (NCCL) and between machines (gloo under torchrun)."""

import time
from typing import Any

import torch
import torch.distributed as dist

from labutils.world.comm import REDUCE, Op
from labutils.world.errors import Stopped, TimeoutError


class DistributedEndpoint:
    """One rank's side: each message is a torch.distributed one, and a waiting rank learns of a failure elsewhere from the library's time-out."""

    def __init__(self, rank: int, device: torch.device, timeout: float) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
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
            parts.append(
                dist.P2POp(
                    dist.isend if op.sending else dist.irecv, landing, op.peer, tag=op.channel
                )
            )
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
            work.wait()
        except RuntimeError as error:
            if self.stopped:
                raise Stopped from None
            raise TimeoutError(
                f"rank {self.rank} waited {self.timeout:g} s in {op}, and then: {str(error).splitlines()[0]}"
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
