"""Parsers of single header values: a number, true or false, a name, an id of a message.

Each raises RemoteProtocolError if the value is invalid; the error begins with the header.
"""

from collections.abc import Mapping

from truenext.errors import RemoteProtocolError
from truenext.model.limits import NAME_LENGTH_MAX
from truenext.model.numerals import are_digits

_DIGITS_MAX = 19
_DISPATCH_DIGITS = 10
_NUMBER_MAX = 10**_DIGITS_MAX - 1
"""Highest number unless a caller sets another limit. It has 19 digits."""


def require_header(what: str, headers: Mapping[str, str], name: str) -> str:
    """Return the value of a header that the frame must have. `what` names the frame in the error."""
    value = headers.get(name)
    if value is None:
        raise RemoteProtocolError(f"{what} without the header {name!r}")
    return value


def read_number(header: str, text: str, most: int = _NUMBER_MAX, unit: str = "") -> int:
    # Like `are_digits`, without a call: each message comes through here.
    if not (text.isascii() and text.isdigit()):
        raise RemoteProtocolError(f"{header} {text[:100]!r} is not a number (0 or more, in digits)")
    digits = text.lstrip("0")
    # Converting thousands of digits would take long.
    number = int(digits or "0") if len(digits) <= _DIGITS_MAX else most + 1
    if number > most:
        raise RemoteProtocolError(f"{header} {text[:100]} is more than {most}{unit}")
    return number


def read_boolean(header: str, text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise RemoteProtocolError(f"{header} {text[:100]!r} is not true or false")
    return lowered == "true"


def read_name(header: str, text: str) -> str:
    """Check that a name is not too long for the broker to remember, and return the name."""
    if len(text) > NAME_LENGTH_MAX:
        raise RemoteProtocolError(f"{header} of {len(text)} characters; at most {NAME_LENGTH_MAX}")
    return text


def read_ack_id(what: str, text: str) -> tuple[str, int, int]:
    """Return subscription, sequence and dispatch in the `ack` header of a MESSAGE. The dispatch is 0 if the header does
    not state it. `what` names the frame in the error."""
    digits, at, subscription = text.partition("@")
    sequence, dot, dispatch = digits.partition(".")
    if not at or not are_digits(sequence, _DIGITS_MAX) or (dot and not are_digits(dispatch, _DISPATCH_DIGITS)):
        raise RemoteProtocolError(f"{what} has the invalid id {text[:100]!r}: copy the ack header of the MESSAGE")
    return subscription, int(sequence), int(dispatch or 0)
