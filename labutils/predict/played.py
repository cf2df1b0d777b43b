"""A step in time: the operations of a schedule, what each of them computes, and what it sends."""

import copy
from collections.abc import Iterable
from dataclasses import replace

from labutils import anatomy, schedule
from labutils.clock import Played
from labutils.config import Hardware, Link, ModelConfig, TrainConfig
from labutils.predict import traffic
from labutils.predict.inventory import OTHERS, Here, Placed

Seconds = dict[str, float]  # by what they go to


def check_timed(here: Here) -> None:
    """Nothing, or a ValueError for a step that these terms cannot put in time, with a remedy."""
    train, tp = here.train, here.mesh.tp
    reasons = {
        f"zero={train.zero} sends beside computing: set zero=1": train.zero > 1,
        "not every weight has a gradient: train them all": train.adapters or train.frozen,
        f"no rate is known for fp8={train.fp8!r}: set fp8=None": train.fp8,
        "no rate is known for precision='fp64': set 'bf16'": train.precision == "fp64",
        f"experts are whole on tp={tp} ranks: set tp=1": tp > 1 and here.model.num_experts > 1,
    }
    for reason, so in reasons.items():
        if so:
            raise ValueError(f"no time line, {reason}")


def step_of(heres: list[Here], device: Hardware) -> Played:
    """A step of the ranks of a pipeline, from what each of them has."""
    work = {stage.index: _work(here, stage, device) for here in heres for stage in here.stages}
    here, mesh = heres[0], heres[0].mesh
    link = device.ring(mesh.pp, device.node if mesh.size > device.node else 1)
    message = here.own * here.model.d_model * here.stream
    return schedule.whole_step(
        here.plan,
        [work[index] for index in range(here.plan.stages)],
        send=link.latency + message / link.bandwidth,
        last=[_after(each, link, device) for each in heres],
    )


def _after(here: Here, link: Link, device: Hardware) -> Seconds:
    """What is sent when all passes are through: gradients of what two stages have, and of replicas,
    whose weights are gathered."""
    twice = sum(line.amount for line in traffic.of_stages(here) if line.name == "gradients")
    sent = {"pp": link.latency + twice / link.bandwidth} if twice else {}
    return sent | _seconds(here, traffic.of_replicas(here), device)


def _work(here: Here, stage: Placed, device: Hardware) -> dict[str, Seconds]:
    """Of each operation of a stage the seconds."""
    train = here.train
    flops = anatomy.token_flops(_layer(here))
    fused = train.attention != "plain"  # skips what is masked, and finds scores again backward
    core = flops.pop("blocks.*.attention") * stage.layers / (1 + fused)
    core *= here.tokens / device.rate("attention", train.precision)
    each = here.tokens / device.rate("products", train.precision)
    head = flops.pop("head") * stage.heads * each
    layers = sum(flops.values()) * stage.layers * each
    # What is computed again ends before a last product, whose output nothing needs: softmax·v where
    # it is one of its own, and that of a dense layer.
    again = {"none": 0.0, "selective": core if fused else core / 2, "full": core + layers}
    last = flops.get("blocks.*.feed_forward.down", 0) * stage.layers * each
    again["full"] -= 0 if here.model.dropout else last
    gradients = layers + head  # of inputs; those of weights take as long
    B = gradients * (1 if here.plan.split else 2) + (2.5 if fused else 2) * core
    once = _sent(here, stage, replace(train, checkpointing="none"), device)
    sends = _sent(here, stage, train, device)
    F_sends = {axis: F for axis, (F, _) in once.items()}
    B_sends = {axis: F + B - F_sends[axis] for axis, (F, B) in sends.items()}
    return {
        "F": {"forward": layers + head + core, **F_sends},
        "B": {"backward": B + again[train.checkpointing], **B_sends},
        "W": {"backward": gradients},
    }


def _layer(here: Here) -> ModelConfig:
    """A model of one layer, as a rank of tp has it."""
    from labutils import tensor_parallel

    return tensor_parallel.rank_config(replace(here.model, num_layers=1), here.mesh.tp)


def _sent(
    here: Here, stage: Placed, train: TrainConfig, device: Hardware
) -> dict[str, tuple[float, float]]:
    """By axis the seconds of what a stage sends in a pass forward, and in one backward."""
    one = copy.copy(here)
    one.stages, one.train = [stage], train
    vars(one).pop("weights", None)  # which are now those of this stage
    ways: tuple[list, list] = ([], [])
    for call in traffic.of_passes(one):
        ways["backward" in call.name or call.name == "gradients"].append(call)
    F, B = (_seconds(one, calls, device) for calls in ways)
    runs = stage.runs
    return {axis: (F.get(axis, 0.0) / runs, B.get(axis, 0.0) / runs) for axis in F | B}


def _seconds(here: Here, calls: Iterable[traffic.Call], device: Hardware) -> Seconds:
    """Seconds of collectives by axis, each on a ring of its ranks; all replicas are "dp"."""
    from labutils import collectives

    found: Seconds = {}
    for call in calls:
        ranks = here.mesh.ranks(here.rank, *call.axes)
        if (n := call.block or len(ranks)) == 1 or not call.times:
            continue
        link, nbytes = _link(device, call.op, n, ranks[1] - ranks[0]), call.numel * call.width
        if call.op == "ring":  # whose messages are whole
            each = (n - 1) * (link.latency + nbytes / link.bandwidth)
        else:
            way = "pairwise" if call.op == "all_to_all" else "ring"
            each = collectives.cost(f"{call.op}_{way}", nbytes, n, link)
        axis = "dp" if call.axes in (OTHERS, ("edp",)) else call.axes[0]
        found[axis] = found.get(axis, 0.0) + each * call.times
    return found


def _link(device: Hardware, op: str, n: int, apart: int) -> Link:
    """What carries what n ranks send that are so far apart: a collective's ring has its part of all
    links that leave a node, a message its sender's own, and of what is exchanged by all the part
    that leaves counts."""
    if op not in ("ring", "all_to_all") or n * apart <= device.node:
        return device.ring(n, apart)
    own, near = device.ring(n, device.node), max(device.node // apart, 1)
    if op == "ring":
        return own
    slowest = max((near - 1) / device.inside.bandwidth, (n - near) / own.bandwidth)
    return Link(own.latency, (n - 1) / slowest)
