"""Takeover secrets: each proves that a login may take over a connection. Source: docs/contract.md, "Taking over" """

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
        self._by_secret: dict[str, _Registration] = {}
        """Current connections by secret, parked ones included."""
        self._secrets: dict[ConnectionState, str] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Numbers of the connections that ended last, by secret, so that a late login is recognized."""

    def take_over(self, session: ConnectionState, login: Login) -> tuple[str, ConnectionState | None]:
        """Register a numbered login. Returns the secret of `session`, and the connection taken over, which must end
        now.

        Raises: RemoteProtocolError if the login is late: then nothing was changed
        """
        secret = login.secret or secrets.token_hex(_SECRET_BYTES)
        registration = self._by_secret.get(secret)
        latest = self._ended.get(secret, 0) if registration is None else registration.number
        if login.number <= latest:
            raise RemoteProtocolError(
                f"truenext-client {login.number} is too old: this client has used number {latest}", Code.STALE
            )
        if registration is not None:
            del self._secrets[registration.session]
        self._ended.pop(secret, None)
        self._by_secret[secret] = _Registration(session, login.number)
        self._secrets[session] = secret
        return secret, None if registration is None else registration.session

    def has_secret(self, session: ConnectionState) -> bool:
        """Return whether the client knows a secret with which it can take the connection over."""
        return session in self._secrets

    def remove(self, session: ConnectionState) -> None:
        """Remove an ended connection; may be called more than once."""
        secret = self._secrets.pop(session, None)
        if secret is not None:
            self._ended[secret] = self._by_secret.pop(secret).number
            if len(self._ended) > SECRETS_MAX:
                self._ended.popitem(last=False)
