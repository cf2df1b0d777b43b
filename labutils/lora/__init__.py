"""LoRA, low-rank adaptation: beside a frozen linear layer an update that is trained,
y = W·x + (α/r)·B·A·x (PEFT). `adapt`, `merged`, `state`, `trainable`.

Source: Hu et al. 2106.09685.
"""

from labutils.lora.layers import Adapter, LoraLinear, SplitAdapter, wrap
from labutils.lora.predict import kept_with_adapters, trainable, training_flops
from labutils.lora.transform import (
    activate,
    adapt,
    adapted,
    merged,
    quantize_base,
    state,
    targets,
)
