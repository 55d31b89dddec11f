"""HistoryWriter: writes history to a file that grows chunk by chunk, and from time to time to a new one.

    history/0000000000000001.history     named by its first event; events.py has its bytes

Appended chunks survive a crash of the broker once they are flushed, and one of the machine once they are synced.
Until then the store's journal has what must not be lost; `restore` brings it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Lock

from truenext.errors import HistoryError
from truenext.history.files import HistoryChunk, chunk_at, chunks_of_file, count_events, file_path, history_files
from truenext.model.events import FILE, FROM_BATCH, GAP_EVENTS, HISTORY_VERSION, MAGIC, STARTS_FILE

UNWRITTEN_BYTES_MAX = 64 * 1024
"""Bytes of appended chunks that are written without `flush`."""


class HistoryWriter:
    """Writer of one history folder. `append` is for one thread, `flush` and `sync` for any."""

    def __init__(
        self,
        folder: Path,
        *,
        on_rotate: Callable[[], None] | None = None,
        on_write_error: Callable[[OSError], None] | None = None,
    ) -> None:
        """`on_rotate` is called, on the thread that appends, for every file that will not grow any more.
        `on_write_error` is called, on any thread, after a failed write, to free disk space; the write is then
        repeated once. It raises the error that it gets if that is no lack of space.

        Raises: HistoryError if the folder cannot be used.
        """
        self._folder = folder
        self._on_rotate = on_rotate
        self._on_write_error = on_write_error
        self._file = -1
        self._file_lock = Lock()
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._append_lock = Lock()
        self._next_event = 1
        self._last_run = 0
        self.last_batch_chunk: tuple[int, int] | None = None
        """Run and first event of the last chunk of a batch in the newest file, None if that file has none. The store
        must have that batch."""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            files = history_files(folder)
            if files:
                self._continue_file(files[-1])
        except OSError as error:
            raise HistoryError(f"cannot open the history in {folder}: {error}; check the disk") from error

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Append chunks that the store has and the files lack: they were not synced before the machine went down.

        Raises: HistoryError
        """
        for one in chunks:
            chunk = chunk_at(memoryview(one), 0)
            if chunk is not None and chunk.first_event >= self._next_event:
                self.append(one)
                self._note_chunk(chunk)

    def start_run(self, *, after_clean_stop: bool) -> tuple[int, int]:
        """Return the numbers of the new run and of its first event. After an unclean stop numbers are left out, so
        that no lost number is used again, and a reader sees the gap."""
        if self._last_run and not after_clean_stop:
            self._next_event += GAP_EVENTS
        return self._last_run + 1, self._next_event

    def append(self, chunk: bytes) -> None:
        """Append a chunk of `EventLog.close_chunk`. It is in the file after `flush`, and durable after `sync`.

        Raises: HistoryError
        """
        if not chunk:
            return
        try:
            with self._append_lock:
                whole = chunk_at(memoryview(chunk), 0) if self._file < 0 or _starts_file(chunk) else None
                if whole is not None:
                    self._write()
                    self._start_file(whole)
                self._unwritten.append(chunk)
                self._unwritten_bytes += len(chunk)
                if self._unwritten_bytes >= UNWRITTEN_BYTES_MAX:
                    self._write()
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Write everything appended before to the file, where it can then be read.
        Raises: HistoryError
        """
        try:
            with self._append_lock:
                self._write()
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Make everything appended before durable.
        Raises: OSError
        """
        with self._append_lock:
            self._write()
        # The thread that appends does not have to wait for the disk.
        with self._file_lock:
            if self._file >= 0:
                os.fdatasync(self._file)

    def close(self) -> None:
        """Write, sync and close the file.
        Raises: OSError
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
            f"cannot write the history in {self._folder}: {error}; free disk space or check the disk, then start the "
            "broker again (--no-history runs it without history)"
        )

    def _continue_file(self, path: Path) -> None:
        """Cut off what a crash left of a chunk, and continue the file."""
        end = FILE.size
        for chunk in chunks_of_file(path):
            self._note_chunk(chunk)
            end = chunk.end
        if end == FILE.size:
            # Not even the first chunk is whole: the file before this one is the last.
            path.unlink()
            files = history_files(self._folder)
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
        path = file_path(self._folder, chunk.first_event)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = self._with_retry(partial(os.open, path, flags, 0o600))
        self._write_to(file, FILE.pack(MAGIC, HISTORY_VERSION, chunk.run))
        with self._file_lock:
            old, self._file = self._file, file
            if old >= 0:
                os.fdatasync(old)
                os.close(old)
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        if old >= 0 and self._on_rotate is not None:
            self._on_rotate()


def _starts_file(chunk: bytes) -> bool:
    return bool(chunk[_FLAGS_AT] & STARTS_FILE)


_FLAGS_AT = 12
