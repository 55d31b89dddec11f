"""Who was let in beyond the limit of connections, and may only ask the broker (control.py) and take the answers.

Whoever asks nothing for a while has to make place. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from collections.abc import Callable, Iterable, Iterator

from truenext.commands import (
    Ack,
    Command,
    Confirm,
    Control,
    Disconnect,
    InvalidFrame,
    Login,
    Nack,
    Subscribe,
    Unsubscribe,
)
from truenext.destination import DestinationKind
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import ASKING_SECONDS_MAX


class Asking:
    def __init__(self, time: Callable[[], float]) -> None:
        """`time` gives seconds of a clock that does not jump."""
        self._time = time
        self.since: dict[ConnectionState, float] = {}
        """All of them, and since when each has asked nothing, and been answered nothing."""
        self._reasons: dict[ConnectionState, str] = {}

    def add(self, session: ConnectionState, reason: str) -> None:
        """`reason` says which limit it is beyond."""
        self.since[session] = self._time()
        self._reasons[session] = reason

    def remove(self, session: ConnectionState) -> None:
        self.since.pop(session, None)
        self._reasons.pop(session, None)

    def goes_on(self, session: ConnectionState) -> None:
        """It has asked, or was answered."""
        if session in self.since:
            self.since[session] = self._time()

    def seconds_left(self, session: ConnectionState) -> float:
        """For how long it still need not ask; not positive if it has to go."""
        return self.since[session] + ASKING_SECONDS_MAX - self._time()

    def checked(self, session: ConnectionState, commands: Iterable[Command]) -> Iterator[Command]:
        """Raises: RemoteProtocolError at the first that is not part of asking."""
        for command in commands:
            if not _is_part_of_asking(session, command):
                raise RemoteProtocolError(
                    f"{self._reasons[session]}: this one may only ask, by SEND to /control/, and subscribe to its own "
                    "/temp-queue/ for the answers",
                    Code.LIMIT,
                )
            yield command


def _is_part_of_asking(session: ConnectionState, command: Command) -> bool:
    match command:
        case Login() | InvalidFrame() | Control() | Ack() | Nack() | Confirm() | Disconnect():
            return True
        case Subscribe():
            destination = command.destination
            return (
                destination.kind is DestinationKind.TEMPORARY
                and destination.session == session.id
                and not command.durable
            )
        case Unsubscribe():
            return not command.durable
        case _:
            return False
