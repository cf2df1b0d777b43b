"""The order of level 3 that is taught is the one that `zero.shard` follows."""

import pytest
import torch
from torch import nn

from labutils import collectives, world, zero
from labutils.config import Link


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
                # A gradient travels when its weights are gone.
                assert (unit in whole) is (what != "reduce")
            assert len(whole) <= 2
        assert not whole
        computed = [step for step in zero.unit_order(count) if step[0] in ("forward", "backward")]
        assert computed == [("forward", i) for i in range(count)] + [
            ("backward", i) for i in reversed(range(count))
        ]


@pytest.mark.parametrize("n, tokens", [(8, 2_000), (8, 200_000), (64, 2_000), (64, 200_000)])
def test_a_step_takes_what_the_longer_of_two_queues_takes(n, tokens):
    """Many equal layers: either the gathers of the forward pass hide but the first one, or the
    computation does."""
    count, params, link, rate = 40, 10**8, Link(0, 50e9), 400e12
    forward = 2 * params * tokens / rate
    gather = collectives.cost("all_gather_ring", 2 * params, n, link)
    step = zero.step_timeline(
        zero.unit_order(count), [(2 * params, forward)] * count, n=n, link=link
    )
    assert step.computed <= step.makespan
    if forward > gather:  # and backward, twice as long, hides a gather and a reduction
        assert tokens > rate / link.bandwidth * (n - 1) / n
        assert step.exposed == pytest.approx(2 * gather)  # the first gather, the last reduction
    else:
        assert step.makespan == pytest.approx((2 * count - 1 + count) * gather, rel=0.05)


def test_what_nobody_hides_is_exposed_wherever_it_lies():
    late = [("gather", 0), ("forward", 0), ("gather", 1), ("forward", 1), ("backward", 1)]
    late += [("reduce", 1), ("backward", 0), ("reduce", 0)]
    step = zero.step_timeline(late, [(1000, 1.0)] * 2, n=2, link=Link(0, 1000))
    assert step.waits == ((0, 0.5), (1.5, 2.0), (7.0, 7.5))
    assert step.exposed == 1.5 and step.hidden == pytest.approx(0.25)
