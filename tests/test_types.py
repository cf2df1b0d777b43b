"""What the annotations say is so: the type checker finds nothing. Its cache makes the second run short."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_type_checker_is_content():
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]  # of what pyproject.toml names
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
