"""Activation checkpointing: keep less, compute again. `checkpoint`, `plan`, `run`, `apply`."""

from labutils.checkpointing.execute import POLICIES, apply, costs, overhead, run, stages
from labutils.checkpointing.plans import (
    Costs,
    Reversal,
    Run,
    Stage,
    Step,
    binomial,
    binomial_evaluations,
    frontier,
    keep_nothing,
    plan,
    segments,
    smallest_budget,
)
from labutils.checkpointing.recompute import checkpoint
