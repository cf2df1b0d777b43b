"""Plausible wrong answers, by exercise: misconceptions, and bugs once published.

A check must reject each of them in words that help. A module for each topic holds them in `WRONG`,
a table from the exercise's name to its wrong answers.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from itertools import chain
from typing import Any


@dataclass(frozen=True)
class Wrong:
    """What is wrong, the attempt, the property that must reject it, and words of that report."""

    name: str
    attempt: Any
    rejected_by: str
    hint: str


def every() -> dict[str, tuple[Wrong, ...]]:
    """All wrong answers by the name of their exercise."""
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__))
    tables = [importlib.import_module(f"{__name__}.{module}").WRONG for module in modules]
    return {name: sum((table.get(name, ()) for table in tables), ()) for name in chain(*tables)}
