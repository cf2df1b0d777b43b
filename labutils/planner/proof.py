"""Is a plan true? The course's own step of it, dry at full size on the ranks that differ, and on
processes in a scaled-down copy of the mesh: formula = dry run = real run, in bytes held and sent.
"""

from dataclasses import replace

from labutils.config import ModelConfig
from labutils.ledger import COMPONENTS, Diff, Ledger, Line
from labutils.planner import stages
from labutils.planner.work import PLANNED, Plan


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


def dry(model: ModelConfig, plan: Plan, stage: int = 0) -> Diff:
    """What the formulas of stack "course" say of a rank of the pipeline against a dry run of it, in
    bytes: weights, gradients, optimizer, and activations at their most. What only lives for a
    moment is in `predict.peak`.

    Cost: seconds; about a tenth for each layer and micro-batch of a 405B model.
    """
    from labutils.predict.rehearsal import BATCH, rehearsal

    few = shorter(plan, stage)
    found = rehearsal(model, few.train(model), few.mesh, rank_of(few, stage))
    held = {name: 0 for name in COMPONENTS[:3]}
    for line in found.states:
        if line.component in held and line.name != "step":
            held[line.component] += line.amount
    moments = found.history.only("activations").moments
    most = max(sum(line.amount for line in m.ledger if line.name != BATCH) for m in moments)
    measured = [Line(name, n, name) for name, n in held.items()]
    measured.append(Line("activations", most, "activations"))
    return _formula(model, plan, stage).diff(Ledger(measured))


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


def copy(
    model: ModelConfig, plan: Plan, engine: str = "processes", ranks: int = 8
) -> list[tuple[int, int]]:
    """Of each rank of the scaled-down copy: bytes by which what it sends, and what it holds after a
    step, in a real run differ from its dry run. All are 0 where the proof holds."""
    from labutils.predict.rehearsal import program, rehearsal
    from labutils.world import World

    few = scaled(plan, ranks)
    tiny = small(model, max(2, few.pp * few.chunks))
    train = few.train(tiny)
    with World(few.mesh, engine=engine) as world:
        real = world.run(program, tiny, train)
    foreseen = [rehearsal(tiny, train, few.mesh, rank) for rank in range(few.mesh.size)]
    return [
        (dry_.sent.diff(mine.sent).unexplained, dry_.states.diff(mine.states).unexplained)
        for dry_, mine in zip(foreseen, real, strict=True)
    ]
