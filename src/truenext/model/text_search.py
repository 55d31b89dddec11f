"""Search of long texts for a piece of a LIKE pattern, quick whatever the two are.

A regular expression compares a piece with each place of a text: the time is that of text times piece. Here one
operation compares one character of the piece with all places at once: bit i of an integer stands for place i.

    text   abcab        places of a   01001     place of the piece a_c:   places of a
    piece  a_c          places of c   00100                             & places of c, shifted by 2     = 00001

The places of a character come from the text's bit planes: bit i of plane b is bit b of the code of character i. Planes
take some time to make, so short texts and the first searches of a long one do without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

Piece = Sequence[str | None]
"""Characters of a piece; None stands for any one character."""

LONG_TEXT_LENGTH = 4096
"""Characters from which on a text may be searched by its planes: a message's headers hold at most 16 such texts."""
_TEXTS_KEPT = 16
_CHARACTERS_KEPT = 16
"""Characters of a text whose places are kept, each in a bit for each character of the text."""
_QUICK_SEARCHES = 16
"""Searches of one text for plain pieces before planes are made for them."""

_ZERO_ONE = [bytes(ord("1") if code >> bit & 1 else ord("0") for code in range(256)) for bit in range(8)]
"""Tables that translate each byte to the digit of one of its bits."""


def piece_finder(piece: Piece) -> Callable[[str, int], int]:
    """Return a function that finds the end of a piece's first place at or after a position; -1 if there is none.

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
    """Return a function that tells whether a piece is in a text at a position that is not behind its end.

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
    """Return the longest time of a search in nanoseconds, for each character of the text."""
    if not any(piece):
        return 0.0
    return 25.0 if None in piece else 1.5 + 0.2 * len(piece)


def to_regex(piece: Piece) -> re.Pattern[str]:
    return re.compile("".join("." if each is None else re.escape(each) for each in piece), re.DOTALL)


class SearchedText:
    """Long text, and its bit planes once they are needed."""

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
    """Return the text as one object for all conditions that search it, one after the other."""
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
