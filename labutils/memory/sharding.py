"""ZeRO during a walk: gathered weights, and gradients on their way to their shards, one unit of the model at a time, as in `zero`."""

from collections import Counter

from labutils.memory.tape import Size, Tape, Tensor

ROOT = -1  # what surrounds the layers, which are units 0, 1, …
INPUT = (
    -2
)  # at level 2, where nothing is gathered, the root's part before the layers is a unit of its own


class Units:
    """The memory that comes and goes with each unit; `tensors` and `elements` are how many it has.

    Level 1: a gradient is freed when it has been copied into the flat tensor that holds all of them. Level 2: into the bucket of its unit,
    which is reduced when it is full, while the next one fills. Level 3: so too, and the root's bucket is there for the whole backward pass;
    weights are gathered for the root, the unit that computes and the next one.
    """

    def __init__(
        self,
        tape: Tape,
        level: int,
        tensors: dict[int, int],
        elements: dict[int, Size],
        *,
        width: int,
        bucket_width: int,
    ) -> None:
        self.tape, self.level, self.tensors, self.elements = tape, level, tensors, elements
        self.width, self.bucket_width = width, bucket_width
        self.gathered: dict[int, Tensor] = {}
        self.buckets: dict[int, Tensor] = {}
        self.arrived: Counter[int] = Counter()
        self.reducing: Tensor | None = None

    def gather(self, *units: int) -> None:
        for unit in units:
            if self.level == 3 and unit in self.elements and unit not in self.gathered:
                self.gathered[unit] = self.tape.allocate(
                    self.elements[unit], self.width, "gathered weights", "weights"
                )

    def free(self, unit: int) -> None:
        self.gathered.pop(unit, None)

    def begin_backward(self) -> None:
        """The gradient of the logits is there."""
        self.gather(ROOT, max(self.elements))
        if self.level == 3:
            self.open(ROOT)

    def come_back(self, unit: int) -> None:
        """The gradient of a layer's output is there, and the layer behind is done."""
        self.free(unit + 1)
        self.gather(*(each for each in (unit, unit - 1) if each >= 0))

    def end_backward(self) -> None:
        self.gathered.clear()
        self.reducing = None

    def open(self, unit: int) -> None:
        if unit not in self.buckets:
            self.buckets[unit] = self.tape.new(
                "empty", self.elements[unit], self.bucket_width, "gradient buckets", "gradients"
            )

    def take(self, unit: int) -> None:
        """A gradient of the unit is there: it is copied to where it is kept, and whoever holds it may let go."""
        if self.level > 1:
            self.open(unit)
            self.arrived[unit] += 1
        self.tape.happened("div")
        if self.arrived[unit] == self.tensors[unit]:
            del self.arrived[unit]
            self.reducing = self.buckets.pop(unit)  # the one before has landed
