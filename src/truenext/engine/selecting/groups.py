"""Message groups of a queue: their owners, and the messages that each consumer may get.

A queue tracks groups once it has had a message with a group. Tracking ends when the queue is removed, or when its last
consumer ends while the queue is empty. While a queue has groups, a scan finds each consumer's next message, as for a
selector (selecting.py); a consumer without a selector matches all messages. The found messages of a lane are kept in
these containers:

    messages without a group    one heap, for all consumers
    messages of one group       a group queue, of which only the head can be dispatched
    heads of free groups        one heap, for all consumers
    heads of owned groups       one heap for each owner

So the next message of a consumer is the first of three heads: of the messages without a group, of the free groups, and
of the groups that the consumer owns.

A group queue is short. Messages that do not fit are skipped, and `_skipped` notes only the first skipped sequence. When
a group queue is nearly empty, `refill` scans the lane again from that sequence, for all groups with space. Only
consumers that could take these messages wait meanwhile. Source: docs/contract.md, "Groups"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import chain
from sys import getsizeof

from truenext.engine.selecting.scan import ScanCursor
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.memory import GROUP_BYTES, MemoryBudget, add_sequence
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue
from truenext.engine.state.transaction import EntryHolder
from truenext.model.forms import closes_group
from truenext.model.limits import GROUP_FOUND_MIN, GROUPS_MAX, GROUPS_MIN, SCAN_FOUND_MAX
from truenext.model.message import SentMessage
from truenext.model.selector import Selector


class GroupOwnership:
    __slots__ = (
        "_cursors",
        "_delayed",
        "_first_delayed",
        "_groups_by_owner",
        "_memory",
        "_owned_max",
        "_owned_max_if_short",
        "assigned_count",
        "freed_count",
        "owned_bytes",
        "owners",
        "suspended_owners",
    )

    def __init__(self, cursors: Callable[[], Iterable[GroupScanCursor]], memory: MemoryBudget) -> None:
        """`cursors` returns all scan cursors of the queue: for each selector, one cursor a lane."""
        self._cursors = cursors
        self._memory = memory
        self.owned_bytes = 0
        """Bytes of memory that count for groups with an owner."""
        self.owners: dict[str, BrokerConsumer] = {}
        """Owner of each group that is not free. The group dispatched last is at the end."""
        self._groups_by_owner: dict[BrokerConsumer, dict[str, None]] = {}
        self.suspended_owners: dict[BrokerConsumer, tuple[int, int]] = {}
        """Suspended consumers, each with two numbers from the last check of its groups: how many messages the consumer
        held, and how many transactions of its connection had ended."""
        self._owned_max = GROUPS_MAX + GROUPS_MAX // 4
        """Number of owned groups above which some groups are freed."""
        self._owned_max_if_short = GROUPS_MIN
        """Limit in place of `_owned_max` while memory for queues is short."""
        self.assigned_count = self.freed_count = 0
        """`assigned_count`: how often a free group got an owner. `freed_count`: how often a group was freed, or the
        delay of a message in a group ended. A dispatch compares both with earlier values, to see whether it must search
        again."""
        self._delayed: dict[str, set[tuple[int, int]]] = {}
        """Rank and sequence of delayed messages, by group."""
        self._first_delayed: dict[str, tuple[int, int]] = {}

    def is_open_to(self, consumer: BrokerConsumer, group: str) -> bool:
        return self.owners.get(group, consumer) is consumer

    def owns_any(self, consumer: BrokerConsumer) -> bool:
        return consumer in self._groups_by_owner

    def has_earlier_delayed(self, group: str, rank: int, sequence: int) -> bool:
        """Return whether an earlier message of the group waits for its next try."""
        first = self._first_delayed.get(group)
        return first is not None and first < (rank, sequence)

    def on_dispatched(self, entry: Entry, consumer: BrokerConsumer) -> None:
        """Make the consumer the owner of the dispatched message's group. If the message closes its group, free the
        group."""
        group = entry.group
        message = entry.message
        assert message is not None, "what has left memory is read first"
        owner = self.owners.pop(group, None)
        entry.is_first_of_group = owner is None
        if not closes_group(message):
            self.owners[group] = consumer
            if owner is None:
                self._groups_by_owner.setdefault(consumer, {})[group] = None
                self._add_owned_bytes(group_bytes(group))
                self.assigned_count += 1
                self._update_heads(group)
                if len(self.owners) > self._owned_max:
                    self._free_oldest(GROUPS_MAX)
                elif len(self.owners) > self._owned_max_if_short and not self._memory.has_space_for_queue:
                    self._free_oldest(max(GROUPS_MIN, len(self.owners) // 2))
        elif owner is not None:
            self._remove_from_owner(group, owner)
            self._add_owned_bytes(-group_bytes(group))
            self._on_freed(group)

    def suspend_owner(self, consumer: BrokerConsumer, queue: Queue) -> None:
        """Free each group of a suspended consumer once the consumer and its transactions hold no message of the group:
        now, or later until `wake_owner`. `queue` is the queue of these groups."""
        self.suspended_owners[consumer] = _NEVER_CHECKED
        self.free_groups_of_suspended(queue)

    def wake_owner(self, consumer: BrokerConsumer, queue: Queue) -> None:
        # Groups that became free while it was suspended are free, even if no check has noticed it yet.
        self.free_groups_of_suspended(queue)
        self.suspended_owners.pop(consumer, None)

    def free_groups_of_suspended(self, queue: Queue) -> None:
        """Free each group whose owner is suspended, if neither the owner nor its transactions hold a message of the
        group. Called before each dispatch from `queue`, the queue of these groups."""
        for consumer, seen in self.suspended_owners.items():
            session = consumer.session
            # A suspended consumer gets no messages. Messages that it holds are settled, or move to a transaction, which
            # ends later. So a group can become free only after one of these numbers has changed.
            now = (len(consumer.held), session.transactions.ended_count)
            if now == seen:
                continue
            self.suspended_owners[consumer] = now
            owned = list(self._groups_by_owner.get(consumer, ()))
            if owned:
                holders: list[EntryHolder] = [consumer, *session.transactions.settling_transactions]
                held = chain.from_iterable(holder.held.values() for holder in holders)
                busy = {entry.group for entry in held if entry.lane.queue is queue}
                self._free([group for group in owned if group not in busy])

    def on_unsubscribed(self, consumer: BrokerConsumer) -> None:
        """Free the groups of a consumer that has ended."""
        self.suspended_owners.pop(consumer, None)
        for cursor in self._cursors():
            cursor.heads_by_owner.pop(consumer, None)
        groups = list(self._groups_by_owner.pop(consumer, ()))
        for group in groups:
            del self.owners[group]
        self._on_all_freed(groups)

    def on_delayed(self, entry: Entry) -> None:
        """Hold back the later messages of a delayed message's group."""
        key = (entry.lane.rank, entry.sequence)
        self._delayed.setdefault(entry.group, set()).add(key)
        self._first_delayed[entry.group] = min(key, self._first_delayed.get(entry.group, key))

    def on_delay_ended(self, entry: Entry) -> None:
        """End the delay of a message. From now on only other delayed messages hold back the group."""
        group = entry.group
        delayed = self._delayed.get(group, set())
        delayed.discard((entry.lane.rank, entry.sequence))
        if delayed:
            self._first_delayed[group] = min(delayed)
        else:
            self._delayed.pop(group, None)
            self._first_delayed.pop(group, None)
        self._on_freed(group)

    def _on_freed(self, group: str) -> None:
        self.freed_count += 1
        self._update_heads(group)

    def _update_heads(self, group: str) -> None:
        for cursor in self._cursors():
            cursor.update_head(group)

    def _add_owned_bytes(self, size: int) -> None:
        self.owned_bytes += size
        self._memory.queue_bytes += size

    def _remove_from_owner(self, group: str, owner: BrokerConsumer) -> None:
        groups = self._groups_by_owner[owner]
        del groups[group]
        if not groups:
            del self._groups_by_owner[owner]

    def _free(self, groups: list[str]) -> None:
        for group in groups:
            self._remove_from_owner(group, self.owners.pop(group))
        self._on_all_freed(groups)

    def _on_all_freed(self, groups: list[str]) -> None:
        if groups:
            self._add_owned_bytes(-sum(map(group_bytes, groups)))
            self.freed_count += len(groups)
            for cursor in self._cursors():
                cursor.update_heads(groups)

    def _free_oldest(self, count: int) -> None:
        """Free all groups but the `count` groups dispatched last. Groups of which a consumer holds messages stay
        owned."""
        held = {entry.group for consumer in set(self.owners.values()) for entry in consumer.held.values()}
        oldest = list(self.owners)[: len(self.owners) - count]
        self._free([group for group in oldest if group not in held])
        # If all are held, the next dispatch must not try again.
        self._owned_max = max(GROUPS_MAX, len(self.owners)) + GROUPS_MAX // 4
        self._owned_max_if_short = min(GROUPS_MIN + len(self.owners) * 5 // 4, self._owned_max - 1)


_NEVER_CHECKED = (-1, -1)


def group_bytes(group: str) -> int:
    """Return roughly the bytes of memory that one owned group takes."""
    return GROUP_BYTES + getsizeof(group)


class GroupScanCursor(ScanCursor):
    """Cursor of a scan in one lane, which also keeps the found messages by group."""

    __slots__ = (
        "_group_queues",
        "_groups",
        "_head_by_group",
        "_refill_until",
        "_refilling",
        "_skipped",
        "heads_by_owner",
        "needs_refill",
    )

    def __init__(self, lane: Lane, selector: Selector | None, groups: GroupOwnership) -> None:
        super().__init__(lane, selector)
        self._groups = groups
        self._group_queues: dict[str, list[int]] = {}
        """Group queues, as heaps of sequences."""
        self._skipped: dict[str, int] = {}
        """Sequence from which on messages of a group were skipped, by group."""
        self._refilling: dict[str, int] = {}
        """Sequence from which on the lane is scanned again for messages of a group, by group."""
        self._refill_until = 0
        """During a refill: sequence up to which the lane had been tested before. Else 0."""
        self.heads_by_owner: dict[BrokerConsumer | None, list[tuple[int, str]]] = {}
        """By owner: heads of its group queues, as a heap; None is for free groups. An item that differs from
        `_head_by_group` is outdated."""
        self._head_by_group: dict[str, tuple[BrokerConsumer | None, int]] = {}
        """By group: owner and sequence of the group's valid item in `heads_by_owner`."""
        self.needs_refill = False
        """True if a consumer's next message may be a skipped message."""

    # ---- Progress of the tests ----

    @property
    def tested_to(self) -> int:
        return max(self.position, self._refill_until)

    @property
    def _has_found_enough(self) -> bool:
        return len(self._found_heap) + len(self.heads_by_owner.get(None, ())) >= SCAN_FOUND_MAX

    @property
    def is_full(self) -> bool:
        # A refill goes on however much was found: consumers wait for it.
        return not self._refill_until and self._has_found_enough

    @property
    def has_space(self) -> bool:
        return (
            bool(self._refill_until)
            or len(self._found_heap) + len(self.heads_by_owner.get(None, ())) <= SCAN_FOUND_MAX // 2
        )

    def stop_before(self, sequence: int, *, if_full: bool = True) -> bool:
        if if_full and not self._has_found_enough:
            return False
        if self._refill_until:
            self._refill_until = sequence - 1
        else:
            self.position = sequence - 1
        return True

    def advance_to(self, sequence: int) -> None:
        self.position = max(self.position, sequence)
        if self._refill_until and (not self._refilling or self.position >= self._refill_until):
            self.position = max(self.position, self._refill_until)
            self._refill_until = 0
            self._refilling.clear()
            self.pending.clear()

    def refill(self) -> None:
        """Begin to scan the lane again, from the first skipped message on. Does nothing if a refill is under way."""
        self.needs_refill = False
        if self._refill_until:
            return
        limit = self._limit_per_group()
        for group, since in list(self._skipped.items()):
            if len(self._group_queues.get(group, ())) <= limit // 2 or self._head_and_is_known(group) == (since, False):
                self._refilling[group] = self._skipped.pop(group)
        if self._refilling:
            self._refill_until = self.position
            self.position = min(self._refilling.values()) - 1
            self.pending = []

    # ---- Matches found ----

    def matches(self, message: SentMessage, sequence: int) -> bool:
        if not super().matches(message, sequence):
            return False
        return not (message.group and self._skips_sequence(message.group, sequence))

    def test(self, entry: Entry) -> bool:
        message = entry.message
        if entry.sequence in self.found:
            self.found[entry.sequence] = entry
            return True
        if message is not None and not super().matches(message, entry.sequence):
            return False
        if entry.group and self._skips_sequence(entry.group, entry.sequence):
            return False
        if message is None:
            self._untested = add_sequence(self._untested, entry.sequence)
        self.add(entry)
        return True

    def on_arrived(self, entry: Entry) -> bool:
        return not self._will_be_refilled(entry) and self.test(entry)

    def on_requeued(self, entry: Entry) -> None:
        sequence, group = entry.sequence, entry.group
        if sequence >= self._skipped.get(group, UNBOUNDED):
            return
        if sequence > self.tested_to or self._will_be_refilled(entry):
            self.add_pending(entry)
            return
        message = entry.message
        if message is None:
            self._untested = add_sequence(self._untested, sequence)
        elif not super().matches(message, sequence):
            return
        self.add(entry)

    def add(self, entry: Entry) -> None:
        sequence, group = entry.sequence, entry.group
        if not group:
            super().add(entry)
            return
        if sequence not in self.found:
            heappush(self._group_queues.setdefault(group, []), sequence)
        self.found[sequence] = entry
        known = self._head_by_group.get(group)
        # An earlier head stays, or is replaced when it is found to be out of date.
        if known is None or known[1] > sequence:
            self.update_head(group)

    def _will_be_refilled(self, entry: Entry) -> bool:
        """Return whether the current refill will still reach the entry. For each group, a refill begins at the first
        skipped sequence; the group queue has the earlier messages."""
        return entry.sequence > self.position and entry.sequence >= self._refilling.get(entry.group, UNBOUNDED)

    def _limit_per_group(self) -> int:
        return max(GROUP_FOUND_MIN, SCAN_FOUND_MAX // max(1, len(self._group_queues)))

    def _skips_sequence(self, group: str, sequence: int) -> bool:
        since = self._skipped.get(group)
        if since is not None:
            return sequence >= since
        group_queue = self._group_queues.get(group)
        # A message before all known ones of its group is never skipped: consumers wait for it.
        if not group_queue or sequence < group_queue[0] or len(group_queue) < self._limit_per_group():
            return False
        self._skipped[group] = sequence
        self._refilling.pop(group, None)
        return True

    # ---- Next message ----

    def update_head(self, group: str) -> None:
        """Put the group's head into `heads_by_owner`, unless it is there already or the group is held back."""
        sequence, _ = self._head_and_is_known(group)
        owner = self._groups.owners.get(group)
        if sequence is None or self._groups.has_earlier_delayed(group, self.lane.rank, sequence):
            self._head_by_group.pop(group, None)
        elif self._head_by_group.get(group) != (owner, sequence):
            self._head_by_group[group] = (owner, sequence)
            heappush(self.heads_by_owner.setdefault(owner, []), (sequence, group))

    def update_heads(self, groups: Iterable[str]) -> None:
        """Update the heads of those of the groups that may have messages in this lane."""
        queues, skipped, refilling, heads = self._group_queues, self._skipped, self._refilling, self._head_by_group
        for group in groups:
            if group in queues or group in heads or group in skipped or group in refilling:
                self.update_head(group)

    def first_for(self, consumer: BrokerConsumer | None) -> tuple[Entry | None, bool]:
        """Return a pair: the first message that the consumer could get, or None; and whether tests or a refill are
        needed to know that message. `consumer` is None for all consumers that own no group.
        """
        ungrouped = self._first_ungrouped()
        candidates = [] if ungrouped is None else [(ungrouped, True)]
        for owner in (None,) if consumer is None else (None, consumer):
            head = self._first_head(owner)
            if head is not None:
                candidates.append(head)
        sequence, is_known = min(candidates, default=(UNBOUNDED, False))
        known_to = self.known_to
        if sequence > known_to or (sequence == UNBOUNDED and known_to < UNBOUNDED):
            return None, True
        if sequence == UNBOUNDED:
            return None, False
        if not is_known:
            self.needs_refill = not self._refill_until
            return None, True
        return self.found[sequence], False

    def groups_with_heads(self) -> list[str]:
        """Return the groups that have a head here and are not held back."""
        return list(self._head_by_group)

    def is_owned_by_another(self, group: str, consumer: BrokerConsumer) -> bool:
        """Return whether another consumer owns the group, and messages of the group wait in this lane."""
        return not self._groups.is_open_to(consumer, group) and self._head_and_is_known(group)[0] is not None

    def _first_ungrouped(self) -> int | None:
        while self._found_heap:
            sequence = self._found_heap[0]
            if self._is_current(sequence):
                return sequence
            heappop(self._found_heap)
        return None

    def _first_head(self, owner: BrokerConsumer | None) -> tuple[int, bool] | None:
        heads = self.heads_by_owner.get(owner)
        while heads:
            sequence, group = heads[0]
            if self._head_by_group.get(group) != (owner, sequence):
                heappop(heads)
                continue
            now, is_known = self._head_and_is_known(group)
            if now == sequence and not self._groups.has_earlier_delayed(group, self.lane.rank, now):
                return sequence, is_known
            heappop(heads)
            del self._head_by_group[group]
            self.update_head(group)
        return None

    def _head_and_is_known(self, group: str) -> tuple[int | None, bool]:
        """Return the first sequence of a group, or None; and whether this message was found (True) or skipped
        (False)."""
        group_queue = self._group_queues.get(group)
        while group_queue and not self._is_current(group_queue[0]):
            heappop(group_queue)
        unknown = self._skipped.get(group)
        if unknown is None and group in self._refilling:
            unknown = max(self._refilling[group], self.position + 1)
        if group_queue and (unknown is None or group_queue[0] < unknown):
            return group_queue[0], True
        if unknown is None and group_queue is not None:
            del self._group_queues[group]
        return unknown, False

    def _is_current(self, sequence: int) -> bool:
        entry = self.found[sequence]
        if not entry.is_out_of_lane and self._is_match(entry):
            return True
        del self.found[sequence]
        self._untested.discard(sequence)
        return False
