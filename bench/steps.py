"""Longest step of the broker's event loop, with documented limits at their worst: `python -m bench.steps [NAME ...]`

While a step runs, no other client is served. Each scenario goes to a limit, over sockets, and notes the longest steps
of one event in processor time of the loop's thread; other processes and threads do not count. Steps that the contract
wants whole may take longer than STEP_MS; docs/security.md lists them.

A scenario is a function of a `Trial`; add it to SCENARIOS by `@scenario`, and put `with trial.measures(...)` around
what is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import asyncio.events
import gc
import json
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from truenext.broker.broker import Broker
from truenext.broker.control_commands import Figures
from truenext.broker.recovery import recover
from truenext.cli.serve import MEMORY_SHARE, _tune_garbage_collector
from truenext.history.writer import HistoryWriter
from truenext.model.limits import (
    BROKER_BYTES,
    COMPOSITE_MAX,
    CONNECTIONS_BEFORE_LOGIN_MAX,
    CONNECTIONS_MAX,
    COPIES_MAX,
    GROUPS_MAX,
    HELD_MAX,
    MEMORY_LIMIT,
    METRICS_QUEUES_MAX,
    SELECTOR_PARTS_MAX,
    SUBSCRIPTIONS_MAX,
    TOPIC_SUBSCRIPTIONS_MAX,
    TRANSACTION_CRON_SENDS_MAX,
    TRANSACTION_MESSAGES_MAX,
    TRANSACTION_QUEUE_COUNT,
    TRANSACTION_QUEUES_UNCOUNTED,
    TRANSACTIONS_MAX,
    WINDOW_MAX,
)
from truenext.model.policy import Policies, Policy
from truenext.model.url import parse_url
from truenext.server.ending import TAKEOVER_GRACE_S
from truenext.server.listener import Listener, Places
from truenext.store.embedded import EmbeddedStore

STEP_MS = 20
"""Aim for most steps, in ms of processor time."""
LISTED_MS = 100
"""Aim for steps that the contract wants whole, with default limits, in ms of processor time."""
SLICE_MS = 3
"""Aim for steps of answers to control requests, in ms of processor time: a slice and the rest of its turn."""
MANY_QUEUES = 50_000
QUIET_S = 0.3
"""Seconds without a noted step after which the broker has done all that an event caused."""
NOTED_S = 0.001
"""Shortest step that is noted, in seconds of processor time."""
SCRAPE_STEP_MS = 4
"""Aim for turns with a slice of sliced work, in ms of processor time: it begins no further step after 2 ms."""
SCRAPED_QUEUES = 50_000
ANSWER_S = 120.0
LIMITED_TOPIC = "limited"
"""Topic of whose messages a subscription may have none in memory."""
ONE_ATTEMPT_QUEUE = "one-attempt"
"""Queue whose messages have a single attempt."""


class Steps:
    """Context manager that notes the longest steps of all event loops of this process."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, str]] = []
        """Seconds of processor time, and the callback's name, of steps since the last `clear`."""
        self.last_at = 0.0
        """Time of the last step that was noted."""
        self.is_running = False
        """A step is running."""

    def __enter__(self) -> Steps:
        self._run = run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            self.is_running = True
            started = time.thread_time()
            run(handle)
            seconds = time.thread_time() - started
            if seconds >= NOTED_S:
                self.noted.append((seconds, getattr(handle._callback, "__qualname__", "?")))  # type: ignore[attr-defined]
                self.last_at = time.monotonic()
            self.is_running = False

        asyncio.events.Handle._run = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.events.Handle._run = self._run  # type: ignore[method-assign]


class Client:
    """Blocking STOMP connection that counts frames without decoding them: the load must not cost more than the work."""

    def __init__(self, port: int, *, client_id: str = "", is_truenext: bool = False) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.settimeout(ANSWER_S)
        self._received = bytearray()
        self._receipts = 0
        headers = {"accept-version": "1.2", "host": "bench", "heart-beat": "0,0"}
        if client_id:
            headers["client-id"] = client_id
        if is_truenext:
            headers["truenext-client"] = "1"
        self.write("CONNECT", headers)
        self._read_until(b"\0\n")
        assert self._received.startswith(b"CONNECTED"), bytes(self._received)
        self._received.clear()

    def write(self, command: str, headers: dict[str, Any] | None = None, body: bytes = b"") -> None:
        self.write_frames(frame(command, headers or {}, body))

    def write_frames(self, data: bytes) -> None:
        self._sock.sendall(data)

    def confirm(self) -> None:
        """Wait until the broker has executed all frames; drop the frames that are read meanwhile."""
        self._receipts += 1
        name = f"r{self._receipts}"
        self.write("BEGIN", {"transaction": name})
        self.write("ABORT", {"transaction": name, "receipt": name})
        self.await_receipt(name)

    def call(self, command: str, headers: dict[str, Any], body: bytes = b"") -> None:
        """Write a frame and wait for its receipt."""
        self._receipts += 1
        self.write(command, {**headers, "receipt": f"c{self._receipts}"}, body)
        self.await_receipt(f"c{self._receipts}")

    def await_receipt(self, name: str) -> None:
        self._read_until(f"receipt-id:{name}\n".encode())
        self._received.clear()

    def take(self, count: int) -> bytes:
        """Read until `count` frames have come, and return the value of the last one's `ack` header."""
        received, found = self._received, 0
        while True:
            found += received.count(b"\0")
            if found >= count:
                break
            del received[: received.rfind(b"\nack:") + 1]
            if b"\0" in received:
                found -= received.count(b"\0")
            received += self._recv()
        # A frame after these may not be complete.
        start = received.rfind(b"\nack:", 0, received.rfind(b"\0")) + 5
        value = bytes(received[start : received.index(b"\n", start)])
        received.clear()
        return value

    def control(self, verb: str, request: dict[str, Any]) -> None:
        """Send a control request and wait for its receipt."""
        self.call("SEND", {"destination": f"/control/{verb}"}, json.dumps(request).encode())

    def take_answer(self) -> None:
        """Read the MESSAGE with the answer to a control request."""
        self._read_until(b"\0")
        self._received.clear()

    def drain(self) -> None:
        """Read until no byte has come for QUIET_S."""
        self._sock.settimeout(QUIET_S)
        try:
            while True:
                self._recv()
        except TimeoutError:
            self._sock.settimeout(ANSWER_S)

    def _read_until(self, text: bytes) -> None:
        while text not in self._received:
            del self._received[: max(0, len(self._received) - 400)]
            self._received += self._recv()

    def _recv(self) -> bytes:
        data = self._sock.recv(1 << 20)
        if not data:
            raise EOFError(f"the broker closed the connection: {bytes(self._received[-300:])!r}")
        return data

    def close(self) -> None:
        self._sock.close()


def frame(command: str, headers: dict[str, Any], body: bytes = b"") -> bytes:
    lines = [command, *(f"{name}:{value}" for name, value in headers.items())]
    return "\n".join(lines).encode() + b"\n\n" + body + b"\0"


class Row(NamedTuple):
    """One measured event."""

    scenario: str
    event: str
    limit_ms: int
    """Aim for the longest step."""
    step_ms: float
    """Longest step."""
    callback: str
    """Name of the callback that took longest."""


class Trial:
    """One broker with default limits, its clients, and the measured events."""

    def __init__(self, name: str, port: int, steps: Steps, call: Callable[..., object]) -> None:
        """`call` calls a function with the broker, on its event loop."""
        self.name = name
        self.call = call
        self.rows: list[Row] = []
        self._port = port
        self._steps = steps
        self._clients: list[Client] = []

    def client(self, **options: Any) -> Client:
        client = Client(self._port, **options)
        self._clients.append(client)
        return client

    @contextmanager
    def measures(self, event: str, limit_ms: int = STEP_MS) -> Generator[None, None, None]:
        """Note the longest step from the start of the block until the broker is quiet."""
        self.settle()
        self._steps.noted.clear()
        yield
        self.settle()
        seconds, callback = max(self._steps.noted, default=(0.0, "-"))
        self.rows.append(Row(self.name, event, limit_ms, seconds * 1000, callback))

    def settle(self) -> None:
        """Wait until the broker has been quiet for QUIET_S."""
        self._steps.last_at = time.monotonic()
        while (rest_s := self._steps.last_at + QUIET_S - time.monotonic()) > 0:
            time.sleep(min(rest_s, 0.02))
            if self._steps.is_running:
                self._steps.last_at = time.monotonic()

    def fill(self, destination: str, count: int, **headers: Any) -> None:
        """Send `count` messages of one byte."""
        client = self.client()
        data = frame("SEND", {"destination": destination, "persistent": "false", **headers}, b"x")
        for first in range(0, count, 1000):
            client.write_frames(data * min(1000, count - first))
        client.confirm()

    def close(self) -> None:
        for client in self._clients:
            client.close()


SCENARIOS: dict[str, Callable[[Trial], None]] = {}


def scenario(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
    SCENARIOS[run.__name__] = run
    return run


# ---- Transactions, requeueing and ends ----


def _acknowledge_in_transaction(trial: Trial, queue: str, count: int) -> Client:
    client = trial.client()
    client.write("SUBSCRIBE", {"id": 1, "destination": queue, "ack": "client", "activemq.prefetchSize": 1000})
    client.write("BEGIN", {"transaction": "t"})
    for first in range(0, count, 1000):
        last = client.take(min(1000, count - first))
        client.write("ACK", {"id": last.decode(), "transaction": "t"})
    client.confirm()
    return client


@scenario
def transaction(trial: Trial) -> None:
    count = TRANSACTION_MESSAGES_MAX
    for kind, persistent in (("transient", "false"), ("persistent", "true")):
        queue = f"/queue/{kind}"
        client = trial.client()
        client.write("BEGIN", {"transaction": "t"})
        data = frame("SEND", {"destination": queue, "transaction": "t", "persistent": persistent}, b"x")
        for first in range(0, count, 1000):
            client.write_frames(data * min(1000, count - first))
        client.confirm()
        with trial.measures(f"COMMIT of {count:,} {kind} sends", LISTED_MS):
            client.call("COMMIT", {"transaction": "t"})
        for end in ("ABORT", "COMMIT"):
            client = _acknowledge_in_transaction(trial, queue, count)
            with trial.measures(f"{end} of {count:,} {kind} acknowledgements", LISTED_MS):
                client.call(end, {"transaction": "t"})
            client.call("DISCONNECT", {})


@scenario
def costly(trial: Trial) -> None:
    """COMMITs of as many sends as are allowed with groups, expiry or delays, to one queue and to many."""
    later = int(time.time() * 1000) + 3_600_000
    groups, expiry, delay = "JMSXGroupID", "expires", "AMQ_SCHEDULED_DELAY"
    for names, queue_count in (
        ((groups,), 1),
        ((expiry,), 1),
        ((delay,), 1),
        ((groups, expiry), 100),
        # Each queue gets several priorities.
        ((groups, expiry), 599),
    ):
        count = (TRANSACTION_MESSAGES_MAX - TRANSACTION_QUEUE_COUNT * max(0, queue_count - 100)) // 2
        client = trial.client()
        client.write("BEGIN", {"transaction": "t"})
        for first in range(0, count, 500):
            frames = []
            for number in range(first, min(first + 500, count)):
                # In no order, so that timers and groups of consecutive sends are far from one another.
                drawn = number * 7919 % count
                values = {groups: f"g{drawn}", expiry: later + drawn * 1000, delay: 10_000_000 + drawn * 1000}
                headers = {name: values[name] for name in names}
                headers |= {"transaction": "t", "persistent": "true", "priority": number % 10}
                to = f"/queue/{'-'.join(names)}.{number % queue_count}"
                frames.append(frame("SEND", {"destination": to, **headers}))
            client.write_frames(b"".join(frames))
        client.confirm()
        with trial.measures(f"COMMIT of {count:,} sends to {queue_count:,} queues with {', '.join(names)}", LISTED_MS):
            client.call("COMMIT", {"transaction": "t"})


@scenario
def commits(trial: Trial) -> None:
    """Transactions of several connections that are committed at once."""
    clients = [trial.client() for _ in range(8)]
    for client in clients:
        client.write("BEGIN", {"transaction": "t"})
        data = frame("SEND", {"destination": "/queue/c", "transaction": "t", "persistent": "true"}, b"x")
        for _ in range(TRANSACTION_MESSAGES_MAX // 1000):
            client.write_frames(data * 1000)
        client.confirm()
    with trial.measures(f"{len(clients)} COMMITs of {TRANSACTION_MESSAGES_MAX:,} persistent sends at once", LISTED_MS):
        for client in clients:
            client.write("COMMIT", {"transaction": "t", "receipt": "c"})
        for client in clients:
            client.await_receipt("c")


@scenario
def nack(trial: Trial) -> None:
    for kind, persistent in (("transient", "false"), ("persistent", "true")):
        queue = f"/queue/{kind}"
        trial.fill(queue, HELD_MAX, persistent=persistent)
        client = trial.client()
        client.write("SUBSCRIBE", {"id": 1, "destination": queue, "ack": "client", "activemq.prefetchSize": HELD_MAX})
        last = client.take(HELD_MAX)
        with trial.measures(f"NACK of {HELD_MAX:,} {kind} messages", LISTED_MS):
            client.call("NACK", {"id": last.decode()})
        client.call("DISCONNECT", {})


@scenario
def given_up(trial: Trial) -> None:
    """Events that give up all that a connection holds."""
    reported = {"truenext-report-to": "/queue/reports", "truenext-report-id": "i"}
    for kind, headers in (("transient", {}), ("persistent", {}), ("reported", reported)):
        queue = f"/queue/given-up.{kind}"
        trial.fill(queue, HELD_MAX, persistent="false" if kind == "transient" else "true", **headers)
        client = trial.client()
        client.write("SUBSCRIBE", {"id": 1, "destination": queue, "ack": "client", "activemq.prefetchSize": HELD_MAX})
        last = client.take(HELD_MAX)
        with trial.measures(f"rejection of {HELD_MAX:,} {kind} messages", LISTED_MS):
            client.call("NACK", {"id": last.decode(), "truenext-reject": "true"})
        client.call("DISCONNECT", {})
    count = TRANSACTION_MESSAGES_MAX
    queue = f"/queue/{ONE_ATTEMPT_QUEUE}"
    trial.fill(queue, count, persistent="true")
    client = trial.client()
    client.write("BEGIN", {"transaction": "t"})
    client.write("SUBSCRIBE", {"id": 1, "destination": queue, "ack": "client", "activemq.prefetchSize": count})
    last = client.take(count)
    client.call("ACK", {"id": last.decode(), "transaction": "t"})
    with trial.measures(f"last attempt of {count:,} acknowledged messages, by a lost connection", LISTED_MS):
        client.close()


@scenario
def many(trial: Trial) -> None:
    """A wildcard consumer that holds as much as it may, of very many queues with groups, priorities and expiry."""
    count, queue_count, later = HELD_MAX // 2 - 384, 1000, int(time.time() * 1000) + 3_600_000
    sender = trial.client()
    for first in range(0, count, 1000):
        frames = []
        for number in range(first, min(first + 1000, count)):
            headers = {"JMSXGroupID": f"g{number * 7919 % count}", "expires": later + number * 1000}
            headers |= {
                "priority": number % 10,
                "persistent": "true",
                "destination": f"/queue/m.{number % queue_count}",
            }
            frames.append(frame("SEND", headers))
        sender.write_frames(b"".join(frames))
    sender.confirm()
    subscribe = {"id": 1, "destination": "/queue/m.*", "ack": "client", "activemq.prefetchSize": WINDOW_MAX}
    for event in ("NACK", "COMMIT of NACKs", "ABORT", "end"):
        of_count = TRANSACTION_MESSAGES_MAX // 2 if event == "COMMIT of NACKs" else count
        client = trial.client()
        with trial.measures(
            f"dispatch of {of_count:,} messages of {queue_count:,} queues to a wildcard consumer", LISTED_MS
        ):
            client.write("SUBSCRIBE", {**subscribe, "activemq.prefetchSize": of_count})
            last = client.take(of_count).decode()
        in_transaction = {"id": last, "transaction": "t"}
        cause = {"truenext-cause": "c" * 3000}
        client.write("BEGIN", {"transaction": "t"})
        if event == "ABORT":
            client.call("ACK", in_transaction)
        elif event == "COMMIT of NACKs":
            client.call("NACK", in_transaction | cause)
        if event in ("ABORT", "COMMIT of NACKs"):
            # Else the same consumer would take the messages at once.
            client.call("UNSUBSCRIBE", {"id": 1})
        with trial.measures(f"{event} of {of_count:,} messages of {queue_count:,} queues, with a cause", LISTED_MS):
            if event == "NACK":
                client.call("NACK", {"id": last, **cause})
            elif event == "end":
                client.close()
            else:
                client.call(event.split()[0], {"transaction": "t"})
        if event != "end":
            client.call("DISCONNECT", {})


@scenario
def held(trial: Trial) -> None:
    """Ends of connections that hold very many messages."""
    trial.fill("/queue/held", 120_000)
    client = trial.client()
    for number in range(100):
        client.write(
            "SUBSCRIBE", {"id": number, "destination": "/queue/held", "ack": "client", "activemq.prefetchSize": 2000}
        )
    with trial.measures("dispatch of all that a connection may hold"):
        client.confirm()
        client.drain()
    with trial.measures("end of a connection that holds as much as it may", LISTED_MS):
        client.close()
    client = trial.client(is_truenext=True)
    for number in range(2):
        client.write(
            "SUBSCRIBE",
            {
                "id": number,
                "destination": "/queue/held",
                "ack": "client-individual",
                "activemq.prefetchSize": WINDOW_MAX,
            },
        )
    client.drain()
    with trial.measures("release of all that a connection may hold", LISTED_MS):
        client.control("release", {"subscriptions": ["0", "1"]})
        client.drain()


@scenario
def consumers(trial: Trial) -> None:
    """One queue with very many consumers."""
    clients = [trial.client() for _ in range(10)]
    count = len(clients) * SUBSCRIPTIONS_MAX
    with trial.measures(f"{count:,} consumers join a queue"):
        for client in clients:
            for number in range(SUBSCRIPTIONS_MAX):
                client.write("SUBSCRIBE", {"id": number, "destination": "/queue/q", "ack": "client"})
            client.confirm()
    with trial.measures(f"SEND to a queue with {count:,} consumers"):
        trial.fill("/queue/q", 1)
    with trial.measures(f"end of {len(clients)} connections with {SUBSCRIPTIONS_MAX} consumers each"):
        for client in reversed(clients):
            client.close()


@scenario
def express(trial: Trial) -> None:
    """One queue with very many express consumers whose windows are full."""
    clients = [trial.client() for _ in range(10)]
    count = len(clients) * SUBSCRIPTIONS_MAX
    headers = {"ack": "client-individual", "activemq.prefetchSize": 2, "truenext-express": "true"}
    for client in clients:
        for number in range(SUBSCRIPTIONS_MAX):
            client.write("SUBSCRIBE", {"id": number, "destination": "/queue/q", **headers})
        client.confirm()
    trial.fill("/queue/q", 2 * count + 1, priority=1)
    for client in clients:
        client.drain()
    with trial.measures(f"SEND beside {count:,} express consumers, as urgent as what they hold"):
        trial.fill("/queue/q", 1, priority=1)
    with trial.measures(f"SEND to {count:,} express consumers"):
        trial.fill("/queue/q", 1, priority=9)
    with trial.measures(f"{count:,} SENDs to {count:,} express consumers"):
        trial.fill("/queue/q", count, priority=5)


@scenario
def exclusive(trial: Trial) -> None:
    """One queue with very many exclusive consumers."""
    for destination in ("/queue/e", "/queue/e.*"):
        trial.fill("/queue/e.0", 1)
        clients = [trial.client() for _ in range(10)]
        count = len(clients) * SUBSCRIPTIONS_MAX
        headers = {"destination": destination, "ack": "client", "activemq.exclusive": "true"}
        with trial.measures(f"{count:,} SUBSCRIBEs of exclusive consumers to {destination}"):
            for client in clients:
                for number in range(SUBSCRIPTIONS_MAX):
                    client.write("SUBSCRIBE", {"id": number, **headers})
                client.confirm()
        with trial.measures(
            f"end of a connection with {SUBSCRIPTIONS_MAX} of {count:,} exclusive consumers, the first"
        ):
            clients[0].close()
        with trial.measures(f"end of a connection with {SUBSCRIPTIONS_MAX} exclusive consumers, the last"):
            clients[-1].close()


@scenario
def groups(trial: Trial) -> None:
    """A queue with as many groups as it may have, and as many consumers as one connection may have."""
    sends = trial.client()
    for first in range(0, 3 * GROUPS_MAX, 1000):
        sends.write_frames(
            b"".join(
                frame("SEND", {"destination": "/queue/g", "JMSXGroupID": f"g{number % GROUPS_MAX}"}, b"x")
                for number in range(first, first + 1000)
            )
        )
    sends.confirm()
    client = trial.client()
    with trial.measures(f"{SUBSCRIPTIONS_MAX} consumers join a queue with {GROUPS_MAX:,} groups"):
        for number in range(SUBSCRIPTIONS_MAX):
            client.write(
                "SUBSCRIBE", {"id": number, "destination": "/queue/g", "ack": "client", "activemq.prefetchSize": 100}
            )
        client.drain()
        client.confirm()
    with trial.measures(f"end of a connection that owns {GROUPS_MAX:,} groups and holds all it may", LISTED_MS):
        client.close()


# ---- Topics and selectors ----


@scenario
def topic(trial: Trial) -> None:
    clients = [trial.client() for _ in range(TOPIC_SUBSCRIPTIONS_MAX // SUBSCRIPTIONS_MAX)]
    with trial.measures(f"{TOPIC_SUBSCRIPTIONS_MAX:,} SUBSCRIBEs to a topic"):
        for client in clients:
            for number in range(SUBSCRIPTIONS_MAX):
                client.write("SUBSCRIBE", {"id": number, "destination": "/topic/t"})
            client.confirm()
    sender = trial.client()
    with trial.measures(f"SEND to {TOPIC_SUBSCRIPTIONS_MAX:,} subscriptions of a topic", LISTED_MS):
        sender.write("SEND", {"destination": "/topic/t"}, b"x")
    with trial.measures(f"COMMIT of {COPIES_MAX:,} transient copies", LISTED_MS):
        sender.write("BEGIN", {"transaction": "t"})
        for _ in range(COPIES_MAX // TOPIC_SUBSCRIPTIONS_MAX):
            sender.write("SEND", {"destination": "/topic/t", "transaction": "t"}, b"x")
        sender.call("COMMIT", {"transaction": "t"})
    with trial.measures("ends of connections with 1,000 topic subscriptions each"):
        for client in clients:
            client.close()


@scenario
def unread(trial: Trial) -> None:
    """Topic subscriptions that do not read, with more messages than memory holds."""
    clients = [trial.client() for _ in range(TOPIC_SUBSCRIPTIONS_MAX // SUBSCRIPTIONS_MAX)]
    for client in clients:
        for number in range(SUBSCRIPTIONS_MAX):
            options = {"ack": "client", "activemq.prefetchSize": 1}
            client.write("SUBSCRIBE", {"id": number, "destination": "/topic/t", **options})
        client.confirm()
    with trial.measures(f"50 SENDs to {TOPIC_SUBSCRIPTIONS_MAX:,} subscriptions that do not read", LISTED_MS):
        trial.fill("/topic/t", 50)
    with trial.measures(f"UNSUBSCRIBE of {SUBSCRIPTIONS_MAX:,} of them"):
        for number in range(SUBSCRIPTIONS_MAX):
            clients[-1].write("UNSUBSCRIBE", {"id": number})
        clients[-1].confirm()
    with trial.measures(f"end of a connection with {SUBSCRIPTIONS_MAX:,} of them", LISTED_MS):
        clients[0].close()
    with trial.measures("ends of the other connections at once", LISTED_MS):
        for client in clients[1:]:
            client.close()


@scenario
def slow(trial: Trial) -> None:
    """Connections that all end at once, as all have more messages of one topic than its policy allows."""
    count, held = CONNECTIONS_MAX - 10, 100
    trial.fill("/queue/held", count * held)
    for _ in range(count):
        client = trial.client()
        client.write(
            "SUBSCRIBE", {"id": 0, "destination": "/queue/held", "ack": "client", "activemq.prefetchSize": held}
        )
        client.write("SUBSCRIBE", {"id": 1, "destination": f"/topic/{LIMITED_TOPIC}", "ack": "client"})
    trial.settle()
    with trial.measures(
        f"ends of {count:,} connections whose subscriptions exceed their memory_limit at once", LISTED_MS
    ):
        trial.fill(f"/topic/{LIMITED_TOPIC}", 1)


@scenario
def cut(trial: Trial) -> None:
    """Connections of truenext clients that end at once, as no client takes them over."""
    count = 15_000
    clients = [trial.client(is_truenext=True) for _ in range(8)]
    trial.fill("/queue/cut", len(clients) * count)
    for client in clients:
        client.write(
            "SUBSCRIBE", {"id": 0, "destination": "/queue/cut", "ack": "client", "activemq.prefetchSize": count}
        )
        client.write("BEGIN", {"transaction": "t"})
        client.write("ACK", {"id": client.take(count).decode(), "transaction": "t"})
        client.call("UNSUBSCRIBE", {"id": 0})
    with trial.measures(f"ends of {len(clients)} connections that were cut at once", LISTED_MS):
        for client in clients:
            client.close()
        time.sleep(TAKEOVER_GRACE_S)


@scenario
def durable(trial: Trial) -> None:
    client, sender = trial.client(client_id="c"), trial.client()
    with trial.measures(f"{SUBSCRIPTIONS_MAX:,} SUBSCRIBEs to durable subscriptions"):
        for number in range(SUBSCRIPTIONS_MAX):
            name = {"activemq.subscriptionName": f"s{number}", "ack": "client"}
            client.write("SUBSCRIBE", {"id": number, "destination": "/topic/d", **name})
        client.confirm()
    with trial.measures(f"SEND to {SUBSCRIPTIONS_MAX:,} durable subscriptions"):
        sender.write("SEND", {"destination": "/topic/d", "persistent": "true"}, b"x" * 2000)
    with trial.measures(f"COMMIT of {COPIES_MAX:,} persistent copies", LISTED_MS):
        sender.write("BEGIN", {"transaction": "t"})
        for _ in range(COPIES_MAX // SUBSCRIPTIONS_MAX):
            sender.write("SEND", {"destination": "/topic/d", "transaction": "t", "persistent": "true"}, b"x")
        sender.call("COMMIT", {"transaction": "t"})


@scenario
def patterns(trial: Trial) -> None:
    clients = [trial.client() for _ in range(TOPIC_SUBSCRIPTIONS_MAX // SUBSCRIPTIONS_MAX)]
    for at, client in enumerate(clients):
        for number in range(SUBSCRIPTIONS_MAX):
            client.write("SUBSCRIBE", {"id": number, "destination": f"/topic/*.{at}.x{number}.>"})
        client.confirm()
    sender = trial.client()
    with trial.measures(f"SEND to {COMPOSITE_MAX} new topics beside {TOPIC_SUBSCRIPTIONS_MAX:,} patterns"):
        topics = ",".join(f"/topic/t{number}.b.c" for number in range(COMPOSITE_MAX))
        sender.call("SEND", {"destination": topics}, b"x")
    with trial.measures("ends of connections with 1,000 patterns of topics each"):
        for client in clients:
            client.close()


def _costly_selectors() -> list[str]:
    """Return selectors that take long to compile or to compare, within the limits."""
    pieces = SELECTOR_PARTS_MAX // 6 - 2
    return [
        *(f"a LIKE '%{'_' * 248}y{number}N%'" for number in range(40)),
        *(" OR ".join(f"a LIKE '%{number}{piece % 10}%'" for piece in range(pieces)) for number in range(5)),
        *(" OR ".join([f"a LIKE '%{'y' * 49}b{number}{'y' * 48}%'"] * 30) for number in range(5)),
        f"a LIKE '{'%yy' * (SELECTOR_PARTS_MAX - 10)}%N'",
        " OR ".join(f"a = {number}" for number in range(pieces)),
        f"a IN ({', '.join(repr(str(number)) for number in range(SELECTOR_PARTS_MAX // 2 - 5))})",
    ]


LARGE_HEADER = "y" * 60_000


@scenario
def selectors(trial: Trial) -> None:
    """Selectors that take long to compile and to compare."""
    for kind in ("topic", "queue"):
        consumer, sender, where = trial.client(), trial.client(), f"/{kind}/s"
        chosen = _costly_selectors()
        with trial.measures(f"SUBSCRIBEs to a {kind} with costly selectors"):
            for number, selector in enumerate(chosen):
                consumer.write("SUBSCRIBE", {"id": number, "destination": where, "ack": "client", "selector": selector})
            consumer.confirm()
        with trial.measures(f"SEND to a {kind}, compared with {len(chosen)} costly selectors"):
            sender.call("SEND", {"destination": where, "a": LARGE_HEADER}, b"x")
        with trial.measures(f"COMMIT of ten such SENDs to a {kind}"):
            sender.write("BEGIN", {"transaction": "t"})
            for number in range(10):
                # No text is known from the comparison of the one before.
                header = chr(ord("e") + number) + LARGE_HEADER
                sender.write("SEND", {"destination": where, "transaction": "t", "a": header}, b"x")
            sender.call("COMMIT", {"transaction": "t"})
    sender = trial.client()
    for number in range(100):
        sender.write("SEND", {"destination": "/queue/many", "a": f"{number}{LARGE_HEADER}"}, b"x")
    sender.confirm()
    with trial.measures("search of a queue for a costly selector"):
        sender.call("SUBSCRIBE", {"id": "x", "destination": "/queue/many", "selector": _costly_selectors()[0]})
    with trial.measures("browser with a costly selector"):
        options = {"browser": "true", "selector": _costly_selectors()[45]}
        sender.call("SUBSCRIBE", {"id": "b", "destination": "/queue/many", **options})
    sender.call("SUBSCRIBE", {"id": "r", "destination": "/temp-queue/r"})
    with trial.measures("purge with a costly selector"):
        request = json.dumps({"queue": "many", "selector": _costly_selectors()[1], "dry_run": True})
        sender.call("SEND", {"destination": "/control/purge", "reply-to": "/temp-queue/r"}, request.encode())


@scenario
def backlog(trial: Trial) -> None:
    """Queues with as many messages in memory as it may hold."""
    client = trial.client(client_id="c")
    client.write(
        "SUBSCRIBE",
        {
            "id": "d",
            "destination": "/topic/t",
            "activemq.subscriptionName": "d",
            "ack": "client-individual",
            "activemq.prefetchSize": 1,
        },
    )
    client.write("SUBSCRIBE", {"id": "t", "destination": "/topic/u", "ack": "client", "activemq.prefetchSize": 1})
    client.confirm()
    with trial.measures("150,000 SENDs to a durable subscription, more than fit into memory"):
        trial.fill("/topic/t", 150_000)
    with trial.measures("UNSUBSCRIBE of a durable subscription with a backlog", LISTED_MS):
        client.call("UNSUBSCRIBE", {"id": "d", "activemq.subscriptionName": "d"})
    with trial.measures("150,000 SENDs to a topic subscription"):
        trial.fill("/topic/u", 150_000)
    with trial.measures("UNSUBSCRIBE of a subscription with a backlog", LISTED_MS):
        client.call("UNSUBSCRIBE", {"id": "t"})


@scenario
def memory(trial: Trial) -> None:
    """More messages than fit into memory, in one queue and in very many."""
    with trial.measures("300,000 SENDs to a queue, twice the memory for messages"):
        trial.fill("/queue/a", 300_000)
    with trial.measures("SENDs to 30,000 further queues"):
        _send_to_each(trial.client(), "n", 30_000)
    with trial.measures("150,000 more SENDs beside 30,000 queues"):
        trial.fill("/queue/a", 150_000)


@scenario
def expired(trial: Trial) -> None:
    client = trial.client()
    client.write(
        "SUBSCRIBE",
        {"id": 1, "destination": "/queue/e", "ack": "client-individual", "activemq.prefetchSize": 1},
    )
    client.confirm()
    until = int(time.time() * 1000) + 8000
    trial.fill("/queue/e", 1)
    ack = client.take(1)
    trial.fill("/queue/e", 100_000, expires=until)
    time.sleep(max(0.0, until / 1000 - time.time()))
    with trial.measures("dispatch where 100,000 messages have just expired", STEP_MS // 2):
        client.call("ACK", {"id": ack.decode()})
        client.confirm()


@scenario
def delayed(trial: Trial) -> None:
    """Many messages whose retry is due at the same time."""
    trial.fill("/queue/d", 60_000)
    client = trial.client()
    until = time.monotonic() + 12
    for number in range(3):
        client.write(
            "SUBSCRIBE",
            {"id": number, "destination": "/queue/d", "ack": "client", "activemq.prefetchSize": 20_000},
        )
        ack = client.take(20_000)
        delay = int((until - time.monotonic()) * 1000)
        client.write("NACK", {"id": ack.decode(), "truenext-delay": delay})
        client.call("UNSUBSCRIBE", {"id": number})
    with trial.measures("60,000 retries that are due at once", STEP_MS // 2):
        time.sleep(max(0, until - time.monotonic()) + 0.5)


@scenario
def cron(trial: Trial) -> None:
    """Cron expressions that take long to read and to compute."""
    terms = ",".join(f"*/{number}" for number in range(1, 19))
    headers = {"destination": "/queue/c", "persistent": "false"}
    client = trial.client()
    with trial.measures(f"COMMIT of {TRANSACTION_CRON_SENDS_MAX} costly cron expressions"):
        client.write("BEGIN", {"transaction": "t"})
        for number in range(TRANSACTION_CRON_SENDS_MAX):
            rare = f"{terms} {number % 24} 29 2 */7"
            client.write("SEND", {**headers, "transaction": "t", "AMQ_SCHEDULED_CRON": rare}, b"x")
        client.call("COMMIT", {"transaction": "t"})
    never = frame("SEND", {**headers, "AMQ_SCHEDULED_CRON": "0 0 */31 * 0#2"}, b"x")
    refused = trial.client(is_truenext=True)
    with trial.measures("1,000 SENDs with a cron expression that has no next time"):
        refused.write_frames(never * 1000)
        refused.confirm()


def _send_to_each(client: Client, prefix: str, count: int, **headers: Any) -> None:
    """Send one message to each of `count` queues."""
    headers = {"persistent": "false", **headers}
    for first in range(0, count, 1000):
        numbers = range(first, min(first + 1000, count))
        client.write_frames(
            b"".join(frame("SEND", {"destination": f"/queue/{prefix}.{number}", **headers}, b"x") for number in numbers)
        )
    client.confirm()


NEW_QUEUES = (TRANSACTION_MESSAGES_MAX + TRANSACTION_QUEUE_COUNT * TRANSACTION_QUEUES_UNCOUNTED) // (
    1 + TRANSACTION_QUEUE_COUNT
)
"""Queues to which one transaction can send."""


@scenario
def queues(trial: Trial) -> None:
    """Very many queues, new and with wildcard consumers."""
    count, sender, receiver = 30_000, trial.client(), trial.client()
    sender.write("BEGIN", {"transaction": "t"})
    _send_to_each(sender, "w", NEW_QUEUES, transaction="t")
    with trial.measures(f"COMMIT of sends to {NEW_QUEUES:,} new queues", LISTED_MS):
        sender.call("COMMIT", {"transaction": "t"})
    _send_to_each(sender, "w", count)
    subscribe = {"destination": "/queue/w.*", "ack": "client", "activemq.prefetchSize": WINDOW_MAX}
    with trial.measures(f"a wildcard consumer joins {count:,} queues"):
        receiver.write("SUBSCRIBE", {"id": 0, **subscribe})
        receiver.take(HELD_MAX // 2)
    with trial.measures(f"UNSUBSCRIBE of a wildcard consumer of {count:,} queues that holds a window", LISTED_MS):
        receiver.call("UNSUBSCRIBE", {"id": 0})
    for number in range(3):
        receiver.write("SUBSCRIBE", {"id": number, **subscribe})
    receiver.take(HELD_MAX // 2)
    sender.write("BEGIN", {"transaction": "t"})
    _send_to_each(sender, "w", NEW_QUEUES, transaction="t")
    with trial.measures(f"COMMIT of sends to {NEW_QUEUES:,} queues of 3 wildcard consumers", LISTED_MS):
        sender.call("COMMIT", {"transaction": "t"})
    with trial.measures(f"end of a connection with 3 wildcard consumers of {count:,} queues", LISTED_MS):
        receiver.close()


@scenario
def scrapes(trial: Trial) -> None:
    """Figures of the metrics of very many queues, all of which could have metrics of their own."""
    _send_to_each(trial.client(), "scraped", SCRAPED_QUEUES)
    figures: SimpleQueue[Figures] = SimpleQueue()
    with trial.measures(f"figures of {SCRAPED_QUEUES:,} queues, {METRICS_QUEUES_MAX:,} by name", SCRAPE_STEP_MS):
        trial.call(lambda broker: broker.control.collect(["*.new", "scraped.>"], figures.put))
        figures.get(timeout=ANSWER_S)


@scenario
def wildcards(trial: Trial) -> None:
    """Very many pairs of a queue and a wildcard consumer."""
    sender, owner = trial.client(), trial.client()
    _send_to_each(sender, "e", 400)
    subscribe = {"destination": "/queue/e.*", "ack": "client", "activemq.prefetchSize": 1}
    for number in range(500):
        owner.write("SUBSCRIBE", {"id": number, **subscribe, "activemq.exclusive": "true"})
    owner.confirm()
    with trial.measures("end of a connection with 500 exclusive wildcard consumers of 400 queues", LISTED_MS):
        owner.close()
    for first in range(0, 30_000, 1000):
        numbers = range(first, first + 1000)
        headers = (
            {"destination": f"/queue/g.{each % 1000}", "JMSXGroupID": f"g{each * 7919 % 30_000}"} for each in numbers
        )
        sender.write_frames(b"".join(frame("SEND", each, b"x") for each in headers))
    sender.confirm()
    clients = [trial.client(is_truenext=True) for _ in range(50)]
    with trial.measures("50 wildcard consumers of 1,000 queues with groups come", LISTED_MS):
        for client in clients:
            client.write(
                "SUBSCRIBE",
                {"id": 1, "destination": "/queue/g.*", "ack": "client-individual", "activemq.prefetchSize": 600},
            )
        for client in clients:
            client.drain()
    with trial.measures("these 50 go", LISTED_MS):
        for client in clients:
            client.close()


@scenario
def everything(trial: Trial) -> None:
    """Ends of connections with as many subscriptions and transactions as one may have."""
    for kind in ("durable subscriptions", "temporary queues", "topic subscriptions", "consumers of as many queues"):
        client = trial.client(client_id="c")
        for number in range(SUBSCRIPTIONS_MAX):
            headers: dict[str, Any] = {"id": number, "ack": "client"}
            if kind == "temporary queues":
                headers["destination"] = f"/temp-queue/q{number}"
            elif kind == "consumers of as many queues":
                headers["destination"] = f"/queue/q{number}"
            else:
                headers["destination"] = "/topic/t"
            if kind == "durable subscriptions":
                headers["activemq.subscriptionName"] = f"d{number}"
            client.write("SUBSCRIBE", headers)
        client.confirm()
        for number in range(TRANSACTIONS_MAX):
            client.write("BEGIN", {"transaction": number})
            client.write_frames(frame("SEND", {"transaction": number, "destination": "/queue/q"}) * 300)
        with trial.measures(f"end of a connection with {SUBSCRIPTIONS_MAX} {kind} and {TRANSACTIONS_MAX} transactions"):
            client.call("DISCONNECT", {})


@scenario
def producers(trial: Trial) -> None:
    client = trial.client(is_truenext=True)
    names = [f"p{number}" for number in range(5000)]
    for name in names:
        client.write("SEND", {"destination": "/queue/q", "truenext-producer": name, "truenext-number": 1}, b"x")
    client.confirm()
    with trial.measures("DISCONNECT that names 5000 producers"):
        client.call("DISCONNECT", {"truenext-forget": json.dumps(names)})


# ---- The table ----


@scenario
def many_queues(trial: Trial) -> None:
    """Answers about many queues, the rates of all of them beside."""
    client = trial.client()
    for first in range(0, MANY_QUEUES, 1000):
        numbers = range(first, min(first + 1000, MANY_QUEUES))
        client.write_frames(b"".join(frame("SEND", {"destination": f"/queue/many.{each}"}, b"x") for each in numbers))
    client.confirm()
    client.call("SUBSCRIBE", {"id": "r", "destination": "/temp-queue/r"})
    for verb, request in (
        ("queues", None),
        *(("queues", {"order": order, "limit": 50}) for order in ("name", "waiting", "oldest", "rate")),
        ("queues", {"name": "99", "order": "oldest"}),
        ("status", None),
    ):
        body = b"" if request is None else json.dumps(request).encode()
        # An answer of megabytes is copied as a whole.
        limit_ms = STEP_MS if (verb, request) == ("queues", None) else SLICE_MS
        with trial.measures(f"{verb} {body.decode()} of {MANY_QUEUES:,} queues", limit_ms):
            client.write("SEND", {"destination": f"/control/{verb}", "reply-to": "/temp-queue/r"}, body)
            client.take_answer()


def calibration_ms() -> float:
    """Return the processor time, in ms, of a fixed piece of Python: the best of some."""
    best = 1e9
    for _ in range(7):
        started = time.thread_time()
        numbers: dict[int, tuple[int, str]] = {}
        for number in range(20_000):
            numbers[number] = (number, "x")
        for number in range(0, 20_000, 2):
            del numbers[number]
        sorted(numbers.values())
        best = min(best, time.thread_time() - started)
    return best * 1000


def run(names: Sequence[str], folder: Path) -> list[Row]:
    """Run scenarios, each with a broker of its own."""
    rows: list[Row] = []

    async def serve(name: str) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as data:
            rows.extend(await _run_scenario(name, Path(data), steps))

    threshold = gc.get_threshold()
    with Steps() as steps:
        for name in names:
            # As `truenext serve` does.
            _tune_garbage_collector()
            asyncio.run(serve(name))
            gc.unfreeze()
    gc.set_threshold(*threshold)
    return rows


def _call_soon(loop: asyncio.AbstractEventLoop, broker: Broker, function: Callable[[Broker], object]) -> None:
    loop.call_soon_threadsafe(function, broker)


async def _run_scenario(name: str, data: Path, steps: Steps) -> list[Row]:
    loop = asyncio.get_running_loop()
    with closing(EmbeddedStore(data)) as store, closing(HistoryWriter(data / "history", on_rotate=lambda: None)) as log:
        store.sync_history = log.sync
        messages = int(MEMORY_LIMIT * MEMORY_SHARE)
        engine, recovered = recover(
            store,
            Policies(by_pattern={LIMITED_TOPIC: Policy(memory_limit=1), ONE_ATTEMPT_QUEUE: Policy(attempts_max=1)}),
            memory_limit=messages,
            queues_memory_limit=MEMORY_LIMIT - messages - BROKER_BYTES,
            history=log,
        )
        with closing(Broker(engine, store, loop, history=log)) as broker:
            await broker.start(after_clean_stop=recovered.clean_stop)
            listener = Listener(
                parse_url("stomp://127.0.0.1:0"),
                broker,
                loop,
                identity=recovered.identity,
                server_name="truenext/bench",
                places=Places(CONNECTIONS_MAX, CONNECTIONS_BEFORE_LOGIN_MAX),
                tls=None,
            )
            call = partial(_call_soon, loop, broker)
            trial = Trial(name, int(listener.url.rpartition(":")[2]), steps, call)
            try:
                await asyncio.to_thread(SCENARIOS[name], trial)
            finally:
                trial.close()
                listener.stop_reading()
                await broker.stop()
                await listener.close()
            return trial.rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"scenarios: {', '.join(SCENARIOS)}")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="folder for the brokers' data")
    options = parser.parse_args(arguments)
    print(f"a fixed piece of Python takes {calibration_ms():.1f} ms")
    print(f"{'longest step':>12}  {'aim':>7}  event")
    for name in options.names or SCENARIOS:
        for row in run([name], options.dir):
            print(f"{row.step_ms:9.1f} ms  {row.limit_ms:4} ms  {row.event}  [{row.callback}]", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
