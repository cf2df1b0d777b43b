"""The order of level 3: when a unit of a fully sharded module is gathered, used, freed, and how
long a step takes in that order."""

from collections.abc import Iterable, Sequence

from labutils import clock, collectives, units
from labutils.config import Link


def unit_order(num_units: int) -> list[tuple[str, int]]:
    """The steps of one training step over so many units, as pairs of a verb and a unit.

    At most two units are whole at once, the one that computes and the next, which is on its way.

    >>> unit_order(2)[:5]
    [('gather', 0), ('gather', 1), ('forward', 0), ('free', 0), ('forward', 1)]

    Cost: two gathers and a reduce-scatter of every unit but the last, which is gathered once.
    """
    num_units = units.whole(num_units, "num_units", 1)
    units.writable(num_units, "num_units is", "take fewer")
    last = num_units - 1
    steps: list[tuple[str, int]] = [("gather", 0)]
    for i in range(num_units):
        steps += [("gather", i + 1)] * (i < last)
        steps += [("forward", i)]
        steps += [("free", i)] * (i < last)  # the last unit's backward comes next
    for i in reversed(range(num_units)):
        steps += [("gather", i - 1)] * (i > 0)
        steps += [("backward", i), ("free", i), ("reduce", i)]
    return steps


def step_timeline(
    order: Iterable[tuple[str, int]], layers: Sequence[tuple[int, float]], *, n: int, link: Link
) -> clock.Played:
    """A step in an `order` as each of `n` ranks sees it, in seconds.

    A rank computes one thing and sends one thing at a time. What an order names is begun when the
    computations named before it are over; a computation waits for the weights of its unit, which
    are there from the start if they have not been gathered yet.

    layers: of each unit the bytes of its weights, and the seconds of its forward pass; its backward
        pass takes twice as long, its gradient travels in as many bytes
    link: gathers and reductions take what a ring costs on it

    >>> order = unit_order(2)
    >>> [step_timeline(order, [(1000, t)] * 2, n=2, link=Link(0, 500)).exposed for t in (1.0, 0.5)]
    [2.0, 2.5]

    Raises ValueError for what no order names, and for a layer that is not there.
    """
    rings = {"gather": "all_gather_ring", "reduce": "reduce_scatter_ring"}
    tasks: list[clock.Task] = []
    computed: list[clock.Task] = []  # the last one
    here: dict[int, list[clock.Task]] = {}
    units.instance(order, Iterable, "step_timeline")
    for what, i in order:
        if what not in (*rings, "forward", "backward", "free") or not 0 <= i < len(layers):
            known = "gather, forward, free, backward and reduce"
            told = f"an order names {known} of layers 0 … {len(layers) - 1}"
            raise ValueError(f"{told}, got {(what, i)!r}: zero.unit_order({len(layers)}) is one")
        nbytes, seconds = layers[i][0], units.positive(layers[i][1], "seconds", or_zero=True)
        name = f"layer {i}"
        if what in rings:
            seconds = collectives.cost(rings[what], nbytes, n, link)
            tasks.append(clock.Task("link", seconds, computed, what, name))
            if what == "gather":
                here[i] = tasks[-1:]
        elif what != "free":
            seconds = seconds if what == "forward" else 2 * seconds
            tasks.append(clock.Task("rank", seconds, here.get(i, ()), what, name))
            computed = tasks[-1:]
    return clock.play(tasks)
