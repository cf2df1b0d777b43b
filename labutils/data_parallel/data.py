"""Which examples a rank reads, and what its mean counts for when it has fewer of them than others."""

import torch

from labutils import units
from labutils.world import Comm


def sampler(
    length: int,
    rank: int,
    size: int,
    *,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> list[int]:
    """The indices, out of `length` examples, that `rank` of `size` reads in `epoch`: equally many on all ranks.

    >>> [sampler(10, rank, 4, shuffle=False) for rank in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]

    Invariant: all examples are dealt out, −length mod size of them twice, so that no rank has a batch that others wait for. With `drop_last`,
    length mod size of them are left out instead. The same as `torch.utils.data.DistributedSampler`.
    """
    for value, name in ((length, "length"), (epoch, "epoch"), (seed, "seed")):
        units.whole(value, name)
    if not 0 <= units.whole(rank, "rank") < units.whole(size, "size", 1):
        raise ValueError(f"there is no rank {rank} of {size}: use 0 … {size - 1}")
    # One permutation for all ranks: they agree without talking.
    order = (
        torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        if shuffle
        else range(length)
    )
    rounds = length // size if drop_last else -(-length // size)
    return [order[place % length] for place in range(rank, rounds * size, size)]


def share(count: int, comm: Comm) -> float:
    """What to multiply this rank's mean loss over `count` things by, so that the mean over ranks is the mean over all things of all ranks.

    Cost: one all-reduce of 8 bytes. Equal counts give 1 on every rank.
    """
    total = comm.all_reduce(
        torch.tensor([float(units.whole(count, "count"))], dtype=torch.float64)
    ).item()
    if not total:
        raise ValueError("nothing on any rank counts towards the loss: every target is left out")
    return count * comm.size / total
