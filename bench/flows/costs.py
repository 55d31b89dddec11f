"""Cost of exactly-once processing in the database for a message (statements, rows, and bytes), and of an idle
service.

Statements are those of SQLAlchemy's engine and its checks whether a connection is alive, without BEGIN and COMMIT,
which count as transactions. Rows are those that INSERT, UPDATE and DELETE have changed. Bytes are those of
PostgreSQL's log (WAL), with all work beside the messages; in SQLite, the growth of the used part of the file.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from bench.brokers import Truenext
from bench.flows import sql
from bench.flows.once import side
from bench.flows.pairs import hired
from bench.flows.shop import service
from bench.flows.work import STAGES, Order, Sizes, run
from bench.progress import print_line
from bench.workers import Gate

IDLE_S = 10.0
WARM_UP_S = 2.0
"""Seconds in which a started service does work that it does only once."""


class Costs(NamedTuple):
    statements: Counter[str]
    """Number of statements by their first words."""
    rows: int
    transactions: int


def compare_costs(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    for number, (name, work) in enumerate(
        (("exactly once", count_exactly_once), ("best-effort 1PC", count_best_effort))
    ):
        one = side(name, broker, database)
        order = Order(broker.port, f"costs.{number}", sizes.flows, database)
        one.prepare(order)
        engine = create_engine(database)
        before = _bytes(engine)
        costs: Costs = hired(work, order)
        grown = _bytes(engine) - before
        engine.dispose()
        one.check(order)
        messages = sizes.flows * STAGES
        kind = "of the log" if engine.dialect.name == "postgresql" else "more in use"
        print_line(
            f"  {name}, a message: {costs.statements.total() / messages:.2f} statements, {costs.rows / messages:.2f} "
            f"rows, {costs.transactions / messages:.2f} transactions, {grown / messages:,.0f} bytes {kind}"
        )
        for statement, count in costs.statements.most_common(12):
            print_line(f"    {count / messages:.3f} {statement}")
    idle: Costs = hired(count_idle, Order(broker.port, "costs.idle", 1, database))
    statements = ", ".join(f"{count} {statement}" for statement, count in idle.statements.most_common())
    print_line(f"  idle, {idle.statements.total() / IDLE_S:.1f} statements a second (1) in {IDLE_S:g} s: {statements}")


# ---- Jobs ----


def count_exactly_once(gate: Gate, order: Order) -> Costs:
    counting = _StatementCounter()
    sql.serve_exactly_once(gate, order)
    return counting.costs()


def count_best_effort(gate: Gate, order: Order) -> Costs:
    counting = _StatementCounter()
    sql.serve(gate, order)
    return counting.costs()


def count_idle(gate: Gate, order: Order) -> Costs:
    """Count the statements of a service that has no messages for a while."""

    async def program() -> Costs:
        app = service(order, exactly_once=True)
        sql.define_endpoint(app, order.name, lambda _: None)
        gate.ready()
        async with app.running():
            await asyncio.sleep(WARM_UP_S)
            counting = _StatementCounter()
            await asyncio.sleep(IDLE_S)
            return counting.costs()

    return run(program())


class _StatementCounter:
    """Counter of statements of all engines of this process, from its creation on."""

    def __init__(self) -> None:
        self._statements: Counter[str] = Counter()
        self._rows = self._transactions = 0
        event.listen(Engine, "after_cursor_execute", self._on_statement)
        event.listen(Engine, "commit", self._on_commit)
        _count_pings(lambda: self._statements.update(["SELECT: is the connection alive?"]))

    def costs(self) -> Costs:
        return Costs(self._statements.copy(), self._rows, self._transactions)

    def _on_statement(self, _: Connection, cursor: Any, statement: str, *__: object) -> None:
        words = statement.split()
        if words[0] == "BEGIN":
            return
        table = next((each for each in words if each.startswith("truenext_") or each == "done"), "")
        if words[0] != "SELECT":
            # The same statement also changes the producer's row.
            rows = 2 if words[:2] == ["WITH", "producer"] else 1
            self._rows += rows * max(cursor.rowcount, 0)
        self._statements[f"{words[0]} {table}".strip()] += 1

    def _on_commit(self, _: Connection) -> None:
        self._transactions += 1


def _count_pings(count: Callable[[], object]) -> None:
    """Count pings, which the driver sends without an event. SQLite has none."""
    ping: Callable[[PGDialect_psycopg, Any], bool] = PGDialect_psycopg.do_ping

    def counted(self: PGDialect_psycopg, connection: Any) -> bool:
        count()
        return ping(self, connection)

    patch.object(PGDialect_psycopg, "do_ping", counted).start()


def _bytes(engine: Engine) -> int:
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            return int(connection.execute(text("SELECT pg_current_wal_insert_lsn() - '0/0'")).scalar_one())
        pages, free, size = (
            int(connection.execute(text(f"PRAGMA {each}")).scalar_one())
            for each in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size
