"""Faults that tests plant in the source and the sink: a few characters of a function changed."""

import os
import sys
from collections.abc import Iterable, Iterator
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
    is_rare: bool = False
    """Noticed after half a minute or more: planted by `make faults` only."""


def to_plant(faults: Iterable[Fault]) -> list[Fault]:
    is_all = os.environ.get("TRUENEXT_FAULTS") == "all"
    return [fault for fault in faults if is_all or not fault.is_rare]


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
