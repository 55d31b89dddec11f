"""Tests of definitions of services, endpoints and stages: invalid ones are refused at set-up, by name. Source:
docs/stages.md, "Endpoints and stages" """

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.stages.flows import Memo, Number, Text, run
from truenext.errors import ConfigurationError
from truenext.stage import DefinitionError, Depends, Flow, Service
from truenext.stage.interceptors.interceptor import Interceptor
from truenext.testing.stages import Stages

# ---- Names ----


def test_a_name_that_begins_with_a_dot_gets_the_services_name_in_front() -> None:
    app = Service("shop")

    @app.single(".price", Number, Number)
    async def price(number: Number) -> Number:
        return number

    there = app.remote(".stock", Number, Number)

    async def work(t: Stages) -> None:
        assert (price.name, there.name) == ("shop.price", "shop.stock")
        assert await t.ask(price, Number(1)) == Number(1)

    run(app, work)


def test_queues_are_named_after_endpoint_and_stage() -> None:
    app = Service("shop")
    chain = app.endpoint("order.place", Number)

    @chain.stage
    async def check(number: Number) -> None: ...

    @chain.stage
    async def reserve(number: Number) -> None: ...

    @chain.stage(name="third-one")
    async def _(number: Number) -> None: ...

    assert list(app.stages) == ["order.place", "order.place.stage.reserve", "order.place.stage.third-one"]


@pytest.mark.parametrize(
    "name",
    ["", ".", "a..b", "a b", "a/b", "ä", "a.*", "a.>", "-a", "a.stage.b", "DLQ.a", "Consumer.a", "Spark.a", "x" * 300],
)
def test_invalid_name_of_an_endpoint_is_refused(name: str) -> None:
    app = Service("shop")
    with pytest.raises(DefinitionError, match=r"name of an endpoint|too long"):
        app.endpoint(name, Number)
    with pytest.raises(DefinitionError, match=r"name of an endpoint|too long"):
        app.remote(name, Number)


@pytest.mark.parametrize("name", ["", "a b", "a/b"])
def test_invalid_name_of_a_service_is_refused(name: str) -> None:
    with pytest.raises(DefinitionError):
        Service(name)


@pytest.mark.parametrize("name", ["", "a b,c\n", "x" * 300])
def test_invalid_name_of_a_topic_is_refused(name: str) -> None:
    with pytest.raises(DefinitionError, match="topic"):
        Service("shop").topic(name, Number)


def test_an_endpoint_that_is_there_already_is_refused() -> None:
    app = Service("shop")
    app.endpoint("order.place", Number)
    with pytest.raises(DefinitionError, match=r"shop has an endpoint order\.place already"):
        app.endpoint("order.place", Number)


def test_remote_endpoint_or_topic_defined_twice_is_the_same_or_refused() -> None:
    app = Service("shop")
    there = app.remote("there", Number, Text)
    topic = app.topic("numbers", Number)
    assert app.remote("there", Number, Text) is there
    assert app.topic("numbers", Number) is topic
    for message_type, replies in ((Text, Text), (Number, Number)):
        with pytest.raises(
            DefinitionError, match=r"there\(.* was declared before with other types: .*there\(Number\) -> T"
        ):
            app.remote("there", message_type, replies)
    with pytest.raises(DefinitionError, match="other types"):
        app.remote("there", Number)
    with pytest.raises(DefinitionError, match=r"numbers\(Text\).* was declared before with another type: .*\(Number\)"):
        app.topic("numbers", Text)


def test_a_stage_that_is_there_already_is_refused() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def one(number: Number) -> None: ...

    with pytest.raises(DefinitionError, match="chain has a stage one already"):
        chain.stage(one)
    chain.stage(name="two")(one)


# ---- Stages ----


def no_annotation(number) -> None:  # type: ignore[no-untyped-def]
    ...


def no_parameter() -> None: ...


def only_message(number: Number) -> None: ...


def keyword_message(*, number: Number) -> None: ...


def variadic(*numbers: Number) -> None: ...


def wrong_message(text: Text) -> None: ...


def wrong_reply(number: Number) -> Text:
    return Text()


def yields(number: Number) -> Any:
    yield number


async def yields_later(number: Number) -> AsyncIterator[Number]:
    yield number


def unreadable(number: "NotThere") -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


def not_json(number: object) -> None: ...


def whatever(number: Any) -> Number:
    return Number()


def replies_whatever(number: Number) -> Any: ...


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no annotation": (no_annotation, "annotate number"),
    "no parameter": (no_parameter, "must take its message as its first parameter"),
    "a message by its name alone": (keyword_message, "must take its message as its first parameter"),
    "any number of messages": (variadic, r"takes \*numbers"),
    "another message than its endpoint": (wrong_message, "takes Number.*cannot take Text"),
    "another reply than its endpoint": (wrong_reply, "returns Text, but the endpoint replies Number"),
    "a yield": (yields, "has a yield"),
    "a yield in an async function": (yields_later, "has a yield"),
    "an annotation of what is not there": (unreadable, "NotThere"),
    "a message that cannot be JSON": (not_json, "object"),
    "Any message": (whatever, r"takes Any, .*annotate number with its type"),
    "Any reply": (replies_whatever, "returns Any, but the endpoint replies Number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_first_stage_that_cannot_be_is_refused_with_its_name(what: str) -> None:
    function, pattern = REFUSED[what]
    app = Service("shop")
    chain = app.endpoint("chain", Number, Number)
    with pytest.raises(DefinitionError, match=pattern) as raised:
        chain.stage(function)
    assert "chain" in str(raised.value)
    assert isinstance(raised.value, ConfigurationError)


def test_a_stage_of_an_endpoint_with_a_state_takes_it_second() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, state=Memo)

    def another_state(number: Number, memo: Text) -> None: ...

    with pytest.raises(DefinitionError, match="its message and its state as its first parameters"):
        chain.stage(only_message)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="annotate memo with Memo, not Text"):
        chain.stage(another_state)  # type: ignore[arg-type]


def test_untyped_message_of_a_later_stage_and_untyped_state_are_refused() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Any, Number)
    chain.stage(whatever)

    def any_state(number: Number, memo: Any) -> None: ...

    with pytest.raises(DefinitionError, match=r"stage second of chain takes Any, .*dict\[str, Any\]"):
        chain.stage(name="second")(whatever)
    with pytest.raises(DefinitionError, match="annotate memo with Memo, not Any"):
        app.endpoint("other", Number, state=Memo).stage(any_state)


def test_an_endpoint_that_may_reply_none_is_refused() -> None:
    app = Service("shop")
    with pytest.raises(DefinitionError, match=r"the reply of chain is .*None, but a stage that returns None replies"):
        app.endpoint("chain", Number, Number | None)  # type: ignore[arg-type]


def test_a_last_stage_may_reply_now_and_then() -> None:
    """The stage waits for more replies, here for the second one."""
    app = Service("shop")
    leaf = app.remote("leaf", Number, Number)
    chain = app.endpoint("chain", Number, Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.request(leaf, Number(1))
        flow.request(leaf, Number(2))

    @chain.stage
    async def last(number: Number) -> Number | None:
        return number if number.n == 2 else None

    async def work(t: Stages) -> None:
        t.mock(leaf, lambda number: number)
        assert await t.ask(chain, Number()) == Number(2)

    run(app, work)


def test_a_state_that_has_no_default_for_each_field_is_refused() -> None:
    class Strict(msgspec.Struct):
        id: str

    for state, pattern in ((Strict, "Strict"), (int, "int"), (list[int], r"list\[int\]")):
        with pytest.raises(DefinitionError) as caught:
            Service("shop").endpoint("chain", Number, state=state)
        assert re.match(
            rf"the state of chain is {pattern}, and must be an object such as a Struct in which each field has a "
            "default: (Object|Expected)",
            str(caught.value),
        )


def test_a_type_that_cannot_be_json_is_refused_where_it_is_named() -> None:
    class Odd:
        pass

    app = Service("shop")
    for define in (
        lambda: app.endpoint("a", Odd),
        lambda: app.endpoint("b", Number, Odd),
        lambda: app.endpoint("c", Number, state=Odd),
        lambda: app.remote("d", list[Odd]),
        lambda: app.topic("e", dict[str, Odd]),
    ):
        with pytest.raises(DefinitionError, match=r"Odd.*cannot be encoded as JSON"):
            define()


def test_parameter_that_nothing_provides_is_refused_before_anything_runs() -> None:
    app = Service("shop")

    @app.terminator("take", Number)
    async def take(number: Number, other: Text) -> None: ...

    async def work(t: Stages) -> None:
        raise AssertionError("not reached")

    with pytest.raises(ConfigurationError, match=r"take.*'other'.*no value of type Text is provided"):
        run(app, work)


@pytest.mark.parametrize("kind", [Session, AsyncSession])
def test_a_session_without_a_database_is_refused(kind: type[object]) -> None:
    app = Service("shop")

    async def take(number: Number, sql: kind) -> None: ...  # type: ignore[valid-type]

    app.endpoint("take", Number).stage(take)
    with pytest.raises(ConfigurationError, match=r"sql of stage take of take is a session.*no database"):
        app.plans()


@pytest.mark.parametrize("is_async", [True, False])
def test_the_session_of_the_other_kind_of_function_is_refused(is_async: bool) -> None:
    app = Service("shop", database="sqlite:///shop.db")

    async def asynchronous(number: Number, sql: Session) -> None: ...

    def plain(number: Number, sql: AsyncSession) -> None: ...

    app.endpoint("take", Number).stage(asynchronous if is_async else plain)
    provided, requested = ("AsyncSession", "Session") if is_async else ("Session", "AsyncSession")
    with pytest.raises(ConfigurationError, match=rf"'sql': .*needs a session of type {provided}, not {requested}"):
        app.plans()


def test_the_session_of_the_other_kind_of_function_is_refused_though_it_has_a_default() -> None:
    app = Service("shop", database="sqlite:///shop.db")

    @app.terminator("take", Number)
    async def take(number: Number, sql: Session | None = None) -> None: ...

    with pytest.raises(ConfigurationError, match=r"take, parameter 'sql'.* needs a session of type AsyncSession"):
        app.plans()


def test_an_endpoint_without_stages_is_refused() -> None:
    app = Service("shop")
    app.endpoint("chain", Number)
    with pytest.raises(DefinitionError, match="chain has no stage"):
        app.plans()


def test_endpoint_with_a_reply_whose_last_stage_is_not_annotated_with_it_is_refused() -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, Text)

    @chain.stage
    async def last(number: Number) -> None: ...

    with pytest.raises(DefinitionError, match="stage last is the last of chain, which replies Text"):
        app.plans()


def test_a_stage_or_endpoint_that_comes_while_the_service_runs_is_refused() -> None:
    app = Service("shop")

    @app.terminator("take", Number)
    async def take(number: Number) -> None: ...

    async def work(t: Stages) -> None:
        with pytest.raises(DefinitionError, match=r"shop runs.*late"):
            app.terminator("late", Number)(only_message)

    run(app, work)


RETRIES: dict[str, tuple[dict[Any, Any], str]] = {
    "no delay": ({ValueError: "soon"}, "'soon' is not a delay"),
    "no unit": ({ValueError: "2"}, "'2' is not a delay"),
    "nothing": ({ValueError: ""}, "'' is not a delay"),
    "never in a list": ({ValueError: "1s, never"}, "'never' is not a delay"),
    "no text": ({ValueError: 2}, "2: use"),
    "more than a week": ({ValueError: "8d"}, "8d is more than 7 days"),
    "no exception": ({Number: "2s"}, "not a class of exceptions"),
    "an instance": ({ValueError(): "2s"}, "not a class of exceptions"),
    "what ends programs": ({KeyboardInterrupt: "2s"}, "not a class of exceptions"),
}


@pytest.mark.parametrize("what", RETRIES)
def test_a_retry_that_cannot_be_is_refused_by_name(what: str) -> None:
    rules, pattern = RETRIES[what]
    app = Service("shop")
    for define, name in (
        (lambda: Service("shop", retry=rules), "service shop"),
        (lambda: app.endpoint("chain", Number, retry=rules), "chain"),
        (lambda: app.endpoint("other", Number).stage(retry=rules), "a stage of other"),
    ):
        app.endpoints.clear()
        with pytest.raises(DefinitionError, match=pattern) as raised:
            define()
        assert f"retry of {name}" in str(raised.value)


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Service], object], str]] = {
    "the name of a service": (lambda app: Service(5), "5 is not the name of an endpoint or service"),  # type: ignore[arg-type]
    "a broker": (lambda app: Service("s", broker=5), "broker of service s must be a URL"),  # type: ignore[arg-type]
    "a broker in a list": (lambda app: Service("s", broker=[5]), r"broker of service s .*\[5\]"),  # type: ignore[list-item]
    "a broker of another protocol": (
        lambda app: Service("s", broker=["stomp://a", "http://b"]),
        "broker of service s: 'http://b' is not the address of a broker",
    ),
    "no broker": (lambda app: Service("s", broker=[]), "broker of service s must be a URL"),
    "a database": (lambda app: Service("s", database=5), "database of service s must be a URL"),  # type: ignore[arg-type]
    "a user": (lambda app: Service("s", user=5), "user of service s must be text"),  # type: ignore[arg-type]
    "a password": (lambda app: Service("s", password=5), "password of service s must be text"),  # type: ignore[arg-type]
    "a password file": (
        lambda app: Service("s", password_file=5),  # type: ignore[arg-type]
        "password_file of service s must be a path",
    ),
    "a password and a file with it": (
        lambda app: Service("s", password="p", password_file="f"),
        "^service s: password and password_file exclude each other: use one of them$",
    ),
    "a ca": (lambda app: Service("s", ca=5), "ca of service s must be a path"),  # type: ignore[arg-type]
    "a certificate": (
        lambda app: Service("s", certificate=5),  # type: ignore[arg-type]
        "certificate of service s must be a path",
    ),
    "a key": (lambda app: Service("s", key=5), "key of service s must be a path"),  # type: ignore[arg-type]
    "a key without a certificate": (
        lambda app: Service("s", key="k"),
        "^service s: the option key needs the option certificate",
    ),
    "a user with a line feed": (lambda app: Service("s", user="a\n"), "^service s: user has a line feed"),
    "events": (lambda app: Service("s", events=5), "events of service s must be a folder"),  # type: ignore[arg-type]
    "a lifespan": (lambda app: Service("s", lifespan=5), "lifespan of service s must be a function"),  # type: ignore[arg-type]
    "interceptors": (
        lambda app: Service("s", interceptors=5),  # type: ignore[arg-type]
        "interceptors of service s must be a list",
    ),
    "an interceptor that is a class": (
        lambda app: Service("s", interceptors=[Interceptor]),  # type: ignore[list-item]
        "Interceptor.* of service s is not an instance of Interceptor",
    ),
    "the name of an endpoint": (lambda app: app.endpoint(5, Number), "5 is not the name of an endpoint"),  # type: ignore[call-overload]
    "the name of a topic": (lambda app: app.topic(5, Number), "5 is not the name of a topic"),  # type: ignore[arg-type]
    "a pattern as a topic": (
        lambda app: app.topic("prices.*", Number),
        r"'prices.\*' is a pattern, and messages are published to one topic",
    ),
    "the topic of a subscriber": (lambda app: app.subscriber("x"), "needs a topic, not 'x'"),  # type: ignore[arg-type]
    "attempts": (lambda app: app.endpoint("a", Number, attempts="5"), "attempts of a must be"),  # type: ignore[call-overload]
    "retry": (lambda app: app.endpoint("a", Number, retry=5), "retry of a is 5"),  # type: ignore[call-overload]
    "an empty retry": (lambda app: app.endpoint("a", Number, retry=""), "retry of a is ''"),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("what", WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_refused_by_name(what: str) -> None:
    define, pattern = WRONG_ARGUMENTS[what]
    with pytest.raises(DefinitionError, match=pattern):
        define(Service("shop"))


def test_a_stage_whose_name_is_no_text_is_refused() -> None:
    chain = Service("shop").endpoint("chain", Number)
    chain.stage(only_message)
    with pytest.raises(DefinitionError, match="5 is not the name of a stage of chain"):
        chain.stage(name=5)(only_message)  # type: ignore[call-overload]


def test_attempts_of_nothing_and_unknown_options_are_refused() -> None:
    app = Service("shop")
    with pytest.raises(DefinitionError, match="attempts of chain must be 1 or more, not 0"):
        app.endpoint("chain", Number, attempts=0)
    with pytest.raises(TypeError, match="a stage of chain has no option speed"):
        app.endpoint("chain", Number).stage(speed=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="other has no option retries, speed"):
        app.endpoint("other", Number, speed=3, retries=2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="close has no option attemps: is 'attempts' meant"):
        app.endpoint("close", Number, attemps=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="one has no option speed"):
        app.single("one", Number, Number, speed=3)(only_message)  # type: ignore[call-arg]


# ---- What a stage may ask for ----


def test_a_stage_asks_for_the_flow_a_dependency_and_the_lifespan_by_type() -> None:
    class Pool:
        def __init__(self) -> None:
            self.is_open = True

    pools: list[Pool] = []

    async def lifespan() -> AsyncIterator[Pool]:
        pool = Pool()
        pools.append(pool)
        yield pool
        pool.is_open = False

    def price(pool: Pool) -> int:
        assert pool.is_open
        return 7

    app = Service("shop", lifespan=lifespan)

    @app.single("take", Number, Number)
    async def take(number: Number, pool: Pool, price: Annotated[int, Depends(price)], flow: Flow) -> Number:
        return Number(price if pool is pools[0] and flow.trace == "x" else 0)

    async def work(t: Stages) -> None:
        assert await t.ask(take, Number(), trace="x") == Number(7)
        assert pools[0].is_open

    run(app, work)
    assert [pool.is_open for pool in pools] == [False]


def test_a_stage_that_asks_for_something_or_none_gets_it(tmp_path: Path) -> None:
    def price() -> int:
        return 7

    app = Service("shop")
    received: list[object] = []

    @app.terminator("take", Number)
    async def take(
        number: Number,
        flow: Flow | None = None,
        sql: Optional[AsyncSession] = None,  # noqa: UP045
        price: Annotated[int, Depends(price)] | None = None,
        other: Text | None = None,
    ) -> None:
        assert flow is not None and sql is not None
        received.extend([flow.trace, await sql.scalar(text("SELECT 1")), price, other])

    async def work(t: Stages) -> None:
        await t.send(take, Number(), trace="x")
        await t.wait_until_ended()

    file = tmp_path / "shop.db"
    file.touch()
    run(app, work, database=f"sqlite:///{file}")
    assert received == ["x", 1, 7, None]


def test_a_test_puts_other_factories_in_the_place_of_those_that_a_stage_depends_on() -> None:
    def price() -> int:
        raise ConnectionError("there is no price list in a test")

    app = Service("shop")

    @app.single("take", Number, Number)
    async def take(number: Number, price: Annotated[int, Depends(price)]) -> Number:
        return Number(price)

    async def work(t: Stages) -> None:
        assert await t.ask(take, Number()) == Number(3)

    run(app, work, overrides={price: lambda: 3})


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ({float: lambda: 3}, "no stage of shop depends on it"),
        ({"price": lambda: 3}, "overrides maps a factory to another factory, not 'price' to "),
        ({int: 3}, "a factory to another factory, not .* to 3"),
    ],
)
def test_an_override_that_replaces_nothing_is_refused(overrides: Any, pattern: str) -> None:
    """Fixed: the test ran with the factory that it meant to replace."""
    app = Service("shop")

    @app.single("take", Number, Number)
    async def take(number: Number, price: Annotated[int, Depends(int)]) -> Number:
        return Number(price)

    async def work(t: Stages) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(ConfigurationError, match=pattern):
        run(app, work, overrides=overrides)


def test_a_stage_that_comes_too_late_is_no_stage() -> None:
    """Fixed: the stage was refused, and yet messages went to its queue, which has no consumer."""
    app = Service("shop")
    take = app.endpoint("take", Number)

    @take.stage
    async def first(number: Number, flow: Flow) -> None: ...

    async def work(t: Stages) -> None:
        with pytest.raises(DefinitionError, match=r"shop runs already: define take\.stage\.second before"):

            @take.stage
            async def second(number: Number) -> None: ...

        with pytest.raises(DefinitionError, match="shop runs already: define late before"):
            app.endpoint("late", Number)
        assert [each.name for each in take.stages_in_order] == ["first"]
        assert take.stages_in_order[0].next_stage is None

    run(app, work)
