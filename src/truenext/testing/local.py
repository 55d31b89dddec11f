"""A broker in the running event loop, and the faults that a test can order."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from truenext.store.memory import MemoryStore
from truenext.testing.checks import checked_queue, checked_seconds, known_names_hint
from truenext.testing.clock import OffsetClock
from truenext.testing.connection import CuttableConnection
from truenext.testing.contents import QueueContents, read_queue_contents
from truenext.testing.faults import CommitMoment, Faults
from truenext.testing.run import HOST, BrokerRun


class HasSession(Protocol):
    """Connection of a client, as a test passes it to `drop`, `freeze` or `thaw`."""

    @property
    def session_id(self) -> str:
        """Header `session` of the connection's CONNECTED."""


class LocalBroker:
    """Broker of a test, whose methods are called in its event loop. It stores nothing on disk."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._clock = OffsetClock()
        self.faults = Faults()
        """Faults of all runs; only `truenext.testing` itself uses them."""
        self._lock = asyncio.Lock()
        self._broker_run = BrokerRun(self._store, self._clock, self.faults)
        self._url = ""

    @property
    def url(self) -> str:
        """stomp://127.0.0.1:PORT, the same in all runs."""
        return self._url

    @property
    def _port(self) -> int:
        return int(self._url.rpartition(":")[2] or 0)

    # ---- Beginning and end ----

    async def start(self) -> None:
        self._url = await self._broker_run.start(self._port)

    def kill(self) -> None:
        """Close all connections and end the broker, whatever its state."""
        self._broker_run.kill()

    def check(self) -> None:
        """Check that the broker has not failed, and that each required fault was reached.

        Raises: TruenextError if the broker has failed, which is a bug of truenext; NeverReached
        """
        self._broker_run.check_not_failed()
        self.faults.check_all_reached()

    async def restart(self) -> None:
        """Stop the broker cleanly and start it again: all waiting messages survive, transient ones too.

        Frozen connections are thawed first. Clients have two seconds to close their connections.
        """
        async with self._lock:
            await self._broker_run.stop()
            await self._start_again()

    async def crash(self) -> None:
        """Kill the broker and start it again: transient messages, and all that was not durable, are lost."""
        async with self._lock:
            self._broker_run.kill()
            await self._start_again()

    async def _start_again(self) -> None:
        self._broker_run = BrokerRun(self._store, self._clock, self.faults)
        await self.start()

    # ---- Connections ----

    def lose_commit(self, when: CommitMoment, *, required: bool = True) -> None:
        """Cut the connection of the next COMMIT, of any client: "before" the broker executes it, so that nothing of
        it has happened, or "after" it is durable. Its RECEIPT is never sent, and no command after it is executed.
        Each further call cuts one more COMMIT.

        Args:
            when: "before" or "after".
            required: True if the test fails at its end, with NeverReached, when no COMMIT has come.

        Raises: ValueError
        """
        self.faults.order_commit_loss(when, required)

    def drop(self, connection: HasSession | str | None = None) -> None:
        """Cut the connection without an ERROR: the client finds it reset, and unread bytes are lost.

        Args:
            connection: Connection of a client, or the header `session` of its CONNECTED; None is all connections.

        Raises: LookupError if the broker has no such connection; ValueError if `connection` is none
        """
        for one in self._find_connections(connection):
            one.drop("dropped by a test")

    def freeze(self, connection: HasSession | str | None = None) -> None:
        """Read and write nothing at the connection until `thaw`; the client cannot see if the broker closes it. New
        connections are not frozen.

        Args:
            connection: Connection of a client, or the header `session` of its CONNECTED; None is all connections.

        Raises: LookupError if the broker has no such connection; ValueError if `connection` is none
        """
        for one in self._find_connections(connection):
            one.freeze()

    def thaw(self, connection: HasSession | str | None = None) -> None:
        """Let a frozen connection continue; it is closed if the broker has closed it meanwhile.

        Args:
            connection: Connection of a client, or the header `session` of its CONNECTED; None is all connections.

        Raises: LookupError if the broker has no such connection; ValueError if `connection` is none
        """
        for one in self._find_connections(connection):
            one.thaw()

    def _find_connections(self, connection: HasSession | str | None) -> Collection[CuttableConnection]:
        connections = self._broker_run.connections
        if connection is None:
            return list(connections.values())
        session = connection if isinstance(connection, str) else getattr(connection, "session_id", None)
        if not isinstance(session, str):
            raise ValueError(f"a connection is one of truenext's client, or its session as a text, not {connection!r}")
        if session not in connections:
            raise LookupError(
                f"the broker has no connection with session {session!r}: {known_names_hint(session, connections)}"
            )
        return [connections[session]]

    # ---- The disk ----

    def fill_disk(self) -> None:
        """Leave no free space for sends until `free_disk`; acknowledgements and commits go on."""
        self.faults.is_disk_full = True

    def free_disk(self) -> None:
        """Give the disk free space again, after `fill_disk`."""
        self.faults.is_disk_full = False

    def slow_disk(self, seconds: float) -> None:
        """Delay each batch that is written to the disk, from the next one on.

        Args:
            seconds: Seconds of the broker's clock, 0 or more; 0 ends the delay, also for the batch that is being
                written.

        Raises: ValueError
        """
        self.faults.disk_delay_s = checked_seconds(seconds, "the delay of the disk")
        if not seconds:
            self._broker_run.store.end_batch_delay()

    # ---- Time ----

    async def advance(self, *, seconds: float) -> None:
        """Put the broker's clock forward.

        Returns once the broker has executed all that clients had sent before and, one after the other, all that
        became due, and has written the results to the sockets.

        Args:
            seconds: Seconds, 0 or more.

        Raises: ValueError
        """
        checked_seconds(seconds, "the time to advance")
        async with self._lock:
            await self._broker_run.advance(seconds)

    # ---- A look ----

    async def queue(self, name: str) -> QueueContents:
        """Return the contents of a queue, or of a dead-letter queue (`DLQ.orders`), after all sends of clients before.

        Args:
            name: Name of the queue, without /queue/.

        Raises: ValueError if `name` is a destination, such as /queue/orders, or no queue can have it
        """
        checked_queue(name)
        async with self._lock:
            await self._broker_run.quiesce()
            return await read_queue_contents(HOST, self._port, name)


@asynccontextmanager
async def broker() -> AsyncIterator[LocalBroker]:
    """Run a broker in the running event loop for as long as the context lasts.

    Raises: TruenextError at the end if the broker has failed, which is a bug of truenext; NeverReached at the end of
    a block that has raised nothing
    """
    local = LocalBroker()
    try:
        await local.start()
        yield local
    finally:
        local.kill()
    local.check()
