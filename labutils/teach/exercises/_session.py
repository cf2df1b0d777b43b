"""Settings of PyTorch with which exercises are imported and checked, whatever a session has set."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def as_new() -> Iterator[None]:
    """Gradients are on, and tensors are made on the CPU and in fp32, whatever the session, or an
    attempt before, has set; afterwards all is as it was."""
    elsewhere, dtype = torch.get_default_device().type != "cpu", torch.get_default_dtype()
    place = torch.device("cpu") if elsewhere else nullcontext()
    torch.set_default_dtype(torch.float32)
    try:
        with place, torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
