"""Takeover secrets: a login that names the secret of a connection may take it over. Source: docs/contract.md,
"Takeover" """

import secrets
from collections import OrderedDict
from typing import NamedTuple

from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Login
from truenext.model.limits import SECRETS_MAX

_SECRET_BYTES = 16


class _Registration(NamedTuple):
    session: ConnectionState
    number: int


class TakeoverSecrets:
    def __init__(self) -> None:
        self._by_secret: dict[tuple[str, str], _Registration] = {}
        """Connections by user and secret, open and parked ones."""
        self._keys: dict[ConnectionState, tuple[str, str]] = {}
        """User and secret of each connection in `_by_secret`."""
        self._ended: OrderedDict[tuple[str, str], int] = OrderedDict()
        """Numbers of the connections that ended last, by user and secret. A login with the same number or a lower one
        has come late, and is refused."""

    def take_over(self, session: ConnectionState, login: Login, user: str) -> tuple[str, ConnectionState | None]:
        """Register the login of a truenext client. `user` is "" in a broker without users.

        Returns the secret of the new connection `session`, and the connection that it takes over, which the caller must
        end; None if there is none with this user and secret.

        Raises: RemoteProtocolError if the login came late; then nothing was changed
        """
        secret = login.secret or secrets.token_hex(_SECRET_BYTES)
        key = user, secret
        registration = self._by_secret.get(key)
        latest = self._ended.get(key, 0) if registration is None else registration.number
        if login.number <= latest:
            raise RemoteProtocolError(
                f"truenext-client {login.number} is too low: this client has already used number {latest}", Code.STALE
            )
        if registration is not None:
            del self._keys[registration.session]
        self._ended.pop(key, None)
        self._by_secret[key] = _Registration(session, login.number)
        self._keys[session] = key
        return secret, None if registration is None else registration.session

    def has_secret(self, session: ConnectionState) -> bool:
        """Return whether the client of this connection has a secret, so that it can take the connection over."""
        return session in self._keys

    def remove(self, session: ConnectionState) -> None:
        """Note that a connection has ended. Does nothing if the end was noted before."""
        key = self._keys.pop(session, None)
        if key is not None:
            self._ended[key] = self._by_secret.pop(key).number
            if len(self._ended) > SECRETS_MAX:
                self._ended.popitem(last=False)
