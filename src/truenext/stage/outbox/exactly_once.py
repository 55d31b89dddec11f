"""Exactly-once processing of one process: the calls of its workers outside of their two transactions, and the
background tasks."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from truenext.model.process_report import OutboxFigures
from truenext.stage.broker_transaction import BrokerUnavailable
from truenext.stage.core.outbox_unit import CommitNumber, OutboxProducer, UnreadableUnit
from truenext.stage.outbox.counters import ExactlyOnceCounters, collect
from truenext.stage.outbox.housekeeping import OutboxCleaner, OutboxConfirmer
from truenext.stage.outbox.publishing import send_unit
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql.errors import DatabaseUnavailable, ProducerLost

if TYPE_CHECKING:
    from types import TracebackType

    from prometheus_client import Metric

    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.outbox_table import Outbox, UnsentCounts

_logger = logging.getLogger("truenext.stage")

STOP_TIMEOUT_S = 5.0
"""Seconds for the last writes to the database when the service stops."""
QUERY_TIMEOUT_S = 2.0
"""Seconds for which metrics wait for the database. Then the metrics that need the database are left out."""


class ExactlyOnceProcessing:
    """Exactly-once processing of one process: it checks the inbox, lends producers to workers, and runs the background
    tasks that send units and delete rows."""

    def __init__(self, outbox: Outbox, pool: PriorityPool, service: str) -> None:
        self._outbox = outbox
        self._service = service
        self.counters = ExactlyOnceCounters()
        self._confirmer = OutboxConfirmer(outbox)
        self._relay = OutboxRelay(outbox, pool, service, self.counters, self._confirmer)
        self._cleaner = OutboxCleaner(outbox)

    @property
    def keeps_replies(self) -> bool:
        """Whether the database has the table of kept replies."""
        return self._outbox.keeps_replies

    async def collect(self) -> list[Metric]:
        """Return the metrics for Prometheus. If the database does not answer in time, the number of unsent messages is
        left out."""
        return collect(self.counters, await self._try_count_unsent())

    async def figures(self) -> OutboxFigures:
        """Return the figures for the report of this process."""
        counters, unsent = self.counters, await self._try_count_unsent()
        return OutboxFigures(
            already_processed=counters.already_processed,
            in_doubt=counters.in_doubt,
            claimed=counters.claimed,
            renumbered=counters.renumbered,
            refused=counters.refused,
            unsent=None if unsent is None else unsent.numbered + unsent.unnumbered,
            oldest_s=None if unsent is None else unsent.oldest_s,
        )

    async def _try_count_unsent(self) -> UnsentCounts | None:
        """Return the counts of unsent messages; None if the database does not answer in time."""
        with suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await self.count_unsent()
        return None

    async def count_unsent(self) -> UnsentCounts:
        """Count the messages of all processes that are still in the outbox, and perhaps not sent yet. Raises:
        DatabaseUnavailable"""
        return await self._outbox.count_unsent()

    async def start(self) -> None:
        """Register this process in the database, and start the background tasks. The tables must have been checked
        before. Raises: DatabaseUnavailable"""
        if not await self._outbox.is_durable():
            _logger.warning(
                "synchronous_commit is off: a crash of the database loses confirmed commits, but not the messages that "
                "were sent for them",
                extra={"service": self._service},
            )
        await self._outbox.register_owner()
        self._relay.start()
        self._confirmer.start()
        self._cleaner.start()

    async def stop(self) -> None:
        """Stop the background tasks, and free this process's producers for other processes. If the database is
        unavailable, other processes can claim these producers only some seconds later."""
        await self._relay.stop()
        await self._cleaner.stop()
        with suppress(DatabaseUnavailable, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._confirmer.stop()
                await self._outbox.deregister_owner(self._relay.free_producer_names)

    def wake_relay(self) -> None:
        """Wake the relay after a database transaction of the program has started flows. Call this in the event loop's
        thread."""
        self._relay.send_new_units()

    # ---- One message ----

    async def is_processed(self, id: str) -> bool:
        """Return whether the inbox contains this id. Raises: DatabaseUnavailable"""
        return await self._outbox.is_processed(id)

    async def ensure_sent(self, id: str, pool: PriorityPool) -> None:
        """Send the unit of an already processed message, if the unit is still in the outbox.

        Raises: BrokerUnavailable, InDoubt or RolledBack if the unit was perhaps not sent; the message must then not be
        acknowledged; DatabaseUnavailable
        """
        self.counters.already_processed += 1
        unit = await self._outbox.find_unit(id)
        if unit is None:
            return
        try:
            is_sent = await send_unit(pool, unit, self._service, self.counters)
        except UnreadableUnit as error:
            raise BrokerUnavailable(f"unit {unit.id} of the outbox cannot be sent by this process: {error}") from error
        if not is_sent:
            raise BrokerUnavailable(
                f"the broker does not know the COMMITs of producer {unit.producer} before number {unit.number}: the "
                f"relay will send unit {unit.id}"
            )
        self._confirmer.add(id, was_sent=True, is_acknowledged=False)

    def borrow_producer(self) -> BorrowedProducer:
        """Borrow a producer for one message: `async with once.borrow_producer() as producer:`. Borrow it before the
        message's SQL transaction begins: borrowing may write to the database, and SQLite has only one writer at a
        time."""
        return BorrowedProducer(self._relay)

    def on_committed(self, id: str, *, was_sent: bool, is_acknowledged: bool) -> None:
        """Record that the broker has answered the COMMIT of a message. `id` is the message's id in the inbox."""
        self._confirmer.add(id, was_sent=was_sent, is_acknowledged=is_acknowledged)


class BorrowedProducer:
    """Producer of this process, borrowed for one unit. If the block raises after `use_next_number`, the unit may have
    been sent or not. Then the producer is in doubt, and is not used until the relay has resolved the doubt."""

    __slots__ = ("_producer", "_relay", "_was_used")

    def __init__(self, relay: OutboxRelay) -> None:
        self._relay = relay
        self._producer: OutboxProducer | None = None
        self._was_used = False

    async def __aenter__(self) -> BorrowedProducer:
        """Borrow the producer. Raises: DatabaseUnavailable"""
        self._producer = await self._relay.borrow_producer()
        return self

    def use_next_number(self) -> CommitNumber:
        """Return the producer's next number. From now on the number counts as used."""
        assert self._producer is not None, "the block has begun"
        self._was_used = True
        return self._producer.next_commit

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        producer = self._producer
        assert producer is not None, "the block has begun"
        if isinstance(error, ProducerLost):
            # This process stood still for so long that other processes took it for dead, and may own its producers now.
            self._relay.mark_free_in_doubt()
        if self._was_used and error is not None:
            self._relay.mark_in_doubt(producer)
            return
        if self._was_used:
            producer.last_number += 1
        self._relay.return_producer(producer)
