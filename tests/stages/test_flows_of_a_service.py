"""Tests that the flows of a running service are in its events: waits, attempts, errors, handled failures and dead
letters, with neither the broker nor Spark."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from truenext.flows.drawing import waterfall_lines
from truenext.flows.reader import FlowReader
from truenext.history.stage_files import stage_files
from truenext.stage import Failure, Flow, FlowFailed, Reject, Service
from truenext.testing import broker

Line = tuple[str, int, str]


class Busy(Exception):
    pass


def shop(url: str, folder: Path) -> Service:
    app = Service("shop", broker=url, events=folder, retry={Busy: "100ms"})
    place = app.endpoint("order.place", str, str)
    reserve = app.endpoint("stock.reserve", str, str)

    @reserve.stage(attempts=2)
    async def only(item: str) -> str:
        if item == "poison":
            raise Reject("no such item")
        raise Busy

    @place.stage
    async def check(item: str, flow: Flow) -> None:
        flow.request(reserve, item)

    @place.stage
    async def finish(item: str) -> str:
        return item

    @place.on_failure
    async def replace(failure: Failure) -> str:
        if failure.last_cause.startswith("Reject"):
            raise Reject("cannot be replaced")
        return "another"

    return app


async def serve(folder: Path) -> None:
    async with broker() as here:
        app = shop(here.url, folder)
        async with app.running():
            assert await app.ask(app.endpoints["order.place"], "tea", trace="order 1") == "another"
            with pytest.raises(FlowFailed):
                await app.ask(app.endpoints["order.place"], "poison", trace="order 2")


def lines_of(flows: FlowReader, trace: str) -> list[Line]:
    (flow,) = flows.find(trace)
    return [(each.stage, each.depth, each.outcome) for each in waterfall_lines(flow)]


def test_events_of_a_service_show_retries_handled_failures_dead_letters_and_waits(tmp_path: Path) -> None:
    asyncio.run(serve(tmp_path))
    flows = FlowReader([tmp_path])
    while flows.read():
        pass
    assert lines_of(flows, "order 1") == [
        ("order.place", 0, "completed"),
        ("stock.reserve", 1, "failed: Busy, then rejected: Busy; handled"),
        ("order.place.stage.on_failure", 1, "completed"),
    ]
    assert lines_of(flows, "order 2") == [
        ("order.place", 0, "completed"),
        ("stock.reserve", 1, "rejected: Reject; handled"),
        ("order.place.stage.on_failure", 1, "rejected: Reject; a dead letter"),
    ]
    assert [each.trace for each in flows.given_up(9)] == ["order 2"]
    assert not flows.unended(9) and not flows.problems
    (flow,) = flows.find("order 1")
    assert all(each.waited_ms is not None and each.waited_ms < 60_000 for each in waterfall_lines(flow))
    # It waits for its second attempt.
    assert [bar.kind for bar in waterfall_lines(flow)[1].bars][-3:] == ["failed", "waited", "failed"]
    needs_no_spark(tmp_path)


def needs_no_spark(folder: Path) -> None:
    """Run the command where Spark, pandas, and what makes the console's pages, cannot be imported."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pyspark', 'pandas', 'numpy', 'pyarrow', 'starlette')))\n"
        "from truenext.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "stages", "flow", "order 2", "--events", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rejected: Reject; a dead letter" in done.stdout
    assert stage_files(folder)
