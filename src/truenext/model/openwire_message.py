"""OpenWire form of a message: slices of the producer's own bytes, which each dispatch joins with the broker's fields.

`SentMessage.body` of this form (OPENWIRE_FORM):

    type             u8     23 to 28, the number of the message's class
    flags            u8     1: compressed, 2: droppable
    sequence         i64    producer's number in the message id
    ends             6 u32  positions at which the next slices begin, and at which the content begins
    producer id      string connection, long producer, long session
    destination      nested, as first sent
    text of the id   string, null if producer and sequence are the id
    group            string group, int number in the group, string correlation id
    before content   nested reply-to, long time, string type
    content          byte string
    properties       byte string with a map

All fields are loose (loose_fields.py). Fields that belong to the broker are not stored: persistence, expiry and
priority are those of the SentMessage, and its `header` has the lines that the broker has added.

A message of either form can be read as the other: `header_lines` and `stomp_message` give the lines and body that STOMP
clients get, `openwire_body` the body in OpenWire form of a message that came from STOMP.

    JMS                       header line
    destination               destination, as an address of truenext
    JMSCorrelationID          correlation-id
    JMSReplyTo                reply-to
    JMSType                   type
    JMSXGroupID, JMSXGroupSeq JMSXGroupID, JMSXGroupSeq
    text, bytes               the body; decompressed, if it is not too long then
    map, stream, object       amq-msg-type, and the encoded content as body
    content still compressed  content-encoding
    property of any type      its text, if a STOMP client could have sent this header
"""

import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from math import isfinite, isnan
from typing import NamedTuple

from msgspec.structs import replace

from truenext.errors import RemoteProtocolError
from truenext.model.header_lines import (
    ADDED_HEADERS,
    HOP_BY_HOP_HEADERS,
    decode_header_lines,
    encode_header_lines,
    first_destination_of,
)
from truenext.model.limits import (
    BODY_BYTES_MAX,
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    MAP_DEPTH_MAX,
    MAP_VALUES_MAX,
    PROPERTY_VALUES_MAX,
)
from truenext.model.loose_fields import (
    STRING_BYTES_MAX,
    FieldReader,
    Tag,
    TypedValue,
    clamp_int,
    decode_modified_utf8,
    encode_bytes,
    encode_entries,
    encode_map,
    encode_modified_utf8,
    encode_string,
    text_value,
    to_utf8,
)
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.numerals import are_digits
from truenext.model.values import HEADER_PROPERTIES, TypedText, Value

PLAIN, BYTES, MAP, OBJECT, STREAM, TEXT = range(23, 29)
"""Type numbers of messages."""
COMPRESSED, DROPPABLE = 1, 2
"""Flags of a body."""

BODY_HEAD = struct.Struct(">BBqIIIIII")
_GROUP_END, _GROUP_END_AT = struct.Struct(">I"), 22
"""End of the group, where the fields before the content begin, and its position in a body."""
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")

LAST_CAUSE_PROPERTY = "dlqDeliveryFailureCause"
"""Property of a dead letter: why it failed last, as in ActiveMQ."""
_LAST_CAUSE = "truenext-original-last-cause"
_KINDS = {MAP: "map", OBJECT: "object", STREAM: "stream"}
"""Values of amq-msg-type, for types whose content STOMP clients get as it is."""
_KIND = "amq-msg-type"
_RESERVED = frozenset(
    {
        *("destination", "correlation-id", "reply-to", "priority", "persistent", "expires", "content-length", _KIND),
        *("JMSXGroupID", "JMSXGroupSeq", ""),
    }
)
"""Names of header lines that are no properties."""
_NEVER_LINES = _RESERVED | HOP_BY_HOP_HEADERS | ADDED_HEADERS
"""Names of properties that become no header lines, because a STOMP client could not have sent them."""
_LINE_MAX = HEADER_BYTES_MAX // 16
"""Characters of JMS headers that become header lines: four of them fit into those of a SEND, whatever their bytes."""
_NO_TEXT = frozenset({Tag.NULL, Tag.BYTES, Tag.MAP, Tag.LIST})
"""Types of properties that have no text."""

_LINES = _RESERVED | {"type"} | HEADER_PROPERTIES.keys()
"""Names in selectors that are no properties, if the message has no property of this name."""
_NESTING = frozenset({Tag.MAP, Tag.LIST})
_SIZES: dict[int, int] = {
    **dict.fromkeys((Tag.NULL,), 0),
    **dict.fromkeys((Tag.BOOLEAN, Tag.BYTE), 1),
    **dict.fromkeys((Tag.CHARACTER, Tag.SHORT), 2),
    **dict.fromkeys((Tag.INTEGER, Tag.FLOAT), 4),
    **dict.fromkeys((Tag.LONG, Tag.DOUBLE), 8),
}
"""Bytes of the values of a type, without the tag."""
_MESSAGE_BYTES = 1024
"""Bytes that ActiveMQ counts for a message without content and properties."""
_MAP_AT = 9
"""Bytes before the entries of the properties: presence, length and count."""
_ENTRY_BYTES_MIN = 3
"""Bytes of an entry of a map: length of the name, and tag."""
_READING_NS = 30_000
_PROPERTY_NS = 800
"""Estimated nanoseconds that a selector takes to read a message: for all other fields, and for each property."""

QUEUE, TOPIC, TEMPORARY_QUEUE, TEMPORARY_TOPIC = range(100, 104)
"""Type numbers of destinations."""
_SCHEMES = {
    QUEUE: "queue://",
    TOPIC: "topic://",
    TEMPORARY_QUEUE: "temp-queue://",
    TEMPORARY_TOPIC: "temp-topic://",
}
_ADDRESS_STARTS = {
    QUEUE: "/queue/",
    TOPIC: "/topic/",
    TEMPORARY_QUEUE: "/remote-temp-queue/",
    TEMPORARY_TOPIC: "/remote-temp-topic/",
}


class PhysicalName(NamedTuple):
    """Destination as OpenWire names it: type number and name."""

    type: int
    name: str

    @property
    def qualified(self) -> str:
        """Name with its scheme, as JMSDestination in selectors."""
        return _SCHEMES[self.type] + self.name

    @property
    def address(self) -> str:
        """Address by which STOMP clients name the destination. In a composite name each part may have a scheme."""
        return ",".join([_address(self.type, part.strip()) for part in self.name.split(",")])

    def encode(self) -> bytes:
        """Return the destination as a nested field."""
        return b"\1%c%b" % (self.type, encode_string(self.name))


def _address(kind: int, name: str) -> str:
    for each, scheme in _SCHEMES.items():
        if name.startswith(scheme):
            kind, name = each, name.removeprefix(scheme)
            break
    if kind >= TEMPORARY_QUEUE and "/" not in name:
        # Named by a JMS client: connection id, colon, number.
        owner, _, number = name.rpartition(":")
        name = f"{owner}/{number}"
    return _ADDRESS_STARTS[kind] + name


def physical_name(address: str) -> PhysicalName | None:
    """Return the destination that an address of truenext names; None if OpenWire cannot name it.

    A temporary destination of a JMS client has the name that the client gave: connection id, colon, number. One of a
    STOMP client has a slash instead of the colon.

    >>> physical_name("/queue/a,/topic/b")
    PhysicalName(type=100, name='a,topic://b')
    >>> physical_name("/remote-temp-queue/ID:host-1:1/3").name
    'ID:host-1:1:3'
    """
    parts: list[PhysicalName] = []
    for each in address.split(","):
        for kind, start in _ADDRESS_STARTS.items():
            if each.startswith(start):
                name = each.removeprefix(start)
                if kind >= TEMPORARY_QUEUE:
                    owner, _, number = name.partition("/")
                    name = f"{owner}:{number}" if ":" in owner and are_digits(number) else name
                parts.append(PhysicalName(kind, name))
                break
        else:
            return None
    first, *others = parts
    names = [first.name, *[one.name if one.type == first.type else one.qualified for one in others]]
    return PhysicalName(first.type, ",".join(names))


class OpenWireSlices(NamedTuple):
    """Parts of a body in OpenWire form."""

    type: int
    flags: int
    sequence: int
    producer_id: bytes
    destination: bytes
    text_view: bytes
    group: bytes
    before_content: bytes
    content: bytes
    properties: bytes

    def join(self) -> bytes:
        producer_end = BODY_HEAD.size + len(self.producer_id)
        destination_end = producer_end + len(self.destination)
        text_end = destination_end + len(self.text_view)
        group_end = text_end + len(self.group)
        content_at = group_end + len(self.before_content)
        content_end = content_at + len(self.content)
        ends = (producer_end, destination_end, text_end, group_end, content_at, content_end)
        return b"".join((BODY_HEAD.pack(self.type, self.flags, self.sequence, *ends), *self[3:]))


def split_body(body: bytes) -> OpenWireSlices:
    kind, flags, sequence, producer_end, destination_end, text_end, group_end, content_at, content_end = (
        BODY_HEAD.unpack_from(body)
    )
    return OpenWireSlices(
        kind,
        flags,
        sequence,
        body[BODY_HEAD.size : producer_end],
        body[producer_end:destination_end],
        body[destination_end:text_end],
        body[text_end:group_end],
        body[group_end:content_at],
        body[content_at:content_end],
        body[content_end:],
    )


class JmsHeaders(NamedTuple):
    """JMS headers that a producer sets, apart from those that are fields of a SentMessage."""

    destination: PhysicalName | None
    """Destination as first sent."""
    group: str | None
    group_sequence: int
    correlation_id: str | None
    reply_to: PhysicalName | None
    timestamp_ms: int
    """Time at which the producer has sent the message."""
    jms_type: str | None


def jms_headers(message: SentMessage) -> JmsHeaders:
    """Return the JMS headers of a message in OpenWire form."""
    reader = FieldReader(message.body)
    (_, _, _, producer_end, _, text_end, *_) = BODY_HEAD.unpack_from(message.body)
    reader.at = producer_end
    destination = _read_destination(reader)
    reader.at = text_end
    group, number, correlation_id = reader.read_string(), reader.read_int(), reader.read_string()
    reply_to, timestamp_ms, jms_type = _read_destination(reader), reader.read_long(), reader.read_string()
    return JmsHeaders(destination, group, number, correlation_id, reply_to, timestamp_ms, jms_type)


def _read_destination(reader: FieldReader) -> PhysicalName | None:
    return PhysicalName(reader.read_byte(), reader.read_string() or "") if reader.read_boolean() else None


def group_of_message(message: SentMessage) -> str:
    """Return the group that a message in OpenWire form belongs to; "" is none."""
    reader = FieldReader(message.body, BODY_HEAD.unpack_from(message.body)[5])
    return _storable(reader.read_string() or "")


def closes_group(message: SentMessage) -> bool:
    """Return whether the dispatch of a message in OpenWire form closes its group (C5.4)."""
    headers = jms_headers(message)
    return headers.group is not None and headers.group_sequence < 0


def reply_to_address(message: SentMessage) -> str:
    """Return the address of the reply-to of a message in OpenWire form; "" if it has none."""
    reply_to = reply_to_name(message)
    return "" if reply_to is None else reply_to.address


def reply_to_name(message: SentMessage) -> PhysicalName | None:
    """Return the reply-to of a message in OpenWire form; None if it has none."""
    if not has_reply_to(message):
        return None
    return _read_destination(FieldReader(message.body, _GROUP_END.unpack_from(message.body, _GROUP_END_AT)[0]))


def has_reply_to(message: SentMessage) -> bool:
    """Return whether a message in OpenWire form has a reply-to."""
    group_end: int = _GROUP_END.unpack_from(message.body, _GROUP_END_AT)[0]
    return message.body[group_end] != 0


def message_id(message: SentMessage) -> str:
    """Return the JMSMessageID of a message in OpenWire form."""
    slices = split_body(message.body)
    text = FieldReader(slices.text_view).read_string()
    if text is not None:
        return text
    reader = FieldReader(slices.producer_id)
    connection, producer, session = reader.read_string(), reader.read_long(), reader.read_long()
    return f"{connection}:{session}:{producer}:{slices.sequence}"


def destination_as_sent(message: SentMessage) -> PhysicalName | None:
    """Return the destination of a message of either form, as it was first sent; None if OpenWire cannot name it."""
    if message.form == OPENWIRE_FORM:
        return jms_headers(message).destination
    return physical_name(first_destination_of(message.header))


def properties_of(message: SentMessage) -> dict[str, TypedValue]:
    """Return the properties of a message in OpenWire form. Properties that are not encoded as a map are none: a faulty
    producer must not make its messages undeliverable."""
    (*_, content_end) = BODY_HEAD.unpack_from(message.body)
    reader = FieldReader(message.body, content_end)
    try:
        if not reader.read_boolean():
            return {}
        reader.read_int()
        return reader.read_map() or {}
    except RemoteProtocolError:
        return {}


def has_too_many_properties(data: bytes, at: int, end: int) -> bool:
    """Return whether the properties of a message have too many values. Their field is between these positions. False if
    they are no map."""
    if end - at <= PROPERTY_VALUES_MAX * _ENTRY_BYTES_MIN:
        return False
    at += _MAP_AT
    count: int = _INT.unpack_from(data, at - _INT.size)[0]
    try:
        if count * _ENTRY_BYTES_MIN > end - at:
            return False
        return _skip_values(data, at, count, PROPERTY_VALUES_MAX, is_map=True)[1] < 0
    except (struct.error, IndexError):
        return False


def _skip_values(
    data: bytes, at: int, count: int, left: int, depth: int = 0, *, is_map: bool = False
) -> tuple[int, int]:
    """Skip the values of a list, or of a map with their names. `left` is the number of values that may come.

    Returns the position after them, and how many may still come; the latter is negative if these were too many.

    Raises: IndexError, struct.error if they are invalid
    """
    left -= count
    if count < 0 or depth > MAP_DEPTH_MAX:
        raise IndexError
    if left < 0:
        return at, left
    for _ in range(count):
        if is_map:
            at += 2 + (data[at] << 8 | data[at + 1])
        tag = data[at]
        at += 1
        size = _SIZES.get(tag)
        if size is not None:
            at += size
        elif tag in _NESTING:
            inner: int = _INT.unpack_from(data, at)[0]
            at += _INT.size
            if inner != -1 or tag == Tag.LIST:
                at, left = _skip_values(data, at, inner, left, depth + 1, is_map=tag == Tag.MAP)
                if left < 0:
                    return at, left
        else:
            at += _size_of_text(data, tag, at)
    return at, left


def _size_of_text(data: bytes, tag: int, at: int) -> int:
    """Return the number of bytes of a value with a length."""
    if tag == Tag.STRING:
        return 2 + (data[at] << 8 | data[at + 1])
    if tag not in (Tag.BYTES, Tag.BIG_STRING):
        raise IndexError
    length: int = _INT.unpack_from(data, at)[0]
    if length < 0:
        raise IndexError
    return _INT.size + length


def window_bytes(message: SentMessage) -> int:
    """Return the bytes that a message in OpenWire form takes of its producer's window, as ActiveMQ counts them."""
    *_, content_at, content_end = BODY_HEAD.unpack_from(message.body)
    # Content and properties without presence and length.
    fields: int = len(message.body) - content_at
    is_there = (message.body[content_at] != 0) + (message.body[content_end] != 0)
    size: int = _MESSAGE_BYTES + fields - 2 - _INT.size * is_there
    return size


# ---- As STOMP ----


def header_lines(message: SentMessage) -> bytes:
    """Return the header lines of a message of either form: `name:value` lines, escaped as in STOMP 1.2."""
    return stomp_message(message)[0] if message.form == OPENWIRE_FORM else message.header


def stomp_message(message: SentMessage) -> tuple[bytes, bytes]:
    """Return the header lines and the body that STOMP clients get of a message of either form."""
    if message.form != OPENWIRE_FORM:
        return message.header, message.body
    lines = _reserved_lines(message)
    if not message.body[1] & COMPRESSED:
        body = _stomp_body(message.body)
    elif (decompressed := _decompressed_body(message.body)) is not None:
        body = decompressed
    else:
        body = _compressed_body(message.body)
        lines["content-encoding"] = "deflate"
    lines["content-length"] = str(len(body))
    head = encode_header_lines(lines)
    size = len(head)
    properties: dict[str, str] = {}
    for name, value in properties_of(message).items():
        if name in _NEVER_LINES or value.tag in _NO_TEXT:
            continue
        text = _text(value)
        # Escapes and UTF-8 make a character up to four bytes long.
        size += 4 * (len(name) + len(text))
        if len(lines) + len(properties) >= HEADERS_MAX or size > HEADER_BYTES_MAX:
            break
        line_name = _line_text(name)
        if line_name not in lines:
            properties.setdefault(line_name, _line_text(text))
    return head + encode_header_lines(properties), body


def _reserved_lines(message: SentMessage) -> dict[str, str]:
    """Return the header lines of a message in OpenWire form that are neither its properties nor its length."""
    lines = decode_header_lines(message.header)
    headers = jms_headers(message)
    if headers.destination is not None:
        lines.setdefault("destination", _line_text(headers.destination.address))
    lines["priority"] = str(message.priority)
    if message.persistent:
        lines["persistent"] = "true"
    if message.expires_ms:
        lines["expires"] = str(message.expires_ms)
    if headers.correlation_id is not None and len(headers.correlation_id) <= _LINE_MAX:
        lines.setdefault("correlation-id", _line_text(headers.correlation_id))
    if headers.reply_to is not None and len(headers.reply_to.name) <= _LINE_MAX:
        lines.setdefault("reply-to", _line_text(headers.reply_to.address))
    if headers.jms_type is not None and len(headers.jms_type) <= _LINE_MAX:
        lines.setdefault("type", _line_text(headers.jms_type))
    if headers.group:
        lines["JMSXGroupID"] = _line_text(headers.group)
        lines["JMSXGroupSeq"] = str(headers.group_sequence)
    kind = _KINDS.get(message.body[0])
    if kind is not None:
        lines[_KIND] = kind
    return lines


def _line_text(text: str) -> str:
    """Return a text as it can be in a header line: without surrogates that have no partner, and without NUL."""
    return _storable(text).replace("\0", "\ufffd")


def _storable(text: str) -> str:
    return text if text.isascii() else to_utf8(text).decode()


def _text(value: TypedValue) -> str:
    """Return the text that Java gives a property."""
    content = value.value
    if isinstance(content, bool):
        return "true" if content else "false"
    if isinstance(content, float):
        return _java_float(content, is_single=value.tag == Tag.FLOAT)
    return str(content)


def _java_float(number: float, *, is_single: bool) -> str:
    """Return a number as Java's Float.toString and Double.toString do.

    >>> _java_float(1e10, is_single=False), _java_float(0.1, is_single=False), _java_float(3.0, is_single=False)
    ('1.0E10', '0.1', '3.0')
    """
    if not isfinite(number):
        return "NaN" if isnan(number) else "Infinity" if number > 0 else "-Infinity"
    # 17 digits are enough for any number.
    for digits in range(17):
        text = f"{number:.{digits}e}"
        if (_as_single(float(text)) if is_single else float(text)) == number:
            break
    mantissa, _, exponent = text.partition("e")
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        return f"{float(text):.{max(digits - int(exponent), 1)}f}"
    return f"{mantissa if digits else mantissa + '.0'}E{int(exponent)}"


def _as_single(number: float) -> float:
    try:
        single: float = struct.unpack(">f", struct.pack(">f", number))[0]
    except OverflowError:
        return float("inf")
    return single


def growth_of(message: SentMessage) -> int:
    """Return the bytes by which the content of a message in OpenWire form grows when it is decompressed for STOMP
    clients. The content itself says so: if that is wrong, it stays compressed."""
    if not message.body[1] & COMPRESSED:
        return 0
    *_, content_at, content_end = BODY_HEAD.unpack_from(message.body)
    compressed_size: int = content_end - content_at
    return max(0, _decompressed_size(message.body) - compressed_size)


def _decompressed_size(body: bytes) -> int:
    """Return how long the compressed content of a body in OpenWire form says that it is; -1 if it does not say so, or
    is too long to be decompressed."""
    content = _content(body) or b""
    try:
        if body[0] == BYTES:
            size: int = _INT.unpack_from(content)[0]
        elif body[0] == TEXT:
            (length,) = _INT.unpack(zlib.decompressobj().decompress(content, _INT.size))
            # That of a null text is -1.
            size = _INT.size + max(0, length)
        else:
            return -1
    except (struct.error, zlib.error):
        return -1
    return size if size <= DECOMPRESSED_BYTES_MAX else -1


def _content(body: bytes) -> bytes | None:
    *_, content_at, content_end = BODY_HEAD.unpack_from(body)
    return body[content_at + 1 + _INT.size : content_end] if body[content_at] else None


def _stomp_body(body: bytes) -> bytes:
    """Return the body that STOMP clients get of a body in OpenWire form that is not compressed."""
    content = _content(body)
    return _plain_body(body[0], content) if content is not None else b""


@lru_cache(maxsize=1)
def _decompressed_body(body: bytes) -> bytes | None:
    """Return the body that STOMP clients get of a body in OpenWire form that is compressed; None if they get it
    compressed. Subscribers to a topic get the same one, one after the other."""
    kind, content = body[0], _content(body)
    if not content:
        return b""
    size = _decompressed_size(body)
    if size < 0:
        return None
    decompressor = zlib.decompressobj()
    try:
        # Before a compressed BytesMessage there is the original length. With a byte more the end is reached.
        plain = decompressor.decompress(content[_INT.size :] if kind == BYTES else content, size + 1)
    except zlib.error:
        return None
    return _plain_body(kind, plain) if decompressor.eof and len(plain) == size else None


def _compressed_body(body: bytes) -> bytes:
    """Return the compressed content of a body in OpenWire form, as zlib reads it."""
    content = _content(body) or b""
    return content[_INT.size :] if body[0] == BYTES else content


def _plain_body(kind: int, content: bytes) -> bytes:
    """Return the body that STOMP clients get of a content. Text that cannot be decoded is the body as it is."""
    if kind != TEXT or len(content) < _INT.size:
        return content
    size = _INT.unpack_from(content)[0]
    text = content[_INT.size :]
    if size == -1 and not text:
        return b""
    if size != len(text):
        return content
    if b"\xed" not in text and b"\xc0" not in text:
        # Without surrogates and NULs, modified UTF-8 is UTF-8.
        return text
    try:
        # Each half of a pair would take 0.3 us: a long text may have none.
        return to_utf8(decode_modified_utf8(text, allows_half_pairs=len(text) <= STRING_BYTES_MAX))
    except RemoteProtocolError:
        return content


# ---- For selectors ----


def selector_values(message: SentMessage, names: Mapping[bytes, str]) -> dict[str, Value]:
    """Return what selectors compare, of a message in OpenWire form: properties by their types, and the texts of other
    header lines, for which there is no property. There is no `content-length`, which only a decompressed body would
    tell. `names` are by their modified UTF-8."""
    values = _typed_properties(message, names)
    if len(values) < len(names):
        missing = [name for name in names.values() if name not in values]
        if message.header or not _LINES.isdisjoint(missing):
            lines = _reserved_lines(message)
            for name in missing:
                text = lines.get(HEADER_PROPERTIES.get(name, name))
                if text is not None:
                    values[name] = TypedText(text) if name in HEADER_PROPERTIES else text
    return values


def _typed_properties(message: SentMessage, names: Mapping[bytes, str]) -> dict[str, Value]:
    """Return the properties of these names that have a type that selectors know. The map is read without a
    FieldReader, which would take ten times as long."""
    body = message.body
    (*_, content_end) = BODY_HEAD.unpack_from(body)
    values: dict[str, Value] = {}
    if not body[content_end]:
        return values
    at = content_end + _MAP_AT
    try:
        count = _INT.unpack_from(body, at - _INT.size)[0]
        left = MAP_VALUES_MAX - count
        if left < 0:
            return {}
        for _ in range(count):
            name_end = at + 2 + (body[at] << 8 | body[at + 1])
            tag = body[name_end]
            start = name_end + 1
            name = body[at + 2 : name_end]
            size = _SIZES.get(tag)
            if size is not None:
                at = start + size
            elif tag in _NESTING:
                # As a list of one value, which it counts, too.
                at, left = _skip_values(body, name_end, 1, left + 1)
                if left < 0:
                    return {}
            else:
                at = start + _size_of_text(body, tag, start)
            if name in names:
                # The last value of a name counts.
                values.pop(names[name], None)
                if tag not in _NO_TEXT:
                    value = FieldReader(body, name_end).read_value().value
                    values[names[name]] = TypedText(value) if isinstance(value, str) else value  # type: ignore[assignment]
    except (struct.error, IndexError, RemoteProtocolError):
        return {}
    return values if at <= len(body) else {}


def reading_ns(message: SentMessage, byte_ns: int, selectors: int) -> int:
    """Return an upper estimate, in nanoseconds, of the time that `selectors` selectors take to read and search a
    message in OpenWire form, without its `header`. Together they take `byte_ns` for each byte that they search."""
    *_, content_at, content_end = BODY_HEAD.unpack_from(message.body)
    searched: int = len(message.body) - (content_end - content_at)
    properties = 0
    at = content_end + _MAP_AT
    if len(message.body) >= at:
        properties = max(0, min(_INT.unpack_from(message.body, at - _INT.size)[0], MAP_VALUES_MAX))
    return selectors * (_READING_NS + _PROPERTY_NS * properties) + byte_ns * searched


# ---- As OpenWire ----


def openwire_message(message: SentMessage, sequence: int, identity: str) -> SentMessage:
    """Return a message in OpenWire form whose properties include the lines that the broker has added: the message that
    JMS clients get. `sequence` is that of the message, and `identity` that of the broker, for the id of a message that
    came from STOMP."""
    if message.form == OPENWIRE_FORM:
        if not message.header:
            return message
        body = with_properties(message.body, _properties(decode_header_lines(message.header)))
    else:
        body = _openwire_body(message, sequence, identity)
    return replace(message, header=b"", body=body, form=OPENWIRE_FORM)


def _properties(lines: dict[str, str]) -> dict[str, TypedValue]:
    """Return header lines as properties of a JMS message."""
    properties = {
        name: text_value(value)
        for name, value in lines.items()
        if name not in _RESERVED and (name.isascii() or len(encode_modified_utf8(name)) <= STRING_BYTES_MAX)
    }
    cause = lines.get(_LAST_CAUSE)
    if cause is not None:
        properties[LAST_CAUSE_PROPERTY] = text_value(cause)
    return properties


def with_properties(body: bytes, properties: dict[str, TypedValue]) -> bytes:
    """Return a body in OpenWire form with more properties, which come before those of the same names."""
    if not properties:
        return body
    slices = split_body(body)
    # Presence, length and count.
    field = slices.properties
    count, entries = 0, b""
    if len(field) >= 9 and (number := _INT.unpack_from(field, 5)[0]) > 0:
        count, entries = number, field[9:]
    entries += encode_entries(properties.items())
    map_field = encode_bytes(_INT.pack(count + len(properties)) + entries)
    return slices._replace(properties=map_field).join()


def synthetic_id(sequence: int, identity: str) -> tuple[bytes, int]:
    """Return producer id and number of a message that came from STOMP. The number has 31 bits, as clients before
    ActiveMQ 5.14.1 take no larger one. The number of the producer does the rest."""
    producer = encode_string(f"ID:truenext-{identity}") + _LONG.pack(sequence >> 31) + _LONG.pack(-1)
    return producer, sequence & 0x7FFF_FFFF


def _openwire_body(message: SentMessage, sequence: int, identity: str) -> bytes:
    lines = decode_header_lines(message.header)
    producer, number = synthetic_id(sequence, identity)
    destination = physical_name(lines.get("destination", ""))
    reply_to = physical_name(lines.get("reply-to", ""))
    properties = _properties(lines)
    if reply_to is None and "reply-to" in lines:
        properties["reply-to"] = text_value(lines["reply-to"])
    jms_type = lines.get("type")
    if jms_type is not None and _fits(jms_type):
        del properties["type"]
    kind = lines.get(_KIND)
    text = None
    if kind == "text" or (kind is None and message.is_text):
        text = _text_content(message.body)
    return OpenWireSlices(
        type=BYTES if text is None else TEXT,
        flags=0,
        sequence=number,
        producer_id=producer,
        destination=b"\0" if destination is None else _encode_destination(destination),
        text_view=b"\0",
        group=encode_string(message.group or None)
        + _INT.pack(_group_sequence(lines.get("JMSXGroupSeq", "")))
        + _encode_short(lines.get("correlation-id")),
        before_content=(b"\0" if reply_to is None else _encode_destination(reply_to))
        + _LONG.pack(message.arrived_ms)
        + _encode_short(jms_type),
        content=encode_bytes(message.body if text is None else text),
        properties=encode_bytes(encode_map(properties)) if properties else b"\0",
    ).join()


def _fits(text: str) -> bool:
    return len(text) <= STRING_BYTES_MAX // 6 or len(encode_modified_utf8(text)) <= STRING_BYTES_MAX


def _encode_short(text: str | None) -> bytes:
    """Encode a string; null if it is too long for OpenWire."""
    return encode_string(text if text is not None and _fits(text) else None)


def _encode_destination(destination: PhysicalName) -> bytes:
    return destination.encode() if _fits(destination.name) else b"\0"


def _group_sequence(text: str) -> int:
    digits = text.removeprefix("-")
    return clamp_int(int(text)) if are_digits(digits, most=20) else 0


def _text_content(body: bytes) -> bytes | None:
    """Return the content of a TextMessage; None if the body is no UTF-8, or would be too long."""
    if not body.isascii() or b"\0" in body:
        try:
            body = encode_modified_utf8(body.decode())
        except UnicodeDecodeError:
            return None
        if len(body) > BODY_BYTES_MAX:
            return None
    return _INT.pack(len(body)) + body
