"""Training with a choice of formats, from several seeds: the rig of lab 02."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils.precision import LossScaler, wide_products

Draw = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
"""A batch of so many rows: inputs and targets."""

ROWS, TEST_ROWS = 8, 16


def fp32_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy in nats, computed in fp32 whatever the format of the logits."""
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def as_it_is(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """torch's optimizer itself."""
    return optimizer


@dataclass(frozen=True)
class Formats:
    """What a run keeps in which format.

    dtype: of weights, and with them of activations and gradients
    wrap: what is made of the optimizer, such as `MasterWeights`
    loss: a function of model, inputs and targets
    scale: settings of a `LossScaler`; without them the scale is 1
    """

    dtype: torch.dtype = torch.float32
    wrap: Callable[[torch.optim.Optimizer], Any] = as_it_is
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = fp32_loss
    scale: Mapping[str, Any] | None = None


def train(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], formats: Formats, lr: float = 2e-3
) -> Iterator[tuple[float, bool]]:
    """Trains on one batch after another; yields each step's loss scale, and whether it was taken.

    Adam's eps is 1e-15, far below every gradient, so that their size makes no difference.
    """
    optimizer = formats.wrap(torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-15, fused=True))
    scaler = LossScaler(**formats.scale) if formats.scale else LossScaler(1.0, dynamic=False)
    for x, y in batches:
        optimizer.zero_grad()
        with wide_products():
            loss = formats.loss(model, x, y)
        scaler.scale(loss).backward()
        scale = scaler.value
        taken = scaler.step(optimizer)
        scaler.update()
        yield scale, taken


def learn(
    model: nn.Module, formats: Formats, draw: Draw, *, steps: int, seed: int, lr: float = 2e-3
) -> list[float]:
    """Trains the model in place; test losses (nats) before the first and after each tenth step."""
    generator = torch.Generator().manual_seed(100 + seed)
    test = draw(torch.Generator().manual_seed(99), TEST_ROWS)
    losses = [_tested(model, test)]
    batches = (draw(generator, ROWS) for _ in range(steps))
    for step, _ in enumerate(train(model, batches, formats, lr), 1):
        if step % 10 == 0:
            losses.append(_tested(model, test))
    return losses


def three_seeds(
    models: Sequence[nn.Module], choices: Mapping[str, Formats], draw: Draw, **options: Any
) -> dict[str, list[list[float]]]:
    """What copies of the models `learn` with every choice: a row of test losses for each model.

    A model's place is the seed of its batches. options: steps and lr of `learn`
    """
    found: dict[str, list[list[float]]] = {name: [] for name in choices}
    for name, formats in choices.items():
        for seed, model in enumerate(models):
            learner = copy.deepcopy(model).to(formats.dtype)
            found[name].append(learn(learner, formats, draw, seed=seed, **options))
    return found


@torch.no_grad()
def _tested(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    return fp32_loss(copy.deepcopy(model).float(), *test).item()
