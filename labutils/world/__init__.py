"""Ranks: one program, run as threads of this process, as processes of their own, or under torchrun.

>>> import torch
>>> with World(4) as world:
...     world.run(lambda rank: rank.comm().all_reduce(torch.full((4,), rank.rank)).sum().item())
[24, 24, 24, 24]
>>> world.ledger.by("rank")
{0: 48, 1: 48, 2: 48, 3: 48}
"""

import os
from collections.abc import Callable
from typing import Any

from labutils import units
from labutils.config import Mesh
from labutils.ledger import Ledger
from labutils.trace import Trace
from labutils.world.comm import Comm
from labutils.world.distributed import comm_of
from labutils.world.dry import Assume, Dry
from labutils.world.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    TimeoutError,
    WorldError,
    with_cells,
)
from labutils.world.messages import TIMEOUT, Work
from labutils.world.processes import Processes
from labutils.world.rank import Rank
from labutils.world.shares import copies, marked
from labutils.world.threads import Threads
from labutils.world.torchrun import Torchrun

__all__ = [
    "Comm",
    "DeadlockError",
    "MismatchError",
    "Rank",
    "RankError",
    "TimeoutError",
    "Work",
    "World",
    "WorldError",
    "comm_of",
    "copies",
    "marked",
]

ENGINES: dict[str, Any] = {  # by the name that `World` takes
    "threads": Threads,
    "processes": Processes,
    "torchrun": Torchrun,
    "dry": Dry,
}

_LONGEST = 1e9  # seconds: no system call waits much longer


class World:
    """Ranks that run functions: `world.run(fn, …)` returns `fn(rank, …)` of each, in order.

    `timeout` is how long a rank may wait for the others, in seconds. A rank that computes has no
    limit: interrupt it, and the next run works. Don't write into arguments:
    on threads all ranks share them, on processes each rank has its own copy.

    The engine "dry" runs one rank alone on fake tensors, which have shapes and no values; `assume`
    says what to answer where the program asks for a value: {bool: True, float: 0.0,
    int: lambda x: x.numel() // 8}, each a value or a function of the tensor.

    >>> import torch
    >>> dry = World(Mesh(dp=16_384), engine="dry")
    >>> dry.run(lambda rank: rank.comm("dp").all_reduce(torch.ones(16_384)).shape, rank=11_111)
    torch.Size([16384])
    >>> dry.ledger.by("rank")
    {11111: 131064}
    """

    def __init__(
        self,
        mesh: int | Mesh,
        engine: str | None = None,
        *,
        timeout: float = TIMEOUT,
        assume: Assume | None = None,
    ) -> None:
        mesh = mesh if isinstance(mesh, Mesh) else Mesh(dp=mesh)
        engine = engine or ("torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "threads")
        units.entry(ENGINES, engine, "no engine")
        self.mesh = mesh
        self.engine = engine
        self.timeout = min(units.positive(timeout, "timeout"), _LONGEST)
        self.trace = Trace()
        if assume is not None and engine != "dry":
            raise ValueError(f'on {engine} tensors have values: assume= is for engine="dry"')
        given = () if assume is None else (assume,)
        self._engine = ENGINES[engine](mesh, self.timeout, *given)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def ledger(self) -> Ledger:
        """Bytes that each rank sent in the last run, a line for each operation, as counted."""
        return self.trace.sent

    def run(self, fn: Callable, *args: Any, rank: int | None = None, **kwargs: Any) -> Any:
        """What `fn(rank, *args, **kwargs)` returned on each rank; a rank's error is raised.

        In a dry run: what it returned on the one `rank` (0 unless given).
        """
        if not callable(fn):
            remedy = "write world.run(fn, …), without calling fn"
            raise TypeError(f"run takes a function of a rank, got {fn!r}: {remedy}")
        self.trace = Trace()
        if self.engine != "dry" and rank is not None:
            remedy = f'leave rank={rank} out, or use engine="dry"'
            raise ValueError(f"on {self.engine} all ranks run: {remedy}")
        alone = (rank or 0,) if self.engine == "dry" else ()
        try:
            results, self.trace = self._engine.run(fn, args, kwargs, *alone)
        except WorldError as error:
            error.args = (with_cells(str(error)),)
            raise error.with_traceback(None) from None
        return results

    def close(self) -> None:
        """End all ranks; a later run would start new ones."""
        if isinstance(self._engine, Processes):  # of the others nothing stays between runs
            self._engine.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World({self.mesh.size}, engine={self.engine!r})"
