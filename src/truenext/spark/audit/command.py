"""One whole audit, for `truenext audit` and for spark-submit."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import pandas
from pyspark.sql import SparkSession

from truenext.errors import ConfigurationError, HistoryError
from truenext.spark.audit.audit import STUCK_SECONDS, AuditResults, audit, timed
from truenext.spark.audit.continued import audit_since_state, check_tables
from truenext.spark.audit.run_names import run_names
from truenext.spark.audit.state import StateFolder
from truenext.spark.paths import path_to_read, path_to_write
from truenext.spark.report import AuditedHistory, write_comparison
from truenext.spark.schema import read_events
from truenext.spark.session import start
from truenext.spark.stages.schema import read_stage_events
from truenext.spark.verdict import Verdict

PAGE = "report.html"
SPARK_LOG = "spark.log"
"""Name of the file with Java's output, in the folder of the tables."""

SHOWN_ROWS_MAX = 200_000
"""Largest number of rows of a table that are read for the HTML page. The Parquet files have all rows."""


def run_audit(
    folders: Sequence[Path | str], *, out: Path | None = None, state: Path | None = None, **options: Any
) -> list[Verdict]:
    """Audit the history in each of `folders`. Print progress and verdicts. Write the tables, and one page for all
    histories, below `out`. With `state`, a folder, audit the events since the last audit with it. `options` are the
    further options of `audit_histories`.

    Raises: ConfigurationError if a folder or option cannot be used; HistoryError if a history cannot be read
    """
    if state is not None:
        return [_run_from_state(folders, state, out=out, **options)]
    audited = audit_histories(folders, out=out, **options)
    if out is not None:
        names = [each.name for each in audited] if len(audited) > 1 else [str(folders[0])]
        write_page(audited, out, title="Audit of " + " and ".join(names))
    return [each.verdict for each in audited]


def audit_histories(
    folders: Sequence[Path | str],
    *,
    master: str | None = None,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    stages: Sequence[Path | str] = (),
    out: Path | None = None,
) -> list[AuditedHistory]:
    """Audit the history in each of `folders`. Print progress and verdicts. Write the tables and Spark's log below
    `out`.

    With several folders, the tables of each go to a folder below `out`, named by `run_names`. `stages` are folders with
    events of stages; they need exactly one history. `since` without a time zone is UTC. The returned histories have
    tables only if `out` is given.

    Raises: ConfigurationError if a folder or option cannot be used; HistoryError if a history cannot be read
    """
    if since is not None and since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    if stages and len(folders) > 1:
        raise ConfigurationError("--stages needs the history of exactly one broker: name one history folder")
    names = run_names(folders)
    _check((*folders, *stages), stuck_seconds, out)
    spark = _start(master, out)
    audited = []
    for folder, name in zip(folders, names, strict=True):
        if len(folders) > 1:
            print(f"{name}:", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="truenext-audit-") as scratch:
            events = read_events(spark, folder, Path(scratch))
            stage_events = read_stage_events(spark, stages) if stages else None
            try:
                results = audit(
                    events,
                    since=since,
                    queue=queue,
                    stuck_seconds=stuck_seconds,
                    stages=stage_events,
                    progress=_print_step,
                )
            except HistoryError as error:
                raise HistoryError(f"{folder}: {error}") from error
            tables: dict[str, pandas.DataFrame] = {}
            if out is not None:
                with timed(_print_step, "tables"):
                    tables = write_tables(results, out / name if len(folders) > 1 else out)
            audited.append(AuditedHistory(name, tables, results.verdict))
            results.unpersist()
    for each in audited:
        print(f"{each.name}: {each.verdict}" if len(folders) > 1 else each.verdict, flush=True)
    return audited


def _run_from_state(
    folders: Sequence[Path | str],
    state: Path,
    *,
    out: Path | None,
    master: str | None = None,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    stages: Sequence[Path | str] = (),
) -> Verdict:
    if since is not None or stages:
        raise ConfigurationError(
            "--state begins where the last audit has ended, and judges no stages: leave out --since and --stages"
        )
    if len(folders) > 1:
        raise ConfigurationError("--state needs the history of exactly one broker: name one history folder")
    _check(folders, stuck_seconds, out)
    path_to_write(state.resolve())
    if out is not None:
        check_tables(out)
    with StateFolder.locked(state) as locked:
        locked.read()
        spark = _start(master, out)
        verdict = audit_since_state(
            spark, folders[0], locked, queue=queue, stuck_seconds=stuck_seconds, out=out, progress=_print_step
        )
    print(verdict, flush=True)
    if out is not None:
        print(f"The page: {out / PAGE}", flush=True)
    return verdict


def _check(locations: Sequence[Path | str], stuck_seconds: float, out: Path | None) -> None:
    """Check what can be checked before Spark starts, and make the folder `out`.

    Raises: ConfigurationError if a folder or option cannot be used
    """
    if not 0 < stuck_seconds < inf:
        raise ConfigurationError(f"--stuck must be a number of seconds, not {stuck_seconds}")
    for location in locations:
        if not (isinstance(location, str) and "://" in location):
            path_to_read(Path(location).resolve())
    if out is not None:
        path_to_write(out.resolve())
        # Made before the work, and not left to Spark, whose error would be a hundred lines long.
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {out}: {error.strerror}") from error


def _start(master: str | None, out: Path | None) -> SparkSession:
    with timed(_print_step, "Spark started"):
        return start(master, log=None if out is None else out / SPARK_LOG)


def write_page(
    audited: Sequence[AuditedHistory], out: Path, *, title: str, sections: Mapping[str, pandas.DataFrame] | None = None
) -> None:
    """Write the page on the `audited` histories to `out`, and print its path. `sections` are further tables for the
    page, each under its heading.

    Raises: ConfigurationError if the package that draws the plots is not installed; OSError if the page cannot be
    written
    """
    with timed(_print_step, "page"):
        write_comparison(audited, out / PAGE, title=title, sections=sections)
    print(f"The page: {out / PAGE}", flush=True)


def write_tables(results: AuditResults, out: Path) -> dict[str, pandas.DataFrame]:
    """Write each table as a folder of Parquet files. Return at most SHOWN_ROWS_MAX rows of each table for the page."""
    for name, table in results.tables.items():
        table.write.mode("overwrite").parquet(path_to_write(out.resolve() / name))
    return {name: table.limit(SHOWN_ROWS_MAX).toPandas() for name, table in results.tables.items()}


def _print_step(step: str, seconds: float) -> None:
    """Print a step to standard error, because progress is only for people."""
    print(f"{seconds:6.1f} s  {step}", file=sys.stderr, flush=True)
