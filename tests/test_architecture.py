"""The plan of the house, checked on the source: layers, names, sizes, and no code twice."""

import ast
import collections
import functools
import itertools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "labutils"

# Lower layers know nothing of higher ones. A module that is not named here is a topic: it may use
# layers 0 to 2.
LAYERS = {
    0: {"units", "notation"},
    1: {"floats", "config", "anatomy", "ledger", "trace", "timeline", "clock", "schedule"},
    2: {"collectives", "world", "model", "measure", "randomness", "gradients"},
    3.5: {"step"},  # a training step is put together of all topics
    3.7: {"predict"},  # and foreseen
    4: {"plots"},
    5: {"widgets"},
    6: {"rigs"},
    7: {"exercises", "check", "progress", "calculator", "editor"},
    8: {"grade"},
}
TOPIC = 3
REACH = {
    0: set(),
    1: {0},
    2: {0, 1},
    TOPIC: {0, 1, 2},
    3.5: {0, 1, 2, TOPIC},
    3.7: {0, 1, 2, TOPIC, 3.5},
    4: {0, 1},
    5: {0, 1, 4},
    6: {0, 1, 2, TOPIC, 3.5, 3.7},
    7: {0, 1, 2, TOPIC, 3.5, 3.7, 4, 5, 6},
    8: {0, 1, 2, TOPIC, 3.5, 3.7, 4, 5, 6, 7},
}
# The few steps sideways.
SIDEWAYS = {
    # A Comm's collectives are those of lab 07, so that every byte they send is counted.
    ("world", "collectives"),
    # What a rank draws is its own: its program runs with its random numbers, and dropout asks there.
    ("world", "randomness"),
    ("model", "randomness"),
    # What is computed again sees the autocast region of the first time.
    ("checkpointing", "precision"),
    # Levels 1 and 2 reduce in the buckets of data parallelism.
    ("zero", "data_parallel"),
    # Ring attention merges what flash attention gives for blocks of keys.
    ("context_parallel", "flash"),
    # What memory predicts is a step, recorded; on one device it accumulates as lab 05 does.
    ("memory", "step"),
    ("memory", "accumulation"),
    # What is kept beside frozen weights depends on which layers have adapters.
    ("memory", "lora"),
    # QLoRA's frozen weights; the adapter of a split layer is split as the layer is.
    ("lora", "quantization"),
    ("lora", "tensor_parallel"),
    # What no region sees, since it is inside an autograd function, is cast as a region casts.
    ("flash", "precision"),
    ("context_parallel", "precision"),
    ("tensor_parallel", "precision"),
    # The scales of a layer that ranks share out are those of the whole one.
    ("quantization", "tensor_parallel"),
    # An element of MXFP4 or NVFP4 is rounded as any number to a format.
    ("quantization", "precision"),
    # A step knows the hooks of a replica around its stages.
    ("pipeline", "data_parallel"),
    # The proof of a plan is a dry run of its step, and its small copy on real ranks.
    ("planner", "predict"),
    ("check", "exercises"),
    ("check", "progress"),
    ("progress", "exercises"),
    ("config", "anatomy"),  # a model counts its parameters in its table
    ("trace", "ledger"),  # what was sent, as amounts
    ("trace", "config"),  # what it takes on a link
    ("timeline", "ledger"),  # what was alive, as amounts
    ("clock", "timeline"),  # when tasks run
    ("schedule", "clock"),
    ("schedule", "timeline"),
    ("schedule", "config"),  # what a message takes on a link
}
# Layers without numpy and torch: they load in milliseconds and run in a browser.
STANDARD_ONLY = {0, 1}
NO_TORCH = {"memory", "planner", "predict", "scaling", "plots", "widgets", "editor"}
# The files of them that run: to record a step, loaded where a kind of step is new; and on the ranks
# whose gradients tell the noise scale, loaded by name alone.
RUNS_A_STEP = {
    PACKAGE / at for at in ("memory/recording.py", "predict/rehearsal.py", "scaling/ranks.py")
}


def module(path):
    """The module that a file belongs to; a folder is one module, `teach` is a folder of modules."""
    return next(part for part in path.relative_to(PACKAGE).parts if part != "teach").removesuffix(
        ".py"
    )


OUTSIDE = {PACKAGE / "__init__.py", PACKAGE / "teach" / "__init__.py"}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path not in OUTSIDE)
MODULES = sorted({module(path) for path in SOURCES})
each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE))
)


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def layer(name):
    return next((number for number, names in LAYERS.items() if name in names), TOPIC)


def imports(path):
    """The dotted names that a file imports anywhere: at the top, inside functions, for the type checker."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write the absolute import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each_source
def test_imports_go_down(path):
    mine = module(path)
    for name in imports(path):
        first, _, rest = name.partition(".")
        assert first not in {"notebooks", "tests", "tools", "book", "benchmarks"}, (
            f"{mine} imports {name}"
        )
        theirs = rest.removeprefix("teach.").partition(".")[0]
        if first == "labutils" and theirs in MODULES and theirs != mine:
            allowed = layer(theirs) in REACH[layer(mine)] or (mine, theirs) in SIDEWAYS
            assert allowed, f"{mine} (layer {layer(mine)}) imports {theirs} (layer {layer(theirs)})"
        if layer(mine) in STANDARD_ONLY:
            assert first in {*sys.stdlib_module_names, "labutils"}, f"{mine} imports {name}"
        if mine in NO_TORCH and path not in RUNS_A_STEP:
            assert first != "torch", f"{mine} imports {name}"


def test_light_modules_load_without_torch():
    light = [name for name in MODULES if layer(name) in STANDARD_ONLY]
    lighter_than_torch = [
        "teach." * (layer(name) >= 4) + name for name in MODULES if name in NO_TORCH
    ]
    program = f"""
import importlib, sys
for name in {light}: importlib.import_module("labutils." + name)
assert not {{"numpy", "torch"}} & set(sys.modules), "numpy or torch"
for name in {lighter_than_torch}: importlib.import_module("labutils." + name)
assert "torch" not in sys.modules, "torch"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_its_tests(name):
    assert (ROOT / "tests" / f"test_{name}.py").exists()


@each_source
def test_what_is_public_says_what_it_is(path):
    assert ast.get_docstring(tree(path)), "a module begins with its purpose"
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            first = (ast.get_docstring(node) or "").partition("\n\n")[0]
            assert first.endswith((".", ":", "?")), (
                f"{node.name}: a docstring begins with a sentence, got {first!r}"
            )


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
)
def test_one_concept_has_one_name(name):
    number, *words = name.split("_")
    # A module, or a file of a topic: quantization/fp8.py.
    concepts = {word.removesuffix("s") for word in (*words, "_".join(words))} & {
        known.removesuffix("s") for known in (*MODULES, *(path.stem for path in SOURCES))
    }
    assert number[:2].isdigit() and (concepts or number == "00"), (
        f"no module of labutils is called after the lab {name}"
    )


# They mean the same everywhere: what a person chooses, the ranks, and a tensor that comes in.
EVERYWHERE = {"model", "train", "mesh", "comm", "x", "q", "k", "v", "p"}


def untold(body):
    """Arguments, of more than three, and errors of public functions that a docstring leaves out."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            yield from untold(node.body)
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            told = re.sub(r"(?m)^ *(>>>|\.\.\.).*$", "", ast.get_docstring(node) or "")
            given = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            given -= {"self", "cls"}
            silent = given - EVERYWHERE - {*re.findall(r"\w+", told)}
            if len(given) > 3 and silent and ast.unparse(node.body[-1]) != "...":
                yield node.name, *sorted(silent)
            raised = any(isinstance(each, ast.Raise) and each.exc for each in ast.walk(node))
            if raised and not re.search(r"Raises|Error|error|[Rr]efuse", told):
                yield node.name, "Raises"


@each_source
def test_a_docstring_names_arguments_and_errors(path):
    if layer(module(path)) <= 3.7:
        assert not list(untold(tree(path).body))


def test_what_a_docstring_leaves_out_is_seen():
    cut = "def cut(a, b, c, d):\n    'a, b and d'\n    raise ValueError('c')"
    assert list(untold(ast.parse(cut).body)) == [("cut", "c"), ("cut", "Raises")]


# Public names that stand in several modules. One question, asked of a formula, of a dry run, of a run:
# `measure.history` finds what `memory.history` predicts.
ONE_QUESTION = {"activations", "history", "model_states", "peak", "sent"}
# One deed, done to what the topic has: a schedule, or a plan of recomputing, is carried out; a loss
# is taken of logits that are whole, split, or of few bits, by torch's name.
ONE_DEED = {"cross_entropy", "run"}


def homes_of_names():
    found = collections.defaultdict(list)
    for path in SOURCES:
        if module(path) != "exercises":
            for node in tree(path).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                    found[node.name].append(str(path.relative_to(PACKAGE)))
    return {name: places for name, places in found.items() if len(places) > 1}


def test_one_public_name_has_one_meaning():
    assert homes_of_names().keys() == ONE_QUESTION | ONE_DEED


def constants(node):
    """The public constants that a statement of a module sets, with the text of their values."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        names, values = [target], [node.value]
        if isinstance(target, ast.Tuple):
            names = target.elts
            values = (
                node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
            )
        for name, value in zip(map(ast.unparse, names), map(ast.unparse, values), strict=True):
            if name.isupper() and name[0] != "_":
                yield name, value


def test_one_public_constant_has_one_value():
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in SOURCES:
        if module(path) != "exercises":
            for name, value in itertools.chain(*map(constants, tree(path).body)):
                found[name][value].append(str(path.relative_to(PACKAGE)))
    assert not [name for name, values in found.items() if len(values) > 1]


# What a run writes down as it goes; two tasks, calls or blocks alike are not one.
WRITTEN_DOWN = {"Task", "CallSite", "Request", "Outcome", "Life", "_Block", "_Submission"}


def test_what_a_person_chooses_or_a_formula_says_is_frozen():
    thawed = set()
    for node in itertools.chain(*(ast.walk(tree(path)) for path in SOURCES)):
        for how in map(ast.unparse, getattr(node, "decorator_list", [])):
            if how.startswith("dataclass") and "frozen=True" not in how:
                thawed.add(node.name)
    assert thawed == WRITTEN_DOWN


# What PyTorch's and Python's errors say has no name to ask for; our own have `units.Reason.name`.
WORDS_OF_OTHERS = {"does not require grad", "hooks should return None", "NoneType", "shape", "size"}


def decided_by_prose(source):
    """Comparisons with the words of an error, or with the sentence that a reader is told."""
    for node in ast.walk(source):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".startswith", ".get")):
            sides = [getattr(node.func, "value", node), *node.args]
        asked = r".*\.(what|note)|str\((error|failure)\)"
        said = [side for side in sides if re.fullmatch(asked, ast.unparse(side))]
        words = {getattr(side, "value", None) for side in sides} - {None}
        if said and len(sides) > 1 and not words & WORDS_OF_OTHERS:
            yield f"{node.lineno}: {ast.unparse(node)}"


@each_source
def test_nothing_is_decided_by_prose(path):
    assert not list(decided_by_prose(tree(path)))


@pytest.mark.parametrize(
    "mistake",
    [
        "'is held' in str(error)",
        "words in str(error)",
        "tensor.what == 'keys'",
        "line.note.startswith('input')",
        "_SHORT.get(tensor.what, part)",
    ],
)
def test_what_is_decided_by_prose_is_seen(mistake):
    assert list(decided_by_prose(ast.parse(mistake)))


@each_source
def test_a_function_fits_a_screen(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            said = node.body[0] if ast.get_docstring(node) else None
            code = lines - (said.end_lineno - said.lineno + 1 if said else 0)
            assert lines <= 60 and code <= 50, f"{node.name}: {lines} lines, {code} of them code"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks" / "text").glob("*.py")), ids=lambda path: path.stem
)
def test_a_cell_fits_the_page(path):
    for cell in path.read_text(encoding="utf-8").split("\n# %%")[1:]:
        heading, *lines = cell.split("\n")
        if "[markdown]" not in heading:
            wide = [line for line in lines if len(line) > 88]
            assert not wide, f"{path.stem}: over 88 columns: {wide}"


def test_figures_take_types_of_the_ground_or_plain_values():
    for path in SOURCES:
        if module(path) == "plots":
            assert "typing.Protocol" not in set(imports(path)), f"{path.name}: no shadow types"


def functions(path):
    """(shape, place) of every function of some size: its code without docstring and name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if sum(1 for statement in body for _ in ast.walk(statement)) > 60:
                yield (
                    "".join(map(ast.dump, body)),
                    f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
                )


def test_no_code_lives_twice():
    found = collections.defaultdict(list)
    for folder in (
        "labutils",
        "examples",
        "tools",
        "book",
        "benchmarks",
        "notebooks/text",
        "tests",
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_build" not in path.parts:
                for shape, place in functions(path):
                    found[shape].append(place)
    # A bug hunt stands in its lab, to be repaired, and among the wrong answers, to be rejected.
    hunted = {
        ("labutils/teach/exercises", "notebooks/text"),
        ("notebooks/text", "tests/wrong_answers"),
    }
    twice = [places for places in found.values() if len(places) > 1]
    assert not [
        places
        for places in twice
        if tuple(str(pathlib.Path(place).parent) for place in places) not in hunted
    ]


def test_the_linter_is_content():
    finished = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
