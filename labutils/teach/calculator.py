"""The memory calculator: the peak of a training step for any sizes, on a page that needs no kernel.

For one kind of step every line of the ledger, at every moment, is a polynomial in the letters of the notation. So Python walks through the kinds
once and keeps the formulas of the moments that can be the fullest; the page puts numbers into them.
"""

import base64
import html
import itertools
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from labutils import units
from labutils.config import Hardware, ModelConfig, TrainConfig
from labutils.ledger import Line
from labutils.memory import peak, walk
from labutils.memory.states import WIDTHS
from labutils.memory.tape import Polynomial

_SCRIPT, _STYLE = (
    Path(__file__).with_suffix(suffix).read_text("utf-8") for suffix in (".js", ".css")
)

# What a person chooses beside the sizes: a label, and what it means for a TrainConfig.
PRECISION = {
    "bf16, fp32 master weights": dict(precision="bf16"),
    "bf16, fp32 master weights and gradients": dict(precision="bf16", fp32_gradients="only"),
    "bf16 autocast over fp32 weights": dict(precision="bf16", autocast=True),
    "fp32": dict(precision="fp32"),
}
OPTIMIZER = {
    "AdamW, foreach": dict(optimizer="adamw", stepping="foreach"),
    "AdamW, fused": dict(optimizer="adamw", stepping="fused"),
    "AdamW, weight by weight": dict(optimizer="adamw", stepping="loop"),
    "SGD with momentum": dict(optimizer="momentum"),
    "SGD": dict(optimizer="sgd"),
}
ATTENTION = {"fused": dict(attention="sdpa"), "plain": dict(attention="plain")}
CHECKPOINTING = {
    "none": dict(checkpointing="none"),
    "selective": dict(checkpointing="selective"),
    "full": dict(checkpointing="full"),
}
ZERO = {
    "0: nothing": dict(zero=0),
    "1: optimizer": dict(zero=1),
    "2: and gradients": dict(zero=2),
    "3: and weights": dict(zero=3),
}
CHOICES = {
    "precision": PRECISION,
    "optimizer": OPTIMIZER,
    "attention": ATTENTION,
    "checkpointing": CHECKPOINTING,
    "zero": ZERO,
}
START = {"micro_batch": 1, "seq_len": 4096, "devices": 1, "hardware": None} | {
    name: next(iter(options)) for name, options in CHOICES.items()
}
SHAPE = {  # the letters that a model brings along
    "L": "number of layers", "h": "width of the model", "a": "number of heads", "g": "number of key–value heads", "d": "width of a head",
    "f": "feed-forward width", "v": "vocabulary size",
}  # fmt: skip
_ONE = TrainConfig(micro_batch=1, global_batch=1)
SECTIONS = {  # the headings of lab 03 under which each component is derived
    "weights": "How many parameters has a model?",
    "gradients": "What is there before the first token?",
    "optimizer": "What is there before the first token?",
    "activations": "What does the forward pass keep?",
    "buffers": "When is memory fullest?",
}


class Calculator:
    """A panel that predicts the peak of a training step, for the models of `names` and `configs`; for all that the course knows if there are none.

    It evaluates what `memory.predict` evaluates, in the reader's browser. A step is one micro-batch.

    >>> Calculator("gpt2", mine=ModelConfig.named("llama-2-7b"))
    Memory calculator: gpt2, mine

    Cost: about 2 s for each kind of model (norm, feed-forward, positions, biases, tied, GQA) when it is first shown, whatever its size.
    """

    def __init__(self, *names: str, **configs: ModelConfig) -> None:
        models = {name: ModelConfig.named(name) for name in names} | configs
        if not models:
            models = {
                name: model
                for name in ModelConfig.names()
                if (model := ModelConfig.named(name)).num_experts == 1
            }
        for model in models.values():
            peak._check(model, _ONE, peak.ALONE)
        self.models = models

    def __repr__(self) -> str:
        return f"Memory calculator: {', '.join(self.models)}"

    @cached_property
    def tables(self) -> dict[str, Any]:
        """What the page keeps: the letters of the models, all formulas, and for each kind of step the moments that can be the fullest.

        A moment is its phase, its event, and the numbers of the formulas whose lines are alive then beside those that always are. `states` goes by
        kind of model, precision, optimizer and ZeRO level; `passes` by kind, precision, attention, checkpointing, ZeRO level, and whether there
        is more than one sequence.
        """
        kinds = list(dict.fromkeys(map(_kind, self.models.values())))
        formulas: dict[_Line, int] = {}

        def numbered(lines: Iterable[_Line]) -> list[int]:
            return [formulas.setdefault(line, len(formulas)) for line in lines]

        def told(moments: Iterable[_Moment]) -> list[list]:
            return [[phase, event, numbered(alive)] for phase, event, alive in moments]

        found = [
            _states(kind, *at) for kind in kinds for at in _every("precision", "optimizer", "zero")
        ]
        states = [[numbered(held), told(moments)] for held, moments in found]
        passes = [
            told(moments)
            for kind in kinds
            for at in _every("precision", "attention", "checkpointing", "zero")
            for moments in _passes(kind, *at)
        ]
        return {
            "models": {
                name: {
                    "kind": kinds.index(kind),
                    "sizes": dict(zip(SHAPE, model.letters(" ".join(SHAPE)), strict=True)),
                    "longest": None if kind.rope else model.seq_len,
                    "layers": None if kind.layers == peak.WALKED else kind.layers,
                    **{
                        name: getattr(kind, name) for name in ("heads", "groups", "grouped", "rope")
                    },
                }
                for name, model in self.models.items()
                for kind in [_kind(model)]
            },
            "parameters": [peak._text(dict(_parameters(kind))) for kind in kinds],
            "formulas": list(formulas),
            "states": states,
            "passes": passes,
        }

    def evaluate(self, **chosen: Any) -> peak.Peak:
        """The peak at one setting of the panel, in bytes, from the same formulas: what the page computes, computed in Python.

        `chosen` may have model, micro_batch, seq_len, devices, hardware; precision, optimizer, attention, checkpointing and zero by their labels; and
        letters of `SHAPE` that differ from the model's.
        """
        chosen = START | {"model": next(iter(self.models))} | chosen
        kind, devices = _kind(self.models[chosen["model"]]), chosen["devices"]
        letters = dict(
            zip(SHAPE, self.models[chosen["model"]].letters(" ".join(SHAPE)), strict=True)
        )
        letters |= {letter: chosen[letter] for letter in SHAPE if letter in chosen} | {
            "b": chosen["micro_batch"],
            "s": chosen["seq_len"],
        }
        letters["Ψ"] = _value(peak._text(dict(_parameters(kind))), letters)
        letters["P"] = -(-letters["Ψ"] // devices)
        zero = chosen["zero"] if devices > 1 else START["zero"]
        held, stepping = _states(kind, chosen["precision"], chosen["optimizer"], zero)
        moments = [
            *_passes(kind, chosen["precision"], chosen["attention"], chosen["checkpointing"], zero)[
                letters["b"] > 1
            ],
            *stepping,
        ]
        amounts = {
            line: _value(line[2], letters)
            for line in {*held, *(line for _, _, alive in moments for line in alive)}
        }
        totals = [sum(amounts[line] for line in held + alive) for _, _, alive in moments]
        phases = {
            phase: max(
                total for total, moment in zip(totals, moments, strict=True) if moment[0] == phase
            )
            for phase in peak.PHASES
        }
        phase, event, alive = moments[totals.index(max(totals))]
        lines = [
            Line(line[0], amounts[line], line[1], note=line[2])
            for line in held + alive
            if amounts[line]
        ]
        return peak.Peak(
            sorted(lines, key=lambda line: peak.COMPONENTS.index(line.component)),
            phase,
            event,
            phases,
            chosen["hardware"],
        )

    def _repr_html_(self) -> str:
        data = self.tables | {"shape": SHAPE, "components": peak.COMPONENTS, "sections": SECTIONS}
        packed = base64.b64encode(
            zlib.compress(json.dumps(data, ensure_ascii=False).encode(), 9)
        ).decode()
        first = next(iter(self.models.values()))
        tokens = min(START["seq_len"], first.seq_len)
        memory = {name: f"{Hardware.named(name).memory / units.GB:g}" for name in Hardware.names()}
        device = "H100"
        shape = "".join(_field(letter, f"{letter}, {what}", "") for letter, what in SHAPE.items())
        fields = [
            _choice("model", "model", dict.fromkeys(self.models), values=list(self.models)),
            _field("b", "micro-batch b", START["micro_batch"]),
            _field("s", "sequence length s", tokens),
            *(
                _choice(name, "ZeRO level" if name == "zero" else name, options)
                for name, options in CHOICES.items()
            ),
            _field("devices", "devices N", START["devices"]),
            _choice("device", "kind of device", memory, values=list(memory.values()), start=device),
            _field("room", "its memory in GB", memory[device]),
            f"<details><summary>Another shape of this model</summary><div>{shape}</div></details>",
        ]
        peak_at_start = self.evaluate(seq_len=tokens)
        return (
            '<div class="lu-calculator">\n<form aria-label="Settings of the memory calculator" autocomplete="off" data-lm-suppress-shortcuts="true" hidden>'
            f'{"".join(fields)}</form>\n<p class="lu-wrong" role="alert"></p>\n<div class="lu-result" role="group" aria-label="Result">'
            f"<p>At the start: {html.escape(peak_at_start.phase)}, after {html.escape(peak_at_start.event)}. Run the cell, or trust the notebook, to set "
            f"the sizes.</p>{peak_at_start._repr_html_()}</div>\n<style>{_STYLE}</style>\n"
            f'<script type="application/json">"{packed}"</script>\n<script>{_SCRIPT}</script>\n</div>'
        )


def _field(name: str, label: str, start: Any) -> str:
    return f'<label>{html.escape(label)} <input name="{name}" inputmode="decimal" value="{start}"></label>'


def _choice(
    name: str,
    label: str,
    options: Iterable[str],
    values: Sequence[Any] | None = None,
    start: str = "",
) -> str:
    places = enumerate(options) if values is None else zip(values, options, strict=True)
    told = "".join(
        f'<option value="{html.escape(str(value))}"{" selected" * (text == start)}>{html.escape(text)}</option>'
        for value, text in places
    )
    return f'<label>{label} <select name="{name}">{told}</select></label>'


_Line = tuple[str, str, str]  # name, component, formula
_Moment = tuple[str, str, tuple[_Line, ...]]  # phase, event, what is alive beside what always is


def _kind(model: ModelConfig) -> walk.Kind:
    return peak._kind(model, _ONE, peak.ALONE)


def _step(kind: walk.Kind, *, precision: str, **options: Any) -> Any:
    return peak._symbolic(kind._replace(half=WIDTHS[precision], **options))


def _every(*names: str) -> Iterable[tuple[str, ...]]:
    """All combinations of the labels of some choices, the last one fastest."""
    return itertools.product(*(CHOICES[name] for name in names))


@cache
def _states(
    kind: walk.Kind, precision: str, optimizer: str, zero: str
) -> tuple[tuple[_Line, ...], list[_Moment]]:
    """What is alive all the time, and the moments of the optimizer's step."""
    step = _step(kind, **PRECISION[precision], **OPTIMIZER[optimizer], **ZERO[zero])
    return _lines(step, {1}, held=True)[0][2], _moments(step, ("optimizer",))


@cache
def _passes(
    kind: walk.Kind, precision: str, attention: str, checkpointing: str, zero: str
) -> tuple[list[_Moment], list[_Moment]]:
    """The moments of the forward and the backward pass, for one sequence and for several."""
    options = (
        PRECISION[precision] | ATTENTION[attention] | CHECKPOINTING[checkpointing] | ZERO[zero]
    )
    one, several = (_step(kind, batch=batch, optimizer="sgd", **options) for batch in (False, True))
    moments = _moments(one, ("forward", "backward"))
    return moments, moments if _story(one) == _story(several) else _moments(
        several, ("forward", "backward")
    )


def _story(step: Any) -> list:
    """What tells one walk from another."""
    lives = [
        (
            life.name,
            life.component,
            life.birth,
            life.death,
            getattr(life.nbytes, "terms", life.nbytes),
        )
        for life in step.lives
    ]
    return [step.moments, lives]


@cache
def _parameters(kind: walk.Kind) -> tuple[tuple[peak.Places, int], ...]:
    """The number of parameters of a kind of model: products of letters and their factors."""
    size = {letter: Polynomial.letter(letter) for letter in peak.LETTERS}
    layers = size["L"] if kind.layers == peak.WALKED else kind.layers
    return tuple(
        peak._factors(
            (
                sum(walk.layer(size, kind).values()) * layers
                + sum(walk.around(size, kind).values())
            ).terms
        ).items()
    )


def _lines(step: Any, at: set[int], *, held: bool = False) -> list[_Moment]:
    """The moments `at`, with what is `held` from beginning to end, or with all else."""
    found = []
    whole = _parameters(step.kind)
    for i, alive in step.held(
        lambda life: (life.birth == 0) == held and (life.name, life.component), at
    ):
        lines: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for (line, term), factor in alive.items():
            if line:
                lines[line][term] = factor
        texts = {line: _text(tuple(terms.items()), whole) for line, terms in lines.items()}
        found.append(
            (*step.moments[i], tuple((*line, text) for line, text in texts.items() if text))
        )
    return found


@cache
def _text(terms: tuple[tuple[str, int], ...], whole: tuple[tuple[peak.Places, int], ...]) -> str:
    """A formula for the reader; a multiple of all parameters is so many Ψ."""
    factors = peak._factors(dict(terms))
    times = next(iter(factors.values()), 0) // whole[0][1]
    return (
        f"{times}Ψ"
        if times and factors == {places: times * factor for places, factor in whole}
        else peak._text(factors)
    )


def _moments(step: Any, phases: Iterable[str]) -> list[_Moment]:
    """The moments that can be the fullest of their phase, in order."""
    totals = {
        i: {term: factor for (_, term), factor in alive.items()}
        for i, alive in step.held(lambda life: None)
    }
    kept = [
        i
        for phase in phases
        for i in _fullest([j for j in totals if step.moments[j][0] == phase], totals, step.moments)
    ]
    return _lines(step, set(kept))


def _fullest(
    places: Sequence[int],
    totals: Mapping[int, Mapping[str, int]],
    moments: Sequence[tuple[str, str]],
) -> list[int]:
    """Those of the `places` that can be the fullest for some letters: no other has as much of every product, and none lies on a line between others."""
    terms = {
        term: column
        for column, term in enumerate(dict.fromkeys(term for i in places for term in totals[i]))
    }
    factors = np.zeros((len(places), len(terms)), dtype=np.int64)
    for row, i in enumerate(places):
        for term, factor in totals[i].items():
            factors[row, terms[term]] = factor
    kept = np.array(places)
    # Most lie below a neighbor: what makes something is followed by more, what frees something follows it.
    for way in (-1, 1):
        neighbor = np.roll(factors, way, axis=0)
        below = (factors <= neighbor).all(1) & (factors != neighbor).any(1)
        kept, factors = kept[~below], factors[~below]
    covered = (factors[:, None] <= factors).all(2)
    covered &= ~(covered.T & np.triu(np.ones_like(covered)))  # of equals the first stays
    left = kept[~covered.any(1)].tolist()
    # The same moment of several layers: the first or the last is the fullest, for each adds as much as the one before.
    between = {
        middle
        for first, middle in itertools.combinations(left, 2)
        if (last := 2 * middle - first) in totals and moments[first] == moments[middle] == moments[last]
        and last in left and _in_line(_minus(totals[middle], totals[first]), _minus(totals[last], totals[middle]))
    }  # fmt: skip
    return [i for i in left if i not in between]


def _minus(terms: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    whole = {
        term: terms.get(term, 0) - others.get(term, 0) for term in terms.keys() | others.keys()
    }
    return {term: factor for term, factor in whole.items() if factor}


def _in_line(one: Mapping[str, int], two: Mapping[str, int]) -> bool:
    """Whether two differences go the same way: equal, or one of them over the M layers that are not walked and one more."""
    return one == two or _across(one) == two or one == _across(two)


def _across(terms: Mapping[str, int]) -> dict[str, int]:
    return _minus(terms, {"M" + term: -factor for term, factor in terms.items()})


def _value(formula: str, letters: Mapping[str, int]) -> int:
    total = 0
    for sign, factor, product in _TERM.findall(formula):
        amount = int(sign.replace("−", "-") + factor)
        for letter, power in _POWER.findall(product):
            amount *= letters[letter] ** {"": 1, "²": 2, "³": 3}[power]
        total += amount
    return total


_TERM = re.compile(r"(−?) ?(\d+)([^ ]*)")
_POWER = re.compile(r"([A-Za-zΨ])([²³]?)")
