"""Plan of an audit in sections: which queues are cut, and before which events.

A queue with many events is cut, so that several tasks audit it at once. Most messages that wait are then untouched in
a section, and cost it nothing. But the first of each group is needed. So a section has at least as many events as
messages of groups may wait: cuts at most double the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from truenext.spark.audit.broker_numbers import NUMBER_BITS
from truenext.spark.audit.lifetime import ENDS
from truenext.spark.audit.timeline import CODES, kinds

SECTION_EVENTS = 500_000
"""Least number of a queue's events in a section. A queue with less than twice as many is not cut."""

GRAINS = 16
"""Number of places in such a section at which it may end."""


class Grain(NamedTuple):
    """Events of a queue in a range of event numbers."""

    queue: str
    grain: int
    events: int
    arrivals: int
    grouped: int
    """Number of arrivals of messages with a group."""
    ends: int
    paused: int
    """Last event `paused`, or 0."""
    resumed: int
    """Last event `resumed`, or 0."""


class Section(NamedTuple):
    queue: str
    first: int
    """First event number; 0 for the first section of a queue's whole history."""
    arrivals: int
    """Number of messages that the queue had accepted before, since the beginning of the plan."""
    ticks: int
    """Number of the queue's events before, since the beginning of the plan."""
    paused: int
    resumed: int
    """Last events `paused` and `resumed` before, or 0."""


@dataclass(frozen=True)
class SectionPlan:
    sections: list[Section]
    """Sections of all queues that are cut, by queue and in order. Their positions in this list are the column `section`
    of tables."""
    totals: dict[str, int]
    """Number of events of each queue that is cut."""
    brokers: dict[str, int]
    """Number of each such queue's broker."""
    table: DataFrame
    """`queue`, `grain` and `section`, for all ranges of event numbers."""
    grain_bits: int

    def with_sections(self, rows: DataFrame) -> DataFrame:
        """Add the column `section` to rows with `queue` and `event`. Null if the queue is not cut."""
        ranged = rows.withColumn("grain", _grain(self.grain_bits))
        return ranged.join(F.broadcast(self.table), ["queue", "grain"], "left").drop("grain")

    def of_cut_queues(self, rows: DataFrame) -> DataFrame:
        return rows.where(F.col("queue").isin(*self.totals))

    def cuts(self) -> dict[str, dict[int, int]]:
        """Return the column `section` by first event and queue, of all sections that a cut begins: in whole histories
        all but the first of each queue."""
        cuts: dict[str, dict[int, int]] = {queue: {} for queue in self.totals}
        for number, each in enumerate(self.sections):
            if each.first:
                cuts[each.queue][each.first] = number
        return cuts


def section_plan(
    events: DataFrame,
    limits: Sequence[tuple[int, int]],
    section_events: int = SECTION_EVENTS,
    saved: DataFrame | None = None,
) -> SectionPlan | None:
    """Return how the queues with many of the `events` are cut; None if no queue is. `limits` are the first and the last
    event of each broker, by its own numbers. `saved` are rows of the only broker's saved cut, if the events begin
    there."""
    if all(last - first + 1 < 2 * section_events for first, last in limits):
        return None
    of_queues = events.where(F.col("kind").isin(*CODES))
    counts = (
        of_queues.groupBy("queue").count().where((F.col("count") >= 2 * section_events) & F.col("queue").isNotNull())
    )
    queues = [row["queue"] for row in counts.collect()]
    if not queues:
        return None
    bits = max(section_events // GRAINS, 1).bit_length() - 1
    rows = of_queues.where(F.col("queue").isin(*queues)).groupBy("queue", _grain(bits).alias("grain")).agg(*_counts())
    grains = [Grain(*row) for row in rows.orderBy("queue", "grain").collect()]
    by_queue = {queue: [*some] for queue, some in groupby(grains, key=attrgetter("queue"))}
    first, waiting = (0, {}) if saved is None else (limits[0][0], _waiting(saved))
    sections_of = {
        queue: [*queue_sections(some, bits, section_events, first, *waiting.get(queue, ()))]
        for queue, some in by_queue.items()
    }
    # One section is a whole queue, at more cost.
    by_queue = {queue: some for queue, some in by_queue.items() if len(sections_of[queue]) > 1}
    if not by_queue:
        return None
    sections = [each for queue in by_queue for each in sections_of[queue]]
    totals = {queue: sum(each.events for each in some) for queue, some in by_queue.items()}
    brokers = {queue: some[0].grain << bits >> NUMBER_BITS for queue, some in by_queue.items()}
    table = _table(sections, {queue: _all_grains(limits[each], each, bits) for queue, each in brokers.items()}, bits)
    return SectionPlan(sections, totals, brokers, events.sparkSession.createDataFrame(table), bits)


def _waiting(saved: DataFrame) -> dict[str, tuple[int, int]]:
    """Return for each queue of a saved cut the number of its messages, and of those that have a group."""
    is_message = F.col("sequence").isNotNull()
    counts = saved.groupBy("queue").agg(F.count_if(is_message), F.count_if(is_message & (F.col("group") != 0)))
    return {queue: (messages, grouped) for queue, messages, grouped in counts.collect()}


def _grain(bits: int) -> Column:
    return F.shiftright("event", bits)


def _counts() -> list[Column]:
    kind, event = F.col("kind"), F.col("event")
    last = {each: F.coalesce(F.max(F.when(kind == each, event)), F.lit(0)) for each in ("paused", "resumed")}
    return [
        F.count("*").alias("events"),
        F.count_if(kind == "accepted").alias("arrivals"),
        F.count_if((kind == "accepted") & F.col("group").isNotNull()).alias("grouped"),
        F.count_if(kind.isin(*kinds(ENDS))).alias("ends"),
        *(column.alias(name) for name, column in last.items()),
    ]


def queue_sections(
    grains: Sequence[Grain], bits: int, section_events: int, first: int = 0, backlog: int = 0, grouped: int = 0
) -> Iterable[Section]:
    """Yield the sections of one queue, from the event `first` on. Each has at least `section_events` events, and at
    least as many as messages of groups may wait at any of its grains. `backlog` messages are there at first, of which
    `grouped` have a group."""
    left = sum(each.events for each in grains)
    section = Section(grains[0].queue, first, 0, 0, 0, 0)
    largest = grouped
    arrivals = ticks = paused = resumed = 0
    yield section
    for each in grains:
        arrivals, ticks, left = arrivals + each.arrivals, ticks + each.events, left - each.events
        backlog, grouped = max(backlog + each.arrivals - each.ends, 0), grouped + each.grouped
        # At most as many as wait, and as came with a group: an end does not name the group.
        of_groups = min(backlog, grouped)
        largest = max(largest, of_groups)
        paused, resumed = max(paused, each.paused), max(resumed, each.resumed)
        least = max(section_events, largest)
        # A short remainder belongs to the last section.
        if ticks - section.ticks >= least and left > max(section_events, of_groups) // 2:
            section = Section(each.queue, each.grain + 1 << bits, arrivals, ticks, paused, resumed)
            largest = of_groups
            yield section


def _all_grains(limits: tuple[int, int], broker: int, bits: int) -> range:
    """Return the grains of a broker's history, and of its end."""
    first, last = (number + (broker << NUMBER_BITS) for number in limits)
    return range(first >> bits, (last + 1 >> bits) + 1)


def _table(sections: Sequence[Section], grains_of: Mapping[str, range], bits: int) -> pa.Table:
    """Return the section of each queue and grain, for grains without events, too. `grains_of` are those of queues."""
    names: list[str] = []
    grains: list[int] = []
    numbers: list[int] = []
    for number, each in enumerate(sections):
        is_last = number + 1 == len(sections) or sections[number + 1].queue != each.queue
        every = grains_of[each.queue]
        end = every.stop if is_last else sections[number + 1].first >> bits
        own = range(max(each.first >> bits, every.start), end)
        names += [each.queue] * len(own)
        grains += own
        numbers += [number] * len(own)
    return pa.table({"queue": names, "grain": grains, "section": numbers})
