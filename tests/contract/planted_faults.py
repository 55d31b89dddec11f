"""Planted faults of the store that the crash tests must notice.

Each function makes the shipped store wrong in one way, by replacing functions of it; its name says what is wrong.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import lmdb

from tests.contract import cutting
from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK, Batch, Causes, Mark
from truenext.model.events import chunk_position
from truenext.model.record import CONTENTS_LANE_KEY
from truenext.store import checkpoint, embedded, folder, frame, journal, message_tables, overlay
from truenext.store.changes import Changes, RareChanges, causes_of, decode_changes, dereference_contents
from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import NUMBER, CheckpointPosition, decode_mark
from truenext.store.embedded import EmbeddedStore
from truenext.store.frame import FRAME
from truenext.store.frame_writer import FrameWriter
from truenext.store.journal import Journal
from truenext.store.message_tables import Marks
from truenext.store.overlay import Overlay, SegmentIndex, TimerView
from truenext.store.salvage import journal as salvaged_journal
from truenext.store.store import Recovered

if TYPE_CHECKING:
    from pytest import MonkeyPatch


def _made_formats_are_read(patch: "MonkeyPatch") -> None:
    """Plant no fault, but the earlier formats of made_formats.py, in a process of recorded_process.py."""
    from tests.contract import try_upgrades

    try_upgrades.plant(patch)


# The journal


def an_old_batch_in_a_recycled_segment_passes(patch: "MonkeyPatch") -> None:
    """The checksum is looked at, and not of which segment and number the frame is."""
    payload_at = frame.payload_at

    def faulty(content: memoryview, offset: int, segment: int, number: int, salt: int) -> memoryview | None:
        if offset + FRAME.size > len(content):
            return None
        _, _, segment, number = FRAME.unpack_from(content, offset)
        return payload_at(content, offset, segment, number, salt)

    patch.setattr(journal, "payload_at", faulty)


def a_batch_passes_without_its_checksum(patch: "MonkeyPatch") -> None:
    for module in (frame, journal):
        patch.setattr(module, "crc32", lambda *_: 7)


def a_batch_is_confirmed_before_it_is_durable(patch: "MonkeyPatch") -> None:
    open_ = os.open
    patch.setattr(os, "open", lambda path, flags, *rest, **named: open_(path, flags & ~os.O_DSYNC, *rest, **named))


def a_folder_is_not_synced_after_a_rename(patch: "MonkeyPatch") -> None:
    patch.setattr(journal, "sync_folder", lambda _: None)


def a_torn_tail_is_not_cleared(patch: "MonkeyPatch") -> None:
    patch.setattr(Journal, "_clear_tail", lambda _: None)


def a_batch_that_is_only_in_memory_is_believed(patch: "MonkeyPatch") -> None:
    patch.setattr(Journal, "_rewrite_last", lambda _: None)


def a_batch_that_is_only_in_memory_is_believed_once_its_file_was_synced(patch: "MonkeyPatch") -> None:
    patch.setattr(Journal, "_rewrite_last", lambda one: os.fsync(one._files[one.newest_segment]))


# What the checkpoint says of the journal's end


def the_end_is_written_down_before_it_is_durable(patch: "MonkeyPatch") -> None:
    append = FrameWriter.append_batch

    def faulty(one: FrameWriter, parts: list[bytes], records: int) -> tuple[int, int]:
        checkpoint = one._checkpointer._checkpoint
        checkpoint.save_journal_end(one._journal.last_frame_number + 1, 0)
        return append(one, parts, records)

    patch.setattr(FrameWriter, "append_batch", faulty)


def a_move_writes_down_more_than_was_written(patch: "MonkeyPatch") -> None:
    finish = Checkpoint.finish_checkpoint

    def faulty(one: Checkpoint, indexes: Iterable[SegmentIndex], marks: Marks, position: CheckpointPosition) -> None:
        finish(one, indexes, marks, CheckpointPosition(position.segment, position.frame, position.durable_frame + 1))

    patch.setattr(Checkpoint, "finish_checkpoint", faulty)


def the_end_of_a_run_is_not_written_down(patch: "MonkeyPatch") -> None:
    write_down = EmbeddedStore._save_journal_end

    def faulty(one: EmbeddedStore, sequence_limit: int) -> None:
        if not one._overlay.indexes[-1].clean_stop:
            write_down(one, sequence_limit)

    patch.setattr(EmbeddedStore, "_save_journal_end", faulty)


def the_beginning_of_a_run_is_not_written_down(patch: "MonkeyPatch") -> None:
    write_down = EmbeddedStore._save_journal_end

    def faulty(one: EmbeddedStore, sequence_limit: int) -> None:
        if one._overlay.indexes[-1].clean_stop:
            write_down(one, sequence_limit)

    patch.setattr(EmbeddedStore, "_save_journal_end", faulty)


def a_block_of_sequences_is_not_written_down(patch: "MonkeyPatch") -> None:
    write_down = Checkpoint.save_journal_end

    def faulty(one: Checkpoint, durable_frame: int, sequence_limit: int) -> None:
        # But for the first, which comes with the beginning of a run.
        if sequence_limit <= cutting.FIRST_LIMIT:
            write_down(one, durable_frame, sequence_limit)

    patch.setattr(Checkpoint, "save_journal_end", faulty)


def a_move_does_not_write_down_the_end(patch: "MonkeyPatch") -> None:
    finish = Checkpoint.finish_checkpoint

    def faulty(one: Checkpoint, indexes: Iterable[SegmentIndex], marks: Marks, position: CheckpointPosition) -> None:
        finish(one, indexes, marks, CheckpointPosition(position.segment, position.frame))

    patch.setattr(Checkpoint, "finish_checkpoint", faulty)


def a_move_forgets_the_end_that_was_written_down(patch: "MonkeyPatch") -> None:
    def faulty(one: Checkpoint, txn: Any, name: bytes, number: int) -> None:
        one._meta.put(txn, name, NUMBER.pack(number))

    patch.setattr(Checkpoint, "_put_if_greater", faulty)


def a_lost_recorded_end_is_not_missed(patch: "MonkeyPatch") -> None:
    patch.setattr(embedded, "describe_lost_tail", lambda *_: "")


def a_lost_recorded_end_is_not_missed_by_a_check(patch: "MonkeyPatch") -> None:
    patch.setattr(salvaged_journal, "describe_lost_tail", lambda *_: "")


def lost_batches_known_to_the_history_are_not_missed(patch: "MonkeyPatch") -> None:
    patch.setattr(journal, "chunk_position", lambda _: (1, 1 << 60))


class _AnyRun(int):
    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = int.__hash__


def the_history_of_another_run_accuses(patch: "MonkeyPatch") -> None:
    patch.setattr(journal, "chunk_position", lambda chunk: (_AnyRun(), chunk_position(chunk)[1]))


def the_tail_is_cleared_before_it_is_looked_at(patch: "MonkeyPatch") -> None:
    replay = Journal.replay

    def faulty(one: Journal, position: CheckpointPosition) -> Iterator[tuple[int, int, memoryview]]:
        yield from replay(one, position)
        one.finish_replay()

    patch.setattr(Journal, "replay", faulty)


def a_segment_of_any_size_passes(patch: "MonkeyPatch") -> None:
    patch.setattr(Journal, "_check_size", lambda *_: None)


def a_segment_of_any_size_passes_a_check(patch: "MonkeyPatch") -> None:
    patch.setattr(salvaged_journal, "describe_cut", lambda *_: "")


# The move into the checkpoint


def the_position_moves_before_the_records_do(patch: "MonkeyPatch") -> None:
    put, finish = Checkpoint.put_messages, Checkpoint.finish_checkpoint
    late: WeakKeyDictionary[Checkpoint, list[Callable[[], None]]] = WeakKeyDictionary()

    def faulty_put(one: Checkpoint, messages: list[tuple[bytes, bytes]], *, are_transient: bool) -> None:
        late.setdefault(one, []).append(partial(put, one, messages, are_transient=are_transient))

    def faulty_finish(one: Checkpoint, *rest: Any) -> None:
        finish(one, *rest)
        for action in late.pop(one, []):
            action()

    patch.setattr(Checkpoint, "put_messages", faulty_put)
    patch.setattr(Checkpoint, "finish_checkpoint", faulty_finish)


def a_segment_is_released_before_its_move_is_durable(patch: "MonkeyPatch") -> None:
    finish, free = Checkpoint.finish_checkpoint, Journal.free
    late: list[Callable[[], None]] = []

    def faulty(one: Journal, segment: int) -> None:
        free(one, segment)
        while late:
            late.pop()()

    patch.setattr(Checkpoint, "finish_checkpoint", lambda *all_: late.append(partial(finish, *all_)))
    patch.setattr(Journal, "free", faulty)


def a_removal_is_lost_when_a_move_is_interrupted(patch: "MonkeyPatch") -> None:
    """The checkpoint may have some of the oldest segment already, and recovery takes it as if it had none of it."""

    def faulty(one: Overlay, keys: list[bytes], index: SegmentIndex, *, is_transient: bool) -> None:
        for key, segment in zip(keys, one._delete(keys), strict=True):
            if segment < one.last_checkpoint_segment:
                index.removed[key] = is_transient

    patch.setattr(Overlay, "_remove", faulty)


def a_message_is_in_both_when_a_move_is_interrupted(patch: "MonkeyPatch") -> None:
    patch.setattr(Overlay, "remove_checkpointed", lambda *_: None)


def a_mark_does_not_move(patch: "MonkeyPatch") -> None:
    finish = Checkpoint.finish_checkpoint
    patch.setattr(
        Checkpoint, "finish_checkpoint", lambda one, indexes, marks, position: finish(one, indexes, {}, position)
    )


def causes_do_not_move(patch: "MonkeyPatch") -> None:
    patch.setattr(Checkpoint, "put_marks", lambda *_: None)


def a_mark_that_moves_takes_the_causes_of_the_one_before_with_it(patch: "MonkeyPatch") -> None:
    patch.setattr(message_tables, "decode_mark", lambda value: (decode_mark(value)[0], NO_CAUSES))


def only_the_newest_segment_has_causes(patch: "MonkeyPatch") -> None:
    def faulty(key: bytes, causes: Iterable[dict[bytes, Causes]]) -> Causes:
        return next((one[key] for one in causes if key in one), NO_CAUSES)

    patch.setattr(overlay, "merge_causes", faulty)


def the_last_cause_of_a_segment_takes_the_place_of_the_first(patch: "MonkeyPatch") -> None:
    def faulty(one: Overlay, rest: RareChanges, index: SegmentIndex) -> None:
        index.causes.update(causes_of(rest))

    patch.setattr(Overlay, "_add_causes", faulty)


def causes_are_not_replayed(patch: "MonkeyPatch") -> None:
    def faulty(payload: memoryview) -> Changes:
        done = decode_changes(payload)
        if done.rare is not None:
            done.rare.causes.clear()
        return done

    patch.setattr(embedded, "decode_changes", faulty)


def the_producers_and_sequences_of_a_segment_do_not_move(patch: "MonkeyPatch") -> None:
    patch.setattr(Checkpoint, "_finish_index", lambda *_: None)


def a_move_begins_before_the_history_was_taken(patch: "MonkeyPatch") -> None:
    recover = EmbeddedStore.recover

    def faulty(one: EmbeddedStore) -> Recovered:
        one._checkpointer.is_enabled = True
        recovered = recover(one)
        with one._changed:
            # As it may happen: it was quicker than whoever takes the history.
            one._changed.wait_for(lambda: not one._checkpointer._is_checkpoint_due(), timeout=1)
        return recovered

    patch.setattr(EmbeddedStore, "recover", faulty)


# Timers


def a_page_of_timers_skips_the_journal(patch: "MonkeyPatch") -> None:
    patch.setattr(TimerView, "iter_after", lambda _, after, of_checkpoint: of_checkpoint)


def a_cleared_timer_comes_back_after_a_move(patch: "MonkeyPatch") -> None:
    set_timers = Checkpoint.set_timers
    patch.setattr(Checkpoint, "set_timers", lambda one, timers: set_timers(one, [pair for pair in timers if pair[1]]))


def a_timer_is_lost_by_its_move(patch: "MonkeyPatch") -> None:
    patch.setattr(Checkpoint, "set_timers", lambda *_: None)


# Contents that several messages share


def a_content_goes_with_its_first_reference(patch: "MonkeyPatch") -> None:
    def faulty(batch: Batch, mark_of: Callable[[bytes], Mark]) -> Batch:
        return dereference_contents(
            batch, lambda key: Mark((batch.dereferenced + batch.transient_dereferenced).count(key), 0)
        )

    patch.setattr(embedded, "dereference_contents", faulty)


def a_content_stays_when_its_last_reference_goes(patch: "MonkeyPatch") -> None:
    def faulty(batch: Batch, mark_of: Callable[[bytes], Mark]) -> Batch:
        done = dereference_contents(batch, mark_of)
        done.removes, done.transient_removes = batch.removes, batch.transient_removes
        done.unmarks = batch.unmarks
        return done

    patch.setattr(embedded, "dereference_contents", faulty)


def a_transient_content_is_looked_for_among_persistent_ones(patch: "MonkeyPatch") -> None:
    patch.setattr(Checkpoint, "content", lambda one, snapshot, key: snapshot.get(key, b"", db=one._persistent.messages))


def the_references_of_a_transient_content_are_not_counted_once_it_has_moved(patch: "MonkeyPatch") -> None:
    def faulty(one: Checkpoint, key: bytes) -> Mark:
        with one._env.begin() as txn:
            mark = one._persistent.marks.get(txn, key)
        return NO_MARK if mark is None else decode_mark(mark)[0]

    patch.setattr(Checkpoint, "mark", faulty)


def the_count_of_references_is_not_replayed(patch: "MonkeyPatch") -> None:
    """Replay gives the count that came with the content."""

    def faulty(payload: memoryview) -> Changes:
        done = decode_changes(payload)
        if done.rare is not None:
            put = {key for key, _ in done.puts}
            for key in [key for key in done.rare.marks if key.startswith(CONTENTS_LANE_KEY) and key not in put]:
                del done.rare.marks[key]
        return done

    patch.setattr(embedded, "decode_changes", faulty)


def the_count_of_references_does_not_move(patch: "MonkeyPatch") -> None:
    finish = Checkpoint.finish_checkpoint

    def faulty(one: Checkpoint, indexes: Iterable[SegmentIndex], marks: Marks, position: CheckpointPosition) -> None:
        finish(
            one, indexes, {key: mark for key, mark in marks.items() if not key.startswith(CONTENTS_LANE_KEY)}, position
        )

    patch.setattr(Checkpoint, "finish_checkpoint", faulty)


def a_reference_moves_without_its_content(patch: "MonkeyPatch") -> None:
    put = Checkpoint.put_messages

    def faulty(one: Checkpoint, messages: list[tuple[bytes, bytes]], *, are_transient: bool) -> None:
        put(one, [pair for pair in messages if not pair[0].startswith(CONTENTS_LANE_KEY)], are_transient=are_transient)

    patch.setattr(Checkpoint, "put_messages", faulty)


def the_removal_of_a_reference_is_in_a_batch_of_its_own(patch: "MonkeyPatch") -> None:
    """The content goes, or is counted, with the batch behind it."""
    apply = EmbeddedStore.apply

    def faulty(one: EmbeddedStore, batch: Batch) -> None:
        late = Batch(batch.number)
        late.dereferenced, batch.dereferenced = batch.dereferenced, []
        late.transient_dereferenced, batch.transient_dereferenced = batch.transient_dereferenced, []
        apply(one, batch)
        apply(one, late)

    patch.setattr(EmbeddedStore, "apply", faulty)


# Transients


def transients_of_an_older_generation_are_shown(patch: "MonkeyPatch") -> None:
    drop = Checkpoint.drop_transients

    def faulty(one: Checkpoint) -> None:
        before = one._transient.generation
        drop(one)
        one._transient.generation = before

    patch.setattr(Checkpoint, "drop_transients", faulty)


def transients_in_the_journal_come_back_after_the_next_clean_stop(patch: "MonkeyPatch") -> None:
    """Dropping the transients is not written to the journal."""

    def faulty(one: EmbeddedStore) -> None:
        one._checkpoint.drop_transients()
        one._overlay._drop_transients()

    patch.setattr(EmbeddedStore, "_drop_transients", faulty)


# A disk that fails


def a_batch_is_confirmed_behind_one_that_failed(patch: "MonkeyPatch") -> None:
    apply = EmbeddedStore.apply

    def faulty(one: EmbeddedStore, batch: Batch) -> None:
        try:
            apply(one, batch)
        except StoreError:
            one._unwritable_reason = ""
            raise

    patch.setattr(EmbeddedStore, "apply", faulty)


def a_failed_write_is_confirmed(patch: "MonkeyPatch") -> None:
    write = folder.write

    def faulty(file: int, content: bytes, offset: int) -> None:
        with suppress(OSError):
            write(file, content, offset)

    patch.setattr(journal, "write", faulty)


def a_failed_write_is_tried_again_and_then_confirmed(patch: "MonkeyPatch") -> None:
    """The frame behind it, so that a gap remains."""
    append = Journal.append

    def faulty(one: Journal, parts: list[bytes], size: int, digest: bytes) -> tuple[int, int]:
        try:
            return append(one, parts, size, digest)
        except OSError:
            one._end += size + FRAME.size
            one.last_frame_number += 1
            return append(one, parts, size, digest)

    patch.setattr(Journal, "append", faulty)


# LMDB


def lmdb_does_not_sync(patch: "MonkeyPatch") -> None:
    open_ = lmdb.open
    patch.setattr(lmdb, "open", lambda *rest, **named: open_(*rest, **{**named, "sync": False}))


def lmdb_does_not_sync_its_root(patch: "MonkeyPatch") -> None:
    open_ = lmdb.open
    patch.setattr(lmdb, "open", lambda *rest, **named: open_(*rest, **{**named, "metasync": False}))


def a_checkpoint_that_is_only_in_memory_is_believed(patch: "MonkeyPatch") -> None:
    open_ = checkpoint._open

    class Unsynced:
        def __init__(self, env: Any) -> None:
            self._env = env

        def __enter__(self) -> "Unsynced":
            return self

        def __exit__(self, *_: object) -> None:
            self._env.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._env, name)

        def sync(self, force: bool) -> None:
            pass

    patch.setattr(checkpoint, "_open", lambda *rest, **named: Unsynced(open_(*rest, **named)))


def a_new_checkpoint_has_its_name_from_the_beginning(patch: "MonkeyPatch") -> None:
    make = checkpoint._make

    def faulty(path: Path, map_size: int, *others: Any) -> None:
        (path / "new").unlink(missing_ok=True)
        with lmdb.open(str(path), map_size=map_size, lock=False, lib_version=0):
            make(path, map_size, *others)

    patch.setattr(checkpoint, "_make", faulty)


OF_A_FAILING_DISK = [
    a_batch_is_confirmed_behind_one_that_failed,
    a_failed_write_is_confirmed,
    a_failed_write_is_tried_again_and_then_confirmed,
    a_batch_that_is_only_in_memory_is_believed_once_its_file_was_synced,
]
"""Seen only where a call fails."""

OF_A_CUT: dict[Callable[["MonkeyPatch"], None], Callable[[Path], None]] = {
    the_end_of_a_run_is_not_written_down: cutting.a_clean_stop,
    the_beginning_of_a_run_is_not_written_down: cutting.a_run_that_was_killed,
    a_block_of_sequences_is_not_written_down: cutting.a_block_of_sequences,
    a_move_does_not_write_down_the_end: cutting.a_checkpoint,
    a_move_forgets_the_end_that_was_written_down: cutting.a_clean_stop_during_a_checkpoint,
    a_lost_recorded_end_is_not_missed: cutting.a_clean_stop,
    a_lost_recorded_end_is_not_missed_by_a_check: cutting.a_clean_stop,
    lost_batches_known_to_the_history_are_not_missed: cutting.a_history_that_tells_more,
    the_history_of_another_run_accuses: cutting.a_history_that_tells_more,
    the_tail_is_cleared_before_it_is_looked_at: cutting.a_clean_stop,
    a_segment_of_any_size_passes: cutting.a_run_that_was_killed,
    a_segment_of_any_size_passes_a_check: cutting.a_run_that_was_killed,
}
"""Seen only where a journal loses what was confirmed, and the scene that shows it."""

OF_LMDB = [
    lmdb_does_not_sync,
    lmdb_does_not_sync_its_root,
    a_new_checkpoint_has_its_name_from_the_beginning,
]
"""Seen only where LMDB's own calls are cut."""


def of_a_crash() -> list[Callable[["MonkeyPatch"], None]]:
    """The others of this file, in its order."""
    return [
        value
        for name, value in globals().items()
        if isinstance(value, FunctionType)
        and value.__module__ == __name__
        and not name.startswith("_")
        and name not in {one.__name__ for one in (of_a_crash, *OF_A_FAILING_DISK, *OF_A_CUT, *OF_LMDB)}
    ]
