"""Tests of drains at a broker over sockets: who waits, who goes on, what is said to be left, and how a drain ends."""

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random, SystemRandom
from typing import Any
from unittest import mock

import pytest

import truenext
import truenext.blocking
from tests.drawing import each_one_of
from tests.integration.broker_here import broker_here
from tests.integration.broker_process import PATIENCE_SECONDS, QUIET_SECONDS, BrokerProcess
from tests.integration.cutting_proxy import CuttingProxy
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.integration.raw_client import bodies
from tests.integration.working_thread import WorkingThread
from truenext.broker.drain import RESTRICTION
from truenext.errors import Code, RemoteProtocolError
from truenext.model.limits import CONTROL_ONLY_CONNECTIONS_MAX
from truenext.wire.openwire.consumers import INDIVIDUAL
from truenext.wire.openwire.structures import ExceptionResponse, MessageAck, QueueName

ANSWERS = "/temp-queue/answers"
JMS_QUEUES = ("orders", "done")
DRAINS = int(os.environ.get("TRUENEXT_DRAINS", "1"))
"""Number of drains under load."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(
        tmp_path_factory.mktemp("drain"),
        ["--listen", "openwire://127.0.0.1:0"],
        policy={"attempts_max": 2, "first_delay_ms": 1, "delay_ms": 1},
    )
    broker.start()
    yield broker
    broker.stop()


class Operator:
    """Connection that sends control requests."""

    def __init__(self, broker: BrokerProcess, headers: dict[str, str] | None = None) -> None:
        self._client = broker.connect(headers=headers)
        self._client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS})

    def request(self, verb: str = "drain", **fields: object) -> dict[str, Any]:
        body = json.dumps(fields).encode() if fields else b""
        self._client.send_frame("SEND", {"destination": f"/control/{verb}", "reply-to": ANSWERS}, body)
        report: dict[str, Any] = json.loads(self._client.message().body)
        return report

    def begin(self) -> None:
        report = self.request(draining=True)
        assert (report["draining"], report["error"]) == (True, "")

    def await_drained(self, **counts: int) -> dict[str, Any]:
        """Wait until the broker is drained, and the report has these counts."""
        return self.await_report(drained=True, **counts)

    def await_report(self, **counts: int) -> dict[str, Any]:
        """Wait until the report has these counts, for changes without a receipt."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not counts.items() <= (report := self.request()).items():
            assert time.monotonic() < deadline, report
            time.sleep(0.01)
        return report


@pytest.fixture(autouse=True)
def no_drain_is_left(broker: BrokerProcess) -> Iterator[None]:
    yield
    broker.close_clients()
    operator = Operator(broker)
    operator.request(draining=False)
    for name in broker.queues():
        for verb in ("resume", "purge"):
            operator.request(verb, queue=name)
    broker.close_clients()
    broker.check_log()


def error_of_connection(broker: BrokerProcess, frame: str, headers: dict[str, str]) -> str:
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0")
    client.send_frame(frame, headers)
    error = client.error()
    return f"{error.headers['truenext-code']}: {error.body.decode()}"


# ---- Producers and new connections ----


def test_producer_waits_during_a_drain_and_goes_on_after_it(broker: BrokerProcess) -> None:
    # C31.2
    operator, producer = Operator(broker), broker.connect()
    producer.send("q", b"1", confirmed=True)
    consumer = broker.connect()
    consumer.subscribe("q")
    operator.begin()
    producer.send("q", b"2")
    assert bodies([consumer.message()]) == ["1"]
    time.sleep(QUIET_SECONDS)
    assert not consumer.arrived()
    operator.request(draining=False)
    assert bodies([consumer.message()]) == ["2"]


def test_truenext_producer_is_refused_during_a_drain_and_stays(broker: BrokerProcess) -> None:
    # C31.2
    operator, producer = Operator(broker), broker.connect(sends_connect=False)
    producer.send_connect("1.2", "0,0", headers={"truenext-client": "1"})
    producer.send("q", b"1", confirmed=True)
    broker.output_of("purge", "q")
    operator.begin()
    producer.send("q", b"2", headers={"receipt": "r"})
    error = producer.next_error()
    assert error.headers["truenext-code"] == "no-space"
    assert error.body.decode().startswith("the broker is being drained (truenext drain)")
    operator.request(draining=False)
    producer.send("q", b"3", confirmed=True)


def test_stage_that_sends_more_than_it_acknowledges_goes_on_during_a_drain(broker: BrokerProcess) -> None:
    # C31.2
    operator, producer = Operator(broker), broker.connect()
    stage, last = broker.connect(), broker.connect()
    stage.subscribe("first")
    last.subscribe("second")
    producer.send("first", b"x", persistent=True, confirmed=True)
    operator.begin()
    stage.begin("t")
    stage.ack(stage.message(), transaction="t")
    for number in range(5):
        stage.send("second", bytes(100_000) + b"%d" % number, persistent=True, transaction="t")
    stage.commit("t")
    report = operator.await_report(waiting=0, held=5)
    assert not report["drained"]
    assert [each["queue"] for each in report["queues"]] == ["second"]
    for message in last.messages(5):
        last.ack(message, confirmed=True)
    operator.await_drained()


@pytest.mark.parametrize(
    ("frame", "headers"),
    [
        ("SEND", {"destination": "/queue/q"}),
        ("SUBSCRIBE", {"id": "1", "destination": "/queue/q"}),
        ("BEGIN", {"transaction": "t"}),
    ],
)
def test_new_connection_may_only_send_control_requests(
    broker: BrokerProcess, frame: str, headers: dict[str, str]
) -> None:
    # C31.3, C31.7
    Operator(broker).begin()
    assert error_of_connection(broker, frame, headers) == (
        "draining: the broker is being drained: this connection may only send control requests (SEND to /control/) and "
        "subscribe to its own /temp-queue/ for the answers"
    )
    logged = broker.log.count("client refused")
    error_of_connection(broker, frame, headers)
    # Clients try again and again.
    assert broker.log.count("client refused") == logged
    assert "ready      no: the broker is being drained" in broker.output_of("status")
    assert broker.status()["ready"] is False


def test_connection_of_a_spark_query_may_do_everything_during_a_drain(broker: BrokerProcess) -> None:
    # C31.3
    Operator(broker).begin()
    task = broker.connect(sends_connect=False)
    task.send_connect("1.2", "0,0", client_id="Spark")
    task.subscribe("q")
    task.send("q", b"1")
    task.ack(task.message(), confirmed=True)


def test_takeover_may_do_everything_during_a_drain(broker: BrokerProcess) -> None:
    # C31.3
    former = broker.connect(sends_connect=False)
    secret = former.send_connect("1.2", "0,0", headers={"truenext-client": "1"}).headers["truenext-secret"]
    Operator(broker).begin()
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", headers={"truenext-client": "2", "truenext-secret": secret})
    client.subscribe("q")
    former.close()


def test_broker_is_not_drained_after_a_restart(tmp_path: Path) -> None:
    # C31.1
    broker = BrokerProcess(tmp_path)
    broker.start()
    assert broker.output_of("drain") == "Nothing is left to wait for.\n"
    for is_clean in (True, False):
        Operator(broker).begin()
        assert broker.status()["ready"] is False
        broker.restart(is_clean=is_clean)
        assert broker.status()["ready"] is True
        broker.connect().send("q", b"1", confirmed=True)
        broker.output_of("purge", "q")
    broker.close_clients()
    broker.stop()


def test_more_clients_than_beyond_a_limit_may_send_control_requests(broker: BrokerProcess) -> None:
    Operator(broker).begin()
    operators = [Operator(broker) for _ in range(CONTROL_ONLY_CONNECTIONS_MAX + 5)]
    assert all(each.request()["draining"] for each in operators)


def test_client_without_control_requests_is_refused_at_its_login() -> None:
    # C31.3: JMS clients have none.
    async def run() -> None:
        async with broker_here() as listener:
            client = mock.Mock(has_control_requests=False)
            listener._connections.add(client)
            with pytest.raises(RemoteProtocolError, match=r"^the broker is being drained: try again later$") as refused:
                listener._assign_place(client, True, RESTRICTION)
            assert refused.value.code is Code.DRAINING
            listener._connections.remove(client)

    asyncio.run(run())


RIGHTS = {"root": "admin = true", "eyes": "monitor = true", "shop": 'send = [">"]\ntake = [">"]'}


def _users_file(folder: Path) -> list[str]:
    """Write a users file. Return the option with its name."""
    users, word = folder / "users.toml", folder / "word"
    users.write_text("".join(f'[user.{name}]\npassword_file = "word"\n{right}\n' for name, right in RIGHTS.items()))
    word.write_text("word")
    for file in (users, word):
        file.chmod(0o600)
    return ["--users", str(users)]


def test_rights_of_users_during_a_drain(tmp_path: Path) -> None:
    # C31.3
    broker = BrokerProcess(tmp_path, _users_file(tmp_path))
    broker.start()
    try:
        root, eyes, shop = ({"login": name, "passcode": "word"} for name in RIGHTS)
        operator = Operator(broker, root)
        for headers in (eyes, shop):
            client = broker.connect(headers=headers)
            client.send_frame("SEND", {"destination": "/control/drain", "reply-to": ANSWERS}, b'{"draining": true}')
            assert client.error().headers["truenext-code"] == "forbidden"
        operator.begin()
        broker.connect(headers=eyes)
        refused = broker.connect(sends_connect=False)
        refused.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"} | shop)
        error = refused.next_frame()
        assert error.headers["truenext-code"] == "draining"
        assert error.body.decode() == (
            "the broker is being drained, and only users with the right monitor or admin may log in now: try again "
            "later"
        )
        broker.close_clients()
        assert Operator(broker, root).request(draining=False)["draining"] is False
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()


# ---- What is left ----


def test_excepted_messages_are_counted_by_kind(broker: BrokerProcess) -> None:
    # C31.4
    operator, client = Operator(broker), broker.connect()
    client.send("later", b"", persistent=True, headers={"AMQ_SCHEDULED_DELAY": "600000"}, confirmed=True)
    client.send("DLQ.other", b"", confirmed=True)
    client.send("DLQ.other", b"", confirmed=True)
    client.send("Spark.source.main.1f", b"", confirmed=True)
    client.send("Spark.sink.main.2f", b"", confirmed=True)
    client.send("resting", b"", confirmed=True)
    broker.output_of("pause", "resting")
    client.send("failing", b"", confirmed=True)
    client.subscribe("failing", subscription="f")
    client.nack(client.message(), headers={"truenext-delay": "600000"})
    client.subscribe("DLQ.other", subscription="dead", prefetch=1)
    client.message()
    operator.begin()
    report = operator.await_drained()
    kinds = ("scheduled", "delayed", "paused", "dead", "kept")
    assert [report[kind] for kind in kinds] == [1, 1, 1, 2, 2]
    assert broker.output_of("drain") == (
        "Nothing is left to wait for. There are still: 1 scheduled, 1 waiting for their next try, 1 in paused queues, "
        "2 dead, 2 kept by queries of Spark.\n"
    )
    broker.output_of("unschedule", "later")


def test_bundles_and_second_marks_of_queries_are_left(broker: BrokerProcess) -> None:
    # C31.4
    client = broker.connect()
    for queue in ("Spark.source.main.1f", "Spark.source.main.1f", "Spark.source.main.1f.0"):
        client.send(queue, b"", confirmed=True)
    report = Operator(broker).request(draining=True)
    assert (report["waiting"], report["kept"], report["queues_total"]) == (2, 1, 2)
    assert report["no_consumer_total"] == 0


def test_messages_of_consumers_transactions_and_temporary_queues_are_left(broker: BrokerProcess) -> None:
    # C31.4
    operator, client, other = Operator(broker), broker.connect(), broker.connect()
    for number in range(3):
        client.send("a.b", b"%d" % number, confirmed=True)
    client.subscribe("a.*", prefetch=2)
    client.begin("t")
    client.ack(client.message(), transaction="t")
    client.message()
    other.send_frame("SUBSCRIBE", {"id": "t", "destination": "/topic/t", "ack": "client"}, confirmed=True)
    client.send_frame("SEND", {"destination": "/topic/t"}, confirmed=True)
    other.message()
    operator.begin()
    report = operator.await_report(held=4)
    rows = {row["queue"]: row for row in report["queues"]}
    assert (rows["a.b"]["held"], rows["a.b"]["consumers"]) == (3, 1)
    assert (rows["/topic/t"]["held"], rows["/topic/t"]["client"]) == (1, f"127.0.0.1:{other.local_port}")
    other.disconnect()
    client.abort("t")
    client.disconnect()
    operator.await_report(waiting=3, held=0, no_consumer_total=1)


# ---- The command ----


def test_drain_without_consumers_is_refused_and_changes_nothing(broker: BrokerProcess) -> None:
    # C31.6
    client = broker.connect()
    client.send("lonely", b"1", confirmed=True)
    done = broker.truenext("drain")
    assert done.returncode == 1
    assert done.stderr == (
        "truenext: messages wait in 1 queue without a consumer, and none could come during a drain: 'lonely'; start "
        "a consumer, or pause or purge the queue, and drain again\n"
    )
    assert broker.status()["ready"] is True
    client.send("lonely", b"2", confirmed=True)
    broker.output_of("pause", "lonely")
    assert "2 in paused queues" in broker.output_of("drain")


def test_command_says_what_is_left_when_the_time_is_over(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.send("q", b"1", confirmed=True)
    client.subscribe("q")
    client.message()
    done = broker.truenext("drain", "--timeout", "100ms")
    assert done.returncode == 1
    assert "0 wait and 1 are held, in q (1 consumer)\n" in done.stderr
    assert done.stderr.endswith(
        "truenext: the time is over, and 0 wait and 1 are held, in q (1 consumer); the broker is still being "
        "drained: run this command again, or end the drain with `truenext drain --undo`\n"
    )
    client.disconnect()
    done = broker.truenext("drain", "--timeout", "0.1")
    assert done.returncode == 1
    assert "in q (0 consumers); no consumer is left for q; the broker" in done.stderr
    assert broker.output_of("drain", "--undo") == "The drain has ended: producers continue.\n"
    assert broker.output_of("drain", "--undo") == "The broker was not being drained.\n"


def test_command_ends_when_another_one_ends_the_drain(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.send("q", b"1", confirmed=True)
    client.subscribe("q")
    operator = Operator(broker)
    timer = threading.Timer(1, operator.request, kwargs={"draining": False})
    timer.start()
    done = broker.truenext("drain", "--timeout", "1m")
    assert done.returncode == 1
    assert "the drain was ended by another command" in done.stderr
    timer.join()


def test_command_ends_without_an_answer_when_the_broker_ends(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    broker.start()
    client = broker.connect()
    client.send("q", b"1", confirmed=True)
    client.subscribe("q")
    timer = threading.Timer(1, broker.kill)
    timer.start()
    assert broker.truenext("drain", "--timeout", "1m").returncode == 2
    timer.join()
    broker.close_clients()


@pytest.mark.parametrize("body", [b"[]", b'{"draining": 1}', b'{"drain": true}'])
def test_wrong_body_is_refused(broker: BrokerProcess, body: bytes) -> None:
    client = broker.connect()
    client.send_frame("SEND", {"destination": "/control/drain", "reply-to": ANSWERS}, body)
    assert client.error().headers["truenext-code"] == "control-request"


# ---- Under load ----


class Worker(WorkingThread):
    """Consumer of a drained broker, in a thread of its own. It fails, pauses and dies at random."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self._client = broker.connect()
        self._client.subscribe("orders", subscription="o", prefetch=20)
        self._client.subscribe("done", subscription="d", prefetch=20)
        self.dies = False

    def work(self) -> None:
        client, random, number = self._client, self._random, 0
        while True:
            try:
                message = client.message(seconds=1.5)
            except TimeoutError:
                return
            number += 1
            dice = random.random()
            if dice < 0.05:
                client.nack(message)
            elif dice < 0.06:
                time.sleep(0.1)
                client.nack(message)
            elif self.dies and number > 50:
                client.crash()
                return
            elif message.headers["destination"] == "/queue/orders":
                # More than it frees.
                client.begin(f"t{number}")
                client.ack(message, transaction=f"t{number}")
                for part in (b"a", b"b"):
                    body = message.body + part * 300
                    client.send("done", body, persistent=True, transaction=f"t{number}")
                client.commit(f"t{number}")
            else:
                client.ack(message)


class JmsWorker(WorkingThread):
    """JMS consumer of a drained broker, in a thread of its own. It dies at random."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        super().__init__()
        random = Random(seed)
        self._remaining = random.randrange(30, 60) if random.random() < 0.5 else None
        self._client = JmsClient(broker, name=f"ID:worker-{seed}")
        self._consumers = {name: self._client.consume(name, 20, value=value) for value, name in enumerate(JMS_QUEUES)}

    def work(self) -> None:
        with closing(self._client), suppress(TimeoutError):
            self._acknowledge()

    def _acknowledge(self) -> None:
        while self._remaining != 0:
            self._remaining = self._remaining and self._remaining - 1
            dispatch = self._client.message(seconds=1.5)
            assert dispatch.message is not None and isinstance(dispatch.destination, QueueName)
            queue, named = dispatch.destination, dispatch.message.message_id
            consumer = self._consumers[queue.name or ""]
            self._client.send(MessageAck(0, False, queue, None, consumer, INDIVIDUAL, named, named, 1))


class Producer(threading.Thread):
    """Producer that sends one message after the other, until it is stopped or its connection ends."""

    def __init__(self, broker: BrokerProcess) -> None:
        super().__init__(daemon=True)
        self._connect(broker)
        self.sent = 0
        self.is_stopped = False

    def _connect(self, broker: BrokerProcess) -> None:
        self._client = broker.connect()

    def _send(self) -> None:
        self._client.send("orders", b"%d" % self.sent, persistent=True, confirmed=True)

    def run(self) -> None:
        # The connection is closed while a drain holds it up.
        with suppress(TimeoutError, OSError, EOFError, ValueError):
            while not self.is_stopped:
                self._send()
                self.sent += 1


class JmsProducer(Producer):
    def _connect(self, broker: BrokerProcess) -> None:
        self._jms_client = JmsClient(broker, name=f"ID:producer-{id(self)}-{time.monotonic()}")

    def run(self) -> None:
        super().run()
        self._jms_client.close()

    def _send(self) -> None:
        self._jms_client.send_text("orders", 10 + self.sent)
        while isinstance(self._jms_client.next(), ExceptionResponse) and not self.is_stopped:
            # It is not told when the drain ends.
            time.sleep(0.02)
            self._jms_client.send_text("orders", 10 + self.sent)


@pytest.mark.timeout(120 + 30 * DRAINS)
def test_drain_under_load_ends_with_nothing_left_while_consumers_fail_pause_and_die(broker: BrokerProcess) -> None:
    """C31.2, C31.4, C31.5: producers stop, and all that they have sent is handled, dead or paused at the end."""
    seed = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed} TRUENEXT_DRAINS={DRAINS}")
    for number in range(DRAINS):
        _drain_under_load(broker, Random(seed + number))
        broker.close_clients()


def _drain_under_load(broker: BrokerProcess, random: Random) -> None:
    operator = Operator(broker)
    for verb in ("resume", "purge"):
        for queue in broker.queues():
            operator.request(verb, queue=queue)
    workers = [Worker(broker, random.randrange(2**32)) for _ in range(4)]
    workers[0].dies = True
    jms_worker = JmsWorker(broker, random.randrange(2**32))
    producers = [Producer(broker), Producer(broker), JmsProducer(broker)]
    for thread in (*producers, *workers, jms_worker):
        thread.start()
    enough = random.randrange(20, 100)
    while min(producer.sent for producer in producers) < enough:
        time.sleep(0.01)
    operator.begin()
    if random.random() < 0.3:
        operator.request("pause", queue="orders")
    report = operator.await_drained(delayed=0)
    sent = [producer.sent for producer in producers]
    time.sleep(0.2)
    assert [producer.sent for producer in producers] == sent, "producers wait"
    facts = broker.queues()
    assert report["dead"] == sum(each.waiting for name, each in facts.items() if name.startswith("DLQ."))
    assert report["paused"] == facts["orders"].waiting
    assert (facts["orders"].unacknowledged, facts["done"].waiting, facts["done"].unacknowledged) == (0, 0, 0)
    for producer in producers:
        producer.is_stopped = True
    operator.request(draining=False)
    for worker in workers:
        worker.join(30)
        assert worker.error is None
    jms_worker.join(30)
    assert jms_worker.error is None


# ---- Clients of truenext ----


@pytest.mark.parametrize("has_users", each_one_of([False, True], ["no-users", "users"]))
def test_clients_that_connect_during_a_drain_wait_for_its_end(tmp_path: Path, has_users: bool) -> None:
    # C31.8
    login: dict[str, Any] = {"user": "shop", "password": "word"} if has_users else {}
    broker = BrokerProcess(tmp_path, _users_file(tmp_path) if has_users else [])
    broker.start()

    async def use(proxy: CuttingProxy) -> None:
        url = f"stomp://127.0.0.1:{proxy.port}"
        async with truenext.connect(url, **login) as client, client.consumer("/queue/a") as consumer:
            received = asyncio.create_task(consumer.receive(PATIENCE_SECONDS))
            operator.begin()
            proxy._end_connections()
            async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
                others = [group.create_task(each) for each in (_send(broker, login), _receive(broker, login))]
                others += [group.create_task(asyncio.to_thread(_receive_blocking, broker, login))]
                command = group.create_task(asyncio.to_thread(_send_by_command, broker, login))
                await asyncio.sleep(2.0)
                assert not any(each.done() for each in [received, *others, command]), (received, others, command)
                assert client.health().state != "connected"
                assert operator.request(draining=False)["draining"] is False
                message = await received
                assert message is not None and message.text == "sent"
        done = await command
        assert (done.returncode, "waiting until the drain of" in done.stderr) == (0, True)

    try:
        operator = Operator(broker, {"login": "root", "passcode": "word"} if has_users else None)
        with CuttingProxy(broker.port) as proxy:
            asyncio.run(use(proxy))
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()


async def _send(broker: BrokerProcess, login: dict[str, Any]) -> None:
    async with truenext.connect(broker.url, timeout=PATIENCE_SECONDS, **login) as client:
        await client.send_many("/queue/b", ["1", "2"])
        await client.send("/queue/a", "sent")


async def _receive(broker: BrokerProcess, login: dict[str, Any]) -> None:
    connection = truenext.connect(broker.url, timeout=PATIENCE_SECONDS, **login)
    async with connection as client, client.consumer("/queue/b") as consumer:
        assert await consumer.receive(PATIENCE_SECONDS) is not None


def _receive_blocking(broker: BrokerProcess, login: dict[str, Any]) -> None:
    connection = truenext.blocking.connect(broker.url, timeout=PATIENCE_SECONDS, **login)
    with connection as client, client.consumer("/queue/b") as consumer:
        assert consumer.receive(PATIENCE_SECONDS) is not None


def _send_by_command(broker: BrokerProcess, login: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    with mock.patch.dict(os.environ, {f"TRUENEXT_{name.upper()}": value for name, value in login.items()}):
        return broker.truenext("send", "b", "3")


def test_program_that_does_not_wait_is_told_of_the_drain(broker: BrokerProcess) -> None:
    # C31.8
    Operator(broker).begin()
    with truenext.blocking.connect(broker.url) as client:
        with pytest.raises(
            TimeoutError, match="the message is not confirmed and may have arrived: the broker is being"
        ):
            client.send("/queue/a", "x", timeout=0.5)
        with pytest.raises(truenext.Refused, match=r"^the broker is being drained") as refused:
            next(iter(client.browse("/queue/a")))
        assert refused.value.code == Code.DRAINING


def test_page_is_refused_during_a_drain_and_a_forgotten_login_is_not_used_again(broker: BrokerProcess) -> None:
    # C31.8
    Operator(broker).begin()

    async def run() -> None:
        client = await truenext.connect(broker.url, reconnect=False)
        assert client.health().control_only
        client.forget_login()
        with pytest.raises(truenext.Refused, match=r"^the broker is being drained") as refused:
            await client.browse_page("/queue/a", count=10, timeout=PATIENCE_SECONDS)
        assert refused.value.code == Code.DRAINING and client.health().state == "closed"
        await client.close()

    asyncio.run(run())


def test_connection_that_began_during_a_drain_gives_no_takeover(broker: BrokerProcess) -> None:
    # C31.3
    Operator(broker).begin()
    former = broker.connect(sends_connect=False)
    connected = former.send_connect("1.2", "0,0", headers={"truenext-client": "1"})
    assert connected.headers["truenext-control-only"] == "draining"
    secret = connected.headers["truenext-secret"]
    client = broker.connect(sends_connect=False)
    connected = client.send_connect("1.2", "0,0", headers={"truenext-client": "2", "truenext-secret": secret})
    assert connected.headers["truenext-taken-over"] == "false"
    assert connected.headers["truenext-control-only"] == "draining"


def test_ps_says_in_one_sentence_that_no_process_answers_in_a_drain(broker: BrokerProcess) -> None:
    """Fixed: it said that a message is not confirmed and may have arrived."""
    Operator(broker).begin()
    done = broker.truenext("stages", "ps")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("truenext: processes do not answer, because the broker is being drained")
