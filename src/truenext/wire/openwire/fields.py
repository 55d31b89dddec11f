"""Encoding of structures (structures.py) by their fields: works for each of them, and is used for rare ones.

codec.py decodes frequent commands faster, and deliveries.py encodes messages to consumers.
"""

import types
from collections.abc import Callable
from struct import Struct
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from truenext.model.limits import ARRAY_VALUES_MAX, MAP_VALUES_MAX, NESTED_DEPTH_MAX
from truenext.model.loose_fields import (
    FieldReader,
    encode_bytes,
    encode_modified_utf8,
    encode_string,
    malformed,
)
from truenext.wire.openwire.structures import Array, Structure, Throwable, WireFormatInfo, structure_classes

MAGIC = b"ActiveMQ"
"""First bytes of a WireFormatInfo, after its type."""
_INT = Struct(">i")
_COUNT = Struct(">h")
_NUMBERS = {1: Struct(">b"), 4: Struct(">i"), 8: Struct(">q")}
_REASON_BYTES_MAX = 16 * 1024
"""Bytes of an exception's message that the broker writes. Java's strings have at most 65,535."""

Read = Callable[[FieldReader, int], Any]
Write = Callable[[Any], bytes]


class Layout(NamedTuple):
    """Functions that read and write the fields of one class of structures."""

    make: type[Structure]
    readers: tuple[Read, ...]
    writers: tuple[tuple[str, Write], ...]


def decode_structure(reader: FieldReader, depth: int = 0) -> Structure:
    """Read type number and fields of a structure.

    Raises: RemoteProtocolError if it is invalid
    """
    number = reader.read_byte()
    layout = LAYOUTS.get(number)
    if layout is None:
        raise malformed(f"OpenWire type {number} is unknown")
    if depth >= NESTED_DEPTH_MAX:
        raise malformed(f"more than {NESTED_DEPTH_MAX} structures inside one another")
    if number == WireFormatInfo.TYPE and reader.raw(len(MAGIC)) != MAGIC:
        raise malformed("WireFormatInfo without ActiveMQ's first bytes")
    return layout.make(*[read(reader, depth) for read in layout.readers])


def decode_nested(reader: FieldReader, depth: int = 0) -> Structure | None:
    return decode_structure(reader, depth + 1) if reader.read_boolean() else None


def encode_structure(structure: Structure) -> bytes:
    """Return type number and fields of a structure.

    Raises: ValueError if a string has more than 65,535 bytes
    """
    number = structure.TYPE
    parts = [write(getattr(structure, name)) for name, write in LAYOUTS[number].writers]
    return b"".join((bytes([number]), MAGIC if number == WireFormatInfo.TYPE else b"", *parts))


def encode_nested(structure: Structure | None) -> bytes:
    return b"\0" if structure is None else b"\1" + encode_structure(structure)


def encode_frame(structure: Structure) -> bytes:
    """Return a structure as a frame, with its size."""
    data = encode_structure(structure)
    return _INT.pack(len(data)) + data


def _decode_array(reader: FieldReader, depth: int) -> Array:
    if not reader.read_boolean():
        return ()
    count = reader.read_short()
    if not 0 <= count <= reader.left:
        raise malformed(f"{count} elements of an array, where {reader.left} bytes are left of the frame")
    # A structure has no maps and lists of its own.
    reader.values_left -= count
    if reader.values_left < MAP_VALUES_MAX - ARRAY_VALUES_MAX:
        raise malformed(f"more than {ARRAY_VALUES_MAX} elements in the arrays of one frame")
    return tuple([decode_nested(reader, depth) for _ in range(count)])


def _encode_array(array: Array) -> bytes:
    if not array:
        return b"\0"
    return b"\1" + _COUNT.pack(len(array)) + b"".join(map(encode_nested, array))


def _decode_throwable(reader: FieldReader, _: int) -> Throwable | None:
    return Throwable(reader.read_string(), reader.read_string()) if reader.read_boolean() else None


def _encode_throwable(throwable: Throwable | None) -> bytes:
    if throwable is None:
        return b"\0"
    message = throwable.message
    if message is not None and len(encode_modified_utf8(message)) > _REASON_BYTES_MAX:
        message = message[: _REASON_BYTES_MAX // 6]
    return b"\1" + encode_string(throwable.class_name) + encode_string(message)


_READERS: dict[Any, tuple[Read, Write]] = {
    bool: (lambda reader, _: reader.read_boolean(), lambda value: b"\1" if value else b"\0"),
    str: (lambda reader, _: reader.read_string(), encode_string),
    bytes: (lambda reader, _: reader.read_bytes(), encode_bytes),
    Throwable: (_decode_throwable, _encode_throwable),
    1: (lambda reader, _: reader.read_byte(), _NUMBERS[1].pack),
    4: (lambda reader, _: reader.read_int(), _NUMBERS[4].pack),
    8: (lambda reader, _: reader.read_long(), _NUMBERS[8].pack),
}


def _field(annotation: Any) -> tuple[Read, Write]:
    """Return the functions that read and write a field with this annotation."""
    if annotation == Array:
        return _decode_array, _encode_array
    if get_origin(annotation) is Annotated:
        return _READERS[get_args(annotation)[1]]
    is_union = isinstance(annotation, types.UnionType) or get_origin(annotation) is Union
    choices = tuple(one for one in get_args(annotation) if one is not type(None)) if is_union else (annotation,)
    known = _READERS.get(choices[0])
    if known is not None:
        return known

    def read(reader: FieldReader, depth: int) -> Structure | None:
        value = decode_nested(reader, depth)
        if value is not None and not isinstance(value, choices):
            raise malformed(f"{type(value).__name__} where {' or '.join(one.__name__ for one in choices)} must be")
        return value

    return read, encode_nested


def _layout(make: type[Structure]) -> Layout:
    hints = get_type_hints(make, include_extras=True)
    fields = [(name, _field(hint)) for name, hint in hints.items() if get_origin(hint) is not ClassVar]
    by_name = dict(fields)
    # In the order of the struct, whose inherited fields come first.
    ordered = [(name, by_name[name]) for name in make.__struct_fields__]
    return Layout(make, tuple(read for _, (read, _) in ordered), tuple((name, write) for name, (_, write) in ordered))


LAYOUTS = {number: _layout(make) for number, make in structure_classes().items()}
"""Layouts of all structures, by type number."""
