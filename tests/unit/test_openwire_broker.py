"""Tests of OpenWire clients at a whole broker, beside STOMP clients: selectors, ids, advisories."""

import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import planted_holes
from tests.property.broker_without_threads import BrokerWithoutThreads, VirtualSocket
from truenext.broker.access import COMMAND_CHECKS, ForbiddenError
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import OpenProducer, Send
from truenext.model.grants import Right, User, parse_pattern
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map, text_value
from truenext.model.message import SentMessage
from truenext.model.openwire_message import stomp_message
from truenext.model.url import WireProtocol
from truenext.wire.openwire.consumers import POISON
from truenext.wire.openwire.destinations import Destinations, source
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConnectionInfo,
    ConsumerId,
    ConsumerInfo,
    DestinationInfo,
    JmsMessage,
    MessageAck,
    MessageDispatch,
    MessageId,
    PhysicalDestination,
    ProducerId,
    QueueName,
    RemoveInfo,
    Response,
    Structure,
    TemporaryQueueName,
    TextMessage,
    Throwable,
    TopicName,
)
from truenext.wire.stomp import replies

CONNECTION = "ID:host-1-1:1"
STOMP_LOGIN = b"CONNECT\naccept-version:1.2\n\n\0"


class JmsClient:
    def __init__(self, broker: BrokerWithoutThreads, connection: str = CONNECTION) -> None:
        self.broker = broker
        self.connection = connection
        self.sock = broker.connect()
        self.number = 1
        self.write(encode_wire_format_info(0), encode_frame(ConnectionInfo(1, True, ConnectionId(connection))))
        self.take()

    def write(self, *frames: bytes) -> None:
        self.sock.incoming.append(b"".join(frames))
        self.broker.read(self.sock)

    def send(self, *structures: Structure) -> None:
        self.write(*map(encode_frame, structures))
        self.broker.settle()

    def take(self) -> list[Structure]:
        """Return the frames that have come."""
        data, found = self.sock.take_sent(), []
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(decode_structure(FieldReader(data[4 : 4 + size])))
            data = data[4 + size :]
        return found

    def produce(self, destination: PhysicalDestination, text: str, timestamp: int = 0, **values: TypedValue) -> None:
        self.number += 1
        producer = ProducerId(self.connection, 1, 1)
        message = TextMessage(
            self.number,
            False,
            producer,
            destination,
            message_id=MessageId(None, producer, self.number),
            is_persistent=True,
            priority=4,
            timestamp=timestamp,
            content=len(text).to_bytes(4, "big") + text.encode(),
            marshalled_properties=encode_map(values),
        )
        self.send(message)

    def consume(self, destination: PhysicalDestination, value: int = 1, **options: Any) -> None:
        self.send(
            ConsumerInfo(
                2, False, ConsumerId(self.connection, 1, value), destination=destination, prefetch_size=10, **options
            )
        )

    def messages(self) -> list[JmsMessage]:
        """Return the messages that have come."""
        return [each.message for each in self.take() if isinstance(each, MessageDispatch) and each.message is not None]

    def texts(self) -> list[str]:
        return [(message.content or b"")[4:].decode() for message in self.messages()]

    def acknowledge(self, message: JmsMessage, kind: int, value: int = 1) -> None:
        cause = Throwable("a.B", "no") if kind == POISON else None
        consumer_id = ConsumerId(self.connection, 1, value)
        message_id = message.message_id
        self.send(MessageAck(3, False, message.destination, None, consumer_id, kind, message_id, message_id, 1, cause))


@pytest.fixture
def broker() -> Iterator[BrokerWithoutThreads]:
    broker = BrokerWithoutThreads()
    yield broker
    broker.close()


def stomp_client(broker: BrokerWithoutThreads) -> VirtualSocket:
    sock = broker.connect(WireProtocol.STOMP)
    stomp_send(broker, sock, STOMP_LOGIN)
    return sock


def stomp_send(broker: BrokerWithoutThreads, sock: VirtualSocket, data: bytes) -> None:
    sock.incoming.append(data)
    broker.read(sock)
    broker.settle()


# ---- Selectors (C26.12) ----

QUEUE = QueueName("a")


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("weight > 2.5", ["number", "stomp"]),
        ("weight = 3", ["number", "stomp"]),
        ("weight = '3'", ["text", "stomp"]),
        ("flag = TRUE", ["number", "stomp"]),
        ("flag = 'true'", ["text", "stomp"]),
        ("JMSDestination = 'queue://a'", ["number", "text", "stomp"]),
        ("JMSDestination = 'queue://a,b'", []),
        (f"JMSMessageID = '{CONNECTION}:1:1:3'", ["text"]),
        ("JMSMessageID IS NULL", ["stomp"]),
        ("JMSTimestamp < 1000", ["number", "text"]),
    ],
)
def test_selector_compares_jms_properties_by_type_and_stomp_headers_as_texts(
    broker: BrokerWithoutThreads, selector: str, expected: list[str]
) -> None:
    client = JmsClient(broker)
    client.produce(QUEUE, "number", 900, weight=TypedValue(Tag.LONG, 3), flag=TypedValue(Tag.BOOLEAN, True))
    client.produce(QUEUE, "text", 900, weight=text_value("3"), flag=text_value("true"))
    stomp_send(
        broker, stomp_client(broker), b"SEND\ndestination:/queue/a\nweight:3\nflag:true\npersistent:true\n\nstomp\0"
    )
    client.consume(QUEUE, selector=selector)
    assert client.texts() == expected


def test_selector_of_a_topic_compares_the_time_that_a_jms_client_gave_its_message(
    broker: BrokerWithoutThreads,
) -> None:
    # C6.8, C26.12
    client = JmsClient(broker)
    client.consume(TopicName("t"), selector="JMSTimestamp = 77")
    client.produce(TopicName("t"), "other", 78)
    client.produce(TopicName("t"), "right", 77)
    (message,) = client.messages()
    assert message.timestamp == 77


def test_destination_in_selectors_is_what_the_message_was_first_sent_to(broker: BrokerWithoutThreads) -> None:
    client = JmsClient(broker)
    client.produce(QUEUE, "failed")
    client.produce(QueueName("DLQ.a"), "sent there")
    client.consume(QUEUE)
    (message,) = client.messages()
    client.acknowledge(message, POISON)
    client.consume(QueueName("DLQ.a"), 2, selector="JMSDestination = 'queue://a'")
    assert client.texts() == ["failed"]


# ---- JMSMessageID ----


def ids(client: JmsClient) -> list[tuple[str | None, ProducerId | None, int]]:
    found = [message.message_id for message in client.messages()]
    return [(each.text_view, each.producer_id, each.producer_sequence_id) for each in found if each is not None]


@pytest.mark.parametrize("is_dead", [False, True])
def test_id_of_a_stomp_message_is_the_same_at_every_dispatch_and_after_a_restart(
    broker: BrokerWithoutThreads, is_dead: bool
) -> None:
    stomp_send(broker, stomp_client(broker), b"SEND\ndestination:/queue/a\npersistent:true\n\nstomp\0")
    client = JmsClient(broker)
    queue = QueueName("DLQ.a" if is_dead else "a")
    if is_dead:
        client.consume(QUEUE, 9)
        (message,) = client.messages()
        client.acknowledge(message, POISON, 9)
    seen = []
    for _ in range(2):
        client.consume(queue)
        seen += ids(client)
        client.send(RemoveInfo(3, False, ConsumerId(CONNECTION, 1, 1), -1))
    broker.stop()
    again = BrokerWithoutThreads(store=broker.store)
    client = JmsClient(again)
    client.consume(queue)
    seen += ids(client)
    again.close()
    assert len(seen) == 3 and len(set(map(repr, seen))) == 1


def test_id_of_a_jms_message_is_its_producers_as_a_dead_letter_too(broker: BrokerWithoutThreads) -> None:
    client = JmsClient(broker)
    client.produce(QUEUE, "text")
    client.consume(QUEUE)
    (message,) = client.messages()
    client.acknowledge(message, POISON)
    client.consume(QueueName("DLQ.a"), 2)
    assert ids(client) == [(None, ProducerId(CONNECTION, 1, 1), 2)]


# ---- Advisories (C26.16) ----

REPLIES = TemporaryQueueName(f"{CONNECTION}:1")
ADVISORIES = TopicName("ActiveMQ.Advisory.TempQueue,ActiveMQ.Advisory.TempTopic")


def told(client: JmsClient) -> list[int]:
    infos = [message.data_structure for message in client.messages()]
    return [info.operation for info in infos if isinstance(info, DestinationInfo)]


@pytest.mark.parametrize("is_reset", [False, True])
def test_end_of_a_temporary_queue_is_told_before_its_client_makes_it_again(
    broker: BrokerWithoutThreads, is_reset: bool
) -> None:
    owner, other = JmsClient(broker), JmsClient(broker, "ID:host-1-2:1")
    for each in (owner, other):
        each.consume(ADVISORIES)
    owner.send(DestinationInfo(3, False, ConnectionId(CONNECTION), REPLIES))
    assert told(other) == [0]
    # An answer that waits for the disk keeps the lost connection's socket.
    producer = ProducerId(CONNECTION, 1, 1)
    message = TextMessage(9, True, producer, QUEUE, message_id=MessageId(None, producer, 9), is_persistent=True)
    owner.write(encode_frame(message))
    owner.sock.has_ended, owner.sock.is_broken = True, is_reset
    broker.read(owner.sock)
    assert told(other) == [1]
    again = JmsClient(broker)
    again.write(encode_frame(DestinationInfo(3, True, ConnectionId(CONNECTION), REPLIES)))
    broker.settle()
    assert told(other) == [0]
    assert Response(correlation_id=3) in again.take()
    again.send(DestinationInfo(4, False, ConnectionId(CONNECTION), REPLIES, 1))
    assert told(other) == [1]


def test_client_is_told_though_the_first_message_of_a_reply_to_was_cancelled(broker: BrokerWithoutThreads) -> None:
    owner, client = JmsClient(broker, "ID:host-2-1:1"), JmsClient(broker)
    client.consume(ADVISORIES)
    client.consume(QUEUE)
    replies = TemporaryQueueName("ID:host-2-1:1:1")
    owner.send(DestinationInfo(3, False, ConnectionId("ID:host-2-1:1"), replies))
    client.sock.is_full = True
    producer = ProducerId("ID:host-2-1:1", 1, 1)
    owner.send(
        TextMessage(9, False, producer, QUEUE, message_id=MessageId(None, producer, 9), priority=4, reply_to=replies)
    )
    client.send(RemoveInfo(4, False, ConsumerId(CONNECTION, 1, 1), -1))
    client.sock.is_full = False
    broker.write(client.sock)
    client.consume(QUEUE, 2)
    advisory, message = client.messages()
    assert isinstance(advisory.data_structure, DestinationInfo) and advisory.data_structure.destination == replies
    assert message.reply_to == replies


# ---- Names ----


@pytest.mark.parametrize("address", ["/queue/foo", "/topic/foo"])
def test_name_that_is_an_address_of_stomp_is_refused_with_the_name_to_write(address: str) -> None:
    for read in (Destinations().target, source):
        with pytest.raises(RemoteProtocolError, match=rf"^{address} is .* name alone, foo$") as error:
            read(QueueName(address))
        assert error.value.code is Code.DESTINATION


# ---- What a user needs for a composite destination ----


def check_composite(name: str, *needed: str) -> None:
    """Check that a user needs the right to send to all of these for a message or producer of a JMS client."""
    destination = Destinations().target(QueueName(name))
    session = ConnectionState("own")
    commands = [Send(destination, SentMessage(4, True, 0, b"", b"")), OpenProducer(destination)]
    for command in commands:
        check = COMMAND_CHECKS[type(command)]
        check(User("shop", {Right.SEND: list(map(parse_pattern, needed))}), session, command)
        for missing in needed:
            granted = [parse_pattern(each) for each in needed if each != missing]
            with pytest.raises(ForbiddenError):
                check(User("shop", {Right.SEND: granted}), session, command)


COMPOSITES = [
    ("a,b", "a", "b"),
    ("a,topic://b", "a", "/topic/b"),
    ("queue://a, queue://b,c", "a", "b", "c"),
    (f"a,temp-queue://{CONNECTION}:1,b", "a", "b"),
]


@pytest.mark.parametrize("composite", COMPOSITES, ids=lambda each: each[0])
def test_composite_destination_needs_the_right_to_send_to_each_part(composite: tuple[str, ...]) -> None:
    check_composite(*composite)


@pytest.mark.parametrize("composite", COMPOSITES, ids=lambda each: each[0])
def test_composite_of_which_only_the_first_part_is_checked_is_noticed(
    composite: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_holes.of_several_destinations_only_the_first_is_checked(monkeypatch)
    with pytest.raises(pytest.fail.Exception):
        check_composite(*composite)


# ---- Compressed content (C4.5) ----

GROWN_BYTES = 1024 * 1024


def produce_compressed(client: JmsClient, destination: PhysicalDestination, count: int) -> None:
    """Send messages of 1 KB that have 1 MiB of text each."""
    producer = ProducerId(client.connection, 1, 1)
    text = GROWN_BYTES.to_bytes(4, "big") + b"a" * GROWN_BYTES
    content = zlib.compress(text, 9)
    client.send(
        *[
            TextMessage(
                5,
                False,
                producer,
                destination,
                message_id=MessageId(None, producer, number),
                content=content,
                is_compressed=True,
                is_persistent=True,
            )
            for number in range(count)
        ]
    )


def subscribe(destination: str, *more: str) -> bytes:
    lines = [f"destination:{destination}", "id:1", "ack:client-individual", "activemq.prefetchSize:1000", *more]
    return "\n".join(["SUBSCRIBE", *lines, "", "\0"]).encode()


@pytest.mark.parametrize(
    ("destination", "frame"),
    [
        (QUEUE, subscribe("/queue/a")),
        (QUEUE, subscribe("/queue/a", "browser:true")),
        (QUEUE, subscribe("/queue/a", "selector:b IS NULL")),
        (QUEUE, subscribe("/queue/>")),
        (TopicName("a"), subscribe("/topic/a")),
    ],
    ids=["queue", "browser", "selector", "pattern", "topic"],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["subscribed before", "subscribed after"])
def test_compressed_messages_to_a_stomp_client_that_reads_nothing_take_little_memory(
    broker: BrokerWithoutThreads,
    destination: PhysicalDestination,
    frame: bytes,
    is_first: bool,
) -> None:
    """60 messages of 16 KB became 2.8 GB."""
    producer, sock = JmsClient(broker), stomp_client(broker)
    if is_first:
        stomp_send(broker, sock, frame)
    sock.is_full = True
    produce_compressed(producer, destination, 60)
    tracemalloc.start()
    try:
        if is_first:
            produce_compressed(producer, destination, 60)
        else:
            stomp_send(broker, sock, frame)
        assert tracemalloc.get_traced_memory()[1] < 8 * GROWN_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("queues", "more"), [(1, "a:b"), (60, "a:b"), (60, "selector:b IS NULL")])
def test_one_turn_decompresses_few_messages_for_all_consumers(
    broker: BrokerWithoutThreads, monkeypatch: pytest.MonkeyPatch, queues: int, more: str
) -> None:
    """60 queues or consumers made a step of 60 MiB."""
    producer, consumers = JmsClient(broker), [stomp_client(broker) for _ in range(60)]
    for number in range(60):
        produce_compressed(producer, QueueName(f"a{number % queues}"), 1)
    count = largest = 0

    def counted(message: SentMessage) -> tuple[bytes, bytes]:
        nonlocal count
        count += 1
        return stomp_message(message)

    monkeypatch.setattr(replies, "stomp_message", counted)
    for number, sock in enumerate(consumers):
        sock.incoming.append(subscribe(f"/queue/a{number % queues}", more))
        broker.read(sock)
    while broker.loop.run_one():
        largest, count = max(largest, count), 0
    assert all(b"a" * GROWN_BYTES in sock.take_sent() for sock in consumers)
    assert 0 < largest <= 9


def test_compressed_messages_to_a_stomp_client_that_reads_arrive_all_and_whole(broker: BrokerWithoutThreads) -> None:
    producer, sock = JmsClient(broker), stomp_client(broker)
    produce_compressed(producer, QUEUE, 20)
    sock.take_sent()
    stomp_send(broker, sock, subscribe("/queue/a"))
    broker.settle()
    sent = sock.take_sent()
    assert sent.count(b"a" * GROWN_BYTES) == 20 and b"content-encoding" not in sent
