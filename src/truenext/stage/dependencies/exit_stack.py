"""What was opened for one run of a stage, and what becomes of its errors when it is closed?

All is closed, last first, whatever happens. Each context manager hears of the error of the stage; if there is none, of
the first error in closing: what is left to be closed must not take that run for a success. A context manager cannot
make a failure a success, and does not hide why the stage has failed: of several errors the first one is raised, and the
others are logged. Only what ends the program or its task (a cancellation, Ctrl-C) goes before an `Exception`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_logger = logging.getLogger("truenext.stage")


class _OpenResource(NamedTuple):
    name: str
    exit: Callable[..., object]
    is_async: bool


class StageExitStack:
    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[_OpenResource] = []

    def enter(self, name: str, manager: AbstractContextManager[T]) -> T:
        value = manager.__enter__()
        self._open.append(_OpenResource(name, manager.__exit__, False))
        return value

    async def enter_async(self, name: str, manager: AbstractAsyncContextManager[T]) -> T:
        value = await manager.__aenter__()
        self._open.append(_OpenResource(name, manager.__aexit__, True))
        return value

    def close(self, error: BaseException | None) -> None:
        """Where nothing was entered with `async with`. `error` is what the run ended with; the caller raises it.

        Raises: what is to be raised instead of that, or though there is none
        """
        first = error
        while self._open:
            one = self._open.pop()
            try:
                one.exit(*_exc_info(first))
            except BaseException as other:
                first = _more_severe(first, other, one.name)
        if first is not None and first is not error:
            raise first

    async def close_async(self, error: BaseException | None) -> None:
        """The same, for context managers of both kinds."""
        first = error
        while self._open:
            one = self._open.pop()
            try:
                result = one.exit(*_exc_info(first))
                if one.is_async:
                    assert isinstance(result, Awaitable)
                    await result
            except BaseException as other:
                first = _more_severe(first, other, one.name)
        if first is not None and first is not error:
            raise first


def _exc_info(
    error: BaseException | None,
) -> tuple[type[BaseException] | None, BaseException | None, TracebackType | None]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def _more_severe(first: BaseException | None, other: BaseException, name: str) -> BaseException:
    """Of the two the one that is raised."""
    if first is None or other is first:
        return other
    if isinstance(first, Exception) and not isinstance(other, Exception):
        return other
    _logger.error("the end of %s has failed as well", name, exc_info=other)
    return first
