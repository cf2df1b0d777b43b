"""A schedule on ranks beside the whole model on one device: equal, sent as computed, kept as
simulated. Published bubbles, and gradients of old weights on one device."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labutils import pipeline, predict
from labutils.config import DATA, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.schedule import Board, Op, PipelineRun, Schedule
from labutils.world import Rank, World


@dataclass(frozen=True)
class Comparison:
    """What one step left.

    loss, alone: of all micro-batches, on the ranks and on one device, in nats per token
    error: norm of the error of all gradients, relative to that of the gradients
    kept: most activations that each rank kept at once, of a stage and a micro-batch each
    predicted, sent: bytes that ranks send by formula, and that they sent
    run: when each operation ran, in s; its schedule has the order in which they did
    """

    loss: float
    alone: float
    error: float
    kept: tuple[int, ...]
    predicted: Ledger
    sent: Ledger
    run: PipelineRun

    @property
    def equal(self) -> bool:
        """Whether loss and gradients are those of one device, up to rounding in float64."""
        return abs(self.loss - self.alone) < 1e-10 and self.error < 1e-10


def compare(schedule: Schedule, model: ModelConfig, **options: Any) -> Comparison:
    """One step of a schedule on ranks (threads), and of the whole model on one device: random
    weights and tokens, one sequence per micro-batch, float64.

    options: of `run`, such as pace or messages

    >>> from labutils.schedule import zb_h1
    >>> small = ModelConfig(num_layers=2, d_model=8, num_heads=1, d_ff=8, vocab_size=8, seq_len=4)
    >>> beside = compare(zb_h1(2, 3), small)
    >>> beside.equal, beside.kept, beside.predicted.diff(beside.sent).unexplained
    (True, (2, 2), 0)
    """
    m, made = schedule.micro_batches, torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab_size, (m, 2, 1, model.seq_len), generator=made)
    world = World(Mesh(pp=len(schedule.ranks)))
    found = world.run(_step, schedule, model, tokens, options)
    whole = _model(model)
    loss = whole.loss(*tokens.flatten(1, 2).unbind(1))
    loss.backward()
    wanted = _gradients(whole)
    pairs = [(grad, wanted[name]) for _, grads in found for name, grad in grads.items()]
    off, size = (
        torch.stack([t.norm() for t in side]).norm().item()
        for side in ([grad - right for grad, right in pairs], [right for _, right in pairs])
    )
    runs = [each for each, _ in found]
    return Comparison(
        loss=sum(each.loss.item() for each in runs if each.loss is not None),
        alone=loss.item(),
        error=off / size,
        kept=tuple(max(each.in_flight) for each in runs),
        predicted=between_stages(schedule, model),
        sent=world.ledger,
        run=pipeline.joined(schedule, runs),
    )


def between_stages(schedule: Schedule, model: ModelConfig) -> Ledger:
    """Bytes that all ranks of a pipeline send to neighbors in one step with one sequence per
    micro-batch, in float64."""
    m, mesh = schedule.micro_batches, Mesh(pp=len(schedule.ranks))
    train = TrainConfig(micro_batch=1, global_batch=m, precision="fp64", schedule=schedule)
    of = [predict.sent(model, train, mesh, rank) for rank in range(mesh.size)]
    return sum(of, Ledger()).only(axis="pp")


def _model(model: ModelConfig) -> GPT:
    return GPT(model, generator=torch.Generator().manual_seed(0)).double()


def _step(
    rank: Rank, schedule: Schedule, model: ModelConfig, tokens: Tensor, options: dict[str, Any]
) -> tuple[pipeline.RankRun, dict[str, Tensor]]:
    """What this rank did, and its gradients by their names in the whole model."""
    comm = rank.comm("pp")
    stages = pipeline.local(pipeline.split(_model(model), schedule.stages), schedule, comm.rank)
    done = pipeline.run(stages, schedule, comm, [tuple(pair) for pair in tokens], **options)
    return done, {name.partition(".")[2]: grad for name, grad in _gradients(stages).items()}


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def published_bubbles(row: str) -> tuple[str, dict[str, float]]:
    """A case of Qi et al. 2401.10241, Table 5, and the measured bubble of each schedule, of the
    whole time; by its row of paper_results.csv.

    >>> published_bubbles("PZ-01")[1]["ZB-H1"]
    0.1585
    """
    with open(DATA / "paper_results.csv", encoding="utf-8") as file:
        found = next(each for each in csv.DictReader(file) if each["id"] == row)
    names = found["quantity"].removeprefix("bubble rates ").split(" / ")
    return found["inputs"], dict(zip(names, map(float, found["value"].split(" / ")), strict=True))


def aged(
    model: ModelConfig,
    batch: tuple[Tensor, Tensor],
    ages: Sequence[int],
    updates: int,
    rate: float,
    seed: int = 0,
) -> float:
    """Loss on one batch after so many updates of SGD on it, by gradients for weights that are
    ages[i] updates old in the model's layer i; inf where it is not finite. On one device, float64.

    The embedding is as old as the first layer, the head as the last. While there are fewer updates
    than that, the first weights count.

    rate: of SGD
    seed: of the first weights

    >>> small = ModelConfig(num_layers=2, d_model=8, num_heads=1, d_ff=8, vocab_size=8, seq_len=4)
    >>> batch = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 5]])
    >>> aged(small, batch, (0, 0), 9, 0.5) < aged(small, batch, (0, 0), 1, 0.5)
    True
    """
    net = GPT(model, generator=torch.Generator().manual_seed(seed)).double()
    stages = [
        list(stage.parameters()) for stage in pipeline.split(net, len(ages), (1,) * len(ages))
    ]
    after = [[[p.detach().clone() for p in stage] for stage in stages]]  # each update

    def use(weights: Sequence[Sequence[Tensor]]) -> Tensor:
        for stage, values in zip(stages, weights, strict=True):
            for p, value in zip(stage, values, strict=True):
                p.data = value
        x, y = batch
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    for k in range(updates):
        old = [after[max(0, k - age)][i] for i, age in enumerate(ages)]
        grads = iter(torch.autograd.grad(use(old), [p for stage in stages for p in stage]))
        after.append([[w - rate * next(grads) for w in stage] for stage in after[-1]])
    loss = use(after[-1]).item()
    return loss if math.isfinite(loss) else math.inf


def planned(place: Sequence[int], m: int, times: Sequence[float], cap: int, room: int) -> Schedule:
    """The order that comes about if each rank, whenever it is free, begins the first thing it can:
    B before F before W, of two chunks the last.

    place: the rank of each stage
    times: of F on each stage; B and W take as long
    cap, room: most activations that a rank holds, and how many of them the first chunk leaves free

    >>> from labutils.schedule import Durations, simulate, vee
    >>> half = [0.5] * 8
    >>> plan = planned(vee(4), 8, half, 8, 2)
    >>> simulate(plan, Durations(half, half, half)).period, max(map(plan.peak, range(4)))
    (27.0, 8)
    """
    p = 1 + max(place)
    board = Board(Schedule("planned", ((),) * p, (tuple(place),), m, True), cap)
    rows: list[list[Op]] = [[] for _ in range(p)]
    free, done = [0.0] * p, dict[Op, float]()
    left = {(kind, stage): 0 for kind in "BFW" for stage in range(len(place))}

    def key(op: Op) -> tuple[float, int, int]:
        start = max([free[place[op.stage]], *(done[each] for each in board.schedule.inputs(op))])
        return start, "BFW".index(op.kind), op.micro_batch if op.kind == "W" else -op.stage

    def may(op: Op) -> bool:
        rank = place[op.stage]
        full = op.kind == "F" and op.stage < p and board.held[rank] + room >= cap
        return not full and board.why_not(rank, op) is None

    while left:
        ops = [Op(kind, stage, k) for (kind, stage), k in left.items()]
        op = min(filter(may, ops), key=key)
        rank = place[op.stage]
        done[op] = free[rank] = key(op)[0] + times[op.stage]
        board.play(rank, op)
        rows[rank].append(op)
        left[op[:2]] += 1
        if left[op[:2]] == m:
            del left[op[:2]]
    return replace(board.schedule, ranks=tuple(map(tuple, rows)))
