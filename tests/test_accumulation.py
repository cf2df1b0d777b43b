"""Gradient accumulation: the gradient of the whole batch, where it fails silently, what it holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils import accumulation, measure
from labutils.accumulation import accumulate, micro_batches
from labutils.config import ModelConfig
from labutils.model import GPT

CONFIG = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=65, seq_len=10)


def model(dtype=torch.float64, **changes):
    return GPT(CONFIG, generator=torch.Generator().manual_seed(0)).to(dtype)


def batch(rows, left_out=0.0):
    draw = torch.Generator().manual_seed(7)
    inputs, targets = (
        torch.randint(CONFIG.vocab_size, (rows, CONFIG.seq_len), generator=draw) for _ in range(2)
    )
    return inputs, targets.masked_fill(torch.rand(targets.shape, generator=draw) < left_out, -100)


def gradient(net, call):
    net.zero_grad()
    value = call()
    return value.detach(), torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def whole(net, data):
    def call():
        loss = net.loss(*data)
        loss.backward()
        return loss

    return gradient(net, call)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("left_out", [0.0, 0.6])
def test_equal_to_the_whole_batch(size, left_out):
    net, data = model(), batch(6, left_out)
    loss, expected = whole(net, data)
    found = gradient(
        net,
        lambda: accumulate(
            lambda part: net.loss(*part), micro_batches(data, size), weigh=accumulation.tokens
        ),
    )
    assert torch.allclose(found[0], loss, rtol=1e-12) and torch.allclose(
        found[1], expected, rtol=1e-9, atol=1e-15
    )


def test_rows_are_the_default_weight():
    net, data = model(), batch(5)
    _, expected = whole(net, data)
    _, found = gradient(
        net, lambda: accumulate(lambda part: net.loss(*part), micro_batches(data, 2))
    )
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_without_the_fraction_the_gradient_is_k_times_too_large(k):  # S4-041: 2.0, 4.0, 8.0
    net, data = model(), batch(8)
    _, expected = whole(net, data)

    def forgotten():
        parts = [net.loss(*part) for part in micro_batches(data, 8 // k)]
        for part in parts:
            part.backward()
        return parts[0]

    _, found = gradient(net, forgotten)
    assert float(found.norm() / expected.norm()) == pytest.approx(k, rel=1e-12)


def test_a_mean_of_means_weighs_short_micro_batches_too_much():  # S4-041: a factor of 2.67 between one token and the other
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    parts = [
        torch.tensor([[1.0, 0.0]] * 6, dtype=torch.float64),
        torch.tensor([[0.0, 1.0]] * 2, dtype=torch.float64),
    ]

    def loss(part):
        return (part @ w).mean()

    sum(loss(part) / len(parts) for part in parts).backward()
    naive, w.grad = w.grad, None
    accumulate(loss, parts)
    assert naive.tolist() == pytest.approx([0.5, 0.5]) and w.grad.tolist() == pytest.approx(
        [0.75, 0.25]
    )


def test_a_micro_batch_without_any_target_is_left_out_and_brings_no_nan():
    net, (inputs, targets) = model(), batch(4)
    targets = targets.clone()
    targets[2:] = -100
    _, expected = whole(net, (inputs, targets))
    loss, found = gradient(
        net,
        lambda: accumulate(
            lambda part: net.loss(*part),
            micro_batches((inputs, targets), 2),
            weigh=accumulation.tokens,
        ),
    )
    assert loss.isfinite() and torch.allclose(found, expected, rtol=1e-9, atol=1e-15)


def test_ranks_that_share_a_total_add_up_to_the_whole_batch():
    net, data = model(), batch(8, 0.5)
    _, expected = whole(net, data)
    total = accumulation.tokens(data)
    found = 0
    for half in micro_batches(data, 4):
        _, mine = gradient(
            net,
            lambda half=half: accumulate(
                lambda part: net.loss(*part),
                micro_batches(half, 2),
                weigh=accumulation.tokens,
                total=total,
            ),
        )
        found = found + mine
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-15)


def test_batch_statistics_are_those_of_the_micro_batch():  # S1-029: Goyal et al. 1706.02677, section 2.3
    data = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nets = {
        "batch": nn.BatchNorm1d(3, dtype=torch.float64),
        "layer": nn.LayerNorm(3, dtype=torch.float64),
    }
    equal = {}
    for name, norm in nets.items():
        net = nn.Sequential(norm, nn.Linear(3, 1, dtype=torch.float64))

        def loss(part, net=net):
            return net(part).square().mean()

        expected = gradient(net, lambda loss=loss: accumulate(loss, [data]))[1]
        found = gradient(net, lambda loss=loss: accumulate(loss, micro_batches(data, 2)))[1]
        equal[name] = torch.allclose(expected, found)
    assert equal == {"batch": False, "layer": True}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("size", [8, 2])
def test_clipping_once_is_clipping_the_whole_gradient(size):
    net, data = model(), batch(8)
    expected, unclipped = whole(net, data)
    before, clipped = flat(net.parameters()), 0.1 / (unclipped.norm() + 1e-6) * unclipped
    assert unclipped.norm() > 0.1
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    parts = micro_batches(data, size)
    loss = accumulation.step(optimizer, lambda part: net.loss(*part), parts, max_norm=0.1)
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    found = flat(parameter.grad for parameter in net.parameters())
    assert torch.allclose(found, clipped, rtol=1e-9, atol=1e-15)
    assert torch.allclose(flat(net.parameters()), before - clipped, rtol=1e-9, atol=1e-12)


def test_a_step_clears_old_gradients_and_clips_only_when_asked():
    net, data = model(), batch(2)
    _, expected = whole(net, data)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    accumulation.step(optimizer, lambda part: net.loss(*part), [data])
    assert torch.equal(flat(parameter.grad for parameter in net.parameters()), expected)


@pytest.mark.parametrize("rows, steps", [(8, 2), (10, 3), (2, 1)])
def test_an_epoch_drops_no_tail(rows, steps):
    net, taken = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    parts = iter(micro_batches(batch(rows), 1))
    found = accumulation.epoch(optimizer, lambda part: net.loss(*part), parts, 4, max_norm=0.1)
    assert found == len(taken) == steps
    assert all(parameter.grad is None for parameter in net.parameters())


def test_memory_is_flat_while_the_batch_grows():
    net, held = model(torch.float32), {}
    for rows in (2, 4, 8):
        data = batch(rows)
        for size in {rows, 2}:

            def pass_over(size=size, data=data):
                accumulate(lambda part: net.loss(*part), micro_batches(data, size))

            history = measure.history(pass_over, net)
            activations = max(
                moment.ledger.only(component="activations").total for moment in history.moments
            )
            held[rows, size] = activations - sum(
                tensor.untyped_storage().nbytes() for tensor in data
            )  # the tokens are there anyway
    assert held[8, 2] == held[4, 2] == held[2, 2]
    assert held[8, 8] - held[4, 4] == 2 * (held[4, 4] - held[2, 2]) > 0


def test_small_gradients_are_swamped_in_bf16_and_kept_in_the_buffer():
    w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    slopes = [256.0] + [1.0] * 64
    for slope in slopes:
        (w * slope).sum().backward()
    assert w.grad.item() == 256.0
    w.grad = None
    with accumulation.gradient_buffer([w]) as buffer:
        for slope in slopes:
            (w * slope).sum().backward()
    assert buffer[w].item() == 320.0 and buffer[w].dtype == torch.float32 and w.grad is None
    assert list(buffer) == [w]
    (w * 2).sum().backward()
    assert w.grad.item() == 2.0  # outside of `with` gradients stay where they are


def test_tied_weights_reach_the_buffer_once():
    net, data = model(torch.float32), batch(4)
    _, expected = whole(net, data)
    with pytest.raises(ValueError, match="already holds a gradient"):
        accumulation.gradient_buffer(net.parameters()).__enter__()
    net.zero_grad()
    with accumulation.gradient_buffer(net.parameters()) as buffer:
        accumulate(lambda part: net.loss(*part), micro_batches(data, 2))
    found = torch.cat([buffer[parameter].flatten() for parameter in net.parameters()])
    assert torch.allclose(found, expected, atol=1e-6) and found.numel() == CONFIG.num_params


@given(st.integers(1, 20), st.integers(1, 25))
@settings(max_examples=40, deadline=None)
def test_micro_batches_are_the_batch(rows, size):
    data = {"x": torch.arange(rows), "y": [torch.arange(2 * rows).view(rows, 2)]}
    parts = micro_batches(data, size)
    assert torch.equal(torch.cat([part["x"] for part in parts]), data["x"])
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), data["y"][0])
    assert {len(part["x"]) for part in parts[:-1]} <= {size} and 0 < len(parts[-1]["x"]) <= size
    assert parts[0]["x"].data_ptr() == data["x"].data_ptr()  # a view, not a copy


@pytest.mark.parametrize(
    "call, error, why",
    [
        (lambda: micro_batches(torch.ones(4), 0), ValueError, "size must be at least 1"),
        (
            lambda: micro_batches((torch.ones(4), torch.ones(3)), 2),
            ValueError,
            r"rows, got \[3, 4\]",
        ),
        (lambda: micro_batches(torch.tensor(1.0), 2), ValueError, "a tensor of shape "),
        (lambda: micro_batches({"name": "x"}, 2), ValueError, "a batch has tensors, got {'name'"),
        (lambda: accumulate(lambda part: part.sum(), []), ValueError, "hold 0 of 0"),
        (
            lambda: accumulate(lambda part: part, [torch.ones(2, requires_grad=True)]),
            RuntimeError,
            "created only for scalar outputs",
        ),
        (
            lambda: accumulate(lambda part: part.mean(), [torch.ones(2)], weigh=lambda part: 0),
            ValueError,
            "hold 0 of 0",
        ),
        (
            lambda: accumulate(lambda part: part.mean(), [torch.ones(2)], total=1),
            ValueError,
            "hold 2 of 1",
        ),
    ],
)
def test_bad_input(call, error, why):
    with pytest.raises(error, match=why):
        call()


def test_clipping_needs_a_norm_above_zero():
    layer = nn.Linear(2, 1)
    sgd = torch.optim.SGD(layer.parameters())
    with pytest.raises(ValueError, match="max_norm must be a finite number above 0"):
        accumulation.step(sgd, lambda part: layer(part).mean(), [torch.ones(1, 2)], max_norm=0.0)
