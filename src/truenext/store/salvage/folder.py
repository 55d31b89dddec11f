"""What can be read of a data folder, whatever is damaged in it? The answer is told as it is found; nothing is changed.

    journal        Every good frame is laid over the checkpoint, also behind a damaged one: what was acknowledged there
                   was acknowledged. What the damaged one said is missing: the messages that it brought are lost, and
                   those that it acknowledged are there again. (journal.py)
    checkpoint     Read page by page, damaged pages and what they led to included, as far as checksums tell what it is.
                   (checkpoint.py)

Memory: what the journal may cost (overlay.py), one byte for each page of the checkpoint, 16 for each content that
several messages share, and the names; and what refers to contents that are missing.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from truenext.batch import NO_CAUSES, NO_MARK
from truenext.errors import StoreError
from truenext.record import CONTENTS, LANE_KEY_SIZE, reference_of, sequence_of, split_lane_key
from truenext.store import folder
from truenext.store.checkpoint_format import read_mark
from truenext.store.overlay import Overlay
from truenext.store.salvage.checkpoint import CHECKPOINT, KINDS, SalvagedCheckpoint
from truenext.store.salvage.findings import Findings, Kept, Progress, damage_of, described
from truenext.store.salvage.journal import SalvagedJournal
from truenext.store.salvage.references import References
from truenext.store.segment_index import causes_said, laid_over, mark_of
from truenext.store.trouble import CAUSES, explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from truenext.store.salvage.checkpoint import Entry
    from truenext.store.salvage.findings import Finding

_ANY_SEGMENT = 1 << 63


@contextmanager
def opened(
    data: Path,
    found: Callable[[Finding], None],
    report: Callable[[int, int], None],
    history_told: tuple[int, int] | None = None,
) -> Iterator[Salvage]:
    """The folder is ours meanwhile, and nothing in it but the lock file is written to. `history_told` is run and first
    event of the last chunk of a batch that the history's own files have.

    Raises: StoreInUseError if a broker has it, StoreError if it is no data folder, holds nothing, or cannot be read
    """
    if not ((data / "lmdb").is_dir() or (data / "journal").is_dir()):
        raise StoreError(f"{data} is no data folder of a broker: it has neither lmdb nor journal in it")
    try:
        lock = _lock(data)
        try:
            salvage = Salvage(data, found, report, history_told)
            try:
                yield salvage
            finally:
                salvage.close()
        finally:
            if lock >= 0:
                os.close(lock)
    except CAUSES as error:
        raise explained(f"read the store in {data}", error, data) from error


def _lock(data: Path) -> int:
    try:
        return folder.lock(data)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # Nor can a broker run on what cannot be written to.
        return -1


class Salvage:
    """`timers`, then `messages`, are to be read to their ends, once; what is known before is what a start must know."""

    def __init__(
        self,
        data: Path,
        found: Callable[[Finding], None],
        report: Callable[[int, int], None],
        history_told: tuple[int, int] | None,
    ) -> None:
        """`found` is told of damage as it is come upon, `report` how many bytes of how many were looked at.

        Raises: StoreError if the folder holds nothing, or what another truenext wrote; OSError
        """
        self._findings = Findings(found)
        self._progress = Progress(report)
        self._references = References()
        """To the contents among the messages that were read."""
        self.highest = 0
        """The highest sequence of a message."""
        self.nameless: set[int] = set()
        """Queues that have messages and no name."""
        with ExitStack() as files:
            self._journal = SalvagedJournal(data, self._findings, self._progress)
            files.callback(self._journal.close)
            self._checkpoint = SalvagedCheckpoint(
                data, self._findings, self._progress, may_be_new=not folder.has_journal(data)
            )
            files.callback(self._checkpoint.close)
            self._overlay = self._laid_over(history_told)
            self._files = files.pop_all()
        indexes = self._overlay.indexes
        self.recovered = laid_over(self._checkpoint.recovered, indexes)
        """Without counts; what is damaged is as in a new store, but that it was not stopped."""
        self._gone = {key for index in indexes for key in index.gone}
        self._marks_of_journal = [index.marks for index in reversed(indexes) if index.marks]
        self._causes_of_journal = [index.causes for index in reversed(indexes) if index.causes]

    def close(self) -> None:
        self._files.close()

    @property
    def damages(self) -> int:
        """How often `found` was told."""
        return self._findings.damages

    @property
    def notes(self) -> list[str]:
        """What is no damage, but may be asked about."""
        return self._findings.notes

    @property
    def left_over(self) -> int:
        """Transients that unclean stops dropped and that are not deleted yet; once `messages` was read."""
        return self._checkpoint.left_over

    @property
    def timers_left(self) -> set[bytes]:
        """Timers on pages that a damaged page led to, once `messages` was read."""
        return self._checkpoint.timers_left

    def _laid_over(self, history_told: tuple[int, int] | None) -> Overlay:
        """All that can be read of the journal."""
        overlay = Overlay()
        checkpoint = self._checkpoint
        position = checkpoint.position
        # Without a position any segment may be in the checkpoint already: it then counts as one that is being moved.
        overlay.checkpointing = position.segment + 1 if position is not None else _ANY_SEGMENT
        for changes, segment, offset in self._journal.batches(
            position, checkpoint.salt, checkpoint.segment_bytes, history_told
        ):
            overlay.add(changes, segment, offset)
        return overlay

    def timers(self) -> Iterator[bytes]:
        """The journal's laid over those of the checkpoint. Only a damaged checkpoint has one twice, or out of order."""
        return self._overlay.timer_view().behind(b"", self._checkpoint.timers())

    def messages(self) -> Iterator[Kept]:
        """Those of the checkpoint in the order of their keys, persistent ones first, those that damaged pages led to,
        those of the journal. Transients are among them, whether or not a start would drop them, and so are contents. A
        copy comes behind its content; only a damaged checkpoint has one twice.
        """
        references = self._references
        waiting: list[Kept] = []
        for kept in self._all():
            if kept.damage or not (number := reference_of(kept.record)):
                if not kept.damage and kept.key.startswith(CONTENTS):
                    references.add(sequence_of(kept.key), kept.mark.attempts)
                yield kept
            elif references.refer(number):
                yield kept
            else:
                # Its content may stand on a page that a damaged one led to.
                waiting.append(kept)
        for kept in waiting:
            number = reference_of(kept.record)
            if not references.refer(number):
                self._damage(kept, f"its content, number {number}, is missing or damaged")
            yield kept
        for number, said, found in references.wrong():
            referred = "nothing refers to it" if not found else f"{found} messages refer to it"
            self._findings.add("contents", f"content {number} is said to have {said} references, and {referred}")
        self._progress.end()

    def _all(self) -> Iterator[Kept]:
        queues = self.recovered.queues
        for kind in KINDS:
            yield from self._checkpointed(self._checkpoint.messages(kind, queues))
        if self.damages:
            yield from self._checkpointed(self._checkpoint.unreached(self._overlay.timer_view().knows))
        for key in self._checkpoint.marks_left():
            if key not in self._gone:
                self._findings.add(CHECKPOINT, f"{described(key, queues)} has a mark, and is missing")
        for key, span in self._overlay.messages():
            record = self._journal.record(span)
            mark = mark_of(key, self._marks_of_journal) or NO_MARK
            file = f"journal/{span.segment:016x}.journal"
            causes = causes_said(key, self._causes_of_journal)
            yield self._looked_at(Kept(key, record, span.is_transient, mark, file, causes))
        limit = self.recovered.sequence_limit
        if self.highest >= limit:
            self._findings.add(CHECKPOINT, f"message {self.highest} is not below the limit {limit}")

    def _checkpointed(self, entries: Iterable[Entry]) -> Iterator[Kept]:
        """Messages of the checkpoint, but for what the journal says is gone, or has itself."""
        for entry in entries:
            key = entry.key
            if key in self._gone or self._overlay.kind(key) is not None:
                continue
            own, said = read_mark(entry.mark) if entry.mark else (NO_MARK, NO_CAUSES)
            mark = mark_of(key, self._marks_of_journal) or own
            causes = causes_said(key, self._causes_of_journal).over(said)
            yield self._looked_at(Kept(key, entry.record, entry.is_transient, mark, CHECKPOINT, causes))

    def _looked_at(self, kept: Kept) -> Kept:
        damage = damage_of(kept.key, kept.record)
        if damage:
            self._damage(kept, damage)
            return kept
        self.highest = max(self.highest, sequence_of(kept.key))
        if kept.key.startswith(CONTENTS):
            return kept
        number = split_lane_key(kept.key[:LANE_KEY_SIZE])[0]
        if number not in self.recovered.queues and number not in self.nameless:
            self.nameless.add(number)
            self._findings.add(kept.file, f"queue {number} has messages and no name")
        return kept

    def _damage(self, kept: Kept, what: str) -> None:
        kept.damage = what
        self._findings.add(kept.file, f"{described(kept.key, self.recovered.queues)} is damaged: {what}")
