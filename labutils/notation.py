"""The notation table: every letter of the course, once. The book renders it, the labs print from
it, the tests look letters up in it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """One letter of the course: how it is written in text and in TeX, what it means, and the group
    of the table it stands in."""

    letter: str
    tex: str
    meaning: str
    group: str


_TABLE = {
    "shapes": """
        b   | b    | micro-batch: sequences that one rank takes through the model at once
        s   | s    | sequence length in tokens
        h   | h    | hidden width of the model
        a   | a    | attention (query) heads
        g   | g    | key–value heads; g = a without grouped-query attention
        d   | d    | width of one head, h / a unless the model says otherwise
        f   | f    | width of the feed-forward layer
        L   | L    | transformer layers
        v   | v    | vocabulary size
        E   | E    | experts in a layer
        k   | k    | experts that each token visits
    """,
    "parallelism": """
        N   | N    | number of ranks that take part
        N_d | N_d  | degree of data parallelism
        N_c | N_c  | degree of context parallelism
        N_t | N_t  | degree of tensor parallelism
        N_p | N_p  | degree of pipeline parallelism
        N_e | N_e  | degree of expert parallelism
        m   | m    | micro-batches that flow through a pipeline in one step
        u   | u    | chunks of the model that one pipeline rank holds
        i   | i    | this rank
    """,
    "quantities": """
        Ψ   | \\Psi | parameters of the model
        S   | S    | bytes in the message or tensor at hand
        λ   | \\lambda | latency: seconds before the first byte of a message arrives
        bw  | \\mathrm{bw} | bandwidth of a link in bytes per second
        r   | r    | LoRA rank (always said in full: rank alone is a process)
        α   | \\alpha | LoRA scale; the update is (α / r)·B·A
    """,
}

TABLE: tuple[Symbol, ...] = tuple(
    Symbol(*(cell.strip() for cell in row.split("|")), group)
    for group, rows in _TABLE.items()
    for row in rows.strip().splitlines()
)


def symbol(letter: str) -> Symbol:
    """The table's entry for `letter`.

    >>> symbol("h").meaning
    'hidden width of the model'
    """
    for entry in TABLE:
        if entry.letter == letter:
            return entry
    raise ValueError(
        f"no symbol {letter!r} in the notation: it has {' '.join(entry.letter for entry in TABLE)}"
    )


def markdown(*groups: str) -> str:
    """The table, or the named groups of it, as Markdown.

    >>> print(markdown("quantities").splitlines()[2])
    | $\\Psi$ | parameters of the model |
    """
    known = list(_TABLE)
    for group in groups:
        if group not in known:
            raise ValueError(f"no group {group!r} in the notation: it has {', '.join(known)}")
    rows = [
        f"| ${entry.tex}$ | {entry.meaning} |"
        for entry in TABLE
        if entry.group in (groups or known)
    ]
    return "\n".join(["| symbol | meaning |", "|---|---|", *rows])
