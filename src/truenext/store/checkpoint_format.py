"""Format of the checkpoint in LMDB: its databases, their keys and their values.

Numbers are big-endian. If you change anything here, increase FORMAT_VERSION, and add a step to upgrade/steps.py.

    messages            message key (record.py)             ->  record                      of persistent messages
    transients          generation u32, message key         ->  record                      of transient messages
    marks               message key                         ->  attempts u32, deliveries u32, due u64   see below
    transient marks     generation u32, message key         ->  attempts u32, deliveries u32, due u64   of transients
    counts              lane key (record.py)                ->  messages u64                no entry for an empty lane
    transient counts    lane key                            ->  transients u64              of the current generation
    queues              queue number u32                    ->  name
    timers              timer (record.py)                   ->  nothing                     but the checksum
    producers           BLAKE2b-128 of the name             ->  MessagePack: name, ProducerState (batch.py)
    meta                "format"                            ->  u32     FORMAT_VERSION
                        "identity"                          ->  eight hexadecimal digits
                        "salt"                              ->  u32     of the journal
                        "segment"                           ->  u64     last segment that is completely copied here
                        "frame"                             ->  u64     number of this segment's last frame
                        "durable frame"                     ->  u64     number of a frame that was durable, see below
                        "segment bytes"                     ->  u64     minimum size of a segment's file
                        "generation"                        ->  u32     of the transients that count
                        "sequence limit"                    ->  u64
                        "redelivered below"                 ->  u64
                        "clean stop"                        ->  u8      0 or 1
                        "paused"                            ->  queue number u32, of each paused queue, in order
                        "log digest"                        ->  digest of the row of the frame in "frame", see below
                        "upgrade"                           ->  position of an upgrade, see upgrade/upgrade.py

Contents (record.py) are stored among the messages: persistent contents among persistent messages, transient ones among
transient messages. All values but the records carry a checksum, see checksummed.py. The keys in meta exist from the
start, but for the last two.

All frames up to the number in "durable frame" were durable when the number was stored, and stay durable. So the number
is never lowered (docs/decisions/0019-damage.md).

The first bit of a mark's attempts says that the last attempt ended with a lost connection. If consumers have given
causes of their failures, three fields follow the mark: number of bytes of the first cause u32, first cause, last cause.
The last cause is left out if it equals the first. Causes are UTF-8.

A transient message counts only if its generation is the one in meta.

Only this format is read; a broker converts a folder of one of the two formats before to it (upgrade/steps.py). Any
other format number is rejected before anything is changed.

A folder that is a copy of a log (log.py) has the number COPY_FORMAT and the key "log digest"; all else is the same. So
no broker uses a copy without its log, also no broker of an older version. A copy of OLD_COPY_FORMAT becomes one of
COPY_FORMAT when it is opened.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, Causes, Mark, ProducerState
from truenext.store.store import Recovered

DATA_FILE = "data.mdb"

FORMAT_VERSION = 12

COPY_FORMAT = 14
"""Format number of a folder that is a copy of a log."""

OLD_COPY_FORMAT = 13
"""Format number of a copy whose frames have no takeover."""

LOG_FORMAT = COPY_FORMAT
"""Format of the rows of a log."""

UNFINISHED = 1 << 31
"""Mark in the format number of a folder that is being converted to the format of the other bits."""

LOG_DIGEST = b"log digest"

DATABASES = (
    b"meta",
    b"messages",
    b"transients",
    b"marks",
    b"transient marks",
    b"counts",
    b"transient counts",
    b"queues",
    b"producers",
    b"timers",
)
DATABASES_MAX = len(DATABASES)


class MessageTableNames(NamedTuple):
    """Names of the LMDB databases for one kind of messages, persistent or transient."""

    messages: bytes
    marks: bytes
    counts: bytes
    is_transient: bool


PERSISTENT_TABLES = MessageTableNames(b"messages", b"marks", b"counts", is_transient=False)
TRANSIENT_TABLES = MessageTableNames(b"transients", b"transient marks", b"transient counts", is_transient=True)

FORMAT = struct.Struct(">I")
QUEUE = struct.Struct(">I")
SALT = struct.Struct(">I")
GENERATION = struct.Struct(">I")
NUMBER = struct.Struct(">Q")
_MARK = struct.Struct(">IIQ")
_LOST_FLAG = 1 << 31
_CAUSE_SIZE = struct.Struct(">I")
CLEAN, UNCLEAN = b"\1", b"\0"


def new_identity() -> str:
    """Return an identity for a store that no other store has."""
    return secrets.token_hex(4)


def initial_meta(identity: bytes, salt: bytes, segment_bytes: int) -> dict[bytes, bytes]:
    """Return the initial content of the database `meta` for a new checkpoint."""
    return {
        b"format": FORMAT.pack(FORMAT_VERSION),
        b"identity": identity,
        b"salt": salt,
        b"segment": NUMBER.pack(0),
        b"frame": NUMBER.pack(0),
        b"durable frame": NUMBER.pack(0),
        b"segment bytes": NUMBER.pack(segment_bytes),
        b"generation": GENERATION.pack(0),
        b"sequence limit": NUMBER.pack(1),
        b"redelivered below": NUMBER.pack(0),
        b"clean stop": CLEAN,
        b"paused": b"",
    }


META_KEYS = tuple(initial_meta(b"", b"", 0))
"""Keys in the database `meta`, all of which exist from the start."""

decode_producer = msgspec.msgpack.Decoder(tuple[str, ProducerState]).decode


def encode_mark(mark: Mark, causes: Causes = NO_CAUSES) -> bytes:
    value = _MARK.pack(mark.attempts | _LOST_FLAG if mark.was_lost else mark.attempts, mark.deliveries, mark.due_ms)
    if causes is NO_CAUSES:
        return value
    first = causes.first.encode()
    last = b"" if causes.last == causes.first else causes.last.encode()
    return b"%b%b%b%b" % (value, _CAUSE_SIZE.pack(len(first)), first, last)


def decode_mark(value: bytes) -> tuple[Mark, Causes]:
    attempts, deliveries, due_ms = _MARK.unpack_from(value)
    mark = Mark(attempts & ~_LOST_FLAG, deliveries, due_ms, attempts >= _LOST_FLAG)
    if len(value) == _MARK.size:
        return mark, NO_CAUSES
    first_at = _MARK.size + _CAUSE_SIZE.size
    last_at = first_at + _CAUSE_SIZE.unpack_from(value, _MARK.size)[0]
    first = value[first_at:last_at].decode()
    return mark, Causes(first, value[last_at:].decode() or first)


class CheckpointPosition(msgspec.Struct, frozen=True):
    """Position in the journal up to which the checkpoint has all changes."""

    segment: int
    frame: int
    durable_frame: int = 0
    """Number of a frame known to be durable: `frame`, or a later one."""
    digest: bytes = b""
    """Digest of the log's row of `frame`; empty if the folder is no copy of a log."""


POSITION_KEYS = (b"segment", b"frame", b"durable frame")
"""Keys in the database `meta` that make up a CheckpointPosition."""


def decode_position(meta: Mapping[bytes, bytes]) -> CheckpointPosition:
    """Return the position stored in `meta`, which must have all of POSITION_KEYS."""
    segment, frame, durable_frame = (NUMBER.unpack(meta[name])[0] for name in POSITION_KEYS)
    return CheckpointPosition(segment, frame, durable_frame, meta.get(LOG_DIGEST, b""))


def decode_recovered(
    meta: Mapping[bytes, bytes], queues: Iterable[tuple[bytes, bytes]], producers: Iterable[tuple[bytes, bytes]]
) -> Recovered:
    """Return the checkpoint's own state, without the counts of messages. `meta` must have all of META_KEYS. `queues`
    and `producers` are the entries of these databases."""
    return Recovered(
        identity=meta[b"identity"].decode(),
        clean_stop=meta[b"clean stop"] == CLEAN,
        sequence_limit=NUMBER.unpack(meta[b"sequence limit"])[0],
        redelivered_below=NUMBER.unpack(meta[b"redelivered below"])[0],
        paused=decode_paused(meta[b"paused"]),
        queues={QUEUE.unpack(key)[0]: name.decode() for key, name in queues},
        producers=dict(decode_producer(value) for _, value in producers),
    )


def format_error(data: Path, found: int, expected: int) -> StoreError:
    """Make the error for the data folder `data` of another format. `found` is the number in its checkpoint."""
    if found & UNFINISHED:
        return StoreError(
            f"the upgrade of the store in {data} to format {found & ~UNFINISHED} was interrupted: start a broker of "
            "the version that has begun it, which goes on with it, or restore a backup from before"
        )
    advice = (
        "use the version that wrote it, or a later one"
        if found > expected
        else "use the version that wrote it, or let a broker convert it that reads both (docs/upgrade.md)"
    )
    return StoreError(
        f"the store in {data} has format {found}; this truenext reads format {expected}: {advice}, or name another "
        "data folder"
    )


def decode_paused(value: bytes) -> set[int]:
    return {number for (number,) in QUEUE.iter_unpack(value)}


def encode_paused(paused: Iterable[int]) -> bytes:
    """Encode the numbers of paused queues. `decode_paused` is the reverse."""
    return b"".join(map(QUEUE.pack, sorted(paused)))


def producer_key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def encode_producer(name: str, state: ProducerState) -> bytes:
    return msgspec.msgpack.encode((name, state))
