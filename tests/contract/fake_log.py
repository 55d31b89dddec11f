"""A log in memory, which compacts when a test says so. Its snapshot is computed by the overlay of all rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf

from truenext.errors import ConfigurationError, StoreError, StoreFencedError
from truenext.model.batch import NO_MARK, Batch
from truenext.model.disk_level import DiskLevel
from truenext.store.changes import RareChanges, Takeover, decode_changes, encode_batch
from truenext.store.log import (
    Frames,
    KeptMessage,
    LogPosition,
    LogStatus,
    Relation,
    next_digest,
)
from truenext.store.overlay import Overlay, apply_journal, find_mark, merge_causes
from truenext.store.postgresql.forgotten import End, went_other_way
from truenext.store.postgresql.outcome import Row
from truenext.store.store import Progress, Recovered


class LogRows:
    """What a database keeps: rows by number, and the position of the compaction."""

    def __init__(self) -> None:
        self.identity = secrets.token_hex(4)
        self.earlier: dict[str, int] = {}
        self.first = LogPosition(0, b"genesis")
        self.rows: list[tuple[bytes, bytes, int]] = []
        """Payload, digest and epoch of each row from row 1 on."""
        self.position = 0
        self.forgotten_below = 1
        self.doubts = 0
        """Number of next appends that are not confirmed."""

    def digest(self, number: int) -> bytes:
        at = number - self.first.number
        return self.rows[at - 1][1] if at else self.first.digest

    @property
    def last_number(self) -> int:
        return self.first.number + len(self.rows)

    def add(self, payload: bytes, epoch: int) -> None:
        self.rows.append((payload, next_digest(self.digest(self.last_number), [payload]), epoch))

    def until(self, number: int) -> LogRows:
        """Return the log as it was when row `number` was its last one."""
        before = LogRows()
        before.identity, before.rows = self.identity, self.rows[:number]
        return before

    def compact(self) -> None:
        """Compact all rows but the last, and forget these."""
        self.position = max(0, len(self.rows) - 1)
        self.forgotten_below = self.position + 1


class FakeSnapshot:
    def __init__(self, rows: LogRows) -> None:
        self.position = LogPosition(rows.position, rows.digest(rows.position))
        self._content = b""
        self._overlay = Overlay()
        for payload, _, _ in rows.rows[: rows.position]:
            self._overlay.apply_changes(decode_changes(memoryview(payload)), 1, len(self._content))
            self._content += payload
        indexes = self._overlay.indexes
        self.recovered = apply_journal(Recovered(identity=rows.identity, clean_stop=True), indexes)

    def messages(self) -> Iterator[KeptMessage]:
        marks = [index.marks for index in self._overlay.indexes]
        causes = [index.causes for index in self._overlay.indexes]
        for key, span in self._overlay.messages():
            record = self._content[span.offset : span.offset + span.length]
            mark = find_mark(key, marks) or NO_MARK
            yield KeptMessage(key, record, span.is_transient, mark, merge_causes(key, causes))

    def timers(self) -> Iterator[bytes]:
        return self._overlay.timer_view().iter_after(b"", iter(()))


class FakeAppend:
    """Append whose answer is there at once."""

    socket = -1
    is_sent = True

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def advance(self) -> Progress:
        return self._progress


class FakeLog:
    frames: Frames

    def __init__(self, rows: LogRows) -> None:
        self.rows = rows
        self.identity = rows.identity
        self.next_history = (1, 1)
        self.failure: StoreError | None = None
        self.disk_level = DiskLevel.PLENTY
        self.disk_level_bytes: Mapping[str, int] = {}
        self.earlier_identities: Mapping[str, int] = rows.earlier
        self.silent_from = inf
        self.looks: list[Callable[[], bool]] = []
        """Answers of the next looks, in order: whether the broker stands by. When there is none left, it takes
        over."""
        self.heirs: list[str] = []
        """Heirs of clean stops."""
        self._epoch = -1
        self._in_doubt = 0
        """Number of a row that was begun, and not confirmed."""
        self.is_closed = False

    def relation(self, position: LogPosition, frames: Frames | None = None) -> Relation:
        number = position.number
        if number > self.rows.last_number:
            end = Row(self.rows.last_number, 0, self.rows.digest(self.rows.last_number))
            is_other = frames is not None and went_other_way(
                End(end, position, frames.oldest_frame), frames.frames_after(end.number)
            )
            return Relation.OTHER_WAY if is_other else Relation.AHEAD
        if number + 1 < self.rows.forgotten_below:
            return Relation.OLD
        return Relation.PREFIX if self.rows.digest(number) == position.digest else Relation.OTHER_WAY

    @contextmanager
    def snapshot(self) -> Iterator[FakeSnapshot]:
        yield FakeSnapshot(self.rows)

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        if position.number > self.rows.last_number:
            return
        if self.rows.digest(position.number) != position.digest:
            raise StoreError("another row")
        for payload, _, _ in self.rows.rows[position.number - self.rows.first.number :]:
            yield payload

    def stands_by(self, position: LogPosition) -> bool:
        return self.looks.pop(0)() if self.looks else False

    def take_over(self, position: LogPosition) -> bool:
        self._epoch = self.rows.rows[-1][2] + 1 if self.rows.rows else 1
        takeover = Takeover(self._epoch, "fake", 0, 0, secrets.token_bytes(8))
        self.rows.add(b"".join(encode_batch(Batch(0), RareChanges(takeover=takeover))), self._epoch)
        return True

    def choose_heir(self, to: str | None) -> str:
        if to == "absent":
            raise ConfigurationError("no broker with the member name 'absent' stands by")
        return to or "second"

    def hand_over(self, heir: str) -> None:
        self.heirs.append(heir)

    def leave(self) -> None:
        pass

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        assert not self.is_closed
        if number == self._in_doubt:
            self._in_doubt = 0
            return False
        if self.rows.rows[-1][2] != self._epoch:
            raise StoreFencedError("another broker has taken over")
        assert number == self.rows.last_number + 1
        assert before == self.rows.digest(number - 1)
        self.rows.add(b"".join(parts), self._epoch)
        assert digest == self.rows.digest(number)
        if self.rows.doubts:
            self.rows.doubts -= 1
            return False
        return True

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> FakeAppend | None:
        try:
            if self.append(number, before, digest, parts):
                return FakeAppend(Progress.APPLIED)
        except StoreFencedError:
            return None
        self._in_doubt = number
        return FakeAppend(Progress.IN_DOUBT)

    def start(self) -> None:
        pass

    def begin_stop(self) -> None:
        pass

    @property
    def status(self) -> LogStatus:
        return LogStatus(
            server="db1:5432",
            epoch=self._epoch,
            number=self.rows.last_number,
            position=self.rows.position,
            is_replicated=False,
        )

    def close(self) -> None:
        self.is_closed = True


class WaitingLog(FakeLog):
    """Log that begins no append: it has no socket that an event loop could watch."""

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> None:
        return None
