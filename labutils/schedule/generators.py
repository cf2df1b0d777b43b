"""Every schedule as a sentence for each rank: so many times these letters; a letter stands for the
rank's next forward, backward or weight gradient."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from labutils import units
from labutils.schedule.orders import Op, Schedule
from labutils.schedule.simulation import simulate

Sentence = Iterable[tuple[int, str]]


def loop(p: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of each stage when the chunks go round the ranks.

    >>> loop(3, 2), vee(3)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    return tuple(stage % p for stage in range(p * chunks))


def vee(p: int) -> tuple[int, ...]:
    """The rank of each of 2p stages when the second chunks come back the way of the first."""
    return (*range(p), *reversed(range(p)))


def _sizes(p: int, m: int, chunks: int = 1, kinds: int = 2) -> tuple[int, int, int]:
    """p, m and chunks as Python ints; raises TypeError or ValueError for sizes of no schedule, or
    of one that is too long to be written down."""
    p, m, chunks = units.wholes(1, p=p, m=m, chunks=chunks)
    made = f"the operations of p={p} and m={m} are"
    units.writable(p * m * chunks * kinds, made, "take fewer ranks or micro-batches")
    return p, m, chunks


def spell(
    name: str,
    place: tuple[int, ...],
    m: int,
    say: Callable[[int], Sentence],
    streams: Callable[[list[int]], dict[str, Iterator[Op]]],
    *,
    split: bool,
) -> Schedule:
    """The schedule in which each rank runs the operations that its letters stand for.

    place: the rank of each stage
    say: of a rank, its sentence; W pays the oldest backward owed, brackets fuse, what is past the
        end of a stream is left out
    streams: of a rank's stages, what each letter but W stands for, in order
    name, m: of the schedule, and its micro-batches
    split: whether W stands apart from B
    """
    rows, fused = [], set()
    for rank in range(max(place) + 1):
        coming = streams([stage for stage, owner in enumerate(place) if owner == rank])
        row: list[Op] = []
        owed: deque[Op] = deque()
        for times, letters in say(rank):
            for letter in letters * times:
                if letter == "[":
                    fused.add((rank, len(row)))
                elif letter == "W":
                    if owed:
                        row.append(Op("W", *owed.popleft()[1:]))
                elif letter != "]" and (op := next(coming[letter], None)):
                    row.append(op)
                    if split and op.kind == "B":
                        owed.append(op)
        rows.append(tuple(row))
    return Schedule(name, tuple(rows), (place,), m, split, frozenset(fused))


def spell_line(
    name: str,
    p: int,
    m: int,
    warm: Callable[[int], int],
    *,
    chunks: int = 1,
    a_round: int = 1,
    last_first: bool = False,
    lag: Callable[[int], int] | None = None,
) -> Schedule:
    """F^warm, then F and B in turn, then the rest of B; the chunks go round the ranks.

    warm: of a rank, the forwards before its first backward
    a_round: how many micro-batches go through all chunks before the next ones follow; backwards
        take the chunks the other way
    last_first: backwards take the forwards from the last to the first
    lag: of a rank, how many backwards W trails B by; None where B is the whole backward
    name, p, m: of the schedule, its ranks and its micro-batches
    """
    p, m, chunks = _sizes(p, m, chunks, 2 if lag is None else 3)
    n = m * chunks
    jobs = sorted(product(range(chunks), range(m)), key=lambda job: (job[1] // a_round, *job))
    w_after = "" if lag is None else "W"

    def streams(mine: list[int]) -> dict[str, Iterator[Op]]:
        forward = (Op("F", mine[chunk], k) for chunk, k in jobs)
        if last_first:
            return {"F": forward, "B": (Op("B", mine[chunk], k) for chunk, k in reversed(jobs))}
        return {"F": forward, "B": (Op("B", mine[-1 - chunk], k) for chunk, k in jobs)}

    def say(rank: int) -> Sentence:
        ahead = min(warm(rank), n)
        late = min(lag(rank), n) if lag else 0
        young = min(late, n - ahead)  # turns in which no W is due yet
        due = n - max(n - ahead, late)  # backwards after the last forward with a W due
        yield from [(ahead, "F"), (young, "FB"), (n - ahead - young, "FB" + w_after)]
        yield from [(late - young, "B"), (due, "B" + w_after), (late, w_after)]

    return spell(name, loop(p, chunks), m, say, streams, split=lag is not None)


def naive(p: int, m: int) -> Schedule:
    """One rank works at a time: each micro-batch goes there and back before the next one.

    >>> [" ".join(map(str, ops)) for ops in naive(2, 2).ranks]
    ['F0@0 B0@0 F1@0 B1@0', 'F0@1 B0@1 F1@1 B1@1']
    """
    return spell_line("naive", p, m, lambda rank: 0)


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (AFAB), in the same order of micro-batches.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3.
    """
    return spell_line("gpipe", p, m, lambda rank: m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward (1F1B, PipeDream-Flush): as many forwards first as ranks follow.

    >>> print(*one_f_one_b(3, 4).ranks[0])
    F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1.
    """
    return spell_line("one_f_one_b", p, m, lambda rank: p - 1 - rank)


def eager_one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B with twice the warm-up, so that a message may take as long as an operation."""
    p, m, _ = _sizes(p, m)
    return spell_line("eager_one_f_one_b", p, m, lambda rank: 2 * (p - 1 - rank))


def pipedream(p: int, m: int) -> Schedule:
    """1F1B without a flush: each rank updates its weights after each of its backwards, and keeps
    for B the weights of F (*weight stashing*): rank i holds p−i versions.

    >>> one = pipedream(4, 8)
    >>> [[k - one.version(rank, k) for k in range(8)] for rank in (0, 3)]  # staleness
    [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0]]

    Source: PipeDream, as Narayanan et al. 2021, arXiv:2104.04473, tell it.
    """
    return replace(one_f_one_b(p, m), name="pipedream", every=1)


def pipedream_2bw(p: int, m: int, every: int | None = None) -> Schedule:
    """PipeDream with an update per `every` micro-batches, and weights one update old on all ranks:
    two versions on each, however many ranks.

    every: micro-batches per update; p unless given

    Raises ValueError: if m is no multiple of it, or the weights would not be there in time.
    """
    p, m, every = units.wholes(1, p=p, m=m, every=p if every is None else every)
    if m % every or every < p - 1:
        need = f"a divisor of m={m} that is at least p−1={p - 1}"
        raise ValueError(f"pipedream_2bw updates every {every} micro-batches: give {need}")
    return replace(one_f_one_b(p, m), name="pipedream_2bw", every=every, buffered=True)


def _round(p: int, m: int) -> int:
    """Micro-batches per round of an interleaved schedule: p, or more where p does not divide m."""
    rounds = max(1, m // p)
    if m % rounds:
        legal = f"take a multiple of p, such as {m // p * p} or {(m // p + 1) * p}"
        raise ValueError(f"m={m} micro-batches make no {rounds} equal rounds for p={p}: {legal}")
    return m // rounds


def interleaved(p: int, m: int, chunks: int = 2) -> Schedule:
    """1F1B of `chunks` stages per rank that go round the ranks, p micro-batches a round.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2; rounds where p does not divide
    m as in torch.distributed.pipelining.
    """
    p, m, chunks = _sizes(p, m, chunks)
    n = _round(p, m)
    more = (chunks - 1) * n
    return spell_line(
        "interleaved", p, m, lambda rank: 2 * (p - 1 - rank) + more, chunks=chunks, a_round=n
    )


def breadth_first(p: int, m: int, chunks: int = 2) -> Schedule:
    """All micro-batches through a chunk, then the next chunk (looped BFS); backward in reverse.

    Source: the order of torch.distributed.pipelining's ScheduleLoopedBFS.
    """
    p, m, chunks = _sizes(p, m, chunks)

    def warm(rank: int) -> int:
        return m * chunks

    return spell_line("breadth_first", p, m, warm, chunks=chunks, a_round=m, last_first=True)


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with B split: rank i runs W i backwards late, which fills the drain; p activations.

    Source: Qi et al. 2023, arXiv:2401.10241, Table 2.
    """
    return spell_line("zb_h1", p, m, lambda rank: p - 1 - rank, lag=lambda rank: rank)


def zb_h2(p: int, m: int) -> Schedule:
    """ZB-H1 with warm-up and lag doubled: no bubble, unless steps end in a barrier; 2p−1
    activations.

    Source: Qi et al. 2023, arXiv:2401.10241, Table 2.
    """
    p, m, _ = _sizes(p, m, kinds=3)
    return spell_line("zb_h2", p, m, lambda rank: 2 * (p - 1 - rank), lag=lambda rank: 2 * rank)


def zb_auto(p: int, m: int, cap: int) -> Schedule:
    """The shortest without a barrier among schedules with W that hold `cap` activations per rank,
    where F, B and W take the same time.

    Rank i takes min(cap−1−i, k(p−1−i)) forwards first, and the W that memory then allows to be
    late; k is searched in 1, 1.1 … 4. Where `cap` is ample, less of it is tried too.

    Raises ValueError for a cap below min(p, m).
    Source: the aim, not the search, of Qi et al. 2023, arXiv:2401.10241.
    """
    (p, m, _), cap = _sizes(p, m, kinds=3), units.whole(cap, "cap", 1)
    if cap < min(p, m):
        raise ValueError(f"cap={cap} is too little for p={p}: rank 0 needs {min(p, m)} activations")
    caps = {cap, *(less for less in (m, m + 1, 2 * p - 1) if p <= less < cap)}
    found: dict[tuple, Schedule] = {}
    for limit in sorted(caps):
        for tenths in range(10, 41):
            ahead = tuple(_ahead(limit, tenths, p, m, rank) for rank in range(p))
            lag = tuple(limit - 1 - forwards for forwards in ahead)
            if (ahead, lag) not in found:
                one = spell_line("zb_auto", p, m, ahead.__getitem__, lag=lag.__getitem__)
                found[ahead, lag] = one
    return min(found.values(), key=lambda one: simulate(one).period)


def _ahead(cap: int, tenths: int, p: int, m: int, rank: int) -> int:
    """Forwards before a rank's first backward: fewer from rank to rank, within memory."""
    return max(0, min(cap - 1 - rank, tenths * (p - 1 - rank) // 10, m))


def interleaved_zb(p: int, m: int, chunks: int = 2) -> Schedule:
    """The interleaved schedule with B split, W late and less warm-up.

    Source: the order of torch.distributed.pipelining's ScheduleInterleavedZeroBubble.
    """
    p, m, chunks = _sizes(p, m, chunks)
    n = _round(p, m)

    def warm(rank: int) -> int:
        return p - 1 - rank + (chunks - 1) * n

    def lag(rank: int) -> int:
        return rank

    return spell_line("interleaved_zb", p, m, warm, chunks=chunks, a_round=n, lag=lag)


def _v_streams(m: int) -> Callable[[list[int]], dict[str, Iterator[Op]]]:
    """Two chunks per rank: capital letters for the first, small ones for the second."""

    def streams(mine: list[int]) -> dict[str, Iterator[Op]]:
        first, second = mine
        return {
            letter: iter([Op(letter.upper(), stage, k) for k in range(m)])
            for letter, stage in {"F": first, "B": first, "f": second, "b": second}.items()
        }

    return streams


def zb_v(p: int, m: int) -> Schedule:
    """Two chunks per rank, there and back in a V, B split: no bubble in the memory of 1F1B.

    Source: the order of torch.distributed.pipelining's ScheduleZBVZeroBubble.
    """
    p, m, _ = _sizes(p, m, 2, kinds=3)

    def say(r: int) -> Sentence:
        return [
            (2 * (p - r) - 1, "F"),
            (r, "fF"),
            (p - r, "fbW"),
            (max(m, 2 * p - 1) - 2 * p + r + 1, "FBWfbW"),
            (p - r - 1, "BWfbW"),
            (r, "Bb"),
            (p - r, "BW"),
            (2 * m, "W"),
        ]

    return spell("zb_v", vee(p), m, say, _v_streams(m), split=True)


def dualpipe_v(p: int, m: int) -> Schedule:
    """The V of ZB-V in which a forward runs at once with a backward of the other chunk.

    Raises ValueError for m < 2p.
    Source: DeepSeek's DualPipe repository, dualpipev.py; torch.distributed.pipelining's
    ScheduleDualPipeV.
    """
    p, m, _ = _sizes(p, m, 2, kinds=3)
    if m < 2 * p:
        raise ValueError(f"dualpipe_v needs m ≥ 2p micro-batches: m={m} at p={p}, take {2 * p}")

    def say(r: int) -> Sentence:
        after, main = p - 1 - r, m - 2 * p + r + 1
        alone = after == 0  # the last rank has no forward yet to run beside its first backward
        yield from [(2 * after, "F"), (r + 1, "Ff"), (after, "bWf")]
        yield from [(alone, "FbW[fBW]"), (main - alone, "[FbW][fBW]"), (after, "bW[fBW]")]
        half, odd = divmod(r + 1, 2)
        yield from [(half, "bWBW"), (odd, "bWB"), (half, "bB")]
        yield from [(after, "WB"), (2 * m, "W")]

    return spell("dualpipe_v", vee(p), m, say, _v_streams(m), split=True)


def dualpipe(p: int, m: int) -> Schedule:
    """DualPipe: half of the micro-batches enter at each end, every rank holds two stages.

    It is dualpipe_v(p/2, m/2), unfolded: ranks i and p−1−i run what its rank i runs, one for
    each direction. m counts both directions.

    Raises ValueError where p or m is odd, or m < 2p.
    Source: DeepSeek-V3, arXiv:2412.19437, section 3 and Table 2; its repository's dualpipe.py.
    """
    p, m = units.whole(p, "p", 2), units.whole(m, "m", 1)
    if p % 2 or m % 2 or m < 2 * p:
        need, even = "an even p and an even m ≥ 2p", p + p % 2
        fits = f"take p={even} and m={max(2 * even, m + m % 2)}, say"
        raise ValueError(f"dualpipe needs {need}: got p={p}, m={m}; {fits}")
    folded = dualpipe_v(p // 2, m // 2)
    rows: list[tuple[Op, ...]] = [()] * p
    for rank, ops in enumerate(folded.ranks):
        for other in (0, 1):
            rows[p - 1 - rank if other else rank] = tuple(
                Op(kind, stage, k + m // 2 * (other ^ (stage >= p // 2))) for kind, stage, k in ops
            )
    fused = folded.fused | {(p - 1 - rank, index) for rank, index in folded.fused}
    places = (tuple(range(p)), tuple(reversed(range(p))))
    return Schedule("dualpipe", tuple(rows), places, m, True, frozenset(fused))
