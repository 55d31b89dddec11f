"""What the function of a stage takes and returns, by its annotations.

    async def reserve(answer: Reserved, memo: Memo, flow: Flow, sql: AsyncSession) -> Placed: ...
                      message           state       whatever it asks for by type      the reply

The message is first; the state, if the endpoint has one, second. Everything else is asked for by its type.
"""

from __future__ import annotations

import inspect
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from truenext.stage.core.codec import named
from truenext.stage.core.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable


class Signature:
    __slots__ = ("is_async", "message", "must_reply", "others", "placed", "reply")

    def __init__(
        self,
        message: Any,
        reply: Any,
        placed: tuple[str, ...],
        others: dict[str, Any],
        *,
        is_async: bool,
        must_reply: bool,
    ) -> None:
        self.message = message
        """The type of what it takes."""
        self.reply = reply
        """The type of what it returns, without None; None if it returns nothing."""
        self.placed = placed
        """The names of the parameters for message and state."""
        self.others = others
        """The types of all other parameters, by their names."""
        self.is_async = is_async
        self.must_reply = must_reply
        """The function is annotated with a reply that cannot be None."""


def signature_of(function: Callable[..., object], state: Any, what: str) -> Signature:
    """`state` is the endpoint's type of state, if it has one; `what` names the stage.

    Raises: DefinitionError
    """
    if not callable(function):
        raise DefinitionError(f"{what} is {function!r}, which is no function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(f"{what} has a yield: a stage returns its reply, and sends with its Flow")
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(called, include_extras=True)
    except Exception as error:
        raise DefinitionError(
            f"the annotations of {what} cannot be read: {error}. What they name must be there when it is defined, "
            "not only for type checkers"
        ) from error
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise DefinitionError(f"{what} takes *{parameter.name}: a stage names what it asks for")
    least = 1 if state is None else 2
    wanted = "its message" if state is None else "its message and its state"
    if len(parameters) < least or any(each.kind is each.KEYWORD_ONLY for each in parameters[:least]):
        raise DefinitionError(f"{what} takes {wanted} first")
    first = parameters[0]
    if first.name not in hints:
        raise DefinitionError(f"{what}: annotate {first.name} with what it takes")
    if state is not None:
        second = parameters[1]
        if hints.get(second.name) != state:
            raise DefinitionError(
                f"{what} takes its state second: annotate {second.name} with {named(state)}, "
                f"not {named(hints.get(second.name))}"
            )
    reply = hints.get("return", NoneType)
    return Signature(
        hints[first.name],
        without_none(reply),
        tuple(each.name for each in parameters[:least]),
        {each.name: hints.get(each.name) for each in parameters[least:]},
        is_async=inspect.iscoroutinefunction(called),
        must_reply=not takes(reply, NoneType),
    )


def takes(wanted: Any, given: Any) -> bool:
    """Whether what is of the type `given` may be handed to who wants `wanted`."""
    if wanted in (Any, object) or wanted == given:
        return True
    if get_origin(wanted) in (Union, UnionType):
        options = get_args(given) if get_origin(given) in (Union, UnionType) else (given,)
        return all(any(takes(each, option) for each in get_args(wanted)) for option in options)
    return isinstance(wanted, type) and isinstance(given, type) and issubclass(given, wanted)


def without_none(annotation: Any) -> Any:
    """`T` of `T | None`; None of None."""
    if annotation in (None, NoneType):
        return None
    if get_origin(annotation) in (Union, UnionType):
        rest = tuple(each for each in get_args(annotation) if each is not NoneType)
        return Union[rest]  # noqa: UP007
    return annotation
