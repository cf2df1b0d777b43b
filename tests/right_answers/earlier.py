"""Right answers of topics that have no module of their own yet."""

import numpy as np
import torch

from labutils import checkpointing, data_parallel, precision, zero
from labutils.config import ModelConfig
from labutils.teach import exercises


def _codes(fmt, x):
    return np.int64(fmt.encode(x))


def _shares(length, rank, size, epoch):
    return np.array(data_parallel.sampler(length, rank, size, epoch=epoch))


def _filled(target, seq_len, gpus, fits):
    share = target // seq_len // gpus
    micro = next(b for b in range(share, 0, -1) if share % b == 0 and fits(b))
    return [micro, share // micro]


def _summed(x, fmt):
    """Pairs by recursion, from the front."""
    if len(x) == 1:
        return x[0]
    half = 2 ** ((len(x) - 1).bit_length() - 1)
    return precision.round_to(_summed(x[:half], fmt) + _summed(x[half:], fmt), fmt)


def _pairs(n, k):
    for step in checkpointing.segments(n, k).steps:
        yield [step.op, step.at]


def _broken(checkpoint):
    return torch.tensor(exercises.find("checkpointing/bug-hunt").reference(checkpoint))


RIGHT = {
    "floats/encode": {"NumPy integers": _codes},
    "floats/rounds-twice": {
        "a NumPy number": np.float64(1 + 2**-11 + 2**-40),
        "another number": 1 + 2**-11 + 2**-26,
    },
    "floats/pairwise-sum": {"recursion": _summed},
    "data_parallel/sampler": {
        "a NumPy array": _shares,
        "a tuple": lambda *args: tuple(_shares(*args).tolist()),
    },
    "accumulation/configure": {
        "a list": _filled,
        "NumPy integers": lambda *args: tuple(map(np.int64, _filled(*args))),
    },
    "checkpointing/segments": {
        "a generator of lists": _pairs,
        "the library's steps": lambda n, k: list(checkpointing.segments(n, k).steps),
    },
    "checkpointing/bug-hunt": {
        "a tensor": _broken,
        "a NumPy bool": lambda checkpoint: np.bool_(_broken(checkpoint).item()),
    },
    "zero/schedule": {
        "an iterator of lists": lambda count: iter(map(list, zero.unit_order(count)))
    },
    "memory/count-parameters": {"a float": lambda c: float(ModelConfig.from_hf(c).num_params)},
}
