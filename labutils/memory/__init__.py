"""What a training step holds in memory on one device, predicted from the configuration alone: saved
activations, the peak. Of model states, and of any mesh, see `predict`.

Predictions have the type and the names of `measure`, so that
`activations(...).diff(measure.saved_activations(...))` can end with 0.
"""

from labutils.memory.activations import activations
from labutils.memory.allocator import Allocator, OutOfMemory, replay
from labutils.memory.moments import Peak, history, peak
from labutils.memory.published import beyond_the_paper, korthikanti
from labutils.memory.states import step_peak
