"""torch.utils.checkpoint by hand: a function that is computed again when backward asks for it."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from labutils import randomness, units
from labutils.precision import autocast


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `fn(*args, **kwargs)` returns; what autograd saves inside `fn` does not stay in memory.

    Only the arguments do. The second evaluation sees the random state and the autocast setting of
    the first, so dropout draws the same mask: on a rank from the rank's own generators. On rank
    threads, which share torch's, what is drawn in `fn` without a generator (`nn.Dropout`,
    `torch.rand`) is drawn from the rank's own, too.

    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(lambda x: x.exp().sin(), x).sum().backward()
    >>> bool((x.grad == torch.ones(3).exp().cos() * torch.ones(3).exp()).all())
    True

    Cost: one more evaluation of `fn` for each backward pass, which ends where the last tensor that
    is still needed has been saved.
    Invariant: gradients are equal to the bit to those of a plain call, if `fn` computes the same
    both times. What `fn` does to the outside (batch-norm statistics, counters) happens twice.
    Raises RuntimeError, on rank threads, where an operation can only draw from torch's generator.
    Source: the same contract as torch.utils.checkpoint(use_reentrant=False); Chen et al.
    1604.06174, section 3.
    """
    units.instance(fn, Callable, "checkpoint")  # type: ignore[arg-type]
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    region = _Region(fn, args, kwargs)
    with region.ambient.random.drawing(), saved_tensors_hooks(region.pack, region.unpack):
        return fn(*args, **kwargs)


class Ambient:
    """What a function's result depends on beside its arguments, to be replayed.

    Where random numbers stand, and the autocast setting, torch's and ours.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self.random = randomness.Standing(devices)
        kinds = {"cpu", *(device.type for device in devices)} - {"meta"}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self.cached = torch.is_autocast_cache_enabled()
        self.region = autocast.innermost()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, generators and autocast are as they were; afterwards, as if nothing happened."""
        with self.random.replayed(), ExitStack() as settings:
            for kind, dtype, enabled in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    casts = torch.autocast(kind, dtype, enabled, cache_enabled=self.cached)
                    settings.enter_context(casts)
            if self.region or autocast.innermost():
                settings.enter_context(self.region or autocast(enabled=False))
            yield


class _Slot:
    """Stands in the graph where a saved tensor would: empty until the region is computed again."""

    __slots__ = ("__weakref__", "kind", "tensor")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tensor: Tensor | None = None


class _Enough(BaseException):
    """Ends a second evaluation early; no `except Exception` of the user's function swallows it."""

    def __init__(self, region: "_Region") -> None:
        self.region = region


class _Keep(torch.autograd.Function):
    """A node that is never run: it keeps the arguments.

    In sight of the saved-tensor hooks of whoever called us, so that regions can nest.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Region:
    """One call of a checkpointed function.

    The graph owns it, through its slots, and the region never owns the graph: nothing leaks.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.fn = fn
        # A type stands where each tensor was.
        self.given = tree_map(lambda x: Tensor if isinstance(x, Tensor) else x, (args, kwargs))
        self.kept = _Keep.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn
        self.ambient = Ambient(tensors)
        self.slots: list[weakref.ref[_Slot]] = []

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(_kind(tensor))
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        if slot.tensor is None:
            self.recompute()
        tensor, slot.tensor = slot.tensor, None
        assert tensor is not None  # `recompute` fills every slot, or raises
        return tensor

    def recompute(self) -> None:
        """Evaluates the function again and fills the slots that the graph still holds."""
        slots = [slot() for slot in self.slots]
        last = max(place for place, slot in enumerate(slots) if slot is not None)
        places = itertools.count()

        def capture(tensor: Tensor) -> Tensor:
            place = next(places)
            tensor = tensor.detach()
            if (slot := slots[place]) is not None:
                if slot.kind != (now := _kind(tensor)):
                    before = f"{slot.kind} as tensor {place}"
                    raise self.complaint(f"saved {before} the first time and {now} now")
                slot.tensor = tensor
            if place == last:
                raise _Enough(self)
            return tensor

        tensors = iter(self.kept.saved_tensors)
        args, kwargs = tree_map(lambda x: next(tensors) if x is Tensor else x, self.given)
        try:
            with (
                self.ambient.replayed(),
                torch.enable_grad(),
                saved_tensors_hooks(capture, lambda tensor: tensor),
            ):
                self.fn(*args, **kwargs)
        except _Enough as enough:
            if enough.region is not self:
                raise
        else:
            found = f"{len(slots)} tensors the first time and {next(places)} now"
            raise self.complaint(f"saved {found}")

    def complaint(self, what: str) -> RuntimeError:
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        remedy = (
            "It must do the same both times: does it depend on a counter, a cache or the clock?"
        )
        return RuntimeError(f"checkpoint: {name}, computed again, {what}. {remedy}")


def _kind(tensor: Tensor) -> str:
    kind = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
    return kind.removeprefix("torch.").removesuffix(" on cpu")
