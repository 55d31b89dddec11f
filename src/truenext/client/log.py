"""What the client says in the log of its program, as `truenext.client`."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from truenext.client.core.context import CONNECTED, NOT_CONFIRMED
from truenext.errors import TruenextError

if TYPE_CHECKING:
    from truenext.client.core.buffer import Received
    from truenext.client.core.client import Client

_logger = logging.getLogger("truenext.client")


def report(text: str, facts: dict[str, object]) -> None:
    """Log what happened to the connection. Facts that the text has are no fields besides: a log that shows fields would
    say them twice, and one that shows none has them."""
    level = logging.INFO if text == CONNECTED else logging.WARNING
    fields = {name: fact for name, fact in facts.items() if f"%({name})s" not in text}
    _logger.log(level, text, facts, extra=fields)


def warn_unconfirmed(client: Client) -> None:
    """Log how many sends may be lost with a connection that the program, or its event loop, has not closed before its
    end, and warn as Python does of unclosed resources."""
    facts = {"count": client.unconfirmed, "url": client.backoff.address.url}
    if facts["count"]:
        _logger.warning(NOT_CONFIRMED, facts)
        warnings.warn("unclosed connection: " + NOT_CONFIRMED % facts, ResourceWarning, stacklevel=2)


def handler_failed(message: Received, error: BaseException) -> None:
    facts = {"consumer": message.subscription.options.destination, "message_id": message.message_id}
    _logger.warning(
        "the handler of %(consumer)s has failed with message %(message_id)s",
        facts,
        exc_info=error,
        extra={"destination": message.destination},
    )


def internal_error(error: Exception) -> TruenextError:
    """What whoever waits gets."""
    _logger.critical("internal error of the client", exc_info=error)
    wrapped = TruenextError(f"internal error of the client: {error!r}")
    wrapped.__cause__ = error
    return wrapped
