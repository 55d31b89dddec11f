"""Which tests a run has of those that take long: drawn anew each time, see `tests/conftest.py`."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest

SHARE = 1 / 10
"""Of those that are marked as `drawn`."""


def one_of(name: str, values: Sequence[Any], ids: Sequence[str]) -> pytest.MarkDecorator:
    """A parameter of which each test has one value in each run, and over the runs all."""
    return pytest.mark.parametrize(name, each_one_of(values, ids))


def each_one_of(values: Sequence[Any], ids: Sequence[str]) -> list[Any]:
    """The same for the values of a fixture."""
    return [pytest.param(value, id=id, marks=pytest.mark.one_of(id)) for value, id in zip(values, ids, strict=True)]


def not_drawn(items: Iterable[pytest.Item], random: Random) -> set[pytest.Item]:
    """Those that the run has not."""
    left = {each for each in items if each.get_closest_marker("drawn") is not None and random.random() >= SHARE}
    alike: defaultdict[object, list[pytest.Item]] = defaultdict(list)
    for each in items:
        if ids := [marker.args[0] for marker in each.iter_markers("one_of")]:
            alike[_all_but(each, ids)].append(each)
    for group in alike.values():
        random.shuffle(group)
        left.update(group[1:])
    return left


def _all_but(item: pytest.Item, ids: Iterable[str]) -> object:
    """The test and its parameters, without these."""
    assert isinstance(item, pytest.Function)
    others = f"-{item.callspec.id}-"
    for each in ids:
        others = others.replace(f"-{each}-", "-", 1)
    return item.parent, item.originalname, others
