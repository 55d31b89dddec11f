"""Tests of the queries of `make demo`: a killed query does its work once, and a missing or doubled order is found."""

import io
import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from examples.guarded_broker import GuardedBroker
from examples.program import Program
from examples.queries import demo, jobs
from examples.queries.demo import (
    USERS,
    PrintLine,
    is_each_once,
    receive_bills,
    run_killed,
    send_orders,
    show,
    wait_for,
    write_taxes,
)
from examples.queries.jobs import broker_options, queue_of
from tests.drawing import one_of


@pytest.mark.parametrize(
    ("orders", "is_right"),
    [
        (["batch-1", "batch-0"], True),
        (["batch-0"], False),
        (["batch-0", "batch-1", "batch-1"], False),
        (["batch-0", "batch-0"], False),
        (["batch-0", "batch-2"], False),
    ],
)
def test_orders_are_right_only_if_each_is_there_once(orders: list[str], is_right: bool) -> None:
    assert is_each_once(orders, 2) == is_right


@pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="starts Spark three times: make spark")
@pytest.mark.timeout(600)
def test_a_query_whose_driver_and_broker_are_killed_bills_each_order_once(tmp_path: Path) -> None:
    broker = GuardedBroker(tmp_path, USERS)
    printed: list[str] = []
    try:
        send_orders(broker, 1000)
        run_killed("billing", broker, tmp_path / "billing", printed.append)
        assert is_each_once(receive_bills(broker), 1000)
    finally:
        broker.kill()
    assert [line.partition(" after")[0] for line in printed] == [
        "  kill -9 of the driver",
        "  kill -9 of the broker",
        "  done",
    ]
    driver_killed, broker_killed, done = (int(line.partition("batch ")[2].partition(",")[0]) for line in printed)
    assert 1 <= driver_killed < broker_killed < done


@pytest.mark.skipif(not os.environ.get("TRUENEXT_KILLS"), reason="starts a cluster of Spark: make spark")
@pytest.mark.timeout(300)
def test_a_query_on_a_cluster_logs_in_over_tls_in_driver_and_executors(tmp_path: Path) -> None:
    broker = GuardedBroker(tmp_path, USERS)
    folder = tmp_path / "billing"
    try:
        send_orders(broker, 100)
        write_taxes(folder)
        command = ("examples.queries.jobs", "billing", str(folder), "--master", "local-cluster[2,1,1024]")
        driver = Program(folder / "log", *command, environment=broker.environment("billing"))
        try:
            wait_for(lambda: driver.status is not None, driver)
            assert driver.status == 0, driver.log
        finally:
            driver.kill()
        assert is_each_once(receive_bills(broker), 100)
    finally:
        broker.kill()


@pytest.mark.alternates("stories")
@pytest.mark.timeout(300)
@one_of("faulty", ["", *jobs.JOBS], ["none", *jobs.JOBS])
def test_a_run_is_right_unless_a_query_lacks_an_order(
    faulty: str, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(job: str, broker: GuardedBroker, folder: Path, print_line: PrintLine) -> None:
        if job == faulty:
            with broker.connect(job) as connection, connection.consumer(f"/queue/{queue_of(job)}") as orders:
                orders.receive()
        write_taxes(folder)
        jobs.main(job, str(folder), broker_options(broker.environment(job), job), "local[2]")

    monkeypatch.setattr(demo, "run_killed", run)
    output = io.StringIO()
    assert show(Console(file=output, width=120), tmp_path, 30) == (not faulty)
    assert f"sent 30, rows {29 if faulty == 'archive' else 30}, distinct" in output.getvalue()
    assert f"in 30, out {29 if faulty == 'billing' else 30}, distinct" in output.getvalue()
    assert (tmp_path / "report.html").exists()
