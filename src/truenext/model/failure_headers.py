"""Failure headers of a SEND: where the broker reports that the message became a dead letter, and which queues handle
the message instead. Source: docs/contract.md, C11.7 to C11.12

The headers are stored with the message, so they survive restarts and moves. A message that an earlier version has
stored may have headers of these names with any values: `stored_handlers` and `stored_report_destination` leave out what
a SEND could not have.
"""

from functools import lru_cache

from truenext.errors import RemoteProtocolError
from truenext.model.destination import (
    DEAD_LETTER_PREFIX,
    REMOTE_PREFIX,
    TEMPORARY_PREFIX,
    TEMPORARY_TOPIC_PREFIX,
    Destination,
    DestinationKind,
    destination_error,
    parse_address,
)
from truenext.model.limits import HANDLERS_MAX, REPORT_ID_LENGTH_MAX

REPORT_TO, REPORT_ID, ON_FAILURE = "truenext-report-to", "truenext-report-id", "truenext-on-failure"
FAILURE_HEADERS = frozenset({REPORT_TO, REPORT_ID, ON_FAILURE})
"""Headers with which a SEND asks for a report of its failure, or names its handlers."""
_TEMPORARY_PREFIXES = (TEMPORARY_PREFIX, TEMPORARY_TOPIC_PREFIX, REMOTE_PREFIX)


def failure_destinations(
    destination: Destination, report_to: str | None, report_id: str | None, on_failure: str | None
) -> tuple[Destination, ...]:
    """Return the destinations that a SEND to `destination` names in its failure headers.

    Raises: RemoteProtocolError if a header is invalid, or a SEND to `destination` may have no failure headers
    """
    if destination.is_multi_queue:
        raise destination_error(
            f"{REPORT_TO} and {ON_FAILURE} are for a SEND to one queue, not to {destination.address[:100]!r}: "
            "leave them out, or send to each queue"
        )
    if destination.kind is DestinationKind.TEMPORARY or destination.name.startswith(DEAD_LETTER_PREFIX):
        raise destination_error(
            f"{REPORT_TO} and {ON_FAILURE} would have no effect on a SEND to {destination.address[:100]!r}, a "
            "temporary or dead-letter queue, where failed messages stay; leave them out"
        )
    if (report_to is None) != (report_id is None):
        present, missing = (REPORT_ID, REPORT_TO) if report_to is None else (REPORT_TO, REPORT_ID)
        raise RemoteProtocolError(f"{present} needs {missing}, which is missing: send both, or leave both out")
    if report_id is not None and not 0 < len(report_id) <= REPORT_ID_LENGTH_MAX:
        raise RemoteProtocolError(
            f"{REPORT_ID} of {len(report_id)} characters; it must have 1 to {REPORT_ID_LENGTH_MAX}"
        )
    handlers = () if on_failure is None else parse_handlers(on_failure)
    return handlers if report_to is None else (_parse_report_destination(report_to), *handlers)


@lru_cache(maxsize=1024)
def parse_handlers(text: str) -> tuple[Destination, ...]:
    """Return the queues that a value of `truenext-on-failure` names.

    >>> [handler.name for handler in parse_handlers("/queue/a /queue/b")]
    ['a', 'b']

    Raises: RemoteProtocolError if the value is invalid
    """
    addresses = text.split(" ")
    if len(addresses) > HANDLERS_MAX:
        raise RemoteProtocolError(f"{ON_FAILURE} names {len(addresses)} queues; at most {HANDLERS_MAX}")
    handlers: list[Destination] = []
    for address in addresses:
        if not address.startswith("/queue/"):
            raise destination_error(
                f"{ON_FAILURE} {address[:100]!r} is no queue: name /queue/NAME, with one blank between two queues"
            )
        handler = parse_address(address, "")
        if handler.kind is not DestinationKind.QUEUE or handler.name.startswith(DEAD_LETTER_PREFIX):
            raise destination_error(
                f"{ON_FAILURE} {address[:100]!r}: a handler must be one queue, not a dead-letter queue or a pattern"
            )
        handlers.append(handler)
    return tuple(handlers)


def _parse_report_destination(address: str) -> Destination:
    # Temporary addresses are not parsed: the error would name another form of a temporary address.
    if " " not in address and not address.startswith(_TEMPORARY_PREFIXES):
        try:
            destination = parse_address(address, "")
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{REPORT_TO}: {error}", error.code) from error
        if destination.kind in (DestinationKind.QUEUE, DestinationKind.TOPIC):
            return destination
    raise destination_error(
        f"{REPORT_TO} {address[:100]!r}: a report goes to one queue or topic, which is not temporary and whose name "
        "has no blank: name /queue/NAME or /topic/NAME"
    )


def stored_handlers(text: str) -> tuple[Destination, ...]:
    """Return the handlers that a header of a stored message names; none if the value is invalid."""
    try:
        return parse_handlers(text) if text else ()
    except RemoteProtocolError:
        return ()


def stored_report_destination(address: str) -> Destination | None:
    """Return the destination of reports that a header of a stored message names; None if the value is invalid."""
    try:
        return _parse_report_destination(address) if address else None
    except RemoteProtocolError:
        return None
