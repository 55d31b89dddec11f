"""Run of a test broker: from its start until it is stopped or killed."""

import asyncio
import logging
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from typing import Any, cast

from truenext.broker.recovery import recover
from truenext.client.tasks.driver import check_clock_runs
from truenext.errors import TruenextError
from truenext.model.policy import Policies
from truenext.model.url import Address, parse_listener_url
from truenext.server.listener import Listener
from truenext.server.session_factories import make_session_factories
from truenext.store.memory import MemoryStore
from truenext.testing.clock import AdvanceableLoop, OffsetClock
from truenext.testing.connection import CuttableConnection
from truenext.testing.disk import FaultyStore
from truenext.testing.faults import Faults
from truenext.testing.faulty import FaultyBroker
from truenext.version import VERSION

logger = logging.getLogger(__name__)

IDLE_PASSES = 3
"""Number of passes of the event loop without an action after which the broker counts as idle. More than one pass is
needed, because the loop sees bytes in a socket only one or two passes after they were sent."""
THREAD_POLL_S = 0.0005


class BrokerRun:
    def __init__(self, store: MemoryStore, clock: OffsetClock, faults: Faults) -> None:
        self._clock = clock
        self._loop = AdvanceableLoop(asyncio.get_running_loop(), clock, self._on_internal_error)
        self.store = FaultyStore(store, self._loop, faults)
        engine, recovered = recover(self.store, Policies())
        self._identity, self._after_clean_stop = recovered.identity, recovered.clean_stop
        # An AdvanceableLoop has the methods of an event loop that a broker uses.
        self._event_loop = cast(AbstractEventLoop, self._loop)
        self._broker = FaultyBroker(engine, self.store, self._event_loop, clock, faults)
        self._session_factories = make_session_factories()
        self._listeners: list[Listener] = []
        self.connections: dict[str, CuttableConnection] = {}
        """Connections by session, until the client can see that its connection is closed."""

    async def start(self, addresses: Sequence[Address]) -> list[Address]:
        """Start the broker, and return the addresses at which it listens. With port 0 the system chooses a free port.

        Raises: ConfigurationError if the time of the event loop stands still
        """
        check_clock_runs(asyncio.get_running_loop())
        await self._broker.start(after_clean_stop=self._after_clean_stop)
        for address in addresses:
            listener = Listener(
                address,
                self._broker,
                self._event_loop,
                identity=self._identity,
                server_name=f"truenext/{VERSION}",
                session_factories=self._session_factories,
                make_connection=self._make_connection,
            )
            self._listeners.append(listener)
        self.store.may_be_slow = True
        return [parse_listener_url(listener.url) for listener in self._listeners]

    def _make_connection(self, *arguments: Any, **others: Any) -> CuttableConnection:
        connection = CuttableConnection(*arguments, on_close_seen=self._on_close_seen, **others)
        self.connections[connection.session_id] = connection
        return connection

    def _on_close_seen(self, connection: CuttableConnection) -> None:
        self.connections.pop(connection.session_id, None)

    # ---- Going on ----

    async def quiesce(self) -> None:
        """Wait until the broker is idle. A broker whose work waits for the clock, a client or a slow disk counts as
        idle.

        Raises: TruenextError if the broker has failed; ConfigurationError if the time of the event loop stands still
        """
        check_clock_runs(asyncio.get_running_loop())
        idle_passes = 0
        while idle_passes < IDLE_PASSES:
            done_count = self._loop.run_action_count
            awaits_thread = self._is_thread_busy
            await asyncio.sleep(THREAD_POLL_S if awaits_thread else 0)
            is_idle = self._loop.run_action_count == done_count and not (
                awaits_thread or self._loop.pending_action_count
            )
            idle_passes = idle_passes + 1 if is_idle else 0
        self.check_not_failed()

    @property
    def _is_thread_busy(self) -> bool:
        if self._broker.failure.done():
            return False
        return self._broker.pager.is_busy or (self._broker.committer.is_busy and not self.store.is_delaying)

    async def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`, and run the timers that become due, one after the other.

        Raises: TruenextError if the broker has failed; ConfigurationError if the time of the event loop stands still
        """
        await self.quiesce()
        until = self._loop.time() + seconds
        while (due := self._loop.next_due_at) is not None and due <= until:
            self._advance_to(due)
            # Most timers are periodic checks that find no change: they need no `quiesce`.
            await asyncio.sleep(0)
            while self._loop.pending_action_count or self._is_thread_busy:
                await asyncio.sleep(THREAD_POLL_S if self._is_thread_busy else 0)
        await self._end_advance(until)

    async def leap(self, seconds: float) -> None:
        """Advance the clock by `seconds` at once, as a machine does that was suspended.

        Raises: TruenextError if the broker has failed; ConfigurationError if the time of the event loop stands still
        """
        await self.quiesce()
        await self._end_advance(self._loop.time() + seconds)

    async def _end_advance(self, until: float) -> None:
        self._advance_to(until)
        # The broker rounds the time at which it must wake up to a whole millisecond.
        self._broker.run_turn_soon()
        await self.quiesce()

    def _advance_to(self, seconds: float) -> None:
        self._clock.advance_to(seconds)
        for connection in self.connections.values():
            connection.count_as_heart_beat()
        self._loop.run_due()

    # ---- The end ----

    async def stop(self) -> None:
        """Stop the broker as SIGTERM does. The next run has all waiting messages, including transient ones.

        Raises: TruenextError if the broker has failed; ConfigurationError if the time of the event loop stands still
        """
        check_clock_runs(asyncio.get_running_loop())
        for connection in list(self.connections.values()):
            connection.thaw()
        self.store.may_be_slow = False
        self.store.end_batch_delay()
        for listener in self._listeners:
            listener.stop_reading()
        self.check_not_failed()
        await self._broker.stop()
        for listener in self._listeners:
            await listener.close()
        self._end_loop_and_broker()

    def kill(self) -> None:
        """End the broker as SIGKILL does. The broker may have failed or ended before."""
        for listener in self._listeners:
            listener.stop_reading()
        for connection in list(self.connections.values()):
            connection.close_socket()
        self.connections.clear()
        self.store.kill()
        self._end_loop_and_broker()

    def _end_loop_and_broker(self) -> None:
        self._loop.end()
        self._broker.close()

    def check_not_failed(self) -> None:
        """Check that the broker has not failed. Raises: TruenextError if it has failed, which is a bug of truenext"""
        if self._broker.failure.done():
            self._broker.failure.result()

    def _on_internal_error(self, error: Exception) -> None:
        logger.critical("internal error", exc_info=error)
        self._broker.fail(TruenextError(f"internal error, the broker stops: {error!r}"))
