"""Pipeline parallelism: a model cut into stages, and the operations of a `Schedule` carried out on
the ranks that have them, forward, backward and weight gradients, as they stand there.
"""

from labutils.pipeline.execute import RankRun, joined, mean_cross_entropy, run
from labutils.pipeline.messages import MESSAGES, Action, actions
from labutils.pipeline.stages import PipelineStage, cut, keep, local, split, stage_flops
from labutils.pipeline.weight_gradients import Later, pay
