"""What does a salvage tell: what is damaged, what is worth a note, which messages are there, and how far it is?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from truenext.batch import NO_CAUSES, Causes, Mark
from truenext.order import PRIORITY_MAX
from truenext.record import CONTENTS, LANE_KEY_SIZE, DamagedRecord, sequence_of, split_lane_key, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Finding(NamedTuple):
    """Something that is not what was written."""

    file: str
    """In the data folder."""
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


class Findings:
    """What was found so far."""

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        """`tell` is told of each finding at once: there may be very many."""
        self._tell = tell
        self.damages = 0
        """How many there were."""
        self.notes: list[str] = []
        """What is no damage, but may be asked about."""

    def add(self, file: str, what: str) -> None:
        self.damages += 1
        self._tell(Finding(file, what))


class Progress:
    """How much of the journal and of the checkpoint was looked at."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        """`report` is told how many bytes of how many."""
        self._report = report
        self._parts: dict[str, tuple[int, int]] = {}

    def tell(self, part: str, seen: int, size: int) -> None:
        """`seen` bytes of `size` of this part."""
        self._parts[part] = seen, size
        self._report(sum(seen for seen, _ in self._parts.values()), sum(size for _, size in self._parts.values()))

    def end(self) -> None:
        self._report(1, 1)


class Kept(msgspec.Struct, gc=False):
    """A message that is there, or what is left of it."""

    key: bytes
    record: bytes
    is_transient: bool
    mark: Mark
    file: str
    causes: Causes = NO_CAUSES
    damage: str = ""
    """Empty if every bit is as written."""


def damage_of(key: bytes, record: bytes) -> str:
    """What is wrong with a record; empty if every bit is as written."""
    try:
        verify(key, record)
    except DamagedRecord as error:
        return str(error)
    return ""


def described(key: bytes, queues: Mapping[int, str]) -> str:
    """A message, for people; `queues` has names by number."""
    if key.startswith(CONTENTS):
        return f"content {sequence_of(key)}"
    return f"message {sequence_of(key)} of {described_lane(key[:LANE_KEY_SIZE], queues)}"


def described_lane(lane: bytes, queues: Mapping[int, str]) -> str:
    if lane == CONTENTS:
        return "contents"
    number, rank = split_lane_key(lane)
    name = queues.get(number)
    return f"queue {number if name is None else repr(name)}, priority {PRIORITY_MAX - rank}"
