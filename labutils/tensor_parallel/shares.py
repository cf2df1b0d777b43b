"""Which part of what a layer keeps tensor and sequence parallelism leave a rank, to be drawn."""

from dataclasses import replace

from labutils import anatomy
from labutils.config import ModelConfig

_SHORT = {
    "residual": "norm",
    "queries": "q",
    "keys": "k",
    "values": "v",
    "output": "heads",
    "inner": "GELU",
}


def layer_shares(model: ModelConfig, sequence: bool = False) -> list[tuple[str, float, str]]:
    """What a layer of the GPT-2 kind keeps, in the order of its forward pass: name, width in h, and
    along which of "s" and "h" tensor parallelism cuts it, if it does; of width 0, what travels."""
    enter, leave = ("gather", "scatter") if sequence else ("f", "g")
    travels = {"query": enter, "up": enter, "heads": leave, "down": leave}
    sizes, found = anatomy.letters(model), []
    for at, tensor in anatomy.kept(replace(model, num_layers=1), anatomy.Policy(attention="sdpa")):
        part = at.rpartition(".")[2]
        if not at.startswith("blocks") or not tensor.dims.startswith(("b s", " b s")):
            continue
        name, (_, _, *width) = _SHORT.get(tensor.name, part), tensor.dims.split()
        cut = "h" if set(width) & set(anatomy.SPLITS["tp"]) else "s" * sequence
        found.append((name, anatomy.size("".join(width), sizes) / model.d_model, cut))
        found += [(travels[name], 0.0, "")] if name in travels else []
    return found
