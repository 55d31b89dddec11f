"""Recording of the system calls of a store, those of LMDB included.

A store runs in a process of its own with recorded_calls.c in front of the system's library. The recorded calls become
the operations of simulated_disk.py. Needs a C compiler.
"""

import atexit
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.crashing import SEGMENT_BYTES, Held, Life, live, random_changes
from tests.contract.simulated_disk import (
    Confirmed,
    Disk,
    Failure,
    HistorySynced,
    Log,
    NotModelled,
    Started,
    quick_folder,
)

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

_ENTRY = struct.Struct("<IIqqQ")
_WRITE, _WRITTEN, _SYNC, _SYNCED, _SYNC_FAILED, _CREATED, _RENAMED, _UNLINKED, _MADE, _MARK, _NOT_MODELLED, _LOST = (
    range(1, 13)
)
_STARTED, _CONFIRMED, _HISTORY_SYNCED = 1, 2, 3


class Job(NamedTuple):
    """One run of a store, as recorded_process.py does it."""

    folder: Path
    """Data folder with the contents from before."""
    log: Path
    segment_bytes: int
    history_chunks: int
    """Number of history chunks after the recovery."""
    batches: list[dict[str, Any]]
    failure: Failure | None
    """Failure of the calls for LMDB's files."""


class Outcome(NamedTuple):
    calls: int
    """Number of calls for LMDB's files."""
    store_error: str
    """Error with which the store stopped confirming batches, or an empty text."""


class Plan(NamedTuple):
    disk: Disk
    may_hold: list[Held]
    models: list[Held]
    batches: list[dict[str, Any]]


@cache
def library() -> Path:
    """recorded_calls.c as a library. Raises: subprocess.CalledProcessError"""
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="truenext-crash-"))
    atexit.register(shutil.rmtree, folder)
    path = folder / "recorded_calls.so"
    subprocess.run([COMPILER, "-O1", "-Wall", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl", "-lpthread"], check=True)
    return path


def plan(disk: Disk, may_hold: list[Held], rng: Any, batches: int, growth: float) -> Plan:
    """Batches that a store on this disk can be given, which is opened once to see what it holds."""
    life, _ = live(disk, may_hold, rng, 0)
    (model,) = life.models
    models, planned = [model], [model.changes({}, [], clean_stop=False)]
    for _ in range(batches):
        model = model.copy()
        model.apply(planned[-1])
        models.append(model)
        planned.append(random_changes(model, rng, growth))
    return Plan(disk, may_hold, models, planned[:-1])


def record(plans: list[Plan], failures: Sequence[Failure | None], fault: str = "") -> list[tuple[Life, Outcome]]:
    """Each plan is lived through, with its failure, by a store with the planted fault of this name."""
    base = Path(tempfile.mkdtemp(dir=quick_folder(), prefix="truenext-crash-"))
    try:
        jobs = []
        for number, (one, failure) in enumerate(zip(plans, failures, strict=True)):
            folder = base / str(number)
            one.disk.make(folder)
            history = len(one.models[0].history)
            jobs.append(Job(folder, base / f"{number}.log", SEGMENT_BYTES, history, one.batches, failure))
        outcomes = run(base, jobs, fault)
        lives = []
        for one, job, outcome in zip(plans, jobs, outcomes, strict=True):
            log = read(job.log, one.disk)
            log.check(job.folder)
            started = sum(isinstance(operation, Started) for operation in log.operations)
            lives.append((Life(one.disk, log.operations, one.may_hold, one.models[: max(1, started)]), outcome))
        return lives
    finally:
        shutil.rmtree(base)


def run(base: Path, jobs: list[Job], fault: str) -> list[Outcome]:
    (base / "jobs").write_bytes(pickle.dumps([tuple(job) for job in jobs]))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "LD_PRELOAD": str(library()),
    }
    command = [sys.executable, "-m", "tests.contract.recorded_process", str(base / "jobs"), fault]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True, stdin=subprocess.DEVNULL)
    return [Outcome(*one) for one in pickle.loads((base / "jobs").read_bytes())]


def read(path: Path, disk: Disk) -> Log:
    """Raises: NotModelled"""
    log = Log(disk)
    content = path.read_bytes()
    at = 0
    writes: dict[int, int] = {}
    syncs: dict[int, set[int]] = {}
    while at < len(content):
        kind, path_size, number, offset, size = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        name = content[at : at + path_size].decode()
        data = content[at + path_size : at + path_size + size]
        at += path_size + size
        if kind == _WRITE:
            writes[number] = log.write(name, offset, data)
        elif kind == _WRITTEN:
            log.durable(writes[number])
        elif kind == _LOST:
            log.lost(writes[number])
        elif kind == _SYNC:
            syncs[number] = log.to_sync(name)
        elif kind == _SYNCED:
            log.durable(*syncs[number])
        elif kind == _SYNC_FAILED:
            log.sync_failed(name, syncs[number])
        elif kind == _CREATED:
            log.create(name)
        elif kind == _RENAMED:
            log.rename(name, data.decode())
        elif kind == _UNLINKED:
            log.unlink(name)
        elif kind == _MADE:
            log.make_folder(name)
        elif kind == _MARK and offset == _HISTORY_SYNCED:
            log.note(HistorySynced(number))
        elif kind == _MARK:
            log.note(Started() if offset == _STARTED else Confirmed())
        else:
            raise NotModelled(name)
    return log
