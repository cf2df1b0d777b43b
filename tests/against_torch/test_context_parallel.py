"""Our ring beside torch's templates for it, on the same ranks, the same layouts and the same tensors.

`context_parallel(...)` itself dispatches CUDA's kernels alone: it lacks the operator that
`scaled_dot_product_attention` takes on a CPU. Its templates take any operator, so they get that one.
"""

import functools

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from labutils import context_parallel
from labutils.config import Mesh
from labutils.world import World

N = 3
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.fixture(scope="module")
def processes():
    with World(Mesh(cp=N), engine="processes") as ranks:
        yield ranks


def drawn(dtype):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, 2, 2, 24, 8, generator=draw, dtype=torch.float64).to(dtype).unbind()


def ours_and_theirs(rank, kind, rotate, dtype):
    """Output and gradients of this rank's tokens, by either library."""
    comm = rank.comm("cp")
    whole = context_parallel.layout(24, N, kind)
    q, k, v, d_out = (whole.split(x, comm.rank, 2) for x in drawn(dtype))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = context_parallel.ring_attention(*leaves, comm, kind)
    ours = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    theirs._cp_options.enable_load_balance = kind == "zigzag"
    theirs.set_rotate_method(rotate)
    how = dict(is_causal=True, dropout_p=0.0)
    begin = functools.partial(theirs._templated_ring_attention, comm.group, 2, KERNEL)
    out, lse, *_ = begin(q, k, v, **how)
    back = functools.partial(theirs._templated_ring_attention_backward, comm.group, 2, BACKWARD)
    gradients = back(d_out, "grad_out", q, k, v, out, lse, **how)
    return ours, [out, *gradients[:3]]


@pytest.mark.parametrize("kind, rotate", [("contiguous", "alltoall"), ("zigzag", "allgather")])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_the_ring(processes, kind, rotate, dtype, tolerance):
    for ours, peers in processes.run(ours_and_theirs, kind, rotate, dtype):
        for name, mine, peer in zip(("out", "dq", "dk", "dv"), ours, peers, strict=True):
            assert mine.dtype == peer.dtype == dtype
            apart = (mine.double() - peer.double()).norm()
            assert apart < tolerance * peer.double().norm(), name


def test_layouts_are_theirs():
    """The zig-zag is torch's head–tail load balancer."""
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
        _HeadTailLoadBalancer,
    )

    order = _HeadTailLoadBalancer(24, N, "cpu")._generate_indices().flatten().tolist()
    whole = context_parallel.layout(24, N)
    assert order == [at for rank in range(N) for at in whole.positions(rank)]
