"""The recorder of GPU runs, rehearsed on whatever is here; and every run that has been kept says where it comes from."""

import importlib
import json
import pathlib

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu")


@pytest.fixture(scope="module")
def rehearsal(gpu):
    return gpu.record("python benchmarks/gpu.py --rehearse", **gpu.SMALL)


def test_a_rehearsal_measures_everything(gpu, rehearsal):
    cases = [
        (row["attention"], row["checkpointing"], row["precision"]) for row in rehearsal["peaks"]
    ]
    assert len(set(cases)) == len(cases) >= 8 and len(
        {row["predicted"] for row in rehearsal["peaks"]}
    ) == len(cases)
    if not torch.cuda.is_available():  # an allocator rounds up; storages are what was predicted
        assert [row["measured"] for row in rehearsal["peaks"]] == [
            row["predicted"] for row in rehearsal["peaks"]
        ]
    assert all(row["apart"] < 0.01 and row["ms"] > 0 for row in rehearsal["attention"])
    assert {row["format"] for row in rehearsal["products"]} >= {"fp32", "bf16"}
    for row in rehearsal["products"]:
        assert row["flops_per_second"] == pytest.approx(2 * row["n"] ** 3 / (row["ms"] / 1000))
    assert json.loads(json.dumps(rehearsal)) == rehearsal


def full(rehearsal):
    """What a recording of a GPU would be."""
    return rehearsal | dict(
        device="Some GPU",
        capability="9.0",
        memory_bytes=1,
        driver="1",
        cuda="13",
        triton="3",
        command="python benchmarks/gpu.py",
    )


def test_only_full_runs_of_a_gpu_are_kept(gpu, rehearsal, tmp_path):
    for unfit in (dict(device="cpu"), dict(command="python benchmarks/gpu.py --rehearse")):
        with pytest.raises(ValueError, match="holds full runs of GPUs"):
            gpu.keep(full(rehearsal) | unfit, tmp_path)
    with pytest.raises(ValueError, match="must say its driver, products"):
        gpu.keep(full(rehearsal) | dict(driver=None, products=[]), tmp_path)
    assert not list(tmp_path.iterdir())
    path = gpu.keep(full(rehearsal), tmp_path)
    assert path.name == f"some-gpu-{rehearsal['date'][:10]}.json" and json.loads(
        path.read_text()
    ) == full(rehearsal)


def test_what_was_kept_could_be_kept_again(gpu, tmp_path):
    for path in gpu.RUNS.glob("*.json"):
        assert gpu.keep(json.loads(path.read_text()), tmp_path).name == path.name


def test_without_a_gpu_nothing_is_recorded(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GPU", False)
    gpu.main([])
    assert capsys.readouterr().out.startswith("no GPU here: nothing to record")
    with pytest.raises(SystemExit, match="the one option is --rehearse"):
        gpu.main(["--fast"])
