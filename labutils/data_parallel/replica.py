"""DDP's reducer: gradients are averaged over ranks, bucket by bucket, during the backward pass."""

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from labutils import units
from labutils.data_parallel.buckets import BUCKET_BYTES, Bucket, buckets
from labutils.data_parallel.plain import check_alike
from labutils.timeline import Span, Timeline
from labutils.world import Comm, MismatchError, Work

# Of each replicated parameter: the one hook that reduces its gradient.
_HOOKS = WeakTensorKeyDictionary()


class Replica(nn.Module):
    """A module as one of many replicas, like DistributedDataParallel; made by `replicate`.

    After each backward pass its gradients are the mean over all ranks. Every bucket is one flat
    tensor, and the gradients are views of it: nothing is held twice, and nothing is copied after
    the reduction.
    """

    def __init__(self, module: nn.Module, comm: Comm, bucket_bytes: int, overlap: bool) -> None:
        super().__init__()
        self.module = module
        self.comm = comm
        self.overlap = overlap
        self.synchronize = True
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of this module is trained: nothing to replicate")
        check_alike(module.parameters(), comm)
        self.buckets = _grouped(trained, bucket_bytes)
        _broadcast(module, comm)
        self._flat: list[Tensor] = []
        # Of each parameter: its name, its bucket, and where in it its gradient lives.
        self._home: dict[Tensor, tuple[str, int, Tensor]] = {}
        for bucket in self.buckets:
            self._lay_out(bucket.names, [trained[name] for name in bucket.names])
        self._began = 0.0
        self._stamps: list[tuple[str, str, float]] = []
        self._travelled: list[tuple[float, float]] = []
        self._begin()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        self._check()
        if self._step_is_over:
            self._began = time.perf_counter()
            self._stamps = []
        outputs = self.module(*args, **kwargs)
        self._stamps.append(("forward", "forward", time.perf_counter()))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(self._start)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on their own rank; the first backward pass outside reduces."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    def gradient_ready(self, parameter: Tensor) -> None:
        """The hook: puts a complete gradient into its bucket, and sends buckets that are full.

        Raises RuntimeError for a second gradient of a parameter.
        """
        name, bucket, view = self._home[parameter]
        self._start()
        self._stamps.append(("backward", name.rpartition(".")[0] or name, time.perf_counter()))
        if parameter in self._came:
            remedy = "give reentrant checkpoints use_reentrant=False"
            raise RuntimeError(f"the gradient of {name} comes twice in one backward pass: {remedy}")
        grad = parameter.grad
        assert grad is not None  # the hook says that it is there
        if self.synchronize:  # divided before anything is added, so that no sum can overflow
            torch.div(grad.detach(), self.comm.size, out=view)
        elif grad is not view:  # it is where gradients accumulate, or are set to zero
            view.copy_(grad)
        del grad  # its memory is free before anything is sent
        parameter.grad = view
        if self.synchronize:
            self._came.add(parameter)
            self._left[bucket] -= 1
            if self.overlap:
                self._send()

    def _send(self) -> None:
        """Start to reduce full buckets, in their order: all ranks must make the same calls."""
        while len(self._works) < len(self.buckets) and not self._left[len(self._works)]:
            flat = self._flat[len(self._works)]
            self._works.append(self.comm.all_reduce(flat, out=flat, async_op=True))

    def _begin(self) -> None:
        """Everything as it is before a backward pass."""
        self._left = [len(bucket.names) for bucket in self.buckets]
        self._works: list[Work] = []
        self._came: set[Tensor] = set()
        self._end_is_queued = False
        self._step_is_over = True

    def _start(self, *_: Tensor) -> None:
        """A backward pass begins, and shall end in `backward_done`: the outer one, not those that
        reentrant checkpoints have within it."""
        self._step_is_over = False
        if self.synchronize and not self._end_is_queued:
            self._end_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_done)

    def backward_done(self) -> None:
        """Runs when the backward pass is over: waits until all buckets have travelled.

        Raises RuntimeError where a gradient has not come.
        """
        missing = [name for p, (name, _, _) in self._home.items() if p not in self._came]
        if self._came and missing:
            rank, names = self.comm.rank, ", ".join(missing)
            remedy = "freeze what the loss does not use"
            raise RuntimeError(f"rank {rank}: no gradient came for {names}: {remedy}")
        if self._came:  # else it was a backward pass to somewhere else, as of torch.autograd.grad
            self._send()
            for work in self._works:
                work.wait()
            self._travelled = [work.span for work in self._works]
        self._begin()

    @property
    def timeline(self) -> Timeline:
        """When this rank computed in its last step, and when its buckets travelled."""
        rank, began = self.comm.rank, self._began
        last, spans = began, list[Span]()
        for kind, name, stamp in self._stamps:
            if spans and (spans[-1].kind, spans[-1].name) == (kind, name):  # weight, then bias
                spans[-1] = replace(spans[-1], end=stamp - began)
            else:
                spans.append(Span(rank, kind, name, last - began, stamp - began))
            last = stamp
        for k, (start, end) in enumerate(self._travelled):
            spans.append(Span(rank, "reduce", f"bucket {k}", start - began, end - began))
        return Timeline(tuple(spans))

    def _lay_out(self, names: Sequence[str], parameters: list[nn.Parameter]) -> None:
        """Memory for a bucket, and a hook on each of its parameters."""
        # A hook that held its replica would keep both alive until the garbage collector comes by.
        watched = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            replica = watched()
            if replica is None:
                raise RuntimeError("this replica is gone: keep what replicate(…) returned")
            replica.gradient_ready(parameter)

        numels = [parameter.numel() for parameter in parameters]
        flat = parameters[0].new_zeros(sum(numels))
        views = flat.split(numels)
        for name, parameter, view in zip(names, parameters, views, strict=True):
            self._home[parameter] = name, len(self._flat), view.view_as(parameter)
            if parameter in _HOOKS:  # of an earlier replica
                _HOOKS[parameter].remove()
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        self._flat.append(flat)

    def _check(self) -> None:
        """Raises an error if this replica can no longer keep its promise."""
        named = self.module.named_parameters()
        changed = [name for name, p in named if p.requires_grad != (p in self._home)]
        if changed:
            names = ", ".join(changed)
            raise RuntimeError(f"{names} frozen or thawed since replicate(…): replicate again")
        if self._came:
            ended = "the last backward pass ended with an error while gradients travelled"
            raise RuntimeError(f"{ended}: call replicate(…) again, on all ranks")


def replicate(
    module: nn.Module,
    comm: Comm,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
) -> Replica:
    """The module as one of `comm.size` replicas, as DistributedDataParallel makes them.

    Rank 0's weights and buffers are on every rank now, and the mean gradient is there after every
    backward pass.

    bucket_bytes: gradients travel in buckets of at most this size
    overlap: a bucket leaves as soon as it is complete; False waits for the whole backward pass

    >>> from labutils import world
    >>> def program(rank):
    ...     replica = replicate(nn.Linear(3, 1), rank.comm("dp"))
    ...     replica(torch.full((1, 3), float(rank.rank))).sum().backward()
    ...     return replica.module.weight.grad.tolist()
    >>> with world.World(4) as four:
    ...     four.run(program)[3]  # the mean of 0, 1, 2 and 3
    [[1.5, 1.5, 1.5]]

    Cost: each rank sends 2(N−1)/N of the gradients' bytes per step, a ring all-reduce of each
    bucket, and at the start its part of a broadcast of every tensor, down a tree. The buckets are
    the gradients' own memory.
    Invariant: equal to one device with the whole batch, up to rounding, where ranks have equally
    many examples (else see `share`); the same bits on all ranks, so replicas never drift apart.
    Source: S. Li et al., PyTorch Distributed, 2006.15704, sections 3.2 and 4.
    """
    units.instance(module, nn.Module, "replicate")
    return Replica(module, comm, bucket_bytes, overlap)


def _grouped(trained: dict[str, nn.Parameter], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets: what is reduced together has one dtype and one device."""
    kinds: dict[tuple, dict[str, int]] = {}
    for name, parameter in trained.items():
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter.nbytes
    grouped: tuple[Bucket, ...] = ()
    for (dtype, _), sizes in kinds.items():
        grouped += buckets(sizes, bucket_bytes, itemsize=dtype.itemsize)
    return grouped


def _broadcast(module: nn.Module, comm: Comm) -> None:
    """Rank 0's parameters and buffers into those of every rank."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        value = tensor.detach()
        try:
            value.copy_(comm.broadcast(value))
        except MismatchError as error:
            remedy = "build the same module everywhere"
            raise MismatchError(f"{name!r} is not alike on all ranks: {remedy}\n{error}") from None
