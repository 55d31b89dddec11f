"""What kind of factory is this, how is one of it called, and which parameters has it?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import Any, TypeAlias

Factory: TypeAlias = Callable[..., Any]


class FactoryKind(Enum):
    """From a call to the value."""

    CALL = "what is returned is the value"
    AWAIT = "what is returned is awaited"
    ENTER = "what is returned is entered, and left in the end"
    ENTER_ASYNC = "the same, with `async with`"


def is_awaited(kind: FactoryKind) -> bool:
    return kind in (FactoryKind.AWAIT, FactoryKind.ENTER_ASYNC)


def classify_factory(factory: Factory, *, is_async: bool) -> tuple[Factory, FactoryKind]:
    """What is to be called, and the way from there. `is_async`: a class that can be entered both ways is entered with
    `async with`."""
    if isinstance(factory, type):
        if hasattr(factory, "__aenter__") and (is_async or not hasattr(factory, "__enter__")):
            return factory, FactoryKind.ENTER_ASYNC
        return factory, FactoryKind.ENTER if hasattr(factory, "__enter__") else FactoryKind.CALL
    code = _underlying_function(factory)
    if inspect.isgeneratorfunction(code):
        return contextmanager(factory), FactoryKind.ENTER
    if inspect.isasyncgenfunction(code):
        return asynccontextmanager(factory), FactoryKind.ENTER_ASYNC
    if inspect.iscoroutinefunction(code):
        return factory, FactoryKind.AWAIT
    # What `contextlib` has decorated is a plain function around a generator.
    within = inspect.unwrap(code)
    if inspect.isgeneratorfunction(within):
        return factory, FactoryKind.ENTER
    if inspect.isasyncgenfunction(within):
        return factory, FactoryKind.ENTER_ASYNC
    return factory, FactoryKind.CALL


def _underlying_function(factory: Factory) -> Factory:
    """The function that runs, of something that can be called."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory if inspect.isroutine(factory) else factory.__call__  # type: ignore[operator]


def evaluated_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """With their annotations as they are meant, also where they are written as text.

    Raises: NameError if one of them names what its module does not have
    """
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except ValueError:
        # Some classes of C, such as dict, do not say what they take.
        return []


def name_of(function: Callable[..., Any]) -> str:
    """As it is written in a program."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or repr(function)
