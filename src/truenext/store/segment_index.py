"""What does one segment of the journal say, and what do several say together over the checkpoint?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from truenext.model.batch import NO_CAUSES
from truenext.store.changes import apply_names, apply_pauses

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.model.batch import Causes, Mark, ProducerState
    from truenext.store.spans import LaneSpans
    from truenext.store.store import Recovered


class SegmentIndex:
    """What one segment says."""

    __slots__ = (
        "causes",
        "chunks",
        "clean_stop",
        "forgotten_producers",
        "marks",
        "memory",
        "paused",
        "producers",
        "queues",
        "records",
        "redelivered_below",
        "removed",
        "segment",
        "sequence_limit",
        "sorted_timers",
        "timers",
    )

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.records = 0
        """Everything that its batches name: what it costs to replay it."""
        self.memory = 0
        """Bytes that all of this takes, at the most and roughly."""
        self.chunks: dict[bytes, LaneSpans] = {}
        """Lane key to the messages that the segment holds."""
        self.removed: dict[bytes, bool] = {}
        """Keys that the checkpoint may have and that were removed since, and whether they are transient."""
        self.marks: dict[bytes, Mark] = {}
        self.causes: dict[bytes, Causes] = {}
        """Of messages that have a mark here; what it does not say an older layer or the checkpoint does."""
        self.queues: dict[int, str] = {}
        self.paused: dict[int, bool] = {}
        self.producers: dict[str, ProducerState] = {}
        self.forgotten_producers: set[str] = set()
        self.timers: dict[bytes, bool] = {}
        """Those that were set (True) or cleared: what the checkpoint says of them does not count."""
        self.sorted_timers: list[bytes] | None = None
        """All of them, once there is a newer layer, so that they change no more, and somebody has asked."""
        self.sequence_limit = 0
        self.redelivered_below = 0
        self.clean_stop: bool | None = None


def is_removed(key: bytes, indexes: tuple[SegmentIndex, ...]) -> bool:
    """A message of the checkpoint was removed since."""
    return any(key in index.removed for index in indexes)


def find_mark(key: bytes, marks: Iterable[dict[bytes, Mark]]) -> Mark | None:
    """What the first of `marks` says that says anything."""
    for one in marks:
        mark = one.get(key)
        if mark is not None:
            return mark
    return None


def merge_causes(key: bytes, causes: Iterable[dict[bytes, Causes]]) -> Causes:
    """What `causes` say together, of which each says more than those behind it."""
    merged = NO_CAUSES
    for one in causes:
        before = one.get(key)
        if before is not None:
            merged = merged.merged_onto(before)
    return merged


def apply_journal(recovered: Recovered, indexes: tuple[SegmentIndex, ...]) -> Recovered:
    """What the checkpoint says by itself, with what the layers say over it; of messages nothing."""
    queues, producers = recovered.queues, dict(recovered.producers)
    paused = set(recovered.paused)
    for index in indexes:
        queues = apply_names(queues, index.queues)
        paused = apply_pauses(paused, index.paused)
        for name in index.forgotten_producers:
            producers.pop(name, None)
        producers.update(index.producers)
        recovered = replace(
            recovered,
            sequence_limit=max(index.sequence_limit, recovered.sequence_limit),
            redelivered_below=index.redelivered_below or recovered.redelivered_below,
            clean_stop=recovered.clean_stop if index.clean_stop is None else index.clean_stop,
        )
    by_use = sorted(producers.items(), key=lambda item: (item[1].last_used_ms, item[0]))
    return replace(recovered, queues=queues, paused=paused, producers=dict(by_use))
