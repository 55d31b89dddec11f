"""Start of a flow, by a stage or a program: its options, its context and its first message."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import ceil
from typing import Any, TypedDict

import msgspec

from truenext.flows.envelope import EMPTY, VERSION, Envelope, FlowContext, ReplyTo
from truenext.model.limits import SCHEDULE_MS_MAX, SCHEDULE_TIME_MAX, TTL_MS_MAX
from truenext.stage.core.codec import check_properties, encode_any
from truenext.stage.core.definitions import Endpoint, LocalEndpoint, Topic
from truenext.stage.core.errors import FlowError
from truenext.stage.core.outbox_unit import Delay
from truenext.stage.core.output import Output, OutputMessage, checked_attachments
from truenext.stage.core.signature import is_assignable


class FlowOptions(TypedDict, total=False):
    """Options of a new flow."""

    interactive: bool
    """True if a caller waits. Then all messages of the flow have priority 9 instead of 4, and each stage processes them
    with separate workers. By default False; a flow that a stage starts inherits the value of the stage's flow."""
    persistent: bool
    """True if the messages of the flow survive a crash of the broker. By default True; a flow that a stage starts
    inherits the value of the stage's flow."""
    ttl: float
    """Lifetime of the flow in seconds, 0.001 or more. After that time its message expires, so no further stage starts.
    The time begins when the broker has the first message; with `initiate(session)`, when the database has it; with
    `delay` or `at`, when the first message is due. By default a flow never expires."""
    delay: float
    """Seconds until the first message is due, 0 or more. Until then the broker keeps the message, and no stage runs.
    The time begins when the broker has the message; with `initiate(session)`, when the database has it. `ask`
    allows a delay only with a key."""
    at: datetime
    """Time at which the first message is due, with a time zone. A past time counts as now. Not together with `delay`.
    `ask` allows it only with a key."""
    properties: Mapping[str, Any]
    """Values that JSON can hold, for all stages of the flow. If a stage starts the flow, they are added to the
    properties of the stage's flow."""
    attachments: Mapping[str, bytes]
    """Bytes by name, which only the first message carries."""


def child_flow_context(
    output: Output, now_ms: int, trace: str, parent: FlowContext, options: FlowOptions
) -> FlowContext:
    """Return the context of a flow that a stage starts. Its name is `parent|child`; for a trace `!child` it is `child`.

    Raises: FlowError if the trace or an option is invalid
    """
    own = trace.removeprefix("!")
    if own == trace:
        own = f"{parent.trace}|{trace}" if trace else parent.trace
    return new_flow_context(output, now_ms, own, parent, options)


def new_flow_context(
    output: Output, now_ms: int, trace: str, parent: FlowContext | None, options: FlowOptions
) -> FlowContext:
    unknown = options.keys() - FlowOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a flow has no option {', '.join(sorted(unknown))}")
    if not isinstance(trace, str) or not trace:
        expected = "trace is the name of the flow, such as the number of an order: a text that is not empty"
        raise FlowError(f"{expected}, not {trace!r}")
    ttl = options.get("ttl")
    if ttl is not None and not (isinstance(ttl, int | float) and 0.001 <= ttl <= TTL_MS_MAX / 1000):
        raise FlowError(f"ttl must be a number of seconds, 0.001 to {TTL_MS_MAX // 1000}, not {ttl!r}")
    for name in ("interactive", "persistent"):
        if not isinstance(options.get(name, True), bool):
            raise FlowError(f"{name} must be True or False, not {options.get(name)!r}")
    properties = options.get("properties", {})
    if not isinstance(properties, Mapping):
        raise FlowError(f"properties must be a mapping of names to values, not {properties!r}")
    properties = dict(properties)
    check_properties(properties)
    return FlowContext(
        id="",
        trace=trace,
        started_ms=now_ms,
        started_by=output.sender,
        interactive=options.get("interactive", parent is not None and parent.interactive),
        persistent=options.get("persistent", parent is None or parent.persistent),
        properties=properties if parent is None else {**parent.properties, **properties},
    )


class FirstMessage(msgspec.Struct, frozen=True):
    """Encoded first message of a flow."""

    to: Endpoint[Any, Any] | Topic[Any]
    message: msgspec.Raw
    state: msgspec.Raw
    waiting: list[ReplyTo]


def encode_first_message(
    to: Endpoint[Any, Any] | Topic[Any],
    message: object,
    *,
    state: object = None,
    reply_to: Endpoint[Any, Any] | Topic[Any] | None = None,
    reply_state: object = None,
    report_to: str = "",
) -> FirstMessage:
    """Check and encode the first message of a flow, its states, and the address of its reply. `report_to` is the
    destination that gets a report if a message of the flow becomes a dead letter; empty without reports.

    Raises: FlowError if an argument is invalid, or `reply_to` takes another type than `to` replies
    """
    waiting = []
    if reply_to is not None:
        if not isinstance(reply_to, Endpoint | Topic):
            raise FlowError(f"reply_to must be an endpoint or a topic, not {reply_to!r}")
        replies = to.replies if isinstance(to, Endpoint) else None
        if replies is None:
            raise FlowError(
                f"{to.name} replies nothing, so {reply_to.name} would never get a reply: leave out reply_to"
            )
        if not is_assignable(reply_to.takes.type, replies.type):
            raise FlowError(f"{to} replies another type than {reply_to} takes")
        failure = reply_to.failure_destination if isinstance(reply_to, LocalEndpoint) else ""
        waiting.append(ReplyTo(reply_to.destination, state_for(reply_to, reply_state), failure, report_to))
    elif reply_state is not None:
        raise FlowError("reply_state is the state for reply_to, but reply_to is missing: set both, or neither")
    return FirstMessage(to, to.takes.encode(message), state_for(to, state), waiting)


def delay_of(delay: object) -> Delay | None:
    """Return the delay that a program has set in seconds; None if it is 0. Raises: FlowError if the value is invalid"""
    if isinstance(delay, bool) or not (isinstance(delay, int | float) and 0 <= delay <= SCHEDULE_MS_MAX / 1000):
        raise FlowError(f"delay must be a number of seconds, 0 to {SCHEDULE_MS_MAX // 1000} (100 years), not {delay!r}")
    # Rounded up: no message comes early.
    return Delay(ceil(delay * 1000)) if delay else None


def _delay_until(at: object, now_ms: int) -> Delay:
    """Return the delay until a time. Raises: FlowError if it is not a datetime with a time zone, or too late"""
    if not isinstance(at, datetime):
        raise FlowError(f"at must be a datetime with a time zone, not {at!r}; for a number of seconds use delay")
    if at.utcoffset() is None:
        raise FlowError(
            f"at is {at.isoformat()}, without a time zone: use datetime.now(UTC), or "
            "datetime(..., tzinfo=ZoneInfo('Europe/Oslo'))"
        )
    at_ms = max(ceil(at.timestamp() * 1000), 1)
    if at_ms > SCHEDULE_TIME_MAX:
        raise FlowError(f"at is {at.isoformat()}: the latest time is in the year 2169")
    return Delay(max(at_ms - now_ms, 0), at_ms)


def start_flow(
    output: Output, context: FlowContext, first: FirstMessage, options: FlowOptions, parent: str = ""
) -> str:
    """Add the first message of a flow to `output`, and return its id. Raises: FlowError if an option is invalid"""
    delay = None
    if "at" in options:
        if "delay" in options:
            raise FlowError("delay and at both set when the flow begins: use only one of them")
        delay = _delay_until(options["at"], context.started_ms)
    elif "delay" in options:
        delay = delay_of(options["delay"])
    to, id = first.to, output.new_id()
    envelope = Envelope(
        version=VERSION,
        id=id,
        flow=msgspec.structs.replace(context, id=id),
        kind="publish" if isinstance(to, Topic) else "request" if first.waiting else "send",
        sender=output.sender,
        message=first.message,
        parent=parent,
        state=first.state,
        waiting=first.waiting,
        attachments=checked_attachments(options.get("attachments")),
    )
    output.outgoing.append(OutputMessage(to.destination, envelope, ttl_s=options.get("ttl"), delay=delay))
    return id


def check_endpoint(to: object) -> None:
    """Check that `to` is an endpoint. Raises: FlowError if it is not"""
    if not isinstance(to, Endpoint):
        advice = "publish to a topic" if isinstance(to, Topic) else "pass the Endpoint, not its name"
        raise FlowError(f"{to!r} is not an endpoint: {advice}")


def check_topic(to: object) -> None:
    """Check that `to` is a topic. Raises: FlowError if it is not"""
    if not isinstance(to, Topic):
        raise FlowError(f"{to!r} is not a topic" + (": send to it" if isinstance(to, Endpoint) else ""))


def state_for(to: Endpoint[Any, Any] | Topic[Any], state: object) -> msgspec.Raw:
    """Encode the state for the first stage of `to`. The state of another service's endpoint is not checked, because its
    type is not known here.

    Raises: FlowError if the state is not of the endpoint's type, or the endpoint has no state
    """
    if state is None:
        return EMPTY
    if not isinstance(to, LocalEndpoint):
        return encode_any(state)
    if to.state is None:
        raise FlowError(f"{to.name} has no state: leave the state out, or define the endpoint with state=...")
    return to.state.encode(state)
