"""Contents found by a salvage, and whether each has as many references as are counted."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator


class ReferenceCounts:
    """Existing contents, and the number of references to each; 16 bytes for each content."""

    def __init__(self) -> None:
        self._contents = array("Q")
        """Numbers of the contents, sorted."""
        self._expected = array("I")
        self._found = array("I")

    def add(self, content: int, expected: int) -> None:
        """Add a content that should have `expected` references."""
        at = bisect_left(self._contents, content)
        if at == len(self._contents) or self._contents[at] != content:
            # Nearly always at the end.
            self._contents.insert(at, content)
            self._expected.insert(at, expected)
            self._found.insert(at, 0)

    def count_reference(self, content: int) -> bool:
        """Count one more reference to a content. Return False if the content does not exist."""
        at = bisect_left(self._contents, content)
        if at == len(self._contents) or self._contents[at] != content:
            return False
        self._found[at] += 1
        return True

    def mismatches(self) -> Iterator[tuple[int, int, int]]:
        """Yield number of a content, expected references, and references found, where these differ."""
        for content, expected, found in zip(self._contents, self._expected, self._found, strict=True):
            if expected != found:
                yield content, expected, found
