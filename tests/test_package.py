"""A wheel has all that the package reads, and runs where no checkout is."""

import pathlib
import subprocess
import sys
import zipfile

import pytest
from flit_core import buildapi

import labutils

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What lab 03 and the rigs read. An audit hook sees every file that is opened: none of the checkout,
# the environment in it excepted.
PROGRAM = """
import pathlib, sys

unpacked, checkout = sys.argv[1:]
sys.path.insert(0, unpacked)

def foreign(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = pathlib.Path(arguments[0])
        if path.is_relative_to(checkout) and not path.is_relative_to(sys.prefix):
            raise AssertionError(f"{path} is of the checkout")

sys.addaudithook(foreign)
import labutils
from labutils import memory
from labutils.config import Hardware, ModelConfig, TrainConfig
from labutils.teach import calculator, check, editor, plots, rigs, widgets
from labutils.teach.exercises import memory as exercises

assert pathlib.Path(labutils.__file__).is_relative_to(unpacked)
assert ModelConfig.named("gpt2").num_params == 124_439_808
assert Hardware.named("H100").memory == 80 * 10**9
train = TrainConfig(micro_batch=1, global_batch=1, precision="fp32")
assert memory.peak(ModelConfig.named("gpt2"), train).total > 16 * 124_439_808
assert rigs.scaling.goyal("Table 1") and rigs.lora.sweep("text") and rigs.corpus.encoded().numel()
assert sum(weight.numel() for weight in rigs.fp8.reader().parameters()) == 406_144
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, made as pip makes it, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return zipfile.ZipFile(folder / buildapi.build_wheel(str(folder)))


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = {path for path in (ROOT / "labutils").rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"}
    assert wanted <= set(wheel.namelist()) and "labutils/py.typed" in wanted


def test_the_wheel_has_the_version_of_the_package(wheel):
    assert pathlib.Path(wheel.filename).name.split("-")[1] == labutils.__version__


def test_the_wheel_runs_without_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    program = [sys.executable, "-I", "-c", PROGRAM, str(tmp_path), str(ROOT)]
    finished = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
