"""Audit that goes on from the last one, for `truenext audit --state`.

STATE ──▶ SavedAudit ──┐
history since then ────┴▶ audit ──▶ OUT/TABLE/first_event=N/, OUT/report-N.html, OUT/report.html ──▶ STATE

The state is written last. If the command is killed before, the next one writes the tables of the same events again,
into the same folders.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas
from pyspark.sql import DataFrame, SparkSession

from truenext.errors import ConfigurationError, HistoryError
from truenext.spark.audit.audit import audit_brokers, timed
from truenext.spark.audit.brokers import FolderHistory
from truenext.spark.audit.resume import SavedAudit, read_cut
from truenext.spark.audit.state import AuditState, AuditSummary, StateFolder
from truenext.spark.history_files import HistoryFiles, find_histories, read_files
from truenext.spark.output import make_durable, sync, write_table
from truenext.spark.paths import Location, path_to_read
from truenext.spark.report import SHOWN_ROWS_MAX, AuditedHistory, write_comparison
from truenext.spark.verdict import FindingSummary, Verdict

_PART = "first_event"
"""Column of the tables, and folder in them: number of the first event of an audit."""
_OF_ONE_AUDIT = ("latency",)
"""Tables that are not on the page of all audits, as their rows cannot be summed up."""


def audit_since_state(
    spark: SparkSession,
    folder: Path | str,
    state: StateFolder,
    *,
    queue: str | None,
    stuck_seconds: float,
    out: Path | None,
    progress: Callable[[str, float], None],
) -> Verdict:
    """Audit the events of a history that came since the last audit, and leave the state for the next one. Write the
    tables and pages below `out`. Return the verdict on these events.

    Raises: ConfigurationError if the state cannot be used, or there are no events; HistoryError if the history cannot
    be read, or does not go on from the state
    """
    earlier = state.read()
    files = one_history(folder, find_histories(spark, folder))
    events, raw = read_files(spark, files)
    history = FolderHistory(files.folder, events, files.folder, may_grow=raw is not None)
    saved = None if earlier is None else SavedAudit(earlier, read_cut(spark, state, earlier))
    try:
        if saved is not None and not saved.has_new_events(events):
            return Verdict(0, notes=("No event has come since the last audit.",))
        results = audit_brokers(
            [history], queue=queue, stuck_seconds=stuck_seconds, progress=progress, goes_on=True, saved=saved
        )
    except HistoryError as error:
        raise HistoryError(history.error(str(error))) from error
    assert results.next is not None
    following = results.next.state
    if out is not None:
        with timed(progress, "tables and pages"):
            for name, table in results.tables.items():
                write_part(table, out, name, following.audits[-1].first_event)
            _write_pages(spark, str(folder), out, following)
    with timed(progress, "state"):
        results.next.save(state)
    results.unpersist()
    if raw is not None:
        raw.unpersist()
    return results.verdict


def _read(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.parquet(path_to_read(folder.resolve()))


def one_history(location: Location, found: Sequence[HistoryFiles]) -> HistoryFiles:
    """Return the only history that was found at a location.

    Raises: ConfigurationError if there are several
    """
    if len(found) > 1:
        raise ConfigurationError(f"--state needs the history of exactly one broker: {location} has {len(found):,}")
    return found[0]


def check_tables(out: Path) -> None:
    """Check that a folder has no tables of an audit without a state: rows of both could not be told apart.

    Raises: ConfigurationError if it has
    """
    if any((out / "violations").glob("*.parquet")):
        raise ConfigurationError(
            f"{out} has the tables of an audit without --state: name another folder, or delete those tables"
        )


def write_part(table: DataFrame | None, out: Path, name: str, first_event: int) -> None:
    """Write the rows of a table that an audit has found, which began with an event, in place of those that it had
    written before it was killed; None stands for no rows. They are durable afterwards, as the state is that says that
    they are written."""
    folder = out / name / f"{_PART}={first_event}"
    if table is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    write_table(table, folder)
    make_durable(folder)
    sync(out)


def _write_pages(spark: SparkSession, name: str, out: Path, state: AuditState) -> None:
    """Write a page on the last audit, and one on all."""
    names = sorted(each.parent.name for each in out.glob(f"*/{_PART}=*") if each.is_dir())
    tables = {each: _read(spark, out / each) for each in dict.fromkeys(names)}
    last = state.audits[-1]
    of_last = {
        each: table.where(table[_PART] == last.first_event).drop(_PART).limit(SHOWN_ROWS_MAX).toPandas()
        for each, table in tables.items()
    }
    title = f"Audit of {name}"
    verdict = _verdict([last])
    write_comparison([AuditedHistory(name, of_last, verdict)], out / page_name(last), title=title)
    of_all = {
        each: table.drop(_PART).limit(SHOWN_ROWS_MAX).toPandas()
        for each, table in tables.items()
        if each not in _OF_ONE_AUDIT
    }
    audits = {"Audits": _audits_table(state.audits)}
    history = AuditedHistory(name, of_all, _verdict(state.audits))
    write_comparison([history], out / PAGE_OF_ALL, title=title, sections=audits)


PAGE_OF_ALL = "report.html"


def page_name(part: AuditSummary) -> str:
    """Return the name of the page on one audit."""
    return f"report-{part.first_event}.html"


def _verdict(parts: Sequence[AuditSummary]) -> Verdict:
    """Return one verdict on some audits. Of several, each sentence says which it is about."""

    def named(part: AuditSummary, text: str) -> str:
        return text if len(parts) == 1 else f"Events {part.first_event:,} to {part.last_event:,}: {text}"

    findings = [
        FindingSummary(kind, count, named(part, sentence))
        for part in parts
        for kind, (count, sentence) in part.findings.items()
    ]
    notes = [named(part, note) for part in parts for note in part.notes]
    return Verdict(sum(part.events for part in parts), tuple(findings), tuple(notes))


def _audits_table(parts: Sequence[AuditSummary]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "first event": [each.first_event for each in parts],
            "last event": [each.last_event for each in parts],
            "until": [datetime.fromtimestamp(each.last_at / 1e6, UTC) for each in parts],
            "events": [each.events for each in parts],
            "contract": ["broken" if each.findings else "held" for each in parts],
            "page": [page_name(each) for each in parts],
        }
    )
