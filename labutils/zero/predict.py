"""What ZeRO sends and holds, from the sizes alone, and the paper's two tables."""

import dataclasses
from collections.abc import Iterable, Iterator
from fractions import Fraction

from labutils import collectives, units
from labutils.ledger import Ledger, Line
from labutils.zero.partition import Layout, Unit, layout

MOMENTS = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
STEP = 4  # Adam counts its steps once for each flat tensor, and each group in it


def _checked(level: int, itemsize: int = 4, gradient_itemsize: int | None = None) -> int:
    if level not in (0, 1, 2, 3):
        raise ValueError(
            f"level={level!r} is no level of ZeRO: use 0 (nothing is sharded), 1, 2 or 3"
        )
    units.whole(itemsize, "itemsize", 1)
    return (
        itemsize
        if gradient_itemsize is None
        else units.whole(gradient_itemsize, "gradient_itemsize", 1)
    )


# ── sent ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def predict_sent(
    sizes: Layout, n: int, level: int, *, itemsize: int = 4, gradient_itemsize: int | None = None, accumulation: int = 1, steps: int = 1,
    reshard: bool = True, clip: bool = False, scaled: bool = False, start: bool = False, frozen: int = 0, axis: str = "dp",
) -> Ledger:  # fmt: skip
    """Bytes that each of `n` ranks sends in `steps` steps, under the names of `World.ledger`: a line for each operation and rank.

    - all_reduce: at level 0, which is plain data parallelism, all gradients once a step;
    - reduce_scatter: all gradients, once a step at level 1, once in each of `accumulation` backward passes at levels 2 and 3;
    - all_gather: all weights, once a step at levels 1 and 2; at level 3 once in each pass forward and, with `reshard`, once backward;
    - gradient norm: one number, with `clip`; finite: one number, where the loss is `scaled`, with a `LossScaler`;
    - broadcast: the weights of rank 0, with `start`, `frozen` ones of levels 1 and 2 too.

    With P = Ψ + padding that is 2·P·(n − 1)/n elements a rank and step, and 3·P·(n − 1)/n at level 3; the padding is in the notes.

    >>> [predict_sent(1000, n=4, level=level).by("rank")[0] for level in (0, 1, 2, 3)]
    [6000, 6000, 6000, 9000]

    Source: Rajbhandari et al. 1910.02054, section 7: 2Ψ, 2Ψ and 3Ψ.
    """
    gradient_itemsize = _checked(level, itemsize, gradient_itemsize)
    units.whole(accumulation, "accumulation", 1)
    dealt = layout(sizes)
    trained = [part for unit in dealt for part in unit.dealt(n, frozen=False)]
    gathered = trained + [part for unit in dealt for part in unit.dealt(n, frozen=True)]
    backward = accumulation if level > 1 else 1
    forward = accumulation * (1 + reshard) if level == 3 else 1

    lines: list[Line] = []

    def book(op: str, algorithm: str, numel: int, width: int, times: int, padding: int = 0) -> None:
        note = f"{padding:,} of {numel:,} elements are padding" if padding else ""
        for line in collectives.sent(
            algorithm, nbytes=numel * width, n=n, itemsize=width, axis=axis
        ):
            if line.count * times:
                lines.append(
                    dataclasses.replace(
                        line,
                        name=op,
                        amount=line.amount * times,
                        count=line.count * times,
                        note=note,
                    )
                )

    for part in trained:
        if level == 0:
            book("all_reduce", "all_reduce_ring", part.numel, gradient_itemsize, steps)
        else:
            book(
                "reduce_scatter",
                "reduce_scatter_ring",
                part.padded,
                gradient_itemsize,
                steps * backward,
                part.padding,
            )
    for part in gathered:
        if level > 0:
            book(
                "all_gather",
                "all_gather_ring",
                part.padded,
                itemsize,
                steps * forward,
                part.padding,
            )
        book(
            "broadcast",
            "broadcast_tree",
            part.padded if level else part.numel,
            itemsize,
            start,
            part.padding if level else 0,
        )
    if frozen:
        book("broadcast", "broadcast_tree", frozen, itemsize, start)
    book("finite", "all_reduce_ring", 1, 4, steps * scaled * (level > 0))
    book(
        "gradient norm", "all_reduce_ring", 1, max(4, gradient_itemsize), steps * clip * (level > 0)
    )
    return Ledger(lines).merged()


# ── held ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def predict_held(
    sizes: Layout, n: int, level: int, *, itemsize: int = 4, gradient_itemsize: int | None = None, optimizer: str = "adamw", master: bool = False,
    reshard: bool = True, prefetch: bool = True, offload: bool = False, frozen: int = 0, accumulation: int = 1,
) -> Ledger:  # fmt: skip
    """Bytes of weights, gradients and optimizer state on a rank at the fullest moment of a step, under the names of `held`.

    What stays for the whole step is the paper's: whole or 1/n. What comes and goes is ours: at level 1 the gradients, which come bucket by
    bucket in the first of `accumulation` backward passes and are all there at the end of it; at level 2 the bucket that fills and the one
    that is being reduced; at level 3 the weights of the root, of the unit that computes and of the next one, and gradient buckets of the
    root and of two units; one gradient on its way into its bucket; with a master copy the gradient of one shard in its precision.
    With `offload` the optimizer's lines are in the memory of the other device. `frozen` elements are whole at levels 1 and 2.

    Level 0 is plain data parallelism with everything whole. Activations are not in it: they are those of a model that is not sharded.

    >>> predict_held(1000, n=4, level=1).by("component")
    {'weights': 4000, 'optimizer': 2004, 'gradients': 8000}
    """
    gradient_itemsize = _checked(level, itemsize, gradient_itemsize)
    units.whole(accumulation, "accumulation", 1)
    if optimizer not in MOMENTS:
        raise ValueError(
            f"optimizer={optimizer!r} is unknown here: use one of {', '.join(MOMENTS)}"
        )
    dealt = layout(sizes)
    trained = [part for unit in dealt for part in unit.dealt(n, frozen=False)]
    resting = trained + [part for unit in dealt for part in unit.dealt(n, frozen=True)]
    share, wide = sum(part.share if level else part.numel for part in trained), max(4, itemsize)
    stepped = wide if master or offload else itemsize

    whole = sum(part.padded if level else part.numel for part in trained)
    weights, gradients = (
        ("weight shards" if level == 3 else "weights"),
        ("gradient shards" if level > 1 else "gradients"),
    )
    lines = [
        Line(
            weights,
            (sum(part.share for part in resting) if level == 3 else whole + frozen) * itemsize,
            component="weights",
        )
    ]
    if level != 1:
        lines.append(
            Line(
                gradients,
                (share if level > 1 else whole) * gradient_itemsize,
                component="gradients",
            )
        )
    if master or offload:
        lines.append(Line("master weights", share * wide, component="optimizer"))
    lines += [Line(name, share * stepped, component="optimizer") for name in MOMENTS[optimizer]]
    if len(MOMENTS[optimizer]) == 2:
        lines.append(
            Line(
                "step",
                STEP * sum(unit.groups for unit in dealt if unit.trained or unit.after),
                component="optimizer",
            )
        )

    moments = list(
        _Step(dealt, n, itemsize, gradient_itemsize, reshard, prefetch, accumulation).moments(level)
    )
    if level and (offload or stepped != gradient_itemsize):
        moments += [
            {
                "gradients": whole * gradient_itemsize * (level == 1),
                "gradient to step": part.share * stepped,
            }
            for part in trained
        ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    lines += [
        Line(name, amount, component="weights" if "weights" in name else "gradients")
        for name, amount in fullest.items()
        if amount
    ]
    return Ledger(lines)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Walks through a step and yields what comes and goes, in bytes, at the moments that may be the fullest."""

    dealt: tuple[Unit, ...]
    n: int
    itemsize: int
    gradient_itemsize: int
    reshard: bool
    prefetch: bool
    accumulation: int

    def moments(self, level: int) -> Iterator[dict[str, int]]:
        match level:
            case 0:
                yield {}
            case 1:
                for i, unit in enumerate(self.dealt):
                    here = len(self.dealt) if self.accumulation > 1 else i + 1
                    yield {
                        "gradients": self.elements(range(here)) * self.gradient_itemsize,
                        "gradient on its way": self.largest(unit),
                    }
            case 2:
                for i in range(len(self.dealt)):
                    yield self.moment(buckets={i - 1, i} - {-1}, coming=self.largest(self.dealt[i]))
            case 3:
                yield from self.forward()
                yield from self.backward()

    def forward(self) -> Iterator[dict[str, int]]:
        """The root, the unit that computes and the next one; without reshard also all before."""
        for i in range(len(self.dealt)):
            before = {0, i} if self.reshard else set(range(i + 1))
            yield self.moment(gathered=before | self.ahead(i + 1))

    def backward(self) -> Iterator[dict[str, int]]:
        root, last = self.dealt[0], len(self.dealt) - 1
        first = {0} | self.ahead(last) if self.reshard else set(range(last + 1))
        yield self.moment(
            gathered=first, buckets={0}, coming=max(root.after, default=0) * self.itemsize
        )
        reducing: set[int] = set()
        for i in range(last, 0, -1):
            unit = self.dealt[i]
            gathered = {0, i} | self.ahead(i - 1) if self.reshard else set(range(i + 1))
            own = {i} if unit.trained else set()
            yield self.moment(
                gathered=gathered, buckets={0} | own | reducing, coming=self.largest(unit)
            )
            reducing = own or reducing
        yield self.moment(
            gathered={0},
            buckets={0} | reducing,
            coming=max(root.trained, default=0) * self.itemsize,
        )

    def ahead(self, i: int) -> set[int]:
        return {i} if self.prefetch and 0 < i < len(self.dealt) else set()

    def largest(self, unit: Unit) -> int:
        return max(unit.trained + unit.after, default=0) * self.itemsize

    def elements(self, units: Iterable[int], frozen: bool = False) -> int:
        return sum(
            part.padded for i in units for part in self.dealt[i].dealt(self.n, frozen=frozen)
        )

    def moment(
        self, gathered: set[int] = frozenset(), buckets: set[int] = frozenset(), coming: int = 0
    ) -> dict[str, int]:
        return {
            "gathered weights": (self.elements(gathered) + self.elements(gathered, frozen=True))
            * self.itemsize,
            "gradient buckets": self.elements(buckets) * self.gradient_itemsize,
            "gradient on its way": coming,
        }


# ── the paper's tables ─────────────────────────────────────────────────────────────────────────────────────────────


def model_states(
    num_params: int | float, n: int, level: int, *, K: int = 12, gradient_bytes: int = 2
) -> float:
    """Bytes of model states on each of n devices: half weights, gradients (half unless given), K bytes of optimizer state a parameter.

    >>> [round(model_states(7.5e9, 64, level) / units.GB, 1) for level in (0, 1, 2, 3)]
    [120.0, 31.4, 16.6, 1.9]

    Source: Rajbhandari et al. 1910.02054, figure 1 and table 1.
    """
    return float(Fraction(num_params) * _bytes_a_parameter(n, level, K, gradient_bytes))


def largest_model(
    memory: int | float, n: int, level: int, *, K: int = 12, gradient_bytes: int = 2
) -> float:
    """Parameters of the largest model whose model states fill `memory` bytes on each of n devices; times the degree of model parallelism, if any.

    >>> [round(largest_model(32 * units.GB, 64, level) / 1e9, 1) for level in (0, 1, 2, 3)]
    [2.0, 7.6, 14.4, 128.0]

    Source: Rajbhandari et al. 1910.02054, table 2.
    """
    return float(Fraction(memory) / _bytes_a_parameter(n, level, K, gradient_bytes))


def _bytes_a_parameter(n: int, level: int, K: int, gradient_bytes: int) -> Fraction:
    """What is left of 2 + 2 + K bytes when the optimizer state, then the gradients, then the weights are divided by n."""
    _checked(level)
    sizes = units.whole(K, "K"), units.whole(gradient_bytes, "gradient_bytes"), 2
    return sum(
        Fraction(size, units.whole(n, "n", 1) if level > i else 1) for i, size in enumerate(sizes)
    )
