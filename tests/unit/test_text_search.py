"""Tests of the search of long texts: they find what a regular expression finds, and take the time of few passes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truenext.model.text_search import LONG_TEXT_LENGTH, SearchedText, piece_finder, to_regex

ALPHABETS = ["ab", "abcdefgh", "a\u00ff", "a\u0100", "ab\u20ac\u20ad", "a\U0001f600\U0001f601", "\0a"]


def end_of_first(piece: list[str | None], text: str, at: int) -> int:
    """Return the end of a piece's first place at or after a position, by comparing it with each place."""
    for start in range(at, len(text) - len(piece) + 1):
        if all(each in (None, text[start + offset]) for offset, each in enumerate(piece)):
            return start + len(piece)
    return -1


@st.composite
def searches(draw: st.DrawFn) -> tuple[str, list[str | None], int]:
    alphabet = draw(st.sampled_from(ALPHABETS))
    text = draw(st.text(alphabet, max_size=40))
    piece: list[str | None] = draw(st.lists(st.sampled_from([*alphabet, "\ud7ff", None]), min_size=1, max_size=6))
    return text, piece, draw(st.integers(0, len(text) + 1))


@settings(max_examples=1000, deadline=None, database=None)
@given(searches())
def test_search_by_planes_finds_the_first_place_that_single_comparisons_find(
    search: tuple[str, list[str | None], int],
) -> None:
    text, piece, at = search
    assert SearchedText(text).find_by_planes(piece, at) == end_of_first(piece, text, at)


@settings(max_examples=200, deadline=None, database=None)
@given(searches(), st.integers(-2, 2), st.integers(1, 20))
def test_finder_agrees_for_short_and_long_texts_however_often_one_is_searched(
    search: tuple[str, list[str | None], int], more: int, times: int
) -> None:
    text, piece, at = search
    text = "\x01" * (LONG_TEXT_LENGTH + more - len(text)) + text
    expected = end_of_first(piece, text, at)
    find = piece_finder(piece)
    assert [find(text, at) for _ in range(times)] == [expected] * times


@pytest.mark.parametrize("text", ["y" * 60_000, "y\u20ac" * 30_000])
def test_long_piece_with_wildcards_is_found_in_a_fraction_of_the_time_of_a_regular_expression(text: str) -> None:
    """Fixed: `a LIKE '%___...yN%'` took 19 ms for a header of 60,000 characters; now it takes a twentieth."""
    piece = [*[None] * 248, "y", "1", "N"]
    find, pattern = piece_finder(piece), to_regex(piece)

    def processor_time(search: Callable[[], object]) -> float:
        start = time.thread_time()
        search()
        return time.thread_time() - start

    quick = min(processor_time(lambda: find(text, 0)) for _ in range(3))
    slow = min(processor_time(lambda: pattern.search(text)) for _ in range(3))
    assert quick < slow / 3
