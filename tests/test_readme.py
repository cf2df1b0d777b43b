"""The README says what is there: its map of labs, its figure, its commands, its links."""

import base64
import json
import pathlib
import re

import pytest

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
    assert len(re.findall(r"\]\(notebooks/\d", README)) == len(LABS)


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_code_prints_what_stands_below_it(capsys):
    code, printed = re.search(r"```python\n(.+?)```\n```text\n(.+?)```", README, re.DOTALL).groups()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


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
