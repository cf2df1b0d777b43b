"""What a router does over training steps: a small GPT with experts learns a synthetic language.
Long runs are recorded: data/expert_routing.json, which tools/expert_routing.py writes."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labutils import expert_parallel
from labutils.config import DATA, ModelConfig
from labutils.model import GPT
from labutils.world import Rank

_BATCH, LR = 8, 1e-2
EVERY = 10  # steps that a number of a record is the mean of
_MODEL = ModelConfig(
    num_layers=1, d_model=32, num_heads=2, d_ff=32, vocab_size=16, seq_len=32, ffn="swiglu",
    norm="rmsnorm", positions="rope", bias=False, tied=False, num_experts=8, top_k=2,
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "room for nothing": dict(factor=0.01),
    "words equally frequent": dict(skewed=False),
    "rows centered": dict(centered=True),
    "frequencies given": dict(given=True),
    "α = 0.01": dict(alpha=0.01),
    "α = 0.1": dict(alpha=0.1),
    "dropping": dict(factor=1.25),
    "dropping, α = 0.1": dict(factor=1.25, alpha=0.1),
    "sigmoid scores": dict(rate=0.0),
    "a bias": dict(rate=0.01),
}
"""What is done for balance, by the name under which it is recorded."""


def language(
    words: int, length: int, seed: int, *, skewed: bool = True
) -> Callable[[int], Int[Tensor, "n length"]]:
    """A function that draws n sequences. The next word hangs on the last two together: each pair is
    followed by one of two words, as often by the one as by the other.

    skewed: word number i follows pairs as i^-0.7 does, a softened law of Zipf; without it all words
        are equally frequent
    """
    draw = torch.Generator().manual_seed(seed)
    often = torch.arange(1, words + 1).double() ** (-0.7 * skewed)
    following = often.expand(words**2, -1).multinomial(2, generator=draw)

    def sequences(n: int) -> Int[Tensor, "n length"]:
        said = list(torch.randint(words, (2, n), generator=draw))
        while len(said) < length:
            pair = said[-2] + words * said[-1]
            said.append(following[pair, torch.randint(2, (n,), generator=draw)])
        return torch.stack(said, 1)

    return sequences


@dataclass(frozen=True)
class RouterRun:
    """A training run, step by step, and where the words of its last step go.

    asked: visits that the first layer's experts were asked for
    dropped: the share of them that found no room
    losses: the model's own, without what is added for the router
    words, chosen, logits: of the last step, the words, the experts that each of them visits, and
        the router's logits
    """

    asked: Int[Tensor, "steps E"]
    dropped: Float[Tensor, " steps"]
    losses: Float[Tensor, " steps"]
    words: Int[Tensor, "b s"]
    chosen: Int[Tensor, "T k"]
    logits: Float[Tensor, "T E"]

    @property
    def busiest(self) -> list[float]:
        """The visits of the busiest expert over the mean, step by step."""
        return (self.asked.max(1).values / self.asked.double().mean(1)).tolist()

    def visits(self, ranks: int) -> list[list[int]]:
        """Of the last step, visits to each expert from each of so many ranks, which share out the
        sequences."""
        E = self.asked.shape[1]
        return [torch.bincount(part.flatten(), minlength=E).tolist()
                for part in self.chosen.chunk(ranks)]  # fmt: skip


def train_router(
    rank: Rank,
    seed: int,
    *,
    skewed: bool = True,
    alpha: float = 0.0,
    z_loss: float = 0.0,
    rate: float | None = None,
    factor: float | None = None,
    centered: bool = False,
    given: bool = False,
    lr: float = LR,
    steps: int = 40,
) -> RouterRun:
    """What becomes of a `_MODEL` on eight sequences a step of a language.

    In float64, so that rounding, which differs between machines, decides no choice.

    alpha: of the balance loss
    z_loss: what the squared log of the sum of exponentials is weighted with
    rate: γ of a bias, with sigmoid scores; without it scores are a softmax, and there is none
    factor: c of the room that an expert has; without it no visit is dropped
    centered: takes from the rows that the router scores (and the experts do not get) their mean
    given: adds the log of each word's frequency to the logits of the model, as a fixed bias
    """
    model = GPT(_MODEL, generator=torch.Generator().manual_seed(seed)).double()
    how: dict[str, Any] = {} if rate is None else dict(score="sigmoid", biased=True)
    expert_parallel.spread_experts(model, rank.comm("ep"), capacity_factor=factor, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    said = language(_MODEL.vocab_size, _MODEL.seq_len + 1, seed, skewed=skewed)
    layer = model.blocks[0].feed_forward
    assert isinstance(layer, expert_parallel.ExpertParallel)
    made: list[Tensor] = []
    if centered:
        layer.router.register_forward_pre_hook(lambda _, rows: rows[0] - rows[0].mean(0))
    if given:
        sample = language(_MODEL.vocab_size, _MODEL.seq_len + 1, seed, skewed=skewed)(2000)
        known = torch.bincount(sample.flatten(), minlength=_MODEL.vocab_size).double()
        model.head.register_forward_hook(lambda _, rows, logits: logits + known.log())
    layer.router.register_forward_hook(lambda _, rows, logits: made.append(logits))
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        words = said(_BATCH)
        loss = model.loss(words[:, :-1], words[:, 1:])
        logits = made.pop()
        pull = z_loss * logits.logsumexp(-1).square().mean()
        ((loss + alpha * expert_parallel.auxiliary_loss(model)) + pull).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rate is not None:
            expert_parallel.update_bias(model, rank.comm("dp"), rate)
        routing = layer.routing
        assert routing is not None
        lost = 1 - routing.counts.sum() / routing.load.sum()
        seen.append((routing.load, lost, loss.detach()))
        chosen = routing.chosen
    asked, dropped, losses = map(torch.stack, zip(*seen, strict=True))
    return RouterRun(asked, dropped, losses, words[:, :-1], chosen, logits.detach())


def summary(run: RouterRun) -> dict[str, list]:
    """What is recorded of a run: means of every ten steps, rounded, and the visits of the last
    step's words, a row for each word."""
    columns = dict(busiest=torch.tensor(run.busiest), dropped=run.dropped, loss=run.losses)
    kept = {
        name: [round(x, 4) for x in each.view(-1, EVERY).double().mean(1).tolist()]
        for name, each in columns.items()
    }
    E = run.asked.shape[1]
    pairs = run.words.flatten()[:, None] * E + run.chosen
    by_word = torch.bincount(pairs.flatten(), minlength=_MODEL.vocab_size * E).view(-1, E)
    return kept | dict(words=by_word.tolist())


@functools.cache
def routing_record() -> dict[str, Any]:
    """The record: `made`, how; `runs`, of each way of `WAYS` the summaries of its seeds."""
    return json.loads((DATA / "expert_routing.json").read_text(encoding="utf-8"))


def ends(way: str, column: str) -> list[float]:
    """The mean over the last 50 steps, of each seed that is recorded."""
    runs, places = routing_record()["runs"][way], 50 // EVERY
    return [sum(run[column][-places:]) / places for run in runs]


def worse(way: str, than: str = "nothing") -> tuple[float, float]:
    """How much more loss a way ends with than another, seed by seed: the mean, and its standard
    error."""
    pairs = zip(ends(way, "loss"), ends(than, "loss"), strict=True)
    apart = torch.tensor([a - b for a, b in pairs])
    return apart.mean().item(), (apart.std() / len(apart) ** 0.5).item()
