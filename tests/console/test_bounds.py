"""Tests of the console's memory. They take long, so few runs have them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.console.test_command import get, running
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.console.charts import POINTS, STEP_S, Charts

LARGE = 15_000_000


def memory_mib(pid: int) -> int:
    """Return the largest memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


@pytest.mark.drawn
def test_console_is_small_whatever_it_is_asked_for(own_broker: BrokerProcess, tmp_path: Path) -> None:
    # C35.11
    with blocking.connect(own_broker.url) as connection:
        connection.send_many("/queue/large", [bytes(LARGE)] * 4)
        connection.send_many("/queue/DLQ.many", [f"poison {number}" for number in range(100_000)])
    options = ["--broker", own_broker.url, "--listen", "http://127.0.0.1:0"]
    with running(tmp_path, *options, is_alone=True) as (process, address):
        cookie = get(address).cookie

        async def ask(path: str) -> int:
            return (await asyncio.to_thread(get, address, path, {"cookie": cookie})).status

        async def ask_all(*paths: str) -> None:
            assert set(await asyncio.gather(*(ask(path) for path in paths * 2))) == {200}

        asyncio.run(ask_all("/", "/dead-letters?queue=DLQ.many&read=1000000", "/queue?name=DLQ.many", "/queues"))
        assert memory_mib(process.pid) < 60
        whole = [f"queue=large&priority=4&sequence={number}" for number in range(1, 5)]
        pages = [f"/{page}?{each}" for page in ("body", "message") for each in whole]
        asyncio.run(ask_all("/queue?name=large", *pages))
        # Two large messages at a time, each in some copies.
        assert memory_mib(process.pid) < 60 + 2 * 60


def test_charts_forget_the_series_that_was_written_longest_ago() -> None:
    # C35.11
    charts = Charts(bytes_max=100_000)
    for number in range(100):
        charts.set(("all", f"queue {number}", "waiting"), number, number * 60.0)
        assert charts.bytes <= 100_000
    at, series = charts.read([("all", f"queue {number}", "waiting") for number in (0, 99)], 99 * 60.0)
    assert len(at) == POINTS and series[0][-1] is None and series[1][-1] == 99


def test_charts_of_many_users_keep_series_that_are_written_and_figures_of_all_queues() -> None:
    # C35.11
    charts, kept = Charts(bytes_max=100_000), set[tuple[str, int]]()
    for step in range(3):
        for scope in (" anna", " otto", " rita"):
            for number in range(30):
                if charts.count((scope, f"queue {number}", "accepted"), 10 * step, 5.0 * step) is not None:
                    kept.add((scope, number))
            rate = charts.count((scope, "", "accepted"), 10 * step, 5.0 * step)
            assert rate == (2 if step else None)
        assert charts.bytes <= 100_000
    assert len(kept) > 20


def test_chart_has_gaps_where_nothing_was_noted_and_forgets_what_is_older_than_an_hour() -> None:
    charts, name = Charts(), ("a", "b", "c")
    for step in (0, 1, 5, 6, POINTS + 2, 3 * POINTS):
        charts.set(name, step, step * STEP_S + 1.0)
        _, (values,) = charts.read([name], step * STEP_S + 2.0)
        known = [each for each in (0, 1, 5, 6, POINTS + 2, 3 * POINTS) if step - POINTS < each <= step]
        assert [value for value in values if value is not None] == known
    assert charts.ago(name, 2 * POINTS * STEP_S, 3 * POINTS * STEP_S) is None


def test_rate_is_unknown_after_a_restart_of_the_broker_or_a_gap() -> None:
    charts, name = Charts(), ("a", "b", "c")
    assert charts.count(name, 100, 0.0) is None
    assert charts.count(name, 150, 5.0) == 10
    assert charts.count(name, 20, 10.0) is None
    assert charts.count(name, 30, 15.0) == 2
    assert charts.count(name, 1000, 300.0) is None
