"""Tests of the whole audit through Spark, against the judge."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.testing import assertDataFrameEqual

from tests.spark.histories import EPOCH, Event, RandomHistory, joined
from tests.spark.judge import Judge
from tests.spark.plain import counted, outcomes_of
from tests.spark.policies import serve, true_next, two_buckets
from tests.spark.queues import read_events
from tests.spark.test_consumers import STARTED, Story
from truenext.cli.audit import audit as audit_command
from truenext.errors import ConfigurationError, HistoryError
from truenext.spark.audit.audit import AuditResults, audit
from truenext.spark.audit.command import audit_histories, run_audit
from truenext.spark.audit.runs import blocks, earlier_broker, gaps
from truenext.spark.audit.timeline import BATCH_BITS, commits, with_commits
from truenext.spark.schema import EVENTS
from truenext.spark.stages.schema import read_stage_events

pytestmark = pytest.mark.timeout(300)

Frame = Callable[[list[Event]], DataFrame]
AUDITS = int(os.environ.get("TRUENEXT_AUDITS", "1"))
"""Audits of random histories: each takes more than a minute."""
STUCK_SECONDS = 10.0
ODD_NAME = r"run[1]{a,b}*?, 100%25 #1 \[^x]~;'\"<>|&$!\d"
"""Name of a folder; most of its characters would match others if it were read as a pattern."""


def found(results: AuditResults) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for row in results.tables["violations"].collect():
        total[row["kind"], row["queue"]] += 1
    for row in results.tables["duplicates"].collect():
        total[row["kind"], row["queue"]] += row["count"]
    for row in results.tables["lost"].collect():
        total["lost", row["queue"]] += row["count"]
    for row in results.tables["consumers"].collect():
        total[row["kind"], row["queue"]] += 1
    for row in results.tables["stuck"].collect():
        total["stuck", row["queue"]] += 1
    return total


def test_the_audit_never_differs_from_the_judge(frame: Frame) -> None:
    first = random.SystemRandom().randrange(2**31)
    for seed in range(first, first + AUDITS):
        history = RandomHistory(seed, 100, faults=0.3).events
        judge = Judge(history, STUCK_SECONDS).judge()
        results = audit(frame(history), stuck_seconds=STUCK_SECONDS)
        assert found(results) == judge.found, f"seed {seed}"
        witnessed = {
            (row["kind"], row["queue"], row["event"], row["overtaken_sequence"])
            for row in results.tables["violations"].collect()
        } | {
            (row["kind"], row["queue"], row["event"], None)
            for table in (results.tables["duplicates"].where("kind = 'duplicate'"), results.tables["consumers"])
            for row in table.collect()
        }
        assert witnessed == judge.witnesses, f"seed {seed}"
        assert results.verdict.has_contract_held is (not judge.found)
        results.unpersist()


@pytest.mark.alternates("whole audits")
def test_spark_finds_what_the_audits_of_the_queues_find_without_it(frame: Frame) -> None:
    """In 40 random histories at once: their commits, and events of messages after their end, are found by Spark."""
    first = random.SystemRandom().randrange(2**31)
    print(f"first seed {first}")
    history = joined(RandomHistory(seed, 60, faults=0.3).events for seed in range(first, first + 40))
    results = audit(frame(history), stuck_seconds=STUCK_SECONDS)
    assert found(results) == counted([each for each in outcomes_of(history, STUCK_SECONDS) if each["row"] == "finding"])
    results.unpersist()


def test_a_right_history_is_said_to_be_right(frame: Frame) -> None:
    history, _ = serve(true_next, 1)
    results = audit(frame(history))
    assert results.verdict.has_contract_held
    assert results.verdict.events == len(history)
    assert str(results.verdict) == f"The contract held: {len(history):,} events, no finding."
    positions: Any = results.tables["positions"].toPandas()
    assert sorted(positions["arrival"]) == sorted(positions["delivery"]) == list(range(1, 301))
    latency: Any = results.tables["latency"].toPandas()
    assert latency.groupby("measure")["count"].sum().tolist() == [300, 300]
    assert (latency["p50"] <= latency["max"]).all()
    assert (latency[latency["measure"] == "dispatched to acknowledged"]["max"] == 1).all()
    redelivery = results.tables["redelivery"].collect()
    assert [(row["dispatches"], row["redeliveries"], row["deliveries_max"]) for row in redelivery] == [(300, 0, 1)]


@pytest.mark.alternates("wrong histories")
def test_two_buckets_get_their_verdict_and_a_witness_each(frame: Frame) -> None:
    history, wrong = serve(two_buckets, 1)
    results = audit(frame(history))
    assert not results.verdict.has_contract_held
    assert [(each.kind, each.count) for each in results.verdict.findings] == list(wrong.items())
    accepted = {each["sequence"]: each for each in history if each["kind"] == "accepted"}
    for row in results.tables["violations"].collect():
        assert row["consumer"] == 1
        assert history[row["event"] - 1]["sequence"] == row["sequence"]
        overtaken = accepted[row["overtaken_sequence"]]
        assert overtaken["priority"] == row["priority"] and overtaken["sequence"] < row["sequence"]


@pytest.mark.alternates("wrong histories")
def test_wrong_dispatches_and_attempts_of_consumers_are_counted_and_listed(frame: Frame) -> None:
    story = (
        Story(window=3).dispatch(1, 2).requeue(1, reason="lost", attempts=1).window(0).dispatch(1).start(3).requeue(2)
    )
    pulling = "client-individual with selector with started pulling"
    story.subscribe(2, pulling, None).request(1, of=2).dispatch(5, 4, to=2).requeue(4, attempts=1)
    for number, priority in ((3, -1), (4, 2), (5, 1)):
        story.subscribe(number, STARTED + " exclusive", priority=priority)
    story.dispatch(2, to=4).dispatch(3, to=5)
    assert len(story.found) == 6
    results = audit(frame(story.events))
    assert {each.kind: each.count for each in results.verdict.findings} == {
        "uncredited": 3,
        "miscount": 2,
        "stale": 1,
    }
    rows = sorted(results.tables["consumers"].collect(), key=lambda row: row["event"])
    assert [(row["kind"], row["sequence"], row["consumer"], row["detail"]) for row in rows] == [
        ("miscount", 1, 1, "not started"),
        ("uncredited", 1, 1, "while it was suspended"),
        ("stale", 3, 1, "started although it did not hold it"),
        ("uncredited", 4, 2, "more than it had requested"),
        ("miscount", 4, 2, "released"),
        ("uncredited", 3, 5, "although consumer 4 is exclusive"),
    ]
    results.unpersist()


@pytest.mark.alternates("whole audits")
def test_since_and_queue_leave_out_the_rest(frame: Frame) -> None:
    history, _ = serve(two_buckets, 2)
    assert audit(frame(history), queue="another").verdict.has_contract_held
    late = audit(frame(history), since=EPOCH + timedelta(milliseconds=len(history) - 3))
    assert late.verdict.has_contract_held
    assert "begins with event" in late.verdict.notes[0]
    with pytest.raises(ConfigurationError, match="no events since"):
        audit(frame(history), since=EPOCH + timedelta(days=1))


@pytest.mark.alternates("wrong histories")
def test_nacked_aborted_lost_and_closed_are_told_apart_in_the_redelivery_of_a_queue(frame: Frame) -> None:
    reasons = {"nacked": 1, "nacked and delayed": 2, "aborted": 3, "aborted and blocking": 4, "lost": 5, "released": 6}
    reasons["closed"] = 7
    # A page has shown one, and one is due.
    others = ["delayed", "due"]
    empty: Event = dict.fromkeys(EVENTS.names)
    told = [reason for reason, count in reasons.items() for _ in range(count)] + others
    history = [empty | {"event": 1, "run": 1, "at": EPOCH, "kind": "run-started", "reason": "clean"}]
    for event, reason in enumerate(told, 2):
        columns = {"kind": "returned", "queue": "orders", "sequence": event, "attempts": 1, "reason": reason}
        history.append(empty | {"event": event, "run": 1, "at": EPOCH} | columns)
    results = audit(frame(history))
    (row,) = results.tables["redelivery"].collect()
    assert [row[reason] for reason in ("nacked", "aborted", "lost", "released", "closed")] == [3, 7, 5, 6, 7]
    results.unpersist()


def of_broker(history: list[Event], store: str, *, run: int = 1, after: int = 0) -> list[Event]:
    """Return the history as that of a run of the broker with this identity, behind so many events."""
    moved = [each | {"event": each["event"] + after, "run": run} for each in history]
    return [each | {"store": store} if each["kind"] == "run-started" else each for each in moved]


def restored_in_place(store: str) -> list[Event]:
    """Return the history of a broker, and behind it that of one with messages from a backup, which have gone since."""
    history, _ = serve(true_next, 3, messages=60)
    is_restored = {each["sequence"] for each in history if each["persistent"]}
    starts = {"run-started": {"reason": "unclean"}, "subscribed": {}}
    again = [each | starts[each["kind"]] for each in history if each["kind"] in starts]
    again.insert(1, again[0] | {"kind": "recovered", "queue": "orders", "count": len(is_restored), "reason": None})
    again += [
        each for each in history if each["sequence"] in is_restored and each["kind"] in ("dispatched", "acknowledged")
    ]
    numbered = [each | {"event": event} for event, each in enumerate(again, 1)]
    return [*of_broker(history, "0000000a"), *of_broker(numbered, store, run=2, after=len(history))]


@pytest.mark.alternates("whole audits")
def test_history_of_a_restored_broker_is_not_joined_to_that_of_the_original(frame: Frame) -> None:
    """C29.17. A planted fault: with the same identity, the audit finds messages that had gone."""
    same = audit(frame(restored_in_place("0000000a")))
    assert {each.kind for each in same.verdict.findings} >= {"resurrected", "duplicate"}
    results = audit(frame(restored_in_place("0000000b")))
    assert results.verdict.has_contract_held
    assert results.verdict.notes[0] == (
        "Up to run 1 the history is that of a broker with another identity, 0000000a; only later runs were judged."
    )


@pytest.mark.alternates("wrong histories")
def test_identities_split_a_history_only_where_they_change(frame: Frame) -> None:
    def earlier(*stores: str | None) -> tuple[str, int] | None:
        empty: Event = dict.fromkeys(EVENTS.names)
        starts = [
            empty | {"event": run, "run": run, "at": EPOCH, "kind": "run-started", "store": store}
            for run, store in enumerate(stores, 1)
        ]
        broker = earlier_broker(blocks(frame(starts)).collect())
        return None if broker is None else (broker.store, broker.next_run)

    assert earlier(None, None) is None
    assert earlier(None, "0000000a", "0000000a") is None
    assert earlier("0000000a", None, "0000000b", None) == ("0000000a", 3)
    assert earlier("0000000a", "0000000b", "0000000c", "0000000c") == ("0000000b", 3)


@pytest.mark.alternates("wrong histories")
def test_histories_of_two_brokers_in_one_folder_are_refused(frame: Frame) -> None:
    history, _ = serve(true_next, 3, messages=20)
    both = [*of_broker(history, "0000000a"), *of_broker(history, "0000000b")]
    with pytest.raises(HistoryError, match=r"^run 1 is there twice, of the brokers with the identities 0000000a and 0"):
        audit(frame(both))


@pytest.mark.parametrize(
    "old",
    [
        {"kind": "started", "reason": "unclean"},
        {"kind": "begun"},
        {"kind": "returned", "reason": "refused"},
        {"kind": "subscribed", "mode": "client-individual with begun"},
    ],
)
def test_a_history_of_another_version_is_refused_by_name(old: Event, frame: Frame, tmp_path: Path) -> None:
    """Parquet files have no version: an event that no broker of this version writes reveals theirs."""
    right, _ = serve(true_next, 3)
    own = {"kind": "started", "reason": None, "mode": None}
    ordinary = {"queue": "orders", "sequence": 1, "consumer": 1}
    right = [*right, right[-1] | ordinary | own | {"event": right[-1]["event"] + 1}]
    old = right[-1] | old | {"event": right[-1]["event"] + 1}
    folder = written(frame, [*right, old], tmp_path)
    with pytest.raises(HistoryError) as raised:
        audit_histories([folder])
    expected = f"{folder}: event {old['event']:,} is of another history version; this truenext reads 9 to 14: use the "
    assert str(raised.value).startswith(expected)


@pytest.mark.alternates("wrong histories")
def test_gaps_are_found_wherever_they_are(frame: Frame) -> None:
    present = [*range(5, 60), *range(61, 65_536), *range(65_540, 131_072), *range(300_000, 300_002)]
    empty: Event = dict.fromkeys(EVENTS.names)
    events = frame([empty | {"event": each, "run": 1, "at": EPOCH, "kind": "drained"} for each in present])
    assertDataFrameEqual(
        gaps(events, blocks(events)),
        [
            Row(first_missing=60, last_missing=60, missing=1),
            Row(first_missing=65_536, last_missing=65_539, missing=4),
            Row(first_missing=131_072, last_missing=299_999, missing=168_928),
        ],
    )


@pytest.mark.parametrize("bits", [0, 1, BATCH_BITS])
def test_a_commit_makes_all_batches_before_it_durable(bits: int, frame: Frame, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether batch and commit are in one range of batches, or in two that are far from each other."""
    monkeypatch.setattr("truenext.spark.audit.timeline.BATCH_BITS", bits)
    empty: Event = dict.fromkeys(EVENTS.names)
    recorded = [(1, 3), (1, 2), (1, 5), (2, 1), (2, 9)]
    history = [
        empty | {"event": number, "run": run, "at": EPOCH, "kind": "committed", "batch": batch}
        for number, (run, batch) in enumerate(recorded, 1)
    ]
    accepted = [
        empty | {"event": 10 * run + batch, "run": run, "at": EPOCH, "kind": "accepted", "batch": batch}
        for run in (1, 2)
        for batch in range(1, 7)
    ]
    rows = frame(accepted).transform(with_commits, commits(frame(history))).collect()
    assert {(row["run"], row["batch"]): row["commit"] and row["commit"]["event"] for row in rows} == {
        **{(1, batch): 1 for batch in (1, 2, 3)},
        **{(1, batch): 3 for batch in (4, 5)},
        (1, 6): None,
        (2, 1): 4,
        **{(2, batch): 5 for batch in range(2, 7)},
    }


def written(frame: Frame, history: list[Event], folder: Path) -> Path:
    frame(history).write.partitionBy("date").parquet(str(folder / "history" / "events"))
    return folder


@pytest.mark.alternates("whole audits")
def test_command_with_two_brokers_audits_them_in_one_job_and_names_them_in_each_row(
    frame: Frame, tmp_path: Path
) -> None:
    right, _ = serve(true_next, 3)
    wrong, _ = serve(two_buckets, 3)
    folders = [
        str(written(frame, right, tmp_path / "right" / "data")),
        str(written(frame, wrong, tmp_path / "wrong" / "data")),
    ]
    out = tmp_path / ODD_NAME
    audited = CliRunner().invoke(audit_command, [*folders, "--out", str(out)])
    assert ("The contract held" in audited.output, "The contract was broken" in audited.output) == (True, True)
    assert audited.exit_code == 1
    lines = [line for line in audited.output.splitlines() if "contract" in line]
    assert lines[0] == "The contract was broken at 1 of 2 brokers."
    assert [line.partition(":")[0] for line in lines[1:]] == ["right/data", "wrong/data"]
    tables = {name: pandas.read_parquet(out / name) for name in ("violations", "latency", "positions", "gaps")}
    assert set(tables["violations"]["broker"]) == {"wrong/data"}
    assert set(tables["latency"]["broker"]) == set(tables["positions"]["broker"]) == {"right/data", "wrong/data"}


@pytest.mark.parametrize(("held", "status"), [([True], 0), ([True, True], 0), ([True, False], 1)])
def test_command_has_status_0_only_if_the_contract_held_in_each_run(
    held: list[bool], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = [SimpleNamespace(has_contract_held=each) for each in held]
    monkeypatch.setattr("truenext.spark.audit.command.run_audit", lambda *_, **__: verdicts)
    assert CliRunner().invoke(audit_command, [str(tmp_path)]).exit_code == status


def test_command_without_a_history_has_status_2(tmp_path: Path) -> None:
    none = CliRunner().invoke(audit_command, [str(tmp_path)])
    assert (none.exit_code, "no history in" in none.output) == (2, True)
    assert CliRunner().invoke(audit_command, [str(tmp_path / "absent")]).exit_code == 2


def test_invalid_arguments_are_refused_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.spark.audit.command.start", None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot write to .*file: File exists"):
        run_audit([tmp_path], out=tmp_path / "file")
    for seconds in (float("nan"), float("inf"), -1.0, 0.0):
        with pytest.raises(ConfigurationError, match=f"--stuck must be a number of seconds, not {seconds}"):
            run_audit([tmp_path], stuck_seconds=seconds)


def test_audit_of_a_folder_whose_name_looks_like_a_pattern_reads_that_folder(
    spark: SparkSession, frame: Frame, tmp_path: Path
) -> None:
    history, _ = serve(true_next, 4, messages=3)
    for number, (name, alike) in enumerate([(ODD_NAME, "other"), ("run[1]", "run1"), ("{a,b}*", "ax")]):
        recorded = f'{{"kind": "closed", "process": "p", "number": {number}, "at": 1}}\n'
        for folder, text in ((tmp_path / name, recorded), (tmp_path / alike, recorded.replace("closed", "alike"))):
            folder.mkdir()
            (folder / "p-000001.jsonl").write_text(text)
        (row,) = read_stage_events(spark, [tmp_path / name]).collect()
        assert (row["kind"], row["number"]) == ("closed", number)
    written(frame, history, tmp_path / ODD_NAME)
    assert read_events(spark, tmp_path / ODD_NAME).count() == len(history)


@pytest.mark.parametrize(
    ("name", "encoding", "fault"),
    [
        (os.fsdecode(b"a\xff"), "utf-8", r"it has '\\udcff', a byte that is not UTF-8: rename"),
        ("ä", "ascii", "it has 'ä'"),
        ("a*b:c", "utf-8", r"that has '\*' and ':'; rename"),
    ],
)
def test_a_path_that_java_cannot_open_is_refused_before_spark_is(
    name: str, encoding: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.spark.audit.command.start", None)
    monkeypatch.setattr("locale.getencoding", lambda: encoding)
    with pytest.raises(ConfigurationError, match=fault):
        run_audit([tmp_path / name])
    with pytest.raises(ConfigurationError, match=fault):
        run_audit([tmp_path], stages=[tmp_path / name])
    if ":" not in name:
        with pytest.raises(ConfigurationError, match=fault):
            run_audit([tmp_path], out=tmp_path / name)


@pytest.mark.parametrize("folder", ["history/events", "events", "."])
def test_a_history_is_found_in_each_of_its_places(
    folder: str, spark: SparkSession, frame: Frame, tmp_path: Path
) -> None:
    history, _ = serve(true_next, 4, messages=3)
    frame(history).write.partitionBy("date").parquet(str(tmp_path / "here" / folder))
    read: Any = read_events(spark, tmp_path / "here")
    assertDataFrameEqual(read, frame(history).drop("date"))
