"""Run of the orders, in which the broker and a process of the service are killed.

    web application ──▶ broker ──▶ two processes of the service ──▶ SQLite
           │                                                          │
           └── its own list of committed orders                       └── a row for each stage that an order has passed

All are processes of their own. Their records are in one folder, and are audited afterwards (audit.py).
"""

import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from examples.guarded_broker import GuardedBroker
from examples.orders.service import TABLES
from examples.orders.tables import SERVICE, make_tables
from examples.program import Program
from truenext import blocking

USERS = Path(__file__).with_name("users.toml")

END_S = 240.0
"""Seconds after which unfinished orders count as stuck; the audit names them."""
QUIET_S = 1.0
"""Seconds for which no message must wait before the run ends."""
PRINT_INTERVAL_S = 3.0
"""Seconds between two lines of progress."""

PrintLine = Callable[[str], object]


class Counts(NamedTuple):
    """Number of orders of each kind that the web application starts."""

    customer: int = 150
    asked: int = 100
    batch: int = 750


class DeadLetter(msgspec.Struct):
    """Dead letter that the broker has at the end."""

    order: str
    stage: str
    cause: str


class Kill(NamedTuple):
    """Process that was killed and started again."""

    name: str
    at: float
    """Seconds since 1970."""
    seconds: float
    """Seconds since the start of the web application."""


class RunResult(NamedTuple):
    """Records of the run."""

    data: Path
    """The broker's data folder, with its history."""
    events: Path
    """Folder of the stages' events."""
    database: Path
    orders: Path
    """List of the web application."""
    dead_letters: list[DeadLetter]
    waiting: dict[str, int]
    """Number of messages that are in queues and in the outbox, though all should be done."""
    kills: list[Kill]
    seconds: float


class Queue(msgspec.Struct):
    name: str
    waiting: int
    unacknowledged: int


class _Envelope(msgspec.Struct):
    """Part of the message between two stages (docs/protocol.md)."""

    flow: "_Flow"


class _Flow(msgspec.Struct):
    trace: str


def run(folder: Path, counts: Counts, print_line: PrintLine) -> RunResult:
    """Start everything, kill the broker and a process of the service on the way, and stop when no message waits."""
    database, events, orders = folder / "orders.db", folder / "events", folder / "orders.jsonl"
    url = f"sqlite:///{database}"
    make_tables(database)
    with ExitStack() as stack:
        broker = GuardedBroker(folder, USERS)
        stack.callback(broker.kill)
        command = ("truenext", "stages", "run", SERVICE, "--database", url, "--events", str(events))
        user = broker.environment("orders")
        services = [Program(folder / f"service-{n}.log", *command, environment=user) for n in (1, 2)]
        for each in services:
            stack.callback(each.kill)
        started = time.monotonic()
        application = ("examples.orders.web", broker.url, url, str(orders), *map(str, counts))
        web = Program(folder / "web.log", *application, environment=user)
        stack.callback(web.kill)

        progress = Progress(database, sum(counts), web, print_line)
        kills = []
        for share, name, victim in ((0.25, "the broker", broker), (0.5, "a process of the service", services[0])):
            progress.wait_for(share)
            victim.kill()
            kills.append(Kill(name, time.time(), time.monotonic() - started))
            print_line(f"  kill -9 of {name}, start again")
            victim.start()
        waiting = progress.wait_for_the_end(broker)
        seconds = time.monotonic() - started

        for each in services:
            each.stop()
        found = dead_letters(broker)
        broker.stop()
    return RunResult(broker.data, events, database, orders, found, waiting, kills, seconds)


class Progress:
    """Progress of the orders, by the rows of the first and of the last stage."""

    def __init__(self, database: Path, orders: int, web: Program, print_line: PrintLine) -> None:
        self._database = database
        self._orders = orders
        self._web = web
        self._print_line = print_line
        self._started = self._printed_at = time.monotonic()

    def wait_for(self, share: float) -> None:
        """Wait until this share of all orders is shipped, or the time limit is reached.

        Raises: SystemExit if the web application has failed
        """
        while self._count(list(TABLES.values())[-1]) < share * self._orders and not self._is_timed_out():
            if self._web.status:
                self._fail()
            time.sleep(0.05)

    def wait_for_the_end(self, broker: GuardedBroker) -> dict[str, int]:
        """Wait until the web application has ended and no message waits. Return what still waits at the time limit.

        Raises: SystemExit if the web application has failed, or has not ended
        """
        while self._web.status is None and not self._is_timed_out():
            time.sleep(0.05)
        if self._web.status != 0:
            self._fail()
        quiet_since = time.monotonic()
        with broker.connect("operator") as connection:
            while True:
                waiting = self._waiting(connection)
                if waiting:
                    quiet_since = time.monotonic()
                if self._is_timed_out() or time.monotonic() - quiet_since > QUIET_S:
                    return waiting
                time.sleep(0.1)

    def _waiting(self, connection: blocking.Connection) -> dict[str, int]:
        waiting = {
            each.name: each.waiting + each.unacknowledged
            for each in queues(connection)
            if each.waiting + each.unacknowledged and not each.name.startswith("DLQ.")
        }
        units = self._count("truenext_outbox")
        return waiting | ({"the outbox": units} if units else {})

    def _fail(self) -> NoReturn:
        status, log = self._web.status, self._web.log
        raise SystemExit(f"the web application has ended with {status} (None: it runs); its log is\n{log}")

    def _is_timed_out(self) -> bool:
        now = time.monotonic()
        if now - self._printed_at > PRINT_INTERVAL_S:
            self._printed_at = now
            first, *_, last = (self._count(table) for table in TABLES.values())
            self._print_line(f"  {now - self._started:3.0f} s: {first} placed, {last} shipped")
        return now - self._started > END_S

    def _count(self, table: str) -> int:
        with closing(sqlite3.connect(self._database, timeout=60)) as connection:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def queues(connection: blocking.Connection) -> list[Queue]:
    return msgspec.json.decode(connection.control_request("queues"), type=list[Queue])


def dead_letters(broker: GuardedBroker) -> list[DeadLetter]:
    """Return all dead letters of the broker."""
    with broker.connect("operator") as connection:
        names = [each.name for each in queues(connection) if each.name.startswith("DLQ.")]
        return [
            DeadLetter(
                msgspec.json.decode(message.body, type=_Envelope).flow.trace,
                name.removeprefix("DLQ."),
                message.last_cause.partition("\n")[0],
            )
            for name in names
            for message in connection.browse(f"/queue/{name}")
        ]
