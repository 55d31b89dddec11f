"""Tests that a broker never shows invented data after a flipped bit anywhere in its data folder.

TRUENEXT_FLIPS=10000 TRUENEXT_SEED=7 pytest -s tests/contract/test_bit_flips.py
"""

import os
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from tests.contract.damage import Content, Run, Writer, read_all, run_broker, worked_on, write_history
from truenext.errors import StoreError
from truenext.history.check import find_damage
from truenext.model.record import LANE_KEY_SIZE, sequence_of
from truenext.store.check import check
from truenext.store.embedded import EmbeddedStore
from truenext.store.export import export

FLIPS = int(os.environ.get("TRUENEXT_FLIPS", "8"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
PAGE = 4096


def quiet(done: int, total: int) -> None:
    """Ignore the progress."""


@pytest.fixture
def quick_path() -> Path:
    """A folder in memory, where there is such a thing: a hundred brokers sync thousands of times. It is there for
    whoever looks into a failure.
    """
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="truenext-flips-", dir=memory if memory.is_dir() else None))


def random_bits(folder: Path, seed: random.Random) -> Iterator[tuple[Path, int]]:
    """Files and bits in them: some anywhere, most where one bit says much."""
    data = folder / "lmdb/data.mdb"
    journal = sorted((folder / "journal").glob("*.journal"))
    others = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != data and path not in journal]
    while True:
        kind = seed.random()
        if kind < 0.15:
            # The two pages that say where everything is.
            yield data, (seed.choice((0, PAGE)) + seed.randrange(16 + 136)) * 8 + seed.randrange(8)
        elif kind < 0.5:
            # The beginning of a page: what it is, and where its nodes are.
            page = seed.randrange(data.stat().st_size // PAGE)
            yield data, (page * PAGE + seed.randrange(40)) * 8 + seed.randrange(8)
        elif kind < 0.65:
            yield data, seed.choice(list(heads_of_nodes(data))) * 8 + seed.randrange(22 * 8)
        elif kind < 0.75:
            yield data, seed.randrange(data.stat().st_size * 8)
        elif kind < 0.9:
            path = seed.choice(journal)
            end = len(path.read_bytes().rstrip(b"\0"))
            yield path, seed.randrange(max(1, end) * 8)
        else:
            path = seed.choice(others)
            if path.stat().st_size:
                yield path, seed.randrange(path.stat().st_size * 8)


def heads_of_nodes(data: Path) -> Iterator[int]:
    content = data.read_bytes()
    for page in range(2 * PAGE, len(content), PAGE):
        flags, lower = struct.unpack_from("<HH", content, page + 10)
        if flags in (1, 2):
            yield from (page + at for (at,) in struct.iter_unpack("<H", content[page + 16 : page + lower]))


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def expect(found: Content, written: Content, cleared: frozenset[bytes] = frozenset()) -> str:
    """Compare the contents, except messages known to be damaged; return a description of the differences. Cleared
    timers may come back: they do no harm."""
    assert found.timers <= written.timers | cleared, "a timer that nobody set"
    assert found.queues == written.queues
    assert found.producers == written.producers
    are_damaged = has_lost_marks = False
    for lane in found.shelf.keys() | written.shelf.keys():
        here, there = found.shelf.get(lane, {}), written.shelf.get(lane, {})
        good = {sequence: shown for sequence, shown in here.items() if shown.message is not None}
        assert list(good) == sorted(good)
        assert good.keys() <= there.keys(), "a message too much"
        # The key of a damaged one may be what is damaged. Of one that was acknowledged, where only the journal said so,
        # it is one more.
        assert len(here) >= len(there), "a message is missing"
        are_damaged |= len(good) != len(here)
        for sequence, shown in good.items():
            assert shown.message == there[sequence].message
            has_lost_marks |= shown != there[sequence]
    if has_lost_marks:
        return "marks lost"
    if are_damaged:
        return "messages left out"
    return "right" if found.timers == written.timers else "timers lost"


def _readable_again(content: Content, written: Content) -> Content:
    """Restore damaged messages: a content behind a wrong key can be found once that key is gone."""
    shelf = {
        lane: {
            sequence: written.shelf.get(lane, {}).get(sequence, shown) if shown.message is None else shown
            for sequence, shown in of_lane.items()
        }
        for lane, of_lane in content.shelf.items()
    }
    return content._replace(shelf=shelf)


def judge(run: Run, written: Content) -> str:
    assert not run.bug, run.bug
    outcomes = []
    if run.found is not None:
        outcomes.append(expect(run.found, written))
    if run.remaining is not None and run.found is not None:
        outcomes.append(expect(run.remaining, _readable_again(worked_on(run.found), written), run.found.timers))
    if run.signal:
        return f"death by signal {run.signal}"
    if run.store_error:
        return "refused"
    return next((outcome for outcome in outcomes if outcome != "right"), "right")


def findings(folder: Path) -> list[str]:
    """Return the findings of `truenext store check`."""
    found: list[str] = []
    try:
        check(folder, lambda finding: found.append(str(finding)), quiet)
    except StoreError as error:
        found.append(str(error))
    return found + [what for _, what in find_damage(folder / "history")]


def exported(folder: Path, new: Path) -> Content | None:
    try:
        export(folder, new, lambda finding: None, quiet)
    except StoreError:
        return None
    store = EmbeddedStore(new)
    content = read_all(store)
    store.close()
    return content


def removed_in_journal(folder: Path, written: Content) -> Iterator[tuple[int, bytes]]:
    """Yield the positions and the keys of messages that are still in the checkpoint, and were acknowledged."""
    data = folder / "lmdb/data.mdb"
    content = data.read_bytes()
    with lmdb.open(str(data.parent), readonly=True, lock=False, max_dbs=30) as environment, environment.begin() as txn:
        keys = set(txn.cursor(environment.open_db(b"messages", txn, create=False)).iternext(values=False))
    for head in heads_of_nodes(data):
        key = content[head + 8 : head + 8 + LANE_KEY_SIZE + 8]
        one_more = key[:-1] + bytes([key[-1] ^ 1])
        lane = written.shelf.get(key[:LANE_KEY_SIZE], {})
        if (
            key in keys
            and one_more not in keys
            and lane
            and not {sequence_of(key), sequence_of(one_more)} & lane.keys()
        ):
            yield head + 8, key


def expect_saved(saved: Content, written: Content, *, is_whole: bool) -> int:
    """Every message saved is one that was written once; how many are lost."""
    if is_whole:
        assert expect(saved, written) == "right"
    lost = 0
    for lane in saved.shelf.keys() | written.shelf.keys():
        here, there = saved.shelf.get(lane, {}), written.shelf.get(lane, {})
        for sequence, shown in here.items():
            assert shown.message is not None
            assert sequence not in there or shown.message == there[sequence].message
        lost += len(there.keys() - here.keys())
    return lost


def test_flipped_bit_never_makes_a_broker_show_invented_data(quick_path: Path) -> None:
    """Nor one that is sent with it; and `store check` finds damage in every store that shows anything else. Damage that
    stops the broker it may not find: LMDB notices some only when it writes."""
    pristine = quick_path / "pristine"
    content = Writer(pristine, random.Random(SEED), shares=True).stop()
    write_history(pristine)
    outcomes: Counter[str] = Counter()
    lost: Counter[int] = Counter()
    silent: list[str] = []
    seed = random.Random(SEED)
    print(f"\nseed {SEED}")
    assert findings(pristine) == []
    for n, (path, bit) in zip(range(FLIPS), random_bits(pristine, seed), strict=False):
        where = f"seed {SEED}, flip {n}: bit {bit} of {path.relative_to(pristine)}"
        folder, new = quick_path / "data", quick_path / "new"
        shutil.copytree(pristine, folder)
        flip(folder / path.relative_to(pristine), bit)
        found = findings(folder)
        saved = exported(folder, new)
        try:
            if saved is not None:
                lost[expect_saved(saved, content, is_whole=not found)] += 1
            outcome = judge(run_broker(folder), content)
        except AssertionError as error:
            raise AssertionError(f"{where}, of {quick_path}: {error}; check says {found}") from error
        outcomes[outcome] += 1
        if outcome in ("messages left out", "marks lost", "timers lost") and not found:
            silent.append(f"{where}: {outcome}")
        shutil.rmtree(folder)
        shutil.rmtree(new, ignore_errors=True)
    print(dict(outcomes), "lost by export:", dict(sorted(lost.items())))
    assert not silent, "check finds nothing"
    if FLIPS >= 100:
        assert outcomes["refused"] and outcomes["right"], outcomes
    shutil.rmtree(quick_path)


def test_damaged_key_of_an_acknowledged_message_makes_one_more_damaged_message_and_no_other(quick_path: Path) -> None:
    """Fixed: the test above took it for a message that was missing, seldom, as it counts those of a lane."""
    folder = quick_path / "data"
    print(f"\nseed {SEED}")
    content = Writer(folder, random.Random(SEED), shares=True).stop()
    write_history(folder)
    trial = quick_path / "trial"
    outcomes = Counter[str]()
    for at, key in removed_in_journal(folder, content):
        shutil.copytree(folder, trial)
        flip(trial / "lmdb/data.mdb", (at + len(key) - 1) * 8)
        found = findings(trial)
        run = run_broker(trial)
        shutil.rmtree(trial)
        outcome = judge(run, content)
        outcomes[outcome] += 1
        if outcome == "messages left out":
            break
        # It has a mark, say: then a message is missing, and the broker does not open the folder. Or the page is one
        # that nobody reads any more.
        assert outcome in ("refused", "right")
    print(dict(outcomes))
    if not outcomes["messages left out"]:
        shutil.rmtree(quick_path)
        pytest.skip("with this seed the checkpoint has no such message")
    assert run.found is not None
    lane, sequence = key[:LANE_KEY_SIZE], sequence_of(key) ^ 1
    assert run.found.shelf[lane].keys() - content.shelf[lane].keys() == {sequence}
    assert run.found.shelf[lane][sequence].message is None
    assert any(f"message {sequence} of queue" in finding for finding in found), found
    shutil.rmtree(quick_path)
