"""What can be read of a data folder, whatever is damaged in it. It tells what it finds, and changes nothing.

    journal        Every good frame is laid over the checkpoint, also behind a damaged one: what was acknowledged there
                   was acknowledged. What the damaged one said is missing: the messages that it brought are lost, and
                   those that it acknowledged are there again.
    checkpoint     Read page by page (lmdb_file.py). Entries on pages that a damaged page led to are found as well, if
                   it is known which pages are free; their checksums tell what they are.
    salt           If the checkpoint does not have it any more, it is worked out from the journal's frames.

Memory: what the journal may cost (overlay.py), one byte for each page of the checkpoint, 16 for each content that
several messages share, and the names; and what refers to contents that are missing.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from bisect import bisect_left
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from truenext.batch import NO_MARK, Mark
from truenext.errors import StoreError
from truenext.order import PRIORITY_MAX
from truenext.record import (
    CONTENTS,
    LANE_KEY_SIZE,
    MESSAGE_KEY_SIZE,
    TIMER_SIZE,
    DamagedRecord,
    reference_of,
    sequence_of,
    split_lane_key,
    verify,
)
from truenext.store import changes, folder
from truenext.store.checkpoint_format import (
    DATABASES,
    FORMAT,
    FORMAT_VERSION,
    GENERATION,
    MARK,
    META,
    NUMBER,
    POSITION,
    SALT,
    UNCLEAN,
    Position,
    position_of,
    recovered_of,
)
from truenext.store.crc import begin_of
from truenext.store.journal import (
    CHECKSUM,
    FLIP_BYTES_MAX,
    FRAME,
    SEGMENT_AT,
    cut,
    is_flipped,
    needed_by_first,
    payload_at,
)
from truenext.store.lmdb_file import TREE_BYTES, LmdbFile, Tree, holds_nothing, metas
from truenext.store.missing import missing_at_end
from truenext.store.overlay import Overlay, laid_over, mark_of
from truenext.store.sealed import DamagedValue, unseal
from truenext.store.store import Recovered
from truenext.store.trouble import CAUSES, empty, explained, other_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from truenext.store.lmdb_file import Leaf

SEARCH_BYTES_MAX = 1 << 34
"""Bytes of one segment, some of them many times, whose checksum is computed to find good frames behind a damaged one: a
sender can put what looks like frames into a body, and this keeps the search within about ten seconds."""

READ_BYTES = 64 * 1024
"""Bytes of the journal that are lost with one that the disk does not give."""

MARKS_LEFT_MAX = 100_000
"""Marks kept for messages that may still be found."""

TIMERS_LEFT_MAX = 1_000_000
"""Timers kept that damaged pages led to."""

CHECKPOINT = "lmdb/data.mdb"

_SMALL = (b"meta", b"queues", b"producers", b"counts", b"transient counts")
_UNKNOWN = {
    b"identity": b"",
    b"clean stop": UNCLEAN,
    b"sequence limit": NUMBER.pack(1),
    b"redelivered below": NUMBER.pack(0),
    b"paused": b"",
}
"""What stands in for what meta does not have any more."""
_NEEDLE = struct.Struct("<Q")
_NEVER_MOVED = 1 << 63


class Finding(NamedTuple):
    """Something that is not what was written."""

    file: str
    """In the data folder."""
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


class Kept(msgspec.Struct, gc=False):
    """A message that is there, or what is left of it."""

    key: bytes
    record: bytes
    is_transient: bool
    mark: Mark
    file: str
    damage: str = ""
    """Empty if every bit is as written."""


class Contents:
    """The contents that are there, and how many messages refer to each."""

    def __init__(self) -> None:
        self._numbers = array("Q")
        """In order."""
        self._said = array("I")
        self._found = array("I")

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, references: int) -> None:
        """One is there, and is said to have so many references."""
        at = bisect_left(self._numbers, number)
        if at == len(self._numbers) or self._numbers[at] != number:
            # Nearly always at the end.
            self._numbers.insert(at, number)
            self._said.insert(at, references)
            self._found.insert(at, 0)

    def refer(self, number: int) -> bool:
        """One more refers to a content; False if that is not there."""
        at = bisect_left(self._numbers, number)
        if at == len(self._numbers) or self._numbers[at] != number:
            return False
        self._found[at] += 1
        return True

    def wrong(self) -> Iterator[tuple[int, int, int]]:
        """Number, references that it is said to have, and those that were found, where they differ."""
        for number, said, found in zip(self._numbers, self._said, self._found, strict=True):
            if said != found:
                yield number, said, found


@contextmanager
def opened(
    data: Path,
    found: Callable[[Finding], None],
    report: Callable[[int, int], None],
    history_told: tuple[int, int] | None = None,
) -> Iterator[Salvage]:
    """The folder is ours meanwhile, and nothing in it but the lock file is written to. `history_told` is run and first
    event of the last chunk of a batch that the history's own files have.

    Raises: StoreInUseError if a broker has it, StoreError if it is no data folder, holds nothing, or cannot be read
    """
    if not ((data / "lmdb").is_dir() or (data / "journal").is_dir()):
        raise StoreError(f"{data} is no data folder of a broker: it has neither lmdb nor journal in it")
    try:
        lock = _lock(data)
        try:
            salvage = Salvage(data, found, report, history_told)
            try:
                yield salvage
            finally:
                salvage.close()
        finally:
            if lock >= 0:
                os.close(lock)
    except CAUSES as error:
        raise explained(f"read the store in {data}", error, data) from error


def _lock(data: Path) -> int:
    try:
        return folder.lock(data)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # Nor can a broker run on what cannot be written to.
        return -1


class Salvage:
    """`timers`, then `messages`, are to be read to their ends, once; what is known before is what a start must know."""

    recovered: Recovered
    """Without counts; what is damaged is as in a new store."""

    def __init__(
        self,
        data: Path,
        found: Callable[[Finding], None],
        report: Callable[[int, int], None],
        history_told: tuple[int, int] | None,
    ) -> None:
        """`found` is told of damage as it is come upon, `report` how many bytes of how many were looked at.

        Raises: StoreError if the folder holds nothing, or what another truenext wrote; OSError
        """
        self._data = data
        self._tell = found
        self._report = report
        self._history_told = history_told
        self._history = b""
        """The last chunk of it in the journal."""
        self._torn = ""
        """How the journal ends, if that is with what a crash may have left of a batch."""
        self._is_last_flipped = False
        """One bit of the last frame of the newest segment is wrong."""
        self.damages = 0
        """How often `found` was told."""
        self.notes: list[str] = []
        """What is no damage, but may be asked about."""
        self.batches = 0
        """In the journal."""
        self.left_over = 0
        """Transients that unclean stops dropped and that are not deleted yet."""
        self.highest = 0
        """The highest sequence of a message."""
        self.contents = Contents()
        """As far as `messages` was read."""
        self.nameless: set[int] = set()
        """Queues that have messages and no name."""
        self._counts: dict[bytes, dict[bytes, int]] = {b"counts": {}, b"transient counts": {}}
        self._marks_left: dict[bytes, bytes] = {}
        """Of messages that were not found."""
        self.timers_left: set[bytes] = set()
        """Timers on pages that a damaged page led to, once `messages` was read."""
        self._overlay = Overlay()
        self._segments: dict[int, int] = {}
        """Open files."""
        self._journal_read = 0
        paths = self._find_segments()
        self._journal_size = sum(path.stat().st_size for path in paths.values())
        self._trees: dict[bytes, Tree] = {}
        self._file = self._open_checkpoint(may_be_new=not folder.has_journal(data))
        try:
            position, salt = self._read_values()
            self._read_journal(paths, position, salt)
        except BaseException:
            self.close()
            raise
        self.recovered = laid_over(self.recovered, self._overlay.layers)
        self._gone = {key for layer in self._overlay.layers for key in layer.gone}
        self._marks_of_journal = [layer.marks for layer in reversed(self._overlay.layers) if layer.marks]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        while self._segments:
            os.close(self._segments.popitem()[1])

    def _found(self, file: str, what: str) -> None:
        self.damages += 1
        self._tell(Finding(file, what))

    def _in_checkpoint(self, what: str) -> None:
        self._found(CHECKPOINT, what)

    def _say_how_far(self) -> None:
        pages, size, seen = 0, 1, 0
        if self._file is not None:
            pages, size, seen = self._file.pages, self._file.meta.page_size, self._file.seen
        self._report(self._journal_read + seen * size, self._journal_size + pages * size)

    # ---- The checkpoint but for its messages ----

    def _open_checkpoint(self, *, may_be_new: bool) -> LmdbFile | None:
        path = self._data / CHECKPOINT
        exists = path.exists()
        if may_be_new and not (exists and path.stat().st_size and not holds_nothing(path)):
            raise empty(self._data)
        if not exists:
            self._in_checkpoint("it is missing")
            return None
        states, what = metas(path)
        if what:
            self._in_checkpoint(what)
        return LmdbFile(path, states[0], self._in_checkpoint) if states else None

    def _read_values(self) -> tuple[Position | None, int | None]:
        """How far into the journal the checkpoint reaches, and the salt, as far as they are known."""
        damages = self.damages
        values: dict[bytes, dict[bytes, bytes]] = {name: {} for name in _SMALL}
        if self._file is not None:
            self._file.read_free()
            self._trees = _trees(self._file, self._in_checkpoint)
            for name, of_database in values.items():
                of_database.update(self._sealed(name))
            if self.damages > damages:
                for name, of_database in self._unreached_values(self._file).items():
                    values[name] = of_database | values[name]
        meta = values[b"meta"]
        version = meta.get(b"format", FORMAT.pack(FORMAT_VERSION))
        if version != FORMAT.pack(FORMAT_VERSION):
            raise other_format(self._data, int.from_bytes(version), FORMAT_VERSION)
        for name in META:
            if name not in meta:
                self._in_checkpoint(f"{name.decode()} is missing in meta")
        self.recovered = recovered_of(_UNKNOWN | meta, values[b"queues"].items(), values[b"producers"].items())
        for name, counts in self._counts.items():
            counts.update({lane: NUMBER.unpack(value)[0] for lane, value in values[name].items()})
        self._generation = meta.get(b"generation")
        position = position_of(meta) if all(name in meta for name in POSITION) else None
        self._segment_bytes = NUMBER.unpack(meta.get(b"segment bytes", NUMBER.pack(0)))[0]
        return position, SALT.unpack(meta[b"salt"])[0] if b"salt" in meta else None

    def _walk(self, name: bytes) -> Iterator[Leaf]:
        tree = self._trees.get(name)
        if self._file is None or tree is None:
            return
        for number, leaf in enumerate(self._file.walk(tree, name.decode())):
            if number % 1000 == 0:
                self._say_how_far()
            yield leaf

    def _sealed(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        for leaf in self._walk(name):
            # Formats 1 and 2 had no checksums.
            if leaf.key == b"format" and len(leaf.value) == FORMAT.size:
                yield leaf.key, leaf.value
                continue
            try:
                yield leaf.key, unseal(name, leaf.key, leaf.value)
            except DamagedValue as error:
                self._in_checkpoint(f"page {leaf.page}: {error}")

    def _unreached_values(self, file: LmdbFile) -> dict[bytes, dict[bytes, bytes]]:
        """Small values that a damaged page led to, by database. Walks through the whole checkpoint for that."""
        values: dict[bytes, dict[bytes, bytes]] = {name: {} for name in _SMALL}
        again = LmdbFile(self._data / CHECKPOINT, file.meta, _ignore)
        try:
            again.read_free()
            for tree in _trees(again, _ignore).values():
                for _ in again.walk(tree, ""):
                    pass
            for leaf in again.unreached() if again.knows_free else ():
                for name, of_database in values.items():
                    with suppress(DamagedValue):
                        of_database[leaf.key] = unseal(name, leaf.key, leaf.value)
        finally:
            again.close()
        return values

    # ---- The journal ----

    def _find_segments(self) -> dict[int, Path]:
        paths = {}
        for path in sorted((self._data / "journal").glob("*.journal")):
            try:
                paths[int(path.stem, 16)] = path
            except ValueError:
                self._found(f"journal/{path.name}", "it is not named as a segment is")
        return paths

    def _read_journal(self, paths: dict[int, Path], position: Position | None, salt: int | None) -> None:
        if position is not None:
            for segment in [segment for segment in paths if segment <= position.segment]:
                self._journal_read += paths.pop(segment).stat().st_size
            if position.segment and not paths:
                self._found("journal", f"segment {position.segment + 1:016x} is missing")
                return
        if not paths:
            self._look_at_end(0, position)
            return
        if salt is None:
            salt = _salt(paths)
            if salt is None:
                self._found("journal", "it cannot be read without the salt of its checksums")
                return
            self.notes.append("the salt of the journal's checksums was worked out from the journal")
        # Without a position any segment may be in the checkpoint already: it then counts as one that is being moved.
        self._overlay.moving = position.segment + 1 if position is not None else _NEVER_MOVED
        expected = position.segment + 1 if position is not None else min(paths)
        last = position.frame if position is not None else None
        for segment, path in paths.items():
            if segment != expected:
                self._found("journal", f"segments {expected:016x} to {segment - 1:016x} are missing")
            expected = segment + 1
            last = self._read_segment(segment, path, last, salt, is_newest=segment == max(paths))
            self._journal_read += path.stat().st_size
            self._say_how_far()
        self._look_at_end(last or 0, position)

    def _look_at_end(self, last: int, position: Position | None) -> None:
        """`last` is the number of the last frame, 0 if there is none."""
        if self._is_last_flipped:
            # That one is known to be damaged.
            return
        written = position.written if position is not None else 0
        missing = missing_at_end(last, written, self._history, self._history_told)
        if missing:
            self._found("journal", missing)
        elif self._torn:
            self.notes.append(self._torn)

    def _read_segment(self, segment: int, path: Path, last: int | None, salt: int, *, is_newest: bool) -> int | None:
        """Number of the last frame so far."""
        name = f"journal/{path.name}"
        self._segments[segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        held, unread = _read(self._segments[segment])
        for at in unread:
            self._found(name, f"the disk does not give {READ_BYTES} bytes from byte {at} on")
        if len(held) < self._segment_bytes:
            self._found(name, cut(segment, len(held), self._segment_bytes))
        content = memoryview(held)
        offset = 0
        while True:
            number, payload = _frame(content, offset, segment, salt, last)
            if payload is None:
                behind = self._next_frame(held, offset, segment, salt, last, name)
                if behind is None:
                    break
                self._found(name, f"bytes {offset} to {behind - 1} cannot be read, and a good frame follows")
                offset = behind
                number, payload = _frame(content, offset, segment, salt, last)
                assert payload is not None, "it was found there"
            if last is not None and number != last + 1:
                missing = f"frame {last + 1} is" if number == last + 2 else f"frames {last + 1} to {number - 1} are"
                self._found(name, f"{missing} missing in front of byte {offset}")
            last = number
            self._take_batch(payload, segment, offset + FRAME.size, name)
            offset += FRAME.size + len(payload)
        if last is not None and is_flipped(content, offset, segment, last + 1, salt):
            self._found(name, f"one bit of frame {last + 1} at byte {offset} is wrong")
            self._is_last_flipped = is_newest
        elif last is not None and self._segment_bytes <= len(held) < needed_by_first(content, segment, last + 1):
            self._found(name, cut(segment, len(held), needed_by_first(content, segment, last + 1)))
        elif is_newest and len(held) > offset + FRAME.size and FRAME.unpack_from(held, offset)[2] == segment:
            self._torn = (
                f"{name} ends, at byte {offset}, with what a crash left of a batch that nobody was told of; the next "
                "start cuts it off"
            )
        return last

    def _take_batch(self, payload: memoryview, segment: int, offset: int, name: str) -> None:
        try:
            batch = changes.decode(payload)
        except ValueError as error:
            self._found(name, f"the batch at byte {offset} cannot be read: {error}")
            return
        self._overlay.add(batch, segment, offset)
        self._history = batch.history or self._history
        self.batches += 1

    def _next_frame(
        self, held: bytearray, offset: int, segment: int, salt: int, last: int | None, name: str
    ) -> int | None:
        """Where the first good frame behind `offset` begins."""
        content = memoryview(held)
        needle = _NEEDLE.pack(segment)
        left = SEARCH_BYTES_MAX
        at = held.find(needle, offset + SEGMENT_AT)
        while at >= 0:
            start = at - SEGMENT_AT
            if start + FRAME.size <= len(held):
                if _frame(content, start, segment, salt, last)[1] is not None:
                    return start
                left -= min(FRAME.unpack_from(held, start)[1], len(held) - start)
            if left < 0:
                self._found(name, f"what stands behind byte {start} was not searched: too much looks like a frame")
                return None
            at = held.find(needle, at + 1)
        return None

    # ---- Messages ----

    def messages(self) -> Iterator[Kept]:
        """Those of the checkpoint in the order of their keys, persistent ones first, those that damaged pages led to,
        those of the journal. Transients are among them, whether or not a start would drop them, and so are contents. A
        copy comes behind its content; only a damaged checkpoint has one twice.
        """
        waiting: list[Kept] = []
        for kept in self._all():
            if kept.damage or not (number := reference_of(kept.record)):
                if not kept.damage and kept.key.startswith(CONTENTS):
                    self.contents.add(sequence_of(kept.key), kept.mark.attempts)
                yield kept
            elif self.contents.refer(number):
                yield kept
            else:
                # Its content may stand on a page that a damaged one led to.
                waiting.append(kept)
        for kept in waiting:
            number = reference_of(kept.record)
            if not self.contents.refer(number):
                kept.damage = f"its content, number {number}, is missing or damaged"
                self._found(kept.file, f"{self.described(kept.key)} is damaged: {kept.damage}")
            yield kept
        for number, said, found in self.contents.wrong():
            referred = "nothing refers to it" if not found else f"{found} messages refer to it"
            self._found("contents", f"content {number} is said to have {said} references, and {referred}")
        self._report(1, 1)

    def _all(self) -> Iterator[Kept]:
        yield from self._of_checkpoint(b"messages", b"marks", b"counts", are_transient=False)
        yield from self._of_checkpoint(b"transients", b"transient marks", b"transient counts", are_transient=True)
        if self._file is not None and self.damages:
            yield from self._unreached(self._file)
        for key in self._marks_left:
            if key[-MESSAGE_KEY_SIZE:] not in self._gone:
                self._in_checkpoint(f"{self.described(key[-MESSAGE_KEY_SIZE:])} has a mark, and is missing")
        for key, place in self._overlay.messages():
            record = os.pread(self._segments[place.segment], place.length, place.offset)
            mark = mark_of(key, self._marks_of_journal) or NO_MARK
            file = f"journal/{place.segment:016x}.journal"
            yield self._looked_at(Kept(key, record, place.is_transient, mark, file))
        if self.highest >= self.recovered.sequence_limit:
            self._in_checkpoint(f"message {self.highest} is not below the limit {self.recovered.sequence_limit}")

    def timers(self) -> Iterator[bytes]:
        """The journal's laid over those of the checkpoint. Only a damaged checkpoint has one twice, or out of order."""
        return self._overlay.timer_view().behind(b"", self._timers_of_checkpoint())

    def _timers_of_checkpoint(self) -> Iterator[bytes]:
        for timer, _ in self._sealed(b"timers"):
            if len(timer) == TIMER_SIZE:
                yield timer
            else:
                self._in_checkpoint(f"{timer.hex()} is no timer")

    def _of_checkpoint(
        self, name: bytes, marks_name: bytes, counts_name: bytes, *, are_transient: bool
    ) -> Iterator[Kept]:
        """What is there of one kind, held against what the checkpoint says of it."""
        there: Counter[bytes] = Counter()
        marks = self._sealed(marks_name)
        mark = next(marks, None)
        for leaf in self._walk(name):
            while mark is not None and mark[0] < leaf.key:
                self._leave_mark(*mark, are_transient=are_transient)
                mark = next(marks, None)
            own = None
            if mark is not None and mark[0] == leaf.key:
                own, mark = mark[1], next(marks, None)
            if are_transient and not self._is_current(leaf.key):
                self.left_over += 1
                continue
            key = leaf.key[GENERATION.size :] if are_transient else leaf.key
            if len(key) != MESSAGE_KEY_SIZE:
                self._in_checkpoint(f"page {leaf.page}: {leaf.key.hex()} is no key of a message")
                continue
            there[key[:LANE_KEY_SIZE]] += 1
            yield from self._moved(key, leaf.value, own, is_transient=are_transient)
        while mark is not None:
            self._leave_mark(*mark, are_transient=are_transient)
            mark = next(marks, None)
        counts = self._counts[counts_name]
        for lane in sorted(counts.keys() | there.keys()):
            if counts.get(lane, 0) != there[lane]:
                counted = counts.get(lane, 0)
                self._in_checkpoint(
                    f"{self._lane(lane)}: {there[lane]} {name.decode()} are there, {counted} are counted"
                )

    def _unreached(self, file: LmdbFile) -> Iterator[Kept]:
        """Messages on pages that a damaged page led to."""
        if not file.knows_free:
            if file.unused:
                self.notes.append(
                    f"{file.unused} pages of {CHECKPOINT} were left out: nobody knows whether they are free"
                )
            return
        of_journal = self._overlay.timer_view()
        # Their marks first, wherever these stand.
        for leaf in file.unreached():
            for name, are_transient in ((b"marks", False), (b"transient marks", True)):
                with suppress(DamagedValue):
                    self._leave_mark(leaf.key, unseal(name, leaf.key, leaf.value), are_transient=are_transient)
        for leaf in file.unreached():
            if len(leaf.key) == TIMER_SIZE and len(self.timers_left) < TIMERS_LEFT_MAX:
                with suppress(DamagedValue):
                    unseal(b"timers", leaf.key, leaf.value)
                    if not of_journal.knows(leaf.key):
                        self.timers_left.add(leaf.key)
            is_transient = len(leaf.key) == GENERATION.size + MESSAGE_KEY_SIZE
            key = leaf.key[GENERATION.size :] if is_transient else leaf.key
            if len(key) != MESSAGE_KEY_SIZE or (is_transient and not self._is_current(leaf.key)):
                continue
            if not _damage(key, leaf.value):
                yield from self._moved(key, leaf.value, self._marks_left.pop(leaf.key, None), is_transient=is_transient)

    def _is_current(self, key: bytes) -> bool:
        """A transient is of the generation that counts. Where nobody knows which that is, all are kept."""
        return self._generation is None or key[: GENERATION.size] == self._generation

    def _leave_mark(self, key: bytes, mark: bytes, *, are_transient: bool) -> None:
        if (not are_transient or self._is_current(key)) and len(self._marks_left) < MARKS_LEFT_MAX:
            self._marks_left[key] = mark

    def _moved(self, key: bytes, record: bytes, mark: bytes | None, *, is_transient: bool) -> Iterator[Kept]:
        """A message of the checkpoint, unless the journal says that it is gone, or has it itself."""
        if key in self._gone or self._overlay.kind(key) is not None:
            return
        own = mark_of(key, self._marks_of_journal) or (Mark(*MARK.unpack(mark)) if mark else NO_MARK)
        yield self._looked_at(Kept(key, record, is_transient, own, CHECKPOINT))

    def _looked_at(self, kept: Kept) -> Kept:
        kept.damage = _damage(kept.key, kept.record)
        if kept.damage:
            self._found(kept.file, f"{self.described(kept.key)} is damaged: {kept.damage}")
            return kept
        self.highest = max(self.highest, sequence_of(kept.key))
        if kept.key.startswith(CONTENTS):
            return kept
        number = split_lane_key(kept.key[:LANE_KEY_SIZE])[0]
        if number not in self.recovered.queues and number not in self.nameless:
            self.nameless.add(number)
            self._found(kept.file, f"queue {number} has messages and no name")
        return kept

    # ---- In words ----

    def described(self, key: bytes) -> str:
        """A message, for people."""
        if key.startswith(CONTENTS):
            return f"content {sequence_of(key)}"
        return f"message {sequence_of(key)} of {self._lane(key[:LANE_KEY_SIZE])}"

    def _lane(self, lane: bytes) -> str:
        if lane == CONTENTS:
            return "contents"
        number, rank = split_lane_key(lane)
        name = self.recovered.queues.get(number)
        return f"queue {number if name is None else repr(name)}, priority {PRIORITY_MAX - rank}"


def _trees(file: LmdbFile, found: Callable[[str], None]) -> dict[bytes, Tree]:
    trees: dict[bytes, Tree] = {}
    for leaf in file.walk(file.meta.main, "list of databases"):
        if leaf.key in DATABASES and leaf.key not in trees and len(leaf.value) == TREE_BYTES:
            trees[leaf.key] = Tree.of(leaf.value)
        else:
            found(f"page {leaf.page}: {leaf.key!r} is no database of a store")
    for name in DATABASES:
        if name not in trees:
            found(f"the database {name.decode()} is missing")
    return trees


def _frame(
    content: memoryview, offset: int, segment: int, salt: int, last: int | None
) -> tuple[int, memoryview | None]:
    """Number and payload of the frame at `offset`, if there is one that comes later than `last`."""
    if offset + FRAME.size > len(content):
        return 0, None
    number: int = FRAME.unpack_from(content, offset)[3]
    if last is not None and number <= last:
        return 0, None
    return number, payload_at(content, offset, segment, number, salt)


def _salt(paths: dict[int, Path]) -> int | None:
    """What all checksums began with: the number on which most of the frames that begin the segments agree."""
    found: Counter[int] = Counter()
    for segment, path in paths.items():
        with path.open("rb", buffering=0) as file:
            content = memoryview(_read(file.fileno())[0])
        offset = 0
        for _ in range(2):
            if offset + FRAME.size > len(content):
                break
            checksum, size, in_segment, _ = FRAME.unpack_from(content, offset)
            end = offset + FRAME.size + size
            if in_segment != segment or end > len(content) or size > FLIP_BYTES_MAX:
                break
            found[begin_of(content[offset + CHECKSUM.size : end], checksum)] += 1
            offset = end
    if not found:
        return None
    (salt, votes), *_ = found.most_common(1)
    # One alone may be damaged, and gives some number even then.
    return salt if votes > 1 else None


def _read(file: int) -> tuple[bytearray, list[int]]:
    """A file as far as the disk gives it, zeros for the rest, and where those are."""
    content = bytearray(os.fstat(file).st_size)
    unread = []
    for offset in range(0, len(content), READ_BYTES):
        try:
            block = os.pread(file, READ_BYTES, offset)
        except OSError:
            unread.append(offset)
        else:
            content[offset : offset + len(block)] = block
    return content, unread


def _damage(key: bytes, record: bytes) -> str:
    try:
        verify(key, record)
    except DamagedRecord as error:
        return str(error)
    return ""


def _ignore(_: str) -> None:
    pass
