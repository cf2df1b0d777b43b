"""`python -m labutils.teach.grade submissions/ --out grades`."""

import argparse
import pathlib
import sys

from labutils.teach import calculator, editor, grade, plots, rigs, widgets
from labutils.teach.exercises import cards
from labutils.teach.grade import reports
from labutils.teach.grade.containment import Limits

# What the setup cells of labs import is loaded once, and not in the process of every answer.
LOADED = (calculator, editor, plots, rigs, widgets)


def from_command_line(arguments: list[str] | None = None) -> int:
    """Grade what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m labutils.teach.grade", description=grade.__doc__.partition("\n")[0]
    )
    parser.add_argument("submissions", type=pathlib.Path, help="a folder of notebooks")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("grades"))
    parser.add_argument("--lab", choices=sorted({card.lab for card in cards()}), metavar="NN_topic")
    parser.add_argument(
        "--points", type=pathlib.Path, help="a CSV table exercise,points; others are not graded"
    )
    parser.add_argument("--whole", action="store_true", help="no points for a part of a check")
    parser.add_argument("--jobs", type=int, help="answers at a time; as many as processors")
    parser.add_argument("--seconds", type=float, default=60, help="of computing for an answer; 60")
    parser.add_argument("--memory", type=float, default=2, help="GB for an answer; 2")
    options = parser.parse_args(arguments)
    out, source = options.out.resolve(), options.submissions.resolve()
    if not source.is_dir():
        parser.error(f"{source} is no folder")
    if out.is_relative_to(source):
        parser.error(f"--out {out} lies in the submissions: name a folder beside them")
    if out.exists() and not out.is_dir():
        parser.error(f"--out {out} is a file: name a folder")
    for name, least in (("jobs", 1), ("seconds", 0.1), ("memory", 0.1)):
        given = getattr(options, name)
        if given is not None and not least <= given < 1e6:
            parser.error(f"--{name} {given:g}: give {least} or more")
    try:
        points = grade.points_of(options.points)
    except (OSError, ValueError) as error:
        parser.error(f"--points: {error}")
    exposed = {"files", "network", "signals"} - grade.out_of_reach()
    if exposed:
        what = ", ".join(sorted(exposed))
        print(f"Submitted code can reach, on this system: {what}. Grade in a container.")
    marks = grade.grade(
        source,
        lab=options.lab,
        limits=Limits(seconds=options.seconds, memory=int(options.memory * 1e9)),
        jobs=options.jobs,
        points=points,
        partial=not options.whole,
        say=lambda line: print(line, flush=True),
    )
    if not marks:
        parser.error(f"{source} holds nothing to grade: put notebooks or folders of them into it")
    print("\n".join(map(str, reports.write(marks, out)[:3])))
    return 0


if __name__ == "__main__":
    sys.exit(from_command_line())
