"""Pieces of work: many changes are written in several transactions or statements, each of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def split_into_pieces(
    items: Iterable[T], size_of: Callable[[T], int], bytes_max: int, count_max: int
) -> Iterator[list[T]]:
    """Split the items into lists of at most `bytes_max` bytes and `count_max` items. A larger item is in a list of its
    own. `size_of` returns an item's bytes."""
    piece: list[T] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if piece and (size + item_size > bytes_max or len(piece) == count_max):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += item_size
    if piece:
        yield piece
