"""Whose the groups of a queue are, and what of them its consumers may have.

A queue has groups from the first message on that belongs to one, until its last consumer leaves with nothing in it,
or it goes. Then every consumer's next messages are found as those of a selector (selecting.py), one without a selector
wanting all, and what was found in a lane stands in lines:

    of no group               one line, for everybody
    of each group             a line of its own, of which only the head can be dispatched
    heads of free groups      for everybody
    heads of owned groups     for the owner alone

So the next of a consumer is the smallest of three, and a message of a busy group is never looked at by anybody else.

A line is short: what of a group does not fit is passed over, and where that began is known (`skipped`). It needs no
memory, wherever it is. When the line has run out the lane is gone through once more from there (`fill`), for all groups
that have room; meanwhile those wait that could take them, and nobody else. Source: docs/contract.md, "Groups"
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from sys import getsizeof
from typing import TYPE_CHECKING

from truenext.engine.selecting.scan import ScanCursor
from truenext.engine.state.empty import with_sequence
from truenext.engine.state.memory import GROUP_BYTES
from truenext.engine.state.queue import WHOLE
from truenext.envelope import closes_group
from truenext.limits import GROUP_FOUND_MIN, GROUPS_MAX, GROUPS_MIN, SCAN_FOUND_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.holder import Holder
    from truenext.engine.state.memory import Memory
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.message import SentMessage
    from truenext.selector import Selector


class Groups:
    """The groups of one queue."""

    __slots__ = (
        "_delayed",
        "_first_delayed",
        "_forget_at",
        "_forget_at_if_short",
        "_memory",
        "_places",
        "owners",
        "size",
        "suspended",
        "times_freed",
        "times_owned",
    )

    def __init__(self, places: Callable[[], Iterable[GroupScanCursor]], memory: Memory) -> None:
        """`places` are those of all selectors."""
        self._places = places
        self._memory = memory
        self.size = 0
        """Bytes that are counted for the owned ones."""
        self.owners: dict[str, BrokerConsumer] = {}
        """Whose a group is, the one that was dispatched last at the end; others are free."""
        self.suspended: dict[BrokerConsumer, tuple[int, int]] = {}
        """Those of the owners that rest, with how much they and their transactions had when that was last looked at."""
        self._forget_at = GROUPS_MAX + GROUPS_MAX // 4
        """With more owned groups than these some are forgotten."""
        self._forget_at_if_short = GROUPS_MIN
        """The same where there is no room for them."""
        self.times_owned = self.times_freed = 0
        """How often a group became somebody's, and how often one could be had that could not before."""
        self._delayed: dict[str, set[tuple[int, int]]] = {}
        """Rank and sequence of what waits for its next try."""
        self._first_delayed: dict[str, tuple[int, int]] = {}

    def is_open_to(self, consumer: BrokerConsumer, group: str) -> bool:
        return self.owners.get(group, consumer) is consumer

    def does_wait(self, group: str, rank: int, sequence: int) -> bool:
        """An earlier message of the group waits for its next try."""
        first = self._first_delayed.get(group)
        return first is not None and first < (rank, sequence)

    def took(self, entry: Entry, consumer: BrokerConsumer) -> None:
        """A message of a group is dispatched to a consumer."""
        group = entry.group
        assert entry.message is not None, "what has left memory is read first"
        owner = self.owners.pop(group, None)
        entry.is_first_of_group = owner is None
        if not closes_group(entry.message.header):
            self.owners[group] = consumer
            if owner is None:
                self._count(group_size(group))
                self.times_owned += 1
                self._note_heads(group)
                if len(self.owners) > self._forget_at:
                    self._forget_some(GROUPS_MAX)
                elif len(self.owners) > self._forget_at_if_short and not self._memory.has_room_for_queue:
                    self._forget_some(max(GROUPS_MIN, len(self.owners) // 2))
        elif owner is not None:
            self._count(-group_size(group))
            self._freed(group)

    def suspend(self, consumer: BrokerConsumer, queue: Queue) -> None:
        """It gets nothing until `woke`: what it and its transactions have nothing of is free. The groups are of this
        queue."""
        self.suspended[consumer] = _NEVER_LOOKED
        self.free_groups_of_suspended(queue)

    def woke(self, consumer: BrokerConsumer, queue: Queue) -> None:
        # What became free while it rested is free, though nobody has looked since.
        self.free_groups_of_suspended(queue)
        self.suspended.pop(consumer, None)

    def free_groups_of_suspended(self, queue: Queue) -> None:
        """To be called before a message of this queue, whose groups these are, is given to anybody."""
        for consumer, seen in self.suspended.items():
            session = consumer.session
            # It gets nothing: what it has grows no more, and leaves it for good, or for a transaction, which ends.
            now = (len(consumer.held), session.transactions.ended)
            if now == seen:
                continue
            self.suspended[consumer] = now
            owned = [group for group, owner in self.owners.items() if owner is consumer]
            if owned:
                holders: list[Holder] = [consumer, *session.transactions.answering]
                held = chain.from_iterable(holder.held.values() for holder in holders)
                busy = {entry.group for entry in held if entry.lane.queue is queue}
                for group in owned:
                    if group not in busy:
                        self._free(group)

    def left(self, consumer: BrokerConsumer) -> None:
        """A consumer has ended: its groups are free."""
        self.suspended.pop(consumer, None)
        freed = [group for group, owner in self.owners.items() if owner is consumer]
        for place in self._places():
            place.heads.pop(consumer, None)
        for group in freed:
            self._free(group)

    def delayed(self, entry: Entry) -> None:
        """A message waits for its next try, in `Lane.delayed`."""
        key = (entry.lane.rank, entry.sequence)
        self._delayed.setdefault(entry.group, set()).add(key)
        self._first_delayed[entry.group] = min(key, self._first_delayed.get(entry.group, key))

    def ended_delay(self, entry: Entry) -> None:
        """It waits no longer, for whatever reason."""
        group = entry.group
        delayed = self._delayed.get(group, set())
        delayed.discard((entry.lane.rank, entry.sequence))
        if delayed:
            self._first_delayed[group] = min(delayed)
        else:
            self._delayed.pop(group, None)
            self._first_delayed.pop(group, None)
        self._freed(group)

    def _freed(self, group: str) -> None:
        self.times_freed += 1
        self._note_heads(group)

    def _note_heads(self, group: str) -> None:
        for place in self._places():
            place.note_head(group)

    def _count(self, size: int) -> None:
        self.size += size
        self._memory.queues += size

    def _free(self, group: str) -> None:
        del self.owners[group]
        self._count(-group_size(group))
        self._freed(group)

    def _forget_some(self, count: int) -> None:
        """Let all but so many groups be free, those that were dispatched longest ago, if nothing of them is held."""
        held = {entry.group for consumer in set(self.owners.values()) for entry in consumer.held.values()}
        oldest = list(self.owners)[: len(self.owners) - count]
        for group in oldest:
            if group not in held:
                self._free(group)
        # Not at once again, should all be held.
        self._forget_at = max(GROUPS_MAX, len(self.owners)) + GROUPS_MAX // 4
        self._forget_at_if_short = min(GROUPS_MIN + len(self.owners) * 5 // 4, self._forget_at - 1)


_NEVER_LOOKED = (-1, -1)


def group_size(group: str) -> int:
    """Bytes that it takes to know whose a group is, roughly."""
    return GROUP_BYTES + getsizeof(group)


class GroupScanCursor(ScanCursor):
    """How far one lane of a queue with groups was tested for one selector, and what was found in it."""

    __slots__ = ("_filling", "_groups", "_lines", "_noted_heads", "_skipped", "_until", "heads", "is_hungry")

    def __init__(self, lane: Lane, selector: Selector | None, groups: Groups) -> None:
        super().__init__(lane, selector)
        self._groups = groups
        self._lines: dict[str, list[int]] = {}
        """What was found of each group, as heaps of sequences."""
        self._skipped: dict[str, int] = {}
        """Groups of which nothing more was noted from this sequence on."""
        self._filling: dict[str, int] = {}
        """The same of those for which the lane is gone through once more."""
        self._until = 0
        """If that is so, up to where the lane was tested already."""
        self.heads: dict[BrokerConsumer | None, list[tuple[int, str]]] = {}
        """Where the groups of each consumer begin, as heaps; None has the free ones. Some are no longer true, see
        `_noted_heads`."""
        self._noted_heads: dict[str, tuple[BrokerConsumer | None, int]] = {}
        """Of each group where among the heads it stands, if it does."""
        self.is_hungry = False
        """Somebody waits for what was passed over."""

    # ---- How far it is tested ----

    @property
    def tested(self) -> int:
        return max(self.position, self._until)

    @property
    def _has_enough(self) -> bool:
        return len(self._order) + len(self.heads.get(None, ())) >= SCAN_FOUND_MAX

    @property
    def is_full(self) -> bool:
        # A lane is gone through once more for those who wait already.
        return not self._until and self._has_enough

    @property
    def has_room(self) -> bool:
        return bool(self._until) or len(self._order) + len(self.heads.get(None, ())) <= SCAN_FOUND_MAX // 2

    def stop_before(self, sequence: int) -> bool:
        if not self._has_enough:
            return False
        if self._until:
            self._until = sequence - 1
        else:
            self.position = sequence - 1
        return True

    def passed(self, sequence: int) -> None:
        self.position = max(self.position, sequence)
        if self._until and (not self._filling or self.position >= self._until):
            self.position = max(self.position, self._until)
            self._until = 0
            self._filling.clear()
            self.noted.clear()

    def fill(self) -> None:
        """Go through the lane once more from where messages were passed over; not before the last time is over."""
        self.is_hungry = False
        if self._until:
            return
        share = self._share()
        for group, since in list(self._skipped.items()):
            if len(self._lines.get(group, ())) <= share // 2 or self._head_of_group(group) == (since, False):
                self._filling[group] = self._skipped.pop(group)
        if self._filling:
            self._until = self.position
            self.position = min(self._filling.values()) - 1
            self.noted = []

    # ---- What is found ----

    def wants(self, message: SentMessage, sequence: int) -> bool:
        if not super().wants(message, sequence):
            return False
        return not (message.group and self._passes_over(message.group, sequence))

    def test(self, entry: Entry) -> bool:
        message = entry.message
        if entry.sequence in self.found:
            self.found[entry.sequence] = entry
            return True
        if message is not None and not super().wants(message, entry.sequence):
            return False
        if entry.group and self._passes_over(entry.group, entry.sequence):
            return False
        if message is None:
            self._unsure = with_sequence(self._unsure, entry.sequence)
        self.add(entry)
        return True

    def heard_of(self, entry: Entry) -> bool:
        return not self._is_to_come(entry) and self.test(entry)

    def came_back(self, entry: Entry) -> None:
        sequence, group = entry.sequence, entry.group
        if sequence >= self._skipped.get(group, WHOLE):
            return
        if sequence > self.tested or self._is_to_come(entry):
            self.note_again(entry)
            return
        message = entry.message
        if message is None:
            self._unsure = with_sequence(self._unsure, sequence)
        elif not super().wants(message, sequence):
            return
        self.add(entry)

    def add(self, entry: Entry) -> None:
        sequence, group = entry.sequence, entry.group
        if not group:
            super().add(entry)
            return
        if sequence not in self.found:
            heappush(self._lines.setdefault(group, []), sequence)
        self.found[sequence] = entry
        self.note_head(group)

    def _is_to_come(self, entry: Entry) -> bool:
        """It is come upon when the lane is gone through once more for its group. What comes back before the place from
        which that fills its group is not: all of the group is known there."""
        return entry.sequence > self.position and entry.sequence >= self._filling.get(entry.group, WHOLE)

    def _share(self) -> int:
        return max(GROUP_FOUND_MIN, SCAN_FOUND_MAX // max(1, len(self._lines)))

    def _passes_over(self, group: str, sequence: int) -> bool:
        since = self._skipped.get(group)
        if since is not None:
            return sequence >= since
        line = self._lines.get(group)
        # What goes before all that is known of it is what is waited for.
        if not line or sequence < line[0] or len(line) < self._share():
            return False
        self._skipped[group] = sequence
        self._filling.pop(group, None)
        return True

    # ---- What is next ----

    def note_head(self, group: str) -> None:
        """See that a group stands among the right heads, at its place."""
        sequence, _ = self._head_of_group(group)
        owner = self._groups.owners.get(group)
        if sequence is None or self._groups.does_wait(group, self.lane.rank, sequence):
            self._noted_heads.pop(group, None)
        elif self._noted_heads.get(group) != (owner, sequence):
            self._noted_heads[group] = (owner, sequence)
            heappush(self.heads.setdefault(owner, []), (sequence, group))

    def first_for(self, consumer: BrokerConsumer | None) -> tuple[Entry | None, bool]:
        """The first of what was found that a consumer could take, or anybody who owns no group (None); True if it has
        to wait for what is tested, or for what was passed over."""
        plain = self._first_plain()
        candidates = [] if plain is None else [(plain, True)]
        for owner in (None,) if consumer is None else (None, consumer):
            head = self._first_head(owner)
            if head is not None:
                candidates.append(head)
        sequence, is_known = min(candidates, default=(WHOLE, False))
        if sequence > self.tested or (sequence == WHOLE and self.tested < WHOLE):
            return None, True
        if sequence == WHOLE:
            return None, False
        if not is_known:
            self.is_hungry = not self._until
            return None, True
        return self.found[sequence], False

    def groups(self) -> list[str]:
        """Those of which something is noted that could be next for somebody."""
        return list(self._noted_heads)

    def waits_for_another(self, group: str, consumer: BrokerConsumer) -> bool:
        """Something of this group waits, and it is another consumer's."""
        return not self._groups.is_open_to(consumer, group) and self._head_of_group(group)[0] is not None

    def _first_plain(self) -> int | None:
        while self._order:
            sequence = self._order[0]
            if self._is_there(sequence):
                return sequence
            heappop(self._order)
        return None

    def _first_head(self, owner: BrokerConsumer | None) -> tuple[int, bool] | None:
        heads = self.heads.get(owner)
        while heads:
            sequence, group = heads[0]
            if self._noted_heads.get(group) != (owner, sequence):
                heappop(heads)
                continue
            now, is_known = self._head_of_group(group)
            if now == sequence and not self._groups.does_wait(group, self.lane.rank, now):
                return sequence, is_known
            heappop(heads)
            del self._noted_heads[group]
            self.note_head(group)
        return None

    def _head_of_group(self, group: str) -> tuple[int | None, bool]:
        """Where a group begins, and whether that is a message, and not what was passed over."""
        line = self._lines.get(group)
        while line and not self._is_there(line[0]):
            heappop(line)
        unknown = self._skipped.get(group)
        if unknown is None and group in self._filling:
            unknown = max(self._filling[group], self.position + 1)
        if line and (unknown is None or line[0] < unknown):
            return line[0], True
        if unknown is None and line is not None:
            del self._lines[group]
        return unknown, False

    def _is_there(self, sequence: int) -> bool:
        entry = self.found[sequence]
        if not entry.has_left_lane and self._is_wanted(entry):
            return True
        del self.found[sequence]
        self._unsure.discard(sequence)
        return False
