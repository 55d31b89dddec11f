"""Rules of redelivery: the delay before a failed message's next try, and the making and restoring of dead letters and
reports.

The headers of a dead letter give the reason of its failure, and describe the original message. `restore_original`
restores that message from these headers:

    truenext-dead-letter-cause            "attempts exhausted", "expired" or "rejected"
    truenext-dead-letter-timestamp        time when the message became a dead letter, in milliseconds since the epoch
    truenext-original-destination         queue of the original message; for a durable subscription, the topic
    truenext-original-priority, -persistent, -expires
    truenext-original-timestamp           time when the original message arrived in its queue
    truenext-original-attempts            number of attempts of the original message
    truenext-original-first-cause, -last-cause   the first and the last cause that consumers gave, if any
    truenext-failure                      "handled" or "report", if the message is one of these

Reports, and messages that a handler gets instead of the dead-letter queue, have these headers, too. If such a message
fails, its dead letter keeps the headers about the first failure.

No client can send to the queue of a durable subscription. So `SentMessage.redrive_queue` has the name of that queue;
clients do not see it. For reports and handled messages the field has the queue to which their dead letter goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from truenext.model.batch import Causes
from truenext.model.destination import (
    SUBSCRIPTION_PREFIX,
    Destination,
    DestinationKind,
    dead_letter_name,
    parse_stored_queue_name,
)
from truenext.model.failure_headers import (
    FAILURE_HEADERS,
    ON_FAILURE,
    REPORT_ID,
    REPORT_TO,
    stored_handlers,
    stored_report_destination,
)
from truenext.model.header_lines import DEAD_LETTER_HEADERS, decode_header_lines, encode_header_lines
from truenext.model.limits import DESTINATION_LENGTH_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import INDIVIDUAL_DEAD_LETTERS, Policy, delay_before_jitter_ms

EXHAUSTED, EXPIRED, REJECTED = "attempts exhausted", "expired", "rejected"
"""Values of truenext-dead-letter-cause."""

ORIGINAL_DESTINATION = "truenext-original-destination"
FAILURE = "truenext-failure"
HANDLED, REPORT = "handled", "report"
"""Values of truenext-failure."""
_EXPIRES = "truenext-original-expires"
_PERSISTENT = "truenext-original-persistent"
_FIRST_CAUSE = "truenext-original-first-cause"
_LAST_CAUSE = "truenext-original-last-cause"


def retry_delay_ms(policy: Policy, attempts: int, random: Callable[[], float]) -> int:
    """Return the milliseconds from a message's last failure to its next try. `attempts` includes that failure. `random`
    returns a random number from 0 to 1.

    >>> [retry_delay_ms(Policy(backoff=2.0), attempts, lambda: 0.5) for attempts in (1, 2, 3, 4)]
    [0, 1000, 2000, 4000]
    """
    delay = delay_before_jitter_ms(
        attempts, policy.first_delay_ms, policy.delay_ms, policy.backoff, policy.delay_max_ms
    )
    if policy.jitter and delay:
        delay *= 1 + policy.jitter * (2 * random() - 1)
    return round(delay)


class FailedMessage(NamedTuple):
    """Message that was given up, as it arrives in its next queue."""

    destination: Destination
    """Dead-letter queue, or the handler that gets the message instead."""
    message: SentMessage
    is_handled: bool
    """True if the message goes to a handler: it is no dead letter."""
    headers: dict[str, str]


def dead_letter_queue(origin: str, policy: Policy) -> str:
    """Return the name of the queue that gets the dead letters of queue `origin`."""
    return dead_letter_name(origin) if policy.dead_letters == INDIVIDUAL_DEAD_LETTERS else policy.dead_letters


def make_dead_letter(
    message: SentMessage, origin: str, policy: Policy, *, attempts: int, causes: Causes, reason: str, now_ms: int
) -> FailedMessage:
    """Return the dead letter of a message that failed in queue `origin`, or the message for its next handler.

    The result is always persistent and never expires, so that it can be examined.
    """
    headers = decode_header_lines(message.header)
    headers.pop("expires", None)
    handlers = stored_handlers(headers.pop(ON_FAILURE, ""))
    if handlers:
        destination, *others = handlers
        if others:
            headers[ON_FAILURE] = " ".join(handler.address for handler in others)
    else:
        destination = Destination(DestinationKind.QUEUE, dead_letter_queue(origin, policy))
    redrive_queue = ""
    if FAILURE in headers:
        redrive_queue = origin
    else:
        if origin.startswith(SUBSCRIPTION_PREFIX):
            redrive_queue = origin
        _add_facts(headers, message, origin, attempts=attempts, causes=causes, reason=reason, now_ms=now_ms)
    if handlers:
        headers[FAILURE] = HANDLED
        redrive_queue = destination.name
    headers |= {"destination": destination.address, "persistent": "true", "priority": str(message.priority)}
    letter = replace(
        message, persistent=True, expires_ms=0, header=encode_header_lines(headers), redrive_queue=redrive_queue
    )
    return FailedMessage(destination, letter, bool(handlers), headers)


def _add_facts(
    headers: dict[str, str],
    message: SentMessage,
    origin: str,
    *,
    attempts: int,
    causes: Causes,
    reason: str,
    now_ms: int,
) -> None:
    """Add the headers that say why and where a message has failed."""
    # Causes of an earlier dead letter, which was moved here, must not stay.
    for name in (_FIRST_CAUSE, _LAST_CAUSE):
        headers.pop(name, None)
    address = Destination(DestinationKind.QUEUE, origin).address
    if origin.startswith(SUBSCRIPTION_PREFIX):
        address = headers.get("destination", address)
    headers |= {
        "truenext-dead-letter-cause": reason,
        "truenext-dead-letter-timestamp": str(now_ms),
        "truenext-original-attempts": str(attempts),
        ORIGINAL_DESTINATION: address,
        _EXPIRES: str(message.expires_ms),
        _PERSISTENT: "true" if message.persistent else "false",
        "truenext-original-priority": str(message.priority),
        "truenext-original-timestamp": str(message.arrived_ms),
    }
    if causes.last:
        headers |= {_FIRST_CAUSE: causes.first, _LAST_CAUSE: causes.last}


def make_report(failed: FailedMessage) -> tuple[Destination, SentMessage] | None:
    """Return destination and report of a dead letter; None if the dead letter's headers ask for none."""
    letter, headers = failed.message, failed.headers
    destination = stored_report_destination(headers.get(REPORT_TO, ""))
    if destination is None:
        return None
    facts = {name: value for name, value in headers.items() if name not in FAILURE_HEADERS}
    facts |= {
        "destination": destination.address,
        "correlation-id": headers.get(REPORT_ID, ""),
        "content-length": "0",
        FAILURE: REPORT,
    }
    redrive_queue = destination.name if destination.kind is DestinationKind.QUEUE else ""
    return destination, replace(letter, header=encode_header_lines(facts), body=b"", redrive_queue=redrive_queue)


def redirect(message: SentMessage, destination: Destination) -> tuple[Destination, SentMessage]:
    """Return the destination, and a copy of the message that has this destination and is otherwise unchanged."""
    headers = decode_header_lines(message.header)
    headers |= {"destination": destination.address, "priority": str(message.priority)}
    return destination, replace(message, header=encode_header_lines(headers))


def restore_original(letter: SentMessage, now_ms: int) -> tuple[Destination, SentMessage] | None:
    """Return the destination and the original message of a dead letter. None if `letter` is no dead letter. An expiry
    in the past is left out, because the message would be removed before a consumer gets it. If `letter` was a report of
    a failure, or had failed before and was moved to a handler (`on_failure`), it keeps all its headers, and goes back
    to the queue in which it failed last (`redrive_queue`)."""
    headers = decode_header_lines(letter.header)
    if FAILURE in headers:
        return _restore_failed_again(letter, headers)
    address = headers.get(ORIGINAL_DESTINATION, "")
    name = letter.redrive_queue or address.removeprefix("/queue/")
    if name == address or not name:
        return None
    # In dead letters of earlier versions, the destination itself may name a durable subscription.
    if len(name) > DESTINATION_LENGTH_MAX and not name.startswith(SUBSCRIPTION_PREFIX):
        return None
    expires = headers.get(_EXPIRES, "0")
    expires_ms = int(expires) if expires.isascii() and expires.isdigit() and len(expires) < 20 else 0
    if expires_ms <= now_ms:
        expires_ms = 0
    is_persistent = headers.get(_PERSISTENT) != "false"
    original_headers = {name: value for name, value in headers.items() if name not in DEAD_LETTER_HEADERS}
    original_headers |= {
        "destination": address,
        "persistent": "true" if is_persistent else "false",
        "priority": str(letter.priority),
    }
    if expires_ms:
        original_headers["expires"] = str(expires_ms)
    header = encode_header_lines(original_headers)
    message = replace(letter, persistent=is_persistent, expires_ms=expires_ms, header=header, redrive_queue="")
    return Destination(DestinationKind.QUEUE, name), message


def _restore_failed_again(letter: SentMessage, headers: dict[str, str]) -> tuple[Destination, SentMessage] | None:
    """Return the destination and the message of a dead letter that was a report or a handled message. None if the queue
    in which the message failed is not known, because the message came from a topic."""
    if not letter.redrive_queue:
        return None
    queue = parse_stored_queue_name(letter.redrive_queue)
    address = f"/topic/{queue.topic}" if queue.topic else queue.address
    header = encode_header_lines(headers | {"destination": address})
    return Destination(DestinationKind.QUEUE, queue.name), replace(letter, persistent=True, expires_ms=0, header=header)
