"""How a message's header lines are written and read.

`Message.header` is UTF-8 text of `name:value` lines, each ended by a line feed. Carriage return, line feed, colon and
backslash inside a name or value are escaped as in STOMP 1.2, section "Value Encoding".
"""

import re

from truenext.model.numerals import are_digits

DEAD_LETTER_HEADERS = frozenset(
    {
        *("truenext-dead-letter-cause", "truenext-dead-letter-timestamp"),
        *("truenext-original-destination", "truenext-original-priority", "truenext-original-persistent"),
        *("truenext-original-expires", "truenext-original-timestamp", "truenext-original-attempts"),
        *("truenext-original-first-cause", "truenext-original-last-cause"),
    }
)
"""What a dead letter says of itself (engine/lifecycle/redelivery.py). No client can say it of what it sends."""

SCHEDULE_PREFIX = "AMQ_SCHEDULED_"
SCHEDULE_HEADERS = frozenset(SCHEDULE_PREFIX + name for name in ("DELAY", "PERIOD", "REPEAT", "CRON", "TIME"))
"""Headers of a scheduled send: ActiveMQ's, and TIME of its successor."""
FIRST_OF_GROUP = "JMSXGroupFirstForConsumer"
HOP_BY_HOP_HEADERS = SCHEDULE_HEADERS | frozenset(
    {
        # What concerns the SEND alone, and what only the broker may say of a message.
        "receipt",
        "transaction",
        "browser",
        "truenext-producer",
        "truenext-number",
        "truenext-ttl",
        "truenext-gapless",
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
        FIRST_OF_GROUP,
    }
)
"""Headers between one client and the broker, which do not go on with a message: no stored message has them."""

_ESCAPES = {"\\": "\\\\", "\r": "\\r", "\n": "\\n", ":": "\\c"}
_UNESCAPES = {escape: character for character, escape in _ESCAPES.items()}
_NEEDS_ESCAPE = re.compile(r"[\\\r\n:]")
must_escape = _NEEDS_ESCAPE.search
"""Whether a name or value does not stand as it is."""
_ESCAPED = re.compile(r"\\.?", re.DOTALL)


def escape(text: str) -> str:
    r"""Make text safe as a name or value.

    >>> escape("a:b\n")
    'a\\cb\\n'
    """
    return _NEEDS_ESCAPE.sub(lambda match: _ESCAPES[match.group()], text)


def unescape(text: str) -> str:
    r"""The inverse of `escape`.

    >>> unescape("a\\cb\\n")
    'a:b\n'

    Raises: KeyError with the sequence, if it is not one of the four.
    """
    return _ESCAPED.sub(lambda match: _UNESCAPES[match.group()], text)


def encode_header_lines(headers: dict[str, str]) -> bytes:
    """Header lines of a message."""
    return "".join(f"{escape(name)}:{escape(value)}\n" for name, value in headers.items()).encode()


_GROUP = b"JMSXGroupID:"
_GROUP_SEQUENCE = b"JMSXGroupSeq:"


def group_of(header: bytes) -> str:
    r"""The group that a message belongs to; empty is none.

    >>> group_of(b"a:b\nJMSXGroupID:order 7\n"), group_of(b"a:b\n")
    ('order 7', '')
    """
    return _value(header, _GROUP)


def closes_group(header: bytes) -> bool:
    r"""The message is the last of its group for now.

    >>> closes_group(b"JMSXGroupID:g\nJMSXGroupSeq:-1\n"), closes_group(b"JMSXGroupSeq:0\n")
    (True, False)
    """
    value = _value(header, _GROUP_SEQUENCE)
    digits = value[1:]
    return value.startswith("-") and are_digits(digits) and digits.strip("0") != ""


def _value(header: bytes, start: bytes) -> str:
    """What follows on the first line that begins so; empty if none does."""
    start_at = len(start)
    if not header.startswith(start):
        start_at = header.find(b"\n" + start)
        if start_at < 0:
            return ""
        start_at += 1 + len(start)
    value = header[start_at : header.index(b"\n", start_at)].decode()
    return unescape(value) if "\\" in value else value


def decode_header_lines(header: bytes) -> dict[str, str]:
    """Names and values; where a name is repeated the first counts (STOMP 1.2, "Repeated Header Entries")."""
    headers: dict[str, str] = {}
    for line in header.decode().split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(unescape(name), unescape(value))
    return headers
