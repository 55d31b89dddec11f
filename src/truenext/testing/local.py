"""Test broker in the running event loop, with methods by which a test orders faults."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from truenext.model.url import Address, WireProtocol
from truenext.store.memory import MemoryStore
from truenext.testing.checks import checked_queue, checked_seconds, known_names_hint
from truenext.testing.clock import OffsetClock
from truenext.testing.connection import CuttableConnection
from truenext.testing.contents import QueueContents, read_queue_contents
from truenext.testing.faults import CommitMoment, Faults
from truenext.testing.run import BrokerRun

HOST = "127.0.0.1"


class HasSession(Protocol):
    """Connection of a client. A test passes it to `drop`, `freeze` or `thaw`."""

    @property
    def session_id(self) -> str:
        """Value of the header `session` in the connection's CONNECTED."""


class LocalBroker:
    """Broker for a test, in the test's event loop. Call its methods in that loop. It stores nothing on disk."""

    def __init__(self, *more: WireProtocol) -> None:
        """`more` are protocols besides STOMP that the broker speaks, each at an address of its own."""
        self._store = MemoryStore()
        self._clock = OffsetClock()
        self.faults = Faults()
        """Faults that the test has ordered. Only `truenext.testing` itself uses this attribute."""
        self._lock = asyncio.Lock()
        self._broker_run = BrokerRun(self._store, self._clock, self.faults)
        self._addresses = [Address(host=HOST, port=0, protocol=each) for each in (WireProtocol.STOMP, *more)]

    @property
    def url(self) -> str:
        """URL of the broker, stomp://127.0.0.1:PORT. It stays the same after a restart or a crash."""
        return self._addresses[0].url

    def _url_of(self, protocol: WireProtocol) -> str:
        """Return the URL for clients of a protocol, after the start."""
        return next(address.url for address in self._addresses if address.protocol is protocol)

    # ---- Beginning and end ----

    async def start(self) -> None:
        self._addresses = await self._broker_run.start(self._addresses)

    def kill(self) -> None:
        """Close all connections and end the broker. This works in any state of the broker."""
        self._broker_run.kill()

    def check(self) -> None:
        """Check that the broker has not failed, and that each required fault was reached.

        Raises: TruenextError if the broker has failed, which is a bug of truenext; NeverReached if a required fault was
        not reached
        """
        self._broker_run.check_not_failed()
        self.faults.check_all_reached()

    async def restart(self) -> None:
        """Stop the broker cleanly, and start it again. All waiting messages survive, including transient ones.

        Frozen connections are thawed first, and clients get up to two seconds to close their connections.
        """
        async with self._lock:
            await self._broker_run.stop()
            await self._start_again()

    async def crash(self) -> None:
        """Kill the broker, and start it again. Transient messages, and all changes that were not durable, are lost."""
        async with self._lock:
            self._broker_run.kill()
            await self._start_again()

    async def _start_again(self) -> None:
        self._broker_run = BrokerRun(self._store, self._clock, self.faults)
        await self.start()

    # ---- Connections ----

    def lose_commit(self, when: CommitMoment, *, required: bool = True) -> None:
        """Cut the connection of the next COMMIT of any client. With "before", the connection is cut before the broker
        executes the COMMIT, so that the COMMIT has no effect. With "after", it is cut once the COMMIT is durable. In
        both cases the client gets no RECEIPT, and its later commands are not executed. Each further call cuts the
        connection of one more COMMIT.

        Args:
            when: "before" or "after".
            required: True if the test fails with NeverReached when no COMMIT has come before its end.

        Raises: ValueError if `when` or `required` has another value
        """
        self.faults.order_commit_loss(when, required)

    def drop(self, connection: HasSession | str | None = None) -> None:
        """Cut the connection without an ERROR. The client finds its connection reset, and bytes that it has not read
        are lost.

        Args:
            connection: Connection of a client, or the header `session` of its CONNECTED; None means all connections.

        Raises: LookupError if the broker has no such connection; ValueError if `connection` is neither a connection nor
        a text
        """
        for one in self._find_connections(connection):
            one.drop("dropped by a test")

    def freeze(self, connection: HasSession | str | None = None) -> None:
        """Read and write nothing on the connection until `thaw`. If the broker closes the connection meanwhile, the
        client does not see it. Later connections are not frozen.

        Args:
            connection: Connection of a client, or the header `session` of its CONNECTED; None means all connections.

        Raises: LookupError if the broker has no such connection; ValueError if `connection` is neither a connection nor
        a text
        """
        for one in self._find_connections(connection):
            one.freeze()

    def thaw(self, connection: HasSession | str | None = None) -> None:
        """Let a frozen connection continue. If the broker has closed the connection meanwhile, the client sees that
        now.

        Args:
            connection: Connection of a client, or the header `session` of its CONNECTED; None means all connections.

        Raises: LookupError if the broker has no such connection; ValueError if `connection` is neither a connection nor
        a text
        """
        for one in self._find_connections(connection):
            one.thaw()

    def _find_connections(self, connection: HasSession | str | None) -> Collection[CuttableConnection]:
        connections = self._broker_run.connections
        if connection is None:
            return list(connections.values())
        session = connection if isinstance(connection, str) else getattr(connection, "session_id", None)
        if not isinstance(session, str):
            raise ValueError(
                f"connection must be a connection of truenext's client, or its session id as text, not {connection!r}"
            )
        if session not in connections:
            raise LookupError(
                f"the broker has no connection with session {session!r}: {known_names_hint(session, connections)}"
            )
        return [connections[session]]

    # ---- The disk ----

    def fill_disk(self) -> None:
        """Let the disk be full until `free_disk`. The broker then refuses sends, and still executes acknowledgements
        and commits."""
        self.faults.is_disk_full = True

    def free_disk(self) -> None:
        """Give the disk free space again after `fill_disk`."""
        self.faults.is_disk_full = False

    def slow_disk(self, seconds: float) -> None:
        """Delay each batch that the broker writes to the disk, from the next batch on.

        Args:
            seconds: Delay in seconds of the broker's clock, 0 or more. 0 ends the delay, including that of the current
                batch.

        Raises: ValueError if `seconds` is not 0 or more
        """
        self.faults.disk_delay_s = checked_seconds(seconds, "the delay of the disk")
        if not seconds:
            self._broker_run.store.end_batch_delay()

    # ---- Time ----

    async def advance(self, *, seconds: float) -> None:
        """Advance the broker's clock.

        The call returns once the broker has executed all commands that clients had sent before, has run all timers that
        became due, one after the other, and has written the results to the sockets.

        Args:
            seconds: Seconds to advance, 0 or more.

        Raises: ValueError if `seconds` is not 0 or more
        """
        checked_seconds(seconds, "the time to advance")
        async with self._lock:
            await self._broker_run.advance(seconds)

    async def _leap_to(self, wall_ms: int) -> None:
        """Advance the clock to a time at once: each timer that became due meanwhile runs once."""
        async with self._lock:
            await self._broker_run.leap(wall_ms / 1000 - self._clock.wall_ns() / 1e9)

    # ---- A look ----

    async def queue(self, name: str) -> QueueContents:
        """Return the contents of a queue, or of a dead-letter queue (`DLQ.orders`). The broker first executes all
        commands that clients have sent before.

        Args:
            name: Name of the queue, without /queue/.

        Raises: ValueError if `name` is a destination, such as /queue/orders, or is not a valid name of a queue
        """
        checked_queue(name)
        async with self._lock:
            await self._broker_run.quiesce()
            return await read_queue_contents(self.url, name)


@asynccontextmanager
async def broker() -> AsyncIterator[LocalBroker]:
    """Run a broker in the running event loop for the duration of the block.

    Raises: at the end of the block, TruenextError if the broker has failed, which is a bug of truenext; NeverReached if
    a required fault was not reached and the block has raised nothing
    """
    local = LocalBroker()
    try:
        await local.start()
        yield local
    finally:
        local.kill()
    local.check()
