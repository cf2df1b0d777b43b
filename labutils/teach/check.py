"""What a learner calls: `predict` before, `reveal` after, `check` an attempt, `hint`, `show`."""

import contextlib
import html
import inspect
import math
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from labutils import units
from labutils.teach import exercises, progress
from labutils.teach.exercises import _clock, _session
from labutils.world.rank import Output

progress.watch()
Status = Literal["passed", "failed", "not reached"]
_MARKS = {"passed": "✓", "failed": "✗", "not reached": "–"}
_COLORS = {"passed": "#1A7F4B", "failed": "#B3261E", "not reached": "#6B7280"}
_STYLE = "border-left:4px solid {edge};padding:4px 12px;white-space:pre-wrap"
_PYTHON = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
SECONDS = 10
"""What one property of an attempt may compute; that of a reference takes one or two."""


@dataclass(frozen=True)
class Verdict:
    """How one property of an attempt came out, what was seen, and what that usually means."""

    name: str
    status: Status
    seen: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """The outcome of a check: a verdict per property, and none where nothing was attempted."""

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

    @property
    def status(self) -> Status:
        """How the attempt as a whole came out; "not reached" where there is none."""
        if not self.attempted:
            return "not reached"
        return "passed" if self.passed else "failed"

    def _headline(self) -> str:
        card = self.exercise.card
        if not self.attempted:
            return f"not attempted · {card.title} ({card.minutes} min, {card.dots})"
        return f"{'solved' if self.passed else 'not yet'} · {card.title}"

    def _ordered(self) -> list[Verdict]:
        order = ("failed", "passed", "not reached")
        return sorted(self.verdicts, key=lambda verdict: order.index(verdict.status))

    def __str__(self) -> str:
        lines = [self._headline()]
        for verdict in self._ordered():
            seen = f" · {verdict.seen}" if verdict.seen else ""
            lines.append(f"{_MARKS[verdict.status]} {verdict.name}{seen}")
            lines += textwrap.wrap(verdict.hint, 110, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for verdict in self._ordered():
            seen = f" · {html.escape(verdict.seen)}" if verdict.seen else ""
            name = f"{_MARKS[verdict.status]} {html.escape(verdict.name)}"
            hint = f'<div style="margin-left:1.4em">{html.escape(verdict.hint)}</div>'
            rows.append(f"<div><b>{name}</b>{seen}{hint * bool(verdict.hint)}</div>")
        return (
            '<div class="check-report" role="status" '
            f'style="{_STYLE.format(edge=_COLORS[self.status])}">'
            f"<div><b>{html.escape(self._headline())}</b></div>{''.join(rows)}</div>"
        )


def check(exercise_id: str, attempt: Any) -> Report:
    """The report on `attempt`: properties are tried in order until one fails.

    An untouched stub is "not attempted", and so is the untouched code of a bug hunt. Whatever an
    attempt raises is part of the report, and so is a property that computes longer than `SECONDS`.
    What it prints comes before the report, a flood of it shortened. What is drawn afterwards is
    what would have been drawn without a check.
    """
    exercise = exercises.find(exercise_id)
    if attempt is ... or attempt is None:
        return Report(exercise, ())
    if exercise.untouched and exercises.digest(attempt) == exercise.untouched:
        return Report(exercise, ())
    printed = Output()
    try:
        with contextlib.redirect_stdout(printed):
            report = Report(exercise, _verdicts(exercise, attempt))
    finally:
        sys.stdout.write(_cut(str(printed), 10_000))
    if report.passed:
        progress.remember(exercise_id)
    return report


def _verdicts(exercise: exercises.Exercise, attempt: Any) -> tuple[Verdict, ...]:
    """How the properties come out, in their order; none where a stub says that it is none yet."""
    verdicts: list[Verdict] = []
    for prop in exercise.properties:
        if verdicts and verdicts[-1].status != "passed":
            verdicts.append(Verdict(prop.name, "not reached"))
        elif verdict := _verdict(prop, attempt):
            verdicts.append(verdict)
        else:
            return ()
    return tuple(verdicts)


def _verdict(prop: exercises.Property, attempt: Any) -> Verdict | None:
    """How one property comes out; None where a stub says that it is none yet."""
    try:
        with _session.as_new(), torch.random.fork_rng(devices=[]), _clock.limit(SECONDS):
            return Verdict(prop.name, "passed", prop.test(attempt) or "")
    except exercises.Failed as failure:
        seen, why = str(failure), failure.hint
    except _clock.TimeIsUp:
        seen, why = f"stopped: it did not end within {SECONDS:g} seconds of computing", _ENDLESS
    except (Exception, SystemExit) as error:
        # A check must survive whatever a learner's code does; what happened is part of the report.
        # A stub says nothing more; what torch cannot do it names.
        empty = (
            isinstance(cause, NotImplementedError) and not str(cause) for cause in _causes(error)
        )
        if any(empty) and exercises.is_stub(attempt):
            return None
        seen, why = f"your code raised {type(error).__name__}: {error}", _where(error)
        if not any(map(_is_own, _frames(error))):
            seen = f"with your answer the check meets {type(error).__name__}: {error}"
            why = "Does it take, have and return what the exercise asks for?"
    return Verdict(prop.name, "failed", _cut(seen), _cut(why))


def _cut(text: str, most: int = 2000) -> str:
    """The text, or the beginning and the end of a very long one."""
    if len(text) <= most:
        return text
    return f"{text[: most - 300]} … ({len(text):,} characters) … {text[-300:]}"


_ENDLESS = (
    "Does every loop end? Does a recursion compute the same thing again and again? "
    "Then remember results: functools.cache."
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Where it happened, the innermost first."""
    for cause in list(_causes(error))[::-1]:
        yield from reversed(traceback.extract_tb(cause.__traceback__))


def _is_own(frame: traceback.FrameSummary) -> bool:
    """Whether a line is neither this package's, nor an installed one, nor Python's: the
    learner's own."""
    package, path = exercises.__name__.partition(".")[0], frame.filename.replace("\\", "/")
    others = f"/{package}/", "/site-packages/", "<frozen ", _PYTHON
    return not any(other in path for other in others)


def _where(error: BaseException) -> str:
    """The learner's innermost line."""
    for frame in _frames(error):
        if _is_own(frame) and frame.line:
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


@dataclass(frozen=True)
class Folded:
    """What a reader opens on purpose: a hint, or library source. `print` shows it in a terminal."""

    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title}:\n{self.text}"

    def __repr__(self) -> str:
        return f"{self.title}: folded, print(…) shows it"

    def _repr_html_(self) -> str:
        return (
            f'<details class="folded"><summary>{html.escape(self.title)}</summary>'
            f"{self._body()}</details>"
        )

    def _body(self) -> str:
        return f'<div style="padding:2px 0 2px 1.2em">{html.escape(self.text)}</div>'


def hint(exercise_id: str, level: int = 1) -> Folded:
    """Hint number `level` of an exercise, folded; each says more than the one before."""
    exercise = exercises.find(exercise_id)
    if units.whole(level, "level", 1) > len(exercise.hints):
        raise ValueError(
            f"{exercise_id} has {len(exercise.hints)} hints, asked for number {level}: "
            "the next step is show(…), the solution"
        )
    return Folded(f"Hint {level} of {len(exercise.hints)}", exercise.hints[level - 1])


predictions: dict[str, int | float | str] = {}
"""Every guess of this session by its question, in base units: 64 MB is 64000000."""


def predict(question: str, **guess: int | float | str) -> Text:
    """Keeps your guess for `question`, in a unit of your choice, for the `reveal` that follows.

    >>> predict("all-reduce/bytes-per-rank", MB=64)
    Your guess for all-reduce/bytes-per-rank: 64 MB. Kept.
    >>> predictions["all-reduce/bytes-per-rank"]
    64000000
    """
    if len(guess) != 1:
        raise ValueError(
            f"give one guess with its unit, such as predict({question!r}, MB=64); "
            f"got {guess or 'none'}"
        )
    ((unit, value),) = guess.items()
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"a guess is a number or a word, got {value!r}")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(
            "a guess of NaN cannot be compared with anything: guess a number, "
            "or write it as a word, 'nan'"
        )
    predictions[question] = value if isinstance(value, str) else _amount(value, unit)
    return Text(f"Your guess for {question}: {_spoken(value, unit)}. Kept.")


def reveal(question: str, *words: str, **answer: int | float | str) -> Text:
    """Your guess and the answer, and how far apart they are. `words` mean the same as the answer.

    >>> _ = predict("example", MB=64)
    >>> reveal("example", MB=96)
    You guessed 64.0 MB, it is 96.0 MB: off by a factor of 1.5.
    >>> _ = predict("example", of="LoRA's b")
    >>> reveal("example", "the second matrix", "LoRA's B", of="B")
    You guessed LoRA's b, it is B: right.
    """
    if len(answer) != 1:
        raise ValueError(
            f"give one answer with its unit, such as reveal({question!r}, MB=96); "
            f"got {answer or 'none'}"
        )
    ((unit, value),) = answer.items()
    if question not in predictions:
        return Text(
            f"It is {_spoken(value, unit)}. You made no guess: "
            f"run predict({question!r}, {unit}=…) first, it is worth it."
        )
    guess = predictions[question]
    if isinstance(value, str) or isinstance(guess, str):
        right = _meaning(guess) in map(_meaning, (value, *words))
        return Text(
            f"You guessed {guess}, it is {value}: {'right' if right else 'worth a second look'}."
        )
    actual = _amount(value, unit)
    said = f"You guessed {_written(guess, unit)}, it is {_written(actual, unit)}"
    if guess == actual:
        return Text(f"{said}: right.")
    if min(guess, actual) <= 0 or not math.isfinite(guess / actual):
        return Text(f"{said}.")
    factor = max(guess / actual, actual / guess)
    if factor < 1.005:
        return Text(f"{said}: right within half a percent.")
    return Text(f"{said}: off by a factor of {factor:.3g}.")


def _meaning(word: int | float | str) -> str:
    """The word without case, spaces, quotes and articles; "3.0" is the number 3."""
    plain = re.sub(r"\b(?:the|an?)\b(?=.*\w)|[^\w.+-]|\.$", "", str(word).casefold())
    try:
        return f"{float(plain):g}"
    except ValueError:
        return re.sub(r"[\W_]", "", plain)


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
    if _factor(unit):
        return units.text(amount, binary="i" in unit)
    return f"{amount:g} {unit.replace('_', ' ')}"


class Source(Folded):
    """Library source, folded: a solution is the code that the course itself runs."""

    def _body(self) -> str:
        # Inline colors on a light card: the same in JupyterLab and in the book, also in the dark.
        pretty = highlight(
            self.text, PythonLexer(), HtmlFormatter(noclasses=True, nowrap=True, style="friendly")
        )
        return (
            '<pre tabindex="0" style="background:#f8f8f8;color:#1b1b1b;padding:10px;'
            f'border-radius:6px;overflow-x:auto">{pretty}</pre>'
        )


def show(obj: Any) -> Source:
    """The source of a function, class, method or module, folded until you open it.

    A kernel of Triton is shown as the function that it was made from.
    """
    obj = getattr(obj, "fn", obj)
    try:
        code = textwrap.dedent(inspect.getsource(obj))
    except (TypeError, OSError):
        raise TypeError(
            f"show needs a function, a class or a module with Python source, got {obj!r}"
        ) from None
    module = getattr(inspect.getmodule(obj), "__name__", "notebook")
    where = module.removeprefix("labutils.").replace("__main__", "this notebook")
    name = getattr(obj, "__qualname__", None)
    return Source(f"{where}.{name}" if name else where, code.rstrip())
