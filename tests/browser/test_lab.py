"""JupyterLab as `make lab` starts it: a learner runs a lab, moves a slider, and gets an exercise wrong and then right."""

import ast
import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

import nbformat
import psutil
import pytest
from playwright.sync_api import expect

from labutils.schedule import one_f_one_b, simulate

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAB = "notebooks/01_float_formats.ipynb"  # beside the lab that `make lab` opens first


@dataclass
class Server:
    process: subprocess.Popen
    url: str  # with the token
    folder: pathlib.Path

    @property
    def site(self):
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """JupyterLab on a copy of the course, by the command of `make lab`, on a free port and with settings of its own."""
    home = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "labconfig", "jupytext.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, home / name)
    notebook = nbformat.read(home / LAB, as_version=4)
    for cell in notebook.cells:  # so that whatever is shown was computed here
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, home / LAB)
    command = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "-m jupyterlab" in line
    )
    arguments = shlex.split(command.partition("-m jupyterlab ")[2])
    own = {
        name: str(home / name.lower())
        for name in (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_DATA_DIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
            "IPYTHONDIR",
        )
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *arguments, "--no-browser", "--port=0"],
        cwd=home, env={**os.environ, **own, "JUPYTER_CONFIG_PATH": str(home)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:[1-9]\d*/\S*token=\w{16,}", line):
            break
    else:
        pytest.fail("JupyterLab did not print its address:\n" + "".join(said))
    drain = threading.Thread(target=process.stderr.read)  # or a full pipe would stop the server
    drain.start()
    server = Server(process, found[0], home)
    while True:  # the address is printed a moment before it answers
        try:
            urllib.request.urlopen(f"{server.site}/login").close()
            break
        except urllib.error.URLError:
            assert process.poll() is None, "JupyterLab has stopped"
            time.sleep(0.05)
    yield server
    process.terminate()
    process.wait()
    drain.join()
    process.stderr.close()


def test_it_listens_on_loopback_only_and_asks_for_the_token(server):
    family = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    listening = [
        found.laddr.ip
        for process in family
        for found in process.net_connections()
        if found.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{server.site}/api/sessions")


def stub(path):
    """The first stub of a notebook and how it is checked: (start of its cell, its head, arguments, exercise id)."""
    cells = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    for source, following in itertools.pairwise(cells):
        if "raise NotImplementedError" in source and (
            checked := re.match(r'check\("([^"]+)", ', following)
        ):
            function = ast.parse(source).body[-1]
            head = source[: source.index("raise NotImplementedError")]
            return (
                f"def {function.name}(",
                head,
                ", ".join(argument.arg for argument in function.args.args),
                checked[1],
            )
    raise AssertionError(f"{path.name} has no stub")


def test_a_learner_runs_a_lab_moves_a_slider_and_solves_an_exercise(browser, server):
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(600_000)  # ms: a lab that runs on a busy machine takes its time
    page = context.new_page()
    page.goto(re.sub(r"/notebooks/\w+\.ipynb", f"/{LAB}", server.url))
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible()
    # Cells that run before the kernel is connected are skipped, and the indicator says "idle" before there is a kernel.
    connected = "async () => (await (await fetch('/api/sessions')).json()).some(({kernel}) => kernel.execution_state === 'idle' && kernel.connections > 0)"
    page.wait_for_function(connected, polling=200)
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")

    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    count = page.locator(".jp-CodeCell").count()
    page.wait_for_function(
        "count => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].filter(prompt => /\\[\\d+\\]/.test(prompt.textContent)).length === count",
        arg=count,
    )
    assert count > 10
    for trouble in ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr"):
        assert page.locator(f"[data-mime-type='{trouble}']").all_inner_texts() == []

    # A slider, first by keyboard, then by mouse: the figure follows.
    panel = page.locator(
        ".jp-OutputArea-output .widget-vbox:has(.noUi-handle):has(.widget-html img)"
    ).first
    figure, handle = panel.locator(".widget-html img").last, panel.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    start = figure.get_attribute("src")
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(figure).not_to_have_attribute("src", start)
    moved = figure.get_attribute("src")
    knob, track = handle.bounding_box(), panel.locator(".noUi-base").first.bounding_box()
    page.mouse.move(knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * 0.9, knob["y"] + knob["height"] / 2, steps=8)
    page.mouse.up()
    expect(figure).not_to_have_attribute("src", moved)
    expect(figure).to_have_attribute("alt", re.compile(r"\w"))

    # An exercise, first with a wrong answer.
    begins, head, arguments, exercise = stub(server.folder / LAB)
    cell = page.locator(".jp-CodeCell", has_text=begins).first
    report = page.locator(f".jp-CodeCell:has-text('{exercise}') .check-report")
    expect(report).to_contain_text("not attempted")
    attempts = {
        "not yet": "return -1",
        "solved": f'from labutils.teach import exercises\n    return exercises.find("{exercise}").reference({arguments})',
    }
    for verdict, body in attempts.items():
        cell.locator(".cm-content").click()
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.insert_text(head + body)
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Shift+Enter")  # the check is the next cell
        expect(report).to_contain_text(verdict)
        expect(report).to_contain_text("✗" if verdict == "not yet" else "✓")
    expect(report).not_to_contain_text("✗")
    context.close()


def test_an_order_placed_by_hand_runs_on_ranks_at_a_click(browser, server):
    own = nbformat.v4.new_code_cell(
        "from labutils.teach.editor import LEVELS, Editor\nEditor(LEVELS[1:2])"
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[own]), server.folder / "notebooks/own.ipynb")
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    # A workspace of its own: that of the tests before would open their notebook, too.
    page.goto(
        re.sub(r"/lab/tree/.*\.ipynb", "/lab/workspaces/own/tree/notebooks/own.ipynb", server.url)
    )
    if page.get_by_role("dialog").get_by_role("button", name="Select").count():
        page.get_by_role("dialog").get_by_role("button", name="Select").click()
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    editor = page.locator(".lu-live .lu-editor")
    expect(editor.get_by_label("rank 0: idle")).to_be_visible()
    page.get_by_role("button", name="Run on ranks").click()
    live = page.locator(".lu-live")
    expect(live).to_contain_text("Not run: there is no order yet")
    for span in sorted(simulate(one_f_one_b(3, 4)).spans, key=lambda span: span.start):
        editor.locator(f'[data-key="{span.rank} {span.kind} {span.rank}"]').click()
    expect(editor).to_contain_text("You built 1F1B")
    page.get_by_role("button", name="Run on ranks").click()
    expect(live).to_contain_text("1F1B on 3 ranks: loss")
    expect(live).to_contain_text("gradients are equal")
    expect(
        live.get_by_role("img", name=re.compile("Gantt chart of simulated and measured"))
    ).to_be_visible()
    context.close()
