"""Every moment of a kind of training step as a sum of products of letters, and which of them can be
the fullest.

Steps of a *kind* differ in their sizes alone: the same operations run. One of each kind is recorded
(`recording`), at 3 and at 4 layers: what the fourth adds, each further one adds, to every moment of
the first, the last and a middle layer, on each way through them.
"""

import functools
import gzip
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labutils.config import DATA, Mesh, ModelConfig, TrainConfig

PHASES = ("forward", "backward", "optimizer")
STORED = DATA / "step_formulas.json.gz"
_LETTERS = "Lbashgdfvm/"
DEPTH = 3  # layers that stand for all, M = L − 3 more of them: a first, a middle and a last one
SUMMED = 3  # micro-batches that stand for all: from the third on a step goes on as it was
# A prime for each letter; for a that of a / g, which is whole, and for d that of d / 2.
PRIMES = ({"b": 13, "s": 17, "h": 19, "a": 7, "g": 5, "d": 11, "f": 23, "v": 29},
          {"b": 11, "s": 19, "h": 17, "a": 5, "g": 7, "d": 13, "f": 29, "v": 23})  # fmt: skip

Sizes = Mapping[str, int]  # by letter
Terms = dict[str, int]  # the letters of a product, and its factor in bytes
Lines = dict[tuple[str, str], Terms]  # by name and component
Column = tuple[str, str, str]  # name, component, letters


class Kind(NamedTuple):
    """Everything that decides which operations run. A size of 1 may: with one head or one token a
    copy becomes a view."""

    ffn: str
    norm: str
    positions: str
    bias: bool | str
    tied: bool
    dropout: bool
    layers: int
    tokens: bool  # more than one, and so on
    batch: bool
    heads: bool
    groups: bool
    grouped: bool  # fewer key–value heads than heads
    micro_batches: int
    half: bool
    autocast: bool
    fp32_gradients: bool | str
    attention: str
    checkpointing: str
    optimizer: str
    stepping: str
    zero: int


def kind(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Kind:
    """The kind of a step."""
    half, (a, g) = train.precision != "fp32", (model.num_heads, model.num_kv_heads)
    return Kind(
        model.ffn, model.norm, model.positions, model.bias, model.tied, bool(model.dropout),
        min(model.num_layers, DEPTH), model.seq_len > 1, train.micro_batch > 1, a > 1, g > 1,
        a != g, min(train.accumulation(mesh.dp), SUMMED), half, train.autocast,
        half and not train.autocast and train.fp32_gradients, train.attention, train.checkpointing,
        train.optimizer, train.stepping, train.zero if mesh.dp > 1 else 0,
    )  # fmt: skip


def sizes(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> dict[str, int]:
    """The sizes of the letters: m is the number of micro-batches, N that of ranks, M that of layers
    beyond three."""
    found = dict(zip("Lashgdfv", model.letters("L a s h g d f v"), strict=True))
    found |= {"b": train.micro_batch, "m": train.accumulation(mesh.dp), "N": mesh.dp}
    return found | {"M": found["L"] - DEPTH}


def smallest(of: Kind, layers: int, primes: Sizes) -> tuple[ModelConfig, TrainConfig, Sizes]:
    """A step of this kind at prime sizes, and the primes as they stand in its storages."""
    more = {"b": of.batch, "s": of.tokens, "a": of.heads, "g": of.groups and of.grouped}
    own = {letter: prime for letter, prime in primes.items() if more.get(letter, True)}
    groups = own.get("g", 1)
    heads = groups * own.get("a", 1)
    model = ModelConfig(
        num_layers=layers, d_model=own["h"], num_heads=heads, d_head=2 * own["d"], d_ff=own["f"],
        num_kv_heads=groups if of.grouped else heads, vocab_size=own["v"], seq_len=own.get("s", 1),
        ffn=of.ffn, norm=of.norm, positions=of.positions, bias=of.bias, tied=of.tied,
        dropout=0.1 * of.dropout,
    )  # fmt: skip
    b = own.get("b", 1)
    train = TrainConfig(
        micro_batch=b, global_batch=b * of.micro_batches, precision="bf16" if of.half else "fp32",
        autocast=of.autocast, fp32_gradients=of.fp32_gradients, attention=of.attention,
        checkpointing=of.checkpointing, optimizer=of.optimizer, stepping=of.stepping, zero=of.zero,
    )  # fmt: skip
    return model, train, own


def factored(nbytes: int, primes: Sizes) -> tuple[int, str]:
    """A number of bytes as a factor and the letters of a product.

    >>> factored(2 * 7 * 11 * 13, {"b": 7, "s": 11, "v": 13})
    (2, 'bsv')

    Raises ValueError where it is no product of these letters and a power of two: a sum, or a letter
    that is missing.
    """
    rest, letters = nbytes, ""
    for letter, prime in primes.items():
        while rest % prime == 0:
            rest, letters = rest // prime, letters + letter
    rest >>= letters.count("d")  # an even width
    if "g" in primes:  # a is a multiple of g
        letters = letters.replace("g", "", letters.count("a"))
    if rest & (rest - 1) or not rest:
        found = f"{nbytes} bytes are {rest} times the letters {letters!r}"
        raise ValueError(f"{found}: a sum of products?")
    return rest, "".join(sorted(letters, key=_LETTERS.index))


class Storage(NamedTuple):
    """A storage: what it is, its bytes as letters and a factor, the moments of its birth and its
    death."""

    column: Column
    factor: int
    birth: int
    death: int


class Recording(NamedTuple):
    """A recorded step: of each moment the phase, the event and the layer it belongs to (None:
    none); all storages."""

    moments: list[tuple[str, str]]
    layers: list[int | None]
    lives: list[Storage]

    def held(self) -> "tuple[list[Column], np.ndarray]":
        """What is alive: a column for each product of letters in a line of the ledger, a row of
        factors for each moment."""
        columns = list(dict.fromkeys(life.column for life in self.lives))
        places = {column: place for place, column in enumerate(columns)}
        changes = np.zeros((len(self.moments) + 1, len(columns)), dtype=np.int64)
        for life in self.lives:
            changes[life.birth, places[life.column]] += life.factor
            changes[life.death, places[life.column]] -= life.factor
        return columns, changes[:-1].cumsum(0)

    def chunks(self) -> dict[tuple[int | None, int], list[int]]:
        """Stretches of moments of one layer: by layer, and how often it has come before."""
        found: dict[tuple[int | None, int], list[int]] = {}
        passes: Counter[int | None] = Counter()
        moments = range(len(self.layers))
        for layer, places in itertools.groupby(moments, key=self.layers.__getitem__):
            passes[layer] += 1
            found[layer, passes[layer]] = list(places)
        return found


@functools.lru_cache(maxsize=4096)
def recorded(of: Kind, layers: int, primes: int = 0) -> Recording:
    """A step of this kind with so many layers, in letters; `primes` chooses between two sets of
    them, which must agree."""
    from labutils.memory import recording  # the one file that needs torch

    return recording.record(*smallest(of, layers, PRIMES[primes]))


class Form(NamedTuple):
    """A moment of every step of a kind: its phase, its event, and what is alive, M layers beyond
    three."""

    phase: str
    event: str
    lines: Lines


@functools.lru_cache(maxsize=4096)
def fullest(of: Kind) -> tuple[Form, ...]:
    """The moments that can be the fullest of their phase, in order: no other of that phase has as
    much of every product.

    From data/step_formulas.json.gz, where the kinds of the calculator are, or recorded now.
    """
    lines, kinds = stored()
    if of not in kinds:
        return find_fullest(of)
    forms = []
    for phase, event, numbers in json.loads(kinds[of]):
        alive = {(name, part): terms for name, part, terms in map(lines.__getitem__, numbers)}
        forms.append(Form(phase, event, alive))
    return tuple(forms)


@functools.cache
def stored() -> tuple[list, dict[Kind, str]]:
    """What data/step_formulas.json.gz has: lines, and the moments of each kind by their numbers, as
    JSON in JSON: few kinds are asked for, and to read all takes ten times as long."""
    if not STORED.exists():
        return [], {}
    with gzip.open(STORED, "rt", encoding="utf-8") as file:
        found = json.load(file)
    return found["lines"], {Kind(*of): moments for of, moments in found["kinds"]}


def store(found_of: Mapping[Kind, Iterable[Form]], path: Path) -> None:
    """Writes the fullest moments of kinds of step, each line once."""
    lines: dict[str, int] = {}
    found = []
    for of, forms in found_of.items():
        moments = []
        for form in forms:
            alive = [json.dumps([*line, terms]) for line, terms in form.lines.items()]
            numbers = [lines.setdefault(line, len(lines)) for line in alive]
            moments.append([form.phase, form.event, numbers])
        found.append([of, json.dumps(moments, separators=(",", ":"))])
    data = {"lines": [json.loads(line) for line in lines], "kinds": found}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def find_fullest(of: Kind) -> tuple[Form, ...]:
    """The same, recorded now."""
    columns, moments, held = _table(of)
    products = list(dict.fromkeys(letters for _, _, letters in columns))
    belongs = np.array([[letters == product for product in products] for _, _, letters in columns])
    totals, found = held @ belongs.astype(np.int64), []
    for phase in PHASES:
        places = np.array([i for i, moment in enumerate(moments) if moment[0] == phase])
        for i in front(places, totals):
            lines: Lines = defaultdict(dict)
            for (name, component, letters), factor in zip(columns, held[i].tolist(), strict=True):
                if factor:
                    lines[name, component][letters] = factor
            found.append(Form(*moments[i], dict(lines)))
    return tuple(found)


def _table(of: Kind) -> tuple[list[Column], list[tuple[str, str]], np.ndarray]:
    """The moments of the first, a middle and the last layer, and of what belongs to none, for 3 + M
    layers; or those of a step of fewer layers."""
    three = recorded(of, of.layers)
    columns, less = three.held()
    if of.layers < DEPTH:
        return columns, three.moments, less
    four = recorded(of, DEPTH + 1)
    deeper, more = four.held()
    order = [deeper.index(column) for column in columns]
    if sorted(order) != list(range(len(deeper))):
        raise ValueError(f"a fourth layer holds something new: {set(deeper) - set(columns)}")
    # A middle layer stands for the one that follows the first, and for the one before the last.
    same: dict[int | None, list] = {None: [None], 0: [0], 1: [1, 2], 2: [3]}
    chunks, pairs = four.chunks(), list[tuple[int, int]]()
    for (layer, way), places in three.chunks().items():
        for other in same[layer]:
            pairs += zip(places, chunks[other, way], strict=True)
    for i, j in pairs:
        if three.moments[i] != four.moments[j]:
            raise ValueError(f"a fourth layer changes {three.moments[i]} to {four.moments[j]}")
    i, j = np.array(pairs).T
    held = np.hstack([less[i], more[j][:, order] - less[i]])
    beyond = [(name, component, "M" + letters) for name, component, letters in columns]
    return columns + beyond, [three.moments[place] for place in i], held


def front(places: np.ndarray, totals: np.ndarray) -> list[int]:
    """Those of the places whose totals no other covers in every product; of equal ones the
    first."""
    # Most lie below a neighbor: what makes something is followed by more, what frees something
    # follows it.
    for way in (-1, 1):
        here, neighbor = totals[places], np.roll(totals[places], way, axis=0)
        places = places[~((here <= neighbor).all(1) & (here != neighbor).any(1))]
    here = totals[places]
    covered = (here[:, None] <= here).all(2)
    covered &= ~(covered.T & np.triu(np.ones_like(covered)))
    return places[~covered.any(1)].tolist()


def worth(product: str, letters: Sizes) -> int:
    """The numbers in a product of letters; of one that ends in "/" the share of one of N devices,
    rounded up."""
    if not product.endswith("/"):
        return math.prod(map(letters.__getitem__, product))
    layers = letters["M"] if "M" in product else 1
    numbers = math.prod(letters[letter] for letter in product if letter not in "M/")
    return layers * -(-numbers // letters["N"])


def value(terms: Terms, letters: Sizes) -> int:
    """The bytes of a sum of products at these sizes."""
    return sum(factor * worth(product, letters) for product, factor in terms.items())


def written(terms: Terms) -> str:
    """A sum of products as a reader writes it, longest products first.

    >>> written({"ass": 4, "Mh/": 2, "h": 1})
    '2Lh/N + 4as² − 6h/N + 1h'
    """
    return _written(tuple(terms.items()))  # few differ, and the calculator asks for each many times


@functools.lru_cache(maxsize=16384)
def _written(terms: tuple[tuple[str, int], ...]) -> str:
    whole: Terms = defaultdict(int)
    for letters, factor in terms:
        if "M" in letters:
            letters = letters.replace("M", "")
            whole["L" + letters] += factor
            factor *= -DEPTH
        whole[letters] += factor
    parts = []
    order = sorted(whole, key=lambda letters: (-len(letters), *map(_LETTERS.index, letters)))
    for letters in filter(whole.get, order):
        sign, product = "−" if whole[letters] < 0 else "+", letters.replace("/", "/N")
        for letter in _LETTERS:
            product = product.replace(3 * letter, letter + "³").replace(2 * letter, letter + "²")
        parts.append(f"{sign} {abs(whole[letters])}{product}")
    return " ".join(parts).removeprefix("+ ")
