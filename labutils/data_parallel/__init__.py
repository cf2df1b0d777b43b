"""Data parallelism: a copy of the model on every rank, a part of the batch each, and one mean of gradients a step.

`replicate` is the course's own DistributedDataParallel: gradients are reduced in buckets, from the last layer to the first, while the backward pass
goes on. `average_gradients`, `server_step` and `replicate_each_step` are what came before it, on the same ranks.

>>> import torch
>>> from labutils import data_parallel, world
>>> def program(rank):
...     replica = data_parallel.replicate(torch.nn.Linear(3, 1), rank.comm("dp"))
...     replica(torch.full((1, 3), float(rank.rank))).sum().backward()
...     return replica.module.weight.grad.tolist()
>>> with world.World(4) as four:
...     four.run(program)[3]  # the mean of 0, 1, 2 and 3
[[1.5, 1.5, 1.5]]
"""

from labutils.data_parallel.buckets import (
    BUCKET_BYTES,
    Bucket,
    buckets,
    hideable,
    predict,
    predict_buffers,
    predict_start,
)
from labutils.data_parallel.data import sampler, share
from labutils.data_parallel.plain import average_gradients, replicate_each_step, server_step
from labutils.data_parallel.replica import Replica, replicate
from labutils.data_parallel.timeline import simulate

__all__ = [
    "BUCKET_BYTES", "Bucket", "Replica", "average_gradients", "buckets", "hideable", "predict", "predict_buffers",
    "predict_start", "replicate", "replicate_each_step", "sampler", "server_step", "share", "simulate",
]  # fmt: skip
