"""Shard an optimizer, write the schedule of level 3, repair a mixed-precision optimizer."""

import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from labutils import units, world, zero
from labutils.teach.exercises import Exercise, Failed, Property, _ranks

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_SHARES = (
    "All ranks make the same collective calls, in the same order, with the same shapes. "
    "Shares of unequal length break that: pad to N equal ones."
)


def _kept(owner: object, *known: Tensor) -> int:
    """Bytes of all tensors that `owner` keeps beside the `known` ones, each storage once."""
    counted = {x.untyped_storage()._cdata for x in known}
    seen: set[int] = set()

    def walk(thing: object) -> Iterator[Tensor]:
        if isinstance(thing, Tensor):
            yield thing
            if thing.grad is not None:
                yield thing.grad
        elif id(thing) not in seen and not isinstance(thing, (world.Comm, type, str, int, float)):
            seen.add(id(thing))
            inside = (
                [*thing.keys(), *thing.values()]
                if isinstance(thing, dict)
                else thing
                if isinstance(thing, (list, tuple, set))
                else []
            )
            for part in (*inside, *vars(thing).values()) if hasattr(thing, "__dict__") else inside:
                yield from walk(part)

    total = 0
    for tensor in walk(owner):
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total


# ── a sharded optimizer ──────────────────────────────────────────────────────────────────────────


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.125, momentum=0.5)


def _adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.125)


def _start(numel: int) -> Tensor:
    return (torch.arange(numel, dtype=torch.float64) * 7 + 3) % 11 - 5


def _slope(numel: int, rank: int, step: int) -> Tensor:
    """The gradient of one rank in one step: no element is 0, and the mean is no rank's own."""
    return ((torch.arange(numel, dtype=torch.float64) + step) * (rank + 2)) % 5 + 4 * rank + 1


def _plain(n: int, numel: int, make: Make, steps: int) -> Tensor:
    w = nn.Parameter(_start(numel))
    optimizer = make([w])
    for step in range(steps):
        w.grad = sum(_slope(numel, rank, step) for rank in range(n)) / n
        optimizer.step()
    return w.detach()


def _stepped(
    attempt: Callable, n: int, numel: int, make: Make, steps: int = 3
) -> tuple[list[Tensor], list[int]]:
    """Each rank's weights after some steps, and the bytes its optimizer keeps beside w, w.grad."""

    def program(rank: world.Rank) -> tuple[Tensor, int]:
        w = nn.Parameter(_start(numel))
        optimizer = attempt(w, rank.comm("dp"), make)
        for step in range(steps):
            w.grad = None
            (w * _slope(numel, rank.rank, step)).sum().backward()
            optimizer.step()
            if w.shape != (numel,):
                break
        return w.detach().clone(), _kept(optimizer, w, *([] if w.grad is None else [w.grad]))

    case = f"{_ranks.count(n)}, {numel} weights"
    results = _ranks.run(n, case, program, _SHARES)
    if any(w.shape != (numel,) for w, _ in results):
        raise Failed(
            f"{case}: w has {results[0][0].numel()} elements after a step",
            "The gathered shares end with the padding: cut it off, [: w.numel()].",
        )
    return [w for w, _ in results], [kept for _, kept in results]


def _right_weights(attempt: Callable, n: int, numel: int) -> None:
    for name, make in (("SGD with momentum", _sgd), ("Adam", _adam)):
        for steps in (1, 3):
            expected = _plain(n, numel, make, steps)
            results, _ = _stepped(attempt, n, numel, make, steps)
            for rank, w in enumerate(results):
                if not torch.allclose(w, expected, rtol=1e-12, atol=1e-12):
                    _diagnose(
                        f"{_ranks.count(n)}, {numel} weights, {name}", rank, w, n, numel, steps
                    )


def _diagnose(case: str, rank: int, w: Tensor, n: int, numel: int, steps: int) -> None:
    moved, wanted = w - _start(numel), _plain(n, numel, _sgd, steps) - _start(numel)
    still = (moved == 0).nonzero().flatten().tolist()
    own = set(range(*zero.partition(numel, n).bounds(rank)))
    if case.endswith("Adam"):  # SGD came before it
        why = (
            "With SGD your weights are right. Adam is not linear: a mean of weights, "
            "each moved along a rank's own gradient, "
            "is not a step along the mean gradient. Average the gradients, then step."
        )
    elif len(still) == numel:
        why = "No weight moves: `step` has to write the new ones into w itself, w.data.copy_(…)."
    elif steps == 1 and torch.allclose(moved, n * wanted):
        why = (
            "The update is N times too long: reduce-scatter sums, and the gradient of the whole "
            "batch is the mean. Divide by comm.size."
        )
    elif steps == 1 and n > 1 and torch.allclose(n * moved, wanted):
        why = (
            "The update is N times too short: is the gradient divided by N twice, "
            "before and after it is summed? (Adam alone would have hidden that.)"
        )
    elif still and still == list(range(numel // n * n, numel)):
        why = (
            f"The last {len(still)} weights never move: "
            f"{numel} // {n} times {n} is {numel // n * n}. Take ⌈numel / N⌉ for a share and pad "
            "the last ones."
        )
    elif still and not set(still) & own:
        why = (
            "This rank's own share is new and the rest is old: all-gather the shares of all ranks "
            "into w, every step."
        )
    elif still:
        why = f"{len(still)} of {numel} weights never move: whose share are they?"
    elif steps == 1 and torch.allclose(
        moved[sorted(own)], -0.125 * _slope(numel, rank, 0)[sorted(own)]
    ):
        why = (
            "Its share moved along this rank's own gradient: where do the gradients of the other "
            "ranks come in?"
        )
    else:
        why = (
            "The plain optimizer steps along the mean of all ranks' gradients. "
            "Does your inner one see its share of that, every step?"
        )
    raise Failed(
        f"{case}, after {steps} step{'s' * (steps > 1)}: rank {rank} holds other weights than one "
        "optimizer on one rank",
        why,
    )


def _weights(attempt: Callable) -> str:
    cases = [(1, 4), (2, 8), (3, 12), (4, 32)]
    for n, numel in cases:
        _right_weights(attempt, n, numel)
    return f"{len(cases)} × 2 optimizers"


def _remainders(attempt: Callable) -> str:
    cases = [(2, 7), (3, 10), (4, 9), (4, 2)]
    for n, numel in cases:
        try:
            _right_weights(attempt, n, numel)
        except Failed as failure:
            remedy = (
                ""
                if "pad" in failure.hint
                else (
                    f" It works where N divides: {numel} weights on {n} ranks leave a rest. "
                    "Pad to N equal shares."
                )
            )
            raise Failed(str(failure), failure.hint + remedy) from None
    return f"{len(cases)} cases"


def _state_bytes(attempt: Callable) -> str:
    n, numel = 4, 1000
    _, kept = _stepped(attempt, n, numel, _adam)
    # Two moments, room for a copy of the share and its gradient, and Adam's count of steps.
    share, slack = 8 * zero.partition(numel, n).share, 64
    for rank, nbytes in enumerate(kept):
        if nbytes > 4 * share + slack:
            whole = nbytes >= 2 * 8 * numel
            raise Failed(
                f"{n} ranks, {numel} weights, Adam: rank {rank} keeps {nbytes:,} B beside weights "
                f"and gradients, its share's moments are {2 * share:,} B",
                "Your weights are right, and nothing is sharded: every rank has moments for all "
                "weights. Give `make` this rank's share alone."
                if whole
                else (
                    "Something as long as all weights stays alive from step to step. "
                    "A view keeps all of what it is a piece of: clone this rank's share."
                ),
            )
        if nbytes < 2 * share:
            raise Failed(
                f"{n} ranks, {numel} weights, Adam: rank {rank} keeps {nbytes:,} B, less than the "
                f"moments of its share, {2 * share:,} B",
                "Where are the moments? Make the inner optimizer once and keep it as an "
                "attribute: one that is made anew in every step forgets them.",
            )
    return "2 moments of 1/N"


def _step_bytes(attempt: Callable) -> str:
    for n, numel in ((4, 1000), (3, 10)):
        sent = []
        for steps in (1, 3):
            _stepped(attempt, n, numel, _adam, steps)
            sent.append(_ranks.world_of(n).ledger.by("rank"))
        share = 8 * zero.partition(numel, n).share
        for rank in range(n):
            each, least = (sent[1].get(rank, 0) - sent[0].get(rank, 0)) // 2, 2 * (n - 1) * share
            if each > least:
                times = each / least
                why = (
                    "That is an all-reduce and an all-gather, 3Ψ. The all-reduce hands every rank "
                    "the sums of all shares, and a rank needs those of its own: "
                    "half of an all-reduce, reduce_scatter, is enough. "
                    "(The first ZeRO-1 of DeepSpeed did the same.)"
                    if 1.3 < times < 1.7
                    else (
                        "One reduce_scatter of the gradient and one all_gather of the new weights "
                        "are enough; nothing else has to travel."
                    )
                )
                raise Failed(
                    f"{n} ranks, Ψ = {numel} weights of 8 B: rank {rank} sends {each:,} B a step, "
                    f"2Ψ(N − 1)/N is {least:,} B",
                    why,
                )
    return "2Ψ(N − 1)/N a step"


class _Reference:
    """The library's own, told like the exercise: one flat parameter, no gradient after the step."""

    def __init__(self, w: nn.Parameter, comm: world.Comm, make: Make) -> None:
        self.optimizer = zero.Optimizer([w], comm, make, level=2)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


SHARD = Exercise(
    id="zero/optimizer",
    title="Shard the optimizer",
    minutes=20,
    difficulty=2,
    proves="you can divide an optimizer's memory by N without sending a byte more",
    reference=_Reference,
    properties=(
        Property("weights", _weights),
        Property("lengths that N does not divide", _remainders),
        Property("bytes held", _state_bytes),
        Property("bytes sent", _step_bytes),
    ),
    hints=(
        "In __init__: zero.partition(w.numel(), N) says how long a share is. "
        "Make a parameter of this rank's own share, and give `make` that one alone.",
        "In step: pad w.grad with zeros to N · share elements; comm.reduce_scatter gives this "
        "rank's share of the sum. Divide by N, step the inner optimizer, "
        "comm.all_gather the shares, cut the padding off, copy into w.data.",
    ),
)

# ── the schedule of level 3 ──────────────────────────────────────────────────────────────────────

Step = tuple[str, int]


def _legal(attempt: Callable, count: int) -> list[Step]:
    """The attempt's steps, each of which can be carried out when its turn comes."""
    steps, case = attempt(count), f"{count} unit{'s' * (count > 1)}"
    if not isinstance(steps, (list, tuple)) or not all(
        isinstance(step, (list, tuple)) and len(step) == 2 for step in steps
    ):
        raise Failed(
            f"{case}: got {str(steps)[:80]}, not a list of pairs",
            "Return pairs such as ('gather', 0).",
        )
    steps = [tuple(step) for step in steps]
    whole: set[int] = set()
    gradients: set[int] = set()
    done: list[Step] = []
    order = [("forward", i) for i in range(count)] + [
        ("backward", i) for i in reversed(range(count))
    ]
    for k, (what, i) in enumerate(steps):
        told = f"{case}, step {k}, {what} {i}"
        if what not in ("gather", "forward", "free", "backward", "reduce") or i not in range(count):
            raise Failed(
                f"{told}: no such step",
                f"Steps are gather, forward, free, backward, reduce, of units 0 … {count - 1}.",
            )
        if what in ("forward", "backward"):
            if i not in whole:
                after = (
                    " Its forward is long over, and its weights were freed: gather it again."
                    if what == "backward" and done
                    else ""
                )
                raise Failed(
                    f"{told}: the weights of unit {i} are not here",
                    f"Gather a unit before it computes.{after}",
                )
            if order[len(done)] != (what, i):
                verb, unit = order[len(done)]
                raise Failed(
                    f"{told}: it is the turn of {verb} {unit}",
                    "Forward runs from the first unit to the last, backward from the last to the "
                    "first.",
                )
            done.append((what, i))
            gradients |= {i} if what == "backward" else set()
        elif what == "gather":
            if i in whole:
                raise Failed(
                    f"{told}: unit {i} is here already",
                    "Every gather costs a unit's bytes: free it first, or leave this gather out.",
                )
            whole.add(i)
        elif what == "free":
            if i not in whole:
                raise Failed(f"{told}: unit {i} is not here", "Free what has been gathered, once.")
            whole.remove(i)
        else:
            if i not in gradients:
                raise Failed(
                    f"{told}: there is no gradient of unit {i} to reduce",
                    "Reduce a unit's gradient after its backward, once.",
                )
            gradients.remove(i)
    if done != order:
        raise Failed(
            f"{case}: the steps end before {order[len(done)][0]} {order[len(done)][1]}",
            "Every unit goes forward once and backward once.",
        )
    if gradients or whole:
        left = (
            f"unreduced gradients of units {sorted(gradients)}"
            if gradients
            else f"units {sorted(whole)} whole"
        )
        raise Failed(
            f"{case}: the end leaves {left}",
            "Reduce every gradient, and free every unit, before the step is over.",
        )
    return steps


@functools.cache
def _carried_out(
    steps: tuple[Step, ...], count: int, n: int = 2, width: int = 8
) -> SimpleNamespace:
    """The steps on real ranks, over a chain of square matrices: weights after SGD, peaks, bytes."""
    numel, x = (
        width * width,
        torch.linspace(-1, 1, 2 * n * width, dtype=torch.float64).view(n, 2, width),
    )
    start = torch.stack(
        [
            torch.linspace(-0.5, 0.5, numel, dtype=torch.float64) * (i + 1) / count
            for i in range(count)
        ]
    )

    def program(rank: world.Rank) -> tuple[Tensor, int, int]:
        comm, own = (
            rank.comm("dp"),
            slice(rank.rank * (numel // n), (rank.rank + 1) * (numel // n)),
        )
        shards, whole, gradients = start[:, own].clone(), {}, {}
        inputs, values, flowing = {}, x[rank.rank], None
        weights_peak = gradients_peak = 0
        for what, i in steps:
            if what == "gather":
                whole[i] = comm.all_gather(shards[i])
            elif what == "free":
                del whole[i]
            elif what == "forward":
                inputs[i], values = values, (values @ whole[i].view(width, width)).tanh()
                flowing = (
                    2 * values / values.numel()
                )  # of the mean square of what comes out at the end
            elif what == "backward":
                flowing = flowing * (1 - (inputs[i] @ whole[i].view(width, width)).tanh() ** 2)
                gradients[i] = (inputs.pop(i).T @ flowing).flatten()
                flowing = flowing @ whole[i].view(width, width).T
            else:
                shards[i] -= 0.1 * comm.reduce_scatter(gradients.pop(i)) / n
            weights_peak, gradients_peak = (
                max(weights_peak, len(whole)),
                max(gradients_peak, len(gradients)),
            )
        return comm.all_gather(shards.T.contiguous()).T, weights_peak, gradients_peak

    results = _ranks.run(n, f"{count} units", program, _SHARES)
    return SimpleNamespace(
        weights=[w for w, _, _ in results],
        whole=results[0][1],
        gradients=results[0][2],
        sent=_ranks.world_of(n).ledger,
        nbytes=8 * numel,
        n=n,
    )


def _schedule_legal(attempt: Callable) -> str:
    for count in (1, 2, 5):
        steps = tuple(_legal(attempt, count))
        mine, plain = _carried_out(steps, count), _carried_out(tuple(zero.unit_order(count)), count)
        if not all(torch.allclose(a, b) for a, b in zip(mine.weights, plain.weights, strict=True)):
            raise Failed(
                f"{count} units: other weights after the step",
                "Is each gradient reduced when all of it is there?",
            )
    return "1, 2 and 5 units"


def _schedule_held(attempt: Callable) -> str:
    for count in (3, 6):
        steps = tuple(_legal(attempt, count))
        run = _carried_out(steps, count)
        if run.whole > 2:
            forward = [what for what, _ in steps[: steps.index(("forward", count - 1))]]
            why = (
                "Nothing is resharded: at the end of the forward pass all weights are here, "
                "as in plain data parallelism. Free a unit after its forward, "
                "and gather it again for its backward."
                if "free" not in forward and run.whole == count
                else (
                    "Free a unit as soon as it has computed, and gather no more than the next one "
                    "ahead, in the backward pass too."
                )
            )
            raise Failed(
                f"{count} units of {units.text(run.nbytes)}: {run.whole} of them are whole at "
                f"once, {units.text(run.whole * run.nbytes)}; 2 are enough",
                why,
            )
        if run.gradients > 1:
            raise Failed(
                f"{count} units of {units.text(run.nbytes)}: "
                f"the whole gradients of {run.gradients} units are held at once",
                "Reduce a gradient right after the unit's backward: then a rank keeps 1/N of it.",
            )
    return "2 units, 1 gradient"


def _schedule_sent(attempt: Callable) -> str:
    for count in (3, 6):
        run = _carried_out(tuple(_legal(attempt, count)), count)
        psi = count * run.nbytes
        gathered = (
            run.sent.only(name="all_gather").by("rank")[0] - psi * (run.n - 1) // run.n
        )  # the check gathers once itself, to compare
        if gathered > 2 * psi * (run.n - 1) // run.n:
            raise Failed(
                f"{count} units: {gathered / (run.nbytes * (run.n - 1) / run.n):g} gathers, "
                f"{2 * count} are enough",
                "One gather for a unit's forward and one for its backward make 2Ψ; "
                "with the reduce-scatter, 3Ψ.",
            )
    return "at most 3Ψ(N − 1)/N"


def _schedule_prefetch(attempt: Callable) -> str:
    for count in (2, 5):
        steps, computed = _legal(attempt, count), 0
        for k, (what, i) in enumerate(steps):
            computed += what in ("forward", "backward")
            start = next((j for j in reversed(range(k)) if steps[j] == ("gather", i)), 0)
            between = any(verb in ("forward", "backward") for verb, _ in steps[start:k])
            if what in ("forward", "backward") and computed > 1 and not between:
                last = what == "backward" and i == count - 1
                raise Failed(
                    f"{count} units: gather {i} begins right before {what} {i}",
                    "The last unit goes backward right after its forward: don't free it in between."
                    if last
                    else (
                        "Nothing computes while it is on its way. Start it one unit earlier: "
                        "two whole units are allowed, the one that computes and the next."
                    ),
                )
    return "always one ahead"


SCHEDULE = Exercise(
    id="zero/schedule",
    title="Gather, use, free",
    minutes=15,
    difficulty=2,
    proves="you know when every unit of a fully sharded model is whole, and what that costs",
    reference=zero.unit_order,
    properties=(
        Property("everything is there when it is used", _schedule_legal),
        Property("bytes held", _schedule_held),
        Property("bytes sent", _schedule_sent),
        Property("prefetch", _schedule_prefetch),
    ),
    hints=(
        "Forward of unit i: start to gather i + 1, compute i, free i. "
        "What is different for the last unit, whose backward comes next?",
        "Backward of unit i, from the last to the first: start to gather i − 1, compute, free i, "
        "reduce its gradient.",
    ),
)

# ── bug hunt: mixed precision, clipped ───────────────────────────────────────────────────────────


def _coarse(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def _fine(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-11)


def _half(
    attempt: Callable,
    n: int,
    numel: int,
    make: Make,
    slopes: Callable[[int], Tensor],
    max_norm: float,
    steps: int = 1,
) -> tuple[list[Tensor], list[float], list[int]]:
    """Each rank's bf16 weights, last norm and bytes kept, when rank r's gradient is slopes(r)."""

    def program(rank: world.Rank) -> tuple[Tensor, float, int]:
        w = nn.Parameter(torch.ones(numel, dtype=torch.bfloat16))
        optimizer, norm = attempt(w, rank.comm("dp"), make), None
        for _ in range(steps):
            w.grad = None
            (w * slopes(rank.rank).bfloat16()).sum().backward()
            norm = optimizer.step(max_norm)
        return (
            w.detach().clone(),
            float("nan") if norm is None else float(norm),
            _kept(optimizer, w, *([] if w.grad is None else [w.grad])),
        )

    results = _ranks.run(n, f"{_ranks.count(n)}, {numel} weights", program, _SHARES)
    return (
        [w for w, _, _ in results],
        [norm for _, norm, _ in results],
        [kept for _, _, kept in results],
    )


def _steep(numel: int) -> Callable[[int], Tensor]:
    """Gradients whose mean is 1, 2, …: the shares of later ranks are steeper."""
    return lambda rank: torch.arange(1.0, numel + 1) * (2 if rank % 2 == 0 else 0)


def _hunt_plain(attempt: Callable) -> str:
    for n, numel in ((2, 8), (4, 12), (4, 10)):
        results, _, _ = _half(attempt, n, numel, _coarse, _steep(numel), 1e6)
        expected = (torch.ones(numel) - 0.25 * torch.arange(1.0, numel + 1)).bfloat16()
        for rank, w in enumerate(results):
            if not torch.equal(w, expected):
                raise Failed(
                    f"{n} ranks, {numel} weights, nothing to clip: "
                    f"rank {rank} holds other weights than one optimizer on one rank",
                    "This much was right in the code that you got: "
                    "the mean gradient of each share, one step, all shares gathered, "
                    "the padding cut off. "
                    "And a gradient that is shorter than max_norm stays as it is.",
                )
    return "3 cases"


def _hunt_clipping(attempt: Callable) -> str:
    for n, numel in ((2, 8), (4, 12)):
        slopes = torch.arange(1.0, numel + 1)
        true = slopes.norm().item()
        shares = torch.tensor([share.norm().item() for share in slopes.view(n, -1)])
        results, norms, _ = _half(attempt, n, numel, _coarse, _steep(numel), true / 2)
        expected = (1 - 0.25 * slopes / 2).bfloat16()
        for rank, (w, norm) in enumerate(zip(results, norms, strict=True)):
            if math.isclose(norm, true, rel_tol=1e-3) and torch.allclose(
                w.float(), expected.float(), rtol=2**-7, atol=2**-7
            ):
                continue
            case = (
                f"{n} ranks, max_norm = {true / 2:.4g}: rank {rank} clips by a norm of "
                f"{norm:.4g}, the whole gradient has {true:.4g}"
            )
            if math.isnan(norm):
                case, why = (
                    f"{n} ranks: rank {rank} got no norm from step()",
                    "Return the norm of the whole gradient, as it was before clipping.",
                )
            elif math.isclose(norm, true**2, rel_tol=1e-3):
                why = "That is the sum of the squares over all ranks: take the root of it."
            elif math.isclose(norm, n * true, rel_tol=1e-3):
                why = (
                    "That is the norm of the sum of all ranks' gradients, N times too much: "
                    "divide by N before you measure."
                )
            elif math.isclose(norm, true / n**0.5, rel_tol=1e-3):
                why = (
                    "That is the root of the *mean* of the squares. Each rank has another part of "
                    "the gradient: add the squares, don't average them."
                )
            elif math.isclose(norm, shares[rank].item(), rel_tol=1e-3):
                why = (
                    "That is the local norm, of this rank's share: every rank scales by its own "
                    "factor, and the direction of the update changes. "
                    "Add the *squares* over all ranks (one all-reduce of one number), "
                    "then take the root."
                )
            elif math.isclose(norm, shares.sum().item(), rel_tol=1e-3):
                why = "Norms don't add: their squares do. Square, all-reduce, then take the root."
            elif math.isclose(norm, shares.max().item(), rel_tol=1e-3) or math.isclose(
                norm, shares.mean().item(), rel_tol=1e-3
            ):
                why = (
                    "The norm of the whole is neither the largest nor the mean of the parts' "
                    "norms: add their squares over all ranks, then take the root."
                )
            elif math.isclose(norm, true, rel_tol=1e-3):
                why = (
                    "The norm is right, the update is not: scale this rank's share by max_norm / "
                    f"norm = {0.5}, once, before the step."
                )
            else:
                why = (
                    "Clip the mean gradient, after it has been reduced: "
                    "the norm of a rank's own gradient is another number. And return the norm."
                )
            raise Failed(case, why)
    return "one norm on all ranks"


def _hunt_small(attempt: Callable) -> str:
    results, _, _ = _half(attempt, 2, 4, _fine, lambda rank: torch.ones(4), 1e6, steps=16)
    for rank, w in enumerate(results):
        if not torch.equal(w, torch.full((4,), 1 - 2**-7, dtype=torch.bfloat16)):
            raise Failed(
                f"16 steps of 2⁻¹¹ from 1: rank {rank} is at {w[0].item():g}, not at {1 - 2**-7:g}",
                "Each step is smaller than half the spacing of bf16 below 1. "
                "The fp32 master has to carry it on to the next step: "
                "is it read back from the rounded weights, or never kept in fp32?",
            )
    return "16 steps below the spacing of bf16"


def _hunt_held(attempt: Callable) -> str:
    n, numel = 4, 1000
    _, _, kept = _half(attempt, n, numel, _adam, _steep(numel), 1.0, steps=2)
    share = zero.partition(numel, n).share
    least = 12 * share  # an fp32 master and two fp32 moments
    for rank, nbytes in enumerate(kept):
        if (
            nbytes > least + 8 * share + 64
        ):  # a gradient of the share in bf16, another in fp32, and Adam's count of steps
            raise Failed(
                f"{n} ranks, {numel} weights, Adam: rank {rank} keeps {nbytes:,} B; "
                f"master and moments of its share are {least:,} B",
                "The master copy and the moments are 12 of the 16 bytes of each weight: "
                "they must be of this rank's share alone.",
            )
    return "12 bytes a weight, 1/N of them"


def _hunt_sent(attempt: Callable) -> str:
    n, numel = 4, 1000
    sent = []
    for steps in (1, 2):
        _half(attempt, n, numel, _coarse, _steep(numel), 1.0, steps)
        sent.append(_ranks.world_of(n).ledger.by("rank"))
    least = 2 * (n - 1) * 2 * zero.partition(numel, n).share
    for rank in range(n):
        each = sent[1].get(rank, 0) - sent[0].get(rank, 0)
        if each > least + 64:
            raise Failed(
                f"{n} ranks, Ψ = {numel} weights of 2 B: rank {rank} sends {each:,} B a step; "
                f"2Ψ(N − 1)/N is {least:,} B, and the norm is one number",
                "Whole gradients need not travel for a norm: each rank knows the squares of its "
                "share, and their sum is one number. "
                "And what does travel, gradients and weights, travels in bf16.",
            )
    return "2Ψ(N − 1)/N and a number"


class _HalfReference:
    """The library's own, told like the exercise."""

    def __init__(self, w: nn.Parameter, comm: world.Comm, make: Make) -> None:
        self.optimizer = zero.Optimizer([w], comm, make, level=2, master=True)

    def step(self, max_norm: float) -> Tensor:
        norm = self.optimizer.clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


HUNT = Exercise(
    id="zero/repair",
    title="Bug hunt: the optimizer that passed its test",
    minutes=15,
    difficulty=3,
    proves="you know what sharding does to clipping and to master weights",
    reference=_HalfReference,
    properties=(
        Property("one step, nothing clipped", _hunt_plain),
        Property("clipping", _hunt_clipping),
        Property("small updates", _hunt_small),
        Property("bytes held", _hunt_held),
        Property("bytes sent", _hunt_sent),
    ),
    hints=(
        "Two bugs. Which number in `step` is of this rank's share alone, and should be of the "
        "whole gradient? "
        "What is read from w, in every step, that was more exact before?",
        "The norm: all-reduce the square of mine.norm(), then take the root. The master: "
        "it is copied from the weights once, in __init__, and never again.",
    ),
)

EXERCISES = (SHARD, SCHEDULE, HUNT)
