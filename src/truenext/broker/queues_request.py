"""Control request `queues`: reports queues by name, order and piece, and the sums of all that the user may see.

    consumers     what they hold, by queue
    queues        which are selected, their sums, and the place of each in the order
    rows          of the queues that the answer has, as they are when their row is made

All in steps, so the answer shows different moments. Source: docs/contract.md, "What the broker tells"
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from heapq import merge
from io import BytesIO
from itertools import islice
from typing import Annotated, TypeVar

import msgspec

from truenext.broker.control_answers import MessageCounts, QueueOrder, QueueReport, QueueSums
from truenext.broker.event_loop import Steps
from truenext.engine.engine import Engine
from truenext.engine.state.counts import Counts
from truenext.engine.state.queue import Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import decode_client_json
from truenext.model.pattern import fault_of_pattern, is_pattern, matches

VERB = "queues"

ITEMS_PER_STEP = 50
"""Number of queues, consumers or messages that one step inspects."""

NAMES_PER_STEP = 500
"""Number of names that one step compares with the patterns of the metrics."""

PLACES_SORTED_PER_STEP = 500
"""Number of places that one step sorts."""

NEVER_MS = 2**63
"""Time of the oldest message of a queue in which nothing waits, to be sorted behind all others."""

MaySee = Callable[[Queue], bool] | None
"""Function that tells whether a client may see a queue; None if it may see all."""

Place = tuple[float, str]
"""Place of a queue in an order: the lowest number comes first, equal ones are sorted by name."""


class _Cursor(msgspec.Struct, array_like=True):
    """Place of the last queue of an answer, in JSON."""

    number: float
    name: str


_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class QueuesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request, in JSON. With an empty body the answer is only a list of QueueReport, of all queues by
    name."""

    name: str = ""
    """Part of the names of the queues to report, upper and lower case alike, or a pattern of names, with `*` and `>`;
    empty for all."""
    order: QueueOrder = QueueOrder.NAME
    """Order of the queues."""
    limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Largest number of queues in the answer; null for all, 0 for the sums alone."""
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


def count_held(engine: Engine) -> Generator[None, None, Counter[Queue]]:
    """Count, in steps, the messages of each queue that consumers hold."""
    held: Counter[Queue] = Counter()
    count = 0
    for session in list(engine.state.clients.sessions.values()):
        for consumer in list(session.consumers.values()):
            if isinstance(consumer, Wildcard):
                for entries in chunks(list(consumer.held.values())):
                    held.update(entry.lane.queue for entry in entries)
                    yield
            elif consumer.held and consumer.queue is not None:
                held[consumer.queue] += len(consumer.held)
            count += 1
            if count % ITEMS_PER_STEP == 0:
                yield
    return held


class SumsOfQueues:
    """Sums of the queues that are added."""

    def __init__(self, counts: Counts | None = None) -> None:
        """`counts` are those with which the sums begin."""
        self._counts = Counts()
        if counts is not None:
            self._counts.add(counts)
        self.queues = self.waiting = self.held = self.scheduled = 0
        self.rate = 0.0
        self._oldest_ms: int | None = None

    def add(self, queue: Queue, waiting: int, held: int, scheduled: int, oldest_ms: int | None) -> None:
        self.queues += 1
        self.waiting += waiting
        self.held += held
        self.scheduled += scheduled
        self.rate += queue.rate
        self._counts.add(queue.counts)
        if oldest_ms is not None and (self._oldest_ms is None or oldest_ms < self._oldest_ms):
            self._oldest_ms = oldest_ms

    def oldest_s(self, now_ms: int) -> float | None:
        return age_s(self._oldest_ms, now_ms)

    def counts(self) -> MessageCounts:
        return report_counts(self._counts)

    def report(self, now_ms: int) -> QueueSums:
        return QueueSums(
            **msgspec.structs.asdict(self.counts()),
            queues=self.queues,
            waiting=self.waiting,
            held=self.held,
            scheduled=self.scheduled,
            oldest_s=self.oldest_s(now_ms),
            rate=round(self.rate, 1),
        )


def age_s(since_ms: int | None, now_ms: int) -> float | None:
    """Return the seconds since a time, at least 0; None if there is no time."""
    return None if since_ms is None else max(0, now_ms - since_ms) / 1000


def report_counts(counts: Counts) -> MessageCounts:
    return MessageCounts(
        accepted=counts.accepted,
        acknowledged=counts.acknowledged,
        returned=counts.returned,
        expired=counts.expired,
        dead_lettered=counts.dead_lettered or {},
        handled=counts.handled,
        moved=counts.moved,
        purged=counts.purged,
    )


def make_queues_report(engine: Engine, may_see: MaySee, body: bytes) -> Generator[None, None, bytes]:
    """Report queues and durable subscriptions, and their sums. With an empty body the answer is a list of all by name.

    Makes the answer as JSON, in steps.
    """
    request = parse_queues_request(body)
    held = yield from count_held(engine)
    sums = SumsOfQueues()
    selected: dict[str, Queue] = {}
    places: list[list[Place]] = []
    unsorted: list[Place] = []
    now_ms = engine.state.commit_state.now_ms
    place_of, after = _PLACES[request.order], _parse_cursor(request.after)
    is_selected = _selector_of(request.name) if request.name else None
    kept = None if request.limit is None else request.limit + 1
    for queues in chunks(list(engine.queues.by_name.values())):
        for queue in queues:
            if queue.is_temporary or not (is_selected is None or is_selected(queue.name)):
                continue
            if may_see is not None and not may_see(queue):
                continue
            waiting, oldest_ms = queue.waiting_count(), queue.oldest_ms()
            if body:
                sums.add(queue, waiting, held[queue], engine.queues.scheduled_count(queue.name), oldest_ms)
            place = place_of(queue, waiting, oldest_ms), queue.name
            if after is None or place > after:
                unsorted.append(place)
                selected[queue.name] = queue
        if len(unsorted) >= PLACES_SORTED_PER_STEP:
            yield
            places.append(sorted(unsorted)[:kept])
            unsorted = []
        yield
    places.append(sorted(unsorted)[:kept])
    yield
    rows = _Rows(engine, held, selected)
    in_order = merge(*places)
    yield from rows.write(in_order if request.limit is None else islice(in_order, request.limit))
    if not body:
        return rows.as_list()
    has_more = rows.last is not None and next(in_order, None) is not None
    return rows.as_object(_encode(rows.last).decode() if has_more else None, sums.report(now_ms))


def make_named_report(
    engine: Engine, is_named: Callable[[str], object], limit: int
) -> Generator[None, None, tuple[bytes, int]]:
    """Report the first `limit` queues and durable subscriptions, by name, whose name `is_named`. Makes the list of
    QueueReport as JSON, in steps, and counts all queues with such a name."""
    held = yield from count_held(engine)
    first: list[str] = []
    matching = 0
    for queues in chunks(list(engine.queues.by_name.values()), NAMES_PER_STEP):
        names = [queue.name for queue in queues if is_named(queue.name) and not queue.is_temporary]
        matching += len(names)
        first = sorted(first + names)[:limit]
        yield
    rows = _Rows(engine, held, {name: engine.queues.by_name[name] for name in first if name in engine.queues.by_name})
    yield from rows.write((0, name) for name in first if name in rows.queues)
    return rows.as_list(), matching


def _place_by_name(queue: Queue, waiting: int, oldest_ms: int | None) -> float:
    return 0


def _place_by_waiting(queue: Queue, waiting: int, oldest_ms: int | None) -> float:
    return -waiting


def _place_by_oldest(queue: Queue, waiting: int, oldest_ms: int | None) -> float:
    return NEVER_MS if oldest_ms is None else oldest_ms


def _place_by_rate(queue: Queue, waiting: int, oldest_ms: int | None) -> float:
    return 0 - queue.rate


_PLACES: dict[QueueOrder, Callable[[Queue, int, int | None], float]] = {
    QueueOrder.NAME: _place_by_name,
    QueueOrder.WAITING: _place_by_waiting,
    QueueOrder.OLDEST: _place_by_oldest,
    QueueOrder.RATE: _place_by_rate,
}
"""Functions that return the number of a queue's place."""


class _Rows:
    """Rows of an answer. They are encoded one by one, while queues of finished rows are freed: a copy of all would take
    too long for one step."""

    def __init__(self, engine: Engine, held: Counter[Queue], queues: dict[str, Queue]) -> None:
        self._engine = engine
        self._held = held
        self.queues = queues
        self._rows = BytesIO()
        self.last: Place | None = None
        """Place of the last row."""

    def write(self, places: Iterable[Place]) -> Steps:
        for number, place in enumerate(places):
            queue = self.queues.pop(place[1])
            if number:
                self._rows.write(b",")
            self._rows.write(_encode(self._report(queue)))
            self.last = place
            if number % ITEMS_PER_STEP == 0:
                yield

    def as_list(self) -> bytes:
        return b"[" + self._rows.getvalue() + b"]"

    def as_object(self, cursor: str | None, sums: QueueSums) -> bytes:
        parts = (b'{"queues":[', self._rows.getvalue(), b'],"next":', _encode(cursor), b',"sums":', _encode(sums), b"}")
        return b"".join(parts)

    def _report(self, queue: Queue) -> QueueReport:
        receivers = self._engine.state.clients.receivers_of(queue)
        counts = queue.counts
        return QueueReport(
            name=queue.name,
            waiting=queue.waiting_count(),
            unacknowledged=self._held[queue],
            consumers=len(receivers.consumers) + len(receivers.wildcards),
            scheduled=self._engine.queues.scheduled_count(queue.name),
            paused=queue.is_paused,
            topic=queue.destination.topic or msgspec.UNSET,
            accepted=counts.accepted,
            acknowledged=counts.acknowledged,
            returned=counts.returned,
            expired=counts.expired,
            dead_lettered=counts.dead_lettered or {},
            handled=counts.handled,
            moved=counts.moved,
            purged=counts.purged,
            oldest_s=age_s(queue.oldest_ms(), self._engine.state.commit_state.now_ms),
            rate=queue.rate,
        )
