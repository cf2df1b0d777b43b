"""The proof of a plan: its formulas against dry runs at full size, and a small copy on real ranks."""

import itertools
from dataclasses import replace

import pytest

from labutils import planner, predict
from labutils.config import ModelConfig
from labutils.planner import proof

MODEL = replace(ModelConfig.named("llama-3.1-8b"), seq_len=1024, num_layers=4)
PLAN = planner.Plan(tp=4, pp=2, dp=8, micro_batches=64)
LLAMA = ModelConfig(
    num_layers=4, d_model=32, num_heads=8, num_kv_heads=2, d_ff=64, vocab_size=64, seq_len=32,
    ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip
LEARNED = replace(LLAMA, ffn="gelu", norm="layernorm", positions="learned", bias=True)
EXPERTS = replace(LEARNED, num_experts=4, top_k=2)


def formulas(model, plan, stage):
    """Bytes by component that `predict` has for a rank, and the planner's ledger of it."""
    train, rank = plan.train(model), proof.rank_of(plan, stage)
    found = {"weights": 0, "gradients": 0, "optimizer": 0}
    for line in predict.states(model, train, plan.mesh, rank):
        if line.component in found and line.name != "step":
            found[line.component] += line.amount
    if model.num_experts == 1:
        found["activations"] = predict.activations(model, train, plan.mesh, rank).total
    lines = planner.ledger(model, plan, stage, "course")
    kept = [line for line in lines if not line.name.startswith("computed again")]
    return found, {what: sum(n.amount for n in kept if n.component == what) for what in found}


@pytest.mark.parametrize("model", [LLAMA, LEARNED], ids=["llama", "learned"])
@pytest.mark.parametrize("zero, again", [(0, 0), (1, 0), (1, 2), (2, 1), (3, 0), (3, 1)])
def test_the_planners_ledger_is_that_of_predict(model, zero, again):
    for cp, tp, (pp, kind, v) in itertools.product(
        (1, 4), (1, 2), ((1, 0, 1), (2, 0, 1), (2, 2, 2))
    ):
        plan = planner.Plan(
            tp=tp, cp=cp, pp=pp, dp=2, micro_batch=2, micro_batches=4, zero=zero, recompute=again,
            schedule=kind, chunks=v,
        )  # fmt: skip
        for stage in range(pp):
            theirs, ours = formulas(model, plan, stage)
            assert ours == theirs, (plan, stage)


@pytest.mark.parametrize("L, wide", [(5, 64), (7, 64), (7, 1024), (8, 64), (11, 64), (13, 400)])
def test_unequal_chunks_are_counted_one_by_one(L, wide):
    """Also chunks without a layer, with the embedding or the head alone."""
    model, cuts = replace(LLAMA, num_layers=L, vocab_size=wide), set()
    for (pp, v), turns, tp in itertools.product(
        ((1, 1), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (2, 5)), (1, 2, 4), (1, 2)
    ):
        if pp * v > L + 2:
            continue
        kind = 2 * (v > 1)
        plan = planner.Plan(
            tp=tp, pp=pp, dp=2, micro_batches=turns * pp, schedule=kind, chunks=v
        )  # fmt: skip
        cuts.add(len(set(plan.train(model).layers or ())))
        for stage in range(pp):
            theirs, ours = formulas(model, plan, stage)
            assert ours == theirs, (plan, stage)
    assert max(cuts) > 1


@pytest.mark.parametrize("zero, ep, tp", [(0, 2, 2), (1, 1, 2), (1, 2, 1), (2, 2, 2), (3, 1, 2)])
def test_states_of_experts_are_those_of_predict(zero, ep, tp):
    plan = planner.Plan(dp=2, ep=ep, tp=tp, pp=2, micro_batches=4, zero=zero)
    theirs, ours = formulas(EXPERTS, plan, 1)
    assert ours == theirs


@pytest.mark.parametrize("mesh", [dict(cp=2, pp=2), dict(cp=4, tp=2)], ids=str)
def test_context_parallelism_keeps_what_its_dry_run_does(mesh):
    # Ulysses with 8 heads of keys, a ring with 2; rows of RoPE's tables are picked out once.
    model = replace(LLAMA, num_kv_heads=8 if "pp" in mesh else 2, num_layers=2)
    plan = planner.Plan(dp=2, micro_batches=2, **mesh)
    assert proof.dry(model, plan, plan.pp - 1).unexplained == 0
    rows = planner.ledger(model, plan, plan.pp - 1, "course").by("name")
    assert rows.get("rows of RoPE's tables, once") == 32 // plan.cp * 4 * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_formulas_are_the_dry_run_of_a_rank(stage):
    found = proof.dry(MODEL, PLAN, stage)
    assert found.unexplained == 0 and [row.name for row in found.rows] == [
        "weights", "gradients", "optimizer", "activations"
    ]  # fmt: skip
    assert proof.shorter(PLAN, stage).micro_batches == 4 - stage


def test_what_eight_processes_send_and_hold_is_formula_and_dry_run():
    few = proof.scaled(PLAN)
    assert (few.pp, few.tp, few.dp, few.gpus, few.zero) == (2, 2, 2, 8, 1)
    books = proof.copy(MODEL, PLAN)
    assert books.unexplained == 0 and str(books).endswith("\nunexplained 0 B")
    totals = [book.by("component") for book in books]
    assert totals[0] == totals[1] == totals[2] and all(totals[0].values())
    assert {line.component for line in books.formula if line.note} == {"fullest moment"}
    assert set(totals[0]) == {
        "weights", "gradients", "optimizer", "buffers", "activations", "fullest moment",
        "sent over pp", "sent over tp", "sent over dp_cp", "sent over pp_dp_cp"
    }  # fmt: skip
    assert {line.rank for line in books.real} == set(range(8))


@pytest.mark.parametrize(
    "given, ranks, wanted",
    [
        (dict(pp=4, tp=4, dp=8, zero=3), 4, dict(pp=2, tp=2)),  # no replicas, no shares
        (dict(pp=4, dp=8, zero=3), 4, dict(pp=2, dp=2, zero=3)),
        (dict(tp=4, cp=2, zero=2), 8, dict(tp=2, cp=2, zero=2)),
        (dict(tp=4, dp=4, cp=4, zero=1), 4, dict(tp=2, dp=2, zero=1)),
        (dict(pp=4, dp=8, zero=1, schedule=2, chunks=4), 3, dict(pp=2, schedule=2, chunks=2)),
    ],
)  # fmt: skip
def test_a_copy_has_the_axes_and_the_level_that_its_ranks_allow(given, ranks, wanted):
    few = proof.scaled(planner.Plan(micro_batches=16, **given), ranks)
    assert few == planner.Plan(micro_batch=1, micro_batches=4, **(dict(zero=0) | wanted))


def test_a_copy_says_what_has_no_formula_and_what_differs(monkeypatch):
    mixture = replace(ModelConfig.named("mixtral-8x7b"), num_layers=2)
    plan, sent = planner.Plan(pp=4, dp=2, micro_batches=8), predict.sent
    books = proof.copy(mixture, plan, "threads", 2)
    said = str(books).splitlines()
    assert [line.split()[0] for line in said if "no formula" in line] == ["activations", "fullest"]
    assert books.formula.diff(books.dry).unexplained == 0
    monkeypatch.setattr(predict, "sent", lambda *asked: sent(*asked[:3], 1 - asked[3]))
    books = proof.copy(MODEL, plan, "threads", 2)
    assert books.dry.diff(books.real).unexplained == 0 < books.unexplained
