"""Split a feed-forward layer, take a loss from a share of the logits, and repair a layer of
sequence parallelism whose outputs are right."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labutils import collectives, tensor_parallel, world
from labutils.teach.exercises import Exercise, Failed, Property, _ranks

_SAME_CALLS = "All ranks must make the same collective calls in the same order, backward too."
_NO_GRADIENT = (
    "Autograd does not see through comm.all_reduce: what it returns has no history. Write f and g "
    "as autograd Functions, each with a backward of its own."
)
Parts = dict[str, Tensor | None]


def _near(found: Tensor | None, right: Tensor) -> bool:
    return (
        found is not None
        and found.shape == right.shape
        and torch.allclose(found.double(), right, rtol=1e-8, atol=1e-11)
    )


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _sum_of(op: str, numel: int, n: int) -> int:
    """Bytes that the busiest rank sends in an operation on so many numbers of eight bytes."""
    cost = collectives.sent(f"{op}_ring", nbytes=8 * numel, n=n, itemsize=8)
    return max(cost.by("rank").values(), default=0)


def _busiest(n: int) -> int:
    return max(_ranks.world_of(n).ledger.by("rank").values(), default=0)


def _tensor(y: Any, case: str, shape: tuple[int, ...]) -> Tensor:
    """What an attempt returned, if it is a tensor of that shape with a history."""
    if not isinstance(y, Tensor) or tuple(y.shape) != shape:
        got = f"shape {list(y.shape)}" if isinstance(y, Tensor) else repr(y)
        raise Failed(f"{case}: got {got}", f"Return a tensor of shape {list(shape)}.")
    return y


_STATISTICS = {"native_layer_norm", "mean", "var", "var_mean", "std", "std_mean"}


class _Work(TorchDispatchMode):
    """FLOPs of matrix products on this thread, bytes that autograd keeps beside parameters, and the
    most numbers of which a mean or a variance is taken at once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.flops, self.kept, self.module = 0, dict[int, int](), module
        self.normed = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        if func.overloadpacket.__name__ in _STATISTICS:
            self.normed = max(self.normed, args[0].numel())
        return out

    def _keep(self, x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in {p.untyped_storage().data_ptr() for p in self.module.parameters()}:
            self.kept[place] = x.untyped_storage().nbytes()
        return x

    def __enter__(self) -> "_Work":
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hooks.__exit__(*error)


# ── a feed-forward layer, whole or split ──────────────────────────────────────────────────────────

_B, _S, _H, _F = 2, 12, 6, 24


class _Layer(nn.Module):
    """The whole layer on one device: the norm and the residual stream for 10.3 alone."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_H) if normed else nn.Identity()
        self.up, self.down = nn.Linear(_H, _F), nn.Linear(_F, _H)
        self.normed = normed
        self.double()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = _draw(seed, *parameter.shape) / 2 + (parameter.dim() == 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.normed else y


def _passed(layer: nn.Module, forward: Callable, x: Tensor, of_y: Tensor) -> Parts:
    """Output of `forward`, and gradients of the input and of each parameter of the layer."""
    x = x.clone().requires_grad_()
    y = forward(x)
    if y.requires_grad:
        y.backward(of_y)
    found: Parts = {"y": y.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}


def _step(layer: nn.Module) -> None:
    """Gives the layer other weights, as an optimizer's step, and clears its gradients."""
    layer.zero_grad()
    for parameter in layer.parameters():
        parameter.data.mul_(1.25)


class _Seen:
    """What came of an attempt on every rank, beside the whole layer and this rank's part of it.

    again: of a second pass, after the weights were stepped, with x added to what comes out
    """

    def __init__(self, attempt: Callable, n: int, normed: bool, again: bool = False) -> None:
        self.n, self.case, self.normed, self.again = n, _ranks.count(n), normed, again
        x, of_y = _draw(50, _B, _S, _H), _draw(51, _B, _S, _H)
        self.layer = whole = _Layer(normed)
        self.of_y, past = of_y, again and not normed
        if again:
            self.case += ", a second pass"
            whole = deepcopy(self.layer)
            _step(whole)
        right = _passed(whole, lambda x: whole(x) + x * past, x, of_y)
        self.right = {name: part for name, part in right.items() if part is not None}
        program = self._tokens if normed else self._columns
        self.work: dict[int, _Work] = {}
        self.ranks = _ranks.run(
            n, self.case, lambda rank: program(attempt, rank, x, of_y), _SAME_CALLS
        )
        self.sent = _busiest(n)

    def _columns(self, attempt: Callable, rank: world.Rank, x: Tensor, of_y: Tensor) -> Parts:
        mine, comm = deepcopy(self.layer), rank.comm("dp")

        def forward(x: Tensor) -> Tensor:
            y = _tensor(attempt(x, mine.up, mine.down, comm), self.case, (_B, _S, _H))
            return x + y if self.again else y

        if self.again:
            _passed(mine, forward, x.flip(0), of_y)
            _step(mine)
            return _passed(mine, forward, x, of_y)
        with _Work(mine) as self.work[rank.rank]:
            return _passed(mine, forward, x, of_y)

    def _tokens(self, attempt: Callable, rank: world.Rank, x: Tensor, of_y: Tensor) -> Parts:
        mine, comm, i = deepcopy(self.layer), rank.comm("dp"), rank.rank
        mine.up.weight = nn.Parameter(mine.up.weight.detach().chunk(self.n, 0)[i].clone())
        mine.up.bias = nn.Parameter(mine.up.bias.detach().chunk(self.n, 0)[i].clone())
        mine.down.weight = nn.Parameter(mine.down.weight.detach().chunk(self.n, 1)[i].clone())
        shape = (_B, _S // self.n, _H)

        def forward(x: Tensor) -> Tensor:
            return _tensor(attempt(x, mine.norm, mine.up, mine.down, comm), self.case, shape)

        x, of_y = (side.chunk(self.n, 1)[i] for side in (x, of_y))
        if self.again:
            _passed(mine, forward, x.flip(0), of_y)
            _step(mine)
        with _Work(mine) as self.work[rank.rank]:
            return _passed(mine, forward, x, of_y)

    def share(self, name: str, i: int) -> Tensor:
        """What rank i should have of a tensor under sequence parallelism."""
        whole, dims = self.right[name], {"y": 1, "x": 1, "up.weight": 0, "up.bias": 0}
        dims["down.weight"] = 1
        return whole.chunk(self.n, dims[name])[i] if name in dims else whole


@_ranks.Remembered
def _seen(attempt: Callable, n: int, normed: bool) -> _Seen:
    """One run that all properties of a check ask for; the first of them forgets older ones."""
    return _Seen(attempt, n, normed)


_TIMES = {2: "twice", 3: "three times", 4: "four times"}


def _output(attempt: Callable, normed: bool) -> str:
    _seen.cache_clear()
    for n in (1, 2, 3, 4):
        seen = _seen(attempt, n, normed)
        for i, found in enumerate(seen.ranks):
            right = seen.share("y", i) if normed else seen.right["y"]
            if _near(found["y"], right):
                continue
            if torch.allclose(found["y"].double(), right, rtol=1e-5, atol=1e-5):
                raise Failed(
                    f"{seen.case}: the output on rank {i} is right to a few digits",
                    f"x is of {right.dtype}, and something is rounded to fewer digits. Compute, "
                    "sum and return in the dtype of x, and take F.gelu as it is.",
                )
            off, bias = found["y"] - right, seen.layer.down.bias.detach()
            where = f"{seen.case}: the output on rank {i} is wrong"
            if n > 1 and _near(off, (n - 1) * bias.expand_as(off)):
                raise Failed(
                    f"{where} by {n - 1} times the bias of `down`",
                    f"Every rank added the bias, and the sum has it {_TIMES[n]}. "
                    "Add it once, after the sum.",
                )
            parts = not normed and _near(sum(each["y"] - bias for each in seen.ranks) + bias, right)
            if n > 1 and (parts or not seen.sent):
                raise Failed(
                    f"{where}: it is a part of the sum"
                    if parts
                    else f"{where}, and nothing is sent",
                    "Each rank has a part of the sum over f: the ranks must add their parts up.",
                )
            if _near(-off, bias.expand_as(off)):
                once = "Nobody adds it. Add it once, after the sum."
                raise Failed(f"{where} by the bias of `down`", once)
            if n == 1:
                raise Failed(
                    where,
                    "On one rank nothing is cut and nothing is sent: return what the whole layer "
                    "does, GELU and both biases included, in the dtype of x."
                    + " And x itself is added to it." * normed,
                )
            raise Failed(
                where,
                "`up` is cut by its outputs (rows of its weight, and its bias), `down` by its "
                "inputs (columns of its weight). GELU works on each of the f numbers alone; "
                "GELU of a part of a sum is no part of anything.",
            )
    return "1, 2, 3 and 4 ranks"


def _input_gradient(attempt: Callable) -> str:
    for n in (2, 3, 4):
        seen = _seen(attempt, n, False)
        right, alike = seen.right["x"], True
        for i, found in enumerate(seen.ranks):
            where = f"{seen.case}: the gradient of x on rank {i}"
            if found["x"] is None:
                raise Failed(f"{where} never comes", _NO_GRADIENT)
            alike = alike and _near(found["x"], right)
            if _near(found["x"], n * right):
                raise Failed(
                    f"{where} is {n} times too large",
                    "A sum passes its gradient on as it is: each rank has the gradient of the sum "
                    "already. An all-reduce in the backward pass of g counts it n times.",
                )
        if not alike and all(_near(n * found["x"], right) for found in seen.ranks):
            raise Failed(
                f"{seen.case}: the gradient of x is {n} times too small on every rank",
                "A sum passes its gradient on as it is, and f sums those of all ranks: nothing is "
                "to be divided, neither in the backward pass of g nor in that of f.",
            )
        if not alike and _near(sum(found["x"] for found in seen.ranks), right):
            raise Failed(
                f"{seen.case}: each rank has only its own part of the gradient of x",
                "All ranks read x, so its gradient is a sum over ranks: the backward pass of f is "
                "an all-reduce. Without it the layers below learn from a part.",
            )
        if not alike:
            raise Failed(
                f"{seen.case}: the gradient of x is wrong",
                "f passes x on, and sums its gradient; g sums y, and passes its gradient on.",
            )
    return "whole on every rank"


def _weight_gradients(attempt: Callable) -> str:
    for n in (2, 4):
        seen = _seen(attempt, n, False)
        for name in ("up.weight", "up.bias", "down.weight"):
            whole = seen.right[name]
            shares = [found[name] for found in seen.ranks]
            total = sum((g for g in shares if g is not None), torch.zeros_like(whole))
            if all(g is None for g in shares):
                raise Failed(
                    f"{seen.case}: no gradient comes to {name}",
                    "A copy is another leaf: nn.Parameter(…), .data, detach() and from_full keep "
                    "the gradient to themselves. Use a view, such as up.weight.chunk(n)[i].",
                )
            if not _near(total, whole):
                many = _near(total, n * whole)
                raise Failed(
                    f"{seen.case}: over all ranks, the gradient of {name} is not the whole one",
                    "Every rank computed everything: each shall use its share of the f columns."
                    if many
                    else "Each rank has the gradient of its share, and zeros elsewhere.",
                )
        _bias_gradient(seen, [found["down.bias"] for found in seen.ranks])
    return "of each rank's share; of the bias on every rank"


def _bias_gradient(seen: _Seen, found: list[Tensor | None]) -> None:
    whole = seen.right["down.bias"]
    for i, mine in enumerate(found):
        if _near(mine, whole):
            continue
        part = mine is not None and _near(mine * seen.n, whole)
        raise Failed(
            f"{seen.case}: the gradient of the bias of `down` on rank {i} is "
            + (f"{seen.n} times too small" if part else "not that of the whole layer"),
            "All ranks hold this bias and each steps it: what one rank adds, or a part that each "
            "adds, is right in the output only. Add all of it on every rank, after the sum.",
        )


def _second(attempt: Callable, normed: bool) -> str:
    """A pass in a model: after another one, and x goes past the layer as well."""
    for n in (2, 3):
        seen = _Seen(attempt, n, normed, again=True)
        for i, found in enumerate(seen.ranks):
            if not normed and found["x"] is not None:
                off = found["x"] - seen.right["x"]
                if _near(off, (n - 1) * seen.of_y):
                    raise Failed(
                        f"{_ranks.count(n)}, x + y: what goes past the layer is counted {n} times "
                        "in the gradient of x",
                        "In a model x goes on along the residual stream, too. A hook of x itself "
                        "sums all that comes back to x; f stands before the layer alone: hook a "
                        "tensor of its own, x.view_as(x), or write a Function.",
                    )
            for name in seen.right:
                whole = seen.right[name]
                if normed:
                    right, mine = seen.share(name, i), found[name]
                elif name in ("y", "x", "down.bias"):
                    right, mine = whole, found[name]
                else:  # shares, wherever they stand
                    grads = [each[name] for each in seen.ranks]
                    right, mine = whole, sum((g for g in grads if g is not None), 0 * whole)
                if _near(mine, right):
                    continue
                what = {"y": "the output", "x": "the gradient of x"}
                said = what.get(name, f"the gradient of {name}")
                raise Failed(
                    f"{seen.case}: {said} on rank {i} is wrong, in the first pass it was right",
                    "Something stays behind from the first pass: a hook of a parameter is there "
                    "for good, so each pass adds one more and the gradient is summed again. "
                    "Hook a tensor of this pass (parameter.view_as(parameter)), or use copy_to. "
                    "Keep no shares of weights either: an optimizer has stepped them.",
                )
    return "after a first one, with other weights"


def _split_work(attempt: Callable) -> str:
    for n in (2, 4):
        seen, tokens = _seen(attempt, n, False), _B * _S
        due = 3 * 2 * 2 * tokens * _H * _F // n  # two products; backward two for each
        most = 8 * tokens * (3 * _H + 4 * _F // n)  # GELU may be written out
        for rank, work in sorted(seen.work.items()):
            if work.flops > due * 4 // 3:  # the forward pass may be computed again
                raise Failed(
                    f"{seen.case}: rank {rank} spends {work.flops:,} FLOPs on products, its share "
                    f"of the two layers takes {due:,}",
                    "A rank computes its own columns of `up`: cut the weight (and its bias), not "
                    "what the whole weight has given.",
                )
            if (kept := sum(work.kept.values())) > most:
                raise Failed(
                    f"{seen.case}: rank {rank} keeps {kept:,} B for its backward pass, "
                    f"{most:,} B are plenty",
                    "Of what lies between the two products a rank needs its f/n columns, and no "
                    "zeros in the place of others'.",
                )
    return "an n-th of the FLOPs and of what is kept between"


def _split_bytes(attempt: Callable) -> str:
    for n in (2, 4):
        seen = _seen(attempt, n, False)
        most = 2 * _sum_of("all_reduce", _B * _S * _H, n)
        # The bias may go into the sum, as long as its gradient is summed too: h numbers more.
        if seen.sent > most + _sum_of("all_reduce", _H, n):
            raise Failed(
                f"{seen.case}: the busiest rank sends {seen.sent:,} B, "
                f"two all-reduces of b·s·h numbers are {most:,} B",
                "Between the two products nothing has to travel: what GELU gives for a rank's "
                "columns is what that rank's part of `down` reads. The parts behind `down` are "
                "summed by one comm.all_reduce; to gather them all, or to sum on one rank and "
                "broadcast, sends more.",
            )
    return "an all-reduce of b·s·h numbers each way"


def _reference_split(x: Tensor, up: nn.Linear, down: nn.Linear, comm: world.Comm) -> Tensor:
    """The library's functions, on shares that are views of the whole weights."""
    n, i = comm.size, comm.rank
    x = tensor_parallel.copy_to(x, comm)
    inner = F.gelu(F.linear(x, up.weight.chunk(n)[i], up.bias.chunk(n)[i]))
    y = F.linear(inner, down.weight.chunk(n, dim=1)[i])
    return tensor_parallel.reduce_from(y, comm) + down.bias


SPLIT = Exercise(
    id="tensor_parallel/feed-forward",
    reference=_reference_split,
    properties=(
        Property("the output", _output, normed=False),
        Property("the gradient of the input", _input_gradient),
        Property("the gradients of the weights", _weight_gradients),
        Property("a second pass, in a residual stream", _second, normed=False),
        Property("its share of the work", _split_work),
        Property("bytes sent", _split_bytes),
    ),
    hints=(
        "Rank i uses up.weight.chunk(n)[i], up.bias.chunk(n)[i] and "
        "down.weight.chunk(n, dim=1)[i]. The bias of `down` comes once, after the sum.",
        "f: forward returns x.view_as(x), backward returns comm.all_reduce(grad). "
        "g: forward returns comm.all_reduce(y), backward returns grad.",
        "y = g(linear(gelu(linear(f(x), up_i, bias_i)), down_i)) + down.bias, where f and g are "
        "torch.autograd.Functions that keep comm in ctx.",
    ),
)

# ── the loss, from shares of the logits ───────────────────────────────────────────────────────────

_V = 48
_SCALE = 16.0  # of the loss before the backward pass


class _Loss:
    """The loss of an attempt and the gradients of its shares of the logits."""

    def __init__(self, attempt: Callable, n: int, scale: float = 1.0) -> None:
        logits = scale * _draw(60, _S, _V)
        targets = torch.arange(_S) * 5 % _V
        self.case = _ranks.count(n)
        whole = logits.clone().requires_grad_()
        self.right = F.cross_entropy(whole, targets)
        (gradient,) = torch.autograd.grad(_SCALE * self.right, whole)
        self.gradients = gradient.chunk(n, 1)

        def program(rank: world.Rank) -> tuple[Tensor, Tensor | None]:
            mine = logits.chunk(n, 1)[rank.rank].clone().requires_grad_()
            loss = _tensor(attempt(mine, targets, rank.comm("dp")), self.case, ())
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, _SCALE))
            return loss.detach(), mine.grad

        self.ranks = _ranks.run(n, self.case, program, _SAME_CALLS)
        self.sent, self.n = _busiest(n), n


def _loss_value(attempt: Callable) -> str:
    for n in (1, 2, 3, 4):
        seen = _Loss(attempt, n)
        for i, (loss, _) in enumerate(seen.ranks):
            if not _near(loss, seen.right):
                own = n > 1 and not seen.sent
                if loss.dtype != torch.float64 or torch.allclose(
                    loss, seen.right, rtol=1e-6, atol=0
                ):
                    raise Failed(
                        f"{seen.case}: the loss on rank {i} is right to six digits",
                        f"The logits are of {seen.right.dtype}. Keep their dtype all the way: "
                        "something is rounded to fewer digits.",
                    )
                if _near(loss / _S, seen.right):
                    many = f"{seen.case}: the loss on rank {i} is {_S} times too large"
                    raise Failed(many, f"It is the sum over {_S} tokens: return their mean.")
                if n > 1 and _near(loss * n, seen.right):
                    raise Failed(
                        f"{seen.case}: the loss on rank {i} is {n} times too small",
                        "All ranks have the same tokens, and other words: each has the whole loss, "
                        "and there is no mean over ranks.",
                    )
                raise Failed(
                    f"{seen.case}: the loss on rank {i} is {loss - seen.right:+.2g} off",
                    "This is the softmax over the rank's own words. Its denominator is a sum over "
                    "all words, so over all ranks."
                    if own
                    else "Sum over ranks: of exponentials, all with the same number subtracted; "
                    "and of the target's logit, which one rank has and the others count as 0.",
                )
    return "the same on 1, 2, 3 and 4 ranks"


def _loss_of_large(attempt: Callable) -> str:
    seen = _Loss(attempt, 2, scale=1000.0)
    for i, (loss, _) in enumerate(seen.ranks):
        if not _near(loss, seen.right):
            raise Failed(
                f"{seen.case}, logits of about 1,000: the loss on rank {i} is {loss:.1f}, "
                f"{loss - seen.right:+.2g} off",
                "exp(1000) is inf, and exp(−1000) is 0. Subtract from each token's logits the "
                "largest of *that token*, over the words of all ranks: "
                'comm.all_reduce(logits.max(-1).values, "max"). And take the logarithm of the sum '
                "alone: the target's probability, too, can be 0.",
            )
    return "logits of about 1,000"


def _loss_gradient(attempt: Callable) -> str:
    for n in (2, 4):
        seen = _Loss(attempt, n)
        for i, (_, gradient) in enumerate(seen.ranks):
            right = seen.gradients[i]
            if _near(gradient, right):
                continue
            where = f"{seen.case}: the gradient of the logits on rank {i}"
            if gradient is None:
                raise Failed(f"{where} never comes", _NO_GRADIENT)
            rows = zip(gradient, right, strict=True)
            if gradient.any() and all(_near(row, due) or not row.any() for row, due in rows):
                raise Failed(
                    f"{where} is zero for some tokens",
                    "A word has a share in the softmax of every token, also of those whose target "
                    "another rank has: take log Σ for all tokens on every rank, and mask the "
                    "target's logit alone.",
                )
            if _near(gradient, right / _SCALE):
                raise Failed(
                    f"{where} is that of the loss, where the loss was multiplied by {_SCALE:g}",
                    "A loss can be scaled, or be one term of a sum. A backward pass of your own "
                    "gets the gradient of what it returned: multiply by it.",
                )
            many = _near(gradient, n * right)
            raise Failed(
                f"{where} is {f'{n} times too large' if many else 'wrong'}",
                "Every rank computes the same loss and has its gradient already: a sum passes it "
                "on as it is, as g does (tensor_parallel.reduce_from). "
                "The result is softmax − 1 at the target, for this rank's words.",
            )
    return "softmax − 1 at the target, for each rank's words"


def _loss_bytes(attempt: Callable) -> str:
    for n in (2, 4):
        seen, most = _Loss(attempt, n), 6 * _sum_of("all_reduce", _S, n)
        if seen.sent > most:
            raise Failed(
                f"{seen.case}: the busiest rank sends {seen.sent:,} B; three numbers for each of "
                f"{_S} tokens are {most // 2:,} B",
                f"Are logits gathered? They are s·v numbers, here {8 * _S * _V:,} B. Of each token "
                "the others need the maximum, the sum of exponentials, and the target's logit.",
            )
    return "a few numbers for each token"


def _reference_loss(logits: Tensor, targets: Tensor, comm: world.Comm) -> Tensor:
    return tensor_parallel.cross_entropy(logits, targets, comm)


LOSS = Exercise(
    id="tensor_parallel/cross-entropy",
    reference=_reference_loss,
    properties=(
        Property("the loss", _loss_value),
        Property("large logits", _loss_of_large),
        Property("the gradient", _loss_gradient),
        Property("bytes sent", _loss_bytes),
    ),
    hints=(
        "loss = log Σ exp(z − m) − (z_target − m), with m the maximum over all ranks: it is a "
        "constant, so detach it.",
        "place = targets − comm.rank · v_t; a target is yours where 0 ≤ place < v_t. Look up "
        "place.clamp(0, v_t − 1), and put 0 where it is not yours.",
        "tensor_parallel.reduce_from(x, comm) sums over ranks, and its gradient is right.",
    ),
)

# ── bug hunt: sequence parallelism ────────────────────────────────────────────────────────────────


def _matrices(attempt: Callable) -> str:
    for n in (2, 3):
        seen = _seen(attempt, n, True)
        for i, found in enumerate(seen.ranks):
            for name in ("up.weight", "up.bias", "down.weight", "x"):
                if _near(found[name], seen.share(name, i)):
                    continue
                what = "its tokens" if name == "x" else name
                if name == "x":
                    raise Failed(
                        f"{seen.case}: the gradient of {what} on rank {i} is wrong",
                        "A rank's tokens are its own: no sum over ranks is due to them before they "
                        "are gathered. gather_from brings their gradients home, and copy_to is for "
                        "what all ranks have alike.",
                    )
                raise Failed(
                    f"{seen.case}: the gradient of {what} on rank {i} is wrong",
                    "A rank's columns work for all tokens, so the gradients of all tokens must "
                    "come back to it. After an all-reduce each rank cuts out its own tokens, and "
                    "the cut gives the others' gradients as zero. scatter_to sends them.",
                )
    return "2 and 3 ranks"


def _held_alike(attempt: Callable, names: tuple[str, ...], why: str) -> str:
    for n in (2, 3):
        seen = _seen(attempt, n, True)
        for name in names:
            shares, whole = [found[name] for found in seen.ranks], seen.right[name]
            for i, share in enumerate(shares):
                if _near(share, whole):
                    continue
                if share is not None and _near(share / n, whole):
                    raise Failed(
                        f"{seen.case}: the gradient of {name} on rank {i} is {n} times too large",
                        "It is summed twice: once is enough.",
                    )
                if share is not None and _near(share * n, whole):
                    raise Failed(
                        f"{seen.case}: the gradient of {name} on rank {i} is {n} times too small",
                        "Ranks have different tokens of one batch: sum, do not average.",
                    )
                raise Failed(f"{seen.case}: the gradient of {name} on rank {i} is a part", why)
    return "whole on every rank"


_NORM = (
    "Every rank norms its own tokens with the same weights, so their gradient is a sum over ranks. "
    "Without it the copies drift apart, and no output shows it. "
    "tensor_parallel.copy_to(parameter, comm) sums the gradient."
)
_BIAS = (
    "The bias of `down` is added to this rank's tokens alone: its gradient, too, is a sum over "
    "ranks. tensor_parallel.copy_to(parameter, comm) sums the gradient."
)


def _own_tokens(attempt: Callable) -> str:
    """No rank norms tokens of others."""
    for n in (2, 3):
        seen, due = _seen(attempt, n, True), _B * _S * _H // n
        for rank, work in sorted(seen.work.items()):
            if work.normed > due:
                raise Failed(
                    f"{seen.case}: rank {rank} norms {work.normed // _H} tokens, its own are "
                    f"{due // _H}",
                    "Sequence parallelism leaves the norm to the rank that has the token: norm "
                    "first, then gather. Otherwise each rank does, and keeps, all of it.",
                )
    return "its own tokens"


def _hunt_bytes(attempt: Callable) -> str:
    for n in (2, 3):
        seen = _seen(attempt, n, True)
        halves = _sum_of("reduce_scatter", _B * _S * _H, n)
        most = 5 * halves + 3 * _sum_of("all_reduce", _H, n) + 24 * n
        if seen.sent > most:
            raise Failed(
                f"{seen.case}: the busiest rank sends {seen.sent:,} B, at most {most:,} B are due",
                "A gather and a scatter each way, and sums of three gradients of h numbers.",
            )
    return "halves of all-reduces"


def _reference_tokens(
    x: Tensor, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, comm: world.Comm
) -> Tensor:
    """The library's functions in their places."""
    weight, bias, last = (
        tensor_parallel.copy_to(p, comm, "gradients") for p in (norm.weight, norm.bias, down.bias)
    )
    normed = F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    inner = F.gelu(up(tensor_parallel.gather_from(normed, comm)))
    return x + tensor_parallel.scatter_to(F.linear(inner, down.weight), comm) + last


HUNT = Exercise(
    id="tensor_parallel/bug-hunt",
    reference=_reference_tokens,
    untouched="84c035ae",
    properties=(
        Property("the output", _output, normed=True),
        Property("the gradients of the matrices", _matrices),
        Property(
            "the gradients of the norm", _held_alike, names=("norm.weight", "norm.bias"), why=_NORM
        ),
        Property("the gradient of the bias", _held_alike, names=("down.bias",), why=_BIAS),
        Property("a second pass", _second, normed=True),
        Property("what is normed", _own_tokens),
        Property("bytes sent", _hunt_bytes),
    ),
    hints=(
        "Two mistakes are of one kind: a parameter that all ranks hold, and that each applies to "
        "its own tokens. The third is how the sum comes back to the tokens.",
        "reduce_from passes a gradient on as it is, so each rank's gradient of the sum must be "
        "whole. After the cut it is zero for others' tokens. What belongs there is scatter_to.",
        "F.layer_norm takes weight and bias as arguments: give it copy_to(norm.weight, comm).",
    ),
)

EXERCISES = (SPLIT, LOSS, HUNT)
