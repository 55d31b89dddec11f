"""Which endpoints and topics does the function of a stage name, and in which call?

Only its own code is read, with lambdas and functions within it; not what it calls, and not what it makes up while it
runs. So what is found is there, and not all is found.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias

from truenext.stage.core.definitions import Endpoint, Topic

ACTIONS: Final = {"request": "requests", "goto": "goes to", "send": "sends to", "publish": "publishes to"}
"""What a stage does that calls a method of this name with an endpoint or topic as its first argument."""
MENTIONS: Final = "names"
"""... and one that names it elsewhere."""
_NOTHING: Final = object()
_IGNORED_OPS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"})
_ATTRIBUTE_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CLOSURE_OPS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})


Referenced: TypeAlias = Endpoint[Any, Any] | Topic[Any]


def references_of(function: Callable[..., Any]) -> list[tuple[Referenced, str]]:
    """Whom it names, and how; each once, ordered by name. What it names twice, once in a call, is only that."""
    while isinstance(function, MethodType) or hasattr(function, "__wrapped__"):
        function = function.__func__ if isinstance(function, MethodType) else function.__wrapped__
    if not isinstance(function, FunctionType):
        # An object that can be called.
        function = getattr(type(function), "__call__", function)  # noqa: B004
    if not isinstance(function, FunctionType):
        return []
    closed_over = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed_over[name] = cell.cell_contents
        except ValueError:
            # It has no value yet.
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
            # Nothing of the program runs for it.
            value = inspect.getattr_static(value, step.argval, _NOTHING)
        else:
            value = _NOTHING
        method = str(step.argval) if step.opname in _ATTRIBUTE_OPS else ""
        if isinstance(value, Endpoint | Topic):
            yield value, ACTIONS.get(value_method, MENTIONS)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _in_code(inner, names, closed_over)
