"""Our tensor parallelism beside torch's parallelize_module, on the same ranks and the same batches."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from labutils import tensor_parallel
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.world import World

N = 2
SIZES = dict(num_layers=2, d_model=16, num_heads=4, d_ff=24, vocab_size=12, seq_len=8)
CONFIG = ModelConfig(**SIZES, num_kv_heads=2, ffn="swiglu", positions="rope", tied=False)


@pytest.fixture(scope="module")
def processes():
    with World(Mesh(tp=N), engine="processes") as ranks:
        yield ranks


def plan(model, sequence):
    """Torch's styles for the parts of our GPT, with the tokens of the residual stream shared out or not."""
    stream = Shard(1) if sequence else Replicate()
    layout = dict(output_layouts=stream, use_local_output=not sequence)
    styles = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), **layout),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        styles["norm"] = SequenceParallel()
    for i in range(len(model.blocks)):
        here = f"blocks.{i}"
        for half, first, last in (
            ("attention", ("query", "key", "value"), "output"),
            ("feed_forward", ("gate", "up"), "down"),
        ):
            styles |= {f"{here}.{half}.{name}": ColwiseParallel() for name in first}
            styles[f"{here}.{half}.{last}"] = RowwiseParallel(**layout)
            if sequence:
                styles[f"{here}.{half}_norm"] = SequenceParallel()
                styles[f"{here}.{half}"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
    return styles


def trained(rank, whose, sequence):
    """Losses of three steps, and the whole gradients and weights after them."""
    comm, model = rank.comm("tp"), GPT(CONFIG, generator=torch.Generator().manual_seed(0)).double()
    if whose == "ours":
        tensor_parallel.parallelize(model, comm, sequence)
    else:
        mesh = DeviceMesh.from_group(comm.group, "cpu", mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan(model, sequence))
    optimizer, told = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens, targets = torch.randint(12, (2, 2, 8), generator=draw)
        optimizer.zero_grad()
        if whose == "ours":
            loss = model.loss(tokens, targets)
            loss.backward()
        else:
            with loss_parallel():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
        optimizer.step()
        told.append(whole(loss.detach()))
    return told, {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def share_of(x):
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_equal_to_torch(processes, sequence):
    """Shares are cut alike, so a rank compares its own; torch sums a norm's gradients where they are read."""

    def program(rank):
        (ours, mine), (theirs, other) = (
            trained(rank, whose, sequence) for whose in ("ours", "theirs")
        )
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), rtol=1e-10)
        for name, (gradient, weight) in mine.items():
            their_gradient, their_weight = other[name]
            if isinstance(their_gradient, DTensor):
                placed = their_weight.placements
                their_gradient = their_gradient.redistribute(placements=placed)
            assert torch.allclose(gradient, share_of(their_gradient), rtol=1e-10, atol=1e-12), name
            assert torch.allclose(weight, share_of(their_weight), rtol=1e-10, atol=1e-12), name
        return len(mine)

    assert processes.run(program) == [len(list(GPT(CONFIG).parameters()))] * N
