"""How long the work takes: five numbers per device and software stack, fitted to runs; and the
step, whose work lies on a critical path.

seconds = FLOPs of products / rate + FLOPs of attention / rate + bytes moved / rate + bytes sent /
rate + kernels · seconds each, which is linear, so a fit is a few lines.
"""

import csv
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from labutils import schedule
from labutils.config import DATA, Hardware, ModelConfig
from labutils.planner import stages, work
from labutils.planner.cluster import Cluster
from labutils.planner.work import GPIPE, INTERLEAVED, LINKS, WORK, ZB_H1, Numbers, Plan

NAMES = ("products", "attention", "memory", "link", "kernel")
# What training reaches of a data sheet, and seconds of a kernel, before a run is seen; and how far
# off that may be (standard deviations of the logarithm).
FRACTIONS = (0.55, 0.45, 0.65, 0.55, 10e-6)
UNSURE = (0.25, 0.25, 0.25, 0.25, 0.70)
NOISE = 0.025  # of a measured step
_PLACE = [0, 1, 2, 4, *[3] * len(LINKS)]  # of the rate for each row of work
PLAYED = 4_000  # operations of an interleaved schedule, or eight rounds where these are more


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches in training with one software stack.

    products, attention: FLOP/s of large matrix products, and of fused causal attention
    memory, link: B/s of memory-bound kernels, and of collectives within a node
    kernel: seconds that each kernel takes beside that
    overlap: the share of its computing behind which a rank hides what ZeRO 2 and 3 and its chunks
        send, and of attention, behind which it hides a ring; 1 is assumed, since no run in `data`
        tells
    unsure: the standard deviation of each, as a share; {} where nothing was fitted
    source: where they come from
    """

    products: float
    attention: float
    memory: float
    link: float
    kernel: float
    overlap: float = 1.0
    source: str = ""
    unsure: Mapping[str, float] = field(default_factory=dict)

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """Seconds per unit of each row of work [9]."""
        each = [1 / self.products, 1 / self.attention, 1 / self.memory, 1 / self.link, self.kernel]
        return np.array(each)[_PLACE]

    def of_work(self, rows: np.ndarray) -> Numbers:
        """Seconds of rows of work [9, …], or of the first of them."""
        each = self.seconds[: len(rows)]
        if rows.ndim == 1:
            return float(each @ rows)
        return (each @ rows.reshape(len(rows), -1)).reshape(rows.shape[1:])

    @classmethod
    def assumed(cls, device: Hardware) -> "Rates":
        """Usual shares of a data sheet, for a device of which no run is known."""
        peak = device.flops[device.half]
        sheet = (peak, peak, device.memory_bandwidth, device.link_bandwidth, 1)
        named: Any = dict(zip(NAMES, np.multiply(sheet, FRACTIONS).tolist(), strict=True))
        return cls(**named, source=f"usual shares of the data sheet of {device.name}, no run seen")

    @classmethod
    def of(cls, device: Hardware) -> "Rates":
        """Those of the device in data/hardware.csv, or `assumed` where it has peaks alone."""
        if min(device.reached.values()) == 1:
            return cls.assumed(device)
        return cls(
            products=device.rate(),
            attention=device.rate("attention"),
            memory=device.reached["memory"] * device.memory_bandwidth,
            link=device.inside.bandwidth,
            kernel=device.kernel,
            source=device.reached_source,
        )


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: of a model and a plan, its seconds, and the most gigabytes (GiB) that the
    first and the last stage had allocated, where that is known."""

    model: ModelConfig
    plan: Plan
    seconds: float
    name: str = ""
    peaks: tuple[float | None, float | None] = (None, None)


def measured() -> list[MeasuredStep]:
    """The runs of `data/measured_b200.csv`: Megatron-LM on eight B200."""
    found = []
    with open(DATA / "measured_b200.csv", newline="", encoding="utf-8") as text:
        for row in csv.DictReader(text):
            known = "llama-3.1-70b" if row["model"] == "llama3-70b" else "deepseek-v2"
            cut: dict = {"num_layers": int(row["layers"]), "seq_len": int(row["seq"])}
            degrees: dict = {axis: int(row[axis]) for axis in ("tp", "cp", "ep", "pp", "dp")}
            sizes: dict = {n: int(row[n]) for n in ("micro_batch", "micro_batches")}
            first, last = (
                float(cell) if (cell := row[f"peak_{which}_stage_gib"]) else None
                for which in ("first", "last")
            )
            model = replace(ModelConfig.named(known), **cut)
            plan = Plan(**degrees, **sizes, even=True)
            found.append(
                MeasuredStep(model, plan, float(row["step_ms"]) / 1e3, row["case"], (first, last))
            )
    return found


# ── the step ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CriticalPath:
    """The work on the critical path of a step [9, plans], by what it is for.

    busy: the slowest rank's micro-batches, forward and backward, without what is computed again
    again: what is computed again of them
    bubble: filling and draining the pipeline
    update: once a step: gradients, optimizer, weights
    beside: what is sent while the slowest rank computes: by ZeRO 2 and 3, and by a ring
    """

    busy: np.ndarray
    again: np.ndarray
    bubble: np.ndarray
    update: np.ndarray
    beside: np.ndarray

    def total(self, rates: Rates) -> Numbers:
        """Seconds of the step; of `beside` what the computing does not hide."""
        return rates.of_work(self.shown(rates))

    def shown(self, rates: Rates) -> np.ndarray:
        """The work whose seconds are the step's [9, plans]: of what is sent beside computing that
        which sticks out, in place of the computing that hides the rest."""
        own, cp, core = self.busy + self.again, WORK.index("cp"), WORK.index("attention")
        rows = own + self.bubble
        ring, rest = (1 * (seconds > 0) for seconds in self.exposed(rates))
        rows[core] -= ring * rates.overlap * rows[core]
        rows = rows + self.update
        rows[cp] += ring * self.beside[cp]
        rows[-2:] += rest * self.beside[-2:]  # of pp and dp
        return rows - rest * rates.overlap * own

    def exposed(self, rates: Rates) -> tuple[Numbers, Numbers]:
        """Seconds of a ring that its attention does not hide, and of all other messages that stick
        out of all computing."""
        _, ring, _, chunks, shards = rates.seconds[4] * self.beside[4:]  # in the order of `LINKS`
        core = rates.overlap * rates.seconds[1] * (self.busy + self.again + self.bubble)[1]
        computing = rates.overlap * rates.of_work(self.busy + self.again)
        return work.most(ring - core, 0.0), work.most(chunks + shards - computing, 0.0)

    def parts(self, rates: Rates) -> dict[str, Numbers]:
        """The same seconds: computing, what is sent and waited for on each axis, and the rest."""
        rows = (rates.seconds * (self.busy + self.update).T).T
        found = {"computing": rates.of_work(self.busy[:4])}
        found |= {f"{axis} exposed": rows[WORK.index(axis)] for axis in LINKS}
        for axis, seconds in zip(("cp", "dp"), self.exposed(rates), strict=True):
            found[f"{axis} exposed"] = found[f"{axis} exposed"] + seconds
        found["computed again"] = rates.of_work(self.again)
        found["bubble"] = rates.of_work(self.bubble)
        return found | {"optimizer": rates.of_work(self.update[:4])}


def critical_path(
    model: ModelConfig,
    p: Plan,
    rates: Rates,
    cluster: Cluster | None = None,
    at: stages.Place | None = None,
    stack: str = "megatron",
) -> CriticalPath:
    """The critical path of a plan, or of a column of plans, through the rank through which it is
    longest: that rank's micro-batches one after another, its waits for those behind it, and a pass
    of those before it.

    rates: seconds of a unit of each kind of work
    cluster: whose links between nodes slow what leaves a node; None: all is one node
    at: `stages.places` of the plan, if they are known
    stack: who recomputes: the course's code ends before the last product of a dense layer, or the
        last message of attention

    Invariant: `predict.time` for 1F1B and any `work.stage_layers`, where neither kernels nor what
    moves memory takes time, nothing hides (`overlap=0`), and links have no latency (0.02 %: what
    the course's code sums over tp for the loss and for norms). Of latency the formula knows none:
    here it is in the kernels, three for each collective. With 2 µs in a node and 5 between nodes,
    Llama-3.1-70B on 64 H100 with 4 to 64 micro-batches takes up to 2 % longer with pp, dp and tp
    (with one micro-batch and dp = 64 it is 6 %), 6 % with tp = 8 and cp = 4, 12 % with 8 of each.
    How much longer or shorter chunks make it is played (`_unequal`), to 0.2 %.
    """
    at, known = at or stages.places(model, p), work.shape(model)
    slow, far = _slowness(model, p, cluster)
    passes, hidden = _passes(model, p, slow, stack), 1 * ((p.chunks > 1) & p.modern)
    seconds = [None if row is None else rates.of_work(row) for row in passes["kinds"]]
    if work.some(passes["ring"][0] > 0):
        for i, (row, sent) in enumerate(zip(passes["kinds"][:4], passes["ring"], strict=False)):
            if row is not None:
                hides = rates.overlap * rates.seconds[1] * row[1]
                seconds[i] += work.most(rates.seconds[WORK.index("cp")] * sent - hides, 0.0)
    path, waits = _through(p, at, _spent(p, at, hidden, seconds))
    slowest = path.argmax(axis=0)
    mine, (first, last, ahead) = at.of_rank(slowest), (_of_rank(rows, slowest) for rows in waits)

    def along(kinds: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
        spent = _spent(p, mine, hidden, kinds)
        apart = spent.before + (first + last) * spent.behind
        return spent.own, apart - ahead * (first * spent.forward + last * spent.backward)

    own, apart = along(passes["kinds"])
    extra = _layers(mine.plain, mine.sparse, passes["again"])
    if work.some(looped := p.schedule == INTERLEAVED):
        each = known.num_plain, known.num_sparse
        apart = apart + _unequal(model, p, looped) * _layers(*each, passes["kinds"][:2])
    if work.some(split := (p.schedule == ZB_H1) & (p.micro_batches >= p.pp)):
        apart[0] -= 2 * passes["weights"] * (1 - 1 / p.pp) * split
    dense, expert = stages.held_weights(model, p, at)
    update = work.update(model, p, dense, expert, far) * slow[:, None]  # [9, ranks, plans]
    update = _of_rank(update.swapaxes(0, 1), rates.of_work(update).argmax(axis=0))
    held = _of_rank(dense + far * expert, slowest)
    m = p.micro_batches
    beside = m * work.sent_beside(model, p, held, hidden * 2 * p.chunks) * slow
    around = along(passes["ring"])
    beside[WORK.index("cp")] = m * around[0] + around[1]
    return CriticalPath(m * (own - extra), m * extra, apart, update, beside)


def _slowness(model: ModelConfig, p: Plan, cluster: Cluster | None) -> tuple[np.ndarray, Numbers]:
    """How many times longer a unit of each kind of work takes in a cluster [9, plans], and a byte
    between replicas of experts than between others."""
    slow = work.zeros(p.tp) + 1
    if cluster is None:
        return slow, 1
    times = cluster.slowness(p, work.ulysses(model, p))
    far = times.pop("edp") / times["dp"]
    for axis, longer in times.items():
        slow[WORK.index(axis)] = longer
    return slow, far


def _of_rank(rows: np.ndarray, which: Numbers) -> np.ndarray:
    """Of rows [ranks, …, plans] those of one rank of each plan."""
    if not which.shape:
        return rows[which]
    picked = which.reshape(*[1] * (rows.ndim - 1), -1)
    return np.take_along_axis(rows, picked, axis=0)[0]


class _Spent(NamedTuple):
    """Of a rank, seconds or rows of work: all its passes of a micro-batch; a pass of the ranks
    before it, and of those behind it; and the forward and backward pass of its last chunk."""

    own: Numbers
    before: Numbers
    behind: Numbers
    forward: Numbers
    backward: Numbers


def _spent(p: Plan, at: stages.Place, hidden: Numbers, kinds: Sequence[Numbers]) -> _Spent:
    """What passes of ranks take.

    hidden: 1 where chunks send while another computes
    kinds: what each kind of `_passes` takes
    """
    *each, start, head, send, F_start = kinds
    plain, sparse, F_plain, F_sparse = each
    shown, starts = 1 - hidden, at.first * (p.chunks == 1)
    before = 2 * at.rank - shown * (1 - at.first)
    behind = 2 * (p.pp - 1 - at.rank) - shown * (1 - at.last)
    sends = (2 * p.chunks - at.first - at.last) * shown
    ends = at.first * start + at.last * head
    own = _layers(at.plain, at.sparse, (plain, sparse)) + ends + sends * send
    chunk = _layers(at.own_plain, at.own_sparse, (plain, sparse)) + starts * start
    forward = _layers(at.own_plain, at.own_sparse, (F_plain, F_sparse)) + starts * F_start
    lead = _layers(at.before_plain, at.before_sparse, (plain, sparse)) + (1 - at.first) * start
    rest = _layers(at.behind_plain, at.behind_sparse, (plain, sparse)) + (1 - at.last) * head
    return _Spent(
        own=own,
        before=lead + before * send,
        behind=rest + behind * send,
        forward=forward + shown * send,
        backward=chunk - forward + (1 - starts) * shown * send,
    )


def _layers(plain: Numbers, sparse: Numbers, kinds: Sequence[Numbers]) -> Numbers:
    """What so many layers without and with experts take; None is of a kind that there is not."""
    one, other = kinds
    if other is None:
        return plain * one
    return sparse * other if one is None else plain * one + sparse * other


def _through(p: Plan, at: stages.Place, spent: _Spent) -> tuple[np.ndarray, tuple]:
    """Seconds of the path through each rank [ranks, plans], and its waits for those behind it.

    A rank of 1F1B, and of its chunks, has a few passes ahead of those behind it. It waits as long
    as a micro-batch is with them, less so many forward passes of its own when it begins, and less
    so many backward passes before it ends; once, where no pass lies between.
    """
    m, other = p.micro_batches, (p.schedule == GPIPE) | (p.schedule == ZB_H1)
    ahead = np.minimum(p.pp - 1 - at.rank, m - 1) * (1 - other)
    early, late = spent.behind - ahead * spent.forward, spent.behind - ahead * spent.backward
    twice = (m - 1 > ahead) & (other == 0)
    first = (early > 0) & (twice | (early >= late))
    last = (late > 0) & (twice | (late > early))
    path = m * spent.own + spent.before + first * early + last * late
    return path, (1 * first, 1 * last, ahead)


def _unequal(model: ModelConfig, p: Plan, looped: Numbers) -> Numbers:
    """Of plans that are `looped` what `_chunks_wait` says of each; 0 of others."""
    columns = p.pp, p.chunks, p.micro_batches, p.even
    if not isinstance(looped, np.ndarray):
        return _chunks_wait(model, *columns)
    found, where = work.each_once(
        functools.partial(_chunks_wait, model), [column * looped for column in columns]
    )
    return np.array(found)[where]


@functools.lru_cache(maxsize=4096)
def _chunks_wait(model: ModelConfig, pp: int, chunks: int, m: int, even: bool) -> float:
    """How much longer (or shorter, below 0) an interleaved schedule plays than the path says, since
    chunks of other ranks are longer or shorter than its own, or the head is: in passes of the whole
    model, forward and backward. Played are the first rounds, eight or PLAYED operations: behind
    them it grows evenly."""
    if pp < 2:  # also of plans that are not interleaved
        return 0.0
    if m <= (most := pp * max(8, PLAYED // (2 * pp * pp * chunks))):
        return _plays_longer(model, pp, chunks, m, even)
    few, more = (_plays_longer(model, pp, chunks, n, even) for n in (most - 2 * pp, most))
    return more + (m - most) / (2 * pp) * (more - few)


@functools.lru_cache(maxsize=4096)
def _plays_longer(model: ModelConfig, pp: int, chunks: int, m: int, even: bool) -> float:
    """The same, all of it played."""
    sizes = dict(pp=pp, micro_batches=m, chunks=chunks)
    p = Plan(**sizes, schedule=INTERLEAVED, even=bool(even))
    rows = _passes(model, p, np.ones(len(WORK)), "megatron")["kinds"]
    kinds = [0.0 if row is None else float(row[:2].sum()) for row in rows]  # FLOPs
    whole, forward, head = np.array(kinds[:2]), np.array(kinds[2:4]), kinds[5]
    layers = stages.rank_layers(model, pp, chunks, p.even).swapaxes(0, 1).reshape(-1, 2)
    F, B = layers @ forward, layers @ (whole - forward)
    F[-1], B[-1] = F[-1] + head / 3, B[-1] + 2 * head / 3
    times = schedule.Durations(F=F.tolist(), B=B.tolist(), W=0)
    played = schedule.simulate(schedule.interleaved(*sizes.values()), times).makespan
    path = _through(p, at := stages.places(model, p), _spent(p, at, 1, kinds))[0].max()
    return float(played - path) / float(layers.sum(axis=0) @ whole)


def _passes(model: ModelConfig, p: Plan, slow: np.ndarray, stack: str) -> dict:
    """Work by kind: of a layer without and one with experts, forward and backward, and forward; of
    the embedding, the head, a message, and forward of the embedding; and by these kinds the bytes
    round a ring. What is computed again of a layer of both kinds; FLOPs of all gradients of
    weights. None: there are no such layers."""
    known, split = work.shape(model), p.schedule == ZB_H1
    found: tuple[list, list, list] = [None, None], [None, None], [None, None]
    products, (a, g) = 0.0, (known.letters[letter] for letter in "ag")
    within = (a + 2 * g) / (2 * a + 2 * g)  # of what Ulysses sends: all but the output
    for i, count in enumerate((known.num_plain, known.num_sparse)):
        if not count:
            continue
        forward, backward = (part * slow for part in work.layer(model, p, bool(i)))
        again, core = forward * (p.recompute == 2), forward * (p.recompute == 1)
        again[1] += core[1]
        again[WORK.index("cp")] += core[WORK.index("cp")] * (within if stack == "course" else 1)
        if stack == "course" and not i:
            again -= work.last_product(model, p) * slow * (p.recompute == 2)
        both = forward + backward + again
        both[3] += split * work.KERNELS["layer"][0]  # gradients of weights are passes of their own
        for rows, row in zip(found, (both, forward, again), strict=True):
            rows[i] = row
        products = products + count * forward[0]
    start = [row * slow for row in work.embedding(model, p)]
    head, send = sum(work.head(model, p)) * slow, work.message(model, p) * slow
    kinds = [*found[0], *found[1], sum(start), head, send, start[0]]
    F, B = (sent * slow[WORK.index("cp")] for sent in work.sent_around(model, p, stack))
    ring = [F + B, F + B, F, F, 0, 0, 0, 0]
    return {"kinds": kinds, "ring": ring, "again": found[2], "weights": products + head[0] / 3}


# ── the fit ───────────────────────────────────────────────────────────────────────────────────────


def calibrate(
    runs: Sequence[MeasuredStep],
    device: Hardware,
    *,
    cluster: Cluster | None = None,
    prior: Rates | None = None,
    only: Iterable[str] = NAMES,
) -> Rates:
    """The rates under which the runs are likeliest, beginning with usual shares of the data sheet:
    log-normal priors, and steps that are measured to 2.5 %.

    device, cluster: on which they were measured
    prior: what to begin with instead
    only: the rates that are fitted; the others stay as they begin

    Without priors a few runs do not tell five numbers apart.
    """
    begin = prior or Rates.assumed(device)
    free = np.array([name in set(only) for name in NAMES])
    start = np.log([getattr(begin, name) for name in NAMES])
    place, unsure, rates = start.copy(), np.array(UNSURE), begin
    for _ in range(20):
        slopes, misses = [], []
        for run in runs:
            seconds, shares = _shares(run, rates, cluster)
            slopes.append(shares / NOISE)
            misses.append(math.log(run.seconds / seconds) / NOISE)
        A = np.vstack([np.array(slopes).reshape(-1, len(NAMES)), np.diag(1 / unsure)])[:, free]
        b = np.concatenate([misses, (start - place) / unsure])
        move = np.linalg.lstsq(A, b, rcond=None)[0]
        place[free] += move
        rates = replace(begin, **dict(zip(NAMES, np.exp(place).tolist(), strict=True)))
        if np.abs(move).max() < 1e-9:
            break
    spread = np.zeros(len(NAMES))
    spread[free] = np.sqrt(np.diag(np.linalg.inv(A.T @ A)))
    source = f"fitted to {len(runs)} runs of {device.name}"
    return replace(rates, source=source, unsure=dict(zip(NAMES, spread.tolist(), strict=True)))


def work_of(run: MeasuredStep, rates: Rates) -> np.ndarray:
    """The work on the critical path of a run in the order of `NAMES` [5]: FLOPs of products and of
    attention, bytes moved and sent, kernels."""
    rows = critical_path(run.model, run.plan, rates).shown(rates)
    return np.bincount(_PLACE, rows, len(NAMES))


def fit_rates(work_: Any, seconds: Any, usual: Any, unsure: Any = UNSURE) -> np.ndarray:
    """Seconds that a unit of each kind of work takes [kinds], from work_ [runs, kinds] and the
    seconds [runs] of some runs: the most likely, if a run is measured to 2.5 % and the `usual`
    seconds are right to the share `unsure`.

    Least squares: a row for each run, and one for each usual number, each over its error.

    Invariant: `calibrate` does the same with logarithms, and works the path out anew.
    """
    begin, spread = np.asarray(usual), 1 / np.asarray(unsure)
    told = np.asarray(work_) * begin / np.asarray(seconds)[:, None]  # shares of each run's time
    A = np.vstack([told / NOISE, np.diag(spread)])
    b = np.concatenate([np.full(len(told), 1 / NOISE), spread])
    return begin * np.linalg.lstsq(A, b, rcond=None)[0]


def _shares(run: MeasuredStep, rates: Rates, cluster: Cluster | None) -> tuple[float, np.ndarray]:
    """Seconds of a run's step, and by how much of them they change with the logarithm of a rate."""
    path = critical_path(run.model, run.plan, rates, cluster)
    each = rates.seconds * path.shown(rates)
    seconds = float(each.sum())
    shares = np.bincount(_PLACE, each / seconds, len(NAMES)) * [-1, -1, -1, -1, 1]
    return seconds, shares


def which_runs(
    runs: Sequence[MeasuredStep], device: Hardware, n: int = 5
) -> tuple[MeasuredStep, ...]:
    """The n runs to make: those which leave the least doubt about the steps of all of them.

    What a run would tell is known before it is made, since only its work counts: seconds need not
    be known. Doubt is the mean variance of the predicted steps (an A-optimal design).
    """
    rates = Rates.assumed(device)
    told = np.array([_shares(run, rates, None)[1] for run in runs])
    begin = np.diag(1 / np.square(UNSURE))
    each = told[:, :, None] * told[:, None] / NOISE**2
    chosen = np.array(list(itertools.combinations(range(len(runs)), n)))
    left = np.linalg.inv(begin + each[chosen].sum(axis=1))
    doubt = np.einsum("ri,cij,rj->c", told, left, told)
    return tuple(runs[i] for i in chosen[doubt.argmin()])


def residuals(
    runs: Iterable[MeasuredStep], rates: Rates, cluster: Cluster | None = None
) -> np.ndarray:
    """(predicted − measured) / measured, of each run."""
    return np.array([_shares(run, rates, cluster)[0] / run.seconds - 1 for run in runs])
