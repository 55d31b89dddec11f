"""Is a text like a pattern, in which % stands for any characters and _ for any one?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def compile_like(pattern: str, escape: str | None) -> tuple[Callable[[str], bool], int]:
    """What tells whether a text is like `pattern`; and how many characters of that are in pieces with _ between two %.

    `escape` is one character, behind which % and _ stand for themselves.

    Between two % each piece is taken where it comes first, so nothing is ever tried twice, as one regular expression
    would: no pattern takes longer than its length times that of the text.

    >>> matches, _ = compile_like("a!%_%", "!")
    >>> matches("a%b"), matches("abb")
    (True, False)

    Raises: ValueError if the pattern ends with its escape character
    """
    first, *others = _pieces(pattern, escape)
    head = _to_regex(first)
    if not others:
        return lambda value: head.fullmatch(value) is not None, 0
    *inner, last = others
    middle = [_end_finder(piece) for piece in inner if piece]
    scan = sum(len(piece) for piece in inner if None in piece)
    tail, tail_length = _to_regex(last), len(last)

    def matches(value: str) -> bool:
        found = head.match(value)
        if found is None:
            return False
        at = found.end()
        for find in middle:
            at = find(value, at)
            if at < 0:
                return False
        rest = len(value) - tail_length
        return rest >= at and tail.match(value, rest) is not None

    return matches, scan


def _pieces(pattern: str, escape: str | None) -> list[list[str | None]]:
    """What stands between the % of a pattern, character by character; None is any one."""
    pieces: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            following = next(characters, None)
            if following is None:
                raise ValueError("a pattern that ends with its escape character")
            pieces[-1].append(following)
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return pieces


def _to_regex(piece: list[str | None]) -> re.Pattern[str]:
    return re.compile("".join("." if each is None else re.escape(each) for each in piece), re.DOTALL)


def _end_finder(piece: list[str | None]) -> Callable[[str, int], int]:
    """What gives the end of the first place, from one on, where a piece is; -1 if there is none."""
    if None in piece:
        search = _to_regex(piece).search

        def find(value: str, at: int) -> int:
            found = search(value, at)
            return -1 if found is None else found.end()

        return find
    text = "".join(each for each in piece if each is not None)

    def find_text(value: str, at: int) -> int:
        found = value.find(text, at)
        return found if found < 0 else found + len(text)

    return find_text
