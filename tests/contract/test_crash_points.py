"""Tests that the embedded store keeps every confirmed batch after power cuts and kills at any point.

    TRUENEXT_CRASHES=100000 TRUENEXT_SEED=7 pytest -s tests/contract/test_crash_points.py       a long run: make crash

The simulation is in simulated_disk.py, what must hold in crashing.py; LMDB's own writes are cut in try_crashes.py.
planted_faults.py has the faults that these tests must notice.
"""

import os
import random
import sys
from collections.abc import Iterator
from inspect import getsourcefile
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import truenext.store
from tests.contract.crashing import Held, Tried, crash_everywhere, live
from tests.contract.recorded_runs import needs_compiler, run_recorded
from tests.contract.simulated_disk import SECTOR, Disk, Durable, Name, Recorder, Walk, Write
from truenext.store import (
    changes,
    checkpoint,
    checkpoint_format,
    checkpointer,
    checksummed,
    disk_space,
    embedded,
    folder,
    frame,
    frame_writer,
    journal,
    message_tables,
    overlay,
    spans,
)

MODULES = (
    changes,
    checkpoint,
    checkpoint_format,
    embedded,
    folder,
    frame_writer,
    frame,
    journal,
    message_tables,
    checkpointer,
    overlay,
    disk_space,
    checksummed,
    spans,
)

CRASHES = int(os.environ.get("TRUENEXT_CRASHES", "300"))
SEED = int(os.environ.get("TRUENEXT_SEED", "1"))

AT_MOST, SHARE = (4, 0.3) if CRASHES < 10_000 else (256, 1)
"""States at each operation, and the share of operations: in a short run rather few of many lives."""


def report(tried: int, across_growth: int) -> None:
    print(f"\ntried {tried} states of a disk after a crash, {across_growth} of them while a file was about to grow")


# The store


@pytest.mark.timeout(300 + CRASHES // 20)
def test_confirmed_batches_survive_a_power_cut_at_any_operation() -> None:
    tried = Tried()
    life = 0
    while tried.states < CRASHES // 2:
        rng = random.Random(f"{SEED} {life}")
        one, _ = live(Disk(), [Held()], rng, 25, growth=rng.choice([0, 0, 0.8]))
        crash_everywhere(one, rng, tried, at_most=AT_MOST, share=SHARE, states_max=CRASHES // 2)
        life += 1
    report(tried.states, tried.across_growth)


@pytest.fixture
def _threads_change_often() -> Iterator[None]:
    """Switch threads often, so that races between the store's two threads show."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("_threads_change_often")
@pytest.mark.parametrize("seed", range(8))
def test_confirmed_batches_survive_repeated_power_cuts_even_during_recovery(seed: int) -> None:
    rng = random.Random(f"{SEED} {seed}")
    disk, may_hold = Disk(), [Held()]
    for _ in range(20):
        life, _ = live(disk, may_hold, rng, rng.choice([0, 1, 3, 15]))
        walk, may_hold = life.at(rng.randint(0, len(life.operations)))
        disk = rng.choice([*walk.states(rng, 4), walk.killed(rng)])


@needs_compiler
@pytest.mark.alternates("disks that fail")
@pytest.mark.timeout(300 + CRASHES // 20)
def test_confirmed_batches_survive_power_cuts_and_failing_calls_within_lmdb() -> None:
    """Calls of LMDB fail as well, one after the other."""
    done = run_recorded("try_crashes", CRASHES // 2, SEED)
    assert done.returncode == 0, done.stderr
    tried, across_growth = map(int, done.stdout.split())
    assert tried >= CRASHES // 2
    assert across_growth > tried // 50
    report(tried, across_growth)


# What is tested


def test_recorder_leaves_the_shipped_store_unchanged(tmp_path: Path) -> None:
    before = {module: dict(functions(module)) for module in MODULES}
    recorder = Recorder(Disk(), tmp_path)
    with recorder.recording():
        assert {module: dict(functions(module)) for module in MODULES} == before
        assert embedded.EmbeddedStore.__module__ == "truenext.store.embedded"
    (shipped,) = truenext.store.__path__
    for module in MODULES:
        assert Path(getsourcefile(module) or "").parent == Path(shipped)


def functions(module: ModuleType) -> dict[str, object]:
    """Return the functions of the module, and those of its classes."""
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType):
            found[name] = value
        elif isinstance(value, type):
            found |= {f"{name}.{one}": method for one, method in vars(value).items()}
    return found


def test_an_operation_that_the_disk_does_not_know_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with Recorder(Disk(), tmp_path).recording():
        file = os.open(tmp_path / "journal/new", os.O_RDWR | os.O_CREAT)
        with pytest.raises(AssertionError, match=r"ftruncate of .*journal/new"):
            os.ftruncate(file, 5)
        os.close(file)


# The disk


def states(walk: Walk) -> list[dict[str, bytes | None]]:
    found = [disk.contents() for disk in walk.states(random.Random(1), 256)]
    return [one for n, one in enumerate(found) if one not in found[:n]]


def with_a_file(size: int) -> Walk:
    return Walk(Disk({1: bytes(size)}, {"journal": 0, "journal/a": 1}))


def test_unsynced_write_may_leave_any_subset_of_its_sectors() -> None:
    walk = with_a_file(3 * SECTOR)
    walk.do(Write(1, 500, b"x" * 600))
    parts = [b"x" * 12, b"x" * SECTOR, b"x" * 76]
    expected = []
    for number in range(8):
        first, second, third = (part if number >> n & 1 else bytes(len(part)) for n, part in enumerate(parts))
        expected.append(bytes(500) + first + second + third + bytes(436))
    assert sorted(one["journal/a"] or b"" for one in states(walk)) == sorted(expected)


def test_synced_write_persists_whatever_happens_to_writes_before_and_after_it() -> None:
    walk = with_a_file(SECTOR)
    walk.do(Write(1, 0, b"aaaa"))
    walk.do(Write(1, 2, b"bb"))
    walk.do(Durable(frozenset({1})))
    walk.do(Write(1, 3, b"c"))
    found = sorted((one["journal/a"] or b"")[:4] for one in states(walk))
    assert found == [b"\0\0bb", b"\0\0bc", b"aabb", b"aabc"]


def test_file_may_have_grown_without_the_written_data() -> None:
    walk = with_a_file(2)
    walk.do(Write(1, 2, b"xx"))
    assert sorted(one["journal/a"] or b"" for one in states(walk)) == [b"\0\0", b"\0\0\0\0", b"\0\0xx"]
    assert all(disk.across_growth for disk in walk.states(random.Random(1), 8))
    walk.do(Durable(frozenset({0})))
    assert not any(disk.across_growth for disk in walk.states(random.Random(1), 8))


def test_names_change_in_any_order_but_for_those_that_depend_on_one_another() -> None:
    walk = with_a_file(1)
    walk.do(Name({"journal/a": None, "journal/b": 1}))
    walk.do(Name({"journal/b": None, "journal/c": 1}))
    walk.do(Name({"journal/d": 2}))
    found = sorted(sorted(name for name in one if "/" in name) for one in states(walk))
    assert found == [[f"journal/{one}" for one in two] for two in ("a", "ad", "b", "bd", "c", "cd")]


def test_files_in_a_folder_without_a_name_are_lost() -> None:
    walk = Walk(Disk())
    walk.do(Name({"journal": 0}))
    walk.do(Name({"journal/a": 1}))
    walk.do(Durable(frozenset({1})))
    assert states(walk) == [{}, {"journal": None, "journal/a": b""}]


def test_unsynced_write_is_visible_after_a_kill_and_can_still_be_lost() -> None:
    walk = with_a_file(1)
    walk.do(Write(1, 0, b"x"))
    walk.do(Durable(frozenset()))
    killed = walk.killed(random.Random(1))
    assert killed.shown().contents()["journal/a"] == b"x"
    assert sorted(one["journal/a"] or b"" for one in states(Walk(killed))) == [b"\0", b"x"]
