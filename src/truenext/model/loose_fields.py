"""Loose fields of OpenWire: modified UTF-8, a reader and a writer of fields, and maps of primitive values.

All numbers are big-endian. A reader checks each length and count against the bytes that are left before it allocates
anything.

    boolean        1 byte
    byte, short, int, long    1, 2, 4 and 8 bytes, signed
    string         boolean: is it there; then 2 bytes of length, and modified UTF-8
    byte string    boolean: is it there; then 4 bytes of length, and the bytes
    map            4 bytes of count (-1: none), then for each entry 2 bytes of length, the name, and a value
    value          1 byte of tag (`Tag`), and what the tag says

Modified UTF-8 is Java's: a NUL takes the two bytes C0 80, and a character above U+FFFF is two surrogates of three bytes
each. Java refuses characters of four bytes.
"""

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from truenext.errors import Code, RemoteProtocolError
from truenext.model.limits import MAP_DEPTH_MAX, MAP_VALUES_MAX

STRING_BYTES_MAX = 0xFFFF
"""Bytes of a string, whose length has 16 bits."""
_BIG_STRING_LENGTH = 8191
"""Characters of a string value from which on Java writes it with a length of 32 bits (`Tag.BIG_STRING`)."""

_SHORT = struct.Struct(">h")
_UNSIGNED_SHORT = struct.Struct(">H")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_FLOAT = struct.Struct(">f")
_DOUBLE = struct.Struct(">d")
_BYTE = struct.Struct(">b")
_INT_MAX = 2**31 - 1
_ASTRAL = re.compile("[\U00010000-\U0010ffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NULL, _PRESENT = b"\0", b"\1"


def malformed(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(reason, Code.MALFORMED_FRAME)


def encode_modified_utf8(text: str) -> bytes:
    r"""Return a text in Java's modified UTF-8.

    >>> encode_modified_utf8("a\0"), encode_modified_utf8("\U0001f600").hex()
    (b'a\xc0\x80', 'eda0bdedb880')
    """
    if not text.isascii():
        text = _ASTRAL.sub(_surrogates, text)
    return text.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")


def _surrogates(match: re.Match[str]) -> str:
    code = ord(match.group()) - 0x10000
    return chr(0xD800 + (code >> 10)) + chr(0xDC00 + (code & 0x3FF))


def decode_modified_utf8(data: bytes, *, allows_half_pairs: bool = True) -> str:
    r"""Return the text of Java's modified UTF-8. A surrogate without its partner stays, as in Java.

    >>> decode_modified_utf8(b"a\xc0\x80"), decode_modified_utf8(bytes.fromhex("eda0bdedb880"))
    ('a\x00', '😀')

    Raises: RemoteProtocolError if the bytes are not modified UTF-8, or such a surrogate is not allowed
    """
    if data.isascii():
        return data.decode("ascii")
    # First bytes of characters of four bytes. Five searches take less time than one for any of them.
    if b"\xf0" in data or b"\xf1" in data or b"\xf2" in data or b"\xf3" in data or b"\xf4" in data:
        raise malformed("text is not modified UTF-8: it has a character of four bytes")
    data = data.replace(b"\xc0\x80", b"\0")
    try:
        if b"\xed" not in data:
            return data.decode()
        # Python decodes each surrogate in 0.6 us. So all characters from U+D000 to U+DFFF take four bytes meanwhile, as
        # from U+10D000 on; of each character's 32 bits the lower half is then UTF-16.
        wide = data.replace(b"\xed", b"\xf4\x8d").decode().encode("utf-32-le")
        pairs = bytearray(len(wide) // 2)
        pairs[::2], pairs[1::2] = wide[::4], wide[1::4]
        return pairs.decode("utf-16-le", "surrogatepass" if allows_half_pairs else "strict")
    except UnicodeDecodeError as error:
        raise malformed(f"text is not modified UTF-8: {error.reason}") from error


def to_utf8(text: str) -> bytes:
    r"""Return a text in UTF-8. As in Java, a surrogate without its partner becomes a question mark.

    >>> to_utf8("\ud83d?")
    b'??'
    """
    return text.encode("utf-8", "replace")


def has_half_pair(text: str) -> bool:
    r"""Return whether a text has a surrogate without its partner, so that it cannot be encoded as UTF-8.

    >>> has_half_pair("\ud83d"), has_half_pair("\U0001f600")
    (True, False)
    """
    return _SURROGATE.search(text) is not None


class Tag(IntEnum):
    """Types of primitive values."""

    NULL = 0
    BOOLEAN = 1
    BYTE = 2
    CHARACTER = 3
    SHORT = 4
    INTEGER = 5
    LONG = 6
    DOUBLE = 7
    FLOAT = 8
    STRING = 9
    BYTES = 10
    MAP = 11
    LIST = 12
    BIG_STRING = 13


class TypedValue(NamedTuple):
    """Value of a map or list, with its type in Java."""

    tag: Tag
    value: object


class FieldReader:
    """Reader of the loose fields of one frame.

    Raises: RemoteProtocolError, in each method, if a field is invalid or longer than what is left of the frame
    """

    __slots__ = ("at", "data", "values_left")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at
        """Position of the next field."""
        self.values_left = MAP_VALUES_MAX
        """Number of values that maps, lists and arrays of this frame may still have."""

    @property
    def left(self) -> int:
        """Number of bytes after the last field."""
        return len(self.data) - self.at

    def skip(self, size: int) -> int:
        """Go `size` bytes on, and return the position before."""
        at = self.at
        if not 0 <= size <= len(self.data) - at:
            raise malformed(f"a field of {size} bytes, where {len(self.data) - at} are left of the frame")
        self.at = at + size
        return at

    def raw(self, size: int) -> bytes:
        at = self.skip(size)
        return self.data[at : self.at]

    def read_boolean(self) -> bool:
        return self.data[self.skip(1)] != 0

    def read_byte(self) -> int:
        value: int = _BYTE.unpack_from(self.data, self.skip(1))[0]
        return value

    def read_short(self) -> int:
        value: int = _SHORT.unpack_from(self.data, self.skip(2))[0]
        return value

    def read_unsigned_short(self) -> int:
        value: int = _UNSIGNED_SHORT.unpack_from(self.data, self.skip(2))[0]
        return value

    def read_int(self) -> int:
        value: int = _INT.unpack_from(self.data, self.skip(4))[0]
        return value

    def read_long(self) -> int:
        value: int = _LONG.unpack_from(self.data, self.skip(8))[0]
        return value

    def read_text(self) -> str:
        """Read a string that is there: length and modified UTF-8."""
        return decode_modified_utf8(self.raw(self.read_unsigned_short()))

    def read_string(self) -> str | None:
        return self.read_text() if self.read_boolean() else None

    def read_bytes(self) -> bytes | None:
        return self.raw(self.read_int()) if self.read_boolean() else None

    def read_count(self, what: str, least_bytes: int) -> int:
        """Read a count of 32 bits of things that take at least `least_bytes` each."""
        count = self.read_int()
        if count < 0 or count * least_bytes > self.left:
            raise malformed(f"{count} {what}, where {self.left} bytes are left of the frame")
        self.values_left -= count
        if self.values_left < 0:
            raise malformed(f"more than {MAP_VALUES_MAX} values in the maps and lists of one frame")
        return count

    def read_map(self, depth: int = 0) -> dict[str, TypedValue] | None:
        """Read a map. If it has a name twice, the last value counts, as in Java."""
        at = self.at
        if self.read_int() == -1:
            return None
        self.at = at
        # Length of the name, and tag.
        return {self.read_text(): self.read_value(depth) for _ in range(self.read_count("entries of a map", 3))}

    def read_value(self, depth: int = 0) -> TypedValue:
        number = self.read_byte()
        read = _VALUE_READERS.get(number)
        if read is not None:
            return TypedValue(Tag(number), read(self))
        if number not in (Tag.MAP, Tag.LIST):
            raise malformed(f"a value of the unknown type {number}")
        if depth >= MAP_DEPTH_MAX:
            raise malformed(f"more than {MAP_DEPTH_MAX} maps and lists inside one another")
        if number == Tag.MAP:
            return TypedValue(Tag.MAP, self.read_map(depth + 1))
        values = [self.read_value(depth + 1) for _ in range(self.read_count("values of a list", 1))]
        return TypedValue(Tag.LIST, values)


_VALUE_READERS: dict[int, Callable[[FieldReader], object]] = {
    Tag.NULL: lambda reader: None,
    Tag.BOOLEAN: FieldReader.read_boolean,
    Tag.BYTE: FieldReader.read_byte,
    Tag.CHARACTER: lambda reader: chr(reader.read_unsigned_short()),
    Tag.SHORT: FieldReader.read_short,
    Tag.INTEGER: FieldReader.read_int,
    Tag.LONG: FieldReader.read_long,
    Tag.DOUBLE: lambda reader: _DOUBLE.unpack_from(reader.data, reader.skip(8))[0],
    Tag.FLOAT: lambda reader: _FLOAT.unpack_from(reader.data, reader.skip(4))[0],
    Tag.STRING: FieldReader.read_text,
    Tag.BYTES: lambda reader: reader.raw(reader.read_int()),
    Tag.BIG_STRING: lambda reader: decode_modified_utf8(reader.raw(reader.read_int())),
}


def encode_text(text: str) -> bytes:
    """Return length and modified UTF-8 of a string that is there.

    Raises: ValueError if the string is too long
    """
    data = encode_modified_utf8(text)
    if len(data) > STRING_BYTES_MAX:
        raise ValueError(f"a string of {len(data)} bytes; at most {STRING_BYTES_MAX}")
    return _UNSIGNED_SHORT.pack(len(data)) + data


def encode_string(text: str | None) -> bytes:
    return _NULL if text is None else _PRESENT + encode_text(text)


def encode_bytes(data: bytes | None) -> bytes:
    return _NULL if data is None else b"\1%b%b" % (_INT.pack(len(data)), data)


def encode_value(value: TypedValue) -> bytes:
    tag, content = value
    return bytes([tag]) + _VALUE_WRITERS[tag](content)


def text_value(text: str) -> TypedValue:
    """Return a string as a value of a map, with the type that Java gives it."""
    return TypedValue(Tag.STRING if len(text) < _BIG_STRING_LENGTH else Tag.BIG_STRING, text)


def encode_entries(entries: Iterable[tuple[str, TypedValue]]) -> bytes:
    """Return the entries of a map, without their count."""
    return b"".join([encode_text(name) + encode_value(value) for name, value in entries])


def encode_map(entries: Mapping[str, TypedValue] | None) -> bytes:
    if entries is None:
        return _INT.pack(-1)
    return _INT.pack(len(entries)) + encode_entries(entries.items())


def _encode_big_string(text: str) -> bytes:
    data = encode_modified_utf8(text)
    return _INT.pack(len(data)) + data


def _encode_list(values: list[TypedValue]) -> bytes:
    return _INT.pack(len(values)) + b"".join(map(encode_value, values))


_VALUE_WRITERS: dict[Tag, Callable[..., bytes]] = {
    Tag.NULL: lambda value: b"",
    Tag.BOOLEAN: lambda value: _PRESENT if value else _NULL,
    Tag.BYTE: _BYTE.pack,
    Tag.CHARACTER: lambda value: _UNSIGNED_SHORT.pack(ord(value)),
    Tag.SHORT: _SHORT.pack,
    Tag.INTEGER: _INT.pack,
    Tag.LONG: _LONG.pack,
    Tag.DOUBLE: _DOUBLE.pack,
    Tag.FLOAT: _FLOAT.pack,
    Tag.STRING: encode_text,
    Tag.BYTES: lambda value: _INT.pack(len(value)) + value,
    Tag.MAP: encode_map,
    Tag.LIST: _encode_list,
    Tag.BIG_STRING: _encode_big_string,
}


def clamp_int(number: int) -> int:
    """Return the number, or the nearest one of 32 bits."""
    return max(-_INT_MAX - 1, min(number, _INT_MAX))
