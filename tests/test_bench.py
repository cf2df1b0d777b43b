"""`make bench`: every benchmark has a share of ten minutes, every row of the table a number or the reason why it has none."""

import csv
import importlib
import importlib.util
import pathlib
import subprocess
import types

import pytest
import torch

from labutils.world import World

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = "import json, os\nfile = open(os.environ['BENCHMARK_ROWS'], 'a')\n" + "".join(
    f"print(json.dumps({row!r}), file=file, flush=True)\n"
    for row in (
        dict(row="small", peer="torch", aim=1.0),
        dict(row="large", peer="torch", aim=1.0),
        dict(row="small", peer="torch", ours=1.0, theirs=2.0, ratio=0.5, rounds=9, note=""),
    )
)


@pytest.fixture(scope="module")
def rig():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("_side_by_side")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The runner, with benchmarks of its own: `fine`, `endless`, which is stopped, and `broken`."""
    found = importlib.util.spec_from_file_location("bench", ROOT / "benchmarks" / "__main__.py")
    runner = importlib.util.module_from_spec(found)
    found.loader.exec_module(runner)
    endings = {
        "fine": "",
        "endless": "import signal\nprint('ready', flush=True)\nsignal.pause()",
        "broken": "raise SystemExit(3)",
    }
    for name, ending in endings.items():
        (tmp_path / f"{name}.py").write_text(ROWS + ending)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "TABLE", tmp_path / "table.csv")
    monkeypatch.setattr(runner, "SHARES", {"fine": 60, "endless": 60})
    return runner


class OutOfTime(subprocess.Popen):
    """A process whose time is over as soon as it has said that it is ready."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, stdout=subprocess.PIPE, text=True)

    def wait(self, timeout=None):
        if timeout is not None:
            with self.stdout as out:
                if out.readline():
                    raise subprocess.TimeoutExpired(self.args, timeout)
        return super().wait()


def test_rows_that_found_no_time_say_so(bench, monkeypatch, capsys):
    started = []

    class Started(OutOfTime):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(
        bench,
        "subprocess",
        types.SimpleNamespace(Popen=Started, TimeoutExpired=subprocess.TimeoutExpired),
    )
    assert bench.main([]) == 0
    assert started[1].poll() is not None, "a benchmark that is out of time is stopped"
    first, *lines = bench.TABLE.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert [(row["benchmark"], row["row"], row["ratio"]) for row in rows] == [
        ("fine", "small", "0.5"),
        ("fine", "large", ""),
        ("endless", "small", "0.5"),
        ("endless", "large", ""),
    ]
    assert [row["note"][:7] for row in rows] == ["", "not mea", "", "skipped"]
    assert {"cores", "torch", "Python"} <= set(first.replace(",", "").split())
    shown = capsys.readouterr().out
    assert "skipped: endless had no more than" in shown and " 0.50  1.00" in shown


def test_a_failure_ends_in_the_status_and_leaves_the_table_alone(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHARES", {"broken": 60, "fine": 60})
    assert bench.main([]) == 1 and not bench.TABLE.exists()
    assert "failed: exit status 3" in capsys.readouterr().out
    assert bench.main(["fine"]) == 0 and not bench.TABLE.exists(), "a part is no table"
    with pytest.raises(SystemExit, match="no benchmark is called quick: broken, fine"):
        bench.main(["quick"])


def test_a_benchmark_that_ends_before_its_first_row_is_in_the_table(bench, monkeypatch):
    (bench.HERE / "fine.py").write_text("raise SystemExit(1)")
    ((row,), well) = bench.run("fine", 60)
    assert not well and row["row"] == "all" and row["note"] == "failed: exit status 1"


def test_every_benchmark_has_a_share_of_ten_minutes():
    found = importlib.util.spec_from_file_location("bench", ROOT / "benchmarks" / "__main__.py")
    runner = importlib.util.module_from_spec(found)
    found.loader.exec_module(runner)
    files = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert runner.SHARES.keys() == files - {"gpu"} and sum(runner.SHARES.values()) <= 600
    for name in files - {"gpu", "memory"}:  # nobody else's is beside the one, no CPU runs the other
        text = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert "    owe(" in text and "    report(" in text, name


def test_what_is_owed_and_reported_becomes_one_row(rig, bench, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHMARK_ROWS", str(tmp_path / "rows"))
    rig.owe("peft", {"small": 1.1})
    rig.report("small", "peft", rig.Times((1.0, 3.0, 2.0)), rig.Times((4.0, 4.0, 4.0)))
    (bench.HERE / "fine.py").write_text(
        f"import os, shutil\nshutil.copy({str(tmp_path / 'rows')!r}, os.environ['BENCHMARK_ROWS'])"
    )
    ((row,), _) = bench.run("fine", 60)
    assert row == dict(
        benchmark="fine", row="small", peer="peft", aim=1.1, ours=2.0, theirs=4.0, ratio=0.5,
        rounds=3, note="",
    )  # fmt: skip


def test_no_round_begins_when_the_time_of_a_row_is_over(rig, monkeypatch):
    monkeypatch.setattr(rig.time, "perf_counter", iter(range(1000)).__next__)
    calls = dict.fromkeys("ab", lambda: None)
    taken = rig.interleave(calls, 9, seconds=0)
    assert [len(times.taken) for times in taken.values()] == [1, 1], "the first round always runs"
    assert len(rig.interleave(calls, 9, seconds=1e6)["a"].taken) == 9


def test_ranks_agree_on_the_last_round(rig):
    def rounds(rank, interleave):
        seconds = 1e6 if rank.rank else 0
        taken = interleave({"a": int}, 9, group=rank.comm("dp").group, seconds=seconds)
        return len(taken["a"].taken)

    with World(2, engine="processes") as two:
        assert two.run(rounds, rig.interleave) == [1, 1]


def test_a_step_of_torchs_parts_has_our_gradients_or_no_time(rig):
    mesh = importlib.import_module("mesh")
    whole = {"column": torch.arange(8.0).view(4, 2), "norm": torch.ones(3)}
    mine = whole | {"column": whole["column"].chunk(2)[1]}
    assert mesh.apart(mine, whole, tp=1) == mesh.apart(mine, mine, tp=1) == 0
    assert mesh.apart(mine, whole, tp=0) == 4 / 7, "the share of the other rank"
    assert mesh.apart(mine, {**mine, "norm": 4 * mine["norm"]}, tp=1) == 3 / 7
    with pytest.raises(AssertionError):
        mesh.apart(mine, {"norm": mine["norm"]}, tp=1)


def test_the_kept_table_says_where_it_is_from():
    for path in (ROOT / "benchmarks").glob("table.csv"):  # none until a quiet machine has made it
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        rows = list(csv.DictReader(lines))
        assert first.startswith("# python benchmarks: ") and "torch" in first
        assert all(row["ratio"] or row["note"] for row in rows) and len(rows) >= 40
        for row in rows:
            if row["ratio"]:
                ratio = float(row["ours"]) / float(row["theirs"])
                assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-6)


def test_the_book_shows_what_is_kept(bench, monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("course", ROOT / "book" / "course.py")
    course = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(course)
    monkeypatch.setattr(course, "TABLE", tmp_path / "kept.csv")
    assert course.Benchmarks.markdown(None) == "*No run is recorded yet.*"
    told = dict(row="step", peer="DDP", ours=9.0, theirs=10.0, ratio=0.9, aim=0.91, note="")
    owed = dict(benchmark="zero", row="level 1", peer="FSDP2", aim=0.61, note="skipped: late")
    bench.keep([dict(benchmark="data_parallel", **told), owed], course.TABLE)
    machine, _, _, _, first, second = course.Benchmarks.markdown(None).splitlines()
    assert "cores" in machine and "python" not in machine.lower().split()[:2]
    assert first == r"| data\_parallel: step | DDP | 9.00 | 10.00 | 0.90 | 0.91 |  |"
    assert second == "| zero: level 1 | FSDP2 |  |  |  | 0.61 | skipped: late |"
