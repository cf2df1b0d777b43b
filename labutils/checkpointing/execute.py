"""A plan carried out on a chain of modules, and a GPT as such a chain, or told to checkpoint."""

import functools
import weakref
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labutils import anatomy, units
from labutils.checkpointing.plans import Costs, Reversal, Run, Stage, Step, history, require_length
from labutils.checkpointing.recompute import Ambient, checkpoint
from labutils.config import ModelConfig
from labutils.model import GPT, Block, cross_entropy

Of = TypeVar("Of", bound=nn.Module)
POLICIES = ("none", "selective", "full")  # what of a layer is computed again


def run(
    chain: Sequence[nn.Module], plan: Reversal, x: Tensor, gradient: Tensor | None = None
) -> Run:
    """The run of `plan` on the modules of `chain`; bytes are counted alive after every step.

    Parameters get their gradients. Every evaluation of a stage sees the same random state, so
    dropout draws one mask.

    x: the input of the chain
    gradient: that of the output; left out where the output is a single number, such as a loss

    Invariant: gradients are equal to the bit to those of running the modules one after the other;
    evaluations, FLOPs and bytes held are those that `plan.on(costs(chain, x))` predicts.
    """
    require_length(plan, len(chain))
    now = _Execution(chain, x, gradient)
    amounts = [now.held]
    for step in plan.steps:
        now.take(step)
        amounts.append(now.held)
    evaluations, cost = tuple(now.evaluations), now.flops.total
    return Run(evaluations, cost, history(plan, amounts), now.output, now.gradient)


def costs(chain: Sequence[nn.Module], x: Tensor) -> Costs:
    """What each module of `chain` costs on input `x`, measured.

    FLOPs of its matrix products, bytes of its output and of its interior.

    >>> costs([nn.Linear(4, 8)], torch.ones(2, 4)).stages
    (Stage(forward=128, output=64, interior=0, gradient=64),)
    """
    now = _Execution(chain, x)
    given, *_ = now.held  # 0 where the input shares its storage with something of the chain's
    measured = []
    with Ambient([x]).replayed():  # looking at the chain draws nothing from the generators
        for i in range(len(chain)):
            before = now.flops.total
            now.evaluate(i, record=True)
            size = now.values[i + 1].untyped_storage().nbytes()
            gradient = size if now.values[i + 1].is_floating_point() else 0
            _, interior, _ = now.held
            measured.append(Stage(now.flops.total - before, size, interior, gradient))
            del now.values[i], now.tapes[i]
    input_gradient = x.untyped_storage().nbytes() if x.requires_grad else 0
    return Costs(measured, given, input_gradient)


class _Execution:
    """Where a run stands: the values held, what stages have recorded, the gradient so far."""

    def __init__(
        self, chain: Sequence[nn.Module], x: Tensor, gradient: Tensor | None = None
    ) -> None:
        units.instance(x, Tensor, "a chain")
        self.chain = chain
        self.input_needs_gradient = x.requires_grad
        self.flops = _Flops()
        self.values: dict[int, Tensor] = {0: x}
        self.tapes: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradient = gradient
        self.ambients: dict[int, Ambient] = {}
        self.evaluations = [0] * len(chain)
        self.output: Tensor | None = None
        # Every storage that the run has seen and that is still alive, by name.
        self.books: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        owned = [] if gradient is None else [gradient]
        for module in chain:
            owned += [*module.parameters(), *module.buffers()]
        for tensor in owned:
            self.enter(tensor, "owned")
        self.enter(x, "values")

    def enter(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        known = self.books.get(storage)
        if known != "owned" and not (known and name == "interiors"):
            self.books[storage] = name

    @property
    def held(self) -> tuple[int, int, int]:
        """Bytes of values, of interiors and of the gradient that are alive."""
        if self.gradient is not None:
            self.enter(self.gradient, "gradient")
        total = dict(values=0, interiors=0, gradient=0, owned=0)
        for storage, name in self.books.items():
            total[name] += storage.nbytes()
        return total["values"], total["interiors"], total["gradient"]

    def take(self, step: Step) -> None:
        i = step.at
        if step.op == "drop":
            del self.values[i]
        elif step.op == "backward":
            entered, left = self.tapes.pop(i)
            if left.requires_grad:
                torch.autograd.backward(left, self.gradient)
            self.gradient = entered.grad
            del self.values[i + 1]
        else:
            self.evaluate(i, record=step.op == "record")

    def evaluate(self, i: int, *, record: bool) -> None:
        """Makes xᵢ₊₁ from xᵢ, and records what the backward pass of stage i needs, or not."""
        x, again = self.values[i], self.ambients.get(i)
        if again is None:
            self.ambients[i] = Ambient([x])
        self.evaluations[i] += 1
        wanted = i > 0 or self.input_needs_gradient
        entered = x.detach().requires_grad_(record and wanted and x.is_floating_point())
        with (
            self.flops,
            self.ambients[i].random.drawing() if again is None else again.replayed(),
            torch.set_grad_enabled(record),
            saved_tensors_hooks(self.keep, lambda tensor: tensor),
        ):
            left = self.chain[i](entered)
        if left.untyped_storage()._cdata == x.untyped_storage()._cdata:
            name = type(self.chain[i]).__name__
            raise ValueError(f"{name} returns a view of its input: join it with its neighbor")
        if record:
            self.tapes[i] = entered, left
        self.values[i + 1] = left.detach()
        self.enter(self.values[i + 1], "values")
        if i + 1 == len(self.chain):
            self.output = self.values[i + 1].clone()

    def keep(self, tensor: Tensor) -> Tensor:
        self.enter(tensor, "interiors")
        return tensor.detach()  # the tensor itself would close a cycle with its own graph


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


class _Embedding(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)


class _Head(nn.Module):
    targets: Tensor | None

    def __init__(self, model: GPT, targets: Tensor | None) -> None:
        super().__init__()
        self.norm = model.norm
        self.scores = model.head
        self.register_buffer("targets", targets)  # there before and after, like weights

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.norm(x))
        if self.targets is None:
            return scores
        return cross_entropy(scores, self.targets)


def stages(model: GPT, targets: Tensor | None = None) -> list[nn.Module]:
    """A GPT as a chain: the embedding, its blocks, and the head, which ends in the loss if it can.

    Invariant: run one after the other they compute model(tokens), or model.loss(tokens, targets).
    """
    units.instance(model, nn.Module, "stages")
    return [_Embedding(model), *model.blocks, _Head(model, targets)]


def apply(model: Of, policy: str) -> Of:
    """The same model, told to checkpoint itself.

    model: a GPT, or stages of one, alone or in a list
    policy: "none", "selective" (the attention core of every block) or "full" (every block)

    Invariant: loss and gradients stay equal to the bit, parameters keep their names; a second call
    replaces the first.
    Source: selective: Korthikanti et al. 2205.05198, section 5.
    """
    units.instance(model, nn.Module, "apply")
    _check_policy(policy)
    for block in (part for part in model.modules() if isinstance(part, Block)):
        # On the instance, over the class: every parameter keeps its name.
        block.__dict__.pop("forward", None)
        attend = block.attention.attend
        if isinstance(attend, functools.partial) and attend.func is checkpoint:
            block.attention.attend = attend = attend.args[0]
        if policy == "selective":
            block.attention.attend = functools.partial(checkpoint, attend)
        elif policy == "full":
            block.__dict__["forward"] = functools.partial(checkpoint, block.forward)
    return model


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: use {', '.join(map(repr, POLICIES))}")


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
    units.instance(model, ModelConfig, "overhead")
    _check_policy(policy)
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
