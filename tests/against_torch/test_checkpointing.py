"""Our `checkpoint` beside `torch.utils.checkpoint`: the same gradients to the bit, the same memory, the same number of evaluations."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as theirs
from torch.utils.checkpoint import checkpoint_sequential

from labutils import checkpointing, measure
from labutils.config import ModelConfig
from labutils.model import GPT

CONFIG = ModelConfig(
    num_layers=3, d_model=32, num_heads=4, d_ff=96, vocab_size=65, seq_len=12, dropout=0.2
)
CALLS = {
    "plain": lambda fn, *args: fn(*args),
    "ours": checkpointing.checkpoint,
    "theirs": lambda fn, *args: theirs(fn, *args, use_reentrant=False),
}


def tokens(seed):
    return torch.randint(
        CONFIG.vocab_size, (2, CONFIG.seq_len), generator=torch.Generator().manual_seed(seed)
    )


class Through(nn.Module):
    """A GPT whose blocks are called in one of the three ways, and which counts the calls of its blocks."""

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call, self.calls = model, call, 0
        for block in model.blocks:
            block.attention.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def loss(self, amp=False):
        torch.manual_seed(4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            x = self.model.embed(tokens(1))
            for block in self.model.blocks:
                x = self.call(block, x)
            return nn.functional.cross_entropy(
                self.model.head(self.model.norm(x)).flatten(0, 1), tokens(2).flatten()
            )


@pytest.fixture
def trio():
    model = GPT(CONFIG, generator=torch.Generator().manual_seed(0))
    return {name: Through(copy.deepcopy(model), call) for name, call in CALLS.items()}


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
def test_gradients_to_the_bit(trio, amp):
    found = {}
    for name, through in trio.items():
        through.loss(amp).backward()
        found[name] = [parameter.grad for parameter in through.parameters()] + [torch.rand(1)]
    for name in ("ours", "theirs"):
        assert all(torch.equal(a, b) for a, b in zip(found["plain"], found[name], strict=True)), (
            name
        )


def test_memory_and_evaluations(trio):
    kept = {
        name: measure.saved_activations(through.loss, through).total
        for name, through in trio.items()
    }
    assert kept["ours"] == kept["theirs"] < kept["plain"] / 2
    for through in trio.values():
        through.calls = 0
        through.loss().backward()
    assert {name: through.calls for name, through in trio.items()} == {
        "plain": 3,
        "ours": 6,
        "theirs": 6,
    }


def test_segments_are_those_of_checkpoint_sequential():
    """Both leave out the last segment, whose backward pass comes next."""
    calls = []
    chain = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)]
    for i, module in enumerate(chain):
        module.register_forward_hook(lambda module, inputs, output, i=i: calls.append(i))
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint_sequential(chain, 4, x, use_reentrant=True).sum().backward()
    counted = tuple(calls.count(i) for i in range(8))
    assert counted == checkpointing.segments(8, 4).evaluations


def test_second_derivatives():
    x = torch.linspace(-1, 1, 7, requires_grad=True)
    found = []
    for call in CALLS.values():
        (first,) = torch.autograd.grad(
            call(lambda x: x.sin().exp() * x, x).sum(), x, create_graph=True
        )
        found.append(torch.autograd.grad(first.sum(), x)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
