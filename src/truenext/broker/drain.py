"""Control request `drain`: producers wait and no new client begins, until consumers have emptied the queues.

    begins     if each queue with a message has a consumer: none can come later
    lasts      until another request ends it, or the broker ends
    meanwhile  CommitState.is_draining     connections that only send wait, as at disk level LITTLE
               `restriction`               new connections may only send control requests

Source: docs/contract.md, "Drain"
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from heapq import heappush, heappushpop

import msgspec

from truenext.engine.engine import Engine
from truenext.engine.remainder import QUEUES_PER_STEP, QueueRemainder, count_remainder
from truenext.engine.state.queue import Entry, Queue
from truenext.errors import Code
from truenext.model.commands import ControlRequest, decode_client_json
from truenext.model.destination import SPARK_CLIENT_ID, SPARK_PREFIX
from truenext.model.restriction import Restriction

logger = logging.getLogger(__name__)

VERB = "drain"

BEGIN = "drain, to begin"
"""Name of the answers to requests that begin a drain, for ControlRequests: these answers differ from others."""

QUEUES_REPORTED = 10

RESTRICTION = Restriction("the broker is being drained", Code.DRAINING)


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request, in JSON. An empty body stands for one without fields."""

    draining: bool | None = None
    """True to begin a drain, false to end it; without this field the answer only tells how far the drain is."""


class RemainingQueue(msgspec.Struct):
    """One queue with messages for which a drain waits."""

    queue: str
    """Name of the queue, of a temporary one its destination as the client that owns the queue writes it."""
    client: str
    """Address of the client that owns the queue, if it is temporary; else ""."""
    waiting: int
    """Number of messages that wait, or have failed too often and are not dead letters yet."""
    held: int
    """Number of messages that consumers hold, or that open transactions have acknowledged."""
    consumers: int
    """Number of consumers, including consumers of patterns that match the queue."""


class DrainReport(msgspec.Struct, kw_only=True):
    """Answer to `drain`."""

    draining: bool
    """True if the broker is being drained."""
    error: str
    """Reason why the drain was not begun; else ""."""
    drained: bool
    """True if the broker was being drained when the request came, and nothing was left at a moment after that."""
    waiting: int
    """Number of messages for which the drain waits, and that wait themselves."""
    held: int
    """Number of messages for which the drain waits, and that consumers hold or open transactions have acknowledged."""
    queues: list[RemainingQueue]
    """The ten queues with the most of these messages, the largest first."""
    queues_total: int
    """Number of queues with such messages."""
    no_consumer: list[RemainingQueue]
    """Ten such queues at most in which messages wait, and that have no consumer: the drain waits in vain for them. No
    temporary queue, and no queue of Spark's queries, is among these."""
    no_consumer_total: int
    """Number of all queues without a consumer in which messages wait."""
    scheduled: int
    """Number of scheduled sends. The drain does not wait for these, nor for the messages below."""
    delayed: int
    """Number of messages that wait for their next try."""
    paused: int
    """Number of messages that wait in paused queues."""
    dead: int
    """Number of dead letters."""
    kept: int
    """Number of marks and decisions that queries of Spark keep."""


class Drain:
    def __init__(
        self,
        engine: Engine,
        other_holders: Callable[[], Iterable[Entry]],
        name_of: Callable[[Queue], tuple[str, str]],
    ) -> None:
        """`other_holders` returns the messages that are held outside of the engine. `name_of` returns name and client
        of a queue, as RemainingQueue has them."""
        self._engine = engine
        self._state = engine.state.commit_state
        self._other_holders = other_holders
        self._name_of = name_of
        self._may_begin = False
        """Whether the last request to begin or to end a drain was one to begin."""

    @property
    def is_active(self) -> bool:
        return self._state.is_draining

    def restriction(self, client_id: str, *, is_takeover: bool) -> Restriction | None:
        """Return why a connection that logs in now may only send control requests; None if it may do everything.
        `is_takeover` is True if the connection takes the place of another one."""
        is_free = not self.is_active or is_takeover or client_id == SPARK_CLIENT_ID
        return None if is_free else RESTRICTION

    def execute(self, request: ControlRequest) -> str:
        """Execute a request. Returns the name for the answer, which `report` makes: BEGIN, or VERB if the answer only
        tells what is left.

        Raises: RemoteProtocolError if the body is invalid
        """
        draining = decode_client_json(VERB, request.body, DrainRequest).draining if request.body else None
        if draining is not None:
            self._may_begin = draining
        if draining is False:
            self._end()
        return BEGIN if draining else VERB

    def report(self, name: str) -> Generator[None, None, bytes]:
        """Let clients drain the broker, and tell how far that is.

        `name` is a result of `execute`. If it is BEGIN, the drain begins, unless a queue with messages has no consumer,
        or a later request ends the drain.
        """
        was_active = self.is_active
        found = yield from count_remainder(self._engine, self._other_holders)
        queues, without = _Largest(), _Largest()
        waiting = held = 0
        for number, (queue, each) in enumerate(list(found.queues.items()), 1):
            waiting += each.waiting
            held += each.held
            queues.add(queue, each)
            if each.waiting and self._lacks_consumer(queue):
                without.add(queue, each)
            if number % QUEUES_PER_STEP == 0:
                yield
        error = ""
        if name == BEGIN and not self.is_active:
            if not self._may_begin:
                error = "another request has ended the drain before it began: begin it again if it is still needed"
            elif without.total:
                error = _no_consumer_error([queue.name for queue, _ in without.largest()], without.total)
            else:
                self._begin()
        return msgspec.json.encode(
            DrainReport(
                draining=self.is_active,
                error=error,
                drained=was_active and self.is_active and found.is_certain and found.is_empty,
                waiting=waiting,
                held=held,
                queues=self._rows(queues),
                queues_total=queues.total,
                no_consumer=self._rows(without),
                no_consumer_total=without.total,
                scheduled=found.scheduled,
                delayed=found.delayed,
                paused=found.paused,
                dead=found.dead,
                kept=found.kept,
            )
        )

    def _begin(self) -> None:
        self._state.is_draining = True
        logger.warning("drain has begun: connections that only send wait, new ones may only send control requests")

    def _end(self) -> None:
        if self.is_active:
            self._state.is_draining = False
            logger.warning("drain has ended: producers continue")

    def _lacks_consumer(self, queue: Queue) -> bool:
        if queue.is_temporary or queue.name.startswith(SPARK_PREFIX):
            return False
        receivers = self._engine.state.clients.receivers_of(queue)
        return not (receivers.consumers or receivers.wildcards)

    def _rows(self, queues: _Largest) -> list[RemainingQueue]:
        rows = []
        for queue, each in queues.largest():
            receivers = self._engine.state.clients.receivers_of(queue)
            name, client = self._name_of(queue)
            consumers = len(receivers.consumers) + len(receivers.wildcards)
            rows.append(RemainingQueue(name, client, each.waiting, each.held, consumers))
        return rows


class _Largest:
    """The queues with the most messages, of all that are added, and the number of all."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Queue, QueueRemainder]] = []
        self.total = 0

    def add(self, queue: Queue, each: QueueRemainder) -> None:
        self.total += 1
        push = heappush if len(self._heap) < QUEUES_REPORTED else heappushpop
        # The number decides among equals.
        push(self._heap, (each.waiting + each.held, -self.total, queue, each))

    def largest(self) -> list[tuple[Queue, QueueRemainder]]:
        """Return these queues, the largest first."""
        return [(queue, each) for _, _, queue, each in sorted(self._heap, reverse=True)]


def _no_consumer_error(names: list[str], total: int) -> str:
    shown = ", ".join(map(repr, names)) + (", ..." if total > len(names) else "")
    queues = "1 queue" if total == 1 else f"{total} queues"
    return (
        f"messages wait in {queues} without a consumer, and none could come during a drain: {shown}; start a consumer, "
        "or pause or purge the queue, and drain again"
    )
