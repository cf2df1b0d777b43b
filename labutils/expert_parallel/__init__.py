"""Expert parallelism: the experts of a layer are spread over ranks, and tokens travel to those that
their router chose (GShard's dispatch and combine, Megatron's all-to-all token dispatcher).
"""

# isort: off
from labutils.expert_parallel.routing import Routing, balance_loss, capacity, route
from labutils.expert_parallel.layer import (
    ExpertParallel, auxiliary_loss, combine, dispatch, expert_parameters,
    reduce_gradients, spread_experts, update_bias,
)  # fmt: skip
from labutils.expert_parallel.routed import (
    balanced, routed_sent, routed_timeline,
)  # fmt: skip
