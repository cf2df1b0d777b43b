"""Wrong answers to the exercises of `start`."""

import torch
from torch import nn

from labutils import accumulation, memory
from wrong_answers import Wrong


def tied_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The code of the lab: it meets a weight once for every module that holds it."""
    total = 0
    for module in model.modules():
        for p in module.parameters(recurse=False):
            tensors = [p, p.grad, *optimizer.state.get(p, {}).values()]
            total += sum(t.nbytes for t in tensors if t is not None)
    return total


def _without_a_tied_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Knows of one place where a weight is tied."""
    total = 0
    for name, module in model.named_modules():
        tied = name == "head" and module.weight is model.tokens.weight
        for p in () if tied else module.parameters(recurse=False):
            tensors = [p, p.grad, *optimizer.state.get(p, {}).values()]
            total += sum(t.nbytes for t in tensors if t is not None)
    return total


def _stepwise(count):
    """A counter over the distinct parameters: `count(p, state)` bytes for each."""
    return lambda model, optimizer: sum(
        count(p, optimizer.state.get(p, {})) for p in model.parameters()
    )


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
        Wrong(
            "shares the batch out over the ranks",
            lambda micro_batch, accumulation, dp, seq_len: (
                micro_batch * accumulation * seq_len // dp
            ),
            "many ranks",
            "Every rank adds the same",
        ),
        Wrong(
            "the last micro-batch is not accumulated",
            lambda micro_batch, accumulation, dp, seq_len: (
                micro_batch * max(accumulation - 1, 1) * dp * seq_len
            ),
            "accumulation",
            "Every micro-batch adds the same",
        ),
        Wrong(
            "the last token predicts nothing",
            lambda *sizes: accumulation.tokens_per_step(*sizes[:3], sizes[3] - 1),
            "one rank",
            "what one rank reads",
        ),
        Wrong(
            "in thousands",
            lambda *sizes: accumulation.tokens_per_step(*sizes) / 1000,
            "one rank",
            "what one rank reads",
        ),
        Wrong(
            "every rank answers for all",
            lambda micro_batch, accumulation, dp, seq_len: (
                micro_batch * accumulation * dp**2 * seq_len
            ),
            "many ranks",
            "Every rank adds the same",
        ),
    ),
    "start/step-peak": (
        Wrong(
            "everything is alive at once",
            lambda step, micro_batches, weights, state, working, temporary: (
                2 * weights + state + working + temporary
            ),
            "the first step",
            "Not everything is alive at once",
        ),
        Wrong(
            "every step is like the first",
            lambda step, micro_batches, **sizes: memory.step_peak(1, micro_batches, **sizes),
            "later steps",
            "From step 2 on",
        ),
        Wrong(
            "accumulation costs nothing",
            lambda step, micro_batches, **sizes: memory.step_peak(step, 1, **sizes),
            "two micro-batches",
            "backward() adds to the gradients that are there",
        ),
        Wrong(
            "gradients of their own for each micro-batch",
            lambda step, micro_batches, weights, state, working, temporary: max(
                weights * micro_batches + state * (step > 1) + working,
                2 * weights + state + temporary,
            ),
            "many micro-batches",
            "share one set of gradients",
        ),
        Wrong(
            "activations of all micro-batches",
            lambda step, micro_batches, weights, state, working, temporary: memory.step_peak(
                step,
                min(micro_batches, 2),
                weights=weights,
                state=state,
                working=working + (micro_batches - min(micro_batches, 2)) * working,
                temporary=temporary,
            ),
            "many micro-batches",
            "frees its activations",
        ),
        Wrong(
            "the update takes nothing",
            lambda step, micro_batches, weights, state, working, temporary: (
                weights + state * (step > 1) + weights * (micro_batches > 1) + working
            ),
            "the update",
            "step() is a peak too",
        ),
        Wrong(
            "forgets what step() needs for a moment",
            lambda step, micro_batches, **sizes: memory.step_peak(
                step, micro_batches, **sizes | {"temporary": 0}
            ),
            "the update",
            "needs for a moment",
        ),
        Wrong(
            "gradients under every hill",
            lambda step, micro_batches, **sizes: memory.step_peak(step, 2, **sizes),
            "the first step",
            "no gradient lies under the hill",
        ),
        Wrong(
            "the optimizer's state comes with step 3",
            lambda step, micro_batches, **sizes: memory.step_peak(
                max(step - 1, 1), micro_batches, **sizes
            ),
            "later steps",
            "From step 2 on",
        ),
        Wrong(
            "what step() needs for a moment lies under the hill",
            lambda step, micro_batches, **sizes: memory.step_peak(
                step, micro_batches, **sizes | {"working": sizes["working"] + sizes["temporary"]}
            ),
            "the first step",
            "Not everything is alive at once",
        ),
    ),
    "start/bug-hunt-state-bytes": (
        Wrong(
            "walks over modules, a float",
            lambda model, optimizer: float(tied_twice(model, optimizer)),
            "another model",
            "how often does your count meet it",
        ),
        Wrong(
            "walks over modules", tied_twice, "another model", "how often does your count meet it"
        ),
        Wrong(
            "leaves out a tied head",
            _without_a_tied_head,
            "any module",
            "not only a head and an embedding",
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
        Wrong(
            "the weights alone",
            _stepwise(lambda p, state: p.nbytes),
            "after one step",
            "Alive are",
        ),
        Wrong(
            "a set of shapes",
            lambda model, optimizer: sum(
                {
                    p.shape: sum(
                        t.nbytes
                        for t in (p, p.grad, *optimizer.state.get(p, {}).values())
                        if t is not None
                    )
                    for p in model.parameters()
                }.values()
            ),
            "after one step",
            "Alive are",
        ),
        Wrong(
            "a set of names, and a tied weight has two",
            lambda model, optimizer: sum(
                t.nbytes
                for _, p in model.named_parameters(remove_duplicate=False)
                for t in (p, p.grad, *optimizer.state.get(p, {}).values())
                if t is not None
            ),
            "another model",
            "how often does your count meet it",
        ),
        Wrong(
            "leaves a tied weight out altogether",
            lambda model, optimizer: sum(
                t.nbytes
                for p in model.parameters()
                if sum(p is q for m in model.modules() for q in m._parameters.values()) == 1
                for t in (p, p.grad, *optimizer.state.get(p, {}).values())
                if t is not None
            ),
            "another model",
            "Alive are",
        ),
    ),
}
