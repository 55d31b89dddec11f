"""Grants of the user of a connection, as the broker tells them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from truenext.model.control_answers import ConnectionUser
from truenext.model.grants import Right, User, known_patterns

if TYPE_CHECKING:
    from truenext.client.tasks.connection import Connection


async def request_user(connection: Connection) -> User | None:
    """Return the user of a connection with its rights to send and take; None if the broker has no users.

    Raises: TruenextError or TimeoutError if the broker does not answer
    """
    body = await connection.control_request("connection")
    granted = msgspec.json.decode(body, type=ConnectionUser).user
    if granted is None:
        return None
    rights = {Right.SEND: granted.send, Right.TAKE: granted.take}
    return User(granted.name, {right: known_patterns(texts) for right, texts in rights.items()})
