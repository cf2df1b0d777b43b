"""The schedule editor: forwards, backwards and weight gradients placed by hand, on a page that
needs no kernel; with one, what was placed runs on ranks.

A level is a board of `schedule.Board`, a limit, and a named schedule to compare with. Its rules in
the page are held against those in Python by a test on random boards.
"""

import contextlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from labutils import schedule
from labutils.config import Link, ModelConfig
from labutils.schedule import Durations, Schedule, simulate
from labutils.teach import plots
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
    sizes: MB of an activation of each stage, if bytes are asked for
    room: most MB that a rank shall hold, if that is asked
    message: units of time that a message takes from rank to rank
    """

    title: str
    task: str
    best: Schedule
    cap: int | None = None
    barrier: bool = True
    total: int | None = None
    sizes: tuple[int, ...] | None = None
    room: int | None = None
    message: int = 0

    def __post_init__(self) -> None:
        self.best.check(self.cap)
        if (self.room is None) != (self.sizes is None):
            raise ValueError(f"{self.title}: `room` in MB needs `sizes` of stages, and the reverse")
        if self.sizes is not None and len(self.sizes) != self.best.stages:
            raise ValueError(f"{self.title}: {len(self.sizes)} sizes, {self.best.stages} stages")
        if len(self.best.places) > 1 or self.best.fused:
            raise ValueError(f"{self.best.name} cannot be placed by hand: no pairs, one direction")

    @property
    def told(self) -> dict[str, Any]:
        """What the page knows of it."""
        best = self.best
        run = simulate(best, link=Link(self.message, 1.0))
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
            "sizes": self.sizes,
            "room": self.room,
            "message": self.message,
            "time": run.makespan if self.barrier else run.period,
            "best": pipelines.title_of(best),
            "peaks": [best.peak(rank) for rank in ranks],
            "known": known(best) | {best.text: pipelines.title_of(best)},
        }


_NAMED = (
    schedule.naive,
    schedule.gpipe,
    schedule.eager_one_f_one_b,
    schedule.one_f_one_b,
    schedule.breadth_first,
    schedule.interleaved,
    schedule.interleaved_zb,
    schedule.zb_h2,
    schedule.zb_h1,
    schedule.zb_v,
)


def known(board: Schedule) -> dict[str, str]:
    """The orders of a board that have a name: the name by `Schedule.text`.

    >>> list(known(schedule.zb_h1(2, 4)).values())
    ['ZB-H2', 'ZB-H1']
    """
    found = {}
    for make in _NAMED:
        with contextlib.suppress(ValueError):  # some are not for every number of micro-batches
            made = make(len(board.ranks), board.micro_batches)
            if (made.places, made.split) == (board.places, board.split):
                found[made.text] = pipelines.title_of(made)
    return found


def _paid(p: int, m: int, late: int) -> Schedule:
    """ZB-H1 whose last rank lets at most `late` of its W wait."""
    row: list[schedule.Op] = []
    owed: list[schedule.Op] = []
    for op in schedule.one_f_one_b(p, m).ranks[-1]:
        row.append(op)
        owed += [op._replace(kind="W")] * (op.kind == "B")
        row += [owed.pop(0)] if len(owed) > late else []
    made = schedule.zb_h1(p, m)
    rows = (*made.ranks[:-1], (*row, *owed))
    return replace(made, name=f"ZB-H1 with {late} W waiting at the end", ranks=rows)


LEVELS = (
    Level(
        "1 · Fill the pipeline",
        "Three ranks, four micro-batches. A backward takes twice a forward. End the step as early "
        "as you can.",
        schedule.gpipe(3, 4),
    ),
    Level(
        "2 · The same in less memory",
        "End as early as before, in less memory, and let the ranks together hold as little as you "
        "can.",
        schedule.one_f_one_b(3, 4),
        cap=3,
        total=6,
    ),
    Level(
        "3 · Messages take time",
        "A message to the next rank now takes one unit. 1F1B would take 26. End as early as GPipe "
        "does here, and let the ranks together hold less.",
        schedule.eager_one_f_one_b(3, 4),
        total=8,
        message=1,
    ),
    Level(
        "4 · Split the backward",
        "B is the gradient of the inputs only, W that of the weights; all three take as long. "
        "Activations stay until W. What can wait, and where is it of use?",
        schedule.zb_h1(3, 4),
        cap=3,
    ),
    Level(
        "5 · The same in bytes",
        "Rank 2 has the head: each activation of its stage is the logits of a micro-batch. Which W "
        "may wait there, and which one not?",
        _paid(3, 4, late=1),
        cap=3,
        sizes=(100, 100, 200),
        room=400,
    ),
    Level(
        "6 · No barrier between steps",
        "What counts now is the longest time that a single rank takes from its first operation to "
        "its last: the next step may follow at once. Leave no rank idle in between.",
        schedule.zb_h2(2, 4),
        cap=3,
        barrier=False,
    ),
    Level(
        "7 · Two chunks per rank",
        "The model is cut into four stages: rank 0 has stages 0 and 2, rank 1 has 1 and 3. A step "
        "of 1F1B would take 30.",
        schedule.interleaved(2, 4),
        total=8,
    ),
    Level(
        "8 · The second chunk comes back",
        "Rank 0 has stages 0 and 3, rank 1 has 1 and 2: a V. No barrier, and no more memory than "
        "in 1F1B, since a stage is half a rank.",
        schedule.zb_v(2, 4),
        cap=4,
        barrier=False,
    ),
)


_MODEL = ModelConfig(num_layers=8, d_model=32, num_heads=2, d_ff=128, vocab_size=64, seq_len=16)
_MOST = 1_000  # operations


def on_ranks(order: str) -> str:
    """What ranks do that run an order (`schedule.read`), each a thread, on stages of a small GPT,
    beside one device, the formula and the simulator: HTML.

    Raises ValueError: why it cannot run.
    """
    from labutils import pipeline  # here, because a page without a kernel needs no torch
    from labutils.teach import rigs

    if not order.strip():
        raise ValueError("there is no order yet: place all operations, or write F0 B0 | F0 B0")
    plan = schedule.read(order, "your order").check()
    pipeline.cut(_MODEL, plan.stages)  # or an error
    if (count := sum(map(len, plan.ranks))) > _MOST:
        raise ValueError(f"{count:,} operations are too many for one picture: take up to {_MOST:,}")
    plan = replace(plan, name=known(plan).get(plan.text, plan.name))
    unit = 1 / max(100, simulate(plan).makespan)  # at most a second or so
    pace = Durations(unit, unit, unit)
    beside = rigs.pipeline.compare(plan, _MODEL, pace=pace)
    rows = [
        (rank, beside.kept[rank], plan.peak(rank), *(books.only(rank=rank).total for books in sent))
        for sent in [(beside.sent, beside.predicted)]
        for rank in range(len(plan.ranks))
    ]
    heads = "rank", "kept at once", "simulated", "bytes sent", "by formula"
    cells = "".join(f"<tr>{''.join(f'<td>{n:,}</td>' for n in row)}</tr>" for row in rows)
    table = f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{cells}</table>"
    equal = "equal" if beside.equal else "not equal"
    return (
        f"<p>{html.escape(plan.name)} on {len(plan.ranks)} ranks: loss {beside.loss:.10f}, on one "
        f"device {beside.alone:.10f}; gradients are {equal} (error {beside.error:.0e}).</p>{table}"
        + plots.gantt(simulated=simulate(plan, pace), measured=beside.run, unit="s")._repr_html_()
    )


class Editor:
    """Boards on which a reader places operations by hand; those of the course without `levels`.

    >>> Editor()
    Schedule editor: 8 levels
    """

    def __init__(self, levels: Sequence[Level] = LEVELS) -> None:
        self.levels = tuple(levels)
        if not self.levels:
            raise ValueError("an editor needs at least one level")

    def __repr__(self) -> str:
        return f"Schedule editor: {len(self.levels)} levels"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        live = self.live._repr_mimebundle_()
        return live | {"text/plain": repr(self), "text/html": self._repr_html_()}

    @cached_property
    def live(self) -> Any:
        """The boards as an ipywidgets box, in which a finished order runs on ranks."""
        import ipywidgets  # here, because it starts what a page without a kernel never needs

        page = {"output_type": "display_data", "metadata": {}}
        page["data"] = {"text/html": self._repr_html_()}
        order = ipywidgets.Text(
            description="order",
            placeholder="a finished board writes it here, or you: F0 B0 | F0 B0",
            layout={"width": "100%"},
        )
        button = ipywidgets.Button(description="Run on ranks", tooltip="Run this order on ranks")
        result = ipywidgets.HTML(layout={"width": "100%"})

        def run(_button: Any) -> None:
            button.disabled, result.value = True, "<p>The ranks run …</p>"
            try:
                said = on_ranks(order.value)
            except Exception as error:  # the reader is told, whatever it is
                said = f"<p>Not run: {html.escape(str(error))}.</p>"
            button.disabled, result.value = False, f'<div aria-live="polite">{said}</div>'

        button.on_click(run)
        box = ipywidgets.VBox([ipywidgets.Output(outputs=(page,)), order, button, result])
        return box.add_class("lu-live")

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
