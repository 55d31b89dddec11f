"""Counts of references to contents. The counts show whether a salvage has found all messages that refer to a
content."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator


class ReferenceCounts:
    """Contents found, and the number of references found to each. It takes 16 bytes for each content."""

    def __init__(self) -> None:
        self._contents = array("Q")
        """Numbers of the contents, in ascending order."""
        self._expected = array("I")
        self._found = array("I")

    def add(self, content: int, expected: int) -> None:
        """Add a content. `expected` is the number of references that it should have."""
        at = bisect_left(self._contents, content)
        if at == len(self._contents) or self._contents[at] != content:
            # Nearly always at the end.
            self._contents.insert(at, content)
            self._expected.insert(at, expected)
            self._found.insert(at, 0)

    def count_reference(self, content: int) -> bool:
        """Count a reference to a content. Return False if this content was not added."""
        at = bisect_left(self._contents, content)
        if at == len(self._contents) or self._contents[at] != content:
            return False
        self._found[at] += 1
        return True

    def mismatches(self) -> Iterator[tuple[int, int, int]]:
        """Yield the contents with a wrong number of references: number of the content, expected references, references
        found."""
        for content, expected, found in zip(self._contents, self._expected, self._found, strict=True):
            if expected != found:
                yield content, expected, found
