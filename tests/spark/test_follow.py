"""Tests of `truenext audit --follow`: each planted violation is told once, however the history is cut into batches
and wherever the query is killed.

TRUENEXT_FOLLOW=1 pytest tests/spark/test_follow.py   all of them: make follow
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.integration.broker_process import BrokerProcess
from tests.spark import planted_histories
from tests.spark.histories import Event, RandomHistory, joined
from tests.spark.pieces import judge_in_pieces
from tests.spark.plain import counted
from tests.spark.planted_histories import planted_history
from tests.spark.queues import url
from truenext import blocking
from truenext.client.core.credentials import NO_CREDENTIALS
from truenext.errors import Code, ConfigurationError, Refused
from truenext.history.export import write_by_date
from truenext.history.table import SCHEMA
from truenext.model.url import parse_url
from truenext.spark.audit import follow as follow_module
from truenext.spark.audit.command import run_audit
from truenext.spark.audit.follow import TABLES, Follower, Following, follow, merge, run_follow, verdict_of
from truenext.spark.audit.state import AuditSummary, StateFolder
from truenext.spark.datasource import TruenextDataSource
from truenext.spark.history.options import parse_options
from truenext.spark.history.readers import history_schema
from truenext.spark.sink.grants import check_grants

SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
STUCK_SECONDS = 10.0
pytestmark = pytest.mark.timeout(3600)
long = pytest.mark.skipif(not os.environ.get("TRUENEXT_FOLLOW"), reason="takes minutes: make follow")


class Killed(Exception):
    """Stands for a SIGKILL in the driver."""


class Step(NamedTuple):
    """Place where the driver is killed: when it calls a function, for the `call`-th time, or when that has returned."""

    owner: object
    function: str
    call: int = 1
    is_behind: bool = False


STEPS = {
    "audit": Step(follow_module, "audit"),
    "second write": Step(follow_module, "write_part", call=2),
    "tables": Step(Follower, "_rows"),
    "report": Step(Follower, "_send"),
    "sent": Step(Follower, "_send", is_behind=True),
    "cut": Step(StateFolder, "write"),
    "rename": Step(Path, "replace"),
    "state": Step(Follower, "_tell"),
    "old cut": Step(shutil, "rmtree"),
}
"""Steps of a micro-batch in their order, with those within a write. Behind the last two, the state is written."""


@contextmanager
def killed_at(name: str) -> Iterator[None]:
    """Kill the driver at a step."""
    step = STEPS[name]
    function: Any = getattr(step.owner, step.function)
    calls = 0

    def die(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < step.call:
            return function(*arguments, **options)
        if step.is_behind:
            function(*arguments, **options)
        raise Killed(name)

    with patch.object(step.owner, step.function, die):
        yield


def write_history(folder: Path, events: list[Event]) -> None:
    rows = [{name: each.get(name) for name in SCHEMA.names} for each in events]
    write_by_date(pa.Table.from_pylist(rows, SCHEMA), folder / "events", f"{events[0]['event']:016x}")


def found_in(out: Path, files: str = "{}/*/*.parquet") -> list[tuple[Any, ...]]:
    """Return the findings in the tables, in order. `files` is the pattern of a table's files, by its name."""
    import pyarrow.parquet as pq

    kinds = {"lost": "lost", "stuck": "stuck"}
    return sorted(
        (kinds.get(name) or row["kind"], row["queue"], row["event"], row["sequence"] or -1)
        for name in TABLES
        for path in sorted(out.glob(files.format(name)))
        for row in pq.ParquetFile(path).read().to_pylist()
    )


def findings_of(events: list[Event]) -> list[tuple[Any, ...]]:
    rows = planted_histories.findings_of(events)
    return sorted((each["kind"], each["queue"], each["event"], each["sequence"]) for each in rows)


def run(spark: SparkSession, folder: Path, **more: Any) -> str:
    """Follow up to the end of what is there, and return the verdict."""
    state = folder / "state"
    following = Following(
        place=more.pop("place", {"path": str(folder / "history")}),
        out=folder / "out",
        stuck_seconds=STUCK_SECONDS,
        **more,
    )
    with StateFolder.locked(state) as locked:
        following.check(locked.read())
        return str(follow(spark, following, locked, state, until_now=True))


def judge(spark: SparkSession, folder: Path, piece: list[Event], report: dict[str, str] | None = None) -> None:
    """Judge a micro-batch as a query does that has just been started."""
    place = {"path": str(folder / "history")}
    following = Following(place=place, out=folder / "out", stuck_seconds=STUCK_SECONDS, report_to=report)
    rows = [tuple(each[name] for name in SCHEMA.names) for each in piece]
    batch = spark.createDataFrame(rows, history_schema()).repartition(2)
    with StateFolder.locked(folder / "state") as locked:
        Follower(spark, following, locked, folder / "state").judge(batch, 0)


@long
@pytest.mark.parametrize("seed", [3, 8])
def test_each_planted_violation_is_told_once_wherever_the_query_is_killed(
    spark: SparkSession, tmp_path: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    spark.dataSource.register(TruenextDataSource)
    events = joined(RandomHistory(each, 60, faults=0.3).events for each in range(seed, seed + 4))
    (tmp_path / "broker").mkdir()
    with BrokerProcess(tmp_path / "broker").running() as broker:
        report = {"url": url(broker), "queue": "findings"}
        for number, piece in enumerate(in_seven(events, random.Random(seed))):
            write_history(tmp_path / "history", piece)
            with killed_at([*STEPS][(number + seed) % len(STEPS)]), suppress(Killed):
                judge(spark, tmp_path, piece, report)
            judge(spark, tmp_path, piece, report)
        sent = reported(broker)
    expected = findings_of(events)
    assert expected
    assert found_in(tmp_path / "out") == expected
    check_reported(sent, tmp_path / "out")
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("finding: ")]
    assert len(told) == len(set(told)) <= len(expected)


def in_seven(events: list[Event], dice: random.Random) -> list[list[Event]]:
    cuts = sorted(dice.sample(range(1, len(events)), 6))
    return [events[start:end] for start, end in pairwise([0, *cuts, len(events)])]


@pytest.fixture(scope="module")
def planted() -> list[Event]:
    """History with all planted faults."""
    return planted_history(random.Random(SEED))


@long
def test_each_planted_fault_is_told_once_by_seven_audits_with_a_state(
    spark: SparkSession, tmp_path: Path, planted: list[Event]
) -> None:
    print(f"TRUENEXT_SEED={SEED}")
    told: Counter[str] = Counter()
    parts = in_seven(planted, random.Random(SEED))
    for piece in parts:
        write_history(tmp_path / "history", piece)
        (verdict,) = run_audit([str(tmp_path)], state=tmp_path / "state", out=tmp_path / "out")
        told.update({each.kind: each.count for each in verdict.findings})
    check_told(planted, parts, tmp_path, told)


@long
def test_each_planted_fault_is_told_once_by_a_query_that_is_killed_at_every_step(
    spark: SparkSession, tmp_path: Path, planted: list[Event]
) -> None:
    print(f"TRUENEXT_SEED={SEED}")
    spark.dataSource.register(TruenextDataSource)
    (tmp_path / "broker").mkdir()
    with BrokerProcess(tmp_path / "broker").running() as broker:
        report = {"url": url(broker), "queue": "findings"}
        parts = in_seven(planted, random.Random(SEED))
        for number, piece in enumerate(parts):
            write_history(tmp_path / "history", piece)
            for step in steps_of(number):
                with killed_at(step), pytest.raises(Killed):
                    judge(spark, tmp_path, piece, report)
            judge(spark, tmp_path, piece, report)
        sent = reported(broker)
    with StateFolder.locked(tmp_path / "state") as state:
        verdict = verdict_of(state.read())
    check_told(planted, parts, tmp_path, Counter({each.kind: each.count for each in verdict.findings}))
    check_reported(sent, tmp_path / "out")


def steps_of(number: int) -> list[str]:
    """Return the steps at which the driver is killed in a micro-batch. Once the state is written, one is left."""
    *steps, told, cleaned = STEPS
    return [*steps, cleaned if number % 2 else told]


def check_told(events: list[Event], parts: list[list[Event]], folder: Path, told: Counter[str]) -> None:
    """Check that the tables below `folder` are those of audits of the parts, and the counts of verdicts those of an
    audit without cuts, except for losses: a part that ends behind a start tells them at its end. An audit without cuts
    tells them at a later event, or not at all if a gap comes before that."""
    found = [*chain.from_iterable(judge_in_pieces(events, [each[0]["event"] for each in parts[1:]]))]
    assert found_in(folder / "out") == sorted((each.kind, queue, each.event, each.sequence) for queue, each in found)
    losses = sum(each.count for _, each in found if each.kind == "lost")
    expected: Counter[str] = Counter()
    for (kind, _), count in counted(planted_histories.findings_of(events)).items():
        expected[kind] += count
    assert losses >= expected["lost"]
    expected["lost"] = losses
    assert told == expected


def reported(broker: BrokerProcess) -> list[dict[str, Any]]:
    with blocking.connect(url(broker)) as connection:
        return [json.loads(each.body) for each in connection.browse("/queue/findings")]


def check_reported(sent: list[dict[str, Any]], out: Path) -> None:
    """Check that the queue has each row of the tables once."""
    of_tables = sorted((table_of(kind), queue, event, sequence) for kind, queue, event, sequence in found_in(out))
    assert sorted((each["table"], each["queue"], each["event"], each.get("sequence", -1)) for each in sent) == of_tables


@long
def test_stream_of_a_growing_folder_is_judged_up_to_its_end(spark: SparkSession, tmp_path: Path) -> None:
    events = joined(RandomHistory(each, 60, faults=0.3).events for each in range(3, 7))
    half = len(events) // 2
    for piece in (events[:half], events[half:]):
        write_history(tmp_path / "history", piece)
        verdict = run(spark, tmp_path)
    assert verdict.startswith(f"The contract was broken: {len(events):,} events.")
    assert found_in(tmp_path / "out") == findings_of(events)


def table_of(kind: str) -> str:
    tables = {"lost": "lost", "stuck": "stuck", "duplicate": "duplicates", "resurrected": "duplicates"}
    return tables.get(kind, "violations" if kind in ("inversion", "order", "premature") else "consumers")


@pytest.fixture
def whole(tmp_path: Path) -> Callable[[], Following]:
    return lambda: Following(place={"path": str(tmp_path)}, out=tmp_path / "out", stuck_seconds=STUCK_SECONDS)


def test_following_a_broker_without_history_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, ["--no-history"]).running() as broker:
        place = {"url": url(broker), "patience": "0"}
        following = Following(place=place, out=tmp_path / "out", stuck_seconds=STUCK_SECONDS)
        with pytest.raises(Exception, match="this broker has no history, as it was started with --no-history"):
            following.check(None)


def test_followed_broker_of_several_addresses_is_named_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: a second --url, as of a standby, was refused as no address."""
    found: list[Following] = []

    def check(following: Following, _: object) -> None:
        found.append(following)
        raise Killed

    monkeypatch.setattr(Following, "check", check)
    urls = ("stomp://127.0.0.1:1", "stomp://127.0.0.1:2")
    with pytest.raises(Killed):
        run_follow(
            (),
            urls=urls,
            credentials=NO_CREDENTIALS,
            report_to="findings",
            state=tmp_path / "state",
            out=tmp_path / "out",
            queue=None,
            stuck_seconds=STUCK_SECONDS,
            master=None,
        )
    (following,) = found
    assert parse_options({"kind": "history", **following.place}).addresses == tuple(map(parse_url, urls))


@pytest.mark.alternates("rights to report")
@pytest.mark.parametrize(
    ("take", "send", "refusal"),
    [
        ("Spark.*.main.>", "other", "user 'audit' may not send to /queue/findings"),
        ("other", "findings", "user 'audit' may not take from /queue/Spark.sink.main"),
        ("Spark.*.main.>", "findings", None),
    ],
)
def test_missing_right_to_report_is_seen_before_the_first_finding(
    take: str, send: str, refusal: str | None, tmp_path: Path
) -> None:
    """Fixed: the query failed with its first finding, perhaps after days."""
    (tmp_path / "word").write_text("word")
    own = '["Spark.*.main.>"]'
    (tmp_path / "users.toml").write_text(
        f'[user.audit]\npassword_file = "word"\nmonitor = true\nbrowse = {own}\nmanage = {own}\n'
        f'send = ["Spark.*.main.>", "{send}"]\ntake = ["{take}"]\n'
    )
    for name in ("word", "users.toml"):
        (tmp_path / name).chmod(0o600)
    (tmp_path / "data").mkdir()
    with BrokerProcess(tmp_path / "data", ["--users", str(tmp_path / "users.toml")]).running() as broker:
        place = {"url": url(broker), "user": "audit", "passwordFile": str(tmp_path / "word")}
        report = place | {"queue": "findings"}
        following = Following(place=place, out=tmp_path, stuck_seconds=STUCK_SECONDS, report_to=report)
        with nullcontext() if refusal is None else pytest.raises(Refused, match=re.escape(refusal)):
            following.check(None)
        broker._log_checked = len(broker.log)


def test_broker_that_cannot_take_findings_for_now_does_not_keep_the_query_from_its_start() -> None:
    for code, is_raised in ((Code.NO_SPACE, False), (Code.FORBIDDEN, True)):
        refused = Refused("no", code)
        options = SimpleNamespace(space="main", destination="/queue/f", connect=Mock(side_effect=refused))
        with pytest.raises(Refused) if is_raised else nullcontext():
            check_grants(options)  # type: ignore[arg-type]


def test_folder_without_history_is_refused_before_spark_starts(whole: Callable[[], Following]) -> None:
    with pytest.raises(ConfigurationError, match="no history in"):
        whole().check(None)


def test_micro_batch_behind_events_that_the_state_has_not_is_refused(
    whole: Callable[[], Following], tmp_path: Path
) -> None:
    """Fixed: with an older state in place of the last one, events were never judged."""
    events = RandomHistory(3, 60, faults=0.3).events
    write_history(tmp_path, [each for each in events if not 10 <= each["event"] < 15])
    whole().check_passed_over(10, 15)
    whole().check_passed_over(15, 15)
    for start in (1, 9):
        with pytest.raises(ConfigurationError, match=f"events {start} to 14 would not be judged"):
            whole().check_passed_over(start, 15)


def test_summaries_of_micro_batches_become_one() -> None:
    first = AuditSummary(1, 10, 5, 10, {"lost": (2, "2 lost")}, ("a gap",))
    second = AuditSummary(11, 15, 9, 5, {"lost": (1, "1 lost"), "order": (3, "3")}, ("a gap",))
    found = {"lost": (3, "1 lost"), "order": (3, "3")}
    assert merge((first, second)) == AuditSummary(1, 15, 9, 15, found, ("a gap",))
