"""Many copies of a small network trained at once, a flat row of parameters for each seed and each
learning rate. All rates of a seed see the same examples in the same order. And one of them on
ranks."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from labutils import accumulation, data_parallel
from labutils.world import Comm

MOMENTUM, BETAS, ALPHA, EPS = 0.9, (0.9, 0.999), 0.99, 1e-8  # torch's, and what everybody takes


@dataclass(frozen=True)
class Network:
    """Linear layers of these widths, as a function of rows of parameters.

    activation: "tanh" or "relu"
    norm: whether a LayerNorm without a gain stands before each activation
    tokens, embed: where inputs are tokens, how many there are, and the width of their vectors
    base: where given, the width at which μP and this network are the same: a wider one begins with
        a smaller output, and its layers with a wide input take smaller steps of Adam
        (Yang et al., 2203.03466, table 3)
    half: of these two only the "start" or only the "rates"
    """

    widths: tuple[int, ...]
    activation: Literal["tanh", "relu"] = "tanh"
    norm: bool = False
    tokens: int = 0
    embed: int = 0
    base: int = 0
    half: Literal["", "start", "rates"] = ""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The tensors of a row, one after the other."""
        shapes: list[tuple[int, ...]] = [(self.tokens, self.embed)] * bool(self.tokens)
        for i, o in pairwise(self.widths):
            shapes += [(i, o), (o,)]
        return shapes

    def start(self, seeds: Sequence[int]) -> Float[Tensor, "S P"]:
        """A row for each seed: weights drawn with variance 1 or 2 over fan-in, biases zero."""
        rows, gain = [], 2.0 if self.activation == "relu" else 1.0
        for seed in seeds:
            draw, parts = torch.Generator().manual_seed(seed), []
            for i, shape in enumerate(self.shapes):
                fan_in = 1.0 if self.tokens and i == 0 else shape[0] / gain
                scale = fan_in**-0.5 if len(shape) > 1 else 0.0
                if self.base and self.half != "rates" and i == len(self.shapes) - 2:
                    scale *= (self.base / shape[0]) ** 0.5
                parts.append(scale * torch.randn(shape, generator=draw).flatten())
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def steps(self) -> Float[Tensor, "P"]:
        """What the learning rate of each parameter is multiplied by: 1, and with a `base`
        base / width in the layers behind the first."""
        wide = len(self.shapes) - 2 * (len(self.widths) - 2)  # from here on, inputs are wide
        base = self.base * (self.half != "start")
        factors = [
            base / shape[0] if base and i >= wide and len(shape) > 1 else 1.0
            for i, shape in enumerate(self.shapes)
        ]
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return torch.tensor(factors).repeat_interleave(torch.tensor(sizes))

    def logits(self, rows: Float[Tensor, "K P"], x: Tensor) -> Float[Tensor, "K n c"]:
        """What each copy answers to its own n examples, x[K, n, …]."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts = [
            p.view(len(rows), *s) for p, s in zip(rows.split(sizes, 1), self.shapes, strict=True)
        ]
        if self.tokens:
            offset = self.tokens * torch.arange(len(rows)).view(-1, 1, 1)
            x = functional.embedding(x + offset, parts.pop(0).flatten(0, 1)).flatten(2)
        layers = list(zip(parts[::2], parts[1::2], strict=True))
        for i, (weight, bias) in enumerate(layers):
            x = torch.baddbmm(bias.unsqueeze(1), x, weight)
            if i + 1 < len(layers):
                x = functional.layer_norm(x, x.shape[-1:]) if self.norm else x
                x = torch.tanh(x) if self.activation == "tanh" else torch.relu(x)
        return x

    def losses(self, rows: Tensor, x: Tensor, y: Int[Tensor, "K n"]) -> Float[Tensor, "K"]:
        """Mean cross-entropy of each copy on its examples, in nats."""
        logits = self.logits(rows, x)
        each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(y.shape).mean(1)

    def gradients(self, rows: Tensor, x: Tensor, y: Tensor) -> Float[Tensor, "K P"]:
        """The gradient of each copy's loss."""
        rows = rows.detach().requires_grad_()
        return torch.autograd.grad(self.losses(rows, x, y).sum(), rows)[0]

    def alone(self, row: Float[Tensor, "P"]) -> nn.Module:
        """One copy as a module of one parameter, to be trained like any other."""
        return _Alone(self, row)


class _Alone(nn.Module):
    def __init__(self, network: Network, row: Tensor) -> None:
        super().__init__()
        self.network = network
        self.row = nn.Parameter(row.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.network.logits(self.row[None], x[None])[0]


class Update:
    """SGD with momentum, Adam or RMSProp on rows, a learning rate for each: torch's formulas.

    decay: before each step a row is multiplied by 1 − its learning rate · its decay, as in AdamW
    forget: what 1 − β₁ and 1 − β₂ of Adam are multiplied by, RMSProp's one of them by the second;
        ε is divided by the root of the second (Malladi et al., 2205.10287)
    """

    def __init__(
        self,
        name: str,
        rows: Tensor,
        decay: Float[Tensor, "K 1"] | float = 0.0,
        forget: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        if name not in ("sgd", "adam", "rmsprop"):
            raise ValueError(f"there is no optimizer {name!r}: take sgd, adam or rmsprop")
        self.name, self.steps, self.decay = name, 0, decay
        first, second = BETAS if name == "adam" else (1.0, ALPHA)
        self.beta1 = first if forget[0] == 1 else 1 - forget[0] * (1 - first)
        self.beta2 = second if forget[1] == 1 else 1 - forget[1] * (1 - second)
        self.eps = EPS / forget[1] ** 0.5
        if min(self.beta1, self.beta2) < 0:
            raise ValueError(f"1 − β times {max(forget):g} is above 1: scale by less")
        self.first, self.second = torch.zeros_like(rows), torch.zeros_like(rows)

    def __call__(self, rows: Tensor, gradient: Tensor, lr: Float[Tensor, "K 1"]) -> None:
        """Steps the rows in place."""
        self.steps += 1
        rows.mul_(1 - lr * self.decay)
        if self.name == "sgd":
            self.first.mul_(MOMENTUM).add_(gradient)
            rows.sub_(lr * self.first)
            return
        self.second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = self.second.sqrt()
        if self.name == "adam":
            gradient = self.first.lerp_(gradient, 1 - self.beta1) / (1 - self.beta1**self.steps)
            root /= (1 - self.beta2**self.steps) ** 0.5
        rows.sub_(lr * gradient / root.add_(self.eps))


def order(n: int, count: int, seed: int) -> Int[Tensor, "count"]:
    """The indices of `count` examples out of n, shuffled anew in each epoch; a row of the order
    for every learning rate of a seed."""
    draw = torch.Generator().manual_seed(1000 + seed)
    epochs = [torch.randperm(n, generator=draw) for _ in range(-(-count // n))]
    return torch.cat(epochs)[:count]


def train_copies(
    network: Network,
    data: tuple[Tensor, Tensor],
    *,
    lr: Sequence[float],
    batch: int,
    samples: int,
    seeds: Sequence[int],
    optimizer: str = "sgd",
    decay: Sequence[float] = (0.0,),
    forget: tuple[float, float] = (1.0, 1.0),
    schedule: Callable[[int, int], float] | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "S R P"]:
    """The rows after `samples` examples in batches, for each seed and each learning rate.

    data: inputs and targets to learn from
    optimizer: "sgd" with momentum, "adam" or "rmsprop"
    decay: AdamW's weight decay, one for all or one for each learning rate
    forget: what 1 − β₁ and 1 − β₂ are multiplied by, and 1/ε by the root of the second
    schedule: of (step, steps), what every learning rate is multiplied by
    watch: called with the steps done and rows[S, R, P], after each step
    """
    x, y = data
    steps, copies = samples // batch, len(lr)
    rows = network.start(seeds).to(dtype).repeat_interleave(copies, 0)
    rates = torch.tensor(lr, dtype=dtype).repeat(len(seeds)).unsqueeze(1)
    orders = torch.stack([order(len(y), steps * batch, seed) for seed in seeds])
    decays = torch.tensor(decay, dtype=dtype).expand(copies).repeat(len(seeds)).unsqueeze(1)
    rates = rates * network.steps().to(dtype) if network.base else rates
    update = Update(optimizer, rows, decays, forget)
    for step in range(steps):
        chosen = orders[:, step * batch : (step + 1) * batch].repeat_interleave(copies, 0)
        factor = schedule(step, steps) if schedule else 1.0
        update(rows, network.gradients(rows, x[chosen], y[chosen]), factor * rates)
        if watch:
            watch(step + 1, rows.view(len(seeds), copies, -1))
    return rows.view(len(seeds), copies, -1)


@torch.no_grad()
def score(network: Network, rows: Tensor, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss in nats and share of errors of rows[…, P] on the same examples; a copy that has
    diverged has a loss of infinity."""
    x, y = data
    flat = rows.flatten(0, -2)
    logits = network.logits(flat, x.expand(len(flat), *x.shape))
    each = functional.cross_entropy(
        logits.flatten(0, 1), y.repeat(len(flat)), reduction="none"
    ).view(len(flat), -1)
    wrong = (logits.argmax(-1) != y).double().mean(1)
    return each.mean(1).nan_to_num(torch.inf).view(rows.shape[:-1]), wrong.view(rows.shape[:-1])


def squared_lengths(
    network: Network, row: Float[Tensor, "P"], x: Tensor, y: Tensor, sizes: Sequence[int]
) -> dict[int, float]:
    """The mean squared length of the gradients that these examples have in batches of each size.

    A batch of 1 is a copy that sees one example: all gradients of single examples at once.
    """
    rows = row.expand(len(y), -1)
    each = network.gradients(rows, x.unsqueeze(1), y.unsqueeze(1))
    return {
        size: each.view(-1, size, each.shape[1]).mean(1).square().sum(1).mean().item()
        for size in sizes
    }


def train_replica(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    make_optimizer: Callable,
    comm: Comm,
    micro: int,
) -> nn.Module:
    """The module after a step on each batch: each rank takes its share, in micro-batches of
    `micro` rows, and reduces once per step.

    loss: of outputs and targets, the mean over rows
    """
    replica = data_parallel.replicate(module, comm)
    optimizer = make_optimizer(module.parameters())
    for batch in batches:
        mine = tuple(side[comm.rank :: comm.size] for side in batch)
        *quiet, last = accumulation.micro_batches(mine, micro)
        optimizer.zero_grad()
        for pieces, context in ((quiet, replica.no_sync()), ([last], contextlib.nullcontext())):
            if pieces:
                with context:
                    accumulation.accumulate(
                        lambda piece: loss(replica(piece[0]), piece[1]), pieces, total=len(mine[1])
                    )
        optimizer.step()
    return module
