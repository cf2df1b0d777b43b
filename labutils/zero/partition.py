"""How parameters are dealt out: which of them lie end to end in one flat tensor, and which stretch of it each rank owns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labutils import units

BUCKET_BYTES = 25 * units.MIB  # as in PyTorch's DistributedDataParallel


@dataclass(frozen=True)
class Partition:
    """`numel` elements in `n` equal shares; what the last ranks lack is padding."""

    numel: int
    n: int

    @property
    def share(self) -> int:
        """Elements that each rank holds, padding included."""
        return -(-self.numel // self.n)

    @property
    def padded(self) -> int:
        """Elements of all shares together."""
        return self.share * self.n

    @property
    def padding(self) -> int:
        """Elements that stand for no parameter."""
        return self.padded - self.numel

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where the elements of `rank` begin and end, without the padding; a rank may have none."""
        if not 0 <= units.whole(rank, "rank") < self.n:
            raise ValueError(f"rank {rank} has no share: there are {self.n}, use 0 … {self.n - 1}")
        return min(rank * self.share, self.numel), min((rank + 1) * self.share, self.numel)


def partition(numel: int, n: int) -> Partition:
    """`numel` elements dealt out to `n` ranks in equal shares, in order, the end padded: all ranks hold, send and receive alike.

    >>> dealt = partition(10, 4)
    >>> dealt.share, dealt.padding, [dealt.bounds(rank) for rank in range(4)]
    (3, 2, [(0, 3), (3, 6), (6, 9), (9, 10)])

    Invariant: the bounds of all ranks are disjoint and cover 0 … numel; there are fewer than n elements of padding.
    """
    return Partition(units.whole(numel, "numel", 1), units.whole(n, "n", 1))


def buckets(
    numels: Sequence[int], itemsize: int, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """The parameters' numbers, bucket by bucket in the order in which backward reaches them: the last parameter first.

    A bucket is closed when the next parameter would take it past `bucket_bytes`; a larger parameter has a bucket of its own.

    >>> buckets([5, 1, 2, 3], itemsize=4, bucket_bytes=16)
    [[3], [2, 1], [0]]
    """
    units.whole(bucket_bytes, "bucket_bytes", 1)
    closed: list[list[int]] = []
    room = 0
    for i in reversed(range(len(numels))):
        nbytes = numels[i] * itemsize
        if nbytes > room or not closed:
            closed.append([])
            room = bucket_bytes
        closed[-1].append(i)
        room -= nbytes
    return closed


@dataclass(frozen=True)
class Unit:
    """What is gathered, reduced or updated at once: the elements of each of its parameters.

    Of a root, `after` are the trained parameters that compute after all other units, so that their gradients come first. The trained ones
    are of so many `groups` with settings of their own.
    """

    trained: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        units.whole(self.groups, "groups", 1)
        for numel in (*self.trained, *self.frozen, *self.after):
            units.whole(numel, "elements of a parameter", 1)

    def dealt(self, n: int, *, frozen: bool) -> tuple[Partition, ...]:
        """The partition of its one flat tensor of trained, or of frozen parameters; none where it has none."""
        numel = sum(self.frozen) if frozen else sum(self.trained + self.after)
        return (partition(numel, n),) if numel else ()


Layout = int | Iterable["int | Sequence[int] | Unit"]


def layout(sizes: Layout) -> tuple[Unit, ...]:
    """Units from what is easier to write: Ψ for one flat tensor of Ψ elements, (Ψ₁, Ψ₂) for two, ((a, b), …) where single parameters count.

    >>> [unit.trained for unit in layout((8, (3, 2)))]
    [(8,), (3, 2)]
    """
    if isinstance(sizes, int):
        sizes = (sizes,)
    known = tuple(
        unit if isinstance(unit, Unit) else Unit((unit,) if isinstance(unit, int) else tuple(unit))
        for unit in sizes
    )
    if not known:
        raise ValueError(
            "a layout needs at least one unit: give Ψ, or the sizes of the flat tensors"
        )
    return known
