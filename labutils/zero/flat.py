"""Parameters end to end in one flat tensor, of which this rank owns a share: gathered whole when needed, their gradients reduced to the share."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from labutils.world import Comm
from labutils.zero.partition import partition


class Flat:
    """Some parameters of one dtype: `whole` holds them end to end, padded to a multiple of the ranks; `shard` is this rank's share of it.

    As long as `whole` is resident, the shard is a piece of it and takes no memory of its own; `release` gives the shard its own memory and
    frees the rest, `gather` brings it back. Gradients are collected in `buffer`, like `whole`, and reduced to `gradient`, like `shard`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        comm: Comm,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.names, parameters = zip(*named, strict=True)
        self.comm, self.trained = comm, parameters[0].requires_grad
        self.shapes = [parameter.shape for parameter in parameters]
        self.numels = tuple(parameter.numel() for parameter in parameters)
        self.starts = list(itertools.accumulate(self.numels, initial=0))
        self.partition = partition(sum(self.numels), comm.size)
        self.own = slice(comm.rank * self.partition.share, (comm.rank + 1) * self.partition.share)

        self.whole = parameters[0].new_zeros(self.partition.padded, requires_grad=False)
        for view, parameter in zip(self.views(self.whole), parameters, strict=True):
            view.copy_(parameter.detach())
        comm.broadcast(
            self.whole, out=self.whole
        )  # whatever each rank began with, all go on with rank 0's
        self.shard = self.whole[self.own]
        self.gradient = torch.empty(
            0, dtype=gradient_dtype or self.whole.dtype, device=self.whole.device
        )
        self.fresh = True  # nothing has been added to the gradient yet
        self.buffer: Tensor | None = None
        self.arrived: set[int] = set()

    def views(self, whole: Shaped[Tensor, " padded"]) -> list[Tensor]:
        """The parameters' own stretches of a tensor like `whole`, each in its shape."""
        return [self.view(whole, i) for i in range(len(self.names))]

    def view(self, whole: Shaped[Tensor, " padded"], i: int) -> Tensor:
        """The stretch of parameter `i`."""
        return whole[self.starts[i] : self.starts[i + 1]].view(self.shapes[i])

    def pieces(self, shard: Shaped[Tensor, " share"]) -> list[Tensor]:
        """What a tensor like `shard` holds of each parameter: one dimension, and nothing of most."""
        ends = [min(max(start - self.own.start, 0), self.partition.share) for start in self.starts]
        return [shard[a:b] for a, b in itertools.pairwise(ends)]

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """Whether memory is held for the whole."""
        return self.whole.untyped_storage().nbytes() > 0

    def gather(self, async_op: bool = False) -> Any:
        """Every rank's shard, in `whole`: the memory is there at once, the values when the `Work` that async_op returns is done."""
        if not self.resident:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        # Through .data, so that autograd does not take the same weights, come back, for changed ones.
        return self.comm.all_gather(self.shard, out=self.whole.data, async_op=async_op)

    def release(self) -> None:
        """Keep this rank's shard and free the whole; tensors that view it become valid again with the next `gather`."""
        if self.shard.untyped_storage()._cdata == self.whole.untyped_storage()._cdata:
            self.shard = self.shard.clone()
        self.whole.untyped_storage().resize_(0)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make room for the gradients of all parameters, those of the padding being zero."""
        if self.buffer is None:
            self.buffer = torch.empty(
                self.partition.padded, dtype=self.gradient.dtype, device=self.whole.device
            )
            self.buffer[self.partition.numel :].zero_()

    def take(self, i: int, grad: Tensor) -> None:
        """Collect the gradient of parameter `i`, divided by the number of ranks: what they sum to is then the mean."""
        self.open()
        view, n = self.view(self.buffer, i), self.comm.size
        if i in self.arrived:
            view.add_(grad, alpha=1 / n)
        elif view.dtype == grad.dtype:
            torch.div(grad, n, out=view)
        else:
            view.copy_(grad).div_(n)
        self.arrived.add(i)

    @property
    def complete(self) -> bool:
        """Whether the gradient of every parameter has come."""
        return len(self.arrived) == len(self.names)

    def reduce(self, async_op: bool = False) -> Any:
        """This rank's share of the mean gradient, left where it lies in `buffer`, the rest of which is spent."""
        self.open()
        for i in range(len(self.names)):
            if i not in self.arrived:  # it took no part in the loss
                self.view(self.buffer, i).zero_()
        return self.comm.reduce_scatter(self.buffer, out=self.buffer[self.own], async_op=async_op)

    def land(self, mine: Shaped[Tensor, " share"]) -> None:
        """Add what `reduce` gave to the gradient shard, and free the rest."""
        if self.fresh:
            self.gradient.copy_(mine)
        else:
            self.gradient.add_(mine)
        self.fresh, self.buffer = False, None
        self.arrived.clear()
