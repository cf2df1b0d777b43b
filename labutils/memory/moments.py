"""What is alive after each operation of a training step, and at the fullest moment."""

import functools
import operator
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from labutils import units
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.ledger import COMPONENTS, Ledger, Line
from labutils.memory import formulas, states
from labutils.timeline import History, Moment


@dataclass(frozen=True, repr=False, eq=False)
class Peak(Ledger):
    """What is alive at the fullest moment of a step, and where in the step that is.

    `phase` is "forward", "backward" or "optimizer", `event` the operation after which it happens,
    `phases` the peak of each phase in bytes.
    """

    phase: str = ""
    event: str = ""
    phases: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.lines)


def peak(model: ModelConfig, train: TrainConfig) -> Peak:
    """Bytes alive at the fullest moment of a training step on one device, temporaries included; the
    note of each line is its formula. On a mesh see `predict.peak`.

    A step is `loss(x, y).backward()` for each micro-batch, `optimizer.step()` and `zero_grad()`,
    with the optimizer's state there from the start. Exact for `model.GPT` on a CPU as
    `measure.history` sees it.

    >>> train = TrainConfig(micro_batch=1, global_batch=1)
    >>> fullest = peak(ModelConfig.named("gpt2-xl"), train)
    >>> fullest.phase, fullest.total
    ('optimizer', 31795533074)

    Cost: about 0.2 ms; the first model of its kind some tenths of a second, in which a small one of
    that kind is run.
    """
    predictable(model, train)
    return by_formula(model, train)


def by_formula(model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh()) -> Peak:
    """`peak` where it has a closed form. With ZeRO it is what the calculator can say on a page:
    that of a device for which each parameter is a bucket and N divides the elements of each, with a
    counter of Adam's steps for every one."""
    letters = formulas.sizes(model, train, mesh)
    forms, products, rows = _moments(formulas.kind(model, train, mesh))
    worth = [formulas.worth(product, letters) for product in products]
    totals = [sum(map(operator.mul, row, worth)) for row in rows]
    phases: dict[str, int] = {}
    for form, total in zip(forms, totals, strict=True):
        phases[form.phase] = max(phases.get(form.phase, 0), total)
    top = forms[totals.index(max(totals))]
    lines = [
        Line(name, amount, component=component, note=formulas.written(terms))
        for (name, component), terms in top.lines.items()
        if (amount := formulas.value(terms, letters))
    ]
    lines.sort(key=lambda line: COMPONENTS.index(line.component))
    return Peak(tuple(lines), top.phase, top.event, phases)


def history(model: ModelConfig, train: TrainConfig) -> History:
    """Bytes alive after every operation of a training step, by component and by phase: what
    `measure.history` finds, predicted.

    Cost: a step of as many layers and micro-batches at tiny sizes, once for each kind.
    """
    predictable(model, train)
    letters = formulas.sizes(model, train, Mesh())
    L, m = model.num_layers, letters["m"]
    said = f"passes of num_layers={L} with {m} micro-batches, to be recorded, are"
    units.writable(L * m, said, "take fewer layers, or micro-batches", most=10**5)
    of = formulas.kind(model, train, Mesh())._replace(micro_batches=m)
    step = formulas.recorded(of, model.num_layers)
    columns, held = step.held()
    amounts = np.zeros((len(columns), len(COMPONENTS)), dtype=np.int64)
    for i, (_, component, product) in enumerate(columns):
        amounts[i, COMPONENTS.index(component)] = formulas.worth(product, letters)
    moments = []
    for (phase, event), row in zip(step.moments, (held @ amounts).tolist(), strict=True):
        lines = zip(COMPONENTS, row, strict=True)
        ledger = Ledger(Line(name, amount, component=name) for name, amount in lines)
        moments.append(Moment(phase, event, ledger))
    return History(moments)


@functools.lru_cache(maxsize=4096)
def _moments(of: formulas.Kind) -> tuple:
    """The moments that may be the fullest, the products of letters in them, the factors of these at
    each moment."""
    forms = formulas.fullest(of)
    totals: list[Counter] = []
    for form in forms:
        totals.append(Counter())
        for terms in form.lines.values():
            totals[-1].update(terms)
    products = tuple(dict.fromkeys(letters for total in totals for letters in total))
    return forms, products, [[total[letters] for letters in products] for total in totals]


def predictable(model: ModelConfig, train: TrainConfig) -> None:
    """Raises TypeError or ValueError where there is no formula for a step, and says what would
    help."""
    states.require_formula(model, train)
    model.require_gpt()
    if train.clip is not None:
        remedy = "leave clip=None, or ask predict.peak"
        raise ValueError(f"the peak of a step that clips (clip={train.clip}) has none: {remedy}")
    if model.num_experts > 1:
        raise ValueError(
            f"num_experts={model.num_experts}: how much an expert holds at a moment depends on "
            "what the router chooses, so there is no formula for the peak; predict.states and "
            "memory.activations are exact for any choice"
        )
