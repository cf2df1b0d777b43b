"""What tests, kernels and ranks share: one thread, the same random cases, an eye for pictures."""

import os

# Before torch is imported; a sum's last digits depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Notebooks run in this environment, whatever kernels the user has.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"

import torch

if not torch.cuda.is_available():
    # Before anything imports triton, as parts of torch do: our kernels want its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

import base64
import io
import re

import hypothesis
import numpy as np
import pytest
from PIL import Image

hypothesis.settings.register_profile("course", derandomize=True, deadline=None)
hypothesis.settings.load_profile("course")

PICTURE = re.compile(r'data:image/png;base64,([^"]*)')
# Of 255: antialiasing and fonts differ a little between platforms; a moved bar or a changed title
# differs more.
MOST = 10


def pictures(outputs):
    """The PNG pictures in a cell's HTML outputs, as arrays."""
    pages = "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), float)
        for png in PICTURE.findall(pages)
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """nbval compares texts; a stored picture must also look like the one drawn now."""
    result = yield
    if type(item).__name__ == "IPyNbCell" and item.options["check"]:
        stored, drawn = pictures(item.cell.outputs), pictures(item.test_outputs)
        assert [picture.shape for picture in stored] == [picture.shape for picture in drawn]
        for before, now in zip(stored, drawn, strict=True):
            rms = np.sqrt(np.mean((before - now) ** 2))
            assert rms <= MOST, (
                f"the picture changed: RMS {rms:.1f} of 255, at most {MOST} is noise"
            )
    return result
