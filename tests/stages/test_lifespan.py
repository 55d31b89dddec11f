"""Tests of the lifespan of a service: stages get its value, and an invalid lifespan is refused at set-up."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from truenext.errors import ConfigurationError
from truenext.stage.dependencies.depends import Depends, build_plan
from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.lifespan import Lifespan


@dataclass
class Pool:
    notes: list[str] = field(default_factory=list)


@asynccontextmanager
async def decorated() -> AsyncIterator[Pool]:
    yield Pool()


async def generator() -> AsyncIterator[Pool]:
    yield Pool()


def manager() -> AbstractAsyncContextManager[Pool]:
    return decorated()


async def quoted() -> "AsyncIterator[Pool]":
    yield Pool()


@pytest.mark.parametrize("make", [decorated, generator, manager, quoted])
def test_the_type_of_the_value_is_known_before_it_is_made(make: Any) -> None:
    lifespan = Lifespan[Pool](make)
    assert lifespan.yielded_type is Pool

    async def main() -> None:
        async with lifespan.running() as pool:
            assert pool == Pool()

    asyncio.run(main())


def connection(pool: Pool) -> Iterator[str]:
    pool.notes.append("connected")
    yield "connection"
    pool.notes.append("given back")


def test_stages_and_factories_get_the_value_by_its_type() -> None:
    async def stage(pool: Pool, connection: Annotated[str, Depends(connection)]) -> None:
        pool.notes.append(connection)

    lifespan = Lifespan(decorated)
    plan = build_plan(stage, provided={lifespan.yielded_type: "lifespan"})

    async def main() -> list[str]:
        async with lifespan.running() as pool, StageExitStack() as stack:
            await stage(**await plan.make_arguments_async(stack, {"lifespan": pool}))
        return pool.notes

    assert asyncio.run(main()) == ["connected", "connection", "given back"]


def test_a_lifespan_that_yields_nothing_has_no_type() -> None:
    async def make() -> AsyncIterator[None]:
        yield

    assert Lifespan(make).yielded_type is None


def test_a_lifespan_hears_of_the_error_that_ends_its_service() -> None:
    heard = []

    async def make() -> AsyncIterator[Pool]:
        try:
            yield Pool()
        except ValueError as error:
            heard.append(str(error))
            raise

    async def main() -> None:
        async with Lifespan(make).running():
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())
    assert heard == ["broken"]


async def silent():  # type: ignore[no-untyped-def]
    yield Pool()


async def with_parameters(app: object) -> AsyncIterator[Pool]:
    yield Pool()


@contextmanager
def plain() -> Iterator[Pool]:
    yield Pool()


async def of_union() -> AsyncIterator[Pool | None]:
    yield None


async def unreadable() -> "AsyncIterator[Nowhere]":  # type: ignore[name-defined]  # noqa: F821
    yield None


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (silent, "the lifespan silent needs an annotation of the type that it yields"),
        (with_parameters, "the lifespan with_parameters must have no parameters"),
        (plain, "the lifespan plain needs an annotation of the type that it yields"),
        (of_union, "the lifespan of_union yields .*, and must yield an instance of a class"),
        (unreadable, "the annotation of the lifespan unreadable cannot be read: name 'Nowhere'"),
    ],
)
def test_a_lifespan_that_does_not_say_what_it_yields_is_refused(make: Callable[..., Any], pattern: str) -> None:
    with pytest.raises(ConfigurationError, match=pattern):
        Lifespan(make)
