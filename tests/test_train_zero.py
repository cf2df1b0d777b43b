"""examples/train_zero.py: the same losses on one rank and on many, as threads, as processes, and on two nodes under torchrun."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

from labutils.world import worker

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_zero.py"


@pytest.fixture
def trained(monkeypatch, capsys):
    def run(*options):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, options)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def losses(lines):
    """The losses of each level, as numbers."""
    found = [re.findall(r"\d+\.\d{6}", line) for line in lines if line.startswith("level")]
    return [[float(loss) for loss in each] for each in found]


def test_every_level_learns_the_same_on_one_rank_and_on_many(trained):
    (one,) = losses(trained("--ranks", 1, "--level", 1, "--steps", 2))
    assert one[-1] < one[0]
    assert losses(trained("--ranks", 3, "--steps", 2)) == [pytest.approx(one, abs=2e-5)] * 3


def test_two_nodes_learn_the_same_as_threads_and_processes(trained, tmp_path):
    """A torchrun agent of two ranks and one of a single rank. They meet in a file, so that no port has to be free, and know each other as 127.0.0.1."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": worker.loopback(),
    }
    meeting = {
        "--rdzv-backend": "c10d",
        "--rdzv-id": "two-nodes",
        "--rdzv-endpoint": str(tmp_path / "meeting"),
        "--rdzv-conf": "store_type=file",
    }
    size = {"--nnodes": "2", "--local-addr": "127.0.0.1"}
    options = [word for option in (size | meeting).items() for word in option]

    def agent(ranks):
        run = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={ranks}"]
        return [*run, str(SCRIPT), "--steps", "2"]

    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = dict(env=environment, cwd=tmp_path, **pipes)
    nodes = [subprocess.Popen(agent(ranks), **started) for ranks in (2, 1)]
    here = ("--ranks", 3, "--steps", 2, "--engine")
    try:
        theirs = trained(*here, "threads")  # while the nodes start
        assert trained(*here, "processes") == theirs and len(losses(theirs)) == 3
        told = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # an agent ends its ranks, too
            node.wait(timeout=60)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(errors for _, errors in told)
    (ours,) = [out.splitlines() for out, _ in told if out]
    assert ours == theirs


def test_a_snapshot_of_three_ranks_goes_on_with_two_at_another_level(trained, tmp_path):
    path = tmp_path / "snapshot"
    (whole,) = losses(trained("--ranks", 3, "--level", 1, "--steps", 2, "--save", path))
    went_on = losses(trained("--ranks", 2, "--level", 3, "--steps", 2, "--load", path))[0]
    assert went_on[0] < whole[0] and went_on != pytest.approx(whole, abs=1e-3)
    assert went_on == pytest.approx(
        losses(trained("--ranks", 1, "--level", 2, "--steps", 2, "--load", path))[0], abs=2e-5
    )


def test_ranks_that_do_not_divide_the_batch_are_refused(trained, capsys):
    with pytest.raises(SystemExit):
        trained("--ranks", 5)
    assert "5 ranks do not divide the batch of 48 sequences" in capsys.readouterr().err
