"""Levels 1, 2 and 3: the same numbers as one process, and every byte sent and held as predicted."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zero_training import (
    LEVELS,
    OPTIMIZERS,
    TIED,
    UNTIED,
    advance,
    assert_books,
    assert_equal,
    batches,
    build,
    inner,
    own,
    ranks,
    train,
)

from labutils import measure, units, world


@pytest.fixture(scope="module")
def processes():
    with world.World(4, engine="processes") as four:
        yield four


CASES = [
    *((TIED, n, {}) for n in (1, 2, 3, 4)),
    (UNTIED, 3, {}),
    (TIED, 3, dict(accumulation=2, max_norm=0.5)),
    (TIED, 4, dict(optimizer="momentum", frozen=("tokens", "feed_forward.up.bias", "query"))),
    (TIED, 2, dict(optimizer="sgd", max_norm=0.1, frozen=("blocks.1", "norm.weight"))),
]


@pytest.mark.parametrize("config, n, settings", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_to_one_process_sent_and_held_as_predicted(config, n, settings, level):
    results = ranks(n).run(train, config, level, **settings)
    assert_equal(results, config, **settings)
    assert_books(results, ranks(n).ledger, config, level, **settings)


@pytest.mark.parametrize("level", LEVELS)
def test_processes_give_the_same_bits_and_books(processes, level):
    settings = dict(accumulation=2, max_norm=0.5, frozen=("positions",), groups="adamw")
    theirs, ours = (each.run(train, TIED, level, **settings) for each in (ranks(4), processes))
    assert [result.losses for result in ours] == [result.losses for result in theirs]
    assert all(
        torch.equal(mine.weights[name], other.weights[name])
        for mine, other in zip(ours, theirs, strict=True)
        for name in other.weights
    )
    assert processes.ledger.diff(ranks(4).ledger).unexplained == 0
    assert_equal(ours, TIED, **settings)
    assert_books(ours, processes.ledger, TIED, level, **settings)


SENT = [
    *((4, level, dict(dtype=torch.bfloat16, reduce_dtype=torch.float32)) for level in (1, 2)),
    (4, 3, dict(param_dtype=torch.bfloat16, dtype=torch.float32)),
    (4, 3, dict(param_dtype=torch.bfloat16, dtype=torch.float32, reduce_dtype=torch.float32)),
    (4, 2, dict(bucket_bytes=1)),
    (4, 2, dict(bucket_bytes=units.GB, accumulation=3)),
    (4, 3, dict(reshard=False, accumulation=2)),
    (3, 3, dict(prefetch=False)),
]


@pytest.mark.parametrize("n, level, settings", SENT, ids=str)
def test_bytes_sent_are_those_of_the_formula(n, level, settings):
    results = ranks(n).run(train, TIED, level, steps=2, look=False, **settings)
    assert_books(results, ranks(n).ledger, TIED, level, steps=2, look=False, **settings)


class Made(TorchDispatchMode):
    """Every storage that operations make, as long as it lives."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new, given = (
            {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in (out, (args, kwargs))
        )
        self.storages |= new - given
        return out


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_leaves_nothing_behind(level):
    """Of what a step makes, nothing outlives it."""

    def program(rank):
        model = build(TIED, 0)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        advance(model, owner, rank, batches(TIED, 1))
        before = measure.model_states(model, inner(owner))
        with Made() as made:
            advance(model, owner, rank, batches(TIED, 1))
        return before.diff(measure.model_states(model, inner(owner))).unexplained, sum(
            storage.nbytes() for storage in made.storages
        )

    assert ranks(2).run(program) == [(0, 0)] * 2
