"""Progress: kept when a check passes in a notebook, nowhere else; no file disturbs a learner."""

import builtins
import json
import os
import pathlib
import subprocess
import sys
import threading

import jupyter_client.manager
import pytest

from labutils.teach import check, exercises, progress

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOLVED, ALL = "accumulation/configure", len(exercises.cards())


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("LABUTILS_PROGRESS", str(tmp_path / "new" / "progress.json"))
    return tmp_path / "new" / "progress.json"


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)


def answer(exercise=SOLVED):
    return check.check(exercise, exercises.find(exercise).reference)


def test_a_check_that_passes_in_a_notebook_is_kept(place, notebook, capsys):
    assert answer().passed and answer("accumulation/accumulate").passed
    assert json.loads(place.read_text()).keys() == {SOLVED, "accumulation/accumulate"}
    assert capsys.readouterr().out == "" and [each.name for each in place.parent.iterdir()] == [
        place.name
    ]
    text = str(progress.overview())
    assert "05_accumulation        2 of 3  5.2 · Bug hunt" in text
    assert f"2 of {ALL} exercises are solved." in text and "It goes on with 5.2" in text
    assert "5.2 · Bug hunt" in progress.overview()._repr_html_()


def test_what_fails_or_is_not_attempted_is_not_kept(place, notebook):
    check.check(SOLVED, lambda *arguments: (1, 1))
    check.check(SOLVED, ...)
    assert not place.exists() and f"0 of {ALL}" in str(progress.overview())


def test_outside_a_notebook_nothing_is_kept(place):
    assert answer().passed and not place.exists()


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", '{"a": ', "[" * 100_000, b"\xff\xfe", '{"gone/gone": 3}']
)
def test_a_bad_file_is_no_reason_to_fail(place, notebook, text):
    place.parent.mkdir()
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"0 of {ALL}" in str(progress.overview())
    assert answer().passed and SOLVED in progress.solved()


def test_a_place_that_cannot_be_written_is_no_reason_to_fail(place, notebook):
    place.parent.write_text("a file where a folder should be")
    assert answer().passed and progress.solved() == {}


def test_what_is_no_file_is_left_alone(place, notebook):
    place.parent.mkdir()
    os.mkfifo(place)
    assert answer().passed and place.is_fifo() and progress.solved() == {}


def test_the_command_prints_every_lab(place):
    command = [sys.executable, "-m", "labutils.teach.progress"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for card in exercises.cards():
        assert card.lab in run.stdout


def test_what_computes_long_says_so_until_it_ends():
    said, again = [], threading.Event()

    def say(text, first):
        said.append((text, first))
        if len(said) == 2:
            again.set()

    waiting = progress.Waiting(say, after=0, every=0)
    waiting.begin()
    assert again.wait(30)
    waiting.end()
    assert said[0] == ("computing · 0 s", True) and said[-1] == ("", False)
    assert {first for _, first in said[1:]} == {False}
    waiting = progress.Waiting(say, after=60)
    before = list(said)
    waiting.begin()
    waiting.end()
    assert said == before and not waiting.thread.is_alive()


LONG = """from labutils.teach import progress
shell, shown = get_ipython(), []
progress.watch(shell, after=0)
progress.watch(shell)  # once is enough
waiting, said = shell.waiting, shell.waiting.say
waiting.say = lambda text, first: (said(text, first), shown.append(text))"""


def test_a_long_cell_says_so_where_somebody_watches_and_leaves_nothing_elsewhere():
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3")
    try:
        outputs = {}

        def run(code, allow_stdin):
            outputs[allow_stdin] = []
            client.execute_interactive(
                code, allow_stdin=allow_stdin, output_hook=outputs[allow_stdin].append, timeout=60
            )

        run(LONG, False)
        kinds = "display_data update_display_data clear_output stream execute_result".split()

        def told(code):
            run(code, True)  # as JupyterLab
            found = [each for each in outputs[True] if each["msg_type"] in kinds]
            return [(each["msg_type"], each["content"]) for each in found]

        (first, line), *more, (last, _) = told("while not shown: pass")
        assert first == "display_data" and line["data"]["text/plain"] == "computing · 0 s"
        assert {kind for kind, _ in more} <= {"update_display_data"} and last == "clear_output"
        # What the cell shows comes when the line is gone, and after that there is no line.
        for says, kind in (("print(1, flush=True)", "stream"), ("1", "execute_result")):
            found = [each for each, _ in told(f"shown.clear()\nwhile not shown: pass\n{says}")]
            assert found[0] == "display_data" and found[-2:] == ["clear_output", kind]
        late = told("print(1, flush=True)\nshown.clear()\nwhile len(shown) < 2: pass")
        assert late[-1][0] == "stream"
        run("waiting.thread.is_alive()", False)  # nbclient, nbval
        assert [
            each["content"]["data"]["text/plain"]
            for each in outputs[False]
            if "data" in each["content"]
        ] == ["False"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
