"""Control requests: queries and changes of the broker, by SEND to /control/VERB with a reply-to, JSON in and out.

Queries about all queues run in steps, between which other clients are served (event_loop.py). So the parts of one
answer show different moments, all of them after the request. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from collections.abc import Callable
from heapq import heappush, heappushpop
from itertools import count
from sys import maxsize
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from truenext.broker.control_requests import AnswerGenerator
from truenext.broker.pager import Pager
from truenext.broker.queues_request import (
    NONE_HELD,
    MaySee,
    SumsOfQueues,
    chunks,
    inspect_held,
    inspect_held_by_wildcards,
    make_queues_report,
    parse_queues_request,
    report_counts,
)
from truenext.broker.reload import ReloadResult
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.counts import Counts
from truenext.engine.state.queue import Queue
from truenext.engine.stuck import StuckQueueDetector
from truenext.model import header_lines
from truenext.model.commands import ControlRequest, Send, decode_client_json
from truenext.model.control_answers import (
    CommitsReport,
    HistoryReport,
    JournalReport,
    LogReport,
    MemberReport,
    MemoryReport,
    QueueChange,
    StatusReport,
    StuckQueueReport,
    SubscriptionCounts,
    TemporaryQueueReport,
    TemporaryReport,
)
from truenext.model.destination import SPARK_PREFIX, TEMPORARY_PREFIX, TEMPORARY_TOPIC_PREFIX, Destination
from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_MAX
from truenext.store.log import Log, LogStatus
from truenext.store.store import Store
from truenext.version import VERSION
from truenext.wire.stomp.speedups import CODEC_LANGUAGE

REPLY_LIFETIME_MS = 60_000
"""Milliseconds until an answer that is not consumed expires."""

LARGEST_COUNT = 10
"""Number of the largest temporary queues and subscriptions that `status` names."""

_encode = msgspec.json.Encoder().encode


class ClientInfo(NamedTuple):
    """Connection and client, as answers to control requests name them."""

    address: str
    """Address of the client's socket."""
    client_id: str
    """Value of `client-id` on the client's CONNECT; "" if none."""
    protocol: str = "STOMP"
    """Name of the connection's protocol."""
    tls: str | None = None
    """Version of TLS; None if the connection is not encrypted."""


class Vitals(NamedTuple):
    """Figures of the broker's own parts, for the answer to `status`."""

    uptime_s: float
    commits: CommitsReport
    history: HistoryReport | None


class QueryContext(NamedTuple):
    """Parts of the broker that the functions in QUERIES read for their answers."""

    engine: Engine
    stuck_audit: StuckQueueDetector
    pager: Pager
    reload: Callable[[], ReloadResult]
    client_info: Callable[[ConnectionState], ClientInfo]
    store: Store
    log: Log | None
    """Log of which the store is a copy; None if the store is no copy."""
    hand_over: Callable[[str | None], str]
    """Begins a clean stop that names the broker which takes over, see `Broker.hand_over`."""
    vitals: Callable[[], Vitals]
    """Returns figures of the broker's own parts."""
    may_see: MaySee
    """Function that tells whether the client may see a queue; None if it may see all."""
    body: bytes
    """Body of the request, which `check_query` has checked; empty if the query has none."""


def check_query(request: ControlRequest) -> bytes:
    """Check a query, and return the body on which its answer depends; empty for a query without a body.

    Raises: RemoteProtocolError if the body is invalid
    """
    parse = QUERY_PARSERS.get(request.verb)
    if parse is None:
        return b""
    parse(request.body)
    return request.body


class QueueRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a control request about one queue, in JSON."""

    queue: str
    """Name of the queue."""


def apply_queue_change(engine: Engine, verb: str, body: bytes) -> bytes:
    """Apply one of QUEUE_CHANGES, and return the answer as JSON. The answer may be sent only once the change is durable
    (`Administering.reply`).

    Raises: RemoteProtocolError if the body is invalid, or the change cannot be made
    """
    return _encode(QUEUE_CHANGES[verb](engine, decode_queue_name(verb, body)))


def decode_queue_name(verb: str, body: bytes) -> str:
    """Return the name of the queue in the body of a control request about one queue.

    Raises: RemoteProtocolError if the body is invalid
    """
    return decode_client_json(verb, body, QueueRequest).queue


def make_reply_message(request: ControlRequest, body: bytes, now_ms: int) -> Send:
    """Make the SEND that carries an answer to the reply queue of its request."""
    headers = {"destination": request.reply_to.address, "content-type": "application/json"}
    if request.correlation is not None:
        headers["correlation-id"] = request.correlation
    headers["priority"] = str(PRIORITY_MAX)
    headers["content-length"] = str(len(body))
    return Send(
        request.reply_to,
        SentMessage(
            priority=PRIORITY_MAX,
            persistent=False,
            expires_ms=now_ms + REPLY_LIFETIME_MS,
            header=header_lines.encode_header_lines(headers),
            body=body,
        ),
    )


def _queues(context: QueryContext) -> AnswerGenerator:
    """Report queues and durable subscriptions by name, order and piece, and the sums of all."""
    return make_queues_report(context.engine, context.may_see, context.body)


def _status(context: QueryContext) -> AnswerGenerator:
    """Report the state of the broker: memory, disk space, and numbers of messages."""
    engine = context.engine
    by_wildcards = yield from inspect_held_by_wildcards(engine)
    receivers_of = engine.state.clients.receivers_of
    durable = non_durable = in_memory = dead_letters = 0
    sums, temporary = SumsOfQueues(engine.queues.removed), _TemporaryTotals(engine.queues.removed_temporary)
    held_by_others = NONE_HELD
    for queues in chunks(list(engine.queues.by_name.values())):
        for queue in queues:
            is_subscription = bool(queue.destination.topic)
            consumers = receivers_of(queue).consumers
            held = by_wildcards.get(queue, NONE_HELD)
            if consumers:
                held = held.plus((yield from inspect_held(consumers)))
            if queue.is_temporary:
                non_durable += is_subscription
                temporary.add(queue, held.number)
            else:
                durable += is_subscription
                waiting, oldest_ms = queue.waiting_count(), queue.oldest_ms()
                if queue.holds_dead_letters:
                    dead_letters += waiting
                is_spark = queue.name.startswith(SPARK_PREFIX)
                if queue.holds_dead_letters or is_spark:
                    # What stays for long there says nothing of consumers.
                    oldest_ms = None
                if not is_spark:
                    held_by_others = held_by_others.plus(held)
                sums.add(queue, waiting, held, 0, oldest_ms)
                in_memory += queue.resident_count
        yield
    scheduled = 0
    for names in chunks(list(engine.queues.hidden_by_name)):
        scheduled += sum(map(engine.queues.scheduled_count, names))
        yield
    memory = engine.state.memory
    vitals, journal = context.vitals(), context.store.journal_size
    return _encode(
        StatusReport(
            stuck=[
                StuckQueueReport(queue.name, waiting_ms)
                for queue, waiting_ms in context.stuck_audit.stuck_queues(engine.state.commit_state.now_ms)
            ],
            memory=MemoryReport(
                limit=None if memory.limit == maxsize else memory.limit,
                used=memory.message_bytes,
                leaving=memory.pending_free_bytes,
                unsent=memory.unsent_bytes,
                open=memory.transaction_bytes,
                incomplete=memory.incomplete_bytes,
            ),
            ready=not engine.state.commit_state.is_draining,
            disk_level=context.store.disk_level.name.lower(),
            disk_bytes=context.store.disk_level_bytes,
            page_reads=len(context.pager.pending),
            queues=sums.queues,
            subscriptions=SubscriptionCounts(durable, non_durable),
            scheduled=scheduled,
            scheduled_for_topics=engine.queues.scheduled_count(""),
            waiting=sums.waiting,
            dead_letters=dead_letters,
            in_memory=in_memory,
            temporary=temporary.report(context),
            codec=CODEC_LANGUAGE,
            version=VERSION,
            uptime_s=vitals.uptime_s,
            connections=len(engine.state.clients.sessions),
            held=sums.held.number,
            oldest_s=sums.oldest_s(engine.state.commit_state.now_ms),
            held_s=held_by_others.age_s(engine.state.commit_state.now_us),
            rate=round(sums.rate, 1),
            counts=sums.counts(),
            temporary_counts=report_counts(temporary.counts),
            commits=vitals.commits,
            journal=None if journal is None else JournalReport(journal.segments, journal.bytes),
            history=vitals.history,
            log=UNSET if context.log is None else _log_report(context.log.status),
        )
    )


def _log_report(status: LogStatus) -> LogReport:
    return LogReport(
        server=status.server,
        epoch=status.epoch,
        number=status.number,
        position=status.position,
        replicated=status.is_replicated,
        awaited=status.wait.awaited.value if status.wait else None,
        waiting_since_ms=status.wait.since_ms if status.wait else None,
        members=[
            MemberReport(each.name, each.host, each.role, each.epoch, each.number, each.age_ms)
            for each in status.members
        ],
    )


def _reload(context: QueryContext) -> AnswerGenerator:
    """Read the configuration file again, and apply it as a whole or not at all."""
    # One step only: all queues get their policies between two dispatches.
    yield
    return _encode(context.reload())


class _TemporaryTotals:
    """Totals of all queues that end with their connection, and a list of the largest of them."""

    def __init__(self, counts: Counts) -> None:
        """`counts` are those of the removed queues."""
        self.counts = Counts()
        self.counts.add(counts)
        self._waiting = 0
        self._unacknowledged = 0
        self._bytes = 0
        self._largest: list[tuple[int, int, Destination, int, int]] = []
        """Heap of the largest queues, the smallest of them first. For each: bytes, a number that decides among equals,
        the destination, the number of waiting messages, and that of held messages."""
        self._tie_breakers = count()

    def add(self, queue: Queue, held: int) -> None:
        self.counts.add(queue.counts)
        waiting, size = queue.waiting_count(), queue.resident_bytes + queue.spilled_bytes
        self._waiting += waiting
        self._unacknowledged += held
        self._bytes += size
        if size:
            push = heappush if len(self._largest) < LARGEST_COUNT else heappushpop
            push(self._largest, (size, next(self._tie_breakers), queue.destination, waiting, held))

    def report(self, context: QueryContext) -> TemporaryReport:
        # Some of these connections may have ended since.
        sessions = context.engine.state.clients.sessions
        rows = []
        for size, _, destination, waiting, held in sorted(self._largest, reverse=True):
            if destination.session in sessions:
                info = context.client_info(sessions[destination.session])
                rows.append(
                    TemporaryQueueReport(
                        destination=own_address(destination),
                        client=info.address,
                        client_id=info.client_id,
                        waiting=waiting,
                        unacknowledged=held,
                        bytes=size,
                    )
                )
        return TemporaryReport(self._waiting, self._unacknowledged, self._bytes, rows)


def own_address(destination: Destination) -> str:
    """Return the address of a temporary queue or subscription as the client that owns it writes it. The queue's name
    would show the id of its connection, with which other clients could send to the queue."""
    prefix = f"/{destination.session}/"
    if not destination.topic:
        return TEMPORARY_PREFIX + destination.name.removeprefix(prefix)
    if destination.topic.startswith("/"):
        return TEMPORARY_TOPIC_PREFIX + destination.topic.removeprefix(prefix)
    return f"/topic/{destination.topic}"


def _pause(engine: Engine, queue: str) -> QueueChange:
    """Pause a queue: from now on nothing is dispatched from the queue."""
    return QueueChange(queue, created=engine.commands.administering.pause(queue))


def _resume(engine: Engine, queue: str) -> QueueChange:
    """Resume a paused queue."""
    engine.commands.administering.resume(queue)
    return QueueChange(queue)


QUEUE_CHANGES: dict[str, Callable[[Engine, str], QueueChange]] = {"pause": _pause, "resume": _resume}
"""Functions that change a queue and return the answer, by verb."""

QUERIES: dict[str, Callable[[QueryContext], AnswerGenerator]] = {
    "queues": _queues,
    "reload": _reload,
    "status": _status,
}
"""Functions that answer a query, by verb."""

QUERY_PARSERS: dict[str, Callable[[bytes], object]] = {"queues": parse_queues_request}
"""Functions that check the bodies of queries, by verb. The other queries have no body."""
