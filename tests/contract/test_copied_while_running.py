"""Tests of copies of a data folder whose broker runs: an atomic snapshot is a crash, and a copy file by file is refused
or found damaged, unless it happens to be the state of one moment.

    TRUENEXT_COPIES=10000 TRUENEXT_SEED=7 pytest -s tests/contract/test_copied_while_running.py       a long run
"""

import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.contract.crashing import Held, folder_for, live, open_store
from tests.contract.simulated_disk import PAGE, Disk, Walk
from truenext.errors import StoreError
from truenext.store.check import check

COPIES = int(os.environ.get("TRUENEXT_COPIES", "60"))
SEED = int(os.environ.get("TRUENEXT_SEED", "1"))
COPIES_OF_LIFE = 10

RIGHT, REFUSED, DAMAGED, WRONG = "state of a batch", "refused", "found damaged", "wrong"


class Moments:
    """Contents of the files at each moment of a run, as a program that copies them reads them."""

    def __init__(self, rng: random.Random) -> None:
        life, _ = live(Disk(), [Held()], rng, 25, growth=rng.choice([0, 0.8]))
        self.models = [*life.found, *life.models]
        self._contents = []
        walk = Walk(life.disk)
        for operation in life.operations:
            walk.do(operation)
            self._contents.append(walk.killed(random.Random(0)).shown().contents())

    def copied_one_by_one(self, rng: random.Random) -> Disk:
        """Return a disk with a copy that reads one page after the other, while the broker goes on."""
        moment = rng.randrange(len(self._contents) // 2, len(self._contents))
        pages_at_once = rng.choice([1, 1, 4, 1000])
        copied = Disk()
        names = [name for name, content in self._contents[moment].items() if content is not None]
        rng.shuffle(names)
        copied.names = {name: 0 for name in self._contents[moment] if name not in names}
        for number, name in enumerate(names, 1):
            content, at = b"", 0
            # A file that was renamed or removed meanwhile is missing in the copy, or read to its end all the same.
            while (now := self._contents[moment].get(name)) is not None and at < len(now):
                content = content.ljust(at, b"\0") + now[at : at + pages_at_once * PAGE]
                at += pages_at_once * PAGE
                moment = min(moment + rng.choice([0, 0, 1, 1, 5]), len(self._contents) - 1)
            copied.names[name] = number
            copied.files[number] = content
        return copied


def outcome(copied: Disk, models: list[Held]) -> str:
    """Try to start on a copy, in a process that LMDB may end, and check it if it starts with what no batch has left."""
    with folder_for(copied) as folder:
        child = os.fork()
        if not child:
            status = 3
            try:
                status = _started(folder, models)
            finally:
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended != 1:
            return RIGHT if ended == 0 else REFUSED
    with folder_for(copied) as folder, pytest.MonkeyPatch.context() as patch:
        # The records of the model are no records of messages, and its queues have no names.
        patch.setattr("truenext.store.salvage.folder.find_record_damage", lambda *_: "")
        found: list[str] = []
        try:
            check(folder, lambda damage: found.append(str(damage)), lambda *_: None)
        except StoreError as error:
            found.append(str(error))
        return DAMAGED if any(not re.search("the name of queue . is lost", each) for each in found) else WRONG


def _started(folder: Path, models: list[Held]) -> int:
    """Return 0 if a store that starts on the folder has the state of one batch, 1 if not, 2 if it does not start."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        store = open_store(folder)
        recovered = store.recover()
    except StoreError:
        return 2
    for model in models:
        shown = model.copy()
        shown.restart()
        try:
            shown.check_all(store, recovered, len(shown.history))
        except StoreError:
            return 2
        except AssertionError:
            continue
        return 0
    return 1


@pytest.mark.timeout(300 + COPIES // 10)
def test_copy_of_a_running_folder_file_by_file_is_never_silently_wrong() -> None:
    print(f"TRUENEXT_SEED={SEED}")
    outcomes: Counter[str] = Counter()
    life_number = 0
    while outcomes.total() < COPIES:
        rng = random.Random(f"{SEED} {life_number}")
        life_number += 1
        moments = Moments(rng)
        for _ in range(COPIES_OF_LIFE):
            outcomes[outcome(moments.copied_one_by_one(rng), moments.models)] += 1
    print(dict(outcomes))
    assert not outcomes[WRONG], outcomes
    assert outcomes[REFUSED]
