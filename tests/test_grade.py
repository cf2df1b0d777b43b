"""Grading: right, wrong and hostile submissions, each contained, the others graded, nothing touched."""

import csv
import html
import io
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import time

import hostile
import pytest

from labutils.teach import exercises, grade
from labutils.teach.grade import __main__ as command
from labutils.teach.grade import answers, containment, reports

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPOSED = {"files", "network", "signals"} - grade.out_of_reach()
# Elsewhere who lost its parent is not found; how an answer ends that takes memory or makes folders is the system's matter.
if not containment.LINUX:
    EXPOSED |= {"orphans"}
CHECK = 'check("accumulation/configure", fill)'


def notebook(*cells):
    return json.dumps({"cells": [dict(cell_type="code", source=source) for source in cells]})


FILES = {
    "text.ipynb": ("hello", "no notebook"),
    "empty.ipynb": ("", "no notebook"),
    "list.ipynb": ("[1, 2, 3]", "no list of cells"),
    "number.ipynb": ('{"cells": 5}', "no list of cells"),
    "deep.ipynb": ("[" * 100_000, "no notebook"),
    "odd cells.ipynb": ('{"cells": [null, 3, {"cell_type": []}]}', "no code cell"),
    "binary.ipynb": (b"\xff\xfe\x00" * 9, "no notebook"),
    "huge.ipynb": ("x" * (answers.MOST_BYTES + 1), "bytes"),
    "another.ipynb": (notebook("print(1)"), "no check of the course"),
    "old.ipynb": ('{"worksheets": [{"cells": []}]}', "as before format 4: open it in JupyterLab"),
    "blank.ipynb": (" \n", "the file is empty"),
    "class.zip": (b"PK\3\4\x14\0", "no notebook but an archive: unpack it"),
    "lab 0.ipynb": (notebook('check("start/tokens-per-step", 1)'), "of which no exercise is graded"),
    "essay.pdf": (b"%PDF", "no notebook"),
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The rows of grades.csv by submission, what the run printed, and the folder of it all."""
    folder = tmp_path_factory.mktemp("class")
    submissions, outside = folder / "submissions", folder / "teacher" / "marks.csv"
    for each in (submissions, outside.parent):
        each.mkdir()
    outside.write_text("untouched")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        known = dict(outside=str(outside), other=str(submissions / "honest.ipynb"))
        for name, code, _, _ in hostile.CODE:
            if hostile.HARM.get(name) in EXPOSED:
                continue
            for key, value in (known | dict(port=server.getsockname()[1])).items():
                code = code.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
            text = notebook(hostile.SETUP, code.replace("{{}}", "{}"), CHECK)
            (submissions / f"{name}.ipynb").write_text(text)
        honest = notebook(hostile.SETUP, hostile.RIGHT, CHECK)
        for name in ("honest", "=cmd()", "z <b>last"):
            (submissions / f"{name}.ipynb").write_text(honest)
        (submissions / "no check.ipynb").write_text(notebook(hostile.SETUP, hostile.RIGHT))
        for name, (content, _) in FILES.items():
            content = content if isinstance(content, bytes) else content.encode()
            (submissions / name).write_bytes(content)
        (submissions / "link.ipynb").symlink_to("/etc/passwd")
        os.mkfifo(submissions / "pipe.ipynb")
        (submissions / "empty folder").mkdir()
        (submissions / "honest.pdf").write_bytes(b"")
        (submissions / "bob").mkdir()
        (submissions / "bob" / "lab 5.ipynb").write_text(honest)
        for added in ("__MACOSX/._honest.ipynb", "bob/._lab 5.ipynb"):
            (submissions / added).parent.mkdir(exist_ok=True)
            (submissions / added).write_bytes(b"\0\5\x16\7")
        earlier = folder / "grades" / "gradescope" / "left" / "the course" / "results.json"
        earlier.parent.mkdir(parents=True)
        earlier.write_text(json.dumps(reports.results([])))
        feedback = folder / "grades" / "feedback"
        feedback.mkdir()
        (feedback / "left.html").write_text("\n".join(reports._head("of an earlier run")))
        (feedback / "mine.html").write_text("of the teacher")
        points = folder / "points.csv"
        points.write_text("exercise,points\naccumulation/configure,10\n")
        command = [sys.executable, "-m", "labutils.teach.grade", str(submissions), "--out"]
        command += [str(folder / "grades"), "--points", str(points), "--memory", "0.5"]
        run = subprocess.run(
            [*command, "--seconds", "3", "--jobs", "2"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert run.returncode == 0, run.stderr
        with pytest.raises(TimeoutError):
            server.accept()
    table = (folder / "grades" / "grades.csv").read_text(encoding="utf-8-sig")
    rows = csv.DictReader(io.StringIO(table))
    return {row["submission"]: row for row in rows}, run.stdout, folder


@pytest.mark.parametrize(
    "name, code, status, words", hostile.CODE, ids=lambda value: str(value)[:40]
)
def test_a_hostile_submission_is_contained_and_the_reason_said(graded, name, code, status, words):
    if hostile.HARM.get(name) in EXPOSED:
        pytest.skip(f"here submitted code can reach: {', '.join(EXPOSED)}")
    row = graded[0][name]
    if not containment.LINUX and ("memory" in name or "deep" in name):
        status = words = ""
    assert row["status"] == status or not status, row
    assert words in f"{row['said']} {row['remarks']}", row
    assert float(row["points"]) <= 10 * (row["status"] == "solved") or row["status"] == "not yet"


@pytest.mark.parametrize(
    "name, content, words", [(n, *c) for n, c in FILES.items()], ids=list(FILES)
)
def test_what_is_no_notebook_is_named(graded, name, content, words):
    row = graded[0][name.removesuffix(".ipynb")]
    assert (row["status"], row["points"]) == ("refused", "0") and words in row["said"], row


def test_links_pipes_and_empty_folders_are_named(graded):
    said = [graded[0][name]["said"] for name in ("link", "pipe", "empty folder/")]
    assert said == ["it is a link", "it is no plain file", "its folder has no notebook"]


def test_the_honest_get_their_points(graded):
    rows, printed, _ = graded
    for name in ("honest", "bob/lab 5", "z <b>last", "'=cmd()"):
        assert (rows[name]["status"], float(rows[name]["points"])) == ("solved", 10), rows[name]
    assert "name its lab with --lab" in rows["no check"]["said"]
    assert f"{len(rows)} of {len(rows)} graded" in printed


def test_nothing_of_the_teachers_is_touched(graded):
    folder = graded[2]
    kept = folder / "teacher" / "marks.csv"
    assert kept.read_text() == "untouched" and kept.stat().st_mode & 0o600 == 0o600
    assert kept.stat().st_mtime > 0 and os.listdir(kept.parent) == ["marks.csv"]
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 98765" not in commands


def test_each_submission_has_a_row_with_its_sum(graded):
    rows, _, folder = graded
    table = (folder / "grades" / "totals.csv").read_bytes()
    assert table.startswith("\ufeff".encode()), "by which Excel knows UTF-8"
    totals = {row["submission"]: row for row in csv.DictReader(io.StringIO(table[3:].decode()))}
    assert totals.keys() == rows.keys() and not any("._" in name for name in rows)
    for name, row in totals.items():
        assert float(row["points"]) == float(rows[name]["points"])
        assert row["refused"] == (rows[name]["status"] == "refused") * rows[name]["said"]
        assert row["accumulation/configure"] in (rows[name]["points"], "")
    page = (folder / "grades" / "grades.html").read_text(encoding="utf-8")
    solved = sum(row["status"] == "solved" for row in rows.values())
    assert f"<td>{solved} of " in page and page.count("<a href=#s") == len(rows)


def test_results_of_an_earlier_run_are_gone(graded):
    kept = graded[2] / "grades" / "gradescope" / "left"
    assert not list(kept.rglob("*.json")) and (kept.parent / "honest" / "results.json").exists()
    feedback = graded[2] / "grades" / "feedback"
    assert not (feedback / "left.html").exists() and (feedback / "mine.html").exists()


def test_the_page_and_gradescopes_file_say_the_same(graded):
    rows, _, folder = graded
    page = (folder / "grades" / "grades.html").read_text(encoding="utf-8")
    assert "z <b>last" not in page and html.escape("z <b>last") in page
    for name in ("honest", "exits", "bob/lab 5", "text"):
        path = folder / "grades" / "gradescope" / name / "results.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found["score"] == float(rows[name]["points"])
        for test in found["tests"]:
            assert test["output"] == rows[name]["said"] and test["max_score"] == 10
            assert (test["status"] == "passed") == (rows[name]["status"] == "solved")
    assert "no notebook" in found["output"] and found["tests"] == []
    for name in (row.removeprefix("'") for row in rows):
        path = folder / "grades" / "feedback" / f"{name.rstrip('/')}.html"
        alone = path.read_text(encoding="utf-8")
        assert alone.count("<h2") == 1 and html.escape(name) in alone and "class=remark" not in alone


def started(program, limits):
    """A contained process whose program, with all that it starts, has begun to compute."""
    process = containment.Contained(program, limits)
    while computed(process) < 0.1:
        time.sleep(containment.LOOK)
    return process


def computed(process):
    """Seconds that it and what it started have computed."""
    system = containment.System()
    return sum(map(system.computed, system.descendants(process.leader)))


@pytest.mark.skipif(not containment.LINUX, reason="elsewhere processes are not counted")
def test_what_is_named_does_not_depend_on_when_the_grader_looks():
    def forks(send, out_of_reach):
        for _ in range(6):
            if not os.fork():
                break
        while True:
            pass

    process = started(forks, grade.Limits(seconds=0.5, processes=4))
    while computed(process) < 1:  # a grader that is late finds more than one limit passed
        time.sleep(containment.LOOK)
    assert process.look() and process.ended == "stopped: it started more than 4 processes"


def _loops(send, out_of_reach):
    while True:
        pass


def _sleeps(send, out_of_reach):
    time.sleep(1e6)


def _forks(send, out_of_reach):
    while os.fork():
        pass
    time.sleep(1e6)


def _fills(send, out_of_reach):
    kept = []
    while len(kept) < 120:  # more by far than the libraries that its parent has read and it has not
        kept.append(b"x" * 10_000_000)
    time.sleep(1e6)


@pytest.mark.parametrize(
    "program, words",
    [
        (_loops, "did not end within 1 seconds of computing"),
        (_sleeps, "did not end within 5 seconds of waiting"),
        (_forks, "it started more than 8 processes"),
        (_fills, "its processes hold 0."),
    ],
)
def test_where_there_is_no_proc_ps_tells_when_an_answer_takes_too_much(
    program, words, monkeypatch
):
    monkeypatch.setattr(containment, "LINUX", False)
    monkeypatch.setattr(containment, "System", containment.Listed)
    monkeypatch.setattr(containment, "_status", lambda pid: {})
    process, ran = containment.Contained(program, grade.Limits(1, 200_000_000, 10**6, 8)), set()
    while not process.look():
        ran |= set(containment.Listed().descendants(process.leader))
        time.sleep(containment.LOOK)
    assert words in process.ended, process.ended
    assert ran
    for _ in range(400):  # killed they are, and on a busy machine it takes them a while to die
        left = containment.Listed().rows
        alive = [pid for pid in ran if pid in left and not left[pid][1].startswith("Z")]
        if not alive:
            break
        time.sleep(containment.LOOK)
    assert not alive


@pytest.mark.parametrize(
    "clock, seconds", [("0:00.53", 0.53), ("75:01.20", 4501.2), ("1-02:03:04", 93_784)]
)
def test_what_ps_says_of_time(clock, seconds):
    system = containment.Listed()
    system.rows = {7: ["1", "S", "10", clock]}
    assert system.computed(7) == seconds and system.computed(8) == 0


@pytest.mark.skipif(not containment.LINUX, reason="elsewhere a leader's usage is not its child's")
def test_an_answer_that_the_system_ended_before_the_grader_looked_is_out_of_time():
    def works(send, out_of_reach):
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        while True:
            pass

    process = started(works, grade.Limits(seconds=0.5))
    os.waitid(os.P_PID, process.leader, os.WEXITED | os.WNOWAIT)
    assert process.look()
    assert process.ended == "stopped: it did not end within 0.5 seconds of computing"


@pytest.mark.skipif(not containment.LINUX, reason="elsewhere waiting is not told from computing")
@pytest.mark.parametrize("sleeps, seconds, what", [(0, 1, "computing"), (1e6, 5, "waiting")])
def test_an_answer_that_gets_no_processor_does_not_wait(sleeps, seconds, what):
    def works(send, out_of_reach):
        while time.process_time() < 0.3:
            pass
        time.sleep(sleeps)
        while True:
            pass

    process = started(works, grade.Limits(seconds=1))
    while not process.look():
        process.looked -= 1  # a machine that is busy, as it seems to the grader
        time.sleep(containment.LOOK)
    assert process.ended == f"stopped: it did not end within {seconds} seconds of {what}"


CELLS = [
    hostile.SETUP,
    "heavy = 1 / 0",
    "def half(x):\n    return x // table['two']",
    "table = {}",
    "table['two'] = 2",
    "def fill(x):\n    heavy = 3\n    return half(x)",
    "half = None",
    CHECK + "\nfill = None",
    "def fill(x):\n    return 0",
]
CARD = exercises.find("accumulation/configure").card


def test_an_answer_runs_the_cells_that_it_needs():
    assert answers.what_is_checked(CARD, CELLS) == (8, "fill")
    assert answers.needed(CELLS, 6, "fill") == [2, 3, 4, 5]
    fill, remarks = answers.attempt(CARD, CELLS[:6])
    assert fill(9) == 4 and not remarks


def test_what_the_last_check_names_counts():
    cells = [
        hostile.SETUP,
        "def mine(x): return 1",
        CHECK,
        CHECK.replace("fill", "mine"),
        "mine = 2",
    ]
    assert answers.what_is_checked(CARD, cells) == (4, "mine")
    assert answers.attempt(CARD, cells)[0](0) == 1


def test_a_function_that_stands_below_its_check_is_found_there():
    cells = [hostile.SETUP, CHECK, "def fill(x):\n    return 1"]
    fill, remarks = answers.attempt(CARD, cells)
    assert fill(0) == 1 and remarks == ["cell 3, below its check, has fill"]
    cells[1:1] = ["def fill(x):\n    return 2"]
    fill, remarks = answers.attempt(CARD, cells)
    said = "cell 4, below its check, has another fill, which is not graded"
    assert fill(0) == 2 and remarks == [said]
    with pytest.raises(answers.Refused, match="cell 2: a cell is no Python"):
        answers.attempt(CARD, [hostile.SETUP, "fill = 1\n )", CHECK], whole=True)


def test_an_answer_that_calls_the_librarys_own_is_remarked():
    card = exercises.find("collectives/ring-all-reduce").card
    check = f'check("{card.exercise}", mine)'
    for imports, call in (
        ("from labutils import collectives as c", "c.all_reduce_ring(x, comm)"),
        ("from labutils.collectives import all_reduce_ring as r", "r(x, comm)"),
    ):
        cells = ["import torch", f"{imports}\ndef mine(x, comm):\n    return {call}", check]
        assert answers.attempt(card, cells)[1] == ["uses the library's own all_reduce_ring"]
    cells[1] = "def mine(x, comm):\n    return comm.all_reduce_ring(x)"
    assert answers.attempt(card, cells)[1] == []


def test_a_part_of_a_check_is_a_part_of_the_points():
    outcome = {"status": "not yet", "said": "", "passed": 1, "of": 4, "remarks": []}
    assert grade.mark("ada", CARD, 10, outcome, "", partial=True).points == 2.5
    assert grade.mark("ada", CARD, 10, outcome, "", partial=False).points == 0
    assert grade.mark("ada", CARD, 10, None, "it left", partial=True).status == "stopped"


def test_a_table_of_points_is_checked(tmp_path):
    assert grade.points_of(None)["accumulation/configure"] == 10
    table = tmp_path / "points.csv"
    for row, words in {
        "accumulation/configur,1": "accumulation has",
        "floats/decode,-1": "0 or more",
        "floats/decode,ten": "line 2: the first line is exercise,points",
        "floats/decode": "line 2",
    }.items():
        table.write_text(f"exercise,points\n{row}\n")
        with pytest.raises(ValueError, match=words):
            grade.points_of(table)
    table.write_text("\ufeffexercise,points\nfloats/decode,3\n", encoding="utf-8")
    assert grade.points_of(table) == {"floats/decode": 3}, "as Excel writes it"


@pytest.mark.parametrize("where", [".", "inside"])
def test_grades_are_not_written_into_submissions(tmp_path, where, capsys):
    with pytest.raises(SystemExit):
        command.from_command_line([str(tmp_path), "--out", str(tmp_path / where)])
    assert "name a folder beside them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("jobs", "-1", "--jobs -1: give 1 or more"),
        ("seconds", "0", "--seconds 0: give 0.1 or more"),
        ("memory", "nan", "--memory nan"),
        ("points", "nowhere.csv", "--points: "),
        ("out", __file__, "is a file: name a folder"),
        ("jobs", "1", "holds nothing to grade"),
    ],
)
def test_an_option_that_cannot_be_is_named_before_the_first_answer(
    tmp_path, option, value, words, capsys
):
    with pytest.raises(SystemExit) as stop:
        command.from_command_line([str(tmp_path), f"--{option}", value])
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_other_graders_get_points():
    def half(target, seq_len, gpus, fits):
        return 1, target // seq_len // gpus

    exercise = exercises.find("accumulation/configure")
    assert grade.earned(exercise.id, exercise.reference) == exercise.card.minutes
    assert grade.earned(exercise.id, ...) == 0
    assert 0 < grade.earned(exercise.id, half, most=4) < 4
