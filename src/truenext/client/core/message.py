"""Content of a message: its headers, its body, and attributes made from the headers."""

from __future__ import annotations

from collections.abc import Mapping

from truenext.model.order import PRIORITY_MAX, rank
from truenext.wire.stomp.frame import Frame

_RANKS = {str(priority): rank(priority) for priority in range(PRIORITY_MAX + 1)}


class Content:
    """Message as it was sent, with the headers that the broker has added."""

    __slots__ = ("arrival", "body", "headers", "message_id", "rank", "sequence")

    def __init__(self, headers: dict[str, str], body: bytes, arrival: int) -> None:
        """Make the content. `arrival` stands in for the sequence if the broker does not send one.

        Raises: KeyError, ValueError if the broker has left out a necessary header, or its value is invalid
        """
        self.headers: dict[str, str] = headers
        """All headers of the message, also those that STOMP defines or that the broker adds."""
        self.body: bytes = body
        """Body as it was sent."""
        self.arrival: int = arrival
        """Number that rises with each message received by this client."""
        self.message_id: str = headers["message-id"]
        """Id of the message. All dispatches of a message have the same id."""
        priority = headers.get("priority", "4")
        known = _RANKS.get(priority)
        self.rank: int = rank(min(max(int(priority), 0), PRIORITY_MAX)) if known is None else known
        """Rank: 9 - priority. Messages with the lowest rank are dispatched first."""
        self.sequence: int = int(headers.get("truenext-sequence", arrival))
        """Position in the broker's order among messages of equal `rank`. If the broker does not send a sequence, the
        value is `arrival`."""

    @property
    def text(self) -> str:
        """Body decoded as UTF-8.

        Raises: UnicodeDecodeError if the body is not UTF-8
        """
        return self.body.decode()

    @property
    def destination(self) -> str:
        """Destination to which the message was sent, such as /queue/orders."""
        return self.headers.get("destination", "")

    @property
    def priority(self) -> int:
        """Priority from 0 to 9. Messages of priority 9 come first."""
        return PRIORITY_MAX - self.rank

    @property
    def persistent(self) -> bool:
        """True if the message survives a crash of the broker."""
        return self.headers.get("persistent", "") == "true"

    @property
    def attempts(self) -> int:
        """Number of times that a consumer has failed with this message, as far as these failures count as attempts. 0
        at the first delivery."""
        return int(self.headers.get("truenext-attempts", "0"))

    @property
    def first_cause(self) -> str:
        """Cause that a consumer has given for the first failure with a cause; empty if there is none."""
        return self._cause("first")

    @property
    def last_cause(self) -> str:
        """Cause that a consumer has given for the last failure with a cause; empty if there is none."""
        return self._cause("last")

    def _cause(self, which: str) -> str:
        """Return the message's first or last cause. If a dead letter has none, return the original message's cause."""
        original_cause = self.headers.get(f"truenext-original-{which}-cause", "")
        return self.headers.get(f"truenext-{which}-cause", original_cause)

    @property
    def deliveries(self) -> int:
        """Number of dispatches of the message, including this one; 0 if the broker does not send the number."""
        return int(self.headers.get("truenext-deliveries", "0"))

    @property
    def redelivered(self) -> bool:
        """True if a program, this one or another, may have received the message before. A dispatch that a client only
        buffered does not count."""
        return self.headers.get("redelivered", "") == "true"

    @property
    def was_lost(self) -> bool:
        """True if the last attempt ended with a lost connection, so that processing the message may crash the
        process."""
        return self.headers.get("truenext-lost", "") == "true"

    @property
    def group(self) -> str:
        """Message group, or empty. Messages of a group are processed one after the other."""
        return self.headers.get("JMSXGroupID", "")

    @property
    def expires_ms(self) -> int:
        """Time at which the message expires, in milliseconds since the epoch; 0 means never."""
        return int(self.headers.get("expires", "0"))

    @property
    def timestamp_ms(self) -> int:
        """Time at which the broker accepted the message, in milliseconds since the epoch; 0 if the broker does not send
        the time."""
        return int(self.headers.get("timestamp", "0"))

    @property
    def correlation_id(self) -> str:
        """Id that connects a reply with its request; empty if there is none."""
        return self.headers.get("correlation-id", "")

    @property
    def reply_to(self) -> str:
        """Destination for a reply; empty if the sender expects none."""
        return self.headers.get("reply-to", "")

    @property
    def content_type(self) -> str:
        """Type of the body that the sender has given; empty if it gave none."""
        return self.headers.get("content-type", "")

    @property
    def application_headers(self) -> Mapping[str, str]:
        """Headers without those that STOMP or the broker defines."""
        return {
            name: value
            for name, value in self.headers.items()
            if name not in STOMP_HEADERS and not name.startswith("truenext-")
        }

    def __repr__(self) -> str:
        return f"<message {self.message_id} of {self.destination}, priority {self.priority}>"


STOMP_HEADERS = frozenset(
    {
        *("subscription", "ack", "message-id", "destination", "priority", "persistent", "redelivered", "timestamp"),
        *("content-length", "content-type", "expires", "reply-to", "correlation-id"),
    }
)
"""Headers that STOMP defines, and the broker's headers without the prefix `truenext-`."""


def make_content(frame: Frame) -> Content:
    """Make the content of a MESSAGE that needs no acknowledgement: a reply, or a message of a browser."""
    frame.headers.setdefault("message-id", "")
    return Content(frame.headers, frame.body, 0)
