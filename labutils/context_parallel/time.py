"""When the ranks of a ring compute and when they send, if each step takes what its work takes."""

from labutils import units
from labutils.clock import Played, Task, play
from labutils.config import Link, ModelConfig
from labutils.context_parallel.sequence import layout


def least_tokens(
    flops: float, bandwidth: float, *, groups: float = 1, causal: bool = True
) -> float:
    """Tokens that a rank must have so that a step of the ring computes as long as it sends in bf16.

    flops, bandwidth: of a rank, per second
    groups: key–value heads by heads, g/a
    causal: in a zig-zag, where a step computes half of what it does without a mask

    >>> round(least_tokens(312e12, 300e9, causal=False))
    1040

    Source: Liu et al. 2310.01889, section 3, without a mask: c ≥ F/B.
    """
    flops, bandwidth = units.positive(flops, "flops"), units.positive(bandwidth, "bandwidth")
    return 2 * units.positive(groups, "groups") * flops / bandwidth / (1 if causal else 2)


def ring_timeline(
    model: ModelConfig,
    n: int,
    *,
    flops: float,
    link: Link,
    kind: str = "zigzag",
    overlap: bool = True,
) -> Played:
    """The forward pass of ring attention in one layer, of one sequence on n ranks, in bf16.

    As in `ring_attention`, a step begins when the keys and values of the step before have come and
    gone, and a message when both its ranks have begun the step.

    flops: what a rank computes per second
    link: what carries the messages of each rank to the next
    kind: the layout of the tokens, "contiguous" or "zigzag"
    overlap: False computes when the message of the step is through

    >>> sizes = dict(num_layers=1, d_model=8, num_heads=1, d_ff=8)
    >>> layer = ModelConfig(**sizes, vocab_size=8, seq_len=8)
    >>> ring_timeline(layer, 2, flops=32.0, link=Link(0, 128)).makespan
    18.0
    """
    units.instance(model, ModelConfig, "ring_timeline")
    units.instance(link, Link, "ring_timeline")
    flops, n = units.positive(flops, "flops"), units.whole(n, "n", 1)
    units.writable(n * n, f"steps of a ring of n={n} are", "take fewer ranks", most=10**6)
    a, g, d = model.letters("a g d")
    whole, tasks = layout(model.seq_len, n, kind), list[Task]()
    per_pair = 4 * a * d / flops
    message = 2 * 2 * g * d * (model.seq_len // n)  # keys and values, 2 bytes for each number
    hop = link.latency + message / link.bandwidth
    met = [whole.met(rank) for rank in range(n)]
    begun: list[tuple[Task, ...]] = [()] * n  # what must be over before each rank begins a step
    for step in range(n):
        gone = begun
        if step < n - 1:
            both = [(*begun[i], *begun[(i + 1) % n]) for i in range(n)]
            name = f"keys {step + 1}"
            tasks += [Task(("link", i), hop, both[i], "pass", name, i) for i in range(n)]
            gone = [(passed,) for passed in tasks[-n:]]
        arrived = [(*gone[i], *gone[i - 1]) for i in range(n)]
        for i, needs in enumerate(begun if overlap else arrived):
            kind, name = "forward" * bool(met[i][step]), str((i - step) % n)
            tasks.append(Task(i, met[i][step] * per_pair, needs, kind, name, i))
        begun = [(done, *arrived[i]) for i, done in enumerate(tasks[-n:])]
    return play(tasks)
