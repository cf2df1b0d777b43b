"""Right answers to the exercises of `checkpointing`, in other styles than the reference."""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from wrong_answers.checkpointing import _by_hooks

from labutils import checkpointing
from labutils.teach.exercises import checkpointing as exercises

# ── segments ──────────────────────────────────────────────────────────────────────────────────────


def _one_by_one(n: int, k: int) -> Iterator[list]:
    """A generator of lists; the first sweep drops a value when it passes the next one."""
    size = n // k
    for i in range(n - size):
        yield ["forward", i]
        if i % size:
            yield ["drop", i]
    for last in range(n, 0, -size):
        yield from (["record", i] for i in range(last - size, last))
        yield from (["backward", i] for i in range(last - 1, last - size - 1, -1))
        if last > size:
            yield ["drop", last - size]


def _in_numpy(n: int, k: int) -> list[tuple[str, np.int64]]:
    return [(op, np.int64(i)) for op, i in _one_by_one(n, k)]


# ── the fewest evaluations ────────────────────────────────────────────────────────────────────────


@functools.cache
def _without_a_value(n: int, s: int) -> float:
    """The other way to end: without a snapshot only one stage can be reversed."""
    if n == 1:
        return 1
    if s == 0:
        return float("inf")
    ways = [m + _without_a_value(n - m, s - 1) + _without_a_value(m, s) for m in range(1, n)]
    return min(ways) if s > 1 else n * (n + 1) // 2


def _from_below(n: int, snapshots: int) -> np.int64:
    """A table, filled from short chains to long ones."""
    table = np.zeros((n + 1, snapshots + 1), np.int64)
    table[:, 1] = np.arange(n + 1) * np.arange(1, n + 2) // 2
    for s in range(2, snapshots + 1):
        table[1, s] = 1
        for length in range(2, n + 1):
            m = np.arange(1, length)
            table[length, s] = (m + table[length - m, s - 1] + table[m, s]).min()
    return table[n, snapshots]


def _by_reach(n: int, snapshots: int) -> int:
    """The closed form as a sum: how many stages can be advanced over at most r times."""
    total, r, reached = n, 0, 1
    while reached < n:
        r += 1
        more = _choose(snapshots + r, snapshots) - reached
        total += r * min(more, n - reached)
        reached += more
    return total


def _choose(n: int, k: int) -> int:
    return 1 if k == 0 else _choose(n - 1, k - 1) * n // k


# ── checkpoint ────────────────────────────────────────────────────────────────────────────────────


class _Again(torch.autograd.Function):
    """Returns gradients of everything, instead of accumulating them by itself."""

    @staticmethod
    def forward(ctx, fn, x, *weights):
        ctx.fn, ctx.x, ctx.weights = fn, x, weights
        ctx.before = torch.get_rng_state()
        return fn(x)

    @staticmethod
    def backward(ctx, slope):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.before)
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            y = ctx.fn(x)
        torch.set_rng_state(now)
        return None, *torch.autograd.grad(y, (x, *ctx.weights), slope)


def _hands_in_the_weights(fn: Callable, x: Tensor) -> Tensor:
    return _Again.apply(fn, x, *fn.parameters())


def _anchored(fn: Callable, x: Tensor) -> Tensor:
    return exercises.textbook("fork")(fn, x)


# ── a test for checkpoint ─────────────────────────────────────────────────────────────────────────


def _trained(step: Callable, seed: int) -> list[Tensor]:
    """Losses and weights of a few steps of two layers with dropout between them."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6))
    last, seen = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 1)), []
    both = nn.ModuleList([first, last])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    for _ in range(3):
        loss = last(step(first, torch.randn(5, 6, requires_grad=True))).square().mean()
        loss.backward()
        seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(weight.detach().clone() for weight in both.parameters())]


def _trains_differently(checkpoint: Callable) -> Tensor:
    plain, found = (_trained(step, 5) for step in (lambda fn, x: fn(x), checkpoint))
    return torch.tensor(not all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)))


def _looks_at_the_generator(checkpoint: Callable) -> np.bool_:
    outcomes = []
    for step in (lambda fn, x: fn(x), checkpoint):
        torch.manual_seed(7)
        fn = nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.5), nn.Linear(30, 3))
        x = torch.randn(4, 3, requires_grad=True)
        y = step(fn, x)
        torch.rand(3)
        y.sum().backward()
        grads = [torch.zeros(1) if p.grad is None else p.grad for p in fn.parameters()]
        outcomes.append(torch.cat([x.grad.flatten(), *(g.flatten() for g in grads)]))
        outcomes.append(torch.get_rng_state())
    return np.bool_(
        outcomes[0].shape != outcomes[2].shape
        or not torch.equal(outcomes[0], outcomes[2])
        or not torch.equal(outcomes[1], outcomes[3])
    )


def _by_numbers(n, k):
    """A recursion from segment to segment; stages are tensors without dims."""
    size = n // k

    def segment(first):
        inside, last = range(first, first + size), first + size == n
        for i in inside:
            yield ("record" if last else "forward", i)
            if not last and i > first:
                yield ("drop", i)
        if not last:
            yield from segment(first + size)
            yield from (("record", i) for i in inside)
        yield from (("backward", i) for i in reversed(inside))
        if first:
            yield ("drop", first)

    return [(operation, torch.tensor(i)) for operation, i in segment(0)]


def _reads_tokens(checkpoint):
    """The input of its model is one of words, without a gradient."""
    found = []
    for call in (lambda fn, x: fn(x), checkpoint):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Embedding(20, 32), nn.Dropout(0.3), nn.Linear(32, 4))
        hidden = call(net, torch.arange(20).view(4, 5))
        nn.functional.dropout(hidden).square().sum().backward()
        found.append([*(p.grad for p in net.parameters()), torch.rand(1)])
    plain, mine = found
    return not all(y is not None and torch.equal(x, y) for x, y in zip(plain, mine, strict=True))


RIGHT = {
    "checkpointing/segments": {
        "a recursion, numbers as tensors": _by_numbers,
        "a generator of lists": _one_by_one,
        "NumPy integers": _in_numpy,
        "steps of the library": lambda n, k: list(checkpointing.segments(n, k).steps),
        "a tuple": lambda n, k: tuple(map(tuple, _one_by_one(n, k))),
    },
    "checkpointing/fewest-evaluations": {
        "ends without a snapshot": _without_a_value,
        "a table from below": _from_below,
        "by reach": _by_reach,
        "counted in the plan": lambda n, s: sum(checkpointing.binomial(n, s).evaluations),
    },
    "checkpointing/checkpoint": {
        "a Function that is given the weights": _hands_in_the_weights,
        "a Function with an anchor": _anchored,
        "torch's": lambda fn, x: torch_checkpoint(fn, x, use_reentrant=False),
        "slots, filled by hooks": functools.partial(_by_hooks, needs=False),
    },
    "checkpointing/bug-hunt": {
        "reads tokens": _reads_tokens,
        "trains for three steps": _trains_differently,
        "compares the generator's state": _looks_at_the_generator,
        "gradients and what comes next": lambda c: exercises.differs(c, dropout=0.2, after=True),
        "1 or 0": lambda c: int(exercises.is_broken(c)),
    },
}
