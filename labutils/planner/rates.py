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
from typing import Any

import numpy as np

from labutils.config import DATA, Hardware, ModelConfig
from labutils.planner import stages, work
from labutils.planner.cluster import Cluster
from labutils.planner.work import LINKS, WORK, ZB_H1, Numbers, Plan

NAMES = ("products", "attention", "memory", "link", "kernel")
# What training reaches of a data sheet, and seconds of a kernel, before a run is seen; and how far
# off that may be (standard deviations of the logarithm).
FRACTIONS = (0.55, 0.45, 0.65, 0.55, 10e-6)
UNSURE = (0.25, 0.25, 0.25, 0.25, 0.70)
NOISE = 0.025  # of a measured step
_PLACE = [0, 1, 2, 4, *[3] * len(LINKS)]  # of the rate for each row of work


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches in training with one software stack.

    products, attention: FLOP/s of large matrix products, and of fused causal attention
    memory, link: B/s of memory-bound kernels, and of collectives within a node
    kernel: seconds that each kernel takes beside that
    overlap: the share of its computing behind which a rank hides what ZeRO 2 and 3 and its chunks
        send; 1 is assumed, since no run in `data` tells
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
        flat = self.seconds[: len(rows)] @ rows.reshape(len(rows), -1)
        return flat.reshape(rows.shape[1:])

    @classmethod
    def assumed(cls, device: Hardware) -> "Rates":
        """Usual shares of a data sheet, for a device of which no run is known."""
        peak = max(device.flops.get(name, 0) for name in ("bf16", "fp16"))
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


def measured(path: str = "measured_b200.csv") -> list[MeasuredStep]:
    """The runs of a table in `data`: Megatron-LM on eight B200."""
    found = []
    with open(DATA / path, newline="", encoding="utf-8") as text:
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
        own = self.busy + self.again
        rows = own + self.bubble + self.update
        ring, rest = (1 * (seconds > 0) for seconds in self.exposed(rates))
        rows[WORK.index("cp")] += ring * self.beside[WORK.index("cp")]
        rows[WORK.index("attention")] -= ring * own[WORK.index("attention")]
        rows[-2:] += rest * self.beside[-2:]  # of pp and dp
        return rows - rest * rates.overlap * own

    def exposed(self, rates: Rates) -> tuple[Numbers, Numbers]:
        """Seconds of a ring that its attention does not hide, and of all other messages that stick
        out of all computing."""
        _, ring, _, chunks, shards = rates.seconds[4] * self.beside[4:]  # in the order of `LINKS`
        attention = rates.seconds[1] * (self.busy[1] + self.again[1])
        computing = rates.overlap * rates.of_work(self.busy + self.again)
        return work.most(ring - attention, 0.0), work.most(chunks + shards - computing, 0.0)

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
) -> CriticalPath:
    """The critical path of a plan, or of a column of plans: the slowest rank's micro-batches one
    after another, and once the passes of all other ranks (of their v-th part, where a rank has v
    chunks; of what is not a gradient of weights, in ZB-H1).

    cluster: whose links between nodes slow what leaves a node; None: all is one node

    Invariant: the closed form of `predict.time` for 1F1B in equal stages, where neither kernels nor
    what moves memory takes time.
    """
    at = at or stages.places(model, p)
    slow = work.zeros(p.tp) + 1
    if cluster is not None:
        for axis, times in cluster.slowness(p, work.ulysses(model, p)).items():
            slow[WORK.index(axis)] = times
    passes = _passes(model, p, slow)
    (plain, sparse), ends = passes["layers"], passes["ends"]
    send = work.message(model, p) * slow
    hidden = (p.chunks > 1) & p.modern  # chunks send while another computes
    kinds = np.array([plain["both"], sparse["both"], *ends, send]).swapaxes(0, 1)  # [9, 5, plans]
    sends = (2 * p.chunks - at.first - at.last) * (1 - hidden)
    counts = np.array([at.plain, at.sparse, at.first, at.last, sends]).swapaxes(0, 1)
    slowest = (counts * rates.of_work(kinds)).sum(axis=1).argmax(axis=0)  # of [ranks, 5, plans]
    mine = _of_rank(counts, slowest)
    longest = (kinds * mine).sum(axis=1)
    extra = mine[0] * plain["again"] + mine[1] * sparse["again"]
    others = np.maximum(passes["all"] + 2 * (p.pp * p.chunks - 1) * send - longest, 0)
    apart = others / p.chunks
    if work.some(split := (p.schedule == ZB_H1) & (p.micro_batches >= p.pp)):
        apart[0] -= 2 * passes["weights"] * (1 - 1 / p.pp) * split
    dense, expert = stages.held_weights(model, p, at)
    update = work.update(model, p, dense, expert) * slow[:, None]  # [9, ranks, plans]
    update = _of_rank(update.swapaxes(0, 1), rates.of_work(update).argmax(axis=0))
    held = _of_rank(dense + expert, slowest)
    beside = work.sent_beside(model, p, held, mine[0] + mine[1], hidden * 2 * p.chunks) * slow
    m = p.micro_batches
    return CriticalPath(m * (longest - extra), m * extra, apart * (p.pp > 1), update, m * beside)


def _of_rank(rows: np.ndarray, which: Numbers) -> np.ndarray:
    """Of rows [ranks, …, plans] those of one rank of each plan."""
    if not which.shape:
        return rows[which]
    picked = which.reshape(*[1] * (rows.ndim - 1), -1)
    return np.take_along_axis(rows, picked, axis=0)[0]


def _passes(model: ModelConfig, p: Plan, slow: np.ndarray) -> dict:
    """Work of layers of both kinds, of embedding and head, and of all together; FLOPs of all
    gradients of weights."""
    known, split = work.shape(model), p.schedule == ZB_H1
    kinds, everything, products = [], 0.0, 0.0
    none = np.zeros_like(slow)
    for experts, count in ((False, known.num_plain), (True, known.num_sparse)):
        if not count:
            kinds.append({"both": none, "again": none})
            continue
        forward, backward = (part * slow for part in work.layer(model, p, experts))
        again = forward * (p.recompute == 2)
        again[1] += forward[1] * (p.recompute == 1)
        both = forward + backward + again
        both[3] += split * work.KERNELS["layer"][0]  # gradients of weights are passes of their own
        kinds.append({"both": both, "again": again})
        everything, products = everything + count * both, products + count * forward[0]
    ends = [sum(pair) * slow for pair in (work.embedding(model, p), work.head(model, p))]
    gradients = products + ends[1][0] / 3
    return {"layers": kinds, "ends": ends, "all": everything + sum(ends), "weights": gradients}


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
    """Seconds that a unit of each kind of work takes [kinds], from the work [runs, kinds] and the
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
