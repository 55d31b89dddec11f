"""Tests of OpenWire's codec: fields, structures, frames in any pieces, and wrong bytes."""

import random
import tracemalloc
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.openwire_examples import (
    ALL_VALUES,
    COMMANDS,
    TEXTS,
    produced,
    structures,
    unhurried,
)
from truenext.errors import RemoteProtocolError
from truenext.model.limits import LOGIN_BYTES_MAX, MAP_DEPTH_MAX, OPENWIRE_FRAME_BYTES_MAX
from truenext.model.loose_fields import (
    FieldReader,
    Tag,
    TypedValue,
    decode_modified_utf8,
    encode_map,
    encode_modified_utf8,
    encode_value,
    has_half_pair,
)
from truenext.wire.openwire import codec
from truenext.wire.openwire.codec import (
    AckedRun,
    Decoded,
    OpenWireDecoder,
    ProducedMessage,
    ProducedRun,
    RefusedMessage,
    produced_message,
)
from truenext.wire.openwire.fields import decode_structure, encode_frame, encode_structure
from truenext.wire.openwire.handshake import OPENWIRE_VERSION, encode_wire_format_info, negotiate
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConnectionInfo,
    ConsumerId,
    DataArrayResponse,
    JmsMessage,
    KeepAliveInfo,
    LocalTransactionId,
    MessageAck,
    MessageId,
    ProducerId,
    ProducerInfo,
    QueueName,
    SessionInfo,
    Structure,
    TextMessage,
    Throwable,
    TopicName,
    TransactionInfo,
    WireCommand,
    WireFormatInfo,
    structure_classes,
)

CONNECTION = "ID:host-52371-1700000000000-1:1"
PRODUCER = ProducerId(CONNECTION, 1, 1)
CONSUMER = ConsumerId(CONNECTION, 1, 2)
NULL_FRAME = b"\0\0\0\1\0"
MESSAGE = TextMessage(
    7,
    True,
    PRODUCER,
    QueueName("orders"),
    message_id=MessageId(None, PRODUCER, 5),
    correlation_id="c",
    is_persistent=True,
    priority=4,
    reply_to=QueueName("replies"),
    jms_type="t",
    content=b"\0\0\0\2hi",
    marshalled_properties=encode_map({"a": TypedValue(Tag.INTEGER, 1)}),
)
ACK = MessageAck(
    8,
    False,
    QueueName("orders"),
    LocalTransactionId(3, ConnectionId(CONNECTION)),
    ConsumerId(CONNECTION, 1, 2),
    2,
    MessageId(None, PRODUCER, 5, 9),
    MessageId(None, PRODUCER, 6, 10),
    2,
)
COMMIT = TransactionInfo(9, True, ConnectionId(CONNECTION), LocalTransactionId(3, ConnectionId(CONNECTION)), 2)
Commands = list[Decoded]


OPENING = encode_frame(WireFormatInfo(12))


def connected() -> OpenWireDecoder:
    """Decoder of a connection that has logged in."""
    decoder = OpenWireDecoder()
    decoder.receive(OPENING)
    decoder.is_connected = True
    return decoder


def decode(data: bytes) -> Structure:
    reader = FieldReader(data)
    structure = decode_structure(reader)
    assert not reader.left
    return structure


def expected(structure: Structure) -> Structure | ProducedMessage:
    """Result of the decoder for a structure, by its table alone."""
    if isinstance(structure, JmsMessage) and structure.TYPE < 29:
        return produced_message(structure)
    return structure


def single(commands: Sequence[Decoded]) -> Commands:
    """Return commands as a session executes them one by one: of runs each message and each acknowledgement, and of both
    only what the session needs."""
    found: Commands = []
    for command in commands:
        if isinstance(command, ProducedRun):
            found += map(command.single, range(len(command.messages)))
        elif isinstance(command, AckedRun):
            found += map(command.single, range(len(command.sequences)))
        else:
            assert not isinstance(command, RefusedMessage), "no message of these tests is too large"
            found.append(command)
    return [_needed(command) for command in found]


def _needed(command: Decoded) -> Decoded:
    if isinstance(command, ProducedMessage) and not command.response_required:
        return replace(command, command_id=0)
    if isinstance(command, MessageAck) and not command.response_required and command.transaction_id is None:
        first, last = [
            None if each is None else MessageId(broker_sequence_id=each.broker_sequence_id)
            for each in (command.first_message_id, command.last_message_id)
        ]
        return replace(command, command_id=0, destination=None, first_message_id=first, last_message_id=last)
    return command


# ---- Fields ----


@unhurried(100)
@given(TEXTS | st.text(st.characters(), max_size=30))
def test_modified_utf8_is_decoded_to_the_same_text(text: str) -> None:
    data = encode_modified_utf8(text)
    # A pair of surrogates is one character.
    whole = text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")
    assert decode_modified_utf8(data) == whole
    assert b"\0" not in data
    assert not any(byte >= 0xF0 for byte in data)


PIECES = [
    *(bytes([each]) for each in b"a\0\xed\xa0\xb0\x80\xc0\xf4\x8d\xff"),
    b"\xc0\x80",
    b"\xe4\xb8\xad",
    b"\xed\x9f\xbf",
]
PAIRS = [b"\xed\xa0\xbd\xed\xb8\x80", b"\xed\xa0\xbd", b"\xed\xb8\x80", b"\xf0\x9f\x98\x80", b"\xf4\x8d\xa0\xbd"]


@unhurried(500)
@given(st.lists(st.sampled_from(PIECES + PAIRS), max_size=8).map(b"".join))
def test_modified_utf8_is_decoded_as_python_decodes_each_character(data: bytes) -> None:
    expected = None
    try:
        text = data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")
        if max(text, default="") <= "\uffff":
            expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    except UnicodeDecodeError:
        pass
    if expected is None:
        with pytest.raises(RemoteProtocolError, match="text is not modified UTF-8"):
            decode_modified_utf8(data)
        return
    assert decode_modified_utf8(data) == expected
    if has_half_pair(expected):
        with pytest.raises(RemoteProtocolError, match="text is not modified UTF-8"):
            decode_modified_utf8(data, allows_half_pairs=False)
    else:
        assert decode_modified_utf8(data, allows_half_pairs=False) == expected


@pytest.mark.parametrize("data", [b"\xff", b"\xf0\x9f\x98\x80", b"\xc3", b"\xe0\x80\x80", b"a\x80"])
def test_text_that_is_no_modified_utf8_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="text is not modified UTF-8"):
        decode_modified_utf8(data)


@unhurried(100)
@given(ALL_VALUES)
def test_value_is_decoded_unchanged(value: TypedValue) -> None:
    reader = FieldReader(encode_value(value))
    assert encode_value(reader.read_value()) == encode_value(value)
    assert not reader.left


def test_map_inside_too_many_maps_is_refused() -> None:
    value = TypedValue(Tag.NULL, None)
    for _ in range(MAP_DEPTH_MAX):
        value = TypedValue(Tag.LIST, [value])
    assert FieldReader(encode_value(value)).read_value() == value
    deep = encode_value(TypedValue(Tag.MAP, {"a": value}))
    with pytest.raises(RemoteProtocolError, match="more than 32 maps and lists inside one another"):
        FieldReader(deep).read_value()


def test_list_with_too_many_values_is_refused_before_it_is_made() -> None:
    data = b"\x0c" + (70_000).to_bytes(4, "big") + bytes(70_000)
    with pytest.raises(RemoteProtocolError, match="more than 65536 values in the maps and lists of one frame"):
        FieldReader(data).read_value()


@pytest.mark.parametrize(
    "data",
    [
        b"\x0c\x7f\xff\xff\xff",
        b"\x0b\x7f\xff\xff\xff\0",
        b"\x0a\x7f\xff\xff\xffab",
        b"\x0a\xff\xff\xff\xffab",
        b"\x0d\x7f\xff\xff\xff",
        b"\x09\xff\xff",
        b"\x0c\xff\xff\xff\xfe",
    ],
)
def test_length_beyond_the_frame_is_refused_without_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=r"left of the frame"):
            FieldReader(data).read_value()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# ---- Structures ----


@pytest.mark.parametrize("number", structure_classes())
@unhurried(30)
@given(data=st.data())
def test_structure_is_decoded_unchanged(number: int, data: st.DataObject) -> None:
    structure = data.draw(structures(number))
    encoded = encode_structure(structure)
    found = decode(encoded)
    assert type(found) is type(structure)
    # Pairs of surrogates become characters, so the bytes are compared.
    assert encode_structure(found) == encoded


@pytest.mark.parametrize("number", structure_classes())
@unhurried(5)
@given(data=st.data())
def test_structure_cut_short_anywhere_is_refused(number: int, data: st.DataObject) -> None:
    encoded = encode_structure(data.draw(structures(number)))
    for length in range(len(encoded)):
        with pytest.raises(RemoteProtocolError):
            decode_structure(FieldReader(encoded[:length]))


@pytest.mark.parametrize("number", COMMANDS)
@unhurried(3)
@given(data=st.data())
def test_frame_whose_fields_are_cut_short_is_refused_by_the_decoder(number: int, data: st.DataObject) -> None:
    encoded = encode_structure(data.draw(structures(number)))
    for length in range(2, len(encoded)):
        # A frame follows, whose bytes must not be taken for those that are missing.
        whole = length.to_bytes(4, "big") + encoded[:length] + encode_frame(MESSAGE)
        with pytest.raises(RemoteProtocolError):
            connected().receive(whole)


def test_structures_inside_too_many_structures_are_refused() -> None:
    advisory = JmsMessage(1, False)
    for _ in range(10):
        advisory = JmsMessage(1, False, data_structure=advisory)
    with pytest.raises(RemoteProtocolError, match="more than 8 structures inside one another"):
        connected().receive(encode_frame(advisory))


def test_structure_of_another_type_than_its_field_is_refused() -> None:
    data = encode_structure(SessionInfo(1, True)) + b""
    wrong = data[:-1] + b"\1" + encode_structure(QueueName("a"))
    with pytest.raises(RemoteProtocolError, match="QueueName where SessionId must be"):
        decode_structure(FieldReader(wrong))


def test_unknown_type_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="OpenWire type 90 is unknown"):
        connected().receive(b"\0\0\0\2\x5a\0")


@pytest.mark.parametrize("command", [KeepAliveInfo(1, True), MESSAGE, ACK, COMMIT])
def test_bytes_after_the_fields_are_refused(command: Structure) -> None:
    data = encode_structure(command) + b"x"
    with pytest.raises(RemoteProtocolError, match=f"1 bytes after the fields of {type(command).__name__}"):
        connected().receive(len(data).to_bytes(4, "big") + data)


def test_array_with_too_many_elements_is_refused() -> None:
    data = encode_structure(ProducerInfo(1, True, PRODUCER))
    assert data.endswith(bytes(6))
    wrong = data[:-6] + b"\1\x7f\xff" + bytes(5)
    with pytest.raises(RemoteProtocolError, match="32767 elements of an array, where 5 bytes are left of the frame"):
        connected().receive(len(wrong).to_bytes(4, "big") + wrong)


def test_arrays_of_one_frame_have_few_elements_together() -> None:
    """8 MB of arrays inside an array took five seconds."""

    def array_of(elements: int, element: bytes) -> bytes:
        return b"\1" + elements.to_bytes(2, "big") + element * elements

    def response_with(array: bytes) -> bytes:
        return bytes([DataArrayResponse.TYPE]) + bytes(9) + array

    inner = b"\1" + response_with(array_of(99, b"\0"))
    for elements, is_refused in ((10, False), (11, True)):
        frame = response_with(array_of(elements, inner))
        data = len(frame).to_bytes(4, "big") + frame
        if is_refused:
            with pytest.raises(RemoteProtocolError, match="more than 1000 elements in the arrays of one frame"):
                connected().receive(data)
        else:
            assert len(connected().receive(data)) == 1


@pytest.mark.parametrize("name", ["correlation_id", "jms_type", "message_id", "destination", "reply_to"])
def test_message_with_a_text_that_is_too_long_with_its_nuls_escaped_is_refused(name: str) -> None:
    """A NUL may come as one byte, and is written as two."""
    text = "M" * 40_000
    structured = {
        "destination": QueueName(text),
        "message_id": MessageId(text, PRODUCER, 5),
        "reply_to": TopicName(text),
    }
    frame = encode_frame(replace(MESSAGE, is_droppable=True, **{name: structured.get(name, text)}))
    assert len(connected().receive(frame)) == 1
    decoder = connected()
    data = encode_frame(KeepAliveInfo(1)) + frame.replace(text.encode(), bytes(40_000))
    assert decoder.receive(data) == [KeepAliveInfo(1)]
    with pytest.raises(RemoteProtocolError, match="TextMessage with a string of 80000 bytes; at most 65535"):
        decoder.receive(b"")


@pytest.mark.parametrize("name", ["group_id", "correlation_id", "jms_type", "message_id", "destination"])
def test_message_with_a_text_that_is_no_modified_utf8_is_refused(name: str) -> None:
    structured = {"destination": QueueName("TEXT"), "message_id": MessageId("TEXT", PRODUCER, 5)}
    frame = encode_frame(replace(MESSAGE, **{name: structured.get(name, "TEXT")}))
    assert len(connected().receive(frame)) == 1
    with pytest.raises(RemoteProtocolError, match="text is not modified UTF-8"):
        connected().receive(frame.replace(b"TEXT", b"TE\xf0T"))


# ---- Usual frames ----


@unhurried(300)
@given(st.lists(produced(), min_size=1, max_size=4))
def test_message_of_a_producer_is_decoded_as_by_its_table(messages: list[JmsMessage]) -> None:
    decoder = connected()
    # Twice, as the decoder knows producers that have come before.
    wanted = single([expected(one) for one in messages])
    data = b"".join(map(encode_frame, messages))
    assert single(decoder.receive(data)) == wanted
    assert single(decoder.receive(data)) == wanted


@unhurried(100)
@given(st.data())
def test_acknowledgement_and_transaction_are_decoded_as_by_their_tables(data: st.DataObject) -> None:
    decoder = connected()
    for number in (MessageAck.TYPE, TransactionInfo.TYPE):
        structure = data.draw(structures(number))
        frame = encode_frame(structure)
        assert single(decoder.receive(frame + frame)) == single([decode(frame[4:])] * 2)


@st.composite
def plain_messages(draw: st.DrawFn) -> list[JmsMessage]:
    """Messages that differ from those of a run in one field at most."""
    transaction = draw(st.sampled_from([None, LocalTransactionId(2, ConnectionId(CONNECTION))]))
    usual = replace(MESSAGE, response_required=False, correlation_id=None, reply_to=None, jms_type=None)
    plain = st.builds(
        partial(replace, usual, transaction_id=transaction),
        message_id=st.integers(1, 2**40).map(lambda number: MessageId(None, PRODUCER, number)),
        priority=st.integers(0, 9),
        timestamp=st.integers(0, 2**41),
        content=st.binary(max_size=30),
        marshalled_properties=st.sampled_from([None, b"", encode_map({"a": TypedValue(Tag.INTEGER, 1)})]),
    )
    other = st.sampled_from(
        [
            *({"response_required": True}, {"correlation_id": "c"}, {"reply_to": QueueName("r")}, {"jms_type": "t"}),
            *({"is_persistent": False}, {"expiration": 5}, {"expiration": -1}, {"group_id": "g"}, {"content": None}),
            *({"group_sequence": 2}, {"priority": -1}, {"priority": 10}, {"is_compressed": True}, {"user_id": "u"}),
            *({"is_droppable": True}, {"destination": QueueName("other")}, {"original_destination": QueueName("o")}),
            *({"transaction_id": LocalTransactionId(3, ConnectionId(CONNECTION))}, {"broker_in_time": 1}),
            *({"marshalled_properties": encode_map({"AMQ_SCHEDULED_DELAY": TypedValue(Tag.LONG, 5)})},),
            *({"producer_id": ProducerId(CONNECTION, 2, 1)}, {"message_id": MessageId("text", PRODUCER, 1)}, {}, {}),
        ]
    )
    each: st.SearchStrategy[JmsMessage] = st.builds(lambda message, fields: replace(message, **fields), plain, other)
    return draw(st.lists(st.one_of(plain, plain, plain, each), min_size=2, max_size=8))


def plain_acks() -> st.SearchStrategy[list[MessageAck]]:
    """Acknowledgements that differ from those of a run in one field at most."""
    acked = st.integers(1, 2**40).map(lambda number: MessageId(None, PRODUCER, number, number + 1))
    plain = acked.map(lambda each: MessageAck(8, False, QueueName("q"), None, CONSUMER, 2, each, each, 1))
    other = st.sampled_from(
        [
            *({"response_required": True}, {"ack_type": 4}, {"message_count": 2}, {"consumer_id": None}, {}, {}),
            *({"transaction_id": LocalTransactionId(3, ConnectionId(CONNECTION))}, {"first_message_id": None}),
            *({"poison_cause": Throwable("a.B", "c")}, {"last_message_id": MessageId(None, PRODUCER, 1, 2)}),
            *({"destination": QueueName("r")}, {"consumer_id": ConsumerId(CONNECTION, 2, 2)}),
        ]
    )
    each: st.SearchStrategy[MessageAck] = st.builds(lambda ack, fields: replace(ack, **fields), plain, other)
    return st.lists(st.one_of(plain, plain, plain, each), min_size=2, max_size=8)


@unhurried(300)
@given(st.one_of(plain_messages(), plain_acks()), st.data())
def test_frames_of_runs_are_decoded_as_by_their_tables(commands: list[WireCommand], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, commands))
    decoder = connected()
    found: list[Decoded] = []
    ends = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=2)))
    for start, end in zip([0, *ends], [*ends, len(stream)], strict=True):
        found += decoder.receive(stream[start:end])
    assert single(found) == single([expected(decode(encode_structure(one))) for one in commands])
    assert not decoder.pending


def test_frames_that_differ_in_a_few_fields_are_runs() -> None:
    message = replace(MESSAGE, response_required=False, correlation_id=None, reply_to=None, jms_type=None)
    acked = MessageId(None, PRODUCER, 5, 9)
    ack = MessageAck(8, False, QueueName("orders"), None, CONSUMER, 2, acked, acked, 1)
    for command, kind in ((message, ProducedRun), (ack, AckedRun)):
        first, run = connected().receive(encode_frame(command) * 5)
        assert type(first) is not kind and type(run) is kind and len(single([run])) == 4


@pytest.mark.parametrize("is_message", [True, False])
def test_frame_in_a_run_with_one_wrong_byte_is_decoded_as_alone(is_message: bool) -> None:
    acked = MessageId(None, PRODUCER, 5, 9)
    command: WireCommand = MessageAck(8, False, QueueName("orders"), None, CONSUMER, 2, acked, acked, 1)
    if is_message:
        command = replace(MESSAGE, response_required=False, correlation_id=None, reply_to=None, jms_type=None)
    frame = encode_frame(command)
    generator = random.Random(7)
    for at in range(4, len(frame)):
        for byte in {frame[at] ^ 1 << generator.randrange(8), generator.randrange(256), 0, 255}:
            data = frame[:at] + bytes([byte]) + frame[at + 1 :]
            decoder = connected()
            decoder.receive(frame)
            try:
                found: Commands | str = single(decoder.receive(data))
            except RemoteProtocolError:
                found = "refused"
            assert found == outcome(data), at


@pytest.mark.parametrize("command", [MESSAGE, ACK, COMMIT, replace(MESSAGE, correlation_id=None, reply_to=None)])
def test_usual_frame_is_decoded_without_its_table(command: Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(command)
    decoder = connected()
    decoder.receive(encode_frame(command))

    def refuse(*_: object) -> None:
        raise AssertionError("the frame is usual")

    monkeypatch.setattr(codec, "_decode_frame", refuse)
    assert single(decoder.receive(encode_frame(command))) == single([wanted])


def test_repeated_ids_and_destinations_are_the_same_objects() -> None:
    first, second = connected().receive(encode_frame(MESSAGE) * 2)
    assert isinstance(first, ProducedMessage)
    assert isinstance(second, ProducedMessage)
    assert first.destination is second.destination
    assert first.producer_id is second.producer_id


def test_message_without_id_or_destination_is_refused() -> None:
    for wrong in (replace(MESSAGE, message_id=None), replace(MESSAGE, destination=None)):
        with pytest.raises(RemoteProtocolError, match="TextMessage without a"):
            connected().receive(encode_frame(wrong))


# ---- Frames ----

STREAM = [
    WireFormatInfo(12, encode_map({})),
    ConnectionInfo(1, True, ConnectionId(CONNECTION), "client"),
    KeepAliveInfo(2, True),
    MESSAGE,
    ACK,
    COMMIT,
    MESSAGE,
]


def receive_all(pieces: list[bytes]) -> Commands:
    """Commands in pieces of a stream, received as a session does."""
    decoder = OpenWireDecoder()
    pending = decoder.pending
    commands: Commands = []
    for piece in pieces:
        data = piece
        while True:
            found = decoder.receive(data)
            commands += single(found)
            if any(isinstance(one, ConnectionInfo) for one in found):
                decoder.is_connected = True
            if not decoder.has_more:
                break
            data = b""
    assert decoder.pending is pending
    return commands


def test_stream_split_anywhere_is_decoded_to_the_same_commands() -> None:
    stream = b"".join(map(encode_frame, STREAM[:3])) + NULL_FRAME + b"".join(map(encode_frame, STREAM[3:]))
    wanted = single([expected(one) for one in STREAM])
    assert receive_all([stream]) == wanted
    assert receive_all([stream[at : at + 1] for at in range(len(stream))]) == wanted
    for at in range(len(stream)):
        assert receive_all([stream[:at], stream[at:]]) == wanted


@unhurried(50)
@given(st.data())
def test_random_stream_in_random_pieces_is_decoded_to_the_same_commands(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.sampled_from([one for one in COMMANDS if one > 3]), max_size=5))
    commands = [
        data.draw(produced()) if number in range(23, 29) else data.draw(structures(number)) for number in numbers
    ]
    stream = b"".join(map(encode_frame, commands))
    ends = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = connected()
    found: list[Decoded] = []
    for start, end in zip([0, *ends], [*ends, len(stream)], strict=True):
        found += decoder.receive(stream[start:end])
    assert single(found) == single([expected(decode(encode_structure(one))) for one in commands])
    assert not decoder.pending


def test_null_command_is_ignored() -> None:
    assert connected().receive(NULL_FRAME * 3) == []


@pytest.mark.parametrize("number", [255, 256, 257, 1000])
def test_one_call_decodes_few_frames(number: int) -> None:
    """6,500 keep-alives of one read took 120 ms."""
    frames = [encode_frame(KeepAliveInfo(each)) for each in range(number)]
    decoder = connected()
    data = b"".join(frames) + frames[0][:5]
    found: list[Decoded] = []
    calls = 0
    while True:
        commands = decoder.receive(data)
        assert len(commands) <= 256
        found += commands
        calls += 1
        if not decoder.has_more:
            break
        # What is left is no incomplete frame, whose bytes are counted.
        assert not decoder.pending
        data = b""
    assert found == [KeepAliveInfo(each) for each in range(number)]
    assert calls == number // 256 + 1
    assert decoder.pending == frames[0][:5]
    assert decoder.receive(frames[0][5:]) == [KeepAliveInfo(0)]


def test_commands_after_many_null_commands_are_decoded_at_once() -> None:
    decoder = connected()
    assert decoder.receive(NULL_FRAME * 1000 + encode_frame(KeepAliveInfo(1))) == [KeepAliveInfo(1)]
    assert not decoder.has_more and decoder.receive(b"") == []


@pytest.mark.parametrize("size", [0, -1, OPENWIRE_FRAME_BYTES_MAX + 1, 2**31 - 1])
def test_frame_of_a_wrong_size_is_refused_before_it_has_come(size: int) -> None:
    decoder = connected()
    with pytest.raises(RemoteProtocolError, match="OpenWire frame"):
        decoder.receive(size.to_bytes(4, "big", signed=True) + b"%c" % KeepAliveInfo.TYPE)
    assert not decoder.pending


def test_commands_before_a_fault_are_returned_first() -> None:
    decoder = connected()
    assert decoder.receive(encode_frame(KeepAliveInfo(1)) + b"\0\0\0\0") == [KeepAliveInfo(1)]
    assert decoder.has_more
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="OpenWire frame without a type"):
            decoder.receive(b"")


def test_client_of_another_protocol_is_refused_at_its_first_bytes() -> None:
    for opening in (b"CONNECT\naccept-version:1.2\n\n\0", b"GET / HTTP/1.1\r\n", b"\0\0\0\1\0", b"AMQP\0\1\0\0"):
        for data in (opening, opening[:6]):
            if len(data) > 4:
                with pytest.raises(RemoteProtocolError, match="the client does not speak OpenWire"):
                    OpenWireDecoder().receive(data)


def test_client_may_send_only_a_login_before_it_is_connected() -> None:
    decoder = OpenWireDecoder()
    decoder.receive(encode_wire_format_info())
    # Keep-alives do not count: a pool may log in late.
    for _ in range(LOGIN_BYTES_MAX // 10):
        assert decoder.receive(encode_frame(KeepAliveInfo(1))) == [KeepAliveInfo(1)]
    large = encode_frame(ConnectionInfo(1, True, ConnectionId(CONNECTION), "x" * LOGIN_BYTES_MAX))
    with pytest.raises(RemoteProtocolError, match="more than 8192 bytes before ConnectionInfo is complete"):
        decoder.receive(large[:10])
    many = OpenWireDecoder()
    many.receive(encode_wire_format_info())
    with pytest.raises(RemoteProtocolError, match="more than 8192 bytes before ConnectionInfo is complete"):
        for _ in range(LOGIN_BYTES_MAX):
            many.receive(encode_frame(SessionInfo(1)))


# ---- Wrong bytes: an error or commands, and nothing else ----


def feed(decoder: OpenWireDecoder, data: bytes) -> None:
    try:
        decoder.receive(data)
        while decoder.has_more:
            decoder.receive(b"")
    except RemoteProtocolError:
        pass


def outcome(frame: bytes) -> Commands | str:
    """Commands of a frame, or "refused"."""
    try:
        return single(connected().receive(frame))
    except RemoteProtocolError:
        return "refused"


def outcome_by_table(data: bytes) -> Commands | str:
    """Outcome by the table of the frame's type alone."""
    reader = FieldReader(data)
    try:
        command = expected(decode_structure(reader))
    except RemoteProtocolError:
        return "refused"
    return "refused" if reader.left else single([command])


def test_frames_with_one_wrong_byte_end_in_an_error_or_in_commands() -> None:
    generator = random.Random(7)
    for frame in map(encode_frame, STREAM):
        for at in range(4, len(frame)):
            for byte in {frame[at] ^ 1 << generator.randrange(8), generator.randrange(256), 0, 255}:
                data = frame[:at] + bytes([byte]) + frame[at + 1 :]
                # Twice, as the decoder knows ids that have come before.
                decoder = connected()
                feed(decoder, frame)
                feed(decoder, data)
                found, wanted = outcome(data), outcome_by_table(data[4:])
                if found != wanted:
                    # Only if the bytes are unusual, such as a NUL of one byte, a message may keep them.
                    assert len(found) == len(wanted) == 1
                    assert encode_structure(decode(data[4:])) != data[4:]


@unhurried(300)
@given(st.binary(max_size=200))
def test_random_bytes_end_in_an_error_or_in_commands(data: bytes) -> None:
    feed(OpenWireDecoder(), data)
    feed(connected(), data)


@unhurried(300)
@given(st.sampled_from(COMMANDS), st.binary(max_size=200))
def test_random_fields_end_in_an_error_or_in_commands(number: int, fields: bytes) -> None:
    feed(connected(), (len(fields) + 1).to_bytes(4, "big") + bytes([number]) + fields)


# ---- Handshake ----


def offer(version: int = OPENWIRE_VERSION, **numbers: int) -> WireFormatInfo:
    values = {name: TypedValue(Tag.LONG, number) for name, number in numbers.items()}
    return WireFormatInfo(version, encode_map(values))


def test_broker_offers_version_12_and_no_other_encoding() -> None:
    info = decode(encode_wire_format_info()[4:])
    assert isinstance(info, WireFormatInfo)
    assert info.version == 12
    assert info.properties is not None
    offered = FieldReader(info.properties).read_map()
    assert offered is not None
    for name in ("CacheEnabled", "TightEncodingEnabled", "StackTraceEnabled", "SizePrefixDisabled"):
        assert offered[name] == TypedValue(Tag.BOOLEAN, False)
    assert offered["MaxFrameSize"] == TypedValue(Tag.LONG, OPENWIRE_FRAME_BYTES_MAX)
    assert offered["MaxInactivityDuration"] == TypedValue(Tag.LONG, 30_000)


@pytest.mark.parametrize(("client_ms", "agreed_ms"), [(10_000, 10_000), (60_000, 30_000), (0, 0), (-1, 0)])
def test_smaller_inactivity_period_is_agreed(client_ms: int, agreed_ms: int) -> None:
    assert negotiate(offer(MaxInactivityDuration=client_ms)).keep_alive_ms == agreed_ms


def test_client_without_properties_has_no_inactivity_period() -> None:
    assert negotiate(WireFormatInfo(12)).keep_alive_ms == 0
    assert negotiate(WireFormatInfo(12, encode_map(None))).keep_alive_ms == 0


def test_client_of_a_later_version_is_accepted_and_of_an_earlier_one_refused() -> None:
    assert negotiate(offer(13)).keep_alive_ms == 0
    with pytest.raises(RemoteProtocolError, match="OpenWire version 11; this broker speaks version 12"):
        negotiate(offer(11))


def test_wire_format_info_with_invalid_properties_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        negotiate(WireFormatInfo(12, b"\0\0\0\5"))
