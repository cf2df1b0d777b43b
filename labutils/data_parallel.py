"""Data parallelism: a copy of the model on every rank, a part of the batch each, and one mean of gradients a step.

`replicate` is the course's own DistributedDataParallel: gradients are reduced in buckets, from the last layer to the first, while the backward pass
goes on. `server_step` and `replicate_each_step` are what came before it, on the same ranks: a parameter server, and nn.DataParallel.
"""

import contextlib
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labutils import collectives, units
from labutils.config import Link
from labutils.ledger import Ledger, Line
from labutils.world import Comm, Work

BUCKET_BYTES = 25 * 2**20  # PyTorch's bucket_cap_mb=25 counts MiB

# ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def sampler(length: int, rank: int, size: int, *, epoch: int = 0, seed: int = 0, shuffle: bool = True) -> list[int]:
    """The indices, out of `length` examples, that `rank` of `size` reads in `epoch`: equally many on all ranks.

    >>> [sampler(10, rank, 4, shuffle=False) for rank in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]

    Invariant: all examples are dealt out; only −length mod size of them twice, so that no rank has a batch that others wait for.
    """
    units.whole(length, "length")
    if not 0 <= units.whole(rank, "rank") < units.whole(size, "size", 1):
        raise ValueError(f"there is no rank {rank} of {size}: use 0 … {size - 1}")
    order = list(range(length))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)  # one permutation for all ranks: they agree without talking
    rounds = -(-length // size)
    return [order[place % length] for place in range(rank, rounds * size, size)]


def share(count: int, comm: Comm) -> float:
    """What to multiply this rank's mean loss over `count` things by, so that the mean over ranks is the mean over all things of all ranks.

    Cost: one all-reduce of 8 bytes. Equal counts give 1 on every rank.
    """
    total = comm.all_reduce(torch.tensor([float(units.whole(count, "count"))], dtype=torch.float64)).item()
    if not total:
        raise ValueError("nothing on any rank counts towards the loss: every target is left out")
    return count * comm.size / total


# ── time ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank did from `start` to `end`, in seconds since its step began: `kind` is "forward", "backward" or "reduce"."""

    rank: int
    kind: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, of one rank or of several: from a formula (`simulate`) or from a run (`Replica.timeline`).

    >>> step = Timeline((Span(0, "backward", "layer 0", 0.0, 3.0), Span(0, "reduce", "bucket 0", 2.0, 4.0)))
    >>> step.makespan, step.exposed, step.hidden
    (4.0, 1.0, 0.5)
    """

    spans: tuple[Span, ...]

    def __add__(self, other: "Timeline") -> "Timeline":
        return Timeline(self.spans + other.spans) if isinstance(other, Timeline) else NotImplemented

    def __radd__(self, other: int) -> "Timeline":
        return self if other == 0 else NotImplemented  # so that sum(timelines) works

    @property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds from the end of the last computation on any rank to the end of the step: communication that nothing hides."""
        return self.makespan - max((span.end for span in self.spans if span.kind != "reduce"), default=0.0)

    @property
    def hidden(self) -> float:
        """The part of communication, 0 … 1, that runs while its rank computes; 1 where there is none."""
        open_ = total = 0.0
        for rank in {span.rank for span in self.spans}:
            mine = [span for span in self.spans if span.rank == rank]
            computed = max((span.end for span in mine if span.kind != "reduce"), default=0.0)
            for span in mine:
                if span.kind == "reduce":
                    total += span.end - span.start
                    open_ += max(0.0, span.end - max(span.start, computed))
        return 1 - open_ / total if total else 1.0


def simulate(layers: Sequence[tuple[int, float]], *, bucket_bytes: int, n: int, link: Link, overlap: bool = True) -> Timeline:
    """The backward pass of a chain of layers, each (gradient bytes, seconds), in forward order, on `n` ranks: as every one of them sees it.

    Buckets are reduced one after the other, each when its last gradient is there: the latency–bandwidth cost of a ring all-reduce.

    >>> simulate([(1000, 1.0)] * 4, bucket_bytes=2000, n=2, link=Link(0, 4000)).exposed
    0.5
    """
    sizes = {f"layer {i}": nbytes for i, (nbytes, _) in enumerate(layers)}
    spans, now, ready = [], 0.0, {}
    for name, (_, seconds) in reversed(list(zip(sizes, layers, strict=True))):
        spans.append(Span(0, "backward", name, now, now + units.positive(seconds, f"the seconds of {name}")))
        now = ready[name] = spans[-1].end
    free = 0.0 if overlap else now
    for k, bucket in enumerate(buckets(sizes, bucket_bytes)):
        start = max(free, ready[bucket.names[-1]])
        free = start + collectives.cost("all_reduce_ring", bucket.nbytes, n, link)
        spans.append(Span(0, "reduce", f"bucket {k}", start, free))
    return Timeline(tuple(spans))


# ── buckets ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together: names of parameters in the order in which their gradients come, and the bytes of each."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in this bucket."""
        return sum(self.sizes)


def buckets(sizes: Mapping[str, int], bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, in the order in which they are reduced, for parameters with `sizes` in bytes, in forward order.

    >>> [bucket.names for bucket in buckets({"embed": 10, "hidden": 10, "head": 5}, 16)]
    [('head', 'hidden'), ('embed',)]

    Invariant: each parameter is in one bucket; one that is larger than a bucket has a bucket of its own.
    """
    units.whole(bucket_bytes, "bucket_bytes", 1)
    grouped: list[list[str]] = []
    held = 0
    for name in reversed(sizes):
        if not grouped or held + sizes[name] > bucket_bytes:
            grouped.append([])
            held = 0
        grouped[-1].append(name)
        held += sizes[name]
    return tuple(Bucket(tuple(names), tuple(sizes[name] for name in names)) for names in grouped)


def predict(grouped: Sequence[Bucket], n: int, *, itemsize: int = 4, backwards: int = 1) -> Ledger:
    """Bytes that each of `n` ranks sends to reduce these buckets in `backwards` backward passes, as a ring does it.

    >>> predict(buckets({"a": 400, "b": 400}, 400), 4).by("rank")
    {0: 1200, 1: 1200, 2: 1200, 3: 1200}
    """
    units.whole(backwards, "backwards")
    rings = [collectives.predict_all_reduce("ring", nbytes=bucket.nbytes, n=n, itemsize=itemsize) for bucket in grouped]
    lines = [Line("all_reduce", line.amount, axis="dp", rank=line.rank, count=line.count) for ring in rings for line in ring]
    return Ledger(lines).scaled(backwards).merged()


# ── replicas ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Replica(nn.Module):
    """A module whose gradients, after each backward pass, are the mean over all ranks; made by `replicate`.

    Every bucket is one flat tensor, and the gradients are views of it: nothing is held twice, and nothing is copied after the reduction.
    """

    def __init__(self, module: nn.Module, comm: Comm, *, bucket_bytes: int, overlap: bool, find_unused: bool) -> None:
        super().__init__()
        self.module, self.comm, self.overlap, self.find_unused, self.synchronize = module, comm, overlap, find_unused, True
        _broadcast([*module.parameters(), *module.buffers()], comm)
        self._named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not self._named:
            raise ValueError("no parameter of this module needs a gradient: there is nothing to reduce")
        self.buckets = self._grouped(bucket_bytes)
        self._flat: list[Tensor] = []
        self._home: dict[Tensor, tuple[str, int, Tensor]] = {}  # of each parameter: its name, its bucket, and where in it its gradient lives
        for bucket in self.buckets:
            self._lay_out(bucket)
        self._began, self._stamps, self._travelled = 0.0, [], []
        self._begin()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if self._over:
            self._over, self._began, self._stamps = False, time.perf_counter(), []
        result = self.module(*args, **kwargs)
        self._stamps.append(("forward", "forward", time.perf_counter()))
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on their own rank; the first backward pass outside reduces the sum."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    @property
    def timeline(self) -> Timeline:
        """When this rank computed in its last step, from the call of the module on, and when its buckets travelled."""
        began, last, spans = self._began, self._began, []
        for kind, name, stamp in self._stamps:
            if spans and (spans[-1].kind, spans[-1].name) == (kind, name):  # weight and bias of one layer
                spans[-1] = replace(spans[-1], end=stamp - began)
            else:
                spans.append(Span(self.comm.rank, kind, name, last - began, stamp - began))
            last = stamp
        travelled = [Span(self.comm.rank, "reduce", f"bucket {k}", start - began, end - began) for k, (start, end) in enumerate(self._travelled)]
        return Timeline((*spans, *travelled))

    def _grouped(self, bucket_bytes: int) -> tuple[Bucket, ...]:
        """The buckets: what is reduced together has one dtype and one device."""
        kinds: dict[tuple, dict[str, int]] = {}
        for name, parameter in self._named.items():
            kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter.nbytes
        return tuple(bucket for sizes in kinds.values() for bucket in buckets(sizes, bucket_bytes))

    def _lay_out(self, bucket: Bucket) -> None:
        """Memory for a bucket, and a hook on each of its parameters."""
        held = weakref.ref(self)  # a hook that held its replica would keep both alive, buckets and all, until the garbage collector comes by

        def hook(parameter: Tensor) -> None:
            replica = held()
            if replica is None:
                raise RuntimeError("this module has been replicated, and its replica is gone: keep what replicate(…) returned, and call that")
            replica._ready(parameter)

        parameters = [self._named[name] for name in bucket.names]
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        for name, parameter, view in zip(bucket.names, parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
            self._home[parameter] = name, len(self._flat), view.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(hook)
        self._flat.append(flat)

    def _begin(self) -> None:
        """Everything as it is before a backward pass."""
        self._left = [len(bucket.names) for bucket in self.buckets]
        self._works: list[Work] = []
        self._came: set[str] = set()
        self._over = True

    def _ready(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is complete: put it into its bucket, and let the bucket go if that was the last one."""
        name, bucket, view = self._home[parameter]
        if parameter.grad is not view:  # it is one already where gradients accumulate, or are cleared to zero instead of None
            parameter.grad = view.copy_(parameter.grad)
        self._stamps.append(("backward", name.rpartition(".")[0] or name, time.perf_counter()))
        if not self.synchronize:
            return
        if not self._came:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # called when the backward pass is over
        self._came.add(name)
        self._left[bucket] -= 1
        if self.overlap:
            self._send(lambda: not self._left[len(self._works)])

    def _send(self, may_go: Callable[[], bool]) -> None:
        """Start reducing buckets, always in their order: all ranks must make the same calls, whichever gradient comes first."""
        while len(self._works) < len(self.buckets) and may_go():
            flat = self._flat[len(self._works)]
            self._works.append(self.comm.all_reduce(flat, out=flat, async_op=True))

    def _finish(self) -> None:
        """The backward pass is over: send what is left, wait for all of it, and divide once."""
        missing = [name for name in self._named if name not in self._came]
        if missing and not self.find_unused:
            raise RuntimeError(
                f"rank {self.comm.rank}: no gradient came for {', '.join(missing)}, and all ranks wait for it; "
                "freeze what the loss does not use, or pass find_unused=True"
            )
        if self.find_unused:
            self._fill()
        self._send(lambda: True)
        works = self._works
        for work, flat in zip(works, self._flat, strict=True):
            work.wait()
            flat.div_(self.comm.size)
        self._travelled = [work.span for work in works]
        self._begin()

    def _fill(self) -> None:
        """A gradient that has not come counts as zero if another rank has one; a parameter that no rank used keeps None."""
        here = torch.tensor([parameter.grad is not None for parameter in self._home], dtype=torch.uint8, device=self._flat[0].device)
        for (parameter, (_, _, view)), used in zip(self._home.items(), self.comm.all_reduce(here, "max").tolist(), strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view if used else None


def replicate(module: nn.Module, comm: Comm, *, bucket_bytes: int = BUCKET_BYTES, overlap: bool = True, find_unused: bool = False) -> Replica:
    """The module as one of `comm.size` replicas: rank 0's weights on every rank now, and the mean gradient after every backward pass.

    Gradients travel in buckets of `bucket_bytes`; with `overlap` each leaves as soon as it is complete, without it after the backward pass. With
    `find_unused` a parameter may be without a gradient on some ranks, or on all.

    Cost: each rank sends 2(N−1)/N of the gradients' bytes a step, and at the start its part of a broadcast; the buckets are the gradients' own memory.
    Invariant: equal to one device with the whole batch, up to rounding, where ranks have equally many examples (else see `share`); the same bits on
    all ranks, so replicas never drift apart.
    Source: S. Li et al., PyTorch Distributed, 2006.15704, sections 3.2 and 4.
    """
    return Replica(module, comm, bucket_bytes=bucket_bytes, overlap=overlap, find_unused=find_unused)


def _broadcast(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Rank 0's values into all of them, on every rank."""
    for tensor in tensors:
        value = tensor.detach()
        value.copy_(comm.broadcast(value.contiguous()))


# ── the plain versions ─────────────────────────────────────────────────────────────────────────────────────────────


def server_step(module: nn.Module, comm: Comm, optimizer: torch.optim.Optimizer | None, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """This rank's loss; one step with a parameter server: rank 0 hands out the weights, adds up the gradients, and alone has an optimizer.

    Cost: rank 0 sends (N−1) times the weights and receives (N−1) times the gradients; a worker sends its gradient once.
    Source: M. Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014, with one server that also works.
    """
    _hand_out(module, comm)
    module.zero_grad()
    value = loss(batch)
    value.backward()
    _add_up(module, comm, optimizer, comm.size)
    return value.detach()


def replicate_each_step(
    module: nn.Module, comm: Comm, optimizer: torch.optim.Optimizer | None, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> Tensor | None:
    """Rank 0's loss of the whole batch, None elsewhere; one step as nn.DataParallel does it, with replicas that live for one forward pass.

    Rank 0 has the batch, the loss and the optimizer. Inputs and weights go out, outputs come back, their gradients go out, gradients come back.

    Cost: what a parameter server costs, and the outputs twice: for a language model s·v numbers a sequence.
    Source: PyTorch, documentation of torch.nn.DataParallel and nn.parallel (scatter, replicate, parallel_apply, gather).
    """
    with comm.record("inputs"):
        mine = collectives.scatter_star(inputs, comm)
    _hand_out(module, comm)
    module.zero_grad()
    outputs = module(mine)
    with comm.record("outputs"):
        gathered = collectives.gather_star(outputs.detach(), comm)
    slope = torch.empty(len(inputs), *outputs.shape[1:], dtype=outputs.dtype, device=outputs.device)
    value = None
    if gathered is not None:
        value = loss(gathered.requires_grad_(), targets)
        (slope,) = torch.autograd.grad(value, gathered)
    with comm.record("gradients of outputs"):
        outputs.backward(collectives.scatter_star(slope, comm))
    _add_up(module, comm, optimizer, 1)  # the loss is the mean over the whole batch already
    return None if value is None else value.detach()


def _hand_out(module: nn.Module, comm: Comm) -> None:
    parameters = [parameter.detach() for parameter in module.parameters()]
    with comm.record("weights"):
        _scatter_into(parameters, collectives.broadcast_star(_joined(parameters), comm))


def _add_up(module: nn.Module, comm: Comm, optimizer: torch.optim.Optimizer | None, divisor: int) -> None:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    with comm.record("gradients"):
        total = collectives.reduce_star(_joined(gradients), comm)
    if total is not None:
        _scatter_into(gradients, total / divisor)
        optimizer.step()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _scatter_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
