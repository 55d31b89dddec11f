"""Tests of mismatches between an old type and a new one, and of their places. Source: docs/stages-running.md"""

import datetime
import decimal
import enum
import uuid
from dataclasses import field as dataclass_field
from dataclasses import make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import pydantic
import pytest

from truenext.stage.core.codec import Codec
from truenext.stage.core.schema import schema_of
from truenext.stage.introspection.mismatch import find_mismatches


class Red(enum.Enum):
    RED = "red"


class RedOrBlue(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Line(msgspec.Struct):
    price: int


class PricedInWords(msgspec.Struct):
    price: str


class Tree(msgspec.Struct):
    name: str
    below: "list[Tree]" = []


class NumberedTree(msgspec.Struct):
    name: int
    below: "list[NumberedTree]" = []


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    a: int = 0


class Cat(msgspec.Struct, tag=True):
    name: str


class Dog(msgspec.Struct, tag=True):
    name: str


class Model(pydantic.BaseModel):
    a: int


class LongerModel(pydantic.BaseModel):
    a: int
    b: int


def struct(*fields: Any) -> Any:
    return msgspec.defstruct("Struct", fields)


def model(**fields: Any) -> Any:
    needed: dict[str, Any] = {name: (type_, ...) for name, type_ in fields.items()}
    return pydantic.create_model("Model", **needed)


def found(old: Any, new: Any) -> list[tuple[str, str]]:
    written, expected = (schema_of(Codec(each, "this").type) for each in (old, new))
    return [(each.path, each.kind) for each in find_mismatches(written, expected)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (struct(), struct(("a", int)), [("a", "field")]),
        (struct(("a", int, 1)), struct(("a", int)), [("a", "field")]),
        (struct(("a", int)), struct(("a", str)), [("a", "type")]),
        (struct(("a", int | None)), struct(("a", int)), [("a", "type")]),
        (struct(("a", float)), struct(("a", int)), [("a", "type")]),
        (struct(("a", str)), struct(("a", datetime.datetime)), [("a", "type")]),
        (struct(("a", datetime.datetime)), struct(("a", datetime.date)), [("a", "type")]),
        (struct(("a", RedOrBlue)), struct(("a", Red)), [("a", "value")]),
        (struct(("a", Literal[1, 2])), struct(("a", Literal[1])), [("a", "value")]),
        (struct(("a", str)), struct(("a", Red)), [("a", "value")]),
        (struct(("a", int)), struct(("a", Annotated[int, msgspec.Meta(ge=0)])), [("a", "bound")]),
        (struct(("a", str)), struct(("a", Annotated[str, msgspec.Meta(pattern="^a")])), [("a", "bound")]),
        (struct(("a", list[Line])), struct(("a", list[PricedInWords])), [("a[].price", "type")]),
        (struct(("a", dict[str, Line])), struct(("a", dict[str, PricedInWords])), [("a{}.price", "type")]),
        (dict[str, int], dict[int, int], [("{}", "type")]),
        (model(a=dict[str, int]), model(a=dict[int, int]), [("a{}", "type")]),
        (struct(("a", int)), dict[int, int], [("a", "type")]),
        (dict[str, int], struct(("a", str, "")), [("a", "type")]),
        (list[int], tuple[int, int], [("", "bound"), ("", "bound")]),
        (tuple[int, int], tuple[int], [("", "bound")]),
        (tuple[int, str], tuple[int, int], [("[1]", "type")]),
        (Tree, NumberedTree, [("name", "type")]),
        (struct(("a", int), ("b", int)), Closed, [("b", "type")]),
        (Cat | Dog, Cat, [("type", "value")]),
        (struct(("a", Cat | None)), struct(("a", Dog | None)), [("a.type", "value")]),
        (LongerModel, Model, []),
        (Model, LongerModel, [("b", "field")]),
        (Any, struct(), [("", "type")]),
    ],
    ids=str,
)
def test_values_that_the_new_type_cannot_read_are_found(old: Any, new: Any, expected: list[tuple[str, str]]) -> None:
    assert found(old, new) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (struct(("a", int)), struct(("a", int), ("b", int, 0))),
        (struct(("a", int), ("b", int)), struct(("b", int))),
        (struct(("a", int)), struct(("a", int, 7))),
        (struct(("a", int)), struct(("a", float))),
        (struct(("a", int)), struct(("a", int | str | None))),
        (struct(("a", Red)), struct(("a", RedOrBlue))),
        (struct(("a", Red)), struct(("a", str))),
        (struct(("a", datetime.datetime)), struct(("a", str))),
        (Cat, Cat | Dog),
        (Tree, Tree),
        (struct(("a", int)), Any),
        (tuple[int, int], list[int]),
        (struct(("a", int)), dict[str, int]),
    ],
    ids=str,
)
def test_changes_that_keep_old_values_readable_are_no_mismatch(old: Any, new: Any) -> None:
    assert found(old, new) == []


class First(enum.IntEnum):
    RED = 1
    BLUE = 2


class Swapped(enum.IntEnum):
    RED = 2
    BLUE = 1


class Renamed(enum.IntEnum):
    CRIMSON = 1
    BLUE = 2


class Place(NamedTuple):
    x: int
    y: int


class PlaceSwapped(NamedTuple):
    y: int
    x: int


class PlaceLonger(NamedTuple):
    x: int
    y: int
    z: int = 0


class PlaceInserted(NamedTuple):
    z: int
    x: int
    y: int = 0


class PlaceRenamed(NamedTuple):
    x: int
    depth: int


class TypedPlace(TypedDict):
    x: int
    y: NotRequired[int]


class TypedPlaceRenamed(TypedDict):
    x: int
    z: NotRequired[int]


class ModelRenamed(pydantic.BaseModel):
    b: int = 0


class BytesModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    a: bytes


class TextModel(pydantic.BaseModel):
    a: str


class Debit(msgspec.Struct, tag="d"):
    amount: int = 0


class Credit(msgspec.Struct, tag="c"):
    amount: int = 0


class Fee(msgspec.Struct, tag="f"):
    amount: int = 0


class DebitModel(pydantic.BaseModel):
    kind: Literal["d"]


class CreditModel(pydantic.BaseModel):
    kind: Literal["c"]


DebitOfCredit = msgspec.defstruct("Debit", [("amount", int, 0)], tag="c")
CreditOfDebit = msgspec.defstruct("Credit", [("amount", int, 0)], tag="d")
CreditOfDebitRenamed = msgspec.defstruct("Credit", [("total", int, 0)], tag="d")
PaymentOfDebit = msgspec.defstruct("Payment", [("amount", int, 0)], tag="d")


class Chain(msgspec.Struct):
    data: bytes
    next: "Chain | None" = None


def tagged(name: str, tag: Any) -> Any:
    fields: dict[str, Any] = {"kind": (tag, ...)}
    return pydantic.create_model(name, **fields)


def row(*fields: Any, **options: Any) -> Any:
    return msgspec.defstruct("Row", fields, array_like=True, **options)


def sparse(*fields: Any) -> Any:
    return msgspec.defstruct("Sparse", fields, omit_defaults=True)


def plain(*fields: Any) -> Any:
    return make_dataclass("Plain", fields)


a_int, b_int = ("a", int), ("b", int)
camel = msgspec.defstruct("Camel", [("some_name", int, 0)], rename="camel")
snake = msgspec.defstruct("Snake", [("some_name", int, 0)])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # Read as something else, without an error.
        (bytes, str, [("", "meaning")]),
        (struct(("a", bytes)), struct(("a", str | None)), [("a", "meaning")]),
        (struct(("a", bytes | None)), struct(("a", str | None)), [("a", "meaning")]),
        (struct(("a", list[bytes])), struct(("a", list[str])), [("a[]", "meaning")]),
        (dict[bytes, int], dict[str, int], [("{}", "meaning")]),
        (BytesModel, TextModel, [("a", "meaning")]),
        (First, Swapped, [("", "meaning"), ("", "meaning")]),
        (Place, PlaceSwapped, [("[0]", "meaning"), ("[1]", "meaning")]),
        (Place, PlaceInserted, [("[0]", "meaning"), ("[1]", "meaning")]),
        (struct(("a", Place)), struct(("a", PlaceSwapped | None)), [("a[0]", "meaning"), ("a[1]", "meaning")]),
        (row(a_int, b_int), row(b_int, a_int), [("[0]", "meaning"), ("[1]", "meaning")]),
        (row(a_int, b_int), row(b_int), [("[0]", "meaning")]),
        (list[int], set[int], [("", "meaning")]),
        (tuple[int, int], frozenset[int], [("", "meaning")]),
        (sparse(("a", int, 1)), sparse(("a", int, 2)), [("a", "default")]),
        (sparse(("a", int, 1)), struct(("a", int, 2)), [("a", "default")]),
        (sparse(("a", int, 1)), struct(("a", int, msgspec.field(default_factory=lambda: 1))), [("a", "default")]),
        (sparse(("a", int, 1)), struct(a_int), [("a", "field")]),
        (sparse(("a", list[int], [])), sparse(("a", list[int] | None, None)), [("a", "default")]),
        (bytes, Any, [("", "meaning")]),
        (struct(("a", bytes | None)), struct(("a", Any)), [("a", "meaning")]),
        (struct(("a", bytes)), dict[str, Any], [("a", "meaning")]),
        (struct(("a", list[Chain])), struct(("a", list)), [("a[].data", "meaning")]),
        (struct(("a", dict[bytes, int])), struct(("a", Any)), [("a{}", "meaning")]),
        (BytesModel, dict[str, Any], [("a", "meaning")]),
        (model(a=First), model(a=Swapped), [("a", "meaning"), ("a", "meaning")]),
        (model(a=Place), model(a=PlaceSwapped), [("a[0]", "meaning"), ("a[1]", "meaning")]),
        (model(a=list[Place]), model(a=list[PlaceInserted]), [("a[][0]", "meaning"), ("a[][1]", "meaning")]),
        (model(a=dict[First, int]), model(a=dict[Swapped, int]), [("a{}", "meaning"), ("a{}", "meaning")]),
        (Debit | Credit, DebitOfCredit | CreditOfDebit, [("", "meaning"), ("", "meaning")]),
        (struct(("a", Debit | None)), struct(("a", CreditOfDebit | DebitOfCredit | None)), [("a", "meaning")]),
        (Debit | Fee, DebitOfCredit | CreditOfDebitRenamed | Fee, [("", "meaning")]),
        (
            model(a=DebitModel | CreditModel),
            model(a=tagged("DebitModel", Literal["c"]) | tagged("CreditModel", Literal["d"])),
            [("a", "meaning"), ("a", "meaning")],
        ),
        # Perhaps.
        (struct(a_int), struct(("b", int, 0)), [("", "renamed")]),
        (struct(("s", struct(a_int))), struct(("s", struct(("b", int, 0)) | None)), [("s", "renamed")]),
        (plain(a_int), plain(("b", int, dataclass_field(default=0))), [("", "renamed")]),
        (Model, ModelRenamed, [("", "renamed")]),
        (TypedPlace, TypedPlaceRenamed, [("", "renamed")]),
        (camel, snake, [("", "renamed")]),
        (Place, PlaceRenamed, [("[1]", "replaced")]),
        (model(a=Place), model(a=PlaceRenamed), [("a[1]", "replaced")]),
        # Not read, or not any more.
        (str, bytes, [("", "type")]),
        (str, uuid.UUID, [("", "type")]),
        (datetime.timedelta, datetime.datetime, [("", "type")]),
        (decimal.Decimal, float, [("", "type")]),
        (float, datetime.timedelta, [("", "type")]),
        (bool, int, [("", "type")]),
        (Place, struct(("x", int)), [("", "type")]),
        (camel, struct(("some_name", int)), [("some_name", "field")]),
        # Read as what it was.
        (uuid.UUID, str, []),
        (datetime.date, str, []),
        (datetime.timedelta, str, []),
        (decimal.Decimal, str, []),
        (float, decimal.Decimal, []),
        (First, int, []),
        (First, Renamed, []),
        (dict[int, str], dict[str, str], []),
        (set[int], list[int], []),
        (Place, PlaceLonger, []),
        (Place, tuple[int, int], []),
        (tuple[int, int], Place, []),
        (row(a_int), row(a_int, ("b", int, 0)), []),
        (sparse(("a", int, 1)), sparse(("a", float, 1.0)), []),
        (sparse(("a", list[int], [])), sparse(("a", list[int], [])), []),
        (struct(("a", int, 1)), sparse(("a", int, 2)), []),
        (struct(a_int, b_int), struct(b_int, a_int), []),
        (plain(a_int), struct(a_int), []),
        (Literal["x"], str, []),
        (datetime.date, Any, []),
        (struct(("a", uuid.UUID), ("b", set[decimal.Decimal])), dict[str, Any], []),
        (dict[int, str], Any, []),
        (Any, Any, []),
        (Tree, Any, []),
        (Debit | Credit, Credit | Debit | Fee, []),
        (Debit | Credit, PaymentOfDebit | Credit, []),
        (model(a=First), model(a=Renamed), []),
        (model(a=Place), model(a=PlaceLonger), []),
        (model(a=Place), model(a=tuple[int, int]), []),
        (model(a=DebitModel | CreditModel), model(a=CreditModel | DebitModel), []),
        (model(a=dict[RedOrBlue, int]), model(a=dict[str, int]), []),
    ],
    ids=str,
)
def test_meaning_of_json_to_the_old_and_new_type_is_compared(
    old: Any, new: Any, expected: list[tuple[str, str]]
) -> None:
    assert found(old, new) == expected


def test_unknown_schema_keyword_is_a_mismatch() -> None:
    schema = {"type": "string", "futureWord": 1}
    assert [each.kind for each in find_mismatches({"type": "string"}, schema)] == ["bound"]
    assert find_mismatches(schema, schema) == []
