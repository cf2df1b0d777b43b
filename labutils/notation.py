"""The notation table: every letter of the course, once. The book renders it, the labs print from
it, the tests look letters up in it."""

TABLE = {
    "shapes": {
        "b": "micro-batch: sequences that one rank takes through the model at once",
        "s": "sequence length in tokens",
        "h": "hidden width of the model",
        "a": "attention (query) heads",
        "g": "key–value heads; g = a without grouped-query attention",
        "d": "width of one head, h / a unless the model says otherwise",
        "f": "width of the feed-forward layer",
        "L": "transformer layers",
        "v": "vocabulary size",
        "E": "experts in a layer",
        "k": "experts that each token visits",
    },
    "parallelism": {
        "N": "number of ranks that take part",
        "N_d": "degree of data parallelism",
        "N_c": "degree of context parallelism",
        "N_t": "degree of tensor parallelism",
        "N_p": "degree of pipeline parallelism",
        "N_e": "degree of expert parallelism",
        "m": "micro-batches that flow through a pipeline in one step",
        "u": "chunks of the model that one pipeline rank holds",
        "i": "this rank",
        "F": "in a schedule: time of a micro-batch's forward pass on a stage",
        "B": "in a schedule: time of the gradient of its input",
        "W": "in a schedule: time of the gradient of its weights",
    },
    "quantities": {
        "\\Psi": "parameters of the model",
        "K": "bytes of optimizer state for a parameter; 12 for Adam in mixed precision",
        "S": "bytes in the message or tensor at hand",
        "\\lambda": "latency: seconds before the first byte of a message arrives",
        "\\mathrm{bw}": "bandwidth of a link in bytes per second",
        "r": "LoRA rank (always said in full: rank alone is a process)",
        "\\alpha": "LoRA scale; the update is (α / r)·B·A",
    },
}
"""By group: each letter, in TeX, and what it means."""


def markdown(group: str) -> str:
    """A group of the table as Markdown.

    >>> print(markdown("quantities").splitlines()[2])
    | $\\Psi$ | parameters of the model |

    Raises ValueError for an unknown group.
    """
    if group not in TABLE:
        raise ValueError(f"no group {group!r} in the notation: it has {', '.join(TABLE)}")
    rows = [f"| ${letter}$ | {meaning} |" for letter, meaning in TABLE[group].items()]
    return "\n".join(["| symbol | meaning |", "|---|---|", *rows])
