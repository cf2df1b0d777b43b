"""Animations have a frame for each step, and the last one is where the steps lead."""

import re

import pytest
import torch
from pictures import PLANS, ring

from labutils import collectives, context_parallel
from labutils.teach import plots
from labutils.teach.plots import style
from labutils.world import World


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_ring_fills_every_piece(n):
    def summed(frame):
        return [
            [int(count) for count in mine.split()]
            for mine in re.findall(
                r"rank \d: ([\d ]+)", re.search(r'aria-label="([^"]*)"', frame)[1]
            )
        ]

    animation = plots.ring_animation(ring(n, 2 * (n - 1)))
    assert len(animation.frames) == len(animation.labels) == 2 * (n - 1) + 1
    assert summed(animation.frames[0]) == [[1] * n] * n
    half = summed(animation.frames[n - 1])
    assert all(
        half[rank][rank] == n and sum(count == n for count in half[rank]) == 1 for rank in range(n)
    )  # rank i has finished piece i
    assert summed(animation.frames[-1]) == [[n] * n] * n
    gathered = plots.ring_animation(ring(n, n - 1, op="all_gather_ring"))
    assert summed(gathered.frames[0]) == [
        [int(piece == rank) for piece in range(n)] for rank in range(n)
    ]
    assert summed(gathered.frames[-1]) == [[1] * n] * n


def test_the_ring_is_drawn_from_a_real_trace():

    with World(4) as world:
        world.run(lambda rank: collectives.all_reduce_ring(torch.ones(1000), rank.comm("dp")))
        animation = plots.ring_animation(world.trace)
    assert len(animation.frames) == 7 and animation.labels[-1].endswith(
        "sent so far: 6.00 kB per rank."
    )
    html = animation._repr_html_()
    assert html.count('class="lu-frame"') == 7 and html.count('class="lu-frame" hidden') == 6
    assert html == plots.ring_animation(world.trace)._repr_html_() and "http" not in html.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_buckets_fill_in_the_order_of_the_backward_pass():
    animation = plots.bucket_animation([dict(head=300, norm=100), dict(embed=50)], bucket_bytes=400)
    assert len(animation.frames) == len(animation.labels) == 4
    assert ["complete" in label for label in animation.labels] == [False, False, True, True]
    assert "no more gradients will come" in animation.labels[-1]
    assert animation.alt.endswith("bucket 0: head and norm, 400 B; bucket 1: embed, 50 B.")
    assert [
        frame.count(">all-reduce<") + frame.count(">reduce<") for frame in animation.frames
    ] == [0, 0, 1, 2]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_an_animation_has_a_frame_for_each_computation(plan):
    animation = plots.plan_animation(plan.timeline)
    computed = [step for step in plan.steps if step.op != "drop"]
    assert len(animation.frames) == len(computed) + 1
    assert f"{sum(plan.evaluations)} forward evaluations" in animation.alt
    for frame in animation.frames:  # a node for x0, and one f and one b for every stage
        assert frame.count("<circle") == 1 + 2 * plan.n
    filled = [frame.count('fill="#4DB2F5"') for frame in animation.frames]
    assert (
        filled[0] == filled[-1] == 0
        and max(filled) <= max(len(state.values) for state in plan.states) - 1
    )
    assert "held: x0; recorded: none; gradient at x0" in animation.frames[-1]


def test_a_walk_tells_its_tiles():
    corners = [(slice(i, i + 4), slice(j, j + 4)) for i in (0, 4) for j in (0, 4) if j <= i]
    walk = plots.tile_walk(corners, s_q=8, s_k=8)
    assert len(walk.frames) == 3 and "1 of 4 tiles are never computed" in walk.alt
    assert "finished" not in walk.labels[1] and "finished" in walk.labels[2]


def test_keys_go_round_and_what_is_masked_is_skipped():
    ring = plots.key_ring(context_parallel.layout(16, 4, "contiguous").grid())
    assert len(ring.frames) == 4 and "compute: 0, 0, 1, 1" in ring.labels[2]
    assert ring.labels[2].startswith("Step 2.")  # from 0, as `who_computes` numbers them
    assert "skipped: all of rank 0, 1." in ring.labels[2] and "skipped" not in ring.labels[0]
    assert ring.frames[3].count(style.SERIES[3]) == 3  # its keys, its queries, what it computes
    fair = plots.key_ring(context_parallel.layout(16, 4).grid())
    assert all("compute: 2, 2, 2, 2" in label and "skipped" not in label for label in fair.labels)
