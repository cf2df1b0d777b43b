"""The noise scale from gradients of ranks."""

from collections.abc import Sequence

from torch import Tensor

from labutils.scaling.noise import estimate_spread, noise_scale
from labutils.world import Comm


def noise_scale_of_ranks(gradients: Sequence[Tensor], b: int, comm: Comm) -> float:
    """B_simple from what each rank holds before and after the all-reduce of data parallelism.

    gradients: this rank's own gradient of b examples, flat, for each of some seeds or steps

    The same number on every rank; beside the mean gradient, which training needs anyway, only one
    number per gradient is reduced.
    """
    found = []
    for own in gradients:
        mean = comm.all_reduce(own) / comm.size
        small = comm.all_reduce(own.square().sum().view(1)).item() / comm.size
        found.append(estimate_spread(small, mean.square().sum().item(), b, comm.size * b))
    return noise_scale(found)
