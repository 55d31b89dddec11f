"""What a worker says of a message whose effects happen once, besides what it says to the two transactions."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from truenext.stage.broker_transaction import BrokerUnavailable
from truenext.stage.core.outbox_unit import UnreadableUnit
from truenext.stage.outbox.counters import ExactlyOnceCounters, format_metrics
from truenext.stage.outbox.housekeeping import OutboxCleaner, OutboxConfirmer
from truenext.stage.outbox.publishing import SendResult, send_unit
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql.errors import DatabaseUnavailable, ProducerLost

if TYPE_CHECKING:
    from types import TracebackType

    from truenext.stage.core.outbox_unit import CommitNumber, OutboxProducer
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.outbox_table import Outbox, UnsentCounts

_logger = logging.getLogger("truenext.stage")

STOP_TIMEOUT_S = 5.0
"""For what is still to be said to the database at the end."""
QUERY_TIMEOUT_S = 2.0
"""For how long the database is waited for before figures are said without it."""


class ExactlyOnceProcessing:
    """Of one process that runs a service."""

    def __init__(self, outbox: Outbox, pool: PriorityPool, service: str) -> None:
        self._outbox = outbox
        self._service = service
        self.counters = ExactlyOnceCounters()
        self._relay = OutboxRelay(outbox, pool, service, self.counters)
        self._confirmer = OutboxConfirmer(outbox)
        self._cleaner = OutboxCleaner(outbox)

    async def metrics_text(self) -> str:
        """How it is, for Prometheus; without what only the database knows if that does not say it in time."""
        unsent = None
        with suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                unsent = await self.count_unsent()
        return format_metrics(self.counters, unsent)

    async def count_unsent(self) -> UnsentCounts:
        """What is not known to be sent, of all processes. Raises: DatabaseUnavailable"""
        return await self._outbox.count_unsent()

    async def start(self) -> None:
        """Begin once the tables of the outbox are checked. Raises: DatabaseUnavailable"""
        if not await self._outbox.is_durable():
            _logger.warning(
                "synchronous_commit is off: when the database crashes it forgets what it has confirmed, and what was "
                "sent for that is not taken back",
                extra={"service": self._service},
            )
        await self._outbox.register_owner()
        self._relay.start()
        self._confirmer.start()
        self._cleaner.start()

    async def stop(self) -> None:
        """Its producers are others' at once, or a while later if the database is not there."""
        await self._relay.stop()
        await self._cleaner.stop()
        with suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._confirmer.stop()
                await self._outbox.deregister_owner(self._relay.free_producer_names)

    def wake_relay(self) -> None:
        """A user's transaction has begun flows. In the thread of the event loop."""
        self._relay.wake()

    # ---- Of one message ----

    async def is_processed(self, id: str) -> bool:
        """Raises: DatabaseUnavailable"""
        return await self._outbox.is_processed(id)

    async def ensure_sent(self, id: str, pool: PriorityPool) -> None:
        """The message with this id in the inbox was already processed: see to it that what it has to send is sent.

        Raises: BrokerUnavailable, InDoubt, RolledBack: then its message is not acknowledged yet; DatabaseUnavailable
        """
        self.counters.already_processed += 1
        unit = await self._outbox.find_unit(id)
        if unit is None:
            return
        try:
            result = await send_unit(pool, unit, self._service, self.counters)
        except UnreadableUnit as error:
            raise BrokerUnavailable(f"what was to be sent cannot be sent by this process: {error}") from error
        if result is not SendResult.SENT:
            raise BrokerUnavailable(
                "the broker does not know the numbers of what was to be sent: its relay sees to that"
            )
        self._confirmer.add(id, was_sent=True, is_acknowledged=False)

    def borrow_producer(self) -> BorrowedProducer:
        """`async with once.borrow_producer() as producer:` for what one message may send. Before its transaction
        begins: SQLite has only one that writes at a time."""
        return BorrowedProducer(self._relay)

    def on_committed(self, id: str, *, was_sent: bool, is_acknowledged: bool) -> None:
        """The answer to the COMMIT of a message is known."""
        self._confirmer.add(id, was_sent=was_sent, is_acknowledged=is_acknowledged)


class BorrowedProducer:
    """A producer of this process, for one unit. If the block raises when its number was used, something may have
    happened under that: it is not used before that is known."""

    __slots__ = ("_producer", "_relay", "_was_used")

    def __init__(self, relay: OutboxRelay) -> None:
        self._relay = relay
        self._producer: OutboxProducer | None = None
        self._was_used = False

    async def __aenter__(self) -> BorrowedProducer:
        """Raises: DatabaseUnavailable"""
        self._producer = await self._relay.borrow_producer()
        return self

    def use_next_number(self) -> CommitNumber:
        """It is used from now on."""
        assert self._producer is not None, "the block has begun"
        self._was_used = True
        return self._producer.next_commit

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        producer = self._producer
        assert producer is not None, "the block has begun"
        if isinstance(error, ProducerLost):
            # This process stood still for so long that others took it for dead: whatever it has may be another's.
            self._relay.mark_free_in_doubt()
        if self._was_used and error is not None:
            self._relay.mark_in_doubt(producer)
            return
        if self._was_used:
            producer.last_number += 1
        self._relay.return_producer(producer)
