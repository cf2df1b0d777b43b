"""The router: which k of E experts a token visits, with which weights, and whether there is room.

T is the tokens of a rank, b·s. A visit is one token at one of its experts: T·k are asked for.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labutils import units

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a rank go. Visit c·T + t is token t's to its choice number c.

    chosen: the experts of each token, best first
    weights: of their outputs, which add up to 1 for each token; a dropped visit keeps its own
    order: all visits, by expert, those that are dropped last
    counts: visits that take place, of each expert
    load: visits that were asked for, of each expert
    probabilities: the scores of all experts, which add up to 1 for each token
    """

    chosen: Int[Tensor, "T k"]
    weights: Float[Tensor, "T k"]
    order: Int[Tensor, "Tk"]
    counts: Int[Tensor, " E"]
    load: Int[Tensor, " E"]
    probabilities: Float[Tensor, "T E"]


def route(
    logits: Float[Tensor, "T E"],
    k: int,
    *,
    score: str = "softmax",
    capacity: int | None = None,
    bias: Float[Tensor, " E"] | None = None,
) -> Routing:
    """The k experts of each token that score highest, weighted by their scores, which are
    renormalized: divided by the sum of the chosen ones.

    logits: what the router says of each token and expert
    score: "softmax" over all experts, or the "sigmoid" of each
    capacity: visits that an expert has room for; what comes later is dropped, all first choices
        before any second one. Without it none is
    bias: added where experts are chosen, and nowhere else: weights and gradients do not know it

    >>> routing = route(torch.tensor([[3.0, 1.0], [2.0, 1.0], [0.0, 1.0]]), 1, capacity=1)
    >>> routing.chosen.flatten().tolist(), routing.load.tolist(), routing.counts.tolist()
    ([0, 0, 1], [2, 1], [1, 1])

    Raises ValueError for a k that is more than there are experts, and for an unknown score.
    Invariant: with k experts chosen by softmax it is `MixtureOfExperts`' softmax over those k.
    Source: Mixtral 2401.04088; sigmoid and bias: DeepSeek-V3 2412.19437; room and order: GShard
    2006.16668.
    """
    units.instance(logits, Tensor, "route")
    if logits.ndim != 2:
        shape = tuple(logits.shape)
        raise ValueError(f"logits of tokens × experts have two dims, got {shape}: flatten the rest")
    E = logits.shape[-1]
    if not logits.is_floating_point():
        raise ValueError(f"route takes logits of a float format, got {logits.dtype}: use .float()")
    if bias is not None and tuple(bias.shape) != (E,):
        raise ValueError(f"bias of {E} experts has shape ({E},), got {tuple(bias.shape)}")
    if not 1 <= (k := units.whole(k, "k")) <= E:
        raise ValueError(f"k={k} of {E} experts cannot be chosen: use 1 … {E}")
    check_score(score)
    if capacity is not None:
        capacity = units.whole(capacity, "capacity")
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    chosen = (scores if bias is None else scores + bias).detach().topk(k).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    total = 1 if score == "softmax" else scores.sum(-1, keepdim=True)
    return Routing(chosen, weights, *_queued(chosen.T.flatten(), E, capacity), scores / total)


def check_score(score: str) -> None:
    """Raises ValueError for another way to score experts than those known."""
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}: use {' or '.join(map(repr, SCORES))}")


def _queued(
    visits: Int[Tensor, "Tk"], E: int, capacity: int | None
) -> tuple[Int[Tensor, "Tk"], Int[Tensor, " E"], Int[Tensor, " E"]]:
    """The order of the visits, how many of each expert take place, how many were asked for. All
    shapes are known beforehand, so that a dry run can do it too."""
    experts, order = visits.sort(stable=True)
    load = visits.new_zeros(E).scatter_add(0, visits, torch.ones_like(visits))
    if capacity is None:
        return order, load, load
    first = load.cumsum(0) - load
    place = torch.arange(len(visits), device=visits.device) - first[experts]
    late = (place >= capacity).long()
    return order[late.sort(stable=True).indices], load.clamp(max=capacity), load


def capacity(tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Visits that an expert has room for: `factor` times what it gets of T·k when all get alike.

    tokens, num_experts, k: T, E, and the experts of each token

    >>> capacity(tokens=4096, num_experts=64, k=1, factor=1.25)
    80
    >>> tokens, k, E, factor = 4095, 2, 64, 1.25
    >>> capacity(tokens, E, k, factor) == ceil(factor * k * tokens / E)  # rounded up
    True

    Source: Switch Transformer 2101.03961, equation 3 (k = 1); k as in Megatron-LM's
    --moe-expert-capacity-factor.
    """
    factor = units.positive(factor, "capacity_factor")
    visits = units.whole(tokens, "tokens") * units.whole(k, "k", 1)
    return ceil(Fraction(str(factor)) * visits / units.whole(num_experts, "num_experts", 1))


def balance_loss(routing: Routing) -> Float[Tensor, ""]:
    """E·Σ f·P over experts: f is the share of visits that an expert was asked for, P its mean
    probability. It is 1 where both are alike for all, E/k where all tokens want the same k experts
    with certainty; only P has a gradient.

    Source: Switch Transformer 2101.03961 (k = 1), after GShard 2006.16668, algorithm 1; for k > 1
    and normalized sigmoids DeepSeek-V3 2412.19437.
    """
    units.instance(routing, Routing, "balance_loss")
    probability = routing.probabilities.mean(0)
    share = routing.load.to(probability.dtype) / routing.chosen.numel()
    return len(share) * (share * probability).sum()
