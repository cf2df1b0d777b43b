"""Deal out the data, reduce gradients as they come, and repair a wrapper that passed its test."""

import collections
import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labutils import collectives, data_parallel, world
from labutils.teach.exercises import Exercise, Failed, Property, _ranks

# ── who gets which examples ──────────────────────────────────────────────────────────────────────

_DEALS = [(12, 4), (10, 4), (7, 3), (5, 1), (3, 2), (1, 4), (2, 5)]  # also fewer than ranks


def _examples(count: int) -> str:
    return f"{count} example{'s' * (count != 1)}"


def _indices(part: Any, length: int) -> list[int] | None:
    """The indices that a rank got, whatever they are kept in; None if they are none."""
    try:
        indices = [operator.index(i) for i in part]
    except (TypeError, ValueError):
        return None
    return indices if all(0 <= i < length for i in indices) else None


def _dealt(attempt: Callable, length: int, size: int, epoch: int = 0) -> list[list[int]]:
    parts = []
    for rank in range(size):
        given = attempt(length, rank, size, epoch)
        indices = _indices(given, length)
        if indices is None:
            raise Failed(
                f"{_examples(length)} on {_ranks.count(size)}: rank {rank} got {given!r}",
                f"Return a list of indices, 0 … {length - 1}.",
            )
        parts.append(indices)
    return parts


def _repeated(parts: list[list[int]], length: int) -> tuple[str, str] | None:
    spare = -length % len(parts)  # what equal shares need on top
    dealt = collections.Counter(itertools.chain(*parts))
    repeated = dealt.total() - len(dealt)
    if length + spare < dealt.total() < length * len(parts) and len(dealt) == length:
        return (
            f"{dealt.total()} examples are dealt out, {length + spare} are enough",
            "Each rank needs ⌈length / N⌉ of them: length / N where N divides it.",
        )
    if repeated > spare and any(len(set(part)) < len(part) <= length for part in parts):
        return (
            f"{repeated} examples come twice or more often, some of them to one rank",
            "Drawn at random, an example may come again and another one never. Shuffle: a "
            "permutation has each once.",
        )
    if repeated > spare:
        return (
            f"{repeated} examples come twice or more often, at most {spare} must",
            "Ranks that see the same examples compute the same gradient: the mean is right, "
            "and the work was for nothing. "
            "All ranks must cut *one* permutation, so its seed must not depend on the rank.",
        )
    often, times = max(dealt.items(), key=operator.itemgetter(1), default=(0, 0))
    if len(dealt) == length and times > (enough := -(-(length + spare) // length)):
        return (
            f"example {often} comes {times} times, where {enough} are enough",
            "What is dealt out again should be spread: take the permutation's first ones, each "
            "once more.",
        )
    return None


def _missing(parts: list[list[int]], length: int) -> tuple[str, str] | None:
    if missing := sorted(set(range(length)) - set(itertools.chain(*parts))):
        return (
            f"nobody gets {missing}",
            "The tail is dropped. "
            "Fill the last round up with examples that have been dealt out already.",
        )
    return None


def _unequal(parts: list[list[int]], length: int) -> tuple[str, str] | None:
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1:
        return (
            f"shares of {', '.join(map(str, lengths))}",
            "A rank with one batch more waits in its all-reduce for ranks that have gone home. "
            "Give all the same number, ⌈length / N⌉.",
        )
    return None


def _dealt_without(attempt: Callable, fault: Callable) -> str:
    for (length, size), epoch in itertools.product(_DEALS, (0, 3)):
        if found := fault(_dealt(attempt, length, size, epoch), length):
            case = f"{_examples(length)} on {_ranks.count(size)}" + ", epoch 3" * bool(epoch)
            raise Failed(f"{case}: {found[0]}", found[1])
    return f"{len(_DEALS)} cases"


def _neighbors(parts: list[list[int]]) -> set[frozenset[int]]:
    """Who stands beside whom when the ranks read in turn."""
    order = list(itertools.chain(*zip(*parts, strict=True)))
    return {frozenset(pair) for pair in itertools.pairwise([*order, order[0]])}


def _still_together(parts: list[list[int]]) -> float:
    """The share of a rank's examples that come right after their neighbor among all examples."""
    pairs = [pair for part in parts for pair in itertools.pairwise(part)]
    return sum(abs(before - after) == 1 for before, after in pairs) / len(pairs)


def _global_draws() -> dict[str, tuple[Any, Any]]:
    """Of each generator from which everybody draws: what its seed made, and how far it has come."""
    python = random.getstate()[1]
    numpys: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch's generator": (torch.initial_seed(), torch.get_rng_state().tolist()),
        "the generator of random": (python[:-1], python[-1]),
        "the generator of numpy.random": (numpys[1].tolist(), numpys[2]),
    }


@contextmanager
def _seeded_by_the_check() -> Iterator[None]:
    """Seeds that no attempt takes; afterwards Python's and NumPy's generators are as they were.

    Each has drawn once: it makes its numbers in blocks, and the first lies behind.
    """
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    for seed, draw in (
        (random.seed, random.random),
        (np.random.seed, np.random.random),
        (torch.manual_seed, lambda: torch.rand(1)),
    ):
        seed(748_159_263)
        draw()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002


def _shuffled(attempt: Callable) -> str:
    with _seeded_by_the_check():
        return _anew_in_every_epoch(attempt)


def _no_draw_remembered(case: str, draws: list[dict[str, tuple[Any, Any]]]) -> None:
    """Raise Failed where calls drew what nothing had seeded, and a call like them drew nothing.

    draws: before the calls, after them, and after the other one
    """
    for name in draws[0]:
        (key, before), (same, after), later = (drawn[name] for drawn in draws)
        if key == same and before != after and later == (same, after):
            raise Failed(
                f"{case}: the order is drawn from {name}, and nothing in the call has seeded it",
                "Every rank makes this call in a process of its own, where that generator is at "
                "another place, also if you remember what it drew: each rank would cut another "
                "order. Take a generator of your own, seeded by the epoch.",
            )


def _anew_in_every_epoch(attempt: Callable) -> str:
    length, size = 64, 4
    case, draws = f"{length} examples on {size} ranks", [_global_draws()]
    epochs = [_dealt(attempt, length, size, epoch) for epoch in range(5)]
    first, second, *_ = epochs
    draws.append(_global_draws())
    again = _dealt(attempt, length, size, 0)
    draws.append(_global_draws())
    _no_draw_remembered(case, draws)
    if first != again:
        raise Failed(
            f"{case}: two calls for epoch 0 differ",
            "Every rank makes this call in a process of its own, so it must come out alike: "
            "take a generator seeded by the epoch, not the global one.",
        )
    for (i, before), (k, after) in itertools.combinations(enumerate(epochs), 2):
        if before != after:
            continue
        raise Failed(
            f"{case}: epochs {i} and {k} are the same",
            "The order must depend on the epoch (PyTorch's set_epoch), or every epoch is a copy.",
        )
    if any(set(before) == set(after) for before, after in zip(first, second, strict=True)):
        raise Failed(
            f"{case}: a rank reads the same {len(first[0])} examples in epochs 0 and 1, "
            "in another order",
            "Who works with whom should change too: shuffle all examples first, then cut.",
        )
    _well_mixed(case, epochs)
    if draws[0]["torch's generator"][0] != draws[1]["torch's generator"][0]:
        raise Failed(
            f"{case}: the call has seeded the generator from which everybody draws",
            "All ranks seed it alike, and their dropout then drops the same units. Take one of "
            "your own, torch.Generator().manual_seed(epoch).",
        )
    return "epochs differ, calls agree"


def _well_mixed(case: str, epochs: list[list[list[int]]]) -> None:
    """Raise Failed where examples stay with their neighbors, in an epoch or from one to the next.

    epochs: the examples of each rank, for each epoch
    """
    first, length = epochs[0], sum(map(len, epochs[0]))
    if any(part == sorted(part) for part in first):
        raise Failed(f"{case}: not shuffled", "Shuffle before you cut.")
    if _still_together(first) > 0.5:
        raise Failed(
            f"{case}: most examples still follow their neighbor",
            "Blocks were shuffled, and what is in a block was not. Neighbors are often alike: "
            "shuffle the examples themselves.",
        )
    for (i, one), (k, other) in itertools.combinations(enumerate(map(_neighbors, epochs)), 2):
        if len(one & other) > length // 2:
            raise Failed(
                f"{case}: epoch {k} has the order of epoch {i}, begun at another place or reversed",
                "A rotation is no new order: the same examples meet again. Shuffle in every epoch.",
            )


SAMPLER = Exercise(
    id="data_parallel/sampler",
    reference=lambda length, rank, size, epoch: data_parallel.sampler(
        length, rank, size, epoch=epoch
    ),
    properties=(
        Property("nobody works twice", _dealt_without, fault=_repeated),
        Property("everything is seen", _dealt_without, fault=_missing),
        Property("equal shares", _dealt_without, fault=_unequal),
        Property("a new order in every epoch", _shuffled),
    ),
    hints=(
        "All ranks make the same permutation of range(length), from a generator seeded by the "
        "epoch. Then each takes every N-th element, from its own on.",
        "Before you cut, repeat the permutation until it has ⌈length / N⌉ · N elements: "
        "then N divides it. (One more round is not always enough: 1 example on 4 ranks.)",
    ),
)

# ── ranks for the wrappers ───────────────────────────────────────────────────────────────────────


_SAME_CALLS = (
    "All ranks must make the same collective calls in the same order, once for each bucket."
)


_RETURNS = (
    "Your hook returns a tensor, as a lambda of one expression does: copy_() returns what it "
    "wrote. Write the hook as a def without return."
)


class _Mark(torch.autograd.Function):
    """Passes x through; its backward leaves a mark in the books, between before and after."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: world.Comm) -> Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.comm.record("mark"):
            ctx.comm.barrier()
        return gradient, None


class _Net(nn.Module):
    """Three layers, different on every rank.

    2 and 4 divide their sizes, so that a ring's bytes are the same for any grouping.
    With `reordered` the first layer is registered last.
    """

    def __init__(self, seed: int, comm: world.Comm | None = None, reordered: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(8, width, dtype=torch.float64) for width in (8, 8, 4)
        )
        self.comm = comm
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) / 4
                )
        if reordered:
            first = self.first
            del self.first
            self.first = first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.comm is not None and self.comm.size > 1:
            x = _Mark.apply(x, self.comm)
        return self.third(self.second(x).tanh())


def _rows(n: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """What each rank learns from in one micro-batch: four rows of numbers and their targets."""
    draw = torch.Generator().manual_seed(100 + step)
    return list(
        zip(
            torch.randn(n, 4, 8, generator=draw, dtype=torch.float64),
            torch.randn(n, 4, 4, generator=draw, dtype=torch.float64),
            strict=True,
        )
    )


def _whole(n: int, step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks."""
    x, y = (torch.cat(side) for side in zip(*_rows(n, step), strict=True))
    return x, y


def _loss(net: Callable, rows: tuple[Tensor, Tensor]) -> Tensor:
    return (net(rows[0]) - rows[1]).square().mean()


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in net.named_parameters()
    }


def _exact(net: nn.Module) -> dict[str, Tensor]:
    """The gradients after a backward pass through all of the network."""
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def _called(made: Any, module: nn.Module) -> Any:
    """The wrapper that an attempt made, or the module where it returned none, or handles."""
    return made if callable(made) or hasattr(made, "no_sync") else module


class _Seen:
    """What came of an attempt on every rank: weights before and after, gradients, the books.

    steps, micro: how many steps of how many micro-batches it trained
    interrupted: whether Ctrl-C ended a first no_sync()
    reordered: whether the first layer was registered last
    """

    def __init__(
        self,
        attempt: Callable,
        n: int,
        steps: int = 1,
        micro: int = 1,
        *,
        interrupted: bool = False,
        reordered: bool = False,
    ) -> None:
        self.n, self.steps, self.micro = n, steps, micro
        self.case = _ranks.count(n) + (f", {micro} micro-batches" if micro > 1 else "")
        self.case += ", the first layer registered last" if reordered else ""

        def program(rank: world.Rank) -> tuple:
            comm = rank.comm("dp")
            module = _Net(rank.rank, comm, reordered)
            net = _called(attempt(module, comm), module)
            if interrupted:
                with suppress(KeyboardInterrupt), net.no_sync():
                    raise KeyboardInterrupt
            start, steps = _weights(module), list[dict[str, Tensor | None]]()
            for step in range(self.steps):
                module.zero_grad()
                for k in range(self.micro):
                    last = k + 1 == self.micro
                    with nullcontext() if last else net.no_sync():
                        (_loss(net, _rows(n, step * micro + k)[rank.rank]) / micro).backward()
                    if under_way := len(rank._pending):
                        return start, steps, under_way
                steps.append(_gradients(module))
            return start, steps, _weights(module)

        try:
            results = _ranks.run(n, self.case, program, _SAME_CALLS)
        except Failed as failure:
            if "hooks should return None" in str(failure):
                raise Failed(str(failure), _RETURNS) from None
            raise
        self.start, self.gradients, self.end = (list(side) for side in zip(*results, strict=True))
        self._all_waited_for()
        # In program order; "mark" stands where a backward pass comes to the first layer.
        self.sent = [
            [(event.op, event.sent) for event in events if event.to is not None]
            for events in _ranks.world_of(n).trace.ranks
        ]

    def _all_waited_for(self) -> None:
        """Raise Failed where a rank's weights at the end are a number: that of calls under way."""
        if late := max((end for end in self.end if isinstance(end, int)), default=0):
            raise Failed(
                f"{self.case}: the backward pass is over, and nobody has waited for {late} "
                f"call{'s' * (late > 1)} of yours",
                "With async_op=True you get a Work, and the result is there when its wait() comes "
                "back. Wait before you read or write the tensor, and before backward() is over.",
            )

    @property
    def busiest(self) -> int:
        """Bytes that the busiest rank sent."""
        return max(sum(nbytes for _, nbytes in sent) for sent in self.sent)

    def right(self, step: int) -> dict[str, Tensor]:
        """The gradient of the whole batch on one device."""
        net = _Net(0)
        for k in range(self.micro):
            (_loss(net, _whole(self.n, step * self.micro + k)) / self.micro).backward()
        return _exact(net)

    def alone(self, rank: int, step: int) -> dict[str, Tensor]:
        """The gradient that one rank would have by itself."""
        net = _Net(0)
        for k in range(self.micro):
            (_loss(net, _rows(self.n, step * self.micro + k)[rank]) / self.micro).backward()
        return _exact(net)


def _starts(attempt: Callable) -> str:
    for n in (2, 3):
        seen, first = _Seen(attempt, n, 0), _weights(_Net(0))
        for rank, weights in enumerate(seen.start):
            for name, weight in weights.items():
                if torch.equal(weight, first[name]):
                    continue
                if rank and torch.equal(weight, _weights(_Net(rank))[name]):
                    raise Failed(
                        f"{n} ranks: rank {rank} starts from weights of its own ({name})",
                        "Replicas that start apart stay apart: the mean gradient moves all of "
                        "them alike. Broadcast rank 0's parameters before the first step.",
                    )
                for other in range(1, n):
                    if torch.equal(weight, _weights(_Net(other))[name]):
                        raise Failed(
                            f"{n} ranks: {name} on rank {rank} is that of rank {other}",
                            "All ranks begin with rank 0's weights: broadcast with src=0.",
                        )
                raise Failed(
                    f"{n} ranks: {name} on rank {rank} is not rank 0's",
                    "comm.broadcast returns the tensor of rank 0: copy it into the parameter, "
                    "in place.",
                )
    return "2 and 3 ranks"


def _mean(attempt: Callable, n: int, *shape: int, hint: str = "", **options: bool) -> None:
    """Raise Failed, and say why, unless all ranks end all steps with the whole batch's gradient.

    `shape` and `options` are those of `_Seen`; `hint` is what a rank's own gradient means here.
    """
    seen = _Seen(attempt, n, *shape, **options)
    for rank in range(n):
        start, end = seen.start[rank], seen.end[rank]
        if moved := [name for name in end if not torch.equal(end[name], start[name])]:
            why = (
                "The hook is given the *parameter*, and you reduced that. "
                "What has to travel is parameter.grad."
            )
            step, gradient = end[moved[0]] - start[moved[0]], seen.gradients[rank][-1][moved[0]]
            if gradient is not None and _along(step, gradient) < -0.999:
                why = (
                    "It went along its gradient. A hook leaves the mean in .grad, and no more: "
                    "the optimizer steps after the backward pass."
                )
            raise Failed(f"{seen.case}: backward() has changed {moved[0]} on rank {rank}", why)
        for step, gradients in enumerate(seen.gradients[rank]):
            right = seen.right(step)
            if wrong := [name for name in right if not _near(gradients[name], right[name])]:
                message, why = _why(seen, rank, step, wrong, hint)
                at = f"step {step + 1}, " if seen.steps > 1 else ""
                raise Failed(f"{seen.case}, {at}rank {rank}: {message}", why)
            for name, gradient in gradients.items():
                if not torch.equal(gradient, seen.gradients[0][step][name]):
                    raise Failed(
                        f"{seen.case}: the gradient of {name} has different bits on different "
                        "ranks",
                        "Replicas that differ in a bit drift apart. "
                        "Let all of them take the result of one all-reduce.",
                    )


def _means(attempt: Callable) -> str:
    for n in (1, 2, 3):
        _mean(attempt, n)
    _mean(attempt, 2, 2, hint="A hook serves every backward pass, not the first alone.")
    return "1, 2 and 3 ranks, and a second step"


_RESULT_LOST = (
    "Something was sent, and .grad is what it was. The hook is given the *parameter*: "
    "reduce parameter.grad, and write the result back into it."
)


def _along(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two tensors."""
    return torch.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


def _near(found: Tensor | None, right: Tensor, rtol: float = 1e-9, atol: float = 1e-13) -> bool:
    return found is not None and torch.allclose(found, right, rtol=rtol, atol=atol)


def _why(seen: _Seen, rank: int, step: int, wrong: list[str], hint: str) -> tuple[str, str]:
    """What these gradients are, which are not the mean, and the most likely reason for it."""
    name, n = wrong[0], seen.n
    found, right = seen.gradients[rank][step][name], seen.right(step)[name]
    weight = _weights(_Net(0))[name]
    is_ = functools.partial(_near, found, rtol=1e-6, atol=1e-12)
    if found is None:
        return (
            f"{name} has no gradient",
            "Leave the mean in parameter.grad, in place: parameter.grad.copy_(…).",
        )
    if _near(found, right, rtol=1e-4, atol=1e-6):
        return (
            f"the first digits of the {name} gradient are right",
            "A shorter format on the way: reduce gradients in the dtype that they have.",
        )
    if n > 1 and is_(seen.alone(0, step)[name]) and _near(seen.gradients[1][step][name], found):
        return (
            f"all ranks have the {name} gradient of rank 0",
            "A broadcast hands out one rank's gradient. The mean needs those of all: all_reduce.",
        )
    if is_(seen.alone(rank, step)[name]):
        every = len(wrong) == len(seen.gradients[rank][step])
        several = f" and {len(wrong) - 1} more still hold" if len(wrong) > 1 else " still holds"
        sent = sum(nbytes for _, nbytes in seen.sent[rank])
        if every and not step and sent > (n - 1) * 8 * _numbers():
            hint = _RESULT_LOST
        return (
            f"{'every parameter still holds' if every else name + several} the rank's own gradient",
            hint or "Does every parameter have a hook, and does the hook reduce parameter.grad?",
        )
    if is_(n * right):
        return (
            f"the gradient is {n} times too large",
            "All-reduce sums. The batch's gradient is the mean: divide by the number of ranks.",
        )
    if is_(right / n):
        return (
            f"the gradient is {n} times too small",
            "Divided twice: once is enough, by the number of ranks.",
        )
    if is_(weight) or is_(n * weight):
        return (
            f"the gradient of {name} is made of weights",
            "The hook is given the *parameter*, not its gradient: reduce parameter.grad.",
        )
    each = torch.stack([seen.alone(r, step)[name] for r in range(n)])
    return _what_else(name, found, right, each) or (
        f"{name} does not hold the gradient of the whole batch",
        hint or "It is the mean over ranks of what each rank computes for itself.",
    )


def _what_else(name: str, found: Tensor, right: Tensor, each: Tensor) -> tuple[str, str] | None:
    """What a gradient is that is near the right one, or made of the ranks' own in another way."""
    if (found - right).norm() < 0.02 * right.norm():
        return (
            f"the first two digits of the {name} gradient are right",
            "A shorter format on the way: reduce gradients in the dtype that they have.",
        )
    if len(each) > 1 and _near(found, each.amax(0), rtol=1e-6, atol=1e-12):
        return (
            f"{name} holds the largest of all ranks' gradients, number for number",
            'The mean is a sum, divided: all_reduce without "max".',
        )
    if len(each) == 1 and _near(found, 2 * right, rtol=1e-6, atol=1e-12):
        return (
            f"the gradient of {name} is there twice",
            "One rank has nothing to add up. A hook of register_hook runs before autograd adds "
            "the gradient to .grad: what you write there stays under it. Return the mean, or take "
            "register_post_accumulate_grad_hook.",
        )
    factor = ((found * right).sum() / right.square().sum()).item()
    if factor and _near(found, factor * right, rtol=1e-6, atol=1e-12):
        return (
            f"the gradient of {name} is {factor:.3g} times what it should be",
            "Divide the sum by the number of ranks, comm.size, and by nothing else.",
        )
    return None


def _numbers() -> int:
    return sum(parameter.numel() for parameter in _Net(0).parameters())


def _ring(n: int) -> int:
    """Bytes that each rank sends in one ring all-reduce of all gradients."""
    ring = collectives.sent("all_reduce_ring", nbytes=8 * _numbers(), n=n, itemsize=8)
    return max(ring.by("rank").values())


def _bytes(attempt: Callable) -> str:
    S = 8 * _numbers()
    for n in (2, 4):
        a_step, ring = _Seen(attempt, n, 2).busiest - _Seen(attempt, n, 1).busiest, _ring(n)
        if a_step <= ring:
            continue
        why = f"{a_step / ring:.3g} times too much: reduce each gradient once, by comm.all_reduce."
        if n > 2 and a_step >= (n - 1) * S:
            why = (
                "Everything passes through one rank, or every rank sends its whole gradient to "
                "all others. comm.all_reduce is a ring."
            )
        raise Failed(
            f"{n} ranks, gradients of {S:,} B: the busiest rank sends {a_step:,} B a step, "
            f"a ring {ring:,} B",
            why,
        )
    return "2·(N − 1)/N·S a step"


def _early(attempt: Callable) -> str:
    start = len(_Seen(attempt, 2, 0).sent[0])
    sent = _Seen(attempt, 2).sent[0][start:]
    mark = next(place for place, (op, _) in enumerate(sent) if op == "mark")
    left = sum(nbytes for _, nbytes in sent[:mark])
    ready = sum(8 * p.numel() for name, p in _Net(0).named_parameters() if "first" not in name)
    if left < ready / 3:  # a bucket may still wait for more
        told = f"only {left} B of {ready} have left" if left else "no gradient has left"
        raise Failed(
            f"2 ranks: when the backward pass comes to the first layer, {told}",
            "The last layers' gradients have long been ready. Let them go in their hooks, "
            "while autograd works on the layers before.",
        )
    return "the last layers leave while the first are computed"


def _frozen(attempt: Callable) -> str:
    """The first layer learns nothing: no gradient, and rank 0's weights all the same."""
    case = "2 ranks, the first layer frozen"

    def program(rank: world.Rank) -> tuple:
        module = _Net(rank.rank, rank.comm("dp"))
        module.first.requires_grad_(False)
        made = attempt(module, rank.comm("dp"))
        _loss(_called(made, module), _rows(2, 0)[rank.rank]).backward()
        return _weights(module), _gradients(module)

    hint = "A frozen parameter gets no gradient: no hook for it, and rank 0's weights all the same."
    try:
        (first, _), (second, gradients) = _ranks.run(2, case, program, _SAME_CALLS)
    except Failed as failure:
        raise Failed(str(failure), hint) from None
    for name, gradient in gradients.items():
        if name.startswith("first") and gradient is not None and gradient.any():
            raise Failed(
                f"{case}: {name} has a gradient",
                "It is frozen no more, and an optimizer would change it. " + hint,
            )
    for name, weight in second.items():
        if not torch.equal(weight, first[name]):
            raise Failed(f"{case}: {name} on rank 1 is not rank 0's", hint)
    net = _Net(0)
    _loss(net, _whole(2, 0)).backward()
    for name, right in _exact(net).items():
        if not name.startswith("first") and not _near(gradients[name], right):
            raise Failed(f"{case}: {name} does not hold the gradient of the whole batch", hint)
    return "a frozen layer"


# ── reduce as you go ─────────────────────────────────────────────────────────────────────────────


_BATCH = "the gradient of the whole batch"

HOOKS = Exercise(
    id="data_parallel/hooks",
    reference=lambda module, comm: data_parallel.replicate(module, comm, bucket_bytes=1),
    properties=(
        Property("equal starts", _starts),
        Property(_BATCH, _means),
        Property("bytes sent", _bytes),
        Property("during the backward pass", _early),
        Property("a frozen layer", _frozen),
    ),
    hints=(
        "Before the first step: for every parameter, comm.broadcast(parameter, out=parameter). "
        "Ranks draw their weights from different seeds.",
        "parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter) "
        "as soon as parameter.grad is complete.",
        "In the hook: parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size). "
        "The hook gets the parameter; what travels is its .grad.",
    ),
)

# ── bug hunt: buckets ────────────────────────────────────────────────────────────────────────────

_BUCKET, _HUGE = 600, 1 << 20  # bytes: some layers fit, and everything does


def _with(attempt: Callable, bucket_bytes: int) -> Callable:
    return lambda module, comm: attempt(module, comm, bucket_bytes=bucket_bytes)


def _full(attempt: Callable) -> str:
    for nbytes in (1, 8 * _numbers()):
        _mean(_with(attempt, nbytes), 2)
    return "buckets that are filled to the brim"


def _last(attempt: Callable) -> str:
    hint = (
        "The backward pass is over, and a bucket that was not full still waits: "
        "no gradient will come to push it out. Let the last one go as it is."
    )
    for nbytes in (_BUCKET, _HUGE):
        _mean(_with(attempt, nbytes), 3, hint=hint)
    hint = (
        "A bucket left before the last gradient had come, and the rest still waits. "
        "The order of registration says nothing about the order of arrival: count."
    )
    _mean(_with(attempt, _HUGE), 2, hint=hint, reordered=True)
    return "buckets that are not full"


def _frozen_in_buckets(attempt: Callable) -> str:
    for nbytes in (_BUCKET, _HUGE):  # the second is never full: who counts on frozen ones waits
        _frozen(_with(attempt, nbytes))
    return "a frozen layer"


def _again(attempt: Callable) -> str:
    hint = "The first step is right. What has to be as it was when the next backward pass begins?"
    for steps in (2, 3):
        _mean(_with(attempt, _BUCKET), 2, steps, hint=hint)
    return "3 steps"


def _few(attempt: Callable) -> str:
    for nbytes, most in ((_HUGE, 1), (_BUCKET, 3)):
        runs = [_Seen(_with(attempt, nbytes), 2, steps) for steps in range(3)]
        for step, (before, after) in enumerate(itertools.pairwise(runs), start=1):
            case = f"2 ranks, buckets of {nbytes:,} B, step {step}"
            counts = [sum(bool(sent) for _, sent in run.sent[0]) for run in (before, after)]
            messages = counts[1] - counts[0]
            if messages > 2 * most:
                raise Failed(
                    f"{case}: {messages} messages, "
                    f"{most} bucket{'s' * (most > 1)} need{'s' * (most == 1)} {2 * most}",
                    "Each message costs a latency. Put the gradients of a bucket into one flat "
                    "tensor, and reduce that, in every step.",
                )
            if (nbytes_sent := after.busiest - before.busiest) > _ring(2):
                raise Failed(
                    f"{case}: {nbytes_sent:,} B sent, a ring sends {_ring(2):,} B",
                    "The values are right, since the mean of a mean is itself. But gradients that "
                    "have left go again: empty the bucket when it has been sent.",
                )
    return "one all-reduce for each bucket, 2 steps"


def _accumulating(attempt: Callable) -> str:
    k = 3
    hint = (
        "Inside no_sync() gradients add up in .grad on their own rank; "
        "the first backward pass outside reduces the whole sum."
    )
    for nbytes in (1, _BUCKET):
        _mean(_with(attempt, nbytes), 2, 2, k, hint=hint)
    once, a_step = (
        _Seen(_with(attempt, _BUCKET), 2, 2, micro).busiest
        - _Seen(_with(attempt, _BUCKET), 2, 1, micro).busiest
        for micro in (1, k)
    )
    if a_step > once:
        raise Failed(
            f"2 ranks, {k} micro-batches: {a_step:,} B sent in a step, {once:,} B are enough",
            "The values are right, since a mean of means is one. "
            f"But gradients were reduced {a_step / once:.3g} times: inside no_sync() nobody sends.",
        )
    return f"{k} micro-batches, one reduction"


def _nested(attempt: Callable) -> str:
    case = "2 ranks, no_sync() inside no_sync()"

    def program(rank: world.Rank) -> None:
        comm = rank.comm("dp")
        net = attempt(_Net(rank.rank, None), comm, bucket_bytes=_BUCKET)
        with net.no_sync():
            for inner in (net.no_sync(), nullcontext()):
                with inner:
                    if isinstance(inner, nullcontext) or both:
                        with comm.record("mark"):
                            comm.barrier()
                        _loss(net, _rows(2, 0)[rank.rank]).backward()

    def sends() -> int:
        _ranks.run(2, case, program, _SAME_CALLS)
        events = [(e.op, e.sent) for e in _ranks.world_of(2).trace.ranks[0] if e.to is not None]
        marks = [place for place, (op, _) in enumerate(events) if op == "mark"]
        first = next(k for k in marks if k + 1 not in marks)  # a barrier is several events
        return sum(nbytes for op, nbytes in events[first + 1 :] if op != "mark")

    both = False  # the inner block computes nothing
    if sent := sends():
        raise Failed(
            f"{case}: {sent:,} B sent after the inner block, inside the outer one",
            "The inner block ends and switches sending on for the outer one as well. Set the flag "
            "back to what it was before, not to True.",
        )
    both = True
    if sent := sends():
        raise Failed(
            f"{case}: {sent:,} B sent inside the inner block",
            "A second no_sync() turns the first one round. Set the flag, and set it back to what "
            "it was before.",
        )
    return "the inner block leaves the outer one as it was"


def _interrupted(attempt: Callable) -> str:
    hint = (
        "Somebody pressed Ctrl-C inside no_sync(), and from then on nothing is reduced. "
        "Set the flag back in a `finally`."
    )
    _mean(_with(attempt, _BUCKET), 2, hint=hint, interrupted=True)
    return "no_sync() ends with its block, whatever happens in it"


REPAIR = Exercise(
    id="data_parallel/bug-hunt",
    untouched="3f1cfdab",
    reference=data_parallel.replicate,
    properties=(
        Property("equal starts", lambda attempt: _starts(_with(attempt, _HUGE))),
        Property("full buckets", _full),
        Property("the last bucket", _last),
        Property("step after step", _again),
        Property("few messages", _few),
        Property("during the backward pass", lambda attempt: _early(_with(attempt, _BUCKET))),
        Property("accumulation", _accumulating),
        Property("after an error", _interrupted),
        Property("no_sync in no_sync", _nested),
        Property("a frozen layer", _frozen_in_buckets),
    ),
    hints=(
        "Ask three questions: do all ranks start with the same weights? "
        "What becomes of a bucket that is not full when the backward pass ends? "
        "What does no_sync() do?",
        "You know how many parameters there are. When the last one has come, flush whatever waits.",
        "no_sync sets a flag, and the hook returns at once while it is set; "
        ".grad goes on adding up. Set it back in a `finally`, to what it was before.",
    ),
)

EXERCISES = (SAMPLER, HOOKS, REPAIR)
