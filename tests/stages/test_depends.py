"""Tests of dependency injection: a stage gets its parameters once, in its own thread, and factories end in order."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, cast

import pytest

from tests.drawing import each_one_of
from truenext.errors import ConfigurationError
from truenext.stage.dependencies.depends import Depends, build_plan
from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.dependencies.plan import DependencyPlan

T = TypeVar("T")


class Flow(Generic[T]):
    pass


class Session:
    pass


@dataclass
class Price:
    currency: str = "EUR"


PROVIDED: Mapping[Any, str] = {Flow: "flow", Session: "sql"}
FLOW = Flow[int]()
SQL = Session()
VALUES = {"flow": FLOW, "sql": SQL}


def plan_of(function: Callable[..., Any], **options: Any) -> DependencyPlan:
    return build_plan(function, provided=PROVIDED, **options)


def run(function: Callable[..., Any], **options: Any) -> Any:
    """Run a stage as a service does: `async` ones in the event loop, others in a thread."""
    plan = plan_of(function, **options)

    async def in_loop() -> Any:
        async with StageExitStack() as stack:
            return await function(**await plan.make_arguments_async(stack, VALUES))

    def in_thread() -> Any:
        with StageExitStack() as stack:
            return function(**plan.make_arguments(stack, VALUES))

    if asyncio.iscoroutinefunction(function):
        return asyncio.run(in_loop())
    return asyncio.run(asyncio.to_thread(in_thread))


# ---- What can be asked for ----


def plain() -> str:
    return "plain"


async def awaited() -> str:
    await asyncio.sleep(0)
    return "awaited"


def generator() -> Iterator[str]:
    yield "generator"


async def async_generator() -> AsyncIterator[str]:
    yield "async generator"


@contextmanager
def decorated() -> Iterator[str]:
    yield "decorated"


@asynccontextmanager
async def async_decorated() -> AsyncIterator[str]:
    yield "async decorated"


class Entered:
    def __enter__(self) -> str:
        return "entered"

    def __exit__(self, *error: object) -> None:
        pass


class Both(Entered):
    async def __aenter__(self) -> str:
        return "entered with async with"

    async def __aexit__(self, *error: object) -> None:
        pass


class Calls:
    def __call__(self) -> str:
        return "called"

    def generate(self) -> Iterator[str]:
        yield "method"


OF_EITHER = {
    plain: "plain",
    generator: "generator",
    decorated: "decorated",
    Entered: "entered",
    Calls(): "called",
    Calls().generate: "method",
    functools.partial(plain): "plain",
    functools.partial(generator): "generator",
    functools.partial(decorated): "decorated",
    Price: Price(),
    dict: {},
}
OF_ASYNC = {
    awaited: "awaited",
    async_generator: "async generator",
    async_decorated: "async decorated",
    functools.partial(awaited): "awaited",
}


@pytest.mark.parametrize("factory", OF_EITHER)
def test_a_stage_of_either_kind_gets_what_a_plain_factory_makes(factory: Callable[..., Any]) -> None:
    def stage(value: Annotated[Any, Depends(factory)]) -> Any:
        return value

    async def async_stage(value: Annotated[Any, Depends(factory)]) -> Any:
        return value

    stage.__annotations__ = async_stage.__annotations__ = {"value": Annotated[Any, Depends(factory)]}
    assert run(stage) == run(async_stage) == OF_EITHER[factory]


@pytest.mark.parametrize("factory", OF_ASYNC)
def test_async_factory_is_refused_for_a_plain_stage(factory: Callable[..., Any]) -> None:
    def stage(value: Any) -> Any:
        return value

    async def async_stage(value: Any) -> Any:
        return value

    stage.__annotations__ = async_stage.__annotations__ = {"value": Annotated[Any, Depends(factory)]}
    assert run(async_stage) == OF_ASYNC[factory]
    with pytest.raises(ConfigurationError, match=r"stage, parameter 'value': .*must be awaited.*runs in a thread"):
        plan_of(stage)


def test_a_class_that_can_be_entered_both_ways_is_entered_as_the_stage_is_run() -> None:
    def stage(value: Annotated[str, Depends(Both)]) -> str:
        return value

    async def async_stage(value: Annotated[str, Depends(Both)]) -> str:
        return value

    assert run(stage) == "entered"
    assert run(async_stage) == "entered with async with"


def test_context_manager_returned_by_a_plain_factory_is_not_entered() -> None:
    """The object may belong to the lifespan, and must not be closed with the first message."""
    shared = Entered()

    def client() -> Entered:
        return shared

    def stage(value: Annotated[Entered, Depends(lambda: shared)]) -> Entered:
        return value

    stage.__annotations__ = {"value": Annotated[Entered, Depends(client)]}
    assert run(stage) is shared


def stage_of_all(
    flow: Flow[int], sql: Session, price: Annotated[Price, Depends(Price)], rest: int = 3
) -> tuple[Any, ...]:
    return flow, sql, price, rest


def test_a_stage_gets_what_is_given_by_its_type_and_keeps_its_other_defaults() -> None:
    assert run(stage_of_all) == (FLOW, SQL, Price(), 3)


def test_parameters_that_the_caller_places_are_left_to_it() -> None:
    def stage(mail: str, memo: int, flow: Flow[int]) -> None:
        pass

    with StageExitStack() as stack:
        assert plan_of(stage, positional=("mail", "memo")).make_arguments(stack, VALUES) == {"flow": FLOW}


def test_a_factory_may_ask_for_what_is_given_and_for_other_factories() -> None:
    def first(sql: Session) -> list[object]:
        return [sql]

    def second(first: Annotated[list[object], Depends(first)], flow: Flow[int]) -> list[object]:
        return [*first, flow]

    def stage(value: list[object]) -> list[object]:
        return value

    second.__annotations__["first"] = Annotated[list[object], Depends(first)]
    stage.__annotations__ = {"value": Annotated[list[object], Depends(second)]}
    assert run(stage) == [SQL, FLOW]


def counted() -> object:
    return object()


def left(one: Annotated[object, Depends(counted)]) -> object:
    return one


def right(one: Annotated[object, Depends(counted)]) -> object:
    return one


def test_dependency_has_one_value_per_message_for_all_that_need_it() -> None:
    def stage(
        a: Annotated[object, Depends(left)],
        b: Annotated[object, Depends(right)],
        c: Annotated[object, Depends(counted)],
    ) -> tuple[object, ...]:
        return a, b, c

    first, second = run(stage), run(stage)
    assert len(set(first)) == 1
    assert first[0] is not second[0]


def test_override_replaces_a_factory_for_stages_and_other_factories() -> None:
    def fake(flow: Flow[int]) -> object:
        return flow

    def stage(a: Annotated[object, Depends(left)], b: Annotated[object, Depends(counted)]) -> tuple[object, object]:
        return a, b

    assert run(stage, overrides={counted: fake}) == (FLOW, FLOW)


def where() -> Iterator[threading.Thread]:
    here = threading.current_thread()
    yield here
    assert threading.current_thread() is here


def test_factories_run_in_the_thread_of_their_stage() -> None:
    def stage(made: Annotated[threading.Thread, Depends(where)]) -> bool:
        return made is threading.current_thread() is not threading.main_thread()

    async def async_stage(made: Annotated[threading.Thread, Depends(where)]) -> bool:
        return made is threading.main_thread()

    assert run(stage)
    assert run(async_stage)


# ---- What is refused at set-up ----


def unknown(nobody) -> None:  # type: ignore[no-untyped-def]
    pass


def wrong(number: int) -> None:
    pass


def positional(flow: Flow[int], /) -> None:
    pass


def unreadable(nobody: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def in_circle(value: Annotated[None, Depends(lambda: None)]) -> None:
    pass


def around_circle(value: Annotated[None, Depends(in_circle)]) -> None:
    pass


in_circle.__annotations__["value"] = Annotated[None, Depends(around_circle)]


@pytest.mark.parametrize(
    ("factory", "pattern"),
    [
        (unknown, r"^unknown, parameter 'nobody': it has no annotation \(dependencies: .*stage -> unknown\)$"),
        (
            wrong,
            r"^wrong, parameter 'number': no value of type int is provided; provided are Flow, Session; "
            r".* \(dependencies: .*stage -> wrong",
        ),
        (positional, r"^positional, parameter 'flow': it cannot be passed by name"),
        (unreadable, r"^an annotation of unreadable cannot be read: name 'Nowhere' is not defined"),
        (
            around_circle,
            r"in_circle, parameter 'value': the dependencies run in a circle: "
            r"around_circle -> in_circle -> around_circle",
        ),
    ],
)
def test_factory_with_an_impossible_parameter_is_refused_by_name(factory: Callable[..., Any], pattern: str) -> None:
    def stage(value: None) -> None:
        pass

    stage.__annotations__ = {"value": Annotated[None, Depends(factory)]}
    with pytest.raises(ConfigurationError, match=pattern):
        plan_of(stage)


def test_a_parameter_of_a_stage_that_nothing_gives_is_refused() -> None:
    def stage(sql: bytes) -> None:
        pass

    with pytest.raises(
        ConfigurationError,
        match=r"stage, parameter 'sql': no value of type bytes is provided; provided are Flow, Session",
    ):
        plan_of(stage)


def test_a_factory_that_was_called_by_mistake_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"takes a factory, not the value that it makes: 'plain'"):
        Depends(plain())  # type: ignore[arg-type]


def test_depends_behind_an_equals_sign_is_refused() -> None:
    def stage(value: str = Depends(plain)) -> None:  # type: ignore[assignment]
        pass

    with pytest.raises(ConfigurationError, match=r"'value': Depends belongs in Annotated"):
        plan_of(stage)


def test_two_factories_for_one_parameter_are_refused() -> None:
    def stage(value: Annotated[str, Depends(plain), Depends(generator)]) -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"'value': it depends on several factories"):
        plan_of(stage)


def test_an_async_override_for_a_plain_stage_is_refused() -> None:
    def stage(value: Annotated[str, Depends(plain)]) -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"'value': awaited must be awaited"):
        plan_of(stage, overrides={plain: awaited})


# ---- How it ends ----


class Log(list[str]):
    """Log of the factories, in order."""

    def factory(self, name: str, fails: BaseException | None = None) -> Callable[[], Iterator[str]]:
        def make() -> Iterator[str]:
            self.append(f"make {name}")
            try:
                yield name
            except BaseException as error:
                self.append(f"{name} hears of {error!r}")
                if fails is None:
                    raise
            finally:
                self.append(f"end {name}")
                if fails is not None:
                    raise fails

        make.__qualname__ = name
        return make

    def async_factory(self, name: str, fails: BaseException | None = None) -> Callable[[], AsyncIterator[str]]:
        async def make() -> AsyncIterator[str]:
            with contextmanager(self.factory(name, fails))() as value:
                yield value

        make.__qualname__ = name
        return make


def stage_with(
    *factories: Callable[..., Any], is_async: bool, error: BaseException | None = None
) -> Callable[..., Any]:
    """Make a stage that depends on all the factories, and raises the error."""

    def stage(**values: Any) -> None:
        if error is not None:
            raise error

    async def async_stage(**values: Any) -> None:
        stage()

    chosen: Any = async_stage if is_async else stage
    chosen.__signature__ = inspect.Signature(
        [
            inspect.Parameter(f"p{number}", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, Depends(factory)])
            for number, factory in enumerate(factories)
        ]
    )
    return cast(Callable[..., Any], chosen)


FACES = ["plain", "async", "async with async factories"]


@pytest.fixture(params=each_one_of(FACES, FACES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ends(log: Log, kind: str, fails: list[BaseException | None], error: BaseException | None) -> BaseException | None:
    """Run a stage that raises `error`, with one factory for each of `fails`, and return the exception that comes
    out."""
    make = log.async_factory if "factories" in kind else log.factory
    factories = [make(f"f{number}", each) for number, each in enumerate(fails)]
    try:
        run(stage_with(*factories, is_async="async" in kind, error=error))
    except BaseException as raised:
        return raised
    return None


def test_factories_end_after_the_stage_in_reverse_order(kind: str) -> None:
    log = Log()
    assert ends(log, kind, [None, None], None) is None
    assert log == ["make f0", "make f1", "end f1", "end f0"]


def test_factories_hear_of_the_exception_of_the_stage(kind: str) -> None:
    log = Log()
    error = ValueError("own")
    assert ends(log, kind, [None, None], error) is error
    hears = "hears of ValueError('own')"
    assert log == ["make f0", "make f1", f"f1 {hears}", "end f1", f"f0 {hears}", "end f0"]


def test_a_factory_that_swallows_the_exception_does_not_make_the_stage_succeed(kind: str) -> None:
    heard = []

    def swallowing() -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            heard.append(error)

    error = ValueError("own")
    with pytest.raises(ValueError, match="own"):
        run(stage_with(swallowing, is_async="async" in kind, error=error))
    assert heard == [error]


def test_an_error_in_an_end_does_not_hide_that_of_the_stage(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    error, late = ValueError("own"), RuntimeError("late")
    assert ends(log, kind, [None, late], error) is error
    assert log[-2:] == ["f0 hears of ValueError('own')", "end f0"]
    [record] = caplog.records
    assert record.getMessage() == "the end of a stage's context manager has failed as well"
    assert vars(record)["context"] == "f1"
    assert record.exc_info is not None
    assert record.exc_info[1] is late


def test_an_error_in_an_end_fails_a_stage_that_has_succeeded_and_the_others_hear_of_it(kind: str) -> None:
    log = Log()
    late = RuntimeError("late")
    assert ends(log, kind, [None, late], None) is late
    assert log[-2:] == ["f0 hears of RuntimeError('late')", "end f0"]


def test_second_error_in_the_ends_of_factories_is_logged_and_the_first_raised(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    assert ends(Log(), kind, [second, first], None) is first
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_cancellation_in_an_end_is_not_hidden_by_the_error_of_the_stage(kind: str) -> None:
    cancelled = asyncio.CancelledError()
    assert isinstance(ends(Log(), kind, [None, cancelled], ValueError("own")), asyncio.CancelledError)


def test_factory_ends_if_the_next_one_fails(kind: str) -> None:
    log = Log()

    def failing() -> None:
        raise ValueError("cannot")

    make = log.async_factory if "factories" in kind else log.factory
    with pytest.raises(ValueError, match="cannot"):
        run(stage_with(make("f0"), failing, is_async="async" in kind))
    assert log == ["make f0", "f0 hears of ValueError('cannot')", "end f0"]


@pytest.mark.parametrize("made", ["factory", "async_factory"])
def test_factories_hear_of_a_cancellation_before_the_stage_has_ended(made: str) -> None:
    log = Log()

    async def main() -> None:
        started = asyncio.Event()

        async def stage(**values: Any) -> None:
            started.set()
            await asyncio.sleep(3600)

        chosen = stage_with(getattr(log, made)("f0"), is_async=True)
        plan = plan_of(chosen)

        async def handle() -> None:
            async with StageExitStack() as stack:
                await stage(**await plan.make_arguments_async(stack, VALUES))

        task = asyncio.create_task(handle())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["make f0", "f0 hears of CancelledError()", "end f0"]

    asyncio.run(main())
