"""Small models, all of whose weights are drawn, and a few steps of training: what the tests of tensor, context and expert parallelism compare."""

import torch

from labutils.model import GPT


def random_(module, seed, std=0.3):
    """All weights drawn, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, std, generator=generator)
    return module


def build(config, seed, dtype=torch.float64):
    """A GPT of drawn weights."""
    return random_(GPT(config).to(dtype), seed)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, tokens, targets, count=3, loss=None):
    """Losses, the last gradients and the weights; `loss(tokens, targets)` is the model's unless given."""
    losses, loss = [], loss or model.loss
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(loss(tokens, targets))
        losses[-1].backward()
        optimizer.step()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], gradients, weights(model)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}
