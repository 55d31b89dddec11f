"""Faults that tests plant in the source and the sink: a few characters of a function changed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tests.unit.mutation import mutated


class Fault(NamedTuple):
    name: str
    owner: Any
    """Module or class of the function."""
    function: str
    old: str
    new: str


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the function in its owner, and in each module of truenext.spark that has imported it."""
    original = getattr(fault.owner, fault.function)
    broken = mutated(original, fault.old, fault.new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.owner, fault.function, broken)
        for name, module in list(sys.modules.items()):
            if name.startswith("truenext.spark.") and getattr(module, fault.function, None) is original:
                patch.setattr(module, fault.function, broken)
        yield
