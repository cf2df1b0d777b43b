"""LoRA beside `peft`: the same outputs, gradients and twenty steps of AdamW, to the bit, merged too."""

import copy

import pytest
import torch

from labutils import lora
from labutils.config import ModelConfig
from labutils.model import GPT

SIZES = dict(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=13, seq_len=8)
GPT2 = ModelConfig(**SIZES)
LLAMA = ModelConfig(
    **SIZES, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False, num_kv_heads=2
)
QV, ALL = ("query", "value"), "*"
ROWS = tuple(
    torch.randint(13, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
)


@pytest.fixture(scope="module")
def peft():
    """The package, asked for nothing on the network; its import takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_OFFLINE", "1")
        yield pytest.importorskip("peft")


def names(config, pattern):
    return [part.name.rpartition(".")[2] for part in lora.targets(config, pattern)]


def pair(peft, config, pattern=ALL, *, rank=4, alpha=8, dropout=0.0):
    """A GPT with our adapters and the same with peft's: one draw of A in both."""
    model = GPT(config, generator=torch.Generator().manual_seed(0))
    ours = lora.adapt(
        copy.deepcopy(model), rank=rank, alpha=alpha, pattern=pattern, dropout=dropout,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=names(config, pattern), lora_dropout=dropout
    )
    theirs = peft.get_peft_model(model, settings)
    give(ours, theirs)
    return ours, theirs


@torch.no_grad()
def give(ours, theirs, name="default"):
    """Theirs begins with our A and B, and has no adapter besides."""
    layers = {path: layer for path, layer in lora.adapted(ours).items() if name in layer.adapters}
    found = {
        path: layer
        for path, layer in theirs.base_model.model.named_modules()
        if hasattr(layer, "lora_A") and name in layer.lora_A
    }
    assert set(found) == set(layers) and layers
    for path, layer in layers.items():
        found[path].lora_A[name].weight.copy_(layer.adapters[name].A)
        found[path].lora_B[name].weight.copy_(layer.adapters[name].B)


def trained(model):
    """Trained parameters, A and B of each layer by turns, in both models."""
    return [p for p in model.parameters() if p.requires_grad]


def loss(model):
    logits = model(ROWS[0])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ROWS[1].flatten())


def steps(model, count=20):
    """Losses of so many steps, and the gradients of the last."""
    optimizer, losses = torch.optim.AdamW(trained(model), lr=1e-2), []
    for seed in range(count):
        optimizer.zero_grad()
        torch.manual_seed(seed)  # of dropout's masks
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, [p.grad for p in trained(model)]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("pattern", [QV, ALL], ids=str)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_twenty_steps_and_what_is_merged_are_the_same_to_the_bit(peft, config, pattern, dropout):
    ours, theirs = pair(peft, config, pattern, dropout=dropout)
    assert same(trained(ours), trained(theirs))
    assert torch.equal(ours(ROWS[0]), theirs(ROWS[0])) or dropout
    (losses, gradients), (wanted, others) = steps(ours), steps(theirs)
    assert losses == wanted and losses[-1] < losses[0]
    assert same(gradients, others) and same(trained(ours), trained(theirs))
    ours.eval(), theirs.eval()
    beside = ours(ROWS[0])
    assert torch.equal(beside, theirs(ROWS[0]))
    theirs.merge_adapter()
    with lora.merged(ours):
        assert torch.equal(ours(ROWS[0]), theirs(ROWS[0]))
        assert not torch.equal(ours(ROWS[0]), beside)  # rounded another way, and so told apart
    assert torch.equal(ours(ROWS[0]), beside)  # W itself is kept
    theirs.unmerge_adapter()  # W + Δ − Δ
    torch.testing.assert_close(theirs(ROWS[0]), beside)


def test_a_factor_that_is_no_power_of_two_is_multiplied_elsewhere(peft):
    ours, theirs = pair(peft, LLAMA, rank=3, alpha=5)  # ours scales A·x, theirs B·A·x
    (losses, _), (wanted, _) = steps(ours), steps(theirs)
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_several_adapters_are_switched_alike(peft):
    ours, theirs = pair(peft, GPT2, QV)
    plain = ours(ROWS[0])
    steps(ours, 3), steps(theirs, 3)
    first = ours(ROWS[0])
    lora.adapt(
        ours, rank=2, alpha=8, pattern="down", name="second",
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    theirs.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=8, target_modules=["down"]))
    theirs.set_adapter("second")
    give(ours, theirs, "second")
    assert steps(ours, 3)[0] == steps(theirs, 3)[0]
    second = ours(ROWS[0])
    assert torch.equal(second, theirs(ROWS[0])) and not torch.equal(second, first)
    lora.activate(ours, "default")
    theirs.set_adapter("default")
    assert torch.equal(ours(ROWS[0]), first) and torch.equal(theirs(ROWS[0]), first)
    lora.activate(ours, None)
    with theirs.disable_adapter():
        assert torch.equal(ours(ROWS[0]), plain) and torch.equal(theirs(ROWS[0]), plain)
