"""Which connection has which secret, and which may be taken over by whom? Source: docs/contract.md, "Taking over" """

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
        """Those of connections that are there."""
        self._secrets: dict[ConnectionState, str] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Of those that ended last the numbers, so that one that came late is known as such."""

    def take_over(self, session: ConnectionState, login: Login) -> tuple[str, ConnectionState | None]:
        """The secret of a new connection that has named a number, and whose place it takes: that connection is to be
        ended now.

        Raises: RemoteProtocolError if it comes late: then nothing was done
        """
        secret = login.secret or secrets.token_hex(_SECRET_BYTES)
        registration = self._by_secret.get(secret)
        latest = self._ended.get(secret, 0) if registration is None else registration.number
        if login.number <= latest:
            raise RemoteProtocolError(
                f"truenext-connection {login.number} comes late: this client had number {latest} since", Code.STALE
            )
        if registration is not None:
            del self._secrets[registration.session]
        self._ended.pop(secret, None)
        self._by_secret[secret] = _Registration(session, login.number)
        self._secrets[session] = secret
        return secret, None if registration is None else registration.session

    def has_secret(self, session: ConnectionState) -> bool:
        """Its client knows a secret, with which it can take it over."""
        return session in self._secrets

    def remove(self, session: ConnectionState) -> None:
        """It takes part in nothing any more; may be said more than once."""
        secret = self._secrets.pop(session, None)
        if secret is not None:
            self._ended[secret] = self._by_secret.pop(secret).number
            if len(self._ended) > SECRETS_MAX:
                self._ended.popitem(last=False)
