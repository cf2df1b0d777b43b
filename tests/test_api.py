"""The API reference has every public name, what its docstring says, and the labs that use it."""

import ast
import importlib.util
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("api", ROOT / "book" / "api.py")
api = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(api)
LABS = sorted(path.stem for path in api.LABS.glob("*.py"))
# The letters have a page of their own; rigs and exercises are shown where a lab uses them.
ELSEWHERE = {"notation", "rigs", "exercises"}


def test_every_module_stands_on_one_page():
    folders = ROOT / "labutils", ROOT / "labutils" / "teach"
    there = {path.stem for folder in folders for path in folder.glob("*.py")}
    there |= {path.parent.name for folder in folders for path in folder.glob("*/__init__.py")}
    there = {name for name in there if name[0] != "_"} - {"teach"}
    assert set(api.MODULES) == there - ELSEWHERE
    listed = sum(map(len, map(str.split, api.PAGES.values())))
    assert listed == len(api.MODULES), "a module stands on two pages"


@pytest.mark.parametrize("page", api.PAGES)
def test_a_page_has_its_modules(page):
    text = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^```\{api\} (.+)$", text, re.MULTILINE)
    assert listed.split() == api.PAGES[page].split()
    toc = (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8")
    assert f"file: book/{page}\n" in toc


@pytest.mark.parametrize("module", api.MODULES)
def test_a_module_shows_every_name_with_its_docstring(module):
    page = api.markdown(module)
    for name, value in api.public(module).items():
        assert re.search(rf"^`+\{{py:\w+\}} {module}\.{name}\b", page, re.MULTILINE), name
        said = re.sub(
            r"\{py:obj\}`([^<`]+) <[^>]+>`|^```\w+$", r"`\1`", api.prose(value, name), flags=re.M
        )
        said = re.sub(r"\\", "", said)
        assert re.findall(r"\w+", said) == re.findall(r"\w+", inspect.getdoc(value)), name
    outside = re.sub(r"^```(pycon|text)\n.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^>>>.*", outside, re.MULTILINE), "an example would be a quotation"
    targets = re.findall(r"\{py:obj\}`[^<`]+ <([^>]+)>`", page)
    assert set(targets) <= api.known()


@pytest.mark.parametrize("module", api.MODULES)
def test_a_module_shows_every_constant(module):
    home = pathlib.Path(api.loaded(module).__file__)
    files = home.parent.glob("*.py") if home.name == "__init__.py" else [home]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = set(re.findall(r"^([A-Z][A-Z0-9_]*)(?:: .+)? = ", text, re.MULTILINE))
    assert found & vars(api.loaded(module)).keys() <= api.constants(module).keys()
    for name, (value, said) in api.constants(module).items():
        assert f"{{py:data}} {module}.{name}\n:value: {value}\n\n" in api.markdown(module)
        assert f"{module}.{name}" in api.known() and len(value) < 400
        assert not said or (said[0].isupper() and said[-1] == ".")


def test_a_constant_has_its_value_and_what_its_source_says_of_it():
    assert api.constants("units")["GB"] == ("10 ** 9", "Bytes.")
    assert api.constants("anatomy")["INDEX"] == ("8", "Bytes of an int64.")
    assert (
        api.constants("config")["REACHED"][1] == "The peaks of which a device reaches a fraction."
    )
    assert api.constants("timeline")["COMMUNICATION"][1].startswith("Kinds of spans that communic")
    assert api.constants("floats")["E5M2"] == ("FloatFormat('e5m2', 5, 2)", "")
    assert api.constants("anatomy")["GROUPS"][0].startswith("dict of 'tokens', 'positions', ")
    assert "config" not in api.uses() and "00_start_here" in api.uses()["units.GB"]


def test_titles_in_the_sidebar_are_short():
    toc = (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8")
    for page in api.PAGES:
        heading = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0]
        short = heading.removeprefix("# API reference: ").capitalize()
        assert f"- file: book/{page}\n            title: {short}\n" in toc


def test_arguments_are_definitions_and_names_are_links():
    said = api.prose(api.public("zero")["shard"], "zero.shard")
    assert "`prefetch`\n: gather the next unit while this one computes" in said
    assert "Inside {py:obj}`gathered <zero.gathered>` the parameters are whole." in said
    assert "\n\nSource: Rajbhandari et al. 1910.02054" in said


def test_what_an_object_holds_is_no_link():
    said = api.prose(api.public("zero")["FlatParameter"], "zero.FlatParameter")
    assert "`shard` is this rank's share" in said and "<zero.shard>" not in said


def test_types_are_short_and_name_their_module():
    written = api.signature(api.public("checkpointing")["run"])
    assert written.startswith("(chain: Sequence[Module], plan: checkpointing.Reversal, x: ")
    assert api.signature(api.public("zero")["Optimizer"]).count(" = AdamW, *, level: int") == 1
    for module in api.MODULES:
        for value in api.public(module).values():
            assert not re.search(r"labutils|collections\.abc| at 0x", api.signature(value))


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_linked_with_what_it_uses_and_back(lab):
    names = re.findall(r"\{py:obj\}`([\w.]+)`", api.of_lab(lab))
    assert len(names) >= 10 and len(names) == len(set(names))
    headings = re.findall(r"^# #+ (.+)$", (api.LABS / f"{lab}.py").read_text(), re.MULTILINE)
    for name in names:
        assert api.uses()[name][lab] in headings
        assert f"../notebooks/{lab}.html#" in api.in_labs(name)


def test_the_lab_of_the_module_comes_first():
    assert api.in_labs("zero.partition").startswith(
        'Labs: <a href="../notebooks/09_zero.html#what-has-to-travel-when-everybody-steps-a-share">'
        "09 · What has to travel when everybody steps a share?</a>"
    )
    assert api.in_labs("zero.Partition") == "", "no lab names it"


def test_only_what_was_imported_is_a_name_of_the_library():
    aliases = {}
    text = "from labutils import zero as z\nfrom labutils.world import World\n"
    text += "from labutils.teach import plots\nz.shard(model); plots.curves; World(4).run"
    names = {"zero", "zero.shard", "plots", "plots.curves", "world.World"}
    assert api.used(ast.parse(text), aliases) == names
    assert api.used(ast.parse("z.layout; zero.shard"), aliases) == {"zero", "zero.layout"}
