"""The search: every legal plan, none twice; the winner of brute force; reasons with numbers."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from labutils import pipeline, planner, predict, schedule, step, units
from labutils.config import Hardware, Link, ModelConfig
from labutils.planner import plans, proof, rates, stages, work

H100 = Hardware.named("H100")
SMALL = ModelConfig(
    num_layers=6, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=4096, vocab_size=32000,
    seq_len=2048, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip
MIXTURE = replace(SMALL, num_experts=8, top_k=2)


def job(model=SMALL, nodes=2, **given):
    cluster = planner.Cluster(device=given.pop("device", H100), nodes=nodes)
    return planner.Job(model=model, cluster=cluster, batch_tokens=2**16, **given)


def brute(asked):
    """Every plan that the rules, asked one plan at a time, let through."""
    n, sizes = asked.cluster.gpus, [1, 2, 4, 8]
    for tp, cp, pp, dp, ep in itertools.product(sizes, repeat=5):
        if tp * cp * pp * dp == n:
            how = [(0, 1), (1, 1), (3, 1), *((2, v) for v in plans.CHUNKS)]
            for b, m, (kind, v) in itertools.product(sizes, sizes, how):
                for zero, again in itertools.product(range(4), range(3)):
                    plan = planner.Plan(
                        tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, micro_batch=b, micro_batches=m,
                        schedule=kind, chunks=v, zero=zero, recompute=again,
                    )  # fmt: skip
                    if b * m * dp == asked.batch and not plans.illegal(asked, plan):
                        yield plan


@pytest.mark.parametrize("model, stack", [(SMALL, "course"), (MIXTURE, "megatron")])
def test_the_winner_is_that_of_brute_force(model, stack):
    asked = replace(job(model, stack=stack), batch_tokens=2**14)
    asked = replace(asked, cluster=replace(asked.cluster, nodes=1, gpus_per_node=4))
    found, every = planner.search(asked), list(brute(asked))
    listed = [found.plans[i] for i in range(len(found))]
    assert len(set(listed)) == len(listed) and set(listed) == set(every) and len(every) > 300
    some = np.random.default_rng(0).choice(len(every), 40)
    for i in some:  # one at a time as in columns
        alone = planner.estimate(asked, listed[i])
        assert alone.seconds == pytest.approx(found.seconds[i], rel=1e-12)
        assert alone.peak == pytest.approx(found.peaks[i], rel=1e-12)
    fit = [e for plan in every if (e := planner.estimate(asked, plan)).fits]
    assert found.fastest.seconds == pytest.approx(min(e.seconds for e in fit), rel=1e-12)
    assert len(fit) == found.fits.sum()


@pytest.mark.parametrize("model", [SMALL, replace(SMALL, tied=True), replace(MIXTURE, tied=True)])
def test_the_courses_own_step_takes_every_plan_that_is_found_for_it(model):
    found = planner.search(job(model, stack="course"))
    assert set(found.plans.zero) == {0, 1}
    whole = replace(found.plans[0], pp=1, dp=16, cp=1, tp=1, ep=1, micro_batches=2, zero=3, schedule=0, chunks=1)
    assert "zero=3 holds whole layers for a moment" in plans.illegal(job(model, stack="course"), whole)
    for i in np.random.default_rng(2).choice(len(found), 150, replace=False):
        plan = found.plans[int(i)]
        step.check_plan(model, plan.train(model), plan.mesh)
    # What it holds is what is predicted of its fullest rank.
    best = next(e for e in found.best(100) if e.plan.zero == 1 and e.plan.pp > 1)
    asked = model, best.plan.train(model), best.plan.mesh, proof.rank_of(best.plan, best.fullest)
    if model.num_experts == 1:  # but for RoPE's tables and Adam's counters
        lines = [*predict.states(*asked), *predict.activations(*asked)]
        held = sum(line.amount for line in lines if line.name not in ("buffers", "step"))
        assert best.peak == held


@pytest.mark.parametrize("batch", [1, 3, 6, 12])
def test_every_plan_takes_the_whole_batch_and_no_more(batch):
    asked = replace(job(nodes=1), batch_tokens=batch * SMALL.seq_len)
    asked = replace(asked, cluster=replace(asked.cluster, gpus_per_node=4))
    found = plans.enumerate_plans(asked)
    assert np.all(found.dp * found.micro_batch * found.micro_batches == batch)
    assert set(found.micro_batch) == {b for b in plans.MICRO_BATCHES if batch % b == 0}


def test_405b_on_16384_gpus():
    model = replace(ModelConfig.named("llama-3.1-405b"), seq_len=8192)
    asked = job(model, nodes=2048)
    asked = replace(asked, batch_tokens=2**24)
    found = planner.search(asked)
    assert len(found) > 50_000 and 10_000 < found.fits.sum() < len(found)
    best, tied = found.fastest, found.ties
    assert found.best(1)[0] in tied and all(e.fits for e in tied)
    assert all(e.seconds <= 1.03 * best.seconds for e in tied)
    for estimate in found.best(3):
        assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds, rel=1e-9)
    assert 0.3 < best.mfu("6N") < best.mfu("causal") < best.mfu("full") < 0.6
    # No plan of the front is beaten in both; the fastest is its first.
    front = found.pareto()
    assert front[0].seconds == best.seconds
    assert all(a.seconds <= b.seconds and a.peak > b.peak for a, b in itertools.pairwise(front))
    # Meta's plan for 8 K tokens needs more than the reserve leaves.
    theirs = planner.Plan(tp=8, pp=16, dp=128, micro_batches=16, schedule=2, chunks=8)
    assert planner.why(found, theirs).startswith("does not fit: rank 1 of the pipeline needs 8")
    more = planner.sensitivity(found)
    assert 0.02 < more["products + 10 %"] < 0.1 and all(share >= 0 for share in more.values())
    assert more["links between nodes + 10 %"] == pytest.approx(0.00435, rel=0.01)
    assert more["1 node more"] == 0  # 2,049 = 3 · 683 nodes divide nothing
    known = replace(ModelConfig.named("llama-3.1-8b"), seq_len=8192)
    large = planner.search(replace(job(known), batch_tokens=2**22))
    # Of plans that are as fast the roomier one comes first, in tenths of the room.
    spare = [math.floor(10 * e.headroom / large.job.cluster.room) for e in large.ties]
    assert spare == sorted(spare, reverse=True) and spare[0] > spare[-1]
    assert 0.2 < planner.sensitivity(large)["1 node more"] < 1 / 3  # 24 GPUs for 16


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dp=4), "= 8 ranks, and the cluster has 16 GPUs"),
        (dict(tp=8, dp=2), "tp=8 does not divide num_kv_heads=4"),
        (dict(micro_batches=3), "micro_batches=3 do not make up the batch of 32 sequences"),
        (dict(ep=2), "ep=2 does not divide num_experts=1"),
        (dict(zero=3, schedule=3, pp=2, dp=4, micro_batches=8), "zb_h1 splits backward passes"),
        (dict(schedule=2), "chunks=1: interleaved has several"),
        (dict(schedule=1), "this is a schedule of a pipeline, and pp=1"),
        (
            dict(pp=2, dp=4, schedule=2, chunks=6, micro_batches=8),
            "more stages than the 8 that fill",
        ),
        (dict(cp=8, dp=1, zero=1, micro_batches=32), ""),
    ],
)
def test_an_illegal_plan_says_why(change, reason):
    asked = job()
    plan = planner.Plan(**dict(tp=2, dp=8, micro_batches=4) | change)
    said = plans.illegal(asked, plan)
    assert reason in said and bool(said) == bool(reason)


def test_experts_lie_on_all_replicas_also_on_those_of_cp():
    plan = planner.Plan(cp=4, dp=4, ep=8, micro_batches=8)
    assert not plans.illegal(job(MIXTURE), plan)


def test_six_flops_are_for_each_parameter_that_a_token_visits():
    """DeepSeek-V3 activates 37 B of 671 B (2412.19437, section 1); its first three layers are dense."""
    model = ModelConfig.named("deepseek-v3")
    assert plans.flops_per_token(model)["6N"] / 6e9 == pytest.approx(37, rel=0.02)


def test_why_not():
    found = planner.search(job())
    best, listed = found.fastest, [found[i] for i in found.order]
    assert planner.why(found, best.plan) == "it is the fastest of the plans that fit"
    slow = listed[-1]
    share = slow.seconds / best.seconds - 1
    assert planner.why(found, slow.plan).startswith(f"{share:.1%} slower than")
    tie = next((e for e in listed if 1 < e.seconds / best.seconds <= 1.03), None)
    assert tie is None or planner.why(found, tie.plan).startswith("a tie, ")
    narrow = replace(H100, memory=10**8)
    tight = planner.search(job(device=narrow))
    least = units.text(float(tight.peaks.min()))
    with pytest.raises(ValueError, match=f"none of .* legal plans fits: the leanest needs {least} of"):
        _ = tight.fastest
    assert "does not fit: rank 0 of the pipeline needs" in planner.why(tight, best.plan)


def test_what_a_task_refuses():
    with pytest.raises(ValueError, match="less than half of a sequence of 2,048"):
        replace(job(), batch_tokens=100)
    with pytest.raises(ValueError, match="stack='jax' is unknown: use 'course' or 'megatron'"):
        job(stack="jax")
    with pytest.raises(ValueError, match="GPT does not run multi-head latent attention"):
        job(ModelConfig.named("deepseek-v2"), stack="course")
    with pytest.raises(ValueError, match="reserve=1.5 is a share"):
        planner.Cluster(device=H100, nodes=1, reserve=1.5)
    none = replace(job(nodes=11), batch_tokens=2048)
    with pytest.raises(ValueError, match="no plan is legal for 1 sequences on 88 GPUs"):
        _ = planner.search(none).fastest
    cluster = planner.Cluster(device=H100, nodes=2053, gpus_per_node=1)  # a prime above seq_len
    none = replace(none, cluster=cluster)
    with pytest.raises(ValueError, match="no plan is legal for 1 sequences on 2,053 GPUs"):
        _ = planner.search(none).fastest
    for axis in ("dp", "micro_batch", "chunks"):
        with pytest.raises(ValueError, match=f"{axis} must be at least 1, got 0"):
            planner.Plan(**{axis: 0})


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "mixtral-8x7b", "deepseek-v2"])
def test_the_cut_is_the_pipelines(name):
    model = ModelConfig.named(name)
    for n in range(1, model.num_layers + 3):
        assert work.stage_layers(model, n) == pipeline.cut(model, n)
    with pytest.raises(ValueError, match="layers do not fill"):
        work.stage_layers(model, model.num_layers + 3)
    with pytest.raises(ValueError, match="7 stages do not divide"):
        work.stage_layers(model, 7, even=True)


def test_what_is_in_flight_is_what_schedules_hold():
    """Of each chunk, at every moment behind a forward pass from the first that is the fullest on."""
    for kind, name in enumerate(work.PLANNED):
        several = name == "interleaved"
        for p, m, v in itertools.product((2, 4), (4, 8, 20), (2, 3) if several else (1,)):
            plan = planner.Plan(pp=p, micro_batches=m, schedule=kind, chunks=v)
            make = getattr(schedule, name)
            ops = (make(p, m, v) if several else make(p, m)).ranks
            for rank in range(p):
                held, seen = [0] * v, set()
                for op in ops[rank]:
                    held[op.stage // p] += op.kind == "F"
                    seen.add(tuple(held))
                    held[op.stage // p] -= op.kind == ("W" if name == "zb_h1" else "B")
                most = schedule.peak_in_flight(name, p, m, rank, v)
                mine = {tuple(row) for row in stages.in_flight(plan, rank).tolist()}
                assert mine == {row for row in seen if sum(row) == most}


def on_the_clock(model, plan, bandwidth=0, device=H100):
    """Seconds by the planner's formula and by `predict.time`; norms and kernels aside. With a
    bandwidth all links are alike, without one they are the cluster's."""
    cluster = planner.Cluster(device=device, nodes=8)
    if bandwidth:
        wire = Link(0.0, bandwidth)
        device, cluster = replace(device, node=10**6, inside=wire, network=wire), None
    silent = planner.Rates(
        products=device.rate("products"), attention=device.rate("attention"), memory=1e30,
        link=bandwidth or device.inside.bandwidth, kernel=1e-30, overlap=0,
    )  # fmt: skip
    path = rates.critical_path(model, plan, silent, cluster, stack="course")
    step = predict.time(model, plan.train(model), plan.mesh, device=device)
    return float(path.total(silent)), step.makespan


@pytest.mark.parametrize("bandwidth", [1e30, 1e10])
@pytest.mark.parametrize("L, pp", [(6, 1), (5, 2), (7, 2), (11, 3), (5, 4), (7, 4), (11, 6), (4, 6)])
def test_the_formula_of_a_pipeline_is_the_step_on_the_clock(L, pp, bandwidth):
    """Cut as the planner cuts: also ends alone, heads that are no work, or more than any stage."""
    for vocab, m, again in itertools.product((8, 32_000, 400_000), (1, 2, 3, 9), (0, 1, 2)):
        model = replace(SMALL, num_layers=L, vocab_size=vocab)
        plan = planner.Plan(pp=pp, micro_batches=m, recompute=again, zero=0)
        formula, clock = on_the_clock(model, plan, bandwidth)
        assert formula == pytest.approx(clock, rel=1e-9), plan


@pytest.mark.parametrize("again", [0, 1, 2])
@pytest.mark.parametrize("axes", [
    dict(dp=4), dict(dp=4, zero=0), dict(cp=2), dict(dp=2, cp=2, pp=4), dict(tp=2),
    dict(tp=4, pp=3), dict(cp=2, tp=2, pp=2), dict(cp=8, pp=3), dict(cp=4, tp=2, dp=2, pp=3),
], ids=str)  # fmt: skip
def test_the_formula_of_a_mesh_is_the_step_on_the_clock(axes, again):
    plan = planner.Plan(micro_batches=4, recompute=again, **axes)
    formula, clock = on_the_clock(SMALL, plan, 1e10)
    # What the formula leaves out under tp: two numbers of each token for the loss, the gradients of
    # norms.
    most = 5e-4 if plan.tp > 1 else 1e-9
    assert formula == pytest.approx(clock, rel=most) and formula <= clock * (1 + 1e-9)


@pytest.mark.parametrize("most, meshes", [
    (0.01, [(1, 1, 1, 8), (1, 1, 4, 8), (1, 1, 8, 64), (1, 1, 16, 4)]),
    (0.06, [(1, 8, 1, 8), (1, 4, 2, 8), (1, 8, 8, 8)]),
    (0.09, [(1, 16, 1, 8), (1, 16, 4, 8)]),  # a ring
    (0.016, [(2, 1, 4, 8), (4, 1, 1, 8), (8, 1, 1, 8), (8, 1, 8, 64)]),
    (0.065, [(2, 4, 8, 8), (4, 2, 1, 8), (4, 4, 4, 64), (8, 2, 2, 8), (8, 4, 2, 64)]),
    (0.125, [(8, 8, 1, 64)]),
], ids=["pp", "Ulysses", "ring", "tp", "tp and cp", "tp and cp, 1,024 tokens"])  # fmt: skip
def test_latency_is_all_that_the_formula_leaves_out(most, meshes):
    """Llama-3.1-70B on 64 H100: what the formula is below the clock, and without latencies."""
    model, off = replace(ModelConfig.named("llama-3.1-70b"), seq_len=8192), []
    links = {name: replace(getattr(H100, name), latency=0.0) for name in ("inside", "network")}
    for tp, cp, pp, m in meshes:
        plan = planner.Plan(tp=tp, cp=cp, pp=pp, dp=64 // (tp * cp * pp), micro_batches=m)
        formula, clock = on_the_clock(model, plan)
        off.append(1 - formula / clock)
        formula, clock = on_the_clock(model, plan, device=replace(H100, **links))
        assert formula == pytest.approx(clock, rel=1e-4), plan
    assert 0.7 * most < max(off) < most and min(off) > 0


def test_what_is_exchanged_between_nodes_takes_the_senders_link():
    """Ulysses and experts over nodes, which a cluster and the clock count alike."""
    links = {name: replace(getattr(H100, name), latency=0.0) for name in ("inside", "network")}
    wide = replace(SMALL, num_heads=16, num_kv_heads=16)
    for model, axes in (
        (wide, dict(cp=16, dp=2)), (wide, dict(cp=8, tp=2)), (MIXTURE, dict(dp=64, ep=8)),
        (replace(MIXTURE, num_experts=32), dict(dp=32, ep=32)), (wide, dict(cp=8, tp=2, pp=2)),
    ):  # fmt: skip
        plan = planner.Plan(micro_batches=4, **axes)
        formula, clock = on_the_clock(model, plan, device=replace(H100, **links))
        assert formula == pytest.approx(clock, rel=5e-4), plan


def test_unequal_chunks_wait_longer_than_the_formula_knows():
    """Where a rank has more to do in one of its chunks, for which the others wait in each round."""
    off = []
    for L, pp, v, m in itertools.product((16, 30), (2, 4, 8), (2, 3, 4), (1, 8)):
        if pp * v <= L:
            model = replace(SMALL, num_layers=L)
            plan = planner.Plan(pp=pp, chunks=v, schedule=2, micro_batches=m * pp, zero=0)
            formula, clock = on_the_clock(model, plan, 1e30)
            off.append(abs(formula / clock - 1))
    assert max(off) < 0.075 and sum(off) / len(off) < 0.016


def test_the_courses_ledger_of_405b_is_its_dry_run():
    """pp16 dp128 tp8, level 1, 1F1B, as dry runs of these ranks found it."""
    model = replace(ModelConfig.named("llama-3.1-405b"), seq_len=8192)
    plan = planner.Plan(tp=8, pp=16, dp=128, micro_batches=16)
    for rank, kept in {0: 98_241_085_440, 1: 105_257_041_920, 15: 6_570_438_668}.items():
        held = planner.ledger(model, plan, rank, "course").by("component")
        assert held["activations"] == kept and held["gradients"] == 2 * held["weights"]
        assert held["optimizer"] * 128 == 6 * held["weights"]
    assert planner.ledger(model, plan, 0, "course").by("component")["weights"] == 6_104_219_648


def test_a_plan_is_as_complex_as_the_axes_and_the_options_that_it_uses():
    plain = planner.Plan(dp=8)
    for change, more in (
        ({}, 0), (dict(tp=2, cp=2), 2), (dict(pp=4, schedule=2, chunks=2), 2), (dict(zero=2), 1),
        (dict(recompute=1), 1), (dict(recompute=2, zero=3, ep=8), 3), (dict(zero=0), 0),
    ):  # fmt: skip
        assert plans._complexity(replace(plain, **change)) == more
