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

    Exact for `model.GPT` on a CPU; tokens and targets are tensors of their own. With adapters, all
    else being frozen: by SDPA, without dropout, checkpointing, autocast and experts.

    Raises TypeError or ValueError for what has no formula.
    Source: read off `torch.autograd.graph.saved_tensors_hooks`; a test compares it byte by byte
    over random configurations.
    """
    require_formula(model, train, adapters=True)
    compute = WIDTHS[train.precision]
    how = anatomy.Policy(
        compute=compute,
        stream=FP32_BYTES if train.autocast else compute,
        attention=train.attention,
        checkpointing=train.checkpointing,
    )
    sizes, rows = anatomy.letters(model) | {"b": train.micro_batch}, anatomy.kept(model, how)
    if train.adapters is not None:
        from labutils import lora  # which loads torch

        sizes["r"] = train.adapters.rank
        rows = lora.kept_with_adapters(model, train.adapters, how)
    lines = []
    for name, kept in rows:
        nbytes = anatomy.size(kept.dims, sizes) * kept.itemsize
        lines.append(Line(name, nbytes, component="activations", note=kept.note))
    return Ledger(lines)
