"""The API reference: what the docstrings of public names say, and the labs that use each name."""

import ast
import functools
import importlib
import inspect
import itertools
import pathlib
import re

from docutils.nodes import make_id

LABS = pathlib.Path(__file__).resolve().parents[1] / "notebooks" / "text"
# The pages, by the parts of the course, and the modules of labutils on each.
PAGES = {
    "api_ground": "units config anatomy ledger timeline trace clock model measure gradients "
    "randomness world step predict huggingface",
    "api_one_device": "floats precision memory checkpointing accumulation flash",
    "api_many_devices": "collectives data_parallel zero tensor_parallel context_parallel "
    "expert_parallel schedule pipeline",
    "api_adapt": "lora quantization scaling planner",
    "api_teach": "check progress grade widgets plots editor calculator",
}
TEACH = PAGES["api_teach"].split()
MODULES = {module: page for page, modules in PAGES.items() for module in modules.split()}
TOPICS = {"schedule": "13a_pipelines"}  # labs of modules that none is called after
SENTENCE = re.compile(r"(Raises|Source|Cost|Invariant|Memory)\b")
AS_IT_IS = re.compile(r"(`[^`]+`|(?<!\w)\*\w[^*`]*\w\*)")  # code, and what is stressed
PROPERTIES = property, functools.cached_property
CAPITALS = re.compile(r"[A-Z][A-Z0-9_]*")
MARKUP = re.compile(r"([\\*_{}\[\]<>$#|~])")


@functools.cache
def loaded(module):
    """A module of the course by its short name."""
    return importlib.import_module(f"labutils.{'teach.' * (module in TEACH)}{module}")


@functools.cache
def public(module):
    """The functions and classes that a module offers, by their names."""
    home = loaded(module).__name__
    return {
        name: value
        for name, value in vars(loaded(module)).items()
        if name[0] != "_"
        and callable(value)
        and f"{getattr(value, '__module__', '')}.".startswith(f"{home}.")
        and hasattr(value, "__name__")
    }


def members(value):
    """The public methods and properties of a class that say what they are."""
    if not inspect.isclass(value):
        return {}
    return {
        name: each
        for name, each in vars(value).items()
        if name[0] != "_" and not inspect.isclass(each) and _described(each)
    }


def _described(member):
    kinds = (*PROPERTIES, classmethod, staticmethod)
    return (inspect.isroutine(member) or isinstance(member, kinds)) and inspect.getdoc(member)


@functools.cache
def constants(module):
    """What a module names in capitals: {name: (its value as it is written, what is said)}."""
    home = pathlib.Path(inspect.getfile(loaded(module)))
    found = {}
    for path in sorted(home.parent.glob("*.py")) if home.name == "__init__.py" else [home]:
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body
        for node, after in itertools.zip_longest(body, body[1:]):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                found |= dict.fromkeys(_assigned(node), _comment(node, after, text.splitlines()))
    held = vars(loaded(module))
    return {
        name: (_shown(node, held[name]), said)
        for (name, node), said in found.items()
        if CAPITALS.fullmatch(name) and name in held
    }


def _assigned(node):
    """The names of an assignment, each with what it is."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    pairs = [(target, node.value)]
    if isinstance(target, ast.Tuple):
        pairs = zip(target.elts, getattr(node.value, "elts", [node.value] * 9), strict=False)
    return [(ast.unparse(name), value) for name, value in pairs]


def _shown(node, value):
    """A value as the source has it, if that is short; else its kind, and the keys of a dict."""
    text = ast.unparse(node)
    keys = f" of {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
    return text if len(text) <= 120 else f"{type(value).__name__}{keys}"


def _comment(node, after, lines):
    """The text below an assignment, or the comment behind its first line, or those above it."""
    if isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str):
        return " ".join(after.value.value.split())
    above = reversed(lines[: node.lineno - 1])
    above = [line[2:] for line in itertools.takewhile(lambda line: line[:2] == "# ", above)][::-1]
    text = lines[node.lineno - 1].partition("  # ")[2].replace("fmt: skip", "") or " ".join(above)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def is_error(value):
    """Whether it is an exception, which nobody calls."""
    return inspect.isclass(value) and issubclass(value, BaseException)


@functools.cache
def known():
    """All full names of the reference, such as `zero.shard` and `world.World.run`."""
    found = {f"{m}.{name}" for m in MODULES for name in (*public(m), *constants(m))}
    for module in MODULES:
        for name, value in public(module).items():
            found |= {f"{module}.{name}.{member}" for member in members(value)}
    return found


# What a docstring says, as Markdown.


def signature(value):
    """How a function is called, with short names of types; nothing for a property."""
    value = getattr(value, "__func__", value)
    if isinstance(value, PROPERTIES) or is_error(value) or getattr(value, "_is_protocol", False):
        return ""
    given = []
    try:
        found = inspect.signature(value, eval_str=True)
    except NameError:  # a type that only the type checker imports
        found = inspect.signature(value)
    for each in found.parameters.values():
        if each.name not in ("self", "cls"):
            given.append(each.replace(annotation=typed(each.annotation), default=default(each)))
    returned = inspect.Signature.empty if inspect.isclass(value) else found.return_annotation
    return str(inspect.Signature(given, return_annotation=typed(returned)))


class Written(str):
    """A text that a signature shows as it is."""

    __repr__ = str.__str__


def typed(annotation):
    """A type as a reader writes it: `ledger.Ledger`, not `labutils.ledger.Ledger`."""
    if annotation is inspect.Parameter.empty:
        return annotation
    plain = isinstance(annotation, str)
    text = annotation if plain else inspect.formatannotation(annotation)
    ours = re.sub(r"\blabutils\.(?:teach\.)?(\w+\.)(?:\w+\.)*(?=\w)", r"\1", text)
    theirs = r"\b(?:(?:typing|jaxtyping)\.|[a-z_]\w*\.(?:[a-z_]\w*\.)+)(?=_?[A-Z])"
    return Written(re.sub(theirs, "", ours))


def default(parameter):
    """A default: a function or a class by its name, another value as Python prints it, if short."""
    value = parameter.default
    if value is inspect.Parameter.empty:
        return value
    text = getattr(value, "__name__", repr(value))
    return Written(text if len(text) <= 60 else "...")


def prose(value, full):
    """The docstring of the name `full` as Markdown: arguments as definitions, names as links."""
    blocks = re.split(r"\n\s*\n", inspect.getdoc(value))
    names = parameters(value)
    return "\n\n".join(_block(block.split("\n"), full, names) for block in blocks)


def parameters(value):
    """What a docstring calls by a name of its own: arguments, and what an object holds."""
    value = getattr(value, "__func__", value)
    if inspect.ismodule(value) or isinstance(value, PROPERTIES):
        return set()
    made = getattr(inspect.unwrap(value.__init__), "__code__", None)
    held = made.co_names if made else ()
    return set() if is_error(value) else {*held, *inspect.signature(value).parameters}


def _block(lines, full, names):
    """A block of a docstring that no empty line interrupts."""
    if lines[0].startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if all(line.startswith("    ") for line in lines):
        return "\n".join(["```text", *(line[4:] for line in lines), "```"])
    items = []
    for line in lines:
        argument = re.match(r"(\w+(?:, \w+)*)(?:: +|  +)(?=\S)", line)
        if argument and set(argument[1].split(", ")) <= names:
            items.append((f"`{argument[1]}`\n: ", [line[argument.end() :]]))
        elif line.startswith("- "):
            items.append(("- ", [line[2:]]))
        elif not items or (line[0] != " " and (items[-1][0] or SENTENCE.match(line))):
            items.append(("", [line]))
        else:
            items[-1][1].append(line.strip())
    return "\n\n".join(start + linked(" ".join(said), full, names) for start, said in items)


def linked(text, full, names=frozenset()):
    """A sentence as Markdown, in which names of the reference are links, its own `names` not."""
    pieces = AS_IT_IS.split(text)
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            pieces[place] = MARKUP.sub(r"\\\1", piece)
        elif (name := piece.strip("`")) not in names and (target := resolved(name, full)):
            pieces[place] = f"{{py:obj}}`{name} <{target}>`" if target != full else piece
    return "".join(pieces)


def resolved(name, full):
    """The full name that `name` means in the docstring of `full`, or None."""
    inside = full.split(".")
    outer = [".".join([*inside[:length], name]) for length in range(len(inside), -1, -1)]
    return next((each for each in outer if each in known()), None)


# The labs that use a name, by section.


@functools.cache
def uses():
    """{full name: {lab: the section where the lab uses it first}}, from cells and from prose."""
    found = {}
    for lab in sorted(LABS.glob("*.py")):
        aliases, section = {}, ""
        for cell in re.split(r"^# %%", lab.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if cell.startswith(" [markdown]"):
                headings = re.findall(r"^# ##+ (.+)$", cell, re.MULTILINE)
                section = headings[-1] if headings else section
                names = set(re.findall(r"`(\w+(?:\.\w+)+)\b", cell))
            else:
                names = used(ast.parse(cell.partition("\n")[2]), aliases)
            for name in names & known():
                found.setdefault(name, {}).setdefault(lab.stem, section)
    return found


def used(tree, aliases):
    """The full names that a cell uses; what it imports comes into `aliases`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("labutils."):
            inside = [part for part in node.module.split(".")[1:2] if part != "teach"]
            inside = inside or [part for part in node.module.split(".")[2:3]]
            for each in node.names:
                aliases[each.asname or each.name] = ".".join([*inside, each.name])
    for node in ast.walk(tree):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in aliases:
            names.add(".".join([aliases[node.id], *chain]))
    return names


@functools.cache
def lab_of(module):
    """The stem of the lab that is called after a module, or None."""
    singular = module.rstrip("s")
    for path in sorted(LABS.glob("*.py")):
        topic = path.stem.partition("_")[2]
        if singular in {word.rstrip("s") for word in (topic, *topic.split("_"))}:
            return path.stem
    return TOPICS.get(module)


def title(lab):
    """The first heading of a lab."""
    return re.search(r"^# # (.+)$", (LABS / f"{lab}.py").read_text(encoding="utf-8"), re.M)[1]


def in_labs(full):
    """Links to the sections that use a name, that of its own lab first and by its title."""
    where, own = uses().get(full, {}), lab_of(full.partition(".")[0])
    links = []
    for lab in sorted(where, key=lambda lab: (lab != own, lab)):
        text = where[lab] if not links else lab.partition("_")[0]
        if not links:
            text = f"{lab.partition('_')[0]} · {text}"
        links.append(f'<a href="../notebooks/{lab}.html#{make_id(where[lab])}">{text}</a>')
    return f"Labs: {', '.join(links)}" if links else ""


def markdown(module):
    """One module of the reference."""
    lab = lab_of(module)
    page = [f"## {module}", "", prose(loaded(module), module), ""]
    page += [f"Lab: {{doc}}`{title(lab)} <../notebooks/{lab}>`", ""] if lab else []
    for name, value in public(module).items():
        full = f"{module}.{name}"
        kind = "exception" if is_error(value) else "class" if inspect.isclass(value) else "function"
        page += [f"`````{{py:{kind}}} {full}{signature(value)}", "", prose(value, full), ""]
        page += [in_labs(full), ""]
        for each, member in members(value).items():
            page += [*_member(each, member, full), ""]
        page += ["`````", ""]
    for name, (value, said) in constants(module).items():
        full = f"{module}.{name}"
        page += [f"````{{py:data}} {full}", f":value: {value}", "", linked(said, full), ""]
        page += [in_labs(full), "````", ""]
    return "\n".join(page)


def _member(name, member, full):
    said, options = prose(member, f"{full}.{name}"), []
    if isinstance(member, PROPERTIES):
        return [f"````{{py:property}} {name}", "", said, "````"]
    if isinstance(member, (classmethod, staticmethod)):
        options = [f":{type(member).__name__}:"]
    return [f"````{{py:method}} {name}{signature(member)}", *options, "", said, "````"]


def overview():
    """All modules, what each is for, and where it stands."""
    rows = []
    for module, page in MODULES.items():
        first = inspect.getdoc(loaded(module)).partition("\n\n")[0].replace("\n", " ")
        link = f'<a href="{page}.html#{make_id(module)}">{module}</a>'
        rows.append(f"- {link}: {linked(first, module)}")
    return "\n".join(rows)


def of_lab(lab):
    """The names of the reference that a lab uses, module by module."""
    lines = ["## In the API reference", ""]
    for module in MODULES:
        names = [full for full in uses() if full.startswith(f"{module}.") and lab in uses()[full]]
        lines += [f"- {', '.join(f'{{py:obj}}`{name}`' for name in sorted(names))}"] * bool(names)
    return "\n".join(lines)
