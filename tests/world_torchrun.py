"""A script for `python` and for `torchrun --nproc-per-node 4`: it prints the same, the engine's name aside."""

import os

import torch

from labutils.config import Mesh
from labutils.world import World, WorldError


def step(rank):
    rank.print("is at", rank.coords)
    comm = rank.comm("tp")
    work = comm.all_reduce(torch.arange(4.0) + rank.rank, async_op=True)
    return rank.comm("dp").all_gather(torch.tensor([rank.rank])).tolist(), work.wait().tolist()


def fail(rank):
    if rank.rank == 1:
        raise ValueError("no data")
    rank.comm().barrier()


def differ(rank):
    rank.comm().all_gather(torch.zeros(3 if rank.rank else 2))


def lock(rank):
    rank.comm().send(torch.zeros(3), (rank.rank + 1) % 4)


def main():
    world = World(Mesh(dp=2, tp=2), timeout=20)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(world.engine, flush=True)
    lines = [str(world.run(step)), str(world.ledger.by("rank")), str(world.trace.steps)]
    for program in (fail, differ, lock):
        try:
            world.run(program)
        except WorldError as error:
            lines.append(f"{error}\n{type(error).__name__}")
    if first:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
