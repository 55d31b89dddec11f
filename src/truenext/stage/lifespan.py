"""Lifespan of a service: a function that opens a value for the stages, yields it, and closes it at the end.

Stages and factories get the value through a parameter of its type.
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
"""Function that `contextlib.asynccontextmanager` has decorated, or an `async` generator that it could decorate."""


class Lifespan(Generic[T]):
    """Lifespan with the type of its value, so that stages can be checked before anything is opened.

    Raises: ConfigurationError if `factory` has no annotation of that type, or takes parameters
    """

    def __init__(self, factory: LifespanFactory[T]) -> None:
        self.running: Callable[[], AbstractAsyncContextManager[T]] = (
            asynccontextmanager(factory) if inspect.isasyncgenfunction(factory) else factory  # type: ignore[assignment]
        )
        """Factory of the context manager: `async with lifespan.running() as value`, while the service runs."""
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
