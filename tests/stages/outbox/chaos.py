"""The service `chaos` in a process of its own, a program that initiates its orders, and what its tables have.

Tests kill both, their broker and the connections of their database, and judge the tables.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from random import Random

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tests.integration.broker_process import BrokerProcess
from tests.stages.service_process import ServiceProcess
from tests.stages.services.job import Job
from truenext import blocking
from truenext.errors import ConnectionLost
from truenext.stage import Service
from truenext.stage.sql import apply_schema

TABLES = ("ordered", "placed", "noted", "shipped")


def start_service(folder: Path, broker_url: str, database: str) -> ServiceProcess:
    environment = {"CHAOS_DATABASE": database}
    return ServiceProcess(folder, "tests.stages.services.chaos:app", broker_url, environment=environment)


def create_tables(database: str) -> Engine:
    """Create the tables of the service and of its outbox, and return an engine for them."""
    apply_schema(database)
    engine = create_engine(database)
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(text(f"CREATE TABLE {table} (number INTEGER)"))
    return engine


class Web:
    """A program that initiates orders in its own transactions, from a thread, whatever fails around it."""

    def __init__(self, url: str, random: Random, *, first: int = 0, pause_s: float = 0.02) -> None:
        """`first` is the number of its first order, `pause_s` the longest pause between two orders."""
        self._engine = create_engine(url)
        self._app = Service("chaos", database=url, exactly_once=True)
        self._place = self._app.remote("order.place", Job)
        self._random = random
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._pause_s = pause_s
        self.started = first
        """Number of the next order."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._engine.dispose()

    def _work(self) -> None:
        while not self._is_over.wait(self._random.uniform(0, self._pause_s)):
            key = f"{self.started}" if self._random.random() < 0.5 else None
            # Who runs his handler again after an error says a key.
            for _ in range(1 if key is None else 2):
                try:
                    self._order(self.started, key)
                except DBAPIError:
                    # Whether it was committed, only the table knows.
                    continue
            self.started += 1

    def _order(self, number: int, key: str | None) -> None:
        with Session(self._engine) as session:
            is_there = session.execute(text("SELECT 1 FROM ordered WHERE number = :number"), {"number": number}).first()
            if is_there is None:
                session.execute(text("INSERT INTO ordered VALUES (:number)"), {"number": number})
            elif key is None:
                return
            with self._app.initiate(session, key=key) as initiation:
                initiation.send(self._place, Job(number), trace=f"order {number}", interactive=number % 3 == 0)
            if self._random.random() < 0.2:
                session.rollback()
            else:
                session.commit()


def rows(engine: Engine, table: str) -> Counter[int]:
    with engine.connect() as connection:
        return Counter(connection.execute(text(f"SELECT number FROM {table}")).scalars())


def reported(broker: BrokerProcess) -> Counter[int]:
    with blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        return Counter(json.loads(each.body)["message"]["number"] for each in connection.browse("/queue/told"))


def state(broker: BrokerProcess, engine: Engine) -> tuple[int, int]:
    """Return the number of units in the outbox, and of messages that stages have or are to get. A message that an open
    transaction has acknowledged is in neither."""
    queues = broker.queues()
    assert not [name for name in queues if name.startswith("DLQ.order.")], queues
    waiting = sum(each.waiting + each.unacknowledged for name, each in queues.items() if name.startswith("order."))
    with engine.connect() as connection:
        remaining: int = connection.execute(text("SELECT count(*) FROM truenext_outbox")).scalar_one()
    return remaining, waiting


def is_over(broker: BrokerProcess, engine: Engine) -> bool:
    try:
        return not any(state(broker, engine))
    except (ConnectionLost, OSError, DBAPIError):
        return False
