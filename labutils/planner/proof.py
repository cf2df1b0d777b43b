"""Is a plan true? The course's own step of it, dry at full size on the ranks that differ, and on
processes in a scaled-down copy of the mesh: formula = dry run = real run, in bytes held and sent.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from labutils.config import ModelConfig
from labutils.ledger import COMPONENTS, Diff, Ledger, Line
from labutils.planner import stages
from labutils.planner.work import PLANNED, Plan

if TYPE_CHECKING:
    from labutils.predict.rehearsal import Rehearsal


def rank_of(plan: Plan, stage: int) -> int:
    """The first rank of a place on the pipeline."""
    return stage * plan.dp * plan.cp * plan.tp


def shorter(plan: Plan, stage: int) -> Plan:
    """The plan with as few micro-batches as show the peak of a rank of 1F1B: two more than it holds
    at once. Other schedules keep theirs.

    Invariant: what a rank holds does not hang on how many more there are.
    """
    if PLANNED[plan.schedule] != "one_f_one_b":
        return plan
    return replace(plan, micro_batches=min(plan.micro_batches, plan.pp - stage + 2))


def dry(model: ModelConfig, plan: Plan, stage: int) -> Diff:
    """What the formulas of stack "course" say of a rank of the pipeline against a dry run of it, in
    bytes: weights, gradients, optimizer, and activations at their most. What only lives for a
    moment is in `predict.peak`.

    Cost: seconds; about a tenth for each layer and micro-batch of a 405B model.
    """
    from labutils.predict.rehearsal import rehearsal

    few = shorter(plan, stage)
    found = rehearsal(model, few.train(model), few.mesh, rank_of(few, stage))
    held = {name: 0 for name in COMPONENTS[:3]}
    for line in found.states:
        if line.component in held and line.name != "step":
            held[line.component] += line.amount
    measured = [Line(name, n, name) for name, n in held.items()]
    measured.append(Line("activations", _kept(found), "activations"))
    return _formula(model, plan, stage).diff(Ledger(measured))


def _kept(found: "Rehearsal") -> int:
    """Bytes of activations at their most, without the batch."""
    from labutils.predict.rehearsal import BATCH

    moments = found.history.only("activations").moments
    return max(sum(line.amount for line in m.ledger if line.name != BATCH) for m in moments)


def _formula(model: ModelConfig, plan: Plan, stage: int) -> Ledger:
    """The planner's ledger of a rank, a line for each component."""
    totals = stages.ledger(model, plan, stage, "course").by("component")
    return Ledger([Line(name, totals.get(name, 0), name) for name in COMPONENTS[:4]])


def scaled(plan: Plan, ranks: int = 8) -> Plan:
    """A copy of the plan on at most so many ranks, every axis that is used at 2 or 1: pipelines
    first, then tp, dp, cp; with the same schedule, level of ZeRO and recomputation."""
    sizes, left = dict.fromkeys(("pp", "tp", "dp", "cp"), 1), ranks
    for axis in sizes:
        if getattr(plan, axis) > 1 and left >= 2:
            sizes[axis], left = 2, left // 2
    zero = plan.zero if sizes["dp"] * sizes["cp"] > 1 else 0
    chunks = min(plan.chunks, 2)
    schedule = plan.schedule if sizes["pp"] > 1 else 0
    again = replace(plan, **sizes, ep=1, micro_batch=1, micro_batches=4, chunks=chunks, zero=zero)
    return replace(again, schedule=schedule)


def small(model: ModelConfig, layers: int = 4) -> ModelConfig:
    """A model of the same kind with so many layers, that a laptop trains in no time."""
    g = 4
    a = g * (2 if model.num_heads > model.num_kv_heads else 1)
    sizes: dict = dict(num_layers=layers, d_model=8 * a, num_heads=a, num_kv_heads=g, d_head=8)
    return replace(model, **sizes, d_ff=16 * g, vocab_size=64, seq_len=32, name="")


class Books(NamedTuple):
    """Bytes that all ranks send in a step, by axis, and hold after it, by component; of activations
    at their most, and of everything at the fullest moment. Lines of `formula` with the note "dry
    run" have no formula: `predict` asks a dry run."""

    formula: Ledger
    dry: Ledger
    real: Ledger

    @property
    def unexplained(self) -> int:
        """Bytes by which dry runs differ from formulas, and real ones from dry, line by line."""
        return self.formula.diff(self.dry).unexplained + self.dry.diff(self.real).unexplained

    def __str__(self) -> str:
        totals = [book.by("component") for book in self]
        asked = {line.component for line in self.formula if line.note}
        rows = [("", "formula", "dry run", "real")]
        for what in totals[0] | totals[1] | totals[2]:
            formula, *others = (f"{total.get(what, 0):,} B" for total in totals)
            rows.append((what, "no formula" if what in asked else formula, *others))
        lines = [f"{what:18}" + "".join(map("{:>13}".format, cells)) for what, *cells in rows]
        return "\n".join([*lines, f"unexplained {self.unexplained:,} B"])


def copy(model: ModelConfig, plan: Plan, engine: str = "processes", ranks: int = 8) -> Books:
    """A step of every rank of the scaled-down copy. Messages are paired: none is on its way while a
    rank is asked what it holds.

    model, plan: what is scaled down, to so many `ranks`
    engine: of the `World` on which the copy runs

    Real tokens do not visit experts as evenly as a dry run's: fullest moments may differ then.

    Cost: about ten seconds for eight processes.
    """
    from labutils import predict
    from labutils.predict.inventory import Here
    from labutils.predict.kept import why_dry
    from labutils.predict.rehearsal import program, rehearsal
    from labutils.world import World

    few = scaled(plan, ranks)
    tiny = small(model, max(2, few.pp * few.chunks))
    train = few.train(tiny)
    with World(few.mesh, engine=engine) as world:
        found = world.run(program, tiny, train, "paired")
    books: tuple[list[Line], ...] = [], [], []
    for rank, real in enumerate(found):
        asked = tiny, train, few.mesh, rank
        dry_, kept = rehearsal(*asked, "paired"), predict.activations(*asked)
        note = "dry run" if why_dry(Here(*asked)) else ""  # no formula has answered
        totals = [Line("", kept.total, "activations", note=note)]
        totals.append(Line("", dry_.history.peak.ledger.total, "fullest moment", note="dry run"))
        books[0].extend(_book(rank, predict.sent(*asked), predict.states(*asked), totals))
        for book, one in zip(books[1:], (dry_, real), strict=True):
            most = _kept(one), one.history.peak.ledger.total
            lines = [replace(x, amount=n) for x, n in zip(totals, most, strict=True)]
            book.extend(_book(rank, one.sent, one.states, lines))
    return Books(*map(Ledger, books))


def _book(rank: int, sent: Ledger, states: Ledger, totals: Iterable[Line]) -> Iterator[Line]:
    """All lines of a rank, under the components of `Books`."""
    for line in (*states, *totals):
        yield replace(line, rank=rank)
    for line in sent:
        yield replace(line, component=f"sent over {line.axis}", rank=rank)
