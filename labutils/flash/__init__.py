"""FlashAttention, and what a fused kernel is: the same arithmetic, fewer trips to slow memory."""

from labutils.flash.algorithms import (
    OnlineSoftmax,
    SlowMemory,
    Tiling,
    attention,
    attention_flops,
    backward,
    backward_of_keys,
    forward,
    merge,
    online,
    plain,
)
from labutils.flash.counting import block_sizes, counted, traffic
from labutils.flash.fused import (
    Roof,
    layernorm,
    linear_cross_entropy,
    moved,
    one_pass,
    passes,
    product_flops,
    softmax,
    swiglu,
)
