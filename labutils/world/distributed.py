"""Messages over torch.distributed: GPUs (NCCL), machines (gloo), a torchrun script of your own."""

import collections
import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from labutils.config import Mesh
from labutils.trace import Event
from labutils.world.comm import Comm
from labutils.world.errors import TimeoutError
from labutils.world.messages import NO_TENSOR, TIMEOUT, Endpoint, Request
from labutils.world.rank import Rank


class DistributedEndpoint(Endpoint):
    """One rank's side: each message is a `P2POp`, which the library's own threads move.

    A failure elsewhere shows as a time-out, and so does a deadlock.
    """

    def __init__(self, timeout: float, group: Any | None = None) -> None:
        self.timeout = timeout
        self.group = group

    def post(self, *requests: Request) -> None:
        parts = []
        for request in requests:
            x = request.tensor
            landing = x if request.reduce == "copy" else torch.empty_like(x)
            call = dist.isend if request.sending else dist.irecv
            peer, channel = request.peer, request.channel
            parts.append(dist.P2POp(call, landing, peer, group=self.group, tag=channel))
            request.state = landing
        works: list[Any] = dist.batch_isend_irecv(parts)
        for i, request in enumerate(requests):  # NCCL answers with one work for the whole batch
            request.state = request.state, works[min(i, len(works) - 1)]

    def until_done(self, request: Request) -> None:
        """As `Endpoint.until_done`; raises TimeoutError when it has waited too long."""
        if request.done:
            return
        if request.tensor is NO_TENSOR:  # an asynchronous collective, at which another thread works
            while not request.done:
                time.sleep(1e-4)
            return
        landing, work = request.state
        try:
            work.wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            waited = f"rank {request.rank} waited {self.timeout:g} s in {request}"
            raise TimeoutError(f"{waited}, and then: {str(error).splitlines()[0]}") from None
        if request.reduce != "copy":
            request.accept(landing.view(-1))
        request.state, request.done = None, True


def comm_of(
    group: Any | None = None, *, timeout: float = TIMEOUT, events: list[Event] | None = None
) -> Comm:
    """A Comm over a `torch.distributed.ProcessGroup` that exists already, as under torchrun; under
    NCCL its tensors lie on this process's GPU.

    group: the process group; without one, that of all ranks
    timeout: seconds that a rank waits for another one; then it raises TimeoutError
    events: a list that gets an entry for each message, for `Trace`; without one, nobody keeps books

    The script is yours, and so are its failures: each process raises its own, and calls are not
    compared between ranks.

    >>> comm_of()
    Traceback (most recent call last):
    ...
    RuntimeError: there is no process group yet: call torch.distributed.init_process_group() first
    """
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group() first"
        raise RuntimeError(f"there is no process group yet: {remedy}")
    group = group or dist.group.WORLD
    assert group is not None  # the default one of what is initialized
    nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    endpoint = DistributedEndpoint(timeout, group)
    owner = Rank(rank, Mesh(dp=size), endpoint, device, lambda ranks: group)
    owner._events = collections.deque(maxlen=0) if events is None else events
    return Comm(owner, group.group_desc or "group", tuple(dist.get_process_group_ranks(group)), 0)
