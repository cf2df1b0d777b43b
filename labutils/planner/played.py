"""A plan, played on the clock: every operation of every rank, and what it waits for."""

from typing import TYPE_CHECKING

import numpy as np

from labutils.config import ModelConfig
from labutils.planner import stages, work
from labutils.planner.cluster import Cluster
from labutils.planner.rates import Rates
from labutils.planner.work import LINKS, WORK, Plan

if TYPE_CHECKING:
    from labutils.clock import Played


def timeline(
    model: ModelConfig, plan: Plan, rates: Rates, cluster: Cluster | None = None
) -> "Played":
    """The step of a plan of 1F1B or GPipe in time: of each stage one rank, whose peers on the
    other axes do the same. Nothing overlaps: messages are on the lane of who sends them.

    cluster: whose links between nodes slow what leaves a node; None: all is one node

    Invariant: `spent` of every rank adds up to the makespan; that is the total of `critical_path`
    where the slowest stage is the first or the last.
    Raises ValueError for other schedules, and for ZeRO 2 and 3, which send beside computing.
    """
    from labutils import schedule  # loads for longer than a search takes

    name = work.PLANNED[plan.schedule]
    if name not in ("one_f_one_b", "gpipe") or plan.zero > 1 or plan.recompute:
        raise ValueError(
            f"schedule={name!r}, zero={plan.zero}, recompute={plan.recompute}: only one_f_one_b "
            "and gpipe with zero=0 or 1, and with nothing computed again, are played"
        )
    each = rates.seconds.copy()
    if cluster is not None:
        for axis, times in cluster.slowness(plan, work.ulysses(model, plan)).items():
            each[WORK.index(axis)] *= times

    def parts(row: np.ndarray, kind: str) -> dict[str, float]:
        """Seconds of a row of work: of computing, and on each axis."""
        seconds = (each * row).tolist()
        sent = zip(LINKS, seconds[4:], strict=True)
        return {kind: sum(seconds[:4])} | {axis: time for axis, time in sent if time}

    at = stages.of_ranks(model, plan, range(plan.pp))
    kinds = [work.layer(model, plan, experts) for experts in (False, True)]
    kinds += [work.embedding(model, plan), work.head(model, plan)]
    counts = np.stack([at.plain, at.sparse, at.first, at.last], axis=1)  # [ranks, kinds]
    F, B = (counts @ np.array([pair[i] for pair in kinds]) for i in (0, 1))
    pairs = zip(F, B, strict=True)
    rows = [{"F": parts(f, "forward"), "B": parts(b, "backward")} for f, b in pairs]
    update = work.update(model, plan, *stages.held_weights(model, plan, at))
    return schedule.whole_step(
        getattr(schedule, name)(plan.pp, plan.micro_batches),
        rows,
        send=float(each @ work.message(model, plan)),
        last=[parts(row, "update") for row in update.T],
    )
