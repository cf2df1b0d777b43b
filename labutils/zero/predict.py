"""What ZeRO divides, by the paper's formulas for Ψ parameters."""

from fractions import Fraction

from labutils import units
from labutils.ledger import Ledger, Line


def model_states(
    num_params: int | float, n: int, level: int, *, K: int = 12, gradient_bytes: int = 2
) -> Ledger:
    """Bytes of model states on each of n devices at a ZeRO level, of `num_params` parameters: 2,
    `gradient_bytes` and K for each.

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

    Raises ValueError for what is no level of ZeRO.
    Source: Rajbhandari et al. 1910.02054, figure 1 and table 1.
    """
    num_params = units.positive(num_params, "num_params")
    n = units.whole(n, "n", 1)
    if not units.is_whole(level) or level not in (0, 1, 2, 3):
        raise ValueError(
            f"level={level!r} is no level of ZeRO: use 0 (nothing is sharded), 1, 2 or 3"
        )
    gradients, states = units.whole(gradient_bytes, "gradient_bytes"), units.whole(K, "K")
    found, sizes = [], dict(weights=(2, 3), gradients=(gradients, 2), optimizer=(states, 1))
    for name, (size, first) in sizes.items():  # and the level that first divides it
        each = Fraction(size, n if level >= first else 1) * Fraction(num_params)
        found.append(Line(name, round(each), component=name, axis="dp" * int(level >= first)))
    return Ledger(found)
