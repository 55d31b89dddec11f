"""Tests that a connection honours each member of its WireSession, with the session of a protocol that is not STOMP.

The protocol has a line for each command: HELLO is answered by the session itself, LOGIN logs in, BAD is refused, BYE
ends the session. Each message is three byte strings.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from tests.unit.test_silent_client import Loop
from truenext.broker.peer import PendingCommand, WaitsFor
from truenext.engine.state.consumer import BrokerConsumer
from truenext.errors import Code, RemoteProtocolError
from truenext.model.answers import CloseConnection, ErrorAnswer, Receipt
from truenext.model.commands import AckMode, Command, Login
from truenext.model.destination import Destination
from truenext.model.limits import CAPACITY_CHECK_INTERVAL_S, LOGIN_SECONDS_MAX, READ_BYTES
from truenext.server.connection import ServerConnection
from truenext.server.life import Life
from truenext.tls import NoTlsError
from truenext.wire.session import Delivery, ProtocolRules, SessionFactory, WireSession
from truenext.wire.stomp.server import StompSession

RULES = ProtocolRules(
    protocol="Lines",
    opening_seconds_max=7.0,
    login_bytes_max=50,
    late_opening="no HELLO in time",
    unchecked_login="no check in time",
    closing_seconds=0.5,
    displaced_login="no LOGIN yet, and {newer} are newer",
    plain_text="speak TLS",
    missing_end="no BYE",
    has_takeover=False,
    has_control_requests=False,
)
BEAT_S, SILENCE_S = 1.5, 4.0


class LineReplies:
    parts_per_message = 3
    heart_beat = b"STILL HERE\n"

    def encode_deliveries(
        self,
        subscription: str,
        deliveries: Sequence[Delivery],
        parts: list[bytes],
        round_number: int = 0,
        *,
        is_browse: bool = False,
    ) -> None:
        for body in cast(Any, deliveries):
            parts += [b"<", body, b">\n"]

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes:
        return b"END OF BROWSE\n"

    def encode_end_of_pull_request(
        self, subscription: str, destination: Destination, unused: int, correlation: str | None
    ) -> bytes:
        return b"END OF PULL\n"

    def encode_receipt(self, receipt: Receipt) -> bytes:
        return f"RECEIPT {receipt.receipt}\n".encode()

    def encode_fault(self, fault: ErrorAnswer) -> bytes:
        return f"FAULT {fault.receipt} {fault.code.value} {fault.summary}\n".encode()


class LineSession:
    """Session of the protocol. HELLO begins the heart-beats."""

    rules = RULES
    client_id = ""

    def __init__(
        self,
        *,
        session_id: str,
        identity: str,
        server_name: str,
        on_ineffective_header: Callable[[str, str, str], None],
    ) -> None:
        self.replies = LineReplies()
        self.pending = bytearray()
        self.outgoing = bytearray()
        self.is_opening = True
        self.is_connected = False
        self.is_closed = False
        self.last_receipt: str | None = None
        self.beat_check_s = self.silence_limit_s = 0.0
        self.received_sizes: list[int] = []

    def receive(self, data: bytes) -> Iterator[Command]:
        self.received_sizes.append(len(data))
        self.pending += data
        while b"\n" in self.pending:
            line, _, rest = bytes(self.pending).partition(b"\n")
            self.pending[:] = rest
            if line == b"HELLO":
                self.outgoing += b"HELLO TOO\n"
                self.beat_check_s, self.silence_limit_s, self.is_opening = BEAT_S, SILENCE_S, False
            elif line == b"LOGIN":
                self.is_connected = True
                yield Login()
            elif line == b"BAD":
                self.last_receipt = "7"
                raise RemoteProtocolError("it was bad", Code.NOT_FOUND)
            elif line == b"BYE":
                self.is_closed = True

    def attach(self, on_outgoing: Callable[[], None], on_too_large: Callable[[str], None]) -> None:
        self.on_too_large = on_too_large

    def detach(self) -> None:
        pass

    def accept_last(self) -> None:
        pass

    def mark_refused(self) -> int:
        return 0

    def encode_connected(
        self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool, control_only: Code | None = None
    ) -> bytes:
        return b"WELCOME\n"


class Broker:
    """Accepts each login, unless `checks_logins` or `refuses_logins`, and answers at once."""

    def __init__(self) -> None:
        self.connection: ServerConnection
        self.checks_logins = self.refuses_logins = False
        self.has_capacity = True
        self.has_time = True
        self.silence = None
        self.is_silent = False
        self.lost: list[bool] = []
        self.park = mock.Mock(return_value=True)
        self.ends = SimpleNamespace(
            lost=lambda _, *, is_exempt: self.lost.append(is_exempt),
            park=self.park,
            soon=lambda _, end: end(),
            partial_frame_sent=mock.Mock(),
        )
        self.capacity = SimpleNamespace(
            incomplete_frames=SimpleNamespace(is_full=False),
            read_turns=SimpleNamespace(has_time=lambda _: True, end=lambda _, end: end()),
            may_read=lambda _: self.has_capacity,
            wait=lambda *_, **__: None,
        )
        self.users = SimpleNamespace(has_logged_refusal=lambda *_: False)
        self.warnings = mock.Mock()
        self.unread_answers = mock.Mock()
        self.on_all_sent = self.connection_closed = mock.Mock()

    def connect(self, connection: ServerConnection) -> SimpleNamespace:
        self.connection = connection
        return SimpleNamespace(id="me", release_count=0)

    def execute(self, _: object, commands: Iterator[Command]) -> PendingCommand | None:
        for command in commands:
            if isinstance(command, Login):
                if self.checks_logins:
                    return PendingCommand(command, WaitsFor.LOGIN)
                if self.refuses_logins:
                    raise RemoteProtocolError("too many logins", Code.BUSY)
                self.accept(command)
        return None

    def accept(self, login: Login) -> None:
        self.connection.send_connected(login, "", is_takeover=False, is_checked=False)

    def answer(self, _: object, answer: Any) -> None:
        self.connection.answer(answer)
        if isinstance(answer, CloseConnection):
            self.connection.flush()


class Rig:
    """Connection of one client, with a clock that the test advances."""

    def __init__(self, make_session: SessionFactory = LineSession, *, tls: Any = None) -> None:
        self.loop = Loop()
        self.broker = Broker()
        self.here, there = socket.socketpair()
        for sock in (self.here, there):
            sock.setblocking(False)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.writable: Callable[[], None] | None = None
        cast(Any, self.loop).add_writer = self._set_writer
        self.connection = ServerConnection(
            there,
            "here:1",
            cast(Any, self.broker),
            cast(Any, self.loop),
            identity="b1",
            server_name="x",
            on_closed=lambda _: None,
            tls=tls,
            make_session=make_session,
        )

    def _set_writer(self, _: socket.socket, action: Callable[[], None]) -> None:
        self.writable = action

    @property
    def wire(self) -> WireSession:
        return self.connection._wire

    @property
    def state(self) -> Life:
        return self.connection._life.state

    def send(self, data: bytes, *, is_noticed: bool = True) -> None:
        self.here.sendall(data)
        if is_noticed and self.loop.readable is not None:
            self.loop.readable()

    def read(self) -> bytes:
        try:
            return self.here.recv(1 << 20)
        except BlockingIOError:
            return b""

    def advance(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds)

    def close(self) -> None:
        self.here.close()
        if self.state is not Life.CLOSED:
            self.connection._socket.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture
def stomp() -> Iterator[Rig]:
    made = Rig(StompSession)
    yield made
    made.close()


# ---- Opening and login ----


def test_client_without_its_opening_is_refused_in_the_time_and_words_of_its_protocol(rig: Rig) -> None:
    rig.advance(RULES.opening_seconds_max - 0.1)
    assert rig.read() == b"" and rig.state is Life.OPEN
    rig.advance(0.2)
    assert rig.read() == b"FAULT None login no HELLO in time\n"
    assert rig.broker.lost == [False]


def test_client_after_its_opening_may_log_in_at_any_time(rig: Rig) -> None:
    rig.send(b"HELLO\n")
    for _ in range(100):
        rig.send(b"\n")
        rig.advance(SILENCE_S - 1)
        rig.read()
    assert not rig.connection.has_sent_login
    rig.send(b"LOGIN\n")
    assert rig.read() == b"WELCOME\n" and rig.connection.has_sent_login


def test_login_that_is_the_opening_ends_its_time_limit(stomp: Rig) -> None:
    stomp.send(b"CONNECT\naccept-version:1.2\n\n\0")
    assert stomp.read().startswith(b"CONNECTED\n")
    stomp.advance(10 * LOGIN_SECONDS_MAX)
    assert stomp.state is Life.OPEN


def test_opening_that_was_in_the_socket_in_time_is_not_late(rig: Rig) -> None:
    rig.send(b"HELLO\n", is_noticed=False)
    rig.advance(RULES.opening_seconds_max + 0.1)
    assert rig.read() == b"HELLO TOO\n" and rig.state is Life.OPEN


def test_login_that_was_in_the_socket_in_time_is_not_late(stomp: Rig) -> None:
    stomp.send(b"CONNECT\naccept-version:1.2\n\n\0", is_noticed=False)
    stomp.advance(LOGIN_SECONDS_MAX + 0.1)
    assert stomp.read().startswith(b"CONNECTED\n")
    stomp.advance(10 * LOGIN_SECONDS_MAX)
    assert stomp.state is Life.OPEN


def test_half_a_login_in_the_socket_is_late(stomp: Rig) -> None:
    stomp.send(b"CONNECT\naccept-version:1.2\n", is_noticed=False)
    stomp.advance(LOGIN_SECONDS_MAX + 0.1)
    assert b"\nmessage:no CONNECT within 5 seconds\n" in stomp.read()


def test_login_found_in_the_socket_has_the_whole_time_for_its_check(stomp: Rig) -> None:
    stomp.broker.checks_logins = True
    stomp.send(b"CONNECT\naccept-version:1.2\n\n\0", is_noticed=False)
    stomp.advance(LOGIN_SECONDS_MAX * 2 - 0.1)
    assert stomp.read() == b"" and stomp.state is Life.OPEN
    stomp.advance(0.2)
    assert b"\nmessage:the login was not checked within 5 seconds\n" in stomp.read()


def test_login_that_is_not_checked_in_time_is_refused(stomp: Rig) -> None:
    stomp.broker.checks_logins = True
    stomp.send(b"CONNECT\naccept-version:1.2\n\n\0")
    stomp.advance(LOGIN_SECONDS_MAX + 0.1)
    assert b"\ntruenext-code:busy\n" in stomp.read()


def test_login_that_waits_for_the_silence_of_the_broker_to_end_is_not_late(stomp: Rig) -> None:
    # C28.9
    stomp.broker.is_silent = stomp.broker.checks_logins = True
    stomp.send(b"CONNECT\naccept-version:1.2\n\n\0")
    stomp.advance(3.5 * LOGIN_SECONDS_MAX)
    assert stomp.read() == b"" and stomp.state is Life.OPEN
    stomp.broker.is_silent = False
    stomp.advance(LOGIN_SECONDS_MAX)
    assert b"\ntruenext-code:busy\n" in stomp.read()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_client_that_the_broker_does_not_read_is_not_late_until_it_is_read(stomp: Rig, is_noticed: bool) -> None:
    stomp.broker.has_capacity = False
    stomp.send(b"CONNECT\n", is_noticed=is_noticed)
    stomp.advance(10 * LOGIN_SECONDS_MAX)
    assert stomp.read() == b"" and stomp.state is Life.OPEN
    stomp.broker.has_capacity = True
    stomp.connection.resume_reading()
    stomp.advance(2 * CAPACITY_CHECK_INTERVAL_S)
    assert b"\nmessage:no CONNECT within 5 seconds\n" in stomp.read()


def test_client_reads_are_as_small_as_the_rules_say_until_its_login(rig: Rig) -> None:
    rig.send(b"HELLO\n" + bytes(200))
    rig.send(bytes(200))
    rig.send(b"\nLOGIN\n")
    for _ in range(20):
        rig.send(b"")
    rig.send(bytes(300))
    sizes = cast(LineSession, rig.wire).received_sizes
    assert max(sizes[:-1]) == RULES.login_bytes_max and sizes[-1] == 300 <= READ_BYTES


@pytest.mark.parametrize("is_closed_by_client", [False, True])
def test_socket_of_a_refused_login_stays_open_for_the_time_of_its_protocol(rig: Rig, is_closed_by_client: bool) -> None:
    rig.broker.refuses_logins = True
    rig.send(b"HELLO\nLOGIN\n")
    rig.connection.flush()
    assert rig.read() == b"HELLO TOO\nFAULT None busy too many logins\n"
    rig.advance(RULES.closing_seconds - 0.1)
    states = [rig.state]
    if is_closed_by_client:
        rig.here.shutdown(socket.SHUT_WR)
        assert rig.loop.readable is not None
        rig.loop.readable()
        states.append(rig.state)
    rig.advance(0.2)
    states.append(rig.state)
    assert states == [Life.DISCARDING, *([Life.CLOSED] * 2 if is_closed_by_client else [Life.LINGERING])]


def test_socket_of_a_client_that_is_refused_later_is_closed_at_once(rig: Rig) -> None:
    rig.send(b"HELLO\nLOGIN\nBAD\n")
    assert rig.read().endswith(b"FAULT 7 not-found it was bad\n") and rig.state is Life.LINGERING


def test_client_that_loses_its_place_is_told_in_the_words_of_its_protocol(rig: Rig) -> None:
    rig.send(b"HELLO\n")
    rig.read()
    rig.connection.end_before_login(200)
    assert rig.read() == b"FAULT None limit no LOGIN yet, and 200 are newer\n"
    assert rig.state is Life.CLOSED


def test_client_of_stomp_that_loses_its_place_is_told_to_send_connect(stomp: Rig) -> None:
    stomp.connection.end_before_login(3)
    text = b"no CONNECT yet, and 3 newer connections wait to log in: send CONNECT at once"
    assert b"\nmessage:%b\n" % text in stomp.read()


# ---- Bytes that the session sends ----


def test_session_sends_nothing_before_its_client(rig: Rig) -> None:
    rig.advance(RULES.opening_seconds_max - 1)
    assert rig.read() == b""


def test_bytes_of_the_session_are_sent_once_before_the_answer_to_a_login_of_the_same_read(rig: Rig) -> None:
    rig.send(b"HELLO\nLOGIN\n")
    assert rig.read() == b"HELLO TOO\nWELCOME\n"
    rig.send(b"\n")
    assert rig.read() == b"" and not rig.wire.outgoing


def test_bytes_of_the_session_are_sent_before_the_refusal_of_the_same_read(rig: Rig) -> None:
    rig.send(b"HELLO\nBAD\n")
    assert rig.read() == b"HELLO TOO\nFAULT 7 not-found it was bad\n"


def test_bytes_of_the_session_are_sent_while_its_login_waits(rig: Rig) -> None:
    rig.broker.checks_logins = True
    rig.send(b"HELLO\nLOGIN\n")
    assert rig.read() == b"HELLO TOO\n"


def test_session_with_a_command_about_a_large_message_is_asked_for_it_and_the_log_says_why(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    wire = cast(LineSession, rig.wire)
    wire.on_too_large("17 MiB")
    assert wire.received_sizes == []
    rig.advance(0)
    assert wire.received_sizes == [0]
    (record,) = (each for each in caplog.records if each.message == "message not sent: too large for the client")
    assert vars(record)["reason"] == "17 MiB" and vars(record)["client"] == "here:1"


def test_ended_connection_asks_its_session_for_nothing(rig: Rig) -> None:
    wire = cast(LineSession, rig.wire)
    wire.on_too_large("17 MiB")
    rig.connection.stop_reading()
    rig.advance(0)
    assert wire.received_sizes == []


# ---- Silence ----


def test_heart_beat_of_the_protocol_is_sent_in_silence_from_the_opening_on(rig: Rig) -> None:
    rig.advance(BEAT_S * 2)
    assert rig.read() == b""
    rig.send(b"HELLO\n")
    assert rig.read() == b"HELLO TOO\n"
    rig.advance(BEAT_S + 0.01)
    assert rig.read() == b"", "something was sent"
    rig.advance(BEAT_S)
    assert rig.read() == LineReplies.heart_beat


def test_login_after_the_opening_begins_no_second_heart_beat(rig: Rig) -> None:
    rig.send(b"HELLO\n")
    rig.advance(BEAT_S / 2)
    rig.send(b"LOGIN\n")
    rig.read()
    received = b""
    for _ in range(20):
        rig.send(b"\n")
        rig.advance(BEAT_S)
        received += rig.read()
    assert received == LineReplies.heart_beat * 19
    running = [timer for _, _, timer in rig.loop._timers if not timer.is_cancelled]
    assert len(running) == 2, "one for heart-beats, one for silence"


@pytest.mark.parametrize("with_login", [False, True])
def test_client_is_lost_after_the_silence_that_its_protocol_allows(rig: Rig, with_login: bool) -> None:
    rig.send(b"HELLO\n")
    if with_login:
        rig.send(b"LOGIN\n")
    rig.advance(1)
    rig.send(b"\n")
    rig.advance(SILENCE_S - 0.1)
    assert not rig.broker.lost
    rig.advance(0.2)
    assert rig.broker.lost == [False] and rig.state is Life.CLOSED


def test_protocol_without_agreed_intervals_has_no_timers_after_the_login(rig: Rig) -> None:
    rig.send(b"LOGIN\n")
    rig.read()
    rig.advance(10_000)
    assert rig.read() == b"" and rig.state is Life.OPEN


# ---- Lost connections ----


def lose(rig: Rig, *, is_closed: bool) -> None:
    if is_closed:
        rig.here.shutdown(socket.SHUT_WR)
        assert rig.loop.readable is not None
        rig.loop.readable()
    else:
        rig.connection._ending.on_socket_broken("cut")


@pytest.mark.parametrize("is_closed", [False, True])
def test_lost_connection_of_a_protocol_without_takeovers_is_never_parked(rig: Rig, is_closed: bool) -> None:
    rig.send(b"HELLO\nLOGIN\n")
    lose(rig, is_closed=is_closed)
    assert not rig.broker.park.called and rig.broker.lost == [False]
    assert rig.state is not Life.PARKED


@pytest.mark.parametrize("is_closed", [False, True])
def test_lost_connection_of_a_protocol_with_takeovers_is_parked(stomp: Rig, is_closed: bool) -> None:
    stomp.send(b"CONNECT\naccept-version:1.2\n\n\0")
    lose(stomp, is_closed=is_closed)
    assert stomp.broker.park.call_count == 1 and stomp.state is Life.PARKED and not stomp.broker.lost


def test_client_that_closes_without_its_last_command_is_logged_in_the_words_of_its_protocol(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "truenext")
    rig.send(b"HELLO\nLOGIN\n")
    lose(rig, is_closed=True)
    (record,) = caplog.records
    assert (record.message, cast(Any, record).reason) == ("client lost", "no BYE")


def test_client_that_ends_its_session_is_not_lost(rig: Rig) -> None:
    rig.send(b"HELLO\nLOGIN\nBYE\n")
    rig.advance(RULES.closing_seconds - 0.1)
    states = [rig.state]
    rig.advance(0.2)
    assert [*states, rig.state] == [Life.DISCARDING, Life.LINGERING] and not rig.broker.lost


# ---- Messages and refusals ----


def test_unsent_messages_are_cancelled_by_the_parts_of_the_protocol() -> None:
    rig = Rig()
    rig.send(b"HELLO\nLOGIN\n")
    rig.read()
    consumers = [
        cast(BrokerConsumer, mock.Mock(spec=BrokerConsumer, subscription=name, mode=AckMode.INDIVIDUAL))
        for name in "ab"
    ]
    for consumer in consumers:
        consumer.session = cast(Any, SimpleNamespace(release_count=0))
    filling = b"x" * 50_000
    rig.connection.deliver(consumers[0], cast(Any, [filling]))
    rig.connection.flush()
    rig.connection.deliver(consumers[0], cast(Any, [b"0", b"1"]))
    rig.connection.deliver(consumers[1], cast(Any, [b"2", b"3"]))
    rig.connection.flush()
    rig.connection.cancel_unsent([consumers[0]])
    received = rig.read()
    for _ in range(50):
        assert rig.writable is not None
        rig.writable()
        received += rig.read()
        if received.endswith(b"<3>\n"):
            break
    assert received == b"<" + filling + b">\n" + b"<2>\n<3>\n"
    rig.close()


def test_client_without_tls_is_refused_in_the_words_of_its_protocol() -> None:
    tls = mock.Mock(has_unsent=False, is_ready=False)
    tls.recv.side_effect = NoTlsError
    rig = Rig(tls=tls)
    rig.send(b"HELLO\n")
    assert rig.read() == b"FAULT None not-supported speak TLS\n"
    rig.close()


def test_time_of_the_tls_handshake_counts_towards_the_opening(caplog: pytest.LogCaptureFixture) -> None:
    tls = mock.Mock(has_unsent=False, is_ready=False)
    tls.recv.side_effect = BlockingIOError
    rig = Rig(tls=tls)
    rig.send(b"part of a handshake")
    rig.advance(RULES.opening_seconds_max - 0.1)
    assert not rig.broker.lost
    rig.advance(0.2)
    # No answer can be encrypted.
    assert rig.state is Life.CLOSED and not tls.send.called
    (record,) = caplog.records
    assert (record.message, cast(Any, record).reason) == ("client refused", "no TLS handshake within 7 seconds")
    rig.close()
