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
from truenext.stage.committing import BrokerAway
from truenext.stage.core.failure import said_of
from truenext.stage.core.numbers import OutboxProducer
from truenext.stage.core.outbox_unit import TOGETHER_MAX, UnreadableUnit, parts_in
from truenext.stage.exactly_once.sending import Answer, send_unit
from truenext.stage.exactly_once.steps import Steps
from truenext.stage.sql.errors import DatabaseAway, ProducerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.stage.exactly_once.counters import ExactlyOnceCounters
    from truenext.stage.pool import Pool
    from truenext.stage.sql.outbox import Outbox, StoredUnit

_logger = logging.getLogger("truenext.stage")

LOOK_S = 1.0
PAUSE_MAX_S = 5.0
ALIVE_S = 5.0
"""At least so often it is said that this process is alive, also while the relay waits for the broker."""
ASK_S = 30.0
CLAIMED_MAX = 100
"""Producers of others that are taken over at a time."""
UNDER_WAY_MAX = 3
"""Units of what had no number that are sent at once."""
STUCK_MAX = 100
"""Units that cannot be sent, and that others pass. With so many nothing gets a number any more."""
STUCK_PAUSE_S, STUCK_PAUSE_MAX_S = 1.0, 30.0
"""Until one of them is tried again; each pause is twice as long as the one before."""
RESOLVED_MAX = 100
"""Numbers before one of a unit that are settled if the broker does not know them. So many it remembers (L5)."""
CLOSE_LOOK_S = 60.0
"""Between two closer looks at what is rarely wrong."""

AWAY = (BrokerAway, ConnectionLost, ClosedError, InDoubt, Refused, RolledBack, TimeoutError)
"""The broker is not there, or does not want it now: later."""


class Stuck(NamedTuple):
    """A producer whose unit the broker does not take."""

    until: float
    """By the clock of the event loop."""
    pause_s: float


class Relay:
    def __init__(self, outbox: Outbox, pool: Pool, service: str, counters: ExactlyOnceCounters) -> None:
        self._outbox = outbox
        self._counters = counters
        self._pool = pool
        self._service = service
        self._in_doubt: dict[str, bool] = {}
        """By name, whether it was that of a process that is gone."""
        self._stuck: dict[str, Stuck] = {}
        """Those of them whose unit the broker does not take."""
        self._most = TOGETHER_MAX
        """Of what has no number so much becomes one unit: less after the broker did not take so much."""
        self._free: list[OutboxProducer] = []
        self._borrowed: set[str] = set()
        self._steps = Steps("truenext relay", self._step)
        self._alive = Steps("truenext alive", self._say_alive)
        self._looked_at = 0.0
        self._pause_s = LOOK_S
        self._closer_at = 0.0

    def start(self) -> None:
        self._looked_at = asyncio.get_running_loop().time()
        self._steps.start()
        self._alive.start()

    def in_doubt(self, producer: OutboxProducer) -> None:
        """Something was not answered: it is not to be used before it was taken anew."""
        self._doubt(producer)
        self._steps.wake()

    def _doubt(self, producer: OutboxProducer) -> None:
        self._borrowed.discard(producer.name)
        self._in_doubt[producer.name] = False

    def doubt_all(self) -> None:
        """Whether those that are free are still this process's own is to be found out."""
        while self._free:
            self._doubt(self._free.pop())
        self._steps.wake()

    async def borrow(self) -> OutboxProducer:
        """One that this process may use, and nobody else in it does until it is given back, or in doubt.

        Raises: DatabaseAway
        """
        if self._free:
            producer = self._free.pop()
            self._borrowed.add(producer.name)
            return producer
        producer = self._outbox.named_producer()
        # Before the database hears of it: the relay may look in between.
        self._borrowed.add(producer.name)
        try:
            await self._outbox.add(producer)
        except BaseException:
            # If it is there all the same, a later look finds it.
            self._borrowed.discard(producer.name)
            raise
        return producer

    def return_borrowed(self, producer: OutboxProducer) -> None:
        """Nothing of it is under way."""
        self._borrowed.discard(producer.name)
        self._free.append(producer)

    def wake(self) -> None:
        """There is something to send. In the thread of the event loop."""
        self._steps.wake()

    async def stop(self) -> None:
        await self._steps.stop()
        await self._alive.stop()

    @property
    def free(self) -> list[str]:
        """Names of the producers of which nothing is under way."""
        return [each.name for each in self._free]

    # ---- Looking ----

    async def _step(self) -> float:
        try:
            is_more = await self._look()
        except (DatabaseAway, *AWAY) as error:
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
            _logger.warning(
                "the relay waits: what is left to be sent is sent later",
                extra={"error": said_of(error), "next_s": pause_s},
            )
            return pause_s
        self._pause_s = LOOK_S
        return 0.0 if is_more else LOOK_S

    async def _say_alive(self) -> float:
        """A step may wait for the broker for longer than others take a process for alive that says nothing."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= ALIVE_S:
            with suppress(DatabaseAway):
                await self._outbox.join()
                self._looked_at = now
        return ALIVE_S

    async def _look(self) -> bool:
        """Whether there is more to do at once. Raises: DatabaseAway; one of AWAY"""
        outbox = self._outbox
        look = await outbox.look()
        self._looked_at = asyncio.get_running_loop().time()
        if not look.is_known:
            await outbox.join()
        if look.owned > self._known:
            await self._find_unknown()
        for name in list(self._in_doubt):
            if name not in self._stuck or self._stuck[name].until <= self._looked_at:
                await self._take_or_pass(name, of_the_dead=False)
        if look.ownerless:
            for name in await outbox.ownerless(CLAIMED_MAX):
                await self._take_or_pass(name, of_the_dead=True)
        is_more = look.unnumbered and len(self._stuck) < STUCK_MAX and await self._number()
        await self._look_closer()
        return is_more

    async def _take_or_pass(self, name: str, *, of_the_dead: bool) -> None:
        """Raises: as `_claim`, unless it is the fault of the unit alone: others are not to wait for it"""
        try:
            await self._claim(name, of_the_dead=of_the_dead)
            self._stuck.pop(name, None)
        except (BrokerAway, RolledBack) as error:
            self._pass(name, error)

    def _pass(self, name: str, error: BrokerAway | RolledBack) -> None:
        """The unit of this producer could not be sent. Raises: the error, if nothing can be sent now"""
        if not isinstance(error.__cause__, Refused | UnreadableUnit):
            raise error
        before = self._stuck.get(name)
        pause_s = STUCK_PAUSE_S if before is None else min(2 * before.pause_s, STUCK_PAUSE_MAX_S)
        self._stuck[name] = Stuck(self._looked_at + pause_s, pause_s)
        _logger.warning(
            "a unit of the outbox cannot be sent now: others pass it",
            extra={"producer": name, "error": said_of(error), "next_s": pause_s},
        )

    @property
    def _known(self) -> int:
        """How many producers of its own this process knows of; some may be another's by now."""
        return len(self._free) + len(self._borrowed) + len(self._in_doubt)

    async def _find_unknown(self) -> None:
        """The answer to what has made a producer this process's own may have been lost. Whoever does not know of it
        would never send what it has.

        Raises: DatabaseAway
        """
        owned = await self._outbox.owned()
        known = {each.name for each in self._free} | self._borrowed | self._in_doubt.keys()
        for name in owned:
            if name not in known:
                self._in_doubt[name] = False

    async def _look_closer(self) -> None:
        """Raises: DatabaseAway"""
        now = asyncio.get_running_loop().time()
        if now < self._closer_at:
            return
        # One that is another's by now may stand for one that is not known: then their number says nothing.
        await self._find_unknown()
        await self._drop_unused()
        if unreadable := await self._outbox.unreadable():
            _logger.error(
                "what programs have begun cannot be read by this process, and is left to newer ones",
                extra={"units": unreadable},
            )
        self._closer_at = now + CLOSE_LOOK_S

    async def _drop_unused(self) -> None:
        """The broker soon forgets whoever sends nothing for a week. Raises: DatabaseAway"""
        unused = set(await self._outbox.unused())
        gone = [each.name for each in self._free if each.name in unused]
        self._free = [each for each in self._free if each.name not in unused]
        await self._outbox.drop(gone)

    # ---- What users' transactions have begun ----

    async def _number(self) -> bool:
        """Give numbers to what has none, and send it. True: there may be more, and it is time to look again, and so to
        say that this process is alive.

        Raises: DatabaseAway; one of AWAY
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + LOOK_S
        at_work: set[asyncio.Task[bool]] = set()

        def join() -> None:
            if len(at_work) < UNDER_WAY_MAX:
                at_work.add(loop.create_task(self._number_and_send(until, join), name="truenext relay sends"))

        join()
        is_more = True
        errors: list[BaseException] = []
        try:
            while at_work:
                ended, _ = await asyncio.wait(at_work, return_when=asyncio.FIRST_COMPLETED)
                at_work -= ended
                for each in ended:
                    if error := each.exception():
                        errors.append(error)
                    else:
                        is_more = is_more and each.result()
        except asyncio.CancelledError:
            for each in at_work:
                each.cancel()
            await asyncio.wait(at_work)
            raise
        if errors:
            raise errors[0]
        return is_more

    async def _number_and_send(self, until: float, join: Callable[[], None]) -> bool:
        """One unit after the other, each of a producer of its own; where there is much, another one is to `join`: while
        the broker has one unit, the database makes the next. False if there is no more.

        Raises: as `_number`
        """
        loop = asyncio.get_running_loop()
        while not self._steps.is_stopping and loop.time() < until and len(self._stuck) < STUCK_MAX:
            numbered = await self._numbered()
            if numbered is None:
                return False
            producer, unit = numbered
            if 2 * parts_in(unit.unit) > self._most:
                join()
            await self._send_numbered(producer, unit)
        return True

    async def _numbered(self) -> tuple[OutboxProducer, StoredUnit] | None:
        """A unit of what had no number, and its producer, which is in doubt from now on. Raises: DatabaseAway"""
        while True:
            producer = await self.borrow()
            # Whatever is not answered from now on, it is not used before that is known.
            self._doubt(producer)
            try:
                unit = await self._outbox.number(producer, self._most)
            except ProducerLost:
                self._in_doubt.pop(producer.name)
                continue
            if unit is not None:
                return producer, unit
            self._is_known(producer)
            return None

    async def _send_numbered(self, producer: OutboxProducer, unit: StoredUnit) -> None:
        """Raises: as `_number`"""
        try:
            is_sent = await self._is_sent(unit)
        except (BrokerAway, RolledBack) as error:
            self._pass(producer.name, error)
            return
        if is_sent:
            await self._outbox.sent(producer.name, unit.number)
            producer.number += 1
            self._is_known(producer)

    def _is_known(self, producer: OutboxProducer) -> None:
        """All of it is answered: it may be used again."""
        self._in_doubt.pop(producer.name, None)
        self.return_borrowed(producer)

    # ---- Taking ----

    async def _claim(self, name: str, *, of_the_dead: bool) -> None:
        """Raises: DatabaseAway; one of AWAY"""
        if name in self._borrowed:
            # Another process has taken it over, and has died. Whoever uses it here finds that out first.
            return
        self._free = [each for each in self._free if each.name != name]
        claimed = await self._outbox.claim(name, of_the_dead=of_the_dead)
        if claimed == "busy":
            # It ends when the database has noticed that its process is gone, or has given up.
            return
        was_of_the_dead = self._in_doubt.pop(name, of_the_dead)
        if claimed == "another's":
            return
        if of_the_dead:
            self._counters.claimed += 1
            _logger.info("a producer of a process that is gone was taken over", extra={"producer": name})
        # Until all of it is known it is as before: not to be used.
        self._in_doubt[name] = was_of_the_dead
        if await self._send_all(claimed):
            if was_of_the_dead:
                # Each process makes its own: with those of all that were killed they would become ever more.
                await self._outbox.drop([name])
            else:
                self.return_borrowed(claimed)
        self._in_doubt.pop(name, None)
        if not was_of_the_dead:
            self._counters.in_doubt += 1

    async def _send_all(self, producer: OutboxProducer) -> bool:
        """Whether it may be used again. Raises: DatabaseAway; one of AWAY"""
        outbox = self._outbox
        units = await outbox.units_of(producer)
        highest = await self._highest(producer.name)
        for at, unit in enumerate(units):
            number = unit.number
            if number <= highest:
                # Sent, or given up.
                await self._is_taken_apart(unit)
            if number > highest and not await self._is_sent(unit) and not await self._is_sent_behind_a_gap(unit):
                return await self._move(producer, units[at:])
            highest = max(highest, number)
            await outbox.sent(producer.name, number)
        if highest == producer.number:
            return True
        if highest > producer.number:
            _logger.error(
                "the broker knows a number that the database does not: the database has lost commits",
                extra={"producer": producer.name, "number": producer.number, "broker": highest},
            )
        await outbox.drop([producer.name])
        return False

    async def _is_sent(self, unit: StoredUnit) -> bool:
        """False: the broker does not know the number before. True: under this number nothing is left to be sent.

        Raises: DatabaseAway; one of AWAY
        """
        try:
            is_sent = await send_unit(self._pool, unit, self._service, self._counters) is Answer.SENT
        except UnreadableUnit as error:
            raise _cannot_be_read(unit, error) from error
        except RolledBack as error:
            parts = parts_in(unit.unit)
            if parts < 2 or not isinstance(error.__cause__, Refused) or not await self._is_taken_apart(unit):
                raise
            self._most = min(self._most, parts // 2)
            _logger.info(
                "the broker does not take so much at once: it is sent in smaller parts",
                extra={"error": said_of(error), "parts": parts, "next": self._most},
            )
            return True
        self._most = min(max(self._most + 1, self._most * 5 // 4), TOGETHER_MAX)
        return is_sent

    async def _is_taken_apart(self, unit: StoredUnit) -> bool:
        """Its number is used up, so that nobody can send it any more; then what it was put together of gets others.

        Raises: DatabaseAway; one of AWAY
        """
        outcome = await self._resolve(unit)
        if outcome == "rolled back":
            try:
                await self._outbox.take_apart(unit)
            except UnreadableUnit as error:
                raise _cannot_be_read(unit, error) from error
        # Or somebody else has sent it by now.
        return outcome in ("rolled back", "committed")

    async def _resolve(self, unit: StoredUnit) -> str | None:
        """What became of its COMMIT, for good, if it can be settled now. Raises: one of AWAY"""
        question = {"producer": unit.producer, "commit": unit.number, "resolve": True}
        answer = await self._pool.connection.control_request("producer", question, timeout=ASK_S)
        return msgspec.json.decode(answer, type=ProducerStatus).outcome

    async def _is_sent_behind_a_gap(self, unit: StoredUnit) -> bool:
        """The broker was restored, and lacks numbers whose units are gone: they were sent. Once these are settled it
        takes this unit under its own number.

        To move it would not do. Whoever has read those units, and has stood still since, may fill the gap, and another
        one send this unit under its old number. False: it lacks so many that nobody can fill that.

        Raises: as `_send_all`
        """
        name, number = unit.producer, unit.number
        highest = await self._highest(name)
        if number - highest > RESOLVED_MAX:
            return False
        _logger.error(
            "the broker does not know some numbers of a producer: it has lost something. They are used no more",
            extra={"producer": name, "number": number, "broker": highest},
        )
        for missing in range(highest + 1, number):
            await self._resolve(unit._replace(number=missing))
        # If it remembers too many settled numbers to settle these, it refuses the unit once more.
        return await self._is_sent(unit)

    async def _move(self, producer: OutboxProducer, units: Sequence[StoredUnit]) -> bool:
        """To a producer that the broker does not know. Raises: as `_send_all`"""
        _logger.error(
            "the broker does not know the numbers of a producer: it is another one, or has lost something, or has not "
            "heard of it for a week. What was left to be sent is sent under new numbers",
            extra={"producer": producer.name, "number": producer.number, "units": len(units)},
        )
        new = await self._outbox.move(units, producer)
        if new is not None:
            self._counters.moved += len(units)
            self._doubt(new)
            self._steps.wake()
        return False

    async def _highest(self, name: str) -> int:
        """Number of a COMMIT that the broker knows of it. Raises: one of AWAY"""
        answer = await self._pool.connection.control_request("producer", {"producer": name}, timeout=ASK_S)
        return msgspec.json.decode(answer, type=ProducerStatus).commits


def _cannot_be_read(unit: StoredUnit, error: UnreadableUnit) -> BrokerAway:
    return BrokerAway(f"unit {unit.id} of the outbox cannot be sent by this process: {error}")
