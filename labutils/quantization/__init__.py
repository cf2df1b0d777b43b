"""Fewer bits for a number: what is rounded, by which scale, and what that costs."""

from labutils.quantization.nf4 import (
    BLOCK,
    NF4,
    SCALES,
    Nf4Linear,
    from_nf4,
    nf4_bytes,
    to_nf4,
)
