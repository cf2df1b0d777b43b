"""What came before DDP: a loop over gradients, after the backward pass."""

from torch import nn

from labutils.world import Comm


def average_gradients(module: nn.Module, comm: Comm) -> None:
    """Makes every `.grad` its mean over all ranks, one all-reduce after the other.

    The plainest data parallelism that is right, if all ranks began with the same weights. It comes
    after the backward pass, pays a latency for each tensor, and hides nothing.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad, out=parameter.grad)
            parameter.grad.div_(comm.size)
