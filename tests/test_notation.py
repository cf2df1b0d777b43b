"""The notation table is complete and without contradictions."""

import pytest

from labutils import notation


def test_every_letter_stands_once():
    letters = [letter for group in notation.TABLE.values() for letter in group]
    assert len(set(letters)) == len(letters)
    known = r"b s h a g d f L v E k N_d N_t N_p N_c N_e \Psi m u i r \alpha \lambda \mathrm{bw}"
    assert set(known.split()) <= set(letters)


@pytest.mark.parametrize("group", notation.TABLE)
def test_markdown_has_a_row_a_symbol(group):
    rows = notation.markdown(group).splitlines()[2:]
    assert len(rows) == len(notation.TABLE[group])
    assert all(
        meaning in row for row, meaning in zip(rows, notation.TABLE[group].values(), strict=True)
    )


def test_unknown_groups_are_named():
    with pytest.raises(ValueError, match="no group 'colors'.*shapes"):
        notation.markdown("colors")
