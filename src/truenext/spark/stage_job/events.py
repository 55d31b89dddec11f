"""Events of a stage that is a Spark job: one file for each batch, which a repeated batch does not write again.

A batch counts as one process. Its requests begin with the batch and end with it, when its output is published.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
from pyspark.sql import Row

from truenext.flows.events import (
    TRACE_MAX,
    ExecutionEnded,
    ExecutionStarted,
    FileOpened,
    ProcessClosed,
    StageEvent,
)
from truenext.history.stage_files import FORMAT, SUFFIX, delete_old_files, stage_file
from truenext.spark.stage_job.answers import SERVICE


def write_events(folder: Path, job: str, rows: Iterable[Row], began_us: int, ended_us: int) -> None:
    """Write the events of a batch. `job` names query and batch; `rows` are the executions. Times are in microseconds
    since the epoch.

    Raises: OSError if `folder` cannot be written to
    """
    folder.mkdir(parents=True, exist_ok=True)
    digits = blake2b(job.encode(), digest_size=4).hexdigest()
    if any(_is_of(path, job) for path in folder.glob(f"*{digits}-000001{SUFFIX}")):
        # An earlier run of the batch has published its output, and died before Spark knew.
        return
    process = f"{began_us // 1000:012x}{digits}"
    path = stage_file(folder, process, 1)
    unnamed = path.with_suffix(".new")
    encoder = msgspec.json.Encoder()
    with os.fdopen(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        for event in batch_events(process, job, rows, began_us, ended_us):
            file.write(encoder.encode(event) + b"\n")
    unnamed.replace(path)
    delete_old_files(folder)


def _is_of(path: Path, job: str) -> bool:
    """Return whether a file has the events of a job's batch: of a million batches some have the same digits."""
    try:
        with path.open("rb") as file:
            opened = msgspec.json.decode(file.readline())
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return bool(opened.get("instance") == job)


def batch_events(process: str, job: str, rows: Iterable[Row], began_us: int, ended_us: int) -> Iterator[StageEvent]:
    yield FileOpened(process, 0, began_us, FORMAT, SERVICE, job)
    number = 0
    for row in rows:
        number += 2
        yield ExecutionStarted(
            process=process,
            number=number - 1,
            at=began_us,
            stage=row["stage"],
            message=row["message_id"],
            flow=row["flow_id"],
            trace=row["trace"][:TRACE_MAX],
            sender=row["sender"],
            attempt=row["attempt"],
            deliveries=row["deliveries"],
            parent=row["parent"],
            queue=row["stage"],
            sequence=row["sequence"],
            accepted_ms=row["accepted_ms"] or None,
            taken=True,
        )
        total_us = ended_us - began_us
        is_rejected = row["is_rejected"]
        yield ExecutionEnded(
            process=process,
            number=number,
            at=ended_us,
            kind="rejected" if is_rejected else "completed",
            execution=number - 1,
            total_us=total_us,
            run_us=total_us,
            given_up_for=("unreadable" if row["is_unreadable"] else "rejected") if is_rejected else None,
        )
    yield ProcessClosed(process=process, number=number + 1, at=ended_us)
