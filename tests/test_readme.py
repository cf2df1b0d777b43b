"""The README says what is there: its map of labs, its figure, its commands, its links."""

import base64
import json
import pathlib
import re
import tomllib

import pytest
import yaml

import labutils

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LABS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_the_map_names_every_lab_with_its_minutes(path):
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    title = re.search(r"^# (.+)$", first, re.MULTILINE)[1]
    said = re.search(r"(\d+) min(?:, and (\d+) further)?", first)
    minutes = " + ".join(filter(None, said.groups()))
    assert f"| [{title}](notebooks/{path.name}) | {minutes} |" in README


def test_the_map_names_no_lab_that_is_not_there():
    assert len(re.findall(r"^\| \[.+?\]\(notebooks/\d", README, re.MULTILINE)) == len(LABS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_the_routes_take_the_hours_that_they_say():
    map_of_labs = dict(re.findall(r"^\| \[(\w+) · .+?\) \| ([\d +]+) \|", README, re.MULTILINE))
    hours = {
        number: sum(map(int, minutes.split("+"))) / 60 for number, minutes in map_of_labs.items()
    }
    before = dict(re.findall(r"^\| \[(\w+) · .+?\| [\d +]+ \| (.+?) \|", README, re.MULTILINE))
    routes = re.findall(r"(labs [\w, ]+|all) \(about (\d+) hours\)", README)
    assert len(routes) == 3 and len(hours) == len(LABS)
    for labs, said in routes:
        route = list(hours) if labs == "all" else labs.removeprefix("labs ").split(", ")
        assert sum(hours[number] for number in route) == pytest.approx(int(said), rel=0.1), labs
        for place, number in enumerate(route):
            assert set(re.findall(r"\b\d\d[ab]?\b", before[number])) <= set(route[:place]), number


def test_who_may_use_it_is_said_once():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["version"] == labutils.__version__ and cited["license"] == project["license"]
    assert f"## {labutils.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name, words in {"LICENSE": "BSD 3-Clause", "LICENSE-text": "licenses/by/4.0/"}.items():
        assert words in (ROOT / name).read_text(encoding="utf-8") and name in README
        assert name in project["license-files"]


def test_the_code_prints_what_stands_below_it(capsys):
    code, printed = re.search(r"```python\n(.+?)```\n```text\n(.+?)```", README, re.DOTALL).groups()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_page_with_a_command_says_which_python():
    for page in ("README.md", "book/planner.md", "book/teaching.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "    python -m" in text and "`source .venv/bin/activate`" in text, page


def test_the_figure_is_the_first_of_lab_00():
    stored = json.loads(LABS[0].read_text(encoding="utf-8"))["cells"]
    pages = [
        "".join(output.get("data", {}).get("text/html", ""))
        for cell in stored
        for output in cell.get("outputs", [])
    ]
    first = next(
        match[1]
        for page in pages
        if (match := re.search(r'src="data:image/png;base64,([^"]+)"', page))
    )
    assert (ROOT / "book/static/cover.png").read_bytes() == base64.b64decode(first)
