"""Gradient clipping where every rank has a shard of the gradient: one norm for all."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labutils import units
from labutils.world import Comm


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], comm: Comm, max_norm: float
) -> Float[Tensor, ""]:
    """The norm of the whole gradient, the same on all ranks, after scaling it to at most max_norm.

    parameters  this rank's shards: of a module that is sharded, or what `Optimizer.collect` returns
    comm        the ranks that have the rest

    Cost: one all-reduce of a single number, booked as "gradient norm".
    """
    parameters = list(parameters)
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    square = torch.zeros((), dtype=wide, device=parameters[0].device)
    for parameter in parameters:
        if parameter.grad is not None:
            square += torch.linalg.vector_norm(parameter.grad, dtype=wide) ** 2
    with comm.record("gradient norm"):
        norm = comm.all_reduce(square).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, units.positive(max_norm, "max_norm"), norm)
    return norm
