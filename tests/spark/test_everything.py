"""Test of the contract with everything at once, by the broker's own history.

Producers, consumers of every kind, an operator and two ends of the broker (one of them a kill -9), under limits so
small that hardly anything stays in memory; then the audit reads the history.

    TRUENEXT_SECONDS=600 TRUENEXT_SEED=7 pytest -s tests/spark/test_everything.py
"""

import json
import os
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess
from tests.integration.raw_client import RawClient, UnexpectedError
from truenext.history.export import export_all
from truenext.wire.stomp.frame import Frame

SECONDS = float(os.environ.get("TRUENEXT_SECONDS", "8"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

CONNECTION_LOST = (OSError, EOFError)
"""Errors by which a client notices the end of the broker."""
LOYALTY_SECONDS = 4.0
"""Longest time of a consumer's connection, before the consumer connects again."""
AHEAD_MAX = 2000
"""Waiting messages at which producers pause."""

CONFIG = """
[policy]
page_size = 7
memory_limit = "20KB"
attempts_max = 3
first_delay_ms = 20
delay_ms = 60
backoff = 2.0
jitter = 0.2
expired = "dead-letter"
[policy.held]
while_waiting = "block"
[policy.concurrent]
store_and_dispatch = "concurrent"
"""

QUEUES = ["work", "held", "concurrent", "grouped", "scheduled", "selected"]


class Everything:
    """The broker and its users, each on a thread and a connection of its own."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.done: Counter[str] = Counter()
        """Counts of what was done, so that a test of nothing is noticed."""
        self.faults: list[str] = []
        self._is_over = threading.Event()
        self._is_there = threading.Event()
        self._threads: list[threading.Thread] = []
        self._dice = random.Random(SEED)
        self._waiting = 0

    def hire(self, role: Callable[["Everything", RawClient, random.Random], None]) -> None:
        thread = threading.Thread(
            target=self._work, args=(role, random.Random(self._dice.random())), name=role.__name__
        )
        self._threads.append(thread)
        thread.start()

    def _work(self, role: Callable[["Everything", RawClient, random.Random], None], dice: random.Random) -> None:
        """Connect and work again and again, whatever ends the connection."""
        while not self._is_over.is_set():
            if not self._is_there.wait(0.1):
                continue
            try:
                with self.connected() as client:
                    role(self, client, dice)
            except CONNECTION_LOST:
                time.sleep(0.05)
            except UnexpectedError as refused:
                # A subscription may end while the operator looks at it.
                if not re.search("full|there is no durable subscription", str(refused)):
                    self.faults.append(f"{role.__name__}: {refused}")
                    return
            except AssertionError as error:
                if self._is_there.is_set():
                    self.faults.append(f"{role.__name__}: {error}")
                    return

    @contextmanager
    def connected(self, client_id: str | None = None) -> Iterator[RawClient]:
        client = RawClient(self.broker.port)
        try:
            client.send_connect("1.2", "0,0", client_id=client_id)
            yield client
        finally:
            client.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._is_there.set()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join(2 * PATIENCE_SECONDS)
        assert not [thread.name for thread in self._threads if thread.is_alive()]

    def work_over_two_ends(self) -> None:
        """Let all work, while the broker ends twice: by a kill -9, and cleanly."""
        for role in ROLES:
            self.hire(role)
        with self.running():
            for is_clean in (False, True):
                time.sleep(SECONDS / 3)
                self._is_there.clear()
                self.end_broker(is_clean=is_clean)
                self._is_there.set()
            time.sleep(SECONDS / 3)
        assert self.faults == []
        print(dict(self.done))

    def end_broker(self, *, is_clean: bool) -> None:
        self.broker.restart(is_clean=is_clean)

    def is_running(self) -> bool:
        return self._is_there.is_set() and not self._is_over.is_set()

    def rest(self, waiting: int) -> None:
        """Pass the number of waiting messages, seen by the operator, to the producers."""
        self._waiting = waiting

    def await_capacity(self) -> None:
        while self._waiting > AHEAD_MAX and self.is_running():
            time.sleep(0.01)


# ---- Who sends ----


def produce(everything: Everything, client: RawClient, dice: random.Random) -> None:
    while everything.is_running():
        everything.await_capacity()
        in_transaction = dice.random() < 0.1
        if in_transaction:
            client.begin("t")
        for _ in range(dice.randrange(1, 30)):
            headers, body = {}, b"poison" if dice.random() < 0.02 else bytes(dice.choice((10, 100, 3000)))
            queue = dice.choice(QUEUES)
            if queue == "grouped" and dice.random() < 0.9:
                headers["JMSXGroupID"] = f"group {dice.randrange(12)}"
                if dice.random() < 0.05:
                    headers["JMSXGroupSeq"] = "-1"
            if queue == "selected":
                headers["colour"] = dice.choice(("red", "blue", "green"))
            if queue == "scheduled":
                headers["AMQ_SCHEDULED_DELAY"] = str(dice.choice((0, 50, 400)))
                if dice.random() < 0.2:
                    headers |= {"AMQ_SCHEDULED_PERIOD": "50", "AMQ_SCHEDULED_REPEAT": "3"}
            if dice.random() < 0.1:
                headers["expires"] = str(int(time.time() * 1000) + dice.choice((50, 1000, 100_000)))
            client.send(
                queue,
                body,
                persistent=dice.random() < 0.6,
                priority=dice.randrange(10),
                transaction="t" if in_transaction else None,
                headers=headers,
            )
            everything.done[queue] += 1
        if in_transaction and dice.random() < 0.3:
            client.abort("t")
        elif in_transaction:
            client.commit("t")
        else:
            client.send("work", b"", persistent=True, confirmed=True)
        time.sleep(0.005)


def publish(everything: Everything, client: RawClient, dice: random.Random) -> None:
    while everything.is_running():
        everything.await_capacity()
        topic = dice.choice(("news.sport", "news.weather", "VirtualTopic.orders"))
        destination = dice.choice((f"/topic/{topic}", f"/topic/{topic}", f"/topic/{topic},/queue/work"))
        headers = {"destination": destination, "priority": str(dice.randrange(10)), "persistent": "true"}
        client.send_frame("SEND", headers, bytes(100), confirmed=dice.random() < 0.1)
        everything.done["published"] += 1
        time.sleep(0.005)


# ---- Who takes ----


def _settle(everything: Everything, client: RawClient, message: Frame, dice: random.Random) -> None:
    if message.body == b"poison" or dice.random() < 0.01:
        options = dice.choice(({}, {}, {"truenext-delay": "30"}, {"truenext-reject": "true"}))
        client.nack(message, headers=options)
        everything.done["refused"] += 1
    else:
        client.ack(message)
        everything.done["taken"] += 1


def _consume(queue: str, **subscribed: str) -> Callable[[Everything, RawClient, random.Random], None]:
    """Make a role: consume a queue for a limited time on one connection, which then ends in one of several ways."""

    def consume(everything: Everything, client: RawClient, dice: random.Random) -> None:
        client.subscribe(queue, prefetch=dice.choice((1, 10, 100, None)), headers=subscribed)
        deadline = time.monotonic() + dice.uniform(0, LOYALTY_SECONDS)
        while everything.is_running() and time.monotonic() < deadline:
            try:
                message = client.message(0.2)
            except TimeoutError:
                continue
            _settle(everything, client, message, dice)
        how = dice.random()
        if how < 0.3:
            client.crash()
            everything.done["crashed"] += 1
        elif how < 0.6:
            client.unsubscribe()

    consume.__name__ = f"take from {queue} {subscribed}"
    return consume


def consume_one_by_one(everything: Everything, client: RawClient, dice: random.Random) -> None:
    client.subscribe("work", ack="auto", prefetch=dice.choice((1, 100)))
    while everything.is_running():
        try:
            client.message(0.2)
            everything.done["taken"] += 1
        except TimeoutError:
            continue


def forward(everything: Everything, client: RawClient, dice: random.Random) -> None:
    """Forward messages in transactions, with cumulative ACKs."""
    client.subscribe("concurrent", ack="client", prefetch=50)
    while everything.is_running():
        messages = []
        try:
            messages = [client.message(0.2) for _ in range(dice.randrange(1, 20))]
        except TimeoutError:
            continue
        finally:
            if messages:
                client.begin("t")
                client.send("out", b"", persistent=True, transaction="t")
                client.ack(messages[-1], transaction="t")
                if dice.random() < 0.2:
                    client.abort("t")
                else:
                    client.commit("t")
                everything.done["transactions"] += 1


def subscribe_durably(everything: Everything, other: RawClient, dice: random.Random) -> None:
    # A client id is said at the beginning of a connection.
    other.disconnect()
    with everything.connected("reader") as client:
        headers = {"activemq.subscriptionName": "news", "destination": "/topic/news.>"}
        client.subscribe("", prefetch=20, headers=headers)
        for _ in range(dice.randrange(500)):
            if not everything.is_running():
                return
            try:
                _settle(everything, client, client.message(0.2), dice)
                everything.done["read of a topic"] += 1
            except TimeoutError:
                continue
        if dice.random() < 0.2:
            client.send_frame("UNSUBSCRIBE", {"id": "1", "durable": "true"} | headers, confirmed=True)
    time.sleep(dice.random() / 4)


def listen(everything: Everything, client: RawClient, dice: random.Random) -> None:
    client.subscribe("", ack="auto", headers={"destination": "/topic/news.*"})
    for _ in range(dice.randrange(300)):
        if not everything.is_running():
            return
        try:
            client.message(0.2)
            everything.done["heard"] += 1
        except TimeoutError:
            continue


# ---- Who looks after it ----


def operate(everything: Everything, client: RawClient, dice: random.Random) -> None:
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"}, confirmed=True)

    def control_request(verb: str, **arguments: object) -> object:
        client.send_frame(
            "SEND",
            {"destination": f"/control/{verb}", "reply-to": "/temp-queue/answers"},
            json.dumps(arguments).encode() if arguments else b"",
        )
        answer = json.loads(client.message().body)
        everything.done[verb] += 1
        return answer

    while everything.is_running():
        queues = control_request("queues")
        assert isinstance(queues, list)
        everything.rest(sum(queue["waiting"] for queue in queues if not queue["name"].startswith("DLQ.")))
        status = control_request("status")
        assert isinstance(status, dict)
        assert status["stuck"] == [], status
        names = {queue["name"] for queue in queues}
        paused = dice.choice(sorted(names)) if names else None
        if paused is not None and dice.random() < 0.3:
            control_request("pause", queue=paused)
            time.sleep(dice.random() / 10)
        for queue in [queue["name"] for queue in queues if queue["paused"]] + ([paused] if paused else []):
            control_request("resume", queue=queue)
        for dead in [name for name in names if name.startswith("DLQ.")]:
            if dice.random() < 0.3:
                control_request("redrive", queue=dead, limit=20)
        if "out" in names:
            control_request(*dice.choice((("purge",), ("purge",))), queue="out", limit=100)
        if "work" in names and dice.random() < 0.3:
            control_request("move", queue="work", to="held", limit=10, selector="JMSPriority < 3")
        if names and dice.random() < 0.3:
            headers = {"browser": "true", "selector": "JMSPriority > 4"}
            name = dice.choice(sorted(names))
            if name.startswith("subscription,"):
                headers["destination"] = "/subscription/" + ",".join(name.split(",")[1:3])
            client.subscribe(name, ack="auto", subscription="look", headers=headers)
            while client.message().headers.get("browser") != "end":
                everything.done["shown"] += 1
            client.unsubscribe("look")
        time.sleep(0.05)


ROLES = [
    produce,
    produce,
    publish,
    consume_one_by_one,
    forward,
    subscribe_durably,
    listen,
    operate,
    _consume("work"),
    _consume("work", **{"truenext-express": "true"}),
    _consume("held"),
    _consume("held", **{"activemq.priority": "5"}),
    _consume("scheduled"),
    _consume("scheduled", **{"activemq.exclusive": "true"}),
    _consume("grouped"),
    _consume("grouped"),
    _consume("grouped"),
    _consume("selected", selector="colour = 'red'"),
    _consume("selected", selector="colour = 'red' AND JMSPriority > 6"),
    _consume("selected"),
    _consume("Consumer.one.VirtualTopic.orders"),
]


@pytest.mark.alternates("stories")
@pytest.mark.timeout(180 + 4 * int(SECONDS))
def test_the_contract_holds_with_everything_at_once_over_two_ends_of_the_broker(tmp_path: Path) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_SECONDS={SECONDS}")
    config = tmp_path / "truenext.toml"
    config.write_text(CONFIG)
    broker = BrokerProcess(tmp_path, ["--config", str(config)])
    everything = Everything(broker)
    try:
        broker.start()
        everything.work_over_two_ends()
        broker.stop()
    finally:
        broker.clean_up()
    judge([broker.data], tmp_path)


def judge(folders: Sequence[Path], folder: Path) -> None:
    """Check the history of a broker that has ended, in its folders. `folder` is for the report and for files."""
    audit = subprocess.run(
        [TRUENEXT, "audit", *map(str, folders), "--master", "local[2]", "--out", str(folder / "report")],
        capture_output=True,
        text=True,
        check=False,
    )
    if audit.returncode:
        tables = ("violations", "lost", "duplicates", "consumers", "stuck") if audit.returncode == 1 else ()
        rows = [row for table in tables for row in pq.read_table(folder / "report" / table).to_pylist()[:10]]
        pytest.fail("\n".join([audit.stdout, audit.stderr, *map(str, rows)]))
    assert "WARN" not in audit.stderr
    assert "log4j" in (folder / "report" / "spark.log").read_text()
    # The broker itself exports what it has time for: on a slow machine it may have ended before the first file.
    of_kind = Counter(
        kind
        for file in export_all(folders[0] / "history", folder / "exported")
        for kind in pq.read_table(file, columns=["kind"], partitioning=None).column("kind").to_pylist()
    )
    assert not [kind for kind in ("accepted", "dispatched", "acknowledged") if of_kind[kind] < 500], of_kind
    print(of_kind)
