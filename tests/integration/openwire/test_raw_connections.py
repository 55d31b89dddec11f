"""Tests of OpenWire frame by frame: connections of the same id, and clients that do what the one of Java does not."""

import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from tests.integration.broker_process import QUIET_SECONDS, BrokerProcess
from tests.integration.raw_client import RECEIVE_SECONDS
from tests.unit.openwire_client import wire_format_info
from truenext.model.loose_fields import FieldReader
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConnectionInfo,
    ConsumerId,
    ConsumerInfo,
    ExceptionResponse,
    MessageAck,
    MessageDispatch,
    MessageId,
    ProducerId,
    QueueName,
    RemoveInfo,
    Response,
    Structure,
    TextMessage,
)

NAME = "ID:host-1-2-3:1"
TEXT = b"\0\0\0\1a"
"""Content of a TextMessage with the text `a`."""


@pytest.fixture
def options() -> Sequence[str]:
    return ("--listen", "openwire://127.0.0.1:0")


class JmsClient:
    """Client of OpenWire that keeps what the broker sends."""

    def __init__(
        self,
        broker: BrokerProcess,
        *,
        name: str = NAME,
        frame_bytes_max: int = 0,
        user: str | None = None,
        password: str | None = None,
        is_fault_tolerant: bool = False,
    ) -> None:
        port = int(broker.openwire_url.rpartition(":")[2])
        self.name = name
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.settimeout(RECEIVE_SECONDS)
        self._data = b""
        self._number = 1
        self._sock.sendall(wire_format_info(frame_bytes_max))
        login = ConnectionInfo(1, True, ConnectionId(name), user_name=user, password=password)
        self.send(replace(login, is_fault_tolerant=is_fault_tolerant))
        try:
            self.await_response(1)
        except AssertionError:
            self.close()
            raise

    def send(self, *structures: Structure) -> None:
        self._sock.sendall(b"".join(map(encode_frame, structures)))

    def next(self) -> Structure | None:
        """Return the next frame; None at the end of the connection."""
        while len(self._data) < 4 or len(self._data) < 4 + int.from_bytes(self._data[:4], "big"):
            received = self._sock.recv(65536)
            if not received:
                return None
            self._data += received
        end = 4 + int.from_bytes(self._data[:4], "big")
        frame, self._data = self._data[4:end], self._data[end:]
        return decode_structure(FieldReader(frame))

    def await_response(self, number: int) -> None:
        while not isinstance(answer := self.next(), Response):
            assert answer is not None, "the connection has ended"
        assert not isinstance(answer, ExceptionResponse) and answer.correlation_id == number, answer

    def message(self, seconds: float = RECEIVE_SECONDS) -> MessageDispatch:
        self._sock.settimeout(seconds)
        while not isinstance(answer := self.next(), MessageDispatch):
            assert answer is not None, "the connection has ended"
        return answer

    def expect_nothing(self) -> None:
        self._sock.settimeout(QUIET_SECONDS)
        with pytest.raises(TimeoutError):
            self.next()
        self._sock.settimeout(RECEIVE_SECONDS)

    def await_end(self) -> None:
        while self.next() is not None:
            pass

    def consume(self, queue: str, prefetch: int = 10, *, value: int = 1) -> ConsumerId:
        consumer_id = ConsumerId(self.name, 1, value)
        self.send(ConsumerInfo(2, True, consumer_id, destination=QueueName(queue), prefetch_size=prefetch))
        self.await_response(2)
        return consumer_id

    def send_text(self, queue: str, number: int) -> None:
        """Send a message with this number, which is also that of the request for an answer."""
        producer_id = ProducerId(self.name, 1, 1)
        named = MessageId(None, producer_id, number)
        self.send(
            TextMessage(number, True, producer_id, QueueName(queue), message_id=named, is_persistent=True, content=TEXT)
        )

    def produce(self, queue: str, count: int = 1) -> None:
        producer_id = ProducerId(self.name, 1, 1)
        for number in range(1, count + 1):
            message = TextMessage(
                10,
                number == count,
                producer_id,
                QueueName(queue),
                message_id=MessageId(None, producer_id, number),
                is_persistent=True,
                content=TEXT,
            )
            self.send(message)
        self.await_response(10)

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def clients() -> Iterator[list[JmsClient]]:
    found: list[JmsClient] = []
    yield found
    for client in found:
        client.close()


def test_newer_connection_of_the_same_id_ends_the_older_as_lost(
    broker: BrokerProcess, queue: str, clients: list[JmsClient]
) -> None:
    clients.append(older := JmsClient(broker))
    older.produce(queue, 2)
    older.consume(queue)
    first = older.message()
    assert first.redelivery_counter == 0
    clients.append(newer := JmsClient(broker))
    older.await_end()
    newer.consume(queue)
    again = [newer.message(), newer.message()]
    # C26.8: it was held by a connection that was lost.
    assert [each.redelivery_counter for each in again] == [1, 1]
    assert again[0].message is not None and first.message is not None
    assert again[0].message.message_id == first.message.message_id


def test_connections_of_other_ids_do_not_end_one_another(
    broker: BrokerProcess, queue: str, clients: list[JmsClient]
) -> None:
    clients += [JmsClient(broker, name=f"ID:host-1-2-3:{number}") for number in range(2)]
    for client in clients:
        client.produce(queue)


def test_consumer_never_holds_more_than_its_prefetch(
    broker: BrokerProcess, queue: str, clients: list[JmsClient]
) -> None:
    # C26.3
    clients.append(client := JmsClient(broker))
    client.produce(queue, 10)
    consumer_id = client.consume(queue, 3)
    held = [client.message() for _ in range(3)]
    broker.await_facts(queue, waiting=7, unacknowledged=3)
    for each in held:
        assert each.message is not None
        message_id = each.message.message_id
        client.send(MessageAck(20, False, QueueName(queue), None, consumer_id, 2, message_id, message_id, 1))
    held = [client.message() for _ in range(3)]
    broker.await_facts(queue, waiting=4, unacknowledged=3)
    time.sleep(0.05)
    assert broker.queues()[queue].unacknowledged == 3


@pytest.mark.parametrize(("last", "counts"), [(-1, [0, 0, 0]), (1, [1, 1, 0]), (9, [0, 0, 0])])
def test_last_delivered_message_counts_an_attempt_for_what_came_before(
    broker: BrokerProcess, queue: str, clients: list[JmsClient], last: int, counts: list[int]
) -> None:
    # C26.7
    clients.append(client := JmsClient(broker))
    client.produce(queue, 3)
    consumer_id = client.consume(queue)
    held = [client.message() for _ in range(3)]
    sequences = [
        each.message.message_id.broker_sequence_id for each in held if each.message and each.message.message_id
    ]
    named = sequences[last] if 0 <= last < 3 else -1 if last < 0 else sequences[-1] + 1000
    client.send(RemoveInfo(3, True, consumer_id, named))
    client.await_response(3)
    client.consume(queue)
    assert [client.message().redelivery_counter for _ in range(3)] == counts


def test_browser_is_shown_no_more_than_its_prefetch_until_its_client_takes_it(
    broker: BrokerProcess, queue: str, clients: list[JmsClient]
) -> None:
    # C26.17
    clients.append(client := JmsClient(broker))
    client.produce(queue, 5)
    browser = ConsumerId(client.name, 1, 1)
    client.send(ConsumerInfo(2, True, browser, True, QueueName(queue), 2))
    client.await_response(2)
    shown = [client.message() for _ in range(2)]
    client.expect_nothing()
    for _ in range(3):
        assert shown[-2].message is not None
        taken = shown[-2].message.message_id
        client.send(MessageAck(20, False, QueueName(queue), None, browser, 2, taken, taken, 1))
        shown.append(client.message())
        client.expect_nothing()
    assert shown[-1].message is not None
    taken = shown[-1].message.message_id
    client.send(MessageAck(20, False, QueueName(queue), None, browser, 2, None, taken, 2))
    assert client.message().message is None, "the end"
    broker.await_facts(queue, waiting=5, unacknowledged=0)


def test_message_that_is_too_large_for_the_client_becomes_a_dead_letter_and_stays_one(
    broker: BrokerProcess, queue: str, clients: list[JmsClient]
) -> None:
    # C26.18
    clients.append(client := JmsClient(broker, frame_bytes_max=1000))
    stomp = broker.connect()
    for body in (b"a", bytes(2000), b"b"):
        stomp.send(queue, body, confirmed=True)
    client.consume(queue)
    got = [client.message().message for _ in range(2)]
    assert [each.content for each in got if each is not None] == [b"a", b"b"]
    dead = f"DLQ.{queue}"
    broker.await_facts(dead, waiting=1)
    # Here it is rejected once, and waits.
    client.consume(dead, value=2)
    client.expect_nothing()
    broker.await_facts(dead, waiting=1, unacknowledged=0)
    warnings = [line for line in broker.log.splitlines() if "too large for the client" in line]
    assert len(warnings) == 2 and f"for {queue} makes a frame of" in warnings[0]


def test_feature_that_is_not_offered_is_logged_for_the_operator(
    broker: BrokerProcess, queue: str, clients: list[JmsClient]
) -> None:
    clients.append(client := JmsClient(broker))
    for selector in ("a = 1", "a = 1", "a ="):
        destination = QueueName(f"{queue}.>") if selector == "a = 1" else QueueName(queue)
        client.send(ConsumerInfo(2, True, ConsumerId(NAME, 1, 1), destination=destination, selector=selector))
        assert isinstance(client.next(), ExceptionResponse)
    (line,) = [line for line in broker.log.splitlines() if "frame refused" in line and queue in line]
    assert f"a consumer of a pattern, {queue}.>" in line and "WARNING" in line
