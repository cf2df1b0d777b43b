"""All legal plans of a model on a cluster, evaluated as columns: which fit, which is fastest, which
are as good within the error of the model, and why another is not.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from labutils import units
from labutils.config import ModelConfig
from labutils.planner import rates as rates_
from labutils.planner import stages, work
from labutils.planner.cluster import Cluster
from labutils.planner.rates import Rates
from labutils.planner.work import INTERLEAVED, RECOMPUTE, ZB_H1, Numbers, Plan

TIE = 0.03  # plans whose steps differ less are alike: the model errs by as much
CHUNKS = (2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 4, 8)
_FROM_CLUSTER: Any = None  # the default of a field that is worked out of another


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked: a model, a cluster, and tokens.

    batch_tokens: of a global batch, which is rounded to whole sequences of model.seq_len
    tokens: of the whole training
    stack: whose memory is counted, and who computes again: "megatron", or "course", without what
        lives only for a moment. With ZeRO 2 and 3 that is much, and refused
    rates: what devices reach; `Rates.of` the device unless given
    """

    model: ModelConfig
    cluster: Cluster
    batch_tokens: int = 2**24
    tokens: float = 0.0
    stack: str = "megatron"
    rates: Rates = _FROM_CLUSTER

    def __post_init__(self) -> None:
        units.instance(self.model, ModelConfig, "Job")
        units.instance(self.cluster, Cluster, "Job")
        units.whole_fields(self, "batch_tokens")
        units.positive_fields(self, "tokens", or_zero=True)
        if self.stack not in stages.STACKS:
            known = " or ".join(map(repr, stages.STACKS))
            raise ValueError(f"stack={self.stack!r} is unknown: use {known}")
        if self.stack == "course":
            self.model.require_gpt()
        if self.batch < 1:
            short = f"batch_tokens={self.batch_tokens:,} is less than half of a sequence"
            raise ValueError(f"{short} of {self.model.seq_len:,}: give at least one")
        if self.rates is None:
            object.__setattr__(self, "rates", Rates.of(self.cluster.device))

    @property
    def batch(self) -> int:
        """Sequences in a global batch."""
        return round(self.batch_tokens / self.model.seq_len)

    @property
    def fitting_batch(self) -> int:
        """Sequences in the batch nearest to the one asked for that is a multiple of all GPUs, or of
        which all GPUs are a multiple: it can be shared out in more ways."""
        batch, gpus = self.batch, self.cluster.gpus
        if batch >= gpus:
            return round(batch / gpus) * gpus
        return min(_divisors(gpus, 2 * batch), key=lambda n: (abs(n - batch), n))


# ── what is legal ─────────────────────────────────────────────────────────────────────────────────


def rules(job: Job, p: Plan) -> Iterator[tuple[Numbers, str]]:
    """Where a plan, or a column of plans, is illegal, and the sentence that says so of a plan q."""
    model, n, batch = job.model, job.cluster.gpus, job.batch
    yield p.gpus != n, f"pp·dp·cp·tp = {{q.gpus:,}} ranks, and the cluster has {n:,} GPUs"
    for name in ("num_heads", "num_kv_heads", "d_ff", "vocab_size"):
        size = getattr(model, name)
        yield size % p.tp != 0, f"tp={{q.tp}} does not divide {name}={size:,}"
    s = model.seq_len
    yield s % (p.cp * (1 + (p.cp > 1))) != 0, f"2·cp, cp={{q.cp}}, does not divide seq_len={s:,}"
    yield s // p.cp % p.tp != 0, f"tp={{q.tp}} does not divide a rank's {s:,} / {{q.cp}} tokens"
    given = "dp={q.dp}, micro_batch={q.micro_batch}, micro_batches={q.micro_batches}"
    sequences = p.dp * p.micro_batch * p.micro_batches
    yield sequences != batch, f"{given} do not make up the batch of {batch:,} sequences"
    yield p.replicas % p.ep != 0, "ep={q.ep} does not divide dp·cp = {q.replicas}"
    experts = model.num_experts
    yield experts % p.ep != 0, f"ep={{q.ep}} does not divide num_experts={experts}"
    apart = (p.zero > 0) & (p.replicas == 1)
    yield apart, "zero={q.zero} shares states out over dp·cp, which is 1"
    whole = "zero=3 shares all weights of a layer over dp·cp, and ep={q.ep} has experts apart"
    yield (p.zero == 3) & (p.ep > 1), whole
    most = model.num_layers + 2
    stages_ = f"pp={{q.pp}} ranks of {{q.chunks}} chunks are more stages than the {most} that fill"
    yield p.pp * p.chunks > most, stages_
    looped, split = p.schedule == INTERLEAVED, p.schedule == ZB_H1
    yield looped != (p.chunks > 1), "chunks={q.chunks}: interleaved has several, others have one"
    turns = (
        "interleaved takes pp micro-batches in turn: pp={q.pp} does not divide {q.micro_batches}"
    )
    yield looped & (p.micro_batches % p.pp != 0), turns
    yield (p.schedule > 0) & (p.pp == 1), "this is a schedule of a pipeline, and pp=1"
    gathers = "zb_h1 splits backward passes, and zero=3 gathers weights for whole ones"
    yield split & (p.zero == 3), gathers
    yield split & (job.stack == "megatron"), "Megatron-LM has no zb_h1"
    moment = "zero={q.zero} holds whole layers for a moment, uncounted here: ask predict.peak"
    yield (p.zero > 1) & (job.stack == "course"), moment


def illegal(job: Job, plan: Plan) -> str:
    """Why a plan is illegal, in a sentence; empty if it is legal."""
    return next((said.format(q=plan) for wrong, said in rules(job, plan) if np.any(wrong)), "")


def _divisors(n: int, most: float = math.inf) -> list[int]:
    return [i for i in range(1, int(min(n, most)) + 1) if n % i == 0]


def enumerate_plans(job: Job) -> Plan:
    """A column of all legal plans: meshes and micro-batches from divisors, times schedules, levels
    of ZeRO and recomputation, less what a rule forbids."""
    units.instance(job, Job, "search")
    model, n, batch = job.model, job.cluster.gpus, job.batch
    meshes = []
    for tp in _divisors(math.gcd(n, model.num_kv_heads), 16):
        for cp in _divisors(n // tp, model.seq_len / tp):
            for pp in _divisors(n // tp // cp, model.num_layers + 2):
                dp = n // tp // cp // pp
                for ep in _divisors(math.gcd(dp * cp, model.num_experts)):
                    if batch % dp == 0:
                        sizes = (b for b in MICRO_BATCHES if batch // dp % b == 0)
                        meshes += [(tp, cp, pp, dp, ep, b, batch // dp // b) for b in sizes]
    how = [(0, 1), (1, 1), *((INTERLEAVED, v) for v in CHUNKS), (ZB_H1, 1)]
    options = [(s, v, zero, again) for s, v in how for zero in range(4) for again in range(3)]
    if not meshes:
        return _columns(np.zeros((0, 11), dtype=np.int64))
    left, right = np.array(meshes), np.array(options)
    # Rules on parts of a row first, so that few whole rows are made.
    each = np.repeat(left, len(options), axis=0)
    rows = np.concatenate([each, np.tile(right, (len(left), 1))], axis=1)
    ranks, schedule, chunks = rows[:, 2], rows[:, 7], rows[:, 8]
    rows = rows[(ranks * chunks <= model.num_layers + 2) & ((schedule == 0) | (ranks > 1))]
    p = _columns(rows)
    legal = np.ones(len(rows), dtype=bool)
    for wrong, _ in rules(job, p):
        legal &= np.logical_not(wrong)
    return p[legal]


def _columns(rows: np.ndarray) -> Plan:
    names = ("tp", "cp", "pp", "dp", "ep", *work.CHOSEN[5:])
    rest = {f.name: np.full(len(rows), f.default) for f in fields(Plan) if f.name not in names}
    return Plan(**dict(zip(names, np.ascontiguousarray(rows.T), strict=True)), **rest)


# ── what they cost ────────────────────────────────────────────────────────────────────────────────


def evaluate(
    job: Job, p: Plan, tell: Callable[[int], None] = lambda done: None
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a step, and bytes of the fullest rank, of a column of plans.

    tell: is told now and then how many are done
    """
    units.instance(job, Job, "evaluate")
    seconds, peaks = np.empty(len(p.tp)), np.empty(len(p.tp))
    for begin in range(0, len(p.tp), 4096):  # so much stays in the cache
        part = slice(begin, begin + 4096)
        seconds[part], peaks[part] = seconds_and_peaks(job, p[part])
        tell(min(begin + 4096, len(p.tp)))
    return seconds, peaks


def seconds_and_peaks(job: Job, p: Plan) -> tuple[Numbers, Numbers]:
    """Seconds of a step, and bytes of the fullest rank, of a plan or of a column of plans."""
    at = stages.places(job.model, p)
    path = rates_.critical_path(job.model, p, job.rates, job.cluster, at, job.stack)
    return path.total(job.rates), stages.bytes_of(job.model, p, job.stack, at).max(axis=0)


@dataclass(frozen=True)
class Estimate:
    """One plan of a job: seconds of a step, bytes of its fullest rank, and what follows."""

    job: Job
    plan: Plan
    seconds: float
    peak: float

    @property
    def fits(self) -> bool:
        """Whether what it allocates leaves the cluster's reserve alone."""
        return self.peak <= self.job.cluster.room

    @property
    def headroom(self) -> float:
        """Bytes between its peak and what it may allocate."""
        return self.job.cluster.room - self.peak

    @functools.cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what they are for."""
        job = self.job
        path = rates_.critical_path(job.model, self.plan, job.rates, job.cluster, stack=job.stack)
        return {name: float(s) for name, s in path.parts(job.rates).items()}

    @functools.cached_property
    def fullest(self) -> int:
        """The place on the pipeline of the rank that holds most."""
        at = stages.places(self.job.model, self.plan)
        held = stages.bytes_of(self.job.model, self.plan, self.job.stack, at)
        return int(at.rank[held.argmax()])

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        tokens = self.job.batch * self.job.model.seq_len
        return tokens / self.seconds / self.job.cluster.gpus

    def mfu(self, convention: str = "causal") -> float:
        """Model FLOPs per second as a share of the peak in bf16, or in fp16 without it.

        convention: "6N": six for each parameter that a token meets; "causal": all products, of
            attention the half that is not masked; "full": attention in full, as Korthikanti et al.
        """
        per_token = flops_per_token(self.job.model)[convention]
        device = self.job.cluster.device
        return per_token * self.tokens_per_second / device.flops[device.half]

    @property
    def days(self) -> float:
        """Of the whole training."""
        per_day = self.tokens_per_second * self.job.cluster.gpus * 86400
        return self.job.tokens / per_day

    @property
    def gpu_hours(self) -> float:
        """Of the whole training."""
        return self.days * 24 * self.job.cluster.gpus

    @property
    def cost(self) -> float:
        """GPU-hours of the whole training, times the price of one."""
        return self.gpu_hours * self.job.cluster.price


def flops_per_token(model: ModelConfig) -> dict[str, float]:
    """FLOPs of a token's forward and backward pass, by convention."""
    known = work.shape(model)
    heads = model.num_heads * (known.letters["d"] + known.letters["w"])
    attention = 3 * 2 * model.num_layers * model.seq_len * heads
    full, idle = model.flops_per_token(), model.num_experts - model.top_k
    active = model.num_params - known.num_sparse * idle * known.sparse.expert
    return {"6N": 6 * active, "causal": full - attention / 2, "full": full}


def _complexity(p: Plan) -> Numbers:
    """Axes in use, and 1 for each other thing: a schedule other than 1F1B, ZeRO above level 1,
    recomputation."""
    axes = sum(1 * (n > 1) for n in (p.tp, p.cp, p.pp, p.ep))
    return axes + (p.schedule > 0) + (p.zero > 1) + (p.recompute > 0)


class Found:
    """All legal plans of a job with seconds and peaks; made by `search`.

    plans, seconds, peaks: columns
    fits: which plans leave the reserve alone
    """

    def __init__(self, job: Job, plans: Plan, tell: Callable[[int, int], None]) -> None:
        self.job, self.plans = job, plans
        self.seconds, self.peaks = evaluate(job, plans, lambda done: tell(done, len(plans.tp)))
        self.fits = self.peaks <= job.cluster.room

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, i: int) -> Estimate:
        return Estimate(self.job, self.plans[i], float(self.seconds[i]), float(self.peaks[i]))

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Places of the plans that fit: ties of the fastest first, by headroom in tenths of
        what fits, then by simplicity, then by seconds; then the others by seconds."""
        fit = np.flatnonzero(self.fits)
        seconds = self.seconds[fit]
        tied = seconds <= seconds.min(initial=math.inf) * (1 + TIE)
        spare = np.floor(10 * (1 - self.peaks[fit] / self.job.cluster.room))
        simple = _complexity(self.plans[fit])
        keys = (seconds, simple * tied, -spare * tied, np.logical_not(tied))
        return fit[np.lexsort(keys)]

    def best(self, n: int = 1) -> list[Estimate]:
        """The first n plans in `order`."""
        return [self[i] for i in self.order[:n]]

    @functools.cached_property
    def fastest(self) -> Estimate:
        """The plan with the shortest step of those that fit.

        Raises ValueError: if none fits, with the one that comes closest.
        """
        if not self.fits.any():
            raise ValueError(self._none())
        return self[int(np.where(self.fits, self.seconds, np.inf).argmin())]

    @property
    def ties(self) -> list[Estimate]:
        """The plans that are within the model's error of the fastest, as in `order`."""
        most = self.fastest.seconds * (1 + TIE)
        return [self[i] for i in self.order if self.seconds[i] <= most]

    def pareto(self) -> list[Estimate]:
        """The plans that fit and that no other beats in both seconds and peak, fastest first."""
        fit = np.flatnonzero(self.fits)
        fit = fit[np.lexsort((self.peaks[fit], self.seconds[fit]))]
        least = np.minimum.accumulate(np.concatenate([[np.inf], self.peaks[fit]]))
        return [self[i] for i in fit[self.peaks[fit] < least[:-1]]]

    def _none(self) -> str:
        room, device = units.text(self.job.cluster.room), self.job.cluster.device.name
        if not len(self):
            near = self.job.fitting_batch
            tokens = near * self.job.model.seq_len
            would = enumerate_plans(replace(self.job, batch_tokens=tokens))
            those = f", as with {near:,} sequences ({tokens} tokens)" * bool(len(would.tp))
            return (
                f"no plan is legal for {self.job.batch:,} sequences on "
                f"{self.job.cluster.gpus:,} GPUs: change the batch or the number of nodes, so "
                f"that they have divisors in common{those}"
            )
        leanest = units.text(float(self.peaks.min()))
        enough = self._nodes()
        more = f"{enough:,} nodes, where one fits" if enough else "more nodes"
        return (
            f"none of {len(self):,} legal plans fits: the leanest needs {leanest} of {room} "
            f"({1 - self.job.cluster.reserve:.0%} of {device}): use {more}, a larger device or a "
            "shorter sequence"
        )

    def _nodes(self) -> int:
        """So many times two nodes that a plan fits; 0 if there are none within 1,024 GPUs."""
        cluster = self.job.cluster
        while (cluster := replace(cluster, nodes=2 * cluster.nodes)).gpus <= 1024:
            if search(replace(self.job, cluster=cluster)).fits.any():
                return cluster.nodes
        return 0


def search(job: Job, tell: Callable[[int, int], None] = lambda done, of: None) -> Found:
    """All legal plans of the job, evaluated.

    tell: is told now and then how many plans of how many are done
    """
    return Found(job, enumerate_plans(job), tell)


def estimate(job: Job, plan: Plan) -> Estimate:
    """One plan, evaluated, legal or not; raises TypeError for what is no plan."""
    units.instance(job, Job, "estimate")
    units.instance(plan, Plan, "estimate")
    seconds, peak = seconds_and_peaks(job, plan)
    return Estimate(job, plan, float(seconds), float(peak))


def why(found: Found, plan: Plan) -> str:
    """Why a plan is not the first: the sentence, with numbers, that it is illegal, does not fit, or
    is slower, and by what."""
    job = found.job
    if reason := illegal(job, plan):
        return f"illegal: {reason}"
    mine = estimate(job, plan)
    if not mine.fits:
        lines = stages.ledger(job.model, plan, mine.fullest, job.stack)
        largest = max(lines, key=lambda line: line.amount)
        return (
            f"does not fit: rank {mine.fullest} of the pipeline needs {units.text(mine.peak)} of "
            f"{units.text(job.cluster.room)}, {units.text(largest.amount)} of it {largest.name}"
        )
    best = found.fastest
    more = mine.seconds / best.seconds - 1
    if more <= 1e-12:
        return "it is the fastest of the plans that fit"
    change = {name: mine.parts[name] - best.parts[name] for name in best.parts}
    most = max(change, key=lambda name: change[name])
    said = (
        f"{more:.1%} slower than {best.seconds:.2f} s: {most} takes {mine.parts[most]:.2f} s, "
        f"there {best.parts[most]:.2f} s"
    )
    return f"a tie, {said}" if more <= TIE else said


def sensitivity(found: Found) -> dict[str, float]:
    """By how much the fastest step gets shorter, as a share: for rates and links between nodes
    that are 10 % faster with the same plan, and for 1 GB more on each device, and for one node
    more, with the plan that is then the fastest. A node for which no plan divides stands idle: 0.
    """
    job, best = found.job, found.fastest
    p, changed = best.plan, {}
    for name in ("products", "attention", "memory", "link"):
        faster = replace(job.rates, **{name: 1.1 * getattr(job.rates, name)})
        seconds = estimate(replace(job, rates=faster), p).seconds
        changed[f"{name} + 10 %"] = 1 - seconds / best.seconds
    wider = replace(job, cluster=replace(job.cluster, between=1.1 * job.cluster.between))
    changed["links between nodes + 10 %"] = 1 - estimate(wider, p).seconds / best.seconds
    roomy = found.peaks <= job.cluster.room + units.GB
    changed["1 GB more"] = float(1 - found.seconds[roomy].min() / best.seconds)
    more = search(replace(job, cluster=replace(job.cluster, nodes=job.cluster.nodes + 1)))
    least = more.seconds[more.fits].min(initial=best.seconds)
    changed["1 node more"] = float(1 - least / best.seconds)
    return changed


def text_of(plan: Plan) -> str:
    """A plan in a line.

    >>> text_of(Plan(tp=8, pp=16, dp=128, micro_batches=16, schedule=2, chunks=7))
    'dp128 tp8 pp16 interleaved×7, 16 micro-batches of 1, ZeRO-1'
    """
    axes = ((n, getattr(plan, n)) for n in ("dp", "tp", "cp", "ep", "pp"))
    said = " ".join(f"{name}{size}" for name, size in axes if size > 1 or name == "dp")
    if plan.pp > 1:
        said += f" {work.SAID[plan.schedule]}" + (f"×{plan.chunks}" if plan.chunks > 1 else "")
    said += f", {plan.micro_batches} micro-batches of {plan.micro_batch}, ZeRO-{plan.zero}"
    return said + (f", {RECOMPUTE[plan.recompute]} recomputation" if plan.recompute else "")
