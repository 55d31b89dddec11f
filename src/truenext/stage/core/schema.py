"""JSON Schema of a type. It describes the JSON that is written for values of the type, and that can be decoded as a
value.

`msgspec.json.schema` leaves out details that decide whether a message can be decoded: times look like any text, and
numbers as keys look like any keys. So this module visits the parts of a type itself. It leaves out descriptions. These
keywords are not part of JSON Schema:

    local-date-time, local-time   formats of times without a time zone
    keys                          schema of the keys of an object
    names                         names of fields whose values are written as an array, without the names
    members                       values of an enum, by the names of its members
    omitsDefaults                 true if a field with its default value is not written

Source: JSON Schema, 2020-12; msgspec, "Supported Types"
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

Schema: TypeAlias = dict[str, Any]

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "discriminator", "$defs"}
    | {"names", "members", "omitsDefaults"}
)
"""Keywords that do not decide whether a value can be read. `default`, `names`, `members` and `omitsDefaults` are among
these, but decide what a value means."""

_EMPTY: dict[Any, Any] = {list: [], set: [], frozenset: [], tuple: [], dict: {}, bytearray: ""}
"""JSON of the empty value that each of these default factories makes."""

_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_TEXTS: dict[type[inspect.Type], str] = {
    inspect.DateType: "date",
    inspect.TimeDeltaType: "duration",
    inspect.UUIDType: "uuid",
    inspect.DecimalType: "decimal",
}


def schema_of(type_: Any) -> Schema:
    """Return the JSON Schema of a type. Raises: TypeError if the type cannot be encoded as JSON"""
    return _JsonSchemaBuilder().schema(inspect.type_info(type_))


@cache
def _pydantic_generator() -> type[Any]:
    """Return pydantic's generator of JSON Schema, extended by `keys`, `names` and `members`. Only this function imports
    pydantic."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def enum_schema(self, schema: Any) -> Schema:
            described = super().enum_schema(schema)
            names = [each.name for each in schema["members"]]
            return {**described, "members": dict(zip(names, described["enum"], strict=True))}

        def named_tuple_schema(self, schema: Any) -> Schema:
            return {**super().named_tuple_schema(schema), "names": [each["name"] for each in schema["fields"]]}

        def p_arguments_schema(self, arguments: list[Any], var_args_schema: Any) -> Schema:
            # Before pydantic 2.14 this makes the schema of a NamedTuple.
            described = super().p_arguments_schema(arguments, var_args_schema)
            return {**described, "names": [self.get_argument_name(each) for each in arguments]}

        def dict_schema(self, schema: Any) -> Schema:
            described = super().dict_schema(schema)
            described.pop("propertyNames", None)
            for values in described.pop("patternProperties", {}).values():
                described["additionalProperties"] = values
            keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
            return described if keys in ({}, {"type": "string"}) else {**described, "keys": keys}

    return Generator


class _JsonSchemaBuilder:
    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}
        self._names: dict[Any, str] = {}
        """Name of each class whose description is complete or has begun."""

    def schema(self, info: inspect.Type) -> Schema:
        schema = self._of(info)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _of(self, info: inspect.Type) -> Schema:
        match info:
            case inspect.Metadata():
                return self._of(info.type)
            case inspect.AnyType() | inspect.RawType():
                return {}
            case inspect.NoneType():
                return {"type": "null"}
            case inspect.BoolType():
                return {"type": "boolean"}
            case inspect.IntType():
                return {"type": "integer", **_constraints(info, _BOUNDS)}
            case inspect.FloatType():
                return {"type": "number", **_constraints(info, _BOUNDS)}
            case inspect.StrType():
                return {"type": "string", **_constraints(info, {**_lengths("Length"), "pattern": "pattern"})}
            case inspect.BytesType() | inspect.ByteArrayType() | inspect.MemoryViewType():
                return {"type": "string", "contentEncoding": "base64", **_constraints(info, _lengths("Length"))}
            case inspect.DateTimeType():
                return _time_schema("date-time", info.tz)
            case inspect.TimeType():
                return _time_schema("time", info.tz)
            case inspect.DateType() | inspect.TimeDeltaType() | inspect.UUIDType() | inspect.DecimalType():
                return {"type": "string", "format": _TEXTS[type(info)]}
            case inspect.EnumType():
                members = {each.name: each.value for each in info.cls}
                return {"title": info.cls.__name__, "enum": _ordered(members.values()), "members": members}
            case inspect.LiteralType():
                return {"enum": _ordered(info.values)}
            case inspect.UnionType():
                return {"anyOf": [self._of(each) for each in info.types]}
            case inspect.TupleType():
                items = [self._of(each) for each in info.item_types]
                return {
                    "type": "array",
                    "prefixItems": items,
                    "items": False,
                    "minItems": len(items),
                    "maxItems": len(items),
                }
            case inspect.CollectionType():
                unique = {"uniqueItems": True} if isinstance(info, inspect.SetType | inspect.FrozenSetType) else {}
                return {
                    "type": "array",
                    "items": self._of(info.item_type),
                    **unique,
                    **_constraints(info, _lengths("Items")),
                }
            case inspect.DictType() | inspect.FrozenDictType():
                return self._mapping(info)
            case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType() | inspect.NamedTupleType():
                return self._reference(info)
            case inspect.CustomType():
                # Only models of pydantic get here; their schema contains its definitions.
                model: Any = info.cls
                described: Schema = model.model_json_schema(schema_generator=_pydantic_generator())
                return described
            case _:
                raise TypeError(f"{info!r} cannot be encoded as JSON")

    def _mapping(self, info: inspect.DictType | inspect.FrozenDictType) -> Schema:
        schema: Schema = {"type": "object", "additionalProperties": self._of(info.value_type)}
        keys = self._of(info.key_type)
        if keys not in ({}, {"type": "string"}):
            schema["keys"] = keys
        return {**schema, **_constraints(info, _lengths("Properties"))}

    def _reference(self, info: Any) -> Schema:
        name = self._names.get(info.cls)
        if name is None:
            title = getattr(info.cls, "__name__", str(info.cls))
            name, number = title, 2
            while name in self._definitions:
                name, number = f"{title}-{number}", number + 1
            self._names[info.cls] = name
            # Registered before its fields, as the class may contain itself.
            self._definitions[name] = {}
            self._definitions[name] = {"title": title, **self._fields(info)}
        return {"$ref": f"#/$defs/{name}"}

    def _fields(self, info: Any) -> Schema:
        properties = {each.encode_name: {**self._of(each.type), **_default(each)} for each in info.fields}
        required = [each.encode_name for each in info.fields if each.required]
        tag = getattr(info, "tag", None)
        if tag is not None:
            properties = {info.tag_field: {"enum": [tag]}, **properties}
            required = [info.tag_field, *required]
        is_closed = getattr(info, "forbid_unknown_fields", False)
        if isinstance(info, inspect.NamedTupleType) or getattr(info, "array_like", False):
            return _in_array(properties, required, is_closed or isinstance(info, inspect.NamedTupleType))
        schema: Schema = {"type": "object", "properties": properties, "required": sorted(required)}
        if getattr(getattr(info.cls, "__struct_config__", None), "omit_defaults", False):
            schema["omitsDefaults"] = True
        return {**schema, "additionalProperties": False} if is_closed else schema


def _in_array(properties: Schema, required: list[str], is_closed: bool) -> Schema:
    """Return the schema of an object that is written as an array of its fields' values. Fields at the end may be
    missing."""
    min_items = max((position for position, name in enumerate(properties, 1) if name in required), default=0)
    schema = {
        "type": "array",
        "prefixItems": list(properties.values()),
        "names": list(properties),
        "minItems": min_items,
    }
    return {**schema, "maxItems": len(properties)} if is_closed else schema


def _default(field: inspect.Field) -> Schema:
    """Return the default of a field as JSON, in a schema; an empty schema if the default is unknown."""
    if field.default is msgspec.NODEFAULT:
        factory = field.default_factory
        # The factory is never called, as it may do anything.
        return {"default": _EMPTY[factory]} if factory in _EMPTY else {}
    try:
        return {"default": msgspec.json.decode(msgspec.json.encode(field.default))}
    except Exception:
        # Only the codec of stages can encode the value.
        return {}


def _constraints(info: Any, words: dict[str, str]) -> Schema:
    return {word: value for name, word in words.items() if (value := getattr(info, name)) is not None}


def _lengths(of: str) -> dict[str, str]:
    return {"min_length": f"min{of}", "max_length": f"max{of}"}


def _time_schema(name: str, zone: bool | None) -> Schema:
    with_zone, without = {"type": "string", "format": name}, {"type": "string", "format": f"local-{name}"}
    if zone is None:
        return {"anyOf": [with_zone, without]}
    return with_zone if zone else without


def _ordered(values: Any) -> list[Any]:
    return sorted(values, key=lambda each: (str(type(each)), each or 0))
