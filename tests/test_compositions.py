"""Everything composes, or says why not: each row of the table is trained on its mesh and on one device, or refused with a remedy that works."""

import pytest
from equivalence import JOIN, case, equal, pairs, remedies, rows

from labutils import step
from labutils.world import RankError

ROWS = dict(rows())


def of(outcome):
    """The cases with this outcome."""
    found = [names for names, what in ROWS.items() if what == outcome]
    return pytest.mark.parametrize("names", found, ids=[JOIN.join(names) for names in found])


def test_the_table_has_all_pairs():
    assert set(pairs()) <= set(ROWS)
    assert set(equivalence.LARGER) <= set(ROWS)


@of("equal")
def test_equal_to_one_device(names):
    same, found = equal(case(names))
    assert same, "weights {:.1e}, norm {:.1e}, loss {:.1e}".format(*found)


@of("refused")
def test_refused_with_a_remedy_that_works(names):
    given = case(names)
    with pytest.raises(ValueError) as refused:
        step.check_plan(given.model, given.train, given.mesh)
    for changes in remedies(str(refused.value)):
        same, found = equal(case(names, **changes))
        assert same, f"{changes}: weights {found[0]:.1e}, norm {found[1]:.1e}, loss {found[2]:.1e}"


@of("wrong")
def test_still_wrong(names):
    """Fails once it is right: then the table says so."""
    try:
        same, _ = equal(case(names))
    except RankError:
        same = False
    assert not same, "record it: python tools/compositions.py --record"
