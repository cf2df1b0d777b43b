"""The order of level 3 that is taught is the one that `zero.shard` follows."""

import pytest
import torch
from torch import nn

from labutils import world, zero


def _sharded(rank, count):
    """A step over a chain of `count` units, each of another size."""
    layers = [nn.Sequential(nn.Linear(4 * k, 4 * k + 4), nn.Tanh()) for k in range(1, count + 1)]
    model = nn.Sequential(*layers)
    zero.shard(model, rank.comm("dp"))
    model(torch.ones(2, 4)).square().sum().backward()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_sharded_step_sends_in_the_order_that_is_taught(count):
    with world.World(2, engine="threads") as two:
        two.run(_sharded, count)
        verbs = {"all_gather": "gather", "reduce_scatter": "reduce"}
        sent = [(verbs[e.op], e.sent) for e in two.trace.ranks[0] if e.op in verbs]
    # A unit's weights and biases are 4k · (4k + 4) + (4k + 4) numbers; a rank sends half of them.
    nbytes = [4 * (4 * k + 1) * (4 * k + 4) // 2 for k in range(1, count + 1)]
    taught = [(what, nbytes[i]) for what, i in zero.unit_order(count) if what in verbs.values()]
    # The library cannot know that the backward of its last unit comes next: it gathers it again.
    taught.insert(count, ("gather", nbytes[-1]))
    assert sent == taught


def test_at_most_two_units_are_whole_and_each_computes_twice():
    for count in range(1, 8):
        whole = set()
        for what, unit in zero.unit_order(count):
            if what == "gather":
                whole.add(unit)
            elif what == "free":
                whole.remove(unit)
            else:
                assert unit in whole or what == "reduce"
            assert len(whole) <= 2
        assert not whole
        computed = [step for step in zero.unit_order(count) if step[0] in ("forward", "backward")]
        assert computed == [("forward", i) for i in range(count)] + [
            ("backward", i) for i in reversed(range(count))
        ]
