"""Control-only connections: connections that may only send control requests, because they are beyond the listener's
limit, or began during a drain.

An idle one is closed, so that another client can connect. Source: docs/decisions/0037-asking-a-full-broker.md
"""

from collections.abc import Callable, Iterable, Iterator

from truenext.engine.state.consumer import ConnectionState
from truenext.errors import RemoteProtocolError
from truenext.model.commands import (
    Ack,
    AckRun,
    Command,
    ControlRequest,
    Disconnect,
    InvalidFrame,
    Login,
    Nack,
    ReceiptRequest,
    Subscribe,
    Unsubscribe,
)
from truenext.model.destination import DestinationKind
from truenext.model.limits import CONTROL_ONLY_IDLE_S
from truenext.model.restriction import Restriction


class ControlOnlyConnections:
    def __init__(self, time: Callable[[], float]) -> None:
        """`time` returns seconds of a clock that does not jump."""
        self._time = time
        self.idle_since: dict[ConnectionState, float] = {}
        """Time of the last request or answer of each control-only connection."""
        self._restrictions: dict[ConnectionState, Restriction] = {}

    def add(self, session: ConnectionState, restriction: Restriction) -> None:
        """Add a connection; `restriction` says why it may send nothing else."""
        self.idle_since[session] = self._time()
        self._restrictions[session] = restriction

    def remove(self, session: ConnectionState) -> None:
        self.idle_since.pop(session, None)
        self._restrictions.pop(session, None)

    def note_activity(self, session: ConnectionState) -> None:
        """Note that the connection has sent a request or was sent an answer, if it is control-only."""
        if session in self.idle_since:
            self.idle_since[session] = self._time()

    def seconds_left(self, session: ConnectionState) -> float:
        """Return the seconds for which the connection may still be idle; 0 or less if it must end."""
        return self.idle_since[session] + CONTROL_ONLY_IDLE_S - self._time()

    def check_commands(self, session: ConnectionState, commands: Iterable[Command]) -> Iterator[Command]:
        """Yield the commands of a connection, and check each. The connection may become control-only at its login,
        which is one of these commands.

        Raises: RemoteProtocolError at the first command that a control-only connection may not send
        """
        for command in commands:
            if session in self.idle_since and not _is_allowed(session, command):
                reason, code = self._restrictions[session]
                raise RemoteProtocolError(
                    f"{reason}: this connection may only send control requests (SEND to /control/) "
                    "and subscribe to its own /temp-queue/ for the answers",
                    code,
                )
            yield command


def _is_allowed(session: ConnectionState, command: Command) -> bool:
    match command:
        case Login() | InvalidFrame() | ControlRequest() | Ack() | AckRun() | Nack() | ReceiptRequest() | Disconnect():
            return True
        case Subscribe():
            destination = command.destination
            return (
                destination.kind is DestinationKind.TEMPORARY
                and destination.session == session.id
                and not command.durable_key
            )
        case Unsubscribe():
            return not command.durable_key
        case _:
            return False
