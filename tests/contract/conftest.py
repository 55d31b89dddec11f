from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.disk import KINDS, Disk


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(request.param, tmp_path / "data")
    yield disk
    disk.store.close()


@pytest.fixture
def embedded_disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk("embedded", tmp_path / "data")
    yield disk
    disk.store.close()


@pytest.fixture
def memory_disk(tmp_path: Path) -> Disk:
    return Disk("memory", tmp_path)
