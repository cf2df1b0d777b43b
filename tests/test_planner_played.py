"""A plan on the clock: equal to the critical path, and every second of a rank has a name."""

from dataclasses import replace

import pytest

from labutils import planner
from labutils.config import Hardware
from labutils.planner import rates

B200 = planner.Rates.of(Hardware.named("B200"))
RUNS = planner.measured()


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_a_measured_step_is_played_as_its_critical_path(run):
    step = planner.timeline(run.model, run.plan, B200)
    path = float(rates.critical_path(run.model, run.plan.column(), B200).total(B200)[0])
    assert step.makespan == pytest.approx(path, rel=1e-12)
    assert step.makespan == pytest.approx(run.seconds, rel=0.07)
    for rank in range(run.plan.pp):
        spent = step.spent(rank)
        assert sum(spent.values()) == pytest.approx(step.makespan, rel=1e-12)
        degrees = {axis: getattr(run.plan, axis) for axis in ("tp", "cp", "ep", "pp")}
        assert {axis for axis, n in degrees.items() if n > 1} == spent.keys() & degrees.keys()
        assert ("bubble" in spent) is (run.plan.pp > 1)


def test_who_waits_for_whom_in_a_plan():
    run = next(run for run in RUNS if run.plan.pp == 2)
    step = planner.timeline(run.model, run.plan, B200)
    first = step.waits_of(1)[0]
    assert str(first.op) == "forward F0@1" and str(first.needs) == "pp F0@0"
    sent, whole = (step.spent(0)[kind] for kind in ("dp", "bubble"))
    slow = planner.Cluster(device=Hardware.named("B200"), nodes=8)
    spread = replace(run.plan, dp=32)  # eight nodes
    assert planner.timeline(run.model, spread, B200, slow).spent(0)["dp"] > sent and whole > 0


@pytest.mark.parametrize("what", [{"schedule": 3}, {"zero": 3}, {"recompute": 2}])
def test_what_overlaps_is_not_played(what):
    with pytest.raises(ValueError, match="are played"):
        planner.timeline(RUNS[0].model, replace(RUNS[0].plan, **what), B200)
