"""Which gradients travel together, and what their way costs: known before the first step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from labutils import collectives, units
from labutils.ledger import Ledger, Line

BUCKET_BYTES = 25 * units.MIB  # PyTorch's bucket_cap_mb=25 counts MiB


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together: names of parameters in the order in which their gradients come, the bytes of each, those of an element."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    itemsize: int = 4

    @property
    def nbytes(self) -> int:
        """Bytes in this bucket."""
        return sum(self.sizes)


def buckets(
    sizes: Mapping[str, int], bucket_bytes: int = BUCKET_BYTES, *, itemsize: int = 4
) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, in the order in which they are reduced, for parameters with `sizes` in bytes, in forward order.

    >>> [bucket.names for bucket in buckets({"embed": 10, "hidden": 10, "head": 5}, 16)]
    [('head', 'hidden'), ('embed',)]

    Invariant: each parameter is in one bucket; one that is larger than a bucket has a bucket of its own.
    """
    units.whole(bucket_bytes, "bucket_bytes", 1)
    grouped: list[list[str]] = []
    held = 0
    for name in reversed(sizes):
        if not grouped or held + sizes[name] > bucket_bytes:
            grouped.append([])
            held = 0
        grouped[-1].append(name)
        held += sizes[name]
    return tuple(
        Bucket(tuple(names), tuple(sizes[name] for name in names), itemsize) for names in grouped
    )


def predict(
    grouped: Sequence[Bucket],
    n: int,
    *,
    itemsize: int | None = None,
    backwards: int = 1,
    find_unused: bool = False,
    algorithm: str = "ring",
) -> Ledger:
    """Bytes that each of `n` ranks sends to reduce these buckets in `backwards` backward passes.

    `itemsize` is that of a gradient on its way, if it travels in another dtype than it is kept in. Backward passes under `no_sync` send nothing.

    >>> predict(buckets({"a": 400, "b": 400}, 400), 4).by("rank")
    {0: 1200, 1: 1200, 2: 1200, 3: 1200}
    """
    units.whole(backwards, "backwards")
    calls = [
        ("all_reduce", algorithm, bucket.nbytes // bucket.itemsize, itemsize or bucket.itemsize)
        for bucket in grouped
    ]
    if find_unused:
        calls.append(
            ("unused", "ring", sum(len(bucket.names) for bucket in grouped), 1)
        )  # a byte a parameter: has it a gradient here?
    sent = (
        _named(
            name, collectives.sent(f"all_reduce_{way}", nbytes=numel * width, n=n, itemsize=width)
        )
        for name, way, numel, width in calls
    )
    return Ledger(line for lines in sent for line in lines).scaled(backwards).merged()


def predict_start(module: nn.Module, n: int) -> Ledger:
    """Bytes that each of `n` ranks sends when replicas are made: rank 0's parameters and buffers, each down a tree.

    >>> predict_start(nn.Linear(3, 1), 4).by("rank")
    {0: 32, 1: 16}
    """
    tensors = (*module.parameters(), *module.buffers())
    sent = (
        _named(
            "broadcast",
            collectives.sent("broadcast_tree", nbytes=x.nbytes, n=n, itemsize=x.itemsize),
        )
        for x in tensors
    )
    return Ledger(line for lines in sent for line in lines).merged()


def predict_buffers(module: nn.Module, n: int, *, forwards: int = 1) -> Ledger:
    """Bytes that each of `n` ranks sends so that rank 0's buffers are on all of them before `forwards` forward passes: down a tree, in one message.

    >>> predict_buffers(nn.BatchNorm1d(4), 4).by("rank")  # mean and variance of 4 channels in fp32, and an int64 that counts batches
    {0: 80, 1: 40}
    """
    held = sum(buffer.nbytes for buffer in module.buffers())
    return (
        Ledger(_named("buffers", collectives.sent("broadcast_tree", nbytes=held, n=n, itemsize=1)))
        .scaled(units.whole(forwards, "forwards"))
        .merged()
    )


def hideable(grouped: Sequence[Bucket]) -> float:
    """The part of communication, 0 … 1, that a backward pass can hide at best: all but the last bucket's, which is complete when the pass is over.

    >>> hideable(buckets({"a": 100, "b": 100, "c": 100, "d": 100}, 100))
    0.75

    Invariant: `simulate(…).hidden` is no more, and no less where every other bucket is reduced in the time in which the next one is computed.
    """
    total = sum(bucket.nbytes for bucket in grouped)
    return 1 - grouped[-1].nbytes / total if total else 1.0


def _named(name: str, ledger: Ledger) -> Iterable[Line]:
    """The lines under the name that they have in the books of a run."""
    return (replace(line, name=name) for line in ledger)
