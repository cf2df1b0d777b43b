"""Right answers, by exercise, written otherwise than the reference: a check must accept each.

A module for each topic holds them in `RIGHT`, a table from the exercise's name to its answers by
the name of their style: {"floats/encode": {"NumPy integers": answer}}.
"""

import collections
import importlib
import pkgutil
from typing import Any


def every() -> dict[str, dict[str, Any]]:
    """All right answers by the name of their exercise, then by that of their style."""
    found = collections.defaultdict(dict)
    for info in pkgutil.iter_modules(__path__):
        for exercise, styles in importlib.import_module(f"{__name__}.{info.name}").RIGHT.items():
            found[exercise] |= styles
    return dict(found)
