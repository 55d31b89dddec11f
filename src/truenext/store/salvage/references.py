"""Which contents exist, and does each have as many references as are counted?"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator


class ReferenceCounts:
    """The contents that are there, and how many messages refer to each: 16 bytes for each content."""

    def __init__(self) -> None:
        self._contents = array("Q")
        """Their numbers, in order."""
        self._expected = array("I")
        self._found = array("I")

    def __len__(self) -> int:
        return len(self._contents)

    def add(self, content: int, expected: int) -> None:
        """A content is there, and is said to have so many references."""
        at = bisect_left(self._contents, content)
        if at == len(self._contents) or self._contents[at] != content:
            # Nearly always at the end.
            self._contents.insert(at, content)
            self._expected.insert(at, expected)
            self._found.insert(at, 0)

    def count_reference(self, content: int) -> bool:
        """One more refers to a content; False if that is not there."""
        at = bisect_left(self._contents, content)
        if at == len(self._contents) or self._contents[at] != content:
            return False
        self._found[at] += 1
        return True

    def mismatches(self) -> Iterator[tuple[int, int, int]]:
        """Number of a content, references that it is said to have, and those that were found, where they differ."""
        for content, expected, found in zip(self._contents, self._expected, self._found, strict=True):
            if expected != found:
                yield content, expected, found
