"""Cron flows: flows that the broker starts at the times of a cron expression. A service declares them, and
`truenext stages cron --apply` makes scheduled sends of them.

    declared    `CronFlow`: what the service's code says
    present     `PresentCron`: a scheduled send of the service in the broker

Headers of each scheduled send name its service, the cron flow, and a digest of its definition. So declared and present
cron flows can be compared without their bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from truenext.errors import RemoteProtocolError
from truenext.flows.envelope import VERSION, Envelope, FlowContext, encode_envelope
from truenext.flows.message_ids import cron_id
from truenext.model.limits import NAME_LENGTH_MAX
from truenext.model.schedule import Schedule, check_schedule
from truenext.stage.core.definitions import Endpoint
from truenext.stage.core.errors import DefinitionError

SERVICE_HEADER: Final = "cron-service"
NAME_HEADER: Final = "cron-name"
DIGEST_HEADER: Final = "cron-digest"
UTC: Final = "UTC"


class CronFlow(msgspec.Struct, frozen=True):
    """Cron flow that a service declares."""

    name: str
    cron: str
    zone: str
    endpoint: str
    """Name of the first endpoint of the flow. The queue of that endpoint has the same name."""
    id: str
    """Id of the schedule, from which the ids of its occurrences are derived."""
    body: bytes
    headers: dict[str, str]

    @property
    def digest(self) -> str:
        return self.headers[DIGEST_HEADER]


class PresentCron(msgspec.Struct, frozen=True):
    """Scheduled send of a cron flow in the broker, as the answer to the control request `scheduled` lists it."""

    number: int
    due_ms: int
    cron: str
    headers: dict[str, str]
    zone: str = ""
    queue: str = ""
    """Queue of the scheduled send, set by `truenext stages cron`, since the broker's answer does not name it; otherwise
    empty."""

    @property
    def name(self) -> str:
        return self.headers.get(NAME_HEADER, "")

    @property
    def digest(self) -> str:
        return self.headers.get(DIGEST_HEADER, "")


class CronPage(msgspec.Struct):
    """Answer to the control request `scheduled`; only the fields that cron flows need."""

    sends: list[PresentCron]
    next: list[int] | None
    until: int


def new_cron_flow(service: str, name: str, cron: str, zone: str, to: Endpoint[Any, Any], message: object) -> CronFlow:
    """Check and encode a cron flow.

    Raises: DefinitionError if an argument is invalid; FlowError if the message is not of the endpoint's type
    """
    if not (isinstance(name, str) and 0 < len(name) <= NAME_LENGTH_MAX):
        raise DefinitionError(f"{name!r} is not the name of a cron flow of {service}: use a text, such as nightly")
    if not isinstance(cron, str) or not isinstance(zone, str) or not cron or not zone:
        raise DefinitionError(
            f"cron flow {name} of {service} has the times {cron!r} in the zone {zone!r}: use texts, such as "
            '"0 3 * * *" and "Europe/Oslo"'
        )
    if not isinstance(to, Endpoint):
        raise DefinitionError(f"cron flow {name} of {service} starts at an endpoint, not at {to!r}")
    try:
        check_schedule(Schedule(cron=cron, zone=zone))
    except RemoteProtocolError as error:
        # The broker's text names the headers of a scheduled send.
        text = str(error).replace("AMQ_SCHEDULED_CRON", "cron").replace("AMQ_SCHEDULED_ZONE", "zone")
        raise DefinitionError(f"cron flow {name} of {service}: {text}") from error
    id = cron_id(service, name)
    flow = FlowContext(id=id, trace=name, started_ms=0, started_by=service)
    encoded = to.takes.encode(message)
    envelope = Envelope(version=VERSION, id=id, flow=flow, kind="send", sender=service, message=encoded, recurring=True)
    body = encode_envelope(envelope)
    digest = blake2b("\n".join((name, cron, zone, to.destination)).encode() + body, digest_size=16).hexdigest()
    headers = {SERVICE_HEADER: service, NAME_HEADER: name, DIGEST_HEADER: digest}
    return CronFlow(name, cron, zone, to.name, id, body, headers)


def present_selector(service: str) -> str:
    """Return the selector that finds a service's cron flows among the scheduled sends of a queue."""
    return f"{SERVICE_HEADER.replace('-', '_')} = '{service}'"


def are_equal(declared: Iterable[CronFlow], present: Sequence[PresentCron]) -> bool:
    """Return whether the broker has each declared cron flow exactly once, as it is declared, and no other cron flow of
    the service."""
    return Counter(each.digest for each in declared) == Counter(each.digest for each in present)
