"""Everything composes, or says why not: each row of the table is trained on its mesh and on one device, or refused with a remedy that works."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from equivalence import JOIN, LARGER, case, outcome, pairs, remedies, rows

ROWS = dict(rows())


@pytest.fixture(scope="module")
def run():
    """The outcome of a case, found in a process where no argument is checked: four times as fast."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda *names, **changes: pool.submit(outcome, case(names, **changes)).result()


def of(result):
    """The cases with this result."""
    found = [names for names, what in ROWS.items() if what == result]
    return pytest.mark.parametrize("names", found, ids=[JOIN.join(names) for names in found])


def test_the_table_has_all_pairs():
    assert {*pairs(), *LARGER} == set(ROWS)


@of("equal")
def test_equal_to_one_device(names, run):
    assert run(*names)[0] == "equal"


@of("refused")
def test_refused_with_a_remedy_that_works(names, run):
    what, text = run(*names)
    assert what == "refused"
    assert remedies(text)
    for changes in remedies(text):
        assert run(*names, **changes)[0] == "equal", changes


@of("wrong")
def test_still_wrong(names, run):
    """Fails once it is right: then the table says so."""
    assert run(*names)[0] == "wrong", "record it: python tools/compositions.py --record"
