"""Tests of the parts of a connection, each alone: its input, its output, its ending."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from truenext.broker.peer import PendingCommand, WaitsFor
from truenext.broker.silence import Silence
from truenext.engine.state.consumer import BrokerConsumer
from truenext.errors import Code, RemoteProtocolError
from truenext.model.answers import CloseConnection, ErrorAnswer, Receipt
from truenext.model.commands import AckMode
from truenext.model.limits import UNSENT_ANSWER_BYTES_MAX
from truenext.server.client_socket import ClientSocket
from truenext.server.ending import Ending
from truenext.server.input import Input
from truenext.server.life import ConnectionLife, Life, LifeEvent
from truenext.server.output import Output
from truenext.wire.stomp.server import STOMP_RULES

SESSION = cast(Any, SimpleNamespace(id="s", release_count=0))


class Loop:
    """Part of an event loop that a connection needs; nothing runs by itself."""

    def __init__(self) -> None:
        self.readers: dict[socket.socket, Callable[[], None]] = {}
        self.writers: dict[socket.socket, Callable[[], None]] = {}
        self.soon: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.timers: list[float] = []

    def time(self) -> float:
        return 0.0

    def call_soon(self, action: Callable[..., object], *arguments: object) -> None:
        self.soon.append((action, arguments))

    def call_later(self, seconds: float, action: Callable[..., object]) -> mock.Mock:
        self.timers.append(seconds)
        timer = mock.Mock(run=action)
        timer.cancel.side_effect = lambda: self.cancel(seconds)
        return timer

    def cancel(self, seconds: float) -> None:
        if seconds in self.timers:
            self.timers.remove(seconds)

    def add_reader(self, sock: socket.socket, action: Callable[[], None]) -> None:
        self.readers[sock] = action

    def add_writer(self, sock: socket.socket, action: Callable[[], None]) -> None:
        self.writers[sock] = action

    def remove_reader(self, sock: socket.socket) -> None:
        self.readers.pop(sock, None)

    def remove_writer(self, sock: socket.socket) -> None:
        self.writers.pop(sock, None)


class Replies:
    """Replies of a protocol whose messages have two parts: a head and the body."""

    parts_per_message = 2
    heart_beat = b"."

    def encode_deliveries(self, subscription: str, deliveries: Any, parts: list[bytes], *_: Any, **__: Any) -> None:
        for body in deliveries:
            parts += [f"{subscription}:".encode(), body]

    def encode_receipt(self, receipt: Receipt) -> bytes:
        return f"[{receipt.receipt}]".encode()

    def encode_fault(self, fault: ErrorAnswer) -> bytes:
        return f"<{fault.code.value}>".encode()


class Rig:
    """Parts of a connection on a socket pair, with a broker that only notes its calls."""

    def __init__(self) -> None:
        self.here, there = socket.socketpair()
        self.here.setblocking(False)
        there.setblocking(False)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.sock = there
        self.loop = Loop()
        self.socket = ClientSocket(there, None, cast(Any, self.loop))
        self.broker = mock.Mock(silence=None)
        self.broker.ends.park.return_value = False
        self.broker.ends.soon.side_effect = lambda _, end: end()
        self.broker.execute.return_value = None
        self.broker.capacity.may_read.return_value = True
        self.broker.capacity.read_turns.end.side_effect = lambda _, end: end()
        self.broker.capacity.incomplete_frames.is_full = False
        self.wire = mock.Mock(
            rules=STOMP_RULES,
            replies=Replies(),
            pending=bytearray(),
            outgoing=bytearray(),
            is_connected=True,
            is_closed=False,
            last_receipt="r",
        )

    def output(self, ending: Any) -> Output:
        loop = cast(Any, self.loop)
        return Output(SESSION, cast(Any, Replies()), self.broker, self.socket, loop, ending)

    def input(self, ending: Any) -> Input:
        return Input(SESSION, self.wire, self.broker, self.socket, cast(Any, self.loop), mock.Mock(), ending)

    def ending(self) -> Ending:
        loop = cast(Any, self.loop)
        ending = Ending(SESSION, self.wire, self.broker, self.socket, loop, "here")
        self.on_closed = mock.Mock()
        ending.attach(self.input(ending), self.output(ending), on_closed=self.on_closed, on_outgoing=mock.Mock())
        ending.input.watch()
        return ending

    def read(self) -> bytes:
        try:
            return self.here.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.here.close()
        self.sock.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def stub_ending() -> Any:
    return mock.Mock(life=ConnectionLife())


def consumer(name: str) -> BrokerConsumer:
    made = mock.Mock(spec=BrokerConsumer, subscription=name, mode=AckMode.AUTO, session=SESSION)
    return cast(BrokerConsumer, made)


# ---- Output ----


def test_output_joins_what_was_added_to_one_write_and_reports_that_messages_are_sent(rig: Rig) -> None:
    output = rig.output(stub_ending())
    output.answer(Receipt("1"))
    output.deliver(consumer("a"), cast(Any, [b"x", b"y"]))
    assert rig.read() == b""
    output.flush()
    assert rig.read() == b"[1]a:xa:y"
    rig.broker.on_all_sent.assert_called_once_with(SESSION)
    output.answer(Receipt("2"))
    output.flush()
    assert rig.broker.on_all_sent.call_count == 1
    assert output.bytes_sent == 12


def test_output_that_the_socket_does_not_take_is_sent_later_in_order(rig: Rig) -> None:
    output = rig.output(stub_ending())
    large = bytes(50_000)
    output.deliver(consumer("a"), cast(Any, [large, b"y"]))
    output.flush()
    got = rig.read()
    assert 0 < len(got) < len(large)
    output.answer(Receipt("1"))
    output.flush()
    while rig.loop.writers:
        rig.loop.writers[rig.sock]()
        got += rig.read()
    assert got == b"a:" + large + b"a:y[1]"
    rig.broker.on_all_sent.assert_called_once_with(SESSION)


def test_cancelled_messages_are_not_sent_except_a_partially_sent_one(rig: Rig) -> None:
    output = rig.output(stub_ending())
    first, other = consumer("a"), consumer("b")
    large = bytes(50_000)
    output.deliver(first, cast(Any, [b"x", large, b"y"]))
    output.deliver(other, cast(Any, [b"z"]))
    output.flush()
    sent, partially_sent = output.cancel_unsent([first])
    assert (sent, partially_sent) == ({first: 1}, [first])
    got = rig.read()
    while rig.loop.writers:
        rig.loop.writers[rig.sock]()
        got += rig.read()
    assert got == b"a:x" + b"a:" + large + b"b:z"
    rig.broker.ends.partial_frame_sent.assert_called_once_with(SESSION)


@pytest.mark.parametrize("state", [Life.CLOSING, Life.STOPPING_CLOSING])
def test_output_after_the_last_answer_reports_when_all_is_sent(rig: Rig, state: Life) -> None:
    ending = stub_ending()
    output = rig.output(ending)
    output.answer(Receipt("1"))
    output.answer(CloseConnection())
    ending.on_last_answer.assert_called_once_with()
    ending.life.state = state
    output.flush()
    assert rig.read() == b"[1]"
    ending.half_close.assert_called_once_with()


@pytest.mark.parametrize("state", [Life.PARKED, Life.CLOSED])
def test_output_without_a_socket_sends_nothing(rig: Rig, state: Life) -> None:
    ending = stub_ending()
    output = rig.output(ending)
    output.answer(Receipt("1"))
    ending.life.state = state
    output.flush()
    assert rig.read() == b"" and not ending.half_close.called


@pytest.mark.parametrize("state", [Life.STOPPING, Life.STOPPING_CLOSING])
def test_output_of_a_broker_that_stops_does_not_wait_for_the_socket(rig: Rig, state: Life) -> None:
    ending = stub_ending()
    output = rig.output(ending)
    ending.life.state = state
    output.deliver(consumer("a"), cast(Any, [bytes(50_000)]))
    output.flush()
    assert rig.read() and not rig.loop.writers and not ending.half_close.called


class Quiet:
    """Silence that a test begins and ends."""

    def __init__(self, rig: Rig) -> None:
        self._log = mock.Mock(silent_from=inf)
        rig.broker.silence = self._silence = Silence(self._log)

    def begin(self) -> None:
        self._log.silent_from = 0.0

    def end(self) -> None:
        self._log.silent_from = inf
        self._silence.wake_all()


def written_later(rig: Rig) -> bytes:
    """Return what the output writes while it watches the socket."""
    got = b""
    while rig.loop.writers:
        rig.loop.writers[rig.sock]()
        got += rig.read()
    return got


def test_output_of_a_silent_broker_is_written_after_the_silence(rig: Rig) -> None:
    quiet = Quiet(rig)
    output = rig.output(stub_ending())
    quiet.begin()
    output.deliver(consumer("a"), cast(Any, [b"x"]))
    output.flush()
    output.answer(Receipt("1"))
    output.flush()
    assert not rig.loop.writers and rig.read() == b""
    assert not rig.broker.on_all_sent.called
    quiet.end()
    assert written_later(rig) == b"a:x[1]"
    rig.broker.on_all_sent.assert_called_once_with(SESSION)


def test_unsent_output_of_a_silent_broker_waits_without_watching_the_socket(rig: Rig) -> None:
    quiet = Quiet(rig)
    output = rig.output(stub_ending())
    large = bytes(500_000)
    output.deliver(consumer("a"), cast(Any, [large]))
    output.flush()
    got = rig.read()
    quiet.begin()
    rig.loop.writers[rig.sock]()
    assert not rig.loop.writers and rig.read() == b""
    quiet.end()
    assert got + written_later(rig) == b"a:" + large


def test_connection_that_ends_in_silence_is_not_watched_after_it(rig: Rig) -> None:
    quiet = Quiet(rig)
    ending = stub_ending()
    output = rig.output(ending)
    quiet.begin()
    output.answer(Receipt("1"))
    output.flush()
    ending.life.state = Life.CLOSED
    quiet.end()
    assert not rig.loop.writers


def test_silent_broker_sends_heart_beats_before_what_waits(rig: Rig) -> None:
    quiet = Quiet(rig)
    output = rig.output(stub_ending())
    quiet.begin()
    output.send_heart_beat()
    output.deliver(consumer("a"), cast(Any, [b"x"]))
    output.send_heart_beat()
    output.flush()
    output.send_heart_beat()
    assert rig.read() == b"..."
    quiet.end()
    assert written_later(rig) == b"a:x"


def test_silent_broker_sends_no_heart_beat_within_a_frame(rig: Rig) -> None:
    quiet = Quiet(rig)
    output = rig.output(stub_ending())
    output.deliver(consumer("a"), cast(Any, [bytes(500_000)]))
    output.flush()
    got = rig.read()
    quiet.begin()
    for _ in range(2):
        output.send_heart_beat()
    assert rig.read() == b""
    quiet.end()
    rig.loop.writers[rig.sock]()
    assert got + written_later(rig) == b"a:" + bytes(500_000)


def test_heart_beat_that_the_socket_takes_in_part_goes_on_after_the_silence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replies, "heart_beat", b"(beat)")
    quiet = Quiet(rig)
    output = rig.output(stub_ending())
    quiet.begin()
    output.deliver(consumer("a"), cast(Any, [b"x"]))
    output.flush()
    send = rig.socket.send
    for taken in (0, 2):
        rig.socket.send = lambda data, taken=taken: send(data[:taken])  # type: ignore[misc]
        output.send_heart_beat()
        output.send_heart_beat()
    rig.socket.send = send
    assert rig.read() == b"(b"
    quiet.end()
    assert written_later(rig) == b"eat)a:x"


def test_output_reports_a_broken_socket_not_within_the_flush(rig: Rig) -> None:
    ending = stub_ending()
    output = rig.output(ending)
    rig.here.close()
    output.answer(Receipt("1"))
    output.flush()
    assert not ending.on_socket_broken.called
    [(action, arguments)] = rig.loop.soon
    assert action is ending.on_socket_broken and "cannot write to the connection" in str(arguments)


def test_output_with_too_many_unread_answers_is_reported(rig: Rig) -> None:
    ending = stub_ending()
    output = rig.output(ending)
    output.add_frame(bytes(UNSENT_ANSWER_BYTES_MAX))
    output.add_frame(bytes(UNSENT_ANSWER_BYTES_MAX))
    output.flush()
    [[reason]] = [call.args for call in ending.on_answers_unread.call_args_list]
    assert reason.endswith(f"bytes of unread answers, at most {UNSENT_ANSWER_BYTES_MAX}: read them")


def test_output_counts_unread_answers_until_they_are_read_or_the_connection_closes(rig: Rig) -> None:
    ending = stub_ending()
    output = rig.output(ending)
    counted = rig.broker.unread_answers.update
    output.answer(Receipt("taken at once"))
    output.flush()
    assert not counted.called
    while not counted.called:
        output.answer(Receipt("x" * 1000))
        output.flush()
    assert counted.call_args.args[0] is ending and 0 < counted.call_args.args[1] <= 1002
    output.answer(Receipt("y"))
    output.flush()
    first = counted.call_args.args[1]
    assert first > 3
    while rig.loop.writers:
        rig.read()
        rig.loop.writers[rig.sock]()
    assert counted.call_args.args == (ending, 0)
    counted.reset_mock()
    output.forget_answers()
    assert not counted.called
    while not counted.called:
        output.answer(Receipt("x" * 1000))
        output.flush()
    output.forget_answers()
    assert counted.call_args.args == (ending, 0)


def test_unread_answers_are_joined_and_keep_their_order_among_messages(rig: Rig) -> None:
    output = rig.output(stub_ending())
    filling = bytes(50_000)
    output.add_frame(filling)
    output.flush()
    expected = filling
    for number in range(5):
        for name in "abc":
            output.answer(Receipt(f"{name}{number}"))
            expected += f"[{name}{number}]".encode()
            output.flush()
        output.deliver(consumer("s"), cast(Any, [b"message"]))
        output.flush()
        expected += b"s:message"
    # The first frame, and five times the answers and a message.
    assert len(cast(Any, output)._unsent) == 1 + 5 * 2
    received = rig.read()
    while rig.loop.writers:
        rig.loop.writers[rig.sock]()
        received += rig.read()
    assert received == expected


def test_heart_beat_is_sent_only_after_an_interval_without_output(rig: Rig) -> None:
    output = rig.output(stub_ending())
    output.answer(Receipt("1"))
    output.flush()
    output.send_heart_beat()
    assert rig.read() == b"[1]"
    output.send_heart_beat()
    assert rig.read() == b"."


# ---- Input ----


def test_input_executes_what_it_reads_while_open_and_discards_it_after(rig: Rig) -> None:
    ending = stub_ending()
    made = rig.input(ending)
    rig.here.sendall(b"frame")
    made.on_readable()
    rig.wire.receive.assert_called_once_with(b"frame")
    ending.life.enter_after(LifeEvent.DISCARD)
    rig.here.sendall(b"more")
    made.on_readable()
    assert rig.wire.receive.call_count == 1
    with pytest.raises(BlockingIOError):
        rig.sock.recv(1)


def test_input_without_capacity_is_not_read_until_it_is_resumed(rig: Rig) -> None:
    made = rig.input(stub_ending())
    made.watch()
    rig.broker.capacity.may_read.return_value = False
    rig.here.sendall(b"frame")
    made.on_readable()
    assert made.is_paused and not rig.loop.readers and not rig.wire.receive.called
    rig.broker.capacity.wait.assert_called_once_with(SESSION, needs_disk=False)
    rig.broker.capacity.may_read.return_value = True
    made.resume()
    assert rig.loop.readers and not made.is_paused


def test_commands_that_wait_are_executed_when_input_is_resumed(rig: Rig) -> None:
    made = rig.input(stub_ending())
    rig.wire.receive.side_effect = lambda _: iter(["second"])
    rig.broker.execute.return_value = PendingCommand(cast(Any, "first"), WaitsFor.DISK)
    rig.here.sendall(b"frame")
    made.on_readable()
    assert made.is_paused and made.has_waiting_commands
    rig.broker.capacity.wait.assert_called_once_with(SESSION, needs_disk=True)
    executed: list[object] = []
    rig.broker.execute.side_effect = lambda _, commands: executed.extend(commands)
    made.resume()
    assert executed == ["first", "second"] and not made.has_waiting_commands


def test_commands_that_wait_are_forgotten_when_input_ends(rig: Rig) -> None:
    ending = stub_ending()
    made = rig.input(ending)
    rig.broker.execute.return_value = PendingCommand(None, WaitsFor.OTHERS)
    rig.here.sendall(b"frame")
    made.on_readable()
    rig.broker.capacity.read_turns.wait_for_others.assert_called_once_with(SESSION)
    rig.wire.pending += b"half"
    ending.life.enter_after(LifeEvent.DISCARD)
    made.discard()
    made.resume()
    assert rig.broker.execute.call_count == 1 and not rig.wire.pending and not rig.loop.readers


def test_commands_of_a_connection_that_one_of_them_has_closed_do_not_wait(rig: Rig) -> None:
    ending = stub_ending()
    made = rig.input(ending)

    def close(*_: object) -> PendingCommand:
        ending.life.state = Life.CLOSED
        rig.wire.pending += bytes(1 << 20)
        return PendingCommand(None, WaitsFor.OTHERS)

    rig.broker.execute.side_effect = close
    rig.here.sendall(b"frame")
    made.on_readable()
    assert not made.has_waiting_commands
    assert (
        not rig.broker.capacity.read_turns.wait_for_others.called
        and not rig.broker.capacity.note_incomplete_frame.called
    )


def test_input_reports_how_the_client_has_ended(rig: Rig) -> None:
    ending = stub_ending()
    made = rig.input(ending)
    error = RemoteProtocolError("no", Code.LIMIT)
    rig.broker.execute.side_effect = error
    rig.here.sendall(b"frame")
    made.on_readable()
    ending.on_refused.assert_called_once_with(error, "r")
    rig.broker.execute.side_effect = None
    rig.wire.is_closed = True
    rig.here.sendall(b"frame")
    made.on_readable()
    ending.on_disconnect.assert_called_once_with()
    rig.here.close()
    made.on_readable()
    ending.on_eof.assert_called_once_with()


# ---- Ending ----


def state_of(ending: Ending) -> Life:
    return ending.life.state


def answers(rig: Rig) -> list[type]:
    return [type(call.args[1]) for call in rig.broker.answer.call_args_list]


def test_refused_client_gets_an_error_then_the_close(rig: Rig) -> None:
    ending = rig.ending()
    ending.refuse("no", Code.LIMIT)
    assert state_of(ending) is Life.DISCARDING and answers(rig) == [ErrorAnswer, CloseConnection]
    ending.refuse("once more", Code.LIMIT)
    assert rig.broker.ends.lost.call_count == 1 and len(answers(rig)) == 2
    output = ending.output
    for call in rig.broker.answer.call_args_list:
        output.answer(call.args[1])
    assert state_of(ending) is Life.CLOSING
    output.flush()
    assert state_of(ending) is Life.LINGERING and rig.read() == b"<limit>" and rig.here.recv(1) == b""
    rig.here.close()
    rig.loop.readers[rig.sock]()
    assert state_of(ending) is Life.CLOSED and not rig.loop.timers
    rig.broker.connection_closed.assert_called_once_with(SESSION)
    rig.on_closed.assert_called_once_with()


def test_client_that_has_closed_its_side_gets_what_is_due_and_no_time_to_linger(rig: Rig) -> None:
    ending = rig.ending()
    rig.here.shutdown(socket.SHUT_WR)
    rig.loop.readers[rig.sock]()
    assert state_of(ending) is Life.DISCARDING and answers(rig) == [CloseConnection]
    assert rig.broker.capacity.read_turns.end.call_count == 1, "it takes time from others"
    output = ending.output
    output.answer(Receipt("1"))
    output.answer(CloseConnection())
    output.flush()
    assert rig.read() == b"[1]" and state_of(ending) is Life.CLOSED


def test_lost_connection_is_parked_and_ends_without_a_takeover(rig: Rig) -> None:
    ending = rig.ending()
    rig.broker.ends.park.return_value = True
    ending.on_socket_broken("cut")
    assert state_of(ending) is Life.PARKED and rig.here.recv(1) == b""
    ending.on_socket_broken("cut again")
    ending.lose("cut again")
    ending.close()
    assert state_of(ending) is Life.PARKED and not rig.on_closed.called
    ending._timers["takeover"].run()  # type: ignore[attr-defined]
    assert state_of(ending) is Life.CLOSED
    rig.broker.ends.lost.assert_called_once_with(SESSION, is_exempt=False)
    assert rig.broker.ends.soon.call_count == 1


def test_closed_connection_is_freed_without_a_garbage_collection(rig: Rig) -> None:
    ending = rig.ending()
    ending.output.answer(Receipt("1"))
    ending.output.flush()
    parts: list[weakref.ref[Any]] = [weakref.ref(each) for each in (ending, ending.input, ending.output)]
    gc.disable()
    try:
        ending.lose("cut")
        del ending
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("is_parked", [False, True])
def test_takeover_closes_the_old_connection_at_once(rig: Rig, is_parked: bool) -> None:
    ending = rig.ending()
    if is_parked:
        rig.broker.ends.park.return_value = True
        ending.on_socket_broken("cut")
    ending.take_over(is_exempt=True)
    assert state_of(ending) is Life.CLOSED and rig.read() == b""
    rig.broker.ends.lost.assert_called_once_with(SESSION, is_exempt=True)


@pytest.mark.parametrize("before", [Life.OPEN, Life.DISCARDING, Life.CLOSING, Life.LINGERING, Life.PARKED, Life.CLOSED])
def test_broker_that_stops_ends_a_connection_in_each_state(rig: Rig, before: Life) -> None:
    ending = rig.ending()
    if before in (Life.PARKED, Life.CLOSED):
        rig.broker.ends.park.return_value = before is Life.PARKED
        ending.on_socket_broken("cut")
    elif before is not Life.OPEN:
        ending.on_disconnect()
        if before is not Life.DISCARDING:
            ending.on_last_answer()
        if before is Life.LINGERING:
            ending.output.flush()
    assert state_of(ending) is before
    ending.stop()
    assert not (rig.loop.readers or rig.loop.writers or rig.loop.timers)
    if before is Life.CLOSED:
        return
    ending.end()
    if before is not Life.PARKED:
        assert state_of(ending) is Life.LINGERING and rig.here.recv(1) == b""
        ending._timers["linger"].run()  # type: ignore[attr-defined]
    assert state_of(ending) is Life.CLOSED
    rig.on_closed.assert_called_once_with()


def test_connection_that_lingers_before_the_end_of_a_stop_keeps_its_time(rig: Rig) -> None:
    ending = rig.ending()
    ending.on_disconnect()
    ending.stop()
    ending.output.answer(CloseConnection())
    assert state_of(ending) is Life.STOPPING_CLOSING
    ending.output.flush()
    linger = ending._timers["linger"]
    ending.end()
    assert state_of(ending) is Life.LINGERING and ending._timers == {"linger": linger}
