"""Checks for values that JSON does not preserve: nan, the infinities and, where the type is `Any`, values of types that
JSON lacks.

    float                 nan and the infinities are written as null
    Any, dict, list       a tuple or a set becomes a list, a date or bytes become text, a key 1 becomes "1"

The checks are built once for each type, and visit only the parts of a value that JSON may not preserve. A type without
a float and without `Any` has no checks. The checks do not decode the JSON.

Source: docs/stages.md, "Endpoints and stages"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from types import NoneType
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import inspect

JsonLossCheck: TypeAlias = "Callable[[Any], str | None]"
"""Check of a value. It returns the path and the reason if JSON does not preserve the value, such as `.items[3].price is
nan`; otherwise None."""

_PLAIN: Final = frozenset({str, int, bool, NoneType})
_NamedType = (
    inspect.StructType | inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType | inspect.CustomType
)
"""Types of msgspec.inspect that describe a class, and may therefore contain themselves."""


class JsonLossChecks:
    """Checks of one type: whether JSON preserves its values."""

    __slots__ = ("any_check", "float_check")

    def __init__(self, info: inspect.Type) -> None:
        self.any_check: Final[JsonLossCheck | None] = _JsonLossCheckBuilder(inspect.AnyType).check(info)
        """Check of the parts whose type is `Any`; None if the type contains no `Any`."""
        self.float_check: Final[JsonLossCheck | None] = _JsonLossCheckBuilder(inspect.FloatType).check(info)
        """Check of floats; None if the type contains no float. The check is needed only if the JSON contains null,
        because nan and the infinities are written as null."""

    def fault(self, value: object, data: bytes) -> str | None:
        """Return the path and the reason of the first loss; None if JSON preserves the value. `data` is the JSON of the
        value."""
        if self.any_check is not None:
            found = self.any_check(value)
            if found is not None:
                return found
        if self.float_check is not None and b"null" in data:
            return self.float_check(value)
        return None


def fault_below_any(value: Any) -> str | None:
    """Return the path and the reason if JSON does not preserve a value whose type is unknown; otherwise None."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind is dict:
        for key, each in value.items():
            if type(key) is not str:
                return f" has the key {shortened(key)} of the type {type(key).__name__}, and in JSON keys are texts"
            if type(each) not in _PLAIN:
                found = fault_below_any(each)
                if found is not None:
                    return f"[{shortened(key)}]{found}"
        return None
    if kind is list:
        for index, each in enumerate(value):
            if type(each) not in _PLAIN:
                found = fault_below_any(each)
                if found is not None:
                    return f"[{index}]{found}"
        return None
    if kind is float:
        return None if value - value == 0.0 else f" is {value}, which JSON does not have"
    return f" is of the type {kind.__name__}, which is lost in JSON: annotate its type, or make it text"


def fault_of_floats(value: Any) -> str | None:
    """Return the path and the value of a float that JSON does not preserve, in a value of unknown type; otherwise
    None."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind is float:
        return _float(value)
    if isinstance(value, dict):
        return _first((f"[{shortened(key)}]", fault_of_floats(each)) for key, each in value.items())
    if isinstance(value, Enum):
        return None
    names = field_names(kind)
    if names:
        return _first((f".{name}", fault_of_floats(getattr(value, name, None))) for name in names)
    if isinstance(value, list | tuple | set | frozenset):
        return _first((f"[{index}]", fault_of_floats(each)) for index, each in enumerate(value))
    return None


def field_names(class_: type) -> Collection[str]:
    """Return the field names of a Struct, a dataclass, a pydantic model or an attrs class; empty for other classes."""
    for attribute in ("__struct_fields__", "__dataclass_fields__", "__pydantic_fields__"):
        names: Collection[str] | None = getattr(class_, attribute, None)
        if names is not None:
            return names
    return [each.name for each in getattr(class_, "__attrs_attrs__", ())]


def _float(value: Any) -> str | None:
    if type(value) is float and value - value != 0.0:
        return f" is {value}, which JSON does not have"
    return None


def _first(found: Iterable[tuple[str, str | None]]) -> str | None:
    return next((path + fault for path, fault in found if fault is not None), None)


def shortened(value: object, length: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


class _JsonLossCheckBuilder:
    """Builder of a check for one type. The check visits only the parts whose type contains `target`."""

    def __init__(self, target: type[inspect.Type]) -> None:
        self._target = target
        self._leaf: JsonLossCheck = fault_below_any if target is inspect.AnyType else _float
        self._fallback: JsonLossCheck | None = None if target is inspect.AnyType else fault_of_floats
        """Check of a value that is not an instance of its declared class; None if no such check is needed."""
        self._checks: dict[Any, list[JsonLossCheck]] = {}
        """Check of each class, in a list. The list is empty while the check is being built, since a class may contain
        itself."""

    def check(self, info: inspect.Type) -> JsonLossCheck | None:
        return self._check_for(info) if self._contains_target(info) else None

    def _contains_target(self, info: inspect.Type) -> bool:
        seen: set[Any] = set()
        rest = [info]
        while rest:
            each = rest.pop()
            if isinstance(each, self._target):
                return True
            if isinstance(each, _NamedType):
                if each.cls in seen:
                    continue
                seen.add(each.cls)
            rest.extend(_parts(each))
        return False

    def _check_for(self, info: inspect.Type) -> JsonLossCheck:
        match info:
            case inspect.Metadata():
                return self._check_for(info.type)
            case inspect.UnionType():
                return self._of_union(info)
            case inspect.DictType() | inspect.FrozenDictType():
                return self._of_dict(info)
            case inspect.TupleType():
                return self._of_tuple(info)
            case inspect.CollectionType():
                return self._of_array(self._check_for(info.item_type))
            case _ if isinstance(info, _NamedType):
                if info.cls not in self._checks:
                    self._checks[info.cls] = made = []
                    made.append(self._of_class(info))
                made = self._checks[info.cls]
                # The check of a class that contains itself is not built yet.
                return made[0] if made else lambda value: made[0](value)
            case _:
                return self._leaf

    def _of_array(self, check: JsonLossCheck) -> JsonLossCheck:
        def of_array(value: Any) -> str | None:
            if isinstance(value, list | tuple | set | frozenset):
                for index, each in enumerate(value):
                    found = check(each)
                    if found is not None:
                        return f"[{index}]{found}"
            return None

        return of_array

    def _of_tuple(self, info: inspect.TupleType) -> JsonLossCheck:
        checks = [
            (index, self._check_for(each)) for index, each in enumerate(info.item_types) if self._contains_target(each)
        ]

        def of_tuple(value: Any) -> str | None:
            if not isinstance(value, list | tuple) or len(value) != len(info.item_types):
                return None
            return _first((f"[{index}]", check(value[index])) for index, check in checks)

        return of_tuple

    def _of_dict(self, info: inspect.DictType | inspect.FrozenDictType) -> JsonLossCheck:
        check = self.check(info.value_type)
        has_any_key = self._target is inspect.AnyType and isinstance(info.key_type, inspect.AnyType)
        if has_any_key and isinstance(info.value_type, inspect.AnyType):
            # No dict if the field is left out, or is UNSET.
            return lambda value: fault_below_any(dict(value)) if isinstance(value, Mapping) else None

        def of_dict(value: Any) -> str | None:
            if not isinstance(value, dict):
                return None
            for key, each in value.items():
                if has_any_key and type(key) is not str:
                    return fault_below_any({key: None})
                found = None if check is None else check(each)
                if found is not None:
                    return f"[{shortened(key)}]{found}"
            return None

        return of_dict

    def _of_union(self, info: inspect.UnionType) -> JsonLossCheck:
        options = [each.type if isinstance(each, inspect.Metadata) else each for each in info.types]
        leading = [each for each in options if self._contains_target(each)]
        if any(isinstance(each, self._target) and isinstance(each, inspect.AnyType) for each in leading):
            return self._leaf
        classes = {each.cls: self._check_for(each) for each in leading if isinstance(each, _NamedType)}
        others = [self._check_for(each) for each in leading if not isinstance(each, _NamedType)]
        if not classes and len(others) == 1:
            # Such as `float | None`: a check ignores values of other types.
            return others[0]

        def of_union(value: Any) -> str | None:
            check = classes.get(type(value))
            if check is not None:
                return check(value)
            return _first(("", each(value)) for each in (*others, *classes.values()))

        return of_union

    def _of_class(self, info: Any) -> JsonLossCheck:
        class_, fallback = info.cls, self._fallback
        if isinstance(info, inspect.CustomType):
            fields = [(name, name, kind) for name, kind in _typed_fields(class_)]
        else:
            fields = [(each.name, each.encode_name, each.type) for each in info.fields]
        checks = [
            (name, written, self._check_for(kind)) for name, written, kind in fields if self._contains_target(kind)
        ]
        is_dict = isinstance(info, inspect.TypedDictType)

        def of_class(value: Any) -> str | None:
            if not is_dict and isinstance(value, class_):
                for name, _, check in checks:
                    found = check(getattr(value, name, None))
                    if found is not None:
                        return f".{name}{found}"
            elif isinstance(value, dict):
                for _, written, check in checks:
                    found = check(value[written]) if written in value else None
                    if found is not None:
                        return f"[{written!r}]{found}"
            elif fallback is not None:
                return fallback(value)
            return None

        return of_class


def _parts(info: Any) -> Iterable[inspect.Type]:
    match info:
        case inspect.Metadata():
            return (info.type,)
        case inspect.UnionType():
            return info.types
        case inspect.DictType() | inspect.FrozenDictType():
            # Numbers in keys are not written as null.
            keys = (info.key_type,) if isinstance(info.key_type, inspect.AnyType) else ()
            return (*keys, info.value_type)
        case inspect.TupleType():
            return info.item_types
        case inspect.CollectionType():
            return (info.item_type,)
        case inspect.CustomType():
            return [kind for _, kind in _typed_fields(info.cls)]
        case _:
            return [each.type for each in getattr(info, "fields", ())]


def _typed_fields(class_: Any) -> list[tuple[str, inspect.Type]]:
    """Return the names and types of a pydantic model's fields, without fields whose type msgspec does not know."""
    fields = []
    for name, annotation in fields_of_model(class_):
        try:
            fields.append((name, msgspec.inspect.type_info(annotation)))
        except Exception:
            # `type_info` may raise any exception for such a type.
            continue
    return fields


def fields_of_model(class_: Any) -> list[tuple[str, Any]]:
    """Return the names and annotations of a pydantic model's fields, without fields that have their own serializer."""
    decorators = getattr(class_, "__pydantic_decorators__", None)
    if decorators is None or decorators.model_serializers:
        return []
    own = {name for each in decorators.field_serializers.values() for name in each.info.fields}
    return [
        (name, field.annotation)
        for name, field in class_.model_fields.items()
        if name not in own and "*" not in own and not has_serializer(field.metadata)
    ]


def has_serializer(metadata: Iterable[object]) -> bool:
    """Return whether the metadata of a field has a serializer of pydantic. This works without pydantic."""
    return any(type(each).__name__ in ("PlainSerializer", "WrapSerializer") for each in metadata)
