"""Benchmark of an upgrade: a start on a data folder of the format before, beside a restart after an unclean stop.

The folder has a million messages of 1 KiB, of which each tenth one has a mark, and a timer for each thousand. There is
no format before yet, so that one is made for this benchmark: a step that converts all that a step may convert, every
value but the messages. Both are measured from the start of the process to `listening on`, in turns on one folder.

python -m bench.upgrade --messages 1000000 --runs 5
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import lmdb

from bench.options import positive
from truenext.cli.main import main as truenext
from truenext.model.batch import Batch, Mark, ProducerState
from truenext.model.message import SentMessage
from truenext.model.record import encode_record, lane_key, message_key, timer_key
from truenext.store.checkpoint_format import (
    DATABASES,
    DATABASES_MAX,
    FORMAT,
    FORMAT_VERSION,
    PERSISTENT_TABLES,
    TRANSIENT_TABLES,
    decode_mark,
    encode_mark,
)
from truenext.store.checksummed import ChecksummedDatabase
from truenext.store.embedded import EmbeddedStore
from truenext.store.upgrade import steps
from truenext.store.upgrade.steps import Conversion, Entry, Step

TARGET = 3.0
"""Largest ratio of an upgrade to a restart."""
_BATCH = 500
_QUEUES = 20
_FORMAT_BEFORE = FORMAT_VERSION - 1
_SERVE = ("serve", "--listen", "stomp://127.0.0.1:0", "--data")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.upgrade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=positive, default=1_000_000, metavar="N")
    parser.add_argument("--marked-every", type=positive, default=10, metavar="N", help="one message in N has a mark")
    parser.add_argument("--runs", type=positive, default=5, metavar="N")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the data goes (default: temp folder)")
    parser.add_argument("--serve", type=Path, metavar="DATA", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        steps.STEPS = (_step(),)
        truenext([*_SERVE, str(options.serve)])
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        data = Path(folder) / "data"
        _fill(data, options.messages, options.marked_every)
        _start(data)
        restarts, upgrades = [], []
        for _ in range(options.runs):
            restarts.append(_start(data))
            _make_earlier(data)
            upgrades.append(_start(data))
    print(f"{options.messages:,} messages, one in {options.marked_every} marked")
    for name, at in (("time", 0), ("processor time", 1)):
        restart, converted = (statistics.median(each[at] for each in starts) for starts in (restarts, upgrades))
        ratio = converted / restart
        print(f"{name}: restart {restart:.2f} s, upgrade {converted:.2f} s, ratio {ratio:.2f} (at most {TARGET:g})")
    return 0


def _fill(data: Path, messages: int, marked_every: int) -> None:
    store = EmbeddedStore(data)
    store.recover()
    lanes = [lane_key(queue + 1, 5) for queue in range(_QUEUES)]
    names = {queue + 1: f"bench.{queue}" for queue in range(_QUEUES)}
    for number, first in enumerate(range(1, messages + 1, _BATCH), 1):
        batch = Batch(number)
        batch.queues = names if number == 1 else {}
        batch.clean_stop = False if number == 1 else None
        for sequence in range(first, min(first + _BATCH, messages + 1)):
            lane = lanes[sequence % _QUEUES]
            key = message_key(lane, sequence)
            header = b"destination:/queue/bench\ncontent-length:1024\n"
            batch.puts[key] = encode_record(key, SentMessage(4, True, 0, header, b"x" * 1024, 1_700_000_000_000))
            if sequence % marked_every == 0:
                batch.marks[key] = Mark(1, 2)
            if sequence % 1000 == 0:
                batch.timers[timer_key(4_000_000_000_000 + sequence, lane, sequence)] = None
        batch.producers = {f"bench {number}": ProducerState(number, 1_700_000_000_000)}
        batch.sequence_limit = messages + 1_000_000 if number == 1 else 0
        store.apply(batch)
    store.close()


def _start(data: Path) -> tuple[float, float]:
    """Return the seconds from the start of a broker until it listens, and those of its processor time. It is killed
    then."""
    began, used = time.monotonic(), _processor_time()
    command = [sys.executable, "-m", "bench.upgrade", "--serve", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - began
        process.kill()
    assert line.startswith(b"listening on"), line
    return seconds, _processor_time() - used


def _processor_time() -> float:
    """Return the processor time of the processes that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _make_earlier(data: Path) -> None:
    with (
        lmdb.open(str(data / "lmdb"), max_dbs=DATABASES_MAX, lib_version=0) as env,
        env.begin(write=True) as txn,
    ):
        meta = ChecksummedDatabase(env.open_db(b"meta", txn=txn), b"meta", data)
        meta.put(txn, b"format", FORMAT.pack(_FORMAT_BEFORE))


def _step() -> Step:
    marks = (PERSISTENT_TABLES.marks, TRANSIENT_TABLES.marks)
    records = (b"meta", PERSISTENT_TABLES.messages, TRANSIENT_TABLES.messages)
    return Step(
        source=_FORMAT_BEFORE,
        target=FORMAT_VERSION,
        conversions=tuple(
            Conversion(name, _convert_mark if name in marks else _convert) for name in DATABASES if name not in records
        ),
    )


def _convert_mark(key: bytes, value: bytes) -> Entry:
    return key, encode_mark(*decode_mark(value))


def _convert(key: bytes, value: bytes) -> Entry:
    return key, value


if __name__ == "__main__":
    sys.exit(main())
