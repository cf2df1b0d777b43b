"""Right answers to the exercises of `planner`, in other styles than the reference."""

import math
from fractions import Fraction

import numpy as np
import torch

from labutils.planner import climb, plans
from labutils.planner.work import Plan


def _written_out(plan, layers, weights, tokens, kept):
    most = 0.0
    for i in range(plan.pp):
        mine = weights["layer"] * layers[i]
        if i == 0:
            mine += weights["embedding"]
        if i == plan.pp - 1:
            mine += weights["head"]
        busy = plan.pp - i if plan.pp - i < plan.micro_batches else plan.micro_batches
        here = busy * layers[i] * kept * tokens // (plan.cp * plan.tp)
        most = max(most, 6 * mine / plan.tp + 12 * mine / plan.tp / plan.replicas + here)
    return most


def _columns(plan, layers, weights, tokens, kept):
    layers, stage = np.array(layers), np.arange(plan.pp)
    mine = layers * weights["layer"]
    mine[0] += weights["embedding"]
    mine[-1] += weights["head"]
    busy = np.minimum(plan.pp - stage, plan.micro_batches)
    states = mine / plan.tp * (6 + 12 / (plan.dp * plan.cp))
    return (states + busy * layers * kept * (tokens / plan.cp / plan.tp)).max()


def _rounded_up(plan, layers, weights, tokens, kept):
    def stage(i, count):
        ends = (i == 0) * weights["embedding"] + (i == plan.pp - 1) * weights["head"]
        mine = (count * weights["layer"] + ends) / plan.tp
        busy = min(plan.pp - i, plan.micro_batches)
        return (
            mine * 6 + mine * 12 / plan.replicas + busy * count * kept * tokens / plan.cp / plan.tp
        )

    return math.ceil(max(stage(i, count) for i, count in enumerate(layers)))


def _backwards(plan, layers, weights, tokens, kept):
    """From the last stage on: it holds one micro-batch, each before it one more."""
    share, found, rank = 6 + 12 / plan.replicas, [], 1
    for count in reversed(layers):
        mine = count * weights["layer"] + (weights["head"] if rank == 1 else 0)
        mine += weights["embedding"] if rank == plan.pp else 0
        busy = min(rank, plan.micro_batches)
        local = tokens / (plan.cp * plan.tp)
        found.append(share * mine / plan.tp + busy * count * kept * local)
        rank += 1
    return sorted(found)[-1]


def _fractions(plan, layers, weights, tokens, kept):
    """Exact, of a generator."""

    def stages():
        for i, count in enumerate(layers):
            ends = weights["embedding"] * (not i) + weights["head"] * (i + 1 == len(layers))
            mine = Fraction(count * weights["layer"] + ends, plan.tp)
            busy = min(len(layers) - i, plan.micro_batches)
            yield mine * (6 + Fraction(12, plan.replicas)) + Fraction(
                busy * count * kept * tokens, plan.cp * plan.tp
            )

    return max(stages())


def _tensors(plan, layers, weights, tokens, kept):
    count = torch.tensor(layers, dtype=torch.float64)
    mine = count * weights["layer"]
    mine[0] += weights["embedding"]
    mine[-1] += weights["head"]
    busy = torch.arange(plan.pp, 0, -1).clamp(max=plan.micro_batches)
    local = kept * tokens / (plan.cp * plan.tp)
    return (mine / plan.tp * (6 + 12 / plan.replicas) + busy * count * local).max()


def _stage_by_stage(plan, layers, weights, tokens, kept, i=0):
    """The fullest of stage i and of those behind it."""
    if i == plan.pp:
        return 0
    mine = layers[i] * weights["layer"]
    if i == 0:
        mine += weights["embedding"]
    if i == plan.pp - 1:
        mine += weights["head"]
    held = mine * (6 + 12 / plan.dp / plan.cp) / plan.tp
    held += min(plan.pp - i, plan.micro_batches) * layers[i] * kept * tokens / plan.cp / plan.tp
    return max(held, _stage_by_stage(plan, layers, weights, tokens, kept, i + 1))


def _normal(work, seconds, usual, unsure):
    told = work * usual / (0.025 * seconds)[:, None]
    left = told.T @ told + np.diag(unsure**-2.0)
    return usual * np.linalg.solve(left, told.sum(axis=0) / 0.025 + unsure**-2.0)


def _kalman(work, seconds, usual, unsure):
    """One run after the other, each moves what is known."""
    x, P = np.ones(len(usual)), np.diag(unsure**2.0)
    for row, t in zip(work, seconds, strict=True):
        h = row * usual / t
        gain = P @ h / (h @ P @ h + 0.025**2)
        x, P = x + gain * (1 - h @ x), P - np.outer(gain, h @ P)
    return usual * x


def _descent(work, seconds, usual, unsure):
    """Coordinate by coordinate, from the usual numbers."""
    told, x = work * usual / seconds[:, None] / 0.025, np.ones(len(usual))
    goal = np.full(len(told), 40.0)
    for _ in range(20000):
        before = x.copy()
        for k in range(len(x)):
            rest = goal - told @ x + told[:, k] * x[k]
            x[k] = (told[:, k] @ rest + unsure[k] ** -2) / (
                told[:, k] @ told[:, k] + unsure[k] ** -2
            )
        if abs(x - before).max() < 1e-10:
            break
    return (usual * x).tolist()


def _dual(work, seconds, usual, unsure):
    """The usual numbers, and what the runs add to them."""
    K = np.diag((unsure * usual) ** 2)
    cov = work @ K @ work.T + np.diag((0.025 * seconds) ** 2)
    return usual + K @ work.T @ np.linalg.solve(cov, seconds - work @ usual)


def _triangle(work, seconds, usual, unsure):
    """By a QR factorization of all rows."""
    rows = np.vstack([work * usual / seconds[:, None] / 0.025, np.diag(1 / unsure)])
    Q, R = np.linalg.qr(rows)
    return usual * np.linalg.solve(R, Q.T @ np.r_[np.full(len(seconds), 40.0), 1 / unsure])


def _row_by_row(work, seconds, usual, unsure):
    rows, told = [], []
    for row, t in zip(work, seconds, strict=True):
        rows.append([row[k] * usual[k] / (0.025 * t) for k in range(5)])
        told.append(1 / 0.025)
    for k in range(5):
        rows.append([float(j == k) / unsure[k] for j in range(5)])
        told.append(1 / unsure[k])
    x, *_ = np.linalg.lstsq(rows, told, rcond=None)
    return [float(each * u) for each, u in zip(x, usual, strict=True)]


def _as_they_are(work, seconds, usual, unsure):
    """Rows in seconds per unit, of whatever size."""
    rows = np.vstack([work / (0.025 * seconds)[:, None], np.diag(1 / (unsure * usual))])
    told = np.concatenate([seconds / (0.025 * seconds), usual / (unsure * usual)])
    return np.linalg.lstsq(rows, told)[0]


def _logarithms(work, seconds, usual, unsure):
    """Shares as factors, as `calibrate` takes them: Gauss and Newton."""
    x = np.zeros(len(usual))
    for _ in range(50):
        each = work * usual * np.exp(x)
        takes = each.sum(axis=1)
        rows = np.vstack([each / takes[:, None] / 0.025, np.diag(1 / unsure)])
        misses = np.r_[np.log(seconds / takes) / 0.025, -x / unsure]
        x = x + 0.7 * np.linalg.lstsq(rows, misses, rcond=None)[0]
    return usual * np.exp(x)


def _by_gradients(work, seconds, usual, unsure):
    """L-BFGS on the sum of squares; the answer still has its history."""
    rows = np.vstack([work * usual / seconds[:, None] / 0.025, np.diag(1 / unsure)])
    told = torch.tensor(np.r_[np.full(len(seconds), 40.0), 1 / unsure])
    rows, x = torch.tensor(rows), torch.ones(5, dtype=torch.float64, requires_grad=True)
    options = dict(max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14)
    optimizer = torch.optim.LBFGS([x], line_search_fn="strong_wolfe", **options)

    def closure():
        optimizer.zero_grad()
        loss = (rows @ x - told).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return x * torch.tensor(usual)


BY_HAND = {
    "llama-3.1-8b": Plan(dp=2, cp=16, micro_batches=32, zero=3),
    "llama-3.1-70b": Plan(dp=128, tp=2, cp=2, micro_batches=4, zero=3),
    "mixtral-8x7b": Plan(dp=32, cp=2, ep=8, micro_batches=16, zero=2),
}


def _by_hand(job, ask):
    return BY_HAND[job.model.name]


def _one_start(job, ask):
    """Nothing computed again; experts over eight ranks, where there are any."""
    start = climb.start_of(job, **({"ep": 8} if job.model.num_experts > 1 else {}))
    return climb.climb(job, ask, start, (0,))[-1]


def _questions(job, ask):
    """The estimate of a grid of meshes without recomputation, and a few levels of ZeRO."""
    found = []
    for tp in (1, 2):
        for cp in (1, 2, 16):
            for zero in (2, 3):
                ep = 8 if job.model.num_experts > 1 and zero < 3 else 1
                dp = job.cluster.gpus // tp // cp
                plan = climb.completed(job, Plan(dp=dp, tp=tp, cp=cp, ep=ep, zero=zero))
                if not plans.illegal(job, plan):
                    found.append(ask(plan))
    return min((each for each in found if each.fits), key=lambda each: each.seconds)


def _estimate(job, ask):
    """What `ask` said of the plan, and not the plan."""
    return ask(BY_HAND[job.model.name])


def _two_at_a_time(job, ask):
    """The two best of all neighbours, nine times."""
    front = [climb.start_of(job)]
    if job.model.num_experts > 1:
        front.append(climb.start_of(job, ep=8))
    for _ in range(9):
        near = (p for plan in front for p in climb.changes(job, plan) if not p.recompute)
        front = sorted({*front, *near}, key=lambda plan: climb.better(ask(plan)))[:2]
    return front[0]


def _dearer(job, ask):
    """Seconds, and a price for each byte too many that goes up."""
    plan = climb.start_of(job, **({"ep": 8} if job.model.num_experts > 1 else {}))
    for price in (0.05, 0.5, 5, 50):

        def cost(other, price=price):
            short = max(0, -ask(other).headroom) / job.cluster.room
            return ask(other).seconds * (1 + price * short)

        while True:
            near = [p for p in climb.changes(job, plan) if not p.recompute]
            best = min([plan, *near], key=cost)
            if best == plan:
                break
            plan = best
    return plan


def _annealed(job, ask):
    """Random changes from the plain start, fewer and fewer for the worse; then a climb."""
    rng = np.random.default_rng(1)
    plan = climb.start_of(job, **({"ep": 8} if job.model.num_experts > 1 else {}))
    for turn in range(60):
        near = [p for p in climb.changes(job, plan) if not p.recompute]
        other = near[rng.integers(len(near))]
        worse = climb.better(ask(other)) > climb.better(ask(plan))
        if not worse or rng.random() < 0.2 * (1 - turn / 60):
            plan = other
    return climb.climb(job, ask, plan, (0,))[-1]


RIGHT = {
    "planner/fullest": {
        "written out": _written_out,
        "columns": _columns,
        "rounded up": _rounded_up,
        "from the last stage": _backwards,
        "in fractions": _fractions,
        "in tensors": _tensors,
        "stage by stage": _stage_by_stage,
    },
    "planner/fit": {
        "normal equations": _normal,
        "one run after the other": _kalman,
        "by coordinates": _descent,
        "the dual": _dual,
        "a triangle": _triangle,
        "row by row": _row_by_row,
        "as they are": _as_they_are,
        "in logarithms": _logarithms,
        "by gradients": _by_gradients,
    },
    "planner/exam": {
        "by hand": _by_hand,
        "one good start": _one_start,
        "a grid": _questions,
        "random changes": _annealed,
        "an estimate": _estimate,
        "two at a time": _two_at_a_time,
        "dearer and dearer": _dearer,
    },
}
