"""The cheat sheet: it says what the library computes, also at other sizes, in letters that the notation has."""

import ast
import contextlib
import doctest
import importlib.util
import pathlib
import re

import pytest

from labutils import notation

PATH = pathlib.Path(__file__).resolve().parents[1] / "book" / "formulas.py"
SPEC = importlib.util.spec_from_file_location("formulas", PATH)
formulas = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(formulas)

SOURCES = formulas.sources()
LETTERS = {letter for group in notation.TABLE.values() for letter in group}
OTHERS = {"gpt2-xl": "gpt2", "gpt2": "gpt2-xl", "llama-3.1-8b": "llama-3.1-70b"}
MODEL = re.compile(rf'"({"|".join(OTHERS)})"')


def chosen(example):
    """The names to which an example gives a number, with it: `N, (s, h) = 4, letters` has N alone."""
    (statement,) = ast.parse(example.source).body
    if isinstance(statement, ast.Assign):
        (target,), value = statement.targets, statement.value
        several = isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]
        for name, given in pairs:
            if not any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(given)):
                yield name.id, eval(ast.unparse(given))


def evaluated(source, model=str, **changed):
    """Whether each formula of a docstring holds, with other models and numbers; what is refused says nothing."""
    known = dict(source.test.globs)
    for example in source.test.examples:
        text, refused = model(example.source), (ValueError, OverflowError)
        if formulas.STATED.match(text.strip()):
            with contextlib.suppress(*refused):
                yield eval(text, known)
        elif example.want == "":
            try:
                exec(text, known)
            except refused:
                return
        known |= {name: changed[name] for name, _ in chosen(example) if name in changed}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_formula_holds_at_other_sizes(source):
    names = {name: value for each in source.test.examples for name, value in chosen(each)}
    varied = [{name: 2 * value} for name, value in names.items()]
    varied += [{name: value // 2} for name, value in names.items() if value > 1]
    held = [list(evaluated(source, **change)) for change in [{}, *varied]]
    if any(MODEL.search(each.source) for each in source.test.examples):
        other = lambda text: MODEL.sub(lambda found: f'"{OTHERS[found[1]]}"', text)  # noqa: E731
        held.append(list(evaluated(source, other)))
        assert len(held[-1]) == len(source.formulas)
    assert len(held[0]) == len(source.formulas) and all(map(all, held))
    assert sum(map(len, held)) >= 2 * len(source.formulas), "other sizes are refused"


def test_letters_are_those_of_the_notation_and_words_are_words():
    for source in SOURCES:
        for case, formula in source.formulas:
            for node in ast.walk(ast.parse(formula)):
                if isinstance(node, ast.Name) and node.id not in formulas.CALLS:
                    written = formulas.tex(node.id)
                    assert written in LETTERS or written.startswith(r"\text{"), (source.name, case)


def test_an_example_that_another_value_contradicts_is_no_formula():
    (source,) = (source for source in SOURCES if source.name == "zero.model_states")
    wrong = doctest.Example(
        "model_states(Ψ, N_d, level=1, K=K).total == 4 * Ψ + 1406250000.0  # x\n", ""
    )
    test = doctest.DocTest([*source.test.examples, wrong], source.test.globs, "", "", 0, "")
    broken = formulas.Source(source.name, test)
    assert all(evaluated(broken)), "it holds at the docstring's own numbers"
    assert not all(evaluated(broken, N_d=128))


@pytest.mark.parametrize(
    "python, tex",
    {
        "2 * (N_d - 1) / N_d * S": r"\frac{2\,(N_d - 1)}{N_d}\,S",
        "a - (b - s) * h**2": r"a - (b - s)\,h^{2}",
        "a - (b + s)": r"a - (b + s)",
        "2 * log2(N) * (λ + S / bw)": r"2\,\log_2 N\,(\lambda + \frac{S}{\mathrm{bw}})",
        "2**-mantissa_bits": r"2^{-\text{mantissa bits}}",
        "min(N_p - i, m) * 64 * 2": r"\min(N_p - i, m) \cdot 64 \cdot 2",
        "(a / b) ** 2 + -(a + b)": r"(\frac{a}{b})^{2} + -(a + b)",
    }.items(),
)
def test_python_becomes_tex(python, tex):
    assert formulas.tex(python) == tex


def test_what_has_no_tex_is_refused():
    with pytest.raises(ValueError, match="no TeX for a // b: write it with"):
        formulas.tex("a // b")


def test_the_sheet_has_every_formula_below_its_function():
    page = formulas.markdown()
    assert page.count("| $") == sum(len(source.formulas) for source in SOURCES) >= 40
    for source in SOURCES:
        assert f"**`{source.name}`**" in page and source.name.partition(".")[0] in formulas.ORDER
