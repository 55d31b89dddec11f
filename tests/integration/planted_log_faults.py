"""Planted faults of a log in PostgreSQL, which kills and fences must notice.

Each function plants one fault in its process, for good; its name says what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from tests.unit.mutation import mutated
from truenext.broker.committer import Committer
from truenext.broker.silence import Silence
from truenext.server.output import Output
from truenext.store import copying
from truenext.store.checkpoint import Checkpoint
from truenext.store.embedded import EmbeddedStore
from truenext.store.frame_writer import FrameWriter
from truenext.store.log import next_digest
from truenext.store.postgresql import compaction, connection, layout, log_appender, log_end, repair
from truenext.store.postgresql.log_appender import LogAppender
from truenext.store.postgresql.log_rows import last_row
from truenext.store.postgresql.net_effect import NetEffect
from truenext.store.postgresql.outcome import Finding, NewRow, Row
from truenext.store.store import Progress


def plant(name: str) -> None:
    """Plant the fault with this name."""
    fault: Callable[[], None] = getattr(sys.modules[__name__], name)
    fault()


# ---- Appends ----


def frame_before_row() -> None:
    def append_batch(self: FrameWriter, parts: list[bytes], records: int) -> tuple[int, int]:
        assert self._log is not None
        before, number = self._journal.last_digest, self._journal.last_frame_number + 1
        digest = next_digest(before, parts)
        appended = self.append_frame(parts, records, digest)
        self._log.append(number, before, digest, parts)
        return appended

    replace(FrameWriter, "append_batch", append_batch)
    replace(FrameWriter, "begin_batch", lambda self, parts, records: None)


def doubtful_answer_taken_for_done() -> None:
    real = LogAppender.advance_append

    def advance_append(self: LogAppender, pending: Any) -> Progress:
        progress = real(self, pending)
        if progress is not Progress.IN_DOUBT:
            return progress
        self._database.pending = None
        return Progress.APPLIED

    replace(LogAppender, "advance_append", advance_append)


def row_confirmed_before_it_is_synced() -> None:
    # Not the text that both have in them: they were made when the module was loaded.
    for name in ("_BEGIN_SESSION", "_BEGIN_SESSION_ALONE"):
        replace(connection, name, getattr(connection, name).replace("ELSE 'on'", "ELSE 'off'"))


def lost_append_taken_for_done() -> None:
    tried = set()
    real = LogAppender._append

    def append(self: LogAppender, connection: Any, new: NewRow) -> bool:
        if new.number in tried:
            return True
        tried.add(new.number)
        return real(self, connection, new)

    replace(LogAppender, "_append", append)


def lost_append_repeated_under_a_new_number() -> None:
    real = LogAppender._append

    def append(self: LogAppender, connection: Any, new: NewRow) -> bool:
        last = last_row(connection, self._end.schema)
        if last is not None and last.number >= new.number:
            new = new._replace(number=last.number + 1, before=last.digest)
        return real(self, connection, new)

    replace(LogAppender, "_append", append)


def found_row_taken_without_check() -> None:
    replace(LogAppender, "_is_appended", lambda self, connection, new: True)


def epoch_not_compared_after_a_doubt() -> None:
    def find(row: Row, before: bytes, rows: Iterable[Row]) -> Finding:
        digests = {each.number: each.digest for each in rows}
        if digests.get(row.number) == row.digest:
            return Finding.APPENDED
        return Finding.ABSENT if digests.get(row.number - 1) == before else Finding.FORGOTTEN

    replace(log_appender, "find", find)


def slow_append_not_checked_again() -> None:
    replace(log_appender, "SLOW_S", 1e9)


# ---- Silence ----


def never_silent() -> None:
    replace(Silence, "is_silent", lambda self: False)


def bytes_written_in_silence() -> None:
    replace(Output, "_waits_for_silence", lambda self, silence: False)


# ---- Rows that PostgreSQL has forgotten ----


def another_timeline_passed_over() -> None:
    replace(log_end, "origin_fault", lambda *_, **__: None)


def forgotten_rows_not_put_back() -> None:
    replace(repair, "put_back", lambda connection, schema, last, *_: last)


def history_of_no_batch_left_out() -> None:
    replace(
        Committer,
        "_becomes_row",
        mutated(Committer._becomes_row, "self._unlogged.append(", "batch.is_empty() or self._unlogged.append("),
    )


# ---- Folders ----


def transients_stay_after_a_crash() -> None:
    real = EmbeddedStore._follow

    def follow(self: EmbeddedStore, payload: bytes, append: Any) -> None:
        if append != self._writer.append_batch:
            real(self, payload, append)

    replace(EmbeddedStore, "_follow", follow)


def any_folder_is_a_prefix_of_the_log() -> None:
    replace(copying, "_fault_of", lambda path, log: "")


def seed_without_marks() -> None:
    real = copying._write_snapshot

    def write_snapshot(checkpoint: Checkpoint, snapshot: Any) -> None:
        checkpoint.put_marks = lambda marks: None  # type: ignore[method-assign]
        real(checkpoint, snapshot)

    replace(copying, "_write_snapshot", write_snapshot)


# ---- Compaction ----


def compaction_leaves_out_a_row() -> None:
    real = NetEffect.add

    def add(self: NetEffect, payload: bytes) -> bool:
        return True if self.row_count == 5 and len(payload) > 1000 else real(self, payload)

    replace(NetEffect, "add", add)


def position_behind_the_compacted_rows() -> None:
    """Rows are compacted twice."""
    replace(
        compaction,
        "compact",
        mutated(
            compaction.compact,
            "_move_position(connection, schema, before, after)",
            "after.number % 7 and _move_position(connection, schema, before, after)",
        ),
    )


def partition_dropped_above_the_position() -> None:
    replace(
        layout,
        "_drop_partitions",
        mutated(layout._drop_partitions, "min(below, position + 1, ", "min(newest, "),
    )


def replace(where: Any, name: str, value: Any) -> None:
    """Replace an attribute, which must exist."""
    getattr(where, name)
    setattr(where, name, value)
