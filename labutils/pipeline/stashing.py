"""Weight stashing: a rank that updates as it goes keeps, for each B, the weights of its F."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from labutils.pipeline.stages import PipelineStage
from labutils.schedule import Schedule

Weights = dict[str, Tensor]


class Stash:
    """The versions of a rank's weights that some micro-batch still needs, and how they change.

    peak: most of them at once; the optimizer steps one more copy, the module's own

    Raises ValueError: for a schedule that flushes, for tied weights on two ranks, without an
        optimizer; TypeError for a zero.Optimizer, whose hooks would never see a gradient
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        schedule: Schedule,
        rank: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        if not schedule.every:
            raise ValueError(f"{schedule.name} flushes: step the optimizer yourself, after run")
        if optimizer is None:
            raise ValueError(f"{schedule.name} updates weights as it goes: pass optimizer=")
        if not isinstance(optimizer, torch.optim.Optimizer):
            got, hook = type(optimizer), "average_gradients as its step pre-hook"
            got = f"{got.__module__}.{got.__name__}"
            raise TypeError(f"optimizer= takes one of torch, got {got}: give one {hook}")
        ((self.index, self.stage),) = stages.items()
        if self.stage.config.tied and schedule.stages > 1:
            apart = "its two ends update at different times: build the model with tied=False"
            raise ValueError(f"{schedule.name} on a tied embedding: {apart}")
        self.schedule, self.rank, self.optimizer = schedule, rank, optimizer
        self.doing = _Doing(self.stage)
        self.updates, self.peak = 0, 0
        self.versions: dict[int, Weights] = {}
        self._keep()

    def _keep(self) -> None:
        """A copy of the weights as they are now."""
        self.versions[self.updates] = {
            name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
            for name, parameter in self.stage.named_parameters()
        }
        self.peak = max(self.peak, len(self.versions))

    def forward(self, s: int, k: int, x: Tensor) -> Tensor:
        """What the stage gives with the weights that this micro-batch uses."""
        weights = self.versions[self.schedule.version(self.rank, k)]
        return functional_call(self.stage, weights, (x,))

    def backward(self, k: int, compute: Callable[[], None]) -> None:
        """`compute` the gradient with respect to old weights, which are those of what a checkpoint
        computes again; it is applied to the newest. What no later micro-batch uses goes."""
        weights = self.versions[self.schedule.version(self.rank, k)]
        old = {f"stage.{name}": weight for name, weight in weights.items()}
        functional_call(self.doing, old, (compute,))
        for name, parameter in self.stage.named_parameters():
            if (grad := weights[name].grad) is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
                weights[name].grad = None
        last = k == self.schedule.micro_batches - 1
        oldest = self.updates + 1 if last else self.schedule.version(self.rank, k + 1)
        for version in [version for version in self.versions if version < oldest]:
            del self.versions[version]
        if (k + 1) % self.schedule.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1
            if not last:
                self._keep()


class _Doing(nn.Module):
    """Does what it is told, while `functional_call` gives the stage other weights."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, what: Callable[[], None]) -> None:
        what()
