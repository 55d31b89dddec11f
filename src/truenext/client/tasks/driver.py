"""Driver of a client in an event loop: has its socket and its clock, and runs its flows (client/core/waiting.py).

All code runs in the loop. Only the socket's writes have a lock, because heartbeat_thread.py writes from another thread.
Received bytes are processed at once. Bytes are written at once as far as the socket accepts them, and the rest when the
socket is ready. After a long blocking of the loop, timers are due while received bytes are unread, and event loops
differ in which they handle first. So the driver reads the socket before each decision that depends on the time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from functools import partial
from typing import TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary, WeakSet

from truenext.client import log
from truenext.client.base_driver import BaseDriver
from truenext.client.connecting import connect_steps
from truenext.client.core.buffer import ReceivedMessage, Subscription
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.flows import add_exit_failure_note
from truenext.client.core.health import Health, make_health
from truenext.client.core.isolation import HandlerIsolation
from truenext.client.core.link import HEART_BEAT
from truenext.client.core.session import SessionCore
from truenext.client.core.waiting import Flow, Wait
from truenext.client.password_file import current_password
from truenext.client.tasks.heartbeat_thread import HeartbeatThread
from truenext.clock import monotonic
from truenext.errors import ClosedError, ConfigurationError, ConnectionLost
from truenext.model.limits import READ_BYTES
from truenext.model.url import Address
from truenext.tls import TlsSocket

LOOP_BLOCKED_S = 1.0
"""Lateness of a timer, in seconds, above which the event loop is reported as blocked."""

STOPPED_CLOCK_S = 0.001
"""Seconds after which a clock counts as stopped if its time has not changed."""

S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_drivers: WeakSet[Driver] = WeakSet()
"""All drivers, so that the end of the program can warn of their unconfirmed sends."""


@atexit.register
def _at_exit() -> None:
    """Warn of unconfirmed sends at the end of the program. No event loop runs any more in which to wait for
    confirmations."""
    for driver in list(_drivers):
        driver.warn_if_unconfirmed()


_isolations: WeakKeyDictionary[asyncio.AbstractEventLoop, HandlerIsolation] = WeakKeyDictionary()

_blocked_until: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
"""Time at which the last reported blocking of each loop ended. All connections of a loop notice a blocking, but only
one reports it."""


class Driver(BaseDriver):
    def __init__(self, options: ConnectOptions, name: str, make_message: type[ReceivedMessage]) -> None:
        """Make a driver for the running loop.

        Raises: ConfigurationError if the loop's clock stands still, or a file of the credentials cannot be used
        """
        self.loop = loop = asyncio.get_running_loop()
        check_clock_runs(loop)
        super().__init__(
            options,
            name,
            make_message,
            # `time` is looked up at each call: tests that stop the clock replace this method of the loop.
            clock=lambda: loop.time(),
            report=log.report,
            has_owner_ended=_has_ended,
        )
        self.isolation = _isolations.setdefault(self.loop, HandlerIsolation())
        """Isolation of messages that may crash the process, shared by all handlers in this loop."""
        self._heartbeat_thread: HeartbeatThread | None = None
        self._is_flush_scheduled = False
        self._is_reading = True
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        """Time at which the timer is due. Stored here because a timer of uvloop that was due when it was made does not
        report its time."""
        self._socket_closed: asyncio.Future[None] | None = None
        self._connect_task: asyncio.Task[None] | None = None
        self._is_confirmation_checked = False
        _drivers.add(self)

    def warn_if_unconfirmed(self, warn: Callable[[Client], None] = log.warn_unconfirmed) -> None:
        """Warn, once, that sends may be lost because the program or its event loop has ended."""
        if not self._is_confirmation_checked and not self._is_forked:
            self._is_confirmation_checked = True
            warn(self.client)

    def __del__(self) -> None:
        # The event loop has ended, and the connection was not closed. A failed `__init__` leaves no client.
        if hasattr(self, "_is_confirmation_checked"):
            self.warn_if_unconfirmed()

    def start(self) -> None:
        self._connect_task = self.loop.create_task(self._connect_loop(), name="truenext connection")
        options = self.client.options
        if options.heartbeat_thread and options.heart_beat_s:
            self._heartbeat_thread = HeartbeatThread(self, options.heart_beat_s)
        self._set_timer()

    # ---- Callers ----

    def check_caller(self) -> None:
        """Check that the caller runs in the process and in the event loop of the connection. Raises: ClosedError if
        not"""
        # In spite of its underscore the name is one of those that asyncio exports.
        if asyncio._get_running_loop() is not self.loop:
            # A forked child has no running loop.
            raise self._wrong_caller_error()

    def _wrong_caller_error(self) -> ClosedError:
        if self._is_forked:
            return ClosedError(
                "the connection belongs to the process that this process was forked from: open a new connection"
            )
        return ClosedError("the connection belongs to another event loop: open a new connection in this loop")

    def run_step(self, step: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function that does not wait."""
        # Inlined `check_caller`, because this runs for each message.
        if asyncio._get_running_loop() is not self.loop:
            raise self._wrong_caller_error()
        return step(*args)

    run_step_of_many = run_step
    """Call a function that does not wait. In the driver for threads, a thread writes the output of many such calls
    together."""

    def step_of_many(self, step: S) -> S:
        """Check the caller once, and return `step`, which the caller may then call many times."""
        self.check_caller()
        return step

    def try_receive(self, session: SessionCore, subscription: Subscription, owner: object) -> ReceivedMessage | None:
        """Return the next message if it is there without waiting, otherwise None. This is the fast path of
        receiving."""
        if asyncio._get_running_loop() is not self.loop:
            raise self._wrong_caller_error()
        return session.try_receive(subscription, owner)

    def health(self) -> Health:
        """Return the health of the connection. This also works after the loop has ended."""
        return make_health(self.client)

    async def run_flow(self, flow: Flow[T], on_interrupted: Callable[[T], None] | None = None) -> T:
        """Run a flow (client/core/waiting.py) to its end, and return its result. `on_interrupted` is ignored; it exists
        because both drivers have the same signature."""
        self.check_caller()
        try:
            wait = next(flow)
            while True:
                self._after_step()
                try:
                    in_time = await self._wait(wait)
                except BaseException as error:
                    wait = flow.throw(error)
                else:
                    wait = flow.send(in_time)
        except StopIteration as ended:
            value: T = ended.value
            return value
        finally:
            self._after_step()

    async def exit_block(self, flow: Flow[None], error: BaseException | None) -> None:
        """Run the flow that ends a block. `error` is the exception that has left the block; None at a normal end. If
        the flow fails, too, its failure only becomes a note of `error`."""
        try:
            await self.run_flow(flow)
        except Exception as exit_error:
            if error is None:
                raise
            add_exit_failure_note(error, exit_error)

    async def _wait(self, wait: Wait) -> bool:
        signal, deadline = wait
        if signal.is_set:
            return True
        future = self.loop.create_future()
        set_result = partial(_set_done, future)

        def on_deadline() -> None:
            self._read_available()
            set_result()

        signal.add_callback(set_result)
        timer = None if deadline is None else self.loop.call_at(deadline, on_deadline)
        try:
            await future
        finally:
            signal.remove_callback(set_result)
            if timer is not None:
                timer.cancel()
        return signal.is_set

    # ---- Connecting ----

    async def _connect_loop(self) -> None:
        client = self.client
        try:
            while client.error is None:
                address, delay = client.connect_backoff.next_address_and_delay()
                if delay:
                    await asyncio.sleep(delay)
                try:
                    password = current_password(client.options.credentials)
                    client.start_attempt()
                    async with asyncio.timeout(client.attempt_timeout_s):
                        sock = await self._connect(address)
                except (ConfigurationError, OSError, UnicodeError) as error:
                    # An invalid host name (UnicodeError) counts as an unknown one.
                    is_own_timeout = type(error) is TimeoutError and error.errno is None
                    client.on_connect_failed(client.attempt_timeout_error() if is_own_timeout else error)
                    continue
                self._start_link(sock, address, password)
                # It is not kept while the connection lasts.
                del password
                assert self._socket_closed is not None, "it has begun"
                await self._socket_closed
        except Exception as error:
            self._fail_internally(error)

    async def _connect(self, address: Address) -> socket.socket | TlsSocket:
        infos = await self.loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        steps = connect_steps(self.client, address, infos)
        try:
            while True:
                await self._until_ready(*next(steps))
        except StopIteration as ended:
            connected: socket.socket | TlsSocket = ended.value
            return connected
        finally:
            steps.close()

    async def _until_ready(self, sock: socket.socket, event: int) -> None:
        loop = self.loop
        is_read = event == selectors.EVENT_READ
        future = loop.create_future()
        (loop.add_reader if is_read else loop.add_writer)(sock, _set_done, future)
        try:
            await future
        finally:
            (loop.remove_reader if is_read else loop.remove_writer)(sock)

    def _start_link(self, sock: socket.socket | TlsSocket, address: Address, password: str | None) -> None:
        self._socket_closed = self.loop.create_future()
        self.loop.add_reader(sock, self._on_readable)
        super()._start_link(sock, address, password)
        self._after_step()

    def _close_socket(self) -> None:
        # In a forked child the lock may be held by a thread that does not exist there.
        with contextlib.nullcontext() if self._is_forked else self._locked():
            sock, self._sock = self._sock, None
        if sock is None:
            return
        if not self._is_forked:
            self.loop.remove_reader(sock)
            self.loop.remove_writer(sock)
            with contextlib.suppress(OSError):
                # This closes the connection even if a forked process has the socket, too.
                sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        self._unwritten = None
        if self._socket_closed is not None:
            _set_done(self._socket_closed)

    async def stop(self) -> None:
        """Close the socket, and end the connecting task, the timer and the heart-beat thread."""
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.stop()
            self._heartbeat_thread = None
        self._close_socket()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connect_task is not None and self._connect_task is not asyncio.current_task():
            self._connect_task.cancel()
            # An await of the task itself would raise its CancelledError in the caller.
            await asyncio.wait({self._connect_task})

    def _fail_internally(self, error: Exception) -> None:
        """Log an internal error, and end the client with it. The callers get the error."""
        self.client.fail_permanently(log.log_internal_error(error))
        self._close_socket()

    # ---- Reading and writing ----

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a forked child. A child has a copy of the running loop, but the socket belongs to its
        parent."""
        return os.getpid() != self.process_id

    def _on_readable(self) -> None:
        if self._is_forked:
            return
        assert self._sock is not None, "it is read"
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._on_socket_lost(error)
            return
        if not data:
            self._on_socket_lost(ConnectionLost("the broker has closed the connection"))
            return
        try:
            self.client.receive_data(data)
            self._after_step()
        except Exception as error:
            self._fail_internally(error)
        if self.client.is_read_buffer_full and self._sock is not None:
            self.loop.remove_reader(self._sock)
            self._is_reading = False

    def _read_available(self) -> None:
        """Read the bytes that have arrived already, so that no deadline passes only because the loop was late."""
        if self._sock is not None and self._is_reading:
            self._on_readable()

    def _on_socket_lost(self, error: Exception) -> None:
        super()._on_socket_lost(error)
        self._after_step()

    def _locked(self) -> contextlib.AbstractContextManager[object]:
        return self._write_lock or contextlib.nullcontext()

    def _on_not_written(self, sock: socket.socket | TlsSocket) -> None:
        if self._write_error is not None:
            self.loop.call_soon(self._on_write_error, sock)
        else:
            self.loop.add_writer(sock, self._on_writable)

    def send_heart_beat_if_idle(self, last_written_at: float) -> float:
        """Write the unwritten bytes, or else a heart-beat. Do nothing if the loop has written since `last_written_at`.
        Return the argument for the next call. The heart-beat thread calls this."""
        with self._locked():
            link, sock = self._link, self._sock
            if link is None or sock is None or not (link.is_up and link.heartbeat_interval_s):
                return last_written_at
            written_at = link.written_at
            if written_at == last_written_at:
                if self._unwritten is not None:
                    self._send(sock, self._unwritten)
                    return written_at
                # If the connection is lost, the loop notices that itself.
                with contextlib.suppress(OSError):
                    if not sock.send(HEART_BEAT):
                        # TLS has encrypted the heart-beat, and the socket has not accepted it: write it before others.
                        self._unwritten = memoryview(HEART_BEAT)
                        # A loop that was closed meanwhile sends nothing more.
                        with contextlib.suppress(RuntimeError):
                            self.loop.call_soon_threadsafe(self._watch_unwritten, sock)
            return written_at

    def _watch_unwritten(self, sock: socket.socket | TlsSocket) -> None:
        if self._sock is sock and self._unwritten is not None:
            self.loop.add_writer(sock, self._on_writable)

    def _on_write_error(self, sock: socket.socket | TlsSocket) -> None:
        if self._sock is sock and self._write_error is not None:
            self._on_socket_lost(self._write_error)

    def _on_writable(self) -> None:
        if self._is_forked:
            return
        sock = self._sock
        assert sock is not None, "it is waited for"
        with self._locked():
            if self._unwritten is not None:
                self._send(sock, self._unwritten)
        if self._write_error is not None:
            self._on_socket_lost(self._write_error)
            return
        if self._unwritten is not None:
            return
        self.loop.remove_writer(sock)
        try:
            if self.flush():
                self.client.on_drained()
        except Exception as error:
            self._fail_internally(error)

    def _flush_soon(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_scheduled = False
        if self._is_forked:
            return
        try:
            self.flush()
        except Exception as error:
            self._fail_internally(error)

    # ---- Time ----

    def _after_step(self) -> None:
        """Bring the driver up to date after a step: close the socket of a lost connection, start reading again if
        possible, set the timer."""
        if self._sock is not None and self.client.link is not self._link:
            self._close_socket()
        if not self._is_reading and self._sock is not None and not self.client.is_read_buffer_full:
            self._is_reading = True
            self.loop.add_reader(self._sock, self._on_readable)
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.client.delayed_calls.next_due_at
        timer = self._timer
        if due is None or self.client.error is not None:
            return
        if timer is None or due < self._timer_at:
            if timer is not None:
                timer.cancel()
            self._timer = self.loop.call_at(due, self._on_timer)
            self._timer_at = due

    def _on_timer(self) -> None:
        if self._is_forked:
            return
        self._timer = None
        late_s = self.loop.time() - self._timer_at
        if late_s > LOOP_BLOCKED_S and self._timer_at > _blocked_until.get(self.loop, 0.0):
            _blocked_until[self.loop] = self.loop.time()
            log.report(
                "the event loop was blocked for %(seconds)s s: look for a call that takes long without an await; "
                "with PYTHONASYNCIODEBUG=1 asyncio logs the task of such a call",
                {"seconds": round(late_s, 1)},
            )
        self._read_available()
        try:
            self.client.run_due_calls()
            self._after_step()
        except Exception as error:
            self._fail_internally(error)


def check_clock_runs(loop: asyncio.AbstractEventLoop) -> None:
    """Check that the clock of a loop runs. With a stopped clock no timer would ever be due, and each wait would be
    endless.

    Raises: ConfigurationError if the clock stands still
    """
    if type(loop).time is not asyncio.BaseEventLoop.time:
        # Such as uvloop's clock, which does not change within one pass of the loop.
        return
    start, deadline = loop.time(), monotonic() + STOPPED_CLOCK_S
    while loop.time() == start:
        if monotonic() > deadline:
            raise ConfigurationError(
                "the clock of the event loop stands still, so the connection would wait for ever: with freezegun "
                "use freeze_time(..., real_asyncio=True)"
            )


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _has_ended(owner: object) -> bool:
    return isinstance(owner, asyncio.Task) and owner.done()
