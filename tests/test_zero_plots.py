"""Who holds what: occupancy is what `held` counts, laid out, and its figure tells it."""

import itertools

import pytest
import torch
from torch import nn

from labutils import measure, world, zero
from labutils.teach import plots, rigs


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


def program(rank, level):
    model, comm = layers(), rank.comm("dp")
    if level == 3:
        zero.shard(model, comm)
        owner = torch.optim.AdamW(model.parameters())
    else:
        owner = zero.Optimizer(model.parameters(), comm, level=level, bucket_bytes=4 * 42)

    def step():
        owner.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        owner.step()

    step()
    return rigs.occupancy.occupancy(step, model, owner), measure.model_states(
        model, getattr(owner, "inner", owner)
    )


@pytest.fixture(scope="module")
def levels():
    with world.World(4) as four:
        return {level: four.run(program, level) for level in (1, 2, 3)}


def there(occupancy, component, operation):
    return [
        span
        for span in occupancy.spans
        if span.kind == component and span.start <= operation < span.end
    ]


@pytest.mark.parametrize("level", (1, 2, 3))
def test_the_end_of_the_step_holds_what_held_counts(levels, level):
    for occupancy, held in levels[level]:
        for component, itemsize in occupancy.itemsizes.items():
            elements = sum(
                span.elements[1] - span.elements[0]
                for span in there(occupancy, component, occupancy.operations - 1)
            )
            steps = held.by("name").get("step", 0) if component == "optimizer" else 0
            assert elements * itemsize == held.by("component")[component] - steps


@pytest.mark.parametrize("level", (1, 2, 3))
def test_at_rest_the_ranks_share_out_what_is_sharded(levels, level):
    for component in ("optimizer", "gradients", "weights")[:level]:
        owned = sorted(
            span.elements
            for occupancy, _ in levels[level]
            for span in there(occupancy, component, occupancy.operations - 1)
        )
        padding = 2 * (component == "optimizer")  # of 42 elements a layer, which is not stepped
        assert owned[0][0] == 0 and owned[-1][1] == levels[level][0][0].numel - padding
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(owned)]
        assert set(gaps) <= {0, padding} and sum(gaps) == 2 * padding


def test_at_level_3_at_most_two_units_are_whole(levels):
    occupancy, _ = levels[3][0]
    unit = occupancy.numel // 3
    for operation in range(occupancy.operations):
        assert (
            sum(
                span.elements[1] - span.elements[0] == unit
                for span in there(occupancy, "weights", operation)
            )
            <= 2
        )
    assert list(occupancy.phases) == ["forward", "backward", "step"]


def test_the_figure_tells_the_peaks(levels):
    picture = plots.who_holds(title="t", level_1=[o for o, _ in levels[1]], level_3=[o for o, _ in levels[3]])
    assert (
        "level 1: at most 1.32 kB on rank 0" in picture.alt
        and "everything would be 2.11 kB" in picture.alt
    )
    assert len(picture.png) > 1000
