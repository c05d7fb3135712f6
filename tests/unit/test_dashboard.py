"""The dashboard shows metrics that there are, by labels that they have; and every metric is on it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from source_tree import ROOT

from polymux.metrics import catalog

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "polymux.json").read_text(encoding="utf-8"))
PROCESS = "process_resident_memory_bytes"  # of prometheus_client's own
SPECS = {series: spec for spec in catalog.ALL for series in spec.series}
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:polymux:|process_)\w+", expression))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_what_there_is(expression: str) -> None:
    used = names(expression)
    assert used and used <= set(SPECS) | {PROCESS}
    labels = {"le"} if "_bucket" in expression else set()
    for name in used - {PROCESS}:
        known = labels | set(SPECS[name].labels)
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        filtered = set(re.findall(r"(\w+)=~", expression))
        assert grouped | filtered <= known


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_shown_as_rates(expression: str) -> None:
    for name in names(expression) - {PROCESS}:
        ratio_of_totals = " / " in expression and SPECS[name] in (catalog.CACHE_HITS, catalog.CACHE_QUERIES)
        if SPECS[name].kind != "gauge" and not ratio_of_totals:
            assert re.search(rf"(rate|increase)\({name}\b", expression)


def test_every_metric_is_on_it() -> None:
    shown = set().union(*map(names, EXPRESSIONS))
    assert not [spec.name for spec in catalog.ALL if not shown & set(spec.series)]


def test_the_model_is_chosen_among_those_that_report() -> None:
    (variable,) = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in SPECS[name].labels
