"""A plan of 90 minutes for every lab, as Markdown, from the labs and from the wrong answers.

Minutes are those of `tools/notebooks.py`; misconceptions are the wrong answers that the checks are
tested with, beside words of the diagnosis that each must get.
"""

import csv
import re
import sys

import nbformat
from docutils import nodes

import notebooks  # beside this file
from labutils.teach import exercises

CLASS = 90  # minutes
TRANSFER = notebooks.NOTEBOOKS.parent / "book" / "transfer.csv"
sys.path.insert(0, str(notebooks.NOTEBOOKS.parent / "tests"))
import wrong_answers  # noqa: E402

NO_BLOCK = {"Goals", "Setup", "In practice", "Errata", "Summary", "References"}
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
REVEALED = re.compile(r"You guessed .+?, it is (.+?)(?:: (?:off by|worth)|\.?$)")


def blocks(notebook):
    """[title, minutes] of every part of a lab in order, its exercises in their parts."""
    found = [["", 0.0]]
    for is_code, text in notebooks._parts(notebook):
        if not is_code and (title := re.match(r"## (.+)", text)):
            found.append([title[1], 0.0])
        found[-1][1] += notebooks._reading(is_code, text)
    return [block for block in found[1:] if block[0] not in NO_BLOCK]


def plan(parts):
    """(what fits into a class, what is left for home), in order; what goes further is for home."""
    spent, fits = 0.0, []
    for part in parts:
        if part[0].startswith("Further: "):
            continue
        if spent + part[1] > CLASS:
            break
        spent += part[1]
        fits.append(part)
    return fits, [part for part in parts if part not in fits]


def answers(notebook):
    """What the stored notebook answers to each prediction, by its name."""
    for cell in notebook.cells:
        asked = re.search(r'^reveal\(\s*"(.+?)"', cell.source, re.MULTILINE)
        if asked and cell.cell_type == "code":
            said = [output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            if found := REVEALED.match("".join(said)):
                yield asked[1], found[1]


def polls(notebook):
    """The questions that the lab asks before it measures, as it words them, with its answers."""
    asked, known = "", dict(answers(notebook))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = COMMENT.sub("", cell.source)
            quoted = re.findall(r"^> ?(.*)$", text, re.MULTILINE)
            paragraphs = [part for part in text.split("\n\n") if "?" in part and part[0] != "#"]
            asked = " ".join(quoted) if quoted else " ".join(paragraphs[-1:]).replace("\n", " ")
        elif asked and (name := re.match(r'predict\(\s*"(.+?)"', cell.source)):
            found = known.get(name[1])
            yield asked.strip() + f" *{found}*" * bool(found)
            asked = ""


def _text(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def disputed(notebook):
    """The statements of its errata, in bold there: (heading, statement)."""
    errata = _text(notebook).partition("\n## Errata")[2].partition("\n## Summary")[0]
    for part in re.split(r"^### ", errata, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        for statement in re.findall(r"^\*\*.+?\*\*", COMMENT.sub("", body), re.MULTILINE):
            yield heading, statement


def misconceptions(lab):
    """For each exercise of a lab a list to unfold: wrong answers, and what the check says."""
    known = wrong_answers.every()
    for card in exercises.cards():
        if card.lab == lab:
            said = [f"{each.name}: “{each.hint}”" for each in known[card.exercise]]
            said = re.sub(r"([*_`$<\[\]\\])", r"\\\1", bullets(said))
            title = f"{card.number} {card.title} · {len(known[card.exercise])} wrong answers"
            yield f":::{{dropdown}} {title}\n{said}:::\n"


def transfer(lab):
    """New questions that the lab answers, each with its answer and the section that has it."""
    for row in csv.DictReader(TRANSFER.read_text(encoding="utf-8").splitlines()):
        if row["lab"] == lab:
            yield f"{row['question']} *{row['answer']}* ({row['section']})"


def page(lab, notebook):
    """What a teacher needs to know about one lab."""
    title, _, rest = notebook.cells[0].source.partition("\n")
    question = next(line for line in rest.splitlines() if line.startswith("**"))
    fits, home = plan(blocks(notebook))
    yield f"## {title.removeprefix('# ')}\n\n{question}\n"
    yield "| minutes | in class |\n|--:|---|"
    yield from (f"| {minutes:.0f} | {part} |" for part, minutes in fits)
    if home:
        minutes = sum(minutes for _, minutes in home)
        yield f"\n**At home** ({minutes:.0f} min): {' · '.join(part for part, _ in home)}\n"
    yield f"\n**Poll before you run** `reveal`\n\n{bullets(polls(notebook))}"
    yield "\n**What goes wrong in the exercises**\n\n" + "\n".join(misconceptions(lab))
    if found := list(transfer(lab)):
        yield f"\n**Ask at the end**, new questions that the lab answers\n\n{bullets(found)}"
    if found := list(disputed(notebook)):
        (errata,) = re.findall(r"^## (Errata.*)$", _text(notebook), re.MULTILINE)
        place = f"../notebooks/{lab}.html#{nodes.make_id(errata)}"
        said = f'The <a href="{place}">lab\'s errata</a> have the answers.'
        yield f"\n**Discuss: is this right?** {said}\n"
        yield bullets(f"{statement} — *{heading.lower()}*" for heading, statement in found) + "\n"


def bullets(lines):
    return "\n".join(f"- {line}" for line in lines) + "\n"


def main():
    for path, _ in notebooks.twins():
        print("\n".join(page(path.stem, nbformat.read(path, as_version=4))))


if __name__ == "__main__":
    main()
