"""Copies of a log: checks whether a data folder is one, makes it anew from the log, and makes it an ordinary folder.

lmdb/, journal/     as in every data folder; the checkpoint also has the digest of its last frame's row
seed                the checkpoint while it is made from a snapshot of the log
aside-TIME/         earlier content that is damaged, too old, or went another way than the log
"""

from __future__ import annotations

import logging
import secrets
import shutil
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import gmtime, strftime

from truenext.clock import monotonic
from truenext.errors import ConfigurationError
from truenext.model.batch import NO_CAUSES, NO_MARK
from truenext.store import folder
from truenext.store.changes import decode_changes
from truenext.store.checkpoint import TRANSACTION_BYTES_MAX, Checkpoint
from truenext.store.checkpoint_format import CheckpointPosition
from truenext.store.journal import Journal, describe_lost_tail
from truenext.store.log import DIGEST_SIZE, KeptMessage, Log, LogPosition, Relation, Snapshot
from truenext.store.overlay import SegmentIndex
from truenext.store.pieces import split_into_pieces
from truenext.store.renewal import locked
from truenext.store.store import Recovered
from truenext.store.store_errors import DamagedFolderError, damage_error, translated_errors

logger = logging.getLogger(__name__)

SEED = "seed"

KEYS_MAX = 10_000
"""Largest number of messages or timers in one transaction."""

PROGRESS_INTERVAL_S = 10.0
"""Seconds between two lines in the log about a folder that is being made."""

_TOO_OLD = "it is too old: the database no longer has the rows that follow"
_TOO_OLD_MARK = "too-old"
"""File in content that was set aside because it was too old."""


# ---- A folder of a broker that starts ----


def prepare_copy(path: Path, log: Log, *, map_size: int, segment_bytes: int) -> None:
    """Make sure that the folder is a prefix of the log, from which the log's rows lead on. Otherwise its content is set
    aside, and a new one is made from a snapshot of the log. The caller holds the folder's lock.

    The folder may have rows that the log has lost: the log puts them back when it is taken over.

    Raises: ConfigurationError if the folder is no copy of a log, or one of another log; StoreError if log or folder
    cannot be read
    """
    shutil.rmtree(path / SEED, ignore_errors=True)
    if any((path / name).exists() for name in ("lmdb", "journal")):
        fault = _fault_of(path, log)
        if not fault:
            return
        _set_aside(path, fault)
    _seed(path, log, map_size=map_size, segment_bytes=segment_bytes)


def _fault_of(path: Path, log: Log) -> str:
    """Return why the folder cannot go on with the log; empty if it can."""
    try:
        identity, position = _read(path)
    except DamagedFolderError:
        return "it is damaged"
    if identity in log.earlier_identities:
        last = log.earlier_identities[identity]
        return f"the log has another identity since row {last}, and the folder has rows up to {position.number}"
    if identity != log.identity:
        # Not set aside: a wrong database or schema must not look like an empty one.
        raise ConfigurationError(
            f"{path} is a copy of another log than that of --store and --schema: name the store and the schema of that "
            f"log; or move {path} away, and go on without its messages; or take its messages into a new log "
            f"(`truenext store detach {path}`, then `truenext store init --from {path}`)"
        )
    relation = log.relation(position)
    if relation is Relation.AHEAD:
        relation = _relation_of_frames(path, log, position)
    if relation is Relation.OTHER_WAY:
        first = _first_row_alone(path, log)
        return f"it went another way than the database, and it alone has the rows {first} to {position.number}"
    return _TOO_OLD if relation is Relation.OLD else ""


def _relation_of_frames(path: Path, log: Log, position: LogPosition) -> Relation:
    with closing(_open(path, is_copy=True)) as checkpoint, closing(_replayed_journal(path, checkpoint)) as journal:
        return log.relation(position, journal)


def _replayed_journal(path: Path, checkpoint: Checkpoint) -> Journal:
    journal = _open_journal(path, checkpoint, is_copy=True)
    for _ in journal.replay(checkpoint.read()[1]):
        pass
    return journal


def _first_row_alone(path: Path, log: Log) -> int:
    """Return the number of the first row in the journal of a folder that the log has not, or has another one for."""
    digests = bytearray()
    with (
        closing(_open(path, is_copy=True)) as checkpoint,
        closing(_open_journal(path, checkpoint, is_copy=True)) as journal,
    ):
        position = checkpoint.read()[1]
        for _ in journal.replay(position):
            digests += journal.last_digest
    first = position.frame + 1

    def is_alone(at: int) -> bool:
        row = LogPosition(first + at, bytes(digests[at * DIGEST_SIZE : (at + 1) * DIGEST_SIZE]))
        return log.relation(row) in (Relation.OTHER_WAY, Relation.AHEAD)

    return first + bisect_left(range(len(digests) // DIGEST_SIZE), True, key=is_alone)


def _set_aside(path: Path, fault: str) -> None:
    aside = _new_aside(path)
    if fault == _TOO_OLD:
        # The log has all that was in them, except their histories. A broker that stands by may be stopped for a night,
        # again and again.
        for mark in path.glob(f"{folder.ASIDE}*/{_TOO_OLD_MARK}"):
            for name in ("lmdb", "journal"):
                shutil.rmtree(mark.parent / name, ignore_errors=True)
            mark.unlink()
            with suppress(OSError):
                # Without a history, it is empty.
                mark.parent.rmdir()
        (aside / _TOO_OLD_MARK).touch()
    logger.warning("the data folder is made anew, its old content is kept", extra={"reason": fault, "kept": str(aside)})
    # In this order: after a crash, lmdb or journal shows that the rest must follow.
    for name in ("history", "lmdb", "journal"):
        if (path / name).exists():
            (path / name).rename(aside / name)
    folder.sync_folder(aside)
    folder.sync_folder(path)


def _new_aside(path: Path) -> Path:
    aside = path / f"{folder.ASIDE}{strftime('%Y%m%dT%H%M%SZ', gmtime())}-{secrets.token_hex(2)}"
    aside.mkdir(mode=0o700)
    return aside


def _seed(path: Path, log: Log, *, map_size: int, segment_bytes: int) -> None:
    with log.snapshot() as snapshot:
        checkpoint = Checkpoint(
            path / SEED,
            map_size=map_size,
            segment_bytes=segment_bytes,
            identity=snapshot.recovered.identity,
            is_copy=True,
        )
        with closing(checkpoint):
            _write_snapshot(checkpoint, snapshot)
    (path / SEED).rename(path / "lmdb")
    folder.sync_folder(path)


def _write_snapshot(checkpoint: Checkpoint, snapshot: Snapshot) -> None:
    for messages in split_into_pieces(_with_progress(snapshot.messages()), _size, TRANSACTION_BYTES_MAX, KEYS_MAX):
        for are_transient in (False, True):
            of_kind = [(each.key, each.record) for each in messages if each.is_transient is are_transient]
            if of_kind:
                checkpoint.put_messages(of_kind, are_transient=are_transient)
        marks = {each.key: (each.mark, each.causes) for each in messages if (each.mark, each.causes) != _UNMARKED}
        if marks:
            checkpoint.put_marks(marks)
    for timers in split_into_pieces(snapshot.timers(), len, TRANSACTION_BYTES_MAX, KEYS_MAX):
        checkpoint.set_timers([(timer, True) for timer in timers])
    number, digest = snapshot.position
    checkpoint.finish_checkpoint([_index(snapshot.recovered)], {}, CheckpointPosition(0, number, number, digest))


_UNMARKED = (NO_MARK, NO_CAUSES)


def _size(message: KeptMessage) -> int:
    return len(message.record) + sum(map(len, message.causes))


def _with_progress(messages: Iterator[KeptMessage]) -> Iterator[KeptMessage]:
    shown = monotonic()
    count = 0
    for count, message in enumerate(messages, 1):
        yield message
        if not count % 1000 and monotonic() - shown >= PROGRESS_INTERVAL_S:
            shown = monotonic()
            logger.info("reading messages from the database", extra={"messages": count})
    logger.info("the data folder was made from the database", extra={"messages": count})


def _index(recovered: Recovered) -> SegmentIndex:
    return SegmentIndex(
        0,
        queues=recovered.queues,
        paused=dict.fromkeys(recovered.paused, True),
        producers=recovered.producers,
        sequence_limit=recovered.sequence_limit,
        redelivered_below=recovered.redelivered_below,
        clean_stop=recovered.clean_stop,
    )


# ---- A folder of a stopped broker ----


def first_position(path: Path, first_digest: bytes) -> LogPosition:
    """Return the position that the last frame of an ordinary folder has in the log that begins with this folder, if
    the digest of the checkpoint's last frame is `first_digest`. The caller holds the folder's lock.

    Raises: StoreError if the folder is damaged, or is a copy already
    """
    return _read(path, first_digest)[1]


def copy_position(path: Path) -> tuple[str, LogPosition]:
    """Return identity and position of a folder that is a copy of a log.

    Raises: StoreInUseError if a broker uses the folder; ConfigurationError if it is no copy; StoreError if it is
    damaged
    """
    with locked(path):
        return _read(path)


def become_copy(path: Path, first_digest: bytes) -> None:
    """Make an ordinary folder a copy of the log whose genesis row is at `first_position`. The folder is a copy on
    return, also after a crash. The caller holds the folder's lock.

    Raises: StoreError if the folder is damaged, or is a copy already
    """
    with translated_errors(f"write to the store in {path}", path), closing(_open(path, is_copy=False)) as checkpoint:
        checkpoint.become_copy(first_digest)


def detach(path: Path, last_history_chunk: tuple[int, int] | None = None) -> str:
    """Make a copy of a log an ordinary folder, and return its new identity: the log may go on without it.

    `last_history_chunk` is the run and the first event of the last chunk of a batch in the history's own files. A
    history that knows of more batches than the folder has, as after a power cut, is set aside.

    Raises: StoreInUseError if a broker uses the folder; ConfigurationError if it is no copy; StoreError if it is
    damaged
    """
    with locked(path), closing(_open_attached(path)) as checkpoint:
        position = checkpoint.read()[1]
        with closing(_open_journal(path, checkpoint, is_copy=True)) as journal:
            history = b""
            for _, _, payload in journal.replay(position):
                history = decode_changes(payload).history or history
            _check_end(path, journal, position)
            journal.finish_replay()
            journal.sync()
            folder.sync_folder(path / "journal")
        if describe_lost_tail(journal.last_frame_number, 0, history, last_history_chunk):
            (path / "history").rename(_new_aside(path) / "history")
        return checkpoint.detach()


def _open_attached(path: Path) -> Checkpoint:
    try:
        return _open(path, is_copy=True)
    except ConfigurationError:
        raise ConfigurationError(
            f"{path} is no copy of a log in a database, so there is nothing to detach: `truenext serve --data {path}` "
            "starts a broker with it"
        ) from None


def _read(path: Path, first_digest: bytes = b"") -> tuple[str, LogPosition]:
    """Return the folder's identity, and the position of its last frame. Only an ordinary folder needs
    `first_digest`."""
    is_copy = not first_digest
    with (
        translated_errors(f"read the store in {path}", path),
        closing(_open(path, is_copy=is_copy)) as checkpoint,
        closing(_open_journal(path, checkpoint, is_copy=is_copy)) as journal,
    ):
        recovered, position = checkpoint.read()
        if not is_copy:
            position = CheckpointPosition(position.segment, position.frame, position.durable_frame, first_digest)
        for _ in journal.replay(position):
            pass
        _check_end(path, journal, position)
        return recovered.identity, LogPosition(journal.last_frame_number, journal.last_digest)


def _check_end(path: Path, journal: Journal, position: CheckpointPosition) -> None:
    if journal.last_frame_number < position.durable_frame:
        raise damage_error("journal", f"frame {position.durable_frame} is missing at its end", path)


def _open(path: Path, *, is_copy: bool) -> Checkpoint:
    return Checkpoint(path / "lmdb", may_be_new=False, is_copy=is_copy)


def _open_journal(path: Path, checkpoint: Checkpoint, *, is_copy: bool) -> Journal:
    (path / "journal").mkdir(mode=0o700, exist_ok=True)
    return Journal(path / "journal", salt=checkpoint.salt, segment_bytes=checkpoint.segment_bytes, is_copy=is_copy)
