"""Groups of parameters, each with settings of its own, given as torch optimizers take them: decay for matrices, none for norms and biases."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Given = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Groups:
    """Which group each trained parameter belongs to, by name, and the settings of each group; one group without any unless others are given."""

    number: Mapping[str, int]
    settings: tuple[dict[str, Any], ...] | None

    def filled(self, pieces: Iterable[tuple[int, nn.Parameter]]) -> list[Any]:
        """What a torch optimizer is made of: the pieces, each with the number of its group, under the settings of that group."""
        pieces = list(pieces)
        if self.settings is None:
            return [piece for _, piece in pieces]
        return [
            {**settings, "params": [piece for mine, piece in pieces if mine == i]}
            for i, settings in enumerate(self.settings)
        ]


def grouped(parameters: Mapping[str, nn.Parameter], given: Given | None) -> Groups:
    """The groups of these parameters; every trained one must be in exactly one of the `given` groups."""
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if given is None:
        return Groups(dict.fromkeys(trained, 0), None)
    names, number, settings = (
        {id(parameter): name for name, parameter in parameters.items()},
        {},
        [],
    )
    for i, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                f"group {i} is {type(group).__name__}: give groups as torch optimizers take them, {{'params': [...], 'weight_decay': 0.1}}"
            )
        settings.append({key: value for key, value in group.items() if key != "params"})
        for member in _members(group["params"]):
            name = names.get(id(member))
            if name is None:
                raise ValueError(
                    f"group {i} has a parameter that is none of those to optimize: make groups of the same parameters, before they are sharded"
                )
            if number.setdefault(name, i) != i:
                raise ValueError(
                    f"parameter {name} is in groups {number[name]} and {i}: leave it in one of them"
                )
    if lost := [name for name in trained if name not in number]:
        raise ValueError(
            f"{', '.join(lost[:3])}{', …' * (len(lost) > 3)} in no group: put each trained parameter into one, or freeze it"
        )
    return Groups(number, tuple(settings))


def named(params: Any) -> dict[str, nn.Parameter]:
    """Parameters by name, or by number where no names are given, each once; they must be leaves of one dtype on one device."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for i, item in enumerate(params):
        name, parameter = item if isinstance(item, tuple) else (str(i), item)
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"parameter {name} is {type(parameter).__name__}: give model.parameters() or model.named_parameters(), settings as groups=[...]"
            )
        if not parameter.is_leaf or not parameter.is_floating_point() or parameter.is_meta:
            raise ValueError(
                f"parameter {name} must be a leaf of floating-point numbers in memory, got {parameter.dtype} on {parameter.device}"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"parameter {name} has a gradient already, which would be lost: call zero_grad() before"
            )
        found.setdefault(id(parameter), (name, parameter))
    by_name = dict(found.values())
    kinds = {
        (str(parameter.dtype).removeprefix("torch."), str(parameter.device))
        for parameter in by_name.values()
    }
    if len(by_name) < len(found):
        raise ValueError(
            f"{len(found)} parameters have {len(by_name)} names: give each its own, as model.named_parameters() does"
        )
    if not any(parameter.requires_grad for parameter in by_name.values()):
        raise ValueError(
            f"of {len(found)} parameters none requires a gradient: there is nothing to train"
        )
    if len(kinds) > 1:
        told = ", ".join(sorted(" on ".join(kind) for kind in kinds))
        raise ValueError(
            f"one flat tensor has one dtype and one device, these parameters have {told}: convert the model, or use one optimizer for each"
        )
    return by_name


def _members(params: Any) -> Sequence[Any]:
    """The parameters of a group, without the names that they may come with."""
    return [
        item[1] if isinstance(item, tuple) else item
        for item in ([params] if isinstance(params, Tensor) else params)
    ]
