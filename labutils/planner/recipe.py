"""The planner: from tokens in a batch to micro-batch, GPUs and accumulation, with reasons."""

import html
from collections.abc import Callable
from dataclasses import dataclass

from labutils import units
from labutils.config import Mesh, TrainConfig


@dataclass(frozen=True)
class Choice:
    """One decision of a training configuration and why it was made."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class Recipe:
    """A training configuration with the reasons for it, in the order in which they were found."""

    choices: tuple[Choice, ...]
    train: TrainConfig
    mesh: Mesh

    def __str__(self) -> str:
        first = max(len(choice.what) for choice in self.choices)
        second = max(len(choice.value) for choice in self.choices)
        return "\n".join(
            f"{choice.what:<{first}}  {choice.value:>{second}}  {choice.reason}"
            for choice in self.choices
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = ""
        for choice in self.choices:
            sides = {choice.what: "left", choice.value: "right", choice.reason: "left"}
            cells = [
                f'<td style="text-align:{side};padding:2px 12px">{html.escape(cell)}</td>'
                for cell, side in sides.items()
            ]
            rows += f"<tr>{''.join(cells)}</tr>"
        return f'<table class="recipe"><tbody>{rows}</tbody></table>'


def configure(
    *,
    target: int,
    seq_len: int,
    gpus: int,
    fits: Callable[[int], bool],
) -> Recipe:
    """A configuration for a batch of about `target` tokens on `gpus` devices, found step by step.

    seq_len: tokens of a sequence
    fits: whether that many sequences fit on one device beside everything else; ValueError where not
        even one does

    >>> recipe = configure(target=4_194_304, seq_len=4096, gpus=128, fits=lambda b: b <= 2)
    >>> train = recipe.train
    >>> train.micro_batch, train.global_batch, train.accumulation(recipe.mesh.dp)
    (2, 1024, 4)

    Source: the order of decisions of the Ultra-Scale Playbook: tokens in a batch, sequence length,
    micro-batch, GPUs, accumulation.
    """
    given = dict(target=target, seq_len=seq_len, gpus=gpus)
    target, seq_len, gpus = (units.whole(value, name, 1) for name, value in given.items())
    # Each copy takes equally many sequences, so the batch is rounded to a multiple of the copies.
    share = round(target / seq_len / gpus)
    if share < 1:
        raise ValueError(
            f"{target:,} tokens are {target // seq_len:,} sequences of {seq_len:,}, fewer than "
            f"{gpus} copies of the model: use fewer GPUs, shorter sequences, or put several GPUs "
            "on one copy (tensor or context parallelism)"
        )
    units.writable(share, "sequences of a copy are", "use more GPUs")
    if not fits(1):
        raise ValueError(
            f"not even one sequence of {seq_len:,} tokens fits on a device: checkpoint "
            "activations, shard the states, or shorten the sequence"
        )
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    largest = max(size for size in divisors if size == 1 or fits(size))
    train = TrainConfig(micro_batch=largest, global_batch=share * gpus)
    return Recipe(_choices(target, seq_len, gpus, train), train, Mesh(dp=gpus))


def _choices(target: int, seq_len: int, copies: int, train: TrainConfig) -> tuple[Choice, ...]:
    batch, largest = train.global_batch, train.micro_batch
    share, tokens, steps = batch // copies, batch * seq_len, train.accumulation(copies)
    asked = f"the closest to {target:,} that {copies:,} copies can share"
    if tokens == target:
        asked = "what you asked for"
    found = f"the largest divisor of {share} that fits"
    if largest == share:
        found = "a copy's whole share fits at once"
    shares = f"{copies:,} GPUs, one for each copy: {share} sequences a copy"
    return (
        Choice("tokens in a batch", f"{tokens:,}", asked),
        Choice("sequence length", f"{seq_len:,}", "what the model is to learn to read"),
        Choice("global batch", f"{batch:,}", f"{tokens:,} / {seq_len:,} sequences"),
        Choice("copies of the model", f"{copies:,}", shares),
        Choice("micro-batch", f"{largest:,}", found),
        Choice("accumulation steps", f"{steps:,}", f"{batch:,} / ({largest} · {copies:,})"),
    )
