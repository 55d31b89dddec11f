"""Destinations of one JMS client: makes the broker's destinations of OpenWire's, and refuses those that JMS clients may
not use."""

from sys import getsizeof

from truenext.errors import Code, RemoteProtocolError
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.openwire_message import PhysicalName, physical_name
from truenext.wire.openwire.refusals import not_supported
from truenext.wire.openwire.structures import (
    PhysicalDestination,
    TemporaryQueueName,
    TemporaryTopicName,
    TopicName,
)

ADVISORY_PREFIX = "ActiveMQ.Advisory."
_STATISTICS_PREFIX = "ActiveMQ.Statistics"
_PATTERNS = (DestinationKind.QUEUE_PATTERN, DestinationKind.TOPIC_PATTERN)
_KNOWN_BYTES_MAX = 256 * 1024
"""Approximate bytes of memory for the destinations that a connection keeps."""
_SHARED_LENGTH_MAX = 512
"""Characters of the longest address that connections share."""
_DESTINATION_BYTES = 400
"""Memory for a destination, or a part of a composite one, without the name that the client has sent."""


class Destinations:
    """Destinations that the client of one connection names. Equal names are one object, which the check of grants
    needs to be fast."""

    def __init__(self) -> None:
        self._targets: dict[PhysicalDestination, Destination] = {}
        self._bytes = 0
        """Approximate bytes of memory for `_targets`."""

    def target(self, physical: PhysicalDestination) -> Destination:
        """Return the destination of a message.

        Raises: RemoteProtocolError if it is no destination to which JMS clients may send
        """
        found = self._targets.get(physical)
        if found is None:
            found = _target(physical)
            self._keep(physical, found)
        return found

    def _keep(self, physical: PhysicalDestination, target: Destination) -> None:
        size = getsizeof(physical.name) + _DESTINATION_BYTES * (1 + len(target.parts))
        if self._bytes + size > _KNOWN_BYTES_MAX:
            self._targets.clear()
            self._bytes = 0
        self._targets[physical] = target
        self._bytes += size


def _target(physical: PhysicalDestination) -> Destination:
    name = _name(physical)
    for part in name.split(","):
        plain = part.strip().rpartition("://")[2]
        if plain.startswith(ADVISORY_PREFIX):
            raise RemoteProtocolError(f"send to {plain}: only the broker sends advisories", Code.DESTINATION)
        if plain.startswith(_STATISTICS_PREFIX):
            raise not_supported(f"statistics by {plain}", "use the command truenext status")
    destination = _parse(physical, name)
    if destination.kind in _PATTERNS:
        raise RemoteProtocolError(f"send to {name}: it is a pattern, send to a queue or topic", Code.DESTINATION)
    return destination


def source(physical: PhysicalDestination | None) -> Destination:
    """Return the destination of a consumer or browser.

    Raises: RemoteProtocolError if JMS clients cannot consume from it
    """
    if physical is None:
        raise RemoteProtocolError("a consumer without a destination", Code.DESTINATION)
    name = _name(physical)
    if "," in name:
        raise not_supported(f"a consumer of several destinations, {name}", "make a consumer of each")
    if name.startswith(ADVISORY_PREFIX):
        raise not_supported(f"the advisory {name}", "only those of temporary destinations are sent")
    destination = _parse(physical, name)
    if destination.kind in _PATTERNS:
        raise not_supported(f"a consumer of a pattern, {name}", "make a consumer of each destination")
    return destination


def temporary(physical: PhysicalDestination | None) -> tuple[Destination, PhysicalName]:
    """Return the temporary queue or topic that a command creates or removes, and its name.

    Raises: RemoteProtocolError if it is none
    """
    if not isinstance(physical, TemporaryQueueName | TemporaryTopicName):
        raise not_supported("commands that create or remove a queue or topic", "use the command truenext")
    name = PhysicalName(physical.TYPE, _name(physical))
    destination = _parse(physical, name.name)
    if physical_name(destination.address) != name:
        # Else one destination could be announced under many names.
        raise RemoteProtocolError(
            f"temporary queue or topic {name.name[:100]!r}: its name must be the connection's id, a colon and a number",
            Code.DESTINATION,
        )
    return destination, name


def is_for_topics(physical: PhysicalDestination) -> bool:
    return isinstance(physical, TopicName | TemporaryTopicName)


def _name(physical: PhysicalDestination) -> str:
    if not physical.name:
        raise RemoteProtocolError("a destination without a name", Code.DESTINATION)
    for start in ("/queue/", "/topic/"):
        if physical.name.startswith(start):
            name = physical.name[:100]
            raise RemoteProtocolError(
                f"{name} is an address of STOMP: in JMS write the name alone, {name.removeprefix(start)}",
                Code.DESTINATION,
            )
    return physical.name


def _parse(physical: PhysicalDestination, name: str) -> Destination:
    address = PhysicalName(physical.TYPE, name).address
    # All connections share the cache of addresses, which counts addresses, not bytes.
    parse = parse_address if len(address) <= _SHARED_LENGTH_MAX else parse_address.__wrapped__
    return parse(address, "")
