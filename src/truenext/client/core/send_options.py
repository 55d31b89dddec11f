"""Options of a SEND, and the frame that carries them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypedDict, Unpack, get_origin, get_type_hints

import msgspec

from truenext.client.core import frames
from truenext.model.limits import BODY_BYTES_MAX, PRODUCER_NUMBER_MAX, SCHEDULE_MS_MAX, TTL_MS_MAX
from truenext.model.order import PRIORITY_MAX


class SendOptions(TypedDict, total=False):
    """Options of a message; all times in seconds."""

    priority: int
    """Priority from 0 to 9; 9 is first, 4 the default."""
    persistent: bool
    """The message survives a crash of the broker; True by default."""
    ttl: float
    """Time until the message expires, from the call on; in a transaction from the commit on, and for a scheduled
    message from when it is due. A message that expires before it can be sent raises TimeoutError."""
    delay: float
    """Time until the broker sends the message to its destination."""
    period: float
    """Time after which the message is sent again, `repeat` times."""
    repeat: int
    """Number of further sends; -1 is without end."""
    cron: str
    """Times at which the message is sent: five fields of cron, in UTC."""
    group: str
    """Message group, whose messages go to one consumer, one after the other."""
    closes_group: bool
    """The group becomes free for another consumer with this message."""
    reply_to: str
    """Destination for a reply, such as /queue/answers. `request` sets its own."""
    correlation_id: str
    """Id by which the sender of a request recognizes the reply."""
    content_type: str
    """Type of the body, such as application/json; the broker does not read it."""
    headers: Mapping[str, str]
    """Headers of the program's own. Selectors name them with underscores in place of hyphens. A persistent message
    without other options has space for 110; each option takes one or two of these."""
    producer: str
    """Name under which the program numbers its sends: the broker ignores a message, without an error, if its
    `number` is not higher than one that it has accepted under this name."""
    number: int
    """Number that rises with each send under the name `producer`; needs `producer`."""


class Outgoing:
    """Message for `send_many`: its body, and options that override those of the call."""

    __slots__ = ("body", "options")

    def __init__(self, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        self.body = body
        self.options = options


class EncodedSend(msgspec.Struct, frozen=True):
    """Part of a SEND that does not depend on when it is written."""

    head: bytes
    ttl_s: float | None
    producer: str | None
    number: int


_CACHE_ENTRIES_MAX = 1000
_cache: dict[tuple[str, tuple[tuple[str, object], ...]], EncodedSend] = {}
_RESERVED = frozenset(
    {
        *("destination", "receipt", "transaction", "content-length", "priority", "persistent"),
        *("message-id", "subscription", "ack", "timestamp", "redelivered"),
    }
)


def is_reserved(header: str) -> bool:
    """Return whether only the client or the broker sets a header; others that have an option may be set by name."""
    return header in _RESERVED or header.startswith("truenext-")


_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    name: (float, int) if hint is float else (get_origin(hint) or hint,)
    for name, hint in get_type_hints(SendOptions).items()
}


_IS_PLAIN = re.compile(r"[\w.@/+=-]{1,128}", re.ASCII).fullmatch
"""Match text that needs no escape, and is shorter than `frames.check_headers` allows."""


def encode_send(destination: str, options: SendOptions) -> EncodedSend:
    """Encode the options of a SEND. Raises: ValueError, TypeError for an invalid option"""
    if "headers" in options or "number" in options:
        return _encode_send(destination, options)
    correlation = options.get("correlation_id")
    if type(correlation) is str and _IS_PLAIN(correlation):
        # Each reply has a correlation id of its own, and is otherwise like the others.
        others = options.copy()
        del others["correlation_id"]
        encoded = encode_send(destination, others)
        return EncodedSend(encoded.head + f"correlation-id:{correlation}\n".encode(), encoded.ttl_s, None, 0)
    key = (destination, tuple(options.items()))
    try:
        cached = _cache.get(key)
    except TypeError:
        # An option that cannot be hashed is invalid, and is reported there.
        return _encode_send(destination, options)
    if cached is None:
        if len(_cache) >= _CACHE_ENTRIES_MAX:
            _cache.clear()
        cached = _cache[key] = _encode_send(destination, options)
    return cached


def _encode_send(destination: str, options: SendOptions) -> EncodedSend:
    unknown = options.keys() - _OPTION_TYPES.keys()
    if unknown:
        raise TypeError(f"send has no option {', '.join(sorted(unknown))}")
    if not isinstance(destination, str):
        raise TypeError(f"a destination is text, not {destination!r}")
    for name, option in options.items():
        types = _OPTION_TYPES[name]
        if not isinstance(option, types) or (isinstance(option, bool) and bool not in types):
            raise TypeError(f"{name} is {types[0].__name__}, not {option!r}")
    priority = options.get("priority", 4)
    if not 0 <= priority <= PRIORITY_MAX:
        raise ValueError(f"priority is 0 to {PRIORITY_MAX}, not {priority}")
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
    for name, value in options.get("headers", {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"header {name!r} is {value!r}: headers are text")
        if is_reserved(name) or name in headers:
            raise ValueError(f"header {name} cannot be set by a program, or is set by an option already, such as ttl=")
        headers[name] = value
    producer, number = options.get("producer"), options.get("number", 0)
    if (producer is None) != ("number" not in options):
        raise ValueError("producer and number must be set together")
    if not 0 <= number <= PRODUCER_NUMBER_MAX:
        raise ValueError(f"number is 0 to {PRODUCER_NUMBER_MAX}, not {number}")
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


def _milliseconds(name: str, seconds: float, max_ms: int) -> int:
    # NaN is not in this range, either.
    if not 0.001 <= seconds <= max_ms / 1000:
        raise ValueError(f"{name} is 0.001 to {max_ms // 1000} seconds, not {seconds}")
    return round(seconds * 1000)


def ttl_line(left_s: float) -> str:
    """Return the header line for the remaining time to live. Raises: TimeoutError if none remains"""
    left_ms = int(left_s * 1000)
    if left_ms < 1:
        raise TimeoutError("the ttl of the message was over before the message could be sent")
    return f"truenext-ttl:{left_ms}\n"


def encode_body(body: bytes | bytearray | memoryview | str) -> bytes:
    """Return a body as bytes, text as UTF-8.

    Raises: TypeError; ValueError if it is too large
    """
    if type(body) is not bytes:
        if isinstance(body, str):
            body = body.encode()
        elif isinstance(body, bytearray | memoryview):
            body = bytes(body)
        else:
            raise TypeError(f"a body is bytes or text, not {type(body).__name__}: encode it first, as JSON for example")
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a body of {len(body)} bytes is too large: at most {BODY_BYTES_MAX}")
    return body
