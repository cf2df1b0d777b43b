"""Wrong answers to the exercises of `expert_parallel`."""

import functools

import torch

from labutils import expert_parallel
from wrong_answers import Wrong

# ── choose ───────────────────────────────────────────────────────────────────────────────────────


def _choose(logits, k, score, bias, *, slip=""):
    """A router with its slips switched on one at a time."""
    scores = logits.softmax(-1) if score == "softmax" or slip == "one score" else logits.sigmoid()
    if slip == "numbers":
        scores = torch.tensor(scores.tolist(), dtype=scores.dtype)
    choosing = scores + bias
    if slip == "no bias":
        choosing = scores
    if slip == "bias on logits":
        choosing = logits + bias
    chosen = choosing.topk(k, largest=slip != "worst").indices
    if slip == "biased weights":
        scores = choosing
    if slip == "detached":
        scores = scores.detach()
    weights = scores.gather(-1, chosen)
    if slip == "softmax twice":
        return chosen, weights.softmax(-1)
    if slip == "sum without a gradient":
        return chosen, weights / weights.sum(-1, keepdim=True).detach()
    return chosen, weights if slip == "raw" else weights / weights.sum(-1, keepdim=True)


def _slip(slip):
    return functools.partial(_choose, slip=slip)


# ── travel ───────────────────────────────────────────────────────────────────────────────────────


def _travel(x, chosen, weights, experts, comm, slip=""):
    """There and back with its slips switched on one at a time."""
    (T, k), mine = chosen.shape, len(experts)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    token = order % T if slip == "wrong token" else order // k
    counts = torch.bincount(flat, minlength=comm.size * mine)
    coming = comm.all_to_all(counts).view(comm.size, mine)
    there, back = counts.view(-1, mine).sum(1).tolist(), coming.sum(1).tolist()
    if slip == "padded":
        return _padded(x, chosen, weights, experts, comm)
    rows = comm.all_to_all(x[token], there, back)
    pieces = list(rows.split(coming.flatten().tolist()))
    if slip == "by expert":  # as if rows came expert by expert
        cuts = coming.T.flatten().tolist()
        pieces = list(rows.split(cuts))
        pieces = [pieces[e * comm.size + r] for r in range(comm.size) for e in range(mine)]
    outputs = [experts[i % mine](piece) for i, piece in enumerate(pieces)]
    if slip == "left by expert":  # results leave in the order of experts, not of ranks
        outputs = [outputs[r * mine + e] for e in range(mine) for r in range(comm.size)]
    rows = comm.all_to_all(torch.cat(outputs), back, there)
    if slip != "unweighted":
        shuffled = slip == "unsorted weights"
        rows = rows * weights.flatten()[slice(None) if shuffled else order][:, None]
    out = torch.zeros_like(x)
    if slip == "overwritten":
        out[token] = rows
        return out
    if slip == "as they come":
        return rows.view(T, k, -1).sum(1)
    if slip == "half lost":
        rows, token = rows[: len(rows) // 2], token[: len(token) // 2]
    return out.index_add(0, token, rows)


def _padded(x, chosen, weights, experts, comm):
    """GShard's way: room for every token at every expert, full or not."""
    E, T = comm.size * len(experts), len(x)
    most = int(comm.all_reduce(torch.tensor(T), "max"))
    room = x.new_zeros(E, most, x.shape[1])
    room[:, :T] = x
    came = comm.all_to_all(room).view(comm.size, len(experts), most, -1)
    done = torch.stack([expert(came[:, i]) for i, expert in enumerate(experts)], 1)
    home = comm.all_to_all(done.flatten(0, 1))[:, :T]
    gates = x.new_zeros(T, E).scatter(1, chosen, weights)
    return (gates.T[..., None] * home).sum(0)


def _trip(slip):
    return functools.partial(_travel, slip=slip)


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


def _step(model, tokens, dp, edp, alpha, *, experts="edp", over=None, history=True, late=False):
    """A step with its slips switched on one at a time."""
    loss = model.loss(tokens, tokens)
    balance = 0.0
    for block in model.blocks:
        routing = block.feed_forward.routing
        share = routing.load / routing.load.sum()
        mean = routing.probabilities.mean(0)
        mean = mean if history else torch.tensor(mean.tolist(), dtype=mean.dtype)
        balance = balance + alpha * len(share) * (share * mean).sum()
    if late:
        loss.backward()
    loss = loss + balance
    if not late:
        loss.backward()
    ours = expert_parallel.expert_parameters(model)
    for name, parameter in model.named_parameters():
        group = {"dp": dp, "edp": edp}[experts if name in ours else "dp"] if experts else dp
        if name in ours and not experts:
            continue
        parameter.grad = group.all_reduce(parameter.grad) / (over or group.size)
    return loss


def _all_over_edp(model, tokens, dp, edp, alpha):
    return _step(model, tokens, edp, edp, alpha)


def _experts_over_all(model, tokens, dp, edp, alpha):
    """Summed over edp, divided by all ranks of dp."""
    loss = _step(model, tokens, dp, edp, alpha)
    for parameter in expert_parallel.expert_parameters(model).values():
        parameter.grad *= edp.size / dp.size
    return loss


def _experts_summed(model, tokens, dp, edp, alpha):
    loss = _step(model, tokens, dp, edp, alpha)
    for parameter in expert_parallel.expert_parameters(model).values():
        parameter.grad *= edp.size
    return loss


WRONG = {
    "expert_parallel/route": (
        Wrong("not renormalized", _slip("raw"), "weights add up to 1", "Divide them by their sum"),
        Wrong("softmax for both", _slip("one score"), "weights add up to 1", "each by itself"),
        Wrong("softmax twice", _slip("softmax twice"), "weights add up to 1", "scores already"),
        Wrong("the worst k", _slip("worst"), "the best k", "the k highest"),
        Wrong("no bias", _slip("no bias"), "the bias only chooses", "where experts are chosen"),
        Wrong(
            "a bias on logits", _slip("bias on logits"), "the bias only chooses", "after softmax"
        ),
        Wrong(
            "weights with the bias",
            _slip("biased weights"),
            "the bias only chooses",
            "from the scores without it",
        ),
        Wrong("detached", _slip("detached"), "the router learns", "through the weights alone"),
        Wrong("by way of numbers", _slip("numbers"), "the router learns", "tolist"),
        Wrong(
            "a sum without a gradient",
            _slip("sum without a gradient"),
            "the router learns",
            "their sum included",
        ),
    ),
    "expert_parallel/travel": (
        Wrong("overwritten", _trip("overwritten"), "one rank", "index_add adds"),
        Wrong("unweighted", _trip("unweighted"), "one rank", "without their weights"),
        Wrong("as they come", _trip("as they come"), "one rank", "places"),
        Wrong("other tokens' weights", _trip("unsorted weights"), "one rank", "weights or places"),
        Wrong("half of the rows lost", _trip("half lost"), "one rank", "only one visit is left"),
        Wrong("the wrong token leaves", _trip("wrong token"), "one rank", "places"),
        Wrong(
            "cut by expert first",
            _trip("by expert"),
            "every token in its place",
            "by expert, if you sent it so",
        ),
        Wrong(
            "left by expert",
            _trip("left by expert"),
            "every token in its place",
            "places",
        ),
        Wrong("room for everybody", _trip("padded"), "bytes sent", "padded"),
    ),
    "expert_parallel/bug-hunt": (
        Wrong(
            "the one of the lab",
            functools.partial(_step, experts="dp", history=False),
            "experts",
            "different",
        ),
        Wrong("experts over dp", functools.partial(_step, experts="dp"), "experts", "different"),
        Wrong("experts not reduced", functools.partial(_step, experts=""), "experts", "its own"),
        Wrong("all over edp", _all_over_edp, "what all ranks hold", "mean over dp"),
        Wrong(
            "balance without a history",
            functools.partial(_step, history=False),
            "balance",
            "P must have one",
        ),
        Wrong(
            "balance after backward",
            functools.partial(_step, late=True),
            "balance",
            "added after backward",
        ),
        Wrong("divided by dp", _experts_over_all, "experts", "half"),
        Wrong("summed, not averaged", _experts_summed, "experts", "twice"),
    ),
}
