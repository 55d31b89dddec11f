"""What the broker can be asked about itself, or to do: SEND to /control/VERB with a reply-to, JSON in and out.

What is asked of all queues is looked at in steps, between which others are served (slices.py): the parts of an answer
are from different moments, none of them before the question. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from heapq import heappush, heappushpop, merge
from io import BytesIO
from itertools import count
from sys import maxsize
from typing import Any, NamedTuple, TypeVar

import msgspec

from truenext import envelope
from truenext.broker import connection_question, producer_question
from truenext.broker.pager import Pager
from truenext.broker.questions import AnswerInTheMaking
from truenext.broker.reload import ReloadResult
from truenext.broker.slices import Steps
from truenext.commands import Control, Send
from truenext.destination import TEMPORARY_PREFIX, TEMPORARY_TOPIC_PREFIX, Destination
from truenext.engine.background import bulk
from truenext.engine.engine import Engine
from truenext.engine.state.clients import Receivers
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.stuck import StuckAudit
from truenext.errors import Code, RemoteProtocolError
from truenext.message import SentMessage
from truenext.order import PRIORITY_MAX
from truenext.question import read_question

REPLY_LIFETIME_MS = 60_000
"""Milliseconds an answer waits for whoever asked."""

LOOKED_AT_AT_ONCE = 50
"""Queues, consumers or messages that are looked at in one step."""

SORTED_AT_ONCE = 1000
"""Names that are sorted in one step."""

LARGEST_SHOWN = 10
"""Of what ends with its connection: those that have most are named."""

_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class Caller(NamedTuple):
    """Who a client is."""

    address: str
    """Of its socket."""
    client_id: str
    """What it calls itself; "" if nothing."""


class Asked(NamedTuple):
    """What knows the answers."""

    engine: Engine
    stuck_audit: StuckAudit
    pager: Pager
    reload: Callable[[], ReloadResult]
    caller: Callable[[ConnectionState], Caller]
    disk_bytes: dict[str, int]
    """Bytes by which the room for messages was found, see `Store.disk_bytes`."""


def check(verb: str) -> None:
    """Raises: RemoteProtocolError if there is no such question or work"""
    if verb not in VERBS:
        there_are = [*VERBS, *CHANGES, connection_question.VERB, producer_question.VERB, *bulk.VERBS]
        raise RemoteProtocolError(
            f"there is no control verb {verb!r}; there are: {', '.join(sorted(there_are))}", Code.QUESTION
        )


class QueueNamed(msgspec.Struct, forbid_unknown_fields=True):
    """What a change is of, in JSON."""

    queue: str


def change(engine: Engine, verb: str, body: bytes) -> bytes:
    """Do what one of CHANGES says; the answer is for when that is durable (`Engine.reply`).

    Raises: RemoteProtocolError if it cannot be done.
    """
    named = read_question(verb, body, QueueNamed)
    return msgspec.json.encode({"queue": named.queue} | CHANGES[verb](engine, named.queue))


def reply(question: Control, body: bytes, now_ms: int) -> Send:
    """The message that carries an answer to whoever asked."""
    headers = {"destination": question.reply_to.address, "content-type": "application/json"}
    if question.correlation is not None:
        headers["correlation-id"] = question.correlation
    headers["priority"] = str(PRIORITY_MAX)
    headers["content-length"] = str(len(body))
    return Send(
        question.reply_to,
        SentMessage(
            priority=PRIORITY_MAX,
            persistent=False,
            expires_ms=now_ms + REPLY_LIFETIME_MS,
            header=envelope.write_header(headers),
            body=body,
        ),
    )


def _queues(asked: Asked) -> AnswerInTheMaking:
    engine = asked.engine
    of_many: Counter[Queue] = Counter()
    yield from _count_held_of_many(engine, of_many)
    lasting: dict[str, Queue] = {}
    for queues in _pieces(list(engine.queues())):
        lasting |= {queue.name: queue for queue in queues if not queue.is_temporary}
        yield
    in_order: list[list[str]] = []
    for names in _pieces(list(lasting), SORTED_AT_ONCE):
        in_order.append(sorted(names))
        yield
    # Written row by row, and what is not needed any more let go of: a copy of all of it would take too long for a step.
    answer = BytesIO()
    answer.write(b"[")
    for number, name in enumerate(merge(*in_order)):
        queue = lasting.pop(name)
        receivers = engine.clients.receivers_of(queue)
        held = yield from _held_of_one(receivers)
        row: dict[str, Any] = {
            "name": name,
            "waiting": queue.waiting(),
            "unacknowledged": of_many[queue] + held,
            "consumers": len(receivers.consumers) + len(receivers.wildcards),
            "scheduled": engine.scheduled(name),
            "paused": queue.is_paused,
        }
        if queue.destination.topic:
            row["topic"] = queue.destination.topic
        if number:
            answer.write(b",")
        answer.write(_encode(row))
        if number % LOOKED_AT_AT_ONCE == 0:
            yield
    answer.write(b"]")
    return answer.getvalue()


def _status(asked: Asked) -> AnswerInTheMaking:
    engine = asked.engine
    lasting = durable = others = waiting = in_memory = 0
    temporary = _Temporary()
    for queues in _pieces(list(engine.queues())):
        for queue in queues:
            is_subscription = bool(queue.destination.topic)
            if queue.is_temporary:
                others += is_subscription
                yield from temporary.add(queue, engine.clients.receivers_of(queue))
            else:
                lasting += 1
                durable += is_subscription
                waiting += queue.waiting()
                in_memory += queue.in_memory
        yield
    scheduled = 0
    for names in _pieces(engine.scheduled_for()):
        scheduled += sum(map(engine.scheduled, names))
        yield
    memory = engine.memory
    return _encode(
        {
            "stuck": [
                {"queue": queue.name, "waiting_ms": waiting_ms}
                for queue, waiting_ms in asked.stuck_audit.stuck(engine.now_ms)
            ],
            "memory": {
                "limit": None if memory.limit == maxsize else memory.limit,
                "used": memory.used,
                "leaving": memory.leaving,
                "unsent": memory.unsent,
                "open": memory.open,
            },
            "disk_level": engine.ledger.disk_level.name.lower(),
            "disk_bytes": asked.disk_bytes,
            "page_reads": len(asked.pager.under_way),
            "queues": lasting,
            "subscriptions": {"durable": durable, "others": others},
            "scheduled": scheduled,
            "scheduled_for_topics": engine.scheduled(""),
            "waiting": waiting,
            "in_memory": in_memory,
            "temporary": temporary.facts(asked),
        }
    )


def _reload(asked: Asked) -> AnswerInTheMaking:
    # Its steps cannot be taken one by one: all queues get their policies between two dispatches.
    yield
    return _encode(asked.reload())


class _Temporary:
    """What ends with its connection: how much that is, and of whom most of it is."""

    def __init__(self) -> None:
        self._waiting = 0
        self._unacknowledged = 0
        self._bytes = 0
        self._largest: list[tuple[int, int, Destination, int, int]] = []
        """A heap, the least first: bytes, a number that tells equals apart, and what they are of; waiting, held."""
        self._numbers = count()

    def add(self, queue: Queue, receivers: Receivers) -> Steps:
        held = yield from _held_of_one(receivers)
        waiting, size = queue.waiting(), queue.resident + queue.spilled
        self._waiting += waiting
        self._unacknowledged += held
        self._bytes += size
        if size:
            keep = heappush if len(self._largest) < LARGEST_SHOWN else heappushpop
            keep(self._largest, (size, next(self._numbers), queue.destination, waiting, held))

    def facts(self, asked: Asked) -> dict[str, Any]:
        # Some may have gone since.
        sessions = {session.id: session for session in asked.engine.sessions()} if self._largest else {}
        rows = []
        for size, _, destination, waiting, held in sorted(self._largest, reverse=True):
            if destination.session in sessions:
                address, client_id = asked.caller(sessions[destination.session])
                of_whom = {"destination": _as_said(destination), "client": address, "client_id": client_id}
                rows.append(of_whom | {"waiting": waiting, "unacknowledged": held, "bytes": size})
        return {
            "waiting": self._waiting,
            "unacknowledged": self._unacknowledged,
            "bytes": self._bytes,
            "largest": rows,
        }


def _as_said(destination: Destination) -> str:
    """How its client has called a queue that ends with its connection. The name of its session is kept from others, who
    could send there."""
    prefix = f"/{destination.session}/"
    if not destination.topic:
        return TEMPORARY_PREFIX + destination.name.removeprefix(prefix)
    if destination.topic.startswith("/"):
        return TEMPORARY_TOPIC_PREFIX + destination.topic.removeprefix(prefix)
    return f"/topic/{destination.topic}"


def _held_of_one(receivers: Receivers) -> Generator[None, None, int]:
    """How many messages of a queue those have who take from it alone."""
    held = 0
    for consumers in _pieces(receivers.consumers[:]):
        held += sum(len(consumer.held) for consumer in consumers)
        if len(consumers) == LOOKED_AT_AT_ONCE:
            yield
    return held


def _count_held_of_many(engine: Engine, held: Counter[Queue]) -> Steps:
    """How many messages of each queue those have who take from many."""
    for session in list(engine.sessions()):
        for consumer in list(session.consumers.values()):
            if isinstance(consumer, Wildcard):
                for entries in _pieces(list(consumer.held.values())):
                    held.update(entry.lane.queue for entry in entries)
                    yield
        yield


def _pieces(things: list[_T], size: int = LOOKED_AT_AT_ONCE) -> Iterator[list[_T]]:
    return (things[at : at + size] for at in range(0, len(things), size))


def _pause(engine: Engine, queue: str) -> dict[str, bool]:
    return {"made": engine.pause(queue)}


def _resume(engine: Engine, queue: str) -> dict[str, bool]:
    engine.resume(queue)
    return {}


CHANGES: dict[str, Callable[[Engine, str], dict[str, bool]]] = {"pause": _pause, "resume": _resume}
"""What is told of a change besides the queue."""

VERBS: dict[str, Callable[[Asked], AnswerInTheMaking]] = {"queues": _queues, "reload": _reload, "status": _status}
