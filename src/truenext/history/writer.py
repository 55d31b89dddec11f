"""History writer: appends chunks of events to a file, and begins a new file when the file is large.

    history/0000000000000001.history     named after its first event; events.py describes its bytes

Appended chunks survive a crash of the broker once they are flushed, and a crash of the machine once they are synced.
Until then the store's journal has all chunks that belong to durable batches. After a crash `restore` appends them
again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock

from truenext.errors import HistoryError
from truenext.history.files import HistoryChunk, chunk_at, chunks_of_file, count_events, file_path, history_files
from truenext.model.events import FILE, FROM_BATCH, GAP_EVENTS, HISTORY_VERSION, MAGIC, STARTS_FILE, chunks_in

logger = logging.getLogger(__name__)

UNWRITTEN_BYTES_MAX = 64 * 1024
"""Bytes of appended chunks at which `append` writes the chunks itself, without waiting for `flush`."""


class HistoryWriter:
    """Writer of one history folder. One thread calls `append`; any thread may call `flush` and `sync`."""

    def __init__(
        self,
        folder: Path,
        *,
        on_rotate: Callable[[], None] | None = None,
        on_write_error: Callable[[OSError], None] | None = None,
    ) -> None:
        """`on_rotate` is called when a file is complete, on the thread that appends. `on_write_error` is called after a
        failed write, on any thread. `on_write_error` must free disk space, after which the write is tried once more; or
        raise the error, if its cause is not a lack of space.

        Raises: HistoryError if the folder cannot be created or read, or its last file cannot be continued
        """
        self.folder = folder
        self._on_rotate = on_rotate
        self._on_write_error = on_write_error
        self._file = -1
        self._file_lock = Lock()
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._append_lock = Lock()
        self.appended_bytes = 0
        """Bytes of the events appended so far."""
        self._next_event = 1
        self._last_run = 0
        self._has_restored = False
        """True if the files lacked chunks that the store has."""
        self._is_cut = False
        """True if the files lack events of the log before those that they would get next."""
        self.last_batch_chunk: tuple[int, int] | None = None
        """Position (run, first event) of the last chunk in the newest file that was written with a batch; None if there
        is none. If the journal does not have that batch, the end of the journal is lost."""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            files = history_files(folder)
            if files:
                self._continue_file(files[-1])
        except OSError as error:
            raise HistoryError(f"cannot open the history in {folder}: {error}; check the disk") from error

    def restore(self, histories: Iterable[bytes]) -> None:
        """Append the chunks of the store's batches that the files lack, because a crash has prevented their writing.
        If there are no files, as after a restore without history, a new history begins with the next chunk that starts
        a file: an audit would take what is missing for lost messages.

        Raises: HistoryError if they cannot be written
        """
        for one, chunk in self._lacking(histories):
            if self._file >= 0 or chunk.flags & STARTS_FILE:
                self.append(one)
            self._note_chunk(chunk)
            self._has_restored = True

    def follow(self, history: bytes) -> None:
        """Append the chunks of a row of the log that the files lack. If the files lack events before a chunk, a new
        history begins with the next chunk that starts a file: an audit would take what is missing for lost messages.

        Raises: HistoryError if the chunks cannot be written
        """
        for one, chunk in self._lacking((history,)):
            starts_file = bool(chunk.flags & STARTS_FILE)
            lacks_events = chunk.run == self._last_run and chunk.first_event > self._next_event
            self._is_cut = self._is_cut or lacks_events or (self._file < 0 and not starts_file)
            if self._is_cut and starts_file:
                self._set_aside()
            if not self._is_cut:
                self.append(one)
            self._note_chunk(chunk)
            # No event before this chunk can be missing, whatever a crash took from the files.
            self._has_restored = False

    def _lacking(self, histories: Iterable[bytes]) -> Iterator[tuple[bytes, HistoryChunk]]:
        """Yield those chunks that the files lack."""
        for one in chain.from_iterable(map(chunks_in, histories)):
            chunk = chunk_at(memoryview(one), 0)
            if chunk is not None and chunk.first_event >= self._next_event:
                yield one, chunk

    def start_run(self, *, after_clean_stop: bool, lowest: tuple[int, int] = (1, 1)) -> tuple[int, int]:
        """Return the number of the new run, and that of its first event. After an unclean stop GAP_EVENTS numbers of
        events are left out. So no number of a lost event is used again, and a reader sees the gap.

        `lowest` is the lowest run and the lowest event that may be used, as a log says."""
        if self._is_cut:
            self._set_aside()
        run = max(self._last_run + 1, lowest[0])
        self._next_event = max(self._next_event, lowest[1])
        if run > 1 and (self._has_restored or not after_clean_stop):
            self._next_event += GAP_EVENTS
        return run, self._next_event

    def _set_aside(self) -> None:
        """Keep the files in another folder, and begin with none. Raises: HistoryError if the disk fails"""
        self._is_cut = False
        if self._file < 0:
            return
        aside = self.folder.with_name(f"aside-history-{self._next_event}")
        logger.warning("a new history begins, the old one is kept", extra={"kept": str(aside)})
        try:
            self.close()
            self.folder.rename(aside)
            self.folder.mkdir(mode=0o700)
        except OSError as error:
            raise self._failure(error) from error

    def append(self, history: bytes) -> None:
        """Append chunks that are one behind the other, each as `EventLog.close_chunk` returns it. The chunks are in the
        file after `flush`, and durable after `sync`.

        Raises: HistoryError if the disk fails
        """
        try:
            with self._append_lock:
                for chunk in chunks_in(history):
                    self._append(chunk)
        except OSError as error:
            raise self._failure(error) from error

    def _append(self, chunk: bytes) -> None:
        whole = chunk_at(memoryview(chunk), 0) if self._file < 0 or chunk[_FLAGS_AT] & STARTS_FILE else None
        if whole is not None:
            self._write()
            self._start_file(whole)
        self._unwritten.append(chunk)
        self._unwritten_bytes += len(chunk)
        self.appended_bytes += len(chunk)
        if self._unwritten_bytes >= UNWRITTEN_BYTES_MAX:
            self._write()

    def flush(self) -> None:
        """Write all appended chunks to the file, so that others can read them.

        Raises: HistoryError if the disk fails
        """
        try:
            with self._append_lock:
                self._write()
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Write all appended chunks, and make them durable.

        Raises: OSError if the disk fails
        """
        with self._append_lock:
            self._write()
        # The thread that appends does not have to wait for the disk.
        with self._file_lock:
            if self._file >= 0:
                os.fdatasync(self._file)

    def close(self) -> None:
        """Write all appended chunks, make them durable, and close the file.

        Raises: OSError if the disk fails
        """
        with self._append_lock, self._file_lock:
            self._write()
            if self._file >= 0:
                os.fdatasync(self._file)
                os.close(self._file)
            self._file = -1

    def _write(self) -> None:
        if self._unwritten:
            content = b"".join(self._unwritten)
            self._unwritten.clear()
            self._unwritten_bytes = 0
            self._write_to(self._file, content)

    def _write_to(self, file: int, content: bytes) -> None:
        written = 0
        while written < len(content):
            # Bytes that a full disk has taken are not written again.
            rest = content[written:] if written else content
            written += self._with_retry(partial(os.write, file, rest))

    def _with_retry(self, action: Callable[[], int]) -> int:
        try:
            return action()
        except OSError as error:
            if self._on_write_error is None:
                raise
            self._on_write_error(error)
        return action()

    def _failure(self, error: OSError) -> HistoryError:
        return HistoryError(
            f"cannot write the history in {self.folder}: {error}; free disk space or check the disk, then start the "
            "broker again (--no-history runs it without history)"
        )

    def _continue_file(self, path: Path) -> None:
        """Open the file that an earlier run has written. An incomplete chunk at its end, left by a crash, is cut
        off."""
        end = FILE.size
        for chunk in chunks_of_file(path):
            self._note_chunk(chunk)
            end = chunk.end
        if end == FILE.size:
            # Not even the first chunk is whole: the file before this one is the last.
            path.unlink()
            files = history_files(self.folder)
            if files:
                self._continue_file(files[-1])
            return
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)

    def _note_chunk(self, chunk: HistoryChunk) -> None:
        self._next_event = chunk.first_event + count_events(chunk)
        self._last_run = chunk.run
        if chunk.flags & FROM_BATCH:
            self.last_batch_chunk = chunk.run, chunk.first_event

    def _start_file(self, chunk: HistoryChunk) -> None:
        path = file_path(self.folder, chunk.first_event)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = self._with_retry(partial(os.open, path, flags, 0o600))
        self._write_to(file, FILE.pack(MAGIC, HISTORY_VERSION, chunk.run))
        with self._file_lock:
            old, self._file = self._file, file
            if old >= 0:
                os.fdatasync(old)
                os.close(old)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        if old >= 0 and self._on_rotate is not None:
            self._on_rotate()


_FLAGS_AT = 12
