"""Every number that the course states is recomputed: the rows of data/, and the claims behind the takeaways of the labs."""

import csv
import importlib
import json
import math
import pkgutil
import re

import numpy as np
import pytest

import labutils
from labutils import config, teach

DATA, NOTEBOOKS = config.DATA, sorted((config.DATA.parent / "notebooks").glob("*.ipynb"))
MODULES = {
    info.name.rpartition(".")[2]: info.name
    for folder in (labutils, teach)
    for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
}


class Names(dict):
    """What an expression of data/ may name: the modules of labutils, torch, np and math; each is imported when it is first named."""

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
    "model-state memory",
    "activation accounting",
    "Qwen2 table",
    "memory planning",
}


@pytest.mark.parametrize("row", CHECKED)
def test_a_row_is_recomputed(row):
    assert evaluate(row["check"]) is True or evaluate(row["check"]) == np.True_, (
        f"{row['id']}: {row['check']}"
    )


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


CLAIM = re.compile(r"<!-- claim: (.+?) -->", re.DOTALL)
TAKEAWAYS = [
    pytest.param(claim, id=f"{path.stem}-{number}")
    for path in NOTEBOOKS
    for number, claim in enumerate(
        CLAIM.findall(
            "\n".join(
                "".join(cell["source"])
                for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
            )
        ),
        1,
    )
]


@pytest.mark.parametrize("claim", TAKEAWAYS)
def test_a_takeaway_is_recomputed(claim):
    assert evaluate(claim) is True


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_lab_has_takeaways_with_claims(path):
    assert any(param.id.startswith(path.stem) for param in TAKEAWAYS)
