"""Half-precision weights that learn: by master weights in fp32, or by stochastic rounding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labutils import floats, gradients, units
from labutils.precision.rounding import round_to
from labutils.world import marked

_HALF = {torch.float16: floats.FP16, torch.bfloat16: floats.BF16}


def half_sgd(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    """The weights after a step of SGD for each gradient, all of them in half precision.

    >>> half_sgd(torch.ones(1).bfloat16(), [torch.ones(1).bfloat16()] * 1000, lr=0.001).item() < 0.1
    True
    """
    master = weights.float()
    for gradient in gradients:
        master = master - lr * gradient.float()
    return master.to(weights.dtype)


class MasterWeights:
    """An optimizer of half-precision weights that really steps fp32 copies, the *master weights*.

    Each result is handed back rounded. Give it any optimizer that has not stepped yet; its groups
    and settings stay. Weights that are fp32 already are stepped as they are; `masters` has the
    copies of the others.

    >>> layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> masters = MasterWeights(torch.optim.SGD(layer.parameters(), lr=0.001))
    >>> for _ in range(4):
    ...     layer.weight.grad = torch.ones_like(layer.weight)
    ...     masters.step()
    >>> round(masters.masters[layer.weight].item(), 4), layer.weight.item()
    (0.996, 0.99609375)

    fp32_gradients: as in `TrainConfig`. False: gradients stay in half precision, fp32 copies of
        them live only during the step. True: each is added to an fp32 sum as soon as it is
        complete, and the emptied one is kept. "only": it is freed

    Cost: with Adam 2 + 2 + 12 bytes per parameter, or 2 + 2 + 4 + 12 (True), or 2 + 4 + 12
    ("only").
    Source: Micikevicius et al. 1710.03740, section 3.1; fp32 sums as in Megatron-LM's main_grad.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, fp32_gradients: bool | str = False):
        units.instance(optimizer, torch.optim.Optimizer, type(self).__name__)
        if optimizer.state:
            raise ValueError("this optimizer has stepped already: wrap it before the first step")
        if fp32_gradients not in (False, True, "only"):
            raise ValueError(f"fp32_gradients is False, True or 'only', got {fp32_gradients!r}")
        self.optimizer = optimizer
        self.fp32_gradients = fp32_gradients
        self.masters: dict[Tensor, nn.Parameter] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._master(weight) for weight in group["params"]]

    def _master(self, weight: Tensor) -> Tensor:
        if weight.dtype not in _HALF:
            return weight
        if self.fp32_gradients:
            weight.register_post_accumulate_grad_hook(self._take)
            gradients.kept_by(self, weight)
        self.masters[weight] = marked(nn.Parameter(weight.detach().float()), weight)
        return self.masters[weight]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, of master weights: what clipping or a schedule works on."""
        return self.optimizer.param_groups

    def _take(self, weight: Tensor) -> None:
        grad = self._add(weight)
        if self.fp32_gradients == "only":
            weight.grad = None
        else:
            grad.zero_()

    def gradient_of(self, weight: Tensor) -> Tensor | None:
        """Where the gradient of a weight that is half-precision is added up in fp32."""
        return self.masters[weight].grad

    def _add(self, weight: Tensor) -> Tensor:
        """The gradient of a weight, which its master weight has now, too."""
        master, grad = self.masters[weight], weight.grad
        assert grad is not None  # who calls this has seen it
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad += grad
        return grad

    @torch.no_grad()
    def collect(self) -> None:
        """Gives every master weight its gradient in fp32: to be unscaled, clipped, stepped.

        Call it after the last backward pass of the batch; `step` does it too.
        """
        for weight, master in self.masters.items():
            if weight.grad is not None and master.grad is None:
                self._add(weight)

    @torch.no_grad()
    def step(self) -> None:
        """Steps the master weights and rounds them into the half-precision weights."""
        self.collect()
        self.optimizer.step()
        self.publish()
        if not self.fp32_gradients:
            for master in self.masters.values():
                master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds every master weight into its half-precision weight."""
        if self.masters:  # adapters are fp32 beside weights that are not
            torch._foreach_copy_(list(self.masters), list(self.masters.values()))

    def zero_grad(self) -> None:
        """Frees every gradient, of the model's weights and of the master weights."""
        self.optimizer.zero_grad()
        for weight in self.masters:
            weight.grad = None


class RoundedWeights(MasterWeights):
    """An optimizer of half-precision weights *without* a master copy.

    Weights become fp32 for the step and are rounded back. With a `generator` stochastically: up
    with the probability of the place in the gap, so that the steps that are lost and those that
    are too large add up to the right path. Without one to nearest: a step smaller than half a gap
    is lost, every time.

    >>> layer = nn.Linear(1, 1000, bias=False, dtype=torch.bfloat16)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.001)
    >>> rounded = RoundedWeights(sgd, generator=torch.Generator().manual_seed(0))
    >>> layer.weight.grad = torch.ones_like(layer.weight)
    >>> for _ in range(20): rounded.step()
    >>> print(f"{layer.weight.float().mean():.3f}")
    0.980

    Cost: with Adam 2 + 2 + 8 bytes per parameter between steps; fp32 weights and gradients come on
    top during a step.
    Source: stochastic rounding for training: Gupta et al. 1502.02551; for bf16 weights: Zamirai et
    al. 2010.06192.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(optimizer)
        self.generator = generator
        self._narrow()

    def _narrow(self) -> None:
        for weight, master in self.masters.items():
            master.grad = None
            master.data = torch.empty(0, device=weight.device)

    @torch.no_grad()
    def collect(self) -> None:
        """Widens weights and gradients to fp32 for the step that follows."""
        for weight, master in self.masters.items():
            if master.shape != weight.shape:
                master.data = weight.float()
        super().collect()

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the stepped weights back to half precision, and lets the fp32 ones go."""
        mode = "nearest" if self.generator is None else "stochastic"
        for weight, master in self.masters.items():
            fmt = _HALF[weight.dtype]
            weight.copy_(round_to(master.detach(), fmt, mode=mode, generator=self.generator))
        self._narrow()

    def zero_grad(self) -> None:
        """Frees every gradient."""
        super().zero_grad()
        self._narrow()
