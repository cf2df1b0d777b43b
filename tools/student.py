"""The student edition: the labs as they stand, without solutions and without shown library code.

    python tools/student.py                          every lab, into student/
    python tools/student.py 05_accumulation          one lab
    python tools/student.py --show lessons           with the code that belongs to no exercise
    python tools/student.py --show flash.forward     with this one cell; --show may be repeated
    python tools/student.py --nbgrader               with a cell below each check for nbgrader
    python tools/student.py --otter                  with otter-grader's tests beside the labs
    python tools/student.py --table                  the table of exercises in labutils/data

A cell `show(…)` is left out, with what it printed. Code that an exercise hands out stays, and so do
stubs, bug hunts, checks, hints and stored outputs: every check says "not attempted". Whoever has
the library has its code: this edition keeps solutions out of sight, not out of reach.
"""

import argparse
import csv
import pathlib
import re
import sys

import nbformat

import notebooks  # beside this file
from labutils.config import DATA
from labutils.teach import exercises

STUDENT = notebooks.NOTEBOOKS.parent / "student"
TABLE = DATA / "exercises.csv"
CARD = re.compile(r"^### Exercise (\d+\.\d+) · (.+) \((\d+) min, ([●○]{3})\)$", re.MULTILINE)
CHECK = re.compile(r"^check\(\s*\"([^\"]+)\",\s*(\w+)", re.MULTILINE)
SHOW = re.compile(r"^show\((.+)\)$", re.MULTILINE)
OTTER = """\
from otter.test_files import test_case

OK_FORMAT = False
name, points = "{exercise}", {points}


@test_case()
def test_the_answer({answer}):
    from labutils.teach.check import check

    report = check(name, {answer})
    assert report.passed, report
"""
LEFT_OUT = "*The code that the full edition shows here is left out.*"


def shown(notebook):
    """(cell, name, role) of every cell that shows code.

    A solution stands below the check of its exercise, what is handed out between card and check;
    all else belongs to a lesson.
    """
    role = "lesson"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = re.search(r"^#+ ", cell.source, re.MULTILINE)
            role = "handed out" if CARD.search(cell.source) else "lesson" if heading else role
        elif CHECK.search(cell.source):
            role = "solution"
        elif found := SHOW.search(cell.source):
            yield cell, found[1], role


def edition(notebook, allowed=()):
    """The notebook for students; `allowed` says what may be shown: "lessons", or a cell's name."""
    for cell, name, role in list(shown(notebook)):
        kept = name in allowed or (role == "lesson" and "lessons" in allowed)
        if role == "handed out" or kept:
            continue
        if role == "solution":
            notebook.cells.remove(cell)
        else:
            left_out = nbformat.v4.new_markdown_cell(LEFT_OUT, id=cell.id)
            notebook.cells[notebook.cells.index(cell)] = left_out
    return notebook


def checks(notebook):
    """(cell, exercise, answer) of every check of a lab."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and (found := CHECK.search(cell.source)):
            yield cell, *found.groups()


def for_nbgrader(notebook):
    """The notebook with a cell below each check whose value is the points that were earned."""
    for cell, exercise, answer in list(checks(notebook)):
        source = f'from labutils.teach import grade\n\ngrade.earned("{exercise}", {answer})'
        name = exercise.replace("/", "-")
        made = nbformat.v4.new_code_cell(source, id=f"points-{name}"[:64])
        made.metadata["nbgrader"] = {
            "cell_type": "code",
            "grade": True,
            "grade_id": name,
            "locked": True,
            "points": exercises.find(exercise).card.minutes,
            "schema_version": 3,
            "solution": False,
            "task": False,
        }
        notebook.cells.insert(notebook.cells.index(cell) + 1, made)
    return notebook


def write_otter(notebook, folder):
    """A test for otter-grader for each check, as `folder`/topic-name.py."""
    folder.mkdir(parents=True, exist_ok=True)
    for _, exercise, answer in checks(notebook):
        points = exercises.find(exercise).card.minutes
        text = OTTER.format(exercise=exercise, points=points, answer=answer)
        (folder / f"{exercise.replace('/', '-')}.py").write_text(text, encoding="utf-8")


def table():
    """A `Card` for every exercise of the course, from the labs."""
    for _, text_path in notebooks.twins():
        card = None
        for cell in notebooks.build(text_path).cells:
            if cell.cell_type == "markdown":
                card = (CARD.findall(cell.source) or [card])[-1]
            elif found := CHECK.search(cell.source):
                number, title, minutes, dots = card
                names = text_path.stem, number, *found.groups()
                yield exercises.Card(*names, title, int(minutes), dots)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NN_topic", help="labs; all when none is named")
    parser.add_argument("--show", action="append", default=[], metavar="NAME", help="may be shown")
    parser.add_argument("--nbgrader", action="store_true", help="with cells that nbgrader grades")
    parser.add_argument("--otter", action="store_true", help="with tests for otter-grader")
    parser.add_argument("--out", type=pathlib.Path, default=STUDENT, help="a folder; student/")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE.name} and nothing else")
    options = parser.parse_args(arguments)
    if options.table:
        with open(TABLE, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerows([exercises.Card._fields, *table()])
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for path, _ in notebooks.twins(options.names):
        made = edition(nbformat.read(path, as_version=4), options.show)
        if options.otter:
            write_otter(made, options.out / "tests" / path.stem)
        if options.nbgrader:
            for_nbgrader(made)
        nbformat.write(made, options.out / path.name)
        print(f"{options.out.name}/{path.name}: {len(made.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
