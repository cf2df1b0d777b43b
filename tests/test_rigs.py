"""What the experiments of the labs stand on: two frozen texts, the same tokens on every Python; and three results of ZeRO."""

import hashlib

import pytest
import torch
from torch import nn

from labutils import zero
from labutils.teach import rigs
from labutils.teach.rigs import corpus
from labutils.world import World


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
    draw, model = torch.Generator().manual_seed(0), nn.Linear(3, 4).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draw)
    return model


def build(rank, level):
    model, comm = learner(), rank.comm("dp")
    if level == 3:
        return zero.shard(model, comm), torch.optim.AdamW(model.parameters())
    return model, zero.Optimizer(model.parameters(), comm, torch.optim.AdamW, level=level)


def step(rank, model, optimizer, k):
    optimizer.zero_grad()
    model(torch.full((2, 3), 1.0 + k, dtype=torch.float64)).square().mean().backward()
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
