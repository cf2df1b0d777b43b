"""ZeRO: the ranks of data parallelism share out what each of them would keep whole, level by level: optimizer state, gradients, weights.

>>> import torch
>>> from labutils import world, zero
>>> def program(rank):
...     model = torch.nn.Linear(3, 3)
...     optimizer = zero.Optimizer(model.parameters(), rank.comm("dp"), torch.optim.SGD, level=2)
...     model(torch.ones(1, 3)).sum().backward()
...     optimizer.step()
>>> with world.World(4) as four:
...     four.run(program)
...     zero.predict_sent(12, n=4, level=2, start=True).diff(four.ledger).unexplained
[None, None, None, None]
0
"""

from labutils.zero.flat import Flat
from labutils.zero.holding import held, history
from labutils.zero.occupancy import occupancy
from labutils.zero.optimizer import Optimizer
from labutils.zero.order import unit_order
from labutils.zero.partition import BUCKET_BYTES, Partition, Unit, buckets, partition
from labutils.zero.predict import largest_model, model_states, predict_held, predict_sent
from labutils.zero.sharded import Sharded, shard
from labutils.zero.snapshot import SnapshotError

__all__ = [
    "BUCKET_BYTES", "Flat", "Optimizer", "Partition", "Sharded", "SnapshotError", "Unit", "buckets", "held", "history",
    "largest_model", "model_states", "occupancy", "partition", "predict_held", "predict_sent", "shard", "unit_order",
]  # fmt: skip
