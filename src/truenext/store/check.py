"""Check of a data folder that no broker uses: finds out whether all written data is still there and undamaged. The
modules in salvage/ find the damage; this file reads everything, and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from truenext.model.record import CONTENTS_LANE_KEY, LANE_KEY_SIZE, split_lane_key
from truenext.store.salvage.damage import Damage, SalvagedMessage
from truenext.store.salvage.folder import Salvage, open_salvage


class QueueSummary(msgspec.Struct):
    """Counts of one queue's messages, made by a check or an export."""

    persistent: int = 0
    transient: int = 0
    size: int = 0
    """Bytes of the undamaged messages' records."""
    damaged: int = 0
    """Number of messages that are incomplete, or differ from what was written."""


class SalvageSummary(msgspec.Struct):
    """Result of a check or an export: the counts of all queues, and notes."""

    queues: dict[int, QueueSummary]
    names: dict[int, str]
    timers: int = 0
    contents: int = 0
    """Number of undamaged contents. Several messages share each content."""
    contents_size: int = 0
    """Bytes of the undamaged contents' records."""
    damage_count: int = 0
    notes_besides_damage: list[str] = []
    """Notes for an operator on facts that are no damage, such as dropped transient messages that still take space."""
    is_copy: bool = False
    """True if the folder is a copy of a log, from which its broker fetches what is damaged."""

    def count(self, message: SalvagedMessage) -> None:
        self.add(message.key, len(message.record), is_transient=message.is_transient, is_damaged=bool(message.damage))

    def add(self, key: bytes, size: int, *, is_transient: bool, is_damaged: bool) -> None:
        """Count a message whose record has `size` bytes."""
        if key.startswith(CONTENTS_LANE_KEY):
            if not is_damaged:
                self.contents += 1
                self.contents_size += size
            return
        number = split_lane_key(key[:LANE_KEY_SIZE])[0]
        queue = self.queues.get(number)
        if queue is None:
            queue = self.queues[number] = QueueSummary()
        if is_damaged:
            queue.damaged += 1
            return
        queue.size += size
        if is_transient:
            queue.transient += 1
        else:
            queue.persistent += 1

    def finish(self, salvage: Salvage) -> None:
        """Copy the values that are known only after all messages were read."""
        self.is_copy = salvage.checkpoint.is_copy
        self.damage_count = salvage.damage_report.damage_count
        self.notes_besides_damage = salvage.damage_report.notes_besides_damage
        undeleted = salvage.checkpoint.undeleted_transients
        if undeleted:
            self.notes_besides_damage.append(
                f"{undeleted} transient messages that were dropped after unclean stops are not deleted yet"
            )


def check(
    data: Path,
    on_damage: Callable[[Damage], None],
    on_progress: Callable[[int, int], None],
    *,
    last_history_chunk: tuple[int, int] | None = None,
) -> SalvageSummary:
    """Verify every bit of a data folder that a broker would use. `on_damage` gets each damage, `on_progress` the bytes
    verified and their total. `last_history_chunk` is the run and the first event of the last chunk of a batch in the
    history's own files.

    Raises: StoreInUseError if a broker uses the folder; StoreError if the folder cannot be read
    """
    with open_salvage(data, on_damage, on_progress, last_history_chunk) as salvage:
        summary = SalvageSummary(queues={}, names=salvage.recovered.queues)
        summary.timers = sum(1 for _ in salvage.timers())
        for message in salvage.messages():
            summary.count(message)
        summary.finish(salvage)
        transients = sum(queue.transient for queue in summary.queues.values())
        if transients and not salvage.recovered.clean_stop:
            summary.notes_besides_damage.append(
                f"the last run did not stop cleanly: the next start drops {transients} transient messages"
            )
        return summary
