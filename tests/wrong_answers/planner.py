"""Wrong answers to the exercises of `planner`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from right_answers.planner import BY_HAND

from labutils import planner
from labutils.planner import climb, plans
from labutils.planner.plans import enumerate_plans, seconds_and_peaks
from labutils.planner.work import CHOSEN, Plan
from labutils.teach.exercises import planner as exercises
from wrong_answers import Wrong


def _fullest(slip: str = "", of: Callable = max) -> Callable:
    """The estimate with one slip, and what is made of the stages."""

    def attempt(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
        case = exercises._Case(plan, layers, weights, tokens, kept)
        return of(exercises._held(case, slip))

    return attempt


def _of_the_lab(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    each = sum(layers) / plan.pp
    mine = each * weights["layer"] + (weights["embedding"] + weights["head"]) / plan.pp
    states = mine / plan.tp * (2 + 4 + 12 / plan.dp)
    return states + plan.pp * each * kept * tokens / plan.tp


def _one_end(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    """The head, unless a stage has the embedding."""
    rest = weights if plan.pp > 1 else {**weights, "head": 0}
    return _fullest()(plan, layers, rest, tokens, kept)


def _unsharded(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    """18 bytes for every weight of the rank."""
    return _fullest()(plan, layers, weights, tokens, kept) * 1.5


def _sequences(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    """Tokens of a micro-batch taken for those of one of its sequences."""
    return _fullest()(plan, layers, weights, tokens, kept * plan.micro_batch)


def _no_sp(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    """Activations whole on every rank of tp."""
    return _fullest()(plan, layers, weights, tokens, kept * plan.tp)


def _most_of_each(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    """The most states, and the most activations, of whichever stages."""
    return exercises._apart(exercises._Case(plan, layers, weights, tokens, kept))


def _in_gigabytes(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    return _fullest()(plan, layers, weights, tokens, kept) / 1e9


def _ends_only(held: Sequence[float]) -> float:
    """The first or the last stage, whichever holds more."""
    return max(held[0], held[-1])


def _of_most_states(plan: Plan, layers: Sequence, weights: Mapping, tokens: int, kept: int) -> float:
    """All that the stage with the most states holds."""
    case = exercises._Case(plan, layers, weights, tokens, kept)
    states = exercises._held(case._replace(kept=0))
    return exercises._held(case)[states.index(max(states))]


def _mean(held: Sequence[float]) -> float:
    return sum(held) / len(held)


def _solve(rows: Any, seconds: Any) -> np.ndarray:
    return np.linalg.lstsq(rows, seconds, rcond=None)[0]


def _fit(
    noise: float = 0.025, relative: bool = True, shares: Any = None, power: float = 1
) -> Callable:
    """Least squares with other errors than those of the exercise."""

    def attempt(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
        off = noise * (seconds if relative else np.full(len(seconds), seconds.mean()))
        spread = unsure**power if shares is None else np.full(len(usual), shares)
        rows = np.vstack([work * usual / off[:, None], np.diag(1 / spread)])
        return usual * _solve(rows, np.concatenate([seconds / off, 1 / spread]))

    return attempt


def _fit_median(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    """Least distances in place of least squares: what disagrees most is left out."""
    rows = np.vstack([work * usual / (0.025 * seconds)[:, None], np.diag(1 / unsure)])
    told, x = np.concatenate([np.full(len(seconds), 40.0), 1 / unsure]), np.ones(len(usual))
    for _ in range(200):
        root = np.sqrt(np.maximum(np.abs(rows @ x - told), 1e-3))
        x = _solve(rows / root[:, None], told / root)
    return usual * x


def _to_zero(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    """Ridge regression: what no run tells becomes 0."""
    rows = np.vstack([work * usual / (0.025 * seconds)[:, None], np.diag(1 / unsure)])
    told = np.concatenate([np.full(len(seconds), 40.0), np.zeros(len(usual))])
    return usual * np.abs(_solve(rows, told))


def _no_prior(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    return usual * _solve(work * usual / seconds[:, None], np.ones(len(seconds)))


def _within_bounds(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    """The runs alone, and each number cut to its range."""
    return usual * np.clip(_solve(work * usual / seconds[:, None], np.ones(len(seconds))),
                           1 - unsure, 1 + unsure)  # fmt: skip


def _multiples(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    return _fit()(work, seconds, usual, unsure) / usual


def _by_largest_part(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    """Each run corrects the kind that takes most of it."""
    parts, found = work * usual, np.ones(len(usual))
    for kind in range(len(usual)):
        its = parts.argmax(1) == kind
        if its.any():
            found[kind] = np.median((seconds / parts.sum(1))[its])
    return usual * found


def _one_factor(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    return usual * float(np.mean(seconds / (work @ usual)))


def _as_given(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    return usual


def _rates(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    return 1 / _fit()(work, seconds, usual, unsure)


def _in_place(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    """Of the caller's own numbers."""
    found = _fit()(work, seconds, usual, unsure)
    work /= seconds[:, None]
    return found


def _normal_equations(work: Any, seconds: Any, usual: Any, unsure: Any) -> np.ndarray:
    """With the runs alone: five equations for five numbers, of few runs."""
    return np.linalg.solve(work.T @ work, work.T @ seconds)


def _always(**degrees: int) -> Callable:
    """One and the same mesh for each job, dp from what is left."""

    def attempt(job: planner.Job, ask: Callable) -> Plan:
        used = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
        return climb.completed(job, Plan(**({"dp": job.cluster.gpus // used} | degrees)))

    return attempt


def _climbed(recompute: Sequence[int] = climb.ALL, **degrees: int) -> Callable:
    """One climb from one start."""

    def attempt(job: planner.Job, ask: Callable) -> Plan:
        start = climb.start_of(job, **degrees)
        return climb.climb(job, ask, start, recompute)[-1]

    return attempt


def _experts_recomputed(job: planner.Job, ask: Callable) -> Plan:
    """Experts over eight ranks, and then whatever makes it fit at once."""
    many = job.model.num_experts > 1
    return _climbed(climb.ALL if many else (0,), **({"ep": 8} if many else {}))(job, ask)


def _fastest_of_all(job: planner.Job, ask: Callable) -> Plan:
    """The quickest end of climbs that look at seconds alone."""
    plan = climb.start_of(job)
    while True:
        best = min(climb.changes(job, plan), key=lambda p: ask(p).seconds)
        if ask(best).seconds >= ask(plan).seconds:
            return plan
        plan = best


def _asks_for_all(job: planner.Job, ask: Callable) -> Plan:
    """Every mesh of powers of two, with every level of ZeRO and of recomputation."""
    for tp, cp, pp, zero, again in itertools.product(*[(1, 2, 4, 8)] * 3, range(4), range(3)):
        dp = max(1, job.cluster.gpus // tp // cp // pp)
        plan = climb.completed(job, Plan(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, recompute=again))
        if not plans.illegal(job, plan):
            ask(plan)
    return climb.start_of(job)


def _leanest(job: planner.Job, ask: Callable) -> Plan:
    """The plan of the many small changes that holds least."""
    path = [climb.start_of(job)]
    for _ in range(6):
        path.append(min(climb.changes(job, path[-1]), key=lambda p: ask(p).peak))
    return path[-1]


def _searches(job: planner.Job, ask: Callable) -> Plan:
    return planner.search(job).fastest.plan


def _estimates(job: planner.Job, ask: Callable) -> Plan:
    """A climb that counts no question."""
    start = climb.start_of(job)
    return climb.climb(job, lambda plan: planner.estimate(job, plan), start, (0,))[-1]


def _enumerates(job: planner.Job, ask: Callable) -> Plan:
    return plans.enumerate_plans(job)[0]


def _by_other_names(job: planner.Job, ask: Callable) -> Plan:
    """All plans, by functions that were imported before the book was closed."""
    each = enumerate_plans(job)
    seconds, peaks = seconds_and_peaks(job, each)
    best = int(np.where(peaks <= job.cluster.room, seconds, np.inf).argmin())
    return Plan(**{name: int(getattr(each, name)[best]) for name in CHOSEN})


def _first_that_fits(job: planner.Job, ask: Callable) -> Plan | None:
    for tp, pp, cp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        plan = _always(tp=tp, pp=pp, cp=cp, zero=3)(job, ask)
        if not plans.illegal(job, plan) and ask(plan).fits:
            return plan
    return None


def _by_hand(**changes: int) -> Callable:
    """Good plans, with one change for the worse."""
    return lambda job, ask: replace(BY_HAND[job.model.name], **changes)


def _in_words(job: planner.Job, ask: Callable) -> str:
    return plans.text_of(climb.start_of(job))


LONG, LAST = "8B on 32 A100, long", "8x7B on 64 H100"
def _takes_the_head_out(plan, layers, weights, tokens, kept):
    """Of the very dict that it was given."""
    del weights["head"]
    return _fullest()(plan, layers, weights | {"head": 0}, tokens, kept)


WRONG = {
    "planner/fullest": (
        Wrong("the one of the lab", _of_the_lab, "context parallelism", "tokens / cp"),
        Wrong("no cp at all", _fullest("cp"), "context parallelism", "tokens / cp"),
        Wrong("optimizer over dp", _fullest("optimizer"), "context parallelism", "dp · cp"),
        Wrong("no embedding, no head", _fullest("ends"), "one stage", "the head"),
        Wrong("one end of one stage", _one_end, "one stage", "has both"),
        Wrong("ends swapped", _fullest("swapped"), "uneven stages", "the last one that has"),
        Wrong("18 bytes everywhere", _unsharded, "one stage", "12 B shared"),
        Wrong("whole on ranks of tp", _no_sp, "one stage", "divided by tp, too"),
        Wrong("the mean", _fullest(of=_mean), "the fullest stage", "mean of the stages"),
        Wrong("takes the head out", _takes_the_head_out, "one stage", "has both"),
        Wrong("the last stage", _fullest(of=lambda held: held[-1]), "the fullest stage",
              "the last stage's"),
        Wrong("GPipe's", _fullest("all"), "one stage", "as soon as it can"),
        Wrong("one micro-batch", _fullest("once"), "the fullest stage", "and not one"),
        Wrong("the first stage", _fullest("first"), "uneven stages", "may have more layers"),
        Wrong("p − i", _fullest("p - i"), "fewer micro-batches than stages", "m micro-batches"),
        Wrong("i + 1", _fullest("turned"), "uneven stages", "waits longest"),
        Wrong("most of each", _most_of_each, "uneven stages", "no rank holds both"),
        Wrong("the sum", _fullest(of=sum), "the fullest stage", "take the largest"),
        Wrong("weights over cp", _fullest("weights"), "context parallelism", "not weights"),
        Wrong("optimizer over tp", _fullest("over tp"), "one stage", "tp hold other weights"),
        Wrong("optimizer over pp", _fullest("over pp"), "the fullest stage", "hold other weights"),
        Wrong("p − i + 1", _fullest("p - i +1"), "one stage", "counted from 0"),
        Wrong("p − i − 1", _fullest("p - i -1"), "one stage", "counted from 0"),
        Wrong("first or last", _fullest(of=_ends_only), "uneven stages", "may have more layers"),
        Wrong("of most states", _of_most_states, "uneven stages", "may have more layers"),
        Wrong("min(p, m) − i", _fullest("m - i"), "fewer micro-batches than stages", "min(p, m) − i"),
        Wrong("the first's everywhere", _fullest("first's"), "uneven stages", "Only the first"),
        Wrong("times the sequences", _sequences, "one stage", "of all its sequences"),
        Wrong("in GB", _in_gigabytes, "one stage", "0.487 B instead of"),
    ),
    "planner/fit": (
        Wrong("no usual numbers", _no_prior, "what no run tells", "tell five numbers apart"),
        Wrong("normal equations", _normal_equations, "what no run tells", "beside them"),
        Wrong("toward 0", _to_zero, "what runs tell", "so that many runs outweigh"),
        Wrong("one factor for all", _one_factor, "what runs tell", "A row for each run"),
        Wrong("the usual ones", _as_given, "what runs tell", "A row for each run"),
        Wrong("units per second", _rates, "what runs tell", "seconds per unit"),
        Wrong("errors in seconds", _fit(relative=False), "long and short runs", "long ones decide"),
        Wrong("alike unsure", _fit(shares=0.25), "what no run tells", "known worse"),
        Wrong("over the root", _fit(power=0.5), "what no run tells", "known worse"),
        Wrong("runs hardly count", _fit(noise=0.5), "what runs tell", "many runs outweigh"),
        Wrong("runs known to 5 %", _fit(noise=0.05), "what no run tells", "over its own error"),
        Wrong("least distances", _fit_median, "what no run tells", "over its own error"),
        Wrong("squares of the errors", _fit(power=2), "what runs tell", "22 runs"),
        Wrong("cut to the range", _within_bounds, "what no run tells", "keep that"),
        Wrong("multiples of the usual", _multiples, "what runs tell", "these are multiples"),
        Wrong("by the largest part", _by_largest_part, "what runs tell", "A row for each run"),
        Wrong("divided in place", _in_place, "what runs tell", "arrays of your own"),
        Wrong("runs without error", _fit(noise=1e-6), "what no run tells", "over its error"),
    ),
    "planner/exam": (
        Wrong("dp alone", _always(zero=3), LONG, "not fit"),
        Wrong("tp 8, pp 4", _always(tp=8, pp=4), LONG, "hold fewer"),
        Wrong("a climb that recomputes", _climbed(), LONG, "every step pays"),
        Wrong("one climb without", _climbed((0,)), LAST, "Experts are most"),
        Wrong("experts over 8, recomputed", _experts_recomputed, LAST, "every step pays"),
        Wrong("fastest, fit or not", _fastest_of_all, LONG, "Share out"),
        Wrong("leanest", _leanest, LONG, "fits without"),
        Wrong("in words", _in_words, LONG, "planner.Plan"),
        Wrong("searched", _searches, LONG, "search is the examiner"),
        Wrong("enumerated", _enumerates, LONG, "search is the examiner"),
        Wrong("by other names", _by_other_names, LONG, "search is the examiner"),
        Wrong("evaluates unasked", _estimates, LONG, "search is the examiner"),
        Wrong("asks for all", _asks_for_all, LONG, "tens of thousands"),
        Wrong("illegal", _always(tp=16), LONG, "without remainder"),
        Wrong("the first that fits", _first_that_fits, LAST, "Experts are most"),
        Wrong("recomputed in vain", _by_hand(recompute=1), LONG, "fits without"),
        Wrong("twice the batch", _by_hand(micro_batch=2), LONG, "make up the batch"),
        Wrong("a level less", _by_hand(zero=1), LONG, "Share out"),
        Wrong("one climb from tp = 8", _climbed((0,), tp=8), LAST, "Experts are most"),
    ),
}
