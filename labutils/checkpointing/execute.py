"""A plan carried out on a chain of modules, and a GPT as such a chain, or told to checkpoint."""

import contextlib
import functools
import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labutils import anatomy
from labutils.checkpointing.plans import Costs, Plan, Run, Stage, add_moment
from labutils.checkpointing.recompute import Ambient, checkpoint
from labutils.config import ModelConfig
from labutils.timeline import History, Moment

POLICIES = ("none", "selective", "full")


def run(chain: Sequence[nn.Module], plan: Plan, x: Tensor, gradient: Tensor | None = None) -> Run:
    """The run of `plan` on the modules of `chain`; bytes are counted alive after every step.

    Parameters get their gradients. Every evaluation of a stage sees the same random state, so
    dropout draws one mask.

    x: the input of the chain
    gradient: that of the output; left out where the output is a single number, such as a loss

    Invariant: gradients are equal to the bit to those of running the modules one after the other;
    evaluations, FLOPs and bytes held are those that `simulate(plan, costs(chain, x))` predicts.
    """
    if plan.n != len(chain):
        raise ValueError(f"the plan is for {plan.n} stages, the chain has {len(chain)}")
    now = _Execution(chain, x, gradient)
    moments: list[Moment] = []
    add_moment(moments, "start", *now.held)
    for step in plan.steps:
        if step.op == "drop":
            del now.values[step.at]
        elif step.op == "backward":
            now.backward(step.at)
        else:
            now.evaluate(step.at, record=step.op == "record")
        add_moment(moments, str(step), *now.held)
    evaluations = tuple(now.evaluations)
    return Run(evaluations, now.flops.total, History(moments), now.output, now.slopes[0])


class _Execution:
    """Where a run stands: the values held, what stages have recorded, the gradient so far."""

    def __init__(self, chain: Sequence[nn.Module], x: Tensor, gradient: Tensor | None) -> None:
        self.chain = chain
        self.input_needs_gradient = x.requires_grad
        self.books = _Books(chain, x, gradient)
        self.flops = _Flops()
        self.values: dict[int, Tensor] = {0: x}
        self.tapes: dict[int, tuple[Tensor, Tensor]] = {}
        self.slopes: dict[int, Tensor | None] = {}
        if gradient is not None:
            self.slopes[len(chain)] = gradient
        self.ambients: dict[int, Ambient] = {}
        self.evaluations = [0] * len(chain)
        self.output: Tensor | None = None

    @property
    def held(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Bytes of values, interiors and gradient that are alive; how many values and interiors."""
        for slope in self.slopes.values():
            if slope is not None:
                self.books.enter(slope, "gradient")
        values, interiors, gradient = map(self.books.alive, ("values", "interiors", "gradient"))
        return (sum(values), sum(interiors), sum(gradient)), (len(values), len(self.tapes))

    def evaluate(self, i: int, *, record: bool) -> None:
        """Makes xᵢ₊₁ from xᵢ, and records what the backward pass of stage i needs, or not."""
        again = self.ambients.get(i)
        if again is None:
            self.ambients[i] = Ambient([self.values[i]])
        self.evaluations[i] += 1
        module, x = self.chain[i], self.values[i]
        with self.flops:
            if record:
                wanted = i > 0 or self.input_needs_gradient
                self.tapes[i] = _record(module, x, again, self.books, wanted=wanted)
                self.values[i + 1] = self.tapes[i][1].detach()
            else:
                with torch.no_grad():
                    self.values[i + 1] = _evaluated(module, x, again)
        self.books.enter(self.values[i + 1], "values")
        if i + 1 == len(self.chain):
            self.output = self.values[i + 1].clone()

    def backward(self, i: int) -> None:
        """Takes the gradient from xᵢ₊₁ to xᵢ; the interior, xᵢ₊₁ and its gradient go."""
        entered, left = self.tapes.pop(i)
        if left.requires_grad:
            torch.autograd.backward(left, self.slopes.get(i + 1))
        self.slopes = {i: entered.grad}
        del self.values[i + 1]


def costs(chain: Sequence[nn.Module], x: Tensor) -> Costs:
    """What each module of `chain` costs on input `x`, measured.

    FLOPs of its matrix products, bytes of its output and of its interior.

    >>> costs([nn.Linear(4, 8)], torch.ones(2, 4)).stages
    (Stage(forward=128, output=64, interior=0, gradient=64),)
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
            interior = sum(books.alive("interiors"))
            gradient = size if given.is_floating_point() else 0
            measured.append(Stage(flops.total, size, interior, gradient))
            del tape
    # 0 where the input shares its storage with something that the chain owns.
    given = sum(_Books(chain, x).alive("values"))
    return Costs(measured, given, x.untyped_storage().nbytes() if x.requires_grad else 0)


def _evaluated(module: nn.Module, x: Tensor, ambient: Ambient | None) -> Tensor:
    with contextlib.nullcontext() if ambient is None else ambient.replayed():
        out = module(x)
    if out.untyped_storage()._cdata == x.untyped_storage()._cdata:
        name = type(module).__name__
        raise ValueError(f"{name} returns a view of its input: join it with its neighbor")
    return out


def _record(
    module: nn.Module, x: Tensor, ambient: Ambient | None, books: "_Books", *, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The module's input, cut off from what came before, and its output with the graph between.

    wanted: whether the input gets a gradient
    """
    entered = x.detach().requires_grad_(wanted and x.is_floating_point())

    def keep(tensor: Tensor) -> Tensor:
        books.enter(tensor, "interiors")
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        return entered, _evaluated(module, entered, ambient)


class _Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products (a multiply and an add are two), by PyTorch's table."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


class _Books:
    """Every storage that the run has seen and that is still alive, by name.

    Weights, buffers and the `gradient` that the caller gave are not in the books.
    """

    def __init__(self, chain: Sequence[nn.Module], x: Tensor, gradient: Tensor | None = None):
        owned = [] if gradient is None else [gradient]
        for module in chain:
            owned += [*module.parameters(), *module.buffers()]
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

    def alive(self, name: str) -> list[int]:
        """Bytes of each storage of that name."""
        entries = self.entries.items()
        self.entries = {address: entry for address, entry in entries if entry[0]() is not None}
        return [nbytes for _, nbytes, called in self.entries.values() if called == name]


class _Embedding(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)


class _Head(nn.Module):
    def __init__(self, model: nn.Module, targets: Tensor | None) -> None:
        super().__init__()
        self.norm = model.norm
        self.scores = model.head
        self.register_buffer("targets", targets)  # there before and after, like weights

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.norm(x))
        if self.targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), self.targets.flatten())


def stages(model: nn.Module, targets: Tensor | None = None) -> list[nn.Module]:
    """A GPT as a chain: the embedding, its blocks, and the head, which ends in the loss if it can.

    Invariant: run one after the other they compute model(tokens), or model.loss(tokens, targets).
    """
    return [_Embedding(model), *model.blocks, _Head(model, targets)]


def apply(model: nn.Module, policy: str) -> nn.Module:
    """The same model, told to checkpoint itself.

    policy: "none", "selective" (the attention core of every block) or "full" (every block)

    Invariant: loss and gradients stay equal to the bit, parameters keep their names; a second call
    replaces the first.
    Source: selective: Korthikanti et al. 2205.05198, section 5.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: use {', '.join(map(repr, POLICIES))}")
    for block in model.blocks:
        # On the instance, over the class: every parameter keeps its name.
        block.__dict__.pop("forward", None)
        attend = block.attention.attend
        if isinstance(attend, functools.partial) and attend.func is checkpoint:
            block.attention.attend = attend = attend.args[0]
        if policy == "selective":
            block.attention.attend = functools.partial(checkpoint, attend)
        elif policy == "full":
            block.forward = functools.partial(checkpoint, block.forward)
    return model


def overhead(model: ModelConfig, policy: str, *, early_stop: bool = True) -> float:
    """Extra FLOPs of a training step under a policy of `apply`, as a share of those without.

    With `early_stop`, as here and in PyTorch, the second evaluation ends at the last tensor that is
    needed, so a region's last matrix product, which makes only the output, is left out: softmax·v
    for "selective", the down projection for "full" where no dropout follows it.

    >>> gpt3 = ModelConfig.named("gpt3-175b")
    >>> f"{overhead(gpt3, 'full'):.1%}, to the end {overhead(gpt3, 'full', early_stop=False):.1%}"
    '22.4%, to the end 33.2%'
    >>> f"{overhead(gpt3, 'selective', early_stop=False):.1%}"
    '0.9%'

    Source: Korthikanti et al. 2205.05198, appendix A, for the FLOPs of each part; plain attention,
    counted in full.
    """
    flops = anatomy.token_flops(model)
    forward, scores = sum(flops.values()), flops["blocks.*.attention"]
    last_is_down = model.num_experts == 1 and not model.dropout
    down = flops["blocks.*.feed_forward.down"] if last_is_down else 0
    again = {
        "none": 0,
        "selective": scores - early_stop * scores // 2,
        "full": forward - flops["head"] - early_stop * down,
    }
    return again[policy] / (3 * forward)
