"""Notebooks from their text twins: build, execute, normalize; or check that the twins say the same.

    python tools/notebooks.py                     every lab, as `make notebooks` does
    python tools/notebooks.py 07_collectives      one lab
    python tools/notebooks.py --check             runs nothing: exit status 1 if a pair differs
    python tools/notebooks.py --minutes           runs nothing: states how long a lab takes

The text twin (notebooks/text/NN_topic.py) is the source of truth: the notebook's cells come from
it, its outputs from a fresh kernel of this very Python. Normalizing drops what differs between two
runs or two machines, so that a rebuilt notebook shows only real changes. A lab that took more
memory than a lab may is not written.
"""

import argparse
import base64
import contextlib
import hashlib
import os
import pathlib
import re
import sys
import threading
import time

import jupytext
import kernels  # beside this file
import nbclient
import nbformat
import psutil
import sums  # beside this file

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
FIRST, COVER = "00_start_here", NOTEBOOKS.parent / "book" / "static" / "cover.png"
CELL_TIMEOUT = 600  # seconds, for what hangs: on a busy machine a cell of 15 s takes two minutes
LAB_SECONDS, LAB_BYTES = (
    60,
    2_000_000_000,
)  # on two cores that nothing else uses; the kernel and its ranks together
# Read for the first time, looked at and understood: prose with its formulas, figures and printed
# numbers; lines of code. An exercise takes what its card says.
WORDS_PER_MINUTE, LINES_PER_MINUTE = 70, 8
CARD = re.compile(r"^### Exercise .*\((\d+) min, [●○]{3}\)$", re.MULTILINE)
STATED = re.compile(r"\b\d+ min\b(?:, and \d+ further)?")
HEADING = re.compile(r"^(#+) (Further: )?", re.MULTILINE)  # what a class of 90 minutes leaves out
README = NOTEBOOKS.parent / "README.md"
KEPT_METADATA = ("tags", "mystnb")
# Refers to a kernel's model; the HTML beside it needs none.
LIVE_WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def twins(names=()):
    """The (notebook, text twin) paths of the labs called `names`, or of every lab, in order."""
    known = sorted(
        {path.stem for path in [*NOTEBOOKS.glob("*.ipynb"), *(NOTEBOOKS / "text").glob("*.py")]}
    )
    wanted = [pathlib.Path(name).stem for name in names] or known
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"no lab is called {', '.join(unknown)}; there are: {', '.join(known)}")
    return [(NOTEBOOKS / f"{name}.ipynb", NOTEBOOKS / "text" / f"{name}.py") for name in wanted]


def cells(notebook):
    """What both twins must agree on: (type, source, kept metadata) of every cell."""
    return [(cell.cell_type, cell.source, kept(cell)) for cell in notebook.cells]


def kept(cell):
    return {key: cell.metadata[key] for key in KEPT_METADATA if cell.metadata.get(key)}


def differences(notebook_path, text_path):
    """Sentences that say where the twins differ; empty when they don't."""
    for path, twin in [(notebook_path, text_path), (text_path, notebook_path)]:
        if not path.exists():
            return [f"{twin.name} has no twin {path.relative_to(NOTEBOOKS)}"]
    built, written = (
        cells(jupytext.read(notebook_path)),
        cells(jupytext.read(text_path, fmt="py:percent")),
    )
    found = (
        [f"{len(built)} cells in the notebook, {len(written)} in the text"]
        if len(built) != len(written)
        else []
    )
    for index, (mine, theirs) in enumerate(zip(built, written, strict=False)):
        if mine != theirs:
            found.append(
                f"cell {index}: {mine!r:.200} in the notebook, {theirs!r:.200} in the text"
            )
            break  # what follows is mostly the same difference, shifted
    return found


def build(text_path):
    """The notebook of a text twin, without outputs; inserting a cell renames no other."""
    notebook = jupytext.read(text_path, fmt="py:percent")
    seen = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return notebook


def minutes(notebook):
    """How long a lab's core takes, and what goes further, to 5 minutes, exercises included.

    Further is what stands under a heading "Further: …", to the next heading of its level.
    """
    takes, level = {False: 0.0, True: 0.0}, 0  # of the heading "Further: …" above; 0 in the core
    for is_code, text in _parts(notebook):
        if not is_code and (heading := HEADING.match(text)):
            depth, further = len(heading[1]), bool(heading[2])
            level = depth if further and not 0 < level < depth else level * (depth > level)
        takes[level > 0] += _reading(is_code, text)
    return tuple(5 * round(each / 5) for each in takes.values())


def _parts(notebook):
    """(is code, text) of every cell up to the references, Markdown cut at its headings."""
    for cell in notebook.cells:
        text, references, _ = cell.source.partition("## References")
        if cell.cell_type == "code":
            yield True, cell.source
            continue
        yield from ((False, part) for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE))
        if references:
            return


def _reading(is_code, text):
    """Minutes for a piece of a lab; an exercise takes what its card says."""
    if is_code:
        lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
        return len(lines) / LINES_PER_MINUTE
    words = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split()
    return len(words) / WORDS_PER_MINUTE + sum(map(int, CARD.findall(text)))


def stated(notebook):
    """The minutes as a lab's title cell says them: "90 min", or "90 min, and 40 further"."""
    core, further = minutes(notebook)
    return f"{core} min" + f", and {further} further" * bool(further)


def state_minutes(notebook_path, text_path):
    """Write how long a lab takes into its title cell, in both twins, and into the README's map."""
    takes = stated(build(text_path))
    said = STATED.sub(takes, text_path.read_text(encoding="utf-8"), count=1)
    text_path.write_text(said, encoding="utf-8")
    notebook = nbformat.read(notebook_path, as_version=4)
    notebook.cells[0] = build(text_path).cells[0]
    nbformat.write(notebook, notebook_path)
    row = rf"(\(notebooks/{notebook_path.name}\) \| )\d+(?: \+ \d+)?"
    told = takes.removesuffix(" further").replace(" min, and", " +").removesuffix(" min")
    README.write_text(re.sub(row, rf"\g<1>{told}", README.read_text("utf-8")), encoding="utf-8")


def execute(notebook, directory):
    """Run all cells in a fresh kernel of this interpreter; an error stops it."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = (
        "1"  # a "python3" kernel that the user installed elsewhere doesn't count
    )
    where = {"metadata": {"path": str(directory)}}
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=kernels.AsyncKernelManager,
        timeout=CELL_TIMEOUT,
        record_timing=False,
        resources=where,
    )
    client.execute(env=os.environ | sums.settings())
    return notebook


def held():
    """Bytes that a kernel and the ranks it has started hold now; what they share counts once."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended in between
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.uss)
    return total


def watched(run):
    """What `run()` returns, and the most `held` meanwhile, looked at ten times a second."""
    peak, over = 0, threading.Event()

    def look():
        nonlocal peak
        while not over.wait(0.1):
            peak = max(peak, held())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        return run(), peak
    finally:
        over.set()
        watcher.join()


def normalize(notebook):
    """Drop what another run or machine would store differently."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(kept(cell))
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
            for output in cell.outputs:
                if "data" in output:
                    output.data.pop(LIVE_WIDGET, None)
                    output.metadata = nbformat.from_dict({})
    return notebook


def merged(outputs):
    """The outputs with pieces of one stream joined: where they break is chance."""
    whole = []
    for output in outputs:
        if output.output_type == "stream" and whole and whole[-1].get("name") == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def cover(notebook):
    """The first picture of a lab, as PNG: that of lab 00 stands on the README."""
    stored = re.search(
        r'src="data:image/png;base64,([^"]+)"', nbformat.writes(notebook).replace('\\"', '"')
    )
    return base64.b64decode(stored[1])


def complaints(notebook, peak=0):
    """Sentences about outputs that no stored notebook may have, and about too many bytes."""
    if peak > LAB_BYTES:
        allowed = f"a lab may need {LAB_BYTES / 1e9:g}"
        yield f"needs {peak / 1e9:.2f} GB, and {allowed}: smaller tensors, or fewer at a time"
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                yield f"cell {index} wrote to stderr: {output.text.strip()[:300]}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NN_topic", help="labs; all of them when none is named"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the twins; run and write nothing"
    )
    parser.add_argument(
        "--minutes", action="store_true", help="write how long a lab takes; run nothing"
    )
    options = parser.parse_args(arguments)
    failed = False
    for notebook_path, text_path in twins(options.names):
        if options.minutes:
            state_minutes(notebook_path, text_path)
        if options.check or options.minutes:
            problems = differences(notebook_path, text_path)
        else:
            started = time.perf_counter()
            executed, peak = watched(
                lambda text_path=text_path: execute(build(text_path), NOTEBOOKS)
            )
            notebook = normalize(executed)
            if not (problems := list(complaints(notebook, peak))):
                nbformat.write(notebook, notebook_path)
                if notebook_path.stem == FIRST:
                    COVER.write_bytes(cover(notebook))
            took = f"{time.perf_counter() - started:.1f} of {LAB_SECONDS} s"
            took += f", {peak / 1e9:.2f} of {LAB_BYTES / 1e9:g} GB"
            print(f"{notebook_path.name}: {len(notebook.cells)} cells, {took}")
        failed |= bool(problems)
        for problem in problems:
            print(f"{notebook_path.name}: {problem}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
