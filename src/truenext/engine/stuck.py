"""Detector of stuck queues: a message is ready, a consumer has credit, and nothing happens.

By the contract no queue may be stuck (docs/contract.md, "True next"). The detector applies the contract's rules to
waiting messages and credit. It ignores the state of dispatch and paging (which consumers are next, which pages were
requested), because that state may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from functools import cached_property
from itertools import takewhile

from truenext.engine.engine import Engine
from truenext.engine.selecting.scan import ComparisonBudget, QueueScan
from truenext.engine.selecting.selecting import QueueSelection
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.memory import UNSENT_THRESHOLD_MIN
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.model.limits import SCAN_NS_PER_TURN, UNSENT_BYTES_MAX
from truenext.model.order import RANKS
from truenext.model.policy import WhileWaiting

COMPARED_MAX = 2000
"""Messages of a queue that one check compares with selectors; the next check continues after these messages."""

COMPARISONS_MAX = 10_000
"""Approximate number of times that one check of a queue compares a message with a selector, or with an owner of groups.
The next check continues with further selectors and owners."""

FIRST_MAX = 100
"""Messages that are checked at the beginning of a lane: more than one, because the first may have expired."""

QUEUES_MAX = 1000
"""Number of queues in one check; the next check continues with the other queues."""

QUEUES_PER_STEP = 50
"""Number of queues in one step of a check."""

CONSUMERS_PER_STEP = 500
"""Number of consumers collected in one step."""

STUCK_MS = 5000
"""Milliseconds after which a stuck queue is reported."""


class StuckQueueDetector:
    """Periodic check that finds queues which have been stuck for longer than STUCK_MS."""

    def __init__(self) -> None:
        self._stuck_since_ms: dict[Queue, int] = {}
        """By stuck queue: time in ms of the first check that found the queue stuck. A later check that finds no fault
        removes the queue."""
        self._reported: dict[Queue, int] = {}
        """Queues stuck for longer than STUCK_MS at the end of the last check; each with its time in `_stuck_since_ms`,
        which the next check may have removed."""
        self._selective_checks: dict[Queue, _SelectiveCheck] = {}
        self._scanned: dict[Queue, int] = {}
        """Progress of the unfinished scans of each queue at the last check that found it stuck."""
        self._consumers_by_queue: dict[Queue, list[BrokerConsumer]] = {}
        """Consumers by queue, collected at the start of a round. A round checks each of these queues once."""
        self._remaining: list[Queue] = []
        """Queues of the round that are still to be checked."""

    def check(self, engine: Engine, read_lanes: Callable[[], Collection[Lane]]) -> Generator[None, None, list[Queue]]:
        """Check some queues. Called periodically; each step runs right after a turn.

        `read_lanes` returns the lanes of which a page is being read. Returns the queues that are now stuck for longer
        than STUCK_MS, and were not at the end of the check before.
        """
        if not self._remaining:
            yield from self._start_round(engine)
        stop_at = max(0, len(self._remaining) - QUEUES_MAX)
        while len(self._remaining) > stop_at:
            queues = self._remaining[max(stop_at, len(self._remaining) - QUEUES_PER_STEP) :]
            del self._remaining[-len(queues) :]
            self._check_queues(queues, engine, read_lanes())
            yield
        now_ms = engine.state.commit_state.now_ms
        overdue = {queue: since_ms for queue, since_ms in self._stuck_since_ms.items() if now_ms - since_ms > STUCK_MS}
        new = [queue for queue in overdue if queue not in self._reported]
        self._reported = overdue
        return new

    def _start_round(self, engine: Engine) -> Generator[None, None, None]:
        consumers_of: dict[Queue, list[BrokerConsumer]] = {}
        self._consumers_by_queue = consumers_of
        number = 0
        for session in list(engine.state.clients.sessions.values()):
            for consumer in list(session.consumers.values()):
                for queue in consumer.all_queues():
                    consumers_of.setdefault(queue, []).append(consumer)
                    number += 1
                    if number % CONSUMERS_PER_STEP == 0:
                        yield
        self._remaining = list(consumers_of)
        self._stuck_since_ms = {
            queue: since_ms for queue, since_ms in self._stuck_since_ms.items() if queue in consumers_of
        }
        self._scanned = {queue: progress for queue, progress in self._scanned.items() if queue in consumers_of}
        for number, queue in enumerate(list(self._selective_checks), 1):
            if queue not in consumers_of:
                del self._selective_checks[queue]
            if number % CONSUMERS_PER_STEP == 0:
                yield

    def _check_queues(self, queues: list[Queue], engine: Engine, read_lanes: Collection[Lane]) -> None:
        now_ms = engine.state.commit_state.now_ms
        times = (now_ms, engine.state.commit_state.now_us)
        committed = engine.state.commit_state.last_committed
        unsent_max = _unsent_bytes_max(engine)
        dispatching = _queues_dispatching(engine)
        blocked_wildcards = _BlockedWildcards(engine, dispatching.union(lane.queue for lane in read_lanes))
        budget = ComparisonBudget(SCAN_NS_PER_TURN)
        for queue in queues:
            consumers_of_queue = self._consumers_by_queue.pop(queue)
            since_ms, selective = self._stuck_since_ms.pop(queue, now_ms), self._selective_checks.pop(queue, None)
            if all(map(_is_empty, queue.lanes)) or queue in dispatching:
                continue
            consumers = [
                consumer
                for consumer in _consumers_with_credit(
                    queue, [one for one in consumers_of_queue if one.is_subscribed], unsent_max
                )
                if consumer not in blocked_wildcards
            ]
            if not consumers:
                continue
            selection = engine.queues.selections.by_queue.get(queue)
            with_scans = (
                []
                if selection is None
                else [one for one in consumers if selection.consumer_scans.find_scan(one, queue) is not None]
            )
            is_stuck = len(with_scans) < len(consumers) and _has_ready(queue, committed, read_lanes, *times)
            if selection is not None and with_scans:
                self._selective_checks[queue] = selective or _SelectiveCheck()
                is_stuck |= self._selective_checks[queue].has_ready(selection, with_scans, committed, *times, budget)
            progress, before = _scan_progress(selection), self._scanned.pop(queue, 0)
            if is_stuck:
                # A scan that makes progress will reach the message, however long that takes: the time starts anew.
                self._stuck_since_ms[queue] = now_ms if progress > before else since_ms
                self._scanned[queue] = max(progress, before)

    def forget(self) -> None:
        """Let the time of all queues start anew, because no turn is run: nothing can be dispatched."""
        self._stuck_since_ms.clear()

    def stuck_queues(self, now_ms: int) -> list[tuple[Queue, int]]:
        """Return the queues that were stuck at the last check, each with the milliseconds for which it has been stuck
        by now."""
        return [
            (queue, now_ms - since_ms)
            for queue, since_ms in sorted(self._reported.items(), key=lambda reported: reported[0].name)
        ]


def _scan_progress(selection: QueueSelection | None) -> int:
    """Return a number that rises while scans of the queue make progress; 0 if no scan is unfinished."""
    return 0 if selection is None else sum(cursor.position for cursor in selection.unfinished_cursors)


def _queues_dispatching(engine: Engine) -> set[Queue]:
    """Return the queues in which the next turn continues dispatching. Queues that have waited longer than STUCK_MS for
    a turn are left out, because these may be stuck."""
    commit_state = engine.state.commit_state
    since_us = commit_state.now_us - STUCK_MS * 1000
    return {queue for queue in commit_state.touched_queues if queue.last_used_us > since_us}


def _unsent_bytes_max(engine: Engine) -> int:
    """Return the number of unsent bytes of a connection from which on its consumers have no credit."""
    threshold = max(engine.state.memory.limit // 4, UNSENT_THRESHOLD_MIN)
    unsent = sum(session.unsent_bytes for session in engine.state.clients.sessions.values())
    return 1 if unsent > threshold else UNSENT_BYTES_MAX


def _consumers_with_credit(queue: Queue, consumers: list[BrokerConsumer], unsent_max: int) -> list[BrokerConsumer]:
    if queue.is_paused:
        return []
    exclusive = [consumer for consumer in consumers if consumer.is_exclusive]
    if exclusive:
        consumers = [min(exclusive, key=lambda consumer: (-consumer.priority, consumer.number))]
    return [
        consumer
        for consumer in consumers
        if consumer.session.unsent_bytes < unsent_max
        and len(consumer.held) < consumer.window
        and not consumer.session.holds_too_much
    ]


class _BlockedWildcards:
    """Wildcard consumers that rightly get nothing now: in one of their queues a message that may be their true next is
    being read, compared or committed."""

    def __init__(self, engine: Engine, busy_queues: set[Queue]) -> None:
        """`busy_queues` are queues of which a page is being read, or in which the next turn continues dispatching."""
        self._has_uncommitted_for_wildcards = engine.queues.wildcards.has_uncommitted
        self._touched = engine.state.commit_state.touched_wildcards
        self._busy_queues = busy_queues
        self._selections_by_queue = engine.queues.selections.by_queue
        self._is_blocked_cache: dict[BrokerConsumer, bool] = {}

    def __contains__(self, consumer: BrokerConsumer) -> bool:
        if not isinstance(consumer, Wildcard):
            return False
        if self._has_uncommitted_for_wildcards:
            return True
        is_blocked = self._is_blocked_cache.get(consumer)
        if is_blocked is None:
            is_blocked = (
                consumer.is_joining
                or consumer in self._touched
                or not consumer.queues.keys().isdisjoint(self._busy_queues)
                or not consumer.queues.keys().isdisjoint(self._scanned_for(consumer))
            )
            self._is_blocked_cache[consumer] = is_blocked
        return is_blocked

    def _scanned_for(self, consumer: Wildcard) -> set[Queue]:
        return self._scanned_groups if consumer.selector is None else self._scanned

    @cached_property
    def _scanned(self) -> set[Queue]:
        """Queues with messages that are still to be compared with a selector or group."""
        return {
            queue
            for queue, selection in self._selections_by_queue.items()
            if selection.unfinished_cursors
            or selection.has_deferred
            or any(lane.side_read_count for lane in queue.lanes)
        }

    @cached_property
    def _scanned_groups(self) -> set[Queue]:
        """Queues with groups in `_scanned`. Wildcard consumers without a selector wait for these, too."""
        return {queue for queue in self._scanned if self._selections_by_queue[queue].groups is not None}


class _SelectiveReceiver:
    """Consumers that could take the same messages of a queue: all consumers with one selector, or, in a queue with
    groups, a single consumer."""

    def __init__(self, consumer: BrokerConsumer, scan: QueueScan, selection: QueueSelection, now_us: int) -> None:
        self._consumer = consumer
        self._groups = selection.groups
        self.selector = scan.selector
        self._now_us = now_us

    def could_take(self, entry: Entry) -> bool:
        """Return whether these consumers could take a message. An evicted message counts as a match."""
        if entry.message is not None and self.selector is not None and not self.selector.matches(entry.message):
            return False
        groups = self._groups
        if not entry.group or groups is None:
            return True
        if groups.owners.get(entry.group, self._consumer) is not self._consumer:
            return False
        return not any(
            one.group == entry.group and one.due_us > self._now_us
            for lane in entry.lane.queue.lanes
            if lane.rank <= entry.lane.rank
            for one in lane.delayed.values()
            if lane is not entry.lane or one.sequence < entry.sequence
        )


class _SelectiveCheck:
    """Search of a queue with selectors or groups for a ready message in memory that a consumer could take.

    For each receiver the search remembers one such message, and begins with this message the next time. Messages that
    only the store has are not checked: they must be read before a selector can be compared with them.
    """

    def __init__(self) -> None:
        self._suspects: dict[str | int, Entry] = {}
        """Remembered messages, by text of the receiver's selector. With groups, or without a selector, by number of the
        consumer."""
        self._position = (0, 0)
        """Rank and sequence up to which the queue was checked."""
        self._checked: set[str | int] = set()
        """Receivers that were compared with the next messages after `_position`. Once all receivers were, the position
        moves past these messages."""

    def has_ready(
        self,
        selection: QueueSelection,
        consumers: list[BrokerConsumer],
        committed: int,
        now_ms: int,
        now_us: int,
        budget: ComparisonBudget,
    ) -> bool:
        """Return whether a message is ready that one of these consumers could take. Messages beyond the budget are not
        checked."""
        receivers: dict[str | int, _SelectiveReceiver] = {}
        for one in consumers:
            scan = selection.consumer_scans.find_scan(one, selection.queue)
            assert scan is not None, "these have one"
            selector = scan.selector
            key = one.number if selection.groups is not None or selector is None else selector.text
            receivers.setdefault(key, _SelectiveReceiver(one, scan, selection, now_us))
        position = self._position
        entries = self._next_entries(selection.queue)
        ready: dict[str | int, Entry] = {}
        comparisons_left = COMPARISONS_MAX
        for key, receiver in receivers.items():
            suspect = self._suspects.get(key)
            known = [] if suspect is None or suspect.is_out_of_lane else [suspect]
            is_next = key not in self._checked and comparisons_left > 0
            if is_next:
                self._checked.add(key)
            for entry in (*known, *entries) if is_next else known:
                comparisons_left -= 1
                message = entry.message
                if message is None or entry.batch > committed or entry.due_us > now_us:
                    continue
                if 0 < message.expires_ms <= now_ms or not budget.take(receiver.selector, message):
                    continue
                if not receiver.could_take(entry):
                    continue
                comparisons_left -= len(entry.lane.requeued) + len(entry.lane.unread_in_memory)
                if not _is_behind_blocked(entry, receiver, committed, now_us):
                    ready[key] = entry
                    break
        self._suspects = ready
        if self._checked.issuperset(receivers):
            self._checked.clear()
        else:
            self._position = position
        return bool(ready)

    def _next_entries(self, queue: Queue) -> list[Entry]:
        """Return the messages to be checked next, and move the position to their end."""
        rank, after_sequence = self._position
        lane = queue.find_lane(rank)
        if lane is None:
            self._position = ((rank + 1) % len(RANKS), 0)
            return [] if self._position == (0, 0) else self._next_entries(queue)
        entries = lane.entries_between(after_sequence, UNBOUNDED, limit=COMPARED_MAX, with_delayed=False)
        if len(entries) == COMPARED_MAX:
            self._position = (rank, entries[-1].sequence)
            return entries
        self._position = ((rank + 1) % len(RANKS), 0)
        # Most lanes are empty.
        return entries if entries or self._position == (0, 0) else self._next_entries(queue)


def _is_behind_blocked(entry: Entry, receiver: _SelectiveReceiver, committed: int, now_us: int) -> bool:
    """Return whether an earlier message that the receiver could get holds the entry back. Such a message is being
    committed, or blocks its queue until its next try."""
    lane = entry.lane
    in_flight = takewhile(lambda one: one.batch > committed, reversed(lane.arrived))
    earlier = [one for one in (*in_flight, *lane.requeued_entries(), *lane.unread_in_memory) if one.batch > committed]
    if lane.queue.policy.while_waiting is WhileWaiting.BLOCK:
        lanes = (each for each in lane.queue.lanes if each.rank <= lane.rank)
        waiting = (one for each in lanes for one in each.requeued_entries() if one.due_us > now_us)
        earlier += [one for one in waiting if one.lane is not lane or one.sequence < entry.sequence]
    return any(receiver.could_take(one) for one in earlier if one.lane is not lane or one.sequence < entry.sequence)


def _is_empty(lane: Lane) -> bool:
    return not (lane.arrived or lane.unread or lane.unread_in_memory or lane.delayed or lane.requeued or lane.selected)


def _has_ready(queue: Queue, committed: int, read_lanes: Collection[Lane], now_ms: int, now_us: int) -> bool:
    """Return whether the first ready message of a queue is in memory, or only in the store while no page of its lane is
    being read."""
    for lane in queue.lanes:
        is_ready = None if _is_empty(lane) else _is_lane_ready(lane, committed, lane in read_lanes, now_ms, now_us)
        if is_ready is not None:
            return is_ready
    return False


def _is_lane_ready(lane: Lane, committed: int, is_being_read: bool, now_ms: int, now_us: int) -> bool | None:
    """Return whether the first ready message of a lane is in memory, or only in the store while no page of the lane is
    being read. False also if a message that waits for its next try blocks this lane and the lanes after it. None if the
    next lane decides: no message is ready, or a message being committed precedes it."""
    has_unread = lane.unread > len(lane.unread_in_memory)
    for entry in lane.entries_between(0, UNBOUNDED, limit=FIRST_MAX):
        if has_unread and entry.sequence > lane.horizon:
            # Before all that is being written, the lane has messages that only the store has.
            return not is_being_read
        if entry.batch > committed:
            return None
        if entry.due_us > now_us:
            if lane.queue.policy.while_waiting is WhileWaiting.BLOCK:
                return False
            continue
        if entry.message is None:
            return not is_being_read
        if not 0 < entry.message.expires_ms <= now_ms:
            return True
    return not is_being_read if has_unread else None
