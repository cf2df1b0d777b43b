"""The predicted peak against torch's own MemTracker, and against a dry run of the same step, also for models too large to build."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from labutils import checkpointing, measure, memory, precision
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT
from labutils.world import World

SMALL = ModelConfig(num_layers=5, d_model=32, num_heads=4, d_ff=128, vocab_size=64, seq_len=16)
STEPPING = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}


class Totals(MemTracker):
    """MemTracker without its statistics of each module, which it updates for all modules after every operation: quadratic in layers."""

    def _update_peak_stats(self, peak_state):
        of_modules, self.memory_tracking = self.memory_tracking, {}
        super()._update_peak_stats(peak_state)
        self.memory_tracking = of_modules


@contextlib.contextmanager
def default_dtype(dtype):
    """Modules are built in `dtype`: fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def training(config: ModelConfig, train: TrainConfig):
    """A step that begins with the optimizer's state, its model, its optimizer and its batch."""
    half = train.precision != "fp32" and not train.autocast
    with default_dtype(torch.bfloat16 if half else torch.float32):
        model = GPT(config, attention=train.attention)
    checkpointing.apply(model, train.checkpointing)
    inner = torch.optim.AdamW(model.parameters(), **STEPPING[train.stepping])
    optimizer = precision.MasterWeights(inner) if half else inner
    x, y = (torch.zeros(train.micro_batch, config.seq_len, dtype=torch.long) for _ in range(2))

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return step, model, inner, (x, y)


def tracked(config: ModelConfig, train: TrainConfig, tracker: MemTracker) -> Ledger:
    """The peak of the step under MemTracker's own names."""
    step, model, optimizer, batch = training(config, train)
    masters = [weight for group in optimizer.param_groups for weight in group["params"]]
    tracker.track_external(model, optimizer, *batch, *masters)
    with tracker:
        step()
    types = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    total = types.pop("Total")
    found = Ledger(Line(kind.value, amount) for kind, amount in types.items())
    assert found.total == total
    return found


def predicted(config: ModelConfig, train: TrainConfig) -> Ledger:
    """The same from `memory.peak`: MemTracker goes by the phase in which a tensor was made, where we go by what it is for."""
    component = {
        "weights": "Parameter",
        "gradients": "Gradient",
        "optimizer": "Optstate",
        "activations": "Activation",
    }
    name = {"tables of cos and sin": "Buffer", "tokens and targets": "Other"}

    def kind(line: Line) -> str:
        if line.component == "buffers" and line.name not in name:
            if "optimizer" in line.name:
                return "Optstate"
            return "Temp" if line.name.endswith("backward") else "Activation"
        return name.get(line.name, component.get(line.component))

    return Ledger(Line(kind(line), line.amount) for line in memory.peak(config, train))


@pytest.mark.parametrize("stepping", STEPPING)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_small_model(attention, stepping):
    train = TrainConfig(
        micro_batch=4, global_batch=4, precision="fp32", attention=attention, stepping=stepping
    )
    diff = predicted(SMALL, train).diff(tracked(SMALL, train, MemTracker()))
    assert diff.unexplained == 0, str(diff)


@pytest.mark.parametrize(
    "name, layers, seq_len, micro_batch, attention, phase",
    [
        ("gpt2-xl", 16, 1024, 8, "plain", "backward"),  # 39 GB
        ("llama-2-7b", 8, 4096, 4, "sdpa", "backward"),  # 76 GB
        # 31 GB: few tokens, so the optimizer has the fullest moment
        ("llama-2-7b", 8, 256, 1, "sdpa", "optimizer"),
    ],
)
def test_a_model_too_large_to_build(name, layers, seq_len, micro_batch, attention, phase):
    """Some of their layers: each of them takes the tracker half a second."""
    config = replace(ModelConfig.named(name), num_layers=layers, seq_len=seq_len)
    train = TrainConfig(
        micro_batch=micro_batch, global_batch=micro_batch, precision="fp32", attention=attention
    )
    with FakeTensorMode():
        found = tracked(config, train, Totals())
    diff = predicted(config, train).diff(found)
    assert diff.unexplained == 0, str(diff)
    assert memory.peak(config, train).phase == phase


PRECISIONS = {
    "fp32": dict(precision="fp32"),
    "bf16": dict(precision="bf16"),
    "autocast": dict(precision="bf16", autocast=True),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama-2-7b"])
def test_formula_dry_run_and_tracker_agree(name, kind, policy):
    """In full width; with three of their layers, as each of them takes a dry run about 0.1 s."""
    config = replace(ModelConfig.named(name), num_layers=3)
    train = TrainConfig(
        micro_batch=2, global_batch=2, checkpointing=policy, stepping="foreach", **PRECISIONS[kind]
    )

    def dry(rank):
        step, model, optimizer, _ = training(config, train)
        return measure.history(step, model, optimizer).peak.ledger.total

    with World(1, engine="dry") as world:
        by_dry_run = world.run(dry, rank=0)
    with FakeTensorMode():
        by_tracker = tracked(config, train, Totals()).total
    assert memory.peak(config, train).total == by_dry_run == by_tracker
