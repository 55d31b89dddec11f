"""What lives as long as a service, and how do its stages get it?

A lifespan is a function that opens something, yields it, and closes it. Stages and factories ask for it by its type,
as they ask for everything that they are given.
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
"""A function that `contextlib.asynccontextmanager` has decorated, or an `async` generator as it decorates one."""


class Lifespan(Generic[T]):
    """Says of what type the value is before it is there: stages are checked before anything is opened.

    Raises: ConfigurationError if `factory` does not say that, or takes parameters
    """

    def __init__(self, factory: LifespanFactory[T]) -> None:
        self.running: Callable[[], AbstractAsyncContextManager[T]] = (
            asynccontextmanager(factory) if inspect.isasyncgenfunction(factory) else factory  # type: ignore[assignment]
        )
        """`async with lifespan.running() as value`, for as long as the service runs."""
        self.yielded_type: type[T] | None = _yielded_type(factory)
        """None if it yields nothing that one could ask for."""


def _yielded_type(factory: LifespanFactory[T]) -> type[T] | None:
    name = name_of(factory)
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError as error:
        raise ConfigurationError(f"the annotation of the lifespan {name} cannot be read: {error}") from error
    if signature.parameters:
        raise ConfigurationError(f"the lifespan {name} takes parameters; nothing is there yet to be given")
    yielded = get_args(signature.return_annotation)
    if get_origin(signature.return_annotation) not in (AsyncIterator, AsyncGenerator, AbstractAsyncContextManager):
        raise ConfigurationError(f"the lifespan {name} does not say what it yields: -> AsyncIterator[...]")
    kind: Any = yielded[0]
    if kind in (None, NoneType):
        return None
    if not isinstance(kind, type):
        raise ConfigurationError(f"the lifespan {name} yields {kind}, which is no class to ask for")
    return kind
