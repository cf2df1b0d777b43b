"""The cheat sheet: the formulas that docstrings state, as TeX.

A docstring states one by an example, `value == formula  # which case`, over letters of the notation
and words. Its doctest evaluates it, so what stands on the sheet is what the library computes.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from typing import NamedTuple

import labutils

ORDER = (
    "anatomy floats memory predict checkpointing accumulation flash collectives zero "
    "expert_parallel schedule lora quantization scaling"
).split()
STATED = re.compile(r"^(?P<value>.+?) == (?P<formula>.+?)  # (?P<case>.+)$")
WORDS = {"λ": r"\lambda", "Ψ": r"\Psi", "α": r"\alpha", "bw": r"\mathrm{bw}"}
CALLS = {"sqrt": r"\sqrt{%s}", "ceil": r"\lceil %s \rceil", "log2": r"\log_2 %s"}
CALLS |= {name: rf"\{name}(%s)" for name in ("min", "max")}
ATOM, POWER, PRODUCT, SUM = range(4)  # what binds tightest comes first


class Stated(NamedTuple):
    """A formula of a docstring, and the case in which it holds."""

    case: str
    formula: str


class Source(NamedTuple):
    """A docstring that states formulas, and the name by which a user finds its function."""

    name: str
    test: doctest.DocTest

    @property
    def formulas(self) -> list[Stated]:
        found = (STATED.match(each.source.strip()) for each in self.test.examples)
        return [Stated(match["case"], match["formula"]) for match in found if match]


def sources() -> list[Source]:
    """The docstrings that state formulas, topic by topic."""
    found = []
    for info in pkgutil.walk_packages(labutils.__path__, "labutils."):
        if not info.name.startswith("labutils.teach") and "__main__" not in info.name:
            module, topic = importlib.import_module(info.name), info.name.split(".")[1]
            for test in doctest.DocTestFinder().find(module):
                inside = test.name.removeprefix(f"{info.name}.")
                found.append(Source(f"{topic}.{inside}", test))
    found = [each for each in found if each.formulas]
    unplaced = {topic_of(each) for each in found} - set(ORDER)
    if unplaced:
        raise ValueError(f"the cheat sheet has no place for {', '.join(unplaced)}: see ORDER")
    return sorted(found, key=lambda each: ORDER.index(topic_of(each)))


def topic_of(source: Source) -> str:
    return source.name.partition(".")[0]


def markdown() -> str:
    """The sheet: for each function its first sentence and its formulas."""
    page = []
    for source in sources():
        rows = (f"| {case} | ${tex(formula)}$ |" for case, formula in source.formulas)
        said = first_sentence(source.test.docstring)
        page += ["", f"**`{source.name}`** {said}", "", "| | |", "|---|---|", *rows]
    return "\n".join(page)


def first_sentence(docstring: str) -> str:
    """Up to its first full stop, or a colon that ends a line."""
    sentence = re.split(r"(?<=\.)\s|:\n|\n\n", inspect.cleandoc(docstring))[0]
    return " ".join(sentence.split()).rstrip(".") + "."


def tex(formula: str) -> str:
    """A Python expression as TeX."""
    return _tex(ast.parse(formula, mode="eval").body)[0]


def _tex(node: ast.expr) -> tuple[str, int]:
    """TeX, and how tightly it binds."""
    match node:
        case ast.Constant(value):
            return f"{value:g}", ATOM
        case ast.Name(name):
            return _letter(name), ATOM
        case ast.Call(ast.Name(name), arguments):
            return CALLS[name] % ", ".join(_tex(each)[0] for each in arguments), ATOM
        case ast.UnaryOp(ast.USub(), operand):
            return f"-{_within(operand, PRODUCT)}", SUM
        case ast.BinOp(left, ast.Div(), right):
            return rf"\frac{{{_tex(left)[0]}}}{{{_tex(right)[0]}}}", POWER
        case ast.BinOp(left, ast.Pow(), right):
            return f"{_within(left, ATOM)}^{{{_tex(right)[0]}}}", POWER
        case ast.BinOp(left, ast.Mult(), right):
            then = _within(right, PRODUCT)
            sign = r" \cdot " if re.match(r"\d|\\text", then) else r"\,"
            return _within(left, PRODUCT) + sign + then, PRODUCT
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
            minus = isinstance(sign, ast.Sub)
            then = _within(right, PRODUCT if minus else SUM)
            return f"{_tex(left)[0]} {'-' if minus else '+'} {then}", SUM
    raise ValueError(f"no TeX for {ast.unparse(node)}: write it with + - * / ** and {list(CALLS)}")


def _within(node: ast.expr, loosest: int) -> str:
    text, binds = _tex(node)
    return text if binds <= loosest else f"({text})"


def _letter(name: str) -> str:
    """A letter, with its subscript; or words."""
    letter, _, below = name.partition("_")
    if name in WORDS or len(letter) == 1:
        letter = WORDS.get(name) or WORDS.get(letter, letter)
        return f"{letter}_{below}" if below and name not in WORDS else letter
    return rf"\text{{{name.replace('_', ' ')}}}"
