"""Wrong answers to the exercises of `accumulation`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labutils.teach.exercises import accumulation as exercises
from wrong_answers import Wrong


def _weighted(weight: Callable[[int, int, int], float], *, together: bool = False) -> Callable:
    """Accumulation with weight(tokens here, tokens in all, micro-batches) on each loss."""

    def attempt(loss: Callable, batches: Sequence[Any], weigh: Callable) -> Tensor:
        counts = [weigh(batch) for batch in batches]
        parts = [
            (batch, weight(count, sum(counts), len(counts)))
            for batch, count in zip(batches, counts, strict=True)
        ]
        if together:
            whole = torch.stack([loss(batch) * share for batch, share in parts if share]).sum()
            whole.backward()
            return whole.detach()
        total = torch.zeros((), dtype=torch.float64)
        for batch, share in parts:
            part = loss(batch) * share
            part.backward()
            total += part.detach()
        return total

    return attempt


def _own_count(loss: Callable, batches: Sequence[Any], weigh: Callable) -> Tensor:
    """Counts targets itself, whatever the loss is a mean over."""
    return _weighted(lambda here, total, k: here / total if here else 0.0)(
        lambda batch: loss(batch) if int((batch[1] != -100).sum()) else loss(batch).nan_to_num(),
        batches,
        lambda batch: int((batch[1] != -100).sum()),
    )


def _rounded_up(
    target: int, seq_len: int, gpus: int, fits: Callable[[int], bool]
) -> tuple[int, int]:
    share = target // seq_len // gpus
    most = max(size for size in range(1, share + 1) if fits(size))
    steps = -(-share // most)
    return share // steps, steps


def _halved(target: int, seq_len: int, gpus: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    micro, steps = target // seq_len // gpus, 1
    while not fits(micro):
        micro, steps = micro // 2, 2 * steps
    return micro, steps


def _by_hand(clip: Callable[[Any, float], None], *, together: bool = False) -> Callable:
    """The right loop, with a clipping of its own; `together`: one graph for the losses of a step."""

    def attempt(
        optimizer: torch.optim.Optimizer,
        loss: Callable,
        batches: Iterable[Any],
        k: int,
        max_norm: float,
    ) -> int:
        batches = list(batches)
        groups = [batches[start : start + k] for start in range(0, len(batches), k)]
        for group in groups:
            if together:
                torch.stack([loss(batch) for batch in group]).mean().backward()
            else:
                for batch in group:
                    (loss(batch) / len(group)).backward()
            clip(optimizer, max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return len(groups)

    return attempt


def _always(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([p.grad.norm() for p in weights]).norm()
    for p in weights:
        p.grad *= max_norm / norm


def _all(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], max_norm
    )


def _first_group(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


def _each_alone(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            nn.utils.clip_grad_norm_([p], max_norm)


def _sum_first(optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float) -> int:
    """Clips the sum of a step, and divides what is left of it."""
    return _by_hand(lambda optimizer, most: _divided(optimizer, most, k))(
        optimizer, lambda batch: k * loss(batch), batches, k, most
    )


def _divided(optimizer: torch.optim.Optimizer, max_norm: float, by: int) -> None:
    _all(optimizer, max_norm)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad /= by


def _stretched(optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float) -> int:
    """Divides by k, clips, and only then stretches the short step."""
    batches, steps = list(batches), 0
    for start in range(0, len(batches), k):
        group = batches[start : start + k]
        for batch in group:
            (loss(batch) / k).backward()
        _divided(optimizer, most, 1)
        if len(group) < k:
            _divided(optimizer, 1e9, len(group) / k)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def _at_least_one(loss: Callable, batches: Sequence[Any], weigh: Callable) -> Tensor:
    """A batch without a token counts as one, so that nothing is divided by 0."""
    counts = [max(1, weigh(batch)) for batch in batches]
    whole = torch.zeros(())
    for batch, count in zip(batches, counts, strict=True):
        part = loss(batch).nan_to_num() * count / sum(counts)
        part.backward()
        whole += part.detach()
    return whole


def _joined(batches: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(side) for side in zip(*batches, strict=True))


def _backward(loss: Tensor) -> float:
    loss.backward()
    return loss.item()


def _largest_that_fits(
    target: int, seq_len: int, gpus: int, fits: Callable[[int], bool]
) -> tuple[int, int]:
    share = target // seq_len // gpus
    micro = max(size for size in range(1, share + 1) if fits(size))
    return micro, share // micro


def _without_the_gpus(
    target: int, seq_len: int, gpus: int, fits: Callable[[int], bool]
) -> tuple[int, int]:
    return exercises.batches_of(target, seq_len, 1, fits)


def _loop(
    *, clip_inside: bool = False, tail: str = "right", clear: bool = True, mean: bool = True
) -> Callable:
    """The loop of many tutorials, with its slips switched on one at a time."""

    def attempt(
        optimizer: torch.optim.Optimizer,
        loss: Callable,
        batches: Iterable[Any],
        k: int,
        max_norm: float,
    ) -> int:
        batches, taken = list(batches), 0
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for i, batch in enumerate(batches):
            here = min(k, len(batches) - i // k * k) if tail == "right" else k
            (loss(batch) / (here if mean else 1)).backward()
            if clip_inside:
                nn.utils.clip_grad_norm_(weights, max_norm)
            if (i + 1) % k == 0 or (tail != "dropped" and i + 1 == len(batches)):
                if not clip_inside:
                    nn.utils.clip_grad_norm_(weights, max_norm)
                optimizer.step()
                if clear:
                    optimizer.zero_grad()
                taken += 1
        return taken

    return attempt


def _one_for_the_rest(*, counted: bool) -> Callable:
    """A last step also where nothing is left, counted or not."""

    def attempt(
        optimizer: torch.optim.Optimizer,
        loss: Callable,
        batches: Iterable[Any],
        k: int,
        max_norm: float,
    ) -> int:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        batches = list(batches)

        def step() -> None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=counted)

        for i, batch in enumerate(batches):
            (loss(batch) / min(k, len(batches) - i // k * k)).backward()
            if (i + 1) % k == 0:
                step()
        step()
        return len(batches) // k + 1 if counted else -(-len(batches) // k)

    return attempt


def _by_the_largest(
    optimizer: torch.optim.Optimizer, loss: Callable, batches: Iterable[Any], k: int, most: float
) -> int:
    """Clips by the largest number of the gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    batches, steps = list(batches), 0
    for start in range(0, len(batches), k):
        group = batches[start : start + k]
        for batch in group:
            (loss(batch) / len(group)).backward()
        nn.utils.clip_grad_norm_(parameters, most, norm_type=float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def _silent(*args: Any) -> None:
    _loop()(*args)


def _dirty(optimizer: Any, loss: Callable, batches: Iterable[Any], *how: Any) -> int:
    """Evaluates once more after the last step, and leaves what that adds."""
    batches = list(batches)
    taken = _loop()(optimizer, loss, batches, *how)
    loss(batches[-1]).backward()
    return taken


def _steps_always(optimizer, loss, batches, k, max_norm):
    steps = 0
    for steps, batch in enumerate(batches, 1):
        loss(batch).backward()
        _all(optimizer, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return steps


def _rounded_shares(loss: Callable, batches: Sequence[Any], weigh: Callable) -> float:
    total, whole = sum(map(weigh, batches)), 0.0
    for batch in batches:
        if weigh(batch):
            part = loss(batch) * round(weigh(batch) / total, 4)
            part.backward()
            whole += part.item()
    return whole


WRONG = {
    "accumulation/accumulate": (
        Wrong(
            "no fraction at all",
            _weighted(lambda here, total, k: 1.0),
            "equal micro-batches",
            "weigh it with its share",
        ),
        Wrong(
            "a mean of means",
            _weighted(lambda here, total, k: 1 / k),
            "unequal token counts",
            "its number of tokens over that of the whole batch",
        ),
        Wrong(
            "a sum over tokens",
            _weighted(lambda here, total, k: float(here)),
            "equal micro-batches",
            "divide by the sum",
        ),
        Wrong(
            "shares of four digits",
            _rounded_shares,
            "unequal token counts",
            "Is a share rounded",
        ),
        Wrong(
            "0/0 kept",
            _weighted(lambda here, total, k: here / total),
            "a micro-batch without targets",
            "the mean 0/0",
        ),
        Wrong(
            "no tokens counted as one",
            _at_least_one,
            "a micro-batch without targets",
            "that of the whole batch",
        ),
        Wrong(
            "all rows in one batch",
            lambda loss, batches, weigh: _backward(loss(_joined(batches))),
            "memory",
            "on each one at once",
        ),
        Wrong("tokens counted, not asked for", _own_count, "what weigh counts", "ask it"),
        Wrong(
            "one backward for all",
            _weighted(lambda here, total, k: here / total, together=True),
            "memory",
            "keeps all their graphs alive",
        ),
    ),
    "accumulation/configure": (
        Wrong("steps rounded up", _rounded_up, "tokens in the batch", "must divide"),
        Wrong("halved until it fits", _halved, "tokens in the batch", "must divide"),
        Wrong("GPUs forgotten", _without_the_gpus, "tokens in the batch", "gbs = mbs · ga · dp"),
        Wrong(
            "a micro-batch that does not divide",
            _largest_that_fits,
            "tokens in the batch",
            "must divide",
        ),
        Wrong(
            "one sequence at a time",
            lambda t, s, g, fits: (1, t // s // g),
            "fewest steps",
            "the largest that fits",
        ),
        Wrong(
            "a divisor of all sequences",
            lambda t, s, g, fits: (
                (b := max(b for b in range(1, t // s + 1) if t // s % b == 0 and fits(b))),
                t // s // b // g,
            ),
            "tokens in the batch",
            "each GPU's share",
        ),
        Wrong(
            "a float of steps",
            lambda t, s, g, fits: (exercises.batches_of(t, s, g, fits)[0], 4.0),
            "tokens in the batch",
            "two whole numbers",
        ),
        Wrong("all at once", lambda t, s, g, fits: (t // s // g, 1), "memory", "ask it"),
        Wrong(
            "true division",
            lambda t, s, g, fits: (1, t / s / g),
            "tokens in the batch",
            "two whole numbers",
        ),
    ),
    "accumulation/bug-hunt": (
        Wrong(
            "clipped by the largest",
            _by_the_largest,
            "clipping",
            "by the Euclidean norm",
        ),
        Wrong(
            "counts a step for no rest",
            _one_for_the_rest(counted=True),
            "every micro-batch counts",
            "counts steps",
        ),
        Wrong(
            "a step with gradients of 0",
            _one_for_the_rest(counted=False),
            "full steps",
            "only if there is",
        ),
        Wrong(
            "the published loop",
            _loop(clip_inside=True, tail="dropped", mean=False),
            "full steps",
            "backward() adds",
        ),
        Wrong("a step for every micro-batch", _steps_always, "full steps", "after the last of them"),
        Wrong(
            "the tail dropped",
            _loop(tail="dropped"),
            "every micro-batch counts",
            "never reaches the optimizer",
        ),
        Wrong(
            "a short step divided by k",
            _loop(tail="short"),
            "every micro-batch counts",
            "another denominator",
        ),
        Wrong("no number returned", _silent, "every micro-batch counts", "number of optimizer"),
        Wrong("clipped at every micro-batch", _loop(clip_inside=True), "clipping", "Clip once"),
        Wrong("the sum of a step clipped", _sum_first, "clipping", "not a sum"),
        Wrong("a short step stretched after it was clipped", _stretched, "clipping", "then clip"),
        Wrong("not clipped", _by_hand(lambda *_: None), "clipping", "right direction"),
        Wrong("made as long as max_norm", _by_hand(_always), "full steps", "at most 1"),
        Wrong("the first group clipped", _by_hand(_first_group), "clipping", "Clip once"),
        Wrong("each parameter clipped alone", _by_hand(_each_alone), "clipping", "Clip once"),
        Wrong(
            "one graph for a step",
            _by_hand(_all, together=True),
            "memory",
            "keeps all their graphs alive",
        ),
        Wrong(
            "the last gradients of an epoch left",
            _dirty,
            "epochs do not touch",
            "still there at the start",
        ),
        Wrong(
            "gradients never cleared",
            _loop(clear=False),
            "full steps",
            "clear them after every optimizer step",
        ),
    ),
}
