"""Right answers to the exercises of `data_parallel`, in other styles than the reference."""

import contextlib
import functools
import hashlib
import itertools
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

# ── who gets which examples ──────────────────────────────────────────────────────────────────────


def _numpy(length, rank, size, epoch):
    order = np.random.default_rng(epoch).permutation(length)
    return np.resize(order, -(-length // size) * size)[rank::size]


def _generator(length, rank, size, epoch):
    order = random.Random(f"epoch {epoch}").sample(range(length), length)
    again = itertools.cycle(order)
    yield from itertools.islice(again, rank, -(-length // size) * size, size)


def _blocks(length, rank, size, epoch):
    """A block of neighbors per rank, as a tensor."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(7919 * epoch))
    each = -(-length // size)
    return order.repeat(size)[rank * each :][:each]


def _by_hashes(length, rank, size, epoch):
    """Sorted by what SHA-256 makes of epoch and index."""

    def digest(i):
        return hashlib.sha256(f"{epoch}/{i}".encode()).digest()

    order = sorted(range(length), key=digest)
    return [order[(rank + k * size) % length] for k in range(-(-length // size))]


def _seeded_and_put_back(length, rank, size, epoch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)
        order = torch.randperm(length).tolist()
    return [order[i % length] for i in range(rank, -(-length // size) * size, size)]


def _through_a_loader(length, rank, size, epoch):
    """PyTorch's sampler, read through a DataLoader, which draws a seed for its workers."""
    data = range(length)
    sampler = DistributedSampler(data, size, rank, shuffle=True, seed=7)
    sampler.set_epoch(epoch)
    return [int(i) for i in DataLoader(data, batch_size=None, sampler=sampler)]


# ── reduce as you go ─────────────────────────────────────────────────────────────────────────────


def _tensor_hooks(module, comm):
    """Hooks of the tensor, which return the gradient, where hooks after accumulation return None."""
    for parameter in module.parameters():
        parameter.data = comm.broadcast(parameter.data)
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: comm.all_reduce(gradient) / comm.size)


def _in_place(module, comm):
    def average(parameter):
        parameter.grad /= comm.size
        comm.all_reduce(parameter.grad, out=parameter.grad)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(comm.broadcast(parameter.detach().clone()))
    for parameter in filter(lambda p: p.requires_grad, module.parameters()):
        parameter.register_post_accumulate_grad_hook(average)


def _where_gradients_are_added(module, comm):
    """Hooks of the nodes of the graph that add to .grad, as in DDP."""
    module.nodes = []
    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter)
        if parameter.requires_grad:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

            def average(*_, parameter=parameter):
                parameter.grad = comm.all_reduce(parameter.grad).div_(comm.size)

            node.register_hook(average)
            module.nodes.append(node)  # or it is gone, with its hook


def _with_handles(module, comm):
    """Returns what the hooks can be removed by."""

    def average(parameter):
        parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size)

    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter)
    learning = filter(lambda parameter: parameter.requires_grad, module.parameters())
    return [parameter.register_post_accumulate_grad_hook(average) for parameter in learning]


class _Under(nn.Module):
    """A wrapper, whose reductions run while autograd goes on, and are awaited at the end."""

    def __init__(self, module, comm):
        super().__init__()
        self.module, self.comm, self.works = module, comm, []
        for parameter in module.parameters():
            comm.broadcast(parameter, out=parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.send))

    def send(self, parameter):
        if not self.works:
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        work = self.comm.all_reduce(parameter.grad, out=parameter.grad, async_op=True)
        self.works.append((work, parameter))

    def wait(self):
        for work, parameter in self.works:
            work.wait()
            parameter.grad.mul_(1 / self.comm.size)
        self.works = []

    def forward(self, x):
        return self.module(x)


# ── bug hunt: buckets ────────────────────────────────────────────────────────────────────────────


class _Counting:
    """Counts what is missing; a lambda in no_sync's place, by a stack that is closed."""

    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.most = module, comm, bucket_bytes
        self.parameters = {p for p in module.parameters() if p.requires_grad}
        self.missing, self.waiting, self.silent = set(self.parameters), [], 0
        for parameter in module.parameters():
            parameter.data.copy_(comm.broadcast(parameter.data))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        if self.silent:
            return
        self.waiting.append(parameter)
        self.missing.discard(parameter)
        if not self.missing or sum(p.nbytes for p in self.waiting) >= self.most:
            flat = torch.nn.utils.parameters_to_vector(p.grad for p in self.waiting)
            self.comm.all_reduce(flat, out=flat)
            parts = flat.split([p.numel() for p in self.waiting])
            for p, part in zip(self.waiting, parts, strict=True):
                p.grad = part.view(p.shape).div(self.comm.size)
            self.waiting = []
        if not self.missing:
            self.missing = set(self.parameters)

    def no_sync(self):
        self.silent += 1
        stack = contextlib.ExitStack()
        stack.callback(lambda: setattr(self, "silent", self.silent - 1))
        return stack

    def __call__(self, *args):
        return self.module(*args)


class _AtTheEnd(nn.Module):
    """Flushes what waits from a callback of autograd, when the backward pass is over."""

    def __init__(self, module, comm, bucket_bytes):
        super().__init__()
        self.module, self.comm, self.bucket_bytes = module, comm, bucket_bytes
        self.waiting, self.queued, self.sync = [], False, True
        for parameter in module.parameters():
            comm.broadcast(parameter.detach(), out=parameter.detach())
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        if not self.sync:
            return
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        if self.waiting and sum(p.nbytes for p in [*self.waiting, parameter]) > self.bucket_bytes:
            self.flush()
        self.waiting.append(parameter)

    def flush(self):
        mean = torch.cat([p.grad.flatten() for p in self.waiting]) / self.comm.size
        mean = self.comm.all_reduce(mean)
        for p in self.waiting:
            p.grad.copy_(mean[: p.numel()].view_as(p))
            mean = mean[p.numel() :]
        self.waiting.clear()

    def end(self):
        self.flush()
        self.queued = False

    @contextlib.contextmanager
    def no_sync(self):
        before, self.sync = self.sync, False
        try:
            yield self
        finally:
            self.sync = before

    def forward(self, x):
        return self.module(x)


class _Planned:
    """Buckets are fixed beforehand, and each leaves with the last of its parameters."""

    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.sync = module, comm, True
        self.buckets = [[]]
        for parameter in reversed(list(module.parameters())):
            comm.broadcast(parameter, out=parameter)
            if not parameter.requires_grad:
                continue
            if sum(p.nbytes for p in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.there, self.next = set(), 0

    def ready(self, parameter):
        if not self.sync:
            return
        self.there.add(parameter)
        while self.next < len(self.buckets) and self.there.issuperset(self.buckets[self.next]):
            bucket = self.buckets[self.next]
            flat = self.comm.all_reduce(torch.cat([p.grad.ravel() for p in bucket]))
            parts = (flat / self.comm.size).split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad = part.reshape(p.shape)
            self.next += 1
        if self.next == len(self.buckets):
            self.there, self.next = set(), 0

    @contextlib.contextmanager
    def no_sync(self):
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "sync", self.sync)
            self.sync = False
            yield

    def __call__(self, x):
        return self.module(x)


def _averaging(module, comm):
    """Weights of rank 0 in one message, gradients divided before they are added."""
    weights = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(comm.broadcast(weights.detach()), module.parameters())

    def average(parameter):
        comm.all_reduce(parameter.grad.div_(comm.size), out=parameter.grad)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)


class _Countdown:
    """Flushes when all that can learn has come; no callback."""

    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.room = module, comm, bucket_bytes
        self.bucket, self.quiet, self.come = [], 0, 0
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(comm.broadcast(parameter))
        self.learning = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.learning:
            parameter.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter):
        if self.quiet:
            return
        self.come += 1
        self.bucket.append(parameter.grad)
        everything = self.come % len(self.learning) == 0
        if everything or sum(g.nbytes for g in self.bucket) >= self.room:
            flat = torch.cat([g.flatten() for g in self.bucket])
            means = self.comm.all_reduce(flat).div_(self.comm.size)
            for g, mean in zip(
                self.bucket, means.split([g.numel() for g in self.bucket]), strict=True
            ):
                g.copy_(mean.view_as(g))
            self.bucket = []

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def __call__(self, *args):
        return self.module(*args)


RIGHT = {
    "data_parallel/sampler": {
        "NumPy's permutation, as an array": _numpy,
        "a generator": _generator,
        "sorted by hashes": _by_hashes,
        "through a DataLoader": _through_a_loader,
        "torch's generator, seeded and put back": _seeded_and_put_back,
        "blocks, as a tensor": _blocks,
        "a tuple of NumPy integers": lambda *case: tuple(_numpy(*case)),
    },
    "data_parallel/hooks": {
        "all weights in one message": _averaging,
        "hooks that return the gradient": _tensor_hooks,
        "divided first, in place": _in_place,
        "a wrapper that waits at the end": _Under,
        "handles come back": _with_handles,
        "hooks of the graph's nodes": _where_gradients_are_added,
    },
    "data_parallel/bug-hunt": {
        "a depth of silence": _Countdown,
        "counts what is missing": _Counting,
        "flushes from a callback": _AtTheEnd,
        "buckets fixed beforehand": _Planned,
    },
}
