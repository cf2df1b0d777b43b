"""FP8 training: casts to the bit, products against torch._scaled_mm, scales that come in time,
bytes of every recipe: formula = dry run = real run."""

import copy
import functools
import itertools
import math

import pytest
import torch
from small_models import build
from torch import nn

from labutils import checkpointing, data_parallel, floats, measure, tensor_parallel, zero
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.precision import LossScaler, autocast
from labutils.quantization import (
    F8_E4M3,
    F8_E5M2,
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
from labutils.world import RankError, World

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


@pytest.mark.parametrize("name", SCHEMES)
def test_an_expert_that_no_token_visits_computes_nothing(name):
    layer, x = nn.Sequential(nn.Linear(24, 16)), torch.zeros(0, 24, requires_grad=True)
    y = use_fp8(layer, SCHEMES[name])(x)
    y.sum().backward()
    assert y.shape == (0, 16) and x.grad.shape == (0, 24)
    assert not layer[0].weight.grad.any()


@pytest.mark.parametrize("region", [autocast, functools.partial(torch.autocast, "cpu")], ids=["ours", "torch's"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_sums_are_fp32_under_autocast_too(name, dtype, region):
    """Codes go up to 448: in fp16, whose largest number is 65,504, products of two would be infinite."""
    (layer,), x = use_fp8(nn.Sequential(nn.Linear(256, 16, bias=False)), SCHEMES[name]), drawn(8, 256)
    wanted = layer(x)
    with region(dtype=dtype):
        assert torch.equal(layer(x), wanted)


# ── a cast ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "fmt"), [(F8_E4M3, floats.E4M3), (F8_E5M2, floats.E5M2)])
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
    for dtype in (F8_E4M3, F8_E5M2):
        assert cast(torch.tensor([math.nan]), dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", [F8_E4M3, F8_E5M2, torch.int8])
@pytest.mark.parametrize("tile", [None, (1, 128), (128, 128)])
def test_every_tile_uses_the_whole_range(dtype, tile):
    x = drawn(200, 300) * torch.logspace(-6, 6, 200)[:, None]
    eight = to_eight(x, dtype, tile)
    assert torch.equal(
        tile_amax(eight.codes.float(), tile), torch.full_like(eight.inverse, largest(dtype))
    )
    error = (eight.numbers() - x).abs()
    half = {F8_E4M3: 2**-4, F8_E5M2: 2**-3, torch.int8: 0}[dtype]
    gap = {F8_E4M3: 2**-10, F8_E5M2: 2**-17, torch.int8: 0.501}[dtype]
    spread = tile_amax(x, tile) / largest(dtype)
    for dim, size in enumerate(tile or (1, 1)):
        spread = spread.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim] if tile else 1)
    assert (error <= half * x.abs() * 1.0001 + gap * spread).all()


def test_tiles_at_the_edge_are_short():
    x = drawn(130, 200)
    found = tile_amax(x, (128, 128))
    assert found.shape == (2, 2) and found[1, 1] == x[128:, 128:].abs().max()
    assert tile_amax(x, (1, 128)).shape == (130, 2)
    assert tile_amax(x[:0]).tolist() == tile_amax(x[:, :0]).tolist() == [[0.0]]


def test_a_tensor_of_zeros_stays_zero():
    for scheme in SCHEMES.values():
        layer = use_fp8(nn.Sequential(nn.Linear(8, 4)), scheme)
        assert torch.equal(layer(torch.zeros(2, 8)), layer[0].bias.expand(2, 4))


# ── products ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("formats", [(F8_E4M3, F8_E4M3), (F8_E5M2, F8_E4M3)])
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
    a, b = (to_eight(drawn(n, 128, seed=n), F8_E4M3, scale=1 / one) for n in (16, 32))
    theirs = torch._scaled_mm(
        a.codes, b.codes.mT, scale_a=one, scale_b=one, out_dtype=torch.float32
    )
    assert torch.equal(product(a, b), theirs)


def test_a_scale_may_not_change_inside_a_sum():
    w = to_eight(drawn(256, 256), F8_E4M3, (1, 128))
    product(w, w)
    with pytest.raises(ValueError, match="changes after 1 of 256 terms"):
        product(w.mT, w)
    square = to_eight(drawn(256, 256), F8_E4M3, (128, 128))
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
    assert Scheme(scaling="tiles").dtype("grad") == F8_E5M2
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
    with pytest.raises(ValueError, match="no format for exp_avg called 'fp4': there are fp32"):
        StateFormats("fp8", "fp8", "fp4", "fp8")
    for i, field in enumerate(("weights", "gradients", "exp_avg", "exp_avg_sq")):
        with pytest.raises(ValueError, match=f"no format for {field} called ''"):
            StateFormats(*("fp8",) * i, "", *("fp8",) * (3 - i))
    assert StateFormats("bf16", "bf16", "fp32", "fp32", master="", summed="").master == ""


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
        assert torch.equal(layer.weight.float(), to_eight(master, F8_E4M3).codes.float())


def test_kept_in_fp32_it_is_adamw():
    mine, theirs, x = use_fp8(gpt(), Scheme()), use_fp8(gpt(), Scheme()), tokens()
    ours = KeptAdam(mine, RECIPES["Transformer Engine"])
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


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_moment_in_8_bits_is_the_nearest_that_its_own_code_has(name):
    model = use_fp8(gpt(), Scheme())
    optimizer = KeptAdam(model, RECIPES["8-bit Adam"])
    (weight, *_) = (layer.weight for layer in fp8_layers(model).values())
    moment = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
    optimizer._keep(weight, name, moment)
    kept = to_blocks(moment, signed=name == "exp_avg")
    wanted = from_blocks(kept, moment.shape, signed=name == "exp_avg")
    assert torch.equal(optimizer.read(weight, name), wanted)
    assert (wanted - moment).abs().max() < 0.01


def test_a_gradient_that_is_rounded_already_is_neither_clipped_nor_added_to():
    model = use_fp8(gpt(), Scheme())
    _optimizer = KeptAdam(model, RECIPES["DeepSeek-V3"])
    model.loss(tokens(), tokens()).backward()
    with pytest.raises(RankError, match=r"has rounded this gradient .* already: step torch.optim.A"):
        World(1).run(lambda rank: zero.clip_grad_norm(model.parameters(), rank.comm(), 1.0))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_stops_and_goes_on_is_the_run_that_does_not(name):
    def made():
        model = use_fp8(gpt(), Scheme())
        return model, KeptAdam(model, RECIPES[name], lr=1e-2)

    def train(model, optimizer, steps=2):
        for _ in range(steps):
            model.zero_grad()
            model.loss(tokens(), tokens()).backward()
            optimizer.step()

    straight, stopped, resumed = made(), made(), made()
    train(*straight, steps=4)
    train(*stopped)
    for there, here in zip(resumed, stopped, strict=True):
        there.load_state_dict(here.state_dict())
    train(*resumed)
    for a, b in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())


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


def test_steps_with_moments_in_fp32_are_those_of_adamw():
    draw = torch.Generator().manual_seed(0)
    ours = nn.Parameter(torch.randn(40, generator=draw))
    theirs = nn.Parameter(ours.detach().clone())
    pair = (
        (ours, Adam8([ours], lr=0.1, betas=(0.8, 0.9))),
        (theirs, torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9))),
    )
    for _ in range(5):
        grad = torch.randn(40, generator=draw)
        for p, optimizer in pair:
            p.grad = grad.clone()
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_padding_takes_no_memory_and_what_is_no_number_spoils_its_block():
    kept = to_blocks(torch.tensor([1.0] * 4 + [math.nan]), block=4)
    assert kept.codes.untyped_storage().nbytes() == 5
    back = from_blocks(kept, (5,), block=4)
    assert back[:4].isfinite().all() and back[4].isnan()


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
        layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.weight)
    found = rigs.fp8.matrix_gradients(twin, batch)
    for a, b in zip(plain, found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_operands_are_those_of_the_products(reader):
    model, batch = reader
    found = rigs.fp8.operands(model, batch)
    assert [len(each) for each in found.values()] == [12, 12, 12]
    # Backward runs from the last layer; that layer's x and gradient give its weight's gradient.
    x, grad = found["x"][-1].flatten(0, 1), found["grad"][0].flatten(0, 1)
    right = rigs.fp8.matrix_gradients(model, batch)[-1]
    assert torch.allclose(grad.mT @ x, right, atol=1e-6)


def test_no_gradient_of_the_operands_is_rounding(reader):
    """The first token of a sequence has one key: nothing that its query does changes a weight."""
    model, batch = reader
    grads = rigs.fp8.operands(model, batch)["grad"]
    queries = [grads[place] for place in (5, 11)]
    assert all((each[:, 0] == 0).all() and (each[:, -1] != 0).all() for each in queries)
    assert min(each[each != 0].abs().min().item() for each in grads) > 2.0**-45


def test_training_steps_at_a_share_as_without_one():
    runs = [rigs.fp8.train_reader(1, share=share, steps=10)[1] for share in (1.0, 2.0**-12)]
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)


# ── split over ranks ──────────────────────────────────────────────────────────────────────────────

SPLIT = ModelConfig(num_layers=2, d_model=8, num_heads=4, d_ff=12, vocab_size=12, seq_len=8)
WIDE = ModelConfig(num_layers=1, d_model=256, num_heads=2, d_ff=256, vocab_size=12, seq_len=8)
MIXED = ModelConfig(**vars(SPLIT) | dict(num_layers=1, num_experts=2, top_k=1, tied=False))
ROWS = torch.randint(12, (2, 2, 8), generator=torch.Generator().manual_seed(5))


def steps_of(model):
    """Losses, and the gradients of three steps, of SGD that does not hide their size."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.loss(*ROWS)
        loss.backward()
        found.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}))
        optimizer.step()
        advance_scales(model)
    return found


def split(rank, config, scheme, first, sequence):
    """FP8 before tensor parallelism, or after; how many layers are in 8 bits; the steps."""
    model, comm = build(config, 0), rank.comm("tp")
    if first:
        use_fp8(model, scheme)
    tensor_parallel.parallelize(model, comm, sequence)
    if not first:
        use_fp8(model, scheme)
    return len(fp8_layers(model)), steps_of(model)


@pytest.mark.parametrize(
    "config, name, first, sequence",
    [
        (SPLIT, "current", True, False),
        (SPLIT, "current", False, True),
        (SPLIT, "delayed", False, False),
        (SPLIT, "delayed", True, True),
        (SPLIT, "int8", True, True),
        (SPLIT, "unscaled", False, False),
        (WIDE, "tiles", True, False),
        (MIXED, "current", True, True),
        (MIXED, "delayed", False, True),
    ],
)
def test_a_split_layer_multiplies_in_8_bits_with_the_scales_of_the_whole(
    config, name, first, sequence
):
    """To rounding in float64: the codes are the same, and sums of their products are cut in two."""
    scheme = SCHEMES[name]
    model = use_fp8(build(config, 0), scheme)
    layers = len(fp8_layers(model))
    expected = steps_of(model)
    results = World(Mesh(tp=2)).run(split, config, scheme, first, sequence)
    for i, (count, found) in enumerate(results):
        assert count == layers
        for (loss, gradients), (wanted, whole) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-9)
            for at, gradient in gradients.items():
                mine = whole[at]
                for dim in range(mine.dim()):
                    if mine.shape[dim] != gradient.shape[dim]:
                        mine = mine.chunk(2, dim)[i]
                assert torch.allclose(gradient, mine, rtol=1e-8, atol=1e-9), at
    plain = steps_of(build(config, 0))
    assert abs(plain[0][0] - expected[0][0]) > 1e-6  # 8 bits show


def test_a_share_that_cuts_a_tile_is_refused():
    with pytest.raises(RankError, match=r"a share of \d+ cuts a tile of 128: .* scaling='current'"):
        World(Mesh(tp=2)).run(split, SPLIT, SCHEMES["tiles"], True, False)


def test_recipes_of_states_are_for_whole_layers():
    def program(rank, first):
        model = GPT(SPLIT)
        if first:
            KeptAdam(use_fp8(model, Scheme()), RECIPES["nanotron"])
        tensor_parallel.parallelize(model, rank.comm("tp"))
        KeptAdam(use_fp8(model, Scheme()), RECIPES["nanotron"])

    with pytest.raises(RankError, match="of a layer that ranks share out: train without"):
        World(Mesh(tp=2)).run(program, False)
    with pytest.raises(RankError, match="kept in 8 bits are not split: parallelize the model, th"):
        World(Mesh(tp=2)).run(program, True)
    with pytest.raises(ValueError, match="no layer of this module is an Fp8Linear: call use_fp8"):
        KeptAdam(nn.Linear(2, 2), RECIPES["nanotron"])


def test_a_module_without_a_layer_for_8_bits_is_refused():
    with pytest.raises(ValueError, match="no linear layer that could be in 8 bits"):
        use_fp8(nn.LayerNorm(4), Scheme())


# ── what is no number ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [F8_E4M3, F8_E5M2, torch.int8])
@pytest.mark.parametrize("scale", [None, torch.ones(())])
def test_what_is_no_number_is_none_in_8_bits(dtype, wrong, scale):
    x = torch.ones(2, 4)
    x[1, 2] = wrong
    assert to_eight(x, dtype, scale=scale).numbers()[1, 2].isnan()
    tiles = to_eight(torch.ones(2, 4).index_fill(0, torch.tensor(1), wrong), dtype, (1, 128))
    assert tiles.numbers()[1].isnan().all() and tiles.numbers()[0].isfinite().all()


def test_what_overflows_by_its_scale_is_a_large_number():
    eight = to_eight(torch.tensor([[1e30, -1.0]]), F8_E4M3, scale=torch.tensor(1e20))
    assert eight.codes.tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("name", ["current", "delayed", "tiles", "int8", "unscaled"])
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_loss_scale_sees_a_gradient_that_is_no_number_once(name, wrong):
    """Of one layer whose output has it: the step is skipped, and no scale remembers it."""
    model = use_fp8(gpt(), SCHEMES[name])
    layer = model.blocks[1].feed_forward.down
    optimizer, scaler = torch.optim.SGD([layer.weight], lr=0.1), LossScaler(1.0)
    stepped = []
    for bad in (False, True, False):
        optimizer.zero_grad()
        factor = torch.ones(16, 1)
        factor[3] = wrong if bad else 1.0
        hook = layer.register_forward_hook(
            lambda *args, by=factor: args[2].register_hook(lambda grad: grad * by) and None
        )
        scaler.scale(model.loss(tokens(1), tokens(1))).backward()
        hook.remove()
        stepped.append(scaler.step(optimizer))
        scaler.update()
        advance_scales(model)
    assert stepped == [True, False, True]
