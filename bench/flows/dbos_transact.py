"""Flows by DBOS Transact: workflows of three transactional steps, each an INSERT, in the same PostgreSQL.

The workflows wait in a queue of DBOS. Its steps are transactions of a datasource: one commit has the effects of a
step and its checkpoint. Their isolation level is that of our stages; the default would be SERIALIZABLE.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dbos import DBOS, DBOSClient, SQLAlchemyDatasource, run_dbos_database_migrations
from sqlalchemy import Engine, create_engine, insert, text

from bench.client.work import Done, Stopwatch
from bench.flows import sql
from bench.flows.shop import TOGETHER, OrderRequest
from bench.flows.work import Order
from bench.workers import Gate

THREADS = 32
"""Number of concurrent workflows. 4, 8 and 16 were not clearly faster, nor were async workflows."""
POLL_S = 0.05
"""Seconds between polls of a queue. The default of 1 second would dominate short runs."""
CHOSEN = f"a queue that is looked at every {POLL_S:g} s, {THREADS} threads, READ COMMITTED"
_VERSION = "1"
"""Version of the program, shared by the processes that start and run the workflows."""
_STEPS = ("check", "reserve", "confirm")
_SPARE_CONNECTIONS = 8
CHECK_INTERVAL_S = 0.01


def enqueue_workflows(gate: Gate, order: Order) -> None:
    """Put all workflows into the queue."""
    run_dbos_database_migrations(order.database)
    client = DBOSClient(system_database_url=order.database)
    engine = create_engine(order.database)
    options: Any = {"queue_name": order.name, "workflow_name": "place", "app_version": _VERSION}
    note = OrderRequest(0).note
    gate.ready()
    client.register_queue(order.name, worker_concurrency=THREADS, polling_interval_sec=POLL_S)
    for first in range(0, order.flows, TOGETHER):
        with engine.begin() as connection:
            for number in range(order.flows)[first : first + TOGETHER]:
                client.enqueue_in_transaction(connection, options, number, note)
    engine.dispose()
    client.destroy()


def work(gate: Gate, order: Order) -> Done:
    """Run until the last workflow has ended, and this is written."""
    remaining = order.flows
    lock, all_ = threading.Lock(), threading.Event()
    DBOS(
        config={
            "name": "bench",
            "system_database_url": order.database,
            "application_version": _VERSION,
            "executor_id": "bench",
            "log_level": "ERROR",
            "sys_db_pool_size": THREADS + _SPARE_CONNECTIONS,
            "max_executor_threads": THREADS,
        }
    )
    source = SQLAlchemyDatasource.create(order.database, engine_kwargs={"pool_size": THREADS, "max_overflow": 0})

    def step(stage: str) -> Callable[[int, str], None]:
        def done(flow: int, note: str) -> None:
            source.sql_session().execute(insert(sql.DONE).values(flow=flow, stage=stage, note=note))

        transactional: Callable[[int, str], None] = source.transaction(name=stage, isolation_level="READ COMMITTED")(
            done
        )
        return transactional

    steps = [step(stage) for stage in _STEPS]

    def place(flow: int, note: str) -> None:
        nonlocal remaining
        for each in steps:
            each(flow, note)
        with lock:
            remaining -= 1
            if not remaining:
                all_.set()

    DBOS.workflow(name="place")(place)
    DBOS.listen_queues([order.name])
    engine = create_engine(order.database)
    watch = Stopwatch(gate)
    watch.start()
    DBOS.launch()
    all_.wait()
    while _unfinished(engine):
        time.sleep(CHECK_INTERVAL_S)
    done = watch.stop()
    DBOS.destroy()
    engine.dispose()
    return done


def check(order: Order) -> None:
    """Raises: ValueError unless each workflow has succeeded"""
    engine = create_engine(order.database)
    unfinished = _unfinished(engine)
    engine.dispose()
    if unfinished:
        raise ValueError(f"{unfinished} workflows have not succeeded")


def _unfinished(engine: Engine) -> int:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'"))
        return int(found.scalar_one())
