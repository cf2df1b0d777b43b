"""The order of level 3: when a unit of a fully sharded module is gathered, used, freed."""


def unit_order(num_units: int) -> list[tuple[str, int]]:
    """The steps of one training step over so many units, as pairs of a verb and a unit.

    At most two units are whole at once, the one that computes and the next, which is on its way.

    >>> unit_order(2)[:5]
    [('gather', 0), ('gather', 1), ('forward', 0), ('free', 0), ('forward', 1)]

    Cost: two gathers and a reduce-scatter of every unit but the last, which is gathered once.
    """
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
