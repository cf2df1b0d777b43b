"""A linear layer with adapters, and the adapters: whole, or of a layer that ranks share out.

Source: Hu et al. 2106.09685, section 4.1.
"""

import math
from collections.abc import MutableMapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from labutils import quantization, randomness, tensor_parallel, units
from labutils.tensor_parallel import ColumnLinear, RowLinear, TokenLinear
from labutils.world import marked

Linear = nn.Linear | quantization.Nf4Linear | ColumnLinear | RowLinear | TokenLinear


def checked_rank(rank: int, d: int, k: int) -> int:
    """The LoRA rank as an int; ValueError where a matrix of d × k has more use for a whole one."""
    rank = units.whole(rank, "rank", 1)
    if rank > max(d, k):
        most = f"the update of a matrix of {d} × {k} has rank {min(d, k)} at most"
        raise ValueError(f"rank={rank}: {most}; take a smaller one")
    return rank


def wide(like: Tensor) -> torch.dtype:
    """The dtype of an adapter beside such weights: fp32 at least."""
    return torch.promote_types(like.dtype, torch.float32)


class Adapter(nn.Module):
    """(α/r)·B·A·x, with dropout before A where it is asked for: what is trained.

    A[r, k] ~ U(−1/√k, 1/√k), as PEFT draws it (the paper: a Gaussian), and B[d, r] = 0. In the
    first step A has a gradient of zero and B has not; with both zero, both always would.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        rank: int,
        alpha: int | float,
        dropout: int | float = 0.0,
        generator: torch.Generator | None = None,
        like: Tensor | None = None,
    ) -> None:
        super().__init__()
        (d, k), r = shape, checked_rank(rank, *shape)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability in [0, 1), got {dropout!r}")
        made: Any = {}
        if like is not None:  # in fp32 beside weights of fewer bits
            made = dict(dtype=wide(like), device=like.device)
        A = torch.empty(r, k, **made)
        generator = generator or randomness.alike(A.device)
        self.A = nn.Parameter(A.uniform_(-1, 1, generator=generator) / math.sqrt(k))
        self.B = nn.Parameter(torch.zeros(d, r, **made))
        self.alpha = units.positive(alpha, "alpha")
        self.dropout = dropout

    @property
    def rank(self) -> int:
        """r, the LoRA rank."""
        return len(self.A)

    @property
    def scale(self) -> float:
        """α/r."""
        return self.alpha / self.rank

    def delta(self) -> Float[Tensor, "d k"]:
        """(α/r)·B·A, what it adds to the weight."""
        return self.scale * (self.B @ self.A)

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... d"]:
        """In the dtype of x; the parameters themselves stay fp32 beside half-precision weights."""
        A, B = (weight.to(x.dtype) for weight in (self.A, self.B))
        low = F.linear(randomness.dropout(x, self.dropout, self.training), A)
        return F.linear(self.scale * low, B)


class SplitAdapter(Adapter):
    """The adapter of a layer that tensor parallelism has split: B is split where the layer is split
    by column, A where by row, and the ranks exchange what lies between, of b·s·r numbers.

    Cost: an all-reduce of b·s·r numbers, backward for a column layer and forward for a row layer;
    under sequence parallelism a gather and a scatter instead, and the gradient of what all hold.
    """

    def __init__(self, base: ColumnLinear | RowLinear, **options: Any) -> None:
        n, (d, k) = base.comm.size, base.weight.shape
        column = isinstance(base, ColumnLinear)
        super().__init__((d, k if column else k * n), **options)
        if self.dropout:
            one = "each rank would draw masks of its own"
            raise ValueError(f"dropout={self.dropout} on a split layer: {one}; use dropout=0")
        base.comm.broadcast(self.A.data, out=self.A.data)
        if column:
            marked(self.A), marked(self.B, base.weight)
        else:
            marked(self.B)
            self.A = base.share(self.A, 1, k * n, "inputs", n)
        self.comm, self.sequence, self.column = base.comm, base.sequence, column
        self.sharing = base.sharing if isinstance(base, ColumnLinear) else None

    def forward(self, x: Float[Tensor, "b s_in k"]) -> Float[Tensor, "b s_out d"]:
        """As tensor parallelism calls it: f, or g, around the r numbers of each token."""
        tp, comm = tensor_parallel, self.comm
        A, B = (weight.to(x.dtype) for weight in (self.A, self.B))
        if self.sequence and self.column:
            A = tp.copy_to(A, comm, "gradients")  # each rank applies it to its own tokens
        elif self.sequence:
            B = tp.copy_to(B, comm, "gradients")
        if self.sharing is not None:
            B = tp.copy_to(B, self.sharing, "gradients")
        low = self.scale * F.linear(x, A)
        if self.column:
            low = tp.gather_from(low, comm) if self.sequence else tp.copy_to(low, comm)
        else:
            low = tp.scatter_to(low, comm) if self.sequence else tp.reduce_from(low, comm)
        return F.linear(low, B)


class TokenAdapter(Adapter):
    """The adapter of a whole layer that sees this rank's tokens alone, as an expert does under
    sequence parallelism: its gradients are summed over the ranks that have the others."""

    def __init__(self, base: TokenLinear, **options: Any) -> None:
        super().__init__((base.out_features, base.in_features), **options)
        base.comm.broadcast(self.A.data, out=self.A.data)
        self.comm = base.comm
        for parameter in self.parameters():
            marked(parameter, base.weight)

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... d"]:
        """As that of a whole layer."""
        A, B = (
            tensor_parallel.copy_to(weight, self.comm, "gradients").to(x.dtype)
            for weight in (self.A, self.B)
        )
        low = F.linear(randomness.dropout(x, self.dropout, self.training), A)
        return F.linear(self.scale * low, B)


class LoraLinear(nn.Module):
    """A frozen linear layer, `base`, and its adapters by name, of which one is active or none."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapters = cast("MutableMapping[str, Adapter]", nn.ModuleDict())
        self.active: str | None = None
        self.original: Tensor | None = None  # the base's own weight, while another is merged

    @property
    def weight(self) -> Tensor:
        """Refused: what asks for it would cut or copy the base's weight and leave the adapter."""
        remedy = "first split or convert the model, then adapt it"
        raise TypeError(f"a layer with adapters has no weight of its own: {remedy}")

    def add(self, name: str, **options: Any) -> None:
        """One more adapter; ValueError for a name that is taken, or that no module can have."""
        units.instance(name, str, "an adapter's name")
        taken = hasattr(self.adapters, name) and name not in self.adapters
        if not name or "." in name or taken:
            raise ValueError(f"an adapter cannot be called {name!r}: give a word without a dot")
        if name in self.adapters:
            raise ValueError(f"there is an adapter {name!r} already: give another name")
        base, like = self.base, next(self.base.parameters())
        if isinstance(base, ColumnLinear | RowLinear):
            self.adapters[name] = SplitAdapter(base, like=like, **options)
        elif isinstance(base, TokenLinear):
            self.adapters[name] = TokenAdapter(base, like=like, **options)
        else:
            shape = (base.out_features, base.in_features)
            self.adapters[name] = Adapter(shape, like=like, **options)
            for parameter in self.adapters[name].parameters():
                marked(parameter, like)  # an expert's is of the ranks that have the expert

    def activate(self, name: str | None) -> None:
        """Compute with this adapter, which alone is trained, or with none.

        Raises ValueError for an unknown name, and while another is merged.
        """
        if self.original is not None:
            raise ValueError(f"{self.active!r} is merged: unmerge() before another is active")
        if name is not None and name not in self.adapters:
            known = ", ".join(map(repr, self.adapters))
            raise ValueError(f"there is no adapter {name!r}: add it, or use one of {known}")
        self.active = name
        for each, adapter in self.adapters.items():
            adapter.requires_grad_(each == name)

    @torch.no_grad()
    def merge(self) -> None:
        """W becomes W + (α/r)·B·A, and the layer computes one product again.

        The weight itself is kept for `unmerge`: to subtract what was added would not give it back,
        as sums are rounded. Raises ValueError where there is nothing to merge, a second time, and
        where W is not here as a matrix.
        """
        if self.original is not None or self.active is None:
            why = "is merged already" if self.original is not None else "has no active adapter"
            raise ValueError(f"this layer {why}: a second sum would be another weight")
        if isinstance(self.base, quantization.Nf4Linear):
            remedy = "give the model its whole weights back, then merge"
            raise ValueError(f"the sum has no code in NF4: {remedy}")
        weight, adapter = self.base.weight, self.adapters[self.active]
        if weight.dim() != 2 or adapter.A.dim() != 2:
            raise ValueError("the weight is a piece of one: merge before zero.shard, not after")
        self.original = weight
        self.base.weight = nn.Parameter((weight + adapter.delta()).to(weight.dtype), False)

    def unmerge(self) -> None:
        """The weight is what it was before `merge`, to the bit.

        Raises ValueError where nothing is merged.
        """
        if self.original is None:
            raise ValueError("this layer is not merged: call merge() first")
        self.base.weight, self.original = self.original, None

    def forward(self, x: Float[Tensor, "b_in *s_in k"]) -> Float[Tensor, "b_in *s_out d"]:
        y = self.base(x)
        if self.active is None or self.original is not None:
            return y
        return y + self.adapters[self.active](x)


def wrap(
    linear: Linear, *, rank: int, alpha: int | float, name: str = "default", **options: Any
) -> LoraLinear:
    """The layer, frozen, with an adapter of that name, active.

    linear: plain, or split by tensor parallelism, or over NF4
    rank, alpha: r and α of the adapter; `options` are its dropout and generator

    >>> layer = wrap(nn.Linear(6, 4), rank=2, alpha=4)
    >>> sum(p.numel() for p in layer.parameters() if p.requires_grad)
    20

    Raises ValueError where ZeRO has cut the weight.
    """
    units.instance(linear, nn.Module, "wrap")
    if getattr(linear, "weight", torch.empty(0, 0)).dim() != 2:
        raise ValueError("the weight is a piece of one: adapt the model before it is sharded")
    layer = LoraLinear(linear)
    layer.add(name, rank=rank, alpha=alpha, **options)
    layer.activate(name)
    return layer
