"""Which questions about the whole broker wait for their answers, and who asked them.

An answer is made in slices, one after the other. All who asked the same before it was begun get the same; who asks
later gets another one, as what he did before may not be in this one any more.
"""

from collections import Counter
from collections.abc import Callable, Generator

from truenext.broker.slices import Slices, Steps
from truenext.commands import Control
from truenext.engine.session import Session
from truenext.errors import RemoteProtocolError
from truenext.limits import PIECES_MAX

AnswerInTheMaking = Generator[None, None, bytes]
"""What comes out of it is JSON."""


class Questions:
    def __init__(
        self,
        slices: Slices,
        begin: Callable[[str], AnswerInTheMaking],
        reply: Callable[[Session, Control, bytes], None],
    ) -> None:
        self._slices = slices
        self._begin = begin
        self._reply = reply
        self._waiting: dict[str, list[tuple[Session, Control]]] = {}
        """By verb, of answers that are not begun yet."""
        self._owed: Counter[Session] = Counter()

    def owed(self, session: Session) -> int:
        """How many answers it waits for."""
        return self._owed[session]

    def ask(self, session: Session, question: Control) -> None:
        """Raises: RemoteProtocolError if the connection waits for too many answers"""
        if self._owed[session] >= PIECES_MAX:
            raise RemoteProtocolError(
                f"{question.verb}: this connection waits for {PIECES_MAX} answers already, the most it may"
            )
        self._owed[session] += 1
        if question.verb in self._waiting:
            self._waiting[question.verb].append((session, question))
        else:
            self._waiting[question.verb] = [(session, question)]
            self._slices.begin(self._answer(question.verb))

    def _answer(self, verb: str) -> Steps:
        asked = self._waiting.pop(verb)
        body = yield from self._begin(verb)
        for session, question in asked:
            self._owed[session] -= 1
            if not self._owed[session]:
                del self._owed[session]
            self._reply(session, question, body)
            yield
