"""Results of a salvage: damage, notes, messages and progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from truenext.model.batch import NO_CAUSES, Causes, Mark
from truenext.model.order import PRIORITY_MAX
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    DamagedRecord,
    sequence_of,
    split_lane_key,
    verify_record,
)


class Damage(NamedTuple):
    """Damaged part of a file."""

    file: str
    """Path of the file within the data folder."""
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


class DamageReport:
    """Damage and notes that a salvage has found so far. This object passes each damage on at once, and keeps only its
    count."""

    def __init__(self, on_damage: Callable[[Damage], None]) -> None:
        """Make an empty report. `on_damage` gets each damage as soon as it is found, because there may be very many."""
        self._on_damage = on_damage
        self.damage_count = 0
        self.notes_besides_damage: list[str] = []
        """Notes for an operator on facts other than damage, such as dropped transient messages that still take
        space."""

    def add_damage(self, file: str, problem: str) -> None:
        self.damage_count += 1
        self._on_damage(Damage(file, problem))


class SalvageProgress:
    """Number of bytes of journal and checkpoint that a salvage has read. Each change is reported."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        """Start with nothing read. `on_progress` gets the bytes read and their total."""
        self._on_progress = on_progress
        self._parts: dict[str, tuple[int, int]] = {}

    def update(self, part: str, seen: int, size: int) -> None:
        """Set the progress of a part, journal or checkpoint: `seen` of its `size` bytes are read."""
        self._parts[part] = seen, size
        self._on_progress(sum(seen for seen, _ in self._parts.values()), sum(size for _, size in self._parts.values()))

    def finish(self) -> None:
        self._on_progress(1, 1)


class SalvagedMessage(msgspec.Struct, gc=False):
    """Message that a salvage has found, undamaged or damaged."""

    key: bytes
    record: bytes
    is_transient: bool
    mark: Mark
    file: str
    causes: Causes = NO_CAUSES
    damage: str = ""
    """Description of the damage; empty if the message is undamaged."""


def find_record_damage(key: bytes, record: bytes) -> str:
    """Return what is wrong with a record; empty if it is undamaged."""
    try:
        verify_record(key, record)
    except DamagedRecord as error:
        return str(error)
    return ""


def describe_message(key: bytes, queues: Mapping[int, str]) -> str:
    """Describe a message for an operator. `queues` has the queues' names by number."""
    if key.startswith(CONTENTS_LANE_KEY):
        return f"content {sequence_of(key)}"
    return f"message {sequence_of(key)} of {describe_lane(key[:LANE_KEY_SIZE], queues)}"


def describe_lane(lane: bytes, queues: Mapping[int, str]) -> str:
    if lane == CONTENTS_LANE_KEY:
        return "contents"
    number, rank = split_lane_key(lane)
    name = queues.get(number)
    return f"queue {number if name is None else repr(name)}, priority {PRIORITY_MAX - rank}"
