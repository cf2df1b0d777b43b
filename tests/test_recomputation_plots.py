"""Figures of recomputation: they tell what they show, whatever plan or trade they are given, and refuse what they cannot draw."""

import re

import pytest

from labutils import checkpointing
from labutils.checkpointing import Costs, Stage
from labutils.teach import plots

CHAIN = Costs([Stage(3, 100 + 10 * i, 400) for i in range(6)], input=100)
PLANS = [
    checkpointing.segments(6, 1),
    checkpointing.segments(6, 2),
    checkpointing.keep_nothing(6),
    checkpointing.plan(CHAIN, 1200),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_an_animation_has_a_frame_for_each_computation(plan):
    animation = plots.plan_animation(plan)
    computed = [step for step in plan.steps if step.op != "drop"]
    assert len(animation.frames) == len(computed) + 1
    assert f"{sum(plan.evaluations)} forward evaluations" in animation.alt
    for frame in animation.frames:  # a node for x0, and one f and one b for every stage
        assert frame.count("<circle") == 1 + 2 * plan.n
    filled = [frame.count('fill="#4DB2F5"') for frame in animation.frames]
    assert (
        filled[0] == filled[-1] == 0
        and max(filled) <= max(len(state.values) for state in plan.states) - 1
    )
    assert "held: x0; recorded: none; gradient at x0" in animation.frames[-1]


def test_a_map_tells_evaluations_and_values_of_every_plan():
    picture = plots.plan_maps(*PLANS)
    for plan in PLANS:
        most = max(len(state.values) for state in plan.states)
        assert (
            f"{plan.name}: {sum(plan.evaluations)} evaluations, {most} values held" in picture.alt
        )
    assert len(picture.png) > 1000


def test_a_trade_off_tells_both_ends():
    marks = {
        plan.name: (run.peak, run.cost)
        for plan in PLANS
        for run in [checkpointing.simulate(plan, CHAIN)]
    }
    picture = plots.trade_off(checkpointing.frontier(CHAIN), marks=marks, once=18, guess=(500, 40))
    assert "keep everything: " in picture.alt and re.search(
        r"from \d.* to .* at 1\.00", picture.alt
    )
    assert len(picture.png) > 1000


def test_token_weights_are_relative_to_a_mean_over_tokens():
    assert "6 tokens: 0.67 each; 2 tokens: 2.00 each" in plots.token_weights([6, 2]).alt


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda: plots.plan_animation(checkpointing.segments(11, 2)), "animate up to 10"),
        (lambda: plots.plan_maps(), "at least one plan"),
        (
            lambda: plots.plan_maps(checkpointing.segments(3, 1), checkpointing.segments(4, 1)),
            "3 and 4 stages",
        ),
        (lambda: plots.trade_off([], once=1), "at least one trade"),
        (lambda: plots.token_weights([3, 0]), "at least one token"),
    ],
)
def test_what_cannot_be_drawn(call, why):
    with pytest.raises(ValueError, match=why):
        call()
