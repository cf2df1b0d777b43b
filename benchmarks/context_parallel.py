"""Our ring attention beside torch's ring templates on four processes: time, and how far apart.

    python benchmarks/context_parallel.py

Forward and backward pass of one layer's attention, causal, in a zig-zag, fp32. torch's templates
get the operator that `scaled_dot_product_attention` takes on a CPU, which `context_parallel(...)`
itself does not know; with "alltoall" they pass keys on as we do. They take turns; a ratio below 1
means that ours is faster.
"""

import functools

import torch
from _side_by_side import Times, interleave, owe, report, slowest
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from labutils import context_parallel
from labutils.config import Mesh
from labutils.world import World

RANKS, ROUNDS = 4, 15
B, HEADS, D = 1, 4, 64
LENGTHS = (1024, 4096)


def ours(comm, q, k, v, d_out) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = context_parallel.ring_attention(*leaves, comm)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def torchs(rotate, comm, q, k, v, d_out) -> list[torch.Tensor]:
    aten = vars(torch)["ops"].aten  # the name torch.ops would be pickled, and cannot be
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    kernel_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    theirs.set_rotate_method(rotate)
    how = dict(is_causal=True, dropout_p=0.0)
    out, lse, *_ = theirs._templated_ring_attention(comm.group, 2, kernel, q, k, v, **how)
    back, given = theirs._templated_ring_attention_backward, (d_out, "grad_out", q, k, v, out, lse)
    return [out, *back(comm.group, 2, kernel_backward, *given, **how)[:3]]


CALLS = {
    "ours": ours,
    "torch, alltoall": functools.partial(torchs, "alltoall"),
    "torch, allgather": functools.partial(torchs, "allgather"),
}


def race(rank, s: int) -> tuple[dict[str, Times], float]:
    """Times of each, and how far ours is from torch's."""
    comm, draw = rank.comm("cp"), torch.Generator().manual_seed(rank.rank)
    tensors = torch.randn(4, B, HEADS, s // comm.size, D, generator=draw).unbind()
    results = {name: call(comm, *tensors) for name, call in CALLS.items()}
    pairs = zip(results["ours"], results["torch, alltoall"], strict=True)
    apart = max((a - b).abs().max().item() for a, b in pairs)
    calls = {name: functools.partial(call, comm, *tensors) for name, call in CALLS.items()}
    return interleave(calls, ROUNDS, group=comm.group), apart


def main() -> None:
    """Print the table."""
    print(f"{HEADS} heads of {D}, {RANKS} processes; ms by medians (minima), ratio ours / theirs")
    for peer in list(CALLS)[1:]:
        owe(peer, {f"{s} tokens": 1.0 for s in LENGTHS})
    with World(Mesh(cp=RANKS), engine="processes", timeout=300) as world:
        for s in LENGTHS:
            ranks = world.run(race, s)
            times, apart = slowest(times for times, _ in ranks), max(x for _, x in ranks)
            for name, each in times.items():
                if name != "ours":
                    report(f"{s} tokens", name, times["ours"], each)
                ratio = "" if name == "ours" else f"   ratio {times['ours'].ratio(each)}"
                print(f"{s:6} tokens {name:>17}: {each} ms{ratio}")
            print(f"{s:6} tokens, largest difference {apart:.0e}")


if __name__ == "__main__":
    main()
