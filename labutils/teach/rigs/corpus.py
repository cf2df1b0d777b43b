"""Two texts to learn from, as rows of characters: Python's own reference, in English with examples,
and source code of its standard library. They are frozen in `data/`, so that everybody learns the
same."""

import functools
import gzip
from pathlib import Path

import torch
from torch import Tensor

from labutils.config import DATA

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The vocabulary: a character's token is its place in this string."""

TEXTS = ("topics", "source")


def file(name: str) -> Path:
    """Where a text is kept."""
    return DATA / f"python_{name}.txt.gz"


@functools.cache
def encoded(name: str = "topics") -> Tensor:
    """A text as tokens of its characters, int64 [n], 465,048 of "topics" and 585,942 of "source".

    Raises ValueError for a name that is not one of the two.

    >>> "".join(ALPHABET[token] for token in encoded()[:18])
    'The "assert" state'
    """
    if name not in TEXTS:
        raise ValueError(f"there is no text {name!r}: take one of {', '.join(TEXTS)}")
    codes = torch.frombuffer(bytearray(gzip.decompress(file(name).read_bytes())), dtype=torch.uint8)
    return (codes.long() - 31).clamp(min=0)  # "\n" is 10, the others stand in ASCII's order
