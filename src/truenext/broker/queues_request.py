"""Control request `queues`: reports queues by name, order and piece, and the sums of all that the user may see.

    consumers     what they hold, by queue
    queues        which are selected, their sums, and the place of each in the order
    rows          of the queues that the answer has, as they are when their row is made

All in steps, so the answer shows different moments. Source: docs/contract.md, "What the broker tells"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from sys import maxsize
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from truenext.broker.control_requests import ListAnswer
from truenext.broker.event_loop import Steps
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import BrokerConsumer, QueueConsumer
from truenext.engine.state.counts import NO_RARE_COUNTS, Counts
from truenext.engine.state.queue import Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.writing.commit_state import CommitState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import decode_client_json
from truenext.model.control_answers import MessageCounts, QueueOrder, QueueReport, QueueSums
from truenext.model.limits import QUEUE_NAMES_MAX
from truenext.model.order import PRIORITY_MAX
from truenext.model.pattern import fault_of_pattern, is_pattern, matches

VERB = "queues"

ITEMS_PER_STEP = 50
"""Number of queues, consumers or messages that one step inspects."""

NAMES_PER_STEP = 500
"""Number of names that one step compares with the patterns of the metrics."""

PLACES_SORTED_PER_STEP = 500
"""Number of places that one step sorts."""

QUEUES_MAX = 10_000
"""Largest number of queues in the answer to a request with a body. A copy of more would take too long for one step."""

NEVER_MS = NEVER_US = 2**63
"""Sorts queues without a waiting (held) message last, also as a float."""

MaySee = Callable[[Queue], bool] | None
"""Function that tells whether a client may see a queue; None if it may see all."""

Place = tuple[float, str]
"""Place of a queue in an order: the lowest number comes first, equal ones are sorted by name."""


class _ShortReport(QueueReport, omit_defaults=True):
    """Row of the answer to a request without a body, which has all queues, often without any message."""


class _Cursor(msgspec.Struct, array_like=True):
    """Place of the last queue of an answer, in JSON."""

    number: float
    name: str


_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class QueuesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request, in JSON. With an empty body the answer is only a list of QueueReport, of all queues by
    name, in which counts of 0, `oldest_s` and `rate` are left out where there is nothing to tell."""

    name: str = ""
    """Part of the names of the queues to report, upper and lower case alike, or a pattern of names, with `*` and `>`;
    empty for all."""
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=QUEUE_NAMES_MAX)] | None = None
    """Whole names of the queues to report, with their lanes; null for all. Names without a queue are left out."""
    dead_letters: bool = False
    """True to report dead-letter queues only."""
    order: QueueOrder = QueueOrder.NAME
    """Order of the queues."""
    limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Largest number of queues in the answer, which never has more than 10,000; 0 for the sums alone."""
    after: str | None = None
    """Cursor of the answer before, `next`, to go on behind the last queue that it has; null to begin."""


def parse_queues_request(body: bytes) -> QueuesRequest:
    """Parse the body of a request.

    Raises: RemoteProtocolError if it is invalid
    """
    request = decode_client_json(VERB, body, QueuesRequest) if body else QueuesRequest()
    fault = fault_of_pattern(request.name) if is_pattern(request.name) else None
    if fault is not None:
        raise RemoteProtocolError(f"{VERB}: the pattern {request.name[:100]!r}: {fault}", Code.CONTROL_REQUEST)
    _parse_cursor(request.after)
    return request


def _parse_cursor(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    place = decode_client_json(f"{VERB}: after", cursor, _Cursor)
    return place.number, place.name


def _selector_of(name: str) -> Callable[[str], bool]:
    """Return the function that tells whether a name of a queue is selected by `name` of a request."""
    if is_pattern(name):
        words = name.split(".")
        return lambda other: matches(words, other.split("."))
    part = name.casefold()
    return lambda other: part in other.casefold()


def chunks(items: list[_T], size: int = ITEMS_PER_STEP) -> Iterator[list[_T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


class Held(NamedTuple):
    """Messages that consumers hold."""

    number: int
    since_us: int
    """Time of the earliest dispatch of these messages, in microseconds of the monotonic clock; NEVER_US without any."""

    def plus(self, other: Held) -> Held:
        return Held(self.number + other.number, min(self.since_us, other.since_us))

    def age_s(self, now_us: int) -> float | None:
        """Return the seconds since the earliest dispatch; None without a message."""
        return (now_us - self.since_us) / 1e6 if self.number else None


NONE_HELD = Held(0, NEVER_US)

HeldByQueue = Mapping[Queue, Held]
"""Messages that wildcard consumers hold, by queue; without queues whose messages they do not hold."""


def inspect_held_by_wildcards(engine: Engine) -> Generator[None, None, HeldByQueue]:
    """Inspect, in steps, what wildcard consumers hold of each queue."""
    counts: Counter[Queue] = Counter()
    since_us: dict[Queue, int] = {}
    for session in list(engine.state.clients.sessions.values()):
        for consumer in list(session.consumers.values()):
            if isinstance(consumer, Wildcard):
                seen: set[Queue] = set()
                for entries in chunks(list(consumer.held.values())):
                    queues = [entry.lane.queue for entry in entries]
                    counts.update(queues)
                    # The first message of a queue was dispatched first. Others take a tenth of the time.
                    if not seen.issuperset(queues):
                        for queue, entry in zip(queues, entries, strict=True):
                            if queue not in seen:
                                seen.add(queue)
                                since_us[queue] = min(entry.dispatched_us, since_us.get(queue, NEVER_US))
                    yield
        yield
    return {queue: Held(number, since_us[queue]) for queue, number in counts.items()}


def inspect_held(consumers: list[QueueConsumer]) -> Generator[None, None, Held]:
    """Inspect, in steps, what the consumers of a queue hold, wildcard consumers excluded."""
    held = NONE_HELD
    for some in chunks(consumers[:]):
        for consumer in some:
            if consumer.held:
                held = held.plus(held_by(consumer))
        if len(some) == ITEMS_PER_STEP:
            yield
    return held


def held_by(consumer: BrokerConsumer) -> Held:
    """Return what a consumer of one queue holds. The first message was dispatched first."""
    first = next(iter(consumer.held.values()), None)
    return NONE_HELD if first is None else Held(len(consumer.held), first.dispatched_us)


class SumsOfQueues:
    """Sums of the queues that are added."""

    def __init__(self, counts: Counts | None = None) -> None:
        """`counts` are those with which the sums begin."""
        self._counts = Counts()
        if counts is not None:
            self._counts.add(counts)
        self.queues = self.waiting = self.scheduled = 0
        self.held = NONE_HELD
        self.rate = 0.0
        self._oldest_ms: int | None = None

    def add(self, queue: Queue, waiting: int, held: Held, scheduled: int, oldest_ms: int | None) -> None:
        self.queues += 1
        self.waiting += waiting
        self.held = self.held.plus(held)
        self.scheduled += scheduled
        self.rate += queue.rate
        self._counts.add(queue.counts)
        if oldest_ms is not None and (self._oldest_ms is None or oldest_ms < self._oldest_ms):
            self._oldest_ms = oldest_ms

    def oldest_s(self, now_ms: int) -> float | None:
        return age_s(self._oldest_ms, now_ms)

    def counts(self) -> MessageCounts:
        return report_counts(self._counts)

    def report(self, commit_state: CommitState) -> QueueSums:
        return QueueSums(
            **msgspec.structs.asdict(self.counts()),
            queues=self.queues,
            waiting=self.waiting,
            held=self.held.number,
            scheduled=self.scheduled,
            oldest_s=self.oldest_s(commit_state.now_ms),
            held_s=self.held.age_s(commit_state.now_us),
            rate=round(self.rate, 1),
        )


def age_s(since_ms: int | None, now_ms: int) -> float | None:
    """Return the seconds since a time, at least 0; None if there is no time."""
    return None if since_ms is None else max(0, now_ms - since_ms) / 1000


def report_counts(counts: Counts) -> MessageCounts:
    return MessageCounts(**_count_fields(counts))


def _count_fields(counts: Counts) -> dict[str, Any]:
    """Return the fields with which MessageCounts and QueueReport tell the counts."""
    rare = counts.known_rare or NO_RARE_COUNTS
    return {
        "accepted": counts.accepted,
        "acknowledged": counts.acknowledged,
        "returned": rare.returned,
        "failed_again": rare.failed_again,
        "expired": rare.expired,
        "dead_lettered": rare.dead_lettered,
        "handled": rare.handled,
        "moved": rare.moved,
        "purged": rare.purged,
    }


def make_queues_report(engine: Engine, may_see: MaySee, body: bytes) -> Generator[None, None, bytes]:
    """Report queues and durable subscriptions, and their sums. With an empty body the answer is a list of all by name.

    Makes the answer as JSON, in steps.
    """
    request = parse_queues_request(body)
    by_wildcards = yield from inspect_held_by_wildcards(engine)
    receivers_of = engine.state.clients.receivers_of
    sums, places = SumsOfQueues(), _Places(request, is_whole=not body)
    is_selected = _selector_of(request.name) if request.name else None
    by_name = engine.queues.by_name
    if request.names is None:
        named = list(by_name.values())
    else:
        named = [by_name[name] for name in dict.fromkeys(request.names) if name in by_name]
    for queues in chunks(named):
        for queue in queues:
            name = queue.destination.name
            if queue.is_temporary or not (is_selected is None or is_selected(name)):
                continue
            if request.dead_letters and not queue.holds_dead_letters:
                continue
            if may_see is not None and not may_see(queue):
                continue
            figures = _NO_FIGURES
            if body:
                consumers = receivers_of(queue).consumers
                held = by_wildcards.get(queue, NONE_HELD)
                if consumers:
                    held = held.plus((yield from inspect_held(consumers)))
                figures = _Figures(queue.waiting_count(), queue.oldest_ms(), held.since_us)
                sums.add(queue, figures.waiting, held, engine.queues.scheduled_count(name), figures.oldest_ms)
            places.add(queue, name, figures)
        yield
        if places.sort():
            yield
    places.sort(is_last=True)
    yield
    shape = QueueReport if body else _ShortReport
    rows = ListAnswer(b'{"queues":' if body else b"")
    reporter = _Reporter(engine, by_wildcards, shape, has_lanes=request.names is not None)
    yield from reporter.report(places.first(), rows)
    yield from places.free()
    if not body:
        return rows.finish()
    cursor = _encode(places.last).decode() if places.has_more else None
    report = sums.report(engine.state.commit_state)
    return rows.finish(b',"next":', _encode(cursor), b',"sums":', _encode(report), b"}")


class _Figures(NamedTuple):
    """Figures of a queue that decide its place in some orders."""

    waiting: int
    oldest_ms: int | None
    held_since_us: int


_NO_FIGURES = _Figures(0, None, NEVER_US)
"""Figures of each queue for the answer to a request without a body, which is ordered by name."""


class _Places:
    """Places of the selected queues in the requested order. They are sorted piece by piece, and freed so, too."""

    def __init__(self, request: QueuesRequest, *, is_whole: bool) -> None:
        """`is_whole` tells whether the answer has all queues, whatever `limit` is."""
        self._number_of = _NUMBERS[request.order]
        self._after = _parse_cursor(request.after)
        self._limit = QUEUES_MAX
        if request.limit is not None:
            self._limit = min(request.limit, QUEUES_MAX)
        if is_whole:
            self._limit = maxsize
        self._sorted: list[list[Place]] = []
        self._unsorted: list[Place] = []
        self.last: Place | None = None
        """Place of the last row; None if there is none."""
        self.has_more = False
        """Whether there are places behind that of the last row."""

    def add(self, queue: Queue, name: str, figures: _Figures) -> None:
        """Add the place of a queue."""
        place = self._number_of(queue, figures), name
        if self._after is None or place > self._after:
            self._unsorted.append(place)

    def sort(self, *, is_last: bool = False) -> bool:
        """Sort the places added since the last sort, if they are many or these are the last. Returns whether it did."""
        if len(self._unsorted) < PLACES_SORTED_PER_STEP and not is_last:
            return False
        self._sorted.append(sorted(self._unsorted)[: self._limit + 1])
        self._unsorted = []
        return True

    def first(self) -> Iterator[str]:
        """Yield the names of the first queues, up to the limit."""
        places = merge(*self._sorted)
        for place in islice(places, self._limit):
            self.last = place
            yield place[1]
        self.has_more = self.last is not None and next(places, None) is not None

    def free(self) -> Steps:
        """Free the places in steps."""
        while self._sorted:
            self._sorted.pop()
            yield


def _number_by_name(queue: Queue, figures: _Figures) -> float:
    return 0


def _number_by_waiting(queue: Queue, figures: _Figures) -> float:
    return -figures.waiting


def _number_by_oldest(queue: Queue, figures: _Figures) -> float:
    return NEVER_MS if figures.oldest_ms is None else figures.oldest_ms


def _number_by_held(queue: Queue, figures: _Figures) -> float:
    return figures.held_since_us


def _number_by_failing(queue: Queue, figures: _Figures) -> float:
    return -(queue.counts.known_rare or NO_RARE_COUNTS).failed_again


def _number_by_rate(queue: Queue, figures: _Figures) -> float:
    return 0 - queue.rate


_NUMBERS: dict[QueueOrder, Callable[[Queue, _Figures], float]] = {
    QueueOrder.NAME: _number_by_name,
    QueueOrder.WAITING: _number_by_waiting,
    QueueOrder.OLDEST: _number_by_oldest,
    QueueOrder.HELD: _number_by_held,
    QueueOrder.FAILING: _number_by_failing,
    QueueOrder.RATE: _number_by_rate,
}
"""Functions that return the number in a queue's place."""


class _Reporter:
    """Maker of the rows of an answer."""

    def __init__(
        self, engine: Engine, by_wildcards: HeldByQueue, shape: type[QueueReport], *, has_lanes: bool = False
    ) -> None:
        """`shape` is the class of a row."""
        self._has_lanes = has_lanes
        self._engine = engine
        self._by_wildcards = by_wildcards
        self._shape = shape

    def report(self, names: Iterable[str], rows: ListAnswer) -> Steps:
        """Add the rows of the queues with these names. Those that were removed meanwhile are left out."""
        for number, name in enumerate(names):
            queue = self._engine.queues.by_name.get(name)
            if queue is not None:
                # In one step with what waits: else a message dispatched in between would seem to have left.
                held = yield from inspect_held(self._engine.state.clients.receivers_of(queue).consumers)
                rows.add(self._report(queue, held.plus(self._by_wildcards.get(queue, NONE_HELD))))
            if number % ITEMS_PER_STEP == 0:
                yield

    def _report(self, queue: Queue, held: Held) -> QueueReport:
        receivers = self._engine.state.clients.receivers_of(queue)
        commit_state = self._engine.state.commit_state
        return self._shape(
            name=queue.name,
            waiting=queue.waiting_count(),
            unacknowledged=held.number,
            consumers=len(receivers.consumers) + len(receivers.wildcards),
            scheduled=self._engine.queues.scheduled_count(queue.name),
            paused=queue.is_paused,
            dead_letters=queue.holds_dead_letters,
            topic=queue.destination.topic or msgspec.UNSET,
            **_count_fields(queue.counts),
            oldest_s=age_s(queue.oldest_ms(), commit_state.now_ms),
            held_s=held.age_s(commit_state.now_us),
            rate=queue.rate or 0,
            lanes=_waiting_by_priority(queue) if self._has_lanes else msgspec.UNSET,
        )


def _waiting_by_priority(queue: Queue) -> dict[str, int]:
    return {str(PRIORITY_MAX - lane.rank): count for lane in queue.lanes if (count := len(lane))}


def make_named_report(
    engine: Engine, is_named: Callable[[str], object], limit: int
) -> Generator[None, None, tuple[bytes, int]]:
    """Report the first `limit` queues and durable subscriptions, by name, whose name `is_named`. Makes the list of
    QueueReport as JSON, in steps, and counts all queues with such a name."""
    by_wildcards = yield from inspect_held_by_wildcards(engine)
    first: list[str] = []
    matching = 0
    for queues in chunks(list(engine.queues.by_name.values()), NAMES_PER_STEP):
        names = [queue.name for queue in queues if is_named(queue.name) and not queue.is_temporary]
        matching += len(names)
        first = sorted(first + names)[:limit]
        yield
    rows = ListAnswer()
    yield from _Reporter(engine, by_wildcards, QueueReport).report(first, rows)
    return rows.finish(), matching
