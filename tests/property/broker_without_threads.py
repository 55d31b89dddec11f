"""Broker without sockets, threads and a time of its own, with the real engine, connections and sessions.

A test writes what a client sends, runs callbacks of the event loop one at a time, and reads what the client would get.
The test also says when a batch is durable, and moves the clock.
"""

import heapq
import itertools
from asyncio import Future
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

from truenext.broker.broker import Broker
from truenext.broker.pager import Pager, _decode_page, read_page
from truenext.broker.recovery import recover
from truenext.engine.memory.timers import TimerRead, TimersResult
from truenext.engine.state.pages import StoreRead
from truenext.model.batch import Batch
from truenext.model.policy import Policies
from truenext.model.url import WireProtocol
from truenext.server.connection import ServerConnection
from truenext.server.session_factories import make_session_factories
from truenext.store.memory import MemoryStore

START_NS = 1_700_000_000 * 10**9


class VirtualTimer:
    def __init__(self, at_ns: int, callback: Callable[[], object]) -> None:
        self.at_ns = at_ns
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualLoop:
    """Event loop whose callbacks a test runs, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.readers: dict[Any, Callable[[], None]] = {}
        self.writers: dict[Any, Callable[[], None]] = {}
        self._ready: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[int, int, VirtualTimer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now_ns / 1e9

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> "Future[None]":
        return Future(loop=cast(Any, self))

    def call_soon(self, callback: Callable[..., object], *arguments: Any, **_: Any) -> None:
        self._ready.append(lambda: callback(*arguments))

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> VirtualTimer:
        timer = VirtualTimer(self.now_ns + round(seconds * 1e9), lambda: callback(*arguments))
        heapq.heappush(self._timers, (timer.at_ns, next(self._numbers), timer))
        return timer

    def add_reader(self, sock: object, callback: Callable[[], None]) -> None:
        self.readers[sock] = callback

    def remove_reader(self, sock: object) -> None:
        self.readers.pop(sock, None)

    def add_writer(self, sock: object, callback: Callable[[], None]) -> None:
        self.writers[sock] = callback

    def remove_writer(self, sock: object) -> None:
        self.writers.pop(sock, None)

    def run_one(self) -> bool:
        """Run a callback. Returns False if none is there."""
        if not self._ready:
            return False
        self._ready.popleft()()
        return True

    def move_to_next_timer(self, until_ns: int) -> bool:
        """Move the clock to the next timer that is due until then, and make it ready. Returns False if there is none;
        then the clock is at `until_ns`."""
        while self._timers and self._timers[0][0] <= until_ns:
            at_ns, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self.now_ns = max(self.now_ns, at_ns)
                self._ready.append(timer.callback)
                return True
        self.now_ns = until_ns
        return False


class HeldCommitter:
    """Committer whose batches become durable when the test says so."""

    def __init__(self, store: MemoryStore, history: "RecordedHistory | None", on_committed: Callable[[Batch], None]):
        self._store = store
        self._history = history
        self._on_committed = on_committed
        self.in_flight: Batch | None = None
        self.handed_count = 0
        """Number of batches that the broker has closed."""
        self.durable_count = 0
        """Number of batches that are durable."""

    @property
    def is_busy(self) -> bool:
        return self.in_flight is not None

    def commit(self, batch: Batch) -> bool:
        assert self.in_flight is None
        self.in_flight = batch
        self.handed_count += 1
        return False

    def finish(self) -> None:
        """Make the batch durable."""
        batch, self.in_flight = self.in_flight, None
        assert batch is not None
        if not batch.is_empty():
            self._store.apply(batch)
        if self._history is not None:
            self._history.chunks.append(batch.history)
        self.durable_count += 1
        self._on_committed(batch)

    def close(self) -> None:
        """Do nothing: there is no thread."""


class RecordedHistory:
    """History of one run of a broker, in memory."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def restore(self, _: object) -> None:
        """Do nothing: this is the first run."""

    def start_run(self, *, after_clean_stop: bool, lowest: tuple[int, int]) -> tuple[int, int]:
        return 1, 1


class PagerAtOnce(Pager):
    """Pager that reads in the event loop."""

    def __init__(self, engine: Any, store: MemoryStore, loop: Any, **callbacks: Any) -> None:
        with mock.patch("threading.Thread"):
            super().__init__(engine, store, loop, **callbacks)

    def read(self, read: StoreRead) -> None:
        self.pending.add(read)
        self._loop.call_soon(lambda: self._done(read, _decode_page(read, read_page(self._store, read))))

    def read_timers(self, read: TimerRead) -> None:
        self._pending_timer_reads += 1
        timers = self._store.read_timers(read.after, read.limit)
        result = TimersResult(timers.timers, timers.as_of, timers.is_end)
        self._loop.call_soon(lambda: self._timers_done(read, result))

    def close(self) -> None:
        """Do nothing: there is no thread."""


class VirtualSocket:
    """Socket of one client, as the broker uses it."""

    def __init__(self) -> None:
        self.incoming: deque[bytes] = deque()
        self.sent = bytearray()
        self.has_ended = False
        self.is_broken = False
        self.is_full = False
        """True as long as the socket takes nothing."""
        self.is_closed = False
        """True once the broker has closed the socket."""

    def recv(self, size: int) -> bytes:
        if self.is_broken:
            raise ConnectionResetError("reset by a test")
        if not self.incoming:
            if self.has_ended:
                return b""
            raise BlockingIOError
        data = self.incoming.popleft()
        if len(data) > size:
            self.incoming.appendleft(data[size:])
        return data[:size]

    def send(self, data: bytes | bytearray | memoryview) -> int:
        if self.is_broken:
            raise ConnectionResetError("reset by a test")
        if self.is_full:
            raise BlockingIOError
        self.sent += data
        return len(data)

    def getsockopt(self, *_: int) -> int:
        return 0

    def shutdown(self, _: int) -> None:
        """Do nothing: the client closes its side, too."""

    def close(self) -> None:
        self.is_closed = True

    def take_sent(self) -> bytes:
        sent = bytes(self.sent)
        self.sent.clear()
        return sent


class BrokerWithoutThreads:
    """Broker, started, and its clients' sockets."""

    def __init__(
        self,
        policies: Policies | None = None,
        store: MemoryStore | None = None,
        now_ns: int = START_NS,
        history: RecordedHistory | None = None,
    ) -> None:
        self.loop = VirtualLoop()
        self.loop.now_ns = now_ns
        self.store = store or MemoryStore()
        self._history = history
        engine, recovered = recover(self.store, policies or Policies(), history=cast(Any, history))
        self.engine = engine
        self.identity = recovered.identity
        self.broker = self._make_broker(engine)
        self._session_factories = make_session_factories()
        self._run(self.broker.start(after_clean_stop=recovered.clean_stop))
        self._number = 0

    def _make_broker(self, engine: Any) -> Broker:
        def make_committer(store: MemoryStore, *_: Any, on_committed: Callable[[Batch], None], **__: Any) -> Any:
            self.committer = HeldCommitter(store, self._history, on_committed)
            return self.committer

        with (
            mock.patch("truenext.broker.broker.Committer", make_committer),
            mock.patch("truenext.broker.broker.Pager", PagerAtOnce),
        ):
            return Broker(
                engine,
                self.store,
                cast(Any, self.loop),
                clock_ns=lambda: self.loop.now_ns,
                monotonic_ns=lambda: self.loop.now_ns,
            )

    def _run(self, coroutine: Any) -> None:
        """Run a coroutine of the broker, which waits for batches only."""
        try:
            while True:
                coroutine.send(None)
                while self.committer.in_flight is not None or self.loop.run_one():
                    if self.committer.in_flight is not None:
                        self.committer.finish()
        except StopIteration:
            return

    def connect(self, protocol: WireProtocol = WireProtocol.OPENWIRE) -> VirtualSocket:
        sock = VirtualSocket()
        self._number += 1
        ServerConnection(
            cast(Any, sock),
            f"127.0.0.1:{self._number}",
            self.broker,
            cast(Any, self.loop),
            identity=self.identity,
            server_name="truenext/0",
            on_closed=lambda _: None,
            make_session=self._session_factories[protocol],
        )
        return sock

    def read(self, sock: VirtualSocket) -> None:
        """Let the broker read a socket once."""
        if sock in self.loop.readers:
            self.loop.readers[sock]()

    def write(self, sock: VirtualSocket) -> None:
        """Let the broker write what a socket did not take before."""
        while sock in self.loop.writers:
            self.loop.writers[sock]()

    def settle(self) -> None:
        """Run all callbacks, and make all batches durable."""
        while True:
            while self.loop.run_one():
                pass
            if not self.committer.is_busy:
                return
            self.committer.finish()

    def advance(self, seconds: float) -> None:
        """Move the clock, and run everything that is due until then."""
        until_ns = self.loop.now_ns + round(seconds * 1e9)
        self.settle()
        while self.loop.move_to_next_timer(until_ns):
            self.settle()

    def stop(self) -> None:
        self._run(self.broker.stop())

    def close(self) -> None:
        self.broker.close()
