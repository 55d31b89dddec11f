"""Tests that a journal that lost its end is never taken for one that a crash tore."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract import cutting
from tests.contract.cutting import SCENES, SEGMENT_BYTES, fresh, segments, send, start_error
from tests.contract.simulated_disk import quick_folder
from tests.drawing import one_of


@one_of("scene", SCENES, ids=[scene.__name__ for scene in SCENES])
def test_lost_end_of_the_journal_is_detected_after(scene: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=quick_folder()) as folder:
        scene(Path(folder) / "data")


@pytest.mark.parametrize("name", ["new", "spare-0", "spare-0000000000000003"])
def test_a_file_that_a_crash_left_half_made_is_no_damage(tmp_path: Path, name: str) -> None:
    """A segment gets its name when it is whole; these have no batch in them."""
    disk = fresh(tmp_path)
    send(disk, 1, 2)
    disk.stop()
    disk.store.close()
    (tmp_path / "journal" / name).write_bytes(bytes(SEGMENT_BYTES // 2))
    assert cutting.findings(tmp_path) == []
    assert start_error(tmp_path) == ""


def test_a_segment_that_grew_costs_nothing(tmp_path: Path) -> None:
    disk = fresh(tmp_path)
    send(disk, 1, 2)
    disk.stop()
    disk.store.close()
    path = segments(tmp_path)[-1]
    path.write_bytes(path.read_bytes() + bytes(100))
    assert cutting.findings(tmp_path) == []
    assert start_error(tmp_path) == ""


def test_a_journal_that_is_gone_is_missed(tmp_path: Path) -> None:
    """No segment is checkpointed yet: the checkpoint alone looks like that of a store that was never used."""
    disk = fresh(tmp_path)
    send(disk, 1, 2)
    disk.stop()
    disk.store.close()
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    assert start_error(tmp_path).startswith(
        f"the journal in {tmp_path} is damaged: frames 1 to 4 are missing at its end; the checkpoint says that frame 4"
    )
    assert cutting.findings(tmp_path) == [
        "journal: frames 1 to 4 are missing at its end; the checkpoint says that frame 4 was durable"
    ]
