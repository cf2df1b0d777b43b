"""A schedule carried out: operations on stages of a model, messages between its ranks."""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labutils import units
from labutils.data_parallel import Replica
from labutils.gradients import gradient_of, postponed
from labutils.model import IGNORED, cross_entropy
from labutils.pipeline.messages import actions
from labutils.pipeline.stages import PipelineStage, common, placed, shared_with
from labutils.pipeline.stashing import Stash
from labutils.pipeline.weight_gradients import Later, pay
from labutils.schedule import Durations, Op, PipelineRun, Schedule
from labutils.world import Comm, Work

Batch = tuple[Tensor, Tensor]  # tokens [b, s] and targets [b, s]
Loss = Callable[[Tensor, Tensor], Tensor]
Key = tuple[int, int]  # a stage and a micro-batch


def mean_cross_entropy(
    logits: Float[Tensor, "b s v"], targets: Int[Tensor, "b s"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token, as `GPT.loss`; a target of −100 counts for nothing."""
    return cross_entropy(logits, targets)


@dataclass(frozen=True)
class RankRun:
    """What a rank did in one step.

    loss: of all micro-batches together, on a rank that runs the last stage (its part of it, where
        micro-batches flow both ways); None elsewhere
    ops: its operations in the order in which they ran
    starts, ends: when, in seconds of `time.perf_counter`
    in_flight: the activations held, of one stage and micro-batch each, during each operation
    versions: most versions of its weights that it held at once
    """

    loss: Tensor | None
    ops: tuple[Op, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    in_flight: tuple[int, ...]
    versions: int


def run(
    stages: nn.Module,
    schedule: Schedule,
    comm: Comm,
    batches: Sequence[Batch],
    *,
    loss: Loss = mean_cross_entropy,
    messages: str = "matched",
    pace: Durations | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    replicas: Comm | None = None,
) -> RankRun:
    """One step of this rank: its operations of the schedule, as they stand there. The gradient of
    the loss of all micro-batches together is added to `.grad`; or, where the schedule updates as it
    goes (PipeDream), the weights are stepped.

    stages: those of this rank (`local`)
    comm: the ranks of the pipeline, rank.comm("pp")
    batches: all micro-batches, the same on every rank: (tokens, targets), of any size
    loss: mean over the targets that count, which are not −100, of logits and targets; with tensor
        parallelism its own
    messages: how they are sent: see `actions`
    pace: seconds that each operation takes at least: a rank sleeps for the rest, as a host waits
        for its GPU; fused ones run one after the other
    optimizer: over the parameters of `stages`, for a schedule that updates as it goes; its loss is
        the mean of those that it met on the way
    replicas: the ranks of data parallelism, rank.comm("dp"), where these may have other numbers of
        targets: the means over them of losses and gradients are then those of all batches as one

    Invariant: loss and gradients are those of the whole model on the whole batch, up to rounding;
    a micro-batch counts for its targets, and one without any adds nothing.
    Cost: bytes sent as in `predict.sent`; activations as many as `schedule.in_flight` says. What is
    sent is held until its receiver has it: a dry run, which waits for nobody, holds none of it.
    Raises ValueError: where stages or batches are not those of the schedule, or that is illegal, or
        what is around the stages does not go with it; where no target counts at all.
    """
    units.instance(stages, nn.Module, "run")
    units.instance(schedule, Schedule, "run")
    units.instance(comm, Comm, "run")
    units.instance(batches, Sequence, "run")
    rank = _Execution(stages, schedule, comm, batches, loss, pace, replicas)
    if schedule.every or optimizer is not None:
        rank.stash = Stash(rank.stages, schedule, comm.rank, optimizer)
    for action in actions(schedule, comm.rank, messages):
        getattr(rank, f"_{action.do}")(action.op, action.peer)
    for work in rank.under_way:
        work.wait()
    _add_up(*rank.shared, comm)
    starts, ends = zip(*rank.times, strict=True)
    versions = rank.stash.peak if rank.stash else 1
    whole = rank.loss
    if whole is not None and schedule.every:
        whole = whole * schedule.every / len(batches)
    return RankRun(whole, tuple(rank.ops), starts, ends, tuple(rank.in_flight), versions)


class _Execution:
    """Where a rank stands: what has come, what is kept for a backward pass, what is on its way."""

    def __init__(
        self,
        stages: nn.Module,
        schedule: Schedule,
        comm: Comm,
        batches: Sequence[Batch],
        loss: Loss,
        pace: Durations | None,
        replicas: Comm | None,
    ) -> None:
        found = [part for part in stages.modules() if isinstance(part, PipelineStage)]
        self.stages = {stage.index: stage for stage in found}
        wanted = placed(schedule, comm.rank)
        if sorted(self.stages) != wanted or any(s.count != schedule.stages for s in found):
            got = ", ".join(f"{stage.index} of {stage.count}" for stage in found) or "none"
            need = f"{', '.join(map(str, wanted))} of {schedule.stages}"
            remedy = f"pass local(split(model, {schedule.stages}), schedule, comm.rank)"
            raise ValueError(f"rank {comm.rank} runs stages {need}, got {got}: {remedy}")
        if len(schedule.ranks) != comm.size or len(batches) != schedule.micro_batches:
            need = f"{len(schedule.ranks)} ranks and {schedule.micro_batches} micro-batches"
            got = f"{comm.size} and {len(batches)}"
            raise ValueError(f"{schedule.name} is for {need}, got {got}: make one for these")
        _check_around(stages, schedule)
        self.shared = _shared(self.stages, schedule, comm.rank)
        self.schedule, self.comm, self.batches, self.compute_loss = schedule, comm, batches, loss
        last = schedule.stages - 1 in self.stages  # where the loss is; elsewhere nobody asks
        self.shares = _shares(batches, schedule.every, replicas) if last else torch.empty(0)
        self.pace = {kind: pace.of(kind, schedule.stages) for kind in "FBW"} if pace else None
        self.came: dict[Op, Tensor] = {}
        self.tapes: dict[Key, tuple[Tensor, GradientEdge | None]] = {}
        self.later: dict[Key, Later] = {}  # of each split backward pass
        self.seeds: dict[int, Tensor] = {}  # of each micro-batch: its part in the loss
        self.under_way: list[Work] = []
        self.stash: Stash | None = None
        self.loss: Tensor | None = None
        self.ops: list[Op] = []
        self.times: list[tuple[float, float]] = []
        self.in_flight: list[int] = []

    # -- what an action does -----------------------------------------------------------------------

    def _run(self, op: Op, _: int | None) -> None:
        start = time.perf_counter()
        held = self.tapes.keys() | self.later.keys()
        compute = {"F": self.forward, "B": self.backward, "W": self.weight}[op.kind]
        result = compute(op.stage, op.micro_batch)
        if result is not None:
            self.came[op] = result
        self.in_flight.append(len(held | self.tapes.keys()))
        if self.pace:
            seconds = self.pace[op.kind][op.stage]
            if op.kind == "B" and not self.schedule.split:
                seconds += self.pace["W"][op.stage]
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
        self.ops.append(op)
        self.times.append((start, time.perf_counter()))

    def _isend(self, op: Op, peer: int) -> None:
        with self.comm.record(_name(op)):
            self.under_way.append(self.comm.isend(self.came.pop(op), peer))
        for work in [work for work in self.under_way if work.done()]:
            work.wait()  # lets go of what has arrived
            self.under_way.remove(work)

    def _send(self, op: Op, peer: int) -> None:
        with self.comm.record(_name(op)):
            self.comm.send(self.came.pop(op), peer)

    def _recv(self, op: Op, peer: int) -> None:
        stage = next(iter(self.stages.values()))
        with self.comm.record(_name(op)):
            self.came[op] = self.comm.recv(stage.message(self.batches[op.micro_batch][0]), peer)

    # -- what an operation computes ----------------------------------------------------------------

    def forward(self, s: int, k: int) -> Tensor | None:
        """F: what the next stage reads; the graph behind it is kept, it itself is not."""
        tokens, targets = self.batches[k]
        x = self.came.pop(Op("F", s - 1, k)).requires_grad_() if s else tokens
        if self.schedule.split:
            self.later[s, k] = Later([])
        with self.later.get((s, k), nullcontext()):
            y = self.stages[s](x) if self.stash is None else self.stash.forward(s, k, x)
        if s == self.schedule.stages - 1:
            y = self.compute_loss(y, targets)
            self.seeds[k] = self.shares[k].to(y.dtype)
            part = y.detach() * self.seeds[k]
            part = part.where(self.shares[k] > 0, 0)  # a mean over no target is 0/0
            self.loss = part if self.loss is None else self.loss + part
        self.tapes[s, k] = x, get_gradient_edge(y) if y.requires_grad else None
        return y.detach() if s < self.schedule.stages - 1 else None

    def backward(self, s: int, k: int) -> Tensor | None:
        """B: what the stage before waits for; a W of its own is still owed then."""
        x, edge = self.tapes.pop((s, k))
        last = s == self.schedule.stages - 1
        grad = self.seeds.pop(k) if last else self.came.pop(Op("B", s + 1, k), None)
        if self.stash is not None:
            assert edge is not None  # what keeps old weights trains them
            self.stash.backward(k, lambda: torch.autograd.backward(edge, grad))
        elif edge is not None and self.schedule.split:
            self._first_half(s, k, edge, grad)
        elif edge is not None:
            torch.autograd.backward(edge, grad)
        return x.grad if s else None

    def _first_half(self, s: int, k: int, edge: GradientEdge, grad: Tensor | None) -> None:
        """B where W is an operation of its own. Gradients that are reduced when a backward pass
        ends wait for that of W, in the order in which a whole one has them."""
        later = self.later[s, k]
        with later, postponed() as waiting:
            torch.autograd.backward(edge, grad)
        if waiting:
            later.owed += [(each, functools.partial(_taken, each)) for each in waiting]
            place: dict[Tensor, int] = {
                weight: i for i, weight in enumerate(self.stages[s].parameters())
            }
            later.owed.sort(key=lambda due: -place.get(due[0], 0))

    def weight(self, s: int, k: int) -> None:
        """W: the gradients of the weights."""
        pay(self.later.pop((s, k)).owed)


def _shares(batches: Sequence[Batch], every: int, replicas: Comm | None) -> Float[Tensor, " m"]:
    """The part of each micro-batch in the loss of the update to which it belongs: its targets that
    count, of those of all. Weights are updated after `every` micro-batches, or after the last."""
    counts = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).double()
    updates = counts.split(every or len(batches))
    totals = torch.stack([each.sum() for each in updates])
    if replicas is not None and replicas.size > 1:
        with replicas.record("targets"):
            totals = replicas.all_reduce(totals) / replicas.size
    if not isinstance(totals, FakeTensor) and not totals.all():  # fake ones have no values
        nothing = "all targets of an update are −100, and a mean over none is 0/0"
        raise ValueError(f"{nothing}: leave these micro-batches out")
    return torch.cat([each / total for each, total in zip(updates, totals, strict=True)])


def _taken(parameter: Tensor) -> Tensor:
    """The gradients that wait in `.grad`, out of it: of all B until now, unless a W had them."""
    grad, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if grad is None else grad


def _name(op: Op) -> str:
    return {"F": "send forward", "B": "send backward"}[op.kind]


def _shared(
    stages: dict[int, PipelineStage], schedule: Schedule, rank: int
) -> tuple[list[Tensor], int | None]:
    """The parameters that another rank has, too, and which."""
    peer = shared_with(schedule, rank, next(iter(stages.values())).config.tied)
    parameters = common([stages[s] for s in sorted(stages)], schedule, rank)
    if any(gradient_of(parameter) is not None for parameter in parameters):
        twice = "what two ranks have would be added up twice: call zero_grad() before run"
        raise ValueError(f"rank {rank} holds gradients from before, and {twice}")
    return parameters, peer


def _check_around(stages: nn.Module, schedule: Schedule) -> None:
    """Raises ValueError if the hooks around stages would not see what they need: whole backward
    passes, each of one stage, with all of its weights."""
    replicas = [part.module for part in stages.modules() if isinstance(part, Replica)]
    shards = [part for part in stages.modules() if hasattr(part, "_sharded")]
    around = " and ".join(["replicate"] * bool(replicas) + ["zero.shard"] * bool(shards))
    if around and (schedule.split or schedule.every):
        why = "splits backward passes" if schedule.split else "keeps old weights"
        remedy = "step a zero.Optimizer of level 1, or call average_gradients after run"
        if schedule.every:
            remedy = "call average_gradients in a hook of register_step_pre_hook of the optimizer"
        raise ValueError(f"{schedule.name} {why}, and {around} knows whole ones only: {remedy}")
    if not all(isinstance(part, PipelineStage) for part in (*replicas, *shards)):
        remedy = "give it each stage by itself, not the list of them"
        raise ValueError(f"{around} is around something that is no stage: {remedy}")
    if schedule.stages > 1 and any(isinstance(s, PipelineStage) and s.config.tied for s in shards):
        remedy = "build the model with tied=False, or step a zero.Optimizer"
        raise ValueError(f"zero.shard cuts a tied embedding differently at both ends: {remedy}")


def _add_up(parameters: Sequence[Tensor], peer: int | None, comm: Comm) -> None:
    """Adds the gradients of parameters that a peer has, too, wherever they are: a rank of ZeRO has
    the same share of them as its peer."""
    for grad in map(gradient_of, parameters):
        if grad is not None and peer is not None:
            with comm.record("gradients"):
                theirs = comm.send_recv(grad, peer, torch.empty_like(grad), peer)
            grad.add_(theirs)


def joined(schedule: Schedule, runs: Sequence[RankRun]) -> PipelineRun:
    """What all ranks did, as one run that `simulate` could have given; times begin at 0. Its
    schedule has the order in which operations ran; ValueError for the runs of other ranks."""
    if len(runs) != len(schedule.ranks):
        told = f"{schedule.name} has {len(schedule.ranks)} ranks, got the runs of {len(runs)}"
        raise ValueError(f"{told}: give what pipeline.run returned on each")
    zero = min(start for each in runs for start in each.starts)
    ran = replace(schedule, ranks=tuple(each.ops for each in runs))
    starts = [[start - zero for start in each.starts] for each in runs]
    return PipelineRun(ran, starts, [[end - zero for end in each.ends] for each in runs])
