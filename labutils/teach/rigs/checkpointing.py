"""A step by the clock, with and without computing again."""

import time
from collections.abc import Iterable

import torch

from labutils import checkpointing
from labutils.config import ModelConfig
from labutils.model import GPT


def clocked(
    config: ModelConfig, batch: int, policies: Iterable[str], repeats: int = 6
) -> list[tuple[float, float]]:
    """Seconds of the processor that the forward and the backward pass take under each policy: the
    least of several steps, in which the policies take turns.

    batch: sequences in a step
    policies: names in `checkpointing.POLICIES`
    repeats: steps under each
    """
    nets = [checkpointing.apply(GPT(config), policy) for policy in policies]
    tokens = torch.zeros(batch, config.seq_len, dtype=torch.long)
    seen: list[list[tuple[float, float]]] = [[] for _ in nets]
    for _ in range(repeats):
        for net, times in zip(nets, seen, strict=True):
            net.zero_grad()
            start = time.process_time()
            loss = net.loss(tokens, tokens)
            between = time.process_time()
            loss.backward()
            times.append((between - start, time.process_time() - between))
    return [(min(a for a, _ in times), min(b for _, b in times)) for times in seen]
