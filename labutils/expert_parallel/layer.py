"""Dispatch and combine by all-to-all, the layer made of them, and `spread_experts`, which puts that
layer in the place of each `MixtureOfExperts`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labutils import units
from labutils.expert_parallel import routing as router
from labutils.expert_parallel.routing import Routing
from labutils.model import MixtureOfExperts
from labutils.world import Comm, marked

Rows = Float[Tensor, "visits h"]


@dataclass(frozen=True)
class Trip:
    """What `dispatch` moved, so that `combine` can move the results back.

    tokens: the token of each row that left, in order
    sent: rows for each rank
    received: rows from each rank, for each expert of this rank
    """

    tokens: Int[Tensor, " visits"]
    sent: list[int]
    received: list[list[int]]


def dispatch(
    x: Float[Tensor, "T h"], routing: Routing, comm: Comm
) -> tuple[list[Float[Tensor, "_ h"]], Trip]:
    """For each of this rank's experts the tokens that visit it, from all ranks, and the trip.

    Rank i has experts i·E/N_e and following. Ranks tell each other first how many tokens come, an
    all-to-all of E whole numbers; then the tokens go, uneven as they are, and nothing is padded.

    Between `dispatch` and `combine` gradients are 1/N_e of what they were: each rank's loss is the
    mean over its own tokens, so an expert's weights get the mean over the ranks, as data
    parallelism gives it to other weights; gradients of x are whole again.
    Source: GShard 2006.16668; Megatron-LM's --moe-token-dispatcher-type alltoall.
    """
    mine = _experts_of_a_rank(len(routing.counts), comm)
    with comm.record("counts"):
        coming = comm.all_to_all(routing.counts)
    counts, received = routing.counts.tolist(), coming.view(comm.size, mine).tolist()
    sent = [sum(counts[i : i + mine]) for i in range(0, len(counts), mine)]
    tokens = routing.order[: sum(counts)] % len(x)
    rows = x.index_select(0, tokens)
    back = [sum(row) for row in received]
    rows = _Travel.apply(rows, comm, "dispatch", sent, back, comm.size)
    pieces = rows.split([count for row in received for count in row])
    inputs = [torch.cat(pieces[expert::mine]) for expert in range(mine)]
    return inputs, Trip(tokens, sent, received)


def combine(
    outputs: Sequence[Float[Tensor, "_ h"]], trip: Trip, routing: Routing, comm: Comm
) -> Float[Tensor, "T h"]:
    """For each token the weighted sum of what its experts made of it; zeros for a token of which
    every visit was dropped.

    outputs: of each expert of this rank, for the rows that `dispatch` gave it
    trip, routing: what `dispatch` and `route` returned
    """
    pieces = [
        rows.split([counts[expert] for counts in trip.received])
        for expert, rows in enumerate(outputs)
    ]
    rows = torch.cat([from_expert[rank] for rank in range(comm.size) for from_expert in pieces])
    there = [sum(row) for row in trip.received]
    rows = _Travel.apply(rows, comm, "combine", there, trip.sent, 1 / comm.size)
    visits = routing.order[: len(rows)]
    weighted = rows * routing.weights.T.flatten()[visits, None]
    # Autocast computes in half, and weights are fp32.
    out = weighted.new_zeros(len(routing.chosen), rows.shape[1])
    return out.index_add(0, trip.tokens, weighted)


class _Travel(torch.autograd.Function):
    """Rows to the ranks that want them; backward their gradients the other way, times `factor`."""

    @staticmethod
    def forward(
        ctx: Any, x: Rows, comm: Comm, name: str, there: list[int], back: list[int], factor: float
    ) -> Rows:
        ctx.travel = comm, name, there, back, factor
        with comm.record(f"{name} forward"):
            return comm.all_to_all(x, there, back)

    @staticmethod
    def backward(ctx: Any, grad: Rows) -> tuple[Any, ...]:
        comm, name, there, back, factor = ctx.travel
        with comm.record(f"{name} backward"):
            grad = comm.all_to_all(grad.contiguous(), back, there)
        return (grad if factor == 1 else grad.mul_(factor)), *[None] * 5


def _experts_of_a_rank(num_experts: int, comm: Comm) -> int:
    if num_experts % comm.size:
        remedy = "choose another ep, or another number of experts"
        raise ValueError(f"ep={comm.size} does not divide num_experts={num_experts}: {remedy}")
    return num_experts // comm.size


class ExpertParallel(nn.Module):
    """A mixture of experts of which this rank has its share, `experts`, under the numbers that they
    have in the whole layer, and all of the router, and of the shared expert if there is one. Made
    by `spread_experts`, which has the options.

    `routing` is that of the last forward pass, `balance` its balance loss; `load` sums what tokens
    asked for, until `update_bias`.
    """

    def __init__(
        self,
        whole: MixtureOfExperts,
        comm: Comm,
        score: str,
        capacity_factor: float | None,
        biased: bool,
    ) -> None:
        super().__init__()
        E = len(whole.experts)
        mine = _experts_of_a_rank(E, comm)
        self.comm = comm
        self.top_k = whole.top_k
        self.score = score
        self.capacity_factor = capacity_factor
        self.router = whole.router
        here = range(comm.rank * mine, (comm.rank + 1) * mine)
        self.experts = nn.ModuleDict({str(i): whole.experts[i] for i in here})
        self.shared = whole.shared
        for parameter in self.experts.parameters():
            marked(parameter, shares=comm.size)
            if comm.size > 1:
                # Data parallelism refuses to average it over more.
                vars(parameter)["only_on"] = "edp"
        zeros = torch.zeros(E, device=whole.router.weight.device)
        self.bias: Tensor | None
        self.register_buffer("bias", zeros if biased else None)
        self.load = zeros.long()
        self.routing: Routing | None = None

    @property
    def balance(self) -> Float[Tensor, ""]:
        """The balance loss of the last forward pass; RuntimeError before the first."""
        if self.routing is None:
            remedy = "call spread_experts(module, comm), then module"
            raise RuntimeError(f"no layer has routed tokens yet: {remedy}")
        return router.balance_loss(self.routing)

    def forward(self, x: Float[Tensor, "b s h"]) -> Float[Tensor, "b s h"]:
        tokens, E = x.flatten(0, 1), self.router.out_features
        room = None
        if self.capacity_factor is not None:
            room = router.capacity(len(tokens), E, self.top_k, self.capacity_factor)
        logits = self.router(tokens)
        routing = router.route(logits, self.top_k, score=self.score, capacity=room, bias=self.bias)
        inputs, trip = dispatch(tokens, routing, self.comm)
        experts = self.experts.values()
        outputs = [expert(rows) for expert, rows in zip(experts, inputs, strict=True)]
        out = combine(outputs, trip, routing, self.comm)
        self.routing = routing
        if self.training:
            self.load = self.load + routing.load
        out = out.to(x.dtype).view_as(x)
        return out if self.shared is None else out + self.shared(x)


def spread_experts(
    module: nn.Module,
    comm: Comm,
    *,
    replicas: Comm | None = None,
    score: str = "softmax",
    capacity_factor: float | None = None,
    biased: bool = False,
) -> nn.Module:
    """The module, in which each `MixtureOfExperts` keeps E/N_e of its experts on this rank and asks
    the other ranks of `comm` (axis "ep") for the rest; changed in place.

    Every rank has tokens of its own. After a backward pass `reduce_gradients` must run, or two
    `zero.Optimizer`s, one over "edp" for `expert_parameters` and one over "dp" for the rest:
    a rank's experts have seen the tokens of all ranks of ep, and other weights only its own.

    replicas: all ranks that train this model, as `rank.comm("dp")`: they begin with the weights of
        the first of them; those of `comm` unless given
    score: "softmax" or "sigmoid", as in `route`
    capacity_factor: room for visits to an expert from each rank, as in `capacity`; None drops none
    biased: a bias chooses experts, which `update_bias` moves

    Cost: bytes sent as in `predict.sent`, or `routed_sent` of what routing did; states as in
        `predict.states`.
    Invariant: without dropping equal to the module that has all experts and all ranks' tokens, up
    to rounding; the balance loss is that of each rank's own tokens.
    Raises ValueError where comm.size does not divide the experts, TypeError where there are none.
    """
    units.instance(module, nn.Module, "spread_experts")
    units.instance(comm, Comm, "spread_experts")
    named = module.named_modules()
    layers = {name: part for name, part in named if isinstance(part, MixtureOfExperts)}
    if not layers or module in layers.values():
        got = type(module).__name__
        raise TypeError(f"spread_experts takes a module with MixtureOfExperts inside, got {got}")
    router.check_score(score)
    if capacity_factor is not None:
        capacity_factor = units.positive(capacity_factor, "capacity_factor")
    start = replicas or comm
    for parameter in module.parameters():
        start.broadcast(marked(parameter).data, out=parameter.data)
    for name, layer in layers.items():
        spread = ExpertParallel(layer, comm, score, capacity_factor, biased)
        module.set_submodule(name, spread)
    return module


def _layers(module: nn.Module) -> list[ExpertParallel]:
    units.instance(module, nn.Module, "expert_parallel")
    return [part for part in module.modules() if isinstance(part, ExpertParallel)]


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of this rank's experts, by name: what `comm`s of "edp" reduce, and not of
    "dp"."""
    inside = {id(p) for layer in _layers(module) for p in layer.experts.parameters()}
    return {name: p for name, p in module.named_parameters() if id(p) in inside}


def reduce_gradients(module: nn.Module, comm: Comm, experts: Comm) -> None:
    """Makes every gradient its mean over all data-parallel ranks.

    comm: those ranks, `rank.comm("dp")` or `rank.comm("dp", "cp")`, for all but experts
    experts: those of them that hold the same experts, `rank.comm("edp")`
    """
    ours = expert_parameters(module)
    for group in (comm, experts):
        units.instance(group, Comm, "reduce_gradients")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            group = experts if name in ours else comm
            with group.record("gradients"):
                group.all_reduce(parameter.grad, out=parameter.grad)
            parameter.grad.div_(group.size)


def auxiliary_loss(module: nn.Module) -> Float[Tensor, ""]:
    """The balance losses of the last forward pass, all layers together; times a small α it is added
    to the loss. Raises RuntimeError where no layer has routed tokens."""
    losses = [layer.balance for layer in _layers(module)]
    if not losses:
        raise RuntimeError("no layer has routed tokens yet: call spread_experts(module, comm)")
    return torch.stack(losses).sum()


def update_bias(module: nn.Module, comm: Comm, rate: float = 0.001) -> None:
    """Once a step: `rate` less bias for each expert that was asked for by more tokens of all ranks
    of `comm` than the mean, `rate` more for one asked by fewer.

    Raises ValueError for a module without such a bias.
    Source: DeepSeek-V3 2412.19437; Megatron-LM's --moe-router-bias-update-rate, 0.001.
    """
    units.instance(comm, Comm, "update_bias")
    for layer in _layers(module):
        if layer.bias is None:
            raise ValueError("this module has no bias: spread_experts(module, comm, biased=True)")
        with comm.record("load"):
            load = comm.all_reduce(layer.load).to(layer.bias.dtype)
        layer.bias += rate * (load.mean() - load).sign()
        layer.load = torch.zeros_like(layer.load)
