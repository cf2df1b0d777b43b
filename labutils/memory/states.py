"""Model states: weights, gradients and what the optimizer keeps."""

from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line


def model_states(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes of weights, gradients and optimizer state after an optimizer step, under the names of `measure.model_states`.

    Adam keeps two moments in fp32; with half weights an fp32 master copy goes along, and fp32 gradients if asked for.

    >>> model_states(ModelConfig.named("gpt2-xl"), TrainConfig(micro_batch=1, global_batch=1)).only(component="weights").total
    3115222400

    Source: ZeRO 1910.02054, section 3.1: 2Ψ + 2Ψ + 12Ψ.
    """
    half = train.precision != "fp32" and not train.autocast
    parameters, size = model.num_params, 2 if half else 4
    moments = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}[train.optimizer]
    lines = [Line("weights", parameters * size, component="weights")]
    if not (half and train.fp32_gradients == "only"):
        lines.append(Line("gradients", parameters * size, component="gradients"))
    if half and train.fp32_gradients:
        lines.append(Line("fp32 gradients", parameters * 4, component="gradients"))
    if half:
        lines.append(Line("master weights", parameters * 4, component="optimizer"))
    lines += [Line(name, parameters * 4, component="optimizer") for name in moments]
    if len(moments) == 2:
        lines.append(Line("step", model.num_tensors * 4, component="optimizer"))  # Adam counts its steps once for each tensor
    if model.positions == "rope":
        lines.append(Line("buffers", 2 * model.seq_len * (model.d_head // 2) * size, component="buffers"))  # tables of cos and sin
    return Ledger(lines)
