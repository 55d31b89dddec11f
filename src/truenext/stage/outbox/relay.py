"""Who sends what its worker does not send any more?

A relay is in every process. It looks once a second, and when something has gone wrong here. A producer of which an
answer is missing, of the database or of the broker, it takes anew; and that of a process that is not alive any more it
takes over. What such a producer has to send it sends, each unit under its own number: if somebody else has sent it, or
sends it now, that does nothing. Then the producer is free.

Source: docs/stages-outbox.md, "Producers"; decision 67
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
from truenext.stage.outbox.publishing import SendResult, send_unit
from truenext.stage.sql.errors import DatabaseUnavailable, ProducerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.stage.outbox.counters import ExactlyOnceCounters
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.outbox_table import Outbox, StoredUnit

_logger = logging.getLogger("truenext.stage")

CHECK_INTERVAL_S = 1.0
PAUSE_MAX_S = 5.0
HEARTBEAT_S = 5.0
"""At least so often it is said that this process is alive, also while the relay waits for the broker."""
REQUEST_TIMEOUT_S = 30.0
CLAIMED_MAX = 100
"""Producers of others that are taken over at a time."""
CONCURRENT_SENDS_MAX = 3
"""Units of what had no number that are sent at once."""
BACKOFFS_MAX = 100
"""Units that cannot be sent, and that others pass. With so many nothing gets a number any more."""
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
"""Until one of them is tried again; each pause is twice as long as the one before."""
RESOLVED_MAX = 100
"""Numbers before one of a unit that are settled if the broker does not know them. So many it remembers (L5)."""
DEEP_CHECK_INTERVAL_S = 60.0
"""Between two closer looks at what is rarely wrong."""

UNAVAILABLE_ERRORS = (BrokerUnavailable, ConnectionLost, ClosedError, InDoubt, Refused, RolledBack, TimeoutError)
"""The broker is not there, or does not want it now: later."""


class BackoffState(NamedTuple):
    """A producer whose unit the broker does not take."""

    until: float
    """By the clock of the event loop."""
    pause_s: float


class OutboxRelay:
    def __init__(self, outbox: Outbox, pool: PriorityPool, service: str, counters: ExactlyOnceCounters) -> None:
        self._outbox = outbox
        self._counters = counters
        self._pool = pool
        self._service = service
        self._producers_in_doubt: dict[str, bool] = {}
        """By name, whether it was that of a process that is gone."""
        self._backoffs: dict[str, BackoffState] = {}
        """Those of them whose unit the broker does not take."""
        self._parts_max = COMBINED_UNITS_MAX
        """Of what has no number so much becomes one unit: less after the broker did not take so much."""
        self._free_producers: list[OutboxProducer] = []
        self._borrowed_producers: set[str] = set()
        self._task = PeriodicTask("truenext relay", self._check_or_back_off)
        self._heartbeat = PeriodicTask("truenext alive", self._record_heartbeat)
        self._checked_at = 0.0
        self._retry_pause_s = CHECK_INTERVAL_S
        self._deep_check_at = 0.0

    def start(self) -> None:
        self._checked_at = asyncio.get_running_loop().time()
        self._task.start()
        self._heartbeat.start()

    def mark_in_doubt(self, producer: OutboxProducer) -> None:
        """Something was not answered: it is not to be used before it was taken anew."""
        self._mark_in_doubt(producer)
        self._task.wake()

    def _mark_in_doubt(self, producer: OutboxProducer) -> None:
        self._borrowed_producers.discard(producer.name)
        self._producers_in_doubt[producer.name] = False

    def mark_free_in_doubt(self) -> None:
        """Whether those that are free are still this process's own is to be found out."""
        producers, self._free_producers = self._free_producers, []
        for producer in producers:
            self._mark_in_doubt(producer)
        self._task.wake()

    async def borrow_producer(self) -> OutboxProducer:
        """One that this process may use, and nobody else in it does until it is given back, or in doubt.

        Raises: DatabaseUnavailable
        """
        if self._free_producers:
            producer = self._free_producers.pop()
            self._borrowed_producers.add(producer.name)
            return producer
        producer = self._outbox.new_producer()
        # Before the database hears of it: the relay may look in between.
        self._borrowed_producers.add(producer.name)
        try:
            await self._outbox.add_producer(producer)
        except BaseException:
            # If it is there all the same, a later look finds it.
            self._borrowed_producers.discard(producer.name)
            raise
        return producer

    def return_producer(self, producer: OutboxProducer) -> None:
        """Nothing of it is under way."""
        self._borrowed_producers.discard(producer.name)
        self._free_producers.append(producer)

    def wake(self) -> None:
        """There is something to send. In the thread of the event loop."""
        self._task.wake()

    async def stop(self) -> None:
        await self._task.stop()
        await self._heartbeat.stop()

    @property
    def free_producer_names(self) -> list[str]:
        """Names of the producers of which nothing is under way."""
        return [each.name for each in self._free_producers]

    # ---- Looking ----

    async def _check_or_back_off(self) -> float:
        try:
            is_more = await self._check_outbox()
        except (DatabaseUnavailable, *UNAVAILABLE_ERRORS) as error:
            pause_s, self._retry_pause_s = self._retry_pause_s, min(2 * self._retry_pause_s, PAUSE_MAX_S)
            _logger.warning(
                "the relay waits: what is left to be sent is sent later",
                extra={"error": describe_error(error), "next_s": pause_s},
            )
            return pause_s
        self._retry_pause_s = CHECK_INTERVAL_S
        return 0.0 if is_more else CHECK_INTERVAL_S

    async def _record_heartbeat(self) -> float:
        """A step may wait for the broker for longer than others take a process for alive that says nothing."""
        now = asyncio.get_running_loop().time()
        if now - self._checked_at >= HEARTBEAT_S:
            with suppress(DatabaseUnavailable):
                await self._outbox.register_owner()
                self._checked_at = now
        return HEARTBEAT_S

    async def _check_outbox(self) -> bool:
        """Whether there is more to do at once. Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS"""
        outbox = self._outbox
        pending = await outbox.heartbeat()
        self._checked_at = asyncio.get_running_loop().time()
        if not pending.is_owner_registered:
            await outbox.register_owner()
        if pending.owned_producer_count > self._known_count:
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
        """Raises: as `_claim`, unless it is the fault of the unit alone: others are not to wait for it"""
        try:
            await self._claim(name, owner_is_dead=owner_is_dead)
            self._backoffs.pop(name, None)
        except (BrokerUnavailable, RolledBack) as error:
            self._back_off_producer(name, error)

    def _back_off_producer(self, name: str, error: BrokerUnavailable | RolledBack) -> None:
        """The unit of this producer could not be sent. Raises: the error, if nothing can be sent now"""
        if not isinstance(error.__cause__, Refused | UnreadableUnit):
            raise error
        before = self._backoffs.get(name)
        pause_s = BACKOFF_S if before is None else min(2 * before.pause_s, BACKOFF_MAX_S)
        self._backoffs[name] = BackoffState(self._checked_at + pause_s, pause_s)
        _logger.warning(
            "a unit of the outbox cannot be sent now: others pass it",
            extra={"producer": name, "error": describe_error(error), "next_s": pause_s},
        )

    @property
    def _known_count(self) -> int:
        """How many producers of its own this process knows of; some may be another's by now."""
        return len(self._free_producers) + len(self._borrowed_producers) + len(self._producers_in_doubt)

    async def _find_unknown(self) -> None:
        """The answer to what has made a producer this process's own may have been lost. Whoever does not know of it
        would never send what it has.

        Raises: DatabaseUnavailable
        """
        owned = await self._outbox.owned_producers()
        known = (
            {each.name for each in self._free_producers} | self._borrowed_producers | self._producers_in_doubt.keys()
        )
        for name in owned:
            if name not in known:
                self._producers_in_doubt[name] = False

    async def _deep_check(self) -> None:
        """Raises: DatabaseUnavailable"""
        now = asyncio.get_running_loop().time()
        if now < self._deep_check_at:
            return
        # One that is another's by now may stand for one that is not known: then their number says nothing.
        await self._find_unknown()
        await self._drop_unused()
        if unreadable := await self._outbox.count_unreadable():
            _logger.error(
                "what programs have begun cannot be read by this process, and is left to newer ones",
                extra={"units": unreadable},
            )
        self._deep_check_at = now + DEEP_CHECK_INTERVAL_S

    async def _drop_unused(self) -> None:
        """The broker soon forgets whoever sends nothing for a week. Raises: DatabaseUnavailable"""
        unused = set(await self._outbox.unused_producers())
        dropped = [each.name for each in self._free_producers if each.name in unused]
        self._free_producers = [each for each in self._free_producers if each.name not in unused]
        await self._outbox.drop_producers(dropped)

    # ---- What users' transactions have begun ----

    async def _send_unnumbered(self) -> bool:
        """Give numbers to what has none, and send it. True: there may be more, and it is time to look again, and so to
        say that this process is alive.

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
        """One unit after the other, each of its own producer; where there is much, another one is to `add_task`: while
        the broker has one unit, the database makes the next. False if there is no more.

        Raises: as `_send_unnumbered`
        """
        loop = asyncio.get_running_loop()
        while not self._task.is_stopping and loop.time() < until and len(self._backoffs) < BACKOFFS_MAX:
            numbered = await self._number_next()
            if numbered is None:
                return False
            producer, unit = numbered
            if 2 * count_parts(unit.unit) > self._parts_max:
                add_task()
            await self._send_numbered(producer, unit)
        return True

    async def _number_next(self) -> tuple[OutboxProducer, StoredUnit] | None:
        """A unit of what had no number, and its producer, which is in doubt from now on. Raises: DatabaseUnavailable"""
        while True:
            producer = await self.borrow_producer()
            # Whatever is not answered from now on, it is not used before that is known.
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
        """Raises: as `_send_unnumbered`"""
        try:
            is_sent = await self._send_unit(unit)
        except (BrokerUnavailable, RolledBack) as error:
            self._back_off_producer(producer.name, error)
            return
        if is_sent:
            await self._outbox.delete_sent(producer.name, unit.number)
            producer.last_number += 1
            self._clear_doubt(producer)

    def _clear_doubt(self, producer: OutboxProducer) -> None:
        """All of it is answered: it may be used again."""
        self._producers_in_doubt.pop(producer.name, None)
        self.return_producer(producer)

    # ---- Taking ----

    async def _claim(self, name: str, *, owner_is_dead: bool) -> None:
        """Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS"""
        if name in self._borrowed_producers:
            # Another process has taken it over, and has died. Whoever uses it here finds that out first.
            return
        self._free_producers = [each for each in self._free_producers if each.name != name]
        claimed = await self._outbox.claim(name, owner_is_dead=owner_is_dead)
        if claimed == "busy":
            # It ends when the database has noticed that its process is gone, or has given up.
            return
        owner_was_dead = self._producers_in_doubt.pop(name, owner_is_dead)
        if claimed == "another's":
            return
        if owner_is_dead:
            self._counters.claimed += 1
            _logger.info("a producer of a process that is gone was taken over", extra={"producer": name})
        # Until all of it is known it is as before: not to be used.
        self._producers_in_doubt[name] = owner_was_dead
        if await self._send_all(claimed):
            if owner_was_dead:
                # Each process makes its own: with those of all that were killed they would become ever more.
                await self._outbox.drop_producers([name])
            else:
                self.return_producer(claimed)
        self._producers_in_doubt.pop(name, None)
        if not owner_was_dead:
            self._counters.in_doubt += 1

    async def _send_all(self, producer: OutboxProducer) -> bool:
        """Whether it may be used again. Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS"""
        outbox = self._outbox
        units = await outbox.units_of(producer)
        highest = await self._highest_number(producer.name)
        for at, unit in enumerate(units):
            number = unit.number
            if number <= highest:
                # Sent, or given up.
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
        """False: the broker does not know the number before. True: under this number nothing is left to be sent.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        try:
            is_sent = await send_unit(self._pool, unit, self._service, self._counters) is SendResult.SENT
        except UnreadableUnit as error:
            raise _unreadable_error(unit, error) from error
        except RolledBack as error:
            parts = count_parts(unit.unit)
            if parts < 2 or not isinstance(error.__cause__, Refused) or not await self._split_unit(unit):
                raise
            self._parts_max = min(self._parts_max, parts // 2)
            _logger.info(
                "the broker does not take so much at once: it is sent in smaller parts",
                extra={"error": describe_error(error), "parts": parts, "next": self._parts_max},
            )
            return True
        self._parts_max = min(max(self._parts_max + 1, self._parts_max * 5 // 4), COMBINED_UNITS_MAX)
        return is_sent

    async def _split_unit(self, unit: StoredUnit) -> bool:
        """Its number is used up, so that nobody can send it any more; then what it was put together of gets others.

        Raises: DatabaseUnavailable; one of UNAVAILABLE_ERRORS
        """
        outcome = await self._resolve(unit)
        if outcome == "rolled back":
            try:
                await self._outbox.split_into_unnumbered(unit)
            except UnreadableUnit as error:
                raise _unreadable_error(unit, error) from error
        # Or somebody else has sent it by now.
        return outcome in ("rolled back", "committed")

    async def _resolve(self, unit: StoredUnit) -> str | None:
        """What became of its COMMIT, for good, if it can be settled now. Raises: one of UNAVAILABLE_ERRORS"""
        request = {"producer": unit.producer, "commit": unit.number, "resolve": True}
        answer = await self._pool.connection.control_request("producer", request, timeout=REQUEST_TIMEOUT_S)
        return msgspec.json.decode(answer, type=ProducerStatus).outcome

    async def _send_after_gap(self, unit: StoredUnit) -> bool:
        """The broker was restored, and lacks numbers whose units are gone: they were sent. Once these are settled it
        takes this unit under its own number.

        To move it would not do. Whoever has read those units, and has stood still since, may fill the gap, and another
        one send this unit under its old number. False: it lacks so many that nobody can fill that.

        Raises: as `_send_all`
        """
        name, number = unit.producer, unit.number
        highest = await self._highest_number(name)
        if number - highest > RESOLVED_MAX:
            return False
        _logger.error(
            "the broker does not know some numbers of a producer: it has lost something. They are used no more",
            extra={"producer": name, "number": number, "broker": highest},
        )
        for missing in range(highest + 1, number):
            await self._resolve(unit._replace(number=missing))
        # If it remembers too many settled numbers to settle these, it refuses the unit once more.
        return await self._send_unit(unit)

    async def _renumber(self, producer: OutboxProducer, units: Sequence[StoredUnit]) -> bool:
        """To a producer that the broker does not know. Raises: as `_send_all`"""
        _logger.error(
            "the broker does not know the numbers of a producer: it is another one, or has lost something, or has not "
            "heard of it for a week. What was left to be sent is sent under new numbers",
            extra={"producer": producer.name, "number": producer.last_number, "units": len(units)},
        )
        new = await self._outbox.renumber(units, producer)
        if new is not None:
            self._counters.renumbered += len(units)
            self._mark_in_doubt(new)
            self._task.wake()
        return False

    async def _highest_number(self, name: str) -> int:
        """Number of a COMMIT that the broker knows of it. Raises: one of UNAVAILABLE_ERRORS"""
        answer = await self._pool.connection.control_request("producer", {"producer": name}, timeout=REQUEST_TIMEOUT_S)
        return msgspec.json.decode(answer, type=ProducerStatus).commits


def _unreadable_error(unit: StoredUnit, error: UnreadableUnit) -> BrokerUnavailable:
    return BrokerUnavailable(f"unit {unit.id} of the outbox cannot be sent by this process: {error}")
