"""Entries grouped by lane, of messages that were given up and wait to be dead-lettered.

The entries of each lane are in the order in which they were added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain

from truenext.engine.state.queue import Entry, Lane


class EntriesByLane:
    def __init__(self) -> None:
        # No dict: to find its first key, a dict walks over all keys removed at its front.
        self._by_lane: OrderedDict[Lane, OrderedDict[int, Entry]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_lane)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(entries.values() for entries in self._by_lane.values())

    def __contains__(self, entry: Entry) -> bool:
        entries = self._by_lane.get(entry.lane)
        return entries is not None and entries.get(entry.sequence) is entry

    def add(self, entry: Entry) -> None:
        entries = self._by_lane.get(entry.lane)
        if entries is None:
            entries = self._by_lane[entry.lane] = OrderedDict()
        entries[entry.sequence] = entry

    def discard(self, entry: Entry) -> bool:
        """Remove an entry. Returns whether it was there."""
        if entry not in self:
            return False
        entries = self._by_lane[entry.lane]
        del entries[entry.sequence]
        if not entries:
            del self._by_lane[entry.lane]
        return True

    def pop(self, count: int) -> list[Entry]:
        """Remove and return the first entries of the first lane, at most `count`. The next call begins with the next
        lane."""
        lane, entries = next(iter(self._by_lane.items()))
        first = [entries.popitem(last=False)[1] for _ in range(min(count, len(entries)))]
        if entries:
            self._by_lane.move_to_end(lane)
        else:
            del self._by_lane[lane]
        return first

    def pop_lane(self, lane: Lane) -> Collection[Entry]:
        """Remove and return all entries of a lane."""
        entries = self._by_lane.pop(lane, None)
        return () if entries is None else entries.values()

    def by_lane(self) -> Iterator[tuple[Lane, Iterator[Entry]]]:
        for lane, entries in self._by_lane.items():
            yield lane, iter(entries.values())

    def of_lane(self, lane: Lane) -> Collection[Entry]:
        entries = self._by_lane.get(lane)
        return () if entries is None else entries.values()
