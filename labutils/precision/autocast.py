"""torch.autocast by hand: products run in half precision, losses in fp32, the rest as it comes.

And half-precision products where a machine has no units for them.
"""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF_OPS = frozenset(
    """linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention""".split()
)
"""Operations that run in half precision: they do nearly all of the work, and add up in fp32."""

FULL_OPS = frozenset(
    """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy prod
    trace cdist""".split()
)
"""Operations that run in fp32: their results are sums or products of many terms."""

CAST = {torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half, torch.float32: Tensor.float}
"""Cheaper than .to(dtype), which has arguments to read: half the price on a small tensor."""

WIDENED = (torch.bfloat16, torch.float16)
"""What `wide_products` widens."""


class _Here(threading.local):
    """What is so on this thread: its regions, from outer to inner, and their half-precision copies.

    A copy is kept beside its source, so that no other tensor gets the same id.
    """

    def __init__(self) -> None:
        self.regions: list[autocast] = []
        self.copies: dict[tuple, tuple[Tensor, Tensor]] = {}


class autocast(TorchFunctionMode):
    """A region in which operations choose the format of their operands, by name.

    >>> layer, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
    >>> with autocast(torch.bfloat16):
    ...     y = layer(x)
    >>> y.dtype, layer.weight.dtype
    (torch.bfloat16, torch.float32)

    Casts are operations like others: the backward pass goes through them, so that every weight gets
    its gradient in fp32. The half-precision copy of a weight is made once and kept to the end of
    the outermost region, so that a tied weight adds up its gradients in half precision, as torch's
    does. Inner regions decide for themselves; `enabled=False` leaves every format as it is. A
    region can be entered again.

    Invariant: losses and gradients of the course's GPT equal those of torch.autocast("cpu", dtype)
    to the bit. `checkpointing.checkpoint` computes again in the region of the first time; torch's
    checkpoint replays torch's regions only. Not seen: what a composed function such as
    `torch.einsum` or `F.multi_head_attention_forward` calls inside. Not known: torch's third list
    (`cat`, `stack`, `index_copy`, in the widest format among their operands) and its rarer losses.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True) -> None:
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast computes in torch.bfloat16 or torch.float16, got {dtype!r}")
        self.dtype = dtype
        self.enabled = enabled
        self._formats: dict[str, torch.dtype] = {}
        if enabled:
            self._formats |= dict.fromkeys(HALF_OPS, dtype)
            self._formats |= dict.fromkeys(FULL_OPS, torch.float32)

    @staticmethod
    def innermost() -> "autocast | None":
        """The region that decides here, or None outside of all."""
        return _here.regions[-1] if _here.regions else None

    def __enter__(self) -> "autocast":
        _here.regions.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _here.regions.pop()
        if not _here.regions:
            _here.copies.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        dtype = self._formats.get(getattr(func, "__name__", ""))
        if dtype is not None and _here.regions[-1] is self:
            args = [self._cast(value, dtype) for value in args]
            kwargs = {key: self._cast(value, dtype) for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs) if kwargs else func(*args)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64):
            return value
        is_weight = value.requires_grad and value.is_leaf and not value._is_view()
        if not is_weight or dtype != self.dtype:
            return CAST[dtype](value)
        # A weight that has been stepped since, and a copy made under no_grad, are other copies.
        key = id(value), value._version, dtype, torch.is_grad_enabled()
        if key not in _here.copies:
            _here.copies[key] = value, CAST[dtype](value)
        return _here.copies[key][1]


def half_here(x: Tensor) -> torch.dtype | None:
    """The half format in which products of x compute here, in torch's region or ours; None where
    they compute in that of x. For products that a region does not see, as in an autograd function.
    """
    region = autocast.innermost()
    if x.dtype == torch.float64:
        return None
    if region is not None and region.enabled:
        return region.dtype
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def own_formats(device: str) -> contextlib.ExitStack:
    """Inside, operations leave every format as it is, in torch's region and in ours: for kernels
    that choose them on their own."""
    stack = contextlib.ExitStack()
    if torch.amp.is_autocast_available(device):  # "meta" has none
        stack.enter_context(torch.autocast(device, enabled=False))
    if autocast.innermost() is not None:
        stack.enter_context(autocast(enabled=False))
    return stack


class wide_products(TorchFunctionMode):
    """A region in which half-precision products are formed in fp32 and rounded once.

    That is what a matrix unit does: exact products, sums in fp32, one rounding at the end. A CPU
    without such units does the same one number at a time, and takes many times as long.

    >>> x = torch.full((1, 300), 1.0, dtype=torch.bfloat16)
    >>> with wide_products():
    ...     x @ x.T
    tensor([[300.]], dtype=torch.bfloat16)

    Invariant: torch's own product to the bit where sums are exact in fp32; elsewhere their order
    may change which neighbor a result is rounded to, in fewer than one in a hundred.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in HALF_OPS or args[0].dtype not in WIDENED:
            return func(*args, **kwargs)
        wide = [x.float() if isinstance(x, Tensor) else x for x in args]
        return func(*wide, **kwargs).to(args[0].dtype)


_here = _Here()
