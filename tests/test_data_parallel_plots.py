"""Figures of data parallelism: they tell what is exposed and what is in which bucket, and refuse what they cannot draw."""

import dataclasses
from types import SimpleNamespace

import pytest

from labutils.teach import plots
from labutils.timeline import Span, Timeline


def timeline(late, ranks=2):
    """Two layers of 10 ms, and a reduction of 5 ms each: as soon as it can, or after the backward pass."""
    spans = []
    for rank in range(ranks):
        for k, name in enumerate(("layer 1", "layer 0")):
            ready = 0.02 + 0.005 * k if late else 0.01 * (k + 1)
            spans.append(Span(rank, "backward", name, 0.01 * k, 0.01 * (k + 1)))
            spans.append(Span(rank, "reduce", f"bucket {k}", ready, ready + 0.005))
    return Timeline(tuple(spans))


def bucket(**sizes):
    return SimpleNamespace(names=tuple(sizes), sizes=tuple(sizes.values()))


def test_what_is_exposed_is_told():
    picture = plots.overlap(after_backward=timeline(True), during_backward=timeline(False))
    assert "after backward: 30.0 ms a step 10.0 ms exposed" in picture.alt
    assert "during backward: 25.0 ms a step 5.00 ms exposed" in picture.alt
    assert len(picture.png) > 1000


def test_the_step_ends_with_the_last_rank():
    *spans, last = timeline(False).spans
    slow = Timeline((*spans, dataclasses.replace(last, end=last.end + 0.003)))
    assert "28.0 ms a step 8.00 ms exposed" in plots.overlap(step=slow).alt


def test_buckets_fill_in_the_order_of_the_backward_pass():
    animation = plots.bucket_animation(
        [bucket(head=300, norm=100), bucket(embed=50)], bucket_bytes=400
    )
    assert len(animation.frames) == len(animation.labels) == 4
    assert ["complete" in label for label in animation.labels] == [False, False, True, True]
    assert "no more gradients will come" in animation.labels[-1]
    assert animation.alt.endswith("bucket 0: head and norm, 400 B; bucket 1: embed, 50 B.")
    assert [
        frame.count(">all-reduce<") + frame.count(">reduce<") for frame in animation.frames
    ] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda: plots.overlap(), "at least one timeline"),
        (lambda: plots.overlap(empty=Timeline(())), "nothing was recorded"),
        (lambda: plots.overlap(odd=Timeline((Span(0, "nap", "", 0, 1),))), "nap have no lane"),
        (lambda: plots.bucket_animation([], bucket_bytes=1), "at least one bucket"),
        (
            lambda: plots.bucket_animation(
                [bucket(**{f"p{i}": 1 for i in range(17)})], bucket_bytes=1
            ),
            "animate up to 16",
        ),
    ],
)
def test_what_cannot_be_drawn(call, why):
    with pytest.raises(ValueError, match=why):
        call()
