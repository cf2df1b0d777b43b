"""Level 3, fully sharded data parallelism: weights are whole while they compute, and only then."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from labutils import units
from labutils.world import Comm
from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.reducer import Reducer


def shard(
    module: nn.Module,
    comm: Comm,
    *,
    units: Sequence[nn.Module] | None = None,
    reshard: bool = True,
    prefetch: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The module, changed in place: every rank keeps 1/n of its weights, and of what follows them.

    Its parameters are now this rank's pieces of them, of one dimension, often empty, and have their
    mean gradients after a backward pass: any torch optimizer that treats every element alike can
    step them. All ranks begin with rank 0's weights. Inside `gathered` the parameters are whole.

    units         submodules whose weights are gathered, used and freed together, in the order in
                  which they compute; unless given, the members of the ModuleLists (or of the
                  Sequential) that the module consists of. The rest is whole for the entire pass
    reshard       free weights after the forward and gather them again for the backward
    prefetch      gather the next unit while this one computes
    param_dtype   in which weights are gathered and compute; inputs are cast to it. The shards, and
                  so what the optimizer steps, stay as they are
    reduce_dtype  in which gradients are reduced; unless given, that in which they are computed

    Cost: bytes sent as in `predict.sent`, held as in `predict.peak_states`.
    Raises TypeError for what is no module.
    Source: Rajbhandari et al. 1910.02054, sections 5.3 and 7.2.2; Zhao et al. 2304.11277. Named as
    in PyTorch's `fully_shard`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"shard takes a module, got {type(module).__name__}: parameters alone can be sharded "
            "by zero.Optimizer, at level 1 or 2"
        )
    homes = _homes(module, _default_units(module) if units is None else units)
    groups = [
        ParamGroup(home, places, comm, param_dtype, reduce_dtype) for home, places in homes.items()
    ]
    vars(module)["_sharded"] = Sharded(module, groups, reshard, prefetch, param_dtype)
    return module


def sharded_of(module: nn.Module) -> "Sharded":
    """What `shard` left with a module.

    Raises ValueError for a module that is whole.
    """
    units.instance(module, nn.Module, "zero")
    if "_sharded" not in vars(module):
        raise ValueError(f"this {type(module).__name__} is whole: zero.shard it first")
    return vars(module)["_sharded"]


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[nn.Module]:
    """The sharded module with all its parameters whole, for all ranks together.

    To be evaluated, saved or looked at: changes made inside are lost.
    """
    groups = sharded_of(module).groups
    for group in groups:
        group.free()  # what a pass has left here may have been stepped since
        group.pinned = True
        group.start()
    for group in groups:
        group.wait()
    try:
        yield module
    finally:
        for group in groups:
            group.pinned = False
            group.free()


Place = tuple[nn.Module, str, nn.Parameter]  # where a parameter hangs; a tied one hangs in several


class ParamGroup:
    """FSDP2's parameter group: a module whose own weights are gathered and freed together.

    Its trained ones are in one flat parameter, its frozen ones in another.
    """

    def __init__(
        self,
        module: nn.Module,
        places: list[Place],
        comm: Comm,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.module = module
        self.pinned = False
        self.under_way: list[Any] = []
        self.flats: list[FlatParameter] = []
        self.slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for trained in (True, False):
            found = [place for place in places if place[2].requires_grad is trained]
            parameters = list(dict.fromkeys(parameter for _, _, parameter in found))
            if not parameters:
                continue
            flat = FlatParameter(
                parameters, comm, sharded=True, param_dtype=param_dtype, reduce_dtype=reduce_dtype
            )
            flat.release()
            now = dict(zip(parameters, zip(flat.wholes, flat.pieces, strict=True), strict=True))
            self.slots += [(home, name, *now[parameter]) for home, name, parameter in found]
            self.flats.append(flat)
        self._put(whole=False)

    def _put(self, whole: bool) -> None:
        for module, attribute, parameter, piece in self.slots:
            module._parameters[attribute] = parameter if whole else piece

    @property
    def resident(self) -> bool:
        """Whether the weights are here, or on their way."""
        return any(flat.resident for flat in self.flats)

    def start(self) -> None:
        """Begin to gather the weights, unless they are here."""
        if not self.resident:
            self.under_way = [flat.gather(async_op=True) for flat in self.flats]

    def wait(self) -> None:
        """Gather the weights, unless they are here, and put them into the module."""
        self.start()
        if self.under_way:
            for work in self.under_way:
                work.wait()
            self.under_way = []
            self._put(whole=True)

    def free(self) -> None:
        """Free the weights, and leave their pieces in the module."""
        if self.resident and not self.pinned:
            self.wait()  # nobody writes into what is freed
            self._put(whole=False)
            for flat in self.flats:
                flat.release()


class Sharded:
    """The hooks of a sharded module: a group is gathered before it computes, and freed after that.

    `groups` are the root's own weights and then the units', in their order.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: list[ParamGroup],
        reshard: bool,
        prefetch: bool,
        param_dtype: torch.dtype | None,
    ) -> None:
        self.groups = groups
        self.reshard = reshard
        self.prefetch = prefetch
        self.param_dtype = param_dtype
        self.learning = False  # a forward is under way that a backward will follow
        self.flats = [flat for group in groups for flat in group.flats]
        order = [*reversed(groups[1:]), groups[0]]
        trained = [flat for group in order for flat in group.flats if flat.trained]
        self.reducer = Reducer(trained, eager=True, ended=self._free_all)
        for i, group in enumerate(groups):
            before = functools.partial(self._before_forward, i)
            group.module.register_forward_pre_hook(before, with_kwargs=True)
            group.module.register_forward_hook(functools.partial(self._after_forward, i))

    # -- around a group's computation ------------------------------------------------------------

    def _before_forward(
        self, i: int, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        if i == 0 and not _in_backward():
            self._begin()
        self.groups[i].wait()
        if _in_backward():  # a checkpointed group is computed again
            self._before_backward(i)
        elif self.prefetch and i + 1 < len(self.groups):
            self.groups[i + 1].start()
        leaves, shape = tree_flatten((args, kwargs))
        leaves = [self._cast(leaf) for leaf in leaves]
        if torch.is_grad_enabled():
            learns = [k for k, leaf in enumerate(leaves) if _requires_grad(leaf)]
            passed = _PostBackward.apply(self.groups[i].free, *(leaves[k] for k in learns))
            for k, leaf in zip(learns, passed, strict=True):
                leaves[k] = leaf
        return tree_unflatten(leaves, shape)

    def _begin(self) -> None:
        """A pass begins: weights that an earlier one has left here may have been stepped since."""
        if self.reducer.queued:
            self.reducer.reset()
        self._free_all()
        self.learning = torch.is_grad_enabled()

    def _cast(self, leaf: Any) -> Any:
        if self.param_dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.to(self.param_dtype)

    def _after_forward(self, i: int, module: nn.Module, args: tuple, output: Any) -> None:
        if _in_backward():  # its backward comes right now
            return
        outputs = [leaf for leaf in tree_leaves(output) if _requires_grad(leaf)]
        for leaf in outputs:
            leaf.register_hook(functools.partial(self._before_backward, i))
        # Under torch's reentrant checkpointing there will be a backward after all.
        again = self.learning and not torch.is_grad_enabled()
        if self.reshard or not (outputs or again):
            self.groups[i].free()
        if i == 0:
            self.learning = False

    def _before_backward(self, i: int, grad: Tensor | None = None) -> None:
        self.reducer.on_backward()
        self.groups[i].wait()
        if i == 0:
            for flat in self.groups[0].flats:
                if flat.trained:
                    flat.open()  # the root's gradients come first and last
        if self.prefetch and (before := (i or len(self.groups)) - 1):
            self.groups[before].start()

    def _free_all(self) -> None:
        for group in self.groups:
            group.free()


class _PostBackward(torch.autograd.Function):
    """FSDP2's RegisterPostBackwardFunction: a group's inputs, unchanged.

    Their gradients are the last thing that the group's backward computes, and then it is `done`.
    """

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.done()
        return None, *grads


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _default_units(module: nn.Module) -> list[nn.Module]:
    """The members of the lists that a module consists of."""
    parts = [module] if isinstance(module, nn.Sequential) else module.children()
    lists = [part for part in parts if isinstance(part, (nn.ModuleList, nn.Sequential))]
    members = itertools.chain.from_iterable(lists)
    return [unit for unit in members if any(True for _ in unit.parameters())]


def _homes(module: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Module, list[Place]]:
    """Which parameters belong to which unit, and to the root, which comes first."""
    label = {submodule: name or "the root" for name, submodule in module.named_modules()}
    home: dict[nn.Module, nn.Module] = dict.fromkeys(label, module)
    for unit in units:
        for submodule in unit.modules():
            if submodule not in label:
                raise ValueError(
                    f"a unit of type {type(unit).__name__} is no part of the module: give "
                    "submodules of it"
                )
            taken = home[submodule] is not module and list(submodule.parameters(recurse=False))
            if unit is module or taken:
                raise ValueError(
                    f"{label[submodule]} is in two units, {label[home[submodule]]} and "
                    f"{label[unit]}: units lie side by side, below the root"
                )
            home[submodule] = unit
    found: dict[nn.Module, list[Place]] = {each: [] for each in (module, *units)}
    homes: dict[nn.Parameter, nn.Module] = {}
    for submodule, name in label.items():
        for attribute, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            first = homes.setdefault(parameter, home[submodule])
            if first is not home[submodule]:
                raise ValueError(
                    f"{attribute} of {name} is tied between two units, {label[first]} and "
                    f"{label[home[submodule]]}: leave both of its modules to the root"
                )
            found[first].append((submodule, attribute, parameter))
    return found
