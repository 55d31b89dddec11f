"""Tests that frames are read as the right commands, and that every client can read the answers."""

from dataclasses import dataclass
from typing import TypeVar
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from truenext.errors import Code, RemoteProtocolError
from truenext.model import header_lines
from truenext.model.answers import ErrorAnswer, Receipt
from truenext.model.batch import Causes
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Command,
    Commit,
    ControlRequest,
    Disconnect,
    Login,
    Nack,
    ReceiptRequest,
    Send,
    Subscribe,
    Unsubscribe,
)
from truenext.model.destination import parse_address
from truenext.model.header_lines import closes_group, decode_header_lines, encode_header_lines, escape, group_of
from truenext.model.limits import HEART_BEAT_MS_MIN, PRODUCER_NUMBER_MAX, TTL_MS_MAX, WINDOW_MAX
from truenext.model.message import SentMessage
from truenext.model.schedule import Schedule
from truenext.wire.openwire.codec import produced_message
from truenext.wire.openwire.structures import MessageId, ProducerId, QueueName, TextMessage
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.protocol import parse_heart_beat
from truenext.wire.stomp.replies import PARTS_PER_MESSAGE
from truenext.wire.stomp.server import StompSession
from truenext.wire.stomp.shapes import FRAME_SHAPES

VERSIONS = list(Version)
ESCAPING_VERSIONS = [Version.V1_1, Version.V1_2]
QUEUE = "destination:/queue/a"
AnyCommand = TypeVar("AnyCommand")


@dataclass(slots=True)
class Delivered:
    """The part of a dispatched entry that encode_deliveries uses."""

    message: SentMessage
    sequence: int = 7
    deliveries: int = 1
    was_never_started: bool = False
    attempts: int = 0
    was_lost: bool = False
    redelivery_count: int = 0
    causes: Causes | None = None
    is_first_of_group: bool = False
    address: str = "/queue/a"


def connecting() -> StompSession:
    return StompSession(session_id="me", identity="b1", server_name="truenext/1")


def connected(version: Version = Version.V1_2) -> StompSession:
    server = connecting()
    assert receive(server, "CONNECT", f"accept-version:{version.value}", "host:h") == [Login()]
    assert server.is_connected
    return server


def answer_of(server: StompSession, login: Login | None = None, *, is_checked: bool = False) -> bytes:
    """Return CONNECTED, by default for a login that asks for nothing of ours."""
    return server.encode_connected(login or Login(), "", is_takeover=False, is_checked=is_checked)


def text(command: str, *lines: str, body: bytes = b"") -> bytes:
    return "\n".join([command, *lines, "", ""]).encode() + body + b"\0"


def receive(server: StompSession, command: str, *lines: str, body: bytes = b"") -> list[Command]:
    return list(server.receive(text(command, *lines, body=body)))


def receive_one(kind: type[AnyCommand], version: Version, command: str, *lines: str, body: bytes = b"") -> AnyCommand:
    """The one command that a frame of a connected client becomes."""
    (made,) = receive(connected(version), command, *lines, body=body)
    assert isinstance(made, kind)
    return made


def error_of(version: Version, command: str, *lines: str) -> str:
    """Return the error with which a frame of a connected client is refused."""
    with pytest.raises(RemoteProtocolError) as raised:
        receive(connected(version), command, *lines)
    assert len(str(raised.value)) < 300
    return str(raised.value)


def decode(version: Version | None, data: bytes) -> list[Frame]:
    decoder = Decoder(FRAME_SHAPES)
    decoder.version = version
    return decoder.receive(data)


def message_frame(version: Version, deliveries: list[Delivered], *lines: str) -> list[Frame]:
    """Return the frames that a client with one subscription reads."""
    server = connected(version)
    receive(server, "SUBSCRIBE", QUEUE, "id:s", *lines)
    parts: list[bytes] = []
    server.replies.encode_deliveries("s", deliveries, parts)
    assert len(parts) == PARTS_PER_MESSAGE * len(deliveries)
    return decode(version, b"".join(parts))


# ---- CONNECT ----


@pytest.mark.parametrize("command", ["CONNECT", "STOMP"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_login_is_answered_with_the_version(version: Version, command: str) -> None:
    server = connecting()
    was_connected = server.is_connected
    assert receive(server, command, f"accept-version:{version.value}", "host:h") == [Login()]
    assert not was_connected and server.is_connected and not server.is_closed
    (frame,) = decode(None, answer_of(server))
    assert frame.command == "CONNECTED"
    assert frame.headers == {
        "version": version.value,
        "session": "me",
        "server": "truenext/1",
        "heart-beat": "0,0",
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "lines", [["login:a", "passcode:b\\x"], ["login:a"], ["passcode:b"], ["login: a", "passcode:"]]
)
def test_client_with_credentials_is_told_that_they_are_unchecked(version: Version, lines: list[str]) -> None:
    server = connecting()
    (login,) = receive(server, "CONNECT", f"accept-version:{version.value}", "host:h", *lines)
    assert isinstance(login, Login)
    (frame,) = decode(None, answer_of(server, login))
    assert frame.headers["truenext-login"] == "unchecked"
    assert "passcode" not in repr(login)


def test_client_whose_password_was_checked_is_told_nothing_of_that() -> None:
    server = connecting()
    (login,) = receive(server, "CONNECT", "accept-version:1.2", "login:a", "passcode:b")
    assert login == Login(user="a", passcode="b")
    assert b"truenext-login" not in answer_of(server, login, is_checked=True)


@pytest.mark.parametrize("lines", [[], ["login:", "passcode:"], ["login: "]])
def test_client_without_credentials_is_told_nothing_of_them(lines: list[str]) -> None:
    server = connecting()
    (login,) = receive(server, "CONNECT", "accept-version:1.2", *lines)
    assert isinstance(login, Login)
    assert b"truenext-login" not in answer_of(server, login)


def test_a_login_that_names_no_version_means_1_0() -> None:
    server = connecting()
    receive(server, "CONNECT", "login: me", "passcode: secret")
    assert b"\nversion:1.0\n" in answer_of(server)


@pytest.mark.parametrize(
    ("heart_beat", "sends", "expects"),
    [
        ([], 0, 0),
        (["heart-beat:0,0"], 0, 0),
        (["heart-beat:10000,0"], 0, 10000),
        (["heart-beat:0,20000"], 20000, 0),
        (["heart-beat:1,2"], HEART_BEAT_MS_MIN, HEART_BEAT_MS_MIN),
    ],
)
def test_heart_beats_are_as_slow_as_the_slower_side_wants(heart_beat: list[str], sends: int, expects: int) -> None:
    """1.2, "Heart-beating": the maximum of the intervals that one side can do and the other wants; 0 is none."""
    server = connecting()
    receive(server, "CONNECT", "accept-version:1.2", *heart_beat)
    assert (server.send_interval_ms, server.receive_interval_ms) == (sends, expects)


@pytest.mark.parametrize("heart_beat", ["0,0", "10000,0", "0,20000", "1,2", "60000,30000"])
def test_connected_frame_has_the_agreed_heart_beats(heart_beat: str) -> None:
    """Some clients (Go's) beat, and expect beats, as often as CONNECTED says, whatever they have asked for."""
    server = connecting()
    receive(server, "CONNECT", "accept-version:1.2", f"heart-beat:{heart_beat}")
    (connected,) = decode(None, answer_of(server))
    can, expects = parse_heart_beat(heart_beat)
    server_can, server_expects = parse_heart_beat(connected.headers["heart-beat"])
    # 1.2, "Heart-beating".
    reckoned = (
        max(server_can, expects) if server_can and expects else 0,
        max(can, server_expects) if can and server_expects else 0,
    )
    assert (server_can, server_expects) == reckoned == (server.send_interval_ms, server.receive_interval_ms)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["accept-version:2.0"], "Supported protocol versions are"),
        (["accept-version:1.2", "heart-beat:soon"], "heart-beat"),
        (["accept-version:1.2", "receipt:r"], "cannot ask for a receipt"),
    ],
)
def test_a_login_that_cannot_be_granted_is_refused(lines: list[str], reason: str) -> None:
    server = connecting()
    with pytest.raises(RemoteProtocolError, match=reason):
        receive(server, "CONNECT", *lines)
    assert not server.is_connected


@pytest.mark.parametrize("command", ["SEND", "SUBSCRIBE", "BEGIN", "DISCONNECT", "MESSAGE", "CONNECTED", "NONSENSE"])
def test_commands_before_the_login_are_refused(command: str) -> None:
    server = connecting()
    with pytest.raises(RemoteProtocolError):
        receive(server, command, QUEUE, "id:1", "transaction:t")
    assert not server.is_connected


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_login_is_refused(version: Version) -> None:
    assert "CONNECT is not allowed while connected" in error_of(version, "CONNECT", "accept-version:1.2")


def test_frames_behind_the_login_are_read_by_the_version_it_agrees_on() -> None:
    server = connecting()
    lines = [QUEUE, "a\\cb:\\r", "receipt:1"]
    commands = server.receive(text("CONNECT", "accept-version:1.2") + text("SEND", *lines) + text("DISCONNECT"))
    assert next(commands) == Login()
    send = next(commands)
    assert isinstance(send, Send)
    assert decode_header_lines(send.message.header)["a:b"] == "\r"
    assert next(commands) == ReceiptRequest("1")
    was_closed = server.is_closed
    assert next(commands) == Disconnect()
    assert not was_closed and server.is_closed
    assert list(commands) == []


def test_frame_is_checked_only_after_the_one_before_was_carried_out() -> None:
    server = connected()
    commands = server.receive(text("BEGIN", "transaction:t", "receipt:1") + text("ABORT"))
    assert next(commands) == Begin("t")
    assert server.last_receipt == "1"
    assert next(commands) == ReceiptRequest("1")
    with pytest.raises(RemoteProtocolError, match="ABORT without the header 'transaction'"):
        next(commands)
    assert list(commands) == []


@pytest.mark.parametrize(
    ("in_one_read", "later"),
    [
        (True, "SEND"),
        *((True, "DISCONNECT"), (True, "CONNECT"), (False, "SEND"), (False, "DISCONNECT"), (False, "CONNECT")),
    ],
)
def test_commands_after_a_disconnect_are_refused(in_one_read: bool, later: str) -> None:
    server = connected()
    commands: list[Command] = []
    data = [text("DISCONNECT"), text(later, QUEUE)]
    with pytest.raises(RemoteProtocolError, match=f"{later} is not allowed while closed"):
        for read in [b"".join(data)] if in_one_read else data:
            for command in server.receive(read):
                commands.append(command)
    assert commands == [Disconnect()]


@pytest.mark.parametrize("command", ["MESSAGE", "RECEIPT", "ERROR", "CONNECTED", "send", "PUBLISH"])
def test_command_that_no_client_sends_is_refused_by_name(command: str) -> None:
    assert f"unknown command '{command}'" in error_of(Version.V1_2, command, QUEUE)


# ---- SEND ----


@pytest.mark.parametrize("version", VERSIONS)
def test_a_send_becomes_a_message(version: Version) -> None:
    # C2.2
    send = receive_one(Send, version, "SEND", QUEUE, "colour:red", body=b"hello")
    assert send.destination == parse_address("/queue/a", "me")
    assert (send.transaction, send.producer, send.number) == (None, None, 0)
    message = send.message
    assert (message.priority, message.persistent, message.expires_ms, message.body) == (4, False, 0, b"hello")
    assert decode_header_lines(message.header) == {
        "destination": "/queue/a",
        "colour": "red",
        "content-length": "5",
        "priority": "4",
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("length", [["content-length:5"], []])
@pytest.mark.parametrize("unusual", [["receipt:1"], ["a:b:c"], []])
def test_content_length_is_always_among_the_headers_once(
    version: Version, length: list[str], unusual: list[str]
) -> None:
    commands = receive(connected(version), "SEND", QUEUE, *length, *unusual, body=b"hello")
    assert isinstance(commands[0], Send)
    header = commands[0].message.header
    assert header.count(b"content-length:5\n") == header.count(b"content-length") == 1


@pytest.mark.parametrize(
    ("line", "priority"),
    [(f"priority:{number}", number) for number in range(10)]
    + [
        ("priority:10", 9),
        ("priority:9999999999999999999", 9),
        ("priority:-1", 0),
        ("priority:-99", 0),
        ("priority:-0", 0),
        ("priority:" + "9" * 20, 9),
        ("priority:" + "9" * 5000, 9),
        ("priority:-" + "9" * 5000, 0),
        ("priority:" + "0" * 5000 + "7", 7),
        ("priority:04", 4),
        ("x:priority", 4),
    ],
)
def test_a_priority_outside_is_moved_to_the_nearest_end(line: str, priority: int) -> None:
    # C2.2
    assert receive_one(Send, Version.V1_2, "SEND", QUEUE, line).message.priority == priority


@pytest.mark.parametrize("value", ["", "high", "4.0", "+4", "--4", "-", " 4", "\u0664", "\u00b2"])
def test_a_priority_that_is_no_number_is_refused(value: str) -> None:
    assert "is not a number" in error_of(Version.V1_2, "SEND", QUEUE, f"priority:{value}")


@pytest.mark.parametrize("producer", VERSIONS)
@pytest.mark.parametrize("consumer", VERSIONS)
@pytest.mark.parametrize(
    ("lines", "counted"),
    [
        ([], "4"),
        (["priority:0"], "0"),
        (["priority:9"], "9"),
        (["priority:12"], "9"),
        (["priority:-3"], "0"),
        (["priority:007"], "7"),
        (["priority:" + "8" * 30], "9"),
        (["x-priority:8"], "4"),
        (["activemq.priority:8", "priority:33"], "9"),
    ],
)
@pytest.mark.parametrize(
    "others",
    [
        [],
        ["content-length:4"],
        ["content-length:4", "receipt:r"],
        ["content-length:4", "reply-to:/temp-queue/r"],
        ["content-length:4", "a:b:c"],
    ],
)
def test_message_frame_has_the_effective_priority_once(
    producer: Version, consumer: Version, lines: list[str], counted: str, others: list[str]
) -> None:
    sender = connected(producer)
    receive(sender, "SUBSCRIBE", "destination:/temp-queue/r", "id:r")
    send = receive(sender, "SEND", QUEUE, *lines, *others, body=b"body")[0]
    assert isinstance(send, Send)
    assert str(send.message.priority) == counted
    server = connected(consumer)
    receive(server, "SUBSCRIBE", QUEUE, "id:s")
    parts: list[bytes] = []
    server.replies.encode_deliveries("s", [Delivered(send.message)], parts)
    assert b"".join(parts).count(b"\npriority:") == 1
    (frame,) = decode(consumer, b"".join(parts))
    assert frame.headers["priority"] == counted
    assert (frame.headers["destination"], frame.body) == ("/queue/a", b"body")
    assert frame.headers.get("x-priority") == ("8" if "x-priority:8" in lines else None)


@pytest.mark.parametrize("lines", [["priority:7"], ["priority:7", "receipt:r"], [], ["x:y"]])
def test_a_priority_that_is_right_costs_no_header_its_taking_apart(lines: list[str]) -> None:
    """Header lines become those of the MESSAGE as they are; only where none says the priority one stands before."""
    server = connected()
    with mock.patch.object(header_lines, "encode_header_lines", side_effect=AssertionError):
        send = receive(server, "SEND", QUEUE, "content-length:0", *lines)[0]
    assert isinstance(send, Send)
    header = [line for line in lines if not line.startswith("receipt")]
    before = [] if "priority:7" in lines else ["priority:4"]
    expected = [*before, QUEUE, "content-length:0", *header]
    assert send.message.header.decode().splitlines() == expected


@pytest.mark.parametrize(
    ("value", "persistent"), [("true", True), ("TRUE", True), ("True", True), ("false", False), ("False", False)]
)
def test_a_message_is_persistent_if_the_producer_says_so(value: str, persistent: bool) -> None:
    assert receive_one(Send, Version.V1_2, "SEND", QUEUE, f"persistent:{value}").message.persistent is persistent


@pytest.mark.parametrize("value", ["", "yes", "1", "true ", "t", "\u00df" * 500])
def test_persistent_is_true_or_false(value: str) -> None:
    assert "is not true or false" in error_of(Version.V1_2, "SEND", QUEUE, f"persistent:{value}")


def test_expires_is_a_time_in_milliseconds() -> None:
    assert receive_one(Send, Version.V1_2, "SEND", QUEUE, "expires:1700000000000").message.expires_ms == 1700000000000
    assert receive_one(Send, Version.V1_2, "SEND", QUEUE, f"expires:{'0' * 30}7").message.expires_ms == 7
    for value in ("", "-2", "--1", "-", "1.5", "soon", "\u0661"):
        assert "is not a number" in error_of(Version.V1_2, "SEND", QUEUE, f"expires:{value}")
    for value in ("1" * 20, "1" * 5000):
        assert f" is more than {'9' * 19}" in error_of(Version.V1_2, "SEND", QUEUE, f"expires:{value}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_message_with_expires_0_or_less_never_expires(version: Version, value: str) -> None:
    assert receive_one(Send, version, "SEND", QUEUE, f"expires:{value}").message.expires_ms == 0


def test_the_padding_of_1_0_changes_nothing() -> None:
    send = receive_one(Send, Version.V1_0, "SEND", "destination: /queue/a", "priority : 7", "persistent:true ", " a:b")
    assert send.destination.name == "a"
    assert (send.message.priority, send.message.persistent) == (7, True)
    assert decode_header_lines(send.message.header)["a"] == "b"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reply_to_of_the_connection_becomes_one_that_everybody_understands(version: Version) -> None:
    server = connected(version)
    receive(server, "SUBSCRIBE", "destination:/temp-queue/r", "id:r")
    (send,) = receive(server, "SEND", QUEUE, "reply-to:/temp-queue/r", "content-length:0")
    assert isinstance(send, Send)
    assert decode_header_lines(send.message.header)["reply-to"] == "/remote-temp-queue/me/r"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reply_to_without_a_subscription_to_it_is_refused_with_what_to_do(version: Version) -> None:
    why = r"reply-to /temp-queue/r: this connection has no subscription .*; SUBSCRIBE to it first"
    request = ("SEND", QUEUE, "reply-to:/temp-queue/r", "content-length:0")
    server = connected(version)
    with pytest.raises(RemoteProtocolError, match=why) as raised:
        receive(server, *request)
    assert raised.value.code is Code.NOT_FOUND
    # One that ends leaves the other, by either name of the queue; a browser gets no reply.
    server = connected(version)
    receive(server, "SUBSCRIBE", "destination:/temp-queue/r", "id:1")
    receive(server, "SUBSCRIBE", "destination:/remote-temp-queue/me/r", "id:2")
    receive(server, "SUBSCRIBE", "destination:/temp-queue/r", "id:3", "browser:true")
    receive(server, "UNSUBSCRIBE", "id:1")
    assert len(receive(server, *request)) == 1
    receive(server, "UNSUBSCRIBE", "id:2")
    with pytest.raises(RemoteProtocolError, match=why):
        receive(server, *request)


def test_a_subscription_in_the_same_breath_is_there_for_the_reply_to_behind_it() -> None:
    data = text("SUBSCRIBE", "destination:/temp-queue/r", "id:1") + text("SEND", QUEUE, "reply-to:/temp-queue/r")
    assert [type(command) for command in connected().receive(data)] == [Subscribe, Send]


@pytest.mark.parametrize("address", ["/queue/r", "/remote-temp-queue/you/r", "whatever", "/temp-queue"])
def test_reply_to_outside_own_temporary_queues_is_unchanged(address: str) -> None:
    send = receive_one(Send, Version.V1_2, "SEND", QUEUE, f"reply-to:{address}", "content-length:0")
    assert decode_header_lines(send.message.header)["reply-to"] == address


def test_a_reply_to_that_can_be_no_queue_is_refused() -> None:
    assert "has no name" in error_of(Version.V1_2, "SEND", QUEUE, "reply-to:/temp-queue/")


HOP_HEADERS = [
    *("receipt", "transaction", "truenext-producer", "truenext-number", "truenext-ttl", "truenext-gapless"),
    *("message-id", "subscription", "ack", "redelivered", "timestamp"),
    *("truenext-sequence", "truenext-deliveries", "truenext-attempts", "JMSXGroupFirstForConsumer", "browser"),
    *sorted(header_lines.ADDED_HEADERS),
]


@pytest.mark.parametrize("name", HOP_HEADERS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("others", [[], ["content-length:0"], ["a:b:c"]])
def test_headers_for_the_send_or_the_broker_alone_do_not_reach_the_consumer(
    version: Version, name: str, others: list[str]
) -> None:
    values = {"truenext-number": "66", "truenext-ttl": "66", "truenext-gapless": "true"}
    line = f"{name}:{values.get(name, 'spoofed')}"
    lines = [QUEUE, line, *others]
    if name == "truenext-producer":
        lines.append("truenext-number:66")
    if name == "truenext-number":
        lines.append("truenext-producer:spoofed")
    if name == "truenext-gapless":
        lines += ["truenext-producer:spoofed", "truenext-number:66"]
    send = receive(connected(version), "SEND", *lines)[0]
    assert isinstance(send, Send)
    assert not decode_header_lines(send.message.header).keys() & set(HOP_HEADERS)
    for consumer in VERSIONS:
        for mode in ("ack:auto", "ack:client"):
            (frame,) = message_frame(consumer, [Delivered(send.message)], mode)
            assert frame.headers.get(name) not in ("spoofed", "66", "true")


def test_padding_does_not_hide_a_header_of_the_broker_in_1_0() -> None:
    send = receive_one(Send, Version.V1_0, "SEND", QUEUE, "redelivered : true", " subscription:x")
    assert decode_header_lines(send.message.header) == {
        "destination": "/queue/a",
        "content-length": "0",
        "priority": "4",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_send_may_belong_to_a_transaction(version: Version) -> None:
    assert receive_one(Send, version, "SEND", QUEUE, "transaction:t").transaction == "t"


@pytest.mark.parametrize("number", [0, 1, PRODUCER_NUMBER_MAX])
def test_a_send_may_be_numbered(number: int) -> None:
    send = receive_one(Send, Version.V1_2, "SEND", QUEUE, "truenext-producer:p", f"truenext-number:{number}")
    assert (send.producer, send.number) == ("p", number)
    commit = receive_one(
        Commit, Version.V1_2, "COMMIT", "transaction:t", "truenext-producer:p", f"truenext-number:{number}"
    )
    assert commit == Commit("t", "p", number)


@pytest.mark.parametrize(("text", "is_gapless"), [("true", True), ("TRUE", True), ("false", False)])
@pytest.mark.parametrize("times", [1, 10], ids=["first of its shape", "tenth of its shape"])
def test_a_send_or_commit_may_say_that_its_numbers_have_no_gaps(text: str, is_gapless: bool, times: int) -> None:
    numbered = ["truenext-producer:p", "truenext-number:1", f"truenext-gapless:{text}"]
    server = connected()
    for _ in range(times):
        (send,) = receive(server, "SEND", QUEUE, "content-length:0", *numbered)
    assert isinstance(send, Send) and (send.producer, send.number, send.is_gapless) == ("p", 1, is_gapless)
    assert decode_header_lines(send.message.header).keys() == {"destination", "content-length", "priority"}
    commit = receive_one(Commit, Version.V1_2, "COMMIT", "transaction:t", *numbered)
    assert commit == Commit("t", "p", 1, is_gapless=is_gapless)


def test_a_disconnect_may_name_producers_that_are_to_be_forgotten() -> None:
    header = r'truenext-forget:["p", "q\c\\u00e4"]'
    assert receive(connected(), "DISCONNECT", header) == [Disconnect(["p", "q:\u00e4"])]
    assert receive(connected(), "DISCONNECT", "truenext-forget:[]") == [Disconnect()]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("p", "is not a JSON list of names"),
        ('"p"', "is not a JSON list of names"),
        ("[1]", "is not a JSON list of names"),
        ("", "is not a JSON list of names"),
        (f'["{"p" * 256}"]', "256 characters; at most 255"),
    ],
)
def test_malformed_list_of_producers_is_refused(text: str, reason: str) -> None:
    assert reason in error_of(Version.V1_2, "DISCONNECT", f"truenext-forget:{text}")


@pytest.mark.parametrize(("command", "line"), [("SEND", QUEUE), ("COMMIT", "transaction:t")])
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["truenext-producer:p"], "must be set together"),
        (["truenext-number:1"], "must be set together"),
        (["truenext-producer:", "truenext-number:1"], "is empty"),
        (["truenext-producer:" + "p" * 256, "truenext-number:1"], "at most 255"),
        (["truenext-gapless:true"], "needs truenext-producer and truenext-number"),
        (["truenext-gapless:false"], "needs truenext-producer and truenext-number"),
        (["truenext-producer:p", "truenext-number:1", "truenext-gapless:1"], "is not true or false"),
        (["truenext-producer:p", "truenext-number:"], "is not a number"),
        (["truenext-producer:p", "truenext-number:-1"], "is not a number"),
        (["truenext-producer:p", "truenext-number:\u0661"], "is not a number"),
        (["truenext-producer:p", "truenext-number:" + "1" * 5000], f"is more than {PRODUCER_NUMBER_MAX}"),
        (["truenext-producer:p", f"truenext-number:{PRODUCER_NUMBER_MAX + 1}"], "is more than"),
    ],
)
def test_producer_and_number_follow_their_rules(command: str, line: str, lines: list[str], reason: str) -> None:
    assert reason in error_of(Version.V1_2, command, line, *lines)


def test_a_producer_of_255_characters_is_short_enough() -> None:
    send = receive_one(Send, Version.V1_2, "SEND", QUEUE, "truenext-producer:" + "p" * 255, "truenext-number:1")
    assert send.producer == "p" * 255


def test_a_send_needs_a_destination() -> None:
    for version in VERSIONS:
        assert "SEND without a destination" in error_of(version, "SEND", "a:b")


# ---- Questions to the broker ----


def test_a_send_to_control_is_a_question() -> None:
    lines = ["destination:/control/status", "reply-to:/temp-queue/r", "correlation-id:c"]
    control = receive_one(ControlRequest, Version.V1_2, "SEND", *lines, body=b"{}")
    assert control == ControlRequest("status", b"{}", parse_address("/temp-queue/r", "me"), "c")
    assert receive_one(ControlRequest, Version.V1_2, "SEND", *lines[:2]).correlation is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "without the header 'reply-to'"),
        (["reply-to:/control/x"], "temp-queue"),
        (["reply-to:nowhere"], "temp-queue"),
        (["reply-to:no/where"], "unknown destination"),
        (["reply-to:/temp-queue/r", "transaction:t"], "cannot be part of a transaction"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(lines: list[str], reason: str) -> None:
    assert reason in error_of(Version.V1_2, "SEND", "destination:/control/status", *lines)


# ---- SUBSCRIBE, UNSUBSCRIBE ----


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("lines", "mode"),
    [
        ([], AckMode.AUTO),
        (["ack:auto"], AckMode.AUTO),
        (["ack:client"], AckMode.CLIENT),
        (["ack:client-individual"], AckMode.INDIVIDUAL),
    ],
)
def test_a_subscription_has_an_acknowledgement_mode(version: Version, lines: list[str], mode: AckMode) -> None:
    subscribe = receive_one(Subscribe, version, "SUBSCRIBE", QUEUE, "id:s", *lines)
    assert subscribe == Subscribe("s", parse_address("/queue/a", "me"), mode, None)


@pytest.mark.parametrize("value", ["", "AUTO", "Client", "individual", " auto", "none"])
def test_unknown_acknowledgement_mode_is_refused(value: str) -> None:
    assert "is not auto, client or client-individual" in error_of(
        Version.V1_2, "SUBSCRIBE", QUEUE, "id:s", f"ack:{value}"
    )


@pytest.mark.parametrize("size", [1, 1000, WINDOW_MAX])
def test_window_is_the_prefetch_size_of_the_consumer(size: int) -> None:
    assert (
        receive_one(Subscribe, Version.V1_2, "SUBSCRIBE", QUEUE, "id:s", f"activemq.prefetchSize:{size}").window == size
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [("0", "not supported"), ("00", "not supported"), ("-1", "not a number"), ("", "not a number"), ("x", "number")],
)
def test_a_window_without_room_is_refused(value: str, reason: str) -> None:
    assert reason in error_of(Version.V1_2, "SUBSCRIBE", QUEUE, "id:s", f"activemq.prefetchSize:{value}")


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
@pytest.mark.parametrize("command", ["SUBSCRIBE", "UNSUBSCRIBE"])
def test_a_subscription_needs_an_id(version: Version, command: str) -> None:
    """1.1 and 1.2, "SUBSCRIBE id Header"."""
    assert f"{command} without an id" in error_of(version, command, QUEUE)


def test_in_1_0_a_subscription_may_be_known_by_its_destination() -> None:
    """1.0, "SUBSCRIBE" and "UNSUBSCRIBE"."""
    server = connected(Version.V1_0)
    (subscribe,) = receive(server, "SUBSCRIBE", QUEUE)
    assert subscribe == Subscribe("/queue/a", parse_address("/queue/a", "me"), AckMode.AUTO, None)
    parts: list[bytes] = []
    server.replies.encode_deliveries(
        "/queue/a", [Delivered(SentMessage(4, False, 0, b"content-length:0\n", b""))], parts
    )
    (frame,) = decode(Version.V1_0, b"".join(parts))
    assert "subscription" not in frame.headers
    assert receive(server, "UNSUBSCRIBE", QUEUE) == [Unsubscribe("/queue/a")]
    assert receive_one(Subscribe, Version.V1_0, "SUBSCRIBE", QUEUE, "id:s").subscription == "s"
    assert "without an id" in error_of(Version.V1_0, "UNSUBSCRIBE", "x:y")


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unsubscribe_names_its_subscription(version: Version) -> None:
    assert receive_one(Unsubscribe, version, "UNSUBSCRIBE", "id:s") == Unsubscribe("s")


def test_a_subscription_needs_a_queue() -> None:
    assert "without the header 'destination'" in error_of(Version.V1_2, "SUBSCRIBE", "id:s")
    assert "subscribe to the queue" in error_of(Version.V1_2, "SUBSCRIBE", "id:s", "destination:/control/status")


def test_an_id_may_be_used_again_with_another_mode() -> None:
    server = connected()
    receive(server, "SUBSCRIBE", QUEUE, "id:s", "ack:client")
    receive(server, "UNSUBSCRIBE", "id:s")
    receive(server, "SUBSCRIBE", QUEUE, "id:s", "ack:auto")
    parts: list[bytes] = []
    server.replies.encode_deliveries("s", [Delivered(SentMessage(4, False, 0, b"content-length:0\n", b""))], parts)
    assert "ack" not in decode(Version.V1_2, b"".join(parts))[0].headers


def test_a_second_subscribe_of_the_same_id_changes_nothing_for_the_first() -> None:
    # The broker refuses it; until then messages of the first may still be on their way.
    server = connected()
    receive(server, "SUBSCRIBE", QUEUE, "id:s", "ack:client")
    assert isinstance(next(server.receive(text("SUBSCRIBE", QUEUE, "id:s", "ack:auto"))), Subscribe)
    parts: list[bytes] = []
    server.replies.encode_deliveries("s", [Delivered(SentMessage(4, False, 0, b"content-length:0\n", b""))], parts)
    assert decode(Version.V1_2, b"".join(parts))[0].headers["ack"] == "7@s"


# ---- Browsing ----


@pytest.mark.parametrize("version", VERSIONS)
def test_selector_of_a_browser_is_read(version: Version) -> None:
    browse = receive_one(Browse, version, "SUBSCRIBE", QUEUE, "id:s", "browser:true", "selector:a > 1", "ack:client")
    assert (browse.subscription, browse.destination) == ("s", parse_address("/queue/a", "me"))
    assert browse.selector is not None and browse.selector.text == "a > 1"
    for lines in (["browser:TRUE"], ["browser:true", "selector:"]):
        assert receive_one(Browse, version, "SUBSCRIBE", QUEUE, "id:s", *lines).selector is None
    assert receive_one(Subscribe, version, "SUBSCRIBE", QUEUE, "id:s", "browser:false").subscription == "s"


@pytest.mark.parametrize("version", VERSIONS)
def test_selector_of_a_consumer_is_read(version: Version) -> None:
    subscribe = receive_one(Subscribe, version, "SUBSCRIBE", QUEUE, "id:s", "selector:a > 1", "ack:client")
    assert subscribe.selector is not None and subscribe.selector.text == "a > 1"
    assert receive_one(Subscribe, version, "SUBSCRIBE", QUEUE, "id:s", "selector:").selector is None
    assert "at character 3" in error_of(version, "SUBSCRIBE", QUEUE, "id:s", "selector:a ! 1")


def test_invalid_headers_of_a_browser_are_refused() -> None:
    assert "is not true or false" in error_of(Version.V1_2, "SUBSCRIBE", QUEUE, "id:s", "browser:yes")
    assert "at character 3" in error_of(Version.V1_2, "SUBSCRIBE", QUEUE, "id:s", "browser:true", "selector:a ! 1")
    assert "exclusive" in error_of(Version.V1_2, "SUBSCRIBE", QUEUE, "id:s", "browser:true", "activemq.exclusive:true")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_browser_reads_how_often_messages_were_dispatched_and_then_that_this_was_all(version: Version) -> None:
    server = connected(version)
    receive(server, "SUBSCRIBE", QUEUE, "id:s", "browser:true", "ack:client")
    message = SentMessage(4, False, 0, b"content-length:1\n", b"x")
    parts: list[bytes] = []
    deliveries = [Delivered(message, deliveries=count) for count in (0, 1)]
    deliveries.append(Delivered(message, deliveries=1, was_never_started=True))
    server.replies.encode_deliveries("s", deliveries, parts, is_browse=True)
    assert len(parts) == 3 * PARTS_PER_MESSAGE
    parts.append(server.replies.encode_end_of_browse("s", parse_address("/queue/a", "me")))
    never, once, unseen, end = decode(version, b"".join(parts))
    assert (never.headers["truenext-deliveries"], never.headers.get("redelivered")) == ("0", None)
    assert (once.headers["truenext-deliveries"], once.headers.get("redelivered")) == ("1", "true")
    assert (unseen.headers["truenext-deliveries"], unseen.headers.get("redelivered")) == ("1", None)
    assert "ack" not in never.headers and never.body == b"x"
    assert end.command == "MESSAGE" and end.body == b""
    assert end.headers == {
        "subscription": "s",
        "message-id": "truenext-b1-0",
        "destination": "/queue/a",
        "browser": "end",
        "content-length": "0",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_no_message_passes_for_the_end_of_a_browse(version: Version) -> None:
    assert b"browser" not in receive_one(Send, version, "SEND", QUEUE, "browser:end").message.header


# ---- ACK, NACK, transactions ----


@pytest.mark.parametrize("subscription", ["s", "a@b", "@", "a:b\n\\c", "", "\u20ac"])
@pytest.mark.parametrize(
    "version",
    [Version.V1_1, Version.V1_2],
)
def test_headers_of_a_message_acknowledge_it(version: Version, subscription: str) -> None:
    server = connected(version)
    escaped = escape(subscription)
    receive(server, "SUBSCRIBE", QUEUE, f"id:{escaped}", "ack:client")
    parts: list[bytes] = []
    server.replies.encode_deliveries(
        subscription, [Delivered(SentMessage(4, False, 0, b"", b""), sequence=2**63)], parts
    )
    (frame,) = decode(version, b"".join(parts))
    assert frame.headers["subscription"] == subscription
    if version is Version.V1_2:
        lines = [f"id:{escape(frame.headers['ack'])}"]
    else:
        assert "ack" not in frame.headers
        lines = [f"message-id:{escape(frame.headers['message-id'])}", f"subscription:{escaped}"]
    assert receive(server, "ACK", *lines) == [Ack(subscription, 2**63)]
    assert receive(server, "NACK", *lines) == [Nack(subscription, 2**63)]
    assert receive(server, "ACK", *lines, "transaction:t") == [Ack(subscription, 2**63, "t")]
    assert receive(server, "NACK", *lines, "transaction:t") == [Nack(subscription, 2**63, "t")]


def test_1_0_acknowledges_by_message_id_alone() -> None:
    (frame,) = message_frame(
        Version.V1_0, [Delivered(SentMessage(4, False, 0, b"content-length:0\n", b""), sequence=5)], "ack:client"
    )
    line = f"message-id:{frame.headers['message-id']}"
    assert receive_one(Ack, Version.V1_0, "ACK", line) == Ack(None, 5)
    assert receive_one(Ack, Version.V1_0, "ACK", line, "subscription:s", "transaction:t") == Ack("s", 5, "t")
    assert "1.0 has no NACK" in error_of(Version.V1_0, "NACK", line)


@pytest.mark.parametrize("command", ["ACK", "NACK"])
@pytest.mark.parametrize(
    "line",
    [
        *("id:", "id:5", "id:@s", "id:-5@s", "id:x@s", "id:\u0665@s", "id:\u00b2@s", "id: 5@s", "id:5", "x:y"),
        *("id:truenext-b1-5", "message-id:truenext-b1-5", f"id:{'1' * 20}@s", f"id:{'1' * 5000}@s"),
    ],
)
def test_1_2_refuses_an_id_that_no_message_carried(command: str, line: str) -> None:
    why = error_of(Version.V1_2, command, line, "subscription:s")
    if line.startswith("id:"):
        assert why.startswith(f"{command} has the invalid id ")
    else:
        assert why == f"{command} without the header 'id'"


@pytest.mark.parametrize(("version", "command"), [(Version.V1_0, "ACK"), (Version.V1_1, "ACK"), (Version.V1_1, "NACK")])
@pytest.mark.parametrize(
    "line",
    [
        *("message-id:", "message-id:5", "message-id:truenext-b2-5", "message-id:truenext-b1-"),
        *("message-id:truenext-b1--5", "message-id:truenext-b1- 5", "id:truenext-b1-5"),
        *("message-id:truenext-b1-x", "message-id:truenext-b1-\u0665", f"message-id:truenext-b1-{'1' * 20}", "id:5@s"),
    ],
)
def test_earlier_versions_refuse_a_message_id_that_no_message_carried(
    version: Version, command: str, line: str
) -> None:
    assert command in error_of(version, command, line, "subscription:s")


def test_1_1_needs_the_subscription_too() -> None:
    """1.1, "ACK"."""
    for command in ("ACK", "NACK"):
        assert "'subscription'" in error_of(Version.V1_1, command, "message-id:truenext-b1-5")


@pytest.mark.parametrize("version", VERSIONS)
def test_transaction_commands_name_their_transaction(version: Version) -> None:
    assert receive_one(Begin, version, "BEGIN", "transaction:t") == Begin("t")
    assert receive_one(Commit, version, "COMMIT", "transaction:t") == Commit("t")
    assert receive_one(Abort, version, "ABORT", "transaction:t") == Abort("t")
    for command in ("BEGIN", "COMMIT", "ABORT"):
        assert "without the header 'transaction'" in error_of(version, command, "x:y")


@pytest.mark.parametrize("version", VERSIONS)
def test_begin_may_limit_counted_attempts_to_nacked_messages(version: Version) -> None:
    for value, counts_all in (("all", True), ("nacked", False)):
        command = receive_one(Begin, version, "BEGIN", "transaction:t", f"truenext-count-attempts:{value}")
        assert command == Begin("t", counts_all)


@pytest.mark.parametrize("command", ["BEGIN", "COMMIT", "ABORT"])
@pytest.mark.parametrize("value", ["", "none", "NACKED", "true"])
def test_count_attempts_other_than_all_or_nacked_is_refused_by_name(command: str, value: str) -> None:
    why = error_of(Version.V1_2, command, "transaction:t", f"truenext-count-attempts:{value}")
    assert why == f"truenext-count-attempts {value!r} is not all or nacked"


def test_count_attempts_is_refused_in_frames_that_begin_or_end_no_transaction() -> None:
    why = error_of(Version.V1_2, "ACK", "id:5@1", "transaction:t", "truenext-count-attempts:nacked")
    assert (
        why == "unknown header 'truenext-count-attempts' of ACK: "
        "this header is for BEGIN and COMMIT and ABORT; leave it out"
    )


# ---- What is not there yet ----


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("command", "line", "feature"),
    [
        ("SUBSCRIBE", "activemq.retroactive:true", "retroactive consumers"),
        ("SUBSCRIBE", "activemq.noLocal:true", "one's own messages"),
        ("SUBSCRIBE", "no-local:true", "one's own messages"),
    ],
)
def test_a_feature_that_is_not_there_yet_is_refused_by_name(
    version: Version, command: str, line: str, feature: str
) -> None:
    reason = error_of(version, command, QUEUE, "id:s", line)
    assert feature in reason and "not supported yet" in reason and line.partition(":")[0] in reason


NACKED = ["id:5@s", "message-id:truenext-b1-5", "subscription:s"]


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
@pytest.mark.parametrize(
    ("lines", "delay_ms", "is_rejected"),
    [
        ([], None, False),
        (["truenext-delay:0"], 0, False),
        (["truenext-delay:1500"], 1500, False),
        (["truenext-delay:604800000", "truenext-reject:false"], 604_800_000, False),
        (["truenext-reject:true"], None, True),
        (["truenext-reject:TRUE"], None, True),
    ],
)
def test_a_nack_may_say_when_or_that_never_to_try_again(
    version: Version, lines: list[str], delay_ms: int | None, is_rejected: bool
) -> None:
    nack = receive_one(Nack, version, "NACK", *NACKED, *lines)
    assert (nack.sequence, nack.delay_ms, nack.is_rejected) == (5, delay_ms, is_rejected)


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
@pytest.mark.parametrize(
    ("header", "cause"),
    [
        ("", ""),
        ("ValueError\\c no\\nrow 7", "ValueError: no\nrow 7"),
        ("\u00fc" * 2048, "\u00fc" * 2048),
        ("x" * 4096,) * 2,
    ],
)
def test_a_nack_may_say_why(version: Version, header: str, cause: str) -> None:
    assert receive_one(Nack, version, "NACK", *NACKED, f"truenext-cause:{header}").cause == cause
    assert receive_one(Nack, version, "NACK", *NACKED).cause == ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_browse", [False, True])
def test_a_message_says_why_consumers_failed_with_it(version: Version, is_browse: bool) -> None:
    server = connected(version)
    receive(server, "SUBSCRIBE", QUEUE, "id:s", "ack:client")
    parts: list[bytes] = []
    message = SentMessage(4, False, 0, b"truenext-first-cause:imitated\n", b"")
    header = [Delivered(message, causes=Causes("a: \n\\", "\u20ac")), Delivered(message)]
    server.replies.encode_deliveries("s", header, parts, is_browse=is_browse)
    frame, other = decode(version, b"".join(parts))
    first = "a: \\n\\" if version is Version.V1_0 else "a: \n\\"
    assert (frame.headers["truenext-first-cause"], frame.headers["truenext-last-cause"]) == (first, "\u20ac")
    assert "truenext-last-cause" not in other.headers


@pytest.mark.parametrize("version", VERSIONS)
def test_no_sender_says_why_consumers_failed(version: Version) -> None:
    # C11.3
    names = [f"truenext-{which}{one}-cause" for which in ("", "original-") for one in ("first", "last")]
    send = receive_one(Send, version, "SEND", QUEUE, *(f"{name}:it broke" for name in names), "truenext-cause:mine")
    assert decode_header_lines(send.message.header).keys().isdisjoint([*names, "truenext-cause"])


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["truenext-cause:" + "x" * 4097], "truenext-cause of 4097 bytes; at most 4096"),
        (["truenext-cause:" + "\u20ac" * 1366], "truenext-cause of 4098 bytes; at most 4096"),
        (["truenext-delay:soon"], "truenext-delay 'soon' is not a number"),
        (["truenext-delay:-1"], "truenext-delay '-1' is not a number"),
        (["truenext-delay:1.5"], "truenext-delay '1.5' is not a number"),
        (["truenext-delay:604800001"], "truenext-delay 604800001 is more than 604800000 milliseconds (7 days)"),
        (["truenext-delay:" + "9" * 20], f"truenext-delay {'9' * 20} is more than 604800000 milliseconds (7 days)"),
        (["truenext-reject:yes"], "truenext-reject 'yes' is not true or false"),
        (["truenext-reject:true", "truenext-delay:5"], "truenext-reject:true rejects the message"),
    ],
)
def test_nack_with_an_invalid_header_is_refused_by_name(version: Version, lines: list[str], why: str) -> None:
    assert why in error_of(version, "NACK", *NACKED, *lines)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("command", ["SEND", "SUBSCRIBE"])
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/dsub/a", "SUBSCRIBE to its /topic/NAME with durable:true"),
        ("/exchange/a", "use /topic/NAME for all subscribers, /queue/NAME for one consumer"),
        ("/amq/queue/a", "here it is '/queue/a'"),
        ("topic/a", "here it is '/topic/a'"),
    ],
)
def test_a_destination_of_another_broker_is_refused_with_the_words_for_it(
    version: Version, command: str, address: str, words: str
) -> None:
    reason = error_of(version, command, f"destination:{address}", "id:s")
    assert f"unknown destination '{address}'" in reason and words in reason


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mere_name_is_a_queue(version: Version) -> None:
    send = receive_one(Send, version, "SEND", "destination:orders")
    assert send.destination == parse_address("/queue/orders", "me")
    # As it was sent.
    assert decode_header_lines(send.message.header)["destination"] == "orders"
    assert receive_one(Subscribe, version, "SUBSCRIBE", "destination:orders.*", "id:s").destination == parse_address(
        "/queue/orders.*", "me"
    )
    assert "is for SUBSCRIBE only" in error_of(version, "SEND", "destination:orders.*")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("command", "lines", "why"),
    [
        ("SEND", ["destination:/topic/a.*"], "is for SUBSCRIBE only"),
        ("SEND", ["destination:/queue/a,/topic/a.>"], "is for SUBSCRIBE only"),
        ("SEND", ["destination:/queue/a,/control/status"], "is for control requests"),
        ("SUBSCRIBE", ["destination:/queue/a,/topic/b"], "send a SUBSCRIBE for each part, each with its own id"),
        ("SUBSCRIBE", ["destination:/topic/a", "browser:true"], "no message waits in a topic"),
        ("SUBSCRIBE", ["destination:/topic/a", "durable:true"], "needs a client-id"),
        ("SUBSCRIBE", ["destination:/topic/a", "durable:maybe"], "durable 'maybe' is not true or false"),
        ("UNSUBSCRIBE", ["destination:/topic/a", "activemq.subscriptionName:n"], "needs a client-id"),
        ("SUBSCRIBE", ["destination:/topic/a.*", "browser:true"], "no message waits in a topic"),
    ],
)
def test_unsupported_use_of_topics_is_refused_with_the_reason(
    version: Version, command: str, lines: list[str], why: str
) -> None:
    assert why in error_of(version, command, *lines, "id:s")


# ---- Receipts and faults ----


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("SEND", [QUEUE]),
        ("SUBSCRIBE", [QUEUE, "id:s"]),
        ("UNSUBSCRIBE", ["id:s"]),
        ("ACK", ["id:5@s", "message-id:truenext-b1-5", "subscription:s"]),
        ("BEGIN", ["transaction:t"]),
        ("COMMIT", ["transaction:t"]),
        ("ABORT", ["transaction:t"]),
        ("DISCONNECT", []),
    ],
)
def test_receipt_request_follows_its_command(version: Version, command: str, lines: list[str]) -> None:
    without = receive(connected(version), command, *lines)
    assert len(without) == 1 and not isinstance(without[0], ReceiptRequest)
    first, second = receive(connected(version), command, *lines, "receipt:r\u00e9")
    assert type(first) is type(without[0])
    assert second == ReceiptRequest("r\u00e9")
    assert receive(connected(version), command, *lines, "receipt:")[1:] == [ReceiptRequest("")]


def test_the_receipt_in_question_is_that_of_the_frame_that_was_refused() -> None:
    server = connected()
    good = text("SEND", QUEUE, "receipt:1")
    assert len(list(server.receive(good))) == 2
    with pytest.raises(RemoteProtocolError):
        list(server.receive(good + text("SEND", "receipt:2") + text("SEND", QUEUE, "receipt:3")))
    assert server.last_receipt == "2"


@pytest.mark.parametrize("bad", [text("SEND", "a:b"), b"x\0", text("SEND", "x")])
def test_refused_frame_without_a_receipt_names_no_earlier_receipt(bad: bytes) -> None:
    server = connected()
    list(server.receive(text("SEND", QUEUE, "receipt:1")))
    with pytest.raises(RemoteProtocolError):
        list(server.receive(bad))
    assert server.last_receipt is None


@pytest.mark.parametrize("receipt", ["4", None])
def test_a_frame_out_of_turn_has_its_receipt_in_question(receipt: str | None) -> None:
    server = connected()
    lines = [] if receipt is None else [f"receipt:{receipt}"]
    with pytest.raises(RemoteProtocolError):
        list(server.receive(text("BEGIN", "transaction:t", "receipt:1") + text("CONNECT", *lines)))
    assert server.last_receipt == receipt


@pytest.mark.parametrize("broken", [b"x\0", b"SEND\nx\n\n\0", b"SEND\ncontent-length:x\n\n\0"])
@pytest.mark.parametrize("before", [text("SEND", QUEUE, "receipt:1"), text("DISCONNECT", "receipt:1")])
def test_commands_before_a_broken_frame_in_the_same_read_stand(before: bytes, broken: bytes) -> None:
    """`StompSession.receive`: all before it stands."""
    server = connected()
    commands: list[Command] = []
    with pytest.raises(RemoteProtocolError):
        for command in server.receive(before + broken):
            commands.append(command)
    assert len(commands) == 2


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("receipt", ["1", "a:b", "\u20ac"])
def test_receipt_has_the_id_of_its_request(version: Version, receipt: str) -> None:
    (frame,) = decode(version, connected(version).replies.encode_receipt(Receipt(receipt)))
    assert (frame.command, frame.headers, frame.body) == ("RECEIPT", {"receipt-id": receipt}, b"")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_receipt_of_a_repeat_says_so(version: Version) -> None:
    server = connected(version)
    (frame,) = decode(version, server.replies.encode_receipt(Receipt("r", is_repeat=True)))
    assert frame.headers == {"receipt-id": "r", "truenext-repeat": "true"}
    (frame,) = decode(version, server.replies.encode_receipt(Receipt("r", is_repeat=True, is_unknown=True)))
    assert frame.headers == {"receipt-id": "r", "truenext-repeat": "true", "truenext-outcome": "unknown"}
    (frame,) = decode(version, server.replies.encode_receipt(Receipt("r")))
    assert frame.headers == {"receipt-id": "r"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_time_to_live_is_the_broker_s_affair_and_not_the_consumer_s(version: Version) -> None:
    send = receive_one(Send, version, "SEND", QUEUE, "truenext-ttl:0500", "ttl:7", "note:x", body=b"x")
    assert (send.ttl_ms, send.message.expires_ms) == (500, 0)
    kept = decode_header_lines(send.message.header)
    assert kept == {"priority": "4", "destination": "/queue/a", "ttl": "7", "note": "x", "content-length": "1"}
    send = receive_one(Send, version, "SEND", QUEUE, f"truenext-ttl:{TTL_MS_MAX}")
    assert send.ttl_ms == TTL_MS_MAX
    assert receive_one(Send, version, "SEND", QUEUE, "ttl:500").ttl_ms == 0


def test_the_time_to_live_of_a_scheduled_send_is_its_schedule_s() -> None:
    send = receive_one(Send, Version.V1_2, "SEND", QUEUE, "truenext-ttl:500", "AMQ_SCHEDULED_DELAY:7")
    assert (send.ttl_ms, send.schedule) == (0, Schedule(delay_ms=7, ttl_ms=500))


def test_the_time_of_a_scheduled_send_is_read() -> None:
    lines = ["AMQ_SCHEDULED_TIME:1700000000000", "AMQ_SCHEDULED_PERIOD:5", "AMQ_SCHEDULED_REPEAT:2"]
    send = receive_one(Send, Version.V1_2, "SEND", QUEUE, *lines)
    assert send.schedule == Schedule(due_ms=1_700_000_000_000, period_ms=5, repeat=2)
    assert "AMQ_SCHEDULED_TIME" not in decode_header_lines(send.message.header)
    assert "AMQ_SCHEDULED_TIME '-1'" in error_of(Version.V1_2, "SEND", QUEUE, "AMQ_SCHEDULED_TIME:-1")
    assert "is more than" in error_of(Version.V1_2, "SEND", QUEUE, f"AMQ_SCHEDULED_TIME:{'9' * 30}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("others", [[], ["content-length:0"], ["content-length:0", "a:b:c"]])
def test_a_header_that_is_nearly_one_of_a_schedule_is_refused_by_name(version: Version, others: list[str]) -> None:
    # C14.1
    for name in ("AMQ_SCHEDULED_DELEY", "AMQ_SCHEDULED_", "AMQ_SCHEDULED_time", "AMQ_SCHEDULED_ID"):
        why = error_of(version, "SEND", QUEUE, f"{name}:1", *others)
        assert f"unknown header {name!r} of SEND" in why
        assert all(f"AMQ_SCHEDULED_{known}" in why for known in ("CRON", "DELAY", "PERIOD", "REPEAT", "TIME"))
    for name in ("x-AMQ_SCHEDULED_DELEY", "AMQ_SCHEDULER_ACTION"):
        assert receive_one(Send, version, "SEND", QUEUE, f"{name}:1", *others).schedule is None


def test_the_hundredth_send_with_a_misspelt_header_of_a_schedule_is_refused_as_the_first() -> None:
    server = connected()
    right = text("SEND", QUEUE, "x:1", "AMQ_SCHEDULEX:1", "content-length:1", body=b"x")
    assert all(isinstance(send, Send) for _ in range(100) for send in server.receive(right))
    with pytest.raises(RemoteProtocolError, match="AMQ_SCHEDULED_X"):
        list(server.receive(right.replace(b"AMQ_SCHEDULEX", b"AMQ_SCHEDULED_X")))


def test_the_hundredth_send_with_a_time_to_live_is_read_as_the_first() -> None:
    server = connected()
    frame = text("SEND", QUEUE, "truenext-ttl:500", "content-length:1", body=b"x")
    sends = [command for _ in range(100) for command in server.receive(frame * 2)]
    assert len(sends) == 200
    assert all(isinstance(send, Send) and send == sends[0] and send.ttl_ms == 500 for send in sends)


@pytest.mark.parametrize("expires", ["expires:5", "expires:0"])
def test_a_time_to_live_beside_a_time_to_expire_is_refused(expires: str) -> None:
    assert "use one of them" in error_of(Version.V1_2, "SEND", QUEUE, "truenext-ttl:5", expires)


@pytest.mark.parametrize("ttl", ["0", "", "-1", "1.5", "soon", str(TTL_MS_MAX + 1)])
def test_invalid_time_to_live_is_refused_by_name(ttl: str) -> None:
    assert "truenext-ttl" in error_of(Version.V1_2, "SEND", QUEUE, f"truenext-ttl:{ttl}")


def test_other_frames_have_no_time_to_live() -> None:
    why = error_of(Version.V1_2, "SUBSCRIBE", QUEUE, "id:1", "truenext-ttl:5")
    assert why == "unknown header 'truenext-ttl' of SUBSCRIBE: this header is for SEND; leave it out"


def test_receipt_request_refers_to_its_own_numbered_frame_only() -> None:
    server = connected()
    numbered = ["truenext-producer:p", "truenext-number:7", "receipt:r"]
    for command, lines in (("SEND", [QUEUE]), ("COMMIT", ["transaction:t"])):
        about, confirm = receive(server, command, *lines, *numbered)
        assert isinstance(confirm, ReceiptRequest) and confirm.numbered_command is about
        (_, confirm) = receive(server, command, *lines, "receipt:r")
        assert isinstance(confirm, ReceiptRequest) and confirm.numbered_command is None
    for command, lines in (("BEGIN", ["transaction:t"]), ("ABORT", ["transaction:t"]), ("SUBSCRIBE", [QUEUE, "id:1"])):
        (_, confirm) = receive(server, command, *lines, "receipt:r")
        assert isinstance(confirm, ReceiptRequest) and confirm.numbered_command is None


def test_receipt_can_be_sent_after_the_disconnect_that_requests_it() -> None:
    server = connected()
    assert receive(server, "DISCONNECT", "receipt:bye") == [Disconnect(), ReceiptRequest("bye")]
    assert server.replies.encode_receipt(Receipt("bye")) == b"RECEIPT\nreceipt-id:bye\n\n\0\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fault_says_why_and_names_the_receipt(version: Version) -> None:
    server = connected(version)
    (frame,) = decode(version, server.replies.encode_fault(ErrorAnswer("short", Code.IN_USE, "at length", "r")))
    assert frame.command == "ERROR"
    assert frame.headers == {
        "message": "short",
        "truenext-code": "in-use",
        "content-type": "text/plain",
        "receipt-id": "r",
        "content-length": "9",
    }
    assert frame.body == b"at length"
    (frame,) = decode(version, server.replies.encode_fault(ErrorAnswer("short", Code.IN_USE)))
    assert "receipt-id" not in frame.headers and frame.body == b"short"


def test_a_refused_login_is_told_the_versions() -> None:
    """1.2, "Protocol Negotiation"."""
    fault = ErrorAnswer("Supported protocol versions are 1.0 1.1 1.2", Code.LOGIN)
    (frame,) = decode(None, connecting().replies.encode_fault(fault))
    assert frame.headers["truenext-code"] == "login"
    assert frame.headers["version"] == "1.0,1.1,1.2"
    (frame,) = decode(Version.V1_2, connected().replies.encode_fault(ErrorAnswer("x", Code.IN_USE)))
    assert "version" not in frame.headers


PRODUCER_TEXTS = st.text(st.sampled_from("\\\r\n: crn=\u00e9\u2028"), max_size=8) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8
)


@pytest.mark.parametrize("version", [Version.V1_0, Version.V1_1, Version.V1_2])
@given(summary=PRODUCER_TEXTS, detail=PRODUCER_TEXTS, receipt=PRODUCER_TEXTS)
@example(summary="\\r", detail="", receipt="")
@example(summary="a\r\n\r\nb", detail="\0", receipt="\n\n")
def test_fault_with_any_text_is_one_frame(version: Version, summary: str, detail: str, receipt: str) -> None:
    (frame,) = decode(
        version, connected(version).replies.encode_fault(ErrorAnswer(summary, Code.HEADER, detail, receipt))
    )
    assert frame.body == (detail or summary).encode()
    if version is not Version.V1_0:
        assert (frame.headers["message"], frame.headers["receipt-id"]) == (summary, receipt)


# ---- MESSAGE ----


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_of_the_broker_end_with_a_line_feed_of_their_own(version: Version) -> None:
    """Part of the frame: what counts the frames that a socket has taken counts it with the frame before."""
    server = connected(version)
    receive(server, "SUBSCRIBE", QUEUE, "id:s")
    parts: list[bytes] = []
    server.replies.encode_deliveries("s", [Delivered(SentMessage(4, False, 0, b"content-length:1\n", b"x"))] * 2, parts)
    messages = [b"".join(parts[at : at + PARTS_PER_MESSAGE]) for at in (0, PARTS_PER_MESSAGE)]
    end_of_browse = server.replies.encode_end_of_browse("s", parse_address("/queue/a", "me"))
    answers = [
        server.replies.encode_receipt(Receipt("r")),
        server.replies.encode_fault(ErrorAnswer("short", Code.IN_USE)),
        end_of_browse,
    ]
    for frame in [*messages, *answers, answer_of(server)]:
        assert frame.endswith(b"\0\n") and frame.count(b"\0") == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_message_in_openwire_form_is_encoded_with_its_header_lines(version: Version) -> None:
    producer = ProducerId("ID:host-1:1", 1, 1)
    produced = TextMessage(
        producer_id=producer,
        destination=QueueName("a"),
        message_id=MessageId(None, producer, 1),
        correlation_id="c d",
        content=b"\0\0\0\3a\xc0\x80",
    )
    message = produced_message(produced).message
    message.header = b"truenext-due:5\n"
    plain = SentMessage(4, True, 0, b"content-length:1\n", b"x")
    deliveries = [Delivered(one, sequence) for sequence, one in enumerate([plain, message, plain], 1)]
    first, found, last = message_frame(version, deliveries)
    assert first.body == last.body == b"x"
    assert found.body == b"a\0"
    wanted = {"truenext-due": "5", "destination": "/queue/a", "correlation-id": "c d", "content-length": "2"}
    assert wanted.items() <= found.headers.items()


def test_send_without_content_length_is_a_text() -> None:
    server = connected()
    sends = [*receive(server, "SEND", QUEUE, body=b"x"), *receive(server, "SEND", QUEUE, "content-length:1", body=b"x")]
    assert [send.message.is_text for send in sends if isinstance(send, Send)] == [True, False]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", ["auto", "client", "client-individual"])
def test_message_frame_has_all_delivery_headers(version: Version, mode: str) -> None:
    message = SentMessage(7, True, 0, b"destination:/queue/a\ncolour:red\ncontent-length:3\n", b"a\0b", arrived_ms=1234)
    deliveries = [Delivered(message, 12345), Delivered(message, 12346, deliveries=3, attempts=2)]
    first, second = message_frame(version, deliveries, f"ack:{mode}")
    expected = {
        "subscription": "s",
        "message-id": "truenext-b1-12345",
        "truenext-sequence": "12345",
        "truenext-deliveries": "1",
        "truenext-attempts": "0",
        "timestamp": "1234",
        "destination": "/queue/a",
        "colour": "red",
        "content-length": "3",
    }
    if version is Version.V1_2 and mode != "auto":
        # 1.2, "MESSAGE": required if and only if the subscription acknowledges.
        expected["ack"] = "12345@s"
        assert second.headers["ack"] == "12346@s"
    assert first.command == second.command == "MESSAGE"
    assert first.headers == expected
    assert first.body == second.body == b"a\0b"
    assert second.headers["redelivered"] == "true"
    assert second.headers["message-id"] == "truenext-b1-12346"
    assert (second.headers["truenext-deliveries"], second.headers["truenext-attempts"]) == ("3", "2")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("lines", [[], ["content-length:0"], ["a:b", "redelivered:true"]])
def test_group_of_a_send_is_read_and_delivered_to_the_consumer(version: Version, lines: list[str]) -> None:
    send = receive_one(Send, version, "SEND", QUEUE, "JMSXGroupID:order 7", "JMSXGroupSeq:-1", *lines)
    assert send.message.group == group_of(send.message.header) == "order 7"
    assert closes_group(send.message.header)
    (frame,) = message_frame(version, [Delivered(send.message, is_first_of_group=True)])
    assert (frame.headers["JMSXGroupID"], frame.headers["JMSXGroupFirstForConsumer"]) == ("order 7", "true")
    (frame,) = message_frame(version, [Delivered(send.message)])
    assert "JMSXGroupFirstForConsumer" not in frame.headers


def test_a_group_with_colons_is_the_same_in_memory_and_in_the_store() -> None:
    send = receive_one(Send, Version.V1_2, "SEND", QUEUE, "JMSXGroupID:a\\cb")
    assert send.message.group == group_of(send.message.header) == "a:b"


def test_a_group_with_a_name_that_is_too_long_is_refused() -> None:
    assert "JMSXGroupID of 256 characters" in error_of(Version.V1_2, "SEND", QUEUE, f"JMSXGroupID:{'g' * 256}")


def test_a_send_without_a_group_or_with_an_empty_one_has_none() -> None:
    for lines in ([], ["JMSXGroupID:"]):
        assert receive_one(Send, Version.V1_2, "SEND", QUEUE, *lines).message.group == ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("count", "redelivered"), [(1, None), (2, "true"), (3, "true"), (2**40, "true")])
def test_deliveries_after_the_first_are_redeliveries(version: Version, count: int, redelivered: str | None) -> None:
    message = SentMessage(4, False, 0, b"content-length:0\n", b"")
    (frame,) = message_frame(version, [Delivered(message, deliveries=count)])
    assert frame.headers.get("redelivered") == redelivered
    assert frame.headers["truenext-deliveries"] == str(count)
    (frame,) = message_frame(version, [Delivered(message, deliveries=count, was_never_started=True)])
    assert "redelivered" not in frame.headers and frame.headers["truenext-deliveries"] == str(count)


@pytest.mark.parametrize("version", [Version.V1_0, Version.V1_1, Version.V1_2])
@pytest.mark.parametrize("mode", ["auto", "client"])
@given(subscription=PRODUCER_TEXTS)
@example(subscription="\\r")
@example(subscription="a\n\nb@:")
def test_messages_of_a_subscription_with_any_name_are_whole(version: Version, mode: str, subscription: str) -> None:
    if version is not Version.V1_2:
        subscription = subscription.replace("\r", "")
    written = escape(subscription)
    if version is Version.V1_0:
        written = subscription = subscription.replace("\n", "").strip()
    server = connected(version)
    receive(server, "SUBSCRIBE", QUEUE, f"id:{written}", f"ack:{mode}")
    parts: list[bytes] = []
    server.replies.encode_deliveries(
        subscription, [Delivered(SentMessage(4, False, 0, b"content-length:1\n", b"x"))] * 2, parts
    )
    frames = decode(version, b"".join(parts))
    assert [(frame.headers["subscription"], frame.body) for frame in frames] == [(subscription, b"x")] * 2


BROKER_HEADERS = {*HOP_HEADERS, "destination", "content-length", "priority"}
SCHEDULE_HEADERS = [f"AMQ_SCHEDULED_{name}" for name in ("DELAY", "PERIOD", "REPEAT", "CRON", "ZONE", "TIME")]
MEANT_FOR_THE_BROKER = {"", "reply-to", "priority", "persistent", "expires", *HOP_HEADERS[:6], *SCHEDULE_HEADERS}
USER_NAMES = PRODUCER_TEXTS.filter(
    lambda name: name not in MEANT_FOR_THE_BROKER and not name.startswith("AMQ_SCHEDULED_")
)
USER_HEADERS = st.dictionaries(USER_NAMES | st.sampled_from(HOP_HEADERS[6:]), PRODUCER_TEXTS, max_size=5)
BODIES = st.sampled_from([b"", b"x", b"\0", b"\n\n", b"\0MESSAGE\n\n\0"])


def sent_by_1_2(headers: dict[str, str], body: bytes) -> SentMessage:
    header = encode_header_lines({**headers, "destination": "/queue/a", "content-length": str(len(body))})
    (send,) = connected().receive(b"SEND\n" + header + b"\n" + body + b"\0")
    assert isinstance(send, Send)
    return send.message


@pytest.mark.parametrize("version", [Version.V1_1, Version.V1_2])
@given(headers=USER_HEADERS, body=BODIES)
@example(headers={"path": "C:\\reports"}, body=b"x")
@example(headers={"a\r\n\r\n:b": "\r\n\r\n\\c"}, body=b"\0")
def test_messages_of_a_1_2_producer_reach_1_1_and_1_2_consumers_unchanged(
    version: Version, headers: dict[str, str], body: bytes
) -> None:
    deliveries = [Delivered(sent_by_1_2(headers, body))] * 2
    frames = message_frame(version, deliveries)
    assert len(frames) == 2
    user_headers = {name: value for name, value in headers.items() if name not in BROKER_HEADERS}
    for frame in frames:
        assert frame.body == body
        assert {name: value for name, value in frame.headers.items() if name not in BROKER_HEADERS} == user_headers
        assert frame.headers["message-id"] == "truenext-b1-7"
        assert "redelivered" not in frame.headers and "ack" not in frame.headers


def as_1_0(text: str) -> str:
    """Return a name or value as 1.0 delivers it (frame.header_line), without the padding, which clients trim
    differently."""
    return text.replace("\r", "\\r").replace("\n", "\\n").strip()


@given(headers=USER_HEADERS, body=BODIES)
@example(headers={"a": "x\r\n\r\n\0"[:-1], "b\n\nc": "\\n"}, body=b"\0")
@example(headers={"browser": "", "JMSXGroupID": "", "JMSXGroupSeq": "x"}, body=b"")
def test_messages_of_a_1_2_producer_reach_1_0_consumers_as_whole_frames(headers: dict[str, str], body: bytes) -> None:
    # Names that 1.0 cannot tell are below.
    headers = {name: value for name, value in headers.items() if ":" not in name and name == name.strip()}
    expected: dict[str, str] = {}
    for name, value in headers.items():
        expected.setdefault(as_1_0(name), as_1_0(value))
    frames = message_frame(Version.V1_0, [Delivered(sent_by_1_2(headers, body))] * 2)
    assert len(frames) == 2
    for frame in frames:
        assert frame.body == body
        assert frame.headers["message-id"] == "truenext-b1-7"
        assert "redelivered" not in frame.headers
        assert {name: value.strip() for name, value in frame.headers.items() if name not in BROKER_HEADERS} == {
            name: value for name, value in expected.items() if name not in BROKER_HEADERS
        }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-length ", "0"),
        (" content-length", "0"),
        ("content-length:0", "0"),
        ("redelivered ", "true"),
        (" priority", "9"),
        (" truenext-original-destination", "/queue/x"),
        ("truenext-original-destination\t", "/queue/x"),
        ("priority:9", ""),
        ("redelivered:true", ""),
        (" ", "x"),
        (":", "x"),
    ],
)
def test_no_name_of_a_1_2_producer_poses_as_one_of_the_broker_in_1_0(name: str, value: str) -> None:
    smuggled = b"\0MESSAGE\nmessage-id:truenext-b1-1\n\nsmuggled\0"
    message = sent_by_1_2({name: value}, smuggled)
    (frame,) = message_frame(Version.V1_0, [Delivered(message)])
    assert frame.body == smuggled
    assert frame.headers["priority"] == "4"
    assert not {name.strip() for name in frame.headers} & {"redelivered", "truenext-original-destination"}


@pytest.mark.parametrize("version", VERSIONS)
def test_dead_letter_headers_reach_consumers_of_every_version(version: Version) -> None:
    header = encode_header_lines({"truenext-original-destination": "/queue/a", "content-length": "0"})
    (frame,) = message_frame(version, [Delivered(SentMessage(4, True, 0, header, b""))])
    assert frame.headers["truenext-original-destination"] == "/queue/a"


@pytest.mark.parametrize("producer", VERSIONS)
@pytest.mark.parametrize("consumer", VERSIONS)
@pytest.mark.parametrize("value", ["a:b", "red", "\u20ac \U0001f600", "http://[::1]:80/", "\\"])
def test_a_value_crosses_the_versions(producer: Version, consumer: Version, value: str) -> None:
    line = f"x:{value if producer is Version.V1_0 else escape(value)}"
    send = receive_one(Send, producer, "SEND", QUEUE, line)
    (frame,) = message_frame(consumer, [Delivered(send.message)])
    assert frame.headers["x"] == value


def test_a_carriage_return_of_a_1_1_producer_crosses_the_versions() -> None:
    message = receive_one(Send, Version.V1_1, "SEND", QUEUE, "x:a\rb").message
    for version, value in zip(VERSIONS, ["a\\rb", "a\rb", "a\rb"], strict=True):
        (frame,) = message_frame(version, [Delivered(message)])
        assert frame.headers["x"] == value


@pytest.mark.parametrize("version", VERSIONS)
def test_a_subscription_says_how_it_stands_among_others(version: Version) -> None:
    plain = receive_one(Subscribe, version, "SUBSCRIBE", QUEUE, "id:s")
    assert (plain.priority, plain.is_exclusive, plain.has_express, plain.window) == (0, False, False, None)
    lines = ["activemq.priority:-7", "activemq.exclusive:true", "truenext-express:true", "ack:client-individual"]
    special = receive_one(Subscribe, version, "SUBSCRIBE", QUEUE, "id:s", *lines)
    assert (special.priority, special.is_exclusive, special.has_express) == (-7, True, True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("activemq.priority:128", "activemq.priority '128' is not a number from -127 to 127"),
        ("activemq.priority:high", "activemq.priority 'high' is not a number from -127 to 127"),
        ("activemq.priority:", "activemq.priority '' is not a number from -127 to 127"),
        ("activemq.exclusive:yes", "activemq.exclusive 'yes' is not true or false"),
        ("truenext-express:1", "truenext-express '1' is not true or false"),
        ("truenext-express:true", "truenext-express is for ack:client-individual"),
    ],
)
def test_subscribe_with_an_invalid_option_is_refused(version: Version, line: str, reason: str) -> None:
    assert reason in error_of(version, "SUBSCRIBE", QUEUE, "id:s", "ack:client", line)
