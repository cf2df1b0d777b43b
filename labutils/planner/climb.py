"""Recipes for a plan: from a start, one change at a time, as an engineer does by hand; and from
several starts. A search that asks for a few hundred plans instead of all of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from labutils import units
from labutils.planner.plans import CHUNKS, Estimate, Job, illegal
from labutils.planner.work import Plan

_AXES = ("dp", "tp", "cp", "pp")
ALL = (0, 1, 2)  # none, selective, full
Ask = Callable[[Plan], Estimate]


def completed(job: Job, plan: Plan) -> Plan:
    """The plan with what its mesh decides: as many micro-batches as the batch leaves, no schedule
    where there is no pipeline, no ZeRO where there is one replica."""
    if plan.pp == 1:
        plan = replace(plan, schedule=0, chunks=1)
    if plan.replicas == 1:
        plan = replace(plan, zero=0)
    return replace(plan, micro_batches=job.batch // plan.dp // plan.micro_batch)


def start_of(job: Job, **degrees: int) -> Plan:
    """Data parallelism over all that the given axes leave, or over as many ranks as there are
    sequences; what is left over is a pipeline.

    Raises ValueError: for degrees that ask for more ranks than the cluster has.
    """
    others = math.prod(units.whole(n, axis, 1) for axis, n in degrees.items() if axis != "ep")
    if others > (most := job.cluster.gpus):
        raise ValueError(f"{degrees} ask for {others} ranks: the cluster has {most}")
    dp = min(job.cluster.gpus // others, job.batch)
    rest = job.cluster.gpus // others // dp
    plan = Plan(**({"dp": dp} | degrees | {"pp": degrees.get("pp", 1) * rest}))
    return completed(job, plan)


def changes(job: Job, plan: Plan) -> Iterator[Plan]:
    """All legal plans that are one change away: a factor of 2 from one axis to another, twice or
    half the ranks of experts, another level of ZeRO, recomputation, micro-batch or schedule."""
    for found in _changes(job, plan):
        found = completed(job, found)
        if found != plan and not illegal(job, found):
            yield found


def _changes(job: Job, p: Plan) -> Iterator[Plan]:
    for source in _AXES:
        if getattr(p, source) % 2 == 0:
            for to in (axis for axis in _AXES if axis != source):
                degrees = {source: getattr(p, source) // 2, to: 2 * getattr(p, to)}
                yield replace(p, **degrees)
                if to == "pp":  # a longer pipeline is worth it with chunks, or not at all
                    yield from (replace(p, **degrees, schedule=2, chunks=v) for v in (2, 4, 8))
    if job.model.num_experts > 1:
        yield replace(p, ep=2 * p.ep)
        yield replace(p, ep=max(1, p.ep // 2))
    yield from (replace(p, zero=level) for level in range(4))
    yield from (replace(p, recompute=again) for again in ALL)
    yield from (replace(p, micro_batch=size) for size in (1, 2, 4))
    if p.pp > 1:
        yield replace(p, schedule=0, chunks=1)
        yield from (replace(p, schedule=2, chunks=v) for v in CHUNKS)


def better(estimate: Estimate) -> tuple[float, float]:
    """What is to be small: first the bytes that are too many, then the seconds."""
    return max(0.0, -estimate.headroom), estimate.seconds


def climb(job: Job, ask: Ask, start: Plan, recompute: Sequence[int] = ALL) -> list[Plan]:
    """The plans from `start` to one that no single change makes better: each is the best change of
    the one before it.

    job: what is to be trained, and where
    ask: what a plan takes and holds
    recompute: which recomputation it may choose
    """
    path = [start]
    while True:
        near = [p for p in changes(job, path[-1]) if p.recompute in recompute]
        best = min(near, key=lambda p: better(ask(p)), default=path[-1])
        if better(ask(best)) >= better(ask(path[-1])):
            return path
        path.append(best)


def several(job: Job, ask: Ask) -> Plan:
    """The best plan of climbs from four starts: plain data parallelism, and eight ranks of tensor,
    context and pipeline parallelism. Nothing is computed again where a plan fits without.
    """
    width = min(8, job.cluster.gpus)
    experts = {"ep": min(width, job.model.num_experts)} if job.model.num_experts > 1 else {}
    found = []
    for degrees in ({}, {"tp": width}, {"cp": width}, {"pp": width}):
        start = start_of(job, **degrees, **experts)
        if not illegal(job, start):
            found.append(climb(job, ask, start, (0,))[-1])
    best = min(found, key=lambda p: better(ask(p)))
    if not ask(best).fits:
        best = climb(job, ask, best)[-1]
    return best
