"""Right answers to the exercises of `start` in other styles than the reference."""

import math

import numpy as np
import torch

from labutils import measure


def _moments(step, micro_batches, weights, state, working, temporary):
    """Walks through the step and writes down every moment."""
    kept, gradients, moments = (state if step > 1 else 0), 0, []
    for _ in range(micro_batches):
        moments.append(weights + kept + gradients + working)
        gradients = weights
    moments.append(weights + gradients + state + temporary)
    return max(moments)


def _by_hand(model, optimizer):
    """Tensors by their identity, whoever holds them."""
    alive = {}
    for p in model.parameters():
        alive[id(p)] = p
        if p.grad is not None:
            alive[id(p.grad)] = p.grad
    for state in optimizer.state.values():
        alive.update((id(t), t) for t in state.values() if torch.is_tensor(t))
    return sum(t.numel() * t.element_size() for t in alive.values())


def _storages(model, optimizer):
    """Every storage once, found by its address."""
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values()]
    alive = [t.untyped_storage() for t in weights + gradients + moments]
    return np.sum(list({storage.data_ptr(): storage.nbytes() for storage in alive}.values()))


def _seen(model, optimizer):
    """The lab's own code, with a set of what it has met."""
    total, seen = 0, set()
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p not in seen:
                seen.add(p)
                tensors = [p, p.grad, *optimizer.state.get(p, {}).values()]
                total += sum(t.nbytes for t in tensors if t is not None)
    return torch.tensor(total)


RIGHT = {
    "start/tokens-per-step": {
        "a product": lambda *sizes: math.prod(sizes),
        "a NumPy scalar": lambda *sizes: np.prod(sizes),
        "a tensor": lambda *sizes: torch.tensor(sizes).prod(),
        "a loop": lambda micro_batch, accumulation, dp, seq_len: sum(
            micro_batch * seq_len for _ in range(accumulation) for _ in range(dp)
        ),
    },
    "start/step-peak": {
        "moment by moment": _moments,
        "a NumPy scalar": lambda *args, **sizes: np.int64(_moments(*args, **sizes)),
        "a tensor": lambda *args, **sizes: torch.tensor(_moments(*args, **sizes)),
        "a float": lambda *args, **sizes: float(_moments(*args, **sizes)),
    },
    "start/bug-hunt-state-bytes": {
        "by identity": _by_hand,
        "every storage once, a NumPy scalar": _storages,
        "a set of what was seen, a tensor": _seen,
        "the library's own": lambda model, optimizer: measure.model_states(model, optimizer).total,
    },
}
