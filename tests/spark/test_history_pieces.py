"""Tests of pieces of a history: together they have each event once, from whichever event on, while the history grows,
becomes Parquet and is deleted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.ipc as ipc
import pytest

from tests.contract.naive_history import read
from tests.contract.test_history import RecordedEngine, busy, write
from truenext.errors import HistoryError
from truenext.history import pieces
from truenext.history.export import delete_old_files, export_closed_files
from truenext.history.files import blocks_of, chunks_of, history_files
from truenext.history.parquet_piece import parquet_piece
from truenext.history.pieces import Piece, PieceReader
from truenext.history.writer import HistoryWriter
from truenext.model.events import FILE, GAP_EVENTS, HISTORY_VERSION, EventKind
from truenext.spark.history.places import FolderHistory
from truenext.spark.history_files import _list_folder

QUEUES = ("/queue/orders", "/queue/bills", "/queue/never.named")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.engine.writing.event_log.HISTORY_FILE_BYTES", 1500)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 700)


def events_of(piece: Piece) -> list[dict[str, Any]]:
    if not piece.is_arrow:
        return list(read(piece.content[FILE.size :]))
    rows = ipc.open_stream(piece.content).read_all().to_pylist()
    for row in rows:
        row["at"] = round(row["at"].timestamp() * 1e6)
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def read_all(reader: PieceReader, after: int = 0, *, with_causes: bool = True) -> list[dict[str, Any]]:
    """Return the events behind an event, piece by piece."""
    found: list[dict[str, Any]] = []
    while (piece := reader.read(after, with_causes=with_causes)).content:
        found += [each for each in events_of(piece) if each["event"] > after]
        assert piece.end == found[-1]["event"] + 1
        after = piece.end - 1
    return found


def make(seed: int, **first: int) -> RecordedEngine:
    return busy(
        random.Random(seed), groups=("", "a"), addresses=QUEUES[:2], sent_to=QUEUES, identity="0badcafe", **first
    )


@pytest.mark.parametrize("seed", range(3))
def test_pieces_have_each_event_once_from_any_event_on(tmp_path: Path, seed: int) -> None:
    recorded = make(seed)
    write(tmp_path, recorded).close()
    events = recorded.events()
    assert len(history_files(tmp_path)) > 3
    assert read_all(PieceReader(tmp_path)) == events
    reader = PieceReader(tmp_path)
    for after in random.Random(seed).sample(range(len(events) + 1), 20):
        assert read_all(reader, after) == events[after:]


def test_pieces_follow_a_history_that_grows_chunk_by_chunk(tmp_path: Path) -> None:
    recorded = make(1)
    events = recorded.events()
    reader, history = PieceReader(tmp_path), HistoryWriter(tmp_path)
    assert reader.read(0, with_causes=True) == Piece(0, 1, False, b"")
    found: list[dict[str, Any]] = []
    for chunk in recorded.chunks:
        history.append(chunk)
        history.flush()
        found += read_all(reader, len(found))
        assert reader.next_event() == len(found) + 1
    history.close()
    assert found == events
    assert reader.first_events()[0] == 1


def test_piece_names_the_broker_and_only_queues_that_occur(tmp_path: Path) -> None:
    recorded = make(2)
    write(tmp_path, recorded).close()
    reader = PieceReader(tmp_path)
    after = 0
    while (piece := reader.read(after, with_causes=True)).content:
        blocks = [block for chunk in chunks_of(piece.content, "piece") for block in blocks_of(chunk)]
        named = {bytes(block.columns).decode() for block in blocks if block.kind == EventKind.NAME}
        in_events = {each.get(name) for each in events_of(piece) for name in ("queue", "target_queue", "store")}
        assert named == in_events - {None}
        after = piece.end - 1


def test_causes_are_empty_texts_for_readers_without_the_right(tmp_path: Path) -> None:
    recorded = make(3)
    write(tmp_path, recorded).close()
    events = recorded.events()
    assert any(each.get("cause") for each in events)
    hidden = [each | {"cause": ""} if "cause" in each else each for each in events]
    assert read_all(PieceReader(tmp_path), with_causes=False) == hidden
    for cause in {each["cause"].encode() for each in events if "cause" in each}:
        after = 0
        while (piece := PieceReader(tmp_path).read(after, with_causes=False)).content:
            assert cause not in piece.content or len(cause) < 4
            after = piece.end - 1


@pytest.mark.parametrize("with_causes", [True, False])
def test_pieces_of_exported_files_have_the_same_events(tmp_path: Path, with_causes: bool) -> None:
    recorded = make(4)
    write(tmp_path, recorded).close()
    reader = PieceReader(tmp_path, parquet_piece)
    before = read_all(reader, with_causes=with_causes)
    exported = export_closed_files(tmp_path)
    # A reader that is in the middle of a file when the file is exported.
    first = reader.read(0, with_causes=with_causes)
    for _ in exported:
        assert read_all(reader, with_causes=with_causes) == before
    assert len(history_files(tmp_path)) == 1
    assert read_all(reader, first.end - 1, with_causes=with_causes) == before[first.end - 1 :]
    for after in (5, len(before) // 2, len(before) - 1, len(before)):
        assert read_all(reader, after, with_causes=with_causes) == before[after:]


def test_file_that_is_exported_between_two_steps_of_a_reader_is_read_as_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = make(4)
    write(tmp_path, recorded).close()
    reader = PieceReader(tmp_path, parquet_piece)
    exported = export_closed_files(tmp_path)

    opened = pieces._File

    def open_late(path: Path) -> pieces._File:
        next(exported, None)
        return opened(path)

    monkeypatch.setattr(pieces, "_File", open_late)
    assert read_all(reader) == recorded.events()


def test_file_that_is_exported_while_files_are_listed_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, make(4)).close()
    reader = PieceReader(tmp_path)
    numbers = reader.first_events()
    exported = export_closed_files(tmp_path)

    def list_late(folder: Path) -> list[Path]:
        next(exported, None)
        return history_files(folder)

    monkeypatch.setattr(pieces, "history_files", list_late)
    for _ in numbers:
        assert reader.first_events() == numbers


def test_files_that_are_deleted_while_parquet_is_read_are_known_to_be_gone(tmp_path: Path) -> None:
    write(tmp_path, make(4)).close()
    list(export_closed_files(tmp_path))
    first = int(history_files(tmp_path)[0].stem, 16)

    def delete_all(*_: object) -> tuple[int, bytes]:
        for parquet in tmp_path.glob("events/*/*.parquet"):
            parquet.unlink()
        return first - 1, b""

    assert PieceReader(tmp_path, delete_all).read(first - 2, with_causes=True).first == first


def test_files_with_other_names_are_left_out(tmp_path: Path) -> None:
    recorded = make(4)
    write(tmp_path, recorded).close()
    (tmp_path / "copy.history").write_bytes(history_files(tmp_path)[0].read_bytes())
    day = tmp_path / "events" / "date=2026-11-21"
    day.mkdir(parents=True)
    (day / "mine.parquet").touch()
    reader = PieceReader(tmp_path)
    assert read_all(reader) == recorded.events()
    assert reader.next_event() == recorded.events()[-1]["event"] + 1
    assert reader.first_events()[0] == 1


@pytest.mark.timeout(60)
def test_links_that_lead_to_no_file_are_left_out(tmp_path: Path) -> None:
    """Fixed: a broker's thread looked for such a file for ever, and the deletion of old history failed."""
    recorded = make(4)
    write(tmp_path, recorded).close()
    exported = len(list(export_closed_files(tmp_path)))
    (tmp_path / "0000000000000003.history").symlink_to("away")
    (tmp_path / "7fffffffffffffff.history").symlink_to("7fffffffffffffff.history")
    (day,) = (tmp_path / "events").iterdir()
    (day / "0000000000000002.parquet").symlink_to("away")
    (day / "0000000000000004.parquet").symlink_to("0000000000000004.parquet")
    for name in ("date=1969-01-01", "date=1969-01-02"):
        (day.parent / name).symlink_to("date=1969-01-02")
    reader = PieceReader(tmp_path, parquet_piece)
    assert read_all(reader) == recorded.events()
    assert reader.next_event() == recorded.events()[-1]["event"] + 1
    assert read_all(PieceReader(tmp_path, parquet_piece), 2) == recorded.events()[2:]
    for folder in (tmp_path, tmp_path.parent):
        # The growing file, and the exported ones.
        assert len(_list_folder(folder)) == 1 + exported
    assert len(delete_old_files(tmp_path, bytes_max=0)) == exported


def test_link_to_a_history_file_is_read(tmp_path: Path) -> None:
    recorded = make(4)
    write(tmp_path, recorded).close()
    path = history_files(tmp_path)[1]
    path.rename(tmp_path / "moved")
    path.symlink_to("moved")
    assert read_all(PieceReader(tmp_path)) == recorded.events()


def test_parquet_file_that_is_deleted_since_it_was_listed_has_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: retention in just this moment ended a query that goes on without deleted events."""
    write(tmp_path, make(4)).close()
    list(export_closed_files(tmp_path))
    monkeypatch.setattr("truenext.history.parquet_piece.parquet_files", lambda *_: [tmp_path / "away.parquet"])
    assert parquet_piece(tmp_path, "0000000000000001", 1, True) == (1, b"")


def test_damaged_parquet_file_is_told_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, make(4)).close()
    list(export_closed_files(tmp_path))
    for path in tmp_path.glob("events/*/*.parquet"):
        path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(HistoryError, match=r"the history cannot be read: .*Parquet"):
        FolderHistory(tmp_path).piece(0)


def test_parquet_is_read_by_another_process_without_causes(tmp_path: Path) -> None:
    recorded = make(4)
    write(tmp_path, recorded).close()
    number = len(list(export_closed_files(tmp_path)))
    assert number > 3
    piece = PieceReader(tmp_path).read(0, with_causes=False)
    assert piece == PieceReader(tmp_path, parquet_piece).read(0, with_causes=False)
    assert piece.is_arrow and piece.first == 1


def test_piece_behind_deleted_events_begins_with_the_first_that_is_there(tmp_path: Path) -> None:
    recorded = make(5)
    write(tmp_path, recorded).close()
    files = history_files(tmp_path)
    for path in files[:2]:
        path.unlink()
    piece = PieceReader(tmp_path).read(3, with_causes=True)
    assert piece.first == events_of(piece)[0]["event"] == int(files[2].stem, 16)


def test_gap_of_a_crash_is_passed_over(tmp_path: Path) -> None:
    first, behind = make(6), make(7, run=2, first_event=GAP_EVENTS + 900)
    events = first.events() + behind.events()
    for each in (first, behind):
        write(tmp_path, each).close()
    reader = PieceReader(tmp_path)
    assert read_all(reader) == events
    for after in (len(first.events()), len(first.events()) + 77, GAP_EVENTS + 899):
        assert read_all(reader, after) == behind.events()


def test_damaged_chunk_is_passed_over(tmp_path: Path) -> None:
    recorded = make(8)
    write(tmp_path, recorded).close()
    path = history_files(tmp_path)[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    events = recorded.events()
    found = read_all(PieceReader(tmp_path))
    assert found != events and found[-1] == events[-1]
    assert all(each in events for each in found)
    assert len(events) - len(found) < 100


def test_torn_end_is_waited_for(tmp_path: Path) -> None:
    recorded = make(9)
    write(tmp_path, recorded).close()
    path = history_files(tmp_path)[-1]
    whole = path.read_bytes()
    reader = PieceReader(tmp_path)
    found: list[dict[str, Any]] = []
    for end in (*range(FILE.size - 1, len(whole), 29), len(whole)):
        path.write_bytes(whole[:end])
        found += read_all(reader, len(found))
    assert found == recorded.events()


def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, make(1)).close()
    path = history_files(tmp_path)[0]
    path.write_bytes(FILE.pack(b"TNXH", HISTORY_VERSION + 1, 1) + path.read_bytes()[FILE.size :])
    with pytest.raises(HistoryError, match=f"history version {HISTORY_VERSION + 1}"):
        PieceReader(tmp_path).read(0, with_causes=True)


def test_readers_beyond_those_that_are_remembered_read_the_same(tmp_path: Path) -> None:
    recorded = make(1)
    write(tmp_path, recorded).close()
    events = recorded.events()
    reader = PieceReader(tmp_path)
    afters = [0] * (pieces.CURSORS_MAX + 3)
    for after in range(0, len(events), 7):
        piece = reader.read(after, with_causes=True)
        number = random.Random(after).randrange(len(afters))
        found = [each for each in events_of(piece) if each["event"] > after]
        assert found == events[after : piece.end - 1]
        afters[number] = piece.end - 1
    assert len(reader._cursors) <= pieces.CURSORS_MAX
