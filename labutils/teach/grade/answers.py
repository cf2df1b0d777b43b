"""A submitted notebook: its code, and the cells that the answer to an exercise needs."""

import ast
import json
import linecache
import os
import re
import stat
import symtable
import types
from collections.abc import Iterator, Sequence
from typing import Any

from labutils.teach import exercises
from labutils.teach.exercises import Card

MOST_BYTES = 10_000_000
"""Of a submitted notebook; the largest lab, with its pictures, has a tenth of it."""
_CALLS = {"check", "hint", "show"}  # statements that decide nothing here
_MAGIC = re.compile(r"^(\s*)([%!].*|\S.*\?\s*)$", re.MULTILINE)
_REACHING = {"builtins", "ctypes", "gc", "importlib", "inspect", "linecache", "multiprocessing"}
_REACHING |= {"os", "pathlib", "shutil", "signal", "socket", "subprocess", "sys"}


class Refused(ValueError):
    """A submission, or an answer in it, that cannot be graded; the text says why."""


def code_cells(path: str | os.PathLike) -> list[str]:
    """The sources of the code cells of a notebook file, in order.

    Raises: Refused where it is no plain file, too large, or no notebook.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        kind = os.fstat(handle)
        if not stat.S_ISREG(kind.st_mode):
            raise Refused("it is no plain file")
        if kind.st_size > MOST_BYTES:
            raise Refused(f"it has {kind.st_size:,} bytes, and {MOST_BYTES:,} are allowed")
        content = file.read(MOST_BYTES + 1)
    if content.startswith(b"PK\3\4"):
        raise Refused("it is no notebook but an archive: unpack it, and grade what is in it")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = f"it is no JSON: {error}" if content.strip() else "the file is empty"
        raise Refused(f"it is no notebook: {why}") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        old = isinstance(document, dict) and "worksheets" in document
        remedy = ", as before format 4: open it in JupyterLab, and save it" * old
        raise Refused(f"it is no notebook: it has no list of cells{remedy}")
    code = [each for each in cells if isinstance(each, dict) and each.get("cell_type") == "code"]
    if not code:
        raise Refused("it has no code cell")
    return [_joined(cell.get("source", "")) for cell in code]


def _joined(source: Any) -> str:
    return "".join(map(str, source)) if isinstance(source, list) else str(source)


def parsed(source: str) -> ast.Module:
    """A cell as Python; magic commands and questions (`%time`, `!ls`, `x?`) do nothing.

    Raises: Refused where it is no Python.
    """
    try:
        try:
            return ast.parse(source)
        except SyntaxError:
            return ast.parse(_MAGIC.sub(r"\1pass", source))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"a cell is no Python: {error}") from None


def what_is_checked(card: Card, cells: Sequence[str]) -> tuple[int, str]:
    """(how many cells stand above the check or in it, the expression that it checks).

    It is the last check of that exercise; without one, the answer's name after all cells.
    """
    for index in reversed(range(len(cells))):
        for node in ast.walk(_tree(cells[index])):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check":
                given = [*node.args, *(key.value for key in node.keywords)]
                if len(given) == 2 and getattr(given[0], "value", None) == card.exercise:
                    return index + 1, ast.unparse(given[1])
    return len(cells), card.answer


def _tree(source: str) -> ast.Module:
    try:
        return parsed(source)
    except Refused:
        return ast.Module([], [])


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _names(source: str) -> tuple[set[str], set[str], set[str]]:
    """The global names that a cell binds, takes from other cells, and changes a part of."""
    tree = _tree(source)
    binds: set[str] = set()
    reads: set[str] = set()
    later: set[str] = set()  # what functions read when they are called
    for statement in tree.body:
        bound, now, when_called = _of_statement(statement)
        reads |= now - binds
        binds |= bound
        later |= when_called
    return binds, reads | later - binds, set(filter(None, map(_changed, ast.walk(tree))))


def _of_statement(statement: ast.stmt) -> tuple[set[str], set[str], set[str]]:
    """The global names that a statement binds, reads, and reads in a function that it defines."""
    bound: set[str] = set()
    now: set[str] = set()
    when_called: set[str] = set()
    function = isinstance(statement, ast.FunctionDef)
    for table in _scopes(symtable.symtable(ast.unparse(statement), "cell", "exec")):
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if top or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
                if symbol.is_referenced():
                    (now if top or not function else when_called).add(symbol.get_name())
    return bound, now, when_called


def _changed(node: ast.AST) -> str | None:
    """The name at the root of `name.x[0] = …`, where the node is such a target."""
    if not isinstance(getattr(node, "ctx", None), ast.Store):
        return None
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(node, ast.Name):
            return node.id
    return None


def needed(cells: Sequence[str], upto: int, expression: str) -> list[int]:
    """The cells before `upto` that give `expression` its value, as far as names tell, in order."""
    binds, reads, changes = zip(*map(_names, cells[:upto]), strict=True)
    chosen: set[int] = set()
    todo = [(name, upto) for name in _names(expression)[1]]
    while todo:
        name, before = todo.pop()
        made = [cell for cell in range(upto) if name in binds[cell]]
        earlier = [cell for cell in made if cell < before]
        touched = [cell for cell in range(upto) if name in changes[cell]]
        for cell in {*made[-1:], *earlier[-1:], *touched} - chosen:
            chosen.add(cell)
            todo += [(read, cell) for read in reads[cell]]
    return sorted(chosen)


def execute(source: str, index: int, space: dict[str, Any]) -> None:
    """Run a cell in the name space, without the checks in it."""
    tree = parsed(source)
    tree.body = [node for node in tree.body if not _is_call(node)]
    path = f"submission/cell_{index + 1}.py"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(tree, path, "exec"), space)


def _is_call(node: ast.stmt) -> bool:
    call = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") in _CALLS


def attempt(card: Card, cells: Sequence[str], whole: bool = False) -> tuple[Any, list[str]]:
    """The submitted answer to an exercise, and what in the cells it needs a teacher may look at.

    whole: run all cells above the check, as a kernel would, and not only those it needs
    Raises: Refused where there is no answer; it says what came in between.
    """
    upto, expression = what_is_checked(card, cells)
    upto, moved = _below(cells, upto, expression)
    used = range(upto) if whole else needed(cells, upto, expression)
    space = vars(types.ModuleType("__main__"))
    failures = []
    for index in used:
        try:
            execute(cells[index], index, space)
        except BaseException as error:
            kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            failures.append(f"cell {index + 1}: {kind}{error}"[:500])
    try:
        value = eval(expression, space)
    except BaseException as error:
        why = failures[0] if failures else f"{type(error).__name__}: {error}"
        raise Refused(f"there is no answer {expression!r}: {why}"[:700]) from None
    own = [cells[index] for index in used if index]  # the first is the lab's setup
    found = [*moved, *_borrowed(card, own, space), *_remarks(card, value, own)]
    return value, list(dict.fromkeys(found))


def _below(cells: Sequence[str], upto: int, expression: str) -> tuple[int, list[str]]:
    """How many cells an answer may need, and a remark on what its check has below it: a function
    that is missing above is taken from there, as from a kernel whose cells ran in another order."""
    reads = _names(expression)[1]
    above = set().union(*(_names(cell)[0] for cell in cells[:upto]))
    for index in reversed(range(upto, len(cells))):
        defines = (ast.FunctionDef, ast.ClassDef)
        made = {each.name for each in _tree(cells[index]).body if isinstance(each, defines)}
        for name in sorted(made & reads):
            where = f"cell {index + 1}, below its check, "
            if name in above:
                return upto, [f"{where}has another {name}, which is not graded"]
            return len(cells), [f"{where}has {name}"]
    return upto, []


def _borrowed(card: Card, sources: Sequence[str], space: dict[str, Any]) -> Iterator[str]:
    """That the cells of an answer name the library's own solution."""
    solution = exercises.find(card.exercise).reference
    for node in (node for source in sources for node in ast.walk(_tree(source))):
        if isinstance(node, ast.Name):
            named = space.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = space.get(node.value.id)
            named = vars(module).get(node.attr) if isinstance(module, types.ModuleType) else None
        else:
            continue
        if named is solution:
            yield f"uses the library's own {getattr(solution, '__qualname__', 'answer')}"


def _remarks(card: Card, value: Any, sources: Sequence[str]) -> Iterator[str]:
    if str(getattr(value, "__module__", "")).startswith("labutils."):
        yield f"is the library's own {getattr(value, '__qualname__', '')}"
    for source in sources:
        names = set().union(*_names(source))
        for node in ast.walk(_tree(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.name.partition(".")[0] for alias in node.names}
                names.add((getattr(node, "module", "") or "").partition(".")[0])
            elif isinstance(node, ast.FunctionDef) and node.name in ("__eq__", "__ne__"):
                yield f"defines {node.name}"
        yield from (f"uses {name}" for name in sorted(names & _REACHING))
