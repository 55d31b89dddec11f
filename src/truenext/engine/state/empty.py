"""Empty containers that all who hold nothing yet share, and that none can change.

There may be a hundred thousand queues and lanes. Whoever has something to put makes a place of its own.
"""

from __future__ import annotations

from typing import Any, NoReturn


def _raise_shared(*_: object) -> NoReturn:
    raise TypeError("it is shared")


class _EmptyDict(dict[int, Any]):
    __setitem__ = __ior__ = update = setdefault = _raise_shared


class _EmptySet(set[int]):
    add = update = __ior__ = _raise_shared


EMPTY: dict[int, Any] = _EmptyDict()
NO_SEQUENCES: set[int] = _EmptySet()


def add_sequence(sequences: set[int], sequence: int) -> set[int]:
    """The same set with one more, or one of its own."""
    if sequences is NO_SEQUENCES:
        return {sequence}
    sequences.add(sequence)
    return sequences
