"""Mismatches of two JSON Schemas: values that a writer writes with one schema, and that a reader with the other schema
cannot read, or reads as other values.

If in doubt, a mismatch is reported. A writer writes only fields that its schema names. A reader ignores fields that its
schema does not name, unless the schema forbids them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from truenext.stage.core.schema import ANNOTATIONS, Schema

MismatchKind = Literal["field", "type", "value", "bound", "meaning", "default", "renamed", "replaced"]
"""Reason why a written value cannot be read, or is read as another value.

    field      a required field may be missing
    type       a value is of another type
    value      a value is not in the list of allowed values
    bound      a value is below a minimum, or above a maximum or another limit
    meaning    a value can be read, but as another value
    default    the writer leaves out a field with its default, but the reader has another default
    renamed    fields were removed, and new fields have a default: perhaps a field was renamed
    replaced   the field at a position of an array has another name: perhaps it was renamed

"renamed" and "replaced" may be intended.
"""
UNCERTAIN: frozenset[MismatchKind] = frozenset({"renamed", "replaced"})

_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_COMPARED = ANNOTATIONS | {
    *("type", "anyOf", "oneOf", "allOf", "enum", "const", "format", "uniqueItems", "contentEncoding"),
    *("properties", "required", "additionalProperties", "items", "prefixItems", "keys", *_LOWER_BOUNDS, *_UPPER_BOUNDS),
}
_ANYTHING: Schema = {}
"""Schema of any value. Always the same object, because pairs of schemas are recognized by their `id`, so that a
comparison of types that contain themselves ends."""
_INFINITE = float("inf")
_UNKNOWN = object()
_ENCODINGS = ("base64", "base64url")
"""Values of `format` by which pydantic marks bytes that are encoded as text."""


class Mismatch(msgspec.Struct, frozen=True):
    path: str
    """Path of the field, such as `lines[].price`; empty for the whole value."""
    kind: MismatchKind
    written: str
    expected: str


def find_mismatches(written: Schema, expected: Schema) -> list[Mismatch]:
    """Return the mismatches between the writer's schema and the schema that the reader expects, without duplicates.

    Raises: ValueError, TypeError or AttributeError if one of them is not a schema, for example from a damaged file
    """
    return list(dict.fromkeys(_SchemaComparison().compare(_ScopedSchema(written, ()), _ScopedSchema(expected, ()), "")))


class _ScopedSchema:
    """Schema, together with the definitions to which its references refer."""

    __slots__ = ("schema", "scopes")

    def __init__(self, schema: Any, scopes: Sequence[Schema]) -> None:
        if schema is True or schema is None:
            schema = {}
        if "$defs" in (schema or {}):
            scopes = (schema["$defs"], *scopes)
        seen = set()
        while schema and "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            scopes = next((scopes[index:] for index, each in enumerate(scopes) if name in each), ())
            if not scopes or id(scopes[0][name]) in seen:
                raise ValueError(f"{name!r} refers to a definition that does not exist")
            schema = scopes[0][name]
            seen.add(id(schema))
        self.schema: Schema | Literal[False] = schema
        self.scopes = scopes

    def subschema(self, schema: Any) -> _ScopedSchema:
        return _ScopedSchema(schema, self.scopes)

    def get(self, keyword: str, otherwise: Any = None) -> Any:
        return self.schema.get(keyword, otherwise) if self.schema else otherwise

    @property
    def is_anything(self) -> bool:
        return self.schema is not False and not self.schema.keys() - ANNOTATIONS

    @property
    def alternatives(self) -> list[_ScopedSchema] | None:
        for keyword in ("anyOf", "oneOf"):
            if keyword in (self.schema or {}):
                return [self.subschema(each) for each in self.get(keyword)]
        kinds = self.get("type")
        if isinstance(kinds, list):
            return [self.subschema({**(self.schema or {}), "type": each}) for each in kinds]
        return None

    @property
    def allowed_values(self) -> list[Any] | None:
        if "const" in (self.schema or {}):
            return [self.get("const")]
        values: list[Any] | None = self.get("enum")
        return values

    @property
    def array_items(self) -> tuple[list[Any], Any]:
        """Schemas of an array's items: a list of schemas for the first items, and one schema for all further items;
        None if further items have no schema."""
        prefix: list[Any] = self.get("prefixItems", [])
        further = self.get("items", None if prefix else {})
        return prefix, None if further is False else further

    @property
    def name(self) -> str:
        """Name of the class that the schema describes; empty if it describes no class."""
        return str(self.get("title", ""))

    @property
    def encoding(self) -> str:
        """Encoding of bytes as text, such as base64; empty if the schema describes no encoded bytes."""
        format_ = self.get("format")
        return str(self.get("contentEncoding") or (format_ if format_ in _ENCODINGS else ""))

    def __str__(self) -> str:
        if self.schema is False:
            return "no such field"
        if self.alternatives is not None:
            return " or ".join(map(str, self.alternatives))
        if self.allowed_values is not None:
            return f"one of {', '.join(map(_json, self.allowed_values))}"
        if self.encoding:
            return f"bytes in {self.encoding}"
        name = self.get("title") if self.get("type") in ("object", "array") else self.get("format")
        return str(name or self.get("type", "anything"))


class _SchemaComparison:
    def __init__(self) -> None:
        self._open: set[tuple[int, int]] = set()
        """Pairs of schemas, by `id`, whose comparison is under way. Such a pair is not compared again, since types may
        contain themselves."""

    def compare(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> list[Mismatch]:
        if written.schema is False:
            return []
        if expected.is_anything:
            expected = _ScopedSchema(_ANYTHING, ())
        pair = id(written.schema), id(expected.schema)
        if pair in self._open:
            return []
        self._open.add(pair)
        try:
            return self._compare(written, expected, path)
        finally:
            self._open.discard(pair)

    def _compare(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> list[Mismatch]:
        if written.alternatives is not None:
            return _merge_types(
                [found for each in written.alternatives for found in self.compare(each, expected, path)], path
            )
        if expected.alternatives is not None:
            return self._any_of(written, expected, path)
        if "allOf" in (expected.schema or {}):
            return [
                found
                for each in expected.get("allOf")
                for found in self.compare(written, expected.subschema(each), path)
            ]
        if written.allowed_values is not None:
            lost = [each for each in written.allowed_values if not _is_value(each, expected)]
            if lost:
                return [Mismatch(path, "value", ", ".join(map(_json, lost)), str(expected))]
            return list(self._swapped_members(written, expected, path))
        if expected.allowed_values is not None:
            return [Mismatch(path, "value", str(written), str(expected))]
        return self._of_type(written, expected, path)

    def _any_of(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> list[Mismatch]:
        """Compare a value with all alternatives of an `anyOf`, and return the mismatches with the best one."""
        nearest = [Mismatch(path, "type", str(written), str(expected))]
        is_near = False
        options = expected.alternatives or ()
        read: list[tuple[list[Mismatch], _ScopedSchema]] = []
        for option in options:
            found = self.compare(written, option, path)
            if all(each.kind in UNCERTAIN for each in found):
                read.append((found, option))
                continue
            # Closest is an option of the same type of which a part does not match.
            if not is_near and found[0].kind == "meaning":
                nearest = found
            if found[0].path != path and (not is_near or len(found) < len(nearest)):
                nearest, is_near = found, True
        if not read:
            return nearest
        found, option = min(read, key=lambda each: (bool(each[0]), each[1].name != written.name))
        if option.name != written.name and written.name in {each.name for each in options if each.name}:
            # Such as a tag that another class had before.
            return [Mismatch(path, "meaning", str(written), str(option))]
        return found

    def _swapped_members(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> Iterator[Mismatch]:
        """Yield a mismatch for each enum value that now belongs to another member, while its former member still
        exists."""
        members: dict[str, Any] = written.get("members", {})
        members_expected: dict[str, Any] = expected.get("members", {})
        names = {_json(value): name for name, value in members_expected.items()}
        for name, value in members.items():
            other = names.get(_json(value), name)
            if other != name and name in members_expected:
                yield Mismatch(path, "meaning", f"{_json(value)} for {name}", f"{_json(value)} for {other}")

    def _of_type(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> list[Mismatch]:
        if expected.is_anything:
            # Any JSON value of that type: there bytes are text.
            expected = expected.subschema(
                {"type": written.get("type"), "items": _ANYTHING, "additionalProperties": _ANYTHING}
            )
        kind, kind_expected = written.get("type"), expected.get("type")
        if kind in ("integer", "number") and expected.get("format") == "decimal":
            return []
        is_same = kind == kind_expected or (kind, kind_expected) == ("integer", "number")
        if not is_same or expected.schema is False or expected.get("format") not in (None, written.get("format")):
            return [Mismatch(path, "type", str(written), str(expected))]
        if written.encoding != expected.encoding:
            # Encoded bytes can be read as any text; other text cannot be read as bytes.
            return [Mismatch(path, "type" if expected.encoding else "meaning", str(written), str(expected))]
        found = list(self._bounds(written, expected, path))
        if kind == "array":
            found += self._arrays(written, expected, path)
        elif kind == "object":
            found += self._objects(written, expected, path)
        return found

    def _bounds(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> Iterator[Mismatch]:
        for keywords, sign in ((_LOWER_BOUNDS, 1), (_UPPER_BOUNDS, -1)):
            for keyword in keywords:
                bound, before = expected.get(keyword), written.get(keyword)
                if bound is not None and (before is None or sign * before < sign * bound):
                    if keyword == "maxItems" and before is None and self._count_max(written) <= bound:
                        continue
                    yield Mismatch(
                        path, "bound", f"{keyword} {'none' if before is None else before}", f"{keyword} {bound}"
                    )
        for keyword in sorted((expected.schema or {}).keys() - _COMPARED):
            if written.get(keyword) != expected.get(keyword):
                yield Mismatch(
                    path,
                    "bound",
                    f"{keyword} {_json(written.get(keyword))}",
                    f"{keyword} {_json(expected.get(keyword))}",
                )

    def _count_max(self, written: _ScopedSchema) -> float:
        prefix, further = written.array_items
        return len(prefix) if further is None else _INFINITE

    # ---- Arrays ----

    def _arrays(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> Iterator[Mismatch]:
        prefix, further = written.array_items
        prefix_expected, further_expected = expected.array_items
        if expected.get("uniqueItems") and not written.get("uniqueItems"):
            yield Mismatch(path, "meaning", "a list", "a set, without order and duplicates")
        names, names_expected = written.get("names", []), expected.get("names", [])
        for index, each in enumerate(prefix):
            if index < min(len(names), len(names_expected)) and names[index] != names_expected[index]:
                name, other = names[index], names_expected[index]
                kind: MismatchKind = "meaning" if name in names_expected or other in names else "replaced"
                yield Mismatch(f"{path}[{index}]", kind, f"`{name}`", f"`{other}`")
                if kind == "meaning":
                    continue
            is_in_prefix = index < len(prefix_expected)
            other = prefix_expected[index] if is_in_prefix else further_expected
            if other is not None:
                yield from self.compare(written.subschema(each), expected.subschema(other), f"{path}[{index}]")
        if further is None:
            return
        for other in [*prefix_expected[len(prefix) :], further_expected]:
            if other is not None:
                yield from self.compare(written.subschema(further), expected.subschema(other), f"{path}[]")

    # ---- Objects ----

    def _objects(self, written: _ScopedSchema, expected: _ScopedSchema, path: str) -> Iterator[Mismatch]:
        fields, fields_expected = written.get("properties", {}), expected.get("properties", {})
        always = written.get("required", [])
        others = written.get("additionalProperties", None if "properties" in (written.schema or {}) else {})
        others_expected = expected.get("additionalProperties")
        required = expected.get("required", [])
        if (
            "properties" in (written.schema or {})
            and "properties" in (expected.schema or {})
            and others_expected is None
        ):
            removed = [name for name in fields if name not in fields_expected]
            added = [name for name in fields_expected if name not in fields and name not in required]
            if removed and added:
                yield Mismatch(path, "renamed", _names(removed), _names(added))
        for name in required:
            if name not in always:
                presence = "it may be missing" if name in fields or others else "it is missing"
                yield Mismatch(_field(path, name), "field", presence, "it is required")
        for name, schema in fields.items():
            other = fields_expected.get(name, others_expected)
            if other is not None:
                yield from self.compare(written.subschema(schema), expected.subschema(other), _field(path, name))
            keys = expected.get("keys")
            # The default of a required field is reported as missing already.
            may_be_left_out = written.get("omitsDefaults") and "default" in schema and name not in required
            if name in fields_expected and may_be_left_out:
                yield from _of_default(schema["default"], fields_expected[name], _field(path, name))
            if name not in fields_expected and keys is not None and not _is_value(name, expected.subschema(keys)):
                yield Mismatch(_field(path, name), "type", _json(name), f"a key that is {expected.subschema(keys)}")
        if not others and others != {}:
            return
        for name, schema in fields_expected.items():
            if name not in fields:
                yield from self.compare(written.subschema(others), expected.subschema(schema), _field(path, name))
        if others_expected is not None:
            yield from self.compare(written.subschema(others), expected.subschema(others_expected), f"{path}{{}}")
        keys = written.subschema(written.get("keys", {"type": "string"}))
        if "keys" in (expected.schema or {}) or keys.encoding:
            yield from self.compare(keys, expected.subschema(expected.get("keys", {"type": "string"})), f"{path}{{}}")


def _of_default(default: Any, expected: Any, path: str) -> Iterator[Mismatch]:
    """Yield a mismatch if writer and reader have different defaults for a field. The writer leaves out a field that has
    its default."""
    other = expected.get("default", _UNKNOWN) if isinstance(expected, dict) else _UNKNOWN
    if other is _UNKNOWN:
        yield Mismatch(path, "default", _json(default), "an unknown value")
    elif not _is_same(default, other):
        yield Mismatch(path, "default", _json(default), _json(other))


def _is_same(one: Any, other: Any) -> bool:
    if type(one) in (int, float) and type(other) in (int, float):
        return bool(one == other)
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _merge_types(found: list[Mismatch], path: str) -> list[Mismatch]:
    """Merge several type mismatches of one value into one mismatch. Several mismatches arise if the writer may write
    several types and the reader accepts none of these."""
    here = [each for each in found if (each.path, each.kind) == (path, "type")]
    if len(here) < 2:
        return found
    types = " or ".join(dict.fromkeys(each.written for each in here))
    return [Mismatch(path, "type", types, here[0].expected), *(each for each in found if each not in here)]


def _is_value(value: Any, expected: _ScopedSchema) -> bool:
    """Return whether the schema accepts a value; False if the schema is too complex for this function."""
    if expected.is_anything:
        return True
    if expected.alternatives is not None:
        return any(_is_value(value, each) for each in expected.alternatives)
    if expected.allowed_values is not None:
        return any(type(each) is type(value) and each == value for each in expected.allowed_values)
    kinds = {bool: ["boolean"], int: ["integer", "number"], float: ["number"], str: ["string"], type(None): ["null"]}
    plain = expected.schema and not expected.schema.keys() - ANNOTATIONS - {"type"}
    return bool(plain) and expected.get("type") in kinds.get(type(value), [])


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
