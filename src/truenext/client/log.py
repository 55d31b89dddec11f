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
    """Log an event of the connection. Fields that the text contains are not added again: a log that shows fields
    would show them twice, and one that shows none has them."""
    level = logging.INFO if text == CONNECTED_TEXT else logging.WARNING
    fields = {name: fact for name, fact in values.items() if f"%({name})s" not in text}
    _logger.log(level, text, values, extra=fields)


def warn_unconfirmed(client: Client) -> None:
    """Log the number of sends that may be lost with a connection that was not closed before the program or its event
    loop ended, and warn as Python does of unclosed resources."""
    values = {"count": client.unconfirmed_count, "url": client.connect_backoff.current_address.url}
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
    """Log an internal error, and make the error that callers get."""
    _logger.critical("internal error of the client", exc_info=error)
    wrapped = TruenextError(f"internal error of the client: {error!r}")
    wrapped.__cause__ = error
    return wrapped
