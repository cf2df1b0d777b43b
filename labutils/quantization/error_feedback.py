"""Weights that make up for one another's rounding, column after column, as in GPTQ (OPTQ).

Rounding to nearest makes each weight's error small. What counts is the layer's output on the inputs
that come: there the columns not yet rounded can cancel what a rounded one has done.

Source: E. Frantar et al., GPTQ, arXiv:2210.17323.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from labutils import units
from labutils.quantization.tiles import Granularity, quantize


def hessian(x: Float[Tensor, "tokens k"], damping: float = 0.01) -> Float[Tensor, "k k"]:
    """xᵀ·x of calibration inputs, in fp64, with so much of its mean diagonal added."""
    x, damping = x.double(), units.positive(damping, "damping", or_zero=True)
    H = x.mT @ x
    H.diagonal().add_(damping * H.diagonal().mean())
    return H


def error_feedback(
    w: Float[Tensor, "d k"],
    H: Float[Tensor, "k k"],
    fmt: str,
    granularity: Granularity = "row",
    *,
    scales: Tensor | None = None,
) -> Float[Tensor, "d k"]:
    """w in values of `quantize`'s grid, fp64. Column after column is rounded; what that changes in
    the output goes to the later ones, by the inverse of H, from which each finished column is then
    eliminated.

    scales: of every weight, or to be expanded to that, in place of those of the granularity
    fmt, granularity: as in `quantize`
    Raises ValueError where H is of other inputs.
    """
    if H.shape != (k := w.shape[-1], k):
        raise ValueError(f"w has {k} columns, H the shape {tuple(H.shape)}: hessian(its inputs)")
    kept = quantize(w, fmt, granularity=granularity)
    top = kept.integers.max
    scales = (kept.scale_of_each() if scales is None else scales).double().expand(w.shape)
    w, inverse = w.double().clone(), torch.linalg.inv(H)
    for j in range(w.shape[1]):
        rounded = (w[:, j] / scales[:, j]).round().clamp(-top, top) * scales[:, j]
        error = (w[:, j] - rounded) / inverse[j, j]
        w[:, j] = rounded
        w[:, j + 1 :] -= error[:, None] * inverse[j, j + 1 :]
        inverse = inverse - inverse[:, j, None] * inverse[j] / inverse[j, j]
    return w
