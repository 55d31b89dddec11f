"""Layout of a batch in the journal, and removal of contents by a batch (a content is the part that copies of a message
share).

Little-endian, in this order:

    puts                u32     numbers of the entries that follow
    transient puts      u32
    removes             u32
    transient removes   u32
    rare                u32     bytes
    history             u32     bytes
    each put            key (13 bytes, record.py), length of the record u32, record
    each remove         key
    rare                nothing, or a MessagePack map: `RareChanges`
    history             nothing, or a chunk of the history: events.py

If you change anything here, or the name of a field of `RareChanges`, increase FORMAT_VERSION in
checkpoint_format.py.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from copy import copy

import msgspec

from truenext.model.batch import Batch, Causes, Mark, ProducerState
from truenext.model.record import MESSAGE_KEY_SIZE, sequence_of
from truenext.store.store_errors import disagreement_error

_HEAD = struct.Struct("<IIIIII")
_PUT = struct.Struct(f"<{MESSAGE_KEY_SIZE}sI")

PUTS_OFFSET = _HEAD.size

PUT_HEADER_BYTES = _PUT.size
"""Number of bytes of a put that precede its record."""


class Takeover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Takeover of a log by a broker. The nonce makes its row another one than that of each other takeover."""

    epoch: int
    member: str
    system: int
    """System identifier of the database; 0 if it is unknown."""
    timeline: int
    nonce: bytes


class RareChanges(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Changes that most batches do not have. Each field corresponds to the field of `Batch` with this name. The names
    are stored.

    A field with an unknown name is rejected. Otherwise salvage could drop changes silently, because a journal without
    its checkpoint does not reveal its format.
    """

    marks: dict[bytes, Mark] = {}
    causes: dict[bytes, tuple[int, int]] = {}
    """Causes by message key: the index in `texts` of the first cause, and of the last. So a text is stored once, even
    if one NACK is the cause for many messages."""
    texts: list[str] = []
    """Texts of causes. Index 0, the empty text, stands for no cause."""
    unmarks: list[bytes] = []
    queues: dict[int, str] = {}
    paused: dict[int, bool] = {}
    producers: dict[str, ProducerState] = {}
    forgotten_producers: list[str] = []
    timers: list[bytes] = []
    cleared_timers: list[bytes] = []
    sequence_limit: int = 0
    redelivered_below: int = 0
    clean_stop: bool | None = None
    drops_transients: bool = False
    """True if all transient messages put so far are dropped, because the run before this one did not stop cleanly."""
    takeover: Takeover | None = None
    """Takeover of the log by this row. It changes no state of the store."""


class Changes(msgspec.Struct, gc=False):
    """Changes of a batch, without its records. The records stay in the journal, and are read when they are needed."""

    puts: list[tuple[bytes, int]]
    """Key and record length of each put, in the order of the records."""
    transient_puts: list[tuple[bytes, int]]
    removes: list[bytes]
    transient_removes: list[bytes]
    rare: RareChanges | None
    history: bytes = b""

    count: int = 0

    def __post_init__(self) -> None:
        self.count = len(self.puts) + len(self.transient_puts) + len(self.removes) + len(self.transient_removes)
        rare = self.rare
        if rare is not None:
            self.count += len(rare.marks) + len(rare.unmarks) + len(rare.queues) + len(rare.paused)
            self.count += len(rare.producers) + len(rare.forgotten_producers)
            self.count += len(rare.timers) + len(rare.cleared_timers)


def takeover_of(changes: Changes | None) -> Takeover | None:
    return None if changes is None or changes.rare is None else changes.rare.takeover


_encode_rare = msgspec.msgpack.Encoder().encode
_decode_rare = msgspec.msgpack.Decoder(RareChanges).decode


def changes_of(batch: Batch) -> Changes:
    return Changes(
        puts=[(key, len(record)) for key, record in batch.puts.items()],
        transient_puts=[(key, len(record)) for key, record in batch.transient_puts.items()]
        if batch.transient_puts
        else [],
        removes=batch.removes,
        transient_removes=batch.transient_removes,
        rare=_rare_changes_of(batch),
    )


def encode_batch(batch: Batch, rare: RareChanges | None) -> list[bytes]:
    """Encode a batch as a list of byte strings, without copying its records. `rare` has the batch's rare changes.
    `decode_changes` is the reverse."""
    rare_bytes = b"" if rare is None else _encode_rare(rare)
    pack = _PUT.pack
    parts = [
        _HEAD.pack(
            len(batch.puts),
            len(batch.transient_puts),
            len(batch.removes),
            len(batch.transient_removes),
            len(rare_bytes),
            len(batch.history),
        )
    ]
    for puts in (batch.puts, batch.transient_puts):
        for key, record in puts.items():
            parts += (pack(key, len(record)), record)
    for keys in (batch.removes, batch.transient_removes):
        if keys:
            parts += keys
    if rare_bytes:
        parts.append(rare_bytes)
    if batch.history:
        parts.append(batch.history)
    return parts


def decode_changes(payload: memoryview) -> Changes:
    """Decode a batch. Raises: ValueError if `payload` is not the exact result of `encode_batch`"""
    try:
        return _decode(payload)
    except (struct.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a batch: {error}") from error


def _decode(payload: memoryview) -> Changes:
    puts, transient_puts, removes, transient_removes, rare_size, history_size = _HEAD.unpack_from(payload)
    keys_at = PUTS_OFFSET
    found: list[tuple[bytes, int]] = []
    for _ in range(puts + transient_puts):
        key, length = _PUT.unpack_from(payload, keys_at)
        found.append((key, length))
        keys_at += PUT_HEADER_BYTES + length
    rare_at = keys_at + MESSAGE_KEY_SIZE * (removes + transient_removes)
    history_at = rare_at + rare_size
    if history_at + history_size != len(payload):
        raise ValueError(f"its head and lengths add up to {history_at + history_size} bytes, but it has {len(payload)}")
    keys = [bytes(payload[at : at + MESSAGE_KEY_SIZE]) for at in range(keys_at, rare_at, MESSAGE_KEY_SIZE)]
    rare = _decode_rare(payload[rare_at:history_at]) if rare_size else None
    if rare is not None and any(not 0 <= at < len(rare.texts) for pair in rare.causes.values() for at in pair):
        raise ValueError("the index of a cause is out of range")
    return Changes(
        puts=found[:puts],
        transient_puts=found[puts:],
        removes=keys[:removes],
        transient_removes=keys[removes:],
        rare=rare,
        history=bytes(payload[history_at:]),
    )


def _rare_changes_of(batch: Batch) -> RareChanges | None:
    if not (
        batch.marks
        or batch.unmarks
        or batch.queues
        or batch.paused
        or batch.producers
        or batch.forgotten_producers
        or batch.timers
        or batch.cleared_timers
        or batch.sequence_limit
        or batch.redelivered_below
        or batch.clean_stop is not None
    ):
        return None
    causes, texts = _number_texts(batch.causes)
    return RareChanges(
        marks=batch.marks,
        causes=causes,
        texts=texts,
        unmarks=batch.unmarks,
        queues=batch.queues,
        paused=batch.paused,
        producers=batch.producers,
        forgotten_producers=batch.forgotten_producers,
        timers=list(batch.timers),
        cleared_timers=batch.cleared_timers,
        sequence_limit=batch.sequence_limit,
        redelivered_below=batch.redelivered_below,
        clean_stop=batch.clean_stop,
    )


def _number_texts(causes: dict[bytes, Causes]) -> tuple[dict[bytes, tuple[int, int]], list[str]]:
    if not causes:
        return {}, []
    numbers = {"": 0}
    found = {
        key: (numbers.setdefault(first, len(numbers)), numbers.setdefault(last, len(numbers)))
        for key, (first, last) in causes.items()
    }
    return found, list(numbers)


def causes_of(rare: RareChanges) -> dict[bytes, Causes]:
    texts = rare.texts
    by_numbers: dict[tuple[int, int], Causes] = {}
    for numbers in rare.causes.values():
        if numbers not in by_numbers:
            first, last = numbers
            by_numbers[numbers] = Causes(texts[first], texts[last])
    return {key: by_numbers[numbers] for key, numbers in rare.causes.items()}


def apply_names(queues: dict[int, str], changes: dict[int, str]) -> dict[int, str]:
    """Return the names of queues by number, after the `changes` of a batch or a segment. An empty name removes a
    queue."""
    return {number: name for number, name in (queues | changes).items() if name}


def apply_pauses(paused: set[int], changes: dict[int, bool]) -> set[int]:
    """Return the numbers of the paused queues, after the `changes` of a batch or a segment."""
    return {number for number in paused | changes.keys() if changes.get(number, True)}


# ---- Removal of a content with its last reference ----
# A content (record.py) is a message of a lane that no queue has, and its mark has the number of its references. So
# journal, overlay, checkpointer and recovery know nothing of contents. The effect of a batch on contents is computed
# here, once, before the batch is written: the journal says how many references are left, never how many were removed,
# so that it can be laid over any state of the checkpoint. Persistent references have a persistent content, transient
# ones a transient content: an unclean stop drops these together.


def dereference_contents(batch: Batch, mark_of: Callable[[bytes], Mark]) -> Batch:
    """Return the batch with all its effects on contents: lower reference counts, and removal of contents without
    references. `mark_of` returns a stored mark.

    Raises: StoreError if a content has fewer references than the batch removes
    """
    if not (batch.dereferenced or batch.transient_dereferenced):
        return batch
    changed = copy(batch)
    changed.dereferenced, changed.transient_dereferenced = [], []
    changed.removes, changed.transient_removes = batch.removes[:], batch.transient_removes[:]
    changed.marks, changed.unmarks = batch.marks.copy(), batch.unmarks[:]
    for keys, removes in (
        (batch.dereferenced, changed.removes),
        (batch.transient_dereferenced, changed.transient_removes),
    ):
        for key, dereferenced in Counter(keys).items():
            left = mark_of(key).attempts - dereferenced
            if left < 0:
                raise disagreement_error(
                    batch.number, f"dereferences content {sequence_of(key)} more often than it has references"
                )
            if left:
                changed.marks[key] = Mark(left, 0)
            else:
                removes.append(key)
                changed.unmarks.append(key)
    return changed
