"""Header lines of a message: functions that write and read `SentMessage.header`.

`SentMessage.header` is UTF-8 text of `name:value` lines, each ended by a line feed. Carriage return, line feed,
colon and backslash inside a name or value are escaped as in STOMP 1.2, section "Value Encoding".
"""

import re
from typing import NamedTuple

from truenext.model.numerals import are_digits

DEAD_LETTER_HEADERS = frozenset(
    {
        *("truenext-dead-letter-cause", "truenext-dead-letter-timestamp"),
        *("truenext-original-destination", "truenext-original-priority", "truenext-original-persistent"),
        *("truenext-original-expires", "truenext-original-timestamp", "truenext-original-attempts"),
        *("truenext-original-first-cause", "truenext-original-last-cause"),
        "truenext-failure",
    }
)
"""Headers that the broker adds to a dead letter, a report or a handled message (engine/lifecycle/redelivery.py)."""

DUE = "truenext-due"
"""Header that the broker adds to the message of a scheduled send: its due time in milliseconds since the epoch."""

ADDED_HEADERS = DEAD_LETTER_HEADERS | {DUE}
"""Headers that the broker adds to a stored message. No client can set them on a SEND."""

SCHEDULE_PREFIX = "AMQ_SCHEDULED_"
SCHEDULE_HEADERS = frozenset(SCHEDULE_PREFIX + name for name in ("DELAY", "PERIOD", "REPEAT", "CRON", "ZONE", "TIME"))
"""Headers of a scheduled send, as in ActiveMQ. AMQ_SCHEDULED_TIME and AMQ_SCHEDULED_ZONE are truenext's own: ActiveMQ
has neither a due time nor a time zone of the cron expression."""
FIRST_OF_GROUP = "JMSXGroupFirstForConsumer"
HOP_BY_HOP_HEADERS = SCHEDULE_HEADERS | frozenset(
    {
        # Headers that concern the SEND alone, and headers that only the broker may set.
        "receipt",
        "transaction",
        "browser",
        "truenext-producer",
        "truenext-number",
        "truenext-ttl",
        "truenext-gapless",
        "truenext-reject",
        "truenext-cause",
        "message-id",
        "subscription",
        "ack",
        "redelivered",
        "timestamp",
        "truenext-sequence",
        "truenext-deliveries",
        "truenext-attempts",
        "truenext-first-cause",
        "truenext-last-cause",
        "truenext-lost",
        "truenext-round",
        "truenext-unused",
        FIRST_OF_GROUP,
    }
)
"""Headers that concern one frame or one delivery. They are not forwarded, and no stored message has them."""

_UNESCAPES = {"\\\\": "\\", "\\r": "\r", "\\n": "\n", "\\c": ":"}
must_escape = re.compile(r"[\\\r\n:]").search
"""Return a match if a name or value has a character that must be escaped."""
_ESCAPED = re.compile(r"\\.?", re.DOTALL)


def escape(text: str) -> str:
    r"""Escape a text for use as the name or value of a header.

    >>> escape("a:b\n")
    'a\\cb\\n'
    """
    # One regular expression would take 30 times as long for a text that is full of these characters.
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n").replace(":", "\\c")


def unescape(text: str) -> str:
    r"""Return the text that `escape` has escaped.

    >>> unescape("a\\cb\\n")
    'a:b\n'

    Raises: KeyError with the escape sequence, if it is not one of the four.
    """
    # Replacing all escapes of one kind at a time takes a fiftieth of the time. No header has a NUL, so it stands for an
    # escaped backslash here.
    plain = text.replace("\\\\", "\0").replace("\\c", ":").replace("\\r", "\r").replace("\\n", "\n")
    if "\\" in plain or "\0" in text:
        return _ESCAPED.sub(lambda match: _UNESCAPES[match.group()], text)
    return plain.replace("\0", "\\")


def encode_header_lines(headers: dict[str, str]) -> bytes:
    """Return the header lines for these headers."""
    text = "".join([f"{name}:{value}\n" for name, value in headers.items()])
    if text.count(":") == text.count("\n") == len(headers) and "\\" not in text and "\r" not in text:
        # A shortcut: nothing has to be escaped.
        return text.encode()
    return "".join(f"{escape(name)}:{escape(value)}\n" for name, value in headers.items()).encode()


_GROUP = b"JMSXGroupID:"
_GROUP_SEQUENCE = b"JMSXGroupSeq:"
_REPLY_TO = b"reply-to:"
_DESTINATION = b"destination:"
_ORIGINAL_DESTINATION = b"truenext-original-destination:"


def group_of(header: bytes) -> str:
    r"""Return the group that a message belongs to; "" is none.

    >>> group_of(b"a:b\nJMSXGroupID:order 7\n"), group_of(b"a:b\n")
    ('order 7', '')
    """
    return _value(header, _GROUP)


def reply_to_of(header: bytes) -> str:
    r"""Return the address for replies to a message; "" is none.

    >>> reply_to_of(b"x-reply-to:a\nreply-to:/queue/b\nreply-to:/queue/c\n")
    '/queue/b'
    """
    return _value(header, _REPLY_TO)


def first_destination_of(header: bytes) -> str:
    r"""Return the address to which a message was first sent; "" if the header lines name none.

    >>> first_destination_of(b"destination:/queue/DLQ.a\ntruenext-original-destination:/queue/a\n")
    '/queue/a'
    """
    return _value(header, _ORIGINAL_DESTINATION) or _value(header, _DESTINATION)


class DeadLetterFacts(NamedTuple):
    """Values of headers with which the broker says where a dead letter comes from, and why it is one. They are escaped,
    and empty if the message lacks the header."""

    original_destination: bytes
    reason: bytes
    last_cause: bytes
    time_ms: bytes


def dead_letter_facts_of(header: bytes) -> DeadLetterFacts:
    r"""Return the facts about a dead letter; `decode_value` decodes them.

    >>> dead_letter_facts_of(b"truenext-dead-letter-cause:expired\ntruenext-dead-letter-timestamp:7\n")
    DeadLetterFacts(original_destination=b'', reason=b'expired', last_cause=b'', time_ms=b'7')
    """
    return DeadLetterFacts(
        _escaped_value(header, _ORIGINAL_DESTINATION),
        _escaped_value(header, b"truenext-dead-letter-cause:"),
        _escaped_value(header, b"truenext-original-last-cause:"),
        _escaped_value(header, b"truenext-dead-letter-timestamp:"),
    )


def closes_group(header: bytes) -> bool:
    r"""Return whether the dispatch of the message closes its group (C5.4).

    >>> closes_group(b"JMSXGroupID:g\nJMSXGroupSeq:-1\n"), closes_group(b"JMSXGroupSeq:0\n")
    (True, False)
    """
    value = _value(header, _GROUP_SEQUENCE)
    digits = value[1:]
    return value.startswith("-") and are_digits(digits) and digits.strip("0") != ""


def _value(header: bytes, start: bytes) -> str:
    """Return the value on the first line that begins with `start`; "" if there is none."""
    return decode_value(_escaped_value(header, start))


def _escaped_value(header: bytes, start: bytes) -> bytes:
    start_at = len(start)
    if not header.startswith(start):
        start_at = header.find(b"\n" + start)
        if start_at < 0:
            return b""
        start_at += 1 + len(start)
    return header[start_at : header.index(b"\n", start_at)]


def decode_value(escaped: bytes) -> str:
    """Return the value of a header, of which `escaped` is the form in header lines."""
    value = escaped.decode()
    return unescape(value) if "\\" in value else value


def decode_header_lines(header: bytes) -> dict[str, str]:
    """Return the headers by name. If a name is repeated, its first value counts (STOMP 1.2, "Repeated Header
    Entries")."""
    headers: dict[str, str] = {}
    is_escaped = b"\\" in header
    for line in header.decode().split("\n"):
        name, colon, value = line.partition(":")
        if colon and is_escaped:
            headers.setdefault(unescape(name), unescape(value))
        elif colon:
            headers.setdefault(name, value)
    return headers
