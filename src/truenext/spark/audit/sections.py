"""Cuts of a queue, computed from what happened to each message and each consumer, without its audit.

rows of the timeline ─┬─ by message ──▶ Lifetime ─────┬──▶ QueueCut before each of some events
                      ├─ by consumer ─▶ Subscription ─┤
                      └─ of the queue itself ─────────┘

Only one thing needs all messages at once: how many of them a start must find. A start that has found fewer makes them
uncertain, and so changes what later starts must find. `_not_recovered` counts until nothing changes: once for a right
history, and once more for each such start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from itertools import chain, pairwise
from operator import attrgetter

from msgspec import structs

from truenext.spark.audit.cut import ConsumerRow, MessageRow, QueueCut, QueueRow
from truenext.spark.audit.lifetime import MARKS, MESSAGE_CODES, Lifetime, is_continued
from truenext.spark.audit.model import (
    NEVER,
    SELECTOR_WINDOW,
    UNLIMITED,
    AuditedConsumer,
    ConsumerFlags,
    EventCode,
    MessageState,
    StartFlag,
    TimelineRow,
)

_EVENT = attrgetter("event")

CONSUMER_CODES = {
    *(EventCode.SUBSCRIBED, EventCode.UNSUBSCRIBED, EventCode.WINDOW),
    *(EventCode.REQUESTED, EventCode.DISPATCHED),
}
RESETS = {EventCode.RUN_STARTED, EventCode.GAP}
"""Codes after which no consumer is known."""

CERTAIN = {MessageState.WAITING, MessageState.ENDED}
"""States, after a start, of messages that are certainly there."""


def queue_cuts(rows: Sequence[TimelineRow], cuts: Sequence[int]) -> list[QueueCut]:
    """Return the rows of a queue before each of the events `cuts`. `rows` is the whole timeline of the queue; both are
    in order."""
    by_message = _by(attrgetter("sequence"), rows, MESSAGE_CODES)
    marks = [row for row in rows if row.code in MARKS]
    recoveries = _recoveries(rows)
    lost = _not_recovered(by_message, marks, recoveries)
    points = sorted({*cuts, *(start.event + 1 for start, _ in recoveries)})
    states, deliveries = _states(by_message, ordered(marks, lost), points)
    resets = [row for row in rows if row.code in RESETS]
    subscriptions = {
        number: Subscription(own, resets, cuts)
        for number, own in _by(attrgetter("consumer"), rows, CONSUMER_CODES).items()
    }
    queue_rows = _queue_rows(rows, cuts, deliveries, subscriptions.values())
    for start, until in recoveries:
        for row in queue_rows[bisect_left(cuts, start.event + 1) : bisect_left(cuts, until.event + 1)]:
            row.expected = expected_count(states[start.event + 1])
            row.start_flags, row.start_event = start.number, start.event
    arrivals = [row.event for row in rows if row.code == EventCode.ACCEPTED]
    return [
        _cut(cut, queue_row, _placed(states[cut], arrivals, deliveries), subscriptions)
        for cut, queue_row in zip(cuts, queue_rows, strict=True)
    ]


def end_codes(rows: Sequence[TimelineRow]) -> dict[int, int]:
    """Return for each event of a message after its end the code of that end. `rows` is the timeline of a queue."""
    marks = [row for row in rows if row.code in MARKS]
    by_message = _by(attrgetter("sequence"), rows, MESSAGE_CODES)
    return dict(chain.from_iterable(Lifetime(each).end_codes(own, marks) for each, own in by_message.items()))


def _by(key: attrgetter[int], rows: Iterable[TimelineRow], codes: set[EventCode]) -> dict[int, list[TimelineRow]]:
    groups: defaultdict[int, list[TimelineRow]] = defaultdict(list)
    for row in rows:
        if row.code in codes:
            groups[key(row)].append(row)
    return groups


def ordered(marks: Iterable[TimelineRow], lost: Iterable[TimelineRow]) -> list[TimelineRow]:
    """Return all marks in order. Messages that were not recovered are so before the event that reveals it."""
    return sorted((*lost, *marks), key=_EVENT)


# ---- Messages ----


def _states(
    by_message: Mapping[int, Sequence[TimelineRow]], marks: Sequence[TimelineRow], points: Sequence[int]
) -> tuple[dict[int, list[MessageRow]], list[int]]:
    """Return the messages before each of the events `points`, and all first dispatches in order."""
    states: dict[int, list[MessageRow]] = {point: [] for point in points}
    deliveries = []
    for sequence, rows in by_message.items():
        lifetime = Lifetime(sequence)
        for point, message in lifetime.states(rows, marks, points):
            states[point].append(message)
        if lifetime.delivery:
            deliveries.append(lifetime.delivery)
    return states, sorted(deliveries)


def _placed(messages: Iterable[MessageRow], arrivals: Sequence[int], deliveries: Sequence[int]) -> list[MessageRow]:
    """Return the messages with positions in place of the events of acceptance and first dispatch."""
    return [
        structs.replace(
            each,
            arrival=_position(arrivals, each.arrival),
            delivery=_position(deliveries, each.delivery),
        )
        for each in messages
    ]


def _position(events: Sequence[int], event: int) -> int:
    return bisect_left(events, event) + 1 if event else 0


# ---- Starts, and what they must find ----


def _recoveries(rows: Sequence[TimelineRow]) -> list[tuple[TimelineRow, TimelineRow]]:
    """Return each start that continues a run of the history, with the row that shows what it has recovered, or that
    hides it: the next row of the queue."""
    return [(start, row) for start, row in pairwise(rows) if is_continued(start)]


def expected_count(messages: Sequence[MessageRow]) -> tuple[int, int]:
    certain = sum(each.state in CERTAIN for each in messages)
    return certain, len(messages) - certain


def _not_recovered(
    by_message: Mapping[int, Sequence[TimelineRow]],
    marks: Sequence[TimelineRow],
    recoveries: Sequence[tuple[TimelineRow, TimelineRow]],
) -> list[TimelineRow]:
    """Return a mark for each start that has recovered fewer messages than are certain."""
    lost: list[TimelineRow] = []
    points = [start.event + 1 for start, _ in recoveries]
    while True:
        states, _ = _states(by_message, ordered(marks, lost), points)
        found = [
            TimelineRow(row.event, row.at, EventCode.NOT_RECOVERED)
            for start, row in recoveries
            if is_known(start, row) and recovered(row) < expected_count(states[start.event + 1])[0]
        ]
        if found == lost:
            return lost
        lost = found


def is_known(start: TimelineRow, row: TimelineRow) -> bool:
    """Return whether it is known how many messages a start has recovered; `row` is the queue's next one."""
    if row.code == EventCode.RECOVERED:
        return True
    return row.code != EventCode.GAP and bool(start.number & StartFlag.RECOVERED)


def recovered(row: TimelineRow) -> int:
    return row.number if row.code == EventCode.RECOVERED else 0


# ---- Consumers ----


class Subscription:
    """All subscriptions with one number. In one run there is at most one; there is none if its start is not known."""

    def __init__(
        self,
        rows: Sequence[TimelineRow],
        resets: Sequence[TimelineRow],
        cuts: Sequence[int],
        known: Sequence[ConsumerRow] = (),
        since: int = 0,
    ) -> None:
        """After the event `since` the subscriptions `known` existed, in order. Without any, `since` is not used."""
        self.states: dict[int, list[ConsumerRow]] = {}
        """For each cut, the subscriptions that have not ended, or that had ended since the last start or gap."""
        self.spans: list[tuple[int, int]] = []
        """First event and end of each subscription."""
        self.plain_dispatches: list[int] = []
        """Dispatches to the consumer while the subscription existed, if it is not exclusive."""
        self._known = [structs.replace(each) for each in known]
        self.spans += ((each.since, since + 1) for each in known)
        if known and not known[-1].has_ended:
            self.spans[-1] = known[-1].since, NEVER
        first = since + 1 if known else rows[0].event
        steps = merge(rows, resets[bisect_left(resets, first, key=_EVENT) :], key=_EVENT)
        pending = iter(cuts[bisect_left(cuts, first) :])
        cut = next(pending, None)
        for row in steps:
            while cut is not None and cut <= row.event:
                self._take_states(cut)
                cut = next(pending, None)
            self._apply(row)
        for each in (cut, *pending):
            if each is not None:
                self._take_states(each)

    def _take_states(self, cut: int) -> None:
        self.states[cut] = [structs.replace(each) for each in self._known]

    def _apply(self, row: TimelineRow) -> None:
        known = self._known
        is_there = bool(known) and not known[-1].has_ended
        if row.code in RESETS:
            self._end(row.event)
            self._known = []
        elif row.code == EventCode.SUBSCRIBED:
            self._end(row.event)
            self._known = [*(each for each in known if each.has_ended), _subscribed(row)]
            self.spans.append((row.event, NEVER))
        elif is_there and row.code == EventCode.UNSUBSCRIBED:
            self._end(row.event)
            known[-1].has_ended = True
        elif is_there:
            if row.code == EventCode.DISPATCHED and not known[-1].flags & ConsumerFlags.EXCLUSIVE:
                self.plain_dispatches.append(row.event)
            _change(known[-1], row)

    def _end(self, event: int) -> None:
        """End the subscription that exists, if one does."""
        if self.spans and self.spans[-1][1] == NEVER:
            self.spans[-1] = self.spans[-1][0], event

    def holder(self, dispatch: int) -> int:
        """Return the event of the subscription that got the message of an event `dispatched`. 0 if it is not known."""
        return next((since for since, until in self.spans if since < dispatch < until), 0)


def _subscribed(row: TimelineRow) -> ConsumerRow:
    flags = ConsumerFlags(row.detail_code)
    is_pulling = flags & ConsumerFlags.PULLS and row.number != SELECTOR_WINDOW
    is_exact = AuditedConsumer(row.number, flags).has_exact_window
    return ConsumerRow(
        row.consumer,
        row.event,
        row.number,
        flags,
        row.sequence if flags & ConsumerFlags.EXCLUSIVE else 0,
        requested=0 if is_pulling else UNLIMITED,
        limit=row.number if is_exact else UNLIMITED,
    )


def _change(consumer: ConsumerRow, row: TimelineRow) -> None:
    if row.code == EventCode.REQUESTED:
        consumer.requested = row.number
    elif row.code == EventCode.DISPATCHED:
        consumer.requested -= 1 + row.detail_code if consumer.requested != UNLIMITED else 0
    else:
        if consumer.window != SELECTOR_WINDOW:
            consumer.window = row.number
        is_exact = AuditedConsumer(consumer.window, ConsumerFlags(consumer.flags)).has_exact_window
        consumer.limit = row.number if is_exact or not row.number else UNLIMITED


# ---- The queue itself ----


def _queue_rows(
    rows: Sequence[TimelineRow], cuts: Sequence[int], deliveries: Sequence[int], subscriptions: Iterable[Subscription]
) -> list[QueueRow]:
    own = [row.event for row in rows if row.code <= EventCode.REPORTED]
    arrivals = [row.event for row in rows if row.code == EventCode.ACCEPTED]
    to_plain = sorted(chain.from_iterable(each.plain_dispatches for each in subscriptions))
    queue_rows = []
    for cut in cuts:
        reset = _last(rows, cut, RESETS)
        is_started = reset is not None and reset.code == EventCode.RUN_STARTED
        since = reset.event if reset is not None else 0
        pause = _last(rows, cut, {EventCode.PAUSED, EventCode.RESUMED} | RESETS)
        queue_rows.append(
            QueueRow(
                bisect_left(arrivals, cut),
                bisect_left(deliveries, cut),
                bisect_left(own, cut),
                knows_consumers=is_started,
                knows_exclusive=is_started or bisect_left(to_plain, cut) > bisect_left(to_plain, since),
                is_paused=pause is not None and pause.code == EventCode.PAUSED,
            )
        )
    return queue_rows


def _last(rows: Sequence[TimelineRow], cut: int, codes: set[EventCode]) -> TimelineRow | None:
    """Return the last row before the event `cut` with one of the codes."""
    before = rows[: bisect_left(rows, cut, key=_EVENT)]
    return next((row for row in reversed(before) if row.code in codes), None)


def _cut(
    cut: int, queue_row: QueueRow, messages: list[MessageRow], subscriptions: Mapping[int, Subscription]
) -> QueueCut:
    """Join the rows of a cut. Consumers that have ended are left out, unless a message is held that they got."""
    for message in messages:
        if message.subscription:
            message.subscription = subscriptions[message.consumer].holder(message.subscription)
    holders = {each.subscription for each in messages}
    consumers = [
        consumer
        for each in subscriptions.values()
        for consumer in each.states.get(cut, ())
        if not consumer.has_ended or consumer.since in holders
    ]
    consumers.sort(key=attrgetter("since"))
    messages.sort(key=attrgetter("sequence"))
    return QueueCut(cut, queue_row, consumers, messages)
