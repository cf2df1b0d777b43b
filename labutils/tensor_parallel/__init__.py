"""Tensor parallelism: the ranks share out each matrix, and with it heads, widths and vocabulary.
Sequence parallelism: they share out the tokens of everything between the matrices, too.
"""

# isort: off
from labutils.tensor_parallel.clock import layer_timeline
from labutils.tensor_parallel.layers import (
    ColumnLinear, RowLinear, Split, TokenLinear, VocabEmbedding, copy_to, cross_entropy,
    gather_from, reduce_from, scatter_to,
)  # fmt: skip
from labutils.tensor_parallel.shares import layer_shares
from labutils.tensor_parallel.transform import ParallelGPT, parallelize, rank_config, styles
