"""The schedule editor: what its page knows of each level is what `schedule` says."""

import json
import re

import pytest

from labutils import schedule
from labutils.schedule import simulate
from labutils.teach import editor
from labutils.teach.editor import LEVELS, Editor, Level

each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.title)


@each_level
def test_the_goal_is_what_the_named_schedule_takes(level):
    told, run = level.told, simulate(level.best.check(level.cap))
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
            run = simulate(other)
            assert (run.makespan if level.barrier else run.period) >= level.told["time"]


def test_each_level_leads_further_than_the_one_before():
    names = [level.best.name for level in LEVELS]
    assert names == ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "zb_v"]
    first, second, third, *_ = LEVELS
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


def test_what_cannot_be_placed_by_hand_is_refused():
    with pytest.raises(ValueError, match="dualpipe_v cannot be placed by hand"):
        Level("pairs", "", schedule.dualpipe_v(2, 4))
    with pytest.raises(ValueError, match="its limit is 2"):
        Level("too little", "", schedule.gpipe(2, 4), cap=2)
    with pytest.raises(ValueError, match="at least one level"):
        editor.Editor(())
