"""Prints which techniques compose, as it stands in the book, from labutils/data/compositions.csv.

python tools/compositions.py
python tools/compositions.py --record    trains every case anew and writes that file: minutes
"""

import csv
import pathlib
import re
import sys
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
import equivalence

MARKS = {"equal": "✓", "refused": "R"}


def record() -> None:
    """Train every case, write what comes of it, and print what is wrong."""
    cases = [*equivalence.pairs(), *equivalence.LARGER]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(equivalence.outcome, map(equivalence.case, cases)))
    with open(equivalence.TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "outcome"])
        for names, (what, text) in zip(cases, found, strict=True):
            writer.writerow([equivalence.JOIN.join(names), what])
            if what == "wrong":
                print(equivalence.JOIN.join(names), text)


def reason(names: tuple[str, ...]) -> str:
    """Why a case is refused, and what to set instead; code as code, whose quotes stay straight."""
    said = equivalence.outcome(equivalence.case(names))[1]
    return re.sub(r"\b\w+=('[^']*'|\w+)", r"`\g<0>`", said)


def markdown() -> str:
    """The table of pairs, the reasons of those that are refused, and the larger cases."""
    known = dict(equivalence.rows())
    names = list(equivalence.FEATURES)
    lines = ["| | " + " | ".join(names[:-1]) + " |", "|---" * len(names) + "|"]
    for i, one in enumerate(names[1:], 1):
        marks = [MARKS.get(known.get((two, one), ""), "") for two in names[:i]]
        lines.append(f"| **{one}** | " + " | ".join(marks + [""] * (len(names) - 1 - i)) + " |")
    lines += ["", "Refused (R), with what to set instead:", ""]
    for case, what in known.items():
        if what == "refused":
            lines.append(f"- {equivalence.JOIN.join(case)}: {reason(case)}")
    lines += ["", "Equal as well:", ""]
    larger = [case for case, what in known.items() if len(case) > 2 and what == "equal"]
    return "\n".join(lines + [f"- {equivalence.JOIN.join(case)}" for case in larger]) + "\n"


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    print(markdown())
