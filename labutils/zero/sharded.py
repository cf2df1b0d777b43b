"""Level 3: every rank holds its share of the weights, and the whole of a part of the module only while that part computes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from labutils.world import Comm
from labutils.zero.flat import Flat
from labutils.zero.groups import Given, Groups, grouped, named
from labutils.zero.partition import Unit
from labutils.zero.update import Make, Partitioned, adamw


def shard(
    module: nn.Module, comm: Comm, optimizer: Make = adamw, *, units: Sequence[nn.Module] | None = None, groups: Given | None = None,
    reshard: bool = True, prefetch: bool = True, master: bool | None = None, gradient_dtype: torch.dtype | None = None,
    offload: torch.device | str | None = None,
) -> "Sharded":  # fmt: skip
    """The optimizer of a module that it changes in place: from here on every rank keeps 1/n of weights, gradients and optimizer state.

    `units` are the submodules whose weights are gathered, used and freed together, in the order in which they compute; unless given, the
    members of the ModuleLists (or of the Sequential) that the module consists of. What lies in none of them is gathered for the whole pass.
    With `reshard` the weights are freed after the forward and gathered again for the backward; without, they stay in between.
    With `prefetch` the next unit is gathered while this one computes. `groups` are of the module's parameters. The rest is as for `Optimizer`.

    Outside of a pass a parameter of the module is the flat piece of it that this rank owns, often empty; inside `gathered()` it is whole.

    Cost: bytes sent as in `predict_sent`, bytes held as in `predict_held`.
    Source: Rajbhandari et al. 1910.02054, sections 5.3 and 7.2.2; flat parameters, prefetch and resharding as in PyTorch FSDP, Zhao et al. 2304.11277.
    """
    return Sharded(
        module, comm, optimizer, units, groups, reshard, prefetch, master, gradient_dtype, offload
    )


class Part:
    """A module whose own weights are gathered and freed together: its trained ones in one flat tensor, its frozen ones in another."""

    def __init__(
        self,
        module: nn.Module,
        places: list["Place"],
        comm: Comm,
        groups: Groups,
        gradient_dtype: torch.dtype | None,
    ) -> None:
        self.module, self.pinned = module, False
        self.under_way: list[Any] = []
        self.flats: list[Flat] = []
        self.wholes: list[list[nn.Parameter]] = []
        self.slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for trained in (True, False):
            found = [place for place in places if place.parameter.requires_grad is trained]
            members = {
                place.parameter: place.name
                for place in sorted(found, key=lambda place: groups.number.get(place.name, 0))
            }  # each group in one stretch
            if members:
                flat = Flat(
                    [(name, parameter) for parameter, name in members.items()], comm, gradient_dtype
                )
                wholes = [
                    nn.Parameter(view, requires_grad=trained) for view in flat.views(flat.whole)
                ]
                flat.release()
                pieces = [
                    nn.Parameter(piece, requires_grad=trained) for piece in flat.pieces(flat.shard)
                ]
                pairs = dict(zip(members, zip(wholes, pieces, strict=True), strict=True))
                self.slots += [
                    (place.module, place.attribute, *pairs[place.parameter])
                    for place in places
                    if place.parameter in pairs
                ]
                self.flats.append(flat)
                self.wholes.append(wholes)
        self._put(whole=False)

    def _put(self, whole: bool) -> None:
        for module, attribute, whole_parameter, piece in self.slots:
            module._parameters[attribute] = whole_parameter if whole else piece

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


class Place:
    """Where a parameter hangs in a module; a tied one hangs in several places."""

    def __init__(self, name: str, module: nn.Module, attribute: str) -> None:
        self.name, self.module, self.attribute = name, module, attribute
        self.parameter: nn.Parameter = module._parameters[attribute]


class Sharded(Partitioned):
    """A module's optimizer and its hooks: before a part computes it is gathered, after that it is freed, and its gradients are reduced."""

    level = 3

    def __init__(
        self, module: nn.Module, comm: Comm, optimizer: Make, units: Sequence[nn.Module] | None, groups: Given | None, reshard: bool, prefetch: bool,
        master: bool | None, gradient_dtype: torch.dtype | None, offload: torch.device | str | None,
    ) -> None:  # fmt: skip
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"shard takes a module, got {type(module).__name__}: for parameters alone use zero.Optimizer, level 1 or 2"
            )
        known = named(module.named_parameters())
        settings = grouped(known, groups)
        self.order = {name: i for i, name in enumerate(known)}
        self.module, self.reshard, self.prefetch, self.learning = module, reshard, prefetch, False
        homes = _homes(module, _default_units(module) if units is None else units)
        self.parts = [
            Part(home, places, comm, settings, gradient_dtype) for home, places in homes.items()
        ]  # the root first, then the units in their order
        self.leaves = [
            whole
            for part in self.parts
            for flat, wholes in zip(part.flats, part.wholes, strict=True)
            if flat.trained
            for whole in wholes
        ]
        self.resting = [flat for part in self.parts for flat in part.flats if not flat.trained]
        order = [*reversed(self.parts[1:]), self.parts[0]]
        super().__init__(
            [flat for part in order for flat in part.flats if flat.trained],
            comm,
            optimizer,
            settings,
            master=master,
            offload=offload,
        )
        for i, part in enumerate(self.parts):
            part.module.register_forward_pre_hook(
                functools.partial(self._before_forward, i), with_kwargs=True
            )
            part.module.register_forward_hook(functools.partial(self._after_forward, i))
            for flat, wholes in zip(part.flats, part.wholes, strict=True):
                for k, whole in enumerate(wholes if flat.trained else ()):
                    whole.register_post_accumulate_grad_hook(
                        functools.partial(self._collect, flat, k)
                    )

    @property
    def layout(self) -> tuple[Unit, ...]:
        """The elements of every parameter, the root's and then unit by unit, as `predict_sent` and `predict_held` take them."""
        root, *units = self.parts
        last = max(
            (self.order[name] for part in units for flat in part.flats for name in flat.names),
            default=-1,
        )

        def unit(part: Part) -> Unit:
            sizes: dict[str, tuple[int, ...]] = {"trained": (), "frozen": (), "after": ()}
            groups = {
                self.groups.number[name]
                for flat in part.flats
                if flat.trained
                for name in flat.names
            }
            for flat in part.flats:
                for name, numel in zip(flat.names, flat.numels, strict=True):
                    after = part is root and units and self.order[name] > last
                    sizes["frozen" if not flat.trained else "after" if after else "trained"] += (
                        numel,
                    )
            return Unit(**sizes, groups=len(groups) or 1)

        return tuple(map(unit, self.parts))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all its parameters whole, to be evaluated, saved or looked at by all ranks together; changes made inside are lost."""
        for part in self.parts:
            part.pinned = True
            part.start()
        for part in self.parts:
            part.wait()
        try:
            yield self.module
        finally:
            self._free_all()

    # -- around a part's computation -----------------------------------------------------------------------------------

    def _before_forward(
        self, i: int, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        self.parts[i].wait()
        if _in_backward():  # a checkpointed part is computed again
            self._before_backward(i)
        else:
            if i == 0:
                self.learning = torch.is_grad_enabled()
            if self.prefetch and i + 1 < len(self.parts):
                self.parts[i + 1].start()
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, shape = tree_flatten((args, kwargs))
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        for place, leaf in zip(
            places,
            _Passed.apply(self.parts[i].free, *(leaves[place] for place in places)),
            strict=True,
        ):
            leaves[place] = leaf
        return tree_unflatten(leaves, shape)

    def _after_forward(self, i: int, module: nn.Module, args: tuple, output: Any) -> None:
        if _in_backward():  # its backward comes right now
            return
        outputs = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        for leaf in outputs:
            leaf.register_hook(functools.partial(self._before_backward, i))
        again = (
            self.learning and not torch.is_grad_enabled()
        )  # torch's reentrant checkpointing: there will be a backward after all
        if self.reshard or not (outputs or again):
            self.parts[i].free()
        if i == 0:
            self.learning = False

    def _before_backward(self, i: int, grad: Tensor | None = None) -> None:
        self._on_backward()
        self.parts[i].wait()
        if i == 0:
            for flat in self.parts[0].flats:
                if flat.trained:
                    flat.open()  # the root's gradients come first and last
        if self.prefetch and (before := (i or len(self.parts)) - 1):
            self.parts[before].start()

    def _end_backward(self) -> None:
        super()._end_backward()
        self._free_all(unpin=False)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step this rank's shards; the next forward gathers the new weights."""
        self._free_all(unpin=False)
        super().step()

    def _publish(self, flat: Flat) -> None:
        return None

    def _free_all(self, unpin: bool = True) -> None:
        for part in self.parts:
            part.pinned = part.pinned and not unpin
            part.free()


class _Passed(torch.autograd.Function):
    """The inputs of a part, unchanged; their gradients are the last thing that the part's backward computes, and then it is `done`."""

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


def _default_units(module: nn.Module) -> list[nn.Module]:
    """The members of the lists that a module consists of."""
    lists = (
        [module]
        if isinstance(module, nn.Sequential)
        else [
            child
            for child in module.children()
            if isinstance(child, (nn.ModuleList, nn.Sequential))
        ]
    )
    return [unit for each in lists for unit in each if any(True for _ in unit.parameters())]


def _homes(module: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Module, list[Place]]:
    """Which parameters belong to which unit, and to the root, which comes first; a tied parameter must have one home."""
    label = {submodule: name or "the root" for name, submodule in module.named_modules()}
    home: dict[nn.Module, nn.Module] = dict.fromkeys(label, module)
    for unit in units:
        for submodule in unit.modules():
            if submodule not in label:
                raise ValueError(
                    f"a unit of type {type(unit).__name__} is no part of the module: give submodules of it"
                )
            if unit is module or (
                home[submodule] is not module
                and any(parameter is not None for parameter in submodule._parameters.values())
            ):
                raise ValueError(
                    f"{label[submodule]} is in two units, {label[home[submodule]]} and {label[unit]}: units lie side by side, below the root"
                )
            home[submodule] = unit
    found: dict[nn.Module, list[Place]] = {each: [] for each in (module, *units)}
    names = {parameter: name for name, parameter in module.named_parameters()}
    homes: dict[nn.Parameter, nn.Module] = {}
    for submodule in label:
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                first = homes.setdefault(parameter, home[submodule])
                if first is not home[submodule]:
                    where = f"{label[first]} and {label[home[submodule]]}"
                    raise ValueError(
                        f"{names[parameter]} is tied between two units, {where}: leave both of its modules to the root"
                    )
                found[first].append(Place(names[parameter], submodule, attribute))
    return found
