"""Every number that the course states is recomputed: the rows of labutils/data/, and the claims behind the takeaways of the labs."""

import ast
import contextlib
import csv
import importlib
import itertools
import math
import pathlib
import pkgutil
import re

import numpy as np
import pytest

import labutils
from labutils import config, teach

DATA = config.DATA
NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MODULES = {
    info.name.rpartition(".")[2]: info.name
    for folder in (labutils, teach)
    for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
} | {"claims": "claims"}  # of tests: what is too long for a cell
ARITHMETIC = "Arithmetic on stated numbers."  # in the note of a row that nothing computes


class Names(dict):
    """What an expression of labutils/data/ may name: the modules of labutils, torch, np and math; each is imported when it is first named."""

    def __missing__(self, name: str):
        if name in MODULES:
            return importlib.import_module(MODULES[name])
        if name == "torch":
            return importlib.import_module("torch")
        raise KeyError(name)


def evaluate(expression: str) -> object:
    # Names are looked up in globals from inside lambdas and comprehensions too, and only a real dict with builtins will do there.
    names = Names(np=np, math=math)
    used = {
        word: names[word]
        for word in set(re.findall(r"[A-Za-z_]\w*", expression))
        if word in MODULES or word in ("np", "math", "torch")
    }
    return eval(expression, used)


def rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((DATA / name).read_text(encoding="utf-8").splitlines()))


TABLES = {name: rows(name) for name in ("claims.csv", "paper_results.csv")}
CHECKED = [
    pytest.param(row, id=row["id"]) for table in TABLES.values() for row in table if row["check"]
]
# The topics of labs that are finished: each of their rows has a check, or says in its note why nothing can be computed.
FINISHED = {
    "float formats",
    "collectives",
    "context",
    "config choice",
    "hardware",
    "checkpointing",
    "gradient accumulation",
    "FlashAttention",
    "mixed precision",
    "data parallel",
    "ZeRO",
    "expert parallel",
    "model-state memory",
    "activation accounting",
    "Qwen2 table",
    "memory planning",
    "tensor parallel",
    "sequence parallel",
    "pipeline",
    "LoRA",
    "LR scaling",
}


@pytest.mark.parametrize("row", CHECKED)
def test_a_row_is_recomputed(row):
    found = evaluate(row["check"])
    assert isinstance(found, (bool, np.bool_)) and found, f"{row['id']}: {row['check']}"


def asks(expression: str) -> bool:
    """Whether an expression names a module, and so is more than arithmetic."""
    return bool(set(re.findall(r"([A-Za-z_]\w*)\.", expression)) & {*MODULES, "torch"})


@pytest.mark.parametrize("row", CHECKED)
def test_a_check_computes_something(row):
    """A row whose check names no module is about arithmetic alone, and says so."""
    computes = asks(row["check"]) or row["id"] == "S1-004"
    assert computes != (ARITHMETIC in row["note"]), row["check"]


@pytest.mark.parametrize("name", TABLES)
def test_no_row_of_a_finished_topic_is_left_out(name):
    bare = [
        row["id"]
        for row in TABLES[name]
        if row["topic"] in FINISHED and not row["check"] and not row["note"].startswith("no number")
    ]
    assert not bare, (
        f"{name}: give each of these a check, or a note that begins with 'no number': {bare}"
    )
    assert len({row["id"] for row in TABLES[name]}) == len(TABLES[name])


# What follows from numbers of the sentence itself is marked as arithmetic; a claim asks the library.
CLAIM = re.compile(r"<!-- (claim|arithmetic): (.+?) -->", re.DOTALL)
TEXTS = sorted((NOTEBOOKS[0].parent / "text").glob("*.py"))


def takeaways(path):
    """(kind, expression, the words it stands behind) of every claim in a lab."""
    for cell in re.split(r"^# %%.*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        source = re.sub(r"^# ?", "", cell, flags=re.MULTILINE)
        for item in re.split(r"\n[> ]*\n|\n(?=[> ]*- )", source):
            words = " ".join(CLAIM.sub("", item).split())
            yield from ((kind, expression, words) for kind, expression in CLAIM.findall(item))


TAKEAWAYS = [
    pytest.param(*claim, id=f"{path.stem}-{number}")
    for path in TEXTS
    for number, claim in enumerate(takeaways(path), 1)
]


@pytest.mark.parametrize("kind, expression, words", TAKEAWAYS)
def test_a_takeaway_is_recomputed(kind, expression, words):
    assert evaluate(expression) is True
    assert asks(expression) or kind == "arithmetic", (
        "ask the library, or write <!-- arithmetic: … -->"
    )


UNITS = {"%": 0.01, "kB": 1e3, "MB": 1e6, "million": 1e6, "GB": 1e9, "billion": 1e9}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "times": 1}
WORDS = dict(zip("two three four five six seven eight nine ten".split(), range(2, 11), strict=True))
WORDS |= {"twice": 2, "twelve": 12}
SHARES = {"half": 1 / 2, "third": 1 / 3, "quarter": 1 / 4}
RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def numbers(words):
    """(value, half of its last digit) of every number in a sentence, in every unit it names."""
    words = re.sub(r"(?<=\d)[ \u202f\u00a0,](?=\d{3}(?!\d))", "", words)
    scales = {1, *(scale for unit, scale in UNITS.items() if unit in words)}
    for whole, part in re.findall(r"(?<![\w.])(\d+)(?:\.(\d+))?", words):
        for scale in scales:
            rounded = bool(part) or scale != 1 or len(whole) > 2
            yield float(f"{whole}.{part or 0}") * scale, 0.5 * 10 ** -len(part) * scale * rounded
    for base, power in re.findall(
        r"\b(\d+)(?:\^\{?)?(-?\d+)\b", re.sub("[⁻⁰-⁹¹²³]+", _power, words)
    ):
        yield float(base) ** int(power), 0
    for word, value in WORDS.items():
        if re.search(rf"\b{word}\b", words, re.IGNORECASE):
            yield from (
                (value * scale, 0.5 * (scale > 1) * scale) for scale in scales if scale >= 1
            )
    yield from ((share, 0.005) for word, share in SHARES.items() if word in words)


def _power(raised):
    return "^" + raised[0].translate(RAISED)


def stated(expression):
    """The numbers and texts on the right side of a claim; what the library says there is none."""
    compared = ast.parse(expression, mode="eval").body
    sides = compared.comparators if isinstance(compared, ast.Compare) else []
    for node in itertools.chain(*map(_leaves, sides)):
        with contextlib.suppress(NameError):
            value = eval(compile(ast.Expression(node), "", "eval"), {})
            literals = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield value, () if isinstance(node, ast.Constant) else literals


def _leaves(node):
    """The elements of a list, tuple or set, those of its elements, and so on; factors of a call."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return itertools.chain(*map(_leaves, node.elts))
    named = any(isinstance(each, ast.Name | ast.Attribute) for each in ast.walk(node))
    if named and isinstance(node, ast.BinOp):
        return itertools.chain(_leaves(node.left), _leaves(node.right))
    return [] if named else [node]


def says(words, value):
    """Whether a sentence says a value: a number as written, rounded, in a unit; or a text."""
    if isinstance(value, str):
        return value.replace("\u202f", " ") in words
    near = ((number, slack) for number, slack in numbers(words))
    return any(abs(value - number) <= slack + 1e-9 * abs(value) for number, slack in near)


@pytest.mark.parametrize("kind, expression, words", TAKEAWAYS)
def test_a_takeaway_says_what_its_claim_says(kind, expression, words):
    if not re.search(r"\d", words):
        return
    for value, literals in stated(expression):
        plain = isinstance(value, str | int | float) and value not in (0, 1, True, False)
        parts = [part for part in literals if isinstance(part, int | float) and part > 2]
        assert not plain or says(words, value) or any(says(words, part) for part in parts), (
            f"{value} is claimed, and not said in: {words}"
        )


def test_words_that_part_from_their_claim_are_seen():
    said = "At most 0.05 % in fp16, 65 504 and $2^{-25}$, 67 MB, four million, 3 × 10⁶, a third."
    for value in (2**-11, 65504, 2**-25, 67_108_864, 4_194_304, 0.332, 3):
        assert says(said, value), value
    for value in (2**-8, 65505, 2**-24, 66_000_000, 5_000_000, 0.5, 12):
        assert not says(said, value), value
    assert [value for value, _ in stated("x == [(1, 2**-3), 4]")] == [1, 0.125, 4]
    assert [value for value, _ in stated("zero.a(1) == 4.5 * zero.b(2)")] == [4.5]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_lab_has_takeaways_with_claims(path):
    assert any(param.id.startswith(path.stem) for param in TAKEAWAYS)
