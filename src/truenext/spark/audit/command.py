"""One whole audit, for `truenext audit` and for spark-submit."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import pandas
from pyspark.sql import DataFrame, SparkSession

from truenext.errors import ConfigurationError
from truenext.spark.audit.audit import STUCK_SECONDS, AuditResults, BrokerVerdict, audit_brokers, timed
from truenext.spark.audit.brokers import FolderHistory
from truenext.spark.audit.continued import audit_since_state, check_tables, one_history
from truenext.spark.audit.run_names import run_names
from truenext.spark.audit.state import StateFolder, check_apart
from truenext.spark.history_files import errors_of_tasks, find_histories, find_local_histories, read_files
from truenext.spark.output import write_table, write_to_address
from truenext.spark.paths import Location, below, is_address, output_path, path_to_read, path_to_write
from truenext.spark.report import SHOWN_ROWS_MAX, AuditedHistory, comparison_page, write_comparison
from truenext.spark.session import start
from truenext.spark.stages.schema import read_stage_events
from truenext.spark.verdict import Verdict

PAGE = "report.html"
SPARK_LOG = "spark.log"
"""Name of the file with Java's output, in the folder of the tables."""


def run_audit(
    folders: Sequence[Location], *, out: Location | None = None, state: Path | None = None, **options: Any
) -> list[Verdict]:
    """Audit the histories in `folders` in one job. Print progress and verdicts. Write the tables, and one page, below
    `out`. With `state`, a folder, audit the events since the last audit with it. `options` are the further options of
    `audit_histories`. Return a verdict for each broker.

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
    folders: Sequence[Location],
    *,
    master: str | None = None,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    stages: Sequence[Location] = (),
    out: Location | None = None,
) -> list[AuditedHistory]:
    """Audit the histories in `folders`, which are folders of brokers or have some below. Print progress and verdicts.
    Write the tables and Spark's log below `out`.

    `stages` are folders with events of stages. `since` without a time zone is UTC. Return the histories of each broker,
    with rows of its tables if `out` is given.

    Raises: ConfigurationError if a folder or option cannot be used; HistoryError if a history cannot be read
    """
    if since is not None and since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    run_names(folders)
    _check((*folders, *stages), stuck_seconds, out)
    for folder in folders:
        if not is_address(folder):
            find_local_histories(Path(folder))
    spark = _start(master, out)
    found = [files for folder in folders for files in find_histories(spark, folder)]
    names = run_names([files.folder for files in found])
    histories: list[FolderHistory] = []
    cached: list[DataFrame] = []
    for files, name in zip(found, names, strict=True):
        events, raw = read_files(spark, files)
        histories.append(FolderHistory(name, events, files.folder, may_grow=raw is not None))
        cached += [] if raw is None else [raw]
    stage_events = read_stage_events(spark, stages) if stages else None
    with errors_of_tasks():
        results = audit_brokers(
            histories,
            since=since,
            queue=queue,
            stuck_seconds=stuck_seconds,
            stages=stage_events,
            progress=_print_step,
        )
        tables: dict[str, pandas.DataFrame] = {}
        if out is not None:
            with timed(_print_step, "tables"):
                tables = write_tables(results, out)
    results.unpersist()
    for each in cached:
        each.unpersist()
    audited = [AuditedHistory(_label(each), _of_broker(tables, each.broker), each.verdict) for each in results.verdicts]
    _print_verdicts(audited)
    return audited


def _run_from_state(
    folders: Sequence[Location],
    state: Path,
    *,
    out: Location | None,
    master: str | None = None,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    stages: Sequence[Location] = (),
) -> Verdict:
    if since is not None or stages:
        raise ConfigurationError(
            "--state begins where the last audit has ended, and judges no stages: leave out --since and --stages"
        )
    if len(folders) > 1:
        raise ConfigurationError("--state needs the history of exactly one broker: name one history folder")
    if out is not None:
        if isinstance(out, str) and is_address(out):
            raise ConfigurationError("--state needs a folder for --out, not an address: its tables are appended to")
        out = Path(out)
        check_apart(state, out)
        check_tables(out)
    _check(folders, stuck_seconds, out)
    path_to_write(state.resolve())
    with StateFolder.locked(state) as locked:
        earlier = locked.read()
        if earlier is not None:
            earlier.check_queue(queue)
        if not is_address(folders[0]):
            one_history(folders[0], find_local_histories(Path(folders[0])))
        spark = _start(master, out)
        with errors_of_tasks():
            verdict = audit_since_state(
                spark, folders[0], locked, queue=queue, stuck_seconds=stuck_seconds, out=out, progress=_print_step
            )
    print(verdict, flush=True)
    if out is not None:
        print(f"The page: {out / PAGE}", flush=True)
    return verdict


def _check(locations: Sequence[Location], stuck_seconds: float, out: Location | None) -> None:
    """Check what can be checked before Spark starts, and make the folder `out`.

    Raises: ConfigurationError if a folder or option cannot be used
    """
    if not 0 < stuck_seconds < inf:
        raise ConfigurationError(f"--stuck must be a number of seconds, not {stuck_seconds}")
    for location in locations:
        if not is_address(location):
            path_to_read(Path(location).resolve())
    if out is not None:
        _prepare(out)


def _start(master: str | None, out: Location | None) -> SparkSession:
    with timed(_print_step, "Spark started"):
        return start(master, log=None if out is None or is_address(out) else Path(out) / SPARK_LOG)


def _prepare(out: Location) -> None:
    """Make the folder `out` before the work, and not by Spark, whose error would be a hundred lines long. Spark makes
    an address, once the tables are there.

    Raises: ConfigurationError if the folder cannot be made
    """
    output_path(out)
    if is_address(out):
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {out}: {error.strerror}") from error


def _label(broker: BrokerVerdict) -> str:
    """Return the name of a broker for people: its folders, and its identity, if one is known."""
    names = " and ".join(broker.histories)
    return names if broker.broker == broker.histories[0] else f"{names} ({broker.broker})"


def _of_broker(tables: Mapping[str, pandas.DataFrame], broker: str) -> dict[str, pandas.DataFrame]:
    return {name: table[table["broker"] == broker].drop(columns="broker") for name, table in tables.items()}


def _print_verdicts(audited: Sequence[AuditedHistory]) -> None:
    if len(audited) > 1:
        broken = sum(not each.verdict.has_contract_held for each in audited)
        held = f"The contract held at all {len(audited):,} brokers."
        print(f"The contract was broken at {broken:,} of {len(audited):,} brokers." if broken else held)
    for each in audited:
        print(f"{each.name}: {each.verdict}" if len(audited) > 1 else each.verdict, flush=True)


def write_page(
    audited: Sequence[AuditedHistory],
    out: Location,
    *,
    title: str,
    sections: Mapping[str, pandas.DataFrame] | None = None,
) -> None:
    """Write the page on the `audited` histories below `out`, and print its path. `sections` are further tables for the
    page, each under its heading.

    Raises: ConfigurationError if the package that draws the plots is not installed, or Spark cannot write to the
    address; OSError if the page cannot be written
    """
    page = below(out, PAGE)
    with timed(_print_step, "page"):
        if isinstance(page, Path):
            write_comparison(audited, page, title=title, sections=sections)
        else:
            write_to_address(page, comparison_page(audited, title=title, sections=sections))
    print(f"The page: {page}", flush=True)


def write_tables(results: AuditResults, out: Location) -> dict[str, pandas.DataFrame]:
    """Write each table as a folder of Parquet files. Return at most SHOWN_ROWS_MAX rows for each broker of each table
    for the page."""
    for name, table in results.tables.items():
        write_table(table, below(out, name))
    rows_max = SHOWN_ROWS_MAX * len(results.verdicts)
    return {name: table.limit(rows_max).toPandas() for name, table in results.tables.items()}


def _print_step(step: str, seconds: float) -> None:
    """Print a step to standard error, because progress is only for people."""
    print(f"{seconds:6.1f} s  {step}", file=sys.stderr, flush=True)
