"""Every lab keeps its word: the stored notebook is the text twin run from top to bottom, has the anatomy of a lab, and reads well."""

import ast
import base64
import html.parser
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import zlib

import jupytext
import nbformat
import nbval.kernel
import printed
import pytest
from jupyter_client.provisioning.local_provisioner import LocalPortCache

import notebooks as tool  # tools/notebooks.py
from labutils.ledger import Ledger, Line
from labutils.teach import plots, widgets

PAIRS = tool.twins()
LABS = [
    pytest.param(nbformat.read(path, as_version=4), path.stem, id=path.stem)
    for path, _ in PAIRS
    if path.exists()
]
each_lab = pytest.mark.parametrize("lab, name", LABS)

MOST = 90  # minutes that a core takes
SETUP, IGNORED = "Setup", "nbval-ignore-output"
SECTIONS = ["Goals", SETUP, "In practice", "Errata", "Summary", "References"]
ALLOWED_TAGS = {IGNORED, "hide-input", "hide-output", "hide-cell"}
# More than six digits are compared to the last one. The same on any machine are those of a lab about
# digits, and numbers of Python's own: each comes from one operation, or from whole numbers.
ABOUT_DIGITS = {"01_float_formats"}
EXACT = {"8.317766166719343", "5.960464477539063e-08", "2.9866142981514305"}
EXACT |= {"0.2727272727272727", "16000.00", "149760.0"}
PAPER = re.compile(r"\b[0-9]{4}\.[0-9]{5}\b")  # a number of arXiv's
FOREIGN_PATH = re.compile(
    r"(?:/(?:home|Users|root|tmp|private|var/folders)/|site-packages|[A-Z]:\\)\S*"
)
# What a cell may show that another machine would not: a time, a rate, or what the machine has.
MACHINE = re.compile(
    r"\d\s?(?:[nµm]?s|[kMGT]?i?B(?:/s)?|[kMGT]?FLOP/s|cores?|×|threads?)\b|\b(?:Linux|macOS|Darwin|Windows|CPU|GPU)\b"
)
FORBIDDEN = {
    r"(?m)^\s*[!%]": "shell and magic commands: what a lab needs is installed by `make lab`",
    r"\bsys\.path\b|\bPYTHONPATH\b": "import paths: labutils is installed",
    r"\bos\.chdir\b": "the working directory is the notebook's folder",
    r"\bwarnings\.(filterwarnings|simplefilter|catch_warnings)\b": "silenced warnings: remove the cause",
}
HEDGES = re.compile(r"\b(simply|just|obviously|trivially|of course)\b", re.IGNORECASE)


# Why a cell is not compared, for each such cell of a lab, in their order. A new one needs a line here.
UNCOMPARED = {
    "00_start_here": ("what this machine has", "times in a trace"),
    "02_precision": ("times of three formats, the slowest of which depends on the CPU",),
    "04_checkpointing": ("times of one CPU, and their ratios",),
    "06_flash_attention": ("Triton is there on Linux alone, and on a GPU it says so",),
    "07_collectives": (
        "latency and bandwidth between processes, which the next cell draws lines from",
        "times of four all-reduces as dots, and in the figure's alternative text",
        "latency and bandwidth while two ranks are silent",
    ),
    "08_data_parallel": ("spans of a clock, and the hidden share in the alternative text",),
    "13a_pipelines": ("spans of a clock", "the bubble in these spans"),
    "14_lora": ("times of one CPU",),
}


def code(lab):
    return [cell for cell in lab.cells if cell.cell_type == "code"]


def prose(lab):
    """The Markdown of a lab without code, comments and formulas."""
    text = "\n\n".join(cell.source for cell in lab.cells if cell.cell_type == "markdown")
    return re.sub(r"```.*?```|<!--.*?-->|`[^`]*`", "", text, flags=re.DOTALL)


def headings(lab):
    return [
        (len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose(lab), re.MULTILINE)
    ]


def texts(cell):
    """Everything textual that a cell shows, pictures' data left out."""
    for output in cell.outputs:
        yield output.get("text", "")
        for mime, data in output.get("data", {}).items():
            if mime.startswith("text/"):
                yield re.sub(r"data:image/[^\"]*", "", data)


def functions(lab):
    """The names of the functions that cells call, with their first argument where it is text."""
    for cell in code(lab):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                first = node.args[0] if node.args else None
                yield node.func.id, first.value if isinstance(first, ast.Constant) else None


class Images(html.parser.HTMLParser):
    """The alternative texts of the images in some HTML; None where one is missing."""

    def __init__(self, page):
        super().__init__()
        self.alternatives = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.alternatives.append(dict(attributes).get("alt"))


@pytest.mark.parametrize("notebook, text", PAIRS, ids=[path.stem for path, _ in PAIRS])
def test_the_twins_say_the_same(notebook, text):
    assert tool.differences(notebook, text) == []


@each_lab
def test_it_was_run_from_top_to_bottom(lab, name):
    assert [cell.execution_count for cell in code(lab)] == list(range(1, len(code(lab)) + 1))


@each_lab
def test_it_is_normalized(lab, name):
    again = tool.normalize(nbformat.reads(nbformat.writes(lab), as_version=4))
    assert nbformat.writes(again) == nbformat.writes(lab), f"run: python tools/notebooks.py {name}"
    fresh = tool.build(tool.NOTEBOOKS / "text" / f"{name}.py")
    assert [cell.id for cell in fresh.cells] == [cell.id for cell in lab.cells]


@each_lab
def test_no_output_is_an_error_or_a_warning(lab, name):
    outputs = [output for cell in code(lab) for output in cell.outputs]
    assert not [output.ename for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@each_lab
def test_nothing_names_a_path_of_one_machine(lab, name):
    written = [
        *(cell.source for cell in lab.cells),
        *(text for cell in code(lab) for text in texts(cell)),
    ]
    assert not [found for text in written for found in FOREIGN_PATH.findall(text)]


@each_lab
def test_it_has_pictures_and_each_says_what_it_shows(lab, name):
    shown = [
        Images(output.data.get("text/html", "")).alternatives
        for cell in code(lab)
        for output in cell.outputs
        if "data" in output
    ]
    alternatives = [alternative for group in shown for alternative in group]
    assert alternatives and all(alternatives)
    raw = {
        mime
        for cell in code(lab)
        for output in cell.outputs
        for mime in output.get("data", {})
        if mime.startswith("image/")
    }
    assert not raw, "a picture without alternative text: return a plots.Picture"


@each_lab
def test_all_imports_stand_in_the_setup_cell(lab, name):
    parsed = [ast.walk(ast.parse(cell.source)) for cell in code(lab)]
    importing = [
        index
        for index, nodes in enumerate(parsed)
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)
    ]
    assert importing == [0]


@each_lab
def test_no_cell_does_what_the_installation_should(lab, name):
    for cell in code(lab):
        for pattern, instead in FORBIDDEN.items():
            assert not re.search(pattern, cell.source), f"{instead}\n\n{cell.source}"


@each_lab
def test_only_what_belongs_to_this_machine_is_left_uncompared(lab, name):
    tags = [set(cell.metadata.get("tags", [])) for cell in code(lab)]
    assert set().union(*tags) <= ALLOWED_TAGS
    ignored = [cell for cell in code(lab) if IGNORED in cell.metadata.get("tags", [])]
    for cell in ignored:
        assert any(MACHINE.search(text) for text in texts(cell)), (
            f"nothing here differs between machines:\n\n{cell.source}"
        )
    assert len(ignored) <= len(UNCOMPARED.get(name, ())), (
        "print ratios, counts, bytes or a verdict rather than times; or say in UNCOMPARED why not"
    )


def long_numbers(lab):
    """The numbers with a point or an exponent that compared cells print in more than six digits."""
    for cell in code(lab):
        if IGNORED not in cell.metadata.get("tags", []):
            shown = re.sub(r'"views": "[^"]*"', "", "".join(texts(cell)))
            for number in printed.NUMBER.findall(PAPER.sub("", shown)):
                if re.search(r"[.eE]", number) and printed.digits(number) > printed.MOST_DIGITS:
                    yield number


@each_lab
def test_digits_that_depend_on_the_machine_are_not_printed(lab, name):
    if name not in ABOUT_DIGITS:
        assert set(long_numbers(lab)) <= EXACT, "print at most six digits of a float"


@each_lab
def test_no_setting_of_a_panel_ends_in_an_error(lab, name):
    for states in re.findall(r'"views": "([A-Za-z0-9+/=]*)"', "".join(itertools.chain(*map(texts, code(lab))))):
        for view in json.loads(zlib.decompress(base64.b64decode(states))):
            assert "lu-error" not in view, view[:500]


@each_lab
def test_cells_are_small(lab, name):
    lines = [len(cell.source.splitlines()) for cell in code(lab)]
    assert statistics.median(lines) <= 5
    assert max(lines) <= 25, "a cell this long belongs in labutils, with a test"


@pytest.mark.parametrize("notebook, text", PAIRS, ids=[path.stem for path, _ in PAIRS])
def test_a_page_shows_whole_lines_of_code(notebook, text):
    lines = [line for cell in code(tool.build(text)) for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


@each_lab
def test_it_has_the_anatomy_of_a_lab(lab, name):
    number = name.partition("_")[0]
    levels = [level for level, _ in headings(lab)]
    titles = [title for level, title in headings(lab) if level == 1]
    assert len(titles) == 1 and titles[0].startswith(f"{number} · ") and levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), (
        "a heading skips a level"
    )
    sections = [title for level, title in headings(lab) if level == 2]
    found = [
        section for title in sections for section in SECTIONS if title.partition(":")[0] == section
    ]  # "Errata: what ..." will do
    assert found == SECTIONS, f"{SECTIONS} in this order, in {sections}"
    questions = [title for title in sections if title.endswith("?")]
    assert 3 <= len(questions) <= 8 and re.search(r"\d+\s?min", lab.cells[0].source), (
        "a lab asks questions and says how long it takes"
    )


@pytest.mark.parametrize("notebook, text", PAIRS, ids=[path.stem for path, _ in PAIRS])
def test_the_stated_minutes_are_honest(notebook, text):
    lab = tool.build(text)
    said = tool.STATED.search(lab.cells[0].source)[0]
    assert said == tool.stated(lab), "run: python tools/notebooks.py --minutes"


def test_minutes_count_prose_code_and_exercises(tmp_path):
    prose = "# # Title\n#\n# *5 min* <!-- claim: 1 == 1 -->\n# " + "word " * 696
    text = f"# %% [markdown]\n{prose}\n\n# %%\n" + "x = 1  # one\n\n# two\n" * 40
    card = "\n# %% [markdown]\n# ### Exercise 1.1 · A (15 min, ●○○)\n#\n# ## References\n# more\n"
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    assert tool.minutes(tool.build(tmp_path / "a.py")) == (10 + 5, 0)
    (tmp_path / "a.py").write_text(text + card, encoding="utf-8")
    assert tool.minutes(tool.build(tmp_path / "a.py")) == (10 + 5 + 15, 0)


def test_minutes_tell_the_core_from_what_goes_further(tmp_path):
    def part(heading, minutes):
        return f"# %% [markdown]\n# {heading}\n# " + "word " * (70 * minutes) + "\n\n"

    text = part("# Title", 5) + part("## Why?", 5) + part("### Further: and when?", 10)
    text += part("#### Even so", 5) + part("### Exercise 1.1 · A (20 min, ●○○)", 0)
    text += part("## Further: who?", 5) + part("### Below", 10) + part("### Further: still", 10)
    text += part("## Summary", 5) + part("## References", 5)
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    lab = tool.build(tmp_path / "a.py")
    assert tool.minutes(lab) == (35, 40) and tool.stated(lab) == "35 min, and 40 further"
    assert tool.STATED.search("*35 min, and 40 further · a*")[0] == "35 min, and 40 further"


@each_lab
def test_a_core_fits_a_class(lab, name):
    core, further = tool.minutes(lab)
    assert core <= MOST or not further, f"move more under a heading 'Further: …' than {further} min"


@each_lab
def test_it_predicts_checks_and_explores(lab, name):
    called = list(functions(lab))
    names = [function for function, _ in called]
    assert "predict" in names and "explore" in names
    checked = {argument for function, argument in called if function == "check"}
    assert len(checked) >= 2


@each_lab
def test_each_goal_names_an_exercise_that_proves_it(lab, name):
    goals = re.search(r"^## Goals$(.*?)^## ", prose(lab), re.MULTILINE | re.DOTALL)[1]
    number = int(name[:2])  # 13a and 13b share theirs
    exercises = set(re.findall(rf"^### Exercise ({number}\.\d+)\b", prose(lab), re.MULTILINE))
    items = re.findall(r"^(?:[-*]|\d+\.) .*(?:\n(?!\n|[-*] |\d+\. ).*)*", goals, re.MULTILINE)
    assert items and exercises
    proving = [set(re.findall(rf"\b{number}\.\d+\b", item)) for item in items]
    assert all(proving) and set().union(*proving) == exercises, (
        "each goal names its exercise, and each exercise has its goal"
    )


@each_lab
def test_the_prose_is_plain(lab, name):
    found = [
        prose(lab)[max(match.start() - 40, 0) : match.end() + 20]
        for match in HEDGES.finditer(prose(lab))
    ]
    assert not found, "what is simple needs no saying, what is not is not made so by a word"


def test_a_changed_source_and_a_changed_tag_are_seen(tmp_path):
    (tmp_path / "a.py").write_text(
        '# %% [markdown]\n# # Hi\n\n# %% tags=["hide-input"]\n1 + 1\n', encoding="utf-8"
    )
    built = tool.build(tmp_path / "a.py")
    for change in (
        lambda cell: cell.update(source="1 + 2"),
        lambda cell: cell.metadata.update(tags=[]),
        lambda cell: None,
    ):
        notebook = nbformat.reads(nbformat.writes(built), as_version=4)
        change(notebook.cells[1])
        nbformat.write(notebook, tmp_path / "a.ipynb")
        assert len(tool.differences(tmp_path / "a.ipynb", tmp_path / "a.py")) == (
            notebook.cells != built.cells
        )


def test_a_rebuilt_notebook_differs_only_where_the_source_does(tmp_path):
    (tmp_path / "a.py").write_text("# %%\n1\n\n# %%\n2\n\n# %%\n2\n", encoding="utf-8")
    before = [cell.id for cell in tool.build(tmp_path / "a.py").cells]
    (tmp_path / "a.py").write_text("# %%\n1\n\n# %%\n3\n\n# %%\n2\n\n# %%\n2\n", encoding="utf-8")
    after = [cell.id for cell in tool.build(tmp_path / "a.py").cells]
    assert len(set(after)) == 4 and [*after[:1], *after[2:]] == before


def test_normalizing_drops_what_belongs_to_one_run():
    stream = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a", "b\n")]
    live = nbformat.v4.new_output(
        "display_data", {tool.LIVE_WIDGET: {"model_id": "1"}, "text/html": "<p>panel</p>"}
    )
    cell = nbformat.v4.new_code_cell(
        "f()",
        outputs=[*stream, live],
        metadata={"execution": {"iopub.status.busy": "now"}, "tags": ["hide-input"]},
    )
    notebook = tool.normalize(
        nbformat.v4.new_notebook(
            cells=[cell],
            metadata={"widgets": {}, "language_info": {"name": "python", "version": "3.11.7"}},
        )
    )
    assert [output.get("text") or output.data for output in cell.outputs] == [
        "ab\n",
        {"text/html": "<p>panel</p>"},
    ]
    assert cell.metadata == {"tags": ["hide-input"]} and notebook.metadata == tool.METADATA


def test_a_kernel_has_what_sums_depend_on(monkeypatch):
    source = "import os; print(os.environ['OMP_NUM_THREADS'])"
    threads = []
    for mine in (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if mine:
            monkeypatch.setenv("OMP_NUM_THREADS", mine)
        cells = [nbformat.v4.new_code_cell(source)]
        notebook = tool.execute(nbformat.v4.new_notebook(cells=cells), tool.NOTEBOOKS)
        threads.append(notebook.cells[0].outputs[0].text)
    assert threads == ["1\n", "3\n"]


def test_a_kernel_asks_for_no_port_that_another_process_could_take(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(
            LocalPortCache, "find_available_port", lambda cache, ip: taken.getsockname()[1]
        )
        cells = [nbformat.v4.new_code_cell("print('well')")]
        notebook = tool.execute(nbformat.v4.new_notebook(cells=cells), tool.NOTEBOOKS)
        assert notebook.cells[0].outputs[0].text == "well\n"
        manager, client = nbval.kernel.start_new_kernel(
            kernel_name=nbval.kernel.CURRENT_ENV_KERNEL_NAME
        )
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_memory_is_that_of_the_processes_a_lab_starts():
    greedy = "import sys; x = bytearray(200_000_000); x[::4096] = bytes([1]) * len(x[::4096]); print(flush=True); sys.stdin.read()"
    before = tool.held()
    with subprocess.Popen(
        [sys.executable, "-c", greedy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert tool.held() - before > 200_000_000
        process.stdin.close()


def test_a_lab_that_needs_too_much_memory_is_not_written():
    empty = nbformat.v4.new_notebook()
    assert [*tool.complaints(empty, tool.LAB_BYTES)] == []
    assert "needs 2.50 GB, and a lab may need 2" in next(tool.complaints(empty, 2_500_000_000))


def test_an_unknown_lab_is_named(capsys):
    with pytest.raises(ValueError, match=r"no lab is called 99_none; there are: "):
        tool.main(["--check", "99_none"])


def test_jupytext_pairs_the_same_folders():
    config = jupytext.config.load_jupytext_configuration_file(
        str(tool.NOTEBOOKS.parent / "jupytext.toml")
    )
    assert (
        config.default_formats(str(tool.NOTEBOOKS / "01_x.ipynb"))
        == "notebooks///ipynb,notebooks/text///py:percent"
    )


@each_lab
def test_every_paper_is_in_the_bibliography(lab, name):
    bibliography = (tool.NOTEBOOKS.parent / "book/references.bib").read_text(encoding="utf-8")
    cited = set(re.findall(r"\b\d{4}\.\d{5}\b", prose(lab)))
    assert [paper for paper in sorted(cited) if paper not in bibliography] == []


@pytest.fixture
def comparing(pytestconfig):
    """conftest.py, by which nbval compares pictures."""
    return pytestconfig.pluginmanager.get_plugin(str(tool.NOTEBOOKS.parent / "conftest.py"))


def _output(shown):
    return [{"data": {"text/html": shown._repr_mimebundle_()["text/html"]}}]


def test_words_in_pictures_and_states_of_panels_are_compared(comparing):
    def panel(total):
        def view(n):
            lines = [Line("weights", total if n == 3 else 1000 * n)]
            return plots.memory_bars(a=Ledger(lines))

        return _output(widgets.explore(view, n=(1, 3)))

    seen = comparing.drawings(panel(3000))
    assert "3.00 kB" in seen and "2.00 kB" in seen and seen == comparing.drawings(panel(3000))
    assert seen != comparing.drawings(panel(4000))
    assert len(comparing.pictures(panel(3000))) == 0
    drawn = plots.memory_bars(a=Ledger([Line("weights", 3000)]))
    ((words, pixels),) = comparing.pictures([{"data": {"text/html": drawn.html()}}])
    assert "3.00 kB" in words.split("|") and pixels.shape[2] == 3
    assert comparing.drawings([{"data": {"text/html": drawn.html()}}]) == ""
