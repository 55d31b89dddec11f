"""Hypothesis strategies for small types, for values of them, and for changes that programmers make to types."""

from __future__ import annotations

import datetime
import decimal
import enum
import typing
import uuid
from dataclasses import dataclass, make_dataclass, replace
from dataclasses import field as dataclass_field
from typing import Annotated, Any, Literal, NotRequired

import msgspec
import pydantic
from hypothesis import strategies as st

INT64 = st.integers(-(2**53), 2**53)
ZONED = st.datetimes(timezones=st.sampled_from([datetime.UTC]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)

PLAIN: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, INT64),
    "count": (Annotated[int, msgspec.Meta(ge=0, le=9)], st.integers(0, 9)),
    "positive": (Annotated[int, msgspec.Meta(gt=0)], st.integers(1, 20)),
    "float": (float, FLOATS),
    "str": (str, TEXTS),
    "word": (Annotated[str, msgspec.Meta(min_length=1, max_length=4)], st.text("abc", min_size=1, max_size=4)),
    "code": (Annotated[str, msgspec.Meta(pattern="^a+$")], st.text("a", min_size=1, max_size=3)),
    "bytes": (bytes, st.binary(max_size=5)),
    "bool": (bool, st.booleans()),
    "none": (None, st.none()),
    "any": (Any, st.one_of(INT64, TEXTS, st.none(), st.lists(INT64, max_size=2))),
    "moment": (Annotated[datetime.datetime, msgspec.Meta(tz=True)], ZONED),
    "local": (Annotated[datetime.datetime, msgspec.Meta(tz=False)], st.datetimes()),
    "datetime": (datetime.datetime, st.one_of(ZONED, st.datetimes())),
    "time": (datetime.time, st.times()),
    "date": (datetime.date, st.dates()),
    "timedelta": (datetime.timedelta, st.timedeltas(datetime.timedelta(-99), datetime.timedelta(99))),
    "uuid": (uuid.UUID, st.uuids()),
    "decimal": (decimal.Decimal, st.decimals(-99, 99, allow_nan=False, allow_infinity=False)),
}
OF_PYDANTIC = ("int", "float", "str", "bool")
WORDS = ("red", "blue", "green")
LITERALS = (1, 2, "x", "y")
NAMES = ("a", "b", "c", "d", "e")
NOTHING = object()


@dataclass(frozen=True, eq=False)
class Kind:
    """A drawn type: its kind, and its parts."""

    what: str
    parts: tuple[Kind, ...] = ()
    values: tuple[Any, ...] = ()
    """Values of an enum or a literal."""
    fields: tuple[Field, ...] = ()
    options: tuple[str, ...] = ()
    """Options of a struct: array_like, forbid_unknown_fields, omit_defaults, tag."""


@dataclass(frozen=True, eq=False)
class Field:
    name: str
    kind: Kind
    has_default: bool


# ---- Drawing ----


@st.composite
def kinds(draw: st.DrawFn, depth: int = 2) -> Kind:
    plain = [*PLAIN, "int", "str", "int"]
    nested = [*["enum", "literal", "dict"] * 2, "list", "tuple", "numbered", "optional", "structs"]
    what = draw(st.sampled_from(plain if not depth else [*plain, *nested, *["struct"] * 9]))
    if what == "enum":
        return Kind(what, values=draw(_some(WORDS)))
    if what == "literal":
        return Kind(what, values=draw(_some(LITERALS)))
    inner = kinds(depth - 1)
    if what in ("list", "dict", "numbered"):
        return Kind(what, (draw(inner),))
    if what == "tuple":
        return Kind(what, tuple(draw(st.lists(inner, max_size=2))))
    if what == "optional":
        return Kind(what, (draw(inner.filter(lambda each: each.what not in ("optional", "none", "any", "structs"))),))
    if what == "structs":
        return Kind(what, (draw(structs(depth, tag="One")), draw(structs(depth, tag="Two"))))
    if what == "struct":
        return draw(structs(depth))
    return Kind(what)


@st.composite
def structs(draw: st.DrawFn, depth: int = 2, tag: str = "") -> Kind:
    of = (
        "struct"
        if tag
        else draw(st.sampled_from(["struct", "struct", "dataclass", "typed dict", "named tuple", "pydantic"]))
    )
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    made = [draw(_field(name, depth, of)) for name in names]
    options = ()
    if of == "struct":
        may_be = ["forbid_unknown_fields", "omit_defaults", *(() if tag else ["array_like"])]
        options = (*draw(st.lists(st.sampled_from(may_be), max_size=2, unique=True)), *([f"tag {tag}"] if tag else []))
    return Kind(of, fields=tuple(sorted(made, key=lambda each: each.has_default)), options=options)


@st.composite
def _field(draw: st.DrawFn, name: str, depth: int, of: str) -> Field:
    if of == "pydantic":
        inner = st.sampled_from(OF_PYDANTIC).map(Kind)
        kind = draw(st.one_of(inner, inner.map(lambda each: Kind("list", (each,)))))
    else:
        kind = draw(kinds(depth - 1))
    return Field(name, kind, draw(st.booleans()))


def _some(values: tuple[Any, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


# ---- Changes ----


@st.composite
def harmless(draw: st.DrawFn, kind: Kind) -> Kind:
    """Draw a change that keeps old values readable: a field with a default is added, a field is removed, gets a
    default or another place, or a value is added."""
    if kind.what == "enum":
        return replace(kind, values=tuple({**dict.fromkeys(kind.values), draw(st.sampled_from(WORDS)): None}))
    if kind.what == "literal":
        return replace(kind, values=tuple({**dict.fromkeys(kind.values), draw(st.sampled_from(LITERALS)): None}))
    if not kind.fields:
        return replace(kind, parts=tuple(draw(harmless(each)) for each in kind.parts))
    fields = [replace(each, kind=draw(harmless(each.kind))) for each in kind.fields]
    is_positional = kind.what == "named tuple" or "array_like" in kind.options
    change = draw(st.sampled_from(["none", "add", "remove", "default", "order"]))
    if change == "add" and kind.what != "named tuple":
        # Whoever refuses what it does not know, does so only of what comes later.
        fields.append(Field("new", Kind("int"), True))
    elif change == "remove" and "forbid_unknown_fields" not in kind.options and not is_positional:
        fields.pop(draw(st.integers(0, len(fields) - 1)))
    elif change == "default" and not is_positional:
        fields = [replace(each, has_default=True) for each in fields]
    elif change == "order" and not is_positional:
        fields.reverse()
    return replace(kind, fields=tuple(sorted(fields, key=lambda each: each.has_default)))


@st.composite
def changed(draw: st.DrawFn, kind: Kind) -> Kind:
    """Draw any change: in each place, now and then another type."""
    what = draw(st.integers(0, 9))
    if what == 0:
        return draw(kinds(1))
    if what < 5 and kind.values:
        return replace(kind, values=draw(_some(WORDS if kind.what == "enum" else LITERALS)))
    if what < 3 and kind.what in ("dict", "numbered"):
        return replace(kind, what="numbered" if kind.what == "dict" else "dict")
    if what == 1 and kind.what == "list":
        return Kind("struct", fields=(Field("a", draw(changed(kind.parts[0])), True),), options=("array_like",))
    parts = tuple(draw(changed(each)) for each in kind.parts)
    if kind.what in ("optional", "structs"):
        # Not everything can be in a union.
        parts = kind.parts
    fields = (
        [replace(each, kind=draw(changed(each.kind))) for each in kind.fields]
        if kind.what != "pydantic"
        else list(kind.fields)
    )
    for change in draw(st.lists(st.sampled_from(["remove", "add", "default", "order", "options"]), max_size=2)):
        if change == "remove" and fields:
            fields.pop(draw(st.integers(0, len(fields) - 1)))
        elif change == "add" and kind.fields and all(each.name != "new" for each in fields):
            fields.append(Field("new", Kind("int"), draw(st.booleans())))
        elif change == "default":
            fields = [replace(each, has_default=draw(st.booleans())) for each in fields]
        elif change == "order":
            fields.reverse()
        elif change == "options" and kind.what == "struct":
            tags = tuple(each for each in kind.options if each.startswith("tag"))
            kind = replace(kind, options=(*tags, *draw(st.sampled_from([(), ("forbid_unknown_fields",)]))))
    return replace(kind, parts=parts, fields=tuple(sorted(fields, key=lambda each: each.has_default)))


# ---- Types and values ----


class Made:
    """Types made of one kind, each made once."""

    def __init__(self, kind: Kind) -> None:
        self._types: dict[Kind, Any] = {}
        self.kind = kind
        self.type = self._type(kind)

    def _type(self, kind: Kind) -> Any:
        if kind not in self._types:
            self._types[kind] = self._make(kind)
        return self._types[kind]

    def _make(self, kind: Kind) -> Any:
        parts = [self._type(each) for each in kind.parts]
        match kind.what:
            case "enum":
                return enum.Enum("Colour", {each.upper(): each for each in kind.values})
            case "literal":
                return Literal[kind.values]
            case "list":
                return list[parts[0]]  # type: ignore[valid-type]
            case "tuple":
                return tuple.__class_getitem__(tuple(parts)) if parts else tuple[()]
            case "dict":
                return dict[str, parts[0]]  # type: ignore[valid-type]
            case "numbered":
                return dict[int, parts[0]]  # type: ignore[valid-type]
            case "optional" | "structs":
                return typing.Union[(*parts, None)] if kind.what == "optional" else typing.Union[tuple(parts)]  # noqa: UP007
            case "struct" | "dataclass" | "typed dict" | "named tuple" | "pydantic":
                return self._make_struct(kind)
            case _:
                return PLAIN[kind.what][0]

    def _make_struct(self, kind: Kind) -> Any:
        fields = {each.name: self._type(each.kind) for each in kind.fields}
        defaults = {each.name: self.default(each.kind) for each in kind.fields if each.has_default}
        if kind.what == "dataclass":
            return make_dataclass(
                "Dataclass",
                [
                    (name, type_, dataclass_field(default_factory=lambda name=name: defaults[name]))  # type: ignore[misc]
                    if name in defaults
                    else (name, type_)
                    for name, type_ in fields.items()
                ],
            )
        if kind.what == "typed dict":
            annotations = {name: NotRequired[type_] if name in defaults else type_ for name, type_ in fields.items()}
            return typing.TypedDict("Typed", annotations)  # type: ignore[operator]
        if kind.what == "named tuple":
            made = typing.NamedTuple("Named", list(fields.items()))  # type: ignore[misc]
            made.__new__.__defaults__ = tuple(defaults.values())
            made._field_defaults = defaults
            return made
        if kind.what == "pydantic":
            return pydantic.create_model(  # type: ignore[call-overload]
                "Model", **{name: (type_, defaults.get(name, ...)) for name, type_ in fields.items()}
            )
        tag = next((each.removeprefix("tag ") for each in kind.options if each.startswith("tag ")), None)
        return msgspec.defstruct(
            "Struct",
            [
                (name, type_, msgspec.field(default_factory=lambda name=name: defaults[name]))  # type: ignore[misc]
                if name in defaults
                else (name, type_)
                for name, type_ in fields.items()
            ],
            tag=tag,
            **{each: True for each in kind.options if not each.startswith("tag ")},  # type: ignore[arg-type]
        )

    def default(self, kind: Kind) -> Any:
        """Return a default value of this kind."""
        plain = {"int": 1, "count": 2, "positive": 3, "float": 1.5, "str": "s", "word": "w", "code": "a", "bool": True}
        match kind.what:
            case "list":
                return []
            case "dict" | "numbered":
                return {}
            case "optional":
                return None
            case "enum":
                return next(iter(self._type(kind)))
            case "literal":
                return kind.values[0]
            case "tuple":
                return tuple(map(self.default, kind.parts))
            case "structs":
                return self.default(kind.parts[0])
            case "bytes":
                return b"b"
            case "none" | "any":
                return None
            case "moment":
                return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
            case "local" | "datetime":
                return datetime.datetime(2026, 1, 1)
            case "time":
                return datetime.time(1)
            case "date":
                return datetime.date(2026, 1, 1)
            case "timedelta":
                return datetime.timedelta(1)
            case "uuid":
                return uuid.UUID(int=1)
            case "decimal":
                return decimal.Decimal(1)
            case what if what in plain:
                return plain[what]
        return self._type(kind)(**{each.name: self.default(each.kind) for each in kind.fields})

    def values(self, kind: Kind | None = None) -> st.SearchStrategy[Any]:
        kind = kind or self.kind
        type_, parts = self._type(kind), kind.parts
        match kind.what:
            case "enum":
                return st.sampled_from(list(type_))
            case "literal":
                return st.sampled_from(kind.values)
            case "list":
                return st.lists(self.values(parts[0]), max_size=2)
            case "tuple":
                return st.tuples(*map(self.values, parts))
            case "dict":
                return st.dictionaries(TEXTS, self.values(parts[0]), max_size=2)
            case "numbered":
                return st.dictionaries(INT64, self.values(parts[0]), max_size=2)
            case "optional":
                return st.none() | self.values(parts[0])
            case "structs":
                return st.one_of(*map(self.values, parts))
            case what if what in PLAIN:
                return PLAIN[what][1]
        needed = {each.name: self.values(each.kind) for each in kind.fields if not each.has_default}
        optional = {each.name: self.values(each.kind) for each in kind.fields if each.has_default}
        return st.fixed_dictionaries(needed, optional=optional).map(lambda fields: type_(**fields))
