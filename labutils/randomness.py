"""Random numbers that belong to a rank: its dropout draws them, and recomputation draws them again.

All threads of a process share torch's own generators, so what a rank draws there hangs on what the
other ranks do meanwhile. A rank therefore has generators of its own, one for each group of ranks
that must draw alike, as Megatron-LM's trackers of random states.
"""

import functools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labutils import units

_here = threading.local()
_process: list["Numbers"] = []  # of the rank that has this process: autograd's threads are its, too
# These carry the tag of random operations, and on a CPU draw nothing: they take no dropout.
_DRAW_NOTHING = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


class Numbers:
    """The random numbers of one rank.

    own: those of this rank alone
    private: whether torch's own generators are this rank's alone, too, as in a process of its own
    """

    def __init__(self, rank: int, device: torch.device, private: bool) -> None:
        self.device = device
        self.private = private
        self.replaying = False  # whether what was drawn is being drawn again
        self.owns = False  # whether its own generator stands in for torch's
        self.made: dict[tuple[int, torch.device], torch.Generator] = {}
        self.own = self.seeded(rank, device)

    def seeded(self, seed: int, device: torch.device) -> torch.Generator:
        """The rank's one generator that began with this seed on this device."""
        if (seed, device) not in self.made:
            self.made[seed, device] = torch.Generator(device=device).manual_seed(seed)
        return self.made[seed, device]

    def shared(self, axis: str, first: int) -> torch.Generator:
        """The generator of a group of ranks, the same to each of them: by its axis and first rank.
        Ranks are small seeds, groups large ones."""
        return self.seeded(1 << 31 | zlib.crc32(f"{axis} {first}".encode()), self.device)

    def near(self, generator: torch.Generator, device: torch.device) -> torch.Generator:
        """The generator, or its twin on another device; a tensor without values asks for none."""
        if device in (generator.device, torch.device("meta")):
            return generator
        return self.seeded(generator.initial_seed(), device)


def here() -> Numbers | None:
    """The random numbers of the rank whose program runs in this thread, if one does."""
    return getattr(_here, "numbers", None) or (_process[-1] if _process else None)


@contextmanager
def within(numbers: Numbers | None) -> Iterator[None]:
    """Inside, this thread runs the program of the rank that has these random numbers."""
    before, _here.numbers = getattr(_here, "numbers", None), numbers
    if numbers and numbers.private:
        _process.append(numbers)
    try:
        yield
    finally:
        _here.numbers = before
        if numbers and numbers.private:
            _process.remove(numbers)


def alike(device: torch.device) -> torch.Generator | None:
    """What weights are drawn from that nobody gave a generator: on ranks one that all have in
    common, so that they begin alike; elsewhere None, which is torch's own."""
    numbers = here()
    return None if numbers is None else numbers.near(numbers.shared("world", 0), device)


def dropout(
    x: Tensor, p: float, training: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """x with each number dropped with chance p, and the rest divided by 1 − p, or x itself where
    not `training`: F.dropout, but that a rank draws from `generator`, or else from its own, never
    from torch's.

    Raises RuntimeError in a backward pass, where torch.utils.checkpoint computes again and knows
    nothing of a rank's generators: the mask would be another one.
    """
    units.instance(x, Tensor, "dropout")
    numbers = here()
    if numbers is None or not training or not 0 < p < 1:
        return F.dropout(x, p, training)
    if torch._C._current_graph_task_id() >= 0 and not numbers.replaying:
        remedy = "use labutils.checkpointing.checkpoint, not that of torch.utils"
        raise RuntimeError(f"computed again, dropout would draw another mask: {remedy}")
    generator = numbers.near(generator or numbers.own, x.device)
    if x.is_cuda:  # a mask of one byte, as of torch's own kernel there
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
        return torch.ops.aten.native_dropout_backward(x, kept, 1 / (1 - p))
    return x * torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)


@contextmanager
def own() -> Iterator[None]:
    """Inside, on a rank, what is drawn without a generator is drawn from the rank's own: torch's
    dropout, torch.rand, and attention that drops out within.

    Raises RuntimeError, in there, for the few operations that draw from no generator but torch's.
    """
    numbers = here()
    if numbers is None or numbers.owns:
        yield
        return
    numbers.owns = True
    try:
        with _Own(numbers):
            yield
    finally:
        numbers.owns = False


class Standing:
    """Where the random numbers stand that a function is about to draw, to draw them again: those of
    the rank here, and torch's own on a CPU and on `devices`, unless other ranks draw there, too."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = {device for device in devices if device.type == "cuda"}
        self.numbers = here()
        generators = list(self.numbers.made.values()) if self.numbers else []
        self.known = len(generators)
        self.owns = self.numbers is not None and (self.numbers.owns or not self.numbers.private)
        if self.numbers is None or self.numbers.private:
            cuda = (torch.cuda.default_generators[device.index] for device in self.devices)
            generators += [torch.default_generator, *cuda]
        self.states = [(generator, generator.get_state()) for generator in generators]

    def drawing(self) -> AbstractContextManager:
        """What the function is to draw in so that it can be replayed."""
        return own() if self.owns else nullcontext()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, what was drawn is drawn again; afterwards, all stands as if nothing happened."""
        with within(self.numbers), ExitStack() as stack:
            now = Standing(self.devices)
            stack.callback(now._put_back)
            self._put_back()
            if self.numbers:
                before, self.numbers.replaying = self.numbers.replaying, True
                stack.callback(setattr, self.numbers, "replaying", before)
            stack.enter_context(self.drawing())
            yield

    def _put_back(self) -> None:
        for generator, state in self.states:
            generator.set_state(state)
        if self.numbers:
            for (seed, _), generator in list(self.numbers.made.items())[self.known :]:
                generator.manual_seed(seed)  # it was made later


class _Own(TorchDispatchMode):
    """Gives a rank's own generator to what draws without one."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.numbers = numbers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is asked of torch.compile
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _draws(func) and kwargs.get("generator") is None:
            func = _with_generator(func)
            asked = kwargs.get("device") or torch.device("cpu")
            on = next((x.device for x in args if isinstance(x, Tensor)), asked)
            generator = self.numbers.near(self.numbers.own, on)
            kwargs = kwargs | dict(generator=generator)
        return func(*args, **kwargs)


@functools.cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and func not in _DRAW_NOTHING


def _arguments(func: Any) -> set[tuple[str, str]]:
    return {(argument.name, str(argument.type)) for argument in func._schema.arguments}


@functools.cache
def _with_generator(func: Any) -> Callable:
    """The same operation, in the form that takes a generator; RuntimeError where there is none."""
    wanted = _arguments(func) | {("generator", "Optional[Generator]")}
    for name in func.overloadpacket.overloads():
        if _arguments(each := getattr(func.overloadpacket, name)) == wanted:
            return each
    name, remedy = func.overloadpacket.__name__, "draw with generator=rank.generator"
    raise RuntimeError(
        f"{name} draws from torch's own generator, which ranks share: {remedy}, use "
        'attention="plain" or dropout=0'
    )
