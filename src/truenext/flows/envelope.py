"""Envelope: the body of a message between stages. Source: docs/protocol.md

No process remembers a flow, since each message carries all of it: the program's message, the state of the receiving
stage, and the destination and state of each endpoint that waits for a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from truenext.errors import RemoteProtocolError, TruenextError
from truenext.flows.message_ids import occurrence_id
from truenext.model.destination import DEAD_LETTER_PREFIX, DestinationKind, parse_address
from truenext.model.limits import HANDLERS_MAX, REPORT_ID_LENGTH_MAX

_DEAD_LETTERS = f"/queue/{DEAD_LETTER_PREFIX}"

VERSION = 2
"""Version of envelopes that this code writes and reads. Messages of all other versions are rejected."""

PRIORITY: Final = 4
PRIORITY_INTERACTIVE: Final = 9
CALLS_MAX: Final = 200
"""Maximum length of a chain of messages in one flow, each sent by the stage that got the message before; replies do not
count. A longer flow most likely runs in a circle. Several requests of one stage count as one message."""
TOO_MANY_CALLS: Final = (
    f"this flow has more than {CALLS_MAX} messages one after another: check whether it runs in a circle"
)
CONTENT_TYPE: Final = "application/json"

EMPTY = msgspec.Raw(b"{}")
"""JSON of an empty object. In the decoded value, each field has its default."""


class NotDecoded(TruenextError):
    """A message is not of the type that its stage takes: a field has another type, for example. The text says which
    field. The message becomes a dead letter at once."""


class FlowContext(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Data about a flow, which each of its messages carries."""

    id: str
    """Id of the flow, which is the id of its first message."""
    trace: str
    """Human-readable name of the flow, given at its start. If a stage of the flow `parent` starts the flow `child`, its
    name is `parent|child`."""
    started_ms: int
    """Start of the flow in milliseconds since the epoch, by the clock of the process that started it."""
    started_by: str
    """Service that started the flow. If a stage started it, a blank and the stage's queue follow."""
    interactive: bool = False
    """True if a caller waits for the flow. Its messages have priority 9 instead of 4."""
    persistent: bool = True
    properties: dict[str, Any] = {}
    """Values for all later stages, set at the start of the flow or by a stage."""


class ReplyTo(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Address of an endpoint, or of the flow's starter, that waits for a reply."""

    to: str
    """Destination of the reply, such as /queue/order.place.stage.reserve: one queue, or one topic."""
    state: msgspec.Raw = EMPTY
    """State of the waiting stage. The reply carries it."""
    failure: str = ""
    """Queue of the waiting endpoint that handles a failure of the request; empty if the endpoint handles none."""
    report: str = ""
    """Queue or topic that gets a report if a message of the flow becomes a dead letter; empty without reports."""


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    version: int
    id: str
    """Id of this message. It stays the same when the message is redelivered, dead-lettered or moved."""
    flow: FlowContext
    kind: str
    """Kind of the message: request, reply, next, goto, send or publish."""
    sender: str
    """Service and, after a blank, queue of the stage that sent the message."""
    message: msgspec.Raw
    parent: str = ""
    """Id of the message whose stage sent this message; empty if no stage sent it."""
    state: msgspec.Raw = EMPTY
    """State of the stage that receives the message."""
    waiting: list[ReplyTo] = []
    """Addresses that wait for a reply, the outermost first. The next reply goes to the last address."""
    calls: int = 1
    """Length of the chain of messages from the start of the flow to this message, each sent by the stage that got the
    message before. A reply does not count: it has the number of the message whose stage sent it."""
    attachments: dict[str, bytes] = {}
    carrier: dict[str, str] = {}
    """Headers for tracing, such as traceparent, that interceptors have added."""
    recurring: bool = False
    """True if the broker sends this body several times, such as by cron. Each occurrence then is a message and a flow
    of its own (`as_occurrence`)."""

    @property
    def priority(self) -> int:
        return PRIORITY_INTERACTIVE if self.flow.interactive else PRIORITY


class FailureOptions(NamedTuple):
    """Options of a SEND that name the destinations told of a failure of its message; empty if there are none."""

    report_to: str = ""
    report_id: str = ""
    on_failure: tuple[str, ...] = ()


class VersionedEnvelope(msgspec.Struct, frozen=True):
    """Part of an envelope from which the version can be read, even if the rest cannot be decoded."""

    version: int
    flow: msgspec.Raw
    kind: str


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Envelope)
_VERSION_DECODER = msgspec.json.Decoder(VersionedEnvelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _ENCODER.encode(envelope)


def decode_envelope(body: bytes) -> Envelope:
    """Decode the body of a message. Raises: NotDecoded if the body is not an envelope of this version, or its id or a
    reply address is invalid"""
    try:
        envelope = _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_version(find_version(lambda: _VERSION_DECODER.decode(body)))
        raise NotDecoded(f"the body is not a message of stages: {error}") from error
    _check_version(envelope.version)
    if not envelope.id:
        # The inbox would take all messages without an id for the same one.
        raise NotDecoded("the body is not a message of stages: the field id of its envelope is empty")
    for each in envelope.waiting:
        if not _is_single_destination(each.to):
            # A sender may name one queue or topic for the reply, not any destination to which this service may send.
            raise NotDecoded(f"the reply address {each.to[:100]!r} is not a single queue or topic")
        # Headers name them with blanks between.
        if each.report and (" " in each.report or not _is_single_destination(each.report)):
            raise NotDecoded(f"the report address {each.report[:100]!r} is not a single queue or topic")
        if each.failure and (" " in each.failure or not is_dead_lettering(each.failure)):
            raise NotDecoded(f"the failure address {each.failure[:100]!r} is not a single queue")
    return envelope


def continued(
    envelope: Envelope,
    *,
    kind: str,
    id: str,
    sender: str,
    flow: FlowContext,
    message: msgspec.Raw,
    state: msgspec.Raw,
    waiting: list[ReplyTo],
    attachments: dict[str, bytes],
) -> Envelope:
    """Return the envelope of the message by which a stage that got `envelope` continues the flow. Its `calls` may be
    above CALLS_MAX."""
    return Envelope(
        version=VERSION,
        id=id,
        flow=flow,
        kind=kind,
        sender=sender,
        message=message,
        parent=envelope.id,
        state=state,
        waiting=waiting,
        calls=envelope.calls + (kind != "reply"),
        attachments=attachments,
    )


def as_occurrence(envelope: Envelope, due: str | None) -> Envelope:
    """Return the envelope of one occurrence of a recurring message. `due` is the header `truenext-due`. The ids are
    derived from `due`, so an occurrence has the same ids even if two schedules send it. A message without this header
    was not scheduled, and keeps its ids."""
    if due is None:
        return envelope
    id = occurrence_id(envelope.id, int(due))
    flow = msgspec.structs.replace(envelope.flow, id=id, started_ms=int(due))
    return msgspec.structs.replace(envelope, id=id, flow=flow, recurring=False)


def find_version(decode: Callable[[], VersionedEnvelope]) -> int:
    """Return the version that an undecodable envelope names; VERSION if it names none."""
    try:
        return decode().version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return VERSION


def describe_remedy(found: int, wrote: str) -> str:
    """Return the end of an error's text: the version that this truenext reads, and what to do. `wrote` is a verb, such
    as "sent": what the truenext of version `found` has done with the message."""
    remedy = "update truenext" if found > VERSION else f"use the version that {wrote} it"
    return f"this truenext reads version {VERSION}: {remedy}"


def _check_version(found: int) -> None:
    if found != VERSION:
        remedy = describe_remedy(found, "sent")
        raise NotDecoded(f"the body has version {found} of messages of stages, and {remedy}")


def _is_single_destination(address: str) -> bool:
    """Return whether the address is one queue or one topic. False for a list of destinations, and for a destination
    that belongs to a connection."""
    if not address.startswith(("/queue/", "/topic/")):
        return False
    try:
        return parse_address(address, "").kind in (DestinationKind.QUEUE, DestinationKind.TOPIC)
    except RemoteProtocolError:
        return False


def is_dead_lettering(address: str) -> bool:
    """Return whether the address is one queue whose messages can become dead letters."""
    return address.startswith("/queue/") and not address.startswith(_DEAD_LETTERS) and _is_single_destination(address)


def failure_handlers(waiting: list[ReplyTo]) -> tuple[str, ...]:
    """Return the queues that handle a failure of the message: those of the last waiting address first, at most
    HANDLERS_MAX."""
    return tuple(each.failure for each in reversed(waiting) if each.failure)[:HANDLERS_MAX]


def report_address(waiting: list[ReplyTo]) -> str:
    """Return the queue or topic that gets a report if the message becomes a dead letter: the `report` of the last
    waiting address that has one; empty if none has one."""
    return next((each.report for each in reversed(waiting) if each.report), "")


def failure_options(envelope: Envelope, destination: str) -> FailureOptions:
    """Return the options of a SEND of this message to `destination`. They name nothing if the destination keeps failed
    messages, or nothing waits for the flow."""
    waiting = envelope.waiting
    if not any(each.failure or each.report for each in waiting) or not is_dead_lettering(destination):
        return FailureOptions()
    flow_id = envelope.flow.id
    can_report = 0 < len(flow_id) <= REPORT_ID_LENGTH_MAX and "\0" not in flow_id
    report_to = report_address(waiting) if can_report else ""
    return FailureOptions(report_to, flow_id if report_to else "", failure_handlers(waiting))


def failures_of(queue: str, body: bytes) -> FailureOptions:
    """Return the options with which a message was sent to `queue`, as its body tells; empty if the body is not a
    message of stages."""
    try:
        return failure_options(decode_envelope(body), f"/queue/{queue}")
    except NotDecoded:
        return FailureOptions()
