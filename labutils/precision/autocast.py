"""Autocast by hand: inside the region matrix products take half operands, losses take fp32, and everything else takes what it gets."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF_OPS = frozenset(
    """linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention""".split()
)
"""Operations that run in half: they do nearly all of the work, and add up in fp32 whatever their operands are."""

FULL_OPS = frozenset("cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy prod trace cdist".split())
"""Operations that run in fp32: their results are sums or products of many terms, in the format of their input."""

_inside = threading.local()


def _regions() -> list["autocast"]:
    if not hasattr(_inside, "regions"):
        _inside.regions = []
    return _inside.regions


class autocast(TorchFunctionMode):
    """A region in which operations choose the format of their operands, by name: half for products, fp32 for losses.

    >>> layer, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
    >>> with autocast(torch.bfloat16):
    ...     y = layer(x)
    >>> y.dtype, layer.weight.dtype
    (torch.bfloat16, torch.float32)

    Casts are operations like others: the backward pass goes through them, so that every weight gets its gradient in fp32. The half copy of a
    weight is made once and kept to the end of its region, so that a tied weight adds up its gradients in half, as torch's does.
    Inner regions decide for themselves; `enabled=False` leaves every format as it is.

    Invariant: losses and gradients equal those of torch.autocast("cpu", dtype) to the bit, for operations called from Python.
    Not seen: what a composed function such as `F.multi_head_attention_forward` calls inside, and a checkpointed region that runs again.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True, cache: bool = True) -> None:
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast computes in torch.bfloat16 or torch.float16, got {dtype!r}")
        self.dtype, self.enabled, self.cache = dtype, enabled, cache
        self._copies: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> "autocast":
        _regions().append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _regions().pop()
        self._copies.clear()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if (name in HALF_OPS or name in FULL_OPS) and self.enabled and _regions()[-1] is self:
            dtype = self.dtype if name in HALF_OPS else torch.float32
            args = [self._cast(value, dtype) for value in args]
            kwargs = {key: self._cast(value, dtype) for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs) if kwargs else func(*args)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        is_weight = value.is_leaf and value.requires_grad and not value._is_view()
        if not (self.cache and is_weight and dtype == self.dtype):
            return value.to(dtype)
        # A weight that has been stepped since, and a copy made under no_grad, are other copies.
        key = id(value), value._version, torch.is_grad_enabled()
        if key not in self._copies:
            self._copies[key] = value, value.to(dtype)  # beside its source, so that no other tensor gets the same id
        return self._copies[key][1]
