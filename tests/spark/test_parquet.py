"""Tests of the export of history to Parquet: the events are those of the broker's files, and each is in one place at
any time."""

import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contract.naive_history import read_folder, read_parquet
from tests.contract.test_history import ORDERS, RecordedEngine, busy, of_version, record_all, write
from truenext.engine.writing.event_log import EventLog
from truenext.errors import HistoryError
from truenext.history.export import EVENTS_FOLDER, delete_old_files, export_all, export_closed_files, write_by_date
from truenext.history.export import main as export_main
from truenext.history.exporter import HistoryExporter
from truenext.history.files import chunk_at, chunks_of_file, history_files, parquet_files
from truenext.history.table import arrow_table_of
from truenext.model.commands import AckMode, Subscribe
from truenext.model.events import FILE, HISTORY_VERSION, MAGIC, OLDEST_HISTORY_VERSION, EventKind
from truenext.spark.audit.runs import KINDS


@pytest.fixture
def long_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedEngine:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 2000)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    recorded = busy(random.Random(seed))
    write(tmp_path, recorded).close()
    return recorded


def test_parquet_has_the_events_of_the_history_files(long_history: RecordedEngine, tmp_path: Path) -> None:
    *_, growing = history_files(tmp_path)
    assert len(list(export_closed_files(tmp_path))) > 1
    assert history_files(tmp_path) == [growing]
    exported = read_parquet(tmp_path / EVENTS_FOLDER)
    assert exported == long_history.events()[: len(exported)]
    assert exported + read_folder(tmp_path) == long_history.events()


def test_parquet_has_started_messages_pull_requests_and_windows(tmp_path: Path) -> None:
    recorded = RecordedEngine()
    record_all(recorded, recorded.log)
    recorded.commit()
    write(tmp_path, recorded).close()
    (tmp_path / "0000000000001000.history").touch()
    list(export_closed_files(tmp_path))
    exported = read_parquet(tmp_path / EVENTS_FOLDER)
    assert exported == recorded.events()
    assert Counter(event["kind"] for event in exported)["started"] == 4


def test_parquet_has_exclusive_consumers_and_their_priorities(tmp_path: Path) -> None:
    recorded = RecordedEngine()
    for priority in (-127, 0, 127):
        subscribe = Subscribe("s", ORDERS, AckMode.CLIENT, 10, priority=priority, is_exclusive=priority != 0)
        recorded.engine.commands.subscribe(recorded.session(str(priority)), subscribe)
        recorded.send(recorded.session("sender"), 9)
    recorded.commit()
    write(tmp_path, recorded).close()
    (tmp_path / "0000000000001000.history").touch()
    list(export_closed_files(tmp_path))
    exported = read_parquet(tmp_path / EVENTS_FOLDER)
    assert exported == recorded.events()
    found = [(event["mode"], event.get("priority")) for event in exported if event["kind"] == "subscribed"]
    assert found == [("client exclusive", -127), ("client", None), ("client exclusive", 127)]


def test_remaining_history_is_exported_to_another_folder_and_left_as_it_is(
    long_history: RecordedEngine, tmp_path: Path
) -> None:
    next(iter(export_closed_files(tmp_path)))
    before = history_files(tmp_path)
    files = export_all(tmp_path, tmp_path / "rest")
    assert history_files(tmp_path) == before
    assert read_parquet(tmp_path / EVENTS_FOLDER) + read_parquet(tmp_path / "rest") == long_history.events()
    assert len(files) == len(set(files)) == len(before) + 1


def test_an_export_that_was_interrupted_is_done_again_and_nothing_is_there_twice(
    long_history: RecordedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(export_closed_files(tmp_path))
    list(export_closed_files(tmp_path))
    assert read_parquet(tmp_path / EVENTS_FOLDER) + read_folder(tmp_path) == long_history.events()


def test_days_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 500)
    recorded = RecordedEngine()
    session = recorded.session()
    for day in range(40):
        recorded.engine.state.commit_state.tick(day * 86_400_000_000 // 4, 0)
        recorded.send(session)
        recorded.commit()
    write(tmp_path, recorded).close()
    list(export_closed_files(tmp_path))
    folders = sorted(path.name for path in (tmp_path / EVENTS_FOLDER).iterdir())
    assert folders[:3] == ["date=1970-01-01", "date=1970-01-02", "date=1970-01-03"]
    exported = read_parquet(tmp_path / EVENTS_FOLDER)
    assert exported == recorded.events()[: len(exported)]


def test_old_history_goes_first_by_age_then_by_size(long_history: RecordedEngine, tmp_path: Path) -> None:
    list(export_closed_files(tmp_path))
    files = sorted((tmp_path / EVENTS_FOLDER).glob("date=*/*.parquet"))
    day = tmp_path / EVENTS_FOLDER / "date=2999-01-01"
    day.mkdir()
    for path in files[2:]:
        path.rename(day / path.name)
    capacity = sorted(day.iterdir())
    assert delete_old_files(tmp_path) == files[:2]
    assert not files[0].parent.exists()
    size = sum(path.stat().st_size for path in capacity[1:])
    assert delete_old_files(tmp_path, bytes_max=size) == capacity[:1]
    assert delete_old_files(tmp_path, bytes_max=0) == capacity[1:]
    assert len(history_files(tmp_path)) == 1


def test_days_of_one_file_are_deleted_together_or_not_at_all(long_history: RecordedEngine, tmp_path: Path) -> None:
    """Fixed: with the first of two days gone, readers took the events of both for kept."""
    list(export_closed_files(tmp_path))
    first, second, *_ = files = sorted((tmp_path / EVENTS_FOLDER).glob("date=*/*.parquet"))
    new = tmp_path / EVENTS_FOLDER / "date=2999-01-01"
    new.mkdir()
    for path in files[2:]:
        path.rename(new / path.name)
    later = new / first.name
    later.write_bytes(first.read_bytes())
    assert delete_old_files(tmp_path) == [second]
    assert first.exists() and later.exists()
    size = sum(path.stat().st_size for path in parquet_files(tmp_path))
    assert delete_old_files(tmp_path, bytes_max=size - 1) == [first, later]


def test_a_process_exports_what_has_ended_and_deletes_what_is_too_much(
    long_history: RecordedEngine, tmp_path: Path
) -> None:
    *ended, growing = history_files(tmp_path)
    for bytes_max, files in ((1 << 30, len(ended)), (0, 0)):
        exporter = HistoryExporter(tmp_path, bytes_max=bytes_max, days_max=36500)
        exporter.start()
        while exporter.is_running:
            time.sleep(0.01)
        assert history_files(tmp_path) == [growing]
        assert len(list((tmp_path / EVENTS_FOLDER).glob("date=*/*.parquet"))) == files


def test_a_parquet_file_names_the_epoch_of_each_run_that_has_one(tmp_path: Path) -> None:
    event_log = EventLog()
    event_log.run_started(after_clean_stop=True)
    event_log.run_started(after_clean_stop=False, epoch=3)
    chunk = chunk_at(memoryview(event_log.close_chunk()), 0)
    assert chunk is not None
    write_by_date(arrow_table_of([chunk]), tmp_path / EVENTS_FOLDER, "1")
    first, second = read_parquet(tmp_path / EVENTS_FOLDER)
    assert ("epoch" in first, second["epoch"]) == (False, 3)


def test_parquet_file_names_the_identity_of_each_run_and_takes_it_for_no_queue(tmp_path: Path) -> None:
    event_log = EventLog()
    # The number of the first identity is that of the first queue, too.
    for identity in ("00000001", "fedcba98", ""):
        event_log.run_started(after_clean_stop=True, identity=identity)
    chunk = chunk_at(memoryview(event_log.close_chunk()), 0)
    assert chunk is not None
    write_by_date(arrow_table_of([chunk]), tmp_path / EVENTS_FOLDER, "1")
    rows = read_parquet(tmp_path / EVENTS_FOLDER)
    assert [row.get("store") for row in rows] == ["00000001", "fedcba98", None]
    assert not any("queue" in row for row in rows)


def test_each_event_names_the_identity_also_in_a_file_that_begins_within_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 500)
    recorded = RecordedEngine()
    recorded.log.run_started(after_clean_stop=True, identity="0000000a")
    session = recorded.session()
    for _ in range(20):
        recorded.send(session)
        recorded.commit()
    write(tmp_path, recorded).close()
    *_, last = history_files(tmp_path)
    stores = arrow_table_of(chunks_of_file(last)).column("store").to_pylist()
    assert stores and set(stores) == {"0000000a"}
    list(export_closed_files(tmp_path))
    rows = read_parquet(tmp_path / EVENTS_FOLDER) + read_folder(tmp_path)
    named = [row.get("store") for row in rows]
    # The first file was begun before.
    assert named[len(named) // 2 :] == ["0000000a"] * (len(named) - len(named) // 2)
    assert {row["kind"] for row in rows} >= {"accepted", "committed"}
    assert not any("queue" in row for row in rows if row["kind"] == "committed")


@pytest.mark.parametrize("version", [OLDEST_HISTORY_VERSION - 1, HISTORY_VERSION + 1])
def test_a_history_of_another_version_is_not_exported(tmp_path: Path, version: int) -> None:
    write(tmp_path, busy(random.Random(1), steps=4)).close()
    (path,) = history_files(tmp_path)
    of_version(path, version)
    (tmp_path / "0000000000001000.history").touch()
    with pytest.raises(HistoryError, match=rf"{path} has history version {version}; this truenext reads"):
        list(export_closed_files(tmp_path))
    assert path.exists()


def test_history_that_cannot_be_exported_is_one_line_of_the_log(tmp_path: Path) -> None:
    for name in ("0000000000000001.history", "0000000000000002.history"):
        (tmp_path / name).write_bytes(FILE.pack(MAGIC, 3, 1))
    command = [sys.executable, "-m", "truenext.history.export", str(tmp_path), "1000000", "30"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (line,) = ended.stderr.splitlines()
    assert re.search(
        r"^\S+ \S+ ERROR history not exported error=.* has history version 3; this truenext reads 9 to 14", line
    )


def test_folder_that_is_moved_while_it_is_exported_gets_its_history_and_a_new_one_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the process of a killed broker made the folder again, and its new broker had the old events before a
    gap."""
    data, moved = tmp_path / "data", tmp_path / "moved"
    data.mkdir()
    write(data, busy(random.Random(1), steps=4)).close()
    (data / "0000000000001000.history").touch()

    def write_in_moved_folder(table: pa.Table, folder: Path, stem: str) -> list[Path]:
        data.rename(moved)
        return write_by_date(table, folder, stem)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.nice", lambda _: None)
    monkeypatch.setattr("truenext.history.export.write_by_date", write_in_moved_folder)
    export_main(data, 1_000_000, 30_000)
    assert not data.exists()
    assert [each.suffix for each in moved.glob("*.history")] == [".history"]
    assert read_parquet(moved / EVENTS_FOLDER)


def test_a_recording_of_the_examples_begins_with_the_start_of_a_run_in_this_format() -> None:
    """`make demo` audits the recording, and refuses another format."""
    files = [*(Path(__file__).parents[2] / "examples" / "recordings").rglob("*.parquet")]
    assert files
    for file in files:
        kinds = pq.read_table(file, columns=["kind"]).column("kind").to_pylist()
        assert kinds[0] == EventKind.RUN_STARTED.label
        assert set(kinds) <= KINDS
