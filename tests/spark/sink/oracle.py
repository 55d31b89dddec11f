"""Naive oracle of a sink: each batch is the rows of one of its calls of `commit`, each row once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from truenext.model.spark_queues import SinkQueues
from truenext.testing import BlockingBroker

OUTPUTS = ("out", "other")
"""Queues to which rows go."""
PARTITIONS_MAX = 4


class Disagreement(AssertionError):
    """The sink has not done what it promises."""


@dataclass(eq=False)
class Attempt:
    """Attempt of a task: its rows differ from those of all other attempts."""

    number: int
    batch: int
    partition: int
    destinations: list[tuple[str, ...]]
    """Destinations of each row."""

    @property
    def rows(self) -> list[Row]:
        return [Row(self.batch, self.number, self.partition, each) for each in range(len(self.destinations))]


class Row(NamedTuple):
    batch: int
    attempt: int
    partition: int
    number: int

    @property
    def body(self) -> str:
        return "/".join(map(str, self))


@dataclass(eq=False)
class Call:
    """Call of `commit`, with the rows of its authorised attempts, by their order."""

    name: str
    batch: int
    rows: dict[str, list[Row]]
    """Rows of each queue."""
    last_visible: int
    """Highest batch with a visible row when the call began."""
    was_visible: bool
    """True if a row of this batch was visible when the call began."""
    was_closed: bool
    is_calm: bool = False
    """True if no fault has disturbed the call, so that rows are in order."""

    @property
    def has_rows(self) -> bool:
        return any(self.rows.values())


@dataclass
class Oracle:
    here: BlockingBroker
    queues: SinkQueues
    calls: dict[int, Call] = field(default_factory=dict)
    """Call for which each attempt was authorised, by the attempt's number."""
    chosen: dict[int, Call] = field(default_factory=dict)
    """Call of each batch with a visible row."""
    returned: set[int] = field(default_factory=set)
    """Batches whose call has returned, and that are visible for ever. Calls without rows do not count: an earlier
    call may be asleep, and decide later."""
    published_batch: int | None = None
    """Batch that `close_sink` has returned; None if it never returned."""
    was_close_tried: bool = False
    _visible: dict[str, list[Row]] = field(default_factory=dict)

    # ---- Calls ----

    def begin(self, name: str, batch: int, attempts: list[Attempt]) -> Call:
        """Note that a driver calls `commit`."""
        self.look()
        rows: dict[str, list[Row]] = {queue: [] for queue in OUTPUTS}
        for attempt in sorted(attempts, key=lambda attempt: attempt.partition):
            for row, destinations in zip(attempt.rows, attempt.destinations, strict=True):
                for queue in destinations:
                    rows[queue].append(row)
        call = Call(
            name,
            batch,
            rows,
            last_visible=max(self.chosen, default=-1),
            was_visible=batch in self.chosen,
            was_closed=self.published_batch is not None,
        )
        self.calls.update((attempt.number, call) for attempt in attempts)
        return call

    def on_return(self, call: Call) -> None:
        self.look()
        batch = call.batch
        if call.was_closed:
            raise Disagreement(f"{call.name} returns, and the sink was closed")
        if call.last_visible > batch:
            raise Disagreement(f"{call.name} returns, and batch {call.last_visible} was visible before")
        if batch in self.chosen:
            if call.has_rows or call.was_visible:
                self._check_whole(batch)
        elif call.has_rows:
            raise Disagreement(f"{call.name} returns, and nothing of its batch is visible")
        if batch in self.chosen and (call.has_rows or call.was_visible):
            self.returned.add(batch)

    def on_outdated(self, call: Call) -> None:
        """Note that `commit` has raised OutdatedBatch."""
        self.look()
        later = [batch for batch in self.chosen if batch > call.batch]
        if not later and not self.was_close_tried:
            raise Disagreement(f"{call.name} is outdated, and no later batch is visible")
        if later:
            # Another may be published at this moment.
            self._check_whole(min(later))

    def on_published(self, batch: int) -> None:
        """Note that `publish_decision` has returned this batch."""
        self.look()
        self._check_whole_until(batch)

    def on_closed(self, batch: int) -> None:
        """Note that `close_sink` has returned this batch."""
        if self.published_batch not in (None, batch):
            raise Disagreement(f"the sink was closed after batch {self.published_batch}, and now after {batch}")
        self.published_batch = batch
        self.look()
        self._check_whole_until(batch)

    # ---- Looks ----

    def look(self) -> None:
        """Compare the visible rows with the allowed ones."""
        for queue in OUTPUTS:
            rows = [Row(*map(int, body.split(b"/"))) for body in self.here.queue(queue).bodies]
            self._visible[queue] = rows
            last = -1
            for row in rows:
                if row.batch < last:
                    raise Disagreement(f"{row} comes into {queue} behind batch {last}")
                last = row.batch
        for queue, rows in self._visible.items():
            for row, number in Counter(rows).items():
                self._check_row(queue, row, number)
        for batch in self.chosen:
            if batch in self.returned or batch < max(self.chosen):
                self._check_whole(batch)

    def _check_row(self, queue: str, row: Row, number: int) -> None:
        call = self.calls.get(row.attempt)
        if call is None:
            raise Disagreement(f"{row} is visible, and no commit has it")
        chosen = self.chosen.setdefault(row.batch, call)
        if chosen is not call:
            raise Disagreement(f"{row} of {call.name} is visible, and so are rows of {chosen.name}")
        if number > call.rows[queue].count(row):
            raise Disagreement(f"{row} is {number} times in {queue}")
        if self.published_batch is not None and row.batch > self.published_batch:
            raise Disagreement(f"{row} is visible, and the sink was closed after batch {self.published_batch}")

    def _check_whole(self, batch: int) -> None:
        call = self.chosen[batch]
        for queue in OUTPUTS:
            rows = [row for row in self._visible[queue] if row.batch == batch]
            if sorted(rows) != sorted(call.rows[queue]):
                raise Disagreement(f"batch {batch} has {rows} in {queue}, and not {call.rows[queue]} of {call.name}")
            if call.is_calm and rows != call.rows[queue]:
                raise Disagreement(f"{call.name} was not disturbed, and batch {batch} is {rows}: not in order")

    def _check_whole_until(self, last: int) -> None:
        if last not in (-1, *self.chosen):
            raise Disagreement(f"batch {last} is said to be published, and nothing of it is visible")
        for batch in self.chosen:
            if batch <= last:
                self._check_whole(batch)

    @property
    def _draft_queues(self) -> list[str]:
        return [self.queues.drafts(partition) for partition in range(PARTITIONS_MAX)]

    def check_attempts(self) -> None:
        """Check that no message is held, and that no death counted as an attempt."""
        for queue in (self.queues.decisions, *self._draft_queues, *OUTPUTS):
            contents = self.here.queue(queue)
            if contents.unacknowledged or self.here.queue(f"DLQ.{queue}").waiting:
                raise Disagreement(f"{queue} has dead letters, or messages that are held")
            if any(each.headers["truenext-attempts"] != "0" for each in contents.messages):
                raise Disagreement(f"messages of {queue} have attempts: {contents.messages}")

    def check_end(self) -> None:
        """Check the end, after a last run that was not disturbed."""
        self.look()
        for batch in self.chosen:
            self._check_whole(batch)
        self.check_attempts()
        decided = max(self.chosen, default=-1)
        decisions = self.here.queue(self.queues.decisions).waiting
        is_closed = self.published_batch is not None
        if decisions != (decided >= 0 or is_closed):
            raise Disagreement(f"{decisions} messages say how far the query is")
        for queue in self._draft_queues:
            left = [int(each.headers["spark_batch"]) for each in self.here.queue(queue).messages]
            if not is_closed and any(batch <= decided for batch in left):
                raise Disagreement(f"drafts of batches {left} are left in {queue}, and {decided} is decided")
