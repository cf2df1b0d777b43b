"""Activation checkpointing: keep less, compute again. `checkpoint`, `plan`, `run`, `apply`."""

from labutils.checkpointing.execute import POLICIES, apply, costs, overhead, run, stages
from labutils.checkpointing.plans import (
    Costs,
    Held,
    Plan,
    Run,
    Stage,
    Step,
    binomial,
    binomial_evaluations,
    frontier,
    keep_nothing,
    plan,
    segments,
    simulate,
    smallest_budget,
    unroll,
)
from labutils.checkpointing.recompute import checkpoint

__all__ = [
    "POLICIES",
    "Costs",
    "Held",
    "Plan",
    "Run",
    "Stage",
    "Step",
    "apply",
    "binomial",
    "binomial_evaluations",
    "checkpoint",
    "costs",
    "frontier",
    "keep_nothing",
    "overhead",
    "plan",
    "run",
    "segments",
    "simulate",
    "smallest_budget",
    "stages",
    "unroll",
]
