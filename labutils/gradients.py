"""Where the gradient of a parameter is: in `.grad`, unless a hook has taken it elsewhere."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Of each parameter whose gradients are taken, a weak reference to who has them: neither holds the
# other.
_KEEPERS = WeakTensorKeyDictionary()


class Keeper(Protocol):
    """Who takes gradients out of `.grad`, and can say where each is."""

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The memory in which the gradient of a parameter is added up; None before there is any."""


def kept_by(keeper: Keeper, parameter: Tensor) -> None:
    """From now on `keeper` knows where the gradient of this parameter is, as long as it lives."""
    _KEEPERS[parameter] = weakref.ref(keeper)


def keeper_of(parameter: Tensor) -> Keeper | None:
    """Who takes the gradients of this parameter, if anybody does."""
    known = _KEEPERS.get(parameter)
    return None if known is None else known()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter as it lies in memory, to be read or added to: whole, or this
    rank's share of it where a `zero.Optimizer` of level 2 has reduced it; None without any.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> w.sum().backward()
    >>> gradient_of(w) is w.grad
    True
    """
    keeper = keeper_of(parameter)
    return parameter.grad if keeper is None else keeper.gradient_of(parameter)


class _Here(threading.local):
    """What is so on this thread: the parameters whose gradients wait, inside `postponed`."""

    waiting: list[Tensor] | None = None


_here = _Here()


@contextmanager
def postponed() -> Iterator[list[Tensor]]:
    """Inside, a backward pass is the first part of one: who reduces gradients at the end of a pass
    leaves them in `.grad`. Gives the parameters of which that is so, each once."""
    _here.waiting = []
    try:
        yield _here.waiting
    finally:
        _here.waiting = None


def postpone(parameter: Tensor) -> bool:
    """Whether the gradient of this parameter is to be left in `.grad` until a later pass."""
    if _here.waiting is not None:
        _here.waiting.append(parameter)
    return _here.waiting is not None
