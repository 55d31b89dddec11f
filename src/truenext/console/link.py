"""Link: connection of a login to the broker, and typed answers to control requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from truenext.client.core.credentials import Credentials
from truenext.client.core.message import Content
from truenext.client.tasks.connection import Connection, connect
from truenext.console.rights import Rights
from truenext.errors import ClosedError, Code, ConnectionLost, Refused, TruenextError
from truenext.model.control_answers import ConnectionUser

T = TypeVar("T")

CONNECT_S = 5.0
"""Seconds within which the broker must accept a login."""
CLOSE_S = 3.0
"""Seconds in which the broker must confirm the end of a connection."""
ANSWER_S = 10.0
"""Seconds within which the broker must answer a control request."""
BROWSES_MAX = 2
"""Largest number of pages of messages that all logins read at once."""
BROWSE_WAIT_S = 5.0
"""Seconds that a page waits for others that read messages."""
REQUESTS_MAX = 16
"""Largest number of requests of one link that have no answer yet; the broker allows 100."""
_RESTRICTED = (
    "the broker is being drained, or has no place for more connections: messages and processes of stages are not shown"
)
LOG_IN_AGAIN = "; log in again once the drain has ended"
_TEXTS_OF_OLDER_BROKERS = ("no control verb", "queues: Invalid enum value")
RIGHTS_S = 5.0
"""Seconds for which the rights of the user are remembered. A reload may change them."""


class LoggedOut(TruenextError):
    """The connection of a login has ended; the user has to log in again."""


class OlderBroker(TruenextError):
    """The broker does not know a control request of the console."""


class Restricted(TruenextError):
    """The connection of a login may only send control requests."""


class Broker:
    """Broker that the console shows: addresses, and files for TLS."""

    def __init__(self, urls: tuple[str, ...], credentials: Credentials) -> None:
        """`credentials` has files for TLS, and no login."""
        self.urls = urls
        self._credentials = credentials
        self.browses = asyncio.Semaphore(BROWSES_MAX)
        """Semaphore of all that read messages at the moment."""

    @property
    def name(self) -> str:
        return " or ".join(self.urls)

    async def connect(self, user: str | None, password: str | None) -> Connection:
        """Open a connection that is not opened again once it is lost.

        Raises: the errors of `truenext.connect`
        """
        files = {name: value for name, value in self._credentials.arguments().items() if name in ("ca",)}
        connection = await connect(
            *self.urls, user=user, password=password, reconnect=False, timeout=CONNECT_S, **files
        )
        # The password is not kept: the login ends with this connection.
        connection.forget_login()
        return connection


class Link:
    """Connection of one login. Without users a lost connection is opened again by the next request."""

    def __init__(self, broker: Broker, connection: Connection | None, user: str | None) -> None:
        self.broker = broker
        self.user = user
        self._connection = connection
        self._opening = asyncio.Lock()
        self._requests = asyncio.Semaphore(REQUESTS_MAX)
        self._rights: tuple[float, Rights] | None = None

    async def ask(self, verb: str, body: object, type: Callable[..., T]) -> T:
        """Send a control request, and return the decoded answer.

        Raises: LoggedOut if the connection of a user has ended; Refused if the broker refuses the request; OlderBroker
        if it does not know it, or the order of queues in it; ConnectionLost, TimeoutError without an answer
        """
        async with self._requests:
            connection = await self.connection()
            try:
                answer = await connection.control_request(verb, body, timeout=ANSWER_S)
            except (ClosedError, ConnectionLost) as error:
                raise self._ended(error) from error
            except Refused as error:
                raise _meaning(verb, error) from error
        try:
            return msgspec.json.decode(answer, type=type)  # type: ignore[no-any-return]
        except msgspec.MsgspecError as error:
            raise OlderBroker(older_text(verb)) from error

    async def browse(
        self,
        destination: str,
        *,
        count: int,
        after: tuple[int, int] | None,
        selector: str | None,
        bytes_max: int,
        body_max: int | None,
    ) -> tuple[list[Content], bool]:
        """Return some messages of a queue, as `Connection.browse_page` does.

        Raises: the errors of `ask`; Restricted if the connection may only send control requests
        """
        # A large message takes memory until it is cut or shown.
        async with asyncio.timeout(BROWSE_WAIT_S):
            await self.broker.browses.acquire()
        try:
            connection = await self.whole_connection()
            try:
                return await connection.browse_page(
                    destination,
                    count=count,
                    after=after,
                    selector=selector,
                    bytes_max=bytes_max,
                    body_max=body_max,
                    timeout=ANSWER_S,
                )
            except (ClosedError, ConnectionLost) as error:
                raise self._ended(error) from error
        finally:
            self.broker.browses.release()

    async def rights(self) -> Rights:
        """Return the rights of the user, which may be RIGHTS_S old.

        Raises: the errors of `ask`
        """
        now = asyncio.get_running_loop().time()
        if self._rights is None or now - self._rights[0] > RIGHTS_S:
            report = await self.ask("connection", None, ConnectionUser)
            self._rights = now, Rights(report.user)
        return self._rights[1]

    async def connection(self) -> Connection:
        """Return the open connection.

        Raises: LoggedOut if the connection of a user has ended; without users ConnectionLost if none can be opened
        """
        async with self._opening:
            connection = self._connection
            if connection is not None and connection.health().state != "closed":
                return connection
            if self.user is not None:
                raise LoggedOut("the broker has ended this login: log in again")
            self._rights = None
            try:
                self._connection = await self.broker.connect(None, None)
            except Refused as error:
                if error.code == Code.LOGIN:
                    raise LoggedOut("the broker has users now: log in as one of them") from error
                raise
            return self._connection

    async def whole_connection(self) -> Connection:
        """Return the open connection, which may browse and send messages.

        Raises: Restricted if it may only send control requests; the errors of `connection`
        """
        connection = await self.connection()
        if connection.health().control_only:
            # It stays so after the drain. What is refused there ends it.
            if self.user is not None:
                raise Restricted(f"{_RESTRICTED}{LOG_IN_AGAIN}")
            async with self._opening:
                connection = await self._open_whole(connection)
        return connection

    async def _open_whole(self, former: Connection) -> Connection:
        if self._connection is not None and self._connection is not former:
            return self._connection
        connection = await self.broker.connect(None, None)
        if connection.health().control_only:
            await connection.close()
            raise Restricted(_RESTRICTED)
        self._connection = connection
        await former.close()
        return connection

    def _ended(self, error: TruenextError) -> TruenextError:
        if self.user is None:
            return error
        return LoggedOut(f"the connection of this login has ended: log in again ({error})")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(timeout=CLOSE_S)


def _meaning(verb: str, error: Refused) -> TruenextError:
    # The texts of a broker that lacks the verb, or an order of `queues`, have not changed since there are such.
    if error.code == Code.CONTROL_REQUEST and any(text in str(error) for text in _TEXTS_OF_OLDER_BROKERS):
        return OlderBroker(older_text(verb))
    return error


def older_text(verb: str) -> str:
    return f"the broker is older than this console, and does not answer {verb!r} as the console needs: upgrade it"
