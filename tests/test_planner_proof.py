"""The proof of a plan: its formulas against dry runs at full size, and a small copy on real ranks."""

from dataclasses import replace

import pytest

from labutils import planner
from labutils.config import ModelConfig
from labutils.planner import proof

MODEL = replace(ModelConfig.named("llama-3.1-8b"), seq_len=1024, num_layers=4)
PLAN = planner.Plan(tp=4, pp=2, dp=8, micro_batches=64)


@pytest.mark.parametrize("stage", [0, 1])
def test_formulas_are_the_dry_run_of_a_rank(stage):
    found = proof.dry(MODEL, PLAN, stage)
    assert found.unexplained == 0 and [row.name for row in found.rows] == [
        "weights", "gradients", "optimizer", "activations"
    ]  # fmt: skip
    held = sum(row.measured for row in found.rows)
    assert held < proof.dry_peak(MODEL, PLAN, stage) < 3 * held
    assert proof.shorter(PLAN, stage).micro_batches == 4 - stage


def test_a_small_copy_sends_and_holds_what_its_dry_run_does():
    few = proof.scaled(PLAN, 4)
    assert (few.pp, few.tp, few.dp, few.gpus) == (2, 2, 1, 4)
    assert proof.copy(MODEL, PLAN, "threads", 4) == [(0, 0)] * 4
