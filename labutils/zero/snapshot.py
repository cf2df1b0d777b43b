"""The state of a run in one safetensors file: written by any number of ranks, read by any other.

A file has every parameter whole, in its own shape, under its name in the module, and every state of
the optimizer under "state/parameter"; numbers, such as Adam's step, and settings are its metadata.
"""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from labutils.world import Comm
from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.optimizer import Optimizer

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
OWN = "labutils.zero"  # the key of the metadata
Entry = tuple[str, Tensor]


class SnapshotError(ValueError):
    """A file that cannot be loaded: torn, no snapshot, or one of another model or optimizer."""


@torch.no_grad()
def save(
    path: str | os.PathLike, module: nn.Module, optimizer: Optimizer | torch.optim.Optimizer
) -> None:
    """Write weights and optimizer state to a file; all ranks do, and it is there when they return.

    It is written aside and takes its name when it is complete. Any number of ranks at any level can
    `load` it. Cost: rank 0 holds one flat parameter at a time, whole.
    """
    run, path = _Run(module, optimizer), Path(path)
    states = run.everywhere(run.states())
    if run.comm.rank > 0:
        for _ in run.wholes(states):
            pass
    else:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(aside, "xb") as file:
                file.write(run.header(states))
                for _, whole in run.wholes(states):
                    file.write(whole.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    run.comm.barrier()


@torch.no_grad()
def load(
    path: str | os.PathLike, module: nn.Module, optimizer: Optimizer | torch.optim.Optimizer
) -> None:
    """Go on from a file that `save` wrote, which every rank must be able to read.

    Trained parameters must be the same by name, shape and group; frozen ones that the file does not
    know stay as they are.

    Raises SnapshotError for a file that does not fit, before anything changes.
    """
    run, name = _Run(module, optimizer), Path(path).name
    try:
        with safe_open(path, "pt") as file:
            stored = _Stored(file, name)
            stored.check(run)
            stored.fill(run)
    except SafetensorError as error:
        raise SnapshotError(
            f"{name} is torn, or no snapshot: {error}; use an older one, or copy it again"
        ) from error
    optimizer.zero_grad()
    if isinstance(optimizer, Optimizer):
        for flat in optimizer.flats:
            flat.gather()


class _Run:
    """What a snapshot is of: flat parameters, the names of their pieces, an optimizer of these."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | torch.optim.Optimizer) -> None:
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.constants: dict[str, Tensor] = {}  # frozen weights that every rank has whole
        if isinstance(optimizer, Optimizer):
            self.constants = {n: p for p, n in self.names.items() if p not in optimizer.pieces}
            self.names = {piece: self.names[p] for p, piece in optimizer.pieces.items()}
            self.flats, self.inner = optimizer.flats, optimizer.inner
        else:
            self.flats = [flat for group in module._sharded.groups for flat in group.flats]
            self.inner = optimizer
        self.comm: Comm = self.flats[0].comm
        self.trained = {name for piece, name in self.names.items() if piece.requires_grad}

    def named(self, flat: FlatParameter) -> list[str]:
        """The names of its members."""
        return [self.names[piece] for piece in flat.pieces]

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, and the names of the trained in each."""
        found = []
        for group in self.inner.param_groups:
            names = [self.names[p] for p in group["params"] if p.requires_grad]
            plain = {key: value for key, value in group.items() if _plain(key, value)}
            found.append({**plain, "names": names})
        return found

    def states(self) -> dict[str, dict[str, str | float]]:
        """What the optimizer knows of this rank's pieces: the type of a tensor, or the number."""
        found: dict[str, dict[str, str | float]] = {}
        for piece, state in self.inner.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    found.setdefault(self.names[piece], {})[key] = CODES[value.dtype]
                elif value is not None and torch.as_tensor(value).numel() == 1:
                    found.setdefault(self.names[piece], {})[key] = float(value)
                elif value is not None:
                    raise TypeError(f"{key} of the optimizer is neither a number nor like a weight")
        return found

    def everywhere(self, states: dict) -> dict:
        """The states of the pieces of all ranks."""
        text = torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)
        device = self.flats[0].shard.device
        with self.comm.record("snapshot"):
            sizes = self.comm.all_gather(torch.tensor([len(text)], device=device)).tolist()
            texts = self.comm.all_gather(text.to(device), sizes=sizes).split(sizes)
        every = [json.loads(bytes(each.tolist())) for each in texts]
        return {name: known for each in every for name, known in each.items()}

    def header(self, states: dict) -> bytes:
        """The beginning of the file: what stands where."""
        index: dict[str, dict] = {}
        end = 0
        shapes = {n: s for f in self.flats for n, s in zip(self.named(f), f.shapes, strict=True)}
        sized = [(key, code, shapes[key.split("/")[-1]]) for _, key, code, _ in self.plan(states)]
        sized += [(name, CODES[x.dtype], x.shape) for name, x in self.constants.items()]
        for key, code, shape in sized:
            start, end = end, end + shape.numel() * DTYPES[code].itemsize
            index[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        numbers = {
            name: {key: value for key, value in known.items() if not isinstance(value, str)}
            for name, known in states.items()
        }
        own = {"optimizer": type(self.inner).__name__, "groups": self.groups(), "numbers": numbers}
        text = json.dumps({"__metadata__": {OWN: json.dumps(own)}} | index).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def plan(self, states: dict) -> Iterator[tuple[FlatParameter, str, str, int]]:
        """Every tensor that is divided, in the order of the file: (flat, key, dtype, member)."""
        for flat in self.flats:
            names = self.named(flat)
            for i, name in enumerate(names):
                yield flat, name, CODES[flat.shard.dtype], i
            for state in sorted({key for name in names for key in states.get(name, {})}):
                for i, name in enumerate(names):
                    if isinstance(code := states.get(name, {}).get(state), str):
                        yield flat, f"{state}/{name}", code, i

    def wholes(self, states: dict) -> Iterator[Entry]:
        """(key, whole tensor) in the order of the file on rank 0; the others send their shards."""
        before, whole = None, None
        for flat, key, code, i in self.plan(states):
            state = key.rpartition("/")[0]
            if before != (flat, state):
                before, whole = (flat, state), None
                with self.comm.record("snapshot"):
                    whole = self.comm.gather(self.shard(flat, state, DTYPES[code]), 0)
            if whole is not None:
                yield key, flat.view(whole, i)
        yield from self.constants.items() if self.comm.rank == 0 else ()

    def shard(self, flat: FlatParameter, state: str, dtype: torch.dtype) -> Tensor:
        """This rank's share of the weights, or of a state of the optimizer."""
        if not state:
            return flat.shard
        shard = torch.zeros_like(flat.shard, dtype=dtype)
        for piece, (a, b) in zip(flat.pieces, flat.cuts, strict=True):
            value = self.inner.state.get(piece, {}).get(state)
            if value is not None:
                shard[a:b] = value
        return shard


class _Stored:
    """An open snapshot."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name
        self.keys = set(file.keys())
        own = (file.metadata() or {}).get(OWN)
        if own is None:
            raise SnapshotError(f"{name} is a safetensors file, but no snapshot of {OWN}")
        self.index = json.loads(own)

    def check(self, run: _Run) -> None:
        """That parameters, shapes, types and groups are those that `run` can take."""
        if self.index["optimizer"] != type(run.inner).__name__:
            raise SnapshotError(
                f"{self.name} was written by {self.index['optimizer']}, this optimizer is "
                f"{type(run.inner).__name__}: use the same"
            )
        weights = {key for key in self.keys if "/" not in key}
        missing = sorted(run.trained - weights)
        unknown = sorted(weights - set(run.names.values()) - set(run.constants))
        if missing or unknown:
            told = [f"it lacks {missing[0]}"] * bool(missing)
            told += [f"it has besides {unknown[0]}"] * bool(unknown)
            raise SnapshotError(
                f"{self.name} is of another model, {' and '.join(told)}: load it into the model "
                "that it was written for, named alike"
            )
        theirs, ours = ([g["names"] for g in gs] for gs in (self.index["groups"], run.groups()))
        if [set(names) for names in theirs] != [set(names) for names in ours]:
            raise SnapshotError(
                f"{self.name} has groups of {[len(names) for names in theirs]} parameters, this "
                f"optimizer of {[len(names) for names in ours]}, or others: group them alike"
            )
        for flat in run.flats:
            for name, shape in zip(run.named(flat), flat.shapes, strict=True):
                self.fits(name, list(shape), flat.shard.dtype)
        for name, weight in run.constants.items():
            self.fits(name, list(weight.shape), weight.dtype)

    def fits(self, name: str, shape: list[int], dtype: torch.dtype) -> None:
        """That the weights of this name can be had without a loss, where the file has them."""
        if name not in self.keys:
            return
        part = self.file.get_slice(name)
        there = DTYPES.get(part.get_dtype())
        if part.get_shape() != shape:
            raise SnapshotError(
                f"{self.name} is of another model: {name} has shape {part.get_shape()} there and "
                f"{shape} here"
            )
        if there is None or torch.promote_types(there, dtype) != dtype:
            raise SnapshotError(
                f"{self.name} would lose digits: {name} is {part.get_dtype()} there and "
                f"{CODES[dtype]} here; use weights, or a master copy, as wide"
            )

    def fill(self, run: _Run) -> None:
        """Weights, states and settings of `run` are those of the file."""
        state: dict[nn.Parameter, dict[str, Tensor]] = {}
        for flat in run.flats:
            for i, (piece, name) in enumerate(zip(flat.pieces, run.named(flat), strict=True)):
                if not len(piece) or name not in self.keys:
                    continue
                numbers = self.index["numbers"].get(name, {})
                state[piece] = {key: torch.tensor(value) for key, value in numbers.items()}
                first = max(flat.own.start - flat.starts[i], 0)
                for key in self.keys:
                    if key == name:
                        piece.copy_(self.stretch(key, first, len(piece)))
                    elif key.endswith(f"/{name}"):
                        state[piece][key.split("/")[0]] = self.stretch(key, first, len(piece))
        for name, weight in run.constants.items():
            if name in self.keys:
                weight.copy_(self.file.get_tensor(name))
        groups = run.inner.state_dict()["param_groups"]
        for mine, theirs in zip(groups, self.index["groups"], strict=True):
            theirs.pop("names")
            mine |= {k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items()}
        pieces = [piece for group in run.inner.param_groups for piece in group["params"]]
        known = {i: state[piece] for i, piece in enumerate(pieces) if state.get(piece)}
        run.inner.load_state_dict({"state": known, "param_groups": groups})

    def stretch(self, key: str, first: int, count: int) -> Tensor:
        """`count` elements of a tensor from `first` on, flat."""
        part = self.file.get_slice(key)
        shape = torch.Size(part.get_shape())
        if not shape:
            return self.file.get_tensor(key).view(1)
        row = shape[1:].numel()
        rows = part[first // row : -(-(first + count) // row)].flatten()
        return rows[first % row :][:count].clone()


def _plain(key: str, value: Any) -> bool:
    """Whether an entry of a group is a setting, such as its learning rate or betas."""
    if isinstance(value, (tuple, list)):
        return key != "param_names" and all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str))
