"""Driver of a client with threads: has its socket and its clock, and runs its flows (client/core/waiting.py).

    callers ──lock──▶ Client, flows ──bytes──▶ socket        a caller writes at once what the socket accepts
    thread  ──lock──▶ Client ◀──bytes── socket               the thread writes the rest, reads, runs timers

One lock guards all state. No thread waits while it holds the lock. A caller that has to wait releases the lock, and
waits for a second lock, which the awaited `Signal` releases. Only the connection's thread makes and closes sockets.
This thread never runs code of the program, so the program cannot delay its reading.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import TypeVar, TypeVarTuple, cast
from weakref import WeakSet

from truenext.client import log
from truenext.client.base_driver import BaseDriver
from truenext.client.connecting import connect_steps
from truenext.client.core.buffer import ReceivedMessage, Subscription
from truenext.client.core.client import ConnectOptions
from truenext.client.core.context import ACK_DELAY_S
from truenext.client.core.flows import add_exit_failure_note
from truenext.client.core.health import Health, make_health
from truenext.client.core.isolation import HandlerIsolation
from truenext.client.core.session import SessionCore
from truenext.client.core.waiting import Flow, Wait
from truenext.client.password_file import current_password
from truenext.client.threads.interrupts import SignalSafeLock
from truenext.clock import monotonic
from truenext.errors import ClosedError, ConfigurationError, ConnectionLost, LocalProtocolError
from truenext.model.limits import READ_BYTES
from truenext.model.url import Address
from truenext.tls import TlsSocket

STOP_TIMEOUT_S = 1.0
"""Seconds that `stop` waits for the thread. The thread may be resolving a host name."""

EXIT_TIMEOUT_S = 10.0
"""Seconds that the end of the program waits for confirmations. The end of a `with` block waits as long."""
_PROGRAM_ENDS_TEXT = "the connection ends with the program"

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_drivers: WeakSet[Driver] = WeakSet()
"""All drivers, so that the end of the program can wait for their confirmations."""
_drivers_lock = threading.Lock()


@atexit.register
def _at_exit() -> None:
    """Wait for confirmations at the end of the program, while the threads of connections still run."""
    deadline = monotonic() + EXIT_TIMEOUT_S
    with _drivers_lock:
        drivers = list(_drivers)
    for driver in drivers:
        driver.wait_until_confirmed(deadline)


class Driver(BaseDriver):
    def __init__(self, options: ConnectOptions, name: str, make_message: type[ReceivedMessage]) -> None:
        """Make a driver. `start` starts its thread.

        Raises: ConfigurationError if a file of the credentials cannot be used
        """
        super().__init__(options, name, make_message, clock=monotonic, report=self._report, has_owner_ended=_has_ended)
        self.isolation = HandlerIsolation()
        """Isolation of messages that may crash the process. The isolation covers this connection only, because the
        connection's lock guards no other."""
        self._lock = threading.Lock()
        self._main_thread_id = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="truenext connection", daemon=True)
        self._pending_reports: deque[tuple[str, dict[str, object]]] = deque()
        """Reports that are written to the log when the lock is released."""
        # State of the thread's wait: the registered socket, the deadline, and how the thread is woken.
        self._selector = selectors.DefaultSelector()
        self._registered: tuple[socket.socket | TlsSocket | None, int] = (None, 0)
        self._awaited_events = 0
        """Events of the socket, as a bit mask, for which the thread waits now."""
        self._wakes_at = inf
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._is_woken = False
        self._is_stopped = False
        self._is_flush_scheduled = False
        """True if the thread will call `_flush_now` within `ACK_DELAY_S`."""
        with _drivers_lock:
            _drivers.add(self)

    def start(self) -> None:
        """Start the thread. Raises: ClosedError if the program is ending, so that no thread can start"""
        self.check_caller()
        self._thread.start()

    def wait_until_confirmed(self, deadline: float) -> None:
        """Write an ACK that waits, and wait until the broker has confirmed all sends. At the deadline, warn of sends
        that are not confirmed."""
        client = self.client
        if os.getpid() != self.process_id:
            return
        if self._is_flush_scheduled:
            self.run_step(self.flush)
        if client.unconfirmed_count and self.run_flow(client.wait_until_confirmed(deadline)):
            self._write_reports()
            log.warn_unconfirmed(client)

    def stop(self) -> None:
        """Wait for the end of the thread, which closes the socket. The client must have ended before."""
        with self.state_lock():
            self._wake_thread()
        if threading.get_ident() != self._thread.ident:
            self._thread.join(STOP_TIMEOUT_S)
        self._write_reports()

    # ---- Callers ----

    def check_caller(self) -> None:
        """Check the caller before the lock is taken. In a forked process the lock could stay locked for ever.

        Raises: ClosedError in another process than the connection's, and at the end of the program
        """
        if sys.is_finalizing():
            raise ClosedError(_PROGRAM_ENDS_TEXT)
        if os.getpid() != self.process_id:
            raise ClosedError(
                "the connection belongs to the process that this process was forked from: open a new connection"
            )

    def state_lock(self) -> threading.Lock | SignalSafeLock:
        """Return the lock for a `with` block. Only the main thread's lock defers signals."""
        return SignalSafeLock(self._lock) if threading.get_ident() == self._main_thread_id else self._lock

    def run_step(self, step: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function that does not wait, with the lock held."""
        self.check_caller()
        with self.state_lock():
            try:
                return step(*args)
            finally:
                self._after_step()

    def run_step_of_many(self, step: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function that does not wait, with the lock held. The thread writes the output of many such calls
        together."""
        self.check_caller()
        with self.state_lock():
            try:
                return step(*args)
            finally:
                self._wake_thread()

    def step_of_many(self, step: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
        """Return a function that calls `step` by `run_step_of_many`, for a caller that calls it many times."""
        self.check_caller()
        return cast("Callable[[*Ts], T]", partial(self.run_step_of_many, step))

    def try_receive(self, session: SessionCore, subscription: Subscription, owner: object) -> ReceivedMessage | None:
        """Return the next message if it is there without waiting, otherwise None. This is the fast path of
        receiving."""
        self.check_caller()
        lock = self.state_lock()
        with lock:
            received = session.try_receive(subscription, owner)
            if received is not None:
                try:
                    if isinstance(lock, SignalSafeLock):
                        lock.run_due_handlers()
                except BaseException:
                    session.on_receive_interrupted(subscription, [received])
                    raise
                finally:
                    self._after_step()
            return received

    def health(self) -> Health:
        return self.run_step(make_health, self.client)

    def run_flow(self, flow: Flow[T], on_interrupted: Callable[[T], None] | None = None) -> T:
        """Run a flow (client/core/waiting.py) to its end, and return its result. If a signal handler raises after
        the flow's end, `on_interrupted` gets the result, so that it is not lost."""
        self.check_caller()
        lock = self.state_lock()
        with lock:
            try:
                wait = next(flow)
                while True:
                    self._after_step()
                    try:
                        in_time = self._wait(wait, lock)
                    except BaseException as error:
                        wait = flow.throw(error)
                    else:
                        wait = flow.send(in_time)
            except StopIteration as ended:
                value: T = ended.value
                if on_interrupted is not None and isinstance(lock, SignalSafeLock):
                    try:
                        lock.run_due_handlers()
                    except BaseException:
                        on_interrupted(value)
                        raise
                return value
            finally:
                self._after_step()

    def exit_block(self, flow: Flow[None], error: BaseException | None) -> None:
        """Run the flow that ends a block. `error` is the exception that has left the block; None at a normal end. If
        the flow fails, too, its failure only becomes a note of `error`."""
        try:
            self.run_flow(flow)
        except Exception as exit_error:
            if error is None:
                raise
            add_exit_failure_note(error, exit_error)

    def _wait(self, wait: Wait, lock: threading.Lock | SignalSafeLock) -> bool:
        signal, deadline = wait
        if signal.is_set:
            return True
        if threading.get_ident() == self._thread.ident:
            raise LocalProtocolError(
                "the thread of the connection cannot wait for itself: do not use the connection in a log handler"
            )
        waiter = threading.Lock()
        waiter.acquire()
        release = waiter.release
        signal.add_callback(release)
        timeout = -1.0 if deadline is None else min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX)
        try:
            if isinstance(lock, SignalSafeLock):
                lock.wait(waiter, timeout)
            else:
                lock.release()
                try:
                    waiter.acquire(True, timeout)
                finally:
                    lock.acquire()
        finally:
            signal.remove_callback(release)
        return signal.is_set

    def disconnect_nowait(self) -> None:
        """Send DISCONNECT, and return without waiting for the answer."""
        self.run_step(super().disconnect_nowait)

    def _after_step(self) -> None:
        """Bring the driver up to date after a step: write pending bytes, and wake the thread if it has something to
        do."""
        if self._is_flush_due:
            self.flush()
        due = self.client.delayed_calls.next_due_at
        if (
            self.client.link is not self._link
            or (due is not None and due < self._wakes_at)
            or (self._sock is not None and self._events_needed() != self._awaited_events)
            or self._pending_reports
        ):
            self._wake_thread()

    def _events_needed(self) -> int:
        """Return the events of the socket for which the thread should wait."""
        reads = 0 if self.client.is_read_buffer_full else selectors.EVENT_READ
        return reads | (0 if self._unwritten is None else selectors.EVENT_WRITE)

    def _wake_thread(self) -> None:
        if not self._is_woken and not self._is_stopped:
            self._is_woken = True
            self._wake_writer.send(b"\0")

    # ---- The thread ----

    def _run(self) -> None:
        try:
            while self.client.error is None:
                self._connect_once()
                while self._sock is not None:
                    self._run_once()
        except Exception as error:
            exit_error = log.log_internal_error(error)
            with self._lock:
                self.client.fail_permanently(exit_error)
        finally:
            with self._lock:
                self._is_stopped = True
                self._close_socket()
                self._selector.close()
                self._wake_reader.close()
                self._wake_writer.close()
            self._write_reports()

    def _connect_once(self) -> None:
        client = self.client
        with self._lock:
            address, delay = client.connect_backoff.next_address_and_delay()
        deadline = monotonic() + delay
        while client.error is None and (now := monotonic()) < deadline:
            self._select(None, 0, deadline - now)
        try:
            password = current_password(client.options.credentials)
            sock = self._connect(address)
        except (ConfigurationError, OSError, UnicodeError) as error:
            with self._lock:
                client.on_connect_failed(error)
            return
        if sock is None:
            return
        with self._lock:
            if client.error is not None:
                sock.close()
                return
            self._start_link(sock, address, password)

    def _connect(self, address: Address) -> socket.socket | TlsSocket | None:
        """Connect a socket, and return it; None if the client has ended meanwhile. Raises: OSError if no address
        answers"""
        client = self.client
        with self._lock:
            client.start_attempt()
            deadline = monotonic() + client.attempt_timeout_s
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        steps = connect_steps(client, address, infos)
        try:
            sock, event = next(steps)
            while client.error is None:
                left_s = deadline - monotonic()
                if left_s > 0 and not self._select(sock, event, left_s):
                    continue
                # The next step may close the socket.
                self._register(None, 0)
                sock, event = next(steps) if left_s > 0 else steps.throw(client.attempt_timeout_error())
        except StopIteration as ended:
            connected: socket.socket | TlsSocket = ended.value
            return connected
        finally:
            self._register(None, 0)
            steps.close()
        return None

    def _run_once(self) -> None:
        with self._lock:
            sock = self._sock
            assert sock is not None, "it is there"
            self._awaited_events = self._events_needed()
        ready = self._select(sock, self._awaited_events)
        data: bytes | None = None
        error: Exception | None = None
        if ready & selectors.EVENT_READ:
            try:
                data = sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as read_error:
                error = read_error
        with self._lock:
            if data:
                self.client.receive_data(data)
            elif data is not None:
                error = ConnectionLost("the broker has closed the connection")
            if ready & selectors.EVENT_WRITE and self._unwritten is not None:
                self._send(sock, self._unwritten)
                if self.flush():
                    self.client.on_drained()
            if self._is_flush_due:
                self.flush()
            error = error or self._write_error
            if error is not None:
                self._on_socket_lost(error)
            if self.client.link is not self._link:
                self._close_socket()

    def _select(self, sock: socket.socket | TlsSocket | None, events: int, max_wait_s: float = inf) -> int:
        """Wait for an event of the socket, or until the thread is woken; then run due calls. Return the events that
        have come."""
        with self._lock:
            due = self.client.delayed_calls.next_due_at
            wakes_at = monotonic() + max_wait_s
            self._wakes_at = wakes_at = wakes_at if due is None else min(due, wakes_at)
        self._register(sock, events)
        timeout = None if wakes_at == inf else max(0.0, wakes_at - monotonic())
        ready = 0
        woken = False
        for key, mask in self._selector.select(timeout):
            if key.fileobj is self._wake_reader:
                woken = True
            else:
                ready = mask
        with self._lock:
            if woken:
                self._wake_reader.recv(1)
                self._is_woken = False
            self.client.run_due_calls()
        self._write_reports()
        return ready

    def _register(self, sock: socket.socket | TlsSocket | None, events: int) -> None:
        sock_before, events_before = self._registered
        if sock_before is sock and events_before == events:
            return
        if sock_before is not None and events_before:
            self._selector.unregister(sock_before)
        if sock is not None and events:
            self._selector.register(sock, events)
        self._registered = (sock, events)

    def _close_socket(self) -> None:
        self._register(None, 0)
        self._link = None
        sock, self._sock = self._sock, None
        self._unwritten = None
        if sock is not None:
            with contextlib.suppress(OSError):
                # This closes the connection even if a forked process has the socket, too.
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # ---- Writing ----

    def _on_not_written(self, sock: socket.socket | TlsSocket) -> None:
        if self._write_error is not None:
            self._wake_thread()

    def _flush_soon(self) -> None:
        self._is_flush_due = True

    def _flush_later(self) -> None:
        # The end of the step would be too early: the next receive is another one.
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self.client.delayed_calls.call_at(monotonic() + ACK_DELAY_S, self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_scheduled = False
        self.flush()

    # ---- The log ----

    def _report(self, text: str, fields: dict[str, object]) -> None:
        self._pending_reports.append((text, fields))

    def _write_reports(self) -> None:
        while self._pending_reports:
            log.report(*self._pending_reports.popleft())


def _has_ended(owner: object) -> bool:
    return isinstance(owner, threading.Thread) and not owner.is_alive()
