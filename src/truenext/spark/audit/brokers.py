"""Brokers of an audit: which history is whose, and one history of each broker.

folders ──▶ identity of the last run ──▶ brokers ──▶ events with numbers of their own (broker_numbers.py)

Folders with one identity, such as those of an active broker and its standby, are one history. Blocks of events that are
equal in all of them are read from the first; others are compared event by event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from truenext.errors import ConfigurationError, HistoryError
from truenext.history.schema import COLUMNS
from truenext.model.events import HISTORY_VERSION, OLDEST_HISTORY_VERSION
from truenext.spark.audit.broker_numbers import BROKERS_MAX, NUMBER_BITS, with_numbers
from truenext.spark.audit.runs import BLOCK_BITS, BLOCKS, EarlierBroker, block, blocks, earlier_broker, last_store
from truenext.spark.caching import cache_rows


class FolderHistory(NamedTuple):
    """History in one folder."""

    name: str
    events: DataFrame
    folder: str = ""
    """Folder or address, for errors."""
    may_grow: bool = False
    """True if a later read may have further events."""

    def error(self, cause: str) -> str:
        return f"{self.folder}: {cause}" if self.folder else cause


@dataclass(frozen=True)
class AuditedBroker:
    identity: str | None
    """Identity of the last run; None if the history does not say it."""
    histories: tuple[str, ...]
    """Names of the histories that are the broker's."""
    events: DataFrame
    """Each of its events once, with its own numbers."""
    earlier: EarlierBroker | None
    """Broker with another identity whose history is before this one's, and not part of `events`."""

    @property
    def name(self) -> str:
        """Name of the broker in tables: its identity, or the name of its folder."""
        return self.identity or self.histories[0]


@dataclass(frozen=True)
class JoinedHistories:
    brokers: tuple[AuditedBroker, ...]
    events: DataFrame
    """Events of all brokers, with numbers by which the brokers differ."""
    blocks: DataFrame
    """Blocks of `events`, see `runs.blocks`."""
    differences: DataFrame | None
    """Events that differ in two histories of one broker: `broker`, `event`, `history`, and columns of the event. None
    if each broker has one history."""
    cached: tuple[DataFrame, ...]


def join_histories(histories: Sequence[FolderHistory], since: datetime | None) -> JoinedHistories:
    """Join histories of one broker or several. Events before `since` are ignored.

    Raises: ConfigurationError if a history has no events, or there are too many brokers; HistoryError if a history is
    of two brokers at once
    """
    by_broker: defaultdict[tuple[str | None, str], list[_Part]] = defaultdict(list)
    for history in histories:
        part = _part(history, since)
        # A history without an identity is a broker of its own.
        by_broker[part.identity, "" if part.identity else history.name].append(part)
    if len(by_broker) > BROKERS_MAX:
        raise ConfigurationError(f"there are {len(by_broker):,} brokers; one audit can have {BROKERS_MAX:,}")
    owners = [_joined(parts) for parts in by_broker.values()]
    frames = [each.broker.events for each in owners]
    if len(owners) > 1:
        frames = [with_numbers(events, number) for number, events in enumerate(frames)]
    block_rows = [_with_block_numbers(row, number) for number, each in enumerate(owners) for row in each.blocks]
    differences = [each.differences for each in owners if each.differences is not None]
    return JoinedHistories(
        tuple(each.broker for each in owners),
        reduce(DataFrame.unionByName, frames),
        frames[0].sparkSession.createDataFrame(block_rows, BLOCKS),
        reduce(DataFrame.unionByName, differences) if differences else None,
        tuple(each.compared for each in owners if each.compared is not None),
    )


class _Owner(NamedTuple):
    broker: AuditedBroker
    blocks: Sequence[Row]
    compared: DataFrame | None = None
    """Cached events of blocks that differ in the broker's histories."""
    differences: DataFrame | None = None


def _joined(parts: Sequence[_Part]) -> _Owner:
    """Return the broker of all these histories."""
    first = parts[0]
    earlier = next((part.earlier for part in parts if part.earlier is not None), None)
    names = tuple(part.history.name for part in parts)
    if len(parts) == 1:
        return _Owner(AuditedBroker(first.identity, names, first.events, earlier), first.blocks)
    events, compared = _read_once(parts)
    named = F.lit(first.identity).alias("broker")
    differences = compared.where("detail is not null").select(named, *_DIFFERENCE)
    broker = AuditedBroker(first.identity, names, events, earlier)
    return _Owner(broker, events.transform(blocks).collect(), compared, differences)


def _with_block_numbers(row: Row, broker: int) -> dict[str, Any]:
    """Return a block of events with the numbers that `with_numbers` gives to its events."""
    offset = broker << NUMBER_BITS
    numbered = ("run", "first", "last", "started_event", "unknown_event")
    moved = {name: row[name] + offset for name in numbered if row[name] is not None}
    return row.asDict() | moved | {"block": row["block"] + (offset >> BLOCK_BITS)}


# ---- One history: the broker that it is of, and its events ----


@dataclass(frozen=True)
class _Part:
    history: FolderHistory
    identity: str | None
    events: DataFrame
    blocks: list[Row]
    earlier: EarlierBroker | None

    @property
    def first(self) -> int:
        return int(min(row["first"] for row in self.blocks))

    @property
    def last(self) -> int:
        return int(max(row["last"] for row in self.blocks))


def _part(history: FolderHistory, since: datetime | None) -> _Part:
    """Return the events of a history that are its broker's own, from `since` on."""
    events = history.events
    if since is not None:
        # The clock may have been set back, so the cut is made by `event` and not by time.
        first = events.where(F.col("at") >= F.lit(since)).agg(F.min("event")).collect()[0][0]
        events = events.where(F.col("event") >= F.lit(first))
    rows = events.transform(blocks).collect()
    if not rows:
        raise ConfigurationError(
            history.error("the history has no events" + (f" since {since}" if since is not None else ""))
        )
    try:
        earlier = earlier_broker(rows)
    except HistoryError as error:
        raise HistoryError(history.error(str(error))) from error
    if earlier is not None:
        # That broker went on: what it did with its messages says nothing of this one's.
        rows = [row for row in rows if row["run"] >= earlier.next_run]
        events = events.where(F.col("run") >= earlier.next_run)
    unknown = [row["unknown_event"] for row in rows if row["unknown_event"] is not None]
    if unknown:
        raise HistoryError(
            history.error(
                f"event {min(unknown):,} is of another history version; this truenext reads {OLDEST_HISTORY_VERSION} "
                f"to {HISTORY_VERSION}: use the truenext that wrote it"
            )
        )
    part = _Part(history, last_store(rows), events, rows, earlier)
    if history.may_grow:
        # All steps of the audit see the events that this first one has seen.
        part = replace(part, events=events.where(F.col("event") <= F.lit(part.last)))
    return part


# ---- Several histories of one broker ----

_DIFFERENCE = ("event", "history", "detail", "at", "kind", "queue", "sequence")


def _read_once(parts: Sequence[_Part]) -> tuple[DataFrame, DataFrame]:
    """Return the events that are in one of the histories at least, each once; and the cached events that were compared.
    In their column `detail` they say how they differ. An event also differs if a history lacks it between its first
    event and its last one."""
    ranges = [(part.first, part.last) for part in parts]
    chosen, mixed = choose_blocks(
        _contents(parts), [(first >> BLOCK_BITS, last >> BLOCK_BITS) for first, last in ranges]
    )
    frames = [_in_blocks(part.events, chosen[number]) for number, part in enumerate(parts) if chosen[number]]
    by_event = Window.partitionBy("event")
    expected = reduce(add, (F.col("event").between(*limits).cast("int") for limits in ranges))
    candidates = [
        _in_blocks(part.events, mixed).withColumns(
            {"part": F.lit(number), "history": F.lit(part.history.name), "content": _content()}
        )
        for number, part in enumerate(parts)
    ]
    compared = cache_rows(
        reduce(DataFrame.unionByName, candidates)
        .withColumn("place", F.row_number().over(by_event.orderBy("part")))
        .withColumn(
            "detail",
            F.when(F.min("content").over(by_event) != F.max("content").over(by_event), "differs").when(
                F.count("*").over(by_event) < expected, "is missing in another"
            ),
        )
    )
    frames.append(compared.where("place = 1").select(*parts[0].events.columns))
    return reduce(DataFrame.unionByName, frames), compared


def _content() -> Column:
    """Return a hash of an event, without the identity of its broker, which earlier versions do not have."""
    names = [each.name for each in COLUMNS if each.name != "store"]
    return F.xxhash64(*names, *(F.col(name).isNull() for name in names))


def _contents(parts: Sequence[_Part]) -> list[dict[int, tuple[int, int]]]:
    """Return the number of events in each block of each history, and a hash of them."""
    found = []
    for part in parts:
        summed = part.events.groupBy(block().alias("block")).agg(F.count("*"), F.bit_xor(_content()))
        found.append({number: (count, content) for number, count, content in summed.collect()})
    return found


def choose_blocks(
    contents: Sequence[Mapping[int, tuple[int, int]]], ranges: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], list[int]]:
    """Return for each history the blocks that are read from it, and the blocks whose events must be compared.

    A block is read from the first history if it is the same in all that reach it: in all whose range of blocks has it.
    """
    chosen: list[list[int]] = [[] for _ in contents]
    mixed = []
    for each in sorted({number for content in contents for number in content}):
        reaching = [at for at, (first, last) in enumerate(ranges) if first <= each <= last]
        if len({contents[at].get(each) for at in reaching}) == 1:
            chosen[reaching[0]].append(each)
        else:
            mixed.append(each)
    return chosen, mixed


def _in_blocks(events: DataFrame, numbers: Sequence[int]) -> DataFrame:
    blocks_to_read = events.sparkSession.createDataFrame([(number,) for number in numbers], "block bigint")
    return events.withColumn("block", block()).join(F.broadcast(blocks_to_read), "block", "left_semi").drop("block")
