"""Advisories of temporary destinations: what the broker tells a JMS client of those of other connections.

A client sends to a temporary destination of another connection only once an advisory has told it. Here a client is told
just before it gets a message with that reply-to: names of temporary destinations can be guessed, and nobody else needs
them.
"""

from truenext.model.header_lines import decode_header_lines
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.openwire_message import (
    TEMPORARY_QUEUE,
    TEMPORARY_TOPIC,
    PhysicalName,
    has_reply_to,
    jms_headers,
    physical_name,
)
from truenext.wire.openwire.deliveries import encode_advisory
from truenext.wire.openwire.destinations import ADVISORY_PREFIX
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConsumerId,
    DestinationInfo,
    PhysicalDestination,
    ProducerId,
    TemporaryQueueName,
    TemporaryTopicName,
    TopicName,
)

_TOLD_MAX = 10_000
"""Number of temporary destinations that a connection remembers to have been told. A client may be told twice."""
_TOPICS = {f"{ADVISORY_PREFIX}TempQueue", f"{ADVISORY_PREFIX}TempTopic"}
_REMOTE_PREFIX = b"/remote-temp-"


class Advisories:
    """Advisory consumers of one connection, and what they were told."""

    def __init__(self, identity: str) -> None:
        self._producer_id = ProducerId(f"ID:truenext-{identity}", 0, -1)
        self._consumers: dict[ConsumerId, None] = {}
        self._told: dict[PhysicalName, None] = {}
        self._number = 0
        self.connection_id = ""

    @property
    def has_consumers(self) -> bool:
        return bool(self._consumers)

    def is_consumer(self, consumer_id: ConsumerId | None) -> bool:
        return consumer_id in self._consumers

    def add(self, consumer_id: ConsumerId) -> None:
        self._consumers[consumer_id] = None

    def remove(self, consumer_id: ConsumerId) -> None:
        self._consumers.pop(consumer_id, None)

    def tell_reply_to(self, message: SentMessage) -> bytes:
        """Return the frames that must come before a message: they tell the client of the temporary destinations in its
        reply-to, as far as it was not told before."""
        return b"".join([self.tell(name) for name in _temporary_reply_to(message) if name not in self._told])

    def tell(self, name: PhysicalName, *, is_removed: bool = False) -> bytes:
        """Return the frames that tell the client of a temporary destination, or of its end."""
        owner = name.name.rpartition(":")[0]
        if owner == self.connection_id:
            return b""
        if is_removed:
            self._told.pop(name, None)
        else:
            if len(self._told) >= _TOLD_MAX:
                del self._told[next(iter(self._told))]
            self._told[name] = None
        kind = TemporaryQueueName if name.type == TEMPORARY_QUEUE else TemporaryTopicName
        info = DestinationInfo(
            connection_id=ConnectionId(owner), destination=kind(name.name), operation=1 if is_removed else 0
        )
        frames = []
        for consumer_id in self._consumers:
            self._number += 1
            frames.append(encode_advisory(consumer_id, self._producer_id, self._number, info))
        return b"".join(frames)


def are_advisories(destination: PhysicalDestination | None) -> bool:
    """Return whether a consumer's destination names only advisories of temporary destinations."""
    if not isinstance(destination, TopicName) or destination.name is None:
        return False
    return all(part.strip().removeprefix("topic://") in _TOPICS for part in destination.name.split(","))


def _temporary_reply_to(message: SentMessage) -> list[PhysicalName]:
    """Return the temporary destinations in the reply-to of a message of either form."""
    if message.form == OPENWIRE_FORM:
        reply_to = jms_headers(message).reply_to if has_reply_to(message) else None
    elif _REMOTE_PREFIX in message.header:
        reply_to = physical_name(decode_header_lines(message.header).get("reply-to", ""))
    else:
        reply_to = None
    if reply_to is None or reply_to.type not in (TEMPORARY_QUEUE, TEMPORARY_TOPIC):
        return []
    return [reply_to]
