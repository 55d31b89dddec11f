"""Tests of the OpenWire form of a message: what is stored, and what JMS and STOMP clients get of it."""

import struct
import tracemalloc
import zlib
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.openwire_examples import PROPERTIES, produced, unhurried
from truenext.model.forms import comparison_ns
from truenext.model.header_lines import decode_header_lines, encode_header_lines
from truenext.model.limits import (
    BODY_BYTES_MAX,
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    OPENWIRE_FRAME_BYTES_MAX,
)
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map, encode_modified_utf8, text_value
from truenext.model.message import OPENWIRE_FORM, SentMessage, with_due, with_ttl
from truenext.model.openwire_message import (
    closes_group,
    destination_as_sent,
    group_of_message,
    header_lines,
    jms_headers,
    message_id,
    openwire_message,
    physical_name,
    properties_of,
    split_body,
    stomp_message,
    window_bytes,
)
from truenext.model.record import decode_record, encode_record, lane_key, message_key
from truenext.model.selector import compile_selector
from truenext.wire.openwire.codec import produced_message
from truenext.wire.openwire.deliveries import DispatchEncoder
from truenext.wire.openwire.fields import decode_structure
from truenext.wire.openwire.structures import (
    BytesMessage,
    ConsumerId,
    JmsMessage,
    MapMessage,
    MessageDispatch,
    MessageId,
    ObjectMessage,
    PhysicalDestination,
    ProducerId,
    QueueName,
    StreamMessage,
    TemporaryQueueName,
    TextMessage,
    TopicName,
)

PRODUCER = ProducerId("ID:host-1:1", 3, 2)
CONSUMER = ConsumerId("ID:other-1:1", 1, 1)
KEY = message_key(lane_key(7, 5), 1234)
ORDERS = QueueName("orders")
PLAIN = TextMessage(1, True, PRODUCER, ORDERS, message_id=MessageId(None, PRODUCER, 5), priority=4)


def counted(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def sent(message: JmsMessage = PLAIN, **fields: object) -> SentMessage:
    """Message in OpenWire form, from a producer's message with these fields."""
    return produced_message(replace(message, **fields)).message


def properties(**values: TypedValue) -> bytes:
    return encode_map(values)


def dispatched(message: SentMessage, destination: PhysicalDestination = ORDERS, sequence: int = 77) -> JmsMessage:
    """Message as a JMS client gets it."""
    frame = DispatchEncoder(CONSUMER, destination, "abc").encode(message, sequence, 2, 1_000)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    reader = FieldReader(frame, 4)
    dispatch = decode_structure(reader)
    assert not reader.left
    assert isinstance(dispatch, MessageDispatch)
    assert dispatch.consumer_id == CONSUMER
    assert dispatch.destination == destination
    assert dispatch.redelivery_counter == 2
    assert dispatch.message is not None
    return dispatch.message


def lines(message: SentMessage) -> dict[str, str]:
    return decode_header_lines(header_lines(message))


# ---- What a JMS client gets ----


@unhurried(200)
@given(produced(), st.booleans())
def test_dispatch_has_the_fields_of_the_producer_alone(message: JmsMessage, is_moved: bool) -> None:
    found = produced_message(message)
    queue = QueueName("another") if is_moved else found.destination
    got = dispatched(found.message, queue)
    first = message.original_destination or found.destination
    assert message.message_id is not None
    wanted = replace(
        message,
        command_id=0,
        response_required=False,
        producer_id=message.message_id.producer_id,
        destination=queue,
        original_destination=None if first == queue else first,
        transaction_id=None,
        original_transaction_id=None,
        message_id=replace(message.message_id, broker_sequence_id=77),
        expiration=max(message.expiration, 0),
        priority=max(0, min(message.priority, 9)),
        user_id=None,
        arrival=0,
        redelivery_counter=2,
        broker_out_time=1_000,
    )
    assert type(got) is type(message)
    assert got == wanted


def test_message_id_is_the_same_after_a_restart_and_as_a_dead_letter() -> None:
    message = sent()
    first = message_id(message)
    assert first == "ID:host-1:1:2:3:5"
    letter = replace(message, header=b"truenext-dead-letter-cause:rejected\n", redrive_queue="q")
    for one in (
        decode_record(KEY, encode_record(KEY, message)),
        letter,
        decode_record(KEY, encode_record(KEY, letter)),
    ):
        assert message_id(one) == first
        assert dispatched(one, sequence=99).message_id == MessageId(None, PRODUCER, 5, 99)
    assert message_id(sent(message_id=MessageId("ID:foreign", PRODUCER, 5))) == "ID:foreign"


def test_lines_of_the_broker_are_properties_of_the_dispatched_message() -> None:
    message = sent(marshalled_properties=properties(a=TypedValue(Tag.INTEGER, 1), b=text_value("old")))
    message.header = b"truenext-due:5\ntruenext-original-last-cause:out\\c of paper\nb:new\n"
    got = dispatched(message)
    assert got.marshalled_properties is not None
    found = FieldReader(got.marshalled_properties).read_map()
    assert found == {
        "a": TypedValue(Tag.INTEGER, 1),
        "b": text_value("new"),
        "truenext-due": text_value("5"),
        "truenext-original-last-cause": text_value("out: of paper"),
        "dlqDeliveryFailureCause": text_value("out: of paper"),
    }
    assert properties_of(openwire_message(replace(message, body=sent().body), 1, "abc")).keys() == found.keys() - {"a"}


@pytest.mark.parametrize("redrive_queue", ["", "orders", "subscription,me,n,news"])
def test_record_of_a_message_in_openwire_form_is_decoded_unchanged(redrive_queue: str) -> None:
    message = sent(group_id="g", group_sequence=-1)
    message = replace(message, header=b"truenext-due:5\n", redrive_queue=redrive_queue, arrived_ms=9)
    record = encode_record(KEY, message)
    assert decode_record(KEY, record) == message
    assert record[4] == 4


def test_record_of_a_stomp_message_tells_a_text_without_a_new_version() -> None:
    message = SentMessage(4, True, 0, b"a:b\n", b"text", is_text=True)
    record = encode_record(KEY, message)
    assert decode_record(KEY, record) == message
    assert record[4] == 2
    plain = encode_record(KEY, replace(message, is_text=False))
    assert [at for at in range(4, len(record)) if record[at] != plain[at]] == [5]
    # An earlier version reads the flags one by one.
    rest = plain[4:]
    assert crc32(rest, crc32(KEY)).to_bytes(4, "little") == plain[:4]


@pytest.mark.parametrize("content", [None, b"", b"12345"])
@pytest.mark.parametrize("marshalled", [None, b"", b"\0\0\0\0"])
def test_window_bytes_are_those_that_activemq_counts(content: bytes | None, marshalled: bytes | None) -> None:
    message = sent(content=content, marshalled_properties=marshalled)
    assert window_bytes(message) == 1024 + len(content or b"") + len(marshalled or b"")


# ---- What a STOMP client gets ----


def test_header_lines_have_the_jms_headers_and_properties() -> None:
    message = sent(
        correlation_id="c:1",
        reply_to=TemporaryQueueName("ID:host-1:1:7"),
        jms_type="t",
        group_id="g",
        group_sequence=3,
        is_persistent=True,
        priority=7,
        expiration=1_800_000_000_000,
        content=counted(b"hello"),
        marshalled_properties=properties(
            truth=TypedValue(Tag.BOOLEAN, True),
            number=TypedValue(Tag.LONG, -5),
            double=TypedValue(Tag.DOUBLE, 1e10),
            single=TypedValue(Tag.FLOAT, struct.unpack(">f", struct.pack(">f", 0.1))[0]),
            text=text_value("ä:\n"),
        ),
    )
    assert lines(message) == {
        "destination": "/queue/orders",
        "priority": "7",
        "persistent": "true",
        "expires": "1800000000000",
        "correlation-id": "c:1",
        "reply-to": "/remote-temp-queue/ID:host-1:1/7",
        "type": "t",
        "JMSXGroupID": "g",
        "JMSXGroupSeq": "3",
        "content-length": "5",
        "truth": "true",
        "number": "-5",
        "double": "1.0E10",
        "single": "0.1",
        "text": "ä:\n",
    }
    assert stomp_message(message)[1] == b"hello"


def test_lines_of_the_broker_come_before_those_of_the_producer() -> None:
    message = with_ttl(with_due(sent(), 1000), 10, 1000)
    message.header += b"destination:/queue/DLQ.orders\n"
    found = lines(message)
    assert found["destination"] == "/queue/DLQ.orders"
    assert found["truenext-due"] == "1000"
    assert found["expires"] == "1010"
    assert header_lines(message).count(b"destination:") == 1


def test_properties_that_no_stomp_client_could_send_are_no_header_lines() -> None:
    names = ["destination", "content-length", "truenext-sequence", "ack", "truenext-failure", "", "JMSXGroupID"]
    message = sent(
        marshalled_properties=encode_map(
            {
                **{name: text_value("x") for name in names},
                "null": TypedValue(Tag.NULL, None),
                "bytes": TypedValue(Tag.BYTES, b"x"),
                "list": TypedValue(Tag.LIST, []),
                "nul": text_value("a\0b"),
                "half": text_value("\ud83d"),
            }
        )
    )
    found = lines(message)
    assert found.keys() == {"destination", "priority", "content-length", "nul", "half"}
    assert found["destination"] == "/queue/orders"
    assert found["nul"] == "a\ufffdb"
    assert found["half"] == "?"


def test_header_lines_are_as_few_as_a_frame_may_have() -> None:
    many = sent(marshalled_properties=encode_map({f"p{number}": text_value("x") for number in range(5000)}))
    assert len(lines(many)) <= HEADERS_MAX
    long = sent(marshalled_properties=encode_map({f"p{number}": text_value(":" * 9000) for number in range(50)}))
    assert len(header_lines(long)) <= HEADER_BYTES_MAX


@pytest.mark.parametrize("data", [b"", b"\0\0\0\5", b"\x7f\xff\xff\xff", b"\0\0\0\1\0\1a\x63", b"\xff\xff\xff\xff"])
def test_properties_that_are_no_map_are_none(data: bytes) -> None:
    message = sent(marshalled_properties=data)
    assert properties_of(message) == {}
    assert "destination" in lines(message)
    assert not compile_selector("a = 1").matches(message)
    assert dispatched(message).marshalled_properties == data


@pytest.mark.parametrize("character", ["a", "\0", "\n", "\u4e2d", "\U0001f600"])
def test_header_lines_of_long_jms_headers_are_no_longer_than_those_of_a_send(character: str) -> None:
    """A client of truenext would not take the frame, nor any later one of the queue."""
    size = 60_000 // len(encode_modified_utf8(character))
    for length in (size, HEADER_BYTES_MAX // 16):
        text = character * min(size, length)
        message = sent(
            correlation_id=text,
            reply_to=QueueName(text),
            jms_type=text,
            marshalled_properties=properties(**{f"p{number}": text_value("a" * 1000) for number in range(50)}),
        )
        assert len(header_lines(message)) <= HEADER_BYTES_MAX
        found = lines(message)
        assert ("correlation-id" in found) == ("type" in found) == (len(text) <= HEADER_BYTES_MAX // 16)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@unhurried(100)
@given(TEXTS, st.booleans())
def test_text_reaches_stomp_clients_as_utf8(text: str, is_compressed: bool) -> None:
    content = counted(encode_modified_utf8(text))
    message = sent(content=zlib.compress(content) if is_compressed else content, is_compressed=is_compressed)
    found, body = stomp_message(message)
    assert body == text.encode()
    assert decode_header_lines(found)["content-length"] == str(len(body))


@pytest.mark.parametrize(("size", "is_text"), [(21_000, True), (22_000, False)])
def test_long_text_with_halves_of_pairs_is_the_body_as_it_is(size: int, is_text: bool) -> None:
    content = counted(encode_modified_utf8("\ud83d" * size))
    assert stomp_message(sent(content=content))[1] == (b"?" * size if is_text else content)


@pytest.mark.parametrize(
    ("make", "kind", "content"),
    [(BytesMessage, None, b"\0\1\2"), (MapMessage, "map", b"\0\0\0\0"), (ObjectMessage, "object", b"\xac\xed"),
     (StreamMessage, "stream", b"\1\1"), (JmsMessage, None, b"")],
)  # fmt: skip
def test_other_content_reaches_stomp_clients_as_it_is(make: type[JmsMessage], kind: str | None, content: bytes) -> None:
    plain = make(1, True, PRODUCER, QueueName("orders"), message_id=MessageId(None, PRODUCER, 5), content=content)
    assert stomp_message(sent(plain))[1] == content
    assert lines(sent(plain)).get("amq-msg-type") == kind
    compressed = zlib.compress(content)
    counted_content = struct.pack(">i", len(content)) + compressed
    message = sent(replace(plain, content=counted_content if make is BytesMessage else compressed, is_compressed=True))
    found = lines(message)
    assert found.get("amq-msg-type") == kind
    if make is BytesMessage:
        assert stomp_message(message)[1] == content and "content-encoding" not in found
    else:
        # Only text and bytes are decompressed.
        assert stomp_message(message)[1] == compressed and found["content-encoding"] == "deflate"


@pytest.mark.parametrize("content", [None, b"\xff\xff\xff\xff", b"\0\0\0\0"])
def test_text_that_is_null_or_empty_is_an_empty_body(content: bytes | None) -> None:
    assert stomp_message(sent(content=content))[1] == b""


@pytest.mark.parametrize("content", [b"\0", b"\0\0\0\7ab", counted(b"\xed\xa0"), b"\xff\xff\xff\xffa"])
def test_content_that_is_no_text_is_the_body_as_it_is(content: bytes) -> None:
    for is_compressed in (False, True):
        assert stomp_message(sent(content=content, is_compressed=is_compressed))[1] == content


BYTES_MESSAGE = BytesMessage(1, True, PRODUCER, ORDERS, message_id=MessageId(None, PRODUCER, 5))


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("excess", [0, 1])
def test_content_that_would_be_too_long_is_not_decompressed(is_text: bool, excess: int) -> None:
    size = DECOMPRESSED_BYTES_MAX - (4 if is_text else 0) + excess
    plain = bytes(size)
    if is_text:
        plain = b"a" * size
        message = sent(content=(stream := zlib.compress(counted(plain))), is_compressed=True)
    else:
        stream = zlib.compress(plain)
        message = sent(BYTES_MESSAGE, content=struct.pack(">i", size) + stream, is_compressed=True)
    found, body = stomp_message(message)
    assert body == (stream if excess else plain)
    assert decode_header_lines(found).get("content-encoding") == ("deflate" if excess else None)
    assert message.growth == 0 if excess else message.growth > 0.99 * size


@pytest.mark.parametrize(
    ("said", "real"),
    [(10, 11), (10, 9), (0, 1), (DECOMPRESSED_BYTES_MAX, 5), (100, 2 * DECOMPRESSED_BYTES_MAX), (-5, 5)],
)
def test_content_that_says_a_wrong_length_stays_compressed(said: int, real: int) -> None:
    plain = b"".join([struct.pack(">i", said), bytes(real)])
    text = sent(content=zlib.compress(plain), is_compressed=True)
    others = sent(BYTES_MESSAGE, content=struct.pack(">i", said) + zlib.compress(bytes(real)), is_compressed=True)
    for message in (text, others):
        tracemalloc.start()
        try:
            found, body = stomp_message(message)
            assert tracemalloc.get_traced_memory()[1] < 2 * DECOMPRESSED_BYTES_MAX
        finally:
            tracemalloc.stop()
        assert zlib.decompress(body)[-real:] == bytes(real)
        assert decode_header_lines(found)["content-encoding"] == "deflate"


def test_growth_of_a_message_is_that_of_its_body_and_is_known_when_it_is_read_from_the_store() -> None:
    plain = counted(b"a" * 100_000)
    for message in (sent(content=zlib.compress(plain), is_compressed=True), sent(content=plain)):
        read = decode_record(KEY, encode_record(KEY, message))
        assert read == message
        assert read.growth == (100_004 - 5 - len(zlib.compress(plain)) if message.body[1] else 0)


# ---- What a JMS client gets of a STOMP message ----


def stomp(body: bytes = b"hi", **headers: str) -> SentMessage:
    found = {"destination": "/queue/orders", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return SentMessage(4, True, 0, encode_header_lines(found | {"content-length": str(len(body))}), body, 1_000)


def test_stomp_message_is_dispatched_with_its_headers() -> None:
    message = stomp(
        correlation_id="c",
        reply_to="/queue/replies",
        type="t",
        colour="red",
        persistent="true",
        priority="4",
        JMSXGroupID="g",
        JMSXGroupSeq="-1",
    )
    message.group = "g"
    got = dispatched(message, sequence=2**31 + 5)
    assert got.message_id == MessageId(None, ProducerId("ID:truenext-abc", 1, -1), 5, 2**31 + 5)
    assert got.producer_id == got.message_id.producer_id
    assert (got.destination, got.original_destination) == (QueueName("orders"), None)
    assert (got.correlation_id, got.reply_to, got.jms_type) == ("c", QueueName("replies"), "t")
    assert (got.group_id, got.group_sequence) == ("g", -1)
    assert (got.is_persistent, got.priority, got.timestamp, got.arrival) == (True, 4, 1_000, 1_000)
    assert got.marshalled_properties is not None
    assert FieldReader(got.marshalled_properties).read_map() == {"colour": text_value("red")}


@pytest.mark.parametrize(
    ("body", "is_text", "kind", "content"),
    [
        (b"hi", True, None, counted(b"hi")),
        (b"hi", False, None, None),
        (b"hi", False, "text", counted(b"hi")),
        (b"hi", True, "bytes", None),
        (b"\xff", True, None, None),
        (b"\xff", True, "text", None),
        ("😀\0".encode(), True, None, counted(b"\xed\xa0\xbd\xed\xb8\x80\xc0\x80")),
        (b"", True, None, counted(b"")),
    ],
)
def test_stomp_body_is_text_or_bytes(body: bytes, is_text: bool, kind: str | None, content: bytes | None) -> None:
    message = stomp(body) if kind is None else stomp(body, amq_msg_type=kind)
    message.is_text = is_text
    got = dispatched(message)
    assert type(got) is (BytesMessage if content is None else TextMessage)
    assert got.content == (body if content is None else content)
    assert got.marshalled_properties is None


def test_large_stomp_message_fits_the_announced_frame() -> None:
    # Each character takes six bytes instead of four, so the text is sent as bytes.
    body = "😀".encode() * (BODY_BYTES_MAX // 4)
    headers = {f"😀{number}": "😀" * 120 for number in range(120)}
    message = stomp(body)
    message.header = encode_header_lines(headers) + message.header
    message.is_text = True
    got = dispatched(message)
    assert isinstance(got, BytesMessage)
    frame = DispatchEncoder(CONSUMER, QueueName("orders"), "abc").encode(message, 1, 0, 0)
    assert len(frame) <= OPENWIRE_FRAME_BYTES_MAX


def test_header_lines_that_openwire_cannot_have_are_left_out() -> None:
    message = stomp(correlation_id="é" * 40_000, type="é" * 40_000, reply_to="nowhere")
    got = dispatched(message)
    assert (got.correlation_id, got.jms_type, got.reply_to) == (None, None, None)
    assert got.marshalled_properties is not None
    assert FieldReader(got.marshalled_properties).read_map() == {
        "type": text_value("é" * 40_000),
        "reply-to": text_value("nowhere"),
    }


@unhurried(100)
@given(PROPERTIES)
def test_message_keeps_texts_from_jms_to_stomp_and_back(values: dict[str, TypedValue]) -> None:
    message = sent(marshalled_properties=encode_map(values), content=counted(b"hi"))
    found, body = stomp_message(message)
    assert body == b"hi"
    again = dispatched(replace(message, form=0, header=found, body=body, is_text=True))
    assert again.content == counted(b"hi")
    names: set[str] = set()
    if again.marshalled_properties is not None:
        names |= (FieldReader(again.marshalled_properties).read_map() or {}).keys()
    assert names == set(values)


# ---- Addresses ----


@pytest.mark.parametrize(
    ("destination", "address"),
    [
        (QueueName("a.b"), "/queue/a.b"),
        (TopicName("a"), "/topic/a"),
        (TemporaryQueueName("ID:host-1:1:7"), "/remote-temp-queue/ID:host-1:1/7"),
        (TemporaryQueueName("1a2b/replies"), "/remote-temp-queue/1a2b/replies"),
        (QueueName("a,topic://b,c"), "/queue/a,/topic/b,/queue/c"),
    ],
)
def test_destination_and_address_name_each_other(destination: PhysicalDestination, address: str) -> None:
    message = sent(destination=destination)
    assert lines(message)["destination"] == address
    name = physical_name(address)
    assert name is not None
    assert (name.type, name.name) == (destination.TYPE, destination.name)
    assert destination_as_sent(message) == name


def test_address_of_another_kind_has_no_name_in_openwire() -> None:
    assert physical_name("/control/status") is None
    assert physical_name("") is None


# ---- Groups and selectors ----


def test_group_and_its_end_are_those_of_the_producer() -> None:
    message = sent(group_id="g", group_sequence=-1)
    assert (message.group, group_of_message(message), closes_group(message)) == ("g", "g", True)
    assert not closes_group(sent(group_id="g", group_sequence=0))
    assert not closes_group(sent(group_sequence=-1))
    assert jms_headers(message).group_sequence == -1
    assert sent(group_id="\ud83d").group == "?"


TYPED = sent(
    correlation_id="7",
    jms_type="t",
    timestamp=123,
    priority=6,
    group_id="g",
    content=counted(b"hello"),
    marshalled_properties=properties(
        text=text_value("5"),
        five=TypedValue(Tag.INTEGER, 5),
        half=TypedValue(Tag.DOUBLE, 0.5),
        single=TypedValue(Tag.FLOAT, 0.5),
        big=TypedValue(Tag.LONG, 2**62),
        yes=TypedValue(Tag.BOOLEAN, True),
        word=text_value("true"),
        none=TypedValue(Tag.NULL, None),
        data=TypedValue(Tag.BYTES, b"5"),
        priority=text_value("high"),
        type=text_value("own"),
    ),
)
TYPED.header = b"truenext-original-attempts:3\n"


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("five = 5", True),
        ("five > 4.5 AND five BETWEEN 5 AND 5", True),
        ("five = '5'", False),
        ("five <> '5'", False),
        ("five IN ('5')", False),
        ("NOT five IN ('5')", False),
        ("five LIKE '5'", False),
        ("text = '5'", True),
        ("text = 5", False),
        ("text <> 5", False),
        ("text > 4", False),
        ("text + 1 = 6", False),
        ("text LIKE '_'", True),
        ("text IN ('4', '5')", True),
        ("half = 0.5 AND single = half", True),
        ("big = 4611686018427387904", True),
        ("five = yes", False),
        ("yes", True),
        ("yes = TRUE", True),
        ("yes = 1", False),
        ("word = TRUE", False),
        ("word", False),
        ("NOT word", False),
        ("none IS NULL AND data IS NULL AND missing IS NULL", True),
        ("data = '5'", False),
        ("text <> five", False),
        ("text = text", True),
        ("priority = 'high'", True),
        ("JMSPriority = 6", True),
        ("JMSType = 't' AND JMSCorrelationID = '7'", True),
        ("JMSCorrelationID = 7", False),
        ("type = 'own' AND JMSType <> type", True),
        ("correlation_id = '7'", True),
        ("JMSXGroupSeq < 1", True),
        ("JMSTimestamp = 123", True),
        ("JMSXGroupID = 'g'", True),
        ("JMSDestination = 'queue://orders'", True),
        ("JMSDestination LIKE 'topic:%'", False),
        ("JMSMessageID = 'ID:host-1:1:2:3:5'", True),
        ("JMSMessageID IN ('x')", False),
        ("destination = '/queue/orders'", True),
        ("content_length IS NULL", True),
        ("truenext_original_attempts > 2", True),
        (" AND ".join(f"p{number} IS NULL" for number in range(9)) + " AND five = 5", True),
    ],
)
def test_selector_compares_properties_by_their_types(selector: str, matches: bool) -> None:
    compiled = compile_selector(selector)
    assert compiled.matches(TYPED) is matches
    assert compiled.cost_ns(TYPED) >= compiled.byte_ns * (len(TYPED.body) - 20)
    if compiled.required is not None:
        key, texts = compiled.required
        assert (key.text_of(TYPED) in texts) or not matches


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("JMSDestination = 'queue://orders'", True),
        ("JMSMessageID IS NULL", True),
        ("JMSMessageID = 'x'", False),
        ("number = 5 AND number = '5' AND word = TRUE", True),
        ("number <> word", True),
    ],
)
def test_selector_converts_the_headers_of_stomp(selector: str, matches: bool) -> None:
    message = stomp(number="5", word="true")
    assert compile_selector(selector).matches(message) is matches
    letter = stomp(truenext_original_destination="/queue/first")
    assert compile_selector("JMSDestination = 'queue://first'").matches(letter)


def test_selectors_read_all_of_a_message_but_its_content() -> None:
    small, large = sent(content=counted(b"")), sent(content=counted(bytes(5000)))
    assert comparison_ns(small, 1, 2) == comparison_ns(large, 1, 2)
    assert comparison_ns(stomp(a="b"), 1, 2) == 1 + 2 * len(stomp(a="b").header)


def test_cost_of_selectors_has_the_time_to_read_once_for_each_and_the_search_for_all_bytes() -> None:
    message = sent(marshalled_properties=properties(a=text_value("b" * 1000), c=text_value("d")))
    read_once, searched = comparison_ns(message, 0, 0), comparison_ns(message, 0, 1, 0)
    assert 30_000 < read_once < 40_000 and 1_000 < searched < 1_200
    assert comparison_ns(message, 5, 7, 3) == 5 + 3 * read_once + 7 * searched
    other = sent(marshalled_properties=properties(a=text_value("b" * 1000)))
    assert comparison_ns(message, 0, 0) > comparison_ns(other, 0, 0)


def test_body_is_split_into_what_it_was_joined_of() -> None:
    message = sent(reply_to=QueueName("r"), content=counted(b"hi"), marshalled_properties=properties(a=text_value("b")))
    slices = split_body(message.body)
    assert slices.join() == message.body
    assert slices.content == b"\1" + counted(counted(b"hi"))
    assert message.form == OPENWIRE_FORM
