"""Test that a broker that was stopped in an append, and taken over meanwhile, confirms nothing afterwards.

A broker works under load. It gets a SIGSTOP; another broker takes over, delivers what was confirmed, and takes new
messages. Then the first broker gets a SIGCONT: it must confirm nothing, and end with status 3. In the next round the
two change places.

    TRUENEXT_FENCES=200 TRUENEXT_SEED=7 pytest -s tests/integration/test_fences.py
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import LiteralString

import psycopg
import pytest

from tests.contract.postgresql.log_writer import rows_of
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.log_broker import LogBroker, delete_folder, make_schema
from tests.integration.raw_client import RawClient
from tests.stages.postgres import PostgresServer
from truenext.model.limits import WINDOW_MAX
from truenext.wire.stomp.frame import Frame

FENCES = int(os.environ.get("TRUENEXT_FENCES", "3"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

NEW_QUEUE, OLD_QUEUE = "new", "old"
OLD_COUNT = 300
"""Number of messages that wait to be acknowledged while the broker is stopped."""
SLOW_S = 1.1
"""Duration of a stop after which the broker checks the append that was in progress."""

LATE_MS = 30_000
"""Time after which brokers are silent, roughly: later than any stop, so that nothing but the fence keeps them from
confirming."""

HELD, UNREAD, ANY = "held", "unread", "any"
MOMENTS = [HELD, UNREAD, ANY]
"""Moments at which the broker is stopped: in an append that PostgreSQL executes before the takeover, in an append that
it reads after the takeover, and any."""


@dataclass
class Confirmed:
    """Bodies that the broker has confirmed to a client, in order."""

    sent: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.sent) + len(self.acknowledged)


class Client:
    """Client with a thread that sends messages, or acknowledges them, each with a receipt. Several are outstanding."""

    def __init__(self, broker: LogBroker, round_number: int) -> None:
        self.confirmed = Confirmed()
        self.late = Confirmed()
        """Bodies confirmed after `mark_late`."""
        self.sent: list[str] = []
        """Bodies of all sends, confirmed or not, in order."""
        self._round = round_number
        self._sending, self._receiving = broker.connect(), broker.connect()
        self._is_late = False
        self._idle_count = [0, 0]
        """Number of times that each thread has found nothing to read."""
        self._threads = [Thread(target=self._send), Thread(target=self._acknowledge)]

    def start(self) -> None:
        self._receiving.subscribe(OLD_QUEUE, prefetch=50)
        for thread in self._threads:
            thread.start()

    def mark_late(self) -> None:
        """Regard all confirmations from now on as late. Those that have arrived before are read first."""
        self.await_silence(2)
        self._is_late = True

    def await_silence(self, count: int) -> None:
        """Wait until both threads have found nothing to read `count` times."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        silent_from = [number + count for number in self._idle_count]
        while any(map(int.__lt__, self._idle_count, silent_from)):
            assert time.monotonic() < deadline, "the broker still confirms"
            time.sleep(0.002)

    def join(self) -> None:
        """Wait until the broker has closed both connections."""
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), "the broker has not closed the connection"

    @property
    def _found(self) -> Confirmed:
        return self.late if self._is_late else self.confirmed

    def _send(self) -> None:
        client = self._sending
        waiting: dict[str, str] = {}
        with suppress(OSError, EOFError):
            while True:
                while len(waiting) < 30:
                    body = f"{self._round}-{len(self.sent):06}"
                    receipt = client.new_receipt()
                    waiting[receipt] = body
                    self.sent.append(body)
                    client.send(NEW_QUEUE, body.encode(), persistent=True, headers={"receipt": receipt})
                for frame in self._arriving(client, 0):
                    self._found.sent.append(waiting.pop(frame.headers["receipt-id"]))

    def _acknowledge(self) -> None:
        client = self._receiving
        waiting: dict[str, str] = {}
        with suppress(OSError, EOFError):
            while True:
                for frame in self._arriving(client, 1):
                    if frame.command == "RECEIPT":
                        self._found.acknowledged.append(waiting.pop(frame.headers["receipt-id"]))
                        continue
                    receipt = client.new_receipt()
                    waiting[receipt] = frame.body.decode()
                    client.send_frame("ACK", {"id": frame.headers["ack"], "receipt": receipt})

    def _arriving(self, client: RawClient, thread: int) -> Iterator[Frame]:
        """Yield one frame, if one arrives soon. Raises: EOFError at the end of the connection"""
        try:
            frame = client.next_frame(0.005)
        except TimeoutError:
            self._idle_count[thread] += 1
            return
        assert frame.command in ("RECEIPT", "MESSAGE"), frame
        yield frame


@contextmanager
def append_held(server: PostgresServer, schema: str) -> Iterator[None]:
    """Let PostgreSQL execute an append of the broker at the end of the block."""
    with server.connect() as connection, server.connect() as watcher, connection.transaction():
        connection.execute(f"LOCK TABLE {schema}.log IN SHARE ROW EXCLUSIVE MODE")
        await_append(watcher, "state = 'active' AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO%'")
        yield


@contextmanager
def append_unread(server: PostgresServer) -> Iterator[Callable[[], None]]:
    """Let PostgreSQL not read an append that the broker has sent, until the function that is yielded is called."""
    with server.connect() as watcher:
        session = suspended_session(watcher)
        try:
            yield lambda: os.kill(session, signal.SIGCONT)
        finally:
            with suppress(ProcessLookupError):
                os.kill(session, signal.SIGCONT)


def suspended_session(watcher: psycopg.Connection[tuple[object, ...]]) -> int:
    """Suspend the session of the broker's appends while it is idle, and return its process id."""
    while True:
        session = await_append(watcher, "query LIKE '%INSERT INTO%'")
        os.kill(session, signal.SIGSTOP)
        time.sleep(0.005)
        is_idle = watcher.execute(
            "SELECT state = 'idle' AND NOT EXISTS (SELECT FROM pg_locks WHERE pg_locks.pid = session.pid) "
            "FROM pg_stat_activity AS session WHERE pid = %s",
            (session,),
        ).fetchone()
        if is_idle == (True,):
            return session
        os.kill(session, signal.SIGCONT)
        time.sleep(0.003)


def await_append(watcher: psycopg.Connection[tuple[object, ...]], condition: LiteralString) -> int:
    """Wait for a session of a broker with this condition, and return its process id."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = watcher.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'truenext%' AND " + condition
        ).fetchone()
        if found is not None:
            return int(str(found[0]))
        assert time.monotonic() < deadline, "the broker appends nothing"
        time.sleep(0.002)


@pytest.mark.timeout(120 + 20 * FENCES)
def test_broker_stopped_in_an_append_and_taken_over_confirms_nothing_later(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    """C27.4"""
    print(f"\nseed {SEED}, {FENCES} fences", flush=True)
    fence_and_judge(own_postgres, tmp_path, SEED, FENCES)


def fence_and_judge(server: PostgresServer, folder: Path, seed: int, count: int, fault: str = "") -> None:
    """Let two brokers take over from each other. Raises: AssertionError if a promise was broken"""
    chance = random.Random(seed)
    schema = f"fences_{fault}"[:63]
    make_schema(server, schema)
    brokers = [
        LogBroker(folder / f"broker {n}", server, schema, ["--take-over"], failover_after_ms=LATE_MS, fault=fault)
        for n in range(2)
    ]
    counts: Counter[str] = Counter()
    try:
        active, heir = brokers
        active.start()
        for number in range(count):
            fence(server, schema, active, heir, chance, number, counts)
            active, heir = heir, active
            if number % 20 == 19 or number == count - 1:
                active.check_database()
                print(f"fence {number + 1}/{count}: {dict(counts)}", flush=True)
        active.stop()
    finally:
        for broker in brokers:
            broker.clean_up()


def fence(
    server: PostgresServer,
    schema: str,
    active: LogBroker,
    heir: LogBroker,
    chance: random.Random,
    number: int,
    counts: Counter[str],
) -> None:
    """Let `heir` take over from `active`, which is stopped under load at one of MOMENTS."""
    moment = MOMENTS[number % len(MOMENTS)]
    fill(active, number)
    client = Client(active, number)
    client.start()
    time.sleep(chance.uniform(0.02, 0.4))
    with ExitStack() as asleep, ExitStack() as unread:
        let_read = unread.enter_context(append_unread(server)) if moment == UNREAD else None
        if let_read is not None:
            # There is always a message to be sent: so an append has begun.
            client.await_silence(8)
        if moment == HELD:
            with append_held(server, schema):
                asleep.enter_context(active.asleep())
        else:
            asleep.enter_context(active.asleep())
        stopped_at = time.monotonic()
        client.mark_late()
        if chance.random() < 0.3:
            delete_folder(heir.data)
        heir.start()
        held_row = last_row_before_takeover(server, schema) if moment == HELD else b""
        if let_read is not None:
            let_read()
        found = take_all(heir, NEW_QUEUE)
        left = take_all(heir, OLD_QUEUE)
        if moment != ANY:
            time.sleep(max(0.0, stopped_at + SLOW_S - time.monotonic()))
    status = active.wait_for_end()
    client.join()
    assert status == 3, f"the fenced broker ended with {status}, log:\n{active.log}"
    line = active.log.splitlines()[-1]
    assert line.startswith("truenext: another broker has taken over the log"), active.log
    assert "Traceback" not in active.log
    active.close_clients()
    heir.close_clients()
    judge(client, found, left, number, held_row)
    counts["confirmed"] += client.confirmed.count
    counts[f"confirmed later, durable before ({moment})"] += client.late.count
    counts["durable, never confirmed"] += len(found) - len(client.confirmed.sent) - len(client.late.sent)


def judge(client: Client, found: list[str], left: list[str], number: int, held_row: bytes) -> None:
    """Check what the second broker has: `found` in the queue of the sends, `left` of the old messages. `held_row` is
    the payload of the row in whose append the first broker was stopped."""
    confirmed, late = client.confirmed, client.late
    assert found == client.sent[: len(found)], "messages are missing, doubled, or not in order"
    assert confirmed.sent == found[: len(confirmed.sent)], "confirmed messages are lost"
    again = set(confirmed.acknowledged) & set(left)
    assert not again, f"{again} came again, though their acknowledgement was confirmed"
    old = [f"old {number}-{n}" for n in range(OLD_COUNT)]
    assert left == [each for each in old if each in set(left)], "old messages are doubled, or not in order"
    # Receipts of an earlier row may have been on their way.
    assert set(late.sent) <= set(found), f"{late.sent} were confirmed, and the log does not have them"
    assert not set(late.acknowledged) & set(left), f"{late.acknowledged} were confirmed, and have come again"
    of_row = [body for body in late.sent if body.encode() in held_row]
    assert not of_row, f"{of_row} were confirmed after the takeover"


def last_row_before_takeover(server: PostgresServer, schema: str) -> bytes:
    """Return the payload of the last row of the broker before the active one."""
    with server.connect() as connection:
        rows = rows_of(connection, schema)
    _, last_epoch, _ = rows[-1]
    return next(payload for _, epoch, payload in reversed(rows) if epoch < last_epoch)


def fill(broker: LogBroker, number: int) -> None:
    client = broker.connect()
    for n in range(OLD_COUNT):
        client.send(OLD_QUEUE, f"old {number}-{n}".encode(), persistent=True)
    client.send("later", b"", confirmed=True)
    client.disconnect()


def take_all(broker: LogBroker, queue: str) -> list[str]:
    """Consume all messages of a queue, and return their bodies."""
    facts = broker.queues().get(queue)
    client = broker.connect()
    client.subscribe(queue, prefetch=WINDOW_MAX)
    messages = client.messages(facts.waiting if facts else 0)
    assert not client.arrived()
    for message in messages:
        client.ack(message)
    client.send("later", b"", persistent=True, confirmed=True)
    client.disconnect()
    return [message.body.decode() for message in messages]
