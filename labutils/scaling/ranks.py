"""The same batch on ranks and in micro-batches, and the noise scale from gradients of ranks."""

import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from labutils import accumulation, data_parallel
from labutils.scaling.noise import estimate_spread, noise_scale
from labutils.world import Comm


def train_replica(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    make_optimizer: Callable,
    comm: Comm,
    micro: int,
) -> nn.Module:
    """The module after a step on each batch: each rank takes its share, in micro-batches of
    `micro` rows, and reduces once per step.

    loss: of outputs and targets, the mean over rows
    """
    replica = data_parallel.replicate(module, comm)
    optimizer = make_optimizer(module.parameters())
    for batch in batches:
        mine = tuple(side[comm.rank :: comm.size] for side in batch)
        *quiet, last = accumulation.micro_batches(mine, micro)
        optimizer.zero_grad()
        for pieces, context in ((quiet, replica.no_sync()), ([last], contextlib.nullcontext())):
            if pieces:
                with context:
                    accumulation.accumulate(
                        lambda piece: loss(replica(piece[0]), piece[1]), pieces, total=len(mine[1])
                    )
        optimizer.step()
    return module


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
