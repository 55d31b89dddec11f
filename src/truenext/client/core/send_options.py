"""Options of a SEND, and their encoding as a frame."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack, get_origin, get_type_hints

import msgspec

from truenext.client.core import frames
from truenext.model.failure_headers import ON_FAILURE, REPORT_ID, REPORT_TO
from truenext.model.limits import (
    BODY_BYTES_MAX,
    HANDLERS_MAX,
    PRODUCER_NUMBER_MAX,
    REPORT_ID_LENGTH_MAX,
    SCHEDULE_MS_MAX,
    TTL_MS_MAX,
)
from truenext.model.order import PRIORITY_MAX


class SendOptions(TypedDict, total=False):
    """Options of a message. All times are in seconds."""

    priority: int
    """Priority from 0 to 9. Messages of priority 9 come first; the default is 4."""
    persistent: bool
    """True, the default: the message survives a crash of the broker."""
    ttl: float
    """Time until the message expires. This time starts at the call; in a transaction at the commit; for a scheduled
    message when it is due. If the message expires before it can be sent, the call raises TimeoutError."""
    delay: float
    """Time for which the broker keeps the message before it sends it to its destination."""
    period: float
    """Time between two sends of a message that the broker sends several times, `repeat` times after the first."""
    repeat: int
    """Number of further sends after the first; -1 means without end."""
    cron: str
    """Times at which the broker sends the message: five fields of cron, in UTC or in `zone`."""
    zone: str
    """Time zone of `cron`, a name such as Europe/Oslo."""
    group: str
    """Message group. The messages of a group go to one consumer, one after the other."""
    closes_group: bool
    """True: this message is the last one of its group for the current consumer. The next message of the group may go to
    another consumer."""
    reply_to: str
    """Destination for a reply, such as /queue/answers. `request` sets this option itself."""
    correlation_id: str
    """Id that connects a reply with its request."""
    content_type: str
    """Type of the body, such as application/json; the broker does not read it."""
    report_to: str
    """Queue or topic that gets a report when the message becomes a dead letter. It needs the option `report_id`."""
    report_id: str
    """Correlation id of the report, 1 to 64 characters. It needs the option `report_to`."""
    on_failure: Sequence[str]
    """Destinations of up to 8 queues. Instead of becoming a dead letter, the message goes to the first of them. If it
    fails there, too, it goes to the next one."""
    headers: Mapping[str, str]
    """The program's own headers. A selector names a header with underscores in place of hyphens. A persistent message
    without other options has space for 110 headers; each option needs one or two of them."""
    producer: str
    """Name under which the program numbers its sends. If the broker has already accepted this `number` or a higher one
    under this name, it ignores the message, without an error."""
    number: int
    """Number of the send under the name `producer`; it rises with each send. Requires the option `producer`."""


class Outgoing:
    """Message for `send_many`: its body, and options that override the options of the call."""

    __slots__ = ("body", "options")

    def __init__(self, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        self.body = body
        self.options = options


class EncodedSend(msgspec.Struct, frozen=True):
    """Encoded SEND without the parts that depend on the time of writing."""

    head: bytes
    ttl_s: float | None
    producer: str | None
    number: int


_CACHE_ENTRIES_MAX = 1000
_cache: dict[tuple[str, tuple[tuple[str, object], ...], bool], EncodedSend] = {}
_RESERVED = frozenset(
    {
        *("destination", "receipt", "transaction", "content-length", "priority", "persistent"),
        *("message-id", "subscription", "ack", "timestamp", "redelivered"),
    }
)


def is_reserved(header: str) -> bool:
    """Return whether a program cannot set a header by its name."""
    return header in _RESERVED or header.startswith("truenext-")


_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    name: (float, int) if hint is float else (get_origin(hint) or hint,)
    for name, hint in get_type_hints(SendOptions).items()
}


is_plain_value = re.compile(r"[\w.@/+=-]{1,128}", re.ASCII).fullmatch
"""Match a text that needs no escape and is short enough for `frames.check_headers`."""


def encode_send(destination: str, options: SendOptions) -> EncodedSend:
    """Encode the options of a SEND. Raises: ValueError, TypeError for an invalid option"""
    if "headers" in options or "number" in options:
        return _encode_send(destination, options)
    # Messages often differ only in correlation id and report id, so the cache has heads without these.
    others, lines, has_report_id = options, "", False
    correlation = options.get("correlation_id")
    if type(correlation) is str and is_plain_value(correlation):
        others = options.copy()
        del others["correlation_id"]
        lines = f"correlation-id:{correlation}\n"
    report = options.get("report_id")
    if type(report) is str and is_plain_value(report) and len(report) <= REPORT_ID_LENGTH_MAX:
        has_report_id = True
        others = others.copy()
        del others["report_id"]
        lines += f"{REPORT_ID}:{report}\n"
    key = (destination, tuple(others.items()), has_report_id)
    try:
        cached = _cache.get(key)
    except TypeError:
        # An option that cannot be hashed is a list, or is invalid; `_encode_send` reports an invalid option.
        return _encode_send(destination, options)
    if cached is None:
        if len(_cache) >= _CACHE_ENTRIES_MAX:
            _cache.clear()
        cached = _cache[key] = _encode_send(destination, others, has_report_id=has_report_id)
    return EncodedSend(cached.head + lines.encode(), cached.ttl_s, None, 0) if lines else cached


def _encode_send(destination: str, options: SendOptions, *, has_report_id: bool = False) -> EncodedSend:
    """Encode the options. `has_report_id` is True if the message has a `report_id` that is not among the options,
    because the caller adds its header line."""
    unknown = options.keys() - _OPTION_TYPES.keys()
    if unknown:
        raise TypeError(f"send has no option {', '.join(sorted(unknown))}")
    if not isinstance(destination, str):
        raise TypeError(f"a destination must be text, not {destination!r}")
    for name, option in options.items():
        types = _OPTION_TYPES[name]
        if not isinstance(option, types) or (isinstance(option, bool) and bool not in types):
            raise TypeError(f"{name} must be {types[0].__name__}, not {option!r}")
    priority = options.get("priority", 4)
    if not 0 <= priority <= PRIORITY_MAX:
        raise ValueError(f"priority must be 0 to {PRIORITY_MAX}, not {priority}")
    headers = {"destination": destination}
    if options.get("persistent", True):
        headers["persistent"] = "true"
    if priority != 4:
        headers["priority"] = str(priority)
    _add_schedule(headers, options)
    group = options.get("group")
    if group:
        headers["JMSXGroupID"] = group
        if options.get("closes_group"):
            headers["JMSXGroupSeq"] = "-1"
    elif options.get("closes_group"):
        raise ValueError("closes_group needs a group")
    for name in ("reply_to", "correlation_id", "content_type"):
        option = options.get(name)
        if option:
            headers[name.replace("_", "-")] = str(option)
    _add_failure_headers(headers, options, has_report_id)
    for name, value in options.get("headers", {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"header {name!r} is {value!r}: name and value of a header must be text")
        if is_reserved(name) or name in headers:
            raise ValueError(f"header {name} cannot be set by a program, or is set by an option already, such as ttl=")
        headers[name] = value
    producer, number = options.get("producer"), options.get("number", 0)
    if (producer is None) != ("number" not in options):
        raise ValueError("producer and number must be set together")
    if not 0 <= number <= PRODUCER_NUMBER_MAX:
        raise ValueError(f"number must be 0 to {PRODUCER_NUMBER_MAX}, not {number}")
    ttl = options.get("ttl")
    if ttl is not None:
        _milliseconds("ttl", ttl, TTL_MS_MAX)
    frames.check_headers(headers)
    if producer is not None:
        frames.check_headers({"truenext-producer": producer})
    return EncodedSend(frames.encode_head("SEND", headers), ttl, producer, number)


def _add_schedule(headers: dict[str, str], options: SendOptions) -> None:
    if "delay" in options:
        headers["AMQ_SCHEDULED_DELAY"] = str(_milliseconds("delay", options["delay"], SCHEDULE_MS_MAX))
    if "period" in options:
        headers["AMQ_SCHEDULED_PERIOD"] = str(_milliseconds("period", options["period"], SCHEDULE_MS_MAX))
    if "repeat" in options:
        headers["AMQ_SCHEDULED_REPEAT"] = str(options["repeat"])
    if "cron" in options:
        headers["AMQ_SCHEDULED_CRON"] = options["cron"]
    if "zone" in options:
        headers["AMQ_SCHEDULED_ZONE"] = options["zone"]


def _add_failure_headers(headers: dict[str, str], options: SendOptions, has_report_id: bool) -> None:
    report_to, report_id = options.get("report_to"), options.get("report_id")
    if (report_to is None) != (report_id is None and not has_report_id):
        raise ValueError("report_to and report_id must be set together")
    if report_to is not None:
        headers[REPORT_TO] = report_to
    if report_id is not None:
        if not 1 <= len(report_id) <= REPORT_ID_LENGTH_MAX:
            raise ValueError(f"report_id must have 1 to {REPORT_ID_LENGTH_MAX} characters, not {len(report_id)}")
        headers[REPORT_ID] = report_id
    if "on_failure" in options:
        handlers = options["on_failure"]
        if isinstance(handlers, str) or not all(isinstance(each, str) for each in handlers):
            raise TypeError(f"on_failure must be a list of destinations, not {handlers!r}")
        if not 1 <= len(handlers) <= HANDLERS_MAX:
            raise ValueError(f"on_failure must have 1 to {HANDLERS_MAX} destinations, not {len(handlers)}")
        headers[ON_FAILURE] = " ".join(handlers)


def _milliseconds(name: str, seconds: float, max_ms: int) -> int:
    # NaN is not in this range, either.
    if not 0.001 <= seconds <= max_ms / 1000:
        raise ValueError(f"{name} must be 0.001 to {max_ms // 1000} seconds, not {seconds}")
    return round(seconds * 1000)


def ttl_line(left_s: float) -> str:
    """Return the header line for the remaining time to live, in ms. Raises: TimeoutError if no time remains"""
    left_ms = int(left_s * 1000)
    if left_ms < 1:
        raise TimeoutError("the ttl of the message was over before the message could be sent")
    return f"truenext-ttl:{left_ms}\n"


def encode_body(body: bytes | bytearray | memoryview | str) -> bytes:
    """Return a body as bytes; text is encoded as UTF-8.

    Raises: TypeError if the body is neither text nor bytes; ValueError if it is too large
    """
    if type(body) is not bytes:
        if isinstance(body, str):
            body = body.encode()
        elif isinstance(body, bytearray | memoryview):
            body = bytes(body)
        else:
            raise TypeError(
                f"a body must be bytes or text, not {type(body).__name__}: encode it first, as JSON for example"
            )
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a body of {len(body)} bytes is too large: at most {BODY_BYTES_MAX}")
    return body
