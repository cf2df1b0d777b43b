"""The planner: a recipe adds up, and what cannot be had is said."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import planner


@pytest.mark.parametrize("gpus, steps", [(128, 4), (512, 1)])
def test_the_playbook_example(gpus, steps):  # S1-036: 1024 sequences of 4096, two at a time
    recipe = planner.configure(target=4_194_304, seq_len=4096, gpus=gpus, fits=lambda b: b <= 2)
    assert (recipe.train.micro_batch, recipe.train.global_batch) == (2, 1024)
    assert recipe.train.accumulation(recipe.mesh.dp) == steps


@given(
    st.integers(1, 10**7),
    st.sampled_from([512, 2048, 4096]),
    st.integers(1, 64),
    st.integers(1, 9),
)
@settings(max_examples=80, deadline=None)
def test_a_recipe_adds_up(target, seq_len, copies, limit):
    call = dict(
        target=target,
        seq_len=seq_len,
        gpus=copies,
        fits=lambda b: b <= limit,
    )
    if round(target / seq_len / copies) < 1:
        with pytest.raises(ValueError, match="fewer than"):
            planner.configure(**call)
        return
    recipe = planner.configure(**call)
    train, steps = recipe.train, recipe.train.accumulation(recipe.mesh.dp)
    assert (
        train.global_batch == train.micro_batch * steps * recipe.mesh.dp
        and train.micro_batch <= limit
    )
    assert abs(train.global_batch * seq_len - target) <= copies * seq_len / 2
    assert recipe.mesh.size == copies
    assert f"{steps:,}" in str(recipe).splitlines()[-1] and recipe._repr_html_().count("<tr>") == 6


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(fits=lambda b: False), "not even one sequence of 1,024 tokens fits"),
        (dict(gpus=10**6), "fewer than 1000000 copies"),
        (dict(target=0), "target must be at least 1"),
    ],
)
def test_a_recipe_that_cannot_be(change, why):
    with pytest.raises(ValueError, match=why):
        planner.configure(**dict(target=2**20, seq_len=1024, gpus=8, fits=lambda b: True) | change)
