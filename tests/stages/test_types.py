"""Tests of types of messages, replies and states, and of values of other types. Source: docs/stages.md"""

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from pydantic.alias_generators import to_camel

import truenext
from tests.stages.flows import Memo, Number, Text, run
from truenext.errors import TruenextError
from truenext.stage import DefinitionError, Flow, FlowError, NotDecoded, Service
from truenext.stage.core.codec import Codec
from truenext.testing.stages import Stages


class Color(Enum):
    RED = "red"


class Item(msgspec.Struct):
    name: str
    prices: list[Decimal] = []


@dataclass
class Line:
    item: Item
    count: int = 1
    notes: dict[str, Any] = field(default_factory=dict)


class Customer(pydantic.BaseModel):
    id: UUID
    born: date | None = None
    age: int = pydantic.Field(default=18, ge=18)
    memos: list[Memo] = []


class Envelope(msgspec.Struct):
    """One field of each kind, nested."""

    customer: Customer
    lines: list[Line]
    at: datetime
    color: Color = Color.RED
    raw: bytes = b""


class Keyed(TypedDict):
    n: int


class Frozen(msgspec.Struct, frozen=True):
    n: int = 0


CUSTOMER = Customer(id=UUID(int=7), born=date(2000, 1, 2), memos=[Memo(1, "x")])
LINE = Line(Item("tea", [Decimal("1.10")]), 2, {"a": [1, None, {"b": 1.5}]})

VALUES: dict[str, tuple[Any, Any]] = {
    "a Struct": (Item, Item("tea", [Decimal("1.10")])),
    "a dataclass": (Line, LINE),
    "a model of pydantic": (Customer, CUSTOMER),
    "all in one another": (Envelope, Envelope(CUSTOMER, [LINE], datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), raw=b"\0")),
    "a list of Structs": (list[Item], [Item("a"), Item("b")]),
    "a list of models": (list[Customer], [CUSTOMER]),
    "a dict": (dict[str, int], {"a": 1}),
    "a TypedDict": (Keyed, {"n": 1}),
    "a tuple": (tuple[int, str], (1, "a")),
    "a text": (str, "text"),
    "a number": (int, 7),
    "a float that is given as a whole number": (float, 7),
    "a truth": (bool, True),
    "nothing or something": (Item | None, None),
    "a time": (datetime, datetime(2026, 1, 2, tzinfo=UTC)),
    "an enum": (Color, Color.RED),
    "whatever JSON has": (Any, {"a": [1, "x", None]}),
}


@pytest.mark.parametrize("what", VALUES)
def test_value_of_every_type_is_decoded_as_it_was_encoded(what: str) -> None:
    kind, value = VALUES[what]
    codec: Codec[Any] = Codec(kind, "what is tested")
    received = codec.decode(codec.encode(value))
    assert received == value
    assert type(received) is type(value) or kind is float


def test_messages_replies_and_states_of_all_kinds_go_through_a_broker() -> None:
    app = Service("shop")
    seen: list[object] = []
    first = app.endpoint("first", Customer, Line, state=Memo)
    second = app.endpoint("second", list[Item], Envelope, state=dict[str, int])

    @first.stage
    async def answer(customer: Customer, memo: Memo) -> Line:
        seen.append(customer)
        return LINE

    @second.stage
    async def answer_too(items: list[Item], state: dict[str, int]) -> Envelope:
        seen.append(items)
        return Envelope(CUSTOMER, [LINE], datetime(2026, 1, 2, tzinfo=UTC))

    async def work(t: Stages) -> None:
        assert await t.ask(first, CUSTOMER) == LINE
        reply = await t.ask(second, [Item("a")])
        assert (reply.customer, reply.lines) == (CUSTOMER, [LINE])
        assert seen == [CUSTOMER, [Item("a")]]

    run(app, work)


def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults() -> None:
    class Old(msgspec.Struct):
        id: str
        gone: int = 1

    class New(msgspec.Struct):
        id: str
        added: str = "default"

    @dataclass
    class NewLine:
        id: str
        added: str = "default"

    class NewModel(pydantic.BaseModel):
        id: str
        added: str = "default"

    sent = Codec(Old, "what is sent").encode(Old("7"))
    assert Codec(New, "what comes").decode(sent) == New("7")
    assert Codec(NewLine, "what comes").decode(sent) == NewLine("7")
    assert Codec(NewModel, "what comes").decode(sent) == NewModel(id="7")


def test_unknown_fields_of_a_reply_are_ignored_and_missing_ones_have_their_defaults() -> None:
    class TheirReply(msgspec.Struct):
        ok: bool
        more: tuple[int, ...] = (1, 2)

    class OurReply(msgspec.Struct):
        ok: bool
        missing: str = "default"

    app = Service("shop")
    stock = app.remote("stock", Number, OurReply)
    remote = Service("stock")

    @remote.single("stock", Number, TheirReply)
    async def answer(number: Number) -> TheirReply:
        return TheirReply(True)

    async def work(t: Stages) -> None:
        remote.broker = (t.broker.url,)
        async with remote.running():
            assert await t.ask(stock, Number()) == OurReply(True)

    run(app, work)


# ---- What is none ----


@pytest.mark.parametrize(
    "body",
    [
        b"plain text",
        b"",
        b"\xff\xfe",
        b'{"n": 1}',
        b"[1, 2]",
        b"[" * 50_000,
        b'{"version": 3, "id": "a", "flow": {"id": "a", "trace": "t", "startedMs": 1, "startedBy": "x"},'
        b' "kind": "send", "sender": "x", "message": {"n": 1}}',
        b'{"version": 1, "id": "a", "flow": {"id": "a", "trace": "t", "begunMs": 1, "begunBy": "x"},'
        b' "kind": "send", "sender": "x", "message": {"n": 1}}',
    ],
    ids=["text", "empty", "not UTF-8", "other JSON", "a list", "deep", "a later version", "an earlier version"],
)
def test_foreign_message_in_the_queue_of_a_stage_is_a_dead_letter_at_once(body: bytes) -> None:
    app = Service("shop", concurrency=1)
    received: list[Number] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number)

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            await connection.send("/queue/take", body)
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.queue, letter.attempts, letter.message) == ("take", 1, body)
        await t.send(take, Number(1))
        await t.wait_until_ended(dead_letters=1)
        assert received == [Number(1)]

    run(app, work)


def test_a_message_of_a_flow_that_is_not_what_its_stage_takes_is_a_dead_letter_at_once() -> None:
    """Two services have different definitions of one endpoint."""
    app = Service("shop")
    ran: list[Number] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        ran.append(number)

    class Wrong(msgspec.Struct):
        n: str

    remote = app.remote("take", Wrong)

    async def work(t: Stages) -> None:
        await t.send(remote, Wrong("x"), trace="o7")
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.trace, letter.message, letter.attempts, ran) == ("o7", {"n": "x"}, 1, [])

    run(app, work)


def test_a_state_that_is_none_any_more_is_a_dead_letter_at_once() -> None:
    app = Service("shop")
    ran: list[Number] = []

    @app.terminator("take", Number, state=Memo)
    async def take(number: Number, memo: Memo) -> None:
        ran.append(number)

    remote = app.remote("take", Number)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(remote, Number(), trace="t", state={"n": "x"})
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.attempts, ran) == (1, [])

    run(app, work)


def test_a_model_that_refuses_a_value_says_so_at_the_sender_and_at_the_receiver() -> None:
    codec = Codec(Customer, "what is tested")
    with pytest.raises(NotDecoded, match="greater than or equal to 18"):
        codec.decode(b'{"id": "00000000-0000-0000-0000-000000000007", "age": 3}')
    with pytest.raises(FlowError, match="greater than or equal to 18"):
        codec.encode(Customer.model_construct(id=UUID(int=7), age=3))


SAME_JSON: dict[str, tuple[Any, Any]] = {
    "another Struct whose fields have defaults": (Number, Text("x")),
    "a dataclass for a Struct": (Number, Memo()),
    "a Struct for a dataclass": (Memo, Number()),
    "another model": (Customer, Item("x")),
    "a text for a Struct": (Number, "x"),
    "a list for a Struct": (Number, [1]),
    "None for a Struct": (Number, None),
    "a field of a wrong type": (Number, Number("x")),  # type: ignore[arg-type]
    "a field of a wrong type in a dataclass": (Memo, Memo("x")),  # type: ignore[arg-type]
    "a field of a wrong type deep inside": (list[Line], [Line(Item(7))]),  # type: ignore[arg-type]
    "what cannot be JSON": (dict[str, object], {"x": object()}),
    "a text for a number": (int, "7"),
    "a truth for a number": (int, True),
}


@pytest.mark.parametrize("what", SAME_JSON)
def test_value_of_another_type_is_refused_when_it_is_encoded(what: str) -> None:
    kind, value = SAME_JSON[what]
    with pytest.raises(TruenextError):
        Codec(kind, "what is tested").encode(value)


def test_a_value_of_a_subclass_is_one_of_its_class() -> None:
    class Same(Number):
        def doubled(self) -> int:
            return 2 * self.n

    codec = Codec(Number, "what is tested")
    assert codec.decode(codec.encode(Same(3))) == Number(3)


class MoreNumber(Number):
    more: int = 1


@dataclass
class MoreMemo(Memo):
    more: int = 1


class MoreCustomer(Customer):
    more: int = 1


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Number, MoreNumber()), (Memo, MoreMemo()), (Customer, MoreCustomer(id=UUID(int=7)))],
    ids=["Struct", "dataclass", "model"],
)
def test_a_value_of_a_subclass_that_has_more_fields_is_refused_where_it_is_said(kind: Any, value: Any) -> None:
    with pytest.raises(
        FlowError, match=rf"{type(value).__name__} has fields that {kind.__name__} does not.* lost: more"
    ):
        Codec(kind, "what is tested").encode(value)


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        (Frozen, "keys that are Frozen"),
        (tuple[int, int], "keys that are tuple"),
        (bool, "keys that are bool"),
        (str | None, "keys that are none"),
        (Keyed, "keys that are Keyed"),
        (Customer, "keys that are Customer"),
        (int | str, "texts or numbers"),
    ],
)
def test_a_dict_whose_keys_json_does_not_have_is_refused_by_name(key: Any, pattern: str) -> None:
    class Has(msgspec.Struct):
        counts: list[dict[key, int]]

    with pytest.raises(DefinitionError, match=rf"what is tested is Has, in which a dict has .*{pattern}"):
        Codec(Has, "what is tested")


@pytest.mark.parametrize("value", [{"a": 1}, {1: 1}, {1.5: 1}, {Color.RED: 1}, {UUID(int=7): 1}, {date(2026, 1, 2): 1}])
def test_a_dict_comes_back_with_its_keys(value: dict[Any, int]) -> None:
    (key,) = value
    kind: Any = dict.__class_getitem__((type(key), int))
    codec: Codec[Any] = Codec(kind, "what is tested")
    assert codec.decode(codec.encode(value)) == value


class WritesOtherwise(pydantic.BaseModel):
    id: int = pydantic.Field(0, serialization_alias="number")


class ReadsOtherwise(pydantic.BaseModel):
    id: int = pydantic.Field(0, validation_alias="number")


class ReadsWithin(pydantic.BaseModel):
    id: int = pydantic.Field(0, validation_alias=pydantic.AliasPath("ids", 0))


class Excludes(pydantic.BaseModel):
    id: int = pydantic.Field(0, exclude=True)


class Secret(pydantic.BaseModel):
    word: pydantic.SecretStr | None = None


class HasOne(pydantic.BaseModel):
    within: dict[str, list[WritesOtherwise]] = {}


class KeyedByPairs(pydantic.BaseModel):
    within: dict[tuple[int, int], int] = {}


class HasKeyedByPairs(pydantic.BaseModel):
    each: list[KeyedByPairs] | None = None


class Table(NamedTuple):
    cells: dict[tuple[int, int], int]


@dataclass
class Tables:
    each: "list[Table]"


class HasTables(pydantic.BaseModel):
    tables: dict[str, Tables] = {}


class KeyedByNone(pydantic.BaseModel):
    within: dict[str | None, int] = {}


class KeyedByBoth(pydantic.BaseModel):
    within: Mapping[int | str, int] = {}


class KeyedByModels(pydantic.BaseModel):
    within: dict[Customer, int] = {}


Cell = Annotated[
    tuple[int, int],
    pydantic.BeforeValidator(lambda cell: tuple(map(int, cell.split("-"))) if isinstance(cell, str) else cell),
    pydantic.PlainSerializer(lambda cell: f"{cell[0]}-{cell[1]}"),
]


class KeyedByWhatComesBack(pydantic.BaseModel):
    cells: dict[Cell, int]
    bools: dict[bool, int]
    numbers: dict[int, Color | None]
    addresses: dict[IPv4Address, int]
    pairs: dict[tuple[int, int], int]
    bare: typing.Dict = {}  # type: ignore[type-arg]  # noqa: UP006

    @pydantic.field_serializer("pairs")
    def written(self, pairs: dict[tuple[int, int], int]) -> list[object]:
        return [[*each] for each in pairs.items()]

    @pydantic.field_validator("pairs", mode="before")
    @classmethod
    def read(cls, pairs: Any) -> Any:
        return {tuple(key): value for key, value in pairs} if isinstance(pairs, list) else pairs


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (KeyedByPairs, "a dict has keys that are tuple"),
        (HasKeyedByPairs, "a dict has keys that are tuple"),
        (HasTables, "a dict has keys that are tuple"),
        (KeyedByNone, "a dict has keys that are none"),
        (KeyedByBoth, "a dict has keys that are texts or numbers"),
        (KeyedByModels, "a dict has keys that are Customer"),
        (WritesOtherwise, "id of WritesOtherwise is written as number and not read as that"),
        (ReadsOtherwise, "id of ReadsOtherwise is written as id and not read as that"),
        (ReadsWithin, "id of ReadsWithin is written as id and not read as that"),
        (Excludes, "id of Excludes is excluded"),
        (Secret, "Secret has a SecretStr, which would be sent as stars"),
        (HasOne, "id of WritesOtherwise is written as number and not read as that"),
    ],
)
def test_a_model_that_would_not_come_back_as_it_was_is_refused_by_name(model: Any, pattern: str) -> None:
    with pytest.raises(DefinitionError, match=rf"what is tested is list\[.*{model.__name__}\], in which {pattern}"):
        Codec(list[model], "what is tested")


class Aliased(pydantic.BaseModel):
    """One field of each kind of alias that survives a round trip; unknown fields are refused."""

    model_config = pydantic.ConfigDict(extra="forbid")
    id: int = pydantic.Field(alias="number")
    either: int = pydantic.Field(0, validation_alias=pydantic.AliasChoices("one", "either"))
    both: int = pydantic.Field(0, validation_alias="two", serialization_alias="two")
    inner: pydantic.Json[list[int]] = []
    next: "Aliased | None" = None

    @pydantic.computed_field
    def doubled(self) -> int:
        return 2 * self.id


class Camel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=to_camel, populate_by_name=True)
    first_name: str = ""


class Root(pydantic.RootModel[list[int]]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Aliased.model_validate({"number": 7, "one": 8, "two": 9, "inner": "[1]", "next": {"number": 1}}),
        Camel(first_name="Ada"),
        Root([1, 2]),
        KeyedByWhatComesBack(
            cells={(1, 2): 3}, bools={True: 1}, numbers={1: None}, addresses={IPv4Address(7): 1}, pairs={(1, 2): 3}
        ),
    ],
    ids=["aliases", "generated aliases", "a root", "keys"],
)
def test_a_model_comes_back_with_its_aliases_and_what_it_computes(value: pydantic.BaseModel) -> None:
    codec: Codec[Any] = Codec(type(value), "what is tested")
    assert codec.decode(codec.encode(value)) == value


def test_decoded_data_names_no_class() -> None:
    """Names that other serializers take for classes are plain fields."""
    codec: Codec[Any] = Codec(dict[str, Any], "what is tested")
    data = b'{"__class__": "subprocess.Popen", "py/object": "os.system", "!!python/object": "x"}'
    assert codec.decode(data) == {"__class__": "subprocess.Popen", "py/object": "os.system", "!!python/object": "x"}


# ---- What would come back as something else ----


class Priced(msgspec.Struct):
    price: float | None = None


@dataclass
class Order:
    items: list[Priced] = field(default_factory=list)
    below: "Order | None" = None
    more: dict[str, Any] = field(default_factory=dict)
    ratio: float = 0.0


class Rated(msgspec.Struct, tag=True):
    rate: float | None = None


class Unrated(msgspec.Struct, tag=True):
    name: str = ""


class Pair(NamedTuple):
    one: str
    two: float | None


class Sparse(TypedDict):
    id: str
    options: NotRequired[dict[Any, Any]]


class Unset(msgspec.Struct):
    id: str
    options: dict[Any, Any] | msgspec.UnsetType = msgspec.UNSET


class Typed(TypedDict):
    n: float | None


class Weighed(pydantic.BaseModel):
    weight: float | None = None


class Modelled(Weighed):
    inner: list[Weighed] = []
    more: dict[str, Any] = {}


class WritesItself(pydantic.BaseModel):
    more: Any = None

    @pydantic.field_serializer("more")
    def written(self, value: object) -> str:
        return str(value)


class Word(str):
    __slots__ = ()


class Count(int):
    pass


NAN, INF = float("nan"), float("inf")
ITEMS = [Priced(1.0), Priced(), Priced(2.0), Priced(NAN)]
LOST: dict[str, tuple[Any, Any, str]] = {
    "nan deep inside": (Order, Order(ITEMS), "order.items[3].price is nan"),
    "nan in what contains itself": (Order, Order(below=Order(ITEMS)), "order.below.items[3].price is nan"),
    "nan in a field that must be a float": (Order, Order(ratio=NAN), "order.ratio is nan"),
    "infinity": (Priced, Priced(INF), "priced.price is inf"),
    "nan by itself": (float | None, NAN, "value is nan"),
    "nan in a list": (list[float | None], [1.0, None, -INF], "value[2] is -inf"),
    "nan in a tuple": (tuple[str, float | None], ("a", NAN), "value[1] is nan"),
    "nan in a tuple of any length": (tuple[float | None, ...], (1.0, NAN), "value[1] is nan"),
    "nan in a set": (set[float | None], {NAN}, "value[0] is nan"),
    "nan in a dict": (dict[str, float | None], {"a": NAN}, "value['a'] is nan"),
    "nan in a union": (Rated | Unrated, Rated(NAN), "value.rate is nan"),
    "nan in a named tuple": (Pair, Pair("a", NAN), "pair.two is nan"),
    "nan in a TypedDict": (Typed, {"n": NAN}, "typed['n'] is nan"),
    "nan in a model": (Modelled, Modelled(weight=NAN), "modelled.weight is nan"),
    "nan in a model of a model": (Modelled, Modelled(inner=[Weighed(weight=INF)]), "modelled.inner[0].weight is inf"),
    "nan in Any of a model": (Modelled, Modelled(more={"a": INF}), "modelled.more['a'] is inf"),
    "a dict instead of a Struct": (list[Priced], [{"price": NAN}], "value[0]['price'] is nan"),
    "nan below Any": (dict[str, Any], {"a": [{"b": NAN}]}, "value['a'][0]['b'] is nan"),
    "a tuple below Any": (dict[str, Any], {"a": (1, 2)}, "value['a'] is of the type tuple"),
    "a set below Any": (Any, {1}, "value is of the type set"),
    "bytes below Any": (Order, Order(more={"a": b"b"}), "order.more['a'] is of the type bytes"),
    "a date below Any": (Modelled, Modelled(more={"a": date(2026, 1, 2)}), "modelled.more['a'] is of the type date"),
    "a Decimal below Any": (dict[str, Any], {"a": Decimal(1)}, "value['a'] is of the type Decimal"),
    "an enum below Any": (dict[str, Any], {"a": Color.RED}, "value['a'] is of the type Color"),
    "a Struct below Any": (list[Any], [Priced()], "value[0] is of the type Priced"),
    "a key that is a number below Any": (dict[str, Any], {"a": {1: 2}}, "value['a'] has the key 1 of the type int"),
    "a key that is None below Any": (Order, Order(more={"a": {None: 2}}), "order.more['a'] has the key None of the"),
    "a key that is a bool below Any": (
        dict[str, Any],
        {"a": [{True: 2}]},
        "value['a'][0] has the key True of the type",
    ),
    "a text of a subclass below Any": (Order, Order(more={"a": [Word("b")]}), "order.more['a'][0] is of the type Word"),
    "a number of a subclass below Any": (Any, [Count(1)], "value[0] is of the type Count"),
    "a bare dict": (dict, {1: 2}, "value has the key 1 of the type int"),
    "a bare list": (list, [(1,)], "value[0] is of the type tuple"),
    "a bare tuple": (tuple, ((1,),), "value[0] is of the type tuple"),
    "a key of a dict of Any": (dict[Any, int], {1: 2}, "value has the key 1 of the type int"),
    "Any or nothing": (Any | None, (1,), "value is of the type tuple"),
    "Any in a union": (int | list[Any], [(1,)], "value[0] is of the type tuple"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_value_that_would_come_back_as_something_else_is_refused_with_its_path(what: str) -> None:
    kind, value, pattern = LOST[what]
    with pytest.raises(FlowError) as caught:
        Codec(kind, "what is tested").encode(value)
    assert str(caught.value).startswith(pattern)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(FlowError, match=r"is not of type list\[Any\]"):
        Codec(list[Any], "what is tested").encode(value)


PLAIN_JSON: dict[str, Any] = {"a": [1, -2.5, None, True, "x", {}], "b": {"c": []}}
KEPT: dict[str, tuple[Any, Any]] = {
    "JSON below Any": (dict[str, Any], PLAIN_JSON),
    "None beside floats": (Order, Order([Priced(), Priced(1.5)], Order(), PLAIN_JSON)),
    "whole numbers as floats": (list[float | None], [1, None]),
    "a decimal that is no number": (list[Decimal | None], [None, Decimal("Infinity")]),
    "what is typed": (tuple[date, set[int], bytes, dict[int, None]], (date(2026, 1, 2), {1}, b"b", {1: None})),
    "a bare tuple": (tuple, (1, None)),
    "a TypedDict": (Typed, {"n": None}),
    "a TypedDict without a dict": (Sparse, {"id": "1"}),
    "a struct whose dict is UNSET": (Unset, Unset("1")),
    "a union": (Rated | Unrated, Unrated("x")),
    "a model": (Modelled, Modelled(inner=[Weighed()], more=PLAIN_JSON)),
    "a text that says null": (Priced | str, "null"),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_value_that_comes_back_as_it_was_is_not_refused(what: str) -> None:
    kind, value = KEPT[what]
    codec: Codec[Any] = Codec(kind, "what is tested")
    assert codec.decode(codec.encode(value)) == value


def test_dict_for_a_struct_without_a_field_gets_its_default() -> None:
    """Fixed: it was refused, "'NoneType' object is not iterable"."""
    codec: Codec[Unset] = Codec(Unset, "what is tested")
    assert codec.decode(codec.encode({"id": "1"})) == Unset("1")


def test_a_model_that_writes_a_field_in_its_own_way_is_not_looked_at_there() -> None:
    codec = Codec(WritesItself, "what is tested")
    assert codec.decode(codec.encode(WritesItself(more=(1, 2)))).more == "(1, 2)"


def test_values_of_a_class_without_equality_are_not_compared() -> None:
    class Same(msgspec.Struct, eq=False):
        more: dict[str, Any] = {}

    codec = Codec(Same, "what is tested")
    assert codec.decode(codec.encode(Same({"a": 1}))).more == {"a": 1}


def test_a_type_in_which_nothing_can_be_lost_has_no_check() -> None:
    assert Codec(Keyed, "what is tested")._loss_checks is None
    assert Codec(list[Customer], "what is tested")._loss_checks is None
    assert Codec(Envelope, "what is tested")._loss_checks is not None


def test_nan_is_refused_wherever_a_flow_says_it() -> None:
    app = Service("shop", attempts=1)
    sink = app.remote("sink", Priced)
    asked = app.remote("asked", Priced, Priced)
    chain = app.endpoint("chain", Text, Priced, state=Order)
    heard: dict[str, str] = {}

    def pattern(what: str, call: Callable[[], object]) -> None:
        with pytest.raises(FlowError) as caught:
            call()
        heard[what] = str(caught.value).partition(",")[0]

    @chain.stage
    async def first(text: Text, order: Order, flow: Flow) -> Priced:
        pattern("request", lambda: flow.request(asked, Priced(NAN)))
        pattern("next", lambda: flow.next(Priced(NAN)))
        pattern("next_direct", lambda: flow.next_direct(Priced(NAN)))
        pattern("goto", lambda: flow.goto(asked, Priced(NAN)))
        pattern("reply", lambda: flow.reply(Priced(NAN)))
        pattern("send", lambda: flow.send(sink, Priced(NAN)))
        pattern("a state of another service", lambda: flow.send(sink, Priced(), state={"a": [Priced(NAN)]}))
        pattern("properties of a flow", lambda: flow.send(sink, Priced(), properties={"a": NAN}))
        flow.properties["b"] = (1,)
        pattern("properties", lambda: flow.next(Priced()))
        del flow.properties["b"]
        order.items.append(Priced(NAN))
        pattern("a state", lambda: flow.next(Priced()))
        pattern("a stash", flow.stash)
        order.items.clear()
        return Priced(1.0)

    @chain.stage
    async def last(priced: Priced, order: Order) -> Priced:
        return priced

    async def work(t: Stages) -> None:
        assert await t.ask(chain, Text()) == Priced(1.0)
        price = "priced.price is nan"
        assert heard == {
            **dict.fromkeys(["request", "next", "next_direct", "goto", "reply", "send"], price),
            "a state of another service": "value['a'][0].price is nan",
            "properties of a flow": "JSON does not preserve a property of the flow: properties['a'] is nan",
            "properties": "JSON does not preserve a property of the flow: properties['b'] is of the type tuple",
            "a state": "order.items[0].price is nan",
            "a stash": "order.items[0].price is nan",
        }
        with pytest.raises(FlowError, match=price):
            await app.ask(asked, Priced(NAN), trace="t")
        with pytest.raises(FlowError, match=price):
            async with app.initiate() as initiation:
                initiation.send(sink, Priced(NAN), trace="t")

    run(app, work)
