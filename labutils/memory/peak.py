"""The fullest moment of a training step: which phase it is in, what is alive then, and whether a device has room for it.

One walk through a *kind* of model, with letters for its sizes, gives every moment of every such model as a polynomial. What can never be
the fullest moment is thrown away, and predicting a model is evaluating what is left.
"""

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from labutils.config import Hardware, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory.sharding import INPUT, ROOT, Units
from labutils.memory.states import FP32, INDEX, WIDTHS, states, zero_level
from labutils.memory.tape import Life, Parameter, Polynomial, Size, Tensor
from labutils.memory.walk import CASTS, Kind, Walk, Weights, around, layer
from labutils.timeline import History, Moment

PHASES = ("forward", "backward", "optimizer")
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buffers")
WALKED = (
    4  # layers that stand for all: the first two, whose difference is one layer's, and the last two
)
SUMMED = 3  # micro-batches that stand for all: from the third on, a step goes on as it was
SURROUNDING_INPUT = {
    "tokens",
    "positions",
}  # of the weights around the layers, those before the first
ALONE = Mesh()


class Peak(Ledger):
    """What is alive at the fullest moment of a step, and where in the step that is.

    `phase` is "forward", "backward" or "optimizer", `event` the operation after which it happens, `phases` the peak of each phase in bytes.
    """

    phase: str
    event: str
    phases: dict[str, int]
    hardware: Hardware | None

    def __init__(
        self, lines: Any, phase: str, event: str, phases: dict[str, int], hardware: Hardware | None
    ) -> None:
        super().__init__(lines)
        for name, value in {
            "phase": phase,
            "event": event,
            "phases": phases,
            "hardware": hardware,
        }.items():
            object.__setattr__(self, name, value)

    @property
    def spare(self) -> int:
        """Bytes of the hardware that are left at the peak; negative where it does not fit."""
        return self._device.memory - self.total

    @property
    def fits(self) -> bool:
        """Whether the hardware holds the peak. Not counted: what the driver, the libraries and the allocator's rounding take."""
        return self.spare >= 0

    @property
    def fails_in(self) -> str | None:
        """The first phase that needs more than the hardware has, or None."""
        return next(
            (phase for phase, amount in self.phases.items() if amount > self._device.memory), None
        )

    @property
    def _device(self) -> Hardware:
        if self.hardware is None:
            raise ValueError(
                'this prediction knows no device: memory.predict(model, train, hardware=Hardware.named("H100"))'
            )
        return self.hardware


def predict(
    model: ModelConfig, train: TrainConfig, *, mesh: Mesh = ALONE, hardware: Hardware | None = None
) -> Peak:
    """Bytes alive at the fullest moment of a training step, temporaries included; the note of each line is its formula.

    A step is `loss(x, y).backward()` for each micro-batch, `optimizer.step()` and `zero_grad()`, with the optimizer's state there from the
    start. Exact for `model.GPT` on a CPU as `measure.history` sees it.

    With ZeRO, as in `zero`: gradients have their place from step to step, whole at level 1, a rank's share from level 2. There a gradient goes
    through the bucket of its unit (a layer, or what surrounds the layers), of which one fills while one is reduced. At level 3 the weights of
    the root, of the unit that computes and of the next one are gathered. The optimizer steps the whole share at once. Padding is counted as in
    `model_states`: once, not for each unit.

    >>> peak = predict(ModelConfig.named("gpt2-xl"), TrainConfig(micro_batch=1, global_batch=1), hardware=Hardware.named("H100"))
    >>> peak.phase, peak.fits
    ('optimizer', True)

    Cost: about 0.2 ms; the first model of its kind 50 ms, with several micro-batches 200 ms.
    Source: the order of operations is PyTorch's own, read off its dispatcher; a test compares every one of them.
    """
    _check(model, train, mesh, hardware)
    kind, values = _kind(model, train, mesh), _values(model, train, mesh)
    plan = _plan(kind)
    worth = [_worth(places, values) for places in plan.products]
    phases, fullest = {}, {}
    for phase, forms in plan.phases.items():
        fullest[phase] = max(forms, key=lambda form: sum(map(operator.mul, form.total, worth)))
        phases[phase] = sum(map(operator.mul, fullest[phase].total, worth))
    top = fullest[max(phases, key=phases.__getitem__)]
    lines = []
    for name, component, factors in _lines(kind, top.moment):
        amount = sum(factor * _worth(places, values) for places, factor in factors.items())
        if amount:
            lines.append(Line(name, amount, component=component, note=_text(factors)))
    return Peak(lines, top.phase, top.event, phases, hardware)


def peak_bytes(model: ModelConfig, train: TrainConfig, mesh: Mesh = ALONE) -> int:
    """Bytes alive at the fullest moment of a training step: the total of `predict` alone, for sweeps over many configurations."""
    _check(model, train, mesh)
    values = _values(model, train, mesh)
    plan = _plan(_kind(model, train, mesh))
    worth = [_worth(places, values) for places in plan.products]
    return max(sum(map(operator.mul, total, worth)) for total in plan.candidates)


def formula(model: ModelConfig, train: TrainConfig, mesh: Mesh = ALONE) -> str:
    """The peak of this model as a sum of products of letters, in bytes: m is the number of micro-batches, P that of numbers in a rank's share.

    >>> formula(ModelConfig.named("gpt2"), TrainConfig(micro_batch=64, global_batch=64, precision="fp32", optimizer="sgd")).split(" + ")[:3]
    ['4Lbas²', '8Lbasd', '8Lbsgd']
    """
    _check(model, train, mesh)
    values = _values(model, train, mesh)
    plan = _plan(_kind(model, train, mesh))
    worth = [_worth(places, values) for places in plan.products]
    total = max(plan.candidates, key=lambda total: sum(map(operator.mul, total, worth)))
    return _text(
        {
            places: factor
            for places, factor in sorted(
                zip(plan.products, total, strict=True), key=lambda pair: (-len(pair[0]), pair[0])
            )
            if factor
        }
    )


def history(model: ModelConfig, train: TrainConfig, mesh: Mesh = ALONE) -> History:
    """Bytes alive after every operation of a training step, by component and by phase: what `measure.history` finds, predicted."""
    _check(model, train, mesh)
    letters = _letters(model, train, mesh)
    step = _Step(
        _kind(model, train, mesh)._replace(layers=letters["L"], micro_batches=letters["m"]),
        letters,
        letters["m"],
    )
    held = dict.fromkeys(COMPONENTS, 0)
    moments = []
    for (phase, event), changes in zip(step.moments, step.changes(), strict=True):
        for life, sign in changes:
            held[life.component] += sign * life.nbytes
        moments.append(
            Moment(
                phase,
                event,
                Ledger(Line(name, amount, component=name) for name, amount in held.items()),
            )
        )
    return History(moments)


def _check(
    model: ModelConfig, train: TrainConfig, mesh: Mesh, hardware: Hardware | None = None
) -> None:
    given = (model, ModelConfig), (train, TrainConfig), (mesh, Mesh), (hardware, Hardware | None)
    for value, wanted in given:
        if not isinstance(value, wanted):
            name = getattr(wanted, "__name__", "Hardware")
            raise TypeError(
                f"memory.predict takes a {name} here, got {value!r}: build one, or take {name}.named(…) where there is one"
            )
    zero_level(train, mesh)
    if model.num_experts > 1:
        raise ValueError(
            f"num_experts={model.num_experts}: how much an expert holds at a moment depends on what the router chooses, so there is no formula for the peak; "
            "memory.model_states and memory.activations are exact for any choice"
        )
    if model.positions == "rope" and model.d_head % 2:
        raise ValueError(
            f"d_head={model.d_head} is odd: RoPE turns pairs of numbers, so give the heads an even width"
        )
    train.accumulation(mesh.dp)


def _kind(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Kind:
    """Everything that decides which operations run. A size of 1 may: with one head or one token a copy becomes a view."""
    return Kind(
        half=WIDTHS[train.precision], autocast=train.autocast, dropout=bool(model.dropout), norm=model.norm, rope=model.positions == "rope", ffn=model.ffn,
        bias=model.bias, tied=model.tied, attention=train.attention, checkpointing=train.checkpointing, tokens=model.seq_len > 1,
        batch=train.micro_batch > 1, heads=model.num_heads > 1, groups=model.num_kv_heads > 1, grouped=model.num_heads != model.num_kv_heads,
        layers=min(model.num_layers, WALKED), optimizer=train.optimizer, stepping=train.stepping, fp32_gradients=train.fp32_gradients,
        micro_batches=min(train.accumulation(mesh.dp), SUMMED), zero=zero_level(train, mesh),
    )  # fmt: skip


LETTERS = "LbashgdfvmP"
# What covers another moment is no less full at any sizes, such as these: all ones, and one letter large at a time.
SAMPLES = [
    {letter: 1 + 99 * (letter == large) for letter in f"M{LETTERS}"} for large in f" M{LETTERS}"
]


def _letters(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> dict[str, int]:
    sizes = dict(zip("Lashgdfv", model.letters("L a s h g d f v"), strict=True))
    return sizes | {
        "b": train.micro_batch,
        "m": train.accumulation(mesh.dp),
        "P": -(-model.num_params // mesh.dp),
    }


def _values(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> tuple[int, ...]:
    letters = _letters(model, train, mesh)
    return tuple(letters[letter] for letter in LETTERS)


Places = tuple[int, ...]  # of the letters of a product, in LETTERS
Terms = dict[str, int]  # letters of a product and its factor


class Form(NamedTuple):
    """A moment that may be the fullest, its total, and where in the walk it is."""

    phase: str
    event: str
    total: tuple[int, ...]
    moment: int


class Plan(NamedTuple):
    """What is left of a walk: moments that may be the fullest of their phase, each a row of factors over the same products of letters."""

    products: tuple[Places, ...]
    phases: dict[str, list[Form]]
    candidates: list[tuple[int, ...]]  # totals of those that may be the fullest of all


@functools.lru_cache(maxsize=4096)
def _plan(kind: Kind) -> Plan:
    step = _symbolic(kind)
    totals = {
        i: {term: factor for (_, term), factor in held.items()}
        for i, held in step.held(lambda life: None)
    }
    fronts = {
        phase: _front([i for i in totals if step.moments[i][0] == phase], totals)
        for phase in PHASES
    }
    overall = _front(sorted(itertools.chain(*fronts.values())), totals)
    factors = {i: _factors(totals[i]) for front in fronts.values() for i in front}
    products = tuple(dict.fromkeys(places for found in factors.values() for places in found))
    rows = {i: tuple(found.get(places, 0) for places in products) for i, found in factors.items()}
    phases = {
        phase: [Form(*step.moments[i], rows[i], i) for i in front]
        for phase, front in fronts.items()
    }
    return Plan(products, phases, [rows[i] for i in overall])


@functools.lru_cache(maxsize=4096)
def _lines(kind: Kind, moment: int) -> list[tuple[str, str, dict[Places, int]]]:
    """What is alive at a moment: name, component, factors of the products of letters."""
    ((_, held),) = _symbolic(kind).held(lambda life: (life.name, life.component), {moment})
    lines: dict[tuple[str, str], Terms] = defaultdict(dict)
    for (group, term), factor in held.items():
        lines[group][term] = factor
    ordered = sorted(lines.items(), key=lambda line: COMPONENTS.index(line[0][1]))
    return [
        (name, component, factors)
        for (name, component), terms in ordered
        if (factors := _factors(terms))
    ]


def _symbolic(kind: Kind) -> "_Step":
    letters: dict[str, Size] = {letter: Polynomial.letter(letter) for letter in LETTERS}
    letters["L"] = Polynomial({"M": 1, "": WALKED}) if kind.layers == WALKED else kind.layers
    return _Step(kind, letters, letters["m"] if kind.micro_batches > 1 else 1)


def _front(moments: list[int], totals: dict[int, Terms]) -> list[int]:
    """The moments that may be the fullest, in order: of those that another covers none is left, of equal ones the first."""
    worth = {
        term: [math.prod(map(sizes.__getitem__, term)) for sizes in SAMPLES]
        for term in set(itertools.chain(*map(totals.get, moments)))
    }
    samples = {}
    for i in moments:
        weighed = [
            [factor * sample for sample in worth[term]] for term, factor in totals[i].items()
        ]
        samples[i] = [sum(column) for column in zip(*weighed, strict=True)]
    front: list[int] = []
    for new in sorted(
        moments, key=lambda i: sum(samples[i]), reverse=True
    ):  # what is covered comes after what covers it
        if not any(
            all(map(operator.ge, samples[old], samples[new])) and _covers(totals[old], totals[new])
            for old in front
        ):
            front.append(new)
    return sorted(front)


def _covers(a: Terms, b: Terms) -> bool:
    """Whether a is at least b for all letters ≥ 1 (and M ≥ 0): where b has more of a product, a must have more of one with further letters."""
    spare = {}
    lacking = []
    for term in a.keys() | b.keys():
        more = a.get(term, 0) - b.get(term, 0)
        if more > 0:
            spare[term] = more
        elif more:
            lacking.append((term, -more))
    if lacking and not spare:
        return False
    for term, missing in lacking:
        for larger in spare:
            if (
                missing
                and spare[larger]
                and all(larger.count(letter) >= term.count(letter) for letter in term)
                and larger.count("M") == term.count("M")
            ):
                taken = min(missing, spare[larger])
                spare[larger] -= taken
                missing -= taken
        if missing:
            return False
    return True


def _factors(terms: Terms) -> dict[Places, int]:
    """Factors by the places of their letters, longest products first; M, the layers that are not walked, becomes L − 4."""
    whole: dict[Places, int] = defaultdict(int)
    for letters, factor in terms.items():
        places = [LETTERS.index(letter) for letter in letters if letter != "M"]
        if "M" in letters:
            whole[tuple(sorted([LETTERS.index("L"), *places]))] += factor
            factor *= -WALKED
        whole[tuple(sorted(places))] += factor
    return {
        places: whole[places]
        for places in sorted(whole, key=lambda places: (-len(places), places))
        if whole[places]
    }


def _worth(places: Places, values: tuple[int, ...]) -> int:
    product = 1
    for place in places:
        product *= values[place]
    return product


def _text(factors: dict[Places, int]) -> str:
    parts = []
    for places, factor in factors.items():
        letters = "".join(LETTERS[place] for place in places)
        powers = "".join(
            letter + ("", "", "²", "³")[letters.count(letter)] for letter in dict.fromkeys(letters)
        )
        parts.append(f"{'−' if factor < 0 else '+'} {abs(factor)}{powers}")
    return " ".join(parts).removeprefix("+ ")


def _units(parts: Iterable[Weights]) -> tuple[dict[int, int], dict[int, Size]]:
    """Of each unit the number of its tensors and of their elements."""
    tensors: dict[int, int] = defaultdict(int)
    elements: dict[int, Size] = defaultdict(int)
    for weight in itertools.chain(*(part.values() for part in parts)):
        tensors[weight.part] += 1
        elements[weight.part] += weight.elements
    return dict(tensors), dict(elements)


class _Step(Walk):
    """A walk through a whole step, with what is there before it begins."""

    def __init__(self, kind: Kind, letters: dict[str, Size], micro_batches: Size) -> None:
        super().__init__(letters, kind)
        self.masters = kind.half < FP32 and not kind.autocast
        outer, inner = around(letters, kind), layer(letters, kind)
        each, rest = sum(inner.values()), sum(outer.values())
        self.more = letters["L"] - kind.layers  # layers that are not walked
        self.unwalked = self.more * each
        self.share = letters["P"]
        found = states(
            half=self.masters, fp32_gradients=kind.fp32_gradients, optimizer=kind.optimizer, level=kind.zero, parameters=each * letters["L"] + rest,
            tensors=letters["L"] * len(inner) + len(outer), share=self.share,
        )  # fmt: skip
        for state in found:
            if (
                state.component != "gradients" or kind.zero
            ):  # under ZeRO gradients have their place, from step to step
                self.hold(state.name, state.component, state.elements * state.width)
        if kind.rope:
            self.hold("tables of cos and sin", "buffers", letters["s"] * letters["d"] * self.width)
        self.hold("tokens and targets", "activations", self.n * (2 * INDEX) * micro_batches)
        walked = [self.weights(i, inner) for i in range(kind.layers)]
        surrounding = self.weights(ROOT, outer)
        if kind.zero == 2:
            for name in SURROUNDING_INPUT & outer.keys():
                surrounding[name].part = INPUT
        self.units = Units(
            self, kind.zero, *_units([surrounding, *walked]), width=self.width,
            bucket_width=FP32 if self.masters and kind.fp32_gradients == "only" else self.width,
        )  # fmt: skip
        self.step(surrounding, walked)
        self.moments.append(("end", ""))

    def weights(self, part: int, shapes: dict[str, Size]) -> Weights:
        return {
            name: Parameter(self, size, self.width, part, self.receive)
            for name, size in shapes.items()
        }

    def hold(self, name: str, component: str, nbytes: Size) -> None:
        """Memory that is there from beginning to end."""
        self.lives.append(Life(name, nbytes, component, 0))

    def step(self, outer: Weights, layers: list[Weights]) -> None:
        loss = whole = None
        for _ in range(self.kind.micro_batches):
            self.casting = self.kind.autocast
            loss = self.loss(outer, layers)
            self.leave_autocast(layers)
            if self.kind.micro_batches > 1:
                loss = self.scale(loss, "mul", "loss")
            self.phase = "forward"
            seed = self.like("ones_like", loss)
            self.phase = "backward"
            self.backpropagate(loss, seed)
            del seed
            self.units.end_backward()
            self.phase = "forward"
            if self.kind.micro_batches > 1:
                whole = loss.detach() if whole is None else self.like("add", whole)
        if whole is not None:
            loss = None
        self.phase = "optimizer"
        names = [name for name in outer if name in SURROUNDING_INPUT]
        ordered = [outer[name] for name in names] + [
            weight for weights in layers for weight in weights.values()
        ]
        ordered += [weight for name, weight in outer.items() if name not in names]
        self.optimize(ordered)
        for weight in ordered:
            weight.gradient = weight.wide = None

    def leave_autocast(self, layers: list[Weights]) -> None:
        """Frees the half copies of weights that nobody saved: those of biases, or all, and those of layers that are not walked."""
        self.casts, self.casting = {}, False
        if self.kind.autocast and self.unwalked:
            every = self.kind.checkpointing == "full"
            unsaved = sum(
                weight.elements
                for name, weight in layers[0].items()
                if (every or name.endswith(".bias")) and "norm" not in name
            )
            if unsaved:
                self.lives.append(
                    Life(CASTS, self.more * unsaved * -self.half, "buffers", len(self.moments))
                )

    def receive(self, weight: Parameter, gradients: list[Tensor]) -> None:
        """Keeps the gradient of a weight, as the precision and the ZeRO level want it kept."""
        gradient, only = gradients.pop(), self.kind.fp32_gradients == "only" and self.masters
        if (
            gradient.storage.life.component == "buffers"
            and weight.gradient is None
            and (self.kind.zero or not only)
        ):
            gradient.storage.life.component = "gradients"
        if self.kind.zero:
            gradient.storage.life.name = "gradient on its way"
            self.units.take(weight.part)
            return
        if weight.gradient is None:
            if not only:
                gradient.storage.life.name = "gradients"
            weight.gradient = gradient
        else:
            self.happened("add_")
        del gradient
        if self.masters and self.kind.fp32_gradients:
            if weight.wide is None:
                weight.wide = self.new(
                    "_to_copy", weight.elements, FP32, "fp32 gradients", "gradients"
                )
            else:
                self.happened("add_")
            if only:
                weight.gradient = None
            else:
                self.happened("zero_")

    def optimize(self, weights: list[Parameter]) -> None:
        sizes = [self.share] if self.kind.zero else [weight.elements for weight in weights]
        wide = []
        if self.masters and not self.kind.fp32_gradients:
            if self.unwalked and not self.kind.zero:
                wide.append(self.allocate(self.unwalked, FP32, "fp32 gradients", "gradients"))
            wide += [
                self.new("_to_copy", size, FP32, "fp32 gradients", "gradients") for size in sizes
            ]
        adam, decayed = self.kind.optimizer in ("adam", "adamw"), self.kind.optimizer == "adamw"
        name = "working memory of the optimizer"
        # What changes memory in place, in the optimizer's own order: decayed weights (AdamW), then the moments.
        moments = (
            ["mul_"] * decayed + ["lerp_", "mul_", "addcmul_"]
            if adam
            else ["mul_", "add_"] * (self.kind.optimizer == "momentum")
        )
        if self.kind.stepping == "fused":
            if adam:
                self.happened("_foreach_add_")
            self.happened(f"_fused_{self.kind.optimizer if adam else 'sgd'}_")
        elif self.kind.stepping == "foreach":
            if adam:
                one = self.new("lift_fresh", 1, FP32, name)
                self.happened("_foreach_add_")
                del one
            for event in moments:
                self.happened(f"_foreach_{event}")
            if adam:
                roots = [self.allocate(size, FP32, name) for size in sizes]
                if self.unwalked and not self.kind.zero:
                    roots.append(self.allocate(self.unwalked, FP32, name))
                for event in ("sqrt", "div_", "add_", "addcdiv_"):
                    self.happened(f"_foreach_{event}")
                del roots
            else:
                self.happened("_foreach_add_")
        else:
            root = quotient = None
            for size in sizes:
                for event in ["add_"] * adam + moments:
                    self.happened(event)
                if adam:
                    root = self.new("sqrt", size, FP32, name)
                    made = self.new("div", size, FP32, name)
                    root = None
                    self.happened("add_")
                    quotient = made
                    del made
                    self.happened("addcdiv_")
                else:
                    self.happened("add_")
            del root, quotient
        if self.masters:
            self.happened("_foreach_copy_")

    def leaps(self) -> list[tuple[int, int]]:
        """Pairs of moments that lie a layer apart, where the layers that are not walked would follow: once on each way through the layers."""
        if not self.unwalked:
            return []
        second, third = self.passed[1], self.passed[2]
        first = self.passed[0]
        return [
            pair
            for i in range(0, len(first), 2)
            for pair in ((first[i], second[i]), (third[i + 1], second[i + 1]))
        ]

    def changes(self) -> list[list[tuple[Life, int]]]:
        """Births and deaths, moment by moment."""
        changes: list[list[tuple[Life, int]]] = [[] for _ in self.moments]
        for life in self.lives:
            changes[life.birth].append((life, 1))
            if life.death is not None and life.death < len(changes):
                changes[life.death].append((life, -1))
        return changes

    def held(
        self, group: Callable[[Life], Any], at: Container[int] | None = None
    ) -> Iterator[tuple[int, dict[tuple, int]]]:
        """(moment, factors of what is alive by group and term), for the moments `at`, or each at which something is born or a phase begins."""
        running: dict[tuple, int] = defaultdict(int)
        leaps, all_changes = self.leaps(), self.changes()
        before: dict[int, dict[tuple, int]] = {}

        def apply(to: dict[tuple, int], changes: Iterable[tuple[Life, int]]) -> dict[tuple, int]:
            for life, sign in changes:
                for term, factor in (
                    life.nbytes.terms.items()
                    if isinstance(life.nbytes, Polynomial)
                    else [("", life.nbytes)]
                ):
                    to[group(life), term] += sign * factor
            return to

        for i, changes in enumerate(all_changes):
            apply(running, changes)
            for start, end in leaps:
                if i in (start, end):  # without what is dying, which may belong to an earlier layer
                    staying = apply(
                        defaultdict(int, running),
                        (change for change in all_changes[i + 1] if change[1] < 0),
                    )
                if i == start:
                    before[start] = staying
                elif i == end:
                    for key, factor in staying.items():
                        running[key[0], "M" + key[1]] += factor - before[start].get(key, 0)
            if (
                i in at
                if at is not None
                else any(sign > 0 for _, sign in changes)
                or self.moments[i][0] != self.moments[i - 1][0]
            ):
                yield i, {key: factor for key, factor in running.items() if factor}
