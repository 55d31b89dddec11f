"""What the client says in the log of its program, as `truenext.client`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from truenext.errors import TruenextError

if TYPE_CHECKING:
    from truenext.client.core.message import Content

_logger = logging.getLogger("truenext.client")


def report(what: str, facts: dict[str, object]) -> None:
    """What happened to the connection."""
    level = logging.INFO if what == "connected" else logging.WARNING
    # Where nobody has set up a log, only the text of a warning is seen.
    told = facts.get("error") or facts.get("count") or facts.get("seconds")
    _logger.log(level, "%s: %s" if told else "%s", what, *([told] if told else []), extra=facts)


def handler_failed(message: Content, error: BaseException) -> None:
    _logger.warning(
        "a handler has failed",
        exc_info=error,
        extra={"message_id": message.key, "destination": message.destination},
    )


def internal_error(error: Exception) -> TruenextError:
    """What whoever waits gets."""
    _logger.critical("internal error of the client", exc_info=error)
    ours = TruenextError(f"internal error of the client: {error!r}")
    ours.__cause__ = error
    return ours
