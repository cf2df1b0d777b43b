"""A step of one rank, run dry: what no formula knows, and what formulas are compared with."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from labutils import expert_parallel, measure, step, units
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.flash.algorithms import TILING
from labutils.flash.few_tiles import FewTiles
from labutils.ledger import Ledger
from labutils.memory.recording import BATCH
from labutils.timeline import History
from labutils.trace import OneRank, Trace
from labutils.world import Rank, World

_few_tiles = functools.lru_cache(maxsize=64)(FewTiles)


class Rehearsal(NamedTuple):
    """What a rank sent in a step, what it holds after it, and what it held in the course of it."""

    sent: Ledger
    states: Ledger
    history: History

    @property
    def peak_states(self) -> Ledger:
        """What it held at the fullest moment, activations and the batch aside."""
        return self.history.only("weights", "gradients", "optimizer").peak.ledger


@functools.lru_cache(maxsize=64)
def rehearsal(
    model: ModelConfig, train: TrainConfig, mesh: Mesh, rank: int, messages: str = "matched"
) -> Rehearsal:
    """A step of a training that has begun, without values, of one rank; tokens are routed evenly.

    messages: between stages, as `pipeline.actions` has them: "paired", they are with their receiver
        when a send is over, and what real ranks hold is what is held here
    Cost: some hundredths of a second for each layer and micro-batch; with ring attention over n
    ranks a tenth for each of n, whatever the tokens (`FewTiles`).
    """
    (L, m), p = (model.num_layers, train.accumulation(mesh.dp)), mesh.pp
    said = f"passes of num_layers={L} on pp={p} with {m} micro-batches, to be run dry, are"
    units.writable(L * m // p, said, "take fewer layers, or micro-batches", most=10**5)
    tokens = train.micro_batch * model.seq_len // mesh.cp
    tokens //= mesh.tp if train.sequence else 1
    assume: dict[type, Any] = {bool: True, float: 0.0}
    if model.num_experts > 1:
        assume |= expert_parallel.balanced(model, tokens)

    def alone() -> Rehearsal:
        TILING.set(_few_tiles)
        with World(mesh, engine="dry", assume=assume) as world:
            return world.run(program, model, train, messages, rank=rank)

    with ThreadPoolExecutor(1) as pool:  # where no mode, hook or autocast of the caller's is seen
        return pool.submit(alone).result()


class Told(NamedTuple):
    """A step by two shorter ones: `more` times what `longer` has more than `short` is to be added
    to that. A step that was run itself is both, and nothing is."""

    short: Rehearsal
    longer: Rehearsal
    more: int

    def ledger(self, ask: Callable[[Rehearsal], Ledger]) -> Ledger:
        """What `ask` says of the step."""
        return Ledger(
            replace(
                line,
                amount=line.amount + self.more * (next_.amount - line.amount),
                count=line.count + self.more * (next_.count - line.count),
            )
            for line, next_ in zip(ask(self.short), ask(self.longer), strict=True)
        )


def told(model: ModelConfig, train: TrainConfig, mesh: Mesh, rank: int) -> Told:
    """Two rehearsals that tell of a step of many micro-batches. Once they fill the pipeline each
    further one adds its rows to every moment, and nothing else; not under a schedule that holds
    the more the more there are (GPipe), of which another moment may become the fullest.

    model, train, mesh, rank: as in `rehearsal`
    """
    plan, m = step.schedule_of(train, mesh), train.accumulation(mesh.dp)
    by = 2 * mesh.pp if mesh.pp > 1 else 1  # numbers that every schedule takes
    few = 2 * plan.stages + 2
    few += (m - few) % by
    if m > 2 * few + by and isinstance(train.schedule, str):
        rows, place = mesh.dp * train.micro_batch, mesh.coords(rank)["pp"]
        fewer = [replace(train, global_batch=n * rows) for n in (few, few + by)]
        if step.schedule_of(fewer[0], mesh).peak(place) == plan.peak(place):
            short, longer = (rehearsal(model, each, mesh, rank) for each in fewer)
            tops = short.history.peak, longer.history.peak
            if tops[0].event == tops[1].event and tops[0].phase == tops[1].phase:
                return Told(short, longer, (m - few) // by)
    whole = rehearsal(model, train, mesh, rank)
    return Told(whole, whole, 0)


def program(
    rank: Rank, model: ModelConfig, train: TrainConfig, messages: str = "matched"
) -> Rehearsal:
    """What a rank runs, on any engine: a step of a training that has begun, recorded.

    messages: as in `rehearsal`
    """
    mine = step.build(model, train, rank.mesh)(rank)
    rows = train.global_batch // rank.mesh.dp, model.seq_len // rank.mesh.cp
    sides = [torch.zeros(rows, dtype=torch.long) for _ in range(2)]
    batches = list(zip(*(side.split(train.micro_batch) for side in sides), strict=True))
    for optimizer in mine.inner:
        _begin(optimizer)
    before = len(rank._finish())
    with measure.recording(mine.stages, *mine.inner) as recorder:
        recorder.guess(sides, "activations", BATCH)
        mine(batches, messages=messages)
    events = rank._finish()[before:]
    sent = Trace(OneRank(rank.size, rank.rank, events)).sent
    states = measure.model_states(mine.stages, *mine.inner)
    return Rehearsal(sent, states, recorder.history())


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Make what the optimizer keeps, as its first step does."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    for parameter in stepped:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
