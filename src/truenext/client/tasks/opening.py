"""Helpers for tasks that the client for threads does not need: objects for `await`, `async with` and `async for`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Self, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R", bound=AbstractAsyncContextManager[Any])


class AwaitableContext(Generic[R]):
    """Object for `await` or `async with`. The end of the `async with` closes what was opened."""

    def __init__(self, make: Callable[[], Awaitable[R]]) -> None:
        self._open_resource = make
        self._resource: R | None = None

    def __await__(self) -> Generator[None, None, R]:
        return cast("Generator[None, None, R]", self._open_resource().__await__())

    async def __aenter__(self) -> R:
        self._resource = await self._open_resource()
        return self._resource

    async def __aexit__(self, *error: Any) -> None:
        assert self._resource is not None, "it was entered"
        await self._resource.__aexit__(*error)


def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterable[T]:
    return items if isinstance(items, AsyncIterable) else _AsyncIterator(iter(items))


class _AsyncIterator(Generic[T]):
    """Asynchronous iterator over ordinary items. An async generator would have to be closed by the event loop after an
    error."""

    def __init__(self, iterator: Iterator[T]) -> None:
        self._iterator = iterator

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        for item in self._iterator:
            return item
        raise StopAsyncIteration
