"""Choose experts, bring tokens to them and back, and repair a step that averages the wrong ones."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labutils import expert_parallel, world
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.teach.exercises import Exercise, Failed, Property, _ranks


def _near(found: Tensor, right: Tensor, off: float = 1e-9) -> bool:
    if found.shape != right.shape:
        return False
    return torch.allclose(found.to(right.dtype), right, rtol=1e-6, atol=off)


_EPSILON = 1e-4  # 1e-6 in the denominator changes a weight by 5e-5 where a score is 0.02


# ── choose ───────────────────────────────────────────────────────────────────────────────────────

_T, _E = 40, 5
_PLAIN = torch.zeros(_E, dtype=torch.float64)
_BIAS = torch.tensor([-0.6, 0.0, 0.0, 0.5, 0.0], dtype=torch.float64)
_BIASES = (_BIAS, _BIAS.flip(0) / 4, _BIAS.roll(1) / 16, _BIAS.roll(2) / 4 - 2)
_RENORMALIZE = (
    "The scores of the chosen experts add up to less than 1 (or, as sigmoids, to anything). "
    "Divide them by their sum, or the layer's output shrinks with every expert left out."
)


def _logits() -> Tensor:
    draw = torch.Generator().manual_seed(12)
    return torch.randn(_T, _E, generator=draw, dtype=torch.float64).requires_grad_()


def _routed(
    attempt: Callable, k: int, score: str, bias: Tensor = _PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts that were chosen, [T, k], the weight of each expert, [T, E], and the logits."""
    logits = _logits()
    case = f"{_T} tokens, {_E} experts, k={k}, {score}"
    given = bias.clone()
    made = attempt(logits, k, score, given)
    try:
        chosen, weights = map(torch.as_tensor, made)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Failed(f"{case}: {error}", "Return the chosen experts and their weights.") from None
    if not torch.equal(logits, _logits()):
        kept = "The router's output belongs to the caller: compute with it, and leave it."
        raise Failed(f"{case}: after your call the logits are other ones", kept)
    if not torch.equal(given, bias):
        kept = "The layer keeps this tensor from step to step: compute with it, and leave it."
        raise Failed(f"{case}: after your call the bias is another one", kept)
    for name, got in (("chosen", chosen), ("weights", weights)):
        if got.shape != (_T, k):
            shape = f"{case}: {name} has shape {list(got.shape)}, not [{_T}, {k}]"
            raise Failed(shape, "One row for each token, one column for each of its k experts.")
    if chosen.is_floating_point():
        order = (
            "First the experts, then their weights: topk(k).values are scores, .indices experts."
        )
        raise Failed(f"{case}: chosen holds fractions, such as {chosen[0, 0]:.3f}", order)
    chosen = chosen.long()
    ordered = chosen.sort(-1).values
    same = ordered.diff(dim=-1).eq(0).any(-1) | (ordered[:, 0] < 0) | (ordered[:, -1] >= _E)
    if same.any():
        token = int(same.nonzero()[0])
        what = f"{case}: token {token} visits {chosen[token].tolist()}"
        raise Failed(what, f"{k} different experts of {_E} for each token: use topk.")
    gates = torch.zeros(_T, _E, dtype=weights.dtype).scatter(1, chosen, weights)
    return chosen, gates, logits


def _right(k: int, score: str, bias: Tensor = _PLAIN) -> tuple[Tensor, Tensor, Tensor]:
    return _routed(_choose, k, score, bias)


def _choose(logits: Tensor, k: int, score: str, bias: Tensor) -> tuple[Tensor, Tensor]:
    routing = expert_parallel.route(logits, k, score=score, bias=bias)
    return routing.chosen, routing.weights


_CASES = tuple(itertools.product((1, 2, 4), ("softmax", "sigmoid")))


def _best(attempt: Callable) -> str:
    for k, score in _CASES:
        chosen, (right, *_) = _routed(attempt, k, score)[0], _right(k, score)
        if not torch.equal(chosen.sort(-1).values, right.sort(-1).values):
            wrong = (chosen.sort(-1).values != right.sort(-1).values).any(-1)
            token = int(wrong.nonzero()[0])
            raise Failed(
                f"k={k}, {score}: token {token} visits {chosen[token].tolist()}, "
                f"its best are {right[token].tolist()}",
                "Of each row of scores the k highest: scores.topk(k).indices.",
            )
    return f"{len(_CASES)} cases"


def _renormalized(attempt: Callable) -> str:
    for k, score in _CASES:
        _, gates, logits = _routed(attempt, k, score)
        sums, right = gates.sum(-1).double(), _right(k, score)[1]
        case = f"k={k}, {score}"
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        if _near(gates, right, _EPSILON):
            continue
        if _near(gates, right, 0.02) and gates.dtype in (torch.bfloat16, torch.half):
            kind = str(gates.dtype).removeprefix("torch.")
            hint = "Right but for rounding: a router computes scores and weights in fp32 at least."
            raise Failed(f"{case}: the weights are in {kind}", hint)
        if not _near(sums, torch.ones_like(sums), _EPSILON):
            worst = sums[(sums - 1).abs().argmax()].item()
            told = f"{worst:.3f}" if abs(worst - 1) > 1e-3 else f"1 {worst - 1:+.1g}"
            raise Failed(f"{case}: the weights of a token add up to {told}", _RENORMALIZE)
        other = logits.sigmoid() if score == "softmax" else logits.softmax(-1)
        kept = other * (right > 0)
        if _near(gates, kept / kept.sum(-1, keepdim=True)):
            raise Failed(
                f"{case}: these are weights of the other score",
                "softmax compares the experts with each other, sigmoid scores each by itself.",
            )
        twice = scores.masked_fill(right == 0, float("-inf")).softmax(-1)
        hint = "Weights are the chosen scores, divided by their sum, and nothing else."
        if _near(gates, twice):
            hint = f"A softmax of {score} scores: they are scores already, divide by their sum."
        elif _near(gates.sort(-1).values, right.sort(-1).values, _EPSILON):
            hint = (
                "The right numbers at other experts: column c of the weights is for the expert in "
                "column c of what was chosen. Was one of them sorted and the other not?"
            )
        raise Failed(f"{case}: the weights add up to 1, and are other ones", hint)
    return f"{len(_CASES)} cases add up to 1"


def _only_chooses(attempt: Callable) -> str:
    for (k, score), bias in itertools.product(_CASES, _BIASES):
        chosen, gates, _ = _routed(attempt, k, score, bias)
        right, weights, _ = _right(k, score, bias)
        added = [round(number, 3) for number in bias.tolist()]
        case = f"k={k}, {score}, a bias of {added}"
        if not torch.equal(chosen.sort(-1).values, right.sort(-1).values):
            raise Failed(
                f"{case}: the chosen experts are other ones",
                "The bias is added to the scores, after softmax or sigmoid, where experts are "
                "chosen. The scores are as they are: a division comes later.",
            )
        if not _near(gates, weights, _EPSILON):
            raise Failed(
                f"{case}: the right experts, with other weights",
                "The bias chooses and does nothing else: weights come from the scores without it.",
            )
    return "chosen with it, weighted without"


def _learns(attempt: Callable) -> str:
    for k, score in itertools.product((2, 3), ("softmax", "sigmoid")):
        value = torch.linspace(-1, 2, _T * _E, dtype=torch.float64).view(_T, _E)
        _, gates, logits = _routed(attempt, k, score, _BIAS)
        _, right, same = _right(k, score, _BIAS)
        (expected,) = torch.autograd.grad((right * value).sum(), same)
        if not gates.requires_grad:
            raise Failed(
                f"k={k}, {score}: the weights have no gradient",
                "Numbers were chosen, and their gradient was lost on the way (item, tolist, "
                "detach, no_grad). The router learns through the weights alone.",
            )
        (found,) = torch.autograd.grad((gates * value).sum(), logits, allow_unused=True)
        if found is None or not _near(found, expected, _EPSILON):
            raise Failed(
                f"k={k}, {score}: the gradient of the logits is another one",
                "It flows through every score in the weights, their sum included.",
            )
    return "through the weights"


CHOOSE = Exercise(
    id="expert_parallel/route",
    reference=_choose,
    properties=(
        Property("the best k", _best),
        Property("weights add up to 1", _renormalized),
        Property("the bias only chooses", _only_chooses),
        Property("the router learns", _learns),
    ),
    hints=(
        "Three steps: scores (softmax over all experts, or the sigmoid of each), the k best of "
        "each row, and their scores as weights.",
        "(scores + bias).topk(k).indices chooses; scores.gather(-1, chosen) picks the weights.",
        "Last, divide: weights / weights.sum(-1, keepdim=True).",
    ),
)

# ── travel ───────────────────────────────────────────────────────────────────────────────────────

_H = 4
_SAME = (
    "All ranks call all_to_all equally often, and what one sends another expects. Do all tell of E "
    "experts, also of idle ones (bincount(minlength=E))?"
)


def _divided(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


class _Case:
    """Tokens, choices and experts of each of n ranks, `each` experts on a rank, of which nobody
    visits number `idle`.

    Expert e multiplies by e + 2 and adds 10·e, so that what comes back tells where it has been.
    With k = 2 the weights of a token add up to 1, as Mixtral's do; with other k to anything.
    """

    def __init__(
        self, n: int, each: int, k: int = 2, idle: int | None = None, h: int = _H
    ) -> None:
        self.n, self.each, self.k, self.idle = n, each, k, idle
        draw = torch.Generator().manual_seed(10 * n + each)
        E, self.x, self.chosen, self.weights = n * each, [], [], []
        for rank in range(n):
            T = 5 + 2 * rank
            self.x.append(torch.randn(T, h, generator=draw, dtype=torch.float64))
            scores = torch.rand(T, E, generator=draw, dtype=torch.float64)
            if idle is not None:
                scores[:, idle] -= 5
            top = scores.topk(k)
            self.chosen.append(top.indices)
            self.weights.append(_divided(top.values) if k == 2 else top.values)

    @property
    def name(self) -> str:
        empty = "" if self.idle is None else f", expert {self.idle} without visits"
        experts = f"{self.each} expert{'s' * (self.each > 1)} each"
        return f"{_ranks.count(self.n)}, {experts}, k={self.k}{empty}"

    def visit(self, expert: int, rows: Tensor) -> Tensor:
        return rows * (expert + 2) + 10 * expert

    def experts(self, rank: int) -> tuple[list[Callable], list[list[int]]]:
        """This rank's, and on how many rows each of them is called, call by call."""
        first = rank * self.each
        calls: list[list[int]] = [[] for _ in range(self.each)]

        def run(i: int, rows: Tensor) -> Tensor:
            calls[i].append(len(rows))
            return self.visit(first + i, rows)

        return [functools.partial(run, i) for i in range(self.each)], calls

    def right(
        self,
        rank: int,
        *,
        weights: bool = True,
        last: bool = False,
        early: bool = False,
        divided: bool = False,
        alike: bool = False,
    ) -> Tensor:
        """Every token's experts, one token after the other; or with a slip."""
        out = torch.zeros_like(self.x[rank])
        given = _divided(self.weights[rank]) if divided else self.weights[rank]
        given = torch.full_like(given, 1 / self.k) if alike else given
        for t, row in enumerate(self.x[rank]):
            for c, e in enumerate(self.chosen[rank][t].tolist()):
                w = given[t, c] if weights else 1
                part = self.visit(e, w * row) if early else w * self.visit(e, row)
                out[t] = part if last else out[t] + part
        return out

    def visits(self, rank: int) -> list[int]:
        """The rows that come for each of this rank's experts."""
        mine = slice(rank * self.each, (rank + 1) * self.each)
        return [sum(column) for column in zip(*(row[mine] for row in self.counts), strict=True)]

    @property
    def counts(self) -> list[list[int]]:
        return [torch.bincount(c.flatten(), minlength=self.n * self.each).tolist()
                for c in self.chosen]  # fmt: skip


def _found(attempt: Callable, case: _Case) -> list[tuple[Tensor, list[list[int]]]]:
    """Of each rank what came back, and on how many rows each expert was called, call by call."""

    def program(rank: world.Rank) -> tuple[Tensor, list[list[int]], list[str]]:
        i, names = rank.rank, ("x", "chosen", "weights")
        kept = case.x[i], case.chosen[i], case.weights[i]
        given = [each.clone() for each in kept]
        experts, calls = case.experts(i)
        out = attempt(*given, experts, rank.comm("dp"))
        same = [torch.equal(now, then) for now, then in zip(given, kept, strict=True)]
        return out, calls, [name for name, is_same in zip(names, same, strict=True) if not is_same]

    told = _ranks.run(case.n, case.name, program, _SAME)
    found = [(out, calls) for out, calls, _ in told]
    for rank, (out, calls) in enumerate(found):
        if not isinstance(out, Tensor) or out.shape != case.x[rank].shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise Failed(
                f"{case.name}: rank {rank} returns {got} for {list(case.x[rank].shape)} of tokens",
                "A row for each of your own tokens, in their order.",
            )
        if out.dtype != case.x[rank].dtype:
            kind = str(out.dtype).removeprefix("torch.")
            what = f"{case.name}: rank {rank} returns {kind}, its tokens are float64"
            raise Failed(what, "torch.zeros alone is float32: begin with zeros_like(x), and let "
                         "rows and results travel as they are.")  # fmt: skip
        if changed := told[rank][2]:
            what = f"{case.name}: on rank {rank} {changed[0]} is another tensor after your call"
            raise Failed(what, "The block adds your rows to x, and the router's choice is kept for "
                         "the backward pass: write into tensors of your own.")  # fmt: skip
        if (most := max(map(len, calls))) > case.n:
            raise Failed(
                f"{case.name}: on rank {rank} an expert is called {most} times",
                "An expert is a product of matrices: give it all its rows at once, or those of "
                "each rank, not one by one.",
            )
    return found


def _home(attempt: Callable, cases: Sequence[_Case]) -> str:
    for case in cases:
        for rank, (out, _) in enumerate(_found(attempt, case)):
            right = case.right(rank)
            if _near(out, right):
                continue
            wrong = (out - right).abs().amax(-1) > 1e-6
            if (apart := (out - right).abs().max().item()) < 1e-3:
                rounded = "Right but for rounding: let rows and results travel as they are."
                raise Failed(f"{case.name}: rank {rank} is off by {apart:.1g}", rounded)
            what = f"{case.name}: rank {rank} has {int(wrong.sum())} of {len(out)} tokens wrong"
            raise Failed(what, _why(case, rank, out))
    return f"{len(cases)} cases"


def _why(case: _Case, rank: int, out: Tensor) -> str:
    """The most likely reason for rows that are not the right ones."""
    right = case.right(rank)
    if _near(out, case.right(rank, divided=True)):
        return (
            "Your code divides the weights by their sum. Whether they add up to 1 is the router's "
            "business (the Switch Transformer's do not): take them as they are."
        )
    if _near(out - case.x[rank], right):
        return (
            "Your rows have the tokens themselves on top: begin with zeros, the residual is the "
            "block's."
        )
    if _near(out * case.k, right):
        return f"All rows are {case.k} times too small: weigh and add, without a mean over k."
    if _near(out, case.right(rank, weights=False)):
        return "The outputs are added up without their weights."
    if _near(out, case.right(rank, early=True)):
        return (
            "Your code weights its rows before an expert computes, and an expert is not linear: "
            "weigh what comes out."
        )
    if _near(out.sort(0).values, right.sort(0).values):
        return "The right rows in the wrong order: row i belongs to the token that left as row i."
    if (out.abs().amax(-1) < 1e-9).any():
        return "Some tokens come back as zeros: were they lost on the way, or never sent?"
    if _near(out, case.right(rank, last=True)) or (
        not _near(out.sum(), right.sum()) and _some_visit_alone(case, rank, out)
    ):
        return (
            "A token visits k experts, and of some only one visit is left. Was the other never "
            "sent, or left out? Or was it overwritten: an assignment overwrites, index_add adds."
        )
    if _near(out, case.right(rank, alike=True)):
        return f"Every visit counts 1/{case.k}: weigh it by the token's own number in `weights`."
    if _near(out.sum(), right.sum()):
        return "The sum of all rows is right: results went to the places of other tokens."
    return (
        "Results meet other tokens' weights or places, or an expert saw other ranks' rows. What "
        "arrives is in rank order, and in each rank's part by expert, if you sent it so."
    )


def _some_visit_alone(case: _Case, rank: int, out: Tensor) -> bool:
    for t, row in enumerate(case.x[rank]):
        for c, e in enumerate(case.chosen[rank][t].tolist()):
            if _near(out[t], case.visit(e, row) * case.weights[rank][t, c]):
                return True
    return False


def _frugal(attempt: Callable) -> str:
    case = _Case(4, 2, h=64)
    _found(attempt, case)
    sent, counts = _ranks.world_of(4).ledger.by("rank"), case.counts
    for rank in range(4):
        mine = slice(2 * rank, 2 * rank + 2)
        there = sum(counts[rank]) - sum(counts[rank][mine])
        back = sum(sum(counts[j][mine]) for j in range(4) if j != rank)
        least = (there + back) * 64 * 8
        # E counts to all ranks, twice; a row may take its expert, token and weight along
        if sent.get(rank, 0) > least + 2 * 3 * 8 * 8 + (there + back) * 3 * 8:
            raise Failed(
                f"4 ranks: rank {rank} sends {sent[rank]:,} B, its rows take {least:,} B",
                "Each row goes to one rank and back. Were rows padded, sent to everybody, or did "
                "whole rows travel where E numbers would do?",
            )
    return "a row there, a row back"


def _lean(attempt: Callable) -> str:
    case = _Case(4, 2)
    for rank, (_, calls) in enumerate(_found(attempt, case)):
        for i, (rows, came) in enumerate(zip(calls, case.visits(rank), strict=True)):
            if sum(rows) > came:
                raise Failed(
                    f"4 ranks: on rank {rank} expert {i} computes {sum(rows)} rows, and {came} "
                    "came for it",
                    "An expert computes the rows that were sent to it, and no other: not those of "
                    "its neighbours, to throw them away, and no padding.",
                )
    return "the visits, and nothing else"


TRAVEL = Exercise(
    id="expert_parallel/travel",
    reference=lambda x, chosen, weights, experts, comm: _there_and_back(
        x, chosen, weights, experts, comm
    ),
    properties=(
        Property("one rank", _home, cases=[_Case(1, 3)]),
        Property(
            "every token in its place",
            _home,
            cases=[_Case(2, 1), _Case(3, 1), _Case(2, 3), _Case(4, 2)],
        ),
        Property(
            "one expert each, and three", _home, cases=[_Case(3, 2, k=1), _Case(2, 2, k=3)]
        ),
        Property("an idle expert", _home, cases=[_Case(3, 2, idle=0), _Case(3, 2, idle=5)]),
        Property("an idle rank", _home, cases=[_Case(3, 1, idle=0), _Case(3, 1, idle=2)]),
        Property("bytes sent", _frugal),
        Property("rows computed", _lean),
    ),
    hints=(
        "order = chosen.flatten().argsort(stable=True) sorts all visits by expert; visit v is "
        "token v // k's. Count the visits to each expert with bincount(minlength=E).",
        "First comm.all_to_all(counts) tells every rank what comes. Then send the rows: their "
        "sizes are your counts, added up for each rank; what arrives is cut by rank and expert.",
        "The results go back with the sizes exchanged. They arrive in the order in which you "
        "sent: out.index_add(0, token, rows · weight).",
    ),
)


def _there_and_back(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Callable], comm: world.Comm
) -> Tensor:
    """`dispatch`, the experts, `combine`."""
    T, E = len(x), comm.size * len(experts)
    visits = chosen.T.flatten()
    counts = torch.bincount(visits, minlength=E)
    order, even = visits.argsort(stable=True), weights.new_full((T, E), 1 / E)
    routing = expert_parallel.Routing(chosen, weights, order, counts, counts, even)
    inputs, trip = expert_parallel.dispatch(x, routing, comm)
    outputs = [expert(rows) for expert, rows in zip(experts, inputs, strict=True)]
    return expert_parallel.combine(outputs, trip, routing, comm)


# ── bug hunt: gradients ──────────────────────────────────────────────────────────────────────────

_MESH = Mesh(dp=4, ep=2)
_MODEL = ModelConfig(
    num_layers=2, d_model=8, num_heads=2, d_ff=8, vocab_size=16, seq_len=8, num_experts=4, top_k=2,
    shared_expert=True,
)  # fmt: skip
_ALPHA = 0.5


@functools.cache
def _tokens() -> Tensor:
    return torch.randint(16, (4, 2, 8), generator=torch.Generator().manual_seed(3))


def _spread(rank: world.Rank) -> GPT:
    model = GPT(_MODEL, generator=torch.Generator().manual_seed(0)).double()
    for parameter in model.parameters():
        parameter.data.mul_(10)
    expert_parallel.spread_experts(model, rank.comm("ep"))
    return model


def _reduced(model: GPT, tokens: Tensor, dp: world.Comm, edp: world.Comm, alpha: float) -> Tensor:
    loss = model.loss(tokens, tokens)
    loss = loss + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    expert_parallel.reduce_gradients(model, dp, edp)
    return loss


def _results(attempt: Callable, alpha: float) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss and the gradients of each rank."""

    def program(rank: world.Rank) -> tuple[float, dict[str, Tensor]]:
        model = _spread(rank)
        tokens = _tokens()[rank.rank].clone()
        loss = attempt(model, tokens, rank.comm("dp"), rank.comm("edp"), alpha)
        named = model.named_parameters()
        try:
            loss = loss.item() if isinstance(loss, Tensor) else float(loss)
        except (TypeError, ValueError, RuntimeError):
            said = "nothing" if loss is None else type(loss).__name__
            raise Failed(f"α={alpha}: you return {said}", "Return the loss, one number.") from None
        return loss, {n: p.grad.clone() for n, p in named if p.grad is not None}

    return _ranks.run(_MESH, f"4 ranks, ep=2, α={alpha}", program, _SAME)


_after = _ranks.Remembered(_results)  # of an attempt; all properties ask for it


@functools.cache
def _expected(alpha: float) -> list[tuple[float, dict[str, Tensor]]]:
    return _results(_reduced, alpha)


@functools.cache
def _own() -> list[tuple[float, dict[str, Tensor]]]:
    """Gradients before any reduction."""

    def alone(model: GPT, tokens: Tensor, *_: Any) -> Tensor:
        loss = model.loss(tokens, tokens)
        loss.backward()
        return loss.detach()

    return _results(alone, 0.0)


def _losses(attempt: Callable) -> str:
    _after.cache_clear()  # a check runs anew
    for alpha in (0.0, _ALPHA):
        pairs = zip(_after(attempt, alpha), _expected(alpha), strict=True)
        for rank, ((found, _), (right, _)) in enumerate(pairs):
            if abs(found - right) > 1e-9:
                raise Failed(
                    f"α={alpha}: rank {rank}'s loss should be {right:.4f}, and is "
                    f"{found - right:+.2g} off",
                    "The loss of the rank's own tokens, plus α·E·Σ f·P of each layer.",
                )
    return "with and without the balance loss"


def _rest(attempt: Callable) -> str:
    pairs = zip(_after(attempt, 0.0), _expected(0.0), strict=True)
    for rank, ((_, found), (_, right)) in enumerate(pairs):
        for name in (name for name in right if "experts" not in name):
            if name in found and _near(found[name], right[name]):
                continue
            hint = "All four ranks hold this parameter: its gradient is the mean over dp."
            raise Failed(f"rank {rank}: the gradient of {name} is not the mean", hint)
    return "the mean over dp"


def _experts(attempt: Callable) -> str:
    seen = _after(attempt, 0.0)
    for rank, ((_, found), (_, right)) in enumerate(zip(seen, _expected(0.0), strict=True)):
        for name in (name for name in right if "experts" in name):
            if name in found and _near(found[name], right[name]):
                continue
            raise Failed(f"rank {rank}: the gradient of {name} is wrong", _mixed_up(
                rank, name, found.get(name), right[name]))  # fmt: skip
    return "the mean over edp"


def _mixed_up(rank: int, name: str, found: Tensor | None, right: Tensor) -> str:
    if found is None:
        return "Leave the mean in parameter.grad."
    before = [own for _, own in _own()]
    if _near(found, before[rank][name]):
        return (
            "It is this rank's own. Another rank holds the same expert, and has seen the tokens of "
            "its own block: reduce over edp."
        )
    kind = name.partition("experts.")[2].partition(".")[2]
    place = [n for n in before[rank] if n.endswith(kind) and "experts." in n].index(name)
    alike = [[g for n, g in own.items() if n.endswith(kind) and "experts." in n][place]
             for own in before]  # fmt: skip
    total = sum(alike[1:], alike[0])
    if _near(found, total / 4) or _near(found, total / 2):
        return (
            "It is a mean of *different* experts: along dp the ranks of one block hold different "
            "ones. No shape gives it away. Reduce experts over edp, the ranks with the same ones."
        )
    for times, said in ((2, "twice"), (0.5, "half"), (4, "four times"), (0.25, "a quarter of")):
        if _near(found, times * right):
            return (
                f"It is {said} the right one. The backward pass of combine has made it a mean over "
                "the ranks of ep already: divide by edp.size."
            )
    return "Ranks 0 and 2 hold the same experts, and so do 1 and 3: the mean over edp."


def _balances(attempt: Callable) -> str:
    for layer in reversed(range(_MODEL.num_layers)):
        _balances_in(attempt, layer)
    pairs = zip(_after(attempt, _ALPHA), _expected(_ALPHA), strict=True)
    for rank, ((_, found), (_, right)) in enumerate(pairs):
        for name in right:
            if name not in found or not _near(found[name], right[name]):
                hint = "The groups are the same with a balance loss as without: dp, and edp."
                raise Failed(f"rank {rank}, α={_ALPHA}: the gradient of {name} is wrong", hint)
    return "its gradient reaches the router of each layer"


def _balances_in(attempt: Callable, layer: int) -> None:
    plain, balanced = _after(attempt, 0.0), _after(attempt, _ALPHA)
    name = f"blocks.{layer}.feed_forward.router.weight"
    added = [b[1][name] - a[1][name] for a, b in zip(plain, balanced, strict=True)]
    pairs = zip(_expected(0.0), _expected(_ALPHA), strict=True)
    right = [b[1][name] - a[1][name] for a, b in pairs]
    for rank, (found, wanted) in enumerate(zip(added, right, strict=True)):
        if _near(found, wanted):
            continue
        if found.abs().max() < 1e-12:
            raise Failed(
                f"rank {rank}: α={_ALPHA} changes the loss, and no gradient of layer {layer}'s "
                "router",
                "The balance loss is a number without a history: its P lost its gradient on the "
                "way (tolist, item, detach), or it was added after backward(). f counts and has "
                "none; P must have one.",
            )
        raise Failed(
            f"rank {rank}: α={_ALPHA} adds another gradient to the router of layer {layer}",
            "E·Σ f·P of this layer, of each rank's own tokens; gradients flow through P, and are "
            "averaged.",
        )


REPAIR = Exercise(
    id="expert_parallel/bug-hunt",
    untouched="d29e77b1",
    reference=_reduced,
    properties=(
        Property("the loss", _losses),
        Property("what all ranks hold", _rest),
        Property("experts", _experts),
        Property("balance", _balances),
    ),
    hints=(
        "Ask of each gradient: which ranks hold this very parameter? And of each term of the "
        "loss: which parameter does backward() reach through it?",
        "expert_parallel.expert_parameters(model) names this rank's experts. Their group is edp.",
        "Keep P a tensor: routing.probabilities.mean(0).",
    ),
)

EXERCISES = (CHOOSE, TRAVEL, REPAIR)
