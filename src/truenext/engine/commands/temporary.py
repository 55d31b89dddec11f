"""Commands CreateTemporary and RemoveTemporary: temporary queues and topics of JMS clients.

A JMS client creates its temporary queues by a command, other clients by the first use. Source: docs/contract.md, C26.13
"""

from __future__ import annotations

from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.writing.engine_state import EngineState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import CreateTemporary, RemoveTemporary
from truenext.model.destination import Destination, DestinationKind


class TemporaryDestinations:
    def __init__(self, state: EngineState, queues: Queues) -> None:
        self._clients = state.clients
        self._queues = queues

    def create(self, session: ConnectionState, command: CreateTemporary) -> None:
        """Create a temporary queue or topic. Does nothing if there is one.

        Raises: RemoteProtocolError if it is no temporary destination of this connection, or a limit or the memory for
            queues does not allow it.
        """
        destination = command.destination
        _check_owner(session, destination)
        self._queues.create_temporary(destination, session)

    def remove(self, session: ConnectionState, command: RemoveTemporary) -> None:
        """Remove a temporary queue with all its messages, or a temporary topic. Does nothing if there is none.

        Raises: RemoteProtocolError if it is no temporary destination of this connection, or has a consumer or browser.
        """
        destination = command.destination
        _check_owner(session, destination)
        if destination.kind is DestinationKind.TOPIC:
            if self._queues.topics.has_subscription(destination.name):
                raise _in_use_error(destination)
            self._queues.remove_temporary_topic(destination, session)
            return
        queue = self._queues.by_name.get(destination.name)
        if queue is None:
            return
        if self._clients.receivers_of(queue).consumers or any(
            browser.queue is queue for browser in session.browsers.values()
        ):
            raise _in_use_error(destination)
        session.temporary_queues.remove(queue)
        self._queues.drop_temporary(queue, session)


def _check_owner(session: ConnectionState, destination: Destination) -> None:
    """Raise RemoteProtocolError if this is no temporary queue or topic of this connection."""
    if destination.kind not in (DestinationKind.TEMPORARY, DestinationKind.TOPIC) or destination.session != session.id:
        raise RemoteProtocolError(
            f"{destination.address} is no temporary queue or topic of this connection", Code.DESTINATION
        )


def _in_use_error(destination: Destination) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{destination.address} has a consumer or browser: close it before you remove the destination", Code.IN_USE
    )
