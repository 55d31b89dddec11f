"""Compatibility of a service with its former interface: finds changes that break messages under way, or other services.

The interface has the schemas of messages, states and replies. The new code must be able to read the messages and states
that the old code has written. A caller of the old code must be able to read the replies that the new code writes, so
replies are compared the other way round. If a stage is removed, messages in its queue have no consumer any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from truenext.stage.core.definitions import LocalEndpoint
from truenext.stage.core.schema import Schema, schema_of
from truenext.stage.introspection.mismatch import UNCERTAIN, Mismatch, find_mismatches

FORMAT: Final = 3
"""Format of a stored interface. Format 1 lacks names, members, defaults and sets. Format 2 lacks keys, and the names
and members in pydantic models. A comparison with such an interface would not find changes of these parts."""

_DEAD_LETTERED = "such a message becomes a dead letter"
_MISREAD = "messages that were sent before are read wrongly, without an error"
_DRAINED = "Once no process and no message of the old code is left"


class EndpointInterface(msgspec.Struct, frozen=True, omit_defaults=True):
    takes: Schema
    replies: Schema | None = None
    state: Schema | None = None
    topic: str = ""
    """Topic from which the endpoint consumes; empty if the endpoint consumes from queues."""
    stages: dict[str, Schema] = {}
    """Schema of each stage's message, by the stage's queue, without the first stage."""
    on_failure: str = ""
    """Queue of the stage of `on_failure`; empty without one."""


class ServiceInterface(msgspec.Struct, frozen=True):
    format: int
    service: str
    endpoints: dict[str, EndpointInterface]


class Incompatibility(msgspec.Struct, frozen=True):
    is_breaking: bool
    """True if the change breaks messages under way or all callers. False if it may break some callers, or nothing."""
    location: str
    """Endpoint or queue that the change affects."""
    change: str
    consequence: str
    advice: str


def interface_of(service: str, endpoints: Mapping[str, LocalEndpoint[Any, Any]]) -> ServiceInterface:
    return ServiceInterface(FORMAT, service, {name: _endpoint(each) for name, each in endpoints.items()})


def _endpoint(endpoint: LocalEndpoint[Any, Any]) -> EndpointInterface:
    return EndpointInterface(
        takes=schema_of(endpoint.takes.type),
        replies=None if endpoint.replies is None else schema_of(endpoint.replies.type),
        state=None if endpoint.state is None else schema_of(endpoint.state.type),
        topic="" if endpoint.subscribed_topic is None else endpoint.subscribed_topic.name,
        stages={each.queue: schema_of(each.takes.type) for each in endpoint.stages_in_order[1:]},
        on_failure="" if endpoint.failure_stage is None else endpoint.failure_stage.queue,
    )


def compare_interfaces(before: ServiceInterface, now: ServiceInterface) -> list[Incompatibility]:
    """Return the changes that break messages or callers, sorted by endpoint. If the two interfaces have different
    service names, a note comes first."""
    other = []
    if before.service != now.service:
        other.append(
            Incompatibility(
                False,
                now.service,
                f"the file describes another service, {before.service}",
                f"the findings below are useless, unless {before.service} is the former name of {now.service}",
                f"Compare {now.service} with the file that was written for it.",
            )
        )
    return other + [
        found
        for name, old in sorted(before.endpoints.items())
        for found in _compare_endpoint(name, old, now.endpoints.get(name))
    ]


def _compare_endpoint(name: str, old: EndpointInterface, new: EndpointInterface | None) -> Iterator[Incompatibility]:
    if old.topic:
        # No message waits in a topic, so a subscriber may go.
        if new is not None and new.topic == old.topic:
            yield from _compare_read(name, f"messages of topic {old.topic}", old.takes, new.takes)
        return
    if new is None or new.topic:
        yield Incompatibility(
            True,
            name,
            "the endpoint is gone",
            "messages that wait in its queues, or that others send to it, have no consumer",
            f"Keep the endpoint until no service sends to it, and its queues ({name} and {name}.stage.*) are empty.",
        )
        return
    yield from _compare_read(name, "its message", old.takes, new.takes)
    if old.state is not None and new.state is not None:
        yield from _compare_read(name, "its state", old.state, new.state)
    for queue, schema in sorted(old.stages.items()):
        if queue not in new.stages:
            yield _stage_removed(queue)
        else:
            yield from _compare_read(queue, "its message", schema, new.stages[queue])
    if old.on_failure and not new.on_failure:
        yield _on_failure_removed(old.on_failure)
    if old.replies is not None:
        yield from _compare_reply(name, old.replies, new.replies)


def _stage_removed(queue: str) -> Incompatibility:
    return Incompatibility(
        True,
        queue,
        "the stage is gone",
        "messages that wait in its queue, and replies that are on their way to it, have no consumer",
        "Keep this stage, and those that it leads to, at the end of the endpoint (docs/stages-running.md). "
        f"{_DRAINED}, and the stage's queue is empty, remove the stage.",
    )


def _on_failure_removed(queue: str) -> Incompatibility:
    return Incompatibility(
        True,
        queue,
        "on_failure is gone",
        "failures that wait in its queue, and those of requests that were sent before, have no consumer",
        f"Keep on_failure, and raise the failure's cause in it. {_DRAINED}, and its queue is empty, remove it.",
    )


def _compare_read(location: str, part: str, old: Schema, new: Schema) -> Iterator[Incompatibility]:
    """Yield the incompatibilities of messages that the old code has written and the new code reads."""
    for each in find_mismatches(old, new):
        yield Incompatibility(each.kind not in UNCERTAIN, location, *_change_of_read(f"{part}: {_field(each)}", each))


def _change_of_read(subject: str, each: Mismatch) -> tuple[str, str, str]:
    """Return change, consequence and advice for a mismatch in messages that the new code reads."""
    why = f"messages that were sent before may differ: {_DEAD_LETTERED}"
    match each.kind:
        case "field":
            return (
                f"{subject} is required now",
                f"messages that were sent before may lack the field: {_DEAD_LETTERED}",
                f"Give the field a default. {_DRAINED}, remove the default.",
            )
        case "type":
            return (
                f"{subject} was {each.written}, and is {each.expected} now",
                why,
                f"Take both ({each.written} | {each.expected}), or add a field of another name with a default, and "
                f"read either field. {_DRAINED}, remove the old field.",
            )
        case "value":
            return (
                f"{subject} was {each.written}, and must be {each.expected} now",
                why,
                f"Stop writing the value first, and still accept it. {_DRAINED}, remove the value.",
            )
        case "bound":
            return (
                f"{subject} has {each.expected} now, and had {each.written}",
                why,
                f"Stop writing values beyond the new limit first, and still accept them. {_DRAINED}, refuse them.",
            )
        case "meaning":
            return (
                f"{subject} was {each.written}, and is read as {each.expected} now",
                _MISREAD,
                f"Add a field of another name with a default, and read either field. {_DRAINED}, remove the old field.",
            )
        case "default":
            return (
                f"{subject} is left out if it is {each.written}, and is read as {each.expected} then",
                _MISREAD,
                f"Keep the default, or write defaults first (without omit_defaults). {_DRAINED}, change the default.",
            )
        case "renamed":
            return (
                f"{subject} has {each.written} no more, and has {each.expected} with a default: was one renamed?",
                "messages that were sent before have the old name, so the new field is read as its default",
                f"If so: read both fields for a while, the old one with a default, too. {_DRAINED}, remove the old "
                "field.",
            )
        case "replaced":
            return (
                f"{subject} was {each.written}, and is {each.expected} now: was it renamed?",
                "here fields have a position and no names, so the old field is read as the new field",
                "If it is another field, add it after all fields, with a default.",
            )


def _compare_reply(location: str, old: Schema, new: Schema | None) -> Iterator[Incompatibility]:
    """Yield the incompatibilities of replies that the new code writes and callers of the old code read."""
    if new is None:
        yield Incompatibility(
            True,
            location,
            "the endpoint replies nothing any more",
            "callers wait for ever",
            "Add a new endpoint, and keep this one until no service sends to it.",
        )
        return
    for each in find_mismatches(new, old):
        is_breaking = each.kind not in UNCERTAIN and each.kind != "field"
        yield Incompatibility(is_breaking, location, *_change_of_reply(f"its reply: {_field(each)}", each))


def _change_of_reply(subject: str, each: Mismatch) -> tuple[str, str, str]:
    """Return change, consequence and advice for a mismatch in replies that callers read."""
    if each.kind in ("meaning", "default"):
        change = (
            f"was {each.expected}, and is {each.written} now"
            if each.kind == "meaning"
            else f"is left out if it is {each.written}, and callers take it for {each.expected} then"
        )
        return (
            f"{subject} {change}",
            "callers that know the old type read the field wrongly, without an error",
            "Add a field of another name, let callers read that one, and then remove the old one.",
        )
    if each.kind in UNCERTAIN:
        return (
            f"{subject} has {each.written} now, instead of {each.expected}: was it renamed?",
            "callers that know the old name read a default, or another field, without an error",
            "If so: reply both fields for a while, and let callers read the new field.",
        )
    if each.kind == "field":
        return (
            f"{subject} may be missing now",
            "callers that need the field get a reply that becomes a dead letter",
            "Let callers do without the field first.",
        )
    return (
        f"{subject} was {each.expected}, and may be {each.written} now",
        "callers that read the old type get a reply that becomes a dead letter",
        "Add a field of another name, let callers read that one, and then remove the old one.",
    )


def _field(mismatch: Mismatch) -> str:
    return f"`{mismatch.path}`" if mismatch.path else "it"


def any_breaking(findings: Iterable[Incompatibility]) -> bool:
    return any(each.is_breaking for each in findings)
