"""Tests of OpenWire's codec against ActiveMQ's own marshaller: java/OpenWireMirror.java, which is compiled here."""

import io
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from tests.unit.openwire_examples import COMMANDS, produced, structures, unhurried
from truenext.model.header_lines import decode_header_lines, encode_header_lines
from truenext.model.limits import OPENWIRE_FRAME_BYTES_MAX
from truenext.model.loose_fields import FieldReader, Tag
from truenext.model.message import SentMessage
from truenext.model.openwire_message import (
    LAST_CAUSE_PROPERTY,
    message_id,
    properties_of,
    stomp_message,
)
from truenext.wire.openwire.codec import produced_message
from truenext.wire.openwire.deliveries import AdvisoryEncoder, DispatchEncoder, encode_end, encode_response
from truenext.wire.openwire.fields import decode_structure, encode_frame, encode_nested
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.structures import (
    ConsumerId,
    DestinationInfo,
    JmsMessage,
    MessageDispatch,
    PhysicalDestination,
    ProducerId,
    QueueName,
    Response,
    Structure,
    TemporaryQueueName,
    TextMessage,
    Throwable,
    WireFormatInfo,
)

JARS = [Path("/usr/share/java") / name for name in ("activemq-client.jar", "geronimo-jms_1.1_spec.jar", "hawtbuf.jar")]
JARS += [Path("/usr/share/java") / name for name in ("slf4j-api.jar", "slf4j-nop.jar")]
SOURCE = Path(__file__).parent / "java" / "OpenWireMirror.java"

NAMES = {
    "is_fault_tolerant": {2: "FaultTolerantConfiguration"},
    "is_duplex": {2: "DuplexConnection"},
    "broker_url": {2: "BrokerURL"},
    "peer_broker_infos": {2: "PeerBrokerInfos"},
    "operation": {7: "Type", 8: "OperationType"},
    "jms_type": dict.fromkeys(range(23, 30), "Type"),
    "group_id": dict.fromkeys(range(23, 30), "GroupID"),
    "user_id": dict.fromkeys(range(23, 30), "UserID"),
    "is_received_by_bridge": dict.fromkeys(range(23, 30), "RecievedByDFBridge"),
    "is_first_for_consumer": dict.fromkeys(range(23, 30), "JMSXGroupFirstForConsumer"),
    "subscription_name": {9: "SubcriptionName"},
    "is_close": {},
    "global_transaction_id": {112: "GlobalTransactionId"},
    "is_optimized_acknowledge": {},
    "timeout": {},
}
"""Names of Java's properties that differ from those of this codec, by type number."""
UNREADABLE = {(5, "additional_predicate")}
"""Fields that Java reads as a class of its own."""


def missing_reason() -> str | None:
    """Reason why Java cannot be asked here, or None."""
    if shutil.which("javac") is None or shutil.which("java") is None:
        return "javac is not installed"
    missing = [str(jar) for jar in JARS if not jar.exists()]
    return f"ActiveMQ's client is not installed: {missing[0]} is missing" if missing else None


REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

Ask = Callable[[list[tuple[bytes, list[str]]]], list[list[bytes]]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    folder = tmp_path_factory.mktemp("mirror")
    path = ":".join(map(str, JARS))
    subprocess.run(["javac", "-cp", path, "-d", str(folder), str(SOURCE)], check=True, timeout=120)

    def ask(requests: list[tuple[bytes, list[str]]]) -> list[list[bytes]]:
        """Answers to requests of a frame and names of properties."""
        data = b"".join(
            struct.pack(">i", len(frame))
            + frame
            + struct.pack(">i", len(names))
            + b"".join(struct.pack(">H", len(name)) + name.encode() for name in names)
            for frame, names in requests
        )
        command = ["java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", f"{path}:{folder}", "OpenWireMirror"]
        result = subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr.decode()[:2000]
        stream = io.BytesIO(result.stdout)
        answers = [
            [stream.read(*struct.unpack(">i", stream.read(4))) for _ in range(1 + (len(names) or 1))]
            for _, names in requests
        ]
        assert not stream.read()
        return answers

    return ask


def examples(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Random examples, the same in each run."""
    found: list[Any] = []

    @settings(unhurried(count), database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def gather(value: Any) -> None:
        found.append(value)

    gather()
    return found


def java_name(structure: Structure, field: str) -> str:
    name = NAMES.get(field, {}).get(structure.TYPE)
    return name or "".join(word[:1].upper() + word[1:] for word in field.removeprefix("is_").split("_"))


def utf16_hex(text: str) -> str:
    return text.encode("utf-16-be", "surrogatepass").hex()


def described(value: Any) -> str:
    """Value of a field as the mirror describes it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"s:{utf16_hex(value)}"
        case bytes():
            return f"b:{value.hex()}"
        case Throwable():
            return f"t:{value.class_name}:{described(value.message)}"
        case Structure():
            return f"d:{encode_nested(value).hex()}"
        case tuple():
            return "a:" + "".join(f"{described(each)}," for each in value) if value else "null"
        case _:
            return str(value)


@pytest.mark.parametrize("number", COMMANDS)
def test_java_reads_and_writes_the_same_fields(number: int, ask: Ask) -> None:
    commands: list[Structure] = examples(structures(number), 60)
    if number == WireFormatInfo.TYPE:
        commands.append(decode_structure(FieldReader(encode_wire_format_info()[4:])))
    requests = []
    for command in commands:
        fields = [name for name in command.__struct_fields__ if (number, name) not in UNREADABLE]
        requests.append((encode_frame(command), [java_name(command, name) for name in fields]))
    for command, (frame, names), answer in zip(commands, requests, ask(requests), strict=True):
        assert answer[0].hex() == frame.hex(), command
        for field, name, text in zip(
            [name for name in command.__struct_fields__ if (number, name) not in UNREADABLE],
            names,
            answer[1:],
            strict=True,
        ):
            if (number, field) == (WireFormatInfo.TYPE, "properties"):
                continue
            assert text.decode() == described(getattr(command, field)), (command, name)


def test_client_with_default_options_takes_the_offer_of_the_broker(ask: Ask) -> None:
    ((_, agreed),) = ask([(encode_wire_format_info(), ["agreed"])])
    assert agreed.decode() == (
        "s:"
        + utf16_hex(
            "version=12 cache=false tight=false stack=false unsized=false "
            f"frame={OPENWIRE_FRAME_BYTES_MAX} inactivity=30000"
        )
    )


# ---- Dispatches: what a JMS program reads ----

CONSUMER = ConsumerId("ID:host-1:1", 1, 2)
QUEUE = QueueName("orders")


def read_by_java(ask: Ask, frames: list[bytes]) -> list[tuple[dict[str, str], dict[str, tuple[str, str]], JmsMessage]]:
    """Headers and properties that a JMS program reads of dispatches, and copies that Java has made of them."""
    results = []
    for text, frame in ask([(frame, []) for frame in frames]):
        headers: dict[str, str] = {}
        properties: dict[str, tuple[str, str]] = {}
        for line in text.decode().splitlines():
            name, _, value = line.partition("=")
            if name == "property":
                key, kind, shown = value.split(" ")
                properties[text_of(key)] = (kind, text_of(shown))
            else:
                headers[name] = value
        copy = decode_structure(FieldReader(frame[4:]))
        assert isinstance(copy, JmsMessage)
        results.append((headers, properties, copy))
    return results


def text_of(described_text: str) -> str:
    return bytes.fromhex(described_text.removeprefix("s:")).decode("utf-16-be", "surrogatepass")


CLASSES = {
    Tag.BOOLEAN: "Boolean",
    Tag.BYTE: "Byte",
    Tag.SHORT: "Short",
    Tag.INTEGER: "Integer",
    Tag.LONG: "Long",
    Tag.FLOAT: "Float",
    Tag.DOUBLE: "Double",
    Tag.STRING: "String",
}


def test_java_reads_a_dispatched_message_as_it_was_sent(ask: Ask) -> None:
    plain = [one for one in examples(produced(), 150) if isinstance(one.destination, PhysicalDestination)]
    sent = [produced_message(one) for one in plain if one.content is None or not isinstance(one, TextMessage)]
    frames, wanted = [], []
    for number, one in enumerate(sent, 1000):
        if one.message.body[0] in (23, 25, 26, 27):
            encoder = DispatchEncoder(CONSUMER, one.destination, "abc")
            frames.append(encoder.encode(one.message, number, number % 2, 1_700_000_000_000))
            wanted.append(one)
    assert len(frames) > 20
    for one, (headers, properties, _) in zip(wanted, read_by_java(ask, frames), strict=True):
        assert headers["id"] == message_id(one.message)
        stored = properties_of(one.message)
        assert {name: kind for name, (kind, _) in properties.items()} == {
            name: CLASSES[value.tag] for name, value in stored.items()
        }
        lines = decode_header_lines(stomp_message(one.message)[0])
        for name, (kind, shown) in properties.items():
            if kind not in ("String", "Double", "Float"):
                assert lines[name] == shown
            elif kind != "String":
                # Java 17 does not always find the shortest text of a number.
                assert float(lines[name]) == float(shown) or abs(float(shown)) > 1e30 or kind == "Float"
        assert int(headers["priority"]) == one.message.priority
        assert headers["mode"] == ("2" if one.message.persistent else "1")
        assert int(headers["expiration"]) == one.message.expires_ms


LINE_TEXTS = st.text(
    st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
)
"""Texts of header lines. Characters above U+FFFF are left out: ActiveMQ's client itself shows those of a property as
UTF-8 instead of modified UTF-8."""


@st.composite
def stomp_messages(draw: st.DrawFn) -> tuple[SentMessage, dict[str, str]]:
    names = st.text("abcXYZ_1ä-", min_size=1, max_size=8).map(lambda name: f"x{name}")
    properties = draw(st.dictionaries(names, LINE_TEXTS, max_size=4))
    body = draw(st.binary(max_size=20) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")))
    lines = {"destination": "/queue/orders", "content-length": str(len(body)), **properties}
    is_text = draw(st.booleans())
    message = SentMessage(4, draw(st.booleans()), 0, encode_header_lines(lines), body, 1_700_000_000_000)
    message.is_text = is_text
    return message, properties


def test_java_reads_a_message_of_a_stomp_client_with_its_headers_and_body(ask: Ask) -> None:
    messages = examples(stomp_messages(), 100)
    encoder = DispatchEncoder(CONSUMER, QUEUE, "abc")
    first = 2**31 - 50
    frames = [encoder.encode(message, number, 0, 5) for number, (message, _) in enumerate(messages, first)]
    ids = set()
    for (message, lines), (headers, properties, copy) in zip(messages, read_by_java(ask, frames), strict=True):
        ids.add(headers["id"])
        assert properties == {name: ("String", text) for name, text in lines.items()}
        assert headers["destination"] == "queue://orders"
        assert headers["timestamp"] == "1700000000000"
        try:
            text = message.body.decode() if message.is_text else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            assert headers["bytes"] == described(message.body)
        else:
            assert headers["text"] == described(text)
        # What Java sends again is the same for a STOMP client.
        again = produced_message(copy).message
        shown = dict(properties_of(again))
        assert {name: value.value for name, value in shown.items()} == lines
        if text is not None:
            assert stomp_message(again)[1] == message.body
    assert len(ids) == len(messages)
    assert {number.rpartition(":")[0] for number in ids} == {"ID:truenext-abc:-1:0", "ID:truenext-abc:-1:1"}


def test_java_reads_the_cause_of_a_dead_letter(ask: Ask) -> None:
    message = produced_message(find(produced(), lambda one: isinstance(one, TextMessage) and one.content is None))
    letter = message.message
    letter.header = b"truenext-dead-letter-cause:rejected\ntruenext-original-last-cause:out of paper\n"
    frame = DispatchEncoder(CONSUMER, QueueName("DLQ.orders"), "abc").encode(letter, 7, 0, 5)
    ((headers, properties, _),) = read_by_java(ask, [frame])
    assert headers["id"] == message_id(letter)
    assert headers["destination"] == "queue://DLQ.orders"
    assert properties[LAST_CAUSE_PROPERTY] == ("String", "out of paper")
    assert properties["truenext-dead-letter-cause"] == ("String", "rejected")
    dispatch = decode_structure(FieldReader(frame[4:]))
    assert isinstance(dispatch, MessageDispatch)
    assert dispatch.message is not None
    assert dispatch.message.original_destination == message.destination


def test_java_reads_answers_advisories_and_ends(ask: Ask) -> None:
    info = DestinationInfo(0, False, None, TemporaryQueueName("ID:host-1:1:1"), 1)
    encoder = AdvisoryEncoder(CONSUMER, ProducerId("ID:truenext-abc", 0, -2))
    advisory = encoder.encode(9, encode_nested(info), is_topic=False)
    requests: list[tuple[bytes, list[str]]] = [
        (encode_response(77), ["CorrelationId"]),
        (encode_end(CONSUMER), ["Message", "ConsumerId"]),
        (advisory, ["Destination"]),
    ]
    response, end, told = ask(requests)
    assert response == [encode_frame(Response(correlation_id=77)), b"77"]
    assert end[1:] == [b"null", described(CONSUMER).encode()]
    assert told[0] == advisory
