"""Where a plan runs: nodes of alike devices, and the links between them."""

from dataclasses import dataclass
from typing import Any

from labutils import units
from labutils.config import Hardware
from labutils.planner.work import Numbers, Plan, least, most, where

_FROM_DEVICE: Any = None  # the default of a field that is worked out of another


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` of `gpus_per_node` devices.

    between: bytes per second that each device sends out of its node (50 GB/s is 400 Gbit/s); its
        share of the network links in data/hardware.csv unless given
    reserve: the share of a device's memory that a plan leaves alone. Allocators reserve more than
        is allocated (2.8 to 9.3 % in data/measured_b200.csv), and contexts and NCCL come on top
    price: of a device per hour, in any currency; 0: not known
    """

    device: Hardware
    nodes: int
    gpus_per_node: int = 8
    between: float = _FROM_DEVICE
    reserve: float = 0.10
    price: float = 0.0

    def __post_init__(self) -> None:
        units.instance(self.device, Hardware, "Cluster")
        units.whole_fields(self, "nodes", "gpus_per_node")
        if self.between is None:
            wire = self.device.network.bandwidth / self.device.reached["link"]
            object.__setattr__(self, "between", wire * self.device.network_links / self.device.node)
        units.positive_fields(self, "between")
        units.positive_fields(self, "price", or_zero=True)
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve} is a share of the memory: give 0 ≤ … < 1")

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.nodes * self.gpus_per_node

    @property
    def room(self) -> float:
        """Bytes that a plan may allocate on a device."""
        return self.device.memory * (1 - self.reserve)

    def slowness(self, p: Plan, whole_heads: Numbers) -> dict[str, Numbers]:
        """By axis: how many times longer a byte takes than on links within a node.

        A collective's ring that leaves its node takes all the links that the node has for it; a
        message, also one of ring attention (where there are no `whole_heads` for Ulysses), takes
        its sender's. Of what is exchanged by all, the part that leaves counts. Neighbours are in
        the order tp, cp, dp, pp; "edp" are ranks that have an expert alike, each ep-th one.
        """
        apart = self.device.link_bandwidth / self.between
        inside, G = p.tp * p.cp, self.gpus_per_node

        def ring(inner: Numbers, n: Numbers) -> Numbers:
            slow = most(1.0, apart * least(inner, G) / G)
            return where(inner * n > G, slow, 1.0)

        def exchange(inner: Numbers, n: Numbers) -> Numbers:
            near = least(most(G // inner, 1), n)
            others = most(n - 1, 1)
            return where(n > 1, most(near - 1, (n - near) * apart) / others, 1.0)

        far = p.pp * inside * p.dp > G
        return {
            "tp": ring(1 + 0 * p.tp, p.tp),
            "cp": where(whole_heads, exchange(p.tp, p.cp), where(inside > G, apart, 1.0)),
            "ep": exchange(p.tp, p.ep),
            "pp": where(far, max(1.0, apart), 1.0),
            "dp": ring(p.tp, p.replicas),
            "edp": ring(p.ep, p.replicas * p.tp / p.ep),
        }
