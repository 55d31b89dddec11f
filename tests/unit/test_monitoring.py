"""Tests that alert rules, dashboard and docs/monitoring.md name metrics that exist, and that each is described."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.stages.executions import ending, execution
from tests.unit.test_broker_health import FakeBroker, figures, report
from truenext.broker.health import BrokerFacts, BrokerState, assess_health
from truenext.broker.metrics import health_metrics
from truenext.cli.health_server import _format
from truenext.stage.interceptors.metrics import Metrics
from truenext.stage.outbox.counters import ExactlyOnceCounters, collect
from truenext.stage.sql.outbox_table import UnsentCounts

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "monitoring" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "monitoring" / "dashboard.json"
PAGE = ROOT / "docs" / "monitoring.md"
OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""


@cache
def families() -> dict[str, Metric]:
    """Return all metrics of a broker and of a service, by name, as the official parser reads them."""
    metrics = health_metrics(assess_health(BrokerFacts(state=BrokerState.RUNNING)))
    metrics += asyncio.run(FakeBroker(figures([report("a")], matching=2)).metrics("a").collect())
    stages = Metrics()
    stages.ended(execution(), ending("rejected", given_up_for="rejected"))
    metrics += stages.collect()
    metrics += collect(ExactlyOnceCounters(), UnsentCounts(1, 2, 3.0))
    found = list(text_string_to_metric_families(_format(metrics).decode()))
    assert len({each.name for each in found}) == len(found)
    return {each.name + ("_total" if each.type == "counter" else ""): each for each in found}


def series_names() -> set[str]:
    """Return the names of all series, such as those of the buckets of histograms."""
    return {sample.name for family in families().values() for sample in family.samples} | OF_PROMETHEUS


def label_values(name: str) -> dict[str, set[str]]:
    """Return the values of each label of a series."""
    found: dict[str, set[str]] = {}
    for sample in (each for family in families().values() for each in family.samples if each.name == name):
        for label, value in sample.labels.items():
            found.setdefault(label, set()).add(value)
    return found


@cache
def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@cache
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts().values())
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.*), \w+\)", r"\1", variable["query"]["query"])


SERIES = re.compile(r"\b((?:truenext|process)_\w+|up)\b(?:\{([^}]*)\})?")
PROMETHEUS_LABELS = {"job", "instance"}


def test_series_and_labels_of_alerts_and_dashboard_exist() -> None:
    names = series_names()
    for expression in expressions():
        found = SERIES.findall(expression)
        assert found, expression
        for name, matchers in found:
            assert name in names, f"{name} in {expression}"
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
                if label in PROMETHEUS_LABELS:
                    continue
                values = label_values(name)
                assert label in values, f"{name} has no label {label}"
                assert operator != "=" or value in values[label], f'{name} has no {label}="{value}"'


@pytest.mark.parametrize("labels", [r"by \(([^)]*)\)", r"ignoring \(([^)]*)\)", r"on \(([^)]*)\)"])
def test_labels_by_which_expressions_sum_exist(labels: str) -> None:
    for expression in expressions():
        names = [name for name, _ in SERIES.findall(expression)]
        known = {label for name in names for label in label_values(name)} | PROMETHEUS_LABELS
        for found in re.findall(labels, expression):
            assert set(re.split(r",\s*", found)) <= known, expression


def test_each_metric_is_described_on_the_page_and_no_other_one() -> None:
    described = set(re.findall(r"`((?:truenext|process)_[a-z_]+)`", PAGE.read_text())) - {"process_"}
    assert described == families().keys()


def test_metrics_that_other_pages_name_exist() -> None:
    names = series_names() | families().keys()
    for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"), ROOT / "CHANGELOG.md"):
        found = re.findall(r"\btruenext_(?:broker|queue|stage|outbox|inbox)_[a-z_]+", page.read_text())
        assert not set(found) - names, page


def test_each_alert_has_a_paragraph_to_which_it_leads() -> None:
    headings = re.findall(r"^### (Truenext\w+)$", PAGE.read_text(), re.MULTILINE)
    assert headings == list(alerts()), "in the order of the file"
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (Debian's package prometheus)")
def test_alerts_are_raised_as_their_tests_say() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(ROOT / "tests" / "unit" / "alerts.test.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_that_raises_it_and_one_that_does_not() -> None:
    tests = yaml.safe_load((ROOT / "tests" / "unit" / "alerts.test.yaml").read_text())["tests"]
    assert [each["name"] for each in tests] == [
        f"{name} {end}" for name in alerts() for end in ("is raised", "is not raised")
    ]
