"""What a learner calls in a lab: `predict` before, `reveal` after, `check` an attempt, ask for a `hint`, `show` the library's own code."""

import html
import inspect
import math
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from labutils import units
from labutils.teach import exercises

Status = Literal["passed", "failed", "not reached"]
_MARKS = {"passed": "✓", "failed": "✗", "not reached": "–"}
_COLORS = {"passed": "#1A7F4B", "failed": "#B3261E", "not reached": "#6B7280"}


@dataclass(frozen=True)
class Verdict:
    """How one property of an attempt came out, what was seen, and what that usually means."""

    name: str
    status: Status
    seen: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """The outcome of a check: a verdict a property, the failed one first; no verdict at all where nothing was attempted."""

    exercise: exercises.Exercise
    verdicts: tuple[Verdict, ...]

    @property
    def attempted(self) -> bool:
        """False while the stub is untouched."""
        return bool(self.verdicts)

    @property
    def passed(self) -> bool:
        """True when every property holds."""
        return self.attempted and all(verdict.status == "passed" for verdict in self.verdicts)

    def _headline(self) -> str:
        if not self.attempted:
            return f"not attempted · {self.exercise.title} ({self.exercise.minutes} min, {self.exercise.dots})"
        return f"{'solved' if self.passed else 'not yet'} · {self.exercise.title}"

    def _ordered(self) -> list[Verdict]:
        return sorted(
            self.verdicts,
            key=lambda verdict: ("failed", "passed", "not reached").index(verdict.status),
        )

    def __str__(self) -> str:
        lines = [self._headline()]
        for verdict in self._ordered():
            lines.append(
                f"{_MARKS[verdict.status]} {verdict.name}"
                + (f" · {verdict.seen}" if verdict.seen else "")
            )
            lines += textwrap.wrap(verdict.hint, 110, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for verdict in self._ordered():
            seen = f" · {html.escape(verdict.seen)}" if verdict.seen else ""
            hint = (
                f'<div style="margin-left:1.4em">{html.escape(verdict.hint)}</div>'
                if verdict.hint
                else ""
            )
            mark = f'<span style="color:{_COLORS[verdict.status]};font-weight:bold">{_MARKS[verdict.status]} {html.escape(verdict.name)}</span>'
            rows.append(f"<div>{mark}{seen}{hint}</div>")
        edge = _COLORS[
            "not reached" if not self.attempted else "passed" if self.passed else "failed"
        ]
        return (
            f'<div class="check-report" role="status" style="border-left:4px solid {edge};padding:4px 12px;white-space:pre-wrap">'
            f"<div><b>{html.escape(self._headline())}</b></div>{''.join(rows)}</div>"
        )


def check(exercise_id: str, attempt: Any) -> Report:
    """The report on `attempt`: properties are tried in order until one fails; an untouched stub is "not attempted", never an error."""
    exercise = exercises.find(exercise_id)
    verdicts: list[Verdict] = []
    if attempt is ... or attempt is None:
        return Report(exercise, ())
    for prop in exercise.properties:
        if verdicts and verdicts[-1].status != "passed":
            verdicts.append(Verdict(prop.name, "not reached"))
            continue
        try:
            verdicts.append(Verdict(prop.name, "passed", prop.test(attempt) or ""))
        except exercises.Failed as failure:
            verdicts.append(Verdict(prop.name, "failed", str(failure), failure.hint))
        except Exception as error:
            # A check must survive whatever a learner's code does; what happened is part of the report.
            if any(isinstance(cause, NotImplementedError) for cause in _causes(error)):
                return Report(exercise, ())
            verdicts.append(
                Verdict(
                    prop.name,
                    "failed",
                    f"your code raised {type(error).__name__}: {error}",
                    _where(error),
                )
            )
    return Report(exercise, tuple(verdicts))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _where(error: BaseException) -> str:
    """The innermost line outside this package and those installed: the learner's own, where there is one."""
    package = exercises.__name__.partition(".")[0]
    for cause in list(_causes(error))[::-1]:
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            path = frame.filename.replace("\\", "/")
            if f"/{package}/" not in path and "/site-packages/" not in path and frame.line:
                return f"It happened in {frame.name}, at this line: {frame.line}"
    return ""


@dataclass(frozen=True)
class Text:
    """A short text for the reader, the same in a terminal and in a notebook."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<div style="padding:2px 0">{html.escape(self.text)}</div>'


def hint(exercise_id: str, level: int = 1) -> Text:
    """Hint number `level` of an exercise; each says more than the one before."""
    exercise = exercises.find(exercise_id)
    if units.whole(level, "level", 1) > len(exercise.hints):
        raise ValueError(
            f"{exercise_id} has {len(exercise.hints)} hints, asked for number {level}: the next step is show(…), the solution"
        )
    return Text(f"Hint {level} of {len(exercise.hints)}: {exercise.hints[level - 1]}")


predictions: dict[str, int | float | str] = {}
"""Every guess of this session by its question, in base units: 64 MB is 64000000."""


def predict(question: str, **guess: int | float | str) -> Text:
    """Keeps your guess for `question`, given in the unit of your choice, for the figure or the `reveal` that follows.

    >>> predict("all-reduce/bytes-per-rank", MB=64)
    Your guess for all-reduce/bytes-per-rank: 64 MB. Kept.
    >>> predictions["all-reduce/bytes-per-rank"]
    64000000
    """
    if len(guess) != 1:
        raise ValueError(
            f"give one guess with its unit, such as predict({question!r}, MB=64); got {guess or 'none'}"
        )
    ((unit, value),) = guess.items()
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"a guess is a number or a word, got {value!r}")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(
            "a guess of NaN cannot be compared with anything: guess a number, or write it as a word, 'nan'"
        )
    predictions[question] = value if isinstance(value, str) else _amount(value, unit)
    return Text(f"Your guess for {question}: {_spoken(value, unit)}. Kept.")


def reveal(question: str, **answer: int | float | str) -> Text:
    """Your guess beside the answer, and how far apart they are.

    >>> _ = predict("example", MB=64)
    >>> reveal("example", MB=96)
    You guessed 64.0 MB, it is 96.0 MB: off by a factor of 1.5.
    """
    if len(answer) != 1:
        raise ValueError(
            f"give one answer with its unit, such as reveal({question!r}, MB=96); got {answer or 'none'}"
        )
    ((unit, value),) = answer.items()
    if question not in predictions:
        return Text(
            f"It is {_spoken(value, unit)}. You made no guess: run predict({question!r}, {unit}=…) first, it is worth it."
        )
    guess = predictions[question]
    if isinstance(value, str) or isinstance(guess, str):
        return Text(
            f"You guessed {guess}, it is {value}{'' if str(guess) == str(value) else ': worth a second look'}."
        )
    actual = _amount(value, unit)
    said = f"You guessed {_written(guess, unit)}, it is {_written(actual, unit)}"
    if guess == actual:
        return Text(f"{said}: right.")
    if min(guess, actual) <= 0 or not math.isfinite(guess / actual):
        return Text(f"{said}.")
    return Text(f"{said}: off by a factor of {max(guess / actual, actual / guess):.3g}.")


def _factor(unit: str) -> int | None:
    """Bytes in one `unit`, or None where the unit is not one of bytes."""
    try:
        return int(units.parse(f"1 {unit}")) if unit.endswith("B") else None
    except ValueError:
        return None


def _amount(value: int | float, unit: str) -> int | float:
    amount = value * (_factor(unit) or 1)
    return int(amount) if _factor(unit) and float(amount).is_integer() else amount


def _spoken(value: int | float | str, unit: str) -> str:
    return f"{value} {unit.replace('_', ' ')}" if not isinstance(value, str) else value


def _written(amount: int | float, unit: str) -> str:
    return (
        units.text(amount, binary="i" in unit)
        if _factor(unit)
        else f"{amount:g} {unit.replace('_', ' ')}"
    )


@dataclass(frozen=True)
class Source:
    """Library source, shown folded: the solution of an exercise is the code that the course itself runs."""

    title: str
    code: str

    def __repr__(self) -> str:
        return f"# {self.title}\n{self.code}"

    def _repr_html_(self) -> str:
        # Inline colors on a light card: the same in JupyterLab, in the book, and in both in the dark.
        pretty = highlight(
            self.code, PythonLexer(), HtmlFormatter(noclasses=True, nowrap=True, style="friendly")
        )
        return (
            f'<details class="source"><summary>{html.escape(self.title)}</summary>'
            f'<pre tabindex="0" style="background:#f8f8f8;color:#1b1b1b;padding:10px;border-radius:6px;overflow-x:auto">{pretty}</pre></details>'
        )


def show(obj: Any) -> Source:
    """The source of a function, class, method or module of the library, folded until you open it."""
    try:
        code = textwrap.dedent(inspect.getsource(obj))
    except (TypeError, OSError):
        raise TypeError(
            f"show needs a function, a class or a module with Python source, got {obj!r}"
        ) from None
    module = inspect.getmodule(obj)
    name = getattr(obj, "__qualname__", None)
    where = (
        getattr(module, "__name__", "notebook")
        .removeprefix("labutils.")
        .replace("__main__", "this notebook")
    )
    return Source(f"{where}.{name}" if name else where, code.rstrip())
