"""Simulation of a broker, clients and the wires between them, without sockets, threads or a clock: one step at a time.

The broker is the real one behind the real connections of its server; the event loop, the disk and the sockets are
simulated. A wire between a client and the broker is two queues of bytes. The test says when bytes arrive, and how many;
a wire that is cut loses the bytes on their way.

    client --outgoing--> wire.up   --deliver_up-->   broker
    client <--received-- wire.down <--deliver_down-- broker
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from truenext.broker import broker as broker_module
from truenext.broker.broker import Broker
from truenext.broker.pager import _decode_page, read_page
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.context import ACK_DELAY_S
from truenext.client.core.context import ClientContext as CoreContext
from truenext.engine.engine import Engine
from truenext.engine.memory.timers import TimersResult
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.errors import ConnectionLost
from truenext.model.url import Address
from truenext.server.connection import ServerConnection
from truenext.store.memory import MemoryStore
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.shapes import FRAME_SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    import pytest

    from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
    from truenext.engine.state.queue import Entry
    from truenext.model.batch import Batch
    from truenext.model.policy import Policies

ADDRESS = Address(host="broker", port=1)
START_S = 1000.0
ROUNDS_MAX = 20_000
"""Number of steps after which a simulation without input must have come to rest."""


class NeverIdle(Exception):
    """Error of a simulation that never comes to rest."""


class Handle:
    def __init__(self, when: float, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._when = when
        self.action: Callable[..., object] | None = action
        self.arguments = arguments

    def cancel(self) -> None:
        self.action = None

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self.action is None

    def run(self) -> None:
        action, self.action = self.action, None
        if action is not None:
            action(*self.arguments)


class Future:
    """Future for a broker that never fails and never waits for its disk when it starts."""

    def set_exception(self, error: BaseException) -> None:
        raise error

    def set_result(self, result: object) -> None:
        pass

    def done(self) -> bool:
        return False


class Loop:
    """Event loop with the methods that the broker uses."""

    def __init__(self) -> None:
        self.now = START_S
        self.ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._serial = itertools.count()
        self.readers: dict[object, Callable[[], object]] = {}
        self.writers: dict[object, Callable[[], object]] = {}

    def time(self) -> float:
        return self.now

    def create_future(self) -> Future:
        return Future()

    def call_soon(self, action: Callable[..., object], *arguments: object) -> Handle:
        handle = Handle(self.now, action, arguments)
        self.ready.append(handle)
        return handle

    def call_later(self, seconds: float, action: Callable[..., object], *arguments: object) -> Handle:
        return self.call_at(self.now + seconds, action, *arguments)

    def call_at(self, when: float, action: Callable[..., object], *arguments: object) -> Handle:
        handle = Handle(when, action, arguments)
        heapq.heappush(self._timers, (when, next(self._serial), handle))
        return handle

    def add_reader(self, sock: object, action: Callable[[], object]) -> None:
        self.readers[sock] = action

    def remove_reader(self, sock: object) -> None:
        self.readers.pop(sock, None)

    def add_writer(self, sock: object, action: Callable[[], object]) -> None:
        self.writers[sock] = action

    def remove_writer(self, sock: object) -> None:
        self.writers.pop(sock, None)

    @property
    def next_at(self) -> float | None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def ring(self) -> None:
        """Make due timers ready."""
        while (due := self.next_at) is not None and due <= self.now:
            self.ready.append(heapq.heappop(self._timers)[2])

    def step(self) -> None:
        self.ready.popleft().run()


class Committer:
    """Committer whose batches become durable at once, or when the test says so."""

    def __init__(
        self,
        store: MemoryStore,
        history: None,
        loop: Loop,
        write_time: object,
        *,
        has_log: bool,
        on_committed: Callable[[Batch], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        assert not has_log
        self._store = store
        self._on_committed = on_committed
        self.batch: Batch | None = None
        self.is_instant = True

    @property
    def is_busy(self) -> bool:
        return self.batch is not None

    def commit(self, batch: Batch) -> bool:
        if self.is_instant:
            self._apply(batch)
            return True
        self.batch = batch
        return False

    def done(self) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None, "there is one"
        self._apply(batch)
        self._on_committed(batch)

    def _apply(self, batch: Batch) -> None:
        if not batch.is_empty():
            self._store.apply(batch)

    def close(self) -> None:
        pass


class Pager:
    def __init__(
        self, engine: Engine, store: MemoryStore, loop: Loop, *, tick: Any, schedule_turn: Any, on_failed: Any
    ) -> None:
        self._results, self._store, self._loop = engine.store_results, store, loop
        self._tick, self._schedule_turn = tick, schedule_turn
        self.pending: set[Any] = set()
        self.is_busy = False

    def read(self, read: Any) -> None:
        self.pending.add(read)
        self._loop.call_soon(self._read, read)

    def _read(self, read: Any) -> None:
        self.pending.discard(read)
        self._tick()
        self._results.on_page_read(read, _decode_page(read, read_page(self._store, read)))
        self._schedule_turn()

    def read_timers(self, read: Any) -> None:
        found = self._store.read_timers(read.after, read.limit)
        self._loop.call_soon(self._timers_read, read, TimersResult(found.timers, found.as_of, found.is_end))

    def _timers_read(self, read: Any, timers: TimersResult) -> None:
        self._results.on_timers_read(read, timers)
        self._schedule_turn()

    def close(self) -> None:
        pass


class Tap:
    """Decoder of the frames that pass a wire."""

    def __init__(self) -> None:
        self._decoder: Decoder[Frame] = Decoder(FRAME_SHAPES)

    def frames(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        while True:
            for frame in self._decoder.receive(data):
                assert isinstance(frame, Frame)
                if frame.command in ("CONNECT", "CONNECTED"):
                    self._decoder.version = Version.V1_2
                frames.append(frame)
            if not self._decoder.has_more:
                return frames
            data = b""


class Wire:
    """Connection between the sockets of a client and the broker."""

    def __init__(self, simulation: Simulation) -> None:
        self.number = next(simulation.wires)
        self._simulation = simulation
        self.owner: Peer | None = None
        self.up = bytearray()
        """Bytes on their way to the broker."""
        self.down = bytearray()
        self.capacity_up = self.capacity_down = 1 << 30
        """Largest numbers of bytes on their way."""
        self._inbox = bytearray()
        self.is_cut = False
        """Whether no byte passes any more, which neither side has noticed by that alone."""
        self._is_up_over = False
        """Whether the client has closed it, and the broker is to notice."""
        self.is_closed = False
        """Whether the broker has closed it."""
        self._seen_up, self._seen_down, self._carried_up = Tap(), Tap(), Tap()
        self.sent: list[Frame] = []
        """Frames that the client's socket has taken, in order."""
        self.received: list[Frame] = []
        """Frames that have come to the client."""
        self.carried: list[Frame] = []
        """Frames that have come to the broker."""
        self.rounds = 0
        """Number of releases that the client has sent."""
        self.is_over = False
        """Whether the broker has noticed its end."""

    @property
    def is_listened_to(self) -> bool:
        """Whether frames come to the broker. A broker that has noticed the end may wait before it counts the connection
        as lost."""
        return not (self.is_over or self._is_up_over)

    # ---- The broker's end: a socket ----

    def recv(self, size: int) -> bytes:
        if not self._inbox:
            if self._is_up_over:
                return b""
            raise BlockingIOError
        data = bytes(self._inbox[:size])
        del self._inbox[:size]
        return data

    def send(self, data: bytes | bytearray | memoryview) -> int:
        if self._is_up_over:
            raise BrokenPipeError("the client has closed it")
        accepted = bytes(data[: max(0, self.capacity_down - len(self.down))])
        if not accepted and len(data):
            raise BlockingIOError
        self.down += accepted
        return len(accepted)

    def getsockopt(self, level: int, option: int) -> int:
        return 0

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def read_up(self) -> None:
        while (self._inbox or self._is_up_over) and (read := self._simulation.loop.readers.get(self)) is not None:
            over = not self._inbox
            read()
            if over:
                break

    # ---- In between ----

    def deliver_up(self, size: int) -> None:
        if self.is_cut:
            return
        if self.is_closed or self._is_up_over:
            self.up.clear()
            return
        data = bytes(self.up[:size])
        del self.up[:size]
        frames = self._carried_up.frames(data)
        self.carried += frames
        self.is_over |= any(frame.command == "DISCONNECT" for frame in frames)
        self._inbox += data
        self.read_up()

    def pop_down(self, size: int) -> bytes:
        """Return up to `size` bytes for the client."""
        if self.is_cut:
            return b""
        data = bytes(self.down[:size])
        del self.down[:size]
        frames = self._seen_down.frames(data)
        self.received += frames
        for frame in frames:
            self._simulation.on_broker_frame(self, frame)
        if (write := self._simulation.loop.writers.get(self)) is not None:
            write()
        return data

    def put_up(self, data: bytes) -> int:
        """Accept bytes of the client, and return their number."""
        accepted = data[: max(0, self.capacity_up - len(self.up))]
        self.up += accepted
        frames = self._seen_up.frames(accepted)
        self.sent += frames
        for frame in frames:
            self._simulation.client_sent(self, frame)
        return len(accepted)

    def break_up(self) -> None:
        """Let the broker notice that the client is gone; bytes on their way are lost."""
        self.up.clear()
        if not self._is_up_over:
            self._is_up_over = True
            self.read_up()


class TappedConnection(ServerConnection):
    """Connection of the server that records dispatches and takeovers."""

    simulation: Simulation
    wire: Wire

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deliver = self._deliver_and_record

    def _deliver_and_record(self, consumer: BrokerConsumer, entries: list[Entry]) -> None:
        for entry in entries:
            self.simulation.on_dispatch(self.wire, consumer.subscription, entry)
        self._output.deliver(consumer, entries)

    def close_for_takeover(self, *, is_exempt: bool) -> None:
        self.simulation.on_taken_over(self.wire, is_exempt=is_exempt)
        super().close_for_takeover(is_exempt=is_exempt)


class Peer:
    """Client of the core with its driver, which works like truenext.client.tasks.driver, step by step."""

    def __init__(self, simulation: Simulation, name: str, heart_beat_s: float) -> None:
        self.simulation = simulation
        self.name = name
        self.wire: Wire | None = None
        self._unwritten = b""
        self.is_flush_due = False
        self.flush_by: float | None = None
        """Time by which the driver writes pending bytes that may wait."""
        self.is_dead = False
        login = ConnectOptions(addresses=[ADDRESS], heart_beat_s=heart_beat_s)
        context = CoreContext(
            clock=simulation.loop.time,
            random=simulation.random.random,
            flush=self.flush,
            flush_soon=self._flush_soon,
            flush_later=self._flush_later,
            report=lambda what, facts: self.reports.append(f"{what}: {facts}"),
            has_owner_ended=lambda owner: False,
        )
        self.reports: list[str] = []
        """Log messages of the client."""
        self.client = Client(login, name, context)
        self._link: object = None
        self.connects_at: float | None = simulation.loop.now

    @property
    def is_up(self) -> bool:
        """Whether the client has received CONNECTED."""
        return self.wire is not None and any(frame.command == "CONNECTED" for frame in self.wire.received)

    def connect(self, *, succeeds: bool = True) -> None:
        """Connect after the delay, or fail to."""
        assert self.wire is None and self.connects_at is not None
        if not succeeds:
            self.client.on_connect_failed(OSError("nobody is there"))
            self._plan()
            return
        self.connects_at = None
        self.wire = self.simulation.open_wire()
        self.wire.owner = self
        self._unwritten = b""
        self.client.on_socket_connected(ADDRESS)
        self._link = self.client.link
        self.after()

    def _plan(self) -> None:
        if self.client.error is None:
            _, delay = self.client.connect_backoff.next_address_and_delay()
            self.connects_at = self.simulation.loop.now + delay

    def after(self) -> None:
        if self.wire is not None and self.client.link is not self._link:
            self.end()

    def end(self) -> None:
        """Close the socket."""
        wire, self.wire = self.wire, None
        if wire is not None:
            self._unwritten = b""
            self.simulation.on_client_closed(self, wire)
            self._plan()

    def lose(self) -> None:
        """Let the client notice that its connection is lost."""
        if self.client.link is self._link:
            self.client.on_connection_lost(ConnectionLost("cut"))
        self.after()

    def flush(self) -> bool:
        if self.wire is None or self._unwritten:
            return False
        out = self.client.data_to_send()
        if not out:
            return True
        data = b"".join(out)
        written = self.wire.put_up(data)
        self._unwritten = data[written:]
        return not self._unwritten

    def _flush_soon(self) -> None:
        self.is_flush_due = True

    def _flush_later(self) -> None:
        if self.flush_by is None:
            self.flush_by = self.simulation.loop.now + ACK_DELAY_S

    def flush_now(self) -> None:
        self.is_flush_due = False
        self.flush_by = None
        self.flush()

    @property
    def must_flush(self) -> bool:
        return self.is_flush_due or (self.flush_by is not None and self.flush_by <= self.simulation.loop.now)

    @property
    def has_forgotten_bytes(self) -> bool:
        """Bytes are unwritten, and no event will write them."""
        link = self.client.link
        return not (
            self.wire is None
            or self._unwritten
            or link is None
            or not link.out_chunks
            or self.is_flush_due
            or self.flush_by is not None
        )

    @property
    def can_write_on(self) -> bool:
        return bool(self._unwritten) and self.wire is not None and len(self.wire.up) < self.wire.capacity_up

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    def write_on(self) -> None:
        assert self.wire is not None
        written = self.wire.put_up(self._unwritten)
        self._unwritten = self._unwritten[written:]
        if not self._unwritten and self.flush():
            self.client.on_drained()

    def deliver(self, size: int) -> None:
        wire = self.wire
        if wire is None:
            return
        data = wire.pop_down(size)
        if data:
            self.client.receive_data(data)
            self.after()
        elif wire.is_closed and not wire.down and not wire.is_cut:
            self.lose()

    def tick(self) -> None:
        self.client.run_due_calls()
        self.after()


class Simulation:
    def __init__(self, random: Random, patch: pytest.MonkeyPatch, policies: Policies) -> None:
        self.random = random
        self.loop = Loop()
        patch.setattr(broker_module, "Committer", Committer)
        patch.setattr(broker_module, "Pager", Pager)
        self.wires: Iterator[int] = itertools.count(1)
        self.store = MemoryStore()
        recovered = self.store.recover()
        self.engine = Engine(CommitState(NoEventLog(), sequence_limit=recovered.sequence_limit), policies=policies)
        self._identity = recovered.identity
        self.broker = Broker(
            self.engine,
            self.store,
            cast("Any", self.loop),
            clock_ns=lambda: int((1_700_000_000 + self.loop.now) * 1e9),
            monotonic_ns=lambda: int(self.loop.now * 1e9),
        )
        self.committer: Committer = cast("Any", self.broker.committer)
        self._wire_of: dict[object, Wire] = {}
        lose = self.broker.ends.lost

        def noted_lose(session: ConnectionState, *, is_exempt: bool = False) -> None:
            wire = self._wire_of[session]
            if not (is_exempt or wire.is_over):
                self.lost_by_broker(wire)
            wire.is_over = True
            lose(session, is_exempt=is_exempt)

        patch.setattr(self.broker.ends, "lost", noted_lose)
        start = self.broker.start()
        try:
            start.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("the disk is instant")
        self.peers: list[Peer] = []
        self.half_open: list[Wire] = []
        """Wires that a client has closed, which the broker does not know yet."""
        self.events = itertools.count(1)
        self.now_event = 0
        self.dispatches: dict[tuple[int, int], tuple[int, int, str]] = {}
        """Event, wire and subscription of each dispatch, by sequence and deliveries."""
        self.taken_over: dict[int, bool] = {}
        """Wires that were taken over, and whether they were exempt."""
        self.on_client_frame: Callable[[Wire, Frame], None] = lambda wire, frame: None
        self.on_broker_frame: Callable[[Wire, Frame], None] = lambda wire, frame: None
        self.dispatched: Callable[[str, int, str], None] = lambda token, sequence, address: None
        self.lost_by_broker: Callable[[Wire], None] = lambda wire: None
        """Callback for a connection that the broker counts as lost, not exempt."""
        self.client_closed: Callable[[Peer, Wire], None] = lambda peer, wire: None
        self.run_broker()

    # ---- What is noted ----

    def event(self) -> int:
        self.now_event = next(self.events)
        return self.now_event

    def on_dispatch(self, wire: Wire, subscription: str, entry: Entry) -> None:
        self.dispatches[entry.sequence, entry.deliveries] = (self.event(), wire.number, subscription)
        assert entry.message is not None, "it is in memory"
        self.dispatched(entry.message.body.decode(), entry.sequence, entry.address)

    def on_taken_over(self, wire: Wire, *, is_exempt: bool) -> None:
        self.taken_over[wire.number] = is_exempt
        if wire in self.half_open:
            self.half_open.remove(wire)

    def client_sent(self, wire: Wire, frame: Frame) -> None:
        self.on_client_frame(wire, frame)

    def on_client_closed(self, peer: Peer, wire: Wire) -> None:
        """Record that the client has closed a wire, which the broker notices later."""
        if not wire.is_closed:
            self.half_open.append(wire)
        self.client_closed(peer, wire)

    def broker_loses(self, wire: Wire) -> None:
        """Let the broker notice that a wire has ended."""
        if wire in self.half_open:
            self.half_open.remove(wire)
        wire.break_up()

    # ---- Steps ----

    def open_wire(self) -> Wire:
        wire = Wire(self)
        connection = TappedConnection(
            cast("Any", wire),
            "client",
            self.broker,
            cast("Any", self.loop),
            identity=self._identity,
            server_name="truenext/test",
            on_closed=lambda _: None,
        )
        connection.simulation, connection.wire = self, wire
        self._wire_of[connection._session] = wire
        return wire

    def peer(self, heart_beat_s: float = 0.0) -> Peer:
        peer = Peer(self, f"c{len(self.peers)}", heart_beat_s)
        self.peers.append(peer)
        return peer

    def run_broker(self) -> None:
        for _ in range(ROUNDS_MAX):
            if not self.loop.ready:
                return
            self.loop.step()
        raise NeverIdle("the broker")

    def advance_to(self, when: float) -> None:
        self.loop.now = max(self.loop.now, when)
        self.loop.ring()

    def next_after_now(self) -> float | None:
        """Return the time of the next timer or connection attempt after now."""
        times = [self.loop.next_at]
        for peer in self.peers:
            if peer.client.error is None and not peer.is_dead:
                times += [peer.client.delayed_calls.next_due_at, peer.connects_at, peer.flush_by]
        return min((each for each in times if each is not None and each > self.loop.now), default=None)

    # ---- Without a client of the core ----

    def raw(self) -> Raw:
        return Raw(self)


class Raw:
    """Client that sends single frames, to look at the remaining messages."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._wire = simulation.open_wire()
        self.send("CONNECT", "accept-version:1.2", "host:x")

    def send(self, command: str, *lines: str, body: bytes = b"") -> list[Frame]:
        self._wire.put_up("\n".join([command, *lines, "", ""]).encode() + body + b"\0")
        return self.read_frames()

    def read_frames(self) -> list[Frame]:
        simulation, wire = self._simulation, self._wire
        before = len(wire.received)
        while True:
            wire.deliver_up(1 << 30)
            simulation.run_broker()
            if simulation.committer.batch is not None:
                simulation.committer.done()
                continue
            if not wire.pop_down(1 << 30) and not simulation.loop.ready:
                return wire.received[before:]

    def waiting(self, queue: str) -> list[Frame]:
        """Return the messages that wait in a queue, in order, and leave them there."""
        shown = self.send("SUBSCRIBE", "id:look", f"destination:/queue/{queue}", "browser:true")
        messages = [frame for frame in shown if frame.command == "MESSAGE"]
        assert messages and messages[-1].headers.get("browser") == "end", f"a browser was shown {shown}"
        self.send("UNSUBSCRIBE", "id:look")
        return messages[:-1]

    def disconnect(self) -> None:
        self.send("DISCONNECT", "receipt:bye")
        self._simulation.broker_loses(self._wire)
        self._simulation.run_broker()


def subscriptions_of(frame: Frame) -> list[str]:
    """Return the subscriptions that a release names."""
    body = json.loads(frame.body)
    return [str(each) for each in body["subscriptions"]]
