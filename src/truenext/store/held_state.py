"""Held state: what a store has after one batch, kept readable while later batches are written.

    checkpoint     a read transaction of LMDB, whose pages are not used again; so the file may grow meanwhile
    journal        open segments, which are deleted when they are freed, and not used again

Both are of one moment, at which no batch is half applied. Source: docs/decisions/0101-a-backup-of-one-batch.md
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from threading import Thread

import lmdb

from truenext.store.checkpoint import Checkpoint
from truenext.store.checkpoint_format import DATA_FILE
from truenext.store.journal import Journal, JournalEnd

COPY_BYTES = 256 * 1024
"""Number of bytes that are read at once."""

_ZEROS = bytes(COPY_BYTES)


class HeldState:
    """State of one store after batch `end.frame`. Call `close` when it was copied."""

    def __init__(
        self, checkpoint: Checkpoint, snapshot: lmdb.Transaction[bytes], journal: Journal, end: JournalEnd
    ) -> None:
        """The caller holds the lock under which batches are applied. `end` is the end of the last applied batch, which
        the checkpoint in `snapshot` does not exceed."""
        self._checkpoint = checkpoint
        self._snapshot = snapshot
        self._journal = journal
        self._end = end
        self.identity = checkpoint.identity(snapshot)
        """Identity of the store."""
        first = checkpoint.position(snapshot).segment + 1
        # Behind a checkpointed segment there is always another one, maybe without frames.
        self._file_size = checkpoint.file_size()
        self._segments = journal.hold(first, max(end.segment, first))

    @property
    def batch(self) -> int:
        """Number of the last batch, over all runs."""
        return self._end.frame

    def size(self) -> int:
        """Return about how many bytes `files` yields."""
        return self._checkpoint.size() + sum(os.fstat(file).st_size for file in self._segments.values())

    def growth(self) -> int:
        """Return by how many bytes the checkpoint's file has grown since the state is held."""
        return max(0, self._checkpoint.file_size() - self._file_size)

    def files(self) -> Generator[tuple[str, Iterator[bytes]], None, None]:
        """Yield name and content of each file of a data folder with this state. Read each content to its end before the
        next one. The journal comes first, and is held no longer then."""
        for segment, file in self._segments.items():
            used = os.fstat(file).st_size if segment < self._end.segment else 0
            if segment == self._end.segment:
                used = self._end.offset
            yield f"journal/{segment:016x}.journal", _segment_content(file, used)
        self._segments = {}
        self._journal.release()
        with closing(self._checkpoint_content()) as content:
            yield f"lmdb/{DATA_FILE}", content

    def close(self) -> None:
        self._segments = {}
        self._journal.release()
        self._snapshot.abort()

    def _checkpoint_content(self) -> Generator[bytes, None, None]:
        """Yield the checkpoint's data file. LMDB writes it into a pipe, on a thread of its own: the reader of the pipe
        sets the pace."""
        reader, writer = os.pipe()
        failure: list[BaseException] = []
        thread = Thread(target=self._write_checkpoint, args=(writer, failure), name="truenext-backup-checkpoint")
        thread.start()
        try:
            while chunk := os.read(reader, COPY_BYTES):
                yield chunk
        finally:
            # The writer then gets an error, if it has not finished.
            os.close(reader)
            thread.join()
        if failure:
            raise failure[0]

    def _write_checkpoint(self, writer: int, failure: list[BaseException]) -> None:
        try:
            self._checkpoint.write_copy(self._snapshot, writer)
        except lmdb.Error as error:
            failure.append(error)
        finally:
            os.close(writer)


def _segment_content(file: int, used: int) -> Iterator[bytes]:
    """Yield the first `used` bytes of a segment, and zeros up to its size."""
    size = os.fstat(file).st_size
    for offset in range(0, used, COPY_BYTES):
        yield os.pread(file, min(COPY_BYTES, used - offset), offset)
    for offset in range(used, size, COPY_BYTES):
        yield _ZEROS[: size - offset]
