"""What runs a client in an event loop: its socket, its clock, and the waiting of its flows.

Everything happens in the loop; only writing to the socket has a lock, for heart.py. Reading waits for nobody: the loop
says when there is something to read, and what was read is taken in at once. Writing is tried at once; what the socket
does not take waits for it.

After a long block of the loop timers are due, and what has come meanwhile is not read. Which of the two a loop does
first differs from loop to loop. So the socket is read before anything is decided because of the time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import random
import socket
import threading
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from truenext.client import log
from truenext.client.core.beside import Beside
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.context import ClientContext
from truenext.client.core.flows import note
from truenext.client.core.link import HEART_BEAT
from truenext.client.tasks.heart import Heart
from truenext.clock import monotonic
from truenext.errors import ClosedError, ConfigurationError, ConnectionLost
from truenext.limits import READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.client.core.holding import Received
    from truenext.client.core.link import Link
    from truenext.client.core.waiting import Flow, Wait
    from truenext.url import Address

CONNECT_S = 10.0
"""Until a broker has taken a connection."""
BLOCKED_S = 1.0
"""A timer that is so late says that something blocks the event loop."""

STILL_S = 0.001
"""A clock that has told the same for so long stands still."""

T = TypeVar("T")

_drivers: WeakSet[Driver] = WeakSet()
"""Those whose connection may be open when the program ends."""


@atexit.register
def _at_exit() -> None:
    """No event loop runs any more that could wait for a confirmation."""
    for driver in list(_drivers):
        driver.check_confirmed()


_beside: WeakKeyDictionary[asyncio.AbstractEventLoop, Beside] = WeakKeyDictionary()


class Driver:
    def __init__(self, options: ConnectOptions, name: str, make: type[Received]) -> None:
        """To be made in the loop that it is to run in. Raises: ConfigurationError if that loop's time stands still"""
        self.loop = loop = asyncio.get_running_loop()
        check_time_goes_on(loop)
        self.process = os.getpid()
        self.beside = _beside.setdefault(self.loop, Beside())
        """Of all connections in this loop."""
        context = ClientContext(
            # Looked up each time: tests that stop the time of a program give its loop another one.
            clock=lambda: loop.time(),
            chance=random.random,
            flush=self.flush,
            flush_soon=self._flush_soon,
            report=log.report,
            has_ended=_has_ended,
        )
        self.client = Client(options, name, context, make)
        self._heart: Heart | None = None
        self._writing = threading.Lock()
        """Whoever has it writes to the socket, and changes what is left over."""
        self._sock: socket.socket | None = None
        self._link: Link | None = None
        """What the socket is for."""
        self._rest: memoryview | None = None
        """What the socket did not take yet."""
        self._write_error: OSError | None = None
        self._is_flush_due = False
        self._is_reading = True
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        """When it is due. uvloop does not say that of one that was due when it was made."""
        self._wake: asyncio.Future[None] | None = None
        """Done when the socket is of no further use."""
        self._connecting: asyncio.Task[None] | None = None
        self._is_checked = False
        _drivers.add(self)

    def check_confirmed(self, tell: Callable[[Client], None] = log.left_open) -> None:
        """Warn once if sends are lost with the program, or with its event loop."""
        if not self._is_checked and not self._is_elsewhere:
            self._is_checked = True
            tell(self.client)

    def __del__(self) -> None:
        # The event loop has gone, and nobody has closed the connection. One that was not made has no client.
        if hasattr(self, "_is_checked"):
            self.check_confirmed()

    def start(self) -> None:
        self._connecting = self.loop.create_task(self._connect_for_ever(), name="truenext connection")
        options = self.client.options
        if options.beats_apart and options.heart_beat_s:
            self._heart = Heart(self, options.heart_beat_s)
        self._arm()

    # ---- Flows ----

    def check_place(self) -> None:
        """Raises: ClosedError in another process or loop than that of the connection"""
        try:
            if asyncio.get_running_loop() is self.loop:
                # No forked child has a running loop.
                return
        except RuntimeError:
            pass
        if os.getpid() != self.process:
            raise ClosedError("the connection belongs to the process that this one was forked from: make a new one")
        raise ClosedError("the connection belongs to another event loop: make a new one here")

    def owner(self) -> asyncio.Task[object] | None:
        """The running task. Raises: ClosedError, as `check_place`: in a forked child there is none"""
        self.check_place()
        return asyncio.current_task()

    async def run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end."""
        self.check_place()
        try:
            wait = next(flow)
            while True:
                self._after()
                try:
                    came = await self._until(wait)
                except BaseException as error:
                    wait = flow.throw(error)
                else:
                    wait = flow.send(came)
        except StopIteration as ended:
            value: T = ended.value
            return value
        finally:
            self._after()

    async def leave_block(self, flow: Flow[None], error: BaseException | None) -> None:
        """Drive the flow that ends a block. An exception of the program leaves the block, whatever its end says."""
        try:
            await self.run(flow)
        except Exception as ours:
            if error is None:
                raise
            note(error, ours)

    async def _until(self, wait: Wait) -> bool:
        signal, deadline = wait
        if signal.is_set:
            return True
        future = self.loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def give_up() -> None:
            self._read_what_waits()
            wake()

        signal.call(wake)
        timer = None if deadline is None else self.loop.call_at(deadline, give_up)
        try:
            await future
        finally:
            signal.forget(wake)
            if timer is not None:
                timer.cancel()
        return signal.is_set

    # ---- Connecting ----

    async def _connect_for_ever(self) -> None:
        client = self.client
        try:
            while client.error is None:
                address, delay = client.attempts.next()
                if delay:
                    await asyncio.sleep(delay)
                try:
                    async with asyncio.timeout(CONNECT_S):
                        sock = await self._connect(address)
                except (OSError, UnicodeError) as error:
                    # A name that cannot be one of a host is as good as one that is not known.
                    is_ours = type(error) is TimeoutError and error.errno is None
                    client.connecting_failed(_too_late() if is_ours else error)
                    continue
                self._start_link(sock, address)
                assert self._wake is not None, "it has begun"
                await self._wake
        except Exception as error:
            self._fail(error)

    async def _connect(self, address: Address) -> socket.socket:
        found = await self.loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        errors: list[OSError] = []
        for family, kind, protocol, _, where in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                # What is written is wanted at once.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self.loop.sock_connect(sock, where)
            except OSError as error:
                sock.close()
                # That of asyncio says the address in place of the reason.
                errors.append(OSError(error.errno, os.strerror(error.errno)) if error.errno else error)
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise errors[0] if errors else OSError(f"{address.host} has no address")

    def _start_link(self, sock: socket.socket, address: Address) -> None:
        self._link = None
        self._sock = sock
        self._rest = None
        self._write_error = None
        self._wake = self.loop.create_future()
        self.loop.add_reader(sock, self._on_readable)
        self.client.opened(address)
        self._link = self.client.link
        self._after()

    def _end(self) -> None:
        """The socket is of no further use."""
        # In a forked child the lock may be that of a thread that is not there.
        with contextlib.nullcontext() if self._is_elsewhere else self._writing:
            sock, self._sock = self._sock, None
        if sock is None:
            return
        if not self._is_elsewhere:
            self.loop.remove_reader(sock)
            self.loop.remove_writer(sock)
            with contextlib.suppress(OSError):
                # Also if a process that was forked from this one has it, too.
                sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        self._rest = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def leave(self) -> None:
        """Take leave, and wait for nothing."""
        flow = self.client.close(None)
        for _ in flow:
            self.flush()
            flow.close()

    async def stop(self) -> None:
        """Nothing is left of it: neither socket nor task nor timer nor thread."""
        if self._heart is not None:
            self._heart.stop()
            self._heart = None
        self._end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()
            # Not awaited itself: its cancellation is not that of whoever waits here.
            await asyncio.wait({self._connecting})

    def _fail(self, error: Exception) -> None:
        """An error of our own: whoever waits gets it."""
        self.client.fail(log.internal_error(error))
        self._end()

    # ---- Reading and writing ----

    @property
    def _is_elsewhere(self) -> bool:
        """This is a forked child, whose copy of the loop still runs: the socket is its parent's."""
        return os.getpid() != self.process

    def _on_readable(self) -> None:
        if self._is_elsewhere:
            return
        assert self._sock is not None, "it is read"
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if not data:
            self._lost(ConnectionLost("the broker has closed it"))
            return
        try:
            self.client.received(data)
            self._after()
        except Exception as error:
            self._fail(error)
        if self.client.is_full and self._sock is not None:
            self.loop.remove_reader(self._sock)
            self._is_reading = False

    def _read_what_waits(self) -> None:
        """Before something is decided because of the time."""
        if self._sock is not None and self._is_reading:
            self._on_readable()

    def read_on(self) -> None:
        """If nothing was read any more, for enough was here."""
        if not (self._is_reading or self.client.is_full) and self._sock is not None:
            self._is_reading = True
            self.loop.add_reader(self._sock, self._on_readable)

    def _lost(self, error: Exception) -> None:
        if self.client.link is self._link:
            self.client.lost(error)
        self._after()

    def flush(self) -> bool:
        """Write what is to be written; whether the socket has taken all of it."""
        sock = self._sock
        if sock is None or self._rest is not None:
            return False
        out = self.client.outgoing()
        if not out:
            return True
        data = out[0] if len(out) == 1 else b"".join(out)
        with self._writing:
            try:
                written = sock.send(data)
            except (BlockingIOError, InterruptedError):
                written = 0
            except OSError as error:
                # Whoever writes is in the middle of something.
                self._write_error = error
                self.loop.call_soon(self._on_write_error, sock)
                return False
            if written == len(data):
                return True
            self._rest = memoryview(data)[written:]
        self.loop.add_writer(sock, self._on_writable)
        return False

    def beat(self, seen: float) -> float:
        """Called by another thread: if nothing was written since `seen`, write what is left over, or a heart-beat.
        Returns what to say the next time."""
        with self._writing:
            link, sock = self._link, self._sock
            if link is None or sock is None or not (link.is_up and link.beats_every_s):
                return seen
            written_at = link.written_at
            if written_at == seen:
                # If the connection is lost, the loop will come upon that.
                with contextlib.suppress(OSError):
                    if self._rest is None:
                        sock.send(HEART_BEAT)
                    else:
                        self._write_some(sock, self._rest)
            return written_at

    def _write_some(self, sock: socket.socket, rest: memoryview) -> None:
        """Of what is left over. Raises: OSError"""
        written = sock.send(rest)
        self._rest = rest[written:] if written < len(rest) else None

    def _on_write_error(self, sock: socket.socket) -> None:
        if self._sock is sock and self._write_error is not None:
            self._lost(self._write_error)

    def _on_writable(self) -> None:
        if self._is_elsewhere:
            return
        sock = self._sock
        assert sock is not None, "it is waited for"
        try:
            with self._writing:
                if self._rest is not None:
                    self._write_some(sock, self._rest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if self._rest is not None:
            return
        self.loop.remove_writer(sock)
        try:
            if self.flush():
                self.client.has_drained()
        except Exception as error:
            self._fail(error)

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_due = False
        if self._is_elsewhere:
            return
        try:
            self.flush()
        except Exception as error:
            self._fail(error)

    # ---- Time ----

    def _after(self) -> None:
        """Something has happened: see whether the connection is still there, and when there is something to do."""
        if self._sock is not None and self.client.link is not self._link:
            self._end()
        self._arm()

    def _arm(self) -> None:
        due = self.client.delayed_calls.next_at
        timer = self._timer
        if due is None or self.client.error is not None:
            return
        if timer is None or due < self._timer_at:
            if timer is not None:
                timer.cancel()
            self._timer = self.loop.call_at(due, self._tick)
            self._timer_at = due

    def _tick(self) -> None:
        if self._is_elsewhere:
            return
        self._timer = None
        late = self.loop.time() - self._timer_at
        if late > BLOCKED_S:
            log.report("the event loop was blocked for %(seconds)s seconds", {"seconds": round(late, 1)})
        self._read_what_waits()
        try:
            self.client.tick()
            self._after()
        except Exception as error:
            self._fail(error)


def check_time_goes_on(loop: asyncio.AbstractEventLoop) -> None:
    """No timer of such a loop is ever due: whoever waits in it waits for ever.

    Raises: ConfigurationError if a test has stopped the time of this loop
    """
    if type(loop).time is not asyncio.BaseEventLoop.time:
        # uvloop's own, for one, which tells the same time through a whole turn.
        return
    told, until = loop.time(), monotonic() + STILL_S
    while loop.time() == told:
        if monotonic() > until:
            raise ConfigurationError(
                "the time of the event loop stands still, so nothing that waits in it would ever go on: with freezegun "
                "say freeze_time(..., real_asyncio=True)"
            )


def _too_late() -> TimeoutError:
    return TimeoutError(f"no answer within {CONNECT_S:g} seconds")


def _has_ended(owner: object) -> bool:
    return isinstance(owner, asyncio.Task) and owner.done()
