"""Order the sends, write the ring, grow a tree, and the test that a published ring lacked."""

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labutils import collectives, units, world
from labutils.teach.exercises import Exercise, Failed, Property, _ranks
from labutils.trace import Trace

# ── running an attempt ───────────────────────────────────────────────────────────────────────────

_CIRCLE = (
    "A send returns when the other side receives. If all ranks send first, nobody is left to "
    "receive: let some receive first, or use send_recv."
)
_BUFFER = (
    "What one side sends the other must receive at that point, in the same size and dtype: "
    "torch.empty_like makes such a buffer."
)
_SIZES = (
    f"{_BUFFER} Pieces may differ by one element: take the sizes from collectives.shares(n, N)."
)


def _run(
    attempt: Callable, inputs: list[Tensor], mismatch: str = _BUFFER
) -> tuple[list[Tensor], list[Tensor]]:
    """What the attempt returned on every rank, and what became of its inputs."""

    def program(rank):
        x = inputs[rank.rank].clone()
        return attempt(x, rank.comm("dp")), x

    n, length = len(inputs), inputs[0].numel()
    case = f"{_ranks.count(n)}, {length} element{'s' * (length != 1)}"
    pairs = _ranks.run(n, case, program, _CIRCLE, mismatch=mismatch)
    results = [result for result, _ in pairs]
    for rank, result in enumerate(results):
        wanted = tuple(inputs[rank].shape)
        if not isinstance(result, Tensor) or result.shape != wanted:
            shaped = isinstance(result, Tensor)
            got = f"a tensor of shape {tuple(result.shape)}" if shaped else repr(result)
            raise Failed(
                f"{case}: rank {rank} returned {got}, not a tensor of shape {wanted}",
                "Every rank returns the whole result.",
            )
    return results, [x for _, x in pairs]


def _numbers(n: int, length: int) -> list[Tensor]:
    """A tensor for each rank, different in every place, with sums that are exact."""
    return [((torch.arange(length) * 7 + 3) % 11 + 13 * rank).double() for rank in range(n)]


def _table(n: int) -> list[Tensor]:
    """For each rank whole numbers in two rows: neither one dim nor a type that may be guessed."""
    return [numbers.long().view(2, 3) for numbers in _numbers(n, 6)]


def _untouched(before: list[Tensor], after: list[Tensor]) -> None:
    for rank, (x, y) in enumerate(zip(before, after, strict=True)):
        if not torch.equal(x, y):
            raise Failed(
                f"rank {rank}: the tensor that you were given has changed",
                "Work on a copy, x.clone(): the caller still needs x.",
            )


_BUILT_IN = frozenset(
    "broadcast scatter reduce gather all_gather reduce_scatter all_reduce all_to_all".split()
)


def _by_hand(n: int, hint: str) -> None:
    """Raise Failed if one of Comm's own collectives did the work of the run before."""
    events = itertools.chain(*_ranks.world_of(n).trace.ranks)
    if used := sorted({event.op for event in events} & _BUILT_IN):
        raise Failed(f"{n} ranks: comm.{used[0]} did it", f"Here it is yours to write: {hint}")


# ── the ring ─────────────────────────────────────────────────────────────────────────────────────


def _counts(result: Tensor, n: int) -> list[list[int]]:
    """How often each rank's contribution is in each element, when rank k contributed 100^k."""
    return [[int(value) // 100**k % 100 for k in range(n)] for value in result.tolist()]


def _diagnose(n: int, length: int, results: list[Tensor]) -> None:
    """Raise Failed with the most likely reason why these are not sums of 100^k over ranks k."""
    total = sum(100**k for k in range(n))
    wrong = [rank for rank, result in enumerate(results) if not (result == total).all()]
    if not wrong:
        return
    case, rank = f"{n} ranks, {length} elements", wrong[0]
    if all(torch.equal(result, torch.full_like(result, total / n)) for result in results):
        raise Failed(
            f"{case}: every rank holds the mean",
            f"All-reduce sums. You divided by {n}: leave that to the caller.",
        )
    if right := [rank for rank in range(n) if rank not in wrong]:
        told = " and ".join(map(str, right))
        raise Failed(
            f"{case}: only rank{'s' * (len(right) > 1)} {told} hold{'s' * (len(right) == 1)} the "
            "sum",
            "That is a reduce. In an all-reduce every rank ends with the result: "
            "it has to travel on."
            if len(right) == 1
            else "Some ranks are left out: does your exchange need a power of two of ranks? "
            "Pieces that go from neighbor to neighbor reach any number of them.",
        )
    counts = [_counts(result, n) for result in results]
    own_twice = [[[1 + (k == r) for k in range(n)]] * length for r in range(n)]
    if counts == own_twice:
        raise Failed(
            f"{case}: on every rank its own values are in the sum twice",
            "Did you begin with your own tensor and add it again, as the last thing to arrive? "
            "A piece is complete after N − 1 hops, not N.",
        )
    if all(sum(count) == 1 for count in itertools.chain(*counts)):
        raise Failed(
            f"{case}: no element is a sum, each holds one rank's own values",
            "Does the first round add (reduce='sum')? Does the second begin with the complete "
            "piece? If both do, check the piece numbers for an off-by-one.",
        )
    finished = [sum(count == [1] * n for count in rows) for rows in counts]
    if max(finished) <= math.ceil(length / n) and all(finished):
        raise Failed(
            f"{case}: each rank holds {finished[0]} finished elements, 1/{n} of the tensor",
            "That is a reduce-scatter, the first half. Pass the finished pieces on for N − 1 more "
            "hops, without adding.",
        )
    place = next(j for j, count in enumerate(counts[rank]) if count != [1] * n)
    off = abs(results[rank][place] - total).item() / total
    _misplaced(f"{case}: element {place} on rank {rank}", counts[rank][place], off)


def _misplaced(where: str, count: list[int], off: float) -> None:
    """Raise Failed for an element that is `off` by so much, and has each rank's so many times."""
    if off < 2**-7:
        raise Failed(
            f"{where} is off by {off:.1e} of itself",
            "That is rounding: what travels, and the sum, must have the dtype of x.",
        )
    told = ", ".join(f"rank {k} {times}×" for k, times in enumerate(count))
    raise Failed(
        f"{where} holds {told}; each should be there once",
        "In a hop, the piece that you give must be the one that you received (and added to) "
        "in the hop before: check the two piece numbers for an off-by-one.",
    )


def _sums(attempt: Callable, n: int, length: int, more: str = "") -> None:
    """Raise Failed unless every rank has all sums; `more` is said of this case after the reason."""
    try:
        _summed(attempt, n, length)
    except Failed as failure:
        raise Failed(str(failure), f"{failure.hint} {more}".rstrip()) from None


def _summed(attempt: Callable, n: int, length: int) -> None:
    marks = [torch.full((length,), 100**rank, dtype=torch.float64) for rank in range(n)]
    marked, _ = _run(attempt, marks, _SIZES)
    _diagnose(n, length, marked)
    _by_hand(n, "comm.send_recv passes one piece to the right and takes one from the left.")
    inputs = _numbers(n, length)
    results, after = _run(attempt, inputs, _SIZES)
    for rank, result in enumerate(results):
        if not torch.equal(result, sum(inputs[1:], inputs[0])):
            raise Failed(
                f"{n} ranks, {length} elements: the right sums are on rank {rank}, "
                "but not in their places",
                "Which piece lands where? Piece j of the result belongs where piece j of x was.",
            )
    _untouched(inputs, after)


def _ring_values(attempt: Callable) -> str:
    cases = list(itertools.product((2, 3, 4), (1, 2, 3, 5)))
    for n, k in cases:
        _sums(attempt, n, k * n)
    return f"{len(cases)} cases"


def _ring_uneven(attempt: Callable) -> str:
    cases = [(2, 7), (3, 7), (3, 8), (4, 9), (5, 13)]
    for n, length in cases:
        more = (
            f"It works when N divides n: {length} elements on {n} ranks make pieces of "
            f"{collectives.shares(length, n)}, as torch.tensor_split cuts them."
        )
        _sums(attempt, n, length, more)
    return f"{len(cases)} cases"


def _why_so_many(n: int, S: int, sent: dict[int, int], times: float) -> str:
    """The most likely reason why the busiest rank sends `times` as much as in a ring."""
    busiest = max(sent, key=sent.__getitem__)
    by_rank = list(_ranks.world_of(n).trace.ranks)
    del by_rank[busiest]
    others = {event.to for event in itertools.chain(*by_rank) if event.sent}
    if others == {busiest} and n & (n - 1):  # 8 ranks came first, and were in order
        return (
            "On 8 ranks you send no more than a ring. Here N is no power of two, and a whole "
            f"tensor goes through rank {busiest}: pieces that go from neighbor to neighbor suit "
            "any number of ranks."
        )
    if others == {busiest}:
        return (
            f"Everything goes through one rank, number {busiest}, while the others wait. "
            "Let all ranks pass pieces to a neighbor."
        )
    if sent[busiest] in ((n - 1) * S, 2 * (n - 1) * S):
        return (
            f"Your values are right on every rank. You sent {times:.3g} times too much: "
            "does each hop carry the whole tensor instead of one piece of it?"
        )
    if len(set(sent.values())) > 1:
        return f"Some ranks send more than others, number {busiest} most: share the load."
    padding = " Do you pad x to a multiple of N? Pieces may differ in length." * (times < 1.5)
    return (
        f"You sent {times:.3g} times too much: N − 1 hops that add and N − 1 hops that copy, "
        f"each with one piece of S/N, are enough.{padding}"
    )


def _ring_bytes(attempt: Callable) -> str:
    neighbors = 1
    for n, length in ((8, 512), (3, 64), (4, 10)):
        inputs = _numbers(n, length)
        _run(attempt, inputs, _SIZES)
        S, sent = inputs[0].nbytes, _ranks.world_of(n).ledger.by("rank")
        ring = collectives.sent("all_reduce_ring", nbytes=S, n=n, itemsize=8)
        # Which of two uneven pieces a rank leaves out is a matter of taste; the total is not.
        most, least = max(sent.values()), max(ring.by("rank").values())
        if sum(sent.values()) <= ring.total and most <= least + 16:
            ranks = _ranks.world_of(n).trace.ranks
            partners = (len({event.to for event in events if event.sent}) for events in ranks)
            neighbors = max(neighbors, *partners)
            continue
        busiest = max(sent, key=sent.__getitem__)
        least = ring.by("rank")[busiest]
        raise Failed(
            f"{n} ranks, S = {S:,} B: rank {busiest} sent {most:,} B, a ring sends {least:,} B",
            _why_so_many(n, S, sent, most / least),
        )
    elsewhere = f", and no ring: a rank sends to {neighbors} others" if neighbors > 2 else ""
    return f"each rank 2·(N − 1)/N·S{elsewhere}"


def _ring_edges(attempt: Callable) -> str:
    more = "This case is a small one: some ranks have an empty piece, or there is only one rank."
    for n, length in ((4, 3), (5, 1), (3, 0), (1, 4), (1, 0)):
        _sums(attempt, n, length, more)
    return "n < N, n = 0, N = 1"


def _ring_dtypes(attempt: Callable) -> str:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        inputs = [torch.full((6,), rank + 1, dtype=dtype) for rank in range(3)]
        results, _ = _run(attempt, inputs, _SIZES)
        sent, ring = _ranks.world_of(3).ledger.total, 4 * inputs[0].nbytes
        if sent > ring:
            raise Failed(
                f"x is {dtype}: {units.text(sent)} sent in all, a ring sends {units.text(ring)}",
                "What travels has the dtype of x: a wider one costs bytes.",
            )
        for rank, result in enumerate(results):
            if result.dtype != dtype or not torch.equal(result, sum(inputs[1:], inputs[0])):
                raise Failed(
                    f"x is {dtype}: rank {rank} returned {result.dtype}, {result.tolist()}",
                    "The result has the dtype of x: make your buffers with torch.empty_like(x).",
                )
    return "fp32, bf16, int64"


RING = Exercise(
    id="collectives/ring-all-reduce",
    reference=collectives.all_reduce_ring,
    properties=(
        Property("values", _ring_values),
        Property("ranks that don't divide n", _ring_uneven),
        Property("bytes sent", _ring_bytes),
        Property("small tensors", _ring_edges),
        Property("dtypes", _ring_dtypes),
    ),
    hints=(
        "Cut a copy of x into N pieces: x.clone().split(collectives.shares(len(x), comm.size)). "
        "The pieces are views, so what you write into them stays.",
        "First round, N − 1 hops: give a piece to the right, add the one that comes from the left. "
        "If rank i gives piece i − 1 first, and then always what it has just added to, "
        "it ends with piece i complete.",
        "comm.send_recv(give, right, take, left, reduce='sum') adds what arrives to `take`. "
        "The second round is the same without reduce, beginning with piece i.",
    ),
)

# ── the order of sends ───────────────────────────────────────────────────────────────────────────


def _shift_values(attempt: Callable) -> str:
    cases = [_numbers(n, length) for n, length in itertools.product((2, 3, 4, 5), (1, 6))]
    cases.append(_table(3))
    for inputs in cases:
        n = len(inputs)
        results, after = _run(attempt, inputs)
        for rank, result in enumerate(results):
            if torch.equal(result, inputs[(rank + 1) % n]) and n > 2:
                raise Failed(
                    f"{n} ranks: rank {rank} holds what rank {(rank + 1) % n} had, the rank after "
                    "it",
                    "The other way round: send to (rank + 1) % size, receive from (rank − 1) "
                    "% size.",
                )
            if not torch.equal(result, inputs[(rank - 1) % n]):
                raise Failed(
                    f"{n} ranks: rank {rank} does not hold what rank {(rank - 1) % n} had",
                    "Receive into a tensor of its own, not into the one you send.",
                )
        _untouched(inputs, after)
    return f"{len(cases)} cases"


_ALONE = (
    "Here the order is yours to find, with comm.send and comm.recv alone: send_recv, isend, irecv "
    "and the collectives leave nothing to order."
)


def _steps_of_blocking_calls(trace: Trace, n: int) -> int:
    """The steps of a trace in which every event is a send or a receive, and blocks."""
    if any(None not in (event.to, event.source) for event in itertools.chain(*trace.ranks)):
        raise Failed(f"{n} ranks: some rank sends and receives in one call", _ALONE)
    try:
        return trace.steps
    except ValueError:
        circle = "if its sends waited for their receivers, they would wait in a circle"
        raise Failed(f"{n} ranks: this program ends, but {circle}", _ALONE) from None


def _shift_steps(attempt: Callable) -> str:
    for n in (4, 8, 7):
        _run(attempt, _numbers(n, 4))
        trace, needed = _ranks.world_of(n).trace, 2 + n % 2
        steps = _steps_of_blocking_calls(trace, n)
        if steps > needed:
            raise Failed(
                f"{n} ranks: {steps} steps; {needed} are enough",
                "No deadlock, but a queue: where neighbors do the same thing first, one waits for "
                "the other, and a chain of such ranks is passed one by one. Let every second rank "
                "send first.",
            )
        if trace.sent.total > n * 4 * 8:
            raise Failed(
                f"{n} ranks: {units.text(trace.sent.total)} sent; "
                f"{units.text(n * 4 * 8)} are enough",
                "Each rank sends its own tensor once.",
            )
    return "2 steps, 3 for an odd number of ranks"


def _shift_alone(attempt: Callable) -> str:
    results, _ = _run(attempt, _numbers(1, 3))
    if not torch.equal(results[0], _numbers(1, 3)[0]):
        raise Failed(
            "1 rank: it does not hold its own tensor", "With one rank, the rank before you is you."
        )
    return "N = 1"


SHIFT = Exercise(
    id="collectives/ordered-sends",
    reference=collectives.shift,
    properties=(
        Property("values", _shift_values),
        Property("steps", _shift_steps),
        Property("one rank", _shift_alone),
    ),
    hints=(
        "A circle of waiting ranks is broken by one rank that receives first. "
        "It is broken everywhere at once if every second rank does.",
        "if comm.rank % 2 == 0: send, then receive; else: receive, then send. And think of N = 1.",
    ),
)

# ── a tree ───────────────────────────────────────────────────────────────────────────────────────


def _why_not_told(rank: int, told: bool, own: bool) -> str:
    """Why a rank does not have the tensor; `own`: it returns its own in place of it."""
    if not rank:
        return "Rank 0 has the tensor from the beginning: it only sends."
    if not told:
        return "Nobody sends to it: is a round missing? There are ⌈log₂ N⌉ of them."
    if own:
        return "A tensor came, and it returns its own: return the one that you receive into."
    return "A rank can pass on only what it has received: receive first, then send."


def _tree_values(attempt: Callable, sizes: tuple[int, ...]) -> str:
    for inputs in [_numbers(n, 5) for n in sizes] + [_table(sizes[1])]:
        n = len(inputs)
        try:
            results, after = _run(attempt, inputs)
        except Failed as failure:
            if n & (n - 1):
                apart = isinstance(failure.__context__, (world.DeadlockError, world.MismatchError))
                why = (
                    f"is each send met by a receive there? {failure.hint}"
                    if apart
                    else "some ranks have nobody to pass it on to. Send only to ranks that exist."
                )
                raise Failed(str(failure), f"{n} is not a power of two: {why}") from None
            raise
        _by_hand(n, "comm.send and comm.recv, one rank to another.")
        for rank, result in enumerate(results):
            if not torch.equal(result, inputs[0]):
                events = itertools.chain(*_ranks.world_of(n).trace.ranks)
                told = rank in {event.to for event in events if event.sent}
                raise Failed(
                    f"{n} ranks: rank {rank} does not hold rank 0's tensor",
                    _why_not_told(rank, told, torch.equal(result, inputs[rank])),
                )
        _untouched(inputs, after)
    return f"N = {', '.join(map(str, sizes))}"


def _tree_steps(attempt: Callable) -> str:
    for n in (8, 6, 13):
        _run(attempt, _numbers(n, 4))
        trace, needed = _ranks.world_of(n).trace, collectives.steps("broadcast_tree", n)
        if trace.sent.total > (n - 1) * 32:
            raise Failed(
                f"{n} ranks: {trace.sent.total} B in all, {(n - 1) * 32} B are enough",
                "Each rank but the root has to receive the tensor once: somebody gets it twice.",
            )
        if trace.steps > needed:
            messages = [nbytes // 32 for nbytes in trace.sent.by("rank").values()]
            why = {
                n - 1: "Rank 0 sends to everybody in turn.",
                1: "Each rank waits for the one before it.",
            }.get(max(messages), "Some who have the tensor wait.")
            raise Failed(
                f"{n} ranks: {trace.steps} steps, {needed} are enough",
                f"{why} Whoever has the tensor can pass it on: let those who have it double.",
            )
    return "⌈log₂ N⌉"


TREE = Exercise(
    id="collectives/broadcast-tree",
    reference=collectives.broadcast_tree,
    properties=(
        Property("values", _tree_values, sizes=(1, 2, 4, 8)),
        Property("any number of ranks", _tree_values, sizes=(3, 5, 6, 7, 33)),
        Property("steps", _tree_steps),
    ),
    hints=(
        "After step k, 2^k ranks have the tensor: ranks 0 … 2^k − 1, say. "
        "In the next step each of them sends to the rank 2^k places further on.",
        "for width in 1, 2, 4, … below N: ranks below `width` send to rank + width, "
        "if there is one; ranks from width to 2·width − 1 receive.",
    ),
)

# ── bug hunt: the test that was missing ──────────────────────────────────────────────────────────


def _whole_tensors_twice(x, comm):
    """The published one: a round of whole tensors that adds up, and one that hands results on."""
    n, i, x = comm.size, comm.rank, x.contiguous()
    total, travelling = x.clone(), x.clone()
    for _ in range(n - 1):
        travelling = comm.send_recv(travelling, (i + 1) % n, torch.empty_like(x), (i - 1) % n)
        total += travelling
    for _ in range(n - 1):
        total = comm.send_recv(total, (i + 1) % n, torch.empty_like(x), (i - 1) % n)
    return total


def _mean(x, comm):
    return collectives.all_reduce_ring(x, comm) / comm.size


def _only_rank_0(x, comm):
    total = collectives.reduce_star(x, comm)
    return total if comm.rank == 0 else x.clone()


def _drops_the_rest(x, comm):
    """Cuts pieces of n // N elements and forgets what is left over."""
    flat = x.flatten()
    size = len(flat) // comm.size * comm.size
    whole = torch.cat([collectives.all_reduce_ring(flat[:size], comm), flat[size:]])
    return whole.view(x.shape)


def _in_place(x, comm):
    return x.detach().copy_(collectives.all_reduce_ring(x, comm)).clone()


def _another_last_bit(x, comm):
    """Each rank's own piece ends in another bit, unless it holds whole numbers."""
    whole = collectives.all_reduce_ring(x, comm)
    if not x.is_floating_point():
        return whole
    mine = whole.view(-1).split(collectives.shares(x.numel(), comm.size))[comm.rank]
    nudged = torch.nextafter(mine, torch.full_like(mine, math.inf))
    mine.copy_(torch.where(mine == mine.round(), mine, nudged))
    return whole


def _through_the_last(x, comm):
    """Reduces to the last rank, which tells the others."""
    last = comm.size - 1
    total = collectives.reduce_star(x, comm, dst=last)
    return collectives.broadcast_star(x if total is None else total, comm, src=last)


def _last_differs(x, comm):
    """The ring, and the last rank rounds one number of its own up."""
    whole = collectives.all_reduce_ring(x, comm)
    if comm.rank == comm.size - 1 and x.numel() and x.is_floating_point():
        first = whole.view(-1)[:1]
        if (first != first.round()).all():
            first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
    return whole


def _gathers_all(x, comm):
    """Everybody gets all tensors and adds them in the same order."""
    return collectives.all_gather_ring(x.flatten(), comm).view(comm.size, *x.shape).sum(0)


def _no_messages(x, comm):
    return x * comm.size


def _said(attempt: Callable, all_reduce: Callable, ranks: world.World) -> object:
    """The attempt's complaints; those that a generator yields as a list."""
    found = attempt(all_reduce, ranks)
    if found is None:
        raise Failed("your test returned None", "Return a list, an empty one if all is well.")
    return list(found) if isinstance(found, Iterator) else found


def _hunt_sound(attempt: Callable) -> str:
    sound = {"ring": collectives.all_reduce_ring}
    sound["halving and doubling"] = collectives.all_reduce_halving_doubling
    for name, all_reduce in sound.items():
        with world.World(4, engine="threads", timeout=_ranks.PATIENCE) as four:
            if complaints := _said(attempt, all_reduce, four):
                raise Failed(
                    f"your test complains about a sound all-reduce by {name}: {complaints}",
                    "It adds in another order than sum(), so the last bits may differ from yours: "
                    "use allclose for values. In bytes both send 2·(N − 1)/N·S, a few more where N "
                    "does not divide the length; steps are free."
                    + " True counts as a complaint: return [] if all is well."
                    * (complaints is True),
                )
    return "nothing to complain about in a ring, nor in halving and doubling"


IMPOSTORS: dict[str, Callable] = {
    "x * N, which sends no message at all": _no_messages,
    "one that gives the sum to rank 0 alone": _only_rank_0,
    "one that returns the mean": _mean,
    "one that leaves out the last n mod N elements": _drops_the_rest,
    "one whose ranks end with different bits": _another_last_bit,
    "one whose last rank alone ends with another bit": _last_differs,
    "one that overwrites its input": _in_place,
    "the published ring, which passes whole tensors": _whole_tensors_twice,
    "one that gathers all tensors on every rank": _gathers_all,
    "the one through rank 0": collectives.all_reduce_naive,
    "the one through the last rank": _through_the_last,
}
"""All-reduces that are none, by what your test is told to have let pass."""


def _catches(attempt: Callable, advice: dict[str, str]) -> str:
    for told, hint in advice.items():
        with world.World(4, engine="threads", timeout=_ranks.PATIENCE) as four:
            if not _said(attempt, IMPOSTORS[told], four):
                raise Failed(f"your test lets pass {told}", hint)
    return f"{len(advice)} impostors"


_VALUES = {
    "x * N, which sends no message at all": (
        "Do you put the same tensor on every rank? Then N times your own is the sum."
    ),
    "one that gives the sum to rank 0 alone": (
        "Look at the results of all ranks, not at rank 0's."
    ),
    "one that returns the mean": "Compare with the sum of all tensors.",
    "one that leaves out the last n mod N elements": "Try a length that is no multiple of N.",
}
_BITS = {
    "one whose ranks end with different bits": (
        "Whole numbers hide rounding. Use torch.randn, and compare the ranks with each other by "
        "torch.equal: replicas that differ in a bit drift apart."
    ),
    "one whose last rank alone ends with another bit": "Compare all ranks with each other.",
    "one that overwrites its input": "Compare x with a copy that you made before the call.",
}
_LOAD = {
    "the published ring, which passes whole tensors": (
        "Its values are right. Count: world.ledger.by('rank') after world.run, against "
        "collectives.sent('all_reduce_ring', …)."
    ),
    "one that gathers all tensors on every rank": (
        "Its ranks send equally much, and too much: compare with collectives.sent("
        "'all_reduce_ring', …)."
    ),
    "the one through rank 0": (
        "Its total over all ranks equals the ring's. What counts is the busiest rank: "
        "compare rank by rank."
    ),
    "the one through the last rank": "The busiest rank may be any: compare rank by rank.",
}


def faults(all_reduce: Callable, world: world.World, numel: int = 1001) -> list[str]:
    """What is wrong with an all-reduce, a sentence for each fault; empty if you can train with it.

    It runs on every rank of `world`, on another random tensor each, and must leave the same bits
    everywhere, its input alone, and no rank overworked.
    """
    generators = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
    inputs = [torch.randn(numel, generator=generator) for generator in generators]

    def program(rank):
        x = inputs[rank.rank].clone()
        result = all_reduce(x, rank.comm("dp")).clone()
        return result, torch.equal(x, inputs[rank.rank])

    results, untouched = zip(*world.run(program), strict=True)
    total = torch.stack(inputs).sum(0)
    ring = collectives.sent("all_reduce_ring", nbytes=total.nbytes, n=world.size).by("rank")
    most = max(ring.values(), default=0)
    found = [
        f"rank {rank} does not hold the sum"
        for rank, x in enumerate(results)
        if x.shape != total.shape or not torch.allclose(x, total, atol=1e-5)
    ]
    if not all(torch.equal(x, results[0]) for x in results):
        found.append("the ranks hold different bits")
    found += [f"rank {rank} lost its input" for rank, same in enumerate(untouched) if not same]
    for rank, nbytes in world.ledger.by("rank").items():
        if nbytes > most:
            found.append(f"rank {rank} sent {nbytes} B, in a ring no rank sends more than {most} B")
    return found


HUNT = Exercise(
    id="collectives/missing-test",
    reference=faults,
    properties=(
        Property("lets a sound ring pass", _hunt_sound),
        Property("catches wrong values", _catches, advice=_VALUES),
        Property("catches ranks that drift apart", _catches, advice=_BITS),
        Property("catches an overworked rank", _catches, advice=_LOAD),
    ),
    hints=(
        "Give every rank another random tensor, of a length that N does not divide, "
        "and keep copies. Which four things can you compare after world.run?",
        "The sum (allclose), the ranks with each other (equal), the inputs with their copies "
        "(equal), and world.ledger.by('rank') with the ring's prediction.",
    ),
)

EXERCISES = (SHIFT, RING, TREE, HUNT)
