"""DDP's reducer, with a reduce-scatter: gradients come one by one, and go as shards."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from labutils import gradients, measure
from labutils.zero.flat_parameter import FlatParameter


class Reducer:
    """Collects gradients in flat parameters and reduces these in one order, the same on all ranks.

    flats   in the order in which backward completes them
    eager   reduce each as soon as it is complete, during backward; else all when `finish` is called
    ended   is called after each backward pass
    """

    def __init__(
        self,
        flats: Sequence[FlatParameter],
        *,
        eager: bool,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self.flats = list(flats)
        self.eager = eager
        self.ended = ended
        self._flight: tuple[FlatParameter, Any] | None = None
        self._next = 0
        self.queued = False  # the end of the backward pass that runs now has still to come
        for flat in self.flats:
            if eager:
                flat.gradient = torch.empty_like(flat.shard)
            for i, whole in enumerate(flat.wholes):
                hook = functools.partial(self.collect, flat, i)
                whole.register_post_accumulate_grad_hook(hook)

    def collect(self, flat: FlatParameter, i: int, parameter: nn.Parameter) -> None:
        """A hook: the gradient of parameter `i` is there. Take it, and reduce what is complete.

        Raises RuntimeError for a gradient that comes again after it was reduced.
        """
        if self.eager and gradients.postpone(parameter):
            return
        if self.eager:
            self.on_backward()
            if self.flats.index(flat) < self._next:
                raise RuntimeError(
                    f"a gradient of shape {list(parameter.shape)} came again after it was reduced, "
                    "in a backward pass within another: checkpoint with use_reentrant=False, or "
                    "call zero_grad() after a backward pass that failed"
                )
        grad = parameter.grad
        assert grad is not None  # the hook says that it is there
        measure.label([grad], "gradients", "gradient on its way", anew=True)
        flat.take(i, grad)
        del grad
        parameter.grad = None
        while self.eager and self._next < len(self.flats) and self.flats[self._next].complete:
            self._launch()

    def on_backward(self) -> None:
        """See to it that `finish` is called when the backward pass that runs now is over."""
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self.queued = False
        # Not at the end of a pass within a pass, as reentrant checkpointing has them.
        if torch._C._current_autograd_node() is None:
            self.finish()
            if self.ended is not None:
                self.ended()

    def _launch(self) -> None:
        """Start to reduce the next one when the one before has landed: at most one is under way."""
        self._land()
        flat = self.flats[self._next]
        self._flight = flat, flat.reduce()
        self._next += 1

    def _land(self) -> None:
        if self._flight is not None:
            flat, work = self._flight
            flat.land(work.wait())
            self._flight = None

    def finish(self) -> None:
        """Reduce all that are left; as in DDP, what took no part in the loss has gradient 0."""
        while self._next < len(self.flats):
            self._launch()
        self._land()
        self._next = 0

    @property
    def pending(self) -> bool:
        """Whether gradients have come that are not reduced."""
        return self._next > 0 or any(flat.arrived for flat in self.flats)

    def reset(self) -> None:
        """Forget a backward pass that failed."""
        if self._flight is not None:
            self._flight[1].wait()
        self._flight, self._next, self.queued = None, 0, False
        for flat in self.flats:
            flat.forget()
