"""Salvage of a data folder: reads what can be read despite damage, reports damage as it is found, changes nothing.

    journal        Every good frame is laid over the checkpoint, also after a damaged one: messages acknowledged there
                   stay acknowledged. The batch of a damaged frame is missing: the messages that it brought are lost,
                   and those that it acknowledged are there again. (journal.py)
    checkpoint     Read page by page, with damaged pages and the pages that these led to, as far as checksums tell what
                   they hold. (checkpoint.py)

Memory: that of the journal's overlay (overlay.py), one byte for each page of the checkpoint, 16 for each content
that several messages share, and the names; and messages whose content is missing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    referenced_content_number,
    sequence_of,
    split_lane_key,
)
from truenext.store import folder
from truenext.store.checkpoint_format import decode_mark
from truenext.store.overlay import Overlay, apply_journal, find_mark, merge_causes
from truenext.store.salvage.checkpoint import CHECKPOINT, TABLE_NAMES, CheckpointEntry, SalvagedCheckpoint
from truenext.store.salvage.damage import (
    Damage,
    DamageReport,
    SalvagedMessage,
    SalvageProgress,
    describe_message,
    find_record_damage,
)
from truenext.store.salvage.journal import SalvagedJournal
from truenext.store.salvage.references import ReferenceCounts
from truenext.store.store_errors import translated_errors

_ANY_SEGMENT = 1 << 63


@contextmanager
def open_salvage(
    data: Path,
    on_damage: Callable[[Damage], None],
    on_progress: Callable[[int, int], None],
    last_history_chunk: tuple[int, int] | None = None,
) -> Iterator[Salvage]:
    """Lock the folder and read it; only the lock file is written to. `last_history_chunk` is run and first event of
    the last chunk of a batch in the history's own files.

    Raises: StoreInUseError if a broker has it, StoreError if it is no data folder, is empty, or cannot be read
    """
    if not ((data / "lmdb").is_dir() or (data / "journal").is_dir()):
        raise StoreError(f"{data} is not a data folder of a broker: it has neither lmdb nor journal in it")
    with translated_errors(f"read the store in {data}", data), ExitStack() as resources:
        try:
            resources.callback(os.close, folder.lock(data))
        except OSError as error:
            # No broker can run on a read-only file system either.
            if error.errno != errno.EROFS:
                raise
        yield resources.enter_context(closing(Salvage(data, on_damage, on_progress, last_history_chunk)))


class Salvage:
    """Readable part of a data folder. Read `timers`, then `messages`, once and to their ends."""

    def __init__(
        self,
        data: Path,
        on_damage: Callable[[Damage], None],
        on_progress: Callable[[int, int], None],
        last_history_chunk: tuple[int, int] | None,
    ) -> None:
        """Read all but messages and timers. `on_damage` gets damage at once, `on_progress` bytes read and their
        total.

        Raises: StoreError if the folder is empty, or another truenext wrote it; OSError
        """
        self.damage_report = DamageReport(on_damage)
        self._progress = SalvageProgress(on_progress)
        self._references = ReferenceCounts()
        """References to contents from the messages read so far."""
        self.highest_sequence = 0
        """Highest sequence of a message read so far."""
        self.unnamed_queues: set[int] = set()
        """Numbers of queues that have messages and no name."""
        with ExitStack() as files:
            self._journal = SalvagedJournal(data, self.damage_report, self._progress)
            files.callback(self._journal.close)
            self.checkpoint = SalvagedCheckpoint(
                data, self.damage_report, self._progress, may_be_new=not folder.has_journal(data)
            )
            files.callback(self.checkpoint.close)
            self._overlay = self._read_journal(last_history_chunk)
            self._files = files.pop_all()
        indexes = self._overlay.indexes
        self.recovered = apply_journal(self.checkpoint.recovered, indexes)
        """State without counts. Damaged values are as in a new store that did not stop cleanly."""
        self._removed = {key for index in indexes for key in index.removed}
        self._journal_marks = [index.marks for index in reversed(indexes) if index.marks]
        self._journal_causes = [index.causes for index in reversed(indexes) if index.causes]

    def close(self) -> None:
        self._files.close()

    def _read_journal(self, last_history_chunk: tuple[int, int] | None) -> Overlay:
        overlay = Overlay()
        checkpoint = self.checkpoint
        position = checkpoint.position
        # Without a position any segment may be in the checkpoint already: it counts as one that is being checkpointed.
        overlay.last_checkpoint_segment = position.segment + 1 if position is not None else _ANY_SEGMENT
        for changes, segment, offset in self._journal.batches(
            position, checkpoint.salt, checkpoint.segment_bytes, last_history_chunk
        ):
            overlay.apply_changes(changes, segment, offset)
        return overlay

    def timers(self) -> Iterator[bytes]:
        """Yield the journal's timers laid over the checkpoint's. Only a damaged checkpoint has one twice or
        unsorted."""
        return self._overlay.timer_view().iter_after(b"", self.checkpoint.timers())

    def messages(self) -> Iterator[SalvagedMessage]:
        """Yield the checkpoint's messages in key order, persistent ones first, then those on pages that damaged
        pages led to, then the journal's. Contents are included, and transients, whether or not a start would drop
        them. A copy follows its content. Only a damaged checkpoint has one twice."""
        references = self._references
        deferred: list[SalvagedMessage] = []
        for message in self._all_messages():
            if message.damage or not (number := referenced_content_number(message.record)):
                if not message.damage and message.key.startswith(CONTENTS_LANE_KEY):
                    references.add(sequence_of(message.key), message.mark.attempts)
                yield message
            elif references.count_reference(number):
                yield message
            else:
                # Its content may be on a page that a damaged page led to.
                deferred.append(message)
        for message in deferred:
            number = referenced_content_number(message.record)
            if not references.count_reference(number):
                self._mark_damaged(message, f"its content, number {number}, is missing or damaged")
            yield message
        for number, expected, found in references.mismatches():
            self.damage_report.add_damage(
                "contents", f"content {number} has {found} references, {expected} are counted"
            )
        self._progress.finish()

    def _all_messages(self) -> Iterator[SalvagedMessage]:
        queues = self.recovered.queues
        for kind in TABLE_NAMES:
            yield from self._checkpointed(self.checkpoint.messages(kind, queues))
        if self.damage_report.damage_count:
            yield from self._checkpointed(self.checkpoint.unreached(self._overlay.timer_view().overrides))
        for key in self.checkpoint.unmatched_marks():
            if key not in self._removed:
                self.damage_report.add_damage(
                    CHECKPOINT, f"{describe_message(key, queues)} is missing, but its mark is there"
                )
        for key, span in self._overlay.messages():
            record = self._journal.record(span)
            mark = find_mark(key, self._journal_marks) or NO_MARK
            file = f"journal/{span.segment:016x}.journal"
            causes = merge_causes(key, self._journal_causes)
            yield self._checked(SalvagedMessage(key, record, span.is_transient, mark, file, causes))
        limit = self.recovered.sequence_limit
        if self.highest_sequence >= limit:
            self.damage_report.add_damage(CHECKPOINT, f"message {self.highest_sequence} is not below the limit {limit}")

    def _checkpointed(self, entries: Iterable[CheckpointEntry]) -> Iterator[SalvagedMessage]:
        """Yield messages of the checkpoint, except those that the journal has or has removed."""
        for entry in entries:
            key = entry.key
            if key in self._removed or self._overlay.is_transient(key) is not None:
                continue
            own, own_causes = decode_mark(entry.mark) if entry.mark else (NO_MARK, NO_CAUSES)
            mark = find_mark(key, self._journal_marks) or own
            causes = merge_causes(key, self._journal_causes).merged_onto(own_causes)
            yield self._checked(SalvagedMessage(key, entry.record, entry.is_transient, mark, CHECKPOINT, causes))

    def _checked(self, message: SalvagedMessage) -> SalvagedMessage:
        damage = find_record_damage(message.key, message.record)
        if damage:
            self._mark_damaged(message, damage)
            return message
        self.highest_sequence = max(self.highest_sequence, sequence_of(message.key))
        if message.key.startswith(CONTENTS_LANE_KEY):
            return message
        number = split_lane_key(message.key[:LANE_KEY_SIZE])[0]
        if number not in self.recovered.queues and number not in self.unnamed_queues:
            self.unnamed_queues.add(number)
            self.damage_report.add_damage(message.file, f"queue {number} has messages and no name")
        return message

    def _mark_damaged(self, message: SalvagedMessage, problem: str) -> None:
        message.damage = problem
        self.damage_report.add_damage(
            message.file, f"{describe_message(message.key, self.recovered.queues)} is damaged: {problem}"
        )
