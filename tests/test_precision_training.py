"""Master weights, rounded weights, the loss scaler, autocast and exponents: what each promises, and what it says to bad input."""

import itertools
import math
import pathlib

import pytest
import torch
from torch import _torch_docs, nn

from labutils import anatomy, floats, measure, memory, precision, predict
from labutils.config import ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.precision import LossScaler, MasterWeights, RoundedWeights
from labutils.teach import rigs

CONFIG = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=65, seq_len=12)
BF16, FP16 = torch.bfloat16, torch.float16


def tokens(seed=1):
    return torch.randint(65, (2, 3, 12), generator=torch.Generator().manual_seed(seed)).unbind()


def gpt(dtype=BF16):
    return GPT(CONFIG, generator=torch.Generator().manual_seed(0)).to(dtype)


def line(value=1.0, n=1, dtype=BF16):
    layer = nn.Linear(1, n, bias=False, dtype=dtype)
    nn.init.constant_(layer.weight, value)
    return layer


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class TestMasterWeights:
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adafactor(p),
            lambda p: torch.optim.RMSprop(p, lr=1e-3),
            lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, foreach=True),
        ],
    )
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_steps_as_the_optimizer_would_on_fp32_weights_with_these_gradients(self, make, dtype):
        model = gpt(dtype)
        plain = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        masters, by_hand = MasterWeights(make(model.parameters())), make(plain)
        for step in range(4):
            masters.zero_grad()
            model.loss(*tokens(step)).backward()
            for weight, p in zip(plain, model.parameters(), strict=True):
                weight.grad = p.grad.float()
            masters.step()
            by_hand.step()
            assert same([masters.masters[p] for p in model.parameters()], plain)
            assert same(model.parameters(), [weight.to(dtype) for weight in plain])

    def test_small_steps_add_up(self):
        layer = line()
        masters = MasterWeights(torch.optim.SGD(layer.parameters(), lr=1e-3))
        layer.weight.grad = torch.ones_like(layer.weight)
        for _ in range(100):
            masters.step()
        assert masters.masters[layer.weight].item() == pytest.approx(0.9, abs=1e-5)
        assert layer.weight.item() == floats.BF16.round(masters.masters[layer.weight].item())

    def test_groups_frozen_weights_tied_weights_and_fp32_weights(self):
        model = GPT(
            ModelConfig(
                num_layers=1, d_model=8, num_heads=2, d_ff=16, vocab_size=9, seq_len=4, tied=True
            )
        ).bfloat16()
        model.norm.float()
        model.blocks[0].attention.query.weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "lr": 0.5},
        ]
        masters = MasterWeights(torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0))
        assert [(group["lr"], group["weight_decay"]) for group in masters.param_groups] == [
            (0.01, 0.1),
            (0.5, 0.0),
        ]
        assert len(masters.masters) == len(trained) - 2 and any(
            p is model.norm.weight for p in masters.param_groups[1]["params"]
        )
        with pytest.raises(KeyError):
            masters.masters[model.norm.weight]

    def test_a_schedule_and_clipping_work_on_the_masters(self):
        layer = line()
        masters = MasterWeights(torch.optim.SGD(layer.parameters(), lr=1.0))
        schedule = torch.optim.lr_scheduler.LambdaLR(masters.optimizer, lambda step: 0.5**step)
        found = []
        for _ in range(3):
            layer.weight.grad = torch.full_like(layer.weight, 3.0)
            masters.collect()
            nn.utils.clip_grad_norm_(masters.param_groups[0]["params"], 1.0)
            before = masters.masters[layer.weight].item()
            masters.step()
            schedule.step()
            found.append(round(before - masters.masters[layer.weight].item(), 4))
        assert found == [1.0, 0.5, 0.25]

    @pytest.mark.parametrize("fp32_gradients", [True, "only"])
    def test_gradients_are_summed_in_fp32(self, fp32_gradients):
        layer = line()
        masters = MasterWeights(
            torch.optim.SGD(layer.parameters(), lr=1.0), fp32_gradients=fp32_gradients
        )
        for slope in (256.0, 1.0, 1.0, 1.0):
            (layer.weight * slope).sum().backward()
        assert masters.masters[layer.weight].grad.item() == 259
        assert (
            layer.weight.grad is None if fp32_gradients == "only" else layer.weight.grad.item() == 0
        )
        masters.zero_grad()
        assert masters.masters[layer.weight].grad is None and layer.weight.grad is None
        plain = line()
        halves = MasterWeights(torch.optim.SGD(plain.parameters(), lr=1.0))
        for slope in (256.0, 1.0, 1.0, 1.0):
            (plain.weight * slope).sum().backward()
        halves.collect()
        assert halves.masters[plain.weight].grad.item() == 256

    @pytest.mark.parametrize(
        ("fp32_gradients", "per_parameter"), [(False, 16), (True, 20), ("only", 18)]
    )
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_what_is_held_after_a_step_is_what_the_formula_says(
        self, fp32_gradients, per_parameter, dtype
    ):
        model = gpt(dtype)
        masters = MasterWeights(
            torch.optim.AdamW(model.parameters()), fp32_gradients=fp32_gradients
        )
        model.loss(*tokens()).backward()
        masters.step()
        held = measure.model_states(model, masters.optimizer)
        steps = 4 * len(anatomy.tensors(CONFIG))  # Adam counts its steps once a tensor
        assert held.total == per_parameter * CONFIG.num_params + steps
        assert held.by("name")["master weights"] == 4 * CONFIG.num_params
        train = TrainConfig(
            micro_batch=3,
            global_batch=3,
            precision={BF16: "bf16", FP16: "fp16"}[dtype],
            fp32_gradients=fp32_gradients,
        )
        assert predict.states(CONFIG, train).diff(held).unexplained == 0

    def test_bad_input(self):
        layer = line()
        stepped = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9)
        layer.weight.grad = torch.ones_like(layer.weight)
        stepped.step()
        with pytest.raises(ValueError, match="has stepped already"):
            MasterWeights(stepped)


def test_sgd_by_hand_is_sgd_with_master_weights():
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=draw).bfloat16()
    gradients = torch.randn(30, 64, generator=draw).bfloat16().unbind()
    weights = nn.Parameter(start.clone())
    masters = MasterWeights(torch.optim.SGD([weights], lr=0.25))
    for gradient in gradients:
        weights.grad = gradient
        masters.step()
    assert torch.equal(precision.half_sgd(start, gradients, 0.25), weights)
    unlike = torch.randn(64, generator=draw).half()  # with digits that bf16 has not
    assert torch.equal(precision.half_sgd(unlike, [], 0.25), unlike)
    steps = [torch.ones(1).bfloat16()] * 100  # whose step, 0.3, is 0.30078125 in bf16
    assert precision.half_sgd(torch.zeros(1).bfloat16(), steps, 0.3).item() == -30


class TestRoundedWeights:
    def test_to_nearest_small_steps_are_lost_and_by_chance_they_add_up(self):
        ends = {}
        for name, make in {
            "nearest": MasterWeights,
            "alone": lambda sgd: sgd,
            "rounded": RoundedWeights,
            "chance": lambda sgd: RoundedWeights(sgd, generator=torch.Generator().manual_seed(0)),
        }.items():
            layer = line(n=4096)
            optimizer = make(torch.optim.SGD(layer.parameters(), lr=1e-4))
            for _ in range(100):
                layer.weight.grad = torch.ones_like(layer.weight)
                optimizer.step()
            ends[name] = layer.weight.float().mean().item()
        # Below 1 bf16's gap is 2⁻⁸: 100 steps of variance at most (gap²/4), averaged over 4096 weights.
        assert ends["alone"] == ends["rounded"] == 1
        assert ends["nearest"] == float(torch.tensor(0.99).bfloat16())
        assert abs(ends["chance"] - 0.99) < 5 * 2**-9 * math.sqrt(100 / 4096)

    def test_to_nearest_a_step_is_that_of_fp32_rounded_once(self):
        model = gpt()
        wide = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        rounded = RoundedWeights(torch.optim.AdamW(model.parameters()))
        by_hand = torch.optim.AdamW(wide)
        for step in range(3):
            rounded.zero_grad()
            model.loss(*tokens(step)).backward()
            for weight, p in zip(wide, model.parameters(), strict=True):
                weight.grad = p.grad.float()
            rounded.step()
            by_hand.step()
            for weight in wide:
                weight.data = weight.data.bfloat16().float()
            assert same(model.parameters(), [weight.bfloat16() for weight in wide])

    def test_between_steps_nothing_but_moments_is_held(self):
        model = gpt()
        rounded = RoundedWeights(
            torch.optim.AdamW(model.parameters()), generator=torch.Generator().manual_seed(0)
        )
        model.loss(*tokens()).backward()
        rounded.step()
        held = measure.model_states(model, rounded.optimizer)
        assert (
            held.total == 12 * CONFIG.num_params + 4 * len(anatomy.tensors(CONFIG))
            and held.by("name")["master weights"] == 0
        )

    def test_a_skipped_step_leaves_everything_as_it_was(self):
        layer, scaler = line(2.0, dtype=FP16), LossScaler(1024)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
        rounded = RoundedWeights(sgd, generator=torch.Generator().manual_seed(0))
        for factor, expected in [(math.inf, 2.0), (1.0, 1.5)]:
            rounded.zero_grad()
            scaler.scale((layer.weight.float() * factor).sum()).backward()
            scaler.step(rounded)
            scaler.update()
            assert layer.weight.item() == expected


class TestLossScaler:
    def drive(self, scaler, slopes):
        weight = nn.Parameter(torch.tensor(1.0))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        found = []
        for slope in slopes:
            optimizer.zero_grad()
            scaler.scale(weight * slope).backward()
            stepped = scaler.step(optimizer)
            scaler.update()
            found.append((stepped, scaler.value))
        return found

    def test_static_skips_and_stays(self):
        found = self.drive(
            LossScaler(8, dynamic=False, growth_interval=1), [1.0, math.inf, math.nan, 1.0]
        )
        assert found == [(True, 8), (False, 8), (False, 8), (True, 8)]

    def test_dynamic_backs_off_and_grows(self):
        found = self.drive(LossScaler(8, growth_interval=2), [1.0, 1.0, 1.0, math.inf, 1.0, 1.0])
        assert found == [(True, 8), (True, 16), (True, 16), (False, 8), (True, 8), (True, 16)]

    def test_large_finite_gradients_whose_sum_overflows_are_no_overflow(self):
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.full((4,), 2e38)
        assert LossScaler(1.0).unscale_(optimizer)

    def test_where_no_gradient_is_there_is_no_overflow(self):
        """A rank whose share is empty does not keep the others from stepping."""
        assert LossScaler().unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))

    def test_fp16_gradients_need_master_weights(self):
        layer = line(dtype=FP16)
        sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer.weight.grad = torch.ones_like(layer.weight)
        with pytest.raises(ValueError, match="wrap the optimizer in MasterWeights"):
            LossScaler().step(sgd)
        masters = MasterWeights(sgd)
        assert LossScaler(4.0).step(masters) and layer.weight.item() == 0.75

    def test_what_underflows_without_arrives_with(self):
        for scale, expected in [(1.0, 0.0), (1024.0, floats.FP16.round(1024 * 1e-8) / 1024)]:
            layer, scaler = line(dtype=FP16), LossScaler(scale, dynamic=False)
            masters = MasterWeights(torch.optim.SGD(layer.parameters(), lr=1.0))
            scaler.scale(layer.weight.sum().float() * 1e-8).backward()
            scaler.unscale_(masters)
            assert masters.masters[layer.weight].grad.item() == pytest.approx(
                expected, rel=2**-8
            )  # subnormal in fp16: few digits are left

    def test_the_scaled_loss_is_fp32(self):
        loss = torch.tensor(3.0, dtype=FP16)
        assert (
            LossScaler().scale(loss).item() == 3 * 65536
            and LossScaler().scale(loss.double()).dtype == torch.float64
        )

    def test_an_endless_overflow_ends(self):
        with pytest.raises(FloatingPointError, match="the loss itself is inf or NaN"):
            self.drive(LossScaler(2.0**-145), [math.nan] * 5)

    def test_calls_out_of_order(self):
        weight = nn.Parameter(torch.ones(1))
        sgd, scaler = torch.optim.SGD([weight], lr=1.0), LossScaler()
        with pytest.raises(RuntimeError, match="no gradients were looked at"):
            scaler.update()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(sgd)
        with pytest.raises(RuntimeError, match="unscaled already"):
            scaler.unscale_(sgd)
        scaler.step(sgd)
        with pytest.raises(RuntimeError, match="called twice"):
            scaler.step(sgd)
        with pytest.raises(RuntimeError, match="has stepped already"):
            scaler.unscale_(sgd)
        scaler.update()
        assert scaler.value == 65536 and scaler.good_steps == 1

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"init_scale": 0.0}, "init_scale must be a finite number above 0, got 0.0"),
            ({"init_scale": -8.0}, "init_scale must be a finite number above 0, got -8.0"),
            ({"init_scale": math.inf}, "init_scale must be a finite number above 0, got inf"),
            ({"init_scale": math.nan}, "init_scale must be a finite number above 0, got nan"),
            ({"init_scale": 1e39}, "init_scale=1e+39 is 0 or inf in fp32"),
        ],
    )
    def test_bad_settings(self, settings, says):
        with pytest.raises(ValueError) as error:
            LossScaler(**settings)
        assert says in str(error.value)


def test_masters_know_their_conventions():
    stepper = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="False, True or 'only', got 'both'"):
        MasterWeights(stepper, fp32_gradients="both")


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_scales_by_hand_are_those_of_the_scaler(interval):
    for pattern in itertools.product([True, False], repeat=7):
        scaler, found = LossScaler(64.0, growth_interval=interval), []
        weight = nn.Parameter(torch.zeros(1))
        for finite in pattern:
            found.append(scaler.value)
            weight.grad = torch.tensor([0.0 if finite else math.inf])
            scaler.step(torch.optim.SGD([weight], lr=0.0))
            scaler.update()
        assert precision.scales(pattern, 64.0, interval) == [*found, scaler.value]


class TestFormats:
    def draw(self, generator, rows):
        window = torch.randint(65, (rows, 13), generator=generator)
        return window[:, :-1], window[:, 1:]

    def test_fp32_is_plain_training(self):
        ours, theirs = gpt(torch.float32), gpt(torch.float32)
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, eps=1e-15, fused=True)
        batches = [self.draw(torch.Generator().manual_seed(k), 4) for k in range(3)]
        log = list(rigs.precision.train(ours, batches, rigs.precision.Formats(), lr=1e-3))
        for x, y in batches:
            optimizer.zero_grad()
            theirs.loss(x, y).backward()
            optimizer.step()
        assert log == [(1.0, True)] * 3 and same(ours.parameters(), theirs.parameters())

    def test_a_log_says_the_scale_of_each_step_and_whether_it_was_taken(self):
        def overflows(model, x, y):
            return rigs.precision.fp32_loss(model, x, y) * (math.inf if len(x) == 1 else 1.0)

        scale = {"init_scale": 64.0, "growth_interval": 1}
        formats = rigs.precision.Formats(FP16, MasterWeights, overflows, scale)
        generator = torch.Generator().manual_seed(0)
        batches = [self.draw(generator, rows) for rows in (2, 1, 2)]
        log = list(rigs.precision.train(gpt(FP16), batches, formats))
        assert log == [(64.0, True), (128.0, False), (64.0, True)]

    def test_the_gradient_of_the_loss_is_the_scale(self):
        """2¹⁶ is beyond fp16: a loss in fp16 overflows there, whatever the batch, and one in fp32 does not."""
        batches = [self.draw(torch.Generator().manual_seed(0), 4)] * 2
        for loss, expected in [(GPT.loss, [False, True]), (rigs.precision.fp32_loss, [True, True])]:
            scale = {"init_scale": 2.0**16}
            formats = rigs.precision.Formats(FP16, MasterWeights, loss, scale)
            log = rigs.precision.train(gpt(FP16), batches, formats)
            assert [taken for _, taken in log] == expected

    def test_seeds_are_runs_of_their_own_from_copies(self):
        models = [gpt(torch.float32), gpt(torch.float32)]
        choices = {
            "fp32": rigs.precision.Formats(),
            "bf16": rigs.precision.Formats(BF16, MasterWeights),
        }
        found = rigs.precision.three_seeds(models, choices, self.draw, steps=20, lr=1e-3)
        assert same(models[0].parameters(), gpt(torch.float32).parameters())
        assert {name: [len(run) for run in runs] for name, runs in found.items()} == {
            "fp32": [3, 3],
            "bf16": [3, 3],
        }
        first, second = found["fp32"]
        assert first[0] == second[0] and first[1] != second[1]
        alone = gpt(torch.float32)
        assert first == rigs.precision.learn(
            alone, rigs.precision.Formats(), self.draw, steps=20, seed=0, lr=1e-3
        )
        x, y = self.draw(torch.Generator().manual_seed(99), 16)
        assert first[-1] == rigs.precision.fp32_loss(alone, x, y).item()


class TestAutocast:
    def test_only_formats_of_16_bits(self):
        with pytest.raises(ValueError, match="got torch.float32"):
            precision.autocast(torch.float32)

    def test_weights_are_cast_once(self):
        layer = nn.Linear(4, 4, bias=False)
        x = torch.ones(2, 4, requires_grad=True)
        with precision.autocast(BF16):
            saved = measure.saved_activations(lambda: layer(layer(layer(x))), layer)
        copies = [line for line in saved.lines if line.note == "bfloat16 [4, 4]"]
        assert len(copies) == 1

    def test_a_region_ends_with_an_error_too(self):
        layer = nn.Linear(4, 4)
        with pytest.raises(RuntimeError), precision.autocast(BF16):
            layer(torch.ones(3))
        assert layer(torch.ones(4)).dtype == torch.float32

    def test_predicted_activations_are_those_of_the_region(self):
        model = gpt(torch.float32)
        train = TrainConfig(micro_batch=3, global_batch=3, precision="bf16", autocast=True)
        x, y = (part.clone() for part in tokens())
        with precision.autocast(BF16):
            saved = measure.saved_activations(lambda: model.loss(x, y), model)
        assert memory.activations(CONFIG, train).diff(saved).unexplained == 0


class TestExponents:
    def test_every_code_of_fp16(self):
        """Each value of fp16 survives fp16; a scale moves it into and out of range as the cast does."""
        values = torch.tensor([v for v in floats.FP16.representable() if v], dtype=torch.float64)
        for scale in (2.0**-14, 1.0, 2.0**10):
            fates = precision.fate(precision.exponents([values]), "fp16", scale)
            cast = precision.round_to(values * scale, "fp16")
            expected = {
                "zero": (cast == 0) & ((values * scale).abs() < 2.0**-25),
                "normal": (cast.abs() >= 2.0**-14)
                & cast.isfinite()
                & ((values * scale).abs() >= 2.0**-14),
                "too large": cast.isinf(),
            }
            for name, mask in expected.items():
                assert fates[name] == mask.double().mean().item(), (name, scale)
            assert sum(fates.values()) == pytest.approx(1)

    def test_what_is_no_number_is_left_out(self):
        tensors = [
            torch.tensor([0.0, math.inf, math.nan, -5.0]),
            torch.tensor([0.25], dtype=BF16),
            torch.empty(0),
        ]
        assert precision.exponents(tensors) == {2: 1, -2: 1}
        assert precision.fate({}, "bf16") == {
            "zero": 0.0,
            "subnormal": 0.0,
            "normal": 0.0,
            "too large": 0.0,
        }

    def test_without_a_scale_numbers_are_taken_as_they_are(self):
        counts = {-26: 1, -25: 1, -14: 1, 15: 1, 16: 4}  # at the ends of each range
        fates = {"zero": 0.125, "subnormal": 0.125, "normal": 0.25, "too large": 0.5}
        assert precision.fate(counts, "fp16") == fates

    @pytest.mark.parametrize("scale", [3.0, 0.0, -1.0, math.inf, math.nan])
    def test_a_scale_that_is_no_power_of_two(self, scale):
        with pytest.raises(ValueError, match="is not a power of two"):
            precision.fate({0: 1}, "fp16", scale)


def test_a_softmax_summed_in_bf16_falls_behind_further_and_further():
    """Lab 02 on pairs of letters: 0.1 nats after 40 steps, 0.9 after 160."""
    text = pathlib.Path(_torch_docs.__file__).read_text(encoding="utf-8")
    letters = {letter: code for code, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([letters[letter] for letter in text])
    words, pairs = torch.unique(codes[:-1:2] * len(letters) + codes[1::2], return_inverse=True)
    sizes = dict(num_layers=2, d_model=32, num_heads=4, d_ff=128, seq_len=32)
    config = ModelConfig(**sizes, vocab_size=len(words))

    def draw(generator, rows):
        at = torch.randint(len(pairs) - 33, (rows, 1), generator=generator)
        window = pairs[at + torch.arange(33)]
        return window[:, :-1], window[:, 1:]

    def summed_in_bf16(model, x, y):
        return precision.cross_entropy(model(x).flatten(0, 1), y.flatten(), "bf16")

    lost = []
    for formats in (
        rigs.precision.Formats(BF16, MasterWeights, summed_in_bf16),
        rigs.precision.Formats(BF16, MasterWeights),
    ):
        net = GPT(config, generator=torch.Generator().manual_seed(0)).to(BF16)
        lost.append(rigs.precision.learn(net, formats, draw, steps=160, seed=0))
    gaps = [behind - right for behind, right in zip(*lost, strict=True)]
    assert 0.05 < gaps[4] < 0.2 and 0.8 < gaps[-1] < 1.1
