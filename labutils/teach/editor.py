"""The schedule editor: forwards, backwards and weight gradients placed by hand, on a page that
needs no kernel.

A level is a board of `schedule.Board`, a limit, and a named schedule to compare with. Its rules in
the page are held against those in Python by a test on random boards.
"""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labutils import schedule
from labutils.schedule import Schedule, simulate
from labutils.teach.plots import picture, pipelines

_SCRIPT, _STYLE = (
    Path(__file__).with_suffix(suffix).read_text("utf-8") for suffix in (".js", ".css")
)


@dataclass(frozen=True)
class Level:
    """A board to fill.

    title, task: what it is called, and what is asked
    best: the schedule that yours is compared with, the shortest that has a name
    cap: most activations, of a stage and a micro-batch each, that a rank may hold
    barrier: whether the makespan counts, or the period
    total: most activations of all ranks' peaks together, if that is asked
    others: further schedules of the same board that are known by name
    """

    title: str
    task: str
    best: Schedule
    cap: int | None = None
    barrier: bool = True
    total: int | None = None
    others: tuple[Schedule, ...] = ()

    def __post_init__(self) -> None:
        self.best.check(self.cap)
        if len(self.best.places) > 1 or self.best.fused:
            raise ValueError(f"{self.best.name} cannot be placed by hand: no pairs, one direction")

    @property
    def told(self) -> dict[str, Any]:
        """What the page knows of it."""
        run, best = simulate(self.best), self.best
        ranks = range(len(best.ranks))
        return {
            "title": self.title,
            "task": self.task,
            "place": best.places[0],
            "m": best.micro_batches,
            "kinds": best.kinds,
            "cap": self.cap,
            "barrier": self.barrier,
            "total": self.total,
            "time": run.makespan if self.barrier else run.period,
            "best": pipelines.title_of(best),
            "peaks": [best.peak(rank) for rank in ranks],
            "known": {each.text: pipelines.title_of(each) for each in (*self.others, best)},
        }


def _line(p: int, m: int) -> tuple[Schedule, ...]:
    made = (schedule.naive, schedule.gpipe, schedule.eager_one_f_one_b, schedule.one_f_one_b)
    return tuple(make(p, m) for make in made)


LEVELS = (
    Level(
        "1 · Fill the pipeline",
        "Three ranks, four micro-batches. A backward takes twice a forward. End the step as early "
        "as you can.",
        schedule.gpipe(3, 4),
        others=_line(3, 4),
    ),
    Level(
        "2 · The same in less memory",
        "End as early as before, in less memory, and let the ranks together hold as little as you "
        "can.",
        schedule.one_f_one_b(3, 4),
        cap=3,
        total=6,
        others=_line(3, 4),
    ),
    Level(
        "3 · Split the backward",
        "B is the gradient of the inputs only, W that of the weights; all three take as long. "
        "Activations stay until W. What can wait, and where is it of use?",
        schedule.zb_h1(3, 4),
        cap=3,
    ),
    Level(
        "4 · No barrier between steps",
        "What counts now is the longest time that a single rank takes from its first operation to "
        "its last: the next step may follow at once. Leave no rank idle in between.",
        schedule.zb_h2(2, 4),
        cap=3,
        barrier=False,
        others=(schedule.zb_h1(2, 4),),
    ),
    Level(
        "5 · Two chunks per rank",
        "The model is cut into four stages: rank 0 has stages 0 and 2, rank 1 has 1 and 3. A step "
        "of 1F1B would take 30.",
        schedule.interleaved(2, 4),
    ),
    Level(
        "6 · The second chunk comes back",
        "Rank 0 has stages 0 and 3, rank 1 has 1 and 2: a V. No barrier, and no more memory than "
        "in 1F1B, since a stage is half a rank.",
        schedule.zb_v(2, 4),
        cap=4,
        barrier=False,
    ),
)


class Editor:
    """Boards on which a reader places operations by hand; those of the course without `levels`.

    >>> Editor()
    Schedule editor: 6 levels
    """

    def __init__(self, levels: Sequence[Level] = LEVELS) -> None:
        self.levels = tuple(levels)
        if not self.levels:
            raise ValueError("an editor needs at least one level")

    def __repr__(self) -> str:
        return f"Schedule editor: {len(self.levels)} levels"

    def _repr_html_(self) -> str:
        data = json.dumps([level.told for level in self.levels], ensure_ascii=False)
        data = data.replace("<", "\\u003c")
        names = "".join(
            f'<option value="{i}">{html.escape(level.title)}</option>'
            for i, level in enumerate(self.levels)
        )
        return (
            f'<div class="lu-editor" role="group" aria-label="Schedule editor" '
            f'data-lm-suppress-shortcuts="true" style="{picture.CARD};width:100%">\n'
            '<p class="lu-off">Run the cell, or trust the notebook, to place operations.</p>\n'
            f'<div class="lu-top" hidden><label>level <select>{names}</select></label></div>\n'
            f"<style>{_STYLE}</style>\n"
            f'<script type="application/json">{data}</script>\n'
            f"<script>{_SCRIPT}</script>\n</div>"
        )
