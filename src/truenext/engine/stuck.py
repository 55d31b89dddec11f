"""Is there a queue in which a message is ready, a consumer has credit, and nothing happens?

Such a queue cannot be: docs/contract.md, "True next". This looks at what waits and at who has credit and asks the
contract's own question again. What the dispatcher and the paging believe (whom to ask, which page is being read, whose
socket is full) is not looked at, for it is what may be wrong.
"""

from __future__ import annotations

from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from truenext.engine.memory import UNSENT_MARK_MIN
from truenext.limits import UNSENT_BYTES_MAX
from truenext.policy import WhileWaiting

if TYPE_CHECKING:
    from collections.abc import Container

    from truenext.engine.consumer import Consumer
    from truenext.engine.engine import Engine
    from truenext.engine.lane import Lane
    from truenext.engine.queue import Queue

STUCK_MS = 5000
"""Milliseconds after which what should never be is said aloud."""


class StuckAudit:
    """Remembers from one look to the next which queues it found so."""

    def __init__(self) -> None:
        self._since: dict[Queue, int] = {}
        """When it was first seen so, in milliseconds, for each queue that was so at every look since."""
        self._said: set[Queue] = set()

    def look(self, engine: Engine, read_lanes: Container[Lane]) -> list[Queue]:
        """To be asked from time to time, right behind a turn; `read_lanes` are those of which a page is being read.

        Returns the queues that have been so for longer than STUCK_MS by now, each once.
        """
        now_ms = engine.now_ms
        found = {
            queue: self._since.get(queue, now_ms)
            for queue in _with_credit(engine)
            if _keeps_waiting(queue, engine.last_committed, read_lanes, now_ms, engine.delays.now_us)
        }
        self._since = found
        too_long = {queue for queue, since_ms in found.items() if now_ms - since_ms > STUCK_MS}
        news = [queue for queue in too_long if queue not in self._said]
        self._said = too_long
        return news

    def stuck(self, now_ms: int) -> list[tuple[Queue, int]]:
        """The queues that were stuck at the last look, and for how many milliseconds each has been by now."""
        return [(queue, now_ms - self._since[queue]) for queue in sorted(self._said, key=lambda queue: queue.name)]


def _with_credit(engine: Engine) -> set[Queue]:
    """The queues some consumer of which has credit."""
    sessions = list(engine.sessions())
    mark = max(engine.memory.limit // 4, UNSENT_MARK_MIN)
    unsent_max = 1 if sum(session.unsent_bytes for session in sessions) > mark else UNSENT_BYTES_MAX
    consumers = [consumer for session in sessions for consumer in session.consumers.values()]
    owners: dict[Queue, Consumer] = {}
    for consumer in sorted(consumers, key=lambda consumer: (-consumer.priority, consumer.number)):
        if consumer.is_exclusive:
            owners.setdefault(consumer.queue, consumer)
    return {
        consumer.queue
        for consumer in consumers
        if not consumer.queue.is_paused
        and consumer.session.unsent_bytes < unsent_max
        and len(consumer.held) < consumer.window
        and owners.get(consumer.queue, consumer) is consumer
    }


class _Place(Enum):
    MEMORY = 1
    STORE = 2
    NOWHERE = 3
    """Nothing is ready, here and in the lanes behind: a failed message holds them back."""


def _keeps_waiting(queue: Queue, committed: int, read_lanes: Container[Lane], now_ms: int, now_us: int) -> bool:
    """A message is ready that nobody is about to dispatch or to read."""
    for lane in queue.lanes:
        place = _first_ready(lane, committed, now_ms, now_us)
        if place is _Place.NOWHERE:
            return False
        if place is _Place.MEMORY:
            return True
        if place is _Place.STORE:
            return lane not in read_lanes
    return False


def _first_ready(lane: Lane, committed: int, now_ms: int, now_us: int) -> _Place | None:
    """Where the first message of a lane is, if that is ready."""
    is_in_store_alone = lane.unread > len(lane.recent)
    for entry in chain(sorted(lane, key=attrgetter("sequence")), lane.recent):
        if entry.batch > committed:
            return None
        if entry.due_us > now_us:
            if lane.queue.policy.while_waiting is WhileWaiting.HOLD:
                return _Place.NOWHERE
            continue
        if entry.message is None or (is_in_store_alone and entry.sequence > lane.horizon):
            return _Place.STORE
        if not 0 < entry.message.expires_ms <= now_ms:
            return _Place.MEMORY
    return _Place.STORE if is_in_store_alone else None
