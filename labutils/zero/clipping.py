"""Gradient clipping over ranks: one norm, that of the whole mesh."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labutils import units, world
from labutils.gradients import gradient_of
from labutils.world import Comm


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], comm: Comm, max_norm: float
) -> Float[Tensor, ""]:
    """The norm of the whole gradient, the same on all ranks, after scaling it to at most max_norm.

    parameters  this rank's, with their gradients reduced: of a module, whatever changed it, or what
                `Optimizer.collect` returns
    comm        all ranks, rank.comm()

    A number that several ranks have (a norm under tensor parallelism, all weights of replicas, a
    tied embedding at both ends of a pipeline) counts once: each of them adds its part of the
    square. How many have it, transforms say on the parameter (`world.copies`).

    Cost: one all-reduce of a single number in fp64, booked as "gradient norm".
    Raises ValueError for fewer than all ranks of the mesh, for parameters of which nobody said how
    ranks share them out, for those that a zero.Optimizer steps in pieces, and where gradients are
    taken out of `.grad`: of them there would be no norm.
    """
    units.instance(comm, Comm, "clip_grad_norm")
    units.instance(parameters, Iterable, "clip_grad_norm")
    comm.check_all("the norm of a gradient")
    max_norm = units.positive(max_norm, "max_norm")
    found = [p for p in dict.fromkeys(parameters) if _has_gradient(p)]
    square = torch.zeros((), dtype=torch.float64, device=comm.device)
    for p in found:
        grad = p.grad
        assert grad is not None  # `_has_gradient` has looked
        wide = torch.promote_types(grad.dtype, torch.float32)
        norm = torch.linalg.vector_norm(grad, dtype=wide).double()
        square += norm**2 / float(world.copies(p, comm))
    with comm.record("gradient norm"):
        norm = comm.all_reduce(square).sqrt()
    nn.utils.clip_grads_with_norm_(found, max_norm, norm)
    return norm


def _has_gradient(parameter: nn.Parameter) -> bool:
    if hasattr(parameter, "piece"):
        remedy = "give what its collect() returns"
        raise ValueError(f"a zero.Optimizer has the gradients of these parameters: {remedy}")
    kept = gradient_of(parameter)
    if kept is not None and kept is not parameter.grad:
        remedy = "clip what its collect() returns, or when it has put them into .grad"
        raise ValueError(f"these gradients are taken out of .grad as they come: {remedy}")
    return parameter.grad is not None
