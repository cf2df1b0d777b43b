"""What a training step holds in memory, predicted from the configuration alone: model states, saved
activations, the peak.

Predictions have the type and the names of `measure`, so that
`activations(...).diff(measure.saved_activations(...))` can end with 0.
"""

from labutils.memory.activations import activations
from labutils.memory.allocator import Allocator, OutOfMemory, replay
from labutils.memory.peak import Peak, history, peak_bytes, predict
from labutils.memory.published import beyond_the_paper, korthikanti
from labutils.memory.states import model_states, step_peak
