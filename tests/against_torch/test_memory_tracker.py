"""The predicted peak against torch's own MemTracker, also for models too large to build, whose tensors are fake."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from labutils import memory
from labutils.config import ModelConfig, TrainConfig
from labutils.model import GPT

SMALL = ModelConfig(num_layers=5, d_model=32, num_heads=4, d_ff=128, vocab_size=64, seq_len=16)


def tracked(config: ModelConfig, train: TrainConfig) -> int:
    """Bytes at the peak of the second step, by MemTracker."""
    model = GPT(config, attention=train.attention)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=train.stepping == "foreach")
    x, y = (torch.zeros(train.micro_batch, config.seq_len, dtype=torch.long) for _ in range(2))

    def step():
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x, y)
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("stepping", ["loop", "foreach"])
@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_small_model(attention, stepping):
    train = TrainConfig(micro_batch=4, global_batch=4, precision="fp32", attention=attention, stepping=stepping)
    assert memory.peak_bytes(SMALL, train) == tracked(SMALL, train)


def test_a_model_too_large_to_build():
    config = replace(ModelConfig.named("gpt2-xl"), num_layers=6)  # 1.1 GB of weights, 18 GB in the step
    train = TrainConfig(micro_batch=8, global_batch=8, precision="fp32")
    with FakeTensorMode():
        found = tracked(config, train)
    assert abs(memory.peak_bytes(config, train) - found) <= found // 100
