"""What pictures are tested with: ledgers, traces, histories, plans and timelines of a few lines."""

import dataclasses

from labutils import checkpointing, config, floats
from labutils.checkpointing import Costs, Stage
from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment, Occupancy, Span, Timeline
from labutils.trace import Event, Trace

H100 = config.Hardware.named("H100")
TINY = dataclasses.replace(H100, name="a tiny device", memory=20_000_000)


def ledger(*lines):
    return Ledger(Line(name, amount, component=name, axis=axis) for name, amount, axis in lines)


def segment(*blocks):
    """Blocks of so many MiB: used under a name, free without one."""
    return [(size * 2**20, name) for size, name in blocks]


HOLES = [segment((5, "batch"), (5, ""), (10, "weights")), segment((20, ""))]


def sent(*amounts):
    return Ledger(Line("op", amount, axis="dp", rank=rank) for rank, amount in enumerate(amounts))


def ring(n, steps, nbytes=16_000_000, op="all_reduce_ring"):
    return Trace(
        [
            [Event(op, "dp", to=(i + 1) % n, sent=nbytes, source=(i - 1) % n, received=nbytes)]
            * steps
            for i in range(n)
        ]
    )


def star(n, nbytes=64_000_000):
    hub = [Event("naive", "dp", source=k, received=nbytes) for k in range(1, n)] + [
        Event("naive", "dp", to=k, sent=nbytes) for k in range(1, n)
    ]
    return Trace(
        [hub]
        + [
            [
                Event("naive", "dp", to=0, sent=nbytes),
                Event("naive", "dp", source=0, received=nbytes),
            ]
        ]
        * (n - 1)
    )


def two_steps():
    """A history with the shape of two training steps: activations come and go, optimizer state comes and stays."""
    moments, optimizer = [Moment("start", "", ledger(("weights", 40, "")))], 0
    for _ in range(2):
        for phase, heights in (
            ("forward", range(0, 90, 10)),
            ("backward", range(90, -1, -5)),
            ("optimizer", [0] * 12),
        ):
            optimizer = 80 if phase == "optimizer" else optimizer
            for height in heights:
                parts = [
                    ("weights", 40, ""),
                    ("optimizer", optimizer, ""),
                    ("activations", height, ""),
                    ("buffers", height % 20, ""),
                ]
                moments.append(
                    Moment(
                        phase,
                        "mm",
                        ledger(*((name, amount * 10**5, axis) for name, amount, axis in parts)),
                    )
                )
    return History(moments)


SIZES = [2**k for k in range(8, 31)]
LINK = config.Link(latency=25e-6, bandwidth=25e9)


def seconds(nbytes):
    return LINK.latency + nbytes / LINK.bandwidth


COSTS = {
    "naive": [14 * seconds(size) for size in SIZES],
    "ring": [14 * seconds(size / 8) for size in SIZES],
    "tree": [6 * seconds(size) for size in SIZES],
    "halving_doubling": [6 * LINK.latency + 1.8 * size / LINK.bandwidth for size in SIZES],
}
PARAMETERS = 1_557_611_200
FORMATS = [
    floats.FP32,
    floats.TF32,
    floats.BF16,
    floats.FP16,
    floats.E5M2,
    floats.E4M3,
    floats.E2M3,
    floats.E2M1,
]
EASY = dict(xlabel="step", ylabel="loss (nats per token)")

CHAIN = Costs([Stage(3, 100 + 10 * i, 400) for i in range(6)], input=100)
PLANS = [
    checkpointing.segments(6, 1),
    checkpointing.segments(6, 2),
    checkpointing.keep_nothing(6),
    checkpointing.plan(CHAIN, 1200),
]
MARKS = {
    plan.name: (run.peak, run.cost)
    for plan in PLANS
    for run in [plan.on(CHAIN)]
}
TIMELINES = {plan.name: plan.timeline for plan in PLANS}
LOADS = Ledger([Line("Q", 3_000_000, component="load"), Line("O", 1_000_000, component="store")])


def timeline(late, ranks=2):
    """Two layers of 10 ms, and a reduction of 5 ms each: as soon as it can, or after the backward pass."""
    spans = []
    for rank in range(ranks):
        for k, name in enumerate(("layer 1", "layer 0")):
            ready = 0.02 + 0.005 * k if late else 0.01 * (k + 1)
            spans.append(Span(rank, "backward", name, 0.01 * k, 0.01 * (k + 1)))
            spans.append(Span(rank, "reduce", f"bucket {k}", ready, ready + 0.005))
    return Timeline(tuple(spans))


def occupancy(level, rank, ranks=4):
    """What a rank holds at a level of ZeRO: whole units come and go at level 3."""
    own = 12 * rank, 12 * rank + 12
    whole = 0, 12 * ranks
    spans = [
        Span(rank, "weights", "", 0, 30, own if level == 3 else whole),
        Span(rank, "gradients", "", 10, 30, own if level > 1 else whole),
        Span(rank, "optimizer", "", 0, 30, own),
    ]
    spans += [Span(rank, "weights", "", 8, 16, (0, 24))] * (level == 3)
    itemsizes = {"weights": 4, "gradients": 4, "optimizer": 8}
    phases = {"forward": 0, "backward": 10, "step": 22}
    return Occupancy(tuple(spans), 12 * ranks, itemsizes, phases, 30)
