"""Runs of a store on disks as a crash may leave them, checked against models.

A life is one run of a store on such a disk: it is recovered, must hold one of the models that it may hold, and is given
batches. The next life begins on a disk as it may look after a crash at any operation of this one.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from sys import maxsize
from typing import Any, NamedTuple

from tests.contract.disk import LANE, NEXT_QUEUE, OTHER_LANE
from tests.contract.simulated_disk import (
    Confirmed,
    Disk,
    Failure,
    HistorySynced,
    Operation,
    Recorder,
    Started,
    Walk,
    quick_folder,
)
from tests.contract.test_store import Model, Shared
from truenext.errors import StoreError
from truenext.model.batch import Batch, Causes, Mark, ProducerState
from truenext.model.events import CHUNK, FROM_BATCH, chunk_position
from truenext.model.record import message_key, timer_key
from truenext.store.embedded import EmbeddedStore
from truenext.store.store import Recovered

SEGMENT_BYTES = 3000

KILLS_IN_WRITE = 4
"""Number of kills in the middle of one write; their consequences show only after further batches."""

ALWAYS = 12
"""Number of a life's first operations that are never left out: a store is created only once."""


@dataclass
class Held(Model):
    """Model of a store with the state that matters only when it is started again."""

    history: list[bytes] = field(default_factory=list)
    """History of all batches ever."""
    redelivered_below: int = 0

    def copy(self) -> "Held":
        new = copy(self)
        for name, value in vars(self).items():
            if not isinstance(value, int):
                setattr(new, name, copy(value))
        return new

    def apply(self, changes: dict[str, Any]) -> None:
        super().apply(changes)
        self.redelivered_below = changes.get("redelivered_below") or self.redelivered_below
        if changes.get("history"):
            self.history.append(changes["history"])

    def check_all(self, store: EmbeddedStore, recovered: Recovered, history_chunks: int) -> None:
        """Raises: AssertionError if the store holds anything else, or its own files and the history's leave a gap"""
        expected = Recovered(
            identity=recovered.identity,
            clean_stop=self.clean_stop,
            sequence_limit=self.sequence_limit,
            redelivered_below=self.redelivered_below,
            queues=self.queues,
            counts={lane: len(keys) for lane, keys in self.lanes().items()},
            producers=self.producers,
            history=self.history[len(self.history) - len(recovered.history) :],
        )
        assert recovered == expected
        assert list(recovered.producers) == sorted(self.producers, key=lambda n: (self.producers[n].last_used_ms, n))
        assert len(self.history) - len(recovered.history) <= history_chunks
        self.check(store, limit=100)


class Life(NamedTuple):
    disk: Disk
    """Disk on which the life began."""
    operations: list[Operation]
    found: list[Held]
    """Models that the disk may have held."""
    models: list[Held]
    """Models after recovery and after each batch."""

    def may_hold(self, started: int, confirmed: int) -> list[Held]:
        """Return the models that the disk may hold after these numbers of Started and Confirmed."""
        return self.models[confirmed - 1 : started] if confirmed else self.found

    def walk(self) -> Iterator[tuple[Walk, list[Held]]]:
        """Yield the disk, and the models it may hold, before the first operation and after each. The disk is one object
        that goes on changing."""
        walk = Walk(self.disk)
        started = confirmed = 0
        yield walk, self.found
        for operation in self.operations:
            walk.do(operation)
            started += isinstance(operation, Started)
            confirmed += isinstance(operation, Confirmed)
            yield walk, self.may_hold(started, confirmed)

    def at(self, count: int) -> tuple[Walk, list[Held]]:
        """Return the disk, and the models it may hold, after `count` operations."""
        for number, (walk, may_hold) in enumerate(self.walk()):
            if number == count:
                return walk, may_hold
        raise IndexError(count)


def open_store(folder: Path) -> EmbeddedStore:
    return EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=1)


@contextmanager
def folder_for(disk: Disk) -> Iterator[Path]:
    """Make a folder with the contents of the disk. If the block fails, the folder is kept and named in the error."""
    base = Path(tempfile.mkdtemp(dir=quick_folder(), prefix="truenext-crash-"))
    disk.make(base / "data")
    try:
        yield base / "data"
    except BaseException as error:
        shutil.rmtree(base / "data")
        disk.make(base / "data")
        error.add_note(f"the store was opened on this disk: {base / 'data'}")
        raise
    shutil.rmtree(base)


def live(
    disk: Disk,
    may_hold: list[Held],
    rng: random.Random,
    batches: int,
    *,
    failure: Failure | None = None,
    growth: float = 0,
) -> tuple[Life, Recorder]:
    """Recover a store on this disk, see that it holds what it must, and give it batches.

    With a failure, it is seen to that it promises nothing more once a batch has failed.

    Raises: AssertionError if it holds anything else
    """
    with folder_for(disk) as folder:
        recorder = Recorder(disk, folder, failure)
        models: list[Held] = []
        with recorder.recording():
            _run(recorder, folder, disk, may_hold, models, rng, batches, growth)
        recorder.check(folder)
    return Life(disk, recorder.operations, may_hold, models), recorder


def _run(
    recorder: Recorder,
    folder: Path,
    disk: Disk,
    may_hold: list[Held],
    models: list[Held],
    rng: random.Random,
    batches: int,
    growth: float,
) -> None:
    """`models` gets what the store holds after each step."""
    try:
        store = open_store(folder)
    except StoreError:
        assert recorder.has_failed
        return
    history_confirmed = disk.history_chunks

    def sync_history() -> None:
        recorder.note(HistorySynced(history_confirmed))

    store.sync_history = sync_history
    try:
        recorder.note(Started())
        model = recover(store, may_hold, disk)
        history_confirmed = len(model.history)
        recorder.note(Confirmed())
        models.append(model.copy())
        changes: dict[str, Any] = model.changes({}, [], clean_stop=False)
        for number in range(1, batches + 1):
            model.apply(changes)
            models.append(model.copy())
            recorder.note(Started())
            store.apply(batch_of(number, changes))
            recorder.note(Confirmed())
            history_confirmed = len(model.history)
            changes = random_changes(model, rng, growth)
            if rng.random() < 0.1:
                model.check(store, limit=3)
    except StoreError:
        assert recorder.has_failed
        assert_nothing_more_is_confirmed(store)
    finally:
        store.close()


def recover(store: EmbeddedStore, may_hold: list[Held], disk: Disk) -> Held:
    """The one of the models that the store holds. The history's own files tell of all that was confirmed, which is the
    most that they may.
    """
    chunks = may_hold[0].history
    store.last_history_chunk = chunk_position(chunks[-1]) if chunks else None
    recovered = store.recover()
    assert_nothing_after_last_frame(store, disk)
    differences = []
    for model in reversed(may_hold):
        model = model.copy()
        model.restart()
        try:
            model.check_all(store, recovered, disk.history_chunks)
        except AssertionError as difference:
            differences.append(difference)
        else:
            return model
    raise differences[-1]


def assert_nothing_after_last_frame(store: EmbeddedStore, disk: Disk) -> None:
    """Assert that no rest of a batch torn by a crash is behind the last frame, where the next batch goes."""
    journal = store._journal
    # A segment that recovery itself began may hold its earlier life.
    if disk.shown().names.get(f"journal/{journal.newest_segment:016x}.journal") is not None:
        rest = os.pread(journal._files[journal.newest_segment], journal._size, journal._end)
        assert rest.strip(b"\0") == b""


def assert_nothing_more_is_confirmed(store: EmbeddedStore) -> None:
    for number in (1000, 1001):
        try:
            store.apply(Batch(number))
        except StoreError:
            continue
        raise AssertionError("a batch was confirmed behind one that failed")


def batch_of(number: int, changes: dict[str, Any]) -> Batch:
    batch = Batch(number)
    for name, value in changes.items():
        setattr(batch, name, value)
    return batch


def random_record(rng: random.Random, growth: float) -> bytes:
    """Zeros, as they are in a segment that was never used, or what is no zero."""
    size = rng.choice([5, 300, 1500]) if rng.random() >= 0.05 + growth / 4 else rng.choice([2900, 4000, 9000])
    return rng.choice([bytes(size), rng.randbytes(size)])


def chunk(event: int) -> bytes:
    """Return a chunk of history with the event of this number."""
    return CHUNK.pack(0, 0, 1, FROM_BATCH, event)


def random_timer(rng: random.Random) -> bytes:
    return timer_key(rng.randrange(20), rng.choice((LANE, NEXT_QUEUE)), 0)


def random_changes(model: Held, rng: random.Random, growth: float = 0) -> dict[str, Any]:
    """`growth` is how seldom messages go: 0 for as many as come, 1 for none."""
    lanes = (LANE, OTHER_LANE, NEXT_QUEUE)
    first = len(model.used) + 1
    new = {
        message_key(rng.choice(lanes), first + n): (random_record(rng, growth), rng.random() < 0.6)
        for n in range(rng.randint(0, 3))
    }
    held = sorted(model.messages)
    removed = rng.sample(held, min(len(held), rng.randint(0, 4))) if rng.random() >= growth else []
    shared = None
    if rng.random() < 0.4:
        copies = [message_key(rng.choice(lanes), first + len(new) + n) for n in range(rng.randint(2, 4))]
        shared = Shared(first, random_record(rng, growth), copies, rng.random() < 0.6)
    remaining = sorted((model.messages.keys() | new) - set(removed))
    marked = rng.sample(remaining, min(len(remaining), 2))
    causes = {
        key: (f"{first} {key!r}", "x" * 500) if key not in model.causes else ("", f"{first}")
        for key in marked
        if rng.random() < 0.4
    }
    queues = {model.new_queue(): f"queue {first}"} if rng.random() < 0.2 else {}
    empty = model.empty_queues([*remaining, *(shared.copies if shared else ())])
    queues |= dict.fromkeys(rng.sample(empty, min(len(empty), rng.choice([0, 0, 1, 2]))), "")
    return model.changes(
        new,
        removed,
        shared=shared,
        marks={key: Mark(rng.randint(1, 7), rng.randint(1, 9), rng.randint(0, 9)) for key in marked},
        causes={key: Causes(*texts) for key, texts in causes.items()},
        queues=queues,
        producers=(
            {
                rng.choice("abc"): ProducerState(
                    rng.randint(0, 99), rng.randint(0, 3), rng.random() < 0.5, resolved=(3,) * rng.randint(0, 2)
                )
            }
            if rng.random() < 0.3
            else {}
        ),
        forgotten_producers=[rng.choice("abc")] if rng.random() < 0.1 else [],
        sequence_limit=first + 100 if rng.random() < 0.3 else 0,
        redelivered_below=first if rng.random() < 0.1 else 0,
        timers=dict.fromkeys(random_timer(rng) for _ in range(rng.choice([0, 0, 1, 4]))),
        # Some that were never set, some that are set with this batch.
        cleared_timers=[
            *rng.sample(sorted(model.timers), min(len(model.timers), rng.choice([0, 0, 1, 2]))),
            random_timer(rng),
        ],
        history=chunk(len(model.history) + 1) if rng.random() < 0.5 else b"",
        # Also in the middle: a later batch does not care, and a crash behind it finds the transients.
        clean_stop=rng.choice([None, None, None, True, False]),
    )


@dataclass
class Tried:
    """States of a disk that a store was opened on."""

    states: int = 0
    across_growth: int = 0
    """Number of states in which a file was about to grow."""
    seen: set[tuple[bytes, int, int]] = field(default_factory=set)
    """States seen in the current life."""

    def is_new(self, disk: Disk, may_hold: list[Held]) -> bool:
        if disk.in_memory:
            # What becomes of that is left to chance.
            return True
        which = disk.digest(), id(may_hold[0]), len(may_hold)
        if which in self.seen:
            return False
        self.seen.add(which)
        return True

    def count(self, disk: Disk) -> None:
        self.states += 1
        self.across_growth += disk.across_growth


def crash_everywhere(
    life: Life, rng: random.Random, tried: Tried, *, at_most: int, share: float = 1, states_max: int = maxsize
) -> None:
    """Cut the power, in up to `at_most` ways, or kill the broker at every operation of the life, or about a share of
    them; then let the store go on, and cut the power once more. Ends when `tried` has `states_max`.

    Raises: AssertionError, StoreError if a disk does not hold what it must
    """
    tried.seen.clear()
    for number, (walk, may_hold) in enumerate(life.walk()):
        if number >= ALWAYS and rng.random() >= share * (3 if walk.is_writing() else 1):
            continue
        in_write = [walk.killed(rng) for _ in range(KILLS_IN_WRITE if walk.is_writing() else 0)]
        for disk in chain(walk.states(rng, at_most), [walk.killed(rng)], in_write):
            if tried.states >= states_max:
                return
            if tried.is_new(disk, may_hold):
                crash_again(disk, may_hold, rng, tried)


def crash_again(disk: Disk, may_hold: list[Held], rng: random.Random, tried: Tried) -> None:
    tried.count(disk)
    life, _ = live(disk, may_hold, rng, rng.choice([0, 1, 1, 2, 4]))
    walk, may_hold = life.at(rng.choice([rng.randint(0, len(life.operations)), len(life.operations)]))
    last = rng.choice(list(walk.states(rng, 1)))
    tried.count(last)
    live(last, may_hold, rng, 1)


def fail_everywhere(error: int, seed: int, tried: Tried, *, batches: int) -> None:
    """One call of a run fails, each in turn. The store is then opened on the same files, as they are and as they may be
    after a power cut, and goes on.

    Raises: AssertionError, StoreError if it confirms what it may not, or a disk does not hold what it must
    """
    for call in count():
        rng = random.Random(f"{seed} {call}")
        failure = Failure(call, rng.choice([1, 1, 3, 1000]), error, rng.choice([0.0, 0.5, 1.0]))
        life, recorder = live(Disk(), [Held()], random.Random(seed), batches, failure=failure)
        if not recorder.has_failed:
            return
        crash_at_the_end(life, rng, tried)


def crash_at_the_end(life: Life, rng: random.Random, tried: Tried) -> None:
    """The broker stops, and is started again; or the power goes as well."""
    walk, may_hold = life.at(len(life.operations))
    for disk in (walk.killed(rng), walk.killed(rng), *walk.states(rng, 2)):
        crash_again(disk, may_hold, rng, tried)
