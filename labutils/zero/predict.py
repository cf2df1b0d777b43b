"""What ZeRO sends and holds, from the sizes alone, and the paper's two tables."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from labutils import collectives, units
from labutils.config import MOMENTS
from labutils.ledger import Ledger, Line
from labutils.zero.partition import Layout, Partition, Unit, units_of

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
    level 3.

    >>> [predict_sent(1000, n=4, level=level).by("rank")[0] for level in (0, 1, 2, 3)]
    [6000, 6000, 6000, 9000]
    >>> S, N_d = 4096, 4  # bytes of weights, and of gradients
    >>> predict_sent(S // 4, N_d, level=2, rank=0).total == 2 * (N_d - 1) / N_d * S  # ZeRO-1 and -2
    True
    >>> predict_sent(S // 4, N_d, level=3, rank=0).total == 3 * (N_d - 1) / N_d * S  # ZeRO-3
    True

    Source: Rajbhandari et al. 1910.02054, section 7: 2Ψ, 2Ψ and 3Ψ.
    """
    level, n = _level(level), units.whole(n, "n", 1)
    itemsize, reduce_itemsize, shard_itemsize = _widths(itemsize, reduce_itemsize, shard_itemsize)
    accumulation = units.whole(accumulation, "accumulation", 1)
    steps, frozen = units.wholes(steps=steps, frozen=frozen)
    dealt, cut = units_of(sizes), n if level else 1  # at level 0 nothing is cut, nor padded
    trained = [part.padded for part in _parts(dealt, cut)]
    weights = trained + [part.padded for part in _parts(dealt, cut, frozen=True)]
    begun = shard_itemsize if level == 3 else itemsize  # the type of the model that is sharded
    gathers = steps * (accumulation * (1 + reshard) if level == 3 else 1)
    reduces = steps * (accumulation if level > 1 else 1)

    reduced = "reduce_scatter" if level else "all_reduce"
    calls = [(reduced, numel, reduce_itemsize, reduces) for numel in trained]
    if level:
        calls += [("all_gather", numel, itemsize, gathers) for numel in weights]
        calls += [("finite", 1, 4, steps * scaled)]
        calls += [("gradient norm", 1, 8, steps * clip)]
    if start:
        calls += [("broadcast", numel, begun, 1) for numel in (*weights, frozen) if numel]
    lines: list[Line] = []
    for name, numel, width, times in calls:
        algorithm = _ALGORITHMS.get(name, f"{name}_ring")
        each: dict[str, Any] = {
            "nbytes": numel * width,
            "n": n,
            "itemsize": width,
            "rank": rank,
            "name": name,
        }
        lines += collectives.sent(algorithm, **each).scaled(times)
    return Ledger(line for line in lines if line.count).merged()


_ALGORITHMS = {
    "broadcast": "broadcast_tree",
    "finite": "all_reduce_ring",
    "gradient norm": "all_reduce_ring",
}


def _level(level: int) -> int:
    if not units.is_whole(level) or level not in (0, 1, 2, 3):
        raise ValueError(
            f"level={level!r} is no level of ZeRO: use 0 (nothing is sharded), 1, 2 or 3"
        )
    return int(level)


def _widths(itemsize: int, reduce: int | None, shard: int | None) -> tuple[int, ...]:
    """Bytes of an element: of a weight, a gradient on its way, and a weight that is stepped."""
    reduce, shard = (itemsize if each is None else each for each in (reduce, shard))
    return units.wholes(1, itemsize=itemsize, reduce_itemsize=reduce, shard_itemsize=shard)


def _parts(dealt: Iterable[Unit], n: int, *, frozen: bool = False) -> list[Partition]:
    """The partitions of the flat parameters of all units."""
    return [part for unit in dealt for part in unit.dealt(n, frozen=frozen)]


def _padded(dealt: Iterable[Unit], n: int, *, frozen: bool = False) -> int:
    """The elements of these, padding included."""
    return sum(part.padded for part in _parts(dealt, n, frozen=frozen))


def _cuts(dealt: Iterable[Unit], n: int, rank: int) -> list[tuple[int, int]]:
    """Where in its shares a rank has the trained parameters of all units."""
    found = []
    for unit in dealt:
        for part in unit.dealt(n):
            found += part.cuts(unit.trained + unit.after, rank)
    return found


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

    Level 0 is plain data parallelism with everything whole. Activations are not in it, nor what a
    pipeline leaves between B and W: on any mesh see `predict.peak`. Arguments
    are those of `predict_sent`; without units or frozen ones in `sizes`, one flat parameter.

    >>> predict_held(1000, n=4, level=1).by("component")
    {'weights': 4000, 'optimizer': 2004, 'gradients': 8000}
    """
    level = _level(level)
    itemsize, reduce_itemsize, shard_itemsize = _widths(itemsize, reduce_itemsize, shard_itemsize)
    n, accumulation = units.wholes(1, n=n, accumulation=accumulation)
    frozen, rank = units.wholes(frozen=frozen, rank=rank)
    if rank >= n:
        raise ValueError(f"rank {rank} has no share: there are {n}, use 0 … {n - 1}")
    if optimizer not in MOMENTS:
        raise ValueError(f"optimizer={optimizer!r}: use one of {', '.join(MOMENTS)}")
    n, rank = (n, rank) if level else (1, 0)
    dealt = units_of(sizes)
    shares = _padded(dealt, n) // n
    cuts = _cuts(dealt, n, rank)
    stepped = sum(b - a for a, b in cuts)
    if level == 3:
        resting = _padded(dealt, n, frozen=True) // n
        held = {("weights", "weight shards"): (shares + resting) * shard_itemsize}
    else:
        held = {("weights", "weights"): (_padded(dealt, n) + frozen) * itemsize}
    if level > 1:
        held["gradients", "gradient shards"] = shares * shard_itemsize
    if level < 3 and shard_itemsize != itemsize:
        held["optimizer", "master weights"] = shares * shard_itemsize
    for name in MOMENTS[optimizer]:
        held["optimizer", name] = stepped * shard_itemsize
    if len(MOMENTS[optimizer]) == 2:
        held["optimizer", "step"] = STEP * sum(a < b for a, b in cuts)

    if level == 0:
        moments: Iterable[dict[str, int]] = [{"gradients": _padded(dealt, n) * reduce_itemsize}]
    elif level < 3:
        widths = itemsize, reduce_itemsize, shard_itemsize
        moments = _buckets_come(dealt, n, level, rank, *widths, accumulation)
    else:
        moments = _units_come(dealt, n, itemsize, reduce_itemsize, reshard, prefetch)
    for name, nbytes in max(moments, key=lambda moment: sum(moment.values())).items():
        held["weights" if "weights" in name else "gradients", name] = nbytes
    lines = (Line(name, nbytes, component) for (component, name), nbytes in held.items())
    return Ledger(line for line in lines if line.amount)


def _buckets_come(
    dealt: tuple[Unit, ...], n: int, level: int, rank: int, itemsize: int, reduce_itemsize: int,
    shard_itemsize: int, accumulation: int,
) -> Iterator[dict[str, int]]:  # fmt: skip
    """Of levels 1 and 2 the gradients that come and go, at moments that may be the fullest."""
    padded, landed = [_padded([unit], n) for unit in dealt], 0
    for i, unit in enumerate(dealt):
        coming = max(unit.trained) * itemsize
        if level == 2:
            filling = sum(padded[max(0, i - 1) : i + 1]) * reduce_itemsize
            yield {"gradient buckets": filling, "gradient on its way": coming}
            continue
        here = sum(padded if accumulation > 1 else padded[: i + 1]) * reduce_itemsize
        yield {"gradients": here, "gradient on its way": coming}
        landed += sum(b - a for a, b in _cuts([unit], n, rank)) * shard_itemsize
        if shard_itemsize != reduce_itemsize:
            yield {"gradients": sum(padded[i:]) * reduce_itemsize, "gradient shards": landed}


def _units_come(
    dealt: tuple[Unit, ...], n: int, itemsize: int, reduce_itemsize: int, reshard: bool,
    prefetch: bool,
) -> Iterator[dict[str, int]]:  # fmt: skip
    """Of level 3 what is gathered and collected, at moments that may be the fullest."""
    trained = [_padded([unit], n) for unit in dealt]
    weights = [_padded([unit], n, frozen=True) + trained[i] for i, unit in enumerate(dealt)]
    root, last = dealt[0], len(dealt) - 1

    def moment(computing: int, ahead: int, buckets: set[int], coming: tuple[int, ...]) -> dict:
        whole = {0, computing} | ({ahead} if prefetch and 0 < ahead <= last else set())
        if not reshard:
            whole |= set(range(computing + 1))
        return {
            "gathered weights": sum(weights[i] for i in whole) * itemsize,
            "gradient buckets": sum(trained[i] for i in buckets) * reduce_itemsize,
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
    >>> Ψ, N_d, K = 7.5e9, 64, 12
    >>> model_states(Ψ, N_d, 0, K=K).total == (2 + 2 + K) * Ψ  # data parallelism
    True
    >>> model_states(Ψ, N_d, 1, K=K).total == (2 + 2 + K / N_d) * Ψ  # ZeRO-1
    True
    >>> model_states(Ψ, N_d, 2, K=K).total == (2 + (2 + K) / N_d) * Ψ  # ZeRO-2
    True
    >>> model_states(Ψ, N_d, 3, K=K).total == (2 + 2 + K) / N_d * Ψ  # ZeRO-3
    True

    Source: Rajbhandari et al. 1910.02054, figure 1 and table 1.
    """
    units.positive(num_params, "num_params")
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
    units.positive(memory, "memory", or_zero=True)
    each = _bytes_a_parameter(n, level, K, gradient_bytes)
    return float(Fraction(memory) / sum(size for _, size, _ in each))


def _bytes_a_parameter(
    n: int, level: int, K: int, gradient_bytes: int
) -> list[tuple[str, Fraction, bool]]:
    """Component, bytes on each device, whether it is divided: first the optimizer state is."""
    level, n = _level(level), units.whole(n, "n", 1)
    sizes = [
        ("weights", 2, 3),
        ("gradients", units.whole(gradient_bytes, "gradient_bytes"), 2),
        ("optimizer", units.whole(K, "K"), 1),
    ]
    return [
        (name, Fraction(size, n if level >= first else 1), level >= first)
        for name, size, first in sizes
    ]
