"""What tests, kernels and ranks share: the order of sums, the same random cases, an eye for
pictures."""

import os

import sums  # tools/sums.py

os.environ.update(sums.settings())  # before torch is imported
# Notebooks run in this environment, whatever kernels the user has.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"

import torch

if not torch.cuda.is_available():
    # Before anything imports triton, as parts of torch do: our kernels want its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

import base64
import gc
import io
import json
import re
import urllib.parse
import zlib

import hypothesis
import jaxtyping
import kernels  # tools/kernels.py
import nbval.kernel
import nbval.plugin
import numpy as np
import printed
import pytest
from PIL import Image

hypothesis.settings.register_profile("course", derandomize=True, deadline=None)
hypothesis.settings.load_profile("course")


# Where shapes and dtypes are enforced: in the tests of what names them. Whole trainings, exercises
# and claims run the same functions again, for half the time.
SHAPES = re.compile(
    r"/labutils/|/test_(model|collectives|precision|flash|zero_partition|context_parallel|"
    r"tensor_parallel|pipeline|lora|quantization|fp8|rigs)\.py$"
)


@pytest.fixture(scope="module", autouse=True)
def shapes(request):
    """Whether calls of this file are checked against their annotations."""
    jaxtyping.config.update("jaxtyping_disable", not SHAPES.search(request.path.as_posix()))


PICTURE = re.compile(r'data:image/png;base64,([^"]*)')
DRAWING = re.compile(r'data:image/svg\+xml,([^"]*)')
STATES = re.compile(r'"views": "([A-Za-z0-9+/=]*)"')
# Of 255: antialiasing and fonts differ a little between platforms; a moved bar or a changed title
# differs more. What is written in a picture is compared word by word.
MOST = 10
# Where the longest tests are. They come first, so that the workers end together.
LONG = re.compile(
    r"\.ipynb$|browser/|against_torch/|/test_(train|exercises|triton|claims|right_answers|"
    r"compositions|pipeline_composed|randomness|step|package|grade|student|predict|planner_proof|"
    r"types|data_parallel|tensor_parallel|context_parallel|pipeline|calculator|world|world_dry|memory|"
    r"memory_zero|zero_dry|zero|gpu_runs|quantization|fp8|scaling|lora|expert_parallel|measure)\.py$"
)


def pytest_collection_modifyitems(items):
    """With `--no-loadscope-reorder`, pytest-xdist hands files out in this order; by itself in that
    of their number of tests, so that a few long ones come last."""
    items.sort(key=lambda item: not LONG.search(item.path.as_posix()))


def pytest_collection_finish():
    """What is there before the first test stays to the end: there is no need to look through it
    again and again for what may go."""
    gc.collect()
    gc.freeze()


def sanitize(cell, text, plain=nbval.plugin.IPyNbCell.sanitize):
    """What nbval compares of an output: a text whose numbers may differ by rounding."""
    kept = plain(cell, text)
    return printed.Printed(kept) if isinstance(kept, str) else kept


nbval.plugin.IPyNbCell.sanitize = sanitize
nbval.kernel.KernelManager = kernels.KernelManager


def pages(outputs):
    """A cell's HTML outputs, and the states that its panels hide, as one text."""
    shown = "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    hidden = [json.loads(zlib.decompress(base64.b64decode(each))) for each in STATES.findall(shown)]
    return "".join([shown, *(view for views in hidden for view in views)])


def pictures(outputs):
    """The PNG pictures in a cell's outputs: (what is written in it, its pixels)."""
    drawn = [Image.open(io.BytesIO(base64.b64decode(p))) for p in PICTURE.findall(pages(outputs))]
    return [(each.info.get("words"), np.asarray(each.convert("RGB"), float)) for each in drawn]


def drawings(outputs):
    """What the panels of a cell show and hide, with the words of each SVG in its place."""

    def words(drawing):
        return "|".join(re.findall(r"<text[^>]*>([^<]*)<", urllib.parse.unquote(drawing[1])))

    page = pages(outputs)
    return DRAWING.sub(words, page) if STATES.search(page) else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """nbval compares texts; stored pictures and states must also be those made now."""
    result = yield
    if type(item).__name__ == "IPyNbCell" and item.options["check"]:
        stored, drawn = pictures(item.cell.outputs), pictures(item.test_outputs)
        assert [pixels.shape for _, pixels in stored] == [pixels.shape for _, pixels in drawn]
        for (said, before), (says, now) in zip(stored, drawn, strict=True):
            other = printed.difference(said or "", says or "")
            assert not other, f"other words are written in the picture: {other}"
            rms = np.sqrt(np.mean((before - now) ** 2))
            assert rms <= MOST, (
                f"the picture changed: RMS {rms:.1f} of 255, at most {MOST} is noise"
            )
        states = [STATES.sub("", drawings(each)) for each in (item.cell.outputs, item.test_outputs)]
        other = printed.difference(*states)
        assert not other, f"a panel's states changed: {other}"
    return result
