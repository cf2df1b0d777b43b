"""What it costs, in bytes: predicted and measured amounts in one type, so that the central act of a
lab is `predicted.diff(measured)`.

`trace` holds the messages that ranks exchanged and gives ledgers of bytes sent and received;
`timeline` holds ledgers of bytes resident over the course of a step.
"""

import html
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from labutils import units

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buffers")  # of memory
_KEYS = ("component", "name", "axis", "rank")


@dataclass(frozen=True, slots=True)
class Line:
    """One amount of bytes and what it is: `count` tensors or messages called `name`, of a
    `component`, on a mesh `axis`, at a `rank`."""

    name: str
    amount: int
    component: str = ""
    axis: str = ""
    rank: int | None = None
    count: int = 1
    note: str = ""

    def __post_init__(self) -> None:
        wholes = type(self.amount) is type(self.count) is int and self.count >= 0
        texts = type(self.name) is type(self.component) is type(self.axis) is type(self.note) is str
        if wholes and texts and (self.rank is None or type(self.rank) is int):
            return  # as almost all are, of a million
        for key in ("name", "component", "axis", "note"):
            units.instance(getattr(self, key), str, f"a Line's {key}")
        if self.rank is not None:
            object.__setattr__(self, "rank", units.whole(self.rank, f"{self.name!r}: rank"))
        if not units.is_whole(self.amount):
            whole = f"bytes come in whole numbers, got {self.amount!r}; round it where you know why"
            raise TypeError(f"{self.name!r}: {whole}")
        count = units.whole(self.count, f"{self.name!r}: count")
        object.__setattr__(self, "amount", operator.index(self.amount))
        object.__setattr__(self, "count", count)

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """What `Ledger.diff` pairs lines by: component, name, axis and rank."""
        return self.component, self.name, self.axis, self.rank


class _Table:
    """What is shown as a table, in text and in a notebook: a header, lines of cells, a total."""

    _header: tuple[str, ...]

    def _cells(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def _columns(self) -> list[tuple[str, ...]]:
        columns = zip(self._header, *self._cells(), strict=True)
        return [column for column in columns if any(column[1:])]

    def __str__(self) -> str:
        aligned = []
        for i, column in enumerate(self._columns()):
            width = max(map(len, column))
            aligned.append([cell.rjust(width) if i else cell.ljust(width) for cell in column])
        return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *body, total = zip(*self._columns(), strict=True)
        lines = "".join(f"<tr>{_html(line, 'td')}</tr>" for line in body)
        rule = "border-top:1px solid;font-weight:bold"
        return (
            f'<table class="ledger"><thead><tr>{_html(header, "th")}</tr></thead><tbody>{lines}'
            f'</tbody><tfoot><tr style="{rule}">{_html(total, "td")}</tr></tfoot></table>'
        )


def _html(line: tuple[str, ...], tag: str) -> str:
    cells = ""
    for i, cell in enumerate(line):
        style = f"text-align:{'right' if i else 'left'};padding:2px 12px"
        cells += f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
    return cells


@dataclass(frozen=True, repr=False)
class Ledger(_Table):
    """A list of lines; its totals are computed, never stored.

    >>> first = [Line("weights", 20, rank=0), Line("gradients", 20, rank=0)]
    >>> held = Ledger([*first, Line("weights", 20, rank=1)])
    >>> held.total, held.by("rank"), held.only(rank=0).by("name")
    (60, {0: 40, 1: 20}, {'weights': 20, 'gradients': 20})
    """

    lines: tuple[Line, ...] = ()

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        units.instance(lines, Iterable, "Ledger")
        object.__setattr__(self, "lines", tuple(lines))
        for line in self.lines:
            if not isinstance(line, Line):
                remedy = "write Line(name, amount)"
                raise TypeError(f"a Ledger is made of Lines, got {line!r}; {remedy}")

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(self.lines + other.lines) if isinstance(other, Ledger) else NotImplemented

    @property
    def total(self) -> int:
        """Bytes in all lines together."""
        return sum(line.amount for line in self.lines)

    @property
    def count(self) -> int:
        """Tensors or messages behind all lines together."""
        return sum(line.count for line in self.lines)

    def by(self, key: str) -> dict:
        """Bytes for each value of `key` ("component", "name", "axis" or "rank"), in order of first
        appearance."""
        _check_keys([key])
        totals: Counter = Counter()
        for line in self.lines:
            totals[getattr(line, key)] += line.amount
        return dict(totals)

    def only(self, **wanted: object) -> "Ledger":
        """The lines whose `name`, `component`, `axis` or `rank` is the wanted one."""
        _check_keys(wanted)
        pairs = wanted.items()
        return Ledger(
            line for line in self.lines if all(getattr(line, key) == value for key, value in pairs)
        )

    def merged(self) -> "Ledger":
        """The same amounts with lines of one key added into one."""
        same: defaultdict[tuple, list[Line]] = defaultdict(list)
        for line in self.lines:
            same[line.key].append(line)
        return Ledger(
            replace(
                lines[0],
                amount=sum(line.amount for line in lines),
                count=sum(line.count for line in lines),
            )
            for lines in same.values()
        )

    def scaled(self, factor: int) -> "Ledger":
        """`factor` times every line: the ledger of `factor` layers, steps or micro-batches."""
        factor = units.whole(factor, "factor")
        return Ledger(
            replace(line, amount=line.amount * factor, count=line.count * factor)
            for line in self.lines
        )

    def diff(self, other: "Ledger", by: str | None = None) -> "Diff":
        """This ledger as the prediction against `other` as the measurement, paired by component,
        name, axis and rank, or `by` one of them.

        >>> measured = Ledger([Line("weights", 400), Line("mask", 100)])
        >>> print(Ledger([Line("weights", 400)]).diff(measured))
                     predicted  measured  unexplained
        weights          400 B     400 B            0
        mask               0 B     100 B        100 B
        unexplained                             100 B

        Raises TypeError for what is no Ledger.
        """
        if not isinstance(other, Ledger):
            raise TypeError(f"a Ledger is compared with a Ledger, got {type(other).__name__}")
        predicted, measured = self._sums(by), other._sums(by)
        return Diff(
            tuple(
                DiffRow(_label(key, by), predicted.get(key, 0), measured.get(key, 0))
                for key in predicted | measured
            )
        )

    def _sums(self, by: str | None) -> dict[tuple, int]:
        """Bytes for each key of a line, or for each value of one of its keys."""
        if by is not None:
            return {(value,): amount for value, amount in self.by(by).items()}
        return {line.key: line.amount for line in self.merged()}

    _header = ("", "bytes", "", "note")

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [(_label(line.key), *_amounts(line.amount), line.note) for line in self.lines]
        return [*rows, ("total", *_amounts(self.total), "")]


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One pair of amounts that carry the same name, in bytes."""

    name: str
    predicted: int
    measured: int

    @property
    def unexplained(self) -> int:
        """Measured minus predicted bytes."""
        return self.measured - self.predicted


@dataclass(frozen=True, repr=False)
class Diff(_Table):
    """A prediction beside a measurement; the last line says how many bytes are left unexplained."""

    rows: tuple[DiffRow, ...]

    @property
    def unexplained(self) -> int:
        """Sum of |measured − predicted| over all rows, in bytes: errors of opposite sign do not
        cancel."""
        return sum(abs(row.unexplained) for row in self.rows)

    _header = ("", "predicted", "measured", "unexplained")

    def _cells(self) -> list[tuple[str, ...]]:
        cells = []
        for row in self.rows:
            amounts = row.predicted, row.measured, row.unexplained
            if row.unexplained:  # a few bytes must stay visible beside megabytes
                cells.append((row.name, *(f"{amount:,} B" for amount in amounts)))
            else:
                cells.append((row.name, *map(units.text, amounts[:2]), "0"))
        total = f"{self.unexplained:,} B" if self.unexplained else "0"
        return [*cells, ("unexplained", "", "", total)]


def _check_keys(keys: Iterable[str]) -> None:
    for key in keys:
        if key not in _KEYS:
            raise ValueError(f"lines have no {key!r}: use one of {', '.join(_KEYS)}")


def _label(key: tuple, by: str | None = None) -> str:
    if by is not None:
        return f"rank {key[0]}" if by == "rank" else str(key[0])
    component, name, axis, rank = key
    parts = [component] if component not in ("", name) else []
    parts += [name] + [axis] * bool(axis) + [f"rank {rank}"] * (rank is not None)
    return " · ".join(parts)


def _amounts(amount: int) -> tuple[str, str]:
    return f"{amount:,}", units.text(amount) if abs(amount) >= 1000 else ""
