"""What the experiments of the labs stand on: two frozen texts, the same tokens on every Python; and three results of ZeRO."""

import hashlib

import pytest
import torch

from labutils import zero
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.teach import rigs
from labutils.teach.rigs import corpus
from labutils.world import World

SMALL = ModelConfig(num_layers=2, d_model=8, num_heads=2, d_ff=8, vocab_size=4, seq_len=4)


@pytest.mark.parametrize(
    "name, digest", [("topics", "1f33318beb65f01c"), ("source", "edb7858cbbeb1d93")]
)
def test_tokens_are_frozen(name, digest):
    tokens = corpus.encoded(name)
    text = "".join(corpus.ALPHABET[token] for token in tokens)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_each_character_is_its_place_in_ascii():
    assert len(corpus.ALPHABET) == len(set(corpus.ALPHABET)) == 96
    assert list(corpus.ALPHABET[1:]) == sorted(corpus.ALPHABET[1:])


def test_an_unknown_text_is_refused():
    with pytest.raises(ValueError, match="no text 'wiki': take one of topics, source"):
        corpus.encoded("wiki")


def learner():
    return GPT(SMALL, generator=torch.Generator().manual_seed(0)).double()


def build(rank, level, **switches):
    model, comm = learner(), rank.comm("dp")
    if level == 3:
        return zero.shard(model, comm, **switches), torch.optim.AdamW(model.parameters())
    return model, zero.Optimizer(model.parameters(), comm, torch.optim.AdamW, level=level)


def step(rank, model, optimizer, k):
    optimizer.zero_grad()
    x = torch.full((2, 4), k)
    model.loss(x, x).backward()
    optimizer.step()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_three_results_say_what_is_off(level):
    plain = learner()
    optimizer = torch.optim.AdamW(plain.parameters())
    for k in range(3):
        step(None, plain, optimizer, k)
    right = [parameter.detach() for parameter in plain.parameters()]
    with World(2) as two:
        fine = rigs.zero.three_results(two, level, build, step, right)
        assert fine.equal and (fine.sent_unexplained, fine.held_unexplained) == (0, 0)
        assert str(fine).split()[:3] == [str(level), "2", "True"]
        off = rigs.zero.three_results(two, level, build, step, [w + 1e-6 for w in right], steps=2)
        assert not off.equal and off.sent_unexplained == 0
        if level == 3:
            both = {"reshard": False, "prefetch": False}
            other = rigs.zero.three_results(two, level, build, step, right, **both)
            assert (other.sent_unexplained, other.held_unexplained) == (0, 0)
            assert other.sent < fine.sent


def test_a_clocked_step_is_split_into_its_passes_for_each_policy():
    """Computing again costs time in the backward pass, and there alone."""
    shape = ModelConfig(num_layers=2, d_model=128, num_heads=2, d_ff=512, vocab_size=16, seq_len=64)
    plain, full = rigs.checkpointing.clocked(shape, 4, ("none", "full"), repeats=5)
    assert all(seconds > 0 for seconds in (*plain, *full))
    assert full[1] > plain[1] + plain[0] / 4
