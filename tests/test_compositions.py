"""Everything composes, or says why not: each row of the table is trained on its mesh and on one device, and its bytes foreseen; or refused with a remedy that works."""

import contextlib
import functools

import pytest
from equivalence import (
    JOIN,
    LARGER,
    case,
    equal,
    outcome,
    pairs,
    phases,
    remedies,
    rows,
    same_masks,
)

from labutils.world import World

ROWS = dict(rows())


def of(result):
    """The cases with this result."""
    found = [names for names, what in ROWS.items() if what == result]
    return pytest.mark.parametrize("names", found, ids=[JOIN.join(names) for names in found])


def test_the_table_has_all_pairs():
    assert {*pairs(), *LARGER} == set(ROWS)
    assert set(ROWS.values()) == {"equal", "refused"}


@of("equal")
def test_equal_to_one_device(names):
    assert outcome(case(names))[0] == "equal"


# A dozen of few ranks, with every axis and level, and what sends on its own.
PROCESSES = [tuple(names.split(", ")) for names in (
    "1F1B", "DualPipe", "1F1B, tied", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ring", "Ulysses", "tp + sp",
    "ep", "ZB-H1, ZeRO-2, tied", "1F1B, ZeRO-1, tp + sp",
)]  # fmt: skip


@pytest.fixture(scope="module")
def processes():
    """Worlds by their size, which start once."""
    with contextlib.ExitStack() as stack:
        start = functools.partial(World, engine="processes", timeout=60)
        yield functools.cache(lambda n: stack.enter_context(start(n)))


@pytest.mark.parametrize("names", PROCESSES, ids=[JOIN.join(names) for names in PROCESSES])
def test_processes_do_the_same(names, processes):
    plan = case(names)
    world = processes(plan.mesh.size)
    assert equal(plan, world)[0]
    if plan.mesh.ep == 1:  # where which expert is visited is of the tokens' choice
        real, dry = phases(plan, world, "paired")
        assert real == dry


@of("refused")
def test_refused_with_a_remedy_that_works(names):
    what, text = outcome(case(names))
    assert what == "refused"
    assert remedies(text)
    for changes in remedies(text):
        assert outcome(case(names, **changes))[0] == "equal", changes


DROPPED = [(name,) for name in ("1F1B", "ZB-V", "DualPipe", "dp", "ZeRO-3", "tp", "tp + sp", "ep")]
DROPPED += [tuple(names.split(", ")) for names in (
    "1F1B, tp", "1F1B, tp + sp", "ZeRO-3, tp + sp", "tp, ep", "tp + sp, ep",
    "ZB-V, ZeRO-1, tp + sp", "1F1B, ZeRO-2, tp, ep", "tp + sp, LoRA", "1F1B, tp, autocast",
)]  # fmt: skip


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("names", DROPPED, ids=[JOIN.join(names) for names in DROPPED])
def test_dropout_repeats_and_is_computed_again(names, policy):
    assert same_masks(names, policy) == (True, True)
