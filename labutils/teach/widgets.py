"""`explore(view, **controls)`: a control panel around a pure function of its settings.

With a kernel every change calls the view. Without one (the book, a notebook that was only opened)
the same output holds a grid of precomputed states and a few lines of JavaScript, so the panel still
answers. A view returns a `Picture`, HTML text, or anything with `_repr_html_`; it must depend on
its arguments alone, because the page keeps what it returned.
"""

import base64
import contextlib
import html
import inspect
import io
import itertools
import json
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from labutils import units
from labutils.teach import plots

_SCRIPT, _STYLE = (
    Path(__file__).with_suffix(suffix).read_text("utf-8") for suffix in (".js", ".css")
)
# Light enough for dark digits.
_FIELDS = {"sign": "#F0B7A0", "exponent": "#FFD9A0", "mantissa": "#B5D0F2", "bits": "#B5D0F2"}
_MOST = 10_000


@dataclass(frozen=True)
class Control:
    """One setting: its values in order, a label for each, and where it starts.

    Made by `slider`, `log`, `bits`, or a shorthand of `explore`.
    """

    kind: str
    values: Sequence[Any]
    labels: Sequence[str]
    start: int = 0
    fields: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.values):
            raise ValueError(f"a {self.kind} needs at least one value to offer")

    def starting_at(self, value: Any) -> "Control":
        """The same control with another start."""
        for place, known in enumerate(self.values):
            numbers = isinstance(known, float) and isinstance(value, (int, float))
            equal = math.isclose(known, value) if numbers else known == value
            if equal and isinstance(known, bool) == isinstance(value, bool):
                return replace(self, start=place)
        raise ValueError(
            f"cannot start at {value!r}: this {self.kind} offers {_shortened(self.labels)}"
        )


def slider(
    low: float,
    high: float,
    step: float | None = None,
    *,
    unit: str = "",
    start: float | None = None,
) -> Control:
    """A slider from `low` to `high`, ends included.

    Whole numbers move by 1 and others by a 50th unless `step` says otherwise.

    >>> slider(0, 1, 0.25).values, slider(1, 4, unit="s").labels
    ([0, 0.25, 0.5, 0.75, 1], ['1 s', '2 s', '3 s', '4 s'])
    """
    bounds = [low, high] if step is None else [low, high, step]
    for bound in bounds:
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            raise TypeError(
                f"a slider goes from number to number, got {bound!r}: write (low, high) or "
                "(low, high, step); a choice is a list"
            )
        if not math.isfinite(bound):
            raise ValueError(f"a slider needs finite ends and step, got {bound}")
    if not low < high:
        raise ValueError(f"a slider needs low < high, got low={low}, high={high}")
    # Decimal fractions, so that steps of 0.1 land on 0.3 and not on 0.30000000000000004.
    first, last = Fraction(str(low)), Fraction(str(high))
    pace = 1 if isinstance(low, int) and isinstance(high, int) else (last - first) / 50
    pace = pace if step is None else Fraction(str(step))
    if pace <= 0:
        raise ValueError(f"a slider's step must be above 0, got {step}")
    count = math.floor((last - first) / pace) + 1
    if count > _MOST:
        raise ValueError(
            f"a slider of {count:,} steps is finer than anyone can drag: "
            f"choose a step that gives at most {_MOST:,}"
        )
    points = [first + pace * k for k in range(count)]
    values = [int(point) if point.denominator == 1 else float(point) for point in points]
    if isinstance(low, float) or isinstance(high, float):
        values = [float(value) for value in values]
    return _sliding(values, unit, start)


def log(
    low: float, high: float, base: float = 2, *, unit: str = "", start: float | None = None
) -> Control:
    """A slider on which each step multiplies by `base`.

    >>> log(1024, 8192, unit="B").labels
    ['1.02 kB', '2.05 kB', '4.10 kB', '8.19 kB']
    """
    if not units.positive(low, "low") < units.positive(high, "high"):
        raise ValueError(f"a slider needs low < high, got low={low}, high={high}")
    if units.positive(base, "base") <= 1:
        raise ValueError(
            f"each step of a log slider multiplies by its base, which must be above 1, got {base}"
        )
    if math.log(high / low, base) > _MOST:
        raise ValueError(
            f"base {base} makes more than {_MOST:,} steps between {low} and {high}: "
            "choose a larger one"
        )
    values, value = [], low
    while value <= high * (1 + 1e-12):
        values.append(value)
        value *= base
    return _sliding(values, unit, start)


def bits(layout: Any, *, start: int = 0) -> Control:
    """A row of bits to flip, most significant first; the view receives the pattern as an int.

    `layout` is a number of bits, the width of each field by name, or a `floats.FloatFormat`.

    >>> bits({"sign": 1, "exponent": 4, "mantissa": 3}, start=0b0_0111_000).start
    56
    """
    if isinstance(layout, Mapping):
        widths = {
            str(name): units.whole(width, f"bits of {name!r}", 0) for name, width in layout.items()
        }
    elif hasattr(layout, "exponent_bits"):
        widths = {"exponent": layout.exponent_bits, "mantissa": layout.mantissa_bits}
        widths = {"sign": layout.bits - sum(widths.values()), **widths}
    elif isinstance(layout, int) and not isinstance(layout, bool):
        widths = {"bits": units.whole(layout, "bits", 1)}
    else:
        raise TypeError(
            "bits() takes a number of bits, the widths of fields by name, or a FloatFormat, "
            f"got {layout!r}"
        )
    fields = tuple((name, width) for name, width in widths.items() if width)
    count = sum(width for _, width in fields)
    if not 1 <= count <= 32:
        raise ValueError(f"a row of bits holds 1 to 32 of them, got {count}")
    if not 0 <= units.whole(start, "start") < 2**count:
        raise ValueError(f"start={start} does not fit in {count} bits: it must be below {2**count}")
    return Control("bits", range(2**count), _Patterns(count), start, fields)


def explore(view: Callable[..., Any], /, *, states: int = 64, **controls: Any) -> "Panel":
    """A control panel around `view`, which is called with one keyword argument for each control.

    A control starts at the default of the view's own parameter where there is one. It is

    - a slider: `(low, high)`, `(low, high, step)`, a range;
    - a choice: a list, or a dict of label → value;
    - a checkbox: True or False;
    - or what `slider`, `log` and `bits` return.

    Cost: up to `states` calls of the view, once, for the page that has no kernel; sliders are
    thinned to keep within them, choices are not.

    >>> explore(lambda n, twice: f"<b>{n * (1 + twice)}</b>", n=(1, 4), twice=False)
    Control panel: n = 2 (1 … 4) · twice = no (no, yes)
    """
    if not callable(view):
        raise TypeError(f"explore() needs a function of the controls, got {view!r}")
    if not controls:
        raise ValueError("explore() needs at least one control, such as ranks=(2, 8)")
    units.whole(states, "states", 1)
    try:
        parameters = inspect.signature(view).parameters
        inspect.signature(view).bind(**controls)
    except TypeError as error:
        raise TypeError(
            f"the view cannot be called with the controls {', '.join(controls)}: {error}; "
            "give each a parameter of its name"
        ) from None
    made = {}
    for name, given in controls.items():
        try:
            control = _control(given)
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            made[name] = (
                control if default is inspect.Parameter.empty else control.starting_at(default)
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"control {name!r}: {error}") from None
    return Panel(view, made, states)


class Panel:
    """What `explore` returns: live where there is a kernel, from precomputed states where not."""

    def __init__(
        self, view: Callable[..., Any], controls: Mapping[str, Control], states: int
    ) -> None:
        self._view = view
        self._controls = dict(controls)
        self._grid = _thinned(list(self._controls.values()), states)
        self._seen: dict[tuple[int, ...], str] = {}

    def __repr__(self) -> str:
        described = (
            f"{_titled(name)} = {c.labels[c.start]} ({_shortened(c.labels)})"
            for name, c in self._controls.items()
        )
        return "Control panel: " + " · ".join(described)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        live = self.live._repr_mimebundle_()
        live.pop("text/plain", None)
        return {"text/plain": repr(self), "text/html": self.html, **live}

    def _shown(self, places: tuple[int, ...]) -> str:
        """The view's HTML at one place of each control; what goes wrong in it is said there."""
        if places not in self._seen:
            settings = {
                name: c.values[place]
                for place, (name, c) in zip(places, self._controls.items(), strict=True)
            }
            printed = io.StringIO()
            with (
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(printed),
                warnings.catch_warnings(record=True) as warned,
            ):
                warnings.simplefilter("always")
                try:
                    body = _html(self._view(**settings))
                except Exception as error:
                    said = html.escape(f"{type(error).__name__}: {error}")
                    body = f'<pre class="lu-error">{said}</pre>'
            said = printed.getvalue() + "".join(
                f"{warning.category.__name__}: {warning.message}\n" for warning in warned
            )
            self._seen[places] = body + (f"<pre>{html.escape(said)}</pre>" if said else "")
        return self._seen[places]

    @property
    def _start(self) -> tuple[int, ...]:
        return tuple(control.start for control in self._controls.values())

    @cached_property
    def live(self) -> Any:
        """The panel as an ipywidgets box, whose every change calls the view."""
        import ipywidgets  # here, because it starts what a page without a kernel never needs

        inputs = [_input(name, control, ipywidgets) for name, control in self._controls.items()]
        result = ipywidgets.HTML(layout={"width": "100%"})

        def update(_change: Any = None) -> None:
            shown = self._shown(tuple(read() for _, _, read in inputs))
            live = 'role="group" aria-label="Result" aria-live="polite"'
            result.value = f"<div {live}>{shown}</div>"

        for _, moved, _ in inputs:
            for widget in moved:
                widget.observe(update, "value")
        update()
        return ipywidgets.VBox([box for box, _, _ in inputs] + [result])

    @cached_property
    def html(self) -> str:
        """The panel for a page without a kernel: start state, compressed others, a script."""
        views: dict[str, int] = {}
        index = [
            views.setdefault(self._shown(places), len(views))
            for places in itertools.product(*self._grid)
        ]
        packed = base64.b64encode(
            zlib.compress(json.dumps(list(views), ensure_ascii=False).encode(), 9)
        ).decode()
        total = math.prod(len(control.values) for control in self._controls.values())
        note = f"Stored here: {len(index):,} of {total:,} settings. Run the cell for all of them."
        data = {
            "controls": [
                _described(name, c, kept)
                for (name, c), kept in zip(self._controls.items(), self._grid, strict=True)
            ],
            "index": index,
            "note": note * (len(index) < total),
            "views": packed,
        }
        stored = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
        settings = ", ".join(
            f"{_titled(name)} = {control.labels[control.start]}"
            for name, control in self._controls.items()
        )
        return (
            '<div class="lu-explore">\n<div class="lu-inputs" role="group" '
            'aria-label="Controls" data-lm-suppress-shortcuts="true"></div>\n'
            '<div class="lu-view" role="group" aria-label="Result" aria-live="polite">'
            f"{self._shown(self._start)}</div>\n"
            f'<p class="lu-note">Shown: {html.escape(settings)}. '
            "Run the cell to move the controls.</p>\n"
            f"<style>{_STYLE}</style>\n"
            f'<script type="application/json">{stored}</script>\n'
            f"<script>{_SCRIPT}</script>\n</div>"
        )


class _Patterns(Sequence[str]):
    """The labels of all 2**bits patterns of `bits` bits, written only when asked for."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __len__(self) -> int:
        return 2**self.bits

    def __getitem__(self, code: Any) -> str:  # an int: nobody asks for a slice
        if not -len(self) <= code < len(self):
            raise IndexError(code)
        return f"{code % len(self):0{self.bits}b}"


def _sliding(values: list, unit: str, start: Any) -> Control:
    if unit:
        labels = [units.text(value, unit) for value in values]
    else:
        labels = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values]
    control = Control("slider", values, labels, (len(values) - 1) // 2)
    return control if start is None else control.starting_at(start)


def _control(given: Any) -> Control:
    match given:
        case Control():
            return given
        case bool():
            return Control("checkbox", [False, True], ["no", "yes"], int(given))
        case range():
            if len(given) > _MOST:
                raise ValueError(
                    f"a slider of {len(given):,} steps is finer than anyone can drag: "
                    f"choose a step that gives at most {_MOST:,}"
                )
            return _sliding(list(given), "", None)
        case tuple():
            if len(given) not in (2, 3):
                raise ValueError(
                    f"a tuple is a slider, (low, high) or (low, high, step), got {given!r}; "
                    "a choice is a list"
                )
            return slider(*given)
        case dict():
            return Control("choice", list(given.values()), [str(label) for label in given])
        case list():
            return Control("choice", given, [str(value) for value in given])
    raise TypeError(
        f"cannot make a control of {given!r}: use (low, high[, step]) for a slider, a list or dict "
        "for a choice, True or False for a checkbox, or widgets.slider, widgets.log, widgets.bits"
    )


def _thinned(controls: list[Control], states: int) -> list[list[int]]:
    """The places of each control that a page without a kernel keeps: at most `states` in all."""
    counts = [len(control.values) for control in controls]
    while math.prod(counts) > states:
        sliders = [i for i, c in enumerate(controls) if c.kind == "slider" and counts[i] > 2]
        rows = [i for i, c in enumerate(controls) if c.kind == "bits" and counts[i] > 2]
        if rows and (not sliders or max(counts[i] for i in rows) > states):
            widest = max(rows, key=lambda i: counts[i])
            counts[widest] //= 2
        elif sliders:
            widest = max(sliders, key=lambda i: counts[i])
            counts[widest] -= 1
        else:
            raise ValueError(
                f"the choices alone make {math.prod(counts)} combinations, more than "
                f"states={states}: offer fewer or raise states="
            )
    return [_kept(control, count) for control, count in zip(controls, counts, strict=True)]


def _kept(control: Control, count: int) -> list[int]:
    size = len(control.values)
    if control.kind == "bits":  # the leading bits flip, the others stay as they start
        rest = size // count
        return [lead * rest + control.start % rest for lead in range(count)]
    if count == 1:
        return [control.start]
    places = [round(k * (size - 1) / (count - 1)) for k in range(count)]
    if control.start not in places:
        inner = range(1, count - 1) if count > 2 else range(count)
        places[min(inner, key=lambda k: abs(places[k] - control.start))] = control.start
    return places


def _described(name: str, control: Control, kept: list[int]) -> dict[str, Any]:
    """What the script needs to build one control again."""
    if control.kind == "bits":
        fields = [
            [field, width, _FIELDS.get(field, _FIELDS["bits"])] for field, width in control.fields
        ]
        return {
            "kind": "bits",
            "label": _titled(name),
            "fields": fields,
            "start": control.labels[control.start],
            "free": len(kept).bit_length() - 1,
        }
    labels = [control.labels[place] for place in kept]
    return {
        "kind": control.kind,
        "label": _titled(name),
        "labels": labels,
        "start": kept.index(control.start),
    }


def _input(
    name: str, control: Control, ipywidgets: Any
) -> tuple[Any, list[Any], Callable[[], int]]:
    """A control as ipywidgets: the box to show, what moves, a function that reads the place."""
    common = {"description": _titled(name), "style": {"description_width": "initial"}}
    options = (
        [(label, place) for place, label in enumerate(control.labels)]
        if control.kind in ("slider", "choice")
        else []
    )
    match control.kind:
        case "slider":
            made = ipywidgets.SelectionSlider(
                options=options, value=control.start, layout={"width": "min(32em, 95%)"}, **common
            )
        case "choice":
            made = ipywidgets.Dropdown(
                options=options, value=control.start, layout={"width": "max-content"}, **common
            )
        case "checkbox":
            made = ipywidgets.Checkbox(value=bool(control.start), indent=False, **common)
        case "bits":
            return _row_of_bits(name, control, ipywidgets)
    return made, [made], lambda: int(made.value)


def _row_of_bits(
    name: str, control: Control, ipywidgets: Any
) -> tuple[Any, list[Any], Callable[[], int]]:
    groups, buttons = [], []
    pattern = iter(control.labels[control.start])
    for field, width in control.fields:
        row = []
        for k in reversed(range(width)):
            digit = next(pattern)
            button = ipywidgets.ToggleButton(
                value=digit == "1",
                description=digit,
                tooltip=f"{field} bit {k}",
                layout={"width": "2.4em", "margin": "1px", "padding": "0"},
            )
            button.observe(
                lambda change: setattr(change.owner, "description", str(int(change.new))), "value"
            )
            row.append(button)
        color = _FIELDS.get(field, _FIELDS["bits"])
        caption = (
            f'<div style="border-top:4px solid {color};line-height:1.4">{html.escape(field)}</div>'
        )
        groups.append(ipywidgets.VBox([ipywidgets.HTML(caption), ipywidgets.HBox(row)]))
        buttons += row
    box = ipywidgets.VBox(
        [ipywidgets.Label(_titled(name)), ipywidgets.HBox(groups, layout={"flex_flow": "row wrap"})]
    )
    return box, buttons, lambda: int("".join(str(int(button.value)) for button in buttons), 2)


def _html(made: Any) -> str:
    match made:
        case plots.Picture():
            return made.html(vector=True)
        case plots.Animation():
            raise TypeError(
                "an Animation has controls of its own: show it outside the panel, or return one "
                "Picture for each setting"
            )
        case str():
            return made
    if callable(getattr(made, "_repr_html_", None)) and (shown := made._repr_html_()) is not None:
        return shown
    raise TypeError(
        "a view returns a Picture, HTML text or an object with _repr_html_, this one returned "
        f"{type(made).__name__}"
    )


def _titled(name: str) -> str:
    return name.replace("_", " ")


def _shortened(labels: Sequence[str]) -> str:
    return ", ".join(labels) if len(labels) <= 3 else f"{labels[0]} … {labels[-1]}"
