"""A script for `python` and for `torchrun --nproc-per-node 4`: it prints the same, the engine's name and what ranks print aside."""

import os

import torch
import torch.distributed as dist

from labutils import collectives, schedule, world
from labutils.config import Mesh, ModelConfig
from labutils.teach import rigs
from labutils.trace import Event
from labutils.world import World, WorldError


def step(rank):
    if "RANK" in os.environ:
        print("is at", rank.coords)
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


def stuck(rank, freed):
    rank.comm().barrier()  # from here on, the others need far less than the time-out
    while rank.rank == 2 and not os.path.exists(freed):
        torch.ones(8) + 1
    rank.comm().barrier()


def named_while_it_is_stuck(freed):
    """The first line of the error, told while rank 2 goes on; then it is let go."""
    impatient = World(4, timeout=3)
    try:
        impatient.run(stuck, freed)
    except TimeoutError as error:
        open(freed, "a").close()
        return str(error).partition("\n")[0]


def a_pipeline():
    """1F1B over the stages of a small GPT, with a tied embedding: equal to one device, and sent as computed."""
    small = ModelConfig(num_layers=4, d_model=8, num_heads=1, d_ff=8, vocab_size=8, seq_len=4)
    beside = rigs.pipeline.compare(schedule.one_f_one_b(4, 5), small)
    unexplained = beside.predicted.diff(beside.sent).unexplained
    return f"{beside.loss:.12f} {beside.equal} {beside.kept} {unexplained}"


def over_groups_of_ones_own():
    """What an engineer's script does that makes its process groups itself and hands them to the course's code."""
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    lost = dist.new_group([0, 3])
    events: list[Event] = []
    everyone, half = world.comm_of(events=events), world.comm_of(halves[rank // 2])

    x = torch.arange(10.0) * (rank + 1)
    theirs = x.clone()
    dist.all_reduce(theirs)
    assert torch.equal(everyone.all_reduce(x), theirs)
    predicted = collectives.sent("all_reduce_ring", nbytes=40, n=size)
    assert sum(event.sent for event in events) == predicted.by("rank")[rank]

    mine = torch.tensor([float(rank)])
    together = half.all_reduce(mine, async_op=True), everyone.all_reduce(mine, async_op=True)
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [everyone.irecv(torch.empty(3), left), everyone.isend(mine.repeat(3), right)]
    assert everyone.all_gather(mine).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert works[0].wait().tolist() == [float(left)] * 3 and works[1].wait() is None
    assert [work.wait().item() for work in together] == [[1.0, 5.0][rank // 2], 6.0]
    assert tuple(half.ranks) == ((0, 1), (2, 3))[rank // 2] and half.group is halves[rank // 2]

    if rank == 0:
        try:
            world.comm_of(lost, timeout=0.5).recv(torch.empty(1), 1)
        except TimeoutError as error:
            assert "rank 0 waited 0.5 s in recv(float32[1]) from rank 3 at" in str(error), error
        else:
            raise AssertionError("nobody sent anything")
    dist.barrier()


def main():
    mesh = World(Mesh(dp=2, tp=2), timeout=300)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(mesh.engine, flush=True)
    lines = [str(mesh.run(step)), str(mesh.ledger.by("rank")), str(mesh.trace.steps)]
    lines.append(a_pipeline())
    for program in (fail, differ, lock):
        try:
            mesh.run(program)
        except WorldError as error:
            lines.append(f"{error}\n{type(error).__name__}")
    lines.append(named_while_it_is_stuck("freed"))
    if first:
        print("\n".join(lines))
    if mesh.engine == "torchrun":
        over_groups_of_ones_own()


if __name__ == "__main__":
    main()
