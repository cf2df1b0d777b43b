"""Pipeline schedules in pictures: every box where its operation runs, every bubble with its metric."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from labutils import schedule
from labutils.config import Link
from labutils.schedule import Durations, simulate
from labutils.teach import plots
from labutils.teach.plots import pipelines, style

H2 = simulate(schedule.zb_h2(4, 8))
V = simulate(schedule.zb_v(2, 4))
PAIRS = simulate(schedule.dualpipe_v(2, 4), Durations(fused=2.5))


def boxes(picture):
    """(hue, x, width, height) of every box that is an operation."""
    axes = picture.figure.axes[0]
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return sorted(
        (to_hex(box.get_facecolor()).upper(), box.get_x(), box.get_width(), box.get_height())
        for box in found
        if to_hex(box.get_facecolor()) != style.PAPER.lower()
    )


def words(picture):
    return [text.get_text() for text in picture.figure.axes[0].texts]


@pytest.mark.parametrize("run, chunks", [(H2, 1), (V, 2), (PAIRS, 2)])
def test_every_box_stands_where_its_operation_runs(run, chunks):
    found = boxes(plots.gantt(run))
    expected = sorted(
        (pipelines.fill(run.schedule, op), start, end - start)
        for ops, starts, ends in zip(run.schedule.ranks, run.starts, run.ends, strict=True)
        for op, start, end in zip(ops, starts, ends, strict=True)
    )
    assert [box[0] for box in found] == [box[0] for box in expected]
    assert np.allclose([box[1:3] for box in found], [box[1:] for box in expected])
    assert len({box[0] for box in found}) == 3 * chunks


def test_operations_at_once_share_the_height():
    heights = {round(box[3], 2) for box in boxes(plots.gantt(PAIRS))}
    assert heights == {0.13, 0.39}
    apart = simulate(PAIRS.schedule)
    assert {round(box[3], 2) for box in boxes(plots.gantt(apart))} == {0.24}


def test_the_bubble_is_named_with_its_metric():
    with_barrier, without = plots.gantt(H2), plots.gantt(H2, barrier=False)
    assert "27 per step, bubble fraction 11% with a barrier" in words(with_barrier)
    assert "24 per step, bubble fraction 0% without a barrier" in words(without)
    assert (
        without.figure.texts[0].get_text().replace("\n", " ")
        == "Bubble fraction (idle/total, no barrier between steps): ZB-H2 0%, and a rank holds up to 7 micro-batches"
    )
    alone = plots.gantt(simulate(schedule.naive(2, 2))).figure.texts[0].get_text()
    assert alone.replace("\n", " ").endswith("a rank holds up to 1 micro-batch")
    assert words(with_barrier).count("holds 7") == 4
    assert "ranks hold up to 7, 7, 7 and 7" in with_barrier.alt


def test_without_a_barrier_a_second_step_follows_as_close_as_it_can():
    once, twice = boxes(plots.gantt(H2)), boxes(plots.gantt(H2, barrier=False))
    both = [*once, *((hue, x + H2.period, *size) for hue, x, *size in once)]
    assert [box[0] for box in twice] == [box[0] for box in sorted(both)]
    assert np.allclose([box[1:] for box in twice], [box[1:] for box in sorted(both)])


@pytest.mark.parametrize("barrier", [True, False])
def test_updates_stand_where_they_begin(barrier):
    run = simulate(schedule.zb_h2(4, 8), Durations(O=2))
    found = [box for box in boxes(plots.gantt(run, barrier=barrier)) if box[0] == pipelines._UPDATE]
    assert {box[2] for box in found} == {2}
    assert {box[1] for box in found} == {
        end + offset
        for ends in run.ends
        for offset in ((0,) if barrier else (0, run.period))
        for end in ([27] if barrier else ends[-1:])
    }
    assert len(found) == 4 * (1 if barrier else 2)


def test_activations_count_in_micro_batches_through_a_whole_rank():
    assert words(plots.gantt(V)).count("holds 2") == 2  # four of half a rank each
    interleaved = simulate(schedule.interleaved(4, 8))
    assert "holds 5.5" in words(plots.gantt(interleaved))  # p(1 + (p−1)/(pv))


def test_strips_are_what_is_held():
    run = simulate(schedule.gpipe(2, 4))
    strips = plots.gantt(run, simulate(schedule.one_f_one_b(2, 4))).figure.axes[0].collections
    tall = [np.ptp(strip.get_paths()[0].vertices[:, 1]) for strip in strips]
    assert np.allclose(np.array(tall) / max(tall), [1, 1, 0.5, 0.25])


def test_runs_of_one_schedule_need_names():
    one = schedule.one_f_one_b(2, 2)
    runs = [simulate(one, link=link) for link in (None, Link(1, 1))]
    with pytest.raises(ValueError, match="such as fast=run"):
        plots.gantt(*runs)
    with pytest.raises(ValueError, match="such as fast=run"):
        plots.gantt()
    assert {"no link", "a link"} <= set(words(plots.gantt(no_link=runs[0], a_link=runs[1])))


def test_seconds_are_scaled():
    run = simulate(schedule.naive(2, 1), Durations(0.001, 0.001, 0.001))
    axes = plots.gantt(run, unit="s").figure.axes[0]
    assert axes.get_xlabel() == "time (ms)" and axes.get_xlim() == pytest.approx((0, 6))


def test_an_animation_says_what_every_idle_rank_waits_for():
    run = simulate(schedule.one_f_one_b(3, 3))
    animation = plots.schedule_animation(run)
    moments = sorted({start for starts in run.starts for start in starts})
    assert len(animation.frames) == len(moments)
    assert animation.labels[0] == (
        "Time 0: rank 1 waits for F0 of rank 0; rank 2 waits for F0 of rank 1."
    )
    assert (
        "Time 3: rank 0 waits for B0 of rank 1; rank 1 waits for B0 of rank 2." in animation.labels
    )
    assert animation.labels[-1] == "Time 13: rank 1 is done; rank 2 is done."


@pytest.mark.parametrize("run", [simulate(schedule.one_f_one_b(3, 3)), V, PAIRS])
def test_a_frame_shows_what_has_begun_and_what_is_held(run):
    moments = sorted({start for starts in run.starts for start in starts})
    for now, frame in zip(moments, plots.schedule_animation(run).frames, strict=True):
        begun = sum(start <= now for starts in run.starts for start in starts)
        # What runs is a rectangle with a thick edge; what is over is a piece of a path.
        assert frame.count('stroke-width="2"') + len(re.findall(r"[\d.]z", frame)) == begun
        for rank in range(len(run.schedule.ranks)):
            held = [count for time, count in run.in_flight(rank) if time <= now]
            told = re.search(rf"rank {rank}: (\d+)", frame)[1]
            assert int(told) == (held[-1] if held else 0)


def test_a_message_on_its_way_is_waited_for():
    slow = plots.schedule_animation(simulate(schedule.gpipe(2, 2), link=Link(2, 1e9)))
    assert "Time 1: rank 1 waits for a message." in slow.labels


def test_too_many_moments_are_refused():
    with pytest.raises(ValueError, match="animate up to 80"):
        plots.schedule_animation(simulate(schedule.one_f_one_b(4, 64)))


def test_less_of_the_next_step_leaves_room_for_the_numbers_of_this_one():
    run = simulate(schedule.zb_v(4, 8), Durations(F=0.5, B=0.5, W=0.5))
    axes = [plots.gantt(run, barrier=False, **how).figure.axes[0] for how in ({}, {"ahead": 0.1})]
    numbers = [[t for t in each.texts if t.get_text().isdigit()] for each in axes]
    assert [bool(found) for found in numbers] == [False, True]
    assert all(number.get_clip_on() for number in numbers[1])
    assert axes[1].get_xlim()[1] == run.makespan + 0.1 * run.period
