"""Random choice of the slow tests that a run has, drawn anew each time; see `tests/conftest.py`."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest

SHARE = 1 / 160
"""Share of the tests marked `drawn` that a run has."""


def one_of(name: str, values: Sequence[Any], ids: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test with one of the values in each run, chosen at random."""
    return pytest.mark.parametrize(name, each_one_of(values, ids))


def each_one_of(values: Sequence[Any], ids: Sequence[str]) -> list[Any]:
    """Return the values for a fixture, of which each run has one."""
    return [pytest.param(value, id=id, marks=pytest.mark.one_of(id)) for value, id in zip(values, ids, strict=True)]


def not_drawn(items: Iterable[pytest.Item], random: Random) -> set[pytest.Item]:
    """Return the tests that the run leaves out."""
    left = {each for each in items if each.get_closest_marker("drawn") is not None and random.random() >= SHARE}
    alike: defaultdict[object, list[pytest.Item]] = defaultdict(list)
    for each in items:
        if ids := [marker.args[0] for marker in each.iter_markers("one_of")]:
            alike[_all_but(each, ids)].append(each)
    for each in items:
        if marker := each.get_closest_marker("alternates"):
            alike[marker.args[0]].append(each)
    for group in alike.values():
        remaining = [each for each in group if each not in left]
        random.shuffle(remaining)
        left.update(remaining[1:])
    return left


def _all_but(item: pytest.Item, ids: Iterable[str]) -> object:
    """Return the test and its parameters except `ids`."""
    assert isinstance(item, pytest.Function)
    others = f"-{item.callspec.id}-"
    for each in ids:
        others = others.replace(f"-{each}-", "-", 1)
    return item.parent, item.originalname, others
