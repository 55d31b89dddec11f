"""Codec of one type: checks that JSON can hold its values, encodes them as JSON and decodes them.

A type is a msgspec.Struct, a dataclass, a model of pydantic, an attrs class, a TypedDict, or a type built of such
types, numbers, texts, lists, dicts and times. Decoding ignores unknown fields, gives missing fields their defaults, and
rejects every other value that is not of the type. The JSON never names a class, since each codec knows the type that it
decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from truenext.flows.envelope import EMPTY, NotDecoded
from truenext.stage.core.errors import DefinitionError, FlowError
from truenext.stage.core.json_loss import (
    JsonLossChecks,
    fault_below_any,
    fault_of_floats,
    field_names,
    fields_of_model,
    has_serializer,
    shortened,
)

T = TypeVar("T")


class Codec(Generic[T]):
    __slots__ = ("_class", "_decoder", "_loss_checks", "type")

    def __init__(self, type_: type[T], subject: str) -> None:
        """Create the codec. `subject` names the use of the type in errors, such as "what order.place takes".

        Raises: DefinitionError if JSON cannot hold values of the type, or does not preserve them
        """
        self.type = type_
        is_class = isinstance(type_, type) and type_ is not Any and not is_typeddict(type_)
        self._class = type_ if is_class else None
        """Class of the values; None if the type is not a class, such as list[int], Any or a TypedDict."""
        try:
            info = msgspec.inspect.type_info(type_)
            fault = _fault_of_type(info)
            checks = JsonLossChecks(info)
            self._loss_checks = checks if checks.any_check or checks.float_check else None
            self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(type_, dec_hook=_decode_model)
        except Exception as error:
            # Annotations are evaluated here, which may raise any exception.
            raise DefinitionError(
                f"{subject} is {type_name(type_)}, which cannot be encoded as JSON: {error}"
            ) from error
        if fault:
            raise DefinitionError(f"{subject} is {type_name(type_)}, in which {fault}")

    def encode(self, value: object) -> msgspec.Raw:
        """Encode a value as JSON.

        Raises: FlowError if the value is not of the type, has fields that the type does not have, or would be decoded
        as another value
        """
        try:
            if self._class is not None and type(value) is not self._class:
                if isinstance(value, self._class):
                    _check_subclass(type(value), self._class)
                else:
                    # An instance of another class may have valid JSON for this one, above all if fields have defaults.
                    msgspec.convert(value, self._class, dec_hook=_decode_model)
            data = _ENCODER.encode(value)
            loss = None if self._loss_checks is None else self._loss_checks.fault(value, data)
            if loss is None:
                # Decoding checks the types of fields: an error is more useful here than at the receiver.
                self._decoder.decode(data)
        except Exception as error:
            # Types may validate themselves, and raise any exception.
            where = self._where(value)
            text = f"{shortened(value, 200)} is not of type {type_name(self.type)}: {error or type(error).__name__}"
            raise FlowError(text if where is None else f"{_root(self.type)}{where}") from error
        if loss is not None:
            raise FlowError(f"{_root(self.type)}{loss}")
        return msgspec.Raw(data)

    def _where(self, value: object) -> str | None:
        """Return the path and the reason if JSON does not preserve a part whose type is `Any`; otherwise None."""
        check = None if self._loss_checks is None else self._loss_checks.any_check
        try:
            return None if check is None else check(value)
        except Exception:
            # The value may contain itself, or be of another type.
            return None

    def decode(self, data: msgspec.Raw | bytes) -> T:
        """Decode JSON. Raises: NotDecoded if it is not JSON of the type"""
        try:
            return self._decoder.decode(data)
        except Exception as error:
            # Types may validate themselves, as in `encode`.
            reason = f"the JSON is not of type {type_name(self.type)}: {error or type(error).__name__}"
            raise NotDecoded(reason) from error

    def check_default(self, subject: str) -> None:
        """Check that all fields of the type have defaults. A stage gets such a value as its state if its message
        carries no state.

        Raises: DefinitionError if the type is not an object, or a field has no default
        """
        try:
            self.decode(EMPTY)
        except NotDecoded as error:
            raise DefinitionError(
                f"{subject} is {type_name(self.type)}, and must be an object such as a Struct in which each field has "
                f"a default: {error.__cause__}"
            ) from error


def encode_any(value: object) -> msgspec.Raw:
    """Encode a value of any type. Raises: FlowError if the value cannot be encoded as JSON, or contains nan or an
    infinity"""
    try:
        data = _ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise FlowError(f"{shortened(value, 200)} cannot be encoded as JSON: {error}") from error
    loss = fault_of_floats(value) if b"null" in data else None
    if loss is not None:
        raise FlowError(f"{_root(type(value))}{loss}")
    return msgspec.Raw(data)


def check_properties(properties: Mapping[str, Any]) -> None:
    """Check the properties of a flow. Raises: FlowError if JSON does not preserve one of the properties"""
    loss = fault_below_any(properties) if properties else None
    if loss is not None:
        raise FlowError(f"JSON does not preserve a property of the flow: properties{loss}")


def type_name(type_: object) -> str:
    if type_ is None or type_ is type(None):
        return "None"
    return type_.__name__ if isinstance(type_, type) else str(type_).replace("typing.", "")


def _root(type_: object) -> str:
    """Return the first word of a path into a value, made of the name of its type: `order` for an Order."""
    if not isinstance(type_, type) or get_origin(type_) is not None or type_.__module__ in ("builtins", "typing"):
        return "value"
    return type_.__name__[:1].lower() + type_.__name__[1:]


def _is_model(type_: object) -> bool:
    """Return whether the type is a model of pydantic. This works without pydantic."""
    return isinstance(type_, type) and hasattr(type_, "__pydantic_validator__") and hasattr(type_, "model_validate")


def _encode_model(value: Any) -> object:
    if _is_model(type(value)):
        # `round_trip` leaves out computed fields, which are computed again.
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if hasattr(value, "isoformat"):
        # A subclass of datetime or date, such as those of libraries that freeze the time in tests.
        return value.isoformat()
    raise TypeError(f"{type_name(type(value))} cannot be encoded as JSON")


def _decode_model(type_: Any, data: Any) -> Any:
    if _is_model(type_):
        return type_.model_validate(data)
    raise TypeError(f"{type_name(type_)} cannot be read from JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_model)


def _check_subclass(actual: type, declared: type) -> None:
    """Check that a subclass has no fields of its own: encoded as the declared type, their values would be lost.

    Raises: FlowError if `actual` has fields that `declared` does not have
    """
    more = sorted(set(field_names(actual)).difference(field_names(declared)))
    if more:
        raise FlowError(
            f"{type_name(actual)} has fields that {type_name(declared)} does not have, and which would be lost: "
            f"{', '.join(more)}. Declare {type_name(actual)} as the type of the message or reply, "
            f"or pass a {type_name(declared)}"
        )


_NO_KEYS = (
    msgspec.inspect.BoolType,
    msgspec.inspect.CollectionType,
    msgspec.inspect.CustomType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.DictType,
    msgspec.inspect.FrozenDictType,
    msgspec.inspect.NamedTupleType,
    msgspec.inspect.NoneType,
    msgspec.inspect.StructType,
    msgspec.inspect.TupleType,
    msgspec.inspect.TypedDictType,
)
_NUMBERS = (msgspec.inspect.IntType, msgspec.inspect.FloatType)


def _fault_of_type(info: msgspec.inspect.Type) -> str:
    """Return why JSON does not preserve the values of a type; "" if it preserves them."""
    seen: set[int] = set()
    rest: list[Any] = [info]
    while rest:
        each = rest.pop()
        if isinstance(each, list | tuple):
            rest.extend(each)
        elif isinstance(each, msgspec.inspect.CustomType):
            fault = _fault_of_model(each.cls)
            if fault:
                return fault
        elif isinstance(each, msgspec.inspect.Type | msgspec.inspect.Field) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, msgspec.inspect.DictType | msgspec.inspect.FrozenDictType):
                fault = _fault_of_keys(each.key_type)
                if fault:
                    return fault
            rest.extend(getattr(each, name) for name in each.__struct_fields__)
    return ""


def _fault_of_keys(info: msgspec.inspect.Type) -> str:
    each_of = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    kinds = [each.type if isinstance(each, msgspec.inspect.Metadata) else each for each in each_of]
    for each in kinds:
        if isinstance(each, msgspec.inspect.CustomType) and not _is_model(each.cls):
            # `_fault_of_model` rejects other classes; within a model of pydantic, the model knows how to encode them.
            continue
        if isinstance(each, _NO_KEYS):
            class_ = getattr(each, "cls", None)
            name = type_name(class_) if class_ else type(each).__name__.removesuffix("Type").lower()
            return f"a dict has keys that are {name}, and in JSON keys are texts: make it a list of pairs"
    if any(isinstance(each, msgspec.inspect.StrType) for each in kinds) and any(
        isinstance(each, _NUMBERS) for each in kinds
    ):
        return "a dict has keys that are texts or numbers, and numbers would be read as texts: use only one of both"
    return ""


def _fault_of_model(class_: Any) -> str:
    """Return why JSON does not preserve the values of a class that msgspec does not know; "" if it preserves them."""
    for each in _walk(class_, _within_models):
        if not isinstance(each, type):
            continue
        if hasattr(each, "get_secret_value"):
            return f"{type_name(class_)} has a {type_name(each)}, which would be sent as stars: use the text itself"
        if _is_model(each):
            model: Any = each
            faults = [
                *(_fault_of_field(model, name) for name in model.model_fields),
                *(_fault_of_dicts(annotation) for _, annotation in fields_of_model(model)),
            ]
            if any(faults):
                return next(filter(None, faults))
        elif each is class_:
            return (
                f"{type_name(each)} cannot be encoded as JSON: make it a msgspec.Struct, a dataclass or a model of "
                "pydantic"
            )
    return ""


def _walk(annotation: Any, within: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """Yield an annotation and all its parts, however deep. `within` returns the direct parts. Each class is yielded
    once."""
    seen: set[type] = set()
    rest: list[Any] = [annotation]
    while rest:
        each = rest.pop()
        if isinstance(each, type):
            if each in seen:
                continue
            seen.add(each)
        yield each
        rest.extend(within(each))


def _within(type_: Any) -> list[Any]:
    """Return the direct parts of an annotation in a model. The fields of another model are not parts."""
    if not (is_dataclass(type_) or is_typeddict(type_) or hasattr(type_, "_field_defaults")):
        args = get_args(type_)
        return [*args, get_origin(type_)] if args else []
    try:
        return list(get_type_hints(type_, include_extras=True).values())
    except Exception:
        # Only pydantic can resolve the names in these annotations.
        return []


def _within_models(type_: Any) -> list[Any]:
    """Return the direct parts of an annotation. The fields of a pydantic model are parts."""
    fields = [field.annotation for field in type_.model_fields.values()] if _is_model(type_) else []
    return [*_within(type_), *fields]


def _within_unless_serialized(type_: Any) -> list[Any]:
    return [] if has_serializer(getattr(type_, "__metadata__", ())) else _within(type_)


def _fault_of_dicts(annotation: Any) -> str:
    for each in _walk(annotation, _within_unless_serialized):
        args, origin = get_args(each), get_origin(each)
        if args and isinstance(origin, type) and issubclass(origin, Mapping):
            fault = _fault_of_keys_in_model(args[0])
            if fault:
                return fault
    return ""


def _fault_of_keys_in_model(key: Any) -> str:
    try:
        info = msgspec.inspect.type_info(key)
    except Exception:
        # Only pydantic knows the type.
        return ""
    is_serialized = has_serializer(getattr(key, "__metadata__", ()))
    # Pydantic decodes a key that is a bool from its text.
    return "" if is_serialized or isinstance(info, msgspec.inspect.BoolType) else _fault_of_keys(info)


def _fault_of_field(model: Any, name: str) -> str:
    field = model.model_fields[name]
    if field.exclude:
        return f"{name} of {type_name(model)} is excluded, and would be lost: remove the field, or do not exclude it"
    if getattr(model, "__pydantic_root_model__", False):
        return ""
    config, alias = model.model_config, field.validation_alias
    read: list[object] = []
    if alias is not None and config.get("validate_by_alias", True):
        # An alias may have several choices, each a path into the JSON.
        choices = getattr(alias, "choices", [alias])
        paths = [getattr(each, "path", [each]) for each in choices]
        read = [path[0] for path in paths if len(path) == 1]
    if alias is None or config.get("populate_by_name") or config.get("validate_by_name"):
        read.append(name)
    written = field.serialization_alias or name
    if written not in read:
        return (
            f"{name} of {type_name(model)} is written as {written} and not read as that, so it would be lost: "
            "use one alias for both"
        )
    return ""
