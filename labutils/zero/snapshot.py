"""The state of a run in one safetensors file: written by the ranks of any mesh, read by any other.

A file has every parameter whole, in its own shape, under its name in the model, and every state of
the optimizer under "state/parameter"; numbers, such as Adam's step, settings and the ModelConfig
are its metadata. So is a check sum of every byte of the file, the header's too: at the same place
in every file, where zeros stand while it is computed.
"""

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from labutils.config import ModelConfig
from labutils.world import Comm
from labutils.zero.optimizer import Optimizer
from labutils.zero.sharded import sharded_of

CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
OF_CODE = {code: dtype for dtype, code in CODES.items()}
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
    path: str | os.PathLike,
    module: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    comm: Comm | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and optimizer state to the file `path`; all ranks do, and it is there when they
    return.

    module       of this rank; or several, as the stages that it has of a pipeline
    optimizer    a zero.Optimizer, precision.MasterWeights or torch's own; or several
    comm         all ranks, rank.comm(); unless given, those that share the module's weights out
    about        what else to keep, as JSON has it: how far the run is

    It is written aside and takes its name when it is complete. The ranks of any mesh can `load` it.
    Cost: every number is sent to rank 0 once, which holds one tensor at a time, whole, and sums the
    bytes up as it writes them.
    Raises ValueError where the ranks are not all of the mesh, or weights have fewer than 16 bits.
    """
    run, path = _Run(module, optimizer, comm), Path(os.path.realpath(path))
    if run.comm.rank > 0:
        for _ in run.wholes():
            pass
    else:
        # Under the number of this rank in the world: what a run that was killed has left goes.
        aside = path.with_name(f".{path.name}.{run.comm.ranks[0]}")
        try:
            with open(aside, "wb") as file:
                head = run.header(about or {})
                file.write(head)
                total = zlib.crc32(head)
                for whole in run.wholes():
                    data = whole.view(-1).view(torch.uint8).numpy().data
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
    path: str | os.PathLike,
    module: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    comm: Comm | None = None,
) -> dict[str, Any]:
    """Go on from the file `path` that `save` wrote, which every rank must be able to read; what it
    was given as `about`. module, optimizer and comm are as those of `save`.

    Trained parameters must be the same by name, shape and group; frozen ones that the file does not
    know stay as they are. The ModelConfig must be the same in all that gives weights their meaning:
    another dropout or, with RoPE, another seq_len is none of it.

    Raises SnapshotError for a file that does not fit, before anything changes.

    Cost: every rank reads the file once for its check sum, a mebibyte at a time, and then of the
    tensors, which are mapped, its own pieces.
    """
    run, name = _Run(module, optimizer, comm), Path(path).name
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
        about = {} if reason else dict(own.get("about", {}))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        reason = f"has a description in {_OWN!r} that cannot be read: use an older one"
    if reason:
        raise SnapshotError(f"{name} {reason}")
    run.fill(own["groups"], found)
    return about


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


class _Piece(NamedTuple):
    """What this rank has of a parameter: of its share of it the numbers from `start` on.

    weight: these, as they are stepped, if they are
    shape: of the whole parameter
    cut: along which dim it is cut, and which share the rank has, of how many
    """

    weight: Tensor
    start: int
    shape: tuple[int, ...]
    cut: tuple[int, int, int]

    @classmethod
    def of(cls, weight: Tensor, start: int, share: Sequence[int]) -> "_Piece":
        """The piece of a weight that may be marked as a share (`world.marked`)."""
        dim, part, parts = vars(weight).get("cut", (0, 0, 1))
        shape = tuple(n * parts if i == dim else n for i, n in enumerate(share))
        return cls(weight, start, shape, (dim, part, parts))

    def share(self, whole: Tensor) -> Tensor:
        """The rank's share of a tensor like the whole parameter."""
        dim, part, parts = self.cut
        return whole.tensor_split(parts, dim)[part] if parts > 1 else whole

    def stretch(self, whole: Tensor) -> Tensor:
        """These numbers of a tensor like the whole parameter, in the shape of `weight`."""
        flat = self.share(whole).reshape(-1)
        return flat[self.start : self.start + self.weight.numel()].view(self.weight.shape)


class _Run:
    """What a snapshot is of: pieces of parameters by name, optimizers of these; and what all ranks
    together have, which each tells the others.

    ranks: what each rank has told
    states: what the optimizers know of each parameter
    whole: of each parameter the dtype and the shape
    groups: the settings of each group, and the names of the trained in it
    """

    def __init__(self, module: Any, optimizer: Any, comm: Comm | None) -> None:
        several = isinstance(module, (list, tuple))
        modules: list[nn.Module] = list(module) if several else [module]
        if not modules:
            raise ValueError("a snapshot has a module, or several, got none: give the stages")
        self.optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        inside = [getattr(each, "inner", each) for each in self.optimizers]
        self.inner: list[Any] = [getattr(each, "optimizer", each) for each in inside]
        self.flats = [f for o in self.optimizers if isinstance(o, Optimizer) for f in o.flats]
        for each in modules:
            if "_sharded" in vars(each) or not (comm or self.flats):
                self.flats += sharded_of(each).flats
        self.comm = comm or self.flats[0].comm
        self.comm.check_all("what a snapshot has")
        self.pieces = self._pieces(modules)
        config = getattr(modules[0], "config", None)
        known = dataclasses.asdict(config) if isinstance(config, ModelConfig) else {}
        self.config = {field: value for field, value in known.items() if field not in FREE}
        self.state: dict[Tensor, dict[str, Any]] = {}
        for each in self.inner:
            self.state |= each.state
        self._meet()

    def _pieces(self, modules: Sequence[nn.Module]) -> dict[str, _Piece]:
        """This rank's pieces, by the name of the parameter in the whole model."""
        known: dict[Tensor, _Piece] = {}
        for flat in self.flats:  # at level 3 a module has the pieces themselves
            for i, piece in enumerate(flat.pieces):
                start = max(flat.own.start - flat.starts[i], 0)
                for p in (flat.wholes[i], piece):
                    known[p] = _Piece.of(piece, start, flat.shapes[i])
        for each in self.optimizers:
            masters = getattr(each, "masters", {})  # of precision.MasterWeights
            known |= {p: _Piece.of(master, 0, p.shape) for p, master in masters.items()}
        found: dict[str, _Piece] = {}
        for module in modules:
            tied = getattr(getattr(module, "config", None), "tied", False)
            for name, p in module.named_parameters():
                # The last stage of a pipeline has the other end alone.
                name = "tokens.weight" if tied and name == "head.weight" else name
                found[name] = known.get(p) or _Piece.of(p, 0, p.shape)
        return found

    # -- what all ranks have -----------------------------------------------------------------------

    def _meet(self) -> None:
        """Tell the other ranks what is here, and hear what they have."""
        text = torch.tensor(list(json.dumps(self._told()).encode()), dtype=torch.uint8)
        device = self.comm.device
        with self.comm.record("snapshot"):
            sizes = self.comm.all_gather(torch.tensor([len(text)], device=device)).tolist()
            texts = self.comm.all_gather(text.to(device), sizes=sizes).split(sizes)
        self.ranks: list[dict[str, Any]] = [json.loads(bytes(each.tolist())) for each in texts]
        self.states: States = {}
        self.whole: dict[str, tuple[torch.dtype, list[int]]] = {}
        self.groups: list[dict[str, Any]] = []
        for rank in self.ranks:
            self.states |= {n: s | self.states.get(n, {}) for n, s in rank["states"].items()}
            self.groups += [{**each, "names": []} for each in rank["groups"][len(self.groups) :]]
            for name, (code, shape, _, _, _, group) in rank["pieces"].items():
                if name not in self.whole and group is not None:
                    self.groups[group]["names"].append(name)
                self.whole.setdefault(name, (OF_CODE[code], shape))

    def _told(self) -> dict[str, Any]:
        """What this rank has, as JSON."""
        groups = [group for each in self.inner for group in each.param_groups]
        place = {p: i for each in self.inner for i, g in enumerate(each.param_groups)
                 for p in g["params"] if p.requires_grad}  # fmt: skip
        pieces, states = {}, {}
        for name, (weight, start, shape, cut) in self.pieces.items():
            if weight.dtype not in CODES:
                remedy = "keep lora.state of the adapters, and the base as it came"
                raise ValueError(f"a snapshot has no numbers like {name}, {weight.dtype}: {remedy}")
            sizes = shape, cut, start, weight.numel()
            pieces[name] = CODES[weight.dtype], *sizes, place.get(weight)
            if known := self._known(weight):
                states[name] = known
        most = max((len(each.param_groups) for each in self.inner), default=0)
        return {
            "optimizer": next((type(each).__name__ for each in self.inner), None),
            "groups": [{k: v for k, v in g.items() if _plain(k, v)} for g in groups[:most]],
            "pieces": pieces, "states": states,
        }  # fmt: skip

    def _known(self, weight: Tensor) -> dict[str, str | float]:
        """What an optimizer knows of a piece: of what is like it the dtype, or else a number."""
        known: dict[str, str | float] = {}
        for key, value in self.state.get(weight, {}).items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                known[key] = CODES[weight.dtype]
            elif value is not None and torch.as_tensor(value).numel() == 1:
                known[key] = float(value)
            elif value is not None:
                raise TypeError(f"{key} of the optimizer is neither a number nor like a weight")
        return known

    # -- writing ---------------------------------------------------------------------------------

    def keys(self) -> Iterator[tuple[str, str]]:
        """Of each tensor, in the order of the file, the parameter and the state, "" for itself."""
        for name in self.whole:
            known = self.states.get(name, {})
            yield name, ""
            yield from ((name, key) for key, code in sorted(known.items()) if code in OF_CODE)

    def owners(self, name: str) -> dict[tuple[int, int], tuple[int, int]]:
        """Who sends which stretch of a parameter, of those who have it: by share and beginning, the
        rank and how many numbers. The ranks of a pipeline cut their copies alike."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, told in enumerate(self.ranks):
            _, _, cut, start, n, _ = told["pieces"].get(name, (0, 0, 0, 0, 0, 0))
            if n:
                found.setdefault((cut[1], start), (rank, n))
        return found

    def wholes(self) -> Iterator[Tensor]:
        """On rank 0 every tensor whole, in the order of the file; the others send their pieces."""
        comm = self.comm
        for name, key in self.keys():
            dtype, shape = self.whole[name]
            dim, _, parts = next(r["pieces"][name][2] for r in self.ranks if name in r["pieces"])
            whole = torch.empty(shape if comm.rank == 0 else 0, dtype=dtype)
            shares = whole.tensor_split(parts, dim) if parts > 1 and comm.rank == 0 else [whole]
            made = [torch.empty(x.numel(), dtype=dtype, device=comm.device) for x in shares]
            for (part, start), (rank, n) in self.owners(name).items():
                if rank == comm.rank:
                    value = self.value(name, key)
                    if rank == 0:
                        made[part][start : start + n] = value
                    else:
                        with comm.record("snapshot"):
                            comm.send(value, 0)
                elif comm.rank == 0:
                    with comm.record("snapshot"):
                        comm.recv(made[part][start : start + n], rank)
            if comm.rank == 0:
                for share, numbers in zip(shares, made, strict=True):
                    share.copy_(numbers.view(share.shape))
                yield whole

    def value(self, name: str, key: str) -> Tensor:
        """The numbers of this rank's piece, or of a state of it."""
        weight = self.pieces[name].weight.detach()
        found = self.state.get(self.pieces[name].weight, {}).get(key) if key else weight
        return (torch.zeros_like(weight) if found is None else found).reshape(-1)

    def header(self, about: Mapping[str, Any]) -> bytes:
        """The beginning of the file: what stands where, and zeros for the check sum."""
        own = {
            "optimizer": self.kind, "groups": self.groups, "states": self.states,
            "config": self.config, "about": dict(about),
        }  # fmt: skip
        index: dict[str, dict] = {"__metadata__": {"crc32": _BLANK.decode(), _OWN: json.dumps(own)}}
        end = 0
        for name, key in self.keys():
            dtype, shape = self.whole[name]
            start, end = end, end + math.prod(shape) * dtype.itemsize
            place = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
            index[f"{key}/{name}" if key else name] = place
        text = json.dumps(index).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def kind(self) -> str | None:
        """The optimizer's, of the first rank that has one."""
        return next((each for rank in self.ranks if (each := rank["optimizer"])), None)

    # -- reading ---------------------------------------------------------------------------------

    def misfit(self, tensors: Mapping[str, Tensor], own: Mapping[str, Any]) -> str:
        """Why what a file has cannot be loaded, if it cannot."""
        if own["optimizer"] != self.kind:
            return f"was written by {own['optimizer']}, this optimizer is {self.kind}: use the same"
        weights = {key for key in tensors if "/" not in key}
        trained = {name for group in self.groups for name in group["names"]}
        for name in sorted(weights | trained):
            if name not in weights:
                return f"is of another model, it lacks {name}: load it into its own, named alike"
            if name not in self.whole:
                return f"is of another model, it has {name} besides: load it into its own"
            there, (dtype, shape) = tensors[name], self.whole[name]
            if [*there.shape] != shape:
                shapes = f"has shape {list(there.shape)} there and {shape} here"
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
        theirs, ours = ([group["names"] for group in g] for g in (own["groups"], self.groups))
        if list(map(set, theirs)) != list(map(set, ours)):
            sizes = f"{list(map(len, theirs))} parameters, this optimizer of {list(map(len, ours))}"
            return f"has groups of {sizes}, or others: group them alike"
        for mine, given in zip(self.groups, own["groups"], strict=True):
            for key, value in given.items():
                taken = key in mine and isinstance(value, str) == isinstance(mine[key], str)
                if key != "names" and not (taken and _plain(key, value)):
                    return f"sets {key} of a group to {value!r}, which this optimizer cannot take"
        for name, state in own["states"].items():
            for key in (f"{key}/{name}" for key, value in state.items() if isinstance(value, str)):
                if key not in tensors or name not in self.whole:
                    return f"lacks {key}: use an older one"
                if [*tensors[key].shape] != self.whole[name][1]:
                    return f"has a {key} that is not like the weight: use an older one"
        return ""

    def stretches(
        self, tensors: Mapping[str, Tensor], states: States
    ) -> dict[Tensor, dict[str, Tensor]]:
        """What a file has of this rank's pieces: of the weights, under "", and of each state."""
        found: dict[Tensor, dict[str, Tensor]] = {}
        for name, piece in self.pieces.items():
            if not piece.weight.numel() or name not in tensors:
                continue
            mine = found[piece.weight] = {"": piece.stretch(tensors[name])}
            for key, value in states.get(name, {}).items():
                if isinstance(value, str):
                    mine[key] = piece.stretch(tensors[f"{key}/{name}"]).clone()
                else:
                    mine[key] = torch.tensor(float(value))
        return found

    def fill(self, theirs: list[dict[str, Any]], found: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Weights, states and settings are those of the file."""
        for weight, state in found.items():
            weight.copy_(state.pop(""))
        for optimizer, inner in zip(self.optimizers, self.inner, strict=True):
            groups = inner.state_dict()["param_groups"]
            for mine, given in zip(groups, theirs, strict=False):
                given = {k: v for k, v in given.items() if k != "names"}
                mine |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
            pieces = [piece for group in inner.param_groups for piece in group["params"]]
            known = {i: found[piece] for i, piece in enumerate(pieces) if found.get(piece)}
            inner.load_state_dict({"state": known, "param_groups": groups})
            optimizer.zero_grad()
            if hasattr(optimizer, "publish"):  # what computes, of what is stepped
                optimizer.publish()
            for flat in optimizer.flats if isinstance(optimizer, Optimizer) else ():
                flat.gather(async_op=False)


def _plain(key: str, value: Any) -> bool:
    """Whether an entry of a group is a setting, such as its learning rate or betas."""
    if isinstance(value, (tuple, list)):
        return key != "param_names" and all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str))
