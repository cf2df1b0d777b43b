"""Panels of pages that are no labs: from states computed when the book is built, without Python."""

import html
from dataclasses import replace

from labutils import planner, units
from labutils.config import Hardware, ModelConfig
from labutils.planner.plans import text_of
from labutils.teach import calculator
from labutils.teach.widgets import explore

CLUSTERS = {"H100": Hardware.named("H100"), "B200": Hardware.named("B200")}
TRAINED = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "mixtral-8x7b")
BATCH, SEQUENCE = 2**22, 8192  # tokens


def ranks():
    """What a rank holds, whose levels of ZeRO, axes and recomputation the reader sees shrink."""
    axes = dict(pp=[1, 8], dp=[64, 8], cp=[1, 8], tp=[1, 8], ep=[1, 8])
    return calculator.ranks("llama-3.1-70b", *TRAINED[:1], *TRAINED[2:], **axes).html


def plans():
    """The first plans of a model on a cluster, and why others lose."""

    def best(model="llama-3.1-70b", device="H100", nodes=8):
        cluster = planner.Cluster(device=CLUSTERS[device], nodes=nodes)
        trained = replace(ModelConfig.named(model), seq_len=SEQUENCE)
        job = planner.Job(model=trained, cluster=cluster, batch_tokens=BATCH)
        return table(planner.search(job))

    nodes = [1, 8, 64, 512]
    return explore(best, model=list(TRAINED), device=list(CLUSTERS), nodes=nodes).html


def table(found, top=6):
    """The first rows of a search as HTML, and of each why it is not the fastest."""
    try:
        fastest = found.fastest
    except ValueError as error:
        return f"<p>{html.escape(str(error))}</p>"
    cluster = found.job.cluster
    heads = ("plan", "step, s", "GB", "MFU", "why it is not the fastest")
    rows = [
        (text_of(one.plan), f"{one.seconds:.2f}", f"{one.peak / 1e9:.0f}", f"{one.mfu():.0%}",
         "" if one.plan == fastest.plan else planner.why(found, one.plan))
        for one in found.best(top)
    ]  # fmt: skip
    cells = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    said = (
        f"{len(found):,} legal plans on {cluster.gpus:,} GPUs; {found.fits.sum():,} allocate at "
        f"most {units.text(cluster.room)} on each; {len(found.ties):,} are within 3 % of the "
        "fastest."
    )
    return f"<p>{said}</p><table class='dataframe'><tr>{cells}</tr>{body}</table>"


def memory():
    """The calculator of lab 03."""
    names = ("llama-3.1-8b", "gpt2-xl", "llama-3.1-70b", "llama-3.1-405b")
    return calculator.Calculator(*names)._repr_html_()


PANELS = {"ranks": ranks, "plans": plans, "memory": memory}
