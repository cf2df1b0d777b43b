"""Our replicas beside torch's DistributedDataParallel, on the same ranks and the same batches."""

import contextlib

import pytest
import torch
from torch import nn

from labutils import data_parallel, world
from labutils.config import ModelConfig
from labutils.model import GPT

N = 4
CONFIG = ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=24, vocab_size=13, seq_len=8)


@pytest.fixture(scope="module")
def processes():
    with world.World(N, engine="processes") as ranks:
        yield ranks


def wrapped(rank, whose):
    """A model with weights of this rank's own, made a replica by one library or the other."""
    generator = torch.Generator().manual_seed(rank.rank)
    model = GPT(CONFIG, generator=generator).double()
    model.positions.weight.requires_grad_(False)
    if whose == "ours":
        return model, data_parallel.replicate(model, rank.comm("dp"), bucket_bytes=5000)
    group = rank.comm("dp").group
    return model, nn.parallel.DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True
    )


def train(rank, whose):
    """Losses, gradients and weights over three steps of two micro-batches each, the first of them under `no_sync`."""
    model, replica = wrapped(rank, whose)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, told = torch.Generator().manual_seed(rank.rank), []
    for _ in range(3):
        optimizer.zero_grad()
        for quiet in (True, False):
            tokens = torch.randint(CONFIG.vocab_size, (2, CONFIG.seq_len), generator=draw)
            with replica.no_sync() if quiet else contextlib.nullcontext():
                loss = (
                    nn.functional.cross_entropy(replica(tokens).flatten(0, 1), tokens.flatten()) / 2
                )
                loss.backward()
            told.append(loss.detach())
        told += [p.grad.clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
    return told + [p.detach().clone() for p in model.parameters()]


def test_equal_to_torch(processes):
    def program(rank):
        ours, theirs = (train(rank, whose) for whose in ("ours", "theirs"))
        return len(ours) == len(theirs) and all(
            torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(ours, theirs, strict=True)
        )

    assert processes.run(program) == [True] * N


class _Branches(nn.Module):
    """One layer for all ranks, one for rank 0, one for nobody."""

    def __init__(self):
        super().__init__()
        self.all, self.first, self.none = (nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x, rank):
        return self.all(x) + (self.first(x) if rank == 0 else 0)


def test_a_gradient_that_comes_from_no_rank_stays_none(processes):
    """What lab 08 says of `find_unused_parameters`: from one rank it counts, and the rest is 0."""

    def program(rank):
        options = dict(process_group=rank.comm("dp").group, find_unused_parameters=True)
        net = nn.parallel.DistributedDataParallel(_Branches(), **options)
        net(torch.ones(1, 2), rank.rank).sum().backward()
        return [p.grad if p.grad is None else p.grad.mean().item() for p in net.parameters()]

    assert processes.run(program) == [[1.0, 1 / N, None]] * N
