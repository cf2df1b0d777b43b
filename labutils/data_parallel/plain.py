"""What came before DDP: a loop over gradients, after the backward pass."""

from collections.abc import Iterable

from torch import nn

from labutils import units
from labutils.world import Comm, marked


def check_alike(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Raises ValueError if some of the parameters are other ones on other ranks of `comm`, as
    those of experts are that `expert_parallel.spread_experts` has spread; if not, they say from now
    on that they are alike (`world.marked`)."""
    units.instance(comm, Comm, "data parallelism")
    others = {getattr(marked(p), "only_on", comm.axis) for p in parameters} - {comm.axis}
    if others and comm.size > 1:
        raise ValueError(
            f"some of these parameters are experts, which differ along {comm.axis!r}: call "
            "expert_parallel.reduce_gradients(module, comm, experts), or give a zero.Optimizer of "
            f"their own expert_parallel.expert_parameters(module) and rank.comm({min(others)!r})"
        )


def average_gradients(module: nn.Module, comm: Comm) -> None:
    """Makes every `.grad` its mean over all ranks, one all-reduce after the other.

    The plainest data parallelism that is right, if all ranks began with the same weights. It comes
    after the backward pass, pays a latency for each tensor, and hides nothing.
    """
    units.instance(module, nn.Module, "average_gradients")
    check_alike(module.parameters(), comm)
    for parameter in module.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad, out=parameter.grad)
            parameter.grad.div_(comm.size)
