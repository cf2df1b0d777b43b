"""Wrong answers to the exercises of `data_parallel`."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labutils import collectives, world
from wrong_answers import Wrong


def _trainable_only(module: nn.Module, comm: world.Comm) -> None:
    def average(parameter: Tensor) -> None:
        parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size)

    for parameter in module.parameters():
        if parameter.requires_grad:
            comm.broadcast(parameter, out=parameter)
            parameter.register_post_accumulate_grad_hook(average)


def _never_waits(parameter: Tensor, comm: world.Comm) -> None:
    parameter.grad /= comm.size
    comm.all_reduce(parameter.grad, out=parameter.grad, async_op=True)


def _divides_too_early(parameter: Tensor, comm: world.Comm) -> None:
    comm.all_reduce(parameter.grad, out=parameter.grad, async_op=True)
    parameter.grad /= comm.size


def _thaws(module: nn.Module, comm: world.Comm) -> None:
    """A hook needs a parameter that requires a gradient."""
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    _hooked(_MEAN)(module, comm)


def _tensor_hook_that_writes(module: nn.Module, comm: world.Comm) -> None:
    def write(gradient: Tensor, parameter: Tensor) -> None:
        parameter.grad = comm.all_reduce(gradient) / comm.size

    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter)
        parameter.register_hook(functools.partial(write, parameter=parameter))


def _the_first_alone(module: nn.Module, comm: world.Comm) -> None:
    """The first gradient leaves in its hook, all others in the last one."""
    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter)
    trained, came = [p for p in module.parameters() if p.requires_grad], []

    def average(parameter: Tensor) -> None:
        came.append(parameter)
        leaving = [parameter] * (len(came) == 1)
        if len(came) == len(trained):
            leaving = came[1:]
        for each in leaving:
            each.grad.copy_(comm.all_reduce(each.grad) / comm.size)
        if len(came) == len(trained):
            came.clear()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(average)


def _seeds_everything(length: int, rank: int, size: int, epoch: int) -> list[int]:
    torch.manual_seed(epoch)
    order = torch.randperm(length).tolist()
    return (order * size)[: -(-length // size) * size][rank::size]


def _rotated(length: int, rank: int, size: int, epoch: int) -> list[int]:
    order = list(range(length))
    random.Random(0).shuffle(order)
    order = order[epoch % length :] + order[: epoch % length]
    return (order * size)[: -(-length // size) * size][rank::size]


def _reversed_in_turn(length: int, rank: int, size: int, epoch: int) -> list[int]:
    order = list(range(length))
    random.Random(epoch // 2).shuffle(order)
    order = order[::-1] if epoch % 2 else order
    return (order * size)[: -(-length // size) * size][rank::size]


def _two_orders(length: int, rank: int, size: int, epoch: int) -> list[int]:
    return _deal()(length, rank, size, epoch % 2)


def _remembers(draw: Callable[[int], list[int]]) -> Callable:
    """What one process draws for an epoch it keeps; another process draws something else."""
    orders: dict[tuple[int, int], list[int]] = {}

    def attempt(length: int, rank: int, size: int, epoch: int) -> list[int]:
        if (length, epoch) not in orders:
            orders[length, epoch] = draw(length)
        return (orders[length, epoch] * size)[: -(-length // size) * size][rank::size]

    return attempt


def _one_more(length: int, rank: int, size: int, epoch: int) -> list[int]:
    share, order = length // size + 1, list(range(length))
    random.Random(epoch).shuffle(order)
    return (order * (size + 1))[rank * share : (rank + 1) * share]


def _filled_with_0(length: int, rank: int, size: int, epoch: int) -> list[int]:
    order = list(range(length))
    random.Random(epoch).shuffle(order)
    return (order + [0] * (-length % size))[rank::size]


def _cut_then_shuffled(length: int, rank: int, size: int, epoch: int) -> list[int]:
    mine = ([*range(length)] * size)[: -(-length // size) * size][rank::size]
    random.Random(epoch).shuffle(mine)
    return mine


def _deal(
    *,
    by_rank: bool = False,
    by_epoch: bool = True,
    pad: bool = True,
    drop: bool = False,
    mine: bool = True,
    seeded: bool = True,
) -> Callable:
    """A sampler with its slips switched on one at a time."""

    def attempt(length: int, rank: int, size: int, epoch: int) -> list[int]:
        order = list(range(length))
        (random.Random(epoch * by_epoch + 1000 * rank * by_rank) if seeded else random).shuffle(
            order
        )
        if pad:
            order = (order * size)[: -(-length // size) * size]
        if drop:
            order = order[: length // size * size]
        return order[rank::size] if mine else order

    return attempt


def _hooked(hook: Callable, *, broadcast: bool = True) -> Callable:
    """A module whose parameters call `hook(parameter, comm)` when their gradient is there."""

    def attempt(module: nn.Module, comm: world.Comm) -> None:
        def ready(parameter: Tensor) -> None:
            hook(parameter, comm)

        for parameter in module.parameters():
            if broadcast:
                comm.broadcast(parameter, out=parameter)
            parameter.register_post_accumulate_grad_hook(ready)

    return attempt


def _all_at_the_end(module: nn.Module, comm: world.Comm) -> None:
    """Waits until every gradient is there, and reduces them then."""
    parameters, ready = list(module.parameters()), []

    def hook(parameter: Tensor) -> None:
        ready.append(parameter)
        if len(ready) == len(parameters):
            for each in parameters:
                each.grad.copy_(comm.all_reduce(each.grad) / comm.size)
            ready.clear()

    for parameter in parameters:
        comm.broadcast(parameter, out=parameter)
        parameter.register_post_accumulate_grad_hook(hook)


def _broadcast_lost(module: nn.Module, comm: world.Comm) -> None:
    for parameter in module.parameters():
        comm.broadcast(parameter.data)
    _hooked(_MEAN, broadcast=False)(module, comm)


def _into_grad(value: Callable[[Tensor, world.Comm], Tensor]) -> Callable:
    return lambda parameter, comm: parameter.grad.copy_(value(parameter, comm))


def _mean_of_weights(parameter: Tensor, comm: world.Comm) -> None:
    parameter.data.copy_(comm.all_reduce(parameter.data) / comm.size)


def _everybody_to_everybody(parameter: Tensor, comm: world.Comm) -> Tensor:
    return comm.all_gather(parameter.grad.flatten()).view(comm.size, *parameter.shape).mean(0)


_MEAN = _into_grad(lambda parameter, comm: comm.all_reduce(parameter.grad) / comm.size)


def _returning(module: nn.Module, comm: world.Comm) -> None:
    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter)
        parameter.register_post_accumulate_grad_hook(
            lambda p: p.grad.copy_(comm.all_reduce(p.grad) / comm.size)
        )


class _Buckets:
    """The wrapper of the bug hunt, with its slips switched on one at a time."""

    def __init__(
        self,
        module: nn.Module,
        comm: world.Comm,
        *,
        bucket_bytes: int,
        broadcast: bool = True,
        flush: bool = True,
        rearm: bool = True,
        quiet: bool = True,
        flat: bool = True,
        late: bool = False,
        lossy: bool = False,
    ) -> None:
        self.module = module
        self.comm = comm
        self.bucket_bytes = bucket_bytes
        self.sync = True
        self.flush_last = flush
        self.rearm = rearm
        self.quiet = quiet
        self.flat = flat
        self.late = late
        self.lossy = lossy
        self.waiting: list[Tensor] = []
        self.seen, self.count = 0, len(list(module.parameters()))
        for parameter in module.parameters():
            if broadcast:
                comm.broadcast(parameter, out=parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter: Tensor) -> None:
        if not self.sync and self.quiet:
            if self.lossy:
                parameter.grad = None
            return
        self.waiting.append(parameter)
        self.seen += 1
        last = self.flush_last and self.seen == self.count
        full = sum(p.nbytes for p in self.waiting) >= self.bucket_bytes and not self.late
        if full or last:
            self.flush()
        if last and self.rearm:
            self.seen = 0

    def flush(self) -> None:
        groups = [self.waiting] if self.flat else [[p] for p in self.waiting]
        for group in groups:
            flat = (
                self.comm.all_reduce(torch.cat([p.grad.flatten() for p in group])) / self.comm.size
            )
            for p, mean in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad.copy_(mean.view_as(p))
        self.waiting = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)


class _SendsAgain(_Buckets):
    """What has left in a step goes again with each bucket that follows."""

    left: tuple[Tensor, ...] = ()

    def flush(self) -> None:
        leaving = tuple(self.waiting)
        self.waiting = [*self.left, *leaving]
        super().flush()
        self.left = (*self.left, *leaving) if self.seen < self.count else ()


class _OneByOneLater(_Buckets):
    """Nothing is missing any more after the first step, so each gradient goes alone."""

    stepped = False

    def ready(self, parameter: Tensor) -> None:
        self.bucket_bytes = 0 if self.stepped else self.bucket_bytes
        super().ready(parameter)
        self.stepped = self.stepped or self.seen == 0


class _WaitsForTheFirst(_Buckets):
    """Takes the parameter that was registered first for the one that comes last."""

    def ready(self, parameter: Tensor) -> None:
        self.count = -1
        super().ready(parameter)
        if self.sync and self.waiting and parameter is next(self.module.parameters()):
            self.flush()


class _LeavesWithTheNext(_Buckets):
    """The last bucket leaves when the module is called again: after the optimizer's step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, flush=False)

    def __call__(self, x: Tensor) -> Tensor:
        if self.waiting:
            self.flush()
        return super().__call__(x)


class _AveragedTwice(_Buckets):
    def flush(self) -> None:
        for parameter in self.waiting:
            parameter.grad /= self.comm.size
        super().flush()


class _ReducesWeights(_Buckets):
    def flush(self) -> None:
        for parameter in self.waiting:
            parameter.data.copy_(self.comm.all_reduce(parameter.data) / self.comm.size)
        self.waiting = []


class _StaysQuiet(_Buckets):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        yield
        self.sync = True


WRONG = {
    "data_parallel/sampler": (
        Wrong("everybody takes everything", _deal(mine=False), "nobody works twice", "for nothing"),
        Wrong(
            "every rank shuffles for itself",
            _deal(by_rank=True),
            "nobody works twice",
            "must not depend on the rank",
        ),
        Wrong(
            "the tail is dropped",
            _deal(pad=False, drop=True),
            "everything is seen",
            "The tail is dropped",
        ),
        Wrong(
            "a seed of epoch times rank",
            lambda length, rank, size, epoch: _deal()(length, rank, size, epoch * rank),
            "nobody works twice",
            "must not depend on the rank",
        ),
        Wrong(
            "drawn with replacement",
            lambda length, rank, size, epoch: random.Random(epoch).choices(
                range(length), k=-(-length // size) * size
            )[rank::size],
            "nobody works twice",
            "a permutation has each once",
        ),
        Wrong("unequal shares", _deal(pad=False), "equal shares", "gone home"),
        Wrong(
            "the same order in every epoch",
            _deal(by_epoch=False),
            "a new order in every epoch",
            "set_epoch",
        ),
        Wrong(
            "cut first, then shuffled",
            _cut_then_shuffled,
            "a new order in every epoch",
            "shuffle all examples first",
        ),
        Wrong(
            "one order, rotated",
            _rotated,
            "a new order in every epoch",
            "A rotation is no new order",
        ),
        Wrong(
            "every second epoch backwards",
            _reversed_in_turn,
            "a new order in every epoch",
            "or reversed",
        ),
        Wrong("two orders in turn", _two_orders, "a new order in every epoch", "a copy"),
        Wrong(
            "seeds torch's own generator",
            _seeds_everything,
            "a new order in every epoch",
            "one of your own",
        ),
        Wrong(
            "remembers what Python drew",
            _remembers(lambda length: random.sample(range(length), length)),
            "a new order in every epoch",
            "in a process of its own",
        ),
        Wrong(
            "remembers what NumPy drew",
            _remembers(lambda length: np.random.permutation(length).tolist()),  # noqa: NPY002
            "a new order in every epoch",
            "in a process of its own",
        ),
        Wrong(
            "remembers what torch drew",
            _remembers(lambda length: torch.randperm(length).tolist()),
            "a new order in every epoch",
            "in a process of its own",
        ),
        Wrong("example 0 fills up", _filled_with_0, "nobody works twice", "should be spread"),
        Wrong("one more than needed", _one_more, "nobody works twice", "where N divides it"),
        Wrong(
            "never shuffled",
            lambda length, rank, size, epoch: [
                i % length for i in range(rank, -(-length // size) * size, size)
            ],
            "a new order in every epoch",
            "a copy",
        ),
    ),
    "data_parallel/hooks": (
        Wrong("frozen weights left alone", _trainable_only, "a frozen layer", "all the same"),
        Wrong(
            "never waits",
            _hooked(_never_waits),
            "the gradient of the whole batch",
            "nobody has waited for 6 calls",
        ),
        Wrong(
            "divides too early",
            _hooked(_divides_too_early),
            "the gradient of the whole batch",
            "Wait before you read or write",
        ),
        Wrong("frozen weights thawed", _thaws, "a frozen layer", "frozen no more"),
        Wrong(
            "a tensor's hook that writes",
            _tensor_hook_that_writes,
            "the gradient of the whole batch",
            "before autograd adds",
        ),
        Wrong("a hook for each parameter", _hooked(_MEAN), "a frozen layer", "no hook for it"),
        Wrong(
            "a hook that returns a tensor",
            _returning,
            "the gradient of the whole batch",
            "def without return",
        ),
        Wrong(
            "gradients in float32",
            _hooked(_into_grad(lambda p, comm: comm.all_reduce(p.grad.float()) / comm.size)),
            "the gradient of the whole batch",
            "in the dtype that they have",
        ),
        Wrong("no broadcast", _hooked(_MEAN, broadcast=False), "equal starts", "stay apart"),
        Wrong("the broadcast is lost", _broadcast_lost, "equal starts", "stay apart"),
        Wrong(
            "the mean of the weights",
            _hooked(_mean_of_weights),
            "the gradient of the whole batch",
            "The hook is given the *parameter*",
        ),
        Wrong(
            "the parameter for its gradient",
            _hooked(_into_grad(lambda p, comm: comm.all_reduce(p.detach()) / comm.size)),
            "the gradient of the whole batch",
            "not its gradient",
        ),
        Wrong(
            "the result is lost",
            _hooked(lambda p, comm: comm.all_reduce(p.grad)),
            "the gradient of the whole batch",
            "write the result back",
        ),
        Wrong(
            "sum",
            _hooked(_into_grad(lambda p, comm: comm.all_reduce(p.grad))),
            "the gradient of the whole batch",
            "All-reduce sums",
        ),
        Wrong(
            "averaged twice",
            _hooked(_into_grad(lambda p, comm: comm.all_reduce(p.grad / comm.size) / comm.size)),
            "the gradient of the whole batch",
            "Divided twice",
        ),
        Wrong(
            "through rank 0",
            _hooked(
                _into_grad(lambda p, comm: collectives.all_reduce_naive(p.grad, comm) / comm.size)
            ),
            "bytes sent",
            "through one rank",
        ),
        Wrong(
            "everybody to everybody",
            _hooked(_into_grad(_everybody_to_everybody)),
            "bytes sent",
            "whole gradient",
        ),
        Wrong(
            "the first alone leaves early",
            _the_first_alone,
            "during the backward pass",
            "have long been ready",
        ),
        Wrong(
            "all at the end", _all_at_the_end, "during the backward pass", "have long been ready"
        ),
    ),
    "data_parallel/bug-hunt": (
        Wrong(
            "the one of the lab",
            functools.partial(_Buckets, broadcast=False, flush=False, quiet=False),
            "equal starts",
            "stay apart",
        ),
        Wrong(
            "the last bucket waits forever",
            functools.partial(_Buckets, flush=False),
            "the last bucket",
            "still waits",
        ),
        Wrong(
            "the last bucket leaves in the next step",
            _LeavesWithTheNext,
            "the last bucket",
            "still waits",
        ),
        Wrong(
            "waits for the parameter registered first",
            _WaitsForTheFirst,
            "the last bucket",
            "order of arrival",
        ),
        Wrong("averaged twice", _AveragedTwice, "full buckets", "Divided twice"),
        Wrong(
            "the mean of the weights",
            _ReducesWeights,
            "full buckets",
            "The hook is given the *parameter*",
        ),
        Wrong(
            "counts once only",
            functools.partial(_Buckets, rearm=False),
            "step after step",
            "the next backward pass",
        ),
        Wrong(
            "a message for each parameter",
            functools.partial(_Buckets, flat=False),
            "few messages",
            "one flat tensor",
        ),
        Wrong("sends what has left", _SendsAgain, "few messages", "empty the bucket"),
        Wrong(
            "a message for each parameter from the second step on",
            _OneByOneLater,
            "few messages",
            "in every step",
        ),
        Wrong(
            "one bucket at the end",
            functools.partial(_Buckets, late=True),
            "during the backward pass",
            "have long been ready",
        ),
        Wrong(
            "reduces in every micro-batch",
            functools.partial(_Buckets, quiet=False),
            "accumulation",
            "reduced 3 times",
        ),
        Wrong("quiet for ever after an error", _StaysQuiet, "after an error", "in a `finally`"),
        Wrong(
            "forgets what was not reduced",
            functools.partial(_Buckets, lossy=True),
            "accumulation",
            "add up in .grad",
        ),
    ),
}
