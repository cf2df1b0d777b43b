"""DistributedSampler: which examples a rank reads, and what its mean counts for."""

import torch

from labutils import units
from labutils.world import Comm


def sampler(length: int, rank: int, size: int, *, epoch: int = 0, seed: int = 0) -> list[int]:
    """The indices, out of `length` examples, that `rank` of `size` reads in `epoch`.

    They are shuffled anew in each epoch by seed + epoch, and equally many on all ranks.

    >>> [len(sampler(10, rank, 4)) for rank in range(4)]  # two examples come twice
    [3, 3, 3, 3]

    Invariant: every example is read, −length mod size of them twice, so that no rank has a batch
    that others wait for. The same as `torch.utils.data.DistributedSampler`.
    Raises ValueError for a rank that is none of `size`.
    """
    size = units.whole(size, "size", 1)
    length, rank, epoch, seed = units.wholes(length=length, rank=rank, epoch=epoch, seed=seed)
    if rank >= size:
        raise ValueError(f"there is no rank {rank} of {size}: use 0 … {size - 1}")
    units.writable(length, "length is", "draw from a shard of the data", most=10**8)
    # One permutation for all ranks: they agree without talking.
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    padded = -(-length // size) * size
    return [order[place % length] for place in range(rank, padded, size)]


def share(count: int, comm: Comm) -> float:
    """What to multiply this rank's mean loss over `count` things by.

    The mean over ranks is then the mean over all things of all ranks.

    Cost: one all-reduce of 8 bytes. Equal counts give 1 on every rank.
    """
    units.instance(comm, Comm, "share")
    counted = torch.tensor([count], dtype=torch.float64, device=comm.device)
    total = comm.all_reduce(counted).item()
    return count * comm.size / total
