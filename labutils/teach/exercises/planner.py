"""Repair an estimate of memory, fit five rates to five runs, and plan three trainings."""

import functools
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from labutils import planner, units
from labutils.config import Hardware, ModelConfig
from labutils.planner import climb, plans, rates
from labutils.planner.plans import TIE, Estimate, Found, Job
from labutils.planner.work import Plan
from labutils.teach.exercises import Exercise, Failed, Property

# ── the fullest rank ─────────────────────────────────────────────────────────────────────────────


class _Case(NamedTuple):
    """A pipeline, as the estimate is told of it."""

    plan: Plan
    layers: Sequence[int]
    weights: Mapping[str, int]
    tokens: int
    kept: int

    @property
    def name(self) -> str:
        sizes = ("pp", "dp", "cp", "tp", "micro_batch", "micro_batches")
        said = ", ".join(f"{n}={getattr(self.plan, n)}" for n in sizes if getattr(self.plan, n) > 1)
        return f"{said or 'one rank'}, layers {list(self.layers)}"


def fullest(
    plan: Plan, layers: Sequence[int], weights: Mapping[str, int], tokens: int, kept: int
) -> float:
    """Bytes of states and kept activations on the fullest rank under 1F1B with ZeRO-1."""
    return max(_held(_Case(plan, layers, weights, tokens, kept)))


def _held(case: _Case, slip: str = "") -> list[float]:
    """Bytes of each stage, or with a slip."""
    plan, layers, weights, tokens, kept = case
    p, cp = plan.pp, 1 if slip == "cp" else plan.cp
    sharing = plan.dp * (1 if slip in ("cp", "optimizer") else plan.cp)
    sharing *= {"over tp": plan.tp, "over pp": p}.get(slip, 1)
    found = []
    for i, count in enumerate(layers):
        first, last = (weights[name] for name in ("embedding", "head"))
        if slip == "swapped":
            first, last = last, first
        ends = first * (i == 0) + last * (i == p - 1)
        if slip in ("ends", "one end"):
            ends = first if slip == "one end" and p == 1 else 0
        mine = count * weights["layer"] + ends
        busy = min(p - i, plan.micro_batches)
        m, most = plan.micro_batches, min(p, plan.micro_batches)
        others = {"all": m, "once": 1, "p - i": p - i, "turned": min(i + 1, m)}
        others |= {"first's": most, "m - i": max(most - i, 1)}
        others |= {
            f"p - i {by:+}": min(max(p - i + by, 0), m) for by in (-1, 1)
        }
        busy = others.get(slip, busy)
        mine /= plan.cp if slip == "weights" else 1
        states = mine / plan.tp * (2 + 4 + 12 / sharing)
        busy *= plan.micro_batch if slip == "sequences" else 1
        found.append(states + busy * count * kept * tokens / cp / (1 if slip == "sp" else plan.tp))
    return [found[0]] if slip == "first" else found


def _apart(case: _Case) -> float:
    """Bytes of the most states, and of the most activations, of whichever stages."""
    states = max(_held(case._replace(kept=0)))
    return states + max(_held(case._replace(weights=dict.fromkeys(case.weights, 0))))


_WHY = {
    "cp": "A rank of cp has tokens / cp of them, and its copies share the optimizer: dp · cp.",
    "optimizer": "ZeRO-1 shares the optimizer over all ranks that hold the same weights: dp · cp.",
    "over tp": "Ranks of tp hold other weights: only those of dp · cp share an optimizer.",
    "over pp": "Ranks of a pipeline hold other weights: only those of dp · cp share an optimizer.",
    "weights": "cp divides tokens, and not weights: each of its ranks has all of them.",
    "sp": "Activations are divided by tp, too: a rank keeps those of tokens / (cp · tp).",
    "one end": "A stage that is the first and the last has both, the embedding and the head.",
    "swapped": "The first stage has the embedding, and it is the last one that has the head.",
    "ends": "The first stage has the embedding, the last one the head, beside their layers.",
    "all": "1F1B starts a backward pass as soon as it can: stage i holds p − i micro-batches.",
    "m - i": "With m < p the first stages all hold m: it is min(p − i, m), and not min(p, m) − i.",
    "once": "Stage i holds p − i micro-batches at once, and not one.",
    "p - i": "There are m micro-batches: no stage can hold more.",
    "first's": "Only the first stage must hold min(p, m) micro-batches: stage i, min(p − i, m).",
    "sequences": "`tokens` are those of a whole micro-batch, of all its sequences.",
    "p - i -1": "Stages are counted from 0: the last one, i = p − 1, holds one micro-batch.",
    "p - i +1": "Stages are counted from 0: the last one, i = p − 1, holds one micro-batch.",
    "turned": "It is the first stage that waits longest, and holds p: stage i holds p − i.",
    "first": "The first stage holds most micro-batches; another may have more layers, or a head.",
}
_SIZES = {"layer": 800_000, "embedding": 6_000_000, "head": 6_000_000}


def _case(layers: Sequence[int], m: int = 16, head: int = 6_000_000, **degrees: int) -> _Case:
    plan = Plan(pp=len(layers), micro_batches=m, **degrees)
    return _Case(plan, tuple(layers), _SIZES | {"head": head}, 4096, 2000)


def _compared(attempt: Callable, cases: Sequence[_Case], hint: str) -> str:
    for case in cases:
        held = _held(case)
        right, answer = max(held), attempt(*case._replace(weights=dict(case.weights)))
        try:
            found = float(answer)
        except (TypeError, ValueError):
            said = "Return one number, the bytes of the fullest rank."
            raise Failed(f"{case.name}: you returned {answer!r}", said) from None
        if abs(found - right) <= 1e-6 * right + 1:
            continue
        why = next((_WHY[s] for s in _WHY if abs(found - max(_held(case, s))) < 1e-6 * right), "")
        if why == _WHY["once"] and abs(found - held[-1]) < 1e-6 * right:
            why += " Or is this the last stage's? It need not be the fullest."
        if not why and abs(found - _apart(case)) < 1e-6 * right:
            why = "States of one stage and activations of another: no rank holds both."
        if abs(found - sum(held) / len(held)) < 1e-6 * right and len(set(held)) > 1:
            why = (
                "That is the mean of the stages. The step ends where the fullest one does not fit."
            )
        said = units.text(round(found)) if abs(found) >= 1000 else f"{found:.3g} B"
        what = f"{said} instead of {units.text(round(right))}"
        if said == units.text(round(right)):
            what = f"off by {found - right:+,.0f} B"
        raise Failed(f"{case.name}: {what}", why or hint)
    return f"{len(cases)} meshes"


_FULLEST = (
    (
        "one stage",
        (_case([12]), _case([12], dp=4), _case([12], tp=2, dp=2), _case([12], micro_batch=2)),
        "Weights 2 B, gradients 4 B, and 12 B shared over the copies; activations as kept.",
    ),
    ("context parallelism", (_case([12], cp=4), _case([12], cp=2, dp=4, tp=2)), _WHY["cp"]),
    (
        "the fullest stage",
        (_case([4, 4, 4, 4]), _case([4, 4, 4, 4], dp=2, cp=2), _case([3] * 8, m=8, tp=2)),
        "Work the stages out one by one, each with its own layers and micro-batches, and take the "
        "largest.",
    ),
    (
        "uneven stages",
        (
            _case([2, 8, 3, 3]), _case([1, 1, 1, 12]), _case([5, 4, 4, 3], dp=2),
            _case([4, 4, 4, 4], head=90_000_000),
        ),
        _WHY["first"],
    ),
    (
        "fewer micro-batches than stages",
        (_case([4] * 4, m=2), _case([2] * 8, m=1), _case([2, 8, 3, 3], m=2)),
        _WHY["p - i"],
    ),
)  # fmt: skip

FULLEST = Exercise(
    id="planner/fullest",
    untouched="dbc7178d",
    reference=fullest,
    properties=tuple(
        Property(name, _compared, cases=cases, hint=hint)
        for name, cases, hint in _FULLEST
    ),
    hints=(
        "Four things of a rank are its own: its layers, embedding or head, the micro-batches that "
        "it holds at once, and its part of the tokens. A mean knows none of them.",
        "for i, count in enumerate(layers): stage i holds min(p − i, m) micro-batches; the first "
        "has the embedding, the last the head.",
        "tokens / (cp · tp) of each micro-batch, and 12 / (dp · cp) for the optimizer. Return the "
        "largest of the stages.",
    ),
)

# ── five rates ───────────────────────────────────────────────────────────────────────────────────

_UNSURE = np.array(rates.UNSURE)
_KINDS = ("products", "attention", "memory", "sent", "kernels")


@functools.cache
def _measured() -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Work [22, 5] and seconds [22] of the measured runs, the usual seconds per unit [5], and the
    places of the five runs that tell most."""
    device, runs = Hardware.named("B200"), planner.measured()
    begin = rates.Rates.assumed(device)
    chosen = [runs.index(run) for run in planner.which_runs(runs, device)]
    done = np.array([rates.work_of(run, begin) for run in runs])
    usual = np.array([*(1 / getattr(begin, name) for name in rates.NAMES[:4]), begin.kernel])
    return done, np.array([run.seconds for run in runs]), usual, chosen


def _fitted(attempt: Callable, done: Any, seconds: Any, usual: Any, case: str) -> np.ndarray:
    names, right = ("work", "seconds", "usual", "unsure"), (done, seconds, usual, _UNSURE)
    given = [np.array(each) for each in right]
    try:
        answer = attempt(*given)
        answer = answer.detach().numpy() if isinstance(answer, Tensor) else answer
        found = np.array(answer, dtype=float)
    except np.linalg.LinAlgError as error:  # a ValueError, too
        told = "These runs alone do not tell five numbers apart. What is known beside them?"
        raise Failed(f"{case}: {error}", told) from None
    except (TypeError, ValueError) as error:
        raise Failed(f"{case}: {error}", "Return five numbers: seconds per unit of work.") from None
    for name, before, after in zip(names, right, given, strict=True):
        if not np.array_equal(before, after):
            hint = "The caller fits them again with other runs: divide into arrays of your own."
            raise Failed(f"{case}: {name} is changed in place", hint)
    if found.shape != (5,):
        shape = f"{case}: you returned an array of shape {list(found.shape)}, not [5]"
        raise Failed(shape, "Seconds per unit of each kind of work, as `usual` has them.")
    if not (found > 0).all():
        kind = _KINDS[int(np.argmin(found > 0))]
        raise Failed(
            f"{case}: {found[_KINDS.index(kind)]:.3g} s per unit of {kind}",
            "Work takes time. These runs alone do not tell five numbers apart: add a row for each "
            "usual number, over its error, unsure · usual, beside each run's over 2.5 % of its "
            "seconds.",
        )
    if (usual[0] < 1e-9) and 0.01 < np.median(found) < 100:
        said = "Multiply by `usual` in the end: seconds per unit of work are asked for."
        raise Failed(f"{case}: these are multiples of the usual numbers", said)
    if np.median(found / usual) > 1e6:
        raise Failed(f"{case}: these are units per second", "Return seconds per unit of work.")
    return found


def _mean_off(found: np.ndarray, done: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.abs(done @ found / seconds - 1).mean())


def _told(attempt: Callable) -> str:
    done, _, usual, _ = _measured()
    for factors in ((1.2, 0.9, 1.3, 0.8, 1.7), (0.8, 1.1, 0.9, 1.2, 0.7)):
        seconds = done @ (usual * factors)
        found = _fitted(attempt, done, seconds, usual, "22 runs without errors")
        off = _mean_off(found, done, seconds)
        if off > 0.01:
            raise Failed(
                f"22 runs without errors: their seconds come out {100 * off:.2g} % wrong",
                "A row for each run: its work, over its seconds, over the error of 2.5 %. The rows "
                "of the usual numbers are over `unsure`, so that many runs outweigh them.",
            )
    return "22 runs"


def _untold(attempt: Callable) -> str:
    done, seconds, usual, chosen = _measured()
    for kind in (3, 2):
        less = done[chosen].copy()
        less[:, kind] = 0
        found = _fitted(attempt, less, seconds[chosen], usual, f"runs without {_KINDS[kind]}")
        factor = found[kind] / usual[kind]
        if abs(factor - 1) > 0.02:
            raise Failed(
                f"runs without {_KINDS[kind]}: {factor:.3g} times the usual seconds per unit",
                "No run tells of it, so what is usual is all that is known: keep that.",
            )
    done, usual = np.array([[1.0, 0, 0, 0, 0]]), np.ones(5)
    found = _fitted(attempt, done, [2.0], usual, "one run, all products, twice as long as usual")
    if not 1.9 < found[0] < 1.995:  # 1.96 to the letter, 1.986 in logarithms
        raise Failed(
            f"one run, all products, twice as long as usual: {found[0]:.3g} times the usual",
            "The run is known to 2.5 %, the usual number to 25 %: the answer is near the run's 2, "
            "and a little on the usual side. Is each row over its own error, 2.5 % and `unsure`?",
        )
    done = np.array([[1.0, 0, 0, 0, 1.0]] * 3)
    found = _fitted(attempt, done, [3.0] * 3, usual, "products and kernels always together")
    first, last = found[0], found[4]
    if not 0.65 < last - first < 0.94:  # 0.77 to the letter, 0.91 in logarithms
        raise Failed(
            f"products and kernels always together, half as long again as usual: {first:.2f} times "
            f"the usual for products, {last:.2f} for kernels",
            "Only their sum is told. The number that is known worse, kernels to 70 %, moves more, "
            "by the square of what is unsure: divide each usual number's row by its own `unsure`.",
        )
    return "three cases"


def _five(attempt: Callable) -> str:
    done, seconds, usual, chosen = _measured()
    rest = [i for i in range(len(seconds)) if i not in chosen]
    found = _fitted(attempt, done[chosen], seconds[chosen], usual, "five measured runs")
    off = _mean_off(found, done[rest], seconds[rest])
    if off > 0.035:
        raise Failed(
            f"five measured runs: the other {len(rest)} come out {100 * off:.2g} % wrong, usual "
            f"numbers alone {100 * _mean_off(usual, done[rest], seconds[rest]):.2g} %",
            "Five runs and five numbers: where nothing is left over, errors go into the rates.",
        )
    return f"the other {len(rest)} to {100 * off:.1f} %"


def _relative(attempt: Callable) -> str:
    done, _, usual, _ = _measured()
    truth = usual * (1.0, 1.0, 1.0, 1.0, 2.5)
    size = np.where(np.arange(len(done)) < 4, 200.0, 1.0)[:, None]  # four runs of minutes
    done = done * size
    off = 1 + 0.02 * np.cos(np.arange(len(done)) * 2.4)
    found = _fitted(attempt, done, done @ truth * off, usual, "4 long and 18 short runs")
    worst = float(np.abs(done[4:] @ found / (done[4:] @ truth) - 1).max())
    if worst > 0.025:
        raise Failed(
            f"4 long and 18 short runs, each measured to 2 %: a short one comes out "
            f"{100 * worst:.2g} % wrong",
            "Two percent of a long run are seconds. Divide each run's row by its seconds, or the "
            "long ones decide alone.",
        )
    return "long and short ones"


FIT = Exercise(
    id="planner/fit",
    reference=rates.fit_rates,
    properties=(
        Property("what runs tell", _told),
        Property("what no run tells", _untold),
        Property("long and short runs", _relative),
        Property("five measured runs", _five),
    ),
    hints=(
        "Least squares with two kinds of rows: each run says work · x = seconds, each usual number "
        "says x = usual. Every row is divided by its error.",
        "The error of a run is 0.025 · its seconds, that of a usual number unsure · usual.",
        "A = vstack([work / (0.025 · seconds)[:, None], diag(1 / (unsure · usual))]), b = [1 / "
        "0.025, …, 1 / unsure], and np.linalg.lstsq(A, b).",
    ),
)

# ── the exam ─────────────────────────────────────────────────────────────────────────────────────

QUESTIONS = 400
_ASKED = rates.critical_path  # which the exam closes to all but `ask`
EXAM = {
    "8B on 32 A100, long": ("llama-3.1-8b", "A100", 4, 131_072, 2**23),
    "70B on 512 H100": ("llama-3.1-70b", "H100", 64, 8192, 2**22),
    "8x7B on 64 H100": ("mixtral-8x7b", "H100", 8, 8192, 2**22),
}


@functools.cache
def exam(name: str) -> Job:
    """A job of the exam."""
    model, device, nodes, seq_len, batch = EXAM[name]
    cluster = planner.Cluster(device=Hardware.named(device), nodes=nodes)
    trained = replace(ModelConfig.named(model), seq_len=seq_len)
    return Job(model=trained, cluster=cluster, batch_tokens=batch)


@functools.cache
def _every(name: str) -> Found:
    return planner.search(exam(name))


class _Asked:
    """Answers what a plan takes and holds, so often and no more often."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.known: dict[Plan, Estimate] = {}

    def __call__(self, plan: Plan) -> Estimate:
        if not isinstance(plan, Plan):
            raise Failed(f"ask({plan!r})", "Ask for a planner.Plan(dp=…, tp=…, …).")
        if reason := plans.illegal(self.job, plan):
            raise ValueError(f"illegal: {reason}")
        if plan not in self.known:
            if len(self.known) == QUESTIONS:
                raise Failed(
                    f"more than {QUESTIONS} plans asked for",
                    "There are tens of thousands. Start from a plan that you would defend, and "
                    "ask only for what is one change away from the best so far.",
                )
            with unittest.mock.patch.object(rates, "critical_path", _ASKED):
                found = planner.estimate(self.job, plan)
                assert found.parts  # worked out now: they are read when the book is closed
            self.known[plan] = found
        return self.known[plan]


@contextmanager
def _closed_book() -> Iterator[None]:
    """Where nobody enumerates all plans, or evaluates one without asking."""

    def refuse(said: str) -> Callable:
        def refused(*given: Any, **named: Any) -> Any:
            raise Failed(said, "The search is the examiner. Use `ask`.")

        return refused

    searched, evaluated = refuse("you called the search"), refuse("you evaluated without `ask`")
    with (
        unittest.mock.patch.object(plans, "enumerate_plans", searched),
        unittest.mock.patch.object(rates, "critical_path", evaluated),
    ):
        yield


def choose(job: Job, ask: Callable[[Plan], Estimate]) -> Plan:
    """A plan within 3 % of the fastest, by a few hundred questions."""
    return climb.several(job, ask)


def _examined(attempt: Callable, name: str) -> str:
    job, every = exam(name), _every(name)
    asked = _Asked(job)
    with _closed_book():
        try:
            plan = attempt(job, asked)
        except ValueError as error:
            raise Failed(f"{error}", "A plan that is no plan: see the reason.") from None
    if isinstance(plan, Estimate):
        plan = plan.plan
    if not isinstance(plan, Plan):
        raise Failed(f"you returned {plan!r}", "Return a planner.Plan.")
    said = planner.why(every, plan)
    line = plans.text_of(plan)
    if plans.illegal(job, plan):
        raise Failed(f"{line}: {said}", "Divide the GPUs and the batch without remainder.")
    mine, best = planner.estimate(job, plan), every.fastest
    if not mine.fits:
        raise Failed(f"{line}: {said}", "Share out what is largest, or hold fewer micro-batches.")
    if mine.seconds > best.seconds * (1 + TIE):
        raise Failed(f"{line}: {said}", _advice(mine, best))
    lost = mine.seconds / best.seconds - 1
    behind = f"{lost:.1%} behind" if lost > 5e-4 else "as fast as"
    return f"{plans.text_of(plan)}, {behind} the best of {len(every):,}"


def _advice(mine: Estimate, best: Estimate) -> str:
    """What the time that is lost is mostly for."""
    lost = {name: mine.parts[name] - best.parts[name] for name in mine.parts}
    most = max(lost, key=lambda name: lost[name])
    if most == "computed again":
        kept = replace(mine.plan, recompute=0)
        if planner.estimate(mine.job, kept).fits:
            return "Recomputation costs time in every step, and this plan fits without."
        return (
            "Recomputation makes a plan fit at once, and every step pays for it. Which axis would "
            "share those activations?"
        )
    if most == "bubble":
        return "More micro-batches or chunks shorten a bubble, and another axis has none."
    if most == "ep exposed" or mine.plan.ep != best.plan.ep:
        return "Experts are most of this model: how many ranks should share them?"
    if most == "computing":
        return "All plans have the same products: count kernels. Are they too small, or too many?"
    return f"{most}: how often does it send, and over which links? Neighbours are tp, then cp."


DEFEND = Exercise(
    id="planner/exam",
    reference=choose,
    properties=tuple(Property(name, _examined, name=name) for name in EXAM),
    hints=(
        "By hand is an answer: find a plan for each job with `consider`, and return the one of "
        "job.model.name.",
        "As a program: `climb` from one start ends where no single change helps. Is there another "
        "start from which it ends elsewhere?",
        "Four starts: plain data parallelism, 8 ranks of tp, of cp, of pp; experts over 8. Climb "
        "without recomputation, and take the best end that fits.",
    ),
)

EXERCISES = (FULLEST, FIT, DEFEND)
