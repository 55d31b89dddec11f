"""Tests of OpenWire sessions with bytes that are cut anywhere, cut short, or changed: such a client is refused, or its
connection ends, and nothing else happens.

TRUENEXT_EXAMPLES=20000 pytest tests/unit/test_openwire_fuzz.py       longer
"""

import os
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.property.broker_without_threads import BrokerWithoutThreads, VirtualSocket
from tests.unit.damage import damage
from tests.unit.openwire_client import CONNECTION, QUEUE, Client, message_id
from tests.unit.openwire_examples import MESSAGE_CLASSES
from truenext.errors import RemoteProtocolError
from truenext.model.answers import ErrorAnswer
from truenext.model.commands import AckRun, Command, Credit, SendRun
from truenext.model.limits import LOGIN_BYTES_MAX, OPENWIRE_FRAME_BYTES_MAX
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map, text_value
from truenext.model.url import WireProtocol
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.structures import (
    BlobMessage,
    BrokerInfo,
    ConnectionControl,
    ConnectionId,
    ConnectionInfo,
    ConsumerControl,
    ConsumerId,
    ConsumerInfo,
    ControlCommand,
    DestinationInfo,
    FlushCommand,
    JmsMessage,
    KeepAliveInfo,
    LocalTransactionId,
    MessageAck,
    MessageId,
    MessagePull,
    ProducerId,
    ProducerInfo,
    QueueName,
    RemoveInfo,
    RemoveSubscriptionInfo,
    Response,
    SessionId,
    SessionInfo,
    ShutdownInfo,
    Structure,
    TemporaryQueueName,
    Throwable,
    TopicName,
    TransactionInfo,
)

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "100"))
bounded = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

OWN = ConnectionId(CONNECTION)
PRODUCER = ProducerId(CONNECTION, 1, 1)
CONSUMER = ConsumerId(CONNECTION, 1, 1)
TRANSACTION = LocalTransactionId(1, OWN)
PROPERTIES = encode_map(
    {
        "text": text_value("grün"),
        "list": TypedValue(
            Tag.LIST, [TypedValue(Tag.DOUBLE, 1.5), TypedValue(Tag.MAP, {"a": TypedValue(Tag.NULL, None)})]
        ),
    }
)


def _message(number: int, make: type[Structure], **others: object) -> Structure:
    return make(
        number,
        True,
        producer_id=PRODUCER,
        destination=QueueName("a,topic://b"),
        transaction_id=TRANSACTION,
        message_id=MessageId(None, PRODUCER, number),
        group_id="g",
        correlation_id="c",
        is_persistent=True,
        priority=4,
        reply_to=TemporaryQueueName(f"{CONNECTION}:1"),
        jms_type="type",
        content=b"\0\0\0\1a",
        marshalled_properties=PROPERTIES,
        **others,
    )


LOGIN: list[Structure] = [ConnectionInfo(1, True, OWN, "client", "password", "user")]
SAMPLES: list[Structure] = [
    SessionInfo(2, True, SessionId(CONNECTION, 1)),
    ProducerInfo(3, True, PRODUCER, QUEUE, window_size=1000),
    ConsumerInfo(4, True, CONSUMER, destination=QUEUE, prefetch_size=3, selector="a = 'b'", client_id="client"),
    ConsumerInfo(5, True, ConsumerId(CONNECTION, 1, 2), True, QUEUE),
    DestinationInfo(6, True, OWN, TemporaryQueueName(f"{CONNECTION}:1")),
    TransactionInfo(7, True, OWN, TRANSACTION, 0),
    *(_message(10 + number, make) for number, make in enumerate(MESSAGE_CLASSES)),
    _message(20, BlobMessage, remote_blob_url="http://localhost", mime_type="text/plain"),
    MessagePull(21, True, CONSUMER, QUEUE, 5, "c", message_id(1)),
    MessageAck(22, True, QUEUE, TRANSACTION, CONSUMER, 2, message_id(1), message_id(1), 1),
    MessageAck(23, True, QUEUE, None, CONSUMER, 1, message_id(1), message_id(1), 1, Throwable("a.B", "cause")),
    ConsumerControl(24, True, QUEUE, False, CONSUMER, 7),
    TransactionInfo(25, True, OWN, TRANSACTION, 2),
    KeepAliveInfo(26, True),
    ConnectionControl(27, True, reconnect_to="tcp://other", token=b"token"),
    FlushCommand(28, True),
    Response(29, True, 5),
    ControlCommand(30, True, "command"),
    RemoveSubscriptionInfo(31, True, OWN, "name", "client"),
    BrokerInfo(32, True, broker_name="other"),
    RemoveInfo(33, True, CONSUMER, 5),
    RemoveInfo(34, True, PRODUCER),
    RemoveInfo(35, True, SessionId(CONNECTION, 1), -1),
    RemoveInfo(36, True, OWN, -2),
    ShutdownInfo(37),
]
"""One command of each type, as a client sends them one after the other."""

Outcome = tuple[list[Command], list[Structure]]


def name_of(sample: Structure) -> str:
    return f"{type(sample).__name__} {getattr(sample, 'command_id', '')}"


def outcome(pieces: list[bytes], *, is_logged_in: bool = True) -> Outcome:
    """Return the commands and answers of a session for these pieces."""
    client = Client(logs_in=is_logged_in)
    for piece in pieces:
        client.write(piece)
    return client.commands, client.answers


# ---- Cut anywhere ----


@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_command_cut_anywhere_has_the_same_outcome(sample: Structure) -> None:
    # What comes before it, so that most commands are accepted.
    before = b"".join(map(encode_frame, SAMPLES[: SAMPLES.index(sample)]))
    data = encode_frame(sample)
    whole = outcome([before, data])
    for cut in range(1, len(data)):
        assert outcome([before, data[:cut], data[cut:]]) == whole, cut


def test_login_cut_anywhere_has_the_same_outcome() -> None:
    data = b"".join(map(encode_frame, LOGIN))
    whole = outcome([data], is_logged_in=False)
    for cut in range(1, len(data)):
        assert outcome([data[:cut], data[cut:]], is_logged_in=False) == whole, cut


STREAM = b"".join(map(encode_frame, [*LOGIN, *SAMPLES]))


def chunks(data: bytes, sizes: list[int]) -> list[bytes]:
    made = []
    for size in sizes:
        made.append(data[:size])
        data = data[size:]
    return [*made, data]


def comparable(found: Outcome) -> tuple[list[str], list[str]]:
    """Return what does not depend on the cut: not the time of requests for messages and of the session's own frames,
    which come after each read, nor which messages are a run."""
    commands: list[Command] = []
    for command in found[0]:
        if isinstance(command, SendRun | AckRun):
            commands += [command[number] for number in range(len(command))]
        elif not isinstance(command, Credit):
            commands.append(command)
    return list(map(repr, commands)), sorted(map(repr, found[1]))


@bounded
@given(st.lists(st.integers(1, 200), max_size=60))
def test_stream_in_random_pieces_has_the_same_outcome(sizes: list[int]) -> None:
    whole = comparable(outcome([STREAM], is_logged_in=False))
    assert comparable(outcome(chunks(STREAM, sizes), is_logged_in=False)) == whole


# ---- Cut short ----


@pytest.mark.parametrize("sample", [*LOGIN, *SAMPLES], ids=name_of)
def test_command_cut_short_ends_the_connection_and_does_nothing(sample: Structure) -> None:
    body = encode_frame(sample)[4:]
    is_logged_in = sample not in LOGIN
    for length in range(1, len(body)):
        client = Client(logs_in=is_logged_in)
        with pytest.raises(RemoteProtocolError):
            client.write(length.to_bytes(4, "big") + body[:length])
            pytest.fail(f"{length} bytes were taken")
        assert not client.commands and not client.answers


@pytest.mark.parametrize("sample", [*LOGIN, *SAMPLES], ids=name_of)
def test_command_that_never_completes_does_nothing_and_keeps_what_has_come(sample: Structure) -> None:
    data = encode_frame(sample)
    for length in range(1, len(data)):
        client = Client(logs_in=sample not in LOGIN)
        for at in range(0, length, 50):
            client.write(data[at : min(at + 50, length)])
        assert not client.commands and not client.answers
        assert len(client.session.pending) == length


@pytest.mark.parametrize("kind", [*range(1, 35), 91, 100, 255])
def test_frame_that_says_it_is_large_takes_only_what_has_come(kind: int) -> None:
    client = Client()
    data = OPENWIRE_FRAME_BYTES_MAX.to_bytes(4, "big") + bytes([kind]) + bytes(2000)
    tracemalloc.start()
    try:
        for at in range(0, len(data), 100):
            client.write(data[at : at + 100])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert len(client.session.pending) == len(data)


# ---- Changed ----

TOKENS = [
    b"\0",
    b"\1",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\0\0\0",
    b"\0\0\0\1\0",
    b"\xed\xa0\x80",
]


@st.composite
def damaged_streams(draw: st.DrawFn) -> bytes:
    """Frames with bytes flipped, cut out, put in or said twice; often with the right size, so that they are decoded."""
    frames = [
        bytearray(encode_frame(each)) for each in draw(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=6))
    ]
    for _ in range(draw(st.integers(1, 4))):
        data = frames[draw(st.integers(0, len(frames) - 1))]
        damage(draw, data, TOKENS)
        if draw(st.integers(0, 3)):
            data[:4] = max(0, len(data) - 4).to_bytes(4, "big")
    return b"".join(frames)


STREAMS = damaged_streams() | st.binary(max_size=200)
SIZES = st.lists(st.integers(1, 60), max_size=20)


def check_answers(answers: bytes) -> None:
    while answers:
        size = int.from_bytes(answers[:4], "big")
        assert 0 < size <= len(answers) - 4
        reader = FieldReader(answers[4 : 4 + size])
        decode_structure(reader)
        assert not reader.left
        answers = answers[4 + size :]


@bounded
@given(st.sampled_from([b"", encode_wire_format_info()]), STREAMS, SIZES)
def test_hostile_bytes_before_the_login_are_refused_or_harmless(opening: bytes, data: bytes, sizes: list[int]) -> None:
    client = Client(logs_in=False)
    try:
        for piece in chunks(opening + data, sizes):
            client.write(piece)
    except RemoteProtocolError as error:
        check_answers(client.session.replies.encode_fault(ErrorAnswer(str(error)[:200], error.code, str(error), "7")))


@bounded
@given(STREAMS, SIZES)
def test_cut_of_hostile_bytes_makes_no_difference(data: bytes, sizes: list[int]) -> None:
    found = []
    for pieces in ([data], chunks(data, sizes), [data[at : at + 1] for at in range(len(data))]):
        client = Client()
        error = None
        try:
            for piece in pieces:
                client.write(piece)
        except RemoteProtocolError as refused:
            error = str(refused)
            client.take_outgoing()
        found.append((error, *comparable((client.commands, client.answers))))
    assert found[0] == found[1] == found[2]


class Brokers:
    """Broker with a client that behaves, whose service no other client may disturb."""

    def __init__(self) -> None:
        self.broker = BrokerWithoutThreads()
        self.number = 0
        self.other = self.log_in("ID:other-1-1:1")

    def log_in(self, connection: str) -> VirtualSocket:
        sock = self.broker.connect()
        self.write(sock, encode_wire_format_info(0) + encode_frame(ConnectionInfo(1, True, ConnectionId(connection))))
        return sock

    def write(self, sock: VirtualSocket, data: bytes) -> None:
        sock.incoming.append(data)
        self.broker.read(sock)
        self.broker.settle()

    def check(self) -> None:
        """Check that the broker still serves the other client."""
        assert not self.broker.broker.failure.done()
        self.number += 1
        producer = ProducerId("ID:other-1-1:1", 1, 1)
        message = MESSAGE_CLASSES[1](
            self.number,
            True,
            producer,
            QueueName("of other"),
            message_id=MessageId(None, producer, self.number),
            is_persistent=True,
        )
        self.other.take_sent()
        self.write(self.other, encode_frame(message))
        assert encode_frame(Response(correlation_id=self.number)) in self.other.take_sent()


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    brokers = Brokers()
    yield brokers
    brokers.broker.close()


@settings(bounded, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=STREAMS, sizes=SIZES)
def test_hostile_bytes_disturb_neither_the_broker_nor_another_client(
    brokers: Brokers, data: bytes, sizes: list[int]
) -> None:
    sock = brokers.log_in(CONNECTION)
    for piece in chunks(data, sizes):
        if sock in brokers.broker.loop.readers:
            brokers.write(sock, piece)
    check_answers(sock.take_sent())
    sock.has_ended = True
    brokers.broker.read(sock)
    brokers.check()


# ---- Texts that are hard to write again ----

LONG = 65_535
HARD_BYTES = {
    "NULs of one byte": b"\0",
    "NULs of two bytes": b"\xc0\x80",
    "halves of pairs": b"\xed\xa0\x80",
    "pairs": b"\xed\xa0\xbd\xed\xb8\x80",
    "characters of three bytes": b"\xe4\xb8\xad",
}
"""Characters in modified UTF-8 that take more, or other, bytes in another encoding."""
IN_QUEUE = replace(_message(40, MESSAGE_CLASSES[5]), transaction_id=None, destination=QueueName("texts"))
HARD_SAMPLES: list[Structure] = [
    *[each for each in SAMPLES if not isinstance(each, JmsMessage)],
    IN_QUEUE,
    # Decoded by its table.
    replace(IN_QUEUE, is_droppable=True),
    ConsumerInfo(41, True, ConsumerId(CONNECTION, 1, 3), destination=TopicName("ActiveMQ.Advisory.TempQueue")),
]


def with_each_text(value: Structure, text: str) -> list[Structure]:
    """Return copies of a structure, each with this text in place of one string, in structures inside it too."""
    copies: list[Structure] = []
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if isinstance(field, str):
            copies.append(replace(value, **{name: text}))
        elif isinstance(field, Structure):
            copies += [replace(value, **{name: each}) for each in with_each_text(field, text)]
    return copies


@pytest.mark.parametrize("character", HARD_BYTES.values(), ids=HARD_BYTES)
def test_long_texts_that_are_hard_to_write_disturb_neither_the_broker_nor_another_client(
    brokers: Brokers, character: bytes
) -> None:
    """The broker ended when it wrote a text again whose NULs came as one byte each."""
    readers = [brokers.log_in("ID:reader-1-1:1"), brokers.broker.connect(WireProtocol.STOMP)]
    advisories = TopicName("ActiveMQ.Advisory.TempQueue,ActiveMQ.Advisory.TempTopic")
    reader_ids = [ConsumerId("ID:reader-1-1:1", 1, number) for number in range(2)]
    brokers.write(
        readers[0],
        encode_frame(ConsumerInfo(2, True, reader_ids[0], destination=advisories, prefetch_size=100))
        + encode_frame(
            ConsumerInfo(3, True, reader_ids[1], True, QueueName("texts"), prefetch_size=100, selector="JMSType <> ''")
        ),
    )
    brokers.write(
        readers[1],
        b"CONNECT\naccept-version:1.1\nhost:x\n\n\0SUBSCRIBE\nid:1\ndestination:/queue/texts\nselector:a IS NULL\n\n\0",
    )
    for length in (LONG, 200):
        text = "M" * length
        hard = (character * length)[: length // len(character) * len(character)].ljust(length, b"M")
        for sample in [*LOGIN, *HARD_SAMPLES]:
            if sample in LOGIN and length > LOGIN_BYTES_MAX:
                continue
            for copy in with_each_text(sample, text):
                if isinstance(copy, ConnectionInfo):
                    sock = brokers.broker.connect()
                    brokers.write(sock, encode_wire_format_info(0))
                else:
                    sock = brokers.log_in(CONNECTION)
                brokers.write(sock, encode_frame(copy).replace(text.encode(), hard))
                assert not brokers.broker.broker.failure.done(), (copy.__class__, length)
                check_answers(sock.take_sent())
                sock.has_ended = True
                brokers.broker.read(sock)
                for reader in readers:
                    reader.take_sent()
    brokers.check()
    for reader in readers:
        reader.has_ended = True
        brokers.broker.read(reader)
