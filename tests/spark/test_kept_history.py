"""Tests that this version reads the history of earlier versions, and their Parquet files; see
tests/integration/test_kept_files.py."""

from pathlib import Path

import pyarrow.parquet as pq

from tests.kept.unpacked import each_archive, unpack
from truenext.history.files import chunks_of_file, history_files
from truenext.history.table import arrow_table_of


@each_archive
def test_kept_history_and_its_parquet_have_the_same_events(archive: Path, tmp_path: Path) -> None:
    """C30.7."""
    kept = unpack(archive, tmp_path)
    tables = [arrow_table_of(chunks_of_file(path)) for path in history_files(kept / "data/history")]
    rows = sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["event"])
    files = [pq.ParquetFile(path).read() for path in sorted((kept / "parquet").rglob("*.parquet"))]
    in_parquet = sorted((row for table in files for row in table.to_pylist()), key=lambda row: row["event"])
    assert len(rows) > 1000
    assert [row["event"] for row in in_parquet] == [row["event"] for row in rows]
    assert in_parquet == [{name: row[name] for name in in_parquet[0]} for row in rows]
    kinds = {row["kind"] for row in rows}
    assert {"run-started", "accepted", "dispatched", "acknowledged", "dead-lettered", "returned"} <= kinds
