"""Tests that a named test notices each planted fault of a log in PostgreSQL that kills do not notice.

After a kill a log puts the rows back that only a folder has, rows that are compacted twice add up to the same, and few
messages have a mark when a folder is made anew.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import test_copies
from tests.contract.disk import Disk
from tests.contract.postgresql import test_compactor
from tests.contract.postgresql.rows import Rows
from tests.integration import planted_log_faults
from truenext.store.postgresql.layout import Connection


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Plant a fault until the end of the test."""
    monkeypatch.setattr(planted_log_faults, "replace", monkeypatch.setattr)
    planted_log_faults.plant(fault)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Disk]:
    with test_copies.new_copy(tmp_path) as disk:
        yield disk


def test_frame_before_row_is_noticed(copy: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "frame_before_row")
    with pytest.raises(AssertionError):
        test_copies.test_batch_that_the_log_did_not_get_is_not_in_the_folder(copy, monkeypatch)


def test_seed_without_marks_is_noticed(copy: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "seed_without_marks")
    with pytest.raises(AssertionError):
        test_copies.test_folder_made_from_the_log_has_attempts_and_causes(copy)


def test_position_behind_the_compacted_rows_is_noticed(tables: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "position_behind_the_compacted_rows")
    with pytest.raises(AssertionError):
        test_compactor.test_each_compaction_moves_the_position_to_the_last_row_it_compacted(Rows(tables))
