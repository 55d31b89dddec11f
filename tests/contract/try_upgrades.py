"""Power cuts of a recorded store that upgrades its folder, LMDB's calls included, in a process of its own.

    python -m tests.contract.try_upgrades STATES SEED

Prints the number of disk states tried, and the number of those whose upgrade had begun and not ended; ends with 1 and
the reason if a disk did not hold what it must.
"""

import faulthandler
import logging
import random
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.contract.crashing import Held, Tried, crash_again, folder_for, live
from tests.contract.made_formats import FIRST_STEP, LAST_STEP, format_of, make_earlier, read_made_formats
from tests.contract.recorded_calls import plan, record
from tests.contract.simulated_disk import Disk
from truenext.store.checkpoint_format import UNFINISHED
from truenext.store.upgrade import upgrade

PIECE_ENTRIES = 2
"""So few that an upgrade has many transactions."""


def earlier_disk(seed: int, format_number: int) -> tuple[Disk, list[Held]]:
    """Return a disk with a folder of an earlier format, which was used for some time, and what the folder holds."""
    used, may_hold = used_disk(seed)
    with folder_for(used) as folder:
        make_earlier(folder, format_number)
        return disk_of(folder, used), may_hold


@cache
def used_disk(seed: int) -> tuple[Disk, list[Held]]:
    """Return a disk with a folder of this format, which was used for some time, and what the folder holds."""
    rng = random.Random(seed)
    life, _ = live(Disk(), [Held()], rng, 30)
    walk, may_hold = life.at(len(life.operations))
    return walk.killed(rng), may_hold


def disk_of(folder: Path, disk: Disk) -> Disk:
    """Return a disk with the files of the folder, all durable, and the history of `disk`."""
    names: dict[str, int | None] = {"lmdb": 0, "journal": 0}
    files = {}
    for number, path in enumerate(sorted(folder.glob("*/*")), 1):
        if path.name != "lock.mdb":
            names[str(path.relative_to(folder))] = number
            files[number] = path.read_bytes()
    return Disk(files, names, history_chunks=disk.shown().history_chunks)


def plant(patch: pytest.MonkeyPatch) -> None:
    read_made_formats(patch)
    patch.setattr(upgrade, "PIECE_ENTRIES", PIECE_ENTRIES)


def try_upgrades(states: int, seed: int) -> tuple[int, int]:
    tried, unfinished = Tried(), 0
    number = 0
    while True:
        number += 1
        rng = random.Random(f"{seed} {number}")
        disk, may_hold = earlier_disk(number, rng.choice([LAST_STEP.source, FIRST_STEP.source]))
        ((life, _),) = record([plan(disk, may_hold, rng, 1, 0)], [None], "_made_formats_are_read")
        for walk, held in life.walk():
            for cut in walk.states(rng, 2):
                if tried.states >= states:
                    return tried.states, unfinished
                if tried.is_new(cut, held):
                    unfinished += _is_unfinished(cut)
                    crash_again(cut, held, rng, tried)


def _is_unfinished(disk: Disk) -> bool:
    with folder_for(disk) as folder:
        return bool(format_of(folder) & UNFINISHED)


def main() -> None:
    faulthandler.enable()
    logging.disable()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        print(*try_upgrades(int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
