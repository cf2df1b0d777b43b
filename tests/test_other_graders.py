"""nbgrader and otter-grader grade the labs by the course's own checks: there and back.

Both are optional and live in environments of their own. Name their commands to run this:
NBGRADER=…/bin/nbgrader, OTTER=…/bin/otter (whose environment has the course).
"""

import csv
import json
import os
import pathlib
import subprocess
import sys

import nbformat
import pytest
import student  # tools/student.py

import notebooks as tool  # tools/notebooks.py
from labutils.teach import exercises

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAB, EXERCISE = "00_start_here", "start/tokens-per-step"
MOST = exercises.find(EXERCISE).card.minutes
RIGHT = "tokens_per_step = lambda micro_batch, accumulation, dp, seq_len: (\n"
RIGHT += "    micro_batch * accumulation * dp * seq_len\n)"
WRONG = RIGHT.replace(" * dp", "")
CHEATED = f"{WRONG}\ncheck = grade = type('Yes', (), {{'earned': lambda *a: 99, 'passed': True}})"
ANSWERS = {"ada": RIGHT, "bob": None, "cy": WRONG, "dee": CHEATED}


def needs(name):
    command = os.environ.get(name.upper())
    why = f"{name} is not here: {name.upper()}=… names the command in its environment"
    return command or pytest.skip(why)


@pytest.fixture(scope="module")
def short():
    """The student edition of a lab as far as its first check: stub, check, and what they need."""
    ((path, _),) = tool.twins([LAB])
    made = student.edition(nbformat.read(path, as_version=4))
    checked = next(cell for cell, exercise, _ in student.checks(made) if exercise == EXERCISE)
    place = made.cells.index(checked)
    setup = next(cell for cell in made.cells if cell.cell_type == "code")
    made.cells = [setup, *made.cells[place - 1 : place + 1]]
    return made


def submitted(notebook, answer):
    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    if answer:
        copy.cells[1].source = answer
    return copy


def run(*command, **options):
    finished = subprocess.run(command, capture_output=True, text=True, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def test_every_check_has_its_cell_and_its_test(tmp_path):
    arguments = ["--nbgrader", "--otter", "--out", str(tmp_path), LAB]
    assert student.main(arguments) == 0
    made = nbformat.read(tmp_path / f"{LAB}.ipynb", as_version=4)
    nbformat.validate(made)
    cards = [card for card in exercises.cards() if card.lab == LAB]
    graded = [cell for cell in made.cells if "nbgrader" in cell.metadata]
    for card, cell in zip(cards, graded, strict=True):
        assert cell.source.endswith(f'grade.earned("{card.exercise}", {card.answer})')
        assert cell.metadata.nbgrader.points == card.minutes
        assert made.cells[made.cells.index(cell) - 1].source.startswith("check(")
    written = {path.stem for path in (tmp_path / "tests" / LAB).iterdir()}
    assert written == {card.exercise.replace("/", "-") for card in cards}
    for path in (tmp_path / "tests" / LAB).iterdir():
        compile(path.read_text(encoding="utf-8"), path.name, "exec")


def test_nbgrader_there_and_back(tmp_path, short):
    command = needs("nbgrader")
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    kernel |= {"display_name": "Python 3", "language": "python"}
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps(kernel))
    path = f"{pathlib.Path(command).parent}:{os.environ['PATH']}"  # nbgrader calls alembic
    outside = os.environ | {"JUPYTER_PATH": str(tmp_path / "jupyter"), "PATH": path}
    outside |= {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": outside}
    made = student.for_nbgrader(submitted(short, None))
    source = tmp_path / "source" / "one" / f"{LAB}.ipynb"
    source.parent.mkdir(parents=True)
    nbformat.write(made, source)
    run(command, "generate_assignment", "one", "--create", "--ClearOutput.enabled=False", **options)
    released = nbformat.read(tmp_path / "release" / "one" / f"{LAB}.ipynb", as_version=4)
    assert released.cells[1].source == short.cells[1].source, "the stub stays as it is"
    for name, answer in ANSWERS.items():
        path = tmp_path / "submitted" / name / "one" / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(submitted(released, answer), path)
    run(command, "autograde", "one", "--create", "--ExecutePreprocessor.timeout=150", **options)
    run(command, "export", **options)
    rows = csv.DictReader((tmp_path / "grades.csv").read_text().splitlines())
    scores = {row["student_id"]: float(row["score"]) for row in rows}
    assert scores["ada"] == MOST and scores["bob"] == 0 and set(scores) == set(ANSWERS)
    assert 0 <= scores["cy"] == scores["dee"] < MOST, "a check that is redefined counts for nothing"


def test_otter_there_and_back(tmp_path, short):
    command = needs("otter")
    student.write_otter(short, tmp_path / "tests")
    outside = os.environ | {"PYTHONPATH": str(ROOT)}
    said = {}
    for name, answer in ANSWERS.items():
        nbformat.write(submitted(short, answer), tmp_path / f"{name}.ipynb")
        arguments = [command, "check", f"{name}.ipynb", "--tests-path", "tests"]
        finished = subprocess.run(
            arguments, cwd=tmp_path, env=outside, capture_output=True, text=True
        )
        said[name] = finished.stdout + finished.stderr
    assert "All tests passed!" in said["ada"], said["ada"]
    for name in ("bob", "cy", "dee"):
        assert "All tests passed!" not in said[name] and "failed" in said[name], said[name]
