"""Input: reads the socket of one client, and passes its commands to the broker.

Reading pauses while the broker has no capacity, and while commands that were read wait: for disk space, for the check
of a password, for the queues of a message to be found, or until other connections were served."""

import ssl
from asyncio import AbstractEventLoop
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Protocol

from truenext.broker.broker import Broker
from truenext.broker.peer import WaitsFor
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import OtherProtocolError, RemoteProtocolError
from truenext.model.commands import Command
from truenext.model.limits import INCOMPLETE_FRAME_BYTES, READ_BYTES
from truenext.server.client_socket import ClientSocket
from truenext.server.life import OPEN, WITHOUT_SOCKET, ConnectionLife
from truenext.server.output import Output
from truenext.tls import NoTlsError, reason_of
from truenext.wire.session import WireSession


class InputEnding(Protocol):
    """Functions that `Input` calls when it finds that a connection must end. `Ending` has them, and tests replace
    them."""

    life: ConnectionLife

    def on_eof(self) -> None:
        """End or park the connection: the client has closed its side of the socket."""

    def on_socket_broken(self, reason: str) -> None: ...

    def on_plain_text(self) -> None:
        """End the connection of a client that does not speak TLS to a listener with TLS."""

    def on_disconnect(self) -> None: ...

    def on_refused(self, error: RemoteProtocolError, receipt: str | None) -> None:
        """End the connection after a refused frame. `receipt` is the receipt that the frame requested, if any."""

    def on_other_protocol(self, error: OtherProtocolError) -> None: ...

    def on_outgoing(self) -> None:
        """Send the bytes of `WireSession.outgoing`."""


class Input:
    def __init__(
        self,
        session: ConnectionState,
        wire: WireSession,
        broker: Broker,
        client_socket: ClientSocket,
        loop: AbstractEventLoop,
        output: Output,
        ending: InputEnding,
    ) -> None:
        """`output` sends the bytes that TLS itself generates, such as those of its handshake."""
        self._session = session
        self._wire = wire
        self._pending = wire.pending
        self._outgoing = wire.outgoing
        self._broker = broker
        self._capacity = broker.capacity
        self._incomplete_frames = broker.capacity.incomplete_frames
        self._read_turns = broker.capacity.read_turns
        self._socket = client_socket
        self._has_tls = client_socket.tls is not None
        self._loop = loop
        self._output = output
        self._ending = ending
        self._life = ending.life
        self._has_large_frame = False
        """True if the incomplete frame is large enough to count towards the memory for incomplete frames."""
        self.is_paused = False
        """True if the socket is not read until `resume`."""
        self._waiting: Iterator[Command] | None = None
        """Commands that were read and wait to be executed; None if none wait."""
        self._last_received_at = loop.time()
        self._needs_socket_check = False

    @property
    def has_waiting_commands(self) -> bool:
        return self._waiting is not None

    @property
    def may_have_unread_request(self) -> bool:
        """True if reading is paused, so that a request of the client may wait in the socket. False while a large frame
        is incomplete: its other bytes come first."""
        return self.is_paused and not self._has_large_frame

    @property
    def silence_s(self) -> float:
        return self._loop.time() - self._last_received_at

    def count_as_heard(self) -> None:
        """Restart the time of silence, as if the client had just sent input."""
        self._last_received_at = self._loop.time()

    def watch(self) -> None:
        """Read the socket when it has bytes."""
        self._socket.watch_reads(self.on_readable)

    def on_readable(self) -> None:
        """Read the socket once, and execute what was read. In states after OPEN, the socket is still read but its input
        is discarded, because closing a socket with unread input resets the connection."""
        is_open = self._life.state is OPEN
        if is_open:
            if not self._capacity.may_read(self._session):
                self._pause()
                self._capacity.wait(self._session, needs_disk=False)
                return
            if not self._read_turns.has_time(self._session):
                self._pause()
                self._read_turns.wait(self._session)
                return
        size = READ_BYTES if self._wire.is_connected else self._wire.rules.login_bytes_max
        if (self._has_large_frame or self._incomplete_frames.is_full) and is_open:
            size = min(size, self._capacity.bytes_to_read(self._session, len(self._pending)))
            if not size:
                self._pause()
                return
        try:
            data = self._socket.recv(size)
        except (BlockingIOError, InterruptedError):
            if self._has_tls:
                # Perhaps a part of a TLS record has come, and then the end of the socket.
                self._needs_socket_check = True
                self._output.flush_tls()
            return
        except NoTlsError:
            self._ending.on_plain_text()
            return
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not self._wire.is_connected:
                self._broker.users.log_failed_handshake(self._session, reason_of(error))
            self._read_turns.end(self._session, partial(self._ending.on_socket_broken, f"connection broken: {error}"))
            return
        if self._has_tls:
            self._output.flush_tls()
        if not data:
            self._read_turns.end(self._session, self._ending.on_eof)
        elif is_open:
            self._last_received_at = self._loop.time()
            self._needs_socket_check = True
            self._execute(self._wire.receive(data))
            is_large = self._has_large_frame or len(self._pending) >= INCOMPLETE_FRAME_BYTES
            if is_large and self._life.state is OPEN:
                self._note_incomplete_frame(len(data))

    def resume(self) -> None:
        """Continue after a pause: execute the commands that wait, then read the socket again."""
        self.is_paused = False
        self._last_received_at = self._loop.time()
        if self._life.state is not OPEN:
            return
        commands, self._waiting = self._waiting, None
        if commands is not None:
            self._execute(commands)
            if self._has_large_frame:
                self._note_incomplete_frame(0)
        if not (self.is_paused or self._life.state in WITHOUT_SOCKET):
            self.watch()
            if commands is None:
                # It has waited for its turn to be read: in the next pass others might be read before.
                self.on_readable()

    def execute_due(self) -> None:
        """Execute the commands that the session has on its own. If commands wait, they bring these with them."""
        if self._life.state is OPEN and self._waiting is None:
            self._execute(self._wire.receive(b""))

    def discard(self) -> None:
        """Discard commands that wait, and the incomplete frame, as input ends."""
        self._waiting = None
        self._pending.clear()
        if self._has_large_frame:
            self._note_incomplete_frame(0)

    def check_socket(self) -> None:
        """End the connection if its socket has broken; called once a second. uvloop reports a broken socket only once,
        and reports it even while data is left to read. So this check runs once a second instead of after each read."""
        if self._needs_socket_check and self._life.state not in WITHOUT_SOCKET:
            self._needs_socket_check = False
            if self._socket.is_broken():
                self._broker.ends.soon(self._session, partial(self._ending.on_socket_broken, "connection broken"))

    def _execute(self, commands: Iterator[Command]) -> None:
        try:
            try:
                waiting = self._broker.execute(self._session, commands)
            finally:
                if self._outgoing and self._life.state is OPEN:
                    self._ending.on_outgoing()
        except OtherProtocolError as error:
            self._ending.on_other_protocol(error)
            return
        except RemoteProtocolError as error:
            self._ending.on_refused(error, self._wire.last_receipt)
            return
        if waiting is not None:
            if self._life.state is not OPEN:
                # A command has ended the connection, as its client does not read the answers.
                return
            if waiting.command is None:
                self._wire.accept_last()
                self._waiting = commands
            else:
                self._waiting = chain([waiting.command], commands)
            self._pause()
            if waiting.waits_for is WaitsFor.DISK:
                self._capacity.wait(self._session, needs_disk=True)
            elif waiting.waits_for is WaitsFor.OTHERS:
                self._read_turns.wait_for_others(self._session)
            elif waiting.waits_for is WaitsFor.SILENCE:
                self._read_turns.wait(self._session)
        elif self._wire.is_closed:
            self._ending.on_disconnect()

    def _pause(self) -> None:
        self.is_paused = True
        self._socket.unwatch_reads()

    def _note_incomplete_frame(self, received: int) -> None:
        """Report the size of the incomplete frame to the broker, after `received` bytes more."""
        size = len(self._pending)
        self._has_large_frame = size >= INCOMPLETE_FRAME_BYTES
        self._capacity.note_incomplete_frame(self._session, size, received)
