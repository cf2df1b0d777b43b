"""What ZeRO sends and holds, from the sizes alone, and the paper's two tables."""

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction

from labutils import collectives, units
from labutils.config import MOMENTS
from labutils.ledger import Ledger, Line
from labutils.zero.partition import Layout, Unit, units_of

STEP = 4  # Adam counts its steps, once for each parameter of which a rank has a piece


# ── sent ────────────────────────────────────────────────────────────────────────────────────────


def predict_sent(
    sizes: Layout,
    n: int,
    level: int,
    *,
    itemsize: int = 4,
    reduce_itemsize: int | None = None,
    shard_itemsize: int | None = None,
    accumulation: int = 1,
    steps: int = 1,
    reshard: bool = True,
    clip: bool = False,
    scaled: bool = False,
    start: bool = False,
    frozen: int = 0,
    axis: str = "dp",
    rank: int | None = None,
) -> Ledger:
    """Bytes that each of `n` ranks sends in `steps` steps: a line for each operation and rank.

    - all_reduce: at level 0, which is plain data parallelism, all gradients once a step;
    - reduce_scatter: all gradients, once a step at level 1, once a backward pass at 2 and 3;
    - all_gather: all weights, once a step at levels 1 and 2; at level 3 once in each pass forward
      and, with `reshard`, once backward;
    - gradient norm, finite: one number each, with `clip`, and where the loss is `scaled`;
    - broadcast: the weights of rank 0, with `start`.

    sizes            elements of the flat parameters: Ψ, (Ψ₁, Ψ₂, …), or a `layout`
    itemsize         bytes of a weight that is gathered
    reduce_itemsize  bytes of a gradient on its way; `itemsize` unless given
    shard_itemsize   bytes of a weight that is stepped; `itemsize` unless given
    accumulation     micro-batches, each with a backward pass, in a step
    frozen           elements that are not trained, at levels 1 and 2
    rank             the only rank that is asked for; all unless given

    With P = Ψ + padding that is 2·P·(n − 1)/n elements a rank and step, and 3·P·(n − 1)/n at
    level 3; the padding is in the notes.

    >>> [predict_sent(1000, n=4, level=level).by("rank")[0] for level in (0, 1, 2, 3)]
    [6000, 6000, 6000, 9000]

    Source: Rajbhandari et al. 1910.02054, section 7: 2Ψ, 2Ψ and 3Ψ.
    """
    reduce_itemsize = _checked(level, itemsize, reduce_itemsize)
    shard_itemsize = _checked(level, itemsize, shard_itemsize)
    units.whole(accumulation, "accumulation", 1)
    dealt = units_of(sizes)
    trained = [part for unit in dealt for part in unit.dealt(n)]
    gathered = trained + [part for unit in dealt for part in unit.dealt(n, frozen=True)]
    begun = shard_itemsize if level == 3 else itemsize  # the type of the model that is sharded
    gathers = accumulation * (1 + reshard) if level == 3 else 1
    reduces = accumulation if level > 1 else 1
    norm = max(4, shard_itemsize if level == 3 else itemsize)

    calls = []  # name, algorithm, elements, padding of them, bytes of one, times
    for part in trained:
        if level == 0:
            calls.append(("all_reduce", "all_reduce_ring", part.numel, 0, reduce_itemsize, steps))
        else:
            size = part.padded, part.padding, reduce_itemsize, steps * reduces
            calls.append(("reduce_scatter", "reduce_scatter_ring", *size))
    for part in gathered:
        size = part.padded, part.padding
        calls.append(
            ("all_gather", "all_gather_ring", *size, itemsize, steps * gathers * bool(level))
        )
        size = size if level else (part.numel, 0)
        calls.append(("broadcast", "broadcast_tree", *size, begun, start))
    calls.append(("broadcast", "broadcast_tree", frozen, 0, itemsize, start * bool(frozen)))
    calls.append(("finite", "all_reduce_ring", 1, 0, 4, steps * scaled * bool(level)))
    calls.append(("gradient norm", "all_reduce_ring", 1, 0, norm, steps * clip * bool(level)))
    lines = [line for call in calls for line in _called(*call, n, axis, rank)]
    return Ledger(lines).merged()


def _called(
    name: str, algorithm: str, numel: int, padding: int, itemsize: int, times: int, n: int,
    axis: str, rank: int | None,
) -> Iterator[Line]:  # fmt: skip
    """The lines of an operation that is done so many times, under the name of its books."""
    note = f"{padding:,} of {numel:,} elements are padding" if padding else ""
    sizes = {"nbytes": numel * itemsize, "n": n, "itemsize": itemsize, "axis": axis, "rank": rank}
    for line in collectives.sent(algorithm, **sizes) if times else ():
        amount, count = line.amount * times, line.count * times
        yield dataclasses.replace(line, name=name, amount=amount, count=count, note=note)


def _checked(level: int, itemsize: int, other: int | None) -> int:
    if level not in (0, 1, 2, 3):
        raise ValueError(
            f"level={level!r} is no level of ZeRO: use 0 (nothing is sharded), 1, 2 or 3"
        )
    units.whole(itemsize, "itemsize", 1)
    return itemsize if other is None else units.whole(other, "itemsize", 1)


# ── held ────────────────────────────────────────────────────────────────────────────────────────


def predict_held(
    sizes: Layout,
    n: int,
    level: int,
    *,
    rank: int = 0,
    itemsize: int = 4,
    reduce_itemsize: int | None = None,
    shard_itemsize: int | None = None,
    optimizer: str = "adamw",
    accumulation: int = 1,
    reshard: bool = True,
    prefetch: bool = True,
    frozen: int = 0,
) -> Ledger:
    """Bytes of weights, gradients and optimizer state on a rank at the fullest moment of a step.

    What stays for the whole step is the paper's: whole, or the rank's share. What comes and goes:

    - level 1: the gradients, which come bucket by bucket in the first of `accumulation` backward
      passes; where the shards have a type of their own, their gradients, bucket by bucket;
    - level 2: the bucket that fills and the one that is being reduced;
    - level 3: the weights of the root, of the unit that computes and of the next one; the gradients
      of the root, of that unit and of the one before;
    - at all of them one gradient on its way into its bucket.

    Level 0 is plain data parallelism with everything whole. Activations are not in it. Arguments
    are those of `predict_sent`; without units or frozen ones in `sizes`, one flat parameter.

    >>> predict_held(1000, n=4, level=1).by("component")
    {'weights': 4000, 'optimizer': 2004, 'gradients': 8000}
    """
    reduce_itemsize = _checked(level, itemsize, reduce_itemsize)
    shard_itemsize = _checked(level, itemsize, shard_itemsize)
    if optimizer not in MOMENTS:
        raise ValueError(f"optimizer={optimizer!r}: use one of {', '.join(MOMENTS)}")
    dealt = units_of(sizes)
    parts = [part for unit in dealt for part in unit.dealt(n if level else 1)]
    owned = [part.bounds(rank if level else 0) for part in parts]
    stepped = sum(stop - start for start, stop in owned)
    shares = sum(part.share for part in parts)
    lines = []

    def book(component: str, name: str, nbytes: int) -> None:
        lines.append(Line(name, nbytes, component=component))

    if level == 3:
        resting = sum(part.share for unit in dealt for part in unit.dealt(n, frozen=True))
        book("weights", "weight shards", (shares + resting) * shard_itemsize)
    else:
        book("weights", "weights", (sum(part.padded for part in parts) + frozen) * itemsize)
    if level > 1:
        book("gradients", "gradient shards", shares * shard_itemsize)
    if level < 3 and shard_itemsize != itemsize:
        book("optimizer", "master weights", (shares if level else stepped) * shard_itemsize)
    for name in MOMENTS[optimizer]:
        book("optimizer", name, stepped * shard_itemsize)
    if len(MOMENTS[optimizer]) == 2:
        bounds = owned if level else [(0, part.numel) for part in parts]
        book("optimizer", "step", STEP * _pieces(dealt, bounds))

    widths = itemsize, reduce_itemsize, shard_itemsize
    if level == 0:
        moments = iter([{"gradients": sum(part.numel for part in parts) * reduce_itemsize}])
    elif level < 3:
        moments = _buckets_come(dealt, n, level, rank, *widths, accumulation)
    else:
        moments = _units_come(dealt, n, itemsize, reduce_itemsize, reshard, prefetch)
    for name, nbytes in max(moments, key=lambda moment: sum(moment.values())).items():
        book("weights" if "weights" in name else "gradients", name, nbytes)
    return Ledger(line for line in lines if line.amount).merged()


def _pieces(dealt: tuple[Unit, ...], bounds: list[tuple[int, int]]) -> int:
    """Of how many trained parameters something lies within the bounds of the flat parameters."""
    found = 0
    trained = [unit.trained + unit.after for unit in dealt if unit.trained + unit.after]
    for numels, (start, stop) in zip(trained, bounds, strict=True):
        starts = itertools.accumulate(numels, initial=0)
        found += sum(
            max(start, first) < min(stop, first + numel)
            for first, numel in zip(starts, numels, strict=False)
        )
    return found


def _buckets_come(
    dealt: tuple[Unit, ...], n: int, level: int, rank: int, itemsize: int, reduce_itemsize: int,
    shard_itemsize: int, accumulation: int,
) -> Iterator[dict[str, int]]:  # fmt: skip
    """Of levels 1 and 2 the gradients that come and go, at moments that may be the fullest."""
    parts = [part for unit in dealt for part in unit.dealt(n)]
    for i, unit in enumerate(dealt):
        coming = max(unit.trained) * itemsize
        if level == 2:
            filling = sum(part.padded for part in parts[max(0, i - 1) : i + 1])
            yield {"gradient buckets": filling * reduce_itemsize, "gradient on its way": coming}
            continue
        here = sum(part.padded for part in (parts if accumulation > 1 else parts[: i + 1]))
        yield {"gradients": here * reduce_itemsize, "gradient on its way": coming}
        if shard_itemsize != reduce_itemsize:
            whole = sum(part.padded for part in parts[i:]) * reduce_itemsize
            bounds = [part.bounds(rank) for part in parts[: i + 1]]
            landed = sum(stop - start for start, stop in bounds) * shard_itemsize
            yield {"gradients": whole, "gradient shards": landed}


def _units_come(
    dealt: tuple[Unit, ...], n: int, itemsize: int, reduce_itemsize: int, reshard: bool,
    prefetch: bool,
) -> Iterator[dict[str, int]]:  # fmt: skip
    """Of level 3 what is gathered and collected, at moments that may be the fullest."""
    root, last = dealt[0], len(dealt) - 1

    def moment(computing: int, ahead: int, buckets: set[int], coming: tuple[int, ...]) -> dict:
        whole = {0, computing} | ({ahead} if prefetch and 0 < ahead <= last else set())
        if not reshard:
            whole |= set(range(computing + 1))
        parts = [part for i in whole for part in dealt[i].dealt(n)]
        parts += [part for i in whole for part in dealt[i].dealt(n, frozen=True)]
        collected = sum(part.padded for i in buckets for part in dealt[i].dealt(n))
        return {
            "gathered weights": sum(part.padded for part in parts) * itemsize,
            "gradient buckets": collected * reduce_itemsize,
            "gradient on its way": max(coming, default=0) * itemsize,
        }

    for i in range(last + 1):
        yield moment(i, i + 1, set(), ())
    yield moment(0 if reshard else last, last, {0}, root.after)
    reducing: set[int] = set()
    for i in range(last, 0, -1):
        own = {i} if dealt[i].trained else set()
        yield moment(i, i - 1, {0} | own | reducing, dealt[i].trained)
        reducing = own or reducing
    yield moment(0, 0, {0} | reducing, root.trained)


# ── the paper's tables ──────────────────────────────────────────────────────────────────────────


def model_states(
    num_params: int | float, n: int, level: int, *, K: int = 12, gradient_bytes: int = 2
) -> Ledger:
    """Bytes of model states on each of n devices: 2, `gradient_bytes` and K for a parameter.

    >>> [round(model_states(7.5e9, 64, level).total / units.GB, 1) for level in (0, 1, 2, 3)]
    [120.0, 31.4, 16.6, 1.9]

    Source: Rajbhandari et al. 1910.02054, figure 1 and table 1.
    """
    each = _bytes_a_parameter(n, level, K, gradient_bytes)
    return Ledger(
        Line(name, round(size * Fraction(num_params)), component=name, axis="dp" * sharded)
        for name, size, sharded in each
    )


def largest_model(
    memory: int | float, n: int, level: int, *, K: int = 12, gradient_bytes: int = 2
) -> float:
    """Parameters of the largest model whose model states fill `memory` bytes on each of n devices.

    Times the degree of model parallelism, if there is any.

    >>> [round(largest_model(32 * units.GB, 64, level) / 1e9, 1) for level in (0, 1, 2, 3)]
    [2.0, 7.6, 14.4, 128.0]

    Source: Rajbhandari et al. 1910.02054, table 2.
    """
    each = _bytes_a_parameter(n, level, K, gradient_bytes)
    return float(Fraction(memory) / sum(size for _, size, _ in each))


def _bytes_a_parameter(
    n: int, level: int, K: int, gradient_bytes: int
) -> list[tuple[str, Fraction, bool]]:
    """Component, bytes on each device, whether it is divided: first the optimizer state is."""
    _checked(level, 1, None)
    units.whole(n, "n", 1)
    sizes = {"weights": (2, 3), "gradients": (units.whole(gradient_bytes, "gradient_bytes"), 2)}
    sizes["optimizer"] = units.whole(K, "K"), 1
    return [
        (name, Fraction(size, n if level >= first else 1), level >= first)
        for name, (size, first) in sizes.items()
    ]
