"""A plan carried out on a real chain of modules, and a GPT taken apart into such a chain or told to checkpoint itself."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labutils import anatomy
from labutils.checkpointing.plans import Costs, Plan, Run, Stage, phase_of
from labutils.checkpointing.recompute import Ambient, checkpoint
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment

POLICIES = ("none", "selective", "full")


def run(chain: Sequence[nn.Module], plan: Plan, x: Tensor, gradient: Tensor | None = None) -> Run:
    """The run of `plan` on the modules of `chain`, input `x`: parameters get their gradients, and the bytes after every step are counted alive.

    `gradient` is that of the output, 1 where the output is a single number such as a loss. Every evaluation of a stage sees the same random
    state, so dropout draws one mask.

    Invariant: gradients are equal to the bit to those of running the modules one after the other; evaluations, FLOPs and bytes held are
    those that `simulate(plan, costs(chain, x))` predicts.
    """
    if plan.n != len(chain):
        raise ValueError(f"the plan is for {plan.n} stages, the chain has {len(chain)}")
    books, flops = _Books(chain, x, gradient), _Flops()
    values: dict[int, Tensor] = {0: x}
    tapes: dict[int, tuple[Tensor, Tensor]] = {}
    slopes: dict[int, Tensor | None] = {} if gradient is None else {plan.n: gradient}
    ambients: dict[int, Ambient] = {}
    evaluations = [0] * plan.n
    output = None
    moments = [Moment("forward", "start", books.ledger(0, slopes))]
    for step in plan.steps:
        op, i = step.op, step.at
        if op == "drop":
            del values[i]
        elif op == "backward":
            entered, left = tapes.pop(i)
            if left.requires_grad:
                if i + 1 not in slopes and left.numel() != 1:
                    raise ValueError(
                        f"the chain ends in {list(left.shape)}, not in one number: give run the gradient of that output"
                    )
                torch.autograd.backward(left, slopes.get(i + 1))
            slopes = {i: entered.grad}
            del values[i + 1], entered, left
        else:
            first = i not in ambients
            if first:
                ambients[i] = Ambient([values[i]])
            evaluations[i] += 1
            again = None if first else ambients[i]
            with flops:
                if op == "record":
                    tapes[i] = _record(
                        chain[i], values[i], again, books, wanted=i > 0 or x.requires_grad
                    )
                    values[i + 1] = tapes[i][1].detach()
                else:
                    with torch.no_grad():
                        values[i + 1] = _evaluated(chain[i], values[i], again)
            books.enter(values[i + 1], "values")
            if i + 1 == plan.n:
                output = values[plan.n].clone()
        moments.append(
            Moment(phase_of(moments, str(step)), str(step), books.ledger(len(tapes), slopes))
        )
    return Run(tuple(evaluations), flops.total, History(moments), output, slopes[0])


def costs(chain: Sequence[nn.Module], x: Tensor) -> Costs:
    """What each module of `chain` costs on input `x`, measured: FLOPs of its matrix products, bytes of its output and of its interior.

    >>> costs([nn.Linear(4, 8), nn.GELU()], torch.ones(2, 4)).stages
    (Stage(forward=128, output=64, interior=0, gradient=64), Stage(forward=0, output=64, interior=0, gradient=64))
    """
    measured = []
    given = x
    with Ambient([x]).replayed():  # looking at the chain draws nothing from the generators
        for i, module in enumerate(chain):
            books = _Books(chain, given)
            with _Flops() as flops:
                tape = _record(module, given, None, books, wanted=i > 0 or x.requires_grad)
            given = tape[1].detach()
            books.enter(given, "values")
            size = given.untyped_storage().nbytes()
            measured.append(
                Stage(
                    flops.total,
                    size,
                    books.alive("interiors"),
                    size if given.is_floating_point() else 0,
                )
            )
            del tape
    given = _Books(chain, x).alive(
        "values"
    )  # 0 where the input shares its storage with something that the chain owns
    return Costs(measured, given, x.untyped_storage().nbytes() if x.requires_grad else 0)


def _evaluated(module: nn.Module, x: Tensor, ambient: Ambient | None) -> Tensor:
    if ambient is None:
        out = module(x)
    else:
        with ambient.replayed():
            out = module(x)
    if not isinstance(out, Tensor):
        raise TypeError(
            f"{_called(module)} returns a {type(out).__name__}: a chain passes one tensor on, so join it with its neighbors"
        )
    if out.untyped_storage()._cdata == x.untyped_storage()._cdata:
        raise ValueError(
            f"{_called(module)} returns a view of its input, so neither can go while the other stays: join it with its neighbor"
        )
    return out


def _record(
    module: nn.Module, x: Tensor, ambient: Ambient | None, books: "_Books", *, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The module's input, cut off from what came before and with its gradient `wanted` or not, and its output with the graph between them."""
    entered = x.detach().requires_grad_(wanted and x.is_floating_point())

    def keep(tensor: Tensor) -> Tensor:
        books.enter(tensor, "interiors")
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        return entered, _evaluated(module, entered, ambient)


def _called(module: object) -> str:
    return getattr(module, "__qualname__", type(module).__name__)


class _Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products (a multiply and an add are two), by PyTorch's own table of formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


class _Books:
    """Every storage that the run has seen and that is still alive; weights, buffers and the `gradient` that the caller gave are not in the books."""

    def __init__(
        self, chain: Sequence[nn.Module], x: Tensor, gradient: Tensor | None = None
    ) -> None:
        for module in chain:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"a chain is made of modules, got {_called(module)}: put the function into an nn.Module that holds its weights"
                )
        owned = [tensor for module in chain for tensor in (*module.parameters(), *module.buffers())]
        owned += [] if gradient is None else [gradient]
        self.owned = {tensor.untyped_storage()._cdata for tensor in owned}
        self.entries: dict[int, tuple[weakref.ref, int, str]] = {}
        self.enter(x, "values")

    def enter(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self.entries.get(address)
        if address in self.owned or (known and known[0]() is not None and name == "interiors"):
            return
        self.entries[address] = weakref.ref(storage), storage.nbytes(), name

    def alive(self, name: str) -> int:
        self.entries = {
            address: entry for address, entry in self.entries.items() if entry[0]() is not None
        }
        return sum(nbytes for _, nbytes, called in self.entries.values() if called == name)

    def ledger(self, recorded: int, slopes: dict[int, Tensor | None]) -> Ledger:
        for slope in slopes.values():
            if slope is not None:
                self.enter(slope, "gradient")
        count = sum(
            called == "values" and watch() is not None for watch, _, called in self.entries.values()
        )
        return Ledger(
            [
                Line("values", self.alive("values"), component="activations", count=count),
                Line("interiors", self.alive("interiors"), component="activations", count=recorded),
                Line("gradient", self.alive("gradient"), component="gradients"),
            ]
        )


class _Embedding(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)


class _Head(nn.Module):
    def __init__(self, model: nn.Module, targets: Tensor | None) -> None:
        super().__init__()
        self.norm, self.scores = model.norm, model.head
        self.register_buffer(
            "targets", targets
        )  # a buffer, because they are there before and after, like weights

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.norm(x))
        return (
            scores
            if self.targets is None
            else F.cross_entropy(scores.flatten(0, 1), self.targets.flatten())
        )


def stages(model: nn.Module, targets: Tensor | None = None) -> list[nn.Module]:
    """A GPT as a chain: the embedding, its blocks, and the head, which ends in the loss where there are `targets`.

    Invariant: run one after the other they compute model(tokens), or model.loss(tokens, targets).
    """
    return [_Embedding(model), *_blocks(model), _Head(model, targets)]


def apply(model: nn.Module, policy: str) -> nn.Module:
    """The same model, told to checkpoint itself: "none", "selective" (the attention core of every block) or "full" (every block).

    Invariant: loss and gradients stay equal to the bit, parameters keep their names; a second call replaces the first.
    Source: selective: Korthikanti et al. 2205.05198, section 5.
    """
    if policy not in POLICIES:
        raise ValueError(
            f"unknown policy {policy!r}: use {', '.join(map(repr, POLICIES))}; for segments or a budget, run a plan on stages(model)"
        )
    for block in _blocks(model):
        # On the instance, over the class: the module tree, and with it every parameter's name, stays as it is.
        block.__dict__.pop("forward", None)
        attend = block.attention.attend
        if isinstance(attend, functools.partial) and attend.func is checkpoint:
            block.attention.attend = attend = attend.args[0]
        if policy == "selective":
            block.attention.attend = functools.partial(checkpoint, attend)
        elif policy == "full":
            block.forward = functools.partial(checkpoint, block.forward)
    return model


def _blocks(model: nn.Module) -> nn.ModuleList:
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        raise TypeError(
            f"needs a GPT, whose layers are its blocks, got {type(model).__name__}: call checkpoint(layer, x) in your own forward instead"
        )
    return model.blocks


def overhead(model: ModelConfig, policy: str, *, early_stop: bool = True) -> float:
    """Extra FLOPs of a training step under a policy of `apply`, as a share of those without checkpointing (forward, and backward at twice that).

    With `early_stop`, as here and in PyTorch, the second evaluation ends at the last tensor that is needed, so a region's last matrix product, which
    makes only the output, is left out: softmax·v for "selective", the down projection for "full" where no dropout follows it.

    >>> gpt3 = ModelConfig.named("gpt3-175b")
    >>> f"{overhead(gpt3, 'full', early_stop=False):.1%} {overhead(gpt3, 'full'):.1%} {overhead(gpt3, 'selective', early_stop=False):.1%}"
    '33.2% 22.4% 0.9%'

    Source: Korthikanti et al. 2205.05198, appendix A, for the FLOPs of each part; plain attention, counted in full.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: use {', '.join(map(repr, POLICIES))}")
    flops = anatomy.flops(model)
    forward, scores = sum(flops.values()), flops["blocks.*.attention"]
    last_is_down = model.num_experts == 1 and not model.dropout
    down = flops["blocks.*.feed_forward.down"] if last_is_down else 0
    again = {
        "none": 0,
        "selective": scores - early_stop * scores // 2,
        "full": forward - flops["head"] - early_stop * down,
    }
    return again[policy] / (3 * forward)
