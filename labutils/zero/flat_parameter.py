"""FSDP's flat parameter: parameters end to end in one tensor, of which every rank owns a share."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from labutils import data_parallel, gradients, measure, world
from labutils.world import Comm, Work
from labutils.zero.partition import partition


class FlatParameter:
    """Parameters of one dtype, all trained or all frozen, end to end and padded: a share a rank.

    `whole` is what computes, as the parameters `wholes`: where it is `sharded` new ones, else those
    that were given. `shard` is this rank's share, which is stepped, and `pieces` are what the shard
    has of each parameter: the parameters that an optimizer takes, of one dimension, most of them
    empty. Gradients are collected in `buffer`, like `whole`, and reduced to the pieces'.

    parameters    as they are; all ranks go on with the values of rank 0
    sharded       whether `whole` is there only between `gather` and `release`
    param_dtype   the type of `whole`, in which weights are gathered; their own unless given
    shard_dtype   the type of `shard` and of its gradient; the parameters' own unless given
    reduce_dtype  the type of `buffer`, in which gradients are reduced; that of `whole` unless given

    Source: Zhao et al. 2304.11277, section 3.2.1; as with PyTorch FSDP's use_orig_params=True.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comm: Comm,
        *,
        sharded: bool,
        param_dtype: torch.dtype | None = None,
        shard_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        data_parallel.check_alike(parameters, comm)
        self.comm = comm
        self.trained = parameters[0].requires_grad
        self.shapes = [parameter.shape for parameter in parameters]
        self.numels = tuple(parameter.numel() for parameter in parameters)
        self.starts = list(itertools.accumulate(self.numels, initial=0))
        self.partition = partition(sum(self.numels), comm.size)
        share = self.partition.share
        self.own = slice(comm.rank * share, (comm.rank + 1) * share)

        full = self._flattened(parameters)
        comm.broadcast(full, out=full)
        self.whole = full.to(param_dtype or full.dtype)
        self.shard = full[self.own].to(shard_dtype or full.dtype, copy=sharded)
        self.sharded = sharded
        self.apart = sharded or self.shard.dtype != self.whole.dtype  # from the whole, in memory
        self.reduce_dtype = reduce_dtype or self.whole.dtype
        self.cuts = self.partition.cuts(self.numels, comm.rank)
        pieces = [nn.Parameter(self.shard[a:b], self.trained) for a, b in self.cuts]
        self.pieces = [
            world.marked(piece, whole, shares=comm.size)
            for piece, whole in zip(pieces, parameters, strict=True)
        ]
        if sharded:
            self.wholes = [nn.Parameter(view, self.trained) for view in self.views(self.whole)]
        else:
            self.wholes = list(parameters)
            for i, parameter in enumerate(parameters):
                parameter.data = self.view(self.whole, i)
                vars(parameter)["piece"] = self.pieces[i]
                gradients.kept_by(self, parameter)
        self.gradient: Tensor | None = None  # memory for the gradient of the shard, if it has any
        self.buffer: Tensor | None = None
        self.arrived: set[int] = set()

    def _flattened(self, parameters: Sequence[nn.Parameter]) -> Shaped[Tensor, " padded"]:
        kinds = sorted({f"{p.dtype} on {p.device}" for p in parameters})
        if len(kinds) > 1 and not all(p.is_floating_point() for p in parameters):
            raise ValueError(
                f"a flat parameter has one dtype, and weights of few bits ({', '.join(kinds)}) lie "
                "beside others in each layer: keep them whole, and step what is trained by a "
                "zero.Optimizer of level 1 or 2"
            )
        if len(kinds) > 1:
            raise ValueError(
                f"a flat parameter has one dtype and one device, not {', '.join(kinds)}: convert "
                "the model, or give parameters of another kind an optimizer or a unit of their own"
            )
        full = parameters[0].new_zeros(self.partition.padded, requires_grad=False)
        for view, parameter in zip(self.views(full), parameters, strict=True):
            view.copy_(parameter.detach())
        return full

    def views(self, whole: Shaped[Tensor, " padded"]) -> list[Tensor]:
        """The parameters' own stretches of a tensor like `whole`, each in its shape."""
        return [self.view(whole, i) for i in range(len(self.shapes))]

    def view(self, whole: Shaped[Tensor, " padded"], i: int) -> Tensor:
        """The stretch of parameter `i`."""
        return whole[self.starts[i] : self.starts[i + 1]].view(self.shapes[i])

    # -- weights ---------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """Whether memory is held for the whole."""
        return self.whole.untyped_storage().nbytes() > 0

    def gather(self, *, async_op: bool) -> Any:
        """Every rank's shard, in `whole`: memory now, values when the Work of async_op is done."""
        if not self.resident:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        if self.sharded:
            measure.label([self.shard], "weights", "weight shards")
            measure.label([self.whole], "weights", "gathered weights")
        # Through .data: autograd must not take the same weights, come back, for changed ones.
        whole = self.whole.data
        if self.apart:
            whole[self.own].copy_(self.shard)
        return self.comm.all_gather(whole[self.own], out=whole, async_op=async_op)

    def release(self) -> None:
        """Free the whole; tensors that view it become valid again with the next `gather`."""
        self.whole.untyped_storage().resize_(0)

    # -- gradients -------------------------------------------------------------------------------

    def open(self) -> Tensor:
        """Room for the gradients of all parameters, those of the padding being zero."""
        if self.buffer is None:
            self.buffer = self.whole.new_empty(self.partition.padded, dtype=self.reduce_dtype)
            name = "gradients" if self.gradient is None else "gradient buckets"
            measure.label([self.buffer], "gradients", name)
            self.buffer[self.partition.numel :].zero_()
        return self.buffer

    def take(self, i: int, grad: Tensor) -> None:
        """Collect the gradient of parameter `i`, divided by the ranks: they sum to the mean."""
        view, n = self.view(self.open(), i), self.comm.size
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
        return len(self.arrived) == len(self.shapes)

    def reduce(self) -> Work:
        """Begin to leave this rank's share of the mean gradient where it lies in `buffer`."""
        buffer = self.open()
        for i in range(len(self.shapes)):
            if i not in self.arrived:  # it took no part in the loss
                self.view(buffer, i).zero_()
        return self.comm.reduce_scatter(buffer, out=buffer[self.own], async_op=True)

    def land(self, mine: Shaped[Tensor, " share"]) -> None:
        """Give the pieces what `reduce` gave, or add it to the gradients that they have.

        Where the shard's gradient has no memory of its own it stays in the buffer, if it can.
        """
        for piece, (a, b) in zip(self.pieces, self.cuts, strict=True):
            if a == b:
                continue
            if piece.grad is not None:
                piece.grad.add_(mine[a:b])
            elif self.gradient is not None:
                piece.grad = self.gradient[a:b].copy_(mine[a:b])
            else:
                piece.grad = mine[a:b].to(piece.dtype)
                if piece.dtype != mine.dtype:
                    measure.label([piece.grad], "gradients", "gradient shards")
        if self.gradient is not None:
            measure.label([self.gradient], "gradients", "gradient shards")
        self.forget()

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Where the gradient of one of `wholes` is: in `buffer`, divided by the ranks, until it is
        reduced; then this rank's stretch of the mean."""
        i = next(i for i, whole in enumerate(self.wholes) if whole is parameter)
        return self.view(self.open(), i) if i in self.arrived else self.pieces[i].grad

    def forget(self) -> None:
        """Drop what is collected and not reduced."""
        self.buffer = None
        self.arrived.clear()
