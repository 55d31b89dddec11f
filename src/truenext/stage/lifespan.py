"""Lifespan of a service: a function that opens a value for the stages, yields the value, and closes it when the service
stops.

A stage or a factory gets the value through a parameter of the value's type.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import NoneType
from typing import Any, Generic, TypeAlias, TypeVar, get_args, get_origin

from truenext.errors import ConfigurationError
from truenext.stage.dependencies.factory import name_of

T = TypeVar("T")

LifespanFactory: TypeAlias = Callable[[], AbstractAsyncContextManager[T]] | Callable[[], AsyncIterator[T]]
"""Function that `contextlib.asynccontextmanager` has decorated, or an `async` generator function."""


class Lifespan(Generic[T]):
    """Lifespan function of a service, and the type of the value that it yields. The type is known before the function
    is called, so that stages can be checked first.

    Raises: ConfigurationError if `factory` takes parameters, or has no annotation for the type of its value
    """

    def __init__(self, factory: LifespanFactory[T]) -> None:
        self.running: Callable[[], AbstractAsyncContextManager[T]] = (
            asynccontextmanager(factory) if inspect.isasyncgenfunction(factory) else factory  # type: ignore[assignment]
        )
        """Function that makes the context manager of one run of the service: `async with lifespan.running() as
        value`."""
        self.yielded_type: type[T] | None = _yielded_type(factory)
        """Type of the value; None if the lifespan yields None."""


def _yielded_type(factory: LifespanFactory[T]) -> type[T] | None:
    name = name_of(factory)
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError as error:
        raise ConfigurationError(f"the annotation of the lifespan {name} cannot be read: {error}") from error
    if signature.parameters:
        raise ConfigurationError(f"the lifespan {name} must have no parameters")
    yielded = get_args(signature.return_annotation)
    if get_origin(signature.return_annotation) not in (AsyncIterator, AsyncGenerator, AbstractAsyncContextManager):
        raise ConfigurationError(
            f"the lifespan {name} needs an annotation of the type that it yields: -> AsyncIterator[...]"
        )
    kind: Any = yielded[0]
    if kind in (None, NoneType):
        return None
    if not isinstance(kind, type):
        raise ConfigurationError(f"the lifespan {name} yields {kind}, and must yield an instance of a class")
    return kind
