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
...     four.ledger.only(rank=0).by("name")  # of 48 bytes three quarters, for each collective
[None, None, None, None]
{'broadcast': 96, 'all_gather': 72, 'reduce_scatter': 36}
"""

from labutils.zero.clipping import clip_grad_norm
from labutils.zero.flat_parameter import FlatParameter
from labutils.zero.optimizer import Optimizer
from labutils.zero.order import step_timeline, unit_order
from labutils.zero.partition import Partition, partition
from labutils.zero.predict import model_states
from labutils.zero.reducer import Reducer
from labutils.zero.sharded import ParamGroup, Sharded, gathered, shard
from labutils.zero.snapshot import SnapshotError, load, save
