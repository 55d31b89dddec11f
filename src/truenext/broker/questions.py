"""Which questions wait for answers that take long, and who asked them.

An answer is made in slices, one after the other. All who asked the same before it was begun get the same; who asks
later gets another one: what that client did before may not be in this one any more. What a connection asks of itself is
the same only for that connection.

An answer about many queues has megabytes, and each who gets it has a copy on its way. So of large ones only as many are
handed out at once as fit ANSWERS_OUT_BYTES; the others wait until those are taken. Source:
docs/decisions/0037-asking-a-full-broker.md
"""

from collections import Counter, deque
from collections.abc import Callable, Generator

from truenext.broker.slices import Slices, Steps
from truenext.commands import Control
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import ANSWERS_OUT_BYTES, ANSWERS_OUT_SECONDS, ANSWERS_OUT_SECONDS_MAX, PIECES_MAX

AnswerInTheMaking = Generator[None, None, bytes]
"""What comes out of it is JSON."""

SMALL = 64 * 1024
"""Bytes of an answer up to which nobody waits for it to be taken."""


class Questions:
    def __init__(
        self,
        slices: Slices,
        start: Callable[[str, ConnectionState | None], AnswerInTheMaking],
        reply: Callable[[ConnectionState, Control, bytes], bool],
    ) -> None:
        """`start` starts the answer to a verb, of a connection or of the whole broker (None); `reply` hands one out,
        and says whether whoever asked is still there."""
        self._slices = slices
        self._start = start
        self._reply = reply
        self._waiting: dict[tuple[str, ConnectionState | None], list[tuple[ConnectionState, Control]]] = {}
        """By verb, and by what it is asked of, of answers that are not begun yet."""
        self._owed: Counter[ConnectionState] = Counter()
        self._made: deque[tuple[ConnectionState, Control, bytes]] = deque()
        """Answers that are to be handed out."""
        self.out: dict[ConnectionState, int] = {}
        """Bytes of large answers that were handed out, and are not taken yet."""
        self._seen: dict[ConnectionState, tuple[int, float, float]] = {}
        """What the sockets of these had taken when it had become much more, when that was, and when it was first looked
        at."""

    def owed(self, session: ConnectionState) -> int:
        """How many answers it waits for."""
        return self._owed[session]

    def ask(self, session: ConnectionState, question: Control, *, of: ConnectionState | None = None) -> None:
        """`of` is the connection that is asked about; None is the whole broker.

        Raises: RemoteProtocolError if the connection waits for too many answers
        """
        if self._owed[session] >= PIECES_MAX:
            raise RemoteProtocolError(
                f"{question.verb}: this connection waits for {PIECES_MAX} answers already, the most it may",
                Code.LIMIT,
            )
        self._owed[session] += 1
        key = question.verb, of
        if key in self._waiting:
            self._waiting[key].append((session, question))
        else:
            self._waiting[key] = [(session, question)]
            self._slices.add(self._answer(*key))

    def _answer(self, verb: str, of: ConnectionState | None) -> Steps:
        asked = self._waiting.pop((verb, of))
        body = yield from self._start(verb, of)
        for session, question in asked:
            if len(body) > SMALL or any(one[0] is session for one in self._made):
                self._made.append((session, question, body))
                self._hand_out()
            else:
                self._give(session, question, body)
            yield

    def _hand_out(self) -> None:
        while self._made:
            session, question, body = self._made[0]
            if self.out and sum(self.out.values()) + len(body) > ANSWERS_OUT_BYTES:
                return
            self._made.popleft()
            self._give(session, question, body)

    def _give(self, session: ConnectionState, question: Control, body: bytes) -> None:
        self._is_answered(session)
        if self._reply(session, question, body) and len(body) > SMALL:
            self.out[session] = self.out.get(session, 0) + len(body)

    def _is_answered(self, session: ConnectionState) -> None:
        self._owed[session] -= 1
        if not self._owed[session]:
            del self._owed[session]

    def taken(self, session: ConnectionState) -> None:
        """Its socket has taken everything; there may be more for it, for which it has no credit."""
        if session in self.out and not any(
            queue.waiting() for queue in session.temporary_queues if queue.is_reply_queue
        ):
            self._has_come(session)

    def ended(self, session: ConnectionState) -> None:
        """The connection is no more."""
        for one in [one for one in self._made if one[0] is session]:
            self._made.remove(one)
            self._is_answered(session)
        self._has_come(session)

    def _has_come(self, session: ConnectionState) -> None:
        self._seen.pop(session, None)
        if self.out.pop(session, 0):
            self._hand_out()

    def hindering(self, now_s: float, bytes_taken: Callable[[ConnectionState], int]) -> ConnectionState | None:
        """To be called once a second or so: who takes next to nothing of a large answer, or has it for a minute, while
        others wait for theirs. `bytes_taken` says how much its socket has ever taken."""
        if not self._made:
            self._seen.clear()
            return None
        for session in self.out:
            taken = bytes_taken(session)
            before, since_s, first_s = self._seen.get(session, (-SMALL, now_s, now_s))
            if now_s - first_s >= ANSWERS_OUT_SECONDS_MAX:
                return session
            # Heart-beats alone are no progress.
            if taken - before >= SMALL:
                self._seen[session] = (taken, now_s, first_s)
            elif now_s - since_s >= ANSWERS_OUT_SECONDS:
                return session
        return None
