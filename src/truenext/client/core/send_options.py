"""What a SEND can ask for, and the frame that says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypedDict, Unpack

import msgspec

from truenext.client.core import frames
from truenext.model.limits import BODY_BYTES_MAX, PRODUCER_NUMBER_MAX, SCHEDULE_MS_MAX, TTL_MS_MAX
from truenext.model.order import PRIORITY_MAX


class SendOptions(TypedDict, total=False):
    """What a message is sent with; all times in seconds."""

    priority: int
    """0 to 9, 9 is first; 4 unless told."""
    persistent: bool
    """It survives a crash of the broker; True unless told."""
    ttl: float
    """It expires so long after the call; in a transaction after the commit, if it is scheduled after it is due.
    What has expired before it could be sent is not sent: TimeoutError."""
    delay: float
    """The broker keeps it so long before it becomes a message."""
    period: float
    """It is sent again after each period, `repeat` times."""
    repeat: int
    """How often more it is sent; -1 is for ever."""
    cron: str
    """It is sent at each of these times: five fields of cron, in UTC."""
    group: str
    """Messages of one group go to one consumer, one after the other."""
    closes_group: bool
    """With this message its group becomes free for another consumer."""
    reply_to: str
    """Where an answer is to be sent to, such as /queue/answers. `request` has one of its own."""
    correlation_id: str
    """By which whoever sent a question knows its answer."""
    content_type: str
    """What the body is, such as application/json; the broker does not look at it."""
    headers: Mapping[str, str]
    """Headers of the program's own. A selector can name them, with underscores in place of hyphens. 110 have room in a
    persistent message without other options; each option takes the room of one or two."""
    producer: str
    """A name of the caller's for repeats, with `number`: a message whose number is not higher than one that the broker
    has accepted under this name is not accepted again, and no error."""
    number: int
    """Rises with each send of `producer`; needs that."""


class Outgoing:
    """One message for `send_many`: its body, and what of its options differs from the others."""

    __slots__ = ("body", "options")

    def __init__(self, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        self.body = body
        self.options = options


class EncodedSend(msgspec.Struct, frozen=True):
    """What of a SEND does not depend on when it is written."""

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
    """It is always said, or is not the program's. Others that have an option may be said as headers, too."""
    return header in _RESERVED or header.startswith("truenext-")


_STR, _INT, _BOOL, _NUMBER = (str,), (int,), (bool,), (float, int)
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "priority": _INT,
    "persistent": _BOOL,
    "ttl": _NUMBER,
    "delay": _NUMBER,
    "period": _NUMBER,
    "repeat": _INT,
    "cron": _STR,
    "group": _STR,
    "closes_group": _BOOL,
    "reply_to": _STR,
    "correlation_id": _STR,
    "content_type": _STR,
    "headers": (Mapping,),
    "producer": _STR,
    "number": _INT,
}


_IS_PLAIN = re.compile(r"[\w.@/+=-]{1,128}", re.ASCII).fullmatch
"""Text that needs no escape, and less room than `frames.check_headers` leaves."""


def encode_send(destination: str, options: SendOptions) -> EncodedSend:
    """Raises: ValueError if an option is not what it may be"""
    if "headers" in options or "number" in options:
        return _encode_send(destination, options)
    correlation = options.get("correlation_id")
    if type(correlation) is str and _IS_PLAIN(correlation):
        # Each reply has one of its own, and is like the others otherwise.
        others = options.copy()
        del others["correlation_id"]
        encoded = encode_send(destination, others)
        return EncodedSend(encoded.head + f"correlation-id:{correlation}\n".encode(), encoded.ttl_s, None, 0)
    key = (destination, tuple(options.items()))
    try:
        cached = _cache.get(key)
    except TypeError:
        # What cannot be a key is no option, either.
        return _encode_send(destination, options)
    if cached is None:
        if len(_cache) >= _CACHE_ENTRIES_MAX:
            _cache.clear()
        cached = _cache[key] = _encode_send(destination, options)
    return cached


def _encode_send(destination: str, options: SendOptions) -> EncodedSend:
    unknown = options.keys() - SendOptions.__annotations__.keys()
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
            raise ValueError(f"{name} is no header of a program, or has been said by an option")
        headers[name] = value
    producer, number = options.get("producer"), options.get("number", 0)
    if (producer is None) != ("number" not in options):
        raise ValueError("producer and number are named together")
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
    # Not a number is not between them, either.
    if not 0.001 <= seconds <= max_ms / 1000:
        raise ValueError(f"{name} is 0.001 to {max_ms // 1000} seconds, not {seconds}")
    return round(seconds * 1000)


def ttl_line(left_s: float) -> str:
    """Of a time to live so much is left. Raises: TimeoutError if that is nothing"""
    left_ms = int(left_s * 1000)
    if left_ms < 1:
        raise TimeoutError("its time to live was over before it could be sent")
    return f"truenext-ttl:{left_ms}\n"


def encode_body(body: bytes | bytearray | memoryview | str) -> bytes:
    """Text is sent as UTF-8.

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
