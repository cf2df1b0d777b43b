"""Panels of the book's pages: they say what the library says, also where nothing fits."""

import base64
import html
import importlib.util
import itertools
import json
import re
import zlib
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


def recorded(page):
    """Controls and views that a page stores: what its script picks from."""
    stored = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.S)[1])
    views = json.loads(zlib.decompress(base64.b64decode(stored["views"])))
    labels = [control["labels"] for control in stored["controls"]]
    places = itertools.product(*labels)
    return {place: views[i] for place, i in zip(places, stored["index"], strict=True)}


def test_what_the_page_says_of_a_dragged_plan_is_the_planners(monkeypatch):
    """Of a page of one model on two clusters, every state of the sliders."""
    few = {"8 H100": ("H100", 1), "64 B200": ("B200", 8)}
    monkeypatch.setattr(panels, "CLUSTERS", few)
    monkeypatch.setattr(panels, "TRAINED", ("llama-3.1-8b",))
    monkeypatch.setattr(
        panels.yours, "__defaults__", ("llama-3.1-8b", "8 H100", 8, 1, 1, 1, 1, "nothing")
    )
    kinds = set()
    for place, view in recorded(panels.plan()).items():
        _, cluster, *axes, again = place
        tp, cp, pp, ep, zero = map(int, axes)
        found, first = panels.searched("llama-3.1-8b", cluster)
        device, nodes = few[cluster]
        assert found.job.cluster.device.name == device and found.job.cluster.nodes == nodes
        dp = max(1, found.job.cluster.gpus // (tp * cp * pp))
        m, level = 512 // dp, zero * (dp * cp > 1)
        mine = planner.Plan(
            tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, micro_batches=m, zero=level,
            recompute=2 * (again == "everything"),
        )  # fmt: skip
        why = planner.why(found, mine)
        assert html.escape(why) in view and view.endswith(first), place
        kinds.add(why.split()[0])
        if not why.startswith("illegal"):
            one = planner.estimate(found.job, mine)
            assert f"<b>{one.seconds:.2f} s</b> a step" in view, place
            assert f"<b>{one.peak / 1e9:.0f} of" in view, place
    assert {"illegal:", "does"} < kinds
