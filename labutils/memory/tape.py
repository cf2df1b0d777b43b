"""An autograd tape without numbers: tensors that are only sizes, nodes that say what they keep and what their backward pass makes.

A size is anything that adds and multiplies: an integer, or a `Polynomial` in the letters of the notation, so that one walk through a
model gives the memory of every model of its kind.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Size = Any  # int or Polynomial


class Life:
    """One piece of memory: its size in bytes, what it is, between which moments it is alive."""

    __slots__ = ("birth", "component", "death", "name", "nbytes")

    def __init__(self, name: str, nbytes: Size, component: str, birth: int) -> None:
        self.name, self.nbytes, self.component, self.birth = name, nbytes, component, birth
        self.death: int | None = None


class Storage:
    """A hold on a piece of memory, which dies as a real one does: when the last reference to it goes."""

    __slots__ = ("life", "moments")

    def __init__(self, life: Life, moments: list) -> None:
        self.life, self.moments = life, moments

    def __del__(self) -> None:
        self.life.death = len(self.moments)


class Tensor:
    """`elements` numbers of `width` bytes in a storage, and the output number `index` of the `node` that made them."""

    __slots__ = ("elements", "index", "node", "storage", "width")

    def __init__(
        self,
        storage: Storage,
        elements: Size,
        width: int,
        node: "Node | None" = None,
        index: int = 0,
    ) -> None:
        self.storage, self.elements, self.width, self.node, self.index = (
            storage,
            elements,
            width,
            node,
            index,
        )

    @property
    def name(self) -> str:
        return self.storage.life.name

    def detach(self) -> "Tensor":
        return Tensor(self.storage, self.elements, self.width)


Backward = Callable[[list[Tensor], list[Storage]], Sequence[Tensor | None]]
Step = tuple[
    str, Size, int
]  # an operation that turns a gradient into the shape or dtype of its input: name, elements, width


class Node:
    """A step of the backward pass. `fits` are the reductions and casts that autograd itself adds to a gradient that does not fit its input."""

    __slots__ = ("backward", "edges", "fits", "outputs", "saved", "sequence")

    def __init__(
        self,
        sequence: float,
        inputs: Iterable[Tensor],
        saved: list,
        backward: Backward,
        fits: dict[int, list[Step]],
        outputs: int,
    ) -> None:
        self.edges = [(tensor.node, tensor.index) for tensor in inputs]
        self.sequence, self.saved, self.backward, self.fits, self.outputs = (
            sequence,
            saved,
            backward,
            fits,
            outputs,
        )


class Tape:
    """Writes down every operation, and the birth and death of all memory."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, str]] = [("start", "")]
        self.lives: list[Life] = []
        self.phase = "forward"
        self.component = "buffers"  # what new memory is for, until something more is known
        self.sequence = itertools.count()
        self.pack: Callable[[Tensor], Any] = self.keep
        self.unpack: Callable[[Any], Storage] = lambda kept: kept

    def allocate(
        self, elements: Size, width: int, name: str, component: str | None = None
    ) -> Tensor:
        """A tensor in memory of its own, born with the operation that is written down next."""
        life = Life(name, elements * width, component or self.component, len(self.moments))
        self.lives.append(life)
        return Tensor(Storage(life, self.moments), elements, width)

    def happened(self, event: str) -> None:
        self.moments.append((self.phase, event))

    def new(
        self, event: str, elements: Size, width: int, name: str, component: str | None = None
    ) -> Tensor:
        """The result of an operation that makes one tensor."""
        tensor = self.allocate(elements, width, name, component)
        self.happened(event)
        return tensor

    def like(self, event: str, tensor: Tensor, name: str | None = None) -> Tensor:
        return self.new(event, tensor.elements, tensor.width, name or tensor.name)

    def keep(self, tensor: Tensor) -> Storage:
        """What autograd holds of a tensor that it saves."""
        if tensor.storage.life.component == "buffers":
            tensor.storage.life.component = "activations"
        return tensor.storage

    def save(self, *tensors: Tensor) -> list:
        unpack = self.unpack
        return [(self.pack(tensor), unpack) for tensor in tensors]

    def attach(
        self,
        out: Tensor,
        inputs: Iterable[Tensor],
        backward: Backward,
        saved: Iterable = (),
        fits: dict[int, list[Step]] | None = None,
        outputs: int = 1,
    ) -> Tensor:
        """`out`, with the node that takes its gradient back to the `inputs`."""
        out.node = Node(next(self.sequence), inputs, list(saved), backward, fits or {}, outputs)
        return out

    def backpropagate(self, loss: Tensor, seed: Tensor) -> None:
        """Runs the nodes behind `loss` as PyTorch's engine does: latest first, gradients added where paths meet, saved tensors freed at once."""
        waiting = _dependencies(loss.node)
        buffers: dict[Node, list[Tensor | None]] = {loss.node: [seed]}
        ready = [(-loss.node.sequence, loss.node)]
        loss.node = None
        order = itertools.count()
        del seed
        ready = [(ready[0][0], next(order), ready[0][1])]
        while ready:
            _, _, node = heapq.heappop(ready)
            gradients = buffers.pop(node)
            outputs = self.run(node, gradients)
            node.saved = []
            del gradients
            for place, (target, index) in enumerate(node.edges):
                gradient, outputs[place] = outputs[place], None
                if target is None or gradient is None:
                    continue
                into = buffers.setdefault(target, [None] * target.outputs)
                if into[index] is None:
                    into[index] = gradient
                else:
                    into[index] = self.like("add", gradient)
                del gradient, into
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, (-target.sequence, next(order), target))
            node = target = None
            outputs = None

    def run(self, node: Node, gradients: list[Tensor]) -> list[Tensor | None]:
        unpacked = [unpack(kept) for kept, unpack in node.saved]
        outputs = list(node.backward(gradients, unpacked))
        del unpacked
        for place, steps in node.fits.items():
            for event, elements, width in steps:
                outputs[place] = self.new(event, elements, width, outputs[place].name)
        return outputs

    @contextmanager
    def hooks(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Storage]
    ) -> Iterator[None]:
        """Inside, `pack` decides what is held of a saved tensor, and `unpack` gives it back."""
        before = self.pack, self.unpack
        self.pack, self.unpack = pack, unpack
        try:
            yield
        finally:
            self.pack, self.unpack = before


def _dependencies(root: Node) -> dict[Node, int]:
    counts: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for target, _ in stack.pop().edges:
            if target is not None:
                if target not in counts:
                    counts[target] = 0
                    stack.append(target)
                counts[target] += 1
    return counts


class Parameter(Tensor):
    """A weight: its gradient, when complete, goes to `receive` as the last hold on it."""

    __slots__ = ("gradient", "part", "wide")

    def __init__(
        self,
        tape: Tape,
        elements: Size,
        width: int,
        part: int,
        receive: Callable[["Parameter", list[Tensor]], None],
    ) -> None:
        super().__init__(Storage(Life("weights", 0, "weights", 0), tape.moments), elements, width)
        self.part = part
        self.gradient: Tensor | None = None
        self.wide: Tensor | None = None  # its gradient in fp32

        def accumulate(gradients: list[Tensor], saved: list) -> tuple:
            receive(self, gradients)
            return ()

        self.node = Node(float("inf"), (), [], accumulate, {}, 1)


class Enough(BaseException):
    """Ends a second evaluation early."""


class Region:
    """A checkpointed call: its saved tensors are thrown away, and computed again when the backward pass asks for the first of them."""

    def __init__(
        self,
        tape: Tape,
        fn: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        replay: Callable[[], Any],
    ) -> None:
        self.tape, self.fn, self.replay = tape, fn, replay
        self.kept = [tape.keep(tensor) for tensor in tensors]
        self.like = [(tensor.elements, tensor.width) for tensor in tensors]
        self.total = 0
        self.found: dict[int, Storage] = {}

    def pack(self, tensor: Tensor) -> int:
        self.total += 1
        return self.total - 1

    def unpack(self, place: int) -> Storage:
        if place not in self.found:
            self.recompute()
        return self.found.pop(place)

    def recompute(self) -> None:
        count = itertools.count()

        def capture(tensor: Tensor) -> Storage:
            place = next(count)
            self.found[place] = tensor.storage
            if place == self.total - 1:
                raise Enough
            return tensor.storage

        tape, phase = self.tape, self.tape.component
        # Leaves that require a gradient, as the tensors that were kept do.
        leaf = Node(float("-inf"), (), [], lambda gradients, saved: (), {}, 1)
        inputs = [
            Tensor(storage, *like, leaf) for storage, like in zip(self.kept, self.like, strict=True)
        ]
        tape.component = "activations"
        try:
            with self.replay(), tape.hooks(capture, lambda kept: kept):
                self.fn(*inputs)
        except Enough:
            pass
        finally:
            tape.component = phase


def checkpoint(
    tape: Tape, replay: Callable[[], Any], fn: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """What `fn(*tensors)` returns; of what it saves only the tensors themselves are held."""
    tape.happened("empty")
    tape.happened("empty")
    region = Region(tape, fn, tensors, replay)
    with tape.hooks(region.pack, region.unpack):
        return fn(*tensors)


class Polynomial:
    """A sum of products of letters with integer factors; its letters stand for numbers that are at least 1.

    >>> b, s = Polynomial.letter("b"), Polynomial.letter("s")
    >>> (b * s * 4 + s * s * 2) * b
    4b²s + 2bs²
    """

    __slots__ = ("terms",)

    def __init__(self, terms: dict[str, int]) -> None:
        self.terms = terms

    @classmethod
    def letter(cls, name: str) -> "Polynomial":
        return cls({name: 1})

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __add__(self, other: "Polynomial | int") -> "Polynomial":
        terms = dict(self.terms)
        for letters, factor in _terms(other).items():
            terms[letters] = terms.get(letters, 0) + factor
        return Polynomial({letters: factor for letters, factor in terms.items() if factor})

    __radd__ = __add__

    def __neg__(self) -> "Polynomial":
        return self * -1

    def __sub__(self, other: "Polynomial | int") -> "Polynomial":
        return self + -other

    def __mul__(self, other: "Polynomial | int") -> "Polynomial":
        if isinstance(other, int):
            return Polynomial(
                {letters: factor * other for letters, factor in self.terms.items()} if other else {}
            )
        terms: dict[str, int] = {}
        for mine, factor in self.terms.items():
            for theirs, times in other.terms.items():
                letters = "".join(sorted(mine + theirs))
                terms[letters] = terms.get(letters, 0) + factor * times
        return Polynomial(terms)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return (
            " + ".join(f"{factor}{_powers(letters)}" for letters, factor in self.terms.items())
            or "0"
        )


def _terms(value: "Polynomial | int") -> dict[str, int]:
    return value.terms if isinstance(value, Polynomial) else {"": value} if value else {}


def _powers(letters: str) -> str:
    return "".join(
        letter + ("", "", "²", "³", "⁴")[letters.count(letter)] for letter in dict.fromkeys(letters)
    )
