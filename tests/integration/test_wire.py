"""Tests that the broker stays intact whatever a client sends or omits, over real sockets.

Refusals, agreements (versions, heart-beats, receipts, temporary queues, numbered sends), and how the `truenext` command
starts, ends and talks to a broker. Source of what is expected: docs/contract.md, decision 38 and
src/truenext/model/limits.py.

    TRUENEXT_SEED=7 pytest -s tests/integration/test_wire.py -k garbage
"""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration import held_disk
from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import completed
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies, numbered
from truenext import blocking, connect
from truenext.cli.exit_status import START_HINT
from truenext.errors import ConnectionLost
from truenext.model.limits import (
    BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    LOGIN_BYTES_MAX,
    LOGIN_SECONDS_MAX,
    UNSENT_ANSWER_BYTES_MAX,
)
from truenext.wire.stomp.frame import BROKER_FRAME_END, Frame, Version, encode

SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

VERSIONS = pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
AMID_TRAFFIC = pytest.mark.usefixtures("traffic")
"""Messages of another client go on before, during and after the test, and none is lost."""


# ---- What goes on beside ----


@contextmanager
def traffic_on(broker: BrokerProcess, queue: str) -> Iterator[None]:
    """Let other clients send, receive and hold messages during the block; they must not be disturbed."""
    sender, receiver, holder = broker.connect(), broker.connect(), broker.connect()
    held_queue = f"{queue}.held"
    for number in range(4):
        sender.send(held_queue, b"%d" % number, persistent=number % 2 == 0, confirmed=True)
    holder.subscribe(held_queue, prefetch=2)
    held = holder.messages(2)
    receiver.subscribe(queue)
    rounds = 0
    is_over = False
    failures: list[BaseException] = []

    def exchange() -> None:
        nonlocal rounds
        try:
            while not is_over:
                sender.send(queue, b"%d" % rounds, persistent=rounds % 2 == 0, confirmed=True)
                message = receiver.message()
                assert message.body == b"%d" % rounds
                receiver.ack(message, confirmed=True)
                rounds += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=exchange, name="traffic")
    thread.start()
    try:
        yield
        # One round may have begun before.
        enough = rounds + 2
        deadline = time.monotonic() + PATIENCE_SECONDS
        while rounds < enough and not failures:
            assert time.monotonic() < deadline, "the traffic of others has stopped"
            time.sleep(0.002)
    finally:
        is_over = True
        thread.join()
    assert not failures, f"the traffic of others was disturbed: {failures[0]!r}"
    assert receiver.arrived() == []
    for message in held:
        holder.ack(message)
    rest = holder.messages(2)
    assert bodies(held + rest) == ["0", "1", "2", "3"]
    assert {message.headers["truenext-deliveries"] for message in held + rest} == {"1"}
    for message in rest:
        holder.ack(message, confirmed=True)
    for client in (sender, receiver, holder):
        client.disconnect()


@pytest.fixture
def traffic(broker: BrokerProcess, new_queue: Callable[[], str]) -> Iterator[None]:
    with traffic_on(broker, new_queue()):
        yield


def expect_error(client: RawClient, fault: str) -> Frame:
    """Check that the connection ends with an ERROR whose `message` header contains `fault`, and whose body contains
    that header."""
    error = client.error()
    summary = error.headers["message"]
    assert fault in summary
    # Before a version is agreed nobody knows whether a backslash is an escape: there are none then.
    assert summary.replace("\\", "/") in error.body.decode().replace("\\", "/")
    return error


def connect_frame(version: str = "1.2", **headers: str) -> bytes:
    fields = {"accept-version": version, "host": "test"} | {name.replace("_", "-"): headers[name] for name in headers}
    return encode(Frame("CONNECT", fields), Version.V1_0)


def by_fault(value: object) -> str:
    """Name a case by its fault, not by its bytes."""
    return value if isinstance(value, str) else ""


# ---- Faults: what is not STOMP, or not its turn ----


@AMID_TRAFFIC
@pytest.mark.parametrize("length", ["-1", "-0", "+1", "abc", "0x1", "1e3", "1 ", "", "1,5", "\u0663", "9" * 4000])
def test_a_content_length_that_can_be_no_number_of_bytes_is_refused(
    broker: BrokerProcess, queue: str, length: str
) -> None:
    client = broker.connect()
    client.write(f"SEND\ndestination:/queue/{queue}\ncontent-length:{length}\n\nx\0".encode())
    reason = f"is more than {BODY_BYTES_MAX} bytes" if length.startswith("9") else "is not a number of bytes"
    expect_error(client, f"content-length {length[:100]!r} {reason}")
    assert broker.remaining_messages(queue) == []


@AMID_TRAFFIC
@pytest.mark.parametrize("length", [BODY_BYTES_MAX + 1, 2**32, 9_999_999_999])
def test_a_content_length_beyond_the_limit_is_refused_before_the_body_comes(
    broker: BrokerProcess, queue: str, length: int
) -> None:
    client = broker.connect()
    client.write(f"SEND\ndestination:/queue/{queue}\ncontent-length:{length}\n\n".encode())
    expect_error(client, f"content-length '{length}' is more than {BODY_BYTES_MAX} bytes")


@AMID_TRAFFIC
@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        (b"HELLO\n\n\0", "unknown command 'HELLO'"),
        (b"send\ndestination:/queue/q\n\n\0", "unknown command 'send'; is SEND meant?"),
        (b"send\ndestination:/queue/q\n\nbody\0", "unknown command 'send'; is SEND meant?"),
        (b"MESSAGE\ndestination:/queue/q\n\n\0", "unknown command 'MESSAGE'"),
        (connect_frame(), "CONNECT is not allowed while connected"),
        (connect_frame().replace(b"CONNECT", b"STOMP"), "STOMP is not allowed while connected"),
        (b"SEND\ndestination:/queue/q\ncontent-length:1\n\nxyz\0", "no NUL after the 1 bytes of the body"),
        (b"SEND\ndestination:/queue/q\n" + b"x:y\n" * HEADERS_MAX + b"\n\0", f"more than {HEADERS_MAX} headers"),
        (b"SEND\n" + b"".join(b"x%d:y\n" % number for number in range(3 * HEADERS_MAX)), "headers in one frame"),
        (b"SEND\ndestination:" + b"x" * HEADER_BYTES_MAX, f"more than {HEADER_BYTES_MAX} bytes of headers"),
        (b"x" * (HEADER_BYTES_MAX + 1), f"more than {HEADER_BYTES_MAX} bytes of headers"),
        (b"SEND\nnote:" + b"x" * 70_000 + b"\n\nbody\0", f"more than {HEADER_BYTES_MAX} bytes of headers"),
        (b"SEND\ndestination:/queue/q\rpersistent:true\n\n\0", "carriage return inside a header"),
        (b"SEND\ndestination:/queue/q\nno\rte:x\n\n\0", "carriage return inside a header"),
        (b"SEND\ndestination:/queue/q\nnote:x\0\n\n\0", "NUL inside a frame's header"),
        (b"SEND\ndestination:/queue/q\0\n\n\0", "NUL inside a frame's header"),
        (b"SEND\0\ndestination:/queue/q\n\n\0", "NUL inside a frame's header"),
        (b"SEND\ndestination:/queue/q\nnote:\\t\n\n\0", "undefined escape '\\\\t'"),
        (b"SEND\ndestination:/queue/q\nnote:\xff\n\n\0", "header is not UTF-8"),
        (b"SEND\ndestination:/queue/q\nnonsense\n\n\0", "header line 'nonsense' is not name:value"),
        (b"SEND\ndestination:/queue/q\n:x\n\n\0", "header line ':x' is not name:value"),
        (b"BEGIN\ntransaction:t\n\nbody\0", "BEGIN must have no body"),
        (b"SEND\n\nx\0", "SEND without a destination"),
        (b"SEND\ndestination:/queue/a\\nb\n\nx\0", "has characters that cannot be printed"),
        (b"SEND\ndestination:/queue/" + b"x" * 300 + b"\n\n\0", "destination name of 300 characters; at most 2"),
        (b"SEND\ndestination:/queue/q\npriority:high\n\n\0", "priority 'high' is not a number"),
        (b"SEND\ndestination:/queue/q\npersistent:yes\n\n\0", "persistent 'yes' is not true or false"),
        (b"SEND\ndestination:/queue/q\nexpires:-2\n\n\0", "expires '-2' is not a number"),
        (b"SEND\ndestination:/queue/q\nexpires:" + b"1" * 20 + b"\n\n\0", f"is more than {'9' * 19}"),
        (b"SUBSCRIBE\ndestination:/queue/q\n\n\0", "SUBSCRIBE without an id"),
        (b"SUBSCRIBE\nid:1\ndestination:/queue/q\nack:never\n\n\0", "ack mode 'never' is not auto, client or"),
        (b"UNSUBSCRIBE\nid:7\n\n\0", "there is no subscription '7' on this connection"),
        (b"ACK\n\n\0", "ACK without the header 'id'"),
        (b"ACK\nid:\n\n\0", "ACK has the invalid id '': copy the ack header of the MESSAGE"),
        (b"COMMIT\n\n\0", "COMMIT without the header 'transaction'"),
    ],
    ids=by_fault,
)
def test_a_fault_ends_the_connection_with_an_error_that_names_it_behind_the_receipts_that_are_due(
    broker: BrokerProcess, queue: str, frame: bytes, fault: str
) -> None:
    client = broker.connect()
    sent_data = {"destination": f"/queue/{queue}", "persistent": "true", "receipt": "due"}
    before = encode(Frame("SEND", sent_data, b"stands"), Version.V1_2)
    after = encode(Frame("SEND", sent_data, b"does not"), Version.V1_2) if frame.endswith(b"\0") else b""
    client.write(before + frame + after)
    client.await_receipt("due")
    assert "receipt-id" not in expect_error(client, fault).headers
    assert bodies(broker.remaining_messages(queue)) == ["stands"]


@AMID_TRAFFIC
def test_a_refused_client_loses_what_it_held_at_once_and_is_not_listened_to_any_more(
    broker: BrokerProcess, queue: str
) -> None:
    sender, client, other = broker.connect(), broker.connect(), broker.connect()
    sender.send(queue, b"held", persistent=True, confirmed=True)
    client.subscribe(queue)
    client.message()
    client.send_frame("HELLO", {})
    assert client.next_frame().command == "ERROR"
    # It does not hang up.
    client.send(queue, b"thrown away")
    other.subscribe(queue)
    message = other.message()
    assert (message.body, message.headers["truenext-attempts"]) == (b"held", "1")
    assert other.arrived() == []
    client.await_end()


@AMID_TRAFFIC
def test_a_body_without_an_end_is_refused(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.write(f"SEND\ndestination:/queue/{queue}\n\n".encode())
    piece = b"x" * 1024 * 1024
    for _ in range(BODY_BYTES_MAX // len(piece) + 1):
        client.write(piece)
    expect_error(client, "without an end")
    assert broker.remaining_messages(queue) == []


@AMID_TRAFFIC
@pytest.mark.parametrize(
    ("sent_data", "fault"),
    [
        (b"SEND\ndestination:/queue/q\n\nx\0", "SEND is not allowed while connecting"),
        (b"DISCONNECT\n\n\0", "DISCONNECT is not allowed while connecting"),
        (b"HELLO\n\n\0", "unknown command before CONNECT is complete"),
        (b"CONNECTED\nversion:1.2\n\n\0", "unknown command before CONNECT is complete"),
        (b"x" * (LOGIN_BYTES_MAX + 1), f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete"),
        (b"CONNECT\nlogin:" + b"x" * LOGIN_BYTES_MAX, f"more than {LOGIN_BYTES_MAX} bytes before CONNECT"),
        (connect_frame(login="x" * LOGIN_BYTES_MAX), f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete"),
        (connect_frame(content_length="8200"), "CONNECT must have no body"),
        (b"SEND\ncontent-length:99999\n\n", f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete"),
        (connect_frame(receipt="1"), "CONNECT cannot ask for a receipt"),
        (connect_frame(heart_beat="soon"), "heart-beat is not two numbers of milliseconds"),
        (connect_frame(heart_beat="-1,0"), "heart-beat is not two numbers of milliseconds"),
        (connect_frame(heart_beat="9999999999,0"), "heart-beat of more than 999999999 milliseconds"),
    ],
    ids=by_fault,
)
def test_a_fault_before_connect_is_refused_with_the_supported_versions(
    broker: BrokerProcess, sent_data: bytes, fault: str
) -> None:
    client = broker.connect(sends_connect=False)
    client.write(sent_data)
    assert expect_error(client, fault).headers["version"] == "1.0,1.1,1.2"


def test_clients_of_other_protocols_are_refused_and_logged_once_each(own_broker: BrokerProcess) -> None:
    for _ in range(2):
        web = http.client.HTTPConnection("127.0.0.1", own_broker.port, timeout=PATIENCE_SECONDS)
        web.request("GET", "/")
        answer = web.getresponse()
        assert answer.status == 400
        assert "the client speaks HTTP, and this port speaks STOMP" in answer.read().decode()
        web.close()
        with (
            socket.create_connection(("127.0.0.1", own_broker.port), timeout=PATIENCE_SECONDS) as sock,
            pytest.raises(ssl.SSLError, match=r"(?i)alert.protocol.version"),
        ):
            ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
        for sent_data in (b"AMQP\x00\x01\x00\x00", b"\x10\x0f\x00\x04MQTT\x04", b"\x00\x00\x00\xf0\x01ActiveMQ"):
            other = own_broker.connect(sends_connect=False)
            for byte in sent_data:
                other.write(bytes([byte]))
            assert other.read() == b""
    lines = [line for line in own_broker.log.splitlines() if "it speaks another protocol" in line]
    assert [re.findall("protocol='(.*?)'", line) for line in lines] == [
        *(["HTTP"], ["TLS"], ["AMQP"], ["MQTT"], ["OpenWire"])
    ]
    assert all(" WARNING client refused: " in line and "client='127.0.0.1:" in line for line in lines)
    assert "for OpenWire, add openwire://HOST:PORT, with TLS openwire+ssl://HOST:PORT, to the addresses" in lines[-1]
    own_broker.connect().send("q", b"", confirmed=True)


SECRET = "hidden-7351"


@AMID_TRAFFIC
@pytest.mark.parametrize(
    "sent_data",
    [
        f"CONNECT\naccept-version:1.2\nlogin:me\npasscode {SECRET}\n\n\0".encode(),
        connect_frame(login="me", passcode=SECRET, heart_beat=SECRET),
        connect_frame(login="me", passcode=SECRET, content_length=SECRET),
        connect_frame(login="me", passcode=SECRET, receipt=SECRET),
        connect_frame(f"3.{SECRET}", login="me", passcode=SECRET),
        connect_frame(login="me", passcode=SECRET).replace(b"CONNECT", SECRET.encode()),
        connect_frame(login="me", passcode=SECRET).replace(b"\0", SECRET.encode() + b"\0"),
        connect_frame(login="me", passcode=SECRET).replace(b"host", b"\xff"),
        f"SEND\ndestination:/queue/q\nreceipt:{SECRET}\npasscode:{SECRET}\n\n\0".encode(),
    ],
)
def test_values_of_a_faulty_login_are_neither_in_the_error_nor_in_the_log(
    broker: BrokerProcess, sent_data: bytes
) -> None:
    client = broker.connect(sends_connect=False)
    client.write(sent_data)
    error = client.error()
    assert error.headers.keys() == {"message", "truenext-code", "content-type", "version", "content-length"}
    assert SECRET not in str(error) and "0xff" not in str(error)
    assert error.body.decode() in broker.log
    assert SECRET not in broker.log


@AMID_TRAFFIC
def test_more_bytes_than_a_login_needs_are_refused_however_they_are_cut(broker: BrokerProcess) -> None:
    client = broker.connect(sends_connect=False)
    client.write(b"CONNECT\n")
    with contextlib.suppress(OSError):
        for _ in range(LOGIN_BYTES_MAX // 512 + 1):
            client.write(b"x" * 512)
            time.sleep(0.001)
    expect_error(client, f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")


@AMID_TRAFFIC
def test_stranger_that_sends_only_line_ends_is_refused(broker: BrokerProcess) -> None:
    client = broker.connect(sends_connect=False)
    with contextlib.suppress(OSError):
        for _ in range(LOGIN_BYTES_MAX // 512 + 1):
            client.write(b"\n" * 512)
            time.sleep(0.001)
    expect_error(client, f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")


@AMID_TRAFFIC
def test_without_a_connect_in_five_seconds_a_connection_ends_whatever_trickles_in(broker: BrokerProcess) -> None:
    started = time.monotonic()
    silent, beating, slow, kept = (broker.connect(sends_connect=False) for _ in range(4))
    slow.write(b"CONNECT\naccept-version:1.2\n")
    kept.send_connect("1.2", "0,0")
    frames: list[Frame] = []
    while not frames:
        beating.write(b"\n")
        slow.write(b"x:y\n")
        with contextlib.suppress(TimeoutError):
            frames.append(silent.next_frame(0.1))
        assert time.monotonic() - started < LOGIN_SECONDS_MAX + PATIENCE_SECONDS
    assert time.monotonic() - started > LOGIN_SECONDS_MAX - 0.1

    assert frames[0].command == "ERROR"
    assert "no CONNECT within 5 seconds" in frames[0].headers["message"]
    silent.await_end()
    # Nothing they said has put it off.
    for client in (beating, slow):
        error = client.next_frame(LOGIN_SECONDS_MAX / 2)
        assert (error.command, error.headers["message"]) == ("ERROR", "no CONNECT within 5 seconds")
        client.await_end()
    assert kept.arrived() == []


def test_connect_that_came_while_the_broker_was_suspended_is_not_late(own_broker: BrokerProcess) -> None:
    clients = [own_broker.connect(sends_connect=False) for _ in range(3)]
    # All of them are accepted once a later one is.
    own_broker.connect().close()
    own_broker.send_signal(signal.SIGSTOP)
    try:
        for client in clients:
            client.write(connect_frame())
        time.sleep(LOGIN_SECONDS_MAX + 0.3)
    finally:
        own_broker.send_signal(signal.SIGCONT)
    for client in clients:
        assert client.await_connected().command == "CONNECTED"


@AMID_TRAFFIC
@VERSIONS
@pytest.mark.parametrize("command", ["ACK", "NACK"])
@pytest.mark.parametrize("named", ["nobody's", "another connection's", "one's own in auto mode", "another broker's"])
def test_a_connection_cannot_acknowledge_a_message_that_it_does_not_hold(
    broker: BrokerProcess, new_queue: Callable[[], str], version: str, command: str, named: str
) -> None:
    queue, other_queue = new_queue(), new_queue()
    sender, holder, client = broker.connect(), broker.connect(), broker.connect(version=version)
    sender.send(queue, b"held", persistent=True, confirmed=True)
    holder.subscribe(queue)
    held = holder.message()
    sequence = held.headers["truenext-sequence"]
    is_auto = named == "one's own in auto mode"
    client.subscribe(other_queue, ack="auto" if is_auto else "client-individual")
    identity = held.headers["message-id"]
    if is_auto:
        sender.send(other_queue, b"taken", confirmed=True)
        taken = client.message()
        sequence, identity = taken.headers["truenext-sequence"], taken.headers["message-id"]
    elif named == "nobody's":
        sequence, identity = "4711", identity.removesuffix(sequence) + "4711"
    elif named == "another broker's":
        sequence, identity = "ID:activemq-1", "ID:activemq-1:2:3"

    sent_data = {
        "1.0": {"message-id": identity},
        "1.1": {"message-id": identity, "subscription": "1"},
        "1.2": {"id": f"{sequence}@1"},
    }[version]
    client.send_frame(command, sent_data | {"receipt": "in question"})

    if (version, command) == ("1.0", "NACK"):
        fault = "STOMP 1.0 has no NACK"
    elif named == "another broker's":
        fault = "copy the ack header of the MESSAGE" if version == "1.2" else "which this broker never sent"
    elif is_auto and version != "1.0":
        fault = "subscription '1' has ack:auto: its messages are not acknowledged by the client"
    else:
        fault = f"message {sequence} is not held by this connection's subscription"
    assert expect_error(client, fault).headers["receipt-id"] == "in question"
    holder.ack(held, confirmed=True)
    assert broker.queues()[queue].waiting == 0


# ---- Faults: what is not there yet ----


@AMID_TRAFFIC
@pytest.mark.parametrize(
    ("command", "headers", "feature"),
    [
        ("SUBSCRIBE", {"destination": "/topic/a", "no-local": "true"}, "subscriptions without one's own messages"),
        ("SUBSCRIBE", {"destination": "/topic/a", "activemq.retroactive": "true"}, "retroactive consumers"),
    ],
)
def test_unsupported_features_are_refused_by_name(
    broker: BrokerProcess, command: str, headers: dict[str, str], feature: str
) -> None:
    client = broker.connect()
    client.send_frame(command, headers | {"id": "1", "receipt": "in question"})
    error = expect_error(client, f"{feature} are not supported yet")
    assert error.headers["receipt-id"] == "in question"
    # What it is about is named too.
    assert any(text in error.body.decode() for text in (*list(headers)[1:], headers["destination"]))


@AMID_TRAFFIC
@pytest.mark.parametrize(
    ("command", "headers", "fault"),
    [
        ("SUBSCRIBE", {"destination": "/queue/q", "activemq.prefetchSize": "0"}, "prefetchSize of 0 (pulling) is not"),
        ("SUBSCRIBE", {"destination": "/control/queues"}, "/control/queues is for control requests"),
        ("SEND", {"destination": "/quue/q"}, "unknown destination '/quue/q': it must begin with /queue/"),
        ("SEND", {"destination": "queue/q"}, "unknown destination 'queue/q': here it is '/queue/q'"),
        ("SUBSCRIBE", {"destination": "/dsub/news"}, "here a durable subscription is a SUBSCRIBE to its /topic/NAME"),
        ("SEND", {"destination": "/exchange/news"}, "there are no exchanges here; use /topic/NAME"),
        ("SEND", {"destination": "/queue/"}, "destination '/queue/' has no name"),
        (
            "SEND",
            {"destination": "/control/shutdown", "reply-to": "/temp-queue/q"},
            "there is no control verb 'shutdown'",
        ),
        ("SEND", {"destination": "/control/queues"}, "SEND without the header 'reply-to'"),
        ("SEND", {"destination": "/control/queues", "reply-to": "/topic/news"}, "must be a /temp-queue/"),
        (
            "SEND",
            {"destination": "/queue/q", "truenext-number": "1"},
            "truenext-producer and truenext-number must be set",
        ),
    ],
)
def test_meaningless_headers_are_refused_with_a_hint(
    broker: BrokerProcess, command: str, headers: dict[str, str], fault: str
) -> None:
    client = broker.connect()
    client.send_frame(command, headers | {"id": "1"})
    expect_error(client, fault)


# ---- Smuggling ----


@pytest.mark.parametrize("sender_version", ["1.1", "1.2"])
@pytest.mark.parametrize("reader_version", ["1.0", "1.1", "1.2"])
def test_escapes_of_a_producer_cannot_forge_a_header_or_a_frame(
    broker: BrokerProcess, queue: str, sender_version: str, reader_version: str
) -> None:
    sender, reader = broker.connect(version=sender_version), broker.connect(version=reader_version)
    forged = "x\nredelivered:true\n\n\nMESSAGE\nsubscription:forged\n\n"
    poses = ["subscription", "redelivered", "ack", "message-id", "content-length"]
    headers = (
        {"note": forged, forged: "x"} | {f"{name}:0": "x" for name in poses} | {f" {name} ": "x" for name in poses}
    )
    sender.send(queue, b"body", headers=headers, confirmed=True)
    sender.send(queue, b"next", confirmed=True)
    reader.subscribe(queue, ack="client")
    message, following = reader.messages(2)

    assert bodies([message, following]) == ["body", "next"]
    assert message.headers["subscription"] == "1"
    assert message.headers["content-length"] == "4"
    # Readers of 1.0 may trim names; in later versions the blanks belong to them.
    trimmed = {name.strip(): value for name, value in message.headers.items()}
    if reader_version == "1.0":
        assert not [name for name in poses if trimmed.get(name) == "x"]
    assert "redelivered" not in message.headers
    reader.ack(following, confirmed=True)
    assert broker.remaining_messages(queue) == []


@VERSIONS
def test_values_of_a_client_cannot_forge_a_header_in_the_brokers_answers(
    broker: BrokerProcess, queue: str, version: str
) -> None:
    client = broker.connect(version=version)
    forged = "x:y\nreceipt-id:forged\n\nMESSAGE\n" if version != "1.0" else r"x:y\nreceipt-id:forged"
    client.send_frame("SUBSCRIBE", {"id": forged, "destination": f"/queue/{queue}", "ack": "client", "receipt": forged})
    receipt = client.next_frame()
    assert (receipt.command, receipt.headers) == ("RECEIPT", {"receipt-id": forged})
    client.send(queue, b"body")
    message = client.message()
    assert message.headers["subscription"] == forged
    client.ack(message, confirmed=True)
    client.send_frame("ABORT", {"transaction": forged, "receipt": forged})
    error = expect_error(client, f"transaction {forged!r} is not open")
    assert error.headers.keys() == {"message", "truenext-code", "content-type", "receipt-id", "content-length"}


def test_a_reader_that_believes_the_last_of_repeated_headers_is_not_fooled(broker: BrokerProcess, queue: str) -> None:
    """STOMP 1.0 has no escapes, no rule for repeated headers, and readers that trim."""
    sender, reader = broker.connect(), broker.connect(version="1.0")
    reader.subscribe(queue)
    for name in ("subscription", "redelivered", "ack", "message-id", "content-length", "truenext-sequence"):
        forms = [
            f"{name}:0",
            f" {name}",
            f"{name} ",
            f" {name} :0",
            f"x\n{name}",
            f"x\r{name}",
            f"\r{name}",
            f"\n{name}",
        ]
        sender.send(queue, name.encode(), headers=dict.fromkeys(forms, "forged"), confirmed=True)
        data = b""
        while not data.endswith(b"\n\n%s\0\n" % name.encode()):
            data += reader.read()
        lines = [line.partition(":") for line in data.decode().splitlines()]
        headers = {key.strip(): value for key, _, value in lines}
        assert headers["subscription"] == "1"
        assert headers["content-length"] == str(len(name))
        assert headers["message-id"].endswith(f"-{int(headers['truenext-sequence'])}")
        assert not headers.keys() & {"redelivered", "ack"}


def test_a_destination_may_not_contain_unprintable_characters(broker: BrokerProcess) -> None:
    for character in ("\r", "\n", "\t", "\x7f", "\u2028", "\u200e"):
        client = broker.connect()
        client.send_frame("SEND", {"destination": f"/queue/a{character}b"})
        expect_error(client, "has characters that cannot be printed")


def test_a_client_that_waits_for_a_line_feed_after_each_nul_gets_all_frames(broker: BrokerProcess, queue: str) -> None:
    """PHP's stomp extension reads so."""
    client = broker.connect(sends_connect=False)

    def frame(command: bytes) -> bytes:
        read = b""
        while not read.endswith(b"\0\n"):
            read += client.read()
        assert read.startswith(command + b"\n") and read.count(b"\0") == 1
        return read

    client.write(connect_frame())
    frame(b"CONNECTED")
    client.write(b"SUBSCRIBE\nid:1\ndestination:/queue/%b\nreceipt:s\n\n\0" % queue.encode())
    frame(b"RECEIPT")
    for body in (b"one", b"two"):
        client.write(b"SEND\ndestination:/queue/%b\n\n%b\0" % (queue.encode(), body))
        assert frame(b"MESSAGE").endswith(b"\n\n%b\0\n" % body)
    client.write(b"nonsense\n\n\0")
    frame(b"ERROR")


def test_line_feeds_and_nuls_between_frames_of_real_clients_are_accepted(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect(sends_connect=False)
    client.write(b"\n\0\r\nCONNECT\naccept-version:1.2\nhost:h\n\n\n\0\0")
    client.await_connected()
    where = queue.encode()
    client.write(b"\0\nSUBSCRIBE\nid:1\nack:client-individual\ndestination:/queue/%b\nreceipt:1\n\n\n\n\0" % where)
    client.write(b"BEGIN\r\ntransaction:t\r\n\r\n\r\n\0\r\n\0\n")
    client.write(b"SEND\ndestination:/queue/%b\ntransaction:t\nexpires:-1\n\nbody\0\0" % where)
    client.write(b"COMMIT\ntransaction:t\nreceipt:2\n\n\n\0")
    client.await_receipt("1")
    client.await_receipt("2")
    message = client.message()
    assert (message.body, message.headers["priority"], message.headers["expires"]) == (b"body", "4", "-1")
    client.write(b"ACK\nid:%b\nreceipt:3\n\n\n\0" % message.headers["ack"].encode())
    client.await_receipt("3")
    client.write(b"DISCONNECT\nreceipt:4\n\n\n\0")
    client.await_receipt("4")
    client.await_end()


@pytest.mark.parametrize(("sent_data", "counted"), [(None, "4"), (0, "0"), (12, "9"), (-1, "0")])
@VERSIONS
def test_messages_carry_the_priority_that_counts(
    broker: BrokerProcess, queue: str, version: str, sent_data: int | None, counted: str
) -> None:
    producer, consumer = broker.connect(), broker.connect(version=version)
    producer.send(queue, b"now", priority=sent_data, confirmed=True)
    producer.begin("t")
    producer.send(queue, b"in a transaction", priority=sent_data, transaction="t", persistent=True)
    producer.commit("t")
    producer.send(queue, b"later", priority=sent_data, headers={"AMQ_SCHEDULED_DELAY": "1"}, confirmed=True)
    consumer.subscribe(queue)
    messages = consumer.messages(3)
    assert [message.headers["priority"] for message in messages] == [counted] * 3
    for message in messages:
        consumer.ack(message, confirmed=True)


# ---- Who does not listen, and who makes noise ----


RECEIPT_BYTES = len(encode(Frame("RECEIPT", {"receipt-id": "x" * 250}), Version.V1_2, BROKER_FRAME_END))


def request_receipts(client: RawClient, count: int) -> list[str]:
    """Ask for `count` receipts, an even number, of RECEIPT_BYTES each, and read none.

    Raises OSError if the broker has enough.
    """
    receipts = [f"{number:06}".ljust(250, "x") for number in range(count)]
    for start in range(0, count, 1000):
        frames = [
            Frame(("BEGIN", "ABORT")[number % 2], {"transaction": "t", "receipt": receipt})
            for number, receipt in enumerate(receipts[start : start + 1000])
        ]
        client.write(b"".join(encode(frame, Version.V1_2) for frame in frames))
    return receipts


@AMID_TRAFFIC
def test_a_client_that_asks_for_receipts_endlessly_and_reads_none_is_cut(broker: BrokerProcess, queue: str) -> None:
    greedy, sender = broker.connect(receive_buffer=4096), broker.connect()
    sender.send(queue, b"held", persistent=True, confirmed=True)
    greedy.subscribe(queue)
    greedy.message()
    requested_bytes = 0
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        # What the sockets hold between the two comes on top.
        while requested_bytes < 2 * UNSENT_ANSWER_BYTES_MAX + 32 * 1024 * 1024:
            request_receipts(greedy, 1000)
            requested_bytes += 1000 * RECEIPT_BYTES
    assert requested_bytes > UNSENT_ANSWER_BYTES_MAX

    # What it held is free again.
    (message,) = broker.remaining_messages(queue)
    assert message.headers["truenext-attempts"] == "1"


@AMID_TRAFFIC
def test_a_client_that_reads_its_receipts_late_gets_them_all_in_order(broker: BrokerProcess) -> None:
    lazy = broker.connect(receive_buffer=4096)
    receipts = request_receipts(lazy, UNSENT_ANSWER_BYTES_MAX // RECEIPT_BYTES // 2 * 2)
    for receipt in receipts:
        lazy.await_receipt(receipt)
    lazy.disconnect()


def frames_of_everything(rng: random.Random, queue: str) -> list[bytes]:
    """Return one valid frame of each kind."""
    to, temporary = {"destination": f"/queue/{queue}"}, "/temp-queue/t"
    frames = [
        Frame("SUBSCRIBE", to | {"id": "1", "ack": rng.choice(["auto", "client", "client-individual"])}),
        Frame("SUBSCRIBE", {"destination": temporary, "id": "2"}),
        Frame("SEND", to | {"persistent": "true", "receipt": "1", "reply-to": temporary}, rng.randbytes(50)),
        Frame("SEND", to | {"priority": "9", "expires": "1", "note": "a\\b:c\nd"}, b"\0\n\n"),
        Frame("SEND", to | numbered("fuzz", rng.randrange(10)), b"numbered"),
        Frame("BEGIN", {"transaction": "t"}),
        Frame("SEND", to | {"transaction": "t", "persistent": "true"}, b"in transaction"),
        Frame("ACK", {"id": f"{rng.randrange(1000)}@1", "transaction": "t"}),
        Frame("COMMIT", {"transaction": "t"} | numbered("fuzz", rng.randrange(10))),
        Frame("SEND", {"destination": "/control/queues", "reply-to": temporary}),
        Frame("NACK", {"id": f"{rng.randrange(1000)}@1"}),
        Frame("ABORT", {"transaction": "t"}),
        Frame("UNSUBSCRIBE", {"id": "1"}),
        Frame("DISCONNECT", {"receipt": "2"}),
    ]
    return [encode(frame, Version.V1_2) for frame in frames]


def garbage(rng: random.Random, queue: str) -> bytes:
    """Return bytes of a broken client: noise, or a dialogue that is almost right."""
    if rng.random() < 0.15:
        return rng.randbytes(rng.randrange(1, 3000))
    start = connect_frame(rng.choice(["1.0", "1.1", "1.2", "1.2", "1.2"]), heart_beat=rng.choice(["0,0", "250,250"]))
    frames = frames_of_everything(rng, queue)
    kind = rng.random()
    if kind < 0.2:
        return start + rng.randbytes(rng.randrange(1, 3000))
    if kind < 0.4:
        rng.shuffle(frames)
    elif kind < 0.6:
        frames = rng.choices(frames[:-1], k=30)
    data = bytearray(b"".join(frames))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5, 50])):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.choice([0, 10, 13, 58, 92, rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 20)]
            case 2:
                data[at:at] = rng.choice([b"\0", b"\n", b"\r\n", b"\\", b":", rng.randbytes(10)])
            case _:
                data[at:at] = data[max(0, at - 40) : at]
    return start + bytes(data)


def test_garbage_harms_only_its_own_connection(own_broker: BrokerProcess) -> None:
    print(f"TRUENEXT_SEED={SEED}")
    rng = random.Random(SEED)
    keeper = own_broker.connect()
    for number in range(5):
        keeper.send("kept", b"%d" % number, persistent=True, confirmed=True)
    keeper.disconnect()
    with traffic_on(own_broker, "traffic"):
        for _ in range(300):
            client = RawClient(own_broker.port)
            data = garbage(rng, f"fuzz{rng.randrange(3)}")
            cuts = sorted(rng.choices(range(len(data)), k=rng.randrange(3)))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                    client.write(data[start:end])
                match rng.randrange(3):
                    case 0:
                        client.crash()
                    case 1:
                        client.hang_up()
                        while client.read():
                            pass
                        client.close()
                    case _:
                        client.close()
            client.close()
            if not own_broker.is_running:
                pytest.fail(f"seed {SEED}: the broker has ended, after {data!r}; log:\n{own_broker.log}")
        for number in range(3):
            own_broker.await_facts(f"fuzz{number}", consumers=0, unacknowledged=0)
    own_broker.restart(is_clean=True)
    assert bodies(own_broker.remaining_messages("kept")) == ["0", "1", "2", "3", "4"]


# ---- Heart-beats ----


@pytest.mark.parametrize("wanted", ["250", "1"])
def test_the_broker_beats_at_the_agreed_rate_and_never_faster_than_it_offers(
    broker: BrokerProcess, wanted: str
) -> None:
    client = broker.connect(sends_connect=False)
    connected = client.send_connect("1.2", f"0,{wanted}")
    assert connected.headers["heart-beat"] == "250,0"
    started = time.monotonic()
    beats = b""
    times = [started]
    while times[-1] - started < 1.1:
        beats += client.read()
        times.append(time.monotonic())
    # A reader allows for twice the interval.
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 0.5
    assert beats == b"\n" * len(beats)
    assert 4 <= len(beats) <= 12
    client.disconnect()


def test_no_heart_beats_are_sent_without_an_agreement(broker: BrokerProcess) -> None:
    client = broker.connect(heart_beat="0,0")
    with pytest.raises(TimeoutError):
        client.read(0.6)
    assert client.arrived() == []


def test_a_client_that_misses_its_heart_beats_loses_what_it_held_to_one_that_keeps_them(
    broker: BrokerProcess, queue: str
) -> None:
    sender, silent = broker.connect(), broker.connect(heart_beat="250,0")
    sender.send(queue, b"0", persistent=True)
    sender.send(queue, b"1", confirmed=True)
    silent.subscribe(queue)
    held = silent.messages(2)
    assert bodies(held) == ["0", "1"]
    last_heard = time.monotonic()
    beating, quiet = broker.connect(heart_beat="250,0"), broker.connect(heart_beat="0,0")
    beating.subscribe(queue)

    messages: list[Frame] = []
    while len(messages) < 2:
        beating.write(b"\n")
        with contextlib.suppress(TimeoutError):
            messages.append(beating.message(0.1))
        assert time.monotonic() - last_heard < PATIENCE_SECONDS, "the silent client is not given up"
    given_up_after = time.monotonic() - last_heard
    assert given_up_after > 0.25
    assert bodies(messages) == ["0", "1"]
    # It had begun with the first.
    assert [message.headers["truenext-attempts"] for message in messages] == ["1", "0"]
    assert [message.headers["redelivered"] for message in messages] == ["true", "true"]
    silent.await_end()

    # Three times as long as the other had; half of the beats are frames.
    for number in range(15):
        if number % 2:
            beating.write(b"\n")
        else:
            beating.send_frame("BEGIN", {"transaction": str(number)})
        with pytest.raises(TimeoutError):
            beating.next_frame(0.1)
    for message in messages:
        beating.ack(message, confirmed=True)
    assert quiet.arrived() == []
    assert broker.queues()[queue].waiting == 0


def test_a_broker_that_was_suspended_does_not_end_clients_for_missing_heart_beats(own_broker: BrokerProcess) -> None:
    client = own_broker.connect(heart_beat="250,0")
    for _ in range(2):
        client.write(b"\n")
        time.sleep(0.2)
    with own_broker.asleep():
        for _ in range(6):
            client.write(b"\n")
            time.sleep(0.1)
    assert client.arrived() == []


# ---- Receipts ----


def assert_nothing_received(broker: BrokerProcess, client: RawClient) -> None:
    """Check that the client gets no frame once the broker has handled all it can."""
    assert broker.connect().arrived() == []
    with pytest.raises(TimeoutError):
        client.next_frame(0.05)


def test_receipts_come_in_order_and_only_once_the_sends_are_durable(held_broker: BrokerProcess) -> None:
    # C18.1
    sender, other, committing = (held_broker.connect() for _ in range(3))
    held_broker.hold_disk()
    sender.send("q", b"0", persistent=True, headers={"receipt": "a"})
    # A receipt, to whatever frame, confirms all that came before it.
    sender.send("q", b"transient", headers={"receipt": "b"})
    sender.send_frame("SUBSCRIBE", {"id": "1", "destination": "/queue/elsewhere", "receipt": "c"})
    sender.send("q", b"1", persistent=True, headers={"receipt": "d"})
    committing.begin("t")
    # Inside a transaction it says only that the frame was taken.
    committing.send("q", b"2", persistent=True, transaction="t", confirmed=True)
    committing.commit("t", confirmed=False, headers={"receipt": "committed"})
    other.send("other", b"waits for nobody", confirmed=True)
    assert_nothing_received(held_broker, sender)
    assert_nothing_received(held_broker, committing)
    assert held_broker.remaining_messages("q") == []

    held_broker.resume_disk()
    for receipt in "abcd":
        sender.await_receipt(receipt)
    committing.await_receipt("committed")
    held_broker.restart(is_clean=False)
    found = bodies(held_broker.remaining_messages("q"))
    # Nothing orders the COMMIT and the SENDs of another connection.
    assert sorted(found) == ["0", "1", "2"]
    assert found.index("0") < found.index("1")


def test_a_send_that_was_not_durable_at_a_kill_was_not_confirmed(held_broker: BrokerProcess) -> None:
    sender = held_broker.connect()
    sender.send("q", b"durable", persistent=True, confirmed=True)
    held_broker.hold_disk()
    sender.send("q", b"not durable", persistent=True, headers={"receipt": "never"})
    assert_nothing_received(held_broker, sender)
    held_broker.kill()
    with pytest.raises(EOFError):
        sender.next_frame()
    held_broker.resume_disk()
    held_broker.start()
    assert bodies(held_broker.remaining_messages("q")) == ["durable"]


def test_a_broken_disk_stops_the_broker_with_a_clear_message_and_without_a_receipt(held_broker: BrokerProcess) -> None:
    sender, reader = held_broker.connect(), held_broker.connect()
    sender.send("q", b"durable", persistent=True, confirmed=True)
    reader.subscribe("q")
    message = reader.message()
    held_broker.break_disk()
    sender.send("q", b"not durable", persistent=True, headers={"receipt": "never"})
    for client in (sender, reader):
        with pytest.raises(EOFError):
            client.next_frame()
        client.close()
    assert held_broker.wait_for_end() == 1
    *_, before_last, last = held_broker.log.splitlines()
    assert "CRITICAL the store failed; the broker stops" in before_last
    assert last == "truenext: cannot write to the store: the disk was broken by a test"
    assert "Traceback" not in held_broker.log

    held_broker.mend_disk()
    held_broker.start()
    (again,) = held_broker.remaining_messages("q")
    assert again.body == message.body == b"durable"
    assert again.headers["truenext-attempts"] == "0"


def test_a_disk_that_breaks_at_the_last_moment_makes_the_stop_fail(held_broker: BrokerProcess) -> None:
    sender = held_broker.connect()
    sender.send("q", b"persistent", persistent=True, confirmed=True)
    sender.send("q", b"transient", confirmed=True)
    held_broker.break_disk()
    os.kill(held_broker.pid, signal.SIGTERM)
    assert held_broker.wait_for_end() == 1
    assert held_broker.log.splitlines()[-1] == "truenext: cannot write to the store: the disk was broken by a test"
    assert "Traceback" not in held_broker.log

    held_broker.mend_disk()
    held_broker.start()
    assert bodies(held_broker.remaining_messages("q")) == ["persistent"]


# ---- How a connection begins ----


@pytest.mark.parametrize(
    ("accepted", "version"),
    [
        ("1.0", "1.0"),
        ("1.1", "1.1"),
        ("1.2", "1.2"),
        ("1.0,1.1,1.2", "1.2"),
        ("1.1,1.0", "1.1"),
        ("2.0, 1.1", "1.1"),
        (None, "1.0"),
    ],
)
@pytest.mark.parametrize("command", ["CONNECT", "STOMP"])
def test_the_highest_version_that_both_know_is_agreed(
    broker: BrokerProcess, queue: str, command: str, accepted: str | None, version: str
) -> None:
    client = broker.connect(sends_connect=False)
    client.send_frame(command, {"host": "test"} | ({} if accepted is None else {"accept-version": accepted}))
    connected = client.next_frame()
    assert connected.command == "CONNECTED"
    assert connected.headers["version"] == version
    assert connected.headers["server"].startswith("truenext/")
    assert connected.headers["session"]


@pytest.mark.parametrize("accepted", ["2.0", "1.3", "1", "", "1.2.1"])
def test_a_version_that_is_not_known_is_refused_with_those_that_are(broker: BrokerProcess, accepted: str) -> None:
    client = broker.connect(sends_connect=False)
    client.write(connect_frame(accepted))
    error = expect_error(client, "Supported protocol versions are 1.0 1.1 1.2")
    assert error.headers["version"] == "1.0,1.1,1.2"


@VERSIONS
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_frames_behind_connect_are_read_by_the_version_that_it_agrees_on(
    broker: BrokerProcess, queue: str, version: str, piece: int
) -> None:
    """The frames come in one packet, or byte by byte."""
    note = r"a\\b" if version != "1.0" else r"a\b"
    line_end = "\r\n" if version == "1.2" else "\n"
    sent_data = [
        connect_frame(version),
        *(
            line_end.join(lines).encode() + b"\0\n"
            for lines in (
                ["SUBSCRIBE", "id:1", f"destination:/queue/{queue}", "ack:auto", "", ""],
                ["SEND", f"destination:/queue/{queue}", "persistent:true", f"note:{note}", "receipt:sent", "", "body"],
                ["DISCONNECT", "receipt:left", "", ""],
            )
        ),
    ]
    client = broker.connect(sends_connect=False)
    data = b"\n\n" + b"".join(sent_data)
    for start in range(0, len(data), piece):
        client.write(data[start : start + piece])
    # By hand, as nobody has told the client the version.
    answer = b""
    while more := client.read():
        answer += more
    text = answer.decode()
    assert text.startswith(f"CONNECTED\nversion:{version}\n")
    assert text.count("\0") == (4 if "MESSAGE\n" in text else 3)
    assert "RECEIPT\nreceipt-id:sent\n" in text
    assert "RECEIPT\nreceipt-id:left\n" in text
    assert text.index("receipt-id:sent") < text.index("receipt-id:left")
    # DISCONNECT may come before the message is durable: then it waits for the next one.
    if "MESSAGE\n" in text:
        assert f"note:{note}\n" in text
        assert broker.remaining_messages(queue) == []
    else:
        (message,) = broker.remaining_messages(queue)
        assert message.headers["note"] == r"a\b"


def test_frames_after_disconnect_are_not_carried_out(broker: BrokerProcess, queue: str) -> None:
    sender, client = broker.connect(), broker.connect()
    sender.send(queue, b"held", persistent=True, confirmed=True)
    client.subscribe(queue)
    held = client.message()
    to = {"destination": f"/queue/{queue}"}
    sent_data = [Frame("SEND", to, b"sent"), Frame("DISCONNECT", {"receipt": "left"}), Frame("SEND", to, b"not sent")]
    sent_data.append(Frame("ACK", {"id": held.headers["ack"]}))
    client.write(b"".join(encode(frame, Version.V1_2) for frame in sent_data))
    client.await_receipt("left")
    expect_error(client, "SEND is not allowed while closed")

    remaining = broker.remaining_messages(queue)
    assert bodies(remaining) == ["held", "sent"]
    assert remaining[0].headers["truenext-attempts"] == "0"


# ---- Temporary queues ----


@pytest.mark.parametrize(("version", "service_version"), [("1.0", "1.2"), ("1.1", "1.0"), ("1.2", "1.1")])
def test_a_request_finds_its_way_back_through_a_temporary_queue(
    broker: BrokerProcess, queue: str, version: str, service_version: str
) -> None:
    service, requester = broker.connect(version=service_version), broker.connect(version=version)
    other = broker.connect()
    service.subscribe(queue)
    for client, name in ((requester, "requester"), (other, "other")):
        client.send_frame("SUBSCRIBE", {"id": "r", "destination": "/temp-queue/replies"}, confirmed=True)
        headers = {"reply-to": "/temp-queue/replies", "correlation-id": name}
        client.send(queue, name.encode(), persistent=True, headers=headers, confirmed=True)

    requests = service.messages(2)
    addresses = [request.headers["reply-to"] for request in requests]
    assert bodies(requests) == ["requester", "other"]
    assert all(address.startswith("/remote-temp-queue/") for address in addresses)
    assert addresses[0] != addresses[1]
    for request in requests:
        sent_data = {"destination": request.headers["reply-to"], "correlation-id": request.headers["correlation-id"]}
        service.send_frame("SEND", sent_data | {"persistent": "true"}, b"answer to " + request.body)
        service.ack(request, confirmed=True)

    for client, name in ((requester, "requester"), (other, "other")):
        reply = client.message()
        assert (reply.body.decode(), reply.headers["correlation-id"]) == (f"answer to {name}", name)
        assert client.arrived() == []
    assert not [name for name in broker.queues() if "replies" in name]


@AMID_TRAFFIC
def test_a_temporary_queue_belongs_to_its_connection_and_ends_with_it(broker: BrokerProcess, queue: str) -> None:
    # C25.5
    service, requester = broker.connect(), broker.connect()
    service.subscribe(queue)
    requester.send_frame("SUBSCRIBE", {"id": "1", "destination": "/temp-queue/replies"}, confirmed=True)
    requester.send(queue, b"request", headers={"reply-to": "/temp-queue/replies"}, confirmed=True)
    requester.send_frame("UNSUBSCRIBE", {"id": "1"}, confirmed=True)
    address = service.message().headers["reply-to"]
    service.send_frame("SEND", {"destination": address}, b"secret", confirmed=True)

    thief = broker.connect()
    thief.send_frame("SUBSCRIBE", {"id": "1", "destination": address})
    expect_error(thief, "only the connection that owns a temporary queue may subscribe to it")
    namesake = broker.connect()
    namesake.send_frame("SUBSCRIBE", {"id": "1", "destination": "/temp-queue/replies"}, confirmed=True)
    assert namesake.arrived() == []
    # The owner may come late, and call it by either name.
    requester.send_frame("SUBSCRIBE", {"id": "1", "destination": address}, confirmed=True)
    assert bodies(requester.arrived()) == ["secret"]
    requester.disconnect()

    service.send_frame("SEND", {"destination": address, "persistent": "true"}, b"too late", confirmed=True)
    service.begin("t")
    service.send_frame("SEND", {"destination": address, "transaction": "t"}, b"too late")
    service.commit("t")
    assert service.arrived() == []
    late = broker.connect()
    late.send_frame("SUBSCRIBE", {"id": "1", "destination": address})
    expect_error(late, "only the connection that owns a temporary queue may subscribe to it")


# ---- Numbered sends (C18.5 to C18.7) ----


@pytest.mark.parametrize("end", ["same connection", "new connection", "clean", "kill -9"])
def test_a_repeat_of_a_numbered_send_or_commit_is_accepted_once(own_broker: BrokerProcess, end: str) -> None:
    # C18.5
    def send_everything(client: RawClient) -> None:
        client.send("q", b"1", persistent=True, headers=numbered("p", 1), confirmed=True)
        client.send("q", b"2", persistent=True, headers=numbered("p", 2), confirmed=True)
        client.begin("t")
        client.send("q", b"3", persistent=True, transaction="t")
        client.send("q", b"4", persistent=True, transaction="t")
        client.commit("t", headers=numbered("p", 3))

    client = own_broker.connect()
    send_everything(client)
    if end == "new connection":
        client.crash()
        client = own_broker.connect()
    elif end != "same connection":
        if end == "clean":
            client.disconnect()
        own_broker.restart(is_clean=end == "clean")
        client = own_broker.connect()
    send_everything(client)
    # A client that only missed the last receipt says only the last again.
    client.commit("t", headers=numbered("p", 3))
    # Another producer's numbers are others.
    client.send("q", b"5", persistent=True, headers=numbered("p2", 1), confirmed=True)
    client.send("q", b"6", persistent=True, headers=numbered("p", 4), confirmed=True)

    assert bodies(own_broker.remaining_messages("q")) == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_only_the_receipt_of_a_repeat_has_the_repeat_header(own_broker: BrokerProcess, is_killed: bool) -> None:
    # C18.6
    client = own_broker.connect()

    def sent_data(command: str, headers: dict[str, str]) -> dict[str, str]:
        client.send_frame(command, headers | {"receipt": "r"})
        return client.await_receipt("r").headers

    to = {"destination": "/queue/q", "persistent": "true"}
    plain, repeat = {"receipt-id": "r"}, {"receipt-id": "r", "truenext-repeat": "true"}
    assert sent_data("SEND", to | numbered("p", 1)) == plain
    client.begin("t")
    client.send("q", b"", persistent=True, transaction="t")
    assert sent_data("COMMIT", {"transaction": "t"} | numbered("p", 2)) == plain
    assert sent_data("SEND", to | numbered("p", 3)) == plain
    if is_killed:
        own_broker.restart(is_clean=False)
        client = own_broker.connect()
    # Whether a lower one was ever used is not known: there may be gaps.
    assert sent_data("SEND", to | numbered("p", 1)) == repeat | {"truenext-outcome": "unknown"}
    assert sent_data("SEND", to | numbered("p", 3)) == repeat
    assert sent_data("COMMIT", {"transaction": "t"} | numbered("p", 2)) == repeat
    assert sent_data("SEND", to) == plain
    # Nobody asked what became of this one.
    client.send_frame("SEND", to | numbered("p", 1))
    assert sent_data("BEGIN", {"transaction": "t"}) == plain
    assert sent_data("ABORT", {"transaction": "t"}) == plain
    assert sent_data("SEND", to | numbered("p", 4)) == plain


@pytest.mark.parametrize("kind", ["send", "commit"])
def test_the_receipt_of_a_repeat_waits_until_the_first_is_durable(held_broker: BrokerProcess, kind: str) -> None:
    # C18.6
    def send_frames(client: RawClient) -> None:
        if kind == "send":
            client.send("q", b"1", persistent=True, headers=numbered("p", 1) | {"receipt": "r"})
        else:
            client.begin("t")
            client.send("q", b"1", persistent=True, transaction="t")
            client.commit("t", confirmed=False, headers=numbered("p", 1) | {"receipt": "r"})

    held_broker.hold_disk()
    first, second = held_broker.connect(), held_broker.connect()
    send_frames(first)
    assert_nothing_received(held_broker, first)
    first.crash()
    send_frames(second)
    assert_nothing_received(held_broker, second)
    held_broker.resume_disk()
    second.await_receipt("r")
    held_broker.restart(is_clean=False)
    assert bodies(held_broker.remaining_messages("q")) == ["1"]


def test_a_numbered_commit_of_a_transaction_that_was_rolled_back_is_refused(own_broker: BrokerProcess) -> None:
    # C18.7
    client = own_broker.connect()
    client.begin("t")
    client.send("q", b"never", persistent=True, transaction="t", confirmed=True)
    own_broker.restart(is_clean=False)
    client = own_broker.connect()
    client.commit("t", confirmed=False, headers=numbered("p", 1) | {"receipt": "r"})
    error = expect_error(client, "transaction 't' is not open: it was rolled back")
    assert error.headers["receipt-id"] == "r"

    # A refused number is not used up.
    client = own_broker.connect()
    client.begin("t")
    client.send("q", b"once", persistent=True, transaction="t")
    client.commit("t", headers=numbered("p", 1))
    assert bodies(own_broker.remaining_messages("q")) == ["once"]


# ---- Questions to the broker ----


def test_the_broker_reports_its_queues_in_json(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    for body in (b"0", b"1", b"2"):
        client.send(queue, body)
    client.subscribe(queue, prefetch=1)
    client.message()
    client.send_frame("SUBSCRIBE", {"id": "a", "destination": "/temp-queue/answers"}, confirmed=True)
    sent_data = {"destination": "/control/queues", "reply-to": "/temp-queue/answers", "correlation-id": "why"}
    client.send_frame("SEND", sent_data)
    answer = client.message()
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["correlation-id"] == "why"
    facts = json.loads(answer.body)
    (row,) = [row for row in facts if row["name"] == queue]
    assert (row["waiting"], row["unacknowledged"], row["consumers"], row["accepted"]) == (2, 1, 1, 3)
    assert [fact["name"] for fact in facts] == sorted(fact["name"] for fact in facts)


@AMID_TRAFFIC
def test_an_unknown_control_verb_is_refused_with_the_known_ones(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.send_frame("SEND", {"destination": "/control/shutdown", "reply-to": "/temp-queue/answers", "receipt": "r"})
    error = expect_error(
        client,
        "there is no control verb 'shutdown'; known: backup, close, connection, connections, consumers, dead-letters, "
        "drain, failover, history, move, pause, policy, producer, purge, queues, redrive, reload, ",
    )
    assert error.headers["receipt-id"] == "r"


# ---- The command: how a broker begins and ends ----


def truenext(*arguments: str, sent_data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    return completed(*arguments, stdin_bytes=sent_data)


def failed(*arguments: str, status: int = 1, sent_data: bytes = b"") -> str:
    """Run a command that must fail with `status`, and return its message of one line."""
    ended = truenext(*arguments, sent_data=sent_data)
    assert ended.returncode == status, ended
    complaint = ended.stderr.decode()
    assert complaint.count("\n") == 1, complaint
    assert complaint.startswith("truenext: ")
    return complaint


@contextmanager
def serving(*arguments: str, listeners: int = 1) -> Iterator[list[str]]:
    """Run `truenext serve`, which must stop cleanly, and return the URLs of its listeners."""
    command = dying_with_us([TRUENEXT, "serve", *arguments])
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            sent_data = [process.stdout.readline().decode() for _ in range(listeners)]
            assert all(line.startswith("listening on stomp://") for line in sent_data), (sent_data, process.stderr)
            yield [line.removeprefix("listening on ").strip() for line in sent_data]
            process.terminate()
            assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_second_broker_on_the_same_folder_is_refused(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.send("q", b"0", persistent=True, confirmed=True)
    complaint = failed("serve", "--data", str(own_broker.data), "--listen", "stomp://127.0.0.1:0", status=2)
    assert f"data folder {own_broker.data} is in use by the broker of process {own_broker.pid}" in complaint
    client.send("q", b"1", persistent=True, confirmed=True)
    own_broker.restart(is_clean=False)
    assert bodies(own_broker.remaining_messages("q")) == ["0", "1"]


def test_an_address_that_is_taken_is_refused_and_costs_no_message(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    client.send("q", b"transient")
    client.send("q", b"persistent", persistent=True, confirmed=True)
    client.disconnect()
    own_broker.stop()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        complaint = failed("serve", "--data", str(own_broker.data), "--listen", f"stomp://127.0.0.1:{port}", status=2)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in complaint
    assert "stop the program that listens there, perhaps another broker, or choose another port" in complaint
    own_broker.start()
    assert bodies(own_broker.remaining_messages("q")) == ["transient", "persistent"]


def test_two_addresses_with_one_port_are_refused_before_the_broker_listens() -> None:
    addresses = ("--listen", "stomp://127.0.0.1:61616", "--listen", "openwire://127.0.0.1")
    result = truenext("serve", "--memory", *addresses)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode() == (
        "truenext: two addresses of --listen or --health name 127.0.0.1:61616: give each a port of its own\n"
    )


def test_an_address_that_others_can_reach_must_be_allowed() -> None:
    everywhere = ("--memory", "--listen", "stomp://0.0.0.0:0")
    assert "0.0.0.0 can be reached from other machines" in failed("serve", *everywhere, status=2)
    with serving(*everywhere, "--allow-anonymous", "--log-level", "error") as (url,):
        assert url.startswith("stomp://0.0.0.0:")
        client = RawClient(int(url.rpartition(":")[2]))
        client.send_connect("1.2", "0,0")
        client.disconnect()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no loopback address of IPv6")
def test_an_ipv6_address_has_its_brackets_wherever_it_is_shown() -> None:
    with serving("--memory", "--listen", "stomp://[::1]:0") as (url,):
        assert re.fullmatch(r"stomp://\[::1\]:\d+", url)
        address = url.removeprefix("stomp://")
        in_use = f"truenext: cannot listen on {address}{{}}: Address already in use{{}}\n"
        hint = "; stop the program that listens there, perhaps another broker, or choose another port"
        assert failed("serve", "--memory", "--listen", url, status=2) == in_use.format("", hint)
        words = ["stages", "run", "tests.stages.services.working:app", "--url", url, "--health", address]
        assert failed(*words, status=2) == in_use.format(" for --health", "")
        with blocking.connect(url) as client, client.consumer("/topic/t", prefetch=1) as consumer:
            for _ in range(3):
                client.send("/topic/t", b"x")
            assert consumer.receive(PATIENCE_SECONDS) is not None
            (row,) = json.loads(client.control_request("status"))["temporary"]["largest"]
            assert re.fullmatch(r"\[::1\]:\d+", row["client"])
            assert f" of {row['client']}" in truenext("status", "--url", url).stdout.decode()
    assert f"no broker at {url}: " in failed("status", "--url", url, status=2)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no loopback address of IPv6")
def test_an_ipv6_client_has_its_brackets_in_the_log() -> None:
    command = dying_with_us([TRUENEXT, "serve", "--memory", "--listen", "stomp://[::1]:0"])
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(b":")[2])
            with socket.create_connection(("::1", port), timeout=PATIENCE_SECONDS) as client:
                client.sendall(b"HELLO\n\n\0")
                assert client.recv(1000).startswith(b"ERROR\n")
                address = f"[::1]:{client.getsockname()[1]}"
            process.terminate()
            log = process.communicate(timeout=PATIENCE_SECONDS)[1].decode()
            assert f"client refused client={address!r}" in log
        finally:
            process.kill()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:0",
        "127.0.0.1:61613",
        "stomp://127.0.0.1:99999",
        "stomp://127.0.0.1:0/queue",
        "stomp://somebody@127.0.0.1:0",
        "stomp://:0",
        "stomp://[::1",
    ],
)
def test_serve_refuses_an_invalid_url_before_it_makes_anything(tmp_path: Path, url: str) -> None:
    data = tmp_path / "data"
    complaint = failed("serve", "--data", str(data), "--listen", "stomp://127.0.0.1:0", "--listen", url, status=2)
    assert repr(url) in complaint
    assert not data.exists()


def test_serve_refuses_an_invalid_host() -> None:
    for host in ("nosuch.invalid", "a..b"):
        arguments = ("--memory", "--allow-anonymous", "--log-level", "error", "--listen", f"stomp://{host}:0")
        assert f"cannot listen on {host}:0" in failed("serve", *arguments, status=2)


@pytest.mark.parametrize(
    ("arguments", "sent_data"),
    [
        (["--memory", "--data", "somewhere"], b"--data and --memory exclude each other"),
        (["--memory", "--server-name", "two\nlines"], b"must be a printable text"),
        (["--memory", "--server-name", "x" * 256], b"has 256 characters; at most 255"),
        (["--memory", "--server-name", " "], b"must be a printable text, not empty"),
    ],
)
def test_options_that_say_too_little_or_too_much_are_refused_in_their_own_words(
    arguments: list[str], sent_data: bytes
) -> None:
    ended = truenext("serve", *arguments)
    assert ended.returncode == 2
    assert sent_data in b" ".join(ended.stderr.split())
    assert not Path("somewhere").exists()


def test_a_disk_that_is_broken_at_the_start_is_reported(tmp_path: Path) -> None:
    (tmp_path / "break").touch()
    command = [str(tmp_path), "serve", "--data", str(tmp_path / "data"), "--listen", "stomp://127.0.0.1:0"]
    ended = completed(*command, run=held_disk.main)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.splitlines()[-1] == b"truenext: cannot write to the store: the disk was broken by a test"
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["ActiveMQ/5.18.3", "our broker: \u20ac\\c"])
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
def test_a_broker_reports_its_configured_name(name: str, version: str) -> None:
    """The headers of CONNECTED are not escaped in any version."""
    with serving("--memory", "--listen", "stomp://127.0.0.1:0", "--server-name", name) as (url,):
        client = RawClient(int(url.rpartition(":")[2]))
        assert client.send_connect(version, "0,0").headers["server"] == name
        client.disconnect()


def test_a_broker_in_memory_listens_on_all_configured_addresses() -> None:
    listen = ("--listen", "stomp://127.0.0.1:0")
    with serving("--memory", *listen, *listen, listeners=2) as urls:
        assert truenext("send", "q", "kept nowhere", "--url", urls[0]).returncode == 0
        assert truenext("receive", "q", "--url", urls[1]).stdout == b"kept nowhere\n"


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_sigint_and_sigterm_stop_the_broker_cleanly(own_broker: BrokerProcess, by: signal.Signals) -> None:
    client = own_broker.connect()
    client.send("q", b"transient")
    client.send("q", b"persistent", persistent=True, confirmed=True)
    client.subscribe("q", prefetch=1)
    client.message()
    os.kill(own_broker.pid, by)
    client.await_end()
    assert own_broker.wait_for_end() == 0
    own_broker.check_log()
    own_broker.start()
    remaining = own_broker.remaining_messages("q")
    assert bodies(remaining) == ["transient", "persistent"]
    assert [message.headers["truenext-attempts"] for message in remaining] == ["0", "0"]


# ---- The command: what a client can do with it ----


@pytest.fixture
def url(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


def test_send_and_receive_commands_keep_the_true_order(url: str, queue: str) -> None:
    for priority, body in (("1", "last"), ("9", "first"), ("4", "between: \u00e4\n")):
        ended = truenext("send", queue, body, "--priority", priority, "--url", url)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    received = truenext("receive", queue, "--count", "3", "--url", url)
    assert (received.returncode, received.stderr) == (0, b"")
    assert received.stdout.decode() == "first\nbetween: \u00e4\n\nlast\n"
    # They were acknowledged.
    assert failed("receive", queue, "--timeout", "0.1", "--url", url) == (
        "truenext: 0 of 1 messages came within 0.1 s\n"
    )


def test_send_sends_standard_input(url: str, queue: str) -> None:
    body = b"\xff\0\r\n binary \n"
    assert truenext("send", queue, "--url", url, sent_data=body).returncode == 0
    ended = truenext("send", queue, "--lines", "--url", url, sent_data=b"a\n\nb \r\nno line end")
    assert (ended.returncode, ended.stderr) == (0, b"4 sent\n")
    received = truenext("receive", queue, "--all", "--timeout", "0.2", "--url", url)
    assert received.returncode == 0
    assert received.stdout == body + b"\na\n\nb \r\nno line end\n"


def test_the_command_shows_headers_as_json(url: str, queue: str) -> None:
    sent = ["--header", "note=a=b: c\\d\ne", "--header", "kind=x", "--transient", "--priority", "7"]
    assert truenext("send", queue, "body", *sent, "--url", url).returncode == 0
    assert truenext("send", queue, "next", "--url", url).returncode == 0
    received = truenext("receive", queue, "--count", "2", "--json", "--url", url)
    first, second = (json.loads(line) for line in received.stdout.splitlines())
    assert first["body"] == "body"
    expected = {"note": "a=b: c\\d\ne", "kind": "x", "priority": "7"}
    assert first["headers"] | expected == first["headers"]
    assert first["headers"]["destination"] == f"/queue/{queue}"
    assert first["headers"].get("persistent", "false") == "false"
    assert (second["body"], second["headers"]["persistent"]) == ("next", "true")


def test_the_command_lists_the_queues(url: str, queue: str) -> None:
    assert truenext("send", queue, "--lines", "--url", url, sent_data=b"1\n2\n3\n").returncode == 0
    listed = truenext("queues", "--url", url)
    assert re.search(rf"^ *{queue} +3 +0 +0 +0 *$", listed.stdout.decode(), re.MULTILINE), listed
    facts = json.loads(truenext("queues", "--json", "--url", url).stdout)
    (row,) = [row for row in facts if row["name"] == queue]
    assert (row["waiting"], row["unacknowledged"], row["consumers"], row["paused"]) == (3, 0, 0, False)


def test_receive_prints_fewer_messages_than_requested_and_fails(url: str, queue: str) -> None:
    assert truenext("send", queue, "only one", "--url", url).returncode == 0
    ended = truenext("receive", queue, "--count", "2", "--timeout", "0.1", "--url", url)
    assert (ended.returncode, ended.stdout) == (1, b"only one\n")
    assert ended.stderr == b"truenext: 1 of 2 messages came within 0.1 s\n"


def test_receive_does_not_acknowledge_a_message_that_it_could_not_print(
    broker: BrokerProcess, url: str, queue: str
) -> None:
    assert truenext("send", queue, "kept", "--url", url).returncode == 0
    with Path("/dev/full").open("wb") as full:
        command = dying_with_us([TRUENEXT, "receive", queue, "--url", url])
        assert subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, timeout=PATIENCE_SECONDS).returncode
    assert bodies(broker.remaining_messages(queue)) == ["kept"]


CONTROL_REQUESTS = [
    *(["send", "q", "body"], ["receive", "q"], ["browse", "q"], ["queues"], ["status"], ["redrive", "DLQ.q"]),
    *(["move", "q", "r"], ["purge", "q"], ["pause", "q"], ["resume", "q"], ["scheduled"], ["unschedule", "q"]),
    *(["reload"], ["stages", "rerun", "DLQ.q"]),
]


@pytest.mark.parametrize("command", CONTROL_REQUESTS, ids=" ".join)
def test_command_without_a_broker_reports_it_and_the_remedy_in_one_line(command: list[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"stomp://127.0.0.1:{listener.getsockname()[1]}"
        expected = f"truenext: no broker at {url}: Connection refused; {START_HINT}\n"
        assert failed(*command, "--url", url, status=2) == expected


@pytest.mark.parametrize(
    ("protocol", "first"),
    [
        ("TLS", b"\x15\x03\x01\x00\x02\x02\x46"),
        ("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ("AMQP", b"AMQP\x00\x00\x09\x01"),
        ("OpenWire", b"\x00\x00\x00\xf0\x01ActiveMQ" + bytes(8)),
        ("SSH", b"SSH-2.0-OpenSSH_9.2p1\r\n"),
        ("Redis", b"-ERR unknown command 'CONNECT'\r\n"),
    ],
)
def test_server_of_another_protocol_is_named_while_it_keeps_the_connection(protocol: str, first: bytes) -> None:
    with answering(first) as url:
        reason = f"the server speaks {protocol}, not STOMP"
        assert failed("queues", "--url", url, status=2) == f"truenext: no broker at {url}: {reason}\n"
        with pytest.raises(ConnectionLost, match=f"no broker at {url}: {reason}"):
            asyncio.run(connect_once(url))


def test_server_of_no_known_protocol_is_said_not_to_speak_stomp() -> None:
    with answering(b"*1\r\n\0") as url:
        sent_data = failed("queues", "--url", url, status=2)
    assert sent_data.startswith(f"truenext: no broker at {url}: the server does not speak STOMP 1.2: ")


async def connect_once(url: str) -> None:
    await connect(url, reconnect=False)


@contextmanager
def answering(first: bytes) -> Iterator[str]:
    """Run a server that sends these bytes to each client, and nothing else."""
    accepted: list[socket.socket] = []

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                accepted[-1].sendall(first)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"stomp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in accepted:
                each.close()


@pytest.mark.parametrize("command", CONTROL_REQUESTS, ids=" ".join)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"CONNECTED\nversion:1.2\n\n\0"])
def test_commands_that_get_no_stomp_answer_exit_with_status_2(command: list[str], answer: bytes) -> None:
    def hang_up(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(1000)
            accepted.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,))
        thread.start()
        failed(*command, "--url", f"stomp://127.0.0.1:{listener.getsockname()[1]}", status=2)
        thread.join()


@pytest.mark.parametrize(
    "command",
    [
        *(["send", "a.*", "x"], ["send", "a?b", "x"], ["send", "a", "x", "--header", "AMQ_SCHEDULED_DELAY=abc"]),
        *(["browse", "a.*"], ["move", "a", "a"], ["resume", "nowhere"], ["purge", "nowhere"]),
    ],
    ids=" ".join,
)
def test_commands_that_the_broker_refuses_exit_with_status_1(url: str, command: list[str]) -> None:
    failed(*command, "--url", url, status=1)


@pytest.mark.parametrize("url", ["127.0.0.1:61613", "stomp://127.0.0.1:99999", "stomp://[::1"])
def test_commands_refuse_an_invalid_url_in_one_line(url: str) -> None:
    assert url in failed("send", "q", "body", "--url", url, status=2)


def test_a_url_that_leads_nowhere_is_refused_in_one_line() -> None:
    assert "stomp://a..b:1" in failed("send", "q", "body", "--url", "stomp://a..b:1", status=2)


def test_send_and_receive_report_a_refusal_in_one_line(url: str, queue: str) -> None:
    reason = "unknown destination '/exchange/x': there are no exchanges here"
    assert reason in failed("send", "/exchange/x", "body", "--url", url, status=2)
    assert reason in failed("receive", "/exchange/x", "--url", url, status=2)
    sent_data = b"x" * (BODY_BYTES_MAX + 1)
    assert f"at most {BODY_BYTES_MAX}" in failed("send", queue, "--url", url, sent_data=sent_data)


@pytest.mark.parametrize("is_refused", [False, True])
def test_messages_come_to_a_subscription_after_which_the_read_gives_way_to_others(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the turn in between dispatched to a SUBSCRIBE that the wire had not noted as accepted, and the broker
    ended."""
    monkeypatch.setattr("truenext.broker.execution.EXECUTE_SLICE_US", -1)

    def use(port: int) -> None:
        client = RawClient(port)
        client.send_connect("1.2", "0,0", headers=TRUENEXT_CLIENT)
        frames = [encode(Frame("SEND", {"destination": "/queue/q"}, b"m"), Version.V1_2)] * 3
        subscribe = {"id": "1", "destination": "/queue/q", "ack": "client-individual"}
        frames.append(encode(Frame("SUBSCRIBE", subscribe), Version.V1_2))
        if is_refused:
            frames.append(encode(Frame("SUBSCRIBE", subscribe | {"destination": "/queue/other"}), Version.V1_2))
        frames.append(encode(Frame("SUBSCRIBE", subscribe | {"id": "2"}), Version.V1_2))
        client.write(b"".join(frames))
        if is_refused:
            assert "1" in client.next_error().headers["message"]
        assert bodies(client.messages(3)) == ["m"] * 3
        client.disconnect()

    async def here() -> None:
        async with broker_here() as listener:
            await asyncio.to_thread(use, port_of(listener))

    asyncio.run(here())
