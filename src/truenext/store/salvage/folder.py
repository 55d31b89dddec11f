"""Salvage of a data folder: reads what is readable despite damage, reports damage as it is found, and changes nothing.

    journal        All undamaged frames are applied to the checkpoint, also those after a damaged frame: messages that
                   these frames acknowledge stay acknowledged. The batch of a damaged frame is missing: its new messages
                   are lost, and messages that it acknowledged exist again (journal.py).
    checkpoint     LMDB reads it, in child processes: from the first entry to a damaged page, and from the last one back
                   to a damaged page (checkpoint.py).

A salvage takes the memory of the journal's overlay (overlay.py), and 16 bytes for each content that several messages
share. It also keeps all names, and messages whose content is missing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

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
from truenext.store.store_errors import no_data_folder_error, translated_errors

_ANY_SEGMENT = 1 << 63


@contextmanager
def open_salvage(
    data: Path,
    on_damage: Callable[[Damage], None],
    on_progress: Callable[[int, int], None],
    last_history_chunk: tuple[int, int] | None = None,
) -> Iterator[Salvage]:
    """Lock the folder and read it. Only the lock file is written. `last_history_chunk` is the run and the first event
    of the last chunk of a batch in the history's own files.

    Raises: StoreInUseError if a broker uses the folder; StoreError if it is no data folder, is empty, or cannot be read
    """
    if not folder.is_data_folder(data):
        raise no_data_folder_error(data)
    with translated_errors(f"read the store in {data}", data), ExitStack() as resources:
        try:
            resources.callback(os.close, folder.lock(data))
        except OSError as error:
            # No broker can run on a read-only file system either.
            if error.errno != errno.EROFS:
                raise
        yield resources.enter_context(closing(Salvage(data, on_damage, on_progress, last_history_chunk)))


class Salvage:
    """Readable part of a data folder. Read `timers`, then `messages`, each once and to its end."""

    def __init__(
        self,
        data: Path,
        on_damage: Callable[[Damage], None],
        on_progress: Callable[[int, int], None],
        last_history_chunk: tuple[int, int] | None,
    ) -> None:
        """Read everything except messages and timers. `on_damage` gets each damage at once, `on_progress` the bytes
        read and their total.

        Raises: StoreError if the folder is empty, or another version of truenext wrote it; OSError if the disk fails
        """
        self.damage_report = DamageReport(on_damage)
        self._progress = SalvageProgress(on_progress)
        self._references = ReferenceCounts()
        """Contents and references found among the messages read so far."""
        self.highest_sequence = 0
        """Highest sequence among the messages read so far."""
        self.last_history = b""
        """History of the last batch in the journal that has one; empty if none has."""
        self.unnamed_queues: set[int] = set()
        """Numbers of queues that have messages, and whose names are lost."""
        with ExitStack() as files:
            self._journal = SalvagedJournal(data, self.damage_report, self._progress)
            files.callback(self._journal.close)
            self.checkpoint = SalvagedCheckpoint(
                data, self.damage_report, self._progress, may_be_new=not folder.has_journal(data)
            )
            self._overlay = self._read_journal(last_history_chunk)
            self._files = files.pop_all()
        indexes = self._overlay.indexes
        self.recovered = apply_journal(self.checkpoint.recovered, indexes)
        """State without the counts of messages. A damaged value is replaced by the value that a new store has; a
        damaged `clean_stop` is replaced by False."""
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
            self.last_history = changes.history or self.last_history
        return overlay

    def timers(self) -> Iterator[bytes]:
        """Yield the timers of journal and checkpoint, in order and each once, unless the checkpoint is damaged."""
        return self._overlay.timer_view().iter_after(b"", self.checkpoint.timers())

    def messages(self) -> Iterator[SalvagedMessage]:
        """Yield all messages. First come the checkpoint's in key order, persistent ones before transient ones; then the
        journal's.

        Contents are yielded, too, each before the messages that refer to it. Transient messages are yielded even if the
        next start drops them. Only a damaged checkpoint yields a message twice.
        """
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
                # Behind a damaged page entries come backwards.
                deferred.append(message)
        for message in deferred:
            number = referenced_content_number(message.record)
            if not references.count_reference(number):
                self._mark_damaged(message, f"its content, number {number}, is missing or damaged")
            yield message
        for number, expected, found in references.mismatches():
            self.damage_report.add_damage(
                "contents", f"content {number}: its mark says {expected} references, and {found} were found"
            )
        self._progress.finish()

    def _all_messages(self) -> Iterator[SalvagedMessage]:
        queues = self.recovered.queues
        for kind in TABLE_NAMES:
            yield from self._checkpointed(self.checkpoint.messages(kind, queues))
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
            self.damage_report.add_damage(
                CHECKPOINT,
                f"a message has sequence {self.highest_sequence}, but all sequences should be below {limit}",
            )

    def _checkpointed(self, entries: Iterable[CheckpointEntry]) -> Iterator[SalvagedMessage]:
        """Yield messages of the checkpoint. Messages that the journal has or has removed are skipped."""
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
            self.damage_report.add_damage(
                message.file, f"the name of queue {number} is lost, and the queue has messages"
            )
        return message

    def _mark_damaged(self, message: SalvagedMessage, problem: str) -> None:
        message.damage = problem
        self.damage_report.add_damage(
            message.file, f"{describe_message(message.key, self.recovered.queues)} is damaged: {problem}"
        )
