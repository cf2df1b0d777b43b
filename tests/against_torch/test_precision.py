"""Loss scaler and autocast beside `torch.amp`: scale for scale, skip for skip, weight for weight, to the bit."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from labutils import checkpointing, precision
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.precision import LossScaler, MasterWeights

INF, NAN = float("inf"), float("nan")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
CONFIG = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "d_ff": 64,
    "vocab_size": 65,
    "seq_len": 12,
}
MODELS = {
    "gpt2": ModelConfig(**CONFIG),
    "tied": ModelConfig(**CONFIG, tied=True),
    "llama": ModelConfig(
        **CONFIG, norm="rmsnorm", ffn="swiglu", positions="rope", bias=False, num_kv_heads=2
    ),
    "experts": ModelConfig(**CONFIG, num_experts=4, top_k=2),
    "dropout": ModelConfig(**CONFIG, dropout=0.2),
}


def tokens(seed=1):
    return torch.randint(65, (2, 3, 12), generator=torch.Generator().manual_seed(seed)).unbind()


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def scale_of(scaler):
    return scaler.value if isinstance(scaler, LossScaler) else scaler.get_scale()


class Run:
    """A weight, an optimizer and a scaler, ours or torch's, driven step by step with gradients of our choice."""

    def __init__(self, scaler, make=torch.optim.SGD, **settings):
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.optimizer = make([self.weight], lr=0.1, **settings)
        self.scaler = scaler

    def step(self, slope, clip=False):
        before = self.weight.detach().clone()
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * slope).sum()).backward()
        if clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_([self.weight], 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        scale = (
            self.scaler.value if isinstance(self.scaler, LossScaler) else self.scaler.get_scale()
        )
        return scale, torch.equal(before, self.weight), self.weight.detach().clone()


def slopes(n, seed=0):
    """Finite gradients with an inf or a NaN now and then, and some that overflow only once they are scaled."""
    draw = torch.Generator().manual_seed(seed)
    kind = torch.rand(n, generator=draw).tolist()
    values = torch.randn(n, 3, generator=draw)
    specials = {0: INF, 1: NAN, 2: 3e38, 3: -INF}
    for i, k in enumerate(kind):
        if k < 0.25:
            values[i, i % 3] = specials[int(k * 16)]
    return values


SETTINGS = [
    {"init_scale": 2.0**16, "growth_interval": 3},
    {"init_scale": 3.7, "growth_interval": 2},
    {"init_scale": 2.0**126, "growth_interval": 1},  # growth stops below infinity
    {"init_scale": 1e-3, "growth_interval": 1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("clip", [False, True], ids=["step", "clip"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_every_step_equals_grad_scaler(settings, clip, make):
    ours, theirs = (
        Run(LossScaler(**settings), make),
        Run(torch.amp.GradScaler("cpu", **settings), make),
    )
    skipped = 0
    for slope in slopes(60):
        (scale, stood, weight), (their_scale, they_stood, their_weight) = (
            ours.step(slope, clip),
            theirs.step(slope, clip),
        )
        assert scale == their_scale and stood == they_stood and torch.equal(weight, their_weight)
        skipped += stood
    assert 5 < skipped < 55
    assert theirs.scaler.get_scale() == ours.scaler.value
    assert theirs.scaler._get_growth_tracker() == ours.scaler.good_steps


def test_two_optimizers_share_a_scale_and_skip_on_their_own():
    found = []
    for scaler in (
        LossScaler(1024, growth_interval=2),
        torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2),
    ):
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
        for factor in (1.0, INF, 1.0, 1.0):
            loss = weights[0].sum() + (weights[1] * factor).sum()
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        found.append((scale_of(scaler), [weight.tolist() for weight in weights]))
    assert found[0] == found[1] and found[0][1][0] != found[0][1][1]


@HALVES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_autocast_gives_the_same_loss_and_gradients(dtype, name, attention):
    model = GPT(MODELS[name], attention=attention, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(model)
    losses = []
    for net, region in [(model, precision.autocast(dtype)), (twin, torch.autocast("cpu", dtype))]:
        torch.manual_seed(3)
        with region:
            losses.append(net.loss(*tokens()))
        losses[-1].backward()
    assert torch.equal(*losses) and losses[0].dtype == losses[1].dtype
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert not same(
        [p.grad for p in model.parameters()],
        torch.autograd.grad(twin.loss(*tokens()), list(twin.parameters())),
    )


X, W = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(1, 2, 20).view(5, 4)
IMAGE, KERNEL = (
    torch.linspace(-1, 1, 50).view(1, 2, 5, 5),
    torch.linspace(0, 1, 24).view(3, 2, 2, 2),
)
LINE, FILTER = IMAGE.flatten(2), KERNEL.flatten(2)
BLOCK, CUBE = IMAGE.unsqueeze(2), KERNEL.unsqueeze(2)
HEADS = torch.linspace(-1, 1, 48).view(1, 2, 6, 4)
P = X.sigmoid()
CALLS = {
    "linear": lambda: F.linear(X, W, torch.ones(5)),
    "matmul": lambda: torch.matmul(X, W.T),
    "method": lambda: X.matmul(W.T),
    "__matmul__": lambda: X @ W.T,
    "__rmatmul__": lambda: W.T.__rmatmul__(X),
    "mm": lambda: torch.mm(X, W.T),
    "bmm": lambda: torch.bmm(X[None], W.T[None]),
    "addmm": lambda: torch.addmm(torch.ones(5), X, W.T),
    "addbmm": lambda: torch.addbmm(torch.ones(5), X[None], W.T[None]),
    "baddbmm": lambda: torch.baddbmm(torch.ones(5), X[None], W.T[None]),
    "conv1d": lambda: F.conv1d(LINE, FILTER),
    "conv2d": lambda: F.conv2d(IMAGE, KERNEL, padding=1),
    "conv3d": lambda: F.conv3d(BLOCK, CUBE),
    "conv_transpose1d": lambda: F.conv_transpose1d(LINE, FILTER.transpose(0, 1)),
    "conv_transpose2d": lambda: F.conv_transpose2d(IMAGE, KERNEL.transpose(0, 1)),
    "conv_transpose3d": lambda: F.conv_transpose3d(BLOCK, CUBE.transpose(0, 1)),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
        HEADS, HEADS, HEADS, is_causal=True
    ),
    "cross_entropy": lambda: F.cross_entropy(X.bfloat16(), torch.tensor([0, 1, 2])),
    "nll_loss": lambda: F.nll_loss(X.bfloat16(), torch.tensor([0, 1, 2])),
    "mse_loss": lambda: F.mse_loss(X.bfloat16(), P.bfloat16()),
    "l1_loss": lambda: F.l1_loss(X.bfloat16(), P.bfloat16()),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(X.bfloat16(), P.bfloat16()),
    "huber_loss": lambda: F.huber_loss(X.bfloat16(), P.bfloat16()),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(P.bfloat16(), P),
    "prod": lambda: P.bfloat16().prod(),
    "trace": lambda: torch.trace(X.bfloat16()),
    "cdist": lambda: torch.cdist(X.bfloat16(), W.bfloat16()),
    # in neither list: what comes in decides
    "softmax": lambda: X.softmax(-1),
    "layer_norm": lambda: F.layer_norm(X.bfloat16(), (4,)),
    "sum": lambda: X.bfloat16().sum(),
    "float64": lambda: X.double() @ W.T.double(),
}


@HALVES
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_of_the_lists(dtype, name):
    with torch.autocast("cpu", dtype):
        theirs = CALLS[name]()
    with precision.autocast(dtype):
        ours = CALLS[name]()
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_every_name_in_the_lists_is_tried():
    assert precision.HALF_OPS | precision.FULL_OPS <= set(CALLS)


REGIONS = {
    "ours": lambda dtype, enabled=True: precision.autocast(dtype, enabled=enabled),
    "theirs": lambda dtype, enabled=True: torch.autocast("cpu", dtype, enabled=enabled),
}


@HALVES
def test_regions_nest_as_torch_s_do(dtype):
    found = []
    for region in REGIONS.values():
        layer = nn.Linear(4, 4)
        with region(dtype):
            outer = layer(X)
            with region(dtype, enabled=False):
                inner = layer(X)
                with region(dtype):
                    innermost = layer(X)
            again = layer(X)
        found.append([tensor.dtype for tensor in (outer, inner, innermost, again, layer(X))])
    assert found[0] == found[1] == [dtype, torch.float32, dtype, dtype, torch.float32]


@HALVES
def test_nested_regions_share_the_copies_of_weights(dtype):
    """One half copy for both regions: the gradients of the three uses are added in half, as in torch, not in fp32."""
    found = []
    for region in REGIONS.values():
        layer = nn.Linear(4, 4)
        nn.init.constant_(layer.weight, 0.3)
        with region(dtype):
            y = layer(X)
            with region(dtype):
                y = y + 3 * layer(X)
            y = y + 7 * layer(X)
        (y * W[:3]).sum().backward()
        found.append(layer.weight.grad)
    assert same(*[[grad] for grad in found])


@HALVES
def test_a_weight_that_is_a_view_is_copied_for_each_use_as_in_torch(dtype):
    """So the gradients of its three uses are added in fp32."""
    found = []
    for region in REGIONS.values():
        weight = torch.full((5, 4), 0.3)[1:].requires_grad_()
        with region(dtype):
            y = sum(factor * F.linear(X, weight) for factor in (1, 3, 7))
        (y * W[:3, :4]).sum().backward()
        found.append(weight.grad)
    assert same(*[[grad] for grad in found])


CHECKPOINTERS = {
    "none": lambda region, fn, x: fn(x),
    "ours": lambda region, fn, x: checkpointing.checkpoint(fn, x),
    "theirs": lambda region, fn, x: checkpoint(
        fn,
        x,
        use_reentrant=False,
        # torch replays its own regions alone
        **(
            dict(context_fn=lambda: (contextlib.nullcontext(), region))
            if hasattr(region, "_cast")
            else {}
        ),
    ),
}


def checkpointed(region, checkpointer, config, inside):
    """The loss and all gradients of a GPT whose blocks are checkpointed under autocast, with the backward pass inside or outside of the region."""
    model = GPT(config, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    with region:
        x = model.embed(tokens()[0])
        for block in model.blocks:
            x = CHECKPOINTERS[checkpointer](region, block, x)
        loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens()[1].flatten())
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@HALVES
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", ["tied", "dropout"])
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_a_checkpointed_region_is_computed_again_in_the_same_format(
    dtype, name, checkpointer, inside
):
    expected = checkpointed(torch.autocast("cpu", dtype), "theirs", MODELS[name], inside)
    assert same(
        checkpointed(precision.autocast(dtype), checkpointer, MODELS[name], inside), expected
    )


@pytest.mark.parametrize(
    "now", [{"enabled": True}, {"enabled": False}, None], ids=["on", "off", "none"]
)
@pytest.mark.parametrize(
    "then", [{"enabled": True}, {"enabled": False}, None], ids=["on", "off", "none"]
)
def test_the_second_evaluation_sees_the_region_of_the_first_and_not_that_of_the_backward_pass(
    then, now
):
    seen = []

    def region(settings):
        return contextlib.nullcontext() if settings is None else precision.autocast(**settings)

    def fn(x):
        y = x @ x.T
        seen.append(y.dtype)
        return y.exp().sin()

    with region(then):
        y = checkpointing.checkpoint(fn, X.clone().requires_grad_())
    with region(now):
        outside = precision.autocast.innermost()
        y.sum().backward()
        assert precision.autocast.innermost() is outside
    assert seen == [torch.bfloat16 if then == {"enabled": True} else torch.float32] * 2


def test_the_cache_knows_what_it_holds():
    """A copy in one half format is no copy in the other, one made without gradients is none with, and a stepped weight needs a new one."""
    layer = nn.Linear(4, 4)
    with precision.autocast(torch.bfloat16):
        with torch.no_grad():
            before = layer(X)
        layer(X).sum().backward()
        with precision.autocast(torch.float16):
            assert layer(X).dtype == torch.float16
        with torch.no_grad():
            layer.weight += 1
            assert not torch.equal(layer(X), before)
    assert layer.weight.grad is not None


@HALVES
def test_a_training_run_of_ours_is_a_training_run_of_torch_s(dtype):
    """Autocast, loss scaling, clipping and AdamW, 12 steps: every scale and every weight, where the first scales overflow on purpose."""
    runs = []
    for region, scaler in [
        (lambda: precision.autocast(dtype), LossScaler(2.0**40, growth_interval=3)),
        (
            lambda: torch.autocast("cpu", dtype),
            torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3),
        ),
    ]:
        model = GPT(MODELS["tied"], generator=torch.Generator().manual_seed(0))
        optimizer, scales = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for step in range(24):
            optimizer.zero_grad()
            with region():
                loss = model.loss(*tokens(step))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scale_of(scaler))
        runs.append((scales, list(model.parameters())))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    assert len(set(runs[0][0])) > (3 if dtype == torch.float16 else 1)


def test_master_weights_under_torch_s_scaler():
    """fp16 weights: our masters take torch's scaler, and give what our scaler gives."""
    runs = []
    for scaler in (LossScaler(growth_interval=2), torch.amp.GradScaler("cpu", growth_interval=2)):
        model = GPT(MODELS["gpt2"], generator=torch.Generator().manual_seed(0)).half()
        masters, scales = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3)), []
        for step in range(8):
            masters.zero_grad()
            scaler.scale(model.loss(*tokens(step))).backward()
            masters.collect()
            scaler.unscale_(masters)
            scaler.step(masters)
            scaler.update()
            scales.append(scale_of(scaler))
        runs.append((scales, list(model.parameters())))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    assert runs[0][0][0] == 2.0**15  # 65536 itself is beyond fp16: the first step is skipped


@HALVES
def test_wide_products_are_torchs_where_sums_are_exact(dtype):
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, (24, n), generator=draw).to(dtype) for n in (24, 24))
    bias = torch.randint(-8, 9, (24,), generator=draw).to(dtype)
    products = [
        lambda: x @ w,
        lambda: F.linear(x, w, bias),
        lambda: torch.bmm(x[None], w[None]),
        lambda: torch.addmm(bias, x, w),
    ]
    for product in products:
        with precision.wide_products():
            wide = product()
        assert wide.dtype == dtype and torch.equal(wide, product())


@HALVES
def test_wide_products_round_once(dtype):
    """Of sums in double precision hardly any is rounded otherwise, and none by more than a neighbor."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = (x.double() @ x.double().T).to(torch.float32)
    with precision.wide_products():
        wide = x @ x.T
    differ = wide != exact.to(dtype)
    assert differ.double().mean() < 0.01
    torch.testing.assert_close(wide, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=2**-8)
    assert (wide != x.float().mm(x.float().T).to(dtype)).sum() == 0


def test_wide_products_leave_fp32_and_everything_else_alone():
    x = torch.randn(8, 8)
    h = x.bfloat16()
    with precision.wide_products():
        assert torch.equal(x @ x, x.mm(x)) and torch.equal(h.softmax(-1), torch.softmax(h, -1))
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    with precision.wide_products():
        layer(h).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16
    expected = torch.ones(8, 8) @ h.float()
    assert torch.equal(layer.weight.grad, expected.bfloat16())
