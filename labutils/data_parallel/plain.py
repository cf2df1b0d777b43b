"""What came before DDP: a loop over gradients, a parameter server, and nn.DataParallel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labutils import collectives
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


def server_step(
    module: nn.Module, comm: Comm, optimizer: Any, loss: Callable[[Any], Tensor], batch: Any
) -> Tensor:
    """This rank's loss, after one step with a parameter server.

    Rank 0 hands out the weights, adds up the gradients, and alone has an `optimizer`.

    Cost: rank 0 sends (N−1) times the weights and receives (N−1) times the gradients; a worker
    sends its gradient once.
    Source: M. Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014,
    with one server that also works.
    """
    _hand_out(module, comm)
    module.zero_grad()
    value = loss(batch)
    value.backward()
    _add_up(module, comm, optimizer, comm.size)
    return value.detach()


def replicate_each_step(
    module: nn.Module,
    comm: Comm,
    optimizer: torch.optim.Optimizer | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> Tensor | None:
    """Rank 0's loss of the whole batch, None elsewhere, after one step as nn.DataParallel does it.

    Rank 0 has the batch, the loss and the optimizer. Inputs and weights go out, outputs come back,
    their gradients go out, gradients come back: a replica lives for one forward pass.

    Cost: what a parameter server costs, and the outputs twice: for a language model s·v numbers per
    sequence.
    Source: PyTorch, documentation of torch.nn.DataParallel and of nn.parallel.
    """
    with comm.record("inputs"):
        mine = collectives.scatter_star(inputs, comm)
    _hand_out(module, comm)
    module.zero_grad()
    outputs = module(mine)
    with comm.record("outputs"):
        sizes = collectives.shares(len(inputs), comm.size)
        gathered = collectives.gather_star(outputs.detach(), comm, sizes=sizes)
    slope = outputs.new_empty(len(inputs), *outputs.shape[1:])
    value = None
    if gathered is not None:
        value = loss(gathered.requires_grad_(), targets)
        (slope,) = torch.autograd.grad(value, gathered)
    with comm.record("gradients of outputs"):
        outputs.backward(collectives.scatter_star(slope, comm))
    _add_up(module, comm, optimizer, 1)  # the loss is the mean over the whole batch already
    return None if value is None else value.detach()


def _hand_out(module: nn.Module, comm: Comm) -> None:
    parameters = [parameter.detach() for parameter in module.parameters()]
    with comm.record("weights"):
        _scatter_into(parameters, collectives.broadcast_star(_joined(parameters), comm))


def _add_up(module: nn.Module, comm: Comm, optimizer: Any, divisor: int) -> None:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    with comm.record("gradients"):
        total = collectives.reduce_star(_joined(gradients), comm)
    if total is not None:
        _scatter_into(gradients, total / divisor)
        optimizer.step()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _scatter_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
