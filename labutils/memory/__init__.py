"""What a training step holds in memory, predicted from the configuration alone: model states, saved activations, the peak.

Predictions have the type and the names of `measure`, so that `activations(...).diff(measure.saved_activations(...))` can end with 0.
"""

from labutils.memory.activations import activations
from labutils.memory.allocator import (
    Allocator,
    OutOfMemory,
    Request,
    replay,
    trace_of,
    trace_of_snapshot,
)
from labutils.memory.peak import Peak, formula, history, peak_bytes, predict
from labutils.memory.published import beyond_the_paper, korthikanti
from labutils.memory.states import first_failing_step, model_states

__all__ = [
    "Allocator",
    "OutOfMemory",
    "Peak",
    "Request",
    "activations",
    "beyond_the_paper",
    "first_failing_step",
    "formula",
    "history",
    "korthikanti",
    "model_states",
    "peak_bytes",
    "predict",
    "replay",
    "trace_of",
    "trace_of_snapshot",
]
