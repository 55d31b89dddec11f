"""Benchmark of exactly-once processing: beside best-effort 1PC, part by part, and beside other libraries."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from bench.brokers import Truenext
from bench.flows import parts, sql
from bench.flows.pairs import Side, check_nothing_waits, compare, hired, start_flows
from bench.flows.work import Order, Sizes
from bench.progress import print_line
from bench.workers import Job


def side(name: str, broker: Truenext, database: str, work: Job = sql.serve_exactly_once) -> Side:
    """Return a side whose flows wait in the queue of their first stage, and insert three rows each."""

    def prepare(order: Order) -> None:
        sql.prepare(database)
        start_flows(order)

    def check(order: Order) -> None:
        sql.check(database, order.flows)
        check_nothing_waits(order)

    return Side(name, work, prepare, check, broker.port, broker, database)


def compare_best_effort(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    sides = (
        side("exactly once", broker, database),
        side("best-effort 1PC", broker, database, sql.serve),
    )
    for workers in sizes.workers:
        print_line(f"  workers of a stage: {workers}")
        # The cost is at most a factor of 1.5.
        compare(f"once.{workers}", sides, sizes.flows, sizes.runs, target=0.67, concurrency=workers)


def compare_parts(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    sides = (
        side("all of it", broker, database),
        side("it without the numbers", broker, database, parts.serve_without_numbers),
        side("the inbox alone", broker, database, parts.serve_inbox_alone),
        side("best-effort 1PC", broker, database, sql.serve),
    )
    for workers in sizes.workers:
        print_line(f"  workers of a stage: {workers}")
        compare(f"parts.{workers}", sides, sizes.flows, sizes.runs, concurrency=workers)


def compare_dbos(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    from bench.flows import dbos_transact

    print_line(f"  DBOS Transact {version('dbos')}: {dbos_transact.CHOSEN}")
    peer = _peer_side("DBOS", database, dbos_transact.enqueue_workflows, dbos_transact.work, dbos_transact.check)
    compare("dbos", (side("truenext", broker, database), peer), sizes.flows, sizes.runs, target=2)


def compare_procrastinate(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    from bench.flows import procrastinate_jobs

    print_line(f"  procrastinate {version('procrastinate')}: {procrastinate_jobs.CHOSEN}")
    peer = _peer_side(
        "procrastinate", database, procrastinate_jobs.enqueue_jobs, procrastinate_jobs.work, procrastinate_jobs.check
    )
    compare("procrastinate", (side("truenext", broker, database), peer), sizes.flows, sizes.runs, target=1.5)


def _peer_side(name: str, database: str, enqueue: Job, work: Job, check: Callable[[Order], None]) -> Side:
    def prepare(order: Order) -> None:
        sql.prepare(database)
        hired(enqueue, order)

    def check_all(order: Order) -> None:
        sql.check(database, order.flows)
        check(order)

    return Side(name, work, prepare, check_all, database=database)
