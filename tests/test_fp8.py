"""FP8 training: casts to the bit, products against torch._scaled_mm, scales that come in time,
bytes of every recipe: formula = dry run = real run."""

import copy
import functools
import itertools
import math

import pytest
import torch
from torch import nn

from labutils import checkpointing, data_parallel, floats, measure
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.quantization import (
    E4M3,
    E5M2,
    RECIPES,
    SCHEMES,
    Adam8,
    KeptAdam,
    Scheme,
    StateFormats,
    advance_scales,
    cast,
    dynamic_code,
    fp8_layers,
    fp8_states,
    from_blocks,
    kept_states,
    largest,
    product,
    tile_amax,
    to_blocks,
    to_eight,
    use_fp8,
)
from labutils.teach import rigs
from labutils.world import World

SMALL = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=48, seq_len=16,
    positions="rope", norm="rmsnorm", bias=False,
)  # fmt: skip


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gpt(seed=0, config=SMALL):
    return GPT(config, generator=torch.Generator().manual_seed(seed))


def tokens(rows=4, config=SMALL):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(config.vocab_size, (rows, config.seq_len), generator=generator)


# ── a cast ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "fmt"), [(E4M3, floats.E4M3), (E5M2, floats.E5M2)])
def test_the_cast_is_that_of_floats_to_the_bit(dtype, fmt):
    values = [v for v in fmt.representable() if v >= 0]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    near = [math.nextafter(m, side) for m in middles for side in (0, math.inf)]
    beyond = [fmt.max * 1.01, fmt.max * 1.5, 1e30, math.inf, 1e-30, 3e-45]
    x = torch.tensor(values + middles + near + beyond)
    x = torch.cat([x, -x, 100 * drawn(2000)])
    wanted = [fmt.encode(v, overflow="saturate") for v in x.double().tolist()]
    assert cast(x, dtype).view(torch.uint8).tolist() == wanted


def test_int8_goes_to_127_and_no_further():
    x = torch.tensor([0.5, 1.5, -1000.0, 126.6])
    assert cast(x, torch.int8).tolist() == [0, 2, -127, 127]


def test_nan_stays_nan():
    for dtype in (E4M3, E5M2):
        assert cast(torch.tensor([math.nan]), dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize("tile", [None, (1, 128), (128, 128)])
def test_every_tile_uses_the_whole_range(dtype, tile):
    x = drawn(200, 300) * torch.logspace(-6, 6, 200)[:, None]
    eight = to_eight(x, dtype, tile)
    assert torch.equal(
        tile_amax(eight.codes.float(), tile), torch.full_like(eight.inverse, largest(dtype))
    )
    error = (eight.numbers() - x).abs()
    half = {E4M3: 2**-4, E5M2: 2**-3, torch.int8: 0}[dtype]
    gap = {E4M3: 2**-10, E5M2: 2**-17, torch.int8: 0.501}[dtype]
    spread = tile_amax(x, tile) / largest(dtype)
    for dim, size in enumerate(tile or (1, 1)):
        spread = spread.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim] if tile else 1)
    assert (error <= half * x.abs() * 1.0001 + gap * spread).all()


def test_tiles_at_the_edge_are_short():
    x = drawn(130, 200)
    found = tile_amax(x, (128, 128))
    assert found.shape == (2, 2) and found[1, 1] == x[128:, 128:].abs().max()
    assert tile_amax(x, (1, 128)).shape == (130, 2)


def test_a_tensor_of_zeros_stays_zero():
    for scheme in SCHEMES.values():
        layer = use_fp8(nn.Sequential(nn.Linear(8, 4)), scheme)
        assert torch.equal(layer(torch.zeros(2, 8)), layer[0].bias.expand(2, 4))


# ── products ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
def test_products_are_those_of_scaled_mm(formats):
    a, b = (
        to_eight(drawn(m, 256, seed=m) * 3, fmt) for m, fmt in zip((48, 64), formats, strict=True)
    )
    theirs = torch._scaled_mm(
        a.codes, b.codes.mT, scale_a=a.inverse[0, 0], scale_b=b.inverse[0, 0],
        out_dtype=torch.float32,
    )  # fmt: skip
    ours = product(a, b)
    assert (ours - theirs).abs().max() < 1e-6 * ours.abs().max()


def test_products_of_powers_of_two_are_those_of_scaled_mm_to_the_bit():
    one = torch.tensor(0.5)
    a, b = (to_eight(drawn(n, 128, seed=n), E4M3, scale=1 / one) for n in (16, 32))
    theirs = torch._scaled_mm(
        a.codes, b.codes.mT, scale_a=one, scale_b=one, out_dtype=torch.float32
    )
    assert torch.equal(product(a, b), theirs)


def test_a_scale_may_not_change_inside_a_sum():
    w = to_eight(drawn(256, 256), E4M3, (1, 128))
    product(w, w)
    with pytest.raises(ValueError, match="changes after 1 of 256 terms"):
        product(w.mT, w)
    square = to_eight(drawn(256, 256), E4M3, (128, 128))
    assert torch.equal(product(square.mT, square), square.numbers().mT @ square.numbers().mT)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_forms_its_three_products_in_8_bits(name):
    scheme, whole = SCHEMES[name], nn.Linear(256, 130).requires_grad_(True)
    x, grad = drawn(3, 50, 256).requires_grad_(True), drawn(3, 50, 130, seed=2)
    layer = use_fp8(nn.Sequential(copy.deepcopy(whole)), scheme)
    y = layer(x)
    y.backward(grad)
    f, b, rows = scheme.forward, scheme.backward, x.detach().flatten(0, 1)
    flat, w = grad.flatten(0, 1), whole.weight.detach()
    unit = torch.ones(()) if scheme.scaling in ("none", "delayed") else None
    tiles = scheme.scaling == "tiles"

    def eight(z, dtype, square=False):
        tile = ((128, 128) if square else (1, 128)) if tiles else None
        return to_eight(z, dtype, tile, scale=unit).numbers()

    assert torch.allclose(
        y.flatten(0, 1), eight(rows, f) @ eight(w, f, True).mT + whole.bias, atol=1e-4
    )
    assert torch.allclose(x.grad.flatten(0, 1), eight(flat, b) @ eight(w, f, True), atol=1e-4)
    assert torch.allclose(layer[0].weight.grad, eight(flat.mT, b) @ eight(rows.mT, f).mT, atol=1e-3)
    assert torch.allclose(layer[0].bias.grad, flat.sum(0), atol=1e-5)


def test_the_transform_returns_the_module_and_keeps_its_parameters():
    model = gpt()
    before = dict(model.named_parameters())
    assert use_fp8(model, Scheme()) is model
    assert dict(model.named_parameters()) == before
    assert len(fp8_layers(model)) == 12 and type(model.head) is nn.Linear
    assert Scheme(scaling="tiles").dtype("grad") == E5M2
    with pytest.raises(ValueError, match="choose one of none, current, delayed, tiles"):
        Scheme(scaling="tile")


def test_inputs_are_kept_in_8_bits():
    x = drawn(16, 64).requires_grad_(True)
    layer = use_fp8(nn.Sequential(nn.Linear(64, 32, bias=False)), Scheme())
    kept = measure.saved_activations(lambda: layer(x), layer)
    assert kept.total == 16 * 64 + 4  # the codes and a scale


# ── delayed scaling ───────────────────────────────────────────────────────────────────────────────


def delayed(length=3):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return use_fp8(nn.Sequential(layer), Scheme(scaling="delayed", history=length))


def test_scales_are_those_of_the_steps_before():
    model, found = delayed(), []
    for size in (2.0, 8.0, 4.0, 1.0, 1.0, 1.0):
        found.append(448 / model[0].scale[0].item())
        model(torch.tensor([[size]])).sum().backward()
        advance_scales(model)
    assert found == pytest.approx([448.0, 2.0, 8.0, 8.0, 8.0, 4.0])


def test_what_outgrows_the_history_is_clipped():
    model = delayed()
    for _ in range(2):
        model(torch.ones(1, 1))
        advance_scales(model)
    assert model(torch.full((1, 1), 10.0)).item() == pytest.approx(1.0)
    advance_scales(model)
    assert model(torch.full((1, 1), 10.0)).item() == pytest.approx(10.0)


def test_micro_batches_share_a_step():
    model = delayed()
    for size in (5.0, 1.0):
        model(torch.tensor([[size]]))
    assert model[0].scale[0] == 1  # not before the step is over
    advance_scales(model)
    assert model[0].scale[0].item() == pytest.approx(448 / 5)


def test_a_checkpointed_layer_changes_no_bit():
    grads = {}
    for kind in ("none", "full"):
        model = use_fp8(gpt(), SCHEMES["delayed"])
        if kind == "full":
            checkpointing.apply(model, "full")
        for _ in range(2):
            model.zero_grad()
            model.loss(tokens(), tokens()).backward()
            advance_scales(model)
        grads[kind] = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, *grads.values()))


def test_ranks_scale_by_the_largest_of_all():
    batch = tokens(8)

    def step(rank):
        model = use_fp8(gpt(), SCHEMES["delayed"])
        share = batch[rank.rank :: rank.size] if rank else batch
        wrapped = data_parallel.replicate(model, rank.comm("dp")) if rank else model
        for _ in range(3):
            model.zero_grad()
            nn.functional.cross_entropy(wrapped(share).flatten(0, 1), share.flatten()).backward()
            advance_scales(model, rank and rank.comm("dp"))
        return [layer.scale for layer in fp8_layers(model).values()]

    alone, ranks = torch.stack(step(None)), World(2).run(step)
    assert all(map(torch.equal, *ranks))
    # Forward: the same numbers. A rank's loss is a mean over half of them: its gradients are twice
    # as large before they are averaged.
    assert torch.allclose(torch.stack(ranks[0])[:, :2], alone[:, :2], rtol=0.2)
    assert torch.allclose(torch.stack(ranks[0])[:, 2], alone[:, 2] / 2, rtol=0.5)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_per_parameter_are_those_of_the_table():
    # The Ultra-Scale Playbook, its FP8 table.
    found = [each.bytes_per_parameter for each in RECIPES.values()]
    assert found == [20, 16, 16, 9, 15, 10, 10]
    with pytest.raises(ValueError, match="exp_avg='fp4': choose one of fp32"):
        StateFormats("fp8", "fp8", "fp4", "fp8")


def stepped(_, x, kept, steps=2):
    model = use_fp8(gpt(), Scheme())
    optimizer = KeptAdam(model, kept)
    for _ in range(steps):
        model.zero_grad()
        model.loss(x, x).backward()
        optimizer.step()
    return measure.model_states(model, optimizer)


@pytest.mark.parametrize("name", RECIPES)
def test_formula_dry_run_and_real_run_hold_the_same(name):
    kept = RECIPES[name]
    dry = World(Mesh(), engine="dry").run(stepped, tokens(), kept)
    real = stepped(None, tokens(), kept)
    assert fp8_states(SMALL, kept).diff(real, by="name").unexplained == 0
    assert dry.diff(real).unexplained == 0
    linear = sum(layer.weight.numel() for layer in fp8_layers(use_fp8(gpt(), Scheme())).values())
    plain = 16 * (SMALL.num_params - linear) + kept.bytes_per_parameter * linear
    named = {line.name: line.amount for line in real if "scales" in line.name}
    tables = 2 * 4 * SMALL.seq_len * (SMALL.d_head // 2)
    weights = 12 * 4 * (kept.weights == "fp8")
    assert real.total == plain + sum(named.values()) + tables + weights


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_learns(name):
    model, x = use_fp8(gpt(), Scheme()), tokens()
    optimizer = KeptAdam(model, RECIPES[name], lr=3e-3)
    before = model.loss(x, x).item()
    weights = [layer.weight.detach().float().clone() for layer in fp8_layers(model).values()]
    for _ in range(8):
        model.zero_grad()
        for half in x.chunk(2):
            (model.loss(half, half) / 2).backward()
        optimizer.step()
    assert model.loss(x, x).item() < before - 0.3
    after = [layer.weight.detach().float() for layer in fp8_layers(model).values()]
    assert not any(map(torch.equal, weights, after))


def test_weights_are_the_master_weights_rounded_once_more():
    model = use_fp8(gpt(), Scheme())
    optimizer = KeptAdam(model, RECIPES["nanotron"])
    for layer in fp8_layers(model).values():
        master = optimizer.read(layer.weight, "master weights")
        assert torch.equal(master, master.bfloat16().float())
        assert torch.equal(layer.weight.float(), to_eight(master, E4M3).codes.float())


def test_kept_in_fp32_it_is_adamw():
    mine, theirs, x = use_fp8(gpt(), Scheme()), use_fp8(gpt(), Scheme()), tokens()
    ours = KeptAdam(mine, RECIPES["Transformer Engine"], lr=1e-3)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(3):
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            model.zero_grad()
            for half in x.chunk(2):  # gradients of micro-batches add up
                model.loss(half, half).backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-4)
    assert kept_states(RECIPES["Transformer Engine"], 10).total == 160


# ── moments ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_code_has_256_values_in_seven_decades(signed):
    book = dynamic_code(signed)
    assert len(book) == 256 == len(book.unique()) and (book == book.sort().values).all()
    assert book[-1] == 1 and (book == 0).sum() == 1
    top = ((book > 0.1) & (book < 1)).sum().item()
    assert top == (64 if signed else 128)
    smallest = book[book > 0].min().item()
    assert smallest == pytest.approx(5.5e-7 if signed else 3.25e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_every_moment_takes_its_nearest_code(signed):
    x = drawn(5, 100) ** 3 if signed else drawn(5, 100) ** 4
    kept = to_blocks(x, signed=signed, block=64)
    found = from_blocks(kept, x.shape, signed=signed, block=64)
    book, flat = dynamic_code(signed).double(), x.flatten().double()
    for at in range(0, 500, 64):
        part = flat[at : at + 64]
        nearest = book[(part[:, None] / part.abs().max() - book).abs().argmin(1)]
        wanted = nearest * part.abs().max()
        assert torch.allclose(found.flatten()[at : at + 64].double(), wanted, rtol=1e-5)
    assert kept.codes.numel() + 4 * kept.amax.numel() == 500 + 4 * 8


def test_zeros_stay_zero():
    assert from_blocks(to_blocks(torch.zeros(3, 5)), (3, 5)).tolist() == torch.zeros(3, 5).tolist()


def test_an_outlier_zeroes_its_own_block_and_no_other():
    v = torch.full((4096,), 1e-4) ** 2
    v[5] = 1.0
    for block, lost in ((256, 255), (None, 4095)):
        found = from_blocks(
            to_blocks(v, signed=False, block=block), v.shape, signed=False, block=block
        )
        assert (found == 0).sum() == lost


def test_small_tensors_keep_their_moments():
    w, small = nn.Parameter(drawn(64, 64)), nn.Parameter(drawn(64))
    optimizer = Adam8([w, small], lr=1e-2)
    w.grad, small.grad = drawn(64, 64, seed=1), drawn(64, seed=1)
    optimizer.step()
    held = measure.model_states(nn.ParameterList([w, small]), optimizer).by("name")
    assert held["exp_avg"] == 4096 + 4 * 64 and held["exp_avg scales"] == 4 * 2
    assert optimizer.moment(small, "exp_avg").dtype == torch.float32


def test_one_step_of_adam8_is_one_of_adamw():
    ours, theirs = nn.Parameter(drawn(80, 64)), nn.Parameter(drawn(80, 64))
    for p, make in ((ours, Adam8), (theirs, torch.optim.AdamW)):
        optimizer = make([p], lr=1e-2)
        p.grad = drawn(80, 64, seed=1)
        optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


# ── the trials of lab 15b ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def reader():
    return rigs.fp8.reader(), next(rigs.fp8.excerpts(5))


def test_the_reader_has_learned(reader):
    model, _ = reader
    assert rigs.fp8.loss_of(model, next(rigs.fp8.excerpts(99, 64))).item() < 2.6
    assert model.config.num_params == sum(p.numel() for p in model.parameters())


def test_gradient_errors_are_those_of_the_lab(reader):
    model, batch = reader
    errors = {
        name: rigs.fp8.gradient_error(model, each, batch)[0] for name, each in SCHEMES.items()
    }
    assert errors["int8"] < errors["tiles"] < errors["current"] < errors["unscaled"] < 0.1
    tiny = rigs.fp8.gradient_error(model, SCHEMES["unscaled"], batch, share=2.0**-12)
    assert tiny == [1.0]
    for name in ("current", "tiles", "int8"):
        again = rigs.fp8.gradient_error(model, SCHEMES[name], batch, share=2.0**-12)[0]
        assert again == pytest.approx(errors[name], rel=1e-3)


def test_a_planted_outlier_changes_nothing_in_fp32(reader):
    model, batch = reader
    plain = rigs.fp8.matrix_gradients(model, batch)
    twin = rigs.fp8.plant(use_fp8(rigs.fp8.reader(), Scheme()), 64.0)
    for layer in fp8_layers(twin).values():
        layer.forward = functools.partial(nn.functional.linear, weight=layer.weight)
    found = rigs.fp8.matrix_gradients(twin, batch, k=64.0)
    for a, b in zip(plain, found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_operands_are_those_of_the_products(reader):
    model, batch = reader
    found = rigs.fp8.operands(model, batch)
    assert [len(each) for each in found.values()] == [12, 12, 12]
    # Backward runs from the last layer; that layer's x and gradient give its weight's gradient.
    x, grad = found["x"][-1].flatten(0, 1), found["grad"][0].flatten(0, 1)
    right = rigs.fp8.matrix_gradients(model, batch)[-1]
    assert torch.allclose((grad.mT @ x).double(), right, atol=1e-6)


def test_training_steps_at_a_share_as_without_one():
    runs = [rigs.fp8.train_reader(1, share=share, steps=10)[1] for share in (1.0, 2.0**-12)]
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)
