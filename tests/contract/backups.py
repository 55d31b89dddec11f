"""Backups of a store that gets random batches meanwhile, and the states that they must have."""

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from unittest import mock

from tests.contract.crashing import Held, batch_of, open_store, random_changes
from truenext.store import held_state
from truenext.store import restore as restoring
from truenext.store.backup import BackupWriter, Pace, new_backup_folder
from truenext.store.embedded import EmbeddedStore
from truenext.store.restore import Restored, restore

PIECE = 1000
"""Bytes that these backups read at once, so that batches come in between."""


def back_up(store: EmbeddedStore, folder: Path, wait: Callable[[], object] = lambda: None) -> Path:
    """Make a backup, and call `wait` after each piece."""
    with (
        closing(store.hold_state(lambda: None)[0]) as state,
        new_backup_folder(folder) as path,
        closing(state.files()) as files,
    ):
        writer = BackupWriter(
            path, Pace(1 << 50, Event()), check_space=lambda: None, on_written=lambda _: (wait(), None)[1]
        )
        writer.write(files)
        writer.finish(identity=state.identity, batch=state.batch, made="now", has_history=False, has_users=False)
    return path


def restored(backup: Path, new: Path) -> Restored:
    """Restore a backup whose records are no messages of a broker."""
    with mock.patch.object(restoring, "verify_record", lambda key, record: None):
        return restore(backup, new, lambda done, total: None, lambda _: None)


class BusyStore:
    """Store in a folder, with a model of its state after each batch."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self.store = open_store(folder)
        self._model = Held()
        self._number = 0
        self.models: dict[int, Held] = {}
        """Models by the number of the batch over all runs."""
        self.store.recover()
        self._is_first = True

    def apply(self) -> None:
        changes = (
            self._model.changes({}, [], clean_stop=False) if self._is_first else random_changes(self._model, self._rng)
        )
        self._is_first = False
        self._number += 1
        self._model.apply(changes)
        # Before the batch is durable: a backup may have it at once.
        self.models[self.store._journal.last_frame_number + 1] = self._model.copy()
        self.store.apply(batch_of(self._number, changes))

    def check(self, backup: Path, new: Path) -> int:
        """Check that a backup is the state of exactly its batch, and return the number of this batch.

        Raises: AssertionError, StoreError if it is not
        """
        result = restored(backup, new)
        model = self.models[result.manifest.batch].copy()
        model.restart()
        with closing(open_store(new)) as store:
            found = store.recover()
            assert found.identity == result.identity != result.manifest.identity
            model.check_all(store, found, 1 << 30)
            # The next batch follows it.
            assert store._journal.last_frame_number >= result.manifest.batch
            store.apply(batch_of(1, model.changes({}, [], clean_stop=True)))
        return result.manifest.batch


def try_backups(folder: Path, seed: int, count: int) -> list[int]:
    """Make `count` backups of a store while it is given batches, check each, and return the numbers of their batches.

    Raises: AssertionError, StoreError if one is not the state of its batch
    """
    rng = random.Random(seed)
    pauses = random.Random(f"pauses {seed}")
    (folder / "backups").mkdir()
    busy = BusyStore(folder / "data", rng)
    busy.apply()
    made: list[Path] = []
    failures: list[BaseException] = []

    def make() -> None:
        try:
            for _ in range(count):
                made.append(back_up(busy.store, folder / "backups", lambda: time.sleep(pauses.choice((0, 0, 0.0005)))))
                time.sleep(pauses.random() * 0.005)
        except BaseException as error:
            failures.append(error)

    with mock.patch.object(held_state, "COPY_BYTES", PIECE), closing(busy.store):
        thread = Thread(target=make)
        thread.start()
        while thread.is_alive():
            busy.apply()
        thread.join()
    if failures:
        raise failures[0]
    return [busy.check(backup, folder / f"restored {number}") for number, backup in enumerate(made)]
