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

_HERE, _NAME = os.path.split(os.path.dirname(__file__))
_INTERNAL = (*(os.path.join(_HERE, part, "") for part in (_NAME, "collectives")), "<@beartype")
_CELL = re.compile(r"(?<!\S)\S*ipykernel_\d+[/\\]\d+\.py")  # without the look behind: quadratic
_FRAMES = 24  # of a longer traceback the middle is left out
_TEXT = 1_000_000  # characters of a message

WAITS, ABSENT, OVER = "waits in", "has not arrived", "has"
State = tuple[str, str]  # what a rank does, one of the three, and where


class WorldError(RuntimeError):
    """Anything that stops a run of ranks; on a rank, `waits` is the message that it waited for."""

    def __init__(self, message: str, waits: str = "") -> None:
        super().__init__(message)
        self.waits = waits


class RankError(WorldError):
    """An exception on one rank, or the end of its process; `traceback` is that rank's own."""

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = with_cells(traceback)


class DeadlockError(WorldError):
    """Every rank waits for another one."""


class TimeoutError(WorldError, builtins.TimeoutError):
    """A rank waited longer than the world's time-out."""


class MismatchError(WorldError):
    """Ranks made different calls where they should agree."""


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
    if frame is None:
        return "<unknown>", 0, ""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


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

    links: tuple[tuple[str, tuple[tuple[Site, str], ...], str], ...]
    error: WorldError | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """`error` with its causes, each as (how it led to the next one, frames, last line)."""
        links: list[tuple[str, tuple[tuple[Site, str], ...], str]] = []
        joint = ""
        step: BaseException | None = error
        while step is not None and len(links) < 8:
            last = _told("".join(traceback.format_exception_only(step)).rstrip())
            links.append((joint, _own_frames(step), last))
            cause = step.__cause__
            joint = "which caused" if cause else "and while that was handled"
            step = cause or (None if step.__suppress_context__ else step.__context__)
        ours = error if isinstance(error, WorldError) else None
        return cls(tuple(reversed(links)), ours)

    def __str__(self) -> str:
        text = []
        for joint, frames, last in self.links:
            own = [_frame_text(*frame) for frame in frames]
            if len(own) > _FRAMES:  # a recursion without end
                own[_FRAMES // 2 : -_FRAMES // 2] = [f"  … {len(own) - _FRAMES:,} more calls …"]
            text += [*own, last + f"\n\n{joint}:\n" * bool(joint)]
        return "\n".join(text)

    @property
    def summary(self) -> str:
        """The exception's kind and message, in its first line."""
        return self.links[-1][2].splitlines()[0]


def _told(text: str) -> str:
    """A message, without its middle where nobody would read it all: each rank may raise one."""
    more, half = len(text) - _TEXT, _TEXT // 2
    return text if more <= 0 else f"{text[:half]} … {more:,} more characters … {text[-half:]}"


def _own_frames(error: BaseException) -> tuple[tuple[Site, str], ...]:
    """Where `error` passed through the rank's own program, and the source lines known here."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not internal(f.filename)]
    return tuple(((f.filename, f.lineno or 0, f.name), f.line or "") for f in frames)


def _frame_text(where: Site, line: str) -> str:
    source = line or linecache.getline(where[0], where[1]).strip()
    return f"  {place(where)}" + f"\n    {source}" * bool(source)


def run_error(outcomes: Sequence[Outcome]) -> WorldError:
    """The one exception that tells what went wrong, first causes before consequences."""
    failures = {rank: each.failure for rank, each in enumerate(outcomes) if each.failure}
    kinds = (RankError, type(None), MismatchError, DeadlockError, TimeoutError)
    first, *others = sorted(failures, key=lambda rank: kinds.index(type(failures[rank].error)))
    failure, error = failures[first], failures[first].error
    states = [outcome.state for outcome in outcomes]
    if isinstance(error, (DeadlockError, TimeoutError)) or getattr(error, "waits", False):
        if different := _different_calls(outcomes):
            return MismatchError(different)
    if isinstance(error, DeadlockError):
        text = "every rank waits for another one, and none can go on"
        return DeadlockError(f"{text}:\n{_whereabouts(states)}")
    if isinstance(error, TimeoutError) and error.waits:
        return TimeoutError(_late(error, states))
    if error is not None:
        return error
    also = [rank for rank in others if failures[rank].error is None]
    same = [rank for rank in also if failures[rank].summary == failure.summary]
    size = len(outcomes)
    if 1 < size == len(same) + 1:
        head, also = f"all {size} ranks raised {failure.summary}; this is rank {first}", []
    else:
        head = ""
    tail = "".join(f"\nrank {rank} failed as well: {failures[rank].summary}" for rank in also)
    return rank_error(first, size, failure, head, tail)


def rank_error(rank: int, size: int, failure: Failure, head: str = "", tail: str = "") -> RankError:
    """What a rank's program raised, where, and what else happened.

    rank, size: which rank of how many
    failure: what it raised, which stands between `head` and `tail`
    """
    head = head or f"rank {rank} of {size} raised {failure.summary}"
    return RankError(f"{head}\n\n{failure}{tail}", rank, str(failure))


def _different_calls(outcomes: Sequence[Outcome]) -> str:
    """Who called what where ranks of one communicator differ for the first time; else nothing."""
    communicators = {key: None for outcome in outcomes for key in outcome.calls}
    for axis, ranks in communicators:
        calls = {rank: dict(outcomes[rank].calls.get((axis, ranks), ())) for rank in ranks}
        for number in sorted(set().union(*calls.values())):
            made = {rank: calls[rank].get(number) for rank in ranks}
            if len({call.signature for call in made.values() if call}) > 1:
                who = f"{_ranks_text(ranks)} must make the same calls on axis {axis!r}"
                lines = [f"{who} in the same order, but call {number} differs:"]
                for rank, call in made.items():
                    did = call and f"{call.signature} at {place(call.where)}"
                    lines.append(f"  rank {rank}: {did or 'has not called it'}")
                return "\n".join(lines)
    return ""


def _late(error: TimeoutError, states: Sequence[State]) -> str:
    """The text of a time-out, from the state of every rank."""
    ranks: dict[str, list[int]] = {kind: [] for kind in (WAITS, ABSENT, OVER)}
    for rank, (what, _) in enumerate(states):
        ranks[what].append(rank)
    missing = ranks[ABSENT] or ranks[OVER]
    for_whom = f" for {_ranks_text(missing)}" if missing else ""
    return f"{_ranks_text(ranks[WAITS])} {error}{for_whom}:\n{_whereabouts(states)}"


def _whereabouts(states: Sequence[State]) -> str:
    """What each rank does, a line each; a place at which several wait is told once, below."""
    waits = [rank for rank, (what, where) in enumerate(states) if what == WAITS and " at " in where]
    places = {states[rank][1].rpartition(" at ")[2] for rank in waits}
    joint = f" at {places.pop()}" if len(waits) > 1 == len(places) else ""
    lines = [
        f"  rank {rank} {what} {where.removesuffix(joint if rank in waits else '')}".rstrip()
        for rank, (what, where) in enumerate(states)
    ]
    return "\n".join(lines + [f"  {_ranks_text(waits)} wait{joint}"] * bool(joint))


def _ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a phrase: 'rank 2' or 'ranks 0, 1, 3'."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
