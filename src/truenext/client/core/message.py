"""Content of a message: its headers, its body, and what the headers say."""

from __future__ import annotations

from collections.abc import Mapping

from truenext.model.order import PRIORITY_MAX, rank
from truenext.wire.stomp.frame import Frame

_RANKS = {str(priority): rank(priority) for priority in range(PRIORITY_MAX + 1)}


class Content:
    """Message as it was sent, with the headers that the broker has added."""

    __slots__ = ("arrival", "body", "headers", "message_id", "rank", "sequence")

    def __init__(self, headers: dict[str, str], body: bytes, arrival: int) -> None:
        """`arrival` replaces the sequence for brokers that do not send one.

        Raises: KeyError, ValueError if a header that the broker must send is missing or invalid
        """
        self.headers: dict[str, str] = headers
        """Headers of the message, including those of STOMP and of the broker."""
        self.body: bytes = body
        """Body as it was sent."""
        self.arrival: int = arrival
        """Number that rises with each message that this client receives."""
        self.message_id: str = headers["message-id"]
        """Id of the message, the same for each dispatch."""
        priority = headers.get("priority", "4")
        known = _RANKS.get(priority)
        self.rank: int = rank(min(max(int(priority), 0), PRIORITY_MAX)) if known is None else known
        """Rank: 9 - priority, so that the lowest rank is served first."""
        self.sequence: int = int(headers.get("truenext-sequence", arrival))
        """Position in the broker's order among messages of equal `rank`; `arrival` if the broker does not send it."""

    @property
    def text(self) -> str:
        """Body decoded as UTF-8.

        Raises: UnicodeDecodeError
        """
        return self.body.decode()

    @property
    def destination(self) -> str:
        """Destination to which the message was sent, such as /queue/orders."""
        return self.headers.get("destination", "")

    @property
    def priority(self) -> int:
        """Priority from 0 to 9; 9 is first."""
        return PRIORITY_MAX - self.rank

    @property
    def persistent(self) -> bool:
        """The message survives a crash of the broker."""
        return self.headers.get("persistent", "") == "true"

    @property
    def attempts(self) -> int:
        """Number of earlier failures that count against the message."""
        return int(self.headers.get("truenext-attempts", "0"))

    @property
    def first_cause(self) -> str:
        """Cause of the first failure that had one, as the consumer gave it; empty if none had."""
        return self._cause("first")

    @property
    def last_cause(self) -> str:
        """Cause of the last failure that had one; empty if none had."""
        return self._cause("last")

    def _cause(self, which: str) -> str:
        """Return the message's own cause; for a dead letter without one, that of the original message."""
        original_cause = self.headers.get(f"truenext-original-{which}-cause", "")
        return self.headers.get(f"truenext-{which}-cause", original_cause)

    @property
    def deliveries(self) -> int:
        """Number of dispatches, including this one; 0 if the broker does not send it."""
        return int(self.headers.get("truenext-deliveries", "0"))

    @property
    def redelivered(self) -> bool:
        """A program, this or another one, may have received the message before; not if a client only buffered it."""
        return self.headers.get("redelivered", "") == "true"

    @property
    def was_lost(self) -> bool:
        """The last attempt was a lost connection: handling the message may crash the process."""
        return self.headers.get("truenext-lost", "") == "true"

    @property
    def group(self) -> str:
        """Message group, whose messages are handled one after the other; empty for none."""
        return self.headers.get("JMSXGroupID", "")

    @property
    def expires_ms(self) -> int:
        """Time of expiry in milliseconds since the epoch; 0 is never."""
        return int(self.headers.get("expires", "0"))

    @property
    def timestamp_ms(self) -> int:
        """Time of acceptance by the broker, in milliseconds since the epoch; 0 if the broker does not send it."""
        return int(self.headers.get("timestamp", "0"))

    @property
    def correlation_id(self) -> str:
        """Id by which the sender of a request recognizes the reply; empty if there is none."""
        return self.headers.get("correlation-id", "")

    @property
    def reply_to(self) -> str:
        """Destination for a reply; empty if the sender expects none."""
        return self.headers.get("reply-to", "")

    @property
    def content_type(self) -> str:
        """Type of the body, as its sender has set it; empty if not set."""
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
"""Headers of STOMP, and headers of the broker that have no prefix `truenext-`."""


def make_content(frame: Frame) -> Content:
    """Make the content of a MESSAGE that is not acknowledged: a reply, or a message shown by a browser."""
    frame.headers.setdefault("message-id", "")
    return Content(frame.headers, frame.body, 0)
