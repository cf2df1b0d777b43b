"""What a reader sees when a rank fails: its own lines, named as the notebook names them."""

from __future__ import annotations

import builtins
import functools
import linecache
import os
import re
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labutils.world.rank import Outcome

_OURS = os.path.dirname(__file__) + os.sep
_INTERNAL = (
    _OURS,
    os.path.join(os.path.dirname(_OURS[:-1]), "collectives"),
    "<@beartype",
)
_CELL = re.compile(r"(?<!\S)\S*ipykernel_\d+[/\\]\d+\.py")  # without the look behind: quadratic
_FRAMES = 24  # of a longer traceback the middle is left out

WAITS, ABSENT, OVER = "waits in", "has not arrived", "has"
State = tuple[str, str]  # what a rank does, one of the three, and where


class WorldError(RuntimeError):
    """Anything that stops a run of ranks."""


class RankError(WorldError):
    """An exception on one rank, or the end of its process; `traceback` is that rank's own."""

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = with_cells(traceback)


class DeadlockError(WorldError):
    """Every rank waits for another one; on a rank, `waits` says in what."""

    def __init__(self, message: str, waits: str = "") -> None:
        super().__init__(message)
        self.waits = waits


class TimeoutError(WorldError, builtins.TimeoutError):
    """A rank waited longer than the world's time-out; on a rank, `waits` says in what."""

    def __init__(self, message: str, waits: str = "", op: str = "") -> None:
        super().__init__(message)
        self.waits = waits
        self.op = op


class MismatchError(WorldError):
    """Ranks made different calls where they should agree; `misfit`: a message showed it."""

    misfit = False


class Stopped(BaseException):
    """Raised in ranks that wait when another one has failed.

    Not an Exception, so that `except Exception` on a rank does not swallow it.
    """


@functools.cache
def internal(filename: str) -> bool:
    """Whether a file belongs to the machinery below a rank's program, type checkers included."""
    return filename.startswith(_INTERNAL) or f"{os.sep}jaxtyping{os.sep}" in filename


Site = tuple[str, int, str]


def site(frame: types.FrameType | None) -> Site:
    """File, line and function of the innermost frame of the rank's own program."""
    while frame is not None and internal(frame.f_code.co_filename):
        frame = frame.f_back
    return (
        (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if frame
        else ("<unknown>", 0, "")
    )


def place(where: Site) -> str:
    """A place in the program as a person names it, without what differs between machines."""
    filename, line, function = where
    file = filename if _CELL.search(filename) else "/".join(filename.split(os.sep)[-2:])
    return f"{file}, line {line}" + (f", in {function}" if not function.startswith("<") else "")


def with_cells(text: str) -> str:
    """`text` with the files of notebook cells called as the notebook calls them."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()

    def name(match: re.Match) -> str:
        known = shell.compile.format_code_name(match[0]) if shell else None
        return " ".join(known) if known else "Cell"

    return _CELL.sub(name, text)


@dataclass(frozen=True)
class Failure:
    """An exception of a rank as plain data, so that it can leave its process.

    Source lines are looked up where the cells were written.
    """

    kind: str
    links: tuple[tuple[str, tuple[tuple[Site, str], ...], str], ...]
    error: WorldError | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """`error` with its causes, each as (how it led to the next one, frames, last line)."""
        links, joint = [], ""
        step: BaseException | None = error
        while step is not None and len(links) < 8:
            frames = traceback.extract_tb(step.__traceback__)
            own = [
                ((f.filename, f.lineno or 0, f.name), f.line or "")
                for f in frames
                if not internal(f.filename)
            ]
            if len(own) > _FRAMES:  # a recursion without end
                half = _FRAMES // 2
                own[half:-half] = [(("", len(own) - _FRAMES, ""), "")]
            links.append(
                (joint, tuple(own), "".join(traceback.format_exception_only(step)).rstrip())
            )
            cause = step.__cause__
            joint = "which caused" if cause else "and while that was handled"
            step = cause or (None if step.__suppress_context__ else step.__context__)
        return cls(
            type(error).__name__,
            tuple(reversed(links)),
            error if isinstance(error, WorldError) else None,
        )

    def __str__(self) -> str:
        text = []
        for joint, frames, last in self.links:
            for where, line in frames:
                if not where[0]:
                    text.append(f"  … {where[1]:,} more calls …")
                    continue
                source = line or linecache.getline(where[0], where[1]).strip()
                text.append(f"  {place(where)}" + f"\n    {source}" * bool(source))
            text.append(last + f"\n\n{joint}:\n" * bool(joint))
        return "\n".join(text)

    @property
    def summary(self) -> str:
        """The exception's kind and message, in its first line."""
        return self.links[-1][2].splitlines()[0] if self.links[-1][2] else self.kind


def run_error(outcomes: Sequence[Outcome]) -> WorldError:
    """The one exception that tells what went wrong, first causes before consequences."""
    failures = {rank: each.failure for rank, each in enumerate(outcomes) if each.failure}
    kinds = (RankError, type(None), MismatchError, DeadlockError, TimeoutError)
    first, *others = sorted(
        failures, key=lambda rank: (kinds.index(type(failures[rank].error)), rank)
    )
    failure, error = failures[first], failures[first].error
    states = [outcome.state for outcome in outcomes]
    if isinstance(error, (DeadlockError, TimeoutError)) or getattr(error, "misfit", False):
        different = _different_calls(outcomes)
        if different:
            return MismatchError(different)
    if isinstance(error, DeadlockError):
        return DeadlockError(stuck(states))
    if isinstance(error, TimeoutError) and error.op:
        return TimeoutError(_late(error, states))
    if error is not None:
        return error
    also = [rank for rank in others if failures[rank].error is None]
    same = [rank for rank in also if failures[rank].summary == failure.summary]
    size = len(outcomes)
    if size > 1 and len(same) == size - 1:
        head, also = f"all {size} ranks raised {failure.summary}; this is rank {first}", []
    else:
        head = f"rank {first} of {size} raised {failure.summary}"
    tail = "".join(f"\nrank {rank} failed as well: {failures[rank].summary}" for rank in also)
    return RankError(f"{head}\n\n{failure}{tail}", first, str(failure))


def _different_calls(outcomes: Sequence[Outcome]) -> str:
    """Who called what where ranks of one communicator differ for the first time; else nothing."""
    communicators = {key: None for outcome in outcomes for key in outcome.calls}
    for axis, ranks in communicators:
        calls = {}
        for rank in ranks:
            known = outcomes[rank].calls.get((axis, ranks))
            calls[rank] = dict(known.last) if known else {}
        numbers = sorted(set().union(*calls.values()))
        for number in numbers:
            made = {rank: calls[rank].get(number) for rank in ranks}
            if len({call.signature for call in made.values() if call}) > 1:
                lines = [
                    f"  rank {rank}: "
                    + (f"{call.signature} at {place(call.where)}" if call else "has not called it")
                    for rank, call in made.items()
                ]
                head = (
                    f"{ranks_text(ranks)} must make the same calls on axis {axis!r} in the same "
                    f"order, but call {number} differs:"
                )
                return "\n".join([head, *lines])
    return ""


def _late(error: TimeoutError, states: Sequence[State]) -> str:
    """The text of a time-out, from the state of every rank."""
    ranks = {kind: [] for kind in (WAITS, ABSENT, OVER)}
    for rank, (what, _) in enumerate(states):
        ranks[what].append(rank)
    missing = ranks[ABSENT] or ranks[OVER]
    return (
        f"{ranks_text(ranks[WAITS])} {error}" + f" for {ranks_text(missing)}" * bool(missing)
    ) + f":\n{_whereabouts(states)}"


def stuck(states: Sequence[State]) -> str:
    """The text of a deadlock, from the state of every rank."""
    return f"every rank waits for another one, and none can go on:\n{_whereabouts(states)}"


def _whereabouts(states: Sequence[State]) -> str:
    return "\n".join(
        f"  rank {rank} {what} {where}".rstrip() for rank, (what, where) in enumerate(states)
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a phrase: 'rank 2' or 'ranks 0, 1, 3'."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
