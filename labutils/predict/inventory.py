"""What one rank of a mesh has: its stages, how often each runs, and every parameter, in order."""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from labutils import anatomy
from labutils.anatomy import WIDTHS
from labutils.config import Mesh, ModelConfig, TrainConfig

OTHERS, _SPREAD = ("dp", "cp"), ("edp",)
"""The axes of the ranks that have a weight alike: one of experts that ep spreads, or any other."""


@dataclass(frozen=True)
class Weight:
    """A parameter of a rank: its name in the whole model, elements and bytes of each here, the part
    of the table that it belongs to, how tensor parallelism cuts that ("column", "row",
    "vocabulary", "whole"), on how many neighbours it is the same piece, the stages whose backward
    passes give its gradient, whether it is trained, over which axes gradients are averaged."""

    name: str
    numel: int
    width: int
    part: str
    style: str
    alike: int
    stages: tuple[int, ...]
    trained: bool
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.numel * self.width


@dataclass(frozen=True)
class Placed:
    """A stage of a rank: its number, its first layer and the one behind its last, whether it has
    the embedding or the head, how often a step runs it forward, and how many backward passes give
    gradients of its weights."""

    index: int
    first: int
    end: int
    embeds: bool
    heads: bool
    runs: int
    passes: int

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self.end - self.first


class Here:
    """The inventory of `rank`, from which all that is predicted of it is summed up.

    compute, stream: bytes of a number in matrix products and in the residual stream
    kept: and of a weight between steps, which level 3 keeps in fp32
    tokens: of a micro-batch, those of a rank of cp; own: of these those of a rank of tp, where
        sequence parallelism shares them out
    """

    def __init__(self, model: ModelConfig, train: TrainConfig, mesh: Mesh, rank: int) -> None:
        from labutils import step  # what is imported in functions loads torch
        from labutils.pipeline.stages import cut, placed

        self.model, self.train, self.mesh, self.rank = model, train, mesh, rank
        step.check_plan(model, train, mesh)
        self.coords = mesh.coords(rank)
        self.plan = step.schedule_of(train, mesh)
        self.stream = 2 if train.half else WIDTHS[train.precision if not train.autocast else "fp32"]
        self.compute = WIDTHS[train.precision]
        self.kept = max(4, self.stream) if train.zero == 3 else self.stream
        self.tokens = train.micro_batch * model.seq_len // mesh.cp
        self.own = self.tokens // mesh.tp if train.sequence else self.tokens
        layers = train.layers or cut(model, self.plan.stages)
        done = Counter((op.kind, op.stage) for op in self.plan.ranks[self.coords["pp"]])
        kind = self.plan.kinds[-1]
        ends, last = list(itertools.accumulate(layers, initial=0)), self.plan.stages - 1
        self.stages = [
            Placed(i, ends[i], ends[i + 1], i == 0, i == last, done["F", i], done[kind, i])
            for i in placed(self.plan, self.coords["pp"])
        ]  # fmt: skip

    @functools.cached_property
    def weights(self) -> list[Weight]:
        """Every parameter, as `named_parameters()` of the rank's stages have them."""
        shapes = dict(self._shapes)
        if self.model.tied:
            shapes["head.weight"] = shapes["tokens.weight"]
        at: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in shapes.items():
            words = name.split(".")
            at.setdefault(words[1] if words[0] == "blocks" else words[0], []).append((name, shape))
        found: dict[str, Weight] = {}
        for stage in self.stages:
            blocks = map(str, range(stage.first, stage.end))
            ends = ["tokens", "positions"] * stage.embeds, ["norm", "head"] * stage.heads
            for place in (*ends[0], *blocks, *ends[1]):
                for name, shape in at.get(place, ()):
                    again = name == "head.weight" and self.model.tied and "tokens.weight" in found
                    if not again and self._mine(name):
                        made = self._made(name, shape, stage.index)
                        found |= {weight.name: weight for weight in made}
        return list(found.values())

    def _mine(self, name: str) -> bool:
        """Whether an expert is this rank's; of all else, yes."""
        each = self.model.num_experts // self.mesh.ep
        expert = name.partition("experts.")[2].partition(".")[0]
        return not expert or int(expert) // each == self.coords["ep"]

    def _made(self, name: str, shape: tuple[int, ...], stage: int) -> Iterator[Weight]:
        """A parameter as it is on this rank, and behind a weight its adapter."""
        path, _, kind = name.rpartition(".")
        part = re.sub(r"\d+", "*", path)
        style, t = self._styles[part], self.mesh.tp
        pieces = min(t, self._heads.get(part, t)) if style in ("column", "vocabulary") else t
        cut = style != "whole" and not (style == "row" and kind == "bias")
        ends = (0, self.plan.stages - 1)[: min(self.plan.stages, 2)]
        tied = self.model.tied and name in ("tokens.weight", "head.weight")
        adapters = self.train.adapters
        known = "tokens.weight" if tied else name  # one parameter, under its first name
        frozen = adapters or any(fnmatchcase(known, p) for p in self.train.frozen)
        base = Weight(
            name, math.prod(shape) // (pieces if cut else 1), self.kept, part, style,
            t // pieces if cut else 1, ends if tied else (stage,), not frozen,
            _SPREAD if ".experts." in name and self.mesh.ep > 1 else OTHERS,
        )  # fmt: skip
        packed = adapters is not None and adapters.base == "nf4"
        if packed and kind == "weight" and part in self._linear:
            from labutils import quantization

            base = replace(base, numel=quantization.nf4_bytes(base.numel), width=1)
        if adapters is None or part not in self._adapted:
            yield base
            return
        width = 4 if packed else max(4, self.stream)
        yield replace(base, name=f"{path}.base.{kind}")
        last = "bias" if f"{path}.bias" in self._shapes else "weight"
        if kind == last:
            (d, k), r = self._shapes[f"{path}.weight"], adapters.rank
            sizes = {"A": r * k // (t if style == "row" else 1)}
            sizes["B"] = r * d // (pieces if style == "column" else 1)
            for letter, numel in sizes.items():
                alike = t // pieces if (style, letter) == ("column", "B") else 1
                at = f"{path}.adapters.default.{letter}"
                yield replace(base, name=at, numel=numel, width=width, alike=alike, trained=True)

    @functools.cached_property
    def _styles(self) -> dict[str, str]:
        from labutils import tensor_parallel

        return tensor_parallel.styles(self.model)

    @functools.cached_property
    def _heads(self) -> dict[str, int]:
        """Key–value heads, which tensor parallelism does not cut."""
        g = self.model.num_kv_heads
        return {f"blocks.*.attention.{name}": g for name in ("key", "value")}

    @functools.cached_property
    def _linear(self) -> set[str]:
        """The layers that NF4 packs, with an adapter or without."""
        from labutils import lora

        return {part.name for part in lora.targets(self.model)}

    @functools.cached_property
    def _adapted(self) -> set[str]:
        from labutils import lora

        chosen = self.train.adapters
        return {p.name for p in lora.targets(self.model, chosen.pattern)} if chosen else set()

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return anatomy.tensors(self.model)

    def sides(self) -> Iterator[tuple[tuple[str, ...], int, int, list[Weight]]]:
        """What is trained, by the axes over which it is averaged: these, how many ranks that are,
        which of them this one is, and the parameters; at level 3 in `units` that know them."""
        for axes in (OTHERS, _SPREAD):
            trained = [w for w in self.weights if w.trained and w.axes == axes]
            if trained or (self.train.zero == 3 and axes == OTHERS):
                ranks = self.mesh.ranks(self.rank, *axes)
                yield axes, len(ranks), ranks.index(self.rank), trained

    def passes(self, weight: Weight) -> int:
        """Backward passes of a step that give its gradient here."""
        return sum(stage.passes for stage in self.stages if stage.index in weight.stages)

    def units(self, trained: list[Weight], n: int, rank: int) -> Iterator["Flat"]:
        """The flat parameters in which ZeRO keeps them: at levels 1 and 2 buckets, of each stage
        its own, at level 3 a root and layers for each stage, frozen ones apart."""
        from labutils import data_parallel

        groups: dict[tuple, list[Weight]] = {}
        if self.train.zero < 3:
            for weight in trained:
                groups.setdefault(weight.stages, []).append(weight)
            for together in groups.values():
                sizes = [weight.nbytes for weight in together]
                for bucket in data_parallel.buckets(sizes, self.train.bucket_bytes):
                    yield Flat([together[i] for i in bucket.names], n, rank)
            return
        for weight in self.weights:
            block = weight.name.split(".")[1] if weight.name.startswith("blocks.") else ""
            groups.setdefault((weight.stages, block, weight.trained), []).append(weight)
        yield from (Flat(together, n, rank) for together in groups.values())


class Flat:
    """A flat parameter of ZeRO: its weights, its partition, what of each is in a rank's share."""

    def __init__(self, weights: list[Weight], n: int, rank: int) -> None:
        from labutils import zero

        numels = [weight.numel for weight in weights]
        self.weights, self.part = weights, zero.partition(sum(numels), n)
        self.own = [b - a for a, b in self.part.cuts(numels, rank)]
        self.width, self.trained = weights[0].width, weights[0].trained
