"""The state of a run in one file: written by any number of ranks, read by any other, at any level and bucket size, or refused.

The file is made of tensors, parameter by parameter and unpadded, then an index of them in JSON, then a footer that finds and checks the
index. A file that was not written to its end has no footer; it never has the name of a snapshot, because the name is given last.
"""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

if TYPE_CHECKING:
    from labutils.zero.flat import Flat
    from labutils.zero.update import Partitioned

HEAD, FOOT = b"labutils.zero snapshot 2\n", b"end of snapshot\n"
FOOTER = struct.Struct(f"<QI{len(FOOT)}s")  # bytes of the index, their check sum, the end
WEIGHT = "weight"


class SnapshotError(ValueError):
    """A file that cannot be loaded: torn, damaged, not a snapshot, or one of another model or optimizer."""


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def save(owner: "Partitioned", path: str | os.PathLike) -> None:
    """Write the state to `path`: all ranks take part, rank 0 writes, one flat tensor at a time, and nobody returns before the file is there."""
    path = Path(path)
    comm = owner.comm
    if comm.rank == 0:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                _write(owner, file)
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    else:
        for _ in _tensors(owner):
            pass
    comm.barrier()


def _write(owner: "Partitioned", file: BinaryIO) -> None:
    parameters: dict[str, dict] = {}
    file.write(HEAD)
    for name, key, value in _tensors(owner):
        data = memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        entry = parameters.setdefault(
            name, {"shape": list(value.shape), "tensors": {}, "numbers": {}}
        )
        dtype = str(value.dtype).removeprefix("torch.")
        entry["tensors"][key] = {
            "dtype": dtype,
            "start": file.tell(),
            "nbytes": len(data),
            "crc": zlib.crc32(data),
        }
        file.write(data)
    for flat, pieces in zip(owner.flats, owner.pieces, strict=True):
        for name in flat.names:
            group = owner.groups.number[name]
            state = owner.inner.state[pieces[group]].items()
            numbers = {
                key: float(value)
                for key, value in state
                if value is not None and not _sharded(value, pieces[group])
            }
            parameters[name] |= {"group": group, "numbers": numbers}
    groups = [
        {key: value for key, value in group.items() if _plain(value)}
        for group in owner.inner.param_groups
    ]
    index = json.dumps(
        {"optimizer": type(owner.inner).__name__, "groups": groups, "parameters": parameters}
    ).encode()
    file.write(index)
    file.write(FOOTER.pack(len(index), zlib.crc32(index), FOOT))
    file.flush()


def _tensors(owner: "Partitioned") -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, key, whole tensor) of everything, on rank 0; the other ranks send their shards and get nothing."""
    for flat, owned, pieces in zip(owner.flats, owner.owned, owner.pieces, strict=True):
        yield from _gathered(flat, WEIGHT, owned)
        for key, known in _divided(owner, pieces).items():
            shard = torch.cat(
                [
                    known[group] if group in known else torch.zeros_like(piece)
                    for group, piece in pieces.items()
                ]
            )
            yield from (
                each
                for each in _gathered(flat, key, shard)
                if owner.groups.number[each[0]] in known
            )
    for flat in owner.resting:
        yield from _gathered(flat, WEIGHT, flat.shard)
    for name, parameter in owner.constants.items():
        yield name, WEIGHT, parameter


def _gathered(flat: "Flat", key: str, shard: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    with flat.comm.record("snapshot"):
        whole = flat.comm.gather(shard.to(flat.whole.device), 0)
    if whole is not None:
        yield from (
            (name, key, view) for name, view in zip(flat.names, flat.views(whole), strict=True)
        )


def _divided(owner: "Partitioned", pieces: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
    """The optimizer's states that are divided like the weights: what this rank has of each, group by group."""
    found: dict[str, dict[int, Tensor]] = {}
    for group, piece in pieces.items():
        for key, value in owner.inner.state[piece].items():
            if value is not None and _sharded(value, piece):
                found.setdefault(key, {})[group] = value
    return found


def _sharded(value: Any, owned: Tensor) -> bool:
    """Whether a state of the optimizer has an element for every element of the shard; the rest are numbers, such as Adam's step."""
    if isinstance(value, Tensor) and value.shape == owned.shape:
        return True
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return False
    raise TypeError(
        f"an optimizer state of {type(value).__name__} is neither a number nor like the weights: a snapshot cannot divide it"
    )


def _plain(value: Any) -> bool:
    """Whether a setting of the optimizer, such as its learning rate or betas, can be written as JSON."""
    if isinstance(value, (tuple, list)):
        return all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str))


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def load(owner: "Partitioned", path: str | os.PathLike) -> None:
    """Replace the state by the one in `path`, which every rank must be able to read; whatever does not fit is refused before anything changes.

    Trained parameters must be the same by name and shape; frozen ones that the file does not know stay as they are.
    """
    with open(path, "rb") as file:
        index = _index(file, Path(path).name)
        stored = _Stored(file, index["parameters"], Path(path).name)
        if index["optimizer"] != type(owner.inner).__name__:
            raise SnapshotError(
                f"{stored.name} was written by {index['optimizer']}, this optimizer is {type(owner.inner).__name__}: use the same"
            )
        if len(index["groups"]) != len(owner.param_groups):
            raise SnapshotError(
                f"{stored.name} has {len(index['groups'])} groups of parameters, this optimizer has {len(owner.param_groups)}: use the same"
            )
        stored.check(owner)

        state = {}
        for flat, owned, pieces in zip(owner.flats, owner.owned, owner.pieces, strict=True):
            stored.fill(flat, WEIGHT, owned, flat.names)
            lengths = [len(piece) for piece in pieces.values()]
            for i, (group, piece) in enumerate(pieces.items()):
                names = [name for name in flat.names if owner.groups.number[name] == group]
                first = stored.parameters[names[0]]
                shards = {
                    key: stored.fill(flat, key, torch.zeros_like(owned), names)
                    for key in first["tensors"]
                    if key != WEIGHT
                }
                state[piece] = {
                    key: shard.split(lengths)[i].clone() for key, shard in shards.items()
                }
                state[piece] |= {
                    key: torch.tensor(value) for key, value in first["numbers"].items()
                }
        for flat in owner.resting:
            stored.fill(flat, WEIGHT, flat.shard, flat.names)
        for name, parameter in owner.constants.items():
            if name in stored.parameters:
                parameter.copy_(stored.read(name, WEIGHT).view_as(parameter))
    current = owner.inner.state_dict()["param_groups"]
    groups = [mine | _tuples(theirs) for mine, theirs in zip(current, index["groups"], strict=True)]
    numbered = enumerate(piece for group in owner.param_groups for piece in group["params"])
    owner.inner.load_state_dict(
        {
            "state": {i: state[piece] for i, piece in numbered if state[piece]},
            "param_groups": groups,
        }
    )


def _tuples(group: dict) -> dict:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _index(file: BinaryIO, name: str) -> dict:
    """The index of a file whose every byte is there and as it was written."""
    if file.read(len(HEAD)) != HEAD:
        raise SnapshotError(
            f"{name} is not a snapshot of labutils.zero: it does not begin like one"
        )
    end = file.seek(0, os.SEEK_END)
    torn = SnapshotError(
        f"{name} is torn, its end is missing: it was not written, or not copied, completely; use an older snapshot, or copy it again"
    )
    if end < len(HEAD) + FOOTER.size:
        raise torn
    file.seek(end - FOOTER.size)
    length, checksum, foot = FOOTER.unpack(file.read(FOOTER.size))
    if foot != FOOT or length > end - FOOTER.size - len(HEAD):
        raise torn
    file.seek(end - FOOTER.size - length)
    text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise SnapshotError(
            f"{name} is damaged: its index is not what was written; use an older snapshot, or copy it again"
        )
    return json.loads(text)


class _Stored:
    """The tensors of an open snapshot."""

    def __init__(self, file: BinaryIO, parameters: dict[str, dict], name: str) -> None:
        self.file, self.parameters, self.name = file, parameters, name

    def read(self, name: str, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """`count` elements of a tensor from `first` on, flat, or all of them."""
        entry = self.parameters[name]["tensors"][key]
        dtype = getattr(torch, entry["dtype"])
        self.file.seek(entry["start"] + first * dtype.itemsize)
        return torch.frombuffer(
            bytearray(self.file.read(entry["nbytes"] if count is None else count * dtype.itemsize)),
            dtype=dtype,
        )

    def check(self, owner: "Partitioned") -> None:
        """That every tensor is whole, and that parameters, shapes, types and steps are those that `owner` can take."""
        trained = [name for flat in owner.flats for name in flat.names]
        frozen = {name for flat in owner.resting for name in flat.names} | set(owner.constants)
        missing, unknown = (
            [name for name in trained if name not in self.parameters],
            [name for name in self.parameters if name not in {*trained, *frozen}],
        )
        if missing or unknown:
            told = "; ".join(
                f"{what}: {', '.join(names[:3])}"
                for what, names in (("it lacks", missing), ("it has besides", unknown))
                if names
            )
            raise SnapshotError(
                f"{self.name} is of another model ({told}): load it into the model that it was written for, named alike"
            )
        for name, entry in self.parameters.items():
            for key, tensor in entry["tensors"].items():
                self.file.seek(tensor["start"])
                if zlib.crc32(self.file.read(tensor["nbytes"])) != tensor["crc"]:
                    raise SnapshotError(
                        f"{self.name} is damaged: {key} of {name} is not what was written; use an older snapshot, or copy it again"
                    )
        for flat, kept in [
            *zip(owner.flats, (owned.dtype for owned in owner.owned), strict=True),
            *((flat, flat.shard.dtype) for flat in owner.resting),
        ]:
            for name, shape in zip(flat.names, flat.shapes, strict=True):
                self._fits(name, tuple(shape), kept)
        for name, parameter in owner.constants.items():
            self._fits(name, tuple(parameter.shape), parameter.dtype)
        for name, here in owner.groups.number.items():
            if name in trained and (there := self.parameters[name]["group"]) != here:
                raise SnapshotError(
                    f"{self.name} has {name} in group {there}, here it is in group {here}: group the parameters alike, in the same order"
                )
        for flat in owner.flats:
            steps = {
                (self.parameters[name]["group"], *self.parameters[name]["numbers"].items())
                for name in flat.names
            }
            if len(steps) > len({group for group, *_ in steps}):
                raise SnapshotError(
                    f"{self.name}: the parameters of one flat tensor, {', '.join(flat.names[:3])}, … have made different numbers of steps"
                )

    def _fits(self, name: str, shape: tuple[int, ...], kept: torch.dtype) -> None:
        if name not in self.parameters:
            return
        entry = self.parameters[name]
        if tuple(entry["shape"]) != shape:
            raise SnapshotError(
                f"{self.name} is of another model: {name} has shape {entry['shape']} there and {list(shape)} here"
            )
        dtype = getattr(torch, entry["tensors"][WEIGHT]["dtype"])
        if torch.promote_types(dtype, kept) != kept:
            told = f"{str(dtype).removeprefix('torch.')} there and {str(kept).removeprefix('torch.')} here"
            raise SnapshotError(
                f"{self.name} would lose digits: {name} is {told}; use weights as wide, or master=True"
            )

    def fill(self, flat: "Flat", key: str, shard: Tensor, names: Collection[str]) -> Tensor:
        """`shard`, filled with what this rank owns of the stored tensors of these names; the rest is zero."""
        shard.zero_()
        for name, start, piece in zip(flat.names, flat.starts, flat.pieces(shard), strict=False):
            if len(piece) and name in names:
                first = max(flat.own.start - start, 0)
                piece.copy_(self.read(name, key, first, len(piece)))
        return shard
