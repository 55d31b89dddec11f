"""What runs a client with threads: its socket, its clock, and the waiting of its flows.

    callers ──lock──▶ Client, flows ──bytes──▶ socket        a caller writes at once what the socket takes
    thread  ──lock──▶ Client ◀──bytes── socket               the thread writes the rest, reads, beats, runs timers

One lock guards all state. Nobody waits while holding it: a caller that has to wait gives it back, and waits on a lock
of its own that whoever sets its signal opens. The thread alone makes and closes sockets, and never runs a program's
code. So reading waits for nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import random
import selectors
import socket
import sys
import threading
from collections import deque
from math import inf
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import WeakSet

from truenext.client import log
from truenext.client.core.beside import Beside
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.context import ClientContext
from truenext.client.core.flows import note
from truenext.client.threads.interrupts import Interruptible
from truenext.clock import monotonic
from truenext.errors import ClosedError, ConnectionLost, LocalProtocolError
from truenext.limits import READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.client.core.holding import Received, Subscription
    from truenext.client.core.link import Link
    from truenext.client.core.session import SessionCore
    from truenext.client.core.waiting import Flow, Wait
    from truenext.errors import TruenextError
    from truenext.url import Address

CONNECT_S = 10.0
"""Until a broker has taken a connection."""
STOP_S = 1.0
"""Seconds that the end waits for the thread, which may be asking for the address of a host."""

EXIT_S = 10.0
"""Seconds for which the end of the program waits until what was sent is confirmed, as the end of a `with` does."""
_ENDS = "the program ends, and the connection with it"

P = ParamSpec("P")
T = TypeVar("T")


_drivers: WeakSet[Driver] = WeakSet()
"""Those whose connection may be open when the program ends."""
_drivers_lock = threading.Lock()


@atexit.register
def _at_exit() -> None:
    """Wait for confirmations while the threads of connections still run: a moment later they would lose messages of
    `send_nowait`."""
    until = monotonic() + EXIT_S
    with _drivers_lock:
        drivers = list(_drivers)
    for driver in drivers:
        driver.confirm(until)


class Driver:
    def __init__(self, options: ConnectOptions, name: str, make: type[Received]) -> None:
        self.process = os.getpid()
        self.beside = Beside()
        """Of this connection: its lock guards no other."""
        context = ClientContext(
            clock=monotonic,
            chance=random.random,
            flush=self.flush,
            flush_soon=self._flush_soon,
            report=self._report,
            has_ended=_has_ended,
        )
        self.client = Client(options, name, context, make)
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="truenext connection", daemon=True)
        self._sock: socket.socket | None = None
        self._link: Link | None = None
        """What the socket is for."""
        self._rest: memoryview | None = None
        """What the socket did not take yet."""
        self._write_error: OSError | None = None
        self._is_flush_due = False
        self._reports: deque[tuple[str, dict[str, object]]] = deque()
        """For the log, which is written without the lock."""
        # How the thread waits: what is registered, until when, and how it is woken.
        self._selector = selectors.DefaultSelector()
        self._registered: tuple[socket.socket | None, int] = (None, 0)
        self._events = 0
        """What the thread waits for at the socket."""
        self._wakes_at = inf
        self._wakee, self._waker = socket.socketpair()
        self._wakee.setblocking(False)
        self._selector.register(self._wakee, selectors.EVENT_READ)
        self._is_woken = False
        self._is_over = False
        with _drivers_lock:
            _drivers.add(self)

    def start(self) -> None:
        """Raises: ClosedError at the end of the program, when no thread begins any more"""
        self.check_place()
        self._thread.start()

    def confirm(self, until: float) -> None:
        """Wait until the broker has confirmed what was sent; warn if it has not in time."""
        client = self.client
        if os.getpid() == self.process and client.left_open and self.run(client.confirm(until)):
            self._log()
            log.left_open(client)

    def stop(self) -> None:
        """Nothing is left of it: neither socket nor thread. Only once the client has ended."""
        with self.hold():
            self._wake()
        if threading.get_ident() != self._thread.ident:
            self._thread.join(STOP_S)
        self._log()

    # ---- Callers ----

    def check_place(self) -> None:
        """Before the lock is touched, which nobody may ever give back in a process that was forked.

        Raises: ClosedError in another process than that of the connection, and at the end of the program
        """
        # As `is_at_end`, without its call: this is asked for each message.
        if sys.is_finalizing():
            raise ClosedError(_ENDS)
        if os.getpid() != self.process:
            raise ClosedError("the connection belongs to the process that this one was forked from: make a new one")

    @property
    def is_at_end(self) -> bool:
        """Only finalizers run, such as `__del__`: the connection's own thread has stopped, and may never give its lock
        back."""
        return sys.is_finalizing()

    def hold(self) -> threading.Lock | Interruptible:
        """The lock, for a `with` block in which nothing is waited for."""
        return Interruptible(self._lock) if threading.get_ident() == self._main else self._lock

    def call(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something that waits for nothing."""
        self.check_place()
        with self.hold():
            try:
                return step(*args, **kwargs)
            finally:
                self._after()

    def call_many(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `call`, for one of many that follow each other: the thread writes what they want written, together."""
        self.check_place()
        with self.hold():
            try:
                return step(*args, **kwargs)
            finally:
                self._wake()

    def take(self, session: SessionCore, subscription: Subscription, owner: object) -> Received | None:
        """What is next, if it is here: the short way of receiving."""
        self.check_place()
        hold = self.hold()
        with hold:
            received = session.take_now(subscription, owner)
            if received is not None:
                try:
                    if isinstance(hold, Interruptible):
                        hold.catch_up()
                except BaseException:
                    session.not_received(subscription, [received])
                    raise
                finally:
                    self._after()
            return received

    def run(self, flow: Flow[T], unseen: Callable[[T], None] | None = None) -> T:
        """Drive a flow to its end; `unseen` gets what comes of it if the caller does not, who was interrupted."""
        self.check_place()
        hold = self.hold()
        with hold:
            try:
                wait = next(flow)
                while True:
                    self._after()
                    try:
                        came = self._until(wait, hold)
                    except BaseException as error:
                        wait = flow.throw(error)
                    else:
                        wait = flow.send(came)
            except StopIteration as ended:
                value: T = ended.value
                if unseen is not None and isinstance(hold, Interruptible):
                    try:
                        hold.catch_up()
                    except BaseException:
                        unseen(value)
                        raise
                return value
            finally:
                self._after()

    def leave_block(self, flow: Flow[None], error: BaseException | None) -> None:
        """Drive the flow that ends a block. An exception of the program leaves the block, whatever its end says."""
        try:
            self.run(flow)
        except Exception as ours:
            if error is None:
                raise
            note(error, ours)

    def _until(self, wait: Wait, hold: threading.Lock | Interruptible) -> bool:
        signal, deadline = wait
        if signal.is_set:
            return True
        if threading.get_ident() == self._thread.ident:
            raise LocalProtocolError("the connection's own thread, which writes its log, cannot wait for itself")
        waiter = threading.Lock()
        waiter.acquire()
        wake = waiter.release
        signal.call(wake)
        timeout = -1.0 if deadline is None else min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX)
        try:
            if isinstance(hold, Interruptible):
                hold.wait(waiter, timeout)
            else:
                hold.release()
                try:
                    waiter.acquire(True, timeout)
                finally:
                    hold.acquire()
        finally:
            signal.forget(wake)
        return signal.is_set

    def leave(self) -> None:
        """Take leave, and wait for nothing."""
        self.call(self._leave)

    def _leave(self) -> None:
        flow = self.client.close(None)
        for _ in flow:
            self.flush()
            flow.close()

    def fail(self, error: TruenextError) -> None:
        """There will be no connection any more."""
        self.call(self.client.fail, error)

    def _after(self) -> None:
        """A caller has done something: write what is due, and see whether the thread has something to do at once."""
        if self._is_flush_due:
            self.flush()
        due = self.client.delayed_calls.next_at
        if (
            self.client.link is not self._link
            or (due is not None and due < self._wakes_at)
            or (self._sock is not None and self._wanted() != self._events)
            or self._reports
        ):
            self._wake()

    def _wanted(self) -> int:
        """What is to be waited for at the socket."""
        reads = 0 if self.client.is_full else selectors.EVENT_READ
        return reads | (0 if self._rest is None else selectors.EVENT_WRITE)

    def _wake(self) -> None:
        if not self._is_woken and not self._is_over:
            self._is_woken = True
            self._waker.send(b"\0")

    # ---- The thread ----

    def _run(self) -> None:
        try:
            while self.client.error is None:
                self._connect_once()
                while self._sock is not None:
                    self._turn()
        except Exception as error:
            ours = log.internal_error(error)
            with self._lock:
                self.client.fail(ours)
        finally:
            with self._lock:
                self._is_over = True
                self._end()
                self._selector.close()
                self._wakee.close()
                self._waker.close()
            self._log()

    def _connect_once(self) -> None:
        client = self.client
        with self._lock:
            address, delay = client.attempts.next()
        until = monotonic() + delay
        while client.error is None and (now := monotonic()) < until:
            self._select(None, 0, until - now)
        try:
            sock = self._connect(address)
        except (OSError, UnicodeError) as error:
            with self._lock:
                client.connecting_failed(error)
            return
        if sock is None:
            return
        with self._lock:
            if client.error is not None:
                sock.close()
                return
            self._sock = sock
            self._rest = None
            self._write_error = None
            client.opened(address)
            self._link = client.link

    def _connect(self, address: Address) -> socket.socket | None:
        """None if there is to be no connection any more. Raises: OSError if nobody is there"""
        until = monotonic() + CONNECT_S
        errors: list[OSError] = []
        for family, kind, protocol, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            is_made = False
            try:
                sock.setblocking(False)
                # What is written is wanted at once.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                code = sock.connect_ex(where)
                while code in _UNDER_WAY and self.client.error is None:
                    if (left := until - monotonic()) <= 0:
                        raise TimeoutError(f"no answer within {CONNECT_S:g} seconds")
                    if self._select(sock, selectors.EVENT_WRITE, left):
                        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code and code not in _UNDER_WAY:
                    raise OSError(code, os.strerror(code))
                is_made = self.client.error is None
                return sock if is_made else None
            except OSError as error:
                errors.append(error)
            finally:
                if not is_made:
                    self._register(None, 0)
                    sock.close()
        raise errors[0] if errors else OSError(f"{address.host} has no address")

    def _turn(self) -> None:
        """Wait until the connection has something to do, and do it."""
        with self._lock:
            sock = self._sock
            assert sock is not None, "it is there"
            self._events = self._wanted()
        ready = self._select(sock, self._events)
        data: bytes | None = None
        error: Exception | None = None
        if ready & selectors.EVENT_READ:
            try:
                data = sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as failed:
                error = failed
        with self._lock:
            if data:
                self.client.received(data)
            elif data is not None:
                error = ConnectionLost("the broker has closed it")
            if ready & selectors.EVENT_WRITE:
                self._write_rest(sock)
            if self._is_flush_due:
                self.flush()
            error = error or self._write_error
            if error is not None and self.client.link is self._link:
                self.client.lost(error)
            if self.client.link is not self._link:
                self._end()

    def _select(self, sock: socket.socket | None, events: int, longest: float = inf) -> int:
        """Wait for the socket, or until somebody wakes the thread; run the timers. What the socket is ready for."""
        with self._lock:
            due = self.client.delayed_calls.next_at
            wakes_at = monotonic() + longest
            self._wakes_at = wakes_at = wakes_at if due is None else min(due, wakes_at)
        self._register(sock, events)
        timeout = None if wakes_at == inf else max(0.0, wakes_at - monotonic())
        ready = 0
        woken = False
        for key, mask in self._selector.select(timeout):
            if key.fileobj is self._wakee:
                woken = True
            else:
                ready = mask
        with self._lock:
            if woken:
                self._wakee.recv(1)
                self._is_woken = False
            self.client.tick()
        self._log()
        return ready

    def _register(self, sock: socket.socket | None, events: int) -> None:
        before, were = self._registered
        if before is sock and were == events:
            return
        if before is not None and were:
            self._selector.unregister(before)
        if sock is not None and events:
            self._selector.register(sock, events)
        self._registered = (sock, events)

    def _end(self) -> None:
        """The socket is of no further use."""
        self._register(None, 0)
        self._link = None
        sock, self._sock = self._sock, None
        self._rest = None
        if sock is not None:
            with contextlib.suppress(OSError):
                # Also if a process that was forked from this one has it, too.
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # ---- Writing ----

    def flush(self) -> bool:
        """Write what is to be written; whether the socket has taken all of it."""
        self._is_flush_due = False
        sock = self._sock
        if sock is None or self._rest is not None:
            return False
        out = self.client.outgoing()
        if not out:
            return True
        data = out[0] if len(out) == 1 else b"".join(out)
        try:
            written = sock.send(data)
        except (BlockingIOError, InterruptedError):
            written = 0
        except OSError as error:
            # Whoever writes is in the middle of something.
            self._write_error = error
            self._wake()
            return False
        if written == len(data):
            return True
        self._rest = memoryview(data)[written:]
        return False

    def _write_rest(self, sock: socket.socket) -> None:
        rest = self._rest
        if rest is None:
            return
        try:
            written = sock.send(rest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._write_error = error
            return
        if written < len(rest):
            self._rest = rest[written:]
            return
        self._rest = None
        if self.flush():
            self.client.has_drained()

    def _flush_soon(self) -> None:
        self._is_flush_due = True

    # ---- The log ----

    def _report(self, what: str, facts: dict[str, object]) -> None:
        self._reports.append((what, facts))

    def _log(self) -> None:
        while self._reports:
            log.report(*self._reports.popleft())


def _has_ended(owner: object) -> bool:
    return isinstance(owner, threading.Thread) and not owner.is_alive()


_UNDER_WAY = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EALREADY, errno.EINTR})
