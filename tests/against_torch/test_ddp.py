"""Our replicas beside torch's DistributedDataParallel, on the same ranks and the same batches."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
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


class Skips(GPT):
    """Every other rank leaves out the last layer, and no rank uses the parameter `never`."""

    def __init__(self, rank, generator):
        super().__init__(CONFIG, generator=generator)
        self.rank, self.never = rank, nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        x = self.blocks[0](self.embed(tokens))
        return self.head(self.norm(x if self.rank.rank % 2 else self.blocks[1](x)))


def wrapped(rank, whose, unused):
    """A model with weights of this rank's own, made a replica by one library or the other."""
    generator = torch.Generator().manual_seed(rank.rank)
    model = (Skips(rank, generator) if unused else GPT(CONFIG, generator=generator)).double()
    model.positions.weight.requires_grad_(False)
    if whose == "ours":
        return model, data_parallel.replicate(
            model, rank.comm("dp"), bucket_bytes=5000, find_unused=unused
        )
    group = rank.comm("dp").group
    return model, nn.parallel.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=unused, gradient_as_bucket_view=True
    )


def train(rank, whose, unused):
    """Losses, gradients and weights over three steps of two micro-batches each, the first of them under `no_sync`."""
    model, replica = wrapped(rank, whose, unused)
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
        told += [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        optimizer.step()
    return told + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("unused", [False, True])
def test_equal_to_torch(processes, unused):
    def program(rank):
        ours, theirs = (train(rank, whose, unused) for whose in ("ours", "theirs"))
        return len(ours) == len(theirs) and all(
            torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(ours, theirs, strict=True)
        )

    assert processes.run(program) == [True] * N


def test_buffers_are_torchs(processes):
    """A BatchNorm on data of each rank's own: two steps of two micro-batches, a look at the validation set, two steps more."""

    def program(rank):
        told = []
        for whose in ("ours", "theirs"):
            net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
            for parameter in net.parameters():
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(rank.rank))
            comm = rank.comm("dp")
            replica = (
                data_parallel.replicate(net, comm)
                if whose == "ours"
                else nn.parallel.DistributedDataParallel(net, process_group=comm.group)
            )
            optimizer, draw = (
                torch.optim.SGD(net.parameters(), lr=0.1),
                torch.Generator().manual_seed(rank.rank),
            )
            seen = []
            for step in range(5):
                net.train(step != 2)
                optimizer.zero_grad()
                for quiet in (True, False):
                    x = torch.randn(6, 3, dtype=torch.float64, generator=draw)
                    with (
                        replica.no_sync() if quiet else contextlib.nullcontext(),
                        torch.set_grad_enabled(step != 2),
                    ):
                        loss = replica(x).square().mean() / 2
                        seen += [buffer.clone() for buffer in net.buffers()]
                        if step != 2:
                            loss.backward()
                if step != 2:
                    optimizer.step()
            told.append(seen + [parameter.detach().clone() for parameter in net.parameters()])
        return [torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*told, strict=True)], [
            float(x.sum()) for x in told[0][:30]
        ]

    ranks = processes.run(program)
    assert all(all(equal) for equal, _ in ranks)
    assert (
        ranks[0][1] != ranks[1][1]
    )  # each rank has seen other data since the last broadcast, or there would be nothing to compare


class Shared(nn.Module):
    """One layer under two reentrant checkpoints: its gradient comes twice in a backward pass. The first layer keeps their bucket open."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = (
            nn.Linear(4, 4, dtype=torch.float64),
            nn.Linear(4, 4, dtype=torch.float64),
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_static_graph_is_torchs(processes):
    """Without it both refuse a gradient that comes twice; with it both are right."""

    def program(rank):
        def ours(net, static_graph):
            return data_parallel.replicate(net, rank.comm("dp"), static_graph=static_graph)

        def theirs(net, static_graph):
            return nn.parallel.DistributedDataParallel(
                net, process_group=rank.comm("dp").group, static_graph=static_graph
            )

        def gradients(wrap, static_graph):
            net, found = Shared(), []
            replica, draw = wrap(net, static_graph), torch.Generator().manual_seed(rank.rank)
            for _ in range(3):
                replica.zero_grad()
                replica(
                    torch.randn(2, 4, dtype=torch.float64, generator=draw).requires_grad_()
                ).square().mean().backward()
                found += [parameter.grad.clone() for parameter in net.parameters()]
            return found

        for wrap, why in ((ours, "comes 2 times"), (theirs, "mark a variable ready only once")):
            with pytest.raises(RuntimeError, match=why):
                gradients(wrap, False)
        return all(
            torch.allclose(a, b, rtol=1e-10, atol=1e-12)
            for a, b in zip(gradients(ours, True), gradients(theirs, True), strict=True)
        )

    assert processes.run(program) == [True] * N


def test_gradients_in_half_are_torchs_up_to_rounding(processes):
    """Torch sums in another order (its bfloat16 hook asks for NCCL): both lie within N · 2⁻¹¹ of the mean magnitude of what was added."""

    def program(rank):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model, comm = nn.Linear(64, 32, bias=False), rank.comm("dp")
        nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank.rank))

        def gradient(module):
            model.zero_grad()
            module(x).square().mean().backward()
            return model.weight.grad.clone()

        bound = N * 2**-11 * comm.all_reduce(gradient(model).abs()) / N
        ours = gradient(data_parallel.replicate(model, comm, reduce_dtype=torch.float16))
        copy = nn.Linear(64, 32, bias=False)  # parameters of its own: our hooks stay where they are
        copy.weight.data.copy_(model.weight)
        theirs = nn.parallel.DistributedDataParallel(copy, process_group=comm.group)
        theirs.register_comm_hook(comm.group, fp16_compress_hook)
        theirs(x).square().mean().backward()
        return bool(((ours - copy.weight.grad).abs() <= 2 * bound).all())

    assert processes.run(program) == [True] * N
