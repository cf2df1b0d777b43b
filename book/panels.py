"""Panels of pages that are no labs: from states computed when the book is built, without Python."""

import functools
import html
from dataclasses import replace

from labutils import planner, units
from labutils.config import Hardware, ModelConfig
from labutils.planner import Plan, climb, plans
from labutils.planner.plans import text_of
from labutils.teach import calculator
from labutils.teach.widgets import explore, log

CLUSTERS = {
    f"{8 * nodes} {device}": (device, nodes)
    for device, sizes in (("H100", (1, 8, 64)), ("B200", (8, 64))) for nodes in sizes
}  # fmt: skip
TRAINED = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "mixtral-8x7b")
BATCH, SEQUENCE = 2**22, 8192  # tokens


def ranks():
    """What a rank holds, whose levels of ZeRO, axes and recomputation the reader sees shrink."""
    axes = dict(pp=[1, 8], dp=[64, 8], cp=[1, 8], tp=[1, 8], ep=[1, 8])
    return calculator.ranks("llama-3.1-70b", *TRAINED[:1], *TRAINED[2:], **axes).html


def plan():
    """A reader's plan of a model on a cluster, and the first plans of the search below it."""
    axes = {axis: log(1, most) for axis, most in (("tp", 8), ("cp", 8), ("pp", 16))}
    rest = dict(ep=[1, 8], ZeRO=[1, 3], computed_again=["nothing", "everything"])
    made = explore(yours, states=10**5, model=list(TRAINED), cluster=list(CLUSTERS), **axes, **rest)
    return made.html


@functools.cache
def searched(model, cluster):
    """All legal plans, and a table of the first of them."""
    device, nodes = CLUSTERS[cluster]
    hardware = planner.Cluster(device=Hardware.named(device), nodes=nodes)
    trained = replace(ModelConfig.named(model), seq_len=SEQUENCE)
    found = planner.search(planner.Job(model=trained, cluster=hardware, batch_tokens=BATCH))
    return found, table(found)


def yours(model="llama-3.1-70b", cluster="64 H100", tp=8, cp=1, pp=2, ep=1, ZeRO=1,
          computed_again="nothing"):  # fmt: skip
    """What a plan takes and holds, and why it is not the fastest; dp is what its axes leave."""
    found, others = searched(model, cluster)
    job, dp = found.job, max(1, found.job.cluster.gpus // (tp * cp * pp))
    again = 2 * (computed_again == "everything")
    chosen = Plan(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, zero=ZeRO, recompute=again)
    return said(found, climb.completed(job, chosen)) + others


@functools.cache
def said(found, plan):
    """A plan of a search as HTML: seconds, bytes of the fullest rank, and the reason."""
    if reason := plans.illegal(found.job, plan):
        return f"<p><b>{text_of(plan)}</b></p><p>illegal: {html.escape(reason)}</p>"
    mine, room = planner.estimate(found.job, plan), found.job.cluster.room
    held = planner.ledger(found.job.model, plan, mine.fullest).by("component")
    spent = largest(mine.parts, "{:.2f} s {}")
    bytes_ = largest(held, "{:.0f} GB {}", 1e9)
    return (
        f"<p><b>{text_of(plan)}</b></p><p><b>{mine.seconds:.2f} s</b> a step: {spent}.<br>"
        f"<b>{mine.peak / 1e9:.0f} of {room / 1e9:.0f} GB</b> on the fullest GPU: {bytes_}.</p>"
        f"<p>{html.escape(planner.why(found, plan))}</p>"
    )


def largest(amounts, text, unit=1):
    """The four largest of some amounts by name, in words."""
    rows = sorted(amounts.items(), key=lambda row: -row[1])[:4]
    return ", ".join(text.format(amount / unit, name) for name, amount in rows)


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
    return f"<p>{said}</p><table class='dataframe plans'><tr>{cells}</tr>{body}</table>"


def memory():
    """The calculator of lab 03."""
    names = ("llama-3.1-8b", "gpt2-xl", "llama-3.1-70b", "llama-3.1-405b")
    return calculator.Calculator(*names)._repr_html_()


PANELS = {"ranks": ranks, "plan": plan, "memory": memory}
