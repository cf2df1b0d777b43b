"""A module that is one of many alike: its gradients are averaged, bucket by bucket, while the backward pass still runs."""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from labutils import collectives
from labutils.data_parallel.buckets import BUCKET_BYTES, Bucket, buckets
from labutils.timeline import Span, Timeline
from labutils.world import Comm, MismatchError, Work

_HOOKS = (
    WeakTensorKeyDictionary()
)  # of each replicated parameter: the one hook that reduces its gradient


class Replica(nn.Module):
    """A module whose gradients, after each backward pass, are the mean over all ranks; made by `replicate`.

    Every bucket is one flat tensor, and the gradients are views of it: nothing is held twice, and nothing is copied after the reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        *,
        bucket_bytes: int,
        overlap: bool,
        find_unused: bool,
        static_graph: bool,
        forward_sync_buffers: bool,
        reduce_dtype: torch.dtype | None,
        algorithm: str,
    ) -> None:
        super().__init__()
        self.module, self.comm, self.overlap, self.find_unused, self.synchronize = (
            module,
            comm,
            overlap,
            find_unused,
            True,
        )
        self.static_graph, self.forward_sync_buffers, self.reduce_dtype, self.algorithm = (
            static_graph,
            forward_sync_buffers,
            reduce_dtype,
            algorithm,
        )
        self._named = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        if not self._named:
            raise ValueError(
                "no parameter of this module needs a gradient: there is nothing to reduce"
            )
        self.buckets = self._grouped(bucket_bytes)
        _broadcast(module, comm)
        self._frozen = {
            name: parameter
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        }
        self._flat: list[Tensor] = []
        self._home: dict[
            Tensor, tuple[str, int, Tensor]
        ] = {}  # of each parameter: its name, its bucket, and where in it its gradient lives
        for bucket in self.buckets:
            self._lay_out(bucket)
        self._times: dict[Tensor, int] | None = (
            None if static_graph else {}
        )  # how often a gradient comes in one backward pass, where not once
        self._began, self._stamps, self._travelled = 0.0, [], []
        self._buffers_may_differ = True
        self._begin()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        self._check()
        if self._over:
            self._began, self._stamps = time.perf_counter(), []
        self._sync_buffers()
        outputs = self.module(*args, **kwargs)
        self._stamps.append(("forward", "forward", time.perf_counter()))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(self._start)
        return outputs

    def _sync_buffers(self) -> None:
        """Rank 0's buffers on every rank, as one message, if this is the first forward pass since one that a reduction followed."""
        buffers = (
            [buffer for buffer in self.module.buffers() if buffer.numel()]
            if self.forward_sync_buffers and self._buffers_may_differ
            else []
        )
        self._buffers_may_differ = torch.is_grad_enabled() and self.synchronize
        if not buffers:
            return
        parts = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers]
        with self.comm.record("buffers"):
            joined = self.comm.broadcast(torch.cat(parts))
        if (
            self.comm.rank
        ):  # a graph that has saved one of them for its backward pass keeps its peace, as under DDP
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                for buffer, part in zip(
                    buffers, joined.split([part.numel() for part in parts]), strict=True
                ):
                    buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on their own rank; the first backward pass outside reduces the sum."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    def sit_out(self) -> None:
        """Takes part in what the others send in their next step, with nothing to add: for a rank that has no example left in this one."""
        self._sync_buffers()
        if self.synchronize:
            self._reduce(self._home)

    @property
    def timeline(self) -> Timeline:
        """When this rank computed in its last step, from the call of the module on, and when its buckets travelled."""
        began, last, spans = self._began, self._began, []
        for kind, name, stamp in self._stamps:
            if spans and (spans[-1].kind, spans[-1].name) == (
                kind,
                name,
            ):  # weight and bias of one layer
                spans[-1] = replace(spans[-1], end=stamp - began)
            else:
                spans.append(Span(self.comm.rank, kind, name, last - began, stamp - began))
            last = stamp
        travelled = [
            Span(self.comm.rank, "reduce", f"bucket {k}", start - began, end - began)
            for k, (start, end) in enumerate(self._travelled)
        ]
        return Timeline((*spans, *travelled))

    def _grouped(self, bucket_bytes: int) -> tuple[Bucket, ...]:
        """The buckets: what is reduced together has one dtype and one device."""
        kinds: dict[tuple, dict[str, int]] = {}
        for name, parameter in self._named.items():
            kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter.nbytes
        return tuple(
            bucket
            for (dtype, _), sizes in kinds.items()
            for bucket in buckets(sizes, bucket_bytes, itemsize=dtype.itemsize)
        )

    def _lay_out(self, bucket: Bucket) -> None:
        """Memory for a bucket, and a hook on each of its parameters, in place of one that an earlier replica may have left."""
        held = weakref.ref(
            self
        )  # a hook that held its replica would keep both alive, buckets and all, until the garbage collector comes by

        def hook(parameter: Tensor) -> None:
            replica = held()
            if replica is None:
                raise RuntimeError(
                    "this module has been replicated, and its replica is gone: keep what replicate(…) returned, and call that"
                )
            replica._ready(parameter)

        parameters = [self._named[name] for name in bucket.names]
        flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        for name, parameter, view in zip(
            bucket.names,
            parameters,
            flat.split([parameter.numel() for parameter in parameters]),
            strict=True,
        ):
            self._home[parameter] = name, len(self._flat), view.view_as(parameter)
            if parameter in _HOOKS:
                _HOOKS[parameter].remove()
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        self._flat.append(flat)

    def _check(self) -> None:
        """Raises an error if this replica can no longer keep its promise."""
        frozen = [name for name, parameter in self._named.items() if not parameter.requires_grad]
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if frozen or thawed:
            what = " and ".join(
                f"{', '.join(names)} {verb}"
                for names, verb in ((frozen, "frozen"), (thawed, "thawed"))
                if names
            )
            raise RuntimeError(
                f"since replicate(…): {what}; decide what is trained first, then replicate"
            )
        if self._came:
            raise RuntimeError(
                "the last backward pass ended with an error while gradients travelled: call replicate(…) again, on all ranks"
            )

    def _begin(self) -> None:
        """Everything as it is before a backward pass."""
        self._left = [len(bucket.names) for bucket in self.buckets]
        self._works: list[Work] = []
        self._came: dict[Tensor, int] = {}  # how often, in this backward pass
        self._under_way, self._over = False, True

    def _start(self, *_: Tensor) -> None:
        """A backward pass begins: see to it that it ends in `_finish`, however few gradients come."""
        self._over = False
        if self.synchronize and not self._under_way:
            self._under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _ready(self, parameter: Tensor) -> None:
        """A gradient has come: once it is complete, put it into its bucket, and let the bucket go if that was the last one."""
        name, bucket, _ = self._home[parameter]
        self._start()
        self._stamps.append(("backward", name.rpartition(".")[0] or name, time.perf_counter()))
        if not self.synchronize:
            return self._put(parameter)
        came = self._came[parameter] = self._came.get(parameter, 0) + 1
        if self._times is None:  # the first backward pass of a static graph only counts
            return
        times = self._times.get(parameter, 1)
        if came > times:
            remedy = (
                "this graph is not static"
                if self.static_graph
                else "give those use_reentrant=False, or pass static_graph=True if all steps are alike"
            )
            raise RuntimeError(
                f"the gradient of {name} comes {came} times in one backward pass, as from two reentrant checkpoints: {remedy}"
            )
        if came == times:
            self._put(parameter)
            self._left[bucket] -= 1
            if self.overlap:
                self._send(lambda: not self._left[len(self._works)])

    def _put(self, parameter: Tensor) -> None:
        """The gradient, as a view of its bucket. Divided before anything is added, so that a sum over many ranks cannot overflow."""
        _, _, view = self._home[parameter]
        if parameter.grad is None:
            view.zero_()
        elif self.synchronize:
            torch.div(parameter.grad.detach(), self.comm.size, out=view)
        elif (
            parameter.grad is not view
        ):  # it is one already where gradients accumulate, or are cleared to zero instead of None
            view.copy_(parameter.grad)
        parameter.grad = view

    def _send(self, may_go: Callable[[], bool]) -> None:
        """Start reducing buckets, always in their order: all ranks must make the same calls, whichever gradient comes first."""
        while len(self._works) < len(self.buckets) and may_go():
            flat = self._flat[len(self._works)]
            wire = flat if self.reduce_dtype is None else flat.to(self.reduce_dtype)
            self._works.append(
                self.comm.all_reduce(wire, algorithm=self.algorithm, out=wire, async_op=True)
            )

    def _finish(self) -> None:
        """The backward pass is over: every gradient must have come, or count as zero."""
        if self._came and self._times is None:
            self._times = dict(self._came)
            for parameter in self._came:
                self._put(parameter)
        missing = {
            parameter: name
            for parameter, (name, _, _) in self._home.items()
            if parameter not in self._came
        }
        if self._came and missing and not self.find_unused:
            raise RuntimeError(
                f"rank {self.comm.rank}: no gradient came for {', '.join(missing.values())}, and all ranks wait for it; "
                "freeze what the loss does not use, or pass find_unused=True"
            )
        if late := [
            name
            for parameter, (name, _, _) in self._home.items()
            if 0 < self._came.get(parameter, 0) < self._times.get(parameter, 1)
        ]:
            raise RuntimeError(
                f"rank {self.comm.rank}: {', '.join(late)} came less often than in the first backward pass: this graph is not static"
            )
        if (
            self._came or self.find_unused
        ):  # else it was a backward pass to somewhere else, as torch.autograd.grad makes one
            self._reduce(missing)
        self._begin()

    def _reduce(self, missing: Iterable[Tensor]) -> None:
        """Send what has not left, and wait for all of it. A parameter that no rank has a gradient for keeps None."""
        used = self._used() if self.find_unused else set(self._home)
        for parameter in missing:
            self._put(parameter)
        self._send(lambda: True)
        for work, flat in zip(self._works, self._flat, strict=True):
            wire = work.wait()
            if wire is not flat:
                flat.copy_(wire)
        self._travelled = [work.span for work in self._works]
        self._works = []
        for parameter in self._home.keys() - used:
            parameter.grad = None

    def _used(self) -> set[Tensor]:
        """The parameters that have a gradient on any rank."""
        here = torch.tensor(
            [parameter.grad is not None for parameter in self._home],
            dtype=torch.uint8,
            device=self._flat[0].device,
        )
        with self.comm.record("unused"):
            anywhere = self.comm.all_reduce(here, "max").tolist()
        return {parameter for parameter, used in zip(self._home, anywhere, strict=True) if used}


def replicate(
    module: nn.Module,
    comm: Comm,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
    find_unused: bool = False,
    static_graph: bool = False,
    forward_sync_buffers: bool = True,
    reduce_dtype: torch.dtype | None = None,
    algorithm: str = "ring",
) -> Replica:
    """The module as one of `comm.size` replicas: rank 0's weights on every rank now, and the mean gradient after every backward pass.

    Gradients travel in buckets of `bucket_bytes`; with `overlap` each leaves as soon as it is complete, without it after the backward pass. With
    `find_unused` a parameter may be without a gradient on some ranks, or on all. With `static_graph` a gradient may come several times in a
    backward pass, as from reentrant checkpoints of one layer: the first pass counts, and reduces at its end. With `forward_sync_buffers` rank 0's
    buffers, such as the statistics of a BatchNorm, are on all ranks before each forward pass, but for those that follow one under `no_sync` or
    `torch.no_grad`. `reduce_dtype`, such as torch.bfloat16, is what gradients travel and are added up in; they are kept in their own. `algorithm`
    is one of `collectives.ALL_REDUCES`: "halving_doubling" sends as much as the ring in fewer messages, where N is a power of two.

    Cost: each rank sends 2(N−1)/N of the gradients' bytes a step (`predict`), its part of a broadcast at the start (`predict_start`) and, if there
    are buffers, before a forward pass (`predict_buffers`). The buckets are the gradients' own memory; in another dtype what travels is held beside
    them, until it has arrived.
    Invariant: equal to one device with the whole batch, up to rounding, where ranks have equally many examples (else see `share`); the same bits on
    all ranks, so replicas never drift apart.
    Source: S. Li et al., PyTorch Distributed, 2006.15704, sections 3.2 and 4.
    """
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ValueError(
            f"gradients cannot be added up in {reduce_dtype}: use torch.bfloat16, torch.float32, or None for their own dtype"
        )
    if f"all_reduce_{algorithm}" not in collectives.ALL_REDUCES:
        names = ", ".join(name.removeprefix("all_reduce_") for name in collectives.ALL_REDUCES)
        raise ValueError(f"no all-reduce called {algorithm!r}: use one of {names}")
    return Replica(
        module,
        comm,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
        find_unused=find_unused,
        static_graph=static_graph,
        forward_sync_buffers=forward_sync_buffers,
        reduce_dtype=reduce_dtype,
        algorithm=algorithm,
    )


def _broadcast(module: nn.Module, comm: Comm) -> None:
    """Rank 0's parameters and buffers into those of every rank."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        value = tensor.detach()
        try:
            value.copy_(comm.broadcast(value.contiguous()))
        except MismatchError as error:
            raise MismatchError(
                f"{name!r} is not alike on all ranks: build the same module everywhere, then replicate it\n{error}"
            ) from None
