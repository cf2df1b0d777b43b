"""The schedule editor: what its page knows of each level is what `schedule` says."""

import contextlib
import json
import re
from dataclasses import replace

import pytest

from labutils import schedule
from labutils.config import Link
from labutils.schedule import simulate
from labutils.teach import editor, rigs
from labutils.teach.editor import LEVELS, Editor, Level


def played(level, plan):
    return simulate(plan, link=Link(level.message, 1.0))


def reaches(level, plan):
    """Whether a schedule with this place and split meets all that a level asks for."""
    run, peaks = played(level, plan), [plan.peak(rank) for rank in range(len(plan.ranks))]
    sizes = level.sizes or [0] * plan.stages
    fullest = max(plan.peak(rank, sizes) for rank in range(len(plan.ranks)))
    return (
        schedule.why_illegal(plan, level.cap) is None
        and (run.makespan if level.barrier else run.period) <= level.told["time"]
        and sum(peaks) <= (level.total or 99)
        and fullest <= (level.room or 0)
    )


each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.title)


@each_level
def test_the_goal_is_what_the_named_schedule_takes(level):
    told, run = level.told, played(level, level.best.check(level.cap))
    assert told["time"] == (run.makespan if level.barrier else run.period)
    assert told["peaks"] == [run.peak(rank) for rank in run.ranks]
    assert level.total is None or level.total == sum(told["peaks"])
    assert told["known"][level.best.text] == told["best"]


@each_level
def test_no_other_schedule_with_a_name_reaches_more(level):
    """Within the limit none is shorter; that none is at all, nobody says."""
    p, m = len(level.best.ranks), level.best.micro_batches
    for make in (
        schedule.naive, schedule.gpipe, schedule.one_f_one_b, schedule.eager_one_f_one_b,
        schedule.interleaved, schedule.breadth_first, schedule.zb_h1, schedule.zb_h2, schedule.zb_v,
    ):  # fmt: skip
        other = make(p, m)
        same = (other.places, other.split) == (level.best.places, level.best.split)
        if same and schedule.why_illegal(other, level.cap) is None:
            run = played(level, other)
            shorter = (run.makespan if level.barrier else run.period) < level.told["time"]
            assert not shorter or max(other.peak(r, level.sizes) for r in range(p)) > level.room


@each_level
def test_of_the_schedules_with_a_name_only_the_best_reaches_a_level(level):
    """From level 2 on, so each number of a goal is needed."""
    p, m = len(level.best.ranks), level.best.micro_batches
    assert reaches(level, level.best)
    for make in editor._NAMED:
        with contextlib.suppress(ValueError):
            other = make(p, m)
            if (other.places, other.split) == (level.best.places, level.best.split):
                fast = level is LEVELS[0] and other.name != "naive"
                assert reaches(level, other) == (fast or other.text == level.best.text)


def test_each_level_leads_further_than_the_one_before():
    names = [level.best.name for level in LEVELS]
    assert names[:4] == ["gpipe", "one_f_one_b", "eager_one_f_one_b", "zb_h1"]
    assert names[5:] == ["zb_h2", "interleaved", "zb_v"] and "1 W waiting" in names[4]
    first, second, _, third, *_ = LEVELS
    assert "its limit is 3" in schedule.why_illegal(first.best, second.cap)  # GPipe breaks here
    alone = simulate(schedule.one_f_one_b(3, 4)).makespan
    assert second.told["time"] == alone == first.told["time"] > third.told["time"]


def test_a_page_needs_nothing_else():
    page = Editor()._repr_html_()
    data = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    assert [level["title"] for level in json.loads(data)] == [level.title for level in LEVELS]
    assert "http" not in page and len(page) < 30_000
    assert repr(Editor(LEVELS[:2])) == "Schedule editor: 2 levels"
    odd = Level("</script>", "<b>", schedule.naive(2, 1))
    assert Editor([odd])._repr_html_().count("</script>") == 2


@pytest.mark.parametrize(
    "board, names",
    [
        (schedule.one_f_one_b(3, 4), ["naive", "GPipe", "eager 1F1B", "1F1B"]),
        (schedule.zb_h1(2, 4), ["ZB-H2", "ZB-H1"]),
    ],
)
def test_a_board_knows_the_orders_that_can_be_placed_on_it(board, names):
    assert list(editor.known(board).values()) == names


def test_what_ranks_kept_stands_beside_what_is_simulated(monkeypatch):
    compare = rigs.pipeline.compare

    def more(*args, **options):
        return replace(compare(*args, **options), kept=(7, 8))

    monkeypatch.setattr(rigs.pipeline, "compare", more)
    said = editor.on_ranks("F0 F1 B0 B1 | F0 B0 F1 B1")
    assert "<td>0</td><td>7</td><td>2</td>" in said and "<td>1</td><td>8</td><td>1</td>" in said


def test_a_finished_order_runs_on_ranks_at_a_click():
    page, order, button, result = Editor().live.children
    assert Editor()._repr_html_() == page.outputs[0]["data"]["text/html"]
    for plan in (schedule.zb_v(2, 3), schedule.read("F0 F1 F2 B0 B1 B2 | F0 B0 F1 F2 B1 B2")):
        order.value = plan.text
        button.click()
        said = re.sub("<[^>]*>", " ", result.value)
        assert ("ZB-V" if plan.split else "your order") + " on 2 ranks: loss" in said
        assert "gradients are equal" in said and not button.disabled
        rows = re.findall(r"<tr><td>(\d+)</td><td>(\d+)</td><td>(\d+)</td>(.*?)</tr>", result.value)
        for rank, (number, kept, simulated, sent) in enumerate(rows):
            assert (int(number), int(kept), int(simulated)) == (rank, *[plan.peak(rank)] * 2)
            measured, formula = re.findall("[0-9,]+", sent)
            assert measured == formula != "0"
        assert len(rows) == 2 and "Gantt chart of simulated and measured" in result.value


@pytest.mark.parametrize(
    "order, reason",
    [
        ("  ", "there is no order yet"),
        ("F0 <b>", "&lt;b&gt;&#x27; is no operation"),
        ("F0 F1 B0 B1 | F0 F1 B1", "your order: rank 1 never runs B0@1"),
        ("F0 B0 F1 B1 | F0 F1 B0 B1", "deadlock: rank 0 waits at B0@0"),
        (" | ".join(["F0 B0"] * 12), "Not run: 8 layers do not fill 12 stages"),
        (schedule.naive(2, 300).text, "1,200 operations are too many"),
    ],
)
def test_an_order_that_cannot_run_is_told_why(order, reason):
    _, text, button, result = Editor().live.children
    text.value = order
    button.click()
    assert "Not run: " in result.value and reason in result.value and not button.disabled


def test_the_page_without_a_kernel_stands_beside_the_live_one():
    shown = Editor()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert shown["text/html"] == Editor()._repr_html_()
    assert shown["text/plain"] == "Schedule editor: 8 levels"


def test_what_cannot_be_placed_by_hand_is_refused():
    with pytest.raises(ValueError, match="dualpipe_v cannot be placed by hand"):
        Level("pairs", "", schedule.dualpipe_v(2, 4))
    with pytest.raises(ValueError, match="its limit is 2"):
        Level("too little", "", schedule.gpipe(2, 4), cap=2)
    for wrong in (dict(room=3), dict(sizes=(1, 1)), dict(sizes=(1,), room=3)):
        with pytest.raises(ValueError, match=r"sizes"):
            Level("bytes", "", schedule.gpipe(2, 4), **wrong)
    with pytest.raises(ValueError, match="at least one level"):
        editor.Editor(())
