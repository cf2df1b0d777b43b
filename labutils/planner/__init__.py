"""The planner: which plan trains a model on a cluster, how long its step is, what every stage
holds, and why another is not better."""

from labutils.planner.cluster import Cluster
from labutils.planner.plans import Estimate, Found, Job, estimate, search, sensitivity, why
from labutils.planner.rates import MeasuredStep, Rates, calibrate, measured, residuals, which_runs
from labutils.planner.recipe import Choice, Recipe, configure
from labutils.planner.stages import ledger
from labutils.planner.work import Plan

__all__ = [
    "Choice",
    "Cluster",
    "Estimate",
    "Found",
    "Job",
    "MeasuredStep",
    "Plan",
    "Rates",
    "Recipe",
    "calibrate",
    "configure",
    "estimate",
    "ledger",
    "measured",
    "residuals",
    "search",
    "sensitivity",
    "which_runs",
    "why",
]  # fmt: skip
