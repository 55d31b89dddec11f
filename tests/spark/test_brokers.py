"""Tests of audits of several brokers in one job: each event is judged once, as in an audit of its broker alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.contract.test_history import busy, write
from tests.drawing import one_of
from tests.spark.histories import Event, RandomHistory
from tests.spark.judge import Judge
from tests.spark.policies import serve, true_next, two_buckets
from tests.spark.test_audit import restored_in_place
from truenext.errors import ConfigurationError, HistoryError
from truenext.history.export import export_closed_files
from truenext.history.files import history_files
from truenext.spark.audit.audit import AuditResults, audit_brokers
from truenext.spark.audit.brokers import FolderHistory, choose_blocks
from truenext.spark.audit.section_plan import SECTION_EVENTS
from truenext.spark.history_files import errors_of_tasks, find_histories, group_files, read_files

pytestmark = pytest.mark.timeout(900)

Frame = Callable[[list[Event]], DataFrame]
STUCK_SECONDS = 10.0
FIRST, SECOND, RESTORED = "0000000a", "0000000b", "0000000c"
COUNTED = {"violations": None, "duplicates": "count", "lost": "count", "consumers": None, "stuck": None}
"""Tables of findings, and the column that has their number."""


def found(results: AuditResults) -> dict[str, Counter[tuple[str, str]]]:
    """Return the number of findings of each kind in each queue, by broker."""
    total: dict[str, Counter[tuple[str, str]]] = {each.broker: Counter() for each in results.verdicts}
    for name, count in COUNTED.items():
        for row in results.tables[name].collect():
            kind = row.asDict().get("kind", name)
            total[row["broker"]][kind, row["queue"]] += 1 if count is None else row[count]
    return total


def random_history(seed: int, store: str) -> list[Event]:
    return of_store(RandomHistory(seed, 80, faults=0.3).events, store)


def of_store(history: list[Event], store: str) -> list[Event]:
    """Return the history with the identity in each event."""
    return [each | {"store": store} for each in history]


@one_of("section_events", (SECTION_EVENTS, 10), ["whole queues", "sections"])
@pytest.mark.alternates("whole audits")
def test_audit_of_several_brokers_finds_of_each_what_an_audit_of_it_alone_finds(
    frame: Frame, section_events: int
) -> None:
    """The brokers have queues of the same names, and the same numbers of events, messages and runs."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    own = {FIRST: random_history(seed, FIRST), SECOND: random_history(seed + 1, SECOND)}
    own["recorded"] = RandomHistory(seed + 2, 80, faults=0.3).events
    histories = [FolderHistory(f"folder of {name}", frame(events)) for name, events in own.items()]
    histories[2] = histories[2]._replace(name="recorded")
    results = audit_brokers(histories, stuck_seconds=STUCK_SECONDS, section_events=section_events)
    assert [each.broker for each in results.verdicts] == [*own]
    assert found(results) == {name: Judge(events, STUCK_SECONDS).judge().found for name, events in own.items()}
    numbers = {name: {each["event"] for each in events} for name, events in own.items()}
    for row in results.tables["violations"].collect():
        assert row["event"] in numbers[row["broker"]]
    for each in results.verdicts:
        assert each.verdict.events == len(own[each.broker])
    results.unpersist()


@pytest.mark.alternates("whole audits")
def test_histories_of_active_standby_and_restored_broker_are_each_judged_once(frame: Frame) -> None:
    """The standby's folder begins later and lags behind; the restored broker's begins with events of the original."""
    active, wrong = serve(two_buckets, 1)
    active = of_store(active, FIRST)
    restored = restored_in_place(RESTORED)
    histories = {"standby": active[20:-30], "active": active, "restored": restored}
    results = audit_brokers([FolderHistory(name, frame(events)) for name, events in histories.items()])
    assert [(each.broker, each.histories) for each in results.verdicts] == [
        (FIRST, ("standby", "active")),
        (RESTORED, ("restored",)),
    ]
    first, other = (each.verdict for each in results.verdicts)
    assert first.events == len(active)
    assert {each.kind: each.count for each in first.findings} == dict(wrong)
    assert first.notes == ("standby and active are one history; each event was judged once.",)
    assert other.has_contract_held
    assert other.events == sum(each["run"] == 2 for each in restored)
    results.unpersist()


def changed(history: list[Event], at: int, **columns: Any) -> list[Event]:
    return [*history[:at], history[at] | columns, *history[at + 1 :]]


@pytest.mark.alternates("whole audits")
def test_event_that_differs_or_is_missing_in_a_folder_of_the_broker_is_a_finding(frame: Frame) -> None:
    right, _ = serve(true_next, 3, messages=20)
    right = of_store(right, FIRST)
    dispatched = [at for at, each in enumerate(right) if each["kind"] == "dispatched"]
    other = changed(right, dispatched[0], consumer=None, deliveries=None)
    other = [each for at, each in enumerate(other) if at != dispatched[1]]
    results = audit_brokers([FolderHistory("one", frame(right)), FolderHistory("two", frame(other))])
    (finding,) = results.verdict.findings
    assert (finding.kind, finding.count) == ("difference", 2)
    rows = {(row["event"], row["history"], row["detail"]) for row in results.tables["differences"].collect()}
    assert rows == {
        (right[dispatched[0]]["event"], "one", "differs"),
        (right[dispatched[0]]["event"], "two", "differs"),
        (right[dispatched[1]]["event"], "one", "is missing in another"),
    }
    results.unpersist()


def test_blocks_are_read_from_one_history_unless_those_that_reach_them_differ() -> None:
    one, other = (3, 1), (3, 2)
    contents = [{0: one, 1: one, 2: one}, {1: one, 2: other, 3: one, 5: one}, {3: one, 4: one, 5: one}]
    assert choose_blocks(contents, [(0, 2), (1, 5), (3, 5)]) == ([[0, 1], [3, 5], []], [2, 4])


# ---- Where histories are ----


@pytest.mark.parametrize("root", ["/data", "s3a://bucket/data", "file:///data"])
def test_files_of_histories_are_grouped_by_the_folder_of_their_broker(root: str) -> None:
    paths = [
        *(f"{root}/a/history/{name}.history" for name in ("3", "1", "2")),
        *(f"{root}/a/history/events/date=2026-11-{day}/1.parquet" for day in ("22", "21")),
        f"{root}/b/date=2026-11-21/1.parquet",
        f"{root}/c/part-0.parquet",
        f"{root}/2.history",
    ]
    random.shuffle(paths)
    found = {each.folder: each for each in group_files(paths)}
    assert [*found] == [root, f"{root}/a", f"{root}/b", f"{root}/c"]
    assert found[f"{root}/a"].raw == tuple(f"{root}/a/history/{name}.history" for name in ("2", "3"))
    assert [path.split("/")[-2] for path in found[f"{root}/a"].parquet] == ["date=2026-11-21", "date=2026-11-22"]
    assert found[root].raw == (f"{root}/2.history",)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the histories of two brokers, in several files each, a part of one in Parquet files."""
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 2000)
    for name in ("one", "two [2]"):
        folder = tmp_path / name / "history"
        folder.mkdir(parents=True)
        write(folder, busy(random.Random(3))).close()
    next(export_closed_files(tmp_path / "one" / "history"))
    (tmp_path / "one" / "aside-7").mkdir()
    (tmp_path / "one" / "aside-7" / "1.history").touch()
    return tmp_path


def read_all(spark: SparkSession, location: Path | str) -> dict[str, list[tuple[Any, ...]]]:
    """Return the events of each history at a location, in order, by its folder."""
    return {
        files.folder.rpartition("/")[2]: [tuple(row) for row in read_files(spark, files)[0].orderBy("event").collect()]
        for files in find_histories(spark, location)
    }


def test_tasks_read_histories_below_a_folder_and_below_an_address(spark: SparkSession, recorded: Path) -> None:
    local = read_all(spark, recorded)
    assert [*local] == ["one", "two [2]"]
    assert len(local["one"]) > 100
    assert local["one"] == local["two [2]"]
    assert read_all(spark, f"file://{recorded}") == local


def test_file_that_the_broker_exports_meanwhile_is_read_as_parquet_and_a_deleted_one_is_an_error(
    spark: SparkSession, recorded: Path
) -> None:
    (files,) = find_histories(spark, recorded / "two [2]")
    events, raw = read_files(spark, files)
    list(export_closed_files(recorded / "two [2]" / "history"))
    assert [row["event"] for row in events.orderBy("event").collect()] == [
        row[0] for row in read_all(spark, recorded / "one")["one"]
    ]
    assert raw is not None
    raw.unpersist()
    (last,) = history_files(recorded / "two [2]" / "history")
    last.unlink()
    gone = rf"{last.name} is not there any more, or not on this machine"
    with pytest.raises(HistoryError, match=gone), errors_of_tasks():
        read_files(spark, files)[0].collect()


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("s3a://bucket/data", r"no jar for s3a:// is there; add one, such as with spark-submit --packages"),
        ("other://bucket/data", "no jar for other:// is there"),
        ("file:///there/is/none", "Path does not exist"),
    ],
)
def test_address_that_spark_cannot_open_is_an_error_of_one_sentence(
    address: str, cause: str, spark: SparkSession
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^Spark cannot open {address}: .*{cause}.*$"):
        find_histories(spark, address)
