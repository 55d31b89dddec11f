"""Signature of a stage's function, read from its annotations: message, state, dependencies and reply.

    async def reserve(answer: Reserved, memo: Memo, flow: Flow, sql: AsyncSession) -> Placed: ...
                      message           state       dependencies                     reply

The first parameter is the message. If the endpoint has a state, the second parameter is the state. All other parameters
are dependencies, which are found by their types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from truenext.stage.core.codec import type_name
from truenext.stage.core.errors import DefinitionError


@dataclass(slots=True, eq=False)
class Signature:
    message: Any
    """Type of the message."""
    reply: Any
    """Type of the reply, without None; None if the function returns nothing."""
    positional: tuple[str, ...]
    """Names of the parameters for the message and the state."""
    dependencies: dict[str, Any]
    """Type of each parameter after the message and the state, by the parameter's name."""
    is_async: bool
    must_reply: bool
    """True if the annotation of the result is a reply that cannot be None."""


def signature_of(function: Callable[..., object], state: Any, subject: str) -> Signature:
    """Read the signature of a function. `state` is the type of the endpoint's state, None without a state. `subject`
    names the stage in errors.

    Raises: DefinitionError if an annotation or a parameter is missing or invalid
    """
    if not callable(function):
        raise DefinitionError(f"{subject} is {function!r}, and must be a function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(f"{subject} has a yield: a stage returns its reply, and sends with its Flow")
    callee = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(callee, include_extras=True)
    except Exception as error:
        raise DefinitionError(
            f"the annotations of {subject} cannot be read: {error}. Import the names that they use at run time, "
            "not only for type checkers"
        ) from error
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise DefinitionError(f"{subject} takes *{parameter.name}: a stage must name each parameter")
    positional_count = 1 if state is None else 2
    expected = "its message as its first parameter"
    if state is not None:
        expected = "its message and its state as its first parameters"
    if len(parameters) < positional_count or any(
        each.kind is each.KEYWORD_ONLY for each in parameters[:positional_count]
    ):
        raise DefinitionError(f"{subject} must take {expected}")
    first = parameters[0]
    if first.name not in hints:
        raise DefinitionError(f"{subject}: annotate {first.name} with the type of the message")
    if state is not None:
        second = parameters[1]
        if hints.get(second.name) != state:
            raise DefinitionError(
                f"{subject} takes its state as its second parameter: annotate {second.name} with {type_name(state)}, "
                f"not {type_name(hints.get(second.name))}"
            )
    reply = hints.get("return", NoneType)
    return Signature(
        hints[first.name],
        without_none(reply),
        tuple(each.name for each in parameters[:positional_count]),
        {each.name: hints.get(each.name) for each in parameters[positional_count:]},
        is_async=inspect.iscoroutinefunction(callee),
        must_reply=not is_assignable(reply, NoneType),
    )


def is_assignable(target: Any, source: Any) -> bool:
    """Return whether a value of the type `source` is also of the type `target`."""
    if target in (Any, object) or target == source:
        return True
    if get_origin(target) in (Union, UnionType):
        options = get_args(source) if get_origin(source) in (Union, UnionType) else (source,)
        return all(any(is_assignable(each, option) for each in get_args(target)) for option in options)
    return isinstance(target, type) and isinstance(source, type) and issubclass(source, target)


def without_none(annotation: Any) -> Any:
    """Return T for the annotation `T | None`, and None for None."""
    if annotation in (None, NoneType):
        return None
    if get_origin(annotation) in (Union, UnionType):
        rest = tuple(each for each in get_args(annotation) if each is not NoneType)
        return Union[rest]  # noqa: UP007
    return annotation
