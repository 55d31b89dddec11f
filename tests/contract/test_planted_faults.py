"""Tests that the crash tests notice every planted fault of the store.

A test that never fails may be one that sees nothing. Every fault of planted_faults.py must be caught.
"""

import errno
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract import planted_faults
from tests.contract.crashing import Held, Tried, crash_everywhere, fail_everywhere, live
from tests.contract.recorded_runs import needs_compiler, run_recorded
from tests.contract.simulated_disk import Disk, quick_folder

Fault = Callable[[pytest.MonkeyPatch], None]


def name_of(fault: Fault) -> str:
    return fault.__name__


@pytest.fixture(autouse=True)
def _leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A crash test keeps the disk on which it fails; here it is meant to."""
    with tempfile.TemporaryDirectory(dir=quick_folder()) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


def test_planting_finds_the_targets_of_each_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants every fault, also the ones that are not drawn, and runs none."""
    faults = [
        *planted_faults.of_a_crash(),
        *planted_faults.OF_A_FAILING_DISK,
        *planted_faults.OF_A_CUT,
        *planted_faults.OF_LMDB,
    ]
    for plant in faults:
        with monkeypatch.context() as patch:
            plant(patch)


@pytest.mark.drawn
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", planted_faults.of_a_crash(), ids=name_of)
def test_a_crash_shows_that(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    tried = Tried()
    with pytest.raises(AssertionError):
        for seed in range(
            6, 100
        ):  # Causes of one message come twice at once in the life of 6, in those before it seldom.
            rng = random.Random(seed)
            life, _ = live(Disk(), [Held()], rng, 25)
            crash_everywhere(life, rng, tried, at_most=4, share=0.5)


@pytest.mark.drawn
@pytest.mark.parametrize("plant", planted_faults.OF_A_FAILING_DISK, ids=name_of)
def test_a_failing_disk_shows_that(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(10):
            fail_everywhere(errno.EIO, seed, Tried(), batches=12)


@pytest.mark.drawn
@pytest.mark.parametrize("plant", planted_faults.OF_A_CUT, ids=name_of)
def test_a_cut_journal_shows_that(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with tempfile.TemporaryDirectory(dir=quick_folder()) as folder, pytest.raises(AssertionError):
        planted_faults.OF_A_CUT[plant](Path(folder) / "data")


@pytest.mark.drawn
@needs_compiler
@pytest.mark.parametrize("plant", planted_faults.OF_LMDB, ids=name_of)
def test_a_crash_in_lmdb_shows_that(plant: Fault) -> None:
    done = run_recorded("try_crashes", 20000, 1, plant.__name__)
    # LMDB reads a file that is cut short through the system's memory, which ends a process.
    assert done.returncode != 0
    assert "AssertionError" in done.stderr or "Fatal Python error" in done.stderr
