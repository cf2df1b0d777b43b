"""The student edition: nothing of a solution, everything else; filled in, every check turns green."""

import collections
import csv
import json
import re

import nbformat
import pytest
import student  # tools/student.py
import teaching  # tools/teaching.py

import notebooks as tool  # tools/notebooks.py
from labutils import config
from labutils.teach import exercises
from labutils.teach.grade import answers, judge

LABS = {path.stem: path for path, _ in tool.twins()}
CARDS = pytest.mark.parametrize("card", exercises.cards(), ids=lambda card: card.exercise)


@pytest.fixture(scope="module")
def editions():
    return {lab: student.edition(nbformat.read(path, as_version=4)) for lab, path in LABS.items()}


def code(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_table_of_exercises_is_that_of_the_labs():
    assert {card.exercise for card in exercises.cards()} == exercises.every().keys()


@pytest.mark.parametrize("lab", LABS)
def test_all_stays_but_shown_code(editions, lab):
    full, made = nbformat.read(LABS[lab], as_version=4), editions[lab]
    gone = {cell.id for cell, _, role in student.shown(full) if role != "handed out"}
    kept = [cell for cell in made.cells if cell.source != student.LEFT_OUT]
    assert kept == [cell for cell in full.cells if cell.id not in gone] and gone
    nbformat.validate(made)
    text = nbformat.writes(made)
    for cell, _, role in student.shown(full):
        assert role == "handed out" or cell.outputs[0].data["text/html"] not in text


def test_a_teacher_says_what_may_be_shown():
    full = nbformat.read(LABS["07_collectives"], as_version=4)
    names = {
        role: [n for _, n, r in student.shown(full) if r == role] for role in ("lesson", "solution")
    }
    made = student.edition(full, ["lessons", "collectives.ring_hops"])
    left = [name for _, name, _ in student.shown(made)]
    assert sorted(left) == sorted([*names["lesson"], "collectives.ring_hops"])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@CARDS
def test_a_check_says_not_attempted(editions, card):
    cells = code(editions[card.lab])
    outcome = judge.judge(card, cells)
    assert outcome["status"] == "not attempted" and not outcome["remarks"], (
        f"{card.exercise} hands out code: give the exercise "
        f'untouched="{exercises.digest(answers.attempt(card, cells)[0])}"'
    )


@CARDS
def test_the_solution_filled_in_is_what_the_check_sees(editions, card):
    """It is the very reference, of which `test_exercises` shows that it passes."""
    cells, filled = code(editions[card.lab]), f"exercises.find({card.exercise!r}).reference"
    upto, _ = answers.what_is_checked(card, cells)
    stub = answers.needed(cells, upto, card.answer)[-1]
    made = [place for place in range(upto) if card.answer in answers._names(cells[place])[0]]
    cells[made[-1]] = f"from labutils.teach import exercises\n{card.answer} = {filled}"
    found, remarks = answers.attempt(card, cells)
    assert found is exercises.find(card.exercise).reference and stub in made
    if callable(found):
        assert any(remark.startswith("is the library's own") for remark in remarks)


def test_the_tool_writes_a_folder(tmp_path, capsys):
    assert student.main(["05_accumulation", "--out", str(tmp_path / "new" / "student")]) == 0
    (path,) = (tmp_path / "new" / "student").iterdir()
    assert path.name == "05_accumulation.ipynb" and "student/05" in capsys.readouterr().out


def test_the_table_is_what_the_tool_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(student, "TABLE", tmp_path / "exercises.csv")
    student.main(["--table"])
    kept = config.DATA / student.TABLE.name
    same = student.TABLE.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")
    assert same, "run: python tools/student.py --table"


@pytest.fixture(scope="module")
def pages():
    return {
        lab: "\n".join(teaching.page(lab, nbformat.read(path, as_version=4)))
        for lab, path in LABS.items()
    }


@pytest.mark.parametrize("lab", LABS)
def test_a_class_takes_no_more_than_its_minutes(pages, lab):
    minutes = re.findall(r"^\| (\d+) \| (.+) \|$", pages[lab], re.MULTILINE)
    assert 40 <= sum(int(spent) for spent, _ in minutes) <= teaching.CLASS + len(minutes) / 2
    assert not [part for _, part in minutes if part.startswith("Further")]


@pytest.mark.parametrize("lab", LABS)
def test_the_guide_has_the_labs_own_questions_and_every_exercise(pages, lab):
    source = " ".join(LABS[lab].read_text(encoding="utf-8").split())
    polled = pages[lab].partition("**Poll before")[2].partition("**What goes")[0]
    questions = re.findall(r"^- (.+)$", polled, re.MULTILINE)
    begin = [json.dumps(question[:20], ensure_ascii=False)[1:-1] for question in questions]
    assert begin and all(words in source for words in begin)
    for card in exercises.cards():
        title = f":::{{dropdown}} {card.number} {card.title} · "
        assert (title in pages[lab]) == (card.lab == lab)
    answered = [question for question in questions if re.search(r" \*.+\*$", question)]
    assert len(answered) >= len(questions) - 2, "a teacher sees what `reveal` will say"


def test_five_new_questions_lead_to_the_section_that_answers():
    rows = list(csv.DictReader(teaching.TRANSFER.read_text(encoding="utf-8").splitlines()))
    asked = collections.Counter(row["lab"] for row in rows)
    assert set(asked.values()) == {5} and set(asked) <= set(LABS)
    assert len({row["question"] for row in rows}) == len(rows)
    marks = re.compile(r"^#+ (?:Further: )?(.+?)(?: \(\d+ min, [●○]+\))?$", re.MULTILINE)
    for row in rows:
        cells = nbformat.read(LABS[row["lab"]], as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        headings = [heading.casefold() for heading in marks.findall(text)]
        assert headings.count(row["section"].casefold()) == 1, row
