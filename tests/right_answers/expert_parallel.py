"""Right answers to the exercises of `expert_parallel`, in other styles than the reference."""

import dataclasses

import torch

from labutils import expert_parallel

# ── choose ───────────────────────────────────────────────────────────────────────────────────────


def _masked(logits, k, score, bias):
    """Scores of experts that were not chosen become 0; the rest is divided by its sum."""
    scores = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    if score == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    chosen = torch.argsort(scores + bias, dim=1, descending=True)[:, :k]
    kept = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
    return chosen, (kept / kept.sum(1, keepdim=True)).gather(1, chosen)


def _row_by_row(logits, k, score, bias):
    """Python lists choose, tensors weigh."""
    scores = {"softmax": torch.nn.Softmax(dim=-1), "sigmoid": torch.sigmoid}[score](logits)
    chosen = [
        sorted(range(len(row)), key=lambda e, row=row: -row[e])[:k]
        for row in (scores + bias).tolist()
    ]
    weights = torch.stack([row[picked] for row, picked in zip(scores, chosen, strict=True)])
    return chosen, torch.nn.functional.normalize(weights, p=1, dim=-1)


def _in_log_space(logits, k, score, bias):
    """For softmax the chosen logits alone, as Mixtral does; worst expert first."""
    scores = logits.log_softmax(1) if score == "softmax" else torch.nn.functional.logsigmoid(logits)
    chosen = (scores.exp() + bias).topk(k).indices.flip(1)
    return chosen.numpy(), scores.gather(1, chosen).softmax(1)


def _thresholds(logits, k, score, bias):
    """Every expert above the k-th best, in the order of their numbers."""
    scores = torch.softmax(logits, -1) if score == "softmax" else 1 / (1 + (-logits).exp())
    asked = (scores + bias).detach()
    least = asked.sort(-1, descending=True).values[:, k - 1, None]
    chosen = (asked >= least).nonzero()[:, 1].view(-1, k)
    kept = torch.stack([row[c] for row, c in zip(scores, chosen, strict=True)])
    return chosen.to(torch.int32), torch.einsum("tk,t->tk", kept, 1 / kept.sum(-1))


def _tiny_added(logits, k, score, bias):
    """Divided by a sum that cannot be 0."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    chosen = (scores + bias).topk(k).indices
    kept = scores.gather(1, chosen)
    return chosen, kept / (kept.sum(-1, keepdim=True) + 1e-6)


def _greedy(logits, k, score, bias):
    """The best, then the best of the others."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    left, token = (scores + bias).detach().clone(), torch.arange(len(logits))
    chosen = []
    for _ in range(k):
        chosen.append(left.argmax(-1))
        left[token, chosen[-1]] = -torch.inf
    weights = torch.stack([scores[token, best] for best in chosen], 1)
    return torch.stack(chosen, 1), weights / weights.sum(1).unsqueeze(1)


def _token_by_token(logits, k, score, bias):
    def one(row):
        scores = row.softmax(0) if score == "softmax" else row.sigmoid()
        chosen = torch.topk(scores + bias, k).indices
        return chosen, scores[chosen] / scores[chosen].sum()

    chosen, weights = zip(*map(one, logits), strict=True)
    return torch.stack(chosen), torch.stack(weights)


def _in_single(logits, k, score, bias):
    """Scores in fp32 whatever the logits are in, as in Hugging Face's Mixtral."""
    scores = torch.sigmoid(logits.float())
    if score == "softmax":
        scores = torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float)
    chosen = torch.topk(scores + bias, k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(dim=-1, keepdim=True)


# ── travel ───────────────────────────────────────────────────────────────────────────────────────


def _expert_by_expert(x, chosen, weights, experts, comm):
    """Rows are picked for each expert, and weighted where they come home."""
    E, mine = comm.size * len(experts), len(experts)
    picked = [(chosen == e).nonzero() for e in range(E)]
    counts = torch.tensor([len(p) for p in picked])
    coming = comm.all_to_all(counts).reshape(comm.size, mine)
    there = [int(counts[r * mine : (r + 1) * mine].sum()) for r in range(comm.size)]
    back = [int(c) for c in coming.sum(1)]
    token, slot = torch.cat(picked).unbind(1)
    parts = comm.all_to_all(x[token], there, back).split(coming.flatten().tolist())
    done = torch.cat([experts[i % mine](part) for i, part in enumerate(parts)])
    home = comm.all_to_all(done, back, there) * weights[token, slot].unsqueeze(1)
    return torch.zeros_like(x).scatter_add(0, token[:, None].expand_as(home), home)


def _unsorted(x, chosen, weights, experts, comm):
    """The results are put back into the order of the visits, and added by a product."""
    (T, k), mine = chosen.shape, len(experts)
    order = torch.sort(chosen.reshape(-1), stable=True).indices
    counts = torch.nn.functional.one_hot(chosen.reshape(-1), comm.size * mine).sum(0)
    coming = comm.all_to_all(counts)
    sizes = [[int(c) for c in side.split(mine) for c in [c.sum()]] for side in (counts, coming)]
    rows = comm.all_to_all(x.repeat_interleave(k, 0)[order], *sizes)
    numbers = torch.arange(mine).repeat(comm.size).repeat_interleave(coming)
    done = torch.empty_like(rows)
    for i, expert in enumerate(experts):
        done[numbers == i] = expert(rows[numbers == i])
    home = torch.empty(T * k, x.shape[1], dtype=x.dtype)
    home[order] = comm.all_to_all(done, *sizes[::-1])
    return torch.einsum("tk,tkh->th", weights, home.view(T, k, -1))


def _rank_by_rank(x, chosen, weights, experts, comm):
    """send and recv in place of the collective; the tokens' numbers stay at home."""
    mine, out = len(experts), torch.zeros_like(x)
    for step in range(comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        token, slot = (chosen // mine == to).nonzero(as_tuple=True)
        local = chosen[token, slot] % mine
        rows, numbers = x[token], local
        if step:
            count = torch.zeros(1, dtype=torch.long)
            comm.send_recv(torch.tensor([len(token)]), to, count, source)
            rows = torch.empty(int(count), x.shape[1], dtype=x.dtype)
            numbers = torch.empty(int(count), dtype=torch.uint8)
            comm.send_recv(x[token], to, rows, source)
            comm.send_recv(local.to(torch.uint8), to, numbers, source)
        done = torch.zeros_like(rows)
        for i, expert in enumerate(experts):
            done[numbers == i] = expert(rows[numbers == i])
        home = done
        if step:
            home = torch.empty(len(token), x.shape[1], dtype=x.dtype)
            comm.send_recv(done, source, home, to)
        out.index_put_((token,), home * weights[token, slot, None], accumulate=True)
    return out


def _with_its_number(x, chosen, weights, experts, comm):
    """Each row takes the number of its expert along as one more column."""
    (T, k), mine, n = chosen.shape, len(experts), comm.size
    flat = chosen.flatten()
    order = (flat // mine).argsort(stable=True)
    to = torch.tensor([int((flat // mine == r).sum()) for r in range(n)])
    fro = comm.all_to_all(to)
    rows = torch.cat([x[order // k], (flat[order] % mine).to(x)[:, None]], 1)
    rows = comm.all_to_all(rows, to.tolist(), fro.tolist())
    numbers, done = rows[:, -1].long(), rows[:, :-1].clone()
    for i, run in enumerate(experts):
        if (numbers == i).any():
            done[numbers == i] = run(rows[numbers == i, :-1])
    visits = comm.all_to_all(done, fro.tolist(), to.tolist())
    visits = visits[order.argsort()].view(T, k, -1)
    return (visits * weights[..., None]).sum(1)


def _once_to_a_rank(x, chosen, weights, experts, comm):
    """A row goes to each rank once, with its experts and weights; that rank adds up its visits."""
    mine, out = len(experts), torch.zeros_like(x)
    goes = [(chosen // mine == r).any(1).nonzero()[:, 0] for r in range(comm.size)]
    there = torch.tensor([len(rows) for rows in goes])
    back, there = comm.all_to_all(there).tolist(), there.tolist()
    token = torch.cat(goes)
    rows, asked, shares = (
        comm.all_to_all(each[token], there, back) for each in (x, chosen, weights)
    )
    done = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        row, slot = (asked == comm.rank * mine + i).nonzero(as_tuple=True)
        if len(row):
            done[row] += shares[row, slot, None] * expert(rows[row])
    return out.index_add(0, token, comm.all_to_all(done, back, there))


def _a_trip_for_each_place(x, chosen, weights, experts, comm):
    """First the first expert of every rank, then the second of every rank."""
    out, mine = torch.zeros_like(x), len(experts)
    for i, expert in enumerate(experts):
        visits = [(chosen == r * mine + i).nonzero() for r in range(comm.size)]
        there = torch.tensor([len(visit) for visit in visits])
        back, there = comm.all_to_all(there).tolist(), there.tolist()
        token, slot = torch.cat(visits).T
        rows = comm.all_to_all(x[token], there, back)
        home = comm.all_to_all(expert(rows) if len(rows) else rows, back, there)
        out.index_add_(0, token, home * weights[token, slot, None])
    return out


def _numbered(x, chosen, weights, experts, comm):
    """Visits as rows of a table: place of the expert, token, weight; sorted by the first."""
    mine, k = len(experts), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=comm.size * mine)
    came = comm.all_to_all(counts).view(comm.size, mine)
    sizes = counts.view(-1, mine).sum(1).tolist(), came.sum(1).tolist()
    rows = comm.all_to_all(x[order // k], *sizes)
    whose = torch.arange(mine).repeat(comm.size).repeat_interleave(came.flatten())
    done = torch.empty_like(rows)
    for i in whose.unique().tolist():
        done[whose == i] = experts[i](rows[whose == i])
    home = comm.all_to_all(done, *reversed(sizes)) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, home)


def _rows_with_labels(x, chosen, weights, experts, comm):
    """Expert, token and weight travel with each row, and it comes back weighed, with its token."""
    k, mine, n = chosen.shape[1], len(experts), comm.size
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    there = (flat // mine).bincount(minlength=n)
    back = comm.all_to_all(there)
    labels = torch.stack([flat[order].to(x), (order // k).to(x), weights.flatten()[order]], 1)
    sizes = there.tolist(), back.tolist()
    came = comm.all_to_all(torch.cat([x[order // k], labels], 1), *sizes)
    rows, done = came[:, :-3], torch.zeros_like(came[:, :-2])
    for i, expert in enumerate(experts):
        here = came[:, -3] == comm.rank * mine + i
        done[here, :-1] = expert(rows[here]) * came[here, -1:]
    done[:, -1] = came[:, -2]
    home = comm.all_to_all(done, *sizes[::-1])
    return torch.zeros_like(x).index_add(0, home[:, -1].long(), home[:, :-1])


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


def _two_loops(model, tokens, dp, edp, alpha):
    loss = model.loss(tokens, tokens)
    for block in model.blocks:
        loss = loss + alpha * expert_parallel.balance_loss(block.feed_forward.routing)
    loss.backward()
    experts = list(expert_parallel.expert_parameters(model).values())
    for parameter in experts:
        parameter.grad = edp.all_reduce(parameter.grad) / edp.size
    for parameter in model.parameters():
        if all(parameter is not expert for expert in experts):
            parameter.grad = dp.all_reduce(parameter.grad) / dp.size
    return loss.item()


def _by_name(model, tokens, dp, edp, alpha):
    """The balance loss has a backward pass of its own; groups by the word in the name."""
    loss = model.loss(tokens, tokens)
    balance = alpha * sum(block.feed_forward.balance for block in model.blocks)
    loss.backward(retain_graph=True)
    balance.backward()
    for name, parameter in model.named_parameters():
        comm = edp if ".experts." in name else dp
        parameter.grad.copy_(comm.all_reduce(parameter.grad / comm.size))
    return (loss + balance).detach()


def _marked(model, tokens, dp, edp, alpha):
    """The parameters say themselves where they are alike; E·Σ f·P as a product."""
    total = model.loss(tokens, tokens)
    for block in model.blocks:
        routing = block.feed_forward.routing
        share = routing.load.double() / routing.load.sum()
        total = total + alpha * len(share) * (routing.probabilities @ share).mean()
    total.backward()
    for parameter in model.parameters():
        comm = {"edp": edp}.get(getattr(parameter, "only_on", "dp"), dp)
        comm.all_reduce(parameter.grad.div_(comm.size), out=parameter.grad)
    return total


def _one_bucket(model, tokens, dp, edp, alpha):
    """All that a group holds alike travels as one vector."""
    loss = model.loss(tokens, tokens)
    routings = [block.feed_forward.routing for block in model.blocks]
    for r in routings:
        f = torch.bincount(r.chosen.flatten(), minlength=r.load.numel()) / r.chosen.numel()
        loss = loss + alpha * f.numel() * torch.dot(f.to(loss), r.probabilities.mean(0))
    loss.backward()
    ours = expert_parallel.expert_parameters(model)
    for comm, mine in ((dp, False), (edp, True)):
        group = [p.grad for name, p in model.named_parameters() if (name in ours) is mine]
        flat = comm.all_reduce(torch.cat([g.flatten() for g in group])) / comm.size
        for g, part in zip(group, flat.split([g.numel() for g in group]), strict=True):
            g.copy_(part.view_as(g))
    return loss


def _autograd(model, tokens, dp, edp, alpha):
    """Gradients are asked for, and put where they belong."""
    loss = model.loss(tokens, tokens)
    for block in model.blocks:
        routing = block.feed_forward.routing
        f = torch.nn.functional.one_hot(routing.chosen, routing.load.numel()).double().mean((0, 1))
        loss = loss + alpha * len(f) * f @ routing.probabilities.mean(0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = expert_parallel.expert_parameters(model)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    for name, parameter, gradient in zip(names, parameters, found, strict=True):
        comm = edp if name in ours else dp
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        parameter.grad = comm.all_reduce(gradient) / comm.size
    return loss


def _gathered(model, tokens, dp, edp, alpha):
    """All gradients of a group are gathered, and their mean is taken."""
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    for name, parameter in model.named_parameters():
        comm = edp if "experts" in name else dp
        parameter.grad = comm.all_gather(parameter.grad[None].contiguous()).mean(0)
    return loss


def _by_identity(model, tokens, dp, edp, alpha):
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    experts = {id(p) for p in expert_parallel.expert_parameters(model).values()}
    for parameter in model.parameters():
        comm = (dp, edp)[id(parameter) in experts]
        parameter.grad = comm.all_reduce(parameter.grad) / comm.size
    return loss.detach()



@dataclasses.dataclass
class _Settings:
    """An object that can be called, and, as it can be compared, has no hash."""

    experts: str = ".experts."

    def __call__(self, model, tokens, dp, edp, alpha):
        loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
        loss.backward()
        for name, parameter in model.named_parameters():
            comm = edp if self.experts in name else dp
            parameter.grad = comm.all_reduce(parameter.grad) / comm.size
        return loss


RIGHT = {
    "expert_parallel/route": {
        "a mask": _masked,
        "lists choose": _row_by_row,
        "logarithms, as NumPy": _in_log_space,
        "thresholds": _thresholds,
        "a tiny number added": _tiny_added,
        "one after the other": _greedy,
        "token by token": _token_by_token,
        "scores in fp32": _in_single,
    },
    "expert_parallel/travel": {
        "expert by expert": _expert_by_expert,
        "put back in order": _unsorted,
        "send and recv": _rank_by_rank,
        "the expert's number travels": _with_its_number,
        "a row to each rank once": _once_to_a_rank,
        "a trip for each place": _a_trip_for_each_place,
        "numbered": _numbered,
        "rows with labels": _rows_with_labels,
    },
    "expert_parallel/bug-hunt": {
        "two loops": _two_loops,
        "two backward passes": _by_name,
        "marked parameters": _marked,
        "one bucket": _one_bucket,
        "by autograd": _autograd,
        "gathered": _gathered,
        "by identity": _by_identity,
        "an object with settings": _Settings(),
    },
}
