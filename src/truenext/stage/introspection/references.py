"""References of a stage's function: the endpoints and topics that its code names, and the calls in which it names them.

Only the code of the function itself is read, including lambdas and functions in it. References in functions that it
calls are not found, nor are names that are made at run time.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias

from truenext.stage.core.definitions import Endpoint, Topic

ACTIONS: Final = {"request": "requests", "goto": "goes to", "send": "sends to", "publish": "publishes to"}
"""Relation of a stage to an endpoint or topic, by the name of the `Flow` method that gets it as first argument."""
MENTIONS: Final = "names"
"""Relation of a stage to an endpoint or topic that it names outside of a call of a `Flow` method."""
_NOTHING: Final = object()
_IGNORED_OPS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"})
_ATTRIBUTE_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CLOSURE_OPS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})


Referenced: TypeAlias = Endpoint[Any, Any] | Topic[Any]


def references_of(function: Callable[..., Any]) -> list[tuple[Referenced, str]]:
    """Return each endpoint and topic that the function names, once for each relation, sorted by destination. The
    relation MENTIONS is left out if the function has another relation to the same endpoint or topic."""
    while isinstance(function, MethodType) or hasattr(function, "__wrapped__"):
        function = function.__func__ if isinstance(function, MethodType) else function.__wrapped__
    if not isinstance(function, FunctionType):
        # The function is a callable object.
        function = getattr(type(function), "__call__", function)  # noqa: B004
    if not isinstance(function, FunctionType):
        return []
    closed_over = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed_over[name] = cell.cell_contents
        except ValueError:
            # The variable has no value yet.
            continue
    found = dict.fromkeys(_in_code(function.__code__, function.__globals__, closed_over))
    called = {each for each, how in found if how != MENTIONS}
    only = [(each, how) for each, how in found if how != MENTIONS or each not in called]
    return sorted(only, key=lambda pair: (pair[0].destination, pair[1]))


def _in_code(
    code: CodeType, names: Mapping[str, Any], closed_over: Mapping[str, Any]
) -> Iterator[tuple[Referenced, str]]:
    method = ""
    value: Any = _NOTHING
    value_method = ""
    for step in dis.get_instructions(code):
        if step.opname in _IGNORED_OPS:
            continue
        if step.opname == "LOAD_GLOBAL":
            value, value_method = names.get(step.argval, _NOTHING), method
        elif step.opname in _CLOSURE_OPS:
            value, value_method = closed_over.get(step.argval, _NOTHING), method
        elif step.opname in _ATTRIBUTE_OPS and isinstance(value, ModuleType | type):
            # Looked up statically: no code of the program runs.
            value = inspect.getattr_static(value, step.argval, _NOTHING)
        else:
            value = _NOTHING
        method = str(step.argval) if step.opname in _ATTRIBUTE_OPS else ""
        if isinstance(value, Endpoint | Topic):
            yield value, ACTIONS.get(value_method, MENTIONS)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _in_code(inner, names, closed_over)
