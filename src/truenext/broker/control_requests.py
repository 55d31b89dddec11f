"""Which questions wait for answers that take long, and who asked them.

An answer is made in slices, one after the other. All who asked the same before it was begun get the same; who asks
later gets another one: what that client did before may not be in this one any more. What a connection asks of itself is
the same only for that connection.

An answer about many queues has megabytes, and each who gets it has a copy on its way. So of large ones only as many are
handed out at once as fit ANSWERS_IN_FLIGHT_BYTES_MAX; the others wait until those are taken. Source:
docs/decisions/0037-asking-a-full-broker.md
"""

from collections import Counter, deque
from collections.abc import Callable, Generator

from truenext.broker.event_loop import SlicedWork, Steps
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import ControlRequest
from truenext.model.limits import ANSWER_SECONDS_MAX, ANSWER_STALL_SECONDS, ANSWERS_IN_FLIGHT_BYTES_MAX, PIECES_MAX

AnswerGenerator = Generator[None, None, bytes]
"""What comes out of it is JSON."""

SMALL_ANSWER_BYTES = 64 * 1024
"""Bytes of an answer up to which nobody waits for it to be taken."""


class ControlRequests:
    def __init__(
        self,
        sliced_work: SlicedWork,
        start: Callable[[str, ConnectionState | None], AnswerGenerator],
        reply: Callable[[ConnectionState, ControlRequest, bytes], bool],
    ) -> None:
        """`start` starts the answer to a verb, of a connection or of the whole broker (None); `reply` hands one out,
        and says whether whoever asked is still there."""
        self._sliced_work = sliced_work
        self._start = start
        self._reply = reply
        self._waiting: dict[tuple[str, ConnectionState | None], list[tuple[ConnectionState, ControlRequest]]] = {}
        """By verb, and by what it is asked of, of answers that are not begun yet."""
        self._pending_counts: Counter[ConnectionState] = Counter()
        self._finished: deque[tuple[ConnectionState, ControlRequest, bytes]] = deque()
        """Answers that are to be handed out."""
        self.in_flight: dict[ConnectionState, int] = {}
        """Bytes of large answers that were handed out, and are not taken yet."""
        self._progress: dict[ConnectionState, tuple[int, float, float]] = {}
        """What the sockets of these had taken when it had become much more, when that was, and when it was first looked
        at."""

    def pending_count(self, session: ConnectionState) -> int:
        """How many answers it waits for."""
        return self._pending_counts[session]

    def add(self, session: ConnectionState, request: ControlRequest, *, about: ConnectionState | None = None) -> None:
        """`about` is the connection that is asked about; None is the whole broker.

        Raises: RemoteProtocolError if the connection waits for too many answers
        """
        if self._pending_counts[session] >= PIECES_MAX:
            raise RemoteProtocolError(
                f"{request.verb}: this connection waits for {PIECES_MAX} answers already, the most it may",
                Code.LIMIT,
            )
        self._pending_counts[session] += 1
        key = request.verb, about
        if key in self._waiting:
            self._waiting[key].append((session, request))
        else:
            self._waiting[key] = [(session, request)]
            self._sliced_work.add(self._make_answer(*key))

    def _make_answer(self, verb: str, about: ConnectionState | None) -> Steps:
        requests = self._waiting.pop((verb, about))
        body = yield from self._start(verb, about)
        for session, request in requests:
            if len(body) > SMALL_ANSWER_BYTES or any(one[0] is session for one in self._finished):
                self._finished.append((session, request, body))
                self._send_large()
            else:
                self._send(session, request, body)
            yield

    def _send_large(self) -> None:
        while self._finished:
            session, request, body = self._finished[0]
            if self.in_flight and sum(self.in_flight.values()) + len(body) > ANSWERS_IN_FLIGHT_BYTES_MAX:
                return
            self._finished.popleft()
            self._send(session, request, body)

    def _send(self, session: ConnectionState, request: ControlRequest, body: bytes) -> None:
        self._count_answered(session)
        if self._reply(session, request, body) and len(body) > SMALL_ANSWER_BYTES:
            self.in_flight[session] = self.in_flight.get(session, 0) + len(body)

    def _count_answered(self, session: ConnectionState) -> None:
        self._pending_counts[session] -= 1
        if not self._pending_counts[session]:
            del self._pending_counts[session]

    def on_all_sent(self, session: ConnectionState) -> None:
        """Its socket has taken everything; there may be more for it, for which it has no credit."""
        if session in self.in_flight and not any(
            queue.waiting_count() for queue in session.temporary_queues if queue.is_reply_queue
        ):
            self._received(session)

    def connection_closed(self, session: ConnectionState) -> None:
        """The connection is no more."""
        for one in [one for one in self._finished if one[0] is session]:
            self._finished.remove(one)
            self._count_answered(session)
        self._received(session)

    def _received(self, session: ConnectionState) -> None:
        self._progress.pop(session, None)
        if self.in_flight.pop(session, 0):
            self._send_large()

    def find_blocking(self, now_s: float, bytes_sent: Callable[[ConnectionState], int]) -> ConnectionState | None:
        """To be called once a second or so: who takes next to nothing of a large answer, or has it for a minute, while
        others wait for theirs. `bytes_sent` says how much its socket has ever taken."""
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
