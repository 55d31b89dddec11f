"""Relay: sends outbox units that their worker did not send, and units that programs wrote in their own transactions.

Each process has a relay. The relay checks the outbox once a second, and after an error in its process. It claims
producers of dead processes, and this process's own producers in doubt, for which an answer of the database or the
broker is missing. Then it sends the units of the claimed producers, each under the unit's number. So if another process
sends the same unit, the second COMMIT has no effect.

Source: docs/stages-database.md, "Producers"; decision 67
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from truenext.client.core.pending_requests import ProducerStatus
from truenext.errors import ClosedError, ConnectionLost, InDoubt, Refused, RolledBack
from truenext.stage.broker_transaction import BrokerUnavailable
from truenext.stage.core.failure import describe_error
from truenext.stage.core.outbox_unit import COMBINED_UNITS_MAX, OutboxProducer, UnreadableUnit, count_parts
from truenext.stage.outbox.housekeeping import PeriodicTask
from truenext.stage.outbox.publishing import send_unit
from truenext.stage.sql.errors import DatabaseUnavailable, ProducerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.stage.outbox.counters import ExactlyOnceCounters
    from truenext.stage.outbox.housekeeping import OutboxConfirmer
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.outbox_table import Outbox, StoredUnit

_logger = logging.getLogger("truenext.stage")

CHECK_INTERVAL_S = 1.0
PAUSE_MAX_S = 5.0
HEARTBEAT_S = 5.0
"""Largest number of seconds between two heartbeats, even while the relay waits for the broker."""
REQUEST_TIMEOUT_S = 30.0
CLAIMED_MAX = 100
"""Largest number of producers of dead processes that one check claims."""
CONCURRENT_SENDS_MAX = 3
"""Largest number of newly numbered units that are sent at once."""
BACKOFFS_MAX = 100
"""Maximum number of producers in backoff. Other units are sent while these producers wait. At the maximum, no further
unit gets a number."""
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
"""Seconds until a producer in backoff is tried again. Each further pause is twice as long, up to the second value."""
RESOLVED_MAX = 100
"""Largest count of successive numbers, unknown to the broker, that the relay resolves so that the next unit keeps its
number. The broker remembers as many resolved numbers (C19.4)."""
DEEP_CHECK_INTERVAL_S = 60.0
"""Seconds between two deep checks, which look for rare faults."""

UNAVAILABLE_ERRORS = (BrokerUnavailable, ConnectionLost, ClosedError, InDoubt, Refused, RolledBack, TimeoutError)
"""Errors after which the relay tries again later: the broker is unavailable, or refuses a unit for now."""


class BackoffState(NamedTuple):
    """Backoff of a producer, after the broker has not accepted one of its units."""

    until: float
    """Earliest time of the next attempt, by the clock of the event loop."""
    pause_s: float


class OutboxRelay(PeriodicTask):
    def __init__(
        self,
        outbox: Outbox,
        pool: PriorityPool,
        service: str,
        counters: ExactlyOnceCounters,
        confirmer: OutboxConfirmer,
    ) -> None:
        super().__init__("truenext relay", self._check_or_back_off)
        self._outbox = outbox
        self._confirmer = confirmer
        self._counters = counters
        self._pool = pool
        self._service = service
        self._producers_in_doubt: dict[str, bool] = {}
        """Producers in doubt, by name. The value is True if the producer belonged to a dead process."""
        self._backoffs: dict[str, BackoffState] = {}
        """Backoffs of producers, by the producer's name."""
        self._parts_max = COMBINED_UNITS_MAX
        """Maximum number of units that are combined into one, reduced after the broker has refused a combined unit as
        too large."""
        self._free_producers: list[OutboxProducer] = []
        self._borrowed_producers: set[str] = set()
        self._heartbeat = PeriodicTask("truenext alive", self._record_heartbeat)
        self._checked_at = 0.0
        self._retry_pause_s = CHECK_INTERVAL_S
        self._deep_check_at = 0.0
        self._has_new_units = False
        """True if a transaction of this process has committed units without a number since the last check."""

    def start(self) -> None:
        self._checked_at = asyncio.get_running_loop().time()
        super().start()
        self._heartbeat.start()

    def send_new_units(self) -> None:
        """Send at once the units without a number that a transaction of this process has committed."""
        self._has_new_units = True
        self.wake()

    def mark_in_doubt(self, producer: OutboxProducer) -> None:
        """Mark a producer in doubt, because an answer is missing. The producer is not used until it is claimed
        again."""
        self._mark_in_doubt(producer)
        self.wake()

    def _mark_in_doubt(self, producer: OutboxProducer) -> None:
        self._borrowed_producers.discard(producer.name)
        self._producers_in_doubt[producer.name] = False

    def mark_free_in_doubt(self) -> None:
        """Mark all free producers in doubt, because another process may have claimed them."""
        producers, self._free_producers = self._free_producers, []
        for producer in producers:
            self._mark_in_doubt(producer)
        self.wake()

    async def borrow_producer(self) -> OutboxProducer:
        """Return a producer of this process for exclusive use. The loan ends with `return_producer` or `mark_in_doubt`.

        Raises: DatabaseUnavailable
        """
        if self._free_producers:
            producer = self._free_producers.pop()
            self._borrowed_producers.add(producer.name)
            return producer
        producer = self._outbox.new_producer()
        # Added before the database knows of it, as the relay may check in between.
        self._borrowed_producers.add(producer.name)
        try:
            await self._outbox.add_producer(producer)
        except BaseException:
            # If the database has it all the same, a later check finds it.
            self._borrowed_producers.discard(producer.name)
            raise
        return producer

    def return_producer(self, producer: OutboxProducer) -> None:
        """Free a borrowed producer, which must not have any unsent unit."""
        self._borrowed_producers.discard(producer.name)
        self._free_producers.append(producer)

    async def stop(self) -> None:
        await super().stop()
        await self._heartbeat.stop()

    @property
    def free_producer_names(self) -> list[str]:
        return [each.name for each in self._free_producers]

    # ---- Checks ----

    async def _check_or_back_off(self) -> float:
        try:
            is_more = await self._check_outbox()
        except (DatabaseUnavailable, *UNAVAILABLE_ERRORS) as error:
            pause_s, self._retry_pause_s = self._retry_pause_s, min(2 * self._retry_pause_s, PAUSE_MAX_S)
            _logger.warning(
                "the relay cannot send now, and will try again",
                extra={"error": describe_error(error), "next_s": pause_s},
            )
            return pause_s
        self._retry_pause_s = CHECK_INTERVAL_S
        return 0.0 if is_more else CHECK_INTERVAL_S

    async def _record_heartbeat(self) -> float:
        """Record a heartbeat if the last one is HEARTBEAT_S old. Return the seconds until the next call. Heartbeats
        have a task of their own: the relay may wait for the broker for so long that this process would count as
        dead."""
        now = asyncio.get_running_loop().time()
        if now - self._checked_at >= HEARTBEAT_S:
            with suppress(DatabaseUnavailable):
                await self._outbox.register_owner()
                self._checked_at = now
        return HEARTBEAT_S

    async def _check_outbox(self) -> bool:
        """Do the pending work of the outbox. Return True if there is more work to do at once.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        outbox, loop = self._outbox, asyncio.get_running_loop()
        has_new_units, self._has_new_units = self._has_new_units, False
        if has_new_units and not self._producers_in_doubt and loop.time() - self._checked_at < CHECK_INTERVAL_S:
            # Without a heartbeat, which is a transaction for which the caller of `ask` would wait.
            return await self._send_unnumbered()
        pending = await outbox.heartbeat()
        self._checked_at = loop.time()
        if not pending.is_owner_registered:
            await outbox.register_owner()
        if pending.owned_producer_count > len(self._known_producers):
            await self._find_unknown()
        for name in list(self._producers_in_doubt):
            if name not in self._backoffs or self._backoffs[name].until <= self._checked_at:
                await self._claim_or_back_off(name, owner_is_dead=False)
        if pending.has_ownerless_producers:
            for name in await outbox.ownerless_producers(CLAIMED_MAX):
                await self._claim_or_back_off(name, owner_is_dead=True)
        is_more = pending.has_unnumbered_units and len(self._backoffs) < BACKOFFS_MAX and await self._send_unnumbered()
        await self._deep_check()
        return is_more

    async def _claim_or_back_off(self, name: str, *, owner_is_dead: bool) -> None:
        """Claim a producer, and send its units. Back off if the failure concerns only a unit of this producer.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS if no unit can be sent now
        """
        try:
            await self._claim(name, owner_is_dead=owner_is_dead)
            self._backoffs.pop(name, None)
        except (BrokerUnavailable, RolledBack) as error:
            self._back_off_producer(name, error)

    def _back_off_producer(self, name: str, error: BrokerUnavailable | RolledBack) -> None:
        """Back off if the broker refuses a unit of the producer, or the unit is unreadable. Raises: `error`, if it has
        another cause"""
        if not isinstance(error.__cause__, Refused | UnreadableUnit):
            raise error
        before = self._backoffs.get(name)
        pause_s = BACKOFF_S if before is None else min(2 * before.pause_s, BACKOFF_MAX_S)
        self._backoffs[name] = BackoffState(self._checked_at + pause_s, pause_s)
        _logger.warning(
            "a unit of the outbox cannot be sent now, and is skipped",
            extra={"producer": name, "error": describe_error(error), "next_s": pause_s},
        )

    @property
    def _known_producers(self) -> set[str]:
        """Names of the producers that this process knows as its own. Another process may have claimed some of them."""
        return {*self.free_producer_names, *self._borrowed_producers, *self._producers_in_doubt}

    async def _find_unknown(self) -> None:
        """Find producers that the database has for this process but that the process does not know, because an answer
        was lost. Mark these in doubt; otherwise their units would never be sent.

        Raises: DatabaseUnavailable
        """
        owned = await self._outbox.owned_producers()
        known = self._known_producers
        for name in owned:
            if name not in known:
                self._producers_in_doubt[name] = False

    async def _deep_check(self) -> None:
        """Once a minute, find unknown producers, drop unused producers, and log units that only a newer truenext can
        read.

        Raises: DatabaseUnavailable
        """
        now = asyncio.get_running_loop().time()
        if now < self._deep_check_at:
            return
        # Done even if the counts are equal: a producer that belongs to another process by now may hide an unknown one.
        await self._find_unknown()
        await self._drop_unused()
        if unreadable := await self._outbox.count_unreadable():
            _logger.error(
                "units of a newer truenext are in the outbox: only processes of that version can send them",
                extra={"units": unreadable},
            )
        self._deep_check_at = now + DEEP_CHECK_INTERVAL_S

    async def _drop_unused(self) -> None:
        """Drop free producers that have been unused for so long that the broker may soon forget them. Raises:
        DatabaseUnavailable"""
        unused = set(await self._outbox.unused_producers())
        dropped = [each.name for each in self._free_producers if each.name in unused]
        self._free_producers = [each for each in self._free_producers if each.name not in unused]
        await self._outbox.drop_producers(dropped)

    # ---- Units of programs' own transactions ----

    async def _send_unnumbered(self) -> bool:
        """Give numbers to units that have none, and send them. After CHECK_INTERVAL_S no further unit is begun, since
        the next check is due. Return True if there may be more units.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + CHECK_INTERVAL_S
        tasks: set[asyncio.Task[bool]] = set()

        def add_task() -> None:
            if len(tasks) < CONCURRENT_SENDS_MAX:
                tasks.add(loop.create_task(self._number_and_send(until, add_task), name="truenext relay sends"))

        add_task()
        is_more = True
        errors: list[BaseException] = []
        try:
            while tasks:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks -= ended
                for each in ended:
                    if error := each.exception():
                        errors.append(error)
                    else:
                        is_more = is_more and each.result()
        except asyncio.CancelledError:
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)
            raise
        if errors:
            raise errors[0]
        return is_more

    async def _number_and_send(self, until: float, add_task: Callable[[], None]) -> bool:
        """Number and send one unit after the other, each with a producer of its own. Return False if no unit is left.
        If many units wait, this calls `add_task`, which starts another such task: the database numbers one unit while
        the broker takes another.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        loop = asyncio.get_running_loop()
        while not self.is_stopping and loop.time() < until and len(self._backoffs) < BACKOFFS_MAX:
            numbered = await self._number_next()
            if numbered is None:
                return False
            producer, unit = numbered
            if 2 * count_parts(unit.unit) > self._parts_max:
                add_task()
            await self._send_numbered(producer, unit)
            if not unit.may_have_others:
                return False
        return True

    async def _number_next(self) -> tuple[OutboxProducer, StoredUnit] | None:
        """Combine the next units without a number into one, and number it. Return its producer, which is then in doubt,
        and the unit; None if no unit is left. Raises: DatabaseUnavailable"""
        while True:
            producer = await self.borrow_producer()
            # If an answer is missing from now on, the producer is not used before the outcome is known.
            self._mark_in_doubt(producer)
            try:
                unit = await self._outbox.number_units(producer, self._parts_max)
            except ProducerLost:
                self._producers_in_doubt.pop(producer.name)
                continue
            if unit is not None:
                return producer, unit
            self._clear_doubt(producer)
            return None

    async def _send_numbered(self, producer: OutboxProducer, unit: StoredUnit) -> None:
        """Send a newly numbered unit, and free its producer. If the broker refuses the unit, back off.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        try:
            is_sent = await self._send_unit(unit)
        except (BrokerUnavailable, RolledBack) as error:
            self._back_off_producer(producer.name, error)
            return
        if is_sent:
            if unit.may_have_others:
                await self._outbox.delete_sent(producer.name, unit.number)
            else:
                # Later: with SQLite, the first stage of the flow would wait for this transaction.
                self._confirmer.add(unit.id, was_sent=True, is_acknowledged=False)
            producer.last_number += 1
            self._clear_doubt(producer)

    def _clear_doubt(self, producer: OutboxProducer) -> None:
        """Free a producer in doubt, since all its calls were answered."""
        self._producers_in_doubt.pop(producer.name, None)
        self.return_producer(producer)

    # ---- Claims ----

    async def _claim(self, name: str, *, owner_is_dead: bool) -> None:
        """Claim a producer, and send its units. Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS"""
        if name in self._borrowed_producers:
            # Another process has claimed it, and has died. The borrower in this process finds that out first.
            return
        self._free_producers = [each for each in self._free_producers if each.name != name]
        claimed = await self._outbox.claim(name, owner_is_dead=owner_is_dead)
        if claimed == "busy":
            # The transaction that uses it ends when the database notices that its process is gone, or gives up.
            return
        owner_was_dead = self._producers_in_doubt.pop(name, owner_is_dead)
        if claimed == "another's":
            return
        if owner_is_dead:
            self._counters.claimed += 1
            _logger.info("claimed a producer of a process that has ended, to send its units", extra={"producer": name})
        # In doubt until the outcome of all its units is known.
        self._producers_in_doubt[name] = owner_was_dead
        if await self._send_all(claimed):
            if owner_was_dead:
                # Each process makes its own producers: with those of killed processes, their number would only grow.
                await self._outbox.drop_producers([name])
            else:
                self.return_producer(claimed)
        self._producers_in_doubt.pop(name, None)
        if not owner_was_dead:
            self._counters.in_doubt += 1

    async def _send_all(self, producer: OutboxProducer) -> bool:
        """Send all units of a producer. Return True if the producer may be used again. Raises: DatabaseUnavailable; one
        of UNAVAILABLE_ERRORS"""
        outbox = self._outbox
        units = await outbox.units_of(producer)
        highest = await self._highest_number(producer.name)
        for at, unit in enumerate(units):
            number = unit.number
            if number <= highest:
                # Sent, or resolved as rolled back.
                await self._split_unit(unit)
            if number > highest and not await self._send_unit(unit) and not await self._send_after_gap(unit):
                return await self._renumber(producer, units[at:])
            highest = max(highest, number)
            await outbox.delete_sent(producer.name, number)
        if highest == producer.last_number:
            return True
        if highest > producer.last_number:
            _logger.error(
                "the broker knows a number that the database does not: the database has lost commits",
                extra={"producer": producer.name, "number": producer.last_number, "broker": highest},
            )
        await outbox.drop_producers([producer.name])
        return False

    async def _send_unit(self, unit: StoredUnit) -> bool:
        """Send a unit, or split it if it is too large for the broker. Return False if the broker does not know the
        number before the unit's number.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        try:
            is_sent = await send_unit(self._pool, unit, self._service, self._counters)
        except UnreadableUnit as error:
            raise _unreadable_error(unit, error) from error
        except RolledBack as error:
            parts = count_parts(unit.unit)
            if parts < 2 or not isinstance(error.__cause__, Refused) or not await self._split_unit(unit):
                raise
            self._parts_max = min(self._parts_max, parts // 2)
            _logger.info(
                "a unit of the outbox is too large for the broker: it is sent in smaller parts",
                extra={"error": describe_error(error), "parts": parts, "next": self._parts_max},
            )
            return True
        self._parts_max = min(max(self._parts_max + 1, self._parts_max * 5 // 4), COMBINED_UNITS_MAX)
        return is_sent

    async def _split_unit(self, unit: StoredUnit) -> bool:
        """Resolve the number of a unit, so that no process can send the unit under this number any more. If the outcome
        is "rolled back", the parts of the unit become units without a number. Return True if the outcome is known.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        outcome = await self._resolve(unit)
        if outcome == "rolled back":
            try:
                await self._outbox.split_into_unnumbered(unit)
            except UnreadableUnit as error:
                raise _unreadable_error(unit, error) from error
            self.send_new_units()
        # "committed": another process has sent the unit by now.
        return outcome in ("rolled back", "committed")

    async def _resolve(self, unit: StoredUnit) -> str | None:
        """Resolve the COMMIT of a unit. Return its outcome; None if the broker cannot resolve it now. Raises: one of
        UNAVAILABLE_ERRORS"""
        request = {"producer": unit.producer, "commit": unit.number, "resolve": True}
        answer = await self._pool.connection.control_request("producer", request, timeout=REQUEST_TIMEOUT_S)
        return msgspec.json.decode(answer, type=ProducerStatus).outcome

    async def _send_after_gap(self, unit: StoredUnit) -> bool:
        """Send a unit although the broker does not know numbers before the unit's number. Return False if more than
        RESOLVED_MAX numbers are unknown. Numbers are unknown if the broker was restored from an older copy; their units
        were sent and deleted before. The unknown numbers are resolved as rolled back, so that the broker accepts this
        unit under its own number. Under a new number, the unit could be sent twice: a stalled process may still send
        the missing units, and then this unit under its old number.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        name, number = unit.producer, unit.number
        highest = await self._highest_number(name)
        if number - highest > RESOLVED_MAX:
            return False
        _logger.error(
            "the broker has lost numbers of a producer: these numbers are resolved as rolled back",
            extra={"producer": name, "number": number, "broker": highest},
        )
        for missing in range(highest + 1, number):
            await self._resolve(unit._replace(number=missing))
        # If the broker has resolved too many numbers to remember these, it refuses the unit once more.
        return await self._send_unit(unit)

    async def _renumber(self, producer: OutboxProducer, units: Sequence[StoredUnit]) -> bool:
        """Move units to a new producer, since the broker does not know numbers of the old producer. Return False: the
        old producer cannot be used again. Raises: DatabaseUnavailable"""
        _logger.error(
            "the broker does not know the numbers of a producer: it is another broker, has lost data, or has forgotten "
            "the producer after a week. Messages not known to be sent get new numbers, and may come twice",
            extra={"producer": producer.name, "number": producer.last_number, "units": len(units)},
        )
        new = await self._outbox.renumber(units, producer)
        if new is not None:
            self._counters.renumbered += len(units)
            self._mark_in_doubt(new)
            self.wake()
        return False

    async def _highest_number(self, name: str) -> int:
        """Return the highest number of the producer's COMMITs that the broker knows. Raises: one of
        UNAVAILABLE_ERRORS"""
        answer = await self._pool.connection.control_request("producer", {"producer": name}, timeout=REQUEST_TIMEOUT_S)
        return msgspec.json.decode(answer, type=ProducerStatus).commits


def _unreadable_error(unit: StoredUnit, error: UnreadableUnit) -> BrokerUnavailable:
    return BrokerUnavailable(f"unit {unit.id} of the outbox cannot be sent by this process: {error}")
