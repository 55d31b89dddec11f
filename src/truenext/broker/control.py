"""What the broker can be asked about itself, or to do: SEND to /control/VERB with a reply-to, JSON in and out."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from sys import maxsize
from typing import Any, NamedTuple

import msgspec

from truenext import envelope
from truenext.broker.reload import Outcome
from truenext.commands import Control, Send
from truenext.engine import bulk
from truenext.engine.consumer import Consumer
from truenext.engine.engine import Engine
from truenext.engine.queue import Queue
from truenext.engine.stuck import StuckAudit
from truenext.errors import RemoteProtocolError
from truenext.message import Message
from truenext.order import PRIORITY_MAX

REPLY_LIFETIME_MS = 60_000
"""Milliseconds an answer waits for whoever asked."""


class Asked(NamedTuple):
    """What knows the answers."""

    engine: Engine
    stuck_audit: StuckAudit
    page_reads: int
    """How many are under way."""
    reload: Callable[[], Outcome]


def ask(asked: Asked, verb: str) -> bytes:
    """The answer to a question, as JSON.

    Raises: RemoteProtocolError if the question is not one of VERBS.
    """
    question = VERBS.get(verb)
    if question is None:
        there_are = [*VERBS, *CHANGES, *bulk.VERBS]
        raise RemoteProtocolError(f"there is no control verb {verb!r}; there are: {', '.join(sorted(there_are))}")
    return msgspec.json.encode(question(asked))


class QueueNamed(msgspec.Struct, forbid_unknown_fields=True):
    """What a change is of, in JSON."""

    queue: str


def change(engine: Engine, verb: str, body: bytes) -> bytes:
    """Do what one of CHANGES says; the answer is for when that is durable (`Engine.reply`).

    Raises: RemoteProtocolError if it cannot be done.
    """
    try:
        named = msgspec.json.decode(body, type=QueueNamed)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"{verb}: {error}") from error
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
        Message(
            priority=PRIORITY_MAX,
            persistent=False,
            expires_ms=now_ms + REPLY_LIFETIME_MS,
            header=envelope.write_header(headers),
            body=body,
        ),
    )


def _queues(asked: Asked) -> list[dict[str, Any]]:
    of_many = Counter(entry.lane.queue for wildcard in _wildcards(asked.engine) for entry in wildcard.held.values())
    return [
        {
            "name": queue.name,
            "waiting": queue.waiting(),
            "unacknowledged": of_many[queue] + sum(len(consumer.held) for consumer in queue.consumers),
            "consumers": len(queue.all_consumers()),
            "scheduled": asked.engine.scheduled(queue.name),
            "paused": queue.is_paused,
        }
        | ({"topic": queue.destination.topic} if queue.destination.topic else {})
        for queue in sorted(_lasting(asked.engine), key=lambda queue: queue.name)
    ]


def _status(asked: Asked) -> dict[str, Any]:
    engine = asked.engine
    memory = engine.memory
    queues = _lasting(engine)
    return {
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
        "room": engine.room.name.lower(),
        "page_reads": asked.page_reads,
        "queues": len(queues),
        "subscriptions": {
            "durable": sum(bool(queue.destination.topic) for queue in queues),
            "others": sum(queue.is_temporary and bool(queue.destination.topic) for queue in engine.queues()),
        },
        "scheduled_for_topics": engine.scheduled(""),
        "waiting": sum(queue.waiting() for queue in queues),
        "in_memory": sum(map(_in_memory, queues)) + _in_transactions(engine) + _of_many_in_memory(engine),
    }


def _reload(asked: Asked) -> Outcome:
    return asked.reload()


def _lasting(engine: Engine) -> list[Queue]:
    return [queue for queue in engine.queues() if not queue.is_temporary]


def _in_memory(queue: Queue) -> int:
    """Messages of a queue that are in memory, waiting or held by those who take from it alone."""
    count = sum(len(lane.recent) for lane in queue.lanes)
    held = (entry for consumer in queue.consumers for entry in consumer.held.values())
    return count + sum(entry.message is not None for entry in chain(*queue.lanes, held))


def _of_many_in_memory(engine: Engine) -> int:
    return sum(entry.message is not None for wildcard in _wildcards(engine) for entry in wildcard.held.values())


def _wildcards(engine: Engine) -> Iterator[Consumer]:
    """Those who take from many queues. Asked once, as there may be thousands of these."""
    for session in engine.sessions():
        for consumer in session.consumers.values():
            if consumer.is_of_many:
                yield consumer


def _in_transactions(engine: Engine) -> int:
    """Messages acknowledged or refused in open transactions that are in memory."""
    return sum(
        entry.message is not None
        for session in engine.sessions()
        for transaction in session.transactions.values()
        for entry in chain(transaction.acknowledged, transaction.refused)
    )


def _pause(engine: Engine, queue: str) -> dict[str, bool]:
    return {"made": engine.pause(queue)}


def _resume(engine: Engine, queue: str) -> dict[str, bool]:
    engine.resume(queue)
    return {}


CHANGES: dict[str, Callable[[Engine, str], dict[str, bool]]] = {"pause": _pause, "resume": _resume}
"""What is told of a change besides the queue."""

VERBS: dict[str, Callable[[Asked], Any]] = {"queues": _queues, "reload": _reload, "status": _status}
