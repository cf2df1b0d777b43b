"""The memory calculator: the peak of a training step for any sizes, on a page that needs no kernel.

For one kind of step every line of the ledger, at every moment, is a polynomial in the letters of
the notation. So the page holds the formulas of the moments that can be the fullest
(`memory.formulas`), and puts numbers into them.
"""

import base64
import functools
import html
import itertools
import json
import math
import operator
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labutils import anatomy, predict, units
from labutils.config import MOMENTS, Hardware, Mesh, ModelConfig, TrainConfig
from labutils.ledger import COMPONENTS, Ledger, Line
from labutils.memory import formulas, moments
from labutils.teach import widgets

_SCRIPT, _STYLE = (
    Path(__file__).with_suffix(suffix).read_text("utf-8") for suffix in (".js", ".css")
)

# What a person chooses beside the sizes: a label, and what it means for a TrainConfig.
PRECISION: dict[str, dict[str, Any]] = {
    "bf16, fp32 master weights: 16 bytes with Adam": dict(precision="bf16"),
    "bf16, fp32 masters and gradients: 18 bytes": dict(precision="bf16", fp32_gradients="only"),
    "bf16, fp32 masters, gradients in both: 20 bytes": dict(precision="bf16", fp32_gradients=True),
    "bf16 autocast over fp32: 16 bytes, and 2 of copies": dict(precision="bf16", autocast=True),
    "fp32: 16 bytes": dict(precision="fp32"),
}
OPTIMIZER = {
    "AdamW, foreach": dict(optimizer="adamw", stepping="foreach"),
    "AdamW, fused": dict(optimizer="adamw", stepping="fused"),
    "AdamW, weight by weight": dict(optimizer="adamw", stepping="loop"),
    "SGD with momentum": dict(optimizer="momentum"),
    "SGD": dict(optimizer="sgd"),
}
CORES = {"fused": dict(attention="sdpa"), "plain": dict(attention="plain")}
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
CHOICES: dict[str, Mapping[str, dict[str, Any]]] = {
    "precision": PRECISION,
    "optimizer": OPTIMIZER,
    "attention": CORES,
    "checkpointing": CHECKPOINTING,
    "zero": ZERO,
}
START: dict[str, Any] = {"micro_batch": 1, "seq_len": 4096, "devices": 1} | {
    name: next(iter(options)) for name, options in CHOICES.items()
}
SHAPE = {  # the letters that a model brings along
    "L": "number of layers", "h": "width of the model", "a": "number of heads",
    "g": "number of key–value heads", "d": "width of a head", "f": "feed-forward width",
    "v": "vocabulary size",
}  # fmt: skip
DEGREES = (  # fields of the page: name, label, start
    ("pp", "ranks of a pipeline (pp)", 1), ("stage", "the rank's place on it, from 0", 0),
    ("cp", "ranks of a sequence (cp)", 1), ("tp", "ranks of a layer (tp)", 1),
    ("m", "micro-batches of a rank", 16), ("chunks", "its chunks, if interleaved", 2),
)  # fmt: skip
PIPELINES = {  # of which the page has a formula, and what each is for a TrainConfig
    "1F1B": "one_f_one_b", "GPipe": "gpipe", "interleaved": "interleaved",
}  # fmt: skip
ONE = TrainConfig(micro_batch=1, global_batch=1)
MASTERS = "master weights"
SECTIONS = {  # the headings of lab 03 under which each component is derived
    "weights": "How many parameters does a model have?",
    "gradients": "What do the model states take?",
    "optimizer": "What do the model states take?",
    "activations": "What does the forward pass keep?",
    "buffers": "When is memory fullest?",
}


class Calculator:
    """A panel that predicts the peak of a training step, for the models of `names` and `configs`;
    for all that the course knows if there are none.

    It evaluates what `memory.peak` evaluates, in the reader's browser. A step is one
    micro-batch. With ZeRO, where `predict` runs a rank dry, the page takes each parameter for a
    bucket that the devices divide, as `memory.moments.by_formula` says. With pp, cp or tp it says
    what the first rank of a place on the pipeline holds between the operations of a step, under a
    schedule of `PIPELINES`: `predict.states` and `predict.activations`, which know the others.

    >>> Calculator("gpt2", mine=ModelConfig.named("llama-2-7b"))
    Memory calculator: gpt2, mine

    Cost: nothing to speak of for the kinds of model (norm, feed-forward, positions, biases, tied,
    GQA) whose formulas are stored; about a minute for another, when it is first shown.
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
            moments.predictable(model, ONE)
        self.models = models
        self.kinds = {_kind(model): model for model in reversed(models.values())}

    def __repr__(self) -> str:
        return f"Memory calculator: {', '.join(self.models)}"

    @functools.cached_property
    def tables(self) -> dict[str, Any]:
        """What the page keeps: the letters of the models, all formulas, all moments that can be the
        fullest, each once, and the numbers of those of each kind of step.

        A moment is its phase, its event, and the numbers of the formulas whose lines are alive then
        beside those that always are. `states` goes by kind of model, precision, optimizer and ZeRO
        level; `passes` by kind, precision, attention, checkpointing, ZeRO level, and whether there
        is more than one sequence.
        """
        numbers: dict[_Line, int] = {}
        moments: dict[tuple[str, str, tuple[int, ...]], int] = {}

        def numbered(lines: Iterable[_Line]) -> tuple[int, ...]:
            return tuple(numbers.setdefault(line, len(numbers)) for line in lines)

        def told(found: Iterable[_Moment]) -> list[int]:
            each = [(phase, event, numbered(alive)) for phase, event, alive in found]
            return [moments.setdefault(moment, len(moments)) for moment in each]

        states: list[Any] = []
        passes: list[Any] = []
        for model in self.kinds.values():
            for at in _every("precision", "optimizer", "zero"):
                held, stepping = _states(model, *at)
                states.append([numbered(held), told(stepping)])
            for at in _every("precision", "attention", "checkpointing", "zero"):
                passes += map(told, _passes(model, *at))
        return {
            "models": {name: self._told(model) for name, model in self.models.items()},
            "parameters": [formulas.written(_parameters(model)) for model in self.kinds.values()],
            "formulas": list(numbers),
            "moments": list(moments),
            "states": states,
            "passes": passes,
            "inventories": [_inventory(model) for model in self.kinds.values()],
            "precisions": [
                {"half": train.half, "gradients": train.fp32_gradients}
                for train in (replace(ONE, **options) for options in PRECISION.values())
            ],
            "optimizers": [MOMENTS[options["optimizer"]] for options in OPTIMIZER.values()],
            "bucket": ONE.bucket_bytes,
        }

    def _told(self, model: ModelConfig) -> dict[str, Any]:
        """What the page knows of a model: its kind, its sizes, and which other sizes are of its
        kind."""
        kind = _kind(model)
        return {
            "kind": list(self.kinds).index(kind),
            "sizes": dict(zip(SHAPE, model.letters(" ".join(SHAPE)), strict=True)),
            "longest": None if model.positions == "rope" else model.seq_len,
            "layers": None if kind.layers == formulas.DEPTH else kind.layers,
            "rope": model.positions == "rope",
            "tied": model.tied,
            "dropout": model.dropout > 0,
            **{name: getattr(kind, name) for name in ("heads", "groups", "grouped")},
        }

    def evaluate(self, **chosen: Any) -> moments.Peak:
        """The peak at one setting of the panel, in bytes, from the same formulas: what the page
        computes, computed in Python.

        `chosen` may have model, micro_batch, seq_len, devices; precision, optimizer,
        attention, checkpointing and zero by their labels; and letters of `SHAPE` that differ from
        the model's.
        """
        chosen = START | {"model": next(iter(self.models))} | chosen
        model = self.models[chosen["model"]]
        letters = dict(zip(SHAPE, model.letters(" ".join(SHAPE)), strict=True))
        letters |= {letter: chosen[letter] for letter in SHAPE if letter in chosen}
        letters |= {"b": chosen["micro_batch"], "s": chosen["seq_len"], "N": chosen["devices"]}
        model = self.kinds[_kind(model)]
        parameters = formulas.written(_parameters(model))
        letters["Ψ"] = _value(parameters, letters)
        letters["P"] = _value(re.sub(r"(?= [+−]|$)", "/N", parameters), letters)
        zero = chosen["zero"] if letters["N"] > 1 else START["zero"]
        held, stepping = _states(model, chosen["precision"], chosen["optimizer"], zero)
        passes = _passes(
            model, chosen["precision"], chosen["attention"], chosen["checkpointing"], zero
        )
        phases: dict[str, int] = {}
        most = 0
        for phase, event, alive in [*passes[letters["b"] > 1], *stepping]:
            total = sum(_value(formula, letters) for _, _, formula in held + alive)
            phases[phase] = max(phases.get(phase, 0), total)
            if total > most:
                most, top = total, (phase, event, held + alive)
        lines = []
        for name, component, formula in top[2]:
            if amount := _value(formula, letters):
                lines.append(Line(name, amount, component, note=formula))
        lines.sort(key=lambda line: moments.COMPONENTS.index(line.component))
        return moments.Peak(tuple(lines), *top[:2], phases)

    def _repr_html_(self) -> str:
        constants = {"shape": SHAPE, "components": moments.COMPONENTS, "sections": SECTIONS}
        data = self.tables | constants
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        first = next(iter(self.models.values()))
        tokens = min(START["seq_len"], first.seq_len)
        memory = {name: f"{Hardware.named(name).memory / units.GB:g}" for name in Hardware.names()}
        device = "H100"
        shape = "".join(_field(letter, f"{letter}, {what}", "") for letter, what in SHAPE.items())
        axes = "".join(_field(name, label, start) for name, label, start in DEGREES)
        axes += _choice("schedule", "schedule", PIPELINES)
        axes += _choice("sequence", "sequence parallelism", ("no", "yes"))
        fields = [
            _choice("model", "model", dict.fromkeys(self.models), values=list(self.models)),
            _field("b", "micro-batch b", START["micro_batch"]),
            _field("s", "sequence length s", tokens),
            *(
                _choice(name, "ZeRO level" if name == "zero" else name, options)
                for name, options in CHOICES.items()
            ),
            _field("devices", "devices N (dp)", START["devices"]),
            _choice("device", "kind of device", memory, values=list(memory.values()), start=device),
            _field("room", "its memory in GB", memory[device]),
            f"<details><summary>More axes: pp, cp, tp</summary><div>{axes}</div></details>",
            f"<details><summary>Another shape of this model</summary><div>{shape}</div></details>",
        ]
        first_peak = self.evaluate(seq_len=tokens)
        return (
            '<div class="lu-calculator">\n<form aria-label="Settings of the memory calculator" '
            'autocomplete="off" data-lm-suppress-shortcuts="true" hidden>'
            f'{"".join(fields)}</form>\n<p class="lu-wrong" role="alert"></p>\n'
            '<div class="lu-result" role="group" aria-label="Result">'
            f"<p>At the start: {first_peak.phase}, after {html.escape(first_peak.event)}. "
            "Run the cell, or trust the notebook, to set the sizes.</p>"
            f"{first_peak._repr_html_()}</div>\n<style>{_STYLE}</style>\n"
            f'<script type="application/json">"{packed}"</script>\n'
            f"<script>{_SCRIPT}</script>\n</div>"
        )


def ranks(
    *names: str, seq_len: int = 8192, micro_batches: int = 16, **axes: list[int]
) -> widgets.Panel:
    """A panel that says what rank 0 of a mesh holds between the operations of a step, at each level
    of ZeRO, in bf16 with gradients and master weights in fp32: `predict.states` and
    `predict.activations`.

    names: the models to choose from, trained with AdamW in micro-batches of one sequence
    seq_len: tokens of a sequence
    micro_batches: how many a rank runs in a step
    axes: the degrees to choose from, such as `tp=[1, 8]`

    What experts keep depends on the routing, and is left out. Temporaries come on top: a dry run
    (`predict.peak`) has them.
    """
    models = {name: replace(ModelConfig.named(name), seq_len=seq_len) for name in names}

    def held(model: str, recomputation: str, **degrees: int) -> str:
        return _bars(models[model], Mesh(**degrees), recomputation, micro_batches)

    controls: dict[str, list[Any]] = {"model": list(models), **axes}
    controls["recomputation"] = list(CHECKPOINTING)
    states = math.prod(len(choices) for choices in controls.values())
    return widgets.explore(held, states=states, **controls)


def _bars(model: ModelConfig, mesh: Mesh, recomputation: str, micro_batches: int) -> str:
    """A bar for each level of ZeRO, or why there is none."""
    room = Hardware.named("H100").memory
    rows, levels = [], dict[int, Ledger]()
    for zero in range(4 if mesh.dp * mesh.cp > 1 else 1):
        try:
            levels[zero] = between(model, mesh, zero, recomputation, micro_batches)
        except ValueError as error:
            rows.append(f"<p>Not possible: {html.escape(str(error))}.</p>")
    most = max([room, *(held.total for held in levels.values())])  # one scale for all
    rows += [_bar(zero, held, room, most) for zero, held in levels.items()]
    chip = '<span class="lu-key"><span class="lu-chip lu-{0}"></span>{0}</span>&emsp;'
    keys = "".join(map(chip.format, COMPONENTS))
    what = "" if model.num_experts == 1 else " Activations depend on the routing: not drawn."
    of = f"Rank 0 of {mesh.size:,}" + ", 1F1B" * (mesh.pp > 1)
    said = f"{of}; the dashed line is an H100's memory.{what}"
    shown = f"{''.join(dict.fromkeys(rows))}<p>{keys}<br>{said}</p>"
    return f'<div class="lu-calculator"><style>{_STYLE}</style>{shown}</div>'


def _bar(zero: int, held: Ledger, room: int, most: int) -> str:
    by = Counter(held.by("component"))
    told = ", ".join(f"{part} {units.text(by[part])}" for part in COMPONENTS if by[part])
    parts = "".join(
        f'<span class="lu-{part}" style="width:{100 * by[part] / most:.2f}%"></span>'
        for part in COMPONENTS
    )
    limit = f'<i style="left:{100 * room / most:.2f}%"></i>'
    bar = f'<div class="lu-bar" role="img" aria-label="{told}">{parts}{limit}</div>'
    return f'<div class="lu-phase">ZeRO {zero}{bar}<span>{units.text(held.total)}</span></div>'


def between(
    model: ModelConfig, mesh: Mesh, zero: int, recomputation: str, micro_batches: int
) -> Ledger:
    """What a bar of `ranks` stands for: bytes of rank 0 between the operations of a step.

    Raises ValueError for what does not go together.
    """
    train = TrainConfig(
        micro_batch=1, global_batch=micro_batches * mesh.dp, fp32_gradients="only", zero=zero,
        attention="ring" if mesh.cp > 1 else "sdpa", sequence=mesh.tp > 1,
    )  # fmt: skip
    found = _rank_states(model, train, mesh)
    if model.num_experts > 1:
        return found
    return found + _rank_keeps(model, replace(train, checkpointing=recomputation), mesh)


# The figure is asked for the same many times: states know nothing of recomputation.
_rank_states = functools.lru_cache(maxsize=4096)(predict.states)
_rank_keeps = functools.lru_cache(maxsize=4096)(predict.activations)


def _field(name: str, label: str, start: Any) -> str:
    field = f'<input name="{name}" inputmode="decimal" value="{start}">'
    return f"<label>{html.escape(label)} {field}</label>"


def _choice(
    name: str,
    label: str,
    options: Iterable[str],
    values: Sequence[Any] | None = None,
    start: str = "",
) -> str:
    told = ""
    for value, text in enumerate(options) if values is None else zip(values, options, strict=True):
        chosen = " selected" * (text == start)
        told += f'<option value="{html.escape(str(value))}"{chosen}>{html.escape(text)}</option>'
    return f'<label>{label} <select name="{name}">{told}</select></label>'


_Line = tuple[str, str, str]  # name, component, formula
_Moment = tuple[str, str, tuple[_Line, ...]]  # phase, event, what is alive beside what always is


def _kind(model: ModelConfig, batch: int = 1, **options: Any) -> formulas.Kind:
    train = TrainConfig(micro_batch=batch, global_batch=2 * batch, **options)
    return formulas.kind(model, train, Mesh(dp=2))


def _every(*names: str) -> Iterable[tuple[str, ...]]:
    """All combinations of the labels of some choices, the last one fastest."""
    return itertools.product(*(CHOICES[name] for name in names))


def every_kind(model: ModelConfig) -> Iterable[formulas.Kind]:
    """The kinds of step that the panel shows for a model of this kind."""
    for at in _every("precision", "optimizer", "zero"):
        yield _stepping(model, *at)
    for at in _every("precision", "attention", "checkpointing", "zero"):
        yield from (_passing(model, batch, *at) for batch in (1, 2))


def _stepping(model: ModelConfig, precision: str, optimizer: str, zero: str) -> formulas.Kind:
    return _kind(model, 2, **PRECISION[precision], **OPTIMIZER[optimizer], **ZERO[zero])


def _passing(model: ModelConfig, batch: int, *at: str) -> formulas.Kind:
    """A step whose optimizer keeps nothing and does little, for its forward and backward passes."""
    names = ("precision", "attention", "checkpointing", "zero")
    chosen = [CHOICES[name][label] for name, label in zip(names, at, strict=True)]
    options: dict = functools.reduce(operator.or_, chosen)
    return _kind(model, batch, optimizer="sgd", stepping="foreach", **options)


@functools.cache
def _states(model: ModelConfig, *at: str) -> tuple[tuple[_Line, ...], list[_Moment]]:
    """What the optimizer keeps from step to step, and the moments of its own step."""
    forms = [form for form in formulas.fullest(_stepping(model, *at)) if form.phase == "optimizer"]
    kept = {line for line in forms[0].lines if line[1] == "optimizer" and line[0] != MASTERS}
    held = _lines({line: forms[0].lines[line] for line in forms[0].lines if line in kept}, model)
    return held, [_moment(form, model, kept) for form in forms]


@functools.cache
def _passes(model: ModelConfig, *at: str) -> tuple[list[_Moment], ...]:
    """The moments of the forward and the backward pass, for one sequence and for several."""
    found = []
    for batch in (1, 2):
        forms = formulas.fullest(_passing(model, batch, *at))
        found.append([_moment(form, model) for form in forms if form.phase != "optimizer"])
    return tuple(found)


@functools.cache
def _inventory(model: ModelConfig) -> dict[str, Any]:
    """What the ranks of a mesh share out, by place, at the first end, in each layer or at the last
    end: the size of each parameter, in order, and whether it is tied; what each part keeps for the
    backward pass; multiplications of a layer and of the head for a token."""
    weights: list[list[Any]] = []
    products: dict[str, Counter[str]] = defaultdict(Counter)
    for part in anatomy.parts(model):
        place, tied = _place(part.name), model.tied and part.name == "tokens"
        for factor, letters in map(_product, filter(None, (part.weight, part.bias))):
            weights.append([place, f"{factor}{letters}", tied])
        if part.products:
            factor, letters = _product(part.products)
            products[place][letters] += factor
    if model.tied:
        weights.append(["last", weights[0][1], True])
    options = [[c | plan for plan in CHECKPOINTING.values()] for c in CORES.values()]
    kept = [[[_kept(model, width, **o) for o in core] for core in options] for width in (2, 4)]
    flops = {"layer": _sum(products["layers"]), "head": _sum(products["last"])}
    return {"weights": weights, "kept": kept, **flops}


def _kept(model: ModelConfig, width: int, **options: str) -> list[tuple[str, str, bool, str]]:
    """What autograd keeps, in bytes, by place, by part, and by whether one head alone would do
    without it. A rank of cp has c tokens, one of tp t of these where tp divides nothing else."""
    how = anatomy.Policy(compute=width, stream=width, **options)
    one = replace(model, num_layers=1, d_head=model.d_head)
    always = set(anatomy.kept(replace(one, num_heads=1, num_kv_heads=1), how))
    found: dict[tuple[str, str, bool], Counter[str]] = defaultdict(Counter)
    for name, kept in anatomy.kept(one, how):
        if kept.name in ("tokens", "targets", "count"):  # the batch, and what the script counts
            continue
        shared = name != "outside" and not set(kept.dims) & set(anatomy.SPLITS["tp"])
        factor, letters = _product(kept.dims.replace("s", "t" if shared else "c"))
        part = re.sub(r"^blocks\.0\.?", "", name) or "residual stream"
        found[_place(name), part, (name, kept) not in always][letters] += factor * kept.itemsize
    return [(*key, _sum(terms)) for key, terms in found.items()]


def _place(name: str) -> str:
    if name.startswith("blocks"):
        return "layers"
    return "last" if name in ("norm", "head", "outside") else "first"


def _product(dims: str) -> tuple[int, str]:
    """A shape as a factor and letters: 2 and "bsad" of "2 b s ad"."""
    digits, letters = re.findall(r"\d", dims), re.sub(r"[\d ]", "", dims)
    return math.prod(map(int, digits)), letters.replace("cc", "c²")


def _sum(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{factor}{letters}" for letters, factor in terms.items())


@functools.cache
def _parameters(model: ModelConfig) -> formulas.Terms:
    """The number of parameters of a kind of model: products of letters, and how many tensors are of
    that size."""
    kind = _kind(model, 2, precision="fp32", optimizer="sgd", stepping="foreach")
    weights = formulas.fullest(kind)[0].lines["weights", "weights"]
    return {product: factor // 4 for product, factor in weights.items()}


def _moment(
    form: formulas.Form, model: ModelConfig, kept: Iterable[tuple[str, str]] = ()
) -> _Moment:
    alive = {line: terms for line, terms in form.lines.items() if line not in kept}
    return form.phase, form.event, _lines(alive, model)


def _lines(alive: formulas.Lines, model: ModelConfig) -> tuple[_Line, ...]:
    whole = _parameters(model)
    return tuple((*line, _text(terms, whole)) for line, terms in alive.items())


def _text(terms: formulas.Terms, whole: formulas.Terms) -> str:
    """A formula for the reader; a multiple of all parameters is so many Ψ, and of a device's share
    of each of them so many P."""
    shares = {f"{product}/": count for product, count in whole.items()}
    for letter, parts in (("Ψ", whole), ("P", shares)):
        product, count = next(iter(parts.items()))
        times = terms.get(product, 0) // count
        if times > 0 and terms == {product: times * count for product, count in parts.items()}:
            return f"{times}{letter}"
    return formulas.written(terms)


@functools.cache
def _parsed(formula: str) -> list[tuple[int, str, bool]]:
    """The factor of each product, its letters, and whether it is a device's share."""
    found = []
    for sign, factor, letters, share in _TERM.findall(formula):
        product = "".join(one * _POWERS[power] for one, power in _POWER.findall(letters))
        found.append((int(sign.replace("−", "-") + factor), product, bool(share)))
    return found


def _value(formula: str, letters: Mapping[str, int]) -> int:
    total = 0
    for amount, product, share in _parsed(formula):
        size = 1
        for letter in product:
            if letter == "L":
                amount *= letters[letter]
            else:
                size *= letters[letter]
        total += amount * (-(-size // letters["N"]) if share else size)
    return total


_TERM = re.compile(r"(−?) ?(\d+)([^ /]*)(/N)?")
_POWER = re.compile(r"([A-Za-zΨ])([²³]?)")
_POWERS = {"": 1, "²": 2, "³": 3}
