"""Recipes for a plan: only legal changes, never for the worse, and a winner without a search."""

from dataclasses import replace

import pytest

from labutils import planner
from labutils.config import Hardware, ModelConfig
from labutils.planner import climb, plans
from labutils.planner.work import Plan

MODEL = ModelConfig(
    num_layers=8, d_model=1024, num_heads=8, num_kv_heads=8, d_ff=4096, vocab_size=32000,
    seq_len=2048, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip


def job(model=MODEL, nodes=1, gigabytes=80):
    device = replace(Hardware.named("H100"), memory=gigabytes * 10**9)
    cluster = planner.Cluster(device=device, nodes=nodes)
    return planner.Job(model=model, cluster=cluster, batch_tokens=2**17)


def asking(asked):
    known = {}

    def ask(plan):
        assert not plans.illegal(asked, plan)
        known[plan] = planner.estimate(asked, plan)
        return known[plan]

    return ask, known


def test_what_a_mesh_decides_is_completed():
    asked = job()
    assert climb.start_of(asked) == Plan(dp=8, micro_batches=8)
    assert climb.start_of(asked, tp=8) == Plan(tp=8, micro_batches=64, zero=0)
    left = climb.completed(asked, Plan(dp=8, schedule=2, chunks=4, micro_batch=2))
    assert left == Plan(dp=8, micro_batch=2, micro_batches=4)
    few = replace(asked, batch_tokens=4 * 2048)  # fewer sequences than ranks: a pipeline
    assert climb.start_of(few) == Plan(dp=4, pp=2, micro_batches=1)


def test_a_change_is_legal_and_one_at_a_time():
    asked = job(replace(MODEL, num_experts=8, top_k=2))
    start = climb.start_of(asked, ep=2)
    near = list(climb.changes(asked, start))
    assert not [p for p in near if plans.illegal(asked, p) or p == start]
    assert {p.ep for p in near} == {1, 2, 4} and {p.recompute for p in near} == {0, 1, 2}
    assert {p.ep for p in climb.changes(asked, replace(start, ep=1))} == {1, 2}
    assert {p.ep for p in climb.changes(asked, replace(start, ep=8))} == {4, 8}
    for plan in near:  # half of one axis to another, or one thing beside the mesh
        moved = [
            axis for axis in ("dp", "tp", "cp", "pp") if getattr(plan, axis) != getattr(start, axis)
        ]
        assert len(moved) in (0, 2)


def test_it_climbs_and_finds_what_the_search_finds():
    asked = job(gigabytes=24)
    ask, known = asking(asked)
    path = climb.climb(asked, ask, climb.start_of(asked))
    steps = [climb.better(ask(plan)) for plan in path]
    assert steps == sorted(steps, reverse=True) and len(path) > 1
    ends = [climb.better(ask(p)) for p in climb.changes(asked, path[-1])]
    assert min(ends) >= steps[-1]
    found, best = planner.search(asked), climb.several(asked, ask)
    assert ask(best).fits and len(known) < len(found) / 3
    assert found.fastest.seconds <= ask(best).seconds < 1.1 * found.fastest.seconds


def test_starts_are_of_a_cluster_however_small():
    asked = replace(job(), cluster=replace(job().cluster, gpus_per_node=2))
    best = climb.several(asked, asking(asked)[0])  # of up to eight ranks of an axis
    assert best.gpus == 2 and not plans.illegal(asked, best)
    with pytest.raises(ValueError, match=r"\{'tp': 2, 'pp': 2\} ask for 4 ranks: the cluster has 2"):
        climb.start_of(asked, tp=2, pp=2)
    with pytest.raises(ValueError, match="tp must be at least 1, got 0"):
        climb.start_of(asked, tp=0)


def test_it_recomputes_where_nothing_else_helps():
    asked = job(gigabytes=4)
    ask, _ = asking(asked)
    best = climb.several(asked, ask)
    assert climb.better(ask(best)) <= climb.better(ask(climb.climb(asked, ask, best, (0,))[-1]))


def test_what_does_not_fit_is_worse_than_what_is_slow():
    plan = Plan(dp=8, micro_batches=8)
    tight, roomy = (planner.estimate(job(gigabytes=n), plan) for n in (1, 80))
    slow = replace(roomy, seconds=1e6)
    assert climb.better(roomy) < climb.better(slow) < climb.better(tight)
