"""Whether a data folder holds what was written into it, to be asked while no broker has it.

Everything that can be wrong is found in salvage/; here it is only looked at, and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from truenext.record import CONTENTS, LANE_KEY_SIZE, split_lane_key
from truenext.store.salvage.folder import opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from truenext.store.salvage.findings import Finding, Kept
    from truenext.store.salvage.folder import Salvage


class InQueue(msgspec.Struct):
    """What is there of one queue."""

    persistent: int = 0
    transient: int = 0
    size: int = 0
    """Bytes of records."""
    damaged: int = 0
    """Messages of which something is there, but not what was written."""


class Summary(msgspec.Struct):
    """What is there of all queues."""

    queues: dict[int, InQueue]
    names: dict[int, str]
    timers: int = 0
    contents: int = 0
    """What several messages share."""
    contents_size: int = 0
    """Bytes of their records."""
    damages: int = 0
    notes: list[str] = []
    """What is no damage, but may be asked about."""

    def count(self, kept: Kept) -> None:
        if kept.key.startswith(CONTENTS):
            if not kept.damage:
                self.contents += 1
                self.contents_size += len(kept.record)
            return
        number = split_lane_key(kept.key[:LANE_KEY_SIZE])[0]
        queue = self.queues.get(number)
        if queue is None:
            queue = self.queues[number] = InQueue()
        if kept.damage:
            queue.damaged += 1
            return
        queue.size += len(kept.record)
        if kept.is_transient:
            queue.transient += 1
        else:
            queue.persistent += 1

    def finish(self, salvage: Salvage) -> None:
        """Take over what is known once all messages were read."""
        self.damages = salvage.damages
        self.notes = salvage.notes
        if salvage.left_over:
            self.notes.append(f"{salvage.left_over} transients that unclean stops dropped are not deleted yet")


def check(
    data: Path,
    found: Callable[[Finding], None],
    report: Callable[[int, int], None],
    *,
    history_told: tuple[int, int] | None = None,
) -> Summary:
    """Look at every bit that a broker would believe. `found` is told of all damage, `report` how many bytes of how many
    were looked at; `history_told` is that of salvage/folder.py.

    Raises: StoreInUseError, StoreError if it cannot be looked at
    """
    with opened(data, found, report, history_told) as salvage:
        summary = Summary(queues={}, names=salvage.recovered.queues)
        summary.timers = sum(1 for _ in salvage.timers())
        for kept in salvage.messages():
            summary.count(kept)
        summary.finish(salvage)
        transients = sum(queue.transient for queue in summary.queues.values())
        if transients and not salvage.recovered.clean_stop:
            summary.notes.append(f"the last run did not end as it should: the next start drops {transients} transients")
        return summary
