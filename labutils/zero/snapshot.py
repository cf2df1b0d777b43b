"""The state of a run in one safetensors file: written by any number of ranks, read by any other.

A file has every parameter whole, in its own shape, under its name in the module, and every state of
the optimizer under "state/parameter"; numbers, such as Adam's step, settings and the ModelConfig
are its metadata. So is a check sum of every byte of the file, the header's too: at the same place
in every file, where zeros stand while it is computed.
"""

import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from labutils.config import ModelConfig
from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.optimizer import Optimizer
from labutils.zero.sharded import sharded_of

CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_OWN = "labutils.zero"  # the key of the metadata
# How every file goes on behind the length of its header: with the check sum, in eight digits.
_BEFORE_SUM, _BLANK = b'{"__metadata__": {"crc32": "', b"00000000"
FREE = {"name", "dropout", "seq_len"}  # of a ModelConfig: what a weight means hangs on none
_CHUNK = 1 << 20
REMEDY = "use an older one, or copy it again"
States = dict[str, dict[str, str | float]]  # by parameter and key: the type of a tensor, a number


class SnapshotError(ValueError):
    """A file that cannot be loaded: torn, damaged, no snapshot, or of another model or
    optimizer."""


@torch.no_grad()
def save(
    path: str | os.PathLike, module: nn.Module, optimizer: Optimizer | torch.optim.Optimizer
) -> None:
    """Write weights and optimizer state to a file; all ranks do, and it is there when they return.

    It is written aside and takes its name when it is complete. Any number of ranks at any level can
    `load` it. Cost: rank 0 holds one flat parameter at a time, whole, and sums the bytes up as it
    writes them.
    """
    run, path = _Run(module, optimizer), Path(os.path.realpath(path))
    states = run.states()
    if run.comm.rank > 0:
        for _ in run.wholes(states):
            pass
    else:
        # Under the number of this rank in the world: what a run that was killed has left goes.
        aside = path.with_name(f".{path.name}.{run.comm.ranks[0]}")
        try:
            with open(aside, "wb") as file:
                head = run.header(states)
                file.write(head)
                total = zlib.crc32(head)
                for whole in run.wholes(states):
                    data = whole.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                    file.write(data)
                    total = zlib.crc32(data, total)
                file.seek(head.index(_BLANK))
                file.write(b"%08x" % total)
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
    know stay as they are. The ModelConfig must be the same in all that gives weights their meaning:
    another dropout or, with RoPE, another seq_len is none of it.

    Raises SnapshotError for a file that does not fit, before anything changes.

    Cost: every rank reads the file once for its check sum, a mebibyte at a time, and then of the
    tensors, which are mapped, its own pieces.
    """
    run, name = _Run(module, optimizer), Path(path).name
    try:
        with safe_open(path, "pt") as file:
            told = (file.metadata() or {}).get(_OWN)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # mapped, not yet read
    except SafetensorError as error:
        raise SnapshotError(f"{name} is torn, or no snapshot: {error}; {REMEDY}") from error
    if told is None:
        remedy = "give one that zero.save wrote"
        raise SnapshotError(f"{name} is a safetensors file, but no snapshot of {_OWN}: {remedy}")
    if reason := _damage(path):
        raise SnapshotError(f"{name} {reason}")
    try:
        own = json.loads(told)
        reason = run.misfit(tensors, own)
        found = {} if reason else run.stretches(tensors, own["states"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        reason = f"has a description in {_OWN!r} that cannot be read: use an older one"
    if reason:
        raise SnapshotError(f"{name} {reason}")
    run.fill(tensors, own["groups"], found)
    optimizer.zero_grad()
    if isinstance(optimizer, Optimizer):
        for flat in optimizer.flats:
            flat.gather()


def _damage(path: str | os.PathLike) -> str:
    """Why the bytes of a file are not those that were written, if they are not."""
    with open(path, "rb") as file:
        head = file.read(8 + len(_BEFORE_SUM))
        told = file.read(len(_BLANK))
        if not head.endswith(_BEFORE_SUM):
            which = "files that an earlier version wrote, or another tool, have none"
            remedy = "load it with what wrote it, or its weights with safetensors.torch.load_file"
            return f"has no check sum where snapshots have it: {which}; {remedy}. If not, {REMEDY}"
        total = zlib.crc32(head + _BLANK)
        while chunk := file.read(_CHUNK):
            total = zlib.crc32(chunk, total)
    if told == b"%08x" % total:
        return ""
    sums = f"the sum of its bytes is {total:08x}, {told.decode('ascii', 'replace')} when written"
    return f"is damaged: {sums}; {REMEDY}"


class _Run:
    """What a snapshot is of: flat parameters, the names of their pieces, an optimizer of these."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | torch.optim.Optimizer) -> None:
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self.constants: dict[str, Tensor] = {}  # frozen weights that every rank has whole
        if isinstance(optimizer, Optimizer):
            self.constants = {n: p for p, n in self.names.items() if p not in optimizer.pieces}
            self.names = {piece: self.names[p] for p, piece in optimizer.pieces.items()}
            self.flats, self.inner = optimizer.flats, optimizer.inner
        else:
            self.flats, self.inner = sharded_of(module).flats, optimizer
        self.comm = self.flats[0].comm
        config = getattr(module, "config", None)
        known = dataclasses.asdict(config) if isinstance(config, ModelConfig) else {}
        self.config = {field: value for field, value in known.items() if field not in FREE}

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
                    known[key] = CODES[piece.dtype]
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

    def plan(self, states: States) -> Iterator[tuple[FlatParameter, str, dict[str, int]]]:
        """What is gathered, in the order of the file: of a flat parameter the weights, or a state,
        and under which keys it has those of which members."""
        for flat in self.flats:
            names = [self.names[piece] for piece in flat.pieces]
            yield flat, "", {name: i for i, name in enumerate(names)}
            known = [states.get(name, {}) for name in names]
            for state in sorted({key for each in known for key in each}):
                having = [i for i, each in enumerate(known) if isinstance(each.get(state), str)]
                if having:
                    yield flat, state, {f"{state}/{names[i]}": i for i in having}

    def wholes(self, states: States) -> Iterator[Tensor]:
        """On rank 0 every tensor whole, in the order of the file; the others send their shards."""
        for flat, state, members in self.plan(states):
            yield from self.gathered(flat, state, members.values())
        yield from self.constants.values() if self.comm.rank == 0 else ()

    def gathered(self, flat: FlatParameter, state: str, members: Iterable[int]) -> Iterator[Tensor]:
        """On rank 0 the weights, or a state, of those members of a flat parameter."""
        shard = torch.zeros_like(flat.shard)
        for piece, (a, b) in zip(flat.pieces, flat.cuts, strict=True):
            value = self.inner.state.get(piece, {}).get(state) if state else piece
            if value is not None:
                shard[a:b] = value
        with self.comm.record("snapshot"):
            whole = self.comm.gather(shard, 0)
        yield from (flat.view(whole, i) for i in members if whole is not None)

    def header(self, states: States) -> bytes:
        """The beginning of the file: what stands where, and zeros for the check sum."""
        sized = []
        for flat, _, members in self.plan(states):
            sized += [(key, flat.shard.dtype, flat.shapes[i]) for key, i in members.items()]
        sized += [(name, x.dtype, x.shape) for name, x in self.constants.items()]
        own = {
            "optimizer": type(self.inner).__name__, "groups": self.groups(), "states": states,
            "config": self.config,
        }  # fmt: skip
        about = {"crc32": _BLANK.decode(), _OWN: json.dumps(own)}
        index: dict[str, dict] = {"__metadata__": about}
        end = 0
        for key, dtype, shape in sized:
            start, end = end, end + shape.numel() * dtype.itemsize
            index[key] = {"dtype": CODES[dtype], "shape": [*shape], "data_offsets": [start, end]}
        text = json.dumps(index).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    # -- reading ---------------------------------------------------------------------------------

    def misfit(self, tensors: Mapping[str, Tensor], own: Mapping[str, Any]) -> str:
        """Why what a file has cannot be loaded, if it cannot."""
        if own["optimizer"] != (inner := type(self.inner).__name__):
            return f"was written by {own['optimizer']}, this optimizer is {inner}: use the same"
        here = {name: (x.shape, x.dtype) for name, x in self.constants.items()}
        for flat in self.flats:
            for piece, shape in zip(flat.pieces, flat.shapes, strict=True):
                here[self.names[piece]] = shape, piece.dtype
        weights = {key for key in tensors if "/" not in key}
        trained = {name for piece, name in self.names.items() if piece.requires_grad}
        for name in sorted(weights | trained):
            if name not in weights:
                return f"is of another model, it lacks {name}: load it into its own, named alike"
            if name not in here:
                return f"is of another model, it has {name} besides: load it into its own"
            there, (shape, dtype) = tensors[name], here[name]
            if there.shape != shape:
                shapes = f"has shape {list(there.shape)} there and {list(shape)} here"
                return f"is of another model: {name} {shapes}"
            if there.dtype not in CODES or torch.promote_types(there.dtype, dtype) != dtype:
                dtypes = f"is {there.dtype} there and {dtype} here"
                return f"would lose digits: {name} {dtypes}; use weights, or a master copy, as wide"
        found, missing = [own["config"], self.config], "nothing"
        values = [(key, *(c.get(key, missing) for c in found)) for key in found[0] | found[1]]
        other = [f"{key} is {a!r} there and {b!r} here" for key, a, b in values if a != b]
        if other:
            remedy = "build the module from the same ModelConfig"
            return f"is of another model: {', '.join(other)}; {remedy}"
        theirs, ours = ([group["names"] for group in g] for g in (own["groups"], self.groups()))
        if list(map(set, theirs)) != list(map(set, ours)):
            sizes = f"{list(map(len, theirs))} parameters, this optimizer of {list(map(len, ours))}"
            return f"has groups of {sizes}, or others: group them alike"
        for mine, given in zip(self.groups(), own["groups"], strict=True):
            for key, value in given.items():
                taken = key in mine and isinstance(value, str) == isinstance(mine[key], str)
                if key != "names" and not (taken and _plain(key, value)):
                    return f"sets {key} of a group to {value!r}, which this optimizer cannot take"
        for name, state in own["states"].items():
            for key in (f"{key}/{name}" for key, value in state.items() if isinstance(value, str)):
                if key not in tensors or name not in here:
                    return f"lacks {key}: use an older one"
                if tensors[key].shape != here[name][0]:
                    return f"has a {key} that is not like the weight: use an older one"
        return ""

    def stretches(
        self, tensors: Mapping[str, Tensor], states: States
    ) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What a file has of this rank's pieces: of the weights, under "", and of each state."""
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for flat in self.flats:
            for piece, start in zip(flat.pieces, flat.starts, strict=False):
                name, first = self.names[piece], max(flat.own.start - start, 0)
                if not len(piece) or name not in tensors:
                    continue
                mine = slice(first, first + len(piece))
                found[piece] = {"": tensors[name].view(-1)[mine]}
                for key, value in states.get(name, {}).items():
                    if isinstance(value, str):
                        found[piece][key] = tensors[f"{key}/{name}"].view(-1)[mine].clone()
                    else:
                        found[piece][key] = torch.tensor(float(value))
        return found

    def fill(
        self,
        tensors: Mapping[str, Tensor],
        theirs: list[dict[str, Any]],
        found: Mapping[nn.Parameter, dict[str, Tensor]],
    ) -> None:
        """Weights, states and settings are those of the file."""
        for name in self.constants.keys() & tensors.keys():
            self.constants[name].copy_(tensors[name])
        for piece, state in found.items():
            piece.copy_(state.pop(""))
        groups = self.inner.state_dict()["param_groups"]
        for mine, given in zip(groups, theirs, strict=True):
            given.pop("names")
            mine |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        pieces = [piece for group in self.inner.param_groups for piece in group["params"]]
        known = {i: found[piece] for i, piece in enumerate(pieces) if found.get(piece)}
        self.inner.load_state_dict({"state": known, "param_groups": groups})


def _plain(key: str, value: Any) -> bool:
    """Whether an entry of a group is a setting, such as its learning rate or betas."""
    if isinstance(value, (tuple, list)):
        return key != "param_names" and all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str))
