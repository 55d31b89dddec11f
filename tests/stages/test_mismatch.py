"""What of a type that has changed can no longer be read, and where? Source: docs/stages-deploying.md"""

import datetime
import enum
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from truenext.stage.core.codec import Codec
from truenext.stage.core.mismatch import mismatches


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


def found(old: Any, new: Any) -> list[tuple[str, str]]:
    return [(each.path, each.kind) for each in mismatches(Codec(old, "old").schema(), Codec(new, "new").schema())]


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
def test_what_can_no_longer_be_read_is_found(old: Any, new: Any, expected: list[tuple[str, str]]) -> None:
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
def test_what_can_be_read_still_is_not_named(old: Any, new: Any) -> None:
    assert found(old, new) == []


def test_what_is_not_known_is_named() -> None:
    schema = {"type": "string", "futureWord": 1}
    assert [each.kind for each in mismatches({"type": "string"}, schema)] == ["bound"]
    assert mismatches(schema, schema) == []
