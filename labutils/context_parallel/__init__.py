"""Context parallelism: the ranks share out the tokens of each sequence, and attention, where tokens
meet, passes keys and values round a ring or trades tokens for heads.
"""

from labutils.context_parallel.attention import (
    heads_for_tokens,
    kv_heads,
    ring,
    ring_attention,
    tokens_for_heads,
    ulysses_attention,
)
from labutils.context_parallel.sequence import SequenceLayout, Tile, layout
from labutils.context_parallel.time import least_tokens, ring_timeline
from labutils.context_parallel.transform import (
    ContextGPT,
    distribute,
    mean_loss,
    require,
    share_tokens,
)
