"""The book's Sphinx extension: tables from the course's data, MathJax from its own site."""

import csv
import fnmatch
import importlib.resources
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from labutils import config, notation

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLAIMS, PAPERS = config.DATA / "claims.csv", config.DATA / "paper_results.csv"
TABLE = ROOT / "benchmarks" / "table.csv"
README, TOC = ROOT / "README.md", ROOT / "book" / "_toc.yml"
LAB = re.compile(
    r"^\| \[(\w+) · (.+?)\]\(notebooks/(\w+)\.ipynb\) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE
)
ROUTE = re.compile(r"([A-Z][a-z ]+): (labs [\w, ]+|all) \(about (\d+) hours\)")
QUESTIONS, LABS = ROOT / "book" / "questions.csv", ROOT / "notebooks" / "text"
NUMBERS = ("ours", "theirs", "ratio", "aim")
VERDICTS = ("wrong", "true under a condition")
MATHJAX = [
    "tex-chtml.js",
    "input/tex/extensions",
    "output/chtml/fonts/woff-v2",
]  # 2 of the package's 24 MB


def repository(environ=os.environ, project=ROOT / "pyproject.toml"):
    """The public address of the repository: that of the action that runs, or what the project says.

    None while nobody has said it. Raises: ValueError for a site that the theme cannot link to.
    """
    urls = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("urls", {})
    address = urls.get("Source")
    if "GITHUB_REPOSITORY" in environ:
        address = f"{environ['GITHUB_SERVER_URL']}/{environ['GITHUB_REPOSITORY']}"
    if address and not re.fullmatch(r"https://git(hub|lab)\.com/[\w.-]+/[\w.-]+", address):
        raise ValueError(
            f"{address} is no repository at github.com or gitlab.com: see project.urls"
        )
    return address


def link_to_repository(app, config):
    """Buttons on each page: its source, and for a lab Binder, once the address is known."""
    if address := repository():
        binder = {"binderhub_url": "https://mybinder.org", "notebook_interface": "jupyterlab"}
        config.html_theme_options |= {
            "repository_url": address,
            "repository_branch": "main",
            "use_source_button": True,
            "launch_buttons": binder,
        }


class Written(SphinxDirective):
    """A directive that stands for the Markdown that `markdown` writes from what is in `source`."""

    def run(self):
        node = nodes.Element()
        node.document = self.state.document
        self.env.note_dependency(str(self.source))  # the page is stale when its data changes
        self.state.nested_parse(
            StringList(self.markdown().splitlines()), self.content_offset, node, match_titles=True
        )
        return node.children


class Notation(Written):
    """```{notation} shapes```: one group of the notation table."""

    source = notation.__file__
    required_arguments = 1

    def markdown(self):
        return notation.markdown(self.arguments[0])


class Formulas(Written):
    """```{formulas}```: what the docstrings of the topics state as formulas."""

    source = ROOT / "book" / "formulas.py"

    def markdown(self):
        import formulas  # every topic, and torch

        return formulas.markdown()


class Api(Written):
    """```{api} zero```: what the docstrings of modules say; without one, the list of all."""

    source = ROOT / "book" / "api.py"
    optional_arguments = 30

    def markdown(self):
        import api  # every module

        for module in self.arguments:
            self.env.note_dependency(inspect.getfile(api.loaded(module)))
        return "\n".join(map(api.markdown, self.arguments)) or api.overview()


class Printed(Written):
    """A directive that stands for what a tool prints."""

    def markdown(self):
        command = [sys.executable, ROOT / "tools" / self.tool]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Compositions(Printed):
    """```{compositions}```: which techniques compose, and why some do not."""

    source, tool = config.DATA / "compositions.csv", "compositions.py"


class Lessons(Printed):
    """```{lessons}```: a class of 90 minutes for each lab."""

    source, tool = config.DATA / "exercises.csv", "teaching.py"


class Questions(Written):
    """```{questions}```: what users ask in trackers, by lab, and the section that answers."""

    source = QUESTIONS

    def markdown(self):
        page, lab = [], None
        for row in csv.DictReader(QUESTIONS.read_text(encoding="utf-8").splitlines()):
            if row["lab"] != lab:
                lab = row["lab"]
                title = headings(LABS / f"{lab}.py")[0]
                page.append(f"\n## {{doc}}`{title} <../notebooks/{lab}>`\n")
            section = heading(LABS / f"{lab}.py", row["section"])
            place = f"../notebooks/{lab}.html#{nodes.make_id(section)}"
            issue = "https://github.com/{}/issues/{}".format(*row["source"].split("#"))
            page.append(
                f'- {row["question"]} → <a href="{place}">{section}</a>'
                f" ([{row['source']}]({issue}))"
            )
        return "\n".join(page)


def headings(lab):
    """The headings of a lab's text, its title first."""
    return re.findall(r"^# #+ (.+)$", lab.read_text(encoding="utf-8"), re.MULTILINE)


def heading(lab, section):
    """The one heading that is `section`, an exercise's minutes and a "Further: " aside."""
    marks = r"^Further: | \(\d+ min, [●○]+\)$"
    (found,) = (
        heading
        for heading in headings(lab)
        if re.sub(marks, "", heading).casefold() == section.casefold()
    )
    return found


class Errata(Written):
    """```{errata}```: what recomputation refutes or qualifies, by verdict and topic."""

    source = CLAIMS

    def markdown(self):
        self.env.note_dependency(str(PAPERS))
        tables = [path.read_text(encoding="utf-8").splitlines() for path in (CLAIMS, PAPERS)]
        rows = [*csv.DictReader(tables[0]), *csv.DictReader(tables[1])]
        pages = []
        for verdict in VERDICTS:
            pages.append(f"\n## {verdict.capitalize()}\n")
            topics = {}
            for row in rows:
                if row["verdict"] == verdict:
                    topics.setdefault(row["topic"], []).append(erratum(row))
            pages += [
                f"\n### {topic[:1].upper()}{topic[1:]}\n\n" + "\n".join(found)
                for topic, found in topics.items()
            ]
        return "\n".join(pages)


class Benchmarks(Written):
    """```{benchmarks}```: the table of `make bench`, and where it was measured."""

    source = TABLE

    def markdown(self):
        if not TABLE.exists():
            return "*No run is recorded yet.*"
        first, *lines = TABLE.read_text(encoding="utf-8").splitlines()
        table = ["| | beside | ours | theirs | ratio | aim | |", "|---|---|--:|--:|--:|--:|---|"]
        for row in csv.DictReader(lines):
            numbers = [f"{float(row[key]):.2f}" if row[key] else "" for key in NUMBERS]
            cells = plain(f"{row['benchmark']}: {row['row']}"), plain(row["peer"]), *numbers
            table.append(f"| {' | '.join(cells)} | {plain(row['note'])} |")
        return "\n".join([plain(first.partition(": ")[2]), "", *table])


class Panel(SphinxDirective):
    """```{panel} plans```: a panel of `panels.py`, as a page shows it that has no Python."""

    required_arguments = 1

    def run(self):
        import panels  # matplotlib, numpy and torch, which other pages do not need

        made = panels.PANELS[self.arguments[0]]()
        page = f'<div class="cell_output"><div class="text_html">{made}</div></div>'
        return [nodes.raw("", page, format="html")]


class Map(SphinxDirective):
    """```{map}```: the labs by part, what the README says of them, and the routes through them."""

    def run(self):
        for source in (README, TOC):
            self.env.note_dependency(str(source))
        readme = README.read_text(encoding="utf-8")
        routes = ROUTE.findall(readme)
        labs = {name: said for *said, name in map(_of_the_readme, LAB.findall(readme))}
        choices = [
            f'<label><input type="radio" name="route" value="{number}"'
            f'{" checked" * (on == "all")}> {length}, about {hours} hours</label>'
            for number, (length, on, hours) in enumerate(routes)
        ]
        page = f"<fieldset><legend>How much time do you have?</legend>{''.join(choices)}</fieldset>"
        for part in yaml.safe_load(TOC.read_text(encoding="utf-8"))["parts"]:
            globs = [chapter["glob"] for chapter in part["chapters"] if "glob" in chapter]
            held = [name for one in globs for name in labs if fnmatch.fnmatch(name, one)]
            if held:
                items = "".join(_item(name, *labs[name], routes) for name in held)
                page += f"<h3>{part['caption']}</h3><ol>{items}</ol>"
        return [nodes.raw("", f'<div class="map">{page}</div>', format="html")]


def _of_the_readme(row):
    """Number, title, minutes, what comes before, what you will do, and the page of a lab."""
    number, title, name, *rest = row
    return number, title, *rest, f"notebooks/{name}"


def _item(name, number, title, minutes, before, will, routes):
    on = (str(i) for i, (_, labs, _) in enumerate(routes) if labs == "all" or number in labs)
    return (
        f'<li class="{" ".join(f"on-{i}" for i in on)}"><a href="../{name}.html">{number} · {title}'
        f"</a><p>{minutes} min, after {before}. You will {will}.</p></li>"
    )


WHOLE = re.compile(
    r" \[(?:full text read[^\]]*|read)\]"
)  # worth saying is only that a source was read in part, or not seen


# Line numbers in texts that the reader doesn't have, and what the tests of the data ask for.
HIDDEN = re.compile(
    r"^(no number of ours: [^;]*; )?L[\d, –L-]+\.\s*"
    r"|Arithmetic on stated numbers\.|^no number of ours: "
)


def erratum(row):
    """One statement as a definition: what is said, and what comes out."""
    if "claim" in row:
        text, claim, source = row["source_text"].split()[0], row["claim"], row["source"]
        said, found = (
            f"{row[key]} {row['unit'] * row[key].replace('.', '').isdigit()}"
            for key in ("stated_value", "recomputed")
        )
    else:  # of a paper, of documentation, of published code: the source is the text itself
        text, claim, source = WHOLE.sub("", row["source"]), row["quantity"], ""
        said, found = "", ""
    words = re.sub(r"[$*]", "", row["quote"]).rstrip(".")
    # A formula, or a row of a table, is said and not quoted.
    quoted = words and not re.search(r"[\\|]", words)
    sentences = [
        quoted and f"In its words: “{plain(words)}”",
        said.strip() and f"Said: {plain(said)}",
        found.strip() and f"Recomputed: **{plain(found)}**",
        plain(HIDDEN.sub("", row["note"])),
        source.strip("—") and f"Checked against {plain(WHOLE.sub('', source))}",
    ]
    body = " ".join(f"{s[0].upper()}{s[1:]}".rstrip(" .") + "." for s in sentences if s)
    return f"{plain(text)}: {plain(claim)}\n: {body}\n"


def plain(text):
    """`text` with the characters that Markdown would read as markup escaped."""
    return re.sub(r"([\\`*_{}\[\]<>$#|~])", r"\\\1", " ".join(text.split()))


def name_what_is_used(app, docname, source):
    """A lab ends with links to what it uses of the library."""
    folder, _, lab = docname.partition("/")
    if folder == "notebooks":
        import api

        notebook = json.loads(source[0])
        cell = {"cell_type": "markdown", "id": "api", "metadata": {}, "source": api.of_lab(lab)}
        notebook["cells"].append(cell)
        source[0] = json.dumps(notebook)


def name_items(app, pagename, templatename, context, doctree):
    """What is a list says so, what is none does not.

    A bibliography's entries are the items of a list; their own role is deprecated, and in none.
    The lines of a signature are no definitions, of which each would need a term.
    """

    def lines(found):
        divided = re.sub(r"<(/?)dd>", r"<\1div>", found[1])
        return f'<div class="sig-lines">{divided}</div>'

    if body := context.get("body"):
        body = body.replace('role="doc-biblioentry"', 'role="listitem"')
        parameters = r'<dl>\s*((?:<dd><em class="sig-param">.*?</dd>\s*)+)</dl>'
        context["body"] = re.sub(parameters, lines, body, flags=re.DOTALL)


def copy_mathjax(app, exception):
    if exception is None and app.builder.format == "html":
        source = importlib.resources.files("sphinx-mathjax-offline") / "static" / "mathjax"
        target = pathlib.Path(app.outdir, "_static", "mathjax")
        for part in MATHJAX:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            if (source / part).is_dir():
                shutil.copytree(source / part, target / part, dirs_exist_ok=True)
            else:
                shutil.copy(source / part, target / part)


def setup(app):
    app.add_directive("notation", Notation)
    app.add_directive("formulas", Formulas)
    app.add_directive("api", Api)
    app.add_directive("errata", Errata)
    app.add_directive("compositions", Compositions)
    app.add_directive("questions", Questions)
    app.add_directive("benchmarks", Benchmarks)
    app.add_directive("lessons", Lessons)
    app.add_directive("panel", Panel)
    app.add_directive("map", Map)
    app.connect("config-inited", link_to_repository)
    app.connect("html-page-context", name_items)
    app.connect("source-read", name_what_is_used)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True}
