"""What ranks share out and what they all have: marks on parameters, for whoever sums over ranks."""

from fractions import Fraction
from typing import TypeVar

from torch import Tensor

from labutils.world.comm import Comm

_MARKS = ("shares", "only_on", "ends", "cut")
Of = TypeVar("Of", bound=Tensor)


def marked(parameter: Of, like: Tensor | None = None, *, shares: int = 1) -> Of:
    """The parameter, which says from now on in how many different `shares` the ranks have the
    tensor that it is a part of: so many times as many as those of `like`.

    like: what it was made of, whose other marks it gets, too; itself unless given. Without a mark
        that is whole
    """
    known = vars(parameter if like is None else like)
    marks = {name: known[name] for name in _MARKS if name in known}
    vars(parameter).update(marks, shares=marks.get("shares", 1) * shares)
    return parameter


def copies(parameter: Tensor, comm: Comm) -> Fraction:
    """How many ranks of the mesh have this very tensor: those of a stage, less where they share it
    out; twice as many where two stages have it (`ends`), as a tied embedding.

    Transforms and what averages gradients say so on each parameter. Raises ValueError where nobody
    has, as on a shard that was cut by hand.
    """
    if comm.mesh.size == 1:
        return Fraction(1)
    marks = vars(parameter)
    if "shares" not in marks:
        remedy = "set its .shares: 1 if all have it whole, their number for a shard of your own"
        what = f"a parameter of shape {list(parameter.shape)}"
        raise ValueError(f"nobody said how ranks share out {what}: {remedy}")
    held = Fraction(comm.mesh.size, comm.mesh.pp * marks["shares"])
    return held * marks.get("ends", 1)
