"""What 8 bits do to a small GPT that learns text: gradient errors at fixed weights, outliers that
are planted, training at the loss scale of a large batch. The rig of lab 15b.
"""

import copy
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from labutils.config import DATA, ModelConfig
from labutils.floats import BlockFormat
from labutils.model import GPT
from labutils.quantization import Scheme, advance_scales, fp8_layers, use_blocks, use_fp8
from labutils.teach.rigs import corpus

READER = ModelConfig(
    num_layers=2, d_model=128, num_heads=4, d_ff=512, vocab_size=len(corpus.ALPHABET), seq_len=32,
    positions="rope", norm="rmsnorm", bias=False,
)  # fmt: skip
"""A GPT of 406,144 parameters, 393,216 of them in the linear layers of its blocks."""

_ROWS, WARM_UP = 8, 10
Batch = tuple[Tensor, Tensor]


def excerpts(seed: int, rows: int = _ROWS) -> Iterator[Batch]:
    """Batches of inputs and targets, characters of Python's reference, without end."""
    tokens, generator = corpus.encoded("topics"), torch.Generator().manual_seed(seed)
    places = torch.arange(READER.seq_len + 1)
    while True:
        at = torch.randint(len(tokens) - len(places), (rows, 1), generator=generator)
        window = tokens[at + places]
        yield window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats per character."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train_reader(
    seed: int, scheme: Scheme | None = None, *, share: float = 1.0, steps: int = 60,
    optimizer: Callable[..., Any] = torch.optim.AdamW, in_fp64: bool = False,
    config: ModelConfig = READER, lr: float = 2e-3, k: float = 1.0,
) -> tuple[GPT, list[float]]:  # fmt: skip
    """A GPT that has learned from text for some steps, and its test losses after each tenth.

    share: the loss is multiplied by it, as that of a micro-batch is by its share of a large batch;
        gradients are divided by it before they are clipped
    in_fp64: the weights are drawn in fp64, and with a scheme all but the operands is. Else the last
        digits of a drawn weight, which differ between machines, decide which of two codes a number
        gets, and after twenty steps the run is another one
    k: that of `plant`
    """
    model = GPT(config, attention="sdpa", generator=torch.Generator().manual_seed(seed))
    if in_fp64:
        model.double().initialize(torch.Generator().manual_seed(seed))
        model = model if scheme else model.float()
    if scheme:
        plant(use_fp8(model, scheme), k)
    test, losses = next(excerpts(99, 64)), []
    learner = optimizer(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-12)
    batches = excerpts(seed)
    for step in range(1, steps + 1):
        for group in learner.param_groups:
            group["lr"] = lr * min(1.0, step / WARM_UP)
        learner.zero_grad()
        (share * loss_of(model, next(batches))).backward()
        advance_scales(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= share
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learner.step()
        if step % 10 == 0:
            with torch.no_grad():
                losses.append(loss_of(model, test).item())
    return model, losses


def reader() -> GPT:
    """The GPT of `train_reader(0, steps=100)` as it was recorded, in bf16: the same weights on any
    machine (`python tools/reader.py`)."""
    model = GPT(READER, attention="sdpa")
    weights = load_file(DATA / "reader.safetensors")
    model.load_state_dict(weights | {"head.weight": weights["tokens.weight"]})
    return model


WIDE_READER = replace(READER, num_layers=1, d_model=512, d_ff=2048, num_heads=8)
"""Four tiles of 128 in a row of its inputs, where `READER` has one."""


def sweep_record(name: str, *by: str) -> dict[tuple[str, ...], list[float]]:
    """What `python tools/fp8_sweep.py` wrote into fp8_{name}.csv: the last column, seed by seed, by
    the values of the columns `by`."""
    found = defaultdict(list)
    with open(DATA / f"fp8_{name}.csv", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            found[tuple(row[column] for column in by)].append(float([*row.values()][-1]))
    return dict(found)


def operands(model: GPT, batch: Batch) -> dict[str, list[Tensor]]:
    """What the products of the blocks' linear layers take: inputs, weights, gradients of outputs.

    In fp64, where rounding can be told from a gradient: that of a query whose keys are all alike is
    zero, softmax having nothing to choose, and what comes out instead is below 2⁻⁶⁰.
    """
    found: dict[str, list[Tensor]] = {"x": [], "weight": [], "grad": []}
    model = copy.deepcopy(model).double()

    def arrived(layer: nn.Module, into: tuple, out: tuple) -> None:
        gradient = out[0].detach()
        found["grad"].append(gradient.where(gradient.abs() > 2.0**-60, 0.0))

    def entered(layer: nn.Linear, into: tuple, out: Tensor) -> None:
        found["x"].append(into[0].detach())

    for name, layer in model.named_modules():
        if not name.startswith("blocks") or not isinstance(layer, nn.Linear):
            continue
        found["weight"].append(layer.weight.detach())
        layer.register_forward_hook(entered)
        layer.register_full_backward_hook(arrived)
    loss_of(model, batch).backward()
    return found


def plant(model: nn.Module, k: float) -> nn.Module:
    """The module, whose 8-bit layers find their first input channel k times as large and multiply
    it by weights k times as small: an outlier that changes nothing in exact arithmetic. Parameters
    and their gradients stay those of the model without it, so an optimizer takes no notice."""
    for layer in fp8_layers(model).values() if k != 1 else ():
        factor = torch.ones(layer.get_parameter("weight").shape[1])
        factor[0] = k
        layer.register_forward_pre_hook(lambda _, inputs, factor=factor: (inputs[0] * factor,))
        parametrize.register_parametrization(layer, "weight", _Divided(factor), unsafe=True)
    return model


class _Divided(nn.Module):
    """A weight whose columns are divided by a factor before the layer reads it."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.factor


def gradient_error(
    model: GPT, scheme: Scheme, batch: Batch, *, share: float = 1.0, k: float = 1.0, steps: int = 1
) -> list[float]:
    """How far the gradient of the blocks' matrices is off, relative to its length: in each of so
    many backward passes at the same weights. The last one counts where scales are delayed. All
    but the operands is in float64: in fp32 the order of sums, another on each machine, decides
    which of two codes a number gets.

    k: that of `plant`
    """
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    right = _whole(matrix_gradients(exact, batch))
    plant(use_fp8(twin, scheme), k)
    errors = []
    for _ in range(steps):
        found = _whole(matrix_gradients(twin, batch, share=share))
        errors.append(((found - right).norm() / right.norm()).item())
        advance_scales(twin)
    return errors


def matrix_errors(
    model: GPT, scheme: Scheme, batch: Batch, *, share: float = 1.0
) -> dict[str, float]:
    """How far the gradient of each matrix of the blocks is off, relative to its own length, in the
    first backward pass; else as `gradient_error`."""
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    names = [name for name, p in exact.named_parameters() if "blocks" in name and p.dim() == 2]
    right = matrix_gradients(exact, batch)
    use_fp8(twin, scheme)
    each = zip(names, matrix_gradients(twin, batch, share=share), right, strict=True)
    return {name.removesuffix(".weight"): ((a - b).norm() / b.norm()).item() for name, a, b in each}


def block_error(model: GPT, fmt: BlockFormat, batch: Batch, **how: Any) -> float:
    """That of the first backward pass with operands in blocks; `how` is what `use_blocks` takes."""
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    right = _whole(matrix_gradients(exact, batch))
    use_blocks(twin, fmt, **how)
    found = _whole(matrix_gradients(twin, batch))
    return ((found - right).norm() / right.norm()).item()


def _whole(gradients: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients])


def matrix_gradients(model: GPT, batch: Batch, *, share: float = 1.0) -> list[Tensor]:
    """The gradient of each matrix of the blocks, in float64, without the share."""
    model.zero_grad()
    (share * loss_of(model, batch)).backward()
    found = []
    for name, parameter in model.named_parameters():
        if name.startswith("blocks") and parameter.dim() == 2:
            assert parameter.grad is not None, name
            found.append(parameter.grad.double() / share)
    return found


def print_errors(rows: Mapping[str, Mapping[str, float]]) -> None:
    """A table of errors in percent, a row for each scheme, to two digits, or to one percent."""

    def rounded(error: float) -> str:
        return f"{float(f'{100 * error:.2g}'):8g}%" if error < 1 else f"{100 * error:8.0f}%"

    columns = list(next(iter(rows.values())))
    print(f"{'':10}", *(f"{column:>9}" for column in columns))
    for name, errors in rows.items():
        print(f"{name:10}", *(rounded(errors[column]) for column in columns))
