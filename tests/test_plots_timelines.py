"""What happens when: pictures over time tell peaks, loads, and what is exposed."""

import dataclasses

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from pictures import PLANS, TIMELINES, ring, star, timeline, two_steps

from labutils.teach import plots
from labutils.teach.plots.style import NEUTRAL
from labutils.teach.plots.timelines import LOOKS
from labutils.timeline import Span, Timeline


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


STEPS = {"after backward": timeline(True), "during backward": timeline(False)}


def test_every_bar_stands_where_its_span_does():
    """Start and length of all bars are those of the spans, in their kind's color; the gray ones are what is exposed."""
    axes = plots.overlap(**STEPS).figure.axes[0]
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    for color in {look[1] for look in LOOKS.values()}:
        kind = {kind for kind, look in LOOKS.items() if look[1] == color}
        spans = [span for step in STEPS.values() for span in step.spans if span.kind in kind]
        expected = sorted((1e3 * span.start, 1e3 * (span.end - span.start)) for span in spans)
        own = [box for box in boxes if box.get_facecolor() == to_rgba(color)]
        found = sorted((box.get_x(), box.get_width()) for box in own)
        assert len(found) == len(expected) and np.allclose(found, expected), kind
    gray = [box for box in boxes if box.get_facecolor() == to_rgba(NEUTRAL[3])]
    assert [(box.get_x(), box.get_width()) for box in gray] == [
        pytest.approx((1e3 * step.computed, 1e3 * step.exposed)) for step in STEPS.values()
    ]


def test_what_is_exposed_is_told():
    """Numbers written beside the bars, in the title and in the description are those of the timelines."""
    picture = plots.overlap(**STEPS)
    beside = [text.get_text() for text in picture.figure.axes[0].texts]
    for name, step, exposed in (
        ("after backward", "30.0 ms per step", "10.0 ms exposed"),
        ("during backward", "25.0 ms per step", "5.00 ms exposed"),
    ):
        assert f"{name}: {step} {exposed}" in picture.alt
        assert beside.index(name) < beside.index(step) < beside.index(exposed)
        assert beside.count(step) == beside.count(exposed) == 1
    assert (
        picture.figure.texts[0].get_text().replace("\n", " ")
        == "A step takes 25.0 ms instead of 30.0 ms: 5.00 ms of communication remain exposed, not 10.0 ms"
    )


def test_ranks_that_wait_for_a_busy_one_are_not_called_unexposed():
    """Where some rank always computes nothing is exposed, and yet the others may be idle."""
    both = Timeline((Span(0, "forward", "0", 0.0, 4.0), Span(1, "forward", "1", 2.0, 4.0)))
    one = Timeline(both.spans[:1])
    alt = plots.overlap(title="t", both=both, one=one).alt
    assert "both: 4 s per step ranks idle 25%" in alt
    assert "one: 4 s per step nothing exposed" in alt


def test_a_step_as_long_as_another_is_not_called_shorter():
    title = plots.overlap(one=timeline(True), other=timeline(True)).figure.texts[0].get_text()
    assert (
        title.replace("\n", " ")
        == "Every step takes 30.0 ms, and 10.0 ms of communication remain exposed"
    )


def test_a_title_speaks_of_what_one_is():
    titles = [
        plots.overlap(per="layer", **each).figure.texts[0].get_text().replace("\n", " ")
        for each in (STEPS, {"one": timeline(True)}, dict(one=timeline(True), two=timeline(True)))
    ]
    assert [" step" in title for title in titles] == [False] * 3
    assert ["layer" in title for title in titles] == [True] * 3


def test_the_step_ends_with_the_last_rank():
    *spans, last = timeline(False).spans
    slow = Timeline((*spans, dataclasses.replace(last, end=last.end + 0.003)))
    assert "28.0 ms per step 8.00 ms exposed" in plots.overlap(step=slow).alt


def test_a_map_tells_evaluations_and_values_of_every_plan():
    picture = plots.plan_maps(TIMELINES, title="t")
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
