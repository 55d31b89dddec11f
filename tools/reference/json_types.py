"""Structs that become JSON, as tables: name, type, default and text of each field."""

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct, UnsetType, to_builtins
from msgspec.structs import FieldInfo, fields

from tools.reference.limits import with_values
from tools.reference.markdown import code, paragraphs, table
from tools.reference.members import members_of

_PLAIN = {str: "text", bytes: "text in base64", int: "number", float: "number", bool: "true or false"}
_VALUES = {"None": "`null`", "True": "`true`", "False": "`false`"}


def fields_table(struct: type[Struct], *, only: Sequence[str] = (), is_request: bool = False) -> str:
    """Return the table of a struct's fields, or of those `only`. A request also has defaults.

    Raises: ValueError if a field has no text
    """
    docs = field_docs(struct)
    rows = []
    for each in fields(struct):
        if not only or each.name in only:
            if not docs.get(each.name):
                raise ValueError(f"{struct.__name__}.{each.name} has no text below it")
            default = (_default(each),) if is_request else ()
            rows.append((code(each.encode_name), type_text(each.type), *default, in_json(docs[each.name])))
    return table(("field", "type", "default", "is") if is_request else ("field", "type", "is"), rows)


def field_docs(struct: type[Struct]) -> dict[str, str]:
    """Return the text of each field, also of inherited ones, by its name in Python."""
    return {
        member.name: member.doc
        for base in reversed(struct.__mro__)
        if issubclass(base, Struct) and base is not Struct
        for member in members_of(base)
    }


def in_json(doc: str) -> str:
    """Return a docstring with the names of JSON for None, True and False, and the values of limits in braces."""
    return re.sub(r"\b(None|True|False)\b", lambda match: _VALUES[match[0]], with_values(doc))


def _default(field: FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    return code(json.dumps(to_builtins(value)))


def type_text(hint: Any) -> str:
    """Return the type of a field as a reader of JSON calls it."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _limited(arguments[0], arguments[1])
    if origin in (Union, UnionType):
        kinds = list(dict.fromkeys(type_text(each) for each in arguments if each not in (NoneType, UnsetType)))
        separator = "; or " if any(", " in kind for kind in kinds) else " or "
        return separator.join((*kinds, "null") if NoneType in arguments else kinds)
    if origin is Literal:
        return " or ".join(code(f'"{value}"') for value in arguments)
    if origin is list or (origin is tuple and arguments[-1] is ...):
        return f"list of {_plural(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_plural(arguments[0])}"
    if origin is dict:
        return f"object of {_plural(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "text"
    if isinstance(hint, type) and issubclass(hint, Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    raise TypeError(f"no text for the type {hint}")


def _limited(hint: Any, limit: Meta) -> str:
    text = type_text(hint)
    if limit.ge is not None and limit.le is not None:
        return f"{text}, {limit.ge} to {limit.le}"
    if limit.ge is not None and limit.lt is None:
        return f"{text}, {limit.ge} or more"
    if limit.max_length is not None:
        return f"{text}, at most {limit.max_length}{' characters' if hint is str else ''}"
    return text


def _plural(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    text = type_text(hint)
    return f"{text}s" if hint in (str, int, float) else text


def struct_parts(struct: type[Struct], level: str) -> Iterator[str]:
    """Yield a heading with the name of a struct, its docstring and the table of its fields."""
    yield f"{level} {struct.__name__}"
    yield from paragraphs(in_json(inspect.cleandoc(struct.__doc__ or "")))
    yield fields_table(struct)


def enum_table(head: str, enum: type[Enum]) -> str:
    """Return the table of an enumeration's values."""
    rows = [(code(str(enum[member.name].value)), member.doc) for member in members_of(enum)]
    return table((head, "means"), rows)
