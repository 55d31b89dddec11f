"""Why does nothing come to a subscription?

What its consumer would be given next is looked for as dispatch does it, and nothing is changed: nothing expires, is
taken or asked for. In a queue the lanes are looked at in order of rank, until one has a message that could be given, or
that has to be found out first; of several queues the first of these counts, in the order of K. There may be tens of
thousands of queues, so it is done in steps, and what is said of them is from different moments. What has expired and is
still there counts as if it had not: the next turn removes it. Source: docs/stomp.md, "What a connection may ask"
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from truenext.engine.selecting.groups import GroupScanCursor
from truenext.engine.state.wildcard import Wildcard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from truenext.engine.engine import Engine
    from truenext.engine.selecting.scan import Scan, ScanCursor
    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.queue import Entry, Lane, Queue

LOOKED_AT_AT_ONCE = 50
"""Queues, groups or messages that are looked at in one step."""


class Idle(Enum):
    """Why nothing comes. Of several that are true the first is said, of several queues the one that is next."""

    BROWSES = "browses"
    SUSPENDED = "suspended"
    NO_CREDIT = "no credit"
    UNREAD = "unread"
    JOINING = "joining"
    PAUSED = "paused"
    EXCLUSIVE = "exclusive"
    COMPARED = "compared"
    READ = "read"
    COMMITTING = "committing"
    GROUP = "group"
    DELAYED = "delayed"
    EMPTY = "empty"
    NOT = ""
    """Something could come."""


_ORDER = {why: place for place, why in enumerate(Idle)}
_FOUND_OUT_FIRST = (Idle.COMPARED, Idle.READ)

Why = tuple[int, Idle]
"""Of a lane: where what it says begins, as a sequence, and what it says."""


def why_idle(engine: Engine, consumer: BrokerConsumer) -> Generator[None, None, Idle]:
    """Why nothing comes to a consumer, as of now, in steps. It may end meanwhile."""
    of_itself = _of_itself(consumer)
    if of_itself is not None:
        return of_itself
    look = _Look(engine, consumer)
    queues = consumer.all_queues()
    for number, queue in enumerate(queues, 1):
        look.at(queue)
        if number % LOOKED_AT_AT_ONCE == 0:
            yield
    first = look.first()
    if first is not None:
        return first
    for number, queue in enumerate(queues, 1):
        yield from look.behind(queue)
        if number % LOOKED_AT_AT_ONCE == 0:
            yield
    return min(look.others, key=_ORDER.__getitem__, default=Idle.EMPTY)


def _of_itself(consumer: BrokerConsumer) -> Idle | None:
    """Whatever is in its queues."""
    if consumer.is_suspended:
        return Idle.SUSPENDED
    pull_request = consumer.pull_request
    if not pull_request.remaining if pull_request is not None else len(consumer.held) >= consumer.window:
        return Idle.NO_CREDIT
    if consumer.session.unsent_bytes >= consumer.memory.unsent_max:
        return Idle.UNREAD
    if isinstance(consumer, Wildcard) and consumer.is_joining:
        return Idle.JOINING
    return None


class _Look:
    """At the queues of one consumer."""

    def __init__(self, engine: Engine, consumer: BrokerConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._is_of_many = isinstance(consumer, Wildcard)
        self._firsts: dict[int, Why] = {}
        """By rank, the first of all queues."""
        self.others: set[Idle] = set()
        """What keeps back all there is in a queue, or all that is behind."""

    def first(self) -> Idle | None:
        """None if nothing is next."""
        committing = None
        for _, (_, why) in sorted(self._firsts.items()):
            if why is not Idle.COMMITTING:
                # What is being committed holds back its equals alone.
                return why if why is Idle.NOT or committing is None else committing
            committing = why
        return committing

    def at(self, queue: Queue) -> None:
        if self._is_of_many and not queue.waiting():
            return
        if queue.is_paused:
            self.others.add(Idle.PAUSED)
            return
        if self._engine.clients.receivers_of(queue).exclusive not in (None, self._consumer):
            self.others.add(Idle.EXCLUSIVE)
            return
        scan = self._engine.selections.scan_of(self._consumer, queue)
        for rank, why in self._in_order(queue, scan):
            if why is None:
                continue
            if why[1] is Idle.DELAYED:
                # It holds back all behind it.
                self.others.add(Idle.DELAYED)
                return
            self._firsts[rank] = min(why, self._firsts.get(rank, why), key=lambda one: one[0])
            if why[1] in _FOUND_OUT_FIRST:
                return

    def _in_order(self, queue: Queue, scan: Scan | None) -> Iterator[tuple[int, Why | None]]:
        if scan is None:
            for lane in queue.lanes:
                yield lane.rank, self._of_lane(lane)
        else:
            for rank, place in scan.places.items():
                yield rank, self._of_place(place)

    def _of_lane(self, lane: Lane) -> Why | None:
        entry = lane.head()
        if entry is None:
            if lane.needs_page:
                return lane.horizon + 1, Idle.READ
            if not lane.unread:
                return None
            entry = lane.recent[0]
            if lane.out_of_turn is not None and lane.out_of_turn.plucked:
                entry = min(entry, *lane.out_of_turn.plucked.values(), key=lambda one: one.sequence)
        if entry.due_us and entry.batch <= self._engine.last_committed:
            return entry.sequence, Idle.DELAYED
        return self._of_entry(entry)

    def _of_place(self, place: ScanCursor) -> Why | None:
        if isinstance(place, GroupScanCursor):
            is_hungry = place.is_hungry
            entry, must_wait = place.first_for(self._consumer)
            # Only dispatch asks for more.
            place.is_hungry = is_hungry
            if entry is None:
                return (0, Idle.COMPARED) if must_wait else None
        else:
            entry = place.first()
            if entry is None:
                return (place.position + 1, Idle.COMPARED) if place.is_behind else None
        return self._of_entry(entry)

    def _of_entry(self, entry: Entry) -> Why:
        if entry.batch > self._engine.last_committed:
            return entry.sequence, Idle.COMMITTING
        if entry.message is None:
            return entry.sequence, Idle.READ
        return entry.sequence, Idle.DELAYED if entry.due_us else Idle.NOT

    def behind(self, queue: Queue) -> Generator[None, None, None]:
        """What waits in a queue of which nothing is next: in others' groups, or for its next try."""
        scan = self._engine.selections.scan_of(self._consumer, queue)
        places = [] if scan is None else list(scan.places.values())
        for place in places:
            if isinstance(place, GroupScanCursor):
                for number, group in enumerate(place.groups(), 1):
                    if place.waits_for_another(group, self._consumer):
                        self.others.add(Idle.GROUP)
                        return
                    if number % LOOKED_AT_AT_ONCE == 0:
                        yield
        for lane in queue.lanes:
            for number, entry in enumerate(list(lane.delayed.values()), 1):
                if self._is_wanted(scan, entry):
                    is_open = not entry.group or self._is_open(queue, entry.group)
                    self.others.add(Idle.DELAYED if is_open else Idle.GROUP)
                    if not (is_open and queue.has_groups):
                        return
                if number % LOOKED_AT_AT_ONCE == 0:
                    yield

    def _is_wanted(self, scan: Scan | None, entry: Entry) -> bool:
        """What a body that is not in memory says is not known, and counts as wanted."""
        selector = None if scan is None else scan.selector
        return selector is None or entry.message is None or selector.matches(entry.message)

    def _is_open(self, queue: Queue, group: str) -> bool:
        return not queue.has_groups or self._engine.selections.groups_of(queue).is_open_to(self._consumer, group)
