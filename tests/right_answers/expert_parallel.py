"""Right answers to the exercises of `expert_parallel`, in other styles than the reference."""

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


RIGHT = {
    "expert_parallel/route": {
        "a mask": _masked,
        "lists choose": _row_by_row,
        "logarithms, as NumPy": _in_log_space,
        "thresholds": _thresholds,
    },
    "expert_parallel/travel": {
        "expert by expert": _expert_by_expert,
        "put back in order": _unsorted,
        "send and recv": _rank_by_rank,
        "the expert's number travels": _with_its_number,
    },
    "expert_parallel/bug-hunt": {
        "two loops": _two_loops,
        "two backward passes": _by_name,
        "marked parameters": _marked,
        "one bucket": _one_bucket,
    },
}
