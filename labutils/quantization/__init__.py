"""Fewer bits for a number: what is rounded, by which scale, and what that costs."""

from labutils.quantization.blocks import BlockLinear, hadamard, use_blocks
from labutils.quantization.error_feedback import error_feedback, hessian
from labutils.quantization.fp8 import (
    F8_E4M3,
    F8_E5M2,
    OPERANDS,
    SCHEMES,
    Eight,
    Fp8Linear,
    Fp8Products,
    Scheme,
    advance_scales,
    cast,
    fp8_layers,
    largest,
    product,
    scale_for,
    tile_amax,
    to_eight,
    use_fp8,
)
from labutils.quantization.kashin import kashin
from labutils.quantization.layers import (
    Int8Linear,
    inputs_of,
    int8_product,
    keeping,
    quantized,
    rotated,
    rotation,
)
from labutils.quantization.moments import Adam8, Blocks, dynamic_code, from_blocks, to_blocks
from labutils.quantization.nf4 import BLOCK, NF4, SCALES, Nf4Linear, from_nf4, nf4_bytes, to_nf4
from labutils.quantization.recipes import RECIPES, KeptAdam, StateFormats, fp8_states, kept_states
from labutils.quantization.tiles import (
    Quantized,
    pack_codes,
    quantize,
    quantized_bytes,
    unpack_codes,
)
