"""Export of a damaged data folder: writes the readable part into a new folder.

The new folder has a checkpoint and no journal. Messages keep their keys, attempts, deliveries and due times. Queues,
producers and timers are kept, too. Sequences that were used are never used again. If anything was damaged, acknowledged
messages may be exported as well. Then every message counts as dispatched before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK, Mark
from truenext.model.limits import SEQUENCE_BLOCK
from truenext.model.record import CONTENTS_LANE_KEY, content_key, referenced_content_number, sequence_of
from truenext.store import folder
from truenext.store.check import SalvageSummary
from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import CheckpointPosition
from truenext.store.overlay import SegmentIndex
from truenext.store.salvage.damage import Damage, SalvagedMessage
from truenext.store.salvage.folder import Salvage, open_salvage
from truenext.store.salvage.references import ReferenceCounts
from truenext.store.store_errors import translated_errors

PIECE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum bytes of records in one transaction. A larger message has a transaction of its own."""

PIECE_KEYS_MAX = 10_000
"""Largest number of messages or timers in one transaction."""

UNFINISHED = "unfinished"
"""Name of the folder in which the checkpoint is made. So no broker uses an unfinished checkpoint."""


def export(
    data: Path,
    new: Path,
    on_damage: Callable[[Damage], None],
    on_progress: Callable[[int, int], None],
    *,
    last_history_chunk: tuple[int, int] | None = None,
) -> SalvageSummary:
    """Write the readable part of the folder `data` into the folder `new`, which must be empty or missing. The new
    folder is durable on return. `on_damage` gets each damage, `on_progress` the bytes read and their total.
    `last_history_chunk` is the run and the first event of the last chunk of a batch in the history's own files.

    Raises: StoreInUseError if a broker uses `data`; StoreError if `data` cannot be read or `new` cannot be written;
    then `new` is left empty
    """
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise StoreError(f"{new} is not empty: name a folder that does not exist yet")
    if data.resolve() in (new.resolve(), *new.resolve().parents):
        raise StoreError(f"{new} is inside of {data}, which is not changed: name a folder elsewhere")
    salvaging = open_salvage(data, on_damage, on_progress, last_history_chunk)
    with salvaging as salvage, translated_errors(f"write to the store in {new}", new):
        folder.make(new)
        lock = folder.lock(new)
        try:
            return _export(salvage, new)
        except BaseException:
            shutil.rmtree(new / UNFINISHED, ignore_errors=True)
            (new / "lock").unlink()
            raise
        finally:
            os.close(lock)


def _export(salvage: Salvage, new: Path) -> SalvageSummary:
    summary = SalvageSummary(queues={}, names=dict(salvage.recovered.queues))
    checkpoint = Checkpoint(new / UNFINISHED)
    try:
        writer = _CheckpointWriter(checkpoint)
        writer.set_timers(salvage.timers())
        for message in salvage.messages():
            summary.count(message)
            if not message.damage:
                writer.add(message)
        writer.flush()
        writer.correct_references()
        summary.timers = writer.timers
        summary.finish(salvage)
        summary.names.update(_replacement_names(salvage))
        checkpoint.finish_checkpoint([_segment_index(salvage, summary.names)], {}, CheckpointPosition(0, 0))
    finally:
        checkpoint.close()
    (new / UNFINISHED).rename(new / "lmdb")
    folder.sync_folder(new)
    return summary


class _CheckpointWriter:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._piece: dict[bytes, SalvagedMessage] = {}
        self._size = 0
        self.timers = 0
        self._references = ReferenceCounts()
        self._highest_keys = {False: b"", True: b""}
        """Highest key written so far, of transient (True) and of persistent messages. Greater keys are certainly
        new."""

    def add(self, message: SalvagedMessage) -> None:
        size = len(message.record) + sum(map(len, message.causes))
        if self._size + size > PIECE_BYTES_MAX or len(self._piece) == PIECE_KEYS_MAX:
            self.flush()
        self._piece[message.key] = message
        self._size += size

    def set_timers(self, timers: Iterable[bytes]) -> None:
        following = iter(timers)
        while piece := [(timer, True) for timer in islice(following, PIECE_KEYS_MAX)]:
            self._checkpoint.set_timers(piece)
            self.timers += len(piece)

    def flush(self) -> None:
        maybe_stored = [key for key, message in self._piece.items() if key <= self._highest_keys[message.is_transient]]
        for key in self._checkpoint.transient_by_key(maybe_stored):
            del self._piece[key]
        self._count_references()
        for are_transient in (False, True):
            keys = sorted(key for key, message in self._piece.items() if message.is_transient is are_transient)
            if keys:
                messages = [(key, self._piece[key].record) for key in keys]
                self._checkpoint.put_messages(messages, are_transient=are_transient)
                self._highest_keys[are_transient] = max(keys[-1], self._highest_keys[are_transient])
        marks = {key: (message.mark, message.causes) for key, message in self._piece.items() if message.mark != NO_MARK}
        if marks:
            self._checkpoint.put_marks(marks)
        self._piece = {}
        self._size = 0

    def _count_references(self) -> None:
        for key, message in self._piece.items():
            if key.startswith(CONTENTS_LANE_KEY):
                self._references.add(sequence_of(key), message.mark.attempts)
        for message in self._piece.values():
            if number := referenced_content_number(message.record):
                has_content = self._references.count_reference(number)
                assert has_content, "a reference follows its content"

    def correct_references(self) -> None:
        """Set the reference count of each content to the number of exported references, and delete contents without
        references. Damage may have destroyed references."""
        wrong = self._references.mismatches()
        while piece := list(islice(wrong, PIECE_KEYS_MAX)):
            self._checkpoint.put_marks(
                {content_key(number): (Mark(found, 0), NO_CAUSES) for number, _, found in piece if found}
            )
            unused = self._checkpoint.transient_by_key(content_key(number) for number, _, found in piece if not found)
            self._checkpoint.delete_messages(unused.items())


def _replacement_names(salvage: Salvage) -> dict[int, str]:
    """Return new names, by number, for queues whose names are lost."""
    used = set(salvage.recovered.queues.values())
    names = {}
    for number in sorted(salvage.unnamed_queues):
        name = f"recovered.{number}"
        while name in used:
            name += "_"
        names[number] = name
    return names


def _segment_index(salvage: Salvage, names: dict[int, str]) -> SegmentIndex:
    """Return a segment index with everything that the salvage has read, except messages and timers."""
    recovered = salvage.recovered
    index = SegmentIndex(0)
    index.queues = names
    index.paused = dict.fromkeys(recovered.paused, True)
    index.producers = dict(recovered.producers)
    index.sequence_limit = max(recovered.sequence_limit, salvage.highest_sequence + 1)
    index.redelivered_below = recovered.redelivered_below
    if salvage.damage_report.damage_count:
        # Lost messages may have had higher sequences.
        index.sequence_limit += SEQUENCE_BLOCK
    if salvage.damage_report.damage_count or not recovered.clean_stop:
        index.redelivered_below = index.sequence_limit
    # So that the next start keeps the exported transients.
    index.clean_stop = True
    return index
