"""Connection list: connections that have logged in; and the control requests `connections` and `close`.

An answer never has the id of a connection (`ConnectionState.id`) or its secret (C22.1): with the id other clients could
send to the connection's temporary queues. It has a number instead, which is no secret.
"""

import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from truenext.broker.control_requests import AnswerGenerator, ListAnswer
from truenext.broker.peer import Peer
from truenext.broker.queue_details import ClientIdentity
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import decode_client_json
from truenext.model.control_answers import OpenConnection

LIST_VERB, CLOSE_VERB = "connections", "close"
CONNECTIONS_PER_STEP = 20


class ConnectionsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a control request `connections`, in JSON. An empty body stands for one without fields."""

    limit: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of connections; None is no limit."""
    after: str = ""
    """Connection after which the answer begins: the last one of the answer before. "" begins with the first."""


class CloseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a control request `close`, in JSON."""

    connection: str
    """Connection to close, as `connections` names it."""


class CloseReport(msgspec.Struct):
    """Answer to `close`."""

    connection: str
    """Connection that ends."""
    address: str
    """Address and port from which its client connects."""
    user: str
    """User of the connection; "" if the broker has no users."""
    client_id: str
    """Name that its client gave itself; "" if none."""


class _LoggedIn(NamedTuple):
    session: ConnectionState
    since_ms: int


class ConnectionList:
    """List of the connections that have logged in, in the order of logins."""

    def __init__(
        self,
        peers: Mapping[ConnectionState, Peer],
        *,
        user_name_of: Callable[[ConnectionState], str],
        is_open: Callable[[ConnectionState], bool],
    ) -> None:
        """`user_name_of` returns the name of a connection's user; "" if the broker has no users. `is_open` returns
        False for a connection that is about to end, or is parked."""
        self._peers = peers
        self._user_name_of = user_name_of
        self._is_open = is_open
        self._prefix = f"{secrets.token_hex(3)}-"
        """Beginning of the names of all connections of this run, so that no later run has the same names."""
        self._last_number = 0
        self._numbers: dict[ConnectionState, int] = {}
        self._logged_in: dict[int, _LoggedIn] = {}

    def add(self, session: ConnectionState, now_ms: int) -> None:
        """Add a connection that has just logged in."""
        self._last_number += 1
        self._numbers[session] = self._last_number
        self._logged_in[self._last_number] = _LoggedIn(session, now_ms)

    def remove(self, session: ConnectionState) -> None:
        """Forget a closed connection."""
        number = self._numbers.pop(session, None)
        if number is not None:
            del self._logged_in[number]

    def name_of(self, session: ConnectionState) -> str:
        """Return the name of a connection for answers; "" if it has ended."""
        number = self._numbers.get(session)
        return "" if number is None else f"{self._prefix}{number}"

    def find(self, name: str) -> ConnectionState:
        """Return the connection with this name.

        Raises: RemoteProtocolError if there is none
        """
        found = self._logged_in.get(self._number_of(name))
        if found is None or not self._is_open(found.session):
            raise RemoteProtocolError(
                f"there is no connection {name[:100]!r}: it has ended, or the broker was started again; "
                "`truenext connections` lists all",
                Code.NOT_FOUND,
            )
        return found.session

    def _number_of(self, name: str) -> int:
        """Return the number in a connection's name; 0 if it is no name of this run."""
        digits = name.removeprefix(self._prefix)
        return int(digits) if digits != name and digits.isascii() and digits.isdigit() and len(digits) < 20 else 0

    def identify(self, session: ConnectionState, client: ConnectionState, *, sees_all: bool) -> ClientIdentity:
        """Return what `client` may know of a connection: if it `sees_all` everything, else everything of connections of
        its own user, and only the name of others."""
        user = self._user_name_of(session)
        if not sees_all and user != self._user_name_of(client):
            return ClientIdentity(self.name_of(session), None, None, None)
        info = self._peers[session].client_info
        return ClientIdentity(self.name_of(session), info.address, user, info.client_id)

    def report(self, request: ConnectionsRequest) -> AnswerGenerator:
        """Report the connections that have logged in.

        Makes a list of OpenConnection as JSON, in steps.
        """
        numbers = list(self._logged_in)
        rows, count = ListAnswer(), 0
        for number in numbers[bisect_right(numbers, self._number_of(request.after)) :]:
            if count == request.limit:
                break
            found = self._logged_in.get(number)
            if found is not None and self._is_open(found.session):
                rows.add(self._report_connection(*found))
                count += 1
                if count % CONNECTIONS_PER_STEP == 0 or len(found.session.consumers) > CONNECTIONS_PER_STEP:
                    yield
        yield
        return rows.finish()

    def _report_connection(self, session: ConnectionState, since_ms: int) -> OpenConnection:
        info = self._peers[session].client_info
        held = sum(len(consumer.held) for consumer in session.consumers.values())
        return OpenConnection(
            connection=self.name_of(session),
            address=info.address,
            user=self._user_name_of(session),
            tls=info.tls,
            client_id=info.client_id,
            since=since_ms,
            protocol=info.protocol,
            consumers=len(session.consumers),
            held=held + sum(len(each.held) for each in session.transactions.settling_transactions),
        )

    def close(self, client: ConnectionState, body: bytes, end: Callable[[ConnectionState, str], None]) -> bytes:
        """Close another client's connection. Its client gets an ERROR with the code `closed`, and may connect again.

        Returns a CloseReport as JSON. `end` ends a connection for a reason. `client` is the connection that sends the
        request.

        Raises: RemoteProtocolError if there is no such connection, or it is that of the client itself
        """
        session = self.find(decode_client_json(CLOSE_VERB, body, CloseRequest).connection)
        if session is client:
            raise RemoteProtocolError(
                f"{CLOSE_VERB}: this is the connection of the request itself: disconnect instead", Code.CONTROL_REQUEST
            )
        info = self._peers[session].client_info
        report = CloseReport(self.name_of(session), info.address, self._user_name_of(session), info.client_id)
        end(session, "an operator has closed this connection")
        return msgspec.json.encode(report)


def parse_connections_request(body: bytes) -> ConnectionsRequest:
    """Decode the body of a request `connections`.

    Raises: RemoteProtocolError if the body is invalid
    """
    return decode_client_json(LIST_VERB, body, ConnectionsRequest) if body else ConnectionsRequest()
