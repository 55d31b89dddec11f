"""Grants of the user of a connection, as the broker tells them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from truenext.model.grants import Right, User, parse_pattern

if TYPE_CHECKING:
    from truenext.client.tasks.connection import Connection


class _UserGrants(msgspec.Struct):
    name: str
    send: list[str]
    take: list[str]


class _UserFacts(msgspec.Struct):
    user: _UserGrants | None = None
    """User of the connection; None if the broker has no users."""


async def request_user(connection: Connection) -> User | None:
    """Return the user of a connection with its rights to send and take; None if the broker has no users.

    Raises: TruenextError or TimeoutError if the broker does not answer
    """
    body = await connection.control_request("connection")
    granted = msgspec.json.decode(body, type=_UserFacts).user
    if granted is None:
        return None
    rights = {Right.SEND: granted.send, Right.TAKE: granted.take}
    return User(granted.name, {right: map(parse_pattern, texts) for right, texts in rights.items()})
