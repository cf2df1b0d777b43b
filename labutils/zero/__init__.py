"""ZeRO: the ranks of data parallelism share out what each would keep whole, level by level.

Level 1 shares the optimizer state, level 2 the gradients too, level 3 also the weights.

>>> import torch
>>> from labutils import world, zero
>>> def program(rank):
...     module = zero.shard(torch.nn.Linear(3, 3), rank.comm("dp"))
...     optimizer = torch.optim.SGD(module.parameters())
...     module(torch.ones(1, 3)).sum().backward()
...     optimizer.step()
>>> with world.World(4) as four:
...     four.run(program)
...     zero.predict_sent(12, n=4, level=3, start=True).diff(four.ledger).unexplained
[None, None, None, None]
0
"""

from labutils.zero.clipping import clip_grad_norm
from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.optimizer import Optimizer
from labutils.zero.order import step_timeline, unit_order
from labutils.zero.partition import Partition, Unit, partition
from labutils.zero.predict import largest_model, model_states, predict_held, predict_sent
from labutils.zero.reducer import Reducer
from labutils.zero.sharded import ParamGroup, Sharded, gathered, layout, shard
from labutils.zero.snapshot import SnapshotError, load, save

__all__ = [
    "FlatParameter", "Optimizer", "ParamGroup", "Partition", "Reducer", "Sharded", "SnapshotError",
    "Unit", "clip_grad_norm", "gathered", "largest_model", "layout", "load", "model_states",
    "partition", "predict_held", "predict_sent", "save", "shard", "step_timeline", "unit_order",
]  # fmt: skip
