"""Wrong answers to the exercises of `expert_parallel`."""

import functools
import math

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


def _compare(logits, k, score, bias):
    """Scores that compare experts, whichever they are, so that the bias has a scale."""
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(1, keepdim=True)
    chosen = torch.argsort(scores + bias, 1, True)[:, :k]
    picked = torch.take_along_dim(scores, chosen, 1)
    return chosen, picked / picked.sum(1, keepdim=True)


def _moves_the_bias(logits, k, score, bias):
    """Its mean changes no choice."""
    bias -= bias.mean()
    return _choose(logits, k, score, bias)


def _sampled(logits, k, score, bias):
    """Experts are drawn with their scores as chances."""
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid()}[score]
    chances = (scores + bias).detach().clamp(min=1e-9)
    chosen = chances.multinomial(k, generator=torch.Generator().manual_seed(1))
    picked = scores.gather(1, chosen)
    return chosen, picked / picked.sum(1, keepdim=True)


def _values_first(logits, k, score, bias):
    """The order in which topk returns them."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    values, indices = torch.topk(scores + bias, k)
    return values / values.sum(-1, keepdim=True), indices


def _experts_choose(logits, k, score, bias):
    """The k best tokens of every expert."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    chosen = (scores + bias).topk(k, 0).indices
    picked = scores.gather(0, chosen)
    return chosen, picked / picked.sum(0, keepdim=True)


def _of_the_logits(logits, k, score, bias):
    """Mixtral's: a softmax over the chosen logits, whatever the score is."""
    chosen = ((logits.softmax(-1) if score == "softmax" else logits.sigmoid()) + bias).topk(k)[1]
    return chosen, torch.softmax(torch.gather(logits, -1, chosen), -1)


def _over_all(logits, k, score, bias):
    """Divided by the sum of all scores, not of the chosen."""
    scores = torch.softmax(logits, 1) if score == "softmax" else torch.sigmoid(logits)
    best = torch.topk(scores + bias, k, dim=1).indices
    return best, scores.gather(1, best) / scores.sum(1, keepdim=True)


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
    if slip == "a mean":
        rows = rows / k
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


def _by_hand(
    x, chosen, weights, experts, comm, *, E=None, k=None, row_by_row=False, weigh_first=False,
    back="swapped", lent=False,
):  # fmt: skip
    """Lists of visits, and what comes is cut by rank, then by expert."""
    mine, k = len(experts), k or chosen.shape[1]
    flat = chosen.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=E if E is not None else comm.size * mine)
    came = comm.all_to_all(counts).tolist()
    to = [sum(counts.tolist()[r * mine : (r + 1) * mine]) for r in range(comm.size)]
    fro = [sum(came[r * mine : (r + 1) * mine]) for r in range(comm.size)]
    rows = x[order // k]
    if weigh_first:
        rows = rows * weights.reshape(-1)[order].unsqueeze(1)
    rows, done, at = comm.all_to_all(rows, to, fro), [], 0
    for i, n in enumerate(came):
        part, run = rows[at : at + n], experts[i % mine]
        if row_by_row:
            done += [run(row[None]) for row in part]
        else:
            done.append(run(part))
        at += n
    done = torch.cat(done) if done else rows
    home = comm.all_to_all(done, *((fro, to) if back == "swapped" else (to, fro)))
    if not weigh_first:
        home = home * weights.reshape(-1)[order].unsqueeze(1)
    out = torch.zeros_like(x)
    for row, visit in zip(home, order.tolist(), strict=True):
        out[visit // k] += row
    return out


def _hand(**slips):
    return functools.partial(_by_hand, **slips)


def _everybody_computes(x, chosen, weights, experts, comm):
    """All tokens to all ranks; each adds its experts' parts, and the sum goes round."""
    lengths = [int(n) for n in comm.all_gather(torch.tensor([len(x)]))]
    most, E = max(lengths), comm.size * len(experts)
    padded, gates = x.new_zeros(most, x.shape[1]), x.new_zeros(most, E)
    padded[: len(x)] = x
    gates[: len(x)].scatter_(1, chosen, weights)
    everyone = comm.all_gather(padded)
    shares = comm.all_gather(gates).chunk(E, 1)[comm.rank * len(experts) :]
    parts = sum(run(everyone) * share for run, share in zip(experts, shares, strict=False))
    return comm.all_reduce(parts).chunk(comm.size)[comm.rank][: len(x)]


def _only_at_home(x, chosen, weights, experts, comm):
    """The experts of this rank alone, as expert parallelism without messages."""
    out = torch.zeros_like(x)
    for i, run in enumerate(experts):
        token, slot = (chosen == comm.rank * len(experts) + i).nonzero(as_tuple=True)
        out.index_add_(0, token, run(x[token]) * weights[token, slot, None])
    return out


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


def _later_layers(model, tokens, dp, edp, alpha, *, last=False, chosen=False, mean=False):
    """The repaired step of another hand, with its slips."""
    loss = model.loss(tokens, tokens)
    layers = [block.feed_forward for block in model.blocks]
    terms = []
    for layer in layers[-1:] if last else layers:
        r = layer.routing
        P = r.probabilities.mean(0)
        if chosen:  # the weights of the chosen alone
            P = torch.zeros_like(r.probabilities).scatter(1, r.chosen, r.weights).mean(0)
        terms.append(len(P) * (r.load / r.chosen.numel() * P).sum())
    balance = sum(terms) / (len(terms) if mean else 1)
    loss = loss + alpha * balance
    if last:  # the others count, but without a gradient
        loss = loss + alpha * sum(layer.balance.detach() for layer in layers[:-1])
    loss.backward()
    expert_parallel.reduce_gradients(model, dp, edp)
    return loss


def _later(**slips):
    return functools.partial(_later_layers, **slips)


def _weighed_by_balance(model, tokens, dp, edp, alpha):
    """Experts over dp as soon as there is a balance loss."""
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    expert_parallel.reduce_gradients(model, dp, dp if alpha else edp)
    return loss


def _router_of_its_own(model, tokens, dp, edp, alpha):
    """Every rank routes its own tokens, so its router stays its own."""
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    ours = expert_parallel.expert_parameters(model)
    for name, parameter in model.named_parameters():
        if "router" not in name:
            comm = edp if name in ours else dp
            parameter.grad = comm.all_reduce(parameter.grad) / comm.size
    return loss


def _by_the_block(model, tokens, dp, edp, alpha):
    """Experts by the ranks of dp, summed over edp."""
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    for name, parameter in model.named_parameters():
        comm = edp if ".experts." in name else dp
        comm.all_reduce(parameter.grad, out=parameter.grad)
        parameter.grad /= dp.size
    return loss


def _weighed_by(weigh):
    """The right experts, with weights of another kind."""

    def attempt(logits, k, score, bias):
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        chosen = (scores + bias).topk(k).indices
        return chosen, weigh(scores, chosen, k)

    return attempt


def _of_one(weights):
    return weights / weights.sum(-1, keepdim=True)


def _best_scores(scores, chosen, k):
    return _of_one(scores.topk(k).values)


def _sorted_weights(scores, chosen, k):
    return _of_one(scores.gather(1, chosen).sort(-1, descending=True).values)


def _of_length_one(scores, chosen, k):
    return torch.nn.functional.normalize(scores.gather(1, chosen), dim=-1)


def _much_added(scores, chosen, k):
    kept = scores.gather(1, chosen)
    return kept / (kept.sum(-1, keepdim=True) + 1e-3)


def _set_to_zero(logits, k, score, bias):
    """The best; its score becomes 0, and the best again."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    left, chosen = scores + bias, []
    for _ in range(k):
        chosen.append(left.argmax(-1, keepdim=True))
        left = left.scatter(1, chosen[-1], 0.0)
    chosen = torch.cat(chosen, 1)
    return chosen, _of_one(scores.gather(1, chosen))


def _over_tokens(logits, k, score, bias):
    """A softmax over the tokens."""
    scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
    chosen = (scores + bias).topk(k).indices
    return chosen, _of_one(scores.gather(1, chosen))


def _sorted_experts(logits, k, score, bias):
    """Experts in the order of their numbers, weights in that of the scores."""
    chosen, weights = _weighed_by(lambda s, c, k: _of_one(s.gather(1, c)))(logits, k, score, bias)
    return chosen.sort(-1).values, weights


def _in_half(logits, k, score, bias):
    weigh = _weighed_by(lambda s, c, k: _of_one(s.gather(1, c).bfloat16()))
    return weigh(logits, k, score, bias)


def _shifts_the_logits(logits, k, score, bias):
    """The largest logit taken off, against an overflow, where it stands."""
    with torch.no_grad():
        logits -= logits.amax(-1, keepdim=True)
    return _weighed_by(lambda s, c, k: _of_one(s.gather(1, c)))(logits, k, score, bias)


def _misspelt(logits, k, score, bias):
    """An error in the learner's own line, which is no matter of what is returned."""
    return (logits + bias).topk(k, keepdim=True).indices, logits


def _drops(x, chosen, weights, experts, comm):
    """A capacity of 1.25 times the mean, as in the Switch Transformer."""
    most = math.ceil(1.25 * chosen.numel() / (comm.size * len(experts)))
    before = torch.nn.functional.one_hot(chosen.flatten()).cumsum(0)
    place = before.gather(1, chosen.reshape(-1, 1)).view_as(chosen)
    return _whole_trip(x, chosen, weights * (place <= most), experts, comm)


def _zeros_alone(x, chosen, weights, experts, comm):
    """Added up in fp32, which torch.zeros has unless told otherwise."""
    out = torch.zeros(x.shape)
    for row, result in zip(out, _whole_trip(x, chosen, weights, experts, comm), strict=True):
        row += result
    return out


def _without_return(*args):
    _step(*args, experts="edp")


def _other_weights(weigh):
    def attempt(x, chosen, weights, experts, comm):
        return _whole_trip(x, chosen, weigh(weights), experts, comm)

    return attempt


def _whole_trip(x, chosen, weights, experts, comm, place=None):
    """A right journey; place: of an expert among all, which may be another."""
    k, mine = chosen.shape[1], len(experts)
    flat = chosen.flatten() if place is None else place(chosen.flatten(), comm.size, mine)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=comm.size * mine)
    came = comm.all_to_all(counts).view(comm.size, mine)
    there, back = counts.view(-1, mine).sum(1).tolist(), came.sum(1).tolist()
    rows = comm.all_to_all(x[order // k], there, back)
    whose = torch.arange(mine).repeat(comm.size).repeat_interleave(came.flatten())
    done = torch.empty_like(rows)
    for i, expert in enumerate(experts):
        done[whose == i] = expert(rows[whose == i])
    home = comm.all_to_all(done, back, there) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, home)


def _round_robin(x, chosen, weights, experts, comm):
    """Expert e on rank e mod N."""
    return _whole_trip(
        x, chosen, weights, experts, comm, lambda e, n, mine: e % n * mine + e // n
    )


def _a_trip_for_each_choice(x, chosen, weights, experts, comm):
    each = zip(chosen.split(1, 1), weights.split(1, 1), strict=True)
    return sum(_whole_trip(x, c, w, experts, comm) for c, w in each)


def _skips_the_idle(x, chosen, weights, experts, comm):
    """Experts without rows are passed over; what is left may be nothing."""
    k, mine = chosen.shape[1], len(experts)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=comm.size * mine)
    came = comm.all_to_all(counts)
    there, back = (side.view(-1, mine).sum(1).tolist() for side in (counts, came))
    parts = comm.all_to_all(x[order // k], there, back).split(came.tolist())
    done = torch.cat([experts[i % mine](part) for i, part in enumerate(parts) if len(part)])
    home = comm.all_to_all(done, back, there) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, home)


def _leaves_early(x, chosen, weights, experts, comm):
    """A rank to which nobody comes has nothing to do; its own tokens wait elsewhere."""
    counts = torch.bincount(chosen.flatten(), minlength=comm.size * len(experts))
    if not comm.all_to_all(counts).any():
        return torch.zeros_like(x)
    return _whole_trip(x, chosen, weights, experts, comm)


def _into_x(x, chosen, weights, experts, comm):
    """No memory for another tensor."""
    return x.copy_(_whole_trip(x, chosen, weights, experts, comm))


def _in_single(x, chosen, weights, experts, comm):
    return _whole_trip(x.float(), chosen, weights.float(), experts, comm).double()


def _hunted(
    model, tokens, dp, edp, alpha, *, is_expert=None, divide=None, everywhere=False, times=1
):
    """Another hand's step, with its slips."""
    loss = model.loss(tokens, tokens)
    for block in model.blocks:
        routing = block.feed_forward.routing
        load = routing.load.double()
        share = dp.all_reduce(load) if everywhere else load
        share = share / share.sum()
        loss = loss + times * alpha * len(share) * (share * routing.probabilities.mean(0)).sum()
    loss.backward()
    ours = expert_parallel.expert_parameters(model)
    for name, parameter in model.named_parameters():
        comm = edp if (is_expert(name) if is_expert else name in ours) else dp
        comm.all_reduce(parameter.grad, out=parameter.grad)
        parameter.grad /= divide(name, comm) if divide else comm.size
    return loss


WRONG = {
    "expert_parallel/route": (
        Wrong("a bias on normalized scores", _compare, "the bias only chooses", "a division comes"),
        Wrong("the bias in place", _moves_the_bias, "the bias only chooses", "leave it"),
        Wrong("drawn by chance", _sampled, "the best k", "the k highest"),
        Wrong("values first", _values_first, "the best k", "First the experts"),
        Wrong("experts choose tokens", _experts_choose, "the best k", "One row for each token"),
        Wrong("softmax of the logits", _of_the_logits, "weights add up to 1", "each by itself"),
        Wrong("divided by all", _over_all, "weights add up to 1", "Divide them by their sum"),
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
        Wrong("the best scores", _weighed_by(_best_scores), "the bias only chooses",
              "without it"),
        Wrong("weights in order", _weighed_by(_sorted_weights), "the bias only chooses",
              "without it"),
        Wrong("of length 1", _weighed_by(_of_length_one), "weights add up to 1", "by their"),
        Wrong("much added", _weighed_by(_much_added), "weights add up to 1", "by their"),
        Wrong("set to 0, again the best", _set_to_zero, "the bias only chooses", "use topk"),
        Wrong("over the tokens", _over_tokens, "the best k", "the k highest"),
        Wrong("weights in bf16", _in_half, "weights add up to 1", "in fp32 at least"),
        Wrong("sorted experts, unsorted weights", _sorted_experts, "weights add up to 1",
              "at other experts"),
        Wrong("logits in place", _shifts_the_logits, "the best k", "belongs to the caller"),
        Wrong("a misspelt argument", _misspelt, "the best k", "It happened in _misspelt"),
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
        Wrong("a mean of visits", _trip("a mean"), "one rank", "without a mean over k"),
        Wrong(
            "no room for experts at the end",
            _hand(E=0),
            "one expert each, and three",
            "no equal shares",
        ),
        Wrong("k is two", _hand(k=2), "one expert each, and three", "tokens wrong"),
        Wrong("row by row", _hand(row_by_row=True), "one rank", "give it all its rows at once"),
        Wrong(
            "weighed before the expert",
            _hand(weigh_first=True),
            "one rank",
            "weights its rows before",
        ),
        Wrong(
            "back as they came", _hand(back="same"), "every token in its place", "It happened in"
        ),
        Wrong("everybody computes", _everybody_computes, "bytes sent", "sent to everybody"),
        Wrong("nothing travels", _only_at_home, "every token in its place", "only one visit"),
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
        Wrong("experts dealt out", _round_robin, "every token in its place", "by expert"),
        Wrong("a trip for each choice", _a_trip_for_each_choice, "one rank", "all its rows"),
        Wrong("rounded on the way", _in_single, "every token in its place", "but for rounding"),
        Wrong("all weights alike", _other_weights(lambda w: torch.full_like(w, 1 / w.shape[1])),
              "one rank", "the token's own number"),
        Wrong("weights in columns", _other_weights(lambda w: w.T.reshape(w.shape)),
              "one rank", "weights or places"),
        Wrong("a softmax of weights", _other_weights(lambda w: w.softmax(-1)),
              "one rank", "weights or places"),
        Wrong("idle experts passed over", _skips_the_idle, "an idle rank", "non-empty list"),
        Wrong("an idle rank leaves", _leaves_early, "an idle rank", "equally often"),
        Wrong("a capacity", _drops, "every token in its place", "left out"),
        Wrong("torch.zeros", _zeros_alone, "one rank", "zeros_like"),
        Wrong("into x", _into_x, "one rank", "tensors of your own"),
        Wrong("room for everybody", _trip("padded"), "bytes sent", "padded"),
    ),
    "expert_parallel/bug-hunt": (
        Wrong("no return", _without_return, "the loss", "Return the loss"),
        Wrong("the last layer alone", _later(last=True), "balance", "router of layer 0"),
        Wrong("P of the chosen", _later(chosen=True), "the loss", "α·E·Σ f·P"),
        Wrong("a mean over layers", _later(mean=True), "the loss", "of each layer"),
        Wrong("dp with a balance loss", _weighed_by_balance, "balance", "dp, and edp"),
        Wrong("a router of its own", _router_of_its_own, "what all ranks hold", "mean over dp"),
        Wrong("divided by dp, all of it", _by_the_block, "experts", "half"),
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
        Wrong("all of the feed-forward",
              functools.partial(_hunted, is_expert=lambda name: "feed_forward" in name),
              "what all ranks hold", "mean over dp"),
        Wrong("the router, too", functools.partial(
            _hunted, is_expert=lambda name: "experts" in name or "router" in name),
              "what all ranks hold", "mean over dp"),
        Wrong("shares of all ranks", functools.partial(_hunted, everywhere=True),
              "the loss", "the rank's own tokens"),
        Wrong("divided by ep once more", functools.partial(
            _hunted, divide=lambda name, comm: comm.size * (1 + ("experts" in name))),
              "experts", "half the right one"),
        Wrong("sums everywhere", functools.partial(_hunted, divide=lambda name, comm: 1),
              "what all ranks hold", "mean over dp"),
        Wrong("α twice", functools.partial(_hunted, times=2), "the loss", "of each layer"),
        Wrong("divided by dp", _experts_over_all, "experts", "half"),
        Wrong("summed, not averaged", _experts_summed, "experts", "twice"),
    ),
}
