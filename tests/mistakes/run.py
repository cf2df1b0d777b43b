"""Plant mistakes one at a time in a copy of the tree, and see whether the tests catch them.

PYTHONPATH=tests python -m mistakes.run             all of them, which takes hours
PYTHONPATH=tests python -m mistakes.run zero flash  those in files whose path has one of these words

Prints what becomes of each, and those that survived once more at the end. To be run by hand. A
mistake that survives is a hole: write the test that catches it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from mistakes.planted import BY_FILE

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("labutils", "examples", "tests", "tools", "conftest.py", "pyproject.toml")
SECONDS = 300  # who does not come back is caught as well


class Mistake(NamedTuple):
    """The words of a line in a file, what stands there by mistake, and who should notice."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The file's text with the mistake in it."""
        if text.count(self.right) != 1:
            raise ValueError(f"{self.file} has {self.right!r} {text.count(self.right)} times")
        return text.replace(self.right, self.wrong)

    def __str__(self) -> str:
        return f"{self.file}: {self.right!r} → {self.wrong!r}"


MISTAKES = tuple(
    Mistake(f"labutils/{file}.py", *pair, tuple(f"tests/{name}.py" for name in tests.split()))
    for (file, tests), pairs in BY_FILE.items()
    for pair in pairs
)


def outcome(mistake: Mistake) -> str:
    """ "caught", by which test, or "survived"."""
    with tempfile.TemporaryDirectory(prefix="mistake-") as folder:
        for name in NEEDED:
            source, copy = ROOT / name, Path(folder, name)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
        file = Path(folder, mistake.file)
        file.write_text(mistake.planted(file.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            ended = subprocess.run(
                [*command, *mistake.tests],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": folder},
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"caught   (after {SECONDS} s)"
    lines = ended.stdout.splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return "survived" if ended.returncode == 0 else f"caught   {failed[:100]}"


def main(words: list[str]) -> None:
    """Try the mistakes and print what becomes of them."""
    chosen = [each for each in MISTAKES if not words or any(word in each.file for word in words)]
    survivors = []
    for mistake in chosen:
        how = outcome(mistake)
        print(f"{how}\n    {mistake}", flush=True)
        survivors += [mistake] * (how == "survived")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught", *survivors, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
