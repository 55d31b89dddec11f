"""Benchmark of exactly-once processing with a long inbox, beside an empty one, while clean-up runs.

Half of the rows were acknowledged more than seven days ago, so that clean-up has work all the time. The ids are like
those of messages: the time at which the flow was started, and 80 bits that look random.
"""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, func, make_url, select, text

from bench.brokers import Truenext
from bench.flows import sql
from bench.flows.once import side
from bench.flows.pairs import Side, compare, start_flows
from bench.flows.work import Order, Sizes
from bench.progress import print_line
from truenext.stage.sql import apply_schema
from truenext.stage.sql.outbox_table import RETENTION_MS
from truenext.stage.sql.tables import inbox

TARGET = 0.9
STEP = 500_000
"""Number of rows that are written in one transaction."""
_HOUR_MS = 3600 * 1000

# Rows from 1 to :old are the older ones.
_FILL = {
    "postgresql": """
        INSERT INTO truenext_inbox (id, acknowledged_ms)
        SELECT CAST(lpad(to_hex(ms), 12, '0') || left(md5(CAST(n AS text)), 20) AS uuid), ms
        FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n,
            LATERAL (SELECT CASE WHEN n <= :old THEN CAST(:before AS bigint) ELSE :lately END + n AS ms) AS at""",
    "sqlite": """
        WITH RECURSIVE numbers(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM numbers WHERE n < :last)
        INSERT INTO truenext_inbox (id, acknowledged_ms)
        SELECT printf('%012x', ms) || lower(hex(randomblob(10))), ms
        FROM (SELECT CASE WHEN n <= :old THEN :before ELSE :lately END + n AS ms FROM numbers)""",
}


def compare_inboxes(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    full = _another(database)
    started = time.monotonic()
    _fill(full, sizes.inbox_rows)
    print_line(
        f"  the inbox of one database has {sizes.inbox_rows:,} rows, written in {time.monotonic() - started:.0f} s"
    )
    sides = _with_rows(broker, full), side("an empty one", broker, database)
    compare("inbox", sides, sizes.flows, sizes.runs, target=TARGET)


def _with_rows(broker: Truenext, database: str) -> Side:
    empty = side("a long inbox", broker, database)
    engine = create_engine(database)
    old: list[int] = []

    def prepare(order: Order) -> None:
        with engine.connect() as connection:
            old.append(_old(connection))
        sql.prepare(database, empties_inbox=False)
        start_flows(order)

    def check(order: Order) -> None:
        empty.check(order)
        with engine.connect() as connection:
            remaining = _old(connection)
        engine.dispose()
        if not remaining:
            raise ValueError("clean-up had nothing to do any more: take more --inbox-rows, or fewer --flows")
        print_line(
            f"    clean-up has removed {old.pop() - remaining:,} rows meanwhile, and {remaining:,} are left for it"
        )

    return empty._replace(prepare=prepare, check=check)


def _old(connection: Connection) -> int:
    """Return the number of rows that clean-up has to remove."""
    before = (time.time() * 1000) - RETENTION_MS
    return connection.execute(
        select(func.count()).select_from(inbox).where(inbox.c.acknowledged_ms < before)
    ).scalar_one()


def _another(database: str) -> str:
    """Return the URL of another database in the same place."""
    url = make_url(database)
    if url.get_backend_name() == "sqlite":
        return f"{database}.long"
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("CREATE DATABASE long_inbox"))
    engine.dispose()
    return url.set(database="long_inbox").render_as_string(hide_password=False)


def _fill(database: str, rows: int) -> None:
    apply_schema(database)
    engine = create_engine(database)
    fill = _FILL[engine.dialect.name]
    now_ms = int(time.time() * 1000)
    ages = {"old": rows // 2, "before": now_ms - RETENTION_MS - _HOUR_MS - rows, "lately": now_ms - _HOUR_MS - rows}
    _index(engine, exists=False)
    for first in range(1, rows + 1, STEP):
        with engine.begin() as connection:
            connection.execute(text(fill), ages | {"first": first, "last": min(first + STEP - 1, rows)})
        print_line(f"    {min(first + STEP - 1, rows):,} rows are written")
    _index(engine, exists=True)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # Brings the database into its usual state, after the writing of millions of rows.
        connection.execute(text("ANALYZE"))
        if engine.dialect.name == "postgresql":
            connection.execute(text("VACUUM truenext_inbox"))
            connection.execute(text("CHECKPOINT"))
        else:
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    engine.dispose()


def _index(engine: Engine, *, exists: bool) -> None:
    """Create or drop the indexes: millions of rows are written without them. SQLite cannot drop a primary key."""
    with engine.begin() as connection:
        for index in inbox.indexes:
            index.create(connection) if exists else index.drop(connection)
        if engine.dialect.name == "postgresql":
            change = "ADD PRIMARY KEY (id)" if exists else "DROP CONSTRAINT truenext_inbox_pkey"
            connection.execute(text(f"ALTER TABLE truenext_inbox {change}"))
