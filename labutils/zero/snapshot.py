"""The state of a run in one safetensors file: written by any number of ranks, read by any other.

A file has every parameter whole, in its own shape, under its name in the module, and every state of
the optimizer under "state/parameter"; numbers, such as Adam's step, and settings are its metadata.
"""

import glob
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.optimizer import Optimizer

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
OWN = "labutils.zero"  # the key of the metadata
States = dict[str, dict[str, str | float]]  # by parameter and key: the type of a tensor, a number


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
    run, path = _Run(module, optimizer), Path(os.path.realpath(path))
    states = run.states()
    if run.comm.rank > 0:
        for _ in run.wholes(states):
            pass
    else:
        _clear(path)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(aside, "xb") as file:
                file.write(run.header(states))
                for whole in run.wholes(states):
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
    run = _Run(module, optimizer)
    try:
        with safe_open(path, "pt") as file:
            if reason := run.misfit(file):
                raise SnapshotError(f"{Path(path).name} {reason}")
            run.fill(file)
    except SafetensorError as error:
        remedy = "use an older one, or copy it again"
        raise SnapshotError(
            f"{Path(path).name} is torn, or no snapshot: {error}; {remedy}"
        ) from error
    optimizer.zero_grad()
    if isinstance(optimizer, Optimizer):
        for flat in optimizer.flats:
            flat.gather()


def _clear(path: Path) -> None:
    """Remove what runs that were killed while they wrote have left beside `path`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if (pid := left.suffix[1:]).isdigit() and not _alive(int(pid)):
            left.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    """Whether another process of this machine has that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


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
        self.comm = self.flats[0].comm

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, and the names of the trained in each."""
        found = []
        for group in self.inner.param_groups:
            names = [self.names[p] for p in group["params"] if p.requires_grad]
            found.append({k: v for k, v in group.items() if _plain(k, v)} | {"names": names})
        return found

    # -- writing ---------------------------------------------------------------------------------

    def states(self) -> States:
        """What the optimizers of all ranks know of their pieces."""
        found: States = {}
        for piece, state in self.inner.state.items():
            for key, value in state.items():
                known = found.setdefault(self.names[piece], {})
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    known[key] = CODES[value.dtype]
                elif value is not None and torch.as_tensor(value).numel() == 1:
                    known[key] = float(value)
                elif value is not None:
                    raise TypeError(f"{key} of the optimizer is neither a number nor like a weight")
        text = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)
        device = self.flats[0].shard.device
        with self.comm.record("snapshot"):
            sizes = self.comm.all_gather(torch.tensor([len(text)], device=device)).tolist()
            texts = self.comm.all_gather(text.to(device), sizes=sizes).split(sizes)
        every = [json.loads(bytes(each.tolist())) for each in texts]
        return {name: known for each in every for name, known in each.items()}

    def plan(self, states: States) -> Iterator[tuple[FlatParameter, str, str, int]]:
        """What is divided, in the order of the file: flat parameter, state, its type, member."""
        for flat in self.flats:
            known = [states.get(self.names[piece], {}) for piece in flat.pieces]
            for i in range(len(known)):
                yield flat, "", CODES[flat.shard.dtype], i
            for state in sorted({key for each in known for key in each}):
                for i, each in enumerate(known):
                    if isinstance(each.get(state), str):
                        yield flat, state, each[state], i

    def wholes(self, states: States) -> Iterator[Tensor]:
        """On rank 0 every tensor whole, in the order of the file; the others send their shards."""
        before, whole = None, None
        for flat, state, code, i in self.plan(states):
            if before != (flat, state):
                before, whole = (flat, state), None  # before the next one comes
                shard = torch.zeros_like(flat.shard, dtype=DTYPES[code])
                for piece, (a, b) in zip(flat.pieces, flat.cuts, strict=True):
                    value = self.inner.state.get(piece, {}).get(state) if state else piece
                    if value is not None:
                        shard[a:b] = value
                with self.comm.record("snapshot"):
                    whole = self.comm.gather(shard, 0)
            if whole is not None:
                yield flat.view(whole, i)
        yield from self.constants.values() if self.comm.rank == 0 else ()

    def header(self, states: States) -> bytes:
        """The beginning of the file: what stands where."""
        sized = []
        for flat, state, code, i in self.plan(states):
            name = self.names[flat.pieces[i]]
            sized.append((f"{state}/{name}" if state else name, code, flat.shapes[i]))
        sized += [(name, CODES[x.dtype], x.shape) for name, x in self.constants.items()]
        own = {"optimizer": type(self.inner).__name__, "groups": self.groups(), "states": states}
        index: dict[str, dict] = {"__metadata__": {OWN: json.dumps(own)}}
        end = 0
        for key, code, shape in sized:
            start, end = end, end + shape.numel() * DTYPES[code].itemsize
            index[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(index).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    # -- reading ---------------------------------------------------------------------------------

    def misfit(self, file: Any) -> str:
        """Why an open file cannot be loaded, if it cannot."""
        if OWN not in (file.metadata() or {}):
            return f"is a safetensors file, but no snapshot of {OWN}"
        own, inner = _own(file), type(self.inner).__name__
        if own is None:
            return f"has a description in {OWN!r} that cannot be read: use an older one"
        if own["optimizer"] != inner:
            return f"was written by {own['optimizer']}, this optimizer is {inner}: use the same"
        here = {name: (x.shape, x.dtype) for name, x in self.constants.items()}
        for flat in self.flats:
            for piece, shape in zip(flat.pieces, flat.shapes, strict=True):
                here[self.names[piece]] = shape, piece.dtype
        weights = {key for key in file.keys() if "/" not in key}
        trained = {name for piece, name in self.names.items() if piece.requires_grad}
        for name in sorted(weights | trained):
            if name not in weights:
                return f"is of another model, it lacks {name}: load it into its own, named alike"
            if name not in here:
                return f"is of another model, it has {name} besides: load it into its own"
            part, (shape, dtype) = file.get_slice(name), here[name]
            if part.get_shape() != list(shape):
                there = f"has shape {part.get_shape()} there and {list(shape)} here"
                return f"is of another model: {name} {there}"
            if torch.promote_types(DTYPES[part.get_dtype()], dtype) != dtype:
                there = f"is {part.get_dtype()} there and {CODES[dtype]} here"
                return f"would lose digits: {name} {there}; use weights, or a master copy, as wide"
        theirs, ours = ([group["names"] for group in g] for g in (own["groups"], self.groups()))
        if list(map(set, theirs)) != list(map(set, ours)):
            sizes = f"{list(map(len, theirs))} parameters, this optimizer of {list(map(len, ours))}"
            return f"has groups of {sizes}, or others: group them alike"
        for mine, given in zip(self.groups(), own["groups"], strict=True):
            for key, value in given.items():
                if key not in mine or isinstance(value, str) != isinstance(mine[key], str):
                    return f"sets {key} of a group to {value!r}, which this optimizer cannot take"
        return self.misfit_of_states(file, own["states"], here)

    def misfit_of_states(self, file: Any, states: States, here: Mapping[str, tuple]) -> str:
        """Why the states of an open file cannot be loaded, if they cannot."""
        keys = set(file.keys())
        for name, state in states.items():
            for key in (key for key, value in state.items() if isinstance(value, str)):
                there = f"{key}/{name}"
                if there not in keys or name not in here:
                    return f"lacks {there}: use an older one"
                if file.get_slice(there).get_shape() != list(here[name][0]):
                    return f"has a {there} that is not like the weight: use an older one"
        return ""

    def fill(self, file: Any) -> None:
        """Weights, states and settings are those of the file."""
        own, keys = _own(file), set(file.keys())
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for flat in self.flats:
            for i, piece in enumerate(flat.pieces):
                name, first = self.names[piece], max(flat.own.start - flat.starts[i], 0)
                if not len(piece) or name not in keys:
                    continue
                piece.copy_(_stretch(file, name, first, len(piece)))
                found[piece] = {
                    key: _stretch(file, f"{key}/{name}", first, len(piece))
                    if isinstance(value, str)
                    else torch.tensor(value)
                    for key, value in own["states"].get(name, {}).items()
                }
        for name in self.constants.keys() & keys:
            self.constants[name].copy_(file.get_tensor(name))
        groups = self.inner.state_dict()["param_groups"]
        for mine, theirs in zip(groups, own["groups"], strict=True):
            theirs.pop("names")
            mine |= {k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items()}
        pieces = [piece for group in self.inner.param_groups for piece in group["params"]]
        known = {i: found[piece] for i, piece in enumerate(pieces) if found.get(piece)}
        self.inner.load_state_dict({"state": known, "param_groups": groups})


def _own(file: Any) -> dict[str, Any] | None:
    """What `header` wrote of optimizer, groups and states; None for anything else."""
    try:
        own = json.loads(file.metadata()[OWN])
        groups, states = own["groups"], own["states"]
        texts = [own["optimizer"], *states, *(name for group in groups for name in group["names"])]
        values = [value for state in states.values() for value in state.values()]
        settings = [item for group in groups for item in group.items() if item[0] != "names"]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    right = all(isinstance(text, str) for text in texts)
    right &= all(isinstance(value, (str, int, float)) for value in values)
    return own if right and all(_plain(key, value) for key, value in settings) else None


def _stretch(file: Any, key: str, first: int, count: int) -> Tensor:
    """`count` elements of a tensor in an open file from `first` on, flat."""
    part = file.get_slice(key)
    shape = torch.Size(part.get_shape())
    if not shape:
        return file.get_tensor(key).view(1)
    row = shape[1:].numel()  # whole rows are read
    rows = part[first // row : -(-(first + count) // row)].flatten()
    return rows[first % row :][:count].clone()


def _plain(key: str, value: Any) -> bool:
    """Whether an entry of a group is a setting, such as its learning rate or betas."""
    if isinstance(value, (tuple, list)):
        return key != "param_names" and all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str))
