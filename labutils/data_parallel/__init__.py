"""Data parallelism: a copy of the model per rank, a part of the batch each, one mean of gradients.

`replicate` is the course's own DistributedDataParallel (DDP), `average_gradients` what came before
it.
"""

from labutils.data_parallel.buckets import BUCKET_BYTES, Bucket, backward_timeline, buckets
from labutils.data_parallel.plain import average_gradients, check_alike
from labutils.data_parallel.replica import Replica, replicate
from labutils.data_parallel.sampler import sampler, share
