"""Planted faults made by changing a few characters in the source of a function."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any


def mutated(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """`function` with `new` in place of `old`, which stands in it once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {function.__qualname__}"
    # Its annotations may name what is there for type checkers alone.
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "<mutated>", "exec")
    names: dict[str, Any] = {}
    exec(code, vars(sys.modules[function.__module__]), names)
    made: Callable[..., Any] = names[function.__name__]
    return made
