"""A vector as a sum of two, each flat in a basis of its own: x = u + Q·v (Kashin's representation,
an overdetermined basis of N + N directions for N dimensions).

Source: D. Merkulov et al., Quantization of Large Language Models with an Overdetermined Basis,
arXiv:2404.09737.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from labutils import units


def kashin(
    x: Float[Tensor, " n"], Q: Float[Tensor, "n n"], pairs: int
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], list[float]]:
    """u and v of x ≈ u + Q·v, and the residual's norm after each pair of greedy steps, relative to
    that of x: take c·sign(r) out of r, where c is the mean |r|, in one basis, then in the other.

    For a Gaussian r a step leaves √(1 − 2/π) of the norm, a pair 1 − 2/π.
    """
    u, v, rest, norms = torch.zeros_like(x), torch.zeros_like(x), x.clone(), []
    for _ in range(units.whole(pairs, "pairs")):
        step = rest.abs().mean() * rest.sign()
        u, rest = u + step, rest - step
        turned = Q.mT @ rest
        step = turned.abs().mean() * turned.sign()
        v, rest = v + step, rest - Q @ step
        norms.append((rest.norm() / x.norm()).item())
    return u, v, norms
