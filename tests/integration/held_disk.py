"""A broker whose disk can be held and broken from outside: what is seen while a commit is in flight?

    python held_disk.py HOLD BREAK serve ...

is `truenext serve ...`, but no batch is written while the file HOLD exists, and writing fails while BREAK exists. The
journal's segments are small, so that whatever a test does, messages move into the checkpoint meanwhile.
"""

import sys
import time
from pathlib import Path
from unittest import mock

from truenext.batch import Batch
from truenext.broker import committer
from truenext.cli import main, serve
from truenext.errors import StoreError
from truenext.store.embedded import EmbeddedStore

HOLD = Path(sys.argv[1])
BREAK = Path(sys.argv[2])


class HeldStore(EmbeddedStore):
    def __init__(self, path: Path, *, disk_limit: int | None) -> None:
        super().__init__(path, disk_limit=disk_limit, segment_bytes=64 * 1024, segments_max=2)

    def apply(self, batch: Batch) -> None:
        while HOLD.exists():
            time.sleep(0.0005)
        if BREAK.exists():
            raise StoreError("cannot write to the store: the disk was broken by a test")
        super().apply(batch)


if __name__ == "__main__":
    # Nothing is written by the event loop: it has to go on while the disk is held.
    with (
        mock.patch.object(serve, "EmbeddedStore", HeldStore),
        mock.patch.object(committer, "WRITE_AT_ONCE_SECONDS_MAX", -1),
    ):
        main.main(sys.argv[3:])
