"""A step, seen by PyTorch's profiler."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch


def profiled(fn: Callable[[], object]) -> torch.profiler.profile:
    """The profile of one call of `fn`, with FLOPs: every operation, when it began and ended."""
    with _quiet(), torch.profiler.profile(with_flops=True) as profile:
        fn()
    return profile


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what C++ writes to the error stream: the profiler announces itself there."""
    sys.stderr.flush()
    before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)
