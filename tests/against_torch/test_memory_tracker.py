"""The predicted peak against torch's own MemTracker, line by line, also for models too large to build, whose tensors are fake."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from labutils import memory
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT

SMALL = ModelConfig(num_layers=5, d_model=32, num_heads=4, d_ff=128, vocab_size=64, seq_len=16)
STEPPING = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}


class Totals(MemTracker):
    """MemTracker without its statistics of each module, which it updates for all modules after every operation: quadratic in layers."""

    def _update_peak_stats(self, peak_state):
        of_modules, self.memory_tracking = self.memory_tracking, {}
        super()._update_peak_stats(peak_state)
        self.memory_tracking = of_modules


def tracked(config: ModelConfig, train: TrainConfig, tracker: MemTracker) -> Ledger:
    """The peak of a step that begins with the optimizer's state, under MemTracker's own names."""
    model = GPT(config, attention=train.attention)
    optimizer = torch.optim.AdamW(model.parameters(), **STEPPING[train.stepping])
    x, y = (torch.zeros(train.micro_batch, config.seq_len, dtype=torch.long) for _ in range(2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker.track_external(model, optimizer, x, y)
    with tracker:
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    types = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    total = types.pop("Total")
    found = Ledger(Line(kind.value, amount) for kind, amount in types.items())
    assert found.total == total
    return found


def predicted(config: ModelConfig, train: TrainConfig) -> Ledger:
    """The same from `memory.predict`: MemTracker goes by the phase in which a tensor was made, where we go by what it is for."""
    peak = memory.predict(config, train)
    at_the_peak = {"forward": "Activation", "backward": "Temp", "optimizer": "Optstate"}[peak.phase]
    component = {
        "weights": "Parameter",
        "gradients": "Gradient",
        "optimizer": "Optstate",
        "activations": "Activation",
        "buffers": at_the_peak,
    }
    name = {"tables of cos and sin": "Buffer", "tokens and targets": "Other", "loss": "Activation"}
    return Ledger(
        Line(name.get(line.name, component[line.component]), line.amount) for line in peak
    )


@pytest.mark.parametrize("stepping", STEPPING)
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_small_model(attention, stepping):
    train = TrainConfig(
        micro_batch=4, global_batch=4, precision="fp32", attention=attention, stepping=stepping
    )
    diff = predicted(SMALL, train).diff(tracked(SMALL, train, MemTracker()))
    assert diff.unexplained == 0, str(diff)


@pytest.mark.parametrize(
    "name, seq_len, micro_batch, attention, phase",
    [
        ("gpt2-xl", 1024, 8, "plain", "backward"),  # 104 GB
        ("llama-2-7b", 4096, 4, "sdpa", "backward"),  # 275 GB
        (
            "llama-2-7b",
            256,
            1,
            "sdpa",
            "optimizer",
        ),  # 109 GB: few tokens, so the optimizer has the fullest moment
    ],
)
def test_a_model_too_large_to_build(name, seq_len, micro_batch, attention, phase):
    config = replace(ModelConfig.named(name), seq_len=seq_len)
    train = TrainConfig(
        micro_batch=micro_batch, global_batch=micro_batch, precision="fp32", attention=attention
    )
    with FakeTensorMode():
        found = tracked(config, train, Totals())
    diff = predicted(config, train).diff(found)
    assert diff.unexplained == 0, str(diff)
    assert memory.predict(config, train).phase == phase
