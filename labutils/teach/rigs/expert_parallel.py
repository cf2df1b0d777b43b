"""What balance does over training steps: a small GPT with experts learns a synthetic language."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from labutils import expert_parallel
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import Rank


def language(words: int, length: int, seed: int) -> Callable[[int], Int[Tensor, "n length"]]:
    """A function that draws n sequences: each word is followed by one of four others, and the
    earlier a word stands in the list, the more words it follows (Zipf's law)."""
    draw = torch.Generator().manual_seed(seed)
    often = 1 / torch.arange(1, words + 1)
    following = torch.stack([often.multinomial(4, generator=draw) for _ in range(words)])

    def sequences(n: int) -> Int[Tensor, "n length"]:
        said = [torch.randint(words, (n,), generator=draw)]
        for _ in range(length - 1):
            said.append(following[said[-1], torch.randint(4, (n,), generator=draw)])
        return torch.stack(said, 1)

    return sequences


def loads(
    rank: Rank,
    config: ModelConfig,
    seed: int,
    *,
    alpha: float = 0.0,
    rate: float | None = None,
    factor: float | None = None,
    steps: int = 40,
) -> tuple[Int[Tensor, "steps E"], float]:
    """The visits that the first layer's experts were asked for in each step of training on eight
    sequences a step, and the mean loss of the last ten steps.

    In float64, so that rounding, which differs between machines, decides no choice.

    alpha: of the balance loss
    rate: γ of a bias, with sigmoid scores; without it there is none
    factor: c of the room that an expert has; without it no visit is dropped
    """
    model = GPT(config, generator=torch.Generator().manual_seed(seed)).double()
    how = dict(score="sigmoid", biased=True) if rate else {}
    expert_parallel.spread_experts(model, rank.comm("ep"), capacity_factor=factor, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sequences = language(config.vocab_size, config.seq_len + 1, seed)
    taken, losses = [], []
    for _ in range(steps):
        words = sequences(8)
        loss = model.loss(words[:, :-1], words[:, 1:])
        (loss + alpha * expert_parallel.auxiliary_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rate:
            expert_parallel.update_bias(model, rank.comm("dp"), rate)
        taken.append(model.blocks[0].feed_forward.routing.load)
        losses.append(loss.item())
    return torch.stack(taken), sum(losses[-10:]) / len(losses[-10:])
