"""Panels of the book's pages: they say what the library says, also where nothing fits."""

import importlib.util
from pathlib import Path

from labutils import planner
from labutils.config import Hardware, ModelConfig

PATH = Path(__file__).resolve().parents[1] / "book" / "panels.py"
SPEC = importlib.util.spec_from_file_location("panels", PATH)
panels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(panels)


def found(model, nodes):
    cluster = planner.Cluster(device=Hardware.named("H100"), nodes=nodes)
    job = planner.Job(model=ModelConfig.named(model), cluster=cluster, batch_tokens=2**20)
    return planner.search(job)


def test_rows_of_a_search_are_its_first_plans_with_their_reasons():
    search = found("llama-2-7b", 1)
    page = panels.table(search, top=3)
    assert page.count("<tr>") == 4 and f"{len(search):,} legal plans on 8 GPUs" in page
    for one in search.best(3):
        assert f"<td>{one.seconds:.2f}</td><td>{one.peak / 1e9:.0f}</td>" in page
        assert (planner.why(search, one.plan) in page) == (one.plan != search.fastest.plan)


def test_where_no_plan_fits_the_page_says_what_comes_closest():
    search = found("gpt3-175b", 1)
    assert panels.table(search).startswith("<p>") and "<table" not in panels.table(search)
    assert "GB" in panels.table(search)
