"""The notation table is complete and without contradictions."""

import pytest

from labutils import notation


def test_every_letter_stands_once():
    letters = [entry.letter for entry in notation.TABLE]
    assert len(set(letters)) == len(letters)
    assert {
        "b",
        "s",
        "h",
        "a",
        "g",
        "d",
        "f",
        "L",
        "v",
        "E",
        "k",
        "N_d",
        "N_t",
        "N_p",
        "N_c",
        "N_e",
        "Ψ",
        "m",
        "u",
        "i",
        "r",
        "α",
        "λ",
        "bw",
    } <= set(letters)


def test_markdown_has_a_row_a_symbol():
    assert len(notation.markdown().splitlines()) == 2 + len(notation.TABLE)
    assert notation.symbol("L").meaning in notation.markdown("shapes")


def test_unknown_symbols_and_groups_are_named():
    with pytest.raises(ValueError, match="no symbol 'z'"):
        notation.symbol("z")
    with pytest.raises(ValueError, match="no group 'colors'.*shapes"):
        notation.markdown("colors")
