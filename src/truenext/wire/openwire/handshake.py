"""Handshake of OpenWire: both sides send a WireFormatInfo, and each takes what both can.

The broker offers neither cache nor tight encoding nor stack traces, so that no client uses them: a client uses only
what both sides offer.
"""

from sys import maxsize
from typing import NamedTuple

from truenext.errors import Code, RemoteProtocolError
from truenext.model.limits import OPENWIRE_FRAME_BYTES_MAX
from truenext.model.loose_fields import FieldReader, Tag, TypedValue, encode_map, text_value
from truenext.version import VERSION
from truenext.wire.openwire.fields import encode_frame
from truenext.wire.openwire.structures import WireFormatInfo

OPENWIRE_VERSION = 12
INACTIVITY_MS = 30_000
"""Time after which a client takes a silent broker for lost, and the broker a silent client. ActiveMQ's default."""
INITIAL_DELAY_MS = 10_000
"""Time from the handshake until a client sends its first KeepAliveInfo, if nothing else. ActiveMQ's default."""
_INACTIVITY = "MaxInactivityDuration"


class Negotiated(NamedTuple):
    """Properties of a connection on which both sides have agreed."""

    keep_alive_ms: int
    """Time after which a silent side is taken for lost; 0 is never. After a third of it without another frame, a side
    sends a KeepAliveInfo."""
    frame_bytes_max: int
    """Bytes of the largest frame that the client takes, without the four bytes of its size."""


def encode_wire_format_info(inactivity_ms: int = INACTIVITY_MS) -> bytes:
    """Return the frame with the broker's offer."""
    properties = {
        "CacheEnabled": TypedValue(Tag.BOOLEAN, False),
        "TightEncodingEnabled": TypedValue(Tag.BOOLEAN, False),
        "StackTraceEnabled": TypedValue(Tag.BOOLEAN, False),
        "SizePrefixDisabled": TypedValue(Tag.BOOLEAN, False),
        "TcpNoDelayEnabled": TypedValue(Tag.BOOLEAN, True),
        # Without it a client would take no frame at all.
        "MaxFrameSize": TypedValue(Tag.LONG, OPENWIRE_FRAME_BYTES_MAX),
        _INACTIVITY: TypedValue(Tag.LONG, inactivity_ms),
        # ActiveMQ spells it so.
        "MaxInactivityDurationInitalDelay": TypedValue(Tag.LONG, min(inactivity_ms, INITIAL_DELAY_MS)),
        "ProviderName": text_value("truenext"),
        "ProviderVersion": text_value(VERSION),
    }
    return encode_frame(WireFormatInfo(OPENWIRE_VERSION, encode_map(properties)))


def negotiate(client: WireFormatInfo, inactivity_ms: int = INACTIVITY_MS) -> Negotiated:
    """Return what a client and the broker, which offers `inactivity_ms`, agree on.

    Raises: RemoteProtocolError if the client's version is too old, or its properties are invalid
    """
    if client.version < OPENWIRE_VERSION:
        raise RemoteProtocolError(
            f"OpenWire version {client.version}; this broker speaks version {OPENWIRE_VERSION}: use a client of "
            "ActiveMQ 5.13 or later",
            Code.NOT_SUPPORTED,
        )
    properties: dict[str, TypedValue] = {}
    if client.properties is not None:
        properties = FieldReader(client.properties).read_map() or {}
    client_ms = _number(properties, _INACTIVITY)
    frame_bytes_max = _number(properties, "MaxFrameSize")
    return Negotiated(
        keep_alive_ms=min(inactivity_ms, client_ms) if inactivity_ms > 0 and client_ms > 0 else 0,
        frame_bytes_max=min(OPENWIRE_FRAME_BYTES_MAX, frame_bytes_max if frame_bytes_max > 0 else maxsize),
    )


def _number(properties: dict[str, TypedValue], name: str) -> int:
    value = properties.get(name)
    return value.value if value is not None and isinstance(value.value, int) else 0
