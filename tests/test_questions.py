"""Every question of the index leads to a section that a lab has, and says where it was asked."""

import collections
import csv
import importlib.util
import pathlib
import re

import pytest

BOOK = pathlib.Path(__file__).resolve().parents[1] / "book"


@pytest.fixture(scope="module")
def course():
    """The book's extension."""
    spec = importlib.util.spec_from_file_location("course", BOOK / "course.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(course):
    return list(csv.DictReader(course.QUESTIONS.read_text(encoding="utf-8").splitlines()))


def test_there_are_many_and_none_twice(rows):
    assert len(rows) >= 60
    for column in ("question", "source"):
        twice = collections.Counter(row[column] for row in rows)
        assert not [text for text, times in twice.items() if times > 1]


def test_every_section_is_in_its_lab(course, rows):
    for row in rows:
        assert (course.ROOT / "notebooks" / f"{row['lab']}.ipynb").exists()
        course.heading(course.LABS / f"{row['lab']}.py", row["section"])  # or a ValueError


def test_every_lab_answers_one_in_the_order_of_the_course(course, rows):
    asked = [lab for lab, _ in collections.Counter(row["lab"] for row in rows).items()]
    assert asked == sorted(path.stem for path in course.LABS.glob("*.py"))
    assert [row["lab"] for row in rows] == sorted(row["lab"] for row in rows)


def test_every_source_is_an_issue(rows):
    form = re.compile(r"[\w.-]+/[\w.-]+#[1-9]\d*")
    assert not [row["source"] for row in rows if not form.fullmatch(row["source"])]
    assert not [row["question"] for row in rows if not re.fullmatch(r"[^<>|→]+\?", row["question"])]


def test_the_page_leads_there(course):
    page = course.Questions.markdown(None)
    assert page.count("\n## {doc}`") == len(list(course.LABS.glob("*.py")))
    slower = (
        '→ <a href="../notebooks/09_zero.html#further-is-level-3-slower-then">'
        "Further: is level 3 slower, then?</a>"
    )
    asked = "([deepspeedai/DeepSpeed#1069](https://github.com/deepspeedai/DeepSpeed/issues/1069))"
    assert f"{slower} {asked}" in page


def test_new_questions_name_a_section_of_their_lab(course):
    path = BOOK / "transfer.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    asked = collections.Counter(row["lab"] for row in rows)
    assert len(asked) >= 10 and set(asked.values()) == {5}
    for row in rows:
        course.heading(course.LABS / f"{row['lab']}.py", row["section"])  # or a ValueError
