"""Freeze the two texts of `labutils.teach.rigs.corpus` as they are in the Python that runs this:
`python tools/corpus.py` writes python_topics.txt.gz and python_source.txt.gz in labutils/data.

Another Python has other words, and every stored output that learns from them would differ.
"""

import argparse
import ast
import collections
import dataclasses
import difflib
import enum
import gzip
import inspect
import random
import typing
from pydoc_data import topics

from labutils.teach.rigs.corpus import ALPHABET, file

PLAIN = str.maketrans("–—‘’“”…°ß", "--''\"\".. ")
SOURCES = (argparse, ast, collections, dataclasses, difflib, enum, random, typing)


def freeze(name: str, text: str) -> None:
    """Write a text in the 96 characters, without the date of its writing."""
    plain = "".join(c for c in text.translate(PLAIN) if c in ALPHABET)
    file(name).write_bytes(gzip.compress(plain.encode("ascii"), 9, mtime=0))
    print(f"{file(name).name}: {len(plain):,} characters")


if __name__ == "__main__":
    freeze("topics", "\n".join(topics.topics[name] for name in sorted(topics.topics)))
    freeze("source", "\n".join(inspect.getsource(module) for module in SOURCES))
