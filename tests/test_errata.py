"""Errata are fair: each stands under the heading that its recomputed verdict gives, and what stands in quotation marks is in the source."""

import importlib.util
import re

import pytest
from test_claims import NOTEBOOKS, TABLES

TEXTS = sorted((NOTEBOOKS[0].parent / "text").glob("*.py"))
ROWS = {row["id"]: row for table in TABLES.values() for row in table}
HEADINGS = {"Wrong": "wrong", "True under a condition": "true under a condition"}
VERDICTS = {"holds", "holds under convention", *HEADINGS.values()}


def errata(path):
    """(heading, ids of its rows, text) of each erratum of a lab."""
    cells = re.findall(
        r"^# %% \[markdown\]\n((?:#.*\n?)*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    text = re.sub(r"^# ?", "", "\n".join(cells), flags=re.MULTILINE)
    section = re.search(r"^## Errata.*?(?=^## )", text, re.MULTILINE | re.DOTALL)[0]
    for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        for item in re.split(r"\n\n(?=(?:- )?\*\*)", body):
            if item.strip().startswith(("**", "- **")):
                ids = re.findall(r"<!-- erratum: (.+?) -->", item)
                yield heading, ", ".join(ids).split(", ") if ids else [], item


ERRATA = [
    pytest.param(*erratum, id=f"{path.stem}-{number}")
    for path in TEXTS
    for number, erratum in enumerate(errata(path), 1)
]


def plain(text):
    return " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split())


def quoted(text):
    """What stands in quotation marks, code and formulas of the page left out."""
    return re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`|<!--.*?-->", "", text, flags=re.DOTALL))


def unfounded(heading, ids, text):
    """What is unfair about an erratum, as a list of sentences."""
    rows = [ROWS[key] for key in ids if key in ROWS]
    sources = " | ".join(plain(row["quote"]) for row in rows)
    return [
        *([] if ids else ["names no row of data/"]),
        *(f"{key} is in no table" for key in ids if key not in ROWS),
        *(
            f"{row['id']} is {row['verdict'] or 'no erratum'}"
            for row in rows
            if row["verdict"] != HEADINGS[heading]
        ),
        *(f"nobody wrote: {words}" for words in quoted(plain(text)) if words not in sources),
    ]


@pytest.mark.parametrize("heading, ids, text", ERRATA)
def test_an_erratum_is_fair(heading, ids, text):
    assert unfounded(heading, ids, text) == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_every_lab_has_errata_in_at_most_two_parts(path):
    headings = list(dict.fromkeys(heading for heading, _, _ in errata(path)))
    assert headings and headings == [each for each in HEADINGS if each in headings]


def test_an_unfair_erratum_is_seen():
    said = '**"2 for K and V"** (a text). <!-- erratum: S0-008 -->'
    assert unfounded("Wrong", ["S0-008"], said) == ["nobody wrote: 2 for K and V"]
    assert unfounded("True under a condition", ["S0-008"], "") == ["S0-008 is wrong"]
    assert unfounded("Wrong", [], "") == ["names no row of data/"]
    assert unfounded("Wrong", ["S0-001", "X-1"], "") == ["X-1 is in no table", "S0-001 is holds"]


def test_every_verdict_is_known_and_every_erratum_of_the_texts_has_its_words():
    assert {row["verdict"] for row in TABLES["claims.csv"]} == VERDICTS
    assert {row["verdict"] for row in TABLES["paper_results.csv"]} == {"", *HEADINGS.values()}
    bare = [
        row["id"]
        for row in TABLES["claims.csv"]
        if row["verdict"] in HEADINGS.values() and not row["quote"]
    ]
    assert bare == []


def test_the_book_says_what_the_verdicts_say():
    path = NOTEBOOKS[0].parents[1] / "book" / "course.py"
    spec = importlib.util.spec_from_file_location("course", path)
    course = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(course)
    assert set(course.VERDICTS) == set(HEADINGS.values())
    for row in ROWS.values():
        if row["verdict"] in course.VERDICTS:
            page = course.erratum(row)
            assert page.count("“") == page.count("”") <= 1 and "no number" not in page.lower()
            assert not re.search(r"\bL\d+[.,]", page), page
