"""What happens when: pictures over time tell peaks, loads, and what is exposed."""

import dataclasses

import pytest
from pictures import PLANS, TIMELINES, ring, star, timeline, two_steps

from labutils.teach import plots
from labutils.timeline import Timeline


def test_the_timeline_marks_the_fullest_moment():
    history = two_steps()
    picture = plots.memory_timeline(history)
    marker = next(line for line in picture.figure.axes[0].lines if line.get_marker() == "v")
    (place,), (height,) = marker.get_data()
    assert history.moments[place] is history.peak and height * 1e6 == pytest.approx(
        history.peak.ledger.total
    )
    assert {"weights", "activations", "optimizer", "forward", "backward"} <= {
        text.get_text() for text in picture.figure.axes[0].texts
    }


def test_messages_say_where_the_load_is():
    assert (
        plots.messages(star(4)).figure.texts[0].get_text()
        == "6 steps, and 100% of all bytes pass through rank 0"
    )
    assert (
        plots.messages(ring(4, 6)).figure.texts[0].get_text()
        == "6 steps, and every rank carries the same load"
    )


def test_what_is_exposed_is_told():
    picture = plots.overlap(after_backward=timeline(True), during_backward=timeline(False))
    assert "after backward: 30.0 ms a step 10.0 ms exposed" in picture.alt
    assert "during backward: 25.0 ms a step 5.00 ms exposed" in picture.alt
    assert len(picture.png) > 1000


def test_the_step_ends_with_the_last_rank():
    *spans, last = timeline(False).spans
    slow = Timeline((*spans, dataclasses.replace(last, end=last.end + 0.003)))
    assert "28.0 ms a step 8.00 ms exposed" in plots.overlap(step=slow).alt


def test_a_map_tells_evaluations_and_values_of_every_plan():
    picture = plots.plan_maps(TIMELINES)
    for plan in PLANS:
        most = max(len(state.values) for state in plan.states)
        assert (
            f"{plan.name}: {sum(plan.evaluations)} evaluations, {most} values held" in picture.alt
        )
    assert len(picture.png) > 1000


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_the_timeline_of_a_plan_is_what_it_holds(plan):
    clock, after = 0, {0: plan.states[0]}
    for step, state in zip(plan.steps, plan.states[1:], strict=True):
        clock += step.op != "drop"
        after[clock] = state
    for clock, state in after.items():
        there = {(s.kind, s.rank) for s in plan.timeline.spans if s.start <= clock < s.end}
        values = {i for kind, i in there if kind == "value"} | {0}
        assert values == state.values
        assert {i for kind, i in there if kind == "interior"} == state.recorded
