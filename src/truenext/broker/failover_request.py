"""Control request `failover`: the broker stops cleanly, and another one takes over."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from truenext.errors import Code, ConfigurationError, RemoteProtocolError
from truenext.model.commands import decode_client_json

VERB = "failover"


class FailoverRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request, in JSON. An empty body stands for one without fields."""

    to: str | None = None
    """Member name of the broker that takes over; by default the one that is least behind."""


class FailoverReport(msgspec.Struct):
    """Answer to `failover`. The broker stops directly after it."""

    member: str
    """Member name of the broker that takes over."""


def begin_failover(hand_over: Callable[[str | None], str], body: bytes) -> bytes:
    """Stop the broker, so that another one takes over.

    `hand_over` begins the stop, and returns the name of the other broker.

    Raises: RemoteProtocolError if the body is invalid, or no broker can take over
    """
    request = decode_client_json(VERB, body, FailoverRequest) if body else FailoverRequest()
    try:
        return msgspec.json.encode(FailoverReport(hand_over(request.to)))
    except ConfigurationError as error:
        raise RemoteProtocolError(str(error), Code.CONTROL_REQUEST) from error
