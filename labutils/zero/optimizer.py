"""Levels 1 and 2: every rank has all weights and steps its share of them."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from labutils.world import Comm
from labutils.zero.flat import Flat
from labutils.zero.groups import Given, grouped, named
from labutils.zero.partition import BUCKET_BYTES, buckets
from labutils.zero.update import Make, Partitioned, adamw


class Optimizer(Partitioned):
    """An optimizer of which every rank keeps 1/n of the state, for a model that every rank holds whole.

    Level 1 keeps the gradients of all micro-batches whole, until `zero_grad`, and reduce-scatters them once, in `step`. Level 2 reduce-scatters them bucket by
    bucket during every backward and keeps its share alone. Both all-gather the new weights in `step`.

    `optimizer` makes a torch optimizer of a list of parameters. `params` come in the order of the model; `groups` of them with settings of their
    own are given as torch optimizers take them, `[{"params": [...], "weight_decay": 0.1}, ...]`. Half weights get an fp32 `master` copy of
    this rank's share; `gradient_dtype` is the type in which gradients are kept and travel, the weights' own unless given; with `offload` the
    master copy and the optimizer's state live on that device. All ranks begin with rank 0's weights. Frozen parameters stay as they are.

    Cost: bytes sent as in `predict_sent`, bytes held as in `predict_held`.
    Source: Rajbhandari et al. 1910.02054, sections 5.1, 5.2 and 7.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[tuple[str, Tensor]], comm: Comm, optimizer: Make = adamw, *, level: int, groups: Given | None = None,
        master: bool | None = None, gradient_dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES, offload: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        if level not in (1, 2):
            remedy = {0: "data_parallel.replicate", 3: "zero.shard"}.get(
                level, "1 or 2 here, zero.shard for level 3"
            )
            raise ValueError(
                f"level={level!r} is not one of this optimizer's, 1 and 2: use {remedy}"
            )
        self.level = level
        known = named(params)
        settings = grouped(known, groups)
        trained = [
            (name, parameter) for name, parameter in known.items() if parameter.requires_grad
        ]
        self.constants = {
            name: parameter.data for name, parameter in known.items() if not parameter.requires_grad
        }
        for weights in self.constants.values():
            comm.broadcast(weights, out=weights)
        sizes = [parameter.numel() for _, parameter in trained]
        flats = []
        for bucket in buckets(sizes, trained[0][1].element_size(), bucket_bytes):
            members = sorted(
                (trained[i] for i in bucket), key=lambda member: settings.number[member[0]]
            )  # each group in one stretch
            flat = Flat(members, comm, gradient_dtype)
            for i, (view, (_, parameter)) in enumerate(
                zip(flat.views(flat.whole), members, strict=True)
            ):
                parameter.data = view
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(self._collect, flat, i)
                )
            flats.append(flat)
        self.leaves = [parameter for _, parameter in trained]
        super().__init__(flats, comm, optimizer, settings, master=master, offload=offload)

    def _publish(self, flat: Flat) -> Any:
        return flat.gather(async_op=True)
