"""Accumulate without changing the answer, fill a batch, and repair a loop that many copied."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labutils import accumulation, measure, planner, units
from labutils.teach.exercises import Exercise, Failed, Property

# ── accumulate ───────────────────────────────────────────────────────────────────────────────────


class _Words(nn.Module):
    """A tiny language model: enough to have tokens that count and tokens that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(11, 24, dtype=torch.float64),
            nn.Linear(24, 11, dtype=torch.float64),
        )
        with torch.no_grad():
            for k, parameter in enumerate(self.parameters()):
                parameter.copy_(
                    torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64)
                    .view_as(parameter)
                    .roll(3 * k + 1)
                )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(
            self.head(self.embed(inputs).tanh()).flatten(0, 1), targets.flatten()
        )


def _data(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of one row each, whose first `lengths` tokens count."""
    numbers = torch.arange(len(lengths) * 8).view(len(lengths), 8)
    inputs, targets = numbers * 7 % 11, numbers * numbers % 11
    beyond = torch.arange(8) >= torch.tensor(lengths)[:, None]
    targets = targets.masked_fill(beyond, accumulation.IGNORED)
    return list(zip(inputs.split(1), targets.split(1), strict=True))


def _gradient(net: nn.Module) -> Tensor:
    """The gradients that there are, one after the other."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def _taken(attempt: Callable, lengths: Sequence[int]) -> tuple[Any, Tensor, Tensor, Tensor]:
    """What the attempt returned and left in .grad; loss and gradient of the whole batch at once."""
    net, parts = _Words(), _data(lengths)
    inputs, targets = (torch.cat(side) for side in zip(*parts, strict=True))
    loss = net.loss((inputs, targets))
    loss.backward()
    expected = _gradient(net)
    net.zero_grad()
    value = attempt(net.loss, parts, weigh=accumulation.tokens)
    if any(parameter.grad is None for parameter in net.parameters()):
        raise Failed(
            f"{len(parts)} micro-batches: the parameters have no gradient afterwards",
            "Call backward() for every micro-batch; .grad adds them up by itself.",
        )
    return value, _gradient(net), loss.detach(), expected


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal up to shares that were rounded to fp32, as torch.tensor(share) does."""
    return bool((found - expected).norm() <= 2**-22 * expected.norm())


def _compare(attempt: Callable, lengths: Sequence[int], hint: str) -> None:
    _, found, _, expected = _taken(attempt, lengths)
    if _close(found, expected):
        return
    k, ratio = len(lengths), float(found.norm() / expected.norm())
    case = f"{k} micro-batches with {', '.join(map(str, lengths))} tokens that count"
    if torch.allclose(found, k * expected, rtol=1e-6):
        raise Failed(
            f"{case}: the gradient is exactly {k} times too large",
            "Each loss is a mean already: weigh it with its share before backward().",
        )
    off = float((found - expected).norm() / expected.norm())
    if off < 0.01:
        raise Failed(
            f"{case}: the gradient is off by {100 * off:.1g} %",
            "Is a share rounded, or in 16 bits? It needs the digits of an fp32 number.",
        )
    if torch.cosine_similarity(found, expected, dim=0) > 1 - 1e-9:
        raise Failed(
            f"{case}: the gradient points the right way and is {ratio:.3f} times too long",
            "A share is a number of tokens over that of the whole batch: divide by the sum.",
        )
    raise Failed(
        f"{case}: the gradient's norm is {ratio:.3f} times the right one, and it points elsewhere",
        hint,
    )


def _number(value: Any) -> Any:
    """A float of whatever one number is kept in; the value itself if it is none."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _equal(attempt: Callable) -> str:
    for k in (1, 2, 4):
        _compare(
            attempt, [8] * k, "With equal micro-batches the result is the mean of their gradients."
        )
    return "3 batches"


def _unequal(attempt: Callable) -> str:
    cases = [[8, 2], [1, 8, 8], [3, 7, 5, 1]]
    for lengths in cases:
        _compare(
            attempt,
            lengths,
            "1/k gives every micro-batch the same weight; its share is its number of tokens over "
            "that of the whole batch.",
        )
    return f"{len(cases)} batches"


def _weighed(attempt: Callable) -> str:
    """A loss that is a mean over rows: three of them, then one."""
    rows, net = _data([8, 2, 5, 3]), _Words()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        pairs = zip(*(side.split(1) for side in batch), strict=True)
        return torch.stack([net.loss(pair) for pair in pairs]).mean()

    def joined(part: list) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.cat(side) for side in zip(*part, strict=True))
        return inputs, targets

    loss(joined(rows)).backward()
    expected = _gradient(net)
    net.zero_grad()
    attempt(loss, [joined(rows[:3]), joined(rows[3:])], weigh=lambda batch: len(batch[0]))
    if not _close(_gradient(net), expected):
        raise Failed(
            "a loss that is a mean over sequences, 3 and 1 of them: the gradient is another",
            "What a mean is over, only `weigh` knows: ask it, and count nothing yourself.",
        )
    return "sequences instead of tokens"


def _empty(attempt: Callable) -> str:
    lengths = [5, 0, 3]
    _compare(attempt, lengths, "A micro-batch without targets carries no weight.")
    value, *_ = _taken(attempt, lengths)
    value = _number(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise Failed(
            f"3 micro-batches with 5, 0 and 3 tokens that count: the loss is {value}",
            "A micro-batch without a single target has the mean 0/0, and 0 times NaN is NaN. "
            "It carries no weight, so leave it out.",
        )
    return "5, 0 and 3 tokens"


def _most_activations(run: Callable[[nn.Module, list], Any], count: int) -> int:
    """Bytes of activations at their peak while `count` micro-batches of one row are learnt from."""
    net, parts = _Words(), _data([8] * count)
    history = measure.history(lambda: run(net, parts), net)
    return max(moment.ledger.only(component="activations").total for moment in history.moments)


def _flat(run: Callable[[nn.Module, list], Any]) -> str:
    few, many = _most_activations(run, 2), _most_activations(run, 8)
    inputs = 6 * 2 * 8 * 8  # the six more rows of tokens, which are there anyway
    numbers = 6 * 64  # counts, shares and losses, in whatever tensors they are
    if many > few + inputs + numbers:
        raise Failed(
            f"2 micro-batches hold {units.text(few)} of activations, 8 hold {units.text(many)}",
            "Adding up losses keeps all their graphs alive. Call backward() on each one at once: "
            "that frees its activations.",
        )
    return f"{units.text(few)}, however many micro-batches"


def _accumulates(attempt: Callable) -> str:
    return _flat(lambda net, parts: attempt(net.loss, parts, weigh=accumulation.tokens))


def _steps_flat(attempt: Callable) -> str:
    def run(net: nn.Module, parts: list) -> None:
        attempt(torch.optim.SGD(net.parameters(), lr=0.0), net.loss, parts, len(parts), 1e9)

    return _flat(run)


class _Counted:
    """A loss that counts how often it is asked."""

    def __init__(self, loss: Callable[[Any], Tensor]) -> None:
        self.loss, self.calls = loss, 0

    def __call__(self, batch: Any) -> Tensor:
        self.calls += 1
        return self.loss(batch)


def _once(attempt: Callable) -> str:
    loss = _Counted(_Words().loss)
    attempt(loss, _data([8, 2, 5]), weigh=accumulation.tokens)
    if loss.calls > 3:
        raise Failed(
            f"3 micro-batches: the loss was computed {loss.calls} times",
            "Every forward pass costs a third of the step: keep the number that the first one "
            "gave, detached.",
        )
    return "one forward pass for each"


def _value(attempt: Callable) -> str:
    value, _, loss, _ = _taken(attempt, [8, 2, 5])
    value = _number(value)
    # A number that passes through torch.tensor(…) is one of fp32.
    if not isinstance(value, float) or not math.isclose(value, float(loss), rel_tol=1e-6):
        raise Failed(
            f"returned {value!r}, the loss of the whole batch is {float(loss):.6f}",
            "Add up the weighted losses, detached, and return the sum.",
        )
    return "the loss of the whole batch"


ACCUMULATE = Exercise(
    id="accumulation/accumulate",
    reference=accumulation.accumulate,
    properties=(
        Property("equal micro-batches", _equal),
        Property("unequal token counts", _unequal),
        Property("a micro-batch without targets", _empty),
        Property("what weigh counts", _weighed),
        Property("memory", _accumulates),
        Property("the loss", _value),
        Property("work", _once),
    ),
    hints=(
        "You need the number of tokens of the whole batch before the first backward(): "
        "count first, [weigh(batch) for batch in batches].",
        "For each micro-batch: (loss(batch) * weight / total).backward(). Skip those of weight 0.",
        "Return the sum of part.detach(): nothing has to go backward from it any more.",
    ),
)

# ── a configuration ──────────────────────────────────────────────────────────────────────────────

_RUNS = [  # tokens in a batch, sequence length, GPUs, most sequences that fit
    (4_194_304, 4096, 128, 2),
    (4_194_304, 4096, 512, 2),
    (1_572_864, 2048, 64, 8),
    (1_572_864, 2048, 64, 7),
    (524_288, 1024, 8, 100),
    # shares of 16, 15 and 12, which no power of two and no rounding meets
    (131_072, 1024, 8, 3),
    (122_880, 1024, 8, 7),
    (98_304, 1024, 8, 5),
]


def batches_of(
    target: int, seq_len: int, gpus: int, fits: Callable[[int], bool]
) -> tuple[int, int]:
    """Micro-batch and accumulation steps for a batch of `target` tokens, a model on each GPU."""
    recipe = planner.configure(target=target, seq_len=seq_len, gpus=gpus, fits=fits)
    return recipe.train.micro_batch, recipe.train.accumulation(recipe.mesh.dp)


def _found(attempt: Callable, run: tuple[int, int, int, int]) -> tuple[int, int, str]:
    target, seq_len, gpus, limit = run
    case = (
        f"{target:,} tokens in sequences of {seq_len:,} on {gpus} GPUs, at most {limit} at a time"
    )
    answer = attempt(target, seq_len, gpus, lambda b: b <= limit)
    try:
        micro, steps = map(operator.index, answer)
    except (TypeError, ValueError):
        said = "Return two whole numbers: (micro_batch, steps). Divide by //."
        raise Failed(f"{case}: you returned {answer!r}", said) from None
    return micro, steps, case


def _tokens(attempt: Callable) -> str:
    for run in _RUNS:
        micro, steps, case = _found(attempt, run)
        target, seq_len, gpus, _ = run
        found = micro * steps * gpus * seq_len
        if found == target * gpus:
            raise Failed(
                f"{case}: {micro} · {steps} · {gpus} · {seq_len:,} = {found:,} tokens, "
                f"{gpus} times too many",
                "Every GPU takes its own sequences: gbs = mbs · ga · dp, so divide by the number "
                "of GPUs as well.",
            )
        if found != target:
            raise Failed(
                f"{case}: {micro} · {steps} · {gpus} · {seq_len:,} = {found:,} tokens in a batch",
                "The micro-batch must divide each GPU's share of the batch: else the last one is "
                "short, and the batch has fewer tokens or more than you want.",
            )
    return f"{len(_RUNS)} runs"


def _fits(attempt: Callable) -> str:
    for run in _RUNS:
        micro, _, case = _found(attempt, run)
        if micro > run[3]:
            raise Failed(
                f"{case}: a micro-batch of {micro} does not fit",
                "fits(b) says whether b sequences fit at once: ask it.",
            )
    return f"{len(_RUNS)} runs"


def _steps(attempt: Callable) -> str:
    for run in _RUNS:
        micro, steps, case = _found(attempt, run)
        best = batches_of(*run[:3], functools.partial(operator.ge, run[3]))
        if (micro, steps) != best:
            raise Failed(
                f"{case}: {steps} steps of {micro}, where {best[1]} of {best[0]} do",
                "Small micro-batches leave the GPU idle between kernels: "
                "take the largest that fits and divides the share.",
            )
    return f"{len(_RUNS)} runs"


CONFIGURE = Exercise(
    id="accumulation/configure",
    reference=batches_of,
    properties=(
        Property("tokens in the batch", _tokens),
        Property("memory", _fits),
        Property("fewest steps", _steps),
    ),
    hints=(
        "Sequences in the batch: tokens / sequence length. Sequences for each GPU, its share: "
        "that / GPUs.",
        "micro_batch · steps = share. So micro_batch is a divisor of the share.",
        "max(b for b in range(1, share + 1) if share % b == 0 and fits(b))",
    ),
)

# ── a loop to repair ─────────────────────────────────────────────────────────────────────────────

_NORM = 0.2


def _trained(
    attempt: Callable, count: int, k: int, max_norm: float, epochs: int = 1
) -> tuple[Any, Tensor]:
    net = _Words()
    groups = [{"params": list(part.parameters())} for part in net.children()]
    optimizer, loss = torch.optim.SGD(groups, lr=1.0), _Counted(net.loss)
    steps = 0

    def count_step(*_: Any) -> None:
        nonlocal steps
        steps += any(p.grad is not None for group in groups for p in group["params"])

    optimizer.register_step_pre_hook(count_step)
    taken = [attempt(optimizer, loss, iter(_data([8] * count)), k, max_norm) for _ in range(epochs)]
    if loss.calls < count * epochs:
        raise Failed(
            f"{count} micro-batches, {k} to a step: the loss was computed "
            f"{loss.calls / epochs:g} times",
            "Every micro-batch goes forward and backward once, the last ones too.",
        )
    if count % k == 0 and steps == epochs * (count // k + 1):
        raise Failed(
            f"{count} micro-batches, {k} to a step: the optimizer stepped {steps / epochs:g} times",
            "Nothing is left after the last full step. One more, with gradients of 0, moves the "
            "weights where there is momentum or weight decay: step for a rest only if there is "
            "one.",
        )
    return taken[-1], torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def _same(
    attempt: Callable, count: int, k: int, max_norm: float, hint: str, epochs: int = 1
) -> str:
    _, found = _trained(attempt, count, k, max_norm, epochs)
    _, expected = _trained(accumulation.epoch, count, k, max_norm, epochs)
    # clip_grad_norm_ adds 1e-6 to the norm; clipping by hand need not.
    off = float((found - expected).norm() / (expected - _start()).norm())
    if not off < 1e-5:
        where = f" over {epochs} epochs" if epochs > 1 else ""
        percent = f"{100 * off:.2g}" if off < 1 else f"{100 * off:.0f}"
        raise Failed(
            f"{count} micro-batches, {k} to a step{where}: the update is off by {percent} %", hint
        )
    return f"{count} micro-batches, {k} to a step"


def _start() -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in _Words().parameters()])


def _full(attempt: Callable) -> str:
    start = _start()
    (steps, found), (_, expected) = (
        _trained(how, 4, 4, 1e9) for how in (attempt, accumulation.epoch)
    )
    if float((found - start).norm()) > 1e6 * float((expected - start).norm()):
        raise Failed(
            "max_norm is 1e9, and the gradient became as long as that",
            "Clipping shortens what is too long, and leaves the rest: a factor of at most 1.",
        )
    if steps == 4:
        raise Failed(
            "4 micro-batches, 4 to a step: 4 steps of the optimizer",
            "Gradients add up over k micro-batches; the optimizer steps after the last of them.",
        )
    if torch.allclose(found - start, 4 * (expected - start), rtol=1e-6):
        raise Failed(
            "4 micro-batches, 4 to a step: the step is exactly 4 times too long",
            "Each loss is a mean, and backward() adds: divide by the number of micro-batches in "
            "the step.",
        )
    return _same(
        attempt,
        8,
        4,
        1e9,
        "Steps that follow each other must not share gradients: clear them after every optimizer "
        "step, not before every micro-batch.",
    )


def _all_used(attempt: Callable) -> str:
    for count, k in ((5, 4), (7, 3), (2, 4), (8, 4)):
        taken, _ = _trained(attempt, count, k, 1e9)
        if taken is None:
            raise Failed("you returned None", "Return the number of optimizer steps.")
        if taken != math.ceil(count / k):
            raise Failed(
                f"{count} micro-batches, {k} to a step: {taken} steps instead of "
                f"{math.ceil(count / k)}",
                "What is left after the last full step never reaches the optimizer. "
                "Step once more for it."
                if taken == count // k
                else "A step needs a new gradient, and a number to return that counts steps.",
            )
        if count % k == 0:
            continue
        hint = (
            f"The last step has {count % k} micro-batch{'es' * (count % k > 1)}, not {k}: "
            "their mean has another denominator."
        )
        _same(attempt, count, k, 1e9, hint)
    return "3 epochs with a short last step"


def _clips(attempt: Callable) -> str:
    start = _start()
    moved, right = (
        _trained(how, 4, 4, _NORM)[1] - start for how in (attempt, accumulation.epoch)
    )
    ratio = float(moved.norm() / right.norm())
    if abs(ratio - 1) > 1e-5 and torch.cosine_similarity(moved, right, dim=0) > 1 - 1e-9:
        raise Failed(
            f"4 micro-batches, 4 to a step, clipped to {_NORM}: the gradient has the right "
            f"direction and {ratio:.3g} times the length",
            "Clip once, after the last micro-batch: the mean of the step, not a sum, by the "
            "Euclidean norm of all parameters together.",
        )
    _same(
        attempt,
        8,
        4,
        _NORM,
        "Clip once, after the last micro-batch of a step, by the norm of all parameters together: "
        "clipping a part changes the direction.",
    )
    return _same(
        attempt, 5, 4, _NORM, "A short step is clipped, too: take its own mean first, then clip."
    )


_LEFT = "Gradients from the end of one epoch are still there at the start of the next."

REPAIR = Exercise(
    id="accumulation/bug-hunt",
    untouched="38420988",
    reference=accumulation.epoch,
    properties=(
        Property("full steps", _full),
        Property("every micro-batch counts", _all_used),
        Property("clipping", _clips),
        Property(
            "epochs do not touch", _same, count=5, k=4, max_norm=1e9, hint=_LEFT, epochs=2
        ),
        Property("memory", _steps_flat),
    ),
    hints=(
        "Run it on paper with 5 micro-batches and k = 4. How many reach the optimizer? "
        "Where does the gradient of the fifth go?",
        "Cut the epoch into groups first: batches[start : start + k]. The last one may be short, "
        "so divide by the length of the group.",
        "Clip after the inner loop, step, zero_grad. Or let accumulation.step do all of it for a "
        "group.",
    ),
)

EXERCISES = (ACCUMULATE, CONFIGURE, REPAIR)
