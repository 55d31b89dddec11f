"""Stores to be damaged, their contents, and the run of a broker on them in a process of its own."""

from __future__ import annotations

import multiprocessing
import random
from collections import defaultdict
from copy import copy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from truenext.engine.writing.event_log import EventLog
from truenext.errors import TruenextError
from truenext.history.writer import HistoryWriter
from truenext.model.batch import NO_MARK, Batch, Mark, ProducerState
from truenext.model.message import SentMessage
from truenext.model.order import PRIORITY_MAX
from truenext.model.record import (
    DamagedRecord,
    content_key,
    decode_record,
    encode_record,
    encode_reference,
    lane_key,
    message_key,
    referenced_content_number,
    sequence_of,
    split_lane_key,
    timer_key,
)
from truenext.store.embedded import EmbeddedStore

PATIENCE_SECONDS = 30.0
SEGMENT_BYTES = 16 * 1024
SEGMENTS_MAX = 3
QUEUES = {number: f"queue {number}" for number in range(1, 5)}
PRODUCERS = {
    f"producer {number}": ProducerState(number, 1000 + number, number % 2 == 0, resolved=tuple(range(number)))
    for number in range(5)
}
SEQUENCE_LIMIT = 1 << 20


class Shown(NamedTuple):
    """A message as the store shows it; no message if its record is damaged."""

    message: SentMessage | None
    mark: Mark
    content: int = 0
    """Number of the shared content; 0 if there is none."""


Shelf = dict[bytes, dict[int, Shown]]
"""Lane key to sequence to message, in the order in which they are shown."""


class Content(NamedTuple):
    """Contents of a store."""

    queues: dict[int, str]
    producers: dict[str, ProducerState]
    shelf: Shelf
    timers: frozenset[bytes]


class Run(NamedTuple):
    """Result of a broker's run: how far it came, and the reason why it stopped."""

    found: Content | None
    """Contents at the start."""
    remaining: Content | None
    """Contents at the next start, after the broker had worked with them."""
    store_error: str
    bug: str
    """An exception that is none of ours."""
    signal: int


def message_of(key: bytes, seed: random.Random, *, persistent: bool) -> SentMessage:
    priority = PRIORITY_MAX - split_lane_key(key[:5])[1]
    return SentMessage(
        priority, persistent, 0, b"content-length:0\n", seed.randbytes(seed.choice((5, 500, 1500, 1900, 3000)))
    )


class Writer:
    """Writes into a store what a broker would write, and keeps in mind what is then in it."""

    def __init__(self, folder: Path, seed: random.Random, *, messages: int = 1000, shares: bool = False) -> None:
        """Persistent and transient messages end up both in the checkpoint and in the journal; with `shares` some are
        copies."""
        self._seed = seed
        self._shares = shares
        self._number = 0
        self._sequence = 0
        # Of its own, so that messages are what they would be without timers.
        self._seed_of_timers = copy(seed)
        self.shelf: Shelf = defaultdict(dict)
        self.timers: set[bytes] = set()
        self.store = EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=SEGMENTS_MAX)
        self.store.recover()
        batch = self.batch()
        batch.queues, batch.producers = QUEUES, PRODUCERS
        batch.sequence_limit, batch.clean_stop = SEQUENCE_LIMIT, False
        self.apply(batch)
        while self._sequence < messages:
            self.send_and_acknowledge()

    def apply(self, batch: Batch) -> None:
        """Apply the batch, and wait for its checkpoints, so that the same seed gives the same files."""
        self.store.apply(batch)
        wait_for_checkpoints(self.store)

    def batch(self) -> Batch:
        self._number += 1
        return Batch(self._number)

    def send_and_acknowledge(self) -> None:
        seed = self._seed
        batch = self.batch()
        for lane in list(self.shelf):
            for sequence in [sequence for sequence in self.shelf[lane] if seed.random() < 0.004]:
                self.remove(batch, message_key(lane, sequence))
            for sequence, shown in list(self.shelf[lane].items()):
                if seed.random() < 0.003:
                    mark = Mark(shown.mark.attempts + 1, shown.mark.deliveries + 2, sequence)
                    self.shelf[lane][sequence] = shown._replace(mark=mark)
                    batch.marks[message_key(lane, sequence)] = mark
        for _ in range(seed.randrange(1, 8)):
            self._sequence += 1
            # Few lanes have most.
            lane = lane_key(seed.choice(list(QUEUES)), min(seed.randrange(10), seed.randrange(10)))
            self.put(batch, message_key(lane, self._sequence), is_transient=seed.random() < 0.3)
        if self._shares and seed.random() < 0.5:
            self.share(batch)
        self.set_and_clear_timers(batch)
        self.apply(batch)

    def set_and_clear_timers(self, batch: Batch) -> None:
        seed = self._seed_of_timers
        batch.cleared_timers = [one for one in sorted(self.timers) if seed.random() < 0.003]
        self.timers.difference_update(batch.cleared_timers)
        for _ in range(seed.randrange(4)):
            batch.timers[timer_key(seed.randrange(10**9), lane_key(seed.choice(list(QUEUES)), 5), self._sequence)] = (
                None
            )
        self.timers.update(batch.timers)

    def put(self, batch: Batch, key: bytes, *, is_transient: bool) -> None:
        message = message_of(key, self._seed, persistent=not is_transient)
        (batch.transient_puts if is_transient else batch.puts)[key] = encode_record(key, message)
        self.shelf[key[:5]][sequence_of(key)] = Shown(message, NO_MARK)

    def share(self, batch: Batch) -> None:
        number = self._sequence + 1
        persistent = self._seed.random() < 0.7
        message = message_of(content_key(number), self._seed, persistent=persistent)
        message.priority = 4
        copies = self._seed.randrange(2, 6)
        puts = batch.puts if persistent else batch.transient_puts
        puts[content_key(number)] = encode_record(content_key(number), message)
        batch.marks[content_key(number)] = Mark(copies, 0)
        for _ in range(copies):
            self._sequence += 1
            key = message_key(lane_key(self._seed.choice(list(QUEUES)), 5), self._sequence)
            puts[key] = encode_reference(key, number, persistent=persistent)
            self.shelf[key[:5]][self._sequence] = Shown(message, NO_MARK, number)

    def remove(self, batch: Batch, key: bytes) -> None:
        shown = self.shelf[key[:5]].pop(sequence_of(key))
        assert shown.message is not None, "only what is known is removed"
        (batch.removes if shown.message.persistent else batch.transient_removes).append(key)
        if shown.mark != NO_MARK:
            batch.unmarks.append(key)
        if shown.content:
            dereferenced = batch.dereferenced if shown.message.persistent else batch.transient_dereferenced
            dereferenced.append(content_key(shown.content))

    def stop(self) -> Content:
        batch = self.batch()
        batch.clean_stop = True
        self.apply(batch)
        self.store.close()
        shelf = {lane: of_lane for lane, of_lane in self.shelf.items() if of_lane}
        return Content(QUEUES, PRODUCERS, shelf, frozenset(self.timers))


def read_all(store: EmbeddedStore, limit: int = 7) -> Content:
    """Read all lanes page by page as a broker does, and compare them with their counts as engine/memory/reading.py
    does."""
    recovered = store.recover()
    shelf: Shelf = {}
    for lane, count in recovered.counts.items():
        if split_lane_key(lane)[0] not in recovered.queues:
            raise TruenextError("a queue has no name")
        shelf[lane] = {}
        horizon, unread, is_end = 0, count, False
        while not is_end:
            page = store.read_page(lane, horizon, limit)
            if not (page.messages or page.is_end):
                raise TruenextError("no message was read, although the store says that there are more")
            for stored in page.messages:
                if sequence_of(stored.key) <= horizon:
                    raise TruenextError("a page begins before its beginning")
                try:
                    message = decode_record(stored.key, stored.record, stored.content)
                except DamagedRecord:
                    message = None
                shelf[lane][sequence_of(stored.key)] = Shown(
                    message, stored.mark, referenced_content_number(stored.record)
                )
            unread -= len(page.messages)
            horizon = sequence_of(page.messages[-1].key) if page.messages else horizon
            is_end = page.is_end
        if unread:
            raise TruenextError(
                f"the store has a different number of messages than it has counted: the difference is {unread}"
            )
    return Content(recovered.queues, recovered.producers, shelf, _read_timers(store, limit))


def _read_timers(store: EmbeddedStore, limit: int) -> frozenset[bytes]:
    timers: list[bytes] = []
    is_end = False
    while not is_end:
        page = store.read_timers(timers[-1] if timers else b"", limit)
        timers += page.timers
        is_end = page.is_end
    if timers != sorted(set(timers)):
        raise AssertionError("timers out of order")
    return frozenset(timers)


def run_broker(folder: Path) -> Run:
    """Start on the folder, read everything, take every third message, send some, wait until they have moved, stop,
    start again and read everything.
    """
    process_context = multiprocessing.get_context("forkserver")
    process_context.set_forkserver_preload(["tests.contract.damage"])
    receiver, sender = process_context.Pipe(duplex=False)
    process = process_context.Process(target=_work, args=(folder, sender), daemon=True)
    process.start()
    sender.close()
    results: dict[str, Any] = {}
    try:
        while receiver.poll(PATIENCE_SECONDS):
            kind, what = receiver.recv()
            results[kind] = what
        raise AssertionError(f"a broker on {folder} hangs")
    except EOFError:
        process.join(PATIENCE_SECONDS)
    finally:
        process.kill()
        process.join()
        receiver.close()
    assert process.exitcode is not None, "it has ended"
    return Run(
        results.get("found"),
        results.get("left"),
        results.get("refusal", ""),
        results.get("bug", ""),
        -min(process.exitcode, 0),
    )


def _work(folder: Path, sender: Connection) -> None:
    try:
        store = EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=1)
        _open_history(folder)
        found = read_all(store)
        sender.send(("found", found))
        _acknowledge_and_send(store, found)
        store.close()
        store = EmbeddedStore(folder, segment_bytes=SEGMENT_BYTES, segments_max=1)
        sender.send(("left", read_all(store, limit=1000)))
        store.close()
    except TruenextError as error:
        sender.send(("refusal", str(error)))
    except Exception as error:
        sender.send(("bug", repr(error)))


def _open_history(folder: Path) -> None:
    history = HistoryWriter(folder / "history")
    history.start_run(after_clean_stop=True)
    history.close()


def _acknowledge_and_send(store: EmbeddedStore, content: Content) -> None:
    number = 0
    for batch_of in work_on(content.shelf):
        number += 1
        batch = Batch(number)
        for key, shown in batch_of:
            message = shown.message
            assert message is not None, "what is damaged is left alone"
            if sequence_of(key) >= FIRST_SENT:
                batch.puts[key] = encode_record(key, message)
            else:
                (batch.removes if message.persistent else batch.transient_removes).append(key)
                batch.unmarks += [key] if shown.mark != NO_MARK else []
                dereferenced = batch.dereferenced if message.persistent else batch.transient_dereferenced
                dereferenced += [content_key(shown.content)] if shown.content else []
        store.apply(batch)
    number += 1
    batch = Batch(number)
    batch.cleared_timers = sorted(content.timers)[::3]
    batch.timers = NEW_TIMERS
    batch.clean_stop = True
    store.apply(batch)
    wait_for_checkpoints(store)


def wait_for_checkpoints(store: EmbeddedStore) -> None:
    """Raises: StoreError if a move fails"""
    with store._changed:
        done = store._changed.wait_for(
            lambda: store._checkpointer.failure is not None or not store._checkpointer._is_checkpoint_due(),
            timeout=PATIENCE_SECONDS,
        )
    assert done, "a move takes too long"
    if store._checkpointer.failure is not None:
        raise store._checkpointer.failure


FIRST_SENT = 10_000
"""Sequence of the first message that `work_on` sends."""


NEW_TIMERS = {timer_key(ms, lane_key(1, 5), FIRST_SENT): None for ms in (1, 10**8, 2**60)}
"""Set at the end of the work."""


def work_on(shelf: Shelf) -> list[list[tuple[bytes, Shown]]]:
    """Return the work of a broker on these messages: for each batch the acknowledged and the sent ones."""
    batches = []
    sequence = FIRST_SENT
    for lane, of_lane in sorted(shelf.items()):
        acknowledged = [
            (message_key(lane, number), shown)
            for number, shown in list(of_lane.items())[::3]
            if shown.message is not None
        ]
        sent = []
        for _ in range(3):
            key = message_key(lane, sequence)
            message = message_of(key, random.Random(sequence), persistent=True)
            sent.append((key, Shown(message, NO_MARK)))
            sequence += 1
        batches.append(acknowledged + sent)
    return batches


def worked_on(content: Content) -> Content:
    """Return the contents after the work of `work_on`."""
    shelf = {lane: dict(of_lane) for lane, of_lane in content.shelf.items()}
    for batch in work_on(content.shelf):
        for key, shown in batch:
            if sequence_of(key) >= FIRST_SENT:
                shelf[key[:5]][sequence_of(key)] = shown
            else:
                del shelf[key[:5]][sequence_of(key)]
    return content._replace(
        shelf={lane: of_lane for lane, of_lane in shelf.items() if of_lane},
        timers=content.timers - set(sorted(content.timers)[::3]) | NEW_TIMERS.keys(),
    )


def write_history(folder: Path) -> None:
    """Two files, as two runs leave them."""
    for _ in range(2):
        history = HistoryWriter(folder / "history")
        run, first_event = history.start_run(after_clean_stop=True)
        event_log = EventLog(run=run, first_event=first_event)
        event_log.run_started(after_clean_stop=True)
        for batch in range(1, 20):
            event_log.on_committed(batch)
            history.append(event_log.close_chunk())
        history.close()
