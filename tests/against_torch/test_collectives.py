"""Every collective beside torch.distributed's own on gloo, on the same ranks and the same tensors."""

import pytest
import torch
import torch.distributed as dist

from labutils import collectives, world

N = 4


@pytest.fixture(scope="module")
def processes():
    with world.World(N, engine="processes") as ranks:
        yield ranks


def tensor(rank, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank.rank)).to(dtype)
    return torch.randint(
        -1000, 1000, (numel,), generator=torch.Generator().manual_seed(rank.rank), dtype=dtype
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal up to the order of additions: exactly so for whole numbers."""
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.float16: 1e-2,
        torch.bfloat16: 1e-1,
    }.get(ours.dtype, 0)
    return ours.dtype == theirs.dtype and torch.allclose(
        ours, theirs, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("algorithm", collectives.ALL_REDUCES)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduce(processes, algorithm, op):
    def program(rank):
        comm, agreed = rank.comm("dp"), []
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
            x = tensor(rank, 1003, dtype)
            ours = getattr(collectives, algorithm)(x, comm, op=op)
            dist.all_reduce(
                theirs := x.clone(), op=getattr(dist.ReduceOp, op.upper()), group=comm.group
            )
            agreed.append(close(ours, theirs))
        return agreed

    assert processes.run(program) == [[True] * 5] * N
    assert processes.ledger.total == sum(
        collectives.sent(
            algorithm, nbytes=1003 * dtype.itemsize, n=N, itemsize=dtype.itemsize
        ).total
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
    )


@pytest.mark.parametrize("shape", ["star", "tree"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_and_reduce(processes, shape, root):
    def program(rank):
        comm, x = rank.comm("dp"), tensor(rank, 77, torch.float32)
        told = getattr(collectives, f"broadcast_{shape}")(x, comm, src=root)
        summed = getattr(collectives, f"reduce_{shape}")(x, comm, dst=root)
        dist.broadcast(theirs := x.clone(), src=root, group=comm.group)
        dist.reduce(total := x.clone(), dst=root, group=comm.group)
        return torch.equal(told, theirs), summed is None if rank.rank != root else close(
            summed, total
        )

    assert processes.run(program) == [(True, True)] * N


def test_scatter_and_gather(processes):
    def program(rank):
        comm, x = rank.comm("dp"), tensor(rank, 8 * N, torch.float32)
        piece = collectives.scatter_star(x, comm, src=1)
        whole = collectives.gather_star(piece, comm, dst=3)
        theirs = torch.empty(8)
        dist.scatter(theirs, list(x.split(8)) if rank.rank == 1 else None, src=1, group=comm.group)
        room = [torch.empty(8) for _ in range(N)] if rank.rank == 3 else None
        dist.gather(theirs, room, dst=3, group=comm.group)
        return torch.equal(piece, theirs), whole is None if rank.rank != 3 else torch.equal(
            whole, torch.cat(room)
        )

    assert processes.run(program) == [(True, True)] * N


def test_reduce_scatter_all_gather_and_all_to_all(processes):
    def program(rank):
        comm, x = rank.comm("dp"), tensor(rank, 8 * N, torch.float64)
        piece, whole, swapped = (
            collectives.reduce_scatter_ring(x, comm),
            collectives.all_gather_ring(x, comm),
            collectives.all_to_all_pairwise(x, comm),
        )
        dist.reduce_scatter_tensor(
            their_piece := torch.empty(8, dtype=x.dtype), x, group=comm.group
        )
        dist.all_gather_into_tensor(
            their_whole := torch.empty(8 * N * N, dtype=x.dtype), x, group=comm.group
        )
        dist.all_to_all_single(their_swap := torch.empty_like(x), x, group=comm.group)
        return (
            close(piece, their_piece),
            torch.equal(whole, their_whole),
            torch.equal(swapped, their_swap),
        )

    assert processes.run(program) == [(True, True, True)] * N


def test_all_to_all_of_uneven_pieces(processes):
    table = [[(3 * i + j) % 4 for j in range(N)] for i in range(N)]

    def program(rank):
        comm, send, recv = rank.comm("dp"), table[rank.rank], [row[rank.rank] for row in table]
        x = tensor(rank, sum(send), torch.float32)
        ours = collectives.all_to_all_pairwise(x, comm, send_sizes=send, recv_sizes=recv)
        dist.all_to_all_single(theirs := torch.empty(sum(recv)), x, recv, send, group=comm.group)
        return torch.equal(ours, theirs)

    assert processes.run(program) == [True] * N


def test_processes_and_threads_give_the_same_bits_and_books(processes):
    def program(rank):
        x = tensor(rank, 1003, torch.bfloat16)
        return [
            getattr(collectives, algorithm)(x, rank.comm("dp"))
            for algorithm in collectives.ALL_REDUCES
        ]

    with world.World(N) as threads:
        for theirs, ours in zip(threads.run(program), processes.run(program), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
        assert threads.trace == processes.trace
