"""What a message says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from truenext.model.order import PRIORITY_MAX, rank
from truenext.wire.stomp.frame import Frame

_RANKS = {str(priority): rank(priority) for priority in range(PRIORITY_MAX + 1)}


class Content:
    """Headers and body as they were sent; the broker's own headers stand among them."""

    __slots__ = ("arrival", "body", "headers", "message_id", "rank", "sequence")

    def __init__(self, headers: dict[str, str], body: bytes, arrival: int) -> None:
        """`arrival` counts what comes, for brokers that do not say where a message stands.

        Raises: KeyError, ValueError if the broker has left out what it must say
        """
        self.headers: dict[str, str] = headers
        """All of them, those of STOMP and of the broker among them."""
        self.body: bytes = body
        """As it was sent."""
        self.arrival: int = arrival
        """Rises with each message that comes to this client."""
        self.message_id: str = headers["message-id"]
        """The same however often it is dispatched."""
        priority = headers.get("priority", "4")
        known = _RANKS.get(priority)
        self.rank: int = rank(min(max(int(priority), 0), PRIORITY_MAX)) if known is None else known
        """9 - priority."""
        self.sequence: int = int(headers.get("truenext-sequence", arrival))
        """Its place in the broker's order, behind `rank`; from a broker that does not say it, `arrival`."""

    @property
    def text(self) -> str:
        """The body as UTF-8.

        Raises: UnicodeDecodeError
        """
        return self.body.decode()

    @property
    def destination(self) -> str:
        """Where it was sent to, such as /queue/orders."""
        return self.headers.get("destination", "")

    @property
    def priority(self) -> int:
        """0 to 9, 9 is first."""
        return PRIORITY_MAX - self.rank

    @property
    def persistent(self) -> bool:
        """It survives a crash of the broker."""
        return self.headers.get("persistent", "") == "true"

    @property
    def attempts(self) -> int:
        """How often a consumer has failed with it before."""
        return int(self.headers.get("truenext-attempts", "0"))

    @property
    def first_cause(self) -> str:
        """Why a consumer has failed with it for the first time, in that consumer's words; empty if none has, or it has
        said nothing."""
        return self._cause("first")

    @property
    def last_cause(self) -> str:
        """The same of the last time that a consumer has said why."""
        return self._cause("last")

    def _cause(self, which: str) -> str:
        """Its own, or of a dead letter that of the message that it was."""
        original_cause = self.headers.get(f"truenext-original-{which}-cause", "")
        return self.headers.get(f"truenext-{which}-cause", original_cause)

    @property
    def deliveries(self) -> int:
        """How often it was dispatched, this time included; 0 if the broker does not say."""
        return int(self.headers.get("truenext-deliveries", "0"))

    @property
    def redelivered(self) -> bool:
        """It was dispatched before, to whomever."""
        return self.headers.get("redelivered", "") == "true"

    @property
    def was_lost(self) -> bool:
        """Its last attempt was a lost connection: it may be what ends the process that handles it."""
        return self.headers.get("truenext-lost", "") == "true"

    @property
    def group(self) -> str:
        """Messages of one group are handled one after the other; empty is none."""
        return self.headers.get("JMSXGroupID", "")

    @property
    def expires_ms(self) -> int:
        """Milliseconds since the epoch; 0 is never."""
        return int(self.headers.get("expires", "0"))

    @property
    def timestamp_ms(self) -> int:
        """When the broker accepted it, in milliseconds since the epoch; 0 if it does not say."""
        return int(self.headers.get("timestamp", "0"))

    @property
    def correlation_id(self) -> str:
        """By which whoever sent a question knows its answer; empty if its sender gave none."""
        return self.headers.get("correlation-id", "")

    @property
    def reply_to(self) -> str:
        """Where an answer is to be sent to; empty if none is wanted."""
        return self.headers.get("reply-to", "")

    @property
    def content_type(self) -> str:
        """What its sender says that the body is; empty if it says nothing."""
        return self.headers.get("content-type", "")

    @property
    def application_headers(self) -> Mapping[str, str]:
        """Without those that the broker or STOMP has for itself."""
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
"""Headers of STOMP and of the broker without a `truenext-` before them."""


def make_content(frame: Frame) -> Content:
    """Of a MESSAGE that is nobody's to acknowledge."""
    frame.headers.setdefault("message-id", "")
    return Content(frame.headers, frame.body, 0)
