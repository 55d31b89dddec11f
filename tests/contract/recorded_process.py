"""Process of a store whose calls are recorded; recorded_calls.py starts it.

    LD_PRELOAD=recorded_calls.so python -m tests.contract.recorded_process JOBS [FAULT]

JOBS is a file with a list of jobs; the process replaces it by their results.
"""

import ctypes
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truenext.errors import StoreError
from truenext.model.batch import Batch
from truenext.store.embedded import EmbeddedStore

STARTED, CONFIRMED, HISTORY_SYNCED = 1, 2, 3


def main(jobs: Path, fault: str) -> None:
    logging.disable()
    if fault:
        # Only here, as pytest takes its time.
        import pytest

        from tests.contract import planted_faults

        getattr(planted_faults, fault)(pytest.MonkeyPatch())
    recorded = ctypes.CDLL(None)
    recorded.crash_begin.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_double,
    ]
    recorded.crash_mark.argtypes = [ctypes.c_int, ctypes.c_long]
    recorded.crash_end.restype = ctypes.c_long
    outcomes = []
    for folder, log, segment_bytes, history_chunks, batches, failure in pickle.loads(jobs.read_bytes()):
        call, lasts, error, share = failure or (0, 0, 0, 0.0)
        recorded.crash_begin(bytes(folder), bytes(log), b"lmdb", call, lasts, error, share)
        store_error = live(folder, segment_bytes, history_chunks, batches, recorded.crash_mark)
        outcomes.append((recorded.crash_end(), store_error))
    jobs.write_bytes(pickle.dumps(outcomes))


def live(
    folder: Path,
    segment_bytes: int,
    history_chunks: int,
    batches: list[dict[str, Any]],
    mark: Callable[[int, int], None],
) -> str:
    """Run the batches; return the error with which the store stopped, or an empty text."""
    try:
        store = EmbeddedStore(folder, segment_bytes=segment_bytes, segments_max=1)
    except StoreError as error:
        return str(error)
    store.sync_history = lambda: mark(HISTORY_SYNCED, history_chunks)
    try:
        mark(STARTED, 0)
        store.recover()
        mark(CONFIRMED, 0)
        for number, changes in enumerate(batches, 1):
            batch = Batch(number)
            for name, value in changes.items():
                setattr(batch, name, value)
            mark(STARTED, number)
            store.apply(batch)
            mark(CONFIRMED, number)
            history_chunks += bool(batch.history)
    except StoreError as error:
        for number in (1000, 1001):
            try:
                store.apply(Batch(number))
            except StoreError:
                continue
            raise AssertionError("a batch was confirmed behind one that failed") from error
        return str(error)
    finally:
        store.close()
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
