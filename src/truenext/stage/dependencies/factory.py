"""Factories of dependencies: finds the kind, the parameters and the name of each factory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import Any, TypeAlias

Factory: TypeAlias = Callable[..., Any]


class FactoryKind(Enum):
    """Kind of a factory: whether its result is the value itself, must be awaited, or must be entered."""

    CALL = "what is returned is the value"
    AWAIT = "what is returned is awaited"
    ENTER = "what is returned is entered, and left in the end"
    ENTER_ASYNC = "the same, with `async with`"


def is_awaited(kind: FactoryKind) -> bool:
    return kind in (FactoryKind.AWAIT, FactoryKind.ENTER_ASYNC)


def classify_factory(factory: Factory, *, is_async: bool) -> tuple[Factory, FactoryKind]:
    """Return the function that makes the value or its context manager, and the kind of the factory. With `is_async`, a
    class with both kinds of context manager is entered with `async with`."""
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
    # `contextlib` makes a plain function that wraps the generator.
    within = inspect.unwrap(code)
    if inspect.isgeneratorfunction(within):
        return factory, FactoryKind.ENTER
    if inspect.isasyncgenfunction(within):
        return factory, FactoryKind.ENTER_ASYNC
    return factory, FactoryKind.CALL


def _underlying_function(factory: Factory) -> Factory:
    """Return the function that runs when a callable object is called."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory if inspect.isroutine(factory) else factory.__call__  # type: ignore[operator]


def evaluated_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function. Annotations that are text are evaluated.

    Raises: NameError if an annotation contains a name that its module does not define
    """
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except ValueError:
        # Some classes of C, such as dict, have no signature.
        return []


def name_of(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, such as `Shop.open`."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or repr(function)
