"""What all levels have in common: gradients come in from backward and end as shards, and an ordinary torch optimizer steps the shards."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labutils import units
from labutils.world import Comm
from labutils.zero import snapshot
from labutils.zero.flat import Flat
from labutils.zero.groups import Groups
from labutils.zero.partition import Unit

HALF = (torch.float16, torch.bfloat16)
Make = Callable[[list[Any]], torch.optim.Optimizer]


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    """torch's AdamW, in one pass over memory."""
    return torch.optim.AdamW(params, fused=True)


class Partitioned:
    """Flat tensors in the order in which backward completes them, and a torch optimizer, `inner`, over this rank's shard of each.

    That optimizer must treat every element of a group alike (SGD, Adam, AdamW, …): it sees stretches of a flat tensor, not layers. It is what
    a schedule of the learning rate takes (`LambdaLR(owner.inner, …)`). As in DDP with unused parameters, a parameter that took no part in the
    loss has a gradient of zero.
    """

    level: int
    resting: Sequence[Flat] = ()  # flat tensors of frozen parameters
    constants: Mapping[str, Tensor] = {}  # frozen parameters that every rank holds whole

    def __init__(
        self, flats: Sequence[Flat], comm: Comm, make: Make, groups: Groups, *, master: bool | None, offload: torch.device | str | None
    ) -> None:  # fmt: skip
        self.flats, self.comm, self.groups, self.offload = list(flats), comm, groups, offload
        if offload is not None and master is False:
            raise ValueError(
                f"offload={str(offload)!r} steps a copy of the weights there: leave master=None, or use True"
            )
        self.separate = (
            (self.flats[0].whole.dtype in HALF or offload is not None) if master is None else master
        )
        self.owned = [
            _copy_to_step(flat.shard, offload) if self.separate else flat.shard
            for flat in self.flats
        ]
        self.pieces = [
            self._pieces(flat, owned) for flat, owned in zip(self.flats, self.owned, strict=True)
        ]
        self.inner = make(
            groups.filled(piece for pieces in self.pieces for piece in pieces.items())
        )
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must make a torch optimizer of a list of parameters, it returned {self.inner!r}: try torch.optim.AdamW"
            )
        if self.level > 1:
            for flat in self.flats:
                flat.gradient = torch.empty(
                    flat.partition.share, dtype=flat.gradient.dtype, device=flat.whole.device
                )
        self._flight: tuple[Flat, Any] | None = None
        self._next, self._queued, self._factor = 0, False, 1.0

    def _pieces(self, flat: Flat, owned: Tensor) -> dict[int, nn.Parameter]:
        """By the number of each group in a flat tensor what this rank owns of it, often nothing: one stretch, as the groups lie one after the other."""
        sizes: dict[int, int] = {}
        for name, piece in zip(flat.names, flat.pieces(owned), strict=False):
            group = self.groups.number[name]
            sizes[group] = sizes.get(group, 0) + len(piece)
        sizes[group] += len(owned) - sum(sizes.values())  # the padding
        return dict(zip(sizes, map(nn.Parameter, owned.split(list(sizes.values()))), strict=True))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings of `inner`, group by group, to be read and changed."""
        return self.inner.param_groups

    @property
    def layout(self) -> tuple[Unit, ...]:
        """The elements of every parameter, flat tensor by flat tensor, as `predict_sent` and `predict_held` take them."""
        return tuple(
            Unit(flat.numels, groups=len(pieces))
            for flat, pieces in zip(self.flats, self.pieces, strict=True)
        )

    # -- from backward to shards ---------------------------------------------------------------------------------------

    def _collect(self, flat: Flat, i: int, parameter: nn.Parameter) -> None:
        """A hook: a gradient is there. Move it to its flat tensor, and reduce what is complete, in the order that all ranks share."""
        if self.level == 1:
            if not flat.fresh:
                raise RuntimeError(
                    "the gradients of the last step are still here: call zero_grad() between step() and backward()"
                )
            flat.take(i, parameter.grad)
        else:
            self._on_backward()
            if self.flats.index(flat) < self._next:
                remedy = "checkpoint with use_reentrant=False, or call zero_grad() after a backward pass that failed"
                raise RuntimeError(
                    f"the gradient of {flat.names[i]} came again after it was reduced, in a backward pass within another: {remedy}"
                )
            flat.take(i, parameter.grad)
            while self._next < len(self.flats) and self.flats[self._next].complete:
                self._launch()
        parameter.grad = None

    def _on_backward(self) -> None:
        """Have `_end_backward` called when the backward pass that runs now is over."""
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._queued = False
        if (
            torch._C._current_autograd_node() is None
        ):  # not a pass within a pass, as reentrant checkpointing has them
            self._end_backward()

    def _launch(self) -> None:
        """Start to reduce the next flat tensor, when the one before it has landed: at most one is on its way while the next one fills."""
        self._land()
        flat = self.flats[self._next]
        self._flight = flat, flat.reduce(async_op=True)
        self._next += 1

    def _land(self) -> None:
        if self._flight is not None:
            flat, work = self._flight
            flat.land(work.wait())
            self._flight = None

    def _end_backward(self) -> None:
        while self._next < len(self.flats):
            self._launch()
        self._land()
        self._next = 0

    def _reduced(self) -> None:
        """See that every shard of the gradient is there, which at level 1 is the moment to reduce."""
        if self.level > 1 and (self._next or any(flat.arrived for flat in self.flats)):
            self._end_backward()  # of a pass whose gradients were all made by passes within it
        if self.level == 1 and any(flat.arrived for flat in self.flats):
            for flat in self.flats:
                if flat.fresh:
                    flat.gradient, flat.fresh = flat.reduce(), False
        if any(flat.fresh for flat in self.flats):
            raise RuntimeError(
                "there are no gradients since zero_grad(): call backward() on a loss first"
            )

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient over ranks of every trained parameter, whole, by name; all ranks must ask together."""
        self._reduced()
        found = {}
        for flat in self.flats:
            with self.comm.record("gradients"):
                whole = self.comm.all_gather(flat.gradient)
            found |= zip(
                flat.names,
                flat.views(whole if self._factor == 1 else whole.float() * self._factor),
                strict=True,
            )
        return found

    @torch.no_grad()
    def unscale_(self, factor: float) -> bool:
        """Multiply the gradient by `factor`, which a `LossScaler` does to undo its scale; whether all of it is finite, the same on every rank.

        Cost: one all-reduce of a single number, booked as "finite". Half gradients stay as they are, where dividing would lose again
        what scaling has saved: the factor goes with the fp32 copy that `step` makes of them.
        """
        self._reduced()
        largest = torch.stack(
            [
                torch.linalg.vector_norm(flat.gradient, math.inf, dtype=_wide(flat.gradient))
                for flat in self.flats
            ]
        )
        with self.comm.record("finite"):
            infinite = self.comm.all_reduce((~largest.isfinite()).any().float(), "max")
        if self.flats[0].gradient.dtype not in HALF:
            for flat in self.flats:
                flat.gradient.mul_(factor)
        elif self.separate:
            self._factor *= factor
        else:
            raise ValueError(
                "half gradients can be unscaled in an fp32 copy alone: use master=True, or gradient_dtype=torch.float32"
            )
        return not infinite

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Float[Tensor, ""]:
        """The norm of the whole gradient, the same on every rank, after scaling it down to at most `max_norm`.

        Cost: one all-reduce of a single number, booked as "gradient norm". A norm that is not finite scales nothing: skip that step.
        """
        units.positive(max_norm, "max_norm")
        self._reduced()
        squares = [
            torch.linalg.vector_norm(flat.gradient, dtype=_wide(flat.gradient)) ** 2
            for flat in self.flats
        ]
        with self.comm.record("gradient norm"):
            norm = self.comm.all_reduce(torch.stack(squares).sum()).sqrt() * self._factor
        coefficient = max_norm / (norm + 1e-6)  # torch's own guard, so that results are torch's too
        if norm.isfinite() and coefficient < 1:
            for flat in self.flats:
                flat.gradient.mul_(coefficient)
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients, also those of a backward pass that failed, and free what is whole of them."""
        if self._flight is not None:
            self._flight[1].wait()
        self._flight, self._next, self._queued, self._factor = None, 0, False, 1.0
        for flat in self.flats:
            flat.fresh = True
            flat.arrived.clear()
            flat.buffer = None
            if self.level == 1:
                flat.gradient = flat.gradient.new_empty(0)

    # -- from shards to weights ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's shards, one flat tensor after the other, and hand each on as soon as it is done."""
        self._reduced()
        under_way = []
        for flat, owned, pieces in zip(self.flats, self.owned, self.pieces, strict=True):
            self._give_gradients(flat, owned, pieces)
            self.inner.step()  # of this shard alone: the others have no gradient now
            for piece in pieces.values():
                piece.grad = None
            if self.separate:
                flat.shard.copy_(owned)
            under_way.append(self._publish(flat))
        for work in under_way:
            if work is not None:
                work.wait()

    def _give_gradients(self, flat: Flat, owned: Tensor, pieces: dict[int, nn.Parameter]) -> None:
        gradient = flat.gradient.to(owned.device, owned.dtype, copy=self.offload is not None)
        if self._factor != 1:
            gradient.mul_(self._factor)  # it is a copy: half gradients alone have a factor
        for piece, mine in zip(
            pieces.values(), gradient.split([len(piece) for piece in pieces.values()]), strict=True
        ):
            piece.grad = mine

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write weights and optimizer state to one file, all ranks together; any number of ranks at any level can `load` it.

        The file is written aside and takes its name when it is complete. Cost: rank 0 holds one whole flat tensor at a time.
        """
        snapshot.save(self, path)

    def load(self, path: str | os.PathLike) -> None:
        """Go on from a file that `save` wrote, which every rank must be able to read; a file that does not fit raises `SnapshotError`."""
        snapshot.load(self, path)
        self.zero_grad()
        for flat, owned in zip(self.flats, self.owned, strict=True):
            with torch.no_grad():
                if self.separate:
                    flat.shard.copy_(owned)
                if (work := self._publish(flat)) is not None:
                    work.wait()

    def _publish(self, flat: Flat) -> Any:
        """Give the others the new weights of a shard, now (a `Work`) or whenever they ask for them (None)."""
        raise NotImplementedError


def _copy_to_step(shard: Tensor, device: torch.device | str | None) -> Tensor:
    return shard.detach().to(device or shard.device, _wide(shard), copy=True)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in HALF else x.dtype
