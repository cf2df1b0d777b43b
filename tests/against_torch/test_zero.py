"""Levels 1, 2 and 3 beside DistributedDataParallel with ZeroRedundancyOptimizer and beside FSDP2, on the same ranks and the same batches."""

import contextlib

import pytest
import torch
from torch import nn

from labutils import measure, world, zero
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.precision import LossScaler

N = 4
CONFIG = ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=24, vocab_size=13, seq_len=8)


@pytest.fixture(scope="module")
def processes():
    with world.World(N, engine="processes") as ranks:
        yield ranks


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def ours(rank, level, **options):
    """A model of ours: it, its optimizer, how it clips, and its weights, whole."""
    model = GPT(CONFIG, generator=torch.Generator().manual_seed(0)).double()
    comm = rank.comm("dp")
    if level == 3:
        zero.shard(model, comm, **options)
        optimizer, shards = adamw(model.parameters()), lambda: list(model.parameters())
    else:
        optimizer = zero.Optimizer(model.parameters(), comm, adamw, level=level, **options)
        shards = optimizer.collect

    def weights():
        with zero.gathered(model) if level == 3 else contextlib.nullcontext():
            return [parameter.detach().clone() for parameter in model.parameters()]

    return model, optimizer, lambda norm: zero.clip_grad_norm(shards(), comm, norm), weights


def replicated(rank):
    """The same of torch's: everybody holds weights and gradients, the optimizer's state is shared out, parameter by parameter."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    group = rank.comm("dp").group
    model = DistributedDataParallel(
        GPT(CONFIG, generator=torch.Generator().manual_seed(0)).double(), process_group=group
    )
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2
    )
    return (
        model,
        optimizer,
        lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
        lambda: [parameter.detach() for parameter in model.parameters()],
    )


def fully_sharded(rank, reshard):
    """The same of torch's: every parameter is cut along its first dimension."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(rank.comm("dp").group, "cpu")
    model = GPT(CONFIG, generator=torch.Generator().manual_seed(0)).double()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def clip(norm):
        return nn.utils.clip_grad_norm_(model.parameters(), norm).full_tensor()

    return (
        model,
        adamw(model.parameters()),
        clip,
        lambda: [parameter.full_tensor().detach() for parameter in model.parameters()],
    )


def train(rank, made):
    """Losses, gradient norms and final weights of three steps, each of two micro-batches."""
    model, optimizer, clip, weights = made
    generator, told = torch.Generator().manual_seed(rank.rank), []
    for _ in range(3):
        for _ in range(2):
            x = torch.randint(0, CONFIG.vocab_size, (2, CONFIG.seq_len), generator=generator)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) / 2
            loss.backward()
            told.append(loss.item())
        told.append(clip(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(told, dtype=torch.float64), weights()


@pytest.mark.parametrize(
    "theirs", ["ZeroRedundancyOptimizer", "fully_shard", "fully_shard, resharding"]
)
def test_equal_to_torch(processes, theirs):
    def program(rank):
        peer = (
            replicated(rank)
            if theirs.startswith("Zero")
            else fully_sharded(rank, theirs.endswith("resharding"))
        )
        told, weights = train(rank, peer)
        mine = [
            train(rank, ours(rank, 1)),
            train(rank, ours(rank, 2, bucket_bytes=5000)),
            train(rank, ours(rank, 3)),
        ]
        return [
            torch.allclose(losses, told, rtol=1e-10)
            and all(
                torch.allclose(a, b, rtol=1e-10, atol=1e-10)
                for a, b in zip(final, weights, strict=True)
            )
            for losses, final in mine
        ]

    assert processes.run(program) == [[True] * 3] * N


def test_one_overflow_is_skipped_as_with_fsdp2_and_gradscaler(processes):
    """In the second of three steps one row of one rank's gradient is inf; whoever owns it, scales and weights stay the same on all ranks."""

    def model():
        linear = nn.Linear(8, N, bias=False, dtype=torch.float64)
        nn.init.ones_(linear.weight)
        return linear

    def run(rank, model, optimizer, scaler):
        scales = []
        for step in range(3):
            row = torch.ones(N, dtype=torch.float64)
            row[-1] = torch.inf if step == rank.rank == 1 else rank.rank
            scaler.scale((model(torch.ones(2, 8, dtype=torch.float64)) * row).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(
                scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else scaler.value
            )
        return scales

    def program(rank):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        comm, theirs = rank.comm("dp"), model()
        fully_shard(theirs, mesh=DeviceMesh.from_group(comm.group, "cpu"))
        expected = run(
            rank,
            theirs,
            adamw(theirs.parameters()),
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1),
        )
        weight, equal = theirs.weight.full_tensor(), []
        for level in (1, 2, 3):
            mine = model()
            if level == 3:
                owner = adamw(zero.shard(mine, comm).parameters())
            else:
                owner = zero.Optimizer(mine.parameters(), comm, adamw, level=level)
            scales = run(rank, mine, owner, LossScaler(2.0**10, growth_interval=1, comm=comm))
            with zero.gathered(mine) if level == 3 else contextlib.nullcontext():
                equal.append(scales == expected and torch.allclose(mine.weight, weight, rtol=1e-10))
        return expected, equal

    assert processes.run(program) == [([2.0**11, 2.0**10, 2.0**11], [True] * 3)] * N


def test_a_rank_rests_with_as_much_as_under_fsdp2(processes):
    """Here n divides every first dimension but the vocabulary's, whose rows FSDP2 deals out whole and we do not."""

    def program(rank):
        theirs, *_ = fully_sharded(rank, True)
        mine, *_ = ours(rank, 3)
        rows = sum(parameter.to_local().numel() for parameter in theirs.parameters())
        return measure.model_states(mine).by("name")["weights"] // 8, rows

    shares, rows = zip(*processes.run(program), strict=True)
    assert (
        set(shares) == {CONFIG.num_params // N}
        and sum(rows) == CONFIG.num_params
        and max(rows) > CONFIG.num_params // N
    )
