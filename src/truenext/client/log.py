"""Log of the client: records of the logger `truenext.client`."""

from __future__ import annotations

import logging
import warnings

from truenext.client.core.buffer import ReceivedMessage
from truenext.client.core.client import Client
from truenext.client.core.context import CONNECTED_TEXT, NOT_CONFIRMED_TEXT
from truenext.errors import TruenextError

_logger = logging.getLogger("truenext.client")


def report(text: str, values: dict[str, object]) -> None:
    """Log an event of the connection. Values that the text contains are not logged as extra fields, because some logs
    would show them twice."""
    level = logging.INFO if text == CONNECTED_TEXT else logging.WARNING
    fields = {name: fact for name, fact in values.items() if f"%({name})s" not in text}
    _logger.log(level, text, values, extra=fields)


def warn_unconfirmed(client: Client) -> None:
    """Log, and warn as Python does for unclosed resources, that sends may be lost: the program or its event loop has
    ended without closing the connection."""
    values = {"count": client.unconfirmed_count, "url": client.current_url}
    if values["count"]:
        _logger.warning(NOT_CONFIRMED_TEXT, values)
        warnings.warn("unclosed connection: " + NOT_CONFIRMED_TEXT % values, ResourceWarning, stacklevel=2)


def log_handler_failed(message: ReceivedMessage, error: BaseException) -> None:
    values = {"consumer": message.subscription.options.destination, "message_id": message.message_id}
    _logger.warning(
        "the handler of %(consumer)s has failed with message %(message_id)s",
        values,
        exc_info=error,
        extra={"destination": message.destination},
    )


def log_internal_error(error: Exception) -> TruenextError:
    """Log an internal error, and make the error that the callers get."""
    _logger.critical("internal error of the client", exc_info=error)
    wrapped = TruenextError(f"internal error of the client: {error!r}")
    wrapped.__cause__ = error
    return wrapped
