"""Scenes in which a journal loses its end, and the check that a store notices exactly that.

Each scene writes a data folder and removes the end of its journal, in every way. A store on the remaining files must
refuse to start and change nothing, and a check must report it, except for losses known to look like those of a crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.contract.crashing import chunk
from tests.contract.damage import wait_for_checkpoints
from tests.contract.disk import Disk, key
from truenext.errors import StoreError
from truenext.model.events import chunk_position
from truenext.model.message import SentMessage
from truenext.model.record import encode_record
from truenext.store import export as export_module
from truenext.store.check import check
from truenext.store.checkpoint import Checkpoint
from truenext.store.embedded import EmbeddedStore
from truenext.store.frame import FRAME

SEGMENT_BYTES = 1500
FIRST_LIMIT = 1000
"""First limit of sequences."""

LastChunk = tuple[int, int] | None


class Loss(NamedTuple):
    """A way in which a journal can lose its end."""

    how: str
    frame: int
    """Number of the first frame that is lost."""
    changes_size: bool


def fresh(folder: Path, segments_max: int = 12) -> Disk:
    """A new store with segments of `SEGMENT_BYTES`, and its first batch, with which a run begins."""
    EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES).close()
    disk = Disk("embedded", folder)
    assert isinstance(disk.store, EmbeddedStore)
    disk.store._checkpointer._segments_max = segments_max
    disk.apply(queues={1: "orders"}, sequence_limit=FIRST_LIMIT, clean_stop=False)
    return disk


def send(disk: Disk, *sequences: int, history: bool = False) -> None:
    """A batch for each; the fifth is larger than a segment."""
    for sequence in sequences:
        body = b"x" * (3 * SEGMENT_BYTES if sequence % 10 == 5 else 300)
        record = encode_record(key(sequence), SentMessage(4, True, 0, b"content-length:%d\n" % len(body), body))
        disk.apply(puts={key(sequence): record}, history=chunk(sequence) if history else b"")


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "journal").glob("*.journal"))


def frames(folder: Path) -> Iterator[tuple[Path, int, int, int]]:
    """Segment, number, begin and end of each."""
    for path in segments(folder):
        content = path.read_bytes()
        at = 0
        while at + FRAME.size <= len(content):
            _, size, segment, number = FRAME.unpack_from(content, at)
            if segment != int(path.stem, 16):
                break
            yield path, number, at, at + FRAME.size + size
            at += FRAME.size + size


def losses(folder: Path) -> Iterator[tuple[Loss, Path]]:
    """Each, and a folder where it has happened. What is behind a lost frame is lost with it."""
    for path, number, start, end in list(frames(folder)):
        middle = (start + end) // 2
        for how in (f"cut at {start}", f"cut at {middle}", f"zeros from {start}", f"zeros from {middle}"):
            lost = _copy(folder)
            for later in segments(lost)[segments(folder).index(path) + 1 :]:
                later.unlink()
            one = lost / "journal" / path.name
            content = one.read_bytes()
            kept = content[: int(how.rpartition(" ")[2])]
            is_cut = how.startswith("cut")
            one.write_bytes(kept if is_cut else kept.ljust(len(content), b"\0"))
            yield Loss(f"{path.name} {how}", number, is_cut), lost
        if start == 0:
            lost = _copy(folder)
            for later in segments(lost)[segments(folder).index(path) :]:
                later.unlink()
            yield Loss(f"{path.name} and those behind it deleted", number, changes_size=False), lost


def _copy(folder: Path) -> Path:
    copied = folder.with_name("lost")
    shutil.rmtree(copied, ignore_errors=True)
    return shutil.copytree(folder, copied)


def start_error(folder: Path, last_chunk: LastChunk = None) -> str:
    """Return the error of a start, empty if it succeeds. `last_chunk` is the last one in the history's own files."""
    before = {path.name: path.read_bytes() for path in segments(folder)}
    store = None
    try:
        store = EmbeddedStore(folder)
        store.last_history_chunk = last_chunk
        store.recover()
    except StoreError as error:
        for path in segments(folder):
            assert path.read_bytes() == before[path.name], "what is refused is left as it is"
        return str(error)
    finally:
        if store is not None:
            store.close()
    return ""


def findings(folder: Path, last_chunk: LastChunk = None) -> list[str]:
    """Return the findings of `truenext store check`."""
    found: list[str] = []
    check(folder, lambda finding: found.append(str(finding)), lambda *_: None, last_history_chunk=last_chunk)
    return found


def expect(folder: Path, loss: Loss, last_chunk: LastChunk, *, is_missed: bool) -> None:
    found, error = findings(folder, last_chunk), start_error(folder, last_chunk)
    if not is_missed:
        assert not found, (loss, found)
        assert not error, (loss, error)
        return
    assert any(line.startswith("journal") for line in found), loss
    assert "the journal in " in error, (loss, error)
    assert f"`truenext store export {folder} NEW` saves all that is readable" in error, loss
    if loss.changes_size:
        assert any("was made with" in line for line in found), (loss, found)
    if "cut" in loss.how:
        assert "was made with" in error or "is damaged: segment" in error, (loss, error)


def try_losses(folder: Path, *, missed: Collection[int], last_chunk: LastChunk = None) -> None:
    """Missed is every loss that begins with one of these frames, or changes the size of a segment, and nothing else."""
    assert findings(folder, last_chunk) == []
    assert start_error(_copy(folder), last_chunk) == ""
    tried = set()
    for loss, lost in losses(folder):
        tried.add(loss.frame)
        expect(lost, loss, last_chunk, is_missed=loss.frame in missed or loss.changes_size)
    assert tried & set(missed)


# ---- Scenes ----


def a_clean_stop(folder: Path) -> None:
    """Frames up to the stop must all be there."""
    disk = fresh(folder)
    send(disk, *range(1, 9))
    disk.apply(clean_stop=True)
    disk.store.close()
    try_losses(folder, missed=range(1, 11))


def a_clean_stop_during_a_checkpoint(folder: Path) -> None:
    """A move that began before the last batch ends behind it, and knows less."""
    disk = fresh(folder)
    send(disk, *range(1, 9))
    store = disk.store
    assert isinstance(store, EmbeddedStore)
    finish = Checkpoint.finish_checkpoint

    def late(one: Checkpoint, *arguments: Any) -> None:
        if arguments[-1].segment == store._journal.newest_segment - 1:
            disk.apply(clean_stop=True)
        finish(one, *arguments)

    with mock.patch.object(Checkpoint, "finish_checkpoint", late):
        checkpoint_all(store)
    store.close()
    try_losses(folder, missed=range(1, 11))


def a_run_that_was_killed(folder: Path) -> None:
    """The run's first batch must be there, and all frames before it."""
    disk = fresh(folder)
    send(disk, 1, 2)
    disk.stop()
    disk.apply(clean_stop=False)
    send(disk, *range(3, 9))
    disk.store.close()
    try_losses(folder, missed=range(1, 6))


def a_block_of_sequences(folder: Path) -> None:
    """The batch that reserved it must be there. Where it is not, none of the block is given again."""
    disk = fresh(folder)
    send(disk, 1, 2)
    disk.apply(sequence_limit=2 * FIRST_LIMIT)
    send(disk, 3, 4)
    disk.store.close()
    try_losses(folder, missed=range(1, 5))
    for _, lost in losses(folder):
        if findings(lost):
            assert limit_of_export(lost) >= 2 * FIRST_LIMIT


def limit_of_export(folder: Path) -> int:
    new = folder.with_name("new")
    shutil.rmtree(new, ignore_errors=True)
    with mock.patch.object(export_module, "SEQUENCE_BLOCK", 0):
        export_module.export(folder, new, lambda _: None, lambda *_: None)
    store = EmbeddedStore(new)
    limit = store.recover().sequence_limit
    store.close()
    return limit


def a_checkpoint(folder: Path) -> None:
    """Frames that were in the journal when a checkpoint ended must be there."""
    disk = fresh(folder, segments_max=100)
    send(disk, *range(1, 14))
    store = disk.store
    assert isinstance(store, EmbeddedStore)
    checkpoint_all(store)
    send(disk, 14, 15)
    store.close()
    try_losses(folder, missed=range(1, 15))


def checkpoint_all(store: EmbeddedStore) -> None:
    """Checkpoint all segments except the newest, and none after that."""
    segments_max = store._checkpointer._segments_max
    with store._changed:
        store._checkpointer._segments_max = 1
        store._changed.notify_all()
    wait_for_checkpoints(store)
    store._checkpointer._segments_max = segments_max


def a_history_that_tells_more(folder: Path) -> None:
    """History reveals lost batches of the run with which the journal ends, while the journal has any frame of that run;
    in no other case does it report a loss."""
    disk = fresh(folder)
    send(disk, *range(1, 9), history=True)
    send(disk, 9)
    disk.store.close()
    for silent in (None, chunk_position(chunk(1)), (2, 100)):
        try_losses(folder, missed={1}, last_chunk=silent)
    try_losses(folder, missed={1, *range(3, 10)}, last_chunk=chunk_position(chunk(8)))


def a_kill_before_the_first_batch(folder: Path) -> None:
    """The end recorded by the clean stop still holds in the second run."""
    disk = fresh(folder)
    send(disk, 1, 2, 3)
    disk.stop()
    disk.crash()
    disk.store.close()
    try_losses(folder, missed=range(1, 6))


SCENES = [
    a_clean_stop,
    a_clean_stop_during_a_checkpoint,
    a_run_that_was_killed,
    a_block_of_sequences,
    a_checkpoint,
    a_history_that_tells_more,
    a_kill_before_the_first_batch,
]
