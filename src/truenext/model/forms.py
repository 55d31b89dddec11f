"""Forms of messages: what engine and broker ask of a message, whichever form it has (message.py)."""

from truenext.model import header_lines, openwire_message
from truenext.model.destination import REMOTE_PREFIX
from truenext.model.message import SentMessage
from truenext.model.openwire_message import PhysicalName
from truenext.model.openwire_message import reading_ns as reading_ns

_REMOTE_PREFIX = REMOTE_PREFIX.encode()
"""Prefix of temporary queues and topics of other connections, in header lines. Its characters need no escapes there."""


def comparison_ns(message: SentMessage, base_ns: int, byte_ns: int, selectors: int = 1) -> int:
    """Return an upper estimate, in nanoseconds, of the time that `selectors` selectors take for a message. Together
    they take `base_ns` for any message, and `byte_ns` for each byte of its header lines."""
    ns = base_ns + byte_ns * len(message.header)
    if message.form:
        ns += reading_ns(message, byte_ns, selectors)
    return ns


def closes_group(message: SentMessage) -> bool:
    """Return whether the dispatch of the message closes its group (C5.4)."""
    if message.form:
        return openwire_message.closes_group(message)
    return header_lines.closes_group(message.header)


def may_name_temporary(message: SentMessage) -> bool:
    """Return whether the reply-to of a message may be a temporary queue or topic. False for most messages: quicker than
    reading the reply-to."""
    if message.form:
        return openwire_message.has_reply_to(message)
    return _REMOTE_PREFIX in message.header


def reply_to_address(message: SentMessage) -> str:
    """Return the address of the reply-to; "" if there is none."""
    if message.form:
        return openwire_message.reply_to_address(message)
    return header_lines.reply_to_of(message.header)


def reply_to_name(message: SentMessage) -> PhysicalName | None:
    """Return the reply-to as OpenWire names it; None if there is none, or OpenWire cannot name it."""
    if message.form:
        return openwire_message.reply_to_name(message)
    return openwire_message.physical_name(header_lines.reply_to_of(message.header))
