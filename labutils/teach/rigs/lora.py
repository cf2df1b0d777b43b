"""A task that a GPT of 100,000 weights learns in seconds, and another to fine-tune it for: sums of
numbers of two digits, written in base 10 and then in base 8; and recorded sweeps of fine-tuning
over learning rates, LoRA ranks and seeds."""

import csv
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from labutils import anatomy, memory, predict
from labutils.config import DATA, Adapters, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.lora.predict import Pattern
from labutils.model import GPT
from labutils.teach.rigs.scaling import mean
from labutils.timeline import History

WORDS = "0123456789+="
ADDER = ModelConfig(
    num_layers=2, d_model=64, num_heads=4, d_ff=256, vocab_size=len(WORDS), seq_len=8,
    norm="rmsnorm", bias=False, tied=False, name="adder",
)  # fmt: skip
ANSWER = 3  # digits of a sum, the least significant one first, as they are carried
HELD_OUT = 512
_WARM_UP, _BETAS = 20, (0.9, 0.99)


def fine_tuning(
    rank: int, frozen: str = "bf16", pattern: Pattern = "*", batch: int = 1
) -> TrainConfig:
    """A step of LoRA with so many rows on one device, over weights that are frozen in "fp32",
    "bf16", or "nf4" (QLoRA), where what is no linear layer of a block is in bf16."""
    base, precision = "nf4" if frozen == "nf4" else "", "fp32" if frozen == "fp32" else "bf16"
    adapters = Adapters(rank=rank, alpha=rank, pattern=pattern, base=base)
    return TrainConfig(
        micro_batch=batch, global_batch=batch, precision=precision, attention="sdpa",
        adapters=adapters,
    )  # fmt: skip


def at_the_loss(
    model: ModelConfig,
    *,
    rank: int,
    batch: int = 1,
    pattern: Pattern = "*",
    frozen: str = "bf16",
) -> Ledger:
    """Bytes alive when the logits have their gradient, where the backward pass begins: with as many
    words as today's models have, the fullest moment of a step.

    Of a step `loss(x, y).backward(); step(); zero_grad()` that is not the first.
    """
    train = fine_tuning(rank, frozen, pattern, batch)
    kept = memory.activations(model, train)
    width, tokens = 4 if frozen == "fp32" else 2, batch * model.seq_len
    logits = tokens * model.vocab_size * width
    lines = [line for line in predict.states(model, train) if line.component != "gradients"]
    for name, nbytes in {
        "gradients of log-probabilities and logits, sbv each": 2 * logits,
        "token numbers, sb": tokens * anatomy.INDEX,
        "the loss and its gradient": 2 * width,
    }.items():
        lines.append(Line(name, nbytes, component="buffers"))
    # The mean has had its gradient, and the number of targets is gone.
    return Ledger([*lines, *(x for x in kept if getattr(x.note, "name", "") != "count")])


def peak_of_all_layers(
    model: ModelConfig, run: Callable[..., History], *given: Any, **options: Any
) -> Ledger:
    """Bytes by component where a step is fullest, from `run(*given, config=…, **options)` of two
    layers and of three: of layers that are alike each further one brings what the third brings."""
    sizes = (replace(model, num_layers=k) for k in (2, 3))
    histories = (run(*given, config=config, **options) for config in sizes)
    low, high = (history.peak.ledger.by("component") for history in histories)
    others = model.num_layers - 2
    return Ledger(
        Line(part, low[part] + others * (nbytes - low[part]), component=part)
        for part, nbytes in high.items()
    )


def sums(base: int) -> tuple[Int[Tensor, "n s"], Int[Tensor, "n s"]]:
    """Every sum of two numbers of two digits: tokens, and targets, of which the three digits of the
    answer count. They are shuffled, always alike; the first 512 are held out.

    >>> tokens, targets = sums(10)
    >>> "".join(WORDS[i] for i in tokens[0]), targets[0].tolist()
    ('60+44=40', [-100, -100, -100, -100, -100, 4, 0, 1])
    """
    digits = list(itertools.product(range(base), repeat=4))
    left, right = (torch.tensor([pair[i] * base + pair[i + 1] for pair in digits]) for i in (0, 2))
    total, first = left + right, torch.tensor(digits)
    answer = torch.stack([total // base**i % base for i in range(ANSWER)], 1)
    plus, equals = (torch.full((len(digits), 1), WORDS.index(word)) for word in "+=")
    text = torch.cat([first[:, :2], plus, first[:, 2:], equals, answer], 1)
    text = text[torch.randperm(len(text), generator=torch.Generator().manual_seed(0))]
    targets = text[:, 1:].clone()
    targets[:, :-ANSWER] = -100
    return text[:, :-1], targets


@functools.cache
def held_out(base: int) -> tuple[Int[Tensor, "n s"], Int[Tensor, "n s"]]:
    """The sums of a base that training does not see."""
    text, targets = sums(base)
    return text[:HELD_OUT], targets[:HELD_OUT]


def learn_sums(
    model: GPT, base: int, *, steps: int, batch: int, lr: float, seed: int = 0, decay: bool = False
) -> GPT:
    """The model, its trained parameters stepped by AdamW on random sums of a base.

    lr: reached after 20 steps, and kept; with `decay` it falls to zero along a cosine
    """
    tokens, targets = (side[HELD_OUT:] for side in sums(base))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=_BETAS, weight_decay=0.0)
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rate = min(1.0, (step + 1) / _WARM_UP)
        if decay:
            rate *= (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = lr * rate
        chosen = torch.randint(len(tokens), (batch,), generator=draw)
        model.loss(tokens[chosen], targets[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def score_sums(model: nn.Module, base: int) -> tuple[float, float]:
    """Mean loss in nats per digit of the answer, and the share of sums with every digit right, of
    those held out."""
    tokens, targets = held_out(base)
    logits = model(tokens)[:, -ANSWER:]
    wanted = targets[:, -ANSWER:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item()
    return loss, (logits.argmax(-1) == wanted).all(1).double().mean().item()


def carry_free(base: int) -> float:
    """The share of held-out sums that carry nothing: they read the same in any larger base."""
    tokens, _ = held_out(base)
    ones, tens = tokens[:, 1] + tokens[:, 4], tokens[:, 0] + tokens[:, 3]
    return ((ones < base) & (tens < base)).double().mean().item()


class Sweep:
    """What fine-tuning at each learning rate led to, seed by seed; `made`: how it was recorded."""

    def __init__(self, rows: list[dict[str, str]], made: str) -> None:
        self.rows, self.made = rows, made

    def losses(self, of: str = "loss", **wanted: str) -> tuple[list[float], list[list[float]]]:
        """The learning rates, and for each seed the held-out loss at each of them, or another
        column `of` the table; of all layers unless a `pattern` is wanted."""
        wanted = {"pattern": "*"} | wanted
        rows = [row for row in self.rows if all(row[key] == v for key, v in wanted.items())]
        rates = sorted({float(row["lr"]) for row in rows})
        seeds = sorted({row["seed"] for row in rows})
        found = {(row["seed"], float(row["lr"])): float(row[of]) for row in rows}
        return rates, [[found[seed, lr] for lr in rates] for seed in seeds]

    def best(self, **wanted: str) -> tuple[float, float, float]:
        """The learning rate with the lowest mean loss, that loss, and its standard error over the
        seeds."""
        rates, losses = self.losses(**wanted)
        means = map(mean, zip(*losses, strict=True))
        found = [(lr, *each) for lr, each in zip(rates, means, strict=True)]
        return min(found, key=lambda point: point[1])

    def traded(self, **wanted: str) -> tuple[list[float], list[float]]:
        """Nats of the old task forgotten and nats learned, against the model before, at each
        learning rate up to the best; means over the seeds."""
        best = self.best(**wanted)[0]
        found = []
        for of, sign in (("old", 1), ("loss", -1)):
            _, ((before,),) = self.losses(of, rank="none")
            rates, losses = self.losses(of, **wanted)
            points = zip(rates, map(mean, zip(*losses, strict=True)), strict=True)
            found.append([sign * (now.value - before) for lr, now in points if lr <= best])
        return found[0], found[1]

    def trained(self, pattern: str) -> int:
        """Numbers that were trained where layers of this pattern had adapters."""
        return next(int(row["trained"]) for row in self.rows if row["pattern"] == pattern)


def sweep(task: str) -> Sweep:
    """The sweep of a task that tools/lora_sweep.py records: "addition", from base 10 to base 8;
    "alpha", the same with other α; "merged", an adapter merged into NF4; or
    "text", from Python's reference to its source code, where `old` is the reference's loss."""
    with open(DATA / f"lora_{task}.csv", encoding="utf-8") as file:
        made = file.readline().removeprefix("# ").strip()
        return Sweep(list(csv.DictReader(file)), made)
