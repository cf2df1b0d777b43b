"""Wrong answers to the exercises of `start`."""

import torch
from torch import nn

from labutils import memory
from wrong_answers import Wrong


def tied_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The code of the lab: it meets a weight once for every module that holds it."""
    total = 0
    for module in model.modules():
        for p in module.parameters(recurse=False):
            tensors = [p, p.grad, *optimizer.state.get(p, {}).values()]
            total += sum(t.nbytes for t in tensors if t is not None)
    return total


def _stepwise(count):
    """A counter over the distinct parameters: `count(p, state)` bytes for each."""
    return lambda model, optimizer: sum(
        count(p, optimizer.state.get(p, {})) for p in model.parameters()
    )


def _first_over(capacity: int, *peaks: int) -> int | None:
    return next((step for step, peak in enumerate(peaks, 1) if peak > capacity), None)


WRONG = {
    "start/tokens-per-step": (
        Wrong(
            "counts samples",
            lambda micro_batch, accumulation, dp, seq_len: micro_batch * accumulation * dp,
            "one rank",
            "each of their tokens",
        ),
        Wrong(
            "forgets accumulation",
            lambda micro_batch, accumulation, dp, seq_len: micro_batch * dp * seq_len,
            "accumulation",
            "gradient accumulation",
        ),
        Wrong(
            "forgets the ranks",
            lambda micro_batch, accumulation, dp, seq_len: micro_batch * accumulation * seq_len,
            "many ranks",
            "different sequences",
        ),
        Wrong(
            "adds instead",
            lambda micro_batch, accumulation, dp, seq_len: (
                micro_batch * (accumulation + dp - 1) * seq_len
            ),
            "many ranks",
            "Every rank adds the same",
        ),
    ),
    "start/first-failing-step": (
        Wrong(
            "everything is alive at once",
            lambda weights, state, working, temporary, capacity: _first_over(
                capacity, 2 * weights + working, 2 * weights + state + working + temporary
            ),
            "enough memory",
            "Peaks do not add up",
        ),
        Wrong(
            "fails when it is full",
            lambda weights, state, working, temporary, capacity: memory.first_failing_step(
                weights, state, working, temporary, capacity - 1
            ),
            "enough memory",
            "exactly the capacity",
        ),
        Wrong(
            "state from the start",
            lambda weights, state, working, temporary, capacity: (
                1
                if max(weights + state + working, 2 * weights + state + temporary) > capacity
                else None
            ),
            "activations dominate",
            "When is optimizer state allocated?",
        ),
        Wrong(
            "every step is like the first",
            lambda weights, state, working, temporary, capacity: (
                1 if max(weights + working, 2 * weights + state + temporary) > capacity else None
            ),
            "activations dominate",
            "the second with it",
        ),
        Wrong(
            "the optimizer's step takes nothing",
            lambda weights, state, working, temporary, capacity: _first_over(
                capacity, weights + working, weights + state + working
            ),
            "model states dominate",
            "a peak too",
        ),
        Wrong(
            "forgets what step() needs for a moment",
            lambda weights, state, working, temporary, capacity: memory.first_failing_step(
                weights, state, working, 0, capacity
            ),
            "model states dominate",
            "temporary tensors",
        ),
    ),
    "start/bug-hunt-state-bytes": (
        Wrong(
            "walks over modules", tied_twice, "another model", "how often does your count meet it"
        ),
        Wrong(
            "sixteen bytes a parameter",
            _stepwise(lambda p, state: 16 * p.numel()),
            "after one step",
            "step counter",
        ),
        Wrong(
            "no gradients",
            _stepwise(lambda p, state: p.nbytes + sum(t.nbytes for t in state.values())),
            "after one step",
            "are the gradients in your count",
        ),
        Wrong(
            "counts what will be",
            _stepwise(lambda p, state: 16 * p.numel() + 4),
            "before the first step",
            "Nothing has been trained yet",
        ),
        Wrong(
            "four bytes for everything",
            _stepwise(
                lambda p, state: (
                    4
                    * (
                        p.numel()
                        + (p.numel() if p.grad is not None else 0)
                        + sum(t.numel() for t in state.values())
                    )
                )
            ),
            "the same in bf16",
            "2 bytes, not 4",
        ),
    ),
}
