"""Our ring all-reduce beside gloo's, on four processes of this machine: ratios of bandwidth.

    python benchmarks/all_reduce.py

The two are measured in turn, in one run, and both work in place. A ratio above 1 means that the
ring of lab 07 is faster. At last the ring runs between two "machines" of two ranks each, as
torchrun would start them: its bytes pass over TCP, and what the ranks counted is held against what
the operating system saw on the loopback interface (whatever else uses it meanwhile is counted too).
"""

import os
import socket
import subprocess
import sys

import torch
from _side_by_side import Times, interleave, owe, report, slowest

from labutils import collectives, units
from labutils.world import World

RANKS = 4
AIM = 1.0
WIRE = 64 * units.MIB
SIZES = [4 * units.KIB, 64 * units.KIB, units.MIB, 4 * units.MIB, 16 * units.MIB, 64 * units.MIB]


def race(rank, nbytes: int, rounds: int) -> dict[str, Times]:
    """Times of our ring and of gloo's, on this rank."""
    import torch.distributed as dist

    comm, x = rank.comm("dp"), torch.zeros(nbytes // 4)
    calls = {
        "ours": lambda: collectives.all_reduce_ring(x, comm, out=x),
        "gloo": lambda: dist.all_reduce(x, group=comm.group),
    }
    for call in (*calls.values(), *calls.values()):
        call()  # the first ones pay for pages that nobody has touched yet
    return interleave(calls, rounds, group=comm.group)


def on_the_wire(rank) -> int:
    """Bytes that the loopback interface carried during one all-reduce."""
    comm, x = rank.comm("dp"), torch.zeros(WIRE // 4)
    collectives.all_reduce_ring(x, comm, out=x)
    comm.barrier()
    before = loopback()
    collectives.all_reduce_ring(x, comm, out=x)
    comm.barrier()
    return loopback() - before


def loopback() -> int:
    with open("/proc/net/dev", encoding="ascii") as file:
        return int(
            next(line for line in file if line.strip().startswith("lo:")).split(":")[1].split()[0]
        )


def two_machines() -> None:
    """The same ring on ranks that take each other for two machines, as torchrun would start them
    there: their messages take the network."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS // 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "ring",
    }
    ranks = []
    for rank in range(RANKS):
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank % (RANKS // 2),
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environment = {**os.environ, **{name: str(value) for name, value in (job | own).items()}}
        ranks.append(subprocess.Popen([sys.executable, __file__, "wire"], env=environment))
    try:
        if any([rank.wait(timeout=120) for rank in ranks]):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()


def wire() -> None:
    """On a rank of that job: what all ranks count beside what the interface carries."""
    with World(RANKS) as world:
        carried = max(world.run(on_the_wire))
        if int(os.environ["RANK"]) == 0:
            counted = collectives.sent("all_reduce_ring", nbytes=WIRE, n=RANKS).total
            what = f"one all-reduce of {units.text(WIRE, binary=True)} on {RANKS} ranks"
            print(f"between two machines, {what}: counted {counted:,} B,")
            print(f"the loopback interface carried {carried:,} B ({carried / counted - 1:+.2%})")


def main() -> None:
    """Print the table."""
    ratio = "ratio of bandwidths, ours / gloo, by medians (by minima)"
    print(f"all-reduce of fp32 on {RANKS} processes: {ratio}")
    owe("gloo", {units.text(nbytes, binary=True): AIM for nbytes in SIZES})
    with World(RANKS, engine="processes") as world:
        for nbytes in SIZES:
            rounds = max(9, min(201, 400 * units.MIB // max(nbytes, units.MIB)))
            times = slowest(world.run(race, nbytes, rounds))
            ours, gloo = times["ours"], times["gloo"]
            report(units.text(nbytes, binary=True), "gloo", ours, gloo)
            rate = collectives.busbw("all_reduce", nbytes, ours.median / 1e3, RANKS)
            mine, theirs = (units.text(each.median / 1e3, "s") for each in (ours, gloo))
            print(
                f"{units.text(nbytes, binary=True):>9}  {gloo.ratio(ours)}   "
                f"ours {mine:>8}, {units.text(rate, 'B/s')} bus; gloo {theirs:>8}"
            )
    if sys.platform == "linux":
        two_machines()


if __name__ == "__main__":
    wire() if "wire" in sys.argv else main()
