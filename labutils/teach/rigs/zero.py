"""The three results that a distributed step owes, each against its formula: equal weights, bytes
sent, bytes held."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labutils import measure, predict, units, zero
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.timeline import History
from labutils.world import Rank, World


@dataclass(frozen=True)
class Results:
    """What some steps of a level left: a row of a table, under `HEAD`.

    sent, held: bytes of rank 0, in one step and at the fullest moment of the last one
    sent_unexplained: bytes between what each rank sent and `predict.sent`
    held_unexplained: bytes between what rank 0 held and `peak_states`
    peak_states: what `predict` says that rank 0 holds at the fullest moment
    history: of rank 0
    """

    level: int
    ranks: int
    equal: bool
    sent: int
    sent_unexplained: int
    held: int
    held_unexplained: int
    peak_states: Ledger
    history: History

    HEAD = "level  ranks  equal      sent  unexplained      held  unexplained"

    def __str__(self) -> str:
        row = f"{self.level:5} {self.ranks:6} {self.equal!s:>6}"
        row += f" {units.text(self.sent):>9} {self.sent_unexplained:12}"
        return row + f" {units.text(self.held):>9} {self.held_unexplained:12}"


def is_equal(module: nn.Module, expected: Sequence[Tensor]) -> bool:
    """Whether the module's weights, gathered where they are sharded, are these up to 1e-10."""
    with zero.gathered(module) if hasattr(module, "_sharded") else contextlib.nullcontext():
        pairs = zip(module.parameters(), expected, strict=True)
        return all(torch.allclose(w, e, rtol=0, atol=1e-10) for w, e in pairs)


def states_over(fn: Callable[[], object], module: nn.Module, optimizer: Any) -> History:
    """What is alive of weights, gradients and optimizer state over `fn()`."""
    history = measure.history(fn, module, getattr(optimizer, "inner", optimizer))
    return history.only("weights", "gradients", "optimizer")


def _train(
    rank: Rank, build: Callable, step: Callable, expected: Sequence[Tensor], steps: int, *how: Any
) -> tuple[bool, ModelConfig, History]:
    level, options = how
    with rank.comm("dp").record("start"):
        module, optimizer = build(rank, level, **options)
    for k in range(steps - 1):
        step(rank, module, optimizer, k)
    history = states_over(lambda: step(rank, module, optimizer, steps - 1), module, optimizer)
    with rank.comm("dp").record("compare"):
        return is_equal(module, expected), module.config, history


def between_ranks(ledger: Ledger) -> Ledger:
    """Of what a step sends the gradients and weights: no losses, no start."""
    return Ledger(line for line in ledger if line.name in ("all_gather", "reduce_scatter"))


def three_results(
    world: World,
    level: int,
    build: Callable[..., tuple[nn.Module, Any]],
    step: Callable[[Rank, nn.Module, Any, int], object],
    expected: Sequence[Tensor],
    *,
    steps: int = 3,
    bucket_bytes: int = 2**16,
    **options: Any,
) -> Results:
    """Trains on all ranks of a world, in float64, and compares.

    build: build(rank, level, **options) makes a GPT and its optimizer
    step: step(rank, module, optimizer, k) is step number k
    expected: the weights that a plain model has after as many steps
    bucket_bytes: of levels 1 and 2
    """
    runs = world.run(_train, build, step, expected, steps, level, options)
    (_, model, history), mesh = runs[0], world.mesh
    how = {name: options[name] for name in ("reshard", "prefetch") if name in options}
    sizes: Any = {"micro_batch": 1, "global_batch": mesh.dp, "bucket_bytes": bucket_bytes}
    train = TrainConfig(**sizes, precision="fp64", zero=level, **how)
    sent = [between_ranks(predict.sent(model, train, mesh, rank)) for rank in range(mesh.size)]
    measured = between_ranks(world.ledger).by("rank")
    left = (measured[rank] - steps * each.total for rank, each in enumerate(sent))
    peak = predict.peak_states(model, train, mesh)
    return Results(
        level=level,
        ranks=mesh.dp,
        equal=all(equal for equal, _, _ in runs),
        sent=sent[0].total,
        sent_unexplained=sum(map(abs, left)),
        held=history.peak.ledger.total,
        held_unexplained=peak.diff(history.peak.ledger).unexplained,
        peak_states=peak,
        history=history,
    )


def orders(num_units: int) -> dict[str, list[tuple[str, int]]]:
    """Orders of a step for `zero.step_timeline`, by name, of a model of so many equal units.

    Level 3 with prefetch and without; level 2 with all gathers after the step, and with each one
    ahead of the next forward pass of its unit.
    """
    forward = [("forward", i) for i in range(num_units)]
    level_2 = [(name, i) for i in reversed(range(num_units)) for name in ("backward", "reduce")]
    late, ahead = [], [("gather", 0)]
    for i in range(num_units):
        late += [("gather", i), ("forward", i)]
        ahead += [("gather", i + 1)] * (i < num_units - 1) + [("forward", i)]
    for i in reversed(range(num_units)):
        late += [("gather", i)] * (i < num_units - 1) + [("backward", i), ("reduce", i)]
    return {
        "level 3": zero.unit_order(num_units),
        "no prefetch": late,
        "level 2": [*forward, *level_2, *(("gather", i) for i in range(num_units))],
        "level 2, gathers ahead": ahead + level_2,
    }
