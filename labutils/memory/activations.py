"""Activations: every tensor that autograd keeps for the backward pass, in the order of the forward
pass. Which these are stands in `anatomy`."""

from labutils import anatomy
from labutils.anatomy import FP32_BYTES, WIDTHS
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory.states import require_formula


def activations(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes that autograd keeps for the backward pass of one micro-batch: a line for each saved
    tensor, under the module that saves it.

    Exact for `model.GPT` on a CPU; tokens and targets are tensors of their own.

    Source: read off `torch.autograd.graph.saved_tensors_hooks`; a test compares it byte by byte
    over random configurations.
    """
    require_formula(model, train)
    compute = WIDTHS[train.precision]
    how = anatomy.Policy(
        compute=compute,
        stream=FP32_BYTES if train.autocast else compute,
        attention=train.attention,
        checkpointing=train.checkpointing,
    )
    sizes = anatomy.letters(model) | {"b": train.micro_batch}
    lines = []
    for name, kept in anatomy.kept(model, how):
        nbytes = anatomy.size(kept.dims, sizes) * kept.itemsize
        lines.append(Line(name, nbytes, component="activations", note=kept.note))
    return Ledger(lines)
