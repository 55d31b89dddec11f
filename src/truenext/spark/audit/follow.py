"""Audit that follows a history while it grows: a streaming query that audits micro-batch by micro-batch.

events ──▶ audit, from the last cut ──▶ OUT/TABLE/first_event=N/ ──▶ report queue ──▶ STATE ──▶ standard error

The state is written behind the findings, and says up to which event the history is judged. So a micro-batch that Spark
repeats after a crash writes the same findings into the same folders, or is left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from msgspec import structs
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from truenext.client.core.credentials import Credentials
from truenext.clock import monotonic
from truenext.errors import ConfigurationError, HistoryError
from truenext.spark.audit.audit import AuditResults, audit
from truenext.spark.audit.continued import write_part
from truenext.spark.audit.resume import SavedAudit, read_cut
from truenext.spark.audit.state import AuditState, AuditSummary, StateFolder, check_apart
from truenext.spark.caching import cache_rows
from truenext.spark.datasource import TruenextDataSource
from truenext.spark.history.options import parse_options
from truenext.spark.history.places import read_events
from truenext.spark.paths import path_to_write
from truenext.spark.session import start
from truenext.spark.sink.grants import check_grants
from truenext.spark.sink.options import parse_options as parse_sink_options
from truenext.spark.verdict import FindingSummary, Verdict

TABLES = ("violations", "lost", "duplicates", "consumers", "stuck")
"""Tables with findings."""
BATCH_SECONDS = 2
"""Seconds from the beginning of a micro-batch to that of the next, at least."""
FIRST_ANSWER_SECONDS = 10
"""Seconds in which the broker must answer before the query starts; later the query waits for `patience`."""
PROGRESS_SECONDS = 60.0
TOLD_MAX = 100
"""Findings of a micro-batch that are told on standard error; the tables have all."""
SPARK_LOG = "spark.log"
_ERROR = re.compile(r"truenext\.errors\.\w+: (.*)")


@dataclass(frozen=True, kw_only=True)
class Following:
    """Followed history, and the places that get its findings."""

    place: Mapping[str, str]
    """Options of the history's source: `path`, or `url` and those of the login."""
    out: Path
    """Folder of the tables."""
    queue: str | None = None
    """Queue that is audited alone."""
    stuck_seconds: float
    report_to: Mapping[str, str] | None = None
    """Options of the sink that gets findings: `url`, `queue` and those of the login. None for no sink."""

    def check(self, earlier: AuditState | None) -> None:
        """Check what can be checked before Spark starts.

        Raises: ConfigurationError, HistoryError or Refused if the history cannot be followed, or is another one
        """
        history = parse_options({"kind": "history", "patience": str(FIRST_ANSWER_SECONDS), **self.place}).open()
        try:
            store = history.extent().store
        finally:
            history.close()
        if earlier is not None and earlier.store and store and earlier.store != store:
            raise ConfigurationError(
                f"the state is that of the broker with the identity {earlier.store}, and this is {store}: name the "
                "state of this broker, or an empty folder"
            )
        if earlier is not None:
            earlier.check_queue(self.queue)
        if self.report_to is not None:
            check_grants(parse_sink_options(self.report_to, is_streaming=False))

    def check_passed_over(self, start: int, end: int) -> None:
        """Check that no event from `start` to before `end` exists, for none of them is judged.

        Raises: ConfigurationError if one does: Spark's checkpoint is ahead of the state
        """
        if start >= end:
            return
        with closing(parse_options({"kind": "history", **self.place}).open()) as history:
            if any(each.num_rows for each in read_events(history, start, end, fails_on_loss=False)):
                raise ConfigurationError(
                    f"the state is older than its checkpoint: events {start:,} to {end - 1:,} would not be judged. "
                    "Name an empty folder as --state"
                )


def follow(
    spark: SparkSession, following: Following, state: StateFolder, folder: Path, *, until_now: bool = False
) -> Verdict:
    """Follow a history until the query is stopped, or with `until_now` up to the last event that it has now. `folder`
    is that of the `state`, and also has the query's checkpoint. Return the verdict on all events that were judged with
    this state.

    Raises: TruenextError if the history or the broker fails
    """
    spark.dataSource.register(TruenextDataSource)
    follower = Follower(spark, following, state, folder)
    stream = spark.readStream.format("truenext").options(kind="history", failOnDataLoss="false", **following.place)
    written = stream.load().writeStream.foreachBatch(follower.judge)
    written = written.option("checkpointLocation", str((folder / "checkpoint").resolve()))
    trigger = {"availableNow": True} if until_now else {"processingTime": f"{BATCH_SECONDS} seconds"}
    with _in_one_sentence(follower):
        query = written.trigger(**trigger).start()
        follower.find_latest = lambda: _latest(query.lastProgress)
        try:
            query.awaitTermination()
        except KeyboardInterrupt:
            query.stop()
    return verdict_of(follower.state)


def _latest(progress: Any) -> int | None:
    """Return the number of the event that was to happen next when the query last looked; None if it has not yet."""
    with suppress(TypeError, KeyError, IndexError, ValueError):
        return int(json.loads(progress["sources"][0]["latestOffset"])["event"])
    return None


@contextmanager
def _in_one_sentence(follower: Follower) -> Iterator[None]:
    """Raise the error that has ended the query without Spark's words around it."""
    try:
        yield
    except StreamingQueryException as error:
        if follower.error is not None:
            raise follower.error from error
        found = _ERROR.findall(str(error))
        if not found:
            raise
        raise HistoryError(found[-1]) from error


def run_follow(
    folders: Sequence[Path],
    *,
    urls: Sequence[str],
    credentials: Credentials,
    report_to: str | None,
    state: Path,
    out: Path,
    queue: str | None,
    stuck_seconds: float,
    master: str | None,
) -> Verdict:
    """Follow the history in the folder, or without one that of a running broker, until Ctrl-C. Print each finding to
    standard error, and send it to the queue `report_to` of the broker, if one is named. Return the verdict on all that
    was followed with this state.

    Raises: TruenextError if an option cannot be used, or the history or the broker fails
    """
    if credentials.password:
        raise ConfigurationError("a query reads the password from a file: set TRUENEXT_PASSWORD_FILE in its place")
    login = {
        "user": credentials.user,
        "passwordFile": credentials.password_file,
        "ca": credentials.ca,
        "certificate": credentials.certificate,
        "key": credentials.key,
    }
    named = {"url": ",".join(urls), **{name: str(value) for name, value in login.items() if value is not None}}
    following = Following(
        place={"path": str(folders[0].resolve())} if folders else named,
        out=out,
        queue=queue,
        stuck_seconds=stuck_seconds,
        report_to=None if report_to is None else {**named, "queue": report_to},
    )
    check_apart(state, out)
    path_to_write(out.resolve())
    path_to_write(state.resolve())
    out.mkdir(parents=True, exist_ok=True)
    with StateFolder.locked(state) as locked:
        following.check(locked.read())
        spark = start(master, log=out / SPARK_LOG)
        spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
        verdict = follow(spark, following, locked, state)
    print(verdict, flush=True)
    return verdict


class Follower:
    """Audit of one history, one micro-batch after the other."""

    def __init__(self, spark: SparkSession, following: Following, state: StateFolder, folder: Path) -> None:
        self._spark = spark
        self._following = following
        self._folder = state
        self._name = state.name()
        self.state = state.read()
        """Judged history; None before the first micro-batch."""
        self.error: Exception | None = None
        """Error that has ended the query."""
        self.find_latest: Callable[[], int | None] = lambda: None
        """Returns the number of the event that happens next, as far as the query knows."""
        self._told_at = 0.0
        self._notes: set[str] = set() if self.state is None else {*self.state.audits[0].notes}
        earlier = spark.read.format("truenext").options(kind="history", **following.place).load()
        self._earlier = earlier.transform(_with_date)

    def judge(self, batch: DataFrame, _number: int) -> None:
        """Judge a micro-batch, unless an earlier run has done so."""
        try:
            self._judge(batch)
        except Exception as error:
            self.error = error
            raise

    def _judge(self, batch: DataFrame) -> None:
        events = cache_rows(batch.transform(_with_date))
        try:
            first, last = events.agg(F.min("event"), F.max("event")).collect()[0]
            saved = self._saved()
            if last is None or (saved is not None and last <= saved.state.last_event):
                return
            self._following.check_passed_over(1 if saved is None else saved.state.next_event, first)
            following = self._following
            if saved is not None:
                saved.has_new_events(events)
            results = audit(
                events,
                queue=following.queue,
                stuck_seconds=following.stuck_seconds,
                goes_on=True,
                saved=saved,
                measures=False,
            )
            try:
                self._keep(results)
            finally:
                results.unpersist()
        finally:
            events.unpersist()

    def _saved(self) -> SavedAudit | None:
        if self.state is None:
            return None
        return _FollowedAudit(self.state, read_cut(self._spark, self._folder, self.state), self._earlier)

    def _keep(self, results: AuditResults) -> None:
        """Write the findings and the state, in this order, and then tell of the findings."""
        assert results.next is not None
        found = [name for name in TABLES if results.verdict.findings and results.tables[name].count()]
        state = results.next.state
        first = state.audits[-1].first_event
        for name in TABLES:
            write_part(results.tables[name] if name in found else None, self._following.out, name, first)
        rows = self._rows(results, found)
        if rows is not None and self._following.report_to is not None:
            self._send(rows, state.last_event)
        merged = structs.replace(state, audits=(merge(state.audits),))
        replace(results.next, state=merged).save(self._folder)
        self.state = merged
        self._tell(rows, results.verdict)

    @staticmethod
    def _rows(results: AuditResults, found: list[str]) -> DataFrame | None:
        """Return the findings as JSON; None if there are none."""
        tables = [
            results.tables[name].select(F.to_json(F.struct(F.lit(name).alias("table"), "*")).alias("body"))
            for name in found
        ]
        return reduce(DataFrame.unionByName, tables) if tables else None

    def _send(self, rows: DataFrame, number: int) -> None:
        assert self._following.report_to is not None
        options = {"txnAppId": self._name, "txnVersion": str(number), **self._following.report_to}
        rows.coalesce(1).write.format("truenext").options(**options).mode("append").save()

    def _tell(self, rows: DataFrame | None, verdict: Verdict) -> None:
        for note in verdict.notes:
            if note not in self._notes:
                self._notes.add(note)
                _print(note)
        if rows is not None:
            for row in rows.limit(TOLD_MAX).collect():
                _print(f"finding: {row['body']}")
            number = sum(each.count for each in verdict.findings)
            if number > TOLD_MAX:
                _print(f"{number:,} findings in all, see the tables in {self._following.out}")
        now = monotonic()
        if now - self._told_at >= PROGRESS_SECONDS:
            self._told_at = now
            assert self.state is not None
            latest = self.find_latest()
            behind = "" if latest is None else f", {max(0, latest - self.state.next_event):,} behind"
            _print(f"judged up to event {self.state.last_event:,}{behind}")


def _with_date(events: DataFrame) -> DataFrame:
    """Return events with the column that Parquet files have by the names of their folders."""
    return events.withColumn("date", F.to_date("at"))


@dataclass(frozen=True)
class _FollowedAudit(SavedAudit):
    """Audit that goes on with a micro-batch, which has none of the earlier events."""

    earlier: DataFrame

    def before(self, events: DataFrame) -> DataFrame:
        # Read only if a message occurs that must have ended before.
        return self.earlier.where(F.col("event") <= self.state.last_event)


def merge(audits: tuple[AuditSummary, ...]) -> AuditSummary:
    """Return one summary for audits that follow each other: there is one for each micro-batch, day by day."""
    first, last = audits[0], audits[-1]
    findings: dict[str, tuple[int, str]] = {}
    for each in audits:
        for kind, (count, sentence) in each.findings.items():
            findings[kind] = (findings.get(kind, (0, ""))[0] + count, sentence)
    return AuditSummary(
        first.first_event,
        last.last_event,
        last.last_at,
        sum(each.events for each in audits),
        findings,
        tuple(dict.fromkeys(note for each in audits for note in each.notes)),
    )


def verdict_of(state: AuditState | None) -> Verdict:
    """Return the verdict on all that was judged."""
    if state is None:
        return Verdict(0, notes=("No event has come.",))
    found = merge(state.audits)
    findings = tuple(FindingSummary(kind, count, f"{kind}: {count:,}") for kind, (count, _) in found.findings.items())
    return Verdict(found.events, findings, found.notes)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
