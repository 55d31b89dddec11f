"""Broker that also writes each frame of its journal into a file, and a naive reader of this file.

It is `truenext serve` with small segments, so that messages move into the checkpoint during each test. The file has
the number of each frame, its size and its payload. A frame comes before it is written to the journal: if the broker is
killed in between, the next one has the same number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from truenext.cli import serve
from truenext.cli.main import main as truenext
from truenext.model.batch import NO_CAUSES, NO_MARK, Causes, Mark, ProducerState
from truenext.model.record import CONTENTS_LANE_KEY, LANE_KEY_SIZE, referenced_content_number, sequence_of
from truenext.store.changes import PUT_HEADER_BYTES, PUTS_OFFSET, causes_of, decode_changes
from truenext.store.embedded import EmbeddedStore
from truenext.store.frame_writer import FrameWriter
from truenext.store.log import Log
from truenext.store.store import UndecodedMessage

_HEAD = struct.Struct("<QI")


class SmallStore(EmbeddedStore):
    def __init__(self, path: Path, *, disk_limit: int | None, log: Log | None) -> None:
        super().__init__(path, disk_limit=disk_limit, segment_bytes=256 * 1024, log=log, segments_max=2)


def main(command: Sequence[str]) -> None:
    """Run a command of `truenext`; its first word is the path of the file for frames."""
    append_frame = FrameWriter.append_frame
    with Path(command[0]).open("ab", buffering=0) as tap:

        def tapped(writer: FrameWriter, parts: list[bytes], records: int, digest: bytes = b"") -> tuple[int, int]:
            payload = b"".join(parts)
            tap.write(_HEAD.pack(writer._journal.last_frame_number + 1, len(payload)) + payload)
            return append_frame(writer, parts, records, digest)

        with (
            mock.patch.object(FrameWriter, "append_frame", tapped),
            mock.patch.object(serve, "EmbeddedStore", SmallStore),
        ):
            truenext(command[1:])


def read_frames(tap: Path) -> dict[int, bytes]:
    """Return payloads by number."""
    content = tap.read_bytes()
    frames = {}
    at = 0
    while at + _HEAD.size <= len(content):
        number, size = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        frames[number] = content[at : at + size]
        at += size
    return frames


@dataclass
class StoreState:
    """State of a store, as plainly as it can be said."""

    messages: dict[bytes, tuple[bytes, bool]] = field(default_factory=dict)
    """Record of each message and content, and whether it is transient."""
    marks: dict[bytes, Mark] = field(default_factory=dict)
    causes: dict[bytes, Causes] = field(default_factory=dict)
    queues: dict[int, str] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    producers: dict[str, ProducerState] = field(default_factory=dict)
    timers: set[bytes] = field(default_factory=set)
    clean_stop: bool = True

    def apply(self, payload: bytes) -> None:
        changes = decode_changes(memoryview(payload))
        rare = changes.rare
        if rare is not None and rare.drops_transients:
            self.drop_transients()
        at = PUTS_OFFSET
        for puts, is_transient in ((changes.puts, False), (changes.transient_puts, True)):
            for key, size in puts:
                at += PUT_HEADER_BYTES
                self.messages[key] = payload[at : at + size], is_transient
                at += size
        for key in changes.removes + changes.transient_removes:
            del self.messages[key]
            self.marks.pop(key, None)
            self.causes.pop(key, None)
        if rare is None:
            return
        self.marks |= rare.marks
        for key in rare.unmarks:
            self.marks.pop(key, None)
        for key, (first, last) in causes_of(rare).items():
            old = self.causes.get(key, Causes("", ""))
            self.causes[key] = Causes(old.first or first, last or old.last)
        self.queues = {number: name for number, name in (self.queues | rare.queues).items() if name}
        for number, is_paused in rare.paused.items():
            (self.paused.add if is_paused else self.paused.discard)(number)
        for name in rare.forgotten_producers:
            self.producers.pop(name, None)
        self.producers |= rare.producers
        self.timers -= set(rare.cleared_timers)
        self.timers |= set(rare.timers)
        self.clean_stop = self.clean_stop if rare.clean_stop is None else rare.clean_stop

    def drop_transients(self) -> None:
        self.messages = {key: each for key, each in self.messages.items() if not each[1]}
        self.marks = {key: mark for key, mark in self.marks.items() if key in self.messages}
        self.causes = {key: causes for key, causes in self.causes.items() if key in self.messages}


def state_after(frames: Mapping[int, bytes], batch: int) -> StoreState:
    """Return what a broker finds that starts after a batch."""
    state = StoreState()
    for number in range(1, batch + 1):
        state.apply(frames[number])
    if not state.clean_stop:
        state.drop_transients()
    return state


def check_state(data: Path, expected: StoreState) -> None:
    """Check that a data folder has exactly this state. A start is made on it.

    Raises: AssertionError, StoreError if it has not
    """
    with closing(SmallStore(data, disk_limit=None, log=None)) as store:
        recovered = store.recover()
        assert recovered.queues == expected.queues
        assert recovered.paused & expected.queues.keys() == expected.paused & expected.queues.keys()
        assert recovered.producers == expected.producers
        assert set(_timers(store)) == expected.timers
        found = {}
        for lane in {key[:LANE_KEY_SIZE] for key in expected.messages} | recovered.counts.keys() | {CONTENTS_LANE_KEY}:
            for message in _messages(store, lane):
                found[message.key] = message
        assert found.keys() == expected.messages.keys()
        for key, (record, _) in expected.messages.items():
            assert found[key].record == record
            assert found[key].causes == expected.causes.get(key, NO_CAUSES)
            assert found[key].mark == expected.marks.get(key, NO_MARK)
            assert bool(found[key].content) is bool(referenced_content_number(record))


def _timers(store: EmbeddedStore) -> Iterator[bytes]:
    after = b""
    while True:
        page = store.read_timers(after, 500)
        yield from page.timers
        if page.is_end:
            return
        after = page.timers[-1]


def _messages(store: EmbeddedStore, lane: bytes) -> Iterator[UndecodedMessage]:
    after = 0
    while True:
        page = store.read_page(lane, after, 500)
        yield from page.messages
        if page.is_end:
            return
        after = sequence_of(page.messages[-1].key)
