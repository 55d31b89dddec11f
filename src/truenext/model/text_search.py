"""Search of a long text for a piece of a LIKE pattern, which is quick for every text and every piece.

A regular expression tries the piece at each position of the text. The time of such a search grows with the product of
both lengths. Here one operation compares one character of the piece with all positions at once: bit i of an integer
stands for position i of the text (the lowest bit is the first character).

    text   abcab      positions of a                                  01001
    piece  a_c        positions of c                                  00100
                      positions of c, shifted right by 2              00001
                      both together: the piece begins at position 0   00001

The positions of a character are computed from bit planes of the text: bit i of plane b is bit b of the code of
character i. Making planes takes some time. So short texts, and the first searches of a long text, do without planes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

Piece = Sequence[str | None]
"""Characters of a piece of a LIKE pattern; None (the pattern's _) stands for any one character."""

LONG_TEXT_LENGTH = 4096
"""Characters from which on a text is long. The headers of a message have at most _TEXTS_KEPT long texts."""
_TEXTS_KEPT = 16
_CHARACTERS_KEPT = 16
"""Number of characters whose positions in a text are cached."""
_QUICK_SEARCHES = 16
"""Number of searches of one text, for pieces without _, that are made without bit planes."""

_ZERO_ONE = [bytes(ord("1") if code >> bit & 1 else ord("0") for code in range(256)) for bit in range(8)]
"""Tables for `bytes.translate`: table b turns each byte into the digit "0" or "1" of its bit b."""


def piece_finder(piece: Piece) -> Callable[[str, int], int]:
    """Return a function that searches a text for a piece. The function takes a text and a position; it returns the end
    of the first occurrence of the piece that begins there or later, or -1.

    >>> piece_finder(["b", None])("abcbd", 2)
    5
    """
    if None in piece:
        search = to_regex(piece).search

        def find(text: str, at: int) -> int:
            if len(text) >= LONG_TEXT_LENGTH:
                return _searched(text).find_by_planes(piece, at)
            found = search(text, at)
            return -1 if found is None else found.end()

        return find
    plain = "".join(each for each in piece if each is not None)

    def find_plain(text: str, at: int) -> int:
        if len(text) >= LONG_TEXT_LENGTH:
            return _searched(text).find_plain(plain, at)
        found = text.find(plain, at)
        return found if found < 0 else found + len(plain)

    return find_plain


def fixed_matcher(piece: Piece) -> Callable[[str, int], bool]:
    """Return a function that takes a text and a position of it, and returns whether the piece begins at that position.

    >>> fixed_matcher(["b", None])("abc", 1), fixed_matcher(["b", None])("ab", 1)
    (True, False)
    """
    length = len(piece)
    runs: list[tuple[int, str]] = []
    for is_any, group in groupby(enumerate(piece), key=lambda each: each[1] is None):
        if not is_any:
            offsets, characters = zip(*group, strict=True)
            runs.append((offsets[0], "".join(characters)))

    def matches(text: str, at: int) -> bool:
        return len(text) >= at + length and all(text.startswith(run, at + offset) for offset, run in runs)

    return matches


def search_ns(piece: Piece) -> float:
    """Return the longest time of a search for the piece, in nanoseconds per character of the text."""
    if not any(piece):
        return 0.0
    return 25.0 if None in piece else 1.5 + 0.2 * len(piece)


def to_regex(piece: Piece) -> re.Pattern[str]:
    return re.compile("".join("." if each is None else re.escape(each) for each in piece), re.DOTALL)


class SearchedText:
    """Long text, with its bit planes once a search needs them."""

    __slots__ = ("_places", "_plain_searches", "_planes", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._planes: list[int] = []
        self._places: dict[str, int] = {}
        self._plain_searches = 0

    def find_plain(self, plain: str, at: int) -> int:
        if len(plain) == 1 or (self._plain_searches < _QUICK_SEARCHES and not self._planes):
            self._plain_searches += 1
            found = self._text.find(plain, at)
            return found if found < 0 else found + len(plain)
        return self.find_by_planes(plain, at)

    def find_by_planes(self, piece: Piece, at: int) -> int:
        last = len(self._text) - len(piece)
        if at > last:
            return -1
        self._planes = self._planes or _bit_planes(self._text)
        places = (1 << last + 1) - 1
        known = self._places
        for offset, character in enumerate(piece):
            if character is None:
                continue
            of_character = known.get(character)
            if of_character is None:
                of_character = self._places_of(character)
                if len(known) >= _CHARACTERS_KEPT:
                    del known[next(iter(known))]
                known[character] = of_character
            places &= of_character >> offset
            if not places:
                return -1
        places >>= at
        return at + (places & -places).bit_length() - 1 + len(piece) if places else -1

    def _places_of(self, character: str) -> int:
        code = ord(character)
        if code >> len(self._planes):
            return 0
        places = (1 << len(self._text)) - 1
        for bit, plane in enumerate(self._planes):
            with_bit = places & plane
            places = with_bit if code >> bit & 1 else places ^ with_bit
        return places


@lru_cache(maxsize=_TEXTS_KEPT)
def _searched(text: str) -> SearchedText:
    """Return the object for a text. All conditions that search the same text share this object, and thus its planes."""
    return SearchedText(text)


def _bit_planes(text: str) -> list[int]:
    try:
        columns = [text.encode("latin-1")]
    except UnicodeEncodeError:
        codes = text.encode("utf-32-le")
        columns = [codes[0::4], codes[1::4], codes[2::4]]
    planes = []
    for column in columns:
        # int() takes the highest place first.
        backwards = column[::-1]
        planes += [int(backwards.translate(table), 2) for table in _ZERO_ONE]
    return planes
