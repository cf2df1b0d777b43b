"""Levels 1 and 2: every rank has all weights and steps its share of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from labutils import data_parallel, measure, units
from labutils.world import Comm
from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.reducer import Reducer

Make = Callable[[list[Any]], torch.optim.Optimizer]


class Optimizer:
    """An optimizer of which every rank keeps 1/n of the state, for a model that all hold whole.

    Level 1 keeps the gradients of all micro-batches whole, until `zero_grad`, and reduce-scatters
    them once, in `step`. Level 2 reduce-scatters them bucket by bucket during every backward and
    keeps its share alone. Both all-gather the new weights in `step`.

    params        in the order of the model, with or without names; frozen ones stay as they are
    make          makes a torch optimizer of such a list, of which it is given this rank's pieces:
                  with names it can put them into groups with settings of their own
    reduce_dtype  in which gradients are kept and travel; the weights' own unless given
    bucket_bytes  what is reduced and gathered at once

    That optimizer, `inner`, must treat every element alike (SGD, Adam, AdamW, …): it sees stretches
    of a parameter. It is what a schedule of the learning rate takes. Half-precision weights have
    an fp32 master copy of this rank's share, which is stepped. All ranks begin with the weights of
    rank 0.

    Cost: bytes sent as in `predict.sent`, held as in `predict.peak_states`.
    Source: Rajbhandari et al. 1910.02054, sections 5.1, 5.2 and 7.
    """

    def __init__(
        self,
        params: Iterable[Any],
        comm: Comm,
        make: Make = torch.optim.AdamW,
        *,
        level: int,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = data_parallel.BUCKET_BYTES,
    ) -> None:
        if level not in (1, 2):
            remedy = {0: "data_parallel.replicate", 3: "zero.shard"}.get(level, "1 or 2")
            raise ValueError(f"level={level!r} is not of this optimizer, 1 or 2: use {remedy}")
        units.instance(params, Iterable, "zero.Optimizer")
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        for _, parameter in named:
            if not parameter.requires_grad:
                comm.broadcast(parameter.data, out=parameter.data)
        self.reducers = []
        for together in _passes(trained):
            sizes = [parameter.nbytes for parameter in together]
            buckets = data_parallel.buckets(sizes, bucket_bytes)
            members = [[together[i] for i in bucket.names] for bucket in buckets]
            flats = [
                FlatParameter(
                    each, comm, sharded=False, reduce_dtype=reduce_dtype,
                    shard_dtype=torch.promote_types(each[0].dtype, torch.float32),
                )
                for each in members
            ]  # fmt: skip
            self.reducers.append(Reducer(flats, eager=level == 2))
        self.flats = [flat for reducer in self.reducers for flat in reducer.flats]
        self.pieces: dict[nn.Parameter, nn.Parameter] = {}
        for flat in self.flats:
            self.pieces |= zip(flat.wholes, flat.pieces, strict=True)
        mine = [(name, self.pieces[p]) for name, p in named if p.requires_grad]
        self.inner = make([piece if name is None else (name, piece) for name, piece in mine])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of `inner`, to be read and changed."""
        return self.inner.param_groups

    def collect(self) -> list[nn.Parameter]:
        """This rank's pieces with their mean gradient, which at level 1 is reduced by this."""
        for reducer in self.reducers:
            if reducer.pending:
                reducer.finish()
        return list(self.pieces.values())

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's shards, bucket by bucket, and gather each as soon as it is done."""
        with measure.phase("optimizer"):
            gradients = {piece: piece.grad for piece in self.collect()}
            under_way = []
            for piece in gradients:
                piece.grad = None
            for flat in self.flats:
                for piece in flat.pieces:
                    piece.grad = gradients[piece]
                self.inner.step()  # of this bucket alone: the others have no gradient now
                for piece in flat.pieces:
                    piece.grad = None
                under_way.append(flat.gather(async_op=True))
            for work in under_way:
                work.wait()
            for piece, gradient in gradients.items():
                piece.grad = gradient

    def zero_grad(self) -> None:
        """Forget the gradients, also those of a backward pass that failed."""
        for reducer in self.reducers:
            reducer.reset()
        for piece in self.pieces.values():
            piece.grad = None


def _passes(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those whose gradients come in the same backward passes, the last ones first: of a pipeline
    each stage has its own, and a tied embedding has those of both ends (`pipeline.split`)."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "stages", None), []).append(parameter)
    return list(reversed(found.values()))
