"""Pass keys round a ring, trade tokens for heads, and repair a model that passed its test."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labutils import context_parallel, data_parallel, flash, world
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.teach.exercises import Exercise, Failed, Property, _ranks


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _near(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and torch.allclose(
        found.to(right.dtype), right, rtol=1e-9, atol=1e-9
    )


def _sent(n: int) -> int:
    """Bytes that the busiest rank sent in the last run."""
    return max(_ranks.world_of(n).ledger.by("rank").values(), default=0)


def _span(x: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in memory."""
    far = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (far + 1) * x.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    (first, end), (other, its_end) = _span(a), _span(b)
    return first < its_end and other < end


# ── pass keys and values round ───────────────────────────────────────────────────────────────────

_A, _G, _D = 4, 2, 4


class _Seen:
    """What came of an attempt at the ring on every rank: outputs, and what was computed when."""

    def __init__(
        self, attempt: Callable, n: int, kind: str, s: int = 24, scores: float = 1
    ) -> None:
        self.n, self.whole = n, context_parallel.layout(s, n, kind)
        self.case = f"{_ranks.count(n)}, {kind}" + ", large scores" * (scores > 1)
        self.one_set = 2 * 2 * _G * s // n * _D * 8  # bytes of a rank's keys and values
        self.qkv = [3 * _noise(2, heads, s, _D, seed=i) for i, heads in enumerate((_A, _G, _G))]
        self.qkv[0] *= scores
        circle = (
            "Each rank waits for a receiver that is sending itself. Begin both with comm.isend and "
            "comm.irecv, compute, and wait() afterwards."
        )
        results = _ranks.run(n, self.case, functools.partial(self._program, attempt), circle)
        self.out, self.lse, *told = zip(*results, strict=True)
        self.pairs, self.hidden, self.held, self.open, self.missed, same = told
        if not all(same):
            raise Failed(
                f"{self.case}: on rank {same.index(False)} q, k or v is changed after your call",
                "The backward pass needs this rank's own: receive into tensors of your own, and "
                "write outputs there, too.",
            )

    def _program(self, attempt: Callable, rank: world.Rank) -> tuple:
        comm, pairs, hidden, held = rank.comm("dp"), [], [], [0]
        received: list[tuple[StorageWeakRef, int]] = []

        def irecv(out: Tensor, src: int) -> world.Work:
            for request in (work._request for work in comm._owner._pending):
                if request.sending and _overlap(request.tensor, out):
                    raise ValueError("irecv writes into the tensor that isend still reads")
            storage = out.untyped_storage()  # one may have room for several sets
            received.append((StorageWeakRef(storage), storage.nbytes()))
            return type(comm).irecv(comm, out, src)

        vars(comm)["irecv"] = irecv

        def attend(q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
            rows, columns = slice(0, q.shape[2]), slice(0, k.shape[2])
            pairs.append(context_parallel.Tile(rows, columns, offset).pairs)
            requests = [work._request for work in comm._owner._pending]
            under_way = [
                sum(each.tensor.nbytes for each in requests if each.sending == way)
                for way in (True, False)
            ]
            hidden.append(pairs[-1] if min(under_way) >= self.one_set else 0)
            alive = {at.cdata: nbytes for at, nbytes in received if not at.expired()}
            held.append(sum(alive.values()))
            return flash.attention(q, k, v, causal=True, offset=offset)

        mine = [self.whole.split(x, comm.rank, 2) for x in self.qkv]
        kept, q_shape = [x.clone() for x in mine], list(mine[0].shape)
        found = attempt(*mine, self.whole, comm, attend)
        if not (isinstance(found, (tuple, list)) and len(found) == 2):
            said = f"{self.case}: you return {type(found).__name__}"
            raise Failed(said, "Return two tensors: return (out, lse).")
        for what, each, due in zip(("out", "lse"), found, (q_shape, q_shape[:3]), strict=True):
            got = list(each.shape) if hasattr(each, "shape") else each
            if got != due:
                hint = "return (out, lse): as large as q, and a number for each query and head."
                raise Failed(f"{self.case}: {what} is {got!r:.80}, not {due}", hint)
        sending = [work._request.sending for work in comm._owner._pending]
        left, missed = any(sending), not all(sending)
        same = all(map(torch.equal, mine, kept))
        return *found, sum(pairs), sum(hidden), max(held), left, missed, same

    def tiles(self, rank: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Rows, output and log-sum-exp of each tile that a rank should have computed."""
        found, q = [], self.whole.split(self.qkv[0], rank, 2)
        for step in range(self.n):
            holder = (rank - step) % self.n
            k, v = (self.whole.split(x, holder, 2) for x in self.qkv[1:])
            for t in self.whole.tiles(rank, holder):
                cut = q[:, :, t.rows], k[:, :, t.columns], v[:, :, t.columns]
                found.append((t.rows, *flash.attention(*cut, causal=True, offset=t.offset)))
        return found


def _attends(attempt: Callable, kind: str) -> str:
    for n, scores in ((1, 1), (2, 1), (3, 1), (2, 1000)):
        seen = _Seen(attempt, n, kind, scores=scores)
        right, lse = flash.attention(*seen.qkv, causal=True)
        if any(seen.missed):
            raise Failed(
                f"{seen.case}: rank {seen.missed.index(True)} never waits for what it receives",
                "irecv returns at once, and until wait() its tensor holds anything: wait() before "
                "the next step computes with what it brings.",
            )
        for rank in range(n):
            mine = seen.whole.split(right, rank, 2)
            if _near(torch.as_tensor(seen.out[rank]), mine):
                continue
            apart = (torch.as_tensor(seen.out[rank]).double() - mine).abs().max().item()
            rounded = "Right but for rounding: keep q, k, v, outputs and lse in the dtype of q."
            if not math.isfinite(apart):
                raise Failed(
                    f"{seen.case}: an output of rank {rank} is not finite",
                    "e^lse overflows. What counts is the difference of two lse, and flash.merge "
                    "takes the exponential of that alone.",
                )
            raise Failed(
                f"{seen.case}: outputs of rank {rank} are off by {apart:.2g}",
                rounded if apart < 1e-2 else _why_wrong(seen, rank),
            )
        for rank in range(n):
            if not _near(torch.as_tensor(seen.lse[rank]), seen.whole.split(lse, rank, 2)):
                raise Failed(
                    f"{seen.case}: outputs are right, the log-sum-exp of rank {rank} is not",
                    "flash.merge returns both: keep the merged lse beside the merged output.",
                )
    return "1, 2 and 3 ranks"


def _why_wrong(seen: _Seen, rank: int) -> str:
    found, tiles = torch.as_tensor(seen.out[rank]).double(), seen.tiles(rank)
    added, counted = torch.zeros_like(found), torch.zeros(found.shape[2], 1, dtype=found.dtype)
    for rows, out, _ in tiles:
        added[:, :, rows] += out
        counted[rows] += 1
    right, lse = (seen.whole.split(x, rank, 2) for x in flash.attention(*seen.qkv, causal=True))
    if _near(found, right * torch.sigmoid(lse)[..., None]):
        return (
            "The lse begins at 0, as if there were one more key whose value is 0. Nothing has been "
            "seen yet, and log 0 is −inf."
        )
    if any(_near(found, wrong) for wrong in (added, added / counted)):
        return (
            "You add outputs that were divided by different sums. Each tile's output is a mean in "
            "units of its own: flash.merge rescales both by e^lse before it adds."
        )
    if seen.whole.kind == "zigzag":
        return (
            "A rank's two chunks are not neighbours. What a query sees depends on its position in "
            "the *sequence*: take rows, columns and offset of each tile of `whole.tiles`."
        )
    return (
        "Merge every tile of `whole.tiles(comm.rank, holder)` into its rows, with the tile's own "
        "offset; holder is the rank whose keys you have, (rank − step) mod N."
    )


def _ring_bytes(attempt: Callable) -> str:
    partners = 0
    for n in (3, 2, 4):
        seen = _Seen(attempt, n, "zigzag")
        one = seen.one_set
        if any(
            "all_gather" in event.op for rank in _ranks.world_of(n).trace.ranks for event in rank
        ):
            raise Failed(
                f"{seen.case}: an all-gather brings the keys of all ranks at once",
                "The bytes are right, and the memory is O(s): at 131,072 tokens the keys of all "
                "would be there together. Pass them on, and keep two sets at most.",
            )
        if (sent := _sent(n)) != (n - 1) * one:
            why = "Each rank sends keys and values, of one rank, to the next, N − 1 times."
            if sent == n * one:
                why = "The last step sends the keys home, where they are already."
            if sent == (n - 1) * one * _A // _G:
                why = (
                    "Keys travel as often as there are query heads. Send the g heads that there "
                    "are: attend knows which queries share one."
                )
            raise Failed(
                f"{seen.case}: the busiest rank sends {sent} B, a ring {(n - 1) * one} B", why
            )
        for rank, held in enumerate(seen.held):
            if held > 2 * one:
                raise Failed(
                    f"{seen.case}: rank {rank} holds {held} B of keys that have come, and "
                    f"{2 * one} B are two sets",
                    "Whoever keeps all that passes holds O(s) keys, as after an all-gather; and a "
                    "send that nobody waits for keeps its tensor. Hold the set that is computed "
                    "with and the one that is coming.",
                )
        ranks = _ranks.world_of(n).trace.ranks
        partners = max(len({event.to for event in events if event.sent}) for events in ranks)
    elsewhere = f", and no ring: a rank sends to {partners} others" if partners > 1 else ""
    return f"2, 3 and 4 ranks{elsewhere}"


def _ring_work(attempt: Callable) -> str:
    for kind in ("contiguous", "zigzag"):
        seen = _Seen(attempt, 4, kind)
        for rank in range(4):
            due = seen.whole.work(rank)
            if seen.pairs[rank] != due:
                raise Failed(
                    f"{seen.case}: rank {rank} computes {seen.pairs[rank]} pairs of query and key, "
                    f"the mask leaves {due}",
                    "A tile without a pair, or computed twice, costs time: compute what "
                    "`whole.tiles` yields, once.",
                )
    return "contiguous and zig-zag"


def _ring_hides(attempt: Callable) -> str:
    seen = _Seen(attempt, 3, "zigzag")
    for rank in range(3):
        due = sum(seen.whole.met(rank)[:-1])
        if seen.hidden[rank] < due:
            raise Failed(
                f"{seen.case}: while rank {rank} computes, keys and values do not "
                f"all leave and come: that is so for {seen.hidden[rank]} of {due} pairs",
                "Begin isend and irecv of a step *before* its tiles, and wait() for both *after* "
                "them.",
            )
        if seen.open[rank]:
            raise Failed(
                f"{seen.case}: rank {rank} returns while a send is under way",
                "wait() for what isend returned, too: until then its tensor must not be freed or "
                "written.",
            )
    return "every step but the last"


def _ring_reference(q: Tensor, k: Tensor, v: Tensor, whole: Any, comm: Any, attend: Any) -> Any:
    return context_parallel.ring(q, k, v, whole, comm, attend)


RING = Exercise(
    id="context_parallel/ring",
    reference=_ring_reference,
    properties=(
        Property("contiguous", _attends, kind="contiguous"),
        Property("zig-zag", _attends, kind="zigzag"),
        Property("bytes sent", _ring_bytes),
        Property("work", _ring_work),
        Property("sends travel while you compute", _ring_hides),
    ),
    hints=(
        "Start with out = 0 and lse = −inf. Keys and values can travel as one tensor: "
        "torch.stack([k, v]).",
        "Step by step: if it is not the last, isend what you have to the next rank and irecv the "
        "next from the one before; for each tile of whole.tiles(comm.rank, holder) cut rows and "
        "columns, attend, and merge into out[:, :, tile.rows]; then wait().",
    ),
)

# ── trade tokens for heads ───────────────────────────────────────────────────────────────────────


def _trade(attempt: Callable, n: int, kind: str, a: int) -> tuple[Tensor, list]:
    """The whole tensor, and what each rank returned."""
    x, whole = _noise(2, a, 24, 3, seed=n), context_parallel.layout(24, n, kind)

    def program(rank: world.Rank) -> Any:
        comm = rank.comm("dp")
        given = whole.split(x, comm.rank, 2)
        found = attempt(given, whole, comm)
        return found, torch.equal(given, whole.split(x, comm.rank, 2))

    same = "All ranks must make the same collective calls in the same order."
    case = f"{_ranks.count(n)}, {kind}, {a} heads"
    found, kept = zip(*_ranks.run(n, case, program, same), strict=True)
    if not all(kept):
        changed = f"{case}: on rank {kept.index(False)} x is another tensor after your call"
        raise Failed(changed, "Whoever called may need it: write into a tensor of your own.")
    return x, list(found)


def _trades(attempt: Callable, kind: str) -> str:
    for n, a in ((1, 2), (2, 4), (3, 3), (4, 8)):
        x, results = _trade(attempt, n, kind, a)
        whole, each = context_parallel.layout(x.shape[2], n, kind), a // n
        case = f"{_ranks.count(n)}, {kind}, {a} heads"
        for rank, found in enumerate(results):
            right = x[:, rank * each : (rank + 1) * each]
            if not isinstance(found, Tensor) or found.shape != right.shape:
                got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise Failed(
                    f"{case}: rank {rank} got {got}, and not {tuple(right.shape)}",
                    "From [b, a, s/n, d] to [b, a/n, s, d]: fewer heads, all tokens.",
                )
            if not _near(found, right):
                raise Failed(f"{case}: rank {rank} has other numbers", _why_other(found, x, whole))
    return "1, 2, 3 and 4 ranks"


def _why_other(found: Tensor, x: Tensor, whole: context_parallel.SequenceLayout) -> str:
    n = whole.n
    if any(_near(found, x[:, rank::n]) for rank in range(n)):
        return "Rank r gets neighbouring heads: the r-th n-th of them, not every n-th."
    if any(_near(found, heads) for heads in x.chunk(n, 1)):
        return (
            "These are another rank's heads, each token in its place. all_to_all sends row r to "
            "rank r: the r-th n-th of the heads has to be row r."
        )
    if any(torch.allclose(found.double(), heads, rtol=1e-5) for heads in x.chunk(n, 1)):
        return "Right but for rounding: send the dtype that you are given."
    if {*found.flatten().tolist()} == {*x.flatten().tolist()} or any(
        sorted(found.flatten().tolist()) == sorted(x.chunk(n, 1)[rank].flatten().tolist())
        for rank in range(n)
    ):
        return (
            "The right numbers in the wrong places. Rows come back in the order of *ranks*: put "
            "each rank's tokens where they belong, whole.join(parts, dim=2), before or after you "
            "move the dims."
        )
    return (
        "all_to_all deals rows of dim 0: row r goes to rank r. So the dim of length n that says "
        "whose heads they are has to come first, before the batch."
    )


def _trade_bytes(attempt: Callable) -> str:
    for n, a in ((2, 4), (4, 8)):
        _trade(attempt, n, "zigzag", a)
        mine = 2 * a * 24 // n * 3 * 8
        due, sent = mine * (n - 1) // n, _sent(n)
        if sent != due:
            whole = sent == mine * (n - 1)
            raise Failed(
                f"{_ranks.count(n)}: a rank sends {sent} B, it has {due} B that others need",
                "All heads go to all ranks, and most are thrown away: comm.all_to_all sends each "
                "rank its own."
                if whole
                else "Each rank sends what it has once, less its own part.",
            )
    return "2 and 4 ranks"


TRADE = Exercise(
    id="context_parallel/heads",
    reference=context_parallel.heads_for_tokens,
    properties=(
        Property("contiguous", _trades, kind="contiguous"),
        Property("zig-zag", _trades, kind="zigzag"),
        Property("bytes sent", _trade_bytes),
    ),
    hints=(
        "x.unflatten(1, (comm.size, -1)) says for each head whose it will be; movedim(1, 0) brings "
        "that dim to the front. comm.all_to_all takes a contiguous tensor.",
        "What comes back has a row for each rank: its tokens of your heads. "
        "whole.join(rows.unbind(), 2) puts them in order.",
    ),
)

# ── bug hunt: a model over ranks ─────────────────────────────────────────────────────────────────

_CONFIG = ModelConfig(
    num_layers=2, d_model=12, num_heads=6, num_kv_heads=1, d_ff=16, vocab_size=16, seq_len=12,
    ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip


def _model() -> GPT:
    model, draw = GPT(_CONFIG).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=draw)
    return model


def _batch(s: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(s)
    tokens, targets = torch.randint(16, (2, 2, s), generator=draw)
    return tokens, targets


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


_KINDS = "zigzag", "contiguous"  # either is right, if the ring and the tokens agree


def _passes(
    attempt: Callable, n: int, *batches: tuple[Tensor, Tensor], anew: bool = True
) -> list[tuple]:
    """Of each batch the logits, as each layout joins them, the mean over ranks of the losses, and
    that of the gradients.

    anew: each with a model of its own
    """

    def program(rank: world.Rank) -> list:
        comm = rank.comm("dp")
        results: list[tuple] = []
        logits: list[Tensor] = []
        for batch in batches:
            if anew or not results:
                model = _model()
                model.head.register_forward_hook(lambda head, x, y: logits.append(y.detach()))
                wrapped = attempt(model, comm)
            model.zero_grad()
            logits.clear()
            loss = wrapped.loss(*batch)
            share, ran = batch[0].shape[1] // n, {each.shape[1] for each in logits}
            if ran != {share}:
                said = " and ".join(map(str, sorted(ran))) or "no"
                raise Failed(
                    f"{_ranks.count(n)}, {share * n} tokens: on rank {rank.rank} the model runs on "
                    f"{said} tokens of a sequence, its own are {share}",
                    "Each rank computes its own tokens, and the others' keys come to it: whoever "
                    "computes all of them holds all of them.",
                )
            loss.backward()
            data_parallel.average_gradients(model, comm)
            mean = comm.all_reduce(loss.detach().reshape(1)) / comm.size
            results.append((torch.cat(logits), mean.item(), _gradient(model)))
        return results

    hint = "All ranks must make the same calls in the same order, also a rank without targets."
    shares = _ranks.run(n, _ranks.count(n), program, hint)
    found = []
    for (tokens, _), of_ranks in zip(batches, zip(*shares, strict=True), strict=True):
        layouts = {kind: context_parallel.layout(tokens.shape[1], n, kind) for kind in _KINDS}
        shares_of = [share[0] for share in of_ranks]
        logits = {kind: whole.join(shares_of) for kind, whole in layouts.items()}
        found.append((logits, *of_ranks[0][1:]))
    return found


def _alone(tokens: Tensor, targets: Tensor) -> tuple[Tensor, float, Tensor]:
    model = _model()
    loss = model.loss(tokens, targets)
    loss.backward()
    return model(tokens).detach(), loss.item(), _gradient(model)


def _one_rank(attempt: Callable) -> str:
    batch = _batch()
    (_, loss, gradient), (_, right, exact) = _passes(attempt, 1, batch)[0], _alone(*batch)
    if abs(loss - right) < 1e-9 and not _near(gradient, exact):
        scale = (gradient.norm() / exact.norm()).item()
        raise Failed(
            f"1 rank: the loss is right, its gradient is another one, {scale:.2g} times as long",
            "What comm.all_reduce returns has no history: only counts may come from it, and the "
            "loss of this rank's own tokens keeps its own.",
        )
    if abs(loss - right) > 1e-9 or not _near(gradient, exact):
        raise Failed(
            f"1 rank: the loss is {loss - right:+.2g} off, or its gradient is another one",
            "One rank has the whole sequence: there is nothing to send and nothing to weigh.",
        )
    return "the plain model"


def _masks(attempt: Callable) -> str:
    for n in (2, 3):
        tokens, targets = _batch()
        changed = {at: tokens.clone() for at in (5, 11)}
        for at, other in changed.items():
            other[:, at] = (other[:, at] + 1) % 16
        first, *others = _passes(attempt, n, *((x, targets) for x in (tokens, *changed.values())))
        faults = []
        for kind in _KINDS:
            pairs = zip(changed, others, strict=True)
            faults.append([_fault(n, at, first[0][kind] != other[0][kind]) for at, other in pairs])
        if all(map(any, faults)):
            raise next(filter(None, faults[0]))
    return "2 and 3 ranks"


def _fault(n: int, at: int, other: Tensor) -> Failed | None:
    """What is wrong if these logits change with token number `at`."""
    moved = other.flatten(2).any(-1).any(0).tolist()
    why = "The tokens are laid out in a zig-zag: does the ring know that?"
    if early := [p for p in range(at) if moved[p]]:
        return Failed(
            f"{n} ranks: token {at} changes what is predicted at position {early[0]}",
            f"A query saw a key that comes after it. {why}",
        )
    if blind := [p for p in range(at, 12) if not moved[p]]:
        return Failed(
            f"{n} ranks: token {at} changes nothing at position {blind[0]}",
            f"A query did not see a key that comes before it. {why}",
        )
    return None


def _positions(attempt: Callable) -> str:
    batches = _batch(), _batch(6), _batch()
    for (logits, *_), batch in zip(_passes(attempt, 3, *batches, anew=False), batches, strict=True):
        right = _alone(*batch)[0]
        if not any(_near(joined, right) for joined in logits.values()):
            raise Failed(
                f"3 ranks, {batch[0].shape[1]} tokens: who sees whom is right, the numbers are not",
                "RoPE turns tokens by other positions than theirs, as on a rank that counts its "
                "tokens from 0, or on from the first of them. Each needs its own position: rows "
                "whole.positions(rank) of the tables rotary.cos and rotary.sin. (Take them from "
                "the whole tables each time, not from what the pass before left.) Or not every "
                "block attends over the ring.",
            )
    return "3 ranks, long and short sequences in turn"


def _weighs(attempt: Callable) -> str:
    whole, (tokens, targets) = context_parallel.layout(12, 2), _batch()
    targets[0, 2:7] = targets[1, 7:9] = -100
    empty = targets.clone()
    empty[:, whole.positions(1)] = -100
    batches = (tokens, targets), (tokens, empty)
    for (_, loss, gradient), batch in zip(_passes(attempt, 2, *batches), batches, strict=True):
        _, right, exact = _alone(*batch)
        if abs(loss - right) < 1e-9 and _near(gradient, exact):
            continue
        counts = [int((whole.split(batch[1], rank) != -100).sum()) for rank in range(2)]
        case = f"2 ranks with {' and '.join(map(str, counts))} targets"
        if abs(loss - right) < 1e-9:
            scale = (gradient.norm() / exact.norm()).item()
            raise Failed(
                f"{case}: the loss is right, its gradient is {scale:.2g} times the right one",
                "The gradients of all ranks are averaged. If every rank returns the same loss, "
                "only its own part of it has a history: that part must be N times as large.",
            )
        raise Failed(f"{case}: the loss is {loss - right:+.2g} off", _why_off(loss, right, counts))
    return "unequal targets, and a rank without any"


def _why_off(loss: float, right: float, counts: list[int]) -> str:
    """What most likely makes it so of ranks with so many targets each."""
    if math.isnan(loss):
        return "The mean of a rank without targets is 0/0. Sum, and divide by the targets of all."
    if abs(len(counts) * loss - right) < 1e-9:
        return "It is right but for a factor: the mean over N ranks divides once more by N."
    if abs(loss * _batch()[1].numel() - right * sum(counts)) < 1e-9:
        return (
            "It is divided by all tokens. Those whose target is −100 do not count: leave them out."
        )
    return (
        "A mean of means: a rank, or a sequence, with few targets weighs as much as one with many. "
        "Divide its sum by the targets of all ranks, and mind the division by N that follows."
    )


HUNT = Exercise(
    id="context_parallel/bug-hunt",
    untouched="e9e986b3",
    reference=context_parallel.distribute,
    properties=(
        Property("one rank", _one_rank),
        Property("who sees whom", _masks),
        Property("positions", _positions),
        Property("every token weighs alike", _weighs),
    ),
    hints=(
        "Three things depend on *where* a token stands: what it may see, how RoPE turns it, and "
        "how many others share its mean. Ask of each what this rank knows.",
        "Keep rotary.cos and rotary.sin in __init__. In loss, before the model runs, give "
        "model.blocks[0].attention.rotary the rows whole.positions(comm.rank) of both.",
        'Sum the losses (reduction="sum"), divide by the number of targets of *all* ranks, and '
        "multiply by comm.size, since the gradients are averaged afterwards.",
    ),
)

EXERCISES = (RING, TRADE, HUNT)
