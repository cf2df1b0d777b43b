"""The verdict on one answer, in a process that is thrown away afterwards."""

import builtins
import json
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch

from labutils import teach
from labutils.teach import check, exercises
from labutils.teach.exercises import Card
from labutils.teach.grade import answers

_OUTSIDE = (builtins, json, math, operator, os, numpy, torch, torch.nn, torch.nn.functional)
_CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.Parameter)
_TORCH = torch.__path__[0]
_WRITTEN_ANEW = {"__warningregistry__", "__annotations__", "__builtins__", "__cached__"}


class Seal:
    """What the checks are made of, as it was before a submission's code ran.

    It sees names that were given another value and functions that got other code, not every
    change that Python allows.
    """

    def __init__(self, exercise: exercises.Exercise) -> None:
        mine = {name: module for name, module in sys.modules.items() if _ours(name)}
        self.modules = {name: (module, dict(vars(module))) for name, module in mine.items()}
        found = [value for module in mine.values() for value in vars(module).values()]
        classes = {each for each in found if isinstance(each, type) and _ours(each.__module__)}
        self.classes = {each: dict(vars(each)) for each in (*classes, *_CLASSES)}
        inside = [value for each in self.classes.values() for value in each.values()]
        codes = ((each, _code(each)) for each in map(_plain, (*found, *inside)))
        self.code = {each: code for each, code in codes if code is not None}
        self.outside = {module: dict(vars(module)) for module in _OUTSIDE}
        self.tables = [(each, dict(vars(each))) for each in (exercise, *exercise.properties)]

    def broken(self) -> list[str]:
        """What is no longer as it was; it is put back."""
        return list(dict.fromkeys((*self._names(), *self._functions(), *self._tables())))

    def _names(self) -> Iterator[str]:
        for name, (module, before) in self.modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
                yield name
            yield from _put_back(module, before, name, added=True)
        for each, before in self.classes.items():
            yield from _put_back(each, before, each.__qualname__, added=True)
        for module, before in self.outside.items():
            yield from _put_back(module, before, module.__name__, added=False)

    def _functions(self) -> Iterator[str]:
        for function, before in self.code.items():
            if _code(function) != before:
                function.__code__, function.__defaults__, function.__kwdefaults__ = before
                yield f"the code of {function.__qualname__}"

    def _tables(self) -> Iterator[str]:
        for each, before in self.tables:
            if vars(each) != before:
                vars(each).clear()
                vars(each).update(before)
                yield f"the {type(each).__name__.lower()} {before.get('name', before.get('id'))}"


def _ours(name: Any) -> bool:
    return str(name).partition(".")[0] == "labutils"


def _plain(value: Any) -> Any:
    """The function in a method of a class, a static one or a property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _code(value: Any) -> tuple | None:
    if not isinstance(value, types.FunctionType):
        return None
    return value.__code__, value.__defaults__, value.__kwdefaults__


def _put_back(owner: Any, before: dict, name: str, added: bool) -> Iterator[str]:
    """Restores the attributes of a module or class, and names those that differed.

    added: whether names that were not there count; a submodule that was imported does not
    """
    now = dict(vars(owner))
    for key in sorted((before.keys() | now.keys()) - _WRITTEN_ANEW):
        if key not in before:
            if added and not isinstance(now[key], types.ModuleType):
                delattr(owner, key)
                yield f"{name}.{key}"
        elif now.get(key, ...) is not before[key] and not _by_itself(owner, key, now, before):
            setattr(owner, key, before[key])
            yield f"{name}.{key}"


def _by_itself(owner: Any, key: str, now: dict, before: dict) -> bool:
    """Whether a class counts something, or torch wrapped its own function as it loaded a part."""
    if isinstance(owner, type) and not callable(before[key]) and type(now.get(key)) in (bool, int):
        return True
    code = getattr(now.get(key), "__code__", None)
    return code is not None and owner in _OUTSIDE and code.co_filename.startswith(_TORCH)


def judge(card: Card, cells: Sequence[str]) -> dict[str, Any]:
    """Status, verdicts and remarks on the answer to an exercise, as plain values.

    What a submission changed of the checks is put back first; what the answer changes while it is
    checked makes the verdict void.
    """
    exercise = exercises.find(card.exercise)
    seal = Seal(exercise)
    outcome = _judged(card, cells, exercise, seal, whole=False)
    if "NameError" in str(outcome):  # a name was made in a way that the cells' text doesn't tell
        outcome = _judged(card, cells, exercise, seal, whole=True)
    return outcome


def _judged(
    card: Card, cells: Sequence[str], exercise: exercises.Exercise, seal: Seal, whole: bool
) -> dict[str, Any]:
    try:
        attempt, remarks = answers.attempt(card, cells, whole)
    except answers.Refused as error:
        return _outcome("no answer", str(error), ())
    remarks += [f"changed {name}" for name in seal.broken()]
    sys.settrace(None)
    sys.setprofile(None)
    try:
        report = check.check(exercise.id, attempt)
    except BaseException as error:
        why = f"the answer raised {type(error).__name__}, which no check stops: {error}"
        return _outcome("not yet", why, (), remarks)
    if changed := seal.broken():
        why = f"the answer changed {', '.join(changed)} while it was checked"
        return _outcome("void", why, (), remarks)
    status = {"passed": "solved", "failed": "not yet", "not reached": "not attempted"}
    remarks *= report.attempted  # code that is handed out needs no remark
    return _outcome(status[report.status], str(report), report.verdicts, remarks)


def _outcome(status: str, said: str, verdicts: Sequence[check.Verdict], remarks=()) -> dict:
    return {
        "status": status,
        "said": said[:4000],
        "passed": sum(verdict.status == "passed" for verdict in verdicts),
        "of": len(verdicts),
        "remarks": [str(remark)[:200] for remark in remarks][:20],
    }


def deliver(card: Card, cells: Sequence[str], send: Callable[[str], Any], token: str) -> None:
    """Judge, send one line of JSON with the token that only this process was given, and end.

    Submitted code that imports the grader gets another copy of it, and another `__main__`.
    """
    me, getpid, dumps, leave = os.getpid(), os.getpid, json.dumps, os._exit
    grader = __name__.rpartition(".")[0]
    for name in [name for name in sys.modules if name.startswith(grader)]:
        del sys.modules[name]
    delattr(teach, grader.rpartition(".")[2])
    sys.modules["__main__"] = types.ModuleType("__main__")
    outcome = judge(card, cells)
    if getpid() == me:  # and no copy that the answer made of this process
        send(dumps(outcome | {"token": token}) + "\n")
    leave(0)
