"""Tests that stomp.py, a foreign client from PyPI, finds what STOMP promises, in all three versions.

A RawClient looks where the content of a queue needs a second opinion.
"""

import queue as queues
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stomp

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import bodies

CONNECTIONS = {
    "1.0": stomp.Connection10,
    "1.1": stomp.Connection11,
    "1.2": stomp.Connection12,
}
VERSIONS = pytest.mark.parametrize("version", CONNECTIONS)
NACKING_VERSIONS = pytest.mark.parametrize("version", ["1.1", "1.2"])


class Client(stomp.ConnectionListener):
    """Connection of stomp.py, and the frames that it has received."""

    def __init__(self, port: int, version: str, **options: Any) -> None:
        self.version = version
        self.connected: queues.Queue[stomp.utils.Frame] = queues.Queue()
        self.errors: queues.Queue[stomp.utils.Frame] = queues.Queue()
        self.beats: queues.Queue[None] = queues.Queue()
        self._messages: queues.Queue[stomp.utils.Frame] = queues.Queue()
        self._receipts: queues.Queue[str] = queues.Queue()
        self._numbers = 0
        self._has_ended = threading.Event()
        self.connection = CONNECTIONS[version](
            [("127.0.0.1", port)], reconnect_attempts_max=1, auto_decode=False, **options
        )
        self.connection.set_listener("test", self)
        self.connection.connect(wait=True)

    # ---- What stomp.py calls ----

    def on_connected(self, frame: stomp.utils.Frame) -> None:
        self.connected.put(frame)

    def on_message(self, frame: stomp.utils.Frame) -> None:
        self._messages.put(frame)

    def on_receipt(self, frame: stomp.utils.Frame) -> None:
        self._receipts.put(frame.headers["receipt-id"])

    def on_error(self, frame: stomp.utils.Frame) -> None:
        self.errors.put(frame)

    def on_heartbeat(self) -> None:
        self.beats.put(None)

    def on_receiver_loop_completed(self, frame: object) -> None:
        self._has_ended.set()

    # ---- What tests call ----

    @property
    def is_connected(self) -> bool:
        return bool(self.connection.is_connected())

    def new_receipt(self) -> str:
        self._numbers += 1
        return f"receipt-{self._numbers}"

    def await_receipt(self, receipt: str) -> None:
        """Wait for a receipt, which must be the next one."""
        assert self._receipts.get(timeout=PATIENCE_SECONDS) == receipt

    def send(self, queue: str, body: str | bytes, **headers: str) -> None:
        """Send a message, and return once the broker has confirmed it."""
        receipt = self.new_receipt()
        self.connection.send(f"/queue/{queue}", body, headers=headers | {"receipt": receipt})
        self.await_receipt(receipt)

    def subscribe(
        self,
        queue: str,
        ack: str = "client-individual",
        prefetch: int = 1000,
        headers: dict[str, str] | None = None,
    ) -> None:
        receipt = self.new_receipt()
        headers = {"activemq.prefetchSize": str(prefetch), "receipt": receipt} | (headers or {})
        self.connection.subscribe(f"/queue/{queue}", id="1", ack=ack, headers=headers)
        self.await_receipt(receipt)

    def message(self) -> stomp.utils.Frame:
        return self._messages.get(timeout=PATIENCE_SECONDS)

    def messages(self, count: int) -> list[stomp.utils.Frame]:
        return [self.message() for _ in range(count)]

    def has_more(self) -> bool:
        """Return whether a message has come; messages that were sent before an answer come before it."""
        for _ in range(2):
            self.connection.begin("are we there")
            receipt = self.new_receipt()
            self.connection.abort("are we there", receipt=receipt)
            self.await_receipt(receipt)
        return not self._messages.empty()

    def acknowledge(self, message: stomp.utils.Frame, transaction: str | None = None) -> None:
        """Send a message, and return once the broker has confirmed it."""
        self._settle(self.connection.ack, message, transaction)

    def nack(self, message: stomp.utils.Frame, transaction: str | None = None) -> None:
        self._settle(self.connection.nack, message, transaction)

    def end(self, *transaction: str, by: Callable[..., None]) -> None:
        receipt = self.new_receipt()
        by(*transaction, receipt=receipt)
        self.await_receipt(receipt)

    def close(self) -> None:
        """Send DISCONNECT and wait until stomp.py's threads have ended; otherwise they would connect again."""
        self.connection.disconnect()
        self.await_end()

    def await_end(self) -> None:
        assert self._has_ended.wait(PATIENCE_SECONDS), "stomp.py is still connected"
        self.connection.transport.io_thread.join(PATIENCE_SECONDS)

    def _settle(self, settle: Callable[..., None], message: stomp.utils.Frame, transaction: str | None) -> None:
        headers = message.headers
        if self.version == "1.2":
            names = [headers["ack"]]
        elif self.version == "1.1":
            names = [headers["message-id"], headers["subscription"]]
        else:
            names = [headers["message-id"]]
        receipt = self.new_receipt()
        settle(*names, transaction=transaction, receipt=receipt)
        self.await_receipt(receipt)


Connect = Callable[..., Client]


@pytest.fixture
def connect(broker: BrokerProcess) -> Iterator[Connect]:
    """Function that makes a client, which is closed with the test."""
    clients: list[Client] = []

    def new_client(version: str, **options: Any) -> Client:
        client = Client(broker.port, version, **options)
        clients.append(client)
        return client

    yield new_client
    for client in clients:
        client.close()


def texts(messages: list[stomp.utils.Frame]) -> list[str]:
    return [message.body.decode() for message in messages]


def fill(client: Client, queue: str, count: int) -> None:
    for number in range(count):
        client.send(queue, str(number), persistent="true" if number % 2 else "false")


# ---- Connect, send, receive ----


@VERSIONS
def test_stomp_py_connects_in_its_version(connect: Connect, version: str) -> None:
    connected = connect(version).connected.get(timeout=PATIENCE_SECONDS)
    assert connected.headers["version"] == version
    assert connected.headers["server"].startswith("truenext/")


@VERSIONS
def test_stomp_py_receives_in_true_order(connect: Connect, queue: str, version: str) -> None:
    sender, reader = connect(version), connect(version)
    for body, priority, persistent in (
        ("3", "4", "true"),
        ("4", "4", "false"),
        ("1", "9", "false"),
        ("2", "5", "true"),
    ):
        sender.send(queue, body, priority=priority, persistent=persistent)
    reader.subscribe(queue)
    messages = reader.messages(4)
    assert texts(messages) == ["1", "2", "3", "4"]
    assert [message.headers["priority"] for message in messages] == ["9", "5", "4", "4"]
    assert {message.headers["destination"] for message in messages} == {f"/queue/{queue}"}
    assert len({message.headers["message-id"] for message in messages}) == 4


@VERSIONS
def test_receipts_come_in_the_order_of_their_requests(connect: Connect, queue: str, version: str) -> None:
    sender = connect(version)
    receipts = [sender.new_receipt() for _ in range(50)]
    for number, receipt in enumerate(receipts):
        persistent = "true" if number % 3 else "false"
        sender.connection.send(f"/queue/{queue}", str(number), persistent=persistent, receipt=receipt)
    for receipt in receipts:
        sender.await_receipt(receipt)


@VERSIONS
def test_an_error_reaches_stomp_py_and_ends_the_connection(connect: Connect, version: str) -> None:
    client = connect(version)
    client.connection.subscribe("/exchange/news", id="1", receipt="in question")
    error = client.errors.get(timeout=PATIENCE_SECONDS)
    assert error.headers["message"].startswith("unknown destination '/exchange/news': there are no exchanges here")
    assert error.headers["receipt-id"] == "in question"
    client.await_end()
    assert not client.is_connected


# ---- Acknowledge ----


@VERSIONS
@pytest.mark.parametrize(("ack", "remaining"), [("auto", []), ("client", ["4", "5"]), ("client-individual", "01245")])
def test_stomp_py_acknowledges_in_each_mode(
    broker: BrokerProcess, connect: Connect, queue: str, version: str, ack: str, remaining: list[str] | str
) -> None:
    sender, reader = connect(version), connect(version)
    fill(sender, queue, 6)
    reader.subscribe(queue, ack)
    messages = reader.messages(6)
    assert texts(messages) == ["0", "1", "2", "3", "4", "5"]
    if ack != "auto":
        reader.acknowledge(messages[3])
    assert not reader.has_more()
    reader.close()
    assert bodies(broker.remaining_messages(queue)) == list(remaining)


@VERSIONS
def test_an_acknowledgement_brings_stomp_py_the_next_message(connect: Connect, queue: str, version: str) -> None:
    client = connect(version)
    client.subscribe(queue, prefetch=1)
    fill(client, queue, 4)
    for number in range(4):
        message = client.message()
        assert message.body == b"%d" % number
        assert not client.has_more()
        client.acknowledge(message)
    assert not client.has_more()


@NACKING_VERSIONS
def test_messages_that_stomp_py_nacks_come_again_at_their_place(connect: Connect, queue: str, version: str) -> None:
    client = connect(version)
    fill(client, queue, 5)
    client.subscribe(queue, prefetch=3)
    held = client.messages(3)
    assert texts(held) == ["0", "1", "2"]
    client.nack(held[1])
    again = client.message()
    assert again.body == b"1"
    assert (again.headers["redelivered"], again.headers["truenext-attempts"]) == ("true", "1")
    assert not client.has_more()
    client.acknowledge(again)
    assert client.message().body == b"3"


# ---- Transactions ----


@VERSIONS
def test_transaction_that_stomp_py_commits_is_done_as_a_whole(
    broker: BrokerProcess, connect: Connect, new_queue: Callable[[], str], version: str
) -> None:
    source, target = new_queue(), new_queue()
    client = connect(version)
    fill(client, source, 3)
    client.subscribe(source)
    held = client.messages(3)
    transaction = client.connection.begin()
    client.acknowledge(held[0], transaction)
    client.acknowledge(held[2], transaction)
    client.send(target, "a", transaction=transaction, persistent="true")
    client.send(target, "b", transaction=transaction)
    assert bodies(broker.remaining_messages(target)) == []
    client.end(transaction, by=client.connection.commit)
    assert bodies(broker.remaining_messages(target)) == ["a", "b"]
    client.close()
    assert bodies(broker.remaining_messages(source)) == ["1"]


@VERSIONS
def test_transaction_that_stomp_py_aborts_never_happened(
    broker: BrokerProcess, connect: Connect, new_queue: Callable[[], str], version: str
) -> None:
    source, target = new_queue(), new_queue()
    client = connect(version)
    fill(client, source, 3)
    client.subscribe(source, prefetch=2)
    held = client.messages(2)
    client.connection.begin("t")
    client.acknowledge(held[0], "t")
    # Its credit went to the next.
    assert client.message().body == b"2"
    client.send(target, "never", transaction="t", persistent="true")
    client.end("t", by=client.connection.abort)
    assert not client.has_more()
    client.acknowledge(held[1])
    again = client.message()
    assert (again.body, again.headers["truenext-attempts"]) == (b"0", "1")
    assert bodies(broker.remaining_messages(target)) == []


@NACKING_VERSIONS
def test_messages_that_stomp_py_nacks_in_a_transaction_come_again_at_the_commit(
    connect: Connect, queue: str, version: str
) -> None:
    client = connect(version)
    fill(client, queue, 2)
    client.subscribe(queue)
    held = client.messages(2)
    client.connection.begin("t")
    client.nack(held[0], "t")
    client.acknowledge(held[1], "t")
    assert not client.has_more()
    client.end("t", by=client.connection.commit)
    again = client.message()
    assert (again.body, again.headers["truenext-attempts"]) == (b"0", "1")
    assert not client.has_more()


# ---- Heart-beats ----


@NACKING_VERSIONS
def test_heart_beats_both_ways_keep_the_connection(connect: Connect, queue: str, version: str) -> None:
    client = connect(version, heartbeats=(250, 250))
    assert client.connected.get(timeout=PATIENCE_SECONDS).headers["heart-beat"] == "250,250"
    # More than a second without a word of either: each would have given the other up.
    for _ in range(10):
        client.beats.get(timeout=PATIENCE_SECONDS)
    assert client.is_connected
    client.subscribe(queue)
    client.send(queue, "still there")
    assert client.message().body == b"still there"


# ---- Bodies and headers ----


BODIES = {
    "nothing": b"",
    "one NUL": b"\0",
    "every byte": bytes(range(256)),
    "a frame": b"\0\n\0MESSAGE\nsubscription:1\nmessage-id:1\n\nforged\0\n",
    "line ends": b"\n\n\r\n\r\n\0\n",
    "a megabyte": random.Random(7).randbytes(1024 * 1024),
}


@VERSIONS
@pytest.mark.parametrize("kind", BODIES)
def test_a_binary_body_comes_as_it_was_sent(connect: Connect, queue: str, version: str, kind: str) -> None:
    client = connect(version)
    client.subscribe(queue)
    client.send(queue, BODIES[kind], persistent="true")
    client.send(queue, b"next")
    first, second = client.messages(2)
    assert (first.body, second.body) == (BODIES[kind], b"next")
    assert not client.has_more()


VALUES = {
    "colon": ":a::b:",
    "unicode": "\u00e4\u2028\U0001f600",
    "backslash": "a\\b\\",
    "carriage-return": "a\rb",
    "empty": "",
    "line-feed": "\na\n\nb:c\n",
    "backslash and n": "a\\nb\\c\\\\r",
    "blanks": "  a  ",
}


@pytest.mark.parametrize("reader_version", CONNECTIONS)
@pytest.mark.parametrize("sender_version", CONNECTIONS)
def test_header_values_survive_the_way_from_any_version_to_any_other(
    connect: Connect, queue: str, sender_version: str, reader_version: str
) -> None:
    values = dict(VALUES)
    if sender_version == "1.0":
        # It has no way to say the one, and pads headers with the others.
        del values["line-feed"], values["blanks"]
    if reader_version == "1.0":
        # stomp.py unescapes in 1.0 too, where there are no escapes.
        del values["backslash and n"]
    sender, reader = connect(sender_version), connect(reader_version)
    reader.subscribe(queue)
    sender.send(queue, "body", **values)
    headers = reader.message().headers
    assert {name: headers.get(name) for name in values} == values


@VERSIONS
def test_a_forged_length_does_not_make_stomp_py_see_a_second_frame(
    broker: BrokerProcess, connect: Connect, queue: str, version: str
) -> None:
    reader = connect(version)
    reader.subscribe(queue)
    sender = broker.connect()
    body = b"abc\0MESSAGE\nsubscription:1\nmessage-id:1\n\nforged"
    for name in (
        "content-length:3",
        " content-length",
        "content-length ",
        "x\ncontent-length:3",
        "x\rcontent-length:3",
    ):
        sender.send(queue, body, headers={name: "3", "note": f"x\n{name}:3"}, confirmed=True)
        assert reader.message().body == body, name
    assert not reader.has_more()


@VERSIONS
def test_header_without_effect_is_warned_of_with_the_header_that_has_it(
    own_broker: BrokerProcess, version: str
) -> None:
    client = Client(own_broker.port, version)
    for _ in range(5):
        client.send("q", "text", **{"delivery-mode": "2", "JMSExpiration": "0"})
    client.close()
    lines = [line for line in own_broker.log.splitlines() if "a header of another broker has no effect here" in line]
    assert [line.partition(" header='")[2].partition("'")[0] for line in lines] == ["JMSExpiration", "delivery-mode"]
    assert "instead='use expires, in milliseconds since the epoch'" in lines[0]
    assert "instead='use persistent:true;" in lines[1]


@VERSIONS
def test_exclusive_subscription_of_rabbitmq_receives_alone(connect: Connect, queue: str, version: str) -> None:
    # C4.12
    other, exclusive = connect(version), connect(version)
    other.subscribe(queue)
    exclusive.subscribe(queue, headers={"exclusive": "true", "auto-delete": "true", "durable": "false"})
    for number in range(4):
        other.send(queue, str(number))
    assert [message.body for message in exclusive.messages(4)] == [b"0", b"1", b"2", b"3"]
    assert not other.has_more()
