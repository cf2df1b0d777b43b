"""What a training step costs one rank of any mesh, before it runs: states, bytes sent, activations
and the peak, and its time, each asked of `(model, train, mesh, rank=0)`, as `step.build` runs it.

Formulas where there are exact ones, summed over one inventory of what the rank has; elsewhere a dry
run of that rank answers under the same signature, and its lines say so.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from labutils import units
from labutils.clock import Played
from labutils.config import Hardware, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory import Peak
from labutils.memory.formulas import PHASES
from labutils.predict import held, kept, played, traffic
from labutils.predict.inventory import Here

if TYPE_CHECKING:
    from labutils.predict.rehearsal import Rehearsal


def states(model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh(), rank: int = 0) -> Ledger:
    """Bytes of weights, gradients and what the optimizer keeps on a rank after an optimizer step,
    under the names of `measure.model_states`: of its stages, its share of each layer (tp), its
    experts (ep), and of these what ZeRO leaves it.

    >>> llama = ModelConfig.named("llama-3.1-405b")
    >>> train = TrainConfig(micro_batch=1, global_batch=2048, fp32_gradients=True, zero=1)
    >>> round(states(llama, train, Mesh(pp=16, dp=128, tp=8)).total / 1e9, 1)
    18.6
    >>> states(ModelConfig.named("gpt2-xl"), train).only(component="weights").total
    3115222400

    Raises ValueError for what does not go together (`step.check_plan`).
    Source: ZeRO 1910.02054, section 3.1: 2Ψ + 2Ψ + 12Ψ.
    """
    here = Here(model, train, mesh, rank)
    if train.fp8 == "delayed":
        return _dry(attrgetter("states"), model, train, mesh, rank)
    return held.states_in(here)


def peak_states(
    model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh(), rank: int = 0
) -> Ledger:
    """Bytes of weights, gradients and what the optimizer keeps on a rank at the fullest moment of a
    step; activations, which have a fullest moment of their own, are not in it.

    By formula where ZeRO shares states over dp alone; elsewhere a dry run answers.

    >>> gpt, train = ModelConfig.named("gpt2"), TrainConfig(micro_batch=1, global_batch=64, zero=3)
    >>> held = peak_states(gpt, train, Mesh(dp=64)).by("name")
    >>> held["weight shards"] < held["gathered weights"]
    True
    """
    here = Here(model, train, mesh, rank)
    if not held.no_moment(here):
        return held.fullest_in(here)
    return _dry(attrgetter("peak_states"), model, train, mesh, rank)


def sent(model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh(), rank: int = 0) -> Ledger:
    """Bytes that a rank sends in one step, by mesh axis and operation, under the names of a run's
    books. Experts are visited evenly.

    >>> gpt2, mesh = ModelConfig.named("gpt2"), Mesh(pp=4)
    >>> (s, h), b, m = gpt2.letters("s h"), 2, 8
    >>> train = TrainConfig(micro_batch=b, global_batch=m * b)
    >>> forward = sent(gpt2, train, mesh).only(name="send forward").total
    >>> forward == 2 * m * b * s * h  # to the next stage, forward, in half precision
    True
    >>> Ψ, N_d = gpt2.num_params, 4
    >>> def shared(level: int, name: str) -> int:
    ...     split = replace(train, global_batch=N_d * m * b, zero=level)
    ...     return sent(gpt2, split, Mesh(dp=N_d)).only(name=name).total
    >>> shared(1, "all_gather") == 2 * Ψ * (N_d - 1) / N_d  # ZeRO-1 and 2, weights
    True
    >>> shared(2, "reduce_scatter") == 2 * m * Ψ * (N_d - 1) / N_d  # ZeRO-2 and 3, gradients
    True
    >>> shared(3, "all_gather") == 4 * m * Ψ * (N_d - 1) / N_d  # ZeRO-3, weights
    True

    Raises ValueError for what does not go together (`step.check_plan`).
    """
    here = Here(model, train, mesh, rank)
    if _why_dry(train, mesh):
        return _dry(attrgetter("sent"), model, train, mesh, rank)
    return traffic.sent_by(here)


def activations(
    model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh(), rank: int = 0
) -> Ledger:
    """Bytes that autograd keeps on a rank at the fullest moment between two operations of its
    schedule, by module: of all micro-batches that are in flight then.

    The batch itself is not in it, nor what a checkpointed layer computes again. Where a backward
    pass is split, tokens choose experts, or not all is trained, a dry run answers: the most that is
    kept during the step, in one line.
    """
    here = Here(model, train, mesh, rank)
    if not kept.why_dry(here):
        return kept.kept_here(here)
    from labutils.predict.rehearsal import BATCH

    def kept_of(found: "Rehearsal") -> Ledger:
        moments = found.history.only("activations").moments
        most = max(sum(line.amount for line in m.ledger if line.name != BATCH) for m in moments)
        return Ledger([Line("activations", most, "activations")])

    return _dry(kept_of, model, train, mesh, rank)


def peak(model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh(), rank: int = 0) -> Peak:
    """What is alive on a rank at the fullest moment of a step, temporaries and the batch included,
    and which phase that is in. There is no formula for what comes and goes: a dry run answers, or
    two of fewer micro-batches (`rehearsal.told`).

    Messages on their way to others, of which a dry run knows nothing, are not in it.
    """
    from labutils.predict.rehearsal import told

    Here(model, train, mesh, rank)  # or an error
    found = told(model, train, mesh, rank)
    top, note = found.short.history.peak, f"dry run of rank {rank}"
    lines = found.ledger(lambda each: each.history.peak.ledger)
    kept = tuple(replace(line, note=note) for line in lines if line.amount)
    short, longer = (each.history.phases for each in (found.short, found.longer))
    phases = {}
    for name in (name for name in PHASES if name in short):  # where all is frozen, none backward
        first, next_ = short[name].ledger.total, longer[name].ledger.total
        phases[name] = first + found.more * (next_ - first)
    return Peak(kept, top.phase, top.event, phases)


def time(
    model: ModelConfig,
    train: TrainConfig,
    mesh: Mesh = Mesh(),
    rank: int = 0,
    *,
    device: Hardware,
) -> Played:
    """A step in time, of `rank` and of those at its place in the other stages of the pipeline, by
    their order: `spent` says of each what it computes, what it sends by axis, and its bubble.

    device: at whose rates they compute, and over whose links they send

    A rank does one thing after the other: what is sent is exposed, all of it, so that a program
    which hides some of it takes less. Matrix products and attention compute, at the rates that the
    device reaches. Left out are what moves memory, such as norms and the update, and single numbers
    that all agree on.

    >>> gpt, h100 = ModelConfig.named("gpt2-xl"), Hardware.named("H100")
    >>> train = TrainConfig(micro_batch=1, global_batch=32, zero=1, attention="sdpa")
    >>> step = time(gpt, train, Mesh(pp=4, dp=4, tp=1), device=h100)
    >>> {kind: round(100 * seconds / step.makespan) for kind, seconds in step.spent(0).items()}
    {'forward': 19, 'backward': 38, 'pp': 10, 'bubble': 27, 'dp': 7}

    Raises ValueError for ZeRO 2 and 3, which send beside computing, where not all is trained, and
    where no rate is known.
    """
    units.instance(device, Hardware, "predict.time")
    heres = [Here(model, train, mesh, each) for each in mesh.ranks(rank, "pp")]
    played.check_timed(heres[0])
    return played.step_of(heres, device)


def _why_dry(train: TrainConfig, mesh: Mesh) -> str:
    """Why there is no formula for what is sent, if there is none."""
    ends = [name for name in train.frozen if "*" in name or not name.startswith("blocks")]
    adapters, tp = train.adapters, mesh.tp > 1
    some = adapters is not None and adapters.pattern != "*"
    split = max(mesh.tp, mesh.cp, mesh.ep) > 1
    reasons = {
        "the ranks of tp agree on scales": tp and train.fp8 not in (None, "unscaled"),
        "autocast chooses in which format an adapter computes": tp and train.autocast and adapters,
        "scales of the last steps": train.fp8 == "delayed",
        "a frozen end asks for no gradient": split and ends,
        "what no adapter stands before asks for no gradient": split and some,
    }
    return next((reason for reason, so in reasons.items() if so), "")


def _dry(
    what: "Callable[[Rehearsal], Ledger]",
    model: ModelConfig,
    train: TrainConfig,
    mesh: Mesh,
    rank: int,
) -> Ledger:
    """What a dry run of the rank found; its lines say so."""
    from labutils.predict.rehearsal import told

    found = told(model, train, mesh, rank).ledger(what)
    return Ledger(replace(line, note=f"dry run of rank {rank}") for line in found)
