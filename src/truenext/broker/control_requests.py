"""Control requests whose answers take long to make: the queue in which they wait, and the sending of the answers.

Answers are made in slices, one after the other. One answer serves all requests with the same verb and body that came
before the answer was started (those that begin a drain have an answer of their own). A later request gets a new answer,
because its client may have changed something just before. An answer about one connection is only for that connection.
An answer about many queues has megabytes, and each client gets a copy of its own. So large answers are sent only while
the answers in flight fit into ANSWERS_IN_FLIGHT_BYTES_MAX. Other large answers wait until clients have received some.
Source: docs/decisions/0037-asking-a-full-broker.md
"""

from collections import Counter, deque
from collections.abc import Callable, Generator
from functools import partial
from io import BytesIO
from typing import Any

import msgspec

from truenext.broker.event_loop import SlicedWork, Steps
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import ControlRequest
from truenext.model.limits import ANSWER_SECONDS_MAX, ANSWER_STALL_SECONDS, ANSWERS_IN_FLIGHT_BYTES_MAX, PIECES_MAX

AnswerGenerator = Generator[None, None, bytes]
"""Generator that makes an answer in steps, and returns it as JSON."""

Begin = Callable[[Callable[[bytes], None]], object]
"""Function that begins to make an answer elsewhere, and gets the function that sends it."""

_Key = tuple[str, ConnectionState | None, bytes]
"""Key of an answer: its name, which is usually the verb; the connection that the answer is about (None: the whole
broker); the body of the requests, empty if the answer does not depend on it."""

_encode = msgspec.json.Encoder().encode

SMALL_ANSWER_BYTES = 64 * 1024
"""Bytes up to which an answer is small: a small answer is sent at once, even if many answers are in flight."""


class ListAnswer:
    """Answer with a list in JSON. Each row is encoded when it is added: all would take too long for one step."""

    def __init__(self, head: bytes = b"") -> None:
        """`head` is the part of the answer before the list."""
        self._json = BytesIO()
        self._json.write(head + b"[")
        self._separator = b""

    def add(self, row: msgspec.Struct) -> None:
        self._json.write(self._separator)
        self._json.write(_encode(row))
        self._separator = b","

    def finish(self, *parts: bytes) -> bytes:
        """End the list, write these parts behind it, and return all, which may have megabytes, without a copy."""
        self._json.writelines((b"]", *parts))
        return self._json.getvalue()


class ControlRequests:
    def __init__(
        self,
        sliced_work: SlicedWork,
        start: Callable[[str, ConnectionState | None, bytes], AnswerGenerator],
        reply: Callable[[ConnectionState, ControlRequest, bytes], bool],
    ) -> None:
        """`start` returns the generator of the answer with a name, about a connection or the whole broker (None), to a
        body. `reply` sends an answer, and returns whether the client is still connected."""
        self._sliced_work = sliced_work
        self._start = start
        self._reply = reply
        self._waiting: dict[_Key, list[tuple[ConnectionState, ControlRequest]]] = {}
        """Requests whose answer is not started yet."""
        self._others: deque[tuple[ConnectionState, ControlRequest, Begin]] = deque()
        """Requests whose answer is made elsewhere, and not begun yet."""
        self._is_other_made = False
        """True while such an answer is made."""
        self._pending_counts: Counter[ConnectionState] = Counter()
        self._finished: deque[tuple[ConnectionState, ControlRequest, bytes]] = deque()
        """Answers that are made and not sent yet."""
        self.in_flight: dict[ConnectionState, int] = {}
        """Bytes of large answers on their way to each connection."""
        self._progress: dict[ConnectionState, tuple[int, float, float]] = {}
        """Progress of each connection with large answers: the bytes that the socket had taken at the last progress of
        SMALL_ANSWER_BYTES, the time of that progress, and the time of the first check."""

    def pending_count(self, session: ConnectionState) -> int:
        """Return the number of answers for which the connection waits."""
        return self._pending_counts[session]

    def add(
        self,
        session: ConnectionState,
        request: ControlRequest,
        *,
        about: ConnectionState | None = None,
        name: str | None = None,
        body: bytes = b"",
    ) -> None:
        """Add a request about the connection `about`, or about the whole broker (None). `name` is that of the answer;
        None stands for the verb. `body` is the body of the request if the answer depends on it.

        Raises: RemoteProtocolError if the connection waits for too many answers
        """
        self._count_request(session, request)
        key = name or request.verb, about, body
        if key in self._waiting:
            self._waiting[key].append((session, request))
        else:
            self._waiting[key] = [(session, request)]
            self._sliced_work.add(self._make_answer(key))

    def add_other(self, session: ConnectionState, request: ControlRequest, begin: Begin) -> None:
        """Add a request whose answer is made elsewhere. `begin` is called after all other work, with the function that
        sends the answer, which must be called in any case. While an answer waits for clients to read others, none is
        begun: so at most one of these answers is in memory besides those in flight.

        Raises: RemoteProtocolError if the connection waits for too many answers
        """
        self._count_request(session, request)
        self._others.append((session, request, begin))
        self._begin_next()

    def _begin_next(self) -> None:
        if self._others and not self._is_other_made and not self._finished:
            self._is_other_made = True
            session, request, begin = self._others.popleft()
            self._sliced_work.add(self._begin(partial(begin, partial(self._end_other, session, request))))

    def _begin(self, begin: Callable[[], object]) -> Steps:
        begin()
        yield

    def _end_other(self, session: ConnectionState, request: ControlRequest, body: bytes) -> None:
        self._is_other_made = False
        self._answer(session, request, body)
        self._begin_next()

    def _count_request(self, session: ConnectionState, request: ControlRequest) -> None:
        """Raises: RemoteProtocolError if the connection waits for too many answers"""
        if self._pending_counts[session] >= PIECES_MAX:
            raise RemoteProtocolError(
                f"{request.verb}: {PIECES_MAX} control requests of this connection have no answer yet, the most "
                "allowed: wait for an answer",
                Code.LIMIT,
            )
        self._pending_counts[session] += 1

    def _make_answer(self, key: _Key) -> Steps:
        requests = self._waiting.pop(key)
        body = yield from self._start(*key)
        for session, request in requests:
            self._answer(session, request, body)
            yield

    def _answer(self, session: ConnectionState, request: ControlRequest, body: bytes) -> None:
        if len(body) > SMALL_ANSWER_BYTES or any(one[0] is session for one in self._finished):
            self._finished.append((session, request, body))
            self._send_large()
        else:
            self._send(session, request, body)

    def _send_large(self) -> None:
        while self._finished:
            session, request, body = self._finished[0]
            if self.in_flight and sum(self.in_flight.values()) + len(body) > ANSWERS_IN_FLIGHT_BYTES_MAX:
                return
            self._finished.popleft()
            self._send(session, request, body)
        self._begin_next()

    def _send(self, session: ConnectionState, request: ControlRequest, body: bytes) -> None:
        self._count_answered(session)
        if self._reply(session, request, body) and len(body) > SMALL_ANSWER_BYTES:
            self.in_flight[session] = self.in_flight.get(session, 0) + len(body)

    def _count_answered(self, session: ConnectionState) -> None:
        self._pending_counts[session] -= 1
        if not self._pending_counts[session]:
            del self._pending_counts[session]

    def on_all_sent(self, session: ConnectionState) -> None:
        """Note that the socket has taken all that was dispatched. If no answer waits in a reply queue of the
        connection, the connection has received its large answers."""
        if session in self.in_flight and not any(
            queue.waiting_count() for queue in session.temporary_queues if queue.is_reply_queue
        ):
            self._received(session)

    def connection_closed(self, session: ConnectionState) -> None:
        """Drop the answers of a closed connection."""
        unsent: tuple[deque[Any], ...] = (self._finished, self._others)
        for waiting in unsent:
            for one in [one for one in waiting if one[0] is session]:
                waiting.remove(one)
                self._count_answered(session)
        self._begin_next()
        self._received(session)

    def _received(self, session: ConnectionState) -> None:
        self._progress.pop(session, None)
        if self.in_flight.pop(session, 0):
            self._send_large()

    def find_blocking(self, now_s: float, bytes_sent: Callable[[ConnectionState], int]) -> ConnectionState | None:
        """Return a connection that delays other answers; None if there is none, or no answer waits. Such a connection
        reads almost nothing of a large answer for ANSWER_STALL_SECONDS, or not all of the answer in ANSWER_SECONDS_MAX.

        Called once a second. `bytes_sent` returns the bytes that the socket of a connection has ever taken.
        """
        if not self._finished:
            self._progress.clear()
            return None
        for session in self.in_flight:
            sent = bytes_sent(session)
            before, since_s, first_s = self._progress.get(session, (-SMALL_ANSWER_BYTES, now_s, now_s))
            if now_s - first_s >= ANSWER_SECONDS_MAX:
                return session
            # Heart-beats alone are no progress.
            if sent - before >= SMALL_ANSWER_BYTES:
                self._progress[session] = (sent, now_s, first_s)
            elif now_s - since_s >= ANSWER_STALL_SECONDS:
                return session
        return None
